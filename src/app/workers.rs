//! Starts the worker threads and sends them commands.

use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;

use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tokio::sync::watch;

use super::active::ActiveConfig;
use super::sockets::NewSockets;
use super::worker::{Command, DesiredState, Done, WorkerSetup};
use crate::observe::{Liveness, Metrics};
use crate::proxy::request_body;

/// Started worker threads.
pub struct WorkerThreads {
    pub commands: CommandSender,
    pub threads: Vec<JoinHandle<()>>,
    /// One for the event loop of each worker.
    pub liveness: Vec<Liveness>,
}

/// Starts `count` workers. They drain when `drain` becomes true, and close all open connections when `force`
/// does.
pub fn start(
    count: usize,
    metrics: &Arc<Metrics>,
    drain: &watch::Receiver<bool>,
    force: &watch::Receiver<bool>,
) -> io::Result<WorkerThreads> {
    let bodies = request_body::budget(metrics);
    let mut started = WorkerThreads {
        commands: CommandSender(Vec::new()),
        threads: Vec::new(),
        liveness: Vec::new(),
    };
    for index in 0..count {
        let (sender, commands) = unbounded_channel();
        let liveness = Liveness::new(&format!("worker {index}"));
        let worker = WorkerSetup {
            metrics: Arc::clone(metrics),
            bodies: Arc::clone(&bodies),
            workers: count,
            drain: drain.clone(),
            force: force.clone(),
            liveness: liveness.clone(),
        };
        let thread = std::thread::Builder::new().name(format!("worker-{index}"));
        started.threads.push(thread.spawn(move || worker.run(commands))?);
        started.commands.0.push(sender);
        started.liveness.push(liveness);
    }
    Ok(started)
}

/// Sends commands to all workers. A worker whose thread has panicked receives none; `/livez` reports it as
/// stalled.
pub struct CommandSender(Vec<UnboundedSender<Command>>);

impl CommandSender {
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// Makes every worker serve `active`. `new_sockets` are the sockets that each worker does not have yet. The
    /// returned future completes when all workers have applied the configuration.
    pub fn apply(
        &self,
        active: &ActiveConfig,
        new_sockets: NewSockets,
    ) -> impl Future<Output = ()> + use<> {
        let listen_addresses = active.listen_addresses();
        let mut new_sockets = new_sockets.into_iter();
        self.send(&mut |done| {
            let state = DesiredState {
                listeners: active.listeners.clone(),
                new_sockets: new_sockets.next().unwrap_or_default(),
                access: active.config.log.access,
                drain_timeout: active.config.shutdown.drain_timeout,
                listen_addresses: Arc::clone(&listen_addresses),
            };
            Command::Apply(state, done)
        })
    }

    /// Makes every worker stop accepting. The returned future completes when all have stopped.
    pub fn release_sockets(&self) -> impl Future<Output = ()> + use<> {
        self.send(&mut Command::ReleaseSockets)
    }

    fn send(&self, command: &mut dyn FnMut(Done) -> Command) -> impl Future<Output = ()> + use<> {
        let (done, mut all_done) = unbounded_channel();
        for worker in &self.0 {
            let _ = worker.send(command(done.clone()));
        }
        drop(done);
        // The channel closes when all workers have dropped their senders.
        async move { while all_done.recv().await.is_some() {} }
    }
}

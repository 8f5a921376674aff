//! Starts the worker threads and sends them commands.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tokio::sync::watch;

use super::active::ActiveConfig;
use super::drain_signal::DrainSignal;
use super::sockets::NewSockets;
use super::worker::{Command, Completion, Role, WorkerSetup};
use crate::observe::{Liveness, Metrics};
use crate::proxy::identity_lane::IdentityLane;
use crate::proxy::request_body;

/// Started worker threads.
pub struct WorkerThreads {
    pub commands: CommandSender,
    pub threads: Vec<JoinHandle<()>>,
    /// One for the event loop of each worker.
    pub liveness: Vec<Liveness>,
}

/// Starts `count` workers that accept connections, and the identity lane if `identity_lane` is true. All drain when
/// `drain` signals it, and close all open connections when `force` becomes true.
pub fn start(
    count: usize,
    identity_lane: bool,
    metrics: &Arc<Metrics>,
    drain: &DrainSignal,
    force: &watch::Receiver<bool>,
) -> io::Result<WorkerThreads> {
    let bodies = request_body::budget();
    let mut started = WorkerThreads {
        commands: CommandSender { identity_lane: None, workers: Vec::new() },
        threads: Vec::new(),
        liveness: Vec::new(),
    };
    let start = |started: &mut WorkerThreads, liveness_name: &str, name: String, role: Role| {
        let (sender, commands) = unbounded_channel();
        let liveness = Liveness::new(liveness_name);
        let worker = WorkerSetup {
            metrics: Arc::clone(metrics),
            bodies: Arc::clone(&bodies),
            workers: count,
            role,
            drain: drain.clone(),
            force: force.clone(),
            liveness: liveness.clone(),
        };
        let thread = std::thread::Builder::new().name(name);
        started.threads.push(thread.spawn(move || worker.run(commands))?);
        started.liveness.push(liveness);
        io::Result::Ok(sender)
    };
    let mut lane = None;
    if identity_lane {
        let (sender, connections) = unbounded_channel();
        lane = Some(IdentityLane::new(sender));
        let role = Role::IdentityLane(connections);
        let commands = start(&mut started, "identity lane", "identity-lane".to_owned(), role)?;
        started.commands.identity_lane = Some(commands);
    }
    for index in 0..count {
        let role = Role::Accept(lane.clone());
        let name = format!("worker-{index}");
        let commands = start(&mut started, &format!("worker {index}"), name, role)?;
        started.commands.workers.push(commands);
    }
    Ok(started)
}

/// Sends commands to all workers. A worker whose thread has panicked receives none; `/livez` reports it as
/// stalled.
pub struct CommandSender {
    identity_lane: Option<UnboundedSender<Command>>,
    workers: Vec<UnboundedSender<Command>>,
}

impl CommandSender {
    /// The number of workers that accept connections.
    pub fn count(&self) -> usize {
        self.workers.len()
    }

    /// Whether the identity lane runs.
    pub fn has_identity_lane(&self) -> bool {
        self.identity_lane.is_some()
    }

    /// Makes every worker serve `active`. `new_sockets` are the sockets that each worker does not have yet. The
    /// returned future completes when all workers have applied the configuration and have closed their other sockets.
    pub fn apply(
        &self,
        active: &ActiveConfig,
        new_sockets: NewSockets,
    ) -> impl Future<Output = ()> + use<> {
        // The identity lane, which has no sockets, is the first.
        let no_sockets = self.identity_lane.iter().map(|_| HashMap::new());
        let mut new_sockets = no_sockets.chain(new_sockets);
        self.send(&mut |done| {
            let new_sockets = new_sockets.next().unwrap_or_default();
            Command::Apply(active.desired_state(new_sockets), done)
        })
    }

    /// Makes every worker stop accepting. The returned future completes when all have stopped.
    pub fn release_sockets(&self) -> impl Future<Output = ()> + use<> {
        self.send(&mut Command::ReleaseSockets)
    }

    /// Makes the drain of every worker take no longer than `limit`. The returned future completes when all know it.
    pub fn limit_drain(&self, limit: Duration) -> impl Future<Output = ()> + use<> {
        self.send(&mut |done| Command::LimitDrain(limit, done))
    }

    /// Makes every worker accept what its accept queues hold and close its sockets. The returned future completes when
    /// all are closed.
    pub fn close_sockets(&self) -> impl Future<Output = ()> + use<> {
        self.send(&mut Command::CloseSockets)
    }

    fn send(
        &self,
        command: &mut dyn FnMut(Completion) -> Command,
    ) -> impl Future<Output = ()> + use<> {
        let (done, mut all_done) = unbounded_channel();
        for worker in self.identity_lane.iter().chain(&self.workers) {
            let _ = worker.send(command(done.clone()));
        }
        drop(done);
        // The channel closes when all workers have dropped their senders.
        async move { while all_done.recv().await.is_some() {} }
    }
}

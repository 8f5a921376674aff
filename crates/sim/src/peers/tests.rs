//! Clients against a small apiserver, on pipes in memory and a paused clock.

mod clients;
mod server;
mod transport;

use std::time::Duration;

use self::server::Rig;
use super::observer::{Observer, Record, Stop, stop_signal};
use super::peer::Peer;
use super::transport::ClientOptions;
use crate::checker::{ClientId, check};

/// Runs clients for a time, stops them, and checks what they saw.
struct Clients {
    rig: Rig,
    observer: Observer,
    stop: Stop,
    stopper: super::observer::Stopper,
    tasks: tokio::task::JoinSet<()>,
    count: u16,
    group: Option<u32>,
}

impl Clients {
    fn new() -> Self {
        fastrand::seed(7);
        let (stopper, stop) = stop_signal();
        let (rig, observer) = (Rig::start(), Observer::new());
        let (tasks, group) = (tokio::task::JoinSet::new(), Some(0));
        Self { rig, observer, stop, stopper, tasks, count: 0, group }
    }

    fn peer(&mut self) -> Peer {
        let id = ClientId { number: self.count, group: self.group };
        self.count += 1;
        let client = self.rig.client(ClientOptions::default());
        Peer { id, client, observer: self.observer.clone(), stop: self.stop.clone() }
    }

    fn spawn<F: Future<Output = ()> + 'static>(&mut self, run: impl FnOnce(Peer) -> F) {
        let peer = self.peer();
        self.tasks.spawn_local(run(peer));
    }

    async fn pass(&self, time: Duration) {
        tokio::time::sleep(time).await;
    }

    /// Stops the clients, and adds what the checker finds.
    async fn finish(mut self) -> (Record, Rig) {
        self.stopper.stop();
        while let Some(ended) = self.tasks.join_next().await {
            ended.unwrap();
        }
        let mut record = self.observer.take();
        let history = self.rig.server.history.borrow();
        check(&history, &record.observations, &mut record.findings);
        drop(history);
        (record, self.rig)
    }
}

/// Runs a test in a `LocalSet` on a paused clock.
fn run(test: impl Future<Output = ()>) {
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = runtime.enable_time().start_paused(true).build().unwrap();
    tokio::task::LocalSet::new().block_on(&runtime, test);
}

/// Lets time pass on the paused clock.
async fn pass(time: Duration) {
    tokio::time::sleep(time).await;
}

fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

//! Virtual time: the present, the events that follow, and the random numbers of a run.

use std::time::{Duration, Instant};

use crate::apiserver::ServerTimer;
use crate::client::ClientTimer;
use crate::net::{NetEvent, ProcessId, Schedule};
use crate::node::NodeTimer;
use crate::queue::Queue;
use crate::trace::{Entry, Trace};

/// A future event.
#[derive(Debug, Clone, Copy)]
pub enum Event {
    /// Of the network.
    Net(NetEvent),
    /// A timer of a process. It waits while the process is stopped, and is lost if the process is killed.
    Timer(ProcessId, Timer),
    /// A fault of the scenario begins or ends.
    Fault(usize),
    /// The watch cache of a server receives the store's revision.
    Replicate {
        /// The server.
        server: usize,
        /// The revision.
        revision: u64,
    },
}

/// A timer of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)] // one for each kind of process
pub enum Timer {
    Server(ServerTimer),
    Node(NodeTimer),
    Client(ClientTimer),
}

/// The time of a run, its queue of events, its random numbers and its log.
#[derive(Debug)]
pub struct Scheduler {
    /// The present.
    pub now: Instant,
    /// The random numbers.
    pub rng: fastrand::Rng,
    /// The log.
    pub trace: Trace,
    start: Instant,
    queue: Queue<Event>,
}

impl Scheduler {
    /// The beginning of a run.
    pub fn new(seed: u64) -> Self {
        // The base of all times of the run. Only differences to it are used, so no result depends on it.
        #[allow(clippy::disallowed_methods)]
        let start = Instant::now();
        Self {
            now: start,
            rng: fastrand::Rng::with_seed(seed),
            trace: Trace::default(),
            start,
            queue: Queue::default(),
        }
    }

    /// The time since the beginning.
    pub fn elapsed(&self) -> Duration {
        self.now.saturating_duration_since(self.start)
    }

    /// The time of the run at which `elapsed` has passed.
    pub fn time_at(&self, elapsed: Duration) -> Instant {
        self.start + elapsed
    }

    /// Adds an event.
    pub fn at(&mut self, at: Instant, event: Event) {
        self.queue.push(at.max(self.now), event);
    }

    /// Adds an event that follows after a while.
    pub fn after(&mut self, pause: Duration, event: Event) {
        self.queue.push(self.now + pause, event);
    }

    /// Starts a timer.
    pub fn timer(&mut self, at: Instant, process: ProcessId, timer: Timer) {
        self.at(at, Event::Timer(process, timer));
    }

    /// Goes on to the next event, if there is one until `until`.
    pub fn next(&mut self, until: Instant) -> Option<Event> {
        let (at, event) = self.queue.pop(until)?;
        self.now = at;
        Some(event)
    }

    /// Number of events so far.
    pub fn events(&self) -> u64 {
        self.queue.added()
    }

    /// Writes to the log.
    pub fn record(&mut self, entry: Entry) {
        let at = self.elapsed();
        self.trace.record(at, entry);
    }

    /// A random part of a duration.
    pub fn random_part(&mut self, of: Duration) -> Duration {
        of.mul_f64(self.rng.f64())
    }
}

impl Schedule for Scheduler {
    fn now(&self) -> Instant {
        self.now
    }

    fn rng(&mut self) -> &mut fastrand::Rng {
        &mut self.rng
    }

    fn queue(&mut self, at: Instant, event: NetEvent) {
        self.at(at, Event::Net(event));
    }

    fn record(&mut self, entry: Entry) {
        self.record(entry);
    }
}

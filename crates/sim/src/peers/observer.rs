//! Records what clients see, for the promises of a scenario and for the checker.

use std::cell::{Cell, Ref, RefCell, RefMut};
use std::rc::Rc;
use std::time::Instant;

use jackstay_sys::clock;
use tokio::sync::Notify;

use crate::checker::{Moment, Observation};
use crate::invariants::Findings;

/// Records what the clients of a run see. Clones share the record.
#[derive(Debug, Clone, Default)]
pub struct Observer(Rc<RefCell<Record>>);

/// What the clients of a run have seen.
#[derive(Debug, Default)]
pub struct Record {
    /// Counts and times. The checker adds those of events.
    pub findings: Findings,
    /// What the clients saw, in the order in which they saw it.
    pub observations: Vec<Observation>,
    /// The log for people, if it is on.
    pub lines: Option<Vec<(Instant, String)>>,
    /// The number of moments of the run.
    moments: Rc<Cell<u64>>,
}

impl Observer {
    /// A record without a log.
    pub fn new() -> Self {
        Self::default()
    }

    /// A record of the same run, whose moments are in one order with those of this one.
    pub(crate) fn beside(&self) -> Self {
        let moments = Rc::clone(&self.record().moments);
        Self(Rc::new(RefCell::new(Record { moments, ..Record::default() })))
    }

    /// Turns the log on.
    pub fn log_lines(&self) {
        self.0.borrow_mut().lines = Some(Vec::new());
    }

    /// What was recorded.
    pub fn record(&self) -> Ref<'_, Record> {
        self.0.borrow()
    }

    /// Takes what was recorded.
    pub fn take(&self) -> Record {
        std::mem::take(&mut *self.0.borrow_mut())
    }

    pub(crate) fn findings(&self) -> RefMut<'_, Findings> {
        RefMut::map(self.0.borrow_mut(), |record| &mut record.findings)
    }

    pub(super) fn observe(&self, observation: Observation) {
        self.0.borrow_mut().observations.push(observation);
    }

    /// The present, after all moments before.
    pub(crate) fn moment(&self) -> Moment {
        let moments = &self.0.borrow().moments;
        moments.set(moments.get() + 1);
        Moment { order: moments.get(), at: clock::now() }
    }

    /// Whether the log is on.
    pub(crate) fn is_logging(&self) -> bool {
        self.0.borrow().lines.is_some()
    }

    /// Adds a line to the log.
    pub(crate) fn log(&self, line: impl FnOnce() -> String) {
        if let Some(lines) = &mut self.0.borrow_mut().lines {
            lines.push((clock::now(), line()));
        }
    }
}

/// Ends clients. Dropping it ends them, too.
#[derive(Debug)]
pub struct Stopper(Stop);

/// Whether a client has to end.
#[derive(Debug, Clone)]
pub struct Stop(Rc<StopState>);

#[derive(Debug)]
struct StopState {
    stopped: Cell<bool>,
    waiting: Notify,
}

/// A signal that ends clients.
pub fn stop_signal() -> (Stopper, Stop) {
    let state = StopState { stopped: Cell::new(false), waiting: Notify::new() };
    let stop = Stop(Rc::new(state));
    (Stopper(stop.clone()), stop)
}

impl Stopper {
    /// Ends the clients: each records what it has open, and returns.
    pub fn stop(&self) {
        let Stop(state) = &self.0;
        state.stopped.set(true);
        // In the order in which they began to wait.
        state.waiting.notify_waiters();
    }
}

impl Drop for Stopper {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Stop {
    /// Waits for the signal.
    pub async fn stopped(&self) {
        let signal = self.0.waiting.notified();
        if !self.0.stopped.get() {
            signal.await;
        }
    }

    /// Whether the signal was given.
    pub fn is_stopped(&self) -> bool {
        self.0.stopped.get()
    }
}

//! What concerns all classes of a pool: its phase, the total outage, and when it has to run again.

use std::time::{Duration, Instant};

use super::StreamRefusal;
use super::endpoints::{self, EndpointRow, FANOUT};
use super::lane::Lane;
use crate::credential_class::CredentialClass;
use crate::outage::{Outage, Reachability};

/// Mean interval of maintenance when nothing changes.
const TICK: Duration = Duration::from_millis(200);
/// Number of watches of one pool that are held, above which a new request is not held. A held request costs a
/// few KiB.
const MAX_HELD_WATCHES: usize = 10_000;

/// The classes whose connections a pool keeps while no request uses them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WarmClasses {
    /// Those of all configured identities.
    Identities,
    /// None: another worker serves the clients with a configured identity.
    None,
}

/// The requests that a pool serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// Those of clients.
    Clients(WarmClasses),
    /// jackstay's own requests.
    Internal,
}

/// What a pool still does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// Everything.
    Serving,
    /// It opens connections only for requests that wait, because its upstream was removed from the configuration.
    Retired,
    /// Its task has ended: it opens no connections, and no request waits.
    Stopped,
    /// Its connections are closed, too.
    Closed,
}

/// The state of a pool that does not belong to one of its classes.
#[derive(Debug, Clone, Copy)]
pub struct PoolState {
    purpose: Purpose,
    phase: Phase,
    outage: Outage,
    wake_at: Option<Instant>,
}

impl PoolState {
    /// The state of a new pool.
    pub fn new(purpose: Purpose) -> Self {
        Self { purpose, phase: Phase::Serving, outage: Outage::default(), wake_at: None }
    }

    /// Whether the pool keeps connections of all configured identities.
    pub fn keeps_identities(&self) -> bool {
        self.purpose == Purpose::Clients(WarmClasses::Identities)
    }

    /// Whether connections of the class are kept while no request uses them.
    pub fn is_warm(&self, class: CredentialClass, lane: Lane) -> bool {
        let is_identity = matches!(class, CredentialClass::Identity(_));
        self.keeps_identities() && is_identity && lane == Lane::Requests
    }

    /// Number of endpoints to which the class keeps connections; `None` for all.
    pub fn fanout(&self, class: CredentialClass, lane: Lane) -> Option<usize> {
        let one = self.purpose == Purpose::Internal || lane == Lane::Heartbeats;
        let fanout = if one { 1 } else { FANOUT };
        (!self.is_warm(class, lane)).then_some(fanout)
    }

    /// Whether a total outage is in progress.
    pub fn is_total_outage(&self) -> bool {
        self.outage.is_active()
    }

    /// Updates the total outage. When it ends, returns why held watches can resume, for the log.
    pub fn observe_endpoints(
        &mut self,
        rows: &[EndpointRow],
        now: Instant,
    ) -> Option<&'static str> {
        self.outage.observe(endpoints::reachability(rows), now)
    }

    /// Whether no endpoint is usable. Then each endpoint gets one connect attempt at a time.
    pub fn none_usable(rows: &[EndpointRow]) -> bool {
        endpoints::reachability(rows) == Reachability::Unreachable
    }

    /// Whether a request may wait for a stream, if the credential of its class is loaded (`has_credential`).
    ///
    /// # Errors
    /// It may not, because the wait could end only with an error.
    pub fn may_wait(&self, has_credential: bool) -> Result<(), StreamRefusal> {
        match self.phase {
            Phase::Closed => Err(StreamRefusal::Closed),
            Phase::Stopped => Err(StreamRefusal::Stopped),
            Phase::Serving | Phase::Retired if has_credential => Ok(()),
            Phase::Serving | Phase::Retired => Err(StreamRefusal::NoCredential),
        }
    }

    /// Whether one more new watch may be held, if `held` are. The limit does not apply to a running watch that loses
    /// its stream.
    pub fn may_hold(held: usize) -> bool {
        held < MAX_HELD_WATCHES
    }

    /// The upstream was removed from the configuration.
    pub fn retire(&mut self) {
        if self.phase == Phase::Serving {
            self.phase = Phase::Retired;
        }
    }

    /// Whether connections are opened only for requests that wait.
    pub fn is_retired(&self) -> bool {
        self.phase != Phase::Serving
    }

    /// The task of the pool has ended. Returns how the requests that wait are refused.
    pub fn stop(&mut self) -> StreamRefusal {
        if self.phase == Phase::Closed {
            return StreamRefusal::Closed;
        }
        self.phase = Phase::Stopped;
        StreamRefusal::Stopped
    }

    /// The connections are closed. Returns how the requests that wait are refused.
    pub fn close(&mut self) -> StreamRefusal {
        self.phase = Phase::Closed;
        StreamRefusal::Closed
    }

    /// Whether the connections are closed.
    pub fn is_closed(&self) -> bool {
        self.phase == Phase::Closed
    }

    /// Makes the pool run at this time, or earlier.
    pub fn wake_at(&mut self, at: Instant) {
        self.wake_at = Some(self.wake_at.map_or(at, |wake_at| wake_at.min(at)));
    }

    /// When the pool runs next if nothing changes: after [`TICK`], ±25 %, or earlier for the first deadline of a
    /// request that waits or for the end of a pause between connects.
    pub fn next_run(&mut self, now: Instant, rng: &mut fastrand::Rng) -> Instant {
        let tick = now + TICK.mul_f64(0.75 + rng.f64() / 2.0);
        self.wake_at.take().map_or(tick, |wake_at| wake_at.min(tick))
    }
}

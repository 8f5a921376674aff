//! What happens to a request that waits for a stream.

use std::time::{Duration, Instant};

use super::endpoints::EndpointRow;
use super::lane::Lane;
use super::waiters::Waiter;

/// How long a request waits for a usable connection while no connection is live, counted from the loss of
/// its previous connection if it had one. So the client receives its response within 1.5 s.
pub const UNAVAILABLE_AFTER: Duration = Duration::from_millis(1_200);
/// How long a request waits for a connection to a ready endpoint while connections to others are live: three round trips
/// over the longest distances. Connections end by GOAWAY while others open, and an endpoint that is not ready may refuse
/// the request, or let it hang.
pub const READY_AFTER: Duration = Duration::from_secs(1);
/// How long a request waits for a free stream while all live connections are full.
pub const EXHAUSTED_AFTER: Duration = Duration::from_secs(1);

/// Why a request gets no stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StreamRefusal {
    /// No endpoint can be reached.
    Unreachable,
    /// Connections are live, but have no free stream.
    Exhausted,
    /// The credential of the class is not loaded.
    NoCredential,
    /// The upstream was removed from the configuration.
    Closed,
    /// The task of the pool has ended.
    Stopped,
}

/// What decides about the requests that wait, besides the connections.
#[derive(Debug, Clone, Copy)]
pub struct Situation<'a> {
    /// The endpoints of the set.
    pub endpoints: &'a [EndpointRow],
    /// Whether a total outage is in progress.
    pub is_outage: bool,
    /// Number of connections to an endpoint that may be opened ([`super::limits::max_connections`]).
    pub max_connections: usize,
    /// The time.
    pub now: Instant,
}

/// What happens to a request that waits.
pub(super) enum Decision {
    Answer(Result<usize, StreamRefusal>),
    /// It waits until its deadline, and the next one is considered.
    Wait(Instant),
    /// It waits until its deadline, and so do all behind it.
    Stop(Instant),
}

/// The streams of a class, as far as they decide about every request that waits.
#[derive(Debug, Clone, Copy)]
pub(super) struct Streams {
    /// Whether a connection is live.
    pub(super) is_connected: bool,
    /// Whether a live connection has a free stream.
    pub(super) has_free: bool,
    /// Since when a connect to every endpoint has failed; `None` while one is in progress.
    pub(super) all_failed_at: Option<Instant>,
}

/// Decides about a request that waits, by the table of [`super`]. `find` finds a connection for it, with `true` also
/// among suspect ones. `awaits_ready` is [`super::Class::awaits_ready`] for the connection that is found.
pub(super) fn decide<W>(
    waiter: &Waiter<W>,
    streams: Streams,
    situation: &Situation<'_>,
    find: &mut dyn FnMut(bool) -> Option<usize>,
    awaits_ready: &dyn Fn(usize) -> bool,
) -> Decision {
    let Streams { is_connected, has_free, all_failed_at } = streams;
    if waiter.required.may_be_held && situation.is_outage {
        return Decision::Answer(Err(StreamRefusal::Unreachable));
    }
    if has_free && let Some(index) = find(false) {
        if awaits_ready(index) {
            return Decision::Wait(waiter.start + READY_AFTER);
        }
        return Decision::Answer(Ok(index));
    }
    let without_since = waiter.without_since();
    let deadline = if is_connected {
        waiter.start + EXHAUSTED_AFTER
    } else {
        without_since + UNAVAILABLE_AFTER
    };
    let have_all_failed = !is_connected && all_failed_at.is_some_and(|at| at > without_since);
    if have_all_failed || situation.now >= deadline {
        // The suspicion may be wrong, so a suspect connection is better than an error.
        let suspect = if waiter.required.live_only { None } else { find(true) };
        return Decision::Answer(suspect.ok_or(unavailable(is_connected)));
    }
    // Those behind it have later deadlines, except behind a heartbeat, and nothing else can change for them.
    if is_connected && !has_free && waiter.required.lane == Lane::Requests {
        Decision::Stop(deadline)
    } else {
        Decision::Wait(deadline)
    }
}

/// The error of a request that waits no longer.
pub(super) fn unavailable(is_connected: bool) -> StreamRefusal {
    if is_connected { StreamRefusal::Exhausted } else { StreamRefusal::Unreachable }
}

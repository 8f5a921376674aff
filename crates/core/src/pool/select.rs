//! Which connection takes a request.
//!
//! Only live connections with a free stream take one. The best by these criteria do, the first one counting most:
//!
//! | criterion | best |
//! |---|---|
//! | state of the endpoint | in the order of [`EndpointState`]: ready, connecting, degraded, … |
//! | the API group of the request fails at the endpoint | no |
//! | the request failed on this connection | no |
//! | the endpoint refused the request | no |
//! | version of the endpoint | as the caller ranks it ([`Preference::version`]); after a failure by silence only for a watch, because recently received bytes matter more |
//! | the endpoint is a fallback | no |
//! | its watch cache is known to have reached the wanted version | yes |
//! | warning signs | none |
//! | after a failure by silence, if a connection has received bytes since those of the failed one: bytes received | within [`RECENT_RECEIVE_WINDOW`] of the newest of those that are left |
//! | after a failure by silence: the endpoint | another one: the process behind the connection may have stopped |
//! | after a failure by silence: bytes received | within [`RECENT_RECEIVE_WINDOW`] of the newest of those that are left |
//!
//! Of several, the less loaded of two random ones does ([`balance`]). A request that has waited for as long as it may
//! also uses a suspect connection, unless that is silent: on a silent connection a write would have an unknown outcome,
//! and a read would fail later.
//!
//! Watches may take [`WATCH_SHARE`] of the streams of as many connections to an endpoint as may be opened.

use std::time::{Duration, Instant};

use super::lane::Lane;
use crate::balance;
use crate::connection::ConnectionState;
use crate::endpoint_state::EndpointState;

/// After a connection did not respond, a retry uses only connections whose last byte arrived at most this
/// long before the newest byte of any candidate.
pub const RECENT_RECEIVE_WINDOW: Duration = Duration::from_millis(100);
/// Share of an endpoint's streams that watches may take. The others are reserved for short requests, such as
/// lease updates.
pub const WATCH_SHARE: f64 = 0.9;

/// Names an endpoint. Two endpoints that exist at the same time have different keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct EndpointKey(pub usize);

/// Names a connection. Two connections that exist at the same time have different keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ConnectionKey(pub usize);

/// A connection of a class, as far as requests distinguish it.
#[derive(Debug, Clone, Copy)]
pub struct Candidate {
    /// The connection.
    pub connection: ConnectionKey,
    /// Its endpoint.
    pub endpoint: EndpointKey,
    /// Its state.
    pub state: ConnectionState,
    /// Whether its PING has been unanswered for so long that a request would probably get no response.
    pub is_silent: bool,
    /// The state of its endpoint.
    pub endpoint_state: EndpointState,
    /// Whether its endpoint is a fallback.
    pub is_fallback: bool,
    /// Whether new requests should prefer another connection, because responses are late here.
    pub has_warning: bool,
    /// Streams that can be opened now.
    pub free_streams: usize,
    /// Limit of streams.
    pub stream_limit: usize,
    /// Open streams that are watches.
    pub watches: usize,
    /// When bytes last arrived.
    pub last_received: Instant,
    /// Share of its usual picks that its endpoint gets, in 0..=1 ([`balance::slow_start`]).
    pub share: f64,
}

/// What a request requires of the connection on which it gets a stream.
#[derive(Debug, Clone, Default)]
pub struct StreamRequirements {
    /// Whether the request is a watch, which keeps its stream for minutes.
    pub long_running: bool,
    /// Whether it is a heartbeat, which waits before all others.
    pub lane: Lane,
    /// Whether the caller holds the watch during a total outage. Then it gets an error at once.
    pub may_be_held: bool,
    /// Whether suspect connections are excluded, because the request already waits on one.
    pub live_only: bool,
    /// How the request failed before, if it did.
    pub previous_failure: Option<PreviousFailure>,
    /// Endpoints that must not be used.
    pub excluded: Vec<EndpointKey>,
    /// Connections that must not be used, although others to their endpoints may be. Another one is opened if there is
    /// none.
    pub excluded_connections: Vec<ConnectionKey>,
    /// When the request lost its previous connection, if it had one.
    pub without_connection_since: Option<Instant>,
}

impl StreamRequirements {
    /// Whether a request with these requirements can use any stream that another request can use.
    pub(super) fn is_unrestricted(&self) -> bool {
        !self.long_running && self.excluded.is_empty() && self.excluded_connections.is_empty()
    }
}

/// How a request failed on an earlier connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PreviousFailure {
    /// The connection, to this endpoint, did not respond or was lost. Other connections may have failed with it, so those
    /// that received bytes recently are preferred, whatever their endpoint. Among them, those to another endpoint are.
    Silence(ConnectionKey, EndpointKey),
    /// The endpoint of the connection refused the request, so another endpoint is preferred.
    Refusal(ConnectionKey, EndpointKey),
}

/// What the caller knows of a candidate for one request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Preference {
    /// Whether the API group of the request fails at the endpoint ([`crate::group_health`]).
    pub group_fails: bool,
    /// How well the version of the endpoint suits the request; lower is better.
    pub version: u8,
    /// Whether the watch cache of the endpoint is not known to have reached the version that the request asks for.
    pub is_behind: bool,
}

/// For which connections of a class [`select`] looks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Scope {
    /// Includes suspect connections that are not silent.
    pub allow_suspect: bool,
    /// Number of connections to an endpoint that may be opened ([`super::limits::max_connections`]). Only read for
    /// watches.
    pub max_connections: usize,
}

/// The index of the connection that takes the request, by the table of this module. `preference` and `cost` are
/// asked for the candidate with an index; `cost` only for the two that are compared, because it takes an exponential
/// function.
pub fn select(
    table: &[Candidate],
    required: &StreamRequirements,
    scope: Scope,
    preference: impl Fn(usize) -> Preference,
    cost: impl Fn(usize) -> f64,
    rng: &mut fastrand::Rng,
) -> Option<usize> {
    let rank_of = |index: usize| {
        let candidate = &table[index];
        may_take(candidate, table, required, scope)
            .then(|| rank(candidate, required, preference(index)))
    };
    let best = (0..table.len()).filter_map(rank_of).min()?;
    let Some(PreviousFailure::Silence(connection, endpoint)) = required.previous_failure else {
        let ranked = (0..table.len()).filter(|&index| rank_of(index) == Some(best));
        return balance::pick_by_share(ranked, rng, |&i| cost(i), |&i| table[i].share);
    };
    let ranked: Vec<_> = (0..table.len()).filter(|&index| rank_of(index) == Some(best)).collect();
    let candidates = after_silence(table, ranked, connection, endpoint);
    balance::pick_by_share(candidates.into_iter(), rng, |&i| cost(i), |&i| table[i].share)
}

/// The candidates that take a request after this connection to this endpoint did not respond, by the last three rows
/// of the table of this module.
fn after_silence(
    table: &[Candidate],
    mut candidates: Vec<usize>,
    connection: ConnectionKey,
    endpoint: EndpointKey,
) -> Vec<usize> {
    let failed = table.iter().find(|candidate| candidate.connection == connection);
    let shows_life = |index: &usize| {
        failed.is_some_and(|failed| table[*index].last_received > failed.last_received)
    };
    let keep_recent = |candidates: &mut Vec<usize>| {
        let newest = candidates.iter().map(|&index| table[index].last_received).max();
        if let Some(since) = newest.and_then(|newest| newest.checked_sub(RECENT_RECEIVE_WINDOW)) {
            candidates.retain(|&index| table[index].last_received >= since);
        }
    };
    if candidates.iter().any(shows_life) {
        keep_recent(&mut candidates);
    }
    let is_other = |index: &usize| table[*index].endpoint != endpoint;
    if candidates.iter().any(is_other) {
        candidates.retain(is_other);
    }
    keep_recent(&mut candidates);
    candidates
}

/// Whether the candidate may take the request.
fn may_take(
    candidate: &Candidate,
    table: &[Candidate],
    required: &StreamRequirements,
    scope: Scope,
) -> bool {
    let is_alive = match candidate.state {
        ConnectionState::Live => true,
        ConnectionState::Suspect => scope.allow_suspect && !candidate.is_silent,
        ConnectionState::Draining | ConnectionState::Unresponsive | ConnectionState::Dead => false,
    };
    is_alive
        && candidate.free_streams > 0
        && !required.excluded.contains(&candidate.endpoint)
        && !required.excluded_connections.contains(&candidate.connection)
        && (!required.long_running
            || leaves_streams_for_requests(candidate, table, scope.max_connections))
}

/// Whether a watch may take a stream of the candidate's endpoint.
fn leaves_streams_for_requests(
    candidate: &Candidate,
    table: &[Candidate],
    max_connections: usize,
) -> bool {
    let to_endpoint = table.iter().filter(|other| other.endpoint == candidate.endpoint);
    let watches: usize = to_endpoint.map(|other| other.watches).sum();
    let capacity = max_connections * candidate.stream_limit;
    (watches as f64) < (capacity as f64 * WATCH_SHARE).max(1.0)
}

/// The criteria of the table of this module but the last. Lower is better.
fn rank(
    candidate: &Candidate,
    required: &StreamRequirements,
    preference: Preference,
) -> (EndpointState, bool, bool, bool, u8, bool, bool, bool) {
    let (failed_on, refused_by, ignores_version) = match required.previous_failure {
        None => (None, None, false),
        Some(PreviousFailure::Silence(connection, _)) => {
            (Some(connection), None, !required.long_running)
        }
        Some(PreviousFailure::Refusal(connection, by)) => (Some(connection), Some(by), false),
    };
    (
        candidate.endpoint_state,
        preference.group_fails,
        failed_on == Some(candidate.connection),
        refused_by == Some(candidate.endpoint),
        if ignores_version { 0 } else { preference.version },
        candidate.is_fallback,
        preference.is_behind,
        candidate.has_warning,
    )
}

/// Whether the live connections to the endpoint of the candidate with this index have fewer free streams than a
/// tenth of the limit of one connection. Then another connection is opened before a request has to wait.
pub fn is_nearly_full(table: &[Candidate], index: usize) -> bool {
    let candidate = &table[index];
    // The second comparison implies the first, which avoids the search in most cases.
    if candidate.free_streams * 10 >= candidate.stream_limit {
        return false;
    }
    let live = table
        .iter()
        .filter(|c| c.endpoint == candidate.endpoint && c.state == ConnectionState::Live);
    live.map(|c| c.free_streams).sum::<usize>() * 10 < candidate.stream_limit
}

/// Whether a connection is live.
pub fn has_live(table: &[Candidate]) -> bool {
    table.iter().any(|candidate| candidate.state == ConnectionState::Live)
}

/// Whether a live connection has a free stream.
pub(super) fn has_free_stream(table: &[Candidate]) -> bool {
    let is_free = |c: &Candidate| c.state == ConnectionState::Live && c.free_streams > 0;
    table.iter().any(is_free)
}

/// Whether connections to this endpoint are suspect and none is live.
pub fn only_suspect_to(table: &[Candidate], endpoint: EndpointKey) -> bool {
    let has = |state| table.iter().any(|c| c.endpoint == endpoint && c.state == state);
    has(ConnectionState::Suspect) && !has(ConnectionState::Live)
}

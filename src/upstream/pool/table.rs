//! Describes connections and endpoints to [`jackstay_core::pool`].

use std::hash::{DefaultHasher, Hash, Hasher};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use jackstay_core::pool::limits::ConnectionLimits;
use jackstay_core::pool::{Candidate, ConnectionRow, EndpointRow, SLOW_HEAD_INTERVAL};

use crate::upstream::connection::Connection;
use crate::upstream::endpoint::Endpoint;
use crate::upstream::shared::Upstream;
use crate::upstream::version_preference::sides_to_keep;

/// The configured limits of connections.
pub(super) fn connection_limits(upstream: &Upstream) -> ConnectionLimits {
    let config = upstream.config();
    let limits = &config.connections;
    ConnectionLimits { min: limits.min, max: limits.max, max_streams: limits.max_streams }
}

/// A connection as requests see it.
pub(super) fn candidate(connection: &Rc<Connection>, now: Instant) -> Candidate {
    let endpoint = &connection.endpoint;
    Candidate {
        connection: connection.key(),
        endpoint: endpoint.key(),
        state: connection.state(),
        is_silent: connection.is_silent(),
        endpoint_state: endpoint.state(),
        is_fallback: endpoint.is_fallback(),
        has_warning: connection.has_warning_signs(now),
        free_streams: connection.free_streams(now),
        stream_limit: connection.stream_limit(),
        watches: connection.watches(),
        last_received: connection.last_received(),
        share: endpoint.slow_start_share(now),
    }
}

/// A connection as maintenance sees it. `is_slow_head_round`: slow response heads are looked for.
pub(super) fn row(
    connection: &Rc<Connection>,
    is_slow_head_round: bool,
    now: Instant,
) -> ConnectionRow {
    ConnectionRow {
        candidate: candidate(connection, now),
        generation: connection.generation,
        probe_is_failing: connection.probe().is_failing(),
        has_slow_heads: is_slow_head_round
            && connection.has_slow_response_heads(SLOW_HEAD_INTERVAL, now),
        is_mostly_proven: connection.is_mostly_proven(),
        idle_since: connection.idle_since(),
        peak_streams: connection.peak_streams(),
        draining_since: connection.draining_since(),
    }
}

/// The endpoints of the set, in the order of a pool with this `seed`.
pub(super) fn endpoint_rows(
    upstream: &Upstream,
    endpoints: &[Arc<Endpoint>],
    seed: u64,
    now: Instant,
) -> Vec<EndpointRow> {
    let side_of = sides_to_keep(upstream);
    let row = |endpoint: &Arc<Endpoint>| EndpointRow {
        key: endpoint.key(),
        state: endpoint.state(),
        is_ready_or_returns: endpoint.is_ready_or_returns(),
        is_fallback: endpoint.is_fallback(),
        rank: rank(seed, &endpoint.label),
        version_side: side_of(endpoint),
        is_usable: endpoint.is_usable(),
        ready_for: endpoint.ready_for(now),
        last_failure: endpoint.last_failure(),
    };
    endpoints.iter().map(row).collect()
}

/// A number by which a pool orders the endpoints of one state.
fn rank(seed: u64, label: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    (seed, label).hash(&mut hasher);
    hasher.finish()
}

//! Whether a request should rely on its connection, and whether another endpoint is better than its own.

use crate::connection::{ConnectionState, DrainUrgency};
use crate::endpoint_state::EndpointState;
use crate::pool::EndpointKey;

/// An endpoint of the upstream at the moment of a decision.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EndpointCondition {
    /// The endpoint.
    pub key: EndpointKey,
    /// Its state.
    pub state: EndpointState,
    /// Whether its latest `/readyz` failed or is overdue.
    pub probe_fails: bool,
    /// Whether its process may have just started ([`crate::request::start_up`]).
    pub is_starting: bool,
}

/// Whether an endpoint that is not in `excluded` is ready.
pub fn has_ready_besides(
    endpoints: impl IntoIterator<Item = EndpointCondition>,
    excluded: &[EndpointKey],
) -> bool {
    let is_ready = |one: &EndpointCondition| one.state == EndpointState::Ready;
    endpoints.into_iter().any(|one| is_ready(&one) && !excluded.contains(&one.key))
}

/// Whether this endpoint is degraded or its probe fails, while another one is ready. If all endpoints fail, sending
/// requests to another one does not help.
pub fn has_better(
    this: EndpointCondition,
    endpoints: impl IntoIterator<Item = EndpointCondition>,
) -> bool {
    (this.probe_fails || this.state == EndpointState::Degraded)
        && endpoints.into_iter().any(|other| {
            other.key != this.key && other.state == EndpointState::Ready && !other.probe_fails
        })
}

/// Whether a request should not rely on its connection alone: the connection is suspect or should drain, or there is a
/// better endpoint ([`has_better`]).
pub fn is_troubled(
    state: ConnectionState,
    urgency: Option<DrainUrgency>,
    has_better_endpoint: impl FnOnce() -> bool,
) -> bool {
    state == ConnectionState::Suspect || urgency.is_some() || has_better_endpoint()
}

#[cfg(test)]
mod tests {
    use super::*;
    use EndpointState::{Degraded, Ejected, Ready, Suspect};

    fn condition(key: usize, state: EndpointState, probe_fails: bool) -> EndpointCondition {
        EndpointCondition { key: EndpointKey(key), state, probe_fails, is_starting: false }
    }

    #[test]
    fn has_better_needs_a_failing_endpoint_and_another_that_works() {
        // The endpoint, the other one, and whether the other one is better.
        for (this, other, expected) in [
            ((Ready, false), (Ready, false), false),
            ((Suspect, false), (Ready, false), false),
            ((Degraded, false), (Ready, false), true),
            ((Ready, true), (Ready, false), true),
            ((Degraded, true), (Ready, true), false),
            ((Degraded, true), (Degraded, false), false),
            ((Degraded, true), (Ejected, false), false),
        ] {
            let (this, other) = (condition(1, this.0, this.1), condition(2, other.0, other.1));
            assert_eq!(has_better(this, [this, other]), expected, "{this:?} {other:?}");
            assert!(!has_better(this, [this]), "{this:?} alone");
        }
    }

    #[test]
    fn has_ready_besides_skips_excluded_endpoints() {
        let all = [condition(1, Ready, true), condition(2, Degraded, false)];
        assert!(has_ready_besides(all, &[]));
        assert!(!has_ready_besides(all, &[EndpointKey(1)]));
        assert!(has_ready_besides(all, &[EndpointKey(2)]));
    }

    #[test]
    fn is_troubled_by_the_connection_or_by_a_better_endpoint() {
        use ConnectionState::{Draining, Live};
        for (state, urgency, better, expected) in [
            (Live, None, false, false),
            (Live, None, true, true),
            (ConnectionState::Suspect, None, false, true),
            (Draining, Some(DrainUrgency::Relaxed), false, true),
        ] {
            assert_eq!(is_troubled(state, urgency, || better), expected, "{state:?} {better}");
        }
    }
}

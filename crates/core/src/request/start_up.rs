//! What follows a 401 or 403 of an apiserver whose process may have just started.
//!
//! Until the informers of its authorizers and authenticators are filled, a kube-apiserver refuses clients that every other
//! one accepts ([`crate::probe::answers`] has the sources). The response cannot be told from that of a client
//! without rights, so another endpoint is asked:
//!
//! | response | request | its endpoint | other endpoints | the client gets |
//! |---|---|---|---|---|
//! | 401 or 403, at most [`MAX_BODY`] | changes nothing | is starting | one is ready and has been up longer, and the budget of hedges has a token | the response of that endpoint; this one if it has none |
//! | 401 or 403, at most [`MAX_BODY`] | changes nothing | is starting | otherwise | this response |
//! | 401 or 403 | any | any other | any | this response |
//! | 401 or 403 | may change something | any | any | this response |
//! | 429 while the process starts | | | | see [`super::overload_rejection`] |
//! | any other | any | any | any | this response |
//!
//! One other endpoint is asked, once. A client without rights costs one request more in the first [`STARTING`] of a
//! process, within the budget, so random tokens cannot double the load.
//!
//! How long a process has been up is not visible. It is at least as old as the oldest of its open connections, of all
//! workers and the prober, so an endpoint is *starting*
//!
//! * for [`STARTING`] after a connection was opened while no other one was open, and
//! * while the prober is refused as by a process that starts.
//!
//! The connections of a process that has ended are all closed, so no process that has started is missed. A process that
//! only lost all of its connections is taken for a new one, which costs the requests of the table.

use std::time::{Duration, Instant};

use crate::endpoint_state::EndpointState;

/// How long an endpoint counts as starting after its first connection.
pub const STARTING: Duration = Duration::from_secs(60);
/// Endpoints whose first connections were opened within this time have been up equally long, as far as is known: jackstay
/// connects to all of them when it starts.
const SAME_TIME: Duration = Duration::from_secs(1);
/// Maximum length of a body that is held, in bytes. RBAC names each role that it has not found in the message.
pub const MAX_BODY: usize = 8 * 1024;

/// Whether this status is that of a client without rights.
pub const fn is_refusal(status: u16) -> bool {
    matches!(status, 401 | 403)
}

/// How long the process of an endpoint has been up, as far as connections and probes show it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Uptime {
    /// Since when a connection has always been open; `None` before the first one.
    pub connected_since: Option<Instant>,
    /// The prober is refused as by a process that starts.
    pub is_probe_refused: bool,
}

impl Uptime {
    /// Whether the process may have just started.
    pub fn is_starting(&self, now: Instant) -> bool {
        self.is_probe_refused
            || self
                .connected_since
                .is_none_or(|since| now.saturating_duration_since(since) < STARTING)
    }

    /// Whether a process has been up longer than that of the endpoint that has refused, or equally long as far as is known.
    fn is_longer_than(&self, refusing: &Self) -> bool {
        match (self.connected_since, refusing.connected_since) {
            _ if self.is_probe_refused => false,
            (Some(since), Some(refusing)) => since < refusing + SAME_TIME,
            (Some(_), None) => true,
            (None, _) => false,
        }
    }
}

/// The endpoints that are not asked after this one has refused a request: itself, and those that have not been up longer.
/// `None` if no endpoint is left that is ready.
pub fn not_asked_after<E: Copy + PartialEq>(
    refusing: E,
    endpoints: &[(E, EndpointState, Uptime)],
) -> Option<Vec<E>> {
    let its = endpoints.iter().find(|(key, ..)| *key == refusing);
    let its = its.map_or(Uptime::default(), |(_, _, uptime)| *uptime);
    let is_asked = |(key, state, uptime): &&(E, EndpointState, Uptime)| {
        *key != refusing && *state == EndpointState::Ready && uptime.is_longer_than(&its)
    };
    endpoints.iter().any(|one| is_asked(&one)).then(|| {
        let others = endpoints.iter().filter(|one| !is_asked(one) && one.0 != refusing);
        std::iter::once(refusing).chain(others.map(|(key, ..)| *key)).collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use EndpointState::{Degraded, Ready};

    fn up_since(connected_since: Instant) -> Uptime {
        Uptime { connected_since: Some(connected_since), is_probe_refused: false }
    }

    #[test]
    fn endpoint_is_starting_after_its_first_connection_and_while_the_probe_is_refused() {
        let start = Instant::now();
        for (age, is_probe_refused, expected) in [
            (Some(Duration::ZERO), false, true),
            (Some(STARTING.mul_f64(0.99)), false, true),
            (Some(STARTING), false, false),
            (Some(STARTING * 9), true, true),
            (None, false, true),
        ] {
            let connected_since = age.map(|_| start);
            let uptime = Uptime { connected_since, is_probe_refused };
            let now = start + age.unwrap_or_default();
            assert_eq!(uptime.is_starting(now), expected, "{age:?} {is_probe_refused}");
        }
    }

    #[test]
    fn endpoints_that_are_ready_and_have_been_up_longer_are_asked() {
        let long_ago = Instant::now();
        let now = long_ago + STARTING;
        let (new, old) = (up_since(now), up_since(long_ago));
        let connected_together = up_since(now + SAME_TIME / 2);
        let refuses = Uptime { is_probe_refused: true, ..old };
        // The state and uptime of two other endpoints, and which of them are not asked.
        for (second, third, expected) in [
            ((Ready, old), (Ready, old), Some(vec![1])),
            ((Ready, old), (Degraded, old), Some(vec![1, 3])),
            ((Ready, new), (Ready, old), Some(vec![1])),
            ((Ready, up_since(now + SAME_TIME)), (Ready, old), Some(vec![1, 2])),
            ((Ready, connected_together), (Degraded, old), Some(vec![1, 3])),
            ((Ready, refuses), (Ready, old), Some(vec![1, 2])),
            ((Ready, refuses), (Ready, Uptime::default()), None),
            ((Degraded, old), (Degraded, old), None),
            ((Ready, up_since(now + STARTING)), (Degraded, old), None),
        ] {
            let endpoints = [(1, Ready, new), (2, second.0, second.1), (3, third.0, third.1)];
            assert_eq!(not_asked_after(1, &endpoints), expected, "{endpoints:?}");
        }
        assert_eq!(not_asked_after(1, &[(1, Ready, new)]), None);
        assert_eq!(not_asked_after(9, &[(1, Ready, old)]), Some(vec![9]), "it was removed");
    }

    #[test]
    fn only_401_and_403_are_refusals() {
        for status in [200, 400, 401, 402, 403, 404, 410, 429, 503] {
            assert_eq!(is_refusal(status), [401, 403].contains(&status), "{status}");
        }
    }
}

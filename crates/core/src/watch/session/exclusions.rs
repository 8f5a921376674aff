//! Which endpoints are not asked to continue a watch.
//!
//! | event | the endpoint of the stream or attempt | all others |
//! |---|---|---|
//! | the stream was lost, an outage begins, an event confirms the stream, or the watch has moved | may be asked | may be asked, unless a Retry-After runs |
//! | ERROR event, 410, 406, 200 with another Content-Type | not in this round | as before |
//! | 401, 403 | not in this round while another one is ready; then, if one is starting, after [`STARTING_PAUSE`] | as before |
//! | 429, 5xx | not before its Retry-After; not in this round if an ERROR event is withheld | as before |
//! | another response, while an ERROR event is withheld | not in this round | as before |
//! | no head | may be asked | as before |
//!
//! After an attempt has failed, the next one of the round may also go to an apiserver of an older version.

use std::time::{Duration, Instant};

use super::input::{AttemptResult, Exclusion};
use crate::endpoint_condition::EndpointCondition;
use crate::endpoint_state::EndpointState;
use crate::pool::EndpointKey;

/// Upper bound of a Retry-After, so that adding it to the time cannot overflow. It is longer than any round.
const MAX_RETRY_AFTER: Duration = Duration::from_secs(3600);

/// Pause before endpoints that have refused the watch are asked again, because one of them is starting.
const STARTING_PAUSE: Duration = Duration::from_secs(1);

/// The endpoints that a watch does not ask. See the table of the module.
#[derive(Debug, Default)]
#[cfg_attr(test, derive(Clone))]
pub struct Exclusions {
    /// Endpoints that are not asked again in this round.
    round: Vec<EndpointKey>,
    /// Endpoints that have refused the client.
    refused: Vec<EndpointKey>,
    /// Endpoints that are not asked before a time.
    paused: Vec<(EndpointKey, Instant)>,
    /// The endpoint of the last stream or attempt has refused the watch.
    pub last_refused: bool,
    /// An apiserver of an older version may be asked.
    pub older_allowed: bool,
    /// An endpoint does not serve the encoding of the watch.
    pub encoding_refused: bool,
}

/// Which endpoints are not excluded from a round.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[allow(clippy::struct_excessive_bools)] // each of another set of states
pub struct Candidates {
    /// At least one, in any state.
    pub any: bool,
    /// At least one in a state that allows requests.
    pub usable: bool,
    /// At least one has a connection that works.
    pub connected: bool,
    /// At least one is ready.
    pub ready: bool,
    /// Time until the first one in a state that allows requests may be asked (Retry-After).
    pub retry_after: Duration,
}

impl Exclusions {
    /// Any endpoint may be asked again, unless a Retry-After runs. Returns whether one does.
    pub fn forget_round(&mut self, now: Instant) -> bool {
        self.round.clear();
        self.refused.clear();
        self.paused.retain(|(_, until)| *until > now);
        (self.last_refused, self.older_allowed) = (false, false);
        self.encoding_refused = false;
        !self.paused.is_empty()
    }

    /// Records an attempt that was not accepted. `endpoint` is `None` if no stream was opened, `once`: no endpoint is
    /// asked twice in the round.
    pub fn record(
        &mut self,
        result: AttemptResult,
        endpoint: Option<EndpointKey>,
        once: bool,
        now: Instant,
    ) {
        // The watch had a stream, whose version was no reason to fail.
        self.older_allowed |= result != AttemptResult::ErrorEvent;
        self.encoding_refused |= result.lacks_encoding();
        let Some(endpoint) = endpoint else { return };
        self.last_refused = !matches!(result, AttemptResult::NoHead { .. });
        if !self.last_refused {
            return;
        }
        let exclusion = result.exclusion();
        if once || exclusion == Some(Exclusion::Round) {
            self.round.push(endpoint);
        }
        if exclusion == Some(Exclusion::Refusal) {
            self.refused.push(endpoint);
        }
        if let Some(Exclusion::For(pause)) = exclusion {
            self.paused.retain(|(paused, _)| *paused != endpoint);
            self.paused.push((endpoint, now + pause.min(MAX_RETRY_AFTER)));
        }
    }

    /// The endpoints that have refused the client may be asked again after a pause, if one of them is starting. Returns
    /// whether one is.
    pub fn ask_starting_again(&mut self, endpoints: &[EndpointCondition], now: Instant) -> bool {
        let is_starting =
            |one: &EndpointCondition| one.is_starting && self.refused.contains(&one.key);
        let any_starts = endpoints.iter().any(is_starting);
        if any_starts {
            let again = self.refused.drain(..).map(|endpoint| (endpoint, now + STARTING_PAUSE));
            self.paused.extend(again);
        }
        any_starts
    }

    /// The endpoints that must not be asked at this time.
    pub fn excluded_at(&self, at: Instant) -> Vec<EndpointKey> {
        let paused = self.paused.iter().filter(|(_, until)| *until > at);
        let excluded = self.round.iter().chain(&self.refused);
        excluded.chain(paused.map(|(endpoint, _)| endpoint)).copied().collect()
    }

    /// Which of these endpoints are not excluded from the round.
    pub fn candidates(&self, endpoints: &[EndpointCondition], now: Instant) -> Candidates {
        use EndpointState::{Degraded, Ejected, Leaving, NoH2, Ready, Unverified};
        let is_left = |one: &&EndpointCondition| {
            !self.round.contains(&one.key) && !self.refused.contains(&one.key)
        };
        let is_usable = |one: &&EndpointCondition| {
            !matches!(one.state, Unverified | Ejected | NoH2 | Leaving) && is_left(one)
        };
        let usable = || endpoints.iter().filter(is_usable);
        let pause = |one: &EndpointCondition| {
            let paused = self.paused.iter().find(|(paused, _)| *paused == one.key);
            paused.map_or(Duration::ZERO, |(_, until)| until.saturating_duration_since(now))
        };
        Candidates {
            any: endpoints.iter().any(|one| is_left(&one)),
            usable: usable().next().is_some(),
            ready: usable().any(|one| one.state == Ready),
            connected: usable().any(|one| matches!(one.state, Ready | Degraded)),
            retry_after: usable().map(pause).min().unwrap_or_default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: EndpointKey = EndpointKey(1);
    const B: EndpointKey = EndpointKey(2);

    fn head(status: u16, retry_after: u64) -> AttemptResult {
        let retry_after = Some(Duration::from_secs(retry_after));
        AttemptResult::Head { status, same_content_type: true, retry_after }
    }

    #[test]
    fn record_excludes_by_the_table() {
        let no_head = AttemptResult::NoHead { outage: false };
        let other_type =
            AttemptResult::Head { status: 200, same_content_type: false, retry_after: None };
        let now = Instant::now();
        let (soon, later) = (now + Duration::from_secs(2), now + Duration::from_secs(4000));
        // The result, whether no endpoint is asked twice; expected: whether the endpoint is excluded in two seconds
        // and later, whether the last one has refused, and whether older ones may be asked.
        for (result, once, expected) in [
            (AttemptResult::ErrorEvent, false, (true, true, true, false)),
            (head(410, 0), false, (true, true, true, true)),
            (head(406, 0), false, (true, true, true, true)),
            (other_type, false, (true, true, true, true)),
            (head(429, 3), false, (true, false, true, true)),
            (head(503, 0), false, (false, false, true, true)),
            (head(503, u64::MAX), false, (true, false, true, true)),
            (head(503, 0), true, (true, true, true, true)),
            (head(404, 0), true, (true, true, true, true)),
            (head(401, 0), false, (true, true, true, true)),
            (head(403, 0), false, (true, true, true, true)),
            (no_head, false, (false, false, false, true)),
            (no_head, true, (false, false, false, true)),
        ] {
            let mut exclusions = Exclusions::default();
            exclusions.record(result, Some(A), once, now);
            let is_excluded = |at| exclusions.excluded_at(at).contains(&A);
            let found = (
                is_excluded(soon),
                is_excluded(later),
                exclusions.last_refused,
                exclusions.older_allowed,
            );
            assert_eq!(found, expected, "{result:?} {once}");
            assert!(!exclusions.excluded_at(soon).contains(&B), "{result:?} {once}");
        }
    }

    #[test]
    fn endpoint_that_has_refused_is_asked_again_after_a_pause_if_one_is_starting() {
        let now = Instant::now();
        let conditions = |is_starting| {
            [(A, false), (B, is_starting)].map(|(key, is_starting)| EndpointCondition {
                key,
                state: EndpointState::Degraded,
                probe_fails: false,
                is_starting,
            })
        };
        let mut exclusions = Exclusions::default();
        exclusions.record(head(403, 0), Some(A), false, now);
        assert!(!exclusions.ask_starting_again(&conditions(true), now), "B has not refused");
        exclusions.record(head(401, 0), Some(B), false, now);
        assert!(!exclusions.ask_starting_again(&conditions(false), now), "none is starting");
        assert!(!exclusions.candidates(&conditions(true), now).any);
        assert!(exclusions.ask_starting_again(&conditions(true), now));
        assert_eq!(exclusions.excluded_at(now), [A, B]);
        assert_eq!(exclusions.excluded_at(now + STARTING_PAUSE), []);
        let candidates = exclusions.candidates(&conditions(true), now);
        assert_eq!(candidates.retry_after, STARTING_PAUSE);
    }

    #[test]
    fn silence_after_a_refusal_is_no_refusal() {
        let mut exclusions = Exclusions::default();
        exclusions.record(head(503, 0), Some(A), false, Instant::now());
        let no_head = AttemptResult::NoHead { outage: false };
        exclusions.record(no_head, None, false, Instant::now());
        assert!(exclusions.last_refused, "no stream was opened");
        exclusions.record(no_head, Some(B), false, Instant::now());
        assert!(!exclusions.last_refused);
    }

    #[test]
    fn forget_round_keeps_only_a_retry_after_that_runs() {
        let now = Instant::now();
        let at = |seconds| now + Duration::from_secs(seconds);
        let mut exclusions = Exclusions::default();
        exclusions.record(head(410, 0), Some(A), false, now);
        exclusions.record(head(429, 3), Some(B), false, now);
        assert!(exclusions.forget_round(at(2)));
        assert_eq!(exclusions.excluded_at(at(2)), [B]);
        assert!(!exclusions.last_refused && !exclusions.older_allowed);
        exclusions.record(head(429, 5), Some(B), false, at(2));
        assert_eq!(exclusions.excluded_at(at(6)), [B], "the later Retry-After counts");
        assert!(!exclusions.forget_round(at(7)));
    }

    #[test]
    fn candidates_are_the_endpoints_that_are_left() {
        use EndpointState::{Connecting, Degraded, Ejected, Ready};
        let now = Instant::now();
        let table = |a, b| {
            [(A, a), (B, b)].map(|(key, state)| EndpointCondition {
                key,
                state,
                probe_fails: false,
                is_starting: false,
            })
        };
        let found = |exclusions: &Exclusions, a, b| {
            let left = exclusions.candidates(&table(a, b), now);
            assert_eq!(left.connected, left.usable && ![a, b].contains(&Connecting), "{a:?} {b:?}");
            assert_eq!(left.ready, left.usable && [a, b].contains(&Ready), "{a:?} {b:?}");
            (left.any, left.usable, left.retry_after.as_secs())
        };
        let mut exclusions = Exclusions::default();
        assert_eq!(found(&exclusions, Degraded, Ejected), (true, true, 0));
        assert_eq!(found(&exclusions, Ejected, Ejected), (true, false, 0));
        assert_eq!(found(&exclusions, Connecting, Ejected), (true, true, 0));
        exclusions.record(head(410, 0), Some(A), false, now);
        assert_eq!(found(&exclusions, Ready, Ejected), (true, false, 0));
        assert_eq!(found(&exclusions, Ready, Ready), (true, true, 0));
        exclusions.record(head(429, 9), Some(B), false, now);
        assert_eq!(found(&exclusions, Ready, Ready), (true, true, 9));
        exclusions.record(head(410, 0), Some(B), false, now);
        assert_eq!(found(&exclusions, Ready, Ready), (false, false, 0));
    }
}

//! When `/readyz` is probed next, and after how many equal results in a row an endpoint counts as ready
//! or not ready.

use std::time::Duration;

use crate::backoff::Backoff;

/// Pause after the first failed probe. It doubles with each further failure up to the configured
/// interval: thousands of nodes that probe once a second would burden an apiserver in trouble.
pub const FAILING_INTERVAL: Duration = Duration::from_secs(1);
/// Shortest pause between anonymous probes of an endpoint that is ready. After an anonymous request the apiserver sends
/// GOAWAY (`UnauthenticatedHTTP2DOSMitigation`), so each probe costs a connection.
const ANONYMOUS_INTERVAL: Duration = Duration::from_secs(30);
/// Shortest pause before a probe that passive evidence requests. It doubles with each such probe that
/// confirms the known state: more probes do not help an apiserver that is slow for every client.
const EVIDENCE_PAUSE: Duration = Duration::from_millis(500);
/// Shortest pause before a probe that decides whether watches may move to the endpoint.
const CONFIRMATION_PAUSE: Duration = Duration::from_millis(200);

/// Why `/readyz` is asked before its time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProbeTrigger {
    /// Passive evidence: requests met a streak of errors or slow response heads here.
    PassiveEvidence,
    /// The probe of another endpoint fails. Its watches may move here only after a new probe was ok.
    Confirmation,
}

/// Counts equal probe results in a row.
#[derive(Debug, Default)]
pub struct ResultStreak {
    last: Option<bool>,
    length: u32,
}

impl ResultStreak {
    /// Records a result. Returns whether the endpoint now takes the state of this result: at once for the
    /// first result, otherwise after `rise` successes or `fall` failures in a row.
    pub fn record(&mut self, ready: bool, rise: u32, fall: u32) -> bool {
        let last = self.last.replace(ready);
        self.length = if last == Some(ready) { self.length.saturating_add(1) } else { 1 };
        last.is_none() || self.length >= if ready { rise } else { fall }
    }
}

/// A probe result compared with the state of the endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProbeResult {
    /// The probe succeeded, and the endpoint counts as ready.
    Ready,
    /// The probe succeeded, but more successes are needed before the endpoint counts as ready.
    Recovering,
    /// The probe was refused, and the endpoint counts as ready.
    Refused,
    /// The probe failed.
    Failing,
}

/// The pauses between the probes of one endpoint.
#[derive(Debug)]
pub struct ProbeSchedule {
    /// Failed or refused probes in a row; 1 while the endpoint recovers.
    failing: Backoff,
    /// Whether the latest probe was refused.
    is_refused: bool,
    /// Counts the probes on evidence that confirmed the known state.
    evidence: Backoff,
}

impl Default for ProbeSchedule {
    fn default() -> Self {
        Self {
            failing: Backoff::new(FAILING_INTERVAL, Duration::MAX),
            is_refused: false,
            evidence: Backoff::new(EVIDENCE_PAUSE, Duration::MAX).after(1),
        }
    }
}

impl ProbeSchedule {
    /// Records a result. `on_evidence` says whether passive evidence requested the probe. The evidence pause
    /// is [`EVIDENCE_PAUSE`] again after a result that differs from the known state, and after a success of
    /// any other probe.
    pub fn record(&mut self, result: ProbeResult, on_evidence: bool) {
        let failing = result == ProbeResult::Failing;
        let changed = failing != self.is_failing();
        let is_refused = result == ProbeResult::Refused;
        let was_refused = std::mem::replace(&mut self.is_refused, is_refused);
        // Failures do not continue a series of refusals, nor the other way round.
        let in_row = if was_refused == is_refused { self.failing.failures() } else { 0 };
        self.failing = self.failing.after(match result {
            ProbeResult::Ready => 0,
            ProbeResult::Recovering => 1,
            ProbeResult::Refused | ProbeResult::Failing => in_row.saturating_add(1),
        });
        if on_evidence && !changed {
            self.evidence.failed();
        } else if changed || !failing {
            self.evidence = self.evidence.after(1);
        }
    }

    /// Whether the latest probe failed, or more successes are needed before the endpoint counts as ready.
    pub fn is_failing(&self) -> bool {
        !self.is_refused && self.failing.failures() > 0
    }

    /// Forgets all results: the apiserver may have been restarted.
    pub fn reset(&mut self) {
        *self = Self::default();
    }

    /// Pause before the next regular probe. `jitter` is in 0..1.
    pub fn pause(&self, interval: Duration, jitter: f64) -> Duration {
        let base = if self.failing.failures() > 0 { self.failing.pause() } else { interval };
        base.min(interval).mul_f64(0.8 + 0.4 * jitter)
    }

    /// Shortest pause between the last probe and one that `trigger` requests.
    pub fn early_pause(&self, trigger: ProbeTrigger, interval: Duration) -> Duration {
        let pause = match trigger {
            ProbeTrigger::PassiveEvidence => self.evidence.pause(),
            ProbeTrigger::Confirmation => CONFIRMATION_PAUSE,
        };
        let shortest = if self.is_failing() { FAILING_INTERVAL } else { Duration::ZERO };
        pause.max(shortest).min(interval)
    }
}

/// Pause before the next anonymous probe, at least 30 s. `jitter` is in 0..1.
pub fn anonymous_pause(interval: Duration, jitter: f64) -> Duration {
    interval.max(ANONYMOUS_INTERVAL).mul_f64(1.0 + 0.4 * jitter)
}

/// Pauses between anonymous probes of an endpoint that is not ready, so that it is used within 30 s after it is ready
/// again: by default one success suffices after a start, and two after other failures, the second one a second later.
pub const ANONYMOUS_PAUSES_NOT_READY: Backoff =
    Backoff::new(Duration::from_secs(1), Duration::from_secs(20)).with_factors(0.8, 1.2);

#[cfg(test)]
mod tests {
    use super::*;

    const INTERVAL: Duration = Duration::from_secs(10);

    #[test]
    fn streak_first_result_decides_and_later_ones_need_rise_or_fall() {
        let mut streak = ResultStreak::default();
        assert!(streak.record(true, 2, 2));
        assert!(!streak.record(false, 2, 2));
        assert!(!streak.record(true, 2, 2));
        assert!(!streak.record(false, 2, 2));
        assert!(streak.record(false, 2, 2));
        assert!(streak.record(false, 2, 2));
        assert!(!streak.record(true, 2, 2));
        assert!(streak.record(true, 2, 2));
        assert!(ResultStreak::default().record(false, 2, 2));
    }

    #[test]
    fn pause_failing_endpoint_doubles_up_to_the_interval() {
        let mut schedule = ProbeSchedule::default();
        let seconds = |schedule: &ProbeSchedule, jitter| schedule.pause(INTERVAL, jitter).as_secs();
        assert_eq!((seconds(&schedule, 0.0), seconds(&schedule, 1.0)), (8, 12));
        let mut next = |result| {
            schedule.record(result, false);
            seconds(&schedule, 0.5)
        };
        for expected in [1, 2, 4, 8, 10, 10, 10] {
            assert_eq!(next(ProbeResult::Failing), expected);
        }
        // After the first success, the probe that confirms it follows after 1 s.
        assert_eq!(next(ProbeResult::Recovering), 1);
        assert_eq!(next(ProbeResult::Ready), 10);
        assert_eq!(next(ProbeResult::Failing), 1);
        for _ in 0..100 {
            assert!(next(ProbeResult::Failing) <= 10);
        }
        schedule.reset();
        assert_eq!(seconds(&schedule, 0.5), 10);
        let quick = Duration::from_millis(200);
        schedule.record(ProbeResult::Failing, false);
        assert_eq!(schedule.pause(quick, 0.5), Duration::from_millis(200));
    }

    /// The load of 5,000 nodes on an apiserver that is not ready.
    #[test]
    fn pause_failing_endpoint_averages_less_than_one_probe_in_8_s_from_each_node() {
        let (nodes, outage) = (5_000, Duration::from_secs(600));
        let mut rng = fastrand::Rng::with_seed(7);
        let mut probes = 0_u64;
        for _ in 0..nodes {
            let (mut schedule, mut at) = (ProbeSchedule::default(), Duration::ZERO);
            while at < outage {
                probes += 1;
                schedule.record(ProbeResult::Failing, false);
                at += schedule.pause(INTERVAL, rng.f64());
            }
        }
        let rate = probes / outage.as_secs();
        println!("{rate} probes a second from {nodes} nodes");
        assert!(rate < nodes / 8, "{rate}");
    }

    #[test]
    fn early_pause_evidence_confirms_known_state_doubles() {
        let mut schedule = ProbeSchedule::default();
        let ms = |schedule: &ProbeSchedule| {
            schedule.early_pause(ProbeTrigger::PassiveEvidence, INTERVAL).as_millis()
        };
        assert_eq!(
            (ms(&schedule), schedule.early_pause(ProbeTrigger::Confirmation, INTERVAL).as_millis()),
            (500, 200)
        );
        for expected in [1_000, 2_000, 4_000, 8_000, 10_000, 10_000] {
            schedule.record(ProbeResult::Ready, true);
            assert_eq!(ms(&schedule), expected);
        }
        schedule.record(ProbeResult::Ready, false);
        assert_eq!(ms(&schedule), 500);
        // A failing endpoint gets at most one probe a second. Regular probes that fail do not change the pause.
        schedule.record(ProbeResult::Failing, true);
        assert_eq!(ms(&schedule), 1_000);
        for expected in [1_000, 2_000, 4_000, 8_000, 10_000] {
            schedule.record(ProbeResult::Failing, true);
            schedule.record(ProbeResult::Failing, false);
            assert_eq!(ms(&schedule), expected);
        }
        schedule.record(ProbeResult::Recovering, false);
        assert_eq!(
            ms(&schedule),
            1_000,
            "the evidence pause is 500 ms again, but a failing endpoint is probed once a second"
        );
    }

    #[test]
    fn anonymous_probes_of_an_endpoint_that_is_not_ready_follow_within_24_s() {
        let mut pauses = ANONYMOUS_PAUSES_NOT_READY;
        let seconds: Vec<_> = (0..8).map(|_| pauses.failed().as_secs()).collect();
        assert_eq!(seconds, [1, 2, 4, 8, 16, 20, 20, 20]);
        assert!(pauses.pause_at(1.0) <= Duration::from_secs(24));
    }

    #[test]
    fn anonymous_pause_any_interval_is_at_least_30_s() {
        for interval in [1, 10, 60] {
            let interval = Duration::from_secs(interval);
            for jitter in [0.0, 0.5, 0.999] {
                let pause = anonymous_pause(interval, jitter).as_secs_f64();
                assert!(pause >= 30.0 && pause >= interval.as_secs_f64(), "{pause}");
            }
        }
    }
}

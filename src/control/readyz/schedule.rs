//! When `/readyz` is asked next, and after how many answers a verdict falls.

use std::time::Duration;

use crate::config::Readyz;
use crate::upstream::endpoint::ProbeTrigger;

/// Pause after the first answer that an endpoint is not ready. It doubles with each further one up to
/// the configured interval: thousands of nodes that each ask once a second are a load that an
/// apiserver in trouble can do without.
pub(super) const FAILING_INTERVAL: Duration = Duration::from_secs(1);
/// Least pause between anonymous probes: an anonymous request makes the apiserver GOAWAY its
/// connection (`UnauthenticatedHTTP2DOSMitigation`), so each costs a new one.
const ANONYMOUS_INTERVAL: Duration = Duration::from_secs(30);
/// Least pause before a probe on passive evidence. It doubles while the evidence turns out to be
/// nothing: an apiserver that is slow for everybody is not helped by being asked.
const EVIDENCE_PAUSE: Duration = Duration::from_millis(500);
/// Least pause before a probe that shows others whether watches may move here.
const PROOF_PAUSE: Duration = Duration::from_millis(200);

/// Counts findings in a row.
#[derive(Debug, Default)]
pub struct ResultStreak {
    good: u32,
    bad: u32,
    known: bool,
}

/// A verdict of [`ResultStreak`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReadyVerdict {
    /// `rise` successes in a row, or the first finding of all.
    Ready,
    /// `fall` failures in a row, or the first finding of all.
    Failing,
}

impl ResultStreak {
    /// Takes a finding in; the first of all decides alone.
    pub fn add(&mut self, ready: bool, rise: u32, fall: u32) -> Option<ReadyVerdict> {
        let first = !std::mem::replace(&mut self.known, true);
        if ready {
            self.bad = 0;
            self.good = self.good.saturating_add(1);
            (first || self.good >= rise).then_some(ReadyVerdict::Ready)
        } else {
            self.good = 0;
            self.bad = self.bad.saturating_add(1);
            (first || self.bad >= fall).then_some(ReadyVerdict::Failing)
        }
    }
}

/// How an answer to `/readyz` compares with what is known of the endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProbeResult {
    /// It is ready, and counts as ready.
    Ready,
    /// It is ready, and does not count as ready yet: another answer is needed.
    Recovering,
    /// It is not ready.
    Failing,
}

/// The pauses between the probes of one endpoint.
#[derive(Debug)]
pub struct ProbeSchedule {
    /// Answers in a row that it is not ready.
    failures: u32,
    evidence: Duration,
}

impl Default for ProbeSchedule {
    fn default() -> Self {
        Self { failures: 0, evidence: EVIDENCE_PAUSE }
    }
}

impl ProbeSchedule {
    /// An answer arrived, asked for on passive evidence or because its time had come.
    pub fn answered(&mut self, answered: ProbeResult, on_evidence: bool, config: &Readyz) {
        let failing = answered == ProbeResult::Failing;
        let news = failing != (self.failures > 0);
        self.failures = match answered {
            ProbeResult::Ready => 0,
            ProbeResult::Recovering => 1,
            ProbeResult::Failing if news => 1,
            ProbeResult::Failing => self.failures.saturating_add(1),
        };
        if on_evidence && !news {
            self.evidence = (self.evidence * 2).min(config.interval);
        } else if news || !failing {
            self.evidence = EVIDENCE_PAUSE;
        }
    }

    /// Another process may answer from now on.
    pub fn restart(&mut self) {
        *self = Self::default();
    }

    /// Pause before the next probe; `jitter` is in 0..1.
    pub fn pause(&self, config: &Readyz, jitter: f64) -> Duration {
        let base = match self.failures {
            0 => config.interval,
            failures => FAILING_INTERVAL.saturating_mul(1 << (failures - 1).min(16)),
        };
        base.min(config.interval).mul_f64(0.8 + 0.4 * jitter)
    }

    /// Least pause before a probe that is wanted before its time.
    pub fn soon(&self, why: ProbeTrigger, config: &Readyz) -> Duration {
        let pause = match why {
            ProbeTrigger::PassiveEvidence => self.evidence,
            ProbeTrigger::Confirmation => PROOF_PAUSE,
        };
        let least = if self.failures > 0 { FAILING_INTERVAL } else { Duration::ZERO };
        pause.max(least).min(config.interval)
    }
}

/// Pause before the next anonymous probe, never less than 30 s; `jitter` is in 0..1.
pub fn anonymous_pause(config: &Readyz, jitter: f64) -> Duration {
    config.interval.max(ANONYMOUS_INTERVAL).mul_f64(1.0 + 0.4 * jitter)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(interval: Duration) -> Readyz {
        Readyz {
            path: "/readyz".into(),
            interval,
            timeout: Duration::from_secs(1),
            rise: 2,
            fall: 2,
            cert: None,
            token_file: None,
        }
    }

    #[test]
    fn the_first_finding_decides_and_then_it_takes_a_row() {
        let mut streak = ResultStreak::default();
        assert_eq!(streak.add(true, 2, 2), Some(ReadyVerdict::Ready));
        assert_eq!(streak.add(false, 2, 2), None);
        assert_eq!(streak.add(true, 2, 2), None);
        assert_eq!(streak.add(false, 2, 2), None);
        assert_eq!(streak.add(false, 2, 2), Some(ReadyVerdict::Failing));
        assert_eq!(streak.add(false, 2, 2), Some(ReadyVerdict::Failing));
        assert_eq!(streak.add(true, 2, 2), None);
        assert_eq!(streak.add(true, 2, 2), Some(ReadyVerdict::Ready));
        assert_eq!(ResultStreak::default().add(false, 2, 2), Some(ReadyVerdict::Failing));
    }

    #[test]
    fn pauses_of_a_failing_endpoint_double_up_to_the_interval() {
        let config = config(Duration::from_secs(10));
        let mut pace = ProbeSchedule::default();
        let seconds = |pace: &ProbeSchedule, jitter| pace.pause(&config, jitter).as_secs();
        assert_eq!((seconds(&pace, 0.0), seconds(&pace, 1.0)), (8, 12));
        let mut next = |answered| {
            pace.answered(answered, false, &config);
            seconds(&pace, 0.5)
        };
        for expected in [1, 2, 4, 8, 10, 10, 10] {
            assert_eq!(next(ProbeResult::Failing), expected);
        }
        // It is well again: the answer that confirms it is asked for soon.
        assert_eq!(next(ProbeResult::Recovering), 1);
        assert_eq!(next(ProbeResult::Ready), 10);
        assert_eq!(next(ProbeResult::Failing), 1);
        for _ in 0..100 {
            assert!(next(ProbeResult::Failing) <= 10);
        }
        pace.restart();
        assert_eq!(seconds(&pace, 0.5), 10);
        let quick = Readyz { interval: Duration::from_millis(200), ..config.clone() };
        pace.answered(ProbeResult::Failing, false, &quick);
        assert_eq!(pace.pause(&quick, 0.5), Duration::from_millis(200));
    }

    /// What an apiserver in trouble gets of 5,000 nodes.
    #[test]
    fn questions_of_5000_nodes_to_a_failing_endpoint_stay_below_one_in_eight_seconds_each() {
        let (nodes, outage) = (5_000, Duration::from_secs(600));
        let config = config(Duration::from_secs(10));
        let mut rng = fastrand::Rng::with_seed(7);
        let mut asked = 0_u64;
        for _ in 0..nodes {
            let (mut pace, mut at) = (ProbeSchedule::default(), Duration::ZERO);
            while at < outage {
                asked += 1;
                pace.answered(ProbeResult::Failing, false, &config);
                at += pace.pause(&config, rng.f64());
            }
        }
        let rate = asked / outage.as_secs();
        println!("{rate} questions a second of {nodes} nodes; once a second each: {nodes}");
        assert!(rate < nodes / 8, "{rate}");
    }

    #[test]
    fn evidence_is_followed_at_once_and_less_often_while_it_is_no_news() {
        let config = config(Duration::from_secs(10));
        let mut pace = ProbeSchedule::default();
        let ms =
            |pace: &ProbeSchedule| pace.soon(ProbeTrigger::PassiveEvidence, &config).as_millis();
        assert_eq!(
            (ms(&pace), pace.soon(ProbeTrigger::Confirmation, &config).as_millis()),
            (500, 200)
        );
        for expected in [1_000, 2_000, 4_000, 8_000, 10_000, 10_000] {
            pace.answered(ProbeResult::Ready, true, &config);
            assert_eq!(ms(&pace), expected);
        }
        pace.answered(ProbeResult::Ready, false, &config);
        assert_eq!(ms(&pace), 500);
        // A failing endpoint: at most one a second, and the scheduled ones between change nothing.
        pace.answered(ProbeResult::Failing, true, &config);
        assert_eq!(ms(&pace), 1_000);
        for expected in [1_000, 2_000, 4_000, 8_000, 10_000] {
            pace.answered(ProbeResult::Failing, true, &config);
            pace.answered(ProbeResult::Failing, false, &config);
            assert_eq!(ms(&pace), expected);
        }
        pace.answered(ProbeResult::Recovering, false, &config);
        assert_eq!(ms(&pace), 1_000, "the evidence pause is 500 ms, one second is the least");
    }

    #[test]
    fn anonymous_probes_are_at_least_30_s_apart() {
        for interval in [1, 10, 60] {
            let config = config(Duration::from_secs(interval));
            for jitter in [0.0, 0.5, 0.999] {
                let pause = anonymous_pause(&config, jitter).as_secs_f64();
                assert!(pause >= 30.0 && pause >= interval as f64, "{pause}");
            }
        }
    }
}

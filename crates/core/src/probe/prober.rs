//! The probes of one endpoint: when the next one is sent, what it asks, and what its result means.
//!
//! | event | next probe | the endpoint takes the state of the result |
//! |---|---|---|
//! | ready | after the interval; while more successes are needed, after 1 s | after `rise` results in a row, or the first on a connection |
//! | not ready | after 1 s, 2 s, … up to the interval | after `fall` results in a row, or the first on a connection |
//! | starting | as not ready | at once, and that of the first other result at once |
//! | refused | as not ready | as ready |
//! | the connection was lost during the probe | as not ready | no |
//! | a probe is requested | brought forward, as the trigger permits | |
//! | the connection was lost between two probes | brought forward to 1 s after the last one | |
//!
//! The last row does not bring it further forward: otherwise thousands of nodes would probe a restarted apiserver at
//! once. A probe that was brought forward also asks `/livez`, as do the probes of an endpoint that fails: since Kubernetes
//! 1.36 `/readyz` has no check of etcd. A refused probe follows soon, because the answer of another endpoint may show that
//! this one is starting ([`super::answers`]).

use std::time::{Duration, Instant};

use super::schedule::{FAILING_INTERVAL, ProbeResult, ProbeSchedule, ProbeTrigger, ResultStreak};

/// How long a prober waits that may not connect yet, before it asks again.
pub const RECONNECT_CHECK: Duration = Duration::from_millis(50);

/// The configured rules of probes.
#[derive(Debug, Clone, Copy)]
pub struct Rules {
    /// Mean interval of the probes of a ready endpoint.
    pub interval: Duration,
    /// Number of successes in a row after which the endpoint is ready.
    pub rise: u32,
    /// Number of failures in a row after which it is not ready.
    pub fall: u32,
}

/// The response to a probe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Response {
    /// The endpoint is ready.
    Ready,
    /// It refuses the credential of the prober, and counts as ready.
    Refused,
    /// It is starting, so it is not ready yet.
    Starting,
    /// It is not ready.
    NotReady,
    /// The connection was lost before the response was complete.
    ConnectionLost,
}

/// The state machine of the probes of one endpoint.
#[derive(Debug)]
pub struct Prober {
    streak: ResultStreak,
    schedule: ProbeSchedule,
    /// When the latest probe was sent.
    sent_at: Instant,
    next_at: Instant,
    /// The trigger that brought the next probe forward, if one did.
    early_trigger: Option<ProbeTrigger>,
    /// Whether passive evidence requested the probe in progress.
    on_evidence: bool,
}

impl Prober {
    /// A prober whose first probe is due now.
    pub fn new(now: Instant) -> Self {
        Self {
            streak: ResultStreak::default(),
            schedule: ProbeSchedule::default(),
            sent_at: now,
            next_at: now,
            early_trigger: None,
            on_evidence: false,
        }
    }

    /// When the next probe is due.
    pub fn next_at(&self) -> Instant {
        self.next_at
    }

    /// When the prober connects that has no connection. That of a usable endpoint connects when the next probe is due,
    /// that of any other endpoint at once, because its connection can make the endpoint usable.
    pub fn connect_at(&self, is_usable: bool, now: Instant) -> Instant {
        if is_usable { self.next_at.max(now) } else { now }
    }

    /// Probes follow on a new connection: its first result decides alone.
    pub fn connected(&mut self) {
        self.streak = ResultStreak::default();
    }

    /// A probe is sent now. Returns whether it also asks `/livez`.
    pub fn sent(&mut self, now: Instant) -> bool {
        self.sent_at = now;
        let trigger = self.early_trigger.take();
        self.on_evidence = trigger == Some(ProbeTrigger::PassiveEvidence);
        trigger.is_some() || self.schedule.is_failing()
    }

    /// A probe has this result. Returns whether the endpoint takes the state of the result now. [`Self::plan`] follows.
    pub fn received(&mut self, response: Response, rules: Rules) -> bool {
        match response {
            Response::Ready | Response::Refused => self.streak.record(true, rules.rise, rules.fall),
            Response::Starting => {
                self.streak = ResultStreak::default();
                true
            }
            Response::NotReady => self.streak.record(false, rules.rise, rules.fall),
            Response::ConnectionLost => false,
        }
    }

    /// Plans the probe after one with this result. `is_ready` says whether the endpoint counts as ready; `jitter` is in
    /// 0..1.
    pub fn plan(&mut self, response: Response, is_ready: bool, rules: Rules, jitter: f64) {
        let result = match response {
            Response::Ready if is_ready => ProbeResult::Ready,
            Response::Ready => ProbeResult::Recovering,
            Response::Refused => ProbeResult::Refused,
            Response::Starting | Response::NotReady | Response::ConnectionLost => {
                ProbeResult::Failing
            }
        };
        self.schedule.record(result, self.on_evidence);
        self.next_at = self.sent_at + self.schedule.pause(rules.interval, jitter);
    }

    /// A probe is requested before its time.
    pub fn requested(&mut self, trigger: ProbeTrigger, rules: Rules) {
        let early = self.sent_at + self.schedule.early_pause(trigger, rules.interval);
        if early < self.next_at {
            (self.next_at, self.early_trigger) = (early, Some(trigger));
        }
    }

    /// The connection was lost rather than drained after a GOAWAY: the apiserver may have been restarted.
    pub fn connection_lost(&mut self, rules: Rules) {
        self.schedule.reset();
        self.next_at = self.next_at.min(self.sent_at + FAILING_INTERVAL.min(rules.interval));
    }

    /// The next probe is due now.
    pub fn probe_now(&mut self, now: Instant) {
        self.next_at = now;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RULES: Rules = Rules { interval: Duration::from_secs(10), rise: 2, fall: 2 };

    /// A probe now. Returns whether the endpoint takes the state, and the pause until the next probe in milliseconds.
    fn probe(prober: &mut Prober, response: Response, is_ready: bool) -> (bool, u128) {
        let now = prober.next_at();
        prober.sent(now);
        let decides = prober.received(response, RULES);
        prober.plan(response, is_ready, RULES, 0.5);
        (decides, prober.next_at().saturating_duration_since(now).as_millis())
    }

    #[test]
    fn results_decide_and_pace_by_the_table() {
        let mut prober = Prober::new(Instant::now());
        prober.connected();
        for (response, is_ready, expected) in [
            (Response::Ready, true, (true, 10_000)),
            (Response::NotReady, true, (false, 1_000)),
            (Response::NotReady, false, (true, 2_000)),
            (Response::ConnectionLost, false, (false, 4_000)),
            (Response::Ready, false, (false, 1_000)),
            (Response::Ready, true, (true, 10_000)),
        ] {
            assert_eq!(probe(&mut prober, response, is_ready), expected, "{response:?}");
        }
        prober.connected();
        assert_eq!(probe(&mut prober, Response::NotReady, true), (true, 1_000), "first result");
    }

    #[test]
    fn starting_endpoint_is_not_ready_at_once_and_ready_at_the_first_success() {
        let mut prober = Prober::new(Instant::now());
        prober.connected();
        for (response, is_ready, expected) in [
            (Response::Starting, false, (true, 1_000)),
            (Response::Starting, false, (true, 2_000)),
            (Response::Ready, true, (true, 10_000)),
            // Another endpoint has shown meanwhile that the refusal was one of a process that starts.
            (Response::Refused, true, (true, 1_000)),
            (Response::Starting, false, (true, 1_000)),
            (Response::NotReady, false, (true, 2_000)),
        ] {
            assert_eq!(probe(&mut prober, response, is_ready), expected, "{response:?}");
        }
    }

    #[test]
    fn refused_probe_follows_soon_and_asks_no_livez() {
        let mut prober = Prober::new(Instant::now());
        prober.connected();
        for expected in [(true, 1_000), (true, 2_000), (true, 4_000), (true, 8_000), (true, 10_000)]
        {
            assert_eq!(probe(&mut prober, Response::Refused, true), expected);
            assert!(!prober.sent(prober.next_at()));
        }
    }

    #[test]
    fn prober_of_a_usable_endpoint_connects_for_the_next_probe() {
        let start = Instant::now();
        let mut prober = Prober::new(start);
        probe(&mut prober, Response::Ready, true);
        let due = start + Duration::from_secs(10);
        assert_eq!(prober.connect_at(true, start), due);
        assert_eq!(prober.connect_at(false, start), start);
        let late = due + Duration::from_secs(1);
        assert_eq!(prober.connect_at(true, late), late);
    }

    #[test]
    fn requested_probe_is_brought_forward_and_asks_livez() {
        let start = Instant::now();
        let mut prober = Prober::new(start);
        assert!(!prober.sent(start));
        prober.received(Response::Ready, RULES);
        prober.plan(Response::Ready, true, RULES, 0.5);
        prober.requested(ProbeTrigger::PassiveEvidence, RULES);
        assert_eq!(prober.next_at(), start + Duration::from_millis(500));
        prober.requested(ProbeTrigger::Confirmation, RULES);
        assert_eq!(prober.next_at(), start + Duration::from_millis(200));
        // A later one does not delay it.
        prober.requested(ProbeTrigger::PassiveEvidence, RULES);
        assert_eq!(prober.next_at(), start + Duration::from_millis(200));
        assert!(prober.sent(prober.next_at()));
        prober.received(Response::Ready, RULES);
        prober.plan(Response::Ready, true, RULES, 0.5);
        assert!(!prober.sent(prober.next_at()), "a regular probe of a ready endpoint");
    }

    #[test]
    fn lost_connection_brings_the_probe_forward_to_a_second_after_the_last() {
        let start = Instant::now();
        let mut prober = Prober::new(start);
        probe(&mut prober, Response::Ready, true);
        prober.connection_lost(RULES);
        assert_eq!(prober.next_at(), start + Duration::from_secs(1));
        prober.probe_now(start);
        prober.connection_lost(RULES);
        assert_eq!(prober.next_at(), start, "not delayed");
    }
}

//! Signs of how well an endpoint is, and who wants to know: the prober's findings and doubts, what
//! requests notice by themselves, and what its connections say to a request that has none of them.

use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::Endpoint;
use super::state::Readyz;
use crate::upstream::evacuation::EndpointReadiness;
use crate::upstream::health::WRITE_PATIENCE;

/// Why a probe is wanted before its time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProbeTrigger {
    /// Something is strange here: a streak of errors, heads that stay away.
    PassiveEvidence,
    /// Another endpoint is in doubt, and its watches look for one that is not.
    Confirmation,
}

/// How often [`Endpoint::given_up`] looks.
const LOOK: Duration = Duration::from_millis(100);

/// 5xx answers in a row after which `/readyz` is asked at once.
const ERROR_STREAK: u64 = 5;

impl Endpoint {
    /// `/readyz` failed once or keeps us waiting: no verdict yet. Returns whether that is news.
    pub fn note_probe_failing(&self, now: Instant) -> bool {
        self.facts().probe_failing_since.get_or_insert(now);
        !self.probe_failing.swap(true, Ordering::Relaxed)
    }

    /// `/readyz`, asked at `asked_at`, was right.
    pub fn note_probe_ok(&self, asked_at: Instant) {
        let mut facts = self.facts();
        facts.probe_failing_since = None;
        facts.last_ready_probe = Some(asked_at);
        drop(facts);
        self.probe_failing.store(false, Ordering::Relaxed);
    }

    /// Whether the latest `/readyz` failed or keeps us waiting. Cheap.
    pub fn is_probe_failing(&self) -> bool {
        self.probe_failing.load(Ordering::Relaxed)
    }

    /// What is known of its readiness.
    pub fn readiness(&self) -> EndpointReadiness {
        let facts = self.facts();
        EndpointReadiness {
            state: facts.state().0,
            probe_failing_since: facts.probe_failing_since,
            last_ready_probe: facts.last_ready_probe,
        }
    }

    /// `/readyz` said ok often enough.
    pub fn readyz_ok(&self) {
        self.update(|facts| facts.readyz = Readyz::Ok);
    }

    /// `/readyz` failed often enough, in these words.
    pub fn readyz_failing(&self, why: &str) {
        self.update(|facts| facts.readyz = Readyz::Failing(why.to_owned()));
    }

    /// `/readyz` cannot be asked, or its answer is not told: that the endpoint lives is all that is
    /// known, and makes it ready.
    pub fn readyz_not_probed(&self, why: &'static str) {
        self.update(|facts| facts.readyz = Readyz::NotAsked(why));
    }

    /// Passive evidence: an answer of this status arrived for a request.
    pub fn response_received(&self, status: u16) {
        self.metrics.answered(status);
        if status < 500 {
            if self.errors_in_row.load(Ordering::Relaxed) != 0 {
                self.errors_in_row.store(0, Ordering::Relaxed);
            }
        } else if self.errors_in_row.fetch_add(1, Ordering::Relaxed) + 1 == ERROR_STREAK {
            self.probe.notify_one();
        }
    }

    /// Waits until a request that was sent at `sent` on a connection without PINGs, and must not be
    /// sent twice, has waited long enough for its response head; says why. The PINGs on all HTTP/2
    /// connections stayed unanswered until the last one was given up, after `sent` and
    /// [`WRITE_PATIENCE`] ago, and none has been opened since.
    pub async fn no_response_expected(&self, sent: Instant) -> String {
        loop {
            if let Some((at, why)) = &self.facts().given_up
                && *at >= sent
                && at.elapsed() >= WRITE_PATIENCE
            {
                return why.clone();
            }
            sleep(LOOK).await;
        }
    }

    /// Passive evidence: heads stay away there. Asks for a `/readyz` at once.
    pub fn request_probe(&self) {
        self.probe.notify_one();
    }

    /// Another endpoint is in doubt. Asks for a `/readyz` now, to know whether watches may move here.
    pub fn request_confirmation_probe(&self) {
        self.proof_wanted.store(true, Ordering::Relaxed);
        self.probe.notify_one();
    }

    /// Waits for [`Self::request_confirmation_probe`], [`Self::request_probe`] or a streak of errors: what for.
    pub async fn probe_requested(&self) -> ProbeTrigger {
        self.probe.notified().await;
        if self.proof_wanted.swap(false, Ordering::Relaxed) {
            ProbeTrigger::Confirmation
        } else {
            ProbeTrigger::PassiveEvidence
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::timeout;

    use super::*;
    use crate::config::EndpointAddress;
    use crate::observe::Metrics;
    use crate::upstream::credentials::CredentialClass;
    use crate::upstream::stats::ConnectionStats;

    #[tokio::test(start_paused = true)]
    async fn request_is_given_up_2_s_after_the_last_connection_whose_ping_stayed_unanswered() {
        const MS: Duration = Duration::from_millis(1);
        let address = EndpointAddress { host: "10.0.0.1".into(), port: 6443 };
        let metrics = Metrics::new().endpoint("u", "e");
        let endpoint = Endpoint::new(&"u".into(), &address, None, metrics).unwrap();
        let open = || {
            let stats =
                ConnectionStats::new(CredentialClass::Anonymous, None, None, Instant::now());
            endpoint.connection_opened(&stats);
        };
        let lose = |why| {
            endpoint.connection_responds(false);
            endpoint.connection_closed(false, why);
        };
        let given_up = async |sent: Instant| {
            let begin = Instant::now();
            let why = timeout(60_000 * MS, endpoint.no_response_expected(sent)).await.ok()?;
            Some((why, begin.elapsed()))
        };
        let sent = Instant::now();
        open();
        endpoint.connection_closed(true, "GOAWAY");
        assert_eq!(given_up(sent).await, None, "its PINGs were answered");
        open();
        open();
        lose("reset");
        assert_eq!(given_up(sent).await, None, "another one is left");
        lose("stopped");
        let (why, took) = given_up(sent).await.unwrap();
        assert_eq!(why, "stopped");
        assert!((2_000 * MS..=2_200 * MS).contains(&took), "{took:?}");
        assert_eq!(given_up(Instant::now()).await, None, "it was connected to afterwards");
        open();
        assert_eq!(given_up(sent).await, None, "it is back");
    }
}

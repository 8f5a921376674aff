//! Signs of how well an endpoint is, and who wants to know: the prober's findings and doubts, and what
//! requests notice by themselves.

use std::sync::atomic::Ordering;

use tokio::time::Instant;

use super::Endpoint;
use super::state::Readyz;
use crate::upstream::flight::Readiness;

/// Why a probe is wanted before its time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wanted {
    /// Something is strange here: a streak of errors, heads that stay away.
    Evidence,
    /// Another endpoint is in doubt, and its watches look for one that is not.
    Proof,
}

/// 5xx answers in a row after which `/readyz` is asked at once.
const ERROR_STREAK: u64 = 5;

impl Endpoint {
    /// `/readyz` failed once or keeps us waiting: no verdict yet. Returns whether that is news.
    pub fn readyz_doubted(&self, now: Instant) -> bool {
        self.facts().doubted.get_or_insert(now);
        !self.doubted.swap(true, Ordering::Relaxed)
    }

    /// `/readyz`, asked at `asked_at`, was right.
    pub fn readyz_right(&self, asked_at: Instant) {
        let mut facts = self.facts();
        facts.doubted = None;
        facts.well = Some(asked_at);
        drop(facts);
        self.doubted.store(false, Ordering::Relaxed);
    }

    /// Whether the latest `/readyz` failed or keeps us waiting. Cheap.
    pub fn is_doubted(&self) -> bool {
        self.doubted.load(Ordering::Relaxed)
    }

    /// What is known of its readiness.
    pub fn readiness(&self) -> Readiness {
        let facts = self.facts();
        Readiness { state: facts.state().0, doubted: facts.doubted, well: facts.well }
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
    pub fn readyz_not_asked(&self, why: &'static str) {
        self.update(|facts| facts.readyz = Readyz::NotAsked(why));
    }

    /// Passive evidence: an answer of this status arrived for a request.
    pub fn answered(&self, status: u16) {
        self.metrics.answered(status);
        if status < 500 {
            if self.errors_in_row.load(Ordering::Relaxed) != 0 {
                self.errors_in_row.store(0, Ordering::Relaxed);
            }
        } else if self.errors_in_row.fetch_add(1, Ordering::Relaxed) + 1 == ERROR_STREAK {
            self.probe.notify_one();
        }
    }

    /// Passive evidence: heads stay away there. Asks for a `/readyz` at once.
    pub fn probe_soon(&self) {
        self.probe.notify_one();
    }

    /// Another endpoint is in doubt. Asks for a `/readyz` now, to know whether watches may move here.
    pub fn prove_soon(&self) {
        self.proof_wanted.store(true, Ordering::Relaxed);
        self.probe.notify_one();
    }

    /// Waits for [`Self::prove_soon`], [`Self::probe_soon`] or a streak of errors: what for.
    pub async fn probe_wanted(&self) -> Wanted {
        self.probe.notified().await;
        if self.proof_wanted.swap(false, Ordering::Relaxed) {
            Wanted::Proof
        } else {
            Wanted::Evidence
        }
    }
}

//! What the prober reports of `/readyz`, and what requests report as passive evidence.

use tokio::time::Instant;

use super::Endpoint;
use super::health::{EndpointReadiness, Observation};
use super::probe_signals::ProbeTrigger;
use crate::upstream::readyz::ReadyzCheck;

impl Endpoint {
    /// `/readyz` was ok often enough.
    pub fn readyz_ok(&self) {
        self.observe(Observation::ReadyzOk);
    }

    /// `/readyz` failed often enough, for this reason.
    pub fn readyz_failing(&self, reason: &str) {
        self.observe(Observation::ReadyzFailing(reason));
    }

    /// `/readyz` cannot be asked, for this reason: a live connection makes the endpoint ready.
    pub fn readyz_not_probed(&self, reason: &'static str) {
        self.observe(Observation::ReadyzNotProbed(reason));
    }

    /// One `/readyz` failed or is overdue. Returns whether the one before was ok.
    pub fn note_probe_failing(&self, now: Instant) -> bool {
        self.guarded().health.note_probe_failing(now);
        !self.probe.set_failing(true)
    }

    /// One `/readyz`, asked at `asked_at`, was ok.
    pub fn note_probe_ok(&self, asked_at: Instant) {
        self.guarded().health.note_probe_ok(asked_at);
        self.probe.set_failing(false);
    }

    /// Records the latest `/readyz` check, for `/status`.
    pub fn record_check(&self, check: ReadyzCheck) {
        self.guarded().last_check = Some(check);
    }

    /// Whether the latest `/readyz` failed or is overdue. One atomic load.
    pub fn is_probe_failing(&self) -> bool {
        self.probe.is_failing()
    }

    /// Its readiness, for evacuations.
    pub fn readiness(&self) -> EndpointReadiness {
        self.guarded().health.readiness()
    }

    /// Passive evidence: a response with this status arrived.
    pub fn response_received(&self, status: u16) {
        self.metrics.answered(status);
        self.probe.response_received(status);
    }

    /// Passive evidence: response heads are slow. Requests a `/readyz` at once.
    pub fn request_probe(&self) {
        self.probe.request(ProbeTrigger::PassiveEvidence);
    }

    /// The probe of another endpoint fails. Requests a `/readyz` at once, which shows whether
    /// watches may move here.
    pub fn request_confirmation_probe(&self) {
        self.probe.request(ProbeTrigger::Confirmation);
    }

    /// Waits until a probe is requested; returns why.
    pub async fn probe_requested(&self) -> ProbeTrigger {
        self.probe.requested().await
    }
}

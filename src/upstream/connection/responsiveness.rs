//! Applies the health of a connection to the requests that wait on it and to its endpoint.

use super::Connection;
use crate::upstream::endpoint::Observation;
use crate::upstream::health::{ConnectionFindings, ConnectionState, StateChangeReason};

impl Connection {
    /// Whether a request sent on this connection now would most likely be lost: its PING is late, and
    /// the peer's kernel does not answer either.
    pub fn path_unresponsive(&self) -> bool {
        self.lifecycle.path_unresponsive.get()
    }

    /// Waits until no response head can be expected any more, and returns the reason: the path is lost,
    /// or the process has been stopped for too long. The second reason applies only to requests that
    /// must not be sent twice; a `safe` request gets a second attempt on another connection instead.
    pub async fn no_response_expected(&self, safe: bool) -> &'static str {
        loop {
            if self.is_unresponsive() {
                return self.lifecycle.unresponsive_reason.get();
            }
            if !safe && self.lifecycle.fails_unsafe_requests.get() {
                return StateChangeReason::ProcessStopped.as_str();
            }
            self.changed.notified().await;
        }
    }

    /// Whether its path is lost. It then stays open only for streams that cannot continue on another
    /// connection.
    pub fn is_unresponsive(&self) -> bool {
        self.state() == ConnectionState::Unresponsive
    }

    /// Waits for [`Self::is_unresponsive`].
    pub async fn became_unresponsive(&self) {
        while !self.is_unresponsive() {
            self.changed.notified().await;
        }
    }

    /// Enters a state that [`crate::upstream::health`] has derived.
    pub(super) fn enter_derived(&self, state: ConnectionState, reason: StateChangeReason) {
        if state == ConnectionState::Unresponsive {
            self.lifecycle.unresponsive_reason.set(reason.as_str());
        }
        self.enter(state, reason.as_str());
    }

    /// Publishes the findings of [`crate::upstream::health`].
    pub(super) fn set_findings(&self, findings: ConnectionFindings) {
        self.lifecycle.path_unresponsive.set(findings.path_unresponsive);
        let responds = !findings.ping_unanswered;
        if self.lifecycle.responds.replace(responds) != responds && self.lifecycle.counted.get() {
            self.endpoint.observe(Observation::ConnectionResponds(responds));
        }
        let fails = findings.fails_unsafe_requests;
        if self.lifecycle.fails_unsafe_requests.replace(fails) != fails {
            self.changed.notify_waiters();
        }
    }
}

//! What a connection that does not answer means for those that wait on it: when a request stops
//! waiting, which streams cannot move, and what the endpoint hears of it.

use super::Connection;
use crate::upstream::health::{ConnectionState, Reason};

impl Connection {
    /// Waits until there is nothing to wait for here for a request without a response head; says why.
    /// The path is lost; or the process has been stopped for so long that a request that must not
    /// be sent twice (not `safe`) ends. Others have a second attempt beside it.
    pub async fn no_response_expected(&self, safe: bool) -> &'static str {
        loop {
            if self.life.get() == ConnectionState::Unresponsive {
                return self.trouble.get();
            }
            if !safe && self.ends_writes.get() {
                return Reason::ProcessStopped.as_str();
            }
            self.changed.notified().await;
        }
    }

    /// Whether its path is lost, and it is kept for the sake of streams that cannot move.
    pub fn is_unresponsive(&self) -> bool {
        self.life.get() == ConnectionState::Unresponsive
    }

    /// Waits for [`Self::is_unresponsive`].
    pub async fn became_unresponsive(&self) {
        while !self.is_unresponsive() {
            self.changed.notified().await;
        }
    }

    /// A stream of it can no longer move, or can again.
    pub(super) fn pin(&self, pinned: bool) {
        let count = self.pinned.get();
        self.pinned.set(if pinned { count + 1 } else { count.saturating_sub(1) });
    }

    /// Enters the state `life` for a reason that the health of the connection has found.
    pub(super) fn judged(&self, life: ConnectionState, reason: Reason) {
        if life == ConnectionState::Unresponsive {
            self.trouble.set(reason.as_str());
        }
        self.enter(life, reason.as_str());
    }

    /// Notes whether PINGs are answered; the endpoint counts those connections on which they are not.
    pub(super) fn note_answers(&self, answers: bool) {
        if self.answers.replace(answers) != answers && self.counted.get() {
            self.endpoint.connection_responds(answers);
        }
    }

    /// Notes whether requests end that must not be sent twice.
    pub(super) fn note_ends_writes(&self, ends: bool) {
        if self.ends_writes.replace(ends) != ends {
            self.changed.notify_waiters();
        }
    }
}

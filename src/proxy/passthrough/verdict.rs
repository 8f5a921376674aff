//! Why a flow is ended, as the metric says it and in words.

/// Why a flow is ended, as a label and in words.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Verdict {
    /// One of [`crate::observe::names::CLOSE_REASONS`].
    pub reason: &'static str,
    /// For the log.
    pub words: &'static str,
}

pub(super) const ENDPOINT_DEAD: Verdict =
    Verdict { reason: "endpoint_dead", words: "the endpoint is dead, and all its flows with it" };
pub(super) const ENDPOINT_LEFT: Verdict =
    Verdict { reason: "endpoint_left", words: "it was removed, and leave_timeout ends" };
pub(super) const HANDSHAKE: Verdict =
    Verdict { reason: "handshake_timeout", words: "the server said nothing in handshake_timeout" };
pub(super) const IDLE: Verdict =
    Verdict { reason: "idle_timeout", words: "nothing moved for idle_timeout" };
pub(super) const UNACKNOWLEDGED: Verdict =
    Verdict { reason: "unacknowledged", words: "nothing is acknowledged any more" };
pub(super) const UNANSWERED: Verdict =
    Verdict { reason: "unanswered", words: "keepalives are not answered any more" };
pub(super) const CLIENT_DEAD: Verdict =
    Verdict { reason: "client_dead", words: "the client acknowledges nothing any more" };
pub(super) const CLIENT_GONE: Verdict =
    Verdict { reason: "client_reset", words: "the client has reset it" };
pub(super) const REBALANCE: Verdict =
    Verdict { reason: "rebalance", words: "the endpoint has more than its share (rebalance)" };
pub(super) const SHUTDOWN: Verdict =
    Verdict { reason: "shutdown", words: "the drain timeout ends" };

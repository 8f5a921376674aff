//! Why jackstay ends a flow.

/// Why a flow is ended, as a metric label and in words.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EndReason {
    /// One of [`crate::observe::names::CLOSE_REASONS`].
    pub label: &'static str,
    /// For the log.
    pub description: &'static str,
}

pub(super) const ENDPOINT_DEAD: EndReason =
    EndReason { label: "endpoint_dead", description: "the endpoint does not respond" };
pub(super) const ENDPOINT_LEFT: EndReason = EndReason {
    label: "endpoint_left",
    description: "the endpoint was removed and leave_timeout has passed",
};
pub(super) const HANDSHAKE: EndReason = EndReason {
    label: "handshake_timeout",
    description: "the endpoint sent nothing within handshake_timeout",
};
pub(super) const IDLE: EndReason =
    EndReason { label: "idle_timeout", description: "no bytes were moved for idle_timeout" };
pub(super) const UNACKNOWLEDGED: EndReason = EndReason {
    label: "unacknowledged",
    description: "the endpoint does not acknowledge sent bytes",
};
pub(super) const UNANSWERED: EndReason =
    EndReason { label: "unanswered", description: "the endpoint does not answer keepalives" };
pub(super) const CLIENT_DEAD: EndReason =
    EndReason { label: "client_dead", description: "the client does not acknowledge sent bytes" };
pub(super) const CLIENT_RESET: EndReason =
    EndReason { label: "client_reset", description: "reset by the client" };
pub(super) const REBALANCE: EndReason =
    EndReason { label: "rebalance", description: "moved off an overloaded endpoint (rebalance)" };
pub(super) const SHUTDOWN: EndReason =
    EndReason { label: "shutdown", description: "the drain timeout has passed" };

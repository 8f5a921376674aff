//! The result of a probe.

/// The result of a probe.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReadyzResult {
    /// The endpoint is ready.
    Ready,
    /// The endpoint works and refuses this client (401, 403), so it is not avoided.
    Refused,
    /// The endpoint refuses this client because it is starting, with the reason.
    Starting(String),
    /// The endpoint is not ready, with the reason.
    NotReady(String),
    /// The connection was lost before the response was complete; the readiness is unknown.
    ConnectionLost,
}

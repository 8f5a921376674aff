//! The outcome of a `/readyz` check.

use serde::Serialize;

/// The outcome of one `/readyz` check, as `/status` shows it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ReadyzCheck {
    /// When the request was sent, RFC 3339.
    pub at: String,
    /// Time to the end of the response or to the failure, in milliseconds.
    pub duration_ms: f64,
    /// Status code; `null` if no response arrived.
    pub code: Option<u16>,
    /// Why the check failed; `null` if it succeeded.
    pub error: Option<String>,
}

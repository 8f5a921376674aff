//! Errors, which clients receive as a `Status` object.

use crate::kinds::Kind;
use serde_json::{Value, json};

/// An error response.
#[derive(Debug, Clone, PartialEq)]
pub struct StatusError {
    /// The HTTP status code.
    pub code: u16,
    /// The reason, as `metav1.StatusReason` spells it.
    pub reason: &'static str,
    /// The message for users.
    pub message: String,
    /// `details` of the `Status`, or null.
    pub details: Value,
}

impl StatusError {
    /// An error without details.
    pub fn new(code: u16, reason: &'static str, message: impl Into<String>) -> Self {
        Self { code, reason, message: message.into(), details: Value::Null }
    }

    fn with_details(mut self, kind: &Kind, name: &str) -> Self {
        self.details = json!({ "name": name, "group": kind.group, "kind": kind.plural });
        self
    }

    /// 404 for an object that does not exist.
    pub fn not_found(kind: &Kind, name: &str) -> Self {
        Self::new(404, "NotFound", format!("{} \"{name}\" not found", kind.qualified()))
            .with_details(kind, name)
    }

    /// 404 for an unknown path.
    pub fn no_such_path() -> Self {
        Self::new(404, "NotFound", "the server could not find the requested resource")
    }

    /// 409 for a name in use.
    pub fn already_exists(kind: &Kind, name: &str) -> Self {
        Self::new(409, "AlreadyExists", format!("{} \"{name}\" already exists", kind.qualified()))
            .with_details(kind, name)
    }

    /// 409 for a stale version or a failed precondition.
    pub fn conflict(kind: &Kind, name: &str, reason: &str) -> Self {
        Self::new(
            409,
            "Conflict",
            format!("Operation cannot be fulfilled on {} \"{name}\": {reason}", kind.qualified()),
        )
        .with_details(kind, name)
    }

    /// 410 for a version older than the history.
    pub fn expired(version: u64, oldest: u64) -> Self {
        Self::new(410, "Expired", format!("too old resource version: {version} ({oldest})"))
    }

    /// 504 for a version that the watch cache has not reached.
    pub fn too_large_version(minimum: u64, current: u64) -> Self {
        let cause = "Too large resource version";
        let message = format!("Timeout: {cause}: {minimum}, current: {current}");
        Self {
            details: json!({
                "causes": [{ "reason": "ResourceVersionTooLarge", "message": cause }],
                "retryAfterSeconds": 1,
            }),
            ..Self::new(504, "Timeout", message)
        }
    }

    /// The seconds of the `Retry-After` header, if the response has one.
    pub(super) fn retry_after(&self) -> Option<u64> {
        self.details["retryAfterSeconds"].as_u64()
    }

    /// 400 for a malformed request.
    pub fn bad_request(message: impl Into<String>) -> Self {
        Self::new(400, "BadRequest", message)
    }

    /// 422 for an invalid object or parameter.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(422, "Invalid", message)
    }

    /// 405 for an unsupported method.
    pub fn method_not_allowed() -> Self {
        Self::new(
            405,
            "MethodNotAllowed",
            "the server does not allow this method on the requested resource",
        )
    }

    /// The `Status` object.
    pub fn status(&self) -> Value {
        let mut status = json!({
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "reason": self.reason,
            "code": self.code,
        });
        if !self.details.is_null() {
            status["details"] = self.details.clone();
        }
        status
    }
}

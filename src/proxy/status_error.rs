//! The errors that jackstay itself answers requests with.
//!
//! All of them are made here, so that these rules hold in one place:
//!
//! * The message is for people and starts with `jackstay: `, so that it is clear who answered.
//! * **Retry-After makes clients send the request again.** client-go repeats every verb, POST included,
//!   up to ten times after a 429 or 5xx with that header (`with_retry.go`). So only an error for a
//!   request that was not sent, or that the apiserver says it did not process, may carry it. The error
//!   for a write with unknown outcome never does.
//!
//! [`super::status_response`] renders an error as a `metav1.Status`.

use std::fmt;

use http::StatusCode;

use crate::upstream::pool::Unavailable;

/// `metav1.StatusReason`, which programs read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StatusReason {
    /// 400.
    BadRequest,
    /// 401.
    Unauthorized,
    /// 429.
    TooManyRequests,
    /// Its documentation says: "it is unexpected and the outcome of the call is unknown".
    InternalError,
    /// 503: the request was valid, but no server can process it.
    ServiceUnavailable,
    /// 504.
    Timeout,
    /// Kubernetes has no name for the reason (`StatusReasonUnknown`).
    Unknown,
}

impl StatusReason {
    /// The reason as Kubernetes spells it; empty for [`StatusReason::Unknown`].
    pub const fn as_str(self) -> &'static str {
        match self {
            StatusReason::BadRequest => "BadRequest",
            StatusReason::Unauthorized => "Unauthorized",
            StatusReason::TooManyRequests => "TooManyRequests",
            StatusReason::InternalError => "InternalError",
            StatusReason::ServiceUnavailable => "ServiceUnavailable",
            StatusReason::Timeout => "Timeout",
            StatusReason::Unknown => "",
        }
    }
}

/// An error of jackstay for a client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StatusError {
    /// The HTTP status.
    pub code: StatusCode,
    /// The machine-readable reason.
    pub reason: StatusReason,
    /// The metric label: one of [`crate::observe::names::OWN_ERROR_REASONS`].
    pub cause: &'static str,
    /// The message for people; starts with `jackstay: `.
    pub message: String,
    /// Seconds after which the client may send the request again.
    pub retry_after: Option<u32>,
}

impl StatusError {
    fn new(code: StatusCode, reason: StatusReason, cause: &'static str, message: &str) -> Self {
        let message = format!("jackstay: {message}");
        StatusError { code, reason, cause, message, retry_after: None }
    }

    /// The error for a request for which the pool has no connection.
    pub fn unavailable(unavailable: &Unavailable) -> Self {
        match unavailable {
            Unavailable::Unreachable(reasons) => Self::no_upstream(reasons),
            Unavailable::Exhausted => Self::too_many_requests(
                "every stream to the apiservers is taken: see connections.max and \
                 connections.max_streams",
            ),
            Unavailable::NoCredential => {
                Self::unauthorized("the credential for this identity is not loaded yet")
            }
        }
    }

    /// 503: no apiserver can be reached. Without Retry-After: clients have a backoff of their own, and
    /// ten repeats of each request would load a control plane that has just come back.
    pub fn no_upstream(detail: &str) -> Self {
        Self::new(
            StatusCode::SERVICE_UNAVAILABLE,
            StatusReason::ServiceUnavailable,
            "no_upstream",
            &format!("no apiserver is reachable: {detail}"),
        )
    }

    /// 429 without Retry-After: no apiserver can serve a watch now. client-go lists again after every
    /// error of a watch but this one and a refused connection (`reflector.go`,
    /// `isWatchErrorRetriable`). With Retry-After it would not use its backoff.
    pub fn no_upstream_for_watch(detail: &str) -> Self {
        Self::new(
            StatusCode::TOO_MANY_REQUESTS,
            StatusReason::TooManyRequests,
            "no_upstream",
            &format!("no apiserver can serve this watch: {detail}"),
        )
    }

    /// 502: a write was sent, and its connection was lost before the response. The reason is
    /// `InternalError`, which is documented as "the outcome of the call is unknown".
    /// `ServiceUnavailable` and `ServerTimeout` both tell the client to send the request again.
    pub fn unknown_fate(detail: &str) -> Self {
        let message = format!(
            "the connection to the apiserver was lost before it answered, and the request may or \
             may not have been carried out: {detail}"
        );
        Self::new(StatusCode::BAD_GATEWAY, StatusReason::InternalError, "unknown_fate", &message)
    }

    /// 502: the apiserver broke off or sent an invalid response to a request that changes nothing.
    pub fn bad_gateway(detail: &str) -> Self {
        Self::new(StatusCode::BAD_GATEWAY, StatusReason::InternalError, "bad_gateway", detail)
    }

    /// 502 with `Retry-After: 1`: the apiserver did not process the request, and jackstay no longer
    /// holds its whole body, so that only the client can send it again.
    pub fn unprocessed(detail: &str) -> Self {
        let message = format!(
            "the request was not processed, and its body is too large to be sent again from here: \
             {detail}"
        );
        let (code, reason) = (StatusCode::BAD_GATEWAY, StatusReason::ServiceUnavailable);
        let error = Self::new(code, reason, "unprocessed", &message);
        StatusError { retry_after: Some(1), ..error }
    }

    /// 401: jackstay has no credential for the client.
    pub fn unauthorized(message: &str) -> Self {
        Self::new(StatusCode::UNAUTHORIZED, StatusReason::Unauthorized, "unauthorized", message)
    }

    /// 400: the request must not be forwarded.
    pub fn bad_request(message: &str) -> Self {
        Self::new(StatusCode::BAD_REQUEST, StatusReason::BadRequest, "bad_request", message)
    }

    /// 429 with `Retry-After: 1`: the request exceeded a limit of jackstay **before** it was sent.
    pub fn too_many_requests(message: &str) -> Self {
        let (code, reason) = (StatusCode::TOO_MANY_REQUESTS, StatusReason::TooManyRequests);
        let error = Self::new(code, reason, "limit", message);
        StatusError { retry_after: Some(1), ..error }
    }

    /// 431: the request's head is larger than the limit.
    pub fn header_too_large(message: &str) -> Self {
        let code = StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE;
        Self::new(code, StatusReason::Unknown, "header_too_large", message)
    }

    /// 504: nothing came in time.
    pub fn gateway_timeout(message: &str) -> Self {
        Self::new(StatusCode::GATEWAY_TIMEOUT, StatusReason::Timeout, "timeout", message)
    }

    /// 500: jackstay failed.
    pub fn internal(message: &str) -> Self {
        let code = StatusCode::INTERNAL_SERVER_ERROR;
        Self::new(code, StatusReason::InternalError, "internal", message)
    }
}

impl fmt::Display for StatusError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for StatusError {}

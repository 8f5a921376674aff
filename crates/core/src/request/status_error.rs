//! The errors with which jackstay itself responds to requests. Only the functions of this module create
//! them, so that two rules hold for all errors:
//!
//! * The message starts with `jackstay: `, so that a reader does not take it for one of the apiserver.
//! * **Retry-After makes clients send the request again.** client-go repeats every verb, POST included,
//!   up to ten times after a 429 or 5xx with that header (`with_retry.go`). Therefore only the error of a
//!   request that was not sent, or that the apiserver says it has not processed, may carry it. The error
//!   of a write with unknown outcome never does.
//!
//! The shell renders an error as a `metav1.Status`.

use std::fmt::Display;

use http::StatusCode;

/// An error of jackstay for a client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StatusError {
    /// The status code of the response.
    pub code: StatusCode,
    /// `metav1.StatusReason`, which programs read; empty if Kubernetes has no name for the reason.
    pub reason: &'static str,
    /// The metric label: one of the reasons in `jackstay_own_errors_total`.
    pub label: &'static str,
    /// The text for people.
    pub message: String,
    /// Seconds after which the client may send the request again.
    pub retry_after: Option<u32>,
    /// Whether the client's HTTP/1.1 connection ends with the response.
    pub closes_connection: bool,
}

impl StatusError {
    fn new(
        code: StatusCode,
        reason: &'static str,
        label: &'static str,
        message: impl Display,
    ) -> Self {
        let message = format!("jackstay: {message}");
        StatusError { code, reason, label, message, retry_after: None, closes_connection: false }
    }

    /// 503 without Retry-After: no apiserver is reachable. With Retry-After, clients would repeat each
    /// request up to ten times without their backoff, and load a control plane that has just recovered.
    pub fn no_upstream(detail: impl Display) -> Self {
        let message = format_args!("no apiserver is reachable: {detail}");
        let code = StatusCode::SERVICE_UNAVAILABLE;
        Self::new(code, "ServiceUnavailable", "no_upstream", message)
    }

    /// 429 without Retry-After: no apiserver can serve a watch now. client-go lists again after every
    /// error of a watch except a 429 and a refused connection (`reflector.go`, `isWatchErrorRetriable`).
    /// With Retry-After it would not use its backoff.
    pub fn no_upstream_for_watch(detail: impl Display) -> Self {
        let message = format_args!("no apiserver can serve this watch: {detail}");
        Self::new(StatusCode::TOO_MANY_REQUESTS, "TooManyRequests", "no_upstream", message)
    }

    /// 502: the outcome of a write is unknown, because its connection was lost after the write was sent and
    /// before the response. The reason is `InternalError`, which Kubernetes documents as "the outcome of
    /// the call is unknown": `ServiceUnavailable` and `ServerTimeout` both tell the client to send the
    /// request again. The metric label of this error is `unknown_outcome`.
    pub fn unknown_outcome(detail: impl Display) -> Self {
        let message = format_args!(
            "the connection to the apiserver was lost before it answered, and the request may or \
             may not have been carried out: {detail}"
        );
        Self::new(StatusCode::BAD_GATEWAY, "InternalError", "unknown_outcome", message)
    }

    /// 504: jackstay ended a heartbeat because its apiserver is not healthy. The outcome is
    /// unknown. kube-apiserver's own error for a write that takes too long is the same (`NewTimeoutError` in
    /// `k8s.io/apimachinery/pkg/api/errors`).
    pub fn unanswered_heartbeat(detail: impl Display) -> Self {
        let message = format_args!(
            "the apiserver did not answer in time, and the request may or may not have been carried out: \
             {detail}"
        );
        Self::new(StatusCode::GATEWAY_TIMEOUT, "Timeout", "heartbeat_ended", message)
    }

    /// 502: the apiserver sent no complete or no valid response to a request that changes nothing, or a
    /// request that was not processed cannot be sent again.
    pub fn bad_gateway(detail: impl Display) -> Self {
        Self::new(StatusCode::BAD_GATEWAY, "InternalError", "bad_gateway", detail)
    }

    /// 502 with `Retry-After: 1`: the apiserver did not process the request, and jackstay no longer
    /// holds its whole body, so that only the client can send it again.
    pub fn unprocessed(detail: impl Display) -> Self {
        let message = format_args!(
            "the request was not processed, and its body is too large to be sent again from here: \
             {detail}"
        );
        Self::new(StatusCode::BAD_GATEWAY, "ServiceUnavailable", "unprocessed", message)
            .with_retry_after()
    }

    /// 500 without Retry-After: a defect of jackstay. The outcome of a write is unknown.
    pub fn internal_error(detail: impl Display) -> Self {
        let message = format_args!("a defect of jackstay, please report it: {detail}");
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "InternalError", "internal_error", message)
    }

    /// 401: jackstay has no credential for the client.
    pub fn unauthorized(message: impl Display) -> Self {
        Self::new(StatusCode::UNAUTHORIZED, "Unauthorized", "unauthorized", message)
    }

    /// 400: the request must not be forwarded.
    pub fn bad_request(message: impl Display) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "BadRequest", "bad_request", message)
    }

    /// 429 with `Retry-After: 1`: the request exceeded a limit of jackstay **before** it was sent.
    pub fn too_many_requests(message: impl Display) -> Self {
        Self::new(StatusCode::TOO_MANY_REQUESTS, "TooManyRequests", "limit", message)
            .with_retry_after()
    }

    /// 431: the request's head is larger than the limit.
    pub fn header_too_large(message: impl Display) -> Self {
        let code = StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE;
        Self::new(code, "", "header_too_large", message)
    }

    /// 414: the request target is longer than the limit.
    pub fn target_too_long(message: impl Display) -> Self {
        Self::new(StatusCode::URI_TOO_LONG, "", "header_too_large", message)
    }

    /// Ends the client's HTTP/1.1 connection with the response.
    #[must_use]
    pub fn closing_connection(self) -> Self {
        StatusError { closes_connection: true, ..self }
    }

    fn with_retry_after(self) -> Self {
        StatusError { retry_after: Some(1), ..self }
    }
}

//! The answers we give ourselves, as the Kubernetes `Status` that clients know how to read.
//!
//! Every error of ours is made here, so that the rules about them hold in one place:
//!
//! * A person can read the message, and it says who speaks: it starts with `jackstay: `.
//! * **Retry-After is an instruction to send again.** client-go repeats every verb, POST included,
//!   up to ten times on a 429 or 5xx that carries it (`with_retry.go`). So only a request that was
//!   certainly never sent, or that the apiserver says it did not process, may get one; a write whose
//!   fate is unknown never does.
//! * The encoding is the one the client asked for, negotiated as the apiserver negotiates it.

mod encode;
#[cfg(test)]
mod tests;

use std::fmt;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Response, StatusCode, header};

/// `metav1.StatusReason`: what programs look at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StatusReason {
    /// 400.
    BadRequest,
    /// 401.
    Unauthorized,
    /// 429.
    TooManyRequests,
    /// "it is unexpected and the outcome of the call is unknown", says its documentation.
    InternalError,
    /// 503: the request was valid, there is nobody to run it.
    ServiceUnavailable,
    /// 504.
    Timeout,
    /// None that Kubernetes has a name for (`StatusReasonUnknown`).
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

/// An error of ours, before it is written for a client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StatusError {
    /// The HTTP status.
    pub code: StatusCode,
    /// The machine-readable reason.
    pub reason: StatusReason,
    /// What it is counted as: one of [`crate::observe::names::OWN_ERROR_REASONS`].
    pub cause: &'static str,
    /// For people; starts with `jackstay: `.
    pub message: String,
    /// Seconds after which to send again: only ever for what was never sent or not processed.
    pub retry_after: Option<u32>,
}

impl StatusError {
    fn new(code: StatusCode, reason: StatusReason, cause: &'static str, message: &str) -> Self {
        let message = format!("jackstay: {message}");
        StatusError { code, reason, cause, message, retry_after: None }
    }

    /// 503: no apiserver can be reached. No Retry-After: clients have a backoff of their own, and
    /// ten repeats of each request are what a control plane that comes back needs least.
    pub fn no_upstream(detail: &str) -> Self {
        let message = format!("no apiserver is reachable: {detail}");
        Self::new(
            StatusCode::SERVICE_UNAVAILABLE,
            StatusReason::ServiceUnavailable,
            "no_upstream",
            &message,
        )
    }

    /// 429 without Retry-After: a watch that no apiserver can serve now. client-go lists again after
    /// every error of a watch but this one and a refused connection (`reflector.go`,
    /// `isWatchErrorRetriable`); Retry-After would make it ask again at its pace, not with a backoff.
    pub fn no_upstream_for_watch(detail: &str) -> Self {
        let message = format!("no apiserver can serve this watch: {detail}");
        let (code, reason) = (StatusCode::TOO_MANY_REQUESTS, StatusReason::TooManyRequests);
        Self::new(code, reason, "no_upstream", &message)
    }

    /// 502: a write was sent and its connection died before an answer. `InternalError`, because
    /// that reason is documented as "the outcome of the call is unknown"; `ServiceUnavailable` and
    /// `ServerTimeout` both tell the client that sending again is right.
    pub fn unknown_fate(detail: &str) -> Self {
        let message = format!(
            "the connection to the apiserver was lost before it answered, and the request may or \
             may not have been carried out: {detail}"
        );
        Self::new(StatusCode::BAD_GATEWAY, StatusReason::InternalError, "unknown_fate", &message)
    }

    /// 502: the apiserver broke off or answered nonsense, on a request that changes nothing.
    pub fn bad_gateway(detail: &str) -> Self {
        Self::new(StatusCode::BAD_GATEWAY, StatusReason::InternalError, "bad_gateway", detail)
    }

    /// 502 with `Retry-After: 1`: the apiserver says that it did not process the request, and the
    /// beginning of its body is no longer held, so that only the client can send it again.
    pub fn unprocessed(detail: &str) -> Self {
        let message = format!(
            "the request was not processed, and its body is too large to be sent again from here: \
             {detail}"
        );
        let (code, reason) = (StatusCode::BAD_GATEWAY, StatusReason::ServiceUnavailable);
        let problem = Self::new(code, reason, "unprocessed", &message);
        StatusError { retry_after: Some(1), ..problem }
    }

    /// 401: whose request it is cannot be passed on.
    pub fn unauthorized(message: &str) -> Self {
        Self::new(StatusCode::UNAUTHORIZED, StatusReason::Unauthorized, "unauthorized", message)
    }

    /// 400: a request that must not be forwarded as it is.
    pub fn bad_request(message: &str) -> Self {
        Self::new(StatusCode::BAD_REQUEST, StatusReason::BadRequest, "bad_request", message)
    }

    /// 429 with `Retry-After: 1`: a limit of ours, hit **before** the request was sent.
    pub fn too_many_requests(message: &str) -> Self {
        let problem = Self::new(
            StatusCode::TOO_MANY_REQUESTS,
            StatusReason::TooManyRequests,
            "limit",
            message,
        );
        StatusError { retry_after: Some(1), ..problem }
    }

    /// 431: the request's head is larger than we hold.
    pub fn header_too_large(message: &str) -> Self {
        Self::new(
            StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
            StatusReason::Unknown,
            "header_too_large",
            message,
        )
    }

    /// 504: nothing came in time.
    pub fn gateway_timeout(message: &str) -> Self {
        Self::new(StatusCode::GATEWAY_TIMEOUT, StatusReason::Timeout, "timeout", message)
    }

    /// 500: a fault of ours.
    pub fn internal(message: &str) -> Self {
        Self::new(
            StatusCode::INTERNAL_SERVER_ERROR,
            StatusReason::InternalError,
            "internal",
            message,
        )
    }

    /// The headers and the body, in the encoding that `accept` prefers.
    pub fn render(&self, accept: Option<&HeaderValue>) -> (HeaderMap, Bytes) {
        let (content_type, body) = match Encoding::negotiate(accept) {
            Encoding::Json => ("application/json", encode::json(self)),
            Encoding::Protobuf => (PROTOBUF, encode::protobuf(self)),
        };
        let mut headers = HeaderMap::with_capacity(4);
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
        // As the apiserver says on every answer (`WithCacheControl`).
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache, private"));
        headers.insert(header::CONTENT_LENGTH, HeaderValue::from(body.len()));
        if let Some(seconds) = self.retry_after {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        (headers, Bytes::from(body))
    }

    /// The whole answer.
    pub fn into_response(self, accept: Option<&HeaderValue>) -> Response<Bytes> {
        let (headers, body) = self.render(accept);
        let mut response = Response::new(body);
        *response.status_mut() = self.code;
        *response.headers_mut() = headers;
        response
    }
}

impl std::fmt::Display for StatusError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for StatusError {}

const PROTOBUF: &str = "application/vnd.kubernetes.protobuf";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Encoding {
    Json,
    Protobuf,
}

impl Encoding {
    /// `NegotiateMediaTypeOptions` with the restrictions for errors: the clauses by quality, then
    /// the more specific ones, then in order; a wildcard means JSON, the first type offered; a
    /// clause that asks for a transformation (`as=Table`) is passed over; JSON if nothing fits.
    fn negotiate(accept: Option<&HeaderValue>) -> Self {
        let Some(accept) = accept.and_then(|value| value.to_str().ok()) else {
            return Encoding::Json;
        };
        let (mut best, mut rank) = (Encoding::Json, (0, 0));
        for clause in accept.split(',') {
            let mut params = clause.split(';').map(str::trim);
            let media = params.next().unwrap_or("");
            let (encoding, specificity) = match media.to_ascii_lowercase().as_str() {
                PROTOBUF => (Encoding::Protobuf, 3),
                "application/json" => (Encoding::Json, 3),
                "application/*" => (Encoding::Json, 2),
                "*/*" => (Encoding::Json, 1),
                _ => continue,
            };
            let mut quality = 1000;
            let mut transformed = false;
            for (key, value) in params.filter_map(|param| param.split_once('=')) {
                match key.trim() {
                    "q" => quality = thousandths(value.trim()),
                    "as" => transformed = true,
                    _ => {}
                }
            }
            // q=0 is "not acceptable" (RFC 9110, section 12.4.2).
            if !transformed && quality > 0 && (quality, specificity) > rank {
                (best, rank) = (encoding, (quality, specificity));
            }
        }
        best
    }
}

/// A quality value in thousandths; 1 when it is malformed, as goautoneg takes it.
fn thousandths(value: &str) -> u32 {
    match value.parse::<f32>() {
        Ok(q) if (0.0..=1.0).contains(&q) => (q * 1000.0).round() as u32,
        _ => 1000,
    }
}

/// Why a body ends before its end. It carries no h2 error, or hyper would reset the client's
/// stream with the same reason, and a `REFUSED_STREAM` would make Go replay a POST.
#[derive(Debug)]
pub struct BodyError(pub String);

impl fmt::Display for BodyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for BodyError {}

/// The largest body that [`shutting_down_rejection`] looks at; both real ones are far below.
pub const REJECTION_MAX_BODY: usize = 1024;

/// Whether an answer's head leaves it possible that it is a [`shutting_down_rejection`], so that
/// its short body is worth holding back. Everything else is streamed at once.
pub fn may_be_shutting_down(status: StatusCode, headers: &HeaderMap) -> bool {
    matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE)
        && headers.contains_key(header::RETRY_AFTER)
        // Priority and Fairness stamps what has passed it: a handler may have been at work.
        && !headers.contains_key("x-kubernetes-pf-flowschema-uid")
        && is_short(headers)
}

/// Whether an answer is, by its own account, short enough to be held back.
pub fn is_short(headers: &HeaderMap) -> bool {
    let length = headers.get(header::CONTENT_LENGTH).and_then(|v| v.to_str().ok());
    length.is_none_or(|v| v.parse().is_ok_and(|n: usize| n <= REJECTION_MAX_BODY))
}

/// Recognises the two answers that a terminating apiserver gives in a filter, before any handler
/// runs; such a request is proven unprocessed, whatever its verb.
///
/// * 429, text: `WithRetryAfter` in `k8s.io/apiserver/pkg/server/filters/with_retry_after.go`.
/// * 503, `Status`: `WithWaitGroup` in `waitgroup.go`; older servers label its JSON as text.
///
/// A 429 of an eviction, of Priority and Fairness, or a 503 of an aggregator are not these.
pub fn shutting_down_rejection(status: StatusCode, headers: &HeaderMap, body: &[u8]) -> bool {
    if !may_be_shutting_down(status, headers) || body.len() > REJECTION_MAX_BODY {
        return false;
    }
    if status == StatusCode::TOO_MANY_REQUESTS {
        let text = body.strip_suffix(b"\n").unwrap_or(body);
        return text == b"The apiserver is shutting down, please try again later.";
    }
    serde_json::from_slice::<serde_json::Value>(body).is_ok_and(|answer| {
        answer["kind"] == "Status"
            && answer["code"] == 503
            && answer["reason"] == "ServiceUnavailable"
            && answer["message"] == "apiserver is shutting down"
    })
}

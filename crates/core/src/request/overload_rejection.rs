//! Recognises the responses with which a kube-apiserver rejects a request because of its own load or state, so that
//! another one may accept it.
//!
//! | response | sent by |
//! |---|---|
//! | 429, text | `tooManyRequests` in `k8s.io/apiserver/pkg/server/filters/maxinflight.go`, for API Priority and Fairness and for `--max-requests-inflight` |
//! | 429, `Status` "storage is (re)initializing" | a watch cache that is not initialised (KEP-4568), as after the start |
//! | 429, text | an apiserver that is not ready yet, to clients that opt in (`WithOptInRetryAfter` in builds of `OpenShift`) |
//! | 503, `Status` "Error getting ip and port info …" | the mixed version proxy (KEP-4020), `peerproxy_handler.go` |
//!
//! All have a short body, and those with 429 a Retry-After. A 429 of an eviction and a 503 of an aggregated apiserver
//! are other responses: every kube-apiserver would send the same. `--goaway-chance` sends a GOAWAY with a response that
//! is complete, and a stream that the GOAWAY excludes was not processed.

use std::time::Duration;

use http::{HeaderMap, StatusCode, header};

use super::shutdown_rejection::{REJECTION_MAX_BODY, is_short};

/// The longest time for which an endpoint counts as rejecting after a rejection.
const MAX_PAUSE: Duration = Duration::from_secs(5);

/// Texts of the responses. The second and fourth are in a `Status`, encoded as JSON, protobuf or CBOR.
const TOO_MANY: &[u8] = b"Too many requests, please try again later.";
const INITIALIZING: &[u8] = b"storage is (re)initializing";
const NOT_INITIALIZED: &[u8] =
    b"The apiserver hasn't been fully initialized yet, please try again later.";
const PEER_UNKNOWN: &[u8] = b"Error getting ip and port info of the remote server while proxying";

/// Whether a response with this head may be such a rejection, so that its short body is read before it is forwarded.
pub fn may_be_overload(status: StatusCode, headers: &HeaderMap) -> bool {
    let may_be = match status {
        StatusCode::SERVICE_UNAVAILABLE => true,
        StatusCode::TOO_MANY_REQUESTS => headers.contains_key(header::RETRY_AFTER),
        _ => false,
    };
    may_be && is_short(headers)
}

/// Whether this is one of the responses.
pub fn is_overload(status: StatusCode, headers: &HeaderMap, body: &[u8]) -> bool {
    let contains = |text: &[u8]| body.windows(text.len()).any(|part| part == text);
    if !may_be_overload(status, headers) || body.len() > REJECTION_MAX_BODY {
        return false;
    }
    match status {
        StatusCode::TOO_MANY_REQUESTS => {
            let text = body.strip_suffix(b"\n").unwrap_or(body);
            text == TOO_MANY || text == NOT_INITIALIZED || contains(INITIALIZING)
        }
        _ => contains(PEER_UNKNOWN),
    }
}

/// For how long the endpoint counts as rejecting: its Retry-After, one second without it, at most [`MAX_PAUSE`].
pub fn pause(headers: &HeaderMap) -> Duration {
    let seconds = headers.get(header::RETRY_AFTER).and_then(|value| value.to_str().ok());
    let seconds = seconds.and_then(|text| text.trim().parse().ok()).unwrap_or(1);
    Duration::from_secs(seconds).clamp(Duration::from_secs(1), MAX_PAUSE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_overload_recognises_exactly_the_responses_of_the_table() {
        let status = |code: u16, message: &str| {
            format!(r#"{{"kind":"Status","status":"Failure","message":"{message}","code":{code}}}"#)
        };
        let too_many = "Too many requests, please try again later.\n";
        let not_initialized =
            "The apiserver hasn't been fully initialized yet, please try again later.\n";
        let initializing = status(429, "storage is (re)initializing");
        let peer =
            status(503, "Error getting ip and port info of the remote server while proxying");
        let eviction = status(429, "Cannot evict pod as it would violate the budget.");
        let long = format!("{}{initializing}", " ".repeat(REJECTION_MAX_BODY));
        let retry_after: &[(&'static str, &str)] = &[("retry-after", "1")];
        let fairness = &[("retry-after", "1"), ("x-kubernetes-pf-flowschema-uid", "u")];
        for (code, headers, body, expected) in [
            (429, retry_after, too_many, true),
            (429, fairness, too_many, true),
            (429, retry_after, not_initialized, true),
            (429, &[], not_initialized, false),
            (503, retry_after, not_initialized, false),
            (429, fairness, &*initializing, true),
            (429, retry_after, "k8s\0\u{1}storage is (re)initializing\u{2}", true),
            (503, &[], &*peer, true),
            (429, &[], too_many, false),
            (429, retry_after, &*eviction, false),
            (429, retry_after, &*long, false),
            (429, retry_after, "The apiserver is shutting down, please try again later.\n", false),
            (503, retry_after, "service unavailable\n", false),
            (503, retry_after, too_many, false),
            (200, retry_after, &*initializing, false),
        ] {
            let mut map = HeaderMap::new();
            for &(name, value) in headers {
                map.insert(name, value.parse().unwrap());
            }
            let code = StatusCode::from_u16(code).unwrap();
            assert_eq!(is_overload(code, &map, body.as_bytes()), expected, "{code} {body}");
        }
    }

    #[test]
    fn pause_is_the_retry_after_within_its_bounds() {
        for (text, seconds) in [("0", 1), ("1", 1), ("3", 3), ("60", 5), ("soon", 1)] {
            let mut headers = HeaderMap::new();
            headers.insert(header::RETRY_AFTER, text.parse().unwrap());
            assert_eq!(pause(&headers), Duration::from_secs(seconds), "{text}");
        }
        assert_eq!(pause(&HeaderMap::new()), Duration::from_secs(1));
    }
}

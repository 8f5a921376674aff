//! The two responses that a terminating kube-apiserver sends before any handler runs.
//!
//! A request with such a response was not processed, whatever its verb, and may be sent again.

use http::{HeaderMap, StatusCode, header};

/// Longest body that [`is_rejection`] reads, in bytes. Both real ones are far below.
pub const REJECTION_MAX_BODY: usize = 1024;

/// Whether a response with this head may be a rejection, so that its short body is worth holding back.
/// All other responses are streamed at once.
pub fn may_be_rejection(status: StatusCode, headers: &HeaderMap) -> bool {
    matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE)
        && headers.contains_key(header::RETRY_AFTER)
        // API Priority and Fairness sets this header, and runs after the two filters below: a handler
        // may have seen the request.
        && !headers.contains_key("x-kubernetes-pf-flowschema-uid")
        && is_short(headers)
}

/// Whether a response may be short enough to be held back, according to its Content-Length.
pub fn is_short(headers: &HeaderMap) -> bool {
    let length = headers.get(header::CONTENT_LENGTH).and_then(|v| v.to_str().ok());
    length.is_none_or(|v| v.parse().is_ok_and(|n: usize| n <= REJECTION_MAX_BODY))
}

/// Whether this is one of the two responses:
///
/// * 429, text: `WithRetryAfter` in `k8s.io/apiserver/pkg/server/filters/with_retry_after.go`.
/// * 503, `Status`: `WithWaitGroup` in `waitgroup.go`; older servers label its JSON as text.
///
/// A 429 of an eviction or of Priority and Fairness and a 503 of an aggregator are none.
pub fn is_rejection(status: StatusCode, headers: &HeaderMap, body: &[u8]) -> bool {
    if !may_be_rejection(status, headers) || body.len() > REJECTION_MAX_BODY {
        return false;
    }
    if status == StatusCode::TOO_MANY_REQUESTS {
        let text = body.strip_suffix(b"\n").unwrap_or(body);
        return text == b"The apiserver is shutting down, please try again later.";
    }
    serde_json::from_slice::<serde_json::Value>(body).is_ok_and(|body| {
        body["kind"] == "Status"
            && body["code"] == 503
            && body["reason"] == "ServiceUnavailable"
            && body["message"] == "apiserver is shutting down"
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_rejection_recognises_exactly_the_two_shutdown_responses() {
        const TEXT: &str = "The apiserver is shutting down, please try again later.\n";
        let status = |message: &str, reason: &str| {
            format!(
                r#"{{"kind":"Status","apiVersion":"v1","metadata":{{}},"status":"Failure","message":"{message}","reason":"{reason}","code":503}}"#
            ) + "\n"
        };
        let down = status("apiserver is shutting down", "ServiceUnavailable");
        let other =
            status("the server is currently unable to handle the request", "ServiceUnavailable");
        let internal = status("apiserver is shutting down", "InternalError");
        let long = format!("{}{TEXT}", " ".repeat(REJECTION_MAX_BODY));
        let after: &[(&'static str, &str)] = &[("retry-after", "5")];
        let fair = &[("retry-after", "1"), ("x-kubernetes-pf-flowschema-uid", "u")];
        for (code, headers, body, want) in [
            (429, after, TEXT, true),
            (429, after, TEXT.trim_end(), true),
            (503, after, &*down, true),
            (
                503,
                &[("retry-after", "1"), ("content-type", "text/plain"), ("content-length", "160")],
                &*down,
                true,
            ),
            (429, &[], TEXT, false),
            (429, fair, TEXT, false),
            (503, fair, &*down, false),
            (429, after, "Too many requests, please try again later.\n", false),
            (429, after, &*format!("x {TEXT}"), false),
            (429, after, &*long, false),
            (429, &[("retry-after", "5"), ("content-length", "5000")], TEXT, false),
            (429, after, &*down, false),
            (503, after, TEXT, false),
            (503, after, &*other, false),
            (503, after, &*internal, false),
            (503, after, "", false),
            (500, after, &*down, false),
            (200, after, TEXT, false),
        ] {
            let mut map = HeaderMap::new();
            for &(name, value) in headers {
                map.insert(name, value.parse().unwrap());
            }
            let code = StatusCode::from_u16(code).unwrap();
            assert_eq!(
                is_rejection(code, &map, body.as_bytes()),
                want,
                "{code} {headers:?} {body}"
            );
        }
    }
}

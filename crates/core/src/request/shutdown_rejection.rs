//! Recognises the two responses that a terminating kube-apiserver sends before any handler runs.
//!
//! A request with such a response was not processed and may be sent again, whatever its verb.

use http::{HeaderMap, StatusCode, header};

/// Maximum length of a rejection's body, in bytes. Both bodies of kube-apiserver are much shorter.
pub const REJECTION_MAX_BODY: usize = 1024;

/// Whether a response with this head may be a rejection, so that jackstay reads its short body before it
/// forwards the head.
pub fn may_be_rejection(status: StatusCode, headers: &HeaderMap) -> bool {
    matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE)
        && headers.contains_key(header::RETRY_AFTER)
        // API Priority and Fairness sets this header, and runs after the two filters of `is_rejection`. A
        // handler may have processed such a request.
        && !headers.contains_key("x-kubernetes-pf-flowschema-uid")
        && is_short(headers)
}

/// Whether the Content-Length, if any, is at most [`REJECTION_MAX_BODY`].
pub fn is_short(headers: &HeaderMap) -> bool {
    is_at_most(headers, REJECTION_MAX_BODY)
}

/// Whether the Content-Length, if any, is at most this number of bytes.
pub fn is_at_most(headers: &HeaderMap, limit: usize) -> bool {
    let length = headers.get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok());
    length.is_none_or(|text| text.parse::<usize>().is_ok_and(|bytes| bytes <= limit))
}

/// Whether this is one of the two responses:
///
/// * 429, text: `WithRetryAfter` in `k8s.io/apiserver/pkg/server/filters/with_retry_after.go`.
/// * 503, `Status`: `WithWaitGroup` in `waitgroup.go`; older servers label its JSON as text.
///
/// A 429 of an eviction or of Priority and Fairness, and a 503 of an aggregator, are no rejections.
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
        let json = status("apiserver is shutting down", "ServiceUnavailable");
        let other_message =
            status("the server is currently unable to handle the request", "ServiceUnavailable");
        let other_reason = status("apiserver is shutting down", "InternalError");
        let long = format!("{}{TEXT}", " ".repeat(REJECTION_MAX_BODY));
        let retry_after: &[(&'static str, &str)] = &[("retry-after", "5")];
        let fairness = &[("retry-after", "1"), ("x-kubernetes-pf-flowschema-uid", "u")];
        for (code, headers, body, expected) in [
            (429, retry_after, TEXT, true),
            (429, retry_after, TEXT.trim_end(), true),
            (503, retry_after, &*json, true),
            (
                503,
                &[("retry-after", "1"), ("content-type", "text/plain"), ("content-length", "160")],
                &*json,
                true,
            ),
            (429, &[], TEXT, false),
            (429, fairness, TEXT, false),
            (503, fairness, &*json, false),
            (429, retry_after, "Too many requests, please try again later.\n", false),
            (429, retry_after, &*format!("x {TEXT}"), false),
            (429, retry_after, &*long, false),
            (429, &[("retry-after", "5"), ("content-length", "5000")], TEXT, false),
            (429, retry_after, &*json, false),
            (503, retry_after, TEXT, false),
            (503, retry_after, &*other_message, false),
            (503, retry_after, &*other_reason, false),
            (503, retry_after, "", false),
            (500, retry_after, &*json, false),
            (200, retry_after, TEXT, false),
        ] {
            let mut map = HeaderMap::new();
            for &(name, value) in headers {
                map.insert(name, value.parse().unwrap());
            }
            let code = StatusCode::from_u16(code).unwrap();
            assert_eq!(
                is_rejection(code, &map, body.as_bytes()),
                expected,
                "{code} {headers:?} {body}"
            );
        }
    }
}

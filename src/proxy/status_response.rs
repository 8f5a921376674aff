//! Renders a [`StatusError`] as the `metav1.Status` that Kubernetes clients read.
//!
//! The encoding is the one that the client asked for, negotiated as the apiserver negotiates it.

mod encode;
#[cfg(test)]
mod tests;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Response, header};

use super::status_error::StatusError;

/// The headers and the body, in the encoding that `accept` prefers.
fn render(error: &StatusError, accept: Option<&HeaderValue>) -> (HeaderMap, Bytes) {
    let (content_type, body) = match Encoding::negotiate(accept) {
        Encoding::Json => ("application/json", encode::json(error)),
        Encoding::Protobuf => (PROTOBUF, encode::protobuf(error)),
    };
    let mut headers = HeaderMap::with_capacity(4);
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    // The apiserver sets it on every response (`WithCacheControl`).
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache, private"));
    headers.insert(header::CONTENT_LENGTH, HeaderValue::from(body.len()));
    if let Some(seconds) = error.retry_after {
        headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
    }
    (headers, Bytes::from(body))
}

/// The response to a client that sent this `Accept` header.
pub fn response(error: &StatusError, accept: Option<&HeaderValue>) -> Response<Bytes> {
    let (headers, body) = render(error, accept);
    let mut response = Response::new(body);
    *response.status_mut() = error.code;
    *response.headers_mut() = headers;
    response
}

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

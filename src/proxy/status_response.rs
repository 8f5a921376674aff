//! Renders a [`StatusError`] as the `metav1.Status` that Kubernetes clients read.
//!
//! The encoding is negotiated as the apiserver negotiates it. A client that accepts only CBOR gets JSON, which the
//! apiserver uses, too, if it cannot write what the client accepts. The protobuf message `Status` has only six
//! fields, so this module encodes it by hand.

#[cfg(test)]
mod tests;

use bytes::Bytes;
use http::{HeaderValue, Response, header};
use jackstay_core::request::status_error::StatusError;

const PROTOBUF: &str = "application/vnd.kubernetes.protobuf";
const FAILURE: &str = "Failure";

/// The response to a client that sent this `Accept` header.
pub fn response(error: &StatusError, accept: Option<&HeaderValue>) -> Response<Bytes> {
    let (content_type, body) = match Encoding::negotiate(accept) {
        Encoding::Json => ("application/json", json(error)),
        Encoding::Protobuf => (PROTOBUF, protobuf(error)),
    };
    let length = HeaderValue::from(body.len());
    let mut response = Response::new(Bytes::from(body));
    *response.status_mut() = error.code;
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    // The apiserver sets Cache-Control on every response (`WithCacheControl`).
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache, private"));
    headers.insert(header::CONTENT_LENGTH, length);
    if let Some(seconds) = error.retry_after {
        headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
    }
    if error.closes_connection {
        headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    response
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Encoding {
    Json,
    Protobuf,
}

impl Encoding {
    /// Selects the encoding as `NegotiateMediaTypeOptions` does for errors: the clause with the highest
    /// quality, then the most specific one, then the first one. A wildcard selects JSON, the first type
    /// that the apiserver offers. A clause that asks for a transformation (`as=Table`) is ignored. If no
    /// clause matches, JSON is used.
    fn negotiate(accept: Option<&HeaderValue>) -> Self {
        let Some(accept) = accept.and_then(|value| value.to_str().ok()) else {
            return Encoding::Json;
        };
        let (mut best, mut best_rank) = (Encoding::Json, (0, 0));
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
            let mut is_transformed = false;
            for (key, value) in params.filter_map(|param| param.split_once('=')) {
                match key.trim() {
                    "q" => quality = thousandths(value.trim()),
                    "as" => is_transformed = true,
                    _ => {}
                }
            }
            // q=0 means "not acceptable" (RFC 9110, section 12.4.2).
            let rank = (quality, specificity);
            if !is_transformed && quality > 0 && rank > best_rank {
                (best, best_rank) = (encoding, rank);
            }
        }
        best
    }
}

/// A quality value in thousandths. A malformed value counts as 1, the default.
fn thousandths(value: &str) -> u32 {
    match value.parse::<f32>() {
        Ok(q) if (0.0..=1.0).contains(&q) => (q * 1000.0).round() as u32,
        _ => 1000,
    }
}

fn json(error: &StatusError) -> Vec<u8> {
    let mut status = serde_json::json!({
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": FAILURE,
        "message": error.message,
        "code": error.code.as_u16(),
    });
    // Kubernetes omits `reason` and `details` if they are empty.
    if !error.reason.is_empty() {
        status["reason"] = error.reason.into();
    }
    if let Some(seconds) = error.retry_after {
        status["details"] = serde_json::json!({ "retryAfterSeconds": seconds });
    }
    let mut text = status.to_string().into_bytes();
    text.push(b'\n');
    text
}

/// Encodes `k8s\0` and a `runtime.Unknown` (`k8s.io/apimachinery/pkg/runtime/generated.proto`) that contains
/// the `Status` (`k8s.io/apimachinery/pkg/apis/meta/v1/generated.proto`).
fn protobuf(error: &StatusError) -> Vec<u8> {
    let mut status = Vec::with_capacity(error.message.len() + 64);
    field(&mut status, 1, b""); // metadata, an empty ListMeta
    field(&mut status, 2, FAILURE.as_bytes());
    field(&mut status, 3, error.message.as_bytes());
    field(&mut status, 4, error.reason.as_bytes());
    if let Some(seconds) = error.retry_after {
        let mut details = Vec::new();
        number(&mut details, 5, seconds.into()); // retryAfterSeconds
        field(&mut status, 5, &details);
    }
    number(&mut status, 6, error.code.as_u16().into());

    let mut type_meta = Vec::new();
    field(&mut type_meta, 1, b"v1");
    field(&mut type_meta, 2, b"Status");

    let mut out = b"k8s\0".to_vec();
    field(&mut out, 1, &type_meta);
    field(&mut out, 2, &status);
    field(&mut out, 3, b""); // contentEncoding
    field(&mut out, 4, b""); // contentType
    out
}

fn varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

/// A length-delimited field (wire type 2).
fn field(out: &mut Vec<u8>, tag: u64, bytes: &[u8]) {
    varint(out, tag << 3 | 2);
    varint(out, bytes.len() as u64);
    out.extend_from_slice(bytes);
}

/// A varint field (wire type 0).
fn number(out: &mut Vec<u8>, tag: u64, value: u64) {
    varint(out, tag << 3);
    varint(out, value);
}

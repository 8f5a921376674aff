//! Encodes `metav1.Status` as JSON and as Kubernetes' protobuf. The format has eight fields, so a code
//! generator would be more code than this.

use crate::proxy::status_error::StatusError;

const FAILURE: &str = "Failure";

pub(super) fn json(error: &StatusError) -> Vec<u8> {
    let mut status = serde_json::json!({
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": FAILURE,
        "message": error.message,
        "code": error.code.as_u16(),
    });
    // Kubernetes omits both when they are empty.
    if !error.reason.as_str().is_empty() {
        status["reason"] = error.reason.as_str().into();
    }
    if let Some(seconds) = error.retry_after {
        status["details"] = serde_json::json!({ "retryAfterSeconds": seconds });
    }
    let mut text = status.to_string().into_bytes();
    text.push(b'\n');
    text
}

/// `k8s\0`, then `runtime.Unknown`
/// (`k8s.io/apimachinery/pkg/runtime/generated.proto`) around `Status`
/// (`k8s.io/apimachinery/pkg/apis/meta/v1/generated.proto`).
pub(super) fn protobuf(error: &StatusError) -> Vec<u8> {
    let mut status = Vec::with_capacity(error.message.len() + 64);
    field(&mut status, 1, b""); // metadata, an empty ListMeta
    field(&mut status, 2, FAILURE.as_bytes());
    field(&mut status, 3, error.message.as_bytes());
    field(&mut status, 4, error.reason.as_str().as_bytes());
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

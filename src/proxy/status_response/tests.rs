//! Both encodings, read by an independent decoder, and the negotiation of the encoding.

use super::*;
use http::StatusCode;
use proptest::prelude::*;

/// One protobuf field: number, and bytes or a varint.
#[derive(Debug, PartialEq)]
enum Field<'a> {
    Bytes(u64, &'a [u8]),
    Number(u64, u64),
}

fn varint(input: &mut &[u8]) -> u64 {
    let (mut value, mut shift) = (0, 0);
    loop {
        let (&byte, rest) = input.split_first().expect("a varint ends");
        *input = rest;
        value |= u64::from(byte & 0x7f) << shift;
        shift += 7;
        if byte < 0x80 {
            return value;
        }
    }
}

fn fields(mut input: &[u8]) -> Vec<Field<'_>> {
    let mut out = Vec::new();
    while !input.is_empty() {
        let key = varint(&mut input);
        let value = varint(&mut input);
        match key & 7 {
            0 => out.push(Field::Number(key >> 3, value)),
            2 => {
                let (bytes, rest) = input.split_at(value as usize);
                input = rest;
                out.push(Field::Bytes(key >> 3, bytes));
            }
            other => panic!("wire type {other}"),
        }
    }
    out
}

fn error(message: &str, code: u16, reason: &'static str, retry_after: Option<u32>) -> StatusError {
    let code = StatusCode::from_u16(code).unwrap();
    StatusError {
        code,
        reason,
        label: "other",
        message: message.to_owned(),
        retry_after,
        closes_connection: false,
    }
}

proptest! {
    #[test]
    fn json_and_protobuf_contain_the_same_fields(
        message in any::<String>(),
        code in 100u16..1000,
        reason in proptest::sample::select(vec!["BadRequest", "InternalError", "TooManyRequests", ""]),
        retry_after in proptest::option::of(any::<u32>()),
    ) {
        let error = error(&message, code, reason, retry_after);
        let bytes = protobuf(&error);
        let envelope = fields(bytes.strip_prefix(b"k8s\0").unwrap());
        let [Field::Bytes(1, meta), Field::Bytes(2, raw), Field::Bytes(3, b""), Field::Bytes(4, b"")] =
            envelope[..] else { panic!("{envelope:?}") };
        prop_assert_eq!(fields(meta), [Field::Bytes(1, b"v1"), Field::Bytes(2, b"Status")]);
        let status = fields(raw);
        prop_assert_eq!(&status[..4], [
            Field::Bytes(1, b""),
            Field::Bytes(2, b"Failure"),
            Field::Bytes(3, message.as_bytes()),
            Field::Bytes(4, reason.as_bytes()),
        ]);
        let code_field = Field::Number(6, code.into());
        match (retry_after, &status[4..]) {
            (None, [last]) => prop_assert_eq!(last, &code_field),
            (Some(seconds), [Field::Bytes(5, details), last]) => {
                prop_assert_eq!(fields(details), [Field::Number(5, seconds.into())]);
                prop_assert_eq!(last, &code_field);
            }
            (retry_after, other) => prop_assert!(false, "{retry_after:?} {other:?}"),
        }

        let json: serde_json::Value = serde_json::from_slice(&json(&error)).unwrap();
        prop_assert_eq!(&json["message"], &message);
        prop_assert_eq!(&json["code"], code);
        prop_assert_eq!(json["reason"].as_str().unwrap_or(""), reason);
        prop_assert_eq!(json["details"]["retryAfterSeconds"].as_u64(), retry_after.map(u64::from));
    }

    #[test]
    fn response_to_any_accept_header_has_correct_length(accept in "[a-z/*;,=. q0-9\"]{0,60}") {
        let accept = HeaderValue::from_str(&accept).ok();
        let response = response(&StatusError::bad_request("x"), accept.as_ref());
        let length = response.headers()[header::CONTENT_LENGTH].to_str().unwrap();
        prop_assert_eq!(length, response.body().len().to_string());
    }
}

#[test]
fn response_without_accept_is_the_json_that_kubectl_reads() {
    let response = response(&StatusError::no_upstream("3 endpoints, all refused"), None);
    let json: serde_json::Value = serde_json::from_slice(response.body()).unwrap();
    assert_eq!(
        json,
        serde_json::json!({
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
            "message": "jackstay: no apiserver is reachable: 3 endpoints, all refused",
            "reason": "ServiceUnavailable", "code": 503,
        })
    );
    assert_eq!(response.headers()[header::CONTENT_TYPE], "application/json");
}

#[test]
fn only_errors_of_unprocessed_requests_have_retry_after() {
    for (error, code, reason, retry_after) in [
        (StatusError::no_upstream("x"), 503, "ServiceUnavailable", None),
        (StatusError::unknown_outcome("x"), 502, "InternalError", None),
        (StatusError::bad_gateway("x"), 502, "InternalError", None),
        (StatusError::unprocessed("x"), 502, "ServiceUnavailable", Some("1")),
        (StatusError::unauthorized("x"), 401, "Unauthorized", None),
        (StatusError::bad_request("x"), 400, "BadRequest", None),
        (StatusError::too_many_requests("x"), 429, "TooManyRequests", Some("1")),
        (StatusError::header_too_large("x"), 431, "", None),
    ] {
        assert!(error.message.starts_with("jackstay: "), "{error:?}");
        assert_eq!(error.reason, reason);
        let response = super::response(&error, None);
        assert_eq!(response.status(), code);
        let header = response.headers().get(header::RETRY_AFTER);
        assert_eq!(header.map(|value| value.to_str().unwrap()), retry_after);
    }
}

#[test]
fn negotiate_accept_as_the_apiserver_does() {
    const P: &str = PROTOBUF;
    for (accept, expected) in [
        ("", Encoding::Json),
        ("*/*", Encoding::Json),
        ("application/*", Encoding::Json),
        ("text/html", Encoding::Json),
        ("application/yaml", Encoding::Json),
        (P, Encoding::Protobuf),
        ("Application/Vnd.Kubernetes.Protobuf", Encoding::Protobuf),
        (&format!("{P},application/json"), Encoding::Protobuf),
        (&format!("application/json,{P}"), Encoding::Json),
        (&format!("application/json;q=0.9, {P}"), Encoding::Protobuf),
        (&format!("{P};q=0.5,application/json;q=0.8"), Encoding::Json),
        (&format!("{P};q=0,*/*"), Encoding::Json),
        (&format!("*/*,{P}"), Encoding::Protobuf),
        (&format!("*/*,{P};q=0.9"), Encoding::Json),
        (&format!("{P};stream=watch"), Encoding::Protobuf),
        (
            &format!("{P};as=PartialObjectMetadata;g=meta.k8s.io;v=v1,application/json"),
            Encoding::Json,
        ),
        ("application/json;as=Table;v=v1;g=meta.k8s.io,application/json", Encoding::Json),
    ] {
        let header = HeaderValue::from_str(accept).unwrap();
        assert_eq!(Encoding::negotiate(Some(&header)), expected, "{accept}");
    }
    assert_eq!(Encoding::negotiate(None), Encoding::Json);
    let header = HeaderValue::from_static(P);
    let response = super::response(&StatusError::bad_request("x"), Some(&header));
    assert_eq!(response.headers()[header::CONTENT_TYPE], P);
    assert!(response.body().starts_with(b"k8s\0"));
}

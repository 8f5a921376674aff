//! The ERROR event with which jackstay itself ends a watch whose client must list again.

use super::Encoding;

/// Code of the event's `Status`. client-go lists again after it (`reflector.go`, `handleAnyWatch`).
const EXPIRED: u16 = 410;
/// `metav1.StatusReasonExpired`.
const REASON: &str = "Expired";
/// Tag 55799: self-described CBOR (RFC 8949, section 3.4.6), which kube-apiserver puts before each object.
const SELF_DESCRIBED: &[u8] = b"\xd9\xd9\xf7";

/// A whole frame with an ERROR event whose `Status` has code 410. `message` must be plain ASCII without quotes and
/// backslashes.
pub fn expired(encoding: Encoding, message: &'static str) -> Vec<u8> {
    match encoding {
        Encoding::Json => format!(
            "{{\"type\":\"ERROR\",\"object\":{{\"kind\":\"Status\",\"apiVersion\":\"v1\",\"metadata\":{{}},\
             \"status\":\"Failure\",\"message\":\"{message}\",\"reason\":\"{REASON}\",\"code\":{EXPIRED}}}}}\n"
        )
        .into_bytes(),
        Encoding::Protobuf => protobuf(message),
        Encoding::Cbor => cbor(message),
    }
}

/// `WatchEvent`, `RawExtension`, `runtime.Unknown` and `Status` in the field numbers of `generated.proto`.
fn protobuf(message: &str) -> Vec<u8> {
    let mut status = field(1, &[]);
    status.extend(field(2, b"Failure"));
    status.extend(field(3, message.as_bytes()));
    status.extend(field(4, REASON.as_bytes()));
    status.push(6 << 3);
    status.extend(varint(EXPIRED.into()));
    let type_meta = [field(1, b"v1"), field(2, b"Status")].concat();
    let unknown = [&b"k8s\0"[..], &field(1, &type_meta), &field(2, &status)].concat();
    let event = [field(1, b"ERROR"), field(2, &field(1, &unknown))].concat();
    let mut frame = u32::try_from(event.len()).unwrap_or_default().to_be_bytes().to_vec();
    frame.extend(event);
    frame
}

/// A field of bytes, text or a message.
fn field(number: u8, value: &[u8]) -> Vec<u8> {
    let mut field = vec![number << 3 | 2];
    field.extend(varint(value.len() as u64));
    field.extend_from_slice(value);
    field
}

fn varint(mut value: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    while value >= 0x80 {
        bytes.push(value as u8 | 0x80);
        value >>= 7;
    }
    bytes.push(value as u8);
    bytes
}

/// As kube-apiserver encodes it (apimachinery, `serializer/cbor/internal/modes/encode.go`): texts are byte strings.
fn cbor(message: &str) -> Vec<u8> {
    let mut status = vec![0xa7];
    for (key, value) in [
        ("kind", "Status"),
        ("apiVersion", "v1"),
        ("status", "Failure"),
        ("message", message),
        ("reason", REASON),
    ] {
        status.extend(cbor_item(2, key.len()));
        status.extend_from_slice(key.as_bytes());
        status.extend(cbor_item(2, value.len()));
        status.extend_from_slice(value.as_bytes());
    }
    for (key, value) in [("metadata", vec![0xa0]), ("code", cbor_item(0, EXPIRED.into()))] {
        status.extend(cbor_item(2, key.len()));
        status.extend_from_slice(key.as_bytes());
        status.extend(value);
    }
    let head = [SELF_DESCRIBED, b"\xa2\x44type\x45ERROR\x46object", SELF_DESCRIBED].concat();
    [head, status].concat()
}

/// The head of an item.
fn cbor_item(major: u8, argument: usize) -> Vec<u8> {
    match argument {
        0..24 => vec![major << 5 | argument as u8],
        24..0x100 => vec![major << 5 | 0x18, argument as u8],
        _ => vec![major << 5 | 0x19, (argument >> 8) as u8, argument as u8],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::watch::codec::event::EventType;
    use crate::watch::codec::parse;

    #[test]
    fn expired_is_an_error_event_with_code_410_in_each_encoding() {
        let long = "x-".repeat(150).leak();
        for encoding in Encoding::ALL {
            for message in ["", "etcd was restored", long] {
                let frame = expired(encoding, message);
                let event = parse(encoding, &frame).unwrap();
                assert_eq!(event.event_type, EventType::Error, "{encoding:?} {message}");
                assert_eq!(event.status_code, Some(EXPIRED), "{encoding:?} {message}");
                assert_eq!(event.version, None, "{encoding:?} {message}");
            }
        }
    }
}

//! CBOR (RFC 8949) of objects and watch events, as kube-apiserver encodes them (apimachinery,
//! `serializer/cbor/internal/modes/encode.go`): strings and keys are byte strings, all lengths are definite, and each
//! object is in the tag of self-described CBOR.

use serde_json::{Map, Number, Value};

/// The content type of a watch (RFC 8742).
pub(crate) const WATCH: &str = "application/cbor-seq";
/// Tag 55799.
const SELF_DESCRIBED: &[u8] = b"\xd9\xd9\xf7";

/// One frame of a watch: a map of the type and the object.
pub(crate) fn frame(event_type: &str, object: &Value) -> Vec<u8> {
    let mut out = SELF_DESCRIBED.to_vec();
    write_head(5, 2, &mut out);
    write_text("type", &mut out);
    write_text(event_type, &mut out);
    write_text("object", &mut out);
    out.extend_from_slice(SELF_DESCRIBED);
    write(object, &mut out);
    out
}

fn write(value: &Value, out: &mut Vec<u8>) {
    match value {
        Value::Null => out.push(0xf6),
        Value::Bool(value) => out.push(0xf4 + u8::from(*value)),
        Value::Number(number) => write_number(number, out),
        Value::String(text) => write_text(text, out),
        Value::Array(items) => {
            write_head(4, items.len() as u64, out);
            for item in items {
                write(item, out);
            }
        }
        Value::Object(members) => {
            write_head(5, members.len() as u64, out);
            for (key, value) in members {
                write_text(key, out);
                write(value, out);
            }
        }
    }
}

fn write_number(number: &Number, out: &mut Vec<u8>) {
    if let Some(number) = number.as_u64() {
        write_head(0, number, out);
    } else if let Some(number) = number.as_i64() {
        // -1 - n, whose bits are the inverted ones of n.
        write_head(1, (!number).cast_unsigned(), out);
    } else {
        out.push(0xfb);
        out.extend(number.as_f64().unwrap_or_default().to_be_bytes());
    }
}

fn write_text(text: &str, out: &mut Vec<u8>) {
    write_head(2, text.len() as u64, out);
    out.extend_from_slice(text.as_bytes());
}

/// The head of an item in its shortest form.
fn write_head(major: u8, argument: u64, out: &mut Vec<u8>) {
    let (info, len) = match argument {
        0..24 => (argument as u8, 0),
        24..0x100 => (24, 1),
        0x100..0x1_0000 => (25, 2),
        0x1_0000..0x1_0000_0000 => (26, 4),
        _ => (27, 8),
    };
    out.push(major << 5 | info);
    out.extend_from_slice(&argument.to_be_bytes()[8 - len..]);
}

/// Removes the first item from `bytes` and returns it; `None` if it is not complete, or has a form that this module does
/// not write.
pub fn take_value(bytes: &mut &[u8]) -> Option<Value> {
    let initial = take(bytes, 1)?[0];
    let size = match initial & 0x1f {
        0..=23 => 0,
        info @ 24..=27 => 1 << (info - 24),
        _ => return None,
    };
    let argument = match size {
        0 => u64::from(initial & 0x1f),
        _ => take(bytes, size)?.iter().fold(0, |number, byte| number << 8 | u64::from(*byte)),
    };
    Some(match initial >> 5 {
        0 => argument.into(),
        1 => (!argument).cast_signed().into(),
        2 => std::str::from_utf8(take(bytes, usize::try_from(argument).ok()?)?).ok()?.into(),
        4 => (0..argument).map(|_| take_value(bytes)).collect::<Option<Vec<_>>>()?.into(),
        5 => {
            let mut members = Map::new();
            for _ in 0..argument {
                let Value::String(key) = take_value(bytes)? else { return None };
                members.insert(key, take_value(bytes)?);
            }
            members.into()
        }
        6 => return take_value(bytes),
        7 if initial == 0xfb => f64::from_bits(argument).into(),
        7 if (20..=21).contains(&argument) => (argument == 21).into(),
        7 if argument == 22 => Value::Null,
        _ => return None,
    })
}

fn take<'a>(bytes: &mut &'a [u8], len: usize) -> Option<&'a [u8]> {
    let (taken, rest) = bytes.split_at_checked(len)?;
    *bytes = rest;
    Some(taken)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn frame_encodes_a_watch_event_byte_by_byte() {
        let object = json!({ "metadata": { "generation": 300, "name": "n" } });
        let metadata = b"\xa1\x48metadata\xa2\x4ageneration\x19\x01\x2c\x44name\x41n";
        let event = b"\xd9\xd9\xf7\xa2\x44type\x45ADDED\x46object\xd9\xd9\xf7";
        assert_eq!(frame("ADDED", &object), [&event[..], metadata].concat());
    }

    #[test]
    fn take_value_restores_encoded_values() {
        let value = json!({
            "a": [null, true, false, 0, 23, 24, 255, 256, 65_536, u64::MAX, -1, -500, i64::MIN, 1.5],
            "long": "x".repeat(300), "empty": {},
        });
        let frame = frame("MODIFIED", &value);
        let expected = json!({ "type": "MODIFIED", "object": value });
        let mut two = &[&frame[..], &frame].concat()[..];
        assert_eq!(take_value(&mut two), Some(expected.clone()));
        assert_eq!(take_value(&mut two), Some(expected));
        assert!(two.is_empty());
        for end in 0..frame.len() {
            assert_eq!(take_value(&mut &frame[..end]), None, "truncated at {end}");
        }
    }
}

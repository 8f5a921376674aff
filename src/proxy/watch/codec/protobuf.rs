//! Parses one protobuf event and skips the fields that [`Event`] does not contain.

use super::event::{Event, EventType, INITIAL_EVENTS_END};

/// The prefix of an object in a `runtime.Unknown` envelope (apimachinery,
/// `runtime/serializer/protobuf`).
const MAGIC: &[u8] = b"k8s\0";

/// Parses one frame, including its size prefix; `None` if it is not an event.
pub(super) fn event(frame: &[u8]) -> Option<Event<'_>> {
    let (prefix, message) = frame.split_first_chunk::<4>()?;
    if u32::from_be_bytes(*prefix) as usize != message.len() {
        return None;
    }
    let [type_name, extension] = bytes_fields(message, [1, 2])?;
    let type_name = type_name?;
    let event_type = EventType::with_name(|name| name == type_name);
    let [raw] = bytes_fields(extension?, [1])?;
    let [_type_meta, object, content_encoding, content_type] =
        bytes_fields(raw?.strip_prefix(MAGIC)?, [1, 2, 3, 4])?;
    let is_empty = |field: Option<&[u8]>| field.is_none_or(<[u8]>::is_empty);
    if !is_empty(content_encoding) || !is_empty(content_type) {
        return None;
    }
    let object = object.unwrap_or_default();
    let mut event =
        Event { event_type, version: None, initial_events_end: false, status_code: None };
    if event_type == EventType::Error {
        for_each_field(object, |field, value| {
            if let (6, Value::Number(code)) = (field, value) {
                event.status_code = u16::try_from(code).ok();
            }
            Some(())
        })?;
        return Some(event);
    }
    let [metadata] = bytes_fields(object, [1])?;
    let metadata = metadata.unwrap_or_default();
    [event.version] = bytes_fields(metadata, [6])?;
    if event_type == EventType::Bookmark {
        event.initial_events_end = ends_initial_events(metadata)?;
    }
    Some(event)
}

fn ends_initial_events(metadata: &[u8]) -> Option<bool> {
    let mut ends = false;
    for_each_field(metadata, |field, value| {
        if let (12, Value::Bytes(entry)) = (field, value) {
            let [key, value] = bytes_fields(entry, [1, 2])?;
            ends |= key == Some(INITIAL_EVENTS_END) && value == Some(b"true");
        }
        Some(())
    })?;
    Some(ends)
}

/// The values of these length-delimited fields; `None` if one of them occurs twice or has another type.
fn bytes_fields<const N: usize>(message: &[u8], fields: [u32; N]) -> Option<[Option<&[u8]>; N]> {
    let mut found = [None; N];
    for_each_field(message, |field, value| {
        if let Some(at) = fields.iter().position(|&wanted| wanted == field) {
            let Value::Bytes(bytes) = value else { return None };
            if found[at].replace(bytes).is_some() {
                return None;
            }
        }
        Some(())
    })?;
    Some(found)
}

enum Value<'a> {
    Number(u64),
    Bytes(&'a [u8]),
    Fixed,
}

/// Calls `each` for every field of a message; `None` if the message is malformed.
fn for_each_field<'a>(
    mut message: &'a [u8],
    mut each: impl FnMut(u32, Value<'a>) -> Option<()>,
) -> Option<()> {
    while !message.is_empty() {
        let tag = varint(&mut message)?;
        let field = u32::try_from(tag >> 3).ok().filter(|&field| field > 0)?;
        let value = match tag & 7 {
            0 => Value::Number(varint(&mut message)?),
            1 => take(&mut message, 8).map(|_| Value::Fixed)?,
            2 => {
                let len = usize::try_from(varint(&mut message)?).ok()?;
                Value::Bytes(take(&mut message, len)?)
            }
            5 => take(&mut message, 4).map(|_| Value::Fixed)?,
            _ => return None,
        };
        each(field, value)?;
    }
    Some(())
}

fn take<'a>(message: &mut &'a [u8], len: usize) -> Option<&'a [u8]> {
    let (taken, rest) = message.split_at_checked(len)?;
    *message = rest;
    Some(taken)
}

/// Consumes a varint: seven bits a byte, least significant first, at most ten bytes.
fn varint(message: &mut &[u8]) -> Option<u64> {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let (&byte, rest) = message.split_first()?;
        *message = rest;
        value |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some(value);
        }
    }
    None
}

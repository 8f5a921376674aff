//! Parses one protobuf event and skips the fields that [`Event`] does not contain.

use super::event::{Event, EventType, INITIAL_EVENTS_END};
use super::version::HeadVersion;

/// The prefix of an object in a `runtime.Unknown` envelope (apimachinery,
/// `runtime/serializer/protobuf`).
const MAGIC: &[u8] = b"k8s\0";

/// Parses one frame, including its size prefix; `None` if it is not an event.
pub fn event(frame: &[u8]) -> Option<Event<'_>> {
    let (prefix, message) = frame.split_first_chunk::<4>()?;
    if u32::from_be_bytes(*prefix) as usize != message.len() {
        return None;
    }
    let [type_name, extension] = bytes_fields(message, [1, 2])?;
    let type_name = type_name?;
    let event_type = EventType::with_name(|name| name == type_name);
    let [raw] = bytes_fields(extension?, [1])?;
    let object = object(raw?)?;
    let mut event =
        Event { event_type, version: None, initial_events_end: false, status_code: None };
    if event_type == EventType::Error {
        for_each_field(object, |field, value| {
            if let (6, Field::Number(code)) = (field, value) {
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

/// The message of an object in its envelope; `None` if that is malformed or has another encoding.
pub(crate) fn object(bytes: &[u8]) -> Option<&[u8]> {
    let [_type_meta, object, content_encoding, content_type] =
        bytes_fields(bytes.strip_prefix(MAGIC)?, [1, 2, 3, 4])?;
    let is_empty = |field: Option<&[u8]>| field.is_none_or(<[u8]>::is_empty);
    let is_plain = is_empty(content_encoding) && is_empty(content_type);
    is_plain.then_some(object.unwrap_or_default())
}

/// Whether a body that begins with `bytes` is a Status; `None` if its type has not arrived.
pub fn is_status(bytes: &[u8]) -> Option<bool> {
    let mut message = bytes.strip_prefix(MAGIC)?;
    let Ok((1, type_meta)) = head_field(&mut message) else { return None };
    // What follows the type shows that it is complete.
    (!message.is_empty()).then(|| has_status_type(type_meta))
}

/// Whether a `TypeMeta` is that of a Status, which has the version `v1` in all API groups (apimachinery, `meta/v1`,
/// `AddToGroupVersion`).
fn has_status_type(type_meta: &[u8]) -> bool {
    bytes_fields(type_meta, [1, 2]) == Some([Some(b"v1"), Some(b"Status")])
}

/// The version of an object, a list, a table or a Status, of which `bytes` are the beginning.
pub fn head_version(bytes: &[u8]) -> HeadVersion {
    let shared = bytes.len().min(MAGIC.len());
    if bytes[..shared] != MAGIC[..shared] {
        return HeadVersion::None;
    }
    let Some(mut message) = bytes.get(MAGIC.len()..) else { return HeadVersion::Incomplete };
    let mut has_list_meta = false;
    loop {
        match head_field(&mut message) {
            Ok((1, type_meta)) => {
                let kind = bytes_fields(type_meta, [2]).and_then(|[kind]| kind).unwrap_or_default();
                has_list_meta =
                    kind.ends_with(b"List") || kind == b"Table" || has_status_type(type_meta);
            }
            Ok((2, raw)) => return raw_version(raw, if has_list_meta { 2 } else { 6 }),
            Ok(_) => {}
            Err(result) => return result,
        }
    }
}

/// The version of `raw`, whose field 1 has it in field `version`.
fn raw_version(mut raw: &[u8], version: u32) -> HeadVersion {
    let mut metadata = match head_field(&mut raw) {
        Ok((1, metadata)) => metadata,
        Ok(_) => return HeadVersion::None,
        Err(result) => return result,
    };
    // What follows the metadata shows that it is complete.
    let is_complete = !raw.is_empty();
    loop {
        match head_field(&mut metadata) {
            Ok((field, text)) if field == version && (is_complete || !metadata.is_empty()) => {
                return HeadVersion::of_text(text);
            }
            Ok((field, _)) if field == version => return HeadVersion::Incomplete,
            Ok(_) => {}
            Err(HeadVersion::Incomplete) if is_complete => return HeadVersion::None,
            Err(result) => return result,
        }
    }
}

/// Consumes a field. Of a length-delimited one that is not complete, it returns the part that is there.
fn head_field<'a>(message: &mut &'a [u8]) -> Result<(u32, &'a [u8]), HeadVersion> {
    let incomplete = |message: &[u8]| {
        // A varint has at most ten bytes.
        if message.len() < 20 { HeadVersion::Incomplete } else { HeadVersion::None }
    };
    let mut rest = *message;
    let tag = varint(&mut rest).ok_or_else(|| incomplete(message))?;
    let field = u32::try_from(tag >> 3).map_err(|_| HeadVersion::None)?;
    let len = match tag & 7 {
        0 => {
            varint(&mut rest).ok_or_else(|| incomplete(message))?;
            0
        }
        1 => 8,
        2 => varint(&mut rest).ok_or_else(|| incomplete(message))?,
        5 => 4,
        _ => return Err(HeadVersion::None),
    };
    let len = usize::try_from(len).unwrap_or(usize::MAX).min(rest.len());
    let (value, rest) = rest.split_at(len);
    *message = rest;
    Ok((field, value))
}

fn ends_initial_events(metadata: &[u8]) -> Option<bool> {
    let mut ends = false;
    for_each_field(metadata, |field, value| {
        if let (12, Field::Bytes(entry)) = (field, value) {
            let [key, value] = bytes_fields(entry, [1, 2])?;
            ends |= key == Some(INITIAL_EVENTS_END) && value == Some(b"true");
        }
        Some(())
    })?;
    Some(ends)
}

/// The values of these length-delimited fields; `None` if one of them occurs twice or has another type.
pub(crate) fn bytes_fields<const N: usize>(
    message: &[u8],
    fields: [u32; N],
) -> Option<[Option<&[u8]>; N]> {
    let mut found = [None; N];
    for_each_field(message, |field, value| {
        if let Some(at) = fields.iter().position(|&wanted| wanted == field) {
            let Field::Bytes(bytes) = value else { return None };
            if found[at].replace(bytes).is_some() {
                return None;
            }
        }
        Some(())
    })?;
    Some(found)
}

/// The value of a field.
pub(crate) enum Field<'a> {
    /// A varint.
    Number(u64),
    /// A length-delimited value.
    Bytes(&'a [u8]),
    /// A value of four or eight bytes.
    Fixed,
}

/// Calls `each` for every field of a message; `None` if the message is malformed.
pub(crate) fn for_each_field<'a>(
    mut message: &'a [u8],
    mut each: impl FnMut(u32, Field<'a>) -> Option<()>,
) -> Option<()> {
    while !message.is_empty() {
        let tag = varint(&mut message)?;
        let field = u32::try_from(tag >> 3).ok().filter(|&field| field > 0)?;
        let value = match tag & 7 {
            0 => Field::Number(varint(&mut message)?),
            1 => take(&mut message, 8).map(|_| Field::Fixed)?,
            2 => {
                let len = usize::try_from(varint(&mut message)?).ok()?;
                Field::Bytes(take(&mut message, len)?)
            }
            5 => take(&mut message, 4).map(|_| Field::Fixed)?,
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

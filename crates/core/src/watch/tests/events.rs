//! Encodes watch events as an apiserver does, and runs the splitter and the parser on bytes.

use super::super::codec::Encoding;
use super::super::codec::frame::{FrameSplitter, Piece};
use super::super::codec::parse;
use super::super::codec::version::ResourceVersion;
use super::super::request::{GzipPreference, WatchRequest};
use super::super::session::Session;
use crate::admission::ByteAccount;
use crate::request::info::first_value;
use bytes::Bytes;
use std::time::{Duration, Instant};

/// The request of a watch that can be resumed, at this version; at no version if it is not a number.
pub fn request(version: &str) -> WatchRequest {
    WatchRequest {
        version: ResourceVersion::parse(version.as_bytes()),
        send_initial_events: false,
        starts_at_most_recent: false,
        bookmarks: false,
        timeout: Some(Duration::from_secs(300)),
        resumable_group: true,
        built_in_group: true,
        objects_expire: false,
        upstream_bookmarks: true,
        gzip: GzipPreference::Unspecified,
    }
}

/// The version in the request with which a session would continue its watch.
pub fn cursor(session: &Session, now: Instant) -> Option<String> {
    let query = session.resume_query("", now);
    first_value(&query, "resourceVersion").map(Into::into)
}

pub fn json_event(event_type: &str, version: u64, padding: &str) -> Vec<u8> {
    format!(
        "{{\"type\":\"{event_type}\",\"object\":{{\"kind\":\"Pod\",\"apiVersion\":\"v1\",\"metadata\":{{\"name\":\"a\",\
         \"resourceVersion\":\"{version}\"}},\"spec\":{{\"x\":{padding:?}}}}}}}\n"
    )
    .into_bytes()
}

fn varint(mut n: u64, out: &mut Vec<u8>) {
    while n >= 0x80 {
        out.push(n as u8 | 0x80);
        n >>= 7;
    }
    out.push(n as u8);
}

fn field(number: u64, value: &[u8], out: &mut Vec<u8>) {
    varint(number << 3 | 2, out);
    varint(value.len() as u64, out);
    out.extend_from_slice(value);
}

fn message(fields: &[(u64, &[u8])]) -> Vec<u8> {
    let mut out = Vec::new();
    for (number, value) in fields {
        field(*number, value, &mut out);
    }
    out
}

fn frame(event_type: &str, api_version: &str, object_kind: &str, object: &[u8]) -> Vec<u8> {
    let type_meta = message(&[(1, api_version.as_bytes()), (2, object_kind.as_bytes())]);
    let mut raw = b"k8s\0".to_vec();
    raw.extend(message(&[(1, &type_meta), (2, object), (3, b""), (4, b"")]));
    let event = message(&[(1, event_type.as_bytes()), (2, &message(&[(1, &raw)]))]);
    let mut frame = (event.len() as u32).to_be_bytes().to_vec();
    frame.extend(event);
    frame
}

pub fn protobuf_event(
    event_type: &str,
    api_version: &str,
    object_kind: &str,
    version: &str,
    annotations: &[(&str, &str)],
) -> Vec<u8> {
    let mut metadata = message(&[(1, b"name"), (3, b"default"), (6, version.as_bytes())]);
    for (key, value) in annotations {
        field(12, &message(&[(1, key.as_bytes()), (2, value.as_bytes())]), &mut metadata);
    }
    frame(event_type, api_version, object_kind, &message(&[(1, &metadata), (2, b"")]))
}

pub fn protobuf_status(code: u64) -> Vec<u8> {
    let mut status = message(&[(1, &message(&[(2, b"99")])), (2, b"Failure"), (4, b"Expired")]);
    varint(6 << 3, &mut status);
    varint(code, &mut status);
    frame("ERROR", "v1", "Status", &status)
}

/// A value in CBOR as Kubernetes encodes it: strings are byte strings, and lengths are definite.
pub enum Cbor<'a> {
    Text(&'a str),
    Number(u64),
    Map(&'a [(&'a str, Cbor<'a>)]),
    /// In the tag of self-described CBOR.
    Object(&'a [(&'a str, Cbor<'a>)]),
    /// An item in another form.
    Encoded(&'a [u8]),
}

impl Cbor<'_> {
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        self.write(&mut out);
        out
    }

    fn write(&self, out: &mut Vec<u8>) {
        match self {
            Self::Text(text) => {
                cbor_head(2, text.len() as u64, out);
                out.extend_from_slice(text.as_bytes());
            }
            Self::Number(number) => cbor_head(0, *number, out),
            Self::Encoded(item) => out.extend_from_slice(item),
            Self::Map(members) | Self::Object(members) => {
                if matches!(self, Self::Object(_)) {
                    out.extend_from_slice(b"\xd9\xd9\xf7");
                }
                cbor_head(5, members.len() as u64, out);
                for (key, value) in *members {
                    Self::Text(key).write(out);
                    value.write(out);
                }
            }
        }
    }
}

/// The head of an item in its shortest form.
fn cbor_head(major: u8, argument: u64, out: &mut Vec<u8>) {
    let bytes = argument.to_be_bytes();
    let (info, len) = match argument {
        0..24 => (argument as u8, 0),
        24..0x100 => (24, 1),
        0x100..0x1_0000 => (25, 2),
        0x1_0000..0x1_0000_0000 => (26, 4),
        _ => (27, 8),
    };
    out.push(major << 5 | info);
    out.extend_from_slice(&bytes[8 - len..]);
}

pub fn cbor_event(
    event_type: &str,
    version: &str,
    annotations: &[(&str, Cbor<'_>)],
    padding: &str,
) -> Vec<u8> {
    use Cbor::{Map, Object, Text};
    let metadata = [
        ("name", Text("a")),
        ("annotations", Map(annotations)),
        ("resourceVersion", Text(version)),
    ];
    let object = [
        ("kind", Text("Pod")),
        ("spec", Map(&[("x", Text(padding)), ("metadata", Text("y"))])),
        ("metadata", Map(&metadata)),
    ];
    Object(&[("type", Text(event_type)), ("object", Object(&object))]).encode()
}

/// Encodes a Pod event; `padding` sets its size.
pub fn encode(encoding: Encoding, event_type: &str, version: u64, padding: &str) -> Vec<u8> {
    match encoding {
        Encoding::Json => json_event(event_type, version, padding),
        Encoding::Protobuf => {
            protobuf_event(event_type, "v1", "Pod", &version.to_string(), &[("p", padding)])
        }
        Encoding::Cbor => cbor_event(event_type, &version.to_string(), &[], padding),
    }
}

/// Splits chunks into frames, pieces of frames that exceed the cap, and white space, in order.
pub fn split(splitter: &mut FrameSplitter, chunks: &[Bytes], cap: usize) -> Vec<Bytes> {
    let mut out = Vec::new();
    for chunk in chunks {
        let mut at = 0;
        while at < chunk.len() {
            let before = at;
            match splitter.split(&chunk[at..]) {
                Piece::Whole(len) | Piece::Whitespace(len) => {
                    out.push(chunk.slice(at..at + len));
                    at += len;
                }
                Piece::Completed(len, frame) => {
                    out.push(frame);
                    at += len;
                    // A frame that ended with the previous chunk contains no byte of this one.
                    assert!(len > 0 || splitter.at_boundary());
                    continue;
                }
                Piece::Oversized { buffered, len, .. } => {
                    out.push(buffered);
                    out.push(chunk.slice(at..at + len));
                    at += len;
                }
                Piece::Buffered => at = chunk.len(),
            }
            assert!(at > before, "no progress");
            assert!(splitter.buffered() <= cap);
        }
    }
    out
}

/// Checks that the splitter and the parser do not panic on these bytes, and that the splitter buffers at most
/// `cap` bytes and returns every byte in order. The fuzz target `watch` checks the same.
pub fn check_split_and_parse(bytes: &[u8]) {
    for encoding in Encoding::ALL {
        for cap in [1, 16, 4096] {
            for step in [1, 7, bytes.len().max(1)] {
                let chunks: Vec<_> = bytes.chunks(step).map(Bytes::copy_from_slice).collect();
                let mut splitter =
                    FrameSplitter::with_cap(encoding, cap, ByteAccount::unmetered(usize::MAX));
                let mut out = split(&mut splitter, &chunks, cap);
                for frame in &out {
                    let _ = parse(encoding, frame);
                }
                out.push(splitter.reset());
                assert_eq!(out.concat(), bytes);
            }
        }
        let _ = parse(encoding, bytes);
    }
}

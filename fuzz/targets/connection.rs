//! Bytes of a client's connection after its TLS handshake, at the serving path.

use std::collections::HashSet;
use std::sync::{Mutex, PoisonError};

use jackstay_testkit::recorder::Recorded;

use super::server::Server;

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// SETTINGS, and `GET https://api/` with `END_STREAM` on stream 1: indexed fields and one literal (RFC 7541).
const HTTP2_REQUEST: &[u8] =
    b"\0\0\0\x04\0\0\0\0\0\0\0\x08\x01\x05\0\0\0\x01\x82\x87\x84\x01\x03api";
const HTTP1_REQUEST: &[u8] = b"GET / HTTP/1.1\r\nHost: api\r\n\r\n";
const ANSWER: &[u8] = b"recorded";

const DATA: u8 = 0;
const HEADERS: u8 = 1;

/// The bits of a record's type in an input of `http2_connection`.
const VERBATIM: u8 = 0x80;
const FIELDS: u8 = 0x40;
/// Maximum length of a string whose length takes one byte (RFC 7541, section 5.1).
const MAX_STRING: usize = 126;

/// Sends bytes to the server of a target. The first call starts it.
fn send(
    server: &Mutex<Option<Server>>,
    start: impl FnOnce() -> Server,
    bytes: &[u8],
) -> Vec<Recorded> {
    // An earlier input may have failed.
    let mut server = server.lock().unwrap_or_else(PoisonError::into_inner);
    server.get_or_insert_with(start).send(bytes)
}

/// An HTTP/1.1 connection: the recorder receives at most the requests that RFC 9112 finds in the bytes, in their
/// order and with their bodies. No body hides a request.
pub(super) fn http1_connection(bytes: &[u8]) {
    static SERVER: Mutex<Option<Server>> = Mutex::new(None);
    let start = || Server::start("http/1.1", HTTP1_REQUEST, ANSWER);
    let received = send(&SERVER, start, bytes);
    let sent = http1_requests(bytes);
    let mut rest = sent.iter();
    for request in &received {
        // jackstay adds parameters to the query of a watch.
        let path = request.target.split('?').next().unwrap_or_default().as_bytes();
        let is_same = |sent: &&Http1Request| {
            sent.method == request.method.as_bytes()
                && (!sent.target.starts_with(b"/") || sent.target.starts_with(path))
                && (!request.complete || sent.body.as_ref().is_none_or(|it| *it == request.body))
        };
        assert!(rest.any(|sent| is_same(&sent)), "{request:?} of {received:?} is none of {sent:?}");
    }
}

/// Records of an HTTP/2 connection ([`http2_frames`]): the recorder receives at most one request for each stream that
/// the client has opened, and at most as many bytes as the client has sent.
pub(super) fn http2_connection(bytes: &[u8]) {
    static SERVER: Mutex<Option<Server>> = Mutex::new(None);
    let start = || Server::start("h2", &[PREFACE, HTTP2_REQUEST].concat(), ANSWER);
    let frames = http2_frames(bytes);
    let received = send(&SERVER, start, &[PREFACE, &frames].concat());
    let (mut streams, mut data, mut rest) = (HashSet::new(), 0, &frames[..]);
    while let Some((head, after)) = rest.split_at_checked(9) {
        let length = u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize;
        let stream = u32::from_be_bytes([head[5] & 0x7f, head[6], head[7], head[8]]);
        match head[3] {
            HEADERS => drop(streams.insert(stream)),
            DATA => data += length.min(after.len()),
            _ => {}
        }
        rest = after.get(length..).unwrap_or_default();
    }
    assert!(received.len() <= streams.len(), "{received:?} of the streams {streams:?}");
    let bodies: usize = received.iter().map(|request| request.body.len()).sum();
    assert!(bodies <= data, "{bodies} of {data} bytes: {received:?}");
}

/// The bytes that records stand for. A record is four bytes (type, flags, stream, length) and its payload, so that most
/// mutations are still frames:
///
/// * A type with the bit [`VERBATIM`] stands for the payload alone.
/// * With the bit [`FIELDS`], the payload is lines, from which a field block is encoded: `name=value`, or `@GET /a` for
///   the four pseudo-header fields of that request.
/// * Another one is the type of a frame.
fn http2_frames(mut bytes: &[u8]) -> Vec<u8> {
    let mut frames = Vec::new();
    while let Some(([kind, flags, stream, length], rest)) = bytes.split_first_chunk() {
        let (payload, rest) = rest.split_at(rest.len().min(usize::from(*length)));
        bytes = rest;
        if kind & VERBATIM != 0 {
            frames.extend_from_slice(payload);
            continue;
        }
        let block = if kind & FIELDS == 0 { payload.to_vec() } else { field_block(payload) };
        frames.extend_from_slice(&(block.len() as u32).to_be_bytes()[1..]);
        frames.extend_from_slice(&[kind & !FIELDS, *flags, 0, 0, 0, *stream]);
        frames.extend_from_slice(&block);
    }
    frames
}

/// Literal fields without indexing (RFC 7541, section 6.2.2). Strings are cut to [`MAX_STRING`].
fn field_block(lines: &[u8]) -> Vec<u8> {
    let mut block = Vec::new();
    let mut field = |name: &[u8], value: &[u8]| {
        block.push(0);
        for part in [name, value] {
            let part = &part[..part.len().min(MAX_STRING)];
            block.push(part.len() as u8);
            block.extend_from_slice(part);
        }
    };
    for line in lines.split(|byte| *byte == b'\n') {
        let is_head = line.first() == Some(&b'@');
        let separator = if is_head { b' ' } else { b'=' };
        let mut parts = line.splitn(2, |byte| *byte == separator);
        let (name, value) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
        if is_head {
            field(b":method", &name[1..]);
            field(b":scheme", b"https");
            field(b":authority", b"api");
            field(b":path", value);
        } else {
            field(name, value);
        }
    }
    block
}

/// A request among the bytes of a connection.
#[derive(Debug)]
struct Http1Request {
    method: Vec<u8>,
    /// With a fragment, which is not forwarded.
    target: Vec<u8>,
    /// `None` if its end is unknown. No request follows it.
    body: Option<Vec<u8>>,
}

/// The requests in these bytes. A line may end with LF alone (RFC 9112, section 2.2). A request whose length two
/// parsers could read differently is the last one.
fn http1_requests(bytes: &[u8]) -> Vec<Http1Request> {
    let mut requests = Vec::new();
    let mut lines = Lines(bytes);
    loop {
        let mut first = lines.next();
        while first.is_some_and(<[u8]>::is_empty) {
            first = lines.next();
        }
        let Some(first) = first else { return requests };
        let mut words = first.split(|byte| *byte == b' ').map(<[u8]>::to_vec);
        let (method, target) = (words.next(), words.next());
        let mut fields = Vec::new();
        loop {
            match lines.next() {
                None => return requests,
                Some([]) => break,
                Some(line) => fields.push(line),
            }
        }
        let body = match body_length(&fields) {
            None => None,
            Some(BodyLength::Chunked) => chunked_body(&mut lines),
            Some(BodyLength::Fixed(length)) => lines.take(length).map(<[u8]>::to_vec),
        };
        let is_last = body.is_none();
        let (method, target) = (method.unwrap_or_default(), target.unwrap_or_default());
        requests.push(Http1Request { method, target, body });
        if is_last {
            return requests;
        }
    }
}

enum BodyLength {
    Chunked,
    Fixed(usize),
}

/// The length of a body (RFC 9112, section 6.3), unless it is ambiguous.
fn body_length(fields: &[&[u8]]) -> Option<BodyLength> {
    let (mut lengths, mut codings) = (Vec::new(), Vec::new());
    for field in fields {
        let colon = field.iter().position(|byte| *byte == b':')?;
        let (name, value) = (&field[..colon], field[colon + 1..].trim_ascii());
        if name.is_empty() || name.iter().any(|byte| !byte.is_ascii_graphic()) {
            return None;
        }
        match name.to_ascii_lowercase().as_slice() {
            b"content-length" => lengths.push(value),
            b"transfer-encoding" => codings.push(value.to_ascii_lowercase()),
            _ => {}
        }
    }
    match (lengths.as_slice(), codings.as_slice()) {
        ([], []) => Some(BodyLength::Fixed(0)),
        ([], [coding]) if coding == b"chunked" => Some(BodyLength::Chunked),
        ([first, others @ ..], []) if others.iter().all(|other| other == first) => {
            number(first, 10).map(BodyLength::Fixed)
        }
        _ => None,
    }
}

/// A number without a sign.
fn number(digits: &[u8], radix: u32) -> Option<usize> {
    let text = std::str::from_utf8(digits).ok().filter(|text| !text.starts_with('+'))?;
    usize::from_str_radix(text, radix).ok()
}

/// A body in chunks, up to the end of its trailers (RFC 9112, section 7.1).
fn chunked_body(lines: &mut Lines<'_>) -> Option<Vec<u8>> {
    let mut body = Vec::new();
    loop {
        let line = lines.next()?;
        let size = line.split(|byte| *byte == b';').next().unwrap_or_default();
        let size = number(size.trim_ascii(), 16)?;
        if size == 0 {
            break;
        }
        body.extend_from_slice(lines.take(size)?);
        if !lines.next()?.is_empty() {
            return None;
        }
    }
    while !lines.next_strict()?.is_empty() {}
    Some(body)
}

/// Reads lines, which end with LF or CR LF.
struct Lines<'a>(&'a [u8]);

impl<'a> Lines<'a> {
    fn next(&mut self) -> Option<&'a [u8]> {
        let end = self.0.iter().position(|byte| *byte == b'\n')?;
        let line = &self.0[..end];
        self.0 = &self.0[end + 1..];
        Some(line.strip_suffix(b"\r").unwrap_or(line))
    }

    /// A line that ends with CR LF. A recipient need not accept LF alone, and hyper does not in trailers (RFC 9112,
    /// section 2.2).
    fn next_strict(&mut self) -> Option<&'a [u8]> {
        let end = self.0.windows(2).position(|bytes| bytes == b"\r\n")?;
        let line = &self.0[..end];
        self.0 = &self.0[end + 2..];
        Some(line)
    }

    fn take(&mut self, length: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(taken)
    }
}

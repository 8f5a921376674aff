//! Reads the server name out of a TLS `ClientHello` (RFC 8446 section 4.1.2, RFC 6066 section 3),
//! and nothing else: the bytes are passed on as they came.
//!
//! The message may be spread over several records and these over many segments, so the reader is
//! asked again with all that has arrived so far. It answers early: what is no TLS is known from the
//! first byte, and a name is found as soon as it is there.

/// Most bytes that are read before a decision. Clients send 300 to 2,000; the rest is room for
/// post-quantum keys and tickets.
pub const MAX: usize = 16 * 1024;

/// What the beginning of a connection says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Hello {
    /// Not all of it is there.
    Partial,
    /// It asks for this server, in lower case.
    Name(String),
    /// It asks for none.
    NoName,
    /// It is no TLS, or broken, or larger than [`MAX`].
    Odd,
}

/// Content type of handshake messages (RFC 8446 section 5.1).
const HANDSHAKE: u8 = 22;
/// Most bytes of a record (RFC 8446 section 5.1).
const MAX_RECORD: usize = 1 << 14;
/// Type of the message (RFC 8446 section 4).
const CLIENT_HELLO: u8 = 1;
/// Type of the extension (RFC 6066 section 1.1).
const SERVER_NAME: u16 = 0;
/// The only kind of name there is (RFC 6066 section 3).
const HOST_NAME: u8 = 0;

/// Reads what has arrived so far.
pub fn read(bytes: &[u8]) -> Hello {
    let Ok((message, goes_on)) = handshake_bytes(bytes) else { return Hello::Odd };
    match parse(&message) {
        Ok(Some(name)) => Hello::Name(name),
        Ok(None) => Hello::NoName,
        Err(Stop::Odd) => Hello::Odd,
        // More of it would have come already, or never will.
        Err(Stop::Short) if !goes_on || bytes.len() >= MAX => Hello::Odd,
        Err(Stop::Short) => Hello::Partial,
    }
}

/// Why parsing stopped.
enum Stop {
    /// More bytes are needed.
    Short,
    /// This is no TLS, or no `ClientHello`.
    Odd,
}

/// The handshake bytes of all records that have begun, and whether more may follow: a client with
/// early data sends other records behind its hello (RFC 8446 section 2.3), never within it.
fn handshake_bytes(mut bytes: &[u8]) -> Result<(Vec<u8>, bool), Stop> {
    let mut message = Vec::with_capacity(bytes.len());
    let other =
        |message: Vec<u8>| if message.is_empty() { Err(Stop::Odd) } else { Ok((message, false)) };
    loop {
        let Some(&content) = bytes.first() else { return Ok((message, true)) };
        // TLS 1.0 to 1.3 all say 3 here, whatever they negotiate later.
        if content != HANDSHAKE || bytes.get(1).is_some_and(|&major| major != 3) {
            return other(message);
        }
        let Some(&[high, low]) = bytes.get(3..5) else { return Ok((message, true)) };
        let length = usize::from(u16::from_be_bytes([high, low]));
        if length == 0 || length > MAX_RECORD {
            return other(message);
        }
        let rest = &bytes[5..];
        if rest.len() < length {
            message.extend_from_slice(rest);
            return Ok((message, true));
        }
        message.extend_from_slice(&rest[..length]);
        bytes = &rest[length..];
    }
}

/// The server name of a `ClientHello`; `None` if it has none.
fn parse(message: &[u8]) -> Result<Option<String>, Stop> {
    let mut at = Reader(message);
    if at.u8()? != CLIENT_HELLO {
        return Err(Stop::Odd);
    }
    let length = at.u24()?;
    // What comes after the message is another one, and no business of ours.
    let mut at = Reader(&at.0[..at.0.len().min(length)]);
    let whole = message.len() - 4 >= length;
    let odd = |stop| if whole { Stop::Odd } else { stop };
    // Version and random.
    at.take(2 + 32).map_err(odd)?;
    let session = at.u8().map_err(odd)?;
    at.take(session.into()).map_err(odd)?;
    let suites = at.u16().map_err(odd)?;
    at.take(suites.into()).map_err(odd)?;
    let compressions = at.u8().map_err(odd)?;
    at.take(compressions.into()).map_err(odd)?;
    if whole && at.0.is_empty() {
        // TLS 1.2 may come without extensions.
        return Ok(None);
    }
    let extensions = usize::from(at.u16().map_err(odd)?);
    let all = at.0.len() >= extensions;
    let mut at = Reader(&at.0[..at.0.len().min(extensions)]);
    let odd = |stop| if all || whole { Stop::Odd } else { stop };
    while !at.0.is_empty() {
        let kind = at.u16().map_err(odd)?;
        let length = at.u16().map_err(odd)?;
        let body = at.take(length.into()).map_err(odd)?;
        if kind == SERVER_NAME {
            return server_name(body).map_err(|_| Stop::Odd);
        }
    }
    if all { Ok(None) } else { Err(odd(Stop::Short)) }
}

/// The first host name of the extension.
fn server_name(body: &[u8]) -> Result<Option<String>, Stop> {
    let mut at = Reader(body);
    let length = at.u16()?;
    let mut names = Reader(at.take(length.into())?);
    while !names.0.is_empty() {
        let kind = names.u8()?;
        let length = names.u16()?;
        let name = names.take(length.into())?;
        if kind == HOST_NAME {
            // Some clients send the root's dot, which RFC 6066 forbids.
            let name = name.strip_suffix(b".").unwrap_or(name);
            let fine = !name.is_empty() && name.iter().all(u8::is_ascii_graphic);
            let text = std::str::from_utf8(name).ok().filter(|_| fine).ok_or(Stop::Odd)?;
            return Ok(Some(text.to_ascii_lowercase()));
        }
    }
    Ok(None)
}

/// Takes bytes from the front.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, n: usize) -> Result<&'a [u8], Stop> {
        let (front, rest) = self.0.split_at_checked(n).ok_or(Stop::Short)?;
        self.0 = rest;
        Ok(front)
    }

    fn u8(&mut self) -> Result<u8, Stop> {
        Ok(self.take(1)?[0])
    }

    fn u16(&mut self) -> Result<u16, Stop> {
        let bytes = self.take(2)?;
        Ok(u16::from_be_bytes([bytes[0], bytes[1]]))
    }

    fn u24(&mut self) -> Result<usize, Stop> {
        let bytes = self.take(3)?;
        Ok(usize::from(bytes[0]) << 16 | usize::from(bytes[1]) << 8 | usize::from(bytes[2]))
    }
}

/// Whether a name that a client asks for is meant by a configured one: itself, or any one label in
/// the place of `*`. Both in lower case.
pub fn matches(pattern: &str, name: &str) -> bool {
    match pattern.strip_prefix("*.") {
        None => pattern == name,
        Some(parent) => {
            name.split_once('.').is_some_and(|(label, rest)| !label.is_empty() && rest == parent)
        }
    }
}

#[cfg(test)]
#[path = "hello_tests.rs"]
mod tests;

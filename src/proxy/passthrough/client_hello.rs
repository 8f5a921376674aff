//! Reads the server name of a TLS `ClientHello` (RFC 8446 section 4.1.2, RFC 6066 section 3). The
//! bytes are forwarded unchanged.
//!
//! The message may span several records and many TCP segments, so the caller repeats [`read`] with all bytes
//! that have arrived. [`read`] decides as early as possible: at the first byte that is not TLS, and as soon
//! as the server name is complete.

/// Maximum number of bytes that are read before a decision. Clients send 300 to 2,000 bytes; post-quantum
/// keys and session tickets may need more.
pub const MAX_LENGTH: usize = 16 * 1024;

/// The content of the first bytes of a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ClientHello {
    /// An incomplete message.
    Incomplete,
    /// A message with this server name, in lower case.
    ServerName(String),
    /// A message without a server name.
    NoServerName,
    /// No TLS, a malformed message, or a message that is larger than [`MAX_LENGTH`].
    Unreadable,
}

/// Content type of handshake messages (RFC 8446 section 5.1).
const HANDSHAKE: u8 = 22;
/// Maximum length of a record (RFC 8446 section 5.1).
const MAX_RECORD: usize = 1 << 14;
/// Handshake message type (RFC 8446 section 4).
const CLIENT_HELLO: usize = 1;
/// Extension type (RFC 6066 section 1.1).
const SERVER_NAME: usize = 0;
/// Name type, the only one that is defined (RFC 6066 section 3).
const HOST_NAME: usize = 0;

/// Parses all bytes that have arrived.
pub fn read(bytes: &[u8]) -> ClientHello {
    let Ok((message, may_continue)) = handshake_bytes(bytes) else {
        return ClientHello::Unreadable;
    };
    match parse(&message) {
        Ok(Some(name)) => ClientHello::ServerName(name),
        Ok(None) => ClientHello::NoServerName,
        Err(ParseError::Invalid) => ClientHello::Unreadable,
        Err(ParseError::Short) if !may_continue || bytes.len() >= MAX_LENGTH => {
            ClientHello::Unreadable
        }
        Err(ParseError::Short) => ClientHello::Incomplete,
    }
}

/// Why a message cannot be parsed.
#[derive(Clone, Copy)]
enum ParseError {
    /// More bytes are needed.
    Short,
    /// The bytes are not TLS, or not a `ClientHello`.
    Invalid,
}

/// The content of the handshake records at the start of the connection, and whether more may follow. Early
/// data is sent in other records after the `ClientHello` (RFC 8446 section 2.3), never within it.
fn handshake_bytes(mut bytes: &[u8]) -> Result<(Vec<u8>, bool), ParseError> {
    let mut message = Vec::with_capacity(bytes.len());
    let other_record = |message: Vec<u8>| {
        if message.is_empty() { Err(ParseError::Invalid) } else { Ok((message, false)) }
    };
    loop {
        let Some(&content) = bytes.first() else { return Ok((message, true)) };
        // The major version is 3 in TLS 1.0 to 1.3.
        if content != HANDSHAKE || bytes.get(1).is_some_and(|&major| major != 3) {
            return other_record(message);
        }
        let Some(&[high, low]) = bytes.get(3..5) else { return Ok((message, true)) };
        let length = usize::from(u16::from_be_bytes([high, low]));
        if length == 0 || length > MAX_RECORD {
            return other_record(message);
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
fn parse(message: &[u8]) -> Result<Option<String>, ParseError> {
    let mut header = Reader { bytes: message, at_end: ParseError::Short };
    if header.number(1)? != CLIENT_HELLO {
        return Err(ParseError::Invalid);
    }
    let length = header.number(3)?;
    // Bytes after `length` belong to another message.
    let mut body = header.up_to(length);
    body.take(2 + 32)?; // version and random
    body.vector(1)?; // session ID
    body.vector(2)?; // cipher suites
    body.vector(1)?; // compression methods
    if body.bytes.is_empty() && message.len() - 4 >= length {
        // A TLS 1.2 message may have no extensions.
        return Ok(None);
    }
    let length = body.number(2)?;
    let mut extensions = body.up_to(length);
    while !extensions.bytes.is_empty() {
        let kind = extensions.number(2)?;
        let data = extensions.vector(2)?;
        if kind == SERVER_NAME {
            return server_name(data);
        }
    }
    body.take(length)?;
    Ok(None)
}

/// The first host name in the data of the `server_name` extension.
fn server_name(data: &[u8]) -> Result<Option<String>, ParseError> {
    let bytes = Reader { bytes: data, at_end: ParseError::Invalid }.vector(2)?;
    let mut names = Reader { bytes, at_end: ParseError::Invalid };
    while !names.bytes.is_empty() {
        let kind = names.number(1)?;
        let name = names.vector(2)?;
        if kind == HOST_NAME {
            // Some clients send a trailing dot, which RFC 6066 forbids.
            let name = name.strip_suffix(b".").unwrap_or(name);
            let is_valid = !name.is_empty() && name.iter().all(u8::is_ascii_graphic);
            let text = std::str::from_utf8(name).ok().filter(|_| is_valid);
            return text.map(|text| Some(text.to_ascii_lowercase())).ok_or(ParseError::Invalid);
        }
    }
    Ok(None)
}

/// Reads from the front of a slice.
struct Reader<'a> {
    bytes: &'a [u8],
    /// The error of a read beyond the end.
    at_end: ParseError,
}

impl<'a> Reader<'a> {
    fn take(&mut self, n: usize) -> Result<&'a [u8], ParseError> {
        let (front, rest) = self.bytes.split_at_checked(n).ok_or(self.at_end)?;
        self.bytes = rest;
        Ok(front)
    }

    /// Reads a big-endian number of this many bytes.
    fn number(&mut self, bytes: usize) -> Result<usize, ParseError> {
        Ok(self.take(bytes)?.iter().fold(0, |sum, &byte| sum << 8 | usize::from(byte)))
    }

    /// Reads a vector after its length, which is a number of this many bytes (RFC 8446 section 3.4).
    fn vector(&mut self, length_bytes: usize) -> Result<&'a [u8], ParseError> {
        let length = self.number(length_bytes)?;
        self.take(length)
    }

    /// A reader of the next `length` bytes. If all of them have arrived, a read beyond them is invalid.
    fn up_to(&self, length: usize) -> Self {
        match self.bytes.get(..length) {
            Some(bytes) => Self { bytes, at_end: ParseError::Invalid },
            None => Self { ..*self },
        }
    }
}

#[cfg(test)]
#[path = "client_hello_tests.rs"]
mod tests;

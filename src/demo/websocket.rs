//! RFC 6455 from the server's side, as much as kubectl speaks of it.

use aws_lc_rs::digest;
use bytes::{Buf, BytesMut};
use std::io;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// The largest message taken in.
const LIMIT: usize = 4 << 20;
const BINARY: u8 = 2;
const CLOSE: u8 = 8;
const PING: u8 = 9;
const PONG: u8 = 10;

/// The `Sec-WebSocket-Accept` of a key.
pub fn accept(key: &str) -> String {
    let text = format!("{key}258EAFA5-E914-47DA-95CA-C5AB0DC85B11");
    base64(digest::digest(&digest::SHA1_FOR_LEGACY_USE_ONLY, text.as_bytes()).as_ref())
}

/// Reads whole messages; answers pings.
pub struct Receiver<R> {
    io: R,
    buffer: BytesMut,
}

impl<R: AsyncRead + Unpin> Receiver<R> {
    /// Over the reading half of an upgraded connection.
    pub fn new(io: R) -> Self {
        Self { io, buffer: BytesMut::new() }
    }

    /// The next message; `None` once the client closed.
    pub async fn next<W: AsyncWrite + Unpin>(
        &mut self,
        sender: &tokio::sync::Mutex<W>,
    ) -> io::Result<Option<Vec<u8>>> {
        let mut message = Vec::new();
        loop {
            let Some((last, opcode, payload)) = self.frame().await? else { return Ok(None) };
            match opcode {
                CLOSE => return Ok(None),
                PING => send(&mut *sender.lock().await, PONG, &payload).await?,
                PONG => {}
                _ => {
                    message.extend(payload);
                    if message.len() > LIMIT {
                        return Err(io::Error::other("the message is too large"));
                    }
                    if last {
                        return Ok(Some(message));
                    }
                }
            }
        }
    }

    /// Reads on without looking; false at the end.
    pub async fn skip(&mut self) -> bool {
        self.buffer.clear();
        matches!(self.io.read_buf(&mut self.buffer).await, Ok(size) if size > 0)
    }

    async fn frame(&mut self) -> io::Result<Option<(bool, u8, Vec<u8>)>> {
        if !self.fill(2).await? {
            return Ok(None);
        }
        let (head, masked) = (self.buffer[0], self.buffer[1] & 0x80 != 0);
        let (mut size, extended) = match self.buffer[1] & 0x7f {
            126 => (0, 2),
            127 => (0, 8),
            size => (usize::from(size), 0),
        };
        if !self.fill(2 + extended).await? {
            return Ok(None);
        }
        self.buffer.advance(2);
        if extended > 0 {
            size = usize::try_from(self.buffer.get_uint(extended)).unwrap_or(usize::MAX);
        }
        if size > LIMIT {
            return Err(io::Error::other("the frame is too large"));
        }
        let key_size = if masked { 4 } else { 0 };
        if !self.fill(key_size + size).await? {
            return Ok(None);
        }
        let key = self.buffer.split_to(key_size);
        let mut payload = self.buffer.split_to(size).to_vec();
        if masked {
            payload.iter_mut().zip(key.iter().cycle()).for_each(|(byte, mask)| *byte ^= mask);
        }
        Ok(Some((head & 0x80 != 0, head & 0x0f, payload)))
    }

    /// Whether so many bytes are there; false at the end of the stream.
    async fn fill(&mut self, wanted: usize) -> io::Result<bool> {
        while self.buffer.len() < wanted {
            if self.io.read_buf(&mut self.buffer).await? == 0 {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// Sends a binary message on a channel.
pub async fn send_channel<W: AsyncWrite + Unpin>(
    io: &mut W,
    channel: u8,
    bytes: &[u8],
) -> io::Result<()> {
    send(io, BINARY, &[&[channel], bytes].concat()).await
}

/// Says goodbye (1000, normal closure).
pub async fn send_close<W: AsyncWrite + Unpin>(io: &mut W) -> io::Result<()> {
    send(io, CLOSE, &1000_u16.to_be_bytes()).await
}

async fn send<W: AsyncWrite + Unpin>(io: &mut W, opcode: u8, payload: &[u8]) -> io::Result<()> {
    let mut frame = vec![0x80 | opcode];
    match payload.len() {
        size @ 0..126 => frame.push(size as u8),
        size @ 126..0x1_0000 => {
            frame.push(126);
            frame.extend((size as u16).to_be_bytes());
        }
        size => {
            frame.push(127);
            frame.extend((size as u64).to_be_bytes());
        }
    }
    frame.extend(payload);
    io.write_all(&frame).await?;
    io.flush().await
}

const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

/// Base64 with padding.
pub fn base64(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for chunk in bytes.chunks(3) {
        let byte = |at: usize| u32::from(chunk.get(at).copied().unwrap_or(0));
        let bits = byte(0) << 16 | byte(1) << 8 | byte(2);
        for at in 0..4 {
            let sextet = (bits >> (18 - 6 * at) & 0x3f) as usize;
            text.push(if at <= chunk.len() { char::from(ALPHABET[sextet]) } else { '=' });
        }
    }
    text
}

/// Decodes base64url (or base64), padding optional.
pub fn unbase64url(text: &str) -> Option<Vec<u8>> {
    let (mut bytes, mut bits, mut count) = (Vec::new(), 0_u32, 0);
    for byte in text.trim_end_matches('=').bytes() {
        let byte = match byte {
            b'-' => b'+',
            b'_' => b'/',
            byte => byte,
        };
        let sextet = ALPHABET.iter().position(|b| *b == byte)?;
        bits = bits << 6 | sextet as u32;
        count += 6;
        if count >= 8 {
            count -= 8;
            bytes.push((bits >> count) as u8);
        }
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_example_of_the_rfc() {
        assert_eq!(accept("dGhlIHNhbXBsZSBub25jZQ=="), "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=");
    }

    #[test]
    fn base64_round_trips() {
        for (plain, text) in
            [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foob", "Zm9vYg==")]
        {
            assert_eq!(base64(plain.as_bytes()), text);
            assert_eq!(unbase64url(text).as_deref(), Some(plain.as_bytes()));
        }
        assert_eq!(unbase64url("_-8"), Some(vec![0xff, 0xef]));
        assert_eq!(unbase64url("a b"), None);
    }
}

//! Sends one entry of the corpus, followed by a valid request for `/sentinel`, and reads the responses. If an entry
//! hides a request or swallows the sentinel, the recorder sees it.

use std::fmt::Write as _;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use rustls::pki_types::ServerName;
use tokio::io::{AsyncReadExt, AsyncWriteExt, split};
use tokio::net::TcpSocket;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

use crate::smuggling::corpus::{Content, Entry, Frame};
use crate::support::Certs;
use crate::support::http2::{
    self, CANCEL, DATA, END_STREAM, GOAWAY, HEADERS, PREFACE, RST_STREAM, frame, headers, reset,
    settings,
};
use crate::support::wire;

const SENTINEL: &str = "GET /sentinel HTTP/1.1\r\nHost: api\r\n\r\n";

/// Sends entries to one server.
pub struct CorpusClient {
    pub server: SocketAddr,
    http1: [TlsConnector; 2],
    http2: [TlsConnector; 2],
}

impl CorpusClient {
    pub fn new(server: SocketAddr, certs: &Certs) -> Self {
        let connectors = |alpn| {
            let chain = Some((vec![certs.admin.cert_der()], certs.admin.key_der()));
            [wire::connector(certs, None, alpn), wire::connector(certs, chain, alpn)]
        };
        Self { server, http1: connectors("http/1.1"), http2: connectors("h2") }
    }

    /// Sends an entry from `address`. Reads until the sentinel is answered, the server closes the connection, or
    /// nothing arrives for `quiet`. Returns the responses as text.
    pub async fn send(
        &self,
        entry: &Entry,
        address: Ipv4Addr,
        quiet: Duration,
    ) -> io::Result<String> {
        let socket = TcpSocket::new_v4()?;
        socket.bind((address, 0).into())?;
        let stream = socket.connect(self.server).await?;
        let (connectors, bytes) = match &entry.content {
            Content::Http1(bytes) => (&self.http1, [bytes, SENTINEL.as_bytes()].concat()),
            Content::Http2(frames) => (&self.http2, encode(frames)),
        };
        let connector = &connectors[usize::from(entry.certificate)];
        let stream = connector.connect(ServerName::from(self.server.ip()), stream).await?;
        let (mut read, mut write) = split(stream);
        let mut received = Vec::new();
        let is_http1 = matches!(entry.content, Content::Http1(_));
        let closed = async {
            loop {
                match timeout(quiet, read.read_buf(&mut received)).await {
                    Err(_) => return false,
                    Ok(Ok(0) | Err(_)) => return true,
                    Ok(Ok(_)) if is_finished(&received, is_http1) => return false,
                    Ok(Ok(_)) => {}
                }
            }
        };
        let sending = async {
            // A server that refuses an entry may close the connection before it has read everything.
            let _ = write.write_all(&bytes).await;
            let _ = write.flush().await;
            std::future::pending::<()>().await;
        };
        let closed = tokio::select! {
            closed = closed => closed,
            () = sending => unreachable!(),
        };
        let mut text = if is_http1 { http1_statuses(&received) } else { http2_results(&received) };
        text.push_str(if closed { " closed" } else { " open" });
        Ok(text.trim_start().to_owned())
    }
}

fn is_finished(received: &[u8], is_http1: bool) -> bool {
    if is_http1 {
        let text = b"reached the sentinel\n";
        return received.windows(text.len()).any(|window| window == text);
    }
    let (mut first, mut sentinel, mut closed) = (false, false, false);
    for http2::Frame { kind, flags, stream, .. } in http2::parse(received).0 {
        let ended =
            kind == RST_STREAM || [DATA, HEADERS].contains(&kind) && flags & END_STREAM != 0;
        first |= stream == 1 && ended;
        sentinel |= stream == 3 && ended;
        closed |= kind == GOAWAY;
    }
    first && sentinel || closed && (first || sentinel)
}

/// The status codes of HTTP/1.1 responses.
fn http1_statuses(received: &[u8]) -> String {
    let text = String::from_utf8_lossy(received);
    let statuses = text.split("HTTP/1.").skip(1).filter_map(|rest| rest.get(2..5));
    statuses.fold(String::new(), |text, status| text + " " + status)
}

/// The results of stream 1, of the sentinel's stream 3, and of the connection. Streams end in any order.
fn http2_results(received: &[u8]) -> String {
    let mut results = [String::new(), String::new(), String::new()];
    for http2::Frame { kind, stream, payload, .. } in http2::parse(received).0 {
        let code = |at: usize| payload.get(at..at + 4).map_or(0, |code| code[3]);
        let _ = match (kind, stream) {
            (HEADERS, 1) => write!(results[0], " {}", status(payload)),
            (HEADERS, 3) => write!(results[1], " sentinel:{}", status(payload)),
            (RST_STREAM, 1) => write!(results[0], " RST({})", code(0)),
            (RST_STREAM, 3) => write!(results[1], " sentinel:RST({})", code(0)),
            (GOAWAY, _) => write!(results[2], " GOAWAY({})", code(4)),
            _ => Ok(()),
        };
    }
    results.concat()
}

/// The status at the beginning of a header block: an entry of the static table, or a literal whose name is one
/// (RFC 7541, section 6). Digits in Huffman coding take 5 bits (0 to 2) or 6 (appendix B).
fn status(block: &[u8]) -> String {
    // A change of the table's size (section 6.3) may precede it.
    let skipped = block.iter().take_while(|&&byte| byte & 0xe0 == 0x20).count();
    let block = &block[skipped.min(block.len())..];
    let indexed = ["200", "204", "206", "304", "400", "404", "500"];
    match *block {
        [byte @ 0x88..=0x8e, ..] => indexed[usize::from(byte) - 0x88].to_owned(),
        [_, length, ref rest @ ..] if length & 0x80 == 0 => {
            String::from_utf8_lossy(&rest[..usize::from(length).min(rest.len())]).into_owned()
        }
        [_, length, ref rest @ ..] => {
            let coded = &rest[..usize::from(length & 0x7f).min(rest.len())];
            let bits = coded.iter().fold(String::new(), |bits, byte| format!("{bits}{byte:08b}"));
            let (mut digits, mut at) = (String::new(), 0);
            while digits.len() < 3 {
                let size = if bits[at..].starts_with("000") { 5 } else { 6 };
                if at + size > bits.len() {
                    break;
                }
                let value = u8::from_str_radix(&bits[at..at + size], 2).unwrap();
                let digit = if size == 5 { value } else { value.wrapping_sub(22) };
                let _ = write!(digits, "{digit}");
                at += size;
            }
            digits
        }
        _ => "?".to_owned(),
    }
}

#[test]
fn status_is_read_from_each_encoding() {
    assert_eq!(status(&[0x88]), "200");
    assert_eq!(status(&[0x20, 0x8c]), "400");
    assert_eq!(status(&[0x48, 3, b'4', b'3', b'1']), "431");
    // RFC 7541, appendix C.6.1: `302` is 0x6402.
    assert_eq!(status(&[0x48, 0x82, 0x64, 0x02]), "302");
}

/// The preface, the frames of stream 1 and the sentinel on stream 3.
fn encode(list: &[Frame]) -> Vec<u8> {
    let mut out = [PREFACE, &settings(&[])].concat();
    for item in list {
        match item {
            Frame::Headers { end, fields } => out.extend(headers(1, *end, fields)),
            Frame::Data { end, data } => {
                out.extend(frame(DATA, if *end { END_STREAM } else { 0 }, 1, data));
            }
            Frame::Reset => out.extend(reset(1, CANCEL)),
        }
    }
    let sentinel =
        [(":method", "GET"), (":scheme", "https"), (":authority", "api"), (":path", "/sentinel")];
    out.extend(headers(3, true, &sentinel));
    out
}

//! Records the first bytes that a peer sends, so that a failed TLS handshake can name a peer that does not
//! speak TLS: a server of plain HTTP, or another service on the port.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use jackstay_sys::delegate_async_write;
use tokio::io::{AsyncRead, ReadBuf};

use super::observations::FailureKind;

/// Number of recorded bytes: enough for a status line or a banner.
const RECORDED: usize = 64;

/// A stream that records the first bytes that it reads.
#[derive(Debug)]
pub(super) struct FirstBytes<S> {
    inner: S,
    bytes: Vec<u8>,
}

impl<S> FirstBytes<S> {
    pub(super) fn new(inner: S) -> Self {
        Self { inner, bytes: Vec::new() }
    }

    /// The kind and the text of the failure if the peer has sent something other than TLS.
    pub(super) fn not_tls(&self) -> Option<(FailureKind, String)> {
        not_tls(&self.bytes)
    }
}

/// Whether the bytes begin a TLS record: a content type from 20 to 24 and the major version 3 (RFC 8446
/// section 5.1, RFC 6520 section 3).
fn is_tls_record(bytes: &[u8]) -> bool {
    matches!(bytes, [20..=24] | [20..=24, 3, ..])
}

/// Whether the bytes begin a SETTINGS frame on stream 0, with which an HTTP/2 server begins (RFC 9113
/// section 3.4).
fn is_http2_settings(bytes: &[u8]) -> bool {
    matches!(bytes, [0, 0, _, 4, 0, 0, 0, 0, 0, ..])
}

fn not_tls(bytes: &[u8]) -> Option<(FailureKind, String)> {
    if bytes.is_empty() || is_tls_record(bytes) {
        return None;
    }
    if is_http2_settings(bytes) {
        let text = "TLS: the peer answers in plain HTTP/2";
        return Some((FailureKind::PlainHttp, text.to_owned()));
    }
    let line = bytes.split(|byte| matches!(byte, b'\r' | b'\n')).next().unwrap_or_default();
    let line = String::from_utf8_lossy(line);
    Some(if bytes.starts_with(b"HTTP/") {
        (FailureKind::PlainHttp, format!("TLS: the peer answers in plain HTTP: {line:?}"))
    } else {
        (FailureKind::NotTls, format!("TLS: the peer answers {line:?}, which is not TLS"))
    })
}

impl<S: AsyncRead + Unpin> AsyncRead for FirstBytes<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = buf.filled().len();
        ready!(Pin::new(&mut this.inner).poll_read(cx, buf))?;
        let missing = RECORDED - this.bytes.len();
        this.bytes.extend(buf.filled()[before..].iter().take(missing));
        Poll::Ready(Ok(()))
    }
}

delegate_async_write!(FirstBytes<S>, |this| &mut this.inner);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn not_tls_names_plain_http_and_other_services() {
        for (bytes, expected) in [
            (&b""[..], None),
            (&[22, 3, 3, 0, 80][..], None),
            (&[21, 3, 1, 0, 2, 2, 40][..], None),
            (&[22][..], None),
            (
                b"HTTP/1.0 400 Bad Request\r\n\r\nClient",
                Some((
                    FailureKind::PlainHttp,
                    "TLS: the peer answers in plain HTTP: \"HTTP/1.0 400 Bad Request\"",
                )),
            ),
            (
                &[0, 0, 24, 4, 0, 0, 0, 0, 0, 0, 5][..],
                Some((FailureKind::PlainHttp, "TLS: the peer answers in plain HTTP/2")),
            ),
            (
                b"SSH-2.0-OpenSSH_9.2\r\n",
                Some((
                    FailureKind::NotTls,
                    "TLS: the peer answers \"SSH-2.0-OpenSSH_9.2\", which is not TLS",
                )),
            ),
            (
                &[22, 9, 7][..],
                Some((
                    FailureKind::NotTls,
                    "TLS: the peer answers \"\\u{16}\\t\\u{7}\", which is not TLS",
                )),
            ),
        ] {
            let found = not_tls(bytes);
            let found = found.as_ref().map(|(kind, text)| (*kind, text.as_str()));
            assert_eq!(found, expected, "{bytes:?}");
        }
    }
}

//! The texts of h2 errors for operators.

use std::io::{self, ErrorKind};
use std::time::Duration;

use h2::Reason;
use jackstay_core::connection::ping_limit::is_complaint;
use jackstay_core::request::hygiene::MAX_RESPONSE_HEAD;

use crate::tls::tls_error::describe_alert_in;

/// Number of characters of the debug data of a GOAWAY that are shown.
const MAX_DEBUG_DATA: usize = 100;

/// The text of an error on a connection or stream.
pub fn describe_h2_error(error: &h2::Error) -> String {
    let text = closed_by_apiserver(error).or_else(|| large_head(error));
    text.unwrap_or_else(|| describe_alert_in(&error.to_string()))
}

/// The text of the error that ended a connection.
pub fn describe_end(error: &h2::Error) -> String {
    closed_by_apiserver(error)
        .unwrap_or_else(|| format!("connection failed: {}", describe_alert_in(&error.to_string())))
}

/// The end of a connection whose socket takes no bytes.
pub fn describe_write_error(error: &io::Error) -> String {
    format!("connection failed: {error}")
}

/// Whether the peer has ended a connection that was idle for `idle` because of its PINGs, which had this `interval`.
pub fn is_ping_complaint(error: &h2::Error, idle: Option<Duration>, interval: Duration) -> bool {
    let is_calm = error.reason() == Some(h2::Reason::ENHANCE_YOUR_CALM);
    let is_goaway = error.is_go_away() && error.is_remote();
    is_calm && is_goaway && is_complaint(&goaway_debug_data(error), idle, interval)
}

/// The debug data of a GOAWAY from the apiserver (RFC 9113 section 6.8), escaped and shortened; empty if there is none.
/// h2 shows it only in the text of the error, as a byte string in parentheses at the end.
fn goaway_debug_data(error: &h2::Error) -> String {
    let text = error.to_string();
    let quoted = text.rsplit_once(" (b\"").and_then(|(_, rest)| rest.strip_suffix("\")"));
    // Escaped bytes are ASCII.
    quoted.unwrap_or_default().chars().take(MAX_DEBUG_DATA).collect()
}

/// The text of an error with which h2 refuses a response head that is larger than [`MAX_RESPONSE_HEAD`]: a reset of the
/// stream, which it also has for a malformed head, or the end of the connection if the head has far more frames.
fn large_head(error: &h2::Error) -> Option<String> {
    let size = MAX_RESPONSE_HEAD / 1024;
    match error.reason()? {
        _ if !error.is_library() => None,
        Reason::PROTOCOL_ERROR if error.is_reset() => {
            Some(format!("the head of the response is larger than {size} KiB, or malformed"))
        }
        Reason::ENHANCE_YOUR_CALM => {
            let (text, reasons) = (error.to_string(), ["too_many_continuations", "way_too_large"]);
            let is_head = reasons.iter().any(|reason| text.contains(reason));
            is_head.then(|| format!("the head of a response is far larger than {size} KiB"))
        }
        _ => None,
    }
}

/// The text of an error that means that the apiserver closed the connection: a GOAWAY, or an EOF. The
/// texts of the libraries mislead: for a GOAWAY with `NO_ERROR` h2 has "connection error received: not
/// a result of an error", and for an EOF without `close_notify` rustls refers to its manual.
fn closed_by_apiserver(error: &h2::Error) -> Option<String> {
    if error.is_go_away() && error.is_remote() {
        // The debug output of a reason is its name in RFC 9113 section 7.
        let text = format!("closed by the apiserver: GOAWAY {:?}", error.reason()?);
        return Some(match goaway_debug_data(error) {
            debug_data if debug_data.is_empty() => text,
            debug_data => format!("{text} ({debug_data})"),
        });
    }
    let kind = error.get_io()?.kind();
    (kind == ErrorKind::UnexpectedEof).then(|| "closed by the apiserver: EOF".to_owned())
}

#[cfg(test)]
mod tests {
    use std::pin::Pin;
    use std::task::{Context, Poll};

    use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

    use super::*;

    /// A peer that accepts all bytes and sends `sends`. Each later read fails with `then`, or stays
    /// pending if `then` is `None`.
    struct FailingPeer {
        sends: &'static [u8],
        then: Option<ErrorKind>,
    }

    impl AsyncRead for FailingPeer {
        fn poll_read(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
            buffer: &mut ReadBuf<'_>,
        ) -> Poll<io::Result<()>> {
            let sends = std::mem::take(&mut self.sends);
            if sends.is_empty() {
                return match self.then {
                    Some(kind) => Poll::Ready(Err(io::Error::new(kind, "see the manual"))),
                    None => Poll::Pending,
                };
            }
            buffer.put_slice(sends);
            Poll::Ready(Ok(()))
        }
    }

    impl AsyncWrite for FailingPeer {
        fn poll_write(
            self: Pin<&mut Self>,
            _: &mut Context<'_>,
            bytes: &[u8],
        ) -> Poll<io::Result<usize>> {
            Poll::Ready(Ok(bytes.len()))
        }

        fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }

        fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }
    }

    /// Empty SETTINGS; GOAWAY with last stream 0 and `ENHANCE_YOUR_CALM` (RFC 9113 section 6.8).
    const GOAWAY: &[u8] = b"\0\0\0\x04\0\0\0\0\0\0\0\x08\x07\0\0\0\0\0\0\0\0\0\0\0\0\x0b";

    #[tokio::test(start_paused = true)]
    async fn describe_h2_error_names_goaway_and_eof_of_the_apiserver() {
        for (sends, then, expected) in [
            (&b""[..], Some(ErrorKind::UnexpectedEof), "closed by the apiserver: EOF"),
            (b"", Some(ErrorKind::ConnectionReset), "see the manual"),
            (GOAWAY, None, "closed by the apiserver: GOAWAY ENHANCE_YOUR_CALM"),
            (
                b"\0\0\0\x04\0\0\0\0\0\0\0\x16\x07\0\0\0\0\0\0\0\0\0\0\0\0\x0btoo_many_pings",
                None,
                "closed by the apiserver: GOAWAY ENHANCE_YOUR_CALM (too_many_pings)",
            ),
        ] {
            let peer = FailingPeer { sends, then };
            let (_send, connection) =
                h2::client::handshake(peer).await.expect("the preface is accepted");
            let error = connection.await.expect_err("the peer fails");
            assert_eq!(describe_h2_error(&error), expected);
        }
    }
}

//! The answers to HTTP/1.1 heads that hyper refuses.
//!
//! hyper answers a head that it cannot parse before there is a request: with 400, 414 or 431, without a body
//! (`Server::on_error` in its `proto/h1/role.rs`), and closes the connection. Clients of Kubernetes expect a `Status`,
//! which [`HeadErrors`] sends instead of what hyper writes:
//!
//! | hyper's code | head | message |
//! |---|---|---|
//! | 431 | longer than hyper's buffer, or more fields than a head of the limit can have | the limit and its key |
//! | 414 | a request target that no `http::Uri` can hold | the limit |
//! | 400 | malformed | that it cannot be parsed |
//!
//! The client's `Accept` is not known, so the `Status` is JSON. If the response before is not sent yet, hyper's answer is
//! sent as it is.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes};
use jackstay_core::request::hygiene;
use jackstay_core::request::status_error::StatusError;
use tokio::io::AsyncWrite;

use super::status_response;
use crate::observe::ListenerMetrics;

/// Answers the heads of one connection that hyper refuses.
#[derive(Debug)]
pub struct HeadErrors {
    max_header_bytes: u32,
    metrics: Arc<ListenerMetrics>,
    /// What is left of the answer that is sent instead of hyper's. It is the last one of the connection.
    unsent: Option<Bytes>,
}

impl HeadErrors {
    /// The answers of a connection whose heads are limited to `max_header_bytes`.
    pub fn new(max_header_bytes: u32, metrics: Arc<ListenerMetrics>) -> Self {
        Self { max_header_bytes, metrics, unsent: None }
    }

    /// Prepares the answer to a head for which hyper writes `answer`. An answer that hyper does not give to a refused
    /// head is not replaced.
    pub fn refuse(&mut self, answer: &[u8]) {
        let Some(error) = self.error(answer) else { return };
        self.metrics.own_errors.count(Some(error.code.as_u16()), error.label);
        self.unsent = Some(response(answer, &error));
    }

    fn error(&self, answer: &[u8]) -> Option<StatusError> {
        if self.unsent.is_some() || !answer.starts_with(b"HTTP/1.") {
            return None;
        }
        let error = match answer.get(b"HTTP/1.1 ".len()..)?.get(..3)? {
            b"431" => hygiene::head_too_large(self.max_header_bytes as usize),
            b"414" => hygiene::target_too_long(),
            b"400" => StatusError::bad_request("the request head cannot be parsed"),
            _ => return None,
        };
        Some(error.closing_connection())
    }

    /// Sends the prepared answer; `None` if there is none.
    pub fn poll_send(
        &mut self,
        io: &mut (impl AsyncWrite + Unpin),
        cx: &mut Context<'_>,
    ) -> Option<Poll<io::Result<()>>> {
        let unsent = self.unsent.as_mut()?;
        Some(poll_send(unsent, io, cx))
    }
}

fn poll_send(
    unsent: &mut Bytes,
    io: &mut (impl AsyncWrite + Unpin),
    cx: &mut Context<'_>,
) -> Poll<io::Result<()>> {
    while unsent.has_remaining() {
        match ready!(Pin::new(&mut *io).poll_write(cx, unsent))? {
            0 => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
            sent => unsent.advance(sent),
        }
    }
    Poll::Ready(Ok(()))
}

/// A response with the status line of `answer`.
fn response(answer: &[u8], error: &StatusError) -> Bytes {
    let (head, body) = status_response::response(error, None).into_parts();
    let line = answer.split(|&byte| byte == b'\r').next().unwrap_or_default();
    let mut bytes = line.to_vec();
    for (name, value) in &head.headers {
        bytes.extend([&b"\r\n"[..], name.as_str().as_bytes(), b": ", value.as_bytes()].concat());
    }
    bytes.extend(b"\r\n\r\n");
    bytes.extend(body);
    bytes.into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe::Metrics;

    fn answered(answer: &str) -> Option<String> {
        let mut errors = HeadErrors::new(8 << 10, Metrics::new().listener("l"));
        errors.refuse(answer.as_bytes());
        errors.unsent.map(|unsent| String::from_utf8(unsent.to_vec()).unwrap())
    }

    #[test]
    fn answer_to_a_refused_head_is_replaced_by_a_status_with_its_code() {
        for (code, text) in [
            ("431 Request Header Fields Too Large", "8192 bytes: see limits.max_header_bytes"),
            ("414 URI Too Long", "65534 bytes"),
            ("400 Bad Request", "cannot be parsed"),
        ] {
            for version in ["HTTP/1.0", "HTTP/1.1"] {
                let line = format!("{version} {code}");
                let answer = format!("{line}\r\nconnection: close\r\ncontent-length: 0\r\n\r\n");
                let sent = answered(&answer).expect(code);
                assert!(sent.starts_with(&format!("{line}\r\n")), "{sent}");
                assert!(sent.contains("\r\nconnection: close\r\n"), "{sent}");
                let (_, body) = sent.split_once("\r\n\r\n").unwrap();
                assert!(body.contains(text), "{sent}");
            }
        }
    }

    #[test]
    fn other_bytes_are_not_replaced() {
        for answer in
            ["", "HTTP/1.1", "HTTP/1.1 200 OK\r\n\r\n", "body HTTP/1.1 431 x", "4", "\r\n"]
        {
            assert_eq!(answered(answer), None, "{answer}");
        }
    }
}

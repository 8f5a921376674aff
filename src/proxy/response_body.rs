//! The body of a response, which hyper polls.
//!
//! A slow client slows down only its own stream: jackstay releases upstream window when hyper polls for
//! more, so at most one stream's window of bytes waits for the client.
//!
//! The error of a body that ends early is text and contains no h2 error. hyper would otherwise reset the
//! client's stream with the reason of that error, and Go repeats a POST whose stream was reset with
//! `REFUSED_STREAM`.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use h2::RecvStream;
use http::{Response, response};
use http_body::{Body as _, Frame, SizeHint};
use hyper::body::Incoming;
use jackstay_core::request::status_error::StatusError;
use jackstay_net::http2_error::describe_h2_error;

use super::admission::response_reserve::ResponseReserve;
use super::admission::tunnel_memory::TunnelMemory;
use super::client_certificate::ProofExpiry;
use super::consistent_reads::learner::{Learned, VersionLearner};
use super::request_body::UploadTask;
use super::upstream_client::{end_turn, poll_turn, release_window};
use super::watch::body::WatchBody;
use crate::observe::{Outcome, Side};
use crate::upstream::connection::Permit;
use crate::upstream::http1::Http1Driver;

/// The response to a request, or an error for the client with the outcome to record it in.
pub type ForwardResult = Result<Response<ResponseBody>, (StatusError, Box<Outcome>)>;

/// The body of a response.
pub enum ResponseBody {
    /// No body: the response to an upgrade.
    Empty,
    /// A body that has arrived completely: an error of jackstay, or a short body from an apiserver.
    Full(FullBody),
    /// A body that is forwarded while it arrives from an apiserver.
    Stream(Box<StreamedBody>),
    /// The body of a watch, in whole frames. The watch is resumed when its connection is lost.
    Watch(Box<WatchBody>),
    /// The body of an HTTP/1.1 response that declines an upgrade.
    Http1(Box<Http1Body>),
}

impl ResponseBody {
    /// What the response may hold while the client does not read.
    pub fn reserve(&self) -> ResponseReserve {
        match self {
            Self::Empty => ResponseReserve::default(),
            Self::Full(full) => ResponseReserve::complete(full.data.as_ref().map_or(0, Bytes::len)),
            Self::Stream(stream) if stream.done => ResponseReserve::default(),
            Self::Stream(_) | Self::Http1(_) => ResponseReserve::STREAM,
            Self::Watch(_) => ResponseReserve::WATCH,
        }
    }

    /// The head of the response has proven the token of the client: the stream, if it lasts, counts to the requests
    /// with proven tokens.
    pub fn token_proven(&mut self) {
        match self {
            Self::Stream(stream) => stream.permit.token_proven(),
            Self::Watch(watch) => watch.token_proven(),
            Self::Empty | Self::Full(_) | Self::Http1(_) => {}
        }
    }

    /// The response with the status and the headers of `head`. The version and the extensions of `head`
    /// belong to the upstream connection and are not used.
    pub fn with_head(self, head: response::Parts) -> Response<Self> {
        let mut response = Response::new(self);
        *response.status_mut() = head.status;
        *response.headers_mut() = head.headers;
        response
    }
}

impl http_body::Body for ResponseBody {
    type Data = Bytes;
    type Error = String;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, String>>> {
        match self.get_mut() {
            Self::Empty => Poll::Ready(None),
            Self::Full(full) => Poll::Ready(full.data.take().map(|data| {
                full.outcome.bytes += data.len() as u64;
                full.outcome.complete();
                Ok(Frame::data(data))
            })),
            Self::Stream(stream) => stream.poll_frame(cx),
            Self::Watch(watch) => watch.poll_frame(cx),
            Self::Http1(http1) => http1.poll_frame(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Empty => true,
            Self::Full(full) => full.data.is_none(),
            Self::Stream(stream) => stream.done,
            Self::Watch(_) => false,
            Self::Http1(http1) => http1.incoming.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Empty => SizeHint::with_exact(0),
            Self::Full(full) => {
                SizeHint::with_exact(full.data.as_ref().map_or(0, Bytes::len) as u64)
            }
            _ => SizeHint::default(),
        }
    }
}

/// A body that has arrived completely.
pub struct FullBody {
    data: Option<Bytes>,
    outcome: Box<Outcome>,
}

impl FullBody {
    /// A body that consists of `data`.
    pub fn new(data: Bytes, mut outcome: Box<Outcome>) -> Self {
        let data = (!data.is_empty()).then_some(data);
        if data.is_none() {
            outcome.complete();
        }
        Self { data, outcome }
    }
}

/// The body of an apiserver's response, forwarded while it arrives. If it ends early, the client's stream is
/// reset.
pub struct StreamedBody {
    recv: RecvStream,
    /// The part that has arrived with the head ([`super::body_prefix`]).
    prefix: Option<Bytes>,
    /// Bytes that hyper has taken and whose window is not released yet.
    unreleased: usize,
    /// See [`poll_turn`].
    polls: u16,
    done: bool,
    /// Ends a watch whose frames cannot be followed when its client's certificate is no longer valid.
    proof_expiry: Option<ProofExpiry>,
    permit: Permit,
    outcome: Box<Outcome>,
    _upload: Option<UploadTask>,
    /// Until it has read the version.
    learner: Option<Box<VersionLearner>>,
}

impl StreamedBody {
    /// The body of a response whose head has arrived. It ends early when `proof_expiry` is ready.
    pub fn new(
        mut recv: RecvStream,
        prefix: Option<Bytes>,
        mut permit: Permit,
        mut outcome: Box<Outcome>,
        (upload, learner): (Option<UploadTask>, Option<Box<VersionLearner>>),
        proof_expiry: Option<ProofExpiry>,
    ) -> Self {
        let done = prefix.is_none() && recv.is_end_stream();
        // No other connection can continue a response that is partly forwarded.
        permit.set_pinned(true);
        if done {
            permit.finished();
            outcome.complete();
        } else {
            permit.receives(&mut recv);
        }
        Self {
            recv,
            prefix,
            unreleased: 0,
            polls: 0,
            done,
            proof_expiry,
            permit,
            outcome,
            _upload: upload,
            learner,
        }
    }

    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, String>>> {
        if self.done {
            return Poll::Ready(None);
        }
        if let Some(data) = self.prefix.take() {
            return Poll::Ready(Some(self.data_frame(data)));
        }
        if let Some(expiry) = &mut self.proof_expiry
            && let Poll::Ready(reason) = expiry.as_mut().poll(cx)
        {
            return Poll::Ready(Some(Err(self.cut(Side::Jackstay, &reason))));
        }
        release_window(&mut self.recv, &mut self.unreleased);
        ready!(poll_turn(&mut self.polls, cx));
        match ready!(self.recv.poll_data(cx)) {
            Some(Ok(data)) => Poll::Ready(Some(self.data_frame(data))),
            Some(Err(error)) => Poll::Ready(Some(Err(self.cut_by_upstream(&error)))),
            None => match ready!(self.recv.poll_trailers(cx)) {
                Ok(Some(trailers)) => {
                    Poll::Ready(Some(self.end().map(|()| Frame::trailers(trailers))))
                }
                // h2 reports a reset with NO_ERROR as an end, but the body is truncated.
                Ok(None) if !self.recv.is_end_stream() => {
                    Poll::Ready(Some(Err(self.cut(Side::Upstream, "the stream was reset"))))
                }
                Ok(None) => Poll::Ready(self.end().err().map(Err)),
                Err(error) => Poll::Ready(Some(Err(self.cut_by_upstream(&error)))),
            },
        }
    }

    fn data_frame(&mut self, data: Bytes) -> Result<Frame<Bytes>, String> {
        self.unreleased += data.len();
        if let Some(learner) = &mut self.learner {
            if learner.inflates() {
                end_turn(&mut self.polls);
            }
            let learned = learner.read(&data);
            self.learned(learned)?;
        }
        if self.recv.is_end_stream() {
            self.end()?;
        }
        self.outcome.bytes += data.len() as u64;
        Ok(Frame::data(data))
    }

    /// The learner has read some bytes, or the end. A list that is older than one that the client has seen is cut.
    fn learned(&mut self, learned: Learned) -> Result<(), String> {
        match learned {
            Learned::Unknown => return Ok(()),
            Learned::Done => self.learner = None,
            Learned::Older { version, oldest } => {
                self.learner = None;
                return Err(self.cut(
                    Side::Jackstay,
                    &format!(
                        "the list has version {version}, and its client has seen version {oldest}"
                    ),
                ));
            }
        }
        Ok(())
    }

    /// The body has ended.
    fn end(&mut self) -> Result<(), String> {
        if let Some(learner) = &self.learner {
            let learned = learner.end();
            self.learned(learned)?;
        }
        self.learner = None;
        self.done = true;
        self.permit.finished();
        self.outcome.complete();
        Ok(())
    }

    fn cut_by_upstream(&mut self, error: &h2::Error) -> String {
        self.cut(Side::Upstream, &describe_h2_error(error))
    }

    /// Ends the body early. Returns the error for hyper.
    fn cut(&mut self, by: Side, reason: &str) -> String {
        self.done = true;
        self.outcome.cut(by, reason.to_owned());
        format!("the response was cut off: {reason}")
    }
}

/// The body of a response on an upstream HTTP/1.1 connection.
pub struct Http1Body {
    incoming: Incoming,
    outcome: Box<Outcome>,
    _connection: (Http1Driver, TunnelMemory),
}

impl Http1Body {
    /// The body, and its connection.
    pub fn new(
        incoming: Incoming,
        connection: (Http1Driver, TunnelMemory),
        mut outcome: Box<Outcome>,
    ) -> Self {
        if incoming.is_end_stream() {
            outcome.complete();
        }
        Self { incoming, outcome, _connection: connection }
    }

    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, String>>> {
        match ready!(Pin::new(&mut self.incoming).poll_frame(cx)) {
            Some(Ok(frame)) => {
                if let Some(data) = frame.data_ref() {
                    self.outcome.bytes += data.len() as u64;
                }
                if self.incoming.is_end_stream() {
                    self.outcome.complete();
                }
                Poll::Ready(Some(Ok(frame)))
            }
            Some(Err(error)) => {
                self.outcome.cut(Side::Upstream, error.to_string());
                Poll::Ready(Some(Err(error.to_string())))
            }
            None => {
                self.outcome.complete();
                Poll::Ready(None)
            }
        }
    }
}

//! Bodies in both directions: the answer as hyper takes it, and the request as h2 takes it.
//!
//! Backpressure ends at the slow client and nowhere else: window is released upstream only when
//! the client's connection asks for more, and what is not released stays in one stream's window.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use h2::RecvStream;
use http_body::{Body as _, Frame, SizeHint};
use hyper::body::Incoming;

use super::body_error::BodyError;
use super::client_certificate::ProofExpiry;
use super::request_body::UploadTask;
use super::upstream_client::release;
use super::watch::body::WatchBody;
use crate::observe::{Outcome, Side};
use crate::upstream::connection::{Permit, describe_h2_error};
use crate::upstream::http1::Http1Driver;

/// An answer's body.
pub enum ResponseBody {
    /// None: the head of an upgrade.
    Empty,
    /// Ours, or short and held already.
    Full(FullBody),
    /// An apiserver's, as it comes.
    Stream(Box<StreamedBody>),
    /// A watch: whole frames, and resumed when its connection dies.
    Watch(Box<WatchBody>),
    /// Of an upstream HTTP/1.1 connection that declined an upgrade.
    Http1(Box<Http1Body>),
}

impl http_body::Body for ResponseBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        match self.get_mut() {
            Self::Empty => Poll::Ready(None),
            Self::Full(full) => Poll::Ready(full.data.take().map(|data| {
                full.outcome.add_bytes(data.len());
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

/// A body that is all there.
pub struct FullBody {
    data: Option<Bytes>,
    outcome: Box<Outcome>,
}

impl FullBody {
    /// A body of these bytes.
    pub fn new(data: Bytes, mut outcome: Box<Outcome>) -> Self {
        let data = (!data.is_empty()).then_some(data);
        if data.is_none() {
            outcome.complete();
        }
        Self { data, outcome }
    }
}

/// An apiserver's answer on its way to the client.
pub struct StreamedBody {
    recv: RecvStream,
    /// Read ahead: the head was held back until it came.
    first: Option<Bytes>,
    /// Bytes handed over whose window is not released yet.
    unreleased: usize,
    done: bool,
    /// A watch that cannot be followed ends with the proof of its client.
    proof_end: Option<ProofExpiry>,
    permit: Permit,
    outcome: Box<Outcome>,
    _upload: Option<UploadTask>,
}

impl StreamedBody {
    /// The rest of an answer whose head has arrived.
    pub fn new(
        recv: RecvStream,
        first: Option<Bytes>,
        mut permit: Permit,
        mut outcome: Box<Outcome>,
        upload: Option<UploadTask>,
    ) -> Self {
        let done = first.is_none() && recv.is_end_stream();
        // Part of it is forwarded, so it cannot come from elsewhere.
        permit.pin(true);
        if done {
            permit.finished();
            outcome.complete();
        }
        let proof_end = None;
        Self { recv, first, unreleased: 0, done, proof_end, permit, outcome, _upload: upload }
    }

    /// The same, broken off at the end of a proof.
    #[must_use]
    pub fn until(mut self, proof_end: Option<ProofExpiry>) -> Self {
        self.proof_end = proof_end;
        self
    }

    fn poll_frame(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        if self.done {
            return Poll::Ready(None);
        }
        if let Some(data) = self.first.take() {
            return Poll::Ready(Some(Ok(self.hand_over(data))));
        }
        if let Some(end) = &mut self.proof_end
            && let Poll::Ready(why) = end.as_mut().poll(cx)
        {
            return Poll::Ready(Some(Err(self.cut(&why))));
        }
        release(&mut self.recv, &mut self.unreleased);
        match ready!(self.recv.poll_data(cx)) {
            Some(Ok(data)) => Poll::Ready(Some(Ok(self.hand_over(data)))),
            Some(Err(error)) => Poll::Ready(Some(Err(self.cut(&describe_h2_error(&error))))),
            None => match ready!(self.recv.poll_trailers(cx)) {
                Ok(Some(trailers)) => {
                    self.end();
                    Poll::Ready(Some(Ok(Frame::trailers(trailers))))
                }
                // A reset with NO_ERROR looks like an end; truncation must not look complete.
                Ok(None) if !self.recv.is_end_stream() => {
                    Poll::Ready(Some(Err(self.cut("the stream was reset"))))
                }
                Ok(None) => {
                    self.end();
                    Poll::Ready(None)
                }
                Err(error) => Poll::Ready(Some(Err(self.cut(&describe_h2_error(&error))))),
            },
        }
    }

    fn hand_over(&mut self, data: Bytes) -> Frame<Bytes> {
        self.unreleased += data.len();
        self.outcome.add_bytes(data.len());
        if self.recv.is_end_stream() {
            self.end();
        }
        Frame::data(data)
    }

    fn end(&mut self) {
        self.done = true;
        self.permit.finished();
        self.outcome.complete();
    }

    fn cut(&mut self, why: &str) -> BodyError {
        self.done = true;
        self.outcome.cut(Side::Upstream, why.to_owned());
        BodyError(format!("the apiserver's answer was cut off: {why}"))
    }
}

/// An answer from an HTTP/1.1 connection.
pub struct Http1Body {
    incoming: Incoming,
    outcome: Box<Outcome>,
    _driver: Http1Driver,
}

impl Http1Body {
    /// The body of such an answer.
    pub fn new(incoming: Incoming, driver: Http1Driver, mut outcome: Box<Outcome>) -> Self {
        if incoming.is_end_stream() {
            outcome.complete();
        }
        Self { incoming, outcome, _driver: driver }
    }

    fn poll_frame(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        match ready!(Pin::new(&mut self.incoming).poll_frame(cx)) {
            Some(Ok(frame)) => {
                if let Some(data) = frame.data_ref() {
                    self.outcome.add_bytes(data.len());
                }
                if self.incoming.is_end_stream() {
                    self.outcome.complete();
                }
                Poll::Ready(Some(Ok(frame)))
            }
            Some(Err(error)) => {
                self.outcome.cut(Side::Upstream, error.to_string());
                Poll::Ready(Some(Err(BodyError(error.to_string()))))
            }
            None => {
                self.outcome.complete();
                Poll::Ready(None)
            }
        }
    }
}

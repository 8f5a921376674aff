//! The bodies of answers, and the reading of the bodies of requests.

use crate::demo::apiserver::status_error::StatusError;
use bytes::{Buf, Bytes, BytesMut};
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use std::pin::Pin;
use std::task::{Context, Poll};
use tokio::sync::mpsc;

/// The largest request body that is read, like kube-apiserver's.
const LIMIT: usize = 3 << 20;
/// How much of a generated body is written at once.
const CHUNK: usize = 64 << 10;
static FILLER: [u8; CHUNK] = [b'.'; CHUNK];

/// Ends a body in the middle: the stream is reset, never ended.
#[derive(Debug)]
pub struct Abort;

impl std::fmt::Display for Abort {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("the body was cut off on purpose")
    }
}

impl std::error::Error for Abort {}

/// The body of an answer.
#[derive(Debug)]
pub enum ResponseBody {
    /// All of it.
    Full(Option<Bytes>),
    /// What a task sends.
    Stream(mpsc::Receiver<Result<Bytes, Abort>>),
    /// So many dots.
    Filler(u64),
    /// What the request said, trailers included.
    Echo(Box<Incoming>),
}

impl ResponseBody {
    /// All of it, known now.
    pub fn full(bytes: impl Into<Bytes>) -> Self {
        let bytes = bytes.into();
        Self::Full((!bytes.is_empty()).then_some(bytes))
    }
}

impl Body for ResponseBody {
    type Data = Bytes;
    type Error = Abort;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Abort>>> {
        match self.get_mut() {
            Self::Full(bytes) => Poll::Ready(bytes.take().map(|b| Ok(Frame::data(b)))),
            Self::Stream(receiver) => receiver.poll_recv(cx).map(|r| r.map(|r| r.map(Frame::data))),
            Self::Filler(0) => Poll::Ready(None),
            Self::Filler(left) => {
                let size = usize::try_from(*left).map_or(CHUNK, |left| left.min(CHUNK));
                *left -= size as u64;
                Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(&FILLER[..size])))))
            }
            Self::Echo(incoming) => {
                Pin::new(incoming).poll_frame(cx).map(|r| r.map(|r| r.map_err(|_| Abort)))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        matches!(self, Self::Full(None) | Self::Filler(0))
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Full(bytes) => {
                SizeHint::with_exact(bytes.as_ref().map_or(0, Buf::remaining) as u64)
            }
            Self::Filler(left) => SizeHint::with_exact(*left),
            Self::Stream(_) | Self::Echo(_) => SizeHint::default(),
        }
    }
}

/// The whole body of a request.
pub async fn read(mut body: Incoming) -> Result<Bytes, StatusError> {
    let mut whole = BytesMut::new();
    while let Some(frame) = std::future::poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).await {
        let frame =
            frame.map_err(|e| StatusError::bad_request(format!("reading the body: {e}")))?;
        if let Ok(data) = frame.into_data() {
            whole.extend_from_slice(&data);
        }
        if whole.len() > LIMIT {
            return Err(StatusError::new(
                413,
                "RequestEntityTooLarge",
                format!("Request entity too large: limit is {LIMIT}"),
            ));
        }
    }
    Ok(whole.freeze())
}

//! Response bodies, and reading of request bodies.

use crate::demo::apiserver::status_error::StatusError;
use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use hyper::body::Incoming;
use std::pin::Pin;
use std::task::{Context, Poll};
use tokio::sync::mpsc;

/// Largest request body that is read, in bytes; kube-apiserver has the same limit.
const LIMIT: usize = 3 << 20;
/// Size of a DATA chunk of a generated body, in bytes.
const CHUNK: usize = 64 << 10;
static FILLER: [u8; CHUNK] = [b'.'; CHUNK];

/// Resets the stream in the middle of the body.
#[derive(Debug)]
pub struct Abort;

impl std::fmt::Display for Abort {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("the body was cut off on purpose")
    }
}

impl std::error::Error for Abort {}

/// The body of a response.
#[derive(Debug)]
pub enum ResponseBody {
    /// A body known in full; `None` is an empty body.
    Full(Option<Bytes>),
    /// Chunks sent by a task.
    Stream(mpsc::Receiver<Result<Bytes, Abort>>),
    /// This many dots.
    Filler(u64),
    /// The request body, trailers included.
    Echo(Box<Incoming>),
}

impl ResponseBody {
    /// A body known in full.
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
            Self::Full(bytes) => SizeHint::with_exact(bytes.as_ref().map_or(0, Bytes::len) as u64),
            Self::Filler(left) => SizeHint::with_exact(*left),
            Self::Stream(_) | Self::Echo(_) => SizeHint::default(),
        }
    }
}

/// Reads a request body to its end.
///
/// # Errors
/// 413 for more than 3 MiB, 400 when the client resets the stream.
pub async fn read(body: Incoming) -> Result<Bytes, StatusError> {
    match Limited::new(body, LIMIT).collect().await {
        Ok(whole) => Ok(whole.to_bytes()),
        Err(error) if error.is::<LengthLimitError>() => {
            let message = format!("Request entity too large: limit is {LIMIT}");
            Err(StatusError::new(413, "RequestEntityTooLarge", message))
        }
        Err(error) => Err(StatusError::bad_request(format!("reading the body: {error}"))),
    }
}

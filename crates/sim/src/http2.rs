//! HTTP/2 as messages: what two processes exchange on a TCP connection.
//!
//! TLS is one exchange of messages, [`Frame::Hello`] and [`Frame::Settings`]. The windows of streams bound the bodies of
//! lists. Those of connections are not modelled, because they exceed the windows of all streams that may be open. Header
//! compression and priorities are not modelled.

use std::rc::Rc;

use bytes::Bytes;
use http::request::Parts;
use jackstay_core::request::info::RequestInfo;
use jackstay_core::request::path_prefix::PathPrefix;

/// A stream of a connection, numbered by the client: 1, 3, 5, …
pub type StreamId = u32;

/// A message.
#[derive(Debug, Clone)]
pub enum Frame {
    /// The client's part of the handshake.
    Hello {
        /// `SETTINGS_INITIAL_WINDOW_SIZE`, in bytes.
        window: u32,
    },
    /// The server's part of the handshake: the largest number of streams.
    Settings {
        /// `SETTINGS_MAX_CONCURRENT_STREAMS`.
        max_streams: usize,
    },
    /// A request with its whole body.
    Request(StreamId, Rc<Request>),
    /// The head of a response.
    Head(StreamId, Head),
    /// A whole response that fits into one segment.
    Response(StreamId, Head, Option<Data>),
    /// A part of the body of a response.
    Data(StreamId, Data),
    /// The end of a response.
    End(StreamId),
    /// `RST_STREAM`.
    Reset(StreamId, ResetCode),
    /// GOAWAY with `NO_ERROR`: streams above the number were not processed.
    Goaway {
        /// The last stream that is processed.
        last: StreamId,
    },
    /// `WINDOW_UPDATE` of a stream: the client has read so many bytes.
    WindowUpdate(StreamId, u32),
    /// PING.
    Ping(u32),
    /// The answer to a PING.
    Pong(u32),
}

impl Frame {
    /// The bytes on the wire, with TLS.
    pub fn bytes(&self) -> u32 {
        match self {
            Self::Hello { .. } => 500,
            Self::Settings { .. } => 3_000,
            Self::Request(_, request) => 200 + request.body_bytes(),
            Self::Head(..) => 120,
            Self::Response(_, _, data) => 130 + data.as_ref().map_or(0, Data::len),
            Self::Data(_, data) => 38 + data.len(),
            Self::End(_)
            | Self::Reset(..)
            | Self::WindowUpdate(..)
            | Self::Ping(_)
            | Self::Pong(_) => 40,
            Self::Goaway { .. } => 50,
        }
    }
}

/// Why a stream was reset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ResetCode {
    /// CANCEL.
    Cancel,
    /// `REFUSED_STREAM`: the request was not processed.
    Refused,
    /// `INTERNAL_ERROR`.
    Internal,
}

/// A request.
#[derive(Debug)]
pub struct Request {
    /// The head.
    pub parts: Parts,
    /// What it asks for, in Kubernetes terms.
    pub info: RequestInfo,
    /// What it writes, if it is a write.
    pub write: Option<Write>,
}

impl Request {
    /// A request for this target.
    ///
    /// # Panics
    /// The target is no URI.
    pub fn new(method: http::Method, target: &str, write: Option<Write>) -> Rc<Self> {
        let request = http::Request::builder().method(method).uri(target).body(());
        let parts = request.expect("a valid target").into_parts().0;
        Rc::new(Self { info: RequestInfo::new(&parts, &PathPrefix::default()), parts, write })
    }

    fn body_bytes(&self) -> u32 {
        if self.write.is_some() { 400 } else { 0 }
    }
}

/// The object of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Write {
    /// A number that no other write has. A write with it must not happen twice.
    pub token: u64,
    /// The version of the object that the write replaces; `None` for any.
    pub replaces: Option<u64>,
}

/// The head of a response, with the figures of its body that a client reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Head {
    /// The status.
    pub status: u16,
    /// Retry-After, in seconds.
    pub retry_after: Option<u64>,
    /// The resourceVersion of the object or list; 0 without one.
    pub version: u64,
    /// The key at which the next page of a list begins; 0 without one.
    pub next: u32,
    /// The bytes of a list (Content-Length); 0 for another body.
    pub length: u32,
}

impl Head {
    /// A head with this status.
    pub fn status(status: u16) -> Self {
        Self { status, retry_after: None, version: 0, next: 0, length: 0 }
    }
}

/// A part of a body.
#[derive(Debug, Clone)]
pub enum Data {
    /// Bytes of which only the number matters.
    Opaque(u32),
    /// The bytes of a watch.
    Frames(Bytes),
}

impl Data {
    /// The number of bytes.
    pub fn len(&self) -> u32 {
        match self {
            Self::Opaque(bytes) => *bytes,
            Self::Frames(bytes) => bytes.len() as u32,
        }
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The receive window of a stream, as the receiver has it: which bytes were read and not announced to the sender.
#[derive(Debug, Clone, Copy)]
pub struct ReceiveWindow {
    size: u32,
    unannounced: u32,
}

impl ReceiveWindow {
    /// A window of this size in bytes.
    pub fn new(size: u32) -> Self {
        Self { size, unannounced: 0 }
    }

    /// Bytes were read. Returns what a `WINDOW_UPDATE` announces, which is sent for half of the window at a time.
    pub fn read(&mut self, bytes: u32) -> Option<u32> {
        self.unannounced += bytes;
        (self.unannounced >= self.size / 2).then(|| std::mem::take(&mut self.unannounced))
    }
}

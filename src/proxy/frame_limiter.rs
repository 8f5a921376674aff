//! Limits the frames that a client sends and that cost more than they carry.
//!
//! HTTP/2 lets a client send control frames, empty frames and resets at no cost to itself (CVE-2019-9512
//! and others, CVE-2023-44487). Each kind has a budget: a burst, a rate, and what the client earns by use that
//! causes such frames:
//!
//! | frames of a client | burst | per second | earned |
//! |---|---|---|---|
//! | PING | 1,000 | 50 | |
//! | SETTINGS | 100 | 1 | |
//! | PRIORITY | 1,000 | 10 | 2 for each stream |
//! | `WINDOW_UPDATE` | 4,000 | 1,000 | 4 for each DATA frame sent to it, 1 for each KiB |
//! | `RST_STREAM` | 2,000, or the stream limit if it is larger | 50 | 1 for each response head sent to it |
//! | DATA without bytes and `END_STREAM` | 100 | 10 | |
//! | HEADERS and CONTINUATION without bytes | 100 | 1 | |
//! | unknown types, GOAWAY, `PUSH_PROMISE` | 100 | 10 | |
//!
//! Acknowledgements are not counted; jackstay sends no more than it wants acknowledged. A client that uses up
//! a budget gets GOAWAY with `ENHANCE_YOUR_CALM`, and its connection is closed.
//!
//! h2 reads as long as the socket has bytes. So that a client that always has more does not delay the others,
//! the connection yields to them after [`TURN_FRAMES`] frames or [`TURN_BYTES`] bytes.

use std::cell::Cell;
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Instant;

use crate::net::http2_frames::{
    ACK, CLIENT_PREFACE_LENGTH, END_STREAM, FrameHeader, FrameScanner, enhance_your_calm,
    frame_type,
};

/// Frames that a connection reads before other connections are polled.
const TURN_FRAMES: usize = 256;
/// Bytes that a connection reads before other connections are polled.
const TURN_BYTES: usize = 128 * 1024;

/// Frames that have a common budget. Also the value of a metric's label.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LimitedFrame {
    /// PING without ACK.
    Ping,
    /// SETTINGS without ACK.
    Settings,
    /// PRIORITY.
    Priority,
    /// `WINDOW_UPDATE`.
    WindowUpdate,
    /// `RST_STREAM`.
    Reset,
    /// DATA without bytes and `END_STREAM`.
    EmptyData,
    /// HEADERS or CONTINUATION without bytes.
    EmptyHeaders,
    /// All other frames.
    Other,
}

impl LimitedFrame {
    const COUNT: usize = 8;

    /// The label value.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Ping => "ping",
            Self::Settings => "settings",
            Self::Priority => "priority",
            Self::WindowUpdate => "window_update",
            Self::Reset => "rst_stream",
            Self::EmptyData => "empty_data",
            Self::EmptyHeaders => "empty_headers",
            Self::Other => "other",
        }
    }

    /// `None` for a frame that is not limited here.
    fn of(header: FrameHeader) -> Option<Self> {
        let has = |flag| header.flags & flag != 0;
        let empty = header.length == 0;
        match header.frame_type {
            frame_type::DATA => (empty && !has(END_STREAM)).then_some(Self::EmptyData),
            frame_type::HEADERS | frame_type::CONTINUATION => empty.then_some(Self::EmptyHeaders),
            frame_type::PRIORITY => Some(Self::Priority),
            frame_type::RST_STREAM => Some(Self::Reset),
            frame_type::SETTINGS => (!has(ACK)).then_some(Self::Settings),
            frame_type::PING => (!has(ACK)).then_some(Self::Ping),
            frame_type::WINDOW_UPDATE => Some(Self::WindowUpdate),
            _ => Some(Self::Other),
        }
    }

    /// Burst, and frames a second.
    fn rate(self, max_streams: u32) -> (u32, u32) {
        match self {
            Self::Ping => (1_000, 50),
            Self::Settings | Self::EmptyHeaders => (100, 1),
            Self::Priority => (1_000, 10),
            Self::WindowUpdate => (4_000, 1_000),
            Self::Reset => (2_000.max(max_streams), 50),
            Self::EmptyData | Self::Other => (100, 10),
        }
    }
}

/// The budgets of one connection.
#[derive(Debug)]
struct Budgets {
    max_streams: u32,
    created: Instant,
    /// By [`LimitedFrame`]: frames left, and when they were last added, in milliseconds since `created`.
    left: [(u32, u64); LimitedFrame::COUNT],
}

impl Budgets {
    fn new(max_streams: u32) -> Self {
        use LimitedFrame as F;
        let all = [
            F::Ping,
            F::Settings,
            F::Priority,
            F::WindowUpdate,
            F::Reset,
            F::EmptyData,
            F::EmptyHeaders,
            F::Other,
        ];
        let left = all.map(|frame| (frame.rate(max_streams).0, 0));
        Self { max_streams, created: Instant::now(), left }
    }

    /// Takes one frame of the budget. False if it is used up. Only then the clock is read.
    fn take(&mut self, frame: LimitedFrame) -> bool {
        let (left, added) = &mut self.left[frame as usize];
        if *left == 0 {
            let (burst, per_second) = frame.rate(self.max_streams);
            let now = self.created.elapsed().as_millis() as u64;
            let gained = now.saturating_sub(*added) * u64::from(per_second) / 1_000;
            if gained == 0 {
                return false;
            }
            *left = u32::try_from(gained).map_or(burst, |gained| gained.min(burst));
            *added = now;
        }
        *left -= 1;
        true
    }

    /// Adds frames to a budget, at most its burst.
    fn earn(&mut self, frame: LimitedFrame, count: u32) {
        let burst = frame.rate(self.max_streams).0;
        let left = &mut self.left[frame as usize].0;
        *left = left.saturating_add(count).min(burst);
    }

    fn received(&mut self, header: FrameHeader) -> Result<(), LimitedFrame> {
        if header.frame_type == frame_type::HEADERS {
            self.earn(LimitedFrame::Priority, 2);
        }
        match LimitedFrame::of(header) {
            Some(frame) if !self.take(frame) => Err(frame),
            _ => Ok(()),
        }
    }

    fn sent(&mut self, header: FrameHeader) {
        match header.frame_type {
            frame_type::DATA => self.earn(LimitedFrame::WindowUpdate, 4 + header.length / 1024),
            frame_type::HEADERS => self.earn(LimitedFrame::Reset, 1),
            _ => {}
        }
    }
}

/// The budget that a client has used up, if it has.
#[derive(Debug, Clone, Default)]
pub struct Violation(Rc<Cell<Option<LimitedFrame>>>);

impl Violation {
    /// The frames of which there were too many.
    pub fn get(&self) -> Option<LimitedFrame> {
        self.0.get()
    }
}

/// The stream of an HTTP/2 connection of a client.
#[derive(Debug)]
pub struct FrameLimiter<T> {
    io: T,
    received: FrameScanner,
    sent: FrameScanner,
    budgets: Budgets,
    /// The last stream that the client opened.
    last_stream: u32,
    /// What was read since the last yield.
    turn: Turn,
    violation: Violation,
}

#[derive(Debug, Default)]
struct Turn {
    frames: usize,
    bytes: usize,
}

impl<T> FrameLimiter<T> {
    /// The stream of a client that may open `max_streams` at a time.
    pub fn new(io: T, max_streams: u32) -> (Self, Violation) {
        let violation = Violation::default();
        let limiter = Self {
            io,
            received: FrameScanner::new(CLIENT_PREFACE_LENGTH),
            sent: FrameScanner::new(0),
            budgets: Budgets::new(max_streams),
            last_stream: 0,
            turn: Turn::default(),
            violation: violation.clone(),
        };
        (limiter, violation)
    }

    /// Counts the frames in received bytes.
    fn count_received(&mut self, bytes: &[u8]) -> Result<(), LimitedFrame> {
        let Self { received, budgets, last_stream, turn, .. } = self;
        turn.bytes += bytes.len();
        received.scan(bytes, |header| {
            turn.frames += 1;
            if header.frame_type == frame_type::HEADERS {
                *last_stream = header.stream.max(*last_stream);
            }
            budgets.received(header)
        })
    }

    fn count_sent(&mut self, bytes: &[u8]) {
        let Self { sent, budgets, .. } = self;
        let Ok(()) = sent.scan(bytes, |header| {
            budgets.sent(header);
            Ok::<_, std::convert::Infallible>(())
        });
    }
}

impl<T: AsyncWrite + Unpin> FrameLimiter<T> {
    /// Sends GOAWAY if the socket takes it at once, and returns the error that ends the connection.
    fn close(&mut self, frame: LimitedFrame, cx: &mut Context<'_>) -> io::Error {
        self.violation.0.set(Some(frame));
        if self.sent.is_at_frame_boundary() {
            let goaway = enhance_your_calm(self.last_stream);
            if let Poll::Ready(Ok(_)) = Pin::new(&mut self.io).poll_write(cx, &goaway) {
                let _ = Pin::new(&mut self.io).poll_flush(cx);
            }
        }
        io::Error::other(format!("too many {} frames", frame.as_str()))
    }
}

impl<T: AsyncRead + AsyncWrite + Unpin> AsyncRead for FrameLimiter<T> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if this.turn.frames >= TURN_FRAMES || this.turn.bytes >= TURN_BYTES {
            this.turn = Turn::default();
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        let before = buf.filled().len();
        let result = Pin::new(&mut this.io).poll_read(cx, buf);
        if result.is_pending() {
            this.turn = Turn::default();
        }
        ready!(result)?;
        match this.count_received(&buf.filled()[before..]) {
            Ok(()) => Poll::Ready(Ok(())),
            Err(frame) => Poll::Ready(Err(this.close(frame, cx))),
        }
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for FrameLimiter<T> {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = ready!(Pin::new(&mut this.io).poll_write(cx, buf))?;
        this.count_sent(&buf[..written]);
        Poll::Ready(Ok(written))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = ready!(Pin::new(&mut this.io).poll_write_vectored(cx, bufs))?;
        let mut left = written;
        for buf in bufs {
            let counted = left.min(buf.len());
            this.count_sent(&buf[..counted]);
            left -= counted;
        }
        Poll::Ready(Ok(written))
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};

    use super::*;

    /// The limiter behind a client that has sent its preface, and the client.
    async fn connected() -> (FrameLimiter<DuplexStream>, Violation, DuplexStream) {
        let (mut client, server) = duplex(1 << 22);
        client.write_all(&[0; CLIENT_PREFACE_LENGTH]).await.unwrap();
        let (mut limiter, violation) = FrameLimiter::new(server, 1_000);
        limiter.read_exact(&mut [0; CLIENT_PREFACE_LENGTH]).await.unwrap();
        (limiter, violation, client)
    }

    fn frame(frame_type: u8, flags: u8, payload: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0, 0, payload.len() as u8, frame_type, flags, 0, 0, 0, 1];
        bytes.extend(payload);
        bytes
    }

    /// Reads until the pipe is empty.
    async fn read(limiter: &mut FrameLimiter<DuplexStream>, length: usize) -> io::Result<usize> {
        limiter.read_exact(&mut vec![0; length]).await
    }

    #[tokio::test(start_paused = true)]
    async fn each_kind_is_closed_with_goaway_after_its_burst() {
        use frame_type::{CONTINUATION, DATA, HEADERS, PING, PRIORITY, RST_STREAM, SETTINGS};
        let cases: &[(u8, &[u8], LimitedFrame)] = &[
            (PING, &[0; 8], LimitedFrame::Ping),
            (SETTINGS, &[], LimitedFrame::Settings),
            (PRIORITY, &[0; 5], LimitedFrame::Priority),
            (frame_type::WINDOW_UPDATE, &[0, 0, 0, 1], LimitedFrame::WindowUpdate),
            (RST_STREAM, &[0; 4], LimitedFrame::Reset),
            (DATA, &[], LimitedFrame::EmptyData),
            (HEADERS, &[], LimitedFrame::EmptyHeaders),
            (CONTINUATION, &[], LimitedFrame::EmptyHeaders),
            (0xbe, &[], LimitedFrame::Other),
        ];
        for (frame_type, payload, kind) in cases {
            let (mut limiter, violation, mut client) = connected().await;
            let one = frame(*frame_type, 0, payload);
            let (burst, per_second) = kind.rate(1_000);
            client.write_all(&one.repeat(burst as usize)).await.unwrap();
            read(&mut limiter, one.len() * burst as usize).await.unwrap();
            // A second later, as many as its rate.
            tokio::time::advance(Duration::from_secs(1)).await;
            client.write_all(&one.repeat(per_second as usize)).await.unwrap();
            read(&mut limiter, one.len() * per_second as usize).await.unwrap();
            assert_eq!(violation.get(), None, "{kind:?}");
            client.write_all(&one).await.unwrap();
            read(&mut limiter, one.len()).await.unwrap_err();
            assert_eq!(violation.get(), Some(*kind));
            let mut goaway = [0; 17];
            client.read_exact(&mut goaway).await.unwrap();
            let last = u32::from(*frame_type == HEADERS);
            assert_eq!(goaway[..], enhance_your_calm(last), "{kind:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn acknowledgements_and_frames_with_content_are_not_limited() {
        let (mut limiter, violation, mut client) = connected().await;
        for one in [
            frame(frame_type::PING, ACK, &[0; 8]),
            frame(frame_type::SETTINGS, ACK, &[]),
            frame(frame_type::DATA, 0, &[1]),
            frame(frame_type::DATA, END_STREAM, &[]),
            frame(frame_type::HEADERS, 0, &[1]),
        ] {
            client.write_all(&one.repeat(10_000)).await.unwrap();
            read(&mut limiter, one.len() * 10_000).await.unwrap();
        }
        assert_eq!(violation.get(), None);
    }

    /// A client that reads a large response updates its windows, and one that cancels answered requests resets
    /// them.
    #[tokio::test(start_paused = true)]
    async fn frames_that_a_client_has_earned_are_not_limited() {
        let (mut limiter, violation, mut client) = connected().await;
        let update = frame(frame_type::WINDOW_UPDATE, 0, &[0, 0, 0, 1]);
        let reset = frame(frame_type::RST_STREAM, 0, &[0; 4]);
        for _ in 0..10_000 {
            limiter.write_all(&frame(frame_type::HEADERS, 0, &[1])).await.unwrap();
            limiter.write_all(&frame(frame_type::DATA, 0, &[1; 100])).await.unwrap();
            client.read_exact(&mut [0; 10 + 109]).await.unwrap();
            client.write_all(&update.repeat(4)).await.unwrap();
            client.write_all(&reset).await.unwrap();
            read(&mut limiter, update.len() * 4 + reset.len()).await.unwrap();
        }
        assert_eq!(violation.get(), None);
    }

    #[tokio::test(start_paused = true)]
    async fn reading_yields_after_a_turn() {
        let (mut limiter, _violation, mut client) = connected().await;
        let frames = TURN_FRAMES * 3;
        client.write_all(&frame(frame_type::PING, ACK, &[0; 8]).repeat(frames)).await.unwrap();
        let mut yields = 0;
        let mut left = frames * 17;
        std::future::poll_fn(|cx| {
            let mut buffer = [0; 17 * 16];
            let mut buf = ReadBuf::new(&mut buffer);
            match Pin::new(&mut limiter).poll_read(cx, &mut buf) {
                Poll::Pending => yields += 1,
                Poll::Ready(result) => {
                    result.unwrap();
                    left -= buf.filled().len();
                    cx.waker().wake_by_ref();
                }
            }
            if left == 0 { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
        assert_eq!(yields, 2, "one after each full turn but the last");
    }
}

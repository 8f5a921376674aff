//! Limits the frames that a peer sends and that cost more than they carry.
//!
//! HTTP/2 lets a peer send control frames, empty frames, resets and interim responses at no cost to itself
//! (CVE-2019-9512 and others, CVE-2023-44487). Each kind has a [budget](jackstay_core::frame_budgets). A peer that uses
//! up one gets GOAWAY with `ENHANCE_YOUR_CALM`, and its connection is closed.
//!
//! A header block, HEADERS with all its CONTINUATION frames, must arrive within `limits.header_timeout`, however
//! slowly its bytes come. h2 limits its size and the number of its frames, and [`jackstay_core::request::hygiene`]
//! those of trailers. As long as a header block is open, the connection may carry no other frame (RFC 9113, 4.3), so
//! the connection is closed with the same GOAWAY. What it holds until then is charged, since there is no request yet,
//! and so is what its fields keep in the [table](jackstay_core::header_table) of h2's decoder.
//!
//! h2 reads as long as the socket has bytes, and a record of TLS can have many frames; the records themselves are
//! counted by [`jackstay_sys::sockets::read_ahead`]. So that a peer that always has more does not delay the others, the
//! connection yields to them after a turn: [`CLIENT_TURN`], or [`SERVER_TURN`] if the peer is an apiserver. It yields
//! before the end of the stream too, so that h2 first processes what was read before it: after a GOAWAY and the last
//! response h2 closes the connection itself, and no stream is lost with it. An error, such as a TLS alert, is reported
//! at once: a write that follows would fail with another one, which says less.

mod header_block;

use std::cell::{Cell, RefCell, RefMut};
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use jackstay_core::frame_budgets::{Budgets, Peer};
use jackstay_core::http2_frames::{
    ACK, CLIENT_PREFACE_LENGTH, FrameHeader, FramePart, FrameScanner, enhance_your_calm, frame_type,
};
use jackstay_core::unsent_requests::UnsentRequests;
use jackstay_sys::clock;
use jackstay_sys::sockets::tracked_stream::StreamObserver;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

pub use self::header_block::ChargeHeaders;
use self::header_block::HeaderBlock;

pub use jackstay_core::frame_budgets::LimitedFrame;

/// What the connection of a client reads before other tasks run. It is short, because a new connection waits for the
/// turns of up to 61 connections (`proxy::task_queues`): 2 MiB of request heads.
const CLIENT_TURN: Turn = Turn { frames: 64, bytes: 32 * 1024 };
/// What the connection of an apiserver reads before other tasks run. Responses are larger than requests.
const SERVER_TURN: Turn = Turn { frames: 256, bytes: 128 * 1024 };

/// What the frames of a peer have shown. Clones share it.
#[derive(Debug, Clone, Default)]
pub struct PeerFrames(Rc<Seen>);

#[derive(Debug, Default)]
struct Seen {
    violation: Cell<Option<LimitedFrame>>,
    settings_acks: Cell<u64>,
    has_ended: Cell<bool>,
}

impl PeerFrames {
    /// The frames of which there were too many, if any.
    pub fn violation(&self) -> Option<LimitedFrame> {
        self.0.violation.get()
    }

    /// How many SETTINGS the peer has acknowledged. h2 does not show it.
    pub fn settings_acks(&self) -> u64 {
        self.0.settings_acks.get()
    }

    /// Whether the end of what the peer sends was read, or reading has failed.
    pub fn have_ended(&self) -> bool {
        self.0.has_ended.get()
    }

    fn received(&self, header: FrameHeader) {
        if header.frame_type == frame_type::SETTINGS && header.flags & ACK != 0 {
            self.0.settings_acks.set(self.0.settings_acks.get() + 1);
        }
    }
}

/// Where the heads of requests are in the bytes that the kernel has taken. Clones share it.
#[derive(Debug, Clone)]
pub struct SentHeads {
    requests: Rc<RefCell<UnsentRequests>>,
    observer: StreamObserver,
}

impl SentHeads {
    /// Those of a connection on which nothing was sent.
    pub fn new(observer: StreamObserver) -> Self {
        Self { requests: Rc::default(), observer }
    }

    /// The ledger.
    pub fn requests(&self) -> RefMut<'_, UnsentRequests> {
        self.requests.borrow_mut()
    }
}

/// The stream of an HTTP/2 connection whose frames are limited.
#[derive(Debug)]
pub struct FrameLimiter<T> {
    io: T,
    heads: Option<SentHeads>,
    received: FrameScanner,
    sent: FrameScanner,
    budgets: Budgets,
    /// The last stream that a client opened; 0 for a server, which opens none.
    last_stream: u32,
    block: HeaderBlock,
    /// What was read since the last yield.
    turn: Turn,
    /// What is read before a yield.
    limit: Turn,
    /// The end of the stream was read, and is reported in the next poll.
    is_at_end: bool,
    seen: PeerFrames,
}

#[derive(Debug, Default)]
struct Turn {
    frames: usize,
    bytes: usize,
}

impl<T> FrameLimiter<T> {
    /// The stream of a client that may open `max_streams` at a time, and has `header_timeout` for each header block.
    pub fn of_client(io: T, max_streams: u32, header_timeout: Duration) -> (Self, PeerFrames) {
        Self::new(io, Peer::Client, max_streams, Some(header_timeout))
    }

    /// The stream of a server to which jackstay opens at most `max_streams` at a time.
    pub fn of_server(io: T, max_streams: u32) -> (Self, PeerFrames) {
        Self::new(io, Peer::Server, max_streams, None)
    }

    fn new(
        io: T,
        peer: Peer,
        max_streams: u32,
        header_timeout: Option<Duration>,
    ) -> (Self, PeerFrames) {
        let seen = PeerFrames::default();
        let (received, sent, limit) = match peer {
            Peer::Client => (CLIENT_PREFACE_LENGTH, 0, CLIENT_TURN),
            Peer::Server => (0, CLIENT_PREFACE_LENGTH, SERVER_TURN),
        };
        let limiter = Self {
            io,
            heads: None,
            received: FrameScanner::new(received),
            sent: FrameScanner::new(sent),
            budgets: Budgets::new(peer, max_streams, clock::now()),
            last_stream: 0,
            block: HeaderBlock::new(header_timeout),
            turn: Turn::default(),
            limit,
            is_at_end: false,
            seen: seen.clone(),
        };
        (limiter, seen)
    }

    /// Charges header blocks that continue in other frames while they are open, `largest` bytes each, and what the
    /// table of h2's decoder keeps.
    #[must_use]
    pub fn charging_headers(mut self, largest: usize, charge: ChargeHeaders) -> Self {
        self.block.set_charge(largest, charge);
        self
    }

    /// Notes the heads of the requests that are sent.
    #[must_use]
    pub fn noting_heads(self, heads: SentHeads) -> Self {
        Self { heads: Some(heads), ..self }
    }

    /// The wrapped stream.
    pub fn get_ref(&self) -> &T {
        &self.io
    }

    /// Counts the frames in received bytes.
    fn count_received(&mut self, bytes: &[u8]) -> Result<(), LimitedFrame> {
        let Self { received, budgets, last_stream, block, turn, seen, .. } = self;
        turn.bytes += bytes.len();
        received.scan_parts(bytes, |part| {
            let header = match part {
                FramePart::Header(header) => header,
                FramePart::Payload(bytes) => return block.payload(bytes),
            };
            turn.frames += 1;
            let is_opened = header.stream <= *last_stream;
            if header.frame_type == frame_type::HEADERS && budgets.peer == Peer::Client {
                *last_stream = header.stream.max(*last_stream);
            }
            block.received(header)?;
            seen.received(header);
            budgets.received(header, is_opened, clock::now)
        })
    }

    /// What the kernel has taken.
    fn accepted(&self) -> u64 {
        self.heads.as_ref().map_or(0, |heads| heads.observer.bytes_written())
    }

    /// Counts the frames in bytes that were passed on. `accepted`: what the kernel had taken before.
    fn count_sent(&mut self, bytes: &[u8], accepted: u64) {
        let Self { sent, budgets, heads, .. } = self;
        let Ok(()) = sent.scan(bytes, |header| {
            budgets.sent(header);
            if header.frame_type == frame_type::HEADERS
                && let Some(heads) = heads
            {
                heads.requests().head_written(header.stream, accepted);
            }
            Ok::<_, std::convert::Infallible>(())
        });
    }
}

impl<T: AsyncWrite + Unpin> FrameLimiter<T> {
    /// Sends GOAWAY if the socket takes it at once, and returns the error that ends the connection.
    fn close(&mut self, frame: LimitedFrame, cx: &mut Context<'_>) -> io::Error {
        self.seen.0.violation.set(Some(frame));
        if self.sent.is_at_frame_boundary() {
            let goaway = enhance_your_calm(self.last_stream);
            if let Poll::Ready(Ok(_)) = Pin::new(&mut self.io).poll_write(cx, &goaway) {
                let _ = Pin::new(&mut self.io).poll_flush(cx);
            }
        }
        io::Error::other(match frame {
            LimitedFrame::HeaderBlock => {
                "header block not complete in time, or no memory for its fields".to_owned()
            }
            frame => format!("the peer sent too many {} frames", frame.as_str()),
        })
    }
}

impl<T: AsyncRead + AsyncWrite + Unpin> AsyncRead for FrameLimiter<T> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if this.turn.frames >= this.limit.frames || this.turn.bytes >= this.limit.bytes {
            this.turn = Turn::default();
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        if this.is_at_end {
            this.seen.0.has_ended.set(true);
            return Poll::Ready(Ok(()));
        }
        let before = buf.filled().len();
        let result = Pin::new(&mut this.io).poll_read(cx, buf);
        if result.is_pending() {
            this.turn = Turn::default();
            if this.block.poll_expired(this.received.is_in_payload(), cx) {
                return Poll::Ready(Err(this.close(LimitedFrame::HeaderBlock, cx)));
            }
        }
        if let Err(error) = ready!(result) {
            this.seen.0.has_ended.set(true);
            return Poll::Ready(Err(error));
        }
        if buf.filled().len() == before {
            this.is_at_end = true;
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
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
        let accepted = this.accepted();
        let written = ready!(Pin::new(&mut this.io).poll_write(cx, buf))?;
        this.count_sent(&buf[..written], accepted);
        Poll::Ready(Ok(written))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let accepted = this.accepted();
        let written = ready!(Pin::new(&mut this.io).poll_write_vectored(cx, bufs))?;
        let mut left = written;
        for buf in bufs {
            let counted = left.min(buf.len());
            this.count_sent(&buf[..counted], accepted);
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

    /// h2 ends a connection when nothing is left to do. That the peer has closed it before is no failure.
    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx).map(|_| Ok(()))
    }
}

#[cfg(test)]
mod tests {

    use jackstay_core::admission::{MemoryBudget, MemoryKind, SourceMemory};
    use jackstay_core::credential_class::ClientRank;
    use jackstay_core::http2_frames::{END_HEADERS, END_STREAM};
    use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};
    use tokio::time::sleep;

    use super::*;
    use std::sync::Arc;

    /// The limiter behind a client that has sent its preface, and the client.
    async fn connected() -> (FrameLimiter<DuplexStream>, PeerFrames, DuplexStream) {
        let (mut client, server) = duplex(1 << 22);
        client.write_all(&[0; CLIENT_PREFACE_LENGTH]).await.unwrap();
        let (mut limiter, seen) = FrameLimiter::of_client(server, 1_000, Duration::from_secs(10));
        limiter.read_exact(&mut [0; CLIENT_PREFACE_LENGTH]).await.unwrap();
        (limiter, seen, client)
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
            let (mut limiter, seen, mut client) = connected().await;
            let one = frame(*frame_type, 0, payload);
            let (burst, per_second) = kind.rate(1_000);
            client.write_all(&one.repeat(burst as usize)).await.unwrap();
            read(&mut limiter, one.len() * burst as usize).await.unwrap();
            // A second later, as many as its rate.
            tokio::time::advance(Duration::from_secs(1)).await;
            client.write_all(&one.repeat(per_second as usize)).await.unwrap();
            read(&mut limiter, one.len() * per_second as usize).await.unwrap();
            assert_eq!(seen.violation(), None, "{kind:?}");
            client.write_all(&one).await.unwrap();
            read(&mut limiter, one.len()).await.unwrap_err();
            assert_eq!(seen.violation(), Some(*kind));
            let mut goaway = [0; 17];
            client.read_exact(&mut goaway).await.unwrap();
            let last = u32::from(*frame_type == HEADERS);
            assert_eq!(goaway[..], enhance_your_calm(last), "{kind:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn heads_of_a_server_are_closed_after_its_burst_unless_requests_earn_them() {
        let (mut server, stream) = duplex(1 << 22);
        let (mut limiter, seen) = FrameLimiter::of_server(stream, 100);
        let head = frame(frame_type::HEADERS, 0, &[1]);
        let (burst, per_second) = LimitedFrame::Headers.rate(100);
        // The preface, and then requests with four heads each: interim responses, the response, trailers.
        limiter.write_all(&[0; CLIENT_PREFACE_LENGTH]).await.unwrap();
        for _ in 0..2_000 {
            limiter.write_all(&head).await.unwrap();
            server.write_all(&head.repeat(4)).await.unwrap();
            read(&mut limiter, head.len() * 4).await.unwrap();
        }
        // The last request earned nothing, because the budget was full.
        let left = head.repeat(burst as usize - 4);
        server.write_all(&left).await.unwrap();
        read(&mut limiter, left.len()).await.unwrap();
        tokio::time::advance(Duration::from_secs(1)).await;
        server.write_all(&head.repeat(per_second as usize)).await.unwrap();
        read(&mut limiter, head.len() * per_second as usize).await.unwrap();
        assert_eq!(seen.violation(), None);
        server.write_all(&head).await.unwrap();
        read(&mut limiter, head.len()).await.unwrap_err();
        assert_eq!(seen.violation(), Some(LimitedFrame::Headers));
        let mut sent = vec![0; CLIENT_PREFACE_LENGTH + head.len() * 2_000];
        server.read_exact(&mut sent).await.unwrap();
        let mut goaway = [0; 17];
        server.read_exact(&mut goaway).await.unwrap();
        assert_eq!(goaway[..], enhance_your_calm(0));
    }

    #[tokio::test(start_paused = true)]
    async fn acknowledgements_and_frames_with_content_are_not_limited() {
        let (mut limiter, seen, mut client) = connected().await;
        for one in [
            frame(frame_type::PING, ACK, &[0; 8]),
            frame(frame_type::SETTINGS, ACK, &[]),
            frame(frame_type::DATA, 0, &[1]),
            frame(frame_type::DATA, END_STREAM, &[]),
            frame(frame_type::CONTINUATION, 0, &[1]),
        ] {
            client.write_all(&one.repeat(10_000)).await.unwrap();
            read(&mut limiter, one.len() * 10_000).await.unwrap();
        }
        assert_eq!(seen.violation(), None);
    }

    /// A client that reads a large response updates its windows, and one that cancels answered requests resets
    /// them.
    #[tokio::test(start_paused = true)]
    async fn frames_that_a_client_has_earned_are_not_limited() {
        let (mut limiter, seen, mut client) = connected().await;
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
        assert_eq!(seen.violation(), None);
    }

    #[tokio::test(start_paused = true)]
    async fn trailers_are_limited_and_requests_are_not() {
        let (mut limiter, seen, mut client) = connected().await;
        let mut request = frame(frame_type::HEADERS, END_HEADERS, &[1]);
        for stream in 0..1_000_u16 {
            request[7..9].copy_from_slice(&(2 * stream + 1).to_be_bytes());
            client.write_all(&request).await.unwrap();
            read(&mut limiter, request.len()).await.unwrap();
        }
        client.write_all(&request.repeat(101)).await.unwrap();
        read(&mut limiter, request.len() * 100).await.unwrap();
        assert_eq!(seen.violation(), None);
        read(&mut limiter, request.len()).await.unwrap_err();
        assert_eq!(seen.violation(), Some(LimitedFrame::Trailers));
    }

    /// A connection whose header blocks are charged to this source.
    async fn connected_and_charged_to(
        source: &Arc<SourceMemory>,
    ) -> (FrameLimiter<DuplexStream>, PeerFrames, DuplexStream) {
        let source = Arc::clone(source);
        let charge = move |kind, bytes| source.try_charge(kind, bytes, ClientRank::Unproven);
        let (limiter, seen, client) = connected().await;
        (limiter.charging_headers(1 << 20, Box::new(charge)), seen, client)
    }

    #[tokio::test(start_paused = true)]
    async fn a_header_block_is_charged_while_it_is_open_and_closed_without_memory() {
        let budget = MemoryBudget::new(64 << 20);
        let source = budget.source(1);
        let (mut limiter, seen, mut client) = connected_and_charged_to(&source).await;
        let first = frame(frame_type::HEADERS, 0, &[1; 20]);
        let more = frame(frame_type::CONTINUATION, 0, &[1]);
        let last = frame(frame_type::CONTINUATION, END_HEADERS, &[1]);
        let whole = frame(frame_type::HEADERS, END_HEADERS, &[1; 20]);
        let large = frame(frame_type::CONTINUATION, 0, &[1; 200]).repeat(25);
        for (bytes, held) in [
            (&whole, 0),
            (&first, 20 << 8),
            (&more, 21 << 8),
            (&large, 1 << 20),
            (&last, 0),
            (&first, 20 << 8),
            (&last, 0),
        ] {
            client.write_all(bytes).await.unwrap();
            read(&mut limiter, bytes.len()).await.unwrap();
            assert_eq!(source.used(), held);
        }
        let _full = source.charge(MemoryKind::Streams, 64 << 20);
        client.write_all(&first).await.unwrap();
        read(&mut limiter, first.len()).await.unwrap_err();
        assert_eq!(seen.violation(), Some(LimitedFrame::HeaderBlock));
    }

    #[tokio::test(start_paused = true)]
    async fn what_the_header_table_keeps_is_charged_and_closed_without_memory() {
        let budget = MemoryBudget::new(64 << 20);
        let source = budget.source(1);
        let (mut limiter, seen, mut client) = connected_and_charged_to(&source).await;
        let data = frame(frame_type::DATA, 0, &[0; 250]).repeat(40);
        // `:path: /ab` as a literal with indexing.
        let head = frame(frame_type::HEADERS, END_HEADERS, &[0x44, 3, b'/', b'a', b'b']);
        let bytes = [data, head].concat();
        for steps in [0, 1, 2] {
            client.write_all(&bytes).await.unwrap();
            read(&mut limiter, bytes.len()).await.unwrap();
            assert_eq!(budget.used_for(MemoryKind::Connections), steps * (16 << 10));
        }
        let _full = source.charge(MemoryKind::Streams, 64 << 20);
        client.write_all(&bytes.repeat(2)).await.unwrap();
        read(&mut limiter, bytes.len() * 2).await.unwrap_err();
        assert_eq!(seen.violation(), Some(LimitedFrame::HeaderBlock));
    }

    #[tokio::test(start_paused = true)]
    async fn a_header_block_that_stays_open_is_closed_with_goaway_however_it_is_sent() {
        let first = frame(frame_type::HEADERS, 0, &[1; 20]);
        let more = frame(frame_type::CONTINUATION, 0, &[1]).repeat(100);
        let cut = frame(frame_type::HEADERS, END_HEADERS, &[1; 200]);
        for bytes in [[first.clone(), more].concat(), cut[..150].to_vec(), first] {
            let (mut limiter, seen, mut client) = connected().await;
            let start = clock::now();
            // The first bytes at once, the others one a second.
            let (head, rest) = bytes.split_at(29);
            client.write_all(head).await.unwrap();
            let mut buffer = [0; 1];
            let drip = async {
                for byte in rest {
                    client.write_all(&[*byte]).await.unwrap();
                    sleep(Duration::from_secs(1)).await;
                }
                std::future::pending::<()>().await;
            };
            let error = tokio::select! {
                error = async {
                    loop {
                        if let Err(error) = limiter.read_exact(&mut buffer).await {
                            return error;
                        }
                    }
                } => error,
                () = drip => unreachable!("pending"),
            };
            assert_eq!(
                error.to_string(),
                "header block not complete in time, or no memory for its fields"
            );
            assert_eq!(clock::elapsed(start).as_secs(), 10);
            assert_eq!(seen.violation(), Some(LimitedFrame::HeaderBlock));
            let mut goaway = [0; 17];
            client.read_exact(&mut goaway).await.unwrap();
            assert_eq!(goaway[..], enhance_your_calm(1));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_between_header_blocks_may_be_idle() {
        let (mut limiter, seen, mut client) = connected().await;
        let blocks = [
            frame(frame_type::HEADERS, 0, &[1]),
            frame(frame_type::CONTINUATION, END_HEADERS, &[1]),
            frame(frame_type::HEADERS, END_HEADERS, &[1]),
        ]
        .concat();
        for bytes in [&blocks[..5], &blocks[5..15], &blocks[15..]] {
            client.write_all(bytes).await.unwrap();
            read(&mut limiter, bytes.len()).await.unwrap();
            let idle = tokio::time::timeout(Duration::from_secs(9), limiter.read_u8()).await;
            assert!(idle.is_err(), "it waits");
        }
        let idle = tokio::time::timeout(Duration::from_secs(100), limiter.read_u8()).await;
        assert!(idle.is_err(), "it waits");
        assert_eq!(seen.violation(), None);
    }

    #[tokio::test(start_paused = true)]
    async fn reading_yields_after_a_turn_of_frames_or_of_bytes() {
        let acknowledgement = frame(frame_type::PING, ACK, &[0; 8]);
        let mut data = frame(frame_type::DATA, 0, &[1; 16_000]);
        data[..3].copy_from_slice(&16_000_u32.to_be_bytes()[1..]);
        for (sent, turn) in [
            (acknowledgement.repeat(CLIENT_TURN.frames * 3), CLIENT_TURN.frames * 17),
            (data.repeat(8), CLIENT_TURN.bytes),
        ] {
            let (mut limiter, _violation, mut client) = connected().await;
            client.write_all(&sent).await.unwrap();
            let (mut yields, mut left) = (0, sent.len());
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
            assert_eq!(yields, (sent.len() - 1) / turn, "one after each full turn but the last");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn end_of_the_stream_is_read_in_a_poll_of_its_own() {
        let (mut limiter, seen, mut client) = connected().await;
        client.write_all(&frame(frame_type::DATA, END_STREAM, &[])).await.unwrap();
        drop(client);
        let mut polls = Vec::new();
        std::future::poll_fn(|cx| {
            let mut buffer = [0; 100];
            let mut buf = ReadBuf::new(&mut buffer);
            let result = Pin::new(&mut limiter).poll_read(cx, &mut buf);
            polls.push((result.is_ready(), buf.filled().len(), seen.have_ended()));
            match result {
                Poll::Ready(_) if polls.len() == 1 => cx.waker().wake_by_ref(),
                Poll::Ready(_) => return Poll::Ready(()),
                Poll::Pending => {}
            }
            Poll::Pending
        })
        .await;
        assert_eq!(polls, [(true, 9, false), (false, 0, false), (true, 0, true)]);
    }
}

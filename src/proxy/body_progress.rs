//! Resets an HTTP/2 stream whose client stopped reading the response, or reads it too slowly.
//!
//! A client that reads from its socket but grants no window to one stream does not trigger
//! [`super::client_stream::StallTimeout`]. hyper then no longer polls the response body, and the body keeps
//! its upstream stream, even while the upstream connection drains.
//!
//! hyper holds one piece of a body until the stream has window, and then hands it to h2. [`TrackedData`] sees
//! how much of it is sent. A stream is reset
//!
//! * if the client has not taken a piece within the stall timeout,
//! * if more than 256 KiB wait for the client on all streams of its connection, and the client has taken less
//!   than 4 KiB a second of this one for the stall timeout,
//! * if memory is short for the client ([`Level::High`]), and the client has taken less than 4 KiB a second for
//!   two seconds.
//!
//! The other streams of the connection are not affected.

use std::cell::{Cell, RefCell};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use bytes::{Buf, Bytes};
use http_body::{Body, Frame, SizeHint};
use jackstay_core::admission::{Level, Refusal};
use jackstay_core::credential_class::ClientRank;
use jackstay_sys::clock;
use tokio::time::{Sleep, sleep_until};

use super::admission::client_memory::StreamMemory;
use super::admission::connection_slots::OpenRequest;
use super::admission::response_reserve::{MAX_PIECE, ResponseReserve};
use super::compact::unpinned;

/// How often the rate of a client that does not take everything at once is checked.
const CHECK_INTERVAL: Duration = Duration::from_secs(2);
/// Bytes of a response that may wait for an identity's client, or for another one that has taken [`MUCH`], before the
/// body returns more. The worker then runs the tasks of body and connection half as often as with [`MAX_PIECE`]: 0.95
/// instead of 1.09 CPU-seconds per GB.
const MAX_UNTAKEN: usize = 2 * MAX_PIECE;
/// Bytes that a client has taken of a response when it is known to read it.
const MUCH: u64 = 1 << 20;
/// Bytes of memory that a piece takes besides its data while it waits: its frame in the queue of h2, and its handle.
const PIECE_COST: usize = 256;
/// Bytes a second below which a client is too slow.
const MIN_RATE: u64 = 4 << 10;

/// The progress of one response, shared by its body, its pieces and its stream.
#[derive(Debug)]
pub struct BodyProgress {
    /// Counts the request as long as the stream is open.
    _request: OpenRequest,
    /// Pieces that the body has returned.
    pieces: Cell<u64>,
    /// Whether the last piece waits for window, because hyper has not polled since.
    waiting: Cell<bool>,
    /// Bytes that are sent.
    taken: Cell<u64>,
    /// Bytes of pieces that are not sent, with [`PIECE_COST`] for each.
    unread: Cell<usize>,
    /// The stream's task, if it waits until less is unread.
    body: RefCell<Option<Waker>>,
    memory: StreamMemory,
}

impl BodyProgress {
    /// The progress of the response to a request whose memory is charged in `memory`.
    pub fn new(memory: StreamMemory, request: OpenRequest) -> Rc<Self> {
        Rc::new(Self {
            _request: request,
            pieces: Cell::new(0),
            waiting: Cell::new(false),
            taken: Cell::new(0),
            unread: Cell::new(0),
            body: RefCell::default(),
            memory,
        })
    }

    /// The memory of the request and its response.
    pub fn memory(&self) -> &StreamMemory {
        &self.memory
    }

    fn returned(&self, bytes: usize) {
        self.pieces.set(self.pieces.get() + 1);
        self.unread.set(self.unread.get() + bytes);
        self.memory.add_waiting(bytes);
    }

    fn took(&self, bytes: usize) {
        self.taken.set(self.taken.get() + bytes as u64);
        self.dropped(bytes);
    }

    fn dropped(&self, bytes: usize) {
        self.unread.set(self.unread.get() - bytes);
        self.memory.remove_waiting(bytes);
        if self.unread.get() < MAX_PIECE
            && let Some(waker) = self.body.take()
        {
            waker.wake();
        }
    }

    /// Whether the client must take bytes before the body returns more. When memory is short for another client than
    /// an identity's, it gets one piece after the other.
    fn is_full(&self) -> bool {
        let (unread, connection) = (self.unread.get(), self.memory.connection());
        if unread == 0 {
            return false;
        }
        let limit = match (connection.rank(), connection.level()) {
            (ClientRank::Identity, _) => MAX_UNTAKEN,
            (_, Level::Free) if self.taken.get() >= MUCH => MAX_UNTAKEN,
            (_, Level::Free | Level::Half) => MAX_PIECE,
            (_, Level::High | Level::Critical) => 1,
        };
        unread >= limit
    }
}

/// A piece of a body. Its bytes are charged until h2 has sent or dropped them.
#[derive(Debug)]
pub struct TrackedData {
    data: Bytes,
    progress: Rc<BodyProgress>,
}

impl Buf for TrackedData {
    fn remaining(&self) -> usize {
        self.data.remaining()
    }

    fn chunk(&self) -> &[u8] {
        self.data.chunk()
    }

    fn advance(&mut self, count: usize) {
        self.data.advance(count);
        self.progress.took(count);
    }
}

impl Drop for TrackedData {
    fn drop(&mut self) {
        self.progress.dropped(self.data.len() + PIECE_COST);
    }
}

/// A body that records its progress.
#[derive(Debug)]
pub struct TrackedBody<B> {
    body: B,
    progress: Rc<BodyProgress>,
}

impl<B> TrackedBody<B> {
    /// Records the progress of `body` in `progress`. While it is not read, the response may hold `reserve`.
    pub fn new(body: B, progress: Rc<BodyProgress>, reserve: ResponseReserve) -> Self {
        progress.memory.set_reserve(reserve);
        Self { body, progress }
    }
}

impl<B: Body<Data = Bytes> + Unpin> Body for TrackedBody<B> {
    type Data = TrackedData;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<TrackedData>, B::Error>>> {
        if self.progress.is_full() {
            self.progress.waiting.set(true);
            self.progress.body.replace(Some(cx.waker().clone()));
            return Poll::Pending;
        }
        let result = Pin::new(&mut self.body).poll_frame(cx);
        let progress = &self.progress;
        progress.waiting.set(matches!(result, Poll::Ready(Some(Ok(_)))));
        result.map_ok(|frame| {
            frame.map_data(|data| {
                let data = unpinned(data);
                progress.returned(data.len() + PIECE_COST);
                TrackedData { data, progress: Rc::clone(progress) }
            })
        })
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// What is known of a client that does not take everything at once.
#[derive(Debug)]
struct Reader {
    /// The piece that waits, and since when.
    piece: u64,
    since: Instant,
    /// The last check, and the bytes taken by then.
    checked: (Instant, u64),
    /// The begin of a period as long as the stall timeout, and the bytes taken by then.
    period: (Instant, u64),
}

/// What to do with a stream whose client does not take everything at once.
#[derive(Debug, PartialEq, Eq)]
enum Verdict {
    /// Check again at this time.
    CheckAt(Instant),
    /// The client has stopped reading, or reads too slowly.
    Stalled,
    /// The client reads too slowly, and memory is short.
    Shed,
}

impl Reader {
    fn new(piece: u64, taken: u64, now: Instant) -> Self {
        Self { piece, since: now, checked: (now, taken), period: (now, taken) }
    }

    /// Whether fewer than [`MIN_RATE`] bytes were taken since `start`.
    fn is_slow((start, taken_then): (Instant, u64), taken: u64, now: Instant) -> bool {
        let millis = (now - start).as_millis() as u64;
        (taken - taken_then) * 1_000 < MIN_RATE * millis
    }

    /// Judges a client that has taken so much, while this piece waits for it. `has_much_unread` says whether much waits
    /// on its connection, `is_short` whether memory is short for it.
    fn check(
        &mut self,
        (piece, taken): (u64, u64),
        limit: Duration,
        (has_much_unread, is_short): (bool, impl Fn() -> bool),
        now: Instant,
    ) -> Verdict {
        if piece != self.piece {
            (self.piece, self.since) = (piece, now);
        }
        if now >= self.since + limit {
            return Verdict::Stalled;
        }
        let interval = CHECK_INTERVAL.min(limit);
        if now >= self.checked.0 + interval {
            if Self::is_slow(self.checked, taken, now) && is_short() {
                return Verdict::Shed;
            }
            self.checked = (now, taken);
            if now >= self.period.0 + limit {
                if has_much_unread && Self::is_slow(self.period, taken, now) {
                    return Verdict::Stalled;
                }
                self.period = (now, taken);
            }
        }
        Verdict::CheckAt((self.checked.0 + interval).min(self.since + limit))
    }
}

/// The task that serves one stream. It ends when the stream is done, or when the client reads too little;
/// dropping the inner future then resets the stream.
pub struct StallBoundStream {
    serving: Pin<Box<dyn Future<Output = ()>>>,
    progress: Rc<BodyProgress>,
    limit: Duration,
    /// Set while a piece waits.
    reader: Option<(Reader, Pin<Box<Sleep>>)>,
}

impl StallBoundStream {
    /// Limits `serving`, whose progress is recorded in `progress`.
    pub fn new(
        serving: impl Future<Output = ()> + 'static,
        progress: Rc<BodyProgress>,
        limit: Duration,
    ) -> Self {
        Self { serving: Box::pin(serving), progress, limit, reader: None }
    }
}

impl Future for StallBoundStream {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let Self { serving, progress, limit, reader } = self.get_mut();
        if serving.as_mut().poll(cx).is_ready() {
            return Poll::Ready(());
        }
        if !progress.waiting.get() {
            *reader = None;
            return Poll::Pending;
        }
        let (piece, taken) = (progress.pieces.get(), progress.taken.get());
        let (reader, timer) = reader.get_or_insert_with(|| {
            let now = clock::now();
            (Reader::new(piece, taken, now), Box::pin(sleep_until(now.into())))
        });
        let connection = progress.memory.connection();
        loop {
            let is_short = || connection.level() >= Level::High;
            let pressure = (connection.has_much_unread(), is_short);
            match reader.check((piece, taken), *limit, pressure, clock::now()) {
                Verdict::CheckAt(at) if at != timer.deadline().into_std() => {
                    timer.as_mut().reset(at.into());
                }
                Verdict::CheckAt(_) => {}
                Verdict::Stalled => return Poll::Ready(()),
                Verdict::Shed => {
                    connection.count(Refusal::StalledReader);
                    return Poll::Ready(());
                }
            }
            if timer.as_mut().poll(cx).is_pending() {
                return Poll::Pending;
            }
        }
    }
}

#[cfg(test)]
#[path = "body_progress_tests.rs"]
mod tests;

//! Sends a request's body upstream, and holds it until the response, so that the request can be sent
//! again.
//!
//! The held bytes are limited per request and per process. A body that exceeds a limit is still streamed,
//! but cannot be sent a second time. Small pieces are copied ([`super::compact`]), so that what is held is what is charged.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use h2::{Reason, SendStream};
use http::{HeaderMap, Version};
use http_body::Body as _;
use hyper::body::Incoming;
use jackstay_core::admission::{ByteAccount, ByteBudget, MemoryKind};
use jackstay_core::request::hygiene::upstream_trailers;
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::compact::{Compactor, unpinned};

/// Maximum bytes held of one body.
const MAX_HELD: usize = 3 << 20;
/// Maximum memory of one held body: [`MAX_HELD`] in pieces that keep the buffers that they were read into.
const MAX_CHARGED: usize = 2 * MAX_HELD + (256 << 10);
/// Maximum bytes held of all bodies in the process.
const MAX_HELD_TOTAL: usize = 32 << 20;

/// How much of a body is discarded after its request was answered. The same as `maxPostHandlerReadBytes` of Go's
/// `net/http`, the server of kube-apiserver.
const MAX_DISCARDED: usize = 256 << 10;
/// How long the rest of a body may take whose upload has ended.
const MAX_REST_TIME: Duration = Duration::from_secs(1);

/// Bytes that a held piece costs besides the memory of its data: its handle, in a vector that doubles when it is full.
const PIECE_COST: usize = 2 * size_of::<Bytes>();

/// The budget that the bodies of all workers share.
pub fn budget() -> Arc<ByteBudget> {
    ByteBudget::new(MemoryKind::HeldBodies, MAX_HELD_TOTAL)
}

/// The task that sends a request's body. Dropping it ends the task.
pub struct UploadTask {
    task: JoinHandle<()>,
    /// Tells the task that the request is answered.
    answered: Rc<Notify>,
    is_answered: bool,
}

impl UploadTask {
    /// The request is answered, and not sent again: when this is dropped, the rest of the body is discarded. Returns `None`
    /// if the upload has ended.
    pub fn answered(mut self) -> Option<Self> {
        self.is_answered = true;
        Some(self).filter(|upload| !upload.task.is_finished())
    }
}

impl Drop for UploadTask {
    fn drop(&mut self) {
        if self.is_answered {
            self.answered.notify_one();
        } else {
            self.task.abort();
        }
    }
}

/// The held part of one body.
struct HeldBody {
    pieces: RefCell<Vec<Bytes>>,
    compactor: RefCell<Compactor>,
    is_http2: bool,
    /// Bytes of the body in `pieces`.
    length: Cell<usize>,
    /// Bytes of memory.
    charged: Cell<usize>,
    /// Whether `pieces` contains everything read so far, and the next piece will be held too.
    whole: Cell<bool>,
    account: ByteAccount,
}

impl HeldBody {
    fn new(is_http2: bool, account: ByteAccount) -> Self {
        Self {
            pieces: RefCell::default(),
            compactor: RefCell::default(),
            is_http2,
            length: Cell::new(0),
            charged: Cell::new(0),
            whole: Cell::new(true),
            account,
        }
    }

    /// Holds the next piece, and returns it as it is held. Beyond the limits it holds neither this piece nor a later one,
    /// and returns a piece that keeps no large buffer either.
    fn push(&self, data: Bytes) -> Bytes {
        if !self.whole.get() {
            return unpinned(data);
        }
        let mut compactor = self.compactor.borrow_mut();
        let cost = compactor.cost(&data, self.is_http2) + PIECE_COST;
        let (length, charged) = (self.length.get() + data.len(), self.charged.get() + cost);
        let fits = self.account.take(cost);
        self.charged.set(charged);
        if length > MAX_HELD || charged > MAX_CHARGED || !fits {
            self.whole.set(false);
            return unpinned(data);
        }
        self.length.set(length);
        let piece = compactor.hold(&data, self.is_http2);
        self.pieces.borrow_mut().push(piece.clone());
        piece
    }

    fn clear(&self) {
        // The vector keeps no capacity.
        self.pieces.take();
        self.compactor.take();
        self.length.set(0);
        let charged = self.charged.replace(0);
        if charged > 0 {
            self.account.release(charged);
        }
    }
}

impl Drop for HeldBody {
    fn drop(&mut self) {
        self.clear();
    }
}

/// A request's body.
pub struct RequestBody {
    incoming: RefCell<Incoming>,
    version: Version,
    held: HeldBody,
    end: RefCell<Option<End>>,
}

/// How the client ended the body.
#[derive(Debug, Clone)]
enum End {
    /// The body is complete, with its trailers, if any.
    Done(Option<HeaderMap>),
    /// The body is malformed, its trailers are too large, or the client left before its end.
    Aborted,
}

impl RequestBody {
    /// The body of a request that was received with this version of HTTP. Held bytes count in `account`.
    pub fn new(incoming: Incoming, version: Version, account: ByteAccount) -> Rc<Self> {
        Rc::new(Self {
            incoming: RefCell::new(incoming),
            version,
            held: HeldBody::new(version == Version::HTTP_2, account),
            end: RefCell::default(),
        })
    }

    /// Whether the body can be sent again from its beginning.
    pub fn is_held(&self) -> bool {
        self.held.whole.get() && !self.is_aborted()
    }

    /// Whether the body is malformed or ended early.
    pub fn is_aborted(&self) -> bool {
        matches!(*self.end.borrow(), Some(End::Aborted))
    }

    /// Whether the whole body has arrived and is held, so that parallel attempts can send it.
    pub fn is_complete(&self) -> bool {
        self.held.whole.get() && matches!(*self.end.borrow(), Some(End::Done(_)))
    }

    /// Reads and holds the rest of a body whose upload has ended, up to `max_bytes` in all and for at most a second.
    pub async fn read_rest(&self, max_bytes: usize) {
        let may_read = || self.is_held() && self.held.length.get() <= max_bytes;
        if may_read() {
            self.read_on(|_| may_read()).await;
        }
    }

    /// Reads further pieces from the client, until `goes_on` is false for the length of one, or [`MAX_REST_TIME`] is over.
    async fn read_on(&self, mut goes_on: impl FnMut(usize) -> bool) {
        let rest = async {
            // No piece has this index, so the next one comes from the client.
            while let Ok(data) = poll_fn(|cx| self.poll_piece(usize::MAX, cx)).await {
                if !goes_on(data.len()) {
                    break;
                }
            }
        };
        let _ = timeout(MAX_REST_TIME, rest).await;
    }

    /// The whole body, if it has arrived and is held.
    pub fn whole(&self) -> Option<Bytes> {
        self.is_complete().then(|| self.held.pieces.borrow().concat().into())
    }

    /// Stops holding further pieces, because the request will not be sent again. Pieces that are already
    /// held stay until the current upload has sent them.
    pub fn stop_holding(&self) {
        self.held.whole.set(false);
    }

    /// Releases what is held, unless the request may be sent again.
    fn release(&self) {
        if !self.held.whole.get() {
            self.held.clear();
        }
    }

    /// Whether the client has not sent the whole body of an HTTP/1.1 request. If it is dropped then, hyper closes the
    /// connection after the response, which does not say so, and the client's next request fails.
    fn needs_reading(&self) -> bool {
        self.version != Version::HTTP_2 && self.end.borrow().is_none()
    }

    /// Reads the rest of the body of a request that was answered before its end, if the connection depends on it.
    pub async fn discard_rest(self: Rc<Self>) {
        if !self.needs_reading() {
            return;
        }
        self.stop_holding();
        let mut discarded = 0;
        self.read_on(|len| {
            discarded += len;
            discarded <= MAX_DISCARDED
        })
        .await;
    }

    /// Sends the body from its beginning on `stream`, in a separate task.
    pub fn send(self: &Rc<Self>, stream: SendStream<Bytes>) -> UploadTask {
        let answered = Rc::new(Notify::new());
        let (body, is_answered) = (Rc::clone(self), Rc::clone(&answered));
        let task = tokio::task::spawn_local(async move {
            tokio::select! {
                biased;
                () = is_answered.notified() => {}
                () = send(&body, stream) => {
                    body.release();
                    if !body.needs_reading() {
                        return;
                    }
                    is_answered.notified().await;
                }
            }
            body.discard_rest().await;
        });
        UploadTask { task, answered, is_answered: false }
    }

    /// The piece at `index`: a held one, or else the next one from the client.
    fn poll_piece(&self, index: usize, cx: &mut Context<'_>) -> Poll<Result<Bytes, End>> {
        if let Some(data) = self.held.pieces.borrow().get(index) {
            return Poll::Ready(Ok(data.clone()));
        }
        self.release();
        if let Some(end) = self.end.borrow().as_ref() {
            return Poll::Ready(Err(end.clone()));
        }
        let mut incoming = self.incoming.borrow_mut();
        loop {
            let end = match ready!(Pin::new(&mut *incoming).poll_frame(cx)) {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) if data.is_empty() => continue,
                    Ok(data) => return Poll::Ready(Ok(self.held.push(data))),
                    Err(frame) => match frame.into_trailers().map(upstream_trailers) {
                        Ok(None) => End::Aborted,
                        trailers => End::Done(trailers.ok().flatten()),
                    },
                },
                Some(Err(_)) => End::Aborted,
                // On HTTP/2, hyper reports a reset with NO_ERROR as an end, but the body is complete only
                // after END_STREAM. On HTTP/1.1, hyper reports truncation as an error, and `is_end_stream`
                // is never true after a chunked body. A dropped connection ends the body without an
                // error, but drops the request, and with it this task, at the same moment.
                None if self.version == Version::HTTP_2 && !incoming.is_end_stream() => {
                    End::Aborted
                }
                None => End::Done(None),
            };
            *self.end.borrow_mut() = Some(end.clone());
            return Poll::Ready(Err(end));
        }
    }
}

async fn send(body: &RequestBody, mut stream: SendStream<Bytes>) {
    let mut index = 0;
    loop {
        let piece = poll_fn(|cx| {
            // The apiserver may respond and reset the stream before it has read the whole body.
            if stream.poll_reset(cx).is_ready() {
                return Poll::Ready(None);
            }
            body.poll_piece(index, cx).map(Some)
        })
        .await;
        let sent_end = match piece {
            None => return,
            Some(Ok(data)) => {
                index += 1;
                if send_piece(&mut stream, data).await.is_err() {
                    // The attempt that waits for the response gets the error of the stream.
                    return;
                }
                continue;
            }
            Some(Err(End::Done(None))) => stream.send_data(Bytes::new(), true),
            Some(Err(End::Done(Some(trailers)))) => stream.send_trailers(trailers),
            Some(Err(End::Aborted)) => Err(Reason::CANCEL.into()),
        };
        if sent_end.is_err() {
            // Without an end or a reset the stream would stay open forever.
            stream.send_reset(Reason::CANCEL);
        }
        return;
    }
}

/// Sends one piece when the stream has window. Window is reserved only when there is data, because the
/// other streams of the connection cannot use reserved window.
async fn send_piece(stream: &mut SendStream<Bytes>, mut data: Bytes) -> Result<(), h2::Error> {
    while !data.is_empty() {
        stream.reserve_capacity(data.len());
        let granted = poll_fn(|cx| match stream.poll_capacity(cx) {
            Poll::Ready(Some(Ok(0))) => Poll::Pending,
            other => other,
        })
        .await;
        match granted {
            Some(Ok(window)) => stream.send_data(data.split_to(window.min(data.len())), false)?,
            Some(Err(error)) => return Err(error),
            None => return Err(Reason::CANCEL.into()),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use jackstay_core::admission::{DEFAULT_LIMIT, MemoryBudget};
    use jackstay_core::credential_class::ClientRank;

    static PIECE: Bytes = Bytes::from_static(&[0; 64 * 1024]);

    /// Pushes pieces until a limit is reached, and returns the number of held pieces.
    fn fill(body: &HeldBody) -> usize {
        while body.whole.get() {
            body.push(PIECE.clone());
        }
        body.pieces.borrow().len()
    }

    #[test]
    fn held_body_stops_at_its_own_and_the_shared_limit() {
        let (account, budget) = (MemoryBudget::new(DEFAULT_LIMIT), budget());
        let charged = || account.used_for(MemoryKind::HeldBodies);
        let memory = account.source(1);
        let held_body = || HeldBody::new(true, budget.account(&memory, ClientRank::Identity));
        let single = held_body();
        assert_eq!(fill(&single), 48, "3 MiB");
        single.clear();
        assert_eq!(charged(), 0);
        // Bodies just below their own limit nearly use up the shared budget.
        let bodies: Vec<_> = (0..11)
            .map(|_| {
                let body = held_body();
                (0..46).for_each(|_| drop(body.push(PIECE.clone())));
                assert!(body.whole.get());
                body
            })
            .collect();
        let last = held_body();
        assert_eq!(fill(&last), 5, "the remainder of 32 MiB");
        assert_eq!(charged(), budget.held());
        drop(last);
        drop(bodies);
        assert_eq!((charged(), budget.held()), (0, 0));
        assert_eq!(fill(&single), 0, "a body that has exceeded its limit is never held again");
        assert_eq!(fill(&held_body()), 48);
    }

    #[test]
    fn held_pieces_keep_their_order_and_bytes_in_any_size() {
        let budget = budget();
        let memory = MemoryBudget::new(DEFAULT_LIMIT).source(1);
        let text: Vec<u8> = (0..200_000_u32).map(|n| (n % 251) as u8).collect();
        for is_http2 in [true, false] {
            let body = HeldBody::new(is_http2, budget.account(&memory, ClientRank::Identity));
            let (mut rest, mut sent) = (Bytes::copy_from_slice(&text), Vec::new());
            for size in [1, 100, 8_191, 8_192, 1, 1, 16_384, 70_000, 3, usize::MAX] {
                let piece = rest.split_to(size.min(rest.len()));
                sent.extend_from_slice(&body.push(piece));
            }
            assert_eq!(sent, text);
            assert_eq!(body.pieces.borrow().concat(), text);
        }
    }

    #[test]
    fn charge_of_small_pieces_covers_their_buffers_and_handles() {
        let budget = budget();
        let memory = MemoryBudget::new(DEFAULT_LIMIT).source(1);
        let body = HeldBody::new(true, budget.account(&memory, ClientRank::Identity));
        let buffer = Bytes::from(vec![7; 1 << 20]);
        for at in 0..10_000 {
            let piece = body.push(buffer.slice(at..=at));
            assert_ne!(piece.as_ptr(), buffer.slice(at..).as_ptr(), "not copied");
        }
        let handles = body.pieces.borrow().capacity() * size_of::<Bytes>();
        let charged = budget.held();
        assert!(charged >= 10_000 + handles, "{charged} for 10,000 bytes and handles of {handles}");
        assert!(charged <= 10_000 * (PIECE_COST + 3), "{charged}");
        drop(body);
        assert_eq!(budget.held(), 0);
    }

    #[test]
    fn piece_beyond_the_limit_keeps_no_large_buffer() {
        let budget = budget();
        let memory = MemoryBudget::new(DEFAULT_LIMIT).source(1);
        let body = HeldBody::new(true, budget.account(&memory, ClientRank::Identity));
        fill(&body);
        let piece = PIECE.slice(..1);
        assert_ne!(body.push(piece.clone()).as_ptr(), piece.as_ptr());
    }
}

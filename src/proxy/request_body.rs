//! Sends a request's body upstream, and holds it until the response, so that the request can be sent
//! again.
//!
//! The held bytes are limited per request and per process. A body that exceeds a limit is still streamed,
//! but cannot be sent a second time.

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

/// Maximum bytes held of one body.
const MAX_HELD: usize = 3 << 20;
/// Maximum bytes held of all bodies in the process.
const MAX_HELD_TOTAL: usize = 32 << 20;

/// How much of a body is discarded after its request was answered. The same as `maxPostHandlerReadBytes` of Go's
/// `net/http`, the server of kube-apiserver.
const MAX_DISCARDED: usize = 256 << 10;
/// How long the rest of such a body may take.
const MAX_DISCARD_TIME: Duration = Duration::from_secs(1);

/// Bytes that a held piece costs in addition to its data: its handle and its share of a read buffer.
const PIECE_COST: usize = 64;

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
    bytes: Cell<usize>,
    /// Whether `pieces` contains everything read so far, and the next piece will be held too.
    whole: Cell<bool>,
    account: ByteAccount,
}

impl HeldBody {
    fn new(account: ByteAccount) -> Self {
        Self { pieces: RefCell::default(), bytes: Cell::new(0), whole: Cell::new(true), account }
    }

    /// Holds the next piece. Beyond the limits it holds neither this piece nor a later one.
    fn push(&self, data: &Bytes) {
        if !self.whole.get() {
            return;
        }
        let cost = data.len() + PIECE_COST;
        let bytes = self.bytes.get() + cost;
        let fits = self.account.take(cost);
        self.bytes.set(bytes);
        if bytes > MAX_HELD || !fits {
            self.whole.set(false);
        } else {
            self.pieces.borrow_mut().push(data.clone());
        }
    }

    fn clear(&self) {
        self.pieces.borrow_mut().clear();
        let bytes = self.bytes.replace(0);
        if bytes > 0 {
            self.account.release(bytes);
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
            held: HeldBody::new(account),
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
        let rest = async {
            let mut discarded = 0;
            // No piece has this index, so the next one comes from the client.
            while let Ok(data) = poll_fn(|cx| self.poll_piece(usize::MAX, cx)).await {
                discarded += data.len();
                if discarded > MAX_DISCARDED {
                    break;
                }
            }
        };
        let _ = timeout(MAX_DISCARD_TIME, rest).await;
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
                    Ok(data) => {
                        self.held.push(&data);
                        return Poll::Ready(Ok(data));
                    }
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
            body.push(&PIECE);
        }
        body.pieces.borrow().len()
    }

    #[test]
    fn held_body_stops_at_its_own_and_the_shared_limit() {
        let (account, budget) = (MemoryBudget::new(DEFAULT_LIMIT), budget());
        let charged = || account.used_for(MemoryKind::HeldBodies);
        let memory = account.source(1);
        let held_body = || HeldBody::new(budget.account(&memory, ClientRank::Identity));
        let single = held_body();
        assert_eq!(fill(&single), 47, "3 MiB, including the cost of each piece");
        single.clear();
        assert_eq!(charged(), 0);
        // Bodies just below their own limit nearly use up the shared budget.
        let bodies: Vec<_> = (0..11)
            .map(|_| {
                let body = held_body();
                (0..46).for_each(|_| body.push(&PIECE));
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
        assert_eq!(fill(&held_body()), 47);
    }
}

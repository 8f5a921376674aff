//! Sends a request's body upstream, and holds it until the response, so that the request can be sent
//! again.
//!
//! The held bytes are limited per request and per process. A body beyond the limit is streamed too, but
//! cannot be sent a second time.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use h2::{Reason, SendStream};
use http::{HeaderMap, Version};
use http_body::Body as _;
use hyper::body::Incoming;
use tokio::task::JoinHandle;

use super::hygiene::is_hop_by_hop;
use crate::observe::{ByteBudget, Metrics};

/// Most bytes held of one body.
const HOLD_MAX: usize = 3 << 20;
/// Most bytes held of all bodies together.
const HOLD_TOTAL: usize = 32 << 20;

/// What a held piece costs beside its bytes: its handle and its share of a read buffer.
const PIECE_COST: usize = 64;

/// The budget that the bodies of all workers share.
pub fn budget(metrics: &Metrics) -> Arc<ByteBudget> {
    ByteBudget::new(HOLD_TOTAL, metrics.held_body_bytes())
}

/// The task that sends a request's body. Dropping it aborts the task.
pub struct UploadTask(JoinHandle<()>);

impl Drop for UploadTask {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// The held part of one body.
struct HeldBody {
    pieces: RefCell<Vec<Bytes>>,
    bytes: Cell<usize>,
    /// Whether it contains all that was read so far.
    whole: Cell<bool>,
    budget: Arc<ByteBudget>,
}

impl HeldBody {
    fn new(budget: &Arc<ByteBudget>) -> Self {
        Self {
            pieces: RefCell::default(),
            bytes: Cell::new(0),
            whole: Cell::new(true),
            budget: Arc::clone(budget),
        }
    }

    /// Holds the next piece. Beyond the limits it holds neither this piece nor a later one.
    fn push(&self, data: &Bytes) {
        if !self.whole.get() {
            return;
        }
        let cost = data.len() + PIECE_COST;
        let bytes = self.bytes.get() + cost;
        let fits = self.budget.take(cost);
        self.bytes.set(bytes);
        if bytes > HOLD_MAX || !fits {
            self.whole.set(false);
        } else {
            self.pieces.borrow_mut().push(data.clone());
        }
    }

    fn clear(&self) {
        self.pieces.borrow_mut().clear();
        let bytes = self.bytes.replace(0);
        if bytes > 0 {
            self.budget.release(bytes);
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
    Done(Option<HeaderMap>),
    /// The client broke off.
    Broken,
}

impl RequestBody {
    /// The body of a request of this version of HTTP; held bytes count in `budget`.
    pub fn new(incoming: Incoming, version: Version, budget: &Arc<ByteBudget>) -> Rc<Self> {
        Rc::new(Self {
            incoming: RefCell::new(incoming),
            version,
            held: HeldBody::new(budget),
            end: RefCell::default(),
        })
    }

    /// Whether the body can be sent again from its beginning.
    pub fn is_held(&self) -> bool {
        self.held.whole.get() && !self.is_broken()
    }

    /// Whether the client broke off.
    pub fn is_broken(&self) -> bool {
        matches!(*self.end.borrow(), Some(End::Broken))
    }

    /// Whether the body has arrived completely and is held, so that two attempts can send it side by side.
    pub fn is_complete(&self) -> bool {
        self.held.whole.get() && matches!(*self.end.borrow(), Some(End::Done(_)))
    }

    /// Holds no further pieces: the request will not be sent again. Held pieces stay until they have been
    /// sent, because another attempt may still be sending them.
    pub fn stop_holding(&self) {
        self.held.whole.set(false);
    }

    /// Sends the body from its beginning on `stream`, in a task of its own.
    pub fn send(self: &Rc<Self>, stream: SendStream<Bytes>) -> UploadTask {
        UploadTask(tokio::task::spawn_local(send(Rc::clone(self), stream)))
    }

    /// The piece at `index`: a held one, or else the next one from the client.
    fn poll_piece(&self, index: usize, cx: &mut Context<'_>) -> Poll<Result<Bytes, End>> {
        if let Some(data) = self.held.pieces.borrow().get(index) {
            return Poll::Ready(Ok(data.clone()));
        }
        if !self.held.whole.get() {
            self.held.clear();
        }
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
                    Err(frame) => End::Done(frame.into_trailers().ok().map(clean_trailers)),
                },
                Some(Err(_)) => End::Broken,
                // On HTTP/2, hyper turns a reset with NO_ERROR into an end; only END_STREAM is a real
                // one. On HTTP/1.1, hyper reports truncation as an error, and `is_end_stream` is never
                // true after a chunked body. A dropped connection ends the body without an error, but
                // drops the request, and with it this task, at the same moment.
                None if self.version == Version::HTTP_2 && !incoming.is_end_stream() => End::Broken,
                None => End::Done(None),
            };
            *self.end.borrow_mut() = Some(end.clone());
            return Poll::Ready(Err(end));
        }
    }
}

async fn send(body: Rc<RequestBody>, mut stream: SendStream<Bytes>) {
    let mut index = 0;
    loop {
        let piece = poll_fn(|cx| {
            // The apiserver may answer and reset before it has read everything.
            if stream.poll_reset(cx).is_ready() {
                return Poll::Ready(None);
            }
            body.poll_piece(index, cx).map(Some)
        })
        .await;
        let ended = match piece {
            None => return,
            Some(Ok(data)) => {
                index += 1;
                if send_piece(&mut stream, data).await.is_err() {
                    // The stream is gone, as the attempt that waits for its response sees.
                    return;
                }
                continue;
            }
            Some(Err(End::Done(None))) => stream.send_data(Bytes::new(), true),
            Some(Err(End::Done(Some(trailers)))) => stream.send_trailers(trailers),
            Some(Err(End::Broken)) => Err(Reason::CANCEL.into()),
        };
        if ended.is_err() {
            // Without an end or a reset the stream would stay open forever.
            stream.send_reset(Reason::CANCEL);
        }
        return;
    }
}

/// Sends one piece as the apiserver opens window. Window is reserved only when there is data, because
/// the other streams of the connection cannot use reserved window.
async fn send_piece(stream: &mut SendStream<Bytes>, mut data: Bytes) -> Result<(), h2::Error> {
    while !data.is_empty() {
        stream.reserve_capacity(data.len());
        let granted = poll_fn(|cx| match stream.poll_capacity(cx) {
            Poll::Ready(Some(Ok(0))) => Poll::Pending,
            other => other,
        })
        .await;
        match granted {
            Some(Ok(n)) => stream.send_data(data.split_to(n.min(data.len())), false)?,
            Some(Err(error)) => return Err(error),
            None => return Err(Reason::CANCEL.into()),
        }
    }
    Ok(())
}

/// Removes the trailers that must not go upstream: those of the connection, which h2 refuses to send,
/// and those that could change the identity of the caller.
fn clean_trailers(mut trailers: HeaderMap) -> HeaderMap {
    let removed: Vec<_> = trailers
        .keys()
        .filter(|name| {
            let name = name.as_str();
            is_hop_by_hop(name)
                || name == "authorization"
                || name.starts_with("x-remote-")
                || name.starts_with("impersonate-")
        })
        .cloned()
        .collect();
    for name in removed {
        trailers.remove(name);
    }
    trailers
}

#[cfg(test)]
mod tests {
    use super::*;

    static PIECE: Bytes = Bytes::from_static(&[0; 64 * 1024]);

    /// Pushes pieces until a limit is reached; returns how many are held.
    fn fill(body: &HeldBody) -> usize {
        while body.whole.get() {
            body.push(&PIECE);
        }
        body.pieces.borrow().len()
    }

    #[test]
    fn held_body_stops_at_its_own_and_the_shared_limit() {
        let metrics = Metrics::new();
        let all = budget(&metrics);
        let shown = || {
            let page = metrics.render();
            let line = page.lines().find(|line| line.starts_with("jackstay_held_body_bytes "));
            line.expect("it is there").rsplit_once(' ').expect("a value").1.to_owned()
        };
        let one = HeldBody::new(&all);
        assert_eq!(fill(&one), 47, "3 MiB, including the cost of each piece");
        one.clear();
        assert_eq!(shown(), "0");
        // Bodies just below their own limit, until the shared budget is nearly used up.
        let bodies: Vec<_> = (0..11)
            .map(|_| {
                let body = HeldBody::new(&all);
                (0..46).for_each(|_| body.push(&PIECE));
                assert!(body.whole.get());
                body
            })
            .collect();
        let last = HeldBody::new(&all);
        assert_eq!(fill(&last), 5, "the rest of 32 MiB");
        assert_eq!(shown(), all.held().to_string());
        drop(last);
        drop(bodies);
        assert_eq!((shown().as_str(), all.held()), ("0", 0));
        assert_eq!(fill(&one), 0, "a body beyond its limit is never held again");
        assert_eq!(fill(&HeldBody::new(&all)), 47);
    }
}

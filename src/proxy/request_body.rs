//! A request's body on its way upstream, held so that it can be sent again while nothing is known
//! to have processed it.
//!
//! What is held is bounded per request and per process; a body above that is streamed all the
//! same, and then cannot be sent a second time.

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

/// Most bytes of one body that are held.
const HOLD_MAX: usize = 3 << 20;
/// Most bytes of all bodies together that are held.
const HOLD_TOTAL: usize = 32 << 20;

/// What a held piece costs beside its bytes: its handle, and its share of a read buffer.
const PIECE_COST: usize = 64;

/// ByteBudget for what all workers hold together.
pub fn budget(metrics: &Metrics) -> Arc<ByteBudget> {
    ByteBudget::new(HOLD_TOTAL, metrics.held_body_bytes())
}

/// Stops the task that sends a request's body when nobody waits for the answer any more.
pub struct UploadTask(JoinHandle<()>);

impl UploadTask {
    /// Guards a task.
    pub fn new(task: JoinHandle<()>) -> Self {
        Self(task)
    }
}

impl Drop for UploadTask {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// What is held of one body.
struct HeldBody {
    pieces: RefCell<Vec<Bytes>>,
    bytes: Cell<usize>,
    /// Everything read so far is there.
    whole: Cell<bool>,
    room: Arc<ByteBudget>,
}

impl HeldBody {
    fn new(room: &Arc<ByteBudget>) -> Self {
        Self {
            pieces: RefCell::default(),
            bytes: Cell::new(0),
            whole: Cell::new(true),
            room: Arc::clone(room),
        }
    }

    /// Holds the next piece, or from here on none.
    fn push(&self, data: &Bytes) {
        if !self.whole.get() {
            return;
        }
        let cost = data.len() + PIECE_COST;
        let bytes = self.bytes.get() + cost;
        let fits = self.room.take(cost);
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
            self.room.give_back(bytes);
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

/// How the client's body ended.
#[derive(Debug, Clone)]
enum End {
    Done(Option<HeaderMap>),
    /// The client broke it off.
    Broken,
}

impl RequestBody {
    /// Wraps what comes from the client by this version of HTTP; what is held takes of `room`.
    pub fn new(incoming: Incoming, version: Version, room: &Arc<ByteBudget>) -> Rc<Self> {
        Rc::new(Self {
            incoming: RefCell::new(incoming),
            version,
            held: HeldBody::new(room),
            end: RefCell::default(),
        })
    }

    /// Whether it can be sent from its beginning again.
    pub fn is_held(&self) -> bool {
        self.held.whole.get() && !self.is_broken()
    }

    /// Whether the client broke it off.
    pub fn is_broken(&self) -> bool {
        matches!(*self.end.borrow(), Some(End::Broken))
    }

    /// Whether all of it is here and held, so that two attempts can run side by side.
    pub fn is_complete(&self) -> bool {
        self.held.whole.get() && matches!(*self.end.borrow(), Some(End::Done(_)))
    }

    /// Nothing will be sent again: holds nothing more from here on. What is held goes when it has
    /// been sent, for a second attempt may be in the middle of it.
    pub fn forget(&self) {
        self.held.whole.set(false);
    }

    /// Sends it from the beginning on `stream`, in a task of its own.
    pub fn send(self: &Rc<Self>, stream: SendStream<Bytes>) -> UploadTask {
        UploadTask::new(tokio::task::spawn_local(pump(Rc::clone(self), stream)))
    }

    /// The piece at `index`: a held one, or the next from the client.
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
                // On HTTP/2, hyper turns a reset with NO_ERROR into an end; only END_STREAM is one.
                // On HTTP/1.1, hyper reports truncation as an error, and `is_end_stream` is never
                // true after a chunked body. A connection that is dropped ends the body without an
                // error, but drops the request, and with it this upload, at the same moment.
                None if self.version == Version::HTTP_2 && !incoming.is_end_stream() => End::Broken,
                None => End::Done(None),
            };
            *self.end.borrow_mut() = Some(end.clone());
            return Poll::Ready(Err(end));
        }
    }
}

async fn pump(source: Rc<RequestBody>, mut stream: SendStream<Bytes>) {
    let mut index = 0;
    loop {
        let piece = poll_fn(|cx| {
            // The apiserver may answer and reset before it has read everything.
            if stream.poll_reset(cx).is_ready() {
                return Poll::Ready(None);
            }
            source.poll_piece(index, cx).map(Some)
        })
        .await;
        // Errors: the stream is gone, and whoever waits for its answer hears of it there.
        match piece {
            Some(Ok(data)) => {
                index += 1;
                if send_piece(&mut stream, data).await.is_err() {
                    return;
                }
            }
            Some(Err(End::Done(trailers))) => {
                let ended = match trailers {
                    None => stream.send_data(Bytes::new(), true),
                    Some(trailers) => stream.send_trailers(trailers),
                };
                if ended.is_err() {
                    // Neither ended nor reset, the stream would wait for ever.
                    stream.send_reset(Reason::CANCEL);
                }
                return;
            }
            Some(Err(End::Broken)) => {
                stream.send_reset(Reason::CANCEL);
                return;
            }
            None => return,
        }
    }
}

/// Sends one piece as the apiserver gives window for it. Window is reserved only with the data in
/// hand: what is reserved is taken from the other streams of the connection.
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

/// Trailers that a request may carry upstream: none that belongs to the connection (h2 refuses to
/// send those), and none that could change who the caller is.
fn clean_trailers(mut trailers: HeaderMap) -> HeaderMap {
    let bad: Vec<_> = trailers
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
    for name in bad {
        trailers.remove(name);
    }
    trailers
}

#[cfg(test)]
mod tests {
    use super::*;

    static PIECE: Bytes = Bytes::from_static(&[0; 64 * 1024]);

    /// Pushes until nothing more is held; how many pieces are.
    fn fill(body: &HeldBody) -> usize {
        while body.whole.get() {
            body.push(&PIECE);
        }
        body.pieces.borrow().len()
    }

    #[test]
    fn bodies_are_held_up_to_their_bounds() {
        let metrics = Metrics::new();
        let all = budget(&metrics);
        let shown = || {
            let page = metrics.render();
            let line = page.lines().find(|line| line.starts_with("jackstay_held_body_bytes "));
            line.expect("it is there").rsplit_once(' ').expect("a value").1.to_owned()
        };
        let one = HeldBody::new(&all);
        assert_eq!(fill(&one), 47, "3 MiB, and what pieces cost");
        one.clear();
        assert_eq!(shown(), "0");
        // Bodies just below their own bound, until there is no room for another one.
        let bodies: Vec<_> = (0..11)
            .map(|_| {
                let body = HeldBody::new(&all);
                (0..46).for_each(|_| body.push(&PIECE));
                assert!(body.whole.get());
                body
            })
            .collect();
        let last = HeldBody::new(&all);
        assert_eq!(fill(&last), 5, "what is left of 32 MiB");
        assert_eq!(shown(), all.held().to_string());
        drop(last);
        drop(bodies);
        assert_eq!((shown().as_str(), all.held()), ("0", 0));
        assert_eq!(fill(&one), 0, "what was given up stays so");
        assert_eq!(fill(&HeldBody::new(&all)), 47);
    }
}

//! A request's body on its way upstream, held so that it can be sent again while nothing is known
//! to have processed it.
//!
//! What is held is bounded per request and per process; a body above that is streamed all the
//! same, and then cannot be sent a second time.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use h2::{Reason, SendStream};
use http::HeaderMap;
use http_body::Body as _;
use hyper::body::Incoming;
use tokio::task::JoinHandle;

use crate::observe::Metrics;

/// Most bytes of one body that are held.
const HOLD_MAX: usize = 3 << 20;
/// Most bytes of all bodies together that are held.
const HOLD_TOTAL: usize = 32 << 20;

/// What a held piece costs beside its bytes: its handle, and its share of a read buffer.
const PIECE_COST: usize = 64;

static HELD: AtomicUsize = AtomicUsize::new(0);

/// Stops the task that sends a request's body when nobody waits for the answer any more.
pub struct Upload(JoinHandle<()>);

impl Upload {
    /// Guards a task.
    pub fn new(task: JoinHandle<()>) -> Self {
        Self(task)
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// A request's body.
pub struct Source {
    incoming: RefCell<Incoming>,
    held: RefCell<Vec<Bytes>>,
    held_bytes: Cell<usize>,
    /// Everything read so far is in `held`.
    whole: Cell<bool>,
    end: RefCell<Option<End>>,
    metrics: std::sync::Arc<Metrics>,
}

/// How the client's body ended.
#[derive(Debug, Clone)]
enum End {
    Done(Option<HeaderMap>),
    /// The client broke it off.
    Broken,
}

impl Source {
    /// Wraps what comes from the client.
    pub fn new(incoming: Incoming, metrics: &std::sync::Arc<Metrics>) -> Rc<Self> {
        Rc::new(Self {
            incoming: RefCell::new(incoming),
            held: RefCell::default(),
            held_bytes: Cell::new(0),
            whole: Cell::new(true),
            end: RefCell::default(),
            metrics: std::sync::Arc::clone(metrics),
        })
    }

    /// Whether it can be sent from its beginning again.
    pub fn is_held(&self) -> bool {
        self.whole.get() && !self.is_broken()
    }

    /// Whether the client broke it off.
    pub fn is_broken(&self) -> bool {
        matches!(*self.end.borrow(), Some(End::Broken))
    }

    /// Whether all of it is here and held, so that two attempts can run side by side.
    pub fn is_complete(&self) -> bool {
        self.whole.get() && matches!(*self.end.borrow(), Some(End::Done(_)))
    }

    /// Nothing will be sent again: holds nothing more from here on. What is held goes when it has
    /// been sent, for a second attempt may be in the middle of it.
    pub fn forget(&self) {
        self.whole.set(false);
    }

    /// Sends it from the beginning on `stream`, in a task of its own.
    pub fn send(self: &Rc<Self>, stream: SendStream<Bytes>) -> Upload {
        Upload::new(tokio::task::spawn_local(pump(Rc::clone(self), stream)))
    }

    fn hold(&self, data: &Bytes) {
        if !self.whole.get() {
            return;
        }
        let cost = data.len() + PIECE_COST;
        let bytes = self.held_bytes.get() + cost;
        let total = HELD.fetch_add(cost, Ordering::Relaxed) + cost;
        self.held_bytes.set(bytes);
        self.metrics.held_body_bytes().set(total as f64);
        if bytes > HOLD_MAX || total > HOLD_TOTAL {
            self.forget();
        } else {
            self.held.borrow_mut().push(data.clone());
        }
    }

    fn drop_held(&self) {
        self.held.borrow_mut().clear();
        let bytes = self.held_bytes.replace(0);
        if bytes > 0 {
            let before = HELD.fetch_sub(bytes, Ordering::Relaxed);
            self.metrics.held_body_bytes().set((before - bytes) as f64);
        }
    }

    /// The piece at `index`: a held one, or the next from the client.
    fn poll_piece(&self, index: usize, cx: &mut Context<'_>) -> Poll<Result<Bytes, End>> {
        if let Some(data) = self.held.borrow().get(index) {
            return Poll::Ready(Ok(data.clone()));
        }
        if !self.whole.get() {
            self.drop_held();
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
                        self.hold(&data);
                        return Poll::Ready(Ok(data));
                    }
                    Err(frame) => End::Done(frame.into_trailers().ok().map(clean_trailers)),
                },
                Some(Err(_)) => End::Broken,
                // hyper turns a reset with NO_ERROR into an end; only END_STREAM is one.
                None if !incoming.is_end_stream() => End::Broken,
                None => End::Done(None),
            };
            *self.end.borrow_mut() = Some(end.clone());
            return Poll::Ready(Err(end));
        }
    }
}

impl Drop for Source {
    fn drop(&mut self) {
        self.drop_held();
    }
}

async fn pump(source: Rc<Source>, mut stream: SendStream<Bytes>) {
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
                let _ = match trailers {
                    None => stream.send_data(Bytes::new(), true),
                    Some(trailers) => stream.send_trailers(trailers),
                };
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

/// Trailers that a request may carry upstream: none that could change who the caller is.
fn clean_trailers(mut trailers: HeaderMap) -> HeaderMap {
    let bad: Vec<_> = trailers
        .keys()
        .filter(|name| {
            let name = name.as_str();
            name == "authorization"
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

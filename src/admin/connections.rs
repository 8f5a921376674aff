//! The connections that the admin endpoint answers: few, and none of them keeps the next one out.
//!
//! A probe that is not answered restarts the pod. So a connection that waits in vain for its slot must
//! not exist: when all slots are taken, the oldest connection that has not sent a whole request gives
//! its slot to the new one, and if there is none, the oldest whose answer is not read. Each has a
//! moment first, in which a client that means it sends its request and reads a local answer.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{Instant, sleep_until};

use super::{CONNECTION_TIME, MAX_CONNECTIONS, StatusProvider, routes};

/// Time for a request head to arrive.
const HEADER_TIME: Duration = Duration::from_secs(3);

/// Bytes of a request head; ours have a few hundred.
const MAX_HEAD: usize = 16 * 1024;

/// Least age of a connection without a whole request that gives its slot away.
const SILENT_FOR: Duration = Duration::from_millis(50);

/// Least age of one whose answer is under way that does.
const UNREAD_FOR: Duration = Duration::from_millis(250);

/// Most connections that are evicted at once. With [`SILENT_FOR`] and [`MAX_CONNECTIONS`] that is room for
/// 5,000 new ones a second: those that are opened anew as soon as they are closed form no queue.
const MOST_AT_ONCE: usize = MAX_CONNECTIONS / 4;

/// Time in which what has arrived on other connections is read before any of them is evicted: this
/// loop may be the first to run after the whole process was held up.
const SETTLE: Duration = Duration::from_millis(1);

/// Evictions are logged at most once in this time.
const REPEAT: Duration = Duration::from_secs(60);

/// The connections that are answered now.
pub(super) struct Connections {
    facts: Arc<dyn StatusProvider>,
    tasks: JoinSet<()>,
    /// Oldest first.
    slots: VecDeque<Slot>,
    /// When evictions were last logged.
    warned_at: Option<Instant>,
}

struct Slot {
    since: Instant,
    /// Its request has arrived whole.
    asked: Arc<AtomicBool>,
    task: AbortHandle,
}

impl Slot {
    /// When it may be evicted.
    fn evictable_at(&self) -> Instant {
        let least = if self.asked.load(Ordering::Relaxed) { UNREAD_FOR } else { SILENT_FOR };
        self.since + least
    }
}

impl Connections {
    pub(super) fn new(facts: &Arc<dyn StatusProvider>) -> Self {
        Self {
            facts: Arc::clone(facts),
            tasks: JoinSet::new(),
            slots: VecDeque::new(),
            warned_at: None,
        }
    }

    /// Answers one more connection, as soon as one of [`MAX_CONNECTIONS`] slots is free or has been
    /// made free. `on_loopback`: a browser can have opened it; see the module above.
    pub(super) async fn add<S>(&mut self, stream: S, on_loopback: bool)
    where
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        self.make_room().await;
        let asked = Arc::new(AtomicBool::new(false));
        let answer = answer(stream, on_loopback, Arc::clone(&self.facts), Arc::clone(&asked));
        let task = self.tasks.spawn(async {
            // A client that is too slow or sends garbage has only itself to tell.
            let _ = tokio::time::timeout(CONNECTION_TIME, answer).await;
        });
        self.slots.push_back(Slot { since: Instant::now(), asked, task });
    }

    async fn make_room(&mut self) {
        while self.is_full() {
            let at = self.slots.iter().map(Slot::evictable_at).min().unwrap_or_else(Instant::now);
            tokio::select! {
                biased;
                _ = self.tasks.join_next() => continue,
                () = sleep_until(at.max(Instant::now() + SETTLE)) => {}
            }
            if self.is_full() {
                self.evict(Instant::now());
            }
        }
    }

    /// Ends the oldest silent connections, or else the oldest.
    fn evict(&mut self, now: Instant) {
        let mut ended = 0;
        self.slots.retain(|slot| {
            let silent = !slot.asked.load(Ordering::Relaxed) && slot.evictable_at() <= now;
            let ends = silent && ended < MOST_AT_ONCE;
            if ends {
                slot.task.abort();
                ended += 1;
            }
            !ends
        });
        if ended == 0
            && let Some(at) = self.slots.iter().position(|slot| slot.evictable_at() <= now)
            && let Some(slot) = self.slots.remove(at)
        {
            slot.task.abort();
            ended = 1;
        }
        if ended > 0 {
            self.tell();
        }
    }

    fn tell(&mut self) {
        let now = Instant::now();
        if self.warned_at.is_none_or(|at| now >= at + REPEAT) {
            self.warned_at = Some(now);
            tracing::warn!(
                connections = MAX_CONNECTIONS,
                "admin endpoint full: idle or slow connections evicted, oldest first"
            );
        }
    }

    /// Whether every slot is taken by a connection that goes on.
    fn is_full(&mut self) -> bool {
        while self.tasks.try_join_next().is_some() {}
        self.slots.retain(|slot| !slot.task.is_finished());
        self.slots.len() >= MAX_CONNECTIONS
    }

    /// Waits until all have been answered.
    pub(super) async fn finish(mut self) {
        while self.tasks.join_next().await.is_some() {}
    }
}

async fn answer<S>(
    stream: S,
    on_loopback: bool,
    facts: Arc<dyn StatusProvider>,
    asked: Arc<AtomicBool>,
) where
    S: AsyncRead + AsyncWrite + Unpin + 'static,
{
    let service = service_fn(|request| {
        asked.store(true, Ordering::Relaxed);
        let response = routes::answer(&request, on_loopback, &*facts);
        async { Ok::<_, Infallible>(response) }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIME)
        .max_buf_size(MAX_HEAD)
        .keep_alive(false) // scrapes are seconds apart: an idle connection would only hold a slot
        .serve_connection(TokioIo::new(stream), service);
    // Garbage has been answered with 400 by hyper, and the rest is the client's.
    let _ = pin!(connection).await;
}

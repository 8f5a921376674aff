//! The connections of an admin socket, with bounded slots that no client can hold for long.
//!
//! A liveness probe that gets no response restarts the pod, so no connection may wait for a slot in
//! vain. When all slots are taken, the oldest connection that has not sent a whole request is
//! evicted; if there is none, the oldest whose client does not read the response. Each connection
//! first has time to send a request and to read a local response.

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

use super::routes;
use super::status_provider::StatusProvider;

/// Most open connections of a socket.
pub const MAX_CONNECTIONS: usize = 256;

/// Limit for a whole connection: request, response and a slow reader.
pub const CONNECTION_TIME: Duration = Duration::from_secs(10);

/// Limit for the arrival of a request head.
const HEADER_TIME: Duration = Duration::from_secs(3);

/// Largest request head in bytes. Probes and scrapes send a few hundred.
const MAX_HEAD: usize = 16 * 1024;

/// Age from which a connection without a whole request may be evicted.
const SILENT_FOR: Duration = Duration::from_millis(50);

/// Age from which a connection whose response is not read may be evicted.
const UNREAD_FOR: Duration = Duration::from_millis(250);

/// Most connections that are evicted at once. With [`SILENT_FOR`] and [`MAX_CONNECTIONS`] this makes
/// room for 5,000 new connections a second, so that a client that reconnects at once after each
/// eviction builds no queue.
const MAX_EVICTED_AT_ONCE: usize = MAX_CONNECTIONS / 4;

/// Pause before an eviction, in which requests that have arrived are read: after the whole process
/// was stopped, this task may be the first one to run.
const SETTLE: Duration = Duration::from_millis(1);

/// Evictions are logged at most once in this time.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// The open connections of one socket.
pub(super) struct Connections {
    provider: Arc<dyn StatusProvider>,
    tasks: JoinSet<()>,
    /// Oldest first.
    slots: VecDeque<Slot>,
    /// When evictions were last logged.
    logged_at: Option<Instant>,
}

struct Slot {
    opened: Instant,
    /// The whole request has arrived.
    has_request: Arc<AtomicBool>,
    task: AbortHandle,
}

impl Slot {
    /// When the connection may be evicted.
    fn evictable_at(&self) -> Instant {
        let has_request = self.has_request.load(Ordering::Relaxed);
        self.opened + if has_request { UNREAD_FOR } else { SILENT_FOR }
    }
}

impl Connections {
    pub(super) fn new(provider: &Arc<dyn StatusProvider>) -> Self {
        Self {
            provider: Arc::clone(provider),
            tasks: JoinSet::new(),
            slots: VecDeque::new(),
            logged_at: None,
        }
    }

    /// Serves a new connection as soon as one of [`MAX_CONNECTIONS`] slots is free, which may take
    /// an eviction. A browser may have opened a connection `on_loopback`; see [`super`].
    pub(super) async fn add<S>(&mut self, stream: S, on_loopback: bool)
    where
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        self.make_room().await;
        let has_request = Arc::new(AtomicBool::new(false));
        let (provider, arrived) = (Arc::clone(&self.provider), Arc::clone(&has_request));
        let task = self.tasks.spawn(async move {
            let serve = serve(stream, on_loopback, provider, arrived);
            // The connection of a client that is too slow is closed without a response.
            let _ = tokio::time::timeout(CONNECTION_TIME, serve).await;
        });
        self.slots.push_back(Slot { opened: Instant::now(), has_request, task });
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

    /// Evicts the oldest connections without a whole request, or else the oldest connection.
    fn evict(&mut self, now: Instant) {
        let mut evicted = 0;
        self.slots.retain(|slot| {
            let silent = !slot.has_request.load(Ordering::Relaxed) && slot.evictable_at() <= now;
            let evict = silent && evicted < MAX_EVICTED_AT_ONCE;
            if evict {
                slot.task.abort();
                evicted += 1;
            }
            !evict
        });
        if evicted == 0
            && let Some(at) = self.slots.iter().position(|slot| slot.evictable_at() <= now)
            && let Some(slot) = self.slots.remove(at)
        {
            slot.task.abort();
            evicted = 1;
        }
        if evicted > 0 {
            self.log_eviction();
        }
    }

    fn log_eviction(&mut self) {
        let now = Instant::now();
        if self.logged_at.is_none_or(|at| now >= at + LOG_INTERVAL) {
            self.logged_at = Some(now);
            tracing::warn!(
                connections = MAX_CONNECTIONS,
                "admin endpoint full: idle or slow connections evicted, oldest first"
            );
        }
    }

    fn is_full(&mut self) -> bool {
        while self.tasks.try_join_next().is_some() {}
        self.slots.retain(|slot| !slot.task.is_finished());
        self.slots.len() >= MAX_CONNECTIONS
    }

    /// Waits until all connections have ended.
    pub(super) async fn finish(mut self) {
        while self.tasks.join_next().await.is_some() {}
    }
}

async fn serve<S>(
    stream: S,
    on_loopback: bool,
    provider: Arc<dyn StatusProvider>,
    has_request: Arc<AtomicBool>,
) where
    S: AsyncRead + AsyncWrite + Unpin + 'static,
{
    let service = service_fn(|request| {
        has_request.store(true, Ordering::Relaxed);
        let response = routes::respond(&request, on_loopback, &*provider);
        async { Ok::<_, Infallible>(response) }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIME)
        .max_buf_size(MAX_HEAD)
        .keep_alive(false) // scrapes are seconds apart: an idle connection would only hold a slot
        .serve_connection(TokioIo::new(stream), service);
    // hyper has answered a malformed request with 400; other errors concern only the client.
    let _ = pin!(connection).await;
}

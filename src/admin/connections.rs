//! The connections of an admin socket: a bounded number, from which idle and slow clients are evicted.
//!
//! Kubernetes restarts a pod whose liveness probe gets no response, so a probe must not wait for a slot that
//! another client holds. When all slots are taken, connections of the source with the most are evicted: the
//! oldest without a complete request. If it has none, its oldest connection whose client does not read the
//! response is. Each connection first has time to send a request ([`REQUEST_GRACE`]) and to read the response
//! ([`RESPONSE_GRACE`]).

use std::collections::{HashMap, VecDeque};
use std::convert::Infallible;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use jackstay_sys::clock;
use jackstay_sys::sockets::source::Source;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::task::{AbortHandle, JoinSet, yield_now};
use tokio::time::sleep_until;

use super::routes;
use super::status_provider::StatusProvider;
use crate::observe::RepeatFilter;

/// Maximum of open connections of a socket.
pub const MAX_CONNECTIONS: usize = 256;

/// Maximum lifetime of a connection: request and response.
pub const CONNECTION_TIME: Duration = Duration::from_secs(10);

/// Maximum time until the request head is complete.
const HEADER_TIMEOUT: Duration = Duration::from_secs(3);

/// Maximum size of a request head in bytes. Probes and scrapes send a few hundred.
const MAX_HEAD: usize = 16 * 1024;

/// Age from which a connection without a complete request may be evicted.
pub(super) const REQUEST_GRACE: Duration = Duration::from_millis(50);

/// Age from which a connection whose response is not read may be evicted.
const RESPONSE_GRACE: Duration = Duration::from_millis(250);

/// Maximum of connections that one eviction closes. A connection can be evicted after [`REQUEST_GRACE`], so
/// [`MAX_CONNECTIONS`] slots admit about 5,000 connections a second: a client that reconnects at once after
/// each eviction does not fill the accept queue.
const EVICTION_BATCH: usize = MAX_CONNECTIONS / 4;

/// Minimum pause before an eviction, so that a full endpoint does not keep its thread busy.
const EVICTION_DELAY: Duration = Duration::from_millis(1);

/// Turns of the event loop between this pause and the eviction. They read the requests that arrived while the thread
/// did not run, because the host is busy or the process was stopped: a turn polls the sockets and then up to 61 tasks
/// (`event_interval` of tokio).
const TURNS_BEFORE_EVICTION: usize = MAX_CONNECTIONS / 61 + 2;

/// Evictions are logged at most once in this time.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// The open connections of one socket.
pub(super) struct Connections {
    provider: Arc<dyn StatusProvider>,
    tasks: JoinSet<()>,
    /// Oldest first.
    slots: VecDeque<Slot>,
    warnings: RepeatFilter,
}

/// An open connection.
struct Slot {
    source: Source,
    opened: Instant,
    /// Whether the request is complete.
    has_request: Arc<AtomicBool>,
    task: AbortHandle,
}

impl Slot {
    /// The time from which the connection may be evicted.
    fn evictable_at(&self) -> Instant {
        let has_request = self.has_request.load(Ordering::Relaxed);
        self.opened + if has_request { RESPONSE_GRACE } else { REQUEST_GRACE }
    }
}

impl Connections {
    pub(super) fn new(provider: &Arc<dyn StatusProvider>) -> Self {
        Self {
            provider: Arc::clone(provider),
            tasks: JoinSet::new(),
            slots: VecDeque::new(),
            warnings: RepeatFilter::new(LOG_INTERVAL),
        }
    }

    /// Serves a new connection of `source` once a slot is free; evicts others if necessary. Of a connection
    /// `on_loopback`, the `Host` is checked, since a browser may have opened it; see [`super`].
    pub(super) async fn add<S>(&mut self, stream: S, source: Source, on_loopback: bool)
    where
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let provider = Arc::clone(&self.provider);
        self.add_with(source, |arrived| serve(stream, on_loopback, provider, arrived)).await;
    }

    /// Like [`Self::add`], with another way to serve the connection, which sets the flag when the request is complete.
    pub(super) async fn add_with<F>(
        &mut self,
        source: Source,
        serve: impl FnOnce(Arc<AtomicBool>) -> F,
    ) where
        F: Future<Output = ()> + Send + 'static,
    {
        self.make_room().await;
        let has_request = Arc::new(AtomicBool::new(false));
        // After the timeout the connection is closed without a response.
        let serve = tokio::time::timeout(CONNECTION_TIME, serve(Arc::clone(&has_request)));
        let task = self.tasks.spawn(async move {
            let _ = serve.await;
        });
        self.slots.push_back(Slot { source, opened: clock::now(), has_request, task });
    }

    async fn make_room(&mut self) {
        while self.is_full() {
            let Some(largest) = self.largest_source() else { return };
            let of_largest = self.slots.iter().filter(|slot| slot.source == largest);
            let next = of_largest.map(Slot::evictable_at).min().unwrap_or_else(clock::now);
            tokio::select! {
                biased;
                _ = self.tasks.join_next() => continue,
                () = sleep_until((next.max(clock::now() + EVICTION_DELAY)).into()) => {}
            }
            for _ in 0..TURNS_BEFORE_EVICTION {
                yield_now().await;
            }
            if self.is_full() {
                self.evict(largest, clock::now());
            }
        }
    }

    /// The source with the most connections; among several, the one with the oldest.
    fn largest_source(&self) -> Option<Source> {
        let mut counts: HashMap<Source, usize> = HashMap::new();
        for slot in &self.slots {
            *counts.entry(slot.source).or_default() += 1;
        }
        // Of equal ones, `max_by_key` returns the last.
        self.slots.iter().rev().map(|slot| slot.source).max_by_key(|source| counts.get(source))
    }

    /// Evicts up to [`EVICTION_BATCH`] connections of `source` without a complete request, or else one whose
    /// response is not read, the oldest first. Neither is evicted before its time.
    fn evict(&mut self, source: Source, now: Instant) {
        let is_evictable = |slot: &Slot| slot.source == source && slot.evictable_at() <= now;
        let mut evicted = 0;
        self.slots.retain(|slot| {
            let is_idle = !slot.has_request.load(Ordering::Relaxed) && is_evictable(slot);
            let evict = is_idle && evicted < EVICTION_BATCH;
            if evict {
                slot.task.abort();
                evicted += 1;
            }
            !evict
        });
        if evicted == 0
            && let Some(oldest) = self.slots.iter().position(is_evictable)
            && let Some(slot) = self.slots.remove(oldest)
        {
            slot.task.abort();
            evicted = 1;
        }
        if evicted > 0 && self.warnings.admit("eviction", now).is_some() {
            tracing::warn!(
                connections = MAX_CONNECTIONS,
                %source,
                "admin endpoint full: idle or slow connections of the source with the most evicted, oldest first"
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
    let connection = http1_server().serve_connection(TokioIo::new(stream), service);
    // hyper answers a malformed request with 400. Other errors concern only this client.
    let _ = pin!(connection).await;
}

/// A server for one request of bounded size and time.
pub(super) fn http1_server() -> http1::Builder {
    let mut server = http1::Builder::new();
    server
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIMEOUT)
        .max_buf_size(MAX_HEAD)
        .keep_alive(false); // probes are seconds apart, and an idle connection would occupy a slot
    server
}

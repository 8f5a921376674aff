//! State that the connections and the handle of a demo apiserver share.

use crate::aggregated::AggregatedPath;
use crate::cluster::Cluster;
use crate::gateway::{Gateway, Refused};
use crate::identity::Certificate;
use crate::status_error::StatusError;
use bytes::Bytes;
use rustls::server::danger::ClientCertVerifier;
use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::{Notify, watch};

/// A response that the server sends instead of handling the request.
#[derive(Debug, Clone)]
pub struct ScriptedResponse {
    pub(super) status: u16,
    pub(super) headers: Vec<(String, String)>,
    /// The body.
    pub body: Bytes,
    /// Resets the stream after the body instead of ending it.
    pub(super) cut: bool,
}

impl ScriptedResponse {
    /// A response with a `Status` object as its body.
    pub fn status(code: u16, reason: &'static str, message: &str) -> Self {
        Self {
            status: code,
            headers: vec![("content-type".into(), "application/json".into())],
            body: StatusError::new(code, reason, message).status().to_string().into(),
            cut: false,
        }
    }

    /// A response in text, as Go's `http.Error` writes it.
    pub fn text(code: u16, body: &'static str) -> Self {
        let headers =
            [("content-type", "text/plain; charset=utf-8"), ("x-content-type-options", "nosniff")];
        Self {
            status: code,
            headers: headers.map(|(name, value)| (name.to_owned(), value.to_owned())).into(),
            body: Bytes::from_static(body.as_bytes()),
            cut: false,
        }
    }

    /// The rejection by the limit of requests in flight.
    pub(super) fn too_many_requests() -> Self {
        let headers = [("content-type", "text/plain; charset=utf-8"), ("retry-after", "1")];
        Self {
            status: 429,
            headers: headers.map(|(name, value)| (name.to_owned(), value.to_owned())).into(),
            body: Bytes::from_static(b"Too many requests, please try again later.\n"),
            cut: false,
        }
    }

    /// Adds a header.
    #[must_use]
    pub fn header(mut self, name: &str, value: &str) -> Self {
        self.headers.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Resets the stream after the body instead of ending it.
    #[must_use]
    pub fn cut(mut self) -> Self {
        self.cut = true;
        self
    }
}

/// Runs before a request is handled. If it returns a response, the server sends that one instead.
pub type RequestHook = Arc<dyn Fn(&http::request::Parts) -> Option<ScriptedResponse> + Send + Sync>;

/// The faults in force on a server; none by default. `on_request`, `goaway_chance`, `fail_next` and
/// `lose_next` do not apply to health checks and to what a prober reads with them.
#[derive(Default)]
// The faults are independent of each other.
#[allow(clippy::struct_excessive_bools)]
pub struct Faults {
    /// `/readyz` fails; nothing else changes.
    pub unready: bool,
    /// The RBAC informers are not filled, as after the start: every request of a user outside `system:masters` is
    /// answered with 403, `/readyz` included.
    pub rbac_empty: bool,
    /// The address that `/api` names, in place of the name of the server.
    pub advertised_address: Option<&'static str>,
    /// New requests wait until this is false, health checks included. PINGs are answered and watches
    /// continue.
    pub hang: bool,
    /// Watches deliver nothing until this is false, as with a lagging watch cache; then they catch up. New ones wait
    /// with their initial events.
    pub hold_watches: bool,
    /// The number of changes after which each watch delivers nothing, until this is `None`.
    pub watched_changes: Option<usize>,
    /// The feature gate `ManagedFieldsOptOut`, in the metrics only; `None` for a version that has no such gate.
    pub managed_fields_opt_out: Option<bool>,
    /// The path to the aggregated server.
    pub aggregated_path: AggregatedPath,
    /// The `APIService` of the aggregated server has the condition `Available=False`, a state that all apiservers share.
    pub aggregated_unavailable: bool,
    /// The version at which the watch cache stands still: a get that asks for a newer one is answered with 504.
    pub cache_version: Option<u64>,
    /// `/livez` fails, as that of Kubernetes 1.36 without etcd, whose `/readyz` does not; nothing else changes.
    pub dead: bool,
    /// The feature gate `CBORServingAndStorage` is off: CBOR is not acceptable.
    pub cbor_disabled: bool,
    /// The feature gate `ShardedListAndWatch` is off: `shardSelector` is ignored.
    pub sharding_disabled: bool,
    /// The Status that answers a delete, a binding or an eviction has the version of the change, as that of a delete from
    /// Kubernetes 1.38 on. That of an older server has none.
    pub status_versions: bool,
    /// `SETTINGS_MAX_CONCURRENT_STREAMS` of new connections, in place of 100.
    pub max_streams: Option<u32>,
    /// Time that every request waits before it is handled, health checks included.
    pub delay: Duration,
    /// The time that the server needs for a request, drawn for each one, health checks included. It comes after
    /// `delay`.
    pub service_time: Option<RangeInclusive<Duration>>,
    /// The number of requests in flight above which further ones are rejected with 429 and `Retry-After: 1`. Watches
    /// and what a prober reads are not rejected, as with kube-apiserver's `--max-requests-inflight`.
    pub max_in_flight: Option<u64>,
    /// The time until the watch cache has a change of the store; after a restart it has all. Watches and reads with
    /// `resourceVersion` see the cache. As in kube-apiserver, a read of a version that the cache has not
    /// reached waits for at most 3 s and then gets 504, a LIST without a version waits too and is then read from the
    /// store, and a GET without a version reads from the store. With `None` there is no cache: reads see the store, and
    /// 504 comes at once. With zero, a read still waits for a version that the store has not reached.
    pub cache_lag: Option<Duration>,
    /// The probability that the server sends GOAWAY on the connection of a request, as with `--goaway-chance` of
    /// kube-apiserver.
    pub goaway_chance: f64,
    /// Requests for these paths get no response.
    pub hang_paths: &'static [&'static str],
    /// Runs before each request.
    pub on_request: Option<RequestHook>,
    /// Number of requests that get this response instead of being handled.
    pub fail_next: Option<(usize, ScriptedResponse)>,
    /// Number of requests that are handled without a response.
    pub lose_next: usize,
}

/// Counters since the server was created; a restart does not reset them.
#[derive(Debug, Default)]
pub struct Counters {
    /// TCP connections accepted.
    pub accepted: AtomicU64,
    /// TCP connections that are open.
    pub open: AtomicU64,
    /// Connections on which the server sent GOAWAY (HTTP/1.1: `Connection: close`).
    pub goaways: AtomicU64,
    /// Requests received.
    pub requests: AtomicU64,
    /// Requests without a response head so far.
    pub in_flight: AtomicU64,
    /// Those of [`Self::in_flight`] that jackstay asks for itself.
    pub own_requests_of_jackstay: AtomicU64,
    /// Lists of clients that were answered; each page counts.
    pub lists: AtomicU64,
    /// Watches that were accepted.
    pub accepted_watches: AtomicU64,
    /// Running watches.
    pub watches: AtomicU64,
}

/// Increments a counter until it is dropped. A killed server drops it too.
pub(super) struct Counted {
    server: Arc<ServerState>,
    counter: fn(&Counters) -> &AtomicU64,
}

impl Counted {
    pub fn new(server: &Arc<ServerState>, counter: fn(&Counters) -> &AtomicU64) -> Self {
        counter(&server.counters).fetch_add(1, Relaxed);
        Self { server: server.clone(), counter }
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        (self.counter)(&self.server.counters).fetch_sub(1, Relaxed);
    }
}

/// The connection that a request arrived on.
pub(super) struct ConnectionInfo {
    /// Unique within the cluster.
    pub id: u64,
    pub certificate: Certificate,
    /// Sends GOAWAY on this connection.
    pub goaway: Notify,
}

/// State of one server.
pub(super) struct ServerState {
    pub name: String,
    pub gateway: Gateway,
    pub refused: Refused,
    /// See [`crate::server::Options::compresses_watch_lists`].
    pub compresses_watch_lists: bool,
    /// See [`crate::server::Options::compresses_responses`].
    pub compresses_responses: bool,
    /// What it reports at `/version`.
    pub version: Mutex<String>,
    pub cluster: Cluster,
    /// Replaced when the process starts, so that it does not know the sessions of its predecessor.
    pub tls: Mutex<Arc<rustls::ServerConfig>>,
    pub verifier: Arc<dyn ClientCertVerifier>,
    pub counters: Counters,
    pub faults: watch::Sender<Faults>,
    /// The version that the watch cache had at least reached. See [`Faults::cache_lag`].
    pub cached: AtomicU64,
    /// A watch that starts at an older version gets 410 on this server.
    pub compacted: AtomicU64,
    /// Each message ends every watch.
    pub end_watches: watch::Sender<()>,
    /// Each message sends GOAWAY on every connection.
    pub goaway: watch::Sender<()>,
    /// Each message resets every connection.
    pub reset: watch::Sender<()>,
    pub phase: watch::Sender<Phase>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Phase {
    Running,
    /// Requests in flight may finish within this time.
    Draining(Duration),
    /// Sockets send RST instead of FIN when they are dropped.
    Killed,
}

impl ServerState {
    /// The response that `on_request` or `fail_next` prescribes for this request.
    pub fn scripted(&self, request: &http::request::Parts) -> Option<ScriptedResponse> {
        let hook = self.faults.borrow().on_request.clone();
        if let Some(response) = hook.and_then(|hook| hook(request)) {
            return Some(response);
        }
        let mut scripted = None;
        self.faults.send_if_modified(|faults| {
            if let Some((left @ 1.., response)) = &mut faults.fail_next {
                *left -= 1;
                scripted = Some(response.clone());
            }
            false
        });
        scripted
    }

    /// Whether it shuts down.
    pub fn is_draining(&self) -> bool {
        matches!(*self.phase.borrow(), Phase::Draining(_))
    }

    /// Whether `lose_next` applies to this request; decrements it.
    pub fn loses_response(&self) -> bool {
        let mut loses = false;
        self.faults.send_if_modified(|faults| {
            loses = faults.lose_next > 0;
            faults.lose_next = faults.lose_next.saturating_sub(1);
            false
        });
        loses
    }
}

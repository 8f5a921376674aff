//! State that a demo apiserver's thread, connections and request handlers share, and that its handle
//! changes to inject faults.

use crate::demo::apiserver::cluster::Cluster;
use crate::demo::apiserver::identity::Certificate;
use crate::demo::apiserver::status_error::StatusError;
use crate::demo::lock;
use bytes::Bytes;
use rustls::server::danger::ClientCertVerifier;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::{Notify, watch};
use tokio_rustls::TlsAcceptor;

/// A response that the server sends without handling the request.
#[derive(Debug, Clone)]
pub struct ScriptedResponse {
    pub(super) status: u16,
    pub(super) headers: Vec<(String, String)>,
    /// The response body.
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

/// Runs before each request is handled; a returned response is sent instead of handling it.
pub type RequestHook = Arc<dyn Fn(&http::request::Parts) -> Option<ScriptedResponse> + Send + Sync>;

/// Counters since the server was created; a restart does not reset them.
#[derive(Debug, Default)]
pub struct Counters {
    /// TCP connections accepted.
    pub accepted: AtomicU64,
    /// TCP connections that are open.
    pub open: AtomicU64,
    /// TLS handshakes that failed.
    pub handshake_failures: AtomicU64,
    /// Connections on which the server sent GOAWAY (HTTP/1.1: `Connection: close`).
    pub goaways: AtomicU64,
    /// Requests received.
    pub requests: AtomicU64,
    /// Requests whose response head is not sent yet.
    pub in_flight: AtomicU64,
    /// Watches that are running.
    pub watches: AtomicU64,
    /// Upgraded connections that are open.
    pub tunnels: AtomicU64,
}

/// One more in a counter, until it is dropped: also when the server is killed.
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
    /// Unique within the process.
    pub id: u64,
    pub remote: SocketAddr,
    pub certificate: Certificate,
    /// Sends GOAWAY on this connection.
    pub goaway: Notify,
}

/// State of one server, shared by its handle, its thread and its connections.
pub(super) struct ServerState {
    pub name: String,
    pub cluster: Cluster,
    pub tls: TlsAcceptor,
    pub verifier: Arc<dyn ClientCertVerifier>,
    pub log_interval: Duration,
    pub counters: Counters,
    pub max_streams: AtomicU32,
    pub ready: AtomicBool,
    pub anonymous: AtomicBool,
    pub mitigation: AtomicBool,
    pub delay_ms: AtomicU64,
    pub compacted: AtomicU64,
    pub hang: watch::Sender<bool>,
    pub hold_watches: watch::Sender<bool>,
    /// Incremented to end every watch.
    pub end_watches: watch::Sender<u64>,
    /// Incremented to send GOAWAY on every connection.
    pub goaway: watch::Sender<u64>,
    /// Incremented to reset every connection.
    pub reset: watch::Sender<u64>,
    /// The server was killed: sockets send RST when they are dropped, not FIN.
    pub killed: AtomicBool,
    pub script: Mutex<Script>,
    pub freeze: Freeze,
    pub phase: watch::Sender<Phase>,
}

/// Faults that apply to requests other than health checks.
#[derive(Default)]
pub(super) struct Script {
    pub hook: Option<RequestHook>,
    /// Requests left that get this response.
    pub fail: Option<(usize, ScriptedResponse)>,
    /// Requests left that are handled and get no response.
    pub lose: usize,
}

/// Blocks the server's thread, as SIGSTOP blocks a process.
#[derive(Default)]
pub(super) struct Freeze {
    state: Mutex<FreezeState>,
    changed: Condvar,
    /// Wakes the server's loop when a freeze is requested.
    pub requested: watch::Sender<bool>,
}

#[derive(Default)]
struct FreezeState {
    requested: bool,
    /// The server's thread is blocked.
    blocked: bool,
}

impl Freeze {
    /// Requests a freeze and waits until the server's thread is blocked.
    pub fn freeze(&self) {
        let mut state = lock(&self.state);
        state.requested = true;
        self.requested.send_replace(true);
        while !state.blocked {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Ends the freeze.
    pub fn thaw(&self) {
        lock(&self.state).requested = false;
        self.requested.send_replace(false);
        self.changed.notify_all();
    }

    /// Blocks the calling thread, which is the server's, while a freeze is requested.
    pub fn block_while_requested(&self) {
        let mut state = lock(&self.state);
        while state.requested {
            state.blocked = true;
            self.changed.notify_all();
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.blocked = false;
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Phase {
    Running,
    /// Running requests may finish for this long.
    Draining(Duration),
    Killed,
}

impl ServerState {
    /// The scripted response to this request, if there is one.
    pub fn scripted(&self, request: &http::request::Parts) -> Option<ScriptedResponse> {
        let mut script = lock(&self.script);
        if let Some(answer) = script.hook.clone().and_then(|hook| hook(request)) {
            return Some(answer);
        }
        let (left, answer) = script.fail.as_mut()?;
        *left = left.checked_sub(1)?;
        Some(answer.clone())
    }

    /// Whether the response to this request must not be sent.
    pub fn loses_response(&self) -> bool {
        let mut script = lock(&self.script);
        let left = script.lose;
        script.lose = left.saturating_sub(1);
        left > 0
    }
}

//! State that a demo apiserver's thread, connections and request handlers share, and that its handle
//! changes to inject faults.

use crate::demo::apiserver::cluster::Cluster;
use crate::demo::apiserver::identity::Certificate;
use crate::demo::apiserver::status_error::StatusError;
use bytes::Bytes;
use rustls::server::danger::ClientCertVerifier;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
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

/// The faults in force on a server; none by default. The last three do not apply to health checks.
#[derive(Default)]
pub struct Faults {
    /// `/readyz` fails; nothing else changes.
    pub unready: bool,
    /// New requests, health checks included, wait. PINGs are answered and watches continue.
    pub hang: bool,
    /// Watches deliver nothing, as with a lagging watch cache; afterwards they catch up.
    pub hold_watches: bool,
    /// Delays every request, health checks included, before it is handled.
    pub delay: Duration,
    /// Runs before each request.
    pub on_request: Option<RequestHook>,
    /// The next requests, this many, get this response and are not handled.
    pub fail_next: Option<(usize, ScriptedResponse)>,
    /// The next requests, this many, are handled and get no response.
    pub lose_next: usize,
}

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
    pub counters: Counters,
    pub faults: watch::Sender<Faults>,
    /// Watches that start at an older version expire on this server.
    pub compacted: AtomicU64,
    /// A message ends every watch.
    pub end_watches: watch::Sender<()>,
    /// A message sends GOAWAY on every connection.
    pub goaway: watch::Sender<()>,
    /// A message resets every connection.
    pub reset: watch::Sender<()>,
    /// The server was killed: sockets send RST when they are dropped, not FIN.
    pub killed: AtomicBool,
    pub phase: watch::Sender<Phase>,
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

    /// Whether the response to this request must not be sent.
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

//! The admin endpoint: health, metrics and status for operators, read-only, off the request path.
//!
//! It answers from [`StatusProvider`] and knows nothing of the data plane. It runs on whatever runtime the
//! caller polls [`Admin::serve`] on, which must not be a worker's. It promises to hold little: at
//! most [`MAX_CONNECTIONS`] connections, each with one request and [`CONNECTION_TIME`] to live. Idle
//! and slow ones are evicted for new ones ([`connections`]).
//!
//! It answers on a Unix socket as well, if one is configured ([`serve_unix`]). A TCP port can be
//! flooded by every process of the host's network; a socket in a private directory cannot, so it is
//! the one for probes whose failure restarts the process.
//!
//! Not promised: authentication. Who can connect can read, so it binds to loopback by default, and
//! nothing it shows is secret. A browser on the node can connect too, on behalf of any page whose
//! name is made to resolve to 127.0.0.1 (DNS rebinding). Therefore a connection that arrives on a
//! loopback address is answered only if its `Host` is an IP literal or `localhost`, the names that
//! such a page cannot have. On other addresses any `Host` will do: kubelet's probes use the
//! host's IP, Prometheus may use a name, and whoever binds there has opened it to the network.

mod connections;
mod node;
mod routes;

use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream, UnixListener};
use tokio::time::Instant;

use self::connections::Connections;
pub use self::node::node_name;
use crate::net::sockets::listening;

/// Most connections at once on a socket.
pub const MAX_CONNECTIONS: usize = 256;

/// Time for a whole connection: one request, one answer, a slow reader.
pub const CONNECTION_TIME: Duration = Duration::from_secs(10);

/// Pause after a failed accept (no descriptors left), so that the loop does not spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// It is told once in this time.
const REPEAT: Duration = Duration::from_secs(5);

/// What the admin endpoint shows; asked anew for every request, on the admin runtime.
pub trait StatusProvider: Send + Sync + 'static {
    /// Whether every worker's loop has turned lately; else which one has not.
    fn liveness(&self) -> Result<(), String>;
    /// Whether requests can be served, part by part.
    fn readiness(&self) -> Readiness;
    /// The body of `/status`; the page at `/` renders it.
    fn status(&self) -> serde_json::Value;
    /// The last state changes, for `/events`.
    fn events(&self) -> serde_json::Value;
    /// What the endpoints were like in the last minutes, for `/history`.
    fn history(&self) -> serde_json::Value;
    /// The effective configuration, without secrets.
    fn config(&self) -> serde_json::Value;
    /// Prometheus text.
    fn metrics(&self) -> String;
}

/// The answer of `/readyz`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Readiness {
    /// The verdict; not simply all checks, since one endpoint of three is enough.
    pub ready: bool,
    /// The checks, in the order in which they are shown.
    pub checks: Vec<ReadinessCheck>,
}

/// One part of [`Readiness`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReadinessCheck {
    /// `listener apiserver`, `upstream control-plane`, ….
    pub name: String,
    /// Whether it does its work.
    pub ok: bool,
    /// What is missing, or worth knowing; may be empty.
    pub detail: String,
}

/// Why nobody is answered on a socket any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopReason {
    /// The endpoint has moved: whoever waits in the queue of the socket would be reset with it.
    Moved,
    /// Another process has the socket too, and its queue.
    TakenOver,
}

/// A bound admin endpoint.
#[derive(Debug)]
pub struct Admin {
    listener: TcpListener,
}

impl Admin {
    /// Takes a bound socket into use. Must run within a tokio runtime.
    ///
    /// # Errors
    /// The socket cannot be used.
    pub fn from_std(listener: std::net::TcpListener) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        Ok(Self { listener: TcpListener::from_std(listener)? })
    }

    /// The address it is bound to.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Answers until `left`, and finishes what it has begun. If it is dropped, its connections end
    /// with it.
    pub async fn serve(
        self,
        facts: Arc<dyn StatusProvider>,
        left: impl Future<Output = StopReason>,
    ) {
        let mut left = pin!(left);
        let mut connections = Connections::new(&facts);
        let mut failures = Failures::default();
        let why = loop {
            let accepted = tokio::select! {
                biased;
                why = &mut left => break why,
                accepted = self.listener.accept() => accepted,
            };
            match accepted {
                Ok((stream, _)) => {
                    let on_loopback = is_on_loopback(&stream);
                    connections.add(stream, on_loopback).await;
                }
                Err(error) => failures.pause(&error).await,
            }
        };
        if why == StopReason::Moved {
            for (stream, _) in listening::close_and_accept_queued(self.listener) {
                let on_loopback = is_on_loopback(&stream);
                connections.add(stream, on_loopback).await;
            }
        } else {
            drop(self.listener);
        }
        connections.finish().await;
    }
}

/// Answers on a Unix socket until it is dropped.
pub async fn serve_unix(listener: UnixListener, facts: Arc<dyn StatusProvider>) {
    let mut connections = Connections::new(&facts);
    let mut failures = Failures::default();
    loop {
        match listener.accept().await {
            // No browser connects here.
            Ok((stream, _)) => connections.add(stream, false).await,
            Err(error) => failures.pause(&error).await,
        }
    }
}

fn is_on_loopback(stream: &TcpStream) -> bool {
    stream.local_addr().is_ok_and(|address| address.ip().to_canonical().is_loopback())
}

/// Accepts that failed.
#[derive(Default)]
struct Failures {
    told: Option<Instant>,
}

impl Failures {
    async fn pause(&mut self, error: &io::Error) {
        let now = Instant::now();
        if self.told.is_none_or(|at| now >= at + REPEAT) {
            self.told = Some(now);
            tracing::warn!(%error, "admin endpoint cannot accept a connection");
        }
        tokio::time::sleep(ACCEPT_PAUSE).await;
    }
}

#[cfg(test)]
mod tests;

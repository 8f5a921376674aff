//! The admin endpoint: health, metrics and status for operators, read-only, off the request path.
//!
//! It answers from [`Facts`] and knows nothing of the data plane. It runs on whatever runtime the
//! caller polls [`Admin::serve`] on, which must not be a worker's. It promises to hold little: at
//! most [`MAX_CONNECTIONS`] connections, each with one request and [`CONNECTION_TIME`] to live.
//!
//! Not promised: authentication. Who can connect can read, so it binds to loopback by default, and
//! nothing it shows is secret. A browser on the node can connect too, on behalf of any page whose
//! name is made to resolve to 127.0.0.1 (DNS rebinding). Therefore a connection that arrives on a
//! loopback address is answered only if its `Host` is an IP literal or `localhost`, the names that
//! such a page cannot have. On other addresses any `Host` will do: kubelet's probes use the
//! host's IP, Prometheus may use a name, and whoever binds there has opened it to the network.

mod routes;

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::net::socket;

/// Most connections at once; more wait in the kernel's backlog.
pub const MAX_CONNECTIONS: usize = 64;

/// Time for a request head to arrive.
const HEADER_TIME: Duration = Duration::from_secs(3);

/// Time for a whole connection: one request, one answer, a slow reader.
pub const CONNECTION_TIME: Duration = Duration::from_secs(10);

/// Bytes of a request head; ours have a few hundred.
const MAX_HEAD: usize = 16 * 1024;

/// Pause after a failed accept (no descriptors left), so that the loop does not spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// It is told once in this time.
const REPEAT: Duration = Duration::from_secs(5);

/// What the admin endpoint shows; asked anew for every request, on the admin runtime.
pub trait Facts: Send + Sync + 'static {
    /// Whether every worker's loop has turned lately; else which one has not.
    fn live(&self) -> Result<(), String>;
    /// Whether requests can be served, part by part.
    fn ready(&self) -> Readiness;
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
    /// The verdict; not simply all parts, since one endpoint of three is enough.
    pub ready: bool,
    /// The parts, in the order in which they are shown.
    pub parts: Vec<Part>,
}

/// One part of [`Readiness`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    /// `listener apiserver`, `upstream control-plane`, ….
    pub name: String,
    /// Whether it does its work.
    pub ok: bool,
    /// What is missing, or worth knowing; may be empty.
    pub detail: String,
}

/// Why nobody is answered on a socket any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Left {
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
    pub async fn serve(self, facts: Arc<dyn Facts>, left: impl Future<Output = Left>) {
        let mut left = pin!(left);
        let slots = Arc::new(Semaphore::new(MAX_CONNECTIONS));
        let mut connections = JoinSet::new();
        let mut told: Option<Instant> = None;
        let why = loop {
            let next = async { (slot(&slots).await, self.listener.accept().await) };
            let (slot, accepted) = tokio::select! {
                biased;
                why = &mut left => break why,
                next = next => next,
            };
            match accepted {
                Ok((stream, _)) => {
                    connections.spawn(within(stream, Arc::clone(&facts), slot));
                }
                Err(error) => {
                    let now = Instant::now();
                    if told.is_none_or(|at| now >= at + REPEAT) {
                        told = Some(now);
                        tracing::warn!(%error, "admin endpoint cannot accept a connection");
                    }
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
            while connections.try_join_next().is_some() {}
        };
        if why == Left::Moved {
            for (stream, _) in socket::close_and_take_queue(self.listener) {
                connections.spawn(within(stream, Arc::clone(&facts), slot(&slots).await));
            }
        } else {
            drop(self.listener);
        }
        while connections.join_next().await.is_some() {}
    }
}

/// Waits for one of the [`MAX_CONNECTIONS`]. None would mean that there is no bound: nobody closes it.
async fn slot(slots: &Arc<Semaphore>) -> Option<OwnedSemaphorePermit> {
    Arc::clone(slots).acquire_owned().await.ok()
}

/// Answers one connection, as long as it may take.
async fn within(stream: TcpStream, facts: Arc<dyn Facts>, slot: Option<OwnedSemaphorePermit>) {
    // A client that is too slow or sends garbage has only itself to tell.
    let _ = tokio::time::timeout(CONNECTION_TIME, answer(stream, facts)).await;
    drop(slot);
}

async fn answer(stream: TcpStream, facts: Arc<dyn Facts>) {
    let on_loopback =
        stream.local_addr().is_ok_and(|address| address.ip().to_canonical().is_loopback());
    let service = service_fn(|request| {
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

#[cfg(test)]
mod tests;

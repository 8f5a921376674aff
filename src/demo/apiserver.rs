//! One apiserver of a demo cluster, and the strings one can pull on it.
//!
//! Each server is an OS thread with a single-threaded runtime, so that it can be frozen as by
//! SIGSTOP (the kernel still acknowledges, nobody answers) and killed as by SIGKILL (every socket
//! is reset at once), in the process of the test.

use crate::demo::cluster::Cluster;
use crate::demo::connection;
use crate::demo::failure::Failure;
use crate::demo::pki::{Issued, Pki};
use crate::net::tls::serving::DeferredClientVerification;
use bytes::Bytes;
use rustls::RootCertStore;
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::ClientCertVerifier;
use socket2::{Domain, Protocol, Socket, Type};
use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::sync::watch;
use tokio_rustls::TlsAcceptor;

/// How a server is set up.
pub struct Options {
    /// Its name in the audit.
    pub name: String,
    /// Where it listens; port 0 takes a free one, which `restart` keeps.
    pub bind: SocketAddr,
    /// Streams that a connection may have open; kube-apiserver allows 100.
    pub max_concurrent_streams: u32,
    /// Whether it offers HTTP/2.
    pub http2: bool,
    /// The serving certificate; default: one for loopback.
    pub certificate: Option<Issued>,
    /// Between two lines of a followed log.
    pub log_interval: Duration,
}

impl Options {
    /// A usual server on a free port of 127.0.0.1.
    pub fn named(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            bind: (Ipv4Addr::LOCALHOST, 0).into(),
            max_concurrent_streams: 100,
            http2: true,
            certificate: None,
            log_interval: Duration::from_secs(1),
        }
    }
}

/// An answer given instead of the real one.
#[derive(Debug, Clone)]
pub struct Answer {
    /// The status code.
    pub status: u16,
    /// Headers.
    pub headers: Vec<(String, String)>,
    /// The body.
    pub body: Bytes,
    /// Whether the stream is reset after the body instead of ended.
    pub cut: bool,
}

impl Answer {
    /// A `Status` object.
    pub fn status(code: u16, reason: &'static str, message: &str) -> Self {
        Self {
            status: code,
            headers: vec![("content-type".into(), "application/json".into())],
            body: Failure::new(code, reason, message).status().to_string().into(),
            cut: false,
        }
    }

    /// With one more header.
    #[must_use]
    pub fn header(mut self, name: &str, value: &str) -> Self {
        self.headers.push((name.to_owned(), value.to_owned()));
        self
    }

    /// With the stream reset after the body.
    #[must_use]
    pub fn cut(mut self) -> Self {
        self.cut = true;
        self
    }
}

/// Decides on a request before the server does.
pub type Hook = Arc<dyn Fn(&http::request::Parts) -> Option<Answer> + Send + Sync>;

/// What a server has counted since it was made; restarts do not reset it.
#[derive(Debug, Default)]
pub struct Counters {
    /// TCP connections accepted.
    pub accepted: AtomicU64,
    /// TCP connections open now.
    pub open: AtomicU64,
    /// Handshakes that failed.
    pub handshake_failures: AtomicU64,
    /// Connections that were told to go away.
    pub goaways: AtomicU64,
    /// Requests received.
    pub requests: AtomicU64,
    /// Requests without a response head.
    pub in_flight: AtomicU64,
    /// Watches running now.
    pub watches: AtomicU64,
    /// Upgraded connections running now.
    pub tunnels: AtomicU64,
}

/// What the handle and the server's thread share.
pub(super) struct Server {
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
    /// Raised to end all watches, send everyone away, or reset every connection.
    pub end_watches: watch::Sender<u64>,
    pub goaway: watch::Sender<u64>,
    pub reset: watch::Sender<u64>,
    /// Sockets that are dropped now are reset, not closed.
    pub killed: AtomicBool,
    script: Mutex<Script>,
    freeze: Freeze,
    phase: watch::Sender<Phase>,
}

#[derive(Default)]
struct Script {
    hook: Option<Hook>,
    fail: Option<(usize, Answer)>,
    lose: usize,
}

#[derive(Default)]
struct Freeze {
    state: Mutex<(bool, bool)>, // (asked for, in force)
    changed: Condvar,
    bell: watch::Sender<bool>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Phase {
    Running,
    Draining(Duration),
    Killed,
}

impl Server {
    /// What the script says about this request instead of the server.
    pub fn scripted(&self, request: &http::request::Parts) -> Option<Answer> {
        let mut script = lock(&self.script);
        if let Some(answer) = script.hook.clone().and_then(|hook| hook(request)) {
            return Some(answer);
        }
        let (left, answer) = script.fail.as_mut()?;
        *left = left.checked_sub(1)?;
        Some(answer.clone())
    }

    /// Whether the answer to this request is to be lost.
    pub fn loses_answer(&self) -> bool {
        let mut script = lock(&self.script);
        let left = script.lose;
        script.lose = left.saturating_sub(1);
        left > 0
    }

    /// Blocks the thread, and with it the server, while it is frozen.
    fn sleep(&self) {
        let mut state = lock(&self.freeze.state);
        while state.0 {
            state.1 = true;
            self.freeze.changed.notify_all();
            state = self.freeze.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.1 = false;
    }
}

/// A running (or killed) server. Dropping it kills it.
pub struct ApiServerHandle {
    /// Where it listens.
    pub addr: SocketAddr,
    server: Arc<Server>,
    thread: Mutex<Option<JoinHandle<()>>>,
    /// Bound to the port and not listening, so that nobody else is given it while the server is down.
    _port: Socket,
}

/// Starts a server over a cluster; it trusts client certificates of `pki`.
pub fn start(cluster: &Cluster, pki: &Pki, options: Options) -> io::Result<ApiServerHandle> {
    let certificate = match options.certificate {
        Some(certificate) => certificate,
        None => pki.server()?,
    };
    let mut roots = RootCertStore::empty();
    roots.add(pki.ca_der()).map_err(io::Error::other)?;
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let verifier = WebPkiClientVerifier::builder_with_provider(roots.into(), provider.clone())
        .build()
        .map_err(io::Error::other)?;
    let mut tls = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(io::Error::other)?
        .with_client_cert_verifier(Arc::new(DeferredClientVerification(verifier.clone())))
        .with_single_cert(vec![certificate.cert_der()], certificate.key_der())
        .map_err(io::Error::other)?;
    tls.alpn_protocols = if options.http2 {
        vec![b"h2".to_vec(), b"http/1.1".to_vec()]
    } else {
        vec![b"http/1.1".to_vec()]
    };
    let port = bind(options.bind)?;
    let addr = port.local_addr()?.as_socket().ok_or(io::ErrorKind::Unsupported)?;
    let listener = listen(addr)?;
    let server = Server {
        name: options.name,
        cluster: cluster.clone(),
        tls: TlsAcceptor::from(Arc::new(tls)),
        verifier,
        log_interval: options.log_interval,
        counters: Counters::default(),
        max_streams: options.max_concurrent_streams.into(),
        ready: true.into(),
        anonymous: false.into(),
        mitigation: true.into(),
        delay_ms: 0.into(),
        compacted: 0.into(),
        hang: watch::Sender::new(false),
        hold_watches: watch::Sender::new(false),
        end_watches: watch::Sender::new(0),
        goaway: watch::Sender::new(0),
        reset: watch::Sender::new(0),
        killed: false.into(),
        script: Mutex::default(),
        freeze: Freeze::default(),
        phase: watch::Sender::new(Phase::Running),
    };
    let server = Arc::new(server);
    let handle = ApiServerHandle { addr, server, thread: Mutex::new(None), _port: port };
    handle.spawn(listener)?;
    Ok(handle)
}

impl ApiServerHandle {
    /// The name given in the options.
    pub fn name(&self) -> &str {
        &self.server.name
    }

    /// What it has counted.
    pub fn counters(&self) -> &Counters {
        &self.server.counters
    }

    /// Whether its thread runs (frozen or not).
    pub fn is_running(&self) -> bool {
        lock(&self.thread).as_ref().is_some_and(|thread| !thread.is_finished())
    }

    /// Dies at once: the port refuses, every connection is reset. Frozen servers die too.
    pub fn kill(&self) {
        self.end(Phase::Killed);
    }

    /// Leaves as kube-apiserver does on SIGTERM: `/readyz` fails, the port closes, GOAWAY to
    /// everyone, watches end, running requests may finish for `grace`. Blocks until it is gone.
    pub fn shutdown(&self, grace: Duration) {
        self.set_ready(false);
        self.end(Phase::Draining(grace));
        self.set_ready(true);
    }

    /// Starts again on the same port after `kill` or `shutdown`.
    pub fn restart(&self) -> io::Result<()> {
        self.kill();
        let started = Instant::now();
        let listener = loop {
            match listen(self.addr) {
                Ok(listener) => break listener,
                Err(_) if started.elapsed() < Duration::from_secs(5) => {
                    std::thread::sleep(Duration::from_millis(10));
                }
                Err(error) => return Err(error),
            }
        };
        self.server.killed.store(false, Relaxed);
        self.server.phase.send_replace(Phase::Running);
        self.spawn(listener)
    }

    /// Freezes, as SIGSTOP does; returns once nothing moves any more.
    pub fn stop(&self) {
        if !self.is_running() {
            return;
        }
        let mut state = lock(&self.server.freeze.state);
        state.0 = true;
        self.server.freeze.bell.send_replace(true);
        while !state.1 {
            let changed = &self.server.freeze.changed;
            state = changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Goes on after `stop`.
    pub fn cont(&self) {
        lock(&self.server.freeze.state).0 = false;
        self.server.freeze.bell.send_replace(false);
        self.server.freeze.changed.notify_all();
    }

    /// What `/readyz` says from now on; everything else goes on.
    pub fn set_ready(&self, ready: bool) {
        self.server.ready.store(ready, Relaxed);
    }

    /// While true, requests (health checks too) get no answer; afterwards they do. PINGs are
    /// answered, watches go on.
    pub fn hang(&self, hang: bool) {
        self.server.hang.send_replace(hang);
    }

    /// While true, watches deliver nothing: a cache that lags. Afterwards they catch up.
    pub fn hold_watches(&self, hold: bool) {
        self.server.hold_watches.send_replace(hold);
    }

    /// Ends every watch cleanly, as a timeout does.
    pub fn end_watches(&self) {
        self.server.end_watches.send_modify(|n| *n += 1);
    }

    /// Sends a graceful GOAWAY on every HTTP/2 connection (`Connection: close` on HTTP/1.1).
    pub fn goaway(&self) {
        self.server.goaway.send_modify(|n| *n += 1);
    }

    /// Resets every connection; new ones work.
    pub fn reset_connections(&self) {
        self.server.reset.send_modify(|n| *n += 1);
    }

    /// Makes every request (health checks too) wait before it is handled.
    pub fn delay(&self, delay: Duration) {
        self.server.delay_ms.store(delay.as_millis() as u64, Relaxed);
    }

    /// Answers the next `count` requests that are no health checks with this; nothing is done.
    pub fn fail_next(&self, count: usize, answer: Answer) {
        lock(&self.server.script).fail = Some((count, answer));
    }

    /// Handles the next `count` requests that are no health checks, and never answers them.
    pub fn lose_next(&self, count: usize) {
        lock(&self.server.script).lose = count;
    }

    /// Asks `hook` about every request first; `None` asks nobody.
    pub fn on_request(&self, hook: Option<Hook>) {
        lock(&self.server.script).hook = hook;
    }

    /// Streams that connections accepted from now on may have open.
    pub fn set_max_streams(&self, max: u32) {
        self.server.max_streams.store(max, Relaxed);
    }

    /// Whether nobody in particular may do everything, instead of getting 403.
    pub fn allow_anonymous(&self, allow: bool) {
        self.server.anonymous.store(allow, Relaxed);
    }

    /// Whether anonymous and 401 requests make it send their HTTP/2 connection away
    /// (`UnauthenticatedHTTP2DOSMitigation`, on as in kube-apiserver).
    pub fn set_mitigation(&self, mitigation: bool) {
        self.server.mitigation.store(mitigation, Relaxed);
    }

    /// Forgets history on this server alone: older watches get 410 here and go on elsewhere.
    pub fn compact(&self) -> u64 {
        let version = self.server.cluster.version();
        self.server.compacted.store(version, Relaxed);
        version
    }

    fn spawn(&self, listener: TcpListener) -> io::Result<()> {
        let server = self.server.clone();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let thread = std::thread::Builder::new()
            .name(self.server.name.clone())
            .spawn(move || runtime.block_on(serve(server, listener)))?;
        *lock(&self.thread) = Some(thread);
        Ok(())
    }

    fn end(&self, phase: Phase) {
        if phase == Phase::Killed {
            self.server.killed.store(true, Relaxed);
        }
        self.server.phase.send_replace(phase);
        self.cont();
        if let Some(thread) = lock(&self.thread).take() {
            // A panic of the server has been printed; the port is closed either way.
            let _ = thread.join();
        }
    }
}

impl Drop for ApiServerHandle {
    fn drop(&mut self) {
        self.kill();
    }
}

/// The server's thread. What it spawned is dropped with its runtime when this returns.
async fn serve(server: Arc<Server>, listener: TcpListener) {
    let Ok(listener) = tokio::net::TcpListener::from_std(listener) else { return };
    let mut listener = Some(listener);
    let mut phase = server.phase.subscribe();
    let mut frozen = server.freeze.bell.subscribe();
    frozen.mark_changed();
    phase.mark_changed();
    let mut deadline = None;
    loop {
        tokio::select! {
            biased;
            _ = phase.changed() => {
                if let Phase::Draining(grace) = *phase.borrow_and_update() {
                    listener = None;
                    server.goaway.send_modify(|n| *n += 1);
                    server.end_watches.send_modify(|n| *n += 1);
                    deadline = Some(Instant::now() + grace);
                }
            }
            _ = frozen.changed() => {
                frozen.mark_unchanged();
                server.sleep();
            }
            accepted = accept(listener.as_ref()) => {
                if let Ok((stream, remote)) = accepted {
                    tokio::spawn(connection::serve(stream, remote, server.clone()));
                }
            }
            () = tokio::time::sleep(Duration::from_millis(10)), if deadline.is_some() => {
                let idle = server.counters.open.load(Relaxed) == 0;
                if idle || deadline.is_some_and(|at| Instant::now() >= at) {
                    return;
                }
            }
        }
        if *phase.borrow() == Phase::Killed {
            return;
        }
    }
}

async fn accept(
    listener: Option<&tokio::net::TcpListener>,
) -> io::Result<(tokio::net::TcpStream, SocketAddr)> {
    match listener {
        Some(listener) => listener.accept().await,
        None => std::future::pending().await,
    }
}

fn listen(addr: SocketAddr) -> io::Result<TcpListener> {
    let socket = bind(addr)?;
    socket.listen(1024)?;
    socket.set_nonblocking(true)?;
    Ok(socket.into())
}

/// A socket on an address, which others that neither listen may share (`SO_REUSEADDR`, socket(7)).
fn bind(addr: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(addr), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_reuse_address(true)?;
    if addr.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    socket.bind(&addr.into())?;
    Ok(socket)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

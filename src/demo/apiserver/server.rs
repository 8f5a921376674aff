//! One apiserver of a demo cluster: its thread, and the handle that injects faults.
//!
//! Each server is an OS thread with a single-threaded runtime. So a test can freeze it as SIGSTOP does
//! (the kernel still acknowledges, the server does not answer) and kill it as SIGKILL does (every socket
//! is reset at once), inside the process of the test.

use crate::demo::apiserver::cluster::Cluster;
use crate::demo::apiserver::connection;
use crate::demo::apiserver::state::{
    Counters, Freeze, Phase, RequestHook, ScriptedResponse, ServerState,
};
use crate::demo::lock;
use crate::demo::pki::{Issued, Pki};
use crate::net::tls::serving::DeferredClientVerification;
use rustls::RootCertStore;
use rustls::server::WebPkiClientVerifier;
use socket2::{Domain, Protocol, Socket, Type};
use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::sync::watch;
use tokio_rustls::TlsAcceptor;

/// Settings of a server.
pub struct Options {
    /// The name in audit records.
    pub name: String,
    /// The address to listen on; port 0 takes a free port, which `restart` keeps.
    pub bind: SocketAddr,
    /// `SETTINGS_MAX_CONCURRENT_STREAMS`; kube-apiserver sends 100.
    pub max_concurrent_streams: u32,
    /// Offers HTTP/2 by ALPN.
    pub http2: bool,
    /// The serving certificate; the default is issued for loopback.
    pub certificate: Option<Issued>,
    /// Time between two lines of a followed log.
    pub log_interval: Duration,
}

impl Options {
    /// Settings like kube-apiserver's, on a free port of 127.0.0.1.
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

/// Handle of a running or killed server. Dropping it kills the server.
pub struct ApiServerHandle {
    /// The address it listens on.
    pub addr: SocketAddr,
    server: Arc<ServerState>,
    thread: Mutex<Option<JoinHandle<()>>>,
    /// Bound but not listening: reserves the port while the server is down.
    _port: Socket,
}

/// Starts a server for `cluster` that accepts client certificates issued by `pki`.
///
/// # Errors
/// The address cannot be bound, or the certificate cannot be used.
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
    let server = ServerState {
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

    /// Counters since the server was created.
    pub fn counters(&self) -> &Counters {
        &self.server.counters
    }

    /// Whether its thread exists, frozen or not.
    pub fn is_running(&self) -> bool {
        lock(&self.thread).as_ref().is_some_and(|thread| !thread.is_finished())
    }

    /// Kills the server as SIGKILL does: the port refuses connections and every connection is reset.
    pub fn kill(&self) {
        self.end(Phase::Killed);
    }

    /// Shuts down as kube-apiserver does on SIGTERM: `/readyz` fails, the port closes, every connection
    /// gets GOAWAY, watches end, running requests may finish for `grace`. Blocks until the thread ended.
    pub fn shutdown(&self, grace: Duration) {
        self.set_ready(false);
        self.end(Phase::Draining(grace));
        self.set_ready(true);
    }

    /// Starts the server again on the same port after `kill` or `shutdown`.
    ///
    /// # Errors
    /// The port cannot be bound within 5 s.
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

    /// Freezes the server as SIGSTOP does; returns when its thread is blocked.
    pub fn stop(&self) {
        if !self.is_running() {
            return;
        }
        self.server.freeze.freeze();
    }

    /// Resumes the server after `stop`, as SIGCONT does.
    pub fn cont(&self) {
        self.server.freeze.thaw();
    }

    /// Sets the result of `/readyz`; nothing else changes.
    pub fn set_ready(&self, ready: bool) {
        self.server.ready.store(ready, Relaxed);
    }

    /// While true, new requests, health checks included, wait. PINGs are answered and watches continue.
    pub fn hang(&self, hang: bool) {
        self.server.hang.send_replace(hang);
    }

    /// While true, watches deliver nothing, as a lagging watch cache; afterwards they catch up.
    pub fn hold_watches(&self, hold: bool) {
        self.server.hold_watches.send_replace(hold);
    }

    /// Ends every watch cleanly, as its timeout does.
    pub fn end_watches(&self) {
        self.server.end_watches.send_modify(|n| *n += 1);
    }

    /// Sends a graceful GOAWAY on every HTTP/2 connection (`Connection: close` on HTTP/1.1).
    pub fn goaway(&self) {
        self.server.goaway.send_modify(|n| *n += 1);
    }

    /// Resets every connection; new connections work.
    pub fn reset_connections(&self) {
        self.server.reset.send_modify(|n| *n += 1);
    }

    /// Delays every request, health checks included, before it is handled.
    pub fn delay(&self, delay: Duration) {
        self.server.delay_ms.store(delay.as_millis() as u64, Relaxed);
    }

    /// Sends `response` to the next `count` requests that are not health checks, without handling them.
    pub fn fail_next(&self, count: usize, response: ScriptedResponse) {
        lock(&self.server.script).fail = Some((count, response));
    }

    /// Handles the next `count` requests that are not health checks without ever responding.
    pub fn lose_next(&self, count: usize) {
        lock(&self.server.script).lose = count;
    }

    /// Sets or removes the hook that runs before each request.
    pub fn on_request(&self, hook: Option<RequestHook>) {
        lock(&self.server.script).hook = hook;
    }

    /// Sets `SETTINGS_MAX_CONCURRENT_STREAMS` of connections accepted from now on.
    pub fn set_max_streams(&self, max: u32) {
        self.server.max_streams.store(max, Relaxed);
    }

    /// Authorizes `system:anonymous` for everything instead of answering 403.
    pub fn allow_anonymous(&self, allow: bool) {
        self.server.anonymous.store(allow, Relaxed);
    }

    /// Whether an anonymous or 401 request gets its HTTP/2 connection a GOAWAY
    /// (`UnauthenticatedHTTP2DOSMitigation`; on by default, as in kube-apiserver).
    pub fn set_mitigation(&self, mitigation: bool) {
        self.server.mitigation.store(mitigation, Relaxed);
    }

    /// Drops the watch history of this server only: older watches get 410 here and succeed elsewhere.
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
            // A panic was printed by its thread; the port is closed in any case.
            let _ = thread.join();
        }
    }
}

impl Drop for ApiServerHandle {
    fn drop(&mut self) {
        self.kill();
    }
}

/// The server's main loop. Its tasks are dropped with the runtime when it returns.
async fn serve(server: Arc<ServerState>, listener: TcpListener) {
    let Ok(listener) = tokio::net::TcpListener::from_std(listener) else { return };
    let mut listener = Some(listener);
    let mut phase = server.phase.subscribe();
    let mut frozen = server.freeze.requested.subscribe();
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
                server.freeze.block_while_requested();
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

/// A bound socket; `SO_REUSEADDR` lets another socket bind while neither listens (socket(7)).
fn bind(addr: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(addr), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_reuse_address(true)?;
    if addr.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    socket.bind(&addr.into())?;
    Ok(socket)
}

//! Runs one apiserver of a demo cluster. Its handle injects faults.
//!
//! Each server is an OS thread with a single-threaded runtime. A test can therefore treat the thread as a
//! process: freeze it as SIGSTOP does (the kernel acknowledges packets, the server does not respond) and
//! kill it as SIGKILL does (every socket is reset at once).

use crate::cluster::Cluster;
use crate::connection;
use crate::gateway::{Gateway, Refused};
use crate::lock;
use crate::pki::{Issued, Pki};
use crate::requested_certificate::RequestedCertificate;
use crate::state::{Counters, Faults, Phase, ServerState};
use rustls::RootCertStore;
use rustls::server::WebPkiClientVerifier;
use socket2::{Domain, Protocol, Socket, Type};
use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::watch;
use tokio_rustls::TlsAcceptor;

/// Settings of a server.
pub struct Options {
    /// The name in audit records.
    pub name: String,
    /// The version that it reports, such as `v1.33.0`.
    pub version: String,
    /// The address to listen on. Port 0 selects a free port; `restart` uses the same port again.
    pub bind: SocketAddr,
    /// Whether HTTP/2 is offered by ALPN.
    pub http2: bool,
    /// Whether watches that begin with all objects are compressed for clients that accept gzip.
    pub compresses_watch_lists: bool,
    /// The serving certificate; by default one is issued for loopback.
    pub certificate: Option<Issued>,
    /// What forwards the requests to it.
    pub gateway: Gateway,
}

impl Options {
    /// Settings like kube-apiserver's, on a free port of 127.0.0.1.
    pub fn named(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            version: "v1.33.0-demo".to_owned(),
            bind: (Ipv4Addr::LOCALHOST, 0).into(),
            http2: true,
            compresses_watch_lists: true,
            certificate: None,
            gateway: Gateway::default(),
        }
    }
}

/// Handle of a running or killed server. Dropping it kills the server.
pub struct ApiServerHandle {
    /// The address it listens on.
    pub addr: SocketAddr,
    server: Arc<ServerState>,
    thread: Mutex<Option<JoinHandle<()>>>,
    /// Sends `Freeze` to the current thread.
    freeze: Mutex<Option<UnboundedSender<Freeze>>>,
    /// Present while the server is frozen. Dropping it resumes the thread.
    frozen: Mutex<Option<mpsc::Sender<()>>>,
    /// Reserves the port while the server is down: the socket is bound and does not listen.
    _port: Socket,
}

/// Makes the server's thread block, as SIGSTOP stops a process.
struct Freeze {
    /// The thread drops it right before it blocks.
    running: mpsc::Sender<()>,
    /// The thread blocks until the handle drops the sender.
    frozen: mpsc::Receiver<()>,
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
        .with_client_cert_verifier(Arc::new(RequestedCertificate(verifier.clone())))
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
        gateway: options.gateway,
        refused: Refused::default(),
        compresses_watch_lists: options.compresses_watch_lists,
        version: Mutex::new(options.version),
        cluster: cluster.clone(),
        tls: TlsAcceptor::from(Arc::new(tls)),
        verifier,
        counters: Counters::default(),
        faults: watch::Sender::default(),
        compacted: 0.into(),
        end_watches: watch::Sender::default(),
        goaway: watch::Sender::default(),
        reset: watch::Sender::default(),
        phase: watch::Sender::new(Phase::Running),
    };
    let server = Arc::new(server);
    let handle = ApiServerHandle {
        addr,
        server,
        thread: Mutex::default(),
        freeze: Mutex::default(),
        frozen: Mutex::default(),
        _port: port,
    };
    handle.spawn(listener)?;
    Ok(handle)
}

impl ApiServerHandle {
    /// The name given in the options.
    pub fn name(&self) -> &str {
        &self.server.name
    }

    /// The requests that its gateway did not forward: method, host and target of each.
    pub fn refused_by_gateway(&self) -> Vec<String> {
        self.server.refused.all()
    }

    /// Counters since the server was created.
    pub fn counters(&self) -> &Counters {
        &self.server.counters
    }

    /// Whether its thread exists, even if it is frozen.
    pub fn is_running(&self) -> bool {
        lock(&self.thread).as_ref().is_some_and(|thread| !thread.is_finished())
    }

    /// Changes the version that it reports, for a server that is started again after an upgrade.
    pub fn set_version(&self, version: &str) {
        version.clone_into(&mut lock(&self.server.version));
    }

    /// Kills the server as SIGKILL does: the port refuses connections and every connection is reset.
    pub fn kill(&self) {
        self.end(Phase::Killed);
    }

    /// Shuts down as kube-apiserver does on SIGTERM: `/readyz` fails, the port closes, every connection
    /// gets GOAWAY, watches end, and requests in flight may finish within `grace`. Blocks until the thread
    /// has ended.
    pub fn shutdown(&self, grace: Duration) {
        self.set_faults(|faults| faults.unready = true);
        self.end(Phase::Draining(grace));
        self.set_faults(|faults| faults.unready = false);
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
        self.server.phase.send_replace(Phase::Running);
        self.spawn(listener)
    }

    /// Freezes the server as SIGSTOP does; returns when its thread is blocked.
    pub fn stop(&self) {
        let mut frozen = lock(&self.frozen);
        if frozen.is_none()
            && let Some(freeze) = &*lock(&self.freeze)
        {
            let (running, wait_until_blocked) = mpsc::channel();
            let (resume, receiver) = mpsc::channel();
            *frozen = Some(resume);
            // Fails if the thread has ended.
            let _ = freeze.send(Freeze { running, frozen: receiver });
            // Fails as soon as the thread blocks or has ended.
            let _ = wait_until_blocked.recv();
        }
    }

    /// Resumes the server after `stop`, as SIGCONT does.
    pub fn cont(&self) {
        lock(&self.frozen).take();
    }

    /// Changes the faults in force.
    pub fn set_faults(&self, change: impl FnOnce(&mut Faults)) {
        self.server.faults.send_modify(change);
    }

    /// Ends every watch cleanly, as its timeout does.
    pub fn end_watches(&self) {
        self.server.end_watches.send_replace(());
    }

    /// Sends a graceful GOAWAY on every HTTP/2 connection (`Connection: close` on HTTP/1.1).
    pub fn goaway(&self) {
        self.server.goaway.send_replace(());
    }

    /// Resets every connection; new connections work.
    pub fn reset_connections(&self) {
        self.server.reset.send_replace(());
    }

    /// Drops the watch history of this server only: a watch from an older version gets 410 on this server
    /// and succeeds on the others. Returns the current version.
    pub fn compact(&self) -> u64 {
        let version = self.server.cluster.version();
        self.server.compacted.store(version, Relaxed);
        version
    }

    fn spawn(&self, listener: TcpListener) -> io::Result<()> {
        let server = self.server.clone();
        let (sender, freeze) = unbounded_channel();
        *lock(&self.freeze) = Some(sender);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let thread = std::thread::Builder::new()
            .name(self.server.name.clone())
            .spawn(move || runtime.block_on(serve(server, listener, freeze)))?;
        *lock(&self.thread) = Some(thread);
        Ok(())
    }

    fn end(&self, phase: Phase) {
        self.server.phase.send_replace(phase);
        self.cont();
        if let Some(thread) = lock(&self.thread).take() {
            // The thread has printed its panic, if it had one.
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
async fn serve(
    server: Arc<ServerState>,
    listener: TcpListener,
    mut freeze: UnboundedReceiver<Freeze>,
) {
    let Ok(listener) = tokio::net::TcpListener::from_std(listener) else { return };
    let mut listener = Some(listener);
    let mut phase = server.phase.subscribe();
    phase.mark_changed();
    let mut deadline = None;
    loop {
        tokio::select! {
            biased;
            _ = phase.changed() => {
                if let Phase::Draining(grace) = *phase.borrow_and_update() {
                    listener = None;
                    server.goaway.send_replace(());
                    server.end_watches.send_replace(());
                    deadline = Some(Instant::now() + grace);
                }
            }
            Some(Freeze { running, frozen }) = freeze.recv() => {
                drop(running);
                let _ = frozen.recv();
            }
            accepted = accept(listener.as_ref()) => {
                if let Ok((stream, _)) = accepted {
                    tokio::spawn(connection::serve(stream, server.clone()));
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

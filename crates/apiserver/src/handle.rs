//! Runs an apiserver on a thread. Its handle injects faults.
//!
//! Each server is an OS thread with a single-threaded runtime. A test can therefore treat the thread as a
//! process: freeze it as SIGSTOP does (the kernel acknowledges packets, the server does not respond) and
//! kill it as SIGKILL does (every socket is reset at once).

use crate::cluster::Cluster;
use crate::lock;
use crate::pki::Pki;
use crate::server::{ApiServer, Options};
use crate::state::Phase;
use jackstay_sys::sockets::stream::DetachedListener;
use socket2::{Domain, Protocol, Socket, Type};
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::ops::Deref;
use std::sync::{Mutex, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::task::LocalSet;

/// Handle of a running or killed server. Dropping it kills the server.
pub struct ApiServerHandle {
    /// The address it listens on.
    pub addr: SocketAddr,
    server: ApiServer,
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
    let bind_to = options.bind;
    let server = ApiServer::new(cluster, pki, options)?;
    let port = bind(bind_to)?;
    let addr = port.local_addr()?.as_socket().ok_or(io::ErrorKind::Unsupported)?;
    let listener = listen(addr)?;
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

impl Deref for ApiServerHandle {
    type Target = ApiServer;

    fn deref(&self) -> &ApiServer {
        &self.server
    }
}

impl ApiServerHandle {
    /// See [`ApiServer::refused_by_gateway`].
    pub fn refused_by_gateway(&self) -> Vec<String> {
        self.server.refused_by_gateway()
    }

    /// See [`ApiServer::end_watches`].
    pub fn end_watches(&self) {
        self.server.end_watches();
    }

    /// See [`ApiServer::reset_connections`].
    pub fn reset_connections(&self) {
        self.server.reset_connections();
    }

    /// Whether its thread exists, even if it is frozen.
    pub fn is_running(&self) -> bool {
        lock(&self.thread).as_ref().is_some_and(|thread| !thread.is_finished())
    }

    /// Kills the server as SIGKILL does: the port refuses connections and every connection is reset.
    pub fn kill(&self) {
        self.end(Phase::Killed);
    }

    /// Shuts down as kube-apiserver does on SIGTERM, see [`ApiServer::drain`]. Blocks until the thread has ended.
    pub fn shutdown(&self, grace: Duration) {
        self.end(Phase::Draining(grace));
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

    fn spawn(&self, listener: TcpListener) -> io::Result<()> {
        self.server.prepare();
        let (sender, freeze) = unbounded_channel();
        *lock(&self.freeze) = Some(sender);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let server = self.server.clone();
        let thread = std::thread::Builder::new()
            .name(self.server.name().to_owned())
            .spawn(move || runtime.block_on(run(server, listener, freeze)))?;
        *lock(&self.thread) = Some(thread);
        Ok(())
    }

    fn end(&self, phase: Phase) {
        self.server.end(phase);
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

/// The process that the thread stands for. Its tasks are dropped when it returns.
async fn run(server: ApiServer, listener: TcpListener, mut freeze: UnboundedReceiver<Freeze>) {
    let Ok(listener) = DetachedListener::Kernel(listener).attach() else { return };
    let block_when_frozen = async {
        while let Some(Freeze { running, frozen }) = freeze.recv().await {
            drop(running);
            // Fails when the handle resumes the thread.
            let _ = frozen.recv();
        }
        // A later thread has replaced the sender.
        std::future::pending::<()>().await;
    };
    let serve_until_the_end = async {
        tokio::select! {
            biased;
            () = block_when_frozen => {}
            () = server.serve_prepared(listener) => {}
        }
    };
    LocalSet::new().run_until(serve_until_the_end).await;
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

//! A TCP load balancer: each connection reaches the next of its backends. Like an external one it does not look at what a
//! backend answers.

use std::collections::HashMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;

/// See the module documentation. Dropping it ends its connections.
pub struct Balancer {
    pub address: SocketAddr,
    shared: Arc<Shared>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    backends: Mutex<Vec<SocketAddr>>,
    /// Number of connections that were accepted.
    accepted: AtomicUsize,
    /// Number of open connections to each backend, if new ones reach the backend with the fewest.
    open: Option<Mutex<HashMap<SocketAddr, usize>>>,
}

impl Shared {
    /// The backend of the next connection.
    fn next(&self) -> SocketAddr {
        let number = self.accepted.fetch_add(1, Relaxed);
        let backends = self.backends.lock().unwrap();
        let Some(open) = &self.open else { return backends[number % backends.len()] };
        let mut open = open.lock().unwrap();
        let of = |backend: &&SocketAddr| open.get(*backend).copied().unwrap_or_default();
        let least = *backends.iter().min_by_key(of).unwrap();
        *open.entry(least).or_default() += 1;
        least
    }

    fn ended(&self, backend: SocketAddr) {
        if let Some(open) = &self.open {
            *open.lock().unwrap().get_mut(&backend).unwrap() -= 1;
        }
    }
}

impl Balancer {
    /// New connections reach the backends in turn.
    pub fn start(backends: &[SocketAddr]) -> Self {
        Self::create(backends, None)
    }

    /// New connections reach the backend with the fewest open ones (`leastconn`). Each backend has this number of
    /// connections of others.
    pub fn least_connections(backends: &[(SocketAddr, usize)]) -> Self {
        let open = Mutex::new(backends.iter().copied().collect());
        let backends: Vec<_> = backends.iter().map(|(backend, _)| *backend).collect();
        Self::create(&backends, Some(open))
    }

    fn create(backends: &[SocketAddr], open: Option<Mutex<HashMap<SocketAddr, usize>>>) -> Self {
        let socket = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        socket.set_nonblocking(true).unwrap();
        let address = socket.local_addr().unwrap();
        let backends = Mutex::new(backends.to_vec());
        let shared = Arc::new(Shared { backends, accepted: AtomicUsize::new(0), open });
        let (stop, stopped) = oneshot::channel();
        let balancer = Arc::clone(&shared);
        let thread = std::thread::spawn(move || {
            let runtime =
                tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async move {
                tokio::select! {
                    () = accept(TcpListener::from_std(socket).unwrap(), balancer) => {}
                    _ = stopped => {}
                }
            });
        });
        Self { address, shared, stop: Some(stop), thread: Some(thread) }
    }

    /// New connections reach these backends.
    pub fn set_backends(&self, backends: &[SocketAddr]) {
        *self.shared.backends.lock().unwrap() = backends.to_vec();
    }

    pub fn accepted(&self) -> usize {
        self.shared.accepted.load(Relaxed)
    }
}

impl Drop for Balancer {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

async fn accept(listener: TcpListener, shared: Arc<Shared>) {
    loop {
        let Ok((mut client, _)) = listener.accept().await else { continue };
        let backend = shared.next();
        let shared = Arc::clone(&shared);
        tokio::spawn(async move {
            if let Ok(mut server) = TcpStream::connect(backend).await {
                // An error of either side ends both.
                let _ = copy_bidirectional(&mut client, &mut server).await;
            }
            shared.ended(backend);
        });
    }
}

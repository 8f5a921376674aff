//! A relay whose established flows can fall silent while new ones work: what a load balancer does
//! that forgot its flow table.
//!
//! A silent flow is one that nobody reads: the kernel still acknowledges until its buffers are full.
//! A lost flow goes further: a socket filter drops every packet before TCP sees it, so nothing is
//! acknowledged either, and it needs no root. Bytes are held back, never lost: a healed flow goes on
//! where it was.

use socket2::{SockFilter, SockRef, Socket};
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// The filter program `ret #0` (`BPF_RET | BPF_K`): of every packet, keep no byte.
const DROP_ALL: SockFilter = SockFilter::new(0x06, 0, 0, 0);

/// Which way of a flow is silent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// What the client sends.
    ToServer,
    /// What the server sends.
    ToClient,
    /// Both.
    Both,
}

/// What a relayed connection may do now.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Mode {
    hold_to_server: bool,
    hold_to_client: bool,
    reset: bool,
}

/// A flow as the relay sees it.
#[derive(Debug, Clone)]
pub struct Flow {
    /// Unique within the relay, growing.
    pub id: u64,
    /// The client's address.
    pub client: SocketAddr,
    /// The relay's own address towards the server, as the server's audit shows it.
    pub local: SocketAddr,
    /// Bytes passed on to the server.
    pub to_server: u64,
    /// Bytes passed on to the client.
    pub to_client: u64,
    /// Whether a direction is silent.
    pub silent: bool,
}

struct Entry {
    id: u64,
    client: SocketAddr,
    local: SocketAddr,
    passed: Arc<[AtomicU64; 2]>,
    mode: watch::Sender<Mode>,
    /// Its sockets once more, for filters.
    sockets: [Socket; 2],
}

#[derive(Default)]
struct Shared {
    flows: Mutex<Vec<Arc<Entry>>>,
    next: AtomicU64,
    /// What flows start with.
    initial: Mutex<Mode>,
}

/// A relay in front of a server, on a thread of its own. Dropping it resets its flows.
pub struct FaultyRelay {
    /// Where clients connect.
    pub addr: SocketAddr,
    shared: Arc<Shared>,
    stop: watch::Sender<bool>,
    thread: Option<JoinHandle<()>>,
}

impl FaultyRelay {
    /// Relays a free port of 127.0.0.1 to a server.
    pub fn start(target: SocketAddr) -> io::Result<Self> {
        let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        listener.set_nonblocking(true)?;
        let addr = listener.local_addr()?;
        let shared = Arc::<Shared>::default();
        let (stop, stopped) = watch::channel(false);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let relay = relay(listener, target, shared.clone(), stopped);
        let thread = std::thread::Builder::new()
            .name("hole".to_owned())
            .spawn(move || runtime.block_on(relay))?;
        Ok(Self { addr, shared, stop, thread: Some(thread) })
    }

    /// The flows there are.
    pub fn flows(&self) -> Vec<Flow> {
        lock(&self.shared.flows)
            .iter()
            .map(|entry| {
                let mode = *entry.mode.borrow();
                Flow {
                    id: entry.id,
                    client: entry.client,
                    local: entry.local,
                    to_server: entry.passed[0].load(Relaxed),
                    to_client: entry.passed[1].load(Relaxed),
                    silent: mode.hold_to_server || mode.hold_to_client,
                }
            })
            .collect()
    }

    /// Silences every flow there is; new ones work. Returns how many.
    pub fn silence_all(&self, direction: Direction) -> usize {
        self.change(|_| true, |mode| mode.silence(direction))
    }

    /// Drops every packet of every flow there is, unacknowledged; new flows work. Returns how many.
    ///
    /// # Errors
    /// The kernel takes no socket filter; the flows are silent all the same.
    pub fn lose_all(&self) -> io::Result<usize> {
        let lost = self.silence_all(Direction::Both);
        for entry in lock(&self.shared.flows).iter() {
            for socket in &entry.sockets {
                socket.attach_filter(&[DROP_ALL])?;
            }
        }
        Ok(lost)
    }

    /// Silences one flow; false if there is no such flow.
    pub fn silence(&self, id: u64, direction: Direction) -> bool {
        self.change(|entry| entry.id == id, |mode| mode.silence(direction)) == 1
    }

    /// Silences new flows as well from now on (a server behind a cut cable), or no longer.
    pub fn silence_new(&self, silent: bool) {
        let mut initial = lock(&self.shared.initial);
        (initial.hold_to_server, initial.hold_to_client) = (silent, silent);
    }

    /// Resets new connections at once (a port that refuses), or no longer.
    pub fn refuse_new(&self, refuse: bool) {
        lock(&self.shared.initial).reset = refuse;
    }

    /// Lets every flow speak again; what was held back arrives now.
    pub fn heal(&self) {
        *lock(&self.shared.initial) = Mode::default();
        for socket in lock(&self.shared.flows).iter().flat_map(|entry| &entry.sockets) {
            // It fails where there is none.
            let _ = socket.detach_filter();
        }
        self.change(|_| true, |mode| *mode = Mode { reset: mode.reset, ..Mode::default() });
    }

    /// Resets every flow on both sides. Returns how many.
    pub fn reset_all(&self) -> usize {
        self.change(|_| true, |mode| mode.reset = true)
    }

    fn change(&self, which: impl Fn(&Entry) -> bool, how: impl Fn(&mut Mode)) -> usize {
        let flows = lock(&self.shared.flows);
        let chosen = flows.iter().filter(|entry| which(entry));
        chosen.map(|entry| entry.mode.send_modify(&how)).count()
    }
}

impl Drop for FaultyRelay {
    fn drop(&mut self) {
        self.stop.send_replace(true);
        if let Some(thread) = self.thread.take() {
            // A panic has been printed; there is nothing more to end.
            let _ = thread.join();
        }
    }
}

impl Mode {
    fn silence(&mut self, direction: Direction) {
        self.hold_to_server |= direction != Direction::ToClient;
        self.hold_to_client |= direction != Direction::ToServer;
    }
}

async fn relay(
    listener: std::net::TcpListener,
    target: SocketAddr,
    shared: Arc<Shared>,
    mut stopped: watch::Receiver<bool>,
) {
    let Ok(listener) = TcpListener::from_std(listener) else { return };
    loop {
        tokio::select! {
            _ = stopped.changed() => return,
            accepted = listener.accept() => {
                if let Ok((stream, client)) = accepted {
                    tokio::spawn(flow(stream, client, target, shared.clone()));
                }
            }
        }
    }
}

/// One flow, from its start to its end.
async fn flow(client_side: TcpStream, client: SocketAddr, target: SocketAddr, shared: Arc<Shared>) {
    reset_on_drop(&client_side, true);
    let initial = *lock(&shared.initial);
    if initial.reset {
        return;
    }
    let Ok(server_side) = TcpStream::connect(target).await else { return };
    let Ok(local) = server_side.local_addr() else { return };
    reset_on_drop(&server_side, true);
    let _ = (client_side.set_nodelay(true), server_side.set_nodelay(true));
    let again = |stream| SockRef::from(stream).try_clone();
    let (Ok(first), Ok(second)) = (again(&client_side), again(&server_side)) else { return };
    let entry = Arc::new(Entry {
        id: shared.next.fetch_add(1, Relaxed),
        client,
        local,
        passed: Arc::default(),
        mode: watch::Sender::new(initial),
        sockets: [first, second],
    });
    lock(&shared.flows).push(entry.clone());
    let mut mode = entry.mode.subscribe();
    let (from_client, to_client) = client_side.into_split();
    let (from_server, to_server) = server_side.into_split();
    let up = copy(from_client, to_server, &entry, 0, |m| m.hold_to_server);
    let down = copy(from_server, to_client, &entry, 1, |m| m.hold_to_client);
    tokio::select! {
        // Errors end a flow in both directions, as a reset does.
        ended = async { tokio::try_join!(up, down) } => {
            if let Ok((client_side, server_side)) = ended {
                // Both ends said their last word: an orderly close.
                reset_on_drop(client_side.as_ref(), false);
                reset_on_drop(server_side.as_ref(), false);
            }
        }
        _ = mode.wait_for(|mode| mode.reset) => {}
    }
    lock(&shared.flows).retain(|e| e.id != entry.id);
}

/// Copies one direction until its end, and shuts the other side's half.
async fn copy(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    entry: &Entry,
    way: usize,
    held: fn(&Mode) -> bool,
) -> io::Result<OwnedWriteHalf> {
    let mut mode = entry.mode.subscribe();
    let mut buffer = vec![0; 64 << 10];
    loop {
        let free = |mode: &Mode| !held(mode);
        mode.wait_for(free).await.map_err(io::Error::other)?;
        let size = tokio::select! {
            biased;
            _ = mode.changed() => continue,
            size = from.read(&mut buffer) => size?,
        };
        mode.wait_for(free).await.map_err(io::Error::other)?;
        if size == 0 {
            to.shutdown().await?;
            return Ok(to);
        }
        to.write_all(&buffer[..size]).await?;
        entry.passed[way].fetch_add(size as u64, Relaxed);
    }
}

fn reset_on_drop(stream: &TcpStream, reset: bool) {
    let linger = reset.then_some(Duration::ZERO);
    // It fails only on a socket that is gone already.
    let _ = SockRef::from(stream).set_linger(linger);
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

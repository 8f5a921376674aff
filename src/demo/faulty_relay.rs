//! A TCP relay whose established flows can stop while new flows work, as with a load balancer that lost
//! its flow table.
//!
//! * A silent flow is not read: the kernel acknowledges until its receive buffer is full.
//! * A lost flow drops every packet in a socket filter before TCP sees it, so nothing is acknowledged. The
//!   filter needs no root.
//!
//! Bytes are delayed, not lost: a healed flow continues where it stopped.

use crate::demo::lock;
use socket2::{SockFilter, SockRef, Socket};
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// The filter program `ret #0` (`BPF_RET | BPF_K`): accept zero bytes of each packet.
const DROP_ALL: SockFilter = SockFilter::new(0x06, 0, 0, 0);

/// Direction of a flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// From the client to the server.
    ToServer,
    /// From the server to the client.
    ToClient,
    /// Both directions.
    Both,
}

/// Faults in force on a flow.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Mode {
    hold_to_server: bool,
    hold_to_client: bool,
    reset: bool,
}

/// State of a relayed flow.
#[derive(Debug, Clone)]
pub struct Flow {
    /// Unique within the relay, increasing.
    pub id: u64,
    /// The client's address.
    pub client: SocketAddr,
    /// The relay's local address towards the server: `remote` in the server's audit.
    pub local: SocketAddr,
    /// Bytes passed on to the server.
    pub to_server: u64,
    /// Bytes passed on to the client.
    pub to_client: u64,
    /// A direction is silent.
    pub silent: bool,
}

struct Entry {
    id: u64,
    client: SocketAddr,
    local: SocketAddr,
    passed: Arc<[AtomicU64; 2]>,
    mode: watch::Sender<Mode>,
    /// Duplicates of its sockets, for filters.
    sockets: [Socket; 2],
}

#[derive(Default)]
struct Shared {
    flows: Mutex<Vec<Arc<Entry>>>,
    next: AtomicU64,
    /// Mode of new flows.
    initial: Mutex<Mode>,
}

/// A relay in front of one server, on a thread of its own. Dropping it resets its flows.
pub struct FaultyRelay {
    /// The address that clients connect to.
    pub addr: SocketAddr,
    shared: Arc<Shared>,
    stop: watch::Sender<bool>,
    thread: Option<JoinHandle<()>>,
}

impl FaultyRelay {
    /// Relays a free port of 127.0.0.1 to `target`.
    pub fn start(target: SocketAddr) -> io::Result<Self> {
        let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        listener.set_nonblocking(true)?;
        let addr = listener.local_addr()?;
        let shared = Arc::<Shared>::default();
        let (stop, stopped) = watch::channel(false);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let relay = relay(listener, target, shared.clone(), stopped);
        let thread = std::thread::Builder::new()
            .name("relay".to_owned())
            .spawn(move || runtime.block_on(relay))?;
        Ok(Self { addr, shared, stop, thread: Some(thread) })
    }

    /// The flows that are open.
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
    pub fn drop_all_packets(&self) -> io::Result<usize> {
        let lost = self.silence_all(Direction::Both);
        for entry in lock(&self.shared.flows).iter() {
            for socket in &entry.sockets {
                socket.attach_filter(&[DROP_ALL])?;
            }
        }
        Ok(lost)
    }

    /// Makes one flow silent; false if it does not exist.
    pub fn silence(&self, id: u64, direction: Direction) -> bool {
        self.change(|entry| entry.id == id, |mode| mode.silence(direction)) == 1
    }

    /// Sets whether new flows are silent too, as behind a cut cable.
    pub fn silence_new(&self, silent: bool) {
        let mut initial = lock(&self.shared.initial);
        (initial.hold_to_server, initial.hold_to_client) = (silent, silent);
    }

    /// Sets whether new connections are reset at once, as by a closed port.
    pub fn refuse_new(&self, refuse: bool) {
        lock(&self.shared.initial).reset = refuse;
    }

    /// Ends all faults; delayed bytes are delivered.
    pub fn clear_faults(&self) {
        *lock(&self.shared.initial) = Mode::default();
        for socket in lock(&self.shared.flows).iter().flat_map(|entry| &entry.sockets) {
            // It fails where no filter is attached.
            let _ = socket.detach_filter();
        }
        self.change(|_| true, |mode| *mode = Mode { reset: mode.reset, ..Mode::default() });
    }

    /// Resets every flow on both sides; returns their number.
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
            // A panic was printed by the thread.
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

/// Relays one flow until its end.
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
    let duplicate = |stream| SockRef::from(stream).try_clone();
    let (Ok(first), Ok(second)) = (duplicate(&client_side), duplicate(&server_side)) else {
        return;
    };
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
        // An error ends both directions.
        ended = async { tokio::try_join!(up, down) } => {
            if let Ok((client_side, server_side)) = ended {
                // Both sides sent FIN: close without RST.
                reset_on_drop(client_side.as_ref(), false);
                reset_on_drop(server_side.as_ref(), false);
            }
        }
        _ = mode.wait_for(|mode| mode.reset) => {}
    }
    lock(&shared.flows).retain(|e| e.id != entry.id);
}

/// Copies one direction until FIN, and passes the FIN on.
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
    // It fails only on a closed socket.
    let _ = SockRef::from(stream).set_linger(linger);
}

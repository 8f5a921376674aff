//! A TCP relay whose established flows can stop while new flows work, as behind a load balancer that lost
//! its flow table.
//!
//! * The relay does not read a silent flow. The kernel acknowledges packets until its receive buffer is full.
//! * For a flow whose packets are dropped, a socket filter drops each packet before TCP sees it, so nothing
//!   is acknowledged. Attaching the filter needs no privilege.
//!
//! Bytes are delayed, not lost: when the faults are cleared, a flow continues where it stopped.

use crate::lock;
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

/// The directions that a fault affects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// From the server to the client.
    ToClient,
    /// Both directions.
    Both,
}

/// Faults in force on a flow.
#[derive(Debug, Clone, Copy, Default)]
struct FlowFaults {
    /// Nothing is read from the client.
    silent_to_server: bool,
    /// Nothing is read from the server.
    silent_to_client: bool,
    reset: bool,
}

/// State of a relayed flow.
#[derive(Debug, Clone)]
pub struct Flow {
    /// Unique within the relay, increasing.
    pub id: u64,
    /// Bytes relayed to the client.
    pub bytes_to_client: u64,
    /// Whether at least one direction is silent.
    pub silent: bool,
}

struct RelayedFlow {
    id: u64,
    bytes_to_client: AtomicU64,
    faults: watch::Sender<FlowFaults>,
    /// Duplicates of its two sockets, to which filters are attached.
    sockets: [Socket; 2],
}

#[derive(Default)]
struct Shared {
    flows: Mutex<Vec<Arc<RelayedFlow>>>,
    next_id: AtomicU64,
    new_flow_faults: Mutex<FlowFaults>,
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

    /// The open flows.
    pub fn flows(&self) -> Vec<Flow> {
        let describe = |flow: &Arc<RelayedFlow>| {
            let faults = *flow.faults.borrow();
            Flow {
                id: flow.id,
                bytes_to_client: flow.bytes_to_client.load(Relaxed),
                silent: faults.silent_to_server || faults.silent_to_client,
            }
        };
        lock(&self.shared.flows).iter().map(describe).collect()
    }

    /// Silences every open flow; new flows work. Returns the number of flows.
    pub fn silence_all(&self, direction: Direction) -> usize {
        self.change_all(|faults| {
            faults.silent_to_server |= direction == Direction::Both;
            faults.silent_to_client = true;
        })
    }

    /// Drops every packet of every open flow; new flows work. Returns the number of flows.
    ///
    /// # Errors
    /// The kernel refuses the socket filter. The flows are silent, but their packets are acknowledged.
    pub fn drop_all_packets(&self) -> io::Result<usize> {
        let flows = self.silence_all(Direction::Both);
        for socket in lock(&self.shared.flows).iter().flat_map(|flow| &flow.sockets) {
            socket.attach_filter(&[DROP_ALL])?;
        }
        Ok(flows)
    }

    /// Sets whether new flows are silent too. Their TCP handshake succeeds.
    pub fn silence_new(&self, silent: bool) {
        let mut faults = lock(&self.shared.new_flow_faults);
        (faults.silent_to_server, faults.silent_to_client) = (silent, silent);
    }

    /// Sets whether new connections are reset as soon as they are accepted.
    pub fn refuse_new(&self, refuse: bool) {
        lock(&self.shared.new_flow_faults).reset = refuse;
    }

    /// Ends all faults; delayed bytes are delivered.
    pub fn clear_faults(&self) {
        *lock(&self.shared.new_flow_faults) = FlowFaults::default();
        for socket in lock(&self.shared.flows).iter().flat_map(|flow| &flow.sockets) {
            // It fails if no filter is attached.
            let _ = socket.detach_filter();
        }
        // A reset that was requested before still takes place.
        self.change_all(|faults| {
            *faults = FlowFaults { reset: faults.reset, ..FlowFaults::default() }
        });
    }

    /// Resets every open flow on both sides; returns the number of flows.
    pub fn reset_all(&self) -> usize {
        self.change_all(|faults| faults.reset = true)
    }

    /// Resets the open flow from this client on both sides; returns whether there is one.
    pub fn reset_from(&self, client: SocketAddr) -> bool {
        let is_from = |flow: &&Arc<RelayedFlow>| {
            let peer = flow.sockets[0].peer_addr().ok().and_then(|peer| peer.as_socket());
            peer == Some(client)
        };
        let flows = lock(&self.shared.flows);
        let flow = flows.iter().find(is_from);
        flow.is_some_and(|flow| {
            flow.faults.send_if_modified(|faults| !std::mem::replace(&mut faults.reset, true))
        })
    }

    /// Changes the faults of every open flow; returns the number of flows.
    fn change_all(&self, change: impl Fn(&mut FlowFaults)) -> usize {
        let flows = lock(&self.shared.flows);
        flows.iter().for_each(|flow| flow.faults.send_modify(&change));
        flows.len()
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
                if let Ok((client_side, _)) = accepted {
                    tokio::spawn(relay_flow(client_side, target, shared.clone()));
                }
            }
        }
    }
}

/// Relays one flow until its end.
async fn relay_flow(client_side: TcpStream, target: SocketAddr, shared: Arc<Shared>) {
    set_reset_on_close(&client_side, true);
    let faults = *lock(&shared.new_flow_faults);
    if faults.reset {
        return;
    }
    let Ok(server_side) = TcpStream::connect(target).await else { return };
    set_reset_on_close(&server_side, true);
    let _ = (client_side.set_nodelay(true), server_side.set_nodelay(true));
    let duplicate = |stream| SockRef::from(stream).try_clone();
    let (Ok(first), Ok(second)) = (duplicate(&client_side), duplicate(&server_side)) else {
        return;
    };
    let flow = Arc::new(RelayedFlow {
        id: shared.next_id.fetch_add(1, Relaxed),
        bytes_to_client: AtomicU64::new(0),
        faults: watch::Sender::new(faults),
        sockets: [first, second],
    });
    lock(&shared.flows).push(flow.clone());
    let mut faults = flow.faults.subscribe();
    let (from_client, to_client) = client_side.into_split();
    let (from_server, to_server) = server_side.into_split();
    let up = copy(from_client, to_server, None, faults.clone(), |f| f.silent_to_server);
    let counter = Some(&flow.bytes_to_client);
    let down = copy(from_server, to_client, counter, faults.clone(), |f| f.silent_to_client);
    tokio::select! {
        // An error ends both directions.
        ended = async { tokio::try_join!(up, down) } => {
            if let Ok((client_side, server_side)) = ended {
                // Both sides sent FIN: close without RST.
                set_reset_on_close(client_side.as_ref(), false);
                set_reset_on_close(server_side.as_ref(), false);
            }
        }
        _ = faults.wait_for(|faults| faults.reset) => {}
    }
    lock(&shared.flows).retain(|other| other.id != flow.id);
}

/// Copies one direction until FIN, and relays the FIN.
async fn copy(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    counter: Option<&AtomicU64>,
    mut faults: watch::Receiver<FlowFaults>,
    is_silent: fn(&FlowFaults) -> bool,
) -> io::Result<OwnedWriteHalf> {
    let mut buffer = vec![0; 64 << 10];
    loop {
        let passes = |faults: &FlowFaults| !is_silent(faults);
        faults.wait_for(passes).await.map_err(io::Error::other)?;
        let size = tokio::select! {
            biased;
            _ = faults.changed() => continue,
            size = from.read(&mut buffer) => size?,
        };
        // The flow may have become silent during the read.
        faults.wait_for(passes).await.map_err(io::Error::other)?;
        if size == 0 {
            to.shutdown().await?;
            return Ok(to);
        }
        to.write_all(&buffer[..size]).await?;
        if let Some(counter) = counter {
            counter.fetch_add(size as u64, Relaxed);
        }
    }
}

/// Sets whether closing the socket sends RST or FIN.
fn set_reset_on_close(stream: &TcpStream, reset: bool) {
    let linger = reset.then_some(Duration::ZERO);
    // It fails only on a closed socket.
    let _ = SockRef::from(stream).set_linger(linger);
}

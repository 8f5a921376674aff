//! The surroundings of a case: a client's host and a server's host on simulated sockets, or on the kernel's.

use std::io::{BufRead, BufReader};
use std::net::{Ipv4Addr, SocketAddr};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use jackstay_sim::net::sockets::SocketNetwork;
use jackstay_sim::net::{Link, ProcessId, ProcessState, Side};
use jackstay_sim::shell::process::Process;
use jackstay_sim::shell::runtime;
use jackstay_sys::sockets::connector::Connector;
use jackstay_sys::sockets::listening::listen;
use jackstay_sys::sockets::stream::{TcpListener, TcpStream};
use tokio::io::AsyncWriteExt;
use tokio::task::LocalSet;

use crate::Case;
use crate::figures::Figures;
use crate::relay::Relay;

/// The latency of each link. It is longer than the kernel takes for a packet, and far shorter than every timeout.
pub const LATENCY: Duration = Duration::from_millis(1);
/// The variable with the port of the process of a peer.
const PEER: &str = "JACKSTAY_PEER";
/// What the process of a peer prints when it listens.
const LISTENS: &str = "the peer listens";
/// What a peer sends when it has accepted a connection.
pub const GREETING: &[u8] = b"accepted";

/// See the module.
pub enum Rig {
    Simulated { network: SocketNetwork, server: ProcessId, client: ProcessId },
    Kernel { relay: Arc<Relay>, port: u16 },
}

/// The port of the server on simulated sockets.
const SIMULATED_PORT: u16 = 6443;

impl Rig {
    /// Runs a case on simulated sockets.
    pub fn simulate(case: Case) -> Figures {
        let network = |start| SocketNetwork::new(1, start, 2, 1);
        runtime::run(Duration::from_secs(1), network, |network| async move {
            let (server, client) = (network.add_process(0), network.add_process(1));
            network.change_all_links(|link| *link = default_link());
            let mut figures = Figures::default();
            case(&Self::Simulated { network, server, client }, &mut figures).await;
            figures
        })
    }

    /// Runs a case on the kernel's sockets.
    pub fn run(case: Case, relay: Arc<Relay>, port: u16) -> Figures {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        relay.add_path(port, default_link());
        let mut figures = Figures::default();
        let rig = Self::Kernel { relay, port };
        LocalSet::new().block_on(&runtime, case(&rig, &mut figures));
        figures
    }

    /// The server, as the client sees it.
    pub fn address(&self) -> SocketAddr {
        let port = match self {
            Self::Simulated { .. } => SIMULATED_PORT,
            Self::Kernel { port, .. } => *port,
        };
        SocketAddr::new(SocketNetwork::address_of(0), port)
    }

    /// Listens on the server's host, with the options of jackstay's listeners.
    pub fn listen(&self) -> TcpListener {
        match self {
            Self::Simulated { network, server, .. } => {
                TcpListener::Virtual(network.listen(*server, SIMULATED_PORT).unwrap())
            }
            Self::Kernel { port, .. } => listen_on(*port),
        }
    }

    /// Connects from the client's host, with the options of jackstay's upstream connections.
    pub async fn connect(&self) -> std::io::Result<TcpStream> {
        let connector = match self {
            Self::Simulated { network, client, .. } => Connector::over(network.of_process(*client)),
            Self::Kernel { .. } => Connector::unmarked(),
        };
        connector.connect(self.address()).await
    }

    /// The two ends of a connection.
    pub async fn pair(&self) -> (TcpStream, TcpStream) {
        let listener = self.listen();
        let (client, accepted) = tokio::join!(self.connect(), listener.accept());
        (client.unwrap(), accepted.unwrap().0)
    }

    /// Changes the link from one of the ends.
    pub fn change_link(&self, from: Side, change: impl Fn(&mut Link)) {
        match (self, from) {
            (Self::Simulated { network, .. }, Side::Client) => network.change_links_to(0, change),
            (Self::Simulated { network, .. }, Side::Server) => network.change_links_from(0, change),
            (Self::Kernel { relay, port }, _) => relay.change_link(*port, from, change),
        }
    }

    /// Changes the links in both directions.
    pub fn change_links(&self, change: impl Fn(&mut Link)) {
        self.change_link(Side::Client, &change);
        self.change_link(Side::Server, &change);
    }

    /// Drops all packets of the ends that are named, and no others.
    pub fn drop_packets(&self, of: &[Side]) {
        for side in [Side::Client, Side::Server] {
            self.change_link(side, |link| link.blocked = of.contains(&side));
        }
    }

    /// A device on the path resets the connections whose packets pass.
    pub fn reset_flows(&self) {
        match self {
            Self::Simulated { network, .. } => network.forget_flows(0, [false; 2]),
            Self::Kernel { port, .. } => {
                for direction in ["sport", "dport"] {
                    let rule = format!(
                        "add table inet flows; add chain inet flows c {{ type filter hook input priority 0; }}; \
                         add rule inet flows c tcp {direction} {port} tcp flags & rst == 0 reject with tcp reset"
                    );
                    assert!(Command::new("nft").arg(rule).status().unwrap().success());
                }
            }
        }
    }

    /// The packets that both ends have sent.
    pub fn packets(&self) -> u64 {
        match self {
            Self::Simulated { network, .. } => network.packets(),
            Self::Kernel { relay, port } => relay.packets(*port),
        }
    }

    /// Starts a process on the server's host that accepts connections, greets and reads nothing.
    pub fn start_peer(&self) -> Peer<'_> {
        let what = match self {
            Self::Simulated { .. } => PeerKind::Simulated(Process::start(serve(self.listen()))),
            Self::Kernel { port, .. } => PeerKind::Kernel(start_peer_process(*port)),
        };
        Peer { rig: self, what }
    }
}

fn default_link() -> Link {
    let mut link = Link::local_network();
    (link.latency, link.jitter) = (LATENCY, Duration::ZERO);
    link
}

fn listen_on(port: u16) -> TcpListener {
    let listener = listen((Ipv4Addr::UNSPECIFIED, port).into(), false).unwrap();
    TcpListener::Kernel(tokio::net::TcpListener::from_std(listener).unwrap())
}

/// A process on the server's host.
pub struct Peer<'a> {
    rig: &'a Rig,
    what: PeerKind,
}

enum PeerKind {
    Simulated(Process),
    Kernel(Child),
}

impl Peer<'_> {
    /// SIGSTOP.
    pub fn stop(&mut self) {
        match &mut self.what {
            PeerKind::Simulated(process) => process.stop(),
            PeerKind::Kernel(process) => signal("STOP", process),
        }
        self.set_state(ProcessState::Stopped);
    }

    /// SIGKILL.
    pub fn kill(&mut self) {
        // The kernel of a simulated process closes its sockets before the process could.
        self.set_state(ProcessState::Dead);
        match &mut self.what {
            PeerKind::Simulated(process) => process.kill(),
            PeerKind::Kernel(process) => process.kill().unwrap(),
        }
    }

    fn set_state(&self, state: ProcessState) {
        if let Rig::Simulated { network, server, .. } = self.rig {
            network.set_process(*server, state);
        }
    }
}

impl Drop for PeerKind {
    fn drop(&mut self) {
        if let Self::Kernel(process) = self {
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

fn signal(name: &str, process: &Child) {
    let command = format!("kill -{name} {}", process.id());
    assert!(Command::new("sh").args(["-c", &command]).status().unwrap().success(), "{command}");
}

/// Starts the test `peer` of this program as a process of its own.
fn start_peer_process(port: u16) -> Child {
    let mut process = Command::new(std::env::current_exe().unwrap())
        .args(["peer", "--exact", "--ignored", "--nocapture"])
        .env(PEER, port.to_string())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(process.stdout.take().unwrap()).lines();
    let listens = lines.map_while(Result::ok).any(|line| line.contains(LISTENS));
    assert!(listens, "the peer does not listen");
    process
}

/// The process of a peer, if this is one.
pub fn run_peer() {
    let Ok(port) = std::env::var(PEER) else { return };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let listener = listen_on(port.parse().unwrap());
        println!("{LISTENS}");
        serve(listener).await;
    });
}

async fn serve(listener: TcpListener) {
    let mut accepted = Vec::new();
    loop {
        let (mut stream, _) = listener.accept().await.unwrap();
        stream.write_all(GREETING).await.unwrap();
        accepted.push(stream);
    }
}

//! An upgrade that has failed, or during which the configuration changes, has no effect on later drains and reloads.

use super::add_listener;
use super::setup::Setup;
use crate::support::long_path::LongPath;
use crate::support::stopwatch::Stopwatch;
use crate::support::wait::{PATIENCE, pause, until};
use std::io::ErrorKind;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::timeout;

/// The running process reads a new `state_dir` while the new one waits for an apiserver.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reload_of_state_dir_during_a_takeover_leaves_one_process() {
    let mut setup = Setup::new(1, 1).await;
    // The file of the first process has other ports than those that the process was started with.
    let next = setup.start(&["--take-over"]);
    assert!(setup.replace(next).wait_exit().await.success());
    setup.wait_ready().await;
    setup.cluster.servers[0].stop();
    let mut new = setup.start(&["--take-over"]);
    setup.process.wait_output("all listening sockets sent to a new process").await;
    let before = setup.state_dir();
    setup.rewrite(|config| config.state_dir = Some(before.join("next")));
    setup.process.wait_output("configuration reloaded").await;
    setup.cluster.servers[0].cont();
    let line = new.wait_output("taken over: this process accepts connections").await;
    assert!(line.contains("the old process has stopped accepting and drains"), "{line}");
    let mut old = setup.replace(new);
    assert!(old.wait_exit().await.success(), "{}", old.output());
    setup.wait_ready().await;
}

/// The round trip of the clients: shorter than the time for which a drain waits for handshakes.
const ROUND_TRIP: Duration = Duration::from_millis(10);

/// A drain waits twice this time for handshakes. On a busy machine the path takes longer, and a handshake that does may
/// end on a closed socket.
const LONGEST_ROUND_TRIP: Duration = Duration::from_millis(25);

/// The address on which jackstay listens, and the one at which clients reach it over the long path.
const LOCAL: Ipv4Addr = Ipv4Addr::new(10, 9, 1, 1);
const REMOTE: Ipv4Addr = Ipv4Addr::new(10, 9, 1, 2);

/// What became of the connections of the clients.
#[derive(Default)]
struct Connections {
    served: AtomicUsize,
    refused: AtomicUsize,
    failed: AtomicUsize,
    /// Failed after a round trip of more than [`LONGEST_ROUND_TRIP`].
    late: AtomicUsize,
    stop: AtomicBool,
}

impl Connections {
    /// Opens a connection each millisecond, until [`Self::stop`]. A request without TLS is answered by an alert, which
    /// shows that the connection was accepted.
    async fn open(self: Arc<Self>, to: SocketAddr) {
        let mut connections = JoinSet::new();
        while !self.stop.load(Relaxed) {
            let counters = Arc::clone(&self);
            connections.spawn(async move {
                let start = Stopwatch::start();
                let connected = TcpStream::connect(to).await;
                let round_trip = start.elapsed();
                let result = timeout(PATIENCE, exchange(connected)).await.expect("an end");
                let counter = match result {
                    Ok(bytes) if bytes > 0 => &counters.served,
                    Err(error) if error.kind() == ErrorKind::ConnectionRefused => &counters.refused,
                    _ if round_trip > LONGEST_ROUND_TRIP => &counters.late,
                    _ => &counters.failed,
                };
                counter.fetch_add(1, Relaxed);
            });
            pause(Duration::from_millis(1)).await;
        }
        connections.join_all().await;
    }
}

async fn exchange(connected: std::io::Result<TcpStream>) -> std::io::Result<usize> {
    let mut stream = connected?;
    stream.write_all(b"GET / HTTP/1.1\r\n\r\n").await?;
    stream.read(&mut [0; 64]).await
}

/// A process that listens on [`LOCAL`], after an upgrade has failed.
async fn after_a_failed_upgrade() -> Setup {
    let mut setup = Setup::new(1, 1).await;
    let address = SocketAddr::new(LOCAL.into(), setup.address.port());
    setup.change(|config| config.listeners[0].bind = vec![address]);
    let new = setup.start(&["--take-over"]);
    assert!(setup.replace(new).wait_exit().await.success());
    setup.wait_ready().await;
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let before = setup.config.clone();
    setup.change(|config| add_listener(config, "other", taken.local_addr().unwrap()));
    for _ in 0..2 {
        let mut new = setup.start(&["--take-over"]);
        assert_eq!(new.wait_exit().await.code(), Some(1), "{}", new.output());
        new.wait_output("taking over from a running process").await;
    }
    setup.process.wait_output("takeover failed; this process continues").await;
    setup.config = before;
    setup
}

/// Runs `change` while clients connect. No connection may be reset; returns how many were refused.
async fn run_while_clients_connect(
    setup: &mut Setup,
    change: impl AsyncFnOnce(&mut Setup),
) -> usize {
    let to = SocketAddr::new(REMOTE.into(), setup.address.port());
    let connections = Arc::<Connections>::default();
    let clients = tokio::spawn(Arc::clone(&connections).open(to));
    let served = || connections.served.load(Relaxed);
    until("clients are served", async || served() > 100).await;
    change(setup).await;
    pause(ROUND_TRIP * 4).await;
    connections.stop.store(true, Relaxed);
    clients.await.unwrap();
    let refused = connections.refused.load(Relaxed);
    let late = connections.late.load(Relaxed);
    println!("{} connections served, {refused} refused, {late} failed late", served());
    assert_eq!(connections.failed.load(Relaxed), 0, "connections were reset");
    refused
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs root, a network namespace of its own and an idle machine"]
async fn reload_after_a_failed_upgrade_resets_no_connection() {
    let _path = LongPath::start("long1", &format!("{LOCAL}/24"), ROUND_TRIP);
    let mut setup = after_a_failed_upgrade().await;
    let reload = async |setup: &mut Setup| {
        setup.rewrite(|config| {
            let port = config.listeners[0].bind[0].port();
            config.listeners[0].bind = vec![SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), port)];
        });
        setup.process.wait_output("configuration reloaded").await;
    };
    assert_eq!(run_while_clients_connect(&mut setup, reload).await, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs root, a network namespace of its own and an idle machine"]
async fn drain_after_a_failed_upgrade_resets_no_connection() {
    let _path = LongPath::start("long1", &format!("{LOCAL}/24"), ROUND_TRIP);
    let mut setup = after_a_failed_upgrade().await;
    let drain = async |setup: &mut Setup| {
        setup.process.signal("TERM");
        assert!(setup.process.wait_exit().await.success(), "{}", setup.process.output());
    };
    run_while_clients_connect(&mut setup, drain).await;
}

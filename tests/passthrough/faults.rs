//! Flows whose packets are dropped by the kernel. They need root and a network namespace of their
//! own, where nothing else is lost:
//!
//! ```sh
//! unshare --net sh -c 'ip link set lo up && cargo test --test passthrough -- --ignored --test-threads=1'
//! ```
//!
//! About three minutes; with `JACKSTAY_LONG=1` every direction is lost in both hooks, the loss lasts ten
//! minutes and each closed window five.

use crate::peer::Peer;
use crate::support::figures::check_figure;
use crate::support::netns::nft;
use crate::support::stopwatch::Stopwatch;
use crate::support::{Certs, Proxy, passthrough_config, pause, until};
use std::cell::Cell;
use std::future::pending;
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::process::Command;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// A dead flow is reset within this time.
const RESET: Duration = Duration::from_secs(3);

/// The same for a peer whose window is closed, which its kernel is asked about once a second.
const CLOSED_RESET: Duration = Duration::from_millis(5_500);

/// A rule in one hook, gone when it is dropped.
struct Rule;

impl Rule {
    fn new(hook: &str, rule: &str) -> Self {
        nft("add table inet t");
        nft(&format!("add chain inet t c {{ type filter hook {hook} priority 0; }}"));
        for rule in rule.split(';') {
            nft(&format!("add rule inet t c {rule}"));
        }
        Self
    }
}

impl Drop for Rule {
    fn drop(&mut self) {
        nft("delete table inet t");
    }
}

struct TestCluster {
    _certs: Certs,
    peer: Peer,
    proxy: Proxy,
}

impl TestCluster {
    async fn new() -> Self {
        let (certs, peer) = (Certs::new(), Peer::start().await);
        let mut config = passthrough_config(certs.config(&[peer.address]));
        config.listeners[0].limits.handshake_timeout = Duration::from_secs(60);
        let proxy = certs.start(config);
        Self { _certs: certs, peer, proxy }
    }

    /// A flow that has carried bytes both ways.
    async fn flow(&self) -> (TcpStream, TcpStream) {
        let (mut client, mut server) = self.peer.join(&self.proxy).await;
        server.write_all(b"x").await.unwrap();
        client.read_u8().await.unwrap();
        (client, server)
    }

    /// How many flows were ended for a reason.
    async fn ended(&self, reason: &str) -> u64 {
        let name = "jackstay_passthrough_closed_total";
        let series = format!(r#"{name}{{listener="apiserver",reason="{reason}"}}"#);
        self.proxy.metric(&series).await as u64
    }

    /// Bytes that were moved, in one direction.
    async fn moved(&self, direction: &str) -> u64 {
        let name = "jackstay_passthrough_bytes_total";
        let series = format!(r#"{name}{{listener="apiserver",direction="{direction}"}}"#);
        self.proxy.metric(&series).await as u64
    }

    /// Waits until nothing moves any more in a direction, although there is more to be sent than
    /// what has been since `start`: the window of its receiver is closed.
    async fn stuck(&self, direction: &str, start: u64) {
        let mut before = start;
        loop {
            pause(Duration::from_secs(1)).await;
            let moved = self.moved(direction).await;
            if moved == std::mem::replace(&mut before, moved) && moved > start {
                return;
            }
        }
    }
}

/// Who goes on talking after the packets are lost.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Talks {
    Nobody,
    Client,
    Server,
    Both,
}

#[tokio::test]
#[ignore = "needs root and a network namespace of its own"]
async fn a_dropped_flow_is_reset_whoever_talks_and_new_ones_work() {
    for hook in ["input", "output"] {
        // In `output` our own kernel knows what it has not sent, whichever direction that is.
        let every = hook == "input" || std::env::var_os("JACKSTAY_LONG").is_some();
        for lost in &["both", "to the server", "from the server"][..if every { 3 } else { 1 }] {
            for talks in [Talks::Nobody, Talks::Client, Talks::Server, Talks::Both] {
                let cluster = TestCluster::new().await;
                let (client, server) = cluster.flow().await;
                let ours = server.peer_addr().unwrap().port();
                let theirs = cluster.peer.address.port();
                let up = format!("tcp sport {ours} tcp dport {theirs} drop");
                let down = format!("tcp sport {theirs} tcp dport {ours} drop");
                let rule = match *lost {
                    "both" => format!("{up};{down}"),
                    "to the server" => up,
                    _ => down,
                };
                let rule = Rule::new(hook, &rule);
                let (mut client_reads, mut client_writes) = client.into_split();
                let (mut server_reads, mut server_writes) = server.into_split();
                let told = Cell::new(None);
                let talk = async {
                    loop {
                        pause(Duration::from_millis(300)).await;
                        if matches!(talks, Talks::Client | Talks::Both) {
                            let written = client_writes.write_all(b"question").await;
                            told.set(told.get().or(written.err().map(|error| error.kind())));
                        }
                        if matches!(talks, Talks::Server | Talks::Both) {
                            let _ = server_writes.write_all(b"event").await;
                        }
                    }
                };
                let hear = async {
                    let mut rest = [0; 4096];
                    while matches!(server_reads.read(&mut rest).await, Ok(n) if n > 0) {}
                    pending::<()>().await;
                };
                let mut last = Stopwatch::start();
                let ended = async {
                    let mut rest = [0; 4096];
                    loop {
                        match client_reads.read(&mut rest).await {
                            // A socket tells its error once: to whoever asks first.
                            Ok(0) => break told.get().expect("an end that looks like an end"),
                            Ok(_) => last = Stopwatch::start(),
                            Err(error) => break error.kind(),
                        }
                    }
                };
                let kind = tokio::select! {
                    kind = timeout(Duration::from_secs(20), ended) => kind.expect("never reset"),
                    () = talk => unreachable!(),
                    () = hear => unreachable!(),
                };
                assert_eq!(kind, ErrorKind::ConnectionReset);
                // While the server's bytes arrive nobody is hurt.
                let took = last.elapsed();
                check_figure(
                    &format!("dropped in {hook}, lost {lost}, {talks:?} talks"),
                    took,
                    RESET,
                );
                let (mut client, mut server) = cluster.flow().await;
                client.write_all(b"y").await.unwrap();
                assert_eq!(server.read_u8().await.unwrap(), b'y');
                drop(rule);
            }
        }
    }
}

/// A path that breaks under many quiet flows at once needs less proof than one flow alone, also
/// where packets have been lost before.
#[tokio::test]
#[ignore = "needs root and a network namespace of its own"]
async fn many_flows_that_are_dropped_together_are_reset_together() {
    let cluster = TestCluster::new().await;
    let theirs = cluster.peer.address.port();
    let both = format!("tcp dport {theirs} {{}};tcp sport {theirs} {{}}");
    let mut flows = Vec::new();
    for _ in 0..12 {
        flows.push(cluster.flow().await);
    }
    let lossy = Rule::new("input", &both.replace("{}", "numgen random mod 100 < 10 drop"));
    pause(Duration::from_secs(8)).await;
    drop(lossy);
    let rule = Rule::new("input", &both.replace("{}", "drop"));
    let start = Stopwatch::start();
    let mut told = Vec::new();
    for (client, _server) in &mut flows {
        let error = timeout(Duration::from_secs(20), client.read_u8()).await.expect("never reset");
        assert_eq!(error.unwrap_err().kind(), ErrorKind::ConnectionReset);
        told.push(start.elapsed());
    }
    check_figure("the last of twelve quiet flows is reset", told[11], RESET);
    drop(rule);
}

/// Nobody refuses and nobody answers: every candidate was tried, however many, and the client is
/// told.
#[tokio::test]
#[ignore = "needs root and a network namespace of its own"]
async fn with_nobody_answering_the_client_is_reset_in_a_second() {
    let silent: Vec<SocketAddr> = (1..=6).map(|n| ([127, 0, 1, n], 6443).into()).collect();
    nft("add table inet t");
    nft("add set inet t seen { type ipv4_addr . inet_service; size 1000; flags dynamic; }");
    let rule = Rule::new(
        "input",
        "ip daddr 127.0.1.0/24 tcp flags & (syn | ack) == syn add @seen { ip daddr . tcp sport } drop",
    );
    // Connections that were begun, to each.
    let begun = || {
        let set = Command::new("nft").args(["list", "set", "inet", "t", "seen"]).output().unwrap();
        let set = String::from_utf8(set.stdout).unwrap();
        let to = |address: &SocketAddr| set.matches(&format!("{} . ", address.ip())).count();
        silent.iter().map(to).collect::<Vec<_>>()
    };
    let certs = Certs::new();
    let mut config = passthrough_config(certs.config(&silent));
    config.upstreams[0].health.connect_timeout = Duration::from_secs(30);
    let proxy = certs.start(config);
    // The prober's: two that race, for as long as that.
    until("the prober waits", async || begun().iter().all(|n| *n >= 2)).await;
    let before = begun();
    let start = Stopwatch::start();
    let silent = async { TcpStream::connect(proxy.addr).await?.read_u8().await };
    let error = timeout(Duration::from_secs(20), silent).await.expect("it hangs").unwrap_err();
    let took = start.elapsed();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    println!("connections begun: {before:?}, then {:?}", begun());
    check_figure("no endpoint answers: the client is reset", took, Duration::from_secs(1));
    assert!(begun().iter().zip(&before).all(|(now, before)| now > before), "one was not tried");
    drop(rule);
}

#[tokio::test]
#[ignore = "needs root and a network namespace of its own"]
async fn a_transfer_that_is_dropped_is_reset() {
    for hook in ["input", "output"] {
        let cluster = TestCluster::new().await;
        let (client, mut server) = cluster.flow().await;
        let ours = server.peer_addr().unwrap().port();
        let theirs = cluster.peer.address.port();
        let (mut client_reads, mut client_writes) = client.into_split();
        let upload = tokio::spawn(async move {
            let much = vec![1; 1 << 20];
            loop {
                if let Err(error) = client_writes.write_all(&much).await {
                    break error.kind();
                }
            }
        });
        let mut got = vec![0; 30 << 20];
        server.read_exact(&mut got).await.unwrap();
        let rule = Rule::new(hook, &format!("tcp sport {ours} tcp dport {theirs} drop"));
        let hear = tokio::spawn(async move { while server.read(&mut got).await.is_ok() {} });
        let start = Stopwatch::start();
        let read = timeout(Duration::from_secs(20), client_reads.read_u8()).await.unwrap();
        let took = start.elapsed();
        // A socket tells its error once: to whoever asks first.
        let kinds = [read.unwrap_err().kind(), upload.await.unwrap()];
        assert!(kinds.contains(&ErrorKind::ConnectionReset), "{kinds:?}");
        check_figure(&format!("an upload dropped in {hook} is reset"), took, RESET);
        drop(rule);
        hear.abort();
    }
}

/// A peer that has no room is alive, however long it takes; one that is lost then is noticed too.
#[tokio::test]
#[ignore = "needs root and a network namespace of its own, and takes half a minute"]
async fn a_closed_window_is_left_alone_and_its_loss_is_noticed() {
    let cluster = TestCluster::new().await;
    let seconds = std::env::var("JACKSTAY_LONG").map_or(15, |_| 300);
    for (direction, to_server) in [("to_server", true), ("to_client", false)] {
        let (mut client, mut server) = cluster.flow().await;
        let (from, to) =
            if to_server { (&mut client, &mut server) } else { (&mut server, &mut client) };
        let much: Vec<u8> = (0..32_000_000_u32).map(|i| (i >> 8) as u8).collect();
        let mut got = vec![0; much.len()];
        let before = cluster.moved(direction).await;
        let (written, read) = tokio::join!(from.write_all(&much), async {
            cluster.stuck(direction, before).await;
            pause(Duration::from_secs(seconds)).await;
            let moved = cluster.moved(direction).await - before;
            assert!(moved < much.len() as u64, "it fits into the buffers: no window was closed");
            to.read_exact(&mut got).await
        });
        written.unwrap();
        read.unwrap();
        assert!(got == much);
        assert_eq!(cluster.moved(direction).await - before, much.len() as u64);
    }
    let (mut client, server) = cluster.flow().await;
    let before = cluster.moved("to_server").await;
    let ours = server.peer_addr().unwrap().port();
    let (mut reads, mut writes) = client.split();
    let much = vec![1; 1 << 20];
    let fill = async {
        loop {
            if let Err(error) = writes.write_all(&much).await {
                break error.kind();
            }
        }
    };
    let lost = async {
        cluster.stuck("to_server", before).await;
        pause(Duration::from_secs(6)).await;
        let rule = Rule::new("input", &format!("tcp sport {ours} drop;tcp dport {ours} drop"));
        let start = Stopwatch::start();
        let error = reads.read_u8().await.unwrap_err();
        drop(rule);
        (error.kind(), start.elapsed())
    };
    let both = async { tokio::join!(fill, lost) };
    let (wrote, (read, took)) =
        timeout(Duration::from_secs(60), both).await.expect("never noticed");
    // A socket tells its error once: to whoever asks first.
    assert!([wrote, read].contains(&ErrorKind::ConnectionReset), "{wrote:?}, {read:?}");
    check_figure("a flow lost behind a closed window is reset", took, CLOSED_RESET);
    // It was our verdict, and the only one: neither side has broken a flow.
    until("it is counted", async || cluster.ended("unacknowledged").await == 1).await;
    for reason in ["client_reset", "server_reset", "client_dead", "endpoint_dead", "unanswered"] {
        assert_eq!(cluster.ended(reason).await, 0, "{reason}");
    }
    drop(server);
}

/// One packet in twenty is lost each way: half a minute (ten minutes with `JACKSTAY_LONG`) of quiet
/// flows, flows that talk and transfers, and none is reset.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root and a network namespace of its own, and takes half a minute"]
async fn loss_is_not_death() {
    let cluster = TestCluster::new().await;
    let length = Duration::from_secs(std::env::var("JACKSTAY_LONG").map_or(30, |_| 600));
    let mut flows = Vec::new();
    for _ in 0..100 {
        flows.push(cluster.flow().await);
    }
    let theirs = cluster.peer.address.port();
    let lossy = "numgen random mod 100 < 5 drop";
    let rule =
        Rule::new("input", &format!("tcp dport {theirs} {lossy};tcp sport {theirs} {lossy}"));
    let start = Instant::now();
    let mut tasks = Vec::new();
    for (index, (mut client, mut server)) in flows.into_iter().enumerate() {
        tasks.push(tokio::spawn(async move {
            let much = vec![7; if index < 2 { 2_000_000 } else { 100 }];
            let mut got = vec![0; much.len()];
            let mut moved = 0;
            while start.elapsed() < length {
                if index < 50 {
                    let (a, b) = tokio::join!(client.write_all(&much), server.read_exact(&mut got));
                    a.and(b.map(drop)).unwrap_or_else(|e| panic!("flow {index}: {e}"));
                    let (a, b) = tokio::join!(server.write_all(&much), client.read_exact(&mut got));
                    a.and(b.map(drop)).unwrap_or_else(|e| panic!("flow {index}: {e}"));
                    moved += 2 * much.len();
                }
                if index >= 2 {
                    pause(Duration::from_millis(50 * index as u64)).await;
                }
            }
            client.write_all(b"z").await.unwrap();
            assert_eq!(server.read_u8().await.unwrap(), b'z', "flow {index}");
            moved
        }));
    }
    let mut moved = 0;
    for task in tasks {
        moved += task.await.unwrap();
    }
    println!("moved {moved} bytes under loss");
    drop(rule);
}

#[tokio::test]
#[ignore = "needs root and a network namespace of its own, and takes half a minute"]
async fn a_client_that_has_vanished_does_not_stay() {
    let cluster = TestCluster::new().await;
    let (client, mut server) = cluster.flow().await;
    let port = client.local_addr().unwrap().port();
    let rule = Rule::new("input", &format!("tcp sport {port} drop;tcp dport {port} drop"));
    server.write_all(b"x").await.unwrap();
    let start = Instant::now();
    let error = timeout(Duration::from_secs(90), server.read_u8()).await.expect("never noticed");
    assert_eq!(error.unwrap_err().kind(), ErrorKind::ConnectionReset);
    println!("a vanished client: {:?}", start.elapsed());
    drop((rule, client));
    until("it is over", async || cluster.proxy.status().await["listeners"][0]["flows"] == 0).await;
}

//! Flows whose packets the kernel drops. These tests need root and their own network namespace:
//!
//! ```sh
//! unshare --net sh -c 'ip link set lo up && cargo test --test passthrough -- --ignored --test-threads=1'
//! ```
//!
//! They take about three minutes. With `JACKSTAY_LONG=1` packets are dropped in every direction in both
//! hooks, the loss lasts ten minutes, and each closed window five.

use crate::peer::{Peer, setup_with, wait_flows};
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

/// The same for a peer with a closed window, which the kernel probes about once a second.
const CLOSED_RESET: Duration = Duration::from_millis(5_500);

/// Rules in one hook, deleted when this is dropped.
struct DropRules;

impl DropRules {
    fn new(hook: &str, rule: &str) -> Self {
        nft("add table inet t");
        nft(&format!("add chain inet t c {{ type filter hook {hook} priority 0; }}"));
        for rule in rule.split(';') {
            nft(&format!("add rule inet t c {rule}"));
        }
        Self
    }
}

impl Drop for DropRules {
    fn drop(&mut self) {
        nft("delete table inet t");
    }
}

struct Setup {
    peer: Peer,
    proxy: Proxy,
}

impl Setup {
    async fn new() -> Self {
        let timeout = Duration::from_secs(60);
        let (peer, proxy) =
            setup_with(|config| config.listeners[0].limits_mut().handshake_timeout = timeout).await;
        Self { peer, proxy }
    }

    /// A flow that has carried bytes both ways.
    async fn flow(&self) -> (TcpStream, TcpStream) {
        let (mut client, mut server) = self.peer.connect(&self.proxy).await;
        server.write_all(b"x").await.unwrap();
        client.read_u8().await.unwrap();
        (client, server)
    }

    /// The number of flows that ended for a reason.
    async fn ended(&self, reason: &str) -> u64 {
        let name = "jackstay_passthrough_closed_total";
        let series = format!(r#"{name}{{listener="apiserver",reason="{reason}"}}"#);
        self.proxy.metric(&series).await as u64
    }

    /// Bytes forwarded in one direction.
    async fn forwarded(&self, direction: &str) -> u64 {
        let name = "jackstay_passthrough_bytes_total";
        let series = format!(r#"{name}{{listener="apiserver",direction="{direction}"}}"#);
        self.proxy.metric(&series).await as u64
    }

    /// Waits until nothing is forwarded any more in a direction, although more has been written:
    /// the window of the receiver is closed.
    async fn wait_blocked(&self, direction: &str, start: u64) {
        let mut before = start;
        loop {
            pause(Duration::from_secs(1)).await;
            let forwarded = self.forwarded(direction).await;
            if forwarded == std::mem::replace(&mut before, forwarded) && forwarded > start {
                return;
            }
        }
    }
}

/// The sides that keep sending after the packets are lost.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Senders {
    Neither,
    Client,
    Server,
    Both,
}

#[tokio::test]
#[ignore = "needs root and a network namespace of its own"]
async fn dropped_flow_is_reset_and_new_flows_work() {
    for hook in ["input", "output"] {
        // In the hook `output` the kernel knows what it has not sent, in either direction.
        let every = hook == "input" || std::env::var_os("JACKSTAY_LONG").is_some();
        for lost in &["both", "to the server", "from the server"][..if every { 3 } else { 1 }] {
            for senders in [Senders::Neither, Senders::Client, Senders::Server, Senders::Both] {
                let setup = Setup::new().await;
                let (client, server) = setup.flow().await;
                let ours = server.peer_addr().unwrap().port();
                let theirs = setup.peer.address.port();
                let up = format!("tcp sport {ours} tcp dport {theirs} drop");
                let down = format!("tcp sport {theirs} tcp dport {ours} drop");
                let rule = match *lost {
                    "both" => format!("{up};{down}"),
                    "to the server" => up,
                    _ => down,
                };
                let rule = DropRules::new(hook, &rule);
                let (mut client_reads, mut client_writes) = client.into_split();
                let (mut server_reads, mut server_writes) = server.into_split();
                let write_error = Cell::new(None);
                let send = async {
                    loop {
                        pause(Duration::from_millis(300)).await;
                        if matches!(senders, Senders::Client | Senders::Both) {
                            let written = client_writes.write_all(b"question").await;
                            write_error
                                .set(write_error.get().or(written.err().map(|error| error.kind())));
                        }
                        if matches!(senders, Senders::Server | Senders::Both) {
                            let _ = server_writes.write_all(b"event").await;
                        }
                    }
                };
                let receive = async {
                    let mut rest = [0; 4096];
                    while matches!(server_reads.read(&mut rest).await, Ok(n) if n > 0) {}
                    pending::<()>().await;
                };
                let mut last = Stopwatch::start();
                let ended = async {
                    let mut rest = [0; 4096];
                    loop {
                        match client_reads.read(&mut rest).await {
                            // A socket reports its error only once.
                            Ok(0) => break write_error.get().expect("a reset, not a clean end"),
                            Ok(_) => last = Stopwatch::start(),
                            Err(error) => break error.kind(),
                        }
                    }
                };
                let kind = tokio::select! {
                    kind = timeout(Duration::from_secs(20), ended) => kind.expect("never reset"),
                    () = send => unreachable!(),
                    () = receive => unreachable!(),
                };
                assert_eq!(kind, ErrorKind::ConnectionReset);
                // The time counts from the last byte of the server.
                let took = last.elapsed();
                check_figure(
                    &format!("dropped in {hook}, lost {lost}, {senders:?} sending"),
                    took,
                    RESET,
                );
                let (mut client, mut server) = setup.flow().await;
                client.write_all(b"y").await.unwrap();
                assert_eq!(server.read_u8().await.unwrap(), b'y');
                drop(rule);
            }
        }
    }
}

/// When many quiet flows fail at once, jackstay needs less evidence than for one flow, also if
/// packets were lost before.
#[tokio::test]
#[ignore = "needs root and a network namespace of its own"]
async fn flows_that_are_dropped_together_are_reset_together() {
    let setup = Setup::new().await;
    let theirs = setup.peer.address.port();
    let both = format!("tcp dport {theirs} {{}};tcp sport {theirs} {{}}");
    let mut flows = Vec::new();
    for _ in 0..12 {
        flows.push(setup.flow().await);
    }
    let lossy = DropRules::new("input", &both.replace("{}", "numgen random mod 100 < 10 drop"));
    pause(Duration::from_secs(8)).await;
    drop(lossy);
    let rule = DropRules::new("input", &both.replace("{}", "drop"));
    let start = Stopwatch::start();
    let mut times = Vec::new();
    for (client, _server) in &mut flows {
        let error = timeout(Duration::from_secs(20), client.read_u8()).await.expect("never reset");
        assert_eq!(error.unwrap_err().kind(), ErrorKind::ConnectionReset);
        times.push(start.elapsed());
    }
    check_figure("the last of twelve quiet flows is reset", times[11], RESET);
    drop(rule);
}

/// All endpoints are silent: jackstay tries each of them.
#[tokio::test]
#[ignore = "needs root and a network namespace of its own"]
async fn client_is_reset_within_a_second_when_no_endpoint_responds() {
    let silent: Vec<SocketAddr> = (1..=6).map(|n| ([127, 0, 1, n], 6443).into()).collect();
    nft("add table inet t");
    nft("add set inet t seen { type ipv4_addr . inet_service; size 1000; flags dynamic; }");
    let rule = DropRules::new(
        "input",
        "ip daddr 127.0.1.0/24 tcp flags & (syn | ack) == syn add @seen { ip daddr . tcp sport } drop",
    );
    // The number of connection attempts to each endpoint.
    let attempts = || {
        let set = Command::new("nft").args(["list", "set", "inet", "t", "seen"]).output().unwrap();
        let set = String::from_utf8(set.stdout).unwrap();
        let to = |address: &SocketAddr| set.matches(&format!("{} . ", address.ip())).count();
        silent.iter().map(to).collect::<Vec<_>>()
    };
    let certs = Certs::new();
    let mut config = passthrough_config(certs.config(&silent));
    config.upstreams[0].health.connect_timeout = Duration::from_secs(30);
    let proxy = certs.start(config);
    // The prober makes two attempts, which wait for the connect timeout.
    until("the prober connects", async || attempts().iter().all(|n| *n >= 2)).await;
    let before = attempts();
    let start = Stopwatch::start();
    let silent = async { TcpStream::connect(proxy.addr).await?.read_u8().await };
    let error =
        timeout(Duration::from_secs(20), silent).await.expect("the client is reset").unwrap_err();
    let took = start.elapsed();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    println!("connection attempts: {before:?}, then {:?}", attempts());
    check_figure("no endpoint answers: the client is reset", took, Duration::from_secs(1));
    assert!(
        attempts().iter().zip(&before).all(|(now, before)| now > before),
        "an endpoint was not tried"
    );
    drop(rule);
}

#[tokio::test]
#[ignore = "needs root and a network namespace of its own"]
async fn dropped_transfer_is_reset() {
    for hook in ["input", "output"] {
        let setup = Setup::new().await;
        let (client, mut server) = setup.flow().await;
        let ours = server.peer_addr().unwrap().port();
        let theirs = setup.peer.address.port();
        let (mut client_reads, mut client_writes) = client.into_split();
        let upload = tokio::spawn(async move {
            let data = vec![1; 1 << 20];
            loop {
                if let Err(error) = client_writes.write_all(&data).await {
                    break error.kind();
                }
            }
        });
        let mut got = vec![0; 30 << 20];
        server.read_exact(&mut got).await.unwrap();
        let rule = DropRules::new(hook, &format!("tcp sport {ours} tcp dport {theirs} drop"));
        let receive = tokio::spawn(async move { while server.read(&mut got).await.is_ok() {} });
        let start = Stopwatch::start();
        let read = timeout(Duration::from_secs(20), client_reads.read_u8()).await.unwrap();
        let took = start.elapsed();
        // A socket reports its error only once.
        let kinds = [read.unwrap_err().kind(), upload.await.unwrap()];
        assert!(kinds.contains(&ErrorKind::ConnectionReset), "{kinds:?}");
        check_figure(&format!("an upload dropped in {hook} is reset"), took, RESET);
        drop(rule);
        receive.abort();
    }
}

/// A peer with a closed window is alive, however long; a lost one is noticed.
#[tokio::test]
#[ignore = "needs root and a network namespace of its own, and takes half a minute"]
async fn flow_with_a_closed_window_is_reset_only_when_packets_are_lost() {
    let setup = Setup::new().await;
    let seconds = std::env::var("JACKSTAY_LONG").map_or(15, |_| 300);
    for (direction, to_server) in [("to_server", true), ("to_client", false)] {
        let (mut client, mut server) = setup.flow().await;
        let (from, to) =
            if to_server { (&mut client, &mut server) } else { (&mut server, &mut client) };
        let data: Vec<u8> = (0..32_000_000_u32).map(|i| (i >> 8) as u8).collect();
        let mut got = vec![0; data.len()];
        let before = setup.forwarded(direction).await;
        let (written, read) = tokio::join!(from.write_all(&data), async {
            setup.wait_blocked(direction, before).await;
            pause(Duration::from_secs(seconds)).await;
            let forwarded = setup.forwarded(direction).await - before;
            assert!(
                forwarded < data.len() as u64,
                "the data fits into the buffers: no window was closed"
            );
            to.read_exact(&mut got).await
        });
        written.unwrap();
        read.unwrap();
        assert!(got == data);
        assert_eq!(setup.forwarded(direction).await - before, data.len() as u64);
    }
    let (mut client, server) = setup.flow().await;
    let before = setup.forwarded("to_server").await;
    let ours = server.peer_addr().unwrap().port();
    let (mut reads, mut writes) = client.split();
    let data = vec![1; 1 << 20];
    let fill = async {
        loop {
            if let Err(error) = writes.write_all(&data).await {
                break error.kind();
            }
        }
    };
    let lost = async {
        setup.wait_blocked("to_server", before).await;
        pause(Duration::from_secs(6)).await;
        let rule = DropRules::new("input", &format!("tcp sport {ours} drop;tcp dport {ours} drop"));
        let start = Stopwatch::start();
        let error = reads.read_u8().await.unwrap_err();
        drop(rule);
        (error.kind(), start.elapsed())
    };
    let both = async { tokio::join!(fill, lost) };
    let (wrote, (read, took)) =
        timeout(Duration::from_secs(60), both).await.expect("never noticed");
    // A socket reports its error only once.
    assert!([wrote, read].contains(&ErrorKind::ConnectionReset), "{wrote:?}, {read:?}");
    check_figure("a flow lost behind a closed window is reset", took, CLOSED_RESET);
    // jackstay has ended this flow, and no other.
    until("the reset is counted", async || setup.ended("unacknowledged").await == 1).await;
    for reason in ["client_reset", "server_reset", "client_dead", "endpoint_dead", "unanswered"] {
        assert_eq!(setup.ended(reason).await, 0, "{reason}");
    }
    drop(server);
}

/// One packet in twenty is lost in each direction for half a minute (ten minutes with
/// `JACKSTAY_LONG`), with quiet flows, flows that send and transfers.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root and a network namespace of its own, and takes half a minute"]
async fn packet_loss_resets_no_flow() {
    let setup = Setup::new().await;
    let length = Duration::from_secs(std::env::var("JACKSTAY_LONG").map_or(30, |_| 600));
    let mut flows = Vec::new();
    for _ in 0..100 {
        flows.push(setup.flow().await);
    }
    let theirs = setup.peer.address.port();
    let lossy = "numgen random mod 100 < 5 drop";
    let rule =
        DropRules::new("input", &format!("tcp dport {theirs} {lossy};tcp sport {theirs} {lossy}"));
    let start = Instant::now();
    let mut tasks = Vec::new();
    for (index, (mut client, mut server)) in flows.into_iter().enumerate() {
        tasks.push(tokio::spawn(async move {
            let data = vec![7; if index < 2 { 2_000_000 } else { 100 }];
            let mut got = vec![0; data.len()];
            let mut forwarded = 0;
            while start.elapsed() < length {
                if index < 50 {
                    let (a, b) = tokio::join!(client.write_all(&data), server.read_exact(&mut got));
                    a.and(b.map(drop)).unwrap_or_else(|e| panic!("flow {index}: {e}"));
                    let (a, b) = tokio::join!(server.write_all(&data), client.read_exact(&mut got));
                    a.and(b.map(drop)).unwrap_or_else(|e| panic!("flow {index}: {e}"));
                    forwarded += 2 * data.len();
                }
                if index >= 2 {
                    pause(Duration::from_millis(50 * index as u64)).await;
                }
            }
            client.write_all(b"z").await.unwrap();
            assert_eq!(server.read_u8().await.unwrap(), b'z', "flow {index}");
            forwarded
        }));
    }
    let mut forwarded = 0;
    for task in tasks {
        forwarded += task.await.unwrap();
    }
    println!("forwarded {forwarded} bytes under loss");
    drop(rule);
}

#[tokio::test]
#[ignore = "needs root and a network namespace of its own, and takes half a minute"]
async fn flow_of_a_vanished_client_is_reset() {
    let setup = Setup::new().await;
    let (client, mut server) = setup.flow().await;
    let port = client.local_addr().unwrap().port();
    let rule = DropRules::new("input", &format!("tcp sport {port} drop;tcp dport {port} drop"));
    server.write_all(b"x").await.unwrap();
    let start = Instant::now();
    let error = timeout(Duration::from_secs(90), server.read_u8()).await.expect("never noticed");
    assert_eq!(error.unwrap_err().kind(), ErrorKind::ConnectionReset);
    println!("a vanished client: {:?}", start.elapsed());
    drop((rule, client));
    wait_flows(&setup.proxy, 0).await;
}

//! Flows whose packets are dropped by nftables. These tests need root and their own network namespace:
//!
//! ```sh
//! unshare --net sh -c 'ip link set lo up && cargo test --test proxy passthrough:: -- --ignored --test-threads=1'
//! ```
//!
//! They take about three minutes. With `JACKSTAY_LONG=1` both hooks are tested with every direction, the packet
//! loss lasts ten minutes, and each closed window five minutes.

use crate::passthrough::peer::{Peer, setup_with, wait_flows};
use crate::support::figures::check_figure;
use crate::support::netns::nft;
use crate::support::stopwatch::Stopwatch;
use crate::support::wait::until_within;
use crate::support::{Certs, PATIENCE, Proxy, long_form, passthrough_config, pause, soon, until};
use std::cell::Cell;
use std::future::pending;
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::process::Command;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// The promised limit for the reset of a dead flow.
const RESET: Duration = Duration::from_secs(3);

/// The promised limit when the receive window is closed, because the kernel then probes only about once a second.
const CLOSED_WINDOW_RESET: Duration = Duration::from_millis(5_500);

/// nftables rules in one hook, deleted on drop.
pub(crate) struct DropRules(String);

impl DropRules {
    /// Adds rules, which are separated by semicolons.
    pub(crate) fn new(hook: &str, rules: &str) -> Self {
        Self::named("t", hook, rules)
    }

    /// Adds rules in a table of this name.
    pub(crate) fn named(table: &str, hook: &str, rules: &str) -> Self {
        nft(&format!("add table inet {table}"));
        nft(&format!("add chain inet {table} c {{ type filter hook {hook} priority 0; }}"));
        for rule in rules.split(';') {
            nft(&format!("add rule inet {table} c {rule}"));
        }
        Self(table.to_owned())
    }
}

impl Drop for DropRules {
    fn drop(&mut self) {
        nft(&format!("delete table inet {}", self.0));
    }
}

struct Setup {
    peer: Peer,
    proxy: Proxy,
}

impl Setup {
    async fn new() -> Self {
        // The handshake timeout must not end the flows.
        let timeout = Duration::from_secs(60);
        let (peer, proxy) =
            setup_with(|config| config.listeners[0].limits_mut().handshake_timeout = timeout).await;
        Self { peer, proxy }
    }

    /// Both ends of a flow that has carried bytes in both directions.
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

    /// The number of bytes that were forwarded in one direction.
    async fn forwarded(&self, direction: &str) -> u64 {
        let name = "jackstay_passthrough_bytes_total";
        let series = format!(r#"{name}{{listener="apiserver",direction="{direction}"}}"#);
        self.proxy.metric(&series).await as u64
    }

    /// Waits until no more bytes are forwarded in a direction, because the window of the receiver is closed. The
    /// caller writes more data meanwhile; `start` is the number of bytes before.
    async fn wait_blocked(&self, direction: &str, start: u64) {
        let mut before = start;
        until_within(PATIENCE * 6, "no more bytes are forwarded", async || {
            pause(Duration::from_secs(1)).await;
            let forwarded = self.forwarded(direction).await;
            forwarded == std::mem::replace(&mut before, forwarded) && forwarded > start
        })
        .await;
    }
}

/// The sides that keep sending while packets are dropped.
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
        // The kernel of the sender knows that the hook `output` drops a packet, so one set of directions suffices.
        let every_direction = hook == "input" || long_form();
        let directions = if every_direction { 3 } else { 1 };
        for lost in &["both", "to the server", "from the server"][..directions] {
            for senders in [Senders::Neither, Senders::Client, Senders::Server, Senders::Both] {
                let setup = Setup::new().await;
                let (client, server) = setup.flow().await;
                let proxy_port = server.peer_addr().unwrap().port();
                let server_port = setup.peer.address.port();
                let to_server = format!("tcp sport {proxy_port} tcp dport {server_port} drop");
                let from_server = format!("tcp sport {server_port} tcp dport {proxy_port} drop");
                let rules = match *lost {
                    "both" => format!("{to_server};{from_server}"),
                    "to the server" => to_server,
                    _ => from_server,
                };
                let rules = DropRules::new(hook, &rules);
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
                let mut since_last_byte = Stopwatch::start();
                let ended = async {
                    let mut rest = [0; 4096];
                    loop {
                        match client_reads.read(&mut rest).await {
                            // A socket reports its error once, so the writer may have got it.
                            Ok(0) => break write_error.get().expect("a reset, not a clean end"),
                            Ok(_) => since_last_byte = Stopwatch::start(),
                            Err(error) => break error.kind(),
                        }
                    }
                };
                let kind = tokio::select! {
                    kind = timeout(Duration::from_secs(20), ended) => kind.expect("the client is reset"),
                    () = send => unreachable!(),
                    () = receive => unreachable!(),
                };
                assert_eq!(kind, ErrorKind::ConnectionReset);
                let duration = since_last_byte.elapsed();
                let name = format!("dropped in {hook}, lost {lost}, {senders:?} sending");
                check_figure(&name, duration, RESET);
                let (mut client, mut server) = setup.flow().await;
                client.write_all(b"y").await.unwrap();
                assert_eq!(server.read_u8().await.unwrap(), b'y');
                drop(rules);
            }
        }
    }
}

/// When many quiet flows fail at once, jackstay needs less evidence for each than for a single flow. This holds
/// too if packets of the flows were lost before.
#[tokio::test]
#[ignore = "needs root and a network namespace of its own"]
async fn quiet_flows_that_fail_together_are_reset_within_3_s() {
    let setup = Setup::new().await;
    let server_port = setup.peer.address.port();
    let both_directions = format!("tcp dport {server_port} {{}};tcp sport {server_port} {{}}");
    let mut flows = Vec::new();
    for _ in 0..12 {
        flows.push(setup.flow().await);
    }
    let drop_a_tenth = both_directions.replace("{}", "numgen random mod 100 < 10 drop");
    let rules = DropRules::new("input", &drop_a_tenth);
    pause(Duration::from_secs(8)).await;
    drop(rules);
    let rules = DropRules::new("input", &both_directions.replace("{}", "drop"));
    let start = Stopwatch::start();
    for (client, _server) in &mut flows {
        let read = timeout(Duration::from_secs(20), client.read_u8()).await;
        let error = read.expect("the client is reset").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    }
    check_figure("the last of twelve quiet flows is reset", start.elapsed(), RESET);
    drop(rules);
}

/// jackstay tries every endpoint before it resets the client.
#[tokio::test]
#[ignore = "needs root and a network namespace of its own"]
async fn client_is_reset_within_a_second_when_no_endpoint_responds() {
    let silent: Vec<SocketAddr> = (1..=6).map(|n| ([127, 0, 1, n], 6443).into()).collect();
    nft("add table inet t");
    nft("add set inet t seen { type ipv4_addr . inet_service; size 1000; flags dynamic; }");
    let rules = DropRules::new(
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
    // The prober makes two attempts at each endpoint, which then wait for the connect timeout.
    until("the prober has made its attempts", async || attempts().iter().all(|n| *n >= 2)).await;
    let before = attempts();
    let start = Stopwatch::start();
    let client = async { TcpStream::connect(proxy.addr).await?.read_u8().await };
    let error =
        timeout(Duration::from_secs(20), client).await.expect("the client is reset").unwrap_err();
    let duration = start.elapsed();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    println!("connection attempts: {before:?}, then {:?}", attempts());
    check_figure("no endpoint answers: the client is reset", duration, Duration::from_secs(1));
    assert!(
        attempts().iter().zip(&before).all(|(now, before)| now > before),
        "an endpoint was not tried"
    );
    drop(rules);
}

#[tokio::test]
#[ignore = "needs root and a network namespace of its own"]
async fn dropped_upload_is_reset() {
    for hook in ["input", "output"] {
        let setup = Setup::new().await;
        let (client, mut server) = setup.flow().await;
        let proxy_port = server.peer_addr().unwrap().port();
        let server_port = setup.peer.address.port();
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
        let rule = format!("tcp sport {proxy_port} tcp dport {server_port} drop");
        let rules = DropRules::new(hook, &rule);
        let receive = tokio::spawn(async move { while server.read(&mut got).await.is_ok() {} });
        let start = Stopwatch::start();
        let read = timeout(Duration::from_secs(20), client_reads.read_u8()).await.unwrap();
        let duration = start.elapsed();
        // A socket reports its error once, to the reader or to the writer.
        let upload = soon("the upload ends", upload).await.unwrap();
        let kinds = [read.unwrap_err().kind(), upload];
        assert!(kinds.contains(&ErrorKind::ConnectionReset), "{kinds:?}");
        check_figure(&format!("an upload dropped in {hook} is reset"), duration, RESET);
        drop(rules);
        receive.abort();
    }
}

/// A peer that keeps its window closed is alive, however long that lasts. A lost peer is detected although its
/// window is closed.
#[tokio::test]
#[ignore = "needs root and a network namespace of its own, and takes half a minute"]
async fn flow_with_a_closed_window_is_reset_only_when_packets_are_lost() {
    let setup = Setup::new().await;
    let seconds = if long_form() { 300 } else { 15 };
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
                "all data fitted into the buffers, so no window was closed"
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
    let proxy_port = server.peer_addr().unwrap().port();
    let (mut reads, mut writes) = client.split();
    let data = vec![1; 1 << 20];
    let fill = async {
        loop {
            if let Err(error) = writes.write_all(&data).await {
                break error.kind();
            }
        }
    };
    let lose = async {
        setup.wait_blocked("to_server", before).await;
        pause(Duration::from_secs(6)).await;
        let rules = format!("tcp sport {proxy_port} drop;tcp dport {proxy_port} drop");
        let rules = DropRules::new("input", &rules);
        let start = Stopwatch::start();
        let error = reads.read_u8().await.unwrap_err();
        drop(rules);
        (error.kind(), start.elapsed())
    };
    let both = async { tokio::join!(fill, lose) };
    let (write_error, (read_error, duration)) =
        timeout(Duration::from_secs(60), both).await.expect("the client is reset");
    // A socket reports its error once, to the reader or to the writer.
    let kinds = [write_error, read_error];
    assert!(kinds.contains(&ErrorKind::ConnectionReset), "{kinds:?}");
    check_figure("a flow lost behind a closed window is reset", duration, CLOSED_WINDOW_RESET);
    // jackstay has reset this flow and no other.
    until("the reset is counted", async || setup.ended("unacknowledged").await == 1).await;
    for reason in ["client_reset", "server_reset", "client_dead", "endpoint_dead", "unanswered"] {
        assert_eq!(setup.ended(reason).await, 0, "{reason}");
    }
    drop(server);
}

/// One packet in twenty is dropped in each direction. Half of the flows are quiet, the others exchange data, and
/// two of these without a pause.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root and a network namespace of its own, and takes half a minute"]
async fn packet_loss_resets_no_flow() {
    let setup = Setup::new().await;
    let length = Duration::from_secs(if long_form() { 600 } else { 30 });
    let mut flows = Vec::new();
    for _ in 0..100 {
        flows.push(setup.flow().await);
    }
    let server_port = setup.peer.address.port();
    let drop_5_percent = "numgen random mod 100 < 5 drop";
    let rules = format!(
        "tcp dport {server_port} {drop_5_percent};tcp sport {server_port} {drop_5_percent}"
    );
    let rules = DropRules::new("input", &rules);
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
    println!("forwarded {forwarded} bytes under packet loss");
    drop(rules);
}

#[tokio::test]
#[ignore = "needs root and a network namespace of its own, and takes half a minute"]
async fn flow_of_a_vanished_client_is_reset() {
    let setup = Setup::new().await;
    let (client, mut server) = setup.flow().await;
    let port = client.local_addr().unwrap().port();
    let rules = DropRules::new("input", &format!("tcp sport {port} drop;tcp dport {port} drop"));
    server.write_all(b"x").await.unwrap();
    let start = Instant::now();
    let read = timeout(Duration::from_secs(90), server.read_u8()).await;
    let error = read.expect("the server is reset").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    println!("the flow of a vanished client was reset after {:?}", start.elapsed());
    drop((rules, client));
    wait_flows(&setup.proxy, 0).await;
}

//! Limits for the clients of a passthrough listener: a client that exceeds one does not affect other flows.

use crate::passthrough::peer::{
    LISTENERS, NAME, Peer, ProbedServer, client_hello, exchange, setup_behind, setup_with,
    wait_flows,
};
use crate::support::child::{Process, first_address};
use crate::support::{
    Certs, HangingEndpoint, PATIENCE, Proxy, pages, passthrough_mode, pause, soon, until,
    without_suspicion,
};
use jackstay_config::{Config, MemoryLimit, Mode, Route};
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::process::Command;
use std::time::{Duration, Instant};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// The data for a client that does not read waits in socket buffers, and the client gets all of it when it reads.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn client_that_does_not_read_blocks_only_its_own_server() {
    for listener in LISTENERS {
        let (peer, proxy) = setup_behind(listener, |_| {}).await;
        check_client_that_does_not_read(&peer, &proxy).await;
    }
}

async fn check_client_that_does_not_read(peer: &Peer, proxy: &Proxy) {
    let mut other = peer.connect(proxy).await;
    let mut slow = Vec::new();
    for _ in 0..4 {
        let (client, mut server) = peer.connect(proxy).await;
        let writer = tokio::spawn(async move {
            let (data, mut written) = (vec![7; 64 << 10], 0_usize);
            // The writer counts as blocked when it makes no progress for a second.
            while let Ok(result) = timeout(Duration::from_secs(1), server.write_all(&data)).await {
                result.unwrap();
                written += data.len();
                assert!(written < 256 << 20, "the writer is not blocked");
            }
            (server, written)
        });
        slow.push((client, writer));
    }
    while slow.iter().any(|(_, writer)| !writer.is_finished()) {
        exchange(&mut other).await;
        pause(Duration::from_millis(20)).await;
    }
    for (mut client, writer) in slow {
        let (server, written) = writer.await.unwrap();
        drop(server);
        let mut rest = Vec::new();
        soon("the rest", client.read_to_end(&mut rest)).await.unwrap();
        // The last write was interrupted by its timeout, and part of its data may have been sent.
        assert!(rest.len() >= written, "{} of {written} bytes", rest.len());
        assert!(rest.iter().all(|byte| *byte == 7), "the data was changed");
    }
    exchange(&mut other).await;
}

/// Flows whose clients do not read hold little once memory is short for their source. The kernel holds their bytes too,
/// so most of them are reset; the others get all bytes later.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn blocked_flows_hold_little_when_memory_is_short() {
    for listener in LISTENERS {
        // 40 flows cost 160 KiB. At 3/4 of its 320 KiB the source is short of memory.
        let change = |config: &mut Config| {
            config.memory_limit = MemoryLimit::Bytes(1 << 20);
            without_suspicion(config);
        };
        let (_certs, server, proxy) = ProbedServer::setup_behind(listener, &["h2"], change).await;
        check_blocked_flows(server, &proxy).await;
    }
}

async fn check_blocked_flows(mut server: ProbedServer, proxy: &Proxy) {
    const FLOWS: usize = 40;
    const BYTES: usize = 4 << 20;
    let mut flows = Vec::new();
    for _ in 0..FLOWS {
        let (client, server_end) = server.flow(proxy).await;
        socket2::SockRef::from(&client).set_recv_buffer_size(32 << 10).unwrap();
        flows.push((client, server_end));
    }
    let write = async |mut server: TcpStream| server.write_all(&vec![7; BYTES]).await;
    let start_writing = |(client, server)| (client, tokio::spawn(write(server)));
    let clients: Vec<_> = flows.into_iter().map(start_writing).collect();
    let sent = async || proxy.metric("jackstay_passthrough_bytes_total").await as u64;
    let held = async || proxy.metric("jackstay_memory_budget_bytes{kind=\"flows\"}").await as usize;
    let (mut before, mut most) = (0, 0);
    let start = Instant::now();
    // All flows are blocked or reset when a second passes without a byte.
    loop {
        let now = sent().await;
        if now > 0 && now == before {
            break;
        }
        assert!(start.elapsed() < PATIENCE * 4, "the flows are not blocked: {before}, {now}");
        before = now;
        for _ in 0..10 {
            most = most.max(held().await);
            pause(Duration::from_millis(100)).await;
        }
    }
    println!("{FLOWS} blocked flows hold up to {most} bytes");
    assert!(most < 1 << 20, "{most}");
    let mut reset = 0;
    for (mut client, writer) in clients {
        let mut rest = Vec::new();
        match soon("the rest", client.read_to_end(&mut rest)).await {
            Ok(_) => {
                assert_eq!(rest.len(), BYTES);
                writer.await.unwrap().unwrap();
            }
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::ConnectionReset);
                reset += 1;
            }
        }
    }
    assert!(reset > 0, "memory was not short");
    proxy.wait_metrics(&format!("reason=\"memory\"}} {reset}\n")).await;
    until("nothing is held", async || held().await == 0).await;
    let sockets = async || proxy.metric("jackstay_memory_budget_bytes{kind=\"sockets\"}").await;
    until("nothing is held by the kernel", async || sockets().await == 0.0).await;
}

/// A client may send a `ClientHello` of 16 KiB at most.
#[tokio::test]
async fn client_hello_is_charged_while_its_flow_connects() {
    const PADDING: usize = 14 << 10;
    for listener in LISTENERS {
        let endpoint = HangingEndpoint::start();
        let certs = Certs::new();
        let mut config = listener(certs.config(&[endpoint.address()]));
        if let Mode::Passthrough(passthrough) = &mut config.listeners[0].mode {
            let upstream = config.upstreams[0].name.clone();
            passthrough.routes = vec![Route { server_names: vec![NAME.into()], upstream }];
        }
        let proxy = certs.start(config);
        let held = async || proxy.metric("jackstay_memory_budget_bytes{kind=\"flows\"}").await;
        let mut client = TcpStream::connect(proxy.addr).await.unwrap();
        client.write_all(&client_hello(PADDING)).await.unwrap();
        until("its ClientHello is charged", async || held().await > PADDING as f64).await;
        let error = soon("the reset", client.read_u8()).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
        until("nothing is held", async || held().await == 0.0).await;
    }
}

/// jackstay waits for the rest of an incomplete `ClientHello` until `handshake_timeout`, and forwards garbage at
/// once. Both count against the share of their source.
#[tokio::test]
async fn incomplete_hellos_and_garbage_are_limited_and_other_flows_continue() {
    let (peer, proxy) = setup_with(|config| {
        let upstream = config.upstreams[0].name.clone();
        passthrough_mode(config).routes =
            vec![Route { server_names: vec!["elsewhere.example".into()], upstream }];
        config.listeners[0].limits_mut().max_connections = 40;
        config.listeners[0].limits_mut().handshake_timeout = Duration::from_secs(2);
    })
    .await;
    let mut other = peer.connect(&proxy).await;
    exchange(&mut other).await;
    let start = Instant::now();
    let mut flood = Vec::new();
    for index in 0..200 {
        let Ok(mut stream) = TcpStream::connect(proxy.addr).await else { continue };
        // The start of a TLS record of 256 bytes, or garbage.
        let bytes: &[u8] =
            if index % 4 == 3 { b"\x00\xff\x13\x37" } else { &[22, 3, 1, 1, 0, 1, 0, 0] };
        let _ = stream.write_all(bytes).await;
        flood.push(stream);
    }
    exchange(&mut other).await;
    for mut stream in flood {
        let mut rest = Vec::new();
        let end = soon("the end of the connection", stream.read_to_end(&mut rest)).await;
        assert!(end.is_ok() || end.is_err_and(|e| e.kind() == ErrorKind::ConnectionReset));
    }
    exchange(&mut other).await;
    println!("a flood of 200 was over after {:?}", start.elapsed());
    wait_flows(&proxy, 1).await;
    let metrics = proxy.page("/metrics").await;
    assert!(metrics.contains(r#"reason="handshake_timeout"}"#), "{metrics}");
    let share_used = r#"refused_total{listener="apiserver",reason="source"}"#;
    assert!(metrics.contains(share_used), "{metrics}");
}

/// Starts jackstay with this hard limit of file descriptors and half of it as the soft limit.
fn start_with_descriptors(endpoint: SocketAddr, descriptors: u32) -> (Process, TempDir) {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("jackstay.yaml");
    let config = format!(
        "state_dir: ''
admin: {{bind: '127.0.0.1:0'}}
upstreams: [{{name: u, endpoints: ['{endpoint}']}}]
listeners: [{{name: l, mode: passthrough, bind: ['127.0.0.1:0'], upstream: u}}]
"
    );
    std::fs::write(&file, config).unwrap();
    let limits = format!("ulimit -S -n {}; ulimit -H -n {descriptors}", descriptors / 2);
    let mut command = Command::new("sh");
    command.args(["-c", &format!("{limits}; exec \"$0\" run --config \"$1\"")]);
    command.arg(env!("CARGO_BIN_EXE_jackstay")).arg(&file);
    (Process::spawn(command), dir)
}

/// jackstay raises its soft limit to the hard limit and uses all descriptors. Clients that connect afterwards
/// are reset immediately.
#[tokio::test]
async fn connection_without_a_descriptor_is_reset_and_other_flows_continue() {
    let mut server = ProbedServer::start(&Certs::new(), &["h2"]).await;
    let (mut proxy, _dir) = start_with_descriptors(server.address, 300);
    let admin = first_address(&proxy.wait_output("the admin endpoint listens").await);
    let listener = first_address(&proxy.wait_output("listening").await);
    let page = async |path: &str| pages::get(admin, path).await.unwrap();
    until("jackstay is ready", async || page("/readyz").await.contains("check passed")).await;
    assert!(proxy.output().contains("too few open files are allowed"), "{}", proxy.output());
    let mut flows = Vec::new();
    let refused = loop {
        match soon("a flow, or an error", server.try_flow(listener)).await {
            Ok(flow) => flows.push(flow),
            Err(error) => break error,
        }
    };
    assert_eq!(refused.kind(), ErrorKind::ConnectionReset);
    assert!(flows.len() > 25, "{} flows", flows.len());
    // The first refused flow may have failed at its connection to the endpoint. More connections to the admin
    // endpoint use descriptors until jackstay cannot even accept a client.
    let mut admin_connections = Vec::new();
    until("jackstay cannot accept a client", async || {
        admin_connections.push(TcpStream::connect(admin).await.unwrap());
        match soon("a flow, or an error", server.try_flow(listener)).await {
            Ok(flow) => flows.push(flow),
            Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionReset),
        }
        proxy.output().contains("listener l: connection refused because it cannot be accepted")
    })
    .await;
    for flow in &mut flows {
        exchange(flow).await;
    }
    // The admin endpoint has reserved descriptors.
    for _ in 0..10 {
        let metrics = page("/metrics").await;
        assert!(metrics.contains(r#"refused_total{listener="l",reason="descriptors"}"#));
    }
    assert!(page("/readyz").await.contains("check passed"));
    drop(admin_connections);
    flows.truncate(20);
    until("a flow is accepted", async || {
        flows.extend(soon("a flow, or an error", server.try_flow(listener)).await);
        flows.len() > 20
    })
    .await;
    let metrics = page("/metrics").await;
    assert!(metrics.contains(r#"refused_total{listener="l",reason="descriptors"}"#), "{metrics}");
    // The lack of descriptors must not eject the endpoint.
    let ejections = metrics.lines().filter(|line| line.starts_with("jackstay_ejections_total{"));
    assert!(ejections.clone().count() > 0, "{metrics}");
    assert!(ejections.into_iter().all(|line| line.ends_with(" 0")), "{metrics}");
    assert!(page("/readyz").await.contains("check passed"));
}

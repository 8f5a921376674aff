//! Connections that a listener in mode `terminate` passes through by their server name: they are flows like those of a
//! listener in mode `passthrough`, and all others are terminated.

use std::io;
use std::io::ErrorKind;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use jackstay_apiserver::audit::Record;
use jackstay_apiserver::client::Credentials;
use jackstay_apiserver::pki::{Issued, Subject};
use jackstay_config::Config;
use rustls::pki_types::{CertificateDer, ServerName};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

use crate::passthrough::peer::{NAME, pass_through_by_name, wait_flows};
use crate::support::figures::check_figure;
use crate::support::stopwatch::Stopwatch;
use crate::support::{
    CONFIGMAPS, Certs, Proxy, TestCluster, pause, soon, until, wire, without_suspicion,
};

/// Passes connections through that have the server name [`NAME`].
fn pass_through(config: &mut Config) {
    *config = pass_through_by_name(config.clone());
}

/// A user whose certificate is no identity of the listener.
fn own_certificate(certs: &Certs) -> (Issued, Credentials) {
    let issued = certs.pki.client(&Subject::new("alice", &["devs"])).unwrap();
    let credentials = certs.anonymous().certificate(&issued);
    (issued, credentials)
}

fn last_record(cluster: &TestCluster) -> Record {
    cluster.state.audit().select(|record| record.path == CONFIGMAPS).pop().unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn certificate_reaches_the_apiserver_by_server_name_and_other_clients_are_terminated() {
    let cluster = TestCluster::new(2);
    let change = |config: &mut Config| {
        pass_through(config);
        without_suspicion(config);
    };
    let proxy = cluster.start_with(change).await;
    let (_, credentials) = own_certificate(&cluster.certs);

    let flow = proxy.client_with(&credentials.clone().expecting(NAME)).await;
    assert_eq!(flow.get(CONFIGMAPS).await.unwrap().status, 200);
    let record = last_record(&cluster);
    assert_eq!((record.user.as_str(), record.forwarded_for), ("alice", None));
    assert!(record.certificate_serial.is_some() && record.groups.iter().any(|g| g == "devs"));
    wait_flows(&proxy, 1).await;
    assert!(proxy.metric("jackstay_passthrough_bytes_total").await > 1000.0);
    let flows: u64 =
        proxy.endpoints().await.iter().map(|endpoint| endpoint["flows"].as_u64().unwrap()).sum();
    assert_eq!(flows, 1);

    // Without the name, jackstay sees the certificate and says what to do.
    let client = proxy.client_with(&credentials).await;
    let refused = client.get(CONFIGMAPS).await.unwrap();
    let message = refused.json()["message"].as_str().unwrap().to_owned();
    assert_eq!(refused.status, 401);
    assert!(message.contains(&format!("tls-server-name of the client's kubeconfig to {NAME}")));
    // An identity is served in L7, with no server name and with another one.
    let identity = cluster.certs.credentials();
    let mut terminated = vec![client];
    for credentials in [identity.clone(), identity.expecting("localhost")] {
        let client = proxy.client_with(&credentials).await;
        assert_eq!(client.get(CONFIGMAPS).await.unwrap().status, 200);
        assert_eq!(last_record(&cluster).forwarded_for.as_deref(), Some("127.0.0.1"));
        terminated.push(client);
    }
    assert_eq!(proxy.status().await["listeners"][0]["connections"], 4);
    wait_flows(&proxy, 1).await;
    drop(flow);
    wait_flows(&proxy, 0).await;
    until("its connection is not counted any more", async || {
        proxy.status().await["listeners"][0]["connections"] == 3
    })
    .await;
}

/// A listener without names has no metrics of flows.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn refused_certificate_without_names_gets_the_name_of_the_setting() {
    let cluster = TestCluster::new(1);
    let proxy = cluster.start().await;
    let (_, credentials) = own_certificate(&cluster.certs);
    let client = proxy.client_with(&credentials.expecting(NAME)).await;
    let refused = client.get(CONFIGMAPS).await.unwrap();
    let message = refused.json()["message"].as_str().unwrap().to_owned();
    assert_eq!(refused.status, 401);
    assert!(message.contains("set passthrough_server_names of the listener"), "{message}");
    assert_eq!(proxy.status().await["listeners"][0].get("flows"), None);
    assert!(!proxy.page("/metrics").await.contains("jackstay_passthrough_connections{"));
}

/// A stream that writes one byte at a time, and lets other tasks run before each.
struct Piecewise {
    stream: TcpStream,
    has_yielded: bool,
}

impl AsyncRead for Piecewise {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for Piecewise {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.has_yielded = !self.has_yielded;
        if self.has_yielded {
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        Pin::new(&mut self.stream).poll_write(cx, &buf[..buf.len().min(1)])
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// The certificate that a client gets which sends its bytes one by one.
async fn certificate_for(proxy: &Proxy, certs: &Certs, name: &str) -> CertificateDer<'static> {
    let stream = TcpStream::connect(proxy.addr).await.unwrap();
    stream.set_nodelay(true).unwrap();
    let connector = wire::connector(certs, None, "h2");
    let name = ServerName::try_from(name.to_owned()).unwrap();
    let connected =
        soon("a handshake", connector.connect(name, Piecewise { stream, has_yielded: false }))
            .await
            .unwrap();
    connected.get_ref().1.peer_certificates().unwrap()[0].clone()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn client_hello_in_pieces_decides_as_a_whole_one() {
    let cluster = TestCluster::new(1);
    let proxy = cluster.start_with(pass_through).await;
    let own = certificate_for(&proxy, &cluster.certs, "127.0.0.1").await;
    let other = certificate_for(&proxy, &cluster.certs, "localhost").await;
    assert_eq!(other, own, "a name that is not passed through gets the certificate of jackstay");
    wait_flows(&proxy, 0).await;
    let passed_through = certificate_for(&proxy, &cluster.certs, NAME).await;
    assert_ne!(passed_through, own, "the name gets the certificate of an apiserver");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn garbage_and_incomplete_hellos_end_as_without_names() {
    let cluster = TestCluster::new(1);
    let proxy = cluster
        .start_with(|config| {
            pass_through(config);
            // Also the time for the handshake of a good client below.
            config.listeners[0].limits_mut().handshake_timeout = Duration::from_secs(3);
        })
        .await;
    let end_of = async |bytes: &[u8]| {
        let mut stream = TcpStream::connect(proxy.addr).await.unwrap();
        stream.write_all(bytes).await.unwrap();
        let mut rest = Vec::new();
        let _ = soon("the end of the connection", stream.read_to_end(&mut rest)).await;
        rest
    };
    let plain = end_of(b"GET / HTTP/1.1\r\n\r\n").await;
    assert!(plain.starts_with(b"HTTP/1.0 400"), "{plain:?}");
    end_of(b"\x00\xff\x13\x37").await;
    // A record of 256 bytes that is not complete, and one that is not a ClientHello.
    end_of(&[22, 3, 1, 1, 0, 1, 0, 0]).await;
    end_of(&[22, 3, 1, 0, 4, 2, 0, 0, 0]).await;
    let timeouts = r#"refused_total{listener="apiserver",reason="timeout"} 1"#;
    proxy.wait_metrics(timeouts).await;
    // A client that closes before its ClientHello is complete.
    let mut closing = TcpStream::connect(proxy.addr).await.unwrap();
    closing.write_all(&[22, 3, 1, 1, 0, 1, 0, 0]).await.unwrap();
    closing.shutdown().await.unwrap();
    soon("the end of the connection", closing.read_to_end(&mut Vec::new())).await.unwrap();
    assert_eq!(proxy.status().await["listeners"][0]["flows"], 0);
    assert_eq!(proxy.client().await.get(CONFIGMAPS).await.unwrap().status, 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn flow_whose_packets_are_lost_is_reset_and_the_next_one_works() {
    let cluster = TestCluster::new(1);
    let (relays, proxy) = cluster.start_behind_relays(pass_through).await;
    let (_, credentials) = own_certificate(&cluster.certs);
    let credentials = credentials.expecting(NAME);
    let flow = proxy.client_with(&credentials).await;
    assert_eq!(flow.get(CONFIGMAPS).await.unwrap().status, 200);
    relays[0].drop_all_packets().unwrap();
    let since = Stopwatch::start();
    let error = soon("an error", flow.get(CONFIGMAPS)).await.unwrap_err();
    check_figure(
        "a flow that is passed through by its name",
        since.elapsed(),
        Duration::from_secs(3),
    );
    println!("{error}");
    until("its end is counted", async || {
        let metrics = proxy.page("/metrics").await;
        ["unacknowledged", "unanswered", "endpoint_dead"].iter().any(|reason| {
            metrics
                .contains(&format!(r#"closed_total{{listener="apiserver",reason="{reason}"}} 1"#))
        })
    })
    .await;
    let next = proxy.client_with(&credentials).await;
    assert_eq!(next.get(CONFIGMAPS).await.unwrap().status, 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn drain_continues_flows_and_resets_them_in_its_last_fifth() {
    const DRAIN: Duration = Duration::from_secs(5);
    let cluster = TestCluster::new(1);
    let proxy = cluster
        .start_with(|config| {
            pass_through(config);
            config.shutdown.drain_timeout = DRAIN;
        })
        .await;
    let connector = wire::connector(&cluster.certs, None, "h2");
    let mut clients = JoinSet::new();
    for _ in 0..20 {
        let stream = TcpStream::connect(proxy.addr).await.unwrap();
        let name = ServerName::try_from(NAME).unwrap();
        let mut client = connector.connect(name, stream).await.unwrap();
        clients.spawn(async move {
            let start = Instant::now();
            // The server's first frames precede the end.
            let mut rest = Vec::new();
            let error = client.read_to_end(&mut rest).await.unwrap_err();
            (error.kind(), start.elapsed())
        });
    }
    wait_flows(&proxy, 20).await;
    proxy.running.drain();
    let ends = soon("the ends of all flows", clients.join_all()).await;
    for (kind, after) in &ends {
        assert_eq!(*kind, ErrorKind::ConnectionReset);
        assert!(*after >= DRAIN * 4 / 5, "{after:?}");
    }
}

/// The bounds of handshakes hold for clients that send half a `ClientHello`, and other clients are served.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn half_client_hellos_do_not_exceed_the_bounds_of_handshakes() {
    const CLIENTS: usize = 1_000;
    // Of `admission::handshake_memory`. All clients have one source, which has at most half of the 128 of the process.
    const HANDSHAKE_COST: usize = 96 << 10;
    const MAX_OF_SOURCE: usize = 64;
    let cluster = TestCluster::new(1);
    let proxy = cluster
        .start_with(|config| {
            pass_through(config);
            config.listeners[0].limits_mut().max_connections = 4 * CLIENTS;
        })
        .await;
    let client = proxy.client().await;
    let mut half = Vec::new();
    for _ in 0..CLIENTS {
        let mut stream = TcpStream::connect(proxy.addr).await.unwrap();
        stream.write_all(&[22, 3, 1, 1, 0, 1, 0, 0, 252, 3, 3]).await.unwrap();
        half.push(stream);
    }
    let held =
        async || proxy.metric("jackstay_memory_budget_bytes{kind=\"handshakes\"}").await as usize;
    let (mut most, start) = (0, Instant::now());
    while start.elapsed() < Duration::from_secs(3) {
        most = most.max(held().await);
        assert_eq!(client.get(CONFIGMAPS).await.unwrap().status, 200);
        pause(Duration::from_millis(20)).await;
    }
    println!("{CLIENTS} half messages hold up to {} handshakes", most / HANDSHAKE_COST);
    assert!(most > 0 && most <= MAX_OF_SOURCE * HANDSHAKE_COST, "{most}");
    drop(half);
    until("nothing is held", async || held().await == 0).await;
    let flow = proxy.client_with(&cluster.certs.anonymous().expecting(NAME)).await;
    assert_eq!(
        flow.get(CONFIGMAPS).await.unwrap().status,
        403,
        "the apiserver refuses anonymous users"
    );
}

/// Flows count for the limits of the listener, and none of them takes the reserve of identities.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn flows_are_limited_by_source_and_leave_the_reserve_to_identities() {
    let cluster = TestCluster::new(1);
    let proxy = cluster
        .start_with(|config| {
            pass_through(config);
            config.listeners[0].limits_mut().max_connections = 64;
        })
        .await;
    let connector = wire::connector(&cluster.certs, None, "h2");
    let mut flows = Vec::new();
    for _ in 0..80 {
        let Ok(stream) = TcpStream::connect(proxy.addr).await else { continue };
        let name = ServerName::try_from(NAME).unwrap();
        flows.extend(soon("a handshake, or its end", connector.connect(name, stream)).await);
    }
    // 48 slots are shared, of which one source gets half.
    assert_eq!(flows.len(), 24);
    let metrics = proxy.page("/metrics").await;
    let refused = r#"refused_total{listener="apiserver",reason="source"} 56"#;
    assert!(metrics.contains(refused), "{metrics}");
    assert_eq!(proxy.client().await.get(CONFIGMAPS).await.unwrap().status, 200);
}

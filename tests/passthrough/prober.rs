//! What the prober learns of a server, and what becomes of the flows that lead there.

use crate::support::{Certs, Proxy, passthrough_config, pause, soon, until};
use http::Response;
use jackstay::config::CertPaths;
use jackstay::demo::pki::{Pki, Subject};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::ClientCertVerifier;
use rustls::{RootCertStore, ServerConfig};
use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio_rustls::TlsAcceptor;

/// What a test's own connections begin with: the prober's begin with a TLS record (22).
const HELLO: u8 = b'!';

/// What a server does.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Order {
    Serve,
    /// Takes no more connections and says so to the prober, as on SIGTERM; what runs goes on.
    Leave,
    /// Takes no more connections, and the prober's is closed without a word.
    Vanish,
}

/// A TLS server for the prober, and a silent one for flows, on one port.
pub struct Probed {
    pub address: SocketAddr,
    flows: mpsc::UnboundedReceiver<TcpStream>,
    orders: watch::Sender<Order>,
}

impl Probed {
    pub async fn start(certs: &Certs, alpn: &[&str]) -> Self {
        Self::start_at(([127, 0, 0, 1], 0).into(), certs, alpn).await
    }

    pub async fn start_at(address: SocketAddr, certs: &Certs, alpn: &[&str]) -> Self {
        Self::start_with(address, certs, alpn, WebPkiClientVerifier::no_client_auth()).await
    }

    async fn start_with(
        address: SocketAddr,
        certs: &Certs,
        alpn: &[&str],
        clients: Arc<dyn ClientCertVerifier>,
    ) -> Self {
        let issued = certs.pki.server().unwrap();
        let mut tls = ServerConfig::builder()
            .with_client_cert_verifier(clients)
            .with_single_cert(vec![issued.cert_der()], issued.key_der())
            .unwrap();
        tls.alpn_protocols = alpn.iter().map(|name| name.as_bytes().to_vec()).collect();
        let tls = TlsAcceptor::from(Arc::new(tls));
        let listener = TcpListener::bind(address).await.unwrap();
        let address = listener.local_addr().unwrap();
        let (sender, flows) = mpsc::unbounded_channel();
        let (orders, order) = watch::channel(Order::Serve);
        tokio::spawn(async move {
            let mut listening = order.clone();
            loop {
                tokio::select! {
                    _ = listening.changed() => return,
                    accepted = listener.accept() => {
                        let Ok((stream, _)) = accepted else { return };
                        tokio::spawn(one(stream, tls.clone(), sender.clone(), order.clone()));
                    }
                }
            }
        });
        Self { address, flows, orders }
    }

    /// From now on it does this.
    pub fn order(&self, order: Order) {
        self.orders.send_replace(order);
    }

    /// A flow through the proxy that has carried bytes both ways, and both of its ends.
    pub async fn flow(&mut self, proxy: &Proxy) -> (TcpStream, TcpStream) {
        soon("a flow", self.try_flow(proxy.addr)).await.unwrap()
    }

    /// The same through whatever listens there, or how it was refused.
    pub async fn try_flow(&mut self, through: SocketAddr) -> io::Result<(TcpStream, TcpStream)> {
        let mut client = TcpStream::connect(through).await?;
        client.write_all(&[HELLO]).await?;
        let mut server = tokio::select! {
            server = self.flows.recv() => server.unwrap(),
            end = client.read_u8() => return Err(end.expect_err("nobody has spoken")),
        };
        server.write_all(&[HELLO]).await?;
        assert_eq!(client.read_u8().await?, HELLO);
        Ok((client, server))
    }
}

async fn one(
    mut stream: TcpStream,
    tls: TlsAcceptor,
    flows: mpsc::UnboundedSender<TcpStream>,
    mut order: watch::Receiver<Order>,
) {
    if stream.peek(&mut [0; 1]).await.is_ok_and(|n| n == 0) {
        return;
    }
    let mut first = [0];
    let _ = stream.peek(&mut first).await;
    if first == [HELLO] {
        let _ = stream.read_u8().await;
        let _ = flows.send(stream);
        return;
    }
    let tls = match tls.accept(stream).into_fallible().await {
        Ok(tls) => tls,
        Err((_, mut stream)) => {
            // What it has said is read before the end: a reset would overtake it.
            let _ = stream.read_to_end(&mut Vec::new()).await;
            return;
        }
    };
    if tls.get_ref().1.alpn_protocol() != Some(b"h2") {
        return;
    }
    let Ok(mut connection) = h2::server::handshake(tls).await else { return };
    loop {
        tokio::select! {
            request = connection.accept() => {
                let Some(Ok((_, mut answer))) = request else { return };
                let _ = answer.send_response(Response::new(()), true);
            }
            changed = order.changed() => match changed.map(|()| *order.borrow()) {
                Ok(Order::Leave) => connection.graceful_shutdown(),
                Ok(Order::Serve) => {}
                Ok(Order::Vanish) | Err(_) => return,
            }
        }
    }
}

pub async fn is(proxy: &Proxy, state: &str) {
    until(state, async || proxy.endpoints().await[0]["state"] == state).await;
}

/// An apiserver that leaves says GOAWAY and closes its port while its requests still run; one that
/// is dead says nothing.
#[tokio::test]
async fn who_said_goodbye_keeps_its_flows_and_who_did_not_loses_them() {
    for order in [Order::Leave, Order::Vanish] {
        let certs = Certs::new();
        let mut server = Probed::start(&certs, &["h2"]).await;
        let proxy = certs.start(passthrough_config(certs.config(&[server.address])));
        proxy.wait_ready(1).await;
        let (mut client, mut end) = server.flow(&proxy).await;
        server.order(order);
        is(&proxy, "ejected").await;
        if order == Order::Vanish {
            let error = soon("the reset", client.read_u8()).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::ConnectionReset);
            until("it is counted", async || {
                proxy.page("/metrics").await.contains(r#"reason="endpoint_dead"} 1"#)
            })
            .await;
            continue;
        }
        // Longer than the table takes to end the flows of a dead endpoint.
        for _ in 0..10 {
            pause(Duration::from_millis(50)).await;
            client.write_all(b"x").await.unwrap();
            assert_eq!(soon("a byte up", end.read_u8()).await.unwrap(), b'x');
            end.write_all(b"y").await.unwrap();
            assert_eq!(soon("a byte down", client.read_u8()).await.unwrap(), b'y');
        }
        assert_eq!(proxy.status().await["listeners"][0]["flows"], 1);
    }
}

/// Something else than an apiserver, or one behind a proxy: a handshake each second has to do.
#[tokio::test]
async fn a_server_without_http2_is_known_by_its_handshakes() {
    for alpn in [&[][..], &["http/1.1"][..]] {
        let certs = Certs::new();
        let mut server = Probed::start(&certs, alpn).await;
        let proxy = certs.start(passthrough_config(certs.config(&[server.address])));
        proxy.wait_ready(1).await;
        let reason = proxy.endpoints().await[0]["reason"].as_str().unwrap().to_owned();
        assert!(reason.starts_with("TLS handshake only"), "{reason}");
        let (mut client, _end) = server.flow(&proxy).await;
        server.order(Order::Vanish);
        is(&proxy, "ejected").await;
        let error = soon("the reset", client.read_u8()).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionReset, "dead, and its flows with it");
        let again = Probed::start_at(server.address, &certs, alpn).await;
        proxy.wait_ready(1).await;
        drop(again);
    }
}

/// A server that shows a certificate is not dead, whoever signed it: nothing is known against the
/// flows that lead there.
#[tokio::test]
async fn who_cannot_be_verified_is_no_first_choice_and_keeps_its_flows() {
    let certs = Certs::new();
    let mut server = Probed::start(&certs, &["h2"]).await;
    let proxy = certs.start(passthrough_config(certs.config(&[server.address])));
    proxy.wait_ready(1).await;
    let (mut client, mut end) = server.flow(&proxy).await;
    let ca_file = certs.path().join("ca.crt");
    let trust = |pem: &str| {
        std::fs::write(ca_file.with_extension("new"), pem).unwrap();
        std::fs::rename(ca_file.with_extension("new"), &ca_file).unwrap();
    };
    trust(&Pki::new("another").unwrap().ca_pem());
    is(&proxy, "ejected").await;
    let reason = proxy.endpoints().await[0]["reason"].as_str().unwrap().to_owned();
    assert!(reason.contains("UnknownIssuer"), "{reason}");
    // Longer than the table takes to end the flows of a dead endpoint.
    for _ in 0..10 {
        pause(Duration::from_millis(50)).await;
        client.write_all(b"x").await.unwrap();
        assert_eq!(soon("a byte up", end.read_u8()).await.unwrap(), b'x');
    }
    // With nobody else there it is better than nothing.
    let _new = server.flow(&proxy).await;
    trust(&certs.pki.ca_pem());
    is(&proxy, "ready").await;
    end.write_all(b"y").await.unwrap();
    assert_eq!(soon("a byte down", client.read_u8()).await.unwrap(), b'y');
    assert_eq!(proxy.status().await["listeners"][0]["flows"], 2);
}

/// With TLS 1.3 it says so when our side of the handshake is done, and it is the same: it answers,
/// and what leads there is not its prober's business.
#[tokio::test]
async fn who_refuses_our_certificate_is_no_first_choice_and_keeps_its_flows() {
    let certs = Certs::new();
    let mut roots = RootCertStore::empty();
    roots.add(certs.pki.ca_der()).unwrap();
    let clients = WebPkiClientVerifier::builder(roots.into()).build().unwrap();
    let at = ([127, 0, 0, 1], 0).into();
    let mut server = Probed::start_with(at, &certs, &["h2"], clients).await;
    let file = certs.path().join("rotated.pem");
    let rotate = |pair: String| {
        std::fs::write(file.with_extension("new"), pair).unwrap();
        std::fs::rename(file.with_extension("new"), &file).unwrap();
    };
    rotate(certs.probe.pair_pem());
    let mut config = passthrough_config(certs.config(&[server.address]));
    config.upstreams[0].health.readyz.cert =
        Some(CertPaths { cert_file: file.clone(), key_file: file.clone() });
    let proxy = certs.start(config);
    proxy.wait_ready(1).await;
    let (mut client, mut end) = server.flow(&proxy).await;
    let strange = Pki::new("another").unwrap();
    rotate(strange.client(&Subject::new("probe", &[])).unwrap().pair_pem());
    is(&proxy, "ejected").await;
    let reason = proxy.endpoints().await[0]["reason"].as_str().unwrap().to_owned();
    assert!(reason.contains("received fatal alert"), "{reason}");
    // Longer than the table takes to end the flows of a dead endpoint.
    for _ in 0..10 {
        pause(Duration::from_millis(50)).await;
        client.write_all(b"x").await.unwrap();
        assert_eq!(soon("a byte up", end.read_u8()).await.unwrap(), b'x');
    }
    rotate(certs.probe.pair_pem());
    is(&proxy, "ready").await;
    end.write_all(b"y").await.unwrap();
    assert_eq!(soon("a byte down", client.read_u8()).await.unwrap(), b'y');
}

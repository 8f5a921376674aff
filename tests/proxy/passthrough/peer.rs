//! Servers behind a listener with flows, and helpers for their flows.

use crate::support::{Certs, Proxy, passthrough_config, soon, terminate_mode, tls, until};
use http::Response;
use jackstay_config::{Config, FlowSettings, PassedThrough};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::ClientCertVerifier;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio_rustls::TlsAcceptor;

/// A name in the apiservers' certificates.
pub const NAME: &str = "kubernetes.default.svc";

/// The first byte that a server of the test sends.
const ANSWER: u8 = b'!';

/// The listeners with flows: in mode `passthrough`, and in mode `terminate` for connections with [`NAME`].
pub const LISTENERS: [fn(Config) -> Config; 2] = [passthrough_config, pass_through_by_name];

/// Passes connections of the first listener, which terminates TLS, through that have the server name [`NAME`].
pub fn pass_through_by_name(mut config: Config) -> Config {
    let (server_names, flows) = (vec![NAME.into()], FlowSettings::default());
    terminate_mode(&mut config).passed_through =
        Some(Box::new(PassedThrough { server_names, flows }));
    config.upstreams[0].used_by.passthrough = true;
    config
}

/// The first bytes of a client of the test: a `ClientHello` with [`NAME`] after `padding` bytes, and little else, so
/// that it is shorter than those of the prober (RFC 8446 section 4.1.2, RFC 6066 section 3, RFC 7685).
pub fn client_hello(padding: usize) -> Vec<u8> {
    let sized = |bytes: &[u8]| [&u16::try_from(bytes.len()).unwrap().to_be_bytes(), bytes].concat();
    let name = sized(&[&[0], &*sized(NAME.as_bytes())].concat());
    let extensions = [&[0, 21], &*sized(&vec![0; padding]), &[0, 0], &*sized(&name)].concat();
    let body = [&[3, 3], &[7; 32][..], &[0, 0, 2, 0x13, 1, 1, 0], &*sized(&extensions)].concat();
    [&[22, 3, 1], &*sized(&[&[1, 0], &*sized(&body)].concat())].concat()
}

/// A server without TLS. The test accepts and serves its flows.
pub struct Peer {
    pub listener: TcpListener,
    pub address: SocketAddr,
    pub certs: Certs,
}

impl Peer {
    pub async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        Self { listener, address, certs: Certs::new() }
    }

    /// Accepts the next connection of the test. Connections of the prober are closed.
    pub async fn accept(&self) -> TcpStream {
        loop {
            let (mut stream, _) = soon("a connection", self.listener.accept()).await.unwrap();
            let hello = client_hello(0);
            let mut first = vec![0; hello.len()];
            let read = soon("its first bytes", stream.read_exact(&mut first)).await;
            if read.is_ok() && first == hello {
                return stream;
            }
        }
    }

    /// Opens a flow through the proxy. Returns its ends: client and server.
    pub async fn connect(&self, proxy: &Proxy) -> (TcpStream, TcpStream) {
        let client = TcpStream::connect(proxy.addr).await.unwrap();
        client.writable().await.unwrap();
        client.try_write(&client_hello(0)).unwrap();
        (client, self.accept().await)
    }
}

/// [`setup_with`] in front of one of [`LISTENERS`].
pub async fn setup_behind(
    listener: fn(Config) -> Config,
    change: impl FnOnce(&mut Config),
) -> (Peer, Proxy) {
    let peer = Peer::start().await;
    let mut config = listener(peer.certs.config(&[peer.address]));
    change(&mut config);
    let proxy = peer.certs.start(config);
    (peer, proxy)
}

/// A peer and a passthrough listener in front of it.
pub async fn setup() -> (Peer, Proxy) {
    setup_with(|_| {}).await
}

/// [`setup`] with a change of the configuration.
pub async fn setup_with(change: impl FnOnce(&mut Config)) -> (Peer, Proxy) {
    setup_behind(passthrough_config, change).await
}

/// Starts a passthrough listener in front of these addresses.
pub fn start_passthrough(
    certs: &Certs,
    addresses: &[SocketAddr],
    change: impl FnOnce(&mut Config),
) -> Proxy {
    let mut config = passthrough_config(certs.config(addresses));
    change(&mut config);
    certs.start(config)
}

/// Waits until the first listener has this number of flows.
pub async fn wait_flows(proxy: &Proxy, count: usize) {
    let what = format!("{count} flows");
    until(&what, async || proxy.status().await["listeners"][0]["flows"] == count).await;
}

/// Sends one byte from the client to the server.
pub async fn send_to_server((client, server): &mut (TcpStream, TcpStream)) {
    client.write_all(b"x").await.unwrap();
    assert_eq!(soon("a byte for the server", server.read_u8()).await.unwrap(), b'x');
}

/// Sends one byte from the server to the client.
pub async fn send_to_client((client, server): &mut (TcpStream, TcpStream)) {
    server.write_all(b"y").await.unwrap();
    assert_eq!(soon("a byte for the client", client.read_u8()).await.unwrap(), b'y');
}

/// Sends one byte in each direction.
pub async fn exchange(flow: &mut (TcpStream, TcpStream)) {
    send_to_server(flow).await;
    send_to_client(flow).await;
}

/// The behaviour of a [`ProbedServer`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Mode {
    Serve,
    /// Accepts no more connections and sends GOAWAY to the prober, as an apiserver does after SIGTERM. Flows
    /// continue.
    ShutDown,
    /// Accepts no more connections and closes that of the prober without GOAWAY. Flows stay open.
    Die,
}

/// A server that serves the prober with TLS and HTTP/2, and hands flows of the test to the test, on one port.
pub struct ProbedServer {
    pub address: SocketAddr,
    flows: mpsc::UnboundedReceiver<TcpStream>,
    mode: watch::Sender<Mode>,
    /// Changes to end the connections of probes.
    probes: watch::Sender<()>,
}

impl ProbedServer {
    /// A server that offers HTTP/2, and a passthrough listener in front of it.
    pub async fn setup() -> (Certs, Self, Proxy) {
        Self::setup_with(&["h2"], |_| {}).await
    }

    pub async fn setup_with(
        alpn: &[&str],
        change: impl FnOnce(&mut Config),
    ) -> (Certs, Self, Proxy) {
        Self::setup_behind(passthrough_config, alpn, change).await
    }

    /// [`Self::setup_with`] in front of one of [`LISTENERS`].
    pub async fn setup_behind(
        listener: fn(Config) -> Config,
        alpn: &[&str],
        change: impl FnOnce(&mut Config),
    ) -> (Certs, Self, Proxy) {
        let certs = Certs::new();
        let server = Self::start(&certs, alpn).await;
        let mut config = listener(certs.config(&[server.address]));
        change(&mut config);
        let proxy = certs.start(config);
        proxy.wait_ready(1).await;
        (certs, server, proxy)
    }

    pub async fn start(certs: &Certs, alpn: &[&str]) -> Self {
        Self::start_at(([127, 0, 0, 1], 0).into(), certs, alpn).await
    }

    pub async fn start_at(address: SocketAddr, certs: &Certs, alpn: &[&str]) -> Self {
        Self::start_with(address, certs, alpn, WebPkiClientVerifier::no_client_auth()).await
    }

    pub async fn start_with(
        address: SocketAddr,
        certs: &Certs,
        alpn: &[&str],
        clients: Arc<dyn ClientCertVerifier>,
    ) -> Self {
        let tls = TlsAcceptor::from(tls::server(&certs.pki.server().unwrap(), clients, alpn));
        let listener = TcpListener::bind(address).await.unwrap();
        let address = listener.local_addr().unwrap();
        let (sender, flows) = mpsc::unbounded_channel();
        let (mode, receiver) = watch::channel(Mode::Serve);
        let (probes, probes_end) = watch::channel(());
        tokio::spawn(async move {
            let mut listening = receiver.clone();
            loop {
                tokio::select! {
                    _ = listening.changed() => return,
                    accepted = listener.accept() => {
                        let Ok((stream, _)) = accepted else { return };
                        let mut signals = (receiver.clone(), probes_end.clone());
                        signals.1.mark_unchanged();
                        tokio::spawn(serve(stream, tls.clone(), sender.clone(), signals));
                    }
                }
            }
        });
        Self { address, flows, mode, probes }
    }

    /// Ends the connections of probes. The server goes on.
    pub fn end_probes(&self) {
        self.probes.send_replace(());
    }

    pub fn set_mode(&self, mode: Mode) {
        self.mode.send_replace(mode);
    }

    /// Opens a flow through the proxy. Returns its ends, client and server, after bytes in both directions.
    pub async fn flow(&mut self, proxy: &Proxy) -> (TcpStream, TcpStream) {
        soon("a flow", self.try_flow(proxy.addr)).await.unwrap()
    }

    /// [`Self::flow`] through this listener. The error is that of the client.
    pub async fn try_flow(&mut self, listener: SocketAddr) -> io::Result<(TcpStream, TcpStream)> {
        let mut client = TcpStream::connect(listener).await?;
        client.write_all(&client_hello(0)).await?;
        let mut server = tokio::select! {
            server = self.flows.recv() => server.unwrap(),
            end = client.read_u8() => return Err(end.expect_err("the server has sent nothing")),
        };
        server.write_all(&[ANSWER]).await?;
        assert_eq!(client.read_u8().await?, ANSWER);
        Ok((client, server))
    }
}

async fn serve(
    mut stream: TcpStream,
    tls: TlsAcceptor,
    flows: mpsc::UnboundedSender<TcpStream>,
    (mut mode, mut probes_end): (watch::Receiver<Mode>, watch::Receiver<()>),
) {
    let hello = client_hello(0);
    let mut first = vec![0; hello.len()];
    if stream.peek(&mut first).await.is_ok_and(|n| n == 0) {
        return;
    }
    if first == hello {
        let _ = stream.read_exact(&mut first).await;
        let _ = flows.send(stream);
        return;
    }
    let tls = match tls.accept(stream).into_fallible().await {
        Ok(tls) => tls,
        Err((_, mut stream)) => {
            // If the stream were closed with unread data, a reset would overtake the alert.
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
                let Some(Ok((_, mut respond))) = request else { return };
                let _ = respond.send_response(Response::new(()), true);
            }
            _ = probes_end.changed() => return,
            changed = mode.changed() => match changed.map(|()| *mode.borrow()) {
                Ok(Mode::ShutDown) => connection.graceful_shutdown(),
                Ok(Mode::Serve) => {}
                Ok(Mode::Die) | Err(_) => return,
            }
        }
    }
}

//! Servers behind a passthrough listener, and helpers for their flows.

use crate::support::{Certs, Proxy, passthrough_config, soon, tls, until};
use http::Response;
use jackstay::config::Config;
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::ClientCertVerifier;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio_rustls::TlsAcceptor;

/// The first byte that a client of the test sends. A connection of the prober begins with a TLS record (22).
const HELLO: u8 = b'!';

/// A server without TLS. The test accepts and serves its flows.
pub struct Peer {
    listener: TcpListener,
    pub address: SocketAddr,
    pub certs: Certs,
}

impl Peer {
    pub async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        Self { listener, address, certs: Certs::new() }
    }

    /// Starts a passthrough listener in front of this server.
    pub fn start_proxy(&self, change: impl FnOnce(&mut Config)) -> Proxy {
        start_passthrough(&self.certs, &[self.address], change)
    }

    /// Accepts the next connection of the test. Connections of the prober are closed.
    pub async fn accept(&self) -> TcpStream {
        loop {
            let (mut stream, _) = soon("a connection", self.listener.accept()).await.unwrap();
            if soon("its first byte", stream.read_u8()).await.is_ok_and(|byte| byte == HELLO) {
                return stream;
            }
        }
    }

    /// Opens a flow through the proxy. Returns its ends: client and server.
    pub async fn connect(&self, proxy: &Proxy) -> (TcpStream, TcpStream) {
        let client = TcpStream::connect(proxy.addr).await.unwrap();
        client.writable().await.unwrap();
        client.try_write(&[HELLO]).unwrap();
        (client, self.accept().await)
    }
}

/// A peer and a passthrough listener in front of it.
pub async fn setup() -> (Peer, Proxy) {
    setup_with(|_| {}).await
}

/// [`setup`] with a change of the configuration.
pub async fn setup_with(change: impl FnOnce(&mut Config)) -> (Peer, Proxy) {
    let peer = Peer::start().await;
    let proxy = peer.start_proxy(change);
    (peer, proxy)
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
        let certs = Certs::new();
        let server = Self::start(&certs, alpn).await;
        let proxy = start_passthrough(&certs, &[server.address], change);
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
        tokio::spawn(async move {
            let mut listening = receiver.clone();
            loop {
                tokio::select! {
                    _ = listening.changed() => return,
                    accepted = listener.accept() => {
                        let Ok((stream, _)) = accepted else { return };
                        tokio::spawn(serve(stream, tls.clone(), sender.clone(), receiver.clone()));
                    }
                }
            }
        });
        Self { address, flows, mode }
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
        client.write_all(&[HELLO]).await?;
        let mut server = tokio::select! {
            server = self.flows.recv() => server.unwrap(),
            end = client.read_u8() => return Err(end.expect_err("the server has sent nothing")),
        };
        server.write_all(&[HELLO]).await?;
        assert_eq!(client.read_u8().await?, HELLO);
        Ok((client, server))
    }
}

async fn serve(
    mut stream: TcpStream,
    tls: TlsAcceptor,
    flows: mpsc::UnboundedSender<TcpStream>,
    mut mode: watch::Receiver<Mode>,
) {
    let mut first = [0];
    if stream.peek(&mut first).await.is_ok_and(|n| n == 0) {
        return;
    }
    if first == [HELLO] {
        let _ = stream.read_u8().await;
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
            changed = mode.changed() => match changed.map(|()| *mode.borrow()) {
                Ok(Mode::ShutDown) => connection.graceful_shutdown(),
                Ok(Mode::Serve) => {}
                Ok(Mode::Die) | Err(_) => return,
            }
        }
    }
}

//! A server that says only what a test lets it say, and that nobody verifies.

use crate::support::{Proxy, soon};
use std::net::SocketAddr;
use tokio::io::AsyncReadExt;
use tokio::net::{TcpListener, TcpStream};

/// What a test's own connections begin with: the prober's begin with a TLS record (22).
const HELLO: u8 = b'!';

pub struct Peer {
    listener: TcpListener,
    pub address: SocketAddr,
}

impl Peer {
    pub async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        Self { listener, address }
    }

    /// The next connection that a test has made.
    pub async fn accept(&self) -> TcpStream {
        loop {
            let (mut stream, _) = soon("a connection", self.listener.accept()).await.unwrap();
            // The prober's end at once: this is no TLS server.
            if soon("its first byte", stream.read_u8()).await.is_ok_and(|byte| byte == HELLO) {
                return stream;
            }
        }
    }

    /// A connection through the proxy, and both of its ends.
    pub async fn join(&self, proxy: &Proxy) -> (TcpStream, TcpStream) {
        let client = TcpStream::connect(proxy.addr).await.unwrap();
        client.writable().await.unwrap();
        client.try_write(&[HELLO]).unwrap();
        (client, self.accept().await)
    }
}

//! The physical limit of a proxy that terminates TLS: a relay that decrypts the bytes of each client connection, encrypts
//! them on one connection to the origin, and interprets nothing. It moves the same bytes as a proxy at L7 with TLS and
//! system calls alone.
//!
//! The process is this program with the argument `tls-relay`. It serves until its standard input closes.

use std::{io::Read, net::SocketAddr, path::Path, thread};

use rustls::pki_types::ServerName;
use tokio::{
    io::{BufReader, copy_bidirectional_with_sizes},
    net::{TcpListener, TcpStream},
};
use tokio_rustls::{TlsAcceptor, TlsConnector};

use crate::{
    Result,
    pki::{Pki, SERVER_NAME},
};

/// Bytes that are read from a socket at once.
const READ: usize = 256 << 10;
/// Bytes that are encrypted and written at once: four TLS records.
const BUFFER: usize = 64 << 10;

/// Relays connections to `listen` until standard input ends, in one thread.
pub fn run(dir: &Path, listen: SocketAddr, origin: SocketAddr) -> Result<()> {
    thread::spawn(|| {
        let _ = std::io::stdin().read(&mut [0]);
        std::process::exit(0);
    });
    let pki = Pki::in_dir(dir);
    let acceptor = TlsAcceptor::from(pki.server_config()?);
    let connector = TlsConnector::from(pki.client_config()?);
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
        let listener = TcpListener::bind(listen).await?;
        loop {
            let (client, _) = listener.accept().await?;
            let (acceptor, connector) = (acceptor.clone(), connector.clone());
            // Client and origin see a failure.
            tokio::spawn(async move { relay(client, origin, acceptor, connector).await.ok() });
        }
    })
}

async fn relay(
    client: TcpStream,
    origin: SocketAddr,
    acceptor: TlsAcceptor,
    connector: TlsConnector,
) -> Result<()> {
    client.set_nodelay(true)?;
    // rustls alone reads 4 KiB at once.
    let mut client = acceptor.accept(BufReader::with_capacity(READ, client)).await?;
    let server = TcpStream::connect(origin).await?;
    server.set_nodelay(true)?;
    let server = BufReader::with_capacity(READ, server);
    let mut server = connector.connect(ServerName::try_from(SERVER_NAME)?, server).await?;
    copy_bidirectional_with_sizes(&mut client, &mut server, BUFFER, BUFFER).await?;
    Ok(())
}

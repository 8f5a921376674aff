//! `ClientHello`s with a server name that the L7 listener passes through.

use std::io;
use std::sync::Arc;

use rustls::ClientConnection;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::repeat;
use crate::hostile::raw::{drain, tls_config};
use crate::hostile::rig::{PASSED_THROUGH, Target};

/// The name that the listener passes through.
pub fn name() -> ServerName<'static> {
    ServerName::try_from(PASSED_THROUGH).unwrap()
}

/// A `ClientHello` with it.
fn hello() -> Arc<[u8]> {
    let mut client = ClientConnection::new(tls_config("h2", None), name()).unwrap();
    let mut bytes = Vec::new();
    client.write_tls(&mut bytes).unwrap();
    bytes.into()
}

async fn connect(target: &Target, bytes: &[u8]) -> io::Result<TcpStream> {
    let mut stream = TcpStream::connect(target.server).await?;
    stream.set_nodelay(true)?;
    stream.write_all(bytes).await?;
    Ok(stream)
}

/// Connections that send this part of a `ClientHello`, in percent, and then nothing until the server closes them.
pub async fn idle(target: &Target, connections: usize, percent: usize) {
    let hello = hello();
    repeat(connections, |_| {
        let (target, hello) = (target.clone(), Arc::clone(&hello));
        async move {
            let part = &hello[..hello.len() * percent / 100];
            drain(connect(&target, part).await?).await;
            Ok(())
        }
    })
    .await;
}

/// Flows that end after the first byte of an apiserver.
pub async fn short(target: &Target, connections: usize) {
    let hello = hello();
    repeat(connections, |_| {
        let (target, hello) = (target.clone(), Arc::clone(&hello));
        async move {
            let mut stream = connect(&target, &hello).await?;
            stream.read_u8().await.map(drop)
        }
    })
    .await;
}

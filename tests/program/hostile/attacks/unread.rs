//! Sockets that are not read, so that the kernel of the proxy's host holds their bytes.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use rustls::pki_types::ServerName;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::repeat;
use crate::hostile::raw::{Tls, connect_h2, connect_tls, connect_tls_to, get, tls_config};
use crate::hostile::rig::VALID_TOKEN;
use crate::support::http2::{INITIAL_WINDOW_SIZE, WINDOW_UPDATE, frame};

/// A response of 1 GB.
const ENDLESS: &str = "/bytes?size=1000000000";
/// The largest window (RFC 9113, section 6.9.1).
const MAX_WINDOW: u32 = (1 << 31) - 1;
/// Bytes that are read before a client stops, so that the kernel of the proxy's host enlarges its buffers.
const READ: usize = 8 << 20;

/// Asks for a response again and again, and reads nothing once `read` bytes have arrived. The connection is full in
/// both directions then.
async fn pipeline(mut tls: Tls, read: usize) -> io::Result<()> {
    let request = format!(
        "GET {ENDLESS} HTTP/1.1\r\nHost: api\r\nAuthorization: Bearer {VALID_TOKEN}\r\n\r\n"
    );
    tls.write_all(request.as_bytes()).await?;
    tls.flush().await?;
    let mut piece = vec![0; 64 << 10];
    let mut received = 0;
    while received < read {
        match tls.read(&mut piece).await? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            count => received += count,
        }
    }
    loop {
        tls.write_all(request.as_bytes()).await?;
    }
}

/// Connections to the L7 listener with HTTP/1.1.
pub async fn http1(server: SocketAddr, connections: usize) {
    let config = tls_config("http/1.1", None);
    repeat(connections, |_| {
        let config = Arc::clone(&config);
        async move { pipeline(connect_tls(server, &config).await?, 0).await }
    })
    .await;
}

/// Connections to the L7 listener with HTTP/2, whose windows are open.
pub async fn http2(server: SocketAddr, connections: usize) {
    let config = tls_config("h2", None);
    repeat(connections, |_| {
        let config = Arc::clone(&config);
        async move {
            let mut tls = connect_h2(server, &config, &[(INITIAL_WINDOW_SIZE, MAX_WINDOW)]).await?;
            let more = (MAX_WINDOW - 65_535).to_be_bytes();
            tls.write_all(&frame(WINDOW_UPDATE, 0, 0, &more)).await?;
            let token = format!("Bearer {VALID_TOKEN}");
            for id in (1..).step_by(2) {
                tls.write_all(&get(id, ENDLESS, &[("authorization", &token)])).await?;
                tls.flush().await?;
            }
            Ok(())
        }
    })
    .await;
}

/// Flows to this listener with this server name, which were fast before.
pub async fn flows(server: SocketAddr, name: ServerName<'static>, connections: usize) {
    let config = tls_config("http/1.1", None);
    repeat(connections, |_| {
        let (config, name) = (Arc::clone(&config), name.clone());
        async move { pipeline(connect_tls_to(server, name, &config).await?, READ).await }
    })
    .await;
}

//! Requests with tokens that the apiservers reject.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use rustls::ClientConfig;
use tokio::io::{AsyncReadExt, AsyncWriteExt, split};

use super::repeat;
use crate::hostile::raw::{connect_h2, connect_tls, drain, get, tls_config};
use crate::hostile::rig::{Target, VALID_TOKEN};
use crate::support::CONFIGMAPS;

/// Requests on one connection.
const REQUESTS: u32 = 1000;

pub async fn random(target: &Target, connections: usize) {
    let (server, config) = (target.server, tls_config("h2", None));
    repeat(connections, |_| {
        requests(server, Arc::clone(&config), || format!("Bearer {:016x}", fastrand::u64(..)))
    })
    .await;
}

/// Connections that stay open after a request with a token that the apiservers reject.
pub async fn idle(target: &Target, connections: usize) {
    let (server, config) = (target.server, tls_config("h2", None));
    repeat(connections, |_| {
        let config = Arc::clone(&config);
        async move {
            let mut tls = connect_h2(server, &config, &[]).await?;
            let token = format!("Bearer {:016x}", fastrand::u64(..));
            let path = format!("{CONFIGMAPS}?limit=1");
            tls.write_all(&get(1, &path, &[("authorization", &token)])).await?;
            tls.flush().await?;
            drain(tls).await;
            Ok(())
        }
    })
    .await;
}

/// kube-apiserver ignores everything after the second field of the header.
pub async fn suffixes(target: &Target, connections: usize) {
    let (server, config) = (target.server, tls_config("h2", None));
    repeat(connections, |_| {
        requests(server, Arc::clone(&config), || {
            format!("Bearer {VALID_TOKEN} {:016x}", fastrand::u64(..))
        })
    })
    .await;
}

async fn requests(
    server: SocketAddr,
    config: Arc<ClientConfig>,
    authorization: fn() -> String,
) -> io::Result<()> {
    let tls = connect_h2(server, &config, &[]).await?;
    let (reader, mut writer) = split(tls);
    let reading = tokio::spawn(drain(reader));
    for n in 0..REQUESTS {
        let path = format!("{CONFIGMAPS}?limit=1");
        writer.write_all(&get(2 * n + 1, &path, &[("authorization", &authorization())])).await?;
    }
    writer.flush().await?;
    let _ = reading.await;
    Ok(())
}

pub async fn upgrades(target: &Target, connections: usize) {
    let (server, config) = (target.server, tls_config("http/1.1", None));
    repeat(connections, |_| {
        let config = Arc::clone(&config);
        async move {
            let mut tls = connect_tls(server, &config).await?;
            let request = format!(
                "POST /api/v1/namespaces/d/pods/p/exec?command=sh HTTP/1.1\r\nHost: api\r\n\
                 Connection: Upgrade\r\nUpgrade: SPDY/3.1\r\nContent-Length: 0\r\n\
                 Authorization: Bearer {:016x}\r\n\r\n",
                fastrand::u64(..)
            );
            tls.write_all(request.as_bytes()).await?;
            let mut response = [0; 512];
            tls.read(&mut response).await.map(drop)
        }
    })
    .await;
}

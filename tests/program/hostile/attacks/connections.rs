//! Many connections, and costly handshakes.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use rcgen::{
    BasicConstraints, CertificateParams, CustomExtension, DistinguishedName, DnType, IsCa, Issuer,
    KeyPair,
};
use rustls::ClientConfig;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;

use super::repeat;
use crate::hostile::raw::{connect_tls, drain, tls_config};
use crate::hostile::rig::Target;
use crate::support::pause;

const REQUEST: &[u8] = b"GET /version HTTP/1.1\r\nHost: api\r\n\r\n";

pub async fn idle_admin(target: &Target) {
    let Some(admin) = target.admin else { return };
    repeat(400, |_| idle(admin)).await;
}

pub async fn idle_tcp(target: &Target) {
    let server = target.server;
    repeat(4200, |_| idle(server)).await;
}

/// A connection that sends nothing, until the server closes it.
async fn idle(server: SocketAddr) -> io::Result<()> {
    let stream = TcpStream::connect(server).await?;
    drain(stream).await;
    Ok(())
}

/// Connections that send nothing, and that the client never closes.
pub async fn lingering(target: &Target, count: usize) {
    let mut open = Vec::new();
    while open.len() < count {
        let connecting = (0..100).map(|_| TcpStream::connect(target.server));
        open.extend(join_all(connecting).await.into_iter().flatten());
        pause(Duration::from_millis(5)).await;
    }
    pause(target.duration).await;
}

/// Connections that send nothing and are closed: 18,000 a second, as far as the proxy accepts as many.
pub async fn reopened(target: &Target) {
    let server = target.server;
    repeat(2900, |_| async move {
        let stream = TcpStream::connect(server).await?;
        pause(Duration::from_millis(155)).await;
        drop(stream);
        Ok(())
    })
    .await;
}

pub async fn idle_tls(target: &Target) {
    let (server, config) = (target.server, tls_config("http/1.1", None));
    repeat(4200, |_| {
        let config = Arc::clone(&config);
        async move {
            let mut tls = connect_tls(server, &config).await?;
            tls.write_all(REQUEST).await?;
            drain(tls).await;
            Ok(())
        }
    })
    .await;
}

pub async fn handshakes(target: &Target) {
    let (server, config) = (target.server, tls_config("http/1.1", None));
    repeat(50, |_| {
        let config = Arc::clone(&config);
        async move { connect_tls(server, &config).await.map(drop) }
    })
    .await;
}

/// Each certificate might have signed each other, so that a verifier tries many paths.
pub async fn certificate_chains(target: &Target) {
    let config = tls_config("http/1.1", Some(chain("nobody", 5, 0)));
    requests_with_chain(target, 50, config).await;
}

pub async fn large_chains(target: &Target) {
    let config = tls_config("http/1.1", Some(chain("nobody", 4, 6 << 10)));
    requests_with_chain(target, 2000, config).await;
}

/// One request a connection, which then stays open for a while.
async fn requests_with_chain(target: &Target, count: usize, config: Arc<ClientConfig>) {
    let server = target.server;
    repeat(count, |_| {
        let config = Arc::clone(&config);
        async move {
            let mut tls = connect_tls(server, &config).await?;
            tls.write_all(REQUEST).await?;
            tls.flush().await?;
            let _ = tokio::time::timeout(Duration::from_secs(1), drain(tls)).await;
            pause(Duration::from_millis(5)).await;
            Ok(())
        }
    })
    .await;
}

/// A leaf, and CA certificates of one name, each with an extension of this many bytes.
fn chain(
    name: &str,
    authorities: usize,
    filling: usize,
) -> (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>) {
    let authority = || {
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        if filling > 0 {
            let oid = [1, 3, 6, 1, 4, 1, 99_999];
            params.custom_extensions =
                vec![CustomExtension::from_oid_content(&oid, vec![4; filling])];
        }
        let key = KeyPair::generate().unwrap();
        (params.self_signed(&key).unwrap().der().clone(), params, key)
    };
    let mut leaf = CertificateParams::default();
    leaf.distinguished_name.push(DnType::CommonName, "mallory");
    let key = KeyPair::generate().unwrap();
    let (_, params, issuer) = authority();
    let leaf = leaf.signed_by(&key, &Issuer::new(params, issuer)).unwrap().der().clone();
    let chain = std::iter::once(leaf).chain((0..authorities).map(|_| authority().0));
    (chain.collect(), PrivatePkcs8KeyDer::from(key.serialize_der()).into())
}

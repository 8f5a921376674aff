//! Several small apiservers behind one address.

use std::net::Ipv4Addr;
use std::time::Duration;

use jackstay_apiserver::cluster::Cluster;
use jackstay_apiserver::pki::{Pki, Subject};
use jackstay_apiserver::{ApiServerHandle, Options};
use jackstay_config::CertPaths;
use jackstay_core::backends::Kind;
use jackstay_kubeconfig::ServerUrl;
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{LocalSet, spawn_local};

use super::*;
use crate::doctor::observations::EndpointSource;
use crate::doctor::target::{CredentialFiles, Trust};

/// Starts a TCP balancer: each connection reaches the next of the servers.
async fn balancer(servers: Vec<SocketAddr>) -> SocketAddr {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let address = listener.local_addr().unwrap();
    spawn_local(async move {
        for server in servers.iter().cycle() {
            let Ok((mut client, _)) = listener.accept().await else { return };
            let server = *server;
            spawn_local(async move {
                let mut server = TcpStream::connect(server).await.unwrap();
                let _ = copy_bidirectional(&mut client, &mut server).await;
            });
        }
    });
    address
}

/// Examines the address of a balancer in front of this number of apiservers, with or without a credential.
fn examined(servers: usize, has_credential: bool) -> AddressBackends {
    let pki = Pki::new("kubernetes").unwrap();
    let dir = tempfile::tempdir().unwrap();
    pki.write_ca(dir.path()).unwrap();
    let admin = pki.client(&Subject::admin()).unwrap();
    let (cert_file, key_file) = admin.write_to(dir.path(), "admin").unwrap();
    let trust = Trust::of_files(&CredentialFiles {
        ca: Some(dir.path().join("ca.crt")),
        certificate: has_credential.then_some(CertPaths { cert_file, key_file }),
        token: None,
    });
    let cluster = Cluster::new();
    let start = |number| {
        let options = Options::named(&format!("apiserver-{number}"));
        jackstay_apiserver::start(&cluster, &pki, options).unwrap()
    };
    let servers: Vec<ApiServerHandle> = (0..servers).map(start).collect();
    let addresses = servers.iter().map(|server| server.addr).collect();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    LocalSet::new().block_on(&runtime, async {
        let address = balancer(addresses).await;
        let server = ServerUrl::parse(&address.to_string()).unwrap();
        let target = Target::new(&server, EndpointSource::Given, None, &trust.unwrap()).unwrap();
        examine(&target, address, clock::now() + Duration::from_secs(30)).await
    })
}

#[test]
fn examine_tells_apiservers_behind_a_balancer_apart() {
    let AddressBackends { kind, mut backends, connections, .. } = examined(3, true);
    backends.sort();
    assert_eq!((kind, connections), (Kind::Several(3), SURVEY));
    assert_eq!(backends, ["apiserver-0", "apiserver-1", "apiserver-2"]);
}

#[test]
fn examine_without_credential_uses_the_certificates() {
    let behind = examined(2, false);
    assert_eq!(behind.kind, Kind::Several(2));
    assert!(behind.backends.iter().all(|name| name.starts_with("certificate-")), "{behind:?}");
}

#[test]
fn examine_single_apiserver_is_one() {
    let behind = examined(1, true);
    assert!(behind.is_always_one(), "{behind:?}");
    assert_eq!(behind.backends, ["apiserver-0"]);
}

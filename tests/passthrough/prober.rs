//! The state that the prober finds a server in, and its effect on the flows of the server.

use crate::peer::{
    Mode, ProbedServer, exchange, send_to_client, send_to_server, start_passthrough,
};
use crate::support::{Certs, pause, replace_file, soon, tls};
use jackstay::config::CertPaths;
use jackstay_apiserver::pki::{Pki, Subject};
use std::io::ErrorKind;
use std::time::Duration;
use tokio::io::AsyncReadExt;

/// An apiserver that shuts down sends GOAWAY and closes its port while its requests still run. A dead apiserver
/// sends no GOAWAY.
#[tokio::test]
async fn flows_continue_during_a_shutdown_and_are_reset_when_the_server_dies() {
    for mode in [Mode::ShutDown, Mode::Die] {
        let (_certs, mut server, proxy) = ProbedServer::setup().await;
        let mut flow = server.flow(&proxy).await;
        server.set_mode(mode);
        proxy.wait_all("ejected").await;
        if mode == Mode::Die {
            let error = soon("the reset", flow.0.read_u8()).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::ConnectionReset);
            proxy.wait_metrics(r#"reason="endpoint_dead"} 1"#).await;
            continue;
        }
        // The exchange takes longer than jackstay needs to end the flows of a dead endpoint.
        for _ in 0..10 {
            pause(Duration::from_millis(50)).await;
            exchange(&mut flow).await;
        }
        assert_eq!(proxy.status().await["listeners"][0]["flows"], 1);
    }
}

/// The server is not an apiserver, or is behind a proxy. The probe is a TLS handshake each second.
#[tokio::test]
async fn server_without_http2_is_probed_by_tls_handshakes() {
    for alpn in [&[][..], &["http/1.1"][..]] {
        let (certs, mut server, proxy) = ProbedServer::setup_with(alpn, |_| {}).await;
        let reason = proxy.endpoints().await[0]["reason"].as_str().unwrap().to_owned();
        assert!(reason.starts_with("TLS handshake only"), "{reason}");
        let (mut client, _server_end) = server.flow(&proxy).await;
        server.set_mode(Mode::Die);
        proxy.wait_all("ejected").await;
        let error = soon("the reset", client.read_u8()).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
        let _restarted = ProbedServer::start_at(server.address, &certs, alpn).await;
        proxy.wait_ready(1).await;
    }
}

/// A server with an unverifiable certificate is not dead, so its flows continue.
#[tokio::test]
async fn unverifiable_server_is_ejected_and_keeps_its_flows() {
    let (certs, mut server, proxy) = ProbedServer::setup().await;
    let mut flow = server.flow(&proxy).await;
    let ca_file = certs.path().join("ca.crt");
    replace_file(&ca_file, &Pki::new("another").unwrap().ca_pem());
    proxy.wait_all("ejected").await;
    let reason = proxy.endpoints().await[0]["reason"].as_str().unwrap().to_owned();
    assert!(reason.contains("the certificate is not signed by a trusted CA"), "{reason}");
    // The bytes take longer than jackstay needs to end the flows of a dead endpoint.
    for _ in 0..10 {
        pause(Duration::from_millis(50)).await;
        send_to_server(&mut flow).await;
    }
    // The endpoint gets new flows although it is ejected, because it is the only one.
    let _new = server.flow(&proxy).await;
    replace_file(&ca_file, &certs.pki.ca_pem());
    proxy.wait_all("ready").await;
    send_to_client(&mut flow).await;
    assert_eq!(proxy.status().await["listeners"][0]["flows"], 2);
}

/// With TLS 1.3 the server rejects the certificate after the client has finished the handshake. The server is
/// alive, so its flows continue.
#[tokio::test]
async fn server_that_rejects_the_probe_certificate_is_ejected_and_keeps_its_flows() {
    let certs = Certs::new();
    let clients = tls::clients_of(certs.pki.ca_der(), false);
    let at = ([127, 0, 0, 1], 0).into();
    let mut server = ProbedServer::start_with(at, &certs, &["h2"], clients).await;
    let file = certs.path().join("rotated.pem");
    replace_file(&file, &certs.probe.pair_pem());
    let pair = CertPaths { cert_file: file.clone(), key_file: file.clone() };
    let proxy = start_passthrough(&certs, &[server.address], |config| {
        config.upstreams[0].health.readyz.cert = Some(pair);
    });
    proxy.wait_ready(1).await;
    let mut flow = server.flow(&proxy).await;
    let other_ca = Pki::new("another").unwrap();
    replace_file(&file, &other_ca.client(&Subject::new("probe", &[])).unwrap().pair_pem());
    proxy.wait_all("ejected").await;
    let reason = proxy.endpoints().await[0]["reason"].as_str().unwrap().to_owned();
    assert!(reason.contains("the peer sent the TLS alert \""), "{reason}");
    // The bytes take longer than jackstay needs to end the flows of a dead endpoint.
    for _ in 0..10 {
        pause(Duration::from_millis(50)).await;
        send_to_server(&mut flow).await;
    }
    replace_file(&file, &certs.probe.pair_pem());
    proxy.wait_all("ready").await;
    send_to_client(&mut flow).await;
}

//! The state that the prober finds a server in, and its effect on the flows of the server.

use crate::passthrough::peer::{
    Mode, Peer, ProbedServer, exchange, send_to_client, send_to_server, start_passthrough,
};
use crate::support::{
    Certs, Proxy, passthrough_config, pause, replace_file, soon, terminate_mode, tls, until,
};
use jackstay_apiserver::pki::{Pki, Subject};
use jackstay_config::CertPaths;
use serde_json::Value;
use std::io::ErrorKind;
use std::time::Duration;
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;

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

/// Asserts that the state says what clients get: `/readyz`, and whether the only endpoint is usable.
async fn assert_serving(proxy: &Proxy, serves: bool) {
    let page = proxy.page("/readyz?verbose").await;
    assert_eq!(page.starts_with("HTTP/1.1 200"), serves, "{page}");
    assert_eq!(proxy.endpoints().await[0]["usable"], serves, "{page}");
}

/// Asserts that a new client is reset, which it may notice while it connects.
async fn expect_reset(proxy: &Proxy) {
    let refused = async { TcpStream::connect(proxy.addr).await?.read_u8().await };
    let error = soon("the reset", refused).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
}

/// The events of `/status` that report an outage.
async fn outages(proxy: &Proxy) -> Vec<Value> {
    let mut events = proxy.events().await;
    events.retain(|event| event["to"] == "unusable");
    events
}

/// Waits until an event has this reason why the previous CA bundle or certificate stays in use, with which the endpoint
/// is ready. Then ends the connection with it.
async fn end_previous(proxy: &Proxy, server: &ProbedServer, reason: &str) {
    let is_wait = |event: &Value| {
        event["to"] == "not accepted" && event["reason"].as_str().unwrap().contains(reason)
    };
    until("the previous one stays in use", async || proxy.events().await.iter().any(is_wait)).await;
    proxy.wait_all("ready").await;
    server.end_probes();
    proxy.wait_all("unverified").await;
}

const UNKNOWN_ISSUER: &str = "is not signed by a trusted CA";

/// A server with an unverifiable certificate is not dead, so its flows continue.
#[tokio::test]
async fn server_that_the_probe_cannot_verify_serves_flows_and_is_shown_so() {
    let (certs, mut server, proxy) = ProbedServer::setup().await;
    let mut flow = server.flow(&proxy).await;
    let ca_file = certs.path().join("ca.crt");
    replace_file(&ca_file, &Pki::new("another").unwrap().ca_pem());
    end_previous(&proxy, &server, UNKNOWN_ISSUER).await;
    let reason = proxy.endpoints().await[0]["reason"].as_str().unwrap().to_owned();
    assert!(reason.starts_with("the probe fails: TLS to "), "{reason}");
    assert!(reason.contains(UNKNOWN_ISSUER), "{reason}");
    assert!(reason.ends_with("; flows are forwarded"), "{reason}");
    assert_serving(&proxy, true).await;
    // The bytes take longer than jackstay needs to end the flows of a dead endpoint.
    for _ in 0..10 {
        pause(Duration::from_millis(50)).await;
        send_to_server(&mut flow).await;
    }
    // The endpoint gets new flows, because it is the only one.
    let _new = server.flow(&proxy).await;
    assert_serving(&proxy, true).await;
    assert_eq!(outages(&proxy).await, [] as [Value; 0]);
    replace_file(&ca_file, &certs.pki.ca_pem());
    proxy.wait_all("ready").await;
    send_to_client(&mut flow).await;
    assert_eq!(proxy.status().await["listeners"][0]["flows"], 2);
}

/// With TLS 1.3 the server rejects the certificate after the client has finished the handshake. The server is
/// alive, so its flows continue.
#[tokio::test]
async fn server_that_rejects_the_probe_certificate_serves_flows_and_is_shown_so() {
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
    end_previous(&proxy, &server, "the peer sent the TLS alert").await;
    assert_serving(&proxy, true).await;
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

/// An unverified server that dies is as dead as another one.
#[tokio::test]
async fn unverified_server_that_dies_is_ejected_and_clients_are_reset() {
    let (certs, mut server, proxy) = ProbedServer::setup().await;
    replace_file(&certs.path().join("ca.crt"), &Pki::new("another").unwrap().ca_pem());
    end_previous(&proxy, &server, UNKNOWN_ISSUER).await;
    let _flow = server.flow(&proxy).await;
    server.set_mode(Mode::Die);
    proxy.wait_all("ejected").await;
    assert_serving(&proxy, false).await;
    expect_reset(&proxy).await;
    until("an outage is reported", async || !outages(&proxy).await.is_empty()).await;
    let _restarted = ProbedServer::start_at(server.address, &certs, &["h2"]).await;
    proxy.wait_all("unverified").await;
    assert_serving(&proxy, true).await;
}

/// A server that serves clients, but closes the connections of the probe, as one that routes by a server name that the
/// probe does not send. What clients get decides.
#[tokio::test]
async fn server_that_closes_probes_is_usable_while_it_answers_flows() {
    let (peer, proxy) = crate::passthrough::peer::setup().await;
    // The peer accepts and closes connections of the probe while it waits for that of the test.
    let (_first, ()) = tokio::join!(peer.connect(&proxy), proxy.wait_all("ejected"));
    assert_serving(&proxy, false).await;
    let mut flow = peer.connect(&proxy).await;
    send_to_client(&mut flow).await;
    until("the endpoint is usable", async || proxy.endpoints().await[0]["usable"] == true).await;
    assert_serving(&proxy, true).await;
    exchange(&mut flow).await;
    // A client that is refused ends it.
    let Peer { listener, .. } = peer;
    drop(listener);
    expect_reset(&proxy).await;
    assert_serving(&proxy, false).await;
}

/// An upstream of both kinds of listeners serves requests only with a verified connection; the line of its outage does
/// not say that flows are reset.
#[tokio::test]
async fn unverifiable_server_of_both_kinds_of_listeners_is_ejected_for_requests_only() {
    let certs = Certs::new();
    let mut server = ProbedServer::start(&certs, &["h2"]).await;
    let mut config = certs.config(&[server.address]);
    terminate_mode(&mut config);
    let mut flows = passthrough_config(config.clone()).listeners.remove(0);
    flows.name = "flows".into();
    config.listeners.push(flows);
    config.upstreams[0].used_by.passthrough = true;
    let other_ca = certs.path().join("other-ca.crt");
    std::fs::write(&other_ca, Pki::new("another").unwrap().ca_pem()).unwrap();
    config.upstreams[0].tls.ca_file = Some(other_ca);
    let app = jackstay::app::App::bind(config).unwrap();
    let flow_listener = app.listener_addresses("flows")[0];
    let proxy = Proxy::start(app, &certs);
    proxy.wait_all("ejected").await;
    assert_serving(&proxy, false).await;
    let mut flow = soon("a flow", server.try_flow(flow_listener)).await.unwrap();
    exchange(&mut flow).await;
    let client = proxy.client().await;
    assert_eq!(client.get("/version").await.unwrap().status, 503);
    until("an outage is reported", async || !outages(&proxy).await.is_empty()).await;
    let outage = outages(&proxy).await.remove(0).to_string();
    assert!(outage.contains("requests get 503"), "{outage}");
    assert!(outage.contains("flows are forwarded"), "{outage}");
    assert!(!outage.contains("reset"), "{outage}");
}

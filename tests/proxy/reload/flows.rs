//! Flows when a reload changes the server names that a listener passes through, or removes the listener.

use crate::reload::setup::Setup;
use crate::support::figures::check_figure;
use crate::support::stopwatch::Stopwatch;
use crate::support::{
    HangingEndpoint, passthrough_config, passthrough_mode, soon, terminate_mode, until, wire,
};
use jackstay_apiserver::client::{Client, Credentials};
use jackstay_apiserver::pki::Subject;
use jackstay_config::{Config, FlowSettings, PassedThrough, Route};
use jackstay_core::discovery::address::EndpointAddress;
use rustls::pki_types::ServerName;
use serde_json::Value;
use std::io::ErrorKind;
use std::time::Duration;
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;

const PATH: &str = "/api/v1/namespaces/default";
/// A name in the apiservers' certificates.
const NAME: &str = "kubernetes.default.svc";

fn pass_through(config: &mut Config, flows: FlowSettings) {
    let server_names = vec![NAME.into()];
    terminate_mode(config).passed_through = Some(Box::new(PassedThrough { server_names, flows }));
}

fn remove_names(config: &mut Config) {
    terminate_mode(config).passed_through = None;
}

/// The credentials of a user without an identity at the listener; its TLS server name is [`NAME`].
fn credentials(setup: &Setup) -> Credentials {
    let certs = &setup.cluster.certs;
    let alice = certs.pki.client(&Subject::new("alice", &[])).unwrap();
    certs.anonymous().certificate(&alice).expecting(NAME)
}

async fn connect(setup: &Setup) -> Client {
    Client::connect(setup.proxy.addr, &credentials(setup)).await.unwrap()
}

async fn status(client: &Client) -> u16 {
    client.get(PATH).await.unwrap().status.as_u16()
}

/// A flow whose listener passes no name through any more.
async fn flow_without_names(setup: &mut Setup) -> Client {
    let flow = connect(setup).await;
    assert_eq!(status(&flow).await, 200);
    setup.change(remove_names).await;
    flow
}

/// The number of flows that `/status` shows for the listener.
async fn flows(setup: &Setup) -> Option<Value> {
    setup.proxy.status().await["listeners"][0].get("flows").cloned()
}

/// Waits until the only flow has ended for this reason, and expects that `/status` shows no flows then.
async fn wait_end(setup: &Setup, flow: &Client, reason: &str) {
    until("the flow is reset", async || flow.is_closed()).await;
    let series = r#"jackstay_passthrough_closed_total{listener="apiserver""#;
    setup.proxy.wait_metrics(&format!(r#"{series},reason="{reason}"}} 1"#)).await;
    assert_eq!(flows(setup).await, None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn names_come_and_go_and_open_flows_continue() {
    let mut setup = Setup::new(1).await;
    let terminated = connect(&setup).await;
    assert_eq!(status(&terminated).await, 401);

    let changes = setup.change(|config| pass_through(config, FlowSettings::default())).await;
    assert_eq!(changes, ["listener `apiserver` changed"]);
    let flow = connect(&setup).await;
    assert_eq!((status(&flow).await, status(&terminated).await), (200, 401));

    setup.change(remove_names).await;
    let later = connect(&setup).await;
    assert_eq!((status(&flow).await, status(&later).await), (200, 401));
    assert_eq!(flows(&setup).await, Some(1.into()));
    drop(flow);
    until("the flow ends", async || flows(&setup).await.is_none()).await;
    assert_eq!(setup.proxy.status().await["listeners"][0]["connections"], 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn flow_ends_after_its_idle_timeout_without_names() {
    let mut setup = Setup::with(1, |config| {
        let idle_timeout = Some(Duration::from_secs(5));
        pass_through(config, FlowSettings { idle_timeout, ..FlowSettings::default() });
    })
    .await;
    let flow = flow_without_names(&mut setup).await;
    assert_eq!(flows(&setup).await, Some(1.into()));
    wait_end(&setup, &flow, "idle_timeout").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn flow_to_a_removed_endpoint_ends_after_its_leave_timeout_without_names() {
    let mut setup = Setup::with(2, |config| {
        let leave_timeout = Duration::from_secs(1);
        pass_through(config, FlowSettings { leave_timeout, ..FlowSettings::default() });
    })
    .await;
    let flow = flow_without_names(&mut setup).await;
    let endpoints = setup.proxy.endpoints().await;
    let with_flow = endpoints.iter().position(|endpoint| endpoint["flows"] == 1).unwrap();
    setup.change(|config| drop(config.upstreams[0].endpoints.remove(with_flow))).await;
    wait_end(&setup, &flow, "endpoint_left").await;
}

/// The kernel of a stopped server acknowledges what it receives, so only an examination finds out.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn flow_of_a_stopped_server_is_reset_without_names() {
    let mut setup = Setup::with(2, |config| {
        pass_through(config, FlowSettings::default());
        // Without an examination the endpoint is dead only after these times.
        let (health, late) = (&mut config.upstreams[0].health, Duration::from_secs(20));
        (health.dead_after, health.connect_timeout, health.readyz.timeout) = (late, late, late);
        health.readyz.interval = 2 * late;
    })
    .await;
    let flow = flow_without_names(&mut setup).await;
    let endpoints = setup.proxy.endpoints().await;
    let with_flow = endpoints.iter().find(|endpoint| endpoint["flows"] == 1).unwrap();
    let mut servers = setup.cluster.servers.iter();
    let server = servers.find(|server| with_flow["address"] == server.addr.to_string()).unwrap();
    let stopped = Stopwatch::start();
    server.stop();
    soon("the reset", wait_end(&setup, &flow, "endpoint_dead")).await;
    check_figure(
        "a flow of a stopped process is reset without names",
        stopped.elapsed(),
        Duration::from_secs(3),
    );
    server.cont();
}

/// Adds the listener `second` with an upstream of its own, to this configuration.
fn add_second(config: &mut Config, drain_timeout: Duration, change: impl FnOnce(&mut Config)) {
    let mut second = config.clone();
    change(&mut second);
    config.shutdown.drain_timeout = drain_timeout;
    for upstream in &mut second.upstreams {
        upstream.name = "second".into();
    }
    for listener in &mut second.listeners {
        (listener.name, listener.upstream) = ("second".into(), "second".into());
    }
    config.upstreams.append(&mut second.upstreams);
    config.listeners.append(&mut second.listeners);
}

async fn wait_ended_by_drain(setup: &Setup) {
    let series = r#"jackstay_passthrough_closed_total{listener="second",reason="shutdown"} 1"#;
    setup.proxy.wait_metrics(series).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn flow_that_is_connecting_ends_with_the_drain_of_its_removed_listener() {
    for terminates in [true, false] {
        let endpoint = HangingEndpoint::start();
        let mut setup = Setup::with(1, |config| {
            // A flow gives up after 900 ms without an endpoint.
            add_second(config, Duration::from_millis(10), |config| {
                if terminates {
                    pass_through(config, FlowSettings::default());
                } else {
                    *config = passthrough_config(config.clone());
                }
                config.upstreams[0].endpoints = vec![EndpointAddress {
                    host: "127.0.0.1".into(),
                    port: endpoint.address().port(),
                }];
            });
        })
        .await;
        let address = setup.listener("second").await.unwrap();
        let connector = wire::connector(&setup.cluster.certs, None, "h2");
        let client = tokio::spawn(async move {
            let stream = TcpStream::connect(address).await?;
            connector.connect(ServerName::try_from(NAME).unwrap(), stream).await
        });
        let open = r#"jackstay_passthrough_connections{listener="second"} 1"#;
        setup.proxy.wait_metrics(open).await;
        setup.change(|config| drop(config.listeners.pop())).await;
        let end = soon("the end of the connection", client).await.unwrap();
        assert_eq!(end.unwrap_err().kind(), ErrorKind::ConnectionReset, "L7: {terminates}");
        wait_ended_by_drain(&setup).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn flow_without_a_client_hello_ends_with_the_drain_of_its_removed_listener() {
    let drain_timeout = Duration::from_millis(200);
    let mut setup = Setup::with(1, |config| {
        add_second(config, drain_timeout, |config| {
            *config = passthrough_config(config.clone());
            let (server_names, upstream) = (vec![NAME.into()], "second".into());
            passthrough_mode(config).routes = vec![Route { server_names, upstream }];
            config.listeners[0].limits_mut().handshake_timeout = Duration::from_secs(60);
        });
    })
    .await;
    let address = setup.listener("second").await.unwrap();
    let mut client = TcpStream::connect(address).await.unwrap();
    let open = r#"jackstay_passthrough_connections{listener="second"} 1"#;
    setup.proxy.wait_metrics(open).await;
    setup.change(|config| drop(config.listeners.pop())).await;
    let end = soon("the end of the connection", client.read_u8()).await;
    assert_eq!(end.unwrap_err().kind(), ErrorKind::ConnectionReset);
    wait_ended_by_drain(&setup).await;
}

//! Starts without a working source, and starts with the state file of an earlier run.

use crate::discovery::traffic::{
    endpoint_addresses, has_source_event, source_report, wait_for_set,
};
use crate::support::figures::check_figure;
use crate::support::stopwatch::Stopwatch;
use crate::support::{
    CONFIGMAPS, Proxy, TestCluster, refusing_address, soon, to_strings, until, write_lines,
};
use jackstay_apiserver as apiserver;
use jackstay_apiserver::Options;
use jackstay_config::Config;
use jackstay_core::discovery::address::EndpointAddress;
use serde_json::{Value, json};
use socket2::{Domain, SockAddr, Socket, Type};
use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

/// A configuration with static endpoints, an endpoints file and a state directory.
fn config(cluster: &TestCluster, static_endpoints: &[SocketAddr]) -> Config {
    let mut config = cluster.certs.config(static_endpoints);
    config.state_dir = Some(cluster.certs.path().join("state"));
    config.upstreams[0].endpoints_file = Some(cluster.certs.path().join("endpoints"));
    config
}

fn write_endpoints(cluster: &TestCluster, addresses: &[SocketAddr]) {
    write_lines(&cluster.certs.path().join("endpoints"), &to_strings(addresses));
}

fn state_file(cluster: &TestCluster) -> std::path::PathBuf {
    cluster.certs.path().join("state/control-plane.json")
}

/// Waits for the first response with status 200, and returns the time since `start`.
async fn first_response(proxy: &Proxy, start: Stopwatch) -> Duration {
    let client = proxy.client().await;
    until("a request succeeds", async || client.get(CONFIGMAPS).await.unwrap().status == 200).await;
    start.elapsed()
}

/// The content of a state file; null if it cannot be read.
fn saved_state(path: &Path) -> Value {
    std::fs::read(path).ok().and_then(|text| serde_json::from_slice(&text).ok()).unwrap_or_default()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn saved_endpoints_are_used_when_every_static_endpoint_is_dead() {
    let cluster = TestCluster::new(2);
    write_endpoints(&cluster, &cluster.addresses());
    let static_endpoints = [refusing_address(), refusing_address()];
    let proxy = cluster.certs.start(config(&cluster, &static_endpoints));
    proxy.wait_connected(2).await;
    let state = state_file(&cluster);
    until("both endpoints are saved", async || {
        saved_state(&state)["endpoints"].as_array().is_some_and(|e| e.len() == 2)
    })
    .await;
    drop(proxy);

    std::fs::remove_file(cluster.certs.path().join("endpoints")).unwrap();
    let start = Stopwatch::start();
    let proxy = cluster.certs.start(config(&cluster, &static_endpoints));
    let took = first_response(&proxy, start).await;
    check_figure("first response from saved endpoints", took, Duration::from_secs(1));
    let report = source_report(&proxy, "state").await;
    assert_eq!(report["endpoints"], 2, "{report}");
    assert!(report["note"].as_str().unwrap().ends_with(" old"), "{report}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn static_endpoint_is_used_when_the_saved_endpoints_are_dead() {
    let cluster = TestCluster::new(1);
    // One address refuses connections, the other never responds.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let dead = [refusing_address(), silent.local_addr().unwrap()];
    let dir = cluster.certs.path().join("state");
    std::fs::create_dir_all(&dir).unwrap();
    let entry = |a: &SocketAddr| json!({ "address": a.to_string(), "source": "file" });
    let state = json!({
        "version": 1, "upstream": "control-plane", "saved_at_seconds": 1_700_000_000,
        "endpoints": dead.iter().map(entry).collect::<Vec<_>>(),
    });
    std::fs::write(state_file(&cluster), state.to_string()).unwrap();
    let start = Stopwatch::start();
    let proxy = cluster.certs.start(config(&cluster, &cluster.addresses()));
    let took = first_response(&proxy, start).await;
    check_figure("first response with dead saved endpoints", took, Duration::from_secs(2));
    // The state file is read concurrently, perhaps after the first response.
    until("the saved endpoints are candidates", async || {
        endpoint_addresses(&proxy).await.len() == 3
    })
    .await;
    // When their source answers, the saved endpoints are dropped and the new ones are saved.
    write_endpoints(&cluster, &cluster.addresses());
    let addresses: Vec<_> = cluster.addresses().iter().map(ToString::to_string).collect();
    wait_for_set(&proxy, &addresses).await;
    until("the new endpoint is saved", async || {
        saved_state(&state_file(&cluster))["endpoints"][0]["address"] == addresses[0]
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn invalid_state_file_is_reported_and_ignored() {
    let cluster = TestCluster::new(1);
    for (text, expected) in [
        ("{ \"version\": 1, \"upstr", "not a state file"),
        ("{\"version\":1,\"upstream\":\"another\"}", "another upstream"),
        ("", "not a state file"),
    ] {
        std::fs::create_dir_all(cluster.certs.path().join("state")).unwrap();
        std::fs::write(state_file(&cluster), text).unwrap();
        let proxy = cluster.certs.start(config(&cluster, &cluster.addresses()));
        proxy.wait_connected(1).await;
        until(expected, async || has_source_event(&proxy, "state", expected).await).await;
        assert_eq!(endpoint_addresses(&proxy).await.len(), 1);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn unwritable_state_directory_is_only_a_warning() {
    let cluster = TestCluster::new(1);
    let mut config = config(&cluster, &cluster.addresses());
    let file = cluster.certs.path().join("no-directory");
    std::fs::write(&file, "").unwrap();
    config.state_dir = Some(file);
    write_endpoints(&cluster, &cluster.addresses());
    let start = Stopwatch::start();
    let proxy = cluster.certs.start(config);
    let took = first_response(&proxy, start).await;
    check_figure("first response without a writable state directory", took, Duration::from_secs(1));
    let error = "no-directory/control-plane.json: cannot be saved";
    until("the error is reported", async || has_source_event(&proxy, "state", error).await).await;
    let report = source_report(&proxy, "state").await;
    assert!(report["error"].as_str().unwrap().contains(error), "{report}");
    let ready = proxy.page("/readyz").await;
    assert!(ready.starts_with("HTTP/1.1 200"), "jackstay stays ready: {ready}");
    assert!(ready.contains("source control-plane/state"), "{ready}");
}

/// The process that owns the takeover socket hangs, and the backlog of the socket is full, so a
/// connect to it would block.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn start_is_not_blocked_by_a_hanging_takeover_socket() {
    let cluster = TestCluster::new(1);
    let config = config(&cluster, &cluster.addresses());
    let dir = config.state_dir.clone().unwrap();
    std::fs::create_dir_all(&dir).unwrap();
    let path = SockAddr::unix(dir.join("take-over.sock")).unwrap();
    let unix = || Socket::new(Domain::UNIX, Type::STREAM, None).unwrap();
    let hanging = unix();
    hanging.bind(&path).unwrap();
    hanging.listen(0).unwrap();
    let mut connections = Vec::new();
    loop {
        let socket = unix();
        socket.set_nonblocking(true).unwrap();
        match socket.connect(&path) {
            Ok(()) => connections.push(socket),
            Err(error) => break assert_eq!(error.kind(), ErrorKind::WouldBlock),
        }
    }
    let proxy = cluster.certs.start(config);
    soon("the admin endpoint responds", proxy.page("/readyz")).await;
    proxy.wait_connected(1).await;
    first_response(&proxy, Stopwatch::start()).await;
    write_endpoints(&cluster, &cluster.addresses());
    until("the file is read", async || source_report(&proxy, "file").await["endpoints"] == 1).await;
    drop(proxy);
    drop(hanging);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn requests_get_503_until_an_endpoint_is_known() {
    let cluster = TestCluster::new(1);
    // No address, no endpoints file, and a name that does not exist (RFC 6761).
    let mut config = config(&cluster, &[]);
    let name = EndpointAddress { host: "api.jackstay.invalid".into(), port: 6443 };
    config.upstreams[0].endpoints = vec![name];
    let start = Stopwatch::start();
    let proxy = cluster.certs.start(config);
    println!("listening after {:?} (promised: 100 ms for a release build)", start.elapsed());
    let client = proxy.client().await;
    let start = Stopwatch::start();
    let reply = soon("the client gets a response", client.get(CONFIGMAPS)).await.unwrap();
    let took = start.elapsed();
    check_figure("503 without an endpoint", took, Duration::from_millis(1_500));
    assert_eq!(reply.status, 503, "{:?}", reply.body);
    let status = reply.json();
    assert_eq!(status["kind"], "Status");
    let message = status["message"].as_str().unwrap();
    assert!(message.contains("no endpoint is known yet"), "{message}");
    let ready = proxy.page("/readyz").await;
    assert!(ready.starts_with("HTTP/1.1 503"), "{ready}");
    assert!(ready.contains("[-]upstream control-plane"), "{ready}");
    assert!(ready.contains("[-]source control-plane/file"), "{ready}");
    assert!(ready.contains("[-]source control-plane/dns"), "{ready}");

    // The endpoints file is created; no restart is needed.
    write_endpoints(&cluster, &cluster.addresses());
    first_response(&proxy, Stopwatch::start()).await;
    let ready = proxy.page("/readyz").await;
    assert!(ready.starts_with("HTTP/1.1 200"), "{ready}");
}

/// Such an endpoint, perhaps an apiserver behind a proxy for HTTP/1.1, gets no requests and does not
/// affect the other endpoints.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn endpoint_without_http2_is_reported_and_gets_no_request() {
    let mut cluster = TestCluster::new(1);
    let options = Options { http2: false, ..Options::named("old") };
    let old = apiserver::start(&cluster.state, &cluster.certs.pki, options).unwrap();
    let addresses = [old.addr, cluster.addresses()[0]];
    let proxy = cluster.certs.start(cluster.certs.config(&addresses));
    proxy.wait_connected(1).await;
    let client = proxy.client().await;
    let is_reported = async || {
        let old = proxy.endpoint(old.addr).await;
        old["state"] == "no_h2" && old["reason"].as_str().unwrap().contains("(ALPN)")
    };
    until("the missing HTTP/2 is reported", is_reported).await;
    for _ in 0..20 {
        assert_eq!(client.get(CONFIGMAPS).await.unwrap().status, 200);
    }
    assert_eq!(old.counters().requests.load(Relaxed), 0);
    let ejections = "jackstay_ejections_total{upstream=\"control-plane\"";
    let page = proxy.page("/metrics").await;
    let no_h2 = |line: &str| line.starts_with(ejections) && line.contains("reason=\"no_h2\"");
    assert!(page.lines().any(no_h2), "{page}");

    // If it is the only running endpoint, the response to the client has this reason.
    cluster.servers.remove(0).kill();
    let has_reason = async || {
        let reply = client.get(CONFIGMAPS).await.unwrap();
        reply.status == 503 && reply.json()["message"].as_str().unwrap().contains("(ALPN)")
    };
    until("the client gets the reason", has_reason).await;
}

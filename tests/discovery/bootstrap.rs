//! Starts without working sources, and with the state that an earlier run has saved.

use crate::support::figures::check_figure;
use crate::support::stopwatch::Stopwatch;
use crate::support::{
    CONFIGMAPS, Proxy, TestCluster, refusing_address, soon, to_strings, until, write_lines,
};
use crate::traffic::{has_event, set, set_is, source};
use jackstay::config::{Config, EndpointAddress};
use jackstay::demo::apiserver::{self, Options};
use serde_json::{Value, json};
use socket2::{Domain, SockAddr, Socket, Type};
use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

/// Static endpoints, an endpoints file and a state directory.
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

/// The time until the first response.
async fn first_response(proxy: &Proxy, since: Stopwatch) -> Duration {
    let client = proxy.client().await;
    until("there is a response", async || client.get(CONFIGMAPS).await.unwrap().status == 200)
        .await;
    since.elapsed()
}

fn saved(path: &Path) -> Value {
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
    until("the state is saved", async || {
        saved(&state)["endpoints"].as_array().is_some_and(|e| e.len() == 2)
    })
    .await;
    drop(proxy);

    std::fs::remove_file(cluster.certs.path().join("endpoints")).unwrap();
    let start = Stopwatch::start();
    let proxy = cluster.certs.start(config(&cluster, &static_endpoints));
    let took = first_response(&proxy, start).await;
    check_figure("first response from saved endpoints", took, Duration::from_secs(1));
    let report = source(&proxy, "state").await;
    assert_eq!(report["endpoints"], 2, "{report}");
    assert!(report["note"].as_str().unwrap().ends_with(" old"), "{report}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn static_endpoint_is_used_when_the_state_is_stale() {
    let cluster = TestCluster::new(1);
    // One address refuses connections, the other never responds.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let gone = [refusing_address(), silent.local_addr().unwrap()];
    let dir = cluster.certs.path().join("state");
    std::fs::create_dir_all(&dir).unwrap();
    let entry = |a: &SocketAddr| json!({ "address": a.to_string(), "source": "file" });
    let state = json!({
        "version": 1, "upstream": "control-plane", "saved_at_seconds": 1_700_000_000,
        "endpoints": gone.iter().map(entry).collect::<Vec<_>>(),
    });
    std::fs::write(state_file(&cluster), state.to_string()).unwrap();
    let start = Stopwatch::start();
    let proxy = cluster.certs.start(config(&cluster, &cluster.addresses()));
    let took = first_response(&proxy, start).await;
    check_figure("first response with a stale state", took, Duration::from_secs(2));
    // The state is read in parallel with the start, perhaps after the first response.
    until("the saved endpoints are candidates", async || set(&proxy).await.len() == 3).await;
    // When the source responds, the saved endpoints are dropped, and the new ones saved.
    write_endpoints(&cluster, &cluster.addresses());
    let addresses: Vec<_> = cluster.addresses().iter().map(ToString::to_string).collect();
    set_is(&proxy, &addresses).await;
    until("the state is up to date", async || {
        saved(&state_file(&cluster))["endpoints"][0]["address"] == addresses[0]
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn invalid_state_file_is_reported_and_ignored() {
    let cluster = TestCluster::new(1);
    for (text, words) in [
        ("{ \"version\": 1, \"upstr", "not a state file"),
        ("{\"version\":1,\"upstream\":\"another\"}", "another upstream"),
        ("", "not a state file"),
    ] {
        std::fs::create_dir_all(cluster.certs.path().join("state")).unwrap();
        std::fs::write(state_file(&cluster), text).unwrap();
        let proxy = cluster.certs.start(config(&cluster, &cluster.addresses()));
        proxy.wait_connected(1).await;
        until(words, async || has_event(&proxy, "state", words).await).await;
        assert_eq!(set(&proxy).await.len(), 1);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn unwritable_state_directory_is_a_warning() {
    let cluster = TestCluster::new(1);
    let mut config = config(&cluster, &cluster.addresses());
    let file = cluster.certs.path().join("no-directory");
    std::fs::write(&file, "").unwrap();
    config.state_dir = Some(file);
    write_endpoints(&cluster, &cluster.addresses());
    let start = Stopwatch::start();
    let proxy = cluster.certs.start(config);
    let took = first_response(&proxy, start).await;
    check_figure("first response without a disk", took, Duration::from_secs(1));
    let words = "no-directory/control-plane.json: cannot be saved";
    until("the problem is reported", async || has_event(&proxy, "state", words).await).await;
    let report = source(&proxy, "state").await;
    assert!(report["error"].as_str().unwrap().contains(words), "{report}");
    let ready = proxy.page("/readyz").await;
    assert!(ready.starts_with("HTTP/1.1 200"), "only a warning: {ready}");
    assert!(ready.contains("source control-plane/state"), "{ready}");
}

/// Another process with the same directory hangs, and the backlog of its socket is full. A disk
/// that hangs has the same effect.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn start_is_not_blocked_by_a_takeover_socket_without_response() {
    let cluster = TestCluster::new(1);
    let config = config(&cluster, &cluster.addresses());
    let dir = config.state_dir.clone().unwrap();
    std::fs::create_dir_all(&dir).unwrap();
    let at = SockAddr::unix(dir.join("take-over.sock")).unwrap();
    let unix = || Socket::new(Domain::UNIX, Type::STREAM, None).unwrap();
    let hanging = unix();
    hanging.bind(&at).unwrap();
    hanging.listen(0).unwrap();
    let mut connections = Vec::new();
    loop {
        let socket = unix();
        socket.set_nonblocking(true).unwrap();
        match socket.connect(&at) {
            Ok(()) => connections.push(socket),
            Err(error) => break assert_eq!(error.kind(), ErrorKind::WouldBlock),
        }
    }
    let proxy = cluster.certs.start(config);
    soon("the admin endpoint responds", proxy.page("/readyz")).await;
    proxy.wait_connected(1).await;
    first_response(&proxy, Stopwatch::start()).await;
    write_endpoints(&cluster, &cluster.addresses());
    until("the file is read", async || source(&proxy, "file").await["endpoints"] == 1).await;
    drop(proxy);
    drop(hanging);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn requests_get_503_until_an_endpoint_is_known() {
    let cluster = TestCluster::new(1);
    // No address, no file, and a name that no server knows.
    let mut config = config(&cluster, &[]);
    let name = EndpointAddress { host: "api.jackstay.invalid".into(), port: 6443 };
    config.upstreams[0].endpoints = vec![name];
    let start = Stopwatch::start();
    let proxy = cluster.certs.start(config);
    println!("listening after {:?} (promised 100 ms, in a release build)", start.elapsed());
    let client = proxy.client().await;
    let start = Stopwatch::start();
    let reply = soon("a response", client.get(CONFIGMAPS)).await.unwrap();
    let took = start.elapsed();
    check_figure("no endpoint at all: a Status", took, Duration::from_millis(1_500));
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

    // A source appears; no restart is needed.
    write_endpoints(&cluster, &cluster.addresses());
    first_response(&proxy, Stopwatch::start()).await;
    let ready = proxy.page("/readyz").await;
    assert!(ready.starts_with("HTTP/1.1 200"), "{ready}");
}

/// It may be an apiserver behind a proxy that speaks HTTP/1.1. It gets no requests, and does not
/// affect the other endpoints.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn server_without_http2_has_its_own_state() {
    let mut cluster = TestCluster::new(1);
    let options = Options { http2: false, ..Options::named("old") };
    let old = apiserver::start(&cluster.state, &cluster.certs.pki, options).unwrap();
    let addresses = [old.addr, cluster.addresses()[0]];
    let proxy = cluster.certs.start(cluster.certs.config(&addresses));
    proxy.wait_connected(1).await;
    let client = proxy.client().await;
    let is_reported = async || {
        let endpoints = proxy.endpoints().await;
        let old = endpoints.iter().find(|e| e["address"] == old.addr.to_string()).unwrap();
        old["state"] == "no_h2" && old["reason"].as_str().unwrap().contains("(ALPN)")
    };
    until("the problem is reported", is_reported).await;
    for _ in 0..20 {
        assert_eq!(client.get(CONFIGMAPS).await.unwrap().status, 200);
    }
    assert_eq!(old.counters().requests.load(Relaxed), 0);
    let ejected = "jackstay_ejections_total{upstream=\"control-plane\"";
    let page = proxy.page("/metrics").await;
    let no_h2 = |line: &str| line.starts_with(ejected) && line.contains("reason=\"no_h2\"");
    assert!(page.lines().any(no_h2), "{page}");

    // If it is the only endpoint, the client gets this reason.
    cluster.servers.remove(0).kill();
    let why = async || {
        let reply = client.get(CONFIGMAPS).await.unwrap();
        reply.status == 503 && reply.json()["message"].as_str().unwrap().contains("(ALPN)")
    };
    until("the client gets the reason", why).await;
}

//! Starting when nothing else does, and what an earlier run left on disk.

use crate::support::figures::check_figure;
use crate::support::stopwatch::Stopwatch;
use crate::support::{CONFIGMAPS, Proxy, TestCluster, refusing_address, soon, until};
use crate::traffic::{set, set_is, source, told};
use jackstay::config::{Config, EndpointAddress};
use jackstay::demo::apiserver::{self, Options};
use serde_json::{Value, json};
use socket2::{Domain, SockAddr, Socket, Type};
use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

/// Static endpoints nowhere, and a directory for the state.
fn config(cluster: &TestCluster, seeds: &[SocketAddr]) -> Config {
    let mut config = cluster.certs.config(seeds);
    config.state_dir = Some(cluster.certs.path().join("state"));
    config.upstreams[0].endpoints_file = Some(cluster.certs.path().join("endpoints"));
    config
}

fn write_endpoints(cluster: &TestCluster, addresses: &[SocketAddr]) {
    let lines: Vec<_> = addresses.iter().map(ToString::to_string).collect();
    std::fs::write(cluster.certs.path().join("endpoints"), lines.join("\n")).unwrap();
}

fn state_file(cluster: &TestCluster) -> std::path::PathBuf {
    cluster.certs.path().join("state/control-plane.json")
}

/// The time until the first answer, asked for again and again.
async fn first_answer(proxy: &Proxy, since: Stopwatch) -> Duration {
    let client = proxy.client().await;
    until("there is an answer", async || client.get(CONFIGMAPS).await.unwrap().status == 200).await;
    since.elapsed()
}

fn saved(path: &Path) -> Value {
    std::fs::read(path).ok().and_then(|text| serde_json::from_slice(&text).ok()).unwrap_or_default()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn every_seed_is_dead_but_the_state_is_good() {
    let cluster = TestCluster::new(2);
    write_endpoints(&cluster, &cluster.addresses());
    let seeds = [refusing_address(), refusing_address()];
    let proxy = cluster.certs.start(config(&cluster, &seeds));
    proxy.wait_connected(2).await;
    let state = state_file(&cluster);
    until("the state is saved", async || {
        saved(&state)["endpoints"].as_array().is_some_and(|e| e.len() == 2)
    })
    .await;
    drop(proxy);

    std::fs::remove_file(cluster.certs.path().join("endpoints")).unwrap();
    let start = Stopwatch::start();
    let proxy = cluster.certs.start(config(&cluster, &seeds));
    let took = first_answer(&proxy, start).await;
    check_figure("first answer from saved endpoints", took, Duration::from_secs(1));
    let report = source(&proxy, "state").await;
    assert_eq!(report["endpoints"], 2, "{report}");
    assert!(report["note"].as_str().unwrap().ends_with(" old"), "{report}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn the_state_is_stale_and_a_seed_lives() {
    let cluster = TestCluster::new(1);
    // One refuses, at the other nobody answers.
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
    let took = first_answer(&proxy, start).await;
    check_figure("first answer with a stale state", took, Duration::from_secs(2));
    // The disk is read beside the start: what it remembers may come after the first answer.
    until("what was remembered is a candidate", async || set(&proxy).await.len() == 3).await;
    // Its source answers: what was remembered is forgotten, and what is good is written down.
    write_endpoints(&cluster, &cluster.addresses());
    let addresses: Vec<_> = cluster.addresses().iter().map(ToString::to_string).collect();
    set_is(&proxy, &addresses).await;
    until("the state is good again", async || {
        saved(&state_file(&cluster))["endpoints"][0]["address"] == addresses[0]
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_state_that_is_not_ours_is_told_and_ignored() {
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
        until(words, async || told(&proxy, "state", words).await).await;
        assert_eq!(set(&proxy).await.len(), 1);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_directory_that_cannot_be_written_is_a_warning() {
    let cluster = TestCluster::new(1);
    let mut config = config(&cluster, &cluster.addresses());
    let file = cluster.certs.path().join("no-directory");
    std::fs::write(&file, "").unwrap();
    config.state_dir = Some(file);
    write_endpoints(&cluster, &cluster.addresses());
    let start = Stopwatch::start();
    let proxy = cluster.certs.start(config);
    let took = first_answer(&proxy, start).await;
    check_figure("first answer without a disk", took, Duration::from_secs(1));
    let words = "no-directory/control-plane.json: cannot be saved";
    until("it is told", async || told(&proxy, "state", words).await).await;
    let report = source(&proxy, "state").await;
    assert!(report["error"].as_str().unwrap().contains(words), "{report}");
    let ready = proxy.page("/readyz").await;
    assert!(ready.starts_with("HTTP/1.1 200"), "a warning, and no more: {ready}");
    assert!(ready.contains("source control-plane/state"), "{ready}");
}

/// A process that hangs has the same directory, and as many have asked it as may wait: whoever asks
/// now waits to be one of them. A disk that hangs is no other case.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_directory_where_nothing_answers_holds_up_nothing() {
    let cluster = TestCluster::new(1);
    let config = config(&cluster, &cluster.addresses());
    let dir = config.state_dir.clone().unwrap();
    std::fs::create_dir_all(&dir).unwrap();
    let at = SockAddr::unix(dir.join("take-over.sock")).unwrap();
    let unix = || Socket::new(Domain::UNIX, Type::STREAM, None).unwrap();
    let hanging = unix();
    hanging.bind(&at).unwrap();
    hanging.listen(0).unwrap();
    let mut asking = Vec::new();
    loop {
        let socket = unix();
        socket.set_nonblocking(true).unwrap();
        match socket.connect(&at) {
            Ok(()) => asking.push(socket),
            Err(error) => break assert_eq!(error.kind(), ErrorKind::WouldBlock),
        }
    }
    let proxy = cluster.certs.start(config);
    crate::support::soon("operators are answered", proxy.page("/readyz")).await;
    proxy.wait_connected(1).await;
    first_answer(&proxy, Stopwatch::start()).await;
    write_endpoints(&cluster, &cluster.addresses());
    until("sources are followed", async || source(&proxy, "file").await["endpoints"] == 1).await;
    drop(proxy);
    drop(hanging);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn with_nothing_at_all() {
    let cluster = TestCluster::new(1);
    // No address, no file yet, a name that no server knows.
    let mut config = config(&cluster, &[]);
    let name = EndpointAddress { host: "api.jackstay.invalid".into(), port: 6443 };
    config.upstreams[0].endpoints = vec![name];
    let start = Stopwatch::start();
    let proxy = cluster.certs.start(config);
    println!("listening after {:?} (promised 100 ms, in a release build)", start.elapsed());
    let client = proxy.client().await;
    let start = Stopwatch::start();
    let reply = soon("an answer", client.get(CONFIGMAPS)).await.unwrap();
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

    // A source appears: no restart is needed.
    write_endpoints(&cluster, &cluster.addresses());
    first_answer(&proxy, Stopwatch::start()).await;
    let ready = proxy.page("/readyz").await;
    assert!(ready.starts_with("HTTP/1.1 200"), "{ready}");
}

/// What may be an apiserver behind a proxy that speaks HTTP/1.1: it gets no requests one by one, but
/// is a state of its own, and no harm to the others.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_server_without_http2_is_told_from_one_that_is_down() {
    let mut cluster = TestCluster::new(1);
    let options = Options { http2: false, ..Options::named("old") };
    let old = apiserver::start(&cluster.state, &cluster.certs.pki, options).unwrap();
    let addresses = [old.addr, cluster.addresses()[0]];
    let proxy = cluster.certs.start(cluster.certs.config(&addresses));
    proxy.wait_connected(1).await;
    let client = proxy.client().await;
    let is_told = async || {
        let endpoints = proxy.endpoints().await;
        let old = endpoints.iter().find(|e| e["address"] == old.addr.to_string()).unwrap();
        old["state"] == "no_h2" && old["reason"].as_str().unwrap().contains("(ALPN)")
    };
    until("it is told", is_told).await;
    for _ in 0..20 {
        assert_eq!(client.get(CONFIGMAPS).await.unwrap().status, 200);
    }
    assert_eq!(old.counters().requests.load(Relaxed), 0);
    let ejected = "jackstay_ejections_total{upstream=\"control-plane\"";
    let page = proxy.page("/metrics").await;
    let told = |line: &str| line.starts_with(ejected) && line.contains("reason=\"no_h2\"");
    assert!(page.lines().any(told), "{page}");

    // Alone it is the reason that the client gets.
    cluster.servers.remove(0).kill();
    let why = async || {
        let reply = client.get(CONFIGMAPS).await.unwrap();
        reply.status == 503 && reply.json()["message"].as_str().unwrap().contains("(ALPN)")
    };
    until("the client is told", why).await;
}

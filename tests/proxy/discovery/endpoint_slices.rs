//! Discovery by the `EndpointSlices` of `default/kubernetes`, watched on connections to the endpoints
//! that they list.

use crate::discovery::traffic::{
    Traffic, endpoint_addresses, has_source_event, source_report, wait_for_set,
};
use crate::support::{Proxy, TestCluster, pause, to_strings, until};
use jackstay_apiserver::audit::Record;
use jackstay_apiserver::identity::User;
use jackstay_apiserver::kinds::{ENDPOINT_SLICES, ENDPOINTS, ObjectRef};
use jackstay_apiserver::{RequestHook, ScriptedResponse};
use jackstay_config::Config;
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

/// A slice with these addresses and this port.
fn slice(name: &str, addresses: &[&str], port: u16, ready: Option<bool>) -> Value {
    let endpoints: Vec<_> = addresses
        .iter()
        .map(|address| json!({ "addresses": [address], "conditions": { "ready": ready } }))
        .collect();
    json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
        "metadata": { "name": name, "namespace": "default",
            "labels": { "kubernetes.io/service-name": "kubernetes" } },
        "addressType": "IPv4",
        "ports": [{ "name": "https", "protocol": "TCP", "port": port }],
        "endpoints": endpoints,
    })
}

/// Creates or replaces a slice.
fn put(cluster: &TestCluster, name: &str, mut value: Value) {
    let object = ObjectRef { kind: &ENDPOINT_SLICES, namespace: "default", name };
    if cluster.state.get(object).is_ok() {
        let changed = cluster.state.modify(object, false, |now| {
            value["metadata"] = now["metadata"].clone();
            Ok(value)
        });
        changed.unwrap();
    } else {
        cluster.state.create(&ENDPOINT_SLICES, "default", value, false).unwrap();
    }
}

fn add_slice(cluster: &TestCluster, index: usize, address: SocketAddr) {
    let name = format!("kubernetes-{index}");
    put(cluster, &name, slice(&name, &["127.0.0.1"], address.port(), None));
}

fn remove_slice(cluster: &TestCluster, index: usize) {
    let name = format!("kubernetes-{index}");
    let object = ObjectRef { kind: &ENDPOINT_SLICES, namespace: "default", name: &name };
    cluster.state.delete(object, &Value::Null, false).unwrap();
}

/// Configures discovery with a kubeconfig whose user has a token file.
fn with_discovery(cluster: &TestCluster, config: &mut Config) {
    let dir = cluster.certs.path();
    std::fs::write(dir.join("discovery-token"), "watcher-1").unwrap();
    cluster.state.add_token("watcher-1", User::new("jackstay-discovery", &[]));
    let text = "apiVersion: v1\nkind: Config\ncurrent-context: c\ncontexts:\n- name: c\n  context: \
                {cluster: k, user: u}\nclusters:\n- name: k\n  cluster: {server: 'https://nowhere'}\n\
                users:\n- name: u\n  user: {tokenFile: discovery-token}\n";
    let path = dir.join("discovery.kubeconfig");
    std::fs::write(&path, text).unwrap();
    config.upstreams[0].discovery.kubeconfig = Some(path);
}

/// Starts this number of servers, slices that list the first `listed` of them, and jackstay with the first
/// server as its static endpoint.
async fn start(servers: usize, listed: usize) -> (TestCluster, Proxy) {
    let cluster = TestCluster::new(servers);
    for (index, address) in cluster.addresses().into_iter().enumerate().take(listed) {
        add_slice(&cluster, index, address);
    }
    let mut config = cluster.config();
    config.upstreams[0].endpoints.truncate(1);
    with_discovery(&cluster, &mut config);
    let proxy = cluster.certs.start(config);
    wait_for_set(&proxy, &to_strings(&cluster.addresses()[..listed])).await;
    proxy.wait_connected(listed).await;
    (cluster, proxy)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn slices_changed_changes_the_set_and_fails_no_request() {
    let (cluster, proxy) = start(4, 3).await;
    let addresses = cluster.addresses();
    let traffic = Traffic::start(&cluster, &proxy).await;
    for endpoint in proxy.endpoints().await {
        let is_static = endpoint["address"] == addresses[0].to_string();
        let name = if is_static { "127.0.0.1" } else { "kubernetes.default.svc" };
        assert_eq!(endpoint["server_name"], name, "the configured name takes precedence");
    }
    add_slice(&cluster, 3, addresses[3]);
    wait_for_set(&proxy, &to_strings(&addresses)).await;
    remove_slice(&cluster, 1);
    let remaining = [addresses[0], addresses[2], addresses[3]];
    wait_for_set(&proxy, &to_strings(&remaining)).await;
    // A static endpoint that no slice lists stays in the set as a fallback.
    remove_slice(&cluster, 0);
    let fallback = async || proxy.endpoint(addresses[0]).await["fallback"] == true;
    until("the static endpoint is a fallback", fallback).await;
    traffic.continues().await;
    let name = cluster.servers[0].name();
    let forwarded = |r: &Record| r.server == name && r.forwarded_for.is_some();
    let before = cluster.state.audit().select(forwarded).len();
    traffic.continues().await;
    let after = cluster.state.audit().select(forwarded).len();
    assert_eq!(after, before, "a fallback gets only probes");
    traffic.end(&cluster).await;
    assert_eq!(source_report(&proxy, "slices").await["endpoints"], 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn unusable_slices_are_reported_and_change_nothing() {
    let (cluster, proxy) = start(3, 3).await;
    let addresses = to_strings(&cluster.addresses());
    let traffic = Traffic::start(&cluster, &proxy).await;
    for index in 0..3 {
        let name = format!("kubernetes-{index}");
        let port = cluster.addresses()[index].port();
        put(&cluster, &name, slice(&name, &["127.0.0.1"], port, Some(false)));
    }
    until("the unready endpoints are reported", async || {
        has_source_event(&proxy, "slices", "none of its 3").await
    })
    .await;
    assert_eq!(endpoint_addresses(&proxy).await.len(), 3);
    for index in 0..3 {
        remove_slice(&cluster, index);
    }
    until("the empty answer is reported", async || {
        has_source_event(&proxy, "slices", "names no endpoint").await
    })
    .await;
    assert_eq!(endpoint_addresses(&proxy).await.len(), 3);

    let own = proxy.addr.port();
    put(&cluster, "own", slice("own", &["127.0.0.1"], own, Some(true)));
    until("the own address is reported", async || {
        has_source_event(&proxy, "slices", "would loop").await
    })
    .await;
    put(&cluster, "names", slice("names", &["node-1", "0.0.0.0"], 6443, Some(true)));
    until("the invalid addresses are reported", async || {
        has_source_event(&proxy, "slices", "not an IP address").await
    })
    .await;
    assert_eq!(endpoint_addresses(&proxy).await.len(), 3);
    traffic.continues().await;
    for (index, address) in cluster.addresses().into_iter().enumerate() {
        add_slice(&cluster, index, address);
    }
    until("the slices are used again", async || {
        source_report(&proxy, "slices").await["endpoints"] == 3
    })
    .await;
    wait_for_set(&proxy, &addresses).await;
    traffic.end(&cluster).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn endpoint_that_flaps_every_200_ms_fails_no_request() {
    let (cluster, proxy) = start(3, 3).await;
    let traffic = Traffic::start(&cluster, &proxy).await;
    let before = proxy.metric("jackstay_discovery_changes_total").await;
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(4) {
        remove_slice(&cluster, 2);
        pause(Duration::from_millis(200)).await;
        add_slice(&cluster, 2, cluster.addresses()[2]);
        pause(Duration::from_millis(200)).await;
    }
    traffic.continues().await;
    let after = proxy.metric("jackstay_discovery_changes_total").await;
    // None, because no removal lasts for the second of the debouncer. A slow test may need longer for its changes, but
    // there is at most one change a second.
    let changes = after - before;
    assert!(changes <= 4.0, "{changes} changes of the set in 4 s of flapping");
    wait_for_set(&proxy, &to_strings(&cluster.addresses())).await;
    traffic.end(&cluster).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn watch_of_slices_continues_after_the_loss_of_its_endpoint() {
    let (cluster, proxy) = start(3, 2).await;
    let addresses = cluster.addresses();
    // Whichever endpoint has the watch, it is lost in one of the two rounds.
    for (dead, alive) in [(0, 1), (1, 0)] {
        cluster.servers[dead].kill();
        let client = proxy.client().await;
        until("a request succeeds", async || {
            client.get(crate::support::CONFIGMAPS).await.unwrap().status == 200
        })
        .await;
        add_slice(&cluster, 2, addresses[2]);
        wait_for_set(&proxy, &to_strings(&addresses)).await;
        remove_slice(&cluster, 2);
        wait_for_set(&proxy, &to_strings(&addresses[..2])).await;
        cluster.servers[dead].restart().unwrap();
        until("all endpoints are ready", async || {
            proxy.endpoints().await.iter().all(|e| e["state"] == "ready")
        })
        .await;
        assert!(cluster.servers[alive].is_running());
    }
    // Every connection gets a GOAWAY and every watch ends. The version to resume from is compacted.
    for server in &cluster.servers {
        server.goaway();
        server.end_watches();
    }
    cluster.state.compact();
    add_slice(&cluster, 2, addresses[2]);
    wait_for_set(&proxy, &to_strings(&addresses)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn rotated_token_is_used() {
    let (cluster, proxy) = start(2, 1).await;
    let requests_of = |user: &'static str| {
        let is_of_user = move |r: &jackstay_apiserver::audit::Record| r.user == user;
        cluster.state.audit().select(is_of_user).len()
    };
    // The slices list only the static endpoint, so the set does not show when the watch has started.
    let watches =
        || cluster.servers.iter().map(|s| s.counters().watches.load(Relaxed)).sum::<u64>();
    until("the watch runs", async || watches() > 0).await;
    assert!(requests_of("jackstay-discovery") > 0, "the watch uses the token");
    cluster.state.add_token("watcher-2", User::new("jackstay-discovery-2", &[]));
    std::fs::write(cluster.certs.path().join("discovery-token"), "watcher-2\n").unwrap();
    for server in &cluster.servers {
        server.end_watches();
    }
    until("the new token is used", async || requests_of("jackstay-discovery-2") > 0).await;
    add_slice(&cluster, 1, cluster.addresses()[1]);
    wait_for_set(&proxy, &to_strings(&cluster.addresses())).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn invalid_credential_is_reported_and_changes_nothing() {
    let cluster = TestCluster::new(2);
    let mut config = cluster.config();
    with_discovery(&cluster, &mut config);
    let token = cluster.certs.path().join("discovery-token");
    std::fs::remove_file(&token).unwrap();
    let proxy = cluster.certs.start(config);
    proxy.wait_connected(2).await;
    until("the missing token file is reported", async || {
        has_source_event(&proxy, "slices", "discovery-token").await
    })
    .await;
    std::fs::write(&token, "unknown").unwrap();
    until("the rejection of the token is reported", async || {
        has_source_event(&proxy, "slices", "401").await
    })
    .await;
    assert_eq!(endpoint_addresses(&proxy).await.len(), 2);
    let ready = proxy.page("/readyz").await;
    assert!(ready.starts_with("HTTP/1.1 200") && ready.contains("[-]source"), "{ready}");
    // The kubeconfig gets an unsupported user, and is then restored.
    let kubeconfig = cluster.certs.path().join("discovery.kubeconfig");
    let good = std::fs::read_to_string(&kubeconfig).unwrap();
    let exec = good.replace("tokenFile: discovery-token", "exec: {command: aws}");
    std::fs::write(&kubeconfig, exec).unwrap();
    until("the exec plugin is reported", async || {
        has_source_event(&proxy, "slices", "exec plugin").await
    })
    .await;
    std::fs::write(&kubeconfig, good).unwrap();
    std::fs::write(&token, "watcher-1").unwrap();
    add_slice(&cluster, 0, cluster.addresses()[0]);
    until("the slices are used", async || source_report(&proxy, "slices").await["endpoints"] == 1)
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn endpoints_object_is_used_without_the_discovery_api() {
    let cluster = TestCluster::new(2);
    // These apiservers do not serve discovery.k8s.io.
    for server in &cluster.servers {
        let refuse: RequestHook = Arc::new(|request| {
            request.uri.path().starts_with("/apis/discovery.k8s.io/").then(|| {
                let message = "the server could not find the requested resource";
                ScriptedResponse::status(404, "NotFound", message)
            })
        });
        server.set_faults(|faults| faults.on_request = Some(refuse));
    }
    let ports: Vec<_> = cluster.addresses().iter().map(SocketAddr::port).collect();
    let subset = |port: &u16| json!({ "addresses": [{ "ip": "127.0.0.1" }], "ports": [{ "name": "https", "port": port }] });
    let endpoints = json!({
        "apiVersion": "v1", "kind": "Endpoints",
        "metadata": { "name": "kubernetes", "namespace": "default" },
        "subsets": ports.iter().map(subset).collect::<Vec<_>>(),
    });
    cluster.state.create(&ENDPOINTS, "default", endpoints, false).unwrap();
    let mut config = cluster.config();
    config.upstreams[0].endpoints.truncate(1);
    with_discovery(&cluster, &mut config);
    let proxy = cluster.certs.start(config);
    wait_for_set(&proxy, &to_strings(&cluster.addresses())).await;
}

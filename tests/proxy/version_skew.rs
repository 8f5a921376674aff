//! Apiservers of two versions, as during an upgrade of the control plane: where requests and watches go.

use crate::support::wait::{pause, until_within};
use crate::support::{CONFIGMAPS, Proxy, TestCluster, until, without_suspicion};
use http::Method;
use jackstay_apiserver::{RequestHook, ScriptedResponse};
use jackstay_config::{Config, Percent, VersionPreference};
use std::sync::Arc;
use std::time::Duration;

const OLD: &str = "v1.36.2";
const NEW: &str = "v1.37.0";

const KUBELET_OF_NEW: &str = "kubelet/v1.37.0 (linux/amd64) kubernetes/0c5b1c1";

/// Starts servers with these versions and waits until the versions are known and all are ready.
async fn start(versions: &[&str], change: impl FnOnce(&mut Config)) -> (TestCluster, Proxy) {
    let cluster = TestCluster::new(versions.len());
    for (server, version) in cluster.servers.iter().zip(versions) {
        server.set_version(version);
    }
    let proxy = cluster.start_with(change).await;
    wait_versions(&proxy).await;
    (cluster, proxy)
}

/// Waits until all apiservers are ready and their versions are known.
async fn wait_versions(proxy: &Proxy) {
    proxy.wait_all("ready").await;
    until("the versions are known", async || {
        let endpoints = proxy.endpoints().await;
        endpoints.iter().all(|endpoint| endpoint["version"].is_string())
    })
    .await;
}

fn newest(config: &mut Config) {
    config.upstreams[0].version_preference = VersionPreference::Newest;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn requests_go_to_an_apiserver_at_least_as_new_as_their_client_while_one_is_ready() {
    let (cluster, proxy) = start(&[OLD, NEW], |config| {
        // A hedged request would reach both apiservers.
        without_suspicion(config);
        newest(config);
    })
    .await;
    let client = proxy.client().await;
    // Clients that are not newer than an apiserver, or say nothing of Kubernetes, use both.
    for agent in ["kubectl/v1.36.2 (linux/amd64) kubernetes/abc", "Go-http-client/2.0"] {
        cluster.expect_load_decides(&client, agent).await;
    }
    // The load alone would prefer the older apiserver.
    cluster.servers[1].set_faults(|faults| faults.delay = Duration::from_millis(10));
    assert_eq!(cluster.spread(&client, KUBELET_OF_NEW, 100).await, [0, 100]);
    cluster.servers[1].set_faults(|faults| faults.delay = Duration::ZERO);
    // Without a newer apiserver the older one is used.
    cluster.servers[1].kill();
    assert_eq!(cluster.spread(&client, KUBELET_OF_NEW, 100).await, [100, 0]);
    // The old apiserver is upgraded: its new version is known when it is ready.
    cluster.servers[0].kill();
    let address = cluster.servers[0].addr;
    until("the old apiserver is not ready", async || {
        proxy.endpoint(address).await["state"] != "ready"
    })
    .await;
    cluster.servers[0].set_version(NEW);
    cluster.servers[0].restart().unwrap();
    proxy.wait_state(address, "ready").await;
    assert_eq!(proxy.endpoint(address).await["version"], NEW);
    proxy.wait_metrics("jackstay_endpoint_kubernetes_minor").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn requests_of_new_clients_use_all_apiservers_without_the_preference() {
    let (cluster, proxy) = start(&[OLD, NEW], |_| {}).await;
    let client = proxy.client().await;
    cluster.expect_load_decides(&client, KUBELET_OF_NEW).await;
}

/// With two apiservers of the old version and one of the new one, a watch of the new one that is lost without its
/// apiserver stays there, and one whose apiserver is lost moves to an old one.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn watch_continues_on_an_older_apiserver_only_if_no_newer_one_is_ready() {
    let (cluster, proxy) = start(&[OLD, OLD, NEW, NEW], newest).await;
    let client = proxy.client().await;
    let version = cluster.state.version();
    let watches = cluster.start_watches(&client, 40).await;
    let count = |server: usize| cluster.watches(server);
    let on_new = count(2) + count(3);
    assert!(on_new > 4, "{on_new}");
    cluster.servers[2].kill();
    // The watches of the old ones stay where they are.
    until("the other new apiserver has the watches", async || count(3) == on_new).await;
    cluster.create_config_map("after-the-first");
    cluster.servers[3].kill();
    until("the old ones have all watches", async || count(0) + count(1) == 40).await;
    cluster.create_config_map("after-the-second");
    let expected: Vec<_> = (version + 1..=cluster.state.version()).collect();
    for watch in &watches {
        watch.expect_versions(&expected).await;
    }
}

/// The newer apiserver is ready, since the connection of the prober continues, but for a moment no other connection to
/// it can be opened.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn watch_waits_for_a_connection_to_the_only_newer_apiserver_that_is_ready() {
    let cluster = TestCluster::new(3);
    for (server, version) in cluster.servers.iter().zip([OLD, OLD, NEW]) {
        server.set_version(version);
    }
    let change = |config: &mut Config| {
        without_suspicion(config);
        config.upstreams[0].rebalance = false;
    };
    let (relays, proxy) = cluster.start_behind_relays(change).await;
    wait_versions(&proxy).await;
    let client = proxy.client().await;
    let version = cluster.state.version();
    let watches = cluster.start_watches(&client, 30).await;
    let before = cluster.watch_counts();
    assert!(before[2] > 4, "{before:?}");
    // A watch that has just delivered is resumed within 50 ms.
    cluster.create_config_map("before");
    for watch in &watches {
        until("the event arrives", async || watch.has_seen("before")).await;
    }
    let relay = &relays[2];
    relay.silence_new(true);
    let endpoint = proxy.endpoint(relay.addr).await;
    let connections = endpoint["connections"].as_array().unwrap().iter();
    let of_identity =
        connections.filter(|one| one["class"].as_str().unwrap().starts_with("identity"));
    let mut locals: Vec<_> = of_identity.map(|one| one["local"].as_str().unwrap()).collect();
    // A watch whose attempt fails may be resumed on an older apiserver, so each is resumed before the next reset.
    let last = locals.pop().unwrap();
    for local in locals {
        relay.reset_from(local.parse().unwrap());
        until("the watches are on another connection", async || {
            let shown = proxy.endpoint(relay.addr).await["connections"].to_string();
            !shown.contains(local) && cluster.watches(2) == before[2]
        })
        .await;
    }
    relay.reset_from(last.parse().unwrap());
    until("the watches are lost", async || cluster.watches(2) == 0).await;
    pause(Duration::from_millis(500)).await;
    assert_eq!(proxy.endpoint(relay.addr).await["state"], "ready");
    assert_eq!(
        cluster.watch_counts(),
        [before[0], before[1], 0],
        "a watch continues on an older apiserver"
    );
    relay.clear_faults();
    until("the watches run again", async || cluster.watch_counts() == before).await;
    cluster.create_config_map("after");
    let expected: Vec<_> = (version + 1..=cluster.state.version()).collect();
    for watch in &watches {
        watch.expect_versions(&expected).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn canary_gets_its_share_of_requests_until_its_errors_diverge() {
    let (cluster, proxy) = start(&[OLD, OLD, NEW], |config| {
        // A hedged request would reach two apiservers.
        without_suspicion(config);
        newest(config);
        config.upstreams[0].canary = Percent::new(10).unwrap();
    })
    .await;
    let client = proxy.client().await;
    until("the canary is active", async || canary(&proxy).await["state"] == "active").await;
    let spread_of = async |requests| cluster.spread(&client, "curl/8.5.0", requests).await;
    assert_eq!(spread_of(400).await[2], 40);
    // A client that is itself new does not count in the share.
    assert_eq!(cluster.spread(&client, KUBELET_OF_NEW, 50).await, [0, 0, 50]);
    assert_eq!(spread_of(200).await[2], 20);

    let fail: RequestHook = Arc::new(|request| {
        let fails = request.uri.path() == CONFIGMAPS;
        fails.then(|| ScriptedResponse::status(500, "InternalError", "the new version is broken"))
    });
    cluster.servers[2].set_faults(|faults| faults.on_request = Some(fail));
    let withdrawn = async || {
        let path = format!("{CONFIGMAPS}?probe=fail");
        for _ in 0..100 {
            let _ = client.request(Method::GET, &path, &[("user-agent", "curl")], "").await;
        }
        canary(&proxy).await["state"] == "withdrawn"
    };
    until_within(Duration::from_secs(60), "the share is withdrawn", withdrawn).await;
    cluster.servers[2].set_faults(|faults| faults.on_request = None);
    assert_eq!(spread_of(100).await[2], 0);
    assert!(canary(&proxy).await["reason"].as_str().unwrap().contains("answers of 1.37 were 5xx"));
    proxy.wait_metrics("jackstay_canary_withdrawn{upstream=\"control-plane\"} 1\n").await;
    let events = proxy.events().await;
    assert!(events.iter().any(|e| e["name"] == "canary" && e["to"] == "withdrawn"), "{events:?}");
}

async fn canary(proxy: &Proxy) -> serde_json::Value {
    proxy.status().await["upstreams"][0]["canary"].clone()
}

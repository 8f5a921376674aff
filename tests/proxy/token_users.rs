//! Listeners without an identity, whose clients use tokens: jackstay then has no credential for `/readyz`.

use crate::support::{CONFIGMAPS, TestCluster, terminate_mode, until};
use jackstay_apiserver::identity::User;
use jackstay_config::Config;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, SystemTime};

const UNKNOWN: &str = "readiness unknown: set readyz.token_file";

/// The configuration that `jackstay kubeconfig` writes for a user with a token.
fn without_credential(cluster: &TestCluster) -> Config {
    let mut config = cluster.config();
    config.upstreams[0].health.readyz.cert = None;
    terminate_mode(&mut config).identities.clear();
    config
}

fn probe_times(cluster: &TestCluster, server: &str) -> Vec<SystemTime> {
    let probes = cluster.state.audit().select(|r| r.server == server && r.path == "/readyz");
    probes.into_iter().map(|record| record.time).collect()
}

/// The demo apiserver, like kube-apiserver, closes a connection after an anonymous request.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn endpoint_is_ready_while_connected_when_readyz_has_no_credential() {
    let cluster = TestCluster::new(2);
    cluster.state.add_token("alice", User::new("alice", &[]));
    let proxy = cluster.certs.start(without_credential(&cluster));
    proxy.wait_ready(2).await;
    // Each server has responded to an anonymous probe, closed its connection and got another one.
    until("both servers have closed a connection", async || {
        cluster.servers.iter().all(|server| {
            server.counters().goaways.load(Relaxed) == 1
                && server.counters().open.load(Relaxed) == 1
        })
    })
    .await;
    for endpoint in proxy.endpoints().await {
        assert_eq!(endpoint["state"], "ready", "{endpoint}");
        assert_eq!(
            (&endpoint["reason"], &endpoint["readiness"]),
            (&UNKNOWN.into(), &"unknown".into())
        );
        assert_eq!(endpoint["connections"].as_array().unwrap().len(), 1, "{endpoint}");
    }
    let client = proxy.client_with(&cluster.certs.anonymous().token("alice")).await;
    assert_eq!(client.get(CONFIGMAPS).await.unwrap().status, 200);
    let events = proxy.status().await["events"].as_array().unwrap().clone();
    let expected =
        |event: &serde_json::Value| event["kind"] == "endpoint" && event["to"] == "ready";
    assert!(
        events.iter().all(expected) && events.len() == 2,
        "other events than two endpoints that became ready: {events:?}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn endpoint_is_degraded_when_an_anonymous_readyz_fails() {
    let cluster = TestCluster::new(2);
    cluster.servers[0].set_faults(|faults| faults.unready = true);
    let proxy = cluster.certs.start(without_credential(&cluster));
    let degraded_address = cluster.servers[0].addr.to_string();
    until("one is degraded and one is ready", async || {
        proxy.endpoints().await.iter().all(|endpoint| {
            let degraded = endpoint["state"] == "degraded";
            (endpoint["address"] == *degraded_address) == degraded
                && (degraded || endpoint["state"] == "ready")
        })
    })
    .await;
    for endpoint in proxy.endpoints().await.iter().filter(|e| e["address"] == *degraded_address) {
        assert_eq!(endpoint["reason"], "/readyz answers 500: etcd");
    }
    // A probe of an endpoint that is ready follows after 30 s; of this one, after a few seconds.
    cluster.servers[0].set_faults(|faults| faults.unready = false);
    proxy.wait_all("ready").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn readyz_is_probed_with_a_token_when_its_file_appears() {
    let cluster = TestCluster::new(1);
    cluster.state.add_token("probe", User::new("probe", &[]));
    let mut config = without_credential(&cluster);
    let file = cluster.certs.path().join("probe-token");
    config.upstreams[0].health.readyz.token_file = Some(file.clone());
    let proxy = cluster.certs.start(config);
    proxy.wait_ready(1).await;
    let reason = async || proxy.endpoints().await[0]["reason"].as_str().unwrap().to_owned();
    assert_eq!(reason().await, "readiness unknown: readyz.token_file cannot be read");
    std::fs::write(&file, "probe\n").unwrap();
    until("/readyz is probed", async || reason().await == "/readyz is ok").await;
    assert_eq!(proxy.endpoints().await[0]["readiness"], "ok");
}

/// If 5,000 nodes each sent a probe every second, they would overload a failing apiserver.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn probes_back_off_while_readyz_fails() {
    let cluster = TestCluster::new(1);
    cluster.servers[0].set_faults(|faults| faults.unready = true);
    let mut config = cluster.config();
    config.upstreams[0].health.readyz.interval = Duration::from_secs(60);
    let _proxy = cluster.certs.start(config);
    until("/readyz was probed four times", async || probe_times(&cluster, "server-0").len() >= 4)
        .await;
    let times = probe_times(&cluster, "server-0");
    let gaps: Vec<_> = times.windows(2).map(|two| two[1].duration_since(two[0]).unwrap()).collect();
    println!("probed after {gaps:?}");
    // The pauses are 1 s, 2 s and 4 s, each up to a fifth shorter or longer; 20 ms are left for the inaccuracy
    // of the measurement. A busy machine probes later.
    for (gap, least) in gaps.iter().zip([780, 1_580, 3_180]) {
        assert!(*gap >= Duration::from_millis(least), "{gaps:?}");
    }
}

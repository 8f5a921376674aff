//! Heartbeats on an apiserver that is not healthy end while there is time for another attempt; other writes keep
//! their time.

use crate::support::{CONFIGMAPS, TestCluster, config_map, soon, until};
use http::{Method, StatusCode};
use jackstay_apiserver::client::{Client, Reply};
use std::time::{Duration, Instant};

const LEASE: &str = "/apis/coordination.k8s.io/v1/namespaces/default/leases/leader";
/// The time after which a heartbeat ends on an apiserver that is not healthy.
const MIN_WAIT: Duration = Duration::from_secs(4);

fn lease() -> String {
    let metadata = serde_json::json!({ "name": "leader", "namespace": "default" });
    serde_json::json!({
        "apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata,
        "spec": { "holderIdentity": "a" },
    })
    .to_string()
}

async fn write(client: &Client, method: Method, path: &str, id: &str, object: String) -> Reply {
    let headers = [("content-type", "application/json"), ("audit-id", id)];
    client.request(method, path, &headers, object).await.unwrap()
}

fn expect_heartbeat_ended(reply: &Reply, reason: &str) {
    assert_eq!(reply.status, StatusCode::GATEWAY_TIMEOUT, "{:?}", reply.body);
    assert!(!reply.headers.contains_key("retry-after"));
    let status = reply.json();
    assert_eq!(status["reason"], "Timeout", "{status}");
    let message = status["message"].as_str().unwrap();
    assert!(message.contains("may or may not have been carried out"), "{message}");
    assert!(message.contains(reason), "{message}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn heartbeat_on_an_apiserver_that_hangs_ends_after_4_s_and_other_writes_do_not() {
    let cluster = TestCluster::new(1);
    let proxy = cluster.start().await;
    let client = proxy.client().await;
    let leases = LEASE.rsplit_once('/').unwrap().0;
    assert_eq!(write(&client, Method::POST, leases, "create", lease()).await.status, 201);
    cluster.servers[0].set_faults(|faults| faults.hang = true);
    let sent = Instant::now();
    let other = proxy.client().await;
    let create = tokio::spawn(async move {
        write(&other, Method::POST, CONFIGMAPS, "other", config_map("other", "1").to_string()).await
    });
    let reply = soon("the heartbeat", write(&client, Method::PUT, LEASE, "beat", lease())).await;
    assert!(sent.elapsed() >= MIN_WAIT, "{:?}", sent.elapsed());
    expect_heartbeat_ended(&reply, "no response for 4 s, and /readyz fails or is overdue");
    assert!(!create.is_finished(), "a write that is no heartbeat ended");
    let metric =
        r#"jackstay_own_errors_total{listener="apiserver",code="504",reason="heartbeat_ended"} 1"#;
    proxy.wait_metrics(metric).await;
    cluster.servers[0].set_faults(|faults| faults.hang = false);
    assert_eq!(soon("the other write", create).await.unwrap().status, 201);
    let sent =
        cluster.state.audit().select(|request| request.audit_id.as_deref() == Some("beat")).len();
    assert!(sent <= 1, "the heartbeat was sent {sent} times");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn heartbeat_ends_when_its_apiserver_becomes_unhealthy_later() {
    let cluster = TestCluster::new(1);
    let change = |config: &mut jackstay::config::Config| {
        crate::support::without_suspicion(config);
        let resource = jackstay::config::HeartbeatResource::parse("configmaps").unwrap();
        crate::support::terminate_mode(config).heartbeats = vec![resource];
    };
    let proxy = cluster.start_with(change).await;
    let client = proxy.client().await;
    cluster.create_config_map("beat");
    // The server carries out the write and does not answer. A webhook may take as long.
    cluster.servers[0].set_faults(|faults| faults.lose_next = 1);
    let path = format!("{CONFIGMAPS}/beat");
    let object = config_map("beat", "2").to_string();
    let heartbeat =
        tokio::spawn(async move { write(&client, Method::PUT, &path, "beat", object).await });
    let sent = Instant::now();
    let audit = cluster.state.audit();
    until("the write is carried out", async || {
        !audit.select(|request| request.audit_id.as_deref() == Some("beat")).is_empty()
    })
    .await;
    until("4 s have passed", async || sent.elapsed() > MIN_WAIT + MIN_WAIT / 4).await;
    assert!(!heartbeat.is_finished(), "it ended on a healthy apiserver");
    cluster.servers[0].set_faults(|faults| faults.unready = true);
    let reply = soon("the heartbeat", heartbeat).await.unwrap();
    expect_heartbeat_ended(&reply, "/readyz fails");
    assert_eq!(audit.select(|request| request.audit_id.as_deref() == Some("beat")).len(), 1);
}

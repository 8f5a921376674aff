//! Writes on a connection whose path is lost: one that the kernel has not sent goes to another apiserver, and one that may have
//! arrived is not repeated.

use crate::support::netns::nft;
use crate::support::{TestCluster, soon};
use http::Method;
use serde_json::json;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

const CONFIG_MAPS: &str = "/api/v1/namespaces/default/configmaps";
const WRITES: usize = 24;

/// What becomes of writes that are made while packets to one of two apiservers are dropped by this hook of netfilter: how
/// often each status was answered, and the number of writes that were sent again because they had not been sent.
async fn writes_under(hook: &str) -> (BTreeMap<u16, usize>, u64) {
    let cluster = TestCluster::new(2);
    let proxy = cluster.start().await;
    cluster.state.record_commits(1_000);
    let client = proxy.client().await;
    let port = cluster.servers[0].addr.port();
    nft("add table inet unsent");
    nft(&format!("add chain inet unsent lost {{ type filter hook {hook} priority 0; }}"));
    nft(&format!("add rule inet unsent lost tcp dport {port} drop"));
    let begun = Instant::now();
    let write = async |index: usize| {
        let (name, id) = (format!("written-{index}"), format!("write-{index}"));
        let body = json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": name } });
        let headers = [("content-type", "application/json"), ("audit-id", id.as_str())];
        let sent = client.request(Method::POST, CONFIG_MAPS, &headers, body.to_string());
        (id.clone(), sent.await.unwrap().status.as_u16())
    };
    let answers = futures_util::future::join_all((0..WRITES).map(write));
    let answers = soon("the answers", answers).await;
    let took = begun.elapsed();
    nft("delete table inet unsent");
    proxy.wait_all("ready").await;
    let mut commits = BTreeMap::<String, usize>::new();
    for commit in cluster.state.commits().commits {
        *commits.entry(commit.request.as_deref().unwrap_or_default().to_owned()).or_default() += 1;
    }
    let mut statuses = BTreeMap::new();
    for (id, status) in answers {
        let count = commits.get(&id).copied().unwrap_or(0);
        assert!(count <= 1, "{id} ({status}) was carried out {count} times");
        assert!(status != 201 || count == 1, "{id} has a success and was not carried out");
        *statuses.entry(status).or_default() += 1;
    }
    let sent_again = proxy.metric("jackstay_retries_total{reason=\"not_sent\"").await;
    println!("{hook}: {statuses:?} after {took:?}, {sent_again} sent again");
    assert!(took < Duration::from_secs(10), "{took:?}");
    (statuses, sent_again as u64)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
#[ignore = "needs root and a network namespace of its own"]
async fn write_that_was_not_sent_goes_to_another_apiserver() {
    let (statuses, sent_again) = writes_under("output").await;
    assert_eq!(statuses, BTreeMap::from([(201, WRITES)]));
    assert!(sent_again >= 1, "no write was on the lost path");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
#[ignore = "needs root and a network namespace of its own"]
async fn write_that_may_have_arrived_is_not_repeated() {
    let (statuses, sent_again) = writes_under("input").await;
    assert_eq!(sent_again, 0);
    assert!(statuses.iter().any(|(status, _)| *status != 201), "no write was on the lost path");
}

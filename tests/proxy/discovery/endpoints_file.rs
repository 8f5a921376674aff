//! Discovery by an endpoints file: invalid content, and changes while requests run.

use crate::discovery::traffic::{
    Traffic, endpoint_addresses, has_source_event, source_report, wait_for_set,
};
use crate::support::{Proxy, TestCluster, pause, refusing_address, to_strings, until, write_lines};
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

/// Starts jackstay with an endpoints file as its only source, and traffic.
async fn start(cluster: &TestCluster, lines: &[String]) -> (Proxy, PathBuf, Traffic) {
    let path = cluster.certs.path().join("endpoints");
    write_lines(&path, lines);
    let mut config = cluster.config();
    config.upstreams[0].endpoints.clear();
    config.upstreams[0].endpoints_file = Some(path.clone());
    let proxy = cluster.certs.start(config);
    proxy.wait_connected(lines.len()).await;
    let traffic = Traffic::start(cluster, &proxy).await;
    (proxy, path, traffic)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn invalid_file_is_reported_and_changes_nothing() {
    let cluster = TestCluster::new(2);
    let addresses = to_strings(&cluster.addresses());
    let (proxy, path, traffic) = start(&cluster, &addresses).await;

    let last_success = async || source_report(&proxy, "file").await["last_success"].clone();
    let first = last_success().await;
    until("the file is read again", async || last_success().await != first).await;

    let mut last_valid = None;
    let own = proxy.addr.to_string();
    for (lines, expected) in [
        (vec![], "it names no endpoint"),
        (vec!["# nothing".to_owned(), String::new()], "it names no endpoint"),
        (vec!["apiserver.example".to_owned(), "invalid".into()], "can be an endpoint"),
        (vec![own.clone()], "requests would loop"),
    ] {
        write_lines(&path, &lines);
        until(expected, async || has_source_event(&proxy, "file", expected).await).await;
        assert_eq!(endpoint_addresses(&proxy).await.len(), 2, "{expected}");
        let report = source_report(&proxy, "file").await;
        assert!(report["error"].as_str().unwrap().contains("changes nothing"), "{report}");
        // Reading an unusable file is not a success.
        let last_valid = last_valid.get_or_insert_with(|| report["last_success"].clone());
        assert_eq!(report["last_success"], *last_valid, "{expected}");
        let ready = proxy.page("/readyz").await;
        assert!(ready.starts_with("HTTP/1.1 200"), "{ready}");
        // The line has the age of the last success and the current error.
        let source = ready.lines().find(|line| line.contains("source control-plane/file"));
        let source = source.unwrap_or_else(|| panic!("{ready}"));
        assert!(source.starts_with("[-]") && source.contains(": 2 endpoints, "), "{source}");
        assert!(source.contains(" s ago; an empty answer changes nothing: "), "{source}");
    }
    std::fs::remove_file(&path).unwrap();
    until("the missing file is reported", async || {
        has_source_event(&proxy, "file", "No such file").await
    })
    .await;
    // A pipe without a writer does not block discovery.
    assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
    until("the pipe is reported", async || {
        has_source_event(&proxy, "file", "not a regular file").await
    })
    .await;

    // jackstay's own address and invalid lines are left out; the valid address is used.
    let mixed = vec![own, addresses[0].clone(), "x".into()];
    write_lines(&path, &mixed);
    wait_for_set(&proxy, &addresses[..1]).await;
    assert_eq!(source_report(&proxy, "file").await["error"], serde_json::Value::Null);
    traffic.end(&cluster).await;
    let metric = async |name: &str| proxy.metric(name).await;
    assert!(metric("jackstay_discovery_refused_total").await >= 7.0);
    let last_success = metric("jackstay_discovery_last_success_timestamp_seconds").await;
    assert!(last_success > 1.7e9, "a Unix time after 2023: {last_success}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn all_endpoints_replaced_at_once_fails_no_request() {
    let cluster = TestCluster::new(4);
    let addresses = to_strings(&cluster.addresses());
    let (proxy, path, traffic) = start(&cluster, &addresses[..2]).await;
    write_lines(&path, &addresses[2..]);
    wait_for_set(&proxy, &addresses[2..]).await;
    proxy.wait_connected(2).await;
    traffic.continues().await;

    // If dead endpoints replace them, the usable ones stay in the set.
    let dead: Vec<String> = (0..2).map(|_| refusing_address().to_string()).collect();
    write_lines(&path, &dead);
    let all = [&dead[..], &addresses[2..]].concat();
    wait_for_set(&proxy, &all).await;
    for _ in 0..10 {
        traffic.continues().await;
    }
    assert_eq!(
        endpoint_addresses(&proxy).await.len(),
        4,
        "usable endpoints stay until another one is usable"
    );
    write_lines(&path, &[&dead[..], &addresses[..1]].concat());
    wait_for_set(&proxy, &[&dead[..], &addresses[..1]].concat()).await;
    traffic.end(&cluster).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn endpoint_that_flaps_fails_no_request() {
    let cluster = TestCluster::new(2);
    let addresses = to_strings(&cluster.addresses());
    let (proxy, path, traffic) = start(&cluster, &addresses).await;
    let start = Instant::now();
    let mut round = 0;
    while start.elapsed() < Duration::from_secs(4) {
        write_lines(&path, &addresses[..=round % 2]);
        round += 1;
        pause(Duration::from_millis(200)).await;
    }
    traffic.continues().await;
    write_lines(&path, &addresses);
    wait_for_set(&proxy, &addresses).await;
    traffic.end(&cluster).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn file_with_1000_entries_is_limited_to_64_with_all_usable_ones() {
    let cluster = TestCluster::new(2);
    let addresses = to_strings(&cluster.addresses());
    let (proxy, path, traffic) = start(&cluster, &addresses).await;
    // Addresses in 127.0.0.0/8 that refuse connections at once.
    let mut lines: Vec<String> =
        (0..1000).map(|n| format!("127.1.{}.{}:9", n / 250, n % 250 + 1)).collect();
    lines.extend(addresses.iter().cloned());
    write_lines(&path, &lines);
    until("the limit is reported", async || {
        has_source_event(&proxy, "file", "more than 64 endpoints").await
    })
    .await;
    until("the set is limited", async || endpoint_addresses(&proxy).await.len() == 64).await;
    let set = endpoint_addresses(&proxy).await;
    assert!(addresses.iter().all(|address| set.contains(address)), "usable endpoints stay");
    traffic.continues().await;
    write_lines(&path, &addresses);
    wait_for_set(&proxy, &addresses).await;
    traffic.end(&cluster).await;
}

//! A list of endpoints that lies in every way, and a change of it in the middle of traffic.

use crate::support::{Proxy, TestCluster, pause, refusing_address, to_strings, until, write_lines};
use crate::traffic::{Traffic, set, set_is, source, told};
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

/// Endpoints from a file alone.
async fn start(cluster: &TestCluster, lines: &[String]) -> (Proxy, PathBuf) {
    let path = cluster.certs.path().join("endpoints");
    write_lines(&path, lines);
    let mut config = cluster.config();
    config.upstreams[0].endpoints.clear();
    config.upstreams[0].endpoints_file = Some(path.clone());
    let proxy = cluster.certs.start(config);
    proxy.wait_connected(1).await;
    (proxy, path)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn what_cannot_be_changes_nothing_and_is_told() {
    let cluster = TestCluster::new(2);
    let addresses = to_strings(&cluster.addresses());
    let (proxy, path) = start(&cluster, &addresses).await;
    proxy.wait_connected(2).await;
    let traffic = Traffic::start(&cluster, &proxy).await;

    let last_success = async || source(&proxy, "file").await["last_success"].clone();
    let first = last_success().await;
    until("it is looked at again", async || last_success().await != first).await;

    let mut last = None;
    let own = proxy.addr.to_string();
    for (lines, words) in [
        (vec![], "it names no endpoint"),
        (vec!["# nothing".to_owned(), String::new()], "it names no endpoint"),
        (vec!["apiserver.example".to_owned(), "what?".into()], "can be an endpoint"),
        (vec![own.clone()], "requests would loop"),
    ] {
        write_lines(&path, &lines);
        until(words, async || told(&proxy, "file", words).await).await;
        assert_eq!(set(&proxy).await.len(), 2, "{words}");
        let after = source(&proxy, "file").await;
        assert!(after["error"].as_str().unwrap().contains("changes nothing"), "{after}");
        // What cannot be used is no success, however often it is looked at.
        let last = last.get_or_insert_with(|| after["last_success"].clone());
        assert_eq!(after["last_success"], *last, "{words}");
        let ready = proxy.page("/readyz").await;
        assert!(ready.starts_with("HTTP/1.1 200"), "{ready}");
        // Its last success, how long ago, and what is wrong since.
        let source = ready.lines().find(|line| line.contains("source control-plane/file"));
        let source = source.unwrap_or_else(|| panic!("{ready}"));
        assert!(source.starts_with("[-]") && source.contains(": 2 endpoints, "), "{source}");
        assert!(source.contains(" s ago; an empty answer changes nothing: "), "{source}");
    }
    std::fs::remove_file(&path).unwrap();
    until("the file is missed", async || told(&proxy, "file", "No such file").await).await;
    // A pipe that nobody writes to: everything beside it goes on.
    assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
    until("the pipe is told", async || told(&proxy, "file", "not a regular file").await).await;

    // Ourselves and nonsense among what is good: those are left out, and the rest is taken.
    let mixed = vec![own, addresses[0].clone(), "x".into()];
    write_lines(&path, &mixed);
    set_is(&proxy, &addresses[..1]).await;
    assert_eq!(source(&proxy, "file").await["error"], serde_json::Value::Null);
    traffic.end(&cluster).await;
    let metric = async |name: &str| proxy.metric(name).await;
    assert!(metric("jackstay_discovery_refused_total").await >= 7.0);
    let at = metric("jackstay_discovery_last_success_timestamp_seconds").await;
    assert!(at > 1.7e9, "{at}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn all_replaced_at_once() {
    let cluster = TestCluster::new(4);
    let addresses = to_strings(&cluster.addresses());
    let (proxy, path) = start(&cluster, &addresses[..2]).await;
    proxy.wait_connected(2).await;
    let traffic = Traffic::start(&cluster, &proxy).await;
    write_lines(&path, &addresses[2..]);
    set_is(&proxy, &addresses[2..]).await;
    proxy.wait_connected(2).await;
    traffic.goes_on().await;

    // By what does not work: nothing that serves is taken away.
    let dead: Vec<String> = (0..2).map(|_| refusing_address().to_string()).collect();
    write_lines(&path, &dead);
    let all = [&dead[..], &addresses[2..]].concat();
    set_is(&proxy, &all).await;
    for _ in 0..10 {
        traffic.goes_on().await;
    }
    assert_eq!(set(&proxy).await.len(), 4, "they stay for as long as nothing else serves");
    write_lines(&path, &[&dead[..], &addresses[..1]].concat());
    set_is(&proxy, &[&dead[..], &addresses[..1]].concat()).await;
    traffic.end(&cluster).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_member_that_flaps() {
    let cluster = TestCluster::new(2);
    let addresses = to_strings(&cluster.addresses());
    let (proxy, path) = start(&cluster, &addresses).await;
    proxy.wait_connected(2).await;
    let traffic = Traffic::start(&cluster, &proxy).await;
    let start = Instant::now();
    let mut turn = 0;
    while start.elapsed() < Duration::from_secs(4) {
        write_lines(&path, &addresses[..=turn % 2]);
        turn += 1;
        pause(Duration::from_millis(200)).await;
    }
    traffic.goes_on().await;
    write_lines(&path, &addresses);
    set_is(&proxy, &addresses).await;
    traffic.end(&cluster).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_thousand_entries() {
    let cluster = TestCluster::new(2);
    let addresses = to_strings(&cluster.addresses());
    let (proxy, path) = start(&cluster, &addresses).await;
    proxy.wait_connected(2).await;
    let traffic = Traffic::start(&cluster, &proxy).await;
    // Nobody is there: 127.0.0.0/8 refuses at once.
    let mut lines: Vec<String> =
        (0..1000).map(|n| format!("127.1.{}.{}:9", n / 250, n % 250 + 1)).collect();
    lines.extend(addresses.iter().cloned());
    write_lines(&path, &lines);
    until("it is told", async || told(&proxy, "file", "more than 64 endpoints").await).await;
    until("there is a bound", async || set(&proxy).await.len() == 64).await;
    let set = set(&proxy).await;
    assert!(addresses.iter().all(|address| set.contains(address)), "what serves stays");
    traffic.goes_on().await;
    write_lines(&path, &addresses);
    set_is(&proxy, &addresses).await;
    traffic.end(&cluster).await;
}

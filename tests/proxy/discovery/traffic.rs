//! Requests and a watch that run while endpoints change, and the discovery state of jackstay.

use crate::support::{CONFIGMAPS, Proxy, TestCluster, config_map, pause, soon, until};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};
use tokio::task::JoinHandle;

/// Clients that read, and one watch, until [`Self::end`] checks their results.
pub struct Traffic {
    stop: Arc<AtomicBool>,
    /// Number of successful requests.
    succeeded: Arc<AtomicUsize>,
    /// Each returns the number of its requests and the longest time of one.
    readers: Vec<JoinHandle<(usize, Duration)>>,
    /// Returns the number of its events.
    watch: JoinHandle<usize>,
    start_version: u64,
}

impl Traffic {
    pub async fn start(cluster: &TestCluster, proxy: &Proxy) -> Self {
        let (stop, succeeded) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let mut readers = Vec::new();
        for reader in 0..2 {
            let client = proxy.client().await;
            let (stop, succeeded) = (Arc::clone(&stop), Arc::clone(&succeeded));
            readers.push(tokio::spawn(async move {
                let (mut requests, mut slowest) = (0, Duration::ZERO);
                while !stop.load(Relaxed) {
                    let start = Instant::now();
                    let reply = client.get(CONFIGMAPS).await;
                    let reply = reply.unwrap_or_else(|e| panic!("reader {reader}: {e}"));
                    assert_eq!(reply.status, 200, "reader {reader}: {:?}", reply.body);
                    slowest = slowest.max(start.elapsed());
                    requests += 1;
                    succeeded.fetch_add(1, Relaxed);
                    pause(Duration::from_millis(20)).await;
                }
                (requests, slowest)
            }));
        }
        let client = proxy.client().await;
        let (version, path) = (cluster.state.version(), cluster.watch_path());
        let mut watch = client.watch(&path).await.unwrap();
        let watch = tokio::spawn(async move {
            let mut events = 0;
            while let Some(event) = watch.next().await.unwrap_or_else(|e| panic!("watch: {e}")) {
                assert_ne!(event["type"], "ERROR", "{event}");
                events += 1;
                if event["object"]["metadata"]["name"] == "last" {
                    return events;
                }
            }
            panic!("the watch ended");
        });
        Self { stop, succeeded, readers, watch, start_version: version }
    }

    /// Waits for ten more responses.
    pub async fn continues(&self) {
        let enough = self.succeeded.load(Relaxed) + 10;
        let has_enough = async || self.succeeded.load(Relaxed) >= enough;
        until("requests continue", has_enough).await;
    }

    /// Stops the requests, and ends the watch with a last event. Expects that no request failed, that the
    /// watch did not end before, and that it delivered no event twice.
    pub async fn end(self, cluster: &TestCluster) {
        self.stop.store(true, Relaxed);
        let mut requests = 0;
        for reader in self.readers {
            let (count, slowest) = reader.await.expect("no request failed");
            println!("{count} requests, the slowest took {slowest:?}");
            requests += count;
        }
        assert!(requests > 0);
        let kind = &jackstay_apiserver::kinds::CONFIG_MAPS;
        let map = config_map("last", "1");
        cluster.state.create(kind, "default", map, false).unwrap();
        let events = soon("the watch delivers the last event", self.watch).await.unwrap();
        assert!(events as u64 <= cluster.state.version() - self.start_version);
    }
}

/// The addresses of the endpoints in `/status`, sorted.
pub async fn endpoint_addresses(proxy: &Proxy) -> Vec<String> {
    let mut set: Vec<String> = proxy
        .endpoints()
        .await
        .iter()
        .map(|endpoint| endpoint["address"].as_str().unwrap().to_owned())
        .collect();
    set.sort();
    set
}

/// Waits until the set has exactly these endpoints.
pub async fn wait_for_set(proxy: &Proxy, expected: &[String]) {
    let mut expected = expected.to_vec();
    expected.sort();
    let condition = format!("the set is {expected:?}");
    until(&condition, async || endpoint_addresses(proxy).await == expected).await;
}

/// The entry of a source in `/status`; null if there is none.
pub async fn source_report(proxy: &Proxy, name: &str) -> serde_json::Value {
    let status = proxy.status().await;
    let sources = status["upstreams"][0]["sources"].as_array().unwrap().clone();
    sources.into_iter().find(|s| s["source"] == name).unwrap_or_default()
}

/// Whether the reason of an event of this source contains the text.
pub async fn has_source_event(proxy: &Proxy, source: &str, text: &str) -> bool {
    proxy.events().await.iter().any(|event| {
        event["kind"] == "source"
            && event["name"] == source
            && event["reason"].as_str().unwrap().contains(text)
    })
}

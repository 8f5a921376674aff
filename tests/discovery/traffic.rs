//! Requests that run while endpoints change, and their results.

use crate::support::{CONFIGMAPS, Proxy, TestCluster, pause};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};
use tokio::task::JoinHandle;

/// Readers and one watch, until `end` checks their results.
pub struct Traffic {
    over: Arc<AtomicBool>,
    done: Arc<AtomicUsize>,
    readers: Vec<JoinHandle<(usize, Duration)>>,
    watch: JoinHandle<usize>,
    world_version: u64,
}

impl Traffic {
    pub async fn start(cluster: &TestCluster, proxy: &Proxy) -> Self {
        let (over, done) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let mut readers = Vec::new();
        for reader in 0..2 {
            let client = proxy.client().await;
            let (over, done) = (Arc::clone(&over), Arc::clone(&done));
            readers.push(tokio::spawn(async move {
                let (mut requests, mut slowest) = (0, Duration::ZERO);
                while !over.load(Relaxed) {
                    let start = Instant::now();
                    let reply = client.get(CONFIGMAPS).await;
                    let reply = reply.unwrap_or_else(|e| panic!("reader {reader}: {e}"));
                    assert_eq!(reply.status, 200, "reader {reader}: {:?}", reply.body);
                    slowest = slowest.max(start.elapsed());
                    requests += 1;
                    done.fetch_add(1, Relaxed);
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
        Self { over, done, readers, watch, world_version: version }
    }

    /// Waits for ten more responses.
    pub async fn goes_on(&self) {
        let from = self.done.load(Relaxed);
        crate::support::until("requests continue", async || self.done.load(Relaxed) >= from + 10)
            .await;
    }

    /// Stops the traffic. Expects that no request failed, the watch did not end, and no event was
    /// lost.
    pub async fn end(self, cluster: &TestCluster) {
        self.over.store(true, Relaxed);
        let mut requests = 0;
        for reader in self.readers {
            let (count, slowest) = reader.await.expect("no request failed");
            println!("{count} requests, the slowest took {slowest:?}");
            requests += count;
        }
        assert!(requests > 0);
        let kind = &jackstay::demo::apiserver::kinds::CONFIG_MAPS;
        let map = crate::support::config_map("last", "1");
        cluster.state.create(kind, "default", map, false).unwrap();
        let events = crate::support::soon("the watch delivers", self.watch).await.unwrap();
        assert!(events as u64 <= cluster.state.version() - self.world_version);
    }
}

/// The addresses of the endpoints in `/status`, sorted.
pub async fn set(proxy: &Proxy) -> Vec<String> {
    let mut set: Vec<String> = proxy
        .endpoints()
        .await
        .iter()
        .map(|endpoint| endpoint["address"].as_str().unwrap().to_owned())
        .collect();
    set.sort();
    set
}

/// Waits until the set has these endpoints.
pub async fn set_is(proxy: &Proxy, expected: &[String]) {
    let mut expected = expected.to_vec();
    expected.sort();
    let what = format!("the set is {expected:?}");
    crate::support::until(&what, async || set(proxy).await == expected).await;
}

/// A source in `/status`.
pub async fn source(proxy: &Proxy, name: &str) -> serde_json::Value {
    let status = proxy.status().await;
    let sources = status["upstreams"][0]["sources"].as_array().unwrap().clone();
    sources.into_iter().find(|s| s["source"] == name).unwrap_or_default()
}

/// Whether an event of this source contains the text.
pub async fn has_event(proxy: &Proxy, source: &str, text: &str) -> bool {
    proxy.events().await.iter().any(|event| {
        event["kind"] == "source"
            && event["name"] == source
            && event["reason"].as_str().unwrap().contains(text)
    })
}

//! Requests that never stop while endpoints come and go, and what became of them.

use crate::support::{CONFIGMAPS, Proxy, TestCluster, pause};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};
use tokio::task::JoinHandle;

/// Readers and one watch, until they are asked how it went.
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
                let (mut asked, mut slowest) = (0, Duration::ZERO);
                while !over.load(Relaxed) {
                    let start = Instant::now();
                    let reply = client.get(CONFIGMAPS).await;
                    let reply = reply.unwrap_or_else(|e| panic!("reader {reader}: {e}"));
                    assert_eq!(reply.status, 200, "reader {reader}: {:?}", reply.body);
                    slowest = slowest.max(start.elapsed());
                    asked += 1;
                    done.fetch_add(1, Relaxed);
                    pause(Duration::from_millis(20)).await;
                }
                (asked, slowest)
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
                if event["object"]["metadata"]["name"] == "the-end" {
                    return events;
                }
            }
            panic!("the watch ended");
        });
        Self { over, done, readers, watch, world_version: version }
    }

    /// Waits until every reader has had so many more answers.
    pub async fn goes_on(&self) {
        let from = self.done.load(Relaxed);
        crate::support::until("traffic goes on", async || self.done.load(Relaxed) >= from + 10)
            .await;
    }

    /// Ends it: no request failed, no watch ended, no event was lost.
    pub async fn end(self, cluster: &TestCluster) {
        self.over.store(true, Relaxed);
        let mut asked = 0;
        for reader in self.readers {
            let (count, slowest) = reader.await.expect("no request failed");
            println!("{count} requests, the slowest took {slowest:?}");
            asked += count;
        }
        assert!(asked > 0);
        let kind = &jackstay::demo::apiserver::kinds::CONFIG_MAPS;
        let map = crate::support::config_map("the-end", "1");
        cluster.state.create(kind, "default", map, false).unwrap();
        let events = crate::support::soon("the watch delivers", self.watch).await.unwrap();
        assert!(events as u64 <= cluster.state.version() - self.world_version);
    }
}

/// The addresses of the endpoints in `/status`, sorted; those that are a fallback with a mark.
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

/// Waits until the set is this one.
pub async fn set_is(proxy: &Proxy, expected: &[String]) {
    let mut expected = expected.to_vec();
    expected.sort();
    let what = format!("the set is {expected:?}");
    crate::support::until(&what, async || set(proxy).await == expected).await;
}

/// What the sources say in `/status`: that of one.
pub async fn source(proxy: &Proxy, name: &str) -> serde_json::Value {
    let status = proxy.status().await;
    let sources = status["upstreams"][0]["sources"].as_array().unwrap().clone();
    sources.into_iter().find(|s| s["source"] == name).unwrap_or_default()
}

/// Whether an event about a source tells this.
pub async fn told(proxy: &Proxy, source: &str, words: &str) -> bool {
    let page = proxy.page("/events").await;
    let body = page.split_once("\r\n\r\n").map_or("", |(_, body)| body);
    let events: serde_json::Value = serde_json::from_str(body).unwrap();
    events["events"].as_array().unwrap().iter().any(|event| {
        event["kind"] == "source"
            && event["name"] == source
            && event["reason"].as_str().unwrap().contains(words)
    })
}

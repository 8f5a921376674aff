//! The load of a node: reads, heartbeats and watches through the proxy. A ledger counts failures and
//! delays as a user would notice them.
//!
//! Reads start at fixed times, even if the previous one has not finished. Otherwise a slow
//! response would hide the delay of the next request (coordinated omission). A heartbeat follows from the response to the one
//! before. Events have numbers and are
//! written into the store directly, not through the proxy. The time from the write of an event until a
//! watch receives it is the silence of that watch.

use crate::demo::lock;
use crate::demo::scenario::ledger::{Counts, Ledger, Topic, WATCHES_PER_TOPIC};
use jackstay_apiserver::client::{Client, Credentials, Reply};
use jackstay_apiserver::cluster::Cluster;
use jackstay_apiserver::kinds::{CONFIG_MAPS, ObjectRef, PODS};
use jackstay_apiserver::{seed, timestamps};
use serde_json::Value;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::sync::watch;
use tokio::task::JoinSet;

/// Number of clients that read.
pub const READERS: usize = 4;
/// Number of clients that write heartbeats.
pub const WRITERS: usize = 2;
/// Interval between two reads, or two heartbeats, of one client.
const REQUEST_INTERVAL: Duration = Duration::from_millis(100);
/// Interval between two events of busy watches.
const BUSY_INTERVAL: Duration = Duration::from_millis(50);
/// Interval between two events of quiet watches.
const QUIET_INTERVAL: Duration = Duration::from_secs(2);
/// Interval of the stall detector. A check that is late by more than this counts as a stall.
const STALL_CHECK_INTERVAL: Duration = Duration::from_millis(20);
/// A request without a response after this time counts as failed.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(15);
/// How long [`Clients::finish`] waits for outstanding responses, and then for undelivered events.
const FINISH_TIMEOUT: Duration = Duration::from_secs(3);

/// Why a request failed whose response has not arrived then.
const NO_RESPONSE: &str = "no response before the end of the demo";

const PODS_PATH: &str = "/api/v1/namespaces/default/pods";
const CONFIG_MAPS_PATH: &str = "/api/v1/namespaces/default/configmaps";
const LEASES_PATH: &str = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases";

/// Running clients. Dropping them stops them.
pub struct Clients {
    /// Their counts.
    pub ledger: Arc<Ledger>,
    stop: watch::Sender<bool>,
    thread: Option<JoinHandle<()>>,
}

/// Shared by all clients.
#[derive(Clone)]
struct Shared {
    addr: SocketAddr,
    credentials: Credentials,
    ledger: Arc<Ledger>,
    stopped: watch::Receiver<bool>,
}

impl Clients {
    /// Starts the clients on a thread of their own; events are written into `cluster`.
    ///
    /// # Errors
    /// The thread or its runtime cannot be created.
    pub fn start(
        addr: SocketAddr,
        credentials: &Credentials,
        cluster: &Cluster,
    ) -> io::Result<Self> {
        let ledger = Arc::new(Ledger::new());
        let (stop, stopped) = watch::channel(false);
        let shared =
            Shared { addr, credentials: credentials.clone(), ledger: ledger.clone(), stopped };
        let cluster = cluster.clone();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let thread = std::thread::Builder::new()
            .name("clients".to_owned())
            .spawn(move || runtime.block_on(run_clients(shared, cluster)))?;
        Ok(Self { ledger, stop, thread: Some(thread) })
    }

    /// Stops the clients. Waits up to `FINISH_TIMEOUT` for outstanding responses, and up to `FINISH_TIMEOUT`
    /// for undelivered events. Later responses count as failed requests, later events as lost. Returns the
    /// counts of the current period.
    pub fn finish(mut self) -> Counts {
        self.end();
        let mut counts = self.ledger.counts();
        counts.lost += self.ledger.undelivered();
        counts
    }

    fn end(&mut self) {
        self.stop.send_replace(true);
        if let Some(thread) = self.thread.take() {
            // After a panic, which the thread has printed, missing events fail the demo.
            let _ = thread.join();
        }
    }
}

impl Drop for Clients {
    fn drop(&mut self) {
        self.end();
    }
}

async fn run_clients(shared: Shared, cluster: Cluster) {
    let mut watches = JoinSet::new();
    watches.spawn(detect_stalls(shared.ledger.clone()));
    for topic in 0..shared.ledger.topics.len() {
        for index in 0..WATCHES_PER_TOPIC {
            watches.spawn(run_watch(shared.clone(), topic, index));
        }
    }
    let mut requesters = JoinSet::new();
    for _ in 0..READERS {
        requesters.spawn(send_reads(shared.clone()));
    }
    for node in &seed::NODE_NAMES[..WRITERS] {
        requesters.spawn(send_heartbeats(shared.clone(), node));
    }
    // The first topic is the busy one.
    for (topic, interval) in [BUSY_INTERVAL, QUIET_INTERVAL].into_iter().enumerate() {
        requesters.spawn(write_events(shared.clone(), cluster.clone(), topic, interval));
    }
    requesters.join_all().await;
    let stopped_at = Instant::now();
    while shared.ledger.undelivered() > 0 && stopped_at.elapsed() < FINISH_TIMEOUT {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Measures how long this machine delays the clients' thread.
async fn detect_stalls(ledger: Arc<Ledger>) {
    loop {
        let start = Instant::now();
        tokio::time::sleep(STALL_CHECK_INTERVAL).await;
        let delay = start.elapsed().saturating_sub(STALL_CHECK_INTERVAL);
        if delay > STALL_CHECK_INTERVAL {
            ledger.update(|counts| counts.stalled += delay);
        }
    }
}

/// Writes the events of a topic.
async fn write_events(mut shared: Shared, cluster: Cluster, topic: usize, interval: Duration) {
    let topic = &shared.ledger.topics[topic];
    let mut ticks = tokio::time::interval(interval);
    ticks.tick().await;
    while unless_stopped(&mut shared.stopped, ticks.tick()).await.is_some() {
        let number = {
            let mut written = lock(&topic.written);
            written.push(Instant::now());
            written.len() - 1
        };
        let write = |kind, name: &str, path: &[&str]| {
            let object = ObjectRef { kind, namespace: "default", name };
            let result = cluster.modify(object, false, |current| {
                let mut next = current.clone();
                let field = path.iter().fold(&mut next, |value, key| &mut value[*key]);
                *field = number.to_string().into();
                Ok(next)
            });
            if let Err(error) = result {
                shared.ledger.update(|counts| counts.fail("event", &error.message));
            }
        };
        write(&CONFIG_MAPS, topic.name, &["data", "n"]);
        if interval == QUIET_INTERVAL {
            // Users who run `kubectl get pods -w` see this change.
            write(&PODS, seed::POD, &["metadata", "annotations", "demo/n"]);
        }
    }
}

/// Sends a read every `REQUEST_INTERVAL`.
async fn send_reads(mut shared: Shared) {
    let mut client: Option<Arc<Client>> = None;
    let mut reads = JoinSet::new();
    let mut ticks = start_ticks().await;
    while unless_stopped(&mut shared.stopped, ticks.tick()).await.is_some() {
        let start = Instant::now();
        match connected(&mut client, &shared).await {
            Ok(client) => {
                let ledger = shared.ledger.clone();
                reads.spawn(async move {
                    let result = ended(client.get(PODS_PATH)).await.map(drop);
                    ledger.add_read(start.elapsed(), result);
                });
            }
            Err(error) => shared.ledger.add_read(start.elapsed(), Err(error.to_string())),
        }
        while reads.try_join_next().is_some() {}
    }
    let finished = async { while reads.join_next().await.is_some() {} };
    if tokio::time::timeout(FINISH_TIMEOUT, finished).await.is_err() {
        for _ in 0..reads.len() {
            shared.ledger.add_read(FINISH_TIMEOUT, Err(NO_RESPONSE.to_owned()));
        }
    }
}

/// Renews the lease of a node every `REQUEST_INTERVAL`, from the response to the renewal before, as kubelet does every
/// 10 s.
async fn send_heartbeats(mut shared: Shared, node: &'static str) {
    let mut client: Option<Arc<Client>> = None;
    let mut lease = None;
    let path = format!("{LEASES_PATH}/{node}");
    let mut ticks = start_ticks().await;
    while unless_stopped(&mut shared.stopped, ticks.tick()).await.is_some() {
        let start = Instant::now();
        let renewal = async {
            let client =
                connected(&mut client, &shared).await.map_err(|error| error.to_string())?;
            let mut renewed: Value = match lease.take() {
                Some(lease) => lease,
                None => ended(client.get(&path)).await?,
            };
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            let now = timestamps::rfc3339_micros(now.as_secs(), now.subsec_nanos());
            renewed["spec"]["renewTime"] = now.into();
            ended(client.put(&path, &renewed)).await
        };
        let mut stopped = shared.stopped.clone();
        let finishing = async {
            let _ = stopped.wait_for(|stopped| *stopped).await;
            tokio::time::sleep(FINISH_TIMEOUT).await;
        };
        let result = tokio::select! {
            result = renewal => result,
            () = finishing => Err(NO_RESPONSE.to_owned()),
        };
        let result = result.map(|renewed| lease = Some(renewed));
        shared.ledger.add_write(start.elapsed(), result);
    }
}

/// The clients start at different times, so that their requests spread over the interval.
async fn start_ticks() -> tokio::time::Interval {
    tokio::time::sleep(REQUEST_INTERVAL.mul_f64(fastrand::f64())).await;
    tokio::time::interval(REQUEST_INTERVAL)
}

/// The connection of a client, which is opened again after it was closed.
async fn connected(client: &mut Option<Arc<Client>>, shared: &Shared) -> io::Result<Arc<Client>> {
    let open = client.take().filter(|client| !client.is_closed());
    let connected = match open {
        Some(client) => client,
        None => Client::connect(shared.addr, &shared.credentials).await.map(Arc::new)?,
    };
    Ok(client.insert(connected).clone())
}

/// The object of a response, or why there is none.
async fn ended(response: impl Future<Output = io::Result<Reply>>) -> Result<Value, String> {
    match tokio::time::timeout(REQUEST_TIMEOUT, response).await {
        Ok(Ok(reply)) if reply.status.is_success() => Ok(reply.json()),
        Ok(Ok(reply)) => {
            let message = reply.json()["message"].as_str().unwrap_or_default().to_owned();
            Err(format!("{} {message}", reply.status.as_u16()))
        }
        Ok(Err(error)) => Err(error.to_string()),
        Err(_) => Err(format!("no response in {} s", REQUEST_TIMEOUT.as_secs())),
    }
}

/// Keeps a watch running, as a reflector does: lists once, then watches from the last version.
async fn run_watch(mut shared: Shared, topic: usize, index: usize) {
    let ledger = shared.ledger.clone();
    let topic = &ledger.topics[topic];
    let mut version = String::new();
    while !*shared.stopped.borrow() {
        if let Err(error) = watch_once(&mut shared, topic, index, &mut version).await {
            ledger.update(|counts| {
                counts.broken += 1;
                counts.fail("watch", &error);
            });
            tokio::time::sleep(REQUEST_INTERVAL).await;
        }
    }
}

/// Runs one watch until it ends. `version` is where this watch starts, and afterwards where the next one
/// starts.
async fn watch_once(
    shared: &mut Shared,
    topic: &Topic,
    index: usize,
    version: &mut String,
) -> io::Result<()> {
    let client = Client::connect(shared.addr, &shared.credentials).await?;
    let selector = format!("labelSelector=demo%3D{}", topic.name);
    if version.is_empty() {
        let list = client.get(&format!("{CONFIG_MAPS_PATH}?{selector}")).await?.json();
        text(&list["metadata"]["resourceVersion"]).clone_into(version);
        topic.received[index].store(number(&list["items"][0]), Relaxed);
    }
    let path = format!(
        "{CONFIG_MAPS_PATH}?watch=1&allowWatchBookmarks=true&resourceVersion={version}&{selector}"
    );
    let mut watch = client.watch(&path).await?;
    // Does not end when the clients are stopped, so that late events still count.
    while let Some(event) = watch.next().await? {
        let object = &event["object"];
        match text(&event["type"]) {
            "ERROR" => {
                version.clear();
                return Err(io::Error::other(text(&object["message"]).to_owned()));
            }
            "BOOKMARK" => {}
            _ => shared.ledger.add_event(topic, index, number(object)),
        }
        text(&object["metadata"]["resourceVersion"]).clone_into(version);
    }
    shared.ledger.update(|counts| counts.ended += 1);
    Ok(())
}

/// The output of `future`, or `None` when the clients are stopped first.
async fn unless_stopped<T>(
    stopped: &mut watch::Receiver<bool>,
    future: impl Future<Output = T>,
) -> Option<T> {
    tokio::select! {
        biased;
        _ = stopped.wait_for(|stopped| *stopped) => None,
        output = future => Some(output),
    }
}

fn number(object: &Value) -> u64 {
    text(&object["data"]["n"]).parse().unwrap_or_default()
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

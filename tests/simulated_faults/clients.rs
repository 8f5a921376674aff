//! The clients of the simulation, over real sockets: readers, writers, informers and holders of leases.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use http::Method;
use jackstay_apiserver::client::{Client, Credentials, Reply};
use jackstay_sim::apiserver::Resource;
use jackstay_sim::scenario::Role;
use jackstay_sim::world::{CONFIG_MAPS, PODS};
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use tokio::time::{MissedTickBehavior, interval_at, timeout};

use crate::support::pause;
use crate::timeline::{Entry, Kind, Timeline};

/// Time limit of a request of a reader or a writer.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);
/// Time limit of an attempt to renew a lease.
const LEASE_TIMEOUT: Duration = Duration::from_secs(10);
/// Attempts of kubelet at one renewal.
const LEASE_ATTEMPTS: u32 = 5;
/// The first pause of an informer after a failure; later ones are twice as long.
const INFORMER_PAUSE: Duration = Duration::from_millis(800);
const MAX_INFORMER_PAUSE: Duration = Duration::from_secs(30);
const JSON: [(&str, &str); 1] = [("content-type", "application/json")];

/// What the clients of a run have seen.
pub struct Ledger {
    started: Instant,
    seen: Mutex<Seen>,
}

#[derive(Default)]
struct Seen {
    timeline: Timeline,
    /// When each version was written, as a watch without jackstay and without faults has seen it.
    written: BTreeMap<u64, Instant>,
    /// When an informer has received each version.
    delivered: Vec<(u64, Instant)>,
    longest_pause: Duration,
}

impl Ledger {
    pub fn new(started: Instant) -> Arc<Self> {
        Arc::new(Self { started, seen: Mutex::default() })
    }

    /// Time since the start of the run.
    pub fn now(&self) -> Duration {
        self.started.elapsed()
    }

    pub fn record(&self, entry: Entry) {
        let at = self.now();
        self.seen.lock().unwrap().timeline.push((at, entry));
    }

    /// Everything that was recorded, and the delay of every event.
    pub fn timeline(&self) -> Timeline {
        let seen = self.seen.lock().unwrap();
        let mut timeline = seen.timeline.clone();
        for (version, at) in &seen.delivered {
            // The watch without jackstay may be a bit later.
            let written = seen.written.get(version).copied().unwrap_or(*at);
            let after = at.saturating_duration_since(written);
            timeline.push((at.saturating_duration_since(self.started), Entry::Delivered { after }));
        }
        timeline
    }

    /// The longest time of a read without jackstay and without faults.
    pub fn longest_pause(&self) -> Duration {
        self.seen.lock().unwrap().longest_pause
    }

    fn ended(&self, kind: Kind, took: Duration, ok: bool) {
        self.record(Entry::Ended { kind, took, ok });
    }
}

/// Tasks that end when this is dropped.
pub struct Tasks(Vec<JoinHandle<()>>);

impl Drop for Tasks {
    fn drop(&mut self) {
        self.0.iter().for_each(JoinHandle::abort);
    }
}

impl Tasks {
    pub fn new() -> Self {
        Self(Vec::new())
    }

    pub fn spawn(&mut self, task: impl Future<Output = ()> + Send + 'static) {
        self.0.push(tokio::spawn(task));
    }
}

/// Connects a client of each role, and lets them work.
pub async fn start(
    tasks: &mut Tasks,
    roles: &[Role],
    jackstay: SocketAddr,
    credentials: &Credentials,
    ledger: &Arc<Ledger>,
) {
    for (number, &role) in roles.iter().enumerate() {
        let client = Arc::new(Client::connect(jackstay, credentials).await.unwrap());
        let ledger = Arc::clone(ledger);
        match role {
            Role::Readers => tasks.spawn(read(client, ledger)),
            Role::Writers => tasks.spawn(write(client, number, ledger)),
            Role::Informers => {
                let is_quiet = number.is_multiple_of(4);
                let resource = if is_quiet { Resource::Pods } else { Resource::ConfigMaps };
                tasks.spawn(inform(client, resource, ledger));
            }
            Role::Kubelets => {
                tasks.spawn(renew(client, number, Duration::from_secs(10), true, ledger));
            }
            Role::Leaders => {
                tasks.spawn(renew(client, number, Duration::from_secs(2), false, ledger));
            }
            Role::Bulk | Role::Hostile => panic!("no scenario has this client"),
        }
    }
}

/// Records when each version is written, by a watch of a server that has no fault.
pub async fn record_writes(client: Client, version: u64, ledger: Arc<Ledger>) {
    let path = format!("{}?watch=1&resourceVersion={version}", Resource::ConfigMaps.path());
    let mut watch = client.watch(&path).await.unwrap();
    while let Ok(Some(event)) = watch.next().await {
        let at = Instant::now();
        if let Some(version) = version_of(&event["object"]) {
            ledger.seen.lock().unwrap().written.insert(version, at);
        }
    }
}

/// Reads from a server that has no fault, without jackstay: the longest time is that of a pause of the machine.
pub async fn record_pauses(client: Client, ledger: Arc<Ledger>) {
    loop {
        pause(Duration::from_millis(20)).await;
        let sent = Instant::now();
        client.get(&Resource::Pods.object(0)).await.unwrap();
        let mut seen = ledger.seen.lock().unwrap();
        seen.longest_pause = seen.longest_pause.max(sent.elapsed());
    }
}

fn version_of(object: &Value) -> Option<u64> {
    object["metadata"]["resourceVersion"].as_str()?.parse().ok()
}

/// Calls `act` at an interval, whatever the earlier calls do. The first call is at a random time within the interval.
async fn at_interval(every: Duration, mut act: impl FnMut(u32)) {
    let first = every.mul_f64(fastrand::f64());
    let mut ticks = interval_at(tokio::time::Instant::now() + first, every);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    for number in 1.. {
        ticks.tick().await;
        act(number);
    }
}

async fn read(client: Arc<Client>, ledger: Arc<Ledger>) {
    at_interval(Duration::from_millis(100), |number| {
        let path = if number.is_multiple_of(8) {
            format!("{}?resourceVersion=0", Resource::ConfigMaps.path())
        } else {
            Resource::Pods.object(fastrand::u32(0..PODS))
        };
        let (client, ledger) = (Arc::clone(&client), Arc::clone(&ledger));
        tokio::spawn(async move {
            let sent = Instant::now();
            let reply = timeout(REQUEST_TIMEOUT, client.get(&path)).await;
            let ok = matches!(reply, Ok(Ok(Reply { status, .. })) if status == 200);
            ledger.ended(Kind::Read, sent.elapsed(), ok);
        });
    })
    .await;
}

async fn write(client: Arc<Client>, number: usize, ledger: Arc<Ledger>) {
    let own = CONFIG_MAPS + number as u32;
    at_interval(Duration::from_millis(200), |count| {
        let (method, key) = match count % 16 {
            0 => (Method::DELETE, own),
            8 => (Method::POST, own),
            _ => (Method::PUT, fastrand::u32(0..CONFIG_MAPS)),
        };
        let object = object(key, &format!("{number}-{count}"));
        let (client, ledger) = (Arc::clone(&client), Arc::clone(&ledger));
        tokio::spawn(async move {
            let sent = Instant::now();
            let (path, body) = match method {
                Method::POST => (Resource::ConfigMaps.path().to_owned(), object.to_string()),
                Method::DELETE => (Resource::ConfigMaps.object(key), String::new()),
                _ => (Resource::ConfigMaps.object(key), object.to_string()),
            };
            let reply = timeout(REQUEST_TIMEOUT, client.request(method, &path, &JSON, body)).await;
            let status = reply.ok().and_then(Result::ok).map(|reply| reply.status.as_u16());
            ledger.ended(
                Kind::Write,
                sent.elapsed(),
                matches!(status, Some(200 | 201 | 404 | 409)),
            );
        });
    })
    .await;
}

/// An object whose size is about that of an object of the simulation.
pub fn object(key: u32, value: &str) -> Value {
    json!({
        "metadata": { "name": format!("o{key}"), "namespace": "default" },
        "data": { "value": value, "padding": "x".repeat(1_000) },
    })
}

/// A reflector: lists, watches from there, and lists again after 410 or a reset.
async fn inform(client: Arc<Client>, resource: Resource, ledger: Arc<Ledger>) {
    let (mut version, mut listed, mut must_list, mut failures) = (0, false, true, 0_u32);
    pause(Duration::from_millis(500).mul_f64(fastrand::f64())).await;
    loop {
        if must_list {
            if listed {
                ledger.record(Entry::Relist);
            }
            let path = format!("{}?resourceVersion={version}", resource.path());
            let list = client.get(&path).await.ok().filter(|reply| reply.status == 200);
            if let Some(newest) = list.and_then(|reply| version_of(&reply.json())) {
                (version, listed, must_list, failures) = (newest, true, false, 0);
            }
        }
        if !must_list {
            let before = version;
            must_list = follow(&client, resource, &mut version, &ledger).await;
            failures = if version > before { 0 } else { failures };
        }
        if must_list {
            let wait = INFORMER_PAUSE.saturating_mul(1 << failures.min(10)).min(MAX_INFORMER_PAUSE);
            failures += 1;
            pause(wait.mul_f64(1.0 + fastrand::f64())).await;
        }
    }
}

/// Reads a watch to its end. Returns whether the informer must list again.
async fn follow(client: &Client, resource: Resource, version: &mut u64, ledger: &Ledger) -> bool {
    let path = format!(
        "{}?watch=true&allowWatchBookmarks=true&resourceVersion={version}&timeoutSeconds=450",
        resource.path()
    );
    let Ok(mut watch) = client.watch(&path).await else { return true };
    loop {
        let event = match watch.next().await {
            Ok(Some(event)) => event,
            Ok(None) => return false,
            Err(_) => {
                ledger.record(Entry::WatchBroken);
                return true;
            }
        };
        let at = Instant::now();
        let Some(newest) = version_of(&event["object"]) else { return true };
        *version = newest;
        if event["type"] != "BOOKMARK" {
            ledger.seen.lock().unwrap().delivered.push((newest, at));
        }
    }
}

/// Renews a lease at an interval; kubelet repeats a failed update at once.
async fn renew(
    client: Arc<Client>,
    number: usize,
    every: Duration,
    repeats: bool,
    ledger: Arc<Ledger>,
) {
    let lease = json!({
        "metadata": { "name": format!("o{number}"), "namespace": "kube-node-lease" },
        "spec": { "holderIdentity": format!("o{number}"), "leaseDurationSeconds": 40 },
    });
    let path = Resource::Leases.object(number as u32);
    let mut exists = false;
    pause(Duration::from_secs(1).mul_f64(fastrand::f64())).await;
    loop {
        let started = Instant::now();
        for _ in 0..if repeats { LEASE_ATTEMPTS } else { 1 } {
            let update = async {
                if exists {
                    client.put(&path, &lease).await
                } else {
                    client.post(Resource::Leases.path(), &lease).await
                }
            };
            let reply = timeout(LEASE_TIMEOUT, update).await.ok().and_then(Result::ok);
            if reply.is_some_and(|reply| reply.status.is_success()) {
                exists = true;
                ledger.record(Entry::Renewed { client: number });
                break;
            }
        }
        let jitter = 1.0 + 0.04 * fastrand::f64();
        pause(every.mul_f64(jitter).saturating_sub(started.elapsed())).await;
    }
}

//! Clients that behave as Go's do: after a GOAWAY they open a new connection, and send a request
//! that was not processed there. Every other failure is recorded.

use crate::setup::Setup;
use crate::support::child::PROCESS_TIMEOUT;
use crate::support::wait;
use crate::support::{CONFIGMAPS, config_map, h2_error};
use jackstay::demo::apiserver::cluster::Cluster;
use jackstay::demo::apiserver::kinds;
use jackstay::demo::client::{Client, Credentials, Reply, Watch};
use serde_json::Value;
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::task::JoinHandle;
use tokio::time::{MissedTickBehavior, interval, timeout};

/// The numbers of clients that read and that write.
const READERS: usize = 6;
const WRITERS: usize = 2;
/// The number of watches, two per connection.
const WATCHES: usize = 6;
/// The interval of requests, and of objects that watches see.
const INTERVAL: Duration = Duration::from_millis(25);

#[derive(Default)]
struct Results {
    failures: Mutex<Vec<String>>,
    requests: AtomicUsize,
    connections: AtomicUsize,
    watches: AtomicUsize,
    stop: AtomicBool,
    /// Versions that watches must see, in this order.
    written: Mutex<Vec<u64>>,
}

impl Results {
    fn failed(&self, what: &str, why: impl fmt::Display) {
        self.failures.lock().unwrap().push(format!("{what}: {why}"));
    }
}

/// The amount of load.
pub struct Report {
    requests: usize,
    connections: usize,
    watches: usize,
    events: usize,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { requests, connections, watches, events } = self;
        write!(
            f,
            "{requests} requests on {connections} connections, {WATCHES} watches started {watches} \
             times for {events} events; none failed, broke, was lost or came twice"
        )
    }
}

pub struct Load {
    results: Arc<Results>,
    /// The versions that each watch has seen.
    versions: Vec<Arc<Mutex<Vec<u64>>>>,
    requests: Vec<JoinHandle<()>>,
    watches: Vec<JoinHandle<()>>,
}

/// A client with one connection at a time.
struct Session {
    address: SocketAddr,
    who: Credentials,
    client: tokio::sync::Mutex<Option<Arc<Client>>>,
    results: Arc<Results>,
}

impl Session {
    fn new(setup: &Setup, results: &Arc<Results>) -> Arc<Self> {
        Arc::new(Self {
            address: setup.address,
            who: setup.cluster.certs.credentials(),
            client: tokio::sync::Mutex::default(),
            results: Arc::clone(results),
        })
    }

    async fn client(&self) -> io::Result<Arc<Client>> {
        let mut slot = self.client.lock().await;
        if let Some(client) = slot.as_ref().filter(|client| !client.is_closed()) {
            return Ok(Arc::clone(client));
        }
        let client = Arc::new(Client::connect(self.address, &self.who).await?);
        self.results.connections.fetch_add(1, Relaxed);
        *slot = Some(Arc::clone(&client));
        Ok(client)
    }

    /// Stops using a connection that accepts no more requests; running requests continue on it.
    async fn leave(&self, client: &Arc<Client>) {
        let mut slot = self.client.lock().await;
        if slot.as_ref().is_some_and(|now| Arc::ptr_eq(now, client)) {
            *slot = None;
        }
    }

    /// Reads an object, or writes it.
    async fn request(&self, path: &str, object: Option<&Value>) -> io::Result<Reply> {
        loop {
            let client = self.client().await?;
            let answer = match object {
                Some(object) => client.put(path, object).await,
                None => client.get(path).await,
            };
            match answer {
                Err(error) if was_not_processed(&error) => self.leave(&client).await,
                answer => return answer,
            }
        }
    }

    /// Starts a watch. Returns the connection too, which must outlive the watch.
    async fn watch(&self, path: &str) -> io::Result<(Watch, Arc<Client>)> {
        loop {
            let client = self.client().await?;
            match client.watch(path).await {
                Err(error) if was_not_processed(&error) => self.leave(&client).await,
                watch => return watch.map(|watch| (watch, client)),
            }
        }
    }
}

/// Whether the server has not processed the request (RFC 9113, section 6.8), or it was never sent.
fn was_not_processed(error: &io::Error) -> bool {
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref::<hyper::Error>());
    inner.is_some_and(|error| error.is_canceled() || error.is_closed())
        || h2_error(error).is_some_and(|error| {
            error.is_remote() && error.is_go_away() && error.reason() == Some(h2::Reason::NO_ERROR)
        })
}

impl Load {
    pub async fn start(setup: &Setup) -> Self {
        let results = Arc::<Results>::default();
        let cluster = setup.cluster.state.clone();
        let from = cluster.version();
        let mut versions = Vec::new();
        let mut watches = Vec::new();
        let mut session = Session::new(setup, &results);
        for number in 0..WATCHES {
            if number % 2 == 0 {
                session = Session::new(setup, &results);
            }
            let into = Arc::<Mutex<Vec<u64>>>::default();
            versions.push(Arc::clone(&into));
            watches.push(tokio::spawn(watch(Arc::clone(&session), from, into)));
        }
        let mut requests = vec![tokio::spawn(write(cluster.clone(), Arc::clone(&results)))];
        for number in 0..READERS + WRITERS {
            let name = format!("t{number}");
            let mut object = config_map(&name, "0");
            object["metadata"]["namespace"] = "kube-system".into();
            // It exists if there was load before.
            let _ = cluster.create(&kinds::CONFIG_MAPS, "kube-system", object, false);
            let session = Session::new(setup, &results);
            requests.push(tokio::spawn(request(session, name, number < WRITERS)));
        }
        let load = Self { results, versions, requests, watches };
        load.wait_progress().await;
        load
    }

    /// Waits until all clients have made progress, and expects no failure so far.
    pub async fn wait_progress(&self) {
        let requests = self.results.requests.load(Relaxed) + 50;
        let written = self.results.written.lock().unwrap().len() + 5;
        wait::until_within(PROCESS_TIMEOUT, "the load continues", async || {
            assert_eq!(*self.results.failures.lock().unwrap(), [""; 0]);
            let all_seen =
                self.versions.iter().all(|results| results.lock().unwrap().len() >= written);
            self.results.requests.load(Relaxed) >= requests && all_seen
        })
        .await;
    }

    /// Stops the load. Expects no failure, and that every watch has seen every event once and in
    /// order.
    pub async fn end(mut self) -> Report {
        self.results.stop.store(true, Relaxed);
        for task in std::mem::take(&mut self.requests) {
            timeout(PROCESS_TIMEOUT, task).await.expect("requests end").unwrap();
        }
        let written = self.results.written.lock().unwrap().clone();
        for (number, versions) in self.versions.iter().enumerate() {
            let what = format!("watch {number} has results everything");
            wait::until_within(PROCESS_TIMEOUT, &what, async || {
                assert_eq!(*self.results.failures.lock().unwrap(), [""; 0]);
                versions.lock().unwrap().len() >= written.len()
            })
            .await;
            assert_eq!(*versions.lock().unwrap(), written, "watch {number}");
        }
        assert_eq!(*self.results.failures.lock().unwrap(), [""; 0]);
        Report {
            requests: self.results.requests.load(Relaxed),
            connections: self.results.connections.load(Relaxed),
            watches: self.results.watches.load(Relaxed),
            events: written.len(),
        }
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.requests.iter().chain(&self.watches).for_each(JoinHandle::abort);
    }
}

fn new_ticks() -> tokio::time::Interval {
    let mut ticks = interval(INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks
}

/// Creates objects that watches see.
async fn write(cluster: Cluster, results: Arc<Results>) {
    let mut ticks = new_ticks();
    while !results.stop.load(Relaxed) {
        ticks.tick().await;
        let made = cluster.create(
            &kinds::CONFIG_MAPS,
            "default",
            config_map(&format!("m{}", cluster.version()), "1"),
            false,
        );
        results.written.lock().unwrap().push(made.unwrap().version);
    }
}

/// Reads or writes at a steady rate.
async fn request(session: Arc<Session>, name: String, writes: bool) {
    let path = format!("/api/v1/namespaces/kube-system/configmaps/{name}");
    let results = Arc::clone(&session.results);
    let mut ticks = new_ticks();
    for number in 0_u64.. {
        ticks.tick().await;
        if results.stop.load(Relaxed) {
            return;
        }
        let mut object = config_map(&name, &number.to_string());
        object["metadata"]["namespace"] = "kube-system".into();
        match session.request(&path, writes.then_some(&object)).await {
            Ok(reply) if reply.status.is_success() => drop(results.requests.fetch_add(1, Relaxed)),
            Ok(reply) => {
                let why = String::from_utf8_lossy(&reply.body).into_owned();
                results.failed("request", format!("{}: {why}", reply.status));
            }
            Err(error) => results.failed("request", format!("{error}: {:?}", error.get_ref())),
        }
    }
}

/// Watches as a reflector does: it continues after a clean end at the last version. What would make
/// a reflector list is a failure.
async fn watch(session: Arc<Session>, mut from: u64, into: Arc<Mutex<Vec<u64>>>) {
    let results = Arc::clone(&session.results);
    loop {
        let path = format!("{CONFIGMAPS}?watch=1&resourceVersion={from}");
        let (mut watch, _connection) = match session.watch(&path).await {
            Ok(started) => started,
            Err(error) => return results.failed("a watch cannot start", error),
        };
        results.watches.fetch_add(1, Relaxed);
        loop {
            match watch.next().await {
                Ok(Some(event)) if event["type"] == "ADDED" => {
                    let version = &event["object"]["metadata"]["resourceVersion"];
                    from = version.as_str().unwrap().parse().unwrap();
                    into.lock().unwrap().push(from);
                }
                Ok(Some(event)) => return results.failed("a watch", event),
                Ok(None) => break,
                Err(error) => return results.failed("a watch broke", error),
            }
        }
    }
}

//! Clients that behave like Go's HTTP/2 client: after a GOAWAY they open a new connection, and repeat requests
//! that the server has not processed. Every other failure is recorded.

use super::setup::Setup;
use crate::support::child::PROCESS_TIMEOUT;
use crate::support::wait;
use crate::support::{CONFIGMAPS, config_map, h2_error};
use jackstay_apiserver::client::{Client, Credentials, Reply, Watch};
use jackstay_apiserver::cluster::Cluster;
use jackstay_apiserver::kinds;
use serde_json::Value;
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::task::JoinHandle;
use tokio::time::{MissedTickBehavior, interval, timeout};

/// Number of clients that read.
const READERS: usize = 6;
/// Number of clients that write.
const WRITERS: usize = 2;
/// Number of watches, two per connection.
const WATCHES: usize = 6;
/// Interval of the requests of a client, and of the events of the watches.
const INTERVAL: Duration = Duration::from_millis(25);

#[derive(Default)]
pub struct Results {
    failures: Mutex<Vec<String>>,
    requests: AtomicUsize,
    connections: AtomicUsize,
    watches: AtomicUsize,
    stop: AtomicBool,
    /// The versions of the created objects, which every watch must deliver in this order.
    created: Mutex<Vec<u64>>,
}

impl Results {
    fn record_failure(&self, operation: &str, reason: impl fmt::Display) {
        self.failures.lock().unwrap().push(format!("{operation}: {reason}"));
    }

    fn expect_no_failure(&self) {
        assert_eq!(*self.failures.lock().unwrap(), [""; 0]);
    }
}

/// The amount of a load that ended without a failure.
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
             times for {events} events; no request failed, and every watch delivered every event once"
        )
    }
}

pub struct Load {
    results: Arc<Results>,
    /// The versions that each watch has delivered.
    delivered: Vec<Arc<Mutex<Vec<u64>>>>,
    requests: Vec<JoinHandle<()>>,
    watches: Vec<JoinHandle<()>>,
}

/// A client with one connection at a time.
pub struct ReconnectingClient {
    address: SocketAddr,
    credentials: Credentials,
    connection: tokio::sync::Mutex<Option<Arc<Client>>>,
    results: Arc<Results>,
}

/// The state of the connection, for a request without an answer.
impl fmt::Display for ReconnectingClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.connection.try_lock() {
            Ok(current) if current.as_ref().is_none_or(|client| client.is_closed()) => "closed",
            Ok(_) => "connected",
            Err(_) => "connecting",
        })
    }
}

impl ReconnectingClient {
    pub fn new(setup: &Setup, results: &Arc<Results>) -> Arc<Self> {
        Arc::new(Self {
            address: setup.address,
            credentials: setup.cluster.certs.credentials(),
            connection: tokio::sync::Mutex::default(),
            results: Arc::clone(results),
        })
    }

    /// The current connection, or a new one.
    async fn connection(&self) -> io::Result<Arc<Client>> {
        let mut current = self.connection.lock().await;
        if let Some(connection) = current.as_ref().filter(|connection| !connection.is_closed()) {
            return Ok(Arc::clone(connection));
        }
        let connection = Arc::new(Client::connect(self.address, &self.credentials).await?);
        self.results.connections.fetch_add(1, Relaxed);
        *current = Some(Arc::clone(&connection));
        Ok(connection)
    }

    /// Stops using a connection that accepts no more requests. Requests that run on it continue.
    async fn discard(&self, connection: &Arc<Client>) {
        let mut current = self.connection.lock().await;
        current.take_if(|current| Arc::ptr_eq(current, connection));
    }

    /// Writes this object, or reads without one.
    pub async fn request(&self, path: &str, object: Option<&Value>) -> io::Result<Reply> {
        loop {
            let connection = self.connection().await?;
            let result = match object {
                Some(object) => connection.put(path, object).await,
                None => connection.get(path).await,
            };
            match result {
                Err(error) if was_not_processed(&error) => self.discard(&connection).await,
                result => return result,
            }
        }
    }

    /// Starts a watch. Returns the connection too, which must outlive the watch.
    async fn watch(&self, path: &str) -> io::Result<(Watch, Arc<Client>)> {
        loop {
            let connection = self.connection().await?;
            match connection.watch(path).await {
                Err(error) if was_not_processed(&error) => self.discard(&connection).await,
                result => return result.map(|watch| (watch, connection)),
            }
        }
    }
}

/// Whether the server has not processed the request (RFC 9113, section 6.8), or it was never sent.
pub fn was_not_processed(error: &io::Error) -> bool {
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref::<hyper::Error>());
    error.kind() == io::ErrorKind::NotConnected
        || inner.is_some_and(|error| error.is_canceled() || error.is_closed())
        || h2_error(error).is_some_and(|error| {
            error.is_remote() && error.is_go_away() && error.reason() == Some(h2::Reason::NO_ERROR)
        })
}

impl Load {
    pub async fn start(setup: &Setup) -> Self {
        let results = Arc::<Results>::default();
        let cluster = setup.cluster.state.clone();
        let from = cluster.version();
        let mut delivered = Vec::new();
        let mut watches = Vec::new();
        for _ in 0..WATCHES / 2 {
            let client = ReconnectingClient::new(setup, &results);
            for _ in 0..2 {
                let versions = Arc::<Mutex<Vec<u64>>>::default();
                delivered.push(Arc::clone(&versions));
                watches.push(tokio::spawn(watch(Arc::clone(&client), from, versions)));
            }
        }
        let mut requests =
            vec![tokio::spawn(create_objects(cluster.clone(), Arc::clone(&results)))];
        for number in 0..READERS + WRITERS {
            let name = format!("t{number}");
            // Fails if an earlier load has created the object.
            let _ = cluster.create(&kinds::CONFIG_MAPS, NAMESPACE, object(&name, 0), false);
            let client = ReconnectingClient::new(setup, &results);
            requests.push(tokio::spawn(send_requests(client, name, number < WRITERS)));
        }
        let load = Self { results, delivered, requests, watches };
        load.wait_progress().await;
        load
    }

    /// Waits until every client has made progress, and expects no failure so far.
    pub async fn wait_progress(&self) {
        let requests = self.results.requests.load(Relaxed) + 50;
        let events = self.results.created.lock().unwrap().len() + 5;
        wait::until_within(PROCESS_TIMEOUT, "the load continues", async || {
            self.results.expect_no_failure();
            self.results.requests.load(Relaxed) >= requests
                && self.delivered.iter().all(|versions| versions.lock().unwrap().len() >= events)
        })
        .await;
    }

    /// Stops the load. Expects no failure, and that every watch has delivered every event once and in order.
    pub async fn end(mut self) -> Report {
        self.results.stop.store(true, Relaxed);
        for task in std::mem::take(&mut self.requests) {
            timeout(PROCESS_TIMEOUT, task).await.expect("requests end").unwrap();
        }
        let created = self.results.created.lock().unwrap().clone();
        for (number, versions) in self.delivered.iter().enumerate() {
            let condition = format!("watch {number} has delivered every event");
            wait::until_within(PROCESS_TIMEOUT, &condition, async || {
                self.results.expect_no_failure();
                versions.lock().unwrap().len() >= created.len()
            })
            .await;
            assert_eq!(*versions.lock().unwrap(), created, "watch {number}");
        }
        self.results.expect_no_failure();
        Report {
            requests: self.results.requests.load(Relaxed),
            connections: self.results.connections.load(Relaxed),
            watches: self.results.watches.load(Relaxed),
            events: created.len(),
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

/// The namespace of the objects that the clients read and write. The watches are in another one.
const NAMESPACE: &str = "kube-system";

/// An object that the clients read and write.
fn object(name: &str, value: u64) -> Value {
    let mut object = config_map(name, &value.to_string());
    object["metadata"]["namespace"] = NAMESPACE.into();
    object
}

/// Creates the objects that the watches deliver.
async fn create_objects(cluster: Cluster, results: Arc<Results>) {
    let mut ticks = new_ticks();
    while !results.stop.load(Relaxed) {
        ticks.tick().await;
        let object = config_map(&format!("m{}", cluster.version()), "1");
        let created = cluster.create(&kinds::CONFIG_MAPS, "default", object, false).unwrap();
        results.created.lock().unwrap().push(created.version);
    }
}

/// Reads or writes an object at a steady rate.
async fn send_requests(client: Arc<ReconnectingClient>, name: String, writes: bool) {
    let path = format!("/api/v1/namespaces/{NAMESPACE}/configmaps/{name}");
    let results = Arc::clone(&client.results);
    let mut ticks = new_ticks();
    for number in 0.. {
        ticks.tick().await;
        if results.stop.load(Relaxed) {
            return;
        }
        let object = writes.then(|| object(&name, number));
        match client.request(&path, object.as_ref()).await {
            Ok(reply) if reply.status.is_success() => {
                results.requests.fetch_add(1, Relaxed);
            }
            Ok(reply) => {
                let body = String::from_utf8_lossy(&reply.body);
                results.record_failure("request", format_args!("{}: {body}", reply.status));
            }
            Err(error) => {
                let source = error.get_ref();
                results.record_failure("request", format_args!("{error}: {source:?}"));
            }
        }
    }
}

/// Watches as a reflector does: after a clean end it continues at the last version. Any other end, after which
/// a reflector would list, is a failure.
async fn watch(client: Arc<ReconnectingClient>, mut from: u64, versions: Arc<Mutex<Vec<u64>>>) {
    let results = Arc::clone(&client.results);
    loop {
        let path = format!("{CONFIGMAPS}?watch=1&resourceVersion={from}");
        let (mut watch, _connection) = match client.watch(&path).await {
            Ok(started) => started,
            Err(error) => return results.record_failure("start of a watch", error),
        };
        results.watches.fetch_add(1, Relaxed);
        loop {
            match watch.next().await {
                Ok(Some(event)) if event["type"] == "ADDED" => {
                    let version = &event["object"]["metadata"]["resourceVersion"];
                    from = version.as_str().unwrap().parse().unwrap();
                    versions.lock().unwrap().push(from);
                }
                Ok(Some(event)) => return results.record_failure("event of a watch", event),
                Ok(None) => break,
                Err(error) => return results.record_failure("end of a watch", error),
            }
        }
    }
}

//! Clients that behave as Go's do: a connection that says GOAWAY is left for a new one, a request
//! that was not taken goes there, and anything else that goes wrong is kept.

use crate::setup::{PATIENCE, Setup};
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

/// Clients that read, and those that write.
const READERS: usize = 6;
const WRITERS: usize = 2;
/// Watches, two on a connection.
const WATCHES: usize = 6;
/// How often each does something, and something happens that watches see.
const PACE: Duration = Duration::from_millis(25);

#[derive(Default)]
struct Seen {
    failures: Mutex<Vec<String>>,
    requests: AtomicUsize,
    connections: AtomicUsize,
    watches: AtomicUsize,
    stop: AtomicBool,
    /// Versions that watches must see, in their order.
    written: Mutex<Vec<u64>>,
}

impl Seen {
    fn failed(&self, what: &str, why: impl fmt::Display) {
        self.failures.lock().unwrap().push(format!("{what}: {why}"));
    }
}

/// What there was of it.
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
            "{requests} requests on {connections} connections, {WATCHES} watches begun {watches} \
             times for {events} events; none failed, broke, was lost or came twice"
        )
    }
}

pub struct Load {
    seen: Arc<Seen>,
    /// What each watch has seen.
    versions: Vec<Arc<Mutex<Vec<u64>>>>,
    requests: Vec<JoinHandle<()>>,
    watches: Vec<JoinHandle<()>>,
}

/// One client: a connection at a time.
struct Session {
    address: SocketAddr,
    who: Credentials,
    client: tokio::sync::Mutex<Option<Arc<Client>>>,
    seen: Arc<Seen>,
}

impl Session {
    fn new(setup: &Setup, seen: &Arc<Seen>) -> Arc<Self> {
        Arc::new(Self {
            address: setup.address,
            who: setup.cluster.certs.credentials(),
            client: tokio::sync::Mutex::default(),
            seen: Arc::clone(seen),
        })
    }

    async fn client(&self) -> io::Result<Arc<Client>> {
        let mut slot = self.client.lock().await;
        if let Some(client) = slot.as_ref().filter(|client| !client.is_closed()) {
            return Ok(Arc::clone(client));
        }
        let client = Arc::new(Client::connect(self.address, &self.who).await?);
        self.seen.connections.fetch_add(1, Relaxed);
        *slot = Some(Arc::clone(&client));
        Ok(client)
    }

    /// Leaves a connection that takes no more requests to what still runs on it.
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
                Err(error) if was_not_taken(&error) => self.leave(&client).await,
                answer => return answer,
            }
        }
    }

    /// Begins a watch. The connection comes along: it ends when nobody has it.
    async fn watch(&self, path: &str) -> io::Result<(Watch, Arc<Client>)> {
        loop {
            let client = self.client().await?;
            match client.watch(path).await {
                Err(error) if was_not_taken(&error) => self.leave(&client).await,
                watch => return watch.map(|watch| (watch, client)),
            }
        }
    }
}

/// Whether the server said that it has not looked at it (RFC 9113, 6.8), or it was never sent.
fn was_not_taken(error: &io::Error) -> bool {
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref::<hyper::Error>());
    inner.is_some_and(|error| error.is_canceled() || error.is_closed())
        || h2_error(error).is_some_and(|error| {
            error.is_remote() && error.is_go_away() && error.reason() == Some(h2::Reason::NO_ERROR)
        })
}

impl Load {
    pub async fn start(setup: &Setup) -> Self {
        let seen = Arc::<Seen>::default();
        let cluster = setup.cluster.state.clone();
        let from = cluster.version();
        let mut versions = Vec::new();
        let mut watches = Vec::new();
        let mut session = Session::new(setup, &seen);
        for number in 0..WATCHES {
            if number % 2 == 0 {
                session = Session::new(setup, &seen);
            }
            let into = Arc::<Mutex<Vec<u64>>>::default();
            versions.push(Arc::clone(&into));
            watches.push(tokio::spawn(watch(Arc::clone(&session), from, into)));
        }
        let mut requests = vec![tokio::spawn(write(cluster.clone(), Arc::clone(&seen)))];
        let kind = kinds::find("", "v1", "configmaps").unwrap();
        for number in 0..READERS + WRITERS {
            let name = format!("t{number}");
            let mut object = config_map(&name, "0");
            object["metadata"]["namespace"] = "kube-system".into();
            // It is there already if there was load before.
            let _ = cluster.create(kind, "kube-system", object, false);
            let session = Session::new(setup, &seen);
            requests.push(tokio::spawn(request(session, name, number < WRITERS)));
        }
        let load = Self { seen, versions, requests, watches };
        load.goes_on().await;
        load
    }

    /// Waits for everybody to have done something more, and that nothing went wrong so far.
    pub async fn goes_on(&self) {
        let requests = self.seen.requests.load(Relaxed) + 50;
        let written = self.seen.written.lock().unwrap().len() + 5;
        wait::until_within(PATIENCE, "the load goes on", async || {
            assert_eq!(*self.seen.failures.lock().unwrap(), [""; 0]);
            let all_seen = self.versions.iter().all(|seen| seen.lock().unwrap().len() >= written);
            self.seen.requests.load(Relaxed) >= requests && all_seen
        })
        .await;
    }

    /// Ends it. Nothing may have failed, and every watch has seen everything once and in order.
    pub async fn end(mut self) -> Report {
        self.seen.stop.store(true, Relaxed);
        for task in std::mem::take(&mut self.requests) {
            timeout(PATIENCE, task).await.expect("requests end").unwrap();
        }
        let written = self.seen.written.lock().unwrap().clone();
        for (number, versions) in self.versions.iter().enumerate() {
            let what = format!("watch {number} has seen everything");
            wait::until_within(PATIENCE, &what, async || {
                assert_eq!(*self.seen.failures.lock().unwrap(), [""; 0]);
                versions.lock().unwrap().len() >= written.len()
            })
            .await;
            assert_eq!(*versions.lock().unwrap(), written, "watch {number}");
        }
        assert_eq!(*self.seen.failures.lock().unwrap(), [""; 0]);
        Report {
            requests: self.seen.requests.load(Relaxed),
            connections: self.seen.connections.load(Relaxed),
            watches: self.seen.watches.load(Relaxed),
            events: written.len(),
        }
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.requests.iter().chain(&self.watches).for_each(JoinHandle::abort);
    }
}

fn pace() -> tokio::time::Interval {
    let mut ticks = interval(PACE);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks
}

/// Makes events.
async fn write(cluster: Cluster, seen: Arc<Seen>) {
    let kind = kinds::find("", "v1", "configmaps").unwrap();
    let mut ticks = pace();
    while !seen.stop.load(Relaxed) {
        ticks.tick().await;
        let made = cluster.create(
            kind,
            "default",
            config_map(&format!("m{}", cluster.version()), "1"),
            false,
        );
        seen.written.lock().unwrap().push(made.unwrap().version);
    }
}

/// Reads or writes at a steady pace.
async fn request(session: Arc<Session>, name: String, writes: bool) {
    let path = format!("/api/v1/namespaces/kube-system/configmaps/{name}");
    let seen = Arc::clone(&session.seen);
    let mut ticks = pace();
    for number in 0_u64.. {
        ticks.tick().await;
        if seen.stop.load(Relaxed) {
            return;
        }
        let mut object = config_map(&name, &number.to_string());
        object["metadata"]["namespace"] = "kube-system".into();
        match session.request(&path, writes.then_some(&object)).await {
            Ok(reply) if reply.status.is_success() => drop(seen.requests.fetch_add(1, Relaxed)),
            Ok(reply) => {
                let why = String::from_utf8_lossy(&reply.body).into_owned();
                seen.failed("request", format!("{}: {why}", reply.status));
            }
            Err(error) => seen.failed("request", format!("{error}: {:?}", error.get_ref())),
        }
    }
}

/// Watches as a reflector does: after a clean end it goes on from where it was. It never lists: what
/// would make it do so is a failure.
async fn watch(session: Arc<Session>, mut from: u64, into: Arc<Mutex<Vec<u64>>>) {
    let seen = Arc::clone(&session.seen);
    loop {
        let path = format!("{CONFIGMAPS}?watch=1&resourceVersion={from}");
        let (mut watch, _connection) = match session.watch(&path).await {
            Ok(begun) => begun,
            Err(error) => return seen.failed("a watch cannot begin", error),
        };
        seen.watches.fetch_add(1, Relaxed);
        loop {
            match watch.next().await {
                Ok(Some(event)) if event["type"] == "ADDED" => {
                    let version = &event["object"]["metadata"]["resourceVersion"];
                    from = version.as_str().unwrap().parse().unwrap();
                    into.lock().unwrap().push(from);
                }
                Ok(Some(event)) => return seen.failed("a watch", event),
                Ok(None) => break,
                Err(error) => return seen.failed("a watch broke", error),
            }
        }
    }
}

//! Clients as a node has them: reads, heartbeats and watches, through the proxy, each counting what
//! a user would have felt.
//!
//! Reads and heartbeats start on the clock, whether or not the one before is done, so that one slow
//! answer does not hide those that would have been slow behind it. Events are numbered and written
//! into the store directly: how late each of them arrives is the silence that a watch has suffered.

use crate::demo::apiserver::cluster::Cluster;
use crate::demo::apiserver::kinds::ObjectRef;
use crate::demo::apiserver::kinds::{CONFIG_MAPS, PODS};
use crate::demo::apiserver::timestamps;
use crate::demo::client::{Client, Credentials};
use crate::demo::seed;
use http::Method;
use serde_json::Value;
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::sync::watch;
use tokio::task::JoinSet;

/// Clients that read.
pub const READERS: usize = 4;
/// Clients that write heartbeats.
pub const WRITERS: usize = 2;
/// Watches on what changes all the time, and as many on what seldom does.
pub const WATCHES_OF_EACH: usize = 5;
/// Between two reads, or two heartbeats, of one client.
const TICK: Duration = Duration::from_millis(100);
/// Between two events that busy watches see.
const BUSY: Duration = Duration::from_millis(50);
/// Between two events that quiet watches see.
const QUIET: Duration = Duration::from_secs(2);
/// Between two looks at our own clock, and the lateness that is no stall yet.
const PULSE: Duration = Duration::from_millis(20);
/// A request that has no answer after this is lost.
const PATIENCE: Duration = Duration::from_secs(15);
/// What the end waits for: requests in flight, events on their way.
const LAST_ANSWERS: Duration = Duration::from_secs(3);

const READ: &str = "/api/v1/namespaces/default/pods";
const MAPS: &str = "/api/v1/namespaces/default/configmaps";
const LEASES: &str = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases";

/// What clients have felt in a span of time.
#[derive(Debug, Clone, Default)]
pub struct Counts {
    /// Reads that ended.
    pub reads: u64,
    /// Reads that failed.
    pub failed_reads: u64,
    /// The slowest read.
    pub slowest_read: Duration,
    /// Heartbeats that ended.
    pub writes: u64,
    /// Heartbeats that failed.
    pub failed_writes: u64,
    /// Heartbeats that failed or hung although they began well after the fault.
    pub late_writes: u64,
    /// The slowest heartbeat.
    pub slowest_write: Duration,
    /// Watches that ended by an error.
    pub broken: u64,
    /// Watches that were ended in good order.
    pub ended: u64,
    /// Events that arrived.
    pub events: u64,
    /// Events that never did.
    pub lost: u64,
    /// Events that did twice, or out of order.
    pub duplicated: u64,
    /// The latest event.
    pub silence: Duration,
    /// How long this machine kept us from running, in sum: no verdict on times is better than that.
    pub stalled: Duration,
    /// The first thing that failed, in words.
    pub first_failure: Option<String>,
}

impl Counts {
    fn fail(&mut self, what: &str, why: &dyn std::fmt::Display) {
        self.first_failure.get_or_insert_with(|| format!("{what}: {why}"));
    }
}

/// Where clients write what they felt.
pub struct Ledger {
    span: Mutex<(Instant, Counts)>,
    /// Heartbeats that begin this long after a span began have no excuse, nor take this long.
    settled: Duration,
    topics: [Topic; 2],
}

/// A stream of numbered events: an object that is changed over and over.
struct Topic {
    name: &'static str,
    /// When each number was written; number 0 is the object as it was created.
    written: Mutex<Vec<Instant>>,
    /// The last number that each of its watches has seen.
    seen: [AtomicU64; WATCHES_OF_EACH],
}

impl Topic {
    fn new(name: &'static str) -> Self {
        Self { name, written: Mutex::new(vec![Instant::now()]), seen: Default::default() }
    }

    /// How long the watch that is furthest behind has waited for its next event, and how many
    /// events all of them lack.
    fn behind(&self) -> (Duration, u64) {
        let written = lock(&self.written);
        let behind = self.seen.iter().map(|seen| {
            let next = seen.load(Relaxed) as usize + 1;
            let waited = written.get(next).map_or(Duration::ZERO, Instant::elapsed);
            (waited, written.len().saturating_sub(next) as u64)
        });
        behind.fold((Duration::ZERO, 0), |all, one| (all.0.max(one.0), all.1 + one.1))
    }
}

impl Ledger {
    fn new(settled: Duration) -> Self {
        let topics = [Topic::new("busy"), Topic::new("quiet")];
        Self { span: Mutex::new((Instant::now(), Counts::default())), settled, topics }
    }

    /// Ends a span and begins the next; returns what was felt in the one that ended.
    pub fn turn(&self) -> Counts {
        let counts = self.so_far();
        *lock(&self.span) = (Instant::now(), Counts::default());
        counts
    }

    /// What was felt in this span until now, events that are late at this moment included.
    pub fn so_far(&self) -> Counts {
        let mut counts = lock(&self.span).1.clone();
        for topic in &self.topics {
            counts.silence = counts.silence.max(topic.behind().0);
        }
        counts
    }

    fn note(&self, what: impl FnOnce(&mut Counts)) {
        what(&mut lock(&self.span).1);
    }

    fn read(&self, took: Duration, result: Result<(), String>) {
        self.note(|counts| {
            counts.reads += 1;
            counts.slowest_read = counts.slowest_read.max(took);
            if let Err(why) = result {
                counts.failed_reads += 1;
                counts.fail("read", &why);
            }
        });
    }

    fn wrote(&self, began: Instant, result: Result<(), String>) {
        let took = began.elapsed();
        let mut span = lock(&self.span);
        let settled = self.settled + span.1.stalled;
        let late = began > span.0 + settled && (result.is_err() || took > settled);
        let counts = &mut span.1;
        counts.writes += 1;
        counts.slowest_write = counts.slowest_write.max(took);
        counts.late_writes += u64::from(late);
        if let Err(why) = result {
            counts.failed_writes += 1;
            counts.fail("heartbeat", &why);
        }
    }

    /// An event arrived at a watch of a topic.
    fn arrived(&self, topic: &Topic, watch: usize, number: u64) {
        let last = topic.seen[watch].fetch_max(number, Relaxed);
        let written = lock(&topic.written).get(number as usize).copied();
        self.note(|counts| {
            counts.events += 1;
            if number <= last {
                counts.duplicated += 1;
                return;
            }
            counts.lost += number - last - 1;
            let late = written.map_or(Duration::ZERO, |at| at.elapsed());
            counts.silence = counts.silence.max(late);
        });
    }
}

/// Clients at work. Dropping them stops them.
pub struct Clients {
    /// What they feel.
    pub ledger: Arc<Ledger>,
    stop: watch::Sender<bool>,
    thread: Option<JoinHandle<()>>,
}

/// What every client needs.
#[derive(Clone)]
struct Desk {
    addr: SocketAddr,
    who: Credentials,
    ledger: Arc<Ledger>,
    stopped: watch::Receiver<bool>,
}

impl Clients {
    /// Starts them on a thread of their own; events are written into `cluster`. A heartbeat that
    /// begins later than `settled` after a fault must do better than `settled`.
    pub fn start(
        addr: SocketAddr,
        who: &Credentials,
        cluster: &Cluster,
        settled: Duration,
    ) -> io::Result<Self> {
        let ledger = Arc::new(Ledger::new(settled));
        let (stop, stopped) = watch::channel(false);
        let desk = Desk { addr, who: who.clone(), ledger: ledger.clone(), stopped };
        let cluster = cluster.clone();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let thread = std::thread::Builder::new()
            .name("clients".to_owned())
            .spawn(move || runtime.block_on(work(desk, cluster)))?;
        Ok(Self { ledger, stop, thread: Some(thread) })
    }

    /// Lets them finish: requests in flight end, events arrive; what does not is lost. Returns what
    /// was felt since the last span began.
    pub fn finish(mut self) -> Counts {
        self.end();
        let mut counts = lock(&self.ledger.span).1.clone();
        counts.lost += self.ledger.topics.iter().map(|topic| topic.behind().1).sum::<u64>();
        counts
    }

    fn end(&mut self) {
        self.stop.send_replace(true);
        if let Some(thread) = self.thread.take() {
            // A panic has been printed; what it should have counted is missing and shows.
            let _ = thread.join();
        }
    }
}

impl Drop for Clients {
    fn drop(&mut self) {
        self.end();
    }
}

async fn work(desk: Desk, cluster: Cluster) {
    let mut watches = JoinSet::new();
    watches.spawn(feel_the_pulse(desk.ledger.clone()));
    for topic in 0..desk.ledger.topics.len() {
        for index in 0..WATCHES_OF_EACH {
            watches.spawn(follow(desk.clone(), topic, index));
        }
    }
    let mut asking = JoinSet::new();
    for _ in 0..READERS {
        asking.spawn(ask(desk.clone(), None));
    }
    for node in &seed::NODE_NAMES[..WRITERS] {
        asking.spawn(ask(desk.clone(), Some(*node)));
    }
    let mut writing = JoinSet::new();
    writing.spawn(happen(desk.clone(), cluster.clone(), 0, BUSY));
    writing.spawn(happen(desk.clone(), cluster, 1, QUIET));
    while writing.join_next().await.is_some() {}
    while asking.join_next().await.is_some() {}
    let began = Instant::now();
    let missing = || desk.ledger.topics.iter().any(|topic| topic.behind().1 > 0);
    while missing() && began.elapsed() < LAST_ANSWERS {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Notices when this machine lets us wait.
async fn feel_the_pulse(ledger: Arc<Ledger>) {
    loop {
        let began = Instant::now();
        tokio::time::sleep(PULSE).await;
        let late = began.elapsed().saturating_sub(PULSE);
        if late > PULSE {
            ledger.note(|counts| counts.stalled += late);
        }
    }
}

/// Writes the events of a topic.
async fn happen(mut desk: Desk, cluster: Cluster, topic: usize, every: Duration) {
    let topic = &desk.ledger.topics[topic];
    let mut ticks = tokio::time::interval(every);
    ticks.tick().await;
    while unless_stopped(&mut desk.stopped, ticks.tick()).await.is_some() {
        let number = {
            let mut written = lock(&topic.written);
            written.push(Instant::now());
            written.len() - 1
        };
        let set = |kind, name: &str, at: &[&str]| {
            let place = ObjectRef { kind, namespace: "default", name };
            let changed = cluster.modify(place, false, |now| {
                let mut next = now.clone();
                let field = at.iter().fold(&mut next, |value, key| &mut value[*key]);
                *field = number.to_string().into();
                Ok(next)
            });
            if let Err(failure) = changed {
                desk.ledger.note(|counts| counts.fail("event", &failure.message));
            }
        };
        set(&CONFIG_MAPS, topic.name, &["data", "n"]);
        if every == QUIET {
            // For whoever joins with `kubectl get pods -w`.
            set(&PODS, seed::POD, &["metadata", "annotations", "demo/n"]);
        }
    }
}

/// Asks on the clock: reads, or heartbeats of a node.
async fn ask(mut desk: Desk, node: Option<&'static str>) {
    let mut client: Option<Arc<Client>> = None;
    let mut asked = JoinSet::new();
    // Not all at the same moment.
    tokio::time::sleep(Duration::from_millis(fastrand::u64(..100))).await;
    let mut ticks = tokio::time::interval(TICK);
    while unless_stopped(&mut desk.stopped, ticks.tick()).await.is_some() {
        let began = Instant::now();
        let usable = client.take().filter(|client| !client.is_closed());
        let connection = match usable {
            Some(client) => Ok(client),
            None => Client::connect(desk.addr, &desk.who).await.map(Arc::new),
        };
        match connection {
            Ok(connection) => {
                client = Some(connection.clone());
                asked.spawn(request(connection, desk.ledger.clone(), node));
            }
            Err(error) if node.is_some() => desk.ledger.wrote(began, Err(error.to_string())),
            Err(error) => desk.ledger.read(began.elapsed(), Err(error.to_string())),
        }
        while asked.try_join_next().is_some() {}
    }
    let rest = async { while asked.join_next().await.is_some() {} };
    if tokio::time::timeout(LAST_ANSWERS, rest).await.is_err() {
        for _ in 0..asked.len() {
            let never = Err("no answer until the end".to_owned());
            match node {
                Some(_) => desk.ledger.wrote(Instant::now(), never),
                None => desk.ledger.read(LAST_ANSWERS, never),
            }
        }
    }
}

async fn request(client: Arc<Client>, ledger: Arc<Ledger>, node: Option<&str>) {
    let began = Instant::now();
    let asked = async {
        match node {
            None => client.get(READ).await,
            Some(node) => {
                let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
                let now = timestamps::rfc3339_micros(now.as_secs(), now.subsec_nanos());
                let body = format!(r#"{{"spec":{{"renewTime":"{now}"}}}}"#);
                let headers = [("content-type", "application/merge-patch+json")];
                let path = format!("{LEASES}/{node}");
                client.request(Method::PATCH, &path, &headers, body).await
            }
        }
    };
    let result = match tokio::time::timeout(PATIENCE, asked).await {
        Ok(Ok(reply)) if reply.status.is_success() => Ok(()),
        Ok(Ok(reply)) => {
            let message = reply.json()["message"].as_str().unwrap_or_default().to_owned();
            Err(format!("{} {message}", reply.status.as_u16()))
        }
        Ok(Err(error)) => Err(error.to_string()),
        Err(_) => Err(format!("no answer in {} s", PATIENCE.as_secs())),
    };
    match node {
        Some(_) => ledger.wrote(began, result),
        None => ledger.read(began.elapsed(), result),
    }
}

/// Keeps a watch going, as a reflector does.
async fn follow(mut desk: Desk, topic: usize, index: usize) {
    let ledger = desk.ledger.clone();
    let topic = &ledger.topics[topic];
    let mut version = String::new();
    while !*desk.stopped.borrow() {
        if let Err(error) = watch_once(&mut desk, topic, index, &mut version).await {
            ledger.note(|counts| {
                counts.broken += 1;
                counts.fail("watch", &error);
            });
            tokio::time::sleep(TICK).await;
        }
    }
}

/// One watch until it ends; `version` is where the next one goes on.
async fn watch_once(
    desk: &mut Desk,
    topic: &Topic,
    index: usize,
    version: &mut String,
) -> io::Result<()> {
    let client = Client::connect(desk.addr, &desk.who).await?;
    let selector = format!("labelSelector=demo%3D{}", topic.name);
    if version.is_empty() {
        let list = client.get(&format!("{MAPS}?{selector}")).await?.json();
        text(&list["metadata"]["resourceVersion"]).clone_into(version);
        topic.seen[index].store(number(&list["items"][0]), Relaxed);
    }
    let path =
        format!("{MAPS}?watch=1&allowWatchBookmarks=true&resourceVersion={version}&{selector}");
    let mut watch = client.watch(&path).await?;
    // Stays until everything has arrived: whoever ends this ends it by dropping the task.
    while let Some(event) = watch.next().await? {
        let object = &event["object"];
        match text(&event["type"]) {
            "ERROR" => {
                version.clear();
                return Err(io::Error::other(text(&object["message"]).to_owned()));
            }
            "BOOKMARK" => {}
            _ => desk.ledger.arrived(topic, index, number(object)),
        }
        text(&object["metadata"]["resourceVersion"]).clone_into(version);
    }
    desk.ledger.note(|counts| counts.ended += 1);
    Ok(())
}

/// The future's output, or none if it was time to stop first.
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

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_lost_duplicated_or_late_is_counted() {
        let ledger = Ledger::new(Duration::from_secs(1));
        let topic = &ledger.topics[0];
        let old = Instant::now().checked_sub(Duration::from_secs(2)).unwrap();
        *lock(&topic.written) = vec![old; 5];
        for number in [1, 2, 4, 4] {
            ledger.arrived(topic, 0, number);
        }
        let counts = ledger.turn();
        assert_eq!((counts.events, counts.lost, counts.duplicated), (4, 1, 1));
        assert!(counts.silence >= Duration::from_secs(2));
        assert_eq!(topic.behind().1, 4 * (WATCHES_OF_EACH as u64 - 1));
        assert_eq!(ledger.so_far().events, 0, "a new span");
    }

    #[test]
    fn a_heartbeat_in_flight_is_excused_and_a_later_one_is_not() {
        let ledger = Ledger::new(Duration::from_millis(1));
        let began = Instant::now();
        ledger.turn();
        ledger.wrote(began, Err("lost".into()));
        assert_eq!((ledger.so_far().failed_writes, ledger.so_far().late_writes), (1, 0));
        ledger.wrote(Instant::now() + Duration::from_millis(5), Err("lost".into()));
        assert_eq!((ledger.so_far().failed_writes, ledger.so_far().late_writes), (2, 1));
    }
}

//! Watches whose connection falls silent get their events from a second stream on another apiserver, each once.

use std::time::{Duration, Instant};

use futures_util::future::join_all;
use jackstay_apiserver::client::Client;
use jackstay_apiserver::faulty_relay::{Direction, FaultyRelay};
use jackstay_config::Config;

use crate::scripted_peer::{Action, FIRST, Reply, SECOND, lines, setup_with};
use crate::support::figures::{bound, check_figure};
use crate::support::watch_recorder::WatchRecorder;
use crate::support::{CONFIGMAPS, Proxy, TestCluster, until, wait};

/// The path, the query and the `Accept` header of watches.
const KINDS: [(&str, &str); 5] = [
    ("", "application/json"),
    ("&allowWatchBookmarks=true", "application/json"),
    ("", "application/json;as=Table;v=v1;g=meta.k8s.io,application/json"),
    ("", "application/vnd.kubernetes.protobuf"),
    ("", "application/cbor"),
];
/// Time between two events of a busy watch.
const INTERVAL: Duration = Duration::from_millis(50);
/// The promised silences of watches.
const BUSY: Duration = Duration::from_millis(600);
const QUIET: Duration = Duration::from_millis(1_200);
/// The same of a quiet watch, if another one on another connection shows the event.
const PROMPT: Duration = Duration::from_millis(450);

/// A connection is suspect after 300 ms: a busy machine may take longer than 100 ms to answer.
fn with_suspicion(config: &mut Config) {
    config.upstreams[0].health.suspect_after = Some(Duration::from_millis(300));
}

async fn ended(proxy: &Proxy, outcome: &str) -> f64 {
    let name = "jackstay_watch_shadow_duration_seconds_count";
    proxy.metric(&format!("{name}{{outcome=\"{outcome}\"}}")).await
}

struct Setup {
    cluster: TestCluster,
    relays: Vec<FaultyRelay>,
    proxy: Proxy,
    watches: Vec<WatchRecorder>,
    versions: Vec<u64>,
}

impl Setup {
    /// Two apiservers, and four watches of each kind, some at each apiserver.
    async fn new() -> Self {
        Self::with(Duration::from_millis(200), |_| {}).await
    }

    async fn with(bookmarks: Duration, change: impl FnOnce(&mut Config)) -> Self {
        let cluster = TestCluster::new(2);
        cluster.state.set_bookmark_interval(bookmarks);
        let (relays, proxy) = cluster.start_behind_relays(change).await;
        let client = proxy.client().await;
        let mut watches = Vec::new();
        for (query, accept) in KINDS.into_iter().cycle().take(4 * KINDS.len()) {
            let path = format!("{}{query}", cluster.watch_path());
            watches.push(WatchRecorder::accepting(&client, &path, accept).await);
        }
        let counts = cluster.watch_counts();
        assert!(counts.iter().all(|count| *count > 0), "{counts:?}");
        Self { cluster, relays, proxy, watches, versions: Vec::new() }
    }

    /// Writes an object, and returns how long it took until all watches had the event.
    async fn write(&mut self) -> Duration {
        let begun = Instant::now();
        self.versions.push(self.cluster.create_config_map(&format!("m{}", self.versions.len())));
        let last = self.versions.last().copied();
        let have = || self.watches.iter().all(|watch| watch.versions().last().copied() == last);
        until("all watches have the event, or have ended", async || {
            have() || self.watches.iter().any(|watch| watch.end().is_some())
        })
        .await;
        begun.elapsed()
    }

    async fn expect_each_event_once(&self) {
        for watch in &self.watches {
            watch.expect_versions(&self.versions).await;
        }
    }
}

/// The bytes of the silent connections are delivered later: the first streams repeat what the shadows have shown.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn busy_watches_get_events_from_shadows_until_their_connection_answers() {
    let mut setup = Setup::new().await;
    let mut slowest = Duration::ZERO;
    for round in 0..4 {
        for _ in 0..10 {
            setup.write().await;
            wait::pause(INTERVAL).await;
        }
        let direction = if round % 2 == 0 { Direction::Both } else { Direction::ToClient };
        let before = ended(&setup.proxy, "recovered").await;
        assert!(setup.relays[round / 2].silence_all(direction) > 0);
        let silent_at = Instant::now();
        while silent_at.elapsed() < Duration::from_secs(1) {
            slowest = slowest.max(setup.write().await);
            wait::pause(INTERVAL).await;
        }
        setup.relays[round / 2].clear_faults();
        until("the shadows end", async || ended(&setup.proxy, "recovered").await > before).await;
        setup.write().await;
        setup.expect_each_event_once().await;
    }
    assert!(ended(&setup.proxy, "contradicted").await < 1.0);
    check_figure("slowest event of a busy watch on a silent connection", slowest, BUSY);
}

/// The connection is lost: the shadows are the watches.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn shadow_continues_the_watch_when_its_connection_is_lost() {
    let mut setup = Setup::new().await;
    let at_first = setup.cluster.watch_counts()[0];
    setup.write().await;
    // Until the watches are quiet.
    wait::pause(Duration::from_millis(1_500)).await;
    setup.relays[0].drop_all_packets().unwrap();
    check_figure("event of a quiet watch on a dead connection", setup.write().await, QUIET);
    until("the shadows continue the watches", async || {
        ended(&setup.proxy, "promoted").await + setup.proxy.resumes("resumed").await
            >= at_first as f64
    })
    .await;
    assert!(ended(&setup.proxy, "promoted").await >= 1.0);
    for _ in 0..5 {
        setup.write().await;
    }
    setup.expect_each_event_once().await;
}

/// A watch on another connection shows the event at once. The connection that does not is asked, without waiting for the
/// next PING.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn event_of_another_watch_brings_the_ping_forward() {
    // Without the event, the next PING would be due in 10 to 20 s.
    let rarely = |config: &mut Config| {
        config.upstreams[0].health.ping_interval = Duration::from_secs(20);
    };
    let mut setup = Setup::with(Duration::from_secs(60), rarely).await;
    setup.write().await;
    let mut slowest = Duration::ZERO;
    for relay in 0..2 {
        // Longer than it takes until all PINGs that follow bytes are sent.
        wait::pause(Duration::from_secs(2)).await;
        assert!(setup.relays[relay].silence_all(Direction::Both) > 0);
        slowest = slowest.max(setup.write().await);
        setup.relays[relay].clear_faults();
        setup.proxy.wait_all("ready").await;
    }
    setup.expect_each_event_once().await;
    check_figure("event of a quiet watch that another watch shows", slowest, PROMPT);
}

/// Each answer of the only other server to the request of a shadow.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn shadow_that_cannot_be_used_harms_nothing_and_is_not_opened_in_a_loop() {
    let gone = r#"{"type":"ERROR","object":{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Expired","code":410}}"#;
    let lower = FIRST.replace("\"6\"", "\"3\"");
    let cbor = vec![("content-type", "application/cbor")];
    let cases = [
        ("refused", Reply::status("403", "{}")),
        ("another encoding", Reply { headers: cbor, ..Reply::ok("") }),
        ("ended at once", Reply::ok("")),
        ("410", Reply::ok(&lines(&[gone]))),
        ("a lower version", Reply::ok(&lines(&[&lower]))),
        ("unreadable", Reply::ok("{\"type\":\"ADDED\"}\n")),
    ];
    join_all(cases.map(|(name, reply)| expect_unusable(name, reply))).await;
}

async fn expect_unusable(name: &str, reply: Reply) {
    let (peers, proxy, client) = setup_with(2, with_suspicion).await;
    peers.set_default(reply);
    peers.set_actions([Action::PartialThenUnresponsive(Reply::ok(&lines(&[FIRST])))]);
    let path = format!("{CONFIGMAPS}?watch=1&resourceVersion=5");
    let watch = WatchRecorder::start(&client, &path).await;
    // The process counts as stopped after 5 s.
    until("the connection drains", async || {
        proxy.events().await.iter().any(|event| event["to"] == "draining")
    })
    .await;
    let mut shadows = 0.0;
    for outcome in ["refused", "lost", "unusable", "no_stream"] {
        shadows += ended(&proxy, outcome).await;
    }
    println!("{name}: {shadows} shadows, {} requests", peers.requests().len());
    assert!((1.0..5.0).contains(&shadows), "{name}: {shadows}");
    assert!(peers.requests().len() <= 6, "{name}: {:?}", peers.requests().len());
    assert_eq!(watch.versions(), [6], "{name}: nothing of the shadow");
}

/// What only the shadow has shown is kept when it becomes the watch.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn shadow_that_has_led_is_the_watch_after_the_loss() {
    let (peers, proxy, client) = setup_with(2, with_suspicion).await;
    peers.set_actions([
        Action::PartialThenUnresponsive(Reply::ok(&lines(&[FIRST]))),
        Action::partial(Reply::ok(&lines(&[SECOND])), |_| Vec::new()),
    ]);
    let path = format!("{CONFIGMAPS}?watch=1&resourceVersion=5");
    let watch = WatchRecorder::start(&client, &path).await;
    watch.expect_versions(&[6, 7]).await;
    until("the shadow is the watch", async || ended(&proxy, "promoted").await >= 1.0).await;
    assert_eq!(peers.requests().len(), 2, "the shadow's request is the only further one");
    assert_eq!((watch.versions(), watch.end()), (vec![6, 7], None));
}

/// Processor time of this process, in seconds: jackstay, both apiservers and the client.
fn cpu_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    let fields: Vec<_> = stat.rsplit(") ").next().unwrap().split(' ').collect();
    // utime and stime, in hundredths of a second (proc(5), USER_HZ).
    fields[11..13].iter().map(|field| field.parse::<f64>().unwrap() / 100.0).sum()
}

/// The connections of many watches do not answer for a moment. Each watch opens one shadow at most.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn wrong_suspicion_opens_one_shadow_of_each_watch_at_most() {
    suspect_wrongly(4).await;
}

/// Without jackstay, the clients of a lost connection would list.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
#[ignore = "measures the processor time of the process, in which no other test may run"]
async fn wrong_suspicion_of_2000_watches_costs_a_tenth_of_their_lists() {
    let (cost, lists) = suspect_wrongly(20).await;
    let allowed = bound(Duration::from_secs_f64(lists / 10.0)).as_secs_f64();
    assert!(cost <= allowed, "{cost} s for the shadows, {lists} s for the lists");
}

/// Suspects the connections of 100 watches of each client. Returns the processor time that it costs all sides, and that of
/// one list for each watch.
async fn suspect_wrongly(clients: u32) -> (f64, f64) {
    const PER_CLIENT: u64 = 100;
    let watches_in_all = f64::from(clients) * PER_CLIENT as f64;
    let cluster = TestCluster::new(2);
    for n in 0..1_000 {
        cluster.create_config_map(&format!("m{n}"));
    }
    let (relays, proxy) = cluster.start_behind_relays(|_| {}).await;
    let mut watches = Vec::new();
    for _ in 0..clients {
        let client = proxy.client().await;
        let path = cluster.watch_path();
        let started = (0..PER_CLIENT).map(|_| WatchRecorder::start(&client, &path));
        watches.extend(join_all(started).await);
    }
    let begun = cpu_seconds();
    wait::pause(Duration::from_secs(1)).await;
    let idle = cpu_seconds() - begun;

    let accepted = || -> u64 {
        let counters = |server: &jackstay_apiserver::ApiServerHandle| {
            server.counters().accepted_watches.load(std::sync::atomic::Ordering::Relaxed)
        };
        cluster.servers.iter().map(counters).sum()
    };
    let (before, begun) = (accepted(), cpu_seconds());
    relays[0].silence_all(Direction::Both);
    until("shadows run", async || accepted() > before).await;
    wait::pause(Duration::from_millis(300)).await;
    relays[0].clear_faults();
    wait::pause(Duration::from_secs(1)).await;
    let (shadows, cost) = (accepted() - before, cpu_seconds() - begun - idle);
    for watch in &watches {
        assert_eq!((watch.versions(), watch.end()), (vec![], None));
    }

    let direct = Client::connect(cluster.servers[1].addr, &proxy.credentials).await.unwrap();
    let begun = cpu_seconds();
    let sample = 20;
    for _ in 0..sample {
        assert_eq!(direct.get(CONFIGMAPS).await.unwrap().status, 200);
    }
    let lists = (cpu_seconds() - begun) / f64::from(sample) * watches_in_all;
    println!("{watches_in_all} watches: {shadows} shadows, {cost:.2} s; their lists {lists:.2} s");
    assert!(
        shadows > 0 && shadows as f64 <= watches_in_all,
        "one for each watch at most: {shadows}"
    );
    (cost, lists)
}

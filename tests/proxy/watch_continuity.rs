//! Watches continue across failures: the events of each watch through jackstay are compared with those of the
//! same watch on a server without failures.

use crate::scripted_peer::{Action, Peers, Reply, setup_with};
use crate::support::watch_recorder::WatchRecorder;
use crate::support::{
    CONFIGMAPS, PATIENCE, Proxy, TestCluster, config_map, long_form, read_body, soon,
    terminate_mode, until, wait, without_suspicion,
};
use http::Method;
use jackstay_apiserver as apiserver;
use jackstay_apiserver::client::Client;
use jackstay_apiserver::{ApiServerHandle, Options};
use std::time::{Duration, Instant};

/// The kinds of watches: name, path, query, `Accept`.
const KINDS: [(&str, &str, &str, &str); 10] = [
    ("json", "/api/v1/configmaps", "", "application/json"),
    ("namespaced", CONFIGMAPS, "", "application/json"),
    ("selected", CONFIGMAPS, "&labelSelector=v%20in%20(1,3,5,7)", "application/json"),
    ("bookmarks", CONFIGMAPS, "&allowWatchBookmarks=true", "application/json"),
    ("table", CONFIGMAPS, "", "application/json;as=Table;v=v1;g=meta.k8s.io,application/json"),
    ("protobuf", CONFIGMAPS, "", "application/vnd.kubernetes.protobuf"),
    ("cbor", CONFIGMAPS, "", "application/cbor"),
    ("cbor beside json", CONFIGMAPS, "", "application/cbor, application/json;q=0.9"),
    ("cbor table", CONFIGMAPS, "", "application/cbor;as=Table;v=v1;g=meta.k8s.io,application/json"),
    (
        "initial",
        CONFIGMAPS,
        "&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true",
        "application/json",
    ),
];

/// The name of a kind, a watch of this kind through jackstay, and one on the reference server.
type Pair = (&'static str, WatchRecorder, WatchRecorder);

/// Three servers behind jackstay, a reference server without failures that has the same state, and a client of
/// jackstay and of the reference server.
struct Setup {
    cluster: TestCluster,
    _reference: ApiServerHandle,
    proxy: Proxy,
    client: Client,
    reference_client: Client,
    written: usize,
}

impl Setup {
    async fn new() -> Self {
        let cluster = TestCluster::new(3);
        cluster.state.set_bookmark_interval(Duration::from_millis(200));
        let options = Options::named("reference");
        let reference = apiserver::start(&cluster.state, &cluster.certs.pki, options).unwrap();
        let proxy = cluster.start().await;
        let client = proxy.client().await;
        let reference_client =
            Client::connect(reference.addr, &cluster.certs.credentials()).await.unwrap();
        Self { cluster, _reference: reference, proxy, client, reference_client, written: 0 }
    }

    /// Makes `count` writes on the reference server: objects are created, updated and deleted.
    async fn write(&mut self, count: usize) {
        for _ in 0..count {
            let n = self.written;
            self.written += 1;
            let name = format!("m{}", n / 4);
            let path = format!("{CONFIGMAPS}/{name}");
            let label = (n % 9).to_string();
            let reply = match n % 4 {
                0 => self.reference_client.post(CONFIGMAPS, &config_map(&name, &label)).await,
                3 if n % 8 == 3 => {
                    self.reference_client.request(Method::DELETE, &path, &[], "").await
                }
                _ => self.reference_client.put(&path, &config_map(&name, &label)).await,
            };
            let reply = reply.unwrap();
            assert!(reply.status.is_success(), "{n}: {:?}", reply.body);
        }
    }

    /// Starts a pair of watches of each kind from this resource version.
    async fn start_pairs(&self, from: u64) -> Vec<Pair> {
        let mut pairs = Vec::new();
        for (name, path, query, accept) in KINDS {
            let version =
                if name == "initial" { String::new() } else { format!("&resourceVersion={from}") };
            let path = format!("{path}?watch=1{version}{query}");
            let watch = WatchRecorder::accepting(&self.client, &path, accept).await;
            let reference = WatchRecorder::accepting(&self.reference_client, &path, accept).await;
            pairs.push((name, watch, reference));
        }
        pairs
    }
}

/// Waits until each watch through jackstay has as many events as its reference, and asserts that they are equal.
async fn expect_equal_events(pairs: &[Pair], limit: Duration, after: &str) {
    for (name, watch, reference) in pairs {
        wait::until_ok(limit, "the watch and its reference have the same events", async || {
            let (got, wanted) = (watch.events(), reference.events());
            assert_eq!(watch.end(), None, "{name} after {after}: the watch ended");
            let common = got.len().min(wanted.len());
            assert_eq!(got[..common], wanted[..common], "{name} after {after}");
            if got.len() == wanted.len() {
                return Ok(());
            }
            Err(format!("{name} after {after}: {} of {} events", got.len(), wanted.len()))
        })
        .await;
    }
}

/// Waits until the reference watches have an event for the object with this name. The label selector of the
/// kind "selected" may exclude it.
async fn wait_reference(pairs: &[Pair], last: &str) {
    until("the reference watches have the last event", async || {
        pairs.iter().all(|(name, _, reference)| *name == "selected" || reference.has_seen(last))
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn watches_lose_no_event_under_many_faults() {
    let mut setup = Setup::new().await;
    let faults = if long_form() { 240 } else { 15 };
    let mut slowest = (Duration::ZERO, "");
    // A watch is resumed at most twelve times a minute. The test starts new watches after five faults, because a
    // busy machine causes additional losses.
    for first in (0..faults).step_by(5) {
        setup.write(8).await;
        let pairs = setup.start_pairs(setup.cluster.state.version()).await;
        for fault in first..first + 5 {
            setup.write(5).await;
            let server = &setup.cluster.servers[fault % 3];
            let name = match fault % 5 {
                0 => {
                    server.kill();
                    "a kill"
                }
                1 | 2 => {
                    server.reset_connections();
                    "reset connections"
                }
                3 => {
                    server.set_faults(|faults| faults.hold_watches = true);
                    "a cache that lags, then reset connections"
                }
                _ => {
                    server.goaway();
                    "GOAWAY"
                }
            };
            setup.write(5).await;
            if fault % 5 == 3 {
                setup.cluster.servers[fault % 3].reset_connections();
            }
            let start = Instant::now();
            let marker = format!("end-{fault}");
            let reply =
                setup.reference_client.post(CONFIGMAPS, &config_map(&marker, "1")).await.unwrap();
            assert!(reply.status.is_success());
            wait_reference(&pairs, &marker).await;
            let server = &setup.cluster.servers[fault % 3];
            server.set_faults(|faults| faults.hold_watches = false);
            expect_equal_events(&pairs, 2 * PATIENCE, name).await;
            slowest = slowest.max((start.elapsed(), name));
            if !server.is_running() {
                server.restart().unwrap();
                setup.proxy.wait_connected(3).await;
            }
        }
    }
    let resumed = setup.proxy.resumes("resumed").await;
    println!(
        "{faults} faults, {} kinds of watches, {resumed} resumes, no event lost or duplicated; the watches \
         caught up within {:?} ({})",
        KINDS.len(),
        slowest.0,
        slowest.1
    );
    assert!(resumed >= faults as f64, "{resumed} resumes");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn too_old_version_ends_the_watch_only_when_every_apiserver_returns_it() {
    let mut setup = Setup::new().await;
    setup.write(4).await;
    for round in 0..4 {
        let version = setup.cluster.state.version();
        let path = format!("{CONFIGMAPS}?watch=1&resourceVersion={version}");
        let pairs = vec![(
            "json",
            WatchRecorder::start(&setup.client, &path).await,
            WatchRecorder::start(&setup.reference_client, &path).await,
        )];
        setup.write(4).await;
        expect_equal_events(&pairs, Duration::from_secs(5), "the start").await;
        let serving = (0..3).find(|&at| setup.cluster.watches(at) > 0).unwrap();
        setup.cluster.servers[serving].set_faults(|faults| faults.hold_watches = true);
        setup.write(4).await;
        // A compacted server no longer has the version of the watch.
        let everywhere = round == 3;
        for (index, server) in setup.cluster.servers.iter().enumerate() {
            if index == (serving + 1) % 3 || everywhere {
                server.compact();
            }
        }
        setup.cluster.servers[serving].reset_connections();
        if !everywhere {
            // This server still has the version, so the watch may return to it.
            setup.cluster.servers[serving].set_faults(|faults| faults.hold_watches = false);
        }
        if everywhere {
            assert_eq!(pairs[0].1.wait_end().await, Ok(()), "410 from every server");
            let events = pairs[0].1.events();
            assert!(events.iter().all(|event| event.kind != "ERROR"), "{events:?}");
        } else {
            if round % 2 == 0 {
                // Only the other two servers can serve the watch.
                setup.cluster.servers[serving].kill();
            }
            expect_equal_events(&pairs, Duration::from_secs(5), "410 from one server").await;
            if !setup.cluster.servers[serving].is_running() {
                setup.cluster.servers[serving].restart().unwrap();
                setup.proxy.wait_connected(3).await;
            }
        }
        setup.cluster.servers[serving].set_faults(|faults| faults.hold_watches = false);
        drop(pairs);
        until("the watches have ended on the servers", async || {
            (0..3).all(|at| setup.cluster.watches(at) == 0)
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn clean_end_by_the_server_is_forwarded() {
    let mut setup = Setup::new().await;
    setup.write(4).await;
    let pairs = setup.start_pairs(setup.cluster.state.version()).await;
    setup.write(4).await;
    wait_reference(&pairs, "m1").await;
    expect_equal_events(&pairs, Duration::from_secs(5), "the start").await;
    setup.cluster.servers.iter().for_each(ApiServerHandle::end_watches);
    for (name, watch, _) in &pairs {
        assert_eq!(watch.wait_end().await, Ok(()), "{name}");
    }
    assert!(setup.proxy.resumes("resumed").await < 1.0);
}

/// A partial initial list must not look complete.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn watch_is_reset_when_it_is_lost_during_its_initial_list() {
    let mut setup = Setup::new().await;
    setup.write(6).await;
    let path = format!("{CONFIGMAPS}?watch=1");
    let watch = WatchRecorder::start(&setup.client, &path).await;
    until("an event arrives", async || !watch.events().is_empty()).await;
    setup.cluster.servers.iter().for_each(ApiServerHandle::reset_connections);
    assert!(watch.wait_end().await.is_err(), "the end of the watch was clean");
}

/// GOAWAY refuses new streams; running watches continue on their connection.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn goaway_of_a_healthy_server_moves_no_watch() {
    let cluster = TestCluster::new(2);
    let proxy = cluster
        .start_with(|config| {
            without_suspicion(config);
            config.upstreams[0].rebalance = false;
        })
        .await;
    let client = proxy.client().await;
    let watch = WatchRecorder::start(&client, &cluster.watch_path()).await;
    let server = || (0..2).find(|&at| cluster.watches(at) == 1);
    until("the watch runs", async || server().is_some()).await;
    let server = server().unwrap();
    cluster.servers[server].goaway();
    until("its connection drains", async || {
        let endpoints = proxy.endpoints().await;
        endpoints
            .iter()
            .flat_map(|e| e["connections"].as_array().unwrap())
            .any(|connection| connection["state"] == "draining" && connection["watches"] == 1)
    })
    .await;
    for n in 0..20 {
        cluster.create_config_map(&format!("after-{n}"));
        until("the event arrives", async || watch.events().len() == n + 1).await;
    }
    assert_eq!(cluster.watches(server), 1, "the watch has moved");
    assert!(proxy.metric("jackstay_watch_resumes_total").await < 1.0);
}

/// An event of a custom resource.
fn thing(event_type: &str, name: &str, version: &str) -> String {
    format!(
        "{{\"type\":\"{event_type}\",\"object\":{{\"kind\":\"Thing\",\"apiVersion\":\"example.com/v1\",\
         \"metadata\":{{\"name\":\"{name}\",\"resourceVersion\":\"{version}\"}}}}}}\n"
    )
}

const THINGS: &str = "/apis/example.com/v1/namespaces/default/things?watch=1&resourceVersion=5";

/// Sends a watch and reads its response until the end. A reset that immediately follows the response head may discard
/// the head.
async fn read_watch(client: &Client, path: &str) -> Vec<u8> {
    match soon("a head", client.send(Method::GET, path, &[], "")).await {
        Ok(response) => soon("the end", read_body(response.into_body())).await.0,
        Err(_) => Vec::new(),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn watch_of_a_custom_group_is_resumed_unless_excluded() {
    for excluded in [false, true] {
        let (peers, _proxy, client) = setup_with(2, |config| {
            without_suspicion(config);
            if excluded {
                terminate_mode(config).never_resume_groups = vec!["example.com".into()];
            }
        })
        .await;
        peers.set_default(Reply::ok(&thing("ADDED", "b", "7")));
        peers.set_actions([Action::PartialThenClose(Reply::ok(&thing("ADDED", "a", "6")))]);
        let received = read_watch(&client, THINGS).await;
        let (first, second) = (thing("ADDED", "a", "6"), thing("ADDED", "b", "7"));
        if excluded {
            let received = String::from_utf8_lossy(&received);
            assert!(first.starts_with(&*received), "{received:?}");
        } else {
            assert_eq!(received, [first, second].concat().into_bytes());
        }
        assert_eq!(peers.requests().len(), if excluded { 1 } else { 2 });
    }
}

/// Two replicas of an aggregated apiserver have stores of their own. The watch that finds this ends, and no watch of the
/// group is resumed after it; watches of other groups are.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn group_whose_versions_are_not_ordered_is_remembered_and_shown() {
    let (peers, proxy, client) = setup_with(2, without_suspicion).await;
    let first = thing("ADDED", "a", "60");
    let other_store = thing("ADDED", "x", "7") + &thing("ADDED", "y", "8");
    peers.set_default(Reply::ok(&other_store));
    peers.set_actions([Action::PartialThenClose(Reply::ok(&first))]);
    assert_eq!(read_watch(&client, THINGS).await, first.as_bytes(), "no event of the other store");
    assert_eq!(peers.requests().len(), 2);

    let status = proxy.status().await;
    let groups = &status["upstreams"][0]["unordered_groups"];
    assert_eq!(groups.as_array().map(Vec::len), Some(1), "{groups}");
    assert_eq!(groups[0]["group"], "example.com");
    assert_eq!(groups[0]["reason"], "diverged");
    assert!((proxy.resumes("unordered_group").await - 1.0).abs() < f64::EPSILON);

    peers.set_actions([Action::PartialThenClose(Reply::ok(&first))]);
    let received = read_watch(&client, THINGS).await;
    assert!(first.as_bytes().starts_with(&received), "a watch of the group");
    assert_eq!(peers.requests().len(), 1, "the watch is not resumed");

    peers.set_default(Reply::ok(&thing("ADDED", "b", "61")));
    peers.set_actions([Action::PartialThenClose(Reply::ok(&first))]);
    let other = THINGS.replace("example.com", "example.org");
    let expected = first.clone() + &thing("ADDED", "b", "61");
    assert_eq!(read_watch(&client, &other).await, expected.as_bytes(), "another group");
}

/// Two upstreams serve groups of one name, for example those of two clusters. What one has shown does not concern the
/// other.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn unordered_group_of_one_upstream_is_resumed_at_another() {
    let peers = Peers::start(4);
    let mut config = peers.certs.config(&peers.addresses[..2]);
    let mut other = peers.certs.config(&peers.addresses[2..]);
    without_suspicion(&mut config);
    without_suspicion(&mut other);
    other.upstreams[0].name = "other".into();
    other.listeners[0].name = "other".into();
    other.listeners[0].upstream = "other".into();
    config.upstreams.append(&mut other.upstreams);
    config.listeners.append(&mut other.listeners);
    let proxy = peers.certs.start(config);
    let status = async || proxy.status().await;
    until("all endpoints are ready", async || {
        let status = status().await;
        (0..2).all(|upstream| {
            let endpoints = status["upstreams"][upstream]["endpoints"].as_array().unwrap().clone();
            endpoints.len() == 2 && endpoints.iter().all(|endpoint| endpoint["state"] == "ready")
        })
    })
    .await;
    let address = status().await["listeners"][1]["bind"][0].as_str().unwrap().parse().unwrap();
    let first = thing("ADDED", "a", "60");
    let watch = async |address, next: &str| {
        let client = Client::connect(address, &proxy.credentials).await.unwrap();
        peers.set_default(Reply::ok(next));
        peers.set_actions([Action::PartialThenClose(Reply::ok(&first))]);
        let received = read_watch(&client, THINGS).await;
        (received, peers.requests().len())
    };
    let other_store = thing("ADDED", "x", "7") + &thing("ADDED", "y", "8");
    assert_eq!(watch(proxy.addr, &other_store).await, (first.clone().into_bytes(), 2));
    let next = thing("ADDED", "b", "61");
    let both = (first.clone() + &next).into_bytes();
    assert_eq!(watch(address, &next).await, (both, 2), "the other upstream");
    assert_eq!(watch(proxy.addr, &next).await.1, 1, "the watch is not resumed");
    let status = status().await;
    let groups = |upstream: usize| status["upstreams"][upstream]["unordered_groups"].clone();
    assert_eq!(groups(0).as_array().map(Vec::len), Some(1), "{status}");
    assert_eq!(groups(1).as_array().map(Vec::len), Some(0), "{status}");
}

/// One version of the group is served by an aggregated apiserver whose store was reset, another one by a CRD.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn group_is_remembered_as_a_whole_when_a_running_watch_shows_a_lower_version() {
    let (peers, proxy, client) = setup_with(2, without_suspicion).await;
    let (first, second) = (thing("ADDED", "a", "60"), thing("ADDED", "b", "61"));
    let watch = async |path: &str, reply: &str| {
        peers.set_default(Reply::ok(&second));
        peers.set_actions([Action::PartialThenClose(Reply::ok(reply))]);
        let received = read_watch(&client, path).await;
        (String::from_utf8(received).unwrap(), peers.requests().len())
    };
    let both = first.clone() + &second;
    assert_eq!(watch(THINGS, &first).await, (both, 2), "the CRD before");
    let aggregated = "/apis/example.com/v1beta1/widgets?watch=1&resourceVersion=5";
    let reset = first.clone() + &thing("ADDED", "x", "7");
    peers.set_actions([Action::Answer(Reply::ok(&reset))]);
    assert_eq!(read_watch(&client, aggregated).await, reset.as_bytes(), "events are forwarded");
    let status = proxy.status().await;
    let groups = &status["upstreams"][0]["unordered_groups"];
    assert_eq!(groups[0]["reason"], "version_not_growing", "{groups}");
    assert_eq!(watch(THINGS, &first).await.1, 1, "the CRD is not resumed any more");
}

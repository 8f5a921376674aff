//! Watches go on: every event of a watch through jackstay is compared with those of a watch on a
//! server that nothing happens to.

use crate::peer::{Act, Peers, Reply};
use crate::support::{Certs, MAPS, Proxy, World, map, patient, soon, terminate, until, wait};
use http::Method;
use jackstay::demo::apiserver::{self, ApiServerHandle, Options};
use jackstay::demo::client::{Client, next_data};
use jackstay::demo::faulty_relay::{Direction, FaultyRelay};
use serde_json::Value;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Promised: a watch that was delivering is silent for no longer.
const DELIVERING: Duration = Duration::from_millis(2_500);

/// Type, name and version.
pub type Event = (String, String, String);

/// The ways to watch that are compared.
const WAYS: [(&str, &str, &str, &str); 8] = [
    ("json", "/api/v1/configmaps", "", "application/json"),
    ("namespaced", MAPS, "", "application/json"),
    ("selected", MAPS, "&labelSelector=v%20in%20(1,3,5,7)", "application/json"),
    ("bookmarks", MAPS, "&allowWatchBookmarks=true", "application/json"),
    ("table", MAPS, "", "application/json;as=Table;v=v1;g=meta.k8s.io,application/json"),
    ("protobuf", MAPS, "", "application/vnd.kubernetes.protobuf"),
    ("cbor beside json", MAPS, "", "application/cbor, application/json;q=0.9"),
    (
        "initial",
        MAPS,
        "&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true",
        "application/json",
    ),
];

/// A watch that is read all the time.
pub struct Follower {
    events: Arc<Mutex<Vec<Event>>>,
    end: Arc<Mutex<Option<Result<(), String>>>>,
    task: tokio::task::JoinHandle<()>,
}

impl Drop for Follower {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Follower {
    pub async fn start(client: &Client, path: &str, accept: &str) -> Self {
        let headers = [("accept", accept)];
        let sent = soon(path, client.send(Method::GET, path, &headers, "")).await;
        let response = sent.unwrap_or_else(|e| panic!("{path}: {e}"));
        assert_eq!(response.status(), 200, "{path}");
        let protobuf = response.headers()["content-type"].to_str().unwrap().contains("protobuf");
        let mut body = response.into_body();
        let events = Arc::<Mutex<Vec<Event>>>::default();
        let end = Arc::<Mutex<Option<Result<(), String>>>>::default();
        let (into, ended) = (events.clone(), end.clone());
        let task = tokio::spawn(async move {
            let mut buffer = Vec::new();
            let how = loop {
                match next_data(&mut body).await {
                    Ok(Some(data)) => {
                        buffer.extend_from_slice(&data);
                        while let Some(event) = cut_event(&mut buffer, protobuf) {
                            if event.0 != "BOOKMARK" {
                                into.lock().unwrap().push(event);
                            }
                        }
                    }
                    Ok(None) if buffer.is_empty() => break Ok(()),
                    Ok(None) => break Err("a clean end in the middle of a frame".to_owned()),
                    Err(error) => break Err(error.to_string()),
                }
            };
            *ended.lock().unwrap() = Some(how);
        });
        Self { events, end, task }
    }

    pub fn events(&self) -> Vec<Event> {
        self.events.lock().unwrap().clone()
    }

    pub fn end(&self) -> Option<Result<(), String>> {
        self.end.lock().unwrap().clone()
    }
}

fn cut_event(buffer: &mut Vec<u8>, protobuf: bool) -> Option<Event> {
    if protobuf {
        let length = u32::from_be_bytes(buffer.get(..4)?.try_into().unwrap()) as usize;
        let frame = buffer.get(4..4 + length)?.to_vec();
        buffer.drain(..4 + length);
        let kind = String::from_utf8(field(&frame, 1)?).unwrap();
        let raw = field(&field(&frame, 2)?, 1)?;
        let object = field(raw.strip_prefix(b"k8s\0").unwrap(), 2)?;
        let meta = field(&object, 1)?;
        let text = |number| String::from_utf8(field(&meta, number).unwrap_or_default()).unwrap();
        return Some((kind, text(1), text(6)));
    }
    let end = buffer.iter().position(|byte| *byte == b'\n')?;
    let line: Vec<u8> = buffer.drain(..=end).collect();
    let event: Value = serde_json::from_slice(&line).unwrap();
    let mut object = &event["object"];
    if object["kind"] == "Table" {
        object = &object["rows"][0]["object"];
    }
    let meta = &object["metadata"];
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    Some((text(&event["type"]), text(&meta["name"]), text(&meta["resourceVersion"])))
}

/// The first length-delimited field with this number.
fn field(message: &[u8], wanted: u64) -> Option<Vec<u8>> {
    let mut at = 0;
    let varint = |at: &mut usize| {
        let (mut value, mut shift) = (0u64, 0);
        loop {
            let byte = *message.get(*at)?;
            *at += 1;
            value |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Some(value);
            }
            shift += 7;
        }
    };
    while at < message.len() {
        let key = varint(&mut at)?;
        match key & 7 {
            0 => {
                varint(&mut at)?;
            }
            2 => {
                let length = usize::try_from(varint(&mut at)?).unwrap();
                let value = message.get(at..at + length)?;
                if key >> 3 == wanted {
                    return Some(value.to_vec());
                }
                at += length;
            }
            _ => return None,
        }
    }
    None
}

/// Three servers behind jackstay, and one beside it that nothing happens to.
struct Rig {
    world: World,
    reference: ApiServerHandle,
    proxy: Proxy,
    through: Client,
    direct: Client,
    written: usize,
}

impl Rig {
    async fn new() -> Self {
        let world = World::new(3);
        world.cluster.set_bookmark_interval(Duration::from_millis(200));
        let options = Options::named("reference");
        let reference = apiserver::start(&world.cluster, &world.certs.pki, options).unwrap();
        let proxy = world.start().await;
        let through = proxy.client(&world.certs.credentials()).await;
        let direct = Client::connect(reference.addr, &world.certs.credentials()).await.unwrap();
        Self { world, reference, proxy, through, direct, written: 0 }
    }

    /// Changes of every kind.
    async fn write(&mut self, count: usize) {
        for _ in 0..count {
            let n = self.written;
            self.written += 1;
            let name = format!("m{}", n / 4);
            let path = format!("{MAPS}/{name}");
            let label = (n % 9).to_string();
            let reply = match n % 4 {
                0 => self.direct.post(MAPS, &map(&name, &label)).await,
                3 if n % 8 == 3 => self.direct.request(Method::DELETE, &path, &[], "").await,
                _ => self.direct.put(&path, &map(&name, &label)).await,
            };
            let reply = reply.unwrap();
            assert!(reply.status.is_success(), "{n}: {:?}", reply.body);
        }
    }

    async fn follow(&self, from: u64) -> Vec<(&'static str, Follower, Follower)> {
        let mut pairs = Vec::new();
        for (name, path, query, accept) in WAYS {
            let version =
                if name == "initial" { String::new() } else { format!("&resourceVersion={from}") };
            let path = format!("{path}?watch=1{version}{query}");
            let ours = Follower::start(&self.through, &path, accept).await;
            let theirs = Follower::start(&self.direct, &path, accept).await;
            pairs.push((name, ours, theirs));
        }
        pairs
    }
}

/// Waits until ours has what the reference has, then compares.
async fn agree(pairs: &[(&'static str, Follower, Follower)], patience: Duration, after: &str) {
    for (name, ours, theirs) in pairs {
        wait::until_ok(patience, "both have seen the same", async || {
            let (got, wanted) = (ours.events(), theirs.events());
            assert_eq!(ours.end(), None, "{name} after {after}: the stream ended");
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

/// The reference has seen everything that was written.
async fn settled(pairs: &[(&'static str, Follower, Follower)], last: &str) {
    until("the reference has seen the last change", async || {
        let seen = |(name, _, theirs): &(&str, Follower, Follower)| {
            *name == "selected" || theirs.events().iter().any(|event| event.1 == last)
        };
        pairs.iter().all(seen)
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn through_many_faults() {
    let mut rig = Rig::new().await;
    let faults = if crate::support::long() { 240 } else { 60 };
    let mut slowest = (Duration::ZERO, "");
    // A watch is resumed twelve times a minute and then left to its client: new ones long before
    // that, since a busy machine adds losses of its own.
    for first in (0..faults).step_by(6) {
        rig.write(8).await;
        let pairs = rig.follow(rig.world.cluster.version()).await;
        for fault in first..first + 6 {
            rig.write(5).await;
            let server = &rig.world.servers[fault % 3];
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
                    server.hold_watches(true);
                    "a cache that lags, then reset connections"
                }
                _ => {
                    server.goaway();
                    "GOAWAY"
                }
            };
            rig.write(5).await;
            if fault % 5 == 3 {
                rig.world.servers[fault % 3].reset_connections();
            }
            let start = Instant::now();
            let marker = format!("end-{fault}");
            let reply = rig.direct.post(MAPS, &map(&marker, "1")).await.unwrap();
            assert!(reply.status.is_success());
            settled(&pairs, &marker).await;
            let server = &rig.world.servers[fault % 3];
            server.hold_watches(false);
            agree(&pairs, Duration::from_secs(6), name).await;
            slowest = slowest.max((start.elapsed(), name));
            if !server.is_running() {
                server.restart().unwrap();
                rig.proxy.ready(3).await;
            }
        }
    }
    let resumed = rig.proxy.metric("jackstay_watch_resumes_total{outcome=\"resumed\"").await;
    println!(
        "{faults} faults, {} ways to watch, {resumed} resumes, 0 lost, 0 twice; caught up after {:?} \
         at most ({})",
        WAYS.len(),
        slowest.0,
        slowest.1
    );
    assert!(resumed >= faults as f64, "{resumed} resumes");
}

/// From a fault to the next event, on a watch that was delivering.
async fn silence(
    what: &str,
    promised: Duration,
    fault: impl FnOnce(&World, &[FaultyRelay], usize),
) {
    let world = World::new(3);
    let (holes, proxy) = world.start_behind_holes().await;
    let client = proxy.client(&world.certs.credentials()).await;
    let version = world.cluster.version();
    let path = format!("{MAPS}?watch=1&resourceVersion={version}");
    let follower = Follower::start(&client, &path, "application/json").await;
    until("it delivers", async || {
        world
            .cluster
            .create(
                jackstay::demo::apiserver::kinds::find("", "v1", "configmaps").unwrap(),
                "default",
                map(&format!("before-{}", world.cluster.version()), "1"),
                false,
            )
            .unwrap();
        follower.events().len() > 5
    })
    .await;
    let carrier = world
        .servers
        .iter()
        .position(|server| server.counters().watches.load(std::sync::atomic::Ordering::Relaxed) > 0)
        .unwrap();
    let start = Instant::now();
    fault(&world, &holes, carrier);
    let kind = jackstay::demo::apiserver::kinds::find("", "v1", "configmaps").unwrap();
    world.cluster.create(kind, "default", map("after", "1"), false).unwrap();
    let seen = wait::within(2 * promised, async || {
        assert_eq!(follower.end(), None, "{what}: the stream ended");
        follower.events().iter().any(|event| event.1 == "after")
    });
    let seen = seen.await;
    println!("{what}: silent for {:?} (promised {promised:?})", start.elapsed());
    assert!(seen, "{what}: silent for more than twice of what is promised");
    world.servers[carrier].cont();
    holes[carrier].heal();
    // What was held back arrives now: nothing of it reaches the client.
    world.cluster.create(kind, "default", map("last", "1"), false).unwrap();
    until("the last event", async || follower.events().iter().any(|e| e.1 == "last")).await;
    let versions: Vec<u64> = follower.events().iter().map(|e| e.2.parse().unwrap()).collect();
    assert!(versions.windows(2).all(|pair| pair[0] < pair[1]), "{versions:?}");
    assert_eq!(versions.len() as u64, world.cluster.version() - version, "lost or invented");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn silence_after_a_kill() {
    silence("a killed apiserver", DELIVERING, |world, _, at| world.servers[at].kill()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn silence_after_a_reset() {
    silence("a reset flow", DELIVERING, |_, holes, at| {
        holes[at].reset_all();
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn silence_after_a_stop() {
    silence("a stopped apiserver", Duration::from_secs(6), |world, _, at| {
        world.servers[at].stop();
    })
    .await;
}

/// The relay's kernel goes on to acknowledge: to us it looks like a stopped process.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn silence_after_a_hole() {
    silence("a flow that falls silent", Duration::from_secs(6), |_, holes, at| {
        holes[at].silence_all(Direction::Both);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn gone_on_one_peer_is_invisible_and_gone_everywhere_is_a_clean_end() {
    let mut rig = Rig::new().await;
    rig.write(4).await;
    for round in 0..4 {
        let version = rig.world.cluster.version();
        let path = format!("{MAPS}?watch=1&resourceVersion={version}");
        let pairs = vec![(
            "json",
            Follower::start(&rig.through, &path, "application/json").await,
            Follower::start(&rig.direct, &path, "application/json").await,
        )];
        rig.write(4).await;
        agree(&pairs, Duration::from_secs(5), "the start").await;
        let watches = |server: &ApiServerHandle| {
            server.counters().watches.load(std::sync::atomic::Ordering::Relaxed)
        };
        let carrier = rig.world.servers.iter().position(|s| watches(s) > 0).unwrap();
        rig.world.servers[carrier].hold_watches(true);
        rig.write(4).await;
        // Its cursor is older than what these two still know.
        let everywhere = round == 3;
        for (index, server) in rig.world.servers.iter().enumerate() {
            if index == (carrier + 1) % 3 || everywhere {
                server.compact();
            }
        }
        rig.world.servers[carrier].reset_connections();
        if !everywhere {
            // It may well take the watch again: its own history is long enough.
            rig.world.servers[carrier].hold_watches(false);
        }
        if everywhere {
            until("the watch ends", async || pairs[0].1.end().is_some()).await;
            assert_eq!(pairs[0].1.end(), Some(Ok(())), "410 everywhere: one clean end");
            let events = pairs[0].1.events();
            assert!(events.iter().all(|event| event.0 != "ERROR"), "{events:?}");
        } else {
            if round % 2 == 0 {
                // Only the two others can take it.
                rig.world.servers[carrier].kill();
            }
            agree(&pairs, Duration::from_secs(5), "410 on one peer").await;
            if !rig.world.servers[carrier].is_running() {
                rig.world.servers[carrier].restart().unwrap();
                rig.proxy.ready(3).await;
            }
        }
        rig.world.servers[carrier].hold_watches(false);
        drop(pairs);
        until("the watches are gone", async || rig.world.servers.iter().all(|s| watches(s) == 0))
            .await;
    }
    let _ = &rig.reference;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn an_end_by_the_server_is_passed_on() {
    let mut rig = Rig::new().await;
    rig.write(4).await;
    let pairs = rig.follow(rig.world.cluster.version()).await;
    rig.write(4).await;
    settled(&pairs, "m1").await;
    agree(&pairs, Duration::from_secs(5), "the start").await;
    rig.world.servers.iter().for_each(ApiServerHandle::end_watches);
    for (name, ours, _) in &pairs {
        until("the watch ends", async || ours.end().is_some()).await;
        assert_eq!(ours.end(), Some(Ok(())), "{name}");
    }
    assert!(rig.proxy.metric("jackstay_watch_resumes_total{outcome=\"resumed\"").await < 1.0);
}

/// A partial state must not look complete: a watch that was still listing is reset.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_watch_that_was_still_listing_is_reset() {
    let mut rig = Rig::new().await;
    rig.write(6).await;
    let path = format!("{MAPS}?watch=1");
    let follower = Follower::start(&rig.through, &path, "application/json").await;
    until("something came", async || !follower.events().is_empty()).await;
    rig.world.servers.iter().for_each(ApiServerHandle::reset_connections);
    until("the watch ends", async || follower.end().is_some()).await;
    assert!(matches!(follower.end(), Some(Err(_))), "{:?}", follower.end());
}

/// "No more" is no loss: what runs on the connection runs on.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_goaway_of_a_healthy_server_moves_no_watch() {
    let world = World::new(2);
    let proxy = world
        .start_with(|config| {
            *config = patient(config.clone());
            config.upstreams[0].rebalance = false;
        })
        .await;
    let client = proxy.client(&world.certs.credentials()).await;
    let version = world.cluster.version();
    let path = format!("{MAPS}?watch=1&resourceVersion={version}");
    let follower = Follower::start(&client, &path, "application/json").await;
    let watches = |server: &ApiServerHandle| {
        server.counters().watches.load(std::sync::atomic::Ordering::Relaxed)
    };
    until("the watch runs", async || world.servers.iter().any(|s| watches(s) == 1)).await;
    let carrier = world.servers.iter().find(|server| watches(server) == 1).unwrap();
    carrier.goaway();
    until("its connection drains", async || {
        let endpoints = proxy.endpoints().await;
        endpoints
            .iter()
            .flat_map(|e| e["connections"].as_array().unwrap())
            .any(|connection| connection["state"] == "draining" && connection["watches"] == 1)
    })
    .await;
    let kind = jackstay::demo::apiserver::kinds::find("", "v1", "configmaps").unwrap();
    for n in 0..20 {
        world.cluster.create(kind, "default", map(&format!("after-{n}"), "1"), false).unwrap();
        until("an event comes", async || follower.events().len() == n + 1).await;
    }
    assert_eq!(watches(carrier), 1, "it has left");
    assert!(proxy.metric("jackstay_watch_resumes_total").await < 1.0);
}

/// Groups that are not built in resume where the configuration says so, and nowhere else.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn groups_that_are_said_to_resume() {
    let event = |name: &str, version: u32| {
        format!(
            "{{\"type\":\"ADDED\",\"object\":{{\"kind\":\"Thing\",\"apiVersion\":\"example.com/v1\",\
             \"metadata\":{{\"name\":\"{name}\",\"resourceVersion\":\"{version}\"}}}}}}\n"
        )
    };
    for listed in [true, false] {
        let certs = Certs::new();
        let peers = Peers::start(&certs, 2);
        let mut config = patient(certs.config(&peers.addresses));
        if listed {
            terminate(&mut config).resume_groups = vec!["example.com".into()];
        }
        let proxy = certs.start(config);
        proxy.ready(2).await;
        let client = proxy.client(&certs.credentials()).await;
        peers.script.usually(Reply::ok(&event("b", 7)));
        peers.script.play([Act::PartlyCut(Reply::ok(&event("a", 6)))]);
        let path = "/apis/example.com/v1/namespaces/default/things?watch=1&resourceVersion=5";
        let mut got = Vec::new();
        // A head that is followed by a reset at once may be lost with it.
        let sent = soon("a head", client.send(Method::GET, path, &[], "")).await;
        if let Ok(response) = sent {
            let mut body = response.into_body();
            while let Ok(Some(data)) = soon("the end", next_data(&mut body)).await {
                got.extend_from_slice(&data);
            }
        }
        let (first, second) = (event("a", 6).into_bytes(), event("b", 7).into_bytes());
        if listed {
            assert_eq!(got, [first, second].concat());
        } else {
            assert!(first.starts_with(&got), "{:?}", String::from_utf8_lossy(&got));
        }
        assert_eq!(peers.script.seen().len(), if listed { 2 } else { 1 });
    }
}

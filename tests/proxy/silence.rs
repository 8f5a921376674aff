//! Connections that do not answer for a while: a process that is stopped, a path that is lost. What
//! can go on elsewhere does, what cannot waits, and operators see which it is.

use crate::peer::Peers;
use crate::support::stopwatch::Stopwatch;
use crate::support::{Certs, MAPS, Proxy, World, map, pass, soon, until};
use crate::watches::Follower;
use http::Method;
use hyper::body::Incoming;
use jackstay::demo::client::{Client, Reply, next_data};
use jackstay::demo::faulty_relay::FaultyRelay;
use serde_json::{Value, json};
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

const PODS: &str = "/api/v1/namespaces/default/pods";
const LOG: &str = "/api/v1/namespaces/default/pods/p/log?follow=true";
/// Promised: a write in flight on a stopped process ends within this time.
const WRITE_ENDS: Duration = Duration::from_secs(8);

/// The reads of a followed log, as lines.
struct Log {
    body: Incoming,
    text: String,
    read: usize,
}

impl Log {
    async fn start(client: &Client) -> Self {
        let pod = json!({ "apiVersion": "v1", "kind": "Pod", "metadata": { "name": "p" } });
        assert_eq!(soon("a pod", client.post(PODS, &pod)).await.unwrap().status, 201);
        let sent = client.send(Method::GET, LOG, &[], "");
        let response = soon("the head of a log", sent).await.unwrap();
        assert_eq!(response.status(), 200);
        Self { body: response.into_body(), text: String::new(), read: 0 }
    }

    /// The number of the next line, or how the log ended.
    async fn next(&mut self) -> Result<u64, String> {
        loop {
            if let Some((line, _)) = self.text[self.read..].split_once('\n') {
                self.read += line.len() + 1;
                return Ok(line.split(' ').nth(1).unwrap().parse().unwrap());
            }
            match next_data(&mut self.body).await {
                Ok(Some(data)) => self.text.push_str(std::str::from_utf8(&data).unwrap()),
                Ok(None) => return Err("a clean end".to_owned()),
                Err(error) => return Err(error.to_string()),
            }
        }
    }
}

/// A data plane before these servers, whose paths can be lost.
async fn through_holes(world: &World, tunnel_dead_after: Duration) -> (Vec<FaultyRelay>, Proxy) {
    let holes: Vec<_> =
        world.servers.iter().map(|server| FaultyRelay::start(server.addr).unwrap()).collect();
    let addresses: Vec<_> = holes.iter().map(|hole| hole.addr).collect();
    let mut config = world.certs.config(&addresses);
    config.upstreams[0].health.tunnel_dead_after = tunnel_dead_after;
    config.upstreams[0].rebalance = false;
    let proxy = world.certs.start(config);
    proxy.ready(holes.len()).await;
    (holes, proxy)
}

fn lose(holes: &[FaultyRelay]) {
    let lost: usize = holes.iter().map(|hole| hole.lose_all().unwrap()).sum();
    assert!(lost > 0);
}

/// The open streams of each connection of clients in this state.
async fn in_state(proxy: &Proxy, state: &str) -> Vec<u64> {
    let endpoints = proxy.endpoints().await;
    let connections = endpoints.iter().flat_map(|e| e["connections"].as_array().unwrap());
    let here = connections.filter(|c| c["state"] == state && c["class"] != "probe");
    here.map(|c| c["streams"].as_u64().unwrap()).collect()
}

async fn changes(proxy: &Proxy) -> Vec<Value> {
    proxy.json("/events").await["events"].as_array().unwrap().clone()
}

/// Its kernel takes what fits into its buffers, and then closes its window.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn large_write_survives_a_process_that_is_stopped_for_3_s() {
    let world = World::new(1);
    let proxy = world.start().await;
    let client = proxy.client(&world.certs.credentials()).await;
    let large = |name: &str| {
        let mut object = map(name, "1");
        object["data"]["large"] = "x".repeat(700_000).into();
        object
    };
    // It is the first: each one that is read makes its kernel's buffer larger.
    world.servers[0].stop();
    let stopped = async {
        // The length of the fault.
        pass(Duration::from_secs(3)).await;
        world.servers[0].cont();
    };
    let (object, small) = (large("large"), map("small", "1"));
    let writes = async { tokio::join!(client.post(MAPS, &object), client.post(MAPS, &small)) };
    let both = async { tokio::join!(writes, stopped) };
    let ((large, small), ()) = soon("both writes", both).await;
    let large = large.unwrap();
    assert_eq!(large.status, 201, "{:?}", large.body);
    assert_eq!(small.unwrap().status, 201);
    assert_eq!(proxy.lost_connections().await, [""; 0]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn write_in_flight_on_a_stopped_process_ends_with_an_unknown_fate() {
    let world = World::new(2);
    let proxy = world.start().await;
    let client = proxy.client(&world.certs.credentials()).await;
    let object = map("a", "1");
    stop_below(&world, &proxy, client.post(MAPS, &object)).await;
}

/// Its connection is its own, and its kernel acknowledges: what is known of the process is known by
/// the other connections to it.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn upgrade_without_an_answer_on_a_stopped_process_ends_with_an_unknown_fate() {
    let world = World::new(2);
    let proxy = world.start().await;
    let client = Client::connect_http1(proxy.addr, &world.certs.credentials()).await.unwrap();
    let path = "/api/v1/namespaces/default/pods/p/exec?command=sh";
    let headers = [("connection", "Upgrade"), ("upgrade", "SPDY/3.1")];
    stop_below(&world, &proxy, client.request(Method::POST, path, &headers, "")).await;
}

/// Stops the process that has got this request and not answered it.
async fn stop_below(
    world: &World,
    proxy: &Proxy,
    write: impl Future<Output = std::io::Result<Reply>>,
) {
    world.servers.iter().for_each(|server| server.hang(true));
    let here = |at: usize| {
        let name = world.servers[at].name();
        let writes = world.cluster.audit().select(|r| r.server == name && r.verb == "create");
        !writes.is_empty()
    };
    let stop = async {
        until("the write is in flight", async || here(0) || here(1)).await;
        world.servers[usize::from(here(1))].stop();
        Stopwatch::start()
    };
    let both = tokio::time::timeout(4 * WRITE_ENDS, async { tokio::join!(write, stop) });
    let (reply, stopped) = both.await.expect("the write ends");
    let (reply, took) = (reply.unwrap(), stopped.elapsed());
    println!("the write ended {took:?} after the stop (promised {WRITE_ENDS:?})");
    assert_eq!(reply.status, 502, "{:?}", reply.body);
    assert!(!reply.headers.contains_key("retry-after"));
    let message = reply.json()["message"].as_str().unwrap().to_owned();
    assert!(message.contains("may or may not have been carried out"), "{message}");
    assert!(message.contains("stopped: kernel answers"), "{message}");
    assert!(took < 2 * WRITE_ENDS, "{took:?}");
    // Its connection is left for that reason, and none was declared dead before. That of the readiness
    // probe may be: a probe that gets no answer ends with its connection, whenever its turn is.
    let mut dead = proxy.lost_connections().await;
    dead.retain(|lost| lost.contains(" to \"dead\""));
    assert_eq!(dead, [""; 0]);
    world.servers.iter().for_each(|server| server.hang(false));
}

/// Its log cannot be asked for again from where it was; what can go on elsewhere does so at once.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn followed_log_waits_on_a_lost_path_and_all_else_moves() {
    let world = World::new(1);
    let (holes, proxy) = through_holes(&world, Duration::from_secs(20)).await;
    let client = proxy.client(&world.certs.credentials()).await;
    let version = world.cluster.version();
    let path = format!("{MAPS}?watch=1&resourceVersion={version}");
    let watch = Follower::start(&client, &path, "application/json").await;
    let mut log = Log::start(&client).await;
    for number in 1..=4 {
        assert_eq!(soon("a line", log.next()).await, Ok(number));
    }
    lose(&holes);
    until("only the log is left on the connection", async || {
        in_state(&proxy, "unresponsive").await == [1]
    })
    .await;
    let reply = soon("a write", client.post(MAPS, &map("a", "1"))).await.unwrap();
    assert_eq!(reply.status, 201);
    until("the watch goes on elsewhere", async || watch.events().len() == 1).await;
    assert_eq!(in_state(&proxy, "unresponsive").await, [1], "the log waits");
    holes.iter().for_each(FaultyRelay::heal);
    for number in 5..=8 {
        assert_eq!(soon("a line after the blackout", log.next()).await, Ok(number));
    }
    assert_eq!(in_state(&proxy, "draining").await, [1], "it takes nothing new");
    drop(log);
    until("it is closed with its last stream", async || {
        in_state(&proxy, "draining").await.is_empty()
    })
    .await;
    assert_eq!(watch.end(), None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn write_in_flight_on_a_lost_path_ends_while_a_log_waits() {
    let world = World::new(1);
    let (holes, proxy) = through_holes(&world, Duration::from_secs(20)).await;
    let client = proxy.client(&world.certs.credentials()).await;
    let mut log = Log::start(&client).await;
    assert_eq!(soon("a line", log.next()).await, Ok(1));
    let (name, audit) = (world.servers[0].name(), world.cluster.audit());
    world.servers[0].hang(true);
    let object = map("a", "1");
    let cut = async {
        let there = || !audit.select(|r| r.server == name && r.verb == "create").is_empty();
        until("the write is in flight", async || there()).await;
        lose(&holes);
    };
    let both = async { tokio::join!(client.post(MAPS, &object), cut) };
    let (reply, ()) = soon("the write ends", both).await;
    let reply = reply.unwrap();
    assert_eq!(reply.status, 502, "{:?}", reply.body);
    assert!(!reply.headers.contains_key("retry-after"));
    assert_eq!(in_state(&proxy, "unresponsive").await, [1], "the log waits");
    world.servers[0].hang(false);
    holes.iter().for_each(FaultyRelay::heal);
    for number in 2..=6 {
        assert_eq!(soon("a line", log.next()).await, Ok(number));
    }
}

/// The time that it has is `tunnel_dead_after`, and its end does not look complete.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn followed_log_is_reset_when_its_path_stays_lost() {
    let world = World::new(1);
    let (holes, proxy) = through_holes(&world, Duration::from_secs(4)).await;
    let client = proxy.client(&world.certs.credentials()).await;
    let mut log = Log::start(&client).await;
    assert_eq!(soon("a line", log.next()).await, Ok(1));
    lose(&holes);
    let end = loop {
        if let Err(end) = soon("the end of the log", log.next()).await {
            break end;
        }
    };
    assert_ne!(end, "a clean end");
    let told = changes(&proxy).await;
    let connection = |c: &&Value| c["detail"].as_str().unwrap().starts_with("class identity");
    let pairs = told.iter().filter(connection).map(|c| (c["from"].clone(), c["to"].clone()));
    let pairs: Vec<_> = pairs.collect();
    assert!(pairs.contains(&("unresponsive".into(), "dead".into())), "{pairs:?}");
}

/// State, reason and log follow the first evidence, not the last.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn stopped_apiserver_is_shown_as_suspect_before_its_connections_are_given_up() {
    let world = World::new(2);
    let proxy = world.start().await;
    let address = world.servers[0].addr.to_string();
    let here = async || {
        let endpoints = proxy.endpoints().await;
        endpoints.into_iter().find(|e| e["address"] == *address).unwrap()
    };
    world.servers[0].stop();
    until("it is suspect", async || here().await["state"] == "suspect").await;
    let reason = here().await["reason"].as_str().unwrap().to_owned();
    assert!(reason.starts_with("PING unanswered on every connection"), "{reason}");
    let drains = |c: &Value| {
        let detail = c["detail"].as_str().unwrap();
        detail.starts_with("class identity") && c["to"] == "draining"
    };
    until("its connections are given up", async || changes(&proxy).await.iter().any(drains)).await;
    let told = changes(&proxy).await;
    let of_it = told.iter().filter(|c| c["kind"] == "endpoint" && c["name"] == *address);
    let suspect: Vec<_> = of_it.filter(|c| c["to"] == "suspect").collect();
    assert_eq!(suspect.len(), 1, "one line: {suspect:?}");
    assert_eq!((&suspect[0]["from"], &suspect[0]["bad"]), (&"ready".into(), &true.into()));
    let drains = told.iter().find(|c| drains(c)).unwrap();
    assert!(suspect[0]["seq"].as_u64() < drains["seq"].as_u64(), "{told:?}");
    until("its state says why it is not connected", async || {
        let here = here().await;
        let reason = here["reason"].as_str().unwrap();
        here["state"] == "connecting" && reason.contains("stopped: kernel answers")
    })
    .await;
    world.servers[0].cont();
    proxy.ready(2).await;
}

/// An apiserver closes a connection that has been idle for 90 s: nothing has died of that.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn idle_connection_that_its_server_closes_is_no_change_worth_a_line() {
    let certs = Certs::new();
    let peers = Peers::start(&certs, 1);
    let proxy = certs.start(certs.config(&peers.addresses));
    proxy.ready(1).await;
    let client = proxy.client(&certs.credentials()).await;
    assert_eq!(client.get(MAPS).await.unwrap().status, 200);
    let before = peers.script.accepted.load(Relaxed);
    peers.script.leave.store(true, Relaxed);
    until("it is closed and replaced", async || {
        let (accepted, ended) = (&peers.script.accepted, &peers.script.ended);
        accepted.load(Relaxed) > before && ended.load(Relaxed) >= 1
    })
    .await;
    proxy.ready(1).await;
    assert_eq!(proxy.lost_connections().await, [""; 0]);
    assert_eq!(client.get(MAPS).await.unwrap().status, 200);
}

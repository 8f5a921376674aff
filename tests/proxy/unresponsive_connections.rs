//! Upstream connections that do not respond for a while, because the process is stopped or the path is lost.
//! Requests that another connection can serve leave, and the others wait. `/status` shows whether the process is
//! stopped or the path is lost.

use crate::scripted_peer::setup_with;
use crate::support::stopwatch::Stopwatch;
use crate::support::watch_recorder::WatchRecorder;
use crate::support::{CONFIGMAPS, Proxy, TestCluster, config_map, pause, soon, until};
use http::Method;
use hyper::body::Incoming;
use jackstay::config::Config;
use jackstay_apiserver::client::{Client, Reply, next_data};
use jackstay_apiserver::faulty_relay::FaultyRelay;
use serde_json::{Value, json};
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

const PODS: &str = "/api/v1/namespaces/default/pods";
const LOG: &str = "/api/v1/namespaces/default/pods/p/log?follow=true";
/// The promised limit for a write in flight on a stopped process.
const WRITE_ENDS: Duration = Duration::from_secs(8);

/// A followed log, read line by line.
struct Log {
    body: Incoming,
    text: String,
    /// The number of bytes of `text` that [`Log::next`] has returned.
    read: usize,
}

impl Log {
    /// Creates a pod and follows its log.
    async fn start(client: &Client) -> Self {
        let pod = json!({ "apiVersion": "v1", "kind": "Pod", "metadata": { "name": "p" } });
        assert_eq!(soon("a pod", client.post(PODS, &pod)).await.unwrap().status, 201);
        let sent = client.send(Method::GET, LOG, &[], "");
        let response = soon("the head of a log", sent).await.unwrap();
        assert_eq!(response.status(), 200);
        Self { body: response.into_body(), text: String::new(), read: 0 }
    }

    /// The number of the next line, or an error when the log has ended.
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

/// Relays in front of the servers, and jackstay with this `tunnel_dead_after` in seconds and without
/// rebalancing.
async fn start(cluster: &TestCluster, tunnel_dead_after: u64) -> (Vec<FaultyRelay>, Proxy) {
    let change = |config: &mut Config| {
        config.upstreams[0].health.tunnel_dead_after = Duration::from_secs(tunnel_dead_after);
        config.upstreams[0].rebalance = false;
    };
    cluster.start_behind_relays(change).await
}

/// Makes the relays drop all packets of the present flows.
fn lose(relays: &[FaultyRelay]) {
    let lost: usize = relays.iter().map(|relay| relay.drop_all_packets().unwrap()).sum();
    assert!(lost > 0);
}

/// The number of open streams on each connection in this state, except those of the prober.
async fn streams_in_state(proxy: &Proxy, state: &str) -> Vec<u64> {
    let endpoints = proxy.endpoints().await;
    let connections = endpoints.iter().flat_map(|e| e["connections"].as_array().unwrap());
    let in_state = connections.filter(|c| c["state"] == state && c["class"] != "probe");
    in_state.map(|c| c["streams"].as_u64().unwrap()).collect()
}

/// The kernel of the stopped process buffers a part of the body, and then closes its window.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn large_write_survives_a_process_that_is_stopped_for_3_s() {
    let cluster = TestCluster::new(1);
    let proxy = cluster.start().await;
    let client = proxy.client().await;
    let large = |name: &str| {
        let mut object = config_map(name, "1");
        object["data"]["large"] = "x".repeat(700_000).into();
        object
    };
    // This must be the first write, because the kernel enlarges the receive buffer when the process reads.
    cluster.servers[0].stop();
    let stopped = async {
        // The length of the fault.
        pause(Duration::from_secs(3)).await;
        cluster.servers[0].cont();
    };
    let (object, small) = (large("large"), config_map("small", "1"));
    let writes =
        async { tokio::join!(client.post(CONFIGMAPS, &object), client.post(CONFIGMAPS, &small)) };
    let both = async { tokio::join!(writes, stopped) };
    let ((large, small), ()) = soon("both writes", both).await;
    let large = large.unwrap();
    assert_eq!(large.status, 201, "{:?}", large.body);
    assert_eq!(small.unwrap().status, 201);
    assert_eq!(proxy.lost_connections().await, [""; 0]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn write_in_flight_on_a_stopped_process_gets_502() {
    let cluster = TestCluster::new(2);
    let proxy = cluster.start().await;
    let client = proxy.client().await;
    let object = config_map("a", "1");
    expect_502_when_its_process_stops(&cluster, &proxy, client.post(CONFIGMAPS, &object)).await;
}

/// An upgrade has a connection of its own, on which jackstay sends no PINGs and the kernel acknowledges all data.
/// Only the other connections show that the process is stopped.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn upgrade_in_flight_on_a_stopped_process_gets_502() {
    let cluster = TestCluster::new(2);
    let proxy = cluster.start().await;
    let client = proxy.client_over(false).await;
    let path = "/api/v1/namespaces/default/pods/p/exec?command=sh";
    let headers = [("connection", "Upgrade"), ("upgrade", "SPDY/3.1")];
    expect_502_when_its_process_stops(
        &cluster,
        &proxy,
        client.request(Method::POST, path, &headers, ""),
    )
    .await;
}

/// Stops the process that has received this request, before it responds, and expects a 502.
async fn expect_502_when_its_process_stops(
    cluster: &TestCluster,
    proxy: &Proxy,
    write: impl Future<Output = std::io::Result<Reply>>,
) {
    cluster.servers.iter().for_each(|server| server.set_faults(|faults| faults.hang = true));
    let received = |at: usize| {
        let name = cluster.servers[at].name();
        let writes = cluster.state.audit().select(|r| r.server == name && r.verb == "create");
        !writes.is_empty()
    };
    let stop = async {
        until("the write is in flight", async || received(0) || received(1)).await;
        cluster.servers[usize::from(received(1))].stop();
        Stopwatch::start()
    };
    let both = tokio::time::timeout(4 * WRITE_ENDS, async { tokio::join!(write, stop) });
    let (reply, stopped) = both.await.expect("the write ends");
    let (reply, duration) = (reply.unwrap(), stopped.elapsed());
    println!("the write ended {duration:?} after the stop (promised {WRITE_ENDS:?})");
    assert_eq!(reply.status, 502, "{:?}", reply.body);
    assert!(!reply.headers.contains_key("retry-after"));
    let message = reply.json()["message"].as_str().unwrap().to_owned();
    assert!(message.contains("may or may not have been carried out"), "{message}");
    assert!(message.contains("stopped: kernel answers"), "{message}");
    assert!(duration < 2 * WRITE_ENDS, "{duration:?}");
    // Connections for clients drain and are not declared dead.
    let mut dead = proxy.lost_connections().await;
    dead.retain(|lost| lost.contains(" to \"dead\""));
    assert_eq!(dead, [""; 0]);
    cluster.servers.iter().for_each(|server| server.set_faults(|faults| faults.hang = false));
}

/// A followed log cannot be resumed at its position.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn followed_log_waits_on_a_lost_path_and_other_requests_move() {
    let cluster = TestCluster::new(1);
    let (relays, proxy) = start(&cluster, 20).await;
    let client = proxy.client().await;
    let watch = WatchRecorder::start(&client, &cluster.watch_path()).await;
    let mut log = Log::start(&client).await;
    for number in 1..=4 {
        assert_eq!(soon("a line", log.next()).await, Ok(number));
    }
    lose(&relays);
    until("only the log remains on the connection", async || {
        streams_in_state(&proxy, "unresponsive").await == [1]
    })
    .await;
    let reply = soon("a write", client.post(CONFIGMAPS, &config_map("a", "1"))).await.unwrap();
    assert_eq!(reply.status, 201);
    until("the watch continues on another connection", async || watch.events().len() == 1).await;
    assert_eq!(streams_in_state(&proxy, "unresponsive").await, [1], "the log waits");
    relays.iter().for_each(FaultyRelay::clear_faults);
    for number in 5..=8 {
        assert_eq!(soon("a line after the path is back", log.next()).await, Ok(number));
    }
    assert_eq!(
        streams_in_state(&proxy, "draining").await,
        [1],
        "the connection takes no new requests"
    );
    drop(log);
    until("the connection is closed with its last stream", async || {
        streams_in_state(&proxy, "draining").await.is_empty()
    })
    .await;
    assert_eq!(watch.end(), None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn write_in_flight_on_a_lost_path_ends_while_a_log_waits() {
    let cluster = TestCluster::new(1);
    let (relays, proxy) = start(&cluster, 20).await;
    let client = proxy.client().await;
    let mut log = Log::start(&client).await;
    assert_eq!(soon("a line", log.next()).await, Ok(1));
    let (name, audit) = (cluster.servers[0].name(), cluster.state.audit());
    cluster.servers[0].set_faults(|faults| faults.hang = true);
    let object = config_map("a", "1");
    let lose_path = async {
        let received = || !audit.select(|r| r.server == name && r.verb == "create").is_empty();
        until("the write is in flight", async || received()).await;
        lose(&relays);
    };
    let both = async { tokio::join!(client.post(CONFIGMAPS, &object), lose_path) };
    let (reply, ()) = soon("the end of the write", both).await;
    let reply = reply.unwrap();
    assert_eq!(reply.status, 502, "{:?}", reply.body);
    assert!(!reply.headers.contains_key("retry-after"));
    assert_eq!(streams_in_state(&proxy, "unresponsive").await, [1], "the log waits");
    cluster.servers[0].set_faults(|faults| faults.hang = false);
    relays.iter().for_each(FaultyRelay::clear_faults);
    for number in 2..=6 {
        assert_eq!(soon("a line", log.next()).await, Ok(number));
    }
}

/// The end of the log must not look complete.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn followed_log_is_reset_when_its_path_is_lost_for_tunnel_dead_after() {
    let cluster = TestCluster::new(1);
    let (relays, proxy) = start(&cluster, 4).await;
    let client = proxy.client().await;
    let mut log = Log::start(&client).await;
    assert_eq!(soon("a line", log.next()).await, Ok(1));
    lose(&relays);
    let end = loop {
        if let Err(end) = soon("the end of the log", log.next()).await {
            break end;
        }
    };
    assert_ne!(end, "a clean end");
    let events = proxy.events().await;
    let of_identity = |e: &&Value| e["detail"].as_str().unwrap().starts_with("class identity");
    let changes = events.iter().filter(of_identity).map(|e| (e["from"].clone(), e["to"].clone()));
    let changes: Vec<_> = changes.collect();
    assert!(changes.contains(&("unresponsive".into(), "dead".into())), "{changes:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn stopped_apiserver_is_shown_as_suspect_before_its_connections_drain() {
    let cluster = TestCluster::new(2);
    let proxy = cluster.start().await;
    let address = cluster.servers[0].addr.to_string();
    let endpoint = async || proxy.endpoint(cluster.servers[0].addr).await;
    let before = proxy.events().await.iter().filter_map(|event| event["seq"].as_u64()).max();
    cluster.servers[0].stop();
    until("the endpoint is suspect", async || endpoint().await["state"] == "suspect").await;
    let reason = endpoint().await["reason"].as_str().unwrap().to_owned();
    assert!(reason.starts_with("PING unanswered on every connection"), "{reason}");
    let is_drain = |event: &Value| {
        let detail = event["detail"].as_str().unwrap();
        detail.starts_with("class identity") && event["to"] == "draining"
    };
    until("its connections drain", async || proxy.events().await.iter().any(is_drain)).await;
    let events = proxy.events().await;
    let of_endpoint = events.iter().filter(|e| e["kind"] == "endpoint" && e["name"] == *address);
    let of_endpoint = of_endpoint.filter(|event| event["seq"].as_u64() > before);
    let suspect: Vec<_> = of_endpoint.filter(|event| event["to"] == "suspect").collect();
    assert_eq!(suspect.len(), 1, "expected one event: {suspect:?}");
    assert_eq!((&suspect[0]["from"], &suspect[0]["bad"]), (&"ready".into(), &true.into()));
    let drain = events.iter().find(|event| is_drain(event)).unwrap();
    assert!(suspect[0]["seq"].as_u64() < drain["seq"].as_u64(), "{events:?}");
    until("the reason says that the process is stopped", async || {
        let endpoint = endpoint().await;
        let reason = endpoint["reason"].as_str().unwrap();
        endpoint["state"] == "connecting" && reason.contains("stopped: kernel answers")
    })
    .await;
    cluster.servers[0].cont();
    proxy.wait_connected(2).await;
}

/// An apiserver closes connections that have been idle for 90 s. This is no failure and must not appear in
/// `/events`.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn idle_connection_that_its_server_closes_is_no_event() {
    let (peers, proxy, client) = setup_with(1, |_| {}).await;
    assert_eq!(client.get(CONFIGMAPS).await.unwrap().status, 200);
    let before = peers.accepted.load(Relaxed);
    peers.goaway_on_ping.store(true, Relaxed);
    until("the connection is closed and replaced", async || {
        let (accepted, ended) = (&peers.accepted, &peers.ended);
        accepted.load(Relaxed) > before && ended.load(Relaxed) >= 1
    })
    .await;
    proxy.wait_connected(1).await;
    assert_eq!(proxy.lost_connections().await, [""; 0]);
    assert_eq!(client.get(CONFIGMAPS).await.unwrap().status, 200);
}

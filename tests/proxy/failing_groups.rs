//! API groups that one apiserver cannot serve although it is healthy: requests of the group go to other endpoints, and built-in
//! groups are not affected.

use crate::scripted_peer::{Action, Reply, setup};
use crate::support::{CONFIGMAPS, Proxy, TestCluster, join_all, soon, until, without_suspicion};
use http::Method;
use jackstay_apiserver::client::Client;
use jackstay_apiserver::{RequestHook, ScriptedResponse};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

const VERSION: &str = "/apis/metrics.example.com/v1";
const LIST: &str = "/apis/metrics.example.com/v1/gauges";
const REFUSED: &str =
    "error trying to reach service: dial tcp 10.0.0.9:443: connect: connection refused\n";
const UNAVAILABLE: &str = "service unavailable\n";
const CONVERSION: &str = r#"{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure","message":"conversion webhook for example.com/v1, Kind=Gauge failed: Post \"https://c.ns.svc:443/convert?timeout=30s\": dial tcp 10.0.0.9:443: connect: connection refused","code":500}"#;
const ADMISSION: &str = r#"{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure","message":"Internal error occurred: failed calling webhook \"policy.example.com\": failed to call webhook: Post \"https://p.ns.svc:443/admit?timeout=10s\": dial tcp 10.0.0.9:443: connect: connection refused","reason":"InternalError","code":500}"#;

/// The aggregator's 503.
fn aggregator(text: &str) -> Reply {
    let mut reply = Reply::status("503", text).header("x-content-type-options", "nosniff");
    reply.headers[0] = ("content-type", "text/plain; charset=utf-8");
    reply
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn read_of_a_failing_group_is_sent_to_another_endpoint_and_a_write_is_not() {
    let watch = format!("{LIST}?watch=1&resourceVersion=5");
    let short = format!("{LIST}?timeout=1s");
    let timeout = || Reply::status("504", r#"{"kind":"Status","reason":"Timeout","code":504}"#);
    let conversion = || Reply::status("500", CONVERSION);
    // The request and the first reply; the status for the client, the number of requests, and whether the group fails.
    for (name, method, path, reply, status, requests, fails) in [
        ("list", Method::GET, LIST, aggregator(REFUSED), 200, 2, true),
        ("watch", Method::GET, &*watch, aggregator(REFUSED), 200, 2, true),
        ("discovery", Method::GET, VERSION, aggregator(REFUSED), 200, 2, true),
        ("list, unavailable", Method::GET, LIST, aggregator(UNAVAILABLE), 200, 2, false),
        ("list, timeout", Method::GET, LIST, timeout(), 200, 2, true),
        ("list, own timeout", Method::GET, &*short, timeout(), 504, 1, false),
        ("list, conversion", Method::GET, LIST, conversion(), 200, 2, true),
        ("list, own 503", Method::GET, LIST, Reply::status("503", "{}"), 503, 1, false),
        ("list, own 500", Method::GET, LIST, Reply::status("500", "{}"), 500, 1, false),
        ("create", Method::POST, LIST, aggregator(REFUSED), 503, 1, true),
        ("delete", Method::DELETE, LIST, aggregator(UNAVAILABLE), 503, 1, false),
        ("built-in list", Method::GET, CONFIGMAPS, aggregator(REFUSED), 503, 1, false),
        ("built-in list, timeout", Method::GET, CONFIGMAPS, timeout(), 504, 1, false),
        ("all groups", Method::GET, "/apis", aggregator(REFUSED), 503, 1, false),
    ] {
        let (peers, proxy, client) = setup(2).await;
        peers.set_default(Reply::ok("{}"));
        peers.set_actions([Action::Answer(reply)]);
        let body = if method == Method::POST { "{}" } else { "" };
        let received = soon(name, client.request(method, path, &[], body)).await.unwrap();
        let sent = peers.requests();
        assert_eq!((received.status.as_u16(), sent.len()), (status, requests), "{name}");
        let proxy_status = proxy.status().await;
        let failing = proxy_status["upstreams"][0]["failing_groups"].as_array().unwrap();
        assert_eq!(failing.len(), usize::from(fails), "{name}: {failing:?}");
        if requests == 2 {
            assert_ne!(sent[0].peer, sent[1].peer, "{name}");
        }
    }
}

/// Two endpoints answer all requests so. Each request after the first one is sent once.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn group_that_fails_everywhere_gets_each_request_once() {
    const REQUESTS: usize = 500;
    for (text, most) in [(REFUSED, 9), (UNAVAILABLE, 50)] {
        let (peers, _proxy, client) = setup(2).await;
        peers.set_default(aggregator(text));
        peers.set_actions([]);
        for _ in 0..REQUESTS {
            let reply = soon("a list", client.request(Method::GET, LIST, &[], "")).await.unwrap();
            assert_eq!((reply.status.as_u16(), &*reply.body), (503, text.as_bytes()));
        }
        let repeated = peers.requests().len() - REQUESTS;
        println!("{text:?}: {REQUESTS} requests, of which {repeated} were repeated");
        // Refused: the first one, and a probe of the second endpoint after each pause. Unavailable: for a second.
        assert!((1..=most).contains(&repeated), "{repeated}");
    }
}

/// For a moment, all endpoints say that the group is unavailable.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn read_of_a_group_that_is_unavailable_for_a_moment_is_sent_again() {
    let (peers, proxy, client) = setup(2).await;
    peers.set_default(Reply::ok("{}"));
    peers.set_actions(std::iter::repeat_n(Action::Answer(aggregator(UNAVAILABLE)), 4));
    let reply = soon("a list", client.request(Method::GET, LIST, &[], "")).await.unwrap();
    assert_eq!((reply.status.as_u16(), peers.requests().len()), (200, 5));
    let retried = proxy.metric("jackstay_retries_total{reason=\"group_unavailable\"}").await;
    assert!((retried - 4.0).abs() < 0.5, "{retried}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn unreachable_admission_webhook_is_named_and_its_request_is_sent_once() {
    let (peers, proxy, client) = setup(2).await;
    peers.set_default(Reply::ok("{}"));
    peers.set_actions([Action::Answer(Reply::status("500", ADMISSION))]);
    let reply =
        soon("a create", client.request(Method::POST, CONFIGMAPS, &[], "{}")).await.unwrap();
    assert_eq!((reply.status.as_u16(), &*reply.body), (500, ADMISSION.as_bytes()));
    assert_eq!(peers.requests().len(), 1);
    let status = proxy.status().await;
    let webhook = &status["upstreams"][0]["failing_webhooks"][0];
    assert_eq!(webhook["webhook"], "policy.example.com", "{webhook}");
    assert_eq!(webhook["endpoint"], peers.addresses[peers.requests()[0].peer].to_string());
    assert!(webhook["reason"].as_str().unwrap().contains("connection refused"), "{webhook}");
    let events = proxy.events().await;
    assert!(events.iter().any(|event| event["kind"] == "webhook"), "{events:?}");
}

/// Three servers that answer requests of the group by a hook, the first one with `failure` while `is_cut`.
struct Rig {
    cluster: TestCluster,
    proxy: Proxy,
    client: Client,
    /// Requests of the group that each server got.
    received: Vec<Arc<AtomicUsize>>,
}

impl Rig {
    async fn start() -> Self {
        let cluster = TestCluster::new(3);
        let proxy = cluster.start_with(without_suspicion).await;
        let client = proxy.client().await;
        let received: Vec<_> = cluster.servers.iter().map(|_| Arc::default()).collect();
        let rig = Self { cluster, proxy, client, received };
        (0..3).for_each(|server| rig.answer(server, || ScriptedResponse::status(200, "", "")));
        rig
    }

    /// The server answers requests of the group so.
    fn answer(&self, server: usize, response: fn() -> ScriptedResponse) {
        let received = Arc::clone(&self.received[server]);
        let hook: RequestHook = Arc::new(move |request| {
            request.uri.path().starts_with("/apis/").then(|| {
                received.fetch_add(1, Relaxed);
                response()
            })
        });
        self.cluster.servers[server].set_faults(|faults| faults.on_request = Some(hook));
    }

    fn received(&self, server: usize) -> usize {
        self.received[server].swap(0, Relaxed)
    }

    async fn read(&self, path: &str) -> (u16, Duration) {
        let start = Instant::now();
        let reply = soon("a read", self.client.request(Method::GET, path, &[], "")).await.unwrap();
        (reply.status.as_u16(), start.elapsed())
    }

    async fn failing(&self) -> Vec<serde_json::Value> {
        self.proxy.status().await["upstreams"][0]["failing_groups"].as_array().unwrap().clone()
    }
}

fn refused() -> ScriptedResponse {
    ScriptedResponse::text(503, REFUSED)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn endpoint_that_refuses_a_group_gets_no_request_of_it_until_it_serves_it_again() {
    let rig = Rig::start().await;
    rig.answer(0, refused);
    for _ in 0..300 {
        assert_eq!(rig.read(LIST).await.0, 200);
    }
    let refused = rig.received(0);
    assert!((1..=6).contains(&refused), "{refused} of 300 were sent there");
    assert_eq!(rig.received(1) + rig.received(2), 300);
    let failing = rig.failing().await;
    let address = rig.cluster.servers[0].addr.to_string();
    assert_eq!(failing.len(), 1, "{failing:?}");
    assert_eq!(
        (&failing[0]["endpoint"], &failing[0]["group"]),
        (&address.clone().into(), &"metrics.example.com".into())
    );
    assert_eq!(failing[0]["reason"], REFUSED.trim());
    let gauge = format!(
        "jackstay_group_failing{{upstream=\"control-plane\",endpoint=\"{address}\",group=\"metrics.example.com\"}}"
    );
    assert!((rig.proxy.metric(&gauge).await - 1.0).abs() < 0.5);
    assert_eq!(rig.proxy.endpoint(rig.cluster.servers[0].addr).await["state"], "ready");
    // Built-in groups use it as before.
    let core = rig.cluster.spread(&rig.client, "core", 90).await;
    assert_eq!(core.iter().sum::<usize>(), 90, "{core:?}");
    rig.answer(0, || ScriptedResponse::status(200, "", ""));
    until("the group works again", async || {
        assert_eq!(rig.read(LIST).await.0, 200);
        rig.failing().await.is_empty()
    })
    .await;
    assert!(rig.proxy.metric(&gauge).await.abs() < 0.5);
    let events = rig.proxy.events().await;
    let groups = events.iter().filter(|event| event["kind"] == "group");
    let states: Vec<_> = groups.map(|event| event["to"].as_str().unwrap()).collect();
    assert_eq!(states.len(), 2, "{events:?}");
    assert!(states.contains(&"fails") && states.contains(&"works"), "{states:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn read_that_an_endpoint_does_not_answer_is_asked_of_another_one() {
    let rig = Rig::start().await;
    rig.cluster.servers[0].set_faults(|faults| faults.hang_paths = &[LIST]);
    let reads = join_all((0..12).map(|_| rig.read(LIST))).await;
    assert!(reads.iter().all(|(status, _)| *status == 200), "{reads:?}");
    let slow = reads.iter().filter(|(_, time)| *time >= Duration::from_millis(900)).count();
    assert!((1..=12).contains(&slow), "{reads:?}");
    // Known from now on. Only the probes wait.
    let start = Instant::now();
    for _ in 0..100 {
        let (status, time) = rig.read(LIST).await;
        assert_eq!(status, 200);
        assert!(time < Duration::from_secs(4), "{time:?}");
    }
    println!("100 reads in {:?}", start.elapsed());
    assert_eq!(rig.proxy.endpoint(rig.cluster.servers[0].addr).await["state"], "ready");
    rig.cluster.servers[0].set_faults(|faults| faults.hang_paths = &[]);
    until("the group works again", async || {
        assert_eq!(rig.read(LIST).await.0, 200);
        rig.failing().await.is_empty()
    })
    .await;
}

/// The response head of a watch may wait for the watch cache, for 3 s with Kubernetes 1.36.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn silence_about_a_watch_does_not_show_that_the_group_fails() {
    let rig = Rig::start().await;
    rig.cluster.servers[0].set_faults(|faults| faults.hang_paths = &[LIST]);
    let path = format!("{LIST}?watch=1");
    let watches = join_all((0..12).map(|_| rig.read(&path))).await;
    assert!(watches.iter().all(|(status, _)| *status == 200), "{watches:?}");
    let slow = watches.iter().filter(|(_, time)| *time >= Duration::from_millis(900)).count();
    assert!((1..=12).contains(&slow), "no watch was sent there: {watches:?}");
    rig.received(0);
    let object = format!("{LIST}/one");
    join_all((0..200).map(|_| rig.read(&object))).await;
    assert!(rig.received(0) >= 1, "it is avoided");
}

/// A server that claims that each of 10,000 groups fails.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn failing_groups_are_bounded() {
    let rig = Rig::start().await;
    (0..3).for_each(|server| rig.answer(server, refused));
    for hundred in 0..100 {
        let read = async |number| {
            let path = format!("/apis/g{hundred}-{number}.example.com/v1/gauges");
            assert_eq!(rig.read(&path).await.0, 503);
        };
        join_all((0..100).map(read)).await;
    }
    let received: usize = (0..3).map(|server| rig.received(server)).sum();
    println!("10,000 requests, of which {} were repeated", received - 10_000);
    assert!(received <= 11_000, "{received}");
    assert_eq!(rig.cluster.spread(&rig.client, "core", 30).await.iter().sum::<usize>(), 30);
    let failing = rig.failing().await;
    assert!(failing.len() <= 3 * 256, "{}", failing.len());
    let metrics = rig.proxy.page("/metrics").await;
    let series = metrics.lines().filter(|line| line.starts_with("jackstay_group_failing{")).count();
    assert!((1..=3 * 33).contains(&series), "{series}");
    assert!(metrics.contains("group=\"other\""));
}

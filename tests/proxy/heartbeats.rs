//! A heartbeat whose outcome is unknown is looked up: its client gets the success if it was carried out, and it is sent a
//! second time if it was not. Nothing is carried out twice, and nothing else than the heartbeat is answered with a success.

use crate::scripted_peer::{Action, Reply, setup_with};
use crate::support::{TestCluster, long_form, pause, soon, until};
use http::Method;
use jackstay_apiserver::client::Client;
use jackstay_apiserver::faulty_relay::{Direction, FaultyRelay};
use jackstay_config::HeartbeatResource;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

const LEASES: &str = "/apis/coordination.k8s.io/v1/namespaces/default/leases";
/// The version of the object before the heartbeat.
const BEFORE: &str = "10";
/// The version after it.
const AFTER: &str = "11";
/// What the heartbeat contains.
const RENEWED: &str = "2026-11-30T12:00:02.000001Z";
/// What the object contains before it.
const OLD: &str = "2026-11-30T12:00:00.000001Z";

/// Four times the promise of one second.
const SETTLED_WITHIN: Duration = Duration::from_secs(4);

fn lease(version: &str, renewed: &str) -> Value {
    json!({
        "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
        "metadata": { "name": "n", "namespace": "default", "uid": "u", "resourceVersion": version },
        "spec": { "holderIdentity": "n", "leaseDurationSeconds": 40, "renewTime": renewed },
    })
}

/// An object with the value at this path replaced; null removes it.
fn with(mut object: Value, path: &str, value: Value) -> Value {
    *object.pointer_mut(path).unwrap() = value;
    object
}

/// A heartbeat whose apiserver closes the connection when it has the request.
struct Row {
    name: &'static str,
    method: Method,
    target: &'static str,
    body: String,
    /// The responses to what follows, and the failures.
    then: Vec<Action>,
    /// The status that the client gets.
    status: u16,
}

impl Row {
    fn of(name: &'static str, body: &Value, then: Vec<Action>, status: u16) -> Self {
        let target = "/apis/coordination.k8s.io/v1/namespaces/default/leases/n";
        Self { name, method: Method::PUT, target, body: body.to_string(), then, status }
    }

    /// A renewal as kubelet and client-go send it.
    fn renewal(name: &'static str, then: Vec<Action>, status: u16) -> Self {
        Self::of(name, &lease(BEFORE, RENEWED), then, status)
    }

    /// One that is not looked up.
    fn unsettled(name: &'static str, body: &Value) -> Self {
        Self::of(name, body, Vec::new(), 502)
    }
}

fn shows(object: &Value) -> Action {
    Action::Answer(Reply::ok(&object.to_string()))
}

fn refuses(status: &'static str, reason: &str) -> Action {
    let body =
        json!({ "kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason });
    Action::after_body(Action::Answer(Reply::status(status, &body.to_string())))
}

fn lost() -> Action {
    Action::after_body(Action::Close)
}

#[expect(clippy::too_many_lines, reason = "a table")]
fn rows() -> Vec<Row> {
    let (written, unwritten) = (lease(AFTER, RENEWED), lease(BEFORE, OLD));
    let accepted = || Action::after_body(shows(&written));
    let other_holder = with(written.clone(), "/spec/holderIdentity", json!("m"));
    let other_time = lease(AFTER, "2026-11-30T12:00:02.000002Z");
    let recreated = with(written.clone(), "/metadata/uid", json!("v"));
    let no_uid = with(lease(BEFORE, RENEWED), "/metadata/uid", Value::Null);
    let unnamed = with(lease(BEFORE, RENEWED), "/metadata/resourceVersion", Value::Null);
    vec![
        Row::renewal("carried out", vec![shows(&written)], 200),
        Row::renewal("not carried out", vec![shows(&unwritten), accepted()], 200),
        Row::renewal(
            "carried out later, so that the second one conflicts",
            vec![shows(&unwritten), refuses("409", "Conflict"), shows(&written)],
            200,
        ),
        Row::of("carried out, without a uid", &no_uid, vec![shows(&written)], 200),
        Row::of("not carried out, without a uid", &no_uid, vec![shows(&unwritten)], 502),
        Row::renewal("another holder", vec![shows(&other_holder)], 502),
        Row::renewal("another client of this identity", vec![shows(&other_time)], 502),
        Row::renewal("recreated", vec![shows(&recreated)], 502),
        Row::renewal("an older version", vec![shows(&lease("9", OLD))], 502),
        Row::renewal("deleted", vec![refuses("404", "NotFound")], 502),
        // An apiserver that has just started refuses, too, so another one is asked.
        Row::renewal(
            "may not be read",
            vec![refuses("403", "Forbidden"), refuses("403", "Forbidden")],
            502,
        ),
        Row::renewal("no object", vec![shows(&json!("a text"))], 502),
        Row::renewal("a body that is no JSON", vec![Action::Answer(Reply::ok("{"))], 502),
        Row::renewal(
            "deleted before the second one",
            vec![shows(&unwritten), refuses("409", "Conflict"), refuses("404", "NotFound")],
            502,
        ),
        Row::renewal(
            "another holder before the second one",
            vec![shows(&unwritten), refuses("409", "Conflict"), shows(&other_holder)],
            502,
        ),
        Row::renewal("both lost", vec![shows(&unwritten), lost(), shows(&unwritten)], 502),
        Row::renewal("the second one lost", vec![shows(&unwritten), lost(), shows(&written)], 200),
        Row::unsettled("no resourceVersion", &unnamed),
        Row::unsettled(
            "a time that another client may write",
            &lease(BEFORE, "2026-11-30T12:00:02Z"),
        ),
        Row::unsettled("no object in the request", &json!([])),
        Row::unsettled(
            "a long body",
            &with(lease(BEFORE, RENEWED), "/spec/holderIdentity", json!("n".repeat(300 << 10))),
        ),
        Row { method: Method::PATCH, ..Row::unsettled("a patch", &lease(BEFORE, RENEWED)) },
        Row {
            target: "/api/v1/namespaces/default/configmaps/n",
            ..Row::unsettled("no heartbeat", &lease(BEFORE, RENEWED))
        },
        Row {
            target: "/api/v1/nodes/n/status",
            ..Row::unsettled("the status of a node", &lease(BEFORE, RENEWED))
        },
        Row {
            target: "/api/v1/namespaces/default/endpoints/n",
            ..Row::of(
                "configured",
                &written_endpoints(BEFORE),
                vec![shows(&written_endpoints(AFTER))],
                200,
            )
        },
        Row {
            target: "/api/v1/namespaces/default/endpoints/n",
            ..Row::unsettled("configured, no resourceVersion", &written_endpoints(""))
        },
    ]
}

/// An object with the annotation of an old leader election.
fn written_endpoints(version: &str) -> Value {
    let leader = json!({ "holderIdentity": "n", "renewTime": RENEWED }).to_string();
    json!({
        "apiVersion": "v1", "kind": "Endpoints",
        "metadata": {
            "name": "n", "namespace": "default", "uid": "u", "resourceVersion": version,
            "annotations": { "control-plane.alpha.kubernetes.io/leader": leader },
        },
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn lost_heartbeat_is_answered_by_what_its_object_shows() {
    let configured = HeartbeatResource::parse("endpoints").unwrap();
    let (peers, proxy, client) = setup_with(2, |config| {
        crate::support::terminate_mode(config).heartbeats = vec![configured];
    })
    .await;
    for row in rows() {
        let name = row.name;
        proxy.wait_connected(2).await;
        let expected = 1 + row.then.len();
        peers.set_actions([vec![lost()], row.then].concat());
        let content_type = match row.method {
            Method::PATCH => "application/merge-patch+json",
            _ => "application/json",
        };
        let headers = [("content-type", content_type)];
        let sent = client.request(row.method, row.target, &headers, row.body);
        let reply = soon(name, sent).await.unwrap();
        assert_eq!(reply.status, row.status, "{name}: {:?}", reply.body);
        assert_eq!(peers.requests().len(), expected, "{name}: requests");
        // The client may repeat it on its own authority only.
        assert!(!reply.headers.contains_key("retry-after"), "{name}");
        if reply.status == 200 {
            assert_eq!(reply.json()["metadata"]["resourceVersion"], AFTER, "{name}");
        } else {
            assert_eq!(reply.json()["kind"], "Status", "{name}");
        }
    }
}

/// The connection of a heartbeat is lost while its client still sends it. The client gets its error all the same.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn heartbeat_whose_body_does_not_end_is_answered() {
    let (peers, proxy, _client) = setup_with(2, |_| {}).await;
    peers.set_actions([Action::Close]);
    let mut wire = proxy.wire(&peers.certs, "http/1.1").await;
    let head = "PUT /apis/coordination.k8s.io/v1/namespaces/default/leases/n HTTP/1.1\r\nHost: a\r\n\
                Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n{";
    wire.write_all(head.as_bytes()).await.unwrap();
    let mut status = [0; 12];
    soon("a response", wire.read_exact(&mut status)).await.unwrap();
    assert_eq!(&status, b"HTTP/1.1 502");
}

/// A client that holds a lease.
struct Holder {
    client: Client,
    lease: Value,
    /// The Audit-IDs and status codes of its renewals.
    renewals: Vec<(String, u16)>,
    slowest: Duration,
}

impl Holder {
    async fn new(client: Client, name: &str) -> Self {
        let new = json!({
            "apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": { "name": name },
            "spec": { "holderIdentity": name, "leaseDurationSeconds": 15 },
        });
        let lease = client.post(LEASES, &new).await.unwrap().json();
        Self { client, lease, renewals: Vec::new(), slowest: Duration::ZERO }
    }

    fn name(&self) -> String {
        self.lease["metadata"]["name"].as_str().unwrap().to_owned()
    }

    /// Renews the lease as leader election does, from the object of the last response.
    async fn renew(&mut self) -> u16 {
        let number = self.renewals.len();
        let id = format!("{}-{number}", self.name());
        let second = number / 1_000_000;
        let fraction = number % 1_000_000 + 1;
        let target = format!("{LEASES}/{}", self.name());
        self.lease["spec"]["renewTime"] =
            format!("2026-11-30T12:00:{second:02}.{fraction:06}Z").into();
        let headers = [("content-type", "application/json"), ("audit-id", id.as_str())];
        let sent = Instant::now();
        let body = self.lease.to_string();
        let reply = self.client.request(Method::PUT, &target, &headers, body).await.unwrap();
        self.slowest = self.slowest.max(sent.elapsed());
        let status = reply.status.as_u16();
        if status == 200 {
            let renewed = reply.json();
            assert_eq!(renewed["spec"], self.lease["spec"], "{id}");
            self.lease = renewed;
        } else {
            self.lease = self.client.get(&target).await.unwrap().json();
        }
        self.renewals.push((id, status));
        status
    }
}

/// Each renewal with a success was carried out once, and any other at most once.
fn expect_carried_out_once(cluster: &TestCluster, holders: &[Holder]) {
    let log = cluster.state.commits();
    assert_eq!(log.dropped, 0);
    let mut counts = BTreeMap::<&str, usize>::new();
    for commit in &log.commits {
        *counts.entry(commit.request.as_deref().unwrap_or_default()).or_default() += 1;
    }
    for (id, status) in holders.iter().flat_map(|holder| &holder.renewals) {
        let count = counts.get(id.as_str()).copied().unwrap_or(0);
        assert!(count <= 1, "{id} ({status}) was carried out {count} times");
        assert!(*status != 200 || count == 1, "{id} has a success and was not carried out");
    }
}

async fn holders(
    cluster: &TestCluster,
    proxy: &crate::support::Proxy,
    count: usize,
) -> Vec<Holder> {
    cluster.state.record_commits(100_000);
    let mut holders = Vec::new();
    for index in 0..count {
        holders.push(Holder::new(proxy.client().await, &format!("holder-{index}")).await);
    }
    holders
}

/// The endpoint to which the connection for heartbeats leads.
async fn heartbeat_endpoint(proxy: &crate::support::Proxy) -> Option<String> {
    let serves_heartbeats =
        |connection: &Value| connection["for_heartbeats"] == true && connection["state"] == "live";
    let endpoints = proxy.endpoints().await;
    let endpoint = endpoints
        .iter()
        .find(|endpoint| endpoint["connections"].as_array().unwrap().iter().any(serves_heartbeats));
    Some(endpoint?["address"].as_str().unwrap().to_owned())
}

/// The relay in front of the apiserver to which heartbeats are sent.
async fn relay_of_heartbeats<'a>(
    proxy: &crate::support::Proxy,
    relays: &'a [FaultyRelay],
) -> &'a FaultyRelay {
    until("heartbeats have a connection", async || heartbeat_endpoint(proxy).await.is_some()).await;
    let address = heartbeat_endpoint(proxy).await.unwrap();
    relays.iter().find(|relay| relay.addr.to_string() == address).unwrap()
}

/// All streams of all other requests are taken by uploads that do not go on.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn heartbeats_do_not_wait_for_the_streams_of_others() {
    const STREAMS: usize = 4;
    let cluster = TestCluster::new(1);
    let proxy = cluster
        .start_with(|config| {
            let connections = &mut config.upstreams[0].connections;
            (connections.min, connections.max, connections.max_streams) = (1, 1, STREAMS);
        })
        .await;
    let mut holders = holders(&cluster, &proxy, 3).await;
    until("heartbeats have a connection", async || heartbeat_endpoint(&proxy).await.is_some())
        .await;
    let mut uploads = Vec::new();
    for _ in 0..STREAMS {
        let mut wire = proxy.wire(&cluster.certs, "http/1.1").await;
        let head = "POST /api/v1/namespaces/default/configmaps HTTP/1.1\r\nHost: a\r\n\
                    Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n{";
        wire.write_all(head.as_bytes()).await.unwrap();
        uploads.push(wire);
    }
    let taken = async || {
        let connections = proxy.live_connections("identity").await;
        let others = connections.iter().find(|one| one["for_heartbeats"] == false).unwrap();
        others["streams"] == STREAMS
    };
    until("all streams are taken", taken).await;
    let reader = proxy.client().await;
    let other = soon("a read", reader.get("/api/v1/namespaces/default/pods"));
    let renewals = futures_util::future::join_all(holders.iter_mut().map(Holder::renew));
    let (other, codes) = tokio::join!(other, soon("renewals", renewals));
    assert_eq!(codes, [200; 3]);
    assert_eq!(other.unwrap().status, 429, "no other request gets the connection for heartbeats");
    let slowest = holders.iter().map(|holder| holder.slowest).max().unwrap();
    assert!(slowest < Duration::from_millis(800), "{slowest:?}");
}

/// The connections to one apiserver fall silent: first only its responses are lost, so that the renewals are carried out,
/// then the renewals themselves, which arrive when their clients have long been answered.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn renewals_on_silent_connections_are_answered() {
    const HOLDERS: usize = 12;
    for (direction, outcome) in [(Direction::ToClient, "written"), (Direction::Both, "sent_again")]
    {
        let cluster = TestCluster::new(2);
        let (relays, proxy) = cluster.start_behind_relays(|_| {}).await;
        let mut holders = holders(&cluster, &proxy, HOLDERS).await;
        let relay = relay_of_heartbeats(&proxy, &relays).await;
        let settled = format!("jackstay_settled_writes_total{{outcome=\"{outcome}\"}}");
        relay.silence_all(direction);
        let renewals = holders.iter_mut().map(Holder::renew);
        let codes = soon("renewals", futures_util::future::join_all(renewals)).await;
        assert_eq!(codes, [200; HOLDERS], "{direction:?}");
        let slowest = holders.iter().map(|holder| holder.slowest).max().unwrap();
        assert!(slowest < SETTLED_WITHIN, "{direction:?}: {slowest:?}");
        let count = proxy.metric(&settled).await;
        println!("{direction:?}: slowest {slowest:?}, {count} of {HOLDERS} {outcome}");
        assert!(count >= 1.0, "{direction:?}: no renewal was on a silent connection");
        // What was delayed arrives now.
        relay.clear_faults();
        proxy.wait_all("ready").await;
        for holder in &mut holders {
            assert_eq!(holder.renew().await, 200, "{direction:?}");
        }
        expect_carried_out_once(&cluster, &holders);
    }
}

/// The lease is deleted before its renewal, which may still arrive when its client has an answer. It stays deleted.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn renewal_of_a_deleted_lease_creates_nothing() {
    let cluster = TestCluster::new(2);
    let (relays, proxy) = cluster.start_behind_relays(|_| {}).await;
    let mut holders = holders(&cluster, &proxy, 12).await;
    let relay = relay_of_heartbeats(&proxy, &relays).await;
    let direct = Client::connect(cluster.servers[1].addr, &proxy.credentials).await.unwrap();
    for holder in &holders {
        let target = format!("{LEASES}/{}", holder.name());
        let reply = direct.request(Method::DELETE, &target, &[], "").await.unwrap();
        assert_eq!(reply.status, 200, "{:?}", reply.body);
    }
    // Just before the renewals, while the connections are not suspect yet.
    relay.silence_all(Direction::Both);
    let renewals = holders.iter_mut().map(|holder| async {
        let target = format!("{LEASES}/{}", holder.name());
        holder.lease["spec"]["renewTime"] = RENEWED.into();
        holder.client.put(&target, &holder.lease).await.unwrap().status.as_u16()
    });
    let codes = soon("renewals", futures_util::future::join_all(renewals)).await;
    assert!(codes.iter().all(|code| matches!(code, 409 | 502 | 504)), "{codes:?}");
    assert!(codes.iter().any(|code| *code != 409), "no renewal was on a silent connection");
    relay.clear_faults();
    proxy.wait_all("ready").await;
    let left = direct.get(LEASES).await.unwrap().json();
    assert_eq!(left["items"], json!([]));
}

/// One apiserver after another fails in each way. No renewal fails, and none is carried out twice.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn no_renewal_fails_under_faults() {
    const HOLDERS: usize = 16;
    const FAULTS: usize = 6;
    let rounds = if long_form() { 20 } else { 1 };
    let cluster = TestCluster::new(3);
    let (relays, proxy) = cluster
        .start_behind_relays(|config| {
            let readyz = &mut config.upstreams[0].health.readyz;
            (readyz.interval, readyz.rise) = (Duration::from_millis(200), 1);
        })
        .await;
    let mut holders = holders(&cluster, &proxy, HOLDERS).await;
    let done = [const { AtomicUsize::new(0) }; HOLDERS];
    let finished = AtomicBool::new(false);
    let renewing = holders.iter_mut().zip(&done).map(|(holder, done)| async {
        while !finished.load(Relaxed) {
            holder.renew().await;
            done.fetch_add(1, Relaxed);
            pause(Duration::from_millis(fastrand::u64(..40))).await;
        }
    });
    let counts = || done.each_ref().map(|count| count.load(Relaxed));
    // What is under way when it begins has ended.
    let renewed = async || {
        let before = counts();
        until("each lease is renewed twice", async || {
            counts().iter().zip(before).all(|(now, before)| now - before >= 2)
        })
        .await;
    };
    let faults = async {
        for fault in 0..rounds * FAULTS * cluster.servers.len() {
            let at = fault % cluster.servers.len();
            let (server, relay) = (&cluster.servers[at], &relays[at]);
            match fault / cluster.servers.len() % FAULTS {
                0 => server.kill(),
                1 => server.stop(),
                2 => server.reset_connections(),
                3 => _ = relay.silence_all(Direction::Both),
                4 => _ = relay.silence_all(Direction::ToClient),
                _ => server.goaway(),
            }
            renewed().await;
            server.cont();
            if !server.is_running() {
                server.restart().unwrap();
            }
            relay.clear_faults();
            relay.reset_all();
            proxy.wait_all("ready").await;
            renewed().await;
        }
        finished.store(true, Relaxed);
    };
    tokio::join!(faults, futures_util::future::join_all(renewing));
    expect_carried_out_once(&cluster, &holders);
    let mut codes = BTreeMap::<u16, usize>::new();
    for (_, status) in holders.iter().flat_map(|holder| &holder.renewals) {
        *codes.entry(*status).or_default() += 1;
    }
    let slowest = holders.iter().map(|holder| holder.slowest).max().unwrap();
    let mut settled = Vec::new();
    for outcome in ["written", "sent_again", "responded", "unknown"] {
        let name = format!("jackstay_settled_writes_total{{outcome=\"{outcome}\"}}");
        settled.push((outcome, proxy.metric(&name).await));
    }
    println!("{codes:?}, slowest {slowest:?}, {settled:?}");
    assert_eq!(codes.keys().collect::<Vec<_>>(), [&200]);
    assert!(!long_form() || codes[&200] >= 10_000);
    until("nothing is buffered", async || proxy.metric("jackstay_held_body_bytes").await == 0.0)
        .await;
}

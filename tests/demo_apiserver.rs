//! The demo apiserver follows the Kubernetes API rules on which other tests rely.

#![cfg(feature = "demo")]

#[path = "support/wait.rs"]
mod wait;

use bytes::Bytes;
use http::{Method, StatusCode};
use jackstay::demo::apiserver::cluster::Cluster;
use jackstay::demo::apiserver::identity::User;
use jackstay::demo::apiserver::{self, ApiServerHandle, Options, ScriptedResponse};
use jackstay::demo::client::{Client, Credentials, Watch};
use jackstay::demo::faulty_relay::{Direction, FaultyRelay};
use jackstay::demo::pki::{Pki, Subject, Validity};
use serde_json::{Value, json};
use std::pin::pin;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;
use tokio::time::timeout;
use wait::{PATIENCE, until};

const MAPS: &str = "/api/v1/namespaces/default/configmaps";
/// Time in which something must not happen.
const SHORT_WAIT: Duration = Duration::from_millis(200);

struct World {
    cluster: Cluster,
    pki: Pki,
    server: ApiServerHandle,
    admin: Credentials,
}

impl World {
    fn new() -> Self {
        let (cluster, pki) = (Cluster::new(), Pki::new("demo").unwrap());
        let server = apiserver::start(&cluster, &pki, Options::named("a")).unwrap();
        let issued = pki.client(&Subject::admin()).unwrap();
        let admin = Credentials::anonymous(&pki.ca_pem()).certificate(&issued);
        Self { cluster, pki, server, admin }
    }

    async fn client(&self) -> Client {
        Client::connect(self.server.addr, &self.admin).await.unwrap()
    }
}

fn map(name: &str, value: &str) -> Value {
    json!({ "metadata": { "name": name, "labels": { "v": value } }, "data": { "v": value } })
}

async fn next(watch: &mut Watch) -> (String, String, String) {
    let event = timeout(PATIENCE, watch.next()).await.unwrap().unwrap().expect("an event");
    let meta = &event["object"]["metadata"];
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    (text(&event["type"]), text(&meta["name"]), text(&meta["resourceVersion"]))
}

#[tokio::test]
async fn configmap_create_update_patch_delete() {
    let world = World::new();
    let client = world.client().await;
    let created = client.post(MAPS, &map("a", "1")).await.unwrap();
    assert_eq!(created.status, 201);
    assert_eq!(client.post(MAPS, &map("a", "1")).await.unwrap().json()["reason"], "AlreadyExists");

    let path = format!("{MAPS}/a");
    let mut object = created.json();
    object["data"]["v"] = "2".into();
    assert_eq!(client.put(&path, &object).await.unwrap().status, 200);
    let stale = client.put(&path, &object).await.unwrap();
    assert_eq!((stale.status.as_u16(), stale.json()["reason"].clone()), (409, "Conflict".into()));

    let headers = [("content-type", "application/merge-patch+json")];
    let patched =
        client.request(Method::PATCH, &path, &headers, r#"{"data":{"w":"3"}}"#).await.unwrap();
    assert_eq!(patched.json()["data"], json!({ "v": "2", "w": "3" }));

    let dry = client.request(Method::DELETE, &format!("{path}?dryRun=All"), &[], "").await.unwrap();
    assert_eq!(dry.status, 200);
    assert_eq!(client.get(&path).await.unwrap().status, 200, "a dry run must not delete");
    client.request(Method::DELETE, &path, &[], "").await.unwrap();
    assert_eq!(client.get(&path).await.unwrap().json()["reason"], "NotFound");

    let generated = json!({ "metadata": { "generateName": "g-" } });
    let generated = client.post(MAPS, &generated).await.unwrap().json();
    assert!(generated["metadata"]["name"].as_str().unwrap().starts_with("g-"));
    let broken = client.post(MAPS, &json!({ "metadata": "x" })).await.unwrap();
    assert_eq!(broken.status, 400);

    let only_protobuf = [("accept", "application/vnd.kubernetes.protobuf")];
    let refused = client.request(Method::GET, MAPS, &only_protobuf, "").await.unwrap();
    assert_eq!(refused.status, 406);
}

#[tokio::test]
async fn list_with_limit_returns_pages_until_compacted() {
    let world = World::new();
    let client = world.client().await;
    for name in ["a", "b", "c", "d", "e"] {
        client.post(MAPS, &map(name, name)).await.unwrap();
    }
    let (mut names, mut token) = (Vec::new(), String::new());
    loop {
        let path = format!("/api/v1/configmaps?limit=2&continue={token}");
        let page = client.get(&path).await.unwrap().json();
        let items = page["items"].as_array().unwrap();
        names.extend(items.iter().map(|i| i["metadata"]["name"].as_str().unwrap().to_owned()));
        token = page["metadata"]["continue"].as_str().unwrap_or_default().to_owned();
        if token.is_empty() {
            break;
        }
    }
    assert_eq!(names, ["a", "b", "c", "d", "e"]);
    let selected = client.get(&format!("{MAPS}?labelSelector=v%20in%20(a,c)")).await.unwrap();
    assert_eq!(selected.json()["items"].as_array().unwrap().len(), 2);
    let future = client.get(&format!("{MAPS}?resourceVersion=99999")).await.unwrap();
    assert_eq!(future.status, 504);
    let page = client.get(&format!("{MAPS}?limit=1")).await.unwrap().json();
    client.post(MAPS, &map("f", "f")).await.unwrap();
    world.cluster.compact();
    let token = page["metadata"]["continue"].as_str().unwrap();
    let late = client.get(&format!("{MAPS}?limit=1&continue={token}")).await.unwrap();
    assert_eq!(late.status, 410);
}

#[tokio::test]
async fn watch_resumes_on_another_server_until_compacted() {
    let world = World::new();
    let other = apiserver::start(&world.cluster, &world.pki, Options::named("b")).unwrap();
    let client = world.client().await;
    let other_client = Client::connect(other.addr, &world.admin).await.unwrap();

    client.post(MAPS, &map("a", "1")).await.unwrap();
    let mut all = client.watch(&format!("{MAPS}?watch=1")).await.unwrap();
    let (kind, name, version) = next(&mut all).await;
    assert_eq!((kind.as_str(), name.as_str()), ("ADDED", "a"));

    client.post(MAPS, &map("b", "2")).await.unwrap();
    assert_eq!(next(&mut all).await.1, "b");
    let path = format!("{MAPS}/a");
    client.request(Method::DELETE, &path, &[], "").await.unwrap();
    assert_eq!(next(&mut all).await.0, "DELETED");

    let resume = format!("{MAPS}?watch=1&resourceVersion={version}");
    let mut resumed = other_client.watch(&resume).await.unwrap();
    assert_eq!(next(&mut resumed).await.1, "b");
    assert_eq!(next(&mut resumed).await.0, "DELETED");
    assert!(timeout(SHORT_WAIT, resumed.next()).await.is_err(), "no further event");

    // An object that no longer matches the selector is DELETED for the watch.
    let mut selected = client.watch(&format!("{MAPS}?watch=1&labelSelector=v%3D2")).await.unwrap();
    assert_eq!(next(&mut selected).await.0, "ADDED");
    let changed = client.get(&format!("{MAPS}/b")).await.unwrap().json();
    let mut changed = changed.clone();
    changed["metadata"]["labels"]["v"] = "3".into();
    client.put(&format!("{MAPS}/b"), &changed).await.unwrap();
    assert_eq!(next(&mut selected).await.0, "DELETED");
    assert_eq!(next(&mut resumed).await.0, "MODIFIED");

    // Each server has its own history: compacted on this one, available on the other.
    world.server.compact();
    let mut gone = client.watch(&resume).await.unwrap();
    let error = timeout(PATIENCE, gone.next()).await.unwrap().unwrap().unwrap();
    assert_eq!((&error["type"], &error["object"]["code"]), (&json!("ERROR"), &json!(410)));
    assert_eq!(gone.next().await.unwrap(), None);
    assert_eq!(next(&mut other_client.watch(&resume).await.unwrap()).await.1, "b");
    world.cluster.compact();
    let mut gone = other_client.watch(&resume).await.unwrap();
    assert_eq!(next(&mut gone).await.0, "ERROR");

    // Open watches survive a compaction; the server can end them cleanly.
    client.post(MAPS, &map("z", "9")).await.unwrap();
    assert_eq!(next(&mut resumed).await.1, "z");
    other.end_watches();
    assert_eq!(timeout(PATIENCE, resumed.next()).await.unwrap().unwrap(), None);
}

#[tokio::test]
async fn watch_with_bookmarks_advances_without_events() {
    let world = World::new();
    world.cluster.set_bookmark_interval(Duration::from_millis(50));
    let client = world.client().await;
    client.post(MAPS, &map("a", "1")).await.unwrap();
    let path = format!(
        "{MAPS}?watch=1&allowWatchBookmarks=true&sendInitialEvents=true\
         &resourceVersionMatch=NotOlderThan"
    );
    let mut watch = client.watch(&path).await.unwrap();
    assert_eq!(next(&mut watch).await.0, "ADDED");
    let end = timeout(PATIENCE, watch.next()).await.unwrap().unwrap().unwrap();
    assert_eq!(end["type"], "BOOKMARK");
    assert_eq!(end["object"]["metadata"]["annotations"]["k8s.io/initial-events-end"], "true");
    // Changes of other kinds advance the bookmark of a quiet watch.
    let lease = json!({ "metadata": { "name": "l" } });
    let leases = "/apis/coordination.k8s.io/v1/namespaces/default/leases";
    assert_eq!(client.post(leases, &lease).await.unwrap().status, 201);
    let newest = world.cluster.version().to_string();
    loop {
        let (kind, _, version) = next(&mut watch).await;
        assert_eq!(kind, "BOOKMARK");
        if version == newest {
            break;
        }
    }
    let mut silent = client.watch(&format!("{MAPS}?watch=1&resourceVersion=1000")).await.unwrap();
    assert!(
        timeout(SHORT_WAIT, silent.next()).await.is_err(),
        "the watch waits for a future version"
    );
}

#[tokio::test]
async fn protobuf_watch_has_length_prefixed_frames() {
    let world = World::new();
    let client = world.client().await;
    client.post(MAPS, &map("a", "1")).await.unwrap();
    let accept = [("accept", "application/vnd.kubernetes.protobuf;stream=watch,application/json")];
    let path = format!("{MAPS}?watch=1");
    let response = client.send(Method::GET, &path, &accept, "").await.unwrap();
    let content_type = response.headers()["content-type"].to_str().unwrap().to_owned();
    assert_eq!(content_type, "application/vnd.kubernetes.protobuf;stream=watch");
    let mut body = response.into_body();
    let data = jackstay::demo::client::next_data(&mut body).await.unwrap().unwrap();
    let size = u32::from_be_bytes(data[..4].try_into().unwrap()) as usize;
    assert_eq!(data.len(), size + 4);
    assert_eq!(&data[4..11], b"\x0a\x05ADDED");
}

#[tokio::test]
async fn credentials_map_to_users_and_unauthenticated_clients_get_goaway() {
    let world = World::new();
    let ca = world.pki.ca_pem();
    world.cluster.add_token("t1", User::new("system:serviceaccount:a:b", &["x"]));
    let node = world.pki.client(&Subject::node("n1")).unwrap();
    let expired = world.pki.client_valid(&Subject::node("n1"), Validity::expired()).unwrap();
    let foreign = Pki::new("other").unwrap().client(&Subject::admin()).unwrap();
    let nobody = Credentials::anonymous(&ca);
    for (credentials, code, user, group) in [
        (nobody.clone().certificate(&node), 201, "system:node:n1", "system:nodes"),
        (nobody.clone().token("t1"), 201, "system:serviceaccount:a:b", "x"),
        (nobody.clone().certificate(&node).token("t1"), 201, "system:node:n1", "system:nodes"),
        (nobody.clone().certificate(&expired).token("t1"), 201, "system:serviceaccount:a:b", "x"),
        (nobody.clone().token("t2"), 401, "", ""),
        (nobody.clone().certificate(&expired), 401, "", ""),
        (nobody.clone().certificate(&foreign), 401, "", ""),
        (nobody.clone(), 403, "", ""),
    ] {
        let client = Client::connect(world.server.addr, &credentials).await.unwrap();
        let path = "/apis/authentication.k8s.io/v1/selfsubjectreviews";
        let reply = client.post(path, &json!({})).await.unwrap();
        assert_eq!(reply.status.as_u16(), code);
        let info = &reply.json()["status"]["userInfo"];
        assert_eq!(info["username"].as_str().unwrap_or_default(), user);
        if code == 201 {
            let groups = info["groups"].as_array().unwrap();
            assert!(
                groups.contains(&json!(group)) && groups.contains(&json!("system:authenticated"))
            );
        } else {
            // The connection accepts requests until the client has read the GOAWAY.
            let gone =
                async { while client.request(Method::GET, "/version", &[], "").await.is_ok() {} };
            timeout(PATIENCE, gone).await.expect("a GOAWAY");
        }
        drop(client);
    }
    let records = world.cluster.audit().select(|r| r.user == "system:node:n1");
    assert_eq!(records.len(), 2);
    assert!(records.iter().all(|r| r.status == Some(201) && r.certificate_serial.is_some()));
    assert!(
        world.server.counters().goaways.load(Relaxed) >= 4,
        "unauthenticated clients get GOAWAY"
    );
}

#[tokio::test]
async fn killed_server_breaks_watches_and_restarts() {
    let world = World::new();
    let client = world.client().await;
    let mut watch = client.watch(&format!("{MAPS}?watch=1")).await.unwrap();
    world.server.kill();
    assert!(
        timeout(PATIENCE, watch.next()).await.unwrap().is_err(),
        "the watch breaks without a clean end"
    );
    assert!(Client::connect(world.server.addr, &world.admin).await.is_err());
    world.server.restart().unwrap();
    assert_eq!(world.client().await.get("/readyz").await.unwrap().body, "ok");
    assert_eq!(world.server.counters().open.load(Relaxed), 1);
}

#[tokio::test]
async fn stopped_server_accepts_connections_without_responding() {
    let world = World::new();
    let client = world.client().await;
    client.get("/readyz").await.unwrap();
    world.server.stop();
    assert!(timeout(SHORT_WAIT, client.get("/readyz")).await.is_err());
    // The kernel still accepts connections.
    tokio::net::TcpStream::connect(world.server.addr).await.unwrap();
    world.server.cont();
    assert_eq!(client.get("/readyz").await.unwrap().status, 200);
    world.server.stop();
    world.server.kill();
    assert!(timeout(PATIENCE, client.get("/readyz")).await.unwrap().is_err());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shutdown_completes_requests_and_ends_watches() {
    let world = World::new();
    let client = world.client().await;
    let mut watch = client.watch(&format!("{MAPS}?watch=1")).await.unwrap();
    world.server.set_faults(|faults| faults.delay = Duration::from_millis(300));
    let ((), reply) = tokio::join!(
        async {
            let asked = &world.server.counters().in_flight;
            until("a request in flight", async || asked.load(Relaxed) > 0).await;
            tokio::task::block_in_place(|| world.server.shutdown(PATIENCE));
        },
        client.get(MAPS)
    );
    assert_eq!(reply.unwrap().status, 200, "a request in flight completes");
    assert_eq!(watch.next().await.unwrap(), None, "watches end cleanly");
    assert!(Client::connect(world.server.addr, &world.admin).await.is_err());
}

#[tokio::test]
async fn scripted_faults_affect_only_their_requests() {
    let world = World::new();
    let client = world.client().await;
    world.server.set_faults(|faults| faults.unready = true);
    assert_eq!(client.get("/readyz").await.unwrap().status, 500);
    assert_eq!(client.get("/livez").await.unwrap().status, 200);
    world.server.set_faults(|faults| faults.unready = false);

    let busy = ScriptedResponse::status(429, "TooManyRequests", "later").header("retry-after", "1");
    world.server.set_faults(|faults| faults.fail_next = Some((1, busy)));
    assert_eq!(client.get("/readyz").await.unwrap().status, 200, "health checks are not affected");
    let failed = client.get(MAPS).await.unwrap();
    assert_eq!(
        (failed.status, &failed.headers["retry-after"]),
        (StatusCode::TOO_MANY_REQUESTS, &"1".parse().unwrap())
    );
    assert_eq!(client.get(MAPS).await.unwrap().status, 200);

    let mut half = ScriptedResponse::status(200, "", "");
    half.body = Bytes::from_static(b"{\"ha");
    world.server.set_faults(|faults| faults.fail_next = Some((1, half.cut())));
    assert!(client.get(MAPS).await.is_err(), "a truncated body is an error");

    world.server.set_faults(|faults| faults.lose_next = 1);
    {
        // The request is handled but gets no response.
        let unanswered = map("lost", "1");
        let mut unanswered = pin!(client.post(MAPS, &unanswered));
        assert!(timeout(SHORT_WAIT, unanswered.as_mut()).await.is_err());
        let path = format!("{MAPS}/lost");
        until("the request is handled", async || client.get(&path).await.unwrap().status == 200)
            .await;
        assert!(timeout(SHORT_WAIT, unanswered).await.is_err());
    }

    world.server.set_faults(|faults| faults.hang = true);
    assert!(timeout(SHORT_WAIT, client.get("/livez")).await.is_err());
    world.server.set_faults(|faults| faults.hang = false);
    assert_eq!(client.get("/livez").await.unwrap().status, 200);

    let bytes = client.get("/bytes?size=1000000").await.unwrap();
    assert_eq!(bytes.body.len(), 1_000_000);
    let echo = client.request(Method::POST, "/echo", &[], "hello").await.unwrap();
    assert_eq!(echo.body, "hello");

    world.server.goaway();
    until("the connection is closed", async || client.is_closed()).await;
    let client = world.client().await;
    client.get("/livez").await.unwrap();
    world.server.reset_connections();
    assert!(timeout(PATIENCE, client.watch(&format!("{MAPS}?watch=1"))).await.unwrap().is_err());
}

#[tokio::test]
async fn faulty_relay_silences_and_resets_flows() {
    let world = World::new();
    let relay = FaultyRelay::start(world.server.addr).unwrap();
    let old = Client::connect(relay.addr, &world.admin).await.unwrap();
    old.get("/readyz").await.unwrap();
    assert_eq!(relay.silence_all(Direction::Both), 1);
    {
        let mut waiting = pin!(old.get("/readyz"));
        assert!(timeout(SHORT_WAIT, waiting.as_mut()).await.is_err());
        let new = Client::connect(relay.addr, &world.admin).await.unwrap();
        assert_eq!(new.get("/readyz").await.unwrap().status, 200);
        assert_eq!(relay.flows().iter().map(|f| f.silent).collect::<Vec<_>>(), [true, false]);
        relay.clear_faults();
        assert_eq!(timeout(PATIENCE, waiting).await.unwrap().unwrap().status, 200);
    }
    relay.silence_all(Direction::ToClient);
    {
        let requests = &world.server.counters().requests;
        let before = requests.load(Relaxed);
        let mut waiting = pin!(old.get("/readyz"));
        assert!(timeout(SHORT_WAIT, waiting.as_mut()).await.is_err());
        until("the request arrives", async || requests.load(Relaxed) == before + 1).await;
        assert!(timeout(SHORT_WAIT, waiting).await.is_err());
    }
    relay.reset_all();
    assert!(timeout(PATIENCE, old.get("/readyz")).await.unwrap().is_err());
    relay.refuse_new(true);
    assert!(Client::connect(relay.addr, &world.admin).await.is_err());
}

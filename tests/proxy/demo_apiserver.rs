//! Tests the rules of the Kubernetes API that other tests expect of the demo apiserver.

use crate::support::{CONFIGMAPS, PATIENCE, TestCluster, config_map, until};
use bytes::Bytes;
use http::{Method, StatusCode};
use jackstay_apiserver::ScriptedResponse;
use jackstay_apiserver::client::{Client, Watch, next_data};
use jackstay_apiserver::faulty_relay::{Direction, FaultyRelay};
use jackstay_apiserver::identity::User;
use jackstay_apiserver::pki::{Pki, Subject, Validity};
use serde_json::{Value, json};
use std::pin::pin;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;
use tokio::time::timeout;

/// Time during which an event must not occur.
const SHORT_WAIT: Duration = Duration::from_millis(200);

/// A client of the first server with the certificate of an administrator.
async fn connect(cluster: &TestCluster) -> Client {
    Client::connect(cluster.servers[0].addr, &cluster.certs.credentials()).await.unwrap()
}

/// The type of the next event, and the name and the resource version of its object.
async fn next(watch: &mut Watch) -> (String, String, String) {
    let event = timeout(PATIENCE, watch.next()).await.unwrap().unwrap().expect("an event");
    let meta = &event["object"]["metadata"];
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    (text(&event["type"]), text(&meta["name"]), text(&meta["resourceVersion"]))
}

#[tokio::test]
async fn configmap_requests_follow_the_api_rules() {
    let cluster = TestCluster::new(1);
    let client = connect(&cluster).await;
    let created = client.post(CONFIGMAPS, &config_map("a", "1")).await.unwrap();
    assert_eq!(created.status, 201);
    assert_eq!(
        client.post(CONFIGMAPS, &config_map("a", "1")).await.unwrap().json()["reason"],
        "AlreadyExists"
    );

    let path = format!("{CONFIGMAPS}/a");
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
    assert_eq!(client.get(&path).await.unwrap().status, 200, "a dry run deletes nothing");
    client.request(Method::DELETE, &path, &[], "").await.unwrap();
    assert_eq!(client.get(&path).await.unwrap().json()["reason"], "NotFound");

    let generated = json!({ "metadata": { "generateName": "g-" } });
    let generated = client.post(CONFIGMAPS, &generated).await.unwrap().json();
    assert!(generated["metadata"]["name"].as_str().unwrap().starts_with("g-"));
    let broken = client.post(CONFIGMAPS, &json!({ "metadata": "x" })).await.unwrap();
    assert_eq!(broken.status, 400);

    let only_protobuf = [("accept", "application/vnd.kubernetes.protobuf")];
    let refused = client.request(Method::GET, CONFIGMAPS, &only_protobuf, "").await.unwrap();
    assert_eq!(refused.status, 406);
}

#[tokio::test]
async fn list_with_limit_returns_pages_and_410_after_compaction() {
    let cluster = TestCluster::new(1);
    let client = connect(&cluster).await;
    for name in ["a", "b", "c", "d", "e"] {
        client.post(CONFIGMAPS, &config_map(name, name)).await.unwrap();
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
    let selected = client.get(&format!("{CONFIGMAPS}?labelSelector=v%20in%20(a,c)")).await.unwrap();
    assert_eq!(selected.json()["items"].as_array().unwrap().len(), 2);
    let future = client.get(&format!("{CONFIGMAPS}?resourceVersion=99999")).await.unwrap();
    assert_eq!(future.status, 504);
    let page = client.get(&format!("{CONFIGMAPS}?limit=1")).await.unwrap().json();
    client.post(CONFIGMAPS, &config_map("f", "f")).await.unwrap();
    cluster.state.compact();
    let token = page["metadata"]["continue"].as_str().unwrap();
    let late = client.get(&format!("{CONFIGMAPS}?limit=1&continue={token}")).await.unwrap();
    assert_eq!(late.status, 410);
}

#[tokio::test]
async fn watch_resumes_on_another_server_and_gets_410_after_compaction() {
    let cluster = TestCluster::new(2);
    let [server, other] = &cluster.servers[..] else { panic!("two servers") };
    let client = connect(&cluster).await;
    let other_client = Client::connect(other.addr, &cluster.certs.credentials()).await.unwrap();

    client.post(CONFIGMAPS, &config_map("a", "1")).await.unwrap();
    let mut watch = client.watch(&format!("{CONFIGMAPS}?watch=1")).await.unwrap();
    let (kind, name, version) = next(&mut watch).await;
    assert_eq!((kind.as_str(), name.as_str()), ("ADDED", "a"));

    client.post(CONFIGMAPS, &config_map("b", "2")).await.unwrap();
    assert_eq!(next(&mut watch).await.1, "b");
    let path = format!("{CONFIGMAPS}/a");
    client.request(Method::DELETE, &path, &[], "").await.unwrap();
    assert_eq!(next(&mut watch).await.0, "DELETED");

    let resume = format!("{CONFIGMAPS}?watch=1&resourceVersion={version}");
    let mut resumed = other_client.watch(&resume).await.unwrap();
    assert_eq!(next(&mut resumed).await.1, "b");
    assert_eq!(next(&mut resumed).await.0, "DELETED");
    assert!(timeout(SHORT_WAIT, resumed.next()).await.is_err(), "no further event");

    // An object that no longer matches the selector is DELETED for the watch.
    let mut selected =
        client.watch(&format!("{CONFIGMAPS}?watch=1&labelSelector=v%3D2")).await.unwrap();
    assert_eq!(next(&mut selected).await.0, "ADDED");
    let mut changed = client.get(&format!("{CONFIGMAPS}/b")).await.unwrap().json();
    changed["metadata"]["labels"]["v"] = "3".into();
    client.put(&format!("{CONFIGMAPS}/b"), &changed).await.unwrap();
    assert_eq!(next(&mut selected).await.0, "DELETED");
    assert_eq!(next(&mut resumed).await.0, "MODIFIED");

    // Each server has its own history: a compaction of one does not affect the other.
    server.compact();
    let mut expired = client.watch(&resume).await.unwrap();
    let error = timeout(PATIENCE, expired.next()).await.unwrap().unwrap().unwrap();
    assert_eq!((&error["type"], &error["object"]["code"]), (&json!("ERROR"), &json!(410)));
    assert_eq!(expired.next().await.unwrap(), None);
    assert_eq!(next(&mut other_client.watch(&resume).await.unwrap()).await.1, "b");
    cluster.state.compact();
    let mut expired = other_client.watch(&resume).await.unwrap();
    assert_eq!(next(&mut expired).await.0, "ERROR");

    // Open watches survive a compaction; the server can end them cleanly.
    client.post(CONFIGMAPS, &config_map("z", "9")).await.unwrap();
    assert_eq!(next(&mut resumed).await.1, "z");
    other.end_watches();
    assert_eq!(timeout(PATIENCE, resumed.next()).await.unwrap().unwrap(), None);
}

#[tokio::test]
async fn watch_with_a_timeout_beyond_the_clock_delivers_events() {
    let cluster = TestCluster::new(1);
    let client = connect(&cluster).await;
    let path = format!("{CONFIGMAPS}?watch=1&timeoutSeconds={}", u64::MAX);
    let mut watch = client.watch(&path).await.unwrap();
    client.post(CONFIGMAPS, &config_map("a", "1")).await.unwrap();
    assert_eq!(next(&mut watch).await.0, "ADDED");
}

#[tokio::test]
async fn quiet_watch_with_bookmarks_gets_newer_versions() {
    let cluster = TestCluster::new(1);
    cluster.state.set_bookmark_interval(Duration::from_millis(50));
    let client = connect(&cluster).await;
    client.post(CONFIGMAPS, &config_map("a", "1")).await.unwrap();
    let path = format!(
        "{CONFIGMAPS}?watch=1&allowWatchBookmarks=true&sendInitialEvents=true\
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
    let newest = cluster.state.version().to_string();
    loop {
        let (kind, _, version) = next(&mut watch).await;
        assert_eq!(kind, "BOOKMARK");
        if version == newest {
            break;
        }
    }
    let mut silent =
        client.watch(&format!("{CONFIGMAPS}?watch=1&resourceVersion=1000")).await.unwrap();
    assert!(
        timeout(SHORT_WAIT, silent.next()).await.is_err(),
        "the watch waits for a future version"
    );
}

#[tokio::test]
async fn protobuf_watch_has_length_prefixed_frames() {
    let cluster = TestCluster::new(1);
    let client = connect(&cluster).await;
    client.post(CONFIGMAPS, &config_map("a", "1")).await.unwrap();
    let accept = [("accept", "application/vnd.kubernetes.protobuf;stream=watch,application/json")];
    let path = format!("{CONFIGMAPS}?watch=1");
    let response = client.send(Method::GET, &path, &accept, "").await.unwrap();
    let content_type = response.headers()["content-type"].to_str().unwrap().to_owned();
    assert_eq!(content_type, "application/vnd.kubernetes.protobuf;stream=watch");
    let mut body = response.into_body();
    let data = next_data(&mut body).await.unwrap().unwrap();
    let size = u32::from_be_bytes(data[..4].try_into().unwrap()) as usize;
    assert_eq!(data.len(), size + 4);
    assert_eq!(&data[4..11], b"\x0a\x05ADDED");
}

#[tokio::test]
async fn cbor_watch_is_a_sequence_of_items_unless_its_gate_is_off() {
    let cluster = TestCluster::new(1);
    let client = connect(&cluster).await;
    client.post(CONFIGMAPS, &config_map("a", "1")).await.unwrap();
    let path = format!("{CONFIGMAPS}?watch=1");
    let send = async |accept: &str| {
        client.send(Method::GET, &path, &[("accept", accept)], "").await.unwrap()
    };
    let both = "application/cbor, application/json;q=0.9";
    let response = send(both).await;
    assert_eq!(response.headers()["content-type"], "application/cbor-seq");
    let data = next_data(&mut response.into_body()).await.unwrap().unwrap();
    assert!(data.starts_with(b"\xd9\xd9\xf7\xa2\x44type\x45ADDED\x46object\xd9\xd9\xf7"));

    cluster.servers[0].set_faults(|faults| faults.cbor_disabled = true);
    assert_eq!(send(both).await.headers()["content-type"], "application/json");
    assert_eq!(send("application/cbor").await.status(), 406);
}

#[tokio::test]
async fn credentials_select_the_user_or_end_with_goaway() {
    let cluster = TestCluster::new(1);
    let server = &cluster.servers[0];
    cluster.state.add_token("t1", User::new("system:serviceaccount:a:b", &["x"]));
    let node = cluster.certs.pki.client(&Subject::node("n1")).unwrap();
    let expired =
        cluster.certs.pki.client_valid(&Subject::node("n1"), Validity::expired()).unwrap();
    let foreign = Pki::new("other").unwrap().client(&Subject::admin()).unwrap();
    let anonymous = cluster.certs.anonymous();
    for (credentials, code, user, group) in [
        (anonymous.clone().certificate(&node), 201, "system:node:n1", "system:nodes"),
        (anonymous.clone().token("t1"), 201, "system:serviceaccount:a:b", "x"),
        (anonymous.clone().certificate(&node).token("t1"), 201, "system:node:n1", "system:nodes"),
        (
            anonymous.clone().certificate(&expired).token("t1"),
            201,
            "system:serviceaccount:a:b",
            "x",
        ),
        (anonymous.clone().token("t2"), 401, "", ""),
        (anonymous.clone().certificate(&expired), 401, "", ""),
        (anonymous.clone().certificate(&foreign), 401, "", ""),
        (anonymous.clone(), 403, "", ""),
    ] {
        let client = Client::connect(server.addr, &credentials).await.unwrap();
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
            let closed =
                async { while client.request(Method::GET, "/version", &[], "").await.is_ok() {} };
            timeout(PATIENCE, closed).await.expect("a GOAWAY");
        }
        drop(client);
    }
    let records = cluster.state.audit().select(|r| r.user == "system:node:n1");
    assert_eq!(records.len(), 2);
    assert!(records.iter().all(|r| r.status == Some(201) && r.certificate_serial.is_some()));
    assert!(server.counters().goaways.load(Relaxed) >= 4, "unauthenticated clients get GOAWAY");
}

#[tokio::test]
async fn killed_server_breaks_watches_and_can_restart() {
    let cluster = TestCluster::new(1);
    let server = &cluster.servers[0];
    let client = connect(&cluster).await;
    let mut watch = client.watch(&format!("{CONFIGMAPS}?watch=1")).await.unwrap();
    server.kill();
    assert!(
        timeout(PATIENCE, watch.next()).await.unwrap().is_err(),
        "the watch breaks without a clean end"
    );
    assert!(Client::connect(server.addr, &cluster.certs.credentials()).await.is_err());
    server.restart().unwrap();
    assert_eq!(connect(&cluster).await.get("/readyz").await.unwrap().body, "ok");
    assert_eq!(server.counters().open.load(Relaxed), 1);
}

#[tokio::test]
async fn stopped_server_accepts_connections_without_responding() {
    let cluster = TestCluster::new(1);
    let server = &cluster.servers[0];
    let client = connect(&cluster).await;
    client.get("/readyz").await.unwrap();
    server.stop();
    assert!(timeout(SHORT_WAIT, client.get("/readyz")).await.is_err());
    // The kernel still accepts connections.
    tokio::net::TcpStream::connect(server.addr).await.unwrap();
    server.cont();
    assert_eq!(client.get("/readyz").await.unwrap().status, 200);
    server.stop();
    server.kill();
    assert!(timeout(PATIENCE, client.get("/readyz")).await.unwrap().is_err());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shutdown_completes_requests_and_ends_watches_cleanly() {
    let cluster = TestCluster::new(1);
    let server = &cluster.servers[0];
    let client = connect(&cluster).await;
    let mut watch = client.watch(&format!("{CONFIGMAPS}?watch=1")).await.unwrap();
    server.set_faults(|faults| faults.delay = Duration::from_millis(300));
    let ((), reply) = tokio::join!(
        async {
            let in_flight = &server.counters().in_flight;
            until("a request in flight", async || in_flight.load(Relaxed) > 0).await;
            tokio::task::block_in_place(|| server.shutdown(PATIENCE));
        },
        client.get(CONFIGMAPS)
    );
    assert_eq!(reply.unwrap().status, 200, "a request in flight completes");
    assert_eq!(watch.next().await.unwrap(), None, "watches end cleanly");
    assert!(Client::connect(server.addr, &cluster.certs.credentials()).await.is_err());
}

#[tokio::test]
async fn scripted_faults_affect_only_their_requests() {
    let cluster = TestCluster::new(1);
    let server = &cluster.servers[0];
    let client = connect(&cluster).await;
    server.set_faults(|faults| faults.unready = true);
    assert_eq!(client.get("/readyz").await.unwrap().status, 500);
    assert_eq!(client.get("/livez").await.unwrap().status, 200);
    server.set_faults(|faults| faults.unready = false);

    let busy = ScriptedResponse::status(429, "TooManyRequests", "later").header("retry-after", "1");
    server.set_faults(|faults| faults.fail_next = Some((1, busy)));
    assert_eq!(client.get("/readyz").await.unwrap().status, 200, "health checks are not affected");
    let failed = client.get(CONFIGMAPS).await.unwrap();
    assert_eq!(
        (failed.status, &failed.headers["retry-after"]),
        (StatusCode::TOO_MANY_REQUESTS, &"1".parse().unwrap())
    );
    assert_eq!(client.get(CONFIGMAPS).await.unwrap().status, 200);

    let mut truncated = ScriptedResponse::status(200, "", "");
    truncated.body = Bytes::from_static(b"{\"ha");
    server.set_faults(|faults| faults.fail_next = Some((1, truncated.cut())));
    assert!(client.get(CONFIGMAPS).await.is_err(), "a truncated body is an error");

    server.set_faults(|faults| faults.lose_next = 1);
    {
        // The request is handled but gets no response.
        let unanswered = config_map("lost", "1");
        let mut unanswered = pin!(client.post(CONFIGMAPS, &unanswered));
        assert!(timeout(SHORT_WAIT, unanswered.as_mut()).await.is_err());
        let path = format!("{CONFIGMAPS}/lost");
        until("the request is handled", async || client.get(&path).await.unwrap().status == 200)
            .await;
        assert!(timeout(SHORT_WAIT, unanswered).await.is_err());
    }

    server.set_faults(|faults| faults.hang = true);
    assert!(timeout(SHORT_WAIT, client.get("/livez")).await.is_err());
    server.set_faults(|faults| faults.hang = false);
    assert_eq!(client.get("/livez").await.unwrap().status, 200);

    let bytes = client.get("/bytes?size=1000000").await.unwrap();
    assert_eq!(bytes.body.len(), 1_000_000);
    let echo = client.request(Method::POST, "/echo", &[], "hello").await.unwrap();
    assert_eq!(echo.body, "hello");

    server.goaway();
    until("the connection is closed", async || client.is_closed()).await;
    let client = connect(&cluster).await;
    client.get("/livez").await.unwrap();
    server.reset_connections();
    assert!(
        timeout(PATIENCE, client.watch(&format!("{CONFIGMAPS}?watch=1"))).await.unwrap().is_err()
    );
}

#[tokio::test]
async fn faulty_relay_silences_and_resets_flows() {
    let cluster = TestCluster::new(1);
    let server = &cluster.servers[0];
    let relay = FaultyRelay::start(server.addr).unwrap();
    let old = Client::connect(relay.addr, &cluster.certs.credentials()).await.unwrap();
    old.get("/readyz").await.unwrap();
    assert_eq!(relay.silence_all(Direction::Both), 1);
    {
        let mut waiting = pin!(old.get("/readyz"));
        assert!(timeout(SHORT_WAIT, waiting.as_mut()).await.is_err());
        let new = Client::connect(relay.addr, &cluster.certs.credentials()).await.unwrap();
        assert_eq!(new.get("/readyz").await.unwrap().status, 200);
        assert_eq!(relay.flows().iter().map(|f| f.silent).collect::<Vec<_>>(), [true, false]);
        relay.clear_faults();
        assert_eq!(timeout(PATIENCE, waiting).await.unwrap().unwrap().status, 200);
    }
    relay.silence_all(Direction::ToClient);
    {
        let requests = &server.counters().requests;
        let before = requests.load(Relaxed);
        let mut waiting = pin!(old.get("/readyz"));
        assert!(timeout(SHORT_WAIT, waiting.as_mut()).await.is_err());
        until("the request arrives", async || requests.load(Relaxed) == before + 1).await;
        assert!(timeout(SHORT_WAIT, waiting).await.is_err());
    }
    relay.reset_all();
    assert!(timeout(PATIENCE, old.get("/readyz")).await.unwrap().is_err());
    relay.refuse_new(true);
    assert!(Client::connect(relay.addr, &cluster.certs.credentials()).await.is_err());
}

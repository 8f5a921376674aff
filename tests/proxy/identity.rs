//! Who a client is upstream, by the audit of the servers: the same as without jackstay, and nobody
//! else, whatever its headers say.

use crate::hostile::join_all;
use crate::peer::{Act, Peers};
use crate::support::{Certs, MAPS, PATIENCE, Proxy, World, patient, soon, terminate, until};
use http::Method;
use jackstay::config::CertPaths;
use jackstay::demo::apiserver::audit::Record;
use jackstay::demo::apiserver::identity::User;
use jackstay::demo::client::{Client, Credentials};
use jackstay::demo::pki::{Issued, Pki, Subject, Validity};
use proptest::prelude::*;
use proptest::test_runner::{Config as Cases, TestRunner};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::time::SystemTime;

fn serial(issued: &Issued) -> String {
    let der = issued.cert_der();
    let (_, certificate) = x509_parser::parse_x509_certificate(&der).unwrap();
    certificate.raw_serial_as_string().replace(':', "")
}

/// What the servers saw of a request with this Audit-ID.
fn seen(world: &World, id: &str) -> Vec<Record> {
    world.cluster.audit().select(|record| record.audit_id.as_deref() == Some(id))
}

/// Asks, and returns the status, the message of a Status, and what the server saw.
async fn ask(
    world: &World,
    proxy: &Proxy,
    who: &Credentials,
    headers: &[(&str, &str)],
) -> (u16, String, Option<Record>) {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let id = format!("ask-{}", NEXT.fetch_add(1, Relaxed));
    let client = proxy.client(who).await;
    let mut all = vec![("audit-id", id.as_str())];
    all.extend(headers);
    let reply = soon("an answer", client.request(Method::GET, MAPS, &all, "")).await.unwrap();
    let mut records = seen(world, &id);
    assert!(records.len() <= 1, "{records:?}");
    let message = reply.json()["message"].as_str().unwrap_or_default().to_owned();
    (reply.status.as_u16(), message, records.pop())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn same_in_same_out() {
    let world = World::new(1);
    // One request, one record.
    let proxy = world.start_with(|config| *config = patient(config.clone())).await;
    let certs = &world.certs;
    world.cluster.add_token("alice", User::new("alice", &["devs"]));
    let admin = serial(&certs.admin);

    let (status, _, record) = ask(&world, &proxy, &certs.credentials(), &[]).await;
    let record = record.unwrap();
    assert_eq!((status, record.user.as_str()), (200, "kubernetes-admin"));
    assert_eq!(record.certificate_serial, Some(admin.clone()));
    assert!(record.groups.iter().any(|group| group == "system:masters"));
    assert_eq!(record.forwarded_for.as_deref(), Some("127.0.0.1"));

    // Another subject of the same authority: refused, never mapped.
    let other = certs.pki.client(&Subject::node("other")).unwrap();
    let (status, message, record) =
        ask(&world, &proxy, &certs.nobody().certificate(&other), &[]).await;
    assert_eq!((status, record.is_none()), (401, true));
    assert!(message.contains("identities") && message.contains("system:node:other"), "{message}");
    // The same name with other groups is another subject.
    let fewer = certs.pki.client(&Subject::new("kubernetes-admin", &[])).unwrap();
    let (status, _, record) = ask(&world, &proxy, &certs.nobody().certificate(&fewer), &[]).await;
    assert_eq!((status, record.is_none()), (401, true));

    // Expired, and of another authority: an answer, not a TLS alert.
    let expired = certs.pki.client_valid(&Subject::admin(), Validity::expired()).unwrap();
    let (status, message, record) =
        ask(&world, &proxy, &certs.nobody().certificate(&expired), &[]).await;
    assert_eq!((status, record.is_none()), (401, true));
    assert!(message.contains("expired"), "{message}");
    let stranger = Pki::new("other").unwrap().client(&Subject::admin()).unwrap();
    let stranger = certs.nobody().certificate(&stranger);
    let (status, message, record) = ask(&world, &proxy, &stranger, &[]).await;
    assert_eq!((status, record.is_none()), (401, true), "{message}");

    // Nobody.
    let (status, _, record) = ask(&world, &proxy, &certs.nobody(), &[]).await;
    let record = record.unwrap();
    assert_eq!((status, record.user.as_str()), (403, "system:anonymous"));
    assert_eq!(record.certificate_serial, None);

    // Tokens: good and bad, never on a connection with a certificate.
    for _ in 0..3 {
        let (status, _, record) = ask(&world, &proxy, &certs.nobody().token("alice"), &[]).await;
        let record = record.unwrap();
        assert_eq!((status, record.user.as_str()), (200, "alice"));
        assert_eq!(record.certificate_serial, None);
        let (status, _, record) = ask(&world, &proxy, &certs.nobody().token("mallory"), &[]).await;
        let record = record.unwrap();
        assert_eq!((status, record.user.as_str()), (401, ""));
        assert_eq!(record.certificate_serial, None);
    }
    // Beside a certificate the certificate wins, as in the apiserver.
    let (status, _, record) = ask(&world, &proxy, &certs.credentials().token("alice"), &[]).await;
    assert_eq!((status, record.unwrap().user.as_str()), (200, "kubernetes-admin"));
    // An unverifiable certificate and a good token: the token, without any certificate.
    let (status, _, record) = ask(&world, &proxy, &stranger.token("alice"), &[]).await;
    let record = record.unwrap();
    assert_eq!((status, record.user.as_str()), (200, "alice"));
    assert_eq!(record.certificate_serial, None);

    // Headers that say who one is.
    let forged = [("x-remote-user", "root"), ("x-remote-group", "system:masters")];
    let (status, _, record) = ask(&world, &proxy, &certs.nobody().token("alice"), &forged).await;
    let record = record.unwrap();
    assert_eq!((status, record.user.as_str()), (200, "alice"));
    assert!(!record.header_names.iter().any(|name| name.starts_with("x-remote")), "{record:?}");
    let impersonating = [("impersonate-user", "bob")];
    let (status, _, record) = ask(&world, &proxy, &certs.credentials(), &impersonating).await;
    assert_eq!((status, record.unwrap().user.as_str()), (200, "bob"), "an administrator may");
    let (status, _, _) = ask(&world, &proxy, &certs.nobody().token("alice"), &impersonating).await;
    assert_eq!(status, 403, "the server decides, and alice may not");

    // Whatever the order of all this, no connection has carried two kinds of callers.
    let records = world.cluster.audit().records();
    for record in &records {
        let same = records.iter().filter(|r| r.connection == record.connection);
        assert!(same.clone().all(|r| r.certificate_serial == record.certificate_serial));
        let anonymous = same.clone().filter(|r| r.user == "system:anonymous").count();
        assert!(anonymous == 0 || anonymous == same.count());
    }
}

/// No combination of headers changes who a client is upstream.
#[test]
fn headers_do_not_change_who_one_is() {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let world = World::new(1);
    let node = world.certs.pki.client(&Subject::node("n1")).unwrap();
    let (cert_file, key_file) = node.write_to(world.certs.path(), "node").unwrap();
    let proxy = runtime.block_on(world.start_with(|config| {
        terminate(config).identities.push(CertPaths { cert_file, key_file });
    }));
    world.cluster.add_token("alice", User::new("alice", &[]));
    let names = vec![
        "x-remote-user",
        "x-remote-group",
        "x-remote-uid",
        "x-remote-extra-scopes",
        "x-forwarded-for",
        "x-forwarded-user",
        "x-real-ip",
        "forwarded",
        "impersonate-user",
        "impersonate-group",
        "impersonate-uid",
        "impersonate-extra-x",
        "authorization",
        "cookie",
        "connection",
        "upgrade",
        "te",
        "host",
        "proxy-authorization",
        "sec-websocket-protocol",
        "x-client-cert",
        "x-ssl-client-cert",
    ];
    let values = vec![
        "root",
        "system:masters",
        "kubernetes-admin",
        "Bearer alice",
        "Bearer nobody",
        "Basic cm9vdDpyb290",
        "x-remote-user, impersonate-user, authorization",
        "x-remote-user",
        "close",
        "keep-alive, X-Remote-Group",
        "127.0.0.1",
        "websocket",
        "base64url.bearer.authorization.k8s.io.YWxpY2U",
        "",
    ];
    let header = (prop::sample::select(names), prop::sample::select(values));
    let combination = (prop::collection::vec(header, 0..8), any::<bool>());
    let node_serial = serial(&node);
    let cases = if crate::support::long() { 2_000 } else { 150 };
    let mut runner =
        TestRunner::new(Cases { cases, failure_persistence: None, ..Cases::default() });
    let counter = AtomicUsize::new(0);
    let answered = AtomicUsize::new(0);
    let result = runner.run(&combination, |(headers, http2)| {
        let id = format!("case-{}", counter.fetch_add(1, Relaxed));
        runtime.block_on(async {
            for (who, user) in [
                (world.certs.nobody().certificate(&node), "system:node:n1"),
                (world.certs.nobody(), ""),
            ] {
                let client = if http2 {
                    Client::connect(proxy.addr, &who).await.unwrap()
                } else {
                    Client::connect_http1(proxy.addr, &who).await.unwrap()
                };
                let id = format!("{id}-{user}");
                let mut all = headers.clone();
                all.push(("audit-id", &id));
                // Refused by our own HTTP library, by the proxy or by the server: all is well.
                let reply = client.request(Method::GET, MAPS, &all, "");
                let reply = tokio::time::timeout(crate::support::PATIENCE, reply).await;
                if reply.expect("an answer").is_ok_and(|reply| reply.status == 200) {
                    answered.fetch_add(1, Relaxed);
                }
                for record in seen(&world, &id) {
                    if user.is_empty() {
                        prop_assert_eq!(&record.certificate_serial, &None);
                        let known = ["", "system:anonymous", "alice"];
                        prop_assert!(known.contains(&record.user.as_str()), "{record:?}");
                    } else {
                        prop_assert_eq!(record.certificate_serial.as_ref(), Some(&node_serial));
                        let known = record.user.is_empty() || record.user == user;
                        prop_assert!(known, "{record:?}");
                    }
                    let forged = record.header_names.iter().any(|n| n.starts_with("x-remote"));
                    prop_assert!(!forged, "{record:?}");
                }
            }
            Ok(())
        })
    });
    result.unwrap();
    println!("{cases} combinations, {} answered with 200", answered.load(Relaxed));
    assert!(answered.load(Relaxed) > 0);
}

/// A file that is renamed over, as kubelet does, and requests all the time.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn rotation_by_symlink_under_load() {
    let world = World::new(2);
    let dir = world.certs.path();
    let second = world.certs.pki.client(&Subject::admin()).unwrap();
    world.certs.admin.write_pair(dir, "first").unwrap();
    second.write_pair(dir, "second").unwrap();
    let current = dir.join("current.pem");
    std::os::unix::fs::symlink(dir.join("first.pem"), &current).unwrap();
    let proxy = world
        .start_with(|config| {
            terminate(config).identities =
                vec![CertPaths { cert_file: current.clone(), key_file: current.clone() }];
        })
        .await;
    let over = Arc::new(AtomicBool::new(false));
    let mut clients = Vec::new();
    for n in 0..4 {
        let client = proxy.client(&world.certs.credentials()).await;
        let over = over.clone();
        clients.push(tokio::spawn(async move {
            let mut count = 0;
            while !over.load(Relaxed) {
                let body = crate::support::map(&format!("r-{n}-{count}"), "1");
                let reply = if n % 2 == 0 {
                    client.get(&format!("{MAPS}?limit=1")).await
                } else {
                    client.post(MAPS, &body).await
                };
                let reply = reply.unwrap();
                assert!(reply.status.is_success(), "{}: {:?}", reply.status, reply.body);
                count += 1;
            }
            count
        }));
    }
    let mut watch = clients_watch(&proxy, &world).await;
    let with = |wanted: &str| {
        world.cluster.audit().select(|r| {
            r.user == "kubernetes-admin" && r.certificate_serial.as_deref() == Some(wanted)
        })
    };
    until("the first is in use", async || with(&serial(&world.certs.admin)).len() > 50).await;
    std::os::unix::fs::symlink(dir.join("second.pem"), dir.join("next")).unwrap();
    std::fs::rename(dir.join("next"), &current).unwrap();
    until("the second is in use", async || with(&serial(&second)).len() > 50).await;
    world.cluster.audit().clear();
    until("requests go on", async || world.cluster.audit().records().len() > 50).await;
    over.store(true, Relaxed);
    let mut total = 0;
    for client in clients {
        total += client.await.unwrap();
    }
    println!("{total} requests around a rotation, none failed");
    let old = world.cluster.audit().select(|r| {
        r.user == "kubernetes-admin"
            && r.verb != "watch"
            && r.certificate_serial == Some(serial(&world.certs.admin))
    });
    assert!(old.is_empty(), "new requests carry the new certificate: {old:?}");
    // A watch that began under the old certificate goes on.
    let kind = jackstay::demo::apiserver::kinds::find("", "v1", "configmaps").unwrap();
    world.cluster.create(kind, "default", crate::support::map("last", "1"), false).unwrap();
    loop {
        let event = soon("an event", watch.next()).await.unwrap().expect("the watch goes on");
        if event["object"]["metadata"]["name"] == "last" {
            break;
        }
    }
}

async fn clients_watch(proxy: &Proxy, world: &World) -> jackstay::demo::client::Watch {
    // The driver of a client ends with it: this one is kept for as long as the test runs.
    let client = Box::leak(Box::new(proxy.client(&world.certs.credentials()).await));
    let path = format!("{MAPS}?watch=1&resourceVersion={}", world.cluster.version());
    client.watch(&path).await.unwrap()
}

/// kubelet has still to bootstrap: its file is not there yet.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn an_identity_that_appears_later() {
    let world = World::new(1);
    world.cluster.add_token("bootstrap", User::new("system:bootstrap:a", &[]));
    let late = world.certs.path().join("late.pem");
    let mut config = world.config();
    terminate(&mut config).identities =
        vec![CertPaths { cert_file: late.clone(), key_file: late.clone() }];
    let proxy = world.certs.start(config);
    until("the endpoint is usable", async || {
        proxy.endpoints().await.iter().all(|e| e["state"] == "ready")
    })
    .await;
    assert!(proxy.page("/readyz").await.contains("late.pem"));
    let token = proxy.client(&world.certs.nobody().token("bootstrap")).await;
    assert_eq!(token.get(MAPS).await.unwrap().status, 200);
    let client = proxy.client(&world.certs.credentials()).await;
    let refused = client.get(MAPS).await.unwrap();
    assert_eq!(refused.status, 401);
    assert!(refused.json()["message"].as_str().unwrap().contains("late.pem"));
    world.certs.admin.write_pair(world.certs.path(), "late").unwrap();
    until("it is alive", async || client.get(MAPS).await.unwrap().status == 200).await;
}

/// Tokens that nobody has vouched for share two connections: random ones must not buy more.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn random_tokens_buy_no_connections() {
    let certs = Certs::new();
    let peers = Peers::start(&certs, 1);
    let mut config = patient(certs.config(&peers.addresses));
    config.upstreams[0].connections.max_streams = 5;
    let proxy = certs.start(config);
    proxy.ready(1).await;
    let client = proxy.client(&certs.nobody()).await;
    peers.script.play(std::iter::repeat_n(Act::Hang, 30));
    let tokens: Vec<_> = (0..30).map(|n| format!("Bearer random-{n}")).collect();
    let headers: Vec<_> = tokens.iter().map(|token| [("authorization", token.as_str())]).collect();
    let asking = join_all(headers.iter().map(|headers| async {
        let reply = client.request(Method::GET, MAPS, headers, "").await.unwrap();
        assert_eq!(reply.status, 429, "whoever is answered is told to come again");
    }));
    let looking = until("ten wait and the others were told", async || {
        let told = proxy.metric("jackstay_streams_exhausted_total").await;
        peers.script.seen().len() == 10 && told >= 20.0
    });
    tokio::select! {
        biased;
        _ = asking => panic!("ten of them wait for ever"),
        () = looking => {}
    }
    let mut connections: Vec<_> = peers.script.seen().iter().map(|seen| seen.1).collect();
    connections.sort_unstable();
    connections.dedup();
    assert_eq!(connections.len(), 2, "{connections:?}");
}

/// A certificate is looked at with every request: one that expires stops being anybody while its
/// connection goes on.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_certificate_expires_on_a_connection() {
    let world = World::new(1);
    let proxy = world.start().await;
    let validity = Validity { not_after: SystemTime::now() + PATIENCE / 2, ..Validity::usual() };
    let brief = world.certs.pki.client_valid(&Subject::admin(), validity).unwrap();
    let client = proxy.client(&world.certs.nobody().certificate(&brief)).await;
    let first = soon("an answer", client.get(MAPS)).await.unwrap();
    assert_eq!(first.status, 200, "the machine took all its life to say hello");
    let mut last = first;
    until("it has expired", async || {
        last = client.get(MAPS).await.unwrap();
        last.status != 200
    })
    .await;
    assert_eq!(last.status, 401);
    assert!(last.json()["message"].as_str().unwrap().contains("expired"), "{:?}", last.body);
    assert!(!client.is_closed());
}

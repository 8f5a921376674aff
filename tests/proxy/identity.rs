//! The identity that the apiservers record for a client in their audit: the same as without jackstay, whatever
//! headers the client sends.

use crate::scripted_peer::{Action, Peers};
use crate::support::{
    CONFIGMAPS, PATIENCE, Proxy, TestCluster, config_map, join_all, long_form, replace_symlink,
    soon, terminate_mode, until, without_suspicion,
};
use http::Method;
use jackstay_apiserver::audit::Record;
use jackstay_apiserver::client::{Client, Credentials};
use jackstay_apiserver::identity::User;
use jackstay_apiserver::pki::{Issued, Pki, Subject, Validity};
use jackstay_config::CertPaths;
use proptest::prelude::*;
use proptest::test_runner::{Config as Cases, TestRunner};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, SystemTime};

fn serial(issued: &Issued) -> String {
    let der = issued.cert_der();
    let (_, certificate) = x509_parser::parse_x509_certificate(&der).unwrap();
    certificate.raw_serial_as_string().replace(':', "")
}

/// The audit records with this Audit-ID.
fn audit_records(cluster: &TestCluster, id: &str) -> Vec<Record> {
    cluster.state.audit().select(|record| record.audit_id.as_deref() == Some(id))
}

/// Sends a GET with these credentials and headers. Returns the status, the message if the response is a Status,
/// and the audit record if the request reached an apiserver.
async fn send(
    cluster: &TestCluster,
    proxy: &Proxy,
    credentials: &Credentials,
    headers: &[(&str, &str)],
) -> (u16, String, Option<Record>) {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let id = format!("request-{}", NEXT.fetch_add(1, Relaxed));
    let client = proxy.client_with(credentials).await;
    let mut all = vec![("audit-id", id.as_str())];
    all.extend(headers);
    let reply =
        soon("a response", client.request(Method::GET, CONFIGMAPS, &all, "")).await.unwrap();
    let mut records = audit_records(cluster, &id);
    assert!(records.len() <= 1, "{records:?}");
    let message = reply.json()["message"].as_str().unwrap_or_default().to_owned();
    (reply.status.as_u16(), message, records.pop())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn client_has_the_same_identity_at_the_apiserver() {
    let cluster = TestCluster::new(1);
    // A hedge would add a second audit record.
    let proxy = cluster.start_with(without_suspicion).await;
    let certs = &cluster.certs;
    cluster.state.add_token("alice", User::new("alice", &["devs"]));
    let admin = serial(&certs.admin);

    let (status, _, record) = send(&cluster, &proxy, &certs.credentials(), &[]).await;
    let record = record.unwrap();
    assert_eq!((status, record.user.as_str()), (200, "kubernetes-admin"));
    assert_eq!(record.certificate_serial, Some(admin.clone()));
    assert!(record.groups.iter().any(|group| group == "system:masters"));
    assert_eq!(record.forwarded_for.as_deref(), Some("127.0.0.1"));

    // Another subject with a certificate of the same CA is rejected.
    let other = certs.pki.client(&Subject::node("other")).unwrap();
    let (status, message, record) =
        send(&cluster, &proxy, &certs.anonymous().certificate(&other), &[]).await;
    assert_eq!((status, record.is_none()), (401, true));
    assert!(message.contains("identities") && message.contains("system:node:other"), "{message}");
    // The same name with other groups is another subject.
    let fewer = certs.pki.client(&Subject::new("kubernetes-admin", &[])).unwrap();
    let (status, _, record) =
        send(&cluster, &proxy, &certs.anonymous().certificate(&fewer), &[]).await;
    assert_eq!((status, record.is_none()), (401, true));

    // A client whose certificate has expired or is from another CA gets a response, not a TLS alert.
    let expired = certs.pki.client_valid(&Subject::admin(), Validity::expired()).unwrap();
    let (status, message, record) =
        send(&cluster, &proxy, &certs.anonymous().certificate(&expired), &[]).await;
    assert_eq!((status, record.is_none()), (401, true));
    assert!(message.contains("expired"), "{message}");
    let stranger = Pki::new("other").unwrap().client(&Subject::admin()).unwrap();
    let stranger = certs.anonymous().certificate(&stranger);
    let (status, message, record) = send(&cluster, &proxy, &stranger, &[]).await;
    assert_eq!((status, record.is_none()), (401, true), "{message}");

    // No credentials.
    let (status, _, record) = send(&cluster, &proxy, &certs.anonymous(), &[]).await;
    let record = record.unwrap();
    assert_eq!((status, record.user.as_str()), (403, "system:anonymous"));
    assert_eq!(record.certificate_serial, None);

    // A token, valid or not, is never sent on an upstream connection with a client certificate.
    for _ in 0..3 {
        let (status, _, record) =
            send(&cluster, &proxy, &certs.anonymous().token("alice"), &[]).await;
        let record = record.unwrap();
        assert_eq!((status, record.user.as_str()), (200, "alice"));
        assert_eq!(record.certificate_serial, None);
        let (status, _, record) =
            send(&cluster, &proxy, &certs.anonymous().token("mallory"), &[]).await;
        let record = record.unwrap();
        assert_eq!((status, record.user.as_str()), (401, ""));
        assert_eq!(record.certificate_serial, None);
    }
    // A certificate takes precedence over a token, as in the apiserver.
    let (status, _, record) =
        send(&cluster, &proxy, &certs.credentials().token("alice"), &[]).await;
    assert_eq!((status, record.unwrap().user.as_str()), (200, "kubernetes-admin"));
    // With an unverifiable certificate and a valid token, the token is sent without a certificate.
    let (status, _, record) = send(&cluster, &proxy, &stranger.token("alice"), &[]).await;
    let record = record.unwrap();
    assert_eq!((status, record.user.as_str()), (200, "alice"));
    assert_eq!(record.certificate_serial, None);

    // `X-Remote-*` headers are removed; impersonation is left to the apiserver.
    let forged = [("x-remote-user", "root"), ("x-remote-group", "system:masters")];
    let (status, _, record) =
        send(&cluster, &proxy, &certs.anonymous().token("alice"), &forged).await;
    let record = record.unwrap();
    assert_eq!((status, record.user.as_str()), (200, "alice"));
    assert!(!record.header_names.iter().any(|name| name.starts_with("x-remote")), "{record:?}");
    let impersonating = [("impersonate-user", "bob")];
    let (status, _, record) = send(&cluster, &proxy, &certs.credentials(), &impersonating).await;
    assert_eq!((status, record.unwrap().user.as_str()), (200, "bob"), "an admin may impersonate");
    let (status, _, _) =
        send(&cluster, &proxy, &certs.anonymous().token("alice"), &impersonating).await;
    assert_eq!(status, 403, "alice may not impersonate");

    // All requests of an upstream connection have the same certificate, and anonymous requests have
    // connections of their own.
    let records = cluster.state.audit().records();
    for record in &records {
        let same = records.iter().filter(|r| r.connection == record.connection);
        assert!(same.clone().all(|r| r.certificate_serial == record.certificate_serial));
        let anonymous = same.clone().filter(|r| r.user == "system:anonymous").count();
        assert!(anonymous == 0 || anonymous == same.count());
    }
}

#[test]
fn random_headers_do_not_change_the_identity() {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let cluster = TestCluster::new(1);
    let node = cluster.certs.pki.client(&Subject::node("n1")).unwrap();
    let (cert_file, key_file) = node.write_to(cluster.certs.path(), "node").unwrap();
    let proxy = runtime.block_on(cluster.start_with(|config| {
        terminate_mode(config).identities.push(CertPaths { cert_file, key_file }.into());
    }));
    cluster.state.add_token("alice", User::new("alice", &[]));
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
    let headers_and_http2 = (prop::collection::vec(header, 0..8), any::<bool>());
    let node_serial = serial(&node);
    let cases = if long_form() { 2_000 } else { 150 };
    let mut runner =
        TestRunner::new(Cases { cases, failure_persistence: None, ..Cases::default() });
    let next_case = AtomicUsize::new(0);
    let succeeded = AtomicUsize::new(0);
    let result = runner.run(&headers_and_http2, |(headers, http2)| {
        let case = format!("case-{}", next_case.fetch_add(1, Relaxed));
        runtime.block_on(async {
            for (credentials, user) in [
                (cluster.certs.anonymous().certificate(&node), "system:node:n1"),
                (cluster.certs.anonymous(), ""),
            ] {
                let client = if http2 {
                    Client::connect(proxy.addr, &credentials).await.unwrap()
                } else {
                    Client::connect_http1(proxy.addr, &credentials).await.unwrap()
                };
                let id = format!("{case}-{user}");
                let mut all = headers.clone();
                all.push(("audit-id", &id));
                // The HTTP client, jackstay or the server may reject the request.
                let reply = client.request(Method::GET, CONFIGMAPS, &all, "");
                if soon("a response", reply).await.is_ok_and(|reply| reply.status == 200) {
                    succeeded.fetch_add(1, Relaxed);
                }
                for record in audit_records(&cluster, &id) {
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
    println!("{cases} combinations of headers, {} responses with 200", succeeded.load(Relaxed));
    assert!(succeeded.load(Relaxed) > 0);
}

/// kubelet rotates its certificate by a rename over the symlink that jackstay reads.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn certificate_rotation_by_symlink_fails_no_request() {
    let cluster = TestCluster::new(2);
    let dir = cluster.certs.path();
    let second = cluster.certs.pki.client(&Subject::admin()).unwrap();
    cluster.certs.admin.write_pair(dir, "first").unwrap();
    second.write_pair(dir, "second").unwrap();
    let current = dir.join("current.pem");
    replace_symlink(&current, &dir.join("first.pem"));
    let pair = CertPaths { cert_file: current.clone(), key_file: current.clone() };
    let proxy =
        cluster.start_with(|config| terminate_mode(config).identities = vec![pair.into()]).await;
    let stop = Arc::new(AtomicBool::new(false));
    let mut clients = Vec::new();
    for n in 0..4 {
        let client = proxy.client().await;
        let stop = stop.clone();
        clients.push(tokio::spawn(async move {
            let mut count = 0;
            while !stop.load(Relaxed) {
                let body = config_map(&format!("r-{n}-{count}"), "1");
                let reply = if n % 2 == 0 {
                    client.get(&format!("{CONFIGMAPS}?limit=1")).await
                } else {
                    client.post(CONFIGMAPS, &body).await
                };
                let reply = reply.unwrap();
                assert!(reply.status.is_success(), "{}: {:?}", reply.status, reply.body);
                count += 1;
            }
            count
        }));
    }
    let watcher = proxy.client().await;
    let mut watch = watcher.watch(&cluster.watch_path()).await.unwrap();
    let (first, second) = (serial(&cluster.certs.admin), serial(&second));
    let records_with = |serial: &str| {
        cluster.state.audit().select(|r| {
            r.user == "kubernetes-admin" && r.certificate_serial.as_deref() == Some(serial)
        })
    };
    until("the first certificate is in use", async || records_with(&first).len() > 50).await;
    replace_symlink(&current, &dir.join("second.pem"));
    until("the second certificate is in use", async || records_with(&second).len() > 50).await;
    cluster.state.audit().clear();
    until("requests continue", async || cluster.state.audit().records().len() > 50).await;
    stop.store(true, Relaxed);
    let mut total = 0;
    for client in clients {
        total += client.await.unwrap();
    }
    println!("{total} requests around a rotation, none failed");
    let mut old = records_with(&first);
    old.retain(|record| record.verb != "watch");
    assert!(old.is_empty(), "new requests were sent with the old certificate: {old:?}");
    // The watch that started with the old certificate continues.
    cluster.create_config_map("last");
    loop {
        let event = soon("an event", watch.next()).await.unwrap().expect("the watch continues");
        if event["object"]["metadata"]["name"] == "last" {
            break;
        }
    }
}

/// Before kubelet has bootstrapped, its certificate does not exist.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn identity_file_is_used_when_it_appears() {
    let cluster = TestCluster::new(1);
    cluster.state.add_token("bootstrap", User::new("system:bootstrap:a", &[]));
    let late = cluster.certs.path().join("late.pem");
    let mut config = cluster.config();
    terminate_mode(&mut config).identities =
        vec![CertPaths { cert_file: late.clone(), key_file: late.clone() }.into()];
    let proxy = cluster.certs.start(config);
    until("the endpoint is usable", async || {
        proxy.endpoints().await.iter().all(|e| e["state"] == "ready")
    })
    .await;
    assert!(proxy.page("/readyz").await.contains("late.pem"));
    let token_client = proxy.client_with(&cluster.certs.anonymous().token("bootstrap")).await;
    assert_eq!(token_client.get(CONFIGMAPS).await.unwrap().status, 200);
    let client = proxy.client().await;
    let refused = client.get(CONFIGMAPS).await.unwrap();
    assert_eq!(refused.status, 401);
    assert!(refused.json()["message"].as_str().unwrap().contains("late.pem"));
    cluster.certs.admin.write_pair(cluster.certs.path(), "late").unwrap();
    until("the identity is used", async || client.get(CONFIGMAPS).await.unwrap().status == 200)
        .await;
}

/// Tokens that no apiserver has accepted yet share two upstream connections, so that clients with random
/// tokens cannot make jackstay open more.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn random_tokens_share_two_connections() {
    let peers = Peers::start(1);
    let proxy = peers
        .start_proxy(|config| {
            without_suspicion(config);
            config.upstreams[0].connections.max_streams = 5;
        })
        .await;
    let client = proxy.client_with(&peers.certs.anonymous()).await;
    peers.set_actions(std::iter::repeat_n(Action::Hang, 30));
    let tokens: Vec<_> = (0..30).map(|n| format!("Bearer random-{n}")).collect();
    let headers: Vec<_> = tokens.iter().map(|token| [("authorization", token.as_str())]).collect();
    let sending = join_all(headers.iter().map(|headers| async {
        let reply = client.request(Method::GET, CONFIGMAPS, headers, "").await.unwrap();
        assert_eq!(reply.status, 429);
    }));
    // Two connections have 5 streams each.
    let checking = until("10 requests are upstream and 20 are rejected", async || {
        let rejected = proxy.metric("jackstay_streams_exhausted_total").await;
        peers.requests().len() == 10 && rejected >= 20.0
    });
    tokio::select! {
        biased;
        _ = sending => panic!("no request waits for the peer"),
        () = checking => {}
    }
    let mut connections: Vec<_> =
        peers.requests().iter().map(|request| request.connection).collect();
    connections.sort_unstable();
    connections.dedup();
    assert_eq!(connections.len(), 2, "{connections:?}");
}

/// jackstay checks the certificate at each request, not only at the handshake. It also ends the connection, so that the
/// 401 may be that of another one.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn request_gets_401_when_the_client_certificate_has_expired() {
    let cluster = TestCluster::new(1);
    let proxy = cluster.start().await;
    let validity = Validity { not_after: SystemTime::now() + PATIENCE / 2, ..Validity::usual() };
    let issued = cluster.certs.pki.client_valid(&Subject::admin(), validity).unwrap();
    let credentials = cluster.certs.anonymous().certificate(&issued);
    let mut client = proxy.client_with(&credentials).await;
    let first = soon("a response", client.get(CONFIGMAPS)).await.unwrap();
    assert_eq!(first.status, 200, "the certificate expired before the first request");
    let mut last = first;
    until("the certificate has expired", async || {
        if client.is_closed() {
            client = proxy.client_with(&credentials).await;
        }
        // A request is not sent on a connection that is about to close.
        if let Ok(reply) = client.get(CONFIGMAPS).await {
            last = reply;
        }
        last.status != 200
    })
    .await;
    assert_eq!(last.status, 401);
    assert!(last.json()["message"].as_str().unwrap().contains("expired"), "{:?}", last.body);
}

/// A certificate of jackstay expires while a client with the same subject, whose certificate is renewed, uses it.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn identity_that_expires_in_use_is_not_used_until_it_is_renewed() {
    let cluster = TestCluster::new(1);
    cluster.state.add_token("bootstrap", User::new("system:bootstrap:a", &[]));
    let pki = &cluster.certs.pki;
    let short = Validity { not_after: SystemTime::now() + PATIENCE / 2, ..Validity::usual() };
    let short = pki.client_valid(&Subject::admin(), short).unwrap();
    let file = short.write_pair(cluster.certs.path(), "short").unwrap();
    let pair = CertPaths { cert_file: file.clone(), key_file: file };
    let proxy = cluster
        .start_with(|config| {
            without_suspicion(config);
            terminate_mode(config).identities = vec![pair.into()];
            config.upstreams[0].health.readyz.cert = None;
        })
        .await;
    let client = proxy.client().await;
    assert_eq!(soon("a response", client.get(CONFIGMAPS)).await.unwrap().status, 200);
    let expired = serial(&short);
    let is_shown = async |proxy: &Proxy| {
        let endpoint = &proxy.endpoints().await[0];
        let mut connections = endpoint["connections"].as_array().unwrap().iter();
        connections.any(|connection| {
            let serial = connection["serial"].as_str().unwrap_or_default();
            serial.eq_ignore_ascii_case(expired.trim_start_matches("00"))
        })
    };
    assert!(is_shown(&proxy).await);
    let mut last = client.get(CONFIGMAPS).await.unwrap();
    until("the certificate has expired", async || {
        last = client.get(CONFIGMAPS).await.unwrap();
        last.status != 200
    })
    .await;
    assert_eq!(last.status, 401, "{:?}", last.body);
    let message = last.json()["message"].as_str().unwrap().to_owned();
    assert!(message.contains("certificate expired") && message.contains("short.pem"), "{message}");
    let of_identity = || {
        cluster.state.audit().select(|record| record.certificate_serial.as_ref() == Some(&expired))
    };
    assert!(
        of_identity().iter().all(|record| record.user == "kubernetes-admin"),
        "the apiserver refused none"
    );
    until("connections with the certificate are closed", async || !is_shown(&proxy).await).await;
    until("the expiry is an event", async || {
        let events = proxy.events().await;
        events.iter().any(|event| event["kind"] == "certificate" && event["to"] == "expired")
    })
    .await;
    let status = proxy.status().await;
    let identity = &status["listeners"][0]["identities"][0];
    assert_eq!(identity["state"], "expired");
    assert!(identity["error"].as_str().unwrap().contains("certificate expired"), "{identity}");
    let expected = "readiness unknown: the identity has expired, and readyz.token_file is not set";
    until("the reason of the endpoint is the expiry", async || {
        proxy.endpoints().await[0]["reason"] == expected
    })
    .await;
    let token = proxy.client_with(&cluster.certs.anonymous().token("bootstrap")).await;
    assert_eq!(token.get(CONFIGMAPS).await.unwrap().status, 200);

    pki.client(&Subject::admin()).unwrap().write_pair(cluster.certs.path(), "short").unwrap();
    until("the identity is used", async || client.get(CONFIGMAPS).await.unwrap().status == 200)
        .await;
}

/// The certificate with which a node has joined the cluster stays in its kubeconfig; kubelet writes others to a file.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn identity_of_two_with_one_subject_is_the_certificate_that_expires_last() {
    let cluster = TestCluster::new(1);
    let pki = &cluster.certs.pki;
    let folder = cluster.certs.path();
    let joined = pki.client(&Subject::admin()).unwrap();
    let later = Validity::usual().not_after + Duration::from_secs(48 * 3600);
    let later = Validity { not_after: later, ..Validity::usual() };
    let rotated = pki.client_valid(&Subject::admin(), later).unwrap();
    let files = ["joined.pem", "rotated.pem"].map(|name| folder.join(name));
    joined.write_pair(folder, "joined").unwrap();
    let proxy = cluster
        .start_with(|config| {
            let pairs =
                files.clone().map(|file| CertPaths { cert_file: file.clone(), key_file: file });
            terminate_mode(config).identities = pairs.map(Into::into).to_vec();
            config.upstreams[0].health.readyz.cert = None;
        })
        .await;
    let client = proxy.client().await;
    let shown = |issued: &Issued| {
        let (serial, audit) = (serial(issued), cluster.state.audit());
        audit.select(|record| record.certificate_serial.as_ref() == Some(&serial)).len()
    };
    assert_eq!(soon("a response", client.get(CONFIGMAPS)).await.unwrap().status, 200);
    assert!(shown(&joined) > 0);
    let states = async || {
        let status = proxy.status().await;
        [0, 1].map(|n| status["listeners"][0]["identities"][n]["state"].clone())
    };
    assert_eq!(states().await, ["loaded", "awaited"]);
    rotated.write_pair(folder, "rotated").unwrap();
    until("the rotated certificate is shown", async || {
        assert_eq!(client.get(CONFIGMAPS).await.unwrap().status, 200);
        shown(&rotated) > 0
    })
    .await;
    assert_eq!(states().await, ["superseded", "loaded"]);
    // The first one has expired when jackstay starts again.
    let expired = pki.client_valid(&Subject::admin(), Validity::expired()).unwrap();
    expired.write_pair(folder, "joined").unwrap();
    let proxy = cluster
        .start_with(|config| {
            let pairs = files.map(|file| CertPaths { cert_file: file.clone(), key_file: file });
            terminate_mode(config).identities = pairs.map(Into::into).to_vec();
            config.upstreams[0].health.readyz.cert = None;
        })
        .await;
    let client = proxy.client().await;
    assert_eq!(soon("a response", client.get(CONFIGMAPS)).await.unwrap().status, 200);
    assert_eq!(shown(&expired), 0);
    let states = proxy.status().await["listeners"][0]["identities"].clone();
    assert_eq!([&states[0]["state"], &states[1]["state"]], ["superseded", "loaded"]);
}

/// The handshake succeeds, so that the client gets the reason instead of a TLS alert.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn client_certificate_of_version_1_gets_401_with_the_remedy() {
    let cluster = TestCluster::new(1);
    let proxy = cluster.start().await;
    cluster.state.add_token("alice", User::new("alice", &[]));
    let version_1 = cluster.certs.pki.client_version_1(&Subject::admin()).unwrap();
    let credentials = cluster.certs.anonymous().certificate(&version_1);
    let (status, message, record) = send(&cluster, &proxy, &credentials, &[]).await;
    assert_eq!((status, record.is_none()), (401, true));
    assert!(message.contains("is X.509 version 1: reissue it as version 3"), "{message}");
    // As with other certificates that cannot be verified, a token is used.
    let (status, _, record) = send(&cluster, &proxy, &credentials.token("alice"), &[]).await;
    assert_eq!((status, record.unwrap().user.as_str()), (200, "alice"));
}

/// A kubelet and jackstay with the same file: the apiserver accepts what jackstay shows it, but jackstay cannot
/// verify what kubelet shows it. A client with a certificate of version 3 for the same subject is forwarded.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn identity_of_version_1_is_used_and_shown_as_one_whose_clients_get_401() {
    let cluster = TestCluster::new(1);
    let pki = &cluster.certs.pki;
    let version_1 = pki.client_version_1(&Subject::admin()).unwrap();
    let file = version_1.write_pair(cluster.certs.path(), "old").unwrap();
    let pair = CertPaths { cert_file: file.clone(), key_file: file.clone() };
    let proxy =
        cluster.start_with(|config| terminate_mode(config).identities = vec![pair.into()]).await;
    // The demo apiserver, unlike kube-apiserver, does not accept it.
    let (_, _, record) = send(&cluster, &proxy, &cluster.certs.credentials(), &[]).await;
    assert_eq!(record.unwrap().certificate_serial, Some(serial(&version_1)));
    let same = cluster.certs.anonymous().certificate(&version_1);
    let (status, message, _) = send(&cluster, &proxy, &same, &[]).await;
    assert!(status == 401 && message.contains("X.509 version 1"), "{status} {message}");
    let has_remedy = |text: &str| {
        text.contains("X.509 version 1: reissue it as version 3")
            && text.contains("clients that use it get 401")
    };
    let readyz = proxy.page("/readyz").await;
    let line = readyz.lines().find(|line| line.contains("old.pem")).unwrap_or_default();
    assert!(line.starts_with("[-]identity ") && has_remedy(line), "{readyz}");
    assert!(readyz.starts_with("HTTP/1.1 200"), "{readyz}");
    let identity = &proxy.status().await["listeners"][0]["identities"][0];
    assert_eq!(identity["state"], "loaded");
    assert!(has_remedy(identity["error"].as_str().unwrap_or_default()), "{identity}");

    // A reissued file.
    pki.client(&Subject::admin()).unwrap().write_pair(cluster.certs.path(), "old").unwrap();
    until("the new certificate has no error", async || {
        proxy.status().await["listeners"][0]["identities"][0]["error"].is_null()
    })
    .await;
    // Back to version 1: the reload is an event with the consequence.
    version_1.write_pair(cluster.certs.path(), "old").unwrap();
    until("the reload of version 1 is an event", async || {
        let events = proxy.events().await;
        events.iter().any(|event| {
            event["kind"] == "certificate"
                && event["bad"] == true
                && event["reason"].as_str().unwrap_or_default().contains("X.509 version 1")
        })
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn ca_certificate_that_a_client_shows_is_valid_and_needs_an_identity() {
    let cluster = TestCluster::new(1);
    let proxy = cluster.start().await;
    // Trusted and presented: a self-signed CA. Go accepts it, too.
    let ca = cluster.certs.pki.authority().unwrap();
    let (status, message, _) =
        send(&cluster, &proxy, &cluster.certs.anonymous().certificate(&ca), &[]).await;
    assert_eq!(status, 401);
    assert!(
        message.contains("is valid, but jackstay has no credential for that subject")
            && !message.contains("Error"),
        "{message}"
    );
}

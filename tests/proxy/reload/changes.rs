//! Changes of single settings, and their effects on connections.

use crate::reload::setup::{Setup, Traffic};
use crate::support::{
    TestCluster, refusing_address, terminate_mode, tolerate_late_pongs, until, write_config,
};
use jackstay::app::reload::ReloadOutcome;
use jackstay_apiserver::pki::{Pki, Subject};
use jackstay_config::{AccessLog, CertPaths, Config, Level, Percent, VersionPreference};
use std::time::Duration;

/// The effect of a change on the upstream connections of the identity that carries the traffic.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Connections {
    /// All stay.
    Stay,
    /// Some are closed: those to the removed server.
    SomeClosed,
    /// Connections to one more server are added.
    Added,
    /// All are replaced, by connections to the same servers.
    Replaced,
}
use Connections::{Added, Replaced, SomeClosed, Stay};

/// A name, the change, its effect on connections, and the reported changes.
type Change = (&'static str, fn(&mut Config, &TestCluster), Connections, &'static [&'static str]);

/// Applied in this order, each in addition to those before.
const CHANGES: &[Change] = &[
    ("no change", |_, _| {}, Stay, &[]),
    ("access log", |c, _| c.log.access = AccessLog::All, Stay, &["log changed"]),
    ("log level", |c, _| c.log.level = Level::Error, Stay, &["log changed"]),
    (
        "drain timeout",
        |c, _| c.shutdown.drain_timeout = Duration::from_secs(1),
        Stay,
        &["shutdown changed"],
    ),
    ("connection limit", |c, _| c.listeners[0].limits_mut().max_connections = 50, Stay, LISTENER),
    ("request limits", |c, _| terminate_mode(c).limits.requests.max_streams = 77, Stay, LISTENER),
    (
        "groups that are never resumed",
        |c, _| terminate_mode(c).never_resume_groups = vec!["example.com".into()],
        Stay,
        LISTENER,
    ),
    ("health", |c, _| c.upstreams[0].health.dead_after = Duration::from_secs(9), Stay, UPSTREAM),
    ("pool", |c, _| c.upstreams[0].connections.max = 32, Stay, UPSTREAM),
    ("rebalance", |c, _| c.upstreams[0].rebalance = false, Stay, UPSTREAM),
    (
        "readyz",
        |c, _| c.upstreams[0].health.readyz.interval = Duration::from_secs(2),
        Stay,
        UPSTREAM,
    ),
    ("identity added", add_node, Stay, LISTENER),
    ("serving pair under another path", move_serving_pair, Stay, LISTENER),
    ("identity removed", |c, _| drop(terminate_mode(c).identities.pop()), Stay, LISTENER),
    ("endpoint removed", |c, _| drop(c.upstreams[0].endpoints.remove(0)), SomeClosed, UPSTREAM),
    ("endpoint added", insert_first_endpoint, Added, UPSTREAM),
    ("CA bundle changed", replace_ca_bundle, Replaced, UPSTREAM),
    (
        "server name changed",
        |c, _| c.upstreams[0].tls.server_name = Some("localhost".into()),
        Replaced,
        UPSTREAM,
    ),
    ("upstream added", add_upstream, Stay, &["upstream `spare` added"]),
    ("listener added", add_listener, Stay, &["listener `spare` added"]),
    (
        "upstream of a listener changed",
        |c, _| c.listeners[1].upstream = "spare".into(),
        Stay,
        &["listener `spare` changed"],
    ),
    ("listener removed", |c, _| drop(c.listeners.pop()), Stay, &["listener `spare` removed"]),
    ("upstream removed", |c, _| drop(c.upstreams.pop()), Stay, &["upstream `spare` removed"]),
];

const LISTENER: &[&str] = &["listener `apiserver` changed"];
const UPSTREAM: &[&str] = &["upstream `control-plane` changed"];

fn add_node(config: &mut Config, cluster: &TestCluster) {
    let node = cluster.certs.pki.client(&Subject::node("n1")).unwrap();
    let (cert_file, key_file) = node.write_to(cluster.certs.path(), "node").unwrap();
    terminate_mode(config).identities.push(CertPaths { cert_file, key_file }.into());
}

/// Copies the serving certificate and key to other paths.
fn move_serving_pair(config: &mut Config, cluster: &TestCluster) {
    let tls = &mut terminate_mode(config).tls.paths;
    for path in [&mut tls.cert_file, &mut tls.key_file] {
        let copy =
            cluster.certs.path().join(format!("copy-{}", path.file_name().unwrap().display()));
        std::fs::copy(&path, &copy).unwrap();
        *path = copy;
    }
}

fn insert_first_endpoint(config: &mut Config, cluster: &TestCluster) {
    config.upstreams[0].endpoints.insert(0, cluster.config().upstreams[0].endpoints[0].clone());
}

fn replace_ca_bundle(config: &mut Config, cluster: &TestCluster) {
    let path = cluster.certs.path().join("bundle.crt");
    let both = format!("{}{}", cluster.certs.pki.ca_pem(), Pki::new("next").unwrap().ca_pem());
    std::fs::write(&path, both).unwrap();
    config.upstreams[0].tls.ca_file = Some(path);
}

fn add_upstream(config: &mut Config, _: &TestCluster) {
    let mut spare = config.upstreams[0].clone();
    spare.name = "spare".into();
    config.upstreams.push(spare);
}

fn add_listener(config: &mut Config, _: &TestCluster) {
    let mut spare = config.listeners[0].clone();
    spare.name = "spare".into();
    config.listeners.push(spare);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn reload_of_one_change_reports_it_and_keeps_unaffected_connections() {
    // A connection that is suspected for a moment is not among those that are live.
    let mut setup = Setup::with(3, tolerate_late_pongs).await;
    setup.proxy.wait_connected(3).await;
    let traffic = Traffic::start(&setup, 200).await;
    let client = setup.client().await;
    let watch = setup.watch(&client).await;
    for (name, change, connections, expected) in CHANGES {
        println!("{name}");
        let before = setup.proxy.connections("identity-0").await;
        change(&mut setup.config, &setup.cluster);
        assert_eq!(setup.change(|_| {}).await, *expected, "{name}");
        traffic.expect_progress().await;
        watch.expect_complete(&setup).await;
        until(name, async || {
            let after = setup.proxy.connections("identity-0").await;
            let kept = after.iter().filter(|local| before.contains(local)).count();
            match connections {
                Stay => after == before,
                SomeClosed => after.len() < before.len() && kept == after.len(),
                Added => after.len() > before.len() && kept == before.len(),
                Replaced => kept == 0 && after.len() >= 3,
            }
        })
        .await;
        assert!(!client.is_closed(), "{name}");
    }
    traffic.end().await;
    let status = setup.proxy.status().await;
    assert_eq!(status["config"]["reloads"]["ok"], CHANGES.len());
    assert_eq!(status["config"]["reloads"]["failed"], 0);
    assert_eq!(status["config"]["last_reload"]["outcome"], "ok");
    let outcome = r#"jackstay_config_reloads_total{outcome="ok"}"#;
    assert!((setup.proxy.metric(outcome).await - CHANGES.len() as f64).abs() < 0.1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn reload_adds_and_removes_an_identity_of_a_connected_client() {
    let mut setup = Setup::new(1).await;
    let node = setup.cluster.certs.pki.client(&Subject::node("n1")).unwrap();
    let credentials = setup.cluster.certs.anonymous().certificate(&node);
    let client = setup.proxy.client_with(&credentials).await;
    let get = async || client.get("/api/v1/namespaces/default").await.unwrap();
    assert_eq!(get().await.status, 401);

    let (cert_file, key_file) = node.write_to(setup.cluster.certs.path(), "node").unwrap();
    let paths = CertPaths { cert_file, key_file };
    setup.change(|config| terminate_mode(config).identities.push(paths.clone().into())).await;
    assert_eq!(get().await.status, 200, "the connection that got 401 before");
    let watch = setup.watch(&client).await;

    // Removed: new requests get 401, and the watch continues.
    setup.change(|config| drop(terminate_mode(config).identities.pop())).await;
    let reply = get().await;
    assert_eq!(reply.status, 401);
    assert!(reply.json()["message"].as_str().unwrap().contains("system:node:n1"), "{reply:?}");
    watch.expect_complete(&setup).await;
    drop((watch, client));
    until("the connections of the identity are closed", async || {
        !setup.proxy.page("/status").await.contains("\"identity-2\"")
    })
    .await;

    // Added again, the identity gets a new slot.
    setup.change(|config| terminate_mode(config).identities.push(paths.into())).await;
    let client = setup.proxy.client_with(&credentials).await;
    assert_eq!(client.get("/api/v1/namespaces/default").await.unwrap().status, 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn reload_of_the_client_ca_verifies_client_certificates_again() {
    let mut setup = Setup::new(1).await;
    let client = setup.client().await;
    let path = "/api/v1/namespaces/default";
    assert_eq!(client.get(path).await.unwrap().status, 200);
    let other = Pki::new("other").unwrap();
    let dir = setup.cluster.certs.path().join("other");
    std::fs::create_dir(&dir).unwrap();
    let ca = other.write_ca(&dir).unwrap();
    let before = terminate_mode(&mut setup.config).client_ca_file.clone();
    setup.change(|config| terminate_mode(config).client_ca_file = Some(ca)).await;
    until("the connection without a valid certificate ends", async || client.is_closed()).await;
    assert_eq!(setup.client().await.get(path).await.unwrap().status, 401);
    setup.change(|config| terminate_mode(config).client_ca_file = before).await;
    assert_eq!(setup.client().await.get(path).await.unwrap().status, 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn reload_with_a_change_that_needs_a_restart_reports_it_and_applies_the_others() {
    let mut setup = Setup::new(1).await;
    let outcome = setup
        .reload(|config| {
            config.workers = 2;
            config.log.level = Level::Warn;
        })
        .await;
    let ReloadOutcome::Ok { changed, needs_restart } = outcome else { panic!("{outcome:?}") };
    assert_eq!(changed, ["log changed"], "the log is changed without a restart");
    assert_eq!(needs_restart, ["workers 1 → 2"]);
    let status = setup.proxy.status().await;
    assert_eq!(status["config"]["last_reload"]["needs_restart"][0], needs_restart[0]);
    assert_eq!(setup.change(|config| config.workers = 1).await, [""; 0]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn reload_moves_the_admin_endpoint_to_another_address() {
    let mut setup = Setup::new(1).await;
    let mut second = refusing_address();
    second.set_ip("127.0.0.2".parse().unwrap());
    setup.change(|config| config.admin.bind = second).await;
    setup.proxy.admin = second;
    assert!(setup.proxy.page("/readyz").await.starts_with("HTTP/1.1 200"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn changed_file_is_reloaded_once_without_a_signal() {
    let mut setup = Setup::new(1).await;
    setup.config.log.access = AccessLog::Off;
    write_config(&setup.file, &setup.config);
    until("the file is reloaded", async || {
        setup.proxy.status().await["config"]["last_reload"]["trigger"] == "file changed"
    })
    .await;
    assert!(setup.proxy.page("/config").await.contains("\"access\": \"off\""));
    assert_eq!(setup.proxy.status().await["config"]["reloads"]["ok"], 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn reload_of_version_preference_and_canary_changes_where_requests_go() {
    const UPGRADED: &str = "kubelet/v1.37.0 (linux/amd64) kubernetes/0c5b1c1";
    let cluster = TestCluster::new(2);
    for (server, version) in cluster.servers.iter().zip(["v1.36.2", "v1.37.0"]) {
        server.set_version(version);
    }
    // A hedged request would reach two apiservers.
    let mut setup = Setup::of(cluster, tolerate_late_pongs).await;
    until("the versions are known", async || {
        let endpoints = setup.proxy.endpoints().await;
        endpoints.iter().all(|endpoint| endpoint["version"].is_string())
    })
    .await;
    setup.proxy.wait_connected(2).await;
    let client = setup.client().await;
    setup.cluster.expect_load_decides(&client, UPGRADED).await;

    let set_preference =
        |preference| move |config: &mut Config| config.upstreams[0].version_preference = preference;
    assert_eq!(setup.change(set_preference(VersionPreference::Newest)).await, UPSTREAM);
    assert_eq!(setup.cluster.spread(&client, UPGRADED, 100).await, [0, 100]);
    assert_eq!(setup.change(set_preference(VersionPreference::None)).await, UPSTREAM);
    setup.cluster.expect_load_decides(&client, UPGRADED).await;

    let set_canary = |percent| {
        move |config: &mut Config| config.upstreams[0].canary = Percent::new(percent).unwrap()
    };
    for percent in [10, 5] {
        assert_eq!(setup.change(set_canary(percent)).await, UPSTREAM);
        until("the canary is active", async || {
            let canary = setup.proxy.status().await["upstreams"][0]["canary"].clone();
            canary["state"] == "active" && canary["share"] == format!("{percent}%")
        })
        .await;
        let newest = usize::from(percent) * 2;
        assert_eq!(setup.cluster.spread(&client, "curl", 200).await, [200 - newest, newest]);
    }
    assert_eq!(setup.change(set_canary(0)).await, UPSTREAM);
    assert!(setup.proxy.status().await["upstreams"][0]["canary"].is_null());
    setup.cluster.expect_load_decides(&client, "curl").await;
}

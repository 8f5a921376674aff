//! A change at a time: who notices, and whose connections are touched.

use crate::setup::{Setup, Traffic};
use crate::support::{TestCluster, refusing_address, terminate_mode, until, write_config};
use jackstay::app::reload::ReloadOutcome;
use jackstay::config::{AccessLog, CertPaths, Config, Level};
use jackstay::demo::pki::{Pki, Subject};
use std::time::Duration;

/// What becomes of the upstream connections of the identity that has all the traffic.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Connections {
    /// The same ones.
    Stay,
    /// Those to the first server go.
    FirstLeaves,
    /// One more server.
    FirstIsBack,
    /// Others, to the same servers.
    AllNew,
}
use Connections::{AllNew, FirstIsBack, FirstLeaves, Stay};

type Change = (&'static str, fn(&mut Config, &TestCluster), Connections, &'static [&'static str]);

/// One after the other, each on top of those before.
const CHANGES: &[Change] = &[
    ("nothing", |_, _| {}, Stay, &[]),
    ("access log", |c, _| c.log.access = AccessLog::All, Stay, &["log changed"]),
    ("log level", |c, _| c.log.level = Level::Error, Stay, &["log changed"]),
    (
        "drain timeout",
        |c, _| c.shutdown.drain_timeout = Duration::from_secs(1),
        Stay,
        &["shutdown changed"],
    ),
    ("a limit of connections", |c, _| c.listeners[0].limits.max_connections = 50, Stay, LISTENER),
    ("limits of requests", |c, _| terminate_mode(c).limits.max_streams = 77, Stay, LISTENER),
    ("groups", |c, _| terminate_mode(c).resume_groups = vec!["example.com".into()], Stay, LISTENER),
    ("health", |c, _| c.upstreams[0].health.dead_after = Duration::from_secs(4), Stay, UPSTREAM),
    ("pool", |c, _| c.upstreams[0].connections.max = 32, Stay, UPSTREAM),
    ("rebalance", |c, _| c.upstreams[0].rebalance = false, Stay, UPSTREAM),
    (
        "readyz",
        |c, _| c.upstreams[0].health.readyz.interval = Duration::from_secs(2),
        Stay,
        UPSTREAM,
    ),
    ("another identity", add_node, Stay, LISTENER),
    ("the same files by other names", other_names, Stay, LISTENER),
    ("an identity less", |c, _| drop(terminate_mode(c).identities.pop()), Stay, LISTENER),
    ("an endpoint less", |c, _| drop(c.upstreams[0].endpoints.remove(0)), FirstLeaves, UPSTREAM),
    ("an endpoint more", first_endpoint, FirstIsBack, UPSTREAM),
    ("another CA bundle", ca_bundle, AllNew, UPSTREAM),
    ("another server name", |c, _| server_name(c, "localhost"), AllNew, UPSTREAM),
    ("an upstream more", add_upstream, Stay, &["upstream `spare` added"]),
    ("a listener more", add_listener, Stay, &["listener `spare` added"]),
    (
        "a listener elsewhere",
        |c, _| c.listeners[1].upstream = "spare".into(),
        Stay,
        &["listener `spare` changed"],
    ),
    ("a listener less", |c, _| drop(c.listeners.pop()), Stay, &["listener `spare` removed"]),
    ("an upstream less", |c, _| drop(c.upstreams.pop()), Stay, &["upstream `spare` removed"]),
];

const LISTENER: &[&str] = &["listener `apiserver` changed"];
const UPSTREAM: &[&str] = &["upstream `control-plane` changed"];

fn add_node(config: &mut Config, cluster: &TestCluster) {
    let node = cluster.certs.pki.client(&Subject::node("n1")).unwrap();
    let (cert_file, key_file) = node.write_to(cluster.certs.path(), "node").unwrap();
    terminate_mode(config).identities.push(CertPaths { cert_file, key_file });
}

/// The serving pair under another path: the certificate shown is the same.
fn other_names(config: &mut Config, cluster: &TestCluster) {
    let tls = &mut terminate_mode(config).tls;
    for path in [&mut tls.cert_file, &mut tls.key_file] {
        let copy =
            cluster.certs.path().join(format!("copy-{}", path.file_name().unwrap().display()));
        std::fs::copy(&path, &copy).unwrap();
        *path = copy;
    }
}

fn first_endpoint(config: &mut Config, cluster: &TestCluster) {
    config.upstreams[0].endpoints.insert(0, cluster.config().upstreams[0].endpoints[0].clone());
}

fn ca_bundle(config: &mut Config, cluster: &TestCluster) {
    let path = cluster.certs.path().join("bundle.crt");
    let both = format!("{}{}", cluster.certs.pki.ca_pem(), Pki::new("next").unwrap().ca_pem());
    std::fs::write(&path, both).unwrap();
    config.upstreams[0].tls.ca_file = Some(path);
}

fn server_name(config: &mut Config, name: &str) {
    config.upstreams[0].tls.server_name = Some(name.into());
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
async fn a_change_touches_what_it_names() {
    let mut setup = Setup::new(3).await;
    setup.proxy.wait_connected(3).await;
    let traffic = Traffic::start(&setup, 200).await;
    let client = setup.client().await;
    let watch = setup.watch(&client).await;
    let of_admin = "identity-0";
    for (name, change, connections, said) in CHANGES {
        println!("{name}");
        let before = setup.proxy.connections(of_admin).await;
        change(&mut setup.config, &setup.cluster);
        assert_eq!(setup.change(|_| {}).await, *said, "{name}");
        traffic.goes_on().await;
        watch.is_complete(&setup).await;
        until(name, async || {
            let after = setup.proxy.connections(of_admin).await;
            let kept = after.iter().filter(|local| before.contains(local)).count();
            match connections {
                Stay => after == before,
                FirstLeaves => after.len() < before.len() && kept == after.len(),
                FirstIsBack => after.len() > before.len() && kept == before.len(),
                AllNew => kept == 0 && after.len() >= 3,
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
async fn an_identity_comes_and_goes_under_its_clients() {
    let mut setup = Setup::new(1).await;
    let node = setup.cluster.certs.pki.client(&Subject::node("n1")).unwrap();
    let who = setup.cluster.certs.anonymous().certificate(&node);
    let client = setup.proxy.client_with(&who).await;
    let ask = async || client.get("/api/v1/namespaces/default").await.unwrap();
    let reply = ask().await;
    assert_eq!(reply.status, 401);

    let (cert_file, key_file) = node.write_to(setup.cluster.certs.path(), "node").unwrap();
    let paths = CertPaths { cert_file, key_file };
    setup.change(|config| terminate_mode(config).identities.push(paths.clone())).await;
    assert_eq!(ask().await.status, 200, "on the connection that was refused");
    let watch = setup.watch(&client).await;

    // Gone: nobody is it any more, and what runs goes on.
    setup.change(|config| drop(terminate_mode(config).identities.pop())).await;
    let reply = ask().await;
    assert_eq!(reply.status, 401);
    assert!(reply.json()["message"].as_str().unwrap().contains("system:node:n1"), "{reply:?}");
    watch.is_complete(&setup).await;
    drop((watch, client));
    until("its connections are gone", async || {
        !setup.proxy.page("/status").await.contains("\"identity-2\"")
    })
    .await;

    // Back: another slot, so that nobody finds the old one.
    setup.change(|config| terminate_mode(config).identities.push(paths)).await;
    let client = setup.proxy.client_with(&who).await;
    assert_eq!(client.get("/api/v1/namespaces/default").await.unwrap().status, 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn proofs_of_a_client_ca_that_is_replaced_are_void() {
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
    assert_eq!(client.get(path).await.unwrap().status, 401);
    setup.change(|config| terminate_mode(config).client_ca_file = before).await;
    assert_eq!(client.get(path).await.unwrap().status, 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn what_needs_a_restart_is_said() {
    let mut setup = Setup::new(1).await;
    let outcome = setup
        .reload(|config| {
            config.workers = 2;
            config.log.level = Level::Warn;
        })
        .await;
    let ReloadOutcome::Ok { changed, needs_restart } = outcome else { panic!("{outcome:?}") };
    assert_eq!(changed, ["log changed"], "the rest is followed");
    assert_eq!(needs_restart, ["workers 1 → 2"]);
    let status = setup.proxy.status().await;
    assert_eq!(status["config"]["last_reload"]["needs_restart"][0], needs_restart[0]);
    assert_eq!(setup.change(|config| config.workers = 1).await, [""; 0]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn the_admin_endpoint_moves() {
    let mut setup = Setup::new(1).await;
    let mut second = refusing_address();
    second.set_ip("127.0.0.2".parse().unwrap());
    setup.change(|config| config.admin.bind = second).await;
    setup.proxy.admin = second;
    assert!(setup.proxy.page("/readyz").await.starts_with("HTTP/1.1 200"));
}

/// Nobody sends a signal: a change of the file is enough.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_changed_file_is_followed() {
    let mut setup = Setup::new(1).await;
    setup.config.log.access = AccessLog::Off;
    write_config(&setup.file, &setup.config);
    until("the file is read", async || {
        setup.proxy.status().await["config"]["last_reload"]["trigger"] == "file changed"
    })
    .await;
    assert!(setup.proxy.page("/config").await.contains("\"access\": \"off\""));
    // And only then.
    assert_eq!(setup.proxy.status().await["config"]["reloads"]["ok"], 1);
}

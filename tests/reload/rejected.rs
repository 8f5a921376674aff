//! A configuration that cannot be followed: what ran before runs on, and the reason is told.

use crate::setup::{Setup, Traffic};
use crate::support::{TestCluster, terminate_mode, until, write_config};
use jackstay::app::reload::ReloadOutcome;
use jackstay::config::{CertPaths, Config};
use jackstay::demo::pki::Pki;
use serde_json::Value;
use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::process::Command;
use std::sync::LazyLock;

/// Breaks a configuration; where, in the message.
type Break = (&'static str, fn(&mut Config, &TestCluster), &'static str);

const BREAKS: &[Break] = &[
    (
        "a serving certificate that is not there",
        |c, _| terminate_mode(c).tls.cert_file = "/nowhere/tls.crt".into(),
        "cannot read /nowhere/tls.crt: No such file or directory",
    ),
    (
        "a key of another certificate",
        |c, w| terminate_mode(c).tls.key_file = w.certs.path().join("admin.key"),
        "does not belong to the certificate",
    ),
    (
        "an identity that is no certificate",
        |c, w| {
            let cert_file = file(w, "hello");
            terminate_mode(c).identities.push(CertPaths { key_file: cert_file.clone(), cert_file });
        },
        "contains no certificate",
    ),
    (
        "a CA bundle that is none",
        |c, w| c.upstreams[0].tls.ca_file = Some(file(w, "hello")),
        "contains no certificate",
    ),
    (
        "a client CA that is not there",
        |c, _| terminate_mode(c).client_ca_file = Some("/nowhere/ca.crt".into()),
        "cannot read /nowhere/ca.crt",
    ),
    (
        "a new listener whose address is taken",
        |c, _| {
            let mut taken = c.listeners[0].clone();
            taken.name = "taken".into();
            taken.bind = vec![held()];
            c.listeners.push(taken);
        },
        "listener `taken` cannot listen on",
    ),
    (
        "a listener moved where its address is taken",
        |c, _| c.listeners[0].bind.push(held()),
        "listener `apiserver` cannot listen on",
    ),
    ("an admin address that is taken", |c, _| c.admin.bind = held(), "admin cannot listen on"),
    ("a listener that leads nowhere", |c, _| c.listeners[0].upstream = "nobody".into(), "upstream"),
];

/// An address that somebody has.
fn held() -> SocketAddr {
    static HELD: LazyLock<TcpListener> =
        LazyLock::new(|| TcpListener::bind("127.0.0.1:0").unwrap());
    HELD.local_addr().unwrap()
}

fn file(cluster: &TestCluster, text: &str) -> std::path::PathBuf {
    let path = cluster.certs.path().join("broken.pem");
    std::fs::write(&path, text).unwrap();
    path
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn every_error_keeps_what_runs() {
    let mut setup = Setup::new(2).await;
    let traffic = Traffic::start(&setup, 200).await;
    let client = setup.client().await;
    let watch = setup.watch(&client).await;
    setup.proxy.wait_connected(2).await;
    let connections = setup.proxy.connections("identity-0").await;
    let effective = body(&setup.proxy.page("/config").await);
    let good = setup.config.clone();
    for (name, change, message) in BREAKS {
        println!("{name}");
        setup.config = good.clone();
        change(&mut setup.config, &setup.cluster);
        // Something good beside it, which must not be followed either.
        setup.config.listeners[0].limits.max_connections = 7;
        setup.config.upstreams[0].connections.max = 7;
        is_refused(&mut setup, message).await;
        traffic.goes_on().await;
        watch.is_complete(&setup).await;
    }
    println!("text that is no configuration");
    for (text, message) in [
        ("listeners: [", "jackstay.yaml: "),
        ("", "the file is empty"),
        ("upstreams: 3\nlisteners: x\nnonsense: 1\n", "nonsense"),
        ("\0", "not a text file"),
    ] {
        std::fs::write(&setup.file, text).unwrap();
        expect_refusal(&setup, message).await;
    }
    std::fs::remove_file(&setup.file).unwrap();
    expect_refusal(&setup, "cannot read the configuration: No such file").await;
    assert!(Command::new("mkfifo").arg(&setup.file).status().unwrap().success());
    expect_refusal(&setup, "not a regular file: it cannot be read again").await;
    traffic.goes_on().await;
    watch.is_complete(&setup).await;
    assert_eq!(setup.proxy.connections("identity-0").await, connections);
    assert_eq!(body(&setup.proxy.page("/config").await), effective);

    let failed = BREAKS.len() + 6;
    let counted = setup.proxy.metric(r#"jackstay_config_reloads_total{outcome="failed"}"#).await;
    assert!((counted - failed as f64).abs() < 0.1, "{counted} of {failed}");
    assert!(setup.proxy.metric("jackstay_config_last_reload_successful").await < 0.5);
    let told = attempts(&setup).await;
    let last = told.last().unwrap();
    assert_eq!(last["to"], "refused");
    assert_eq!(last["effect"], "the old configuration stays");
    let why = last["reason"].as_str().unwrap();
    assert!(why.contains("not a regular file"), "{told:?}");

    // And the next good one is followed.
    setup.config = good;
    assert_eq!(setup.change(|_| {}).await, [""; 0]);
    assert!(setup.proxy.metric("jackstay_config_last_reload_successful").await > 0.5);
    let told = attempts(&setup).await;
    assert_eq!(told.last().unwrap()["to"], "reloaded");
    assert!(told.last().unwrap()["reason"].as_str().unwrap().starts_with("changed: "), "{told:?}");
    assert!(!setup.proxy.page("/readyz").await.contains("configuration"));
    traffic.end().await;
}

/// The reloads that `/events` tells of.
async fn attempts(setup: &Setup) -> Vec<Value> {
    let events: Value = serde_json::from_str(&body(&setup.proxy.page("/events").await)).unwrap();
    let events = events["events"].as_array().unwrap().iter();
    events.filter(|event| event["kind"] == "configuration").cloned().collect()
}

fn body(page: &str) -> String {
    page.split_once("\r\n\r\n").unwrap().1.to_owned()
}

async fn is_refused(setup: &mut Setup, message: &str) {
    write_config(&setup.file, &setup.config);
    expect_refusal(setup, message).await;
}

async fn expect_refusal(setup: &Setup, message: &str) {
    let outcome = setup.reload_file().await;
    let ReloadOutcome::Failed { errors } = outcome else { panic!("{message}: {outcome:?}") };
    assert!(errors.iter().any(|error| error.contains(message)), "{message}: {errors:?}");
    let status = setup.proxy.status().await;
    let last = &status["config"]["last_reload"];
    assert_eq!(last["outcome"], "failed");
    assert_eq!(last["errors"].as_array().unwrap().len(), errors.len());
    let readyz = setup.proxy.page("/readyz").await;
    assert!(readyz.starts_with("HTTP/1.1 200"), "{readyz}");
    assert!(readyz.contains("configuration"), "{readyz}");
}

/// What was bound for a configuration that fails is free again.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_refused_configuration_leaves_nothing_behind() {
    let mut setup = Setup::new(1).await;
    let mut free = setup.proxy.addr;
    free.set_ip("127.0.0.3".parse().unwrap());
    let good = setup.config.clone();
    let mut first = good.listeners[0].clone();
    first.name = "first".into();
    first.bind = vec![free];
    let mut second = first.clone();
    second.name = "second".into();
    second.bind = vec![held()];
    setup.config.listeners.extend([first, second]);
    is_refused(&mut setup, "listener `second`").await;
    drop(TcpListener::bind(free).unwrap());
    setup.config = good;
}

/// Somebody has the port on another address, so that ours cannot become every address: ours stays,
/// and nobody can come beside it.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_refused_move_to_every_address_leaves_the_old_one() {
    let mut setup = Setup::new(1).await;
    let ours = setup.proxy.addr;
    let mut theirs = ours;
    theirs.set_ip("127.0.0.3".parse().unwrap());
    let held = TcpListener::bind(theirs).unwrap();
    let good = setup.config.clone();
    setup.config.listeners[0].bind = vec![SocketAddr::new([0, 0, 0, 0].into(), ours.port())];
    is_refused(&mut setup, "listener `apiserver` cannot listen on 0.0.0.0").await;
    drop(held);
    TcpListener::bind(ours).unwrap_err();
    let client = setup.client().await;
    assert_eq!(client.get("/api/v1/namespaces/default").await.unwrap().status, 200);
    setup.config = good;
}

/// A file that is written bit by bit is read when it is whole, or again when it is.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn half_a_file_is_no_harm() {
    let mut setup = Setup::new(1).await;
    let traffic = Traffic::start(&setup, 50).await;
    setup.config.listeners[0].limits.max_connections = 77;
    write_config(&setup.file, &setup.config);
    let whole = std::fs::read(&setup.file).unwrap();
    std::fs::write(&setup.file, &whole[..whole.len() / 2]).unwrap();
    until("half of it is refused", async || {
        setup.proxy.status().await["config"]["reloads"]["failed"] == 1
    })
    .await;
    std::fs::write(&setup.file, &whole).unwrap();
    until("all of it is followed", async || {
        setup.proxy.status().await["config"]["last_reload"]["outcome"] == "ok"
    })
    .await;
    assert!(setup.proxy.page("/config").await.contains("\"max_connections\": 77"));
    traffic.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn the_wrong_ca_is_followed_and_its_harm_is_bounded_by_a_way_back() {
    let mut setup = Setup::new(1).await;
    let dir = setup.cluster.certs.path().join("wrong");
    std::fs::create_dir(&dir).unwrap();
    let wrong = Pki::new("wrong").unwrap().write_ca(Path::new(&dir)).unwrap();
    setup.proxy.wait_connected(1).await;
    let right = setup.config.upstreams[0].tls.ca_file.replace(wrong);
    setup.change(|_| {}).await;
    let client = setup.client().await;
    // While nothing else comes up, what is up is used for a moment.
    assert_eq!(client.get("/api/v1/namespaces/default").await.unwrap().status, 200);
    setup.change(|config| config.upstreams[0].tls.ca_file = right).await;
    assert_eq!(client.get("/api/v1/namespaces/default").await.unwrap().status, 200);
}

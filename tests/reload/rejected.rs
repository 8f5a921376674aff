//! Configurations that cannot be applied: the old one stays, and the reason is reported.

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

/// A name, a change that breaks a configuration, and a part of the error.
type Break = (&'static str, fn(&mut Config, &TestCluster), &'static str);

const BREAKS: &[Break] = &[
    (
        "missing serving certificate",
        |c, _| terminate_mode(c).tls.paths.cert_file = "/nowhere/tls.crt".into(),
        "cannot read /nowhere/tls.crt: No such file or directory",
    ),
    (
        "key of another certificate",
        |c, w| terminate_mode(c).tls.paths.key_file = w.certs.path().join("admin.key"),
        "does not belong to the certificate",
    ),
    (
        "identity without a certificate",
        |c, w| {
            let cert_file = file(w, "hello");
            terminate_mode(c).identities.push(CertPaths { key_file: cert_file.clone(), cert_file });
        },
        "contains no certificate",
    ),
    (
        "CA bundle without a certificate",
        |c, w| c.upstreams[0].tls.ca_file = Some(file(w, "hello")),
        "contains no certificate",
    ),
    (
        "missing client CA",
        |c, _| terminate_mode(c).client_ca_file = Some("/nowhere/ca.crt".into()),
        "cannot read /nowhere/ca.crt",
    ),
    (
        "new listener whose address is taken",
        |c, _| {
            let mut taken = c.listeners[0].clone();
            taken.name = "taken".into();
            taken.bind = vec![taken_address()];
            c.listeners.push(taken);
        },
        "listener `taken` cannot listen on",
    ),
    (
        "listener moved to a taken address",
        |c, _| c.listeners[0].bind.push(taken_address()),
        "listener `apiserver` cannot listen on",
    ),
    ("taken admin address", |c, _| c.admin.bind = taken_address(), "admin cannot listen on"),
    (
        "listener with an unknown upstream",
        |c, _| c.listeners[0].upstream = "nobody".into(),
        "upstream",
    ),
];

/// An address that another socket has.
fn taken_address() -> SocketAddr {
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
async fn every_error_keeps_the_old_configuration() {
    let mut setup = Setup::new(2).await;
    let traffic = Traffic::start(&setup, 200).await;
    let client = setup.client().await;
    let watch = setup.watch(&client).await;
    setup.proxy.wait_connected(2).await;
    let connections = setup.proxy.connections("identity-0").await;
    let effective = setup.proxy.json("/config").await;
    let good = setup.config.clone();
    for (name, change, message) in BREAKS {
        println!("{name}");
        setup.config = good.clone();
        change(&mut setup.config, &setup.cluster);
        // A valid change beside it, which must not be applied either.
        setup.config.listeners[0].limits_mut().max_connections = 7;
        setup.config.upstreams[0].connections.max = 7;
        expect_rejection_of(&mut setup, message).await;
        traffic.goes_on().await;
        watch.is_complete(&setup).await;
    }
    println!("invalid text");
    for (text, message) in [
        ("listeners: [", "jackstay.yaml: "),
        ("", "the file is empty"),
        ("upstreams: 3\nlisteners: x\nnonsense: 1\n", "nonsense"),
        ("\0", "not a text file"),
    ] {
        std::fs::write(&setup.file, text).unwrap();
        expect_rejection(&setup, message).await;
    }
    std::fs::remove_file(&setup.file).unwrap();
    expect_rejection(&setup, "cannot read the configuration: No such file").await;
    assert!(Command::new("mkfifo").arg(&setup.file).status().unwrap().success());
    expect_rejection(&setup, "not a regular file: it cannot be read again").await;
    traffic.goes_on().await;
    watch.is_complete(&setup).await;
    assert_eq!(setup.proxy.connections("identity-0").await, connections);
    assert_eq!(setup.proxy.json("/config").await, effective);

    let failed = BREAKS.len() + 6;
    let counted = setup.proxy.metric(r#"jackstay_config_reloads_total{outcome="failed"}"#).await;
    assert!((counted - failed as f64).abs() < 0.1, "{counted} of {failed}");
    assert!(setup.proxy.metric("jackstay_config_last_reload_successful").await < 0.5);
    let events = reloads(&setup).await;
    let last = events.last().unwrap();
    assert_eq!(last["to"], "refused");
    assert_eq!(last["effect"], "the old configuration stays");
    let why = last["reason"].as_str().unwrap();
    assert!(why.contains("not a regular file"), "{events:?}");

    // The next valid configuration is applied.
    setup.config = good;
    assert_eq!(setup.change(|_| {}).await, [""; 0]);
    assert!(setup.proxy.metric("jackstay_config_last_reload_successful").await > 0.5);
    let events = reloads(&setup).await;
    assert_eq!(events.last().unwrap()["to"], "reloaded");
    assert!(
        events.last().unwrap()["reason"].as_str().unwrap().starts_with("changed: "),
        "{events:?}"
    );
    assert!(!setup.proxy.page("/readyz").await.contains("configuration"));
    traffic.end().await;
}

/// The reloads in `/events`.
async fn reloads(setup: &Setup) -> Vec<Value> {
    let mut events = setup.proxy.events().await;
    events.retain(|event| event["kind"] == "configuration");
    events
}

async fn expect_rejection_of(setup: &mut Setup, message: &str) {
    write_config(&setup.file, &setup.config);
    expect_rejection(setup, message).await;
}

async fn expect_rejection(setup: &Setup, message: &str) {
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

/// Sockets that were bound for a rejected configuration are closed.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn rejected_configuration_releases_its_sockets() {
    let mut setup = Setup::new(1).await;
    let mut free = setup.proxy.addr;
    free.set_ip("127.0.0.3".parse().unwrap());
    let good = setup.config.clone();
    let mut first = good.listeners[0].clone();
    first.name = "first".into();
    first.bind = vec![free];
    let mut second = first.clone();
    second.name = "second".into();
    second.bind = vec![taken_address()];
    setup.config.listeners.extend([first, second]);
    expect_rejection_of(&mut setup, "listener `second`").await;
    drop(TcpListener::bind(free).unwrap());
    setup.config = good;
}

/// Another socket has the port on another address, so the listener cannot move to the wildcard
/// address: it keeps its own, exclusively.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn rejected_move_to_the_wildcard_address_keeps_the_old_one() {
    let mut setup = Setup::new(1).await;
    let ours = setup.proxy.addr;
    let mut theirs = ours;
    theirs.set_ip("127.0.0.3".parse().unwrap());
    let taken_address = TcpListener::bind(theirs).unwrap();
    let good = setup.config.clone();
    setup.config.listeners[0].bind = vec![SocketAddr::new([0, 0, 0, 0].into(), ours.port())];
    expect_rejection_of(&mut setup, "listener `apiserver` cannot listen on 0.0.0.0").await;
    drop(taken_address);
    TcpListener::bind(ours).unwrap_err();
    let client = setup.client().await;
    assert_eq!(client.get("/api/v1/namespaces/default").await.unwrap().status, 200);
    setup.config = good;
}

/// A file that is written in parts is reloaded when it is complete.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn incomplete_file_is_rejected_until_it_is_complete() {
    let mut setup = Setup::new(1).await;
    let traffic = Traffic::start(&setup, 50).await;
    setup.config.listeners[0].limits_mut().max_connections = 77;
    write_config(&setup.file, &setup.config);
    let whole = std::fs::read(&setup.file).unwrap();
    std::fs::write(&setup.file, &whole[..whole.len() / 2]).unwrap();
    until("the incomplete file is rejected", async || {
        setup.proxy.status().await["config"]["reloads"]["failed"] == 1
    })
    .await;
    std::fs::write(&setup.file, &whole).unwrap();
    until("the complete file is applied", async || {
        setup.proxy.status().await["config"]["last_reload"]["outcome"] == "ok"
    })
    .await;
    assert!(setup.proxy.page("/config").await.contains("\"max_connections\": 77"));
    traffic.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn wrong_ca_is_applied_and_can_be_reverted() {
    let mut setup = Setup::new(1).await;
    let dir = setup.cluster.certs.path().join("wrong");
    std::fs::create_dir(&dir).unwrap();
    let wrong = Pki::new("wrong").unwrap().write_ca(Path::new(&dir)).unwrap();
    setup.proxy.wait_connected(1).await;
    let right = setup.config.upstreams[0].tls.ca_file.replace(wrong);
    setup.change(|_| {}).await;
    let client = setup.client().await;
    // As long as no new connection succeeds, the old ones are used.
    assert_eq!(client.get("/api/v1/namespaces/default").await.unwrap().status, 200);
    setup.change(|config| config.upstreams[0].tls.ca_file = right).await;
    assert_eq!(client.get("/api/v1/namespaces/default").await.unwrap().status, 200);
}

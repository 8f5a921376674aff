//! Configurations that cannot be applied: the old one stays in use, and the errors are reported.

use crate::reload::setup::{Setup, Traffic};
use crate::support::{
    TestCluster, pause, terminate_mode, tolerate_late_pongs, until, write_config,
};
use jackstay::app::reload::ReloadOutcome;
use jackstay_apiserver::pki::Pki;
use jackstay_config::{CertPaths, Config};
use serde_json::Value;
use std::net::{SocketAddr, TcpListener};
use std::process::Command;
use std::sync::LazyLock;
use std::time::Duration;

/// A name, a change that makes a configuration invalid, and a part of the error.
type InvalidChange = (&'static str, fn(&mut Config, &TestCluster), &'static str);

const INVALID_CHANGES: &[InvalidChange] = &[
    (
        "missing serving certificate",
        |c, _| terminate_mode(c).tls.paths.cert_file = "/nowhere/tls.crt".into(),
        "cannot read /nowhere/tls.crt: No such file or directory",
    ),
    (
        "key of another certificate",
        |c, cluster| terminate_mode(c).tls.paths.key_file = cluster.certs.path().join("admin.key"),
        "does not belong to the certificate",
    ),
    (
        "identity without a certificate",
        |c, cluster| {
            let cert_file = file_without_pem(cluster);
            terminate_mode(c)
                .identities
                .push(CertPaths { key_file: cert_file.clone(), cert_file }.into());
        },
        "contains no certificate",
    ),
    (
        "CA bundle without a certificate",
        |c, cluster| c.upstreams[0].tls.ca_file = Some(file_without_pem(cluster)),
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
        |c, _| c.listeners[0].upstream = "missing".into(),
        "upstream",
    ),
];

/// An address on which another socket listens.
fn taken_address() -> SocketAddr {
    static OTHER: LazyLock<TcpListener> =
        LazyLock::new(|| TcpListener::bind("127.0.0.1:0").unwrap());
    OTHER.local_addr().unwrap()
}

fn file_without_pem(cluster: &TestCluster) -> std::path::PathBuf {
    let path = cluster.certs.path().join("invalid.pem");
    std::fs::write(&path, "hello").unwrap();
    path
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn rejected_configuration_keeps_the_old_one_and_is_reported() {
    let mut setup = Setup::with(2, tolerate_late_pongs).await;
    let traffic = Traffic::start(&setup, 200).await;
    let client = setup.client().await;
    let watch = setup.watch(&client).await;
    setup.proxy.wait_connected(2).await;
    let connections = setup.proxy.connections("identity-0").await;
    let effective = setup.proxy.json("/config").await;
    let valid = setup.config.clone();
    for (name, change, message) in INVALID_CHANGES {
        println!("{name}");
        setup.config = valid.clone();
        change(&mut setup.config, &setup.cluster);
        // Valid changes in the same file must not be applied either.
        setup.config.listeners[0].limits_mut().max_connections = 7;
        setup.config.upstreams[0].connections.max = 7;
        write_and_expect_rejection(&mut setup, message).await;
        traffic.expect_progress().await;
        watch.expect_complete(&setup).await;
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
    traffic.expect_progress().await;
    watch.expect_complete(&setup).await;
    assert_eq!(setup.proxy.connections("identity-0").await, connections);
    assert_eq!(setup.proxy.json("/config").await, effective);

    let failed = INVALID_CHANGES.len() + 6;
    let counted = setup.proxy.metric(r#"jackstay_config_reloads_total{outcome="failed"}"#).await;
    assert!((counted - failed as f64).abs() < 0.1, "{counted} of {failed}");
    assert!(setup.proxy.metric("jackstay_config_last_reload_successful").await < 0.5);
    let events = reload_events(&setup).await;
    let last = events.last().unwrap();
    assert_eq!(last["to"], "refused");
    assert_eq!(last["effect"], "the old configuration stays");
    let why = last["reason"].as_str().unwrap();
    assert!(why.contains("not a regular file"), "{events:?}");

    // The next valid configuration is applied.
    setup.config = valid;
    assert_eq!(setup.change(|_| {}).await, [""; 0]);
    assert!(setup.proxy.metric("jackstay_config_last_reload_successful").await > 0.5);
    let events = reload_events(&setup).await;
    let last = events.last().unwrap();
    assert_eq!(last["to"], "reloaded");
    assert!(last["reason"].as_str().unwrap().starts_with("changed: "), "{events:?}");
    assert!(!setup.proxy.page("/readyz").await.contains("configuration"));
    traffic.end().await;
}

/// The events of reloads.
async fn reload_events(setup: &Setup) -> Vec<Value> {
    let mut events = setup.proxy.events().await;
    events.retain(|event| event["kind"] == "configuration");
    events
}

async fn write_and_expect_rejection(setup: &mut Setup, message: &str) {
    write_config(&setup.file, &setup.config);
    expect_rejection(setup, message).await;
}

/// Reloads the file, and expects that it fails with `message` and that the process stays ready.
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

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn rejected_configuration_closes_the_sockets_bound_for_it() {
    let mut setup = Setup::new(1).await;
    let mut free = setup.proxy.addr;
    free.set_ip("127.0.0.3".parse().unwrap());
    let mut first = setup.config.listeners[0].clone();
    first.name = "first".into();
    first.bind = vec![free];
    let mut second = first.clone();
    second.name = "second".into();
    second.bind = vec![taken_address()];
    setup.config.listeners.extend([first, second]);
    write_and_expect_rejection(&mut setup, "listener `second`").await;
    TcpListener::bind(free).unwrap();
}

/// The listener cannot move to the wildcard address, because another socket has the port on another address.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn rejected_move_to_the_wildcard_address_keeps_the_old_address_exclusively() {
    let mut setup = Setup::new(1).await;
    let ours = setup.proxy.addr;
    let mut theirs = ours;
    theirs.set_ip("127.0.0.3".parse().unwrap());
    let other_socket = TcpListener::bind(theirs).unwrap();
    setup.config.listeners[0].bind = vec![SocketAddr::new([0, 0, 0, 0].into(), ours.port())];
    write_and_expect_rejection(&mut setup, "listener `apiserver` cannot listen on 0.0.0.0").await;
    drop(other_socket);
    TcpListener::bind(ours).unwrap_err();
    let client = setup.client().await;
    assert_eq!(client.get("/api/v1/namespaces/default").await.unwrap().status, 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn incomplete_file_is_rejected_and_applied_when_complete() {
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
    let wrong = Pki::new("wrong").unwrap().write_ca(&dir).unwrap();
    setup.proxy.wait_connected(1).await;
    let right = setup.config.upstreams[0].tls.ca_file.replace(wrong);
    setup.change(|_| {}).await;
    let client = setup.client().await;
    // The old connections are used until a new one succeeds.
    assert_eq!(client.get("/api/v1/namespaces/default").await.unwrap().status, 200);
    setup.change(|config| config.upstreams[0].tls.ca_file = right).await;
    assert_eq!(client.get("/api/v1/namespaces/default").await.unwrap().status, 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn rejected_configuration_is_applied_when_its_file_is_back() {
    let mut setup = Setup::new(1).await;
    let key = terminate_mode(&mut setup.config).tls.paths.key_file.clone();
    let content = std::fs::read(&key).unwrap();
    std::fs::remove_file(&key).unwrap();
    setup.config.listeners[0].limits_mut().max_connections = 77;
    write_and_expect_rejection(&mut setup, "cannot read").await;
    let failed = async || setup.proxy.status().await["config"]["reloads"]["failed"].clone();
    assert_eq!(failed().await, 1);
    std::fs::write(&key, "hello").unwrap();
    until("the other error is reported", async || failed().await == 2).await;
    // Some retries with the same error.
    pause(Duration::from_secs(3)).await;
    assert_eq!(failed().await, 2);
    assert_eq!(reload_events(&setup).await.len(), 2);
    std::fs::write(&key, &content).unwrap();
    until("the configuration is applied", async || {
        setup.proxy.metric("jackstay_config_last_reload_successful").await > 0.5
    })
    .await;
    assert!(!setup.proxy.page("/readyz").await.contains("configuration"));
    assert_eq!(failed().await, 2);
    let events = reload_events(&setup).await;
    assert_eq!(events.last().unwrap()["to"], "reloaded", "{events:?}");
    assert!(setup.proxy.page("/config").await.contains("77"));
}

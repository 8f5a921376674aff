//! A start, a reload and a takeover with a certificate that is not valid: everything else is served.

use super::setup::Setup;
use crate::support::{CONFIGMAPS, PATIENCE, replace_file, terminate_mode, until};
use jackstay_apiserver::client::{Client, Credentials};
use jackstay_apiserver::identity::User;
use jackstay_apiserver::pki::{Issued, Pki, Subject, Validity};
use jackstay_config::CertPaths;
use std::time::SystemTime;

/// The expired identity of a node, as a kubelet leaves it that was off for long.
fn expired_node(setup: &Setup) -> CertPaths {
    let pki = &setup.cluster.certs.pki;
    let issued = pki.client_valid(&Subject::node("n1"), Validity::expired()).unwrap();
    let (cert_file, key_file) = issued.write_to(setup.cluster.certs.path(), "node1").unwrap();
    CertPaths { cert_file, key_file }
}

async fn get(setup: &Setup, credentials: &Credentials) -> (u16, String) {
    let client = Client::connect(setup.address, credentials).await.unwrap();
    let reply = client.get(CONFIGMAPS).await.unwrap();
    let message = reply.json()["message"].as_str().unwrap_or_default().to_owned();
    (reply.status.as_u16(), message)
}

/// The other identity and tokens are served; a client of the expired identity gets a 401 with the reason.
async fn check_served(setup: &Setup, node: &Issued) {
    let certs = &setup.cluster.certs;
    assert_eq!(get(setup, &certs.credentials()).await.0, 200);
    assert_eq!(get(setup, &certs.anonymous().token("bootstrap")).await.0, 200);
    let (status, message) = get(setup, &certs.anonymous().certificate(node)).await;
    assert_eq!(status, 401);
    assert!(message.contains("certificate expired") && message.contains("node1.crt"), "{message}");
    let readyz = setup.page("/readyz").await;
    let line = readyz.lines().find(|line| line.contains("node1.crt")).unwrap_or_default();
    assert!(line.starts_with("[-]identity ") && line.contains("certificate expired"), "{readyz}");
    assert!(readyz.starts_with("HTTP/1.0 200") || readyz.starts_with("HTTP/1.1 200"), "{readyz}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn expired_identity_blocks_neither_takeover_nor_reload_nor_start() {
    let mut setup = Setup::new(1, 1).await;
    setup.cluster.state.add_token("bootstrap", User::new("system:bootstrap:a", &[]));
    let node = setup.cluster.certs.pki.client(&Subject::node("n1")).unwrap();
    let paths = expired_node(&setup);
    setup.change(|config| terminate_mode(config).identities.push(paths.into()));

    let new = setup.start(&["--take-over"]);
    let mut old = setup.replace(new);
    old.wait_output("draining: a new process has taken over").await;
    let warning = setup.process.wait_output("expired on").await;
    assert!(warning.contains("WARN") && warning.contains("node1.crt"), "{warning}");
    check_served(&setup, &node).await;

    setup.process.signal("HUP");
    setup.process.wait_output("configuration reloaded").await;
    check_served(&setup, &node).await;

    setup.process.signal("TERM");
    setup.process.wait_exit().await;
    let new = setup.start(&[]);
    setup.replace(new);
    setup.process.wait_output("expired on").await;
    setup.process.wait_output("listening").await;
    setup.wait_ready().await;
    check_served(&setup, &node).await;

    // The file is renewed.
    node.write_to(setup.cluster.certs.path(), "node1").unwrap();
    setup.process.wait_output("identity is in use").await;
    let node = setup.cluster.certs.anonymous().certificate(&node);
    until("the identity is served", async || get(&setup, &node).await.0 != 401).await;
}

/// Clients decide whether they accept the certificate.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn expired_serving_certificate_is_served_with_a_warning() {
    let mut setup = Setup::new(1, 1).await;
    let certs = &setup.cluster.certs;
    let issued = certs.pki.server_for(&["127.0.0.1"], Validity::expired()).unwrap();
    let (cert_file, key_file) = issued.write_to(certs.path(), "old-serving").unwrap();
    setup.change(|config| terminate_mode(config).tls.paths = CertPaths { cert_file, key_file });
    let new = setup.start(&["--take-over"]);
    setup.replace(new).wait_output("draining: a new process has taken over").await;
    let warning = setup.process.wait_output("expired on").await;
    assert!(warning.contains("WARN") && warning.contains("old-serving.crt"), "{warning}");
    until("the expired certificate is shown in the status", async || {
        setup.page("/status").await.contains(r#""state": "expired""#)
    })
    .await;
    let excluded = async |part: &str| {
        let readyz = setup.page("/readyz").await;
        readyz.lines().any(|line| {
            line.starts_with("[-]serving certificate ")
                && line.contains("old-serving.crt excluded: certificate expired")
                && line.contains(part)
        })
    };
    assert!(excluded("").await);
    // The file of the key is deleted, and the old one stays in use.
    std::fs::remove_file(setup.cluster.certs.path().join("old-serving.key")).unwrap();
    until("/readyz names the missing key", async || excluded("old-serving.key").await).await;
    let status = setup.page("/status").await;
    assert!(status.contains("old-serving.key: No such file"), "{status}");
    // The client of the tests verifies as kubectl does.
    let refused = Client::connect(setup.address, &setup.cluster.certs.credentials()).await;
    let Err(error) = refused else { panic!("the client accepts the certificate") };
    assert!(error.to_string().contains("xpired"), "{error}");
}

/// The log warns at the moment of the expiry, and about clients whose certificate cannot be verified.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn log_warns_when_an_identity_expires_and_of_version_1_clients() {
    let mut setup = Setup::new(1, 1).await;
    let certs = &setup.cluster.certs;
    let not_after = SystemTime::now() + PATIENCE / 2;
    let short = Validity { not_after, ..Validity::usual() };
    let issued = certs.pki.client_valid(&Subject::node("n1"), short).unwrap();
    let (cert_file, key_file) = issued.write_to(certs.path(), "node1").unwrap();
    let version_1 = certs.pki.client_version_1(&Subject::node("n2")).unwrap();
    let version_1 = certs.anonymous().certificate(&version_1);
    let paths = CertPaths { cert_file, key_file };
    setup.change(|config| terminate_mode(config).identities.push(paths.into()));
    let new = setup.start(&["--take-over"]);
    setup.replace(new).wait_output("draining: a new process has taken over").await;

    let (status, message) = get(&setup, &version_1).await;
    assert_eq!(status, 401, "{message}");
    let line = setup.process.wait_output("client certificate refused").await;
    assert!(line.contains("WARN") && line.contains("system:node:n2"), "{line}");
    assert!(line.contains("X.509 version 1: reissue it as version 3"), "{line}");

    let line = setup.process.wait_output("its clients get 401").await;
    assert!(line.contains("WARN") && line.contains("node1.crt"), "{line}");
    assert!(line.contains("expired"), "{line}");
}

/// One file is the CA of the clients and of the apiservers. The responses and the status name it as the cause.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn expired_ca_bundle_is_named_as_the_cause() {
    let setup = Setup::new(1, 1).await;
    let certs = &setup.cluster.certs;
    assert_eq!(get(&setup, &certs.credentials()).await.0, 200);
    let expired = Pki::new_valid("another", Validity::expired()).unwrap().ca_pem();
    let file = certs.path().join("ca.crt");
    replace_file(&file, &expired);

    let cause = format!("every certificate of {} has expired (the last one on 2", file.display());
    until("the 401 names the CA file", async || {
        let (status, message) = get(&setup, &certs.credentials()).await;
        status == 401 && message.contains(&format!("not signed by a trusted CA: {cause}"))
    })
    .await;
    until("the reason of the endpoint names the CA file", async || {
        let status = setup.page("/status").await;
        status.contains(&format!("is not signed by a trusted CA: {cause}"))
    })
    .await;
    let readyz = setup.page("/readyz").await;
    for kind in ["client", "apiserver"] {
        let line = format!("[-]{kind} CA bundle {} excluded: {cause}", file.display());
        assert!(readyz.contains(&line), "no {line} in {readyz}");
    }
}

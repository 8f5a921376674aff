//! A wrong server name, CA bundle or certificate: what works stays in use until an endpoint has accepted the new one.

use crate::reload::setup::{Setup, Traffic};
use crate::support::{
    PATIENCE, TestCluster, passthrough_config, pause, replace_file, tolerate_late_pongs, until,
};
use jackstay_apiserver::client::Client;
use jackstay_apiserver::pki::{Pki, Subject};
use jackstay_config::{CertPaths, Config, Mode};
use serde_json::Value;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

const PATH: &str = "/api/v1/namespaces/default";
/// Longer than the 5 s for which connections to removed endpoints stay in use.
const WRONG_FOR: Duration = Duration::from_secs(7);

/// Makes a setting wrong, or right again.
type Change = fn(&mut Config, &TestCluster, bool);

fn server_name(config: &mut Config, _: &TestCluster, right: bool) {
    config.upstreams[0].tls.server_name = (!right).then(|| "wrong.example".into());
}

/// The path of a bundle with a certificate of an apiserver's issuer, or of another one.
fn ca_path(config: &mut Config, cluster: &TestCluster, right: bool) {
    let path = cluster.certs.path().join(format!("ca-{right}.crt"));
    write_ca(&path, cluster, right);
    config.upstreams[0].tls.ca_file = Some(path);
}

/// The content of the bundle.
fn ca_content(config: &mut Config, cluster: &TestCluster, right: bool) {
    let path = cluster.certs.path().join("upstream-ca.crt");
    write_ca(&path, cluster, right);
    config.upstreams[0].tls.ca_file = Some(path);
}

fn write_ca(path: &Path, cluster: &TestCluster, right: bool) {
    let pem = if right { cluster.certs.pki.ca_pem() } else { Pki::new("other").unwrap().ca_pem() };
    replace_file(path, &pem);
}

/// The paths of certificates of the apiservers' client CA, or of another one, with the same subjects.
fn certificate_paths(config: &mut Config, cluster: &TestCluster, right: bool) {
    write_certificates(config, cluster, right, &format!("-{right}"));
}

/// The content of the certificates.
fn certificate_content(config: &mut Config, cluster: &TestCluster, right: bool) {
    write_certificates(config, cluster, right, "");
}

fn write_certificates(config: &mut Config, cluster: &TestCluster, right: bool, suffix: &str) {
    let (certs, other) = (&cluster.certs, Pki::new("other").unwrap());
    let pki = if right { &certs.pki } else { &other };
    let write = |subject: Subject, name: &str| {
        let issued = pki.client(&subject).unwrap();
        let (cert_file, key_file) =
            issued.write_to(certs.path(), &format!("own-{name}{suffix}")).unwrap();
        CertPaths { cert_file, key_file }
    };
    if let Mode::Terminate(terminate) = &mut config.listeners[0].mode {
        terminate.identities = vec![write(Subject::admin(), "admin").into()];
    }
    config.upstreams[0].health.readyz.cert = Some(write(Subject::new("probe", &[]), "probe"));
}

/// Clients that connect one after the other, each with a request.
struct NewClients {
    failed: Arc<AtomicUsize>,
    served: Arc<AtomicUsize>,
    stop: Arc<AtomicBool>,
    task: tokio::task::JoinHandle<()>,
}

impl NewClients {
    fn start(setup: &Setup) -> Self {
        let (address, credentials) = (setup.proxy.addr, setup.cluster.certs.credentials());
        let (failed, served) = (Arc::<AtomicUsize>::default(), Arc::<AtomicUsize>::default());
        let stop = Arc::<AtomicBool>::default();
        let of_task = (Arc::clone(&failed), Arc::clone(&served), Arc::clone(&stop));
        let task = tokio::spawn(async move {
            let (failed, served, stop) = of_task;
            while !stop.load(Relaxed) {
                let status = match Client::connect(address, &credentials).await {
                    Ok(client) => client.get(PATH).await,
                    Err(error) => Err(error),
                };
                match status {
                    Ok(reply) if reply.status.is_success() => served.fetch_add(1, Relaxed),
                    _ => failed.fetch_add(1, Relaxed),
                };
                pause(Duration::from_millis(20)).await;
            }
        });
        Self { failed, served, stop, task }
    }

    async fn expect_progress(&self) {
        let before = self.served.load(Relaxed);
        until("five more clients", async || self.served.load(Relaxed) >= before + 5).await;
        assert_eq!(self.failed.load(Relaxed), 0);
    }

    async fn end(self) -> usize {
        self.stop.store(true, Relaxed);
        tokio::time::timeout(PATIENCE, self.task).await.expect("clients end").unwrap();
        assert_eq!(self.failed.load(Relaxed), 0);
        self.served.load(Relaxed)
    }
}

/// The reasons of the events that say that a new credential is not accepted.
async fn waits(setup: &Setup) -> Vec<String> {
    let is_wait = |event: &Value| event["to"] == "not accepted" || event["to"] == "not usable";
    let waits = setup.proxy.events().await.into_iter().filter(is_wait);
    waits.map(|event| event["reason"].as_str().unwrap().to_owned()).collect()
}

async fn is_accepted(setup: &Setup) -> bool {
    let events = setup.proxy.events().await;
    let is_end = |from: &Value| from == "not accepted" || from == "not usable";
    events.iter().any(|event| event["to"] == "in use" && is_end(&event["from"]))
}

/// Makes a setting wrong for longer than any grace, and right again, under load. `said`: a part of what
/// is said about it, if the previous setting stays in use.
async fn change_to_wrong_and_back(change: Change, passes_through: bool, said: Option<&str>) {
    let cluster = TestCluster::new(3);
    let mut config = cluster.config();
    tolerate_late_pongs(&mut config);
    change(&mut config, &cluster, true);
    if passes_through {
        config = passthrough_config(config);
    }
    let mut setup = Setup::of(cluster, |started| *started = config).await;
    if !passes_through {
        setup.proxy.wait_connected(3).await;
    }
    let client = setup.client().await;
    let watch = setup.watch(&client).await;
    let (traffic, clients) = (Traffic::start(&setup, 200).await, NewClients::start(&setup));

    let previous = setup.proxy.live_connections("identity-0").await;
    change(&mut setup.config, &setup.cluster, false);
    setup.change(|_| {}).await;
    if let Some(said) = said {
        let is_said = async || waits(&setup).await.iter().any(|reason| reason.contains(said));
        until("it says for whom it waits, and why", is_said).await;
    }
    pause(WRONG_FOR).await;
    if said.is_some() {
        // The connections of the prober work, too.
        let endpoints = setup.proxy.endpoints().await;
        let ready = endpoints.iter().filter(|endpoint| endpoint["state"] == "ready");
        assert_eq!(ready.count(), 3, "{endpoints:?}");
        // No handshake was made with the previous one. A connection that shows the new certificate is a trial, which a
        // refusal ends.
        let now = setup.proxy.live_connections("identity-0").await;
        let is_same = |key: &str, one: &Value| previous.iter().any(|other| other[key] == one[key]);
        let (kept, new): (Vec<_>, Vec<_>) = now.into_iter().partition(|one| is_same("local", one));
        assert!(!new.iter().any(|one| is_same("serial", one)), "{previous:?} -> {new:?}");
        assert_eq!(kept.is_empty(), passes_through);
    }
    traffic.expect_progress().await;
    clients.expect_progress().await;
    watch.expect_complete(&setup).await;

    change(&mut setup.config, &setup.cluster, true);
    setup.change(|_| {}).await;
    if said.is_some() {
        until("the new one is accepted", async || is_accepted(&setup).await).await;
    }
    setup.proxy.wait_ready(3).await;
    traffic.expect_progress().await;
    clients.expect_progress().await;
    watch.expect_complete(&setup).await;
    println!("{:.0} requests a second, {} clients", traffic.end().await, clients.end().await);
}

/// A client of a class that has no connection gets the reason.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn first_token_after_a_wrong_ca_bundle_gets_its_reason() {
    let mut setup = Setup::new(2).await;
    setup.proxy.wait_connected(2).await;
    let client = setup.client().await;
    ca_path(&mut setup.config, &setup.cluster, false);
    setup.change(|_| {}).await;
    let certs = &setup.cluster.certs;
    let with_token = setup.proxy.client_with(&certs.anonymous().token("unknown")).await;
    let reply = with_token.get(PATH).await.unwrap();
    let why = String::from_utf8_lossy(&reply.body).into_owned();
    assert_eq!(reply.status, 503, "{why}");
    assert!(why.contains("is ready (/readyz is ok), but no connection can be opened"), "{why}");
    assert!(why.contains("is not signed by a trusted CA"), "{why}");
    assert_eq!(client.get(PATH).await.unwrap().status, 200);
}

const UNKNOWN_NAME: Option<&str> = Some("is not valid for wrong.example");
const UNKNOWN_ISSUER: Option<&str> = Some("is not signed by a trusted CA");
const REFUSED: Option<&str> = Some("answers 401 to the new certificate");

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wrong_server_name_fails_no_request() {
    change_to_wrong_and_back(server_name, false, UNKNOWN_NAME).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wrong_server_name_fails_no_flow() {
    // An endpoint that answers is enough for flows, whose clients verify it themselves.
    change_to_wrong_and_back(server_name, true, None).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wrong_path_of_the_ca_bundle_fails_no_request() {
    change_to_wrong_and_back(ca_path, false, UNKNOWN_ISSUER).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wrong_ca_bundle_fails_no_request() {
    change_to_wrong_and_back(ca_content, false, UNKNOWN_ISSUER).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wrong_ca_bundle_fails_no_flow() {
    change_to_wrong_and_back(ca_content, true, UNKNOWN_ISSUER).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wrong_paths_of_certificates_fail_no_request() {
    change_to_wrong_and_back(certificate_paths, false, REFUSED).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wrong_certificates_fail_no_request() {
    change_to_wrong_and_back(certificate_content, false, REFUSED).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wrong_certificates_fail_no_flow() {
    change_to_wrong_and_back(certificate_content, true, REFUSED).await;
}

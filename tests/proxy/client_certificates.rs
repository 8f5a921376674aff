//! Verification of client certificates: a certificate authenticates its own subject until it expires, and
//! chains that are expensive to verify do not delay other clients.

use std::collections::BTreeMap;
use std::future::{Future, poll_fn};
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::task::Poll;
use std::time::{Duration, Instant, SystemTime};

use http::Method;
use jackstay::observe::Metrics;
use jackstay::proxy::client_certificate::{ClientCertificate, IdentityProof};
use jackstay::upstream::credentials::CredentialClass;
use jackstay_apiserver::ApiServerHandle;
use jackstay_apiserver::client::{Client, Credentials};
use jackstay_apiserver::pki::{Issued, Pki, Subject, Validity};
use jackstay_config::{CertPaths, Config};
use jackstay_net::loaded_files::LoadedFiles;
use jackstay_net::tls::client_chain::{self, ClientChain};
use jackstay_net::tls::serving::{LoadedServingTls, ServingTls};
use jackstay_sys::sockets::source::Source;
use rcgen::{
    BasicConstraints, CertificateParams, CustomExtension, DistinguishedName, DnType, IsCa, Issuer,
    KeyPair,
};
use rustls::AlertDescription;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::task::{JoinHandle, JoinSet, LocalSet};
use tokio_rustls::TlsConnector;

use crate::support::tls::ChainAndKey;
use crate::support::wire::{self, Wire};
use crate::support::{
    CONFIGMAPS, Certs, PATIENCE, Proxy, TestCluster, config_map, long_form, pause, read_body,
    replace_symlink, soon, terminate_mode, until, without_suspicion,
};

/// The identity file alternates between the certificates of two subjects, whose clients send requests all the
/// time. The Audit-ID of each request begins with the name of its subject, and the audit of the apiservers is
/// compared with it.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn identity_file_that_changes_its_subject_mixes_no_requests() {
    let cluster = TestCluster::new(2);
    let dir = cluster.certs.path();
    let current = dir.join("current.pem");
    let subjects = ["alice", "bob"].map(|name| {
        let issued = cluster.certs.pki.client(&Subject::new(name, &[])).unwrap();
        issued.write_pair(dir, name).unwrap();
        (name, issued)
    });
    replace_symlink(&current, &dir.join("alice.pem"));
    let proxy = cluster
        .start_with(|config| {
            without_suspicion(config);
            let pair = CertPaths { cert_file: current.clone(), key_file: current.clone() };
            terminate_mode(config).identities = vec![pair.into()];
        })
        .await;
    let stop = Arc::new(AtomicBool::new(false));
    let served: [Arc<AtomicUsize>; 2] = Default::default();
    let mut tasks = Vec::new();
    for (at, (name, issued)) in subjects.iter().enumerate() {
        for task in 0..3 {
            let client = proxy.client_with(&cluster.certs.anonymous().certificate(issued)).await;
            let (stop, served, name) = (stop.clone(), served[at].clone(), *name);
            tasks.push(tokio::spawn(async move {
                for count in 0.. {
                    if stop.load(Relaxed) {
                        break;
                    }
                    let id = format!("{name}-{task}-{count}");
                    let path = format!("{CONFIGMAPS}?limit=1");
                    let headers = [("audit-id", id.as_str())];
                    let reply = client.request(Method::GET, &path, &headers, "").await.unwrap();
                    match reply.status.as_u16() {
                        200 => drop(served.fetch_add(1, Relaxed)),
                        // The file holds the certificate of the other subject.
                        401 => {}
                        other => panic!("{other}: {:?}", reply.body),
                    }
                    pause(Duration::from_millis(1)).await;
                }
            }));
        }
    }
    let alice = proxy.client_with(&cluster.certs.anonymous().certificate(&subjects[0].1)).await;
    let mut watches = Vec::new();
    for n in 0..4 {
        let id = format!("alice-watch-{n}");
        let path = cluster.watch_path();
        let response = alice.send(Method::GET, &path, &[("audit-id", id.as_str())], "").await;
        let body = response.unwrap().into_body();
        watches.push(tokio::spawn(ends_cleanly(body)));
    }
    for round in 0..4 {
        let (at, (name, _)) = (round % 2, &subjects[round % 2]);
        replace_symlink(&current, &dir.join(format!("{name}.pem")));
        let before = served[at].load(Relaxed);
        until("the new subject is served", async || served[at].load(Relaxed) >= before + 15).await;
        // jackstay must open new connections, and present the right certificate on them.
        cluster.servers[round % 2].reset_connections();
        let before = served[at].load(Relaxed);
        until("requests continue", async || served[at].load(Relaxed) >= before + 10).await;
    }
    stop.store(true, Relaxed);
    for task in tasks {
        task.await.unwrap();
    }
    for watch in watches {
        assert!(
            soon("the watch ends", watch).await.unwrap(),
            "without the identity of alice, her watches end cleanly"
        );
    }
    let mut records_of = [0_usize; 2];
    for record in cluster.state.audit().records() {
        let id = record.audit_id.as_deref().unwrap_or_default();
        for (at, (name, _)) in subjects.iter().enumerate() {
            if id.starts_with(name) {
                records_of[at] += 1;
                assert_eq!(record.user, *name, "{id} reached the server as {}", record.user);
            }
        }
    }
    println!("{records_of:?} requests of alice and bob, each with the right identity");
    assert!(records_of.iter().all(|count| *count >= 50), "{records_of:?}");
}

/// Starts a watch with a client certificate that expires after half of [`PATIENCE`].
async fn watch_with_a_short_lived_certificate(
    cluster: &TestCluster,
    proxy: &Proxy,
) -> (Client, Credentials, hyper::body::Incoming) {
    let validity = Validity { not_after: SystemTime::now() + PATIENCE / 2, ..Validity::usual() };
    let issued = cluster.certs.pki.client_valid(&Subject::admin(), validity).unwrap();
    let credentials = cluster.certs.anonymous().certificate(&issued);
    let client = proxy.client_with(&credentials).await;
    let path = cluster.watch_path();
    let headers = [("audit-id", "short-lived")];
    let response = soon("a watch", client.send(Method::GET, &path, &headers, "")).await.unwrap();
    assert_eq!(response.status(), 200, "the certificate expired before the first request");
    (client, credentials, response.into_body())
}

/// Reads a body to its end. Returns whether the end is clean.
async fn ends_cleanly(body: hyper::body::Incoming) -> bool {
    read_body(body).await.1.is_ok()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn watch_ends_cleanly_when_its_client_certificate_expires() {
    let cluster = TestCluster::new(2);
    let proxy = cluster.start_with(without_suspicion).await;
    let (client, credentials, body) = watch_with_a_short_lived_certificate(&cluster, &proxy).await;
    assert!(soon("the end of the watch", ends_cleanly(body)).await);
    assert_401_on_another_connection(&proxy, client, &credentials).await;
    assert_eq!(cluster.state.audit().count_id("short-lived"), 1);
    let unproven = proxy.resumes("unproven").await;
    assert_eq!(unproven as u64, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn watch_ends_cleanly_when_its_client_ca_is_withdrawn() {
    let cluster = TestCluster::new(2);
    let file = cluster.certs.path().join("client-ca.crt");
    std::fs::write(&file, cluster.certs.pki.ca_pem()).unwrap();
    let proxy = cluster
        .start_with(|config| {
            without_suspicion(config);
            terminate_mode(config).client_ca_file = Some(file.clone());
        })
        .await;
    let client = proxy.client().await;
    let path = cluster.watch_path();
    let body = client.send(Method::GET, &path, &[], "").await.unwrap().into_body();
    std::fs::write(&file, Pki::new("another").unwrap().ca_pem()).unwrap();
    assert!(soon("the end of the watch", ends_cleanly(body)).await);
    assert_401_on_another_connection(&proxy, client, &proxy.credentials).await;
}

/// The connection ends, which has lost its identity, and the next one with the same certificate gets a 401 from a
/// worker.
async fn assert_401_on_another_connection(
    proxy: &Proxy,
    client: Client,
    credentials: &Credentials,
) {
    until("the connection is closed", async || client.is_closed()).await;
    let another = proxy.client_with(credentials).await;
    assert_eq!(another.get(CONFIGMAPS).await.unwrap().status, 401);
    assert_eq!(proxy.status().await["threads"]["identity_lane_connections"], 0);
}

/// Simulates a resume after the machine was suspended: the clock has advanced and no timer has fired yet. The
/// check at the resume is therefore the first one that finds the certificate expired.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn resume_fails_when_the_client_certificate_has_expired() {
    let certs = Certs::new();
    let mut config = certs.config(&[]);
    let tls = Arc::new(ServingTls::new(
        LoadedServingTls::load(&terminate_mode(&mut config).files(), &mut LoadedFiles::default())
            .unwrap(),
    ));
    let not_after = SystemTime::now() + PATIENCE / 2;
    let validity = Validity { not_after, ..Validity::usual() };
    let issued = certs.pki.client_valid(&Subject::admin(), validity).unwrap();
    let metrics = Metrics::new().listener("l");
    // No task runs `ClientCertificate::follow`, which checks the certificate by timers.
    let (source, chain) = (Source::User(0), [issued.cert_der()]);
    let certificate = ClientCertificate::new(source, Some(&chain), &tls, &metrics).unwrap();
    let proof = IdentityProof::new(CredentialClass::Identity(0), Some(&certificate));
    let resume = async {
        soon("a valid proof", proof.confirmed()).await;
        let mut end = proof.expiry().unwrap();
        let ended = poll_fn(|cx| Poll::Ready(end.as_mut().poll(cx).is_ready())).await;
        assert!(!ended, "the certificate expired before it was verified");
        until("the certificate has expired", async || SystemTime::now() > not_after).await;
        tokio::select! {
            reason = &mut end => reason,
            () = proof.confirmed() => panic!("an expired certificate was confirmed"),
        }
    };
    let reason = soon("the end of the proof", LocalSet::new().run_until(resume)).await;
    assert!(reason.contains("expired"), "{reason}");
}

/// A generated certificate with its key.
struct GeneratedCert {
    der: CertificateDer<'static>,
    params: CertificateParams,
    key: KeyPair,
}

/// A self-signed CA certificate with this name.
fn authority(name: &str) -> GeneratedCert {
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, name);
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let key = KeyPair::generate().unwrap();
    GeneratedCert { der: params.self_signed(&key).unwrap().der().clone(), params, key }
}

/// A chain without a trust anchor: a leaf, and CA certificates that all have the same name. Judging by the names,
/// any of them may have signed any other, so a verifier has to try many paths.
fn unverifiable_chain(name: &str, authorities: usize) -> ChainAndKey {
    let others = (0..authorities).map(|_| authority(name).der);
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, "mallory");
    let key = KeyPair::generate().unwrap();
    let issuer = authority(name);
    let leaf = params.signed_by(&key, &Issuer::new(issuer.params, issuer.key)).unwrap();
    let chain = std::iter::once(leaf.der().clone()).chain(others).collect();
    (chain, PrivatePkcs8KeyDer::from(key.serialize_der()).into())
}

/// The client CA changes while a watch runs, and then the watch loses its stream. The test delays the
/// verification of the client's chain against the new CA. Meanwhile the watch must not be resumed.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn watch_is_resumed_only_when_its_certificate_is_verified_again() {
    /// jackstay resumes a quiet watch within a second if nothing prevents it.
    const WINDOW: Duration = Duration::from_millis(1_500);
    // Either the new CA replaces the old one, or the file contains both.
    for (replaced, requests) in [(true, 1), (false, 2)] {
        let cluster = TestCluster::new(2);
        let file = cluster.certs.path().join("client-ca.crt");
        let ca = cluster.certs.pki.ca_pem();
        std::fs::write(&file, &ca).unwrap();
        let proxy = cluster
            .start_with(|config| {
                without_suspicion(config);
                terminate_mode(config).client_ca_file = Some(file.clone());
            })
            .await;
        let path = cluster.watch_path();
        // Chains of more than two certificates are verified one at a time; below, the test takes their slot.
        let (leaf, key) = der_of(&cluster.certs.admin);
        let chain = vec![leaf, authority("one").der, authority("other").der];
        let connector = http1_connector(&cluster.certs, (chain.clone(), key));
        let mut watch = wire::handshake(&connector, proxy.addr).await.unwrap();
        let request = format!(
            "GET {path} HTTP/1.1\r\nHost: api\r\nConnection: close\r\nAudit-ID: long\r\n\r\n"
        );
        watch.write_all(request.as_bytes()).await.unwrap();
        let mut head = [0; 12];
        soon("a watch", watch.read_exact(&mut head)).await.unwrap();
        assert_eq!(&head, b"HTTP/1.1 200");
        let slot = client_chain::acquire_slot(&ClientChain::new(chain).unwrap(), 1).await.unwrap();

        let new_ca = Pki::new("new").unwrap();
        let bundle = if replaced { new_ca.ca_pem() } else { ca + &new_ca.ca_pem() };
        std::fs::write(&file, bundle).unwrap();
        let issued = new_ca.client(&Subject::admin()).unwrap();
        let client = proxy.client_with(&cluster.certs.anonymous().certificate(&issued)).await;
        until("the new CA is in use", async || client.get(CONFIGMAPS).await.unwrap().status == 200)
            .await;
        let headers = [("audit-id", "short")];
        let _other = client.send(Method::GET, &path, &headers, "").await.unwrap();
        let count = |id| cluster.state.audit().count_id(id);
        cluster.servers.iter().for_each(ApiServerHandle::reset_connections);
        until("the watch with a short chain is resumed", async || count("short") >= 2).await;
        pause(WINDOW).await;
        assert_eq!(count("long"), 1, "the watch was resumed before its chain was verified");
        drop(slot);
        if replaced {
            let mut rest = Vec::new();
            soon("the end of the watch", watch.read_to_end(&mut rest)).await.unwrap();
            assert!(rest.ends_with(b"\r\n0\r\n\r\n"), "the end is not clean");
        } else {
            until("the watch is resumed", async || count("long") >= requests).await;
        }
        assert_eq!(count("long"), requests);
    }
}

/// A client that presents this chain over HTTP/1.1.
fn http1_connector(certs: &Certs, chain: ChainAndKey) -> TlsConnector {
    wire::connector(certs, Some(chain), "http/1.1")
}

/// Sends a request on an HTTP/1.1 connection. Returns the status of the response.
async fn get(stream: &mut Wire) -> io::Result<u16> {
    let request = format!("GET {CONFIGMAPS}?limit=1 HTTP/1.1\r\nHost: api\r\n\r\n");
    stream.write_all(request.as_bytes()).await?;
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await?);
    }
    let head = String::from_utf8(head).map_err(io::Error::other)?.to_ascii_lowercase();
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
    let length = length.and_then(|length| length.trim().parse().ok()).unwrap_or(0);
    stream.read_exact(&mut vec![0; length]).await?;
    head[9..12].parse().map_err(io::Error::other)
}

fn der_of(issued: &Issued) -> (CertificateDer<'static>, PrivateKeyDer<'static>) {
    (issued.cert_der(), issued.key_der())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn handshake_refuses_chains_of_more_than_6_certificates_or_32_kib() {
    let cluster = TestCluster::new(1);
    let proxy = cluster.start().await;
    let large = || {
        let GeneratedCert { mut params, key, .. } = authority("large");
        let oid = [1, 3, 6, 1, 4, 1, 57683, 99];
        let filling = CustomExtension::from_oid_content(&oid, vec![4; 32 << 10]);
        params.custom_extensions.push(filling);
        params.self_signed(&key).unwrap().der().clone()
    };
    for (name, others, accepted) in [
        ("1 certificate", vec![], true),
        ("6 certificates", (0..5).map(|n| authority(&format!("ca {n}")).der).collect(), true),
        ("7 certificates", (0..6).map(|n| authority(&format!("ca {n}")).der).collect(), false),
        ("more than 32 KiB", vec![large()], false),
    ] {
        let (leaf, key) = der_of(&cluster.certs.admin);
        let chain = std::iter::once(leaf).chain(others).collect();
        let connector = http1_connector(&cluster.certs, (chain, key));
        let request = async { get(&mut wire::handshake(&connector, proxy.addr).await?).await };
        match soon("a response", request).await {
            Ok(status) => assert!(accepted && status == 200, "{name}: {status}"),
            Err(error) => {
                // The alert for "some other (unspecified) issue" (RFC 8446, section 6.2).
                let alert = error.get_ref().and_then(|e| e.downcast_ref::<rustls::Error>());
                let unknown = rustls::Error::AlertReceived(AlertDescription::CertificateUnknown);
                assert_eq!((accepted, alert), (false, Some(&unknown)), "{name}: {error}");
            }
        }
    }
    // jackstay counts a refusal after it has sent the alert.
    let refused = async || proxy.metric("jackstay_downstream_refused_total{").await as u64;
    until("both refusals are counted", async || refused().await >= 2).await;
    assert_eq!(refused().await, 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn valid_or_invalid_chain_is_verified_once_per_connection() {
    let cluster = TestCluster::new(1);
    let proxy = cluster.start().await;
    let (leaf, key) = der_of(&cluster.certs.admin);
    let valid = http1_connector(&cluster.certs, (vec![leaf], key));
    let invalid = http1_connector(&cluster.certs, unverifiable_chain("demo", 5));
    let verified = async |outcome: &str| {
        let name = format!(
            "jackstay_client_verifications_total{{listener=\"apiserver\",outcome=\"{outcome}\""
        );
        proxy.metric(&name).await
    };
    for (connector, status) in [(&valid, 200), (&invalid, 401)] {
        let mut stream = wire::handshake(connector, proxy.addr).await.unwrap();
        for _ in 0..20 {
            assert_eq!(soon("a response", get(&mut stream)).await.unwrap(), status);
        }
    }
    assert_eq!((verified("ok").await, verified("failed").await), (1.0, 1.0));
    // The results for valid chains are cached for other connections.
    for connector in [&valid, &invalid] {
        let mut stream = wire::handshake(connector, proxy.addr).await.unwrap();
        soon("a response", get(&mut stream)).await.unwrap();
    }
    let counts = (verified("ok").await, verified("failed").await, verified("known").await);
    assert_eq!(counts, (1.0, 2.0, 1.0));
}

/// The durations and the errors of the requests of one kind.
#[derive(Default)]
struct Results {
    durations: Vec<Duration>,
    errors: Vec<String>,
}

impl Results {
    fn summary(&mut self, name: &str) -> String {
        self.durations.sort();
        let last = self.durations.len().saturating_sub(1);
        let quantile =
            |q: f64| self.durations.get((last as f64 * q) as usize).copied().unwrap_or_default();
        format!(
            "{name}: {} failed of {}, median {:?}, p99 {:?}, max {:?}",
            self.errors.len(),
            self.errors.len() + self.durations.len(),
            quantile(0.5),
            quantile(0.99),
            quantile(1.0)
        )
    }
}

/// The duration of a request, or its error; `limit` is its timeout.
async fn timed(
    limit: Duration,
    request: impl Future<Output = Result<(), String>>,
) -> Result<Duration, String> {
    let start = Instant::now();
    match tokio::time::timeout(limit, request).await {
        Ok(done) => done.map(|()| start.elapsed()),
        Err(_) => Err(format!("no response within {limit:?}")),
    }
}

fn expect_200(reply: io::Result<jackstay_apiserver::client::Reply>) -> Result<(), String> {
    match reply {
        Ok(reply) if reply.status == 200 => Ok(()),
        Ok(reply) => Err(format!("{}: {:?}", reply.status, reply.body)),
        Err(error) => Err(error.to_string()),
    }
}

/// Opens connections one after another, and sends two requests on each. Returns the number of connections.
fn attack(addr: SocketAddr, connector: TlsConnector, stop: &Arc<AtomicBool>) -> JoinHandle<usize> {
    let stop = stop.clone();
    tokio::spawn(async move {
        let mut count = 0;
        while !stop.load(Relaxed) {
            if let Ok(mut stream) = wire::handshake(&connector, addr).await {
                for _ in 0..2 {
                    let _ = tokio::time::timeout(PATIENCE, get(&mut stream)).await;
                }
            }
            count += 1;
        }
        count
    })
}

/// Two clients connect with chains that are expensive to verify: one with 12 CA certificates of the same name,
/// and one, within the limits of the handshake, with 5 that have the name of the real CA.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn expensive_chains_fail_no_request_of_a_verified_client() {
    let limit = 2 * PATIENCE;
    let cluster = TestCluster::new(2);
    let change = |config: &mut Config| {
        without_suspicion(config);
        config.listeners[0].limits_mut().handshake_timeout = limit;
    };
    let proxy = Arc::new(cluster.start_with(change).await);
    let credentials = cluster.certs.credentials();
    let client = Arc::new(proxy.client_with(&credentials).await);
    client.post(CONFIGMAPS, &config_map("lease", "0")).await.unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let attackers = [unverifiable_chain("unknown", 12), unverifiable_chain("demo", 5)]
        .map(|chain| attack(proxy.addr, http1_connector(&cluster.certs, chain), &stop));
    let mut requests = JoinSet::new();
    let mut tick = tokio::time::interval(Duration::from_millis(100));
    let list = format!("{CONFIGMAPS}?limit=1");
    for round in 0..if long_form() { 600 } else { 100 } {
        tick.tick().await;
        let (reader, path) = (Arc::clone(&client), list.clone());
        requests.spawn(async move {
            ("GET", timed(limit, async { expect_200(reader.get(&path).await) }).await)
        });
        let writer = Arc::clone(&client);
        requests.spawn(async move {
            let (path, lease) =
                (format!("{CONFIGMAPS}/lease"), config_map("lease", &round.to_string()));
            ("PUT", timed(limit, async { expect_200(writer.put(&path, &lease).await) }).await)
        });
        if round % 10 == 0 {
            let (path, credentials, addr) = (list.clone(), credentials.clone(), proxy.addr);
            requests.spawn(async move {
                let connect_and_get = async {
                    let client = Client::connect(addr, &credentials).await;
                    expect_200(client.map_err(|e| e.to_string())?.get(&path).await)
                };
                ("new connection", timed(limit, connect_and_get).await)
            });
            let proxy = Arc::clone(&proxy);
            requests.spawn(async move {
                let livez = async {
                    let page = proxy.page("/livez").await;
                    if page.starts_with("HTTP/1.1 200 ") { Ok(()) } else { Err(page) }
                };
                ("/livez", timed(limit, livez).await)
            });
        }
    }
    let mut by_kind = BTreeMap::<&str, Results>::new();
    while let Some(done) = requests.join_next().await {
        let (kind, result) = done.unwrap();
        let results = by_kind.entry(kind).or_default();
        match result {
            Ok(duration) => results.durations.push(duration),
            Err(error) => results.errors.push(error),
        }
    }
    stop.store(true, Relaxed);
    for (kind, results) in &mut by_kind {
        println!("{}", results.summary(kind));
    }
    for attacker in attackers {
        println!("an attacker connected {} times", attacker.await.unwrap());
    }
    let errors: Vec<_> = by_kind.values().flat_map(|results| &results.errors).collect();
    assert!(errors.is_empty(), "{} failed: {errors:?}", errors.len());
    assert_eq!(by_kind.len(), 4, "kinds of requests");
}

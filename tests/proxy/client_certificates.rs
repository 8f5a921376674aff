//! Verification of client certificates: a certificate authenticates only its own subject, only
//! until it expires, and an expensive chain does not delay other clients.

use std::collections::BTreeMap;
use std::future::{Future, poll_fn};
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::task::Poll;
use std::time::{Duration, Instant, SystemTime};

use http::Method;
use jackstay::config::CertPaths;
use jackstay::demo::apiserver::ApiServerHandle;
use jackstay::demo::client::{Client, next_data};
use jackstay::demo::pki::{Issued, Pki, Subject, Validity};
use jackstay::net::tls::client_chain::{self, ClientChain};
use jackstay::net::tls::serving::{LoadedServingTls, ServingTls};
use jackstay::observe::Metrics;
use jackstay::proxy::client_certificate::{ClientCertificate, IdentityProof};
use jackstay::upstream::credentials::CredentialClass;
use rcgen::{
    BasicConstraints, CertificateParams, CustomExtension, DistinguishedName, DnType, IsCa, Issuer,
    KeyPair,
};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName};
use rustls::{AlertDescription, ClientConfig, RootCertStore};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::{JoinHandle, JoinSet, LocalSet};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use crate::support::{
    CONFIGMAPS, Certs, PATIENCE, Proxy, TestCluster, config_map, long_form, pause, replace_symlink,
    soon, terminate_mode, until, without_suspicion,
};

/// The identity file alternates between two subjects, whose clients send requests all the time. The
/// Audit-ID of each request names its client, so the audit shows the owner.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn identity_file_that_changes_its_subject_mixes_no_requests_and_no_watches() {
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
            terminate_mode(config).identities = vec![pair];
        })
        .await;
    let over = Arc::new(AtomicBool::new(false));
    let served: [Arc<AtomicUsize>; 2] = Default::default();
    let mut tasks = Vec::new();
    for (at, (name, issued)) in subjects.iter().enumerate() {
        for task in 0..3 {
            let client = proxy.client_with(&cluster.certs.anonymous().certificate(issued)).await;
            let (over, served, name) = (over.clone(), served[at].clone(), *name);
            tasks.push(tokio::spawn(async move {
                for count in 0.. {
                    if over.load(Relaxed) {
                        break;
                    }
                    let id = format!("{name}-{task}-{count}");
                    let path = format!("{CONFIGMAPS}?limit=1");
                    let headers = [("audit-id", id.as_str())];
                    let reply = client.request(Method::GET, &path, &headers, "").await.unwrap();
                    match reply.status.as_u16() {
                        200 => drop(served.fetch_add(1, Relaxed)),
                        401 => {}
                        other => panic!("{other}: {:?}", reply.body),
                    }
                    pause(Duration::from_millis(1)).await;
                }
            }));
        }
    }
    let owner = proxy.client_with(&cluster.certs.anonymous().certificate(&subjects[0].1)).await;
    let mut watches = Vec::new();
    for n in 0..4 {
        let id = format!("alice-watch-{n}");
        let path = cluster.watch_path();
        let response = owner.send(Method::GET, &path, &[("audit-id", id.as_str())], "").await;
        let body = response.unwrap().into_body();
        watches.push(tokio::spawn(ends_cleanly(body)));
    }
    for round in 0..4 {
        let (at, (name, _)) = (round % 2, &subjects[round % 2]);
        replace_symlink(&current, &dir.join(format!("{name}.pem")));
        let before = served[at].load(Relaxed);
        until("the new subject is served", async || served[at].load(Relaxed) >= before + 15).await;
        // Requests on these connections need new ones.
        cluster.servers[round % 2].reset_connections();
        let before = served[at].load(Relaxed);
        until("requests continue", async || served[at].load(Relaxed) >= before + 10).await;
    }
    over.store(true, Relaxed);
    for task in tasks {
        task.await.unwrap();
    }
    for watch in watches {
        assert!(
            soon("an end", watch).await.unwrap(),
            "alice's identity is gone: the watch ends cleanly"
        );
    }
    let mut seen = [0_usize; 2];
    for record in cluster.state.audit().records() {
        let id = record.audit_id.as_deref().unwrap_or_default();
        for (at, (name, _)) in subjects.iter().enumerate() {
            if id.starts_with(name) {
                seen[at] += 1;
                assert_eq!(record.user, *name, "{id} reached the server as {}", record.user);
            }
        }
    }
    println!("{seen:?} requests of alice and bob, each with the right identity");
    assert!(seen.iter().all(|count| *count >= 50), "{seen:?}");
}

/// A watch of a client whose certificate expires soon.
async fn watch_with_a_short_lived_certificate(
    cluster: &TestCluster,
    proxy: &Proxy,
) -> (Client, hyper::body::Incoming) {
    let validity = Validity { not_after: SystemTime::now() + PATIENCE / 2, ..Validity::usual() };
    let brief = cluster.certs.pki.client_valid(&Subject::admin(), validity).unwrap();
    let client = proxy.client_with(&cluster.certs.anonymous().certificate(&brief)).await;
    let path = cluster.watch_path();
    let headers = [("audit-id", "brief")];
    let response = soon("a watch", client.send(Method::GET, &path, &headers, "")).await.unwrap();
    assert_eq!(response.status(), 200, "the certificate expired before the first request");
    (client, response.into_body())
}

/// Reads to the end of the body. Returns whether it is clean.
async fn ends_cleanly(mut body: hyper::body::Incoming) -> bool {
    loop {
        match next_data(&mut body).await {
            Ok(Some(_)) => {}
            Ok(None) => return true,
            Err(_) => return false,
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn watch_ends_cleanly_when_its_client_certificate_expires() {
    let cluster = TestCluster::new(2);
    let proxy = cluster.start_with(without_suspicion).await;
    let (client, body) = watch_with_a_short_lived_certificate(&cluster, &proxy).await;
    assert!(soon("the end of the watch", ends_cleanly(body)).await);
    let after = client.get(CONFIGMAPS).await.unwrap();
    assert_eq!(after.status, 401, "the watch ends only when the certificate expires");
    assert_eq!(cluster.state.audit().count_id("brief"), 1);
    let ended = proxy.resumes("unproven").await;
    assert_eq!(ended as u64, 1);
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
    assert_eq!(client.get(CONFIGMAPS).await.unwrap().status, 401);
}

/// As on a machine that was suspended: the clock has advanced and timers have not, so that the
/// resume is the first to notice that the certificate has expired.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn resume_fails_when_the_client_certificate_has_expired() {
    let certs = Certs::new();
    let mut config = certs.config(&[]);
    let tls =
        Arc::new(ServingTls::new(LoadedServingTls::load(terminate_mode(&mut config)).unwrap()));
    let not_after = SystemTime::now() + PATIENCE / 2;
    let validity = Validity { not_after, ..Validity::usual() };
    let brief = certs.pki.client_valid(&Subject::admin(), validity).unwrap();
    let metrics = Metrics::new().listener("l");
    // No task renews or checks the certificate.
    let peer = ClientCertificate::new(Some(&[brief.cert_der()]), &tls, &metrics).unwrap();
    let proof = IdentityProof::new(CredentialClass::Identity(0), Some(&peer));
    let resume = async {
        soon("a proof", proof.confirmed()).await;
        let mut end = proof.end().unwrap();
        let ended = poll_fn(|cx| Poll::Ready(end.as_mut().poll(cx).is_ready())).await;
        assert!(!ended, "the certificate expired before it was verified");
        until("the certificate has expired", async || SystemTime::now() > not_after).await;
        tokio::select! {
            why = &mut end => why,
            () = proof.confirmed() => panic!("an expired certificate was confirmed"),
        }
    };
    let why = soon("the end of the watch", LocalSet::new().run_until(resume)).await;
    assert!(why.contains("expired"), "{why}");
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

/// A chain without a trust anchor: a leaf, and CA certificates that all have one name, each of
/// which might have signed each other.
fn unverifiable_chain(
    name: &str,
    authorities: usize,
) -> (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>) {
    let made: Vec<_> = (0..authorities).map(|_| authority(name)).collect();
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, "mallory");
    let key = KeyPair::generate().unwrap();
    let issuer = authority(name);
    let leaf = params.signed_by(&key, &Issuer::new(issuer.params, issuer.key)).unwrap();
    let chain = std::iter::once(leaf.der().clone()).chain(made.into_iter().map(|made| made.der));
    (chain.collect(), PrivatePkcs8KeyDer::from(key.serialize_der()).into())
}

/// The client CA changes while a watch runs, and then the watch loses its stream. As long as its
/// chain waits for verification, only the check at the resume keeps the watch from the new stream.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn watch_is_resumed_only_when_its_certificate_is_verified_again() {
    /// Quiet watches are resumed within a second.
    const RESUMED: Duration = Duration::from_millis(1_500);
    for (withdrawn, requests) in [(true, 1), (false, 2)] {
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
        // Longer chains have their own queue.
        let (leaf, key) = der_of(&cluster.certs.admin);
        let chain = vec![leaf, authority("one").der, authority("other").der];
        let mut watch = connect(proxy.addr, &connector(&ca, chain.clone(), key)).await.unwrap();
        let request = format!(
            "GET {path} HTTP/1.1\r\nHost: api\r\nConnection: close\r\nAudit-ID: long\r\n\r\n"
        );
        watch.write_all(request.as_bytes()).await.unwrap();
        let mut head = [0; 12];
        soon("a watch", watch.read_exact(&mut head)).await.unwrap();
        assert_eq!(&head, b"HTTP/1.1 200");
        let slot = client_chain::acquire_slot(&ClientChain::new(chain).unwrap()).await.unwrap();

        let next = Pki::new("next").unwrap();
        let bundle = if withdrawn { next.ca_pem() } else { ca + &next.ca_pem() };
        std::fs::write(&file, bundle).unwrap();
        let issued = next.client(&Subject::admin()).unwrap();
        let client = proxy.client_with(&cluster.certs.anonymous().certificate(&issued)).await;
        until("the new CA is in use", async || client.get(CONFIGMAPS).await.unwrap().status == 200)
            .await;
        let headers = [("audit-id", "short")];
        let _other = client.send(Method::GET, &path, &headers, "").await.unwrap();
        let count = |id| cluster.state.audit().count_id(id);
        cluster.servers.iter().for_each(ApiServerHandle::reset_connections);
        until("watches are resumed", async || count("short") >= 2).await;
        pause(RESUMED).await;
        assert_eq!(count("long"), 1, "resumed without a verified certificate");
        drop(slot);
        if withdrawn {
            let mut rest = Vec::new();
            soon("the end of the watch", watch.read_to_end(&mut rest)).await.unwrap();
            assert!(rest.ends_with(b"\r\n0\r\n\r\n"), "not a clean end");
        } else {
            until("the watch is resumed", async || count("long") >= requests).await;
        }
        assert_eq!(count("long"), requests);
    }
}

/// A connector of a client with this chain.
fn connector(
    ca_pem: &str,
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
) -> TlsConnector {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(ca_pem.as_bytes()).unwrap()).unwrap();
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_client_auth_cert(chain, key)
        .unwrap();
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    config.resumption = rustls::client::Resumption::disabled();
    TlsConnector::from(Arc::new(config))
}

async fn connect(addr: SocketAddr, connector: &TlsConnector) -> io::Result<TlsStream<TcpStream>> {
    let stream = TcpStream::connect(addr).await?;
    connector.connect(ServerName::from(addr.ip()), stream).await
}

/// Sends a request on an HTTP/1.1 connection. Returns the status.
async fn get(stream: &mut TlsStream<TcpStream>) -> io::Result<u16> {
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
    let ca = cluster.certs.pki.ca_pem();
    let large = || {
        let GeneratedCert { mut params, key, .. } = authority("large");
        let oid = [1, 3, 6, 1, 4, 1, 57683, 99];
        let filling = CustomExtension::from_oid_content(&oid, vec![4; 32 << 10]);
        params.custom_extensions.push(filling);
        params.self_signed(&key).unwrap().der().clone()
    };
    for (name, others, accepted) in [
        ("the leaf alone", vec![], true),
        ("6 in all", (0..5).map(|n| authority(&format!("ca {n}")).der).collect(), true),
        ("7 in all", (0..6).map(|n| authority(&format!("ca {n}")).der).collect(), false),
        ("33 KiB", vec![large()], false),
    ] {
        let (leaf, key) = der_of(&cluster.certs.admin);
        let chain = std::iter::once(leaf).chain(others).collect();
        let connector = connector(&ca, chain, key);
        let result =
            soon("a response", async { get(&mut connect(proxy.addr, &connector).await?).await })
                .await;
        match result {
            Ok(status) => assert!(accepted && status == 200, "{name}: {status}"),
            Err(error) => {
                // "Some other (unspecified) issue" (RFC 8446, section 6.2): no other alert fits.
                let alert = error.get_ref().and_then(|e| e.downcast_ref::<rustls::Error>());
                let unknown = rustls::Error::AlertReceived(AlertDescription::CertificateUnknown);
                assert_eq!((accepted, alert), (false, Some(&unknown)), "{name}: {error}");
            }
        }
    }
    // Refusals are counted after the alert is sent.
    let refused = async || proxy.metric("jackstay_downstream_refused_total{").await as u64;
    until("both refusals are counted", async || refused().await >= 2).await;
    assert_eq!(refused().await, 2);
}

/// Valid or not, a chain is verified once per connection.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn chain_is_verified_once_per_connection() {
    let cluster = TestCluster::new(1);
    let proxy = cluster.start().await;
    let ca = cluster.certs.pki.ca_pem();
    let (leaf, key) = der_of(&cluster.certs.admin);
    let good = connector(&ca, vec![leaf], key);
    let (chain, key) = unverifiable_chain("demo", 5);
    let bad = connector(&ca, chain, key);
    let verified = async |outcome: &str| {
        let name = format!(
            "jackstay_client_verifications_total{{listener=\"apiserver\",outcome=\"{outcome}\""
        );
        proxy.metric(&name).await
    };
    for (connector, status) in [(&good, 200), (&bad, 401)] {
        let mut stream = connect(proxy.addr, connector).await.unwrap();
        for _ in 0..20 {
            assert_eq!(soon("a response", get(&mut stream)).await.unwrap(), status);
        }
    }
    assert_eq!((verified("ok").await, verified("failed").await), (1.0, 1.0));
    // The same chain on another connection is cached; only valid chains are.
    for connector in [&good, &bad] {
        let mut stream = connect(proxy.addr, connector).await.unwrap();
        soon("a response", get(&mut stream)).await.unwrap();
    }
    let counts = (verified("ok").await, verified("failed").await, verified("known").await);
    assert_eq!(counts, (1.0, 2.0, 1.0));
}

/// Durations and failures of requests of one kind.
#[derive(Default)]
struct Results {
    took: Vec<Duration>,
    failed: Vec<String>,
}

impl Results {
    fn line(&mut self, name: &str) -> String {
        self.took.sort();
        let quantile = |q: f64| {
            let at = (self.took.len() as f64 * q) as usize;
            self.took.get(at.min(self.took.len().saturating_sub(1))).copied().unwrap_or_default()
        };
        format!(
            "{name}: {} failed of {}, median {:?}, p99 {:?}, max {:?}",
            self.failed.len(),
            self.failed.len() + self.took.len(),
            quantile(0.5),
            quantile(0.99),
            quantile(1.0)
        )
    }
}

/// The duration of a request, or why it failed; `limit` is its timeout.
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

fn expect_200(reply: io::Result<jackstay::demo::client::Reply>) -> Result<(), String> {
    match reply {
        Ok(reply) if reply.status == 200 => Ok(()),
        Ok(reply) => Err(format!("{}: {:?}", reply.status, reply.body)),
        Err(error) => Err(error.to_string()),
    }
}

/// Connects with a chain again and again, and sends two requests per connection.
fn attack(
    addr: SocketAddr,
    ca: &str,
    (chain, key): (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>),
    over: &Arc<AtomicBool>,
) -> JoinHandle<usize> {
    let (connector, over) = (connector(ca, chain, key), over.clone());
    tokio::spawn(async move {
        let mut count = 0;
        while !over.load(Relaxed) {
            if let Ok(mut stream) = connect(addr, &connector).await {
                for _ in 0..2 {
                    let _ = tokio::time::timeout(PATIENCE, get(&mut stream)).await;
                }
            }
            count += 1;
        }
        count
    })
}

/// A client whose chains are as expensive to verify as possible: 12 CA certificates of one name,
/// and, within the limit of the handshake, 5 with the name of the cluster's own CA.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn expensive_chains_fail_no_request_of_a_verified_client() {
    let limit = PATIENCE / 2;
    let cluster = TestCluster::new(2);
    let proxy = Arc::new(cluster.start_with(without_suspicion).await);
    let ca = cluster.certs.pki.ca_pem();
    let who = cluster.certs.credentials();
    let client = Arc::new(proxy.client_with(&who).await);
    client.post(CONFIGMAPS, &config_map("lease", "0")).await.unwrap();
    let over = Arc::new(AtomicBool::new(false));
    let attackers = [unverifiable_chain("nobody", 12), unverifiable_chain("demo", 5)]
        .map(|chain| attack(proxy.addr, &ca, chain, &over));
    let mut requests = JoinSet::new();
    let mut tick = tokio::time::interval(Duration::from_millis(100));
    let list = format!("{CONFIGMAPS}?limit=1");
    for round in 0..if long_form() { 600 } else { 100 } {
        tick.tick().await;
        let (here, path) = (Arc::clone(&client), list.clone());
        requests.spawn(async move {
            ("GET", timed(limit, async { expect_200(here.get(&path).await) }).await)
        });
        let here = Arc::clone(&client);
        requests.spawn(async move {
            let (path, lease) =
                (format!("{CONFIGMAPS}/lease"), config_map("lease", &round.to_string()));
            ("PUT", timed(limit, async { expect_200(here.put(&path, &lease).await) }).await)
        });
        if round % 10 == 0 {
            let (path, who, addr) = (list.clone(), who.clone(), proxy.addr);
            requests.spawn(async move {
                let connecting = async {
                    let client = Client::connect(addr, &who).await.map_err(|e| e.to_string())?;
                    expect_200(client.get(&path).await)
                };
                ("fresh connection", timed(limit, connecting).await)
            });
            let here = Arc::clone(&proxy);
            requests.spawn(async move {
                let alive = async {
                    let page = here.page("/livez").await;
                    if page.starts_with("HTTP/1.1 200 ") { Ok(()) } else { Err(page) }
                };
                ("/livez", timed(limit, alive).await)
            });
        }
    }
    let mut seen = BTreeMap::<&str, Results>::new();
    while let Some(done) = requests.join_next().await {
        let (what, result) = done.unwrap();
        let seen = seen.entry(what).or_default();
        match result {
            Ok(took) => seen.took.push(took),
            Err(why) => seen.failed.push(why),
        }
    }
    over.store(true, Relaxed);
    for (what, seen) in &mut seen {
        println!("{}", seen.line(what));
    }
    for attacker in attackers {
        println!("an attacker connected {} times", attacker.await.unwrap());
    }
    let failed: Vec<_> = seen.values().flat_map(|seen| &seen.failed).collect();
    assert!(failed.is_empty(), "{} failed: {failed:?}", failed.len());
    assert_eq!(seen.len(), 4);
}

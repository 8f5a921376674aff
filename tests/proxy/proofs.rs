//! What a client's certificate proves: nothing for another subject, nothing after its end, and not at
//! the cost of others.

use std::collections::BTreeMap;
use std::future::{Future, poll_fn};
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::symlink;
use std::path::Path;
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
    Certs, MAPS, PATIENCE, Proxy, World, long, map, pass, patient, soon, terminate, until,
};

/// Replaces a symlink as kubelet does: renamed over.
fn point(link: &Path, target: &str) {
    let next = link.with_extension("next");
    symlink(link.with_file_name(target), &next).unwrap();
    std::fs::rename(next, link).unwrap();
}

/// The identity file alternates between two subjects, whose clients ask all the time. Each request
/// names its client in its Audit-ID, so the server's audit says whose it was.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn identity_file_that_changes_its_subject_crosses_no_request_and_no_watch() {
    let world = World::new(2);
    let dir = world.certs.path();
    let current = dir.join("current.pem");
    let people = ["alice", "bob"].map(|name| {
        let issued = world.certs.pki.client(&Subject::new(name, &[])).unwrap();
        issued.write_pair(dir, name).unwrap();
        (name, issued)
    });
    point(&current, "alice.pem");
    let proxy = world
        .start_with(|config| {
            *config = patient(config.clone());
            let paths = CertPaths { cert_file: current.clone(), key_file: current.clone() };
            terminate(config).identities = vec![paths];
        })
        .await;
    let over = Arc::new(AtomicBool::new(false));
    let served: [Arc<AtomicUsize>; 2] = Default::default();
    let mut tasks = Vec::new();
    for (at, (name, issued)) in people.iter().enumerate() {
        for task in 0..3 {
            let client = proxy.client(&world.certs.nobody().certificate(issued)).await;
            let (over, served, name) = (over.clone(), served[at].clone(), *name);
            tasks.push(tokio::spawn(async move {
                for count in 0.. {
                    if over.load(Relaxed) {
                        break;
                    }
                    let id = format!("{name}-{task}-{count}");
                    let path = format!("{MAPS}?limit=1");
                    let headers = [("audit-id", id.as_str())];
                    let reply = client.request(Method::GET, &path, &headers, "").await.unwrap();
                    match reply.status.as_u16() {
                        200 => drop(served.fetch_add(1, Relaxed)),
                        401 => {}
                        other => panic!("{other}: {:?}", reply.body),
                    }
                    pass(Duration::from_millis(1)).await;
                }
            }));
        }
    }
    let owner = proxy.client(&world.certs.nobody().certificate(&people[0].1)).await;
    let mut watches = Vec::new();
    for n in 0..4 {
        let path = format!("{MAPS}?watch=1&resourceVersion={}", world.cluster.version());
        let id = format!("alice-watch-{n}");
        let answer = owner.send(Method::GET, &path, &[("audit-id", id.as_str())], "").await;
        let body = answer.unwrap().into_body();
        watches.push(tokio::spawn(ends_cleanly(body)));
    }
    for round in 0..4 {
        let (at, (name, _)) = (round % 2, &people[round % 2]);
        point(&current, &format!("{name}.pem"));
        let before = served[at].load(Relaxed);
        until("its subject is served", async || served[at].load(Relaxed) >= before + 15).await;
        // What ran on these connections looks for others.
        world.servers[round % 2].reset_connections();
        let before = served[at].load(Relaxed);
        until("it goes on", async || served[at].load(Relaxed) >= before + 10).await;
    }
    over.store(true, Relaxed);
    for task in tasks {
        task.await.unwrap();
    }
    for watch in watches {
        assert!(soon("an end", watch).await.unwrap(), "alice's slot is gone: it ends cleanly");
    }
    let mut seen = [0_usize; 2];
    for record in world.cluster.audit().records() {
        let id = record.audit_id.as_deref().unwrap_or_default();
        for (at, (name, _)) in people.iter().enumerate() {
            if id.starts_with(name) {
                seen[at] += 1;
                assert_eq!(record.user, *name, "{id} reached the server as {}", record.user);
            }
        }
    }
    println!("{seen:?} requests of alice and bob, each as who they are");
    assert!(seen.iter().all(|count| *count >= 50), "{seen:?}");
}

/// A watch of a client whose certificate expires in a while, and how often it was asked for.
async fn brief_watch(world: &World, proxy: &Proxy) -> (Client, hyper::body::Incoming) {
    let validity = Validity { not_after: SystemTime::now() + PATIENCE / 2, ..Validity::usual() };
    let brief = world.certs.pki.client_valid(&Subject::admin(), validity).unwrap();
    let client = proxy.client(&world.certs.nobody().certificate(&brief)).await;
    let path = format!("{MAPS}?watch=1&resourceVersion={}", world.cluster.version());
    let headers = [("audit-id", "brief")];
    let answer = soon("a watch", client.send(Method::GET, &path, &headers, "")).await.unwrap();
    assert_eq!(answer.status(), 200, "the machine took all its life to say hello");
    (client, answer.into_body())
}

/// Reads to the end: whether that is clean.
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
async fn watch_whose_client_certificate_expires_ends_cleanly() {
    let world = World::new(2);
    let proxy = world.start_with(|config| *config = patient(config.clone())).await;
    let (client, body) = brief_watch(&world, &proxy).await;
    assert!(soon("its end", ends_cleanly(body)).await);
    let after = client.get(MAPS).await.unwrap();
    assert_eq!(after.status, 401, "no sooner than its proof");
    assert_eq!(world.cluster.audit().count_id("brief"), 1);
    let ended = proxy.metric("jackstay_watch_resumes_total{outcome=\"unproven\"").await;
    assert_eq!(ended as u64, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn watch_whose_client_ca_is_withdrawn_ends_cleanly() {
    let world = World::new(2);
    let file = world.certs.path().join("client-ca.crt");
    std::fs::write(&file, world.certs.pki.ca_pem()).unwrap();
    let proxy = world
        .start_with(|config| {
            *config = patient(config.clone());
            terminate(config).client_ca_file = Some(file.clone());
        })
        .await;
    let client = proxy.client(&world.certs.credentials()).await;
    let path = format!("{MAPS}?watch=1&resourceVersion={}", world.cluster.version());
    let body = client.send(Method::GET, &path, &[], "").await.unwrap().into_body();
    std::fs::write(&file, Pki::new("another").unwrap().ca_pem()).unwrap();
    assert!(soon("its end", ends_cleanly(body)).await);
    assert_eq!(client.get(MAPS).await.unwrap().status, 401);
}

/// The clock has gone on and timers have not, as on a machine that was suspended: the resume is the
/// first to notice that the certificate has expired.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn resume_with_an_expired_certificate_ends_the_watch() {
    let certs = Certs::new();
    let mut config = certs.config(&[]);
    let tls = Arc::new(ServingTls::new(LoadedServingTls::load(terminate(&mut config)).unwrap()));
    let not_after = SystemTime::now() + PATIENCE / 2;
    let validity = Validity { not_after, ..Validity::usual() };
    let brief = certs.pki.client_valid(&Subject::admin(), validity).unwrap();
    let metrics = Metrics::new().listener("l");
    // Nothing follows its certificate.
    let peer = ClientCertificate::new(Some(&[brief.cert_der()]), &tls, &metrics).unwrap();
    let proof = IdentityProof::new(CredentialClass::Identity(0), Some(&peer));
    let resume_late = async {
        soon("a proof", proof.confirmed()).await;
        let mut end = proof.end().unwrap();
        let ended = poll_fn(|cx| Poll::Ready(end.as_mut().poll(cx).is_ready())).await;
        assert!(!ended, "the machine took all its life to verify it");
        until("it has expired", async || SystemTime::now() > not_after).await;
        tokio::select! {
            why = &mut end => why,
            () = proof.confirmed() => panic!("it has expired"),
        }
    };
    let why = soon("its end", LocalSet::new().run_until(resume_late)).await;
    assert!(why.contains("expired"), "{why}");
}

/// A certificate with its key, as rcgen makes them.
struct Made {
    der: CertificateDer<'static>,
    params: CertificateParams,
    key: KeyPair,
}

/// A self-signed CA certificate with this name.
fn authority(name: &str) -> Made {
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, name);
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let key = KeyPair::generate().unwrap();
    Made { der: params.self_signed(&key).unwrap().der().clone(), params, key }
}

/// A chain that leads nowhere: a leaf, and so many CA certificates of one name, each of which might
/// have signed each other.
fn maze(name: &str, authorities: usize) -> (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>) {
    let made: Vec<_> = (0..authorities).map(|_| authority(name)).collect();
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, "mallory");
    let key = KeyPair::generate().unwrap();
    let issuer = authority(name);
    let leaf = params.signed_by(&key, &Issuer::new(issuer.params, issuer.key)).unwrap();
    let chain = std::iter::once(leaf.der().clone()).chain(made.into_iter().map(|made| made.der));
    (chain.collect(), PrivatePkcs8KeyDer::from(key.serialize_der()).into())
}

/// The client CA changes while a watch runs, and then the watch loses its stream. Whether its proof
/// holds under the new CA is not known as long as its chain waits to be verified, so nothing but the
/// check at the resume keeps it from going upstream meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn watch_is_resumed_only_with_a_proof_that_holds_then() {
    /// Watches that were quiet are resumed within a second.
    const RESUMED: Duration = Duration::from_millis(1_500);
    for (withdrawn, asked) in [(true, 1), (false, 2)] {
        let world = World::new(2);
        let file = world.certs.path().join("client-ca.crt");
        let ca = world.certs.pki.ca_pem();
        std::fs::write(&file, &ca).unwrap();
        let proxy = world
            .start_with(|config| {
                *config = patient(config.clone());
                terminate(config).client_ca_file = Some(file.clone());
            })
            .await;
        let path = format!("{MAPS}?watch=1&resourceVersion={}", world.cluster.version());
        // Longer chains have a lane of their own.
        let (leaf, key) = der_of(&world.certs.admin);
        let chain = vec![leaf, authority("one").der, authority("other").der];
        let mut watch = connect(proxy.addr, &connector(&ca, chain.clone(), key)).await.unwrap();
        let request = format!(
            "GET {path} HTTP/1.1\r\nHost: api\r\nConnection: close\r\nAudit-ID: long\r\n\r\n"
        );
        watch.write_all(request.as_bytes()).await.unwrap();
        let mut head = [0; 12];
        soon("a watch", watch.read_exact(&mut head)).await.unwrap();
        assert_eq!(&head, b"HTTP/1.1 200");
        let turn = client_chain::acquire_slot(&ClientChain::new(chain).unwrap()).await.unwrap();

        let next = Pki::new("next").unwrap();
        let bundle = if withdrawn { next.ca_pem() } else { ca + &next.ca_pem() };
        std::fs::write(&file, bundle).unwrap();
        let issued = next.client(&Subject::admin()).unwrap();
        let client = proxy.client(&world.certs.nobody().certificate(&issued)).await;
        until("the new CA is in use", async || client.get(MAPS).await.unwrap().status == 200).await;
        let headers = [("audit-id", "short")];
        let _other = client.send(Method::GET, &path, &headers, "").await.unwrap();
        let count = |id| world.cluster.audit().count_id(id);
        world.servers.iter().for_each(ApiServerHandle::reset_connections);
        until("watches are resumed", async || count("short") >= 2).await;
        pass(RESUMED).await;
        assert_eq!(count("long"), 1, "resumed without a proof");
        drop(turn);
        if withdrawn {
            let mut rest = Vec::new();
            soon("its end", watch.read_to_end(&mut rest)).await.unwrap();
            assert!(rest.ends_with(b"\r\n0\r\n\r\n"), "not a clean end");
        } else {
            until("it is resumed", async || count("long") >= asked).await;
        }
        assert_eq!(count("long"), asked);
    }
}

/// How a client with a chain of its own connects.
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

/// Asks on an HTTP/1.1 connection: the status of the answer.
async fn ask(stream: &mut TlsStream<TcpStream>) -> io::Result<u16> {
    let request = format!("GET {MAPS}?limit=1 HTTP/1.1\r\nHost: api\r\n\r\n");
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
    let world = World::new(1);
    let proxy = world.start().await;
    let ca = world.certs.pki.ca_pem();
    let large = || {
        let Made { mut params, key, .. } = authority("large");
        let oid = [1, 3, 6, 1, 4, 1, 57683, 99];
        let filling = CustomExtension::from_oid_content(&oid, vec![4; 32 << 10]);
        params.custom_extensions.push(filling);
        params.self_signed(&key).unwrap().der().clone()
    };
    for (name, others, taken) in [
        ("alone", vec![], true),
        ("6 in all", (0..5).map(|n| authority(&format!("ca {n}")).der).collect(), true),
        ("7 in all", (0..6).map(|n| authority(&format!("ca {n}")).der).collect(), false),
        ("33 KiB", vec![large()], false),
    ] {
        let (leaf, key) = der_of(&world.certs.admin);
        let chain = std::iter::once(leaf).chain(others).collect();
        let connector = connector(&ca, chain, key);
        let answer =
            soon("an answer", async { ask(&mut connect(proxy.addr, &connector).await?).await })
                .await;
        match answer {
            Ok(status) => assert!(taken && status == 200, "{name}: {status}"),
            Err(error) => {
                // "Some other (unspecified) issue" (RFC 8446, 6.2): no other alert says less that
                // is untrue.
                let alert = error.get_ref().and_then(|e| e.downcast_ref::<rustls::Error>());
                let unknown = rustls::Error::AlertReceived(AlertDescription::CertificateUnknown);
                assert_eq!((taken, alert), (false, Some(&unknown)), "{name}: {error}");
            }
        }
    }
    // Counted after the alert has gone out.
    let refused = async || proxy.metric("jackstay_downstream_refused_total{").await as u64;
    until("both are counted", async || refused().await >= 2).await;
    assert_eq!(refused().await, 2);
}

/// Good or bad, a chain is verified once for each connection.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn chain_is_verified_once_per_connection() {
    let world = World::new(1);
    let proxy = world.start().await;
    let ca = world.certs.pki.ca_pem();
    let (leaf, key) = der_of(&world.certs.admin);
    let good = connector(&ca, vec![leaf], key);
    let (chain, key) = maze("demo", 5);
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
            assert_eq!(soon("an answer", ask(&mut stream)).await.unwrap(), status);
        }
    }
    assert_eq!((verified("ok").await, verified("failed").await), (1.0, 1.0));
    // The same chain on another connection is known; only what is good is remembered.
    for connector in [&good, &bad] {
        let mut stream = connect(proxy.addr, connector).await.unwrap();
        soon("an answer", ask(&mut stream)).await.unwrap();
    }
    let counts = (verified("ok").await, verified("failed").await, verified("known").await);
    assert_eq!(counts, (1.0, 2.0, 1.0));
}

/// What clients that ask regularly have seen, by what they ask.
#[derive(Default)]
struct Seen {
    took: Vec<Duration>,
    failed: Vec<String>,
}

impl Seen {
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

/// How long it took to ask, or why that failed; `limit` is how long an answer is waited for.
async fn timed(
    limit: Duration,
    request: impl Future<Output = Result<(), String>>,
) -> Result<Duration, String> {
    let start = Instant::now();
    match tokio::time::timeout(limit, request).await {
        Ok(done) => done.map(|()| start.elapsed()),
        Err(_) => Err(format!("nothing for {limit:?}")),
    }
}

fn right(reply: io::Result<jackstay::demo::client::Reply>) -> Result<(), String> {
    match reply {
        Ok(reply) if reply.status == 200 => Ok(()),
        Ok(reply) => Err(format!("{}: {:?}", reply.status, reply.body)),
        Err(error) => Err(error.to_string()),
    }
}

/// Connects with a chain again and again, and asks twice on each connection.
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
                    let _ = tokio::time::timeout(PATIENCE, ask(&mut stream)).await;
                }
            }
            count += 1;
        }
        count
    })
}

/// A neighbour whose chains are as expensive to verify as they can be: 12 CA certificates of one name,
/// and what passes the handshake, 5 of the name of the cluster's own CA.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn neighbour_with_expensive_chains_fails_no_request_of_a_proven_client() {
    let limit = PATIENCE / 2;
    let world = World::new(2);
    let proxy = Arc::new(world.start_with(|config| *config = patient(config.clone())).await);
    let ca = world.certs.pki.ca_pem();
    let who = world.certs.credentials();
    let client = Arc::new(proxy.client(&who).await);
    client.post(MAPS, &map("lease", "0")).await.unwrap();
    let over = Arc::new(AtomicBool::new(false));
    let attackers =
        [maze("nobody", 12), maze("demo", 5)].map(|chain| attack(proxy.addr, &ca, chain, &over));
    let mut asked = JoinSet::new();
    let mut tick = tokio::time::interval(Duration::from_millis(100));
    let list = format!("{MAPS}?limit=1");
    for round in 0..if long() { 600 } else { 100 } {
        tick.tick().await;
        let (here, path) = (Arc::clone(&client), list.clone());
        asked.spawn(
            async move { ("GET", timed(limit, async { right(here.get(&path).await) }).await) },
        );
        let here = Arc::clone(&client);
        asked.spawn(async move {
            let (path, lease) = (format!("{MAPS}/lease"), map("lease", &round.to_string()));
            ("PUT", timed(limit, async { right(here.put(&path, &lease).await) }).await)
        });
        if round % 10 == 0 {
            let (path, who, addr) = (list.clone(), who.clone(), proxy.addr);
            asked.spawn(async move {
                let connecting = async {
                    let client = Client::connect(addr, &who).await.map_err(|e| e.to_string())?;
                    right(client.get(&path).await)
                };
                ("fresh connection", timed(limit, connecting).await)
            });
            let here = Arc::clone(&proxy);
            asked.spawn(async move {
                let alive = async {
                    let page = here.page("/livez").await;
                    if page.starts_with("HTTP/1.1 200 ") { Ok(()) } else { Err(page) }
                };
                ("/livez", timed(limit, alive).await)
            });
        }
    }
    let mut seen = BTreeMap::<&str, Seen>::new();
    while let Some(done) = asked.join_next().await {
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

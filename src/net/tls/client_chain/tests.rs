//! Tests of client chains: limits, lanes, cache, and how long a verdict holds.

#![allow(clippy::disallowed_methods)] // below `observe`, which has the wall clock

use std::sync::atomic::AtomicUsize;
use std::sync::mpsc;
use std::thread::{self, ThreadId};

use rcgen::{CertificateParams, KeyPair};
use rustls::client::danger::HandshakeSignatureValid;
use rustls::server::danger::ClientCertVerified;
use rustls::{CertificateError, DigitallySignedStruct, DistinguishedName, SignatureScheme};

use super::*;

/// Takes every chain but of three certificates, and records where it was asked. `wait`: not before it
/// is allowed to.
#[derive(Debug, Default)]
struct Verifier {
    asked: Mutex<Vec<ThreadId>>,
    wait: Mutex<Option<mpsc::Receiver<()>>>,
}

impl ClientCertVerifier for Verifier {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        _: &CertificateDer<'_>,
        others: &[CertificateDer<'_>],
        _: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        self.asked.lock().unwrap().push(thread::current().id());
        if let Some(allowed) = &*self.wait.lock().unwrap() {
            allowed.recv().unwrap();
        }
        match others.len() {
            2 => Err(Error::InvalidCertificate(CertificateError::UnknownIssuer)),
            _ => Ok(ClientCertVerified::assertion()),
        }
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        unreachable!("no handshake here")
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        unreachable!("no handshake here")
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        Vec::new()
    }
}

/// A chain that only the verifier above has to read.
fn chain(certificates: usize, bytes: usize) -> Arc<ClientChain> {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let mut first = vec![0; bytes];
    first[..8].copy_from_slice(&NEXT.fetch_add(1, Ordering::Relaxed).to_be_bytes());
    let certificates = (0..certificates).map(|_| CertificateDer::from(first.clone())).collect();
    Arc::new(ClientChain { certificates, changes: Vec::new(), unreadable: None })
}

fn lane(queue: usize, rest: u32) -> &'static Lane {
    Box::leak(Box::new(Lane::new(queue, rest)))
}

#[test]
fn chain_is_out_of_bounds_above_6_certificates_or_32_kib() {
    let of = |count: usize, bytes: usize| {
        let certificates = chain(count, bytes).certificates.clone();
        exceeded_limit(&certificates[0], &certificates[1..])
    };
    assert_eq!(of(1, MAX_BYTES), None);
    assert_eq!(of(6, MAX_BYTES / 6), None);
    let why = "a client certificate chain of 7 certificates and 70 bytes exceeds the limit of 6 \
               certificates and 32 KiB";
    assert_eq!(of(7, 10).as_deref(), Some(why));
    assert!(of(1, MAX_BYTES + 1).is_some());
}

/// Seconds: when the leaf and its CA are valid, and the span in which nothing changes.
#[test]
fn verdict_holds_until_validity_of_any_certificate_of_the_chain_changes() {
    let certificate = |from: u64, until: u64| {
        let at = |seconds| rcgen::date_time_ymd(1970, 1, 1) + Duration::from_secs(seconds);
        let mut params = CertificateParams::default();
        (params.not_before, params.not_after) = (at(from), at(until));
        params.self_signed(&KeyPair::generate().unwrap()).unwrap().der().clone()
    };
    let ca = ClientCa::new(Arc::new(Verifier::default()));
    let other_ca = ClientCa::new(Arc::new(Verifier::default()));
    let chain = ClientChain::new(vec![certificate(1_000, 5_000), certificate(500, 3_000)]).unwrap();
    for (at, from, until) in [
        (600, 500, 1_000),
        (1_000, 1_000, 3_001),
        (3_000, 1_000, 3_001),
        (3_001, 3_001, 5_001),
        (5_001, 5_001, u64::MAX),
    ] {
        let verdict = chain.verify(&ca, at);
        assert_eq!((verdict.from, verdict.until), (from, until), "at {at}");
        let holds = |ca: &ClientCa, at: u64| {
            let millis = Duration::from_secs(at) + Duration::from_millis(999);
            verdict.holds(ca, UNIX_EPOCH + millis)
        };
        let last = (until - 1).min(1 << 32);
        assert!(holds(&ca, at) && holds(&ca, from) && holds(&ca, last), "at {at}");
        assert!(!holds(&ca, from - 1) && !holds(&other_ca, at), "at {at}");
    }
    let unreadable = ClientChain::new(vec![certificate(0, 9), CertificateDer::from(vec![1])]);
    let why = unreadable.unwrap().verify(&ca, 5).result.unwrap_err();
    assert_eq!(why, "certificate 2 of its chain: not an X.509 certificate");
}

#[tokio::test]
async fn verification_runs_on_another_thread_and_a_good_chain_is_remembered() {
    let verifier = Arc::new(Verifier::default());
    let ca = Arc::new(ClientCa::new(Arc::clone(&verifier) as _));
    let (good, bad) = (chain(1, 10), chain(3, 10));
    let lane = lane(1, 0);
    for chain in [&good, &bad] {
        let verdict = lane.acquire_slot().await.unwrap().verify(chain, &ca).await;
        assert_eq!(verdict.result.is_ok(), Arc::ptr_eq(chain, &good));
        assert!(verdict.holds(&ca, SystemTime::now()));
    }
    let asked = verifier.asked.lock().unwrap().clone();
    assert_eq!(asked.len(), 2);
    assert!(!asked.contains(&thread::current().id()), "not on the worker thread");
    assert!(ca.cached_verdict(&good, SystemTime::now()).is_some());
    assert!(ca.cached_verdict(&bad, SystemTime::now()).is_none());
    let other = ClientCa::new(verifier);
    assert!(
        other.cached_verdict(&good, SystemTime::now()).is_none(),
        "another CA, another verdict"
    );
}

#[tokio::test]
async fn long_chain_holds_up_neither_a_short_one_nor_a_known_one() {
    let (allow, wait) = mpsc::channel();
    let stuck = Verifier { wait: Mutex::new(Some(wait)), ..Verifier::default() };
    let stuck = Arc::new(ClientCa::new(Arc::new(stuck)));
    let ca = Arc::new(ClientCa::new(Arc::new(Verifier::default())));
    let (long, short, known) = (chain(6, 10), chain(2, 10), chain(3, 11));
    assert!(!std::ptr::eq(Lane::of(&long), Lane::of(&short)));
    assert!(std::ptr::eq(Lane::of(&long), Lane::of(&known)));
    let good = ChainVerdict { generation: ca.generation, from: 0, until: u64::MAX, result: Ok(()) };
    ca.cache().insert(&known, &good);
    let (slow, fast) = (lane(1, 0), lane(1, 0));
    let verifying = tokio::spawn(async move {
        slow.acquire_slot().await.unwrap().verify(&long, &stuck).await.result.is_ok()
    });
    while slow.turn.available_permits() > 0 {
        tokio::task::yield_now().await;
    }
    assert!(fast.acquire_slot().await.unwrap().verify(&short, &ca).await.result.is_ok());
    assert!(ca.cached_verdict(&known, SystemTime::now()).is_some());
    assert!(!verifying.is_finished());
    allow.send(()).unwrap();
    assert!(verifying.await.unwrap());
}

#[tokio::test]
async fn lane_refuses_a_chain_when_its_queue_is_full() {
    let lane = lane(2, 0);
    let running = lane.acquire_slot().await.unwrap();
    let waiting: Vec<_> = (0..2).map(|_| tokio::spawn(lane.acquire_slot())).collect();
    while lane.queue.available_permits() > 0 {
        tokio::task::yield_now().await;
    }
    assert!(lane.acquire_slot().await.is_none());
    drop(running);
    for turn in waiting {
        assert!(turn.await.unwrap().is_some());
    }
    assert!(lane.acquire_slot().await.is_some(), "finished chains have left the queue");
}

#[tokio::test(start_paused = true)]
async fn lane_of_long_chains_rests_four_times_as_long_as_it_works() {
    let turn = VerificationSlot {
        took: Duration::from_millis(30),
        ..LONG_LANE.acquire_slot().await.unwrap()
    };
    let begun = Instant::now();
    turn.rest().await;
    assert_eq!(begun.elapsed(), Duration::from_millis(120));
    let turn = VerificationSlot {
        took: Duration::from_millis(30),
        ..SHORT_LANE.acquire_slot().await.unwrap()
    };
    turn.rest().await;
    assert_eq!(begun.elapsed(), Duration::from_millis(120));
}

#[test]
fn cached_chains_are_bounded_by_count_and_bytes() {
    let good = ChainVerdict { generation: 1, from: 0, until: u64::MAX, result: Ok(()) };
    for (bytes, most) in [(10, MAX_CACHED), (MAX_BYTES, MAX_CACHED_BYTES / MAX_BYTES)] {
        let mut cache = ChainCache::default();
        let chains: Vec<_> = (0..=most).map(|_| chain(1, bytes)).collect();
        for chain in &chains {
            cache.insert(chain, &good);
            cache.insert(chain, &good);
        }
        assert_eq!(cache.verdicts.len(), most);
        assert_eq!(cache.bytes, most * bytes);
        assert!(cache.get(&chains[0]).is_none());
        assert!(cache.get(&chains[1]).is_some() && cache.get(&chains[most]).is_some());
    }
}

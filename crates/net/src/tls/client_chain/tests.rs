//! Tests of client chains: limits, queues, the cache, and the interval in which a verdict applies.

use std::sync::atomic::AtomicUsize;
use std::sync::mpsc;
use std::thread::{self, ThreadId};

use jackstay_sys::clock;
use rcgen::{CertificateParams, KeyPair};
use rustls::client::danger::HandshakeSignatureValid;
use rustls::server::danger::ClientCertVerified;
use rustls::{CertificateError, DigitallySignedStruct, DistinguishedName, Error, SignatureScheme};

use super::*;

/// Accepts every chain except those of three certificates.
#[derive(Debug, Default)]
struct Verifier {
    /// The thread of each verification.
    threads: Mutex<Vec<ThreadId>>,
    /// If set, a verification ends only after it has received a message.
    release: Mutex<Option<mpsc::Receiver<()>>>,
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
        self.threads.lock().unwrap().push(thread::current().id());
        if let Some(release) = &*self.release.lock().unwrap() {
            release.recv().unwrap();
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
        unreachable!("the tests make no handshake")
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        unreachable!("the tests make no handshake")
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        Vec::new()
    }
}

/// A chain that differs from all others. Its certificates of `bytes` bytes cannot be parsed, but [`Verifier`]
/// does not parse them.
fn chain(certificates: usize, bytes: usize) -> Arc<ClientChain> {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let mut der = vec![0; bytes];
    der[..8].copy_from_slice(&NEXT.fetch_add(1, Ordering::Relaxed).to_be_bytes());
    let certificates = (0..certificates).map(|_| CertificateDer::from(der.clone())).collect();
    Arc::new(ClientChain { certificates, changes: Vec::new(), parse_error: None })
}

fn queue(places: usize) -> &'static VerificationQueue {
    Box::leak(Box::new(VerificationQueue::new(places, 0)))
}

#[test]
fn exceeded_limit_refuses_more_than_6_certificates_or_32_kib() {
    let exceeded = |count: usize, bytes: usize| {
        let certificates = chain(count, bytes).certificates.clone();
        exceeded_limit(&certificates[0], &certificates[1..])
    };
    assert_eq!(exceeded(1, MAX_BYTES), None);
    assert_eq!(exceeded(6, MAX_BYTES / 6), None);
    let why = "a client certificate chain of 7 certificates and 70 bytes exceeds the limit of 6 \
               certificates and 32 KiB";
    assert_eq!(exceeded(7, 10).as_deref(), Some(why));
    assert!(exceeded(1, MAX_BYTES + 1).is_some());
}

#[test]
fn verdict_applies_until_the_validity_of_any_certificate_of_the_chain_changes() {
    let certificate = |from: u64, until: u64| {
        let at = |seconds| rcgen::date_time_ymd(1970, 1, 1) + Duration::from_secs(seconds);
        let mut params = CertificateParams::default();
        (params.not_before, params.not_after) = (at(from), at(until));
        params.self_signed(&KeyPair::generate().unwrap()).unwrap().der().clone()
    };
    let ca = ClientCa::new(Arc::new(Verifier::default()));
    let other_ca = ClientCa::new(Arc::new(Verifier::default()));
    let chain = ClientChain::new(vec![certificate(1_000, 5_000), certificate(500, 3_000)]).unwrap();
    // Each verdict applies from `from` to before `until`, in seconds since 1970.
    for (at, from, until) in [
        (600, 500, 1_000),
        (1_000, 1_000, 3_001),
        (3_000, 1_000, 3_001),
        (3_001, 3_001, 5_001),
        (5_001, 5_001, u64::MAX),
    ] {
        let verdict = chain.verify(&ca, at);
        assert_eq!((verdict.from, verdict.until), (from, until), "at {at}");
        let applies = |ca: &ClientCa, second: u64| {
            let end_of_second = Duration::from_secs(second) + Duration::from_millis(999);
            verdict.applies(ca, UNIX_EPOCH + end_of_second)
        };
        let last = (until - 1).min(1 << 32);
        assert!(applies(&ca, at) && applies(&ca, from) && applies(&ca, last), "at {at}");
        assert!(!applies(&ca, from - 1) && !applies(&other_ca, at), "at {at}");
    }
    let malformed = ClientChain::new(vec![certificate(0, 9), CertificateDer::from(vec![1])]);
    let error = malformed.unwrap().verify(&ca, 5).result.unwrap_err();
    assert_eq!(error.to_string(), "certificate 2 of its chain: not an X.509 certificate");
}

#[tokio::test]
async fn verify_runs_on_a_blocking_thread_and_caches_valid_chains_only() {
    let verifier = Arc::new(Verifier::default());
    let ca = Arc::new(ClientCa::new(Arc::clone(&verifier) as _));
    let (valid, invalid) = (chain(1, 10), chain(3, 10));
    let queue = queue(1);
    for chain in [&valid, &invalid] {
        let verdict = queue.acquire_slot(1).await.unwrap().verify(chain, &ca).await;
        assert_eq!(verdict.result.is_ok(), Arc::ptr_eq(chain, &valid));
        assert!(verdict.applies(&ca, wall_clock()));
    }
    let threads = verifier.threads.lock().unwrap().clone();
    assert_eq!(threads.len(), 2);
    assert!(!threads.contains(&thread::current().id()), "the calling thread is a worker's");
    assert!(ca.cached_verdict(&valid, wall_clock()).is_some());
    assert!(ca.cached_verdict(&invalid, wall_clock()).is_none());
    let other_ca = ClientCa::new(verifier);
    assert!(other_ca.cached_verdict(&valid, wall_clock()).is_none());
}

#[tokio::test]
async fn verify_of_a_long_chain_delays_neither_short_nor_cached_chains() {
    let (release_verifier, release) = mpsc::channel();
    let blocked = Verifier { release: Mutex::new(Some(release)), ..Verifier::default() };
    let blocked_ca = Arc::new(ClientCa::new(Arc::new(blocked)));
    let ca = Arc::new(ClientCa::new(Arc::new(Verifier::default())));
    let (long, short, cached) = (chain(6, 10), chain(2, 10), chain(3, 11));
    assert!(!std::ptr::eq(VerificationQueue::of(&long), VerificationQueue::of(&short)));
    assert!(std::ptr::eq(VerificationQueue::of(&long), VerificationQueue::of(&cached)));
    let valid =
        ChainVerdict { generation: ca.generation, from: 0, until: u64::MAX, result: Ok(()) };
    ca.cache().insert(&cached, &valid);
    // The tests share the static queues, so this one has its own.
    let (long_queue, short_queue) = (queue(1), queue(1));
    let verification = tokio::spawn(async move {
        long_queue.acquire_slot(1).await.unwrap().verify(&long, &blocked_ca).await.result.is_ok()
    });
    while !long_queue.is_running() {
        tokio::task::yield_now().await;
    }
    assert!(short_queue.acquire_slot(1).await.unwrap().verify(&short, &ca).await.result.is_ok());
    assert!(ca.cached_verdict(&cached, wall_clock()).is_some());
    assert!(!verification.is_finished());
    release_verifier.send(()).unwrap();
    assert!(verification.await.unwrap());
}

#[tokio::test(start_paused = true)]
async fn pause_of_the_long_queue_takes_four_times_the_verification() {
    for (queue, pause) in [(&LONG_CHAINS, 120), (&SHORT_CHAINS, 0)] {
        let slot = queue.acquire_slot(1).await.unwrap();
        let slot = VerificationSlot { duration: Duration::from_millis(30), ..slot };
        let start = clock::now();
        slot.pause().await;
        assert_eq!(clock::elapsed(start), Duration::from_millis(pause));
    }
}

#[test]
fn cache_insert_above_a_limit_drops_the_oldest_chain() {
    let valid = ChainVerdict { generation: 1, from: 0, until: u64::MAX, result: Ok(()) };
    for (bytes, max) in [(10, MAX_CACHED), (MAX_BYTES, MAX_CACHED_BYTES / MAX_BYTES)] {
        let mut cache = ChainCache::default();
        let chains: Vec<_> = (0..=max).map(|_| chain(1, bytes)).collect();
        for chain in &chains {
            cache.insert(chain, &valid);
            cache.insert(chain, &valid);
        }
        assert_eq!(cache.verdicts.len(), max);
        assert_eq!(cache.bytes, max * bytes);
        assert!(cache.get(&chains[0]).is_none());
        assert!(cache.get(&chains[1]).is_some() && cache.get(&chains[max]).is_some());
    }
}

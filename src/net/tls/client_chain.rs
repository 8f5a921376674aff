//! Verifies the certificate chains of clients, within limits, off the worker threads, and with a cache.
//!
//! Path building is the most expensive part of TLS that an unauthenticated client can request: webpki tries
//! CA certificates of one name in every order, and gives up after 200,000 steps or 100 signatures (0.1 to
//! 0.3 s for 12 certificates). So:
//!
//! * The handshake refuses a chain of more than [`MAX_CERTIFICATES`] certificates or [`MAX_BYTES`].
//! * Verification runs on a blocking thread, one chain at a time in each of two [`Lane`]s. A chain of
//!   up to two certificates, which needs no search, never waits behind a longer one. The lane of longer
//!   chains pauses after each for [`REST`] times its duration, so it uses at most a fifth of a core. Both
//!   queues are bounded.
//! * A [`ChainVerdict`], good or bad, holds until a certificate of the chain begins or ceases to be valid,
//!   or the CA changes. Valid chains are also cached with their CA, so a client that reconnects does not
//!   queue.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustls::Error;
use rustls::crypto::aws_lc_rs;
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::ClientCertVerifier;
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::task::spawn_blocking;
use tokio::time::{Instant, sleep};

use super::certificate;
use super::pem_files::LoadedCa;

/// Maximum of certificates in a chain: a leaf and five CAs. Usual chains have one to three.
pub const MAX_CERTIFICATES: usize = 6;
/// Maximum of DER bytes in a chain. A certificate has 1 to 2 KiB.
pub const MAX_BYTES: usize = 32 << 10;

/// Certificates of a chain that needs no search: a leaf and the CA that signed it.
const SHORT: usize = 2;
/// Queue of short chains: 0.1 to 1 ms each.
const SHORT_QUEUE: usize = 1_024;
/// Queue of longer chains: up to 50 ms each, and a pause.
const LONG_QUEUE: usize = 16;
/// Pause of the lane of longer chains, as a multiple of the verification before.
const REST: u32 = 4;
/// Maximum of cached chains, and of their bytes.
const MAX_CACHED: usize = 1_024;
const MAX_CACHED_BYTES: usize = 2 << 20;

/// Why the handshake refuses a chain, for the log; `None` if it is within the limits.
pub fn exceeded_limit(leaf: &CertificateDer<'_>, others: &[CertificateDer<'_>]) -> Option<String> {
    let count = 1 + others.len();
    let bytes = leaf.len() + others.iter().map(|certificate| certificate.len()).sum::<usize>();
    (count > MAX_CERTIFICATES || bytes > MAX_BYTES).then(|| {
        format!(
            "a client certificate chain of {count} certificates and {bytes} bytes exceeds the limit \
             of {MAX_CERTIFICATES} certificates and {} KiB",
            MAX_BYTES >> 10
        )
    })
}

/// The client CA in force.
#[derive(Debug)]
pub struct ClientCa {
    verifier: Arc<dyn ClientCertVerifier>,
    /// Differs for every bundle: a verdict under another bundle does not hold.
    generation: u64,
    /// Chains that are valid under this CA.
    cache: Mutex<ChainCache>,
}

static GENERATION: AtomicU64 = AtomicU64::new(1);

impl ClientCa {
    /// A CA whose chains `verifier` verifies.
    pub fn new(verifier: Arc<dyn ClientCertVerifier>) -> Self {
        let generation = GENERATION.fetch_add(1, Ordering::Relaxed);
        Self { verifier, generation, cache: Mutex::default() }
    }

    /// The CA of a loaded bundle.
    pub(super) fn from_bundle(bundle: &LoadedCa) -> Self {
        let provider = Arc::new(aws_lc_rs::default_provider());
        let verifier =
            WebPkiClientVerifier::builder_with_provider(Arc::clone(&bundle.roots), provider);
        Self::new(verifier.build().expect("a loaded CA bundle has at least one root"))
    }

    /// Verifies chains, without the limits of this module.
    pub(super) fn verifier(&self) -> Arc<dyn ClientCertVerifier> {
        Arc::clone(&self.verifier)
    }

    /// The cached verdict on a chain that another connection has presented, if it still holds at `now`.
    pub fn cached_verdict(&self, chain: &ClientChain, now: SystemTime) -> Option<ChainVerdict> {
        self.cache().get(chain).filter(|verdict| verdict.holds(self, now))
    }

    fn cache(&self) -> MutexGuard<'_, ChainCache> {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Verifies that a chain, leaf first, leads to this CA, is valid at `now` and allows client
    /// authentication.
    fn verify(&self, chain: &[CertificateDer<'_>], now: UnixTime) -> Result<(), String> {
        let (leaf, intermediates) = chain.split_first().ok_or("no certificate")?;
        match self.verifier.verify_client_cert(leaf, intermediates, now) {
            Ok(_) => Ok(()),
            Err(Error::InvalidCertificate(why)) => Err(why.to_string()),
            Err(error) => Err(error.to_string()),
        }
    }
}

/// The certificates that a client has presented.
#[derive(Debug)]
pub struct ClientChain {
    /// Leaf first; never empty.
    certificates: Vec<CertificateDer<'static>>,
    /// Seconds since 1970 at which a certificate begins or ceases to be valid.
    changes: Vec<u64>,
    /// Why a certificate cannot be parsed.
    unreadable: Option<String>,
}

impl ClientChain {
    /// A chain, leaf first; `None` without a certificate.
    pub fn new(certificates: Vec<CertificateDer<'static>>) -> Option<Self> {
        let (mut changes, mut unreadable) = (Vec::new(), None);
        for (at, certificate) in certificates.iter().enumerate() {
            match certificate::validity(certificate) {
                // The validity includes both (RFC 5280 section 4.1.2.5).
                Ok((first, last)) => changes.extend([seconds(first), seconds(last) + 1]),
                Err(why) => {
                    unreadable = Some(format!("certificate {} of its chain: {why}", at + 1));
                }
            }
        }
        (!certificates.is_empty()).then_some(Self { certificates, changes, unreadable })
    }

    /// The leaf certificate.
    pub fn leaf(&self) -> &CertificateDer<'static> {
        &self.certificates[0]
    }

    /// The interval around `now` in which the validity of no certificate changes.
    fn span(&self, now: u64) -> (u64, u64) {
        let before = self.changes.iter().copied().filter(|change| *change <= now).max();
        let after = self.changes.iter().copied().filter(|change| *change > now).min();
        (before.unwrap_or(0), after.unwrap_or(u64::MAX))
    }

    fn bytes(&self) -> usize {
        self.certificates.iter().map(|certificate| certificate.len()).sum()
    }

    /// Verifies the chain. Takes up to 50 ms.
    fn verify(&self, ca: &ClientCa, now: u64) -> ChainVerdict {
        let (from, until) = self.span(now);
        let at = UnixTime::since_unix_epoch(Duration::from_secs(now));
        let result = match &self.unreadable {
            Some(why) => Err(why.clone()),
            None => ca.verify(&self.certificates, at),
        };
        ChainVerdict { generation: ca.generation, from, until, result }
    }
}

/// Whether a chain is valid under one CA, for an interval of time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChainVerdict {
    generation: u64,
    from: u64,
    until: u64,
    /// The reason if the chain is not valid.
    pub result: Result<(), String>,
}

impl ChainVerdict {
    /// Whether the verdict applies to this CA and this time.
    pub fn holds(&self, ca: &ClientCa, now: SystemTime) -> bool {
        self.generation == ca.generation && (self.from..self.until).contains(&seconds(now))
    }

    /// When the verdict ceases to hold, unless the CA changes before.
    pub fn until(&self) -> Option<SystemTime> {
        UNIX_EPOCH.checked_add(Duration::from_secs(self.until))
    }
}

fn seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// Cache of valid chains of one CA. The oldest is dropped first.
#[derive(Debug, Default)]
struct ChainCache {
    verdicts: HashMap<Vec<CertificateDer<'static>>, ChainVerdict>,
    order: VecDeque<Arc<ClientChain>>,
    bytes: usize,
}

impl ChainCache {
    fn get(&self, chain: &ClientChain) -> Option<ChainVerdict> {
        self.verdicts.get(&chain.certificates).cloned()
    }

    fn insert(&mut self, chain: &Arc<ClientChain>, verdict: &ChainVerdict) {
        if self.verdicts.insert(chain.certificates.clone(), verdict.clone()).is_none() {
            self.bytes += chain.bytes();
            self.order.push_back(Arc::clone(chain));
        }
        while self.order.len() > MAX_CACHED || self.bytes > MAX_CACHED_BYTES {
            let Some(oldest) = self.order.pop_front() else { return };
            self.verdicts.remove(&oldest.certificates);
            self.bytes -= oldest.bytes();
        }
    }
}

/// Verifies one chain at a time, for the whole process.
#[derive(Debug)]
struct Lane {
    /// The permit to verify.
    turn: Semaphore,
    /// The places of waiting chains.
    queue: Semaphore,
    rest: u32,
}

static SHORT_LANE: Lane = Lane::new(SHORT_QUEUE, 0);
static LONG_LANE: Lane = Lane::new(LONG_QUEUE, REST);

impl Lane {
    const fn new(queue: usize, rest: u32) -> Self {
        Self { turn: Semaphore::const_new(1), queue: Semaphore::const_new(queue), rest }
    }

    fn of(chain: &ClientChain) -> &'static Self {
        if chain.certificates.len() <= SHORT { &SHORT_LANE } else { &LONG_LANE }
    }

    /// Waits for the lane; `None` if its queue is full.
    async fn acquire_slot(&'static self) -> Option<VerificationSlot> {
        let place = self.queue.try_acquire().ok()?;
        let turn = self.turn.acquire().await.ok()?;
        drop(place);
        Some(VerificationSlot { lane: self, _permit: turn, took: Duration::ZERO })
    }
}

/// Waits until a chain may be verified; `None` if the queue is full.
pub async fn acquire_slot(chain: &ClientChain) -> Option<VerificationSlot> {
    Lane::of(chain).acquire_slot().await
}

/// The permission to verify one chain. Dropping it admits the next.
#[derive(Debug)]
pub struct VerificationSlot {
    lane: &'static Lane,
    _permit: SemaphorePermit<'static>,
    took: Duration,
}

impl VerificationSlot {
    /// Verifies a chain on a blocking thread and caches it if it is valid.
    pub async fn verify(&mut self, chain: &Arc<ClientChain>, ca: &Arc<ClientCa>) -> ChainVerdict {
        #[allow(clippy::disallowed_methods)] // below `observe`, which has the wall clock
        let now = seconds(SystemTime::now());
        let started = Instant::now();
        let (job_chain, job_ca) = (Arc::clone(chain), Arc::clone(ca));
        let done = spawn_blocking(move || job_chain.verify(&job_ca, now)).await;
        self.took = started.elapsed();
        let verdict = done.unwrap_or_else(|error| ChainVerdict {
            generation: ca.generation,
            from: now,
            until: now + 1,
            result: Err(format!("its verification failed: {error}")),
        });
        if verdict.result.is_ok() {
            ca.cache().insert(chain, &verdict);
        }
        verdict
    }

    /// Pauses the lane before the next chain.
    pub async fn rest(self) {
        sleep(self.took * self.lane.rest).await;
    }
}

#[cfg(test)]
mod tests;

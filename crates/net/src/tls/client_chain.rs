//! Verifies the certificate chains of clients: with limits, off the worker threads, and with a cache.
//!
//! Path building is the most expensive part of TLS that an unauthenticated client can cause. webpki tries CA
//! certificates with equal names in every order, and gives up after 200,000 steps or 100 signatures (0.1 to
//! 0.3 s for 12 certificates). Therefore:
//!
//! * The handshake refuses a chain of more than [`MAX_CERTIFICATES`] certificates or [`MAX_BYTES`] bytes.
//! * Chains are verified on blocking threads, one at a time in each of two [`VerificationQueue`]s with bounded queues. A
//!   chain of up to two certificates needs no search and never waits for a longer one. After each longer
//!   chain, its queue pauses for [`LONG_PAUSE_FACTOR`] times the duration of the verification, so it uses at
//!   most a fifth of a core.
//! * The sources of the chains take turns in a queue, and no source gets more than half of the free places of
//!   its queue.
//! * A [`ChainVerdict`], valid or not, applies until the validity of a certificate of the chain or of the CA
//!   begins or ends, or the CA changes. The CA caches valid chains, so a client that reconnects does not queue.

mod verification_queue;

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use jackstay_sys::clock;
use jackstay_sys::simulation::run_blocking;
use jackstay_sys::utc::wall_clock;
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::danger::ClientCertVerifier;
use tokio::time::sleep;

use self::verification_queue::{VerificationPermit, VerificationQueue};
use super::ca_bundle::CaBundle;
use super::certificate::{self, X509Error};
use super::pem_files::LoadedCa;
use super::refusal::CertificateRefusal;
use super::tls_error;
use super::verification::CertificateVerifier;

/// Maximum of certificates in a chain: a leaf and five CAs. Usual chains have one to three.
pub const MAX_CERTIFICATES: usize = 6;
/// Maximum of DER bytes in a chain. A usual certificate has 1 to 2 KiB.
pub const MAX_BYTES: usize = 32 << 10;

/// Maximum of certificates in a short chain, which needs no search: a leaf and the CA that signed it.
const MAX_SHORT: usize = 2;
/// Length of the queue of short chains, which take 0.1 to 1 ms each.
const SHORT_QUEUE: usize = 1_024;
/// Length of the queue of longer chains, which take up to 50 ms each, and the pause.
const LONG_QUEUE: usize = 16;
/// Pause of the queue of longer chains, as a multiple of the preceding verification.
const LONG_PAUSE_FACTOR: u32 = 4;
/// Maximum of cached chains of a CA, and of their bytes.
const MAX_CACHED: usize = 1_024;
const MAX_CACHED_BYTES: usize = 2 << 20;

/// Describes, for the log, how a chain exceeds the limits; `None` if it does not.
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

/// A client CA, with the chains that are known to be valid under it.
#[derive(Debug)]
pub struct ClientCa {
    verifier: Arc<dyn ClientCertVerifier>,
    /// The file, unless the CA is not from one.
    bundle: Option<Arc<CaBundle>>,
    /// Seconds since 1970 at which the validity of a CA certificate begins, or has ended.
    changes: Vec<u64>,
    /// Distinguishes this CA from those before it: a verdict under another CA does not apply.
    generation: u64,
    /// Chains that are valid under this CA.
    cache: Mutex<ChainCache>,
}

static NEXT_GENERATION: AtomicU64 = AtomicU64::new(1);

impl ClientCa {
    /// A CA under which `verifier` verifies chains.
    pub fn new(verifier: Arc<dyn ClientCertVerifier>) -> Self {
        let generation = NEXT_GENERATION.fetch_add(1, Ordering::Relaxed);
        Self { verifier, bundle: None, changes: Vec::new(), generation, cache: Mutex::default() }
    }

    /// The CA of a loaded bundle.
    pub(super) fn from_bundle(ca: &LoadedCa) -> Self {
        let validities = ca.roots.validities();
        let changes = validities.flat_map(|(first, last)| [seconds(first), seconds(last) + 1]);
        Self {
            bundle: Some(Arc::clone(&ca.bundle)),
            changes: changes.collect(),
            ..Self::new(CertificateVerifier::new(&ca.roots))
        }
    }

    /// The file of the CA.
    pub fn bundle(&self) -> Option<&Arc<CaBundle>> {
        self.bundle.as_ref()
    }

    /// The verifier of chains, which does not know the limits of this module.
    pub(super) fn verifier(&self) -> Arc<dyn ClientCertVerifier> {
        Arc::clone(&self.verifier)
    }

    /// The cached verdict on a chain that was verified for another connection, if it applies at `now`.
    pub fn cached_verdict(&self, chain: &ClientChain, now: SystemTime) -> Option<ChainVerdict> {
        self.cache().get(chain).filter(|verdict| verdict.applies(self, now))
    }

    fn cache(&self) -> MutexGuard<'_, ChainCache> {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Verifies that a chain, leaf first, is signed by this CA, is valid at `now` and allows client
    /// authentication.
    fn verify(&self, chain: &[CertificateDer<'_>], now: UnixTime) -> Result<(), ChainError> {
        let (leaf, intermediates) = chain.split_first().ok_or(ChainError::Empty)?;
        let verified = self.verifier.verify_client_cert(leaf, intermediates, now);
        verified.map(drop).map_err(ChainError::Refused)
    }
}

/// Why a client chain is not valid.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ChainError {
    /// It has no certificate.
    #[error("no certificate")]
    Empty,
    /// One of its certificates cannot be parsed.
    #[error("certificate {position} of its chain: {error}")]
    Unparsable {
        /// The position in the chain; the leaf is 1.
        position: usize,
        /// Why.
        #[source]
        error: X509Error,
    },
    /// The verifier refuses it.
    #[error("{}", refusal_text(.0))]
    Refused(#[source] rustls::Error),
    /// The verification did not end.
    #[error("its verification failed: {0}")]
    Interrupted(String),
}

/// Describes why the verifier refuses a chain.
fn refusal_text(error: &rustls::Error) -> String {
    match CertificateRefusal::of_error(error) {
        Some(refusal) => refusal.about_it(),
        None => tls_error::describe(error),
    }
}

/// The certificates that a client has presented.
#[derive(Debug)]
pub struct ClientChain {
    /// Leaf first; never empty.
    certificates: Vec<CertificateDer<'static>>,
    /// Seconds since 1970 at which the validity of a certificate begins, or has ended.
    changes: Vec<u64>,
    /// The certificate that cannot be parsed, with the reason.
    parse_error: Option<ChainError>,
}

impl ClientChain {
    /// A chain, leaf first; `None` without a certificate.
    pub fn new(certificates: Vec<CertificateDer<'static>>) -> Option<Self> {
        let (mut changes, mut parse_error) = (Vec::new(), None);
        for (index, certificate) in certificates.iter().enumerate() {
            match certificate::validity(certificate) {
                // The validity includes both seconds (RFC 5280 section 4.1.2.5).
                Ok((first, last)) => changes.extend([seconds(first), seconds(last) + 1]),
                Err(error) => {
                    parse_error = Some(ChainError::Unparsable { position: index + 1, error });
                }
            }
        }
        (!certificates.is_empty()).then_some(Self { certificates, changes, parse_error })
    }

    /// The leaf certificate.
    pub fn leaf(&self) -> &CertificateDer<'static> {
        &self.certificates[0]
    }

    /// The interval around `now` in which the validity of no certificate of the chain or of the CA changes.
    fn stable_interval(&self, ca: &ClientCa, now: u64) -> (u64, u64) {
        let changes = || self.changes.iter().chain(&ca.changes).copied();
        let before = changes().filter(|change| *change <= now).max();
        let after = changes().filter(|change| *change > now).min();
        (before.unwrap_or(0), after.unwrap_or(u64::MAX))
    }

    fn bytes(&self) -> usize {
        self.certificates.iter().map(|certificate| certificate.len()).sum()
    }

    /// Verifies the chain. Takes up to 50 ms.
    fn verify(&self, ca: &ClientCa, now: u64) -> ChainVerdict {
        let (from, until) = self.stable_interval(ca, now);
        let at = UnixTime::since_unix_epoch(Duration::from_secs(now));
        let result = match &self.parse_error {
            Some(error) => Err(error.clone()),
            None => ca.verify(&self.certificates, at),
        };
        ChainVerdict { generation: ca.generation, from, until, result }
    }
}

/// Whether a chain is valid under one CA, for an interval of time.
#[derive(Debug, Clone, PartialEq)]
pub struct ChainVerdict {
    generation: u64,
    from: u64,
    until: u64,
    /// The error says why the chain is not valid.
    pub result: Result<(), ChainError>,
}

impl ChainVerdict {
    /// Whether the verdict applies under this CA at this time.
    pub fn applies(&self, ca: &ClientCa, now: SystemTime) -> bool {
        self.generation == ca.generation && (self.from..self.until).contains(&seconds(now))
    }

    /// The time from which the verdict does not apply any more, unless the CA changes before.
    pub fn until(&self) -> Option<SystemTime> {
        UNIX_EPOCH.checked_add(Duration::from_secs(self.until))
    }
}

fn seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// The valid chains of one CA. When a limit is exceeded, the oldest is dropped.
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

static SHORT_CHAINS: VerificationQueue = VerificationQueue::new(SHORT_QUEUE, 0);
static LONG_CHAINS: VerificationQueue = VerificationQueue::new(LONG_QUEUE, LONG_PAUSE_FACTOR);

impl VerificationQueue {
    fn of(chain: &ClientChain) -> &'static Self {
        if chain.certificates.len() <= MAX_SHORT { &SHORT_CHAINS } else { &LONG_CHAINS }
    }

    async fn acquire_slot(&'static self, source: u128) -> Option<VerificationSlot> {
        let permit = self.acquire(source).await?;
        Some(VerificationSlot { queue: self, _permit: permit, duration: Duration::ZERO })
    }
}

/// Waits until a chain of `source` may be verified; `None` if the source has its share of the queue.
pub async fn acquire_slot(chain: &ClientChain, source: u128) -> Option<VerificationSlot> {
    VerificationQueue::of(chain).acquire_slot(source).await
}

/// The permission to verify one chain. The drop admits the next chain of the queue.
#[derive(Debug)]
pub struct VerificationSlot {
    queue: &'static VerificationQueue,
    _permit: VerificationPermit,
    /// Duration of the verification.
    duration: Duration,
}

impl VerificationSlot {
    /// Verifies a chain on a blocking thread and caches it if it is valid.
    pub async fn verify(&mut self, chain: &Arc<ClientChain>, ca: &Arc<ClientCa>) -> ChainVerdict {
        let now = seconds(wall_clock());
        let started = clock::now();
        let (job_chain, job_ca) = (Arc::clone(chain), Arc::clone(ca));
        let done = run_blocking(move || job_chain.verify(&job_ca, now)).await;
        self.duration = clock::elapsed(started);
        let verdict = done.unwrap_or_else(|error| ChainVerdict {
            generation: ca.generation,
            from: now,
            until: now + 1,
            result: Err(ChainError::Interrupted(error.to_string())),
        });
        if verdict.result.is_ok() {
            ca.cache().insert(chain, &verdict);
        }
        verdict
    }

    /// Delays the next chain of the queue, then drops the slot.
    pub async fn pause(self) {
        sleep(self.duration * self.queue.pause_factor).await;
    }
}

#[cfg(test)]
mod tests;

//! Verifies the certificate chains of clients: within bounds, away from the worker, and each no more
//! often than needed.
//!
//! Path building is the expensive part of TLS that an unproven client can ask for: webpki tries CA
//! certificates of one name in every order, and gives up after 200,000 steps or 100 signatures
//! (0.1 to 0.3 s for 12 certificates). So:
//!
//! * A chain of more than [`MAX_CERTIFICATES`] certificates or [`MAX_BYTES`] never gets here: the
//!   handshake refuses it.
//! * Verification runs on a blocking thread, one chain at a time in each of two [`Lane`]s. A chain of
//!   up to two certificates, which leaves nothing to search, never waits behind a longer one. The lane
//!   of the longer ones rests after each for [`REST`] times what it took, so that they take at most a
//!   fifth of a core, and both have bounded queues.
//! * A [`ChainVerdict`], good or bad, holds until a certificate of the chain begins or ceases to be valid,
//!   or the CA changes. Chains that were found good are also remembered with their CA, so that a client
//!   that connects again does not queue.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustls::Error;
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::danger::ClientCertVerifier;
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::task::spawn_blocking;
use tokio::time::{Instant, sleep};

use super::certificate;

/// Certificates of one chain: a leaf and five CAs. Chains in use have one to three.
pub const MAX_CERTIFICATES: usize = 6;
/// Bytes of one chain in DER. A certificate has 1 to 2 KiB.
pub const MAX_BYTES: usize = 32 << 10;

/// Certificates of a chain that leaves nothing to search: a leaf and the CA that signed it.
const SHORT: usize = 2;
/// Chains that wait in the lane of the short ones: 0.1 to 1 ms each.
const SHORT_QUEUE: usize = 1_024;
/// Chains that wait in the lane of the longer ones: up to 50 ms each, and a rest.
const LONG_QUEUE: usize = 16;
/// The lane of the longer chains rests for so many times what a verification took.
const REST: u32 = 4;
/// Good chains that are remembered, and their bytes.
const KNOWN: usize = 1_024;
const KNOWN_BYTES: usize = 2 << 20;

/// Why a chain is refused by the handshake, for the log; `None` if it is within bounds.
pub fn exceeded_limit(leaf: &CertificateDer<'_>, others: &[CertificateDer<'_>]) -> Option<String> {
    let count = 1 + others.len();
    let bytes = leaf.len() + others.iter().map(|certificate| certificate.len()).sum::<usize>();
    (count > MAX_CERTIFICATES || bytes > MAX_BYTES).then(|| {
        format!(
            "a client certificate chain of {count} certificates and {bytes} bytes is above the bound \
             of {MAX_CERTIFICATES} certificates and {} KiB",
            MAX_BYTES >> 10
        )
    })
}

/// The client CA in force.
pub struct ClientCa {
    verifier: Arc<dyn ClientCertVerifier>,
    /// Grows with every change of the bundle: a proof made under another one is void.
    generation: u64,
    /// Chains that were found good under it.
    known: KnownChains,
}

impl fmt::Debug for ClientCa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClientCa").field("generation", &self.generation).finish_non_exhaustive()
    }
}

static GENERATION: AtomicU64 = AtomicU64::new(1);

impl ClientCa {
    /// A CA that verifies by `verifier`.
    pub fn new(verifier: Arc<dyn ClientCertVerifier>) -> Self {
        let generation = GENERATION.fetch_add(1, Ordering::Relaxed);
        Self { verifier, generation, known: KnownChains::default() }
    }

    /// The verdict on this very chain, if another connection has shown it, it was good, and that holds
    /// at `now`.
    pub fn cached_verdict(&self, chain: &ClientChain, now: SystemTime) -> Option<ChainVerdict> {
        self.known.get(chain).filter(|verdict| verdict.holds(self, now))
    }

    /// Whether a chain, leaf first, ends in this CA, is within its dates at `now` and may be a client.
    /// Takes up to 50 ms.
    ///
    /// # Errors
    /// Why not, in rustls' words.
    fn verify(&self, chain: &[CertificateDer<'_>], now: UnixTime) -> Result<(), String> {
        let (leaf, intermediates) = chain.split_first().ok_or("no certificate")?;
        match self.verifier.verify_client_cert(leaf, intermediates, now) {
            Ok(_) => Ok(()),
            Err(Error::InvalidCertificate(why)) => Err(why.to_string()),
            Err(error) => Err(error.to_string()),
        }
    }
}

/// The certificates that a client has shown.
#[derive(Debug)]
pub struct ClientChain {
    /// Leaf first; never empty.
    certificates: Vec<CertificateDer<'static>>,
    /// Seconds since 1970 at which one of them begins or ceases to be valid.
    steps: Vec<u64>,
    /// One of them cannot be read.
    unreadable: Option<String>,
}

impl ClientChain {
    /// A chain, leaf first; `None` without a certificate.
    pub fn new(certificates: Vec<CertificateDer<'static>>) -> Option<Self> {
        let (mut steps, mut unreadable) = (Vec::new(), None);
        for (at, certificate) in certificates.iter().enumerate() {
            match certificate::validity(certificate) {
                // Both are part of the validity (RFC 5280, section 4.1.2.5).
                Ok((first, last)) => steps.extend([seconds(first), seconds(last) + 1]),
                Err(why) => {
                    unreadable = Some(format!("certificate {} of its chain: {why}", at + 1));
                }
            }
        }
        (!certificates.is_empty()).then_some(Self { certificates, steps, unreadable })
    }

    /// The client's own certificate.
    pub fn leaf(&self) -> &CertificateDer<'static> {
        &self.certificates[0]
    }

    /// The seconds around `now` in which no certificate of the chain begins or ceases to be valid.
    fn span(&self, now: u64) -> (u64, u64) {
        let before = self.steps.iter().copied().filter(|step| *step <= now).max();
        let after = self.steps.iter().copied().filter(|step| *step > now).min();
        (before.unwrap_or(0), after.unwrap_or(u64::MAX))
    }

    fn bytes(&self) -> usize {
        self.certificates.iter().map(|certificate| certificate.len()).sum()
    }

    /// Verifies it; this takes up to 50 ms.
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

/// Whether a chain is valid under one CA, for a span of time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChainVerdict {
    generation: u64,
    from: u64,
    until: u64,
    /// Why it is not valid, if it is not.
    pub result: Result<(), String>,
}

impl ChainVerdict {
    /// Whether it is about this CA and this moment.
    pub fn holds(&self, ca: &ClientCa, now: SystemTime) -> bool {
        self.generation == ca.generation && (self.from..self.until).contains(&seconds(now))
    }

    /// When it ceases to hold, unless the CA changes before.
    pub fn until(&self) -> Option<SystemTime> {
        UNIX_EPOCH.checked_add(Duration::from_secs(self.until))
    }
}

fn seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// Good chains of one CA; oldest out first.
#[derive(Debug, Default)]
struct KnownChains(Mutex<Known>);

#[derive(Debug, Default)]
struct Known {
    verdicts: HashMap<Vec<CertificateDer<'static>>, ChainVerdict>,
    order: VecDeque<Arc<ClientChain>>,
    bytes: usize,
}

impl KnownChains {
    fn get(&self, chain: &ClientChain) -> Option<ChainVerdict> {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.verdicts.get(&chain.certificates).cloned()
    }

    fn remember(&self, chain: &Arc<ClientChain>, verdict: &ChainVerdict) {
        if verdict.result.is_err() {
            return;
        }
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if known.verdicts.insert(chain.certificates.clone(), verdict.clone()).is_none() {
            known.bytes += chain.bytes();
            known.order.push_back(Arc::clone(chain));
        }
        while known.order.len() > KNOWN || known.bytes > KNOWN_BYTES {
            let Some(oldest) = known.order.pop_front() else { return };
            known.verdicts.remove(&oldest.certificates);
            known.bytes -= oldest.bytes();
        }
    }
}

/// Where chains of one kind are verified, one at a time in the whole process.
#[derive(Debug)]
struct Lane {
    permits: Semaphore,
    waiting: AtomicUsize,
    queue: usize,
    rest: u32,
}

static SHORT_LANE: Lane = Lane::new(SHORT_QUEUE, 0);
static LONG_LANE: Lane = Lane::new(LONG_QUEUE, REST);

impl Lane {
    const fn new(queue: usize, rest: u32) -> Self {
        Self { permits: Semaphore::const_new(1), waiting: AtomicUsize::new(0), queue, rest }
    }

    fn of(chain: &ClientChain) -> &'static Self {
        if chain.certificates.len() <= SHORT { &SHORT_LANE } else { &LONG_LANE }
    }

    /// Waits for a turn; `None` if too many wait already.
    async fn acquire_slot(&'static self) -> Option<VerificationSlot> {
        let place = Place::take(self)?;
        let turn = self.permits.acquire().await.ok()?;
        drop(place);
        Some(VerificationSlot { lane: self, _permit: turn, took: Duration::ZERO })
    }
}

/// One place in the queue of a lane.
struct Place(&'static Lane);

impl Place {
    fn take(lane: &'static Lane) -> Option<Self> {
        let place = Self(lane);
        (lane.waiting.fetch_add(1, Ordering::Relaxed) < lane.queue).then_some(place)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Waits until a chain may be verified; `None` if too many wait already.
pub async fn acquire_slot(chain: &ClientChain) -> Option<VerificationSlot> {
    Lane::of(chain).acquire_slot().await
}

/// The right to verify one chain. The next one's turn comes when it is dropped.
#[derive(Debug)]
pub struct VerificationSlot {
    lane: &'static Lane,
    _permit: SemaphorePermit<'static>,
    took: Duration,
}

impl VerificationSlot {
    /// Verifies a chain on a blocking thread, and remembers it if it is good.
    pub async fn verify(&mut self, chain: &Arc<ClientChain>, ca: &Arc<ClientCa>) -> ChainVerdict {
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
        ca.known.remember(chain, &verdict);
        verdict
    }

    /// Lets the lane rest before the next one's turn.
    pub async fn rest(self) {
        sleep(self.took * self.lane.rest).await;
    }
}

#[cfg(test)]
mod tests;

//! The holders of leases: kubelet's heartbeat, and leader election.
//!
//! kubelet renews its lease every 10 s with a timeout of 10 s for each request. A failed update is repeated at once, up
//! to five times, and from the second failure in a row on kubelet closes its connections (component-helpers,
//! `apimachinery/lease/controller.go`). A leader renews its lease every 2 s and has lost it 10 s after the last success;
//! others take a lease that was not renewed for 15 s (client-go, `leaderelection`).

use std::time::{Duration, Instant};

use http::Method;
use serde_json::{Value, json};

use super::objects::{object, token_text};
use super::peer::Peer;
use super::transport::Outgoing;
use super::writer::outcome;
use crate::checker::{ChangeKind, Collection, Recency, Seen, ShownObject, WriteOutcome};
use jackstay_sys::clock;

/// The time between two renewals of kubelet, and its jitter (kubelet, `nodeLeaseRenewIntervalFraction`).
const NODE_INTERVAL: Duration = Duration::from_secs(10);
const NODE_JITTER: f64 = 0.04;
/// Time limit of a request of kubelet.
const NODE_TIMEOUT: Duration = Duration::from_secs(10);
/// Attempts at one renewal (`maxUpdateRetries`).
const ATTEMPTS: u32 = 5;
/// The pause before the lease is read again, which doubles (`maxBackoff`).
const FIRST_BACKOFF: Duration = Duration::from_millis(100);
const MAX_BACKOFF: Duration = Duration::from_secs(7);

const LEASE_DURATION: Duration = Duration::from_secs(15);
const RENEW_DEADLINE: Duration = Duration::from_secs(10);
const RETRY_PERIOD: Duration = Duration::from_secs(2);
/// Jitter of the attempts of a candidate (`JitterFactor`).
const RETRY_JITTER: f64 = 1.2;
/// Time limit of a request of a leader: a half of the deadline (`resourcelock.NewFromKubeconfig`).
const LEADER_TIMEOUT: Duration = Duration::from_secs(5);

/// The result of a request for the lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    Done,
    NotFound,
    Conflict,
    Failed,
    /// The client has to end.
    Stopped,
}

/// The lease of a client.
#[derive(Debug)]
struct Lease {
    peer: Peer,
    collection: Collection,
    name: String,
    holder: String,
    limit: Duration,
    started: Instant,
    /// The version and the UID, and the spec as it was read or written.
    version: Option<u64>,
    uid: Value,
    spec: Value,
    renewed: Option<Instant>,
}

impl Lease {
    fn new(peer: Peer, collection: Collection, name: String, limit: Duration) -> Self {
        let holder = format!("client-{}", peer.id.number);
        let started = clock::now();
        let (version, uid, spec, renewed) = (None, Value::Null, Value::Null, None);
        Self { peer, collection, name, holder, limit, started, version, uid, spec, renewed }
    }

    async fn get(&mut self) -> Outcome {
        let outgoing = Outgoing::get(self.collection.object(&self.name));
        let ended = self.peer.call(&outgoing, self.limit).await;
        let Some(answer) = &ended.answer else { return Outcome::Stopped };
        let Ok(answer) = answer else { return Outcome::Failed };
        let (recency, key) = (Recency::MostRecent, self.collection.key(&self.name));
        match answer.status {
            404 => {
                self.peer.saw(self.collection, &ended, Seen::Object { recency, key, shown: None });
                Outcome::NotFound
            }
            200 => {
                let lease: Value = serde_json::from_slice(&answer.body).unwrap_or_default();
                let metadata = &lease["metadata"];
                let version = metadata["resourceVersion"].as_str();
                let Some(version) = version.and_then(|version| version.parse().ok()) else {
                    self.peer.violation(ended.request, "an unreadable body");
                    return Outcome::Failed;
                };
                let token = metadata["annotations"][super::objects::TOKEN].as_str();
                let token = token.and_then(super::objects::parse_token);
                let shown = Some(ShownObject { version, token });
                self.peer.saw(self.collection, &ended, Seen::Object { recency, key, shown });
                self.version = Some(version);
                self.uid = metadata["uid"].clone();
                self.spec = lease["spec"].clone();
                Outcome::Done
            }
            _ => Outcome::Failed,
        }
    }

    /// Creates or renews the lease.
    async fn write(&mut self, kind: ChangeKind) -> Outcome {
        let token = fastrand::u64(1..);
        let mut lease = object(&self.collection, &self.name, token);
        lease["spec"] = json!({
            "holderIdentity": self.holder,
            "leaseDurationSeconds": LEASE_DURATION.as_secs(),
            "renewTime": micro_time(clock::now() - self.started),
        });
        let spec = lease["spec"].clone();
        let outgoing = if kind == ChangeKind::Added {
            Outgoing::json(Method::POST, self.collection.path(), &lease)
        } else {
            let version = self.version.unwrap_or_default().to_string();
            lease["metadata"]["resourceVersion"] = version.into();
            lease["metadata"]["uid"] = self.uid.clone();
            Outgoing::json(Method::PUT, self.collection.object(&self.name), &lease)
        };
        let outgoing = outgoing.audit_id(&token_text(token));
        let ended = self.peer.call(&outgoing, self.limit).await;
        let outcome = outcome(&ended);
        let key = self.collection.key(&self.name);
        self.peer.saw(self.collection, &ended, Seen::Write { key, kind, token, outcome });
        match (outcome, ended.status()) {
            (WriteOutcome::Done(version), _) => {
                self.version = version.or(self.version);
                if let Some(Ok(answer)) = &ended.answer {
                    let written: Value = serde_json::from_slice(&answer.body).unwrap_or_default();
                    self.uid = written["metadata"]["uid"].clone();
                }
                self.spec = spec;
                self.succeeded();
                Outcome::Done
            }
            (_, Some(409)) => Outcome::Conflict,
            (_, Some(404)) => Outcome::NotFound,
            _ if ended.answer.is_none() => Outcome::Stopped,
            _ => Outcome::Failed,
        }
    }

    fn succeeded(&mut self) {
        let now = clock::now();
        if let Some(before) = self.renewed.replace(now) {
            self.peer.observer.findings().lease_renewed(now - before);
        }
    }

    fn failed(&self) {
        self.peer.observer.findings().lease_failed();
    }

    /// Reads the lease, or creates it, until that succeeds (`backoffEnsureLease`). Returns whether it was created, `None`
    /// if the client has to end.
    async fn ensure(&mut self) -> Option<bool> {
        let mut pause = FIRST_BACKOFF;
        loop {
            let outcome = match self.get().await {
                Outcome::Done => return Some(false),
                Outcome::NotFound => self.write(ChangeKind::Added).await,
                outcome => outcome,
            };
            match outcome {
                Outcome::Done => return Some(true),
                Outcome::Stopped => return None,
                // Another client has created it.
                Outcome::Conflict => {}
                Outcome::NotFound | Outcome::Failed => self.failed(),
            }
            if !self.peer.pause(pause).await {
                return None;
            }
            pause = (pause * 2).min(MAX_BACKOFF);
        }
    }

    /// Renews the lease, at most [`ATTEMPTS`] times (`retryUpdateLease`). Returns whether it was renewed, `None` if the
    /// client has to end.
    async fn update(&mut self) -> Option<bool> {
        for attempt in 0..ATTEMPTS {
            match self.write(ChangeKind::Modified).await {
                Outcome::Done => return Some(true),
                Outcome::Stopped => return None,
                Outcome::Conflict => {
                    if self.ensure().await? {
                        return Some(true);
                    }
                }
                Outcome::NotFound | Outcome::Failed => {
                    self.failed();
                    if attempt > 0 {
                        self.peer.client.close_connections();
                    }
                }
            }
        }
        Some(false)
    }

    /// One round of kubelet (`sync`). `None` if the client has to end.
    async fn sync(&mut self) -> Option<()> {
        if self.version.is_some() && self.update().await? {
            return Some(());
        }
        if !self.ensure().await? {
            self.update().await?;
        }
        Some(())
    }

    fn finish(&self) {
        if let Some(renewed) = self.renewed {
            self.peer.observer.findings().lease_open(clock::now() - renewed);
        }
        self.peer.ended();
    }
}

/// kubelet: holds the lease of a node until the client is stopped.
pub async fn run_kubelet(peer: Peer, collection: Collection, name: String) {
    peer.pause_part(Duration::from_secs(1)).await;
    let mut lease = Lease::new(peer.clone(), collection, name, NODE_TIMEOUT);
    while lease.sync().await.is_some() {
        let pause = NODE_INTERVAL.mul_f64(1.0 + NODE_JITTER * fastrand::f64());
        if !peer.pause(pause).await {
            break;
        }
    }
    lease.finish();
}

/// A candidate that becomes the leader if no other one holds the lease, until the client is stopped.
pub async fn run_leader(peer: Peer, collection: Collection, name: String) {
    peer.pause_part(Duration::from_secs(1)).await;
    let lease = Lease::new(peer, collection, name, LEADER_TIMEOUT);
    let mut election = Election { lease, observed: (Value::Null, None) };
    while election.acquire().await.is_some() && election.renew().await.is_some() {
        election.lease.peer.observer.findings().leaders_lost += 1;
        election.lease.peer.log(|| "leadership lost".to_owned());
    }
    election.lease.finish();
}

#[derive(Debug)]
struct Election {
    lease: Lease,
    /// The spec of the lease, and when it was first seen.
    observed: (Value, Option<Instant>),
}

impl Election {
    fn is_leader(&self) -> bool {
        self.lease.spec["holderIdentity"] == *self.lease.holder
    }

    fn observe(&mut self) {
        if self.observed.0 != self.lease.spec {
            self.observed = (self.lease.spec.clone(), Some(clock::now()));
        }
    }

    /// Whether another holder has renewed the lease within its duration.
    fn is_held(&self) -> bool {
        let is_recent = |seen| clock::now() < seen + LEASE_DURATION;
        !self.is_leader() && self.observed.1.is_some_and(is_recent)
    }

    /// One attempt (`tryAcquireOrRenew`). `None` if the client has to end.
    async fn attempt(&mut self) -> Option<bool> {
        // The fast path: a leader updates what it has written last.
        if self.is_leader() && self.lease.version.is_some() {
            match self.lease.write(ChangeKind::Modified).await {
                Outcome::Done => return Some(true),
                Outcome::Stopped => return None,
                Outcome::Conflict => {}
                Outcome::NotFound | Outcome::Failed => self.lease.failed(),
            }
        }
        let outcome = match self.lease.get().await {
            Outcome::NotFound => self.lease.write(ChangeKind::Added).await,
            Outcome::Done => {
                self.observe();
                if self.is_held() {
                    return Some(false);
                }
                self.lease.write(ChangeKind::Modified).await
            }
            outcome => outcome,
        };
        match outcome {
            Outcome::Stopped => return None,
            Outcome::Failed => self.lease.failed(),
            Outcome::Done => self.observe(),
            _ => {}
        }
        Some(outcome == Outcome::Done)
    }

    /// Tries to become the leader. `None` if the client has to end.
    async fn acquire(&mut self) -> Option<()> {
        while !self.attempt().await? {
            let pause = RETRY_PERIOD.mul_f64(1.0 + RETRY_JITTER * fastrand::f64());
            if !self.lease.peer.pause(pause).await {
                return None;
            }
        }
        Some(())
    }

    /// Renews the lease. Returns when it was not renewed for [`RENEW_DEADLINE`]; `None` if the client has to end.
    async fn renew(&mut self) -> Option<()> {
        loop {
            if !self.lease.peer.pause(RETRY_PERIOD).await {
                return None;
            }
            let renewed = async {
                while !self.attempt().await? {
                    if !self.lease.peer.pause(RETRY_PERIOD).await {
                        return None;
                    }
                }
                Some(())
            };
            match tokio::time::timeout(RENEW_DEADLINE, renewed).await {
                Ok(Some(())) => {}
                Ok(None) => return None,
                Err(_) => return Some(()),
            }
        }
    }
}

/// A time as Lease has it, of constant length.
fn micro_time(since_start: Duration) -> String {
    let seconds = since_start.as_secs();
    let (days, hours) = (1 + seconds / 86_400, seconds / 3_600 % 24);
    let (minutes, seconds) = (seconds / 60 % 60, seconds % 60);
    let micros = since_start.subsec_micros();
    format!("2026-01-{days:02}T{hours:02}:{minutes:02}:{seconds:02}.{micros:06}Z")
}

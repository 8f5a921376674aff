//! The apiservers behind one address: a load balancer, a virtual IP address, or a name that leads to one.
//!
//! A connection to such an address reaches one of them, its *backend*. jackstay opens a few connections (a *survey*), reads
//! which apiserver each has reached, and then treats each backend as an endpoint of its own: its connections are those that have reached it.
//!
//! # Which backend a connection has reached
//!
//! | feature | differs between backends if | needs |
//! |---|---|---|
//! | serving certificate | each apiserver has its own, as with kubeadm | nothing |
//! | `serverAddressByClientCIDRs` of `/api` | each advertises its own address: `--external-hostname` is not set (`k8s.io/apiserver/pkg/endpoints/discovery/legacy.go`) | a credential |
//!
//! The certificate is preferred, because it also distinguishes connections without a credential, unless one was shown by
//! two advertised addresses. TLS sessions and audit IDs name no process.
//!
//! A name that both have had is that of one apiserver: a renewed certificate makes another backend of the same name.
//!
//! Backends that differ in neither are [indistinct](BackendId::Indistinct). If the address is configured as a balancer, each
//! connection is then judged by its own `/readyz`, and the endpoints are sets of such connections. Otherwise the address is
//! one endpoint, as without this module.
//!
//! # Which backends are endpoints
//!
//! A backend is *present* if the last survey has found it.
//!
//! | situation | change |
//! |---|---|
//! | fewer than two backends are present, and none is an endpoint | none: the address is one endpoint |
//! | each connection shows something else | no backend is an endpoint any more |
//! | fewer than [`WANTED`] backends are endpoints, another one is present | that one becomes an endpoint |
//! | fewer than [`WANTED`] of the endpoints serve, one has failed for [`REPLACE_AFTER`], there are fewer than [`MOST`], and a survey has found another backend since | that one becomes an endpoint |
//! | the same, and no survey has begun since, or it has found none | a survey |
//! | an endpoint has failed for [`REMOVE_AFTER`], and [`WANTED`] others serve, or a later survey has not found it, or there are [`MOST`] and another one is present | it is no endpoint any more |
//! | a backend of its name is present, and it is not | the same: its certificate was renewed, and no new connection would reach it |
//! | backends are recognised by another feature now | the same |
//! | more than [`WANTED`] have served for [`SURPLUS_AFTER`] | the one that was added last is no endpoint any more |
//!
//! So a node has connections to two backends, and to a third one only while one of them fails, and for a minute afterwards.
//! While none of them serves, the whole address is an endpoint, too ([`keeps_whole`]).
//!
//! A backend that an older survey has found may have another certificate by now, so that no connection would reach it.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::mem;
use std::time::{Duration, Instant};

use serde::{Serialize, Serializer};

use crate::backoff::Backoff;

/// Maximum number of addresses of an upstream that are examined unless it is configured as a balancer. With more of them,
/// each is probably one apiserver.
pub const MAX_ADDRESSES: usize = 2;
/// Number of backends that are endpoints.
pub const WANTED: usize = 2;
/// Maximum number of backends that are endpoints at a time.
pub const MOST: usize = 3;
/// How long a backend has failed before another one is looked for.
pub const REPLACE_AFTER: Duration = Duration::from_secs(1);
/// How long a backend has served before the whole address is no endpoint any more.
pub const WHOLE_AFTER: Duration = Duration::from_secs(1);
/// How long a backend has failed before it is given up for another one.
pub const REMOVE_AFTER: Duration = Duration::from_secs(10);
/// How long more backends than are wanted have served before one is given up.
pub const SURPLUS_AFTER: Duration = Duration::from_secs(60);
/// Connections of one survey. With three backends at random, all surveys but one in 243 find a second one.
pub const SURVEY: usize = 6;
/// Connects to one backend in a row that may reach others. Of three at random, one in six hundred is not reached.
pub const MAX_TRIES: usize = 16;
/// How long a backend counts that no survey has found.
const MEMORY: Duration = Duration::from_secs(3600);
/// Number of backends that are remembered. An address with more is one at which each connection shows something else.
const MAX_BACKENDS: usize = 16;

/// A hash of a serving certificate in DER, which distinguishes the apiservers behind one address.
pub fn certificate_hash(der: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    der.hash(&mut hasher);
    hasher.finish()
}

/// What a connection has shown of its backend.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ObservedBackend {
    /// The [`certificate_hash`] of the serving certificate; 0 if none was shown.
    pub certificate: u64,
    /// The address that the apiserver advertises in `/api`; `None` if it was not read.
    pub address: Option<Box<str>>,
}

/// The feature by which a backend is recognised.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum BackendId {
    /// The hash of its serving certificate.
    Certificate(u64),
    /// The address that it advertises.
    Address(Box<str>),
    /// Nothing: any apiserver of the address, in one of several sets of connections.
    Indistinct(u8),
}

impl BackendId {
    /// Whether a connection that has shown this has reached the backend; `None` if that is not known.
    pub fn is(&self, observed: &ObservedBackend) -> Option<bool> {
        match self {
            Self::Certificate(certificate) => Some(*certificate == observed.certificate),
            Self::Address(address) => Some(*address == *observed.address.as_ref()?),
            Self::Indistinct(_) => Some(true),
        }
    }

    /// Whether backends are recognised by the same feature.
    fn is_like(&self, other: &Self) -> bool {
        mem::discriminant(self) == mem::discriminant(other)
    }
}

/// A backend of an address.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Backend {
    /// How it is recognised.
    pub id: BackendId,
    /// Its name for people: the address that it advertises, or a part of the hash.
    pub name: Box<str>,
}

impl Backend {
    /// A set of connections to apiservers that cannot be told apart.
    fn indistinct(number: u8) -> Self {
        Self { id: BackendId::Indistinct(number), name: format!("any-{number}").into() }
    }

    /// Whether its connections may reach different apiservers.
    pub fn is_indistinct(&self) -> bool {
        matches!(self.id, BackendId::Indistinct(_))
    }
}

/// The backends of one address that surveys have found.
#[derive(Debug, Default)]
pub struct KnownBackends {
    /// What was observed, and when last.
    observed: Vec<(ObservedBackend, Instant)>,
    /// When the last survey has begun.
    surveyed_at: Option<Instant>,
    /// When a survey has last found several that can be told apart.
    several_at: Option<Instant>,
    /// The address is configured as a balancer.
    is_balancer: bool,
}

/// What the backends of an address are, for status and log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// No connection was observed yet.
    Unknown,
    /// All connections have reached one apiserver, or some that cannot be told apart.
    One,
    /// They have reached this number of apiservers.
    Several(usize),
    /// There may be several by the configuration, which cannot be told apart.
    Indistinct,
    /// Each connection shows something else, so that backends cannot be recognised.
    Unreliable,
}

impl Kind {
    /// Name in `/status` and in the report of `doctor`.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Unknown => "unknown",
            Self::One => "apiserver",
            Self::Several(_) => "balancer",
            Self::Indistinct => "indistinct",
            Self::Unreliable => "unreliable",
        }
    }

    /// Whether connections to the address are known to reach different apiservers.
    pub const fn is_several(self) -> bool {
        matches!(self, Self::Several(_) | Self::Indistinct | Self::Unreliable)
    }
}

impl Serialize for Kind {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

impl KnownBackends {
    /// Sets whether the address is configured as a balancer, behind which several apiservers are expected.
    pub fn expect_several(&mut self, is_balancer: bool) {
        self.is_balancer = is_balancer;
    }

    /// A survey begins.
    pub fn begin_survey(&mut self, now: Instant) {
        self.observed.retain(|(_, last)| now < *last + MEMORY);
        self.several_at = self.several_at.filter(|at| now < *at + MEMORY);
        self.surveyed_at = Some(now);
    }

    /// A connection of the survey has shown this.
    pub fn observe(&mut self, observed: ObservedBackend, now: Instant) {
        self.record(observed, now);
        if self.recognised().len() > 1 {
            self.several_at = Some(now);
        }
    }

    fn record(&mut self, observed: ObservedBackend, now: Instant) {
        // One that has not answered shows less of the same backend.
        let is_same = |known: &ObservedBackend| {
            known.certificate == observed.certificate
                && (known.address == observed.address || known.address.is_none())
        };
        if let Some(known) = self.observed.iter_mut().find(|(known, _)| is_same(known)) {
            *known = (observed, now);
            return;
        }
        if observed.address.is_none() {
            let is_same = |known: &ObservedBackend| known.certificate == observed.certificate;
            let mut same = self.observed.iter_mut().filter(|(known, _)| is_same(known));
            match (same.next(), same.next()) {
                (Some(_), Some(_)) => return,
                (Some((_, last)), None) => {
                    *last = now;
                    return;
                }
                (None, _) => {}
            }
        }
        if self.observed.len() == MAX_BACKENDS {
            let oldest = (0..MAX_BACKENDS).min_by_key(|index| self.observed[*index].1);
            self.observed.swap_remove(oldest.unwrap_or_default());
        }
        self.observed.push((observed, now));
    }

    /// What the backends are, by the last survey.
    pub fn kind(&self) -> Kind {
        let present = self.present();
        match present.len() {
            _ if present.iter().any(Backend::is_indistinct) => Kind::Indistinct,
            _ if self.is_unreliable() => Kind::Unreliable,
            0 => Kind::Unknown,
            1 => Kind::One,
            several => Kind::Several(several),
        }
    }

    /// The backends that the last survey has found, in the order in which they were found. One, if they cannot be told
    /// apart, or [`MOST`] indistinct ones behind a balancer.
    pub fn present(&self) -> Vec<Backend> {
        let recognised = self.recognised();
        let is_indistinct =
            self.is_unreliable() || recognised.len() == 1 && self.several_at.is_none();
        if self.is_balancer && is_indistinct {
            return (1..).map(Backend::indistinct).take(MOST).collect();
        }
        recognised
    }

    /// The backends that the last survey has found, by what they have shown.
    fn recognised(&self) -> Vec<Backend> {
        let found = || {
            let since = self.surveyed_at;
            let found =
                self.observed.iter().filter(move |(_, at)| since.is_some_and(|since| *at >= since));
            found.map(|(observed, _)| observed)
        };
        let is_shared = self.shares_certificate();
        let names_one = |observed: &ObservedBackend| {
            is_shared
                || found().all(|other| {
                    other.address != observed.address || other.certificate == observed.certificate
                })
        };
        let mut backends: Vec<Backend> = Vec::new();
        for observed in found() {
            let id = match &observed.address {
                _ if !is_shared => BackendId::Certificate(observed.certificate),
                Some(address) => BackendId::Address(address.clone()),
                None => continue,
            };
            if backends.iter().any(|backend| backend.id == id) {
                continue;
            }
            let hash = || format!("certificate-{:08x}", observed.certificate >> 32).into();
            let address = observed.address.clone().filter(|_| names_one(observed));
            backends.push(Backend { id, name: address.unwrap_or_else(hash) });
        }
        backends
    }

    /// Whether one certificate was shown with two addresses.
    fn shares_certificate(&self) -> bool {
        let shown = || self.observed.iter().filter(|(observed, _)| observed.address.is_some());
        shown().any(|(one, _)| {
            shown().any(|(other, _)| {
                one.certificate == other.certificate && one.address != other.address
            })
        })
    }

    fn is_unreliable(&self) -> bool {
        self.observed.len() == MAX_BACKENDS
    }

    /// Whether a survey that has begun after this time has not found the backend.
    fn is_gone(&self, backend: &Backend, since: Instant) -> bool {
        self.surveyed_at.is_some_and(|at| at > since)
            && !self.present().iter().any(|present| present.id == backend.id)
    }
}

/// A backend that is an endpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    /// The backend.
    pub backend: Backend,
    /// Whether its endpoint serves.
    pub condition: MemberCondition,
}

/// Whether the endpoint of a backend serves, and since when.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemberCondition {
    /// It is ready.
    Serves(Instant),
    /// It is not.
    Fails(Instant),
}

impl Member {
    /// Whether its endpoint serves.
    pub fn serves(&self) -> bool {
        matches!(self.condition, MemberCondition::Serves(_))
    }

    fn serves_for(&self, least: Duration, now: Instant) -> bool {
        matches!(self.condition, MemberCondition::Serves(since) if now >= since + least)
    }

    /// Since when it fails, if it has for this time.
    fn failed_for(&self, least: Duration, now: Instant) -> Option<Instant> {
        match self.condition {
            MemberCondition::Fails(since) if now >= since + least => Some(since),
            _ => None,
        }
    }
}

/// A change of the endpoints of an address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MemberChange {
    /// The backend becomes an endpoint.
    Add(Backend),
    /// Another backend is looked for.
    Survey,
    /// The backend is no endpoint any more.
    Remove(Backend),
}

/// The next change, by the table of the module; `None` if there is none. `members`: in the order in which they were added.
pub fn next_change(
    known: &KnownBackends,
    members: &[Member],
    now: Instant,
) -> Option<MemberChange> {
    let remove = |member: &Member| Some(MemberChange::Remove(member.backend.clone()));
    let present = known.present();
    if known.kind() == Kind::Unreliable {
        return members.first().and_then(remove);
    }
    if present.len() < 2 && members.is_empty() {
        return None;
    }
    let is_member = |backend: &&Backend| {
        members
            .iter()
            .any(|member| member.backend.id == backend.id || member.backend.name == backend.name)
    };
    let other = present.iter().find(|backend| !is_member(backend));
    let serving = members.iter().filter(|member| member.serves()).count();
    let is_replaced = |member: &&Member| {
        let Backend { id, name } = &member.backend;
        let has_name = present.iter().any(|other| other.name == *name);
        let is_unlike = !present.is_empty() && !present.iter().any(|other| other.id.is_like(id));
        is_unlike || has_name && present.iter().all(|other| other.id != *id)
    };
    let is_given_up = |member: &&Member| {
        let failed = member.failed_for(REMOVE_AFTER, now);
        let is_full = members.len() == MOST && other.is_some();
        failed.is_some_and(|since| {
            serving >= WANTED || is_full || known.is_gone(&member.backend, since)
        })
    };
    if let Some(old) = members.iter().find(|member| is_replaced(member) || is_given_up(member)) {
        return remove(old);
    }
    let is_missing = members.len() < WANTED
        || serving < WANTED
            && members.len() < MOST
            && members.iter().any(|member| member.failed_for(REPLACE_AFTER, now).is_some());
    let failed = |member: &Member| member.failed_for(REPLACE_AFTER, now);
    let is_outdated = |since| known.surveyed_at.is_none_or(|at| at < since);
    if is_missing && members.iter().filter_map(failed).any(is_outdated) {
        return Some(MemberChange::Survey);
    }
    if is_missing {
        return Some(other.map_or(MemberChange::Survey, |other| MemberChange::Add(other.clone())));
    }
    let is_surplus = members.len() > WANTED
        && members.iter().all(|member| member.serves_for(SURPLUS_AFTER, now));
    if is_surplus {
        return members.last().and_then(remove);
    }
    // A backend that fails and may be gone is looked for.
    let fails = members.iter().any(|member| member.failed_for(REMOVE_AFTER, now).is_some());
    fails.then_some(MemberChange::Survey)
}

/// Whether the whole address is an endpoint besides these members: while none of them serves, and until one has for
/// [`WHOLE_AFTER`]. `is_whole`: whether it is one now.
pub fn keeps_whole(is_whole: bool, members: &[Member], now: Instant) -> bool {
    let is_served = members.iter().any(|member| member.serves_for(WHOLE_AFTER, now));
    !is_served && (is_whole || !members.iter().any(Member::serves))
}

/// The connects to an address that may reach others than the wanted backend: a burst, and then one in an interval. A backend that
/// is gone would otherwise cost [`MAX_TRIES`] TLS handshakes with each attempt, of each class and node.
#[derive(Debug)]
pub struct SearchBudget {
    full_at: Option<Instant>,
}

/// Connects that may follow each other at once.
const SEARCH_BURST: u32 = 24;
/// Interval of further ones.
const SEARCH_INTERVAL: Duration = Duration::from_secs(1);

impl SearchBudget {
    /// A full budget.
    pub const fn new() -> Self {
        Self { full_at: None }
    }

    /// Takes a connect. Returns false if none is left.
    pub fn take(&mut self, now: Instant) -> bool {
        let full_at = self.full_at.map_or(now, |at| at.max(now)) + SEARCH_INTERVAL;
        let is_left = full_at <= now + SEARCH_INTERVAL * SEARCH_BURST;
        if is_left {
            self.full_at = Some(full_at);
        }
        is_left
    }
}

impl Default for SearchBudget {
    fn default() -> Self {
        Self::new()
    }
}

/// When the connections of indistinct backends are all probed because the probe of one fails: at most once in a pause that
/// grows while failures go on. Apiservers that are slow for everybody are not asked more and more often.
#[derive(Debug, Default)]
pub struct ProbeRounds {
    last: Option<Instant>,
    in_row: u32,
}

/// The pauses between the rounds. Not shorter than it takes until the connections have left an apiserver.
const ROUND_PAUSE: Backoff = Backoff::new(Duration::from_secs(2), Duration::from_secs(60));

impl ProbeRounds {
    /// Whether a round begins now.
    pub fn begin(&mut self, now: Instant) -> bool {
        let since = |last| now.saturating_duration_since(last);
        if self.last.is_some_and(|last| since(last) < ROUND_PAUSE.after(self.in_row).pause()) {
            return false;
        }
        let is_new =
            self.last.is_none_or(|last| since(last) >= 2 * ROUND_PAUSE.after(self.in_row).pause());
        self.in_row = if is_new { 1 } else { self.in_row.saturating_add(1) };
        self.last = Some(now);
        true
    }
}

/// The address in the body of `/api`, at which the apiserver says that it is reached.
pub fn advertised_address(body: &[u8]) -> Option<Box<str>> {
    let versions: serde_json::Value = serde_json::from_slice(body).ok()?;
    let address = versions["serverAddressByClientCIDRs"][0]["serverAddress"].as_str()?;
    let is_valid = |byte: u8| byte.is_ascii_alphanumeric() || b".:-_[]%".contains(&byte);
    (1..=MAX_ADDRESS).contains(&address.len()).then_some(())?;
    address.bytes().all(is_valid).then(|| address.into())
}

/// Maximum length of an address, in bytes: a DNS name and a port.
const MAX_ADDRESS: usize = 260;

#[cfg(test)]
mod tests;

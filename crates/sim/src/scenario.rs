//! A scenario: its clients and apiservers, the faults, and the promises.
//!
//! ```
//! use std::time::Duration;
//! use jackstay_sim::scenario::{Role, Sim};
//!
//! let second = Duration::from_secs(1);
//! let sim = Sim::seed(7).endpoints(3).clients(Role::Readers, 4).blackhole(0).at(5 * second);
//! assert_eq!(sim.roles().count(), 4);
//! ```

use std::ops::Range;
use std::time::Duration;

use jackstay_config::Config;

use crate::balancer::Balancer;
use crate::credential::Credential;
use crate::faults::{Fault, FaultKind, random_fault};
use crate::invariants::Promises;

/// What clients do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Each reads ten times a second, by turns config maps, which the writers change, and pods.
    Readers,
    /// Each reads config maps ten times a second, and names the versions that it has seen.
    VersionReaders,
    /// Each writes five times a second.
    Writers,
    /// Informers, by turns of config maps, which the writers change, and of pods, which stay as they are.
    Informers,
    /// kubelets: a lease each.
    Kubelets,
    /// Leaders: a lease each.
    Leaders,
    /// Clients that list a large collection again and again, by turns in pages, whole, and whole and slowly.
    Bulk,
    /// Each reads objects of the aggregated group ten times a second.
    GroupReaders,
    /// Each writes objects of the aggregated group five times a second.
    GroupWriters,
    /// Informers of the aggregated group.
    GroupInformers,
    /// Informers of config maps that list by watches.
    WatchLists,
    /// Informers of config maps whose watches end after three to six seconds.
    ShortWatches,
    /// Clients that write an object of 280 to 600 KB again and again, and abandon every third upload.
    Uploaders,
    /// Hostile clients: 200 requests at once, twice a second, of which half are cancelled.
    Hostile,
}

/// The time between two bookmarks of a watch (apiserver, `storage/cacher/cacher.go`, `defaultBookmarkFrequency`).
const BOOKMARK_INTERVAL: Duration = Duration::from_secs(60);

/// A scenario.
#[derive(Debug, Clone)]
pub struct Sim {
    pub(crate) seed: u64,
    pub(crate) endpoints: usize,
    /// The number of apiservers of each cluster; empty for one cluster.
    clusters: Vec<usize>,
    /// The promises of the clusters after the first one.
    pub(crate) other_promises: Promises,
    pub(crate) nodes: usize,
    pub(crate) balancer: Option<Balancer>,
    clients: Vec<(Role, usize)>,
    pub(crate) faults: Vec<Fault>,
    pub(crate) ping_interval: Duration,
    pub(crate) max_connections: usize,
    pub(crate) max_streams: usize,
    pub(crate) link: Option<(Duration, Duration)>,
    pub(crate) rate: u64,
    pub(crate) drain_timeout: Duration,
    pub(crate) bookmark_interval: Duration,
    pub(crate) is_compressed: bool,
    /// Changes the rest of the configuration.
    pub(crate) change: fn(&mut Config),
    credentials: Vec<Credential>,
    pub(crate) has_identities: bool,
    pub(crate) has_identity_lane: bool,
}

impl Sim {
    /// A scenario without clients and faults, on one node with three apiservers.
    pub fn seed(seed: u64) -> Self {
        Self {
            seed,
            endpoints: 3,
            clusters: Vec::new(),
            other_promises: Promises::default(),
            nodes: 1,
            balancer: None,
            clients: Vec::new(),
            faults: Vec::new(),
            ping_interval: Duration::from_secs(1),
            max_connections: 4,
            max_streams: 100,
            link: None,
            rate: 0,
            drain_timeout: Duration::from_secs(6),
            bookmark_interval: BOOKMARK_INTERVAL,
            is_compressed: false,
            change: |_| {},
            credentials: vec![Credential::Certificate],
            has_identities: true,
            has_identity_lane: true,
        }
    }

    /// The number of apiservers.
    #[must_use]
    pub fn endpoints(mut self, count: usize) -> Self {
        self.endpoints = count;
        self
    }

    /// The apiservers are those of several clusters, of which each has this many, a store and all clients of its own.
    /// The nodes have an upstream and a listener for each. The first cluster has the promises of the scenario, and each
    /// of the others has these.
    #[must_use]
    pub fn clusters(mut self, apiservers: &[usize], others: Promises) -> Self {
        self.clusters = apiservers.to_vec();
        self.endpoints = apiservers.iter().sum();
        self.other_promises = others;
        self
    }

    /// Whether requests share one stream of one connection to one apiserver, which has no fault.
    pub(crate) fn has_one_stream(&self) -> bool {
        (self.endpoints, self.max_connections, self.max_streams) == (1, 1, 1)
            && self.faults.is_empty()
    }

    /// The apiservers of each cluster.
    pub(crate) fn apiservers(&self) -> Vec<Range<usize>> {
        let counts =
            if self.clusters.is_empty() { vec![self.endpoints] } else { self.clusters.clone() };
        let ends = counts.iter().scan(0, |end, count| {
            *end += count;
            Some(*end)
        });
        ends.zip(&counts).map(|(end, count)| end - count..end).collect()
    }

    /// The upstream of the nodes has one address, that of a load balancer in front of all apiservers.
    #[must_use]
    pub fn behind(mut self, balancer: Balancer) -> Self {
        self.balancer = Some(balancer);
        self
    }

    /// The number of nodes. Each has all clients of each cluster.
    #[must_use]
    pub fn nodes(mut self, count: usize) -> Self {
        self.nodes = count;
        self
    }

    /// Adds clients.
    #[must_use]
    pub fn clients(mut self, role: Role, count: usize) -> Self {
        self.clients.push((role, count));
        self
    }

    /// `SETTINGS_MAX_CONCURRENT_STREAMS` of the apiservers.
    #[must_use]
    pub fn max_streams(mut self, count: usize) -> Self {
        self.max_streams = count;
        self
    }

    /// `connections.max` of the nodes.
    #[must_use]
    pub fn max_connections(mut self, count: usize) -> Self {
        self.max_connections = count;
        self
    }

    /// Latency and jitter between hosts, in one direction.
    #[must_use]
    pub fn latency(mut self, latency: Duration, jitter: Duration) -> Self {
        self.link = Some((latency, jitter));
        self
    }

    /// Bytes a second between two hosts, in one direction; without a limit by default.
    #[must_use]
    pub fn rate(mut self, rate: u64) -> Self {
        self.rate = rate;
        self
    }

    /// The clients have these credentials by turns, in place of the certificate of their node.
    #[must_use]
    pub fn credentials(mut self, credentials: &[Credential]) -> Self {
        self.credentials = credentials.to_vec();
        self
    }

    /// Sets `shutdown.drain_timeout`: how long requests go on when jackstay ends, or their upstream is replaced.
    #[must_use]
    pub fn drain_timeout(mut self, timeout: Duration) -> Self {
        self.drain_timeout = timeout;
        self
    }

    /// The time between two bookmarks of a watch, a minute by default. A run of a few seconds has none then.
    #[must_use]
    pub fn bookmark_interval(mut self, interval: Duration) -> Self {
        self.bookmark_interval = interval;
        self
    }

    /// The apiservers compress large responses. Of three clients, two accept them, and one says nothing of it.
    #[must_use]
    pub fn compressed(mut self) -> Self {
        self.is_compressed = true;
        self
    }

    /// Changes the configuration of jackstay.
    #[must_use]
    pub fn configured(mut self, change: fn(&mut Config)) -> Self {
        self.change = change;
        self
    }

    /// jackstay has no certificate (`identities`), so it probes without a credential, and every client has a token.
    #[must_use]
    pub fn without_identities(mut self) -> Self {
        self.has_identities = false;
        self
    }

    /// The workers serve the clients with a certificate themselves (`identity_lane: false`).
    #[must_use]
    pub fn without_identity_lane(mut self) -> Self {
        self.has_identity_lane = false;
        self
    }

    /// The credential of a client, by its number on its node.
    pub(crate) fn credential_of(&self, at: usize) -> Credential {
        let turns = self.credentials.len().max(1);
        self.credentials.get(at % turns).copied().unwrap_or(Credential::Certificate)
    }

    /// Adds a fault of a server, from the beginning; see [`Self::at`].
    #[must_use]
    pub fn fault(mut self, server: usize, kind: FaultKind) -> Self {
        self.faults.push(Fault { kind, server, at: Duration::ZERO, until: None });
        self
    }

    /// All packets to and from a server are dropped.
    #[must_use]
    pub fn blackhole(self, server: usize) -> Self {
        self.fault(server, FaultKind::Blackhole)
    }

    /// The last fault begins at this time.
    #[must_use]
    pub fn at(mut self, at: Duration) -> Self {
        if let Some(fault) = self.faults.last_mut() {
            fault.at = at;
        }
        self
    }

    /// The last fault ends at this time.
    #[must_use]
    pub fn until(mut self, until: Duration) -> Self {
        if let Some(fault) = self.faults.last_mut() {
            fault.until = Some(until);
        }
        self
    }

    /// Adds random faults in a window of time. They may overlap.
    #[must_use]
    pub fn random_faults(mut self, count: usize, window: (Duration, Duration)) -> Self {
        let mut rng = fastrand::Rng::with_seed(self.seed ^ 0x5eed);
        for _ in 0..count {
            self.faults.push(random_fault(&mut rng, self.endpoints, window));
        }
        self
    }

    /// The faults.
    pub fn faults(&self) -> &[Fault] {
        &self.faults
    }

    /// Whether clients use the aggregated group.
    pub(crate) fn has_group(&self) -> bool {
        let of_group =
            |role| matches!(role, Role::GroupReaders | Role::GroupWriters | Role::GroupInformers);
        self.roles().any(of_group)
    }

    /// What each client of a node does for each cluster, in the order of their numbers.
    pub fn roles(&self) -> impl Iterator<Item = Role> {
        self.clients.iter().flat_map(|&(role, count)| std::iter::repeat_n(role, count))
    }
}

/// A scenario with a name, as `jackstay-sim` and the tests run it.
#[derive(Debug, Clone, Copy)]
pub struct Scenario {
    /// The name.
    pub name: &'static str,
    /// What it shows.
    pub about: &'static str,
    /// The scenario of a seed.
    pub sim: fn(u64) -> Sim,
    /// The virtual time.
    pub time: Duration,
    /// What is promised.
    pub promises: Promises,
}

//! The version floor of each client and resource: the highest resource version that the client has seen.
//!
//! A client that has one connection to one apiserver reads from one watch cache, which only moves forward. jackstay
//! sends each request to any endpoint, so it keeps the reads of a client from going back ([`jackstay_core::reads`]
//! describes how): a read gets no answer that is older than the floor.
//!
//! The number of floors is limited. When it is exceeded, the client with the most floors loses those that it has not
//! used for the longest time, so that a client with many resources does not displace the floors of the others.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::hash::BuildHasherDefault;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use std::time::{Duration, Instant};

use jackstay_core::reads::{EndpointCache, FloorVersions, ListOrigin};
use jackstay_sys::clock;

use super::client_key::{ClientHasher, ClientKey, KeyHasher};
use super::endpoint::Endpoint;
use super::resource_versions::{ResourceRecord, ResourceVersions};

/// Maximum number of floors of one upstream. A node has some hundred clients with a few resources each; a floor takes
/// less than 200 bytes, with its client.
pub const MAX_FLOORS: usize = 4096;

/// An endpoint whose watch cache lags is found within 4 s ([`jackstay_core::lag`]), so that the caches of ready
/// endpoints have reached all events of a version that was seen before this time.
const LAG_LIMIT: Duration = Duration::from_secs(6);

/// The versions of one resource that one client has seen; 0 for a part that it has not seen.
#[derive(Debug)]
pub struct Floor {
    /// The versions that the endpoints have shown.
    pub record: Arc<ResourceRecord>,
    objects: AtomicU64,
    lists: AtomicU64,
    bookmarks: AtomicU64,
    /// When the client has seen a list, a Status or a bookmark of a higher version, in milliseconds of the record.
    raised_at: AtomicU64,
    /// Number of lists in a row that were older, after their heads had been forwarded.
    older_lists: AtomicU64,
}

impl Floor {
    /// A floor without versions.
    pub fn new(record: Arc<ResourceRecord>) -> Self {
        let (objects, lists, bookmarks, raised_at, older_lists) = Default::default();
        Self { record, objects, lists, bookmarks, raised_at, older_lists }
    }

    /// The client has seen an object with this version.
    pub fn raise_objects(&self, version: u64) {
        self.objects.fetch_max(version, Ordering::Relaxed);
    }

    /// The client has seen a list with this version.
    pub fn raise_lists(&self, version: u64) {
        self.older_lists.store(0, Ordering::Relaxed);
        self.raise_progress(&self.lists, version);
    }

    /// The client has seen a Status with this version, as the answer to a write. A watch cache reaches it as it reaches that
    /// of a list.
    pub fn raise_status(&self, version: u64) {
        self.raise_progress(&self.lists, version);
    }

    /// The client has seen a bookmark with this version.
    pub fn raise_bookmarks(&self, version: u64) {
        self.raise_progress(&self.bookmarks, version);
    }

    fn raise_progress(&self, part: &AtomicU64, version: u64) {
        if part.fetch_max(version, Ordering::Relaxed) < version {
            let now = self.record.milliseconds(clock::now());
            self.raised_at.store(now, Ordering::Relaxed);
        }
    }

    /// Whether the client has seen a list, a Status or a bookmark of a higher version a short time ago, so that the watch cache
    /// of a ready endpoint may be older ([`LAG_LIMIT`]).
    fn is_progress_recent(&self, now: Instant) -> bool {
        let age =
            self.record.milliseconds(now).saturating_sub(self.raised_at.load(Ordering::Relaxed));
        Duration::from_millis(age) < LAG_LIMIT
    }

    /// Whether each connection to `endpoint` is known to read a cache that has reached `version`.
    pub fn is_reached_by(&self, endpoint: &Arc<Endpoint>, version: u64) -> bool {
        !endpoint.is_shared() && self.record.has_reached(endpoint, version)
    }

    /// What is known of `endpoint`, for a read with this floor.
    pub fn cache_of(&self, endpoint: &Arc<Endpoint>) -> EndpointCache {
        let now = clock::now();
        let server = endpoint.minor_version();
        let from_etcd = self.record.lists.come_from_etcd(now);
        let (reached, list) = self.record.versions_of(endpoint);
        let lists = ListOrigin::of(server, from_etcd, || self.is_progress_recent(now));
        let is_shared = endpoint.is_shared();
        EndpointCache { endpoint: endpoint.key(), server, reached, list, lists, is_shared }
    }

    /// Records a list that was older than the floor. Returns the number of such lists in a row.
    pub fn older_list(&self) -> u64 {
        self.older_lists.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// No endpoint has reached the floor: it is lowered to `version`, the highest one that an endpoint has. Returns
    /// whether it was above.
    pub fn lower_to(&self, version: u64) -> bool {
        let parts = [&self.objects, &self.lists, &self.bookmarks];
        parts.map(|part| part.fetch_min(version, Ordering::Relaxed) > version).contains(&true)
    }

    /// The present values.
    pub fn versions(&self) -> FloorVersions {
        FloorVersions {
            objects: self.objects.load(Ordering::Relaxed),
            lists: self.lists.load(Ordering::Relaxed),
            bookmarks: self.bookmarks.load(Ordering::Relaxed),
        }
    }

    /// Raises each part to at least these values.
    pub fn raise_to(&self, versions: FloorVersions) {
        self.raise_objects(versions.objects);
        self.raise_lists(versions.lists);
        self.raise_bookmarks(versions.bookmarks);
    }
}

/// The floors of all clients of one upstream, shared by all threads.
#[derive(Debug, Default)]
pub struct VersionFloors {
    hasher: OnceLock<ClientHasher>,
    clients: Mutex<Clients>,
}

#[derive(Debug, Default)]
struct Clients {
    floors: HashMap<ClientKey, ClientFloors, BuildHasherDefault<KeyHasher>>,
    /// The number of floors of all clients.
    count: usize,
    /// Counts the uses of floors, as their order.
    uses: u64,
}

#[derive(Debug, Default)]
struct ClientFloors {
    /// In the order of their resources. Nearly every client has only a few.
    floors: Vec<UsedFloor>,
    last_use: u64,
}

#[derive(Debug)]
struct UsedFloor {
    floor: Arc<Floor>,
    last_use: u64,
}

/// A floor with its client and resource.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamedFloor {
    /// The client.
    pub client: ClientKey,
    /// Group and resource.
    pub resource: Arc<str>,
    /// The values.
    pub versions: FloorVersions,
}

impl VersionFloors {
    /// Hashes the clients; `None` before [`Self::set_hasher`]. Until then there are no floors.
    pub fn hasher(&self) -> Option<&ClientHasher> {
        self.hasher.get()
    }

    /// Sets the hasher, unless there is one. Returns whether clients are hashed like this from now on.
    pub fn set_hasher(&self, hasher: ClientHasher) -> bool {
        let secret = *hasher.secret();
        self.hasher.get_or_init(|| hasher).secret() == &secret
    }

    /// Raises the floors to saved values.
    pub fn restore(&self, saved: &[NamedFloor], resources: &ResourceVersions) {
        for floor in saved {
            if let Some(record) = resources.record(&floor.resource) {
                self.get(floor.client, &record).raise_to(floor.versions);
            }
        }
    }

    /// The floor of `client` for `resource`, if it has one.
    pub fn find(&self, client: ClientKey, resource: &str) -> Option<Arc<Floor>> {
        let mut clients = self.lock();
        let this_use = clients.next_use();
        let known = clients.floors.get_mut(&client)?;
        let used = known.position(resource).ok().and_then(|at| known.floors.get_mut(at))?;
        (known.last_use, used.last_use) = (this_use, this_use);
        Some(Arc::clone(&used.floor))
    }

    /// The floor of `client` for `resource`, which is created if there is none.
    pub fn get(&self, client: ClientKey, record: &Arc<ResourceRecord>) -> Arc<Floor> {
        let mut clients = self.lock();
        let this_use = clients.next_use();
        let known = clients.floors.entry(client).or_default();
        known.last_use = this_use;
        let at = match known.position(&record.name) {
            Ok(at) => {
                known.floors[at].last_use = this_use;
                return Arc::clone(&known.floors[at].floor);
            }
            Err(at) => at,
        };
        let floor = Arc::new(Floor::new(Arc::clone(record)));
        if known.floors.is_empty() {
            known.floors.reserve_exact(1);
        }
        known.floors.insert(at, UsedFloor { floor: Arc::clone(&floor), last_use: this_use });
        clients.count += 1;
        if clients.count > MAX_FLOORS {
            clients.evict();
        }
        floor
    }

    #[cfg(test)]
    fn count(&self) -> usize {
        self.lock().count
    }

    /// No endpoint has reached the floors of this resource that are above `version`: lowers them. Returns their number.
    pub fn lower_all(&self, resource: &str, version: u64) -> usize {
        let clients = self.lock();
        let is_lowered = |known: &&ClientFloors| {
            known.position(resource).is_ok_and(|at| known.floors[at].floor.lower_to(version))
        };
        clients.floors.values().filter(is_lowered).count()
    }

    /// etcd was restored from a backup and is at `revision` now: lowers the floors of all resources. Returns the
    /// highest version before.
    pub fn forget_above(&self, revision: u64) -> u64 {
        let clients = self.lock();
        let floors = clients.floors.values().flat_map(|known| &known.floors);
        let forget = |used: &UsedFloor| {
            let highest = used.floor.versions().highest();
            used.floor.lower_to(revision);
            highest
        };
        floors.map(forget).max().unwrap_or(0)
    }

    /// The highest version of a floor of this resource; 0 without one.
    pub fn highest_of(&self, resource: &str) -> u64 {
        let clients = self.lock();
        let of = |known: &ClientFloors| {
            known.position(resource).map_or(0, |at| known.floors[at].floor.versions().highest())
        };
        clients.floors.values().map(of).max().unwrap_or(0)
    }

    /// All floors, in an order that depends only on their clients and resources.
    pub fn all(&self) -> Vec<NamedFloor> {
        let clients = self.lock();
        let floors = clients.floors.iter().flat_map(|(client, known)| {
            known.floors.iter().map(|used| NamedFloor {
                client: *client,
                resource: Arc::clone(&used.floor.record.name),
                versions: used.floor.versions(),
            })
        });
        let mut floors: Vec<_> = floors.filter(|floor| floor.versions.highest() > 0).collect();
        floors.sort_unstable_by(|a, b| (a.client, &a.resource).cmp(&(b.client, &b.resource)));
        floors
    }

    fn lock(&self) -> MutexGuard<'_, Clients> {
        self.clients.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ClientFloors {
    /// Where the floor of a resource is, or else belongs.
    fn position(&self, resource: &str) -> Result<usize, usize> {
        self.floors.binary_search_by(|used| (*used.floor.record.name).cmp(resource))
    }
}

impl Clients {
    fn next_use(&mut self) -> u64 {
        self.uses += 1;
        self.uses
    }

    /// Removes an eighth of the floors of one client, at least one, as the module documentation says. To remove one at
    /// a time would cost a search for each new floor.
    fn evict(&mut self) {
        let rank = |(_, known): &(&ClientKey, &ClientFloors)| {
            (known.floors.len(), Reverse(known.last_use))
        };
        let Some((&client, _)) = self.floors.iter().max_by_key(rank) else { return };
        let Some(known) = self.floors.get_mut(&client) else { return };
        let mut uses: Vec<_> = known.floors.iter().map(|used| used.last_use).collect();
        let last_removed = *uses.select_nth_unstable(known.floors.len() / 8).1;
        let before = known.floors.len();
        known.floors.retain(|used| used.last_use > last_removed);
        self.count -= before - known.floors.len();
        if known.floors.is_empty() {
            self.floors.remove(&client);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(name: &str) -> Arc<ResourceRecord> {
        ResourceVersions::default().record(name).unwrap()
    }

    fn client(number: u64) -> ClientKey {
        ClientKey([number, 0])
    }

    #[test]
    fn floor_only_grows_until_it_is_lowered() {
        let floor = Floor::new(record("pods"));
        floor.raise_objects(7);
        floor.raise_objects(5);
        floor.raise_lists(9);
        floor.raise_status(8);
        floor.raise_bookmarks(8);
        let versions = FloorVersions { objects: 7, lists: 9, bookmarks: 8 };
        assert_eq!((floor.versions(), versions.highest()), (versions, 9));
        assert!(!floor.lower_to(9));
        assert_eq!(floor.versions(), versions);
        assert!(floor.lower_to(7));
        assert_eq!(floor.versions(), FloorVersions { objects: 7, lists: 7, bookmarks: 7 });
        floor.raise_to(versions);
        assert_eq!(floor.versions(), versions);
    }

    /// The cache that answers a list is not the one that has answered a write.
    #[test]
    fn status_raises_the_version_of_lists_and_ends_no_row_of_older_lists() {
        let floor = Floor::new(record("pods"));
        assert_eq!(floor.older_list(), 1);
        floor.raise_status(9);
        assert_eq!(floor.versions(), FloorVersions { lists: 9, ..FloorVersions::default() });
        assert_eq!(floor.older_list(), 2);
        floor.raise_lists(10);
        assert_eq!(floor.older_list(), 1);
    }

    #[test]
    fn floors_are_kept_for_each_client_and_resource() {
        let floors = VersionFloors::default();
        let (pods, nodes) = (record("pods"), record("nodes"));
        floors.get(client(1), &pods).raise_objects(5);
        floors.get(client(2), &pods).raise_objects(6);
        floors.get(client(1), &nodes);
        let objects = |number, resource| {
            floors.find(client(number), resource).map(|floor| floor.versions().objects)
        };
        assert_eq!(objects(1, "pods"), Some(5));
        assert_eq!(objects(2, "pods"), Some(6));
        assert_eq!((objects(2, "nodes"), objects(3, "pods")), (None, None));
        let all: Vec<_> =
            floors.all().into_iter().map(|f| (f.client, f.versions.objects)).collect();
        assert_eq!(all, [(client(1), 5), (client(2), 6)], "an empty floor is not listed");
        assert_eq!(floors.lower_all("pods", 5), 1);
        assert_eq!((objects(1, "pods"), objects(2, "pods")), (Some(5), Some(5)));
    }

    #[test]
    fn client_with_many_resources_displaces_only_its_own_floors() {
        let floors = VersionFloors::default();
        let name = |number: usize| format!("example.com/r{number}");
        for number in 0..100 {
            floors.get(client(1), &record(&name(number)));
        }
        for number in 0..100_000 {
            floors.get(client(2), &record(&name(number)));
        }
        assert!(
            (MAX_FLOORS * 7 / 8 - 100..=MAX_FLOORS).contains(&floors.count()),
            "{}",
            floors.count()
        );
        assert!((0..100).all(|number| floors.find(client(1), &name(number)).is_some()));
        assert!(floors.find(client(2), &name(0)).is_none());
        assert!(floors.find(client(2), &name(99_999)).is_some());
    }

    #[test]
    fn among_clients_with_one_floor_the_least_recently_used_loses_it() {
        let floors = VersionFloors::default();
        let pods = record("pods");
        for number in 0..MAX_FLOORS as u64 {
            floors.get(client(number), &pods);
        }
        assert!(floors.find(client(0), "pods").is_some(), "a use");
        floors.get(client(u64::MAX), &pods);
        assert!(floors.find(client(0), "pods").is_some());
        assert!(floors.find(client(1), "pods").is_none());
        assert_eq!(floors.count(), MAX_FLOORS);
    }
}

//! The resource versions that the watch cache of each endpoint has shown.
//!
//! Each kube-apiserver serves watches and most reads from a cache of its own, which follows etcd. Watch events,
//! bookmarks and answers from the cache show how far it has come ([`ShownVersion`]). So a read can be sent to
//! an endpoint that is known to have reached a version, and an endpoint whose cache lags can be found.
//!
//! Versions are compared within one resource only: etcd may be sharded by resource. A version above `u64::MAX`, which
//! no etcd has, is not recorded.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Instant;

use arc_swap::ArcSwap;
use jackstay_sys::clock;

use super::endpoint::{Endpoint, EndpointState};
use super::list_source::SharedListSource;

/// Maximum number of resources of an upstream. A cluster with many custom resources has some hundred.
const MAX_RESOURCES: usize = 1024;
/// Maximum number of endpoints of a resource, so that endpoints that come and go do not grow the record.
const MAX_ENDPOINTS: usize = 32;

/// The versions of all resources of one upstream, shared by all threads.
#[derive(Debug, Default)]
pub struct ResourceVersions {
    records: Mutex<HashMap<Arc<str>, Arc<ResourceRecord>>>,
    lists: Arc<SharedListSource>,
}

/// The versions of one resource.
#[derive(Debug)]
pub struct ResourceRecord {
    /// Group and resource, for example `apps/deployments`, or `pods` of the core group.
    pub name: Arc<str>,
    /// Where the most-recent lists of the upstream come from.
    pub lists: Arc<SharedListSource>,
    /// The time from which [`ShownVersion::raised_at`] is counted.
    epoch: Instant,
    /// Replaced when an endpoint joins: each read looks at every candidate, and must not wait for another one.
    endpoints: ArcSwap<Vec<Arc<ShownBy>>>,
}

/// An endpoint, and what it has shown.
#[derive(Debug)]
struct ShownBy {
    endpoint: Weak<Endpoint>,
    shown: Arc<ShownVersion>,
}

/// The highest version of one resource that the watch cache of one endpoint has shown.
#[derive(Debug, Default)]
pub struct ShownVersion {
    version: AtomicU64,
    /// The highest version of a most-recent list, which the cache has reached unless the server read it from etcd.
    list: AtomicU64,
    /// The highest version of an event.
    event: AtomicU64,
    /// Milliseconds between the epoch of the record and the last raise.
    raised_at: AtomicU64,
}

/// What one endpoint has shown of a resource.
#[derive(Debug)]
pub struct EndpointVersion {
    /// The endpoint.
    pub endpoint: Arc<Endpoint>,
    /// The highest version.
    pub version: u64,
    /// The highest version of an event of a watch; 0 if there was none. Each cache gets every event.
    pub event: u64,
    /// When the version was raised last.
    pub raised_at: Instant,
}

impl ResourceVersions {
    /// The record of a resource, which is created if it does not exist. Returns `None` while [`MAX_RESOURCES`] others
    /// are in use.
    pub fn record(&self, name: &str) -> Option<Arc<ResourceRecord>> {
        let mut records = self.records();
        if let Some(record) = records.get(name) {
            return Some(Arc::clone(record));
        }
        if records.len() >= MAX_RESOURCES {
            records.retain(|_, record| Arc::strong_count(record) > 1);
        }
        if records.len() >= MAX_RESOURCES {
            return None;
        }
        let name: Arc<str> = name.into();
        let record = Arc::new(ResourceRecord {
            name: Arc::clone(&name),
            lists: Arc::clone(&self.lists),
            epoch: clock::now(),
            endpoints: ArcSwap::default(),
        });
        records.insert(name, Arc::clone(&record));
        Some(record)
    }

    /// All records, for comparisons between endpoints.
    pub fn snapshot(&self) -> Vec<Arc<ResourceRecord>> {
        self.records().values().cloned().collect()
    }

    /// etcd was restored from a backup and is at `revision` now: no endpoint has shown a higher version. Returns the
    /// highest version of the lost history.
    pub fn forget_above(&self, revision: u64) -> u64 {
        let forget = |record: Arc<ResourceRecord>| record.forget_above(revision);
        self.snapshot().into_iter().map(forget).max().unwrap_or(0)
    }

    /// The cache of `resource` at `endpoint` is at `version`. If it has shown a higher one, its process was replaced,
    /// because the caches of a process never go back: what the earlier process has shown says nothing about this one.
    pub fn forget_if_ahead(&self, endpoint: &Arc<Endpoint>, resource: &str, version: u64) {
        let Some(record) = self.record(resource) else { return };
        if record.has_reached(endpoint, version.saturating_add(1)) {
            self.snapshot().iter().for_each(|record| record.forget(endpoint));
        }
    }

    fn records(&self) -> MutexGuard<'_, HashMap<Arc<str>, Arc<ResourceRecord>>> {
        self.records.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ResourceRecord {
    /// The version that `endpoint` has shown, which its watches and reads raise.
    pub fn shown_by(&self, endpoint: &Arc<Endpoint>) -> Arc<ShownVersion> {
        if let Some(shown) = self.of(endpoint, Arc::clone) {
            return shown;
        }
        let (shown, key) = (Arc::default(), Arc::downgrade(endpoint));
        let added = Arc::new(ShownBy { endpoint: key, shown: Arc::clone(&shown) });
        let before = self.endpoints.rcu(|all| {
            if all.iter().any(|one| one.is(endpoint)) {
                return Arc::clone(all);
            }
            let mut all: Vec<_> =
                all.iter().filter(|one| one.endpoint.strong_count() > 0).cloned().collect();
            if all.len() >= MAX_ENDPOINTS {
                all.remove(0);
            }
            all.push(Arc::clone(&added));
            Arc::new(all)
        });
        // Another thread may have added it.
        let known = before.iter().find(|one| one.is(endpoint));
        known.map_or(shown, |one| Arc::clone(&one.shown))
    }

    /// Whether the cache of `endpoint` is known to have reached `version`.
    pub fn has_reached(&self, endpoint: &Arc<Endpoint>, version: u64) -> bool {
        self.of(endpoint, |shown| shown.version() >= version).unwrap_or(false)
    }

    /// The highest version that the cache of `endpoint` has shown, and that of its most-recent lists; 0 for none.
    pub fn versions_of(&self, endpoint: &Arc<Endpoint>) -> (u64, u64) {
        let versions =
            |shown: &Arc<ShownVersion>| (shown.version(), shown.list.load(Ordering::Relaxed));
        self.of(endpoint, versions).unwrap_or_default()
    }

    fn of<T>(
        &self,
        endpoint: &Arc<Endpoint>,
        read: impl FnOnce(&Arc<ShownVersion>) -> T,
    ) -> Option<T> {
        let endpoints = self.endpoints.load();
        endpoints.iter().find(|one| one.is(endpoint)).map(|one| read(&one.shown))
    }

    /// Whether a watch of the resource is open on `endpoint`.
    pub fn has_watch(&self, endpoint: &Arc<Endpoint>) -> bool {
        self.of(endpoint, |shown| Arc::strong_count(shown) > 1).unwrap_or(false)
    }

    /// The highest version that a ready endpoint has shown; 0 if none has.
    pub fn highest_of_ready(&self) -> u64 {
        let all = self.endpoints_with_versions();
        let ready = all.iter().filter(|shown| shown.endpoint.state() == EndpointState::Ready);
        ready.map(|shown| shown.version).max().unwrap_or(0)
    }

    /// The endpoints that have shown a version.
    pub fn endpoints_with_versions(&self) -> Vec<EndpointVersion> {
        let of = |ShownBy { endpoint, shown }: &ShownBy| {
            let raised_at =
                std::time::Duration::from_millis(shown.raised_at.load(Ordering::Relaxed));
            Some(EndpointVersion {
                endpoint: endpoint.upgrade()?,
                version: shown.version(),
                event: shown.event.load(Ordering::Relaxed),
                raised_at: self.epoch + raised_at,
            })
        };
        let endpoints = self.endpoints.load();
        endpoints.iter().filter_map(|one| of(one)).filter(|shown| shown.version > 0).collect()
    }

    /// Records that the cache of an endpoint, whose version is `shown`, has reached `version`. Returns whether that is
    /// news.
    pub fn raise(&self, shown: &ShownVersion, version: u64, now: Instant) -> bool {
        if shown.version.fetch_max(version, Ordering::Relaxed) >= version {
            return false;
        }
        shown.raised_at.store(self.milliseconds(now), Ordering::Relaxed);
        true
    }

    /// Milliseconds from the epoch of the record.
    pub(super) fn milliseconds(&self, at: Instant) -> u64 {
        at.saturating_duration_since(self.epoch).as_millis() as u64
    }

    /// Records the version of a most-recent list.
    pub fn raise_list(&self, shown: &ShownVersion, version: u64) {
        shown.list.fetch_max(version, Ordering::Relaxed);
    }

    /// Records the version of an event that a watch has received.
    pub fn raise_event(&self, shown: &ShownVersion, version: u64) {
        if shown.event.load(Ordering::Relaxed) < version {
            shown.event.fetch_max(version, Ordering::Relaxed);
        }
    }

    /// The highest version that any endpoint has shown, and the endpoint.
    pub fn highest(&self) -> Option<(Arc<Endpoint>, u64)> {
        let all = self.endpoints_with_versions().into_iter();
        let highest = all.max_by_key(|shown| shown.version)?;
        Some((highest.endpoint, highest.version))
    }

    fn forget(&self, endpoint: &Arc<Endpoint>) {
        self.of(endpoint, |shown| {
            for part in [&shown.version, &shown.list, &shown.event] {
                part.store(0, Ordering::Relaxed);
            }
        });
    }

    /// See [`ResourceVersions::forget_above`].
    fn forget_above(&self, revision: u64) -> u64 {
        let forget = |part: &AtomicU64| part.fetch_min(revision, Ordering::Relaxed);
        let endpoints = self.endpoints.load();
        let highest = endpoints.iter().map(|one| {
            let parts = [&one.shown.version, &one.shown.list, &one.shown.event];
            parts.map(forget).into_iter().max().unwrap_or(0)
        });
        highest.max().unwrap_or(0)
    }

    /// Records that the cache of an endpoint is at `version`, also if it has shown a higher one: the caches of a
    /// process never go back, so this is another process, whose caches have begun anew or which has an older etcd.
    pub fn set(&self, shown: &ShownVersion, version: u64, now: Instant) {
        shown.version.fetch_min(version, Ordering::Relaxed);
        shown.list.fetch_min(version, Ordering::Relaxed);
        shown.event.fetch_min(version, Ordering::Relaxed);
        self.raise(shown, version, now);
    }
}

impl ShownBy {
    fn is(&self, endpoint: &Arc<Endpoint>) -> bool {
        std::ptr::eq(self.endpoint.as_ptr(), Arc::as_ptr(endpoint))
    }
}

impl ShownVersion {
    /// The highest version that was shown; 0 if none was.
    pub fn version(&self) -> u64 {
        self.version.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::observe::Metrics;
    use jackstay_core::discovery::address::EndpointAddress;

    fn endpoint(host: &str) -> Arc<Endpoint> {
        let address = EndpointAddress { host: host.to_owned(), port: 6443 };
        Endpoint::new(&"u".into(), &address, None, Metrics::new().endpoint("u", host)).unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn record_keeps_the_highest_version_of_each_endpoint_and_its_time() {
        let versions = ResourceVersions::default();
        let record = versions.record("pods").unwrap();
        let (a, b) = (endpoint("10.0.0.1"), endpoint("10.0.0.2"));
        let shown = record.shown_by(&a);
        assert!(!record.has_reached(&a, 1) && !record.has_reached(&b, 1));
        let start = clock::now();
        assert!(record.raise(&shown, 10, start + Duration::from_secs(1)));
        assert!(!record.raise(&shown, 9, start + Duration::from_secs(2)), "it only grows");
        assert!(record.raise(&record.shown_by(&a), 11, start + Duration::from_secs(3)));
        assert!(record.has_reached(&a, 11) && !record.has_reached(&a, 12));
        record.shown_by(&b);
        let known = versions.record("pods").unwrap().endpoints_with_versions();
        let [shown_by_a] = &known[..] else { panic!("{known:?}") };
        assert!(Arc::ptr_eq(&shown_by_a.endpoint, &a), "b has shown none");
        assert_eq!(
            (shown_by_a.version, shown_by_a.raised_at),
            (11, start + Duration::from_secs(3))
        );
        assert_eq!(shown_by_a.event, 0);
        assert!(record.has_watch(&a) && !record.has_watch(&b));
        record.set(&shown, 5, start);
        assert!(record.has_reached(&a, 5) && !record.has_reached(&a, 6));
        assert_eq!((record.versions_of(&a), record.versions_of(&b)), ((5, 0), (0, 0)));
        record.raise_list(&shown, 8);
        assert_eq!((record.versions_of(&a), record.has_reached(&a, 8)), ((5, 8), false));
        record.set(&shown, 5, start);
        assert_eq!(record.versions_of(&a), (5, 5));
    }

    #[test]
    fn records_are_bounded_and_those_in_use_stay() {
        let versions = ResourceVersions::default();
        let in_use = versions.record("pods").unwrap();
        for number in 0..10 * MAX_RESOURCES {
            assert!(versions.record(&format!("example.com/r{number}")).is_some());
        }
        assert!(versions.snapshot().len() <= MAX_RESOURCES);
        assert!(Arc::ptr_eq(&in_use, &versions.record("pods").unwrap()));
        let all: Vec<_> = (0..MAX_RESOURCES)
            .filter_map(|number| versions.record(&format!("example.org/r{number}")))
            .collect();
        assert_eq!(all.len(), MAX_RESOURCES - 1);
        assert!(versions.record("one more").is_none());
    }

    #[test]
    fn endpoints_of_a_record_are_bounded() {
        let record = ResourceVersions::default().record("pods").unwrap();
        let endpoints: Vec<_> =
            (0..2 * MAX_ENDPOINTS).map(|n| endpoint(&format!("10.0.0.{n}"))).collect();
        for endpoint in &endpoints {
            let shown = record.shown_by(endpoint);
            record.raise(&shown, 1, clock::now());
        }
        assert_eq!(record.endpoints_with_versions().len(), MAX_ENDPOINTS);
        drop(endpoints);
        assert!(record.endpoints_with_versions().is_empty());
    }
}

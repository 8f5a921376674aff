//! Which resources are stored in the etcd of the *reference*, a resource that the prober may list.
//!
//! The version of a most-recent list is the revision of the etcd that stores the resource, whatever the resource. So lists
//! of the reference show whether versions of other resources are lost ([`crate::restore`]), also of those that the
//! prober may not read. The certificate of a node may neither list leases, secrets and `ConfigMap`s, nor nodes
//! and pods without a selector (Kubernetes, `plugin/pkg/auth/authorizer/node/node_authorizer.go`). It may list
//! services in every release (`plugin/pkg/auth/authorizer/rbac/bootstrappolicy/policy.go`, `NodeRules`).
//!
//! `--etcd-servers-overrides` may store a resource in another etcd, whose revisions are not comparable; Events often are.
//! Aggregated apiservers have a store of their own. So a resource counts as stored with the reference only after two reads
//! of the reference have proven it. `seen` is the highest version of the resource that was seen before the second read
//! was sent:
//!
//! | version | meaning |
//! |---|---|
//! | seen ≤ first read | nothing new was seen. A restore that loses the version loses the revision of the first read, too |
//! | first read < seen ≤ second read | the same etcd |
//! | second read < seen | another etcd: asked again after a pause that doubles |
//!
//! Another etcd passes for the same one only if its revision was between two reads, some seconds apart. A resource
//! of an etcd of its own is compared only with itself, which takes the right to read it.
//!
//! This module is pure: it reads no clock.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::backoff::Backoff;
use crate::lag::Expected;

/// The resource whose lists are read. Nodes may list it, and so may kube-proxy.
pub const REFERENCE: &str = "services";
/// Pauses after a read that was not answered, and before a resource of another etcd is compared again.
const PAUSES: Backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(600));

/// The latest revision of the reference, and the resources that are stored with it.
#[derive(Debug, Default)]
pub struct SharedEtcd {
    latest: Option<Expected>,
    shared: HashSet<Arc<str>>,
    /// Resources of which a version above the latest revision was seen.
    others: HashMap<Arc<str>, Pause>,
    unanswered: Option<Pause>,
}

#[derive(Debug)]
struct Pause {
    backoff: Backoff,
    end: Instant,
}

impl Pause {
    fn extend(&mut self, now: Instant) {
        self.end = now + self.backoff.failed();
    }

    fn new(now: Instant) -> Self {
        Self { backoff: PAUSES, end: now }
    }
}

impl SharedEtcd {
    /// Whether the resource is known to be stored with the reference.
    pub fn has(&self, resource: &str) -> bool {
        resource == REFERENCE || self.shared.contains(resource)
    }

    /// What the latest read of the reference has shown.
    pub fn latest(&self) -> Option<&Expected> {
        self.latest.as_ref()
    }

    /// Whether a read of the reference may prove that another resource is stored with it. Once that is proven for all
    /// resources, nothing is read any more.
    pub fn is_read_due(&self, seen: &[Expected], now: Instant) -> bool {
        let is_over = |pause: Option<&Pause>| pause.is_none_or(|pause| now >= pause.end);
        let is_open = |one: &Expected| {
            !self.has(&one.resource)
                && one.version > self.revision()
                && is_over(self.others.get(&one.resource))
        };
        is_over(self.unanswered.as_ref()) && seen.iter().any(is_open)
    }

    /// Takes in a read of the reference by an endpoint. `seen` are the versions before it was sent, with the [`Self::latest`]
    /// one of that time: another endpoint may have read a higher revision meanwhile. Returns the highest version that is
    /// lost, because the etcd is at a lower `revision`. Such a read proves nothing else.
    pub fn read(
        &mut self,
        (revision, read_by): (u64, &Arc<str>),
        seen: &[Expected],
        now: Instant,
    ) -> Option<Expected> {
        let stored_here = seen.iter().filter(|one| self.has(&one.resource));
        let highest = stored_here.max_by_key(|one| one.version);
        if let Some(lost) = highest.filter(|highest| highest.version > revision) {
            let lost = lost.clone();
            self.failed(now);
            return Some(lost);
        }
        self.unanswered = None;
        let first = self.revision();
        for one in seen.iter().filter(|one| one.version > first) {
            if one.version > revision {
                let pause = self.others.entry(Arc::clone(&one.resource));
                pause.or_insert_with(|| Pause::new(now)).extend(now);
            } else if self.latest.is_some() {
                self.shared.insert(Arc::clone(&one.resource));
            }
        }
        // Bounded by the resources of which versions are known.
        let seen: HashSet<_> = seen.iter().map(|one| &*one.resource).collect();
        self.shared.retain(|resource| seen.contains(&**resource));
        let shared = &self.shared;
        self.others.retain(|resource, _| seen.contains(&**resource) && !shared.contains(resource));
        if revision > first {
            let (resource, shown_by) = (REFERENCE.into(), Arc::clone(read_by));
            self.latest = Some(Expected { resource, version: revision, shown_by, at: now });
        }
        None
    }

    /// The reference was not answered.
    pub fn failed(&mut self, now: Instant) {
        self.unanswered.get_or_insert_with(|| Pause::new(now)).extend(now);
    }

    /// The etcd was restored, and is at this revision.
    pub fn restored(&mut self, revision: u64) {
        if let Some(latest) = &mut self.latest {
            latest.version = latest.version.min(revision);
        }
        self.others.clear();
        self.unanswered = None;
    }

    fn revision(&self) -> u64 {
        self.latest.as_ref().map_or(0, |latest| latest.version)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(all: &[(&str, u64)]) -> Vec<Expected> {
        let at = Instant::now();
        let one = |&(resource, version): &(&str, u64)| Expected {
            resource: resource.into(),
            version,
            shown_by: "a".into(),
            at,
        };
        all.iter().map(one).collect()
    }

    /// Reads the reference at this revision, after these versions were seen. Returns what is lost.
    fn read(etcd: &mut SharedEtcd, revision: u64, all: &[(&str, u64)]) -> Option<(String, u64)> {
        let mut all = seen(all);
        all.extend(etcd.latest().cloned());
        let lost = etcd.read((revision, &"b".into()), &all, Instant::now());
        lost.map(|lost| (lost.resource.to_string(), lost.version))
    }

    #[test]
    fn resource_is_stored_with_the_reference_if_its_version_is_between_two_reads() {
        for (first, second, version, expected) in [
            (100, 200, 100, false), // Nothing new.
            (100, 200, 101, true),
            (100, 200, 200, true),
            (100, 200, 201, false), // An etcd whose revisions are higher.
            (100, 200, 50, false),  // An etcd whose revisions are lower.
            (100, 100, 100, false),
            (0, 200, 101, false), // Without a first read.
        ] {
            let mut etcd = SharedEtcd::default();
            if first > 0 {
                read(&mut etcd, first, &[]);
            }
            assert_eq!(read(&mut etcd, second, &[("pods", version)]), None);
            assert_eq!(etcd.has("pods"), expected, "{first} {second} {version}");
            assert!(etcd.has(REFERENCE));
        }
    }

    #[test]
    fn versions_above_the_revision_are_lost_if_they_are_of_the_same_etcd() {
        for (seen, revision, expected) in [
            (&[("pods", 190), ("leases", 9_000)][..], 300, None),
            // Leases are stored elsewhere.
            (&[("pods", 250), ("leases", 9_000)], 260, None),
            (&[("pods", 250), ("leases", 9_000)], 240, Some(("pods", 250))),
            // No watch has shown what was lost; the revision that was read before has.
            (&[("pods", 150)], 199, Some((REFERENCE, 200))),
            (&[], 199, Some((REFERENCE, 200))),
            (&[(REFERENCE, 270)], 240, Some((REFERENCE, 270))),
            (&[("pods", 250), (REFERENCE, 270)], 240, Some((REFERENCE, 270))),
        ] {
            let mut etcd = SharedEtcd::default();
            read(&mut etcd, 100, &[("leases", 8_000)]);
            read(&mut etcd, 200, &[("pods", 150), ("leases", 8_001)]);
            let expected = expected.map(|(resource, version)| (resource.to_owned(), version));
            assert_eq!(read(&mut etcd, revision, seen), expected, "{seen:?} {revision}");
            // What is lost stays lost until the restore is recognised.
            assert_eq!(read(&mut etcd, revision, seen), expected);
            etcd.restored(revision);
            assert_eq!(read(&mut etcd, revision, &[("pods", revision.min(150))]), None);
            assert!(etcd.has("pods"));
        }
    }

    #[test]
    fn read_that_another_one_has_overtaken_shows_no_loss() {
        let mut etcd = SharedEtcd::default();
        read(&mut etcd, 100, &[]);
        let before = [etcd.latest().unwrap().clone()];
        read(&mut etcd, 200, &[]);
        assert_eq!(etcd.read((150, &"a".into()), &before, Instant::now()), None);
        assert_eq!(etcd.latest().unwrap().version, 200);
    }

    #[test]
    fn reference_is_read_until_each_resource_is_known() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut etcd = SharedEtcd::default();
        let due = |etcd: &SharedEtcd, all: &[(&str, u64)], seconds| {
            etcd.is_read_due(&seen(all), at(seconds))
        };
        assert!(!due(&etcd, &[], 0) && !due(&etcd, &[(REFERENCE, 5)], 0));
        assert!(due(&etcd, &[("pods", 90)], 0));
        etcd.read((100, &"b".into()), &seen(&[("pods", 90)]), at(0));
        assert!(!due(&etcd, &[("pods", 100)], 0), "nothing new");
        assert!(due(&etcd, &[("pods", 101)], 0));
        etcd.read((200, &"b".into()), &seen(&[("pods", 101)]), at(0));
        assert!(!due(&etcd, &[("pods", 9_999)], 0), "known");
        // A resource of another etcd: pauses that double.
        let mut pauses = Vec::new();
        let mut now = 0;
        for version in 1_000..1_012 {
            let leases = [("leases", version), ("pods", 101)];
            let since = now;
            while !due(&etcd, &leases, now) {
                now += 1;
            }
            pauses.push(now - since);
            etcd.read((200, &"b".into()), &seen(&leases), at(now));
        }
        assert_eq!(pauses, [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 600]);
        // It does not hold up others.
        assert!(due(&etcd, &[("nodes", 300)], now));
        etcd.failed(at(now));
        etcd.failed(at(now));
        assert!(!due(&etcd, &[("nodes", 300)], now + 1) && due(&etcd, &[("nodes", 300)], now + 2));
    }
}

//! Whether the apiservers of an upstream read most-recent lists from etcd, as their answers have shown.
//!
//! Since Kubernetes 1.31 the cache answers them, unless the feature gate `ConsistentListFromCache` is off (until 1.33)
//! or etcd is older than 3.5.13 (apiserver, `storage/cacher/delegator/interface.go`, `ConsistentReadSupported`). Then
//! the cache has not reached the version of such a list, and the next list of any version shows that. A fallback to
//! etcd, after the cache was not fresh for 3 s, shows the same, so the finding holds for a pause only, which doubles
//! with each new finding. Meanwhile, each list from a cache that is older than a most-recent one of the same endpoint
//! before confirms it.
//!
//! It holds for all apiservers, because they share etcd and their gates. If each had to show it, the first list at one
//! that has not shown it would be a most-recent list, whose version counts at the others, too: none of them would be
//! asked for its cache as long as the client lists every few seconds.

use std::time::{Duration, Instant};

use crate::backoff::Backoff;

/// How long the first finding holds. Each further one costs a list that etcd answers, for each resource and client.
const FIRST: Duration = Duration::from_secs(60);
/// How long a finding holds at most.
const LONGEST: Duration = Duration::from_secs(3600);

/// Where the most-recent lists of one upstream come from.
#[derive(Debug)]
pub struct ListSource {
    backoff: Backoff,
    end: Option<Instant>,
}

impl Default for ListSource {
    fn default() -> Self {
        Self { backoff: Backoff::new(FIRST, LONGEST), end: None }
    }
}

impl ListSource {
    /// The cache was older than a most-recent list of the same endpoint before.
    pub fn found_in_etcd(&mut self, now: Instant) {
        let pause =
            if self.come_from_etcd(now) { self.backoff.pause() } else { self.backoff.failed() };
        self.end = self.end.max(Some(now + pause));
    }

    /// Whether such lists count as read from etcd.
    pub fn come_from_etcd(&self, now: Instant) -> bool {
        self.end.is_some_and(|end| now < end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finding_holds_for_a_pause_that_doubles() {
        let (mut source, start) = (ListSource::default(), Instant::now());
        let second = Duration::from_secs(1);
        assert!(!source.come_from_etcd(start));
        source.found_in_etcd(start);
        // Requests that were sent at the same time find the same, and later ones confirm it.
        source.found_in_etcd(start);
        assert!(source.come_from_etcd(start + FIRST.saturating_sub(second)));
        assert!(!source.come_from_etcd(start + FIRST));
        source.found_in_etcd(start + FIRST / 2);
        let again = start + FIRST / 2 + FIRST;
        assert!(source.come_from_etcd(again.checked_sub(second).unwrap()));
        assert!(!source.come_from_etcd(again));
        source.found_in_etcd(again);
        assert!(source.come_from_etcd(again + (2 * FIRST).saturating_sub(second)));
        assert!(!source.come_from_etcd(again + 2 * FIRST));
    }
}

//! The API groups of one upstream whose watches are not resumed, because a watch has shown versions that are
//! not ordered.
//!
//! Workers read the set when a watch begins or loses its stream, and write it rarely.
//! A built-in group is never added: kube-apiserver serves it from etcd, so a contradiction concerns one watch.
//!
//! A contradiction may have a cause that passes: the last endpoint that had reached a version is gone while the others lag. So
//! a group leaves the set after a minute. If its versions contradict each other again, it stays twice as long, up to a
//! day. After the same time without a contradiction, the next one counts as the first.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use jackstay_core::backoff::Backoff;
use jackstay_sys::clock;
use jackstay_sys::utc::{Utc, wall_clock};
use serde::Serialize;

/// Maximum number of groups. In a group beyond it, each watch finds the contradiction for itself.
const MAX_GROUPS: usize = 256;
/// Maximum length of a group's name: it is a DNS name (RFC 1035, section 2.3.4).
const MAX_NAME: usize = 253;
/// How long a group stays in the set at first.
const FIRST: Duration = Duration::from_secs(60);
/// How long a group stays in the set at most, before its watches are resumed again. Each contradiction ends a watch.
const LONGEST: Duration = Duration::from_secs(24 * 3600);

/// The set of one upstream, which all workers share.
#[derive(Debug, Default)]
pub struct UnorderedGroups(ArcSwap<BTreeMap<Box<str>, Entry>>);

/// A group that is in the set, or was in it.
#[derive(Debug, Clone)]
struct Entry {
    group: UnorderedGroup,
    pause: Backoff,
    /// When it leaves the set.
    end: Instant,
    /// When its earlier contradictions do not count any more.
    forgotten_at: Instant,
}

/// A group of the set, for `/status`.
#[derive(Debug, Clone, Serialize)]
pub struct UnorderedGroup {
    group: Box<str>,
    /// What a watch has shown.
    reason: &'static str,
    /// When it was shown, RFC 3339.
    since: String,
    /// When watches of the group are resumed again, RFC 3339.
    until: String,
}

impl UnorderedGroups {
    /// Whether watches of this group are not resumed.
    pub fn contains(&self, group: &str) -> bool {
        let groups = self.0.load();
        !groups.is_empty() && groups.get(group).is_some_and(|entry| clock::now() < entry.end)
    }

    /// Adds a group, for a time that doubles with each addition. Returns false if it is in the set already, or if the set is
    /// full.
    pub fn add(&self, group: &str, reason: &'static str) -> bool {
        if group.len() > MAX_NAME {
            return false;
        }
        let now = clock::now();
        let is_present =
            |groups: &BTreeMap<_, Entry>| groups.get(group).is_some_and(|entry| now < entry.end);
        let may_add = |groups: &BTreeMap<_, Entry>| {
            let kept = groups.values().filter(|entry| now < entry.forgotten_at).count();
            !is_present(groups) && (kept < MAX_GROUPS || groups.contains_key(group))
        };
        let before = self.0.rcu(|groups| {
            let mut groups = BTreeMap::clone(groups);
            groups.retain(|_, entry| now < entry.forgotten_at);
            if may_add(&groups) {
                let before = groups.get(group).map(|entry| entry.pause);
                let mut pause = before.unwrap_or(Backoff::new(FIRST, LONGEST));
                let length = pause.failed();
                let group: Box<str> = group.into();
                let (since, until) = (wall_clock(), wall_clock() + length);
                let named = UnorderedGroup {
                    group: group.clone(),
                    reason,
                    since: Utc(since).seconds(),
                    until: Utc(until).seconds(),
                };
                let (end, forgotten_at) = (now + length, now + 2 * length);
                groups.insert(group, Entry { group: named, pause, end, forgotten_at });
            }
            groups
        });
        may_add(&before)
    }

    /// The groups in alphabetical order.
    pub fn list(&self) -> Vec<UnorderedGroup> {
        let now = clock::now();
        let groups = self.0.load();
        groups.values().filter(|e| now < e.end).map(|entry| entry.group.clone()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn group_leaves_the_set_and_stays_longer_after_each_contradiction() {
        let groups = UnorderedGroups::default();
        let second = Duration::from_secs(1);
        for length in [FIRST, 2 * FIRST, 4 * FIRST] {
            assert!(groups.add("example.com", "version_not_reached"));
            tokio::time::advance(length.saturating_sub(second)).await;
            assert!(groups.contains("example.com") && groups.list().len() == 1, "{length:?}");
            tokio::time::advance(second).await;
            assert!(!groups.contains("example.com") && groups.list().is_empty(), "{length:?}");
        }
        // A long time without a contradiction.
        tokio::time::advance(4 * FIRST).await;
        assert!(groups.add("example.com", "version_not_reached"));
        tokio::time::advance(FIRST).await;
        assert!(!groups.contains("example.com"));
    }

    #[test]
    fn unordered_groups_keep_the_first_reason_and_are_bounded() {
        let groups = UnorderedGroups::default();
        assert!(!groups.contains("example.com"));
        assert!(groups.add("example.com", "version_not_growing"));
        assert!(!groups.add("example.com", "diverged"), "a second reason");
        assert!(groups.contains("example.com") && !groups.contains("example.org"));
        assert_eq!(groups.list()[0].reason, "version_not_growing");
        assert!(!groups.add(&"a".repeat(MAX_NAME + 1), "diverged"), "a name that is too long");
        let added =
            (0..2 * MAX_GROUPS).filter(|n| groups.add(&format!("g{n}"), "diverged")).count();
        assert_eq!(added, MAX_GROUPS - 1);
        assert_eq!(groups.list().len(), MAX_GROUPS);
    }
}

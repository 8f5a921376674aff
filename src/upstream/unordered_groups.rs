//! The API groups of one upstream whose watches are not resumed, because a watch has shown versions that are
//! not ordered.
//!
//! Workers read the set when a watch begins or loses its stream, and write it at most [`MAX_GROUPS`] times.
//! A built-in group is never added: kube-apiserver serves it from etcd, so a contradiction concerns one watch.

use std::collections::BTreeMap;

use arc_swap::ArcSwap;
use jackstay_sys::utc::Utc;
use serde::Serialize;

/// Maximum number of groups. In a group beyond it, each watch finds the contradiction for itself.
const MAX_GROUPS: usize = 256;
/// Maximum length of a group's name: it is a DNS name (RFC 1035, section 2.3.4).
const MAX_NAME: usize = 253;

/// The set of one upstream, which all workers share.
#[derive(Debug, Default)]
pub struct UnorderedGroups(ArcSwap<BTreeMap<Box<str>, UnorderedGroup>>);

/// A group of the set, for `/status`.
#[derive(Debug, Clone, Serialize)]
pub struct UnorderedGroup {
    group: Box<str>,
    /// What a watch has shown.
    reason: &'static str,
    /// When it was shown, RFC 3339.
    since: String,
}

impl UnorderedGroups {
    /// Whether watches of this group are not resumed.
    pub fn contains(&self, group: &str) -> bool {
        let groups = self.0.load();
        !groups.is_empty() && groups.contains_key(group)
    }

    /// Adds a group. Returns false if it is in the set already, or if the set is full.
    pub fn add(&self, group: &str, reason: &'static str) -> bool {
        if group.len() > MAX_NAME {
            return false;
        }
        let entry = UnorderedGroup { group: group.into(), reason, since: Utc::now().seconds() };
        let may_add =
            |groups: &BTreeMap<_, _>| groups.len() < MAX_GROUPS && !groups.contains_key(group);
        let before = self.0.rcu(|groups| {
            let mut groups = BTreeMap::clone(groups);
            if may_add(&groups) {
                groups.insert(group.into(), entry.clone());
            }
            groups
        });
        may_add(&before)
    }

    /// The groups in alphabetical order.
    pub fn list(&self) -> Vec<UnorderedGroup> {
        self.0.load().values().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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

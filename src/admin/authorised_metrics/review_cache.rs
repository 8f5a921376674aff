//! What reviews have found, for a bounded number of credentials. Pure: the time is an argument.
//!
//! | result | used for | source |
//! |---|---|---|
//! | allowed | 2 min | kubelet's `authentication.webhook.cacheTTL`; its `authorization.webhook.cacheAuthorizedTTL` is 5 min |
//! | not authenticated, not allowed | 30 s | kubelet's `authorization.webhook.cacheUnauthorizedTTL` |
//! | allowed, while no apiserver answers | 1 h | the usual lifetime of a token of a service account |
//!
//! The last row is there because the metrics of an outage are those that matter.

use std::collections::HashMap;
use std::time::{Duration, Instant};

/// How long a credential that was allowed is not reviewed again.
pub const ALLOWED_TTL: Duration = Duration::from_secs(120);
/// How long a refused one is not.
pub const REFUSED_TTL: Duration = Duration::from_secs(30);
/// How long one that was allowed may read while no review is answered.
pub const OUTAGE_TTL: Duration = Duration::from_secs(3_600);
/// Maximum of credentials.
const MAX_ENTRIES: usize = 512;

/// The digest of a credential.
pub type Key = [u8; 32];

/// The answer of a review.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// The user may read the metrics.
    Allowed,
    /// The token is not valid.
    Unauthenticated,
    /// The user may not read the metrics.
    Forbidden,
}

/// What is known of a credential.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Known {
    /// The verdict holds.
    Fresh(Verdict),
    /// It was allowed, must be reviewed again, and may be used if no review is answered.
    Stale,
    /// Nothing.
    Unknown,
}

/// The verdicts, by the digest of the credential.
#[derive(Debug, Default)]
pub struct ReviewCache {
    entries: HashMap<Key, (Verdict, Instant)>,
}

impl ReviewCache {
    /// What is known of a credential at `now`.
    pub fn get(&self, key: &Key, now: Instant) -> Known {
        let Some((verdict, at)) = self.entries.get(key) else { return Known::Unknown };
        let age = now.saturating_duration_since(*at);
        match verdict {
            Verdict::Allowed if age < ALLOWED_TTL => Known::Fresh(*verdict),
            Verdict::Allowed if age < OUTAGE_TTL => Known::Stale,
            Verdict::Unauthenticated | Verdict::Forbidden if age < REFUSED_TTL => {
                Known::Fresh(*verdict)
            }
            _ => Known::Unknown,
        }
    }

    /// Records the answer of a review. In place of an older entry if there is no room: of a refused credential first, so
    /// that invented tokens do not replace those that are allowed.
    pub fn insert(&mut self, key: Key, verdict: Verdict, now: Instant) {
        if self.entries.len() >= MAX_ENTRIES && !self.entries.contains_key(&key) {
            let rank = |(verdict, at): &(Verdict, Instant)| (*verdict == Verdict::Allowed, *at);
            let oldest = self.entries.iter().min_by_key(|(_, entry)| rank(entry));
            if let Some(oldest) = oldest.map(|(key, _)| *key) {
                self.entries.remove(&oldest);
            }
        }
        self.entries.insert(key, (verdict, now));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use jackstay_sys::clock;

    fn key(number: usize) -> Key {
        let mut key = [0; 32];
        key[..8].copy_from_slice(&number.to_le_bytes());
        key
    }

    #[test]
    fn get_follows_the_table_of_times() {
        use Known::{Fresh, Stale, Unknown};
        use Verdict::{Allowed, Forbidden, Unauthenticated};
        let (start, second) = (clock::now(), Duration::from_secs(1));
        for (verdict, after, known) in [
            (Allowed, Duration::ZERO, Fresh(Allowed)),
            (Allowed, ALLOWED_TTL.saturating_sub(second), Fresh(Allowed)),
            (Allowed, ALLOWED_TTL, Stale),
            (Allowed, OUTAGE_TTL.saturating_sub(second), Stale),
            (Allowed, OUTAGE_TTL, Unknown),
            (Forbidden, REFUSED_TTL.saturating_sub(second), Fresh(Forbidden)),
            (Forbidden, REFUSED_TTL, Unknown),
            (Unauthenticated, REFUSED_TTL.saturating_sub(second), Fresh(Unauthenticated)),
            (Unauthenticated, REFUSED_TTL, Unknown),
        ] {
            let mut cache = ReviewCache::default();
            cache.insert(key(1), verdict, start);
            assert_eq!(cache.get(&key(1), start + after), known, "{verdict:?} after {after:?}");
            assert_eq!(cache.get(&key(2), start), Unknown);
        }
    }

    #[test]
    fn insert_replaces_refused_credentials_before_allowed_ones() {
        let (mut cache, start) = (ReviewCache::default(), clock::now());
        cache.insert(key(0), Verdict::Allowed, start);
        for number in 1..MAX_ENTRIES * 3 {
            let now = start + Duration::from_millis(number as u64);
            cache.insert(key(number), Verdict::Unauthenticated, now);
        }
        assert_eq!(cache.entries.len(), MAX_ENTRIES);
        assert_eq!(cache.get(&key(0), start), Known::Fresh(Verdict::Allowed));
        assert_eq!(cache.get(&key(1), start), Known::Unknown, "the oldest refused one");
        // A credential whose permission was withdrawn.
        cache.insert(key(0), Verdict::Forbidden, start);
        assert_eq!(cache.get(&key(0), start), Known::Fresh(Verdict::Forbidden));
    }
}

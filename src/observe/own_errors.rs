//! Counts the error responses that jackstay itself generated, by status code and reason.
//!
//! `jackstay_requests_total` does not distinguish a 503 of an apiserver from one of jackstay, which means
//! that no apiserver was reached.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::SystemTime;

use jackstay_sys::utc::{Utc, wall_clock};
use metrics::Counter;
use serde::Serialize;

use super::lock;
use super::names::{self, OWN_ERROR_REASONS};
use super::registry::Registry;

/// The error responses that jackstay generated on one listener.
#[derive(Debug)]
pub struct OwnErrors {
    listener: String,
    registry: Arc<Registry>,
    /// By status code and reason.
    entries: Mutex<Entries>,
}

type Entries = BTreeMap<(Option<u16>, &'static str), Entry>;

#[derive(Debug)]
struct Entry {
    exported: Counter,
    count: u64,
    last: SystemTime,
}

/// One entry of `own_errors` in `/status`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct OwnError {
    /// Status code; `null` for a passthrough connection that was reset.
    pub code: Option<u16>,
    /// One of [`OWN_ERROR_REASONS`].
    pub reason: &'static str,
    /// Number since the process started.
    pub count: u64,
    /// Time of the latest, RFC 3339.
    pub last: String,
}

impl OwnErrors {
    pub(super) fn register(registry: &Arc<Registry>, listener: &str) -> Self {
        let (listener, registry) = (listener.to_owned(), Arc::clone(registry));
        Self { listener, registry, entries: Mutex::default() }
    }

    /// Counts an error with this status code, or a passthrough connection that was reset (`None`). A reason
    /// that is not one of [`OWN_ERROR_REASONS`] counts as `other`.
    pub fn count(&self, code: Option<u16>, reason: &'static str) {
        let last = OWN_ERROR_REASONS.len() - 1;
        let known = OWN_ERROR_REASONS.iter().find(|known| **known == reason);
        let reason = *known.unwrap_or(&OWN_ERROR_REASONS[last]);
        let mut entries = lock(&self.entries);
        let entry = entries.entry((code, reason)).or_insert_with(|| {
            let code = code.map(|code| code.to_string()).unwrap_or_default();
            let labels = &[self.listener.as_str(), &code, reason];
            let exported = self.registry.counter(&names::OWN_ERRORS, labels);
            Entry { exported, count: 0, last: SystemTime::UNIX_EPOCH }
        });
        entry.exported.increment(1);
        entry.count += 1;
        entry.last = wall_clock();
    }

    /// The errors that occurred, by code and reason.
    pub fn list(&self) -> Vec<OwnError> {
        let entries = lock(&self.entries);
        let list = entries.iter().map(|(&(code, reason), entry)| OwnError {
            code,
            reason,
            count: entry.count,
            last: Utc(entry.last).seconds(),
        });
        list.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Metrics, assert_line};

    #[test]
    fn count_groups_errors_by_code_and_reason() {
        let metrics = Metrics::new();
        let listener = metrics.listener("a");
        assert!(listener.own_errors.list().is_empty());
        for (code, reason) in [
            (Some(503), "no_upstream"),
            (Some(502), "unknown_outcome"),
            (Some(503), "no_upstream"),
            (None, "unreachable"),
            (Some(500), "a reason that is not in the table"),
        ] {
            listener.own_errors.count(code, reason);
        }
        let list = listener.own_errors.list();
        let counts: Vec<_> =
            list.iter().map(|error| (error.code, error.reason, error.count)).collect();
        assert_eq!(
            counts,
            [
                (None, "unreachable", 1),
                (Some(500), "other", 1),
                (Some(502), "unknown_outcome", 1),
                (Some(503), "no_upstream", 2),
            ]
        );
        assert!(list[3].last.starts_with("20"), "{list:?}");
        for line in [
            r#"jackstay_own_errors_total{listener="a",code="503",reason="no_upstream"} 2"#,
            r#"jackstay_own_errors_total{listener="a",code="",reason="unreachable"} 1"#,
        ] {
            assert_line(&metrics, line);
        }
    }
}

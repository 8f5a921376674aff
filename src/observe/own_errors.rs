//! Errors that jackstay itself answered, by status code and reason.
//!
//! An apiserver's own 503 and one of ours look alike in a count by code. For an operator they are
//! opposites: the first is the apiserver's decision, the second means that no apiserver was asked.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use metrics::Counter;
use serde::Serialize;

use super::metrics::Registry;
use super::names::{self, OWN_ERROR_REASONS};
use super::utc::Utc;

/// The own errors of one listener.
pub struct OwnErrors {
    listener: String,
    registry: Arc<Registry>,
    entries: Mutex<BTreeMap<(Option<u16>, &'static str), Entry>>,
}

struct Entry {
    exported: Counter,
    count: u64,
    last: SystemTime,
}

/// One line of `own_errors` in `/status`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct OwnError {
    /// Status code of the answer; `null` where a passed connection was reset instead.
    pub code: Option<u16>,
    /// One of [`OWN_ERROR_REASONS`].
    pub reason: &'static str,
    /// How many since the process started.
    pub count: u64,
    /// Time of the latest, RFC 3339.
    pub last: String,
}

impl std::fmt::Debug for OwnErrors {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("OwnErrors").field(&self.list()).finish()
    }
}

impl OwnErrors {
    pub(super) fn register(registry: &Arc<Registry>, listener: &str) -> Self {
        let (listener, registry) = (listener.to_owned(), Arc::clone(registry));
        Self { listener, registry, entries: Mutex::default() }
    }

    /// Counts an error with this status code, or a passed connection that was reset (`None`). A
    /// reason that is not among [`OWN_ERROR_REASONS`] counts as the last.
    pub fn count(&self, code: Option<u16>, reason: &'static str) {
        let last = OWN_ERROR_REASONS.len() - 1;
        let known = OWN_ERROR_REASONS.iter().find(|known| **known == reason);
        let reason = *known.unwrap_or(&OWN_ERROR_REASONS[last]);
        let mut entries = self.entries();
        let entry = entries.entry((code, reason)).or_insert_with(|| {
            let code = code.map(|code| code.to_string()).unwrap_or_default();
            let labels = &[self.listener.as_str(), &code, reason];
            let exported = self.registry.counter(&names::OWN_ERRORS, labels);
            Entry { exported, count: 0, last: SystemTime::UNIX_EPOCH }
        });
        entry.exported.increment(1);
        entry.count += 1;
        entry.last = SystemTime::now();
    }

    /// Every kind of error that occurred, by code and reason.
    pub fn list(&self) -> Vec<OwnError> {
        let line = |(&(code, reason), entry): (&(Option<u16>, &'static str), &Entry)| OwnError {
            code,
            reason,
            count: entry.count,
            last: Utc(entry.last).seconds(),
        };
        self.entries().iter().map(line).collect()
    }

    fn entries(&self) -> MutexGuard<'_, BTreeMap<(Option<u16>, &'static str), Entry>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::super::Metrics;

    #[test]
    fn own_errors_are_counted_by_code_and_reason() {
        let metrics = Metrics::new();
        let listener = metrics.listener("a");
        assert!(listener.own_errors.list().is_empty());
        for (code, reason) in [
            (Some(503), "no_upstream"),
            (Some(502), "unknown_fate"),
            (Some(503), "no_upstream"),
            (None, "unreachable"),
            (Some(500), "a reason that is not in the table"),
        ] {
            listener.own_errors.count(code, reason);
        }
        let list = listener.own_errors.list();
        let short: Vec<_> = list.iter().map(|e| (e.code, e.reason, e.count)).collect();
        assert_eq!(
            short,
            [
                (None, "unreachable", 1),
                (Some(500), "other", 1),
                (Some(502), "unknown_fate", 1),
                (Some(503), "no_upstream", 2),
            ]
        );
        assert!(list[3].last.starts_with("20"), "{list:?}");
        let text = metrics.render();
        for line in [
            r#"jackstay_own_errors_total{listener="a",code="503",reason="no_upstream"} 2"#,
            r#"jackstay_own_errors_total{listener="a",code="",reason="unreachable"} 1"#,
        ] {
            assert!(text.lines().any(|l| l == line), "no {line} in\n{text}");
        }
    }
}

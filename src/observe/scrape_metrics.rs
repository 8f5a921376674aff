//! Metrics whose values are read at each scrape: the process itself, and when certificates expire.
//!
//! The registry cannot hold them: its counters are integers, but CPU time has fractions; and it cannot
//! remove the series of a certificate that is no longer in use.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::process::{Resource, getrlimit};
use rustix::time::{ClockId, clock_gettime};

use super::lock;
use super::names::{self, MetricSpec};

/// When one certificate in use expires. Its series ends when the last handle is dropped.
#[derive(Debug, Default)]
pub struct CertificateExpiry {
    /// Seconds since 1970; 0 until it is set.
    not_after: AtomicU64,
}

impl CertificateExpiry {
    /// Records the end of the certificate's validity.
    pub fn set(&self, not_after: SystemTime) {
        let seconds = not_after.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        self.not_after.store(seconds, Ordering::Relaxed);
    }
}

/// The certificates in use, by kind and name.
#[derive(Debug, Default)]
pub(super) struct CertificateExpiries(
    Mutex<BTreeMap<(&'static str, String), Weak<CertificateExpiry>>>,
);

impl CertificateExpiries {
    /// A new handle. Its series replaces that of an older handle of the same kind and name.
    pub(super) fn handle(&self, kind: &'static str, name: &str) -> Arc<CertificateExpiry> {
        let handle = Arc::new(CertificateExpiry::default());
        let mut all = lock(&self.0);
        all.retain(|_, expiry| expiry.strong_count() > 0);
        all.insert((kind, name.to_owned()), Arc::downgrade(&handle));
        handle
    }

    /// The family as Prometheus text; empty if no certificate is in use.
    pub(super) fn render(&self) -> String {
        let all = lock(&self.0);
        let mut series = String::new();
        for ((kind, name), expiry) in all.iter() {
            let Some(expiry) = expiry.upgrade() else { continue };
            let not_after = expiry.not_after.load(Ordering::Relaxed);
            if not_after > 0 {
                let metric = names::CERTIFICATE_EXPIRY.name;
                let name = escaped(name);
                let _ = writeln!(series, "{metric}{{kind=\"{kind}\",name=\"{name}\"}} {not_after}");
            }
        }
        if series.is_empty() { series } else { head(&names::CERTIFICATE_EXPIRY) + &series + "\n" }
    }
}

/// The metrics of the process as Prometheus text. A value that `/proc` does not provide is left out.
pub(super) fn render_process(started: SystemTime) -> String {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let from_status = |key: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(key))?;
        line.split_ascii_whitespace().next()?.parse::<f64>().ok()
    };
    let cpu = clock_gettime(ClockId::ProcessCPUTime);
    // The directory that is being read has a descriptor too.
    let open = fs::read_dir("/proc/self/fd").map(|entries| entries.count().saturating_sub(1));
    let limit = getrlimit(Resource::Nofile).current.map_or(f64::INFINITY, |limit| limit as f64);
    let started = started.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
    let mut text = String::new();
    for (spec, value) in [
        (names::PROCESS_CPU, Some(cpu.tv_sec as f64 + cpu.tv_nsec as f64 / 1e9)),
        (names::PROCESS_OPEN_FDS, open.ok().map(|count| count as f64)),
        (names::PROCESS_MAX_FDS, Some(limit)),
        (names::PROCESS_RESIDENT_MEMORY, from_status("VmRSS:").map(|kib| kib * 1024.0)),
        (names::PROCESS_VIRTUAL_MEMORY, from_status("VmSize:").map(|kib| kib * 1024.0)),
        (names::PROCESS_START_TIME, Some(started)),
        (names::PROCESS_THREADS, from_status("Threads:")),
    ] {
        let Some(value) = value else { continue };
        let value = if value.is_finite() { value.to_string() } else { "+Inf".to_owned() };
        let _ = writeln!(text, "{}{} {value}\n", head(&spec), spec.name);
    }
    text
}

fn head(spec: &MetricSpec) -> String {
    format!("# HELP {0} {1}\n# TYPE {0} {2}\n", spec.name, spec.help, spec.kind.as_str())
}

/// A label value, escaped for the Prometheus text format.
fn escaped(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use jackstay_sys::utc::wall_clock;

    #[test]
    fn render_process_reports_every_metric_of_this_process() {
        let text = render_process(wall_clock());
        let value = |spec: &MetricSpec| -> f64 {
            let line = text.lines().find(|line| line.starts_with(&format!("{} ", spec.name)));
            line.and_then(|line| line.split_once(' ')?.1.parse().ok()).expect(spec.name)
        };
        assert!(value(&names::PROCESS_CPU) > 0.0);
        assert!(value(&names::PROCESS_THREADS) >= 1.0);
        assert!(value(&names::PROCESS_OPEN_FDS) >= 3.0);
        assert!(value(&names::PROCESS_MAX_FDS) > value(&names::PROCESS_OPEN_FDS));
        assert!(value(&names::PROCESS_RESIDENT_MEMORY) > 1e6);
        assert!(value(&names::PROCESS_VIRTUAL_MEMORY) > value(&names::PROCESS_RESIDENT_MEMORY));
        assert!(value(&names::PROCESS_START_TIME) > 1.7e9);
    }

    #[test]
    fn certificate_expiry_series_exists_while_its_handle_does() {
        let all = CertificateExpiries::default();
        assert_eq!(all.render(), "");
        let old = all.handle("serving", "a\"b");
        old.set(UNIX_EPOCH + Duration::from_secs(7));
        let series =
            r#"jackstay_certificate_expiry_timestamp_seconds{kind="serving",name="a\"b"} "#;
        assert!(all.render().contains(&format!("{series}7\n")), "{}", all.render());
        let new = all.handle("serving", "a\"b");
        new.set(UNIX_EPOCH + Duration::from_secs(9));
        drop(old);
        assert!(all.render().contains(&format!("{series}9\n")), "{}", all.render());
        drop(new);
        assert_eq!(all.render(), "");
    }
}

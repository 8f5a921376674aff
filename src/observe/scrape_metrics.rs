//! Metrics whose values are read at each scrape: the process itself, and when certificates expire.
//!
//! The registry cannot hold them: its counters are integers, but CPU time has fractions; and it cannot
//! remove the series of a certificate that is no longer in use.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::process::{Resource, getrlimit};
use rustix::time::{ClockId, clock_gettime};

use super::lock;
use super::names::{self, MetricSpec};

/// The validity of one certificate in use, and whether its files could be read. Its series end when the last handle
/// is dropped.
#[derive(Debug, Default)]
pub struct CertificateExpiry {
    /// Seconds since 1970; 0 until they are set.
    not_before: AtomicU64,
    not_after: AtomicU64,
    reload: AtomicU8,
}

/// Values of [`CertificateExpiry::reload`].
const NOT_READ: u8 = 0;
const READ: u8 = 1;
const FAILED: u8 = 2;

impl CertificateExpiry {
    /// Records the validity of the certificate, from its first to its last second.
    pub fn set(&self, not_before: SystemTime, not_after: SystemTime) {
        let seconds =
            |time: SystemTime| time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        self.not_before.store(seconds(not_before), Ordering::Relaxed);
        self.not_after.store(seconds(not_after), Ordering::Relaxed);
    }

    /// Records whether the present content of the files is in use.
    pub fn set_reloaded(&self, ok: bool) {
        self.reload.store(if ok { READ } else { FAILED }, Ordering::Relaxed);
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

    /// The families as Prometheus text; empty if no certificate is configured.
    pub(super) fn render(&self) -> String {
        let (mut expiry, mut not_before, mut reload) = (Vec::new(), Vec::new(), Vec::new());
        for ((kind, name), handle) in lock(&self.0).iter() {
            let Some(handle) = handle.upgrade() else { continue };
            let labels = vec![(*kind).to_owned(), name.clone()];
            let not_after = handle.not_after.load(Ordering::Relaxed);
            if not_after > 0 {
                expiry.push((labels.clone(), not_after));
                not_before.push((labels.clone(), handle.not_before.load(Ordering::Relaxed)));
            }
            match handle.reload.load(Ordering::Relaxed) {
                NOT_READ => {}
                state => reload.push((labels, u64::from(state == READ))),
            }
        }
        family(&names::CERTIFICATE_EXPIRY, &expiry)
            + &family(&names::CERTIFICATE_NOT_BEFORE, &not_before)
            + &family(&names::CERTIFICATE_RELOAD_OK, &reload)
    }
}

/// What a scrape shows of the configuration in force. The series end with what they describe.
#[derive(Debug, Default)]
pub struct ConfiguredSeries {
    /// Name, mode and default upstream of each listener.
    pub listeners: Vec<[String; 3]>,
    /// Name and number of usable endpoints of each upstream.
    pub usable_endpoints: Vec<(String, usize)>,
}

impl ConfiguredSeries {
    /// The families as Prometheus text.
    pub(super) fn render(&self) -> String {
        let listeners: Vec<_> = self.listeners.iter().map(|labels| (labels.to_vec(), 1)).collect();
        let usable = self.usable_endpoints.iter();
        let usable: Vec<_> =
            usable.map(|(name, count)| (vec![name.clone()], *count as u64)).collect();
        family(&names::LISTENER_INFO, &listeners) + &family(&names::USABLE_ENDPOINTS, &usable)
    }
}

/// A family as Prometheus text; empty without series. `series` are the values of the labels, in the order of the
/// table, and the value.
fn family(spec: &MetricSpec, series: &[(Vec<String>, u64)]) -> String {
    if series.is_empty() {
        return String::new();
    }
    let mut text = head(spec);
    for (values, value) in series {
        let labels = spec.labels.iter().zip(values);
        let labels: Vec<_> =
            labels.map(|(key, value)| format!("{key}=\"{}\"", escaped(value))).collect();
        let _ = writeln!(text, "{}{{{}}} {value}", spec.name, labels.join(","));
    }
    text + "\n"
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
        old.set(UNIX_EPOCH, UNIX_EPOCH + Duration::from_secs(7));
        let series =
            r#"jackstay_certificate_expiry_timestamp_seconds{kind="serving",name="a\"b"} "#;
        assert!(all.render().contains(&format!("{series}7\n")), "{}", all.render());
        let new = all.handle("serving", "a\"b");
        new.set(UNIX_EPOCH + Duration::from_secs(8), UNIX_EPOCH + Duration::from_secs(9));
        drop(old);
        assert!(all.render().contains(&format!("{series}9\n")), "{}", all.render());
        let begin =
            r#"jackstay_certificate_not_before_timestamp_seconds{kind="serving",name="a\"b"} 8"#;
        assert!(all.render().contains(begin), "{}", all.render());
        drop(new);
        assert_eq!(all.render(), "");
    }

    #[test]
    fn certificate_reload_series_shows_a_failure_of_files_that_were_never_read() {
        let all = CertificateExpiries::default();
        let handle = all.handle("identity", "/k.pem");
        assert_eq!(all.render(), "");
        let series =
            r#"jackstay_certificate_last_reload_successful{kind="identity",name="/k.pem"} "#;
        for (ok, value) in [(false, 0), (true, 1), (false, 0)] {
            handle.set_reloaded(ok);
            let text = all.render();
            assert!(text.contains(&format!("{series}{value}\n")), "{text}");
            assert!(!text.contains("timestamp"), "no certificate is in use: {text}");
        }
    }
}

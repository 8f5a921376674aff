//! What each source of endpoints last said: for `/status`, `/readyz`, metrics, and for the client
//! that asks while no endpoint is known at all.
//!
//! The control plane writes it, everybody may read it. It holds words about endpoints, never the
//! endpoints themselves.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

use crate::observe::Metrics;
use crate::observe::events::{Change, Kind};
use crate::observe::utc::Utc;

/// Where endpoints come from. The order is that of trust in the name to verify: what the operator
/// wrote wins over what was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Source {
    /// IP addresses in the configuration.
    Static,
    /// `endpoints_file`.
    File,
    /// Names in the configuration.
    Dns,
    /// `EndpointSlices` of `default/kubernetes`.
    Slices,
    /// What we wrote to disk ourselves.
    State,
}

impl Source {
    /// Every source.
    pub const ALL: [Self; 5] = [Self::Static, Self::File, Self::Dns, Self::Slices, Self::State];

    /// Its name in logs, metrics, status and on disk.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Static => "static",
            Self::File => "file",
            Self::Dns => "dns",
            Self::Slices => "slices",
            Self::State => "state",
        }
    }

    /// The source of that name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|source| source.as_str() == name)
    }

    /// Whether it finds endpoints, rather than being told them: its endpoints are the first choice,
    /// and those of the others a fallback.
    pub fn discovers(self) -> bool {
        matches!(self, Self::File | Self::Slices)
    }
}

/// What one source last said.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    /// When it last gave an answer that could be used.
    pub last_success: Option<SystemTime>,
    /// How many endpoints that answer has.
    pub endpoints: usize,
    /// Why it gives none now; what it said before stays.
    pub error: Option<String>,
    /// More to know, as the age of a file.
    pub note: Option<String>,
}

/// What all sources of one upstream last said.
#[derive(Debug)]
pub struct Sources {
    upstream: Arc<str>,
    metrics: Arc<Metrics>,
    reports: Mutex<BTreeMap<Source, Report>>,
}

impl Sources {
    /// No source yet.
    pub fn new(upstream: &Arc<str>, metrics: &Arc<Metrics>) -> Self {
        Self {
            upstream: Arc::clone(upstream),
            metrics: Arc::clone(metrics),
            reports: Mutex::default(),
        }
    }

    /// A source is configured; nothing is known of it yet.
    pub fn expect(&self, source: Source) {
        self.reports().entry(source).or_insert_with(|| {
            self.metrics.discovered(&self.upstream, source.as_str(), 0.0);
            Report::default()
        });
    }

    /// A source is not configured any longer.
    pub fn forget(&self, source: Source) {
        self.reports().remove(&source);
    }

    /// A source gave a good answer with so many endpoints.
    pub fn succeeded(&self, source: Source, endpoints: usize) {
        self.told(source, |report| report.endpoints = endpoints);
    }

    /// A source has nothing new, and says so: it lives.
    pub fn confirmed(&self, source: Source) {
        self.told(source, |_| ());
    }

    /// Whether the last that was heard of a source is a failure.
    pub fn is_failing(&self, source: Source) -> bool {
        self.reports().get(&source).is_some_and(|report| report.error.is_some())
    }

    /// How old what a source says is, or what else there is to know of it.
    pub fn note(&self, source: Source, note: String) {
        self.reports().entry(source).or_default().note = Some(note);
    }

    /// A source could not be asked, or what it said cannot be used.
    pub fn failed(&self, source: Source, error: &str) {
        self.metrics.discovery_failed(&self.upstream, source.as_str());
        let before = self.reports().entry(source).or_default().error.replace(error.to_owned());
        if before.as_deref() != Some(error) {
            let change = self.change(
                source,
                (if before.is_none() { "ok" } else { "failing" }, "failing"),
                error,
            );
            let change = Change { effect: "what it said before stays", bad: true, ..change };
            self.metrics.events().changed(&change);
        }
    }

    /// So many entries of a source are not taken, for a reason of a fixed list.
    pub fn refused(&self, source: Source, reason: &'static str, count: usize, words: &str) {
        self.metrics.discovery_refused(&self.upstream, source.as_str(), reason, count);
        let change = self.change(source, ("offered", "refused"), words);
        self.metrics.events().changed(&Change { effect: reason, bad: true, ..change });
    }

    /// What each source last said.
    pub fn reports(&self) -> MutexGuard<'_, BTreeMap<Source, Report>> {
        self.reports.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Why there may be no endpoint: what each failing source says, in one line.
    pub fn complaints(&self) -> String {
        let mut words = String::new();
        for (source, report) in self.reports().iter() {
            let why = match &report.error {
                Some(error) => error,
                None if report.last_success.is_none() => "no answer yet",
                None => continue,
            };
            let gap = if words.is_empty() { "" } else { "; " };
            let _ = write!(words, "{gap}{}: {why}", source.as_str());
        }
        words
    }

    /// For `/status`.
    pub fn status(&self, now: SystemTime) -> Vec<Value> {
        let reports = self.reports();
        let status = reports.iter().map(|(source, report)| {
            json!({
                "source": source.as_str(),
                "endpoints": report.endpoints,
                "last_success": report.last_success.map(|at| Utc(at).seconds()),
                "age_seconds": report.last_success.map(|at| age(at, now)),
                "error": report.error,
                "note": report.note,
            })
        });
        status.collect()
    }

    fn told(&self, source: Source, change: impl FnOnce(&mut Report)) {
        let now = SystemTime::now();
        let mut reports = self.reports();
        let report = reports.entry(source).or_default();
        report.last_success = Some(now);
        let recovered = report.error.take();
        change(report);
        drop(reports);
        let at = now.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
        self.metrics.discovered(&self.upstream, source.as_str(), at);
        if let Some(error) = recovered {
            let change = self.change(source, ("failing", "ok"), &error);
            self.metrics.events().changed(&Change { effect: "it answers again", ..change });
        }
    }

    fn change<'a>(
        &'a self,
        source: Source,
        states: (&'a str, &'a str),
        reason: &'a str,
    ) -> Change<'a> {
        Change {
            kind: Kind::Source,
            upstream: Some(&self.upstream),
            name: source.as_str(),
            detail: "",
            from: states.0,
            to: states.1,
            reason,
            effect: "",
            bad: false,
        }
    }
}

/// Whole seconds since then; 0 if a clock went back.
pub fn age(then: SystemTime, now: SystemTime) -> u64 {
    now.duration_since(then).unwrap_or_default().as_secs()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sources() -> Sources {
        Sources::new(&"u".into(), &Metrics::new())
    }

    #[test]
    fn a_name_is_read_back() {
        for source in Source::ALL {
            assert_eq!(Source::from_name(source.as_str()), Some(source));
        }
        assert_eq!(Source::from_name("gossip"), None);
    }

    #[test]
    fn what_fails_keeps_what_it_said_and_complains() {
        let sources = sources();
        assert_eq!(sources.complaints(), "");
        sources.expect(Source::Dns);
        sources.expect(Source::Static);
        sources.succeeded(Source::Static, 2);
        assert_eq!(sources.complaints(), "dns: no answer yet");
        sources.succeeded(Source::Dns, 3);
        assert_eq!(sources.complaints(), "");
        sources.failed(Source::Dns, "api.example.com: timed out");
        assert_eq!(sources.complaints(), "dns: api.example.com: timed out");
        assert_eq!(sources.reports()[&Source::Dns].endpoints, 3);
        sources.confirmed(Source::Dns);
        assert_eq!(sources.complaints(), "");
        let text = sources.metrics.render();
        assert!(
            text.contains("jackstay_discovery_errors_total{upstream=\"u\",source=\"dns\"} 1"),
            "{text}"
        );
        assert!(text.contains("timestamp_seconds{upstream=\"u\",source=\"static\"} 1"), "{text}");
        sources.forget(Source::Dns);
        assert_eq!(sources.status(SystemTime::now()).len(), 1);
    }
}

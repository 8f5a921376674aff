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
pub enum EndpointSource {
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

impl EndpointSource {
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
pub struct SourceReport {
    /// When it last gave an answer that could be used.
    pub last_success: Option<SystemTime>,
    /// How many endpoints that answer has.
    pub endpoints: usize,
    /// Why it cannot be asked now; what it said before stays.
    error: Option<String>,
    /// Why the last thing that it said cannot be used; what it said before stays.
    unusable: Option<String>,
    /// More to know, as the age of a file.
    pub note: Option<String>,
}

impl SourceReport {
    /// Why it gives no answer now that could be used.
    pub fn complaint(&self) -> Option<&str> {
        self.error.as_deref().or(self.unusable.as_deref())
    }
}

/// What all sources of one upstream last said.
#[derive(Debug)]
pub struct Sources {
    upstream: Arc<str>,
    metrics: Arc<Metrics>,
    reports: Mutex<BTreeMap<EndpointSource, SourceReport>>,
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
    pub fn expect(&self, source: EndpointSource) {
        self.reports().entry(source).or_insert_with(|| {
            self.metrics.discovered(&self.upstream, source.as_str(), 0.0);
            SourceReport::default()
        });
    }

    /// A source is not configured any longer.
    pub fn forget(&self, source: EndpointSource) {
        self.reports().remove(&source);
    }

    /// A source gave a good answer with so many endpoints; `but` is why it is not all of them.
    pub fn succeeded(&self, source: EndpointSource, endpoints: usize, but: Option<&str>) {
        if but.is_some() {
            self.metrics.discovery_failed(&self.upstream, source.as_str());
        }
        self.lives(source);
        self.report(source, |report| {
            report.last_success = Some(SystemTime::now());
            report.endpoints = endpoints;
            report.unusable = None;
            report.error = but.map(str::to_owned);
        });
    }

    /// A source has nothing new, and says so: it lives. If what it last said cannot be used, that
    /// is as bad as before.
    pub fn confirmed(&self, source: EndpointSource) {
        if self.reports().get(&source).is_some_and(|report| report.unusable.is_some()) {
            return self.report(source, |report| report.error = None);
        }
        self.lives(source);
        self.report(source, |report| {
            report.last_success = Some(SystemTime::now());
            report.error = None;
        });
    }

    /// Whether the last that was heard of a source is a failure.
    pub fn is_failing(&self, source: EndpointSource) -> bool {
        self.reports().get(&source).is_some_and(|report| report.complaint().is_some())
    }

    /// How old what a source says is, or what else there is to know of it.
    pub fn note(&self, source: EndpointSource, note: String) {
        self.reports().entry(source).or_default().note = Some(note);
    }

    /// A source could not be asked.
    pub fn failed(&self, source: EndpointSource, error: &str) {
        self.metrics.discovery_failed(&self.upstream, source.as_str());
        self.report(source, |report| report.error = Some(error.to_owned()));
    }

    /// What a source says cannot be used, until it says another thing.
    pub fn unusable(&self, source: EndpointSource, why: &str) {
        self.metrics.discovery_failed(&self.upstream, source.as_str());
        self.report(source, |report| {
            (report.error, report.unusable) = (None, Some(why.to_owned()));
        });
    }

    /// So many entries of a source are not taken, for a reason of a fixed list; `words` tell which
    /// ones, unless that was told before.
    pub fn refused(
        &self,
        source: EndpointSource,
        reason: &'static str,
        count: usize,
        words: Option<&str>,
    ) {
        self.metrics.discovery_refused(&self.upstream, source.as_str(), reason, count);
        let Some(words) = words else { return };
        let change = self.change(source, ("offered", "refused"), words);
        self.metrics.events().changed(&Change { effect: reason, bad: true, ..change });
    }

    /// What each source last said.
    pub fn reports(&self) -> MutexGuard<'_, BTreeMap<EndpointSource, SourceReport>> {
        self.reports.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Why there may be no endpoint: what each failing source says, in one line.
    pub fn complaints(&self) -> String {
        let mut words = String::new();
        for (source, report) in self.reports().iter() {
            let why = match report.complaint() {
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
                "error": report.complaint(),
                "note": report.note,
            })
        });
        status.collect()
    }

    /// Changes what is known of a source, and tells it if it complains of another thing than
    /// before, or no longer.
    fn report(&self, source: EndpointSource, change: impl FnOnce(&mut SourceReport)) {
        let mut reports = self.reports();
        let report = reports.entry(source).or_default();
        let before = report.complaint().map(str::to_owned);
        change(report);
        let now = report.complaint().map(str::to_owned);
        drop(reports);
        if now == before {
            return;
        }
        let was = if before.is_none() { "ok" } else { "failing" };
        let change = match (&now, &before) {
            (Some(error), _) => Change {
                effect: "what it said before stays",
                bad: true,
                ..self.change(source, (was, "failing"), error)
            },
            (None, error) => Change {
                effect: "it answers again",
                ..self.change(source, (was, "ok"), error.as_deref().unwrap_or_default())
            },
        };
        self.metrics.events().changed(&change);
    }

    /// A source gives answers that can be used.
    fn lives(&self, source: EndpointSource) {
        let at = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
        self.metrics.discovered(&self.upstream, source.as_str(), at);
    }

    fn change<'a>(
        &'a self,
        source: EndpointSource,
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
        for source in EndpointSource::ALL {
            assert_eq!(EndpointSource::from_name(source.as_str()), Some(source));
        }
        assert_eq!(EndpointSource::from_name("gossip"), None);
    }

    #[test]
    fn what_fails_keeps_what_it_said_and_complains() {
        let sources = sources();
        assert_eq!(sources.complaints(), "");
        sources.expect(EndpointSource::Dns);
        sources.expect(EndpointSource::Static);
        sources.succeeded(EndpointSource::Static, 2, None);
        assert_eq!(sources.complaints(), "dns: no answer yet");
        sources.succeeded(EndpointSource::Dns, 3, None);
        assert_eq!(sources.complaints(), "");
        sources.failed(EndpointSource::Dns, "api.example.com: timed out");
        assert_eq!(sources.complaints(), "dns: api.example.com: timed out");
        assert_eq!(sources.reports()[&EndpointSource::Dns].endpoints, 3);
        sources.confirmed(EndpointSource::Dns);
        assert_eq!(sources.complaints(), "");
        let text = sources.metrics.render();
        assert!(
            text.contains("jackstay_discovery_errors_total{upstream=\"u\",source=\"dns\"} 1"),
            "{text}"
        );
        assert!(text.contains("timestamp_seconds{upstream=\"u\",source=\"static\"} 1"), "{text}");
        sources.forget(EndpointSource::Dns);
        assert_eq!(sources.status(SystemTime::now()).len(), 1);
    }
    #[test]
    fn what_cannot_be_used_is_not_good_because_its_source_lives() {
        let sources = sources();
        let told = || -> Vec<String> {
            let events = sources.metrics.events().last(usize::MAX);
            events.iter().map(|e| format!("{} {} {}", e.from, e.to, e.reason)).collect()
        };
        sources.succeeded(EndpointSource::Slices, 3, None);
        let good = sources.reports()[&EndpointSource::Slices].last_success;
        sources.unusable(EndpointSource::Slices, "empty");
        // A bookmark; a connection that is lost, and another one.
        sources.confirmed(EndpointSource::Slices);
        assert_eq!(sources.complaints(), "slices: empty");
        sources.failed(EndpointSource::Slices, "lost");
        assert_eq!(sources.complaints(), "slices: lost");
        sources.confirmed(EndpointSource::Slices);
        assert_eq!(sources.complaints(), "slices: empty");
        assert_eq!(sources.reports()[&EndpointSource::Slices].last_success, good);
        sources.succeeded(EndpointSource::Slices, 2, None);
        assert_eq!(sources.complaints(), "");
        let expected = [
            "ok failing empty",
            "failing failing lost",
            "failing failing empty",
            "failing ok empty",
        ];
        assert_eq!(told(), expected);
    }

    #[test]
    fn half_an_answer_is_told_once() {
        let sources = sources();
        for _ in 0..3 {
            sources.succeeded(EndpointSource::Dns, 1, Some("b: timed out"));
        }
        assert_eq!(sources.complaints(), "dns: b: timed out");
        assert_eq!(sources.reports()[&EndpointSource::Dns].endpoints, 1);
        let events = sources.metrics.events().last(usize::MAX);
        assert_eq!(events.iter().map(|e| e.times).collect::<Vec<_>>(), [1], "{events:?}");
        sources.succeeded(EndpointSource::Dns, 2, None);
        assert_eq!(sources.complaints(), "");
    }
}

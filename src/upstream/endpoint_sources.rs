//! The result of each source of endpoints: for `/status`, `/readyz`, metrics, and for the error text
//! of requests while no endpoint is known.
//!
//! The control plane writes it; all threads read it. It holds no endpoints, only counts and errors.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

use crate::observe::Metrics;
use crate::observe::events::{Change, EventKind};
use crate::observe::utc::{Utc, wall_clock};

/// Where endpoints come from. The order is that of trust in the name to verify: configured names win
/// over discovered ones.
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
    /// The state file that jackstay wrote.
    State,
}

impl EndpointSource {
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

    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|source| source.as_str() == name)
    }

    /// Whether it discovers endpoints: these are the first choice, and the configured ones a fallback.
    pub fn discovers(self) -> bool {
        matches!(self, Self::File | Self::Slices)
    }
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SourceReport {
    /// When it last gave a usable answer.
    pub last_success: Option<SystemTime>,
    /// How many endpoints that answer has.
    pub endpoints: usize,
    /// Why the last query failed; the last usable answer stays in use.
    error: Option<String>,
    /// Why its last answer is not usable; the one before stays in use.
    unusable: Option<String>,
    /// Further information, such as the age of a file.
    pub note: Option<String>,
}

impl SourceReport {
    /// Why it gives no usable answer now.
    pub fn current_error(&self) -> Option<&str> {
        self.error.as_deref().or(self.unusable.as_deref())
    }
}

/// The results of all sources of one upstream.
#[derive(Debug)]
pub struct Sources {
    upstream: Arc<str>,
    metrics: Arc<Metrics>,
    reports: Mutex<BTreeMap<EndpointSource, SourceReport>>,
}

impl Sources {
    pub fn new(upstream: &Arc<str>, metrics: &Arc<Metrics>) -> Self {
        Self {
            upstream: Arc::clone(upstream),
            metrics: Arc::clone(metrics),
            reports: Mutex::default(),
        }
    }

    /// A source is configured and has not answered yet.
    pub fn expect(&self, source: EndpointSource) {
        self.reports().entry(source).or_insert_with(|| {
            self.metrics.discovered(&self.upstream, source.as_str(), 0.0);
            SourceReport::default()
        });
    }

    /// A source is no longer configured.
    pub fn forget(&self, source: EndpointSource) {
        self.reports().remove(&source);
    }

    /// A source gave a usable answer with this many endpoints; `partial_error` says why some may be
    /// missing.
    pub fn succeeded(&self, source: EndpointSource, endpoints: usize, partial_error: Option<&str>) {
        if partial_error.is_some() {
            self.metrics.discovery_failed(&self.upstream, source.as_str());
        }
        self.lives(source);
        self.report(source, |report| {
            report.last_success = Some(wall_clock());
            report.endpoints = endpoints;
            report.unusable = None;
            report.error = partial_error.map(str::to_owned);
        });
    }

    /// A source answered that nothing has changed. If its last answer is not usable, that remains.
    pub fn confirmed(&self, source: EndpointSource) {
        if self.reports().get(&source).is_some_and(|report| report.unusable.is_some()) {
            return self.report(source, |report| report.error = None);
        }
        self.lives(source);
        self.report(source, |report| {
            report.last_success = Some(wall_clock());
            report.error = None;
        });
    }

    /// Whether the last result of a source is an error.
    pub fn is_failing(&self, source: EndpointSource) -> bool {
        self.reports().get(&source).is_some_and(|report| report.current_error().is_some())
    }

    /// Further information about a source, such as the age of its answer.
    pub fn note(&self, source: EndpointSource, note: String) {
        self.reports().entry(source).or_default().note = Some(note);
    }

    /// A query of a source failed.
    pub fn failed(&self, source: EndpointSource, error: &str) {
        self.metrics.discovery_failed(&self.upstream, source.as_str());
        self.report(source, |report| report.error = Some(error.to_owned()));
    }

    /// The answer of a source is not usable, until it gives another one.
    pub fn unusable(&self, source: EndpointSource, why: &str) {
        self.metrics.discovery_failed(&self.upstream, source.as_str());
        self.report(source, |report| {
            (report.error, report.unusable) = (None, Some(why.to_owned()));
        });
    }

    /// This many entries of a source were refused, for a reason of a fixed list; `entries` names them
    /// unless they were logged before.
    pub fn refused(
        &self,
        source: EndpointSource,
        reason: &'static str,
        count: usize,
        entries: Option<&str>,
    ) {
        self.metrics.discovery_refused(&self.upstream, source.as_str(), reason, count);
        let Some(entries) = entries else { return };
        let change = self.change(source, ("offered", "refused"), entries);
        self.metrics.events().changed(&Change { effect: reason, bad: true, ..change });
    }

    pub fn reports(&self) -> MutexGuard<'_, BTreeMap<EndpointSource, SourceReport>> {
        self.reports.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The error of each failing source, in one line.
    pub fn current_errors(&self) -> String {
        let mut text = String::new();
        for (source, report) in self.reports().iter() {
            let why = match report.current_error() {
                Some(error) => error,
                None if report.last_success.is_none() => "no answer yet",
                None => continue,
            };
            let gap = if text.is_empty() { "" } else { "; " };
            let _ = write!(text, "{gap}{}: {why}", source.as_str());
        }
        text
    }

    pub fn status(&self, now: SystemTime) -> Vec<Value> {
        let reports = self.reports();
        let status = reports.iter().map(|(source, report)| {
            json!({
                "source": source.as_str(),
                "endpoints": report.endpoints,
                "last_success": report.last_success.map(|at| Utc(at).seconds()),
                "age_seconds": report.last_success.map(|at| age(at, now)),
                "error": report.current_error(),
                "note": report.note,
            })
        });
        status.collect()
    }

    /// Changes the result of a source, and logs an error that is new or over.
    fn report(&self, source: EndpointSource, change: impl FnOnce(&mut SourceReport)) {
        let mut reports = self.reports();
        let report = reports.entry(source).or_default();
        let before = report.current_error().map(str::to_owned);
        change(report);
        let now = report.current_error().map(str::to_owned);
        let answered = report.last_success.is_some();
        let others = others_in_use(&reports, source);
        drop(reports);
        if now == before {
            return;
        }
        let was = match before {
            Some(_) => "failing",
            None if answered => "ok",
            None => "unknown",
        };
        let without_answer = format!("never answered; {others}");
        let change = match (&now, &before) {
            (Some(error), _) => Change {
                effect: if answered { "its last answer stays in use" } else { &without_answer },
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

    /// A source gave a usable answer.
    fn lives(&self, source: EndpointSource) {
        let at = wall_clock().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
        self.metrics.discovered(&self.upstream, source.as_str(), at);
    }

    fn change<'a>(
        &'a self,
        source: EndpointSource,
        states: (&'a str, &'a str),
        reason: &'a str,
    ) -> Change<'a> {
        Change {
            kind: EventKind::Source,
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

/// The sources other than `source` that have endpoints, as text.
fn others_in_use(
    reports: &BTreeMap<EndpointSource, SourceReport>,
    source: EndpointSource,
) -> String {
    let others = reports.iter().filter(|(other, report)| **other != source && report.endpoints > 0);
    let names: Vec<_> = others.map(|(other, _)| other.as_str()).collect();
    match names[..] {
        [] => "no other source has endpoints".to_owned(),
        _ => format!("endpoints in use come from: {}", names.join(", ")),
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
    fn endpoint_source_is_parsed_from_its_name() {
        for source in EndpointSource::ALL {
            assert_eq!(EndpointSource::from_name(source.as_str()), Some(source));
        }
        assert_eq!(EndpointSource::from_name("gossip"), None);
    }

    #[test]
    fn failed_source_keeps_its_endpoints_and_reports_the_error() {
        let sources = sources();
        assert_eq!(sources.current_errors(), "");
        sources.expect(EndpointSource::Dns);
        sources.expect(EndpointSource::Static);
        sources.succeeded(EndpointSource::Static, 2, None);
        assert_eq!(sources.current_errors(), "dns: no answer yet");
        sources.succeeded(EndpointSource::Dns, 3, None);
        assert_eq!(sources.current_errors(), "");
        sources.failed(EndpointSource::Dns, "api.example.com: timed out");
        assert_eq!(sources.current_errors(), "dns: api.example.com: timed out");
        assert_eq!(sources.reports()[&EndpointSource::Dns].endpoints, 3);
        sources.confirmed(EndpointSource::Dns);
        assert_eq!(sources.current_errors(), "");
        let text = sources.metrics.render();
        assert!(
            text.contains("jackstay_discovery_errors_total{upstream=\"u\",source=\"dns\"} 1"),
            "{text}"
        );
        assert!(text.contains("timestamp_seconds{upstream=\"u\",source=\"static\"} 1"), "{text}");
        sources.forget(EndpointSource::Dns);
        assert_eq!(sources.status(wall_clock()).len(), 1);
    }
    #[test]
    fn unusable_answer_stays_an_error_while_the_source_confirms_it() {
        let sources = sources();
        let logged = || -> Vec<String> {
            let events = sources.metrics.events().last(usize::MAX);
            events.iter().map(|e| format!("{} {} {}", e.from, e.to, e.reason)).collect()
        };
        sources.succeeded(EndpointSource::Slices, 3, None);
        let good = sources.reports()[&EndpointSource::Slices].last_success;
        sources.unusable(EndpointSource::Slices, "empty");
        // A bookmark; a lost connection, and another one.
        sources.confirmed(EndpointSource::Slices);
        assert_eq!(sources.current_errors(), "slices: empty");
        sources.failed(EndpointSource::Slices, "lost");
        assert_eq!(sources.current_errors(), "slices: lost");
        sources.confirmed(EndpointSource::Slices);
        assert_eq!(sources.current_errors(), "slices: empty");
        assert_eq!(sources.reports()[&EndpointSource::Slices].last_success, good);
        sources.succeeded(EndpointSource::Slices, 2, None);
        assert_eq!(sources.current_errors(), "");
        let expected = [
            "ok failing empty",
            "failing failing lost",
            "failing failing empty",
            "failing ok empty",
        ];
        assert_eq!(logged(), expected);
    }

    #[test]
    fn partial_answer_is_logged_once() {
        let sources = sources();
        for _ in 0..3 {
            sources.succeeded(EndpointSource::Dns, 1, Some("b: timed out"));
        }
        assert_eq!(sources.current_errors(), "dns: b: timed out");
        assert_eq!(sources.reports()[&EndpointSource::Dns].endpoints, 1);
        let events = sources.metrics.events().last(usize::MAX);
        assert_eq!(events.iter().map(|e| e.times).collect::<Vec<_>>(), [1], "{events:?}");
        sources.succeeded(EndpointSource::Dns, 2, None);
        assert_eq!(sources.current_errors(), "");
    }
}

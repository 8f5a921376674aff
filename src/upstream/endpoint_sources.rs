//! A report on each source of endpoints, for `/status`, `/readyz` and metrics, and for the error text of
//! requests while no endpoint is known.
//!
//! The control plane writes the reports, and all threads read them. They contain no endpoints, but only
//! their number and errors.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use jackstay_sys::utc::{Utc, wall_clock};
use serde_json::{Value, json};

use crate::observe::Metrics;
use crate::observe::events::{Change, EventKind};
use jackstay_core::discovery::source::{EndpointSource, NO_ENDPOINT};

/// The report on one source.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SourceReport {
    /// When the source last gave or confirmed a usable answer.
    pub last_success: Option<SystemTime>,
    /// Number of endpoints in that answer.
    pub endpoints: usize,
    /// Why the last query failed. The last usable answer stays in use.
    error: Option<String>,
    /// Why the last answer is not usable. The previous one stays in use.
    unusable: Option<String>,
    /// Further information, such as the age of a file.
    pub note: Option<String>,
}

impl SourceReport {
    /// Why the source gives no usable answer now.
    pub fn current_error(&self) -> Option<&str> {
        self.error.as_deref().or(self.unusable.as_deref())
    }
}

/// Why entries of a source are refused; a label of the metric that counts them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum RejectReason {
    /// They are not addresses of apiservers.
    Invalid,
    /// They are addresses of this process, so that requests would loop.
    OwnAddress,
    /// The answer as a whole has no usable endpoint.
    Empty,
    /// They exceed the maximum number of endpoints.
    TooMany,
}

impl RejectReason {
    /// The label.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Invalid => "invalid",
            Self::OwnAddress => "own_address",
            Self::Empty => "empty",
            Self::TooMany => "too_many",
        }
    }
}

/// The reports on all sources of one upstream.
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

    /// Adds a configured source that has not answered yet.
    pub fn expect(&self, source: EndpointSource) {
        self.reports().entry(source).or_insert_with(|| {
            self.metrics.discovery_expected(&self.upstream, source.as_str());
            SourceReport::default()
        });
    }

    /// Removes a source that is no longer configured.
    pub fn forget(&self, source: EndpointSource) {
        self.reports().remove(&source);
    }

    /// Records a usable answer with this number of endpoints. `partial_error` is the reason why some may be
    /// missing.
    pub fn succeeded(&self, source: EndpointSource, endpoints: usize, partial_error: Option<&str>) {
        if partial_error.is_some() {
            self.metrics.discovery_failed(&self.upstream, source.as_str());
        }
        self.record_success_time(source);
        self.update(source, |report| {
            report.last_success = Some(wall_clock());
            report.endpoints = endpoints;
            report.unusable = None;
            report.error = partial_error.map(str::to_owned);
        });
    }

    /// Records that the last answer of a source is unchanged. If that answer is not usable, this error
    /// remains.
    pub fn confirmed(&self, source: EndpointSource) {
        if self.reports().get(&source).is_some_and(|report| report.unusable.is_some()) {
            return self.update(source, |report| report.error = None);
        }
        self.record_success_time(source);
        self.update(source, |report| {
            report.last_success = Some(wall_clock());
            report.error = None;
        });
    }

    /// Whether a source gives no usable answer now.
    pub fn is_failing(&self, source: EndpointSource) -> bool {
        self.reports().get(&source).is_some_and(|report| report.current_error().is_some())
    }

    /// Sets [`SourceReport::note`].
    pub fn note(&self, source: EndpointSource, note: String) {
        self.reports().entry(source).or_default().note = Some(note);
    }

    /// Records that a query of a source failed.
    pub fn failed(&self, source: EndpointSource, error: &str) {
        self.metrics.discovery_failed(&self.upstream, source.as_str());
        self.update(source, |report| report.error = Some(error.to_owned()));
    }

    /// Records that the answer of a source is not usable. This holds until it gives another one.
    pub fn unusable(&self, source: EndpointSource, reason: &str) {
        self.metrics.discovery_failed(&self.upstream, source.as_str());
        self.update(source, |report| {
            (report.error, report.unusable) = (None, Some(reason.to_owned()));
        });
    }

    /// Records that `count` entries of a source were refused. `entries` names them; it is `None` if they were logged
    /// before.
    pub fn refused(
        &self,
        source: EndpointSource,
        reason: RejectReason,
        count: usize,
        entries: Option<&str>,
    ) {
        let reason = reason.as_str();
        self.metrics.discovery_refused(&self.upstream, source.as_str(), reason, count);
        let Some(entries) = entries else { return };
        let change = self.change(source, ("offered", "refused"), entries);
        self.metrics.events().changed(&Change { effect: reason, bad: true, ..change });
    }

    pub fn reports(&self) -> MutexGuard<'_, BTreeMap<EndpointSource, SourceReport>> {
        self.reports.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Why the upstream has no endpoint, in one line.
    pub fn no_endpoint_reason(&self) -> String {
        match self.current_errors() {
            none if none.is_empty() => NO_ENDPOINT.to_owned(),
            errors => format!("{NO_ENDPOINT}; {errors}"),
        }
    }

    /// The errors of all sources that are failing or have not answered, in one line.
    pub fn current_errors(&self) -> String {
        let reports = self.reports();
        let errors = reports.iter().filter_map(|(source, report)| {
            let unanswered = report.last_success.is_none().then_some("no answer yet");
            let error = report.current_error().or(unanswered)?;
            Some(format!("{}: {error}", source.as_str()))
        });
        errors.collect::<Vec<_>>().join("; ")
    }

    /// The sources in `/status`.
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

    /// Changes the report on a source. Publishes an event if its current error has changed.
    fn update(&self, source: EndpointSource, change: impl FnOnce(&mut SourceReport)) {
        let mut reports = self.reports();
        let report = reports.entry(source).or_default();
        let previous = report.current_error().map(str::to_owned);
        change(report);
        let current = report.current_error().map(str::to_owned);
        let answered = report.last_success.is_some();
        let others = others_in_use(&reports, source);
        drop(reports);
        if current == previous {
            return;
        }
        let from = match previous {
            Some(_) => "failing",
            None if answered => "ok",
            None => "unknown",
        };
        let failing = current.is_some();
        let effect = match (failing, answered) {
            (false, _) => "it answers again".to_owned(),
            (true, true) => "its last answer stays in use".to_owned(),
            (true, false) => format!("never answered; {others}"),
        };
        let states = (from, if failing { "failing" } else { "ok" });
        let reason = current.or(previous).unwrap_or_default();
        let change = self.change(source, states, &reason);
        self.metrics.events().changed(&Change { effect: &effect, bad: failing, ..change });
    }

    /// Sets the metric of the time at which a source last gave or confirmed a usable answer.
    fn record_success_time(&self, source: EndpointSource) {
        let at = wall_clock().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
        self.metrics.discovered(&self.upstream, source.as_str(), at);
    }

    /// A change of a source from the first to the second of `states`.
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

/// Text that names the sources other than `source` that have endpoints.
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

/// Whole seconds from `then` to `now`; 0 if the clock was set back.
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
    fn failed_keeps_the_endpoints_and_reports_the_error() {
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
        let last_success = sources.reports()[&EndpointSource::Slices].last_success;
        sources.unusable(EndpointSource::Slices, "empty");
        // A bookmark confirms the answer, then the connection is lost and opened again.
        sources.confirmed(EndpointSource::Slices);
        assert_eq!(sources.current_errors(), "slices: empty");
        sources.failed(EndpointSource::Slices, "lost");
        assert_eq!(sources.current_errors(), "slices: lost");
        sources.confirmed(EndpointSource::Slices);
        assert_eq!(sources.current_errors(), "slices: empty");
        assert_eq!(sources.reports()[&EndpointSource::Slices].last_success, last_success);
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

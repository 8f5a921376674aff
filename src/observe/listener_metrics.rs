//! The metrics of a listener. The handles of frequent metrics are resolved once, so that counting a request
//! is an atomic addition; rare events are looked up in the registry.
//!
//! All workers share the handles, so gauges are incremented and decremented, never set.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use jackstay_core::admission::{Counted, Refusal};
use metrics::{Counter, Histogram};

use super::count_gauge::CountGauge;
use super::line_quota::LineQuota;
use super::log::ACCESS_TARGET;
use super::names::{self, VERBS};
use super::own_errors::OwnErrors;
use super::registry::Registry;

/// Status codes that Kubernetes and jackstay use. The counter of each of them is resolved once per verb;
/// that of another valid code is looked up in the registry for each request.
const CODES: [u16; 31] = [
    200, 201, 202, 204, 101, 206, 301, 302, 304, 307, 400, 401, 403, 404, 405, 406, 408, 409, 410,
    413, 414, 415, 422, 429, 431, 499, 500, 501, 502, 503, 504,
];

/// Status code recorded when the client left before a response head was sent.
///
/// nginx uses 499 for this too. A standard code would claim a response that was not sent, and `0` would
/// not match `code=~"4.."` on dashboards although the client ended the request.
pub const CLIENT_GONE: u16 = 499;

/// Access log lines per window of [`LineQuota`] about clients that left early.
const CLIENT_GONE_LINES: usize = 20;
/// Access log lines per window about other errors. During an outage each client causes some.
const ERROR_LINES: usize = 200;
/// Access log lines per window about all requests of clients without a configured identity, if all are logged.
const ALL_LINES: usize = 2_000;
/// Lines per window about watches of such clients that ended.
const WATCH_LINES: usize = 40;

/// The metrics of one listener.
#[derive(Debug)]
pub struct ListenerMetrics {
    name: String,
    registry: Arc<Registry>,
    requests: Box<[[OnceLock<Counter>; CODES.len()]; VERBS.len()]>,
    durations: [OnceLock<Histogram>; VERBS.len()],
    /// Requests in flight, watches and tunnels included.
    pub in_flight: CountGauge,
    /// Open watches.
    pub watches: CountGauge,
    /// Open upgraded connections.
    pub tunnels: CountGauge,
    /// Open client connections.
    pub connections: CountGauge,
    /// Errors that jackstay answered itself.
    pub own_errors: OwnErrors,
    /// Limits access log lines about clients that left early.
    pub client_gone_lines: LineQuota,
    /// Limits access log lines about other errors of clients without a configured identity.
    pub error_lines: LineQuota,
    /// Limits access log lines of clients without a configured identity, if all requests are logged.
    pub all_lines: LineQuota,
    /// Limits lines about watches of such clients that ended.
    pub watch_lines: LineQuota,
}

impl ListenerMetrics {
    pub(super) fn register(registry: &Arc<Registry>, name: &str) -> Self {
        let gauge = |spec| CountGauge::new(registry.gauge(spec, &[name]));
        Self {
            name: name.to_owned(),
            registry: Arc::clone(registry),
            requests: Box::new([const { [const { OnceLock::new() }; CODES.len()] }; VERBS.len()]),
            durations: [const { OnceLock::new() }; VERBS.len()],
            in_flight: gauge(&names::REQUESTS_IN_FLIGHT),
            watches: gauge(&names::WATCHES),
            tunnels: gauge(&names::TUNNELS),
            connections: gauge(&names::DOWNSTREAM_CONNECTIONS),
            own_errors: OwnErrors::register(registry, name),
            client_gone_lines: LineQuota::new(CLIENT_GONE_LINES),
            error_lines: LineQuota::new(ERROR_LINES),
            all_lines: LineQuota::new(ALL_LINES),
            watch_lines: LineQuota::new(WATCH_LINES),
        }
    }

    /// Logs how many lines were suppressed in a window that is over.
    pub(super) fn log_suppressed(&self, now: Instant) {
        let quotas = [
            (&self.client_gone_lines, "the client left"),
            (&self.error_lines, "errors of clients without a configured identity"),
            (&self.all_lines, "requests of clients without a configured identity"),
            (&self.watch_lines, "watches of clients without a configured identity that ended"),
        ];
        for (quota, reason) in quotas {
            let Some(suppressed) = quota.take_suppressed(now) else { continue };
            tracing::info!(
                target: ACCESS_TARGET,
                listener = self.name,
                reason,
                suppressed,
                "access log lines suppressed"
            );
        }
    }

    /// The name of the listener.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Counts a request that ended. `took` is `None` for a long-running request. So that a bug of the
    /// caller adds no label values, a verb that is not in [`VERBS`] counts as `other`, and a code outside
    /// 100..=599 as 500.
    pub fn finished(&self, verb: &'static str, code: u16, took: Option<Duration>) {
        let verb = VERBS.iter().position(|known| *known == verb).unwrap_or(VERBS.len() - 1);
        let code = if (100..=599).contains(&code) { code } else { 500 };
        if let Some(column) = CODES.iter().position(|known| *known == code) {
            self.requests[verb][column]
                .get_or_init(|| self.request_counter(verb, code))
                .increment(1);
        } else {
            self.request_counter(verb, code).increment(1);
        }
        if let Some(took) = took {
            self.durations[verb]
                .get_or_init(|| {
                    self.registry.histogram(&names::REQUEST_DURATION, &[&self.name, VERBS[verb]])
                })
                .record(took.as_secs_f64());
        }
    }

    /// Counts a response that ended early because of `side`: `client`, `upstream` or `jackstay`.
    pub fn cut(&self, side: &'static str) {
        self.registry.count(&names::RESPONSES_CUT, &[&self.name, side], 1);
    }

    /// Counts a connection that was closed with `ENHANCE_YOUR_CALM`, by the kind of frames of which the client
    /// had sent too many.
    pub fn closed_for_frames(&self, frame: &'static str) {
        self.registry.count(&names::CLOSED_FOR_FRAMES, &[&self.name, frame], 1);
    }

    /// Counts an open connection until the guard is dropped.
    pub fn count_connection(self: &Arc<Self>) -> CountedConnection {
        self.connections.increment(1);
        CountedConnection(Arc::clone(self))
    }

    /// Counts a client connection that was refused, or closed for another one, unless another metric counts it.
    pub fn refused(&self, refusal: Refusal) {
        if let Counted::Connection(reason) = refusal.counted() {
            self.registry.count(&names::DOWNSTREAM_REFUSED, &[&self.name, reason], 1);
        }
    }

    /// Counts a re-read of certificate, key or CA files: `ok` or `failed`.
    pub fn certificate_reloaded(&self, outcome: &'static str) {
        self.registry.count(&names::CERTIFICATE_RELOADS, &[&self.name, outcome], 1);
    }

    /// Counts a client's certificate chain: verified (`ok`, `failed`), already verified on another
    /// connection (`known`), or refused because too many chains waited for verification (`busy`).
    pub fn client_verified(&self, outcome: &'static str) {
        self.registry.count(&names::CLIENT_VERIFICATIONS, &[&self.name, outcome], 1);
    }

    /// Copies the gauges into the registry, before a scrape.
    pub(super) fn publish(&self) {
        for gauge in [&self.in_flight, &self.watches, &self.tunnels, &self.connections] {
            gauge.publish();
        }
    }

    fn request_counter(&self, verb: usize, code: u16) -> Counter {
        self.registry.counter(&names::REQUESTS, &[&self.name, VERBS[verb], &code.to_string()])
    }
}

/// Counts an open connection.
#[derive(Debug)]
pub struct CountedConnection(Arc<ListenerMetrics>);

impl Drop for CountedConnection {
    fn drop(&mut self) {
        self.0.connections.decrement(1);
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Metrics, assert_line};
    use super::*;

    #[test]
    fn finished_counts_by_verb_and_code_within_the_known_values() {
        let metrics = Metrics::new();
        let listener = metrics.listener("a");
        for _ in 0..3 {
            listener.finished("get", 200, None);
        }
        listener.finished("get", 418, None);
        listener.finished("get", 7, None);
        listener.finished("made up", 200, None);
        assert_line(&metrics, r#"jackstay_requests_total{listener="a",verb="get",code="200"} 3"#);
        assert_line(&metrics, r#"jackstay_requests_total{listener="a",verb="get",code="418"} 1"#);
        assert_line(&metrics, r#"jackstay_requests_total{listener="a",verb="get",code="500"} 1"#);
        assert_line(&metrics, r#"jackstay_requests_total{listener="a",verb="other",code="200"} 1"#);
        assert!(!metrics.render().contains("jackstay_request_duration_seconds_count"));
    }

    #[test]
    fn metrics_returns_the_same_handles_for_the_same_name() {
        let metrics = Metrics::new();
        assert!(Arc::ptr_eq(&metrics.listener("a"), &metrics.listener("a")));
        assert!(Arc::ptr_eq(&metrics.endpoint("u", "a"), &metrics.endpoint("u", "a")));
    }
}

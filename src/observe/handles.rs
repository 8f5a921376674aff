//! Metric handles resolved once, so that counting on the path of a request is an atomic addition.
//!
//! Workers share them: levels and gauges are only incremented and decremented, never set, and whatever a
//! worker added to one it takes away when it drops its guard. So an endpoint that leaves is back
//! at zero without anybody remembering to reset it.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use metrics::{Counter, Gauge, Histogram};
use tokio::time::Instant;

use super::events::{Change, Events};
use super::history::History;
use super::level::Level;
use super::log::ACCESS_TARGET;
use super::metrics::Registry;
use super::names::{self, CONNECTION_STATES, ENDPOINT_STATES, VERBS};
use super::own_errors::OwnErrors;
use super::quota::LineQuota;

/// Status codes that Kubernetes and we use; each has its own cell beside every verb. Any other
/// valid code is counted as well, by way of the registry.
const CODES: [u16; 30] = [
    200, 201, 202, 204, 101, 206, 301, 302, 304, 307, 400, 401, 403, 404, 405, 406, 408, 409, 410,
    413, 415, 422, 429, 431, 499, 500, 501, 502, 503, 504,
];

/// Status code recorded when the client left before it had a response head.
///
/// nginx's 499: a real status would claim an answer that nobody saw, and `0` would fall out of
/// every `code=~"4.."` on dashboards although leaving is the client's doing.
pub const CLIENT_GONE: u16 = 499;

/// What one listener counts.
pub struct ListenerMetrics {
    name: String,
    registry: Arc<Registry>,
    requests: Box<[[OnceLock<Counter>; CODES.len()]; VERBS.len()]>,
    durations: [OnceLock<Histogram>; VERBS.len()],
    /// Requests that run now.
    pub in_flight: Level,
    /// Watches that run now.
    pub watches: Level,
    /// Upgraded connections that run now.
    pub tunnels: Level,
    /// Client connections that are open now: increment on accept, decrement on close.
    pub connections: Level,
    /// Errors that were answered here and not by an apiserver.
    pub own_errors: OwnErrors,
    /// Access-log lines about clients that left.
    pub client_gone_lines: LineQuota,
}

impl std::fmt::Debug for ListenerMetrics {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ListenerMetrics").field("name", &self.name).finish_non_exhaustive()
    }
}

impl ListenerMetrics {
    pub(super) fn register(registry: &Arc<Registry>, name: &str) -> Self {
        let level = |spec| Level::new(registry.gauge(spec, &[name]));
        Self {
            name: name.to_owned(),
            registry: Arc::clone(registry),
            requests: Box::new([const { [const { OnceLock::new() }; CODES.len()] }; VERBS.len()]),
            durations: [const { OnceLock::new() }; VERBS.len()],
            in_flight: level(&names::REQUESTS_IN_FLIGHT),
            watches: level(&names::WATCHES),
            tunnels: level(&names::TUNNELS),
            connections: level(&names::DOWNSTREAM_CONNECTIONS),
            own_errors: OwnErrors::register(registry, name),
            client_gone_lines: LineQuota::default(),
        }
    }

    /// Logs how many access-log lines were suppressed, once it is known.
    pub(super) fn log_suppressed(&self, now: Instant) {
        if let Some(suppressed) = self.client_gone_lines.take_suppressed(now) {
            tracing::info!(
                target: ACCESS_TARGET,
                listener = self.name,
                reason = "the client left",
                suppressed,
                "repeated requests suppressed"
            );
        }
    }

    /// Name of the listener.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// A request ended; `took` is `None` for a long-running one. A verb that is not in
    /// [`VERBS`] counts as `other`, a code outside 100..=599 as 500: both are bugs of the caller
    /// and neither may grow the label values.
    pub fn finished(&self, verb: &'static str, code: u16, took: Option<Duration>) {
        let verb = verb_index(verb);
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

    /// An answer ended after its head and before its end because of `side`.
    pub fn cut(&self, side: &'static str) {
        self.registry.counter(&names::RESPONSES_CUT, &[&self.name, side]).increment(1);
    }

    /// A client connection was closed before its first request: `cap`, `handshake`, `timeout`, ….
    pub fn refused(&self, reason: &'static str) {
        self.registry.counter(&names::DOWNSTREAM_REFUSED, &[&self.name, reason]).increment(1);
    }

    /// A certificate, key or CA file was read again: `ok` or `failed`.
    pub fn certificate_reloaded(&self, outcome: &'static str) {
        self.registry.counter(&names::CERTIFICATE_RELOADS, &[&self.name, outcome]).increment(1);
    }

    /// A client's certificate chain was verified: `ok` or `failed`; was `known` from another
    /// connection; or could not be verified, since too many waited (`busy`).
    pub fn client_verified(&self, outcome: &'static str) {
        self.registry.counter(&names::CLIENT_VERIFICATIONS, &[&self.name, outcome]).increment(1);
    }

    /// Copies what is counted here into the registry, before a scrape.
    pub(super) fn publish(&self) {
        for level in [&self.in_flight, &self.watches, &self.tunnels, &self.connections] {
            level.publish();
        }
    }

    fn request_counter(&self, verb: usize, code: u16) -> Counter {
        self.registry.counter(&names::REQUESTS, &[&self.name, VERBS[verb], &code.to_string()])
    }
}

/// Row of a verb. A `match` compares length first, which beats walking the table.
fn verb_index(verb: &str) -> usize {
    match verb {
        "get" => 0,
        "list" => 1,
        "watch" => 2,
        "create" => 3,
        "update" => 4,
        "patch" => 5,
        "delete" => 6,
        "deletecollection" => 7,
        "connect" => 8,
        "proxy" => 9,
        "post" => 10,
        "put" => 11,
        "head" => 12,
        "options" => 13,
        "log" => 14,
        _ => VERBS.len() - 1,
    }
}

/// What one endpoint of an upstream counts.
pub struct EndpointMetrics {
    upstream: String,
    endpoint: Arc<str>,
    registry: Arc<Registry>,
    states: [Gauge; ENDPOINT_STATES.len()],
    connections: [Gauge; CONNECTION_STATES.len()],
    rtt: Histogram,
    answers: [Counter; 2],
    history: History,
    events: Arc<Events>,
    flows: Gauge,
}

impl std::fmt::Debug for EndpointMetrics {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EndpointMetrics").field("endpoint", &self.endpoint).finish_non_exhaustive()
    }
}

impl EndpointMetrics {
    pub(super) fn register(
        registry: &Arc<Registry>,
        events: &Arc<Events>,
        upstream: &str,
        endpoint: &str,
    ) -> Self {
        let gauge = |spec, state| registry.gauge(spec, &[upstream, endpoint, state]);
        Self {
            upstream: upstream.to_owned(),
            endpoint: Arc::from(endpoint),
            registry: Arc::clone(registry),
            states: ENDPOINT_STATES.map(|state| gauge(&names::ENDPOINT_STATE, state)),
            connections: CONNECTION_STATES.map(|state| gauge(&names::CONNECTIONS, state)),
            rtt: registry.histogram(&names::PING_RTT, &[upstream, endpoint]),
            answers: ["ok", "error"]
                .map(|outcome| registry.counter(&names::ANSWERS, &[upstream, endpoint, outcome])),
            history: History::default(),
            events: Arc::clone(events),
            flows: registry.gauge(&names::PASSTHROUGH_FLOWS, &[upstream, endpoint]),
        }
    }

    /// The label value, which the outcome of a request borrows for its access log line.
    pub fn label(&self) -> &Arc<str> {
        &self.endpoint
    }

    /// The calling worker's view of the endpoint's state; in none until `set`.
    pub fn state_gauge(self: &Arc<Self>) -> EndpointStateGauge {
        EndpointStateGauge { metrics: Arc::clone(self), state: None }
    }

    /// One connection to the endpoint; in no state until `set`.
    pub fn connection_gauge(self: &Arc<Self>) -> ConnectionGauge {
        ConnectionGauge { metrics: Arc::clone(self), state: None }
    }

    /// The endpoint was taken out.
    pub fn ejected(&self, reason: &'static str) {
        self.count(&names::EJECTIONS, reason);
    }

    /// An attempt to connect ended: `ok`, `failed`, `timeout` or `no_h2`.
    pub fn dialled(&self, outcome: &'static str) {
        self.count(&names::DIALS, outcome);
    }

    /// A PING came back.
    pub fn rtt(&self, round_trip: Duration) {
        self.rtt.record(round_trip.as_secs_f64());
        self.history.rtt(round_trip);
    }

    /// An answer's head arrived, with this status.
    pub fn answered(&self, status: u16) {
        self.history.answered(status);
    }

    /// What it was like in the last minutes.
    pub fn history(&self) -> &History {
        &self.history
    }

    /// The endpoint or one of its connections changed its state.
    pub fn changed(&self, change: &Change<'_>) {
        self.events.changed(change);
    }

    /// The same, where it is part of everyday operation.
    pub fn routine(&self, change: &Change<'_>) {
        self.events.routine(change);
    }

    /// Copies what is counted here into the registry, before a scrape.
    pub(super) fn publish(&self) {
        let (all, errors) = self.history.totals();
        for (counter, value) in self.answers.iter().zip([all - errors, errors]) {
            counter.absolute(value);
        }
    }

    /// A passed connection leads there from now on.
    pub fn flow_opened(&self) {
        self.flows.increment(1);
    }

    /// It has ended.
    pub fn flow_closed(&self) {
        self.flows.decrement(1);
    }

    /// Bookmarks stay away on a watch there that had them.
    pub fn watch_stale(&self) {
        let labels = &[self.upstream.as_str(), &self.endpoint];
        self.registry.counter(&names::STALE_WATCHES, labels).increment(1);
    }

    fn count(&self, spec: &names::MetricSpec, value: &'static str) {
        self.registry.counter(spec, &[&self.upstream, &self.endpoint, value]).increment(1);
    }
}

macro_rules! state_guard {
    ($(#[$doc:meta])* $name:ident over $field:ident of $states:ident) => {
        $(#[$doc])*
        ///
        /// Counts in exactly one state, and in none once it is dropped.
        #[derive(Debug)]
        pub struct $name {
            metrics: Arc<EndpointMetrics>,
            state: Option<usize>,
        }

        impl $name {
            /// Moves to `state`; one that is not in the list counts nowhere.
            pub fn set(&mut self, state: &str) {
                let next = $states.iter().position(|known| *known == state);
                debug_assert!(next.is_some(), "no such state: {state}");
                self.go(next);
            }

            fn go(&mut self, next: Option<usize>) {
                if next == self.state {
                    return;
                }
                // The new one first: a scrape between the two sees one too many, never a gap.
                if let Some(index) = next {
                    self.metrics.$field[index].increment(1);
                }
                if let Some(index) = std::mem::replace(&mut self.state, next) {
                    self.metrics.$field[index].decrement(1);
                }
            }
        }

        impl Drop for $name {
            fn drop(&mut self) {
                self.go(None);
            }
        }
    };
}

state_guard! {
    /// The state of an endpoint in `jackstay_endpoint_state`.
    EndpointStateGauge over states of ENDPOINT_STATES
}
state_guard! {
    /// A connection in `jackstay_connections`.
    ConnectionGauge over connections of CONNECTION_STATES
}

#[cfg(test)]
mod tests {
    use super::super::Metrics;
    use super::*;

    fn has(metrics: &Metrics, line: &str) {
        let text = metrics.render();
        assert!(text.lines().any(|l| l == line), "no {line} in\n{text}");
    }

    #[test]
    fn verbs_know_their_row() {
        for (index, verb) in VERBS.iter().enumerate() {
            assert_eq!(verb_index(verb), index, "{verb}");
        }
        assert_eq!(VERBS[verb_index("no such verb")], "other");
    }

    #[test]
    fn requests_count_by_verb_and_code_and_nothing_else_gets_in() {
        let metrics = Metrics::new();
        let listener = metrics.listener("a");
        for _ in 0..3 {
            listener.finished("get", 200, None);
        }
        listener.finished("get", 418, None);
        listener.finished("get", 7, None);
        listener.finished("made up", 200, None);
        has(&metrics, r#"jackstay_requests_total{listener="a",verb="get",code="200"} 3"#);
        has(&metrics, r#"jackstay_requests_total{listener="a",verb="get",code="418"} 1"#);
        has(&metrics, r#"jackstay_requests_total{listener="a",verb="get",code="500"} 1"#);
        has(&metrics, r#"jackstay_requests_total{listener="a",verb="other",code="200"} 1"#);
        assert!(!metrics.render().contains("jackstay_request_duration_seconds_count"));
    }

    #[test]
    fn an_endpoint_that_leaves_is_back_at_zero() {
        let metrics = Metrics::new();
        let endpoint = metrics.endpoint("u", "e");
        let (mut one, mut two) = (endpoint.state_gauge(), endpoint.state_gauge());
        let mut connection = endpoint.connection_gauge();
        one.set("ready");
        two.set("ready");
        connection.set("live");
        has(&metrics, r#"jackstay_endpoint_state{upstream="u",endpoint="e",state="ready"} 2"#);
        two.set("ejected");
        connection.set("suspect");
        has(&metrics, r#"jackstay_endpoint_state{upstream="u",endpoint="e",state="ready"} 1"#);
        has(&metrics, r#"jackstay_connections{upstream="u",endpoint="e",state="live"} 0"#);
        has(&metrics, r#"jackstay_connections{upstream="u",endpoint="e",state="suspect"} 1"#);
        drop((one, two, connection));
        for line in metrics.render().lines().filter(|l| l.contains("state=")) {
            assert!(line.ends_with(" 0"), "{line}");
        }
    }

    #[test]
    fn a_listener_has_one_set_of_handles() {
        let metrics = Metrics::new();
        assert!(Arc::ptr_eq(&metrics.listener("a"), &metrics.listener("a")));
        assert!(Arc::ptr_eq(&metrics.endpoint("u", "a"), &metrics.endpoint("u", "a")));
    }
}

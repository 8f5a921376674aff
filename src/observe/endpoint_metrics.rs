//! The metrics of an endpoint, as handles that are resolved once.
//!
//! All workers share them. State gauges are guards: what a worker added is subtracted when it drops the
//! guard, so an endpoint that leaves returns to zero.

use std::sync::Arc;
use std::time::Duration;

use metrics::{Counter, Gauge, Histogram};

use super::events::{Change, Events};
use super::history::History;
use super::names::{self, CONNECTION_STATES, ENDPOINT_STATES};
use super::registry::Registry;

/// The metrics of one endpoint of an upstream.
#[derive(Debug)]
pub struct EndpointMetrics {
    upstream: String,
    endpoint: Arc<str>,
    registry: Arc<Registry>,
    states: Arc<[Gauge]>,
    connections: Arc<[Gauge]>,
    rtt: Histogram,
    answers: [Counter; 2],
    history: History,
    events: Arc<Events>,
    flows: Gauge,
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
            states: ENDPOINT_STATES.map(|state| gauge(&names::ENDPOINT_STATE, state)).into(),
            connections: CONNECTION_STATES.map(|state| gauge(&names::CONNECTIONS, state)).into(),
            rtt: registry.histogram(&names::PING_RTT, &[upstream, endpoint]),
            answers: ["ok", "error"]
                .map(|outcome| registry.counter(&names::ANSWERS, &[upstream, endpoint, outcome])),
            history: History::default(),
            events: Arc::clone(events),
            flows: registry.gauge(&names::PASSTHROUGH_FLOWS, &[upstream, endpoint]),
        }
    }

    /// The value of the label `endpoint`, which access log lines share.
    pub fn label(&self) -> &Arc<str> {
        &self.endpoint
    }

    /// The state of the endpoint as the calling worker sees it; none until `set`.
    pub fn state_gauge(&self) -> StateGauge {
        StateGauge { names: &ENDPOINT_STATES, gauges: Arc::clone(&self.states), state: None }
    }

    /// The state of one connection to the endpoint; none until `set`.
    pub fn connection_gauge(&self) -> StateGauge {
        StateGauge { names: &CONNECTION_STATES, gauges: Arc::clone(&self.connections), state: None }
    }

    /// Counts an ejection.
    pub fn ejected(&self, reason: &'static str) {
        self.count(&names::EJECTIONS, reason);
    }

    /// Counts an attempt to connect: `ok`, `failed`, `timeout`, `no_h2`, ….
    pub fn dialled(&self, outcome: &'static str) {
        self.count(&names::DIALS, outcome);
    }

    /// Records the round trip of a PING.
    pub fn rtt(&self, round_trip: Duration) {
        self.rtt.record(round_trip.as_secs_f64());
        self.history.rtt(round_trip);
    }

    /// Counts a response head with this status.
    pub fn answered(&self, status: u16) {
        self.history.answered(status);
    }

    /// Round trips and responses of the last ten minutes.
    pub fn history(&self) -> &History {
        &self.history
    }

    /// Logs and remembers a state change of the endpoint or of one of its connections.
    pub fn changed(&self, change: &Change<'_>) {
        self.events.changed(change);
    }

    /// Logs a routine state change at debug level.
    pub fn routine(&self, change: &Change<'_>) {
        self.events.routine(change);
    }

    /// Copies the response counts into the registry, before a scrape.
    pub(super) fn publish(&self) {
        let (all, errors) = self.history.totals();
        for (counter, value) in self.answers.iter().zip([all - errors, errors]) {
            counter.absolute(value);
        }
    }

    /// Counts a passthrough flow to the endpoint that has opened.
    pub fn flow_opened(&self) {
        self.flows.increment(1);
    }

    /// Counts a passthrough flow to the endpoint that has closed.
    pub fn flow_closed(&self) {
        self.flows.decrement(1);
    }

    /// Counts a watch whose bookmarks have stopped.
    pub fn watch_stale(&self) {
        let labels = &[self.upstream.as_str(), &self.endpoint];
        self.registry.counter(&names::STALE_WATCHES, labels).increment(1);
    }

    fn count(&self, spec: &names::MetricSpec, value: &'static str) {
        self.registry.counter(spec, &[&self.upstream, &self.endpoint, value]).increment(1);
    }
}

/// The state of one endpoint or one connection in a gauge that has a series for each state.
///
/// Counts in at most one state, and in none once it is dropped.
#[derive(Debug)]
pub struct StateGauge {
    names: &'static [&'static str],
    /// One for each name.
    gauges: Arc<[Gauge]>,
    state: Option<usize>,
}

impl StateGauge {
    /// Moves to `state`. A state that has no series is a bug and counts nowhere.
    pub fn set(&mut self, state: &str) {
        let next = self.names.iter().position(|known| *known == state);
        debug_assert!(next.is_some(), "no such state: {state}");
        self.move_to(next);
    }

    fn move_to(&mut self, next: Option<usize>) {
        if next == self.state {
            return;
        }
        // The new state first: a scrape in between sees one too many rather than a gap.
        if let Some(index) = next {
            self.gauges[index].increment(1);
        }
        if let Some(index) = std::mem::replace(&mut self.state, next) {
            self.gauges[index].decrement(1);
        }
    }
}

impl Drop for StateGauge {
    fn drop(&mut self) {
        self.move_to(None);
    }
}

#[cfg(test)]
mod tests {
    use super::super::Metrics;

    fn has(metrics: &Metrics, line: &str) {
        let text = metrics.render();
        assert!(text.lines().any(|l| l == line), "no {line} in\n{text}");
    }

    #[test]
    fn gauges_of_an_endpoint_return_to_zero_on_drop() {
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
}

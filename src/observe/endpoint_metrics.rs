//! The metrics of an endpoint, as handles that are resolved once and shared by all workers.
//!
//! State gauges are guards: dropping one subtracts what it added, so that the series of a removed endpoint
//! return to zero.

use std::sync::Arc;
use std::time::Duration;

use jackstay_core::line_pacing::BoundsChange;
use metrics::{Counter, Gauge, Histogram};

use super::events::Events;
use super::history::History;
use super::names::{self, CONNECTION_STATES, EJECTION_REASONS, ENDPOINT_STATES, UPSTREAM_FRAMES};
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
    kubernetes_minor: Gauge,
    ping_limit: Gauge,
    line_delay: Gauge,
}

impl EndpointMetrics {
    pub(super) fn register(
        registry: &Arc<Registry>,
        events: &Arc<Events>,
        upstream: &str,
        endpoint: &str,
    ) -> Self {
        let gauge = |spec, state| registry.gauge(spec, &[upstream, endpoint, state]);
        // Alerts query them, so they begin with 0; see `names`.
        for (counter, values) in [
            (&names::EJECTIONS, &EJECTION_REASONS[..]),
            (&names::UPSTREAM_FRAME_LIMIT, &UPSTREAM_FRAMES),
        ] {
            for value in values {
                registry.count(counter, &[upstream, endpoint, value], 0);
            }
        }
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
            kubernetes_minor: registry.gauge(&names::KUBERNETES_MINOR, &[upstream, endpoint]),
            ping_limit: registry.gauge(&names::PING_LIMIT, &[upstream, endpoint]),
            line_delay: registry.gauge(&names::LINE_DELAY, &[upstream, endpoint]),
        }
    }

    /// The value of the label `endpoint`, which access log lines share.
    pub fn label(&self) -> &Arc<str> {
        &self.endpoint
    }

    /// A gauge of the endpoint's state as the calling worker sees it. It counts in no state until it is set.
    pub fn state_gauge(&self) -> StateGauge {
        StateGauge { names: &ENDPOINT_STATES, gauges: Arc::clone(&self.states), state: None }
    }

    /// A gauge of the state of one connection to the endpoint. It counts in no state until it is set.
    pub fn connection_gauge(&self) -> StateGauge {
        StateGauge { names: &CONNECTION_STATES, gauges: Arc::clone(&self.connections), state: None }
    }

    /// Counts an ejection.
    pub fn ejected(&self, reason: &'static str) {
        debug_assert!(EJECTION_REASONS.contains(&reason), "no such reason: {reason}");
        self.count(&names::EJECTIONS, reason);
    }

    /// Counts an attempt to connect: `ok`, `failed`, `timeout`, `no_h2`, ….
    pub fn dialled(&self, outcome: &'static str) {
        self.count(&names::DIALS, outcome);
    }

    /// Counts a connection that was closed with `ENHANCE_YOUR_CALM`, by the kind of frames of which the
    /// apiserver had sent too many.
    pub fn closed_for_frames(&self, frame: &'static str) {
        debug_assert!(UPSTREAM_FRAMES.contains(&frame), "no such kind of frames: {frame}");
        self.count(&names::UPSTREAM_FRAME_LIMIT, frame);
    }

    /// The endpoint limits PINGs to one in this interval.
    pub fn ping_limit(&self, interval: Duration) {
        self.ping_limit.set(interval.as_secs_f64());
    }

    /// Deadlines are longer by `delay`, because the queue of a slow line is long.
    pub fn line_delay(&self, delay: Duration) {
        self.line_delay.set(delay.as_secs_f64());
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

    /// The state changes of the process, for those of the endpoint, its connections and its flows.
    pub fn events(&self) -> &Events {
        &self.events
    }

    /// Counts a change of the window of the streams of a connection.
    pub fn window_changed(&self, grown: bool) {
        self.count(&names::WINDOW_CHANGES, if grown { "grown" } else { "shrunk" });
    }

    /// Counts the directions of a connection that are bounded and were not before.
    pub fn paced(&self, change: BoundsChange) {
        for direction in change.begun() {
            self.count(&names::PACED, direction);
        }
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

    /// Sets the minor version of Kubernetes; 0 if it is unknown.
    pub fn kubernetes_minor(&self, minor: u16) {
        self.kubernetes_minor.set(f64::from(minor));
    }

    fn count(&self, spec: &names::MetricSpec, value: &'static str) {
        self.registry.count(spec, &[&self.upstream, &self.endpoint, value], 1);
    }
}

/// Counts one endpoint or one connection in the series of its state, until it is dropped.
#[derive(Debug)]
pub struct StateGauge {
    names: &'static [&'static str],
    /// In the order of `names`.
    gauges: Arc<[Gauge]>,
    state: Option<usize>,
}

impl StateGauge {
    /// Changes the state. A state without a series is a bug of the caller and is not counted.
    pub fn set(&mut self, state: &str) {
        let next = self.names.iter().position(|known| *known == state);
        debug_assert!(next.is_some(), "no such state: {state}");
        self.move_to(next);
    }

    fn move_to(&mut self, next: Option<usize>) {
        if next == self.state {
            return;
        }
        // The new state is counted first, so that a scrape in between sees one too many and not one too few.
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
    use super::super::{Metrics, assert_line};

    #[test]
    fn gauges_of_an_endpoint_return_to_zero_on_drop() {
        let metrics = Metrics::new();
        let endpoint = metrics.endpoint("u", "e");
        let (mut first, mut second) = (endpoint.state_gauge(), endpoint.state_gauge());
        let mut connection = endpoint.connection_gauge();
        first.set("ready");
        second.set("ready");
        connection.set("live");
        assert_line(
            &metrics,
            r#"jackstay_endpoint_state{upstream="u",endpoint="e",state="ready"} 2"#,
        );
        second.set("ejected");
        connection.set("suspect");
        assert_line(
            &metrics,
            r#"jackstay_endpoint_state{upstream="u",endpoint="e",state="ready"} 1"#,
        );
        assert_line(&metrics, r#"jackstay_connections{upstream="u",endpoint="e",state="live"} 0"#);
        assert_line(
            &metrics,
            r#"jackstay_connections{upstream="u",endpoint="e",state="suspect"} 1"#,
        );
        drop((first, second, connection));
        for line in metrics.render().lines().filter(|line| line.contains("state=")) {
            assert!(line.ends_with(" 0"), "{line}");
        }
    }
}

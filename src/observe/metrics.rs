//! The registry: one per process, passed by reference, rendered as Prometheus text.
//!
//! Nothing here is global: the recorder lives inside [`Metrics`], so that tests can have as many as
//! they like and a handle says whom it counts for. Registering takes a hash and a lock; whoever is
//! on the path of a request keeps the handles of [`super::handles`] instead.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use metrics::{
    Counter, Gauge, Histogram, Key, KeyName, Label, Level, Metadata, Recorder, SharedString,
};
use metrics_exporter_prometheus::{
    Matcher, PrometheusBuilder, PrometheusHandle, PrometheusRecorder,
};
use tokio::time::Instant;

use super::build;
use super::events::Events;
use super::handles::{EndpointMetrics, ListenerMetrics};
use super::history::{STEP, STEPS};
use super::names::{self, Kind, MetricSpec};
use super::passthrough::PassthroughMetrics;

/// Upper bounds of request durations in seconds, 0.5 ms to 60 s. A local answer takes one or two
/// milliseconds, so the low end is fine; 60 s is the apiserver's own limit for a request.
pub const DURATION_BUCKETS: &[f64] = &[
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
    60.0,
];

/// Upper bounds of PING round trips in seconds: loopback to another continent, then the times at
/// which a connection is suspected (0.1) and given up (2.0).
pub const RTT_BUCKETS: &[f64] =
    &[0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0];

/// Most distinct endpoints with series of their own. The recorder cannot forget a series, and an
/// address that changes every day must not grow memory for ever; those beyond share `other`.
const MAX_ENDPOINTS: usize = 256;
/// The same of listeners, which a reload may rename.
const MAX_LISTENERS: usize = 256;

const METADATA: Metadata<'static> = Metadata::new("jackstay", Level::INFO, None);

/// All metrics of one process.
pub struct Metrics {
    registry: Arc<Registry>,
    handle: PrometheusHandle,
    listeners: Mutex<HashMap<String, Arc<ListenerMetrics>>>,
    passthrough: Mutex<HashMap<String, Arc<PassthroughMetrics>>>,
    endpoints: Mutex<HashMap<(String, String), Arc<EndpointMetrics>>>,
    events: Arc<Events>,
    /// When the last step of the history ended.
    stepped: Mutex<Instant>,
}

impl std::fmt::Debug for Metrics {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Metrics").finish_non_exhaustive()
    }
}

impl Metrics {
    /// A registry that holds nothing but `jackstay_build_info`.
    pub fn new() -> Arc<Self> {
        let mut builder = PrometheusBuilder::new();
        for (spec, buckets) in
            [(names::REQUEST_DURATION, DURATION_BUCKETS), (names::PING_RTT, RTT_BUCKETS)]
        {
            builder = builder
                .set_buckets_for_metric(Matcher::Full(spec.name.to_owned()), buckets)
                .unwrap_or_else(|error| unreachable!("the bucket lists are not empty: {error}"));
        }
        let recorder = builder.build_recorder();
        for spec in names::ALL {
            let (key, help) = (KeyName::from_const_str(spec.name), SharedString::from(spec.help));
            match spec.kind {
                Kind::Counter => recorder.describe_counter(key, None, help),
                Kind::Gauge => recorder.describe_gauge(key, None, help),
                Kind::Histogram => recorder.describe_histogram(key, None, help),
            }
        }
        let metrics = Arc::new(Self {
            handle: recorder.handle(),
            registry: Arc::new(Registry { recorder }),
            listeners: Mutex::default(),
            passthrough: Mutex::default(),
            endpoints: Mutex::default(),
            events: Arc::default(),
            stepped: Mutex::new(Instant::now()),
        });
        metrics.registry.gauge(&names::BUILD_INFO, &[build::VERSION, build::COMMIT]).set(1);
        metrics.registry.gauge(&names::CONFIG_RELOAD_OK, &[]).set(1);
        metrics
    }

    /// Everything as Prometheus text (format 0.0.4), families in alphabetical order.
    pub fn render(&self) -> String {
        for listener in self.listeners.lock().unwrap_or_else(PoisonError::into_inner).values() {
            listener.publish();
        }
        for endpoint in self.endpoints.lock().unwrap_or_else(PoisonError::into_inner).values() {
            endpoint.publish();
        }
        sort_families(&self.handle.render())
    }

    /// What changed lately.
    pub fn events(&self) -> &Arc<Events> {
        &self.events
    }

    /// Folds the samples of histograms into their buckets, logs what was suppressed, and ends a step
    /// of the history when its time has come.
    ///
    /// Until then every sample is kept (16 bytes each), so this must run about once a second, on
    /// the runtime of the admin endpoint; [`Self::render`] alone does it only when scraped.
    pub fn upkeep(&self) {
        self.handle.run_upkeep();
        self.events.flush();
        let now = Instant::now();
        for listener in self.listeners.lock().unwrap_or_else(PoisonError::into_inner).values() {
            listener.log_suppressed(now);
        }
        self.step(now);
    }

    /// Ends the steps of every endpoint's history that are over by `now`.
    fn step(&self, now: Instant) {
        let mut stepped = self.stepped.lock().unwrap_or_else(PoisonError::into_inner);
        let over = now.saturating_duration_since(*stepped).as_millis() / STEP.as_millis();
        if over == 0 {
            return;
        }
        *stepped += STEP * u32::try_from(over).unwrap_or(u32::MAX);
        let endpoints = self.endpoints.lock().unwrap_or_else(PoisonError::into_inner);
        for endpoint in endpoints.values() {
            // After a pause (a laptop that slept) the missing steps are empty ones.
            for _ in 0..over.min(STEPS as u128) {
                endpoint.history().step();
            }
        }
    }

    /// The handles of one listener; every caller with the same name gets the same ones.
    pub fn listener(&self, name: &str) -> Arc<ListenerMetrics> {
        let mut all = self.listeners.lock().unwrap_or_else(PoisonError::into_inner);
        let known = all.len() < MAX_LISTENERS || all.contains_key(name);
        let name = if known { name } else { "other" };
        if let Some(found) = all.get(name) {
            return Arc::clone(found);
        }
        let new = Arc::new(ListenerMetrics::register(&self.registry, name));
        all.insert(name.to_owned(), Arc::clone(&new));
        new
    }

    /// What a passthrough listener counts; every caller with the same name gets the same handles.
    pub fn passthrough(&self, name: &str) -> Arc<PassthroughMetrics> {
        let mut all = self.passthrough.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(found) = all.get(name) {
            return Arc::clone(found);
        }
        let new = Arc::new(PassthroughMetrics::register(&self.registry, name));
        all.insert(name.to_owned(), Arc::clone(&new));
        new
    }

    /// The handles of one endpoint of an upstream; an endpoint that comes back finds its old ones.
    pub fn endpoint(&self, upstream: &str, endpoint: &str) -> Arc<EndpointMetrics> {
        let mut all = self.endpoints.lock().unwrap_or_else(PoisonError::into_inner);
        let mut key = (upstream.to_owned(), endpoint.to_owned());
        if all.len() >= MAX_ENDPOINTS && !all.contains_key(&key) {
            "other".clone_into(&mut key.1);
        }
        if let Some(found) = all.get(&key) {
            return Arc::clone(found);
        }
        let new = Arc::new(EndpointMetrics::register(&self.registry, &self.events, &key.0, &key.1));
        all.insert(key, Arc::clone(&new));
        new
    }

    /// The configuration was read again, and could be put into use or not.
    pub fn config_reloaded(&self, ok: bool) {
        let outcome = if ok { "ok" } else { "failed" };
        self.registry.counter(&names::CONFIG_RELOADS, &[outcome]).increment(1);
        self.registry.gauge(&names::CONFIG_RELOAD_OK, &[]).set(f64::from(u8::from(ok)));
    }

    /// A request goes out again because of `reason`.
    pub fn retried(&self, reason: &'static str) {
        self.registry.counter(&names::RETRIES, &[reason]).increment(1);
    }

    /// A request failed and is not sent again: `unsafe`, `not_held` or `attempts`.
    pub fn retry_refused(&self, reason: &'static str) {
        self.registry.counter(&names::RETRIES_REFUSED, &[reason]).increment(1);
    }

    /// A second attempt: answered by the `original` or the `hedge`, `failed` with it, or not made
    /// because that would be `over_budget` or because there was `nobody` to ask.
    pub fn hedged(&self, outcome: &'static str) {
        self.registry.counter(&names::HEDGES, &[outcome]).increment(1);
    }

    /// A watch lost its apiserver, or was refused by it: `resumed`, `moved`, `withheld`, `too_old`,
    /// `over_budget`, `gave_up`, `held` during a total outage, …; or something came that stands in the way of resuming it: `barred`,
    /// `oversized`.
    pub fn watch_resumed(&self, outcome: &'static str) {
        self.registry.counter(&names::WATCH_RESUMES, &[outcome]).increment(1);
    }

    /// Counts requests that wait for an upstream stream; resolve once per upstream.
    pub fn stream_waits(&self, upstream: &str) -> Counter {
        self.registry.counter(&names::STREAM_WAITS, &[upstream])
    }

    /// Counts requests for which no upstream stream came free; resolve once per upstream.
    pub fn streams_exhausted(&self, upstream: &str) -> Counter {
        self.registry.counter(&names::STREAMS_EXHAUSTED, &[upstream])
    }

    /// Watches held while no apiserver can be reached; shared and to be handled like
    /// [`Self::held_body_bytes`].
    pub fn held_watches(&self) -> Gauge {
        self.registry.gauge(&names::HELD_WATCHES, &[])
    }

    /// Bytes of request bodies held for another attempt; resolve once and only ever increment and
    /// decrement it, since workers share it.
    pub fn held_body_bytes(&self) -> Gauge {
        self.registry.gauge(&names::HELD_BODY_BYTES, &[])
    }

    /// Bytes held of frames of watches; shared and to be handled like [`Self::held_body_bytes`].
    pub fn held_frame_bytes(&self) -> Gauge {
        self.registry.gauge(&names::HELD_FRAME_BYTES, &[])
    }

    /// A source of endpoints gave a good answer at this time, in seconds since 1970; 0 is never.
    pub fn discovered(&self, upstream: &str, source: &'static str, at: f64) {
        self.registry.gauge(&names::DISCOVERY_LAST_SUCCESS, &[upstream, source]).set(at);
    }

    /// A source of endpoints could not be asked.
    pub fn discovery_failed(&self, upstream: &str, source: &'static str) {
        self.registry.counter(&names::DISCOVERY_ERRORS, &[upstream, source]).increment(1);
    }

    /// `count` entries of a source were refused: `invalid`, `own-address`, `too-many`; or a whole
    /// answer, because it was `empty`.
    pub fn discovery_refused(
        &self,
        upstream: &str,
        source: &'static str,
        reason: &'static str,
        count: usize,
    ) {
        self.registry
            .counter(&names::DISCOVERY_REFUSED, &[upstream, source, reason])
            .increment(count as u64);
    }

    /// `count` endpoints `joined` or `left`.
    pub fn discovery_changed(&self, upstream: &str, change: &'static str, count: usize) {
        self.registry
            .counter(&names::DISCOVERY_CHANGES, &[upstream, change])
            .increment(count as u64);
    }
}

/// The recorder, which can only register what the table of [`names`] holds.
pub(super) struct Registry {
    recorder: PrometheusRecorder,
}

impl Registry {
    pub(super) fn counter(&self, spec: &MetricSpec, values: &[&str]) -> Counter {
        debug_assert_eq!(spec.kind, Kind::Counter, "{}", spec.name);
        self.recorder.register_counter(&key(spec, values), &METADATA)
    }

    pub(super) fn gauge(&self, spec: &MetricSpec, values: &[&str]) -> Gauge {
        debug_assert_eq!(spec.kind, Kind::Gauge, "{}", spec.name);
        self.recorder.register_gauge(&key(spec, values), &METADATA)
    }

    pub(super) fn histogram(&self, spec: &MetricSpec, values: &[&str]) -> Histogram {
        debug_assert_eq!(spec.kind, Kind::Histogram, "{}", spec.name);
        self.recorder.register_histogram(&key(spec, values), &METADATA)
    }
}

fn key(spec: &MetricSpec, values: &[&str]) -> Key {
    debug_assert_eq!(spec.labels.len(), values.len(), "labels of {}", spec.name);
    let labels: Vec<Label> = spec
        .labels
        .iter()
        .zip(values)
        .map(|(key, value)| Label::new(*key, (*value).to_owned()))
        .collect();
    Key::from_parts(spec.name, labels)
}

/// The recorder renders from hash maps, in another order every time; people compare scrapes.
fn sort_families(text: &str) -> String {
    let mut families: Vec<&str> = text.split("\n\n").map(str::trim).collect();
    families.retain(|family| !family.is_empty());
    // "# HELP name" and "# TYPE name" have the same width before the name.
    families.sort_unstable_by_key(|family| family.get(7..).unwrap_or(""));
    let mut out = String::with_capacity(text.len());
    for family in families {
        let mut lines: Vec<&str> = family.lines().collect();
        let comments = lines.iter().take_while(|line| line.starts_with('#')).count();
        // Buckets of a histogram come in their own order, which must stay.
        if !family.contains(" histogram\n") {
            lines[comments..].sort_unstable();
        }
        for line in lines {
            out.push_str(line);
            out.push('\n');
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_metric_of_the_table_can_be_fed_and_nothing_else_appears() {
        let metrics = Metrics::new();
        let listener = metrics.listener("apiserver");
        listener.finished("get", 200, Some(std::time::Duration::from_millis(3)));
        listener.cut("client");
        listener.own_errors.count(Some(503), "no_upstream");
        listener.refused("cap");
        listener.client_verified("ok");
        listener.certificate_reloaded("ok");
        let endpoint = metrics.endpoint("control-plane", "10.0.0.11:6443");
        let mut state = endpoint.state_gauge();
        state.set("ready");
        let mut connection = endpoint.connection_gauge();
        connection.set("live");
        endpoint.ejected("refused");
        endpoint.dialled("ok");
        endpoint.answered(200);
        endpoint.watch_stale();
        endpoint.rtt(std::time::Duration::from_micros(300));
        endpoint.flow_opened();
        let passthrough = metrics.passthrough("apiserver");
        passthrough.opened();
        passthrough.closed("done");
        metrics.config_reloaded(true);
        metrics.retried("refused-stream");
        metrics.retry_refused("unsafe");
        metrics.hedged("won");
        metrics.watch_resumed("resumed");
        metrics.stream_waits("control-plane").increment(1);
        metrics.streams_exhausted("control-plane").increment(1);
        metrics.held_watches().increment(1);
        metrics.held_body_bytes().increment(1);
        metrics.held_frame_bytes().increment(1);
        metrics.discovered("control-plane", "dns", 1.0);
        metrics.discovery_failed("control-plane", "dns");
        metrics.discovery_refused("control-plane", "dns", "empty", 1);
        metrics.discovery_changed("control-plane", "joined", 1);

        let text = metrics.render();
        let rendered: BTreeSet<(String, String)> = text
            .lines()
            .filter_map(|line| line.strip_prefix("# TYPE "))
            .map(|line| line.split_once(' ').expect("name and type"))
            .map(|(name, kind)| (name.to_owned(), kind.to_owned()))
            .collect();
        let table: BTreeSet<(String, String)> = names::ALL
            .iter()
            .map(|spec| (spec.name.to_owned(), spec.kind.as_str().to_owned()))
            .collect();
        assert_eq!(rendered, table, "{text}");
        for spec in names::ALL {
            assert!(text.contains(&format!("# HELP {} {}", spec.name, spec.help)), "{text}");
        }
    }

    #[test]
    fn families_and_series_come_in_a_stable_order() {
        let metrics = Metrics::new();
        for name in ["b", "a", "c"] {
            metrics.listener(name).finished("get", 200, None);
            metrics.listener(name).finished("list", 404, Some(std::time::Duration::ZERO));
        }
        let first = metrics.render();
        assert_eq!(first, metrics.render());
        let types: Vec<&str> = first.lines().filter(|l| l.starts_with("# TYPE")).collect();
        let mut sorted = types.clone();
        sorted.sort_unstable();
        assert_eq!(types, sorted);
        assert!(first.contains("le=\"0.0005\"} 1"), "{first}");
    }

    #[test]
    fn levels_and_answers_are_there_at_each_scrape() {
        let metrics = Metrics::new();
        let listener = metrics.listener("a");
        listener.watches.increment(3);
        listener.watches.decrement(1);
        let endpoint = metrics.endpoint("u", "e");
        for status in [200, 404, 503] {
            endpoint.answered(status);
        }
        let text = metrics.render();
        for line in [
            r#"jackstay_watches{listener="a"} 2"#,
            r#"jackstay_tunnels{listener="a"} 0"#,
            r#"jackstay_endpoint_answers_total{upstream="u",endpoint="e",outcome="ok"} 2"#,
            r#"jackstay_endpoint_answers_total{upstream="u",endpoint="e",outcome="error"} 1"#,
        ] {
            assert!(text.lines().any(|l| l == line), "no {line} in\n{text}");
        }
    }

    #[test]
    fn a_step_of_the_history_ends_when_its_time_has_come() {
        let metrics = Metrics::new();
        let (endpoint, start) = (metrics.endpoint("u", "e"), *metrics.stepped.lock().unwrap());
        let steps = || endpoint.history().columns().answers;
        endpoint.answered(200);
        metrics.step(start + STEP / 2);
        assert!(steps().is_empty());
        metrics.step(start + STEP);
        assert_eq!(steps(), [1]);
        metrics.step(start + STEP + STEP / 2);
        assert_eq!(steps(), [1]);
        metrics.step(start + STEP * 4);
        assert_eq!(steps(), [1, 0, 0, 0], "time that passed unseen is empty, not missing");
        metrics.step(start + STEP * 100_000);
        assert_eq!(steps().len(), STEPS);
    }

    #[test]
    fn endpoints_beyond_the_cap_share_one_series() {
        let metrics = Metrics::new();
        for i in 0..MAX_ENDPOINTS + 50 {
            metrics.endpoint("u", &format!("10.0.{}.{}:6443", i / 256, i % 256)).dialled("ok");
        }
        let text = metrics.render();
        let dials = text.lines().filter(|l| l.starts_with("jackstay_dials_total{")).count();
        assert_eq!(dials, MAX_ENDPOINTS + 1);
        assert!(text.contains("endpoint=\"other\",outcome=\"ok\"} 50"), "{text}");
    }
}

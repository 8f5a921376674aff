//! All metrics of one process, rendered as Prometheus text.
//!
//! [`Metrics`] owns the recorder, and callers receive it by reference. Nothing is global, so that each test
//! has its own metrics.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};

use jackstay_core::admission::{MemoryBudget, MemoryKind, Shed};
use jackstay_sys::clock;
use jackstay_sys::utc::wall_clock;
use metrics::{Counter, Gauge};
use metrics_exporter_prometheus::PrometheusHandle;

use super::build;
use super::endpoint_metrics::EndpointMetrics;
use super::events::Events;
use super::group_metrics::{FailingGauge, GroupMetrics};
use super::history::{STEP, STEPS};
use super::listener_metrics::ListenerMetrics;
use super::lock;
use super::names;
use super::passthrough_metrics::PassthroughMetrics;
use super::registry::Registry;
use super::scrape_metrics::{self, CertificateExpiries, CertificateExpiry, ConfiguredSeries};

/// Maximum number of listeners, of passthrough listeners and of endpoints with their own series. Further
/// ones share the series `other`. The recorder cannot remove a series, and neither listeners that a reload
/// renames nor addresses that change every day must grow memory without limit.
const MAX_NAMES: usize = 256;

/// The label value that names beyond [`MAX_NAMES`] share.
const OTHER: &str = "other";

/// The bytes of compressed watches.
pub struct GzipBytes {
    /// As an apiserver has sent them.
    pub received: Counter,
    /// Without compression.
    pub inflated: Counter,
}

/// All metrics of one process.
pub struct Metrics {
    registry: Arc<Registry>,
    handle: PrometheusHandle,
    listeners: Mutex<HashMap<String, Arc<ListenerMetrics>>>,
    passthrough: Mutex<HashMap<String, Arc<PassthroughMetrics>>>,
    endpoints: Mutex<HashMap<(String, String), Arc<EndpointMetrics>>>,
    certificates: CertificateExpiries,
    groups: GroupMetrics,
    configured: Mutex<ConfiguredSeries>,
    events: Arc<Events>,
    started: SystemTime,
    /// When the last step of the endpoints' histories ended.
    last_step: Mutex<Instant>,
}

impl std::fmt::Debug for Metrics {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Metrics").finish_non_exhaustive()
    }
}

impl Metrics {
    /// Metrics with the series of the build, the configuration and the process.
    pub fn new() -> Arc<Self> {
        let registry = Arc::new(Registry::new());
        let metrics = Arc::new(Self {
            handle: registry.handle(),
            groups: GroupMetrics::new(&registry),
            registry,
            listeners: Mutex::default(),
            passthrough: Mutex::default(),
            endpoints: Mutex::default(),
            certificates: CertificateExpiries::default(),
            configured: Mutex::default(),
            events: Arc::default(),
            started: wall_clock(),
            last_step: Mutex::new(clock::now()),
        });
        metrics.registry.gauge(&names::BUILD_INFO, &[build::VERSION, build::COMMIT]).set(1);
        metrics.registry.gauge(&names::CONFIG_RELOAD_OK, &[]).set(1);
        // Alerts query them, so they begin with 0; see `names`.
        for outcome in ["ok", "failed"] {
            metrics.registry.count(&names::CONFIG_RELOADS, &[outcome], 0);
        }
        metrics.registry.count(&names::WATCH_RESUMES, &[names::WATCH_GAVE_UP], 0);
        metrics
    }

    /// All metrics as Prometheus text (format 0.0.4), families in alphabetical order.
    pub fn render(&self) -> String {
        for listener in lock(&self.listeners).values() {
            listener.publish();
        }
        for passthrough in lock(&self.passthrough).values() {
            passthrough.publish();
        }
        for endpoint in lock(&self.endpoints).values() {
            endpoint.publish();
        }
        let mut text = self.handle.render();
        text.push_str(&self.certificates.render());
        text.push_str(&lock(&self.configured).render());
        text.push_str(&scrape_metrics::render_process(self.started));
        sort_families(&text)
    }

    /// Shows what `memory` holds, and what was shed, in later scrapes.
    pub fn show_memory(&self, memory: &MemoryBudget) {
        for kind in MemoryKind::ALL {
            let gauge = self.registry.gauge(&names::MEMORY_BUDGET, &[kind.as_str()]);
            gauge.set(memory.used_for(kind) as f64);
        }
        for (held, kind) in [
            (&names::HELD_BODY_BYTES, MemoryKind::HeldBodies),
            (&names::HELD_FRAME_BYTES, MemoryKind::WatchFrames),
        ] {
            self.registry.gauge(held, &[]).set(memory.used_for(kind) as f64);
        }
        self.registry.gauge(&names::MEMORY_LIMIT, &[]).set(memory.limit() as f64);
        for shed in Shed::ALL {
            let counter = self.registry.counter(&names::SHED, &[shed.as_str()]);
            counter.absolute(memory.shed(shed));
        }
    }

    /// Shows what is configured in later scrapes.
    pub fn show_configured(&self, configured: ConfiguredSeries) {
        *lock(&self.configured) = configured;
    }

    /// The recent state changes.
    pub fn events(&self) -> &Arc<Events> {
        &self.events
    }

    /// Moves histogram samples into their buckets, logs how many lines were suppressed, and ends the steps
    /// of the histories that are due.
    ///
    /// The admin runtime calls it about once a second, because each histogram sample takes 16 bytes until
    /// it is moved, and [`Self::render`] moves them only when scraped.
    pub fn upkeep(&self) {
        self.handle.run_upkeep();
        self.events.flush();
        let now = clock::now();
        for listener in lock(&self.listeners).values() {
            listener.log_suppressed(now);
        }
        self.step(now);
    }

    /// Ends the steps of every endpoint's history that are over at `now`.
    fn step(&self, now: Instant) {
        let mut last_step = lock(&self.last_step);
        let due = now.saturating_duration_since(*last_step).as_millis() / STEP.as_millis();
        *last_step += STEP * u32::try_from(due).unwrap_or(u32::MAX);
        for endpoint in lock(&self.endpoints).values() {
            // After the host was suspended, several steps are due, and all but the first are empty.
            for _ in 0..due.min(STEPS as u128) {
                endpoint.history().step();
            }
        }
    }

    /// The metrics of a listener; the same for every caller with the same name.
    pub fn listener(&self, name: &str) -> Arc<ListenerMetrics> {
        get_or_register(&self.listeners, name.to_owned(), OTHER.to_owned(), |name| {
            ListenerMetrics::register(&self.registry, name)
        })
    }

    /// The metrics of a passthrough listener; the same for every caller with the same name.
    pub fn passthrough(&self, name: &str) -> Arc<PassthroughMetrics> {
        get_or_register(&self.passthrough, name.to_owned(), OTHER.to_owned(), |name| {
            PassthroughMetrics::register(&self.registry, name)
        })
    }

    /// The open flows of a listener. Registers no series, unlike [`Self::passthrough`].
    pub fn open_flows(&self, name: &str) -> usize {
        lock(&self.passthrough).get(name).map_or(0, |metrics| metrics.open())
    }

    /// The metrics of an endpoint; an endpoint that returns continues its old series.
    pub fn endpoint(&self, upstream: &str, endpoint: &str) -> Arc<EndpointMetrics> {
        let key = |endpoint: &str| (upstream.to_owned(), endpoint.to_owned());
        get_or_register(&self.endpoints, key(endpoint), key(OTHER), |(upstream, endpoint)| {
            EndpointMetrics::register(&self.registry, &self.events, upstream, endpoint)
        })
    }

    /// Counts a reload of the configuration, applied or not.
    pub fn config_reloaded(&self, ok: bool) {
        let outcome = if ok { "ok" } else { "failed" };
        self.registry.count(&names::CONFIG_RELOADS, &[outcome], 1);
        self.registry.gauge(&names::CONFIG_RELOAD_OK, &[]).set(f64::from(u8::from(ok)));
    }

    /// Counts a response on `admin.metrics_bind`, by what was found out of the client.
    pub fn metrics_response(&self, outcome: &'static str) {
        self.registry.count(&names::METRICS_RESPONSES, &[outcome], 1);
    }

    /// The handle of a certificate in use, by kind (`serving`, `client_ca`, `identity`, `upstream_ca` or
    /// `probe_token`) and configured name. The series exist while the handle does.
    pub fn certificate_expiry(&self, kind: &'static str, name: &str) -> Arc<CertificateExpiry> {
        self.certificates.handle(kind, name)
    }

    /// Counts a retry.
    pub fn retried(&self, reason: &'static str) {
        self.registry.count(&names::RETRIES, &[reason], 1);
    }

    /// Counts a request of an API group that its endpoint could not serve.
    pub fn count_group_failure(&self, upstream: &str, endpoint: &str, group: &str) {
        self.groups.failed(upstream, endpoint, group);
    }

    /// Counts an API group that fails at an endpoint, until the gauge is dropped.
    pub fn group_fails(&self, upstream: &str, endpoint: &str, group: &str) -> FailingGauge {
        self.groups.fails(upstream, endpoint, group)
    }

    /// Counts a failed request that is not retried: `unsafe`, `not_held` or `attempts`.
    pub fn retry_refused(&self, reason: &'static str) {
        self.registry.count(&names::RETRIES_REFUSED, &[reason], 1);
    }

    /// Counts a heartbeat whose object was read: `written`, `sent_again`, `responded` or `unknown`.
    pub fn settled(&self, outcome: &'static str) {
        self.registry.count(&names::SETTLED, &[outcome], 1);
    }

    /// Counts a hedge by its outcome. `original`, `hedge`: this attempt answered first. `failed`: both
    /// attempts failed. `over_budget`: the hedge budget was used up. `no_connection`: the pool had no other
    /// connection. `cancelled`: the request ended before its hedge had a stream.
    pub fn hedged(&self, outcome: &'static str) {
        self.registry.count(&names::HEDGES, &[outcome], 1);
    }

    /// Counts what a version floor did to a request: `applied`, `redirected`, `most_recent`, `fallen_back`, `reset` or `cut`.
    pub fn version_floor(&self, outcome: &'static str) {
        self.registry.count(&names::VERSION_FLOORS, &[outcome], 1);
    }

    /// Counts a watch that lost its stream or was answered with 410: `resumed`, `moved`, `withheld`,
    /// `too_old`, `over_budget`, `gave_up`, `held` during a total outage, and others. Also counts a watch
    /// that an event made impossible to resume: `not_resumable`, `oversized`.
    pub fn watch_resumed(&self, outcome: &'static str) {
        self.registry.count(&names::WATCH_RESUMES, &[outcome], 1);
    }

    /// Records how a shadow of a watch has ended, and for how long it ran.
    pub fn shadow_ended(&self, outcome: &'static str, ran: Duration) {
        self.registry.histogram(&names::SHADOW_DURATION, &[outcome]).record(ran.as_secs_f64());
    }

    /// Counters of the bytes of compressed watches.
    pub fn watch_gzip_bytes(&self, upstream: &str) -> GzipBytes {
        let counter = |form| self.registry.counter(&names::WATCH_GZIP_BYTES, &[upstream, form]);
        GzipBytes { received: counter("received"), inflated: counter("inflated") }
    }

    /// Counts a compressed stream that could not be decoded: `invalid`, `ratio` or `memory`.
    pub fn watch_gzip_failed(&self, upstream: &str, reason: &'static str) {
        self.registry.count(&names::WATCH_GZIP_ERRORS, &[upstream, reason], 1);
    }

    /// Counter of requests that waited for an upstream stream.
    pub fn stream_waits(&self, upstream: &str) -> Counter {
        self.registry.counter(&names::STREAM_WAITS, &[upstream])
    }

    /// Counter of requests for which no upstream stream became free.
    pub fn streams_exhausted(&self, upstream: &str) -> Counter {
        self.registry.counter(&names::STREAMS_EXHAUSTED, &[upstream])
    }

    /// Gauge of watches held while no apiserver is reachable. Workers share it: increment and
    /// decrement it, never set it.
    pub fn held_watches(&self) -> Gauge {
        self.registry.gauge(&names::HELD_WATCHES, &[])
    }

    /// Registers the counter of an upstream that an alert queries with 0; see [`names`].
    pub fn upstream_configured(&self, upstream: &str) {
        self.registry.count(&names::STREAMS_EXHAUSTED, &[upstream], 0);
    }

    /// Registers the metrics of a source of endpoints that has not answered yet.
    pub fn discovery_expected(&self, upstream: &str, source: &'static str) {
        self.discovered(upstream, source, 0.0);
        // An alert queries it, so it begins with 0; see `names`.
        self.registry.count(&names::DISCOVERY_ERRORS, &[upstream, source], 0);
    }

    /// Records when a source of endpoints last answered, in seconds since 1970; 0 means never.
    pub fn discovered(&self, upstream: &str, source: &'static str, at: f64) {
        self.registry.gauge(&names::DISCOVERY_LAST_SUCCESS, &[upstream, source]).set(at);
    }

    /// Counts a failed query of a source of endpoints.
    pub fn discovery_failed(&self, upstream: &str, source: &'static str) {
        self.registry.count(&names::DISCOVERY_ERRORS, &[upstream, source], 1);
    }

    /// Counts refused entries of a source (`invalid`, `own_address`, `too_many`), or an answer refused
    /// because it has no entries (`empty`).
    pub fn discovery_refused(
        &self,
        upstream: &str,
        source: &'static str,
        reason: &'static str,
        count: usize,
    ) {
        self.registry.count(&names::DISCOVERY_REFUSED, &[upstream, source, reason], count as u64);
    }

    /// Records whether the canary share of an upstream is withdrawn.
    pub fn canary_withdrawn(&self, upstream: &str, withdrawn: bool) {
        self.registry
            .gauge(&names::CANARY_WITHDRAWN, &[upstream])
            .set(f64::from(u8::from(withdrawn)));
    }

    /// Counts endpoints that `joined` or `left`.
    pub fn discovery_changed(&self, upstream: &str, change: &'static str, count: usize) {
        self.registry.count(&names::DISCOVERY_CHANGES, &[upstream, change], count as u64);
    }
}

/// The metrics of `key`, registered by its first caller; beyond [`MAX_NAMES`] keys, those of `other`.
fn get_or_register<K: Eq + Hash, M>(
    all: &Mutex<HashMap<K, Arc<M>>>,
    key: K,
    other: K,
    register: impl FnOnce(&K) -> M,
) -> Arc<M> {
    let mut all = lock(all);
    let has_series = all.len() < MAX_NAMES || all.contains_key(&key);
    let key = if has_series { key } else { other };
    Arc::clone(all.entry(key).or_insert_with_key(|key| Arc::new(register(key))))
}

/// Sorts families and series, because the recorder renders hash maps, whose order varies.
fn sort_families(text: &str) -> String {
    let mut families: Vec<&str> = text.split("\n\n").map(str::trim).collect();
    families.retain(|family| !family.is_empty());
    // The name begins at the same column in "# HELP name" and "# TYPE name".
    families.sort_unstable_by_key(|family| family.get(7..).unwrap_or(""));
    let mut out = String::with_capacity(text.len());
    for family in families {
        let mut lines: Vec<&str> = family.lines().collect();
        let comments = lines.iter().take_while(|line| line.starts_with('#')).count();
        // The buckets of a histogram must keep their order.
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
    use super::super::assert_line;
    use jackstay_core::admission::Refusal;
    use jackstay_core::line_pacing::{BoundsChange, QueueBounds};

    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn render_shows_every_metric_of_the_table_and_no_other() {
        let metrics = Metrics::new();
        let listener = metrics.listener("apiserver");
        listener.finished("get", 200, Some(std::time::Duration::from_millis(3)));
        listener.cut("client");
        listener.own_errors.count(Some(503), "no_upstream");
        listener.refused(Refusal::SlotsFull);
        listener.closed_for_frames("ping");
        listener.client_verified("ok");
        listener.certificate_reloaded("ok");
        let endpoint = metrics.endpoint("control-plane", "10.0.0.11:6443");
        let mut state = endpoint.state_gauge();
        state.set("ready");
        let mut connection = endpoint.connection_gauge();
        connection.set("live");
        endpoint.ejected("silent");
        endpoint.dialled("ok");
        endpoint.closed_for_frames("headers");
        endpoint.window_changed(true);
        let bounds = QueueBounds { send: Some(1), receive: None };
        endpoint.paced(BoundsChange { before: QueueBounds::default(), bounds });
        endpoint.answered(200);
        endpoint.rtt(std::time::Duration::from_micros(300));
        endpoint.flow_opened();
        let passthrough = metrics.passthrough("apiserver");
        passthrough.opened();
        passthrough.closed("done");
        metrics.config_reloaded(true);
        let expiry = metrics.certificate_expiry("serving", "apiserver");
        expiry.set(SystemTime::UNIX_EPOCH, wall_clock());
        expiry.set_reloaded(true);
        metrics.show_configured(ConfiguredSeries {
            listeners: vec![["apiserver", "terminate", "control-plane"].map(str::to_owned)],
            usable_endpoints: vec![("control-plane".to_owned(), 1)],
        });
        metrics.metrics_response("served");
        metrics.retried("refused_stream");
        metrics.retry_refused("unsafe");
        metrics.settled("written");
        metrics.hedged("original");
        metrics.count_group_failure("control-plane", "10.0.0.11:6443", "metrics.k8s.io");
        let _failing = metrics.group_fails("control-plane", "10.0.0.11:6443", "metrics.k8s.io");
        metrics.version_floor("applied");
        metrics.watch_resumed("resumed");
        let gzip_bytes = metrics.watch_gzip_bytes("control-plane");
        gzip_bytes.received.increment(1);
        gzip_bytes.inflated.increment(10);
        metrics.watch_gzip_failed("control-plane", "invalid");
        metrics.shadow_ended("promoted", Duration::from_millis(300));
        metrics.stream_waits("control-plane").increment(1);
        metrics.streams_exhausted("control-plane").increment(1);
        metrics.held_watches().increment(1);
        metrics.discovered("control-plane", "dns", 1.0);
        metrics.discovery_failed("control-plane", "dns");
        metrics.discovery_refused("control-plane", "dns", "empty", 1);
        metrics.discovery_changed("control-plane", "joined", 1);
        endpoint.kubernetes_minor(36);
        metrics.canary_withdrawn("control-plane", true);
        metrics.show_memory(&MemoryBudget::new(1 << 20));

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
    fn render_sorts_families_and_series() {
        let metrics = Metrics::new();
        for name in ["b", "a", "c"] {
            metrics.listener(name).finished("get", 200, None);
            metrics.listener(name).finished("list", 404, Some(std::time::Duration::ZERO));
        }
        // CPU time and memory change between two scrapes.
        let render = || {
            let text = metrics.render();
            let (stable, _) = text.split_once("# HELP process_").expect("metrics of the process");
            stable.to_owned()
        };
        let first = render();
        assert_eq!(first, render());
        let types: Vec<&str> = first.lines().filter(|line| line.starts_with("# TYPE")).collect();
        let mut sorted = types.clone();
        sorted.sort_unstable();
        assert_eq!(types, sorted);
        assert!(first.contains("le=\"0.0005\"} 1"), "{first}");
    }

    #[test]
    fn render_publishes_gauges_and_response_counts() {
        let metrics = Metrics::new();
        let listener = metrics.listener("a");
        listener.watches.increment(3);
        listener.watches.decrement(1);
        let endpoint = metrics.endpoint("u", "e");
        for status in [200, 404, 503] {
            endpoint.answered(status);
        }
        let passthrough = metrics.passthrough("p");
        passthrough.opened();
        for line in [
            r#"jackstay_watches{listener="a"} 2"#,
            r#"jackstay_tunnels{listener="a"} 0"#,
            r#"jackstay_passthrough_connections{listener="p"} 1"#,
            r#"jackstay_endpoint_answers_total{upstream="u",endpoint="e",outcome="ok"} 2"#,
            r#"jackstay_endpoint_answers_total{upstream="u",endpoint="e",outcome="error"} 1"#,
        ] {
            assert_line(&metrics, line);
        }
    }

    #[test]
    fn step_ends_history_steps_that_are_due() {
        let metrics = Metrics::new();
        let (endpoint, start) = (metrics.endpoint("u", "e"), *lock(&metrics.last_step));
        let steps = || endpoint.history().columns().answers;
        endpoint.answered(200);
        metrics.step(start + STEP / 2);
        assert!(steps().is_empty());
        metrics.step(start + STEP);
        assert_eq!(steps(), [1]);
        metrics.step(start + STEP + STEP / 2);
        assert_eq!(steps(), [1]);
        metrics.step(start + STEP * 4);
        assert_eq!(steps(), [1, 0, 0, 0], "missed steps are empty");
        metrics.step(start + STEP * 100_000);
        assert_eq!(steps().len(), STEPS);
    }

    #[test]
    fn endpoints_beyond_the_maximum_share_one_series() {
        let metrics = Metrics::new();
        for i in 0..MAX_NAMES + 50 {
            metrics.endpoint("u", &format!("10.0.{}.{}:6443", i / 256, i % 256)).dialled("ok");
        }
        let text = metrics.render();
        let dials = text.lines().filter(|line| line.starts_with("jackstay_dials_total{")).count();
        assert_eq!(dials, MAX_NAMES + 1);
        assert!(text.contains("endpoint=\"other\",outcome=\"ok\"} 50"), "{text}");
    }
}

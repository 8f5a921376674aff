//! The Prometheus recorder, which accepts only metrics of the table in [`super::names`].

use metrics::{
    Counter, Gauge, Histogram, Key, KeyName, Label, Level, Metadata, Recorder, SharedString, Unit,
};
use metrics_exporter_prometheus::{
    Matcher, PrometheusBuilder, PrometheusHandle, PrometheusRecorder,
};

use super::names::{self, MetricKind, MetricSpec};

/// Upper bounds of request durations in seconds, 0.5 ms to 60 s. A response from a nearby apiserver takes
/// one or two milliseconds; 60 s is the apiserver's own request timeout.
const DURATION_BUCKETS: &[f64] = &[
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
    60.0,
];

/// Upper bounds of PING round trips in seconds: from loopback to another continent, then the times after
/// which a connection is suspect (0.1) and dead (2.0).
const RTT_BUCKETS: &[f64] =
    &[0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0];

const METADATA: Metadata<'static> = Metadata::new("jackstay", Level::INFO, None);

/// Registers metrics of the table. Registration hashes and locks; code on the request path keeps the
/// handles that it returns.
pub(super) struct Registry {
    recorder: PrometheusRecorder,
}

impl std::fmt::Debug for Registry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Registry")
    }
}

impl Registry {
    /// A registry in which every metric of the table is described, and none has a series yet.
    pub(super) fn new() -> Self {
        let mut builder = PrometheusBuilder::new();
        for (spec, buckets) in [
            (names::REQUEST_DURATION, DURATION_BUCKETS),
            (names::SHADOW_DURATION, DURATION_BUCKETS),
            (names::PING_RTT, RTT_BUCKETS),
        ] {
            builder = builder
                .set_buckets_for_metric(Matcher::Full(spec.name.to_owned()), buckets)
                .unwrap_or_else(|error| unreachable!("the bucket lists are not empty: {error}"));
        }
        let recorder = builder.build_recorder();
        for spec in names::ALL {
            let (key, help) = (KeyName::from_const_str(spec.name), SharedString::from(spec.help));
            let unit = Some(match spec.unit {
                "seconds" => Unit::Seconds,
                "bytes" => Unit::Bytes,
                _ => Unit::Count,
            });
            match spec.kind {
                MetricKind::Counter => recorder.describe_counter(key, unit, help),
                MetricKind::Gauge => recorder.describe_gauge(key, unit, help),
                MetricKind::Histogram => recorder.describe_histogram(key, unit, help),
            }
        }
        Self { recorder }
    }

    /// The handle that renders all series.
    pub(super) fn handle(&self) -> PrometheusHandle {
        self.recorder.handle()
    }

    /// The counter of these label values, in the order of the table.
    pub(super) fn counter(&self, spec: &MetricSpec, values: &[&str]) -> Counter {
        debug_assert_eq!(spec.kind, MetricKind::Counter, "{}", spec.name);
        self.recorder.register_counter(&key(spec, values), &METADATA)
    }

    /// Adds `amount` to the counter of these label values, in the order of the table.
    pub(super) fn count(&self, spec: &MetricSpec, values: &[&str], amount: u64) {
        self.counter(spec, values).increment(amount);
    }

    /// The gauge of these label values, in the order of the table.
    pub(super) fn gauge(&self, spec: &MetricSpec, values: &[&str]) -> Gauge {
        debug_assert_eq!(spec.kind, MetricKind::Gauge, "{}", spec.name);
        self.recorder.register_gauge(&key(spec, values), &METADATA)
    }

    /// The histogram of these label values, in the order of the table.
    pub(super) fn histogram(&self, spec: &MetricSpec, values: &[&str]) -> Histogram {
        debug_assert_eq!(spec.kind, MetricKind::Histogram, "{}", spec.name);
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

//! The results: medians, ratios to `HAProxy` and the limits for jackstay, as a table and as JSON.

use std::{collections::BTreeMap, fmt::Write};

use serde_json::{Value, json};

use crate::proxies::{Layer, Target};

/// One row of the table.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Metric {
    CpuPerRequest,
    Requests,
    LatencyMedian,
    LatencyP99,
    BulkCpu,
    BulkSpeed,
    WatchMemory,
    LoneWatchMemory,
    BurstMemory,
    IdleRss,
    IdleCpu,
    FlowMemory,
    FlowsCpu,
    FlowDownCpu,
    FlowUpCpu,
    FlowSpeed,
    ConnectionCpu,
    ConnectionRate,
}

/// The largest value that is allowed for jackstay.
enum Limit {
    /// A multiple of `HAProxy`'s value in the same run.
    Ratio(f64),
    /// The smallest value of these proxies in the same run.
    AtMost(&'static [Target]),
    /// A value in the metric's unit.
    Value(f64),
    /// A value in the metric's unit for every sample, not only for the median.
    Each(f64),
}

impl Metric {
    const ALL: [Self; 18] = [
        Self::CpuPerRequest,
        Self::Requests,
        Self::LatencyMedian,
        Self::LatencyP99,
        Self::BulkCpu,
        Self::BulkSpeed,
        Self::WatchMemory,
        Self::LoneWatchMemory,
        Self::BurstMemory,
        Self::IdleRss,
        Self::IdleCpu,
        Self::FlowMemory,
        Self::FlowsCpu,
        Self::FlowDownCpu,
        Self::FlowUpCpu,
        Self::FlowSpeed,
        Self::ConnectionCpu,
        Self::ConnectionRate,
    ];

    /// The metrics of a layer.
    fn of(layer: Layer) -> impl Iterator<Item = Self> {
        let is_l4 = |metric: &Self| *metric >= Self::FlowMemory;
        Self::ALL.into_iter().filter(move |metric| is_l4(metric) == (layer == Layer::L4))
    }

    /// Key in the JSON, label in the table, decimal places.
    fn names(self) -> (&'static str, &'static str, usize) {
        match self {
            Self::CpuPerRequest => ("cpu_us_per_request", "CPU per request, µs", 2),
            Self::Requests => ("requests_per_second", "requests per second", 0),
            Self::LatencyMedian => ("added_latency_median_us", "added latency, median, µs *", 1),
            Self::LatencyP99 => ("added_latency_p99_us", "added latency, p99, µs *", 1),
            Self::BulkCpu => ("bulk_cpu_seconds_per_gb", "bulk, CPU-seconds per GB", 2),
            Self::BulkSpeed => ("bulk_mb_per_second", "bulk, MB per second", 0),
            Self::WatchMemory => ("kib_per_idle_watch", "memory per idle watch, KiB", 1),
            Self::LoneWatchMemory => {
                ("kib_per_idle_watch_alone", "idle watch, own connection, KiB", 1)
            }
            Self::BurstMemory => {
                ("kib_per_idle_watch_after_burst", "idle watch after a burst, KiB", 1)
            }
            Self::IdleRss => ("idle_rss_mib", "idle RSS, MiB", 1),
            Self::IdleCpu => ("idle_cpu_percent", "idle CPU, % of a core", 2),
            Self::FlowMemory => ("kib_per_idle_flow", "memory per idle flow, KiB", 2),
            Self::FlowsCpu => ("idle_flows_cpu_percent", "CPU with all flows idle, %", 2),
            Self::FlowDownCpu => ("flow_down_cpu_seconds_per_gb", "down, CPU-seconds per GB", 3),
            Self::FlowUpCpu => ("flow_up_cpu_seconds_per_gb", "up, CPU-seconds per GB", 3),
            Self::FlowSpeed => ("flow_mb_per_second", "down, MB per second", 0),
            Self::ConnectionCpu => ("cpu_us_per_connection", "CPU per connection, µs", 1),
            Self::ConnectionRate => {
                ("connections_per_second_and_core", "connections per second and core", 0)
            }
        }
    }

    /// The limit, for metrics that have one; the README lists them.
    fn limit(self) -> Option<Limit> {
        match self {
            Self::CpuPerRequest | Self::LatencyMedian => Some(Limit::Ratio(1.0)),
            Self::BulkCpu => Some(Limit::Ratio(0.5)),
            Self::WatchMemory => Some(Limit::Value(10.0)),
            Self::BurstMemory => Some(Limit::Each(10.0)),
            Self::IdleRss => Some(Limit::Value(12.0)),
            Self::IdleCpu => Some(Limit::Value(0.5)),
            Self::FlowMemory => Some(Limit::AtMost(&[Target::Haproxy])),
            Self::FlowDownCpu | Self::FlowUpCpu => {
                Some(Limit::AtMost(&[Target::Haproxy, Target::Nginx]))
            }
            Self::Requests
            | Self::LatencyP99
            | Self::BulkSpeed
            | Self::LoneWatchMemory
            | Self::FlowsCpu
            | Self::FlowSpeed
            | Self::ConnectionCpu
            | Self::ConnectionRate => None,
        }
    }
}

/// All samples of a run: one per round, in the order of the rounds.
#[derive(Default)]
pub struct Samples(BTreeMap<(Metric, Target), Vec<f64>>);

impl Samples {
    /// Adds a sample.
    pub fn add(&mut self, metric: Metric, target: Target, value: f64) {
        self.0.entry((metric, target)).or_default().push(value);
    }

    fn median(&self, metric: Metric, target: Target) -> Option<f64> {
        self.0.get(&(metric, target)).and_then(|samples| median(samples))
    }

    /// The median of the ratios to `HAProxy` in each round.
    fn ratio(&self, metric: Metric, target: Target) -> Option<f64> {
        if matches!(metric, Metric::LatencyMedian | Metric::LatencyP99) && target == Target::Direct
        {
            return None; // the values of the proxies are relative to this one
        }
        self.ratio_to(Target::Haproxy, metric, target)
    }

    fn ratio_to(&self, base: Target, metric: Metric, target: Target) -> Option<f64> {
        let mine = self.0.get(&(metric, target))?;
        let base = self.0.get(&(metric, base))?;
        let pairs = mine.iter().zip(base).filter(|(_, base)| **base > 0.0);
        median(&pairs.map(|(mine, base)| mine / base).collect::<Vec<_>>())
    }

    /// jackstay's value and its limit; `None` without a limit or without samples.
    fn value_and_limit(&self, metric: Metric) -> Option<(f64, f64)> {
        let ours = self.0.get(&(metric, Target::Jackstay))?;
        Some(match metric.limit()? {
            Limit::Ratio(most) => (self.ratio(metric, Target::Jackstay)?, most),
            Limit::AtMost(peers) => {
                let ratio = |&peer| self.ratio_to(peer, metric, Target::Jackstay);
                (peers.iter().filter_map(ratio).reduce(f64::max)?, 1.0)
            }
            Limit::Value(most) => (median(ours)?, most),
            Limit::Each(most) => (ours.iter().copied().reduce(f64::max)?, most),
        })
    }

    /// Whether jackstay meets the limit. `None` without a limit, or if jackstay or a proxy to compare with was not
    /// measured.
    pub fn meets(&self, metric: Metric) -> Option<bool> {
        if let Some(Limit::AtMost(peers)) = metric.limit() {
            peers.iter().try_for_each(|&peer| self.0.get(&(metric, peer)).map(drop))?;
        }
        self.value_and_limit(metric).map(|(value, limit)| value <= limit)
    }

    /// Label, jackstay's value and limit of each measured metric of a layer.
    pub fn figures(&self, layer: Layer) -> Vec<(&'static str, f64, f64)> {
        let figure = |metric: Metric| {
            self.value_and_limit(metric).map(|(value, limit)| (metric.names().1, value, limit))
        };
        Metric::of(layer).filter_map(figure).collect()
    }

    /// Whether every limit of a layer was measured and met.
    pub fn meets_all(&self, layer: Layer) -> bool {
        Metric::of(layer).all(|metric| metric.limit().is_none() || self.meets(metric) == Some(true))
    }

    /// The table of a layer.
    pub fn table(&self, layer: Layer) -> String {
        let mut columns = match layer {
            Layer::L7 => [Target::Haproxy, Target::Envoy, Target::Jackstay, Target::Direct],
            Layer::L4 => Target::PROXIES,
        }
        .to_vec();
        if self.0.keys().any(|(_, target)| *target == Target::Before) {
            columns.insert(2, Target::Before);
        }
        let mut out = format!("{:<34}", format!("{layer:?}"));
        for column in &columns {
            let _ = write!(out, "{:>18}", column.name());
        }
        let _ = writeln!(out, "   limit for jackstay");
        for metric in Metric::of(layer) {
            let (_, label, decimals) = metric.names();
            let _ = write!(out, "{label:<34}");
            for &column in &columns {
                let value = self.median(metric, column).map_or("–".into(), |value| {
                    let ratio = self.ratio(metric, column);
                    let ratio = ratio.map_or(String::new(), |ratio| format!("×{ratio:.2}"));
                    format!("{value:.decimals$} {ratio:>6}")
                });
                let _ = write!(out, "{value:>18}");
            }
            let limit = match metric.limit() {
                None => String::new(),
                Some(Limit::Ratio(most)) => format!("≤ ×{most:.2}"),
                Some(Limit::AtMost(peers)) => {
                    let names: Vec<_> = peers.iter().map(|peer| peer.name()).collect();
                    format!("≤ {}", names.join(", "))
                }
                Some(Limit::Value(most)) => format!("≤ {most}"),
                Some(Limit::Each(most)) => format!("each ≤ {most}"),
            };
            let verdict = match self.meets(metric) {
                None => "",
                Some(true) => "met",
                Some(false) => "MISSED",
            };
            let _ = writeln!(out, "{}", format!("   {limit:<17}{verdict}").trim_end());
        }
        out += "×: median over all rounds of the ratio to haproxy.";
        out + if layer == Layer::L7 {
            " *: absolute for direct, added for the others.\n"
        } else {
            "\n"
        }
    }

    /// Medians, ratios and all samples.
    pub fn json(&self) -> Value {
        let mut metrics = serde_json::Map::new();
        for metric in Metric::ALL {
            let mut row = serde_json::Map::new();
            for ((_, target), samples) in self.0.iter().filter(|((this, _), _)| *this == metric) {
                let cell = json!({
                    "median": median(samples),
                    "ratio_to_haproxy": self.ratio(metric, *target),
                    "samples": samples,
                });
                row.insert(target.name().into(), cell);
            }
            if let Some(met) = self.meets(metric) {
                row.insert("limit_met".into(), met.into());
            }
            metrics.insert(metric.names().0.into(), row.into());
        }
        metrics.into()
    }
}

/// The median; `None` without samples.
pub fn median(samples: &[f64]) -> Option<f64> {
    let mut sorted = samples.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => None,
        len if len % 2 == 1 => Some(sorted[middle]),
        _ => Some(f64::midpoint(sorted[middle - 1], sorted[middle])),
    }
}

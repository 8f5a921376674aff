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
    TokenBulkCpu,
    TokenBulkSpeed,
    UploadCpu,
    UploadSpeed,
    TokenUploadCpu,
    TokenUploadSpeed,
    EventCpu,
    Events,
    RequestGrowth,
    BulkGrowth,
    WatchGrowth,
    WatchMemory,
    LoneWatchMemory,
    BurstMemory,
    ManyWatchesRss,
    IdleRss,
    IdleCpu,
    StartTime,
    ProgramSize,
    FlowMemory,
    FlowsCpu,
    FlowDownCpu,
    FlowUpCpu,
    FlowSpeed,
    ConnectionCpu,
    ConnectionRate,
}

/// The value that is allowed for jackstay; the largest one, if nothing else is said.
enum Limit {
    /// A multiple of `HAProxy`'s value in the same run.
    Ratio(f64),
    /// These multiples of the values of these proxies in the same run.
    AtMost(&'static [(Target, f64)]),
    /// The smallest value that is allowed, not the largest: this multiple of the proxy's value in the same run.
    AtLeast(Target, f64),
    /// A value in the metric's unit.
    Value(f64),
    /// A value in the metric's unit for every sample, not only for the median.
    Each(f64),
}

impl Metric {
    const ALL: [Self; 32] = [
        Self::CpuPerRequest,
        Self::Requests,
        Self::LatencyMedian,
        Self::LatencyP99,
        Self::BulkCpu,
        Self::BulkSpeed,
        Self::TokenBulkCpu,
        Self::TokenBulkSpeed,
        Self::UploadCpu,
        Self::UploadSpeed,
        Self::TokenUploadCpu,
        Self::TokenUploadSpeed,
        Self::EventCpu,
        Self::Events,
        Self::RequestGrowth,
        Self::BulkGrowth,
        Self::WatchGrowth,
        Self::WatchMemory,
        Self::LoneWatchMemory,
        Self::BurstMemory,
        Self::ManyWatchesRss,
        Self::IdleRss,
        Self::IdleCpu,
        Self::StartTime,
        Self::ProgramSize,
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
            Self::BulkCpu => ("bulk_cpu_seconds_per_gb", "bulk, certificate, CPU-s per GB", 2),
            Self::BulkSpeed => ("bulk_mb_per_second", "bulk, certificate, MB/s", 0),
            Self::TokenBulkCpu => ("bulk_token_cpu_seconds_per_gb", "bulk, token, CPU-s per GB", 2),
            Self::TokenBulkSpeed => ("bulk_token_mb_per_second", "bulk, token, MB/s", 0),
            Self::UploadCpu => {
                ("upload_cpu_seconds_per_gb", "upload, certificate, CPU-s per GB", 2)
            }
            Self::UploadSpeed => ("upload_mb_per_second", "upload, certificate, MB/s", 0),
            Self::TokenUploadCpu => {
                ("upload_token_cpu_seconds_per_gb", "upload, token, CPU-s per GB", 2)
            }
            Self::TokenUploadSpeed => ("upload_token_mb_per_second", "upload, token, MB/s", 0),
            Self::EventCpu => ("cpu_us_per_watch_event", "CPU per watch event, µs", 2),
            Self::Events => ("watch_events_per_second", "watch events per second", 0),
            Self::RequestGrowth => ("request_growth", "CPU per request, 8 × the work / 1 ×", 2),
            Self::BulkGrowth => ("bulk_growth", "CPU per GB, 8 × the work / 1 ×", 2),
            Self::WatchGrowth => ("watch_growth", "CPU per event, 8 × the work / 1 ×", 2),
            Self::WatchMemory => ("kib_per_idle_watch", "memory per idle watch, KiB", 1),
            Self::LoneWatchMemory => {
                ("kib_per_idle_watch_alone", "idle watch, own connection, KiB", 1)
            }
            Self::BurstMemory => {
                ("kib_per_idle_watch_after_burst", "idle watch after a burst, KiB", 1)
            }
            Self::ManyWatchesRss => {
                ("rss_mib_with_10000_watches", "RSS with 10,000 watches, MiB", 1)
            }
            Self::IdleRss => ("idle_rss_mib", "idle RSS, MiB", 1),
            Self::IdleCpu => ("idle_cpu_percent", "idle CPU, % of a core", 2),
            Self::StartTime => ("start_ms", "start to first response, ms", 1),
            Self::ProgramSize => ("program_mib", "size of the program, MiB", 1),
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

    /// The label in the table.
    pub fn label(self) -> &'static str {
        self.names().1
    }

    /// Whether the physical limit of the metric is measured, too.
    fn is_cpu_under_load(self) -> bool {
        matches!(
            self,
            Self::CpuPerRequest
                | Self::BulkCpu
                | Self::TokenBulkCpu
                | Self::UploadCpu
                | Self::TokenUploadCpu
                | Self::EventCpu
        )
    }

    /// The limit, for metrics that have one; the README lists them.
    fn limit(self) -> Option<Limit> {
        match self {
            Self::CpuPerRequest | Self::LatencyMedian => Some(Limit::Ratio(1.0)),
            Self::BulkCpu => Some(Limit::AtMost(&[(Target::Haproxy, 0.5), (Target::Envoy, 0.9)])),
            Self::TokenBulkCpu | Self::UploadCpu | Self::TokenUploadCpu => {
                Some(Limit::AtMost(&[(Target::Envoy, 0.9)]))
            }
            Self::BulkSpeed | Self::TokenBulkSpeed | Self::UploadSpeed | Self::TokenUploadSpeed => {
                Some(Limit::AtLeast(Target::Envoy, 1.0))
            }
            Self::EventCpu => Some(Limit::Ratio(0.75)),
            Self::RequestGrowth | Self::BulkGrowth | Self::WatchGrowth => Some(Limit::Value(1.25)),
            Self::ManyWatchesRss => Some(Limit::Value(60.0)),
            Self::WatchMemory => Some(Limit::Value(10.0)),
            Self::BurstMemory => Some(Limit::Each(10.0)),
            Self::IdleRss => Some(Limit::Value(12.0)),
            Self::IdleCpu => Some(Limit::Value(0.5)),
            Self::FlowMemory => Some(Limit::AtMost(&[(Target::Haproxy, 1.0)])),
            Self::FlowDownCpu | Self::FlowUpCpu => {
                Some(Limit::AtMost(&[(Target::Haproxy, 1.0), (Target::Nginx, 1.0)]))
            }
            Self::Requests
            | Self::LatencyP99
            | Self::Events
            | Self::StartTime
            | Self::ProgramSize
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
pub struct Samples {
    samples: BTreeMap<(Metric, Target), Vec<f64>>,
    /// For metrics of growth, the costs from which the ratio was calculated.
    costs: BTreeMap<(Metric, Target), Vec<f64>>,
}

impl Samples {
    /// Adds a sample.
    pub fn add(&mut self, metric: Metric, target: Target, value: f64) {
        self.samples.entry((metric, target)).or_default().push(value);
    }

    /// Adds the costs of a unit with growing work, for the JSON.
    pub fn add_costs(&mut self, metric: Metric, target: Target, costs: Vec<f64>) {
        self.costs.insert((metric, target), costs);
    }

    fn median(&self, metric: Metric, target: Target) -> Option<f64> {
        self.samples.get(&(metric, target)).and_then(|samples| median(samples))
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
        let mine = self.samples.get(&(metric, target))?;
        let base = self.samples.get(&(metric, base))?;
        let pairs = mine.iter().zip(base).filter(|(_, base)| **base > 0.0);
        median(&pairs.map(|(mine, base)| mine / base).collect::<Vec<_>>())
    }

    /// jackstay's value and its limit; `None` without a limit or without samples.
    fn value_and_limit(&self, metric: Metric) -> Option<(f64, f64)> {
        let ours = self.samples.get(&(metric, Target::Jackstay))?;
        Some(match metric.limit()? {
            Limit::Ratio(most) => (self.ratio(metric, Target::Jackstay)?, most),
            Limit::AtMost(peers) => {
                let ratio = |&(peer, most): &(Target, f64)| {
                    Some(self.ratio_to(peer, metric, Target::Jackstay)? / most)
                };
                (peers.iter().filter_map(ratio).reduce(f64::max)?, 1.0)
            }
            // Inverted, so that a larger value is worse here too.
            Limit::AtLeast(peer, least) => {
                (least / self.ratio_to(peer, metric, Target::Jackstay)?, 1.0)
            }
            Limit::Value(most) => (median(ours)?, most),
            Limit::Each(most) => (ours.iter().copied().reduce(f64::max)?, most),
        })
    }

    /// Whether jackstay meets the limit. `None` without a limit, or if jackstay or a proxy to compare with was not
    /// measured.
    pub fn meets(&self, metric: Metric) -> Option<bool> {
        if let Some(Limit::AtMost(peers)) = metric.limit() {
            peers.iter().try_for_each(|&(peer, _)| self.samples.get(&(metric, peer)).map(drop))?;
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

    /// Whether every limit of a layer was met, and with `all` also measured.
    pub fn meets_all(&self, layer: Layer, all: bool) -> bool {
        let met = |metric: Metric| self.meets(metric).unwrap_or(metric.limit().is_none() || !all);
        Metric::of(layer).all(met)
    }

    /// The table of a layer.
    pub fn table(&self, layer: Layer) -> String {
        let mut columns = match layer {
            Layer::L7 => vec![
                Target::Haproxy,
                Target::Envoy,
                Target::Jackstay,
                Target::TlsRelay,
                Target::Direct,
            ],
            Layer::L4 => Target::PROXIES.to_vec(),
        };
        if self.samples.keys().any(|(_, target)| *target == Target::Before) {
            columns.insert(2, Target::Before);
        }
        let mut out = format!("{:<38}", format!("{layer:?}"));
        for column in &columns {
            let _ = write!(out, "{:>18}", column.name());
        }
        let _ = writeln!(out, "   limit for jackstay");
        for metric in Metric::of(layer) {
            let (_, label, decimals) = metric.names();
            let _ = write!(out, "{label:<38}");
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
                    let limit = |&(peer, most): &(Target, f64)| match most {
                        1.0 => peer.name().to_owned(),
                        most => format!("×{most:.2} {}", peer.name()),
                    };
                    format!("≤ {}", peers.iter().map(limit).collect::<Vec<_>>().join(", "))
                }
                Some(Limit::AtLeast(peer, least)) => format!("≥ ×{least:.2} {}", peer.name()),
                Some(Limit::Value(most)) => format!("≤ {most}"),
                Some(Limit::Each(most)) => format!("each ≤ {most}"),
            };
            let verdict = match self.meets(metric) {
                None => "",
                Some(true) => "met",
                Some(false) => "MISSED",
            };
            let _ = writeln!(out, "{}", format!("   {limit:<30}{verdict}").trim_end());
        }
        out += "×: median over all rounds of the ratio to haproxy.";
        out + if layer == Layer::L7 {
            " *: absolute for direct, added for the others.\n"
        } else {
            "\n"
        }
    }

    /// How many times the CPU of the physical limit each proxy uses, for the metrics of CPU at L7 with load.
    pub fn distance_to_limit(&self) -> String {
        let mut out = String::new();
        for metric in Metric::of(Layer::L7) {
            let cells: Vec<_> = [Target::Haproxy, Target::Envoy, Target::Before, Target::Jackstay]
                .into_iter()
                .filter_map(|target| {
                    let ratio = self.ratio_to(Target::TlsRelay, metric, target)?;
                    Some(format!("{} ×{ratio:.2}", target.name()))
                })
                .collect();
            if metric.is_cpu_under_load() && !cells.is_empty() {
                let _ = writeln!(out, "{:<38}{}", metric.label(), cells.join("   "));
            }
        }
        out
    }

    /// Medians, ratios and all samples.
    pub fn json(&self) -> Value {
        let mut metrics = serde_json::Map::new();
        for metric in Metric::ALL {
            let mut row = serde_json::Map::new();
            for ((_, target), samples) in
                self.samples.iter().filter(|((this, _), _)| *this == metric)
            {
                let mut cell = json!({
                    "median": median(samples),
                    "ratio_to_haproxy": self.ratio(metric, *target),
                    "samples": samples,
                });
                if let Some(ratio) = self.ratio_to(Target::TlsRelay, metric, *target) {
                    cell["ratio_to_tls_relay"] = ratio.into();
                }
                if let Some(costs) = self.costs.get(&(metric, *target)) {
                    cell["with_growing_work"] = json!(costs);
                }
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

//! What the samples say: medians, ratios to `HAProxy`, and the bar of promise 10, as a table for
//! people and as JSON for machines.

use std::{collections::BTreeMap, fmt::Write};

use serde_json::{Value, json};

use crate::proxies::Target;

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
    IdleRss,
    IdleCpu,
}

/// The most jackstay may need.
enum Bar {
    /// Times what `HAProxy` needs in the same run.
    Ratio(f64),
    /// In the metric's own unit.
    Value(f64),
}

impl Metric {
    const ALL: [Self; 10] = [
        Self::CpuPerRequest,
        Self::Requests,
        Self::LatencyMedian,
        Self::LatencyP99,
        Self::BulkCpu,
        Self::BulkSpeed,
        Self::WatchMemory,
        Self::LoneWatchMemory,
        Self::IdleRss,
        Self::IdleCpu,
    ];

    /// Key in the JSON, label in the table, decimals.
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
                ("kib_per_idle_watch_alone", "the same, alone on its connection", 1)
            }
            Self::IdleRss => ("idle_rss_mib", "idle RSS, MiB", 1),
            Self::IdleCpu => ("idle_cpu_percent", "idle CPU, % of a core", 2),
        }
    }

    /// Promise 10.
    fn bar(self) -> Option<Bar> {
        match self {
            Self::CpuPerRequest | Self::LatencyMedian => Some(Bar::Ratio(1.0)),
            Self::BulkCpu => Some(Bar::Ratio(0.5)),
            Self::WatchMemory => Some(Bar::Value(10.0)),
            Self::IdleRss => Some(Bar::Value(12.0)),
            Self::IdleCpu => Some(Bar::Value(0.5)),
            Self::Requests | Self::LatencyP99 | Self::BulkSpeed | Self::LoneWatchMemory => None,
        }
    }
}

/// All samples of a run; one a round, in the order of the rounds.
#[derive(Default)]
pub struct Samples(BTreeMap<(Metric, Target), Vec<f64>>);

impl Samples {
    /// Records one.
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
            return None; // its latency is the base, not an addition to it
        }
        let mine = self.0.get(&(metric, target))?;
        let base = self.0.get(&(metric, Target::Haproxy))?;
        let pairs = mine.iter().zip(base).filter(|(_, base)| **base > 0.0);
        median(&pairs.map(|(mine, base)| mine / base).collect::<Vec<_>>())
    }

    /// Whether jackstay meets the bar; `None` where there is no bar or nothing to compare.
    fn meets(&self, metric: Metric) -> Option<bool> {
        Some(match metric.bar()? {
            Bar::Ratio(most) => self.ratio(metric, Target::Jackstay)? <= most,
            Bar::Value(most) => self.median(metric, Target::Jackstay)? <= most,
        })
    }

    /// Whether every bar was measured and met.
    pub fn meets_all(&self) -> bool {
        Metric::ALL.iter().all(|&metric| metric.bar().is_none() || self.meets(metric) == Some(true))
    }

    /// The table.
    pub fn table(&self) -> String {
        let columns = [Target::Haproxy, Target::Envoy, Target::Jackstay, Target::Direct];
        let mut out = format!("{:<34}", "");
        for column in columns {
            let _ = write!(out, "{:>18}", column.name());
        }
        let _ = writeln!(out, "   bar for jackstay");
        for metric in Metric::ALL {
            let (_, label, decimals) = metric.names();
            let _ = write!(out, "{label:<34}");
            for column in columns {
                let value = self.median(metric, column).map_or("–".into(), |value| {
                    let ratio = self.ratio(metric, column);
                    let ratio = ratio.map_or(String::new(), |ratio| format!("×{ratio:.2}"));
                    format!("{value:.decimals$} {ratio:>6}")
                });
                let _ = write!(out, "{value:>18}");
            }
            let bar = match metric.bar() {
                None => String::new(),
                Some(Bar::Ratio(most)) => format!("≤ ×{most:.2}"),
                Some(Bar::Value(most)) => format!("≤ {most}"),
            };
            let verdict = match self.meets(metric) {
                None => "",
                Some(true) => "met",
                Some(false) => "MISSED",
            };
            let _ = writeln!(out, "{}", format!("   {bar:<9}{verdict}").trim_end());
        }
        out + "× is the median over rounds of the ratio to haproxy. * direct: the whole, not added.\n"
    }

    /// Medians, ratios and the samples themselves.
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
                row.insert("bar_met".into(), met.into());
            }
            metrics.insert(metric.names().0.into(), row.into());
        }
        metrics.into()
    }
}

fn median(samples: &[f64]) -> Option<f64> {
    let mut sorted = samples.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => None,
        len if len % 2 == 1 => Some(sorted[middle]),
        _ => Some(f64::midpoint(sorted[middle - 1], sorted[middle])),
    }
}

//! Compares the figures of a real run with those of many simulated ones.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::time::Duration;

use crate::rig::Real;
use crate::support::figures::{bound, is_strict};
use crate::timeline::{Figure, Figures};

/// How much a time may lie outside of the range of the simulated ones.
const TOLERANCE: f64 = 1.2;
/// What is added for the pauses of a machine, and for the time between two looks at `/status`.
const CONSTANT: Duration = Duration::from_millis(50);
/// A request passes the processes of client, jackstay and apiserver, which the machine may delay one after the other.
const PROCESSES: u32 = 3;
/// Events that fewer simulated runs have are shown, but their times and order are not compared: a few runs do not show
/// the range.
const MIN_RUNS: usize = 8;
/// Two events whose order is compared may be seen this much too early or too late.
const SEEN_LATE: Duration = Duration::from_millis(40);

/// The range of a figure over the runs that have it.
struct Range {
    min: f64,
    max: f64,
    runs: usize,
}

impl Range {
    fn of(name: &str, runs: &[Figures]) -> Option<Self> {
        let values: Vec<_> = runs.iter().filter_map(|run| Some(value(*run.get(name)?))).collect();
        let min = values.iter().copied().reduce(f64::min)?;
        let max = values.iter().copied().reduce(f64::max)?;
        Some(Self { min, max, runs: values.len() })
    }

    /// Why a measured figure lies outside, if the machine has paused for up to `pauses`.
    fn excludes(&self, figure: Figure, pauses: Duration) -> Option<String> {
        if self.runs < MIN_RUNS {
            return None;
        }
        let measured = value(figure);
        let (low, high) = if let Figure::Count(_, spread) = figure {
            (self.min / TOLERANCE - f64::from(spread), self.max * TOLERANCE + f64::from(spread))
        } else {
            let high = Duration::from_secs_f64(self.max * TOLERANCE) + CONSTANT;
            (self.min / TOLERANCE - CONSTANT.as_secs_f64(), (bound(high) + pauses).as_secs_f64())
        };
        let low = low.max(0.0);
        let is_outside = measured < low || measured > high;
        is_outside.then(|| format!("not within {low:.3}..{high:.3}"))
    }
}

/// Seconds, or a number.
fn value(figure: Figure) -> f64 {
    match figure {
        Figure::At(time) | Figure::Took(time) => time.as_secs_f64(),
        Figure::Count(count, _) => count as f64,
    }
}

/// The rows of a table, and what differs.
pub fn compare(scenario: &str, simulated: &[Figures], real: &Real) -> (String, Vec<String>) {
    let pauses = if is_strict() { Duration::ZERO } else { real.longest_pause * PROCESSES };
    // Where the watches are is by chance, and a watch that has moved before has nothing to resume.
    let must_resume = real.hits_all_endpoints && !real.figures.contains_key("first watch moved");
    let real = &real.figures;
    let mut names: BTreeSet<_> = simulated.iter().flat_map(Figures::keys).copied().collect();
    names.extend(real.keys());
    let (mut table, mut differences) = (String::new(), Vec::new());
    for name in names {
        let range = Range::of(name, simulated);
        let measured = real.get(name).copied();
        let difference = match (&range, measured) {
            (None, Some(_)) => Some("never in the simulation".to_owned()),
            (_, None) if name.ends_with("watch resumed") && !must_resume => None,
            (Some(range), None) if range.runs == simulated.len() => {
                Some("always in the simulation".to_owned())
            }
            (Some(range), Some(figure)) => range.excludes(figure, pauses),
            _ => None,
        };
        let range = range.map_or_else(
            || "-".to_owned(),
            |range| {
                let share = if range.runs == simulated.len() {
                    String::new()
                } else {
                    format!(" ({} of {})", range.runs, simulated.len())
                };
                format!("{:.3}..{:.3}{share}", range.min, range.max)
            },
        );
        let measured =
            measured.map_or_else(|| "-".to_owned(), |figure| format!("{:.3}", value(figure)));
        let mark = difference.as_deref().unwrap_or_default();
        let _ = writeln!(table, "| {scenario} | {name} | {range} | {measured} | {mark} |");
        differences
            .extend(difference.map(|text| {
                format!("{scenario}: {name} is {measured}, {text}; simulated {range}")
            }));
    }
    differences.extend(order(scenario, simulated, real, pauses));
    (table, differences)
}

/// Pairs of events whose order is that of every simulated run with both, but not of the real one.
fn order(scenario: &str, simulated: &[Figures], real: &Figures, pauses: Duration) -> Vec<String> {
    let times = |run: &Figures| -> Vec<(&'static str, Duration)> {
        let at = |(name, figure): (&&'static str, &Figure)| match figure {
            Figure::At(at) => Some((*name, *at)),
            _ => None,
        };
        run.iter().filter_map(at).collect()
    };
    let real = times(real);
    let mut differences = Vec::new();
    for &(first, first_at) in &real {
        for &(second, second_at) in &real {
            let is_before =
                |run: &Figures| Some(value(*run.get(first)?) < value(*run.get(second)?));
            let orders: Vec<_> = simulated.iter().filter_map(is_before).collect();
            if orders.len() >= MIN_RUNS
                && !orders.contains(&false)
                && first_at > second_at + SEEN_LATE + pauses
            {
                differences.push(format!(
                    "{scenario}: {first} ({first_at:.3?}) is before {second} ({second_at:.3?}) in every simulated run"
                ));
            }
        }
    }
    differences
}

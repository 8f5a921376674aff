//! Round trips and responses of an endpoint in the last ten minutes.
//!
//! The status page shows them without a Prometheus server. One endpoint takes about 5 KiB: the latest
//! [`SAMPLES`] round trips, and totals for each of the last [`STEPS`] steps of [`STEP`].

use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde::Serialize;

use super::lock;

/// Length of a step.
pub const STEP: Duration = Duration::from_secs(5);

/// Number of steps that are kept: ten minutes.
pub const STEPS: usize = 120;

/// Number of round trips that are kept. A connection yields about one per second.
pub const SAMPLES: usize = 512;

/// Quantiles of round trips, in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct RttQuantiles {
    /// Median.
    pub p50_ms: f64,
    /// 99th percentile.
    pub p99_ms: f64,
    /// Number of round trips.
    pub samples: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Default)]
struct Step {
    /// Median and 99th percentile of the round trips, in milliseconds.
    rtt: Option<(f32, f32)>,
    answers: u32,
    errors: u32,
}

/// The finished steps of an endpoint as columns, oldest first.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Columns {
    /// Median round trip of PINGs in milliseconds; null in a step without one.
    pub rtt_p50_ms: Vec<Option<f32>>,
    /// 99th percentile in milliseconds, which is the slowest of a step with fewer than 100 PINGs.
    pub rtt_p99_ms: Vec<Option<f32>>,
    /// Responses whose head arrived in the step.
    pub answers: Vec<u32>,
    /// Responses with status 500 and above.
    pub errors: Vec<u32>,
}

#[derive(Debug, Default)]
struct Recent {
    /// The last round trips in microseconds, oldest first.
    samples: VecDeque<u32>,
    /// Round trips since the last step.
    new_samples: usize,
    steps: VecDeque<Step>,
    /// Totals at the end of the last step.
    answers_before: u64,
    errors_before: u64,
}

/// The history of an endpoint. The data plane writes it, the admin endpoint reads it.
#[derive(Debug, Default)]
pub struct History {
    answers: AtomicU64,
    errors: AtomicU64,
    recent: Mutex<Recent>,
}

impl History {
    /// Records the round trip of a PING. Called about once a second per connection, so it may lock.
    pub fn rtt(&self, round_trip: Duration) {
        let micros = u32::try_from(round_trip.as_micros()).unwrap_or(u32::MAX);
        let mut recent = lock(&self.recent);
        push_bounded(&mut recent.samples, micros, SAMPLES);
        recent.new_samples += 1;
    }

    /// Counts a response head.
    pub fn answered(&self, status: u16) {
        self.answers.fetch_add(1, Ordering::Relaxed);
        if status >= 500 {
            self.errors.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Responses in total, and those with status 500 and above.
    pub fn totals(&self) -> (u64, u64) {
        // `answered` increments `answers` before `errors`, so `errors` is read first.
        let errors = self.errors.load(Ordering::Relaxed);
        (self.answers.load(Ordering::Relaxed).max(errors), errors)
    }

    /// Quantiles of the latest round trips; `None` before the first.
    pub fn quantiles(&self) -> Option<RttQuantiles> {
        let mut samples: Vec<u32> = lock(&self.recent).samples.iter().copied().collect();
        let (p50, p99) = quantiles(&mut samples)?;
        Some(RttQuantiles { p50_ms: p50.into(), p99_ms: p99.into(), samples: samples.len() })
    }

    /// Ends the current step.
    pub fn step(&self) {
        let (answers, errors) = self.totals();
        let mut recent = lock(&self.recent);
        let new_samples = std::mem::take(&mut recent.new_samples);
        let mut samples: Vec<u32> =
            recent.samples.iter().rev().take(new_samples).copied().collect();
        let step = Step {
            rtt: quantiles(&mut samples),
            answers: u32::try_from(answers - recent.answers_before).unwrap_or(u32::MAX),
            errors: u32::try_from(errors - recent.errors_before).unwrap_or(u32::MAX),
        };
        (recent.answers_before, recent.errors_before) = (answers, errors);
        push_bounded(&mut recent.steps, step, STEPS);
    }

    /// The finished steps, at most [`STEPS`].
    pub fn columns(&self) -> Columns {
        let steps = &lock(&self.recent).steps;
        Columns {
            rtt_p50_ms: steps.iter().map(|step| step.rtt.map(|rtt| rtt.0)).collect(),
            rtt_p99_ms: steps.iter().map(|step| step.rtt.map(|rtt| rtt.1)).collect(),
            answers: steps.iter().map(|step| step.answers).collect(),
            errors: steps.iter().map(|step| step.errors).collect(),
        }
    }
}

/// Appends a value and drops the oldest one above `max`.
fn push_bounded<T>(values: &mut VecDeque<T>, value: T, max: usize) {
    if values.len() >= max {
        values.pop_front();
    }
    values.push_back(value);
}

/// Median and 99th percentile in milliseconds (nearest rank), of samples in microseconds.
fn quantiles(samples: &mut [u32]) -> Option<(f32, f32)> {
    if samples.is_empty() {
        return None;
    }
    samples.sort_unstable();
    let rank = |percent: usize| (samples.len() * percent).div_ceil(100) - 1;
    let ms = |percent| samples[rank(percent)] as f32 / 1000.0;
    Some((ms(50), ms(99)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_use_the_nearest_rank() {
        let table = [
            (vec![], None),
            (vec![1500], Some((1.5, 1.5))),
            (vec![4000, 1000, 3000, 2000], Some((2.0, 4.0))),
            (vec![7, 7, 7], Some((0.007, 0.007))),
        ];
        for (mut samples, expected) in table {
            assert_eq!(quantiles(&mut samples), expected, "{samples:?}");
        }
        let mut hundred: Vec<u32> = (1..=200).rev().map(|ms| ms * 1000).collect();
        assert_eq!(quantiles(&mut hundred), Some((100.0, 198.0)));
    }

    #[test]
    fn step_covers_the_time_since_the_last_step() {
        let history = History::default();
        assert_eq!(history.quantiles(), None);
        history.rtt(Duration::from_millis(2));
        history.answered(200);
        history.answered(503);
        history.step();
        history.step();
        history.rtt(Duration::from_millis(4));
        history.rtt(Duration::from_millis(6));
        history.answered(404);
        history.step();
        let columns = history.columns();
        assert_eq!(columns.rtt_p50_ms, [Some(2.0), None, Some(4.0)]);
        assert_eq!(columns.rtt_p99_ms, [Some(2.0), None, Some(6.0)]);
        assert_eq!((columns.answers, columns.errors), (vec![2, 0, 1], vec![1, 0, 0]));
        assert_eq!(history.totals(), (3, 1));
        assert_eq!(
            history.quantiles(),
            Some(RttQuantiles { p50_ms: 4.0, p99_ms: 6.0, samples: 3 })
        );
    }

    #[test]
    fn history_keeps_the_latest_samples_and_steps() {
        let history = History::default();
        for i in 0..SAMPLES as u64 * 3 {
            history.rtt(Duration::from_micros(i));
            history.step();
        }
        let rtt = history.quantiles().expect("samples");
        assert_eq!(rtt.samples, SAMPLES);
        assert!(rtt.p50_ms > 2.0 * SAMPLES as f64 / 1000.0, "{rtt:?}");
        assert_eq!(history.columns().answers.len(), STEPS);
        // A step with more samples than the ring holds uses the latest ones.
        for _ in 0..SAMPLES * 2 {
            history.rtt(Duration::from_secs(3));
        }
        history.step();
        assert_eq!(history.columns().rtt_p50_ms.last(), Some(&Some(3000.0)));
    }
}

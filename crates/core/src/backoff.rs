//! Pauses that double with each failure in a row, up to a longest one, with a random part.
//!
//! Thousands of nodes lose the same apiserver at the same moment. The random part spreads what they do next.

use std::time::Duration;

/// The pause after some number of failures in a row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Backoff {
    first: Duration,
    longest: Duration,
    /// The smallest and the largest factor of a pause with its random part.
    factors: (f64, f64),
    failures: u32,
}

impl Backoff {
    /// No failure yet. The pause after the first one is `first`.
    pub const fn new(first: Duration, longest: Duration) -> Self {
        Self { first, longest, factors: (1.0, 1.0), failures: 0 }
    }

    /// With a random part: each pause is multiplied by a factor between these.
    #[must_use]
    pub const fn with_factors(self, smallest: f64, largest: f64) -> Self {
        Self { factors: (smallest, largest), ..self }
    }

    /// The same after this number of failures in a row.
    #[must_use]
    pub const fn after(self, failures: u32) -> Self {
        Self { failures, ..self }
    }

    /// Counts a failure. Returns the pause after it, without its random part.
    pub fn failed(&mut self) -> Duration {
        self.failures = self.failures.saturating_add(1);
        self.pause()
    }

    /// Forgets all failures.
    pub fn reset(&mut self) {
        self.failures = 0;
    }

    /// Number of failures in a row.
    pub fn failures(&self) -> u32 {
        self.failures
    }

    /// The pause after the last failure, without its random part. The first one if there was no failure.
    pub fn pause(&self) -> Duration {
        let factor = 1_u32.checked_shl(self.failures.saturating_sub(1)).unwrap_or(u32::MAX);
        self.first.saturating_mul(factor).min(self.longest)
    }

    /// The pause after the last failure with its random part; `random` is in 0..1.
    pub fn pause_at(&self, random: f64) -> Duration {
        let (smallest, largest) = self.factors;
        self.pause().mul_f64(smallest + (largest - smallest) * random)
    }

    /// The pause after the last failure with a random part.
    pub fn random_pause(&self, rng: &mut fastrand::Rng) -> Duration {
        self.pause_at(rng.f64())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn pause_doubles_from_the_first_to_the_longest_until_it_is_reset() {
        let mut backoff = Backoff::new(MS * 50, MS * 1_000);
        assert_eq!(backoff.pause(), MS * 50);
        for expected in [50, 100, 200, 400, 800, 1_000, 1_000] {
            assert_eq!(backoff.failed(), MS * expected);
            assert_eq!(backoff.pause(), MS * expected);
        }
        assert_eq!(backoff.failures(), 7);
        backoff.reset();
        assert_eq!(backoff.failed(), MS * 50);
    }

    proptest! {
        #[test]
        fn pause_never_falls_and_has_its_bounds(
            first in 1..10_000_u32,
            longest in 1..1_000_000_u32,
            failures in 1..u32::MAX,
            (smallest, width) in (0.1..1.0_f64, 0.0..1.0_f64),
            seed in any::<u64>(),
        ) {
            let backoff = Backoff::new(MS * first, MS * longest).after(failures);
            prop_assert!(backoff.pause() <= MS * longest);
            prop_assert!(backoff.pause() >= (MS * first).min(MS * longest));
            prop_assert!(backoff.after(failures - 1).pause() <= backoff.pause());
            let jittered = backoff.with_factors(smallest, smallest + width);
            let pause = jittered.random_pause(&mut fastrand::Rng::with_seed(seed));
            prop_assert!(pause >= backoff.pause().mul_f64(smallest * 0.999_999));
            prop_assert!(pause <= backoff.pause().mul_f64((smallest + width) * 1.000_001));
            prop_assert_eq!(jittered.pause_at(0.0), backoff.pause().mul_f64(smallest));
        }
    }
}

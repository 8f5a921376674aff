//! The round-trip time of PINGs, and when one is late by it.

use std::time::Duration;

/// Least time before a PING counts as late, whatever the RTT: scheduling noise of a busy node.
const SUSPECT_FLOOR: Duration = Duration::from_millis(100);

/// Smoothed round-trip time and its variance (RFC 6298 section 2).
#[derive(Debug, Clone, Copy, Default)]
pub struct Rtt {
    smoothed: Option<(f64, f64)>,
}

impl Rtt {
    /// Takes a measurement in.
    pub fn sample(&mut self, rtt: Duration) {
        let r = rtt.as_secs_f64();
        self.smoothed = Some(match self.smoothed {
            None => (r, r / 2.0),
            Some((srtt, var)) => (0.875 * srtt + 0.125 * r, 0.75 * var + 0.25 * (srtt - r).abs()),
        });
    }

    /// The smoothed value, once there is one.
    pub fn smoothed(&self) -> Option<Duration> {
        self.smoothed.map(|(srtt, _)| Duration::from_secs_f64(srtt))
    }

    /// max(4·srtt + 4·rttvar, 100 ms).
    pub fn suspect_after(&self) -> Duration {
        let (srtt, var) = self.smoothed.unwrap_or_default();
        Duration::from_secs_f64(4.0 * (srtt + var)).max(SUSPECT_FLOOR)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn suspicion_follows_rtt_and_its_variance() {
        let ms = Duration::from_millis;
        let mut rtt = Rtt::default();
        assert_eq!(rtt.suspect_after(), SUSPECT_FLOOR);
        rtt.sample(ms(100));
        assert_eq!(rtt.suspect_after(), ms(600));
        for _ in 0..100 {
            rtt.sample(ms(100));
        }
        let settled = rtt.suspect_after();
        assert!(settled >= ms(400) && settled < ms(410), "{settled:?}");
    }
}

//! The round-trip time of PINGs, and the time after which a PING is late.

use std::time::Duration;

/// Shortest time after which a PING is late, so that scheduling delays of a busy node raise no suspicion.
const SUSPECT_FLOOR: Duration = Duration::from_millis(100);

/// Smoothed round-trip time and its variance (RFC 6298 section 2).
#[derive(Debug, Clone, Copy, Default)]
pub struct Rtt {
    smoothed: Option<(f64, f64)>,
}

impl Rtt {
    /// Records a measurement.
    pub fn sample(&mut self, rtt: Duration) {
        let r = rtt.as_secs_f64();
        self.smoothed = Some(match self.smoothed {
            None => (r, r / 2.0),
            Some((srtt, var)) => (0.875 * srtt + 0.125 * r, 0.75 * var + 0.25 * (srtt - r).abs()),
        });
    }

    /// The smoothed round-trip time; `None` before the first measurement.
    pub fn smoothed(&self) -> Option<Duration> {
        self.smoothed.map(|(srtt, _)| Duration::from_secs_f64(srtt))
    }

    /// Time after which a PING is late: max(4·srtt + 4·rttvar, 100 ms).
    pub fn suspect_after(&self) -> Duration {
        let (srtt, var) = self.smoothed.unwrap_or_default();
        Duration::from_secs_f64(4.0 * (srtt + var)).max(SUSPECT_FLOOR)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn suspect_after_follows_rtt_and_its_variance() {
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

//! The round-trip time of PINGs, and the time after which a PING is late.

use std::time::Duration;

/// Shortest time after which a PING is late, so that scheduling delays of a busy node raise no suspicion.
const SUSPECT_FLOOR: Duration = Duration::from_millis(100);
/// Number of late PONGs in a row that show that the path has become slower. A lost packet, a lost connection that
/// returns, and a stopped process delay one or two: at 5 % packet loss each way, three in a row are late once in a
/// thousand PINGs.
const LATE_SAMPLES: u8 = 3;
/// The first PONG was delayed if the second one takes less than its time divided by this.
const FIRST_SAMPLE_RATIO: f64 = 4.0;

/// Smoothed round-trip time and its variance (RFC 6298 section 2) of the path, without the delays of faults.
///
/// TCP does not measure segments that were sent twice (Karn's algorithm, RFC 6298 section 3), since such a sample
/// says nothing about the path. A PONG does not show whether its PING or it was retransmitted, so late ones do not
/// count until [`LATE_SAMPLES`] have come in a row. Otherwise two faults in a row would delay the next suspicion
/// to a second.
#[derive(Debug, Clone, Copy, Default)]
pub struct Rtt {
    smoothed: Option<(f64, f64)>,
    /// Whether more than one sample was recorded.
    confirmed: bool,
    /// Number of late samples since the last one in time.
    late: u8,
}

impl Rtt {
    /// Records a measurement. Returns whether another PING should follow soon, because a fault may have delayed this
    /// one.
    pub fn sample(&mut self, rtt: Duration) -> bool {
        let r = rtt.as_secs_f64();
        let Some((srtt, var)) = self.smoothed else {
            self.restart(r);
            return self.suspect_after() > SUSPECT_FLOOR;
        };
        if !std::mem::replace(&mut self.confirmed, true) && r * FIRST_SAMPLE_RATIO < srtt {
            self.restart(r);
            return false;
        }
        let limit = self.suspect_after();
        let is_late = rtt > limit;
        self.late = if is_late { self.late.saturating_add(1) } else { 0 };
        if !is_late || self.late >= LATE_SAMPLES {
            // One sample of 3 s would delay suspicions for a minute.
            let r = r.min(2.0 * limit.as_secs_f64());
            // A shorter sample adds no variance: a fault only delays.
            let above = (r - srtt).max(0.0);
            self.smoothed = Some((0.875 * srtt + 0.125 * r, 0.75 * var + 0.25 * above));
        }
        is_late
    }

    /// Forgets all other samples.
    fn restart(&mut self, r: f64) {
        self.smoothed = Some((r, r / 2.0));
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

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    /// The estimate after these samples, in milliseconds.
    fn after(samples: &[u64]) -> Rtt {
        let mut rtt = Rtt::default();
        for sample in samples {
            rtt.sample(ms(*sample));
        }
        rtt
    }

    #[test]
    fn suspect_after_follows_rtt_and_its_variance() {
        assert_eq!(Rtt::default().suspect_after(), SUSPECT_FLOOR);
        assert_eq!(after(&[100]).suspect_after(), ms(600));
        let settled = after(&[100; 100]).suspect_after();
        assert!(settled >= ms(400) && settled < ms(410), "{settled:?}");
    }

    #[test]
    fn suspect_after_ignores_the_delays_of_faults() {
        for samples in [
            &[1, 1, 200][..],   // a lost packet
            &[1, 1, 3000, 200], // a stopped process, then a lost packet
            &[1, 1, 250, 1, 900, 800, 1, 200, 400],
            &[700, 1], // a packet was lost while the connection was opened
        ] {
            assert_eq!(after(samples).suspect_after(), SUSPECT_FLOOR, "{samples:?}");
        }
    }

    #[test]
    fn path_that_becomes_slower_is_learned_from_four_pongs() {
        for rtt in [150, 300, 600] {
            let mut slower = after(&[1, 1, 1]);
            let samples = (1..10).take_while(|_| slower.sample(ms(rtt))).count();
            assert!((3..=5).contains(&samples), "{rtt} ms: {samples} late samples");
            assert!(slower.suspect_after() > ms(rtt), "{rtt} ms: {:?}", slower.suspect_after());
        }
    }

    #[test]
    fn path_that_becomes_faster_is_learned() {
        let mut samples = vec![100; 20];
        samples.extend([1; 20]);
        let faster = after(&samples).suspect_after();
        assert_eq!(faster, SUSPECT_FLOOR);
    }

    #[test]
    fn doubtful_sample_is_measured_again() {
        assert!(!Rtt::default().sample(ms(1)));
        assert!(Rtt::default().sample(ms(100)));
        assert!(!after(&[100]).sample(ms(100)));
        assert!(!after(&[100]).sample(ms(1)));
        assert!(after(&[1]).sample(ms(200)));
        assert!(!after(&[1, 200]).sample(ms(1)));
    }
}

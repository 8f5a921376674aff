//! Decides when an apiserver whose connection is suspect counts as stopped or unreachable.

use std::time::{Duration, Instant};

use crate::line_delay::handshake_delay;

/// Time without a byte from the peer, while PINGs are sent, after which it counts as silent.
const SILENT_AFTER: Duration = Duration::from_millis(2_500);
/// Time for which a new handshake is tried before the verdict. A PING is sent each second, so the
/// verdict falls at most 3 s after the last byte from the peer.
const HANDSHAKE_TRIED_FOR: Duration = Duration::from_millis(1_800);
/// Interval of the checks during an examination.
const CHECK_INTERVAL: Duration = Duration::from_millis(50);
/// A check that is later than this suggests that this process was suspended.
const CHECK_LATE: Duration = Duration::from_millis(250);
/// Time for which the first late check of an examination withholds the verdict, so that bytes that have
/// arrived meanwhile are read first.
const GRACE: Duration = Duration::from_millis(500);

/// Distinguishes a silent peer from one whose bytes this process has not read yet.
#[derive(Debug)]
pub struct SilenceDetector {
    /// Earliest time of the verdict.
    verdict_from: Instant,
    /// When the next check is due.
    pub check_at: Instant,
    /// A check was late, and the verdict was withheld.
    had_late_check: bool,
}

impl SilenceDetector {
    /// The detector for a connection that became suspect `now`.
    pub fn new(now: Instant) -> Self {
        Self {
            verdict_from: now + HANDSHAKE_TRIED_FOR,
            check_at: now + CHECK_INTERVAL,
            had_late_check: false,
        }
    }

    /// Whether the peer counts as dead, if its last byte arrived at `last_received`, and bytes are late by `line_delay`
    /// ([`crate::line_delay`]). The first late check withholds the verdict for [`GRACE`]. Later ones do not: silence must be
    /// detected even on a host where every check is late.
    pub fn is_dead(&mut self, last_received: Instant, line_delay: Duration, now: Instant) -> bool {
        if now > self.check_at + CHECK_LATE && !std::mem::replace(&mut self.had_late_check, true) {
            self.verdict_from = self.verdict_from.max(now + GRACE);
        }
        self.check_at = now + CHECK_INTERVAL;
        now >= self.verdict_from + handshake_delay(line_delay)
            && now >= last_received + SILENT_AFTER + line_delay
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs a detector on a connection whose last byte arrived 1 s before it became suspect. This process
    /// is suspended for `paused` after that, and then makes each check `late` after it is due. The line delays bytes by
    /// `delay`. Returns the time from the suspicion to the verdict.
    fn time_to_verdict(paused: Duration, late: Duration, delay: Duration) -> Option<Duration> {
        let last_received = Instant::now();
        let suspected = last_received + Duration::from_secs(1);
        let mut detector = SilenceDetector::new(suspected);
        let mut now = suspected + paused;
        while now < suspected + Duration::from_secs(60) {
            now = now.max(detector.check_at) + late;
            if detector.is_dead(last_received, delay, now) {
                return Some(now - suspected);
            }
        }
        None
    }

    #[test]
    fn is_dead_late_checks_withhold_the_verdict_once() {
        const MS: Duration = Duration::from_millis(1);
        for (paused, late, delay, expected) in [
            (0, 0, 0, 1_800),
            (0, 0, 3_000, 10_800),
            (0, 240, 0, 2_030),
            // Each check is late. Only the first one withholds the verdict, and only for 500 ms.
            (0, 260, 0, 1_860),
            (0, 1_500, 0, 3_100),
            // After a suspension the verdict is withheld for 500 ms.
            (10_000, 0, 0, 10_500),
            (10_000, 260, 0, 10_880),
        ] {
            let verdict = time_to_verdict(paused * MS, late * MS, delay * MS);
            assert_eq!(
                verdict,
                Some(expected * MS),
                "{late} ms late after {paused} ms, {delay} ms of delay"
            );
        }
    }
}

//! A quota for log lines that any client can cause as often as it likes. The first [`LINES`] lines of a
//! window are logged. The others are counted, and the count is logged with the next line or after the
//! window.
//!
//! Unlike [`super::RepeatFilter`], the quota does not compare lines, since the client chooses their content.

use std::sync::Mutex;
use std::time::Duration;

use tokio::time::Instant;

use super::lock;

/// Lines logged per window.
const LINES: u32 = 20;

/// Length of a window, from its first line.
const WINDOW: Duration = Duration::from_secs(5);

/// The quota of one kind of line, shared by all workers.
#[derive(Debug, Default)]
pub struct LineQuota(Mutex<Window>);

#[derive(Debug, Default)]
struct Window {
    since: Option<Instant>,
    written: u32,
    suppressed: u64,
}

impl LineQuota {
    /// Returns `None` if a line must be suppressed now, and counts it. Otherwise returns the number of
    /// suppressed lines that the caller reports with the line.
    pub fn admit(&self, now: Instant) -> Option<u64> {
        let mut window = lock(&self.0);
        if window.is_over(now) {
            let suppressed = window.suppressed;
            *window = Window { since: Some(now), written: 1, suppressed: 0 };
            return Some(suppressed);
        }
        if window.written < LINES {
            window.written += 1;
            return Some(0);
        }
        window.suppressed += 1;
        None
    }

    /// The number of lines that the last window suppressed. Returns it once, after the end of the window;
    /// `None` if no line was suppressed.
    pub fn take_suppressed(&self, now: Instant) -> Option<u64> {
        let mut window = lock(&self.0);
        if !window.is_over(now) {
            return None;
        }
        let suppressed = std::mem::take(&mut *window).suppressed;
        (suppressed > 0).then_some(suppressed)
    }
}

impl Window {
    fn is_over(&self, now: Instant) -> bool {
        self.since.is_none_or(|since| now.saturating_duration_since(since) >= WINDOW)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn admit_logs_the_first_lines_of_a_window_and_counts_the_others_once() {
        let (quota, start) = (LineQuota::default(), Instant::now());
        let at = |ms| start + Duration::from_millis(ms);
        assert_eq!(quota.take_suppressed(at(0)), None);
        let admitted = (0..100).filter(|ms| quota.admit(at(*ms)) == Some(0)).count();
        assert_eq!(admitted, 20);
        assert_eq!(quota.take_suppressed(at(4_999)), None, "the window is not over");
        // The next line carries the count.
        assert_eq!(quota.admit(at(5_000)), Some(80));
        assert_eq!((0..21).filter(|_| quota.admit(at(5_001)).is_none()).count(), 2);
        // Without a next line, the end of the window reports it.
        assert_eq!(quota.take_suppressed(at(10_000)), Some(2));
        assert_eq!(quota.take_suppressed(at(20_000)), None);
        assert_eq!(quota.admit(at(20_001)), Some(0));
    }
}

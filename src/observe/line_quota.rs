//! A quota for log lines that any client can cause as often as it likes. The first lines of a window are logged,
//! and of one source at most half of them. The others are counted, and the count is logged with the next line or
//! after the window.
//!
//! Unlike [`super::RepeatFilter`], the quota does not compare lines, since the client chooses their content.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use jackstay_core::admission::Holders;
use jackstay_core::admission::turns::{Cap, KeyCap};
use jackstay_sys::sockets::source::Source;

use super::lock;

/// Length of a window, from its first line.
const WINDOW: Duration = Duration::from_secs(5);

/// The quota of one kind of line, shared by all workers.
#[derive(Debug)]
pub struct LineQuota {
    /// Limits the lines of a window.
    cap: Cap,
    window: Mutex<Window>,
}

#[derive(Debug, Default)]
struct Window {
    since: Option<Instant>,
    /// The logged lines by source. A flood of suppressed lines only looks its source up.
    logged: Holders<Source>,
    suppressed: u64,
}

impl LineQuota {
    /// Admits this many lines per window.
    pub fn new(lines: usize) -> Self {
        let cap = Cap { total: lines, key: KeyCap::AtMost(lines / 2), floor: 0 };
        Self { cap, window: Mutex::default() }
    }

    /// Returns `None` if a line must be suppressed now, and counts it. Otherwise returns the number of
    /// suppressed lines that the caller reports with the line.
    pub fn admit(&self, source: Source, now: Instant) -> Option<u64> {
        let mut window = lock(&self.window);
        let mut suppressed = 0;
        if window.is_over(now) {
            suppressed = window.suppressed;
            *window = Window { since: Some(now), ..Window::default() };
        }
        if self.cap.admits(window.logged.total(), window.logged.count(source)) {
            window.logged.add(source);
            return Some(suppressed);
        }
        window.suppressed += 1;
        None
    }

    /// The number of lines that the last window suppressed. Returns it once, after the end of the window;
    /// `None` if no line was suppressed.
    pub fn take_suppressed(&self, now: Instant) -> Option<u64> {
        let mut window = lock(&self.window);
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
    use jackstay_sys::clock;

    #[test]
    fn admit_logs_the_first_lines_of_a_window_and_counts_the_others_once() {
        let (quota, start) = (LineQuota::new(40), clock::now());
        let source = Source::User(0);
        let at = |ms| start + Duration::from_millis(ms);
        assert_eq!(quota.take_suppressed(at(0)), None);
        let admitted = (0..100).filter(|ms| quota.admit(source, at(*ms)) == Some(0)).count();
        assert_eq!(admitted, 20);
        assert_eq!(quota.take_suppressed(at(4_999)), None, "the window is not over");
        // The next line carries the count.
        assert_eq!(quota.admit(source, at(5_000)), Some(80));
        assert_eq!((0..21).filter(|_| quota.admit(source, at(5_001)).is_none()).count(), 2);
        // Without a next line, the end of the window reports it.
        assert_eq!(quota.take_suppressed(at(10_000)), Some(2));
        assert_eq!(quota.take_suppressed(at(20_000)), None);
        assert_eq!(quota.admit(source, at(20_001)), Some(0));
    }

    #[test]
    fn admit_logs_half_of_the_lines_of_one_source() {
        let (quota, now) = (LineQuota::new(20), clock::now());
        let address = |ip: &str| Source::from_ip(ip.parse().unwrap(), 64);
        for (source, expected) in [
            (Source::User(65_534), 10),
            (Source::User(65_534), 0),
            (address("2001:db8::1"), 6),
            (address("2001:db8::2"), 4),
            (Source::User(0), 0),
        ] {
            let attempts = if expected == 6 { 6 } else { 100 };
            let admitted = (0..attempts).filter(|_| quota.admit(source, now).is_some()).count();
            assert_eq!(admitted, expected, "{source:?}");
        }
    }
}

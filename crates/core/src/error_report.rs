//! What the log says of the errors that jackstay itself returns: own 5xx errors or resets, without an outage of the
//! listener's upstream within [`COLLECT`], are a warning with their number. The next one is [`ERRORS_EVERY`] later.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::outage::report::FAILS_BEFORE;
use crate::quantity::quantity;

/// How long own errors are collected before their line: they may be those of an outage.
const COLLECT: Duration = FAILS_BEFORE;
/// Time between two lines about the own errors of a listener.
const ERRORS_EVERY: Duration = Duration::from_secs(30);

/// How often jackstay has answered with one of its own errors since the process started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OwnErrorCount {
    /// Status code; `None` for a passthrough connection that was reset.
    pub code: Option<u16>,
    /// The label of the reason.
    pub reason: &'static str,
    /// The number.
    pub count: u64,
}

/// The own errors of one listener that were reported.
#[derive(Debug, Default)]
pub struct ErrorReport {
    reported: BTreeMap<(Option<u16>, &'static str), u64>,
    /// When the first error was seen that is not reported.
    first: Option<Instant>,
    last: Option<Instant>,
}

impl ErrorReport {
    /// Returns the errors to report now, with their number since the last report. Those of an outage are part
    /// of its lines.
    pub fn observe(&mut self, errors: &[OwnErrorCount], outage: bool, now: Instant) -> Vec<String> {
        let server_errors = || errors.iter().filter(|e| e.code.is_none_or(|code| code >= 500));
        let reported =
            |e: &OwnErrorCount| self.reported.get(&(e.code, e.reason)).copied().unwrap_or(0);
        let new = |error: &OwnErrorCount| error.count.saturating_sub(reported(error));
        if server_errors().all(|error| new(error) == 0) {
            return Vec::new();
        }
        let first = *self.first.get_or_insert(now);
        let paused = self.last.is_some_and(|last| now < last + ERRORS_EVERY);
        let texts = if outage {
            Vec::new()
        } else if paused || now < first + COLLECT {
            return Vec::new();
        } else {
            self.last = Some(now);
            let text = |error: &OwnErrorCount| {
                let what = error.code.map_or("reset".to_owned(), |code| code.to_string());
                format!("{} {what} {}", quantity(new(error), "time"), error.reason)
            };
            server_errors().filter(|error| new(error) > 0).map(text).collect()
        };
        self.first = None;
        self.reported = server_errors().map(|e| ((e.code, e.reason), e.count)).collect();
        texts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_errors_are_summarised_and_those_of_an_outage_are_not_repeated() {
        let (mut report, start) = (ErrorReport::default(), Instant::now());
        let at = |s| start + Duration::from_secs(s);
        let error = |code, reason, count| OwnErrorCount { code, reason, count };
        let errors = |n| [error(Some(503), "no_upstream", n), error(Some(401), "unauthorized", 9)];
        assert_eq!(report.observe(&errors(2), false, at(0)), [""; 0], "still collecting");
        assert_eq!(report.observe(&errors(3), false, at(2)), ["3 times 503 no_upstream"]);
        assert_eq!(report.observe(&errors(50), false, at(29)), [""; 0]);
        assert_eq!(report.observe(&errors(60), false, at(32)), ["57 times 503 no_upstream"]);
        assert_eq!(report.observe(&errors(65), false, at(69)), [""; 0]);
        assert_eq!(report.observe(&errors(900), true, at(70)), [""; 0]);
        assert_eq!(report.observe(&errors(900), false, at(110)), [""; 0]);
        let reset = [error(None, "unreachable", 2)];
        assert_eq!(report.observe(&reset, false, at(120)), [""; 0]);
        assert_eq!(report.observe(&reset, false, at(122)), ["2 times reset unreachable"]);
    }
}

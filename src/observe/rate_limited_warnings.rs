//! Warnings that any client can cause as often as it likes. The first one is logged immediately. Repetitions
//! are counted, and the count is logged with the next warning or after the window.
//!
//! Repetitions are counted by line, so a line may contain only parts with few values, such as a listener,
//! an endpoint or a cause. The client's address goes into the detail, which is shown if the line is logged.

use std::cell::{Cell, RefCell};
use std::fmt::Display;
use std::rc::Rc;
use std::time::Duration;

use jackstay_sys::clock;
use tokio::task::spawn_local;
use tokio::time::sleep;

use super::repeat_filter::RepeatFilter;

/// The warnings of one worker about one subject.
#[derive(Debug, Clone)]
pub struct RateLimitedWarnings(Rc<Inner>);

#[derive(Debug)]
struct Inner {
    window: Duration,
    repeats: RefCell<RepeatFilter>,
    /// A task that logs the remaining counts is running.
    flushing: Cell<bool>,
}

impl RateLimitedWarnings {
    /// Logs each line at most once per `window`.
    pub fn new(window: Duration) -> Self {
        let repeats = RefCell::new(RepeatFilter::new(window));
        Self(Rc::new(Inner { window, repeats, flushing: Cell::new(false) }))
    }

    /// Logs the warning or counts it. Must be called within a `LocalSet`.
    pub fn warn(&self, line: &str, detail: impl Display) {
        let admitted = self.0.repeats.borrow_mut().admit(line, clock::now());
        match admitted {
            Some(0) => tracing::warn!("{line}: {detail}"),
            Some(more) => tracing::warn!(more, "{line}: {detail}"),
            None => {}
        }
        if !self.0.flushing.replace(true) {
            let inner = Rc::clone(&self.0);
            spawn_local(async move { inner.log_remaining().await });
        }
    }
}

impl Inner {
    async fn log_remaining(&self) {
        while !self.repeats.borrow().is_empty() {
            sleep(self.window).await;
            let suppressed = self.repeats.borrow_mut().flush(clock::now());
            for (line, suppressed) in suppressed {
                tracing::warn!(more = suppressed.times, "{line}");
            }
        }
        self.flushing.set(false);
    }
}

#[cfg(test)]
mod tests {
    use super::super::log::tests::Captured;
    use super::*;
    use jackstay_config::LogFormat;
    use tokio::task::LocalSet;

    #[test]
    fn repeated_warnings_are_counted_and_the_end_of_a_burst_is_logged() {
        let captured = Captured::default();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .build()
            .unwrap();
        let flood = async {
            let warnings = RateLimitedWarnings::new(Duration::from_secs(5));
            for client in 0..1000 {
                warnings.warn("listener a: full", format_args!("10.0.0.1:{client}"));
                sleep(Duration::from_millis(8)).await;
            }
            warnings.warn("listener b: full", "10.0.0.2:1");
            sleep(Duration::from_secs(60)).await;
            assert!(warnings.0.repeats.borrow().is_empty() && !warnings.0.flushing.get());
            warnings.warn("listener a: full", "10.0.0.3:1");
        };
        captured.during(LogFormat::Text, || LocalSet::new().block_on(&runtime, flood));
        let lines: Vec<_> = captured.lines().iter().map(|line| line[26..].to_owned()).collect();
        let counted: u64 =
            lines.iter().filter_map(|line| line.split_once("more=")?.1.parse::<u64>().ok()).sum();
        let written = lines.iter().filter(|line| line.contains("full: 10.0.0.1")).count() as u64;
        assert_eq!(written + counted, 1000, "{lines:#?}");
        assert!(lines.len() <= 6, "{lines:#?}");
        assert!(lines.iter().any(|line| line.contains("listener b: full: 10.0.0.2:1")));
        assert!(lines.last().unwrap().ends_with("listener a: full: 10.0.0.3:1"), "{lines:#?}");
    }
}

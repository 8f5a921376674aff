//! Warnings that anybody who can connect may cause as often as they like: the first is written at
//! once, what follows like it is counted, and the count is told, also when the burst is over.
//!
//! What a line is about is its key, so it has to be of few kinds: a listener, an endpoint, a cause.
//! Who it was this time goes into the detail, which only lines that are written show.

use std::cell::{Cell, RefCell};
use std::fmt::Display;
use std::rc::Rc;
use std::time::Duration;

use tokio::task::spawn_local;
use tokio::time::{Instant, sleep};

use super::repeat_filter::RepeatFilter;

/// The warnings of one kind of trouble, on one worker.
#[derive(Debug, Clone)]
pub struct RateLimitedWarnings(Rc<Inner>);

#[derive(Debug)]
struct Inner {
    window: Duration,
    repeats: RefCell<RepeatFilter>,
    /// Somebody will tell what is left of a burst.
    telling: Cell<bool>,
}

impl RateLimitedWarnings {
    /// Writes each kind of line at most once per `window`.
    pub fn new(window: Duration) -> Self {
        let repeats = RefCell::new(RepeatFilter::new(window));
        Self(Rc::new(Inner { window, repeats, telling: Cell::new(false) }))
    }

    /// Warns, or counts. To be called within a `LocalSet`.
    pub fn warn(&self, line: &str, detail: impl Display) {
        let admitted = self.0.repeats.borrow_mut().admit(line, Instant::now());
        match admitted {
            Some(0) => tracing::warn!("{line}: {detail}"),
            Some(more) => tracing::warn!(more, "{line}: {detail}"),
            None => {}
        }
        if !self.0.telling.replace(true) {
            let inner = Rc::clone(&self.0);
            spawn_local(async move { inner.tell_the_rest().await });
        }
    }
}

impl Inner {
    async fn tell_the_rest(&self) {
        while !self.repeats.borrow().is_empty() {
            sleep(self.window).await;
            let rest = self.repeats.borrow_mut().flush(Instant::now());
            for (line, more) in rest {
                tracing::warn!(more, "{line}");
            }
        }
        self.telling.set(false);
    }
}

#[cfg(test)]
mod tests {
    use super::super::log::tests::Captured;
    use super::*;
    use crate::config::LogFormat;
    use tokio::task::LocalSet;

    #[test]
    fn a_flood_is_a_line_and_a_number_and_its_end_is_told() {
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
            assert!(warnings.0.repeats.borrow().is_empty() && !warnings.0.telling.get());
            warnings.warn("listener a: full", "10.0.0.3:1");
        };
        captured.during(LogFormat::Text, || LocalSet::new().block_on(&runtime, flood));
        let lines: Vec<_> = captured.lines().iter().map(|line| line[26..].to_owned()).collect();
        let told: u64 =
            lines.iter().filter_map(|line| line.split_once("more=")?.1.parse::<u64>().ok()).sum();
        let written = lines.iter().filter(|line| line.contains("full: 10.0.0.1")).count() as u64;
        assert_eq!(written + told, 1000, "{lines:#?}");
        assert!(lines.len() <= 6, "{lines:#?}");
        assert!(lines.iter().any(|line| line.contains("listener b: full: 10.0.0.2:1")));
        assert!(lines.last().unwrap().ends_with("listener a: full: 10.0.0.3:1"), "{lines:#?}");
    }
}

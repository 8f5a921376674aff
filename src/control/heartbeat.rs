//! Logs a loop that has not turned: a thread of its own, so that a stuck loop cannot hide itself.
//!
//! A loop that keeps the set of an upstream true beats on a [`Pulse`] each time it turns, at least
//! once a second. One that has not beaten for [`STUCK_AFTER`] is logged once, and once more when it
//! turns again. Sources, probes and certificates have the same thread: what holds up that is seen in
//! these loops.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// A loop that has not turned for this long is stuck.
pub const STUCK_AFTER: Duration = Duration::from_secs(5);
/// How often the pulses are felt.
const INTERVAL: Duration = Duration::from_secs(1);

/// Where a loop shows that it turns. Dropped with its loop.
#[derive(Debug, Default)]
pub struct Pulse(AtomicU64);

impl Pulse {
    /// The loop has turned.
    pub fn beat(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

#[derive(Debug)]
struct Watched {
    name: String,
    pulse: Weak<Pulse>,
    seen: u64,
    since: Instant,
    told: bool,
}

type List = Mutex<Vec<Watched>>;

/// Feels every pulse; its thread ends when it is dropped.
#[derive(Debug)]
pub struct Heartbeats {
    list: Arc<List>,
    stop: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Heartbeats {
    /// Starts the thread.
    ///
    /// # Errors
    /// There is no thread to be had.
    pub fn start() -> std::io::Result<Self> {
        let list = Arc::new(List::default());
        let (stop, stopped) = mpsc::channel::<()>();
        let watched = Arc::clone(&list);
        let thread = std::thread::Builder::new().name("heartbeats".into()).spawn(move || {
            while stopped.recv_timeout(INTERVAL) == Err(mpsc::RecvTimeoutError::Timeout) {
                look(&watched, Instant::now());
            }
        })?;
        Ok(Self { list, stop: Some(stop), thread: Some(thread) })
    }

    /// A pulse for the loop of that name.
    pub fn pulse(&self, name: &str) -> Arc<Pulse> {
        watch(&self.list, name)
    }

    /// The loops that do not turn.
    pub fn stuck(&self) -> Vec<String> {
        stuck(&self.list)
    }
}

#[cfg(test)]
impl Heartbeats {
    /// How often each loop has turned.
    pub(super) fn beats(&self) -> Vec<(String, u64)> {
        let list = self.list.lock().expect("no panic");
        let beats =
            |watched: &Watched| watched.pulse.upgrade().map(|p| p.0.load(Ordering::Relaxed));
        list.iter().map(|watched| (watched.name.clone(), beats(watched).unwrap_or(0))).collect()
    }
}

fn watch(list: &List, name: &str) -> Arc<Pulse> {
    let pulse = Arc::new(Pulse::default());
    let watched = Watched {
        name: name.to_owned(),
        pulse: Arc::downgrade(&pulse),
        seen: 0,
        since: Instant::now(),
        told: false,
    };
    list.lock().unwrap_or_else(PoisonError::into_inner).push(watched);
    pulse
}

fn stuck(list: &List) -> Vec<String> {
    let list = list.lock().unwrap_or_else(PoisonError::into_inner);
    list.iter().filter(|watched| watched.told).map(|watched| watched.name.clone()).collect()
}

impl Drop for Heartbeats {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// One look at every pulse. Nothing is held while a loop is called names.
fn look(list: &List, now: Instant) {
    let mut list = list.lock().unwrap_or_else(PoisonError::into_inner);
    list.retain(|watched| watched.pulse.strong_count() > 0);
    for watched in list.iter_mut() {
        let beats = watched.pulse.upgrade().map_or(0, |pulse| pulse.0.load(Ordering::Relaxed));
        let still = now.saturating_duration_since(watched.since);
        if beats != watched.seen {
            (watched.seen, watched.since) = (beats, now);
            if std::mem::take(&mut watched.told) {
                tracing::warn!(name = watched.name, after = ?still, "the loop turns again");
            }
        } else if still >= STUCK_AFTER && !watched.told {
            watched.told = true;
            tracing::error!(
                name = watched.name,
                for_seconds = still.as_secs(),
                "a loop has not turned: what it keeps up to date is not"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::LogFormat;
    use crate::observe::log::tests::Captured;

    #[test]
    fn a_loop_that_stands_still_is_told_and_forgotten_with_its_pulse() {
        let (list, captured) = (List::default(), Captured::default());
        let look = |list: &List, now| captured.during(LogFormat::Text, || look(list, now));
        let (turning, still) = (watch(&list, "turning"), watch(&list, "still"));
        let start = Instant::now();
        for second in 1..10 {
            turning.beat();
            look(&list, start + Duration::from_secs(second));
            let expected: &[&str] = if second >= 5 { &["still"] } else { &[] };
            assert_eq!(stuck(&list), expected, "after {second} s");
        }
        let told = captured.lines();
        assert_eq!(told.len(), 1, "once: {told:?}");
        assert!(told[0].contains("ERROR a loop has not turned") && told[0].contains("still"));
        still.beat();
        look(&list, start + Duration::from_secs(10));
        assert!(stuck(&list).is_empty());
        let told = captured.lines();
        assert_eq!(told.len(), 2, "{told:?}");
        assert!(told[1].contains("WARN the loop turns again") && told[1].contains("still"));
        drop(still);
        look(&list, start + Duration::from_secs(11));
        assert_eq!(list.lock().unwrap().len(), 1);
    }

    #[test]
    fn it_ends_with_its_owner() {
        let beats = Heartbeats::start().unwrap();
        let _pulse = beats.pulse("loop");
        drop(beats);
    }
}

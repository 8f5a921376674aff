//! Detects event loops that have stopped turning.
//!
//! Each loop records its turns on a [`Liveness`]; workers and discovery loops turn at least once a
//! second. `/livez` queries the workers. [`LivenessMonitor`] checks the discovery loops on a thread
//! of its own, since all of them share the control thread and one that blocks stops the others. It
//! logs once when a loop stalls and once when the loop turns again.
//!
//! Each query computes a stall from the time of the last turn, so the first one is as accurate as any
//! later one.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use tokio::time::Instant;

/// A loop that has not turned for this long is stalled.
pub const STALLED_AFTER: Duration = Duration::from_secs(5);
/// How often the monitor checks every loop.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// Stored instead of the time of the last turn once a loop has ended as intended.
const FINISHED: u64 = u64::MAX;

/// The turns of one loop. All clones report the same loop.
#[derive(Debug, Clone)]
pub struct Liveness(Arc<Turns>);

#[derive(Debug)]
struct Turns {
    name: String,
    created: Instant,
    /// Milliseconds from `created` to the last turn, or [`FINISHED`].
    last_turn: AtomicU64,
}

impl Liveness {
    /// A loop that starts now; its first turn is due within [`STALLED_AFTER`].
    pub fn new(name: &str) -> Self {
        Self::created_at(name, Instant::now())
    }

    fn created_at(name: &str, created: Instant) -> Self {
        let last_turn = AtomicU64::new(0);
        Self(Arc::new(Turns { name: name.to_owned(), created, last_turn }))
    }

    /// The name of the loop.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Records a turn.
    pub fn record_turn(&self) {
        self.0.record_turn(Instant::now());
    }

    /// Records that the loop has ended as intended: it is never stalled from now on. A loop that
    /// panics does not get here, so its other clones report it as stalled.
    pub fn finish(&self) {
        self.0.last_turn.store(FINISHED, Ordering::Relaxed);
    }

    /// Whether the loop has not turned for [`STALLED_AFTER`].
    pub fn is_stalled(&self) -> bool {
        self.0.is_stalled(Instant::now())
    }
}

impl Turns {
    fn record_turn(&self, now: Instant) {
        let since = now.saturating_duration_since(self.created);
        self.last_turn.store(since.as_millis() as u64, Ordering::Relaxed);
    }

    /// The time since the last turn; zero for a loop that has finished.
    fn idle(&self, now: Instant) -> Duration {
        match self.last_turn.load(Ordering::Relaxed) {
            FINISHED => Duration::ZERO,
            last => now.saturating_duration_since(self.created + Duration::from_millis(last)),
        }
    }

    fn is_stalled(&self, now: Instant) -> bool {
        self.idle(now) >= STALLED_AFTER
    }
}

/// A registered loop. It is removed when the last clone of its [`Liveness`] is dropped.
#[derive(Debug)]
struct Registered {
    turns: Weak<Turns>,
    stall_logged: bool,
}

type Registry = Mutex<Vec<Registered>>;

/// Checks all registered loops. Its thread ends when it is dropped.
#[derive(Debug)]
pub struct LivenessMonitor {
    registry: Arc<Registry>,
    stop: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl LivenessMonitor {
    /// Starts the monitor's thread.
    ///
    /// # Errors
    /// The thread cannot be created.
    pub fn start() -> std::io::Result<Self> {
        let registry = Arc::new(Registry::default());
        let (stop, stopped) = mpsc::channel::<()>();
        let checked = Arc::clone(&registry);
        let thread = std::thread::Builder::new().name("liveness".into()).spawn(move || {
            while stopped.recv_timeout(CHECK_INTERVAL) == Err(mpsc::RecvTimeoutError::Timeout) {
                check(&checked, Instant::now());
            }
        })?;
        Ok(Self { registry, stop: Some(stop), thread: Some(thread) })
    }

    /// Registers a loop. The loop keeps the handle for as long as it runs.
    pub fn register(&self, name: &str) -> Liveness {
        register(&self.registry, name, Instant::now())
    }

    /// The names of the loops that are stalled now.
    pub fn stalled(&self) -> Vec<String> {
        stalled(&self.registry, Instant::now())
    }
}

#[cfg(test)]
impl LivenessMonitor {
    /// The registered loops, each with the time since its last turn.
    pub(crate) fn idle_times(&self) -> Vec<(String, Duration)> {
        let registry = self.registry.lock().expect("no thread has panicked");
        let turns = registry.iter().filter_map(|registered| registered.turns.upgrade());
        turns.map(|turns| (turns.name.clone(), turns.idle(Instant::now()))).collect()
    }
}

impl Drop for LivenessMonitor {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn register(registry: &Registry, name: &str, now: Instant) -> Liveness {
    let liveness = Liveness::created_at(name, now);
    let registered = Registered { turns: Arc::downgrade(&liveness.0), stall_logged: false };
    registry.lock().unwrap_or_else(PoisonError::into_inner).push(registered);
    liveness
}

fn stalled(registry: &Registry, now: Instant) -> Vec<String> {
    let registry = registry.lock().unwrap_or_else(PoisonError::into_inner);
    let turns = registry.iter().filter_map(|registered| registered.turns.upgrade());
    turns.filter(|turns| turns.is_stalled(now)).map(|turns| turns.name.clone()).collect()
}

/// Logs each loop that has stalled or resumed since the last check, and forgets dropped loops.
fn check(registry: &Registry, now: Instant) {
    let mut registry = registry.lock().unwrap_or_else(PoisonError::into_inner);
    registry.retain_mut(|registered| {
        let Some(turns) = registered.turns.upgrade() else { return false };
        let is_stalled = turns.is_stalled(now);
        if is_stalled && !registered.stall_logged {
            let stalled_for = turns.idle(now);
            tracing::error!(
                name = turns.name,
                ?stalled_for,
                "control loop stalled; its state may be stale"
            );
        } else if !is_stalled && registered.stall_logged {
            tracing::warn!(name = turns.name, "control loop resumed");
        }
        registered.stall_logged = is_stalled;
        true
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::LogFormat;
    use crate::observe::log::tests::Captured;

    #[test]
    fn liveness_without_turns_stalls_after_the_limit() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let liveness = Liveness::created_at("loop", start);
        assert!(!liveness.0.is_stalled(at(4)), "the loop may still be starting");
        assert!(liveness.0.is_stalled(at(5)), "the loop has never turned");
        liveness.0.record_turn(at(100));
        assert!(!liveness.0.is_stalled(at(104)));
        assert!(liveness.0.is_stalled(at(3_600)), "the first query after the stall sees it");
        liveness.0.record_turn(at(3_601));
        assert!(!liveness.0.is_stalled(at(3_602)), "the loop turns again");
        liveness.finish();
        assert!(!liveness.0.is_stalled(at(10_000)), "the loop ended as intended");
    }

    #[test]
    fn monitor_logs_stall_and_resumption_once() {
        let (registry, captured) = (Registry::default(), Captured::default());
        let check = |now| captured.during(LogFormat::Text, || check(&registry, now));
        let start = Instant::now();
        let turning = register(&registry, "turning", start);
        let blocked = register(&registry, "blocked", start);
        for second in 1..10 {
            let now = start + Duration::from_secs(second);
            turning.0.record_turn(now);
            check(now);
            let expected: &[&str] = if second >= 5 { &["blocked"] } else { &[] };
            assert_eq!(stalled(&registry, now), expected, "after {second} s");
        }
        let lines = captured.lines();
        assert_eq!(lines.len(), 1, "{lines:?}");
        assert!(lines[0].contains("ERROR control loop stalled") && lines[0].contains("blocked"));
        let now = start + Duration::from_secs(10);
        blocked.0.record_turn(now);
        check(now);
        assert!(stalled(&registry, now).is_empty());
        let lines = captured.lines();
        assert_eq!(lines.len(), 2, "{lines:?}");
        assert!(lines[1].contains("WARN control loop resumed") && lines[1].contains("blocked"));
        drop(blocked);
        check(start + Duration::from_secs(11));
        assert_eq!(registry.lock().unwrap().len(), 1, "a dropped loop is forgotten");
    }

    #[test]
    fn monitor_ends_its_thread_when_dropped() {
        let monitor = LivenessMonitor::start().unwrap();
        let _liveness = monitor.register("loop");
        drop(monitor);
    }
}

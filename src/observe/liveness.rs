//! Detects event loops that no longer complete iterations.
//!
//! Each loop records its iterations on a [`Liveness`]. Workers and discovery loops complete at least
//! one iteration a second. `/livez` queries the workers. [`LivenessMonitor`] checks the discovery loops on a thread
//! of its own, since all of them share the control thread and one that blocks stops the others. It
//! logs once when a loop stalls and once when the loop resumes.
//!
//! Each query compares the time of the last iteration with the current time, so that a stall is
//! visible without an earlier query.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use tokio::time::Instant;

/// A loop that has not completed an iteration for this long is stalled.
pub const STALLED_AFTER: Duration = Duration::from_secs(5);
/// How often the monitor checks every loop.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// Stored instead of the time of the last iteration once a loop has ended as intended.
const FINISHED: u64 = u64::MAX;

/// Records the iterations of one loop. All clones belong to the same loop.
#[derive(Debug, Clone)]
pub struct Liveness(Arc<Iterations>);

#[derive(Debug)]
struct Iterations {
    name: String,
    created: Instant,
    /// Milliseconds from `created` to the last iteration, or [`FINISHED`].
    last_iteration: AtomicU64,
}

impl Liveness {
    /// A loop that starts now; its first iteration is due within [`STALLED_AFTER`].
    pub fn new(name: &str) -> Self {
        Self::created_at(name, Instant::now())
    }

    fn created_at(name: &str, created: Instant) -> Self {
        let last_iteration = AtomicU64::new(0);
        Self(Arc::new(Iterations { name: name.to_owned(), created, last_iteration }))
    }

    /// The name of the loop.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Records that the loop has completed an iteration.
    pub fn record_iteration(&self) {
        self.0.record_iteration(Instant::now());
    }

    /// Records that the loop has ended as intended: it is never stalled from now on. A loop that
    /// panics does not call this function, so the other clones report it as stalled.
    pub fn finish(&self) {
        self.0.last_iteration.store(FINISHED, Ordering::Relaxed);
    }

    /// Whether the loop has not completed an iteration for [`STALLED_AFTER`].
    pub fn is_stalled(&self) -> bool {
        self.0.is_stalled(Instant::now())
    }
}

impl Iterations {
    fn record_iteration(&self, now: Instant) {
        let since = now.saturating_duration_since(self.created);
        self.last_iteration.store(since.as_millis() as u64, Ordering::Relaxed);
    }

    /// The time since the last iteration; zero for a loop that has finished.
    fn idle(&self, now: Instant) -> Duration {
        match self.last_iteration.load(Ordering::Relaxed) {
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
    iterations: Weak<Iterations>,
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
    /// The registered loops, each with the time since its last iteration.
    pub(crate) fn idle_times(&self) -> Vec<(String, Duration)> {
        let registry = self.registry.lock().expect("no thread has panicked");
        let iterations = registry.iter().filter_map(|registered| registered.iterations.upgrade());
        iterations
            .map(|iterations| (iterations.name.clone(), iterations.idle(Instant::now())))
            .collect()
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
    let registered = Registered { iterations: Arc::downgrade(&liveness.0), stall_logged: false };
    registry.lock().unwrap_or_else(PoisonError::into_inner).push(registered);
    liveness
}

fn stalled(registry: &Registry, now: Instant) -> Vec<String> {
    let registry = registry.lock().unwrap_or_else(PoisonError::into_inner);
    let iterations = registry.iter().filter_map(|registered| registered.iterations.upgrade());
    iterations
        .filter(|iterations| iterations.is_stalled(now))
        .map(|iterations| iterations.name.clone())
        .collect()
}

/// Logs each loop that has stalled or resumed since the last check, and forgets dropped loops.
fn check(registry: &Registry, now: Instant) {
    let mut registry = registry.lock().unwrap_or_else(PoisonError::into_inner);
    registry.retain_mut(|registered| {
        let Some(iterations) = registered.iterations.upgrade() else { return false };
        let is_stalled = iterations.is_stalled(now);
        if is_stalled && !registered.stall_logged {
            let stalled_for = iterations.idle(now);
            tracing::error!(
                name = iterations.name,
                ?stalled_for,
                "control loop stalled; its state may be stale"
            );
        } else if !is_stalled && registered.stall_logged {
            tracing::warn!(name = iterations.name, "control loop resumed");
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
    fn liveness_without_iterations_stalls_after_the_limit() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let liveness = Liveness::created_at("loop", start);
        assert!(!liveness.0.is_stalled(at(4)), "the loop may still be starting");
        assert!(liveness.0.is_stalled(at(5)), "the loop has never completed an iteration");
        liveness.0.record_iteration(at(100));
        assert!(!liveness.0.is_stalled(at(104)));
        assert!(liveness.0.is_stalled(at(3_600)), "the first query during a stall reports it");
        liveness.0.record_iteration(at(3_601));
        assert!(!liveness.0.is_stalled(at(3_602)), "the loop has resumed");
        liveness.finish();
        assert!(!liveness.0.is_stalled(at(10_000)), "the loop ended as intended");
    }

    #[test]
    fn monitor_logs_stall_and_resumption_once() {
        let (registry, captured) = (Registry::default(), Captured::default());
        let check = |now| captured.during(LogFormat::Text, || check(&registry, now));
        let start = Instant::now();
        let running = register(&registry, "running", start);
        let blocked = register(&registry, "blocked", start);
        for second in 1..10 {
            let now = start + Duration::from_secs(second);
            running.0.record_iteration(now);
            check(now);
            let expected: &[&str] = if second >= 5 { &["blocked"] } else { &[] };
            assert_eq!(stalled(&registry, now), expected, "after {second} s");
        }
        let lines = captured.lines();
        assert_eq!(lines.len(), 1, "{lines:?}");
        assert!(lines[0].contains("ERROR control loop stalled") && lines[0].contains("blocked"));
        let now = start + Duration::from_secs(10);
        blocked.0.record_iteration(now);
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

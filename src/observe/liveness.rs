//! Detects event loops that no longer complete iterations.
//!
//! Each loop records its iterations on a [`Liveness`]. Workers and discovery loops complete at least one
//! iteration a second. `/livez` queries the workers. [`LivenessMonitor`] checks the discovery loops on its
//! own thread, because a loop that blocks the control thread stops all of them. It logs once when a loop
//! stalls and once when the loop resumes.
//!
//! Each query compares the time of the last iteration with the current time, so the first query during a
//! stall reports it.
//!
//! If the monitor itself has not run, no loop has: the process was stopped (SIGSTOP), its virtual machine was
//! suspended, or it got no CPU. That is one line for the process, and no loop counts as stalled for it. The loops
//! have [`STALLED_AFTER`] from then on.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use jackstay_sys::clock;

use super::lock;

/// A loop that has not completed an iteration for this long is stalled.
pub const STALLED_AFTER: Duration = Duration::from_secs(5);
/// How often the monitor checks every loop.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// The process has not run if a check is late by this. A busy machine delays a thread by less.
const PAUSED_AFTER: Duration = Duration::from_secs(2);
/// Stored instead of the time of the last iteration once a loop has ended as intended.
const FINISHED: u64 = u64::MAX;

/// Records the iterations of one loop. All clones belong to the same loop.
#[derive(Debug, Clone)]
pub struct Liveness(Arc<LoopState>);

#[derive(Debug)]
struct LoopState {
    name: String,
    created: Instant,
    /// Milliseconds from `created` to the last iteration, or [`FINISHED`].
    last_iteration: AtomicU64,
}

impl Liveness {
    /// A loop that starts now; its first iteration is due within [`STALLED_AFTER`].
    pub fn new(name: &str) -> Self {
        let (created, last_iteration) = (clock::now(), AtomicU64::new(0));
        Self(Arc::new(LoopState { name: name.to_owned(), created, last_iteration }))
    }

    /// The name of the loop.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Records that the loop has completed an iteration.
    pub fn record_iteration(&self) {
        let since = clock::elapsed(self.0.created);
        self.0.last_iteration.store(since.as_millis() as u64, Ordering::Relaxed);
    }

    /// Records that the loop has ended as intended: it is never stalled from now on. A loop that
    /// panics does not call this function, so the other clones report it as stalled.
    pub fn finish(&self) {
        self.0.last_iteration.store(FINISHED, Ordering::Relaxed);
    }

    /// Whether the loop has not completed an iteration for [`STALLED_AFTER`].
    pub fn is_stalled(&self) -> bool {
        self.0.is_stalled()
    }
}

impl LoopState {
    /// The time since the last iteration; zero for a loop that has finished.
    fn idle(&self) -> Duration {
        match self.last_iteration.load(Ordering::Relaxed) {
            FINISHED => Duration::ZERO,
            last => clock::elapsed(self.created + Duration::from_millis(last)),
        }
    }

    fn is_stalled(&self) -> bool {
        self.idle() >= STALLED_AFTER
    }
}

/// A registered loop. It is removed when the last clone of its [`Liveness`] is dropped.
#[derive(Debug)]
struct Registered {
    state: Weak<LoopState>,
    stall_logged: bool,
}

impl Registered {
    /// Whether the loop is stalled, although the process has run since `running_since`.
    fn is_stalled(&self, state: &LoopState, running_since: Instant) -> bool {
        // A loop that was stalled before the pause is still stalled.
        let had_time = self.stall_logged || clock::elapsed(running_since) >= STALLED_AFTER;
        had_time && state.is_stalled()
    }
}

/// The registered loops, and the times of the checks.
#[derive(Debug)]
struct Registry {
    loops: Vec<Registered>,
    /// Time of the last check.
    checked: Instant,
    /// Since when every check has been in time.
    running_since: Instant,
}

impl Registry {
    fn new() -> Arc<Mutex<Self>> {
        let now = clock::now();
        Arc::new(Mutex::new(Self { loops: Vec::new(), checked: now, running_since: now }))
    }

    /// How long a check is late at `now`, if that is a pause of the process.
    fn pause(&self, now: Instant) -> Option<Duration> {
        let pause = (now - self.checked).saturating_sub(CHECK_INTERVAL);
        (pause >= PAUSED_AFTER).then_some(pause)
    }

    /// The loops that run.
    fn states(&self) -> impl Iterator<Item = (&Registered, Arc<LoopState>)> {
        self.loops.iter().filter_map(|registered| Some((registered, registered.state.upgrade()?)))
    }
}

/// Checks all registered loops. Its thread ends when it is dropped.
#[derive(Debug)]
pub struct LivenessMonitor {
    registry: Arc<Mutex<Registry>>,
    stop: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl LivenessMonitor {
    /// Starts the monitor's thread.
    ///
    /// # Errors
    /// The thread cannot be created.
    pub fn start() -> std::io::Result<Self> {
        let registry = Registry::new();
        let (stop, stopped) = mpsc::channel::<()>();
        let checked = Arc::clone(&registry);
        let thread = std::thread::Builder::new().name("liveness".into()).spawn(move || {
            while stopped.recv_timeout(CHECK_INTERVAL) == Err(mpsc::RecvTimeoutError::Timeout) {
                check(&checked);
            }
        })?;
        Ok(Self { registry, stop: Some(stop), thread: Some(thread) })
    }

    /// Registers a loop. The loop keeps the handle for as long as it runs.
    pub fn register(&self, name: &str) -> Liveness {
        let liveness = Liveness::new(name);
        let state = Arc::downgrade(&liveness.0);
        lock(&self.registry).loops.push(Registered { state, stall_logged: false });
        liveness
    }

    /// The names of the loops that are stalled now.
    pub fn stalled(&self) -> Vec<String> {
        let registry = lock(&self.registry);
        // After a pause, the query may precede the check.
        let now = clock::now();
        let since = if registry.pause(now).is_some() { now } else { registry.running_since };
        let stalled =
            registry.states().filter(|(registered, state)| registered.is_stalled(state, since));
        stalled.map(|(_, state)| state.name.clone()).collect()
    }
}

#[cfg(test)]
impl LivenessMonitor {
    /// The registered loops, each with the time since its last iteration.
    pub(crate) fn idle_times(&self) -> Vec<(String, Duration)> {
        let registry = lock(&self.registry);
        registry.states().map(|(_, state)| (state.name.clone(), state.idle())).collect()
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

/// Logs each loop that has stalled or resumed since the last check, or that the process has not run, and forgets
/// dropped loops.
fn check(registry: &Mutex<Registry>) {
    let mut registry = lock(registry);
    let now = clock::now();
    if let Some(pause) = registry.pause(now) {
        registry.running_since = now;
        tracing::warn!(
            "this process did not run for at least {:.1} s: it was stopped (SIGSTOP), its machine was \
             suspended, or it got no CPU",
            pause.as_secs_f64()
        );
    }
    registry.checked = now;
    let Registry { loops, running_since, .. } = &mut *registry;
    loops.retain_mut(|registered| {
        let Some(state) = registered.state.upgrade() else { return false };
        let is_stalled = registered.is_stalled(&state, *running_since);
        if is_stalled && !registered.stall_logged {
            let stalled_for = state.idle();
            tracing::error!(
                name = state.name,
                ?stalled_for,
                "control loop stalled; its state may be stale"
            );
        } else if !is_stalled && registered.stall_logged {
            tracing::warn!(name = state.name, "control loop resumed");
        }
        registered.stall_logged = is_stalled;
        true
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe::log::tests::Captured;
    use jackstay_config::LogFormat;
    use tokio::time::advance;

    #[tokio::test(start_paused = true)]
    async fn liveness_without_iterations_stalls_after_the_limit() {
        let pass = |seconds| advance(Duration::from_secs(seconds));
        let liveness = Liveness::new("loop");
        pass(4).await;
        assert!(!liveness.is_stalled(), "the loop may still be starting");
        pass(1).await;
        assert!(liveness.is_stalled(), "the loop has never completed an iteration");
        pass(95).await;
        liveness.record_iteration();
        pass(4).await;
        assert!(!liveness.is_stalled());
        pass(3_500).await;
        assert!(liveness.is_stalled(), "the first query during a stall reports it");
        liveness.record_iteration();
        pass(1).await;
        assert!(!liveness.is_stalled(), "the loop has resumed");
        liveness.finish();
        pass(10_000).await;
        assert!(!liveness.is_stalled(), "the loop ended as intended");
    }

    #[tokio::test(start_paused = true)]
    async fn monitor_logs_stall_and_resumption_once() {
        // The monitor has no thread, so that only the test calls `check`.
        let monitor = LivenessMonitor { registry: Registry::new(), stop: None, thread: None };
        let captured = Captured::default();
        let check = || captured.during(LogFormat::Text, || check(&monitor.registry));
        let second = Duration::from_secs(1);
        let (running, blocked) = (monitor.register("running"), monitor.register("blocked"));
        for seconds in 1..10 {
            advance(second).await;
            running.record_iteration();
            check();
            let expected: &[&str] = if seconds >= 5 { &["blocked"] } else { &[] };
            assert_eq!(monitor.stalled(), expected, "after {seconds} s");
        }
        let lines = captured.lines();
        assert_eq!(lines.len(), 1, "{lines:?}");
        assert!(lines[0].contains("ERROR control loop stalled") && lines[0].contains("blocked"));
        advance(second).await;
        blocked.record_iteration();
        check();
        assert!(monitor.stalled().is_empty());
        let lines = captured.lines();
        assert_eq!(lines.len(), 2, "{lines:?}");
        assert!(lines[1].contains("WARN control loop resumed") && lines[1].contains("blocked"));
        drop(blocked);
        check();
        assert_eq!(lock(&monitor.registry).loops.len(), 1, "a dropped loop is forgotten");
    }

    #[tokio::test(start_paused = true)]
    async fn monitor_logs_a_pause_of_the_process_once_and_only_loops_that_stall_alone() {
        let monitor = LivenessMonitor { registry: Registry::new(), stop: None, thread: None };
        let captured = Captured::default();
        let check = || captured.during(LogFormat::Text, || check(&monitor.registry));
        let second = Duration::from_secs(1);
        let loops = ["a", "b", "blocked"].map(|name| monitor.register(name));
        // The check is one of a stopped process that continues: no loop has had time for an iteration.
        advance(second * 7).await;
        assert!(monitor.stalled().is_empty(), "before the check: {:?}", monitor.stalled());
        check();
        assert!(monitor.stalled().is_empty(), "{:?}", monitor.stalled());
        let lines = captured.lines();
        assert_eq!(lines.len(), 1, "{lines:?}");
        let expected = "WARN this process did not run for at least 6.0 s: it was stopped (SIGSTOP)";
        assert!(lines[0].contains(expected), "{lines:?}");
        let [a, b, blocked] = loops;
        for seconds in 1..8 {
            advance(second).await;
            a.record_iteration();
            b.record_iteration();
            check();
            let expected: &[&str] = if seconds >= 5 { &["blocked"] } else { &[] };
            assert_eq!(monitor.stalled(), expected, "after {seconds} s");
        }
        let lines = captured.lines();
        assert_eq!(lines.len(), 2, "{lines:?}");
        assert!(lines[1].contains("ERROR control loop stalled") && lines[1].contains("blocked"));
        // After another pause, the loop is still stalled: it has not resumed.
        advance(second * 4).await;
        check();
        assert_eq!(monitor.stalled(), ["blocked"]);
        assert_eq!(captured.lines().len(), 3, "{:?}", captured.lines());
        drop(blocked);
        // A check that is late by less than a pause has no line.
        advance(second * 5 / 2).await;
        check();
        assert_eq!(captured.lines().len(), 3, "{:?}", captured.lines());
    }

    #[test]
    fn monitor_ends_its_thread_when_dropped() {
        let monitor = LivenessMonitor::start().unwrap();
        let _liveness = monitor.register("loop");
        drop(monitor);
    }
}

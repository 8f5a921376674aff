//! Elapsed time without the time in which the whole process was stopped or not scheduled.

use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};

/// The interval at which the thread checks that the process runs.
const TICK: Duration = Duration::from_millis(10);
/// Timers are this late at times without a pause of the process.
const JITTER: Duration = Duration::from_millis(20);

/// When the process last ran, and for how long it had been paused in all.
#[derive(Clone, Copy)]
struct Pauses {
    at: Instant,
    total: Duration,
}

impl Pauses {
    fn now(self) -> Self {
        let late = self.at.elapsed().saturating_sub(TICK);
        let more = if late > JITTER { late } else { Duration::ZERO };
        Self { at: Instant::now(), total: self.total + more }
    }
}

/// The time for which this process has been paused since the first call.
fn paused() -> Duration {
    static PAUSES: OnceLock<Mutex<Pauses>> = OnceLock::new();
    let pauses = PAUSES.get_or_init(|| {
        std::thread::spawn(|| {
            loop {
                std::thread::sleep(TICK);
                let mut pauses = PAUSES.wait().lock().unwrap();
                *pauses = pauses.now();
            }
        });
        Mutex::new(Pauses { at: Instant::now(), total: Duration::ZERO })
    });
    // A pause that has just ended may not have been recorded by the thread yet.
    pauses.lock().unwrap().now().total
}

/// Measures a duration without the pauses of the process.
#[derive(Clone, Copy)]
pub struct Stopwatch {
    start: Instant,
    total: Duration,
}

impl Stopwatch {
    pub fn start() -> Self {
        let total = paused();
        Self { start: Instant::now(), total }
    }

    pub fn elapsed(&self) -> Duration {
        // In this order, a pause between the two reads counts as elapsed.
        let total = paused().saturating_sub(self.total);
        self.start.elapsed().saturating_sub(total)
    }
}

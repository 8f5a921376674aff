//! Measures elapsed time without the pauses of the process: the times in which the whole process was stopped or
//! not scheduled.

use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};

/// The interval at which a thread checks that the process runs.
const TICK: Duration = Duration::from_millis(10);
/// A tick that is late by no more than this is not counted as a pause, because timers are never exact.
const JITTER: Duration = Duration::from_millis(20);

#[derive(Clone, Copy)]
struct Pauses {
    /// The last time at which the process is known to have run.
    at: Instant,
    /// The sum of all pauses before that time.
    total: Duration,
}

impl Pauses {
    /// Adds the pause since the last tick, if there was one.
    fn update(self) -> Self {
        let late = self.at.elapsed().saturating_sub(TICK);
        let pause = if late > JITTER { late } else { Duration::ZERO };
        Self { at: Instant::now(), total: self.total + pause }
    }
}

/// The sum of the pauses of this process since the first call.
fn total_pauses() -> Duration {
    static PAUSES: OnceLock<Mutex<Pauses>> = OnceLock::new();
    let pauses = PAUSES.get_or_init(|| {
        std::thread::spawn(|| {
            loop {
                std::thread::sleep(TICK);
                let mut pauses = PAUSES.wait().lock().unwrap();
                *pauses = pauses.update();
            }
        });
        Mutex::new(Pauses { at: Instant::now(), total: Duration::ZERO })
    });
    // The thread may not have recorded a pause that has just ended.
    pauses.lock().unwrap().update().total
}

#[derive(Clone, Copy)]
pub struct Stopwatch {
    start: Instant,
    /// The sum of the pauses before `start`.
    pauses_before: Duration,
}

impl Stopwatch {
    pub fn start() -> Self {
        let pauses_before = total_pauses();
        Self { start: Instant::now(), pauses_before }
    }

    pub fn elapsed(&self) -> Duration {
        // In this order, a pause between the two reads counts as elapsed time.
        let pauses = total_pauses().saturating_sub(self.pauses_before);
        self.start.elapsed().saturating_sub(pauses)
    }
}

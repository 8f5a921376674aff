//! Time as a process can have noticed it: what the machine takes away from all of it at once, by
//! stopping it or by running something else, is nobody's delay.

use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};

/// How often it is looked whether the process still runs.
const TICK: Duration = Duration::from_millis(10);
/// So late is any timer now and then.
const USUAL: Duration = Duration::from_millis(20);

/// When the process was last seen running, and for how long it stood still before that.
#[derive(Clone, Copy)]
struct Seen {
    at: Instant,
    stood: Duration,
}

impl Seen {
    fn now(self) -> Self {
        let late = self.at.elapsed().saturating_sub(TICK);
        let more = if late > USUAL { late } else { Duration::ZERO };
        Self { at: Instant::now(), stood: self.stood + more }
    }
}

/// For how long this process has stood still since somebody first asked.
fn stood_still() -> Duration {
    static SEEN: OnceLock<Mutex<Seen>> = OnceLock::new();
    let seen = SEEN.get_or_init(|| {
        std::thread::spawn(|| {
            loop {
                std::thread::sleep(TICK);
                let mut seen = SEEN.wait().lock().unwrap();
                *seen = seen.now();
            }
        });
        Mutex::new(Seen { at: Instant::now(), stood: Duration::ZERO })
    });
    // What has just ended is not in there yet, if that thread has not had its turn.
    seen.lock().unwrap().now().stood
}

/// Measures how long something takes, without the time in which the process stood still.
#[derive(Clone, Copy)]
pub struct Stopwatch {
    start: Instant,
    stood: Duration,
}

impl Stopwatch {
    pub fn start() -> Self {
        let stood = stood_still();
        Self { start: Instant::now(), stood }
    }

    pub fn elapsed(&self) -> Duration {
        // In this order: what comes between the two is time that passes.
        let stood = stood_still().saturating_sub(self.stood);
        self.start.elapsed().saturating_sub(stood)
    }
}

//! The long form of the program: seeds of the scenarios until SIGINT or SIGTERM.

use std::io;
use std::panic::catch_unwind;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use jackstay_sim::scenario::Scenario;
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::Instant;

/// Time between two lines.
const REPORTS: Duration = Duration::from_secs(60);

/// The state that the threads share.
#[derive(Debug, Default)]
struct Progress {
    next: AtomicU64,
    ended: AtomicU64,
    failed: AtomicU64,
    stop: AtomicBool,
}

/// Runs seeds from `first` on, each in every scenario, on all processors until a signal arrives. Prints failed seeds at
/// once, a line each minute, and a summary. Returns the number of failures.
///
/// # Errors
/// The process cannot receive signals.
pub fn run(scenarios: &[&'static Scenario], first: u64) -> io::Result<u64> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let progress = Progress::default();
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    println!("{} scenarios from seed {first} on, until SIGINT or SIGTERM", scenarios.len());
    let began = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| work(&progress, scenarios, first));
        }
        let waited = runtime.block_on(report_until_signal(&progress));
        progress.stop.store(true, Ordering::Relaxed);
        waited
    })?;
    progress.report(began, 0);
    let count = scenarios.len() as u64;
    let next = first + progress.next.load(Ordering::Relaxed).div_ceil(count);
    println!("ended by a signal; --first {next} continues");
    Ok(progress.failed.into_inner())
}

impl Progress {
    /// Prints a line. The rate is that since a time at which so many runs had ended. Returns the runs that have ended.
    fn report(&self, since: Instant, ended_before: u64) -> u64 {
        let ended = self.ended.load(Ordering::Relaxed);
        println!(
            "{ended} seeds, {} failed, {:.0} seeds a second",
            self.failed.load(Ordering::Relaxed),
            (ended - ended_before) as f64 / since.elapsed().as_secs_f64(),
        );
        ended
    }
}

fn work(progress: &Progress, scenarios: &[&'static Scenario], first: u64) {
    while !progress.stop.load(Ordering::Relaxed) {
        let number = progress.next.fetch_add(1, Ordering::Relaxed);
        let count = scenarios.len() as u64;
        let (scenario, seed) = (scenarios[(number % count) as usize], first + number / count);
        let failed = match catch_unwind(|| scenario.check(seed)) {
            Ok(Ok(_)) => None,
            Ok(Err(report)) => Some(report),
            Err(_) => {
                let command = scenario.repeat_command(seed);
                Some(format!("{}: seed {seed} panicked\n{command}\n", scenario.name))
            }
        };
        progress.ended.fetch_add(1, Ordering::Relaxed);
        if let Some(report) = failed {
            progress.failed.fetch_add(1, Ordering::Relaxed);
            println!("{report}");
        }
    }
}

async fn report_until_signal(progress: &Progress) -> io::Result<()> {
    let (mut interrupt, mut terminate) =
        (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    let mut reports = tokio::time::interval_at(Instant::now() + REPORTS, REPORTS);
    let mut before = (Instant::now(), 0);
    loop {
        tokio::select! {
            _ = interrupt.recv() => return Ok(()),
            _ = terminate.recv() => return Ok(()),
            _ = reports.tick() => {
                before = (Instant::now(), progress.report(before.0, before.1));
            }
        }
    }
}

//! Seeds of the program as it ships. Each run is a process ([`jackstay_sim::shell::kernel`]), so that nothing of one
//! reaches the next, and the hash of its log is compared with that of a second process.

use std::collections::BTreeMap;
use std::io;
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use crate::output::{print, print_line};
use crate::subject::Subject;

/// What to run.
#[derive(Debug, Clone, Copy)]
pub struct Seeds {
    /// The first one.
    pub first: u64,
    /// How many.
    pub count: u64,
    /// Every seed whose number is a multiple of it is run twice; 0 for none.
    pub repeat: u64,
}

/// Runs one seed in this process, and prints what it has shown.
pub fn run_one(scenario: Subject, seed: u64, trace: bool) -> u64 {
    let run = match scenario.run(seed, trace) {
        Ok(run) => run,
        Err(error) => {
            print_line!("{}, seed {seed}: cannot run: {error}", scenario.name());
            return 1;
        }
    };
    if trace {
        print(format_args!("{}", run.log));
    }
    print_line!("{}, seed {seed}: {}", scenario.name(), run.findings);
    print_line!("{} packets, trace {:016x}", run.packets, run.hash);
    for text in &run.broken {
        print_line!("broken: {text}");
    }
    u64::from(!run.broken.is_empty())
}

/// Runs seeds of a scenario on all processors. The first ones that fail are printed. Returns their number.
pub fn run_many(scenario: Subject, seeds: Seeds) -> u64 {
    #[allow(clippy::disallowed_methods)] // the real time that the runs take
    let began = Instant::now();
    let failures = run_until(&[scenario], seeds, usize::MAX);
    #[allow(clippy::disallowed_methods)]
    let seconds = began.elapsed().as_secs_f64();
    for report in failures.values().take(5) {
        print_line!("{report}");
    }
    print_line!(
        "{:<20} {} seeds of the program, {} failed, {:.1} seeds a second",
        scenario.name(),
        seeds.count,
        failures.len(),
        seeds.count as f64 / seconds
    );
    failures.len() as u64
}

/// Runs the first seed of each scenario, then the next one, until a seed fails. Returns its report.
pub fn first_failure(scenarios: &[Subject], seeds: Seeds) -> Option<String> {
    run_until(scenarios, seeds, 1).into_values().next()
}

/// Runs seeds of scenarios on all processors until so many have failed. Returns the reports of those, in the order of
/// their runs.
fn run_until(scenarios: &[Subject], seeds: Seeds, failures: usize) -> BTreeMap<u64, String> {
    let next = AtomicU64::new(0);
    let reports = Mutex::new(BTreeMap::new());
    let reports = || reports.lock().unwrap_or_else(PoisonError::into_inner);
    let width = scenarios.len() as u64;
    let work = || {
        while reports().len() < failures {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if number >= seeds.count * width {
                return;
            }
            let (scenario, seed) =
                (scenarios[(number % width) as usize], seeds.first + number / width);
            let twice = seeds.repeat > 0 && seed.is_multiple_of(seeds.repeat);
            if let Err(report) = check(scenario, seed, twice) {
                reports().insert(number, report);
            }
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(work);
        }
    });
    std::mem::take(&mut *reports())
}

/// Runs a seed in a process of its own, or in two.
fn check(scenario: Subject, seed: u64, twice: bool) -> Result<(), String> {
    let first = run_process(scenario, seed)?;
    if twice {
        let second = run_process(scenario, seed)?;
        if first != second {
            return Err(format!(
                "{}: seed {seed} is not repeatable:\n{first}\n{second}\n{}\n",
                scenario.name(),
                repeat_command(scenario, seed)
            ));
        }
    }
    Ok(())
}

/// Runs a seed in a process of its own. Returns its output, or as an error if a promise is broken.
fn run_process(scenario: Subject, seed: u64) -> Result<String, String> {
    let seed_text = seed.to_string();
    // This program, also when a build has replaced its file.
    let mut run = Command::new("/proc/self/exe");
    let output = run.args(["--scenario", scenario.name(), "--seed", &seed_text]).output();
    let output = output.map_err(|error: io::Error| format!("cannot run the simulator: {error}"))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    if output.status.success() {
        return Ok(text);
    }
    let errors = String::from_utf8_lossy(&output.stderr);
    Err(format!("{text}{errors}{}, {}\n", output.status, repeat_command(scenario, seed)))
}

/// The command that repeats the run of a seed with its log.
fn repeat_command(scenario: Subject, seed: u64) -> String {
    format!(
        "repeat it: cargo run --profile sim -p jackstay-sim -- --scenario {} --seed {seed} --trace",
        scenario.name()
    )
}

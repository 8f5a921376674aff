//! Runs seeds of the scenarios and prints seeds a second.

mod forever;
mod storm_runs;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use jackstay_sim::scenario::Scenario;
use jackstay_sim::scenarios::{ALL, by_name};

const USAGE: &str = "usage: jackstay-sim [--seeds N | --forever] [--first N] [--until-failure] [--scenario NAME] \
                     [--seed N [--trace]] [--list], or \
                     jackstay-sim --storms [--nodes N] [--plots DIRECTORY]";

#[allow(clippy::struct_excessive_bools)] // independent flags
struct Arguments {
    seeds: u64,
    /// Until a signal arrives.
    forever: bool,
    first: Option<u64>,
    until_failure: bool,
    scenario: Option<&'static Scenario>,
    seed: Option<u64>,
    trace: bool,
    list: bool,
    storms: bool,
    nodes: Option<usize>,
    plots: Option<PathBuf>,
}

fn parse(mut args: impl Iterator<Item = String>) -> Result<Arguments, String> {
    let mut parsed = Arguments {
        seeds: 100,
        forever: false,
        first: None,
        until_failure: false,
        scenario: None,
        seed: None,
        trace: false,
        list: false,
        storms: false,
        nodes: None,
        plots: None,
    };
    while let Some(arg) = args.next() {
        let mut value = || args.next().ok_or(format!("{arg} needs a value"));
        let number = |text: String| text.parse().map_err(|_| format!("{text} is no number"));
        match arg.as_str() {
            "--seeds" => parsed.seeds = number(value()?)?,
            "--forever" => parsed.forever = true,
            "--first" => parsed.first = Some(number(value()?)?),
            "--until-failure" => parsed.until_failure = true,
            "--seed" => parsed.seed = Some(number(value()?)?),
            "--scenario" => {
                let name = value()?;
                parsed.scenario =
                    Some(by_name(&name).ok_or(format!("there is no scenario {name}; see --list"))?);
            }
            "--trace" => parsed.trace = true,
            "--list" => parsed.list = true,
            "--storms" => parsed.storms = true,
            "--nodes" => parsed.nodes = Some(number(value()?)? as usize),
            "--plots" => parsed.plots = Some(value()?.into()),
            _ => return Err(format!("{arg} is unknown; {USAGE}")),
        }
    }
    Ok(parsed)
}

fn main() -> ExitCode {
    let arguments = match parse(std::env::args().skip(1)) {
        Ok(arguments) => arguments,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::from(2);
        }
    };
    let scenarios: Vec<_> = match arguments.scenario {
        Some(scenario) => vec![scenario],
        None => ALL.iter().collect(),
    };
    if arguments.list {
        for scenario in scenarios {
            println!("{:<20} {}", scenario.name, scenario.about);
        }
        return ExitCode::SUCCESS;
    }
    if arguments.storms {
        let seed = arguments.seed.unwrap_or(1);
        return storm_runs::run(seed, arguments.nodes, arguments.plots.as_deref());
    }
    if arguments.forever {
        // Without a first seed, each invocation tries others.
        let first = arguments.first.unwrap_or_else(|| fastrand::u64(..1 << 40));
        return match forever::run(&scenarios, first) {
            Ok(0) => ExitCode::SUCCESS,
            Ok(_) => ExitCode::FAILURE,
            Err(error) => {
                eprintln!("signals cannot be received: {error}");
                ExitCode::FAILURE
            }
        };
    }
    let mut failures = 0;
    for scenario in scenarios {
        failures += match arguments.seed {
            Some(seed) => run_one(scenario, seed, arguments.trace),
            None => run_many(scenario, &arguments),
        };
        if arguments.until_failure && failures > 0 {
            break;
        }
    }
    if failures == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn run_one(scenario: &Scenario, seed: u64, trace: bool) -> u64 {
    let run = (scenario.sim)(seed).run(scenario.time);
    if trace {
        print!("{}", run.trace);
    }
    println!("{}, seed {seed}: {}", scenario.name, run.findings);
    println!("{} events, trace {:016x}", run.events, run.trace.hash());
    let broken = scenario.promises.broken_by(&run.findings);
    for text in &broken {
        println!("broken: {text}");
    }
    u64::from(!broken.is_empty())
}

/// Runs seeds on all processors; one run is one thread. The first seeds that fail are printed.
fn run_many(scenario: &'static Scenario, arguments: &Arguments) -> u64 {
    #[allow(clippy::disallowed_methods)] // the real time that the runs take
    let began = Instant::now();
    let &Arguments { seeds, first, until_failure, .. } = arguments;
    let first = first.unwrap_or(0);
    let (next, events) = (AtomicU64::new(first), AtomicU64::new(0));
    let failures = Mutex::new(BTreeMap::new());
    let failed = || failures.lock().unwrap_or_else(PoisonError::into_inner);
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                // Smaller seeds than one that has failed are run to the end, so that the first one is found.
                while !until_failure || failed().is_empty() {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= first + seeds {
                        return;
                    }
                    match scenario.check(seed) {
                        Ok(run) => drop(events.fetch_add(run.events, Ordering::Relaxed)),
                        Err(report) => drop(failed().insert(seed, report)),
                    }
                }
            });
        }
    });
    #[allow(clippy::disallowed_methods)]
    let seconds = began.elapsed().as_secs_f64();
    let failures = failures.into_inner().unwrap_or_else(PoisonError::into_inner);
    for report in failures.values().take(if until_failure { 1 } else { 5 }) {
        println!("{report}");
    }
    let failed = failures.len() as u64;
    let runs = next.into_inner().min(first + seeds) - first;
    println!(
        "{:<20} {runs} seeds, {failed} failed, {:.0} seeds a second, {:.0} events a seed",
        scenario.name,
        runs as f64 / seconds,
        events.into_inner() as f64 / (runs - failed).max(1) as f64
    );
    failed
}

//! Runs the storms, prints their figures, and draws them. Each storm is a process, as each seed is.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use jackstay_sim::plots;
use jackstay_sim::storms::{ALL, NODES, START, Storm};
use rustix::time::{ClockId, clock_gettime};

use crate::output::{print, print_line};

/// Seconds before the fault that a plot shows.
const BEFORE: usize = 10;

/// How to run storms.
struct Options {
    seed: u64,
    nodes: usize,
    /// The directory to write a plot of each to.
    plots: Option<PathBuf>,
}

/// Runs every storm on all processors (`--storms`), or one in this process (`--storm NAME`).
pub fn run(first: &str, rest: &[String]) -> ExitCode {
    let (name, rest) = match (first, rest) {
        ("--storm", [name, rest @ ..]) => (Some(name), rest),
        _ => (None, rest),
    };
    let storm = name.map(|name| ALL.iter().find(|storm| storm.name == *name));
    let kept = match (parse(rest), storm) {
        (Ok(options), None) if first == "--storms" => run_all(&options, rest),
        (Ok(options), Some(Some(storm))) => run_one(storm, &options),
        (Err(error), _) => {
            eprintln!("{error}; {}", crate::USAGE);
            return ExitCode::from(2);
        }
        _ => {
            let names: Vec<_> = ALL.iter().map(|storm| storm.name).collect();
            eprintln!("--storm needs one of {}", names.join(", "));
            return ExitCode::from(2);
        }
    };
    if kept { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn parse(arguments: &[String]) -> Result<Options, String> {
    let mut options = Options { seed: 1, nodes: NODES, plots: None };
    let mut arguments = arguments.iter();
    while let Some(argument) = arguments.next() {
        let value = arguments.next().ok_or(format!("{argument} needs a value"))?;
        let number = || value.parse::<u64>().map_err(|_| format!("{value} is no number"));
        match argument.as_str() {
            "--seed" => options.seed = number()?,
            "--nodes" => options.nodes = number()? as usize,
            "--plots" => options.plots = Some(value.into()),
            _ => return Err(format!("{argument} is unknown")),
        }
    }
    Ok(options)
}

/// Runs every storm in a process of its own with the same arguments. Returns whether all have kept their bounds.
fn run_all(options: &Options, arguments: &[String]) -> bool {
    let (next, failed) = (AtomicUsize::new(0), AtomicBool::new(false));
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    // The longest one first, so that no processor is idle meanwhile.
    let mut storms: Vec<_> = ALL.iter().collect();
    storms.sort_by_key(|storm| std::cmp::Reverse(storm.seconds));
    print_line!("{} nodes, seed {}", options.nodes, options.seed);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some(storm) = storms.get(next.fetch_add(1, Ordering::Relaxed)) {
                    if !run_process(storm, arguments) {
                        failed.store(true, Ordering::Relaxed);
                    }
                }
            });
        }
    });
    !failed.into_inner()
}

/// Returns whether the storm has kept its bounds.
fn run_process(storm: &Storm, arguments: &[String]) -> bool {
    let output = std::env::current_exe().and_then(|program| {
        Command::new(program).args(["--storm", storm.name]).args(arguments).output()
    });
    match output {
        Ok(output) => {
            let text = [output.stdout, output.stderr].concat();
            print(format_args!("{}", String::from_utf8_lossy(&text)));
            output.status.success()
        }
        Err(error) => {
            print_line!("{}: cannot run the simulator: {error}", storm.name);
            false
        }
    }
}

/// Returns whether the storm has kept its bounds and its plot was written.
fn run_one(storm: &Storm, options: &Options) -> bool {
    let result = match storm.run(options.seed, options.nodes) {
        Ok(result) => result,
        Err(error) => {
            print_line!("{}: cannot run: {error}", storm.name);
            return false;
        }
    };
    let processor = clock_gettime(ClockId::ProcessCPUTime);
    let seconds = processor.tv_sec as f64 + processor.tv_nsec as f64 / 1e9;
    print_line!("{}: {}\n  {}", storm.name, storm.about, result.summary);
    print_line!("  {} packets, trace {:016x}", result.run.packets, result.run.hash);
    eprintln!("  {seconds:.1} s of processor time");
    for text in &result.broken {
        print_line!("  broken: {text}");
    }
    let is_written = options.plots.as_ref().is_none_or(|directory| {
        let title = format!("{} nodes: {}", options.nodes, storm.about);
        let svg = plots::draw(&title, &result.load, BEFORE, START);
        write(&directory.join(format!("{}.svg", storm.name)), &svg)
    });
    result.broken.is_empty() && is_written
}

fn write(file: &Path, svg: &str) -> bool {
    if let Err(error) = std::fs::write(file, svg) {
        print_line!("  {} cannot be written: {error}", file.display());
        return false;
    }
    true
}

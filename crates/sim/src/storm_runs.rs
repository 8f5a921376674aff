//! Runs the storms, prints their figures, and draws them.

use std::path::Path;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;

use jackstay_sim::plots;
use jackstay_sim::storms::{ALL, NODES, START, Storm};

/// Seconds before the fault that a plot shows.
const BEFORE: usize = 10;

/// Runs every storm on all processors, with this number of nodes or with [`NODES`], and writes a plot of each to
/// `plots_to`.
pub fn run(seed: u64, nodes: Option<usize>, plots_to: Option<&Path>) -> ExitCode {
    let (next, failed) = (AtomicUsize::new(0), AtomicBool::new(false));
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some(storm) = ALL.get(next.fetch_add(1, Ordering::Relaxed)) {
                    if !run_one(storm, seed, nodes.unwrap_or(NODES), plots_to) {
                        failed.store(true, Ordering::Relaxed);
                    }
                }
            });
        }
    });
    if failed.into_inner() { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

/// Returns whether the storm has kept its bounds and its plot was written.
fn run_one(storm: &Storm, seed: u64, nodes: usize, plots_to: Option<&Path>) -> bool {
    #[allow(clippy::disallowed_methods)] // the real time that the run takes
    let began = Instant::now();
    let result = storm.run(seed, nodes, false);
    #[allow(clippy::disallowed_methods)]
    let seconds = began.elapsed().as_secs_f64();
    let rate = (nodes * storm.seconds) as f64 / seconds;
    println!(
        "{}: {}\n  {}\n  {seconds:.0} s, {rate:.0} seconds of a node in a second, {} events",
        storm.name, storm.about, result.summary, result.run.events
    );
    for text in &result.broken {
        println!("  broken: {text}");
    }
    let Some(directory) = plots_to else { return result.broken.is_empty() };
    let title = format!("{nodes} nodes: {}", storm.about);
    let svg = plots::draw(&title, &result.run.load, BEFORE, START);
    let file = directory.join(format!("{}.svg", storm.name));
    if let Err(error) = std::fs::write(&file, svg) {
        println!("  {} cannot be written: {error}", file.display());
        return false;
    }
    result.broken.is_empty()
}

//! Each storm with a small fleet of the program as it ships. `jackstay-sim --storms` runs the large ones.

use std::process::Command;

use jackstay_sim::storms::ALL;

/// Nodes of a fleet whose short storms take ten seconds in the dev profile.
const NODES: usize = 12;

/// What the run of a storm prints, and whether it keeps its bounds. Each run is a process.
fn run(name: &str, seed: u64, nodes: usize) -> (String, bool) {
    let (seed, nodes) = (seed.to_string(), nodes.to_string());
    let mut program = Command::new(env!("CARGO_BIN_EXE_jackstay-sim"));
    let output = program.args(["--storm", name, "--seed", &seed, "--nodes", &nodes]).output();
    let output = output.unwrap();
    (String::from_utf8(output.stdout).unwrap(), output.status.success())
}

#[track_caller]
fn check(name: &str) {
    let (text, kept) = run(name, 1, NODES);
    assert!(kept, "{text}");
}

#[test]
fn crash_moves_every_watch_without_a_list() {
    check("crash");
}

#[test]
fn partition_moves_every_watch_without_a_list() {
    check("partition");
}

#[test]
fn short_partitions_begin_few_watches() {
    check("blip");
}

#[test]
fn watches_leave_an_apiserver_without_etcd() {
    check("etcd-lost");
}

#[test]
#[ignore = "seven virtual minutes; `.ci/run` runs every storm"]
fn watches_are_even_after_a_rolling_restart() {
    check("rolling-restart");
}

#[test]
#[ignore = "fifteen virtual minutes; `.ci/run` runs every storm"]
fn watches_are_even_after_the_return_of_an_apiserver() {
    check("return");
}

#[test]
fn every_storm_is_tested() {
    let source = include_str!("storms.rs");
    for storm in ALL {
        assert!(source.contains(&format!("check(\"{}\")", storm.name)), "{}", storm.name);
    }
}

#[test]
fn run_of_the_same_seed_has_the_same_load() {
    let figures = |seed| run("crash", seed, 3).0;
    let first = figures(7);
    assert!(first.contains("3 nodes; for each node at most"), "{first}");
    assert_eq!(first, figures(7));
    assert_ne!(first, figures(8));
}

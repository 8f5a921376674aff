//! Each storm with a small fleet. `jackstay-sim --storms` runs the large ones.

use jackstay_sim::storms::{ALL, Storm};

/// Nodes of a small fleet. With fewer, chance makes the apiservers uneven: each node has two or three watches on one.
const NODES: usize = 120;

fn storm(name: &str) -> &'static Storm {
    ALL.iter().find(|storm| storm.name == name).unwrap()
}

#[track_caller]
fn check(name: &str) {
    let result = storm(name).run(1, NODES, true);
    assert_eq!(result.broken, Vec::<String>::new(), "{name}: {}", result.summary);
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
fn watches_leave_an_apiserver_without_etcd() {
    check("etcd-lost");
}

#[test]
fn watches_are_even_after_a_rolling_restart() {
    check("rolling-restart");
}

#[test]
#[cfg_attr(
    debug_assertions,
    ignore = "fifteen virtual minutes; `.ci/run` runs every storm in release"
)]
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
    let load = |seed| storm("crash").run(seed, NODES, false).run.load;
    assert_eq!(load(7), load(7));
    assert_ne!(load(7), load(8));
}

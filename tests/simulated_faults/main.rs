//! The simulator's model of the network against real sockets: the scenarios of `crates/sim` with a jackstay process,
//! apiservers and clients in a network namespace must give the same events in the same order, at times within 20 % of
//! those of the simulated runs.
//!
//! The real side runs one seed of a scenario: the same clients, the same fault at the same time. The simulated side runs
//! many seeds, because a time depends on when the fault comes: the PING before, the last event of a watch. A measured time
//! must lie within the range of the simulated ones, widened by 20 % and 50 ms; without `JACKSTAY_STRICT=1` the upper end
//! is four times that, and the measured pauses of the machine are added. The tests need root, `ip`, `ss` and nftables, and
//! run with the policy `SCHED_RR` (`chrt`). `JACKSTAY_TIMELINES=FOLDER` keeps logs and timelines.

#![cfg(feature = "demo")]

#[path = "../support/mod.rs"]
mod support;

mod clients;
mod comparison;
mod faults;
mod observer;
mod rig;
mod simulated;
mod timeline;

use jackstay_sim::scenarios;

/// Simulated runs.
const SEEDS: u64 = 50;

/// Runs a scenario on both sides, and prints the table. The seed of the real run differs each time.
fn check(name: &str) {
    let scenario = scenarios::by_name(name).expect("the scenario exists");
    let seed = std::env::var("JACKSTAY_SEED")
        .map_or_else(|_| fastrand::u64(..10_000), |seed| seed.parse().unwrap());
    // The real side runs before others, and waits most of the time.
    let simulated = std::thread::spawn(|| simulated::runs(scenario, SEEDS));
    let real = rig::run(scenario, seed);
    let simulated = simulated.join().unwrap();
    let (table, differences) = comparison::compare(name, &simulated, &real);
    println!(
        "seed {seed}, longest pause of the machine {:.3?}\n\n\
         | scenario | event | simulated, s | measured, s | |\n|---|---|---|---|---|\n{table}",
        real.longest_pause
    );
    assert!(differences.is_empty(), "seed {seed}:\n{}", differences.join("\n"));
}

macro_rules! scenarios {
    ($($test:ident: $name:literal),* $(,)?) => {
        $(
            #[test]
            #[ignore = "needs root for network namespaces"]
            fn $test() {
                check($name);
            }
        )*
    };
}

scenarios! {
    blackhole: "blackhole",
    blackhole_one_way: "blackhole-one-way",
    forgotten_flows: "forgotten-flows",
    kill: "kill",
    stop: "stop",
    refused: "refused",
    hang: "hang",
    loss: "loss",
    rolling_restart: "rolling-restart",
    outage: "outage",
    goaway: "goaway",
    overload: "overload",
}

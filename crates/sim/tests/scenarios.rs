//! Each scenario with some seeds, the determinism of runs, and the network model without jackstay.

use std::time::Duration;

use jackstay_sim::faults::FaultKind;
use jackstay_sim::scenario::{Role, Sim};
use jackstay_sim::scenarios::{ALL, by_name};
use jackstay_sim::trace::Entry;

const SECOND: Duration = Duration::from_secs(1);

/// Seeds of each scenario. `jackstay-sim --seeds N` tries more.
const SEEDS: u64 = 12;

#[track_caller]
fn check(names: &[&str]) {
    check_seeds(names, SEEDS);
}

#[track_caller]
fn check_seeds(names: &[&str], seeds: u64) {
    for name in names {
        let scenario = by_name(name).unwrap_or_else(|| panic!("no scenario {name}"));
        for seed in 0..seeds {
            if let Err(report) = scenario.check(seed) {
                let run = (scenario.sim)(seed).run(scenario.time);
                panic!("{}\n{report}", run.trace);
            }
        }
    }
}

#[test]
fn lost_paths_fail_no_read_and_break_no_watch() {
    check(&["blackhole", "blackhole-one-way", "forgotten-flows", "refused"]);
}

#[test]
fn dead_and_stopped_processes_fail_no_read_and_break_no_watch() {
    check(&["kill", "stop", "hang", "rolling-restart"]);
}

#[test]
fn loss_lag_goaway_and_overload_keep_their_promises() {
    check(&["loss", "lag", "goaway", "overload", "hostile"]);
}

#[test]
fn large_lists_delay_no_other_client() {
    check_seeds(&["bulk"], 3); // many events
}

#[test]
fn outages_are_answered_in_time_and_hold_watches() {
    check(&["outage", "outage-killed"]);
}

#[test]
fn random_faults_lose_no_event_repeat_no_write_and_leave_nothing_over() {
    check(&["random"]);
}

#[test]
fn scenarios_of_single_rules_keep_their_promises() {
    check(&["one-stream", "removed", "drained-blackhole", "too-old", "started", "starting"]);
    check(&["many-hedges", "broken-bodies", "pool-ends"]);
}

#[test]
fn every_scenario_is_tested() {
    let source = include_str!("scenarios.rs");
    for scenario in ALL {
        assert!(source.contains(&format!("\"{}\"", scenario.name)), "{}", scenario.name);
    }
}

#[test]
fn run_of_the_same_seed_has_the_same_trace() {
    let scenario = by_name("random").unwrap();
    let hash = |seed| (scenario.sim)(seed).run(scenario.time).trace.hash();
    assert_eq!(hash(7), hash(7));
    assert_ne!(hash(7), hash(8));
}

/// Clients of a load balancer that drops the packets of established flows from the servers, without jackstay: Go's PING is sent after 30 s without a frame,
/// and the connection ends 15 s later.
#[test]
fn direct_watch_behind_a_forgetful_load_balancer_is_silent_for_45_s() {
    for seed in 0..3 {
        let mut sim =
            Sim::seed(seed).direct().clients(Role::Informers, 2).clients(Role::Writers, 1);
        for server in 0..3 {
            let forget = FaultKind::ForgetFlows { dropped: [false, true] };
            sim = sim.fault(server, forget).at(5 * SECOND);
        }
        let found = sim.run(70 * SECOND).findings;
        let silence = found.longest_silence.as_secs_f64();
        assert!((43.0..50.0).contains(&silence), "seed {seed}: {found}");
        assert!(found.watches_broken > 0 && found.violations.is_empty(), "seed {seed}: {found}");
    }
}

/// kubelet without jackstay: the renewal ends after its timeout of 10 s, the one after it too, and then kubelet closes
/// its connections.
#[test]
fn direct_kubelet_behind_a_forgetful_load_balancer_recovers_after_two_timeouts() {
    for seed in 0..3 {
        let mut sim = Sim::seed(seed).direct().clients(Role::Kubelets, 1);
        for server in 0..3 {
            let forget = FaultKind::ForgetFlows { dropped: [true, true] };
            sim = sim.fault(server, forget).at(5 * SECOND);
        }
        let found = sim.run(60 * SECOND).findings;
        let lease = found.longest_lease.as_secs_f64();
        assert!((29.0..32.0).contains(&lease), "seed {seed}: {found}");
        assert!(found.failed_leases >= 2, "seed {seed}: {found}");
    }
}

#[test]
fn kubelet_behind_jackstay_renews_its_lease_when_flows_are_forgotten() {
    for seed in 0..5 {
        let mut sim = Sim::seed(seed).clients(Role::Kubelets, 1);
        for server in 0..3 {
            let forget = FaultKind::ForgetFlows { dropped: [true, true] };
            sim = sim.fault(server, forget).at(5 * SECOND);
        }
        let found = sim.run(40 * SECOND).findings;
        assert!(found.longest_lease < 13 * SECOND, "seed {seed}: {found}");
    }
}

/// In the other runs, the endpoint has no watches or becomes degraded shortly before the end.
#[test]
fn watches_leave_an_endpoint_whose_readyz_fails_in_most_runs() {
    let scenario = by_name("hang").unwrap();
    let has_moves = |&seed: &u64| {
        let run = (scenario.sim)(seed).run(scenario.time);
        let entries = run.trace.entries();
        entries.iter().any(|(_, entry)| matches!(entry, Entry::WatchResumed { moved: true, .. }))
    };
    let runs = (0..SEEDS).filter(has_moves).count() as u64;
    assert!(runs > SEEDS / 2, "{runs} of {SEEDS}");
}

/// Several nodes of one control plane.
#[test]
fn nodes_share_a_control_plane() {
    let sim = Sim::seed(3).nodes(4).clients(Role::Readers, 2).clients(Role::Informers, 2);
    let found = sim.clients(Role::Writers, 1).blackhole(1).at(3 * SECOND).run(8 * SECOND).findings;
    assert_eq!(found.failed_reads, 0, "{found}");
    assert_eq!((found.relists, found.violations.len()), (0, 0), "{found}");
}

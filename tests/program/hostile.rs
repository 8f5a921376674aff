//! A hostile neighbour on the node beside a client with a configured identity: whatever the neighbour does, each
//! request of the identity succeeds.
//!
//! The attacker is a process of its own, with another uid. jackstay runs in a cgroup with the memory limit that the
//! manifests ship. The identity client reads and writes ten times a second, opens two connections each second, and asks
//! `/livez` as kubelet does; its latencies and failures are the result of an attack.
//!
//! The short form has one attack of each kind. `JACKSTAY_LONG=1` runs all, for longer; `JACKSTAY_HOSTILE=NAME` those
//! with this text in their name. `JACKSTAY_HOSTILE_PEER=haproxy|envoy` attacks another proxy.

mod attacks;
mod cgroup;
mod identity_client;
mod peers;
mod raw;
mod rig;
mod socket_memory;

use std::time::{Duration, Instant};

use crate::support::{long_form, pause};
use attacks::Attack;
use rig::{Outcome, Rig};

/// An attack lasts this long.
fn duration() -> Duration {
    Duration::from_secs(if long_form() { 8 } else { 4 })
}

/// The attacks that this run shall make.
fn selected() -> Vec<Attack> {
    match std::env::var("JACKSTAY_HOSTILE") {
        Ok(text) => Attack::ALL.iter().copied().filter(|a| a.name().contains(&text)).collect(),
        Err(_) if long_form() => Attack::ALL.to_vec(),
        Err(_) => Attack::SHORT.to_vec(),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
#[ignore = "needs root, for the cgroup and the uid of the attacker"]
async fn no_attack_fails_a_request_of_an_identity() {
    let mut failed = Vec::new();
    println!("{}", Outcome::HEADER);
    for attack in selected() {
        let mut rig = Rig::start_for(attack).await;
        let outcome = rig.run(attack, duration()).await;
        failed.extend(report(&rig, attack, &outcome));
    }
    assert!(failed.is_empty(), "{failed:#?}");
}

/// Prints the result of an attack. If the attack succeeded, returns why, and prints what the proxy logged.
fn report(rig: &Rig, attack: Attack, outcome: &Outcome) -> Option<String> {
    println!("{}", outcome.row());
    let reason = outcome.failure()?;
    println!("{reason}\n{}", rig.last_log_lines());
    Some(format!("{}: {reason}", attack.name()))
}

/// After this time without a request, the upstream connections of clients without a configured identity are closed.
/// Until then they hold as much memory as at their busiest time.
const UPSTREAM_CLOSED_AFTER: Duration = Duration::from_secs(330);

/// All attacks in random order, again and again, against one process. `JACKSTAY_SOAK_MINUTES` is the time, 30 by
/// default; the first round and two rests come on top.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
#[ignore = "takes 50 minutes, and needs root"]
async fn soak_of_all_attacks_leaks_no_memory_and_no_descriptor() {
    let minutes = std::env::var("JACKSTAY_SOAK_MINUTES").map_or(30, |text| text.parse().unwrap());
    let mut rig = Rig::start(None).await;
    let mut failed = Vec::new();
    println!("{}", Outcome::HEADER);
    round_of_all_attacks(&mut rig, &mut failed).await;
    let first = usage_after(UPSTREAM_CLOSED_AFTER, &rig).await;
    let end = Instant::now() + Duration::from_secs(60 * minutes);
    loop {
        round_of_all_attacks(&mut rig, &mut failed).await;
        if Instant::now() >= end {
            break;
        }
    }
    let last = usage_after(UPSTREAM_CLOSED_AFTER, &rig).await;
    assert!(failed.is_empty(), "{failed:#?}");
    assert!(
        last.0 <= first.0 + first.0 / 10 && last.1 <= first.1,
        "after one round and a rest {first:?}, after all and a rest {last:?}"
    );
}

async fn round_of_all_attacks(rig: &mut Rig, failed: &mut Vec<String>) {
    let mut attacks = Attack::ALL.to_vec();
    fastrand::shuffle(&mut attacks);
    for attack in attacks {
        let outcome = rig.run(attack, Duration::from_secs(8)).await;
        failed.extend(report(rig, attack, &outcome));
    }
    // Connections of the last attacker are closed, and free memory is returned to the kernel.
    usage_after(Duration::from_secs(10), rig).await;
}

/// Prints and returns the resident memory in MiB and the number of descriptors after a rest.
async fn usage_after(rest: Duration, rig: &Rig) -> (u64, usize) {
    pause(rest).await;
    let usage = (rig.resident() >> 20, rig.descriptors());
    println!("{rest:?} after the last attack: MiB and descriptors {usage:?}");
    usage
}

/// The attacker's process: this test binary again, with the attack in its environment.
#[test]
#[ignore = "started by the test of the attacks"]
fn attacker() {
    if let Some(target) = rig::Target::from_env() {
        attacks::run(&target);
    }
}

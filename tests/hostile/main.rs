//! A hostile neighbour on the node beside a client with a configured identity: whatever the neighbour does, each
//! request of the identity succeeds.
//!
//! The attacker is a process of its own, with another uid. jackstay runs in a cgroup with the memory limit that the
//! manifests ship. The identity client reads and writes ten times a second, opens a connection each second, and asks
//! `/livez` as kubelet does; its latencies and failures are the result of an attack.
//!
//! `JACKSTAY_HOSTILE=NAME` selects attacks by a part of their name, `JACKSTAY_HOSTILE_PEER=haproxy|envoy` attacks
//! another proxy, `JACKSTAY_LONG=1` attacks for longer.

#![cfg(feature = "demo")]

mod attacks;
mod cgroup;
mod identity_client;
mod raw;
mod rig;
#[path = "../support/mod.rs"]
mod support;

use std::time::Duration;

use attacks::Attack;
use rig::{Outcome, Rig};

/// An attack lasts this long.
fn duration() -> Duration {
    Duration::from_secs(if support::long_form() { 30 } else { 8 })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
#[ignore = "needs root, for the cgroup and the uid of the attacker"]
async fn no_attack_fails_a_request_of_an_identity() {
    let selected = std::env::var("JACKSTAY_HOSTILE").unwrap_or_default();
    let mut failed = Vec::new();
    println!("{}", Outcome::HEADER);
    for attack in Attack::ALL.iter().filter(|attack| attack.name().contains(&selected)) {
        let outcome = Rig::start().run(*attack, duration()).await;
        println!("{}", outcome.row());
        if let Some(reason) = outcome.failure() {
            failed.push(format!("{}: {reason}", attack.name()));
        }
    }
    assert!(failed.is_empty(), "{failed:#?}");
}

/// The attacker's process: this test binary again, with the attack in its environment.
#[test]
#[ignore = "started by the test of the attacks"]
fn attacker() {
    if let Some(target) = rig::Target::from_env() {
        attacks::run(&target);
    }
}

//! The simulated sockets against the kernel's: the same code on `jackstay_sys::sockets::stream` runs on both, and what it
//! measures must be the same within tolerances, each of which has a reason.
//!
//! ```sh
//! unshare --net --mount sh -c "ip link set lo up && exec cargo test --locked -p jackstay-sim --test kernel -- --ignored --test-threads=1 --nocapture"
//! ```
//!
//! It needs root, `/dev/net/tun`, `ip` and nftables, and takes as long as the longest timeout of the kernel, which is 131 s.
//! `JACKSTAY_KERNEL_CASES=TEXT` runs the cases whose names contain the text. The threads run with the policy `SCHED_RR`
//! (`chrt`), so that other processes of the machine do not delay them.

mod cases;
mod figures;
mod relay;
mod rig;

use std::pin::Pin;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use jackstay_sim::shell::kernel;
use rustix::thread::gettid;

use self::cases::CASES;
use self::figures::{Figures, compare};
use self::relay::Relay;
use self::rig::Rig;

/// A case: measures on either side.
type Case = for<'a> fn(&'a Rig, &'a mut Figures) -> Pin<Box<dyn Future<Output = ()> + 'a>>;

/// The port of the first case.
const FIRST_PORT: u16 = 7_000;

/// Settings of the network namespace: connections do not begin with what earlier ones have measured, and congestion
/// control is one that every namespace permits and that, like the default of Linux, goes by losses. BBR has no threshold of slow start, so that Linux takes no stream for a thin one
/// (`tcp_stream_is_thin`) and `TCP_THIN_LINEAR_TIMEOUTS` has no effect.
const SETTINGS: [(&str, &str); 2] =
    [("net/ipv4/tcp_no_metrics_save", "1"), ("net/ipv4/tcp_congestion_control", "reno")];

#[test]
#[ignore = "needs root and a network namespace of its own: unshare --net"]
fn simulated_sockets_behave_as_those_of_the_kernel() {
    let wanted = std::env::var("JACKSTAY_KERNEL_CASES").unwrap_or_default();
    let cases: Vec<_> = CASES.into_iter().filter(|(name, _)| name.contains(&wanted)).collect();
    let simulated: Vec<_> = cases.iter().map(|(_, case)| Rig::simulate(*case)).collect();
    // The clocks are the kernel's again.
    kernel::set_time(Duration::ZERO);
    for (name, value) in SETTINGS {
        std::fs::write(format!("/proc/sys/{name}"), value).unwrap();
    }
    let relay = Relay::start();
    // Together, because each waits most of the time.
    let running: Vec<_> = cases
        .iter()
        .zip(FIRST_PORT..)
        .map(|((_, case), port)| {
            let (case, relay) = (*case, Arc::clone(&relay));
            std::thread::spawn(move || {
                run_before_others();
                Rig::run(case, relay, port)
            })
        })
        .collect();
    let mut table = String::from("| case | simulated | kernel | tolerance |\n|---|---|---|---|\n");
    let mut differences = Vec::new();
    for ((name, _), (one, other)) in cases.iter().zip(simulated.iter().zip(running)) {
        let other = other.join().unwrap_or_else(|_| panic!("{name} fails"));
        differences.extend(compare(name, one, &other, &mut table));
    }
    println!("{table}");
    assert!(
        differences.is_empty(),
        "{} differences:\n{}",
        differences.len(),
        differences.join("\n")
    );
}

/// The process of a peer: see [`rig::Rig::start_peer`].
#[test]
#[ignore = "a process of the other test"]
fn peer() {
    rig::run_peer();
}

/// Gives this thread, and the processes that it starts, the policy `SCHED_RR`, if that is permitted.
fn run_before_others() {
    let thread = gettid().as_raw_nonzero().to_string();
    let _ = Command::new("chrt").args(["--rr", "--pid", "1", &thread]).status();
}

//! Runs a script: clients that make certain requests, faults at certain moments of them, and assertions on answers,
//! times and states. The seed decides the latency of the network, which apiserver has a fault, and when.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::future::poll_fn;
use std::io;
use std::panic::{self, AssertUnwindSafe};
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

use jackstay_sys::clock;
use tokio::time::timeout;

use super::testbed::{Figure, Testbed};
use crate::scenario::Sim;
use crate::shell::ShellRun;
use crate::shell::run::run_world;

/// The longest virtual time of a script.
const LIMIT: Duration = Duration::from_secs(600);
/// The nodes that a script can start jackstay on.
const NODES: usize = 2;

/// A script with a name.
#[derive(Debug, Clone, Copy)]
pub struct Script {
    /// The name.
    pub name: &'static str,
    /// What it proves.
    pub about: &'static str,
    /// The number of apiservers.
    pub servers: usize,
    /// What the clients do. A failed assertion panics.
    pub steps: fn(Rc<Testbed>) -> Steps,
}

/// The future of a script.
pub type Steps = Pin<Box<dyn Future<Output = ()>>>;

/// The result of a script.
#[derive(Debug)]
pub struct ScriptRun {
    /// What was found. A failed assertion is a violation.
    pub run: ShellRun,
    /// The longest of the times that have a promise, by name.
    pub figures: BTreeMap<String, Figure>,
    /// The virtual time that it took.
    pub lasted: Duration,
}

/// Runs a script and looks for what is left over. A process makes one run. `traces`: it keeps a log.
///
/// # Errors
/// A process of the run cannot be started.
pub fn run(script: &Script, seed: u64, traces: bool) -> io::Result<ScriptRun> {
    let mut rng = fastrand::Rng::with_seed(seed);
    let latency = Duration::from_micros(rng.u64(50..1_500));
    let sim = Sim::seed(seed).endpoints(script.servers).nodes(NODES);
    let sim = sim.latency(latency, latency.mul_f64(rng.f64() / 2.0));
    run_world(&sim, traces, async |world| {
        let began = clock::now();
        let testbed = Rc::new(Testbed::new(sim.clone(), world));
        let steps = (script.steps)(Rc::clone(&testbed));
        let failure = match timeout(LIMIT, result_of(steps)).await {
            Ok(result) => result.err(),
            Err(_) => Some(format!("the script has not ended after {LIMIT:?}")),
        };
        let lasted = clock::now() - began;
        let testbed = Rc::into_inner(testbed);
        let testbed = testbed.ok_or(io::Error::other("a task of the script has not ended"))?;
        let (world, faults, figures) = testbed.into_parts();
        let mut run = world.finish(&faults).await;
        run.findings.violations.extend(failure);
        Ok(ScriptRun { run, figures, lasted })
    })
}

thread_local! {
    /// While the script runs: the assertion that has failed, with its place.
    static FAILURE: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Runs a script to its end, or to the assertion that fails.
async fn result_of(steps: Steps) -> Result<(), String> {
    let mut steps = pin!(steps);
    poll_fn(|cx| {
        // Other panics are those of the program.
        let others = panic::take_hook();
        panic::set_hook(Box::new(|panic| FAILURE.set(Some(panic.to_string()))));
        let result = panic::catch_unwind(AssertUnwindSafe(|| steps.as_mut().poll(cx)));
        panic::set_hook(others);
        match result {
            Ok(poll) => poll.map(Ok),
            Err(_) => Poll::Ready(Err(FAILURE.take().unwrap_or_default())),
        }
    })
    .await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn result_of_a_failed_assertion_has_its_place_and_its_text() {
        assert_eq!(result_of(Box::pin(tokio::task::yield_now())).await, Ok(()));
        let failing = async {
            tokio::task::yield_now().await;
            panic!("the status is 502");
        };
        let failure = result_of(Box::pin(failing)).await.unwrap_err();
        assert!(failure.contains("script.rs:"), "{failure}");
        assert!(failure.contains("the status is 502"), "{failure}");
    }
}

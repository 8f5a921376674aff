//! A run of a scenario: starts the processes, begins and ends the faults, and judges what the clients have seen.

use std::io;
use std::time::Duration;

use jackstay::observe::Metrics;
use jackstay_sys::simulation::SimulatedRun;

use super::kernel::{self, START, STARTED};
use super::{panics, runtime};
use crate::fleet::Load;
use crate::net::sockets::SocketNetwork;
use crate::scenario::Sim;

mod clients;
mod faults;
mod judgement;
mod leftovers;
mod node;
mod start;

pub(crate) mod outcome;
pub(crate) mod world;

use self::outcome::ShellRun;
use self::world::World;

/// The result of the run of a fleet.
#[derive(Debug)]
pub struct FleetRun {
    /// What the apiservers bore.
    pub load: Load,
    /// What every run shows.
    pub run: ShellRun,
}

/// Runs a scenario for this time, then ends the clients and looks for what is left over. A process makes one run.
/// `traces`: it keeps a log.
///
/// # Errors
/// A process of the run cannot be started.
pub fn run(sim: &Sim, time: Duration, traces: bool) -> io::Result<ShellRun> {
    run_world(sim, traces, async |mut world| {
        world.start_nodes(sim)?;
        world.pass(&sim.faults, time).await?;
        Ok(world.finish(&sim.faults).await)
    })
}

/// Runs a scenario as [`run`] does for this many seconds, and counts what the apiservers bear in each.
///
/// # Errors
/// A process of the run cannot be started.
pub fn run_fleet(sim: &Sim, seconds: usize) -> io::Result<FleetRun> {
    let time = Duration::from_secs(seconds as u64);
    run_world(sim, false, async |mut world| {
        world.start_nodes(sim)?;
        let sampler = world.sampler();
        let (passed, load) = tokio::join!(world.pass(&sim.faults, time), sampler.run(seconds));
        passed?;
        Ok(FleetRun { load, run: world.finish(&sim.faults).await })
    })
}

/// Runs `main` with the apiservers of a scenario on virtual time.
pub(crate) fn run_world<T>(
    sim: &Sim,
    traces: bool,
    main: impl AsyncFnOnce(World) -> io::Result<T>,
) -> io::Result<T> {
    panics::record();
    kernel::begin_run(sim.seed, STARTED);
    // The clock of the metrics is compared with that of the processor, which takes some time on both.
    drop(Metrics::new());
    kernel::stop_clocks();
    kernel::set_time(START);
    let hosts = sim.endpoints + sim.nodes;
    let network = |start| SocketNetwork::new(sim.seed, start, hosts, sim.endpoints);
    runtime::run(START, network, |network| async move {
        let _run = SimulatedRun::begin();
        let world = World::start(sim, network)?;
        if traces {
            world.log_lines();
        }
        main(world).await
    })
}

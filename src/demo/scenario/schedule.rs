//! Injects the faults of the demo and compares what the clients observe with the promises.
//!
//! Each step injects one fault, waits, removes the fault, and waits until the proxy uses all apiservers
//! again. A fault of a single apiserver is injected into the one with the most load.

use crate::demo::scenario::display::{ProgressDisplay, Row, Step, StepProgress, format_duration};
use crate::demo::scenario::ledger::{Counts, Ledger};
use crate::demo::scenario::status_monitor::StatusMonitor;
use crate::observe::quantity;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use jackstay_apiserver::ApiServerHandle;
use jackstay_apiserver::faulty_relay::FaultyRelay;

/// Longest promised duration of a read while one apiserver or its connections fail.
pub const READ_PROMISE: Duration = Duration::from_millis(600);
/// Longest promised duration of a heartbeat, also of one that was in flight when its apiserver failed.
pub const HEARTBEAT_PROMISE: Duration = Duration::from_secs(1);
/// Factor by which a promised time may be exceeded, because other load on the machine delays clients too. The
/// measured stalls of the machine are added.
pub const TOLERANCE: u32 = 2;
/// Approximate duration of all steps at scale 1.
pub const USUAL_DURATION: Duration = Duration::from_secs(45);
/// Time in which requests may finish during a graceful shutdown.
const GRACE: Duration = Duration::from_secs(2);
/// The proxy must use a recovered apiserver within this time.
const RECOVERY_TIMEOUT: Duration = Duration::from_secs(12);
/// Interval of progress updates.
const UPDATE_INTERVAL: Duration = Duration::from_millis(50);

/// A fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// No fault, for comparison.
    None,
    /// Every packet of the established flows to one apiserver is dropped; new flows work.
    DroppedFlows,
    /// The same for all apiservers, as when a load balancer loses its flow table.
    AllFlows,
    /// One apiserver is killed, and its sockets are reset.
    Killed,
    /// One apiserver is frozen, as by SIGSTOP.
    Stopped,
    /// `/readyz` of one apiserver fails; everything else works.
    Unready,
    /// Each apiserver is restarted gracefully.
    Rolling,
}

/// The faults in order.
pub const FAULTS: [Fault; 7] = [
    Fault::None,
    Fault::DroppedFlows,
    Fault::AllFlows,
    Fault::Killed,
    Fault::Stopped,
    Fault::Unready,
    Fault::Rolling,
];

impl Fault {
    fn title(self, name: &str) -> String {
        match self {
            Self::None => "no fault".to_owned(),
            Self::DroppedFlows => format!("dropped flows of {name}"),
            Self::AllFlows => "dropped all flows".to_owned(),
            Self::Killed => format!("killed {name}"),
            Self::Stopped => format!("stopped {name}"),
            Self::Unready => format!("unready {name}"),
            Self::Rolling => "rolling restart".to_owned(),
        }
    }

    /// Duration in seconds at scale 1, and the minimum at any scale.
    fn duration_seconds(self) -> (f64, f64) {
        match self {
            Self::None => (4.0, 2.0),
            Self::DroppedFlows | Self::AllFlows | Self::Killed => (5.0, 3.5),
            // Watches move to another apiserver after 5 s without a PONG.
            Self::Stopped => (8.0, 7.0),
            Self::Unready => (4.0, 3.0),
            Self::Rolling => (1.0, 0.5),
        }
    }

    /// Longest promised silence of a watch.
    fn promised_silence(self) -> Duration {
        match self {
            Self::DroppedFlows | Self::AllFlows | Self::Killed => Duration::from_millis(3500),
            Self::Stopped => Duration::from_secs(6),
            Self::None | Self::Unready | Self::Rolling => Duration::from_millis(2500),
        }
    }

    /// Describes each broken promise. `recovered`: the proxy uses all apiservers again.
    fn broken_promises(self, counts: &Counts, recovered: bool) -> Vec<String> {
        let mut broken = Vec::new();
        let mut must = |kept: bool, violation: String| {
            if !kept {
                broken.push(violation);
            }
        };
        must(counts.failed_reads == 0, quantity(counts.failed_reads, "failed read"));
        must(
            counts.slowest_read <= READ_PROMISE * TOLERANCE + counts.stalled,
            format!("a read took {}", format_duration(counts.slowest_read)),
        );
        must(counts.failed_writes == 0, quantity(counts.failed_writes, "failed heartbeat"));
        must(
            counts.slowest_write <= HEARTBEAT_PROMISE * TOLERANCE + counts.stalled,
            format!("a heartbeat took {}", format_duration(counts.slowest_write)),
        );
        must(counts.broken == 0, quantity(counts.broken, "broken watch"));
        // The proxy forwards the end of a watch that the apiserver has ended.
        must(counts.ended == 0 || self == Self::Rolling, quantity(counts.ended, "ended watch"));
        must(counts.lost == 0, quantity(counts.lost, "lost event"));
        must(
            counts.duplicated == 0,
            format!("{} received twice", quantity(counts.duplicated, "event")),
        );
        must(
            counts.silence <= self.promised_silence() * TOLERANCE + counts.stalled,
            format!("a watch was silent for {}", format_duration(counts.silence)),
        );
        must(
            recovered,
            format!("not in use {} after its recovery", format_duration(RECOVERY_TIMEOUT)),
        );
        if let Some(first) = counts.first_failure.as_ref().filter(|_| !broken.is_empty()) {
            broken.push(format!("first failure: {first}"));
        }
        broken
    }
}

/// An apiserver and the relay in front of it.
pub struct RelayedServer {
    /// The apiserver.
    pub server: ApiServerHandle,
    /// The relay, to which the proxy connects.
    pub relay: FaultyRelay,
}

/// Runs the faults.
pub struct Schedule<'a> {
    /// The apiservers.
    pub servers: &'a [RelayedServer],
    /// Counts of the clients.
    pub ledger: &'a Ledger,
    /// The states that the proxy reports.
    pub monitor: &'a StatusMonitor,
    /// Shows progress.
    pub display: &'a ProgressDisplay,
    /// Set to end the schedule early.
    pub interrupted: &'a AtomicBool,
    /// Multiplies the duration of each fault.
    pub scale: f64,
}

/// Results of all steps.
#[derive(Debug, Clone, Default)]
pub struct Results {
    /// Descriptions of broken promises.
    pub broken: Vec<String>,
    /// Reads that finished.
    pub reads: u64,
    /// The slowest read.
    pub slowest_read: Duration,
    /// Events that watches received.
    pub events: u64,
    /// Sum of the delays that this machine caused.
    pub stalled: Duration,
}

impl Results {
    /// Adds the counts of a step.
    fn add(&mut self, counts: &Counts) {
        self.reads += counts.reads;
        self.events += counts.events;
        self.stalled += counts.stalled;
        self.slowest_read = self.slowest_read.max(counts.slowest_read);
    }
}

impl Schedule<'_> {
    /// Runs the faults in order until an interruption.
    ///
    /// # Errors
    /// An apiserver could not be restarted.
    pub fn run(&self, faults: &[Fault], results: &mut Results) -> io::Result<()> {
        // The name of the apiserver is known only when its step starts.
        let waiting = |fault: &Fault| Step::new(fault.title("one"), StepProgress::Waiting);
        self.display.set_steps(faults.iter().map(waiting).collect());
        for (index, fault) in faults.iter().enumerate() {
            if self.interrupted.load(Relaxed) {
                break;
            }
            self.run_step(*fault, index, results)?;
        }
        Ok(())
    }

    fn run_step(&self, fault: Fault, index: usize, results: &mut Results) -> io::Result<()> {
        let target = self.busiest();
        let server = &self.servers[target];
        let name = server.server.name();
        let mut step = Step::new(fault.title(name), StepProgress::Running);
        self.ledger.start_period();
        let step_start = Instant::now();
        let (seconds, minimum) = fault.duration_seconds();
        let duration = Duration::from_secs_f64((seconds * self.scale).max(minimum));
        let has_target = fault != Fault::None && fault != Fault::Rolling;
        let detection = || self.monitor.first_detection(target, step_start).filter(|_| has_target);
        // Waits for a time, for a condition, or for an interruption, and shows progress meanwhile.
        // Returns whether the condition became true.
        let mut wait = |limit: Duration, condition: &dyn Fn() -> bool| {
            let start = Instant::now();
            loop {
                step.counts = self.ledger.counts();
                if let Some(detection) = detection() {
                    let delay = format_duration(detection.at - step_start);
                    step.detected = format!("{}, {delay}", detection.state);
                }
                self.display.set_step(index, &step);
                if condition() {
                    return true;
                }
                if start.elapsed() >= limit || self.interrupted.load(Relaxed) {
                    return false;
                }
                std::thread::sleep(UPDATE_INTERVAL);
            }
        };
        let mut recovered = self.inject(fault, server, duration, &mut wait)?;
        let was_unavailable = !self.all_ready();
        let fault_end = Instant::now();
        recovered &= wait(RECOVERY_TIMEOUT, &|| self.all_ready());
        if was_unavailable && recovered {
            let delay = format_duration(fault_end.elapsed());
            self.display.log(&format!("all apiservers are in use again, {delay} later"));
        }
        // Effects of the recovery on clients count for this step.
        wait(Duration::from_secs(1), &|| false);
        let counts = self.ledger.start_period();
        step.stage = self.report(fault, name, (&counts, recovered), results);
        results.add(&counts);
        step.counts = counts;
        self.display.set_step(index, &step);
        Ok(())
    }

    /// Writes the result of a step to the log and adds its broken promises to `results`.
    fn report(
        &self,
        fault: Fault,
        name: &str,
        (counts, recovered): (&Counts, bool),
        results: &mut Results,
    ) -> StepProgress {
        let interrupted = self.interrupted.load(Relaxed);
        let broken = fault.broken_promises(counts, recovered || interrupted);
        for promise in &broken {
            self.display.log(&format!("BROKEN: {promise}"));
            results.broken.push(format!("{}: {promise}", fault.title(name)));
        }
        self.display.log(&format!(
            "{}: reads <= {}, heartbeats <= {}, events <= {}",
            if broken.is_empty() { "passed" } else { "failed" },
            format_duration(counts.slowest_read),
            format_duration(counts.slowest_write),
            format_duration(counts.silence),
        ));
        if broken.is_empty() { StepProgress::Passed } else { StepProgress::Failed }
    }

    /// Injects a fault for `duration`, and ends it. `wait` waits for a time or a condition. Returns whether the
    /// apiservers have recovered between the faults of the step.
    fn inject(
        &self,
        fault: Fault,
        server: &RelayedServer,
        duration: Duration,
        wait: &mut dyn FnMut(Duration, &dyn Fn() -> bool) -> bool,
    ) -> io::Result<bool> {
        let (name, never) = (server.server.name(), || false);
        let mut recovered = true;
        match fault {
            Fault::None => {
                self.display.log("no fault: three apiservers, reads, heartbeats and watches");
                wait(duration, &never);
            }
            Fault::DroppedFlows => {
                self.drop_packets(std::slice::from_ref(server), name);
                wait(duration, &never);
                server.relay.clear_faults();
                self.display.log(&format!("packets of the flows of {name} pass again"));
            }
            Fault::AllFlows => {
                self.drop_packets(self.servers, "all apiservers");
                wait(duration, &never);
                self.servers.iter().for_each(|server| server.relay.clear_faults());
                self.display.log("packets of all flows pass again");
            }
            Fault::Killed => {
                server.server.kill();
                self.display
                    .log(&format!("{name} is killed: its sockets are reset, its port is closed"));
                wait(duration, &never);
                server.server.restart()?;
                self.display.log(&format!("{name} is started again"));
            }
            Fault::Stopped => {
                server.server.stop();
                self.display
                    .log(&format!("{name} is stopped: its kernel acknowledges, no response"));
                wait(duration, &never);
                server.server.cont();
                self.display.log(&format!("{name} continues"));
            }
            Fault::Unready => {
                server.server.set_faults(|faults| faults.unready = true);
                self.display.log(&format!("/readyz of {name} fails; everything else works"));
                wait(duration, &never);
                server.server.set_faults(|faults| faults.unready = false);
                self.display.log(&format!("/readyz of {name} is ok again"));
            }
            Fault::Rolling => {
                for server in self.servers {
                    if self.interrupted.load(Relaxed) {
                        break;
                    }
                    let name = server.server.name();
                    self.display.log(&format!("{name} shuts down gracefully"));
                    server.server.shutdown(GRACE);
                    wait(duration, &never);
                    server.server.restart()?;
                    self.display.log(&format!("{name} is started again"));
                    recovered &= wait(RECOVERY_TIMEOUT, &|| self.all_ready());
                }
            }
        }
        Ok(recovered)
    }

    /// Drops the packets of the flows to `servers`, which `name` names in the log.
    fn drop_packets(&self, servers: &[RelayedServer], name: &str) {
        let dropped: io::Result<usize> =
            servers.iter().map(|server| server.relay.drop_all_packets()).sum();
        self.display.log(&match dropped {
            Ok(flows) => {
                let flows = quantity(flows, "established flow");
                format!("every packet of {flows} of {name} is dropped; new flows work")
            }
            // For clients this is the same; jackstay takes it for a stopped process.
            Err(error) => format!("the flows of {name} are silent, but acknowledged ({error})"),
        });
    }

    /// The apiserver with the most watches and streams.
    fn busiest(&self) -> usize {
        let rows = self.monitor.rows();
        let load = |row: &Row| (row.watches, row.streams);
        (0..rows.len().min(self.servers.len())).max_by_key(|&i| load(&rows[i])).unwrap_or(0)
    }

    /// Whether the proxy uses every apiserver.
    pub fn all_ready(&self) -> bool {
        let rows = self.monitor.rows();
        rows.len() == self.servers.len()
            && rows.iter().all(|row| row.state == "ready" && row.connections > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn broken_promises_depend_on_the_fault_and_the_counts() {
        assert_eq!(Fault::None.broken_promises(&Counts::default(), true), [""; 0]);
        let broken = |change: fn(&mut Counts), fault: Fault| {
            let mut counts = Counts::default();
            change(&mut counts);
            fault.broken_promises(&counts, true).len()
        };
        assert_eq!(broken(|c| c.failed_reads = 1, Fault::Killed), 1);
        assert_eq!(broken(|c| c.slowest_read = READ_PROMISE * 3, Fault::Killed), 1);
        assert_eq!(broken(|c| c.broken = 1, Fault::Killed), 1);
        assert_eq!(broken(|c| c.lost = 1, Fault::Killed), 1);
        assert_eq!(broken(|c| c.duplicated = 1, Fault::Killed), 1);
        assert_eq!(broken(|c| c.ended = 1, Fault::Killed), 1);
        assert_eq!(broken(|c| c.ended = 1, Fault::Rolling), 0);
        assert_eq!(broken(|c| c.failed_writes = 1, Fault::Killed), 1);
        assert_eq!(broken(|c| c.slowest_write = HEARTBEAT_PROMISE * 3, Fault::Killed), 1);
        assert_eq!(broken(|c| c.silence = Duration::from_secs(8), Fault::Killed), 1);
        assert_eq!(broken(|c| c.silence = Duration::from_secs(8), Fault::Stopped), 0);
        assert_eq!(Fault::Killed.broken_promises(&Counts::default(), false).len(), 1);
    }
}

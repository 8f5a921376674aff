//! The faults of the demo and the verdict on each.
//!
//! Each step injects a fault into the apiserver with the most load, waits, removes the fault, and waits
//! until the proxy uses that apiserver again. Then it compares what clients observed with the promises.

use crate::demo::apiserver::ApiServerHandle;
use crate::demo::faulty_relay::FaultyRelay;
use crate::demo::scenario::display::{ProgressDisplay, Row, Stage, Step, seconds};
use crate::demo::scenario::ledger::{Counts, Ledger};
use crate::demo::scenario::status_monitor::StatusMonitor;
use crate::observe::counted;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// Longest read while one apiserver or its connections fail.
pub const READ_PROMISE: Duration = Duration::from_millis(600);
/// Machines are noisy: a time promise is broken at this multiple of it, plus the stalls of the machine.
pub const TOLERANCE: u32 = 2;
/// Approximate duration of all steps at scale 1.
pub const USUAL_DURATION: Duration = Duration::from_secs(60);
/// How long a graceful shutdown lets requests finish.
const GRACE: Duration = Duration::from_secs(2);
/// The proxy must use a recovered apiserver within this time.
const RECOVERY_TIMEOUT: Duration = Duration::from_secs(12);
/// Interval of progress updates.
const UPDATE_INTERVAL: Duration = Duration::from_millis(50);

/// A fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// No fault: the baseline.
    None,
    /// Established flows to one apiserver lose every packet; new flows work.
    DroppedFlows,
    /// The same for all apiservers: a load balancer lost its flow table.
    AllFlows,
    /// One apiserver is killed; its sockets are reset.
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

    /// Duration in seconds: at scale 1, and the minimum.
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
    fn silence(self) -> Duration {
        match self {
            Self::DroppedFlows | Self::AllFlows | Self::Killed => Duration::from_millis(3500),
            Self::Stopped => Duration::from_secs(6),
            Self::None | Self::Unready | Self::Rolling => Duration::from_millis(2500),
        }
    }

    /// Whether a heartbeat in flight when the fault begins may fail.
    fn may_fail_writes_in_flight(self) -> bool {
        matches!(self, Self::DroppedFlows | Self::AllFlows | Self::Killed | Self::Stopped)
    }

    /// Describes each broken promise.
    fn broken_promises(self, counts: &Counts, back: bool) -> Vec<String> {
        let mut broken = Vec::new();
        let mut must = |kept: bool, otherwise: String| {
            if !kept {
                broken.push(otherwise);
            }
        };
        must(counts.failed_reads == 0, counted(counts.failed_reads, "failed read"));
        must(
            counts.slowest_read <= READ_PROMISE * TOLERANCE + counts.stalled,
            format!("a read took {}", seconds(counts.slowest_read)),
        );
        let writes = if self.may_fail_writes_in_flight() {
            counts.late_writes
        } else {
            counts.failed_writes
        };
        must(
            writes == 0,
            format!("{} failed or hung after the settling time", counted(writes, "heartbeat")),
        );
        must(counts.broken == 0, counted(counts.broken, "broken watch"));
        // The proxy passes on an end that the server sends.
        must(counts.ended == 0 || self == Self::Rolling, counted(counts.ended, "ended watch"));
        must(counts.lost == 0, counted(counts.lost, "lost event"));
        must(
            counts.duplicated == 0,
            format!("{} received twice", counted(counts.duplicated, "event")),
        );
        must(
            counts.silence <= self.silence() * TOLERANCE + counts.stalled,
            format!("a watch was silent for {}", seconds(counts.silence)),
        );
        must(back, format!("not in use {} after its recovery", seconds(RECOVERY_TIMEOUT)));
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
    /// The proxy connects to this relay.
    pub relay: FaultyRelay,
}

/// Runs the faults.
pub struct Schedule<'a> {
    /// The apiservers.
    pub servers: &'a [RelayedServer],
    /// Counts of the clients.
    pub ledger: &'a Ledger,
    /// Polls the proxy.
    pub monitor: &'a StatusMonitor,
    /// Shows progress.
    pub display: &'a Arc<ProgressDisplay>,
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
    /// Runs the faults until the last one or an interruption.
    ///
    /// # Errors
    /// An apiserver could not be restarted.
    pub fn run(&self, faults: &[Fault], results: &mut Results) -> io::Result<()> {
        let waiting = |fault: &Fault| Step::new(fault.title("one"), Stage::Waiting);
        self.display.set_steps(faults.iter().map(waiting).collect());
        for (index, fault) in faults.iter().enumerate() {
            if self.interrupted.load(Relaxed) {
                break;
            }
            self.step(*fault, index, results)?;
        }
        Ok(())
    }

    fn step(&self, fault: Fault, index: usize, results: &mut Results) -> io::Result<()> {
        let target = self.busiest();
        let server = &self.servers[target];
        let name = server.server.name();
        let mut step = Step::new(fault.title(name), Stage::Running);
        self.ledger.start_period();
        let began = Instant::now();
        let (usual, least) = fault.duration_seconds();
        let hold = Duration::from_secs_f64((usual * self.scale).max(least));
        let faulty = fault != Fault::None && fault != Fault::Rolling;
        let detection = || self.monitor.first(target, began).filter(|_| faulty);
        // Waits for a time, for a condition, or for an interruption, and shows progress meanwhile.
        // Returns whether the condition became true.
        let mut wait = |time: Duration, until: &dyn Fn() -> bool| {
            let start = Instant::now();
            loop {
                step.counts = self.ledger.so_far();
                if let Some(detection) = detection() {
                    let after = seconds(detection.at - began);
                    step.detected = format!("{}, {after}", detection.state);
                }
                self.display.set_step(index, &step);
                if until() {
                    return true;
                }
                if start.elapsed() >= time || self.interrupted.load(Relaxed) {
                    return false;
                }
                std::thread::sleep(UPDATE_INTERVAL);
            }
        };
        let never = || false;
        let mut back = true;
        match fault {
            Fault::None => {
                self.display.log("no fault: three apiservers, reads, heartbeats and watches");
                wait(hold, &never);
            }
            Fault::DroppedFlows => {
                self.lose(std::slice::from_ref(server), name);
                wait(hold, &never);
                server.relay.clear_faults();
                self.display.log(&format!("the flows of {name} pass packets again"));
            }
            Fault::AllFlows => {
                self.lose(self.servers, "all apiservers");
                wait(hold, &never);
                self.servers.iter().for_each(|server| server.relay.clear_faults());
                self.display.log("all flows pass packets again");
            }
            Fault::Killed => {
                server.server.kill();
                self.display
                    .log(&format!("{name} is killed: its sockets are reset, its port refuses"));
                wait(hold, &never);
                server.server.restart()?;
                self.display.log(&format!("{name} is started again"));
            }
            Fault::Stopped => {
                server.server.stop();
                self.display
                    .log(&format!("{name} is stopped: its kernel acknowledges, it is silent"));
                wait(hold, &never);
                server.server.cont();
                self.display.log(&format!("{name} continues"));
            }
            Fault::Unready => {
                server.server.set_faults(|faults| faults.unready = true);
                self.display.log(&format!("/readyz of {name} fails; everything else of it works"));
                wait(hold, &never);
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
                    wait(hold, &never);
                    server.server.restart()?;
                    self.display.log(&format!("{name} is started again"));
                    back &= wait(RECOVERY_TIMEOUT, &|| self.all_ready());
                }
            }
        }
        let was_out = !self.all_ready();
        let returned = Instant::now();
        back &= wait(RECOVERY_TIMEOUT, &|| self.all_ready());
        if was_out && back {
            let after = seconds(returned.elapsed());
            self.display.log(&format!("all apiservers are in use again, {after} later"));
        }
        // Effects of the recovery on clients belong to this step.
        wait(Duration::from_secs(1), &never);
        let counts = self.ledger.start_period();
        let interrupted = self.interrupted.load(Relaxed);
        let broken = fault.broken_promises(&counts, back || interrupted);
        for promise in &broken {
            self.display.log(&format!("BROKEN: {promise}"));
            results.broken.push(format!("{}: {promise}", fault.title(name)));
        }
        step.stage = if broken.is_empty() { Stage::Passed } else { Stage::Failed };
        self.display.log(&format!(
            "{}: reads <= {}, events <= {}, {} of {} heartbeats lost",
            if broken.is_empty() { "passed" } else { "failed" },
            seconds(counts.slowest_read),
            seconds(counts.silence),
            counts.failed_writes,
            counts.writes,
        ));
        results.add(&counts);
        step.counts = counts;
        self.display.set_step(index, &step);
        Ok(())
    }

    fn lose(&self, servers: &[RelayedServer], whose: &str) {
        let lost: io::Result<usize> =
            servers.iter().map(|server| server.relay.drop_all_packets()).sum();
        let flows = |lost| counted(lost, "established flow");
        self.display.log(&match lost {
            Ok(lost) => {
                format!("every packet of {} of {whose} is dropped; new flows work", flows(lost))
            }
            // Clients see the same; jackstay classifies it as a stopped process.
            Err(error) => format!("the flows of {whose} are silent, but acknowledged ({error})"),
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
    fn broken_promises_are_found_by_fault_and_count() {
        assert_eq!(Fault::None.broken_promises(&Counts::default(), true), [""; 0]);
        let one = |change: fn(&mut Counts), fault: Fault| {
            let mut counts = Counts::default();
            change(&mut counts);
            fault.broken_promises(&counts, true).len()
        };
        assert_eq!(one(|c| c.failed_reads = 1, Fault::Killed), 1);
        assert_eq!(one(|c| c.slowest_read = READ_PROMISE * 3, Fault::Killed), 1);
        assert_eq!(one(|c| c.broken = 1, Fault::Killed), 1);
        assert_eq!(one(|c| c.lost = 1, Fault::Killed), 1);
        assert_eq!(one(|c| c.duplicated = 1, Fault::Killed), 1);
        assert_eq!(one(|c| c.ended = 1, Fault::Killed), 1);
        assert_eq!(one(|c| c.ended = 1, Fault::Rolling), 0);
        assert_eq!(one(|c| c.failed_writes = 1, Fault::Killed), 0, "it was in flight");
        assert_eq!(one(|c| c.late_writes = 1, Fault::Killed), 1);
        assert_eq!(one(|c| c.failed_writes = 1, Fault::Unready), 1);
        assert_eq!(one(|c| c.silence = Duration::from_secs(8), Fault::Killed), 1);
        assert_eq!(one(|c| c.silence = Duration::from_secs(8), Fault::Stopped), 0);
        assert_eq!(Fault::Killed.broken_promises(&Counts::default(), false).len(), 1);
    }
}

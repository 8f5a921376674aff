//! The faults of the demo, one after the other, and the judgement of what clients felt.
//!
//! Each step does one thing to the apiserver that carries most, waits, undoes it, and waits until
//! the proxy uses that apiserver again; then what clients felt meanwhile is held against the promise.

use crate::demo::apiserver::ApiServerHandle;
use crate::demo::faulty_relay::FaultyRelay;
use crate::demo::scenario::clients::{Counts, Ledger};
use crate::demo::scenario::display::{ProgressDisplay, Row, Stage, Step, seconds};
use crate::demo::scenario::status_monitor::StatusMonitor;
use crate::observe::counted;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// A read takes no longer, whatever is done to one connection or one apiserver.
pub const READ_PROMISE: Duration = Duration::from_millis(600);
/// Machines are noisy: only twice a promised time is a promise broken, and what the machine itself
/// kept its clients waiting comes on top.
pub const SLACK: u32 = 2;
/// How long all steps take at a scale of 1, about.
pub const USUAL: Duration = Duration::from_secs(60);
/// An apiserver that leaves in good order lets requests finish for this long.
const GRACE: Duration = Duration::from_secs(2);
/// An apiserver that works again is used again within this.
const BACK: Duration = Duration::from_secs(12);
/// Between two looks at the clock and at the clients.
const BEAT: Duration = Duration::from_millis(50);

/// What is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// Nothing: how it is when all is well.
    Nothing,
    /// Established flows to one apiserver lose every packet; new ones work.
    DroppedFlows,
    /// Established flows to all of them do: a load balancer forgot its flow table.
    AllFlows,
    /// One apiserver dies, its sockets are reset.
    Killed,
    /// One apiserver stops, as by SIGSTOP.
    Stopped,
    /// One apiserver's `/readyz` fails; everything else of it works.
    Sick,
    /// Each apiserver is restarted in good order.
    Rolling,
}

/// In the order in which they are done.
pub const FAULTS: [Fault; 7] = [
    Fault::Nothing,
    Fault::DroppedFlows,
    Fault::AllFlows,
    Fault::Killed,
    Fault::Stopped,
    Fault::Sick,
    Fault::Rolling,
];

impl Fault {
    fn title(self, name: &str) -> String {
        match self {
            Self::Nothing => "nothing (all well)".to_owned(),
            Self::DroppedFlows => format!("dropped flows of {name}"),
            Self::AllFlows => "dropped all flows".to_owned(),
            Self::Killed => format!("killed {name}"),
            Self::Stopped => format!("stopped {name}"),
            Self::Sick => format!("sick /readyz of {name}"),
            Self::Rolling => "rolling restart".to_owned(),
        }
    }

    /// How long it lasts at a scale of 1, and at least.
    fn lasts(self) -> (f64, f64) {
        match self {
            Self::Nothing => (4.0, 2.0),
            Self::DroppedFlows | Self::AllFlows | Self::Killed => (5.0, 3.5),
            // Watches move after 5 s without a PONG.
            Self::Stopped => (8.0, 7.0),
            Self::Sick => (4.0, 3.0),
            Self::Rolling => (1.0, 0.5),
        }
    }

    /// How long a watch may be silent.
    fn silence(self) -> Duration {
        match self {
            Self::DroppedFlows | Self::AllFlows | Self::Killed => Duration::from_millis(3500),
            Self::Stopped => Duration::from_secs(6),
            Self::Nothing | Self::Sick | Self::Rolling => Duration::from_millis(2500),
        }
    }

    /// Whether a heartbeat that is in flight when it begins may be lost.
    fn costs_writes(self) -> bool {
        matches!(self, Self::DroppedFlows | Self::AllFlows | Self::Killed | Self::Stopped)
    }

    /// What of the promise was broken, in words.
    fn judge(self, counts: &Counts, back: bool) -> Vec<String> {
        let mut broken = Vec::new();
        let mut must = |held: bool, what: String| {
            if !held {
                broken.push(what);
            }
        };
        must(counts.failed_reads == 0, counted(counts.failed_reads, "failed read"));
        must(
            counts.slowest_read <= READ_PROMISE * SLACK + counts.stalled,
            format!("a read took {}", seconds(counts.slowest_read)),
        );
        let writes = if self.costs_writes() { counts.late_writes } else { counts.failed_writes };
        must(
            writes == 0,
            format!("{} failed or hung that should not have", counted(writes, "heartbeat")),
        );
        must(counts.broken == 0, counted(counts.broken, "broken watch"));
        // An end that the server sends is passed on.
        must(counts.ended == 0 || self == Self::Rolling, counted(counts.ended, "ended watch"));
        must(counts.lost == 0, counted(counts.lost, "lost event"));
        must(counts.duplicated == 0, format!("{} came twice", counted(counts.duplicated, "event")));
        must(
            counts.silence <= self.silence() * SLACK + counts.stalled,
            format!("a watch was silent for {}", seconds(counts.silence)),
        );
        must(back, format!("it was not used again {} after its return", seconds(BACK)));
        if let Some(first) = counts.first_failure.as_ref().filter(|_| !broken.is_empty()) {
            broken.push(format!("first failure: {first}"));
        }
        broken
    }
}

/// An apiserver with the relay in front of it.
pub struct Site {
    /// The server.
    pub server: ApiServerHandle,
    /// Where the proxy finds it.
    pub hole: FaultyRelay,
}

/// Everything a schedule acts on and looks at.
pub struct Stand<'a> {
    /// The apiservers.
    pub sites: &'a [Site],
    /// What clients feel.
    pub ledger: &'a Ledger,
    /// What the proxy knows.
    pub witness: &'a StatusMonitor,
    /// Where it is shown.
    pub show: &'a Arc<ProgressDisplay>,
    /// Raised when it should end now.
    pub interrupted: &'a AtomicBool,
    /// How much longer than usual it takes.
    pub scale: f64,
}

/// How it went.
#[derive(Debug, Clone, Default)]
pub struct Results {
    /// The steps, in the order in which they were done.
    pub steps: Vec<Step>,
    /// What broke, in words.
    pub broken: Vec<String>,
    /// Everything that clients felt.
    pub reads: u64,
    /// The slowest read of all.
    pub slowest_read: Duration,
    /// Events seen by watches.
    pub events: u64,
    /// How long the machine itself kept everybody waiting.
    pub stalled: Duration,
}

impl Results {
    /// Takes in what was felt in a step.
    pub fn add(&mut self, counts: &Counts) {
        self.reads += counts.reads;
        self.events += counts.events;
        self.stalled += counts.stalled;
        self.slowest_read = self.slowest_read.max(counts.slowest_read);
    }
}

impl Stand<'_> {
    /// Goes through the faults, until the end or an interruption.
    ///
    /// # Errors
    /// An apiserver could not be started again.
    pub fn run(&self, faults: &[Fault], results: &mut Results) -> io::Result<()> {
        results.steps = faults
            .iter()
            .map(|fault| Step {
                what: fault.title("one"),
                noticed: String::new(),
                stage: Stage::Waiting,
                counts: Counts::default(),
            })
            .collect();
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
        let site = &self.sites[target];
        let name = site.server.name();
        results.steps[index].what = fault.title(name);
        results.steps[index].stage = Stage::Running;
        self.ledger.turn();
        let began = Instant::now();
        let (usual, least) = fault.lasts();
        let hold = Duration::from_secs_f64((usual * self.scale).max(least));
        let wait = |results: &mut Results, time, until: &dyn Fn() -> bool| {
            self.watch_for(fault, target, began, (results, index), time, until)
        };
        let never = || false;
        let mut back = true;
        match fault {
            Fault::Nothing => {
                self.show.say("no fault: three apiservers, reads, heartbeats and watches");
                wait(results, hold, &never);
            }
            Fault::DroppedFlows => {
                self.lose(std::slice::from_ref(site), name);
                wait(results, hold, &never);
                site.hole.heal();
                self.show.say(&format!("the flows of {name} pass packets again"));
            }
            Fault::AllFlows => {
                self.lose(self.sites, "all apiservers");
                wait(results, hold, &never);
                self.sites.iter().for_each(|site| site.hole.heal());
                self.show.say("they pass packets again");
            }
            Fault::Killed => {
                site.server.kill();
                self.show
                    .say(&format!("{name} is killed: its sockets are reset, its port refuses"));
                wait(results, hold, &never);
                site.server.restart()?;
                self.show.say(&format!("{name} is started again"));
            }
            Fault::Stopped => {
                site.server.stop();
                self.show.say(&format!("{name} is stopped: its kernel acknowledges, it is silent"));
                wait(results, hold, &never);
                site.server.cont();
                self.show.say(&format!("{name} goes on"));
            }
            Fault::Sick => {
                site.server.set_ready(false);
                self.show.say(&format!("/readyz of {name} fails; everything else of it works"));
                wait(results, hold, &never);
                site.server.set_ready(true);
                self.show.say(&format!("/readyz of {name} is ok again"));
            }
            Fault::Rolling => {
                for site in self.sites {
                    if self.interrupted.load(Relaxed) {
                        break;
                    }
                    let name = site.server.name();
                    self.show.say(&format!("{name} leaves in good order"));
                    site.server.shutdown(GRACE);
                    wait(results, hold, &never);
                    site.server.restart()?;
                    self.show.say(&format!("{name} is started again"));
                    back &= wait(results, BACK, &|| self.all_ready());
                }
            }
        }
        let away = !self.all_ready();
        let returned = Instant::now();
        back &= wait(results, BACK, &|| self.all_ready());
        if away && back {
            let after = seconds(returned.elapsed());
            self.show.say(&format!("all apiservers are in use again, {after} later"));
        }
        // What the return itself may do to clients belongs to this step.
        wait(results, Duration::from_secs(1), &never);
        let counts = self.ledger.turn();
        let interrupted = self.interrupted.load(Relaxed);
        let broken = fault.judge(&counts, back || interrupted);
        for what in &broken {
            self.show.say(&format!("BROKEN: {what}"));
            results.broken.push(format!("{}: {what}", fault.title(name)));
        }
        let step = &mut results.steps[index];
        step.stage = if broken.is_empty() { Stage::Held } else { Stage::Broken };
        step.counts = counts.clone();
        self.show.say(&format!(
            "{}: reads <= {}, events <= {}, {} of {} heartbeats lost",
            if broken.is_empty() { "held" } else { "not held" },
            seconds(counts.slowest_read),
            seconds(counts.silence),
            counts.failed_writes,
            counts.writes,
        ));
        results.add(&counts);
        self.show.steps(&results.steps);
        Ok(())
    }

    fn lose(&self, sites: &[Site], whose: &str) {
        let lost: io::Result<usize> = sites.iter().map(|site| site.hole.lose_all()).sum();
        self.show.say(&match lost {
            Ok(lost) => {
                format!(
                    "every packet of {} of {whose} is lost; new ones work",
                    counted(lost, "established flow")
                )
            }
            // All the same to clients, but jackstay takes it for stopped processes.
            Err(error) => format!("the flows of {whose} are silent, but acknowledged ({error})"),
        });
    }

    /// Waits for a time, for something, or for an interruption, and shows what is felt meanwhile.
    /// Whether it was that something.
    fn watch_for(
        &self,
        fault: Fault,
        target: usize,
        began: Instant,
        (results, index): (&mut Results, usize),
        time: Duration,
        until: &dyn Fn() -> bool,
    ) -> bool {
        let start = Instant::now();
        loop {
            let step = &mut results.steps[index];
            step.counts = self.ledger.so_far();
            let faulty = fault != Fault::Nothing && fault != Fault::Rolling;
            if let Some(notice) = self.witness.first(target, began).filter(|_| faulty) {
                step.noticed = format!("{}, {}", notice.what, seconds(notice.at - began));
            }
            self.show.steps(&results.steps);
            if until() {
                return true;
            }
            if start.elapsed() >= time || self.interrupted.load(Relaxed) {
                return false;
            }
            std::thread::sleep(BEAT);
        }
    }

    /// The apiserver whose loss would be felt most.
    fn busiest(&self) -> usize {
        let rows = self.witness.rows();
        let load = |row: &Row| (row.watches, row.streams);
        (0..rows.len().min(self.sites.len())).max_by_key(|&i| load(&rows[i])).unwrap_or(0)
    }

    /// Whether the proxy has every apiserver in use.
    pub fn all_ready(&self) -> bool {
        let rows = self.witness.rows();
        rows.len() == self.sites.len()
            && rows.iter().all(|row| row.state == "ready" && row.connections > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_promised_is_judged() {
        assert_eq!(Fault::Nothing.judge(&Counts::default(), true), [""; 0]);
        let one = |change: fn(&mut Counts), fault: Fault| {
            let mut counts = Counts::default();
            change(&mut counts);
            fault.judge(&counts, true).len()
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
        assert_eq!(one(|c| c.failed_writes = 1, Fault::Sick), 1);
        assert_eq!(one(|c| c.silence = Duration::from_secs(8), Fault::Killed), 1);
        assert_eq!(one(|c| c.silence = Duration::from_secs(8), Fault::Stopped), 0);
        assert_eq!(Fault::Killed.judge(&Counts::default(), false).len(), 1);
    }
}

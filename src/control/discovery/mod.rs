//! Decides which endpoints an upstream has, and keeps that decision up to date.
//!
//! ```text
//! static  file  dns  slices  state        each source leaves its last good answer on the board
//!    \      \    |     /      /
//!                board
//!                  |  merge               one pure function
//!                settle                   when: together within a second, removals last
//!                  |
//!               members                   the one writer
//! ```
//!
//! The loop in [`keep`] waits for nothing but the next change: sources run in tasks of their own,
//! the disk is written on another thread, a drain is nobody's business here. It holds no lock, and
//! it never places an empty set. A change of the configuration ([`Upstream::reconfigure`]) is a
//! change of a source like any other.

pub mod debounce;
pub mod dns;
pub mod file;
pub mod kubeconfig;
pub mod merge;
pub mod objects;
pub mod slices;
pub mod source_states;
pub mod state_file;
pub mod state_writer;
pub mod transport;
pub mod watch_start;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use arc_swap::ArcSwap;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until};

use super::endpoint_set::{EndpointSetWriter, EndpointSpec};
use crate::config::{self, EndpointAddress};
use crate::net::sockets::interfaces;
use crate::observe::{Liveness, LivenessMonitor};
use crate::upstream::Upstream;
use crate::upstream::endpoint_sources::EndpointSource;
use debounce::{Debouncer, Placed};
use merge::{Candidate, Merged, OwnAddresses};
use objects::DiscoveredEndpoints;
use source_states::SourceStates;
use state_writer::StateWriter;

/// The loop turns at least this often.
const TICK: Duration = Duration::from_secs(1);
/// How often, of more endpoints than there is room for, others are tried.
const ROTATE: Duration = Duration::from_secs(30);

/// What all upstreams share, and a reload may swap.
#[derive(Debug)]
pub struct SharedContext {
    /// What our listeners are bound to.
    pub bound: ArcSwap<Vec<std::net::SocketAddr>>,
    /// Where the last good endpoints are kept.
    pub state_dir: ArcSwap<Option<PathBuf>>,
    /// Detects discovery loops that have stalled.
    pub liveness: LivenessMonitor,
    /// The files of the system that DNS needs.
    pub system: dns::ResolverFiles,
}

/// Keeps the endpoints of an upstream as its sources say, until it is dropped.
pub async fn run(upstream: Arc<Upstream>, around: Arc<SharedContext>) {
    let own = {
        let around = Arc::clone(&around);
        Box::new(move || own_addresses(&around))
    };
    let board = SourceStates::new(Arc::clone(&upstream), own);
    let mut keeper = DiscoveryController {
        liveness: around.liveness.register(&format!("discovery of {}", upstream.name)),
        running: BTreeMap::new(),
        tasks: JoinSet::new(),
        members: EndpointSetWriter::new(Arc::clone(&upstream)),
        settling: Debouncer::default(),
        placed: Vec::new(),
        lot: fastrand::u64(..),
        rotated: Instant::now(),
        told: LoggedState::default(),
        saving: StateWriter::default(),
        around,
        board,
    };
    keeper.adopt();
    keeper.recall();
    keeper.configure();
    keeper.run().await;
}

/// An upstream that is no longer configured: all its endpoints leave, and their connections drain.
pub fn retire(upstream: &Upstream) {
    super::endpoint_set::replace_endpoints(upstream, &[]);
}

fn own_addresses(around: &SharedContext) -> OwnAddresses {
    let bound = around.bound.load().to_vec();
    let everywhere = bound.iter().any(|address| address.ip().is_unspecified());
    let host = if everywhere { interfaces::addresses().unwrap_or_default() } else { Vec::new() };
    OwnAddresses { bound, host }
}

/// What a source needs to know; another one is another source.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Setup {
    File(PathBuf),
    Dns(Vec<EndpointAddress>),
    Slices(PathBuf),
}

/// What the log has been told.
#[derive(Debug, Default)]
struct LoggedState {
    too_many: usize,
    held: usize,
}

struct DiscoveryController {
    board: Rc<SourceStates>,
    around: Arc<SharedContext>,
    liveness: Liveness,
    running: BTreeMap<EndpointSource, (Setup, AbortHandle)>,
    tasks: JoinSet<()>,
    members: EndpointSetWriter,
    settling: Debouncer,
    /// What was placed last.
    placed: Vec<EndpointSpec>,
    /// Which of too many endpoints are tried, and since when.
    lot: u64,
    rotated: Instant,
    told: LoggedState,
    saving: StateWriter,
}

impl DiscoveryController {
    fn upstream(&self) -> &Arc<Upstream> {
        self.members.upstream()
    }

    /// The set that is there already, placed before anything ran. The configuration may be another
    /// one by now.
    fn adopt(&mut self) {
        self.placed = self.members.placed();
    }

    /// Reads what an earlier run left, on another thread: a disk may hang.
    fn recall(&mut self) {
        let Some(dir) = self.around.state_dir.load().as_ref().clone() else { return };
        let (board, upstream) = (Rc::clone(&self.board), Arc::clone(self.upstream()));
        self.tasks.spawn_local(async move {
            let name = Arc::clone(&upstream.name);
            let path = state_file::path(&dir, &name);
            let read = move || state_file::read(&dir, &name, SystemTime::now());
            match tokio::task::spawn_blocking(read).await {
                Ok(Ok(mut saved)) => {
                    // What is configured no longer is asked by nobody, and would never be corrected.
                    let reports = upstream.sources.reports();
                    saved.entries.retain(|(source, _)| reports.contains_key(source));
                    drop(reports);
                    upstream.sources.succeeded(EndpointSource::State, saved.entries.len(), None);
                    let age = config::format_duration(Duration::from_secs(saved.age.as_secs()));
                    upstream.sources.note(EndpointSource::State, format!("{} old", &age));
                    tracing::info!(
                        upstream = &*upstream.name,
                        file = %path.display(),
                        endpoints = saved.entries.len(),
                        age,
                        "remembered endpoints are candidates"
                    );
                    board.remember(saved.entries, SystemTime::now() - saved.age);
                }
                Ok(Err(state_file::StateError::Missing)) => {}
                Ok(Err(error)) => {
                    upstream
                        .sources
                        .failed(EndpointSource::State, &format!("{}: {error}", path.display()));
                }
                Err(error) => upstream.sources.failed(EndpointSource::State, &error.to_string()),
            }
        });
    }

    /// Starts, restarts and ends sources as the configuration says.
    fn configure(&mut self) {
        let config = self.upstream().config.load_full();
        let (names, fixed): (Vec<_>, Vec<_>) =
            config.endpoints.iter().cloned().partition(EndpointAddress::is_name);
        let entry =
            |address: &EndpointAddress| Candidate { address: address.clone(), server_name: None };
        if fixed.is_empty() {
            self.board.forget(EndpointSource::Static);
        } else {
            let said = DiscoveredEndpoints {
                entries: fixed.iter().map(entry).collect(),
                ..DiscoveredEndpoints::default()
            };
            self.board.update(EndpointSource::Static, said, true);
        }
        self.set_up(EndpointSource::File, config.endpoints_file.clone().map(Setup::File));
        self.set_up(EndpointSource::Dns, (!names.is_empty()).then_some(Setup::Dns(names)));
        self.set_up(EndpointSource::Slices, config.discovery.kubeconfig.clone().map(Setup::Slices));
        // The name to verify may be another one.
        self.board.turn();
    }

    fn set_up(&mut self, source: EndpointSource, setup: Option<Setup>) {
        if self.running.get(&source).map(|(setup, _)| setup) == setup.as_ref() {
            return;
        }
        if let Some((_, task)) = self.running.remove(&source) {
            task.abort();
        }
        let Some(setup) = setup else { return self.board.forget(source) };
        self.upstream().sources.expect(source);
        let board = Rc::clone(&self.board);
        let task = match setup.clone() {
            Setup::File(path) => self.tasks.spawn_local(file::follow(path, board)),
            Setup::Dns(names) => {
                let system = self.around.system.clone();
                self.tasks.spawn_local(dns::follow(names, system, board))
            }
            Setup::Slices(path) => self.tasks.spawn_local(slices::follow(path, board)),
        };
        self.running.insert(source, (setup, task));
    }

    async fn run(&mut self) {
        let upstream = Arc::clone(self.upstream());
        let mut ticks = interval(TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut again = None;
        loop {
            tokio::select! {
                () = self.board.changed() => {}
                () = upstream.reconfigured.notified() => self.configure(),
                () = sleep_until(again.unwrap_or_else(Instant::now)), if again.is_some() => {}
                _ = ticks.tick() => {}
            }
            self.liveness.record_turn();
            again = self.turn(Instant::now());
            while let Some(ended) = self.tasks.try_join_next() {
                self.ended(ended.err());
            }
        }
    }

    /// A task has ended: none does by itself but the one that reads the state.
    fn ended(&mut self, error: Option<tokio::task::JoinError>) {
        if let Some(error) = error.filter(tokio::task::JoinError::is_panic) {
            tracing::error!(upstream = &*self.upstream().name, %error, "a source of endpoints broke");
        }
        let over: Vec<_> =
            self.running.iter().filter(|(_, (_, task))| task.is_finished()).collect();
        let over: Vec<_> =
            over.into_iter().map(|(source, (setup, _))| (*source, setup.clone())).collect();
        for (source, setup) in over {
            self.running.remove(&source);
            self.set_up(source, Some(setup));
        }
    }

    /// One turn: what is wanted, what is due, what is to be saved. Returns when to look again.
    fn turn(&mut self, now: Instant) -> Option<Instant> {
        let merged = self.merged(now);
        self.tell_too_many(merged.too_many);
        if merged.members.is_empty() {
            // Nothing is known, or all of it is ourselves: what is there stays.
            self.save(now);
            return None;
        }
        let endpoints = Arc::clone(&self.upstream().endpoints());
        let usable = |member: &EndpointSpec| {
            endpoints.iter().any(|e| e.address == member.address && e.is_usable())
        };
        let placed: Vec<_> = self
            .placed
            .iter()
            .map(|member| Placed { usable: usable(member), member: member.clone() })
            .collect();
        let step = self.settling.step(&merged.members, &placed, now);
        if let Some(set) = step.place {
            self.members.apply(&set);
            self.placed = set;
        }
        self.tell_held(step.held);
        self.save(now);
        step.again
    }

    fn merged(&mut self, now: Instant) -> Merged {
        let upstream = Arc::clone(self.upstream());
        let config = upstream.config();
        let endpoints = upstream.endpoints();
        let usable = |address: &EndpointAddress| {
            endpoints.iter().any(|e| e.address == *address && e.is_usable())
        };
        if self.told.too_many > 0 && now >= self.rotated + ROTATE {
            (self.lot, self.rotated) = (fastrand::u64(..), now);
        }
        let (own, name) = (self.board.own(), config.tls.server_name.as_deref());
        self.board.with(|answers, remembered| {
            merge::merge(answers, remembered, &own, name, &usable, self.lot)
        })
    }

    fn tell_too_many(&mut self, too_many: usize) {
        let before = std::mem::replace(&mut self.told.too_many, too_many);
        if too_many > 0 && before == 0 {
            let words = format!(
                "more than {} endpoints: {too_many} wait, what serves stays and the rest takes turns",
                merge::MOST
            );
            let source = self.board.with(|answers, _| {
                answers.iter().max_by_key(|(_, answer)| answer.entries.len()).map(|(s, _)| *s)
            });
            if let Some(source) = source {
                self.upstream().sources.refused(source, "too_many", too_many, Some(&words));
            }
        }
    }

    fn tell_held(&mut self, held: usize) {
        let before = std::mem::replace(&mut self.told.held, held);
        if held > 0 && before == 0 {
            tracing::warn!(
                upstream = &*self.upstream().name,
                endpoints = held,
                "no endpoint of the new set serves yet: those of the old one stay until one does"
            );
        }
    }

    /// Has the last good answers written when one of them serves: those of this run, and what an
    /// earlier one left of sources that have not answered yet.
    fn save(&mut self, now: Instant) {
        let Some(dir) = self.around.state_dir.load().as_ref().clone() else { return };
        let (answers, since) = self.board.worth_saving();
        let endpoints = self.upstream().endpoints();
        let serves = |entry: &Candidate| {
            endpoints.iter().any(|e| e.address == entry.address && e.is_usable())
        };
        let good = answers.iter().any(|(_, entry)| serves(entry));
        let since = since.unwrap_or_else(SystemTime::now);
        self.saving.turn(self.members.upstream(), dir, good.then_some((answers, since)), now);
    }
}

#[cfg(test)]
mod tests;

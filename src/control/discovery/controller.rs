//! Runs discovery for one upstream: starts its sources, merges their answers and applies the result.

use std::collections::{BTreeMap, HashSet};
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use jackstay_config as config;
use jackstay_core::discovery::address::EndpointAddress;
use jackstay_core::discovery::debounce::Debouncer;
use jackstay_core::discovery::merge;
use jackstay_core::discovery::merge::{MergeContext, MergedEndpoints};
use jackstay_core::discovery::own_addresses::OwnAddresses;
use jackstay_core::discovery::source::{
    Candidate, DiscoveredEndpoints, EndpointIdentity, EndpointSource, EndpointSpec,
};
use jackstay_net::dns::ResolverFiles;
use jackstay_sys::clock;
use jackstay_sys::utc::wall_clock;
use tokio::task::{AbortHandle, JoinError, JoinSet};
use tokio::time::{MissedTickBehavior, interval, sleep, sleep_until};

use super::panics::Panics;
use super::source_states::{SourceStates, is_of_configured_name};
use super::state_file::StateFileError;
use super::state_writer::StateWriter;
use super::{dns, file, slices, state_file};
use crate::control::backends;
use crate::control::endpoint_set::{self, EndpointSetWriter};
use crate::control::host_addresses::HostAddresses;
use crate::observe::events::{Change, EventKind};
use crate::observe::{Liveness, LivenessMonitor};
use crate::upstream::Upstream;
use crate::upstream::endpoint_sources::RejectReason;

/// Maximum time between two steps of the controller.
pub(super) const TICK: Duration = Duration::from_secs(1);
/// With more candidates than [`merge::MAX_ENDPOINTS`], time after which another selection is made.
const ROTATION_INTERVAL: Duration = Duration::from_secs(30);
/// Shortest time between two lines that say for which endpoints the old ones stay.
const WAITS_INTERVAL: Duration = Duration::from_secs(10);
/// Time after which a wait is reported. Usually the new endpoints have been tried by then.
const FIRST_REPORT_AFTER: Duration = Duration::from_secs(1);
/// Endpoints that such a line names.
const MAX_WAITED_FOR: usize = 5;

/// The context of the controllers of all upstreams. A reload may replace the `ArcSwap` fields.
#[derive(Debug)]
pub struct SharedContext {
    /// Addresses to which this process's listeners are bound.
    pub bound: ArcSwap<Vec<std::net::SocketAddr>>,
    /// Directory of the state files, if they are written.
    pub state_dir: Arc<ArcSwap<Option<PathBuf>>>,
    /// Reports stalled controllers.
    pub liveness: LivenessMonitor,
    /// The system files that DNS lookups read.
    pub system: ResolverFiles,
    /// The addresses of this host.
    pub host: &'static HostAddresses,
}

/// Keeps the endpoint set of `upstream` up to date until the future is dropped.
pub async fn run(upstream: Arc<Upstream>, shared: Arc<SharedContext>) {
    let own_addresses = {
        let shared = Arc::clone(&shared);
        Box::new(move || own_addresses(&shared.bound.load(), shared.host))
    };
    let writer = Rc::new(EndpointSetWriter::new(Arc::clone(&upstream)));
    let examined = backends::run(Arc::clone(&upstream), Rc::clone(&writer));
    let mut controller = DiscoveryController {
        liveness: shared.liveness.register(&format!("endpoints of {}", upstream.name)),
        states: SourceStates::new(upstream, own_addresses),
        running: BTreeMap::new(),
        tasks: JoinSet::new(),
        panics: Panics::none(),
        // Built from the configuration at the start, which may have changed since.
        current: writer.current(),
        writer,
        debouncer: Debouncer::default(),
        rotation: fastrand::u64(..),
        rotated_at: clock::now(),
        excess: 0,
        waits: None,
        state_writer: StateWriter::default(),
        shared,
    };
    controller.restore_saved();
    controller.configure();
    tokio::select! {
        () = controller.run() => {}
        () = examined => {}
    }
}

/// The settings of a source that runs in a task. The source is restarted when they change.
#[derive(Debug, Clone, PartialEq, Eq)]
enum SourceConfig {
    File(PathBuf),
    Dns(Vec<EndpointAddress>),
    Slices(PathBuf),
}

/// Old endpoints stay while no new one is usable.
struct Waits {
    since: Instant,
    /// The reasons that were reported last, and when.
    reported: Option<(String, Instant)>,
}

struct DiscoveryController {
    states: Rc<SourceStates>,
    shared: Arc<SharedContext>,
    liveness: Liveness,
    /// The sources that run in tasks, with their settings.
    running: BTreeMap<EndpointSource, (SourceConfig, AbortHandle)>,
    tasks: JoinSet<()>,
    panics: Panics,
    writer: Rc<EndpointSetWriter>,
    debouncer: Debouncer,
    /// The set that was applied last.
    current: Vec<EndpointSpec>,
    /// Selects among more candidates than the maximum; see [`merge::merge`].
    rotation: u64,
    rotated_at: Instant,
    /// Number of endpoints that the last step left out; logged when it rises from zero.
    excess: usize,
    /// The wait for a new endpoint to be usable.
    waits: Option<Waits>,
    state_writer: StateWriter,
}

impl DiscoveryController {
    fn upstream(&self) -> &Arc<Upstream> {
        self.states.upstream()
    }

    /// Restores the endpoints in the state file of an earlier run. Reads it on another thread, because a
    /// disk may hang.
    fn restore_saved(&mut self) {
        let Some(dir) = self.shared.state_dir.load().as_ref().clone() else { return };
        let (states, upstream) = (Rc::clone(&self.states), Arc::clone(self.upstream()));
        self.tasks.spawn_local(async move {
            let name = Arc::clone(&upstream.name);
            let path = state_file::path(&dir, &name);
            let read = move || state_file::read(&dir, &name, wall_clock());
            let read = tokio::task::spawn_blocking(read).await;
            let mut saved = match read
                .unwrap_or_else(|error| Err(StateFileError::Io(io::Error::other(error))))
            {
                Ok(Some(saved)) => saved,
                Ok(None) => return,
                Err(error) => {
                    let error = format!("{}: {error}", path.display());
                    return upstream.sources.failed(EndpointSource::State, &error);
                }
            };
            // Endpoints of a source or name that is not configured are dropped: no answer would replace them.
            let reports = upstream.sources.reports();
            let names = &upstream.config().endpoints;
            saved.endpoints.retain(|entry| {
                reports.contains_key(&entry.0) && is_of_configured_name(entry, names)
            });
            drop(reports);
            let count = saved.endpoints.len();
            upstream.sources.succeeded(EndpointSource::State, count, None);
            let age = config::format_duration(Duration::from_secs(saved.age.as_secs()));
            upstream.sources.note(EndpointSource::State, format!("{age} old"));
            tracing::info!(
                upstream = &*upstream.name,
                file = %path.display(),
                endpoints = count,
                age,
                "saved endpoints restored"
            );
            states.restore(saved.endpoints, wall_clock() - saved.age);
        });
    }

    /// Starts, restarts and removes sources according to the configuration.
    fn configure(&mut self) {
        let config = Arc::clone(&self.upstream().config());
        let (names, addresses): (Vec<_>, Vec<_>) =
            config.endpoints.iter().cloned().partition(EndpointAddress::is_name);
        if addresses.is_empty() {
            self.states.remove(EndpointSource::Static);
        } else {
            let candidate = |address| Candidate { address, server_name: None };
            let candidates = addresses.into_iter().map(candidate).collect();
            let found = DiscoveredEndpoints { candidates, ..DiscoveredEndpoints::default() };
            self.states.update(EndpointSource::Static, found);
        }
        self.states.retain_names(&names);
        let names = (!names.is_empty()).then_some(SourceConfig::Dns(names));
        let slices = config.discovery.kubeconfig.clone().map(SourceConfig::Slices);
        let file = config.endpoints_file.clone().map(SourceConfig::File);
        self.start_source(EndpointSource::File, file);
        self.start_source(EndpointSource::Dns, names);
        self.start_source(EndpointSource::Slices, slices);
        // `tls.server_name` may have changed, which no source reports.
        self.states.notify();
    }

    /// Starts a source, or restarts it if its settings have changed; `None` removes it.
    fn start_source(&mut self, source: EndpointSource, config: Option<SourceConfig>) {
        self.start_source_after(source, config, Duration::ZERO);
    }

    fn start_source_after(
        &mut self,
        source: EndpointSource,
        config: Option<SourceConfig>,
        pause: Duration,
    ) {
        if self.running.get(&source).map(|(config, _)| config) == config.as_ref() {
            return;
        }
        if let Some((_, task)) = self.running.remove(&source) {
            task.abort();
        }
        let Some(config) = config else { return self.states.remove(source) };
        self.upstream().sources.expect(source);
        let states = Rc::clone(&self.states);
        let (system, of_source) = (self.shared.system.clone(), config.clone());
        let task = self.tasks.spawn_local(async move {
            if !pause.is_zero() {
                sleep(pause).await;
            }
            match of_source {
                SourceConfig::File(path) => file::follow(path, states).await,
                SourceConfig::Dns(names) => dns::follow(names, system, states).await,
                SourceConfig::Slices(path) => slices::follow(path, states).await,
            }
        });
        self.running.insert(source, (config, task));
    }

    async fn run(&mut self) {
        let upstream = Arc::clone(self.upstream());
        let mut ticks = interval(TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut step_at = None;
        loop {
            tokio::select! {
                () = self.states.changed() => {}
                () = upstream.reconfigured() => self.configure(),
                () = sleep_until((step_at.unwrap_or_else(clock::now)).into()), if step_at.is_some() => {}
                _ = ticks.tick() => {}
            }
            self.liveness.record_iteration();
            step_at = self.step(clock::now());
            while let Some(ended) = self.tasks.try_join_next() {
                self.restart_ended(ended.err(), clock::now());
            }
        }
    }

    /// Restarts each source whose task has ended, which only a panic causes. The task that reads the
    /// state file ends when it is done and is not a source.
    fn restart_ended(&mut self, error: Option<JoinError>, now: Instant) {
        let mut pause = Duration::ZERO;
        if let Some(error) = error.filter(JoinError::is_panic) {
            pause = self.panics.counted(now, fastrand::f64());
            let upstream = &*self.upstream().name;
            tracing::error!(upstream, %error, restart_after = ?pause, "discovery source panicked");
        }
        let ended: Vec<_> = self
            .running
            .iter()
            .filter(|(_, (_, task))| task.is_finished())
            .map(|(source, (config, _))| (*source, config.clone()))
            .collect();
        for (source, config) in ended {
            self.running.remove(&source);
            self.start_source_after(source, Some(config), pause);
        }
    }

    /// Merges the answers, applies the changes that are due, and saves the endpoints. Returns when the
    /// next step is due.
    fn step(&mut self, now: Instant) -> Option<Instant> {
        let usable = self.usable();
        let merged = self.merge(&usable, now);
        self.log_excess(merged.excess);
        if merged.endpoints.is_empty() {
            // No endpoint is known, or only addresses of this process: the current set stays.
            self.save(&usable, now);
            return None;
        }
        let step = self.debouncer.step(&merged.endpoints, &self.current, &usable, now);
        if let Some(set) = step.apply {
            self.writer.apply(&set);
            self.current = set;
        }
        self.report_retained(step.retained, now);
        self.save(&self.usable(), now);
        step.step_at
    }

    fn usable(&self) -> HashSet<EndpointIdentity> {
        let upstream = self.upstream();
        let endpoints = upstream.endpoints();
        let usable = endpoints.iter().filter(|endpoint| upstream.serves_at(endpoint));
        usable.map(|endpoint| endpoint_set::identity(endpoint)).collect()
    }

    fn merge(&mut self, usable: &HashSet<EndpointIdentity>, now: Instant) -> MergedEndpoints {
        if self.excess > 0 && now >= self.rotated_at + ROTATION_INTERVAL {
            (self.rotation, self.rotated_at) = (fastrand::u64(..), now);
        }
        let config = self.upstream().config();
        let own = self.states.own_addresses();
        let local = endpoint_set::preferred_host(config.prefer, self.shared.host);
        let context = MergeContext {
            own: &own,
            server_name: config.tls.server_name.as_deref(),
            local: local.as_deref(),
            usable,
            rotation: self.rotation,
        };
        self.states.read(|answers, saved| merge::merge(answers, saved, &context))
    }

    fn log_excess(&mut self, excess: usize) {
        let before = std::mem::replace(&mut self.excess, excess);
        if excess == 0 || before > 0 {
            return;
        }
        let message = format!(
            "more than {} endpoints: {excess} are left out; usable ones stay, the others take turns",
            merge::MAX_ENDPOINTS
        );
        let largest_source = self.states.read(|answers, _| {
            let largest = answers.iter().max_by_key(|(_, answer)| answer.candidates.len());
            largest.map(|(source, _)| *source)
        });
        if let Some(source) = largest_source {
            self.upstream().sources.refused(source, RejectReason::TooMany, excess, Some(&message));
        }
    }

    /// Reports that `retained` endpoints that are not wanted stay, and for which ones they wait and why: when the new
    /// ones have been tried, and when the reasons change.
    fn report_retained(&mut self, retained: usize, now: Instant) {
        if retained == 0 {
            let waits = self.waits.take();
            if waits.is_some_and(|waits| waits.reported.is_some()) {
                let reason = "an endpoint of the new set is usable, or the old set is wanted again";
                self.report_set(
                    "not usable",
                    "in use",
                    (reason, "endpoints that are not wanted leave"),
                );
            }
            return;
        }
        let reasons = self.upstream().unusable_endpoints(MAX_WAITED_FOR);
        let waits = self.waits.get_or_insert(Waits { since: now, reported: None });
        let is_due = match &waits.reported {
            None => now >= waits.since + FIRST_REPORT_AFTER,
            Some((reported, at)) => *reported != reasons && now >= *at + WAITS_INTERVAL,
        };
        if is_due {
            waits.reported = Some((reasons.clone(), now));
            let effect = "the old endpoints stay in use until a new one is usable";
            self.report_set("new", "not usable", (&reasons, effect));
        }
    }

    /// Reports whether an endpoint of the set that is wanted is usable.
    fn report_set(&self, from: &str, to: &str, (reason, effect): (&str, &str)) {
        let (kind, upstream, bad) = (EventKind::Source, self.upstream(), to == "not usable");
        let (name, detail, upstream) = ("set of endpoints", "", Some(&*upstream.name));
        let change = Change { kind, upstream, name, detail, from, to, reason, effect, bad };
        self.upstream().metrics.events().changed(&change);
    }

    /// Has the endpoints written to the state file, if at least one of them is usable.
    fn save(&mut self, usable: &HashSet<EndpointIdentity>, now: Instant) {
        let Some(dir) = self.shared.state_dir.load().as_ref().clone() else { return };
        let (endpoints, saved_at) = self.states.to_save();
        let is_usable = |saved: &Candidate| usable.iter().any(|one| one.address == saved.address);
        let any_usable = endpoints.iter().any(|(_, candidate)| is_usable(candidate));
        let saved_at = saved_at.unwrap_or_else(wall_clock);
        let upstream = Arc::clone(self.upstream());
        self.state_writer.step(&upstream, dir, any_usable.then_some((endpoints, saved_at)), now);
    }
}

/// The addresses of listeners that are bound to `bound`. Reads the addresses of this host's interfaces only if a
/// listener is bound to the unspecified address.
fn own_addresses(bound: &[SocketAddr], host: &HostAddresses) -> OwnAddresses {
    let unspecified = bound.iter().any(|address| address.ip().is_unspecified());
    let interfaces = if unspecified { host.get().unwrap_or_default() } else { Vec::new() };
    OwnAddresses::new(bound.to_vec(), interfaces)
}

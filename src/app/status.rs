//! The content of the admin endpoint, which is read from its owners at the time of the query.

mod certificates;
mod threads;

use std::fmt::Write as _;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use arc_swap::ArcSwap;
use jackstay_config::Config;
use jackstay_core::admission::{MemoryBudget, MemoryStatus};
use jackstay_sys::clock;
use jackstay_sys::utc::{Utc, wall_clock};
use serde::Serialize;
use serde_json::{Value, json};
use tokio::sync::watch;

use self::certificates::{CaStatus, CertificateStatus, IdentityStatus};
use self::threads::ThreadsStatus;
use super::active::ActiveConfig;
use super::listener::{BoundListener, ListenerMode};
use super::reload::ReloadResult;
use super::sandbox::{ProcessSandbox, SandboxStatus};
use crate::admin::{self, Readiness, ReadinessCheck};
use crate::control::discovery::SharedContext;
use crate::observe::events::Event;
use crate::observe::history::{Columns, STEP};
use crate::observe::own_errors::OwnError;
use crate::observe::{ConfiguredSeries, Liveness, Metrics, build, quantity};
use crate::upstream::Upstream;
use crate::upstream::address_backends::BalancerStatus;
use crate::upstream::canary::CanaryStatus;
use crate::upstream::compression::GzipFailure;
use crate::upstream::endpoint::Endpoint;
use crate::upstream::endpoint_sources::{SourceReport, age};
use crate::upstream::group_failures::FailingGroupStatus;
use crate::upstream::restores::RestoreStatus;
use crate::upstream::stats::EndpointStatus;
use crate::upstream::unordered_groups::UnorderedGroup;
use crate::upstream::unreachable_webhooks::UnreachableWebhook;

/// How many of the latest events `/status` includes.
const EVENTS_IN_STATUS: usize = 8;

/// The status of the process, for the admin endpoint.
pub struct ProcessStatus {
    active: ArcSwap<ActiveParts>,
    metrics: Arc<Metrics>,
    memory: Arc<MemoryBudget>,
    workers: Vec<Liveness>,
    started: SystemTime,
    draining: watch::Receiver<bool>,
    context: Arc<SharedContext>,
    reloads: Mutex<ConfigStatus>,
    sandbox: Option<Arc<ProcessSandbox>>,
}

/// The parts of the active configuration that the admin endpoint shows. It does not keep sockets open.
struct ActiveParts {
    config: Arc<Config>,
    upstreams: Vec<Arc<Upstream>>,
    listeners: Vec<Arc<BoundListener>>,
}

impl ActiveParts {
    fn new(active: &ActiveConfig) -> Self {
        Self {
            config: Arc::clone(&active.config),
            upstreams: active.upstreams.clone(),
            listeners: active.listeners.clone(),
        }
    }
}

/// The body of `/status`.
#[derive(Serialize)]
struct Status<'a> {
    version: &'static str,
    commit: &'static str,
    node: Option<String>,
    now: String,
    started_at: String,
    draining: bool,
    /// Null in a process that was not started by `jackstay run`.
    sandbox: Option<&'a SandboxStatus>,
    config: &'a ConfigStatus,
    memory: MemoryStatus,
    threads: ThreadsStatus,
    listeners: Vec<ListenerStatus<'a>>,
    upstreams: Vec<UpstreamStatus<'a>>,
    events: Vec<Event>,
}

/// The configuration file and the results of all reloads.
#[derive(Default, Serialize)]
struct ConfigStatus {
    file: Option<PathBuf>,
    reloads: ReloadCounts,
    last_reload: Option<ReloadResult>,
}

#[derive(Default, Serialize)]
struct ReloadCounts {
    ok: u64,
    failed: u64,
}

#[derive(Serialize)]
struct ListenerStatus<'a> {
    name: &'a str,
    mode: &'static str,
    connections: i64,
    bind: Vec<SocketAddr>,
    upstream: &'a str,
    own_errors: Vec<OwnError>,
    #[serde(flatten)]
    mode_status: ModeStatus<'a>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum ModeStatus<'a> {
    Terminate {
        certificate: CertificateStatus,
        /// Null if client certificates are not accepted.
        client_ca: Option<Box<CaStatus>>,
        identities: Vec<IdentityStatus<'a>>,
        requests_in_flight: i64,
        watches: i64,
        tunnels: i64,
        /// The server names of connections that are passed through.
        #[serde(skip_serializing_if = "<[_]>::is_empty")]
        passthrough_server_names: &'a [String],
        /// Absent if no connection is passed through by its server name, and none is open that was.
        #[serde(skip_serializing_if = "Option::is_none")]
        flows: Option<usize>,
    },
    Passthrough {
        flows: usize,
    },
}

#[derive(Serialize)]
struct UpstreamStatus<'a> {
    name: &'a str,
    /// Null if servers are not verified.
    ca: Option<CaStatus>,
    /// Null without a `canary` share.
    canary: Option<CanaryStatus>,
    endpoints: Vec<EndpointStatus>,
    sources: Vec<Value>,
    /// Why watches do not ask for gzip; null if they do, or if the configuration decides.
    gzip_failure: Option<GzipFailure>,
    /// The latest restore of its etcd from a backup; null if none was recognised.
    restore: Option<RestoreStatus>,
    /// The API groups whose watches are not resumed because their versions are not ordered.
    unordered_groups: Vec<UnorderedGroup>,
    /// What is behind the addresses that were examined.
    balancers: Vec<BalancerStatus>,
    /// The API groups that fail at an endpoint that is healthy.
    failing_groups: Vec<FailingGroupStatus>,
    /// The admission webhooks that an endpoint cannot reach, as responses of the last minute say.
    failing_webhooks: Vec<UnreachableWebhook>,
}

/// The body of `/history`.
#[derive(Serialize)]
struct HistoryStatus {
    step_s: u64,
    endpoints: Vec<EndpointHistory>,
}

#[derive(Serialize)]
struct EndpointHistory {
    upstream: String,
    address: String,
    columns: Columns,
}

impl ProcessStatus {
    /// Adds the checks that do not decide about readiness. Without an identity the process serves bearer tokens and
    /// other identities. Clients decide about its serving certificate. It probes with the last valid token or none, and
    /// uses the last endpoints and the last configuration.
    fn check_optional(&self, checks: &mut Vec<ReadinessCheck>) {
        let shown = self.active.load();
        let mut check = |name: String, ok: bool, detail: String| {
            checks.push(ReadinessCheck { name, ok, required: false, detail });
        };
        let now = wall_clock();
        for listener in &shown.listeners {
            let ListenerMode::Terminate { tls, identities, .. } = &listener.mode else { continue };
            if let Some(error) = CertificateStatus::serving(tls, now).error {
                let file = tls.cert_file();
                check(format!("serving certificate {}", file.display()), false, error);
            }
            if let Some(CaStatus { file, error: Some(error), .. }) = CaStatus::of_clients(tls, now)
            {
                check(format!("client CA bundle {}", file.display()), false, error);
            }
            for slot in identities {
                let shown = IdentityStatus::new(slot, identities, None, now);
                if let Some(error) = shown.certificate.error {
                    check(format!("identity {}", slot.source), false, error);
                }
            }
        }
        for upstream in &shown.upstreams {
            if let Some(CaStatus { file, error: Some(error), .. }) =
                CaStatus::of_apiservers(upstream, now)
            {
                check(format!("apiserver CA bundle {}", file.display()), false, error);
            }
            let token = upstream.credentials.probe_token();
            if let Some(error) = token.as_ref().and_then(|token| token.error()) {
                check(format!("token for /readyz of {}", upstream.name), false, error);
            }
            for (source, report) in upstream.sources.reports().iter() {
                let (ok, detail) = source_check(report);
                check(format!("source {}/{}", upstream.name, source.as_str()), ok, detail);
            }
        }
        for name in self.context.liveness.stalled() {
            check(name, false, "control loop stalled; its state may be stale".into());
        }
        if let Some(failed) = self.reloads().last_reload.as_ref().filter(|last| !last.is_ok()) {
            let detail = format!("the old configuration stays: {}", failed.errors().join("; "));
            check("configuration".into(), false, detail);
        }
    }

    /// The status of a process that serves `active`, which was read from `file`.
    pub fn new(
        active: &ActiveConfig,
        (metrics, memory): (&Arc<Metrics>, &Arc<MemoryBudget>),
        workers: Vec<Liveness>,
        draining: watch::Receiver<bool>,
        context: &Arc<SharedContext>,
        file: Option<PathBuf>,
    ) -> Self {
        Self {
            active: ArcSwap::from_pointee(ActiveParts::new(active)),
            metrics: Arc::clone(metrics),
            memory: Arc::clone(memory),
            workers,
            started: wall_clock(),
            draining,
            context: Arc::clone(context),
            reloads: Mutex::new(ConfigStatus { file, ..ConfigStatus::default() }),
            sandbox: None,
        }
    }

    /// Shows the restrictions of the process.
    pub fn with_sandbox(self, sandbox: Option<Arc<ProcessSandbox>>) -> Self {
        Self { sandbox, ..self }
    }

    /// Shows this configuration from now on.
    pub fn show(&self, active: &ActiveConfig) {
        self.active.store(Arc::new(ActiveParts::new(active)));
    }

    pub fn last_reload(&self) -> Option<ReloadResult> {
        self.reloads().last_reload.clone()
    }

    pub fn record_reload(&self, result: ReloadResult) {
        let ConfigStatus { reloads, last_reload, .. } = &mut *self.reloads();
        *if result.is_ok() { &mut reloads.ok } else { &mut reloads.failed } += 1;
        *last_reload = Some(result);
    }

    fn reloads(&self) -> MutexGuard<'_, ConfigStatus> {
        self.reloads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn listener_status<'a>(
        &self,
        listener: &'a BoundListener,
        config_file: Option<&Path>,
    ) -> ListenerStatus<'a> {
        let (metrics, now) = (&listener.metrics, wall_clock());
        let flows = self.metrics.open_flows(listener.name());
        let mode_status = match &listener.mode {
            ListenerMode::Terminate { tls, identities, config } => ModeStatus::Terminate {
                certificate: CertificateStatus::serving(tls, now),
                client_ca: CaStatus::of_clients(tls, now).map(Box::new),
                identities: identities
                    .iter()
                    .map(|slot| IdentityStatus::new(slot, identities, config_file, now))
                    .collect(),
                requests_in_flight: metrics.in_flight.get(),
                watches: metrics.watches.get(),
                tunnels: metrics.tunnels.get(),
                passthrough_server_names: config
                    .passed_through
                    .as_ref()
                    .map_or(&[], |configured| &configured.server_names),
                flows: Some(flows).filter(|flows| listener.config.has_flows() || *flows > 0),
            },
            ListenerMode::Passthrough { .. } => ModeStatus::Passthrough { flows },
        };
        ListenerStatus {
            name: listener.name(),
            mode: listener.config.mode.as_str(),
            connections: metrics.connections.get(),
            bind: listener.addresses(),
            upstream: &listener.config.upstream,
            own_errors: metrics.own_errors.list(),
            mode_status,
        }
    }
}

impl<'a> From<&'a Arc<Upstream>> for UpstreamStatus<'a> {
    fn from(upstream: &'a Arc<Upstream>) -> Self {
        let status = |endpoint: &Arc<Endpoint>| EndpointStatus {
            usable: upstream.serves_at(endpoint),
            ..endpoint.status()
        };
        Self {
            name: &upstream.name,
            ca: CaStatus::of_apiservers(upstream, wall_clock()),
            canary: upstream.canary.status(upstream.config().canary, clock::now()),
            endpoints: upstream.endpoints().iter().map(status).collect(),
            sources: upstream.sources.status(wall_clock()),
            gzip_failure: upstream.compression.failure(clock::now()),
            restore: upstream.restores.latest(),
            unordered_groups: upstream.unordered_groups.list(),
            balancers: upstream.backends.list(),
            failing_groups: upstream.group_failures.list(),
            failing_webhooks: upstream.group_failures.unreachable_webhooks(),
        }
    }
}

/// Whether the last query of an endpoint source succeeded, with details.
fn source_check(report: &SourceReport) -> (bool, String) {
    let mut detail = match report.last_success {
        Some(at) => {
            let age = age(at, wall_clock());
            format!("{}, {age} s ago", quantity(report.endpoints, "endpoint"))
        }
        None => "no answer yet".to_owned(),
    };
    if let Some(message) = report.current_error().or(report.note.as_deref()) {
        let _ = write!(detail, "; {message}");
    }
    (report.current_error().is_none() && report.last_success.is_some(), detail)
}

/// What the metrics show of the configuration in force.
fn configured_series(shown: &ActiveParts) -> ConfiguredSeries {
    let listeners = shown.listeners.iter().map(|listener| {
        let config = &listener.config;
        [config.name.clone(), config.mode.as_str().to_owned(), config.upstream.clone()]
    });
    let usable_endpoints = shown.upstreams.iter().map(|upstream| {
        let endpoints = upstream.endpoints();
        let usable = endpoints.iter().filter(|endpoint| upstream.serves_at(endpoint)).count();
        (upstream.name.to_string(), usable)
    });
    ConfiguredSeries {
        listeners: listeners.collect(),
        usable_endpoints: usable_endpoints.collect(),
    }
}

impl admin::StatusProvider for ProcessStatus {
    fn liveness(&self) -> Result<(), String> {
        let workers = self.workers.iter();
        let stalled: Vec<_> = workers.filter(|w| w.is_stalled()).map(Liveness::name).collect();
        if stalled.is_empty() {
            Ok(())
        } else {
            Err(format!("{}: event loop stalled for more than 5 s", stalled.join(", ")))
        }
    }

    fn readiness(&self) -> Readiness {
        let shown = self.active.load();
        let mut checks = Vec::new();
        let mut check = |name: String, ok: bool, detail: String| {
            checks.push(ReadinessCheck { name, ok, required: true, detail });
        };
        let mut ready = true;
        for listener in &shown.listeners {
            let (bound, wanted) = (listener.sockets.len(), listener.config.bind.len());
            let detail = format!("{bound} of {wanted} addresses bound");
            ready &= bound > 0;
            check(format!("listener {}", listener.name()), bound > 0, detail);
        }
        for upstream in &shown.upstreams {
            let endpoints = upstream.endpoints();
            let usable = endpoints.iter().filter(|e| upstream.serves_at(e)).count();
            let mut detail = match endpoints.len() {
                0 => upstream.sources.no_endpoint_reason(),
                all => format!("{usable} of {all} endpoints usable"),
            };
            // Of those that serve only flows, the reason is shown, too.
            let unusable = upstream.unusable_endpoints(5);
            if !unusable.is_empty() {
                let _ = write!(detail, "; {unusable}");
            }
            ready &= usable > 0;
            check(format!("upstream {}", upstream.name), usable > 0, detail);
        }
        self.check_optional(&mut checks);
        let draining = *self.draining.borrow();
        if draining {
            let (name, detail) = ("shutdown".into(), "draining".into());
            checks.push(ReadinessCheck { name, ok: false, required: true, detail });
        }
        Readiness { ready: ready && !draining, checks }
    }

    fn status(&self) -> Value {
        let shown = self.active.load();
        let file = self.reloads().file.clone();
        json!(Status {
            version: build::VERSION,
            commit: build::COMMIT,
            node: admin::node_name(),
            now: Utc::now().seconds(),
            started_at: Utc(self.started).seconds(),
            draining: *self.draining.borrow(),
            sandbox: self.sandbox.as_ref().map(|sandbox| sandbox.status()),
            config: &self.reloads(),
            memory: self.memory.status(),
            threads: ThreadsStatus::new(&shown.config, &shown.listeners),
            listeners: shown
                .listeners
                .iter()
                .map(|listener| self.listener_status(listener, file.as_deref()))
                .collect(),
            upstreams: shown.upstreams.iter().map(UpstreamStatus::from).collect(),
            events: self.metrics.events().last_notable(EVENTS_IN_STATUS),
        })
    }

    fn events(&self) -> Value {
        json!({ "events": self.metrics.events().last(usize::MAX) })
    }

    fn history(&self) -> Value {
        let mut endpoints = Vec::new();
        for upstream in &self.active.load().upstreams {
            endpoints.extend(upstream.endpoints().iter().map(|endpoint| EndpointHistory {
                upstream: upstream.name.to_string(),
                address: endpoint.label.to_string(),
                columns: endpoint.metrics.history().columns(),
            }));
        }
        json!(HistoryStatus { step_s: STEP.as_secs(), endpoints })
    }

    fn config(&self) -> Value {
        self.active.load().config.to_json()
    }

    fn metrics(&self) -> String {
        self.metrics.show_memory(&self.memory);
        self.metrics.show_configured(configured_series(&self.active.load()));
        self.metrics.render()
    }
}

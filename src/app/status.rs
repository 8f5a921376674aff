//! Answers the admin endpoint. Everything is read from its owner at the time of the query.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use arc_swap::ArcSwap;
use serde_json::{Value, json};
use tokio::sync::watch;

use super::active::ActiveConfig;
use super::listener::{BoundListener, ListenerMode};
use super::reload::ReloadResult;
use crate::admin::{self, Readiness, ReadinessCheck};
use crate::config::Config;
use crate::control::discovery::SharedContext;
use crate::net::tls::serving::ServingTls;
use crate::observe::build;
use crate::observe::counted;
use crate::observe::history::STEP;
use crate::observe::utc::{Utc, wall_clock};
use crate::observe::{ListenerMetrics, Liveness, Metrics, PassthroughMetrics};
use crate::upstream::Upstream;
use crate::upstream::credentials::IdentitySlot;
use crate::upstream::endpoint_sources::{EndpointSource, SourceReport, age};

/// How many of the latest events `/status` includes.
const EVENTS_IN_STATUS: usize = 8;

/// The status of the process, for the admin endpoint.
pub struct ProcessStatus {
    active: ArcSwap<Shown>,
    metrics: Arc<Metrics>,
    workers: Vec<Liveness>,
    started: SystemTime,
    draining: watch::Receiver<bool>,
    context: Arc<SharedContext>,
    file: Option<PathBuf>,
    reloads: Mutex<Reloads>,
}

/// The parts of the active configuration that are shown. A reload replaces all of it.
struct Shown {
    config: Arc<Config>,
    upstreams: Vec<Arc<Upstream>>,
    listeners: Vec<ListenerStatus>,
}

/// The results of all reloads.
#[derive(Default)]
struct Reloads {
    ok: u64,
    failed: u64,
    last: Option<ReloadResult>,
}

struct ListenerStatus {
    name: String,
    upstream: String,
    wanted: usize,
    addresses: Vec<SocketAddr>,
    mode: &'static str,
    identities: Vec<Arc<IdentitySlot>>,
    /// L7 only.
    tls: Option<Arc<ServingTls>>,
    /// L4 only.
    flows: Option<Arc<PassthroughMetrics>>,
    metrics: Arc<ListenerMetrics>,
}

impl Shown {
    fn new(active: &ActiveConfig, metrics: &Arc<Metrics>) -> Self {
        let of = |bound: &Arc<BoundListener>| {
            let (tls, identities, flows) = match &bound.mode {
                ListenerMode::Terminate { tls, identities, .. } => {
                    (Some(Arc::clone(tls)), identities.clone(), None)
                }
                ListenerMode::Passthrough { .. } => {
                    (None, Vec::new(), Some(metrics.passthrough(bound.name())))
                }
            };
            ListenerStatus {
                name: bound.config.name.clone(),
                upstream: bound.config.upstream.clone(),
                wanted: bound.config.bind.len(),
                addresses: bound.addresses(),
                mode: bound.config.mode.as_str(),
                identities,
                tls,
                flows,
                metrics: Arc::clone(&bound.metrics),
            }
        };
        Self {
            config: Arc::clone(&active.config),
            upstreams: active.upstreams.clone(),
            listeners: active.listeners.iter().map(of).collect(),
        }
    }
}

impl ProcessStatus {
    /// The status of a process that serves `active`, read from `file`.
    pub fn new(
        active: &ActiveConfig,
        metrics: &Arc<Metrics>,
        workers: Vec<Liveness>,
        draining: watch::Receiver<bool>,
        context: &Arc<SharedContext>,
        file: Option<PathBuf>,
    ) -> Self {
        Self {
            active: ArcSwap::from_pointee(Shown::new(active, metrics)),
            metrics: Arc::clone(metrics),
            workers,
            started: wall_clock(),
            draining,
            context: Arc::clone(context),
            file,
            reloads: Mutex::default(),
        }
    }

    /// Shows this configuration from now on.
    pub fn show(&self, active: &ActiveConfig) {
        self.active.store(Arc::new(Shown::new(active, &self.metrics)));
    }

    /// The latest reload.
    pub fn last_reload(&self) -> Option<ReloadResult> {
        self.reloads.lock().unwrap_or_else(PoisonError::into_inner).last.clone()
    }

    /// Records a reload.
    pub fn record_reload(&self, result: ReloadResult) {
        let mut reloads = self.reloads.lock().unwrap_or_else(PoisonError::into_inner);
        *if result.is_ok() { &mut reloads.ok } else { &mut reloads.failed } += 1;
        reloads.last = Some(result);
    }

    fn reload_status(&self) -> Value {
        let reloads = self.reloads.lock().unwrap_or_else(PoisonError::into_inner);
        json!({
            "file": self.file,
            "reloads": { "ok": reloads.ok, "failed": reloads.failed },
            "last_reload": reloads.last.as_ref().map(ReloadResult::status),
        })
    }
}

impl ListenerStatus {
    fn status(&self) -> Value {
        let mut status = json!({
            "name": self.name,
            "mode": self.mode,
            "connections": self.metrics.connections.get(),
            "bind": self.addresses.iter().map(ToString::to_string).collect::<Vec<_>>(),
            "upstream": self.upstream,
            "own_errors": self.metrics.own_errors.list(),
        });
        if let Some(flows) = &self.flows {
            status["flows"] = json!(flows.open());
        }
        let Some(tls) = &self.tls else { return status };
        let certificate = tls.certificate();
        let identities: Vec<Value> = self
            .identities
            .iter()
            .map(|slot| {
                let loaded = slot.certificate();
                json!({
                    "cert_file": slot.paths.cert_file,
                    "state": if loaded.is_some() { "loaded" } else { "awaited" },
                    "subject": loaded.as_ref().map(|info| info.subject.to_string()),
                    "serial": loaded.as_ref().map(|info| info.serial.clone()),
                    "not_after": loaded.as_ref().map(|info| Utc(info.not_after).seconds()),
                    "error": slot.error(),
                })
            })
            .collect();
        status["certificate"] = json!({
            "subject": certificate.info.subject.to_string(),
            "serial": certificate.info.serial,
            "not_after": Utc(certificate.info.not_after).seconds(),
        });
        status["identities"] = json!(identities);
        status["requests_in_flight"] = json!(self.metrics.in_flight.get());
        status["watches"] = json!(self.metrics.watches.get());
        status["tunnels"] = json!(self.metrics.tunnels.get());
        status
    }
}

/// The last result of each endpoint source. A failed source does not make the process unready: its
/// last endpoints stay in use.
fn source_checks(upstream: &Upstream) -> Vec<ReadinessCheck> {
    let now = wall_clock();
    let reports = upstream.sources.reports();
    let check = |(source, report): (&EndpointSource, &SourceReport)| {
        let state = match report.last_success {
            Some(at) => {
                format!("{}, {} s ago", counted(report.endpoints, "endpoint"), age(at, now))
            }
            None => "no answer yet".to_owned(),
        };
        let detail = match (report.complaint(), &report.note) {
            (Some(error), _) => format!("{state}; {error}"),
            (None, Some(note)) => format!("{state}; {note}"),
            (None, None) => state,
        };
        let ok = report.complaint().is_none() && report.last_success.is_some();
        ReadinessCheck { name: format!("source {}/{}", upstream.name, source.as_str()), ok, detail }
    };
    reports.iter().map(check).collect()
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
        let mut checks = Vec::new();
        let shown = self.active.load();
        for listener in &shown.listeners {
            let (bound, wanted) = (listener.addresses.len(), listener.wanted);
            checks.push(ReadinessCheck {
                name: format!("listener {}", listener.name),
                ok: bound > 0,
                detail: format!("{bound} of {wanted} addresses bound"),
            });
        }
        for upstream in &shown.upstreams {
            let endpoints = upstream.endpoints();
            let usable = endpoints.iter().filter(|e| e.is_usable()).count();
            let mut detail = format!("{usable} of {} endpoints usable", endpoints.len());
            for endpoint in endpoints.iter().filter(|e| !e.is_usable()).take(5) {
                detail = format!(
                    "{detail}; {} is {} ({})",
                    endpoint.label,
                    endpoint.state().as_str(),
                    endpoint.reason()
                );
            }
            checks.push(ReadinessCheck {
                name: format!("upstream {}", upstream.name),
                ok: usable > 0,
                detail,
            });
        }
        let ready = checks.iter().all(|check| check.ok);
        for listener in &shown.listeners {
            for slot in &listener.identities {
                if let Some(error) = slot.error() {
                    // The process stays ready: it serves tokens and other identities.
                    checks.push(ReadinessCheck {
                        name: format!("identity {}", slot.paths.cert_file.display()),
                        ok: false,
                        detail: error,
                    });
                }
            }
        }
        for upstream in &shown.upstreams {
            let token = upstream.credentials.probe_token();
            if let Some(error) = token.as_ref().and_then(|token| token.error()) {
                // The process stays ready: probes use the last valid token, or none.
                let name = format!("token for /readyz of {}", upstream.name);
                checks.push(ReadinessCheck { name, ok: false, detail: error });
            }
            checks.extend(source_checks(upstream));
        }
        for name in self.context.liveness.stalled() {
            let detail = "control loop stalled; its state may be stale".into();
            checks.push(ReadinessCheck { name, ok: false, detail });
        }
        let reloads = self.reloads.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(failed) = reloads.last.as_ref().filter(|last| !last.is_ok()) {
            // The process stays ready: the old configuration is valid and serves.
            let detail = format!("the old configuration stays: {}", failed.errors().join("; "));
            checks.push(ReadinessCheck { name: "configuration".into(), ok: false, detail });
        }
        drop(reloads);
        let draining = *self.draining.borrow();
        if draining {
            checks.push(ReadinessCheck {
                name: "shutdown".into(),
                ok: false,
                detail: "draining".into(),
            });
        }
        Readiness { ready: ready && !draining, checks }
    }

    fn status(&self) -> Value {
        let shown = self.active.load();
        let upstreams: Vec<Value> = shown
            .upstreams
            .iter()
            .map(|upstream| {
                let endpoints: Vec<_> =
                    upstream.endpoints().iter().map(|endpoint| endpoint.status()).collect();
                json!({
                    "name": *upstream.name,
                    "endpoints": endpoints,
                    "sources": upstream.sources.status(wall_clock()),
                })
            })
            .collect();
        let listeners: Vec<Value> = shown.listeners.iter().map(ListenerStatus::status).collect();
        json!({
            "version": build::VERSION,
            "commit": build::COMMIT,
            "node": admin::node_name(),
            "now": Utc(wall_clock()).seconds(),
            "started_at": Utc(self.started).seconds(),
            "draining": *self.draining.borrow(),
            "config": self.reload_status(),
            "listeners": listeners,
            "upstreams": upstreams,
            "events": self.metrics.events().last(EVENTS_IN_STATUS),
        })
    }

    fn events(&self) -> Value {
        json!({ "events": self.metrics.events().last(usize::MAX) })
    }

    fn history(&self) -> Value {
        let of = |upstream: &Arc<Upstream>| -> Vec<Value> {
            let endpoints = upstream.endpoints();
            endpoints
                .iter()
                .map(|endpoint| {
                    json!({
                        "upstream": *upstream.name,
                        "address": *endpoint.label,
                        "columns": endpoint.metrics.history().columns(),
                    })
                })
                .collect()
        };
        let endpoints: Vec<Value> = self.active.load().upstreams.iter().flat_map(of).collect();
        json!({ "step_s": STEP.as_secs(), "endpoints": endpoints })
    }

    fn config(&self) -> Value {
        self.active.load().config.to_json()
    }

    fn metrics(&self) -> String {
        self.metrics.render()
    }
}

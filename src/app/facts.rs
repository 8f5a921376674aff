//! What the admin endpoint may ask: gathered from the checks at the moment of the question.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use arc_swap::ArcSwap;
use serde_json::{Value, json};
use tokio::sync::watch;

use super::build::{Bound, Built, Plane};
use super::reload::Attempt;
use crate::admin::{self, Readiness, ReadinessCheck};
use crate::config::{self, Config};
use crate::control::discovery::SharedContext;
use crate::net::tls::serving::ServingTls;
use crate::observe::build;
use crate::observe::counted;
use crate::observe::history::STEP;
use crate::observe::utc::Utc;
use crate::observe::{ListenerMetrics, Liveness, Metrics, PassthroughMetrics};
use crate::upstream::Upstream;
use crate::upstream::credentials::IdentitySlot;
use crate::upstream::endpoint_sources::{EndpointSource, SourceReport, age};

/// Of the last events, so many stand in `/status` itself.
const EVENTS_IN_STATUS: usize = 8;

/// Answers the admin endpoint.
pub struct Facts {
    shown: ArcSwap<Shown>,
    metrics: Arc<Metrics>,
    workers: Vec<Liveness>,
    started: SystemTime,
    draining: watch::Receiver<bool>,
    around: Arc<SharedContext>,
    file: Option<PathBuf>,
    reloads: Mutex<Reloads>,
}

/// What serves now. Replaced whole by a reload.
struct Shown {
    config: Arc<Config>,
    upstreams: Vec<Arc<Upstream>>,
    listeners: Vec<ListenerFacts>,
}

/// What became of reloads.
#[derive(Default)]
struct Reloads {
    ok: u64,
    failed: u64,
    last: Option<Attempt>,
}

struct ListenerFacts {
    name: String,
    upstream: String,
    wanted: usize,
    addresses: Vec<SocketAddr>,
    mode: &'static str,
    /// The identities that it may use.
    slots: Vec<Arc<IdentitySlot>>,
    /// If it terminates TLS.
    tls: Option<Arc<ServingTls>>,
    /// If it passes connections through.
    flows: Option<Arc<PassthroughMetrics>>,
    metrics: Arc<ListenerMetrics>,
}

impl Shown {
    fn new(built: &Built, metrics: &Arc<Metrics>) -> Self {
        let of = |bound: &Bound| {
            let (tls, slots, flows) = match &bound.plane {
                Plane::Terminate { tls, slots, .. } => (Some(Arc::clone(tls)), slots.clone(), None),
                Plane::Passthrough { .. } => {
                    (None, Vec::new(), Some(metrics.passthrough(&bound.config.name)))
                }
            };
            ListenerFacts {
                name: bound.config.name.clone(),
                upstream: bound.config.upstream.clone(),
                wanted: bound.config.bind.len(),
                addresses: bound.addresses(),
                mode: bound.config.mode.as_str(),
                slots,
                tls,
                flows,
                metrics: Arc::clone(&bound.metrics),
            }
        };
        Self {
            config: Arc::clone(&built.config),
            upstreams: built.upstreams.clone(),
            listeners: built.listeners.iter().map(of).collect(),
        }
    }
}

impl Facts {
    /// Facts about these checks; `file` is where the configuration came from.
    pub fn new(
        built: &Built,
        metrics: &Arc<Metrics>,
        workers: Vec<Liveness>,
        draining: watch::Receiver<bool>,
        around: &Arc<SharedContext>,
        file: Option<PathBuf>,
    ) -> Self {
        Self {
            shown: ArcSwap::from_pointee(Shown::new(built, metrics)),
            metrics: Arc::clone(metrics),
            workers,
            started: SystemTime::now(),
            draining,
            around: Arc::clone(around),
            file,
            reloads: Mutex::default(),
        }
    }

    /// Shows these checks from now on.
    pub fn show(&self, built: &Built) {
        self.shown.store(Arc::new(Shown::new(built, &self.metrics)));
    }

    /// The latest reload.
    pub fn last_reload(&self) -> Option<Attempt> {
        self.reloads.lock().unwrap_or_else(PoisonError::into_inner).last.clone()
    }

    /// Notes a reload.
    pub fn reloaded(&self, attempt: Attempt) {
        let mut reloads = self.reloads.lock().unwrap_or_else(PoisonError::into_inner);
        *if attempt.is_ok() { &mut reloads.ok } else { &mut reloads.failed } += 1;
        reloads.last = Some(attempt);
    }

    fn reload_status(&self) -> Value {
        let reloads = self.reloads.lock().unwrap_or_else(PoisonError::into_inner);
        json!({
            "file": self.file,
            "reloads": { "ok": reloads.ok, "failed": reloads.failed },
            "last_reload": reloads.last.as_ref().map(Attempt::status),
        })
    }
}

impl ListenerFacts {
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
            .slots
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

/// What each source of endpoints last said. None is a reason to be unready: what was known stays.
fn sources_of(upstream: &Upstream) -> Vec<ReadinessCheck> {
    let now = SystemTime::now();
    let reports = upstream.sources.reports();
    let part = |(source, report): (&EndpointSource, &SourceReport)| {
        let said = match report.last_success {
            Some(at) => {
                format!("{}, {} s ago", counted(report.endpoints, "endpoint"), age(at, now))
            }
            None => "no answer yet".to_owned(),
        };
        let detail = match (report.complaint(), &report.note) {
            (Some(error), _) => format!("{said}; {error}"),
            (None, Some(note)) => format!("{said}; {note}"),
            (None, None) => said,
        };
        let ok = report.complaint().is_none() && report.last_success.is_some();
        ReadinessCheck { name: format!("source {}/{}", upstream.name, source.as_str()), ok, detail }
    };
    reports.iter().map(part).collect()
}

impl admin::StatusProvider for Facts {
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
        let shown = self.shown.load();
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
        let ready = checks.iter().all(|part| part.ok);
        for listener in &shown.listeners {
            for slot in &listener.slots {
                if let Some(error) = slot.error() {
                    // Not a reason to be unready: tokens and other identities are served.
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
                // Nor is this: what was good in it is still shown, or the question is anonymous.
                let name = format!("token for /readyz of {}", upstream.name);
                checks.push(ReadinessCheck { name, ok: false, detail: error });
            }
            checks.extend(sources_of(upstream));
        }
        for name in self.around.liveness.stalled() {
            let detail = "control loop stalled; its state may be stale".into();
            checks.push(ReadinessCheck { name, ok: false, detail });
        }
        let reloads = self.reloads.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(failed) = reloads.last.as_ref().filter(|last| !last.is_ok()) {
            // What runs is what was good, and serves.
            let detail = format!("the old one stays: {}", failed.errors().join("; "));
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
        let shown = self.shown.load();
        let upstreams: Vec<Value> = shown
            .upstreams
            .iter()
            .map(|upstream| {
                let endpoints: Vec<_> =
                    upstream.endpoints().iter().map(|endpoint| endpoint.status()).collect();
                json!({
                    "name": *upstream.name,
                    "endpoints": endpoints,
                    "sources": upstream.sources.status(SystemTime::now()),
                })
            })
            .collect();
        let listeners: Vec<Value> = shown.listeners.iter().map(ListenerFacts::status).collect();
        json!({
            "version": build::VERSION,
            "commit": build::COMMIT,
            "node": admin::node_name(),
            "now": Utc(SystemTime::now()).seconds(),
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
        let endpoints: Vec<Value> = self.shown.load().upstreams.iter().flat_map(of).collect();
        json!({ "step_s": STEP.as_secs(), "endpoints": endpoints })
    }

    fn config(&self) -> Value {
        config::effective(&self.shown.load().config)
    }

    fn metrics(&self) -> String {
        self.metrics.render()
    }
}

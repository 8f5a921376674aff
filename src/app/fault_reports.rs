//! Reports what clients notice of faults: outages ([`jackstay_core::outage::report`]), and errors of jackstay itself
//! ([`jackstay_core::error_report`]).

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use jackstay_core::error_report::{ErrorReport, OwnErrorCount};
use jackstay_core::outage::report::{Failures, OutageEvent, OutageReport, Usability};
use jackstay_sys::clock;
use tokio::task::spawn_local;
use tokio::time::{MissedTickBehavior, interval};

use super::active::ActiveConfig;
use super::listener::BoundListener;
use crate::observe::events::{Change, EventKind};
use crate::observe::own_errors::OwnError;
use crate::observe::quantity;
use crate::upstream::Upstream;

/// Interval of the checks.
const CHECK_INTERVAL: Duration = Duration::from_millis(250);
/// Number of endpoints that the line about an outage names.
const MAX_NAMED: usize = 5;

/// The reports on the upstreams and listeners of the active configuration.
#[derive(Default)]
pub struct FaultReports {
    upstreams: Vec<(Arc<Upstream>, OutageReport)>,
    listeners: Vec<(Arc<BoundListener>, ErrorReport)>,
}

impl FaultReports {
    /// Starts the task that writes the reports, within a `LocalSet`.
    pub fn start() -> Rc<RefCell<Self>> {
        let reports = Rc::<RefCell<Self>>::default();
        let checked = Rc::clone(&reports);
        spawn_local(async move {
            let mut ticks = interval(CHECK_INTERVAL);
            ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
            loop {
                ticks.tick().await;
                checked.borrow_mut().check(clock::now());
            }
        });
        reports
    }

    /// Reports on the upstreams and listeners of `active` from now on.
    pub fn show(&mut self, active: &ActiveConfig) {
        let mut known = std::mem::take(&mut self.upstreams);
        for upstream in &active.upstreams {
            let at = known.iter().position(|(known, _)| Arc::ptr_eq(known, upstream));
            let report = at.map(|at| known.swap_remove(at).1).unwrap_or_default();
            self.upstreams.push((Arc::clone(upstream), report));
        }
        for (removed, _) in known {
            removed.metrics.events().set_outage(&removed.name, false);
        }
        let mut known = std::mem::take(&mut self.listeners);
        for listener in &active.listeners {
            let at = known.iter().position(|(known, _)| known.name() == listener.name());
            let report = at.map(|at| known.swap_remove(at).1).unwrap_or_default();
            self.listeners.push((Arc::clone(listener), report));
        }
    }

    fn check(&mut self, now: Instant) {
        let Self { upstreams, listeners } = self;
        let mut outages = Vec::new();
        for (upstream, report) in upstreams {
            let of = || listeners.iter().filter(|(l, _)| Arc::ptr_eq(&l.upstream, upstream));
            let failures = failures(of().map(|(listener, _)| &**listener));
            let usability = upstream.usability();
            // Watches of a usable upstream do not wait.
            let held = match usability {
                Usability::Usable => 0,
                Usability::Untried | Usability::Unusable => upstream.waiting_watches(),
            };
            let event = report.observe(usability, failures, held, now);
            if report.is_unusable() || event.is_some() {
                outages.push(Arc::clone(upstream));
            }
            let l7 = of().any(|(listener, _)| listener.config.terminate().is_some());
            let l4 = of().any(|(listener, _)| listener.config.has_flows());
            match event {
                Some(OutageEvent::Began) => write_began(upstream, (l7, l4)),
                Some(OutageEvent::Ended { lasted, failures, held }) => {
                    write_ended(upstream, lasted, (failures, held), (l7, l4));
                }
                None => {}
            }
        }
        for (listener, report) in listeners {
            let outage = outages.iter().any(|upstream| Arc::ptr_eq(upstream, &listener.upstream));
            let counts: Vec<_> = listener.metrics.own_errors.list().iter().map(count).collect();
            let errors = report.observe(&counts, outage, now);
            if !errors.is_empty() {
                tracing::warn!(
                    listener = listener.name(),
                    errors = errors.join(", "),
                    "requests failed with errors of jackstay itself"
                );
            }
        }
    }
}

fn count(error: &OwnError) -> OwnErrorCount {
    OwnErrorCount { code: error.code, reason: error.reason, count: error.count }
}

fn failures<'a>(listeners: impl Iterator<Item = &'a BoundListener>) -> Failures {
    let mut failures = Failures::default();
    for error in listeners.flat_map(|listener| listener.metrics.own_errors.list()) {
        match error.code {
            Some(503) => failures.rejected += error.count,
            None => failures.resets += error.count,
            Some(_) => {}
        }
    }
    failures
}

fn write_began(upstream: &Upstream, (l7, l4): (bool, bool)) {
    let name = &*upstream.name;
    let held = format!("{} held", quantity(upstream.waiting_watches(), "watch"));
    let effect = match (l7, l4) {
        (true, true) if upstream.forwards_flows() => {
            format!("requests get 503, {held}, flows are forwarded")
        }
        (true, true) => format!("requests get 503, {held}, connections are reset"),
        (false, true) => "connections are reset".to_owned(),
        _ => format!("requests get 503, {held}"),
    };
    let endpoints = match upstream.unusable_endpoints(MAX_NAMED) {
        none if none.is_empty() => "none is known".to_owned(),
        endpoints => endpoints,
    };
    tracing::error!(endpoints, "upstream {name}: no usable endpoint, {effect}");
    upstream.metrics.events().set_outage(name, true);
    remember(upstream, ("usable", "unusable"), &endpoints, &effect);
}

fn write_ended(
    upstream: &Upstream,
    lasted: Duration,
    (failures, held): (Failures, usize),
    (l7, l4): (bool, bool),
) {
    let name = &*upstream.name;
    let lasted = format!("{} s", lasted.as_secs_f64().round().max(1.0));
    let mut effects = Vec::new();
    if l7 || !l4 {
        let rejected = quantity(failures.rejected, "request");
        effects.push(format!("{rejected} got 503, {} held", quantity(held, "watch")));
    }
    if l4 || failures.resets > 0 {
        effects.push(format!("{} reset", quantity(failures.resets, "connection")));
    }
    let effect = effects.join(", ");
    upstream.metrics.events().set_outage(name, false);
    // The line of the outage covered these, and they have none of their own.
    let still = upstream.unusable_endpoints(MAX_NAMED);
    let unusable = (!still.is_empty()).then_some(still);
    tracing::warn!(unusable, "upstream {name}: usable again after {lasted}; meanwhile {effect}");
    remember(upstream, ("unusable", "usable"), &format!("after {lasted}"), &effect);
}

fn remember(upstream: &Upstream, (from, to): (&str, &str), reason: &str, effect: &str) {
    upstream.metrics.events().remember(&Change {
        kind: EventKind::Upstream,
        upstream: Some(&upstream.name),
        name: &upstream.name,
        detail: "",
        from,
        to,
        reason,
        effect,
        bad: to == "unusable",
    });
}

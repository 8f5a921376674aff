//! Reports what clients notice of faults: outages of upstreams, and errors that jackstay itself returns.
//!
//! | condition | line |
//! |---|---|
//! | no endpoint of an upstream is usable for [`OUTAGE_AFTER`] | one error |
//! | an endpoint is usable again for [`OUTAGE_AFTER`] | one warning, with the number of failed requests |
//! | own 5xx errors or resets, and no outage of the listener's upstream within [`COLLECT`] | a warning, with their number; the next one [`ERRORS_EVERY`] later |
//!
//! [`OutageReport`] and [`ErrorReport`] read no clock.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use jackstay_sys::clock;
use tokio::task::spawn_local;
use tokio::time::{MissedTickBehavior, interval};

use super::active::ActiveConfig;
use super::listener::BoundListener;
use crate::observe::events::{Change, EventKind};
use crate::observe::own_errors::OwnError;
use crate::observe::quantity;
use crate::upstream::{Upstream, Usability};

/// Interval of the checks.
const CHECK_INTERVAL: Duration = Duration::from_millis(250);
/// How long no endpoint is usable before this is an outage, and one is usable before the outage is over. With
/// [`CHECK_INTERVAL`], an outage of a second is reported.
const OUTAGE_AFTER: Duration = Duration::from_millis(750);
/// How long own errors are collected before their line. The first requests of an outage fail before it is known
/// that no endpoint is usable: when every process is stopped, 0.7 s.
const COLLECT: Duration = Duration::from_millis(1_500);
/// Time between two lines about the own errors of a listener.
const ERRORS_EVERY: Duration = Duration::from_secs(30);
/// Number of endpoints that the line about an outage names.
const MAX_NAMED: usize = 5;

/// Numbers of requests that failed because no endpoint was reached.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Failures {
    /// Responses with status 503.
    rejected: u64,
    /// Connections (L4) that were reset.
    resets: u64,
}

/// What the log says of an outage.
#[derive(Debug, PartialEq, Eq)]
enum OutageEvent {
    Began,
    Ended { lasted: Duration, failures: Failures, held: usize },
}

/// The outage of one upstream, if there is one.
#[derive(Debug, Default)]
struct OutageReport {
    /// An endpoint has been usable.
    was_usable: bool,
    /// The failures at the last check.
    latest: Failures,
    /// When requests began to fail, the failures before that, and when the latest one was seen.
    failing: Option<(Instant, Failures, Instant)>,
    /// Since when none is usable.
    unusable_since: Option<Instant>,
    /// When requests began to fail, or no endpoint was usable.
    began: Option<Instant>,
    /// Since when one is usable again, during an outage.
    usable_since: Option<Instant>,
    /// The error was written.
    reported: bool,
    /// The failures before it.
    before: Failures,
    /// The largest number of watches that were held at once.
    held: usize,
}

impl OutageReport {
    fn observe(
        &mut self,
        usability: Usability,
        failures: Failures,
        held: usize,
        now: Instant,
    ) -> Option<OutageEvent> {
        let usable = match usability {
            Usability::Usable => true,
            Usability::Unusable => false,
            Usability::Untried => !self.was_usable,
        };
        self.was_usable |= usability == Usability::Usable;
        let before = std::mem::replace(&mut self.latest, failures);
        if usable && !self.reported {
            (self.unusable_since, self.began, self.held) = (None, None, 0);
            if failures != before {
                self.failing.get_or_insert((now, before, now)).2 = now;
            }
            self.failing = self.failing.filter(|(.., latest)| now < *latest + COLLECT);
            return None;
        }
        let since = *self.unusable_since.get_or_insert(now);
        let began = *self.began.get_or_insert_with(|| {
            let (began, before, _) = self.failing.take().unwrap_or((now, before, now));
            self.before = before;
            began
        });
        self.held = self.held.max(held);
        if !usable {
            self.usable_since = None;
            if self.reported || now < since + OUTAGE_AFTER {
                return None;
            }
            self.reported = true;
            return Some(OutageEvent::Began);
        }
        let usable_since = *self.usable_since.get_or_insert(now);
        if now < usable_since + OUTAGE_AFTER {
            return None;
        }
        let Failures { rejected, resets } = self.before;
        let ended = OutageEvent::Ended {
            lasted: usable_since.saturating_duration_since(began),
            failures: Failures {
                rejected: failures.rejected.saturating_sub(rejected),
                resets: failures.resets.saturating_sub(resets),
            },
            held: self.held,
        };
        *self = Self { was_usable: true, latest: failures, ..Self::default() };
        Some(ended)
    }

    /// Whether no endpoint is usable, or was during the outage that is reported.
    fn is_unusable(&self) -> bool {
        self.unusable_since.is_some()
    }
}

/// The own errors of one listener that were reported.
#[derive(Debug, Default)]
struct ErrorReport {
    reported: BTreeMap<(Option<u16>, &'static str), u64>,
    /// When the first error was seen that is not reported.
    first: Option<Instant>,
    last: Option<Instant>,
}

impl ErrorReport {
    /// Returns the errors to report now, with their number since the last report. Those of an outage are part
    /// of its lines.
    fn observe(&mut self, errors: &[OwnError], outage: bool, now: Instant) -> Vec<String> {
        let server_errors = || errors.iter().filter(|e| e.code.is_none_or(|code| code >= 500));
        let reported = |e: &OwnError| self.reported.get(&(e.code, e.reason)).copied().unwrap_or(0);
        let new = |error: &OwnError| error.count.saturating_sub(reported(error));
        if server_errors().all(|error| new(error) == 0) {
            return Vec::new();
        }
        let first = *self.first.get_or_insert(now);
        let paused = self.last.is_some_and(|last| now < last + ERRORS_EVERY);
        let texts = if outage {
            Vec::new()
        } else if paused || now < first + COLLECT {
            return Vec::new();
        } else {
            self.last = Some(now);
            let text = |error: &OwnError| {
                let what = error.code.map_or("reset".to_owned(), |code| code.to_string());
                format!("{} {what} {}", quantity(new(error), "time"), error.reason)
            };
            server_errors().filter(|error| new(error) > 0).map(text).collect()
        };
        self.first = None;
        self.reported = server_errors().map(|e| ((e.code, e.reason), e.count)).collect();
        texts
    }
}

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
            let errors = report.observe(&listener.metrics.own_errors.list(), outage, now);
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

#[cfg(test)]
mod tests {
    use super::*;
    use OutageEvent::{Began, Ended};
    use Usability::{Untried, Unusable, Usable};

    /// Observes each usability from the given time in milliseconds until the next one, in steps of
    /// [`CHECK_INTERVAL`]. Returns the events, with their times.
    fn events(steps: &[(u64, Usability)]) -> Vec<(u64, OutageEvent)> {
        let (mut report, start) = (OutageReport::default(), clock::now());
        let (mut events, mut rejected) = (Vec::new(), 0);
        for ms in (0..steps.last().unwrap().0).step_by(250) {
            let usability = steps.iter().rev().find(|(from, _)| ms >= *from).unwrap().1;
            let held = if usability == Usable { 0 } else { 20 };
            rejected += u64::from(usability != Usable);
            let failures = Failures { rejected, resets: 0 };
            let now = start + Duration::from_millis(ms);
            events.extend(report.observe(usability, failures, held, now).map(|event| (ms, event)));
        }
        events
    }

    fn ended(ms: u64, rejected: u64) -> OutageEvent {
        let failures = Failures { rejected, resets: 0 };
        Ended { lasted: Duration::from_millis(ms), failures, held: 20 }
    }

    #[test]
    fn outage_has_one_error_and_one_end_and_a_short_one_has_none() {
        for (steps, expected) in [
            (vec![(0, Usable), (1_000, Unusable), (1_500, Usable), (9_000, Usable)], vec![]),
            (
                vec![(0, Usable), (1_000, Unusable), (2_000, Usable), (9_000, Usable)],
                vec![(1_750, Began), (2_750, ended(1_000, 4))],
            ),
            // It is usable for a moment in between, as while the first apiserver starts.
            (
                vec![
                    (0, Usable),
                    (1_000, Unusable),
                    (20_000, Usable),
                    (20_500, Unusable),
                    (26_000, Usable),
                    (40_000, Usable),
                ],
                vec![(1_750, Began), (26_750, ended(25_000, 98))],
            ),
            // At start, before the first attempts have failed.
            (vec![(0, Untried), (60_000, Usable)], vec![]),
            (vec![(0, Untried), (3_000, Unusable), (9_000, Usable)], vec![(3_750, Began)]),
            // Connections were lost, and new ones are tried.
            (vec![(0, Usable), (1_000, Untried), (9_000, Usable)], vec![(1_750, Began)]),
        ] {
            assert_eq!(events(&steps), expected, "{steps:?}");
        }
    }

    #[test]
    fn outage_begins_with_the_first_failure_before_it() {
        let (mut report, start) = (OutageReport::default(), clock::now());
        let mut events = Vec::new();
        // Requests fail from 3 s, as when every process is stopped. One that failed at 1 s has another reason.
        for ms in (0..12_000).step_by(250) {
            let rejected = u64::from(ms >= 1_000) + u64::from(ms >= 3_000) * (ms / 250);
            let usability = if (4_000..9_000).contains(&ms) { Unusable } else { Usable };
            let now = start + Duration::from_millis(ms);
            let failures = Failures { rejected: rejected.min(30), resets: 0 };
            events.extend(report.observe(usability, failures, 20, now).map(|event| (ms, event)));
        }
        assert_eq!(events, [(4_750, Began), (9_750, ended(6_000, 29))]);
    }

    #[test]
    fn own_errors_are_summarised_and_those_of_an_outage_are_not_repeated() {
        let (mut report, start) = (ErrorReport::default(), clock::now());
        let at = |s| start + Duration::from_secs(s);
        let error = |code, reason, count| OwnError { code, reason, count, last: String::new() };
        let errors = |n| [error(Some(503), "no_upstream", n), error(Some(401), "unauthorized", 9)];
        assert_eq!(report.observe(&errors(2), false, at(0)), [""; 0], "still collecting");
        assert_eq!(report.observe(&errors(3), false, at(2)), ["3 times 503 no_upstream"]);
        assert_eq!(report.observe(&errors(50), false, at(29)), [""; 0]);
        assert_eq!(report.observe(&errors(60), false, at(32)), ["57 times 503 no_upstream"]);
        assert_eq!(report.observe(&errors(65), false, at(69)), [""; 0]);
        assert_eq!(report.observe(&errors(900), true, at(70)), [""; 0]);
        assert_eq!(report.observe(&errors(900), false, at(110)), [""; 0]);
        let reset = [error(None, "unreachable", 2)];
        assert_eq!(report.observe(&reset, false, at(120)), [""; 0]);
        assert_eq!(report.observe(&reset, false, at(122)), ["2 times reset unreachable"]);
    }
}

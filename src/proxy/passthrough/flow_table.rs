//! The flows of one worker, and the one task that checks all of them.
//!
//! Ten thousand timers would cost more than ten thousand idle flows. So the times of the next checks
//! are kept in one array, which the task scans every 50 ms. A check reads `TCP_INFO`, about once a
//! second for an idle flow.
//!
//! The table ends a flow when
//!
//! * its endpoint or client does not respond ([`flow_health`]),
//! * its endpoint is dead, which ends all flows of the endpoint,
//! * its endpoint was removed and `leave_timeout` has passed,
//! * `handshake_timeout`, `idle_timeout` or the drain timeout has passed,
//! * rebalancing has chosen it.
//!
//! The table then wakes the task of the flow, which resets both sides. If a time limit applies to many flows,
//! their ends are spread over its last part, so that their clients do not all reconnect at once.

use std::cell::RefCell;
use std::io;
use std::os::fd::RawFd;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Context;
use std::time::{Duration, Instant};

use jackstay_core::flow_health;
use jackstay_core::flow_health::{CorrelatedLoss, FlowThresholds, LossyPath};
use jackstay_sys::clock;
use slab::Slab;
use tokio::sync::Notify;
use tokio::time::sleep;

use super::super::admission::listener_admission::WARNING_INTERVAL;
use super::flow_entry::{
    CLIENT_RESET, ENDPOINT_DEAD, ENDPOINT_LEFT, EndReason, FlowEntry, Progress, REBALANCE,
    SHUTDOWN, end_after,
};
use super::routing::ListenerRouting;
use crate::observe::RateLimitedWarnings;
use crate::observe::events::Severity;
use crate::upstream::Upstream;
use crate::upstream::endpoint::{Endpoint, EndpointState};
use crate::upstream::rebalance::{RebalanceSchedule, load_of};

/// Interval of the scans of the array.
const SCAN_INTERVAL: Duration = Duration::from_millis(50);
/// The check time of a free slot, and of a flow that was ended.
const NEVER: u64 = u64::MAX;
/// Rebalancing ends only flows on which no bytes were written for this time.
const MIN_IDLE: Duration = Duration::from_secs(2);

/// The flows of one worker.
pub struct FlowTable {
    start: Instant,
    slots: RefCell<Slots>,
    /// Notified when a flow is inserted.
    occupied: Notify,
    warnings: RateLimitedWarnings,
    rebalancing: RefCell<RebalanceSchedule>,
}

#[derive(Default)]
struct Slots {
    flows: Slab<FlowEntry>,
    /// The time of the next check of the flow with the same key, in milliseconds since [`FlowTable::start`]. A `u32`
    /// would overflow after 49.7 days.
    checks: Vec<u64>,
    endpoints: Vec<EndpointFlows>,
}

/// The flows of one endpoint.
struct EndpointFlows {
    endpoint: Arc<Endpoint>,
    /// The death count of the endpoint at the last check.
    deaths: u64,
    /// When the table noticed that the endpoint was removed.
    leaving_since: Option<Instant>,
    flows: usize,
    correlated_loss: CorrelatedLoss,
    lossy_path: LossyPath,
}

impl FlowTable {
    /// Creates an empty table. The caller spawns [`Self::run`].
    pub fn new() -> Rc<Self> {
        Rc::new(Self {
            start: clock::now(),
            slots: RefCell::default(),
            occupied: Notify::new(),
            warnings: RateLimitedWarnings::new(WARNING_INTERVAL),
            rebalancing: RefCell::new(RebalanceSchedule::new(clock::now(), fastrand::Rng::new())),
        })
    }

    /// Checks the flows periodically until the task is dropped.
    pub async fn run(self: Rc<Self>) {
        loop {
            if self.is_empty() {
                self.occupied.notified().await;
            }
            sleep(SCAN_INTERVAL).await;
            let now = clock::now();
            self.adopt_returned_endpoints(now);
            self.check_endpoints(now);
            self.rebalance(now);
            self.check_flows(now);
        }
    }

    /// Inserts a flow between these sockets, of the client and of the endpoint. Dropping the handle removes
    /// it, which must happen before the sockets are closed.
    pub fn insert(
        self: &Rc<Self>,
        routing: &Rc<ListenerRouting>,
        upstream: &Arc<Upstream>,
        endpoint: &Arc<Endpoint>,
        sockets: (RawFd, RawFd),
    ) -> FlowHandle {
        let now = clock::now();
        let mut slots = self.slots.borrow_mut();
        match slots.endpoints.iter_mut().find(|entry| entry.is_of(endpoint)) {
            Some(entry) => entry.flows += 1,
            None => slots.endpoints.push(EndpointFlows::new(endpoint, 1, now)),
        }
        let flow = FlowEntry::new(routing, upstream, endpoint, sockets, now);
        let key = slots.flows.insert(flow);
        if key == slots.checks.len() {
            slots.checks.push(NEVER);
        }
        slots.checks[key] = self.millis(now);
        self.occupied.notify_one();
        FlowHandle { table: Rc::clone(self), key }
    }

    /// Whether the table is empty.
    pub fn is_empty(&self) -> bool {
        self.slots.borrow().flows.is_empty()
    }

    /// Ends the flows of a listener that are due when a drain with this timeout has lasted for `elapsed`; all
    /// of them once the timeout has passed.
    pub fn end_due(&self, routing: &Rc<ListenerRouting>, elapsed: Duration, timeout: Duration) {
        if elapsed < end_after(1.0, timeout) {
            return;
        }
        let Slots { checks, flows, .. } = &mut *self.slots.borrow_mut();
        for (key, flow) in flows.iter_mut().filter(|(_, flow)| flow.is_open()) {
            if Rc::ptr_eq(flow.routing(), routing) && elapsed >= flow.end_after(timeout) {
                self.end(&mut checks[key], flow, SHUTDOWN);
            }
        }
    }

    /// Gives the flows of removed endpoints whose address is in the set again to the endpoint that has it now: an address
    /// that is missing in one answer of a source, or while a member rejoins, ends no flow.
    fn adopt_returned_endpoints(&self, now: Instant) {
        let Slots { flows, endpoints, .. } = &mut *self.slots.borrow_mut();
        let is_leaving = |entry: &&EndpointFlows| entry.endpoint.state() == EndpointState::Leaving;
        let leaving: Vec<Arc<Endpoint>> =
            endpoints.iter().filter(is_leaving).map(|entry| Arc::clone(&entry.endpoint)).collect();
        for left in leaving {
            let is_of_left = |flow: &FlowEntry| Arc::ptr_eq(flow.endpoint(), &left);
            let of_left = flows.iter().find(|(_, flow)| is_of_left(flow));
            let returned = of_left.and_then(|(_, flow)| flow.upstream().endpoint_like(&left));
            let Some(returned) = returned else { continue };
            let count = flows.iter().filter(|(_, flow)| is_of_left(flow)).count();
            let old = endpoints.iter().find(|entry| entry.is_of(&left));
            let lossy_path = old.map(|entry| entry.lossy_path);
            endpoints.retain(|entry| !entry.is_of(&left));
            let at = endpoints.iter().position(|entry| entry.is_of(&returned));
            let at = at.unwrap_or_else(|| {
                endpoints.push(EndpointFlows::new(&returned, 0, now));
                endpoints.len() - 1
            });
            if let Some(lossy_path) = lossy_path {
                endpoints[at].lossy_path = endpoints[at].lossy_path.merge(lossy_path);
            }
            endpoints[at].flows += count;
            for (_, flow) in flows.iter_mut().filter(|(_, flow)| is_of_left(flow)) {
                endpoints[at].correlated_loss.record_change(false, flow.is_stalled());
                flow.adopt(&returned);
            }
        }
    }

    /// Ends the flows of dead endpoints, and the flows of removed endpoints that are due.
    fn check_endpoints(&self, now: Instant) {
        let Slots { checks, flows, endpoints } = &mut *self.slots.borrow_mut();
        for entry in endpoints {
            let deaths = entry.endpoint.deaths();
            let died = std::mem::replace(&mut entry.deaths, deaths) != deaths;
            if entry.endpoint.state() == EndpointState::Leaving {
                entry.leaving_since.get_or_insert(now);
            }
            if !died && entry.leaving_since.is_none() {
                continue;
            }
            let leaving = entry.leaving_since.map(|since| now.saturating_duration_since(since));
            let open = flows.iter_mut().filter(|(_, flow)| flow.is_open());
            for (key, flow) in open.filter(|(_, flow)| entry.is_of(flow.endpoint())) {
                if flow.has_endpoint_died(deaths) {
                    self.end(&mut checks[key], flow, ENDPOINT_DEAD);
                } else if leaving.is_some_and(|leaving| leaving >= flow.leave_after()) {
                    self.end(&mut checks[key], flow, ENDPOINT_LEFT);
                }
            }
        }
    }

    /// Ends idle flows of endpoints that have too many, those that have been idle longest first. Their
    /// clients reconnect and reach an endpoint that has fewer, for example one that has recovered.
    ///
    /// A flow cannot be moved, only reset, and requests on it then fail. So only flows of listeners with
    /// `rebalance: true` are ended, and slowly: 2 % of the surplus each second, as for watches.
    fn rebalance(&self, now: Instant) {
        let mut schedule = self.rebalancing.borrow_mut();
        let Some(elapsed) = schedule.begin_round(now) else { return };
        let Slots { checks, flows, .. } = &mut *self.slots.borrow_mut();
        let mut upstreams: Vec<Arc<Upstream>> = Vec::new();
        for (_, flow) in flows.iter().filter(|(_, flow)| flow.is_movable()) {
            if !upstreams.iter().any(|known| Arc::ptr_eq(known, flow.upstream())) {
                upstreams.push(Arc::clone(flow.upstream()));
            }
        }
        for upstream in upstreams {
            let count = |endpoint: &Arc<Endpoint>| {
                let movable = flows.iter().filter(|(_, flow)| flow.is_movable());
                movable.filter(|(_, flow)| Arc::ptr_eq(flow.endpoint(), endpoint)).count()
            };
            let surplus = surplus(&mut schedule, &upstream, count, elapsed, now);
            let Some((from, count)) = surplus else { continue };
            let mut idle: Vec<_> = flows
                .iter_mut()
                .filter(|(_, flow)| {
                    flow.is_movable()
                        && Arc::ptr_eq(flow.endpoint(), &from)
                        && now.saturating_duration_since(flow.last_progress()) >= MIN_IDLE
                })
                .collect();
            idle.sort_by_key(|(_, flow)| flow.last_progress());
            for (key, flow) in idle.into_iter().take(count) {
                self.end(&mut checks[key], flow, REBALANCE);
            }
        }
    }

    /// Checks the flows that are due.
    fn check_flows(&self, now: Instant) {
        let now_millis = self.millis(now);
        let Slots { checks, flows, endpoints } = &mut *self.slots.borrow_mut();
        for (key, check) in checks.iter_mut().enumerate().filter(|(_, check)| **check <= now_millis)
        {
            let Some(flow) = flows.get_mut(key) else { continue };
            let entry = endpoints.iter_mut().find(|entry| entry.is_of(flow.endpoint()));
            let Some(entry) = entry else { continue };
            let thresholds = entry.thresholds(now);
            let was_stalled = flow.is_stalled();
            let result = flow.check(thresholds, now);
            entry.correlated_loss.record_change(was_stalled, flow.is_stalled());
            if flow.take_refuted_suspicion() {
                entry.lossy_path.record_refuted();
            }
            match result {
                Ok(next) => *check = self.millis(next).max(now_millis + 1),
                Err(reason) => self.end(check, flow, reason),
            }
        }
    }

    fn end(&self, check: &mut u64, flow: &mut FlowEntry, reason: EndReason) {
        *check = NEVER;
        flow.end(reason);
        if reason == CLIENT_RESET {
            // Clients reset flows in normal operation.
            return;
        }
        if let Some(severity) = reason.fault() {
            return flow.report_loss(reason.description, severity);
        }
        let line = format!(
            "flow ended, listener {}, endpoint {}: {}",
            flow.routing().name(),
            flow.endpoint().label,
            reason.description
        );
        self.warnings.warn(&line, "the client is reset");
    }

    /// A time as stored in [`Slots::checks`].
    fn millis(&self, at: Instant) -> u64 {
        at.saturating_duration_since(self.start).as_millis() as u64
    }
}

impl EndpointFlows {
    /// The entry of an endpoint with this number of flows.
    fn new(endpoint: &Arc<Endpoint>, flows: usize, now: Instant) -> Self {
        Self {
            endpoint: Arc::clone(endpoint),
            deaths: endpoint.deaths(),
            leaving_since: None,
            flows,
            correlated_loss: CorrelatedLoss::default(),
            lossy_path: LossyPath::new(now),
        }
    }

    /// The thresholds for the endpoint's side of its flows.
    fn thresholds(&mut self, now: Instant) -> &'static FlowThresholds {
        if self.correlated_loss.is_path_broken(self.flows, now) {
            &flow_health::CORRELATED_LOSS_SERVER
        } else if self.lossy_path.is_lossy(now) {
            &flow_health::LOSSY_SERVER
        } else {
            &flow_health::SERVER
        }
    }

    fn is_of(&self, endpoint: &Arc<Endpoint>) -> bool {
        Arc::ptr_eq(&self.endpoint, endpoint)
    }
}

/// The endpoint that has too many flows, and the number of its flows to end. `count` returns the number of
/// flows of an endpoint; `elapsed` is the time since the last round.
pub fn surplus(
    schedule: &mut RebalanceSchedule,
    upstream: &Upstream,
    count: impl Fn(&Arc<Endpoint>) -> usize,
    elapsed: Duration,
    now: Instant,
) -> Option<(Arc<Endpoint>, usize)> {
    let endpoints = upstream.endpoints();
    let (settled, loads): (Vec<_>, Vec<_>) = endpoints
        .iter()
        .filter_map(|endpoint| Some((endpoint, load_of(endpoint, count(endpoint), now)?)))
        .unzip();
    if settled.len() < 2 {
        return None;
    }
    let found = schedule.decide(&loads, elapsed)?;
    Some((Arc::clone(settled[found.from]), found.count))
}

/// A flow in the table. Dropping it removes the flow.
pub struct FlowHandle {
    table: Rc<FlowTable>,
    key: usize,
}

impl FlowHandle {
    /// The reason for which the flow was ended. `None` if it is open; the first task that has polled is then
    /// woken at the end.
    pub fn poll_end(&self, cx: &Context<'_>) -> Option<EndReason> {
        self.table.slots.borrow_mut().flows[self.key].poll_end(cx.waker())
    }

    /// Reports that the endpoint's socket has failed while the client used the flow.
    pub fn report_failure(&self, error: &io::Error) {
        let flow = &self.table.slots.borrow().flows[self.key];
        flow.report_loss(&format!("connection failed: {error}"), Severity::Fault);
    }

    /// Reports the orderly end of the flow, if the endpoint has begun it.
    pub fn report_end(&self) {
        self.table.slots.borrow().flows[self.key].report_end();
    }

    /// Records that the endpoint's end of stream was passed on to the client.
    pub fn record_endpoint_end(&self) {
        self.table.slots.borrow_mut().flows[self.key].record_endpoint_end();
    }

    /// Records written bytes. Returns the bound of the bytes in flight to the endpoint, if there is one.
    pub fn record(&self, progress: Progress) -> Option<u32> {
        let Slots { checks, flows, .. } = &mut *self.table.slots.borrow_mut();
        let flow = &mut flows[self.key];
        if let Some(check) = flow.record(progress, clock::now()) {
            let next = &mut checks[self.key];
            *next = self.table.millis(check).min(*next);
        }
        flow.send_bound()
    }
}

impl Drop for FlowHandle {
    fn drop(&mut self) {
        let Slots { checks, flows, endpoints } = &mut *self.table.slots.borrow_mut();
        checks[self.key] = NEVER;
        let flow = flows.remove(self.key);
        if let Some(at) = endpoints.iter().position(|entry| entry.is_of(flow.endpoint())) {
            endpoints[at].flows -= 1;
            endpoints[at].correlated_loss.record_change(flow.is_stalled(), false);
            if endpoints[at].flows == 0 {
                endpoints.swap_remove(at);
            }
        }
    }
}

#[cfg(test)]
#[path = "flow_table_tests.rs"]
pub(super) mod tests;

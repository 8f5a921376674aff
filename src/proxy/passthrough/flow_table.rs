//! The flows of one worker, and the one task that checks all of them.
//!
//! Ten thousand timers would cost more than ten thousand idle flows. So the times of the next checks
//! are kept in one array, which the task scans every 50 ms. A check reads `TCP_INFO`, about once a
//! second for an idle flow.
//!
//! A flow is ended here when
//!
//! * its endpoint or client does not respond ([`flow_health`]),
//! * its endpoint is dead: then all flows of the endpoint are,
//! * its endpoint was removed and `leave_timeout` has passed,
//! * a configured timeout has passed, rebalancing has chosen it, or the drain has.
//!
//! The task of the flow is woken and resets both sides. Where a time limit ends for many flows, each
//! has a moment of its own in the last fifth of it, so that their clients do not all reconnect at
//! once.

use std::cell::{Cell, RefCell};
use std::os::fd::RawFd;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Context;
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{Instant, sleep};

use super::super::accept::WARNING_INTERVAL;
use super::end_reason::{
    CLIENT_RESET, ENDPOINT_DEAD, ENDPOINT_LEFT, EndReason, REBALANCE, SHUTDOWN,
};
use super::flow_entry::{FlowEntry, Progress, end_time};
use super::rebalance::{self, IDLE_FOR};
use super::routing::ListenerRouting;
use crate::observe::RateLimitedWarnings;
use crate::upstream::Upstream;
use crate::upstream::endpoint::{Endpoint, EndpointState};
use crate::upstream::flow_health::{self, CorrelatedLoss, FlowThresholds};
use crate::upstream::rebalance::RebalanceSchedule;

/// How often the array is scanned.
const TICK: Duration = Duration::from_millis(50);
/// How long refuted suspicions count in full; for as long again they count half.
const REFUTED_FOR: Duration = Duration::from_secs(60);
/// The check time of a free slot, and of a flow that was ended.
const NEVER: u32 = u32::MAX;

/// The flows of one worker.
pub struct FlowTable {
    start: Instant,
    slots: RefCell<Slots>,
    /// Notified when a flow is inserted.
    occupied: Notify,
    /// About flows that are ended.
    warnings: RateLimitedWarnings,
    rebalancing: RefCell<RebalanceSchedule>,
    refuted: Cell<RefutedSuspicions>,
}

/// How many suspicions an answer has refuted lately: they show that packets are being lost.
#[derive(Debug, Clone, Copy)]
struct RefutedSuspicions {
    count: u32,
    since: Instant,
}

#[derive(Default)]
struct Slots {
    /// When to check the flow of each slot, in milliseconds since the start of the table.
    checks: Vec<u32>,
    flows: Vec<Option<FlowEntry>>,
    free: Vec<u32>,
    endpoints: Vec<EndpointFlows>,
}

/// An endpoint that has flows.
struct EndpointFlows {
    endpoint: Arc<Endpoint>,
    deaths: u64,
    /// When the endpoint was seen to be removed.
    leaving_since: Option<Instant>,
    flows: usize,
    correlated_loss: CorrelatedLoss,
}

impl FlowTable {
    /// An empty table. The caller spawns [`Self::run`].
    pub fn new() -> Rc<Self> {
        Rc::new(Self {
            start: Instant::now(),
            slots: RefCell::default(),
            occupied: Notify::new(),
            warnings: RateLimitedWarnings::new(WARNING_INTERVAL),
            rebalancing: RefCell::new(RebalanceSchedule::new(Instant::now())),
            refuted: Cell::new(RefutedSuspicions { count: 0, since: Instant::now() }),
        })
    }

    /// Checks the flows for ever.
    pub async fn run(self: Rc<Self>) {
        loop {
            if self.is_empty() {
                self.occupied.notified().await;
            }
            sleep(TICK).await;
            let now = Instant::now();
            self.check_endpoints(now);
            self.rebalance(now);
            self.check_flows(now);
        }
    }

    /// Inserts a flow. It stays until the handle is dropped, which must happen before its sockets are
    /// closed.
    pub fn insert(
        self: &Rc<Self>,
        routing: &Rc<ListenerRouting>,
        upstream: &Arc<Upstream>,
        endpoint: &Arc<Endpoint>,
        descriptors: (RawFd, RawFd),
    ) -> FlowHandle {
        let now = Instant::now();
        let mut slots = self.slots.borrow_mut();
        match slots.endpoints.iter_mut().find(|known| Arc::ptr_eq(&known.endpoint, endpoint)) {
            Some(known) => known.flows += 1,
            None => slots.endpoints.push(EndpointFlows {
                endpoint: Arc::clone(endpoint),
                deaths: endpoint.deaths(),
                leaving_since: None,
                flows: 1,
                correlated_loss: CorrelatedLoss::default(),
            }),
        }
        let flow = FlowEntry::new(
            Rc::clone(routing),
            Arc::clone(upstream),
            Arc::clone(endpoint),
            descriptors,
            now,
        );
        let check = self.millis(now);
        let index = if let Some(index) = slots.free.pop() {
            slots.flows[index as usize] = Some(flow);
            slots.checks[index as usize] = check;
            index
        } else {
            slots.flows.push(Some(flow));
            slots.checks.push(check);
            slots.flows.len() as u32 - 1
        };
        self.occupied.notify_one();
        FlowHandle { table: Rc::clone(self), index }
    }

    /// Whether the table has no flow.
    pub fn is_empty(&self) -> bool {
        let slots = self.slots.borrow();
        slots.free.len() == slots.flows.len()
    }

    /// Ends the flows of a listener that are due, `elapsed` after the start of a drain that may take
    /// `timeout`: all of them once that has passed.
    pub fn end_due(&self, routing: &Rc<ListenerRouting>, elapsed: Duration, timeout: Duration) {
        if elapsed < end_time(1.0, timeout) {
            return;
        }
        let mut slots = self.slots.borrow_mut();
        for (check, flow) in slots.open_flows() {
            if Rc::ptr_eq(flow.routing(), routing) && elapsed >= flow.end_time(timeout) {
                self.end(check, flow, SHUTDOWN);
            }
        }
    }

    /// Ends the flows of dead endpoints, and those of removed endpoints in time.
    fn check_endpoints(&self, now: Instant) {
        let mut slots = self.slots.borrow_mut();
        let Slots { checks, flows, endpoints, .. } = &mut *slots;
        for known in endpoints {
            let deaths = known.endpoint.deaths();
            let died = std::mem::replace(&mut known.deaths, deaths) != deaths;
            if known.endpoint.state() == EndpointState::Leaving {
                known.leaving_since.get_or_insert(now);
            }
            if !died && known.leaving_since.is_none() {
                continue;
            }
            let leaving = known.leaving_since.map(|since| now.saturating_duration_since(since));
            for (check, flow) in open_flows(checks, flows) {
                if !Arc::ptr_eq(flow.endpoint(), &known.endpoint) {
                    continue;
                }
                if flow.has_endpoint_died(deaths) {
                    self.end(check, flow, ENDPOINT_DEAD);
                } else if leaving.is_some_and(|leaving| leaving >= flow.leave_time()) {
                    self.end(check, flow, ENDPOINT_LEFT);
                }
            }
        }
    }

    /// Ends idle flows of an endpoint that has too many, for listeners with `rebalance`.
    fn rebalance(&self, now: Instant) {
        let Some(elapsed) = self.rebalancing.borrow_mut().is_due(now) else { return };
        let mut slots = self.slots.borrow_mut();
        let Slots { checks, flows, .. } = &mut *slots;
        let mut upstreams: Vec<Arc<Upstream>> = Vec::new();
        for flow in flows.iter().flatten().filter(|flow| flow.is_movable()) {
            if !upstreams.iter().any(|known| Arc::ptr_eq(known, flow.upstream())) {
                upstreams.push(Arc::clone(flow.upstream()));
            }
        }
        for upstream in upstreams {
            let count = |endpoint: &Arc<Endpoint>| {
                let movable = flows.iter().flatten().filter(|flow| flow.is_movable());
                movable.filter(|flow| Arc::ptr_eq(flow.endpoint(), endpoint)).count()
            };
            let mut schedule = self.rebalancing.borrow_mut();
            let decision = rebalance::decide(&mut schedule, &upstream, count, elapsed, now);
            drop(schedule);
            let Some((from, count)) = decision else { continue };
            let mut idle: Vec<_> = open_flows(checks, flows)
                .filter(|(_, flow)| {
                    flow.is_movable()
                        && Arc::ptr_eq(flow.endpoint(), &from)
                        && now.saturating_duration_since(flow.last_progress()) >= IDLE_FOR
                })
                .collect();
            idle.sort_by_key(|(_, flow)| flow.last_progress());
            for (check, flow) in idle.into_iter().take(count) {
                self.end(check, flow, REBALANCE);
            }
        }
    }

    /// Checks the flows that are due.
    fn check_flows(&self, now: Instant) {
        let thresholds = self.thresholds(now);
        let now_millis = self.millis(now);
        let mut slots = self.slots.borrow_mut();
        let Slots { checks, flows, endpoints, .. } = &mut *slots;
        for (check, flow) in checks.iter_mut().zip(flows) {
            if *check > now_millis {
                continue;
            }
            let Some(flow) = flow else { continue };
            let known =
                endpoints.iter_mut().find(|known| Arc::ptr_eq(&known.endpoint, flow.endpoint()));
            let Some(known) = known else { continue };
            let thresholds = if known.correlated_loss.is_path_broken(known.flows, now) {
                &flow_health::CORRELATED_LOSS_SERVER
            } else {
                thresholds
            };
            let was_stalled = flow.is_stalled();
            let checked = flow.check(thresholds, now);
            known.correlated_loss.changed(was_stalled, flow.is_stalled());
            if flow.was_refuted() {
                let mut refuted = self.refuted.get();
                refuted.count = refuted.count.saturating_add(1);
                self.refuted.set(refuted);
            }
            match checked {
                Ok(next) => *check = self.millis(next).max(now_millis + 1),
                Err(reason) => self.end(check, flow, reason),
            }
        }
    }

    /// The thresholds for the endpoint's side of a flow whose endpoint shows no correlated loss.
    fn thresholds(&self, now: Instant) -> &'static FlowThresholds {
        let mut refuted = self.refuted.get();
        if now.saturating_duration_since(refuted.since) > REFUTED_FOR {
            refuted = RefutedSuspicions { count: refuted.count / 2, since: now };
            self.refuted.set(refuted);
        }
        if refuted.count >= flow_health::LOSSY_AFTER {
            &flow_health::LOSSY_SERVER
        } else {
            &flow_health::SERVER
        }
    }

    fn end(&self, check: &mut u32, flow: &mut FlowEntry, reason: EndReason) {
        *check = NEVER;
        flow.end(reason);
        if reason == CLIENT_RESET {
            // Clients reset flows in normal operation.
            return;
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
    fn millis(&self, at: Instant) -> u32 {
        let since = at.saturating_duration_since(self.start).as_millis();
        u32::try_from(since).unwrap_or(NEVER - 1).min(NEVER - 1)
    }
}

impl Slots {
    fn open_flows(&mut self) -> impl Iterator<Item = (&mut u32, &mut FlowEntry)> {
        open_flows(&mut self.checks, &mut self.flows)
    }
}

/// The flows that were not ended, each with its check time.
fn open_flows<'a>(
    checks: &'a mut [u32],
    flows: &'a mut [Option<FlowEntry>],
) -> impl Iterator<Item = (&'a mut u32, &'a mut FlowEntry)> {
    let slots = checks.iter_mut().zip(flows).filter(|(check, _)| **check != NEVER);
    slots.filter_map(|(check, flow)| Some((check, flow.as_mut()?)))
}

/// A flow in the table. Dropping it removes the flow.
pub struct FlowHandle {
    table: Rc<FlowTable>,
    index: u32,
}

impl FlowHandle {
    /// Why the flow was ended, if it was. Otherwise the task of `cx` is woken when it is; the first
    /// task that has called this is remembered.
    pub fn poll_end(&self, cx: &Context<'_>) -> Option<EndReason> {
        let mut slots = self.table.slots.borrow_mut();
        slots.flows[self.index as usize].as_mut()?.poll_end(cx.waker())
    }

    /// Records that the end of the endpoint's direction was passed on to the client.
    pub fn record_server_end(&self) {
        let mut slots = self.table.slots.borrow_mut();
        if let Some(flow) = slots.flows[self.index as usize].as_mut() {
            flow.record_server_end();
        }
    }

    /// Records moved bytes.
    pub fn record(&self, progress: Progress) {
        let mut slots = self.table.slots.borrow_mut();
        let Slots { checks, flows, .. } = &mut *slots;
        let Some(flow) = flows[self.index as usize].as_mut() else { return };
        if let Some(check) = flow.record(progress, Instant::now()) {
            let next = &mut checks[self.index as usize];
            *next = self.table.millis(check).min(*next);
        }
    }
}

impl Drop for FlowHandle {
    fn drop(&mut self) {
        let mut slots = self.table.slots.borrow_mut();
        slots.checks[self.index as usize] = NEVER;
        let Some(flow) = slots.flows[self.index as usize].take() else { return };
        slots.free.push(self.index);
        let is_its = |known: &EndpointFlows| Arc::ptr_eq(&known.endpoint, flow.endpoint());
        if let Some(at) = slots.endpoints.iter().position(is_its) {
            slots.endpoints[at].flows -= 1;
            slots.endpoints[at].correlated_loss.changed(flow.is_stalled(), false);
            if slots.endpoints[at].flows == 0 {
                slots.endpoints.swap_remove(at);
            }
        }
    }
}

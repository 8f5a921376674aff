//! The flows of one worker, and the one task that looks after all of them.
//!
//! A timer for each of ten thousand idle flows would cost more than the flows do. So the time at
//! which each is to be looked at stands in one array, which is walked every 50 ms; a look is one
//! `TCP_INFO`, about once a second for a flow on which nothing moves.
//!
//! What ends a flow here: its own death ([`flow`]), the death of its endpoint (all of its flows at
//! once), an endpoint that was removed and whose time is over, the bounds of the configuration, the
//! end of the program. The flow's own task is told, and resets both sides.
//!
//! Where time is over for many that live, they are not ended in one moment: their clients would all
//! connect elsewhere in the next. Each has a moment of its own in the last fifth ([`turn_of`]).

use std::cell::{Cell, RefCell};
use std::os::fd::RawFd;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Waker};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{Instant, sleep};

use super::super::accept::WARNING_INTERVAL;
use super::TcpForwarder;
use super::rebalance::{self, QUIET};
use super::verdict::{
    CLIENT_DEAD, CLIENT_GONE, ENDPOINT_DEAD, ENDPOINT_LEFT, HANDSHAKE, IDLE, REBALANCE, SHUTDOWN,
    UNACKNOWLEDGED, UNANSWERED, Verdict,
};
use crate::net::sockets::{tcp_info, tcp_options};
use crate::observe::RateLimitedWarnings;
use crate::upstream::Upstream;
use crate::upstream::endpoint::{Endpoint, EndpointState};
use crate::upstream::flow_health::{
    self, CorrelatedLoss, FlowDeath, FlowDecision, FlowHealth, FlowThresholds,
};
use crate::upstream::rebalance::RebalanceSchedule;

/// How often the array is walked.
const TICK: Duration = Duration::from_millis(50);
/// How long refuted suspicions are remembered.
const MEMORY: Duration = Duration::from_secs(60);
/// The part of the time that flows have to end in which those that are left are ended one by one.
const LAST_PART: f32 = 0.2;
/// Entry of a place without a flow, and of a flow that has been told to end.
const NEVER: u32 = u32::MAX;

/// See the module.
pub struct Table {
    start: Instant,
    inner: RefCell<Inner>,
    /// Told when the first flow enters.
    occupied: Notify,
    /// About flows that are ended.
    warnings: RateLimitedWarnings,
    mover: RefCell<RebalanceSchedule>,
    lossy: Cell<Lossy>,
}

/// Remembers whether packets are lost here that prove nothing.
#[derive(Debug, Clone, Copy)]
struct Lossy {
    /// Suspicions that an answer refuted, since then.
    refuted: u32,
    since: Instant,
}

#[derive(Default)]
struct Inner {
    /// When to look at each place, in milliseconds since the start.
    due: Vec<u32>,
    flows: Vec<Option<Flow>>,
    free: Vec<u32>,
    endpoints: Vec<Lives>,
}

/// An endpoint with flows.
struct Lives {
    endpoint: Arc<Endpoint>,
    deaths: u64,
    /// Since when it has been leaving.
    leaving: Option<Instant>,
    flows: usize,
    struck: CorrelatedLoss,
}

struct Flow {
    listener: Rc<TcpForwarder>,
    upstream: Arc<Upstream>,
    endpoint: Arc<Endpoint>,
    /// How often its endpoint had died when it began, or had ended its direction in time.
    deaths: u64,
    client: RawFd,
    server: RawFd,
    judge: FlowHealth,
    client_judge: FlowHealth,
    /// When to look at the client's side: only while bytes may be under way to it, or wait for the
    /// server and nobody reads.
    client_due: Option<Instant>,
    began: Instant,
    /// When bytes last moved.
    moved: Instant,
    /// The server has said something.
    answered: bool,
    /// In 0..1: when its turn is ([`turn_of`]).
    lot: f32,
    /// The server's end was passed on: then a client's socket may be closed and all is well.
    ended: bool,
    verdict: Option<Verdict>,
    waker: Option<Waker>,
}

/// What a turn of the pump moved.
#[derive(Debug, Clone, Copy, Default)]
pub struct Moved {
    /// To the server.
    pub up: bool,
    /// To the client.
    pub down: bool,
}

impl Table {
    /// An empty table; spawn [`Self::run`] to look after it.
    pub fn new() -> Rc<Self> {
        Rc::new(Self {
            start: Instant::now(),
            inner: RefCell::default(),
            occupied: Notify::new(),
            warnings: RateLimitedWarnings::new(WARNING_INTERVAL),
            mover: RefCell::new(RebalanceSchedule::new(Instant::now())),
            lossy: Cell::new(Lossy { refuted: 0, since: Instant::now() }),
        })
    }

    /// Looks after the flows for ever.
    pub async fn run(self: Rc<Self>) {
        loop {
            if self.is_empty() {
                self.occupied.notified().await;
            }
            sleep(TICK).await;
            self.turn(Instant::now());
        }
    }

    /// Takes a flow in for as long as the ticket lives, which must not be longer than its sockets.
    pub fn enter(
        self: &Rc<Self>,
        listener: &Rc<TcpForwarder>,
        upstream: &Arc<Upstream>,
        endpoint: &Arc<Endpoint>,
        (client, server): (RawFd, RawFd),
    ) -> Ticket {
        let now = Instant::now();
        let mut inner = self.inner.borrow_mut();
        match inner.endpoints.iter_mut().find(|lives| Arc::ptr_eq(&lives.endpoint, endpoint)) {
            Some(lives) => lives.flows += 1,
            None => inner.endpoints.push(Lives {
                endpoint: Arc::clone(endpoint),
                deaths: endpoint.deaths(),
                leaving: None,
                flows: 1,
                struck: CorrelatedLoss::default(),
            }),
        }
        let flow = Flow {
            listener: Rc::clone(listener),
            upstream: Arc::clone(upstream),
            endpoint: Arc::clone(endpoint),
            deaths: endpoint.deaths(),
            client,
            server,
            judge: FlowHealth::new(now),
            client_judge: FlowHealth::new(now),
            client_due: None,
            began: now,
            moved: now,
            answered: false,
            lot: fastrand::f32(),
            ended: false,
            verdict: None,
            waker: None,
        };
        let due = self.stamp(now);
        let index = if let Some(index) = inner.free.pop() {
            inner.flows[index as usize] = Some(flow);
            inner.due[index as usize] = due;
            index
        } else {
            inner.flows.push(Some(flow));
            inner.due.push(due);
            inner.flows.len() as u32 - 1
        };
        self.occupied.notify_one();
        Ticket { table: Rc::clone(self), index, told: Cell::new(None) }
    }

    /// Whether no flow is open.
    pub fn is_empty(&self) -> bool {
        let inner = self.inner.borrow();
        inner.free.len() == inner.flows.len()
    }

    /// Ends those flows of a listener whose turn has come; all of them, when its drain has taken as
    /// long as it may.
    pub fn drain(&self, listener: &TcpForwarder, taken: Duration, timeout: Duration) {
        if taken < turn_of(1.0, timeout) {
            return;
        }
        let mut inner = self.inner.borrow_mut();
        let Inner { due, flows, .. } = &mut *inner;
        for (due, flow) in due.iter_mut().zip(flows).filter(|(due, _)| **due != NEVER) {
            let Some(flow) = flow else { continue };
            if std::ptr::eq(&raw const *flow.listener, listener)
                && taken >= turn_of(flow.lot, timeout)
            {
                *due = NEVER;
                self.tell(flow, SHUTDOWN);
                flow.end(SHUTDOWN);
            }
        }
    }

    fn stamp(&self, at: Instant) -> u32 {
        let since = at.saturating_duration_since(self.start).as_millis();
        u32::try_from(since).unwrap_or(NEVER - 1).min(NEVER - 1)
    }

    /// The rules for the apiservers' side, where nothing says that a path is broken.
    fn rules(&self, now: Instant) -> &'static FlowThresholds {
        let mut lossy = self.lossy.get();
        if now.saturating_duration_since(lossy.since) > MEMORY {
            // Half of what was seen counts for another while.
            lossy = Lossy { refuted: lossy.refuted / 2, since: now };
            self.lossy.set(lossy);
        }
        if lossy.refuted >= flow_health::LOSSY_AFTER {
            &flow_health::LOSSY_SERVER
        } else {
            &flow_health::SERVER
        }
    }

    /// Ends quiet flows to an endpoint that has too many, where the listener asks for it.
    fn rebalance(&self, now: Instant) {
        let Some(elapsed) = self.mover.borrow_mut().is_due(now) else { return };
        let mut inner = self.inner.borrow_mut();
        let Inner { due, flows, .. } = &mut *inner;
        let mut upstreams: Vec<Arc<Upstream>> = Vec::new();
        let movable =
            |flow: &&Flow| flow.listener.routing().config.rebalance && flow.verdict.is_none();
        for flow in flows.iter().flatten().filter(movable) {
            if !upstreams.iter().any(|known| Arc::ptr_eq(known, &flow.upstream)) {
                upstreams.push(Arc::clone(&flow.upstream));
            }
        }
        for upstream in upstreams {
            let all = || flows.iter().flatten().filter(movable);
            let count = |endpoint: &Arc<Endpoint>| {
                all().filter(|flow| Arc::ptr_eq(&flow.endpoint, endpoint)).count()
            };
            let found =
                rebalance::decide(&mut self.mover.borrow_mut(), &upstream, count, elapsed, now);
            let Some((from, count)) = found else { continue };
            let mut quiet: Vec<_> = flows
                .iter_mut()
                .enumerate()
                .filter_map(|(index, flow)| Some((index, flow.as_mut()?)))
                .filter(|(_, flow)| {
                    movable(&&**flow)
                        && Arc::ptr_eq(&flow.endpoint, &from)
                        && now.saturating_duration_since(flow.moved) >= QUIET
                })
                .collect();
            quiet.sort_by_key(|(_, flow)| flow.moved);
            for (index, flow) in quiet.into_iter().take(count) {
                due[index] = NEVER;
                self.tell(flow, REBALANCE);
                flow.end(REBALANCE);
            }
        }
    }

    fn turn(&self, now: Instant) {
        self.look_at_endpoints(now);
        self.rebalance(now);
        let rules = self.rules(now);
        let stamp = self.stamp(now);
        let mut inner = self.inner.borrow_mut();
        let Inner { due, flows, endpoints, .. } = &mut *inner;
        for (due, flow) in due.iter_mut().zip(flows) {
            if *due > stamp {
                continue;
            }
            let Some(flow) = flow else { continue };
            let lives =
                endpoints.iter_mut().find(|lives| Arc::ptr_eq(&lives.endpoint, &flow.endpoint));
            let Some(lives) = lives else { continue };
            let struck = lives.struck.is_path_broken(lives.flows, now);
            let stalled = flow.judge.is_stalled();
            let looked =
                flow.look(if struck { &flow_health::CORRELATED_LOSS_SERVER } else { rules }, now);
            lives.struck.changed(stalled, flow.judge.is_stalled());
            if flow.judge.was_refuted() {
                let mut lossy = self.lossy.get();
                lossy.refuted = lossy.refuted.saturating_add(1);
                self.lossy.set(lossy);
            }
            match looked {
                Ok(next) => *due = self.stamp(next).max(stamp + 1),
                Err(verdict) => {
                    *due = NEVER;
                    self.tell(flow, verdict);
                    flow.end(verdict);
                }
            }
        }
    }

    /// A dead endpoint takes all its flows with it at once; one that was removed, in time.
    fn look_at_endpoints(&self, now: Instant) {
        let mut inner = self.inner.borrow_mut();
        let Inner { due, flows, endpoints, .. } = &mut *inner;
        for lives in endpoints {
            let deaths = lives.endpoint.deaths();
            let died = std::mem::replace(&mut lives.deaths, deaths) != deaths;
            if lives.endpoint.state() == EndpointState::Leaving {
                lives.leaving.get_or_insert(now);
            }
            if !died && lives.leaving.is_none() {
                continue;
            }
            let left = lives.leaving.map(|since| now.saturating_duration_since(since));
            for (due, flow) in due.iter_mut().zip(flows.iter_mut()) {
                let Some(flow) = flow.as_mut().filter(|_| *due != NEVER) else { continue };
                if !Arc::ptr_eq(&flow.endpoint, &lives.endpoint) {
                    continue;
                }
                if flow.deaths != deaths && flow.has_its_last_word_under_way() {
                    flow.deaths = deaths;
                }
                let verdict = if flow.deaths != deaths {
                    ENDPOINT_DEAD
                } else if left.is_some_and(|left| left >= turn_of(flow.lot, leave_timeout(flow))) {
                    ENDPOINT_LEFT
                } else {
                    continue;
                };
                *due = NEVER;
                self.tell(flow, verdict);
                flow.end(verdict);
            }
        }
    }

    fn tell(&self, flow: &Flow, verdict: Verdict) {
        if verdict == CLIENT_GONE {
            // As every day.
            return;
        }
        let line = format!(
            "flow ended, listener {}, endpoint {}: {}",
            flow.listener.name(),
            flow.endpoint.label,
            verdict.words
        );
        self.warnings.warn(&line, "the client is reset");
    }
}

/// When a flow is ended that has not ended by itself, of the time that all have.
fn turn_of(lot: f32, limit: Duration) -> Duration {
    limit.saturating_sub(limit.mul_f32(LAST_PART * lot))
}

fn leave_timeout(flow: &Flow) -> Duration {
    flow.listener.routing().config.leave_timeout
}

impl Flow {
    /// Looks at both sides; when to look again.
    fn look(&mut self, rules: &FlowThresholds, now: Instant) -> Result<Instant, Verdict> {
        let routing = self.listener.routing();
        let limits = &routing.limits;
        if !self.answered && now >= self.began + limits.handshake_timeout {
            return Err(HANDSHAKE);
        }
        let idle = routing.config.idle_timeout;
        if idle.is_some_and(|idle| now >= self.moved + idle) {
            return Err(IDLE);
        }
        let mut next = now + flow_health::MAX_CHECK_INTERVAL;
        // Without evidence (a kernel before 4.6) there is no verdict.
        if let Ok(info) = tcp_info::read(&self.server)
            && !info.closed
        {
            if info.has_pending() {
                self.client_due.get_or_insert(now + flow_health::MAX_CHECK_INTERVAL);
            }
            match self.judge.look(&info, rules, now) {
                FlowDecision::Dead(_) if self.has_its_last_word_under_way() => {}
                FlowDecision::Dead(FlowDeath::Unacknowledged) => return Err(UNACKNOWLEDGED),
                FlowDecision::Dead(FlowDeath::Unanswered) => return Err(UNANSWERED),
                FlowDecision::Again { after, probe } => {
                    if probe {
                        let _ = tcp_options::send_keepalive_probe(&self.server);
                    }
                    next = next.min(now + after);
                }
            }
        }
        if self.client_due.is_some_and(|due| now >= due)
            && let Ok(info) = tcp_info::read(&self.client)
        {
            if info.closed && !self.ended {
                // While the server takes nothing nobody reads from the client, and hears of it.
                return Err(CLIENT_GONE);
            }
            match self.client_judge.look(&info, &flow_health::CLIENT, now) {
                FlowDecision::Dead(_) => return Err(CLIENT_DEAD),
                FlowDecision::Again { after, .. } => {
                    self.client_due = info.has_pending().then(|| now + after);
                }
            }
        }
        Ok(self.client_due.map_or(next, |due| next.min(due.max(now))))
    }

    /// Whether the server has said all it had to say, and the client has not read all of it yet:
    /// what became of the server since makes no difference to that.
    fn has_its_last_word_under_way(&self) -> bool {
        tcp_info::read(&self.server).is_ok_and(|server| server.ended || server.closed)
            && tcp_info::read(&self.client).is_ok_and(|client| client.has_pending())
    }

    fn end(&mut self, verdict: Verdict) {
        self.verdict = Some(verdict);
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }
}

/// A flow's place in the table, given back on drop.
pub struct Ticket {
    table: Rc<Table>,
    index: u32,
    told: Cell<Option<Verdict>>,
}

impl Ticket {
    /// The verdict, once there is one. Remembers whom to wake when there is.
    pub fn verdict(&self, cx: &Context<'_>) -> Option<Verdict> {
        let mut inner = self.table.inner.borrow_mut();
        let flow = inner.flows[self.index as usize].as_mut()?;
        if flow.verdict.is_none() && flow.waker.is_none() {
            flow.waker = Some(cx.waker().clone());
        }
        self.told.set(flow.verdict);
        flow.verdict
    }

    /// The verdict that was given last.
    pub fn told(&self) -> Option<Verdict> {
        self.told.get()
    }

    /// The server's end was passed on to the client.
    pub fn ended(&self) {
        let mut inner = self.table.inner.borrow_mut();
        if let Some(flow) = inner.flows[self.index as usize].as_mut() {
            flow.ended = true;
        }
    }

    /// Bytes were moved.
    pub fn moved(&self, moved: Moved) {
        let now = Instant::now();
        let mut inner = self.table.inner.borrow_mut();
        let Inner { due, flows, .. } = &mut *inner;
        let Some(flow) = flows[self.index as usize].as_mut() else { return };
        flow.moved = now;
        flow.answered |= moved.down;
        if moved.down {
            flow.client_due.get_or_insert(now + flow_health::MAX_CHECK_INTERVAL);
        }
        if moved.up && flow.verdict.is_none() {
            let look = self.table.stamp(flow.judge.wrote(now));
            let due = &mut due[self.index as usize];
            *due = look.min(*due);
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let mut inner = self.table.inner.borrow_mut();
        inner.due[self.index as usize] = NEVER;
        let Some(flow) = inner.flows[self.index as usize].take() else { return };
        inner.free.push(self.index);
        let here = |lives: &Lives| Arc::ptr_eq(&lives.endpoint, &flow.endpoint);
        if let Some(at) = inner.endpoints.iter().position(here) {
            inner.endpoints[at].flows -= 1;
            inner.endpoints[at].struck.changed(flow.judge.is_stalled(), false);
            if inner.endpoints[at].flows == 0 {
                inner.endpoints.swap_remove(at);
            }
        }
    }
}

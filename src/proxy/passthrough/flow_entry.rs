//! An entry of the flow table: the state of a flow, the check of both its sides, and the reasons to end it.

use std::os::fd::RawFd;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Waker;
use std::time::{Duration, Instant};

use jackstay_core::flow_health;
use jackstay_core::flow_health::{
    FlowDeath, FlowDecision, FlowHealth, FlowThresholds, MAX_CHECK_INTERVAL,
};
use jackstay_core::line_pacing::{LOOK_INTERVAL, LinePacing};
use jackstay_sys::sockets::{tcp_info, tcp_options};

use super::routing::ListenerRouting;
use crate::observe::OpenStreams;
use crate::observe::events::{Change, EventKind, Severity};
use crate::upstream::Upstream;
use crate::upstream::endpoint::{Endpoint, FlowGuard};

/// Why a flow is ended, as a metric label and in words.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EndReason {
    /// One of [`crate::observe::names::CLOSE_REASONS`].
    pub label: &'static str,
    /// For the log.
    pub description: &'static str,
}

impl EndReason {
    const fn new(label: &'static str, description: &'static str) -> Self {
        Self { label, description }
    }

    /// How much the end matters if the endpoint or the path to it has failed; `None` otherwise. The line of a
    /// dead endpoint reports its flows.
    pub(super) fn fault(self) -> Option<Severity> {
        if self == ENDPOINT_DEAD {
            return Some(Severity::Notable);
        }
        (self == UNACKNOWLEDGED || self == UNANSWERED).then_some(Severity::Fault)
    }
}

pub(super) const ENDPOINT_DEAD: EndReason =
    EndReason::new("endpoint_dead", "the endpoint does not respond");
pub(super) const ENDPOINT_LEFT: EndReason =
    EndReason::new("endpoint_left", "the endpoint was removed and leave_timeout has passed");
const HANDSHAKE: EndReason =
    EndReason::new("handshake_timeout", "the endpoint sent nothing within handshake_timeout");
const IDLE: EndReason = EndReason::new("idle_timeout", "no bytes were moved for idle_timeout");
const UNACKNOWLEDGED: EndReason =
    EndReason::new("unacknowledged", "the endpoint does not acknowledge sent bytes");
const UNANSWERED: EndReason =
    EndReason::new("unanswered", "the endpoint does not answer keepalives");
const CLIENT_DEAD: EndReason =
    EndReason::new("client_dead", "the client does not acknowledge sent bytes");
pub(super) const CLIENT_RESET: EndReason = EndReason::new("client_reset", "reset by the client");
pub(super) const EVICTED: EndReason =
    EndReason::new("evicted", "the client sent nothing and another connection needed the slot");
pub(super) const MEMORY: EndReason =
    EndReason::new("memory", "a side takes no bytes, and memory is short (memory_limit)");
pub(super) const REBALANCE: EndReason =
    EndReason::new("rebalance", "moved off an overloaded endpoint (rebalance)");
pub(super) const SHUTDOWN: EndReason = EndReason::new("shutdown", "the drain timeout has passed");

/// Bytes after which the line is looked at soon.
const LARGE_PROGRESS: usize = 4096;
/// The last part of a drain. The ends of the flows are spread over it, so that their clients do not all reconnect at
/// the same moment.
const FINAL_PART: f32 = 0.2;
/// The last part of `leave_timeout`, in which the flows to a removed endpoint end. It is longer than that of a drain,
/// because the flows of all nodes to one apiserver end together.
const LEAVING_PART: f32 = 0.5;

/// The time after which one of many flows with the time limit `limit` is ended: a point in the last `part`, chosen by
/// `random` in 0..1.
fn end_in_part(part: f32, random: f32, limit: Duration) -> Duration {
    limit.saturating_sub(limit.mul_f32(part * random))
}

/// The time after which one of many flows is ended in a drain with the timeout `limit`.
pub(super) fn end_after(random: f32, limit: Duration) -> Duration {
    end_in_part(FINAL_PART, random, limit)
}

/// Numbers of written bytes.
#[derive(Debug, Clone, Copy, Default)]
pub struct Progress {
    /// Bytes written to the endpoint.
    pub to_endpoint: usize,
    /// Bytes written to the client.
    pub to_client: usize,
}

/// A flow in the table.
pub(super) struct FlowEntry {
    routing: Rc<ListenerRouting>,
    upstream: Arc<Upstream>,
    endpoint: Arc<Endpoint>,
    /// Counts the flow at the endpoint.
    tracked: FlowGuard,
    /// The death count of the endpoint when the flow started, or after the last death that the flow
    /// survived.
    endpoint_deaths: u64,
    client_socket: RawFd,
    endpoint_socket: RawFd,
    endpoint_health: FlowHealth,
    client_health: FlowHealth,
    pacing: LinePacing,
    /// The time of the next check of the client's side. `None` unless bytes wait for the client's
    /// acknowledgement, or the endpoint accepts no bytes, so that the pump does not read from the client.
    client_check: Option<Instant>,
    started: Instant,
    last_progress: Instant,
    /// Whether the endpoint has sent any byte.
    answered: bool,
    /// A random number in 0..1 for [`end_after`].
    random: f32,
    /// Whether the endpoint's end of stream was passed on; the client may then close its socket.
    endpoint_end_forwarded: bool,
    end: Option<EndReason>,
    waker: Option<Waker>,
}

impl FlowEntry {
    /// The entry of a flow that starts now. Both sockets must stay open as long as the entry exists.
    pub(super) fn new(
        routing: &Rc<ListenerRouting>,
        upstream: &Arc<Upstream>,
        endpoint: &Arc<Endpoint>,
        (client_socket, endpoint_socket): (RawFd, RawFd),
        now: Instant,
    ) -> Self {
        Self {
            endpoint_deaths: endpoint.deaths(),
            tracked: endpoint.track_flow(),
            routing: Rc::clone(routing),
            upstream: Arc::clone(upstream),
            endpoint: Arc::clone(endpoint),
            client_socket,
            endpoint_socket,
            endpoint_health: FlowHealth::new(now),
            client_health: FlowHealth::new(now),
            pacing: LinePacing::watched(),
            client_check: None,
            started: now,
            last_progress: now,
            answered: false,
            random: fastrand::f32(),
            endpoint_end_forwarded: false,
            end: None,
            waker: None,
        }
    }

    pub(super) fn routing(&self) -> &Rc<ListenerRouting> {
        &self.routing
    }

    pub(super) fn upstream(&self) -> &Arc<Upstream> {
        &self.upstream
    }

    pub(super) fn endpoint(&self) -> &Arc<Endpoint> {
        &self.endpoint
    }

    pub(super) fn last_progress(&self) -> Instant {
        self.last_progress
    }

    /// Whether the flow has not been ended.
    pub(super) fn is_open(&self) -> bool {
        self.end.is_none()
    }

    /// Whether rebalancing may end the flow.
    pub(super) fn is_movable(&self) -> bool {
        self.is_open() && self.routing.current().flows.rebalance
    }

    /// Whether the endpoint's side has made no progress for so long that the path may be broken.
    pub(super) fn is_stalled(&self) -> bool {
        self.endpoint_health.is_stalled()
    }

    /// Whether the endpoint was suspected and has answered after all, since the last call.
    pub(super) fn take_refuted_suspicion(&mut self) -> bool {
        self.endpoint_health.take_refuted_suspicion()
    }

    /// The time after which the flow is ended, if all flows have the time limit `limit`.
    pub(super) fn end_after(&self, limit: Duration) -> Duration {
        end_after(self.random, limit)
    }

    /// The time after the removal of its endpoint when the flow is ended.
    pub(super) fn leave_after(&self) -> Duration {
        end_in_part(LEAVING_PART, self.random, self.routing.current().flows.leave_timeout)
    }

    /// Makes `endpoint`, which has the address of the removed one, the endpoint of this flow.
    pub(super) fn adopt(&mut self, endpoint: &Arc<Endpoint>) {
        self.endpoint = Arc::clone(endpoint);
        self.tracked = endpoint.track_flow();
        self.endpoint_deaths = endpoint.deaths();
    }

    /// Whether the endpoint, which has died `deaths` times, has died since the flow started. A flow whose
    /// last bytes are on their way to the client survives the death.
    pub(super) fn has_endpoint_died(&mut self, deaths: u64) -> bool {
        if self.endpoint_deaths != deaths && self.is_delivering_last_bytes() {
            self.endpoint_deaths = deaths;
        }
        self.endpoint_deaths != deaths
    }

    /// Checks both sides. Returns the time of the next check, or the reason to end the flow.
    pub(super) fn check(
        &mut self,
        thresholds: &FlowThresholds,
        now: Instant,
    ) -> Result<Instant, EndReason> {
        let routing = self.routing.current();
        if !self.answered && now >= self.started + routing.limits.handshake_timeout {
            return Err(HANDSHAKE);
        }
        let idle_timeout = routing.flows.idle_timeout;
        if idle_timeout.is_some_and(|timeout| now >= self.last_progress + timeout) {
            return Err(IDLE);
        }
        let next = self.check_endpoint(thresholds, now)?;
        self.check_client(now)?;
        Ok(self.client_check.map_or(next, |check| next.min(check.max(now))))
    }

    fn check_endpoint(
        &mut self,
        thresholds: &FlowThresholds,
        now: Instant,
    ) -> Result<Instant, EndReason> {
        let next = now + MAX_CHECK_INTERVAL;
        // Without TCP_INFO (before Linux 4.6) there is no evidence, and so no decision.
        let Ok(info) = tcp_info::read(&self.endpoint_socket) else { return Ok(next) };
        if info.closed {
            return Ok(next);
        }
        if info.has_pending() {
            self.client_check.get_or_insert(now + MAX_CHECK_INTERVAL);
        }
        let bound = |bounds| tcp_options::bound_in_flight(&self.endpoint_socket, bounds);
        self.endpoint.pace(&mut self.pacing, &info, now, bound);
        let next = if self.pacing.is_active() { now + LOOK_INTERVAL } else { next };
        let thresholds = thresholds.at_distance(self.endpoint.line_delay(now));
        match self.endpoint_health.check(&info, &thresholds, now) {
            FlowDecision::Dead(_) if self.is_delivering_last_bytes() => Ok(next),
            FlowDecision::Dead(FlowDeath::Unacknowledged) => Err(UNACKNOWLEDGED),
            FlowDecision::Dead(FlowDeath::Unanswered) => Err(UNANSWERED),
            FlowDecision::CheckAgain { after, probe } => {
                if probe {
                    let _ = tcp_options::send_keepalive_probe(&self.endpoint_socket);
                }
                Ok(next.min(now + after))
            }
        }
    }

    fn check_client(&mut self, now: Instant) -> Result<(), EndReason> {
        if self.client_check.is_none_or(|check| now < check) {
            return Ok(());
        }
        let Ok(info) = tcp_info::read(&self.client_socket) else { return Ok(()) };
        if info.closed && !self.endpoint_end_forwarded {
            // While the endpoint accepts no bytes, the pump does not read from the client and does not
            // notice that the client has closed.
            return Err(CLIENT_RESET);
        }
        match self.client_health.check(&info, &flow_health::CLIENT, now) {
            FlowDecision::Dead(_) => Err(CLIENT_DEAD),
            FlowDecision::CheckAgain { after, .. } => {
                self.client_check = info.has_pending().then(|| now + after);
                Ok(())
            }
        }
    }

    /// Whether the endpoint has ended its direction, and the client has not received all bytes of it. The
    /// flow then no longer depends on the endpoint.
    fn is_delivering_last_bytes(&self) -> bool {
        tcp_info::read(&self.endpoint_socket)
            .is_ok_and(|endpoint| endpoint.ended || endpoint.closed)
            && tcp_info::read(&self.client_socket).is_ok_and(|client| client.has_pending())
    }

    /// Records written bytes. Returns the latest time of the next check of the endpoint's side, if they require one.
    pub(super) fn record(&mut self, progress: Progress, now: Instant) -> Option<Instant> {
        self.last_progress = now;
        if progress.to_client > 0 {
            if !self.answered {
                self.endpoint.flow_evidence.answered(self.started, now);
            }
            self.answered = true;
            self.client_check.get_or_insert(now + MAX_CHECK_INTERVAL);
        }
        let write_check = (progress.to_endpoint > 0 && self.is_open())
            .then(|| self.endpoint_health.record_write(now));
        // A transfer may have begun.
        let is_large = progress.to_endpoint.max(progress.to_client) >= LARGE_PROGRESS;
        let look = (is_large && self.is_open()).then(|| now + LOOK_INTERVAL);
        write_check.into_iter().chain(look).min()
    }

    /// The bound of the bytes in flight to the endpoint.
    pub(super) fn send_bound(&self) -> Option<u32> {
        self.pacing.bounds().send
    }

    /// Records that the endpoint's end of stream was passed on.
    pub(super) fn record_endpoint_end(&mut self) {
        self.endpoint_end_forwarded = true;
    }

    /// Logs and remembers that the endpoint or the path to it has failed.
    pub(super) fn report_loss(&self, reason: &str, severity: Severity) {
        let endpoint = &self.endpoint;
        let change = Change {
            kind: EventKind::Connection,
            upstream: Some(&endpoint.upstream),
            name: &endpoint.label,
            detail: &format!("flow of listener {}", self.routing.name()),
            from: "open",
            to: "reset",
            reason,
            effect: "the client is reset",
            bad: false, // Depends on its severity.
        };
        endpoint.metrics.events().connection_changed(&change, OpenStreams::of_flows(1), severity);
    }

    /// Reports the orderly end of the flow, if the endpoint has begun it.
    pub(super) fn report_end(&self) {
        if self.endpoint_end_forwarded {
            let endpoint = &self.endpoint;
            endpoint.metrics.events().flow_ended(&endpoint.upstream, &endpoint.label);
        }
    }

    /// Ends the flow by waking its task, which resets both sides.
    pub(super) fn end(&mut self, reason: EndReason) {
        if reason == HANDSHAKE || reason.fault().is_some() {
            self.endpoint.flow_evidence.refused();
        }
        self.end = Some(reason);
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }

    /// The reason for which the flow was ended. `None` if it is open; `waker` is then woken at its end.
    pub(super) fn poll_end(&mut self, waker: &Waker) -> Option<EndReason> {
        if self.end.is_none() && self.waker.is_none() {
            self.waker = Some(waker.clone());
        }
        self.end
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn end_after_spreads_flows_over_the_final_part() {
        let limit = Duration::from_secs(100);
        assert_eq!(end_after(0.0, limit), limit);
        assert_eq!(end_after(1.0, limit), Duration::from_secs(80));
        assert_eq!(end_in_part(LEAVING_PART, 1.0, limit), Duration::from_secs(50));
    }
}

//! The health of an endpoint: a pure state machine over the observations of workers and the prober.
//!
//! [`EndpointHealth::step`] takes one [`Observation`] and returns the [`EndpointTransition`] if the state changes.
//! The state is that of the first row that matches:
//!
//! | observed | state |
//! |---|---|
//! | removed from the set of endpoints | leaving |
//! | no connection is live, and TLS of the last connect failed, in an upstream of flows only | unverified |
//! | no connection is live, and the last connect failed | ejected |
//! | no PONG and no handshake for too long | ejected |
//! | no connection is live, and the peer did not choose `h2` by ALPN | `no_h2` |
//! | no connection is live | connecting |
//! | on every live connection a PING is unanswered | suspect |
//! | `/readyz` fails | degraded |
//! | its watch cache is older than that of another endpoint | degraded |
//! | `/readyz` is ok or is not asked | ready |
//! | `/readyz` was not answered yet | connecting |
//!
//! This module reads no clock and draws no random numbers.

use std::time::Instant;

use crate::connect::{ConnectFailure, ConnectFailureKind};
use crate::connection::Responsiveness;
use crate::endpoint_state::EndpointState;

/// An observation of a worker or the prober.
#[derive(Debug)]
pub enum Observation<'a> {
    /// A connect succeeded, but its connection is not counted.
    Connected,
    /// A connect failed.
    ConnectFailed(ConnectFailure),
    /// A connection became live. It is counted until [`Self::ConnectionClosed`].
    ConnectionOpened {
        /// When.
        at: Instant,
    },
    /// A counted connection drains or is closed.
    ConnectionClosed {
        /// Whether its PINGs were answered.
        responsiveness: Responsiveness,
        /// Why it drains or is closed.
        reason: &'a str,
        /// When the drain began or the connection was closed.
        at: Instant,
    },
    /// The PINGs on a counted connection are answered again, or not any more.
    ResponsivenessChanged {
        /// The previous value, [`Responsiveness::Responds`] at first.
        from: Responsiveness,
        /// The value now.
        to: Responsiveness,
    },
    /// The first `/readyz` was ok, or `rise` in a row were.
    ReadyzOk,
    /// The first `/readyz` failed, or `fall` in a row did. The text is the reason.
    ReadyzFailing(&'a str),
    /// `/readyz` is not asked. The text is the reason. The endpoint is ready while a connection is live.
    ReadyzNotProbed(&'static str),
    /// Its watch cache is proven to lag behind another endpoint ([`crate::lag`]).
    Lagging {
        /// What was compared.
        reason: &'a str,
        /// When it was proven.
        at: Instant,
    },
    /// Its watch cache has caught up. It ends [`Self::Lagging`].
    CaughtUp,
    /// Neither a PONG nor a handshake for too long, although the kernel may answer. The text is the reason.
    Unresponsive(&'a str),
    /// A PONG arrived on a connection that stayed open. It ends [`Self::Unresponsive`].
    Responsive,
    /// The prober's connection received a GOAWAY: the apiserver shuts down. It refuses new connections,
    /// but open streams and flows may finish.
    GoawayReceived,
    /// The endpoint was removed from the set.
    Removed,
}

/// A change of state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EndpointTransition {
    /// The state before.
    pub from: EndpointState,
    /// The state now.
    pub to: EndpointState,
    /// Why, for the log and `/status`.
    pub reason: String,
    /// The apiserver process died: its connections and flows are dead.
    pub died: bool,
    /// On entering [`EndpointState::Ready`]: whether a slow start begins, because the load has moved away
    /// from the endpoint. `None` leaves a slow start in progress unchanged.
    pub slow_start: Option<bool>,
    /// Whether the state is a new fault: an endpoint that was out of service and answers again, but is not ready
    /// yet, is on its way back.
    pub is_fault: bool,
}

/// The readiness of an endpoint, for the search for watches that move away.
#[derive(Debug, Clone, Copy)]
pub struct EndpointReadiness {
    /// The state of the endpoint.
    pub state: EndpointState,
    /// Since when `/readyz` has failed or been overdue, or the watch cache has lagged; `None` if the latest response was
    /// ok.
    pub probe_failing_since: Option<Instant>,
    /// When the latest `/readyz` request that was ok was sent.
    pub last_ready_probe: Option<Instant>,
}

/// The observed facts about an endpoint. Without any, the state is connecting.
#[derive(Debug, Default)]
pub struct EndpointHealth {
    transport: Transport,
    /// Its live connections.
    pub connections: LiveConnections,
    readyz: Readyz,
    /// Since when and why its watch cache lags.
    lag: Option<(Instant, String)>,
    probe_failing_since: Option<Instant>,
    last_ready_probe: Option<Instant>,
    lifecycle: Lifecycle,
    /// The reason of [`Observation::Unresponsive`].
    pub unresponsive: Option<String>,
    /// The resource of this host that the latest connect lacked.
    shortage: Option<String>,
    /// Since it was last ready, the endpoint was in a state in which its load moves away.
    lost_load: bool,
    /// The server has answered the last connect that failed.
    answers: bool,
    removed: bool,
}

/// Counts of the live connections of all workers and of the prober. They are counted here so that the
/// end of the last one and the change of state are one step.
#[derive(Debug, Default)]
pub struct LiveConnections {
    /// Their numbers, by [`Responsiveness`].
    counts: [usize; 3],
    /// When the first of them was opened while no other one was; `None` before the first one.
    pub since: Option<Instant>,
    /// Why the endpoint is suspect; `None` while the PINGs on a connection are answered.
    suspect_reason: Option<String>,
    /// Why the last connection was lost; `None` while one is open.
    lost_reason: Option<String>,
    /// When and why the last connection was lost, if its PINGs were not answered.
    pub unanswered_loss: Option<(Instant, String)>,
}

#[derive(Debug, Default, PartialEq)]
enum Transport {
    #[default]
    Unknown,
    Up,
    Down(String),
    Unverified(String),
    NoH2(String),
}

#[derive(Debug, Default, PartialEq)]
enum Readyz {
    #[default]
    Unknown,
    Ok,
    Failing(String),
    /// Not asked, for this reason.
    NotProbed(&'static str),
}

/// The lifecycle of the apiserver process, as far as connections show it.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum Lifecycle {
    /// Not connected since the last ejection.
    #[default]
    New,
    /// A connection was established.
    Alive,
    /// A connection was established, and the process announced its shutdown by GOAWAY.
    ShuttingDown,
}

impl EndpointHealth {
    /// Takes in an observation. Returns the change of state, if there is one.
    pub fn step(&mut self, observation: Observation<'_>) -> Option<EndpointTransition> {
        let (from, _) = self.state();
        self.apply(observation);
        let (to, reason) = self.state();
        if from == to {
            return None;
        }
        let reason = reason.to_owned();
        let died = to == EndpointState::Ejected && self.end_lifecycle();
        let is_fault = to.is_fault() && !(to == EndpointState::Degraded && self.lost_load);
        let slow_start = self.note_load(from, to);
        Some(EndpointTransition { from, to, reason, died, slow_start, is_fault })
    }

    /// The state and its reason.
    pub fn state(&self) -> (EndpointState, &str) {
        let connections = &self.connections;
        if self.removed {
            return (EndpointState::Leaving, "removed from the set");
        }
        let lag = self.lag.as_ref().map(|(_, reason)| reason.as_str());
        match (&self.transport, &self.unresponsive, &connections.suspect_reason, &self.readyz) {
            (Transport::Down(reason), ..) | (_, Some(reason), ..) => {
                (EndpointState::Ejected, reason)
            }
            (Transport::Unverified(reason), ..) => (EndpointState::Unverified, reason),
            (Transport::NoH2(reason), ..) => (EndpointState::NoH2, reason),
            (Transport::Unknown, ..) => {
                let reason = self.shortage.as_deref().or(connections.lost_reason.as_deref());
                (EndpointState::Connecting, reason.unwrap_or("no connection yet"))
            }
            (Transport::Up, _, Some(reason), _) => (EndpointState::Suspect, reason),
            (Transport::Up, .., Readyz::Failing(reason)) => (EndpointState::Degraded, reason),
            (Transport::Up, .., Readyz::Ok) => match lag {
                Some(reason) => (EndpointState::Degraded, reason),
                None => (EndpointState::Ready, "/readyz is ok"),
            },
            (Transport::Up, .., Readyz::NotProbed(reason)) => (EndpointState::Ready, reason),
            (Transport::Up, .., Readyz::Unknown) => {
                (EndpointState::Connecting, "connected, /readyz not answered yet")
            }
        }
    }

    /// Whether it is ready, or has only lost its connections since: they end by GOAWAY while the process runs on, so that
    /// the next connect probably succeeds.
    pub fn is_ready_or_returns(&self) -> bool {
        let is_alone = self.transport == Transport::Unknown && self.shortage.is_none();
        let was_ready =
            matches!(self.readyz, Readyz::Ok | Readyz::NotProbed(_)) && self.lag.is_none();
        match self.state().0 {
            EndpointState::Ready => true,
            EndpointState::Connecting => is_alone && was_ready,
            _ => false,
        }
    }

    /// Records that a `/readyz` failed or is overdue.
    pub fn note_probe_failing(&mut self, now: Instant) {
        self.probe_failing_since.get_or_insert(now);
    }

    /// Records that the `/readyz` request of `asked_at` was ok.
    pub fn note_probe_ok(&mut self, asked_at: Instant) {
        self.probe_failing_since = None;
        self.last_ready_probe = Some(asked_at);
    }

    /// The state and its recent probes.
    pub fn readiness(&self) -> EndpointReadiness {
        EndpointReadiness {
            state: self.state().0,
            probe_failing_since: self.probe_failing_since.or(self.lag.as_ref().map(|lag| lag.0)),
            last_ready_probe: self.last_ready_probe,
        }
    }

    /// The result of `/readyz`, for `/status`.
    pub fn readyz_result(&self) -> &'static str {
        match (&self.transport, &self.readyz) {
            (Transport::Up, Readyz::Ok) => "ok",
            (Transport::Up, Readyz::Failing(_)) => "failing",
            _ => "unknown",
        }
    }

    fn apply(&mut self, observation: Observation<'_>) {
        match observation {
            Observation::Connected => self.connected(),
            Observation::ConnectFailed(failure) => self.connect_failed(failure),
            Observation::ConnectionOpened { at } => {
                self.connected();
                self.connections.opened(at);
            }
            Observation::ConnectionClosed { responsiveness, reason, at } => {
                self.connections.closed(responsiveness, reason, at);
                if self.connections.open() == 0 && self.transport == Transport::Up {
                    self.transport = Transport::Unknown;
                    self.connections.lost_reason = Some(reason.to_owned());
                }
            }
            Observation::ResponsivenessChanged { from, to } => self.connections.changed(from, to),
            Observation::ReadyzOk => self.readyz = Readyz::Ok,
            Observation::ReadyzFailing(reason) => self.readyz = Readyz::Failing(reason.to_owned()),
            Observation::ReadyzNotProbed(reason) => self.readyz = Readyz::NotProbed(reason),
            Observation::Lagging { reason, at } => {
                let since = self.lag.as_ref().map_or(at, |lag| lag.0);
                self.lag = Some((since, reason.to_owned()));
            }
            Observation::CaughtUp => self.lag = None,
            Observation::Unresponsive(reason) => self.unresponsive = Some(reason.to_owned()),
            Observation::Responsive => {
                if self.unresponsive.take().is_some() {
                    self.lifecycle = Lifecycle::Alive;
                }
            }
            Observation::GoawayReceived => {
                if self.lifecycle == Lifecycle::Alive {
                    self.lifecycle = Lifecycle::ShuttingDown;
                }
            }
            Observation::Removed => self.removed = true,
        }
    }

    fn connected(&mut self) {
        self.shortage = None;
        self.unresponsive = None;
        self.answers = false;
        self.connections.lost_reason = None;
        self.connections.unanswered_loss = None;
        self.lifecycle = Lifecycle::Alive;
        if self.transport != Transport::Up {
            // The earlier result of `/readyz` may be that of another process. Whether it is asked does not
            // depend on the process.
            if !matches!(self.readyz, Readyz::NotProbed(_)) {
                self.readyz = Readyz::Unknown;
            }
            self.lag = None;
            self.transport = Transport::Up;
        }
    }

    fn connect_failed(&mut self, ConnectFailure { kind, reason }: ConnectFailure) {
        if kind == ConnectFailureKind::LocalShortage {
            self.shortage = Some(reason);
            return;
        }
        self.shortage = None;
        if self.connections.open() > 0 {
            return;
        }
        self.answers = match kind {
            ConnectFailureKind::TlsFailed
            | ConnectFailureKind::Unverified
            | ConnectFailureKind::NoH2 => true,
            ConnectFailureKind::Failed
            | ConnectFailureKind::LocalShortage
            | ConnectFailureKind::Timeout => false,
        };
        if matches!(kind, ConnectFailureKind::TlsFailed | ConnectFailureKind::Unverified) {
            // The process answers, so the ejection is no death.
            self.lifecycle = Lifecycle::New;
        }
        if kind == ConnectFailureKind::Unverified {
            self.unresponsive = None;
        }
        self.transport = match kind {
            ConnectFailureKind::NoH2 => Transport::NoH2(reason),
            ConnectFailureKind::Unverified => {
                Transport::Unverified(format!("the probe fails: {reason}; flows are forwarded"))
            }
            _ => Transport::Down(reason),
        };
    }

    /// Whether the last connect has failed, although the server has answered it. Clients of flows, whose TLS connections
    /// are their own, may be served.
    pub fn answers(&self) -> bool {
        self.answers && self.transport != Transport::Up && self.unresponsive.is_none()
    }

    /// Records an ejection. Returns whether the process died: it was alive and did not announce its
    /// shutdown, or it announced it and then stopped to answer.
    fn end_lifecycle(&mut self) -> bool {
        match std::mem::replace(&mut self.lifecycle, Lifecycle::New) {
            Lifecycle::New => false,
            Lifecycle::Alive => true,
            Lifecycle::ShuttingDown => self.unresponsive.is_some(),
        }
    }

    /// Records whether a change of state moves load away. Returns [`EndpointTransition::slow_start`]. The first start
    /// and a PING that is answered late need no slow start, because no load has moved away.
    fn note_load(&mut self, from: EndpointState, to: EndpointState) -> Option<bool> {
        match to {
            EndpointState::Ready => {
                let lost_load = std::mem::take(&mut self.lost_load);
                (lost_load || from != EndpointState::Suspect).then_some(lost_load)
            }
            EndpointState::Connecting | EndpointState::Suspect => None,
            EndpointState::Degraded
            | EndpointState::Unverified
            | EndpointState::Ejected
            | EndpointState::NoH2
            | EndpointState::Leaving => {
                self.lost_load = true;
                None
            }
        }
    }
}

impl LiveConnections {
    fn open(&self) -> usize {
        self.counts.iter().sum()
    }

    /// Whether a request may be sent on one of them. If none responds, one that is silent shows that the others,
    /// whose PINGs are younger, are dead too.
    pub fn accept_requests(&self) -> bool {
        let [respond, unanswered, silent] = self.counts;
        respond > 0 || unanswered > 0 && silent == 0
    }

    fn opened(&mut self, at: Instant) {
        if self.open() == 0 {
            self.since = Some(at);
        }
        self.counts[Responsiveness::Responds as usize] += 1;
        self.update_suspicion();
    }

    fn closed(&mut self, responsiveness: Responsiveness, reason: &str, at: Instant) {
        self.decrement(responsiveness);
        if self.open() == 0 && responsiveness > Responsiveness::Responds {
            self.unanswered_loss = Some((at, reason.to_owned()));
        }
        self.update_suspicion();
    }

    fn changed(&mut self, from: Responsiveness, to: Responsiveness) {
        self.decrement(from);
        self.counts[to as usize] += 1;
        self.update_suspicion();
    }

    fn decrement(&mut self, responsiveness: Responsiveness) {
        let count = &mut self.counts[responsiveness as usize];
        *count = count.saturating_sub(1);
    }

    fn update_suspicion(&mut self) {
        let (open, respond) = (self.open(), self.counts[Responsiveness::Responds as usize]);
        self.suspect_reason = (open > 0 && respond == 0)
            .then(|| format!("PING unanswered on every connection ({open})"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use EndpointState::{Connecting, Degraded, Ejected, Leaving, NoH2, Ready, Suspect, Unverified};
    use Observation::{
        CaughtUp, Connected, ConnectionClosed, GoawayReceived, ReadyzFailing, ReadyzNotProbed,
        ReadyzOk, Removed, Responsive, Unresponsive,
    };
    use Responsiveness::{Responds, Unanswered};

    fn opened() -> Observation<'static> {
        Observation::ConnectionOpened { at: Instant::now() }
    }

    fn closed() -> Observation<'static> {
        ConnectionClosed { responsiveness: Responds, reason: "lost", at: Instant::now() }
    }

    fn unanswered() -> Observation<'static> {
        Observation::ResponsivenessChanged { from: Responds, to: Unanswered }
    }

    fn answered() -> Observation<'static> {
        Observation::ResponsivenessChanged { from: Unanswered, to: Responds }
    }

    /// Steps through observations. Returns each state that was entered, and whether the process died.
    fn transitions(observations: Vec<Observation<'_>>) -> Vec<(EndpointState, bool)> {
        let mut health = EndpointHealth::default();
        assert_eq!(health.state(), (Connecting, "no connection yet"));
        let steps = observations.into_iter().filter_map(|observation| health.step(observation));
        steps.map(|transition| (transition.to, transition.died)).collect()
    }

    #[test]
    fn step_through_observations_gives_the_states_of_the_table() {
        let at = Instant::now();
        let failed = |kind| Observation::ConnectFailed(ConnectFailure::new(kind, "reason"));
        let refused = || failed(ConnectFailureKind::Failed);
        let lagging = || Observation::Lagging { reason: "behind", at };
        for (observations, expected) in [
            (vec![opened(), ReadyzOk], vec![(Ready, false)]),
            (vec![Connected, ReadyzNotProbed("no credential")], vec![(Ready, false)]),
            (vec![opened(), ReadyzFailing("etcd")], vec![(Degraded, false)]),
            (
                vec![opened(), ReadyzFailing("etcd"), unanswered()],
                vec![(Degraded, false), (Suspect, false)],
            ),
            // A shortage of this host is no fault of the endpoint.
            (vec![failed(ConnectFailureKind::LocalShortage)], vec![]),
            (vec![failed(ConnectFailureKind::NoH2)], vec![(NoH2, false)]),
            // The process was never alive, so it has not died.
            (vec![refused()], vec![(Ejected, false)]),
            // A failed connect ejects only if no connection is live.
            (
                vec![opened(), ReadyzOk, refused(), closed(), refused()],
                vec![(Ready, false), (Connecting, false), (Ejected, true)],
            ),
            // TLS failed, so the process answers.
            (
                vec![opened(), closed(), failed(ConnectFailureKind::TlsFailed)],
                vec![(Ejected, false)],
            ),
            // The probe is refused, and flows are forwarded. A dead process is ejected as before.
            (
                vec![
                    opened(),
                    ReadyzOk,
                    closed(),
                    failed(ConnectFailureKind::Unverified),
                    refused(),
                    failed(ConnectFailureKind::Unverified),
                    Connected,
                    ReadyzOk,
                ],
                vec![
                    (Ready, false),
                    (Connecting, false),
                    (Unverified, false),
                    (Ejected, false),
                    (Unverified, false),
                    (Connecting, false),
                    (Ready, false),
                ],
            ),
            // It answers again.
            (
                vec![
                    opened(),
                    Unresponsive("stopped"),
                    closed(),
                    failed(ConnectFailureKind::Unverified),
                ],
                vec![(Ejected, true), (Unverified, false)],
            ),
            // The process announced its shutdown, so open flows may finish.
            (vec![opened(), GoawayReceived, closed(), refused()], vec![(Ejected, false)]),
            (vec![opened(), GoawayReceived, Unresponsive("stopped")], vec![(Ejected, true)]),
            (
                vec![opened(), ReadyzOk, Unresponsive("stopped"), Responsive],
                vec![(Ready, false), (Ejected, true), (Ready, false)],
            ),
            (vec![refused(), Removed, Connected], vec![(Ejected, false), (Leaving, false)]),
            (
                vec![opened(), ReadyzOk, lagging(), CaughtUp, lagging(), closed(), Connected],
                vec![
                    (Ready, false),
                    (Degraded, false),
                    (Ready, false),
                    (Degraded, false),
                    (Connecting, false),
                ],
            ),
        ] {
            let text = format!("{observations:?}");
            assert_eq!(transitions(observations), expected, "{text}");
        }
    }

    #[test]
    fn answers_is_true_after_a_connect_that_the_server_has_answered() {
        for (kind, answers) in [
            (ConnectFailureKind::TlsFailed, true),
            (ConnectFailureKind::Unverified, true),
            (ConnectFailureKind::NoH2, true),
            (ConnectFailureKind::Failed, false),
            (ConnectFailureKind::Timeout, false),
        ] {
            let mut health = EndpointHealth::default();
            assert!(!health.answers(), "{kind:?}");
            health.step(Observation::ConnectFailed(ConnectFailure::new(kind, "why")));
            assert_eq!(health.answers(), answers, "{kind:?}");
            let refused = ConnectFailure::new(ConnectFailureKind::Failed, "refused");
            health.step(Observation::ConnectFailed(refused));
            assert!(!health.answers(), "{kind:?}");
        }
        let mut health = EndpointHealth::default();
        let refused = ConnectFailure::new(ConnectFailureKind::Unverified, "TLS failed");
        health.step(Observation::ConnectFailed(refused));
        let reason = "the probe fails: TLS failed; flows are forwarded";
        assert_eq!(health.state(), (Unverified, reason));
        health.step(Connected);
        assert!(!health.answers(), "it is connected");
    }

    #[test]
    fn endpoint_returns_if_it_was_ready_until_its_connections_ended() {
        let failed = || {
            let refused = ConnectFailure::new(ConnectFailureKind::Failed, "refused");
            Observation::ConnectFailed(refused)
        };
        let shortage = || {
            let full = ConnectFailure::new(ConnectFailureKind::LocalShortage, "no file descriptor");
            Observation::ConnectFailed(full)
        };
        let lagging = || Observation::Lagging { reason: "lags", at: Instant::now() };
        for (observations, expected) in [
            (vec![], false),
            (vec![opened()], false),
            (vec![opened(), ReadyzOk], true),
            (vec![opened(), ReadyzOk, closed()], true),
            (vec![opened(), ReadyzNotProbed("by the configuration"), closed()], true),
            (vec![opened(), ReadyzOk, closed(), failed()], false),
            (vec![opened(), ReadyzOk, closed(), shortage()], false),
            (vec![opened(), ReadyzOk, closed(), opened()], false),
            (vec![opened(), ReadyzOk, lagging(), closed()], false),
            (vec![opened(), ReadyzOk, unanswered()], false),
            (vec![opened(), ReadyzOk, closed(), Removed], false),
            (vec![opened(), closed()], false),
            (vec![opened(), ReadyzFailing("etcd"), closed()], false),
        ] {
            let text = format!("{observations:?}");
            let mut health = EndpointHealth::default();
            for observation in observations {
                health.step(observation);
            }
            assert_eq!(health.is_ready_or_returns(), expected, "{text}");
        }
    }

    #[test]
    fn step_to_degraded_is_a_fault_unless_the_endpoint_was_out_of_service() {
        let mut health = EndpointHealth::default();
        let mut is_fault = |observation| health.step(observation).map(|t| t.is_fault);
        assert_eq!(is_fault(opened()), None);
        assert_eq!(is_fault(ReadyzFailing("etcd")), Some(true), "found at the start");
        assert_eq!(is_fault(ReadyzOk), Some(false));
        assert_eq!(is_fault(ReadyzFailing("etcd")), Some(true));
        assert_eq!(is_fault(Unresponsive("stopped")), Some(true));
        assert_eq!(is_fault(Responsive), Some(false), "not ready yet");
        assert_eq!(is_fault(ReadyzOk), Some(false));
        assert_eq!(is_fault(ReadyzFailing("etcd")), Some(true));
    }

    #[test]
    fn step_to_ready_begins_a_slow_start_only_after_load_moved_away() {
        let mut health = EndpointHealth::default();
        let mut slow_start = |observation| health.step(observation).and_then(|t| t.slow_start);
        assert_eq!(slow_start(opened()), None);
        assert_eq!(slow_start(ReadyzOk), Some(false), "first start");
        assert_eq!(slow_start(unanswered()), None);
        assert_eq!(slow_start(answered()), None, "a late PONG changes nothing");
        assert_eq!(slow_start(ReadyzFailing("etcd")), None);
        assert_eq!(slow_start(ReadyzOk), Some(true), "recovery");
    }

    #[test]
    fn connections_are_open_since_the_first_one_while_no_other_was() {
        let mut health = EndpointHealth::default();
        assert_eq!(health.connections.since, None);
        let start = Instant::now();
        let at = |seconds| start + std::time::Duration::from_secs(seconds);
        let opened = |seconds| Observation::ConnectionOpened { at: at(seconds) };
        let closed = || ConnectionClosed { responsiveness: Responds, reason: "lost", at: at(9) };
        for (observation, since) in [
            (opened(1), 1),
            (opened(2), 1),
            (closed(), 1),
            (opened(3), 1),
            (closed(), 1),
            (closed(), 1),
            (opened(4), 4),
        ] {
            health.step(observation);
            assert_eq!(health.connections.since, Some(at(since)));
        }
    }
}

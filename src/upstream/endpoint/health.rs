//! The health of an endpoint: a pure state machine over what workers and the prober observe.
//!
//! [`EndpointHealth::step`] takes one [`Observation`] and returns the [`Transition`] that follows,
//! if the state changes. The state is the first row that matches:
//!
//! | observed | state |
//! |---|---|
//! | removed from the set of endpoints | leaving |
//! | the last fresh connect failed and no connection is live | ejected |
//! | no PONG and no fresh handshake for too long | ejected |
//! | the peer did not choose `h2` by ALPN and no connection is live | `no_h2` |
//! | no connection is live | connecting |
//! | no live connection has its PINGs answered | suspect |
//! | `/readyz` fails | degraded |
//! | `/readyz` is ok, or cannot be asked | ready |
//! | `/readyz` was not answered yet | connecting |
//!
//! Reads no clock and draws no random numbers: times are arguments.

use tokio::time::Instant;

use super::connect::{ConnectFailure, ConnectFailureKind};
use super::state::EndpointState;

/// What a worker or the prober has observed.
#[derive(Debug)]
pub enum Observation<'a> {
    /// A fresh connection is established: TCP, TLS and the first PONG.
    Connected,
    /// A fresh connect failed.
    ConnectFailed(ConnectFailure),
    /// A connection became live and counts until [`Self::ConnectionClosed`]. Use
    /// [`Endpoint::connection_opened`](super::Endpoint::connection_opened), which also lists it.
    ConnectionOpened,
    /// A counted connection takes no new streams any more.
    ConnectionClosed {
        /// Whether its last PING was answered in time.
        responded: bool,
        /// Why it ended.
        reason: &'a str,
        /// When it ended.
        at: Instant,
    },
    /// PINGs on a counted connection are answered again, or no longer. The endpoint is suspect while
    /// no connection has its PINGs answered.
    ConnectionResponds(bool),
    /// `/readyz` was ok often enough.
    ReadyzOk,
    /// `/readyz` failed often enough; why.
    ReadyzFailing(&'a str),
    /// `/readyz` cannot be asked; why. A live connection makes the endpoint ready.
    ReadyzNotProbed(&'static str),
    /// Neither a PONG nor a fresh handshake for too long, although its kernel may answer; why.
    Unresponsive(&'a str),
    /// A connection that was open all the time answers.
    Responsive,
    /// The prober's connection received a GOAWAY: the apiserver shuts down. New
    /// connections will be refused, but what runs there may finish.
    GoawayReceived,
    /// The endpoint was removed from the set.
    Removed,
}

/// A change of state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Transition {
    pub(super) from: EndpointState,
    pub(super) to: EndpointState,
    pub(super) reason: String,
    /// The apiserver process is gone: connections and flows opened before are dead.
    pub(super) died: bool,
    /// On entering [`EndpointState::Ready`]: whether the endpoint has lost its load and takes it
    /// back gradually. `None` leaves a slow start in progress as it is.
    pub(super) slow_start: Option<bool>,
}

/// The readiness of an endpoint, for [`crate::upstream::evacuation`].
#[derive(Debug, Clone, Copy)]
pub struct EndpointReadiness {
    /// Its state.
    pub state: EndpointState,
    /// Since when `/readyz` fails or is overdue; `None` while the latest answer was ok.
    pub probe_failing_since: Option<Instant>,
    /// When the latest `/readyz` that was ok was asked.
    pub last_ready_probe: Option<Instant>,
}

/// What is known about an endpoint. By default nothing is known: the state is connecting.
#[derive(Debug, Default)]
pub(super) struct EndpointHealth {
    transport: Transport,
    pub(super) connections: LiveConnections,
    readyz: Readyz,
    probe_failing_since: Option<Instant>,
    last_ready_probe: Option<Instant>,
    lifecycle: Lifecycle,
    /// Why it counts as unresponsive although its kernel may answer.
    pub(super) unresponsive: Option<String>,
    /// The resource of this host that the latest connect lacked.
    shortage: Option<String>,
    /// The state was worse than suspect since it was last ready.
    lost_load: bool,
    removed: bool,
}

/// Counted connections of all workers and of the prober. Counted here, so that the end of the last
/// one and its consequence are one step.
#[derive(Debug, Default)]
pub(super) struct LiveConnections {
    pub(super) open: usize,
    /// Those of them whose PING is not answered.
    unresponsive: usize,
    /// No PING is answered on any; as text.
    suspect_reason: Option<String>,
    /// Why the last one was lost, while there is none.
    lost_reason: Option<String>,
    /// When and why the last one was lost, if its PING was not answered.
    pub(super) unanswered_loss: Option<(Instant, String)>,
}

#[derive(Debug, Default, PartialEq)]
enum Transport {
    #[default]
    Unknown,
    Up,
    Down(String),
    NoH2(String),
}

#[derive(Debug, Default, PartialEq)]
enum Readyz {
    #[default]
    Unknown,
    Ok,
    Failing(String),
    /// Cannot be asked; why.
    NotProbed(&'static str),
}

/// The life of the apiserver process, as far as connections show it.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum Lifecycle {
    /// No connection since it last died.
    #[default]
    New,
    /// Was connected.
    Alive,
    /// Was connected and announced its shutdown: what runs there may finish.
    ShuttingDown,
}

impl EndpointHealth {
    /// Takes in an observation; returns the change of state that follows, if one does.
    pub(super) fn step(&mut self, observation: Observation<'_>) -> Option<Transition> {
        let (from, _) = self.state();
        self.apply(observation);
        let (to, reason) = self.state();
        if from == to {
            return None;
        }
        let reason = reason.to_owned();
        let died = to == EndpointState::Ejected && self.die();
        let slow_start = self.note_load(from, to);
        Some(Transition { from, to, reason, died, slow_start })
    }

    /// The state, and why.
    pub(super) fn state(&self) -> (EndpointState, &str) {
        let connections = &self.connections;
        if self.removed {
            return (EndpointState::Leaving, "removed from the set");
        }
        match (&self.transport, &self.unresponsive, &connections.suspect_reason, &self.readyz) {
            (Transport::Down(why), ..) | (_, Some(why), ..) => (EndpointState::Ejected, why),
            (Transport::NoH2(why), ..) => (EndpointState::NoH2, why),
            (Transport::Unknown, ..) => {
                let why = self.shortage.as_deref().or(connections.lost_reason.as_deref());
                (EndpointState::Connecting, why.unwrap_or("no connection yet"))
            }
            (Transport::Up, _, Some(why), _) => (EndpointState::Suspect, why),
            (Transport::Up, .., Readyz::Failing(why)) => (EndpointState::Degraded, why),
            (Transport::Up, .., Readyz::Ok) => (EndpointState::Ready, "/readyz is ok"),
            (Transport::Up, .., Readyz::NotProbed(why)) => (EndpointState::Ready, why),
            (Transport::Up, .., Readyz::Unknown) => {
                (EndpointState::Connecting, "connected, /readyz not answered yet")
            }
        }
    }

    /// `/readyz` failed once or is overdue.
    pub(super) fn note_probe_failing(&mut self, now: Instant) {
        self.probe_failing_since.get_or_insert(now);
    }

    /// `/readyz`, asked at `asked_at`, was ok.
    pub(super) fn note_probe_ok(&mut self, asked_at: Instant) {
        self.probe_failing_since = None;
        self.last_ready_probe = Some(asked_at);
    }

    /// Its readiness, for evacuations.
    pub(super) fn readiness(&self) -> EndpointReadiness {
        EndpointReadiness {
            state: self.state().0,
            probe_failing_since: self.probe_failing_since,
            last_ready_probe: self.last_ready_probe,
        }
    }

    /// Result of `/readyz`, for `/status`.
    pub(super) fn readyz_result(&self) -> &'static str {
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
            Observation::ConnectionOpened => {
                self.connections.open += 1;
                self.connected();
                self.connections.update_suspicion();
            }
            Observation::ConnectionClosed { responded, reason, at } => {
                self.connections.closed(responded, reason, at);
                if self.connections.open == 0 && self.transport == Transport::Up {
                    self.transport = Transport::Unknown;
                    self.connections.lost_reason = Some(reason.to_owned());
                }
            }
            Observation::ConnectionResponds(responds) => self.connections.responds(responds),
            Observation::ReadyzOk => self.readyz = Readyz::Ok,
            Observation::ReadyzFailing(why) => self.readyz = Readyz::Failing(why.to_owned()),
            Observation::ReadyzNotProbed(why) => self.readyz = Readyz::NotProbed(why),
            Observation::Unresponsive(why) => self.unresponsive = Some(why.to_owned()),
            Observation::Responsive => {
                if self.unresponsive.take().is_some() {
                    self.lifecycle = Lifecycle::Alive;
                }
            }
            // An apiserver that shuts down refuses new connections; those that it has may finish.
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
        self.connections.lost_reason = None;
        self.connections.unanswered_loss = None;
        self.lifecycle = Lifecycle::Alive;
        if self.transport != Transport::Up {
            // The earlier result of `/readyz` may be that of another process. That it cannot be
            // asked holds for this one too.
            if !matches!(self.readyz, Readyz::NotProbed(_)) {
                self.readyz = Readyz::Unknown;
            }
            self.transport = Transport::Up;
        }
    }

    fn connect_failed(&mut self, ConnectFailure { kind, reason }: ConnectFailure) {
        if kind == ConnectFailureKind::LocalShortage {
            self.shortage = Some(reason);
            return;
        }
        self.shortage = None;
        if self.connections.open > 0 {
            return;
        }
        if kind == ConnectFailureKind::TlsFailed {
            // The process answers: established connections and flows did not die.
            self.lifecycle = Lifecycle::New;
        }
        self.transport = match kind {
            ConnectFailureKind::NoH2 => Transport::NoH2(reason),
            _ => Transport::Down(reason),
        };
    }

    /// The endpoint was ejected. Returns whether its process died: it was alive, and did not
    /// announce its shutdown, or announced it and then stopped answering.
    fn die(&mut self) -> bool {
        match std::mem::replace(&mut self.lifecycle, Lifecycle::New) {
            Lifecycle::New => false,
            Lifecycle::Alive => true,
            Lifecycle::ShuttingDown => self.unresponsive.is_some(),
        }
    }

    /// The first start needs no slow start, since no load has moved away; nor does a PING that was
    /// answered late.
    fn note_load(&mut self, from: EndpointState, to: EndpointState) -> Option<bool> {
        match to {
            EndpointState::Ready => {
                let lost_load = std::mem::take(&mut self.lost_load);
                (lost_load || from != EndpointState::Suspect).then_some(lost_load)
            }
            EndpointState::Connecting | EndpointState::Suspect => None,
            EndpointState::Degraded
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
    fn closed(&mut self, responded: bool, reason: &str, at: Instant) {
        self.open = self.open.saturating_sub(1);
        if self.open == 0 && !responded {
            self.unanswered_loss = Some((at, reason.to_owned()));
        }
        self.unresponsive = self.unresponsive.saturating_sub(usize::from(!responded));
        self.update_suspicion();
    }

    fn responds(&mut self, responds: bool) {
        self.unresponsive =
            if responds { self.unresponsive.saturating_sub(1) } else { self.unresponsive + 1 };
        self.update_suspicion();
    }

    fn update_suspicion(&mut self) {
        self.suspect_reason = (self.open > 0 && self.unresponsive >= self.open)
            .then(|| format!("PING unanswered on every connection ({})", self.open));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use EndpointState::{Connecting, Degraded, Ejected, Leaving, NoH2, Ready, Suspect};
    use Observation::{
        Connected, ConnectionClosed, ConnectionOpened, ConnectionResponds, GoawayReceived,
        ReadyzFailing, ReadyzNotProbed, ReadyzOk, Removed, Responsive, Unresponsive,
    };

    /// Steps through observations; returns the states entered and whether the process died there.
    fn transitions(observations: Vec<Observation<'_>>) -> Vec<(EndpointState, bool)> {
        let mut health = EndpointHealth::default();
        assert_eq!(health.state(), (Connecting, "no connection yet"));
        let steps = observations.into_iter().filter_map(|observation| health.step(observation));
        steps.map(|transition| (transition.to, transition.died)).collect()
    }

    #[test]
    fn endpoint_health_observations_give_the_states_of_the_table() {
        let at = Instant::now();
        let failed = |kind| Observation::ConnectFailed(ConnectFailure::new(kind, "why"));
        let refused = || failed(ConnectFailureKind::Failed);
        let closed = || ConnectionClosed { responded: true, reason: "lost", at };
        for (observations, expected) in [
            (vec![ConnectionOpened, ReadyzOk], vec![(Ready, false)]),
            (vec![Connected, ReadyzNotProbed("no credential")], vec![(Ready, false)]),
            (vec![ConnectionOpened, ReadyzFailing("etcd")], vec![(Degraded, false)]),
            (
                vec![ConnectionOpened, ReadyzFailing("etcd"), ConnectionResponds(false)],
                vec![(Degraded, false), (Suspect, false)],
            ),
            // A local shortage says nothing about the endpoint.
            (vec![failed(ConnectFailureKind::LocalShortage)], vec![]),
            (vec![failed(ConnectFailureKind::NoH2)], vec![(NoH2, false)]),
            // It was never up, so nothing has died.
            (vec![refused()], vec![(Ejected, false)]),
            // A failed connect ejects only once no connection is live.
            (
                vec![ConnectionOpened, ReadyzOk, refused(), closed(), refused()],
                vec![(Ready, false), (Connecting, false), (Ejected, true)],
            ),
            // TLS failed: the process answers.
            (
                vec![ConnectionOpened, closed(), failed(ConnectFailureKind::TlsFailed)],
                vec![(Ejected, false)],
            ),
            // It announced its shutdown: what runs there may finish.
            (vec![ConnectionOpened, GoawayReceived, closed(), refused()], vec![(Ejected, false)]),
            (
                vec![ConnectionOpened, GoawayReceived, Unresponsive("stopped")],
                vec![(Ejected, true)],
            ),
            (
                vec![ConnectionOpened, ReadyzOk, Unresponsive("stopped"), Responsive],
                vec![(Ready, false), (Ejected, true), (Ready, false)],
            ),
            (vec![refused(), Removed, Connected], vec![(Ejected, false), (Leaving, false)]),
        ] {
            let text = format!("{observations:?}");
            assert_eq!(transitions(observations), expected, "{text}");
        }
    }

    #[test]
    fn endpoint_health_ready_after_degraded_starts_slowly() {
        let mut health = EndpointHealth::default();
        let mut slow_start = |observation| health.step(observation).and_then(|t| t.slow_start);
        assert_eq!(slow_start(ConnectionOpened), None);
        assert_eq!(slow_start(ReadyzOk), Some(false), "first start");
        assert_eq!(slow_start(ConnectionResponds(false)), None);
        assert_eq!(slow_start(ConnectionResponds(true)), None, "a late PONG changes nothing");
        assert_eq!(slow_start(ReadyzFailing("etcd")), None);
        assert_eq!(slow_start(ReadyzOk), Some(true), "recovery");
    }
}

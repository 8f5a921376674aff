//! The thresholds at which a flow to an apiserver, to a client, or in a tunnel is dead.

use std::time::Duration;

/// The thresholds at which one side of a flow is dead.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FlowThresholds {
    /// How long no byte is acknowledged while bytes wait.
    pub unacked_after: Duration,
    /// Number of retransmissions until [`super::LAST_PROBE_TIMEOUT`] after that time. If one and a half times as many
    /// segments were sent, without those that were sent together, or as many at this number of times, the additional
    /// time is not needed.
    pub retransmits: u8,
    /// How long no new segment is received while no bytes wait. With `None` only the kernel's keepalives
    /// end an idle flow.
    pub idle_after: Option<Duration>,
    /// Number of unanswered keepalives in a row on an idle flow.
    pub unanswered: u8,
    /// Number of unanswered probes of a closed window in a row, and of seconds without a segment. Linux
    /// answers at most two probes a second.
    pub window_probes: u8,
    /// Whether jackstay requests keepalives in addition to the kernel's, which sends one a second.
    pub requests_probes: bool,
}

impl FlowThresholds {
    /// The thresholds on a path whose answers take longer than usual by `distance`. An idle flow waits for the answers to
    /// keepalives that are sent only when the first answer is late, so both are added.
    #[must_use]
    pub fn at_distance(self, distance: Duration) -> Self {
        Self {
            unacked_after: self.unacked_after + distance,
            idle_after: self.idle_after.map(|after| after + 2 * distance),
            ..self
        }
    }

    /// The thresholds of a tunnel, which is dead after `dead_after` without evidence of life. If `dead_after`
    /// is long, no keepalives are requested, because the kernel resets a flow after 127 unanswered ones.
    pub fn tunnel(dead_after: Duration) -> Self {
        Self {
            unacked_after: dead_after.max(SERVER.unacked_after),
            idle_after: SERVER.idle_after.max(Some(dead_after)),
            requests_probes: dead_after < EXTRA_PROBES_BELOW,
            ..SERVER
        }
    }
}

/// The thresholds of a flow to an apiserver whose answers take no longer than usual, and for whose responses clients wait. Retransmissions of a thin
/// stream are 200 ms apart, so eight are sent before `unacked_after`. The pauses of a full stream double:
/// three are sent in 1.4 s, and four in 2.4 s if the kernel limits the pause (`TCP_RTO_MAX_MS`), otherwise in 3 s.
pub const SERVER: FlowThresholds = FlowThresholds {
    unacked_after: Duration::from_millis(2_250),
    retransmits: 4,
    idle_after: Some(Duration::from_millis(2_700)),
    unanswered: 8,
    window_probes: 4,
    requests_probes: true,
};

/// The thresholds of a flow to an apiserver on a lossy path ([`super::LossyPath`]).
pub const LOSSY_SERVER: FlowThresholds =
    FlowThresholds { idle_after: Some(Duration::from_millis(4_500)), window_probes: 6, ..SERVER };

/// The thresholds of a flow to an apiserver on a broken path ([`super::CorrelatedLoss`]): three answers are
/// missing, or three retransmissions are unanswered.
pub const CORRELATED_LOSS_SERVER: FlowThresholds = FlowThresholds {
    unacked_after: Duration::from_millis(2_150),
    retransmits: 3,
    idle_after: Some(Duration::from_millis(2_150)),
    unanswered: 5,
    window_probes: 2,
    requests_probes: true,
};

/// A tunnel with a shorter `dead_after` requests keepalives. In this time the kernel sends eight by itself.
const EXTRA_PROBES_BELOW: Duration = Duration::from_secs(10);

/// The thresholds of a flow to a client. No request waits for a client, and most clients are on the same
/// machine, so the flow to a client that has left the network may stay open for a while.
pub const CLIENT: FlowThresholds = FlowThresholds {
    unacked_after: Duration::from_secs(30),
    retransmits: 6,
    idle_after: None,
    unanswered: u8::MAX,
    window_probes: 6,
    requests_probes: false,
};

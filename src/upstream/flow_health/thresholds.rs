//! Thresholds of flows: when the apiserver's side, a client's side or a tunnel is dead.

use std::time::Duration;

/// When one side of a flow is dead.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FlowThresholds {
    /// No acknowledgement for this long while bytes wait for one.
    pub(super) stuck_after: Duration,
    /// Meanwhile one and a half times as many segments were sent, or, [`super::LAST_ANSWER`] later, this
    /// many retransmissions.
    pub(super) retransmits: u8,
    /// Nothing new received for this long while no bytes wait, and `unanswered` keepalives; `None`
    /// leaves idle flows to the kernel's keepalives.
    pub(super) idle_after: Option<Duration>,
    /// Keepalives in a row without an answer.
    pub(super) unanswered: u8,
    /// Probes of a closed window in a row without an answer, and as many seconds without a segment:
    /// Linux answers at most two of them a second.
    pub(super) window_probes: u8,
    /// Whether the kernel is asked for more keepalives than its own one a second.
    pub(super) requests_probes: bool,
}

impl FlowThresholds {
    /// For a tunnel, which cannot be replaced: no evidence of life for `dead_after`. The kernel resets
    /// a flow after 127 unanswered keepalives, so a long `dead_after` asks for no extra ones.
    pub fn tunnel(dead_after: Duration) -> Self {
        Self {
            stuck_after: dead_after.max(SERVER.stuck_after),
            idle_after: SERVER.idle_after.max(Some(dead_after)),
            requests_probes: dead_after < EXTRA_PROBES_BELOW,
            ..SERVER
        }
    }
}

/// The apiserver's side, for which clients wait. Retransmissions of a thin stream are 200 ms apart,
/// eight in this time. Those of a full stream double: four are out after 2.4 s on kernels that bound
/// the pause (`TCP_RTO_MAX_MS`), and after 3 s on others.
pub const SERVER: FlowThresholds = FlowThresholds {
    stuck_after: Duration::from_millis(2_250),
    retransmits: 4,
    idle_after: Some(Duration::from_millis(2_700)),
    unanswered: 8,
    window_probes: 4,
    requests_probes: true,
};

/// The same after [`LOSSY_AFTER`] recently refuted suspicions.
pub const LOSSY_SERVER: FlowThresholds =
    FlowThresholds { idle_after: Some(Duration::from_millis(4_500)), window_probes: 6, ..SERVER };

/// The same where many flows of an endpoint stall together ([`super::CorrelatedLoss`]): three answers
/// and three retransmissions are missing.
pub const CORRELATED_LOSS_SERVER: FlowThresholds = FlowThresholds {
    stuck_after: Duration::from_millis(2_150),
    retransmits: 3,
    idle_after: Some(Duration::from_millis(2_150)),
    unanswered: 5,
    window_probes: 2,
    requests_probes: true,
};

/// Silence long enough for eight of the kernel's keepalives, one a second.
const EXTRA_PROBES_BELOW: Duration = Duration::from_secs(10);

/// Refuted suspicions within two minutes that show packet loss.
pub const LOSSY_AFTER: u32 = 3;

/// The client's side. Most clients are on the same machine and no request waits for one, so a client
/// that has vanished from the network only needs to be closed eventually.
pub const CLIENT: FlowThresholds = FlowThresholds {
    stuck_after: Duration::from_secs(30),
    retransmits: 6,
    idle_after: None,
    unanswered: u8::MAX,
    window_probes: 6,
    requests_probes: false,
};

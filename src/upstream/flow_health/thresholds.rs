//! Thresholds of flows: when the apiserver's side, a client's side or a tunnel is dead.

use std::time::Duration;

/// Thresholds at which one side of a flow is dead.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FlowThresholds {
    /// Bytes wait and none was acknowledged for this long.
    pub(super) stuck_after: Duration,
    /// Retransmissions in that time and [`super::LAST_PROBE_TIMEOUT`] after it. One and a half times as many
    /// segments are enough without the additional time.
    pub(super) retransmits: u8,
    /// No bytes wait and nothing new was received for this long; `None` leaves idle flows to the
    /// kernel's keepalives.
    pub(super) idle_after: Option<Duration>,
    /// Unanswered keepalives in a row on an idle flow.
    pub(super) unanswered: u8,
    /// Unanswered probes of a closed window in a row, and as many seconds without a segment: Linux
    /// answers at most two probes a second.
    pub(super) window_probes: u8,
    /// Whether jackstay requests keepalives beyond the kernel's own, which is one a second.
    pub(super) requests_probes: bool,
}

impl FlowThresholds {
    /// Thresholds of a tunnel, which cannot be replaced: it is dead after `dead_after` without evidence
    /// of life. With a long `dead_after` no keepalives are requested, because the kernel resets a
    /// flow after 127 unanswered ones.
    pub fn tunnel(dead_after: Duration) -> Self {
        Self {
            stuck_after: dead_after.max(SERVER.stuck_after),
            idle_after: SERVER.idle_after.max(Some(dead_after)),
            requests_probes: dead_after < EXTRA_PROBES_BELOW,
            ..SERVER
        }
    }
}

/// The apiserver's side, whose responses clients wait for. Retransmissions of a thin stream are 200 ms apart,
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

/// Number of refuted suspicions after which a path counts as lossy: within two minutes for the flows of
/// an endpoint, or on the one flow of an upgrade.
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

//! Faults of a scenario, and random schedules of them.

use std::time::Duration;

/// What goes wrong with an apiserver, its host or the path to it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum FaultKind {
    /// All packets to and from the host are dropped.
    Blackhole,
    /// All packets to the host are dropped; those from it arrive.
    BlackholeOneWay,
    /// A load balancer forgets the established flows: their packets are dropped, or only those in one direction, or they
    /// are reset. New connections work. It does not end.
    ForgetFlows {
        /// The packets from clients are dropped, and those from the server.
        dropped: [bool; 2],
    },
    /// Packets are lost with this probability, in both directions.
    Loss(f64),
    /// Packets take longer.
    Latency(Duration),
    /// SIGSTOP, and SIGCONT at the end.
    Stop,
    /// SIGKILL, and a restart at the end.
    Kill,
    /// SIGTERM, and a restart at the end.
    ShutDown,
    /// Requests hang and `/livez` fails, as without etcd. `/readyz` is ok, as since Kubernetes 1.36.
    Hang,
    /// `/readyz` fails.
    Unready,
    /// Requests take this time.
    Slow(Duration),
    /// Requests are rejected with 429.
    Overload,
    /// The watch cache lags by this time.
    Lag(Duration),
    /// The watch cache loses its history, so that a watch from an older version gets 410. It does not end.
    Compact,
    /// A GOAWAY follows a request with this probability.
    Goaway(f64),
    /// Every request is answered with 403, `/readyz`, too, as by an apiserver that has just started.
    Forbid,
    /// The apiserver has a new serving certificate for new connections. It does not end.
    RenewCertificate,
    /// The path to the aggregated server refuses connects.
    GroupRefused,
    /// All packets on the path to the aggregated server are dropped.
    GroupDark,
    /// The apiserver answers that the aggregated server is unavailable.
    GroupUnavailable,
    /// The apiserver is removed from the set of endpoints. It does not end.
    Remove,
    /// The nodes' upstream is replaced by a reload, so its pools end; the apiserver does not matter. It does not end.
    ReplaceUpstream,
    /// The apiservers do not accept the tokens of service accounts any more. At the end, the clients have new ones.
    RevokeTokens,
    /// A backup of etcd is made. It does not end.
    BackUpEtcd,
    /// etcd is restored from the last backup. The apiservers are killed before, and start again after it. It does not end.
    RestoreEtcd,
    /// SIGSTOP of jackstay on the node of this number, and SIGCONT at the end.
    ProxyStop,
    /// SIGKILL of jackstay on the node of this number, and a restart at the end.
    ProxyKill,
    /// SIGTERM of jackstay on the node of this number. It starts again when it has drained. It does not end.
    ProxyDrain,
}

impl FaultKind {
    /// Whether only requests of the aggregated group fail.
    pub(crate) fn is_of_group(self) -> bool {
        matches!(self, Self::GroupRefused | Self::GroupDark | Self::GroupUnavailable)
    }

    /// Whether it is one of all apiservers or of jackstay, so that the number is not that of an apiserver.
    pub(crate) fn is_of_no_server(self) -> bool {
        matches!(
            self,
            Self::RevokeTokens
                | Self::BackUpEtcd
                | Self::RestoreEtcd
                | Self::ProxyStop
                | Self::ProxyKill
                | Self::ProxyDrain
        )
    }
}

/// A fault of one apiserver.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Fault {
    /// What goes wrong.
    pub kind: FaultKind,
    /// The apiserver, or the node for a fault of jackstay.
    pub server: usize,
    /// When it begins.
    pub at: Duration,
    /// When it ends; `None` for never.
    pub until: Option<Duration>,
}

impl Fault {
    /// Whether the endpoint may still be ill at the end of the scenario.
    pub(crate) fn lasts(&self) -> bool {
        let ends = matches!(
            self.kind,
            FaultKind::ForgetFlows { .. }
                | FaultKind::Goaway(_)
                | FaultKind::Compact
                | FaultKind::RenewCertificate
                | FaultKind::ReplaceUpstream
        ) || self.kind.is_of_group();
        self.until.is_none() && !ends && !self.kind.is_of_no_server()
    }

    /// Whether packets of established connections do not arrive for ever.
    pub(crate) fn drops_packets(&self) -> bool {
        match self.kind {
            FaultKind::Blackhole | FaultKind::BlackholeOneWay => self.until.is_none(),
            FaultKind::ForgetFlows { dropped } => dropped != [false; 2],
            _ => false,
        }
    }
}

/// A random fault of one of the servers, which begins and ends in a window of time.
pub fn random_fault(
    rng: &mut fastrand::Rng,
    servers: usize,
    window: (Duration, Duration),
) -> Fault {
    let kind = match rng.u8(0..14) {
        0 | 1 => FaultKind::Blackhole,
        2 => FaultKind::BlackholeOneWay,
        3 => FaultKind::ForgetFlows { dropped: [true, true] },
        4 => FaultKind::ForgetFlows { dropped: [rng.bool(), false] },
        5 => FaultKind::Loss(0.01 + rng.f64() * 0.09),
        6 => FaultKind::Latency(Duration::from_millis(rng.u64(1..60))),
        7 | 8 => FaultKind::Stop,
        9 | 10 => FaultKind::Kill,
        11 => FaultKind::ShutDown,
        12 => FaultKind::Hang,
        _ => FaultKind::Goaway(rng.f64() * 0.05),
    };
    let length = window.1.saturating_sub(window.0);
    let at = window.0 + length.mul_f64(rng.f64() * 0.5);
    let until = at + length.mul_f64(0.1 + rng.f64() * 0.4);
    Fault { kind, server: rng.usize(0..servers), at, until: Some(until) }
}

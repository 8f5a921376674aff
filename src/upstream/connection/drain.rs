//! Why a connection drains or closes on request, and how urgently its streams should leave.

/// Why a connection takes no new streams any more, or is closed, although it works.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DrainReason {
    /// Nothing has used its class for a while.
    Idle,
    /// Its identity or upstream was removed from the configuration.
    ConfigurationRemoved,
    /// Its credential was replaced.
    CertificateRotated,
    /// Its endpoint was removed from the set.
    EndpointRemoved,
    /// The prober does not need it any more.
    ProbingEnded,
    /// The prober got no response on it.
    ProbeFailed,
    /// A fresh connection to the same endpoint works, this one does not.
    Superseded,
}

/// How urgently streams that can move should leave a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DrainUrgency {
    /// It delivers nothing, or soon may not: its process is stopped, or its endpoint is degraded.
    Immediate,
    /// It works, but its certificate is old or its endpoint was removed.
    Relaxed,
}

impl DrainReason {
    /// Text for the log and `/status`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::ConfigurationRemoved => "removed from the configuration",
            Self::CertificateRotated => "certificate rotated",
            Self::EndpointRemoved => "endpoint removed",
            Self::ProbingEnded => "no longer probed",
            Self::ProbeFailed => "probe failed",
            Self::Superseded => "a fresh connection works, this one does not",
        }
    }

    /// How urgently streams should move to another connection; `None` where they may finish: no
    /// stream is left, or there is no other connection to move to.
    pub fn urgency(self) -> Option<DrainUrgency> {
        match self {
            Self::Idle | Self::ConfigurationRemoved => None,
            Self::CertificateRotated
            | Self::EndpointRemoved
            | Self::ProbingEnded
            | Self::ProbeFailed
            | Self::Superseded => Some(DrainUrgency::Relaxed),
        }
    }
}

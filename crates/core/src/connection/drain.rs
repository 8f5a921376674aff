//! Why jackstay drains or closes a connection, and how urgently its streams leave.

/// Why jackstay drains or closes a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DrainReason {
    /// No stream has used it for a while.
    Idle,
    /// Its upstream was removed from the configuration.
    ConfigurationRemoved,
    /// The certificate of its identity has expired, or the identity was removed from the configuration.
    IdentityUnusable,
    /// Its credential was replaced.
    CertificateRotated,
    /// No request was sent on it: the apiserver does not accept its certificate.
    CertificateRefused,
    /// Its endpoint was removed from the set.
    EndpointRemoved,
    /// The prober has ended.
    ProbingEnded,
    /// The prober received no response on it.
    ProbeFailed,
    /// The apiserver that it has reached behind a balancer is not ready.
    NotReady,
    /// It was opened for one request, whose token the apiserver refuses.
    TokenRefused,
    /// A fresh connection to the same endpoint works; this one does not.
    Superseded,
    /// Its class has too many connections to the endpoint.
    ConnectionLimit,
}

/// How urgently streams that can move should leave a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DrainUrgency {
    /// Its path is lost, or its apiserver is not ready; or it drains, and its PING is late or its endpoint is degraded.
    Immediate,
    /// It works, but its certificate was replaced or its endpoint was removed.
    Relaxed,
}

impl DrainReason {
    /// Every reason.
    pub const ALL: [Self; 12] = [
        Self::Idle,
        Self::ConfigurationRemoved,
        Self::IdentityUnusable,
        Self::CertificateRotated,
        Self::CertificateRefused,
        Self::EndpointRemoved,
        Self::ProbingEnded,
        Self::ProbeFailed,
        Self::NotReady,
        Self::TokenRefused,
        Self::Superseded,
        Self::ConnectionLimit,
    ];

    /// Text for logs and events.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::ConfigurationRemoved => "removed from the configuration",
            Self::IdentityUnusable => "identity expired or removed from the configuration",
            Self::CertificateRotated => "certificate rotated",
            Self::CertificateRefused => "certificate refused",
            Self::EndpointRemoved => "endpoint removed",
            Self::ProbingEnded => "no longer probed",
            Self::ProbeFailed => "probe failed",
            Self::NotReady => "its apiserver is not ready",
            Self::TokenRefused => "token refused",
            Self::Superseded => "a fresh connection works, this one does not",
            Self::ConnectionLimit => "connection limit",
        }
    }

    /// How urgently streams should move to another connection; `None` if they may finish, because there
    /// is no stream or no connection to which it could move.
    pub fn urgency(self) -> Option<DrainUrgency> {
        match self {
            Self::NotReady => Some(DrainUrgency::Immediate),
            Self::CertificateRotated | Self::EndpointRemoved | Self::ConnectionLimit => {
                Some(DrainUrgency::Relaxed)
            }
            Self::Idle
            | Self::ConfigurationRemoved
            | Self::IdentityUnusable
            | Self::CertificateRefused
            | Self::ProbingEnded
            | Self::ProbeFailed
            | Self::TokenRefused
            | Self::Superseded => None,
        }
    }
}

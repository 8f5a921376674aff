//! The states of an endpoint.

/// The order is that of preference for requests, best first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum EndpointState {
    /// Connected, and `/readyz` is ok or is not probed.
    Ready,
    /// Not connected, or connected while `/readyz` has not answered yet.
    Connecting,
    /// Connected, but `/readyz` fails.
    Degraded,
    /// Connected, but the PINGs on every connection are unanswered.
    Suspect,
    /// Answers, but the TLS connection of the probe fails, as with a certificate that the probe does not trust. Only in
    /// an upstream of flows, whose clients make TLS connections of their own.
    Unverified,
    /// Out of service: connects fail, or the process does not answer.
    Ejected,
    /// Does not speak HTTP/2.
    NoH2,
    /// Removed from the set of endpoints.
    Leaving,
}

impl EndpointState {
    /// Every state, in the order of the discriminants.
    pub const ALL: [Self; 8] = [
        Self::Ready,
        Self::Connecting,
        Self::Degraded,
        Self::Suspect,
        Self::Unverified,
        Self::Ejected,
        Self::NoH2,
        Self::Leaving,
    ];

    /// Name in logs, metrics and status.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Ready => "ready",
            Self::Connecting => "connecting",
            Self::Degraded => "degraded",
            Self::Suspect => "suspect",
            Self::Unverified => "unverified",
            Self::Ejected => "ejected",
            Self::NoH2 => "no_h2",
            Self::Leaving => "leaving",
        }
    }

    /// Whether an event for this state is a warning.
    pub fn is_fault(self) -> bool {
        match self {
            Self::Degraded | Self::Suspect | Self::Unverified | Self::Ejected | Self::NoH2 => true,
            Self::Ready | Self::Connecting | Self::Leaving => false,
        }
    }

    /// What the state means for a loss of connections.
    pub fn availability(self) -> Availability {
        match self {
            Self::Ready | Self::Degraded | Self::Unverified | Self::Leaving => {
                Availability::Serving
            }
            Self::Connecting | Self::Suspect => Availability::Uncertain,
            Self::Ejected | Self::NoH2 => Availability::Down,
        }
    }

    /// What the state means for requests, for the log.
    pub fn effect(self) -> &'static str {
        match self {
            Self::Ready => "takes requests",
            Self::Connecting => "no new requests while another is ready",
            Self::Degraded => "no new requests while another is ready; its watches move away",
            Self::Suspect => "no new requests while another is usable; a fresh connection is tried",
            Self::Unverified => {
                "no new connections while another is ready; the probe is retried with backoff"
            }
            Self::Ejected | Self::NoH2 => "no requests; retried with backoff",
            Self::Leaving => "no new requests; its connections drain",
        }
    }
}

/// What a state of an endpoint means for a loss of its connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Availability {
    /// It serves, so only connections were lost.
    Serving,
    /// Not known yet: its connections do not respond, or none is open.
    Uncertain,
    /// Out of service. Its own line reports the fault.
    Down,
}

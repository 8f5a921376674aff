//! The limits of the connections and of the waiting requests of each credential class.

use std::time::Duration;

use crate::admission::turns::Pace;
use crate::credential_class::CredentialClass;

/// Limit of connections of one worker to one endpoint in a class other than identities and proven tokens,
/// so that clients with random tokens cannot open many.
const UNPROVEN_CONNECTIONS: usize = 2;
/// The same limit with the connections that drain.
pub const UNPROVEN_WITH_DRAINING: usize = 4;
/// The connects of a class of clients that have proven nothing to one endpoint. The interval limits what 5,000 nodes
/// with a client that repeats rejected requests cost an apiserver; a client whose first token is valid may have to
/// wait for it. The burst serves a few requests in a row, such as health checks and those of `kubeadm join`.
const UNPROVEN_PACE: Pace = Pace { interval: Duration::from_millis(200), burst: 8 };
/// The same for the class of clients whose tokens keep being rejected.
const SLOWED_PACE: Pace = Pace { interval: Duration::from_secs(1), burst: 4 };
/// Limit of requests that wait for a stream, and of those of an identity.
const MAX_WAITERS: usize = 1000;
const MAX_IDENTITY_WAITERS: usize = 4000;
/// Heartbeats that may wait although so many requests do.
pub const HEARTBEAT_WAITERS: usize = 256;

/// The configured limits of the connections of one worker in one class (`connections` in the configuration).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConnectionLimits {
    /// Connections that a warm class keeps to each endpoint.
    pub min: usize,
    /// Maximum of connections to one endpoint.
    pub max: usize,
    /// Maximum of streams of one connection; the peer may lower it.
    pub max_streams: usize,
}

/// Limit of connections to one endpoint, if the configuration allows `configured`.
pub fn max_connections(class: CredentialClass, configured: usize) -> usize {
    match class {
        CredentialClass::Identity(_) | CredentialClass::Token => configured,
        CredentialClass::UnprovenToken
        | CredentialClass::SlowedToken
        | CredentialClass::Anonymous
        | CredentialClass::Probe
        | CredentialClass::Discovery => UNPROVEN_CONNECTIONS.min(configured),
    }
}

/// The pace of the connects to one endpoint; `None` if they are not paced.
pub(super) fn connect_pace(class: CredentialClass) -> Option<Pace> {
    match class {
        CredentialClass::UnprovenToken | CredentialClass::Anonymous => Some(UNPROVEN_PACE),
        CredentialClass::SlowedToken => Some(SLOWED_PACE),
        CredentialClass::Identity(_)
        | CredentialClass::Token
        | CredentialClass::Probe
        | CredentialClass::Discovery => None,
    }
}

/// Limit of requests that wait for a stream.
pub fn max_waiters(class: CredentialClass) -> usize {
    match class {
        CredentialClass::Identity(_) => MAX_IDENTITY_WAITERS,
        _ => MAX_WAITERS,
    }
}

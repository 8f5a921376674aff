//! The classes of requests that may share connections.

/// The class of a request and of a connection: requests of one class share connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum CredentialClass {
    /// The certificate of one configured subject, by the number of its credential
    /// ([`super::IdentitySlot::number_of`]).
    Identity(usize),
    /// Bearer tokens that have had an authenticated response; no certificate.
    Token,
    /// Bearer tokens that have had none yet. The apiserver sends GOAWAY on a connection with an
    /// invalid token, so these have connections of their own.
    UnprovenToken,
    /// No credential.
    Anonymous,
    /// jackstay's own `/readyz` requests.
    Probe,
    /// jackstay's own watch of `EndpointSlices`, with a credential of its own.
    Discovery,
}

impl CredentialClass {
    /// Name in logs and status.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Identity(_) => "identity",
            Self::Token => "token",
            Self::UnprovenToken => "unproven-token",
            Self::Anonymous => "anonymous",
            Self::Probe => "probe",
            Self::Discovery => "discovery",
        }
    }
}

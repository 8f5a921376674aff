//! The classes of credentials that requests and connections have.

/// The credential class of a request and of a connection. Requests of one class share connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum CredentialClass {
    /// The certificate of one configured subject, by the number of its credential, which is never reused.
    Identity(usize),
    /// Bearer tokens that have had an authenticated response; no certificate.
    Token,
    /// Bearer tokens that have had no authenticated response yet. They have connections of their own,
    /// because the apiserver sends GOAWAY on a connection that carries an invalid token. A connection with many
    /// streams of tokens that are proven meanwhile joins those of [`Self::Token`].
    UnprovenToken,
    /// Bearer tokens without an authenticated response, from clients whose tokens the apiserver keeps rejecting.
    /// They have connections of their own, so that the GOAWAYs that they cause end no connection of other clients.
    SlowedToken,
    /// No credential.
    Anonymous,
    /// jackstay's own `/readyz` requests.
    Probe,
    /// jackstay's own watch of `EndpointSlices`, with a credential of its own.
    Discovery,
}

impl CredentialClass {
    /// Name in logs and `/status`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Identity(_) => "identity",
            Self::Token => "token",
            Self::UnprovenToken => "unproven-token",
            Self::SlowedToken => "slowed-token",
            Self::Anonymous => "anonymous",
            Self::Probe => "probe",
            Self::Discovery => "discovery",
        }
    }
}

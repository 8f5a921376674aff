//! The classes of credentials that requests and connections have, and what each of them proves of a client.

/// The credential class of a request and of a connection. Requests of one class share connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum CredentialClass {
    /// The certificate of one configured subject, by the number of its credential, which is never reused.
    Identity(u32),
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

/// What a client has proven. Clients of a higher rank may hold more memory, and jackstay closes their connections later.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ClientRank {
    /// Nothing, or not yet.
    Unproven,
    /// A token that the apiserver has accepted.
    Token,
    /// A configured identity.
    Identity,
}

impl CredentialClass {
    /// What a client with this credential has proven. jackstay's own requests have the rank of identities.
    pub const fn rank(self) -> ClientRank {
        match self {
            Self::Identity(_) | Self::Probe | Self::Discovery => ClientRank::Identity,
            Self::Token => ClientRank::Token,
            Self::UnprovenToken | Self::SlowedToken | Self::Anonymous => ClientRank::Unproven,
        }
    }

    /// Whether requests of the class carry a token that no response has proven.
    pub const fn is_unproven_token(self) -> bool {
        matches!(self, Self::UnprovenToken | Self::SlowedToken)
    }

    /// Whether an apiserver has proven the credentials of its clients.
    pub const fn is_proven(self) -> bool {
        matches!(self, Self::Identity(_) | Self::Token)
    }

    /// The kind of user in the access log, which does not name the user.
    pub const fn user(self) -> &'static str {
        match self {
            Self::Identity(_) => "identity",
            Self::Token | Self::UnprovenToken | Self::SlowedToken => "token",
            Self::Anonymous | Self::Probe | Self::Discovery => "anonymous",
        }
    }

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rank_and_user_of_each_class() {
        for (class, rank, user) in [
            (CredentialClass::Identity(3), ClientRank::Identity, "identity"),
            (CredentialClass::Token, ClientRank::Token, "token"),
            (CredentialClass::UnprovenToken, ClientRank::Unproven, "token"),
            (CredentialClass::SlowedToken, ClientRank::Unproven, "token"),
            (CredentialClass::Anonymous, ClientRank::Unproven, "anonymous"),
        ] {
            assert_eq!((class.rank(), class.user()), (rank, user), "{class:?}");
            assert_eq!(class.is_unproven_token(), rank == ClientRank::Unproven && user == "token");
        }
    }
}

//! The receive windows of request bodies.
//!
//! They are those of kube-apiserver where the distance counts: 256 KiB for a stream (`resourceBody99Percentile` in
//! `k8s.io/apiserver/pkg/server/secure_serving.go`), which an upload moves in each round trip. A larger window would make
//! no upload faster, because the apiserver has this one.

use std::net::IpAddr;

use jackstay_core::credential_class::ClientRank;

/// The receive windows of request bodies on one connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Windows {
    /// Window of a stream.
    pub stream: u32,
    /// Window of the connection.
    pub connection: u32,
}

impl Windows {
    /// Those of a client on this node without a configured identity. It fills 64 KiB as fast as larger ones; a hundred
    /// connections hold 25 MiB.
    const UNPROVEN: Self = Self { stream: 64 << 10, connection: 256 << 10 };
    /// Those of a remote client without a configured identity.
    const UNPROVEN_REMOTE: Self = Self { stream: 256 << 10, connection: 512 << 10 };
    /// The connection has sixteen windows of a stream, so that other uploads continue while one is stalled
    /// upstream.
    const IDENTITY: Self = Self { stream: 256 << 10, connection: 4 << 20 };

    /// Those of a client of this rank with this address.
    pub fn of(rank: ClientRank, address: IpAddr) -> Self {
        match rank {
            ClientRank::Identity => Self::IDENTITY,
            ClientRank::Token | ClientRank::Unproven if address.to_canonical().is_loopback() => {
                Self::UNPROVEN
            }
            ClientRank::Token | ClientRank::Unproven => Self::UNPROVEN_REMOTE,
        }
    }

    /// Bytes that a body may fill, of which the client has declared `length`.
    pub fn of_body(self, length: Option<u64>) -> usize {
        let window = self.stream as usize;
        length.map_or(window, |length| {
            usize::try_from(length).map_or(window, |length| length.min(window))
        })
    }
}

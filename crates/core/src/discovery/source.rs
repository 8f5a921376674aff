//! What the sources of endpoints offer, and the specification of an endpoint.

use std::collections::BTreeSet;

use super::address::EndpointAddress;

/// Number of rejected entries whose reasons are stored; further ones are only counted.
const MAX_REASONS: usize = 20;

/// What is said of an upstream without endpoints, before the errors of its sources.
pub const NO_ENDPOINT: &str = "no endpoint is known yet";

/// Where endpoints come from. If two sources report an address with different names to verify, the name of
/// the first source in this order is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum EndpointSource {
    /// IP addresses in the configuration.
    Static,
    /// The `endpoints_file`.
    File,
    /// DNS names in the configuration.
    Dns,
    /// The `EndpointSlices` of `default/kubernetes`.
    Slices,
    /// The state file that jackstay wrote.
    State,
}

impl EndpointSource {
    /// All sources, in the order of trust.
    pub const ALL: [Self; 5] = [Self::Static, Self::File, Self::Dns, Self::Slices, Self::State];

    /// Name in logs, metrics, `/status` and the state file.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Static => "static",
            Self::File => "file",
            Self::Dns => "dns",
            Self::Slices => "slices",
            Self::State => "state",
        }
    }

    /// The source with this name ([`Self::as_str`]).
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|source| source.as_str() == name)
    }

    /// Whether the source discovers endpoints. While such a source has endpoints, the configured ones are
    /// only a fallback.
    pub fn discovers(self) -> bool {
        matches!(self, Self::File | Self::Slices)
    }
}

/// The specification of one endpoint. Two specifications with the same address and server name are the
/// same endpoint.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct EndpointSpec {
    /// Host and port.
    pub address: EndpointAddress,
    /// Name that is sent as SNI and verified in the certificate; `None` means the host of the address.
    pub server_name: Option<String>,
    /// Used only while no preferred endpoint is usable; see [`merge`](super::merge).
    pub fallback: bool,
}

impl EndpointSpec {
    /// Where the endpoint is, and the name by which it is verified.
    pub fn identity(&self) -> EndpointIdentity {
        let name = self.server_name.as_deref().unwrap_or_else(|| self.address.tls_name());
        EndpointIdentity::new(&self.address, name)
    }
}

/// What makes an endpoint another one. An address that works by one name may refuse the other.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct EndpointIdentity {
    /// Host and port.
    pub address: EndpointAddress,
    /// The name that is verified in the certificate, in lower case.
    pub verified_name: String,
}

impl EndpointIdentity {
    /// The endpoint at `address` that is verified by this name.
    pub fn new(address: &EndpointAddress, verified_name: &str) -> Self {
        Self { address: address.clone(), verified_name: verified_name.to_ascii_lowercase() }
    }
}

/// An address that a source offers as an endpoint.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Candidate {
    /// Host and port.
    pub address: EndpointAddress,
    /// Name that is verified in the serving certificate, unless the configuration sets
    /// `tls.server_name`. `None` means the host of the address.
    pub server_name: Option<String>,
}

/// The result of one reading of a source.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DiscoveredEndpoints {
    /// Ready endpoints, in the order of the source.
    pub candidates: Vec<Candidate>,
    /// Number of endpoints that the source reports as not ready.
    pub not_ready: usize,
    /// The reasons for the first [`MAX_REASONS`] rejected entries.
    pub rejected: Vec<String>,
    /// Number of all rejected entries.
    pub rejected_count: usize,
}

impl DiscoveredEndpoints {
    /// Records `count` entries that are no valid endpoints.
    pub fn reject(&mut self, reason: String, count: usize) {
        self.rejected_count += count;
        if self.rejected.len() < MAX_REASONS {
            self.rejected.push(reason);
        }
    }
}

/// The last usable answer of a source.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SourceAnswer {
    /// The endpoints that the source offers.
    pub candidates: Vec<Candidate>,
    /// The names of DNS that have not been resolved yet, as their endpoints are verified.
    pub unresolved: BTreeSet<String>,
}

impl SourceAnswer {
    /// Whether the source has answered about a saved endpoint, which then no longer counts: its name was resolved, or is
    /// none of the source any more.
    pub fn is_about(&self, saved: &Candidate) -> bool {
        let is_unresolved = |name: &String| self.unresolved.contains(name);
        !saved.server_name.as_ref().is_some_and(is_unresolved)
    }
}

/// Endpoints from the state file, each with the source that offered it in an earlier run.
pub type SavedEndpoints = Vec<(EndpointSource, Candidate)>;

//! The data that flows from the sources to the endpoint set.

use crate::config::EndpointAddress;
use crate::upstream::endpoint_sources::EndpointSource;

/// Number of rejected entries whose reasons are kept; the rest are only counted.
const MAX_REASONS: usize = 20;

/// An address that a source offers as an endpoint.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Candidate {
    /// Host and port.
    pub address: EndpointAddress,
    /// Name to verify in the serving certificate, unless the configuration sets `tls.server_name`.
    /// `None` means the host of the address.
    pub server_name: Option<String>,
}

/// The result of one reading of a source.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DiscoveredEndpoints {
    /// Ready endpoints, in the order of the source.
    pub candidates: Vec<Candidate>,
    /// Number of endpoints that the source reports as not ready.
    pub not_ready: usize,
    rejected: Vec<String>,
    rejected_count: usize,
}

impl DiscoveredEndpoints {
    /// The result that holds exactly these candidates.
    pub fn of(candidates: Vec<Candidate>) -> Self {
        Self { candidates, ..Self::default() }
    }

    /// Records `count` entries that cannot be endpoints.
    pub fn reject(&mut self, reason: String, count: usize) {
        self.rejected_count += count;
        if self.rejected.len() < MAX_REASONS {
            self.rejected.push(reason);
        }
    }

    /// Why entries were rejected, at most the first 20.
    pub fn rejected(&self) -> &[String] {
        &self.rejected
    }

    /// Number of rejected entries.
    pub fn rejected_count(&self) -> usize {
        self.rejected_count
    }
}

/// The last usable answer of a source.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SourceAnswer {
    /// The endpoints that the source offers.
    pub candidates: Vec<Candidate>,
    /// Every part of the source has answered, so its saved endpoints are obsolete. DNS with two
    /// names is incomplete until both are resolved.
    pub complete: bool,
}

/// Endpoints from the state file, each with the source that offered it in an earlier run.
pub type SavedEndpoints = Vec<(EndpointSource, Candidate)>;

//! The versions of a request: which head an endpoint gets, what follows if it has not reached the version, and what the
//! response shows ([`crate::proxy::consistent_reads`]).

use std::sync::Arc;

use http::{Request, response};
use jackstay_core::pool::EndpointKey;
use jackstay_core::request::attempts::AfterNotReached;

use super::ForwardedRequest;
use crate::proxy::consistent_reads::learner::VersionLearner;
use crate::upstream::connection::Permit;
use crate::upstream::endpoint::Endpoint;
use crate::upstream::resource_versions::ResourceRecord;

impl ForwardedRequest {
    /// The version that the endpoint should have reached.
    pub(super) fn wanted_version(&self) -> Option<(&Arc<ResourceRecord>, u64)> {
        self.resource_versions.as_ref()?.wanted()
    }

    /// The head for an endpoint.
    pub(super) fn head_for(&self, endpoint: &Arc<Endpoint>) -> Request<()> {
        let with_floor = self
            .resource_versions
            .as_ref()
            .and_then(|versions| versions.head(&self.head, endpoint));
        if with_floor.is_some() {
            self.upstream.metrics.version_floor("applied");
        }
        with_floor.unwrap_or_else(|| self.head.clone())
    }

    /// How the request continues after an endpoint that has only this version, besides the endpoints `without_version`.
    /// If none has the wanted one, it is sent without the floor.
    #[cold]
    pub(super) fn after_not_reached(
        &self,
        reached: u64,
        without_version: &[EndpointKey],
        may_ask_other: bool,
    ) -> AfterNotReached {
        let Some(versions) = &self.resource_versions else { return AfterNotReached::Respond };
        let other_ready =
            may_ask_other && self.upstream.has_ready_endpoint_besides(without_version);
        let metrics = &self.upstream.metrics;
        let after = versions.after_not_reached(reached, other_ready);
        match after {
            AfterNotReached::AskOther => metrics.version_floor("redirected"),
            AfterNotReached::SendOriginal => {
                metrics.version_floor("fallen_back");
                versions.lower_floors(&self.upstream);
            }
            AfterNotReached::AskAgain | AfterNotReached::Respond => {}
        }
        after
    }

    /// Learns from the body of a response with this head; `None` if it shows nothing.
    pub(super) fn learner(
        &self,
        head: &response::Parts,
        permit: &Permit,
    ) -> Option<Box<VersionLearner>> {
        let (versions, endpoint) =
            (self.resource_versions.as_ref()?, &permit.connection().endpoint);
        versions.learn(&self.info, head, &self.upstream, endpoint).map(Box::new)
    }
}

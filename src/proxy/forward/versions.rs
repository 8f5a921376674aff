//! The versions of a request: which head an endpoint gets, what follows if it has not reached the version, and what the
//! response shows ([`crate::proxy::consistent_reads`]).

use std::sync::Arc;

use http::{Request, response};
use jackstay_core::request::retry::ATTEMPTS;

use super::ForwardedRequest;
use super::attempt::FailedAttempt;
use crate::proxy::consistent_reads::{NotReached, VersionLearner};
use crate::upstream::connection::Permit;
use crate::upstream::endpoint::Endpoint;
use crate::upstream::resource_versions::ResourceRecord;

impl ForwardedRequest {
    /// The version that the endpoint should have reached.
    pub(super) fn wanted_version(&self) -> Option<(&Arc<ResourceRecord>, u64)> {
        self.resource_versions.as_ref()?.wanted()
    }

    /// Whether jackstay has changed the request, or would, so that its client knows nothing of the version.
    pub(super) fn has_floor(&self) -> bool {
        self.resource_versions.as_ref().is_some_and(|versions| versions.has_floor())
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

    /// Whether the request is sent again after an endpoint that has not reached its version, besides the endpoints
    /// `without_version`. If none has, it is sent without the floor.
    #[cold]
    pub(super) fn may_ask_for_version(
        &self,
        failure: &FailedAttempt,
        without_version: &mut Vec<Arc<Endpoint>>,
        attempt: u32,
    ) -> bool {
        let Some(versions) = &self.resource_versions else { return false };
        let other_ready =
            attempt + 1 < ATTEMPTS && self.upstream.has_ready_endpoint_besides(without_version);
        let metrics = &self.upstream.metrics;
        match versions.after_not_reached(failure.reached, other_ready) {
            NotReached::AskAgain => drop(without_version.pop()),
            NotReached::AskOther => metrics.version_floor("redirected"),
            NotReached::SendOriginal => {
                metrics.version_floor("fallen_back");
                without_version.clear();
                let upstream = self.upstream.pool.upstream();
                if let Some((resource, floor, reached)) = versions.lower_floors(upstream) {
                    metrics.version_floor("reset");
                    let name = &upstream.name;
                    self.upstream.floor_warnings.warn(
                        &format!("upstream {name}: version floor of {resource} lowered"),
                        format_args!(
                            "a client has seen version {floor}, and the newest ready apiserver is at {reached}; \
                             reads may go back once. Was etcd restored from a backup?"
                        ),
                    );
                }
            }
            NotReached::Respond => return false,
        }
        true
    }

    /// Learns from the body of a response with this head; `None` if it shows nothing.
    pub(super) fn learner(
        &self,
        head: &response::Parts,
        permit: &Permit,
    ) -> Option<Box<VersionLearner>> {
        let endpoint = &permit.connection().endpoint;
        let upstream = self.upstream.pool.upstream();
        self.resource_versions.as_ref()?.learn(&self.info, head, upstream, endpoint).map(Box::new)
    }
}

//! The versions of a request: which head an endpoint gets, what follows if it has not reached the version, and what the
//! response shows ([`crate::proxy::consistent_reads`]).

use std::sync::Arc;

use http::Request;
use jackstay_core::reads::AfterNotReached;
use jackstay_core::request::retry::Stage;

use super::ForwardedRequest;
use crate::proxy::attempt::{AttemptInput, Attempts, FailedAttempt, failed};
use crate::proxy::consistent_reads::learner::VersionLearner;
use crate::proxy::upstream_client::UpstreamResponse;
use crate::upstream::endpoint::Endpoint;
use crate::upstream::resource_versions::ResourceRecord;

impl ForwardedRequest {
    /// The version that the endpoint should have reached.
    pub(super) fn wanted_version(
        &self,
        attempts: &Attempts,
    ) -> Option<(&Arc<ResourceRecord>, u64)> {
        self.resource_versions.as_ref()?.wanted(attempts.read()?)
    }

    /// The head for an endpoint.
    pub(super) fn head_for(
        &self,
        endpoint: &Arc<Endpoint>,
        attempts: &mut Attempts,
    ) -> Request<()> {
        self.with_floor(endpoint, attempts).unwrap_or_else(|| self.head.clone())
    }

    fn with_floor(&self, endpoint: &Arc<Endpoint>, attempts: &mut Attempts) -> Option<Request<()>> {
        let read = attempts.read_mut()?;
        let floor = self.resource_versions.as_ref()?.enforced(read)?;
        // Most endpoints have, and what else is known of one takes a lock.
        if floor.is_reached_by(endpoint, read.needed()?) {
            return None;
        }
        let cache = floor.cache_of(endpoint);
        let asked = read.ask(&cache)?;
        let head = read.form().head(&self.head, asked, (cache.server, &floor.record.name))?;
        self.upstream.metrics.version_floor("applied");
        Some(head)
    }

    /// Compares a list with the floor of the client. An older list is a failed attempt.
    pub(super) fn compare(
        &self,
        response: UpstreamResponse,
        attempts: &mut Attempts,
    ) -> Result<UpstreamResponse, FailedAttempt> {
        let (Some(versions), Some(read)) = (&self.resource_versions, attempts.read_mut()) else {
            return Ok(response);
        };
        let UpstreamResponse { head, recv, prefix, permit, .. } = &response;
        let (body, connection) = ((prefix.as_ref(), recv.is_end_stream()), permit.connection());
        let Some(reached) = versions.older_list(read, head, body, &connection.endpoint) else {
            return Ok(response);
        };
        let reason = "the list is older than one that the client has seen";
        Err(FailedAttempt { reached, ..failed(Stage::NotReached, reason, connection) })
    }

    /// The input for a failed attempt. Records what it shows of its endpoint.
    pub(super) fn failed(&self, attempt: usize, failure: FailedAttempt) -> AttemptInput {
        if failure.stage == Stage::NotReached
            && let Some(versions) = &self.resource_versions
        {
            versions.is_at(failure.reached, &failure.connection.endpoint);
        }
        self.record_group_failure(&failure);
        AttemptInput::Failed { attempt, failure }
    }

    /// Executes how the request continues after an endpoint that has not reached its version. If none has, the floors
    /// are lowered.
    #[cold]
    pub(super) fn continue_without_version(&self, after: AfterNotReached, attempts: &Attempts) {
        let metrics = &self.upstream.metrics;
        match after {
            AfterNotReached::AskOther => metrics.version_floor("redirected"),
            AfterNotReached::AskMostRecent => metrics.version_floor("most_recent"),
            AfterNotReached::SendOriginal => {
                metrics.version_floor("fallen_back");
                if let (Some(versions), Some(read)) = (&self.resource_versions, attempts.read()) {
                    versions.lower_floors(read.highest_reached(), &self.upstream);
                }
            }
            AfterNotReached::AskAgain | AfterNotReached::Respond => {}
        }
    }

    /// Learns from the body of a response; `None` if it shows nothing.
    pub(super) fn learner(
        &self,
        response: &UpstreamResponse,
        attempts: &Attempts,
    ) -> Option<Box<VersionLearner>> {
        let (versions, read) = (self.resource_versions.as_ref()?, attempts.read()?);
        let at = (&self.upstream, &response.permit.connection().endpoint);
        versions.learn(read, &self.info, &response.head, at).map(Box::new)
    }
}

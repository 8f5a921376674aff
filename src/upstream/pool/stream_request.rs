//! A request for a stream, and why it gets none.

use std::sync::Arc;

use http::HeaderValue;
use jackstay_core::admission::Refusal;
use jackstay_core::pool::{EndpointKey, Preference, StreamRequirements};
use jackstay_core::request::status_error::StatusError;
use jackstay_net::tls::certificate::Subject;
use tokio::sync::oneshot;

use crate::upstream::connection::Permit;
use crate::upstream::endpoint::Endpoint;
use crate::upstream::resource_versions::ResourceRecord;
use crate::upstream::version_preference::PreferredVersions;

/// A request for a stream: what it requires and prefers.
#[derive(Debug, Clone)]
pub struct StreamRequest<'a> {
    /// What the connection must be like.
    pub required: StreamRequirements,
    /// The resource version that the watch cache of the endpoint should have reached. Endpoints that are known to have
    /// reached it are preferred.
    pub resource_version: Option<(&'a Arc<ResourceRecord>, u64)>,
    /// Endpoints that are not preferred, because the API group of the request fails there.
    pub avoided: Vec<EndpointKey>,
    /// The `Authorization` of the client, with which it may be asked which apiserver a new connection has reached.
    pub authorization: Option<&'a HeaderValue>,
    /// The subject that the client has proven, if the request is sent with a client certificate.
    pub client_subject: Option<&'a Subject>,
    /// The versions that the request prefers. A request that is not a watch has no preference after a failure by
    /// silence, because recently received bytes matter more.
    pub versions: PreferredVersions,
}

impl<'a> StreamRequest<'a> {
    /// Requires only that the connection shows the subject that the client has proven. There is no `Default`,
    /// so that every caller must state the subject.
    pub fn for_client(client_subject: Option<&'a Subject>) -> Self {
        Self {
            required: StreamRequirements::default(),
            resource_version: None,
            avoided: Vec::new(),
            authorization: None,
            client_subject,
            versions: PreferredVersions::default(),
        }
    }

    /// How the request ranks an endpoint.
    pub(super) fn preference(&self, endpoint: &Arc<Endpoint>) -> Preference {
        preference(self.versions, self.resource_version, &self.avoided, endpoint)
    }
}

/// By what a request that waits prefers some endpoints to others of the same state.
#[derive(Debug, Clone)]
pub(super) struct OwnedPreferences {
    versions: PreferredVersions,
    resource_version: Option<(Arc<ResourceRecord>, u64)>,
    avoided: Vec<EndpointKey>,
}

impl OwnedPreferences {
    pub(super) fn of(request: &StreamRequest<'_>) -> Self {
        let resource_version = request.resource_version;
        Self {
            versions: request.versions,
            resource_version: resource_version
                .map(|(record, version)| (Arc::clone(record), version)),
            avoided: request.avoided.clone(),
        }
    }

    /// How the request ranks an endpoint.
    pub(super) fn preference(&self, endpoint: &Arc<Endpoint>) -> Preference {
        let resource_version = self.resource_version.as_ref();
        let resource_version = resource_version.map(|(record, at)| (record, *at));
        preference(self.versions, resource_version, &self.avoided, endpoint)
    }
}

fn preference(
    versions: PreferredVersions,
    resource_version: Option<(&Arc<ResourceRecord>, u64)>,
    avoided: &[EndpointKey],
    endpoint: &Arc<Endpoint>,
) -> Preference {
    let is_behind =
        resource_version.is_some_and(|(record, version)| !record.has_reached(endpoint, version));
    let group_fails = avoided.contains(&endpoint.key());
    Preference { group_fails, version: versions.rank_of(endpoint), is_behind }
}

/// Why a request got no stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Unavailable {
    /// No endpoint can be reached. The text has the reason for each endpoint.
    Unreachable(String),
    /// Connections are live, but have no free stream.
    Exhausted,
    /// The credential of the class is not loaded.
    NoCredential,
}

impl From<&Unavailable> for StatusError {
    fn from(unavailable: &Unavailable) -> Self {
        match unavailable {
            Unavailable::Unreachable(reasons) => Self::no_upstream(reasons),
            Unavailable::Exhausted => Refusal::UpstreamStreams.into(),
            Unavailable::NoCredential => Self::unauthorized(
                "the credential for this identity is not loaded yet, or its certificate has expired",
            ),
        }
    }
}

/// The result of a request for a stream.
pub type Granted = Result<Permit, Unavailable>;

/// A request that waits for a stream.
pub(super) struct Waiter {
    pub(super) long_running: bool,
    pub(super) preferences: OwnedPreferences,
    /// The `Authorization` of the client.
    pub(super) authorization: Option<HeaderValue>,
    pub(super) result: oneshot::Sender<Granted>,
}

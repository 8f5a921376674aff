//! The requirements of a request on the connection that the pool selects, and why it gets none.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use jackstay_core::admission::Refusal;
use jackstay_core::pool::{self, EndpointKey, Preference, Requirements};
use jackstay_core::request::status_error::StatusError;
use tokio::sync::oneshot;

use super::table::connection_key;
use crate::net::tls::certificate::Subject;
use crate::upstream::connection::{Connection, Permit};
use crate::upstream::endpoint::Endpoint;
use crate::upstream::resource_versions::ResourceRecord;
use crate::upstream::version_preference::PreferredVersions;

/// The requirements of a request on the connection that the pool selects.
#[derive(Debug, Clone, Copy)]
pub struct StreamRequirements<'a> {
    /// Whether the request is a watch, which keeps its stream for minutes.
    pub long_running: bool,
    /// The connection on which the request failed before, if it did.
    pub previous_failure: Option<PreviousFailure<'a>>,
    /// Endpoints that must not be used.
    pub excluded_endpoints: &'a [EndpointKey],
    /// When the request lost its previous connection, if it had one.
    pub without_connection_since: Option<Instant>,
    /// Whether the caller holds the watch during a total outage. Then the pool returns an error at once.
    pub may_be_held: bool,
    /// Whether suspect connections are excluded, because the request already waits on one.
    pub live_only: bool,
    /// The resource version that the watch cache of the endpoint should have reached. Endpoints that are known to have
    /// reached it are preferred.
    pub resource_version: Option<(&'a Arc<ResourceRecord>, u64)>,
    /// The subject that the client has proven, if the request is sent with a client certificate.
    pub client_subject: Option<&'a Subject>,
    /// The versions that the request prefers. A request that is not a watch has no preference after a failure by
    /// silence, because recently received bytes matter more.
    pub versions: PreferredVersions,
}

impl<'a> StreamRequirements<'a> {
    /// Requires only that the connection shows the subject that the client has proven. There is no `Default`,
    /// so that every caller must state the subject.
    pub fn for_client(client_subject: Option<&'a Subject>) -> Self {
        Self {
            long_running: false,
            may_be_held: false,
            previous_failure: None,
            excluded_endpoints: &[],
            without_connection_since: None,
            live_only: false,
            resource_version: None,
            client_subject,
            versions: PreferredVersions::default(),
        }
    }

    /// How the request ranks an endpoint.
    pub(super) fn preference(&self, endpoint: &Arc<Endpoint>) -> Preference {
        preference(self.versions, self.resource_version, endpoint)
    }

    /// The requirements without the preferences ([`Self::preference`]). The keys of connections
    /// in it name them for as long as `self` borrows them. Allocates only if endpoints are excluded.
    pub(super) fn plain(&self) -> Requirements {
        let previous_failure = self.previous_failure.map(|failure| match failure {
            PreviousFailure::Silence(at) => pool::PreviousFailure::Silence(connection_key(at)),
            PreviousFailure::Refusal(at) => {
                pool::PreviousFailure::Refusal(connection_key(at), at.endpoint.key())
            }
        });
        Requirements {
            long_running: self.long_running,
            may_be_held: self.may_be_held,
            live_only: self.live_only,
            previous_failure,
            excluded: self.excluded_endpoints.to_vec(),
            without_connection_since: self.without_connection_since,
        }
    }
}

/// What [`Requirements`] leave out: by what a request prefers some endpoints to others of the same state.
#[derive(Debug, Clone)]
pub(super) struct OwnedPreferences {
    versions: PreferredVersions,
    resource_version: Option<(Arc<ResourceRecord>, u64)>,
}

impl OwnedPreferences {
    pub(super) fn of(required: &StreamRequirements<'_>) -> Self {
        let resource_version = required.resource_version;
        Self {
            versions: required.versions,
            resource_version: resource_version
                .map(|(record, version)| (Arc::clone(record), version)),
        }
    }

    /// How the request ranks an endpoint.
    pub(super) fn preference(&self, endpoint: &Arc<Endpoint>) -> Preference {
        let resource_version = self.resource_version.as_ref();
        preference(self.versions, resource_version.map(|(record, at)| (record, *at)), endpoint)
    }
}

fn preference(
    versions: PreferredVersions,
    resource_version: Option<(&Arc<ResourceRecord>, u64)>,
    endpoint: &Arc<Endpoint>,
) -> Preference {
    let is_behind =
        resource_version.is_some_and(|(record, version)| !record.has_reached(endpoint, version));
    Preference { version: versions.rank_of(endpoint), is_behind }
}

/// The connection on which a request failed.
#[derive(Debug, Clone, Copy)]
pub enum PreviousFailure<'a> {
    /// The connection did not respond or was lost. Other connections may have failed with it, so those that
    /// received bytes recently are preferred, whatever their endpoint.
    Silence(&'a Rc<Connection>),
    /// The endpoint of the connection refused the request, so another endpoint is preferred.
    Refusal(&'a Rc<Connection>),
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
    pub(super) result: oneshot::Sender<Granted>,
}

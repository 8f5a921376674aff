//! The requirements of a request on the connection that the pool selects, and why it gets none.

use std::rc::Rc;
use std::sync::Arc;

use std::time::Instant;

use jackstay_core::request::status_error::StatusError;

use crate::net::tls::certificate::Subject;
use crate::upstream::connection::Connection;
use crate::upstream::endpoint::Endpoint;
use crate::upstream::resource_versions::ResourceRecord;
use crate::upstream::version_preference::PreferredVersions;

/// The requirements of a request on the connection that the pool selects.
#[derive(Debug, Clone, Copy)]
pub struct StreamRequirements<'a> {
    /// Whether the request is a watch, which keeps its stream for minutes.
    pub watch: bool,
    /// The connection on which the request failed before, if it did.
    pub previous_failure: Option<PreviousFailure<'a>>,
    /// Endpoints that must not be used.
    pub excluded_endpoints: &'a [Arc<Endpoint>],
    /// When the request lost its previous connection, if it had one.
    pub without_connection_since: Option<Instant>,
    /// Whether the caller holds the watch during a total outage. Then the pool returns an error at once.
    pub held: bool,
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
            watch: false,
            held: false,
            previous_failure: None,
            excluded_endpoints: &[],
            without_connection_since: None,
            live_only: false,
            resource_version: None,
            client_subject,
            versions: PreferredVersions::default(),
        }
    }
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

impl PreviousFailure<'_> {
    /// When the failed connection last became suspect.
    pub fn suspect_since(&self) -> Option<Instant> {
        self.connection().suspect_since()
    }

    /// Whether the failed connection is silent ([`Connection::is_silent`]).
    pub fn was_silent(&self) -> bool {
        matches!(self, Self::Silence(connection) if connection.is_silent())
    }

    pub(super) fn connection(&self) -> &Rc<Connection> {
        match self {
            Self::Silence(connection) | Self::Refusal(connection) => connection,
        }
    }
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
            Unavailable::Exhausted => Self::too_many_requests(
                "every stream to the apiservers is taken: see connections.max and \
                 connections.max_streams",
            ),
            Unavailable::NoCredential => Self::unauthorized(
                "the credential for this identity is not loaded yet, or its certificate has expired",
            ),
        }
    }
}

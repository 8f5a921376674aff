//! What a request requires of the connection that it gets.

use std::rc::Rc;
use std::sync::Arc;

use tokio::time::Instant;

use crate::net::tls::certificate::Subject;
use crate::upstream::connection::Connection;
use crate::upstream::endpoint::Endpoint;

/// What a request requires of the connection that it gets.
#[derive(Debug, Clone, Copy)]
pub struct StreamRequirements<'a> {
    /// It is a watch: it keeps its stream for minutes.
    pub watch: bool,
    /// The connection on which it has just failed.
    pub previous_failure: Option<PreviousFailure<'a>>,
    /// Endpoints that must not be used.
    pub excluded_endpoints: &'a [Arc<Endpoint>],
    /// Since when it has had no working connection, if that is before it asks for a stream.
    pub without_connection_since: Option<Instant>,
    /// The caller holds it during a total outage, so it does not wait here for the end of one.
    pub held: bool,
    /// A suspect connection does not help: it waits on one already.
    pub live_only: bool,
    /// The subject that its client has proven, if it goes upstream with a certificate.
    pub client_subject: Option<&'a Subject>,
}

impl<'a> StreamRequirements<'a> {
    /// Those of a request whose client has proven this subject, and no others. There is no default,
    /// so that every caller names the client.
    pub fn for_client(client_subject: Option<&'a Subject>) -> Self {
        Self {
            watch: false,
            held: false,
            previous_failure: None,
            excluded_endpoints: &[],
            without_connection_since: None,
            live_only: false,
            client_subject,
        }
    }
}

/// The connection on which a request has just failed.
#[derive(Debug, Clone, Copy)]
pub enum PreviousFailure<'a> {
    /// It did not respond or was lost. Other connections may have failed with it, so connections
    /// that received bytes lately are preferred, to whichever endpoint.
    Silence(&'a Rc<Connection>),
    /// Its endpoint refused the request: another endpoint is preferred.
    Refusal(&'a Rc<Connection>),
}

impl PreviousFailure<'_> {
    /// Since when that connection has been suspect.
    pub fn suspect_since(&self) -> Option<Instant> {
        self.connection().suspect_since()
    }

    pub(super) fn connection(&self) -> &Rc<Connection> {
        match self {
            Self::Silence(connection) | Self::Refusal(connection) => connection,
        }
    }
}

//! What it takes to ask for a watch again: its request, and where not to ask.

use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use http::Request;

use crate::proxy::client_certificate::IdentityProof;
use crate::proxy::drain::DrainWatcher;
use crate::proxy::upstream_client::UpstreamClient;
use crate::proxy::watch::request::{Asked, reissued_query, with_query};
use crate::proxy::watch::verdict::Reissue;
use crate::upstream::connection::Connection;
use crate::upstream::endpoint::{Endpoint, EndpointState};
use crate::upstream::pool::ClassPool;

/// More than any watch waits.
const LONGEST_REST: Duration = Duration::from_secs(3600);

/// What is needed to ask again.
pub(super) struct Again {
    pub(super) line: Rc<UpstreamClient>,
    pub(super) class: Rc<ClassPool>,
    pub(super) proof: IdentityProof,
    pub(super) head: Request<()>,
    pub(super) asked: Asked,
    pub(super) drain: DrainWatcher,
    pub(super) content_type: String,
    /// The connection that was lost last.
    pub(super) lost: Option<Rc<Connection>>,
    /// It answered, and refused: rather another server than a fresh connection to it.
    pub(super) refused: bool,
    /// Endpoints that are not to be asked again in this round: their history is too short.
    pub(super) shunned: Vec<Arc<Endpoint>>,
    /// Endpoints that are not to be asked before a time that they have named (Retry-After).
    pub(super) resting: Vec<(Arc<Endpoint>, Instant)>,
}

impl Again {
    /// The head of the request that asks again.
    pub(super) fn head(&self, reissue: &Reissue<'_>) -> Request<()> {
        let query = self.head.uri().query().unwrap_or_default();
        let query = reissued_query(query, &self.asked, reissue);
        let mut head = self.head.clone();
        *head.uri_mut() = with_query(self.head.uri(), &query);
        head
    }

    /// Whether the connections of its class still have a credential: the file of an identity may name
    /// another subject meanwhile.
    pub(super) fn has_credential(&self) -> bool {
        self.line.pool.upstream().credentials.tls(self.class.class()).is_some()
    }

    /// Whether there is an endpoint left to ask in this round.
    pub(super) fn has_peers(&self) -> bool {
        let endpoints = self.line.pool.upstream().endpoints();
        endpoints.iter().any(|e| !self.shunned.iter().any(|shunned| Arc::ptr_eq(shunned, e)))
    }

    /// Whether there is an endpoint that can be asked, other than the last one.
    pub(super) fn has_others(&self) -> bool {
        let lost = self.lost.as_ref().map(|connection| &connection.endpoint);
        self.line.pool.upstream().endpoints().iter().any(|endpoint| {
            lost.is_none_or(|lost| !Arc::ptr_eq(lost, endpoint)) && self.can_be_asked(endpoint)
        })
    }

    fn can_be_asked(&self, endpoint: &Arc<Endpoint>) -> bool {
        use EndpointState::{Ejected, Leaving, NoH2};
        !matches!(endpoint.state(), Ejected | NoH2 | Leaving)
            && !self.shunned.iter().any(|shunned| Arc::ptr_eq(shunned, endpoint))
    }

    /// The last one asked has named a time to be asked again: after this pause.
    pub(super) fn rest_lost(&mut self, now: Instant, pause: Duration) {
        if let Some(lost) = &self.lost {
            let until = now + pause.min(LONGEST_REST);
            self.resting.retain(|(resting, _)| !Arc::ptr_eq(resting, &lost.endpoint));
            self.resting.push((Arc::clone(&lost.endpoint), until));
        }
    }

    /// How long until one of those that can be asked does not rest.
    pub(super) fn until_rested(&self, now: Instant) -> Duration {
        let endpoints = self.line.pool.upstream().endpoints();
        let pauses = endpoints.iter().filter(|endpoint| self.can_be_asked(endpoint)).map(|e| {
            let until = self.resting.iter().find(|(resting, _)| Arc::ptr_eq(resting, e));
            until.map_or(Duration::ZERO, |(_, until)| until.saturating_duration_since(now))
        });
        pauses.min().unwrap_or_default()
    }

    /// Whom not to ask at this time.
    pub(super) fn not_to_ask(&self, at: Instant) -> Vec<Arc<Endpoint>> {
        let resting = self.resting.iter().filter(|(_, until)| *until > at).map(|(e, _)| e);
        self.shunned.iter().chain(resting).cloned().collect()
    }

    /// Whether there is a ready endpoint that was not asked in this round.
    pub(super) fn has_ready(&self) -> bool {
        self.line.has_ready_besides(&self.shunned)
    }

    pub(super) fn shun_lost(&mut self) {
        if let Some(lost) = &self.lost {
            self.shunned.push(Arc::clone(&lost.endpoint));
        }
    }
}

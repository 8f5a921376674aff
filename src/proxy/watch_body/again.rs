//! What it takes to ask for a watch again: its request, and where not to ask.

use std::rc::Rc;
use std::sync::Arc;

use http::Request;

use crate::proxy::closing::Closing;
use crate::proxy::line::Line;
use crate::proxy::watch::request::{Asked, reissued_query, with_query};
use crate::proxy::watch::verdict::Reissue;
use crate::upstream::connection::Connection;
use crate::upstream::endpoint::{Endpoint, EndpointState};
use crate::upstream::pool::ClassPool;

/// What is needed to ask again.
pub(super) struct Again {
    pub(super) line: Rc<Line>,
    pub(super) class: Rc<ClassPool>,
    pub(super) head: Request<()>,
    pub(super) asked: Asked,
    pub(super) closing: Closing,
    pub(super) content_type: String,
    /// The connection that was lost last.
    pub(super) lost: Option<Rc<Connection>>,
    /// It answered, and refused: rather another server than a fresh connection to it.
    pub(super) refused: bool,
    /// Endpoints that are not to be asked again in this round: their history is too short.
    pub(super) shunned: Vec<Arc<Endpoint>>,
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

    /// Whether there is an endpoint left to ask in this round.
    pub(super) fn has_peers(&self) -> bool {
        let endpoints = self.line.pool.upstream().endpoints.load();
        endpoints.iter().any(|e| !self.shunned.iter().any(|shunned| Arc::ptr_eq(shunned, e)))
    }

    /// Whether there is an endpoint that can be asked now, other than the last one.
    pub(super) fn has_others(&self) -> bool {
        use EndpointState::{Ejected, Leaving, NoH2};
        let endpoints = self.line.pool.upstream().endpoints.load();
        let lost = self.lost.as_ref().map(|connection| &connection.endpoint);
        endpoints.iter().any(|e| {
            !matches!(e.state(), Ejected | NoH2 | Leaving)
                && lost.is_none_or(|lost| !Arc::ptr_eq(lost, e))
                && !self.shunned.iter().any(|shunned| Arc::ptr_eq(shunned, e))
        })
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

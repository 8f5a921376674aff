//! The connections of one credential class, and the tables by which [`jackstay_core::pool`] decides on them.

use std::cell::{Cell, RefCell};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use http::HeaderValue;
use jackstay_core::backends::{Backend, BackendId};
use jackstay_core::connection::ConnectionState;
use jackstay_core::pool::limits::max_connections;
use jackstay_core::pool::{Candidate, Class, ConnectionRow, Lane, only_suspect_to};
use jackstay_net::tls::certificate::Subject;

use super::stream_request::{Unavailable, Waiter};
use super::table::{candidate, row};
use crate::upstream::backends::{QuestionCredential, question_credential};
use crate::upstream::connection::{Connection, DrainReason, Permit};
use crate::upstream::credentials::{ClientTls, CredentialClass};
use crate::upstream::endpoint::Endpoint;
use crate::upstream::evacuation::ActiveEvacuations;
use crate::upstream::rebalance::Rebalancer;
use crate::upstream::shared::Upstream;

/// The connections of one class, or those of its heartbeats.
pub struct ClassPool {
    class: CredentialClass,
    lane: Lane,
    /// Decides on the connections, and holds the requests that wait.
    pub(super) machine: RefCell<Class<Waiter>>,
    pub(super) connections: RefCell<Vec<Rc<Connection>>>,
    /// The connections as the latest request saw them. Kept for its memory only.
    table: RefCell<Vec<Candidate>>,
    pub(super) rebalancer: RefCell<Rebalancer>,
    pub(super) evacuations: RefCell<ActiveEvacuations>,
    /// The [`token_hash`] of the last token of a client that an apiserver has refused on a new connection.
    refused_token: Cell<Option<u64>>,
}

/// A hash by which a token is recognised without a copy of it.
fn token_hash(token: &HeaderValue) -> u64 {
    let mut hasher = DefaultHasher::new();
    token.as_bytes().hash(&mut hasher);
    hasher.finish()
}

impl ClassPool {
    /// A pool without connections.
    pub(super) fn new(class: CredentialClass, lane: Lane, now: Instant) -> Self {
        Self {
            class,
            lane,
            machine: RefCell::new(Class::new(class, now)),
            connections: RefCell::default(),
            table: RefCell::default(),
            rebalancer: RefCell::new(Rebalancer::new(now)),
            evacuations: RefCell::default(),
            refused_token: Cell::default(),
        }
    }

    /// The credential of questions on a new connection to this endpoint. If a bearer token is the credential of the class
    /// and none is configured, it is that of the first request that waits, unless that was refused.
    pub(super) fn question_credential(
        &self,
        upstream: &Upstream,
        endpoint: &Endpoint,
        tls: &ClientTls,
    ) -> QuestionCredential {
        let configured = question_credential(upstream, self.class, tls);
        if !matches!(configured, QuestionCredential::None) || !self.asks_with_token(endpoint) {
            return configured;
        }
        let machine = self.machine.borrow();
        let mut waiting = machine.waiters().filter_map(|waiter| waiter.authorization.as_ref());
        let token = waiting.find(|token| self.refused_token.get() != Some(token_hash(token)));
        match token {
            Some(token) => QuestionCredential::Client(token.clone()),
            None if machine.waiting() > 0 => QuestionCredential::RefusedClient,
            None => QuestionCredential::None,
        }
    }

    /// Whether the token of a client shows which apiserver behind the address of the endpoint a connection has reached.
    fn asks_with_token(&self, endpoint: &Endpoint) -> bool {
        let is_asked = |backend: &Backend| !matches!(backend.id, BackendId::Certificate(_));
        matches!(self.class, CredentialClass::Token | CredentialClass::UnprovenToken)
            && endpoint.backend.as_ref().is_some_and(is_asked)
    }

    /// Whether no connection to the endpoint is opened until a request waits, whose token is needed.
    pub(super) fn awaits_token(
        &self,
        upstream: &Upstream,
        endpoint: &Endpoint,
        tls: Option<&ClientTls>,
    ) -> bool {
        let is_none = |tls| {
            matches!(question_credential(upstream, self.class, tls), QuestionCredential::None)
        };
        self.asks_with_token(endpoint) && tls.is_some_and(is_none)
    }

    /// No request waits: drains the connections that were opened for one that does not wait any more.
    pub(super) fn drain_unused(&self) {
        let connections = self.connections.borrow();
        let unused = connections.iter().filter(|one| one.is_for_one_request());
        unused.for_each(|connection| connection.drain(DrainReason::TokenRefused));
    }

    /// An apiserver has refused the credential with which it was asked.
    pub(super) fn token_refused(&self, credential: &QuestionCredential) {
        if let QuestionCredential::Client(token) = credential {
            self.refused_token.set(Some(token_hash(token)));
        }
    }

    /// The credential class that the connections serve.
    pub fn credential_class(&self) -> CredentialClass {
        self.class
    }

    /// Which requests of the class they serve.
    pub(super) fn lane(&self) -> Lane {
        self.lane
    }

    /// Whether a connection is live.
    pub fn has_live(&self) -> bool {
        self.connections.borrow().iter().any(|c| c.state() == ConnectionState::Live)
    }

    /// Whether a connection in service has another credential than this `generation`.
    pub(super) fn has_older(&self, generation: u64) -> bool {
        let connections = self.connections.borrow();
        connections.iter().any(|c| c.generation != generation && c.state().is_in_service())
    }

    /// Whether connections to this endpoint are suspect and none is live.
    pub(super) fn only_suspect_to(&self, endpoint: &Arc<Endpoint>, now: Instant) -> bool {
        self.with_table(now, |table, _| only_suspect_to(table, endpoint.key()))
    }

    /// Whether a request waits on a connection that has to be asked. Then the others are asked, too ([`Self::ask`]). Each
    /// time once.
    pub(super) fn take_question(&self) -> bool {
        let connections = self.connections.borrow();
        connections.iter().filter(|connection| connection.take_question()).count() > 0
    }

    /// Asks all connections by a PING whether they respond.
    pub(super) fn ask(&self, now: Instant) {
        self.connections.borrow().iter().for_each(|connection| connection.ask(now));
    }

    /// Calls `decide` with the present table of connections.
    pub(super) fn with_table<T>(
        &self,
        now: Instant,
        decide: impl FnOnce(&mut Vec<Candidate>, &[Rc<Connection>]) -> T,
    ) -> T {
        let connections = self.connections.borrow();
        let mut table = self.table.borrow_mut();
        table.clear();
        table.extend(connections.iter().map(|connection| candidate(connection, now)));
        decide(&mut table, &connections)
    }

    /// The table of connections for maintenance. `is_slow_head_round`: slow response heads are looked for.
    pub(super) fn rows(&self, is_slow_head_round: bool, now: Instant) -> Vec<ConnectionRow> {
        let connections = self.connections.borrow();
        connections.iter().map(|connection| row(connection, is_slow_head_round, now)).collect()
    }

    /// Number of connections to an endpoint that may be opened.
    pub(super) fn max_connections(&self, upstream: &Upstream) -> usize {
        max_connections(self.class, upstream.config().connections.max)
    }

    /// The permit, if its connection may carry a request of this subject. All connections of a class have the same
    /// subject. If a defect breaks this rule, the request must not be sent with the identity of another client.
    pub(super) fn verified(
        &self,
        permit: Permit,
        client_subject: Option<&Subject>,
    ) -> Result<Permit, Unavailable> {
        if permit.connection().may_carry(client_subject) {
            return Ok(permit);
        }
        tracing::error!(
            class = ?self.class,
            endpoint = &*permit.connection().endpoint.label,
            "connection not used: its certificate has another subject than the client"
        );
        debug_assert!(false, "a connection of another subject in {:?}", self.class);
        Err(Unavailable::NoCredential)
    }
}

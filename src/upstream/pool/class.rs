//! The connections of one credential class, and the tables by which [`jackstay_core::pool`] decides on them.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use http::HeaderValue;
use jackstay_core::backends::BackendId;
use jackstay_core::connection::ConnectionState;
use jackstay_core::pool::limits::max_connections;
use jackstay_core::pool::{Candidate, Class, ConnectionRow, only_suspect_to};
use jackstay_net::tls::certificate::Subject;

use super::stream_request::{Unavailable, Waiter};
use super::table::{candidate, row};
use crate::upstream::backends::{QuestionCredential, question_credential};
use crate::upstream::connection::{Connection, Permit};
use crate::upstream::credentials::{ClientTls, CredentialClass};
use crate::upstream::endpoint::Endpoint;
use crate::upstream::evacuation::ActiveEvacuations;
use crate::upstream::rebalance::Rebalancer;
use crate::upstream::shared::Upstream;

/// The connections of one class.
pub struct ClassPool {
    class: CredentialClass,
    /// Decides on the connections, and holds the requests that wait.
    pub(super) machine: RefCell<Class<Waiter>>,
    pub(super) connections: RefCell<Vec<Rc<Connection>>>,
    /// The connections as the latest request saw them. Kept for its memory only.
    table: RefCell<Vec<Candidate>>,
    pub(super) rebalancer: RefCell<Rebalancer>,
    pub(super) evacuations: RefCell<ActiveEvacuations>,
    tokens: RefCell<ClientTokens>,
}

/// The tokens of clients with which apiservers were asked.
#[derive(Default)]
struct ClientTokens {
    /// The last one that was not refused.
    accepted: Option<HeaderValue>,
    /// The last one that was.
    refused: Option<HeaderValue>,
}

impl ClassPool {
    /// A pool without connections.
    pub(super) fn new(class: CredentialClass, now: Instant) -> Self {
        Self {
            class,
            machine: RefCell::new(Class::new(class, now)),
            connections: RefCell::default(),
            table: RefCell::default(),
            rebalancer: RefCell::new(Rebalancer::new(now)),
            evacuations: RefCell::default(),
            tokens: RefCell::default(),
        }
    }

    /// The credential of questions on a new connection. If a bearer token is the credential of the class and none is
    /// configured, it is that of the first request that waits, unless that was refused.
    pub(super) fn question_credential(
        &self,
        upstream: &Upstream,
        tls: &ClientTls,
    ) -> QuestionCredential {
        let configured = question_credential(upstream, self.class, tls);
        let is_of_tokens =
            matches!(self.class, CredentialClass::Token | CredentialClass::UnprovenToken);
        if !is_of_tokens || !matches!(configured, QuestionCredential::None) {
            return configured;
        }
        let (machine, tokens) = (self.machine.borrow(), self.tokens.borrow());
        let mut waiting = machine.waiters().filter_map(|waiter| waiter.authorization.as_ref());
        let token = waiting.find(|token| tokens.refused.as_ref() != Some(token));
        let token = token.or(tokens.accepted.as_ref()).cloned();
        token.map_or(QuestionCredential::None, QuestionCredential::Client)
    }

    /// An apiserver was asked with this credential.
    pub(super) fn token_asked(&self, credential: &QuestionCredential, is_accepted: bool) {
        let QuestionCredential::Client(token) = credential else { return };
        let mut tokens = self.tokens.borrow_mut();
        if is_accepted {
            tokens.accepted = Some(token.clone());
        } else {
            tokens.accepted.take_if(|accepted| accepted == token);
            tokens.refused = Some(token.clone());
        }
    }

    /// The credential class that the connections serve.
    pub fn credential_class(&self) -> CredentialClass {
        self.class
    }

    /// Whether no connection is opened until a request waits, whose token shows which apiserver it has reached.
    pub(super) fn awaits_token(
        &self,
        endpoint: &Endpoint,
        credential: &QuestionCredential,
    ) -> bool {
        let backend = endpoint.backend.as_ref();
        backend.is_some_and(|backend| matches!(backend.id, BackendId::Address(_)))
            && matches!(credential, QuestionCredential::None)
            && self.class != CredentialClass::Anonymous
            && self.machine.borrow().waiting() == 0
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

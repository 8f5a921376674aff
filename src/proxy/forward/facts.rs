//! What the state machine of the attempts may ask: the state of connections, endpoints, budgets and the body.

use std::rc::Rc;
use std::time::Duration;

use jackstay_core::pool::EndpointKey;
use jackstay_core::reads::Unasked;
use jackstay_core::request::attempts::{
    BodyState, ConnectionFacts, Facts, MAX_PARALLEL, OtherBudget,
};

use super::ForwardedRequest;
use super::slots::Slots;
use crate::proxy::heartbeat;
use crate::proxy::upstream_client;
use crate::upstream::connection::{Connection, ConnectionState};

/// The facts about a request and the attempts that run.
pub(super) struct RequestFacts<'a> {
    request: &'a ForwardedRequest,
    slots: Option<&'a Slots<'a>>,
}

impl ForwardedRequest {
    /// The facts about this request. `slots`: its attempts; `None` while only the first one runs and nothing has
    /// happened to it.
    pub(super) fn facts<'a>(&'a self, slots: Option<&'a Slots<'a>>) -> RequestFacts<'a> {
        RequestFacts { request: self, slots }
    }
}

impl RequestFacts<'_> {
    fn connection_of(&self, attempt: usize) -> Option<&Rc<Connection>> {
        self.slots?.connection(attempt)
    }
}

impl Facts<Rc<Connection>> for RequestFacts<'_> {
    fn connection(&self, connection: &Rc<Connection>) -> ConnectionFacts {
        ConnectionFacts {
            key: connection.key(),
            is_silent: connection.is_silent(),
            is_dead: connection.state() == ConnectionState::Dead,
            suspect_since: connection.suspect_since(),
        }
    }

    fn has_live(&self) -> bool {
        self.request.class.has_live()
    }

    fn ill_health(&self, attempt: usize) -> Option<String> {
        self.connection_of(attempt).and_then(|connection| heartbeat::ill_health(connection))
    }

    fn has_better_endpoint(&self, attempt: usize) -> bool {
        self.connection_of(attempt).is_some_and(|connection| {
            upstream_client::has_better_endpoint(connection, &self.request.upstream)
        })
    }

    fn body(&self) -> BodyState {
        match &self.request.body {
            Some(body) if body.is_aborted() => BodyState::Aborted,
            Some(body) if !body.is_held() => BodyState::NotHeld,
            _ => BodyState::Held,
        }
    }

    fn has_whole_body(&self) -> bool {
        self.request.body.as_ref().is_none_or(|body| body.is_complete())
    }

    fn may_hold(&self) -> bool {
        self.request.upstream.pool.may_hold_new_watch()
    }

    fn take_hedge_token(&self) -> bool {
        self.request.upstream.hedge_budget.take()
    }

    fn may_ask_other(&self, besides: &[EndpointKey], budget: OtherBudget) -> bool {
        let upstream = &self.request.upstream;
        upstream.has_ready_endpoint_besides(besides)
            && match budget {
                OtherBudget::TooOld => upstream.watches.may_retry_too_old(&upstream.metrics),
                OtherBudget::Rejected => upstream.rejected_budget.take(),
            }
    }

    fn record_rejection(&self, endpoint: EndpointKey, pause: Duration) -> Vec<EndpointKey> {
        self.request.upstream.record_rejection(endpoint, pause)
    }

    fn not_asked_after_refusal(&self, endpoint: EndpointKey) -> Option<Vec<EndpointKey>> {
        self.request.upstream.not_asked_after_refusal(endpoint)
    }

    fn take_group_token(&self, late: Option<usize>) -> Option<Vec<EndpointKey>> {
        let connection = |attempt| self.connection_of(attempt);
        let late = late.and_then(|attempt| Some((attempt, connection(attempt)?)));
        let waiting = (0..MAX_PARALLEL).filter_map(connection).map(|one| one.endpoint.key());
        self.request.take_group_token(late, waiting)
    }

    fn may_ask_unavailable_group(&self) -> bool {
        self.request.may_ask_unavailable_group()
    }

    fn unasked(&self, connection: &Rc<Connection>, asked: &[EndpointKey]) -> Unasked {
        let upstream = &self.request.upstream;
        if upstream.has_ready_endpoint_besides(asked) {
            Unasked::Endpoint
        } else if connection.endpoint.is_shared() {
            Unasked::Connection
        } else if upstream.may_hide_apiserver() {
            Unasked::Hidden
        } else {
            Unasked::Nothing
        }
    }
}

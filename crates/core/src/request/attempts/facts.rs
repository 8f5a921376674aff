//! What a step asks the shell: the state of connections and of the body, and the budgets.

use std::time::{Duration, Instant};

use crate::pool::{ConnectionKey, EndpointKey};
use crate::reads::Unasked;

/// What [`super::Attempts::step`] asks the shell. Each method returns at once. Some take a token from a budget or
/// record a rejection.
pub trait Facts<C> {
    /// The state of a connection that an attempt has used.
    fn connection(&self, connection: &C) -> ConnectionFacts;

    /// Whether a connection of the request's class is live.
    fn has_live(&self) -> bool;

    /// Why the connection of this attempt or its endpoint is not healthy; `None` if both are.
    fn ill_health(&self, attempt: usize) -> Option<String>;

    /// Whether the endpoint of this attempt is degraded or fails its probe, and another one is ready.
    fn has_better_endpoint(&self, attempt: usize) -> bool;

    /// How much of the request's body is held.
    fn body(&self) -> BodyState;

    /// Whether the whole body has arrived and is held, so that parallel attempts can send it.
    fn has_whole_body(&self) -> bool;

    /// Whether a new watch may be held.
    fn may_hold(&self) -> bool;

    /// Takes a token from the budget of hedges. One that this step returns ([`super::HedgeOutcome::returns_token`]) is
    /// not there yet.
    fn take_hedge_token(&self) -> bool;

    /// Whether a ready endpoint other than these is left and the budget has a token, which this takes.
    fn may_ask_other(&self, besides: &[EndpointKey], budget: OtherBudget) -> bool;

    /// Records that an endpoint rejects requests for overload for this time. Returns all endpoints that do.
    fn record_rejection(&self, endpoint: EndpointKey, pause: Duration) -> Vec<EndpointKey>;

    /// The endpoints that are not asked after a refusal by this one, if another one may be
    /// ([`crate::request::start_up::not_asked_after`]).
    fn not_asked_after_refusal(&self, endpoint: EndpointKey) -> Option<Vec<EndpointKey>>;

    /// The endpoints that are not asked because the API group of the request fails there, if a ready one is left and the
    /// budget has a token, which this takes. `late`: the attempt whose response head is late; then those of the attempts
    /// that wait are not asked either, and none is if that head has arrived, or if the request may be slow everywhere
    /// ([`crate::request::late_reads`]).
    fn take_group_token(&self, late: Option<usize>) -> Option<Vec<EndpointKey>>;

    /// Whether the API group was available a moment ago, and the budget has a token, which this takes.
    fn may_ask_unavailable_group(&self) -> bool;

    /// Where else a read can be sent after the apiserver of this connection had not reached its version. These endpoints
    /// were asked.
    fn unasked(&self, connection: &C, asked: &[EndpointKey]) -> Unasked;
}

/// The budget that limits requests to another endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OtherBudget {
    /// After a 410.
    TooOld,
    /// After a rejection for overload.
    Rejected,
}

/// The state of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConnectionFacts {
    /// Its key.
    pub key: ConnectionKey,
    /// It shows no evidence of life.
    pub is_silent: bool,
    /// It has ended, or was given up as dead.
    pub is_dead: bool,
    /// When it last became suspect.
    pub suspect_since: Option<Instant>,
}

/// How much of the request's body jackstay holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BodyState {
    /// All that was read, so that it can be sent again from its beginning.
    Held,
    /// Not all that was read.
    NotHeld,
    /// The body is malformed, or the client left before its end.
    Aborted,
}

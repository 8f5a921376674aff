//! What a request of an API group that is not built in keeps, for [`super::forward`].

use std::cell::{Cell, RefCell};
use std::time::Instant;

use http::{HeaderMap, StatusCode};
use jackstay_core::group_health::{self, GroupSignal};
use jackstay_core::pool::EndpointKey;
use jackstay_core::request::info::{RequestInfo, first_value, is_built_in_group};
use jackstay_sys::clock;

use crate::upstream::group_failures::GroupProbe;

/// A request of a group that is not built in.
#[derive(Debug, Default)]
pub struct GroupRequest {
    /// When the first attempt of the round was sent.
    sent_at: Cell<Option<Instant>>,
    /// The attempts of the round whose response heads have arrived, one bit each.
    heads: Cell<u8>,
    /// The attempt that shows whether the group works again at an endpoint, if one is.
    probe: RefCell<Option<GroupProbe>>,
    /// Tokens that the request has taken from the budget of groups.
    tokens: Cell<u8>,
    /// The client sets the time limit of the apiserver, which may be too short for any.
    has_timeout: bool,
}

impl GroupRequest {
    /// `None` if the group of the request is built in.
    pub fn of(info: &RequestInfo) -> Option<Box<Self>> {
        if is_built_in_group(info.api_group()) {
            return None;
        }
        let has_timeout = first_value(info.query(), "timeout").is_some();
        Some(Box::new(Self { has_timeout, ..Self::default() }))
    }

    /// What a response with this head and body shows of the group ([`group_health::signal_of`]).
    pub fn signal_of(
        &self,
        status: StatusCode,
        headers: &HeaderMap,
        body: &[u8],
    ) -> Option<GroupSignal> {
        group_health::signal_of(status, headers, body, self.has_timeout)
    }

    /// The first attempt of a round is sent. It is this probe, if it is one.
    pub fn sent(&self, probe: Option<GroupProbe>) {
        self.sent_at.set(Some(clock::now()));
        self.heads.set(0);
        self.probe.replace(probe);
    }

    /// The response head of an attempt has arrived.
    pub fn head_arrived(&self, attempt: usize) {
        self.heads.set(self.heads.get() | 1 << attempt);
    }

    /// Whether the response head of an attempt has arrived.
    pub fn has_head(&self, attempt: usize) -> bool {
        self.heads.get() & 1 << attempt != 0
    }

    /// When the first attempt of the round was sent.
    pub fn sent_at(&self) -> Option<Instant> {
        self.sent_at.get()
    }

    /// The endpoint of the probe, if the first attempt is one.
    pub fn probed(&self) -> Option<EndpointKey> {
        self.probe.borrow().as_ref().map(GroupProbe::endpoint)
    }

    /// Ends the probe. Returns whether it was sent to this endpoint.
    pub fn take_probe(&self, endpoint: EndpointKey) -> bool {
        self.probe.take().is_some_and(|probe| probe.endpoint() == endpoint)
    }

    /// Counts a token of the budget, if one was taken.
    pub fn count_token(&self, is_taken: bool) {
        self.tokens.set(self.tokens.get().saturating_add(u8::from(is_taken)));
    }

    /// A token goes back to the budget. Returns false if the request has none.
    pub fn return_token(&self) -> bool {
        let tokens = self.tokens.get();
        self.tokens.set(tokens.saturating_sub(1));
        tokens > 0
    }

    /// All tokens go back to the budget.
    pub fn take_tokens(&self) -> u8 {
        self.tokens.take()
    }
}

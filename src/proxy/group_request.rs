//! What the request of an API group keeps, for [`super::forward`].

use std::cell::{Cell, RefCell};
use std::time::Instant;

use http::{HeaderMap, StatusCode};
use jackstay_core::group_health::{self, GroupSignal};
use jackstay_core::pool::EndpointKey;
use jackstay_core::request::info::{RequestInfo, RequestKind, first_value, is_built_in_group};
use jackstay_core::request::late_reads::is_quick;
use jackstay_core::request::retry;
use jackstay_sys::clock;

use crate::upstream::group_failures::GroupProbe;

/// The request of an API group.
#[derive(Debug)]
pub struct GroupRequest {
    served: Served,
    /// When the first attempt of the round was sent.
    sent_at: Cell<Option<Instant>>,
    /// The last hedge, and when it was sent.
    hedge: Cell<Option<(usize, Instant)>>,
    /// The attempts of the round whose response heads have arrived, one bit each.
    heads: Cell<u8>,
    /// The attempt that shows whether the group works again at an endpoint, if one is.
    probe: RefCell<Option<GroupProbe>>,
    /// Tokens that the request has taken from the budget of groups.
    tokens: Cell<u8>,
}

/// By whom the group of a request is served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Served {
    /// By the apiserver itself. `is_object`: the request gets one object.
    BuiltIn { is_object: bool },
    /// By another server, or with the help of one. `has_timeout`: the client sets the time limit of the apiserver, which may
    /// be too short for any.
    Extension { has_timeout: bool },
}

impl GroupRequest {
    /// `None` if the request is not one of a group.
    pub fn of(info: &RequestInfo) -> Option<Box<Self>> {
        let served = if !is_built_in_group(info.api_group()) {
            Served::Extension { has_timeout: first_value(info.query(), "timeout").is_some() }
        } else if info.is_resource() {
            Served::BuiltIn { is_object: info.gets_object() }
        } else {
            return None;
        };
        Some(Box::new(Self {
            served,
            sent_at: Cell::default(),
            hedge: Cell::default(),
            heads: Cell::default(),
            probe: RefCell::default(),
            tokens: Cell::default(),
        }))
    }

    /// By whom it is served.
    pub fn served(&self) -> Served {
        self.served
    }

    /// Whether the apiserver itself does not serve the group alone.
    pub fn is_extension(&self) -> bool {
        matches!(self.served, Served::Extension { .. })
    }

    /// Whether the answer to the request may show that the group works ([`group_health::asks_etcd`]).
    pub fn may_probe(&self, info: &RequestInfo) -> bool {
        retry::may_hedge(info.kind) && (self.is_extension() || group_health::asks_etcd(info))
    }

    /// Whether a response with this status shows that the group works.
    pub fn works_by(&self, info: &RequestInfo, status: StatusCode) -> bool {
        self.is_extension() || group_health::shows_etcd(status) && group_health::asks_etcd(info)
    }

    /// Whether the silence of another endpoint shows that the group fails there, after this attempt was answered. A watch may
    /// wait for the watch cache or for its first event, a read of the watch cache for a version.
    pub fn is_shown_by_silence(&self, info: &RequestInfo, answered: usize) -> bool {
        if self.is_extension() {
            info.kind != RequestKind::Watch
        } else {
            self.is_quick_hedge(answered) && group_health::asks_etcd(info)
        }
    }

    /// What a response with this head and body shows of the group ([`group_health::signal_of`]).
    pub fn signal_of(
        &self,
        status: StatusCode,
        headers: &HeaderMap,
        body: &[u8],
    ) -> Option<GroupSignal> {
        let Served::Extension { has_timeout } = self.served else { return None };
        group_health::signal_of(status, headers, body, has_timeout)
    }

    /// The first attempt of a round is sent at `now`. It is this probe, if it is one.
    pub fn sent(&self, probe: Option<GroupProbe>, now: Instant) {
        self.sent_at.set(Some(now));
        self.hedge.set(None);
        self.heads.set(0);
        self.probe.replace(probe);
    }

    /// A hedge is sent at `now`.
    pub fn hedge_sent(&self, attempt: usize, now: Instant) {
        self.hedge.set(Some((attempt, now)));
    }

    /// Whether this attempt is a hedge that was answered quickly ([`is_quick`]).
    pub fn is_quick_hedge(&self, attempt: usize) -> bool {
        let Some(((hedge, hedged_at), sent_at)) = self.hedge.get().zip(self.sent_at.get()) else {
            return false;
        };
        let since = |at| clock::elapsed(at);
        hedge == attempt && is_quick(since(hedged_at), since(sent_at))
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

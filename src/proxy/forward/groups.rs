//! The API group of a request: which endpoints it prefers, how long it waits for its head, and what its responses show
//! ([`crate::upstream::group_failures`]).

use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use http::StatusCode;
use jackstay_core::group_health::{self, GroupFailure, GroupSignal, SLOW_HEAD, reason};
use jackstay_core::pool::EndpointKey;
use jackstay_core::request::info::RequestKind;
use jackstay_core::request::retry::{self, Stage};
use jackstay_core::request::retry_budget::RetryBudget;
use jackstay_sys::clock;

use super::{ForwardedRequest, Progress};
use crate::proxy::attempt::FailedAttempt;
use crate::proxy::group_request::{GroupRequest, Served};
use crate::proxy::upstream_client::UpstreamResponse;
use crate::upstream::connection::Connection;
use crate::upstream::endpoint::Endpoint;
use crate::upstream::group_failures::GroupFailures;

impl ForwardedRequest {
    fn group_failures(&self) -> &Arc<GroupFailures> {
        &self.upstream.pool.upstream().group_failures
    }

    /// The name under which the failures of the group are remembered.
    fn remembered_group(&self) -> &str {
        group_health::remembered_name(self.info.api_group())
    }

    /// The budget of requests to another endpoint because of the group.
    fn budget_of(&self, group: &GroupRequest) -> &RetryBudget {
        match group.served() {
            Served::BuiltIn { is_object } => self.upstream.late_reads.budget(is_object),
            Served::Extension { .. } => &self.upstream.group_budget,
        }
    }

    /// Adds the share of the request to the budget.
    pub(super) fn deposit_for_group(&self) {
        if let Some(group) = &self.group {
            self.budget_of(group).deposit_less();
        }
    }

    /// The endpoints that the request does not prefer because of its group. `may_probe`: the attempt may be the probe.
    pub(super) fn avoided(&self, may_probe: bool) -> Vec<EndpointKey> {
        let failures = self.group_failures();
        let Some(group) = self.group.as_ref().filter(|_| failures.any_fails()) else {
            return Vec::new();
        };
        let may_probe =
            may_probe && group.may_probe(&self.info) && self.budget_of(group).has_token();
        let name = self.remembered_group();
        match may_probe.then(|| failures.due(name)).flatten() {
            Some(due) => {
                let endpoints = self.upstream.pool.upstream().endpoints();
                let others = endpoints.iter().map(|endpoint| endpoint.key());
                others.filter(|endpoint| *endpoint != due).collect()
            }
            None => failures.avoided(name),
        }
    }

    /// When the response head is late that the request waits for since `from`, so that another endpoint is asked, too; `None`
    /// if it only waits. The head of a watch may wait for the watch cache or for the first event, that of a log for the
    /// kubelet.
    pub(super) fn late_at(&self, from: Instant) -> Option<Instant> {
        let group = self.group.as_ref().filter(|_| retry::may_hedge(self.info.kind))?;
        match group.served() {
            Served::BuiltIn { is_object } => (self.info.kind == RequestKind::Read)
                .then(|| from + self.upstream.late_reads.check_interval(is_object, from)),
            Served::Extension { .. } => {
                let name = self.remembered_group();
                Some(from + self.group_failures().head_wait(name, group.probed()))
            }
        }
    }

    /// Called when an attempt is sent to this endpoint, at `now`. A hedge is no probe.
    pub(super) fn sent_to_group(&self, attempt: usize, endpoint: &Endpoint, now: Instant) {
        let Some(group) = &self.group else { return };
        if attempt > 0 {
            return group.hedge_sent(attempt, now);
        }
        let failures = self.group_failures();
        let may_probe = failures.any_fails() && group.may_probe(&self.info);
        let probe = may_probe.then(|| failures.sent(self.remembered_group(), endpoint.key()));
        group.sent(probe.flatten(), now);
    }

    /// Takes a token for an attempt at another endpoint, if one is ready at which the group does not fail. Returns those at
    /// which it does, and those where attempts wait. `late`: the attempt whose response head is late, and its connection.
    pub(super) fn take_group_token(
        &self,
        late: Option<(usize, &Rc<Connection>)>,
        waiting: impl Iterator<Item = EndpointKey>,
    ) -> Option<Vec<EndpointKey>> {
        let group = self.group.as_ref()?;
        if late.is_some_and(|(attempt, _)| group.has_head(attempt)) {
            return None;
        }
        let mut failing = self.group_failures().avoided(self.remembered_group());
        if let Served::BuiltIn { is_object } = group.served() {
            let ((_, connection), sent_at, now) = (late?, group.sent_at()?, clock::now());
            let on_line = connection.endpoint.line_delay(now).max(connection.rtt());
            let waited = now.saturating_duration_since(sent_at).saturating_sub(on_line);
            let is_suspected = failing.contains(&connection.endpoint.key());
            let is_late = self.upstream.late_reads.is_late(is_object, waited, is_suspected, now);
            if !is_late || connection.last_received() <= sent_at {
                return None;
            }
            failing.extend(self.upstream.rejecting());
        }
        failing.extend(waiting);
        let is_left = self.upstream.has_ready_endpoint_besides(&failing);
        self.take_token(|| is_left && self.budget_of(group).take()).then_some(failing)
    }

    /// Whether the group, which is not built in, was available a moment ago, and a token was taken.
    pub(super) fn may_ask_unavailable_group(&self) -> bool {
        let (failures, api_group) = (self.group_failures(), self.info.api_group());
        let failing = failures.avoided(api_group);
        let is_disputed = !failing.is_empty() && self.upstream.has_ready_endpoint_besides(&failing);
        let budget = &self.upstream.group_budget;
        self.take_token(|| {
            failures.unavailable(api_group, is_disputed) && budget.take_unreserved(is_disputed)
        })
    }

    /// Counts the token that `take` takes. Returns whether it did.
    fn take_token(&self, take: impl FnOnce() -> bool) -> bool {
        let Some(group) = &self.group else { return false };
        let is_taken = take();
        group.count_token(is_taken);
        is_taken
    }

    /// Puts back the token of a hedge that was not sent.
    pub(super) fn return_group_token(&self) {
        if let Some(group) = &self.group
            && group.return_token()
        {
            self.budget_of(group).release();
        }
    }

    /// Records what a failed attempt shows of the group at its endpoint.
    pub(super) fn record_group_failure(&self, failure: &FailedAttempt) {
        let Some(group) = &self.group else { return };
        let endpoint = &failure.connection.endpoint;
        match &failure.response {
            Some(response) if failure.stage == Stage::GroupFailed => {
                self.group_failed(endpoint, &reason(&response.1), false);
            }
            // Nothing is known about the path.
            _ => {
                group.take_probe(endpoint.key());
            }
        }
    }

    /// Records that the endpoint of an attempt has not answered, while another one did.
    pub(super) fn record_silent_group(
        &self,
        silent: (usize, &Rc<Connection>),
        response: (usize, &UpstreamResponse),
    ) {
        let Some(group) = &self.group else { return };
        let shows = group.is_shown_by_silence(&self.info, response.0);
        if shows && !group.has_head(silent.0) && !response.1.head.status.is_server_error() {
            let reason = "no response, while another apiserver has answered";
            self.group_failed(&silent.1.endpoint, reason, true);
        }
    }

    fn group_failed(&self, endpoint: &Endpoint, reason: &str, is_silent: bool) {
        let Some(group) = &self.group else { return };
        let is_probe = group.take_probe(endpoint.key());
        let failure = GroupFailure { reason, is_silent, is_probe };
        let (name, reporter) = (self.remembered_group(), self.upstream.pool.upstream().reporter());
        self.group_failures().failed(name, endpoint, failure, reporter);
    }

    /// Records what a response for the client shows. It is that of this attempt of its round.
    pub(super) fn record_response(
        &self,
        response: &UpstreamResponse,
        progress: &Progress<'_>,
        attempt: usize,
    ) {
        let UpstreamResponse { head, prefix, recv, permit, .. } = response;
        let endpoint = &permit.connection().endpoint;
        let whole = prefix.as_ref().filter(|_| recv.is_end_stream());
        let upstream = self.upstream.pool.upstream();
        if head.status == StatusCode::INTERNAL_SERVER_ERROR
            && let Some(body) = whole
        {
            self.group_failures().webhooks.look_at(body, endpoint, upstream.reporter());
        }
        let Some(group) = &self.group else { return };
        // A safe request with such a response has failed before. A write may be late because of an admission webhook.
        let signal =
            whole.and_then(|body| Some((group.signal_of(head.status, &head.headers, body)?, body)));
        match signal {
            Some((GroupSignal::Failed, body)) if head.status != StatusCode::GATEWAY_TIMEOUT => {
                return self.group_failed(endpoint, &reason(body), false);
            }
            Some(_) => return,
            None => {}
        }
        // These may be responses of filters before the aggregator.
        if matches!(head.status.as_u16(), 401 | 403 | 429) {
            group.take_probe(endpoint.key());
            return;
        }
        let sent_at = group.sent_at().unwrap_or(progress.requested_at);
        if group.probed().is_some() || self.group_failures().any_fails() {
            let is_probe = group.take_probe(endpoint.key());
            if group.works_by(&self.info, head.status) {
                let (name, sent) = (self.remembered_group(), (sent_at, is_probe));
                self.group_failures().answered(name, endpoint, sent, upstream.reporter());
            }
        }
        let is_hedged = progress.attempts.is_hedged_as_slow();
        if let Served::BuiltIn { is_object } = group.served() {
            if is_hedged && progress.attempts.hedges_sent() > 0 {
                let is_quick = group.is_quick_hedge(attempt);
                self.upstream.late_reads.answered(is_object, is_quick, clock::now());
            }
            return;
        }
        // A hedge of a late head that did not answer first has cost its token.
        if attempt > 0 || !is_hedged {
            self.upstream.group_budget.release_all(group.take_tokens());
        }
        let latency = clock::elapsed(sent_at);
        let is_example = attempt == 0 && self.info.kind == RequestKind::Read;
        if is_example && head.status.is_success() && latency >= SLOW_HEAD {
            self.group_failures().took(self.info.api_group(), latency);
        }
    }
}

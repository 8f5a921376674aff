//! The API group of a request that is not built in: which endpoints it prefers, how long it waits for its head, and what its
//! responses show ([`crate::upstream::group_failures`]).

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use http::StatusCode;
use jackstay_core::group_health::{GroupFailure, GroupSignal, SLOW_HEAD, reason};
use jackstay_core::pool::EndpointKey;
use jackstay_core::request::info::RequestKind;
use jackstay_core::request::retry;
use jackstay_core::request::retry::Stage;
use jackstay_sys::clock;

use super::{ForwardedRequest, Progress};
use crate::proxy::attempt::FailedAttempt;
use crate::proxy::upstream_client::UpstreamResponse;
use crate::upstream::connection::Connection;
use crate::upstream::endpoint::Endpoint;
use crate::upstream::group_failures::GroupFailures;

impl ForwardedRequest {
    fn group_failures(&self) -> &Arc<GroupFailures> {
        &self.upstream.pool.upstream().group_failures
    }

    /// The endpoints that the request does not prefer because of its group. `may_probe`: the attempt may be the probe.
    pub(super) fn avoided(&self, may_probe: bool) -> Vec<EndpointKey> {
        if self.group.is_none() || !self.group_failures().any_fails() {
            return Vec::new();
        }
        let may_probe =
            may_probe && retry::may_hedge(self.info.kind) && self.upstream.group_budget.has_token();
        let (failures, name) = (self.group_failures(), self.info.api_group());
        match may_probe.then(|| failures.due(name)).flatten() {
            Some(due) => {
                let endpoints = self.upstream.pool.upstream().endpoints();
                let others = endpoints.iter().map(|endpoint| endpoint.key());
                others.filter(|endpoint| *endpoint != due).collect()
            }
            None => failures.avoided(name),
        }
    }

    /// How long the request waits for its response head before another endpoint is asked, too; `None` if it only waits.
    pub(super) fn head_wait(&self) -> Option<Duration> {
        let group = self.group.as_ref().filter(|_| retry::may_hedge(self.info.kind))?;
        Some(self.group_failures().head_wait(self.info.api_group(), group.probed()))
    }

    /// Called when an attempt is sent to this endpoint. A hedge is no probe.
    pub(super) fn sent_to_group(&self, attempt: usize, endpoint: &Endpoint) {
        let Some(group) = self.group.as_ref().filter(|_| attempt == 0) else { return };
        let may_probe = retry::may_hedge(self.info.kind);
        let failures = self.group_failures();
        let probe = may_probe.then(|| failures.sent(self.info.api_group(), endpoint.key()));
        group.sent(probe.flatten());
    }

    /// Takes a token for an attempt at another endpoint, if one is ready at which the group does not fail. Returns those at
    /// which it does, and those where attempts wait. `late`: the attempt whose response head is late.
    pub(super) fn take_group_token(
        &self,
        late: Option<usize>,
        waiting: impl Iterator<Item = EndpointKey>,
    ) -> Option<Vec<EndpointKey>> {
        let group = self.group.as_ref()?;
        if late.is_some_and(|attempt| group.has_head(attempt)) {
            return None;
        }
        let mut failing = self.group_failures().avoided(self.info.api_group());
        failing.extend(waiting);
        let is_taken =
            self.upstream.has_ready_endpoint_besides(&failing) && self.upstream.group_budget.take();
        group.count_token(is_taken);
        is_taken.then_some(failing)
    }

    /// Whether the group was available a moment ago, and a token was taken.
    pub(super) fn may_ask_unavailable_group(&self) -> bool {
        let Some(group) = &self.group else { return false };
        let (failures, api_group) = (self.group_failures(), self.info.api_group());
        let failing = failures.avoided(api_group);
        let is_disputed = !failing.is_empty() && self.upstream.has_ready_endpoint_besides(&failing);
        let is_taken = failures.unavailable(api_group, is_disputed)
            && self.upstream.group_budget.take_unreserved(is_disputed);
        group.count_token(is_taken);
        is_taken
    }

    /// Puts back the token of a hedge that was not sent.
    pub(super) fn return_group_token(&self) {
        if let Some(group) = &self.group
            && group.return_token()
        {
            self.upstream.group_budget.release();
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
        response: &UpstreamResponse,
    ) {
        let has_head = self.group.as_ref().is_none_or(|group| group.has_head(silent.0));
        if !has_head && !response.head.status.is_server_error() {
            let reason = "no response, while another apiserver has answered";
            self.group_failed(&silent.1.endpoint, reason, true);
        }
    }

    fn group_failed(&self, endpoint: &Endpoint, reason: &str, is_silent: bool) {
        let Some(group) = &self.group else { return };
        let is_probe = group.take_probe(endpoint.key());
        let failure = GroupFailure { reason, is_silent, is_probe };
        let (name, reporter) = (self.info.api_group(), self.upstream.pool.upstream().reporter());
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
        let now = clock::now();
        let sent_at = group.sent_at().unwrap_or(progress.requested_at);
        if group.probed().is_some() || self.group_failures().any_fails() {
            let is_probe = group.take_probe(endpoint.key());
            let (name, sent) = (self.info.api_group(), (sent_at, is_probe));
            self.group_failures().answered(name, endpoint, sent, upstream.reporter());
        }
        // A hedge of a late head that did not answer first has cost its token.
        if attempt > 0 || !progress.attempts.is_hedged_as_slow() {
            self.upstream.group_budget.release_all(group.take_tokens());
        }
        let latency = now.saturating_duration_since(sent_at);
        let is_example = attempt == 0 && self.info.kind == RequestKind::Read;
        if is_example && head.status.is_success() && latency >= SLOW_HEAD {
            self.group_failures().took(self.info.api_group(), latency);
        }
    }
}

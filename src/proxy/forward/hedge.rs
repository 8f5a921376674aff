//! Hedging: a second attempt in parallel with one that waits on a connection in trouble.
//!
//! The response that arrives first is used, and the other attempt is cancelled. Only requests that may
//! reach a handler twice are hedged ([`retry::may_hedge`]), and only while the [budget] lasts.
//!
//! [budget]: jackstay_core::request::retry_budget

use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use jackstay_core::request::retry;
use jackstay_core::request::retry::Stage;
use tokio::time::sleep;

use super::ForwardedRequest;
use super::attempt::{Attempt, FailedAttempt};
use crate::proxy::upstream_client::{
    UpstreamResponse, has_better_endpoint, until_next_hedge, until_troubled,
};
use crate::upstream::connection::{Connection, Permit};
use crate::upstream::endpoint::ProbeTrigger;
use crate::upstream::pool::{PreviousFailure, StreamRequirements};

/// Maximum number of parallel attempts, the first included. The connection of a hedge may get into trouble
/// too: a switch that loses its flow table breaks all connections.
const MAX_PARALLEL: u32 = 4;

/// How often a request on a silent connection checks whether another connection of its class is still live.
const LIVE_CHECK_INTERVAL: Duration = Duration::from_millis(100);

impl ForwardedRequest {
    /// Makes an attempt, the number `depth` of the parallel ones, and hedges it if its connection gets into
    /// trouble.
    pub(super) async fn attempt(
        &self,
        permit: Permit,
        depth: u32,
    ) -> Result<UpstreamResponse, FailedAttempt> {
        let connection = Rc::clone(permit.connection());
        let head = self.head_for(&connection.endpoint);
        let attempt = Attempt::start(permit, head, self.body.as_ref())?;
        if let Some(unproven) = &self.unproven {
            unproven.sent();
        }
        let mut response =
            pin!(attempt.response(self.info.kind, self.resource_versions.as_deref()));
        tokio::select! {
            biased;
            result = &mut response => return result,
            () = until_troubled(&connection, &self.upstream) => {}
        }
        // Boxed, so that the futures of other attempts do not grow by its size.
        Box::pin(self.hedge(response, connection, depth)).await
    }

    /// Waits for the response of an attempt whose connection is in trouble, and sends hedges.
    async fn hedge(
        &self,
        first: Pin<&mut impl Future<Output = Result<UpstreamResponse, FailedAttempt>>>,
        connection: Rc<Connection>,
        depth: u32,
    ) -> Result<UpstreamResponse, FailedAttempt> {
        let is_safe = retry::may_hedge(self.info.kind);
        let mut first = pin!(self.response_or_loss(first, &connection, is_safe));
        let has_whole_body = self.body.as_ref().is_none_or(|body| body.is_complete());
        if depth == MAX_PARALLEL || !is_safe || !has_whole_body {
            return first.await;
        }
        connection.endpoint.probe.request(ProbeTrigger::PassiveEvidence);
        let hedges_before = self.hedges_sent.get();
        let (result, outcome) = loop {
            if !self.upstream.hedge_budget.take() {
                self.upstream.metrics.hedged("over_budget");
                return first.await;
            }
            let mut second = self.second_attempt(Rc::clone(&connection), depth + 1);
            tokio::select! {
                biased;
                result = &mut first => match result {
                    Ok(response) => break (Ok(response), "original"),
                    Err(failure) if self.is_given_up(&connection) => break (Err(failure), "failed"),
                    Err(failure) => break match second.await {
                        Some(response) => (Ok(response), "hedge"),
                        None => (Err(failure), "failed"),
                    },
                },
                result = &mut second => if let Some(response) = result {
                    break (Ok(response), "hedge");
                },
            }
            // The second attempt found no connection or failed. The first one may wait 20 s for a stopped
            // apiserver, and another endpoint may return before that. Boxed, because it is rare.
            tokio::select! {
                biased;
                result = &mut first => {
                    let outcome = if result.is_ok() { "original" } else { "failed" };
                    break (result, outcome);
                }
                () = Box::pin(until_next_hedge(&connection, &self.upstream)) => {}
            }
        };
        if self.hedges_sent.get() > hedges_before {
            self.upstream.metrics.hedged(outcome);
        }
        result
    }

    /// Makes an attempt on another connection than `connection`. Returns `None` if no other connection is
    /// available or the attempt fails. Boxed, so that the futures of other attempts do not grow by its size.
    fn second_attempt(
        &self,
        connection: Rc<Connection>,
        depth: u32,
    ) -> Pin<Box<dyn Future<Output = Option<UpstreamResponse>> + '_>> {
        Box::pin(async move {
            // All connections to a degraded endpoint are in trouble.
            let excluded = has_better_endpoint(&connection, &self.upstream)
                .then(|| Arc::clone(&connection.endpoint));
            let silence = PreviousFailure::Silence(&connection);
            let requirements = self.stream_requirements(Some(silence), excluded.as_slice());
            let requirements = StreamRequirements { live_only: true, ..requirements };
            let Ok(permit) = self.upstream.pool.acquire(&self.class, requirements).await else {
                self.upstream.hedge_budget.release();
                self.upstream.metrics.hedged("nobody");
                return None;
            };
            self.hedges_sent.set(self.hedges_sent.get() + 1);
            self.attempt(permit, depth).await.ok()
        })
    }

    /// Waits for a response until its connection is considered lost, or a safe request is given up
    /// ([`Self::is_given_up`]).
    async fn response_or_loss(
        &self,
        response: Pin<&mut impl Future<Output = Result<UpstreamResponse, FailedAttempt>>>,
        connection: &Rc<Connection>,
        is_safe: bool,
    ) -> Result<UpstreamResponse, FailedAttempt> {
        let reason = tokio::select! {
            biased;
            result = response => return result,
            reason = connection.no_response_expected(is_safe) => reason,
            () = self.given_up(connection), if is_safe => "PING unanswered",
        };
        Err(FailedAttempt::new(Stage::NoHead, reason, connection))
    }

    /// Whether a safe request on `connection` waits no longer for its response: the connection is silent, and no
    /// other one is live. The pool then holds the request, or the client gets an error. A stopped apiserver would
    /// answer after 20 s at the earliest, when the connection is dead, and kubelet gives up its lease after 10 s.
    fn is_given_up(&self, connection: &Connection) -> bool {
        connection.is_silent() && !self.class.has_live()
    }

    /// Waits for [`Self::is_given_up`].
    async fn given_up(&self, connection: &Connection) {
        while !self.is_given_up(connection) {
            if connection.is_silent() {
                sleep(LIVE_CHECK_INTERVAL).await;
            } else {
                connection.changed().await;
            }
        }
    }
}

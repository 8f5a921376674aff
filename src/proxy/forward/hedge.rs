//! A second attempt beside one that waits on a connection in trouble.
//!
//! The first response wins, and the other attempt is cancelled. Only requests that may reach a handler
//! twice are hedged ([`retry::may_hedge`]), and only while the [budget] lasts.
//!
//! [budget]: crate::proxy::retry_budget

use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::Arc;

use super::ForwardedRequest;
use super::attempt::{Attempt, FailedAttempt};
use crate::proxy::retry::{self, Stage};
use crate::proxy::upstream_client::{
    UpstreamResponse, has_better_endpoint, until_next_hedge, until_troubled,
};
use crate::upstream::connection::{Connection, Permit};
use crate::upstream::endpoint::ProbeTrigger;
use crate::upstream::pool::{PreviousFailure, StreamRequirements};

/// Attempts side by side, the first included. The connection of a hedge may get into trouble too: a
/// switch that loses its flow table breaks all connections.
const MAX_PARALLEL: u32 = 4;

impl ForwardedRequest {
    /// Makes attempt number `depth` of those side by side, and hedges it if its connection gets into
    /// trouble.
    pub(super) async fn attempt(
        &self,
        permit: Permit,
        depth: u32,
    ) -> Result<UpstreamResponse, FailedAttempt> {
        let connection = Rc::clone(permit.connection());
        let attempt = Attempt::start(permit, self.head.clone(), self.body.as_ref())?;
        let mut response = pin!(attempt.response(self.info.kind));
        tokio::select! {
            biased;
            result = &mut response => return result,
            () = until_troubled(&connection, &self.upstream) => {}
        }
        // Boxed, as it is rare.
        Box::pin(self.hedge(response, connection, depth)).await
    }

    /// Waits for the response of an attempt whose connection is in trouble, and sends hedges.
    async fn hedge(
        &self,
        first: Pin<&mut impl Future<Output = Result<UpstreamResponse, FailedAttempt>>>,
        connection: Rc<Connection>,
        depth: u32,
    ) -> Result<UpstreamResponse, FailedAttempt> {
        let safe = retry::may_hedge(self.info.kind);
        let mut first = pin!(until_given_up(first, &connection, safe));
        let is_sent = self.body.as_ref().is_none_or(|body| body.is_complete());
        if depth == MAX_PARALLEL || !safe || !is_sent {
            return first.await;
        }
        connection.endpoint.probe.request(ProbeTrigger::PassiveEvidence);
        let hedges_before = self.hedges_sent.get();
        let (result, winner) = loop {
            if !self.upstream.hedge_budget.take() {
                self.upstream.metrics.hedged("over_budget");
                return first.await;
            }
            let mut second = self.second_attempt(Rc::clone(&connection), depth + 1);
            tokio::select! {
                biased;
                result = &mut first => match result {
                    Ok(response) => break (Ok(response), "original"),
                    Err(failure) => break match second.await {
                        Some(response) => (Ok(response), "hedge"),
                        None => (Err(failure), "failed"),
                    },
                },
                result = &mut second => if let Some(response) = result {
                    break (Ok(response), "hedge");
                },
            }
            // No connection was available, or the second attempt failed too. jackstay waits 20 s for a
            // stopped process, and another endpoint may return sooner. Boxed, as it is rare.
            tokio::select! {
                biased;
                result = &mut first => break (result, "original"),
                () = Box::pin(until_next_hedge(&connection, &self.upstream)) => {}
            }
        };
        if self.hedges_sent.get() > hedges_before {
            self.upstream.metrics.hedged(winner);
        }
        result
    }

    /// Makes an attempt on another connection than `connection`; `None` if none is available, or if it
    /// fails. Boxed: it is rare, and without it every request would carry room for it.
    fn second_attempt(
        &self,
        connection: Rc<Connection>,
        depth: u32,
    ) -> Pin<Box<dyn Future<Output = Option<UpstreamResponse>> + '_>> {
        Box::pin(async move {
            // The other connections to a degraded endpoint are no better.
            let degraded = has_better_endpoint(&connection, &self.upstream);
            let excluded = degraded.then(|| Arc::clone(&connection.endpoint));
            let need = self.need(Some(PreviousFailure::Silence(&connection)), excluded.as_slice());
            let need = StreamRequirements { live_only: true, ..need };
            let Ok(permit) = self.upstream.pool.acquire(&self.class, need).await else {
                self.upstream.hedge_budget.release();
                self.upstream.metrics.hedged("nobody");
                return None;
            };
            self.hedges_sent.set(self.hedges_sent.get() + 1);
            self.attempt(permit, depth).await.ok()
        })
    }
}

/// Waits for a response until its connection is given up.
async fn until_given_up(
    response: Pin<&mut impl Future<Output = Result<UpstreamResponse, FailedAttempt>>>,
    connection: &Rc<Connection>,
    safe: bool,
) -> Result<UpstreamResponse, FailedAttempt> {
    tokio::select! {
        biased;
        result = response => result,
        why = connection.no_response_expected(safe) => {
            Err(FailedAttempt::new(Stage::NoHead, why, connection))
        }
    }
}

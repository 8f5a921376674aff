//! Reserves a stream for each request, or reports why none is available.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, timeout_at};

use super::class::ClassPool;
use super::requirements::StreamRequirements;
use super::{Pool, TICK};
use crate::upstream::connection::Permit;
use crate::upstream::endpoint::Endpoint;

/// How long a request waits for a usable connection while no connection is live, counted from the loss of
/// its previous connection if it had one. So the client receives its response within 1.5 s.
pub(in crate::upstream) const UNAVAILABLE_AFTER: Duration = Duration::from_millis(1_200);
/// How long a request waits for a free stream while all live connections are full.
const EXHAUSTED_AFTER: Duration = Duration::from_secs(1);

/// Why a request got no stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Unavailable {
    /// No endpoint can be reached. The text has the reason for each endpoint.
    Unreachable(String),
    /// Connections are live, but have no free stream.
    Exhausted,
    /// The credential of the class is not loaded.
    NoCredential,
}

impl Pool {
    /// Reserves a stream on the best connection, or waits for a free one.
    ///
    /// # Errors
    /// Every endpoint has failed, or the time limit is over.
    pub async fn acquire(
        &self,
        class: &Rc<ClassPool>,
        required: StreamRequirements<'_>,
    ) -> Result<Permit, Unavailable> {
        let now = Instant::now();
        class.mark_used(now);
        if required.held && self.is_total_outage() {
            return Err(Unavailable::Unreachable(self.reasons(class)));
        }
        if let Some(permit) = class.reserve_stream(required, &self.upstream, now, false) {
            if class.is_nearly_full(&permit, now) {
                self.maintain();
            }
            return Ok(permit);
        }
        // Boxed, so that the future of a request that does not wait is small.
        Box::pin(self.wait(class, required, now)).await
    }

    /// Reserves a stream on a live connection if one has a free stream now.
    pub fn try_acquire(
        &self,
        class: &Rc<ClassPool>,
        required: StreamRequirements<'_>,
    ) -> Option<Permit> {
        class.reserve_stream(required, &self.upstream, Instant::now(), false)
    }

    #[cold]
    async fn wait(
        &self,
        class: &Rc<ClassPool>,
        required: StreamRequirements<'_>,
        start: Instant,
    ) -> Result<Permit, Unavailable> {
        if self.upstream.credentials.tls(class.credential_class()).is_none() {
            return Err(Unavailable::NoCredential);
        }
        self.upstream.metrics.stream_waits(&self.upstream.name).increment(1);
        let _waiting = class.count_waiter();
        let without_since = required.without_connection_since.unwrap_or(start).min(start);
        loop {
            // Registered before the check, so that no change is missed.
            let mut changed = std::pin::pin!(self.changed.notified());
            changed.as_mut().enable();
            self.maintain();
            let now = Instant::now();
            if required.held && self.is_total_outage() {
                return Err(Unavailable::Unreachable(self.reasons(class)));
            }
            if let Some(permit) = class.reserve_stream(required, &self.upstream, now, false) {
                return Ok(permit);
            }
            if self.closed.get() {
                let reason = "the upstream was removed from the configuration".to_owned();
                return Err(Unavailable::Unreachable(reason));
            }
            let connected = class.has_live();
            let deadline =
                if connected { start + EXHAUSTED_AFTER } else { without_since + UNAVAILABLE_AFTER };
            let all_failed = !connected && self.all_failed_since(class, without_since);
            if all_failed || now >= deadline {
                // The suspicion may be wrong, so a suspect connection is better than an error.
                if !required.live_only
                    && let Some(permit) = class.reserve_stream(required, &self.upstream, now, true)
                {
                    return Ok(permit);
                }
                if connected {
                    self.upstream.metrics.streams_exhausted(&self.upstream.name).increment(1);
                    return Err(Unavailable::Exhausted);
                }
                return Err(Unavailable::Unreachable(self.reasons(class)));
            }
            let _ = timeout_at(deadline.min(now + TICK), changed).await;
        }
    }

    /// Whether a connect to every endpoint has failed since `start`, and the class has no connect in progress.
    /// False without endpoints, because discovery may find one at any moment.
    fn all_failed_since(&self, class: &ClassPool, start: Instant) -> bool {
        let endpoints = self.upstream.endpoints();
        let has_failed =
            |endpoint: &Arc<Endpoint>| endpoint.last_failure().is_some_and(|at| at > start);
        !class.is_connecting() && !endpoints.is_empty() && endpoints.iter().all(has_failed)
    }

    /// Text that has the state and reason of each endpoint.
    fn reasons(&self, class: &ClassPool) -> String {
        let endpoints = self.upstream.endpoints();
        if endpoints.is_empty() {
            let errors = self.upstream.sources.current_errors();
            return format!("no endpoint is known yet; {errors}");
        }
        let reason = |endpoint: &Arc<Endpoint>| {
            if class.only_suspect_to(endpoint) {
                return format!("{} does not answer: PING unanswered", endpoint.label);
            }
            format!("{} is {} ({})", endpoint.label, endpoint.state().as_str(), endpoint.reason())
        };
        let mut reasons: Vec<_> = endpoints.iter().take(5).map(reason).collect();
        if endpoints.len() > 5 {
            reasons.push(format!("and {} more", endpoints.len() - 5));
        }
        reasons.join("; ")
    }
}

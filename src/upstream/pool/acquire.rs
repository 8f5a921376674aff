//! Reserves a stream for each request, or reports why none is available.

use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use jackstay_sys::clock;
use tokio::time::timeout;

use super::Pool;
use super::class::ClassPool;
use super::requirements::{StreamRequirements, Unavailable};
use super::waiters::Decision;
use crate::upstream::connection::Permit;
use crate::upstream::endpoint::Endpoint;

/// How long a request waits for a usable connection while no connection is live, counted from the loss of
/// its previous connection if it had one. So the client receives its response within 1.5 s.
pub(in crate::upstream) const UNAVAILABLE_AFTER: Duration = Duration::from_millis(1_200);
/// How long a request waits for a free stream while all live connections are full.
const EXHAUSTED_AFTER: Duration = Duration::from_secs(1);

/// Time after which a waiting request assumes that the pool's task does not run.
const WITHOUT_TASK: Duration = Duration::from_secs(2);

impl Pool {
    /// Reserves a stream on the best connection, or waits for a free one.
    ///
    /// # Errors
    /// Every endpoint has failed, the time limit is over, or too many requests wait.
    pub async fn acquire(
        &self,
        class: &Rc<ClassPool>,
        required: StreamRequirements<'_>,
    ) -> Result<Permit, Unavailable> {
        let now = clock::now();
        class.mark_used(now);
        if required.held && self.is_total_outage() {
            return Err(Unavailable::Unreachable(self.reasons(class)));
        }
        if !class.waiters.block_newcomers()
            && let Some(permit) = class.reserve_stream(required, &self.upstream, now, false)
        {
            if class.is_nearly_full(&permit, now) {
                self.changed.notify_one();
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
        class.reserve_stream(required, &self.upstream, clock::now(), false)
    }

    /// Waits until the pool's task grants a stream or an error.
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
        if class.has_too_many_waiters() {
            return Err(self.unavailable(class, class.has_live()));
        }
        self.upstream.metrics.stream_waits(&self.upstream.name).increment(1);
        let (_registration, mut granted) = class.waiters.register(required, start);
        self.changed.notify_one();
        loop {
            match timeout(WITHOUT_TASK, &mut granted).await {
                Ok(Ok(granted)) => return granted,
                Ok(Err(_)) => return Err(self.unavailable(class, false)),
                // The pool's task has been stopped.
                Err(_) => self.serve_waiters(),
            }
        }
    }

    /// Grants free streams to the waiting requests, in order, and ends the wait of those that must not wait longer.
    pub(super) fn serve_waiters(&self) {
        let classes: Vec<_> = self.classes.borrow().values().cloned().collect();
        for class in classes.iter().filter(|class| class.waiters.len() > 0) {
            self.serve_waiters_of(class, clock::now());
        }
    }

    fn serve_waiters_of(&self, class: &ClassPool, now: Instant) {
        let connected = class.has_live();
        let all_failed_at = if connected { None } else { self.all_failed_at(class) };
        let (is_outage, is_closed) = (self.is_total_outage(), self.closed.get());
        let mut has_free = class.has_free_stream(now);
        class.waiters.serve(|waiter| {
            let required = waiter.required();
            if required.held && is_outage {
                return Decision::Answer(Err(Unavailable::Unreachable(self.reasons(class))));
            }
            if has_free
                && let Some(permit) = class.reserve_stream(required, &self.upstream, now, false)
            {
                has_free = class.has_free_stream(now);
                return Decision::Answer(Ok(permit));
            }
            if is_closed {
                let reason = "the upstream was removed from the configuration".to_owned();
                return Decision::Answer(Err(Unavailable::Unreachable(reason)));
            }
            let deadline = if connected {
                waiter.start + EXHAUSTED_AFTER
            } else {
                waiter.without_since + UNAVAILABLE_AFTER
            };
            if all_failed_at.is_some_and(|at| at > waiter.without_since) || now >= deadline {
                // The suspicion may be wrong, so a suspect connection is better than an error.
                if !required.live_only
                    && let Some(permit) = class.reserve_stream(required, &self.upstream, now, true)
                {
                    return Decision::Answer(Ok(permit));
                }
                return Decision::Answer(Err(self.unavailable(class, connected)));
            }
            self.wake_at(deadline);
            // Those behind it have later deadlines, and nothing else can change for them.
            if connected && !has_free { Decision::Stop } else { Decision::Wait }
        });
    }

    /// The error of a request that waits no longer.
    fn unavailable(&self, class: &ClassPool, connected: bool) -> Unavailable {
        if connected {
            self.upstream.metrics.streams_exhausted(&self.upstream.name).increment(1);
            return Unavailable::Exhausted;
        }
        Unavailable::Unreachable(self.reasons(class))
    }

    /// Since when a connect to every endpoint has failed; `None` while the class has a connect in progress, and
    /// without endpoints, because discovery may find one at any moment.
    fn all_failed_at(&self, class: &ClassPool) -> Option<Instant> {
        if class.is_connecting() {
            return None;
        }
        let endpoints = self.upstream.endpoints();
        let failures: Option<Vec<_>> = endpoints.iter().map(|e| e.last_failure()).collect();
        failures?.into_iter().min()
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

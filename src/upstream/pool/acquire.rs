//! Reserves a stream for each request, or reports why none is available.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use futures_util::future::{Either, LocalBoxFuture, Ready, ready};
use jackstay_core::connection::ConnectionState;
use jackstay_core::endpoint_state::EndpointState;
use jackstay_core::pool::limits::max_connections;
use jackstay_core::pool::{
    Arrival, Candidate, EndpointRow, Lane, Preference, Round, Scope, Situation, StreamRefusal,
    StreamRequirements, is_nearly_full, select,
};
use jackstay_sys::clock;
use tokio::sync::oneshot;

use super::Pool;
use super::class::ClassPool;
use super::stream_request::{Granted, OwnedPreferences, StreamRequest, Unavailable, Waiter};
use super::table::endpoint_rows;
use crate::upstream::connection::Permit;
use crate::upstream::endpoint::Endpoint;

/// The future of [`Pool::acquire`].
pub type Acquire<'a> = Either<Ready<Granted>, LocalBoxFuture<'a, Granted>>;

/// The place of a request in the queue, which it leaves when this is dropped.
struct Registration<'a> {
    class: &'a ClassPool,
    id: u64,
}

impl Drop for Registration<'_> {
    fn drop(&mut self) {
        self.class.machine.borrow_mut().leave(self.id);
    }
}

/// When a request gets a connection to an endpoint that is not ready, if one to a ready endpoint may follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Unready {
    AtOnce,
    AfterWait,
}

impl Pool {
    /// Reserves a stream on the best connection, or waits for a free one. A request that need not wait gets its stream
    /// in this call, and its future stays small.
    ///
    /// # Errors
    /// Every endpoint has failed, the time limit is over, or too many requests wait.
    pub fn acquire<'a>(
        &'a self,
        class: &'a Rc<ClassPool>,
        request: StreamRequest<'a>,
    ) -> Acquire<'a> {
        let (now, may_be_held) = (clock::now(), request.required.may_be_held);
        if request.required.lane == Lane::Heartbeats
            && let Some(permit) = self.reserve_in_lane(class, &request, now)
        {
            return Either::Left(ready(class.verified(permit, request.client_subject)));
        }
        let arrival = class.machine.borrow_mut().request(may_be_held, self.is_total_outage(), now);
        if let Arrival::Refuse(refusal) = arrival {
            return Either::Left(ready(Err(self.unavailable(class, refusal))));
        }
        if arrival == Arrival::Select
            && let Some((permit, is_nearly_full)) =
                self.reserve_stream(class, &request, Unready::AfterWait, now)
        {
            if is_nearly_full {
                self.changed.notify_one();
            }
            return Either::Left(ready(class.verified(permit, request.client_subject)));
        }
        Either::Right(Box::pin(async move {
            let subject = request.client_subject;
            let permit = self.wait(class, request, now).await?;
            class.verified(permit, subject)
        }))
    }

    /// Reserves a stream on a live connection if one has a free stream now.
    pub fn try_acquire(
        &self,
        class: &Rc<ClassPool>,
        request: &StreamRequest<'_>,
    ) -> Option<Permit> {
        let (permit, _) = self.reserve_stream(class, request, Unready::AtOnce, clock::now())?;
        class.verified(permit, request.client_subject).ok()
    }

    /// Reserves a stream on the connection for heartbeats, if its endpoint is as good as others, and it is the first attempt.
    /// That another heartbeat waits there is no reason against it: on a slow line each of them waits. If there is no such
    /// connection, one is opened for the next heartbeat.
    fn reserve_in_lane(
        &self,
        class: &ClassPool,
        request: &StreamRequest<'_>,
        now: Instant,
    ) -> Option<Permit> {
        let name = class.credential_class();
        if !name.is_proven() || request.required.previous_failure.is_some() {
            return None;
        }
        let lane = self.lane(name, Lane::Heartbeats);
        let _ = lane.machine.borrow_mut().request(false, false, now);
        let is_good = lane.with_table(now, |table, connections| {
            let live = table
                .iter()
                .zip(connections)
                .filter(|(row, _)| row.state == ConnectionState::Live && row.free_streams > 0);
            let good = live.map(|(row, connection)| {
                row.endpoint_state == EndpointState::Ready
                    && !connection.probe().is_failing()
                    && request.preference(&connection.endpoint) == Preference::default()
            });
            good.reduce(|all, one| all && one)
        });
        match is_good {
            Some(true) => Some(self.reserve_stream(&lane, request, Unready::AtOnce, now)?.0),
            Some(false) => None,
            None => {
                self.changed.notify_one();
                None
            }
        }
    }

    /// Reserves a stream on the best live connection. Returns whether another connection should be opened, too.
    fn reserve_stream(
        &self,
        class: &ClassPool,
        request: &StreamRequest<'_>,
        unready: Unready,
        now: Instant,
    ) -> Option<(Permit, bool)> {
        let required = &request.required;
        class.with_table(now, |table, connections| {
            for (row, connection) in table.iter_mut().zip(connections) {
                if connection.is_for_one_request() {
                    row.free_streams = 0;
                }
            }
            let max_connections = if required.long_running {
                class.max_connections(&self.upstream)
            } else {
                usize::MAX
            };
            let index = select(
                table,
                required,
                Scope { allow_suspect: false, max_connections },
                |index| request.preference(&connections[index].endpoint),
                |index| connections[index].cost(now),
                &mut self.rng.borrow_mut(),
            )?;
            if unready == Unready::AfterWait
                && self.awaits_ready(class, (table, index), required, now)
            {
                return None;
            }
            table[index].free_streams -= 1;
            let permit = connections[index].reserve(required.long_running, now);
            Some((permit, is_nearly_full(table, index)))
        })
    }

    /// Whether a new request waits for a connection to a ready endpoint, although it would get the one with this index.
    /// Looks at the endpoints only if that is not ready, because every request asks.
    fn awaits_ready(
        &self,
        class: &ClassPool,
        (table, index): (&[Candidate], usize),
        required: &StreamRequirements,
        now: Instant,
    ) -> bool {
        if table[index].endpoint_state == EndpointState::Ready {
            return false;
        }
        let rows = endpoint_rows(&self.upstream, &self.upstream.endpoints(), self.seed, now);
        class.machine.borrow().awaits_ready((table, index), required, &rows, now, now)
    }

    /// Waits until the pool's task grants a stream or an error.
    #[cold]
    async fn wait(
        &self,
        class: &Rc<ClassPool>,
        request: StreamRequest<'_>,
        start: Instant,
    ) -> Granted {
        let has_credential = self.upstream.credentials.tls(class.credential_class()).is_some();
        let (result, granted) = oneshot::channel();
        let preferences = OwnedPreferences::of(&request);
        let required = request.required;
        let authorization = request.authorization.cloned();
        let waiter =
            Waiter { long_running: required.long_running, preferences, authorization, result };
        let registered = self.state.get().may_wait(has_credential).and_then(|()| {
            class.with_table(start, |table, _| {
                class.machine.borrow_mut().begin_wait(table, required, waiter, start)
            })
        });
        let id = registered.map_err(|refusal| self.unavailable(class, refusal))?;
        let _registration = Registration { class, id };
        self.upstream.metrics.stream_waits(&self.upstream.name).increment(1);
        self.changed.notify_one();
        // The pool answers every request before it drops it.
        granted.await.unwrap_or_else(|_| Err(self.unavailable(class, StreamRefusal::Stopped)))
    }

    /// Grants free streams to the waiting requests, in order, and ends the wait of those that must not wait longer.
    pub(super) fn serve_waiters(&self, endpoints: &[EndpointRow]) {
        let classes: Vec<_> = self.classes.borrow().values().cloned().collect();
        for class in classes.iter().filter(|class| class.machine.borrow().waiting() > 0) {
            self.serve_waiters_of(class, endpoints, clock::now());
        }
    }

    fn serve_waiters_of(&self, class: &ClassPool, endpoints: &[EndpointRow], now: Instant) {
        let max = self.upstream.config().connections.max;
        let situation = Situation {
            endpoints,
            is_outage: self.is_total_outage(),
            max_connections: max_connections(class.credential_class(), max),
            now,
        };
        let mut round = Round::default();
        loop {
            // An error means that the request was cancelled; the stream becomes free again.
            let _ = match self.next_answer(class, &mut round, &situation) {
                None => break,
                Some((waiter, Ok(permit))) => waiter.result.send(Ok(permit)),
                Some((waiter, Err(refusal))) => {
                    waiter.result.send(Err(self.unavailable(class, refusal)))
                }
            };
        }
        if let Some(at) = round.wake_at() {
            self.update(|state| state.wake_at(at));
        }
    }

    /// The next answer of a round, with the stream reserved.
    fn next_answer(
        &self,
        class: &ClassPool,
        round: &mut Round,
        situation: &Situation<'_>,
    ) -> Option<(Waiter, Result<Permit, StreamRefusal>)> {
        class.with_table(situation.now, |table, connections| {
            let (waiter, answer) = class.machine.borrow_mut().next_answer(
                round,
                table,
                situation,
                |waiter, index| waiter.preferences.preference(&connections[index].endpoint),
                |index| connections[index].cost(situation.now),
                &mut self.rng.borrow_mut(),
            )?;
            let permit =
                answer.map(|index| connections[index].reserve(waiter.long_running, situation.now));
            Some((waiter, permit))
        })
    }

    /// Refuses every request that waits.
    pub(super) fn refuse_waiters(&self, refusal: StreamRefusal) {
        let classes: Vec<_> = self.classes.borrow().values().cloned().collect();
        for class in classes {
            loop {
                let Some(waiter) = class.machine.borrow_mut().refuse_next() else { break };
                let _ = waiter.result.send(Err(self.unavailable(&class, refusal)));
            }
        }
    }

    /// The error of a request that gets no stream.
    fn unavailable(&self, class: &ClassPool, refusal: StreamRefusal) -> Unavailable {
        match refusal {
            StreamRefusal::Unreachable => Unavailable::Unreachable(self.reasons(class)),
            StreamRefusal::Exhausted => {
                self.upstream.metrics.streams_exhausted(&self.upstream.name).increment(1);
                Unavailable::Exhausted
            }
            StreamRefusal::NoCredential => Unavailable::NoCredential,
            StreamRefusal::Closed => Unavailable::Unreachable(
                "the upstream was removed from the configuration".to_owned(),
            ),
            StreamRefusal::Stopped => {
                Unavailable::Unreachable("the task of the connection pool has ended".to_owned())
            }
        }
    }

    /// Text that has the state and reason of each endpoint.
    fn reasons(&self, class: &ClassPool) -> String {
        let endpoints = self.upstream.endpoints();
        if endpoints.is_empty() {
            return self.upstream.sources.no_endpoint_reason();
        }
        let now = clock::now();
        let reason = |endpoint: &Arc<Endpoint>| {
            if class.only_suspect_to(endpoint, now) {
                return format!("{} does not answer: PING unanswered", endpoint.label);
            }
            endpoint.description()
        };
        let mut reasons: Vec<_> = endpoints.iter().take(5).map(reason).collect();
        if endpoints.len() > 5 {
            reasons.push(format!("and {} more", endpoints.len() - 5));
        }
        reasons.join("; ")
    }
}

//! The attempts of a request that run in parallel: their streams, and what they wait for.

use std::future::poll_fn;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Instant;

use futures_util::future::LocalBoxFuture;
use jackstay_core::request::attempts::{Awaited, MAX_PARALLEL};
use jackstay_core::request::retry::Stage;
use jackstay_sys::clock;
use tokio::time::sleep_until;

use crate::proxy::attempt::{Attempts, FailedAttempt, failed};
use crate::proxy::upstream_client::{
    Concern, UpstreamClient, UpstreamResponse, until_concern, while_not_troubled,
};
use crate::upstream::connection::{Connection, Permit};
use crate::upstream::pool::Unavailable;

/// What has happened to an attempt.
pub(super) enum Event {
    /// It has a stream ([`Slots::take_permit`]).
    Granted,
    /// The pool has no stream for it.
    NoStream,
    Responded(Box<UpstreamResponse>),
    Failed(FailedAttempt),
    /// Its connection is in trouble.
    Troubled,
    /// Its response head is late.
    Slow,
    /// Its connection is silent.
    Silent,
    /// Its connection is in trouble after the pause between two hedges.
    HedgeDue,
}

/// The attempts, by their number.
#[derive(Default)]
pub(super) struct Slots<'a>([Slot<'a>; MAX_PARALLEL]);

/// One attempt. Dropping it resets its stream.
#[derive(Default)]
enum Slot<'a> {
    #[default]
    Ended,
    Acquiring(Acquire<'a>),
    Granted(Permit),
    Sent(Sent<'a>),
}

type Acquire<'a> = LocalBoxFuture<'a, Result<Permit, Unavailable>>;
pub(super) type Response<'a> = LocalBoxFuture<'a, Result<UpstreamResponse, FailedAttempt>>;

struct Sent<'a> {
    connection: Rc<Connection>,
    response: Response<'a>,
    /// What it waits for besides the response, and the future of that.
    awaited: Option<(Awaited, LocalBoxFuture<'a, Event>)>,
}

impl<'a> Slots<'a> {
    /// The connection of an attempt that is sent.
    pub(super) fn connection(&self, attempt: usize) -> Option<&Rc<Connection>> {
        match self.0.get(attempt)? {
            Slot::Sent(sent) => Some(&sent.connection),
            _ => None,
        }
    }

    /// Whether an attempt waits for something.
    pub(super) fn are_waiting(&self) -> bool {
        self.0.iter().any(|slot| matches!(slot, Slot::Acquiring(_) | Slot::Sent(_)))
    }

    /// The attempt waits for a stream.
    pub(super) fn acquire(&mut self, attempt: usize, acquire: Acquire<'a>) {
        self.0[attempt] = Slot::Acquiring(acquire);
    }

    /// The attempt has a stream.
    pub(super) fn grant(&mut self, attempt: usize, permit: Permit) {
        self.0[attempt] = Slot::Granted(permit);
    }

    /// Takes the stream of an attempt, to send the request.
    pub(super) fn take_permit(&mut self, attempt: usize) -> Option<Permit> {
        match std::mem::take(self.0.get_mut(attempt)?) {
            Slot::Granted(permit) => Some(permit),
            _ => None,
        }
    }

    /// The attempt waits for its response.
    pub(super) fn send(
        &mut self,
        attempt: usize,
        connection: Rc<Connection>,
        response: Response<'a>,
    ) {
        self.0[attempt] = Slot::Sent(Sent { connection, response, awaited: None });
    }

    /// Ends an attempt that is sent, and returns its connection.
    pub(super) fn end(&mut self, attempt: usize) -> Option<Rc<Connection>> {
        match std::mem::take(self.0.get_mut(attempt)?) {
            Slot::Sent(sent) => Some(sent.connection),
            _ => None,
        }
    }

    /// Waits for what the state machine says, and drops the attempts that have ended.
    /// `late_at`: when a response head is late that has not arrived; `None` if it never is.
    pub(super) fn follow(
        &mut self,
        attempts: &Attempts,
        upstream: &Rc<UpstreamClient>,
        late_at: Option<Instant>,
    ) {
        for (attempt, slot) in self.0.iter_mut().enumerate() {
            let Some(awaited) = attempts.awaited(attempt) else {
                *slot = Slot::Ended;
                continue;
            };
            if let Slot::Sent(Sent { connection, awaited: current, .. }) = slot
                && current.as_ref().is_none_or(|(current, _)| *current != awaited)
            {
                let event = event(Rc::clone(connection), Rc::clone(upstream), awaited, late_at);
                *current = Some((awaited, Box::pin(event)));
            }
        }
    }

    /// Waits for the next event. Of several attempts, the first one has precedence, and of one attempt its response.
    pub(super) async fn next(&mut self) -> (usize, Event) {
        poll_fn(|cx| {
            for (attempt, slot) in self.0.iter_mut().enumerate() {
                if let Poll::Ready(event) = slot.poll(cx) {
                    return Poll::Ready((attempt, event));
                }
            }
            Poll::Pending
        })
        .await
    }
}

impl Slot<'_> {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Event> {
        let event = match self {
            Self::Ended | Self::Granted(_) => return Poll::Pending,
            Self::Acquiring(acquire) => match std::task::ready!(acquire.as_mut().poll(cx)) {
                Ok(permit) => {
                    *self = Self::Granted(permit);
                    return Poll::Ready(Event::Granted);
                }
                Err(_) => Event::NoStream,
            },
            Self::Sent(Sent { response, awaited, .. }) => match response.as_mut().poll(cx) {
                Poll::Ready(Ok(response)) => Event::Responded(Box::new(response)),
                Poll::Ready(Err(failure)) => Event::Failed(failure),
                Poll::Pending => {
                    let Some((_, future)) = awaited else { return Poll::Pending };
                    let event = std::task::ready!(future.as_mut().poll(cx));
                    *awaited = None;
                    if !matches!(event, Event::Failed(_)) {
                        return Poll::Ready(event);
                    }
                    event
                }
            },
        };
        *self = Self::Ended;
        Poll::Ready(event)
    }
}

/// Waits for what an attempt awaits besides its response.
async fn event(
    connection: Rc<Connection>,
    upstream: Rc<UpstreamClient>,
    awaited: Awaited,
    late_at: Option<Instant>,
) -> Event {
    let Awaited::Loss { silence_from, hedge_from } = awaited else {
        let may_be_slow = awaited == (Awaited::Trouble { may_be_slow: true });
        let late_at = late_at.filter(|_| may_be_slow);
        return match until_concern(&connection, &upstream, late_at).await {
            Concern::Troubled => Event::Troubled,
            Concern::Late => Event::Slow,
        };
    };
    let silent = async {
        later(silence_from).await;
        while !connection.is_silent() {
            connection.changed().await;
        }
    };
    let hedge_due = async {
        later(hedge_from).await;
        while_not_troubled(&connection, &upstream).await;
    };
    tokio::select! {
        biased;
        reason = connection.no_response_expected(silence_from.is_some()) => {
            Event::Failed(failed(Stage::NoHead, reason, &connection))
        }
        () = silent => Event::Silent,
        () = hedge_due => Event::HedgeDue,
    }
}

/// Waits until this time; without one, forever.
pub(super) async fn later(at: Option<Instant>) {
    match at {
        Some(at) if at <= clock::now() => {}
        Some(at) => sleep_until(at.into()).await,
        None => std::future::pending().await,
    }
}

/// The response of an attempt whose future is in the frame of the caller, so that the common request needs no box.
/// Dropping this drops that future, and resets the stream.
pub(super) struct FirstResponse<'a, F>(pub(super) Pin<&'a mut Option<F>>);

impl<F: Future> Future for FirstResponse<'_, F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        match self.0.as_mut().as_pin_mut() {
            Some(response) => response.poll(cx),
            None => Poll::Pending,
        }
    }
}

impl<F> Drop for FirstResponse<'_, F> {
    fn drop(&mut self) {
        self.0.set(None);
    }
}

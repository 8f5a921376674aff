//! The stream that a watch reads now: what comes of it, and the reasons to leave it.
//!
//! A stream that works is not given up before another one has taken the watch: while its connection
//! has no future, a place on another one is looked for beside it ([`Running::seek`]).

use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use h2::RecvStream;
use tokio::time::{sleep, timeout};

use super::again::Again;
use super::pace::Pace;
use crate::proxy::drain::DrainWatcher;
use crate::proxy::upstream_client::release;
use crate::upstream::connection::{DrainUrgency, Permit, describe_h2_error};
use crate::upstream::pool::{PreviousFailure, StreamRequirements};

/// Largest jitter before a place on another connection is looked for: others leave at the same time.
const SOON: Duration = Duration::from_millis(200);
/// The same where the stream works and nothing is lost by waiting.
const IN_TIME: Duration = Duration::from_secs(1);
/// How long a place is looked for at a time.
const LOOKED_FOR: Duration = Duration::from_secs(2);
/// Least pause after the first attempt that failed; it doubles with each, and up to half of it is added
/// by lot.
const SEEK_AGAIN: Duration = Duration::from_secs(2);
/// Largest pause, without that half.
const SEEK_AGAIN_MAX: Duration = Duration::from_secs(60);

/// An upstream stream under way.
pub(super) struct Running {
    pub(super) recv: RecvStream,
    pub(super) unreleased: usize,
    /// How it delivers.
    pub(super) pace: Pace,
    pub(super) permit: Permit,
    /// Of its connection, when it last looked after itself.
    pub(super) minutes: u32,
    /// A reason to leave that it could not follow yet.
    pub(super) stays: Option<Stay>,
    /// Attempts to leave its connection that came to nothing.
    failed: u32,
    /// Ready when there is a reason to leave this stream.
    leave: Pin<Box<dyn Future<Output = Leave>>>,
}

/// Why a stream that works is to be left.
#[derive(Debug)]
pub(super) enum Leave {
    /// Its connection has no future: on another one.
    Connection,
    /// Its connection does not respond, and stays only for those that cannot move.
    Unresponsive,
    /// Here is a place on another one; `None` if none was found.
    Place(Option<Permit>),
    /// It should look after itself, and move if others are needed elsewhere.
    Asked,
    /// Its listener ends: so should the watch, where its client goes on without a relist.
    Shutdown,
}

/// A reason to leave that a watch cannot follow before something else comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stay {
    /// Its connection has no future, and it cannot be resumed now.
    Connection,
    /// Its connection does not respond, and the loss of its stream would do harm.
    Unresponsive,
    /// Its listener ends, and a clean end would look complete.
    Shutdown,
}

/// What came of a stream.
pub(super) enum Event {
    Data(Bytes),
    End,
    Lost(String),
    Leave(Leave),
}

impl Running {
    pub(super) fn new(recv: RecvStream, permit: Permit, drain: &DrainWatcher) -> Self {
        let leave = leave(&permit, drain);
        let minutes = permit.connection().self_check_count();
        let pace = Pace::new(permit.connection().last_received());
        Self { recv, unreleased: 0, pace, permit, minutes, stays: None, failed: 0, leave }
    }

    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Event> {
        release(&mut self.recv, &mut self.unreleased);
        if let Poll::Ready(data) = self.recv.poll_data(cx) {
            return Poll::Ready(match data {
                Some(Ok(data)) => {
                    // A driver has just read it: its clock is good enough.
                    self.pace.delivered(self.permit.connection().last_received());
                    Event::Data(data)
                }
                Some(Err(error)) => Event::Lost(describe_h2_error(&error)),
                None if self.recv.is_end_stream() => Event::End,
                None => Event::Lost("the stream was reset".to_owned()),
            });
        }
        self.leave.as_mut().poll(cx).map(Event::Leave)
    }

    /// Waits for the next reason to leave.
    pub(super) fn watch_out(&mut self, drain: &DrainWatcher) {
        self.leave = leave(&self.permit, drain);
    }

    /// It cannot go yet: it is asked again after what comes next, and until then only a shutdown
    /// can be news.
    pub(super) fn stay(&mut self, why: Stay, drain: &DrainWatcher) {
        self.stays = Some(why);
        let mut drain = drain.clone();
        let connection = Rc::clone(self.permit.connection());
        self.leave = Box::pin(async move {
            if why == Stay::Shutdown {
                return std::future::pending().await;
            }
            tokio::select! {
                () = connection.became_unresponsive(), if why == Stay::Connection => Leave::Unresponsive,
                () = drain.staggered_end() => Leave::Shutdown,
            }
        });
    }

    /// Looks for a place on another connection, beside the stream. Attempts that failed put it off.
    pub(super) fn seek(&mut self, again: &Again) {
        self.stays = None;
        let connection = Rc::clone(self.permit.connection());
        let soon = connection.drain_urgency() == Some(DrainUrgency::Immediate);
        let pause = match self.failed.checked_sub(1) {
            None if soon => SOON.mul_f64(fastrand::f64()),
            None => IN_TIME.mul_f64(fastrand::f64()),
            Some(before) => SEEK_AGAIN
                .saturating_mul(1 << before.min(10))
                .min(SEEK_AGAIN_MAX)
                .mul_f64(1.0 + fastrand::f64() / 2.0),
        };
        let (line, class) = (Rc::clone(&again.line), Rc::clone(&again.class));
        let proof = again.proof.clone();
        let mut drain = again.drain.clone();
        self.leave = Box::pin(async move {
            let place = async {
                sleep(pause).await;
                // Where it does not hold, the watch ends.
                proof.confirmed().await;
                let after = soon.then_some(PreviousFailure::Silence(&connection));
                let need = StreamRequirements {
                    watch: true,
                    held: true,
                    live_only: true,
                    previous_failure: after,
                    ..StreamRequirements::for_client(proof.subject())
                };
                timeout(LOOKED_FOR, line.pool.acquire(&class, need)).await.ok()?.ok()
            };
            tokio::select! {
                permit = place => Leave::Place(permit),
                () = connection.became_unresponsive() => Leave::Unresponsive,
                () = drain.staggered_end() => Leave::Shutdown,
            }
        });
    }

    /// The attempt to leave its connection came to nothing: it stays, and tries again later.
    pub(super) fn seek_later(&mut self, again: &Again) {
        self.failed = self.failed.saturating_add(1);
        self.seek(again);
    }
}

/// Waits for a reason to leave the stream.
fn leave(permit: &Permit, drain: &DrainWatcher) -> Pin<Box<dyn Future<Output = Leave>>> {
    let connection = Rc::clone(permit.connection());
    let mut drain = drain.clone();
    let asked = connection.notification_count();
    Box::pin(async move {
        tokio::select! {
            () = connection.drain_or_notification(asked) => {
                if connection.is_unresponsive() {
                    Leave::Unresponsive
                } else if connection.should_drain() {
                    Leave::Connection
                } else {
                    Leave::Asked
                }
            }
            () = drain.staggered_end() => Leave::Shutdown,
        }
    })
}

//! The stream that a watch reads now: what comes of it, and the reasons to leave it.

use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use bytes::Bytes;
use h2::RecvStream;

use super::pace::Pace;
use crate::proxy::closing::Closing;
use crate::proxy::line::release;
use crate::upstream::connection::{Permit, in_words};

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
    pub(super) stays: Option<Leave>,
    /// Ready when there is a reason to leave this stream.
    leave: Pin<Box<dyn Future<Output = Leave>>>,
}

/// Why a stream that works is to be left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Leave {
    /// Its connection has no future: on another one.
    Connection,
    /// Its connection does not respond, and stays only for those that cannot move.
    Unresponsive,
    /// It should look after itself, and move if others are needed elsewhere.
    Asked,
    /// Its listener ends: so should the watch, where its client goes on without a relist.
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
    pub(super) fn new(recv: RecvStream, permit: Permit, closing: &Closing) -> Self {
        let leave = leave(&permit, closing);
        let minutes = permit.connection().minutes();
        let pace = Pace::new(permit.connection().heard());
        Self { recv, unreleased: 0, pace, permit, minutes, stays: None, leave }
    }

    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Event> {
        release(&mut self.recv, &mut self.unreleased);
        if let Poll::Ready(data) = self.recv.poll_data(cx) {
            return Poll::Ready(match data {
                Some(Ok(data)) => {
                    // A driver has just read it: its clock is good enough.
                    self.pace.delivered(self.permit.connection().heard());
                    Event::Data(data)
                }
                Some(Err(error)) => Event::Lost(in_words(&error)),
                None if self.recv.is_end_stream() => Event::End,
                None => Event::Lost("the stream was reset".to_owned()),
            });
        }
        self.leave.as_mut().poll(cx).map(Event::Leave)
    }

    /// Waits for the next reason to leave.
    pub(super) fn watch_out(&mut self, closing: &Closing) {
        self.leave = leave(&self.permit, closing);
    }

    /// It cannot go yet: it is asked again after what comes next, and until then only a shutdown
    /// can be news.
    pub(super) fn stay(&mut self, why: Leave, closing: &Closing) {
        self.stays = Some(why);
        let mut closing = closing.clone();
        let connection = Rc::clone(self.permit.connection());
        self.leave = Box::pin(async move {
            if !matches!(why, Leave::Connection | Leave::Unresponsive) {
                return std::future::pending().await;
            }
            tokio::select! {
                () = connection.unresponsive(), if why == Leave::Connection => Leave::Unresponsive,
                () = closing.turn() => Leave::Shutdown,
            }
        });
    }
}

/// Waits for a reason to leave the stream.
fn leave(permit: &Permit, closing: &Closing) -> Pin<Box<dyn Future<Output = Leave>>> {
    let connection = Rc::clone(permit.connection());
    let mut closing = closing.clone();
    let asked = connection.asked();
    Box::pin(async move {
        tokio::select! {
            () = connection.left_or_asked(asked) => {
                if connection.is_unresponsive() {
                    Leave::Unresponsive
                } else if connection.is_to_be_left() {
                    Leave::Connection
                } else {
                    Leave::Asked
                }
            }
            () = closing.turn() => Leave::Shutdown,
        }
    })
}

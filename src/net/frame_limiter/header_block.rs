//! The time that a peer has for one header block.

use std::pin::Pin;
use std::task::Context;
use std::time::Duration;

use jackstay_core::http2_frames::{END_HEADERS, FrameHeader, frame_type};
use tokio::time::{Sleep, sleep};

/// The header block that arrives.
#[derive(Debug)]
pub(super) struct HeaderBlock {
    /// Time for a header block; `None` for a server, whose PINGs would not be acknowledged meanwhile.
    limit: Option<Duration>,
    /// Whether the last frame has `END_HEADERS`; `None` if it is no part of a header block.
    ends: Option<bool>,
    /// The end of the time. Set when a client leaves a header block open, which is rare.
    deadline: Option<Pin<Box<Sleep>>>,
}

impl HeaderBlock {
    pub(super) fn new(limit: Option<Duration>) -> Self {
        Self { limit, ends: None, deadline: None }
    }

    pub(super) fn received(&mut self, header: FrameHeader) {
        let is_part = matches!(header.frame_type, frame_type::HEADERS | frame_type::CONTINUATION);
        self.ends = is_part.then_some(header.flags & END_HEADERS != 0);
        if header.frame_type == frame_type::HEADERS {
            self.deadline = None;
        }
    }

    /// Whether a header block has been open for too long. Otherwise `cx` is woken when it has.
    pub(super) fn poll_expired(&mut self, is_in_payload: bool, cx: &mut Context<'_>) -> bool {
        let is_open = self.ends.is_some_and(|ends| !ends || is_in_payload);
        if !is_open {
            self.deadline = None;
            return false;
        }
        let Some(limit) = self.limit else { return false };
        let deadline = self.deadline.get_or_insert_with(|| Box::pin(sleep(limit)));
        deadline.as_mut().poll(cx).is_ready()
    }
}

//! The time that a peer has for one header block, and the memory that it holds meanwhile.
//!
//! h2 decodes each piece as it arrives, so the first bytes of an open block may hold as much as the largest head.

use std::pin::Pin;
use std::task::Context;
use std::time::Duration;

use jackstay_core::admission::MemoryCharge;
use jackstay_core::frame_budgets::LimitedFrame;
use jackstay_core::http2_frames::{END_HEADERS, FrameHeader, frame_type};
use tokio::time::{Sleep, sleep};

/// Charges what an open header block may hold; `None` if it does not fit.
pub type ChargeBlock = Box<dyn Fn() -> Option<MemoryCharge>>;

/// The charge of open header blocks.
#[derive(Default)]
pub(super) struct BlockMemory {
    charge: Option<ChargeBlock>,
    /// Charged while a block is open.
    charged: Option<MemoryCharge>,
}

impl std::fmt::Debug for BlockMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.charged.fmt(f)
    }
}

/// The header block that arrives.
#[derive(Debug)]
pub(super) struct HeaderBlock {
    /// Time for a header block; `None` for a server, whose PINGs would not be acknowledged meanwhile.
    limit: Option<Duration>,
    /// Whether the last frame has `END_HEADERS`; `None` if it is no part of a header block.
    ends: Option<bool>,
    /// The end of the time. Set when a client leaves a header block open, which is rare.
    deadline: Option<Pin<Box<Sleep>>>,
    memory: BlockMemory,
}

impl HeaderBlock {
    pub(super) fn new(limit: Option<Duration>) -> Self {
        Self { limit, ends: None, deadline: None, memory: BlockMemory::default() }
    }

    /// Charges blocks whose end is not in their first frame.
    pub(super) fn set_charge(&mut self, charge: ChargeBlock) {
        self.memory.charge = Some(charge);
    }

    /// Takes in the header of a frame.
    ///
    /// # Errors
    /// It opens a block for which there is no memory.
    pub(super) fn received(&mut self, header: FrameHeader) -> Result<(), LimitedFrame> {
        let is_part = matches!(header.frame_type, frame_type::HEADERS | frame_type::CONTINUATION);
        self.ends = is_part.then_some(header.flags & END_HEADERS != 0);
        if header.frame_type == frame_type::HEADERS {
            self.deadline = None;
        }
        let BlockMemory { charge, charged } = &mut self.memory;
        if self.ends != Some(false) {
            *charged = None;
        } else if let Some(charge) = charge
            && charged.is_none()
        {
            *charged = Some(charge().ok_or(LimitedFrame::HeaderBlock)?);
        }
        Ok(())
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

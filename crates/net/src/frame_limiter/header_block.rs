//! The time that a peer has for one header block, the memory that it holds meanwhile, and what its fields hold
//! afterwards.
//!
//! h2 decodes each piece as it arrives, and a byte may refer to a field in the [table](HeaderTable) of its decoder. So
//! an open block may hold [`BYTE_COST`] for each of its bytes, and at most as much as the largest head.

use std::pin::Pin;
use std::task::Context;
use std::time::Duration;

use jackstay_core::admission::{MemoryCharge, MemoryKind};
use jackstay_core::frame_budgets::LimitedFrame;
use jackstay_core::header_table::HeaderTable;
use jackstay_core::http2_frames::{END_HEADERS, FrameHeader, frame_type};
use tokio::time::{Sleep, sleep};

/// Charges so many bytes of this kind; `None` if they do not fit.
pub type ChargeHeaders = Box<dyn Fn(MemoryKind, usize) -> Option<MemoryCharge>>;

/// What one byte of a block may hold: a field of 32 bytes and more in the list of RFC 9113, 6.5.2, and its entry in a
/// map of headers that has room for as many more.
const BYTE_COST: usize = 256;
/// What the table of a connection keeps is charged in multiples of these bytes.
const TABLE_STEP: usize = 16 << 10;
/// What the table of a connection keeps without a charge of its own: the paths of many usual requests.
const FREE: usize = 12 << 10;

/// The charges of header blocks.
struct BlockMemory {
    charge: ChargeHeaders,
    /// Bytes that an open block may hold.
    largest: usize,
    /// Bytes of the open block.
    bytes: usize,
    /// Charged while a block is open.
    open: Option<MemoryCharge>,
    table: HeaderTable,
    /// What is charged for the table.
    steps: Vec<MemoryCharge>,
}

impl std::fmt::Debug for BlockMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.table.fmt(f)
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
    memory: Option<BlockMemory>,
}

impl HeaderBlock {
    pub(super) fn new(limit: Option<Duration>) -> Self {
        Self { limit, ends: None, deadline: None, memory: None }
    }

    /// Charges blocks whose end is not in their first frame, of which each may hold `largest` bytes at most, and the
    /// table.
    pub(super) fn set_charge(&mut self, largest: usize, charge: ChargeHeaders) {
        let (open, table, steps) = (None, HeaderTable::default(), Vec::new());
        self.memory = Some(BlockMemory { charge, largest, bytes: 0, open, table, steps });
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
        let Some(memory) = &mut self.memory else { return Ok(()) };
        memory.table.frame(header);
        if self.ends != Some(false) {
            (memory.open, memory.bytes) = (None, 0);
            return Ok(());
        }
        memory.bytes += header.length as usize;
        memory.open = None;
        let held = (memory.bytes * BYTE_COST).min(memory.largest);
        let charge = (memory.charge)(MemoryKind::Streams, held);
        memory.open = Some(charge.ok_or(LimitedFrame::HeaderBlock)?);
        Ok(())
    }

    /// Takes in bytes of the payload of the last frame.
    ///
    /// # Errors
    /// There is no memory for what the table keeps.
    pub(super) fn payload(&mut self, bytes: &[u8]) -> Result<(), LimitedFrame> {
        let (Some(memory), Some(_)) = (&mut self.memory, self.ends) else { return Ok(()) };
        memory.table.payload(bytes);
        let steps = memory.table.kept().saturating_sub(FREE).div_ceil(TABLE_STEP);
        // One more is kept, so that a client at the edge does not change the account with each request.
        memory.steps.truncate(steps + 1);
        while memory.steps.len() < steps {
            let charge = (memory.charge)(MemoryKind::Connections, TABLE_STEP);
            memory.steps.push(charge.ok_or(LimitedFrame::HeaderBlock)?);
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

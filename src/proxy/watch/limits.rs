//! The limits that all watches of one worker to one upstream share.

use std::sync::Arc;

use jackstay_core::admission::{ByteAccount, ByteBudget, MemoryKind};
use jackstay_core::request::retry_budget::RetryBudget;

use crate::observe::{GzipBytes, Metrics};

/// Maximum bytes of frames that one worker buffers for one upstream. The buffer of a frame counts until the
/// frame is sent or dropped.
const MAX_PARTIAL_FRAME_BYTES: usize = 32 << 20;

pub struct WatchLimits {
    /// Bounds the requests that are sent to other endpoints after a 410.
    too_old_retries: RetryBudget,
    partial_frames: Arc<ByteBudget>,
    gzip_states: Arc<ByteBudget>,
    /// The bytes of compressed watches.
    pub gzip_bytes: GzipBytes,
}

impl WatchLimits {
    /// The limits of watches of the upstream with this name.
    pub fn new(upstream: &str, metrics: &Metrics) -> Self {
        Self {
            too_old_retries: RetryBudget::too_old(),
            partial_frames: ByteBudget::new(MemoryKind::WatchFrames, MAX_PARTIAL_FRAME_BYTES),
            // A list that has begun should not end, so only the memory of the process limits it.
            gzip_states: ByteBudget::new(MemoryKind::WatchFrames, usize::MAX),
            gzip_bytes: metrics.watch_gzip_bytes(upstream),
        }
    }

    /// Adds the share of one client request, of any verb, to the budget of retries after a 410.
    pub fn deposit(&self) {
        self.too_old_retries.deposit();
    }

    /// Takes one retry after a 410 from the budget. If the budget is empty, counts `over_budget` and returns
    /// false.
    pub fn may_retry_too_old(&self, metrics: &Metrics) -> bool {
        let is_allowed = self.too_old_retries.take();
        if !is_allowed {
            metrics.watch_resumed("over_budget");
        }
        is_allowed
    }

    /// The account of the decoder of a watch whose frames count in `frames`.
    pub fn gzip_state(&self, frames: &ByteAccount) -> ByteAccount {
        frames.with_budget(&self.gzip_states)
    }

    /// The byte budget of the decoders of compressed responses.
    pub fn gzip_states(&self) -> &Arc<ByteBudget> {
        &self.gzip_states
    }

    /// The byte budget of incomplete frames.
    pub fn partial_frames(&self) -> &Arc<ByteBudget> {
        &self.partial_frames
    }
}

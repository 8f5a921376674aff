//! Bounds how often one watch changes its stream.
//!
//! The client does not see a change, but an apiserver must serve a new watch. If a watch loses its
//! stream again and again, it ends, and its client decides. No upstream can make the proxy resume for
//! ever.

use std::time::Duration;
use tokio::time::Instant;

use super::input::MoveReason;

/// Resumes within a minute before a watch ends instead.
pub const RESUMES_PER_MINUTE: u32 = 12;
const MINUTE: Duration = Duration::from_secs(60);
/// A watch with less time left is not moved to balance load.
pub(super) const MIN_REMAINING_TO_REBALANCE: Duration = Duration::from_secs(30);
/// A watch with less time left is not resumed.
pub(super) const MIN_REMAINING: Duration = Duration::from_secs(2);
/// Least pause between two attempts to leave an endpoint that is degraded or suspected.
const EVACUATION_PAUSE: Duration = Duration::from_secs(2);

/// What one watch has used up.
#[derive(Debug, Default)]
pub(super) struct ResumeLimiter {
    /// When the current minute began, and how many resumes it has seen.
    minute: Option<(Instant, u32)>,
    last_move: Option<Instant>,
}

impl ResumeLimiter {
    /// Counts a resume. Returns how many resumes this minute has seen before, or `None` if they were
    /// too many.
    pub(super) fn resume(&mut self, now: Instant) -> Option<u32> {
        let recent = self.resumes(now);
        let began = match self.minute {
            Some((began, _)) if recent > 0 => began,
            _ => now,
        };
        self.minute = Some((began, recent + 1));
        (recent < RESUMES_PER_MINUTE).then_some(recent)
    }

    /// Notes an attempt to leave a stream that works.
    pub(super) fn note_move(&mut self, reason: MoveReason, now: Instant) {
        self.last_move = Some(now);
        if reason != MoveReason::Rebalance {
            self.resume(now);
        }
    }

    /// Whether the watch may leave a stream that works: a healthy endpoint once a minute; a degraded or
    /// suspected one every 2 s, and for half of the resumes of a minute; a connection that drains as often
    /// as it may be resumed.
    pub(super) fn may_move(&self, reason: MoveReason, now: Instant) -> bool {
        let has_rested =
            |time| self.last_move.is_none_or(|moved| now.saturating_duration_since(moved) >= time);
        match reason {
            MoveReason::Rebalance => has_rested(MINUTE),
            MoveReason::Evacuate => {
                has_rested(EVACUATION_PAUSE) && self.resumes(now) < RESUMES_PER_MINUTE / 2
            }
            MoveReason::Drain => self.resumes(now) < RESUMES_PER_MINUTE,
        }
    }

    fn resumes(&self, now: Instant) -> u32 {
        self.minute
            .filter(|(began, _)| now.saturating_duration_since(*began) < MINUTE)
            .map_or(0, |(_, count)| count)
    }
}

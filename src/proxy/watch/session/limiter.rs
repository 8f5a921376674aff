//! Bounds how often one watch changes its stream.
//!
//! The client does not see a change, but an apiserver must serve a new watch. If a watch loses its
//! stream again and again, it ends, and its client decides. No upstream can make the proxy resume for
//! ever.

use std::time::Duration;
use tokio::time::Instant;

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
    pub(super) fn note_move(&mut self, now: Instant) {
        self.last_move = Some(now);
    }

    /// Whether the watch may leave a healthy endpoint: once a minute.
    pub(super) fn may_rebalance(&self, now: Instant) -> bool {
        !self.moved_within(MINUTE, now)
    }

    /// Whether the watch may leave a degraded or suspected endpoint: every 2 s, and for half of the
    /// resumes of a minute.
    pub(super) fn may_evacuate(&self, now: Instant) -> bool {
        !self.moved_within(EVACUATION_PAUSE, now) && self.resumes(now) < RESUMES_PER_MINUTE / 2
    }

    /// Whether the watch may leave a connection that drains: as often as it may be resumed.
    pub(super) fn may_leave_draining(&self, now: Instant) -> bool {
        self.resumes(now) < RESUMES_PER_MINUTE
    }

    fn resumes(&self, now: Instant) -> u32 {
        self.minute
            .filter(|(began, _)| now.saturating_duration_since(*began) < MINUTE)
            .map_or(0, |(_, count)| count)
    }

    fn moved_within(&self, time: Duration, now: Instant) -> bool {
        self.last_move.is_some_and(|moved| now.saturating_duration_since(moved) < time)
    }
}

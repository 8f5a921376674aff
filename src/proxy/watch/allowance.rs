//! How often a watch may change its apiserver.
//!
//! Each change is invisible to the client, but costs an apiserver a new watch: a watch that is
//! handed on again and again is better left to its client, and no upstream can make us resume for
//! ever.

use std::time::{Duration, Instant};

/// Resumes within a minute before a watch is left to its client.
pub const RESUMES_A_MINUTE: u32 = 12;
const MINUTE: Duration = Duration::from_secs(60);
/// Least pause between two attempts of a watch to leave an apiserver that is unwell.
const FLEE_PAUSE: Duration = Duration::from_secs(2);

/// What one watch has used up.
#[derive(Debug, Default)]
pub struct Allowance {
    /// When the minute began that is counted, and the resumes since.
    minute: Option<(Instant, u32)>,
    /// The last attempt to move.
    moved: Option<Instant>,
}

impl Allowance {
    /// Counts a resume: how many there were in this minute before; `None` when too many.
    pub fn resume(&mut self, now: Instant) -> Option<u32> {
        let recent = self.resumes(now);
        let began = match self.minute {
            Some((began, _)) if recent > 0 => began,
            _ => now,
        };
        self.minute = Some((began, recent + 1));
        (recent < RESUMES_A_MINUTE).then_some(recent)
    }

    /// Notes an attempt to leave a stream that works.
    pub fn tried_to_move(&mut self, now: Instant) {
        self.moved = Some(now);
    }

    /// Whether it may leave a stream that works well.
    pub fn may_move(&self, now: Instant) -> bool {
        !self.tried_within(MINUTE, now)
    }

    /// Whether it may leave an apiserver that is unwell: sooner, but not as a habit.
    pub fn may_flee(&self, now: Instant) -> bool {
        !self.tried_within(FLEE_PAUSE, now) && self.resumes(now) < RESUMES_A_MINUTE / 2
    }

    /// Whether it may leave a connection that has no future: no oftener than it would be resumed.
    pub fn may_leave(&self, now: Instant) -> bool {
        self.resumes(now) < RESUMES_A_MINUTE
    }

    fn resumes(&self, now: Instant) -> u32 {
        self.minute
            .filter(|(began, _)| now.saturating_duration_since(*began) < MINUTE)
            .map_or(0, |(_, count)| count)
    }

    fn tried_within(&self, time: Duration, now: Instant) -> bool {
        self.moved.is_some_and(|tried| now.saturating_duration_since(tried) < time)
    }
}

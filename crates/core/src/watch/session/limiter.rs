//! Limits how often one watch changes its upstream stream.
//!
//! The client does not notice a change, but each one makes an apiserver serve a new watch. A watch that
//! loses its stream too often ends instead of resuming, and its client starts a new watch. So a faulty
//! upstream cannot make the proxy resume forever.

use std::time::{Duration, Instant};

use super::input::MoveReason;

/// Maximum number of resumes of one watch in one [`WINDOW`]. Every move counts as a resume, except those that
/// balance load.
pub const MAX_RESUMES: u32 = 12;
/// Maximum number of shadows of one watch in one [`WINDOW`]. One that takes the place of the first stream counts as a
/// resume, too.
pub const MAX_SHADOWS: u32 = 12;
/// Length of a window. A window begins with the first resume, or shadow, after the end of the window before it.
const WINDOW: Duration = Duration::from_secs(60);
/// A watch is moved to balance load only if at least this time is left until its deadline.
pub const MIN_REMAINING_TO_REBALANCE: Duration = Duration::from_secs(30);
/// A watch is resumed, or moved for another reason, only if at least this time is left until its deadline.
pub const MIN_REMAINING: Duration = Duration::from_secs(2);
/// Minimum time from an attempt to move, for any reason, to a later one that balances load.
const REBALANCE_PAUSE: Duration = Duration::from_secs(60);
/// Minimum time from an attempt to move, for any reason, to a later one that evacuates an endpoint.
const EVACUATION_PAUSE: Duration = Duration::from_secs(2);

/// Counts the recent resumes and moves of one watch.
#[derive(Debug, Default)]
#[cfg_attr(test, derive(Clone))]
pub struct ResumeLimiter {
    /// Start of the current window, and the number of resumes in it.
    window: Option<(Instant, u32)>,
    /// The same for shadows.
    shadows: Option<(Instant, u32)>,
    last_move: Option<Instant>,
}

impl ResumeLimiter {
    /// Counts a resume. Returns the number of resumes before it in the current window, or `None` if the
    /// watch must not be resumed.
    pub fn count_resume(&mut self, now: Instant) -> Option<u32> {
        let recent = count(&mut self.window, now);
        (recent < MAX_RESUMES).then_some(recent)
    }

    /// Counts an attempt to move the watch away from a stream that works.
    pub fn count_move(&mut self, reason: MoveReason, now: Instant) {
        self.last_move = Some(now);
        if reason != MoveReason::Rebalance {
            self.count_resume(now);
        }
    }

    /// Whether the watch may be moved away from a stream that works:
    ///
    /// * to balance load: [`REBALANCE_PAUSE`] after the last attempt to move;
    /// * away from an endpoint that is degraded or whose probe fails: [`EVACUATION_PAUSE`] after the last
    ///   attempt to move, and only while fewer than half of the window's resumes are used;
    /// * away from a connection that drains: while any of the window's resumes is left.
    pub fn may_move(&self, reason: MoveReason, now: Instant) -> bool {
        let pause_is_over = |pause| {
            self.last_move.is_none_or(|moved| now.saturating_duration_since(moved) >= pause)
        };
        match reason {
            MoveReason::Rebalance => pause_is_over(REBALANCE_PAUSE),
            MoveReason::Evacuate => {
                pause_is_over(EVACUATION_PAUSE) && self.recent_resumes(now) < MAX_RESUMES / 2
            }
            MoveReason::Drain => self.recent_resumes(now) < MAX_RESUMES,
        }
    }

    /// Counts a shadow that is requested.
    pub fn count_shadow(&mut self, now: Instant) {
        count(&mut self.shadows, now);
    }

    /// Whether another shadow may be requested.
    pub fn may_shadow(&self, now: Instant) -> bool {
        recent(self.shadows, now) < MAX_SHADOWS
    }

    /// The number of resumes in the current window.
    pub fn recent_resumes(&self, now: Instant) -> u32 {
        recent(self.window, now)
    }
}

/// Adds one to a window, or begins another. Returns the number before.
fn count(window: &mut Option<(Instant, u32)>, now: Instant) -> u32 {
    let recent = recent(*window, now);
    let began = window.filter(|_| recent > 0).map_or(now, |(began, _)| began);
    *window = Some((began, recent + 1));
    recent
}

/// The number in a window that is not over.
fn recent(window: Option<(Instant, u32)>, now: Instant) -> u32 {
    window
        .filter(|(began, _)| now.saturating_duration_since(*began) < WINDOW)
        .map_or(0, |(_, count)| count)
}

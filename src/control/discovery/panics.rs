//! What follows a panic in a task of a source: the source ends, and the [`controller`](super::controller) logs that and
//! starts it again after a pause.

use std::time::{Duration, Instant};

use jackstay_core::backoff::Backoff;
use tokio::task::{JoinError, JoinSet};

/// A source that panics at an answer would otherwise ask for that again at once.
const PAUSES: Backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(300));
/// The pauses begin anew after this time without a panic.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(900);

/// Panics if one of the tasks of a source has panicked.
pub fn propagate(tasks: &mut JoinSet<()>) {
    while let Some(ended) = tasks.try_join_next() {
        if let Err(Ok(panic)) = ended.map_err(JoinError::try_into_panic) {
            std::panic::resume_unwind(panic);
        }
    }
}

/// The panics of the sources of an upstream.
#[derive(Debug)]
pub struct Panics {
    pauses: Backoff,
    last: Option<Instant>,
}

impl Panics {
    /// None yet.
    pub const fn none() -> Self {
        Self { pauses: PAUSES.with_factors(0.5, 1.0), last: None }
    }

    /// Counts a panic. Returns the pause before the source is started again; `random` is in 0..1.
    pub fn counted(&mut self, now: Instant, random: f64) -> Duration {
        if self.last.is_some_and(|last| now.saturating_duration_since(last) > FORGOTTEN_AFTER) {
            self.pauses.reset();
        }
        self.last = Some(now);
        self.pauses.failed();
        self.pauses.pause_at(random)
    }
}

#[cfg(test)]
mod tests {
    use jackstay_sys::clock;

    use super::*;

    #[test]
    fn counted_doubles_the_pause_until_panics_are_forgotten() {
        let (start, mut panics) = (clock::now(), Panics::none());
        let mut pause_at =
            |seconds| panics.counted(start + Duration::from_secs(seconds), 1.0).as_secs();
        assert_eq!([0, 1, 3, 7].map(&mut pause_at), [1, 2, 4, 8]);
        assert_eq!([20, 40, 80, 160, 320, 640].map(&mut pause_at), [16, 32, 64, 128, 256, 300]);
        assert_eq!(pause_at(640 + 901), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn propagate_panics_as_the_task_has() {
        let mut tasks = JoinSet::new();
        tasks.spawn(async {});
        tasks.spawn(async { panic!("a defect") });
        let source = tokio::spawn(async move {
            loop {
                propagate(&mut tasks);
                tokio::task::yield_now().await;
            }
        });
        let ended: Result<(), _> = source.await;
        assert_eq!(ended.unwrap_err().into_panic().downcast_ref(), Some(&"a defect"));
    }
}

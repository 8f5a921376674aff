//! When the prober asks a question again that an apiserver may refuse or not answer, on whatever connection.

use std::time::{Duration, Instant};

use fastrand::Rng;

use crate::backoff::Backoff;

/// Pause after the first answer that says nothing. It doubles with each one in a row.
pub const FIRST_PAUSE: Duration = Duration::from_millis(200);
/// Longest pause after an error that may pass.
const LONGEST_PAUSE: Duration = Duration::from_secs(10);
/// Longest pause after a refusal: the rights of the prober may change.
const LONGEST_REFUSED_PAUSE: Duration = Duration::from_secs(600);

/// What an answer says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QuestionAnswer {
    /// What was asked.
    Known,
    /// It will not be answered.
    Refused,
    /// It may be answered later.
    Failed,
}

/// See the module documentation.
#[derive(Debug)]
pub struct QuestionPace {
    backoff: Backoff,
    /// At once if `None`.
    next: Option<Instant>,
    /// Shortest pause after an answer.
    shortest: Duration,
    is_refused: bool,
}

impl QuestionPace {
    /// A question that was not asked. `shortest`: the shortest pause after an answer.
    pub fn new(shortest: Duration) -> Self {
        let backoff = Backoff::new(FIRST_PAUSE, LONGEST_REFUSED_PAUSE).with_factors(0.5, 1.0);
        Self { backoff, next: None, shortest, is_refused: false }
    }

    /// The question is asked. One that gets no answer, because its connection ends, counts as failed.
    pub fn asked(&mut self, now: Instant, rng: &mut Rng) {
        self.backoff.failed();
        self.next = Some(now + self.backoff.random_pause(rng).min(LONGEST_PAUSE));
    }

    /// The answer to the question that was asked.
    pub fn answered(&mut self, answer: QuestionAnswer, now: Instant, rng: &mut Rng) {
        self.is_refused = answer == QuestionAnswer::Refused;
        self.next = Some(match answer {
            QuestionAnswer::Known => {
                self.backoff.reset();
                now + self.shortest
            }
            QuestionAnswer::Refused => now + self.backoff.random_pause(rng),
            QuestionAnswer::Failed => now + self.backoff.random_pause(rng).min(LONGEST_PAUSE),
        });
    }

    /// Whether the last answer was a refusal.
    pub fn is_refused(&self) -> bool {
        self.is_refused
    }

    /// When the question is asked again, from `now` on.
    pub fn next(&self, now: Instant) -> Instant {
        self.next.map_or(now, |next| next.max(now))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn question_without_an_answer_is_repeated_at_longer_and_longer_pauses() {
        let (now, mut rng) = (Instant::now(), Rng::with_seed(1));
        let shortest = Duration::from_secs(1);
        let mut pace = QuestionPace::new(shortest);
        assert_eq!(pace.next(now), now);
        let expect = |pace: &QuestionPace, longest: Duration| {
            let pause = pace.next(now) - now;
            assert!((longest / 2..=longest).contains(&pause), "{pause:?} {longest:?}");
        };
        for factor in [1, 2, 4] {
            pace.asked(now, &mut rng);
            expect(&pace, FIRST_PAUSE * factor);
        }
        pace.answered(QuestionAnswer::Refused, now, &mut rng);
        expect(&pace, FIRST_PAUSE * 4);
        for _ in 0..10 {
            pace.asked(now, &mut rng);
        }
        assert!(pace.next(now) - now <= LONGEST_PAUSE);
        pace.answered(QuestionAnswer::Refused, now, &mut rng);
        assert!(pace.next(now) - now > LONGEST_PAUSE && pace.is_refused());
        pace.answered(QuestionAnswer::Known, now, &mut rng);
        assert_eq!(pace.next(now), now + shortest);
        pace.asked(now, &mut rng);
        expect(&pace, FIRST_PAUSE);
    }
}

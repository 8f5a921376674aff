//! Connects to the first of several candidates that answers. The next one is tried when one fails, and as well when
//! none has answered for a while.

use std::fmt::Display;
use std::future::{Future, pending};
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use tokio::time::sleep;

/// Maximum number of failures in an error message.
const MAX_REASONS: usize = 5;

/// Returns the first attempt that succeeds, and drops the others. `None` when all have failed.
///
/// `next` returns the next attempt, if any, for the failures until then. It is asked for one at the beginning, after
/// each failure, and each time that no attempt has ended within `pause`. The failures are left to the caller, which may
/// drop the race before its end.
pub async fn race<T, E, F>(
    mut next: impl FnMut(&[E]) -> Option<F>,
    pause: impl Fn() -> Duration,
    failures: &mut Vec<E>,
) -> Option<T>
where
    F: Future<Output = Result<T, E>>,
{
    let mut attempts = FuturesUnordered::new();
    loop {
        let attempt = next(failures);
        let has_begun = attempt.is_some();
        attempts.extend(attempt);
        let next_is_due = async { if has_begun { sleep(pause()).await } else { pending().await } };
        tokio::select! {
            biased;
            ended = attempts.next() => match ended? {
                Ok(connected) => return Some(connected),
                Err(failure) => failures.push(failure),
            },
            () = next_is_due => {}
        }
    }
}

/// The last failures in one text, because the very last one may concern all attempts.
pub fn joined<E: Display>(failures: &[E]) -> String {
    if failures.is_empty() {
        return "there is no endpoint".to_owned();
    }
    let last = &failures[failures.len().saturating_sub(MAX_REASONS)..];
    last.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use jackstay_sys::clock;
    use std::cell::RefCell;

    const PAUSE: Duration = Duration::from_millis(250);

    /// An attempt that ends after `ms` milliseconds.
    #[derive(Clone, Copy)]
    struct Attempt {
        ms: u64,
        succeeds: bool,
    }

    /// The index of the winner, the failures, when each attempt began, and when the race ended, in milliseconds.
    async fn run(attempts: &[Attempt]) -> (Option<usize>, Vec<usize>, Vec<u128>, u128) {
        let start = clock::now();
        let (begun, mut failures) = (RefCell::new(Vec::new()), Vec::new());
        let mut numbered = attempts.iter().enumerate();
        let next = |_: &[usize]| {
            let (index, attempt) = numbered.next()?;
            begun.borrow_mut().push(clock::elapsed(start).as_millis());
            Some(async move {
                sleep(Duration::from_millis(attempt.ms)).await;
                if attempt.succeeds { Ok(index) } else { Err(index) }
            })
        };
        let winner = race(next, || PAUSE, &mut failures).await;
        (winner, failures, begun.take(), clock::elapsed(start).as_millis())
    }

    #[tokio::test(start_paused = true)]
    async fn next_attempt_begins_after_a_failure_or_a_pause_and_the_first_success_wins() {
        let works = |ms| Attempt { ms, succeeds: true };
        let fails = |ms| Attempt { ms, succeeds: false };
        for (attempts, winner, failures, begun, ended) in [
            (&[][..], None, &[][..], &[][..], 0),
            (&[works(10), works(10)], Some(0), &[], &[0], 10),
            (&[fails(10), works(10)], Some(1), &[0], &[0, 10], 20),
            (&[works(400), works(500)], Some(0), &[], &[0, 250], 400),
            (&[works(9_000), works(10)], Some(1), &[], &[0, 250], 260),
            // The failure of one does not end another one, and the next begins.
            (&[works(400), fails(50), works(9_000)], Some(0), &[1], &[0, 250, 300], 400),
            (&[fails(300), fails(10)], None, &[1, 0], &[0, 250], 300),
        ] {
            let expected = (winner, failures.to_vec(), begun.to_vec(), ended);
            assert_eq!(run(attempts).await, expected);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn failures_remain_when_the_race_is_dropped() {
        let mut failures = Vec::new();
        let mut attempts = [Some("refused"), None].into_iter();
        let next = |_: &[&str]| {
            let failure = attempts.next()?;
            Some(async move {
                match failure {
                    Some(failure) => Err::<(), _>(failure),
                    None => pending().await,
                }
            })
        };
        let race = race(next, || PAUSE, &mut failures);
        assert!(tokio::time::timeout(Duration::from_secs(1), race).await.is_err());
        assert_eq!(failures, ["refused"]);
    }

    #[test]
    fn joined_names_the_last_failures() {
        assert_eq!(joined::<&str>(&[]), "there is no endpoint");
        let failures: Vec<_> = (1..=7).map(|n| n.to_string()).collect();
        assert_eq!(joined(&failures), "3; 4; 5; 6; 7");
    }
}

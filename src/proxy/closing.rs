//! The end of a listener, or of the way that it leads: told once, and followed by its connections
//! and watches in their own time.
//!
//! | stage | connections | watches |
//! |---|---|---|
//! | open | are accepted and served | go on |
//! | draining | none is accepted; each gets a GOAWAY and ends with its last request | end cleanly where their clients ask again without a list, each at its own moment |
//! | over | are closed, whatever runs on them | with them |
//!
//! The moments are spread: on thousands of nodes at once, or with a thousand watches on one, all
//! clients would come back at the same time.

use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

/// How far the end has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Open,
    Draining { since: Instant, spread: Duration },
    Over,
}

/// Brings about the end. Dropping it is the end of everything that waits for it.
#[derive(Debug)]
pub struct Closer(watch::Sender<Stage>);

/// Waits for the end.
#[derive(Debug, Clone)]
pub struct Closing(watch::Receiver<Stage>);

impl Closer {
    /// Something that is open, and what waits for its end.
    pub fn new() -> (Self, Closing) {
        let (sender, receiver) = watch::channel(Stage::Open);
        (Self(sender), Closing(receiver))
    }

    /// Begins the drain. Watches end within `spread`.
    pub fn drain(&self, spread: Duration) {
        self.0.send_if_modified(|stage| {
            let begins = *stage == Stage::Open;
            if begins {
                *stage = Stage::Draining { since: Instant::now(), spread };
            }
            begins
        });
    }

    /// Closes what is left.
    pub fn close(&self) {
        self.0.send_replace(Stage::Over);
    }
}

impl Closing {
    /// Waits until the drain begins.
    pub async fn draining(&mut self) {
        // An error means that the other side is gone, with the program.
        let _ = self.0.wait_for(|stage| *stage != Stage::Open).await;
    }

    /// Whether what is left is to be closed.
    pub fn is_over(&self) -> bool {
        *self.0.borrow() == Stage::Over
    }

    /// Waits until what is left is to be closed.
    pub async fn over(&mut self) {
        let _ = self.0.wait_for(|stage| *stage == Stage::Over).await;
    }

    /// Waits until it is one watch's turn to end.
    pub async fn turn(&mut self) {
        let turn = match self.0.wait_for(|stage| *stage != Stage::Open).await.as_deref() {
            Ok(Stage::Draining { since, spread }) => *since + spread.mul_f64(fastrand::f64()),
            Ok(Stage::Open | Stage::Over) | Err(_) => return,
        };
        tokio::select! {
            () = sleep_until(turn) => {}
            () = self.over() => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::time::Instant;

    #[tokio::test(start_paused = true)]
    async fn turns_are_spread_over_the_time_given() {
        let (closer, closing) = Closer::new();
        let begun = Instant::now();
        let watches: Vec<_> = (0..200)
            .map(|_| {
                let mut closing = closing.clone();
                tokio::spawn(async move {
                    closing.turn().await;
                    begun.elapsed()
                })
            })
            .collect();
        closer.drain(Duration::from_secs(4));
        let mut ends = Vec::new();
        for watch in watches {
            ends.push(watch.await.unwrap());
        }
        ends.sort();
        assert!(ends[199] <= Duration::from_secs(4), "{:?}", ends[199]);
        for quarter in 0..4 {
            let from = Duration::from_secs(quarter);
            let there =
                ends.iter().filter(|end| (from..from + Duration::from_secs(1)).contains(*end));
            assert!(there.count() > 20, "second {quarter} has too few of {ends:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn whoever_is_late_finds_it_ended() {
        let (closer, mut closing) = Closer::new();
        closer.drain(Duration::from_secs(3600));
        closer.drain(Duration::ZERO);
        closing.draining().await;
        let begun = Instant::now();
        let mut waits = closing.clone();
        let turn = tokio::spawn(async move { waits.turn().await });
        tokio::task::yield_now().await;
        closer.close();
        turn.await.unwrap();
        closing.over().await;
        drop(closer);
        closing.turn().await;
        assert!(begun.elapsed() < Duration::from_secs(1));
    }
}

//! Decides when a request of a client that has proven nothing is sent upstream, and which of several is next.
//!
//! The apiserver ends a connection with a GOAWAY after a request that it cannot authenticate. So that one client
//! with invalid tokens does not delay another one whose token is valid but new, the sources take [`Turns`]:
//!
//! * Each source has limits of requests in progress and waiting.
//! * A source with [`MAX_REJECTIONS`] rejected requests within [`WINDOW`] is slowed: one request in
//!   [`SLOWED_INTERVAL`] starts. Half of the rejections are forgotten when a new token is accepted.
//! * The first few requests of a client connection without a rejected request are *favored*: they come before
//!   the others of their source, and have a pace of their own while the source is slowed. A client with a valid
//!   token is thus served although another process of the same user is slowed, as long as that one does not open
//!   a connection for each request.
//! * A request that was sent and has no response [`UNANSWERED_AFTER`] later, such as one whose body does not end, no
//!   longer counts to the limit of all requests in progress. Otherwise a few sources could hold back all others. It
//!   still counts to the limit of its source, and its end counts like that of any other request, so a source with
//!   slow responses or uploads has no more requests in progress, and is slowed for the same rejections. All such
//!   requests together are limited by the streams of their connections: each has one, and a request is only sent,
//!   and its time only begins, when it has got one.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::turns::{Cap, KeyCap, Next, Order, Pace, Pacing, Rules, Started, Turns, Waits};

/// A source with this number of rejected requests within [`WINDOW`] is slowed.
const MAX_REJECTIONS: usize = 20;
const WINDOW: Duration = Duration::from_secs(10);
/// Interval between the starts of a slowed source's requests.
const SLOWED_INTERVAL: Duration = Duration::from_millis(50);
/// The same for its favored requests.
const FAVORED_INTERVAL: Duration = Duration::from_millis(100);
/// Time after which a request without a response does not hold back those of other sources.
const UNANSWERED_AFTER: Duration = Duration::from_secs(1);
/// Maximum number of sources that are remembered.
const MAX_SOURCES: usize = 1024;
/// When this number of requests waits, no source may have more than [`FEW_WAITING`].
const MAX_WAITING: usize = 1024;
const FEW_WAITING: usize = 8;

/// The lanes of a source.
const FAVORED: usize = 0;
const OTHERS: usize = 1;

/// The limits of a queue.
#[derive(Debug, Clone, Copy)]
pub struct QueueLimits {
    /// Requests in progress, without those whose response is late.
    pub in_progress: usize,
    /// Requests in progress of one source.
    pub source_in_progress: usize,
    /// Waiting requests of one source.
    pub source_waiting: usize,
}

/// The requests in progress and the waiting ones, by source.
#[derive(Debug)]
pub struct FairQueue<K, T> {
    turns: Turns<K, T, 2>,
    max_in_progress: usize,
    /// When requests in progress were sent, in order, without those whose response is late.
    sent: VecDeque<(Instant, K, u64)>,
}

/// How a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// The apiserver accepted a token for the first time.
    Accepted,
    /// The apiserver rejected the token, or had none to check.
    Rejected,
    /// The response does not show which, or there is none.
    Unknown,
}

/// Whether a request belongs on the connections for clients whose tokens keep being rejected.
pub fn is_often_rejected<K, T>(started: &Started<K, T>) -> bool {
    started.is_paced && started.lane == OTHERS
}

impl<K: Ord + Copy, T> FairQueue<K, T> {
    /// An empty queue.
    pub const fn new(limits: QueueLimits) -> Self {
        let QueueLimits { in_progress, source_in_progress, source_waiting } = limits;
        let rules = Rules {
            waiting: Cap {
                total: MAX_WAITING,
                key: KeyCap::AtMost(source_waiting),
                floor: FEW_WAITING,
            },
            in_progress: Cap {
                total: in_progress,
                key: KeyCap::AtMost(source_in_progress),
                floor: 0,
            },
            order: Order::OldestFirst,
            pacing: Pacing::AfterFaults {
                paces: [
                    Pace { interval: FAVORED_INTERVAL, burst: 1 },
                    Pace { interval: SLOWED_INTERVAL, burst: 1 },
                ],
                faults: MAX_REJECTIONS,
                window: WINDOW,
            },
            evict_after: None,
            max_keys: MAX_SOURCES,
        };
        Self { turns: Turns::new(rules), max_in_progress: in_progress, sent: VecDeque::new() }
    }

    /// A request arrives, and waits for [`Self::next`].
    ///
    /// # Errors
    /// It is refused, because too many others wait.
    pub fn arrive(
        &mut self,
        source: K,
        favored: bool,
        request: T,
        now: Instant,
    ) -> Result<Waits<T>, T> {
        let lane = if favored { FAVORED } else { OTHERS };
        self.turns.wait(source, lane, request, now)
    }

    /// Number of waiting requests.
    pub fn waiting(&self) -> usize {
        self.turns.waiting()
    }

    /// A waiting request is cancelled.
    pub fn cancel(&mut self, source: K, id: u64) -> Option<T> {
        self.turns.cancel(source, id)
    }

    /// Cancels the waiting requests for which `is_wanted` holds.
    pub fn cancel_if(&mut self, is_wanted: impl Fn(&T) -> bool) -> Vec<T> {
        self.turns.cancel_if(is_wanted)
    }

    /// A request in progress is sent. To be called at most once for each.
    pub fn sent(&mut self, source: K, id: u64, now: Instant) {
        self.sent.push_back((now, source, id));
    }

    /// The next request that may start now, or when one that waits only for time may.
    pub fn next(&mut self, now: Instant) -> Next<K, T> {
        while let Some((at, source, id)) = self.sent.front()
            && now >= *at + UNANSWERED_AFTER
        {
            self.turns.uncount(*source, *id);
            self.sent.pop_front();
        }
        match self.turns.next(now) {
            // No other one can start before.
            Next::Wait(_) if self.turns.in_progress() >= self.max_in_progress => {
                Next::Wait(self.sent.front().map(|(at, ..)| *at + UNANSWERED_AFTER))
            }
            next => next,
        }
    }

    /// A request of the source has ended. Returns whether the source is slowed from now on.
    pub fn end(&mut self, source: K, id: u64, ended: Ended, now: Instant) -> bool {
        self.turns.end(source, id);
        self.sent.retain(|(.., sent)| *sent != id);
        match ended {
            Ended::Unknown => false,
            Ended::Accepted => {
                self.turns.forgive(source);
                false
            }
            Ended::Rejected => self.turns.fault(source, now),
        }
    }
}

#[cfg(test)]
mod tests;

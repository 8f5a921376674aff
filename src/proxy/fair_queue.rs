//! Decides when a request of a client that has proven nothing is sent upstream, and which of several is next. The
//! state machine is pure: requests are numbers, and the time is an argument.
//!
//! The apiserver ends a connection with a GOAWAY after a request that it cannot authenticate. So that one client
//! with invalid tokens does not delay another one whose token is valid but new:
//!
//! * Requests of different sources take turns, and each source has limits of requests in progress and waiting.
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

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use jackstay_sys::sockets::source::Source;

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

/// The requests in progress and the waiting ones.
#[derive(Debug)]
pub struct FairQueue {
    limits: QueueLimits,
    sources: BTreeMap<Source, SourceState>,
    /// The sources with waiting requests, in the order of their turns.
    turns: VecDeque<Source>,
    /// Requests in progress that are not in `late`.
    in_progress: usize,
    /// When requests in progress were sent, in order, without those in `late`.
    sent: VecDeque<(Instant, u64)>,
    /// Requests in progress that count only to their source.
    late: BTreeSet<u64>,
    waiting: usize,
}

#[derive(Debug)]
struct SourceState {
    /// Requests in progress, also those whose response is late.
    in_progress: usize,
    favored: VecDeque<u64>,
    others: VecDeque<u64>,
    /// When the latest requests were rejected, at most [`MAX_REJECTIONS`].
    rejected: VecDeque<Instant>,
    /// While the source is slowed: when the next favored request may start, and the next other one.
    next_favored: Instant,
    next_other: Instant,
    used: Instant,
}

/// What happens to a request that arrives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arrival {
    /// It waits for [`FairQueue::start_next`].
    Waits,
    /// It waits in place of this one, which is refused.
    Displaces(u64),
    /// Too many others wait.
    Refused,
}

/// A request that starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Started {
    /// The number of the request.
    pub id: u64,
    /// Its source.
    pub source: Source,
    /// Whether it belongs on the connections for clients whose tokens keep being rejected.
    pub apart: bool,
}

/// How a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// The apiserver accepted a token for the first time.
    Accepted,
    /// The apiserver rejected the token, or had none to check.
    Rejected,
    /// The response does not show which, or there is none.
    Unclear,
}

impl FairQueue {
    /// An empty queue.
    pub fn new(limits: QueueLimits) -> Self {
        Self {
            limits,
            sources: BTreeMap::new(),
            turns: VecDeque::new(),
            in_progress: 0,
            sent: VecDeque::new(),
            late: BTreeSet::new(),
            waiting: 0,
        }
    }

    /// A request arrives.
    pub fn arrive(&mut self, source: Source, id: u64, favored: bool, now: Instant) -> Arrival {
        if !self.sources.contains_key(&source) && !self.has_space_for_source() {
            return Arrival::Refused;
        }
        let state = self.sources.entry(source).or_insert_with(|| SourceState::new(now));
        state.used = now;
        let mut arrival = Arrival::Waits;
        let is_full = state.waiting() >= self.limits.source_waiting
            || self.waiting >= MAX_WAITING && state.waiting() >= FEW_WAITING;
        if is_full {
            match state.others.pop_back() {
                Some(displaced) if favored => {
                    self.waiting -= 1;
                    arrival = Arrival::Displaces(displaced);
                }
                newest => {
                    state.others.extend(newest);
                    return Arrival::Refused;
                }
            }
        }
        if state.waiting() == 0 && !self.turns.contains(&source) {
            self.turns.push_back(source);
        }
        if favored { &mut state.favored } else { &mut state.others }.push_back(id);
        self.waiting += 1;
        arrival
    }

    /// A waiting request is cancelled.
    pub fn cancel(&mut self, source: Source, id: u64) {
        let Some(state) = self.sources.get_mut(&source) else { return };
        let before = state.waiting();
        state.favored.retain(|waiting| *waiting != id);
        state.others.retain(|waiting| *waiting != id);
        self.waiting -= before - state.waiting();
    }

    /// A request in progress is sent. To be called at most once for each.
    pub fn sent(&mut self, id: u64, now: Instant) {
        self.sent.push_back((now, id));
    }

    /// The next request that may start now, if any.
    pub fn start_next(&mut self, now: Instant) -> Option<Started> {
        self.find_late(now);
        for _ in 0..self.turns.len() {
            if self.in_progress >= self.limits.in_progress {
                return None;
            }
            let source = self.turns.pop_front()?;
            let Some(state) = self.sources.get_mut(&source) else { continue };
            if state.waiting() == 0 {
                continue;
            }
            let limit = self.limits.source_in_progress;
            let started = if state.in_progress < limit { state.take(now) } else { None };
            if state.waiting() > 0 {
                self.turns.push_back(source);
            }
            if let Some((id, apart)) = started {
                state.in_progress += 1;
                self.in_progress += 1;
                self.waiting -= 1;
                return Some(Started { id, source, apart });
            }
        }
        None
    }

    /// A request of the source has ended. Returns whether the source is slowed from now on.
    pub fn end(&mut self, source: Source, id: u64, ended: Ended, now: Instant) -> bool {
        if !self.late.remove(&id) {
            self.in_progress -= 1;
            self.sent.retain(|(_, sent)| *sent != id);
        }
        let Some(state) = self.sources.get_mut(&source) else { return false };
        state.in_progress -= 1;
        state.used = now;
        match ended {
            Ended::Unclear => false,
            Ended::Accepted => {
                state.rejected.drain(..state.rejected.len().div_ceil(2));
                false
            }
            Ended::Rejected => {
                let was_slowed = state.is_slowed(now);
                if state.rejected.len() == MAX_REJECTIONS {
                    state.rejected.pop_front();
                }
                state.rejected.push_back(now);
                !was_slowed && state.is_slowed(now)
            }
        }
    }

    /// Stops counting the requests whose response is late.
    fn find_late(&mut self, now: Instant) {
        while let Some((_, id)) = self.sent.front().filter(|(at, _)| now >= *at + UNANSWERED_AFTER)
        {
            self.late.insert(*id);
            self.in_progress -= 1;
            self.sent.pop_front();
        }
    }

    /// When a request that waits only for time may start.
    pub fn wake_at(&self, now: Instant) -> Option<Instant> {
        if self.in_progress >= self.limits.in_progress {
            // No other one can start before.
            let first = self.sent.front().filter(|_| self.waiting > 0);
            return first.map(|(at, _)| *at + UNANSWERED_AFTER);
        }
        let waiting = self.turns.iter().filter_map(|source| self.sources.get(source));
        waiting
            .filter(|state| state.is_slowed(now))
            .flat_map(|state| {
                let favored = (!state.favored.is_empty()).then_some(state.next_favored);
                let other = (!state.others.is_empty()).then_some(state.next_other);
                [favored, other].into_iter().flatten()
            })
            .filter(|at| *at > now)
            .min()
    }

    /// Forgets the source that has been idle for longest if there are too many. False if none is idle.
    fn has_space_for_source(&mut self) -> bool {
        if self.sources.len() < MAX_SOURCES {
            return true;
        }
        let idle = self.sources.iter().filter(|(_, s)| s.in_progress == 0 && s.waiting() == 0);
        let oldest = idle.min_by_key(|(_, state)| state.used).map(|(source, _)| *source);
        oldest.is_some_and(|oldest| self.sources.remove(&oldest).is_some())
    }
}

impl SourceState {
    fn new(now: Instant) -> Self {
        Self {
            in_progress: 0,
            favored: VecDeque::new(),
            others: VecDeque::new(),
            rejected: VecDeque::new(),
            next_favored: now,
            next_other: now,
            used: now,
        }
    }

    fn waiting(&self) -> usize {
        self.favored.len() + self.others.len()
    }

    fn is_slowed(&self, now: Instant) -> bool {
        self.rejected.len() == MAX_REJECTIONS
            && self.rejected.front().is_some_and(|first| now < *first + WINDOW)
    }

    /// The next request that may start, and whether it belongs on separate connections.
    fn take(&mut self, now: Instant) -> Option<(u64, bool)> {
        if !self.is_slowed(now) {
            return Some((self.favored.pop_front().or_else(|| self.others.pop_front())?, false));
        }
        if now >= self.next_favored
            && let Some(id) = self.favored.pop_front()
        {
            self.next_favored = now + FAVORED_INTERVAL;
            return Some((id, false));
        }
        if now >= self.next_other
            && let Some(id) = self.others.pop_front()
        {
            self.next_other = now + SLOWED_INTERVAL;
            return Some((id, true));
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use jackstay_sys::clock;

    const LIMITS: QueueLimits =
        QueueLimits { in_progress: 8, source_in_progress: 4, source_waiting: 16 };
    const A: Source = Source::User(1);
    const B: Source = Source::User(2);
    const C: Source = Source::User(3);

    fn started(queue: &mut FairQueue, now: Instant) -> Vec<u64> {
        std::iter::from_fn(|| queue.start_next(now)).map(|started| started.id).collect()
    }

    fn reject(queue: &mut FairQueue, source: Source, count: usize, now: Instant) -> Vec<bool> {
        (0..count)
            .map(|_| {
                assert_eq!(queue.arrive(source, 0, false, now), Arrival::Waits);
                assert!(queue.start_next(now).is_some());
                queue.end(source, 0, Ended::Rejected, now)
            })
            .collect()
    }

    #[test]
    fn sources_take_turns_within_their_limits() {
        let (mut queue, now) = (FairQueue::new(LIMITS), clock::now());
        for id in 0..16 {
            assert_eq!(queue.arrive(A, id, false, now), Arrival::Waits);
        }
        assert_eq!(queue.arrive(A, 16, false, now), Arrival::Refused);
        for id in 100..103 {
            assert_eq!(queue.arrive(B, id, false, now), Arrival::Waits);
        }
        assert_eq!(started(&mut queue, now), [0, 100, 1, 101, 2, 102, 3]);
        assert_eq!(queue.arrive(A, 17, true, now), Arrival::Waits);
        queue.end(A, 0, Ended::Unclear, now);
        assert_eq!(started(&mut queue, now), [17], "it is favored");
        for id in [4, 5] {
            queue.cancel(A, id);
        }
        queue.end(A, 1, Ended::Unclear, now);
        assert_eq!(started(&mut queue, now), [6]);
    }

    #[test]
    fn a_favored_request_displaces_the_newest_other_one() {
        let (mut queue, now) = (FairQueue::new(LIMITS), clock::now());
        for id in 0..16 {
            queue.arrive(A, id, false, now);
        }
        assert_eq!(queue.arrive(A, 20, true, now), Arrival::Displaces(15));
        for id in 0..15 {
            assert!(matches!(queue.arrive(A, 21 + id, true, now), Arrival::Displaces(_)), "{id}");
        }
        assert_eq!(queue.arrive(A, 50, true, now), Arrival::Refused, "all are favored");
        assert_eq!(queue.waiting, 16);
    }

    #[test]
    fn a_source_with_many_rejections_is_slowed_until_they_are_old() {
        let (mut queue, start) = (FairQueue::new(LIMITS), clock::now());
        let slowed = reject(&mut queue, A, 20, start);
        assert_eq!(slowed.iter().position(|slowed| *slowed), Some(19));
        for id in 1..=4 {
            queue.arrive(A, id, false, start);
        }
        queue.arrive(A, 9, true, start);
        queue.arrive(B, 100, false, start);
        let first = queue.start_next(start).unwrap();
        assert_eq!((first.id, first.apart), (9, false));
        assert_eq!(queue.start_next(start).unwrap().id, 100, "another source is not slowed");
        let second = queue.start_next(start).unwrap();
        assert_eq!((second.id, second.apart), (1, true));
        assert_eq!(queue.start_next(start), None);
        assert_eq!(queue.wake_at(start), Some(start + SLOWED_INTERVAL));
        assert_eq!(started(&mut queue, start + SLOWED_INTERVAL), [2]);
        assert_eq!(started(&mut queue, start + WINDOW), [3], "limit of requests in progress");
        queue.end(A, 1, Ended::Unclear, start + WINDOW);
        let last = queue.start_next(start + WINDOW).unwrap();
        assert_eq!((last.id, last.apart), (4, false));
    }

    #[test]
    fn an_accepted_token_halves_the_rejections() {
        let (mut queue, now) = (FairQueue::new(LIMITS), clock::now());
        reject(&mut queue, A, 20, now);
        queue.arrive(A, 1, true, now);
        assert!(queue.start_next(now).is_some());
        assert!(!queue.end(A, 1, Ended::Accepted, now));
        let slowed = reject(&mut queue, A, 10, now);
        assert_eq!(slowed.iter().position(|slowed| *slowed), Some(9));
    }

    /// Two sources have all requests in progress, 0 to 7.
    fn full(start: Instant) -> FairQueue {
        let mut queue = FairQueue::new(LIMITS);
        for id in 0..4 {
            queue.arrive(A, id, false, start);
            queue.arrive(B, 4 + id, false, start);
        }
        assert_eq!(started(&mut queue, start).len(), 8);
        queue
    }

    #[test]
    fn a_late_response_holds_back_only_requests_of_its_source() {
        let start = clock::now();
        let (mut queue, later) = (full(start), start + Duration::from_millis(300));
        queue.arrive(A, 10, false, start);
        queue.arrive(C, 20, true, start);
        queue.arrive(C, 21, true, start);
        assert_eq!(queue.wake_at(start), None, "none is sent");
        queue.sent(0, start);
        queue.sent(5, later);
        queue.end(B, 5, Ended::Unclear, later);
        assert_eq!(started(&mut queue, later), [20]);
        queue.sent(20, later);
        assert_eq!(queue.wake_at(later), Some(start + UNANSWERED_AFTER));
        let now = start + UNANSWERED_AFTER;
        assert_eq!(started(&mut queue, now), [21], "A still has four");
        assert_eq!(queue.wake_at(now), Some(later + UNANSWERED_AFTER), "A waits");
        queue.end(A, 0, Ended::Unclear, now);
        assert_eq!((queue.in_progress, queue.late.len()), (8, 0), "it is not released twice");
        assert_eq!(started(&mut queue, now), [0; 0], "8 are in progress");
        for (source, id) in [(A, 1), (A, 2), (A, 3), (B, 4), (B, 6), (B, 7), (C, 20), (C, 21)] {
            queue.end(source, id, Ended::Unclear, now);
        }
        assert_eq!(started(&mut queue, now), [10]);
        queue.end(A, 10, Ended::Unclear, now);
        assert_eq!((queue.in_progress, queue.sent.len(), queue.waiting), (0, 0, 0));
        assert!(queue.sources.values().all(|state| state.in_progress == 0));
    }

    #[test]
    fn late_rejections_slow_their_source() {
        let (mut queue, start) = (FairQueue::new(LIMITS), clock::now());
        let mut now = start;
        for id in 0..20 {
            queue.arrive(A, id, false, now);
            assert_eq!(started(&mut queue, now), [id]);
            queue.sent(id, now);
            if id % 4 == 3 {
                now += UNANSWERED_AFTER;
                queue.arrive(A, 100 + id, false, now);
                assert_eq!(started(&mut queue, now), [0; 0], "four responses are late");
                assert_eq!((queue.in_progress, queue.late.len()), (0, 4));
                queue.cancel(A, 100 + id);
                for id in id - 3..=id {
                    assert_eq!(queue.end(A, id, Ended::Rejected, now), id == 19, "{id}");
                }
            }
        }
        queue.arrive(A, 200, false, now);
        queue.arrive(A, 201, false, now);
        assert_eq!(started(&mut queue, now), [200], "one in 50 ms");
    }

    #[test]
    fn the_number_of_sources_is_limited() {
        let (mut queue, start) = (FairQueue::new(LIMITS), clock::now());
        queue.arrive(A, 1, false, start);
        for uid in 10..5000 {
            let now = start + Duration::from_millis(uid.into());
            let source = Source::User(uid);
            assert_eq!(queue.arrive(source, 2, false, now), Arrival::Waits);
            queue.cancel(source, 2);
        }
        assert_eq!(queue.sources.len(), MAX_SOURCES);
        assert!(queue.sources.contains_key(&A), "it has a waiting request");
        assert_eq!(started(&mut queue, start), [1]);
        assert!(queue.turns.is_empty());
    }
}

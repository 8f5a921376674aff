//! Tests of the turns of unproven requests: limits, slowed sources and late responses.

use super::*;
use std::collections::HashMap;

const LIMITS: QueueLimits =
    QueueLimits { in_progress: 8, source_in_progress: 4, source_waiting: 16 };
const A: u32 = 1;
const B: u32 = 2;
const C: u32 = 3;

/// A queue in which tests give the requests their numbers.
struct Rig {
    queue: FairQueue<u32, u64>,
    ids: HashMap<u64, u64>,
}

impl Rig {
    fn new() -> Self {
        Self { queue: FairQueue::new(LIMITS), ids: HashMap::new() }
    }

    /// A request arrives. Returns the one that it displaces.
    fn arrive(
        &mut self,
        source: u32,
        request: u64,
        favored: bool,
        now: Instant,
    ) -> Result<Option<u64>, u64> {
        let Waits { id, displaced } = self.queue.arrive(source, favored, request, now)?;
        self.ids.insert(request, id);
        Ok(displaced)
    }

    /// The request that starts, and whether on separate connections.
    fn start_next(&mut self, now: Instant) -> Option<(u64, bool)> {
        match self.queue.next(now) {
            Next::Start(started) => Some((started.item, is_often_rejected(&started))),
            _ => None,
        }
    }

    fn wake_at(&mut self, now: Instant) -> Option<Instant> {
        match self.queue.next(now) {
            Next::Wait(at) => at,
            other => panic!("{other:?}"),
        }
    }

    fn cancel(&mut self, source: u32, request: u64) {
        assert_eq!(self.queue.cancel(source, self.ids[&request]), Some(request));
    }

    fn sent(&mut self, source: u32, request: u64, now: Instant) {
        self.queue.sent(source, self.ids[&request], now);
    }

    fn end(&mut self, source: u32, request: u64, ended: Ended, now: Instant) -> bool {
        self.queue.end(source, self.ids[&request], ended, now)
    }

    fn in_progress(&self) -> usize {
        self.queue.turns.in_progress()
    }
}

fn started(queue: &mut Rig, now: Instant) -> Vec<u64> {
    std::iter::from_fn(|| queue.start_next(now)).map(|(request, _)| request).collect()
}

fn reject(queue: &mut Rig, source: u32, count: usize, now: Instant) -> Vec<bool> {
    (0..count)
        .map(|_| {
            assert_eq!(queue.arrive(source, 0, false, now), Ok(None));
            assert!(queue.start_next(now).is_some());
            queue.end(source, 0, Ended::Rejected, now)
        })
        .collect()
}

#[test]
fn sources_take_turns_within_their_limits() {
    let (mut queue, now) = (Rig::new(), Instant::now());
    for id in 0..16 {
        assert_eq!(queue.arrive(A, id, false, now), Ok(None));
    }
    assert_eq!(queue.arrive(A, 16, false, now), Err(16));
    for id in 100..103 {
        assert_eq!(queue.arrive(B, id, false, now), Ok(None));
    }
    assert_eq!(started(&mut queue, now), [0, 100, 1, 101, 2, 102, 3]);
    assert_eq!(queue.arrive(A, 17, true, now), Ok(None));
    queue.end(A, 0, Ended::Unknown, now);
    assert_eq!(started(&mut queue, now), [17], "it is favored");
    for id in [4, 5] {
        queue.cancel(A, id);
    }
    queue.end(A, 1, Ended::Unknown, now);
    assert_eq!(started(&mut queue, now), [6]);
}

#[test]
fn a_favored_request_displaces_the_newest_other_one() {
    let (mut queue, now) = (Rig::new(), Instant::now());
    for id in 0..16 {
        queue.arrive(A, id, false, now).unwrap();
    }
    assert_eq!(queue.arrive(A, 20, true, now), Ok(Some(15)));
    for id in 0..15 {
        assert!(matches!(queue.arrive(A, 21 + id, true, now), Ok(Some(_))), "{id}");
    }
    assert_eq!(queue.arrive(A, 50, true, now), Err(50), "all are favored");
    assert_eq!(queue.queue.waiting(), 16);
}

#[test]
fn a_source_with_many_rejections_is_slowed_until_they_are_old() {
    let (mut queue, start) = (Rig::new(), Instant::now());
    let slowed = reject(&mut queue, A, 20, start);
    assert_eq!(slowed.iter().position(|slowed| *slowed), Some(19));
    for id in 1..=4 {
        queue.arrive(A, id, false, start).unwrap();
    }
    queue.arrive(A, 9, true, start).unwrap();
    queue.arrive(B, 100, false, start).unwrap();
    let first = queue.start_next(start).unwrap();
    assert_eq!(first, (9, false));
    assert_eq!(queue.start_next(start).unwrap().0, 100, "another source is not slowed");
    let second = queue.start_next(start).unwrap();
    assert_eq!(second, (1, true));
    assert_eq!(queue.start_next(start), None);
    assert_eq!(queue.wake_at(start), Some(start + SLOWED_INTERVAL));
    assert_eq!(started(&mut queue, start + SLOWED_INTERVAL), [2]);
    assert_eq!(started(&mut queue, start + WINDOW), [3], "limit of requests in progress");
    queue.end(A, 1, Ended::Unknown, start + WINDOW);
    let last = queue.start_next(start + WINDOW).unwrap();
    assert_eq!(last, (4, false));
}

#[test]
fn an_accepted_token_halves_the_rejections() {
    let (mut queue, now) = (Rig::new(), Instant::now());
    reject(&mut queue, A, 20, now);
    queue.arrive(A, 1, true, now).unwrap();
    assert!(queue.start_next(now).is_some());
    assert!(!queue.end(A, 1, Ended::Accepted, now));
    let slowed = reject(&mut queue, A, 10, now);
    assert_eq!(slowed.iter().position(|slowed| *slowed), Some(9));
}

/// Two sources have all requests in progress, 0 to 7.
fn full(start: Instant) -> Rig {
    let mut queue = Rig::new();
    for id in 0..4 {
        queue.arrive(A, id, false, start).unwrap();
        queue.arrive(B, 4 + id, false, start).unwrap();
    }
    assert_eq!(started(&mut queue, start).len(), 8);
    queue
}

#[test]
fn a_late_response_holds_back_only_requests_of_its_source() {
    let start = Instant::now();
    let (mut queue, later) = (full(start), start + Duration::from_millis(300));
    queue.arrive(A, 10, false, start).unwrap();
    queue.arrive(C, 20, true, start).unwrap();
    queue.arrive(C, 21, true, start).unwrap();
    assert_eq!(queue.wake_at(start), None, "none is sent");
    queue.sent(A, 0, start);
    queue.sent(B, 5, later);
    queue.end(B, 5, Ended::Unknown, later);
    assert_eq!(started(&mut queue, later), [20]);
    queue.sent(C, 20, later);
    assert_eq!(queue.wake_at(later), Some(start + UNANSWERED_AFTER));
    let now = start + UNANSWERED_AFTER;
    assert_eq!(started(&mut queue, now), [21], "A still has four");
    assert_eq!(queue.wake_at(now), Some(later + UNANSWERED_AFTER), "A waits");
    queue.end(A, 0, Ended::Unknown, now);
    assert_eq!(queue.in_progress(), 8, "it is not released twice");
    assert_eq!(started(&mut queue, now), [0; 0], "8 are in progress");
    for (source, id) in [(A, 1), (A, 2), (A, 3), (B, 4), (B, 6), (B, 7), (C, 20), (C, 21)] {
        queue.end(source, id, Ended::Unknown, now);
    }
    assert_eq!(started(&mut queue, now), [10]);
    queue.end(A, 10, Ended::Unknown, now);
    assert_eq!(queue.in_progress(), 0);
    assert_eq!((queue.queue.sent.len(), queue.queue.waiting()), (0, 0));
    assert_eq!(queue.queue.next(now), Next::Empty);
}

#[test]
fn late_rejections_slow_their_source() {
    let (mut queue, start) = (Rig::new(), Instant::now());
    let mut now = start;
    for id in 0..20 {
        queue.arrive(A, id, false, now).unwrap();
        assert_eq!(started(&mut queue, now), [id]);
        queue.sent(A, id, now);
        if id % 4 == 3 {
            now += UNANSWERED_AFTER;
            queue.arrive(A, 100 + id, false, now).unwrap();
            assert_eq!(started(&mut queue, now), [0; 0], "four responses are late");
            assert_eq!(queue.in_progress(), 0);
            queue.cancel(A, 100 + id);
            for id in id - 3..=id {
                assert_eq!(queue.end(A, id, Ended::Rejected, now), id == 19, "{id}");
            }
        }
    }
    queue.arrive(A, 200, false, now).unwrap();
    queue.arrive(A, 201, false, now).unwrap();
    assert_eq!(started(&mut queue, now), [200], "one in 50 ms");
}

#[test]
fn sources_beyond_the_limit_are_refused_while_all_are_in_use() {
    let (mut queue, start) = (Rig::new(), Instant::now());
    queue.arrive(A, 1, false, start).unwrap();
    for source in 10..5000 {
        let now = start + Duration::from_millis(source.into());
        assert_eq!(queue.arrive(source, 2, false, now), Ok(None));
        queue.cancel(source, 2);
    }
    assert_eq!(started(&mut queue, start), [1], "it was not forgotten");
    for source in 2..=MAX_SOURCES as u32 {
        assert_eq!(queue.arrive(source, 3, false, start), Ok(None), "{source}");
    }
    assert_eq!(queue.arrive(5_000, 4, true, start), Err(4));
    queue.cancel(MAX_SOURCES as u32, 3);
    assert_eq!(queue.arrive(5_000, 4, true, start), Ok(None));
}

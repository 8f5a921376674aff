//! Tests of turns, caps and paces, with random arrivals and ends.

use super::*;
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

const MS: Duration = Duration::from_millis(1);

/// Rules without limits.
const OPEN: Rules = Rules {
    waiting: Cap::NONE,
    in_progress: Cap::NONE,
    order: Order::OldestFirst,
    pacing: Pacing::Never,
    evict_after: None,
    max_keys: usize::MAX,
};

fn open<const LANES: usize>() -> Rules<LANES> {
    let Rules { waiting, in_progress, order, evict_after, max_keys, .. } = OPEN;
    Rules { waiting, in_progress, order, pacing: Pacing::Never, evict_after, max_keys }
}

#[derive(Debug, Clone, Copy)]
enum Step {
    Wait {
        key: u8,
        lane: usize,
    },
    /// Cancels one of those that wait.
    Cancel(prop::sample::Index),
    /// Ends one of those in progress.
    End(prop::sample::Index),
    Uncount(prop::sample::Index),
    Fault(u8),
    Next,
    Pause(u16),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let key = 0..5_u8;
    let step = prop_oneof![
        4 => (key.clone(), 0..2_usize).prop_map(|(key, lane)| Step::Wait { key, lane }),
        1 => any::<prop::sample::Index>().prop_map(Step::Cancel),
        2 => any::<prop::sample::Index>().prop_map(Step::End),
        1 => any::<prop::sample::Index>().prop_map(Step::Uncount),
        1 => key.prop_map(Step::Fault),
        6 => Just(Step::Next),
        1 => (0..40_u16).prop_map(Step::Pause),
    ];
    prop::collection::vec(step, 1..150)
}

fn caps() -> impl Strategy<Value = Cap> {
    let key = prop_oneof![(1..6_usize).prop_map(KeyCap::AtMost), Just(KeyCap::FewerThanFree)];
    (1..12_usize, key, 0..3_usize).prop_map(|(total, key, floor)| Cap { total, key, floor })
}

fn pacings() -> impl Strategy<Value = Pacing<2>> {
    let pace =
        || (1..20_u64, 1..4_u32).prop_map(|(ms, burst)| Pace { interval: MS * ms as u32, burst });
    prop_oneof![
        Just(Pacing::Never),
        [pace(), pace()].prop_map(Pacing::Always),
        ([pace(), pace()], 1..4_usize).prop_map(|(paces, faults)| Pacing::AfterFaults {
            paces,
            faults,
            window: MS * 30,
        }),
    ]
}

fn rules() -> impl Strategy<Value = Rules<2>> {
    let evict = prop::option::of((5..20_u32).prop_map(|ms| MS * ms));
    let order = prop_oneof![Just(Order::OldestFirst), Just(Order::NewestFirst)];
    (caps(), caps(), order, pacings(), evict, 2..6_usize).prop_map(
        |(waiting, in_progress, order, pacing, evict_after, max_keys)| Rules {
            waiting,
            in_progress,
            order,
            pacing,
            evict_after,
            max_keys,
        },
    )
}

/// What a caller knows of its [`Turns`]: by number, the key and whether it counts.
struct Caller {
    turns: Turns<u8, u32, 2>,
    now: Instant,
    waiting: BTreeMap<u64, (u8, u32)>,
    in_progress: BTreeMap<u64, (u8, bool)>,
    next_item: u32,
}

impl Caller {
    fn new(rules: Rules<2>) -> Self {
        Self {
            turns: Turns::new(rules),
            now: Instant::now(),
            waiting: BTreeMap::new(),
            in_progress: BTreeMap::new(),
            next_item: 0,
        }
    }

    fn waiting_of(&self, key: u8) -> usize {
        self.waiting.values().filter(|(of, _)| *of == key).count()
    }

    fn in_progress_of(&self, key: u8) -> usize {
        self.in_progress.values().filter(|(of, _)| *of == key).count()
    }

    fn counted(&self) -> usize {
        self.in_progress.values().filter(|(_, is_counted)| *is_counted).count()
    }

    fn wait(&mut self, key: u8, lane: usize) {
        let item = self.next_item;
        self.next_item += 1;
        let admits = self.turns.rules.waiting.admits(self.waiting.len(), self.waiting_of(key));
        match self.turns.wait(key, lane, item, self.now) {
            Ok(Waits { id, displaced }) => {
                assert_eq!(admits, displaced.is_none());
                if let Some(displaced) = displaced {
                    assert_eq!(lane, 0, "only the first lane displaces");
                    let before = self.waiting.len();
                    self.waiting.retain(|_, waiting| *waiting != (key, displaced));
                    assert_eq!(self.waiting.len(), before - 1, "it is of the same key");
                }
                assert!(self.waiting.insert(id, (key, item)).is_none());
            }
            Err(refused) => assert_eq!(refused, item),
        }
    }

    /// What starts or must end, if anything.
    fn next(&mut self) -> Next<u8, u32> {
        let next = self.turns.next(self.now);
        match &next {
            Next::Start(started) => {
                let Started { key, id, item, .. } = *started;
                let cap = self.turns.rules.in_progress;
                assert!(cap.admits(self.counted(), self.in_progress_of(key)), "{cap:?}");
                assert_eq!(self.waiting.remove(&id), Some((key, item)));
                self.in_progress.insert(id, (key, true));
            }
            Next::Evict(id) => {
                assert!(self.turns.rules.evict_after.is_some());
                let (key, _) = self.in_progress.remove(id).unwrap();
                assert!(self.waiting_of(key) > 0, "it is ended for another one of its key");
            }
            Next::Wait(at) => {
                assert!(at.is_none_or(|at| at > self.now), "it would start now");
                assert!(!self.waiting.is_empty());
            }
            Next::Empty => assert!(self.waiting.is_empty()),
        }
        next
    }

    fn step(&mut self, step: Step) {
        let nth = |ids: Vec<u64>, index: prop::sample::Index| {
            (!ids.is_empty()).then(|| ids[index.index(ids.len())])
        };
        match step {
            Step::Wait { key, lane } => self.wait(key, lane),
            Step::Cancel(index) => {
                let Some(id) = nth(self.waiting.keys().copied().collect(), index) else { return };
                let (key, item) = self.waiting.remove(&id).unwrap();
                assert_eq!(self.turns.cancel(key, id), Some(item));
                assert_eq!(self.turns.cancel(key, id), None);
            }
            Step::End(index) => {
                let Some(id) = nth(self.in_progress.keys().copied().collect(), index) else {
                    return;
                };
                let (key, _) = self.in_progress.remove(&id).unwrap();
                self.turns.end(key, id);
                self.turns.end(key, id);
            }
            Step::Uncount(index) => {
                let Some(id) = nth(self.in_progress.keys().copied().collect(), index) else {
                    return;
                };
                let (key, is_counted) = self.in_progress.get_mut(&id).unwrap();
                *is_counted = false;
                self.turns.uncount(*key, id);
            }
            Step::Fault(key) => drop(self.turns.fault(key, self.now)),
            Step::Next => drop(self.next()),
            Step::Pause(ms) => self.now += MS * u32::from(ms),
        }
        assert_eq!(self.turns.waiting(), self.waiting.len());
        assert_eq!(self.turns.in_progress(), self.counted());
        assert!(self.turns.keys.len() <= self.turns.rules.max_keys);
        let in_order: BTreeSet<_> = self.turns.order.iter().copied().collect();
        let waiting: BTreeSet<_> = self.waiting.values().map(|(key, _)| *key).collect();
        assert_eq!(in_order, waiting);
        assert_eq!(in_order.len(), self.turns.order.len(), "each key has one turn");
    }
}

proptest! {
    #[test]
    fn caps_hold_and_nothing_remains_after_all_have_left(rules in rules(), steps in steps()) {
        let mut caller = Caller::new(rules);
        for step in steps {
            caller.step(step);
        }
        for (id, (key, item)) in std::mem::take(&mut caller.waiting) {
            prop_assert_eq!(caller.turns.cancel(key, id), Some(item));
        }
        for (id, (key, _)) in std::mem::take(&mut caller.in_progress) {
            caller.turns.end(key, id);
        }
        prop_assert_eq!((caller.turns.waiting(), caller.turns.in_progress()), (0, 0));
        caller.now += Duration::from_secs(60);
        prop_assert_eq!(caller.next(), Next::Empty);
        prop_assert!(caller.turns.keys.is_empty());
    }

    #[test]
    fn what_waits_starts_in_time(rules in rules(), steps in steps()) {
        let mut caller = Caller::new(Rules { evict_after: Some(MS * 10), ..rules });
        for step in steps {
            caller.step(step);
        }
        // Whatever happened before, each wait has an end that a caller learns.
        for _ in 0..10_000 {
            match caller.next() {
                Next::Start(started) => {
                    caller.in_progress.remove(&started.id);
                    caller.turns.end(started.key, started.id);
                }
                Next::Evict(_) => {}
                Next::Wait(Some(at)) => caller.now = at,
                Next::Wait(None) => {
                    let (id, (key, _)) = caller.in_progress.pop_first().expect("all are idle");
                    caller.turns.end(key, id);
                }
                Next::Empty => break,
            }
        }
        prop_assert!(caller.waiting.is_empty());
    }

    #[test]
    fn no_key_gets_a_second_turn_while_another_waits(total in 1..6_usize, steps in steps()) {
        let in_progress = Cap { total, key: KeyCap::AtMost(usize::MAX), floor: 0 };
        let mut caller = Caller::new(Rules { in_progress, ..open() });
        // Since each key waits without a pause, how often each other one has started.
        let mut ahead: BTreeMap<u8, BTreeMap<u8, usize>> = BTreeMap::new();
        for step in steps {
            if let Step::Next = step
                && let Next::Start(started) = caller.next()
            {
                ahead.remove(&started.key);
                for others in ahead.values_mut() {
                    let turns = others.entry(started.key).or_default();
                    *turns += 1;
                    prop_assert!(*turns <= 1, "key {} started twice", started.key);
                }
            } else {
                caller.step(step);
            }
            ahead.retain(|key, _| caller.waiting_of(*key) > 0);
            for key in caller.waiting.values().map(|(key, _)| *key) {
                ahead.entry(key).or_default();
            }
        }
    }

    #[test]
    fn paced_key_starts_its_burst_and_then_one_in_each_interval(
        ms in 1..50_u32,
        burst in 1..10_u32,
        count in 1..40_u32,
    ) {
        let pace = Pace { interval: MS * ms, burst };
        let mut turns = Turns::new(Rules { pacing: Pacing::Always([pace]), ..OPEN });
        let start = Instant::now();
        for item in 0..count {
            turns.wait(1, 0, item, start).unwrap();
        }
        let (mut now, mut started) = (start, Vec::new());
        loop {
            match turns.next(now) {
                Next::Start(Started { item, .. }) => started.push((item, now - start)),
                Next::Wait(at) => now = at.unwrap(),
                Next::Empty => break,
                Next::Evict(_) => unreachable!("nothing is ended"),
            }
        }
        let expected = |item: u32| pace.interval * (item + 1).saturating_sub(burst);
        let expected: Vec<_> = (0..count).map(|item| (item, expected(item))).collect();
        prop_assert_eq!(started, expected);
    }

    #[test]
    fn keys_share_a_total_by_halves(total in 1..200_usize) {
        let cap = Cap { total, key: KeyCap::FewerThanFree, floor: 0 };
        let mut used = 0;
        for _ in 0..4 {
            let share = (0..=total).find(|of_key| !cap.admits(used + of_key, *of_key)).unwrap();
            prop_assert_eq!(share, (total - used).div_ceil(2));
            used += share;
        }
    }
}

/// The newest, and each eighth time the oldest.
#[test]
fn newest_starts_first_and_the_oldest_is_not_forgotten() {
    let mut turns = Turns::new(Rules { order: Order::NewestFirst, ..OPEN });
    let now = Instant::now();
    for item in 0..20 {
        turns.wait(1, 0, item, now).unwrap();
    }
    let mut started = Vec::new();
    while let Next::Start(next) = turns.next(now) {
        started.push(next.item);
    }
    let expected = [19, 18, 17, 16, 15, 14, 13, 0, 12, 11, 10, 9, 8, 7, 6, 1, 5, 4, 3, 2];
    assert_eq!(started, expected);
}

#[test]
fn earlier_lane_starts_first_and_displaces_the_newest_of_a_later_one() {
    let waiting = Cap { total: 10, key: KeyCap::AtMost(2), floor: 0 };
    let mut turns: Turns<u8, u8, 2> = Turns::new(Rules { waiting, ..open() });
    let now = Instant::now();
    for item in [1, 2] {
        assert_eq!(turns.wait(1, 1, item, now).unwrap().displaced, None);
    }
    assert_eq!(turns.wait(1, 1, 3, now), Err(3));
    assert_eq!(turns.wait(1, 0, 4, now).unwrap().displaced, Some(2));
    assert_eq!(turns.cancel_if(|item| *item == 1), [1]);
    assert_eq!(turns.wait(1, 1, 5, now).unwrap().displaced, None);
    let started = std::iter::from_fn(|| match turns.next(now) {
        Next::Start(started) => Some((started.item, started.lane, started.is_paced)),
        _ => None,
    });
    assert_eq!(started.collect::<Vec<_>>(), [(4, 0, false), (5, 1, false)]);
}

#[test]
fn oldest_in_progress_is_evicted_for_another_of_its_key_only() {
    let in_progress = Cap { total: 2, key: KeyCap::FewerThanFree, floor: 1 };
    let mut turns = Turns::new(Rules { in_progress, evict_after: Some(MS * 10), ..OPEN });
    let start = Instant::now();
    let first = turns.wait('a', 0, (), start).unwrap().id;
    turns.wait('a', 0, (), start).unwrap();
    assert!(matches!(turns.next(start), Next::Start(_)));
    assert_eq!(turns.next(start), Next::Wait(Some(start + MS * 10)));
    turns.wait('b', 0, (), start).unwrap();
    assert!(matches!(turns.next(start), Next::Start(Started { key: 'b', .. })));
    assert_eq!(turns.next(start + MS * 10), Next::Evict(first));
    assert!(matches!(turns.next(start + MS * 10), Next::Start(Started { key: 'a', .. })));
    assert_eq!(turns.next(start + MS * 10), Next::Empty);
    assert_eq!(turns.in_progress(), 2);
}

#[test]
fn rested_keys_are_forgotten_while_others_wait() {
    let pace = Pace { interval: MS * 5, burst: 400 };
    let mut turns = Turns::new(Rules { pacing: Pacing::Always([pace]), ..OPEN });
    let mut now = Instant::now();
    for key in [1, 2] {
        turns.wait(key, 0, (), now).unwrap();
    }
    assert!(matches!(turns.next(now), Next::Start(Started { key: 1, .. })));
    for key in 10..10_000 {
        // Another one always waits.
        turns.wait(key, 0, (), now).unwrap();
        let Next::Start(started) = turns.next(now) else { panic!("{key} waits") };
        turns.end(started.key, started.id);
        assert!(turns.keys.len() <= 2 * MIN_REMEMBERED, "{}", turns.keys.len());
        now += pace.interval;
    }
    assert!(turns.keys.contains_key(&1), "it has one in progress");
}

#[test]
fn paced_keys_are_remembered_until_they_have_their_whole_burst() {
    let pace = Pace { interval: MS * 5, burst: 400 };
    let mut turns = Turns::new(Rules { pacing: Pacing::Always([pace]), ..OPEN });
    let start = Instant::now();
    for key in 0..1_000 {
        turns.wait(key, 0, (), start).unwrap();
    }
    while let Next::Start(started) = turns.next(start) {
        turns.end(started.key, started.id);
    }
    assert_eq!(turns.keys.len(), 1_000);
    assert_eq!(turns.next(start + pace.interval), Next::Empty);
    assert_eq!(turns.keys.len(), 0);
}

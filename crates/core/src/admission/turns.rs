//! Turns of keys, such as the sources of clients, with caps. What waits and what is in progress are numbers with an
//! item of the caller, and the time is an argument.
//!
//! * Keys with something that waits take turns. So no key gets a second turn while another one that may start waits.
//! * A [`Cap`] limits what waits and what is in progress, in total and of one key.
//! * A key has one or several lanes. What waits in an earlier lane starts first, and displaces the newest of a later
//!   lane when the key may have no more waiting.
//! * [`Order`] says which of what waits in a lane starts first.
//! * A [`Pace`] limits how often a key starts something, always or after faults of the key ([`Pacing`]).
//! * What has been in progress for long can be ended for something that waits of the same key
//!   ([`Rules::evict_after`]), or be taken out of the total count ([`Turns::uncount`]).
//! * A key without anything that waits or is in progress is forgotten once its pace and its faults no longer matter.
//!
//! | state of the key whose turn it is | [`Turns::next`] |
//! |---|---|
//! | nothing waits | not in the order |
//! | cap of what is in progress reached, its oldest is in progress for [`Rules::evict_after`] | [`Next::Evict`], and the key keeps its turn |
//! | cap reached | the turn of the next key |
//! | every lane in which something waits is paced | the turn of the next key |
//! | otherwise | [`Next::Start`], and the key is the last in the order |

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

/// With more keys than this, those that are rested are forgotten.
const MIN_REMEMBERED: usize = 64;

/// What one key may have of a [`Cap`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeyCap {
    /// This number.
    AtMost(usize),
    /// Another one while it has fewer than are free. So one key gets at most half, and two get a third each.
    FewerThanFree,
}

/// A limit of a number, in total and for each key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cap {
    /// The limit of all keys together.
    pub total: usize,
    /// The limit of one key.
    pub key: KeyCap,
    /// A key with fewer than this gets another one in any case.
    pub floor: usize,
}

impl Cap {
    /// No limit.
    pub const NONE: Self = Self { total: usize::MAX, key: KeyCap::AtMost(usize::MAX), floor: 0 };

    /// Whether a key with `of_key` gets another one while `used` of all keys are in use.
    pub fn admits(self, used: usize, of_key: usize) -> bool {
        let free = self.total.saturating_sub(used);
        let limit = match self.key {
            KeyCap::AtMost(limit) => limit,
            KeyCap::FewerThanFree => free,
        };
        of_key < self.floor || free > 0 && of_key < limit
    }
}

/// Which of what waits in a lane of a key starts first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// What waits longest.
    OldestFirst,
    /// What waits shortest, but each [`OLDEST_TURN`]th time what waits longest. So what arrives after a flood of its key does
    /// not wait for the flood, and what waits longest is not forgotten.
    NewestFirst,
}

/// See [`Order::NewestFirst`].
pub const OLDEST_TURN: u8 = 8;

/// How often a key may start something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pace {
    /// Time after which the key may start another one.
    pub interval: Duration,
    /// Number that it may start at once after a pause; at least 1.
    pub burst: u32,
}

impl Pace {
    /// When a key may start another one that has its whole burst again at `full_burst_at`.
    pub(crate) fn start_at(self, full_burst_at: Option<Instant>, now: Instant) -> Instant {
        let until_full_burst =
            full_burst_at.map_or(Duration::ZERO, |at| at.saturating_duration_since(now));
        now + until_full_burst.saturating_sub(self.interval * (self.burst - 1))
    }
}

/// When the lanes of a key are paced.
#[derive(Debug, Clone, Copy)]
pub enum Pacing<const LANES: usize> {
    /// Never.
    Never,
    /// Always.
    Always([Pace; LANES]),
    /// While the key has had this number of faults within the window.
    AfterFaults {
        /// The paces of the lanes.
        paces: [Pace; LANES],
        /// Number of faults; at least 1.
        faults: usize,
        /// Time for which a fault counts.
        window: Duration,
    },
}

/// The rules of [`Turns`].
#[derive(Debug, Clone, Copy)]
pub struct Rules<const LANES: usize = 1> {
    /// Limits what waits.
    pub waiting: Cap,
    /// Limits what is in progress.
    pub in_progress: Cap,
    /// What starts first.
    pub order: Order,
    /// Limits how often a key starts something.
    pub pacing: Pacing<LANES>,
    /// Time after which something in progress may be ended for another one of its key.
    pub evict_after: Option<Duration>,
    /// Maximum number of keys that are remembered.
    pub max_keys: usize,
}

/// What waits, and what is in progress, by key.
#[derive(Debug)]
pub struct Turns<K, T, const LANES: usize = 1> {
    rules: Rules<LANES>,
    keys: BTreeMap<K, KeyState<T, LANES>>,
    /// The keys with something that waits, in the order of their turns.
    order: VecDeque<K>,
    waiting: usize,
    /// Number in progress that counts for the total.
    in_progress: usize,
    next_id: u64,
    /// With more keys than this, those that are rested are forgotten.
    forget_above: usize,
}

#[derive(Debug)]
struct KeyState<T, const LANES: usize> {
    waiting: [VecDeque<(u64, T)>; LANES],
    /// How many started since what waited longest did.
    since_oldest: u8,
    /// What is in progress, oldest first.
    in_progress: VecDeque<InProgress>,
    /// When each lane has its whole burst again.
    full_burst_at: [Option<Instant>; LANES],
    /// The latest faults, at most as many as pace the key.
    faults: VecDeque<Instant>,
}

#[derive(Debug)]
struct InProgress {
    id: u64,
    since: Instant,
    /// Whether it counts for the total.
    is_counted: bool,
}

/// Something that waits from now on.
#[derive(Debug, PartialEq, Eq)]
pub struct Waits<T> {
    /// Its number.
    pub id: u64,
    /// What waits no longer, because this has displaced it.
    pub displaced: Option<T>,
}

/// Something that starts.
#[derive(Debug, PartialEq, Eq)]
pub struct Started<K, T> {
    /// The key.
    pub key: K,
    /// The number of what starts.
    pub id: u64,
    /// The item of the caller.
    pub item: T,
    /// The lane in which it has waited.
    pub lane: usize,
    /// Whether the key is paced.
    pub is_paced: bool,
}

/// What happens next.
#[derive(Debug, PartialEq, Eq)]
pub enum Next<K, T> {
    /// This starts.
    Start(Started<K, T>),
    /// This must end for another one of its key. It no longer counts.
    Evict(u64),
    /// Nothing may start until something in progress ends, or until this time.
    Wait(Option<Instant>),
    /// Nothing waits.
    Empty,
}

impl<K: Ord + Copy, T, const LANES: usize> Turns<K, T, LANES> {
    /// Nothing waits or is in progress.
    pub const fn new(rules: Rules<LANES>) -> Self {
        Self {
            rules,
            keys: BTreeMap::new(),
            order: VecDeque::new(),
            waiting: 0,
            in_progress: 0,
            next_id: 0,
            forget_above: MIN_REMEMBERED,
        }
    }

    /// Number of what waits.
    pub fn waiting(&self) -> usize {
        self.waiting
    }

    /// Number of what is in progress, without what [`Self::uncount`] has taken out.
    pub fn in_progress(&self) -> usize {
        self.in_progress
    }

    /// Puts something into a lane of this key.
    ///
    /// # Errors
    /// The item, if too many wait, of the key or of all.
    pub fn wait(&mut self, key: K, lane: usize, item: T, now: Instant) -> Result<Waits<T>, T> {
        if !self.keys.contains_key(&key) && !self.has_space_for_key(now) {
            return Err(item);
        }
        let state = self.keys.entry(key).or_insert_with(KeyState::new);
        let of_key = state.waiting();
        let mut displaced = None;
        if self.rules.waiting.admits(self.waiting, of_key) {
            self.waiting += 1;
        } else {
            let mut later = state.waiting[lane + 1..].iter_mut().rev();
            match later.find_map(VecDeque::pop_back) {
                Some((_, newest)) => displaced = Some(newest),
                None => return Err(item),
            }
        }
        if of_key == 0 {
            self.order.push_back(key);
        }
        let id = self.next_id;
        self.next_id += 1;
        state.waiting[lane].push_back((id, item));
        Ok(Waits { id, displaced })
    }

    /// Something waits no longer. Changes nothing if it does not wait.
    pub fn cancel(&mut self, key: K, id: u64) -> Option<T> {
        let state = self.keys.get_mut(&key)?;
        let item = state.waiting.iter_mut().find_map(|lane| {
            // Numbers rise.
            let at = lane.binary_search_by_key(&id, |(waiting, _)| *waiting).ok()?;
            lane.remove(at)
        });
        let (_, item) = item?;
        self.waiting -= 1;
        if state.waiting() == 0 {
            self.order.retain(|waiting| *waiting != key);
        }
        Some(item)
    }

    /// Cancels all that wait and for which `is_wanted` holds.
    pub fn cancel_if(&mut self, is_wanted: impl Fn(&T) -> bool) -> Vec<T> {
        let wanted = self.keys.iter().flat_map(|(key, state)| {
            let waiting = state.waiting.iter().flatten();
            waiting.filter(|(_, item)| is_wanted(item)).map(|(id, _)| (*key, *id))
        });
        let wanted: Vec<_> = wanted.collect();
        wanted.into_iter().filter_map(|(key, id)| self.cancel(key, id)).collect()
    }

    /// What starts now, if anything. To be called until it returns [`Next::Wait`] or [`Next::Empty`].
    pub fn next(&mut self, now: Instant) -> Next<K, T> {
        let Cap { total, floor, .. } = self.rules.in_progress;
        if self.waiting > 0 && floor == 0 && self.in_progress >= total && !self.can_evict() {
            return Next::Wait(None);
        }
        let mut earliest: Option<Instant> = None;
        for _ in 0..self.order.len() {
            let Some(key) = self.order.pop_front() else { break };
            let Some(state) = self.keys.get_mut(&key) else { continue };
            let blocked_until =
                if self.rules.in_progress.admits(self.in_progress, state.in_progress.len()) {
                    match state.start(self.rules.order, self.rules.pacing, now) {
                        Ok((id, item, lane, is_paced)) => {
                            self.waiting -= 1;
                            self.in_progress += 1;
                            if state.waiting() > 0 {
                                self.order.push_back(key);
                            }
                            return Next::Start(Started { key, id, item, lane, is_paced });
                        }
                        Err(at) => Some(at),
                    }
                } else {
                    let at = state.evict_at(self.rules.evict_after);
                    if at.is_some_and(|at| now >= at)
                        && let Some(oldest) = state.in_progress.pop_front()
                    {
                        self.in_progress -= usize::from(oldest.is_counted);
                        self.order.push_front(key);
                        return Next::Evict(oldest.id);
                    }
                    at
                };
            self.order.push_back(key);
            earliest = [earliest, blocked_until].into_iter().flatten().min();
        }
        if self.waiting > 0 {
            return Next::Wait(earliest);
        }
        self.forget_rested(now);
        Next::Empty
    }

    /// Something in progress no longer counts for the total, but still for its key. Changes nothing if it is not in
    /// progress.
    pub fn uncount(&mut self, key: K, id: u64) {
        let Some(state) = self.keys.get_mut(&key) else { return };
        let Some(found) = state.in_progress.iter_mut().find(|found| found.id == id) else { return };
        self.in_progress -= usize::from(std::mem::replace(&mut found.is_counted, false));
    }

    /// Something in progress has ended. Changes nothing if it is not in progress.
    pub fn end(&mut self, key: K, id: u64) {
        let Some(state) = self.keys.get_mut(&key) else { return };
        if let Some(at) = state.in_progress.iter().position(|found| found.id == id)
            && let Some(ended) = state.in_progress.remove(at)
        {
            self.in_progress -= usize::from(ended.is_counted);
        }
    }

    /// Records a fault of the key. Returns whether the key is paced from now on and was not before.
    pub fn fault(&mut self, key: K, now: Instant) -> bool {
        let Pacing::AfterFaults { faults, .. } = self.rules.pacing else { return false };
        let Some(state) = self.keys.get_mut(&key) else { return false };
        let was_paced = state.is_paced(self.rules.pacing, now);
        if state.faults.len() == faults {
            state.faults.pop_front();
        }
        state.faults.push_back(now);
        !was_paced && state.is_paced(self.rules.pacing, now)
    }

    /// Forgets the older half of the faults of the key.
    pub fn forgive(&mut self, key: K) {
        if let Some(state) = self.keys.get_mut(&key) {
            state.faults.drain(..state.faults.len().div_ceil(2));
        }
    }

    fn can_evict(&self) -> bool {
        self.rules.evict_after.is_some()
    }

    /// Forgets keys if there are many: those that are rested, and if there are still too many, the idle one whose last
    /// fault is the oldest. False if none is idle.
    fn has_space_for_key(&mut self, now: Instant) -> bool {
        if self.keys.len() >= self.forget_above.min(self.rules.max_keys) {
            self.forget_rested(now);
        }
        if self.keys.len() < self.rules.max_keys {
            return true;
        }
        let idle = self.keys.iter().filter(|(_, state)| state.is_idle());
        let oldest = idle.min_by_key(|(_, state)| state.faults.back()).map(|(key, _)| *key);
        oldest.is_some_and(|oldest| self.keys.remove(&oldest).is_some())
    }

    fn forget_rested(&mut self, now: Instant) {
        let pacing = self.rules.pacing;
        self.keys.retain(|_, state| !state.is_rested(pacing, now));
        self.forget_above = (2 * self.keys.len()).max(MIN_REMEMBERED);
    }
}

impl<T, const LANES: usize> KeyState<T, LANES> {
    fn new() -> Self {
        Self {
            waiting: std::array::from_fn(|_| VecDeque::new()),
            since_oldest: 0,
            in_progress: VecDeque::new(),
            full_burst_at: [None; LANES],
            faults: VecDeque::new(),
        }
    }

    fn waiting(&self) -> usize {
        self.waiting.iter().map(VecDeque::len).sum()
    }

    fn is_idle(&self) -> bool {
        self.in_progress.is_empty() && self.waiting() == 0
    }

    /// Whether the key is as good as a new one.
    fn is_rested(&self, pacing: Pacing<LANES>, now: Instant) -> bool {
        let window = match pacing {
            Pacing::AfterFaults { window, .. } => window,
            Pacing::Never | Pacing::Always(_) => Duration::ZERO,
        };
        self.is_idle()
            && self.full_burst_at.iter().flatten().all(|at| now >= *at)
            && self.faults.back().is_none_or(|last| now >= *last + window)
    }

    fn is_paced(&self, pacing: Pacing<LANES>, now: Instant) -> bool {
        match pacing {
            Pacing::Never => false,
            Pacing::Always(_) => true,
            Pacing::AfterFaults { faults, window, .. } => {
                self.faults.len() == faults
                    && self.faults.front().is_some_and(|first| now < *first + window)
            }
        }
    }

    /// When the oldest in progress may be ended for another one.
    fn evict_at(&self, evict_after: Option<Duration>) -> Option<Instant> {
        Some(self.in_progress.front()?.since + evict_after?)
    }

    /// Takes out what starts next in a lane.
    fn take(&mut self, order: Order, lane: usize) -> Option<(u64, T)> {
        self.since_oldest = (self.since_oldest + 1) % OLDEST_TURN;
        if order == Order::OldestFirst || self.since_oldest == 0 {
            self.waiting[lane].pop_front()
        } else {
            self.waiting[lane].pop_back()
        }
    }

    /// Starts the first that waits, of the first lane that may start one: its number, item, and lane, and whether the
    /// key is paced. The error is the time at which one may start.
    fn start(
        &mut self,
        order: Order,
        pacing: Pacing<LANES>,
        now: Instant,
    ) -> Result<(u64, T, usize, bool), Instant> {
        let is_paced = self.is_paced(pacing, now);
        let mut earliest: Option<Instant> = None;
        for lane in 0..LANES {
            if self.waiting[lane].is_empty() {
                continue;
            }
            if let Pacing::Always(paces) | Pacing::AfterFaults { paces, .. } = pacing
                && is_paced
            {
                let (pace, full_burst_at) = (paces[lane], self.full_burst_at[lane]);
                let at = pace.start_at(full_burst_at, now);
                if at > now {
                    earliest = Some(earliest.map_or(at, |earliest| earliest.min(at)));
                    continue;
                }
                self.full_burst_at[lane] =
                    Some(full_burst_at.map_or(now, |at| at.max(now)) + pace.interval);
            }
            if let Some((id, item)) = self.take(order, lane) {
                self.in_progress.push_back(InProgress { id, since: now, is_counted: true });
                return Ok((id, item, lane, is_paced));
            }
        }
        Err(earliest.unwrap_or(now))
    }
}

#[cfg(test)]
mod tests;

//! Decides when the TLS handshake of each accepted connection starts.
//!
//! Any client can cause handshakes. One takes 1.1 ms of the worker's CPU time with an RSA-2048 certificate, 0.45 ms
//! with ECDSA P-256, and 0.1 ms if it resumes a session (measured with `openssl s_time`, accept and close included).
//! A connection asks for its turn when the client has sent its first bytes:
//!
//! * A turn is one handshake up to the answer to the `ClientHello`. One handshake has its turn at a time, and
//!   between two turns the event loop runs a batch of other tasks ([`super::task_queues`]).
//! * The sources take turns. So a handshake waits for at most one other of each source, however many another
//!   source starts.
//! * A handshake is in progress until the client's certificate is verified.
//! * A source starts another handshake while it has fewer in progress than are free of the worker's share
//!   ([`super::handshake_memory`]), so one source has at most half. Beyond that, a handshake of the source that is in progress for
//!   [`STALLED_AFTER`] is ended for a waiting one. A source without a handshake in progress always gets its turn.
//! * A source gets [`RATE`] turns a second after a burst of [`BURST`], which is enough for all pods of a node
//!   that reconnect at once. Handshakes beyond that wait, until the handshake timeout.
//!
//! Processes of one user share the turns of their source. If such a process floods the listener, the handshakes
//! of the others wait in its queue.

use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::rc::Rc;
use std::time::{Duration, Instant};

use jackstay_sys::clock;
use jackstay_sys::sockets::source::Source;
use tokio::sync::Notify;
use tokio::task::{spawn_local, yield_now};
use tokio::time::timeout_at;

use super::handshake_memory;

/// Handshakes of one source in a second. At 1.1 ms each they take 22 % of a core.
const RATE: u32 = 200;
/// Handshakes that a source may start at once after a pause.
const BURST: u32 = 400;
/// Time after which a source gets another turn.
const INTERVAL: Duration = Duration::from_millis(1_000 / RATE as u64);

/// Sources that are remembered although they may have rested.
const MIN_REMEMBERED: usize = 64;
/// Age from which a handshake may be ended for another one of its source. A usual one takes two round trips.
const STALLED_AFTER: Duration = Duration::from_secs(1);

/// Handshakes of one worker that wait for their turn or are in progress.
#[derive(Debug)]
pub struct HandshakeQueue {
    turns: RefCell<Turns<Rc<Handshake>>>,
    /// Notified when a handshake waits or has ended.
    changed: Notify,
}

#[derive(Debug, Default)]
struct Handshake {
    turn: Notify,
    stalled: Notify,
}

/// A handshake in progress, until this is dropped.
#[derive(Debug)]
pub struct HandshakeTurn {
    queue: Rc<HandshakeQueue>,
    source: Source,
    handshake: Rc<Handshake>,
}

impl HandshakeQueue {
    /// An empty queue of one of `workers`, which all its listeners share.
    pub fn new(workers: usize) -> Rc<Self> {
        let turns = RefCell::new(Turns::new(handshake_memory::max_in_progress(workers)));
        Rc::new(Self { turns, changed: Notify::new() })
    }

    /// Waits for the turn of a handshake of `source`. The wait ends early if the future is dropped.
    pub async fn turn(self: &Rc<Self>, source: Source) -> HandshakeTurn {
        let handshake = Rc::<Handshake>::default();
        let turn =
            HandshakeTurn { queue: Rc::clone(self), source, handshake: Rc::clone(&handshake) };
        let is_served = {
            let mut turns = self.turns.borrow_mut();
            turns.wait(source, handshake);
            std::mem::replace(&mut turns.is_served, true)
        };
        if is_served {
            self.changed.notify_one();
        } else {
            let this = Rc::clone(self);
            spawn_local(async move { this.give_turns().await });
        }
        turn.handshake.turn.notified().await;
        turn
    }

    /// Gives turns until no handshake waits.
    async fn give_turns(&self) {
        loop {
            // The queue has one reference to an open handshake, and its turn has another.
            let is_open = |handshake: &Rc<Handshake>| Rc::strong_count(handshake) > 1;
            let next = self.turns.borrow_mut().next(clock::now(), is_open);
            match next {
                Next::Turn(handshake) => {
                    handshake.turn.notify_one();
                    drop(handshake);
                    yield_now().await;
                }
                Next::Stalled(handshake) => handshake.stalled.notify_one(),
                Next::At(time) => {
                    let _ = timeout_at(time.into(), self.changed.notified()).await;
                }
                Next::Empty => break,
            }
        }
    }
}

impl HandshakeTurn {
    /// Returns when the handshake must end for another one.
    pub async fn stalled(&self) {
        self.handshake.stalled.notified().await;
    }
}

impl Drop for HandshakeTurn {
    fn drop(&mut self) {
        let ended = |handshake: &Rc<Handshake>| Rc::ptr_eq(handshake, &self.handshake);
        let mut turns = self.queue.turns.borrow_mut();
        turns.end(self.source, ended);
        if turns.is_served {
            self.queue.changed.notify_one();
        }
    }
}

/// The waiting handshakes and those in progress, by source.
#[derive(Debug)]
struct Turns<T> {
    sources: HashMap<Source, SourceTurns<T>>,
    /// The sources with waiting handshakes, in the order of their turns.
    order: VecDeque<Source>,
    /// Handshakes in progress at a time, beyond one of each source.
    max_in_progress: usize,
    /// Handshakes of all sources in progress.
    in_progress: usize,
    /// A task gives turns.
    is_served: bool,
    /// With more sources than this, those that have rested are forgotten.
    forget_above: usize,
}

#[derive(Debug)]
struct SourceTurns<T> {
    waiting: VecDeque<T>,
    /// The handshakes in progress with their start, oldest first.
    in_progress: VecDeque<(Instant, T)>,
    /// When the source has its whole burst again. Each turn moves it by [`INTERVAL`].
    rested_at: Option<Instant>,
}

/// What happens next.
#[derive(Debug, PartialEq, Eq)]
enum Next<T> {
    Turn(T),
    /// The handshake in progress must end. It does not count any more.
    Stalled(T),
    /// All sources that wait have used their burst or their share until this time, or until a handshake ends.
    At(Instant),
    Empty,
}

impl<T: Clone> Turns<T> {
    fn new(max_in_progress: usize) -> Self {
        Self {
            sources: HashMap::new(),
            order: VecDeque::new(),
            max_in_progress,
            in_progress: 0,
            is_served: false,
            forget_above: MIN_REMEMBERED,
        }
    }

    fn wait(&mut self, source: Source, handshake: T) {
        let entry = self.sources.entry(source).or_insert_with(|| SourceTurns {
            waiting: VecDeque::new(),
            in_progress: VecDeque::new(),
            rested_at: None,
        });
        if entry.waiting.is_empty() {
            self.order.push_back(source);
        }
        entry.waiting.push_back(handshake);
    }

    /// The next handshake, or one that must end for it. Waiting ones for which `is_open` is false are forgotten.
    fn next(&mut self, now: Instant, is_open: impl Fn(&T) -> bool) -> Next<T> {
        if self.sources.len() > self.forget_above {
            self.forget_rested(now);
        }
        let mut earliest: Option<Instant> = None;
        for _ in 0..self.order.len() {
            let Some(source) = self.order.pop_front() else { break };
            let Some(entry) = self.sources.get_mut(&source) else { continue };
            while entry.waiting.front().is_some_and(|handshake| !is_open(handshake)) {
                entry.waiting.pop_front();
            }
            if entry.waiting.is_empty() {
                continue;
            }
            let free = self.max_in_progress.saturating_sub(self.in_progress);
            if entry.in_progress.len() >= free
                && let Some((started, oldest)) = entry.in_progress.front()
            {
                let stalled_at = *started + STALLED_AFTER;
                if now >= stalled_at {
                    let oldest = oldest.clone();
                    entry.in_progress.pop_front();
                    self.in_progress -= 1;
                    self.order.push_front(source);
                    return Next::Stalled(oldest);
                }
                earliest = Some(earliest.map_or(stalled_at, |at| at.min(stalled_at)));
                self.order.push_back(source);
                continue;
            }
            let rested_at = entry.rested_at.map_or(now, |at| at.max(now));
            let wait = (rested_at - now).saturating_sub(INTERVAL * (BURST - 1));
            if !wait.is_zero() {
                let next_at = now + wait;
                earliest = Some(earliest.map_or(next_at, |at| at.min(next_at)));
                self.order.push_back(source);
                continue;
            }
            entry.rested_at = Some(rested_at + INTERVAL);
            let handshake = entry.waiting.pop_front();
            if !entry.waiting.is_empty() {
                self.order.push_back(source);
            }
            if let Some(handshake) = handshake {
                entry.in_progress.push_back((now, handshake.clone()));
                self.in_progress += 1;
                return Next::Turn(handshake);
            }
        }
        if let Some(at) = earliest {
            return Next::At(at);
        }
        self.is_served = false;
        self.forget_rested(now);
        Next::Empty
    }

    /// Forgets the sources without handshakes that have their whole burst again.
    fn forget_rested(&mut self, now: Instant) {
        self.sources.retain(|_, entry| {
            !entry.waiting.is_empty()
                || !entry.in_progress.is_empty()
                || entry.rested_at.is_some_and(|at| at > now)
        });
        self.forget_above = (2 * self.sources.len()).max(MIN_REMEMBERED);
    }

    /// No longer counts a handshake in progress.
    fn end(&mut self, source: Source, has_ended: impl Fn(&T) -> bool) {
        let Some(entry) = self.sources.get_mut(&source) else { return };
        if let Some(at) = entry.in_progress.iter().position(|(_, handshake)| has_ended(handshake)) {
            entry.in_progress.remove(at);
            self.in_progress -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proxy::handshake_memory::MAX_IN_PROGRESS;

    const A: Source = Source::User(1);
    const B: Source = Source::User(2);

    /// The next handshake, which ends at once.
    fn next(turns: &mut Turns<u32>, now: Instant) -> Next<u32> {
        let next = next_in_progress(turns, now);
        if let Next::Turn(handshake) = next {
            for source in turns.sources.keys().copied().collect::<Vec<_>>() {
                turns.end(source, |ended| *ended == handshake);
            }
        }
        next
    }

    /// The next handshake, which stays in progress.
    fn next_in_progress(turns: &mut Turns<u32>, now: Instant) -> Next<u32> {
        turns.next(now, |handshake| *handshake != 0)
    }

    #[test]
    fn source_has_half_of_the_free_handshakes_in_progress() {
        let (mut turns, start) = (Turns::new(MAX_IN_PROGRESS), clock::now());
        let stalled_at = start + STALLED_AFTER;
        for (source, share) in [(A, 64), (B, 32)] {
            for handshake in 1..=share + 3 {
                turns.wait(source, handshake);
            }
            for handshake in 1..=share {
                assert_eq!(next_in_progress(&mut turns, start), Next::Turn(handshake));
            }
            assert_eq!(next_in_progress(&mut turns, start), Next::At(stalled_at), "{source}");
        }
        // The end of one leaves 33 free, of which A has more in progress and B has not.
        turns.end(A, |handshake| *handshake == 7);
        let later = start + Duration::from_millis(10);
        assert_eq!(next_in_progress(&mut turns, later), Next::Turn(33));
        assert_eq!(next_in_progress(&mut turns, later), Next::At(stalled_at));
        // A stalled one is ended for a waiting one of its source.
        let first = next_in_progress(&mut turns, stalled_at);
        assert_eq!(first, Next::Stalled(1));
    }

    #[test]
    fn source_without_a_handshake_in_progress_always_gets_a_turn() {
        let (mut turns, now) = (Turns::new(MAX_IN_PROGRESS), clock::now());
        for uid in 0..1_000 {
            for _ in 0..200 {
                turns.wait(Source::User(uid), uid + 1);
            }
        }
        let mut started = std::collections::HashSet::new();
        while let Next::Turn(handshake) = next_in_progress(&mut turns, now) {
            started.insert(handshake);
        }
        assert_eq!(started.len(), 1_000);
        assert!(turns.in_progress <= 1_000 + MAX_IN_PROGRESS, "{}", turns.in_progress);
    }

    #[test]
    fn rested_sources_are_forgotten_while_others_wait() {
        let (mut turns, mut now) = (Turns::new(MAX_IN_PROGRESS), clock::now());
        turns.wait(A, 1);
        assert_eq!(next_in_progress(&mut turns, now), Next::Turn(1));
        turns.wait(B, 2);
        for uid in 10..10_000 {
            // Another one always waits.
            turns.wait(Source::User(uid), uid);
            assert!(matches!(next(&mut turns, now), Next::Turn(_)));
            assert!(turns.sources.len() <= 3 * MIN_REMEMBERED, "{}", turns.sources.len());
            now += INTERVAL;
        }
        assert!(turns.sources.contains_key(&A), "its handshake is in progress");
    }

    #[tokio::test(start_paused = true)]
    async fn stalled_handshakes_delay_others_of_their_source_by_a_second() {
        let stall = async {
            let queue = HandshakeQueue::new(1);
            let mut stalled = Vec::new();
            for _ in 0..MAX_IN_PROGRESS / 2 {
                stalled.push(queue.turn(A).await);
            }
            let start = clock::now();
            let _other = queue.turn(B).await;
            assert_eq!(clock::elapsed(start), Duration::ZERO);
            let waiting = queue.turn(A);
            let (oldest, _waiting) = tokio::join!(stalled[0].stalled(), waiting);
            let () = oldest;
            assert!(
                clock::elapsed(start) >= STALLED_AFTER && clock::elapsed(start) < STALLED_AFTER * 2
            );
            // The end of another one starts the next at once.
            let at = clock::now();
            drop(stalled);
            let _next = queue.turn(A).await;
            assert_eq!(clock::elapsed(at), Duration::ZERO);
        };
        tokio::task::LocalSet::new().run_until(stall).await;
    }

    #[test]
    fn next_takes_turns_between_sources() {
        let (mut turns, now) = (Turns::new(MAX_IN_PROGRESS), clock::now());
        for handshake in 1..=5 {
            turns.wait(A, handshake);
        }
        turns.wait(B, 10);
        turns.wait(B, 0); // closed
        turns.wait(B, 11);
        let order: Vec<_> = (0..8).map(|_| next(&mut turns, now)).collect();
        let expected = [1, 10, 2, 11, 3, 4, 5].map(Next::Turn);
        assert_eq!(order[..7], expected);
        assert_eq!(order[7], Next::Empty);
    }

    #[test]
    fn next_after_the_burst_of_a_source_is_paced_and_delays_no_other_source() {
        let (mut turns, start) = (Turns::new(MAX_IN_PROGRESS), clock::now());
        let at = |ms| start + Duration::from_millis(ms);
        for handshake in 1..=BURST + 3 {
            turns.wait(A, handshake);
        }
        for handshake in 1..=BURST {
            assert_eq!(next(&mut turns, start), Next::Turn(handshake));
        }
        assert_eq!(next(&mut turns, start), Next::At(at(5)));
        turns.wait(B, 1_000);
        assert_eq!(next(&mut turns, start), Next::Turn(1_000));
        assert_eq!(next(&mut turns, at(4)), Next::At(at(5)));
        assert_eq!(next(&mut turns, at(5)), Next::Turn(BURST + 1));
        assert_eq!(next(&mut turns, at(5)), Next::At(at(10)));
        assert_eq!(next(&mut turns, at(10)), Next::Turn(BURST + 2));
        // After a second without turns there are 200 more.
        assert_eq!(next(&mut turns, at(1_010)), Next::Turn(BURST + 3));
        for handshake in 1..=RATE {
            turns.wait(A, handshake);
        }
        for handshake in 1..RATE {
            assert_eq!(next(&mut turns, at(1_010)), Next::Turn(handshake), "{handshake}");
        }
        assert_eq!(next(&mut turns, at(1_010)), Next::At(at(1_015)));
    }

    #[test]
    fn sources_that_have_their_whole_burst_are_forgotten() {
        let (mut turns, start) = (Turns::new(MAX_IN_PROGRESS), clock::now());
        for uid in 0..1_000 {
            turns.wait(Source::User(uid), uid + 1);
        }
        while let Next::Turn(_) = next(&mut turns, start) {}
        assert_eq!(turns.sources.len(), 1_000);
        assert_eq!(next(&mut turns, start + INTERVAL), Next::Empty);
        assert_eq!(turns.sources.len(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn turn_of_another_source_passes_a_flood() {
        let flood = async {
            let queue = HandshakeQueue::new(1);
            for _ in 0..10_000 {
                let queue = Rc::clone(&queue);
                spawn_local(async move { queue.turn(A).await });
            }
            yield_now().await;
            let start = clock::now();
            queue.turn(B).await;
            assert!(clock::elapsed(start) < INTERVAL, "{:?}", clock::elapsed(start));
            // A dropped wait gives its turn to the next one.
            let cancelled = tokio::time::timeout(Duration::from_millis(1), queue.turn(A)).await;
            assert!(cancelled.is_err());
        };
        tokio::task::LocalSet::new().run_until(flood).await;
    }
}

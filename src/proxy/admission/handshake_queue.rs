//! Decides when the TLS handshake of each accepted connection starts.
//!
//! Any client can cause handshakes. One takes 1.1 ms of the worker's CPU time with an RSA-2048 certificate, 0.45 ms
//! with ECDSA P-256, and 0.1 ms if it resumes a session (measured with `openssl s_time`, accept and close included).
//! A connection asks for its turn when the client has sent its first bytes:
//!
//! * A turn is one handshake up to the answer to the `ClientHello`. One handshake has its turn at a time, and
//!   between two turns the event loop runs a batch of other tasks ([`super::super::task_queues`]).
//! * The sources take turns. So a handshake waits for at most one other of each source, however many another
//!   source starts.
//! * Of one source, the latest comes first, and each eighth turn is that of the one that waits longest. While more wait than
//!   the pace lets through within the handshake timeout, the order of arrival would make all wait for so long that their
//!   clients have given up.
//! * A handshake is in progress until the client's certificate is verified.
//! * A source starts another handshake while it has fewer in progress than are free of the worker's share
//!   ([`super::handshake_memory`]), so one source has at most half. Beyond that, a handshake of the source that is in progress for
//!   [`STALLED_AFTER`] is ended for a waiting one. A source without a handshake in progress always gets its turn.
//! * A source gets [`RATE`] turns a second after a burst of [`BURST`], which is enough for all pods of a node
//!   that reconnect at once. Handshakes beyond that wait, until the handshake timeout.
//!
//! Processes of one user share the turns of their source. If such a process floods the listener, the handshakes of the
//! others get a turn when they arrive, unless more arrive before it; then they wait in its queue.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::time::{Duration, Instant};

use jackstay_core::admission::turns::{Cap, KeyCap, Next, Order, Pace, Pacing, Rules, Turns};
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
/// Age from which a handshake may be ended for another one of its source. A usual one takes two round trips.
const STALLED_AFTER: Duration = Duration::from_secs(1);

/// The rules of a worker with this share of the handshakes in progress. Connection slots limit what waits.
const fn rules(max_in_progress: usize) -> Rules {
    Rules {
        waiting: Cap::NONE,
        in_progress: Cap { total: max_in_progress, key: KeyCap::FewerThanFree, floor: 1 },
        order: Order::NewestFirst,
        pacing: Pacing::Always([Pace { interval: INTERVAL, burst: BURST }]),
        evict_after: Some(STALLED_AFTER),
        max_keys: usize::MAX,
    }
}

/// Handshakes of one worker that wait for their turn or are in progress.
#[derive(Debug)]
pub struct HandshakeQueue {
    state: RefCell<State>,
    /// Notified when a handshake waits or has ended.
    changed: Notify,
}

#[derive(Debug)]
struct State {
    turns: Turns<Source, ()>,
    /// The handshakes that wait or are in progress, by number.
    handshakes: HashMap<u64, Rc<Handshake>>,
    /// A task gives turns.
    is_served: bool,
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
    id: u64,
    handshake: Rc<Handshake>,
}

impl HandshakeQueue {
    /// An empty queue of one of `workers`, which all its listeners share.
    pub fn new(workers: usize) -> Rc<Self> {
        let turns = Turns::new(rules(handshake_memory::max_in_progress(workers)));
        let state = State { turns, handshakes: HashMap::new(), is_served: false };
        Rc::new(Self { state: RefCell::new(state), changed: Notify::new() })
    }

    /// Waits for the turn of a handshake of `source`. The wait ends early if the future is dropped.
    pub async fn turn(self: &Rc<Self>, source: Source) -> HandshakeTurn {
        let handshake = Rc::<Handshake>::default();
        let (id, is_served) = {
            let mut state = self.state.borrow_mut();
            let waits = state.turns.wait(source, 0, (), clock::now());
            let id = waits.expect("nothing limits what waits").id;
            state.handshakes.insert(id, Rc::clone(&handshake));
            (id, std::mem::replace(&mut state.is_served, true))
        };
        let turn = HandshakeTurn { queue: Rc::clone(self), source, id, handshake };
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
            let next = self.state.borrow_mut().next(clock::now());
            match next {
                Next::Start(_) => yield_now().await,
                Next::Evict(_) => {}
                Next::Wait(Some(time)) => {
                    let _ = timeout_at(time.into(), self.changed.notified()).await;
                }
                Next::Wait(None) => self.changed.notified().await,
                Next::Empty => break,
            }
        }
    }
}

impl State {
    /// Starts or ends the next handshake, if any.
    fn next(&mut self, now: Instant) -> Next<Source, ()> {
        let next = self.turns.next(now);
        match &next {
            Next::Start(started) => self.notify(started.id, |handshake| &handshake.turn),
            Next::Evict(id) => self.notify(*id, |handshake| &handshake.stalled),
            Next::Wait(_) => {}
            Next::Empty => self.is_served = false,
        }
        next
    }

    fn notify(&self, id: u64, which: impl Fn(&Handshake) -> &Notify) {
        if let Some(handshake) = self.handshakes.get(&id) {
            which(handshake).notify_one();
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
        let mut state = self.queue.state.borrow_mut();
        state.turns.cancel(self.source, self.id);
        state.turns.end(self.source, self.id);
        state.handshakes.remove(&self.id);
        if state.is_served {
            self.queue.changed.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proxy::admission::handshake_memory::MAX_IN_PROGRESS;

    const A: Source = Source::User(1);
    const B: Source = Source::User(2);

    /// Waiting handshakes of one worker, to which tests give numbers.
    struct Rig(Turns<Source, u32>);

    #[derive(Debug, PartialEq, Eq)]
    enum Given {
        Turn(u32),
        Stalled(u64),
        At(Instant),
        Empty,
    }

    impl Rig {
        fn new() -> (Self, Instant) {
            (Self(Turns::new(rules(MAX_IN_PROGRESS))), clock::now())
        }

        fn wait(&mut self, source: Source, handshake: u32, now: Instant) -> u64 {
            self.0.wait(source, 0, handshake, now).unwrap().id
        }

        /// The next handshake, which ends at once.
        fn next(&mut self, now: Instant) -> Given {
            self.start(now, true)
        }

        /// The next handshake, which stays in progress.
        fn next_in_progress(&mut self, now: Instant) -> Given {
            self.start(now, false)
        }

        fn start(&mut self, now: Instant, ends: bool) -> Given {
            match self.0.next(now) {
                Next::Start(started) => {
                    if ends {
                        self.0.end(started.key, started.id);
                    }
                    Given::Turn(started.item)
                }
                Next::Evict(id) => Given::Stalled(id),
                Next::Wait(at) => Given::At(at.expect("each wait has an end")),
                Next::Empty => Given::Empty,
            }
        }
    }

    #[test]
    fn source_has_half_of_the_free_handshakes_in_progress() {
        let (mut turns, start) = Rig::new();
        let stalled_at = start + STALLED_AFTER;
        for (source, share) in [(A, 64), (B, 32)] {
            for handshake in 1..=share + 3 {
                turns.wait(source, handshake, start);
            }
            for handshake in 1..=share {
                let given = turns.next_in_progress(start);
                assert!(matches!(given, Given::Turn(_)), "{handshake}: {given:?}");
            }
            assert_eq!(turns.next_in_progress(start), Given::At(stalled_at), "{source}");
        }
        // The end of one leaves 33 free, of which A has more in progress and B has not.
        turns.0.end(A, 6);
        let later = start + Duration::from_millis(10);
        assert!(matches!(turns.next_in_progress(later), Given::Turn(1..=35)));
        assert_eq!(turns.next_in_progress(later), Given::At(stalled_at));
        // A stalled one is ended for a waiting one of its source: the first that started.
        let first = turns.next_in_progress(stalled_at);
        assert_eq!(first, Given::Stalled(66));
    }

    #[test]
    fn source_without_a_handshake_in_progress_always_gets_a_turn() {
        let (mut turns, now) = Rig::new();
        for uid in 0..1_000 {
            for _ in 0..200 {
                turns.wait(Source::User(uid), uid + 1, now);
            }
        }
        let mut started = std::collections::HashSet::new();
        while let Given::Turn(handshake) = turns.next_in_progress(now) {
            started.insert(handshake);
        }
        assert_eq!(started.len(), 1_000);
        let in_progress = turns.0.in_progress();
        assert!(in_progress <= 1_000 + MAX_IN_PROGRESS, "{in_progress}");
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
        let (mut turns, now) = Rig::new();
        for handshake in 1..=5 {
            turns.wait(A, handshake, now);
        }
        turns.wait(B, 10, now);
        let closed = turns.wait(B, 0, now);
        turns.0.cancel(B, closed);
        turns.wait(B, 11, now);
        let order: Vec<_> = (0..8).map(|_| turns.next(now)).collect();
        let expected = [5, 11, 4, 10, 3, 2, 1].map(Given::Turn);
        assert_eq!(order[..7], expected);
        assert_eq!(order[7], Given::Empty);
    }

    #[test]
    fn next_after_the_burst_of_a_source_is_paced_and_delays_no_other_source() {
        let (mut turns, start) = Rig::new();
        let at = |ms| start + Duration::from_millis(ms);
        for handshake in 1..=BURST + 3 {
            turns.wait(A, handshake, start);
        }
        for handshake in 1..=BURST {
            assert!(matches!(turns.next(start), Given::Turn(_)), "{handshake}");
        }
        assert_eq!(turns.next(start), Given::At(at(5)));
        turns.wait(B, 1_000, start);
        assert_eq!(turns.next(start), Given::Turn(1_000));
        assert_eq!(turns.next(at(4)), Given::At(at(5)));
        // The next one does not wait for those before it.
        turns.wait(A, 2_000, at(4));
        assert_eq!(turns.next(at(5)), Given::Turn(2_000));
        assert_eq!(turns.next(at(5)), Given::At(at(10)));
        // After a second without turns there are 200 more.
        for handshake in 1..=RATE {
            turns.wait(A, handshake, at(1_005));
        }
        for handshake in 1..=RATE {
            assert!(matches!(turns.next(at(1_005)), Given::Turn(_)), "{handshake}");
        }
        assert_eq!(turns.next(at(1_005)), Given::At(at(1_010)));
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
            // A dropped wait gives its turn to another one of its source, of which the latest comes first.
            tokio::select! {
                biased;
                _ = queue.turn(A) => panic!("another task gives turns"),
                () = std::future::ready(()) => {}
            }
            queue.turn(A).await;
            assert!(clock::elapsed(start) < 2 * INTERVAL, "{:?}", clock::elapsed(start));
        };
        tokio::task::LocalSet::new().run_until(flood).await;
    }
}

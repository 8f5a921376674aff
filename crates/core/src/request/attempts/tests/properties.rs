//! Property tests with random sequences of inputs.

use std::cell::{Cell, RefCell};

use fastrand::Rng;
use proptest::prelude::*;

use super::*;
use crate::request::retry::tests::STAGES;

/// Number of random inputs, after which everything that runs fails.
const MAX_RANDOM: usize = 400;

/// An attempt as the shell sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Slot {
    Ended,
    Acquiring,
    Sent,
}

/// Facts that are random, and change at random.
struct RandomFacts {
    rng: RefCell<Rng>,
    /// Tokens that were taken from the budgets of hedges and of groups.
    taken: Cell<u32>,
    /// Tokens that are left.
    tokens: Cell<u32>,
    /// Requests to another endpoint after a rejection, each of which takes a token as well.
    elsewhere: Cell<u32>,
}

impl RandomFacts {
    fn new(seed: u64) -> Self {
        let (taken, tokens, elsewhere) = (Cell::new(0), Cell::new(40), Cell::new(0));
        Self { rng: RefCell::new(Rng::with_seed(seed)), taken, tokens, elsewhere }
    }

    fn is(&self, one_in: u32) -> bool {
        self.rng.borrow_mut().u32(..one_in) == 0
    }
}

impl Facts<Key> for RandomFacts {
    fn connection(&self, _: &Key) -> ConnectionFacts {
        ConnectionFacts { is_silent: self.is(2), is_dead: self.is(2), ..CONNECTION }
    }

    fn has_live(&self) -> bool {
        self.is(2)
    }

    fn ill_health(&self, _: usize) -> Option<String> {
        self.is(2).then(|| "ill".to_owned())
    }

    fn has_better_endpoint(&self, _: usize) -> bool {
        self.is(2)
    }

    fn body(&self) -> BodyState {
        let bodies = [BodyState::NotHeld, BodyState::Aborted];
        if self.is(6) { bodies[usize::from(self.is(2))] } else { BodyState::Held }
    }

    fn has_whole_body(&self) -> bool {
        !self.is(4)
    }

    fn may_hold(&self) -> bool {
        self.is(2)
    }

    fn take_hedge_token(&self) -> bool {
        let tokens = self.tokens.get();
        if tokens > 0 {
            self.tokens.set(tokens - 1);
            self.taken.set(self.taken.get() + 1);
        }
        tokens > 0
    }

    fn may_ask_other(&self, _: &[EndpointKey], _: OtherBudget) -> bool {
        !self.is(4)
    }

    fn record_rejection(&self, endpoint: EndpointKey, _: Duration) -> Vec<EndpointKey> {
        vec![endpoint]
    }

    fn not_asked_after_refusal(&self, endpoint: EndpointKey) -> Option<Vec<EndpointKey>> {
        let found = !self.is(4);
        self.elsewhere.set(self.elsewhere.get() + u32::from(found && self.tokens.get() > 0));
        found.then(|| vec![endpoint])
    }

    fn take_group_token(&self, _: Option<usize>) -> Option<Vec<EndpointKey>> {
        let found = !self.is(4);
        for counter in [&self.taken, &self.elsewhere] {
            counter.set(counter.get() + u32::from(found));
        }
        found.then(|| vec![EndpointKey(1)])
    }

    fn may_ask_unavailable_group(&self) -> bool {
        !self.is(4)
    }

    fn unasked(&self, _: &Key, _: &[EndpointKey]) -> Unasked {
        let all = [Unasked::Endpoint, Unasked::Connection, Unasked::Hidden, Unasked::Nothing];
        all[self.rng.borrow_mut().usize(..all.len())]
    }
}

/// A shell that executes effects, with an input chosen at random for each.
struct Shell {
    attempts: Attempts<Key>,
    kind: RequestKind,
    now: Instant,
    rng: Rng,
    /// Number of inputs that may still be chosen freely.
    free: usize,
    slots: [Slot; MAX_PARALLEL],
    facts: RandomFacts,
    /// Tokens that went back to the budget of hedges.
    returned: u32,
    hedges: u32,
    /// Hedges that were cancelled while they waited for a stream.
    cancelled: u32,
    /// Those of them that were reported.
    reported: u32,
    /// Attempts at the request that may have reached a handler.
    reached: u32,
    firsts: u32,
}

impl Shell {
    fn new(kind: RequestKind, is_heartbeat: bool, seed: u64) -> Self {
        let now = Instant::now();
        let forms = [ReadForm::AnyList, ReadForm::AnyGet, ReadForm::GetNotOlderThan];
        let read = forms.get(seed as usize % 4).map(|form| read_of(*form));
        Self {
            attempts: Attempts::new(kind, is_heartbeat, (now, None), read),
            kind,
            now,
            rng: Rng::with_seed(seed),
            free: MAX_RANDOM,
            slots: [Slot::Ended; MAX_PARALLEL],
            facts: RandomFacts::new(!seed),
            returned: 0,
            hedges: 0,
            cancelled: 0,
            reported: 0,
            reached: 0,
            firsts: 0,
        }
    }

    fn chance(&mut self, one_in: u32) -> bool {
        self.free > 0 && self.rng.u32(..one_in) == 0
    }

    fn stage(&mut self) -> Stage {
        STAGES[self.rng.usize(..STAGES.len())]
    }

    fn fail(&mut self, attempt: usize, stage: Stage) -> TestInput {
        assert_eq!(std::mem::replace(&mut self.slots[attempt], Slot::Ended), Slot::Sent);
        if !matches!(stage, Stage::NotSent | Stage::Unprocessed) {
            self.reached += 1;
        }
        let code = if self.rng.bool() { 503 } else { 0 };
        AttemptInput::Failed { attempt, failure: failure(stage, code) }
    }

    /// An input for the first attempt of a round.
    fn acquire(&mut self) -> TestInput {
        assert_eq!(self.slots, [Slot::Ended; MAX_PARALLEL]);
        if self.chance(8) {
            return if self.rng.bool() { exhausted() } else { unreachable() };
        }
        self.slots[0] = Slot::Acquiring;
        granted(0)
    }

    /// An event of an attempt that runs.
    fn event(&mut self) -> TestInput {
        self.now += Duration::from_millis(self.rng.u64(..2_000));
        if self.attempts.heartbeat_due().is_some() && self.chance(2) {
            return AttemptInput::HeartbeatDue;
        }
        let running: Vec<_> =
            (0..MAX_PARALLEL).filter(|attempt| self.slots[*attempt] != Slot::Ended).collect();
        assert!(!running.is_empty(), "nothing runs: {:?}", self.attempts);
        let attempt = running[self.rng.usize(..running.len())];
        let awaited = self.attempts.awaited(attempt).unwrap();
        let is_free = self.free > 0;
        match (awaited, self.rng.u32(..4)) {
            (Awaited::Stream, 0 | 1) if is_free => granted(attempt),
            (Awaited::Stream, _) => {
                self.slots[attempt] = Slot::Ended;
                AttemptInput::NoHedgeStream { attempt }
            }
            (_, 0) if self.chance(4) => responded(attempt),
            (Awaited::Trouble { may_be_slow: true }, 1) if is_free => {
                AttemptInput::Slow { attempt }
            }
            (Awaited::Trouble { .. }, 1 | 2) if is_free => troubled(attempt),
            (Awaited::Loss { silence_from: Some(_), .. }, 1) if is_free => {
                AttemptInput::Silent { attempt }
            }
            (Awaited::Loss { hedge_from: Some(from), .. }, 2) if is_free => {
                self.now = self.now.max(from);
                AttemptInput::HedgeDue { attempt }
            }
            _ => {
                let stage = self.stage();
                self.fail(attempt, stage)
            }
        }
    }

    /// Executes effects until the request is answered. Returns the number of steps.
    fn run(&mut self) -> usize {
        let mut input = self.acquire();
        for steps in 1..10 * MAX_RANDOM {
            self.free = self.free.saturating_sub(1);
            let is_slow = matches!(input, AttemptInput::Slow { .. });
            let mut rng = self.rng.fork();
            let effect = self.attempts.step(input, &self.facts, self.now, &mut rng);
            self.count();
            if is_slow && matches!(effect, AttemptEffect::HedgeLate { .. }) {
                // The token is that of a hedge.
                self.facts.elsewhere.set(self.facts.elsewhere.get() - 1);
            }
            if let AttemptEffect::Respond { attempt } = effect {
                assert_eq!(self.slots[attempt], Slot::Sent);
                self.follow();
                return steps;
            }
            self.follow();
            input = match effect {
                AttemptEffect::Refuse(_) => return steps,
                AttemptEffect::Respond { .. } => unreachable!(),
                effect => self.execute(&effect),
            };
        }
        panic!("the request does not end: {:?}", self.attempts);
    }

    fn execute(&mut self, effect: &AttemptEffect) -> TestInput {
        match *effect {
            AttemptEffect::Acquire | AttemptEffect::Retry => self.acquire(),
            AttemptEffect::Send { attempt } => {
                self.send(attempt);
                self.event()
            }
            AttemptEffect::Hedge { attempt, .. } | AttemptEffect::HedgeLate { attempt, .. } => {
                assert_eq!(self.slots[attempt], Slot::Ended);
                assert_eq!(self.slots[attempt - 1], Slot::Sent);
                self.slots[attempt] = Slot::Acquiring;
                self.event()
            }
            AttemptEffect::GiveUp { attempt, stage, .. } => self.fail(attempt, stage),
            AttemptEffect::Hold { .. } if self.chance(2) => {
                AttemptInput::OutageEnded { held: Duration::from_secs(self.rng.u64(..100)) }
            }
            AttemptEffect::Pause { .. } if self.chance(2) => AttemptInput::PauseEnded,
            AttemptEffect::PauseRetry { .. } => {
                assert_eq!(self.slots, [Slot::Ended; MAX_PARALLEL]);
                AttemptInput::PauseEnded
            }
            AttemptEffect::Hold { .. } | AttemptEffect::Pause { .. } => AttemptInput::HoldEnded,
            AttemptEffect::Wait | AttemptEffect::Probe { .. } => self.event(),
            AttemptEffect::Respond { .. } | AttemptEffect::Refuse(_) => unreachable!(),
        }
    }

    fn send(&mut self, attempt: usize) {
        assert_eq!(self.slots[attempt], Slot::Acquiring);
        self.slots[attempt] = Slot::Sent;
        if attempt > 0 {
            self.hedges += 1;
        } else {
            self.firsts += 1;
        }
        let sent = self.slots.iter().filter(|slot| **slot == Slot::Sent).count();
        if !retry::may_hedge(self.kind) {
            assert_eq!(sent, 1, "not in parallel");
            assert_eq!(self.reached, 0, "an earlier attempt may have reached a handler");
        }
    }

    /// Counts the outcomes of hedges.
    fn count(&mut self) {
        let is_slow = self.attempts.is_hedged_as_slow();
        for outcome in self.attempts.hedge_outcomes() {
            self.reported += u32::from(outcome == HedgeOutcome::Cancelled);
            if outcome == HedgeOutcome::NoConnection {
                self.returned += 1;
            }
            if outcome.returns_token() && !is_slow {
                self.facts.tokens.set(self.facts.tokens.get() + 1);
            }
        }
    }

    /// Cancels the attempts that have ended. Each other one runs.
    fn follow(&mut self) {
        for attempt in 0..MAX_PARALLEL {
            match self.attempts.awaited(attempt) {
                None => {
                    let before = std::mem::replace(&mut self.slots[attempt], Slot::Ended);
                    self.cancelled += u32::from(before == Slot::Acquiring);
                }
                // Its stream is granted, and the effect is `Send`; or the effect is `Hedge`.
                Some(Awaited::Stream) => assert_ne!(self.slots[attempt], Slot::Sent),
                Some(_) => assert_ne!(self.slots[attempt], Slot::Ended),
            }
        }
    }
}

fn kinds() -> impl Strategy<Value = RequestKind> {
    use RequestKind::{Log, NonMutating, Read, Tunnel, Watch, Write};
    prop::sample::select(&[Read, Watch, Log, NonMutating, Write, Tunnel][..])
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4_000))]

    /// The shell asserts that a request which may not reach a handler twice does not.
    #[test]
    fn each_sequence_ends_with_one_answer(kind in kinds(), seed in any::<u64>()) {
        let mut shell = Shell::new(kind, kind == RequestKind::Write, seed);
        let steps = shell.run();
        prop_assert!(shell.firsts <= ATTEMPTS + MAX_UNAVAILABLE);
        prop_assert!(steps <= 3 * MAX_RANDOM, "{steps}");
        prop_assert_eq!(shell.hedges, shell.attempts.hedges_sent());
        prop_assert!(shell.attempts.awaited(0).is_none());
        prop_assert_eq!(shell.slots, [Slot::Ended; MAX_PARALLEL]);
        prop_assert_eq!(shell.reported, shell.cancelled);
        // Each token was used by a hedge or by a request to another endpoint, or goes back.
        let left = shell.returned + shell.hedges + shell.cancelled + shell.facts.elsewhere.get();
        prop_assert_eq!(shell.facts.taken.get(), left);
        prop_assert!(shell.attempts.hedge_outcomes().next().is_none());
    }
}

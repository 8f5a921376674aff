//! The start of a process up to its bound sockets: alone, in place of a running process, or beside one that drains.
//!
//! | process with the same `state_dir` | `run` | `run --take-over` |
//! |---|---|---|
//! | none | binds | binds |
//! | serves | fails: an address is in use | takes over its sockets |
//! | drains | binds the addresses of the listeners, and takes over the socket of the admin endpoint | the same |
//! | does not answer, and has closed the sockets of its listeners: stopped or another version, in its drain | binds the addresses of the listeners; the admin endpoint waits for its address | the same |
//! | does not answer, and has the sockets: stopped | fails | fails |
//!
//! # States
//!
//! `run --take-over` begins in Asking, `run` in Alone. Without a `state_dir` there is no process to ask.
//!
//! | state | input | next state | effect |
//! |---|---|---|---|
//! | Asking | `Found`: nothing, or a process that keeps its sockets | Alone | `BeginAlone`, then `Bind` |
//! | Asking, Alone | `Found`: serves and hands over its sockets | InPlace | `Bind` |
//! | Asking, Alone | `Found`: drains | Beside | `Bind`; the admin endpoint may wait |
//! | Asking, Alone | `Found`: does not answer | BesideSilent | `Bind`; the admin endpoint may wait |
//! | Asking | `Found`: the question has failed | | `Fail` with that error |
//! | Alone | `Bound`: an address is in use | | `Ask`; `Fail` without a process to ask |
//! | Alone | `Found`: nothing, or serves, within [`OPENING`] (`run`: [`CLOSING`]) of the first attempt | | `Pause`, then `Bind` |
//! | Alone | `Found`: serves, later | | `Fail`: a process serves |
//! | Alone | `Found`: nothing, later, or the question has failed | | `Fail` with the error of the bind |
//! | Beside | `Bound`: an address is in use, within [`CLOSING`] of the first attempt | | `Pause`, then `Bind` |
//! | BesideSilent | `Bound`: an address is in use | | `Fail`: the process does not answer |
//! | any | `Bound`: bound | | `Start` |
//! | any other | `Bound`: not bound | | `Fail` with that error |

use std::time::{Duration, Instant};

use super::messages::Request;

/// Time for a process that has got a termination signal to close its sockets or to end. Until then an address in use
/// is tried again.
pub const CLOSING: Duration = Duration::from_millis(500);
/// Time for a process that accepts connections to open its takeover socket, as long as it waits for that itself.
pub const OPENING: Duration = Duration::from_secs(2);
/// How often an address in use is tried.
pub const CLOSING_POLL: Duration = Duration::from_millis(20);

/// What serves the takeover socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Found {
    /// No process.
    Nothing,
    /// A process that serves, and does not hand over its sockets.
    Serving,
    /// A process that serves and has sent its sockets.
    HandsOver,
    /// A process that drains and has sent the socket of its admin endpoint.
    Draining,
    /// A process that does not answer.
    Silent,
    /// Asking has failed.
    Failed,
}

/// The result of an attempt to bind every address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bound {
    /// Every address is bound.
    Yes,
    /// A socket of another process has one of them.
    InUse,
    /// Any other error.
    Failed,
}

/// What the shell reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StartInput {
    /// [`StartEffect::Bind`] has ended.
    Bound(Bound),
    /// [`StartEffect::Ask`] has ended.
    Found(Found),
    /// [`StartEffect::Pause`] or [`StartEffect::BeginAlone`] is over.
    Continue,
}

/// What the shell does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StartEffect {
    /// Ask the process that serves the takeover socket.
    Ask(Request),
    /// Log that there is no process to take over from.
    BeginAlone,
    /// Bind every address. `admin_may_wait`: if that of the admin endpoint is in use, it is bound later.
    Bind {
        /// See the variant.
        admin_may_wait: bool,
    },
    /// Wait.
    Pause(Duration),
    /// Start with the bound sockets.
    Start(StartMode),
    /// Fail.
    Fail(StartFailure),
}

/// How a process starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StartMode {
    /// No other process is concerned.
    Alone,
    /// With the sockets of a process that serves.
    InPlace,
    /// Beside a process that drains.
    Beside,
    /// Beside a process that does not answer.
    BesideSilent,
}

/// The error of a start that has failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StartFailure {
    /// That of the last bind.
    Bind,
    /// That of the question.
    Ask,
    /// An address is in use, and a process with the same `state_dir` serves.
    Serving,
    /// An address is in use, and a process with the same `state_dir` does not answer.
    Silent,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Asking,
    Bind(StartMode),
}

/// The machine. See the table of the module.
#[derive(Debug)]
pub struct Start {
    state: State,
    request: Request,
    can_ask: bool,
    /// When the present state was entered.
    since: Instant,
}

impl Start {
    /// A start of `run` (`IfDraining`) or of `run --take-over` (`TakeOver`). `can_ask`: there is a takeover socket.
    pub fn new(request: Request, can_ask: bool, now: Instant) -> (Self, StartEffect) {
        let asks = can_ask && request == Request::TakeOver;
        let state = if asks { State::Asking } else { State::Bind(StartMode::Alone) };
        let effect = if asks {
            StartEffect::Ask(request)
        } else {
            StartEffect::Bind { admin_may_wait: false }
        };
        (Self { state, request, can_ask, since: now }, effect)
    }

    /// Decides what follows an input.
    pub fn step(&mut self, input: StartInput, now: Instant) -> StartEffect {
        match input {
            StartInput::Continue => self.bind(),
            StartInput::Found(found) => self.on_found(found, now),
            StartInput::Bound(bound) => self.on_bound(bound, now),
        }
    }

    fn bind(&self) -> StartEffect {
        use StartMode::{Beside, BesideSilent};
        let admin_may_wait = matches!(self.state, State::Bind(Beside | BesideSilent));
        StartEffect::Bind { admin_may_wait }
    }

    fn enter(&mut self, mode: StartMode, now: Instant) {
        (self.state, self.since) = (State::Bind(mode), now);
    }

    fn on_found(&mut self, found: Found, now: Instant) -> StartEffect {
        let mode = match (found, self.state) {
            (Found::HandsOver, _) => StartMode::InPlace,
            (Found::Draining, _) => StartMode::Beside,
            (Found::Silent, _) => StartMode::BesideSilent,
            (Found::Failed, State::Asking) => return StartEffect::Fail(StartFailure::Ask),
            (Found::Nothing | Found::Serving, State::Asking) => {
                self.enter(StartMode::Alone, now);
                return StartEffect::BeginAlone;
            }
            // The process has not handled its termination signal yet, has ended in the meantime, or has not opened its
            // takeover socket yet.
            (Found::Nothing | Found::Serving, _) if self.is_within(self.limit(), now) => {
                return StartEffect::Pause(CLOSING_POLL);
            }
            (Found::Serving, _) => return StartEffect::Fail(StartFailure::Serving),
            (Found::Nothing | Found::Failed, _) => return StartEffect::Fail(StartFailure::Bind),
        };
        self.enter(mode, now);
        self.bind()
    }

    fn on_bound(&self, bound: Bound, now: Instant) -> StartEffect {
        let mode = match self.state {
            State::Bind(mode) => mode,
            State::Asking => StartMode::Alone,
        };
        match (bound, mode) {
            (Bound::Yes, _) => StartEffect::Start(mode),
            (Bound::InUse, StartMode::Alone) if self.can_ask => StartEffect::Ask(self.request),
            (Bound::InUse, StartMode::Beside) if self.is_within(CLOSING, now) => {
                StartEffect::Pause(CLOSING_POLL)
            }
            (Bound::InUse, StartMode::BesideSilent) => StartEffect::Fail(StartFailure::Silent),
            (Bound::InUse | Bound::Failed, _) => StartEffect::Fail(StartFailure::Bind),
        }
    }

    fn limit(&self) -> Duration {
        match self.request {
            Request::TakeOver => OPENING,
            Request::IfDraining => CLOSING,
        }
    }

    fn is_within(&self, limit: Duration, now: Instant) -> bool {
        now.saturating_duration_since(self.since) < limit
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Request::{IfDraining, TakeOver};

    /// What a process answers to a request.
    type Answers = fn(Request) -> Found;

    /// Another process on the same host: what it answers, and until when it has the sockets.
    #[derive(Debug, Clone, Copy)]
    struct Other {
        found: Answers,
        /// Milliseconds after which its addresses are free; `None` for never.
        leaves_after: Option<u64>,
    }

    /// Executes the effects on a host with this process. Returns the last effect and the milliseconds until then.
    fn run(request: Request, can_ask: bool, other: Other) -> (StartEffect, u128) {
        let begin = Instant::now();
        let mut now = begin;
        let (mut start, mut effect) = Start::new(request, can_ask, now);
        let mut handed_over = false;
        for _ in 0..1000 {
            let input = match effect {
                StartEffect::Ask(request) => {
                    let found = (other.found)(request);
                    handed_over = found == Found::HandsOver;
                    StartInput::Found(found)
                }
                StartEffect::Bind { .. } => {
                    let left = other.leaves_after.map(Duration::from_millis);
                    let is_free = handed_over || left.is_some_and(|left| now - begin >= left);
                    StartInput::Bound(if is_free { Bound::Yes } else { Bound::InUse })
                }
                StartEffect::Pause(time) => {
                    now += time;
                    StartInput::Continue
                }
                StartEffect::BeginAlone => StartInput::Continue,
                StartEffect::Start(_) | StartEffect::Fail(_) => {
                    return (effect, (now - begin).as_millis());
                }
            };
            effect = start.step(input, now);
        }
        panic!("no end");
    }

    /// The first table of the module.
    #[test]
    fn process_starts_or_fails_as_documented() {
        use StartEffect::{Fail, Start};
        let none = |_| Found::Nothing;
        let serves = |request| match request {
            TakeOver => Found::HandsOver,
            IfDraining => Found::Serving,
        };
        let drains = |_| Found::Draining;
        let silent = |_| Found::Silent;
        let failed = |_| Found::Failed;
        let at_once = Some(0);
        // What another process answers, when its addresses are free; expected of `run` and of `run --take-over`.
        let table: [(Answers, Option<u64>, StartEffect, StartEffect); 11] = [
            (none, at_once, Start(StartMode::Alone), Start(StartMode::Alone)),
            (none, Some(400), Start(StartMode::Alone), Start(StartMode::Alone)),
            (none, Some(1900), Fail(StartFailure::Bind), Start(StartMode::Alone)),
            (none, None, Fail(StartFailure::Bind), Fail(StartFailure::Bind)),
            (serves, None, Fail(StartFailure::Serving), Start(StartMode::InPlace)),
            (serves, Some(400), Start(StartMode::Alone), Start(StartMode::InPlace)),
            (drains, Some(400), Start(StartMode::Beside), Start(StartMode::Beside)),
            (drains, None, Fail(StartFailure::Bind), Fail(StartFailure::Bind)),
            (silent, at_once, Start(StartMode::Alone), Start(StartMode::BesideSilent)),
            (silent, None, Fail(StartFailure::Silent), Fail(StartFailure::Silent)),
            (failed, None, Fail(StartFailure::Bind), Fail(StartFailure::Ask)),
        ];
        for (at, (found, leaves_after, plain, take_over)) in table.into_iter().enumerate() {
            let other = Other { found, leaves_after };
            assert_eq!(run(IfDraining, true, other).0, plain, "row {at}, run");
            assert_eq!(run(TakeOver, true, other).0, take_over, "row {at}, run --take-over");
        }
        for request in Request::ALL {
            let other = Other { found: serves, leaves_after: None };
            assert_eq!(run(request, false, other), (Fail(StartFailure::Bind), 0), "no state_dir");
        }
    }

    #[test]
    fn address_in_use_is_tried_until_the_limit() {
        let never = |found| Other { found, leaves_after: None };
        for (request, other, expected) in [
            (IfDraining, never(|_| Found::Nothing), CLOSING),
            (IfDraining, never(|_| Found::Serving), CLOSING),
            (TakeOver, never(|_| Found::Nothing), OPENING),
            (TakeOver, never(|_| Found::Draining), CLOSING),
            (TakeOver, never(|_| Found::Silent), Duration::ZERO),
        ] {
            let (_, took) = run(request, true, other);
            assert_eq!(took, expected.as_millis(), "{request:?} {:?}", (other.found)(request));
        }
    }

    #[test]
    fn admin_endpoint_may_wait_only_beside_another_process() {
        let now = Instant::now();
        for (found, admin_may_wait) in
            [(Found::HandsOver, false), (Found::Draining, true), (Found::Silent, true)]
        {
            let (mut start, effect) = Start::new(IfDraining, true, now);
            assert_eq!(effect, StartEffect::Bind { admin_may_wait: false });
            let ask = start.step(StartInput::Bound(Bound::InUse), now);
            assert_eq!(ask, StartEffect::Ask(IfDraining));
            let bind = start.step(StartInput::Found(found), now);
            assert_eq!(bind, StartEffect::Bind { admin_may_wait }, "{found:?}");
            let failed = start.step(StartInput::Bound(Bound::Failed), now);
            assert_eq!(failed, StartEffect::Fail(StartFailure::Bind), "{found:?}");
        }
    }
}

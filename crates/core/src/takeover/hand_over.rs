//! How a running process serves one new process, from its request to the end.
//!
//! | state | input | next state | effect |
//! |---|---|---|---|
//! | Asked | `Line`: a request | Offering | `Offer` |
//! | Asked | `Line`: any other | Refusing | `Explain` |
//! | Offering | `Offered` | Sending | `Send` |
//! | Sending | `Done`: the answer was that this process serves and keeps its sockets | | `End`: continues |
//! | Sending | `Done`: any other answer | Sent | `Await` |
//! | Sent | `Line`: `serving` | Releasing | `Release` |
//! | Sent | `Line`: any other | | `End`: an unexpected message |
//! | Releasing | `Released` | Leaving | `Leave` |
//! | Leaving | any | | `End`: taken over, even if the new process does not read the last message |
//! | Refusing | `Done` | | `End`: another version |
//! | Asked, Offering, Sending | `Gone` | | `End`: gone; as one that only looks whether another process serves |
//! | any other | `Gone`, `Failed` | | `End`: failed |

use super::messages::{Answer, Request, SERVING};

/// What the shell reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HandOverInput<'a> {
    /// The new process has sent this line.
    Line(&'a str),
    /// The control thread offers this.
    Offered(Answer),
    /// The sockets are released. `own`: only this process and the new one have them.
    Released {
        /// See the variant.
        own: bool,
    },
    /// The message was sent.
    Done,
    /// The new process has closed the connection.
    Gone,
    /// The effect has failed for another reason, such as its time limit.
    Failed,
}

/// What the shell does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HandOverEffect {
    /// Read the request.
    ReadRequest,
    /// Have the control thread offer sockets.
    Offer(Request),
    /// Name the request that this process understands.
    Explain,
    /// Send the answer, and the sockets.
    Send(Answer),
    /// Log what was sent, and read the next line.
    Await(Answer),
    /// Have the control thread stop accepting.
    Release,
    /// Say that this process has stopped accepting.
    Leave {
        /// Only the two processes have the sockets.
        own: bool,
    },
    /// Nothing more.
    End(End),
}

/// How it ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// The new process has taken over.
    TakenOver,
    /// This process serves, and the new one wants only the sockets of a drain.
    Continues,
    /// The new process has gone before it got sockets.
    Gone,
    /// The new process uses another version of the protocol.
    OtherVersion,
    /// The new process has sent an unexpected line.
    Unexpected,
    /// The last effect has failed.
    Failed,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Asked,
    Refusing,
    Offering,
    Sending(Answer),
    Sent,
    Releasing,
    Leaving,
}

/// The machine. See the table of the module.
#[derive(Debug)]
pub struct HandOver(State);

impl HandOver {
    /// A new process that this one trusts has connected.
    pub fn new() -> (Self, HandOverEffect) {
        (Self(State::Asked), HandOverEffect::ReadRequest)
    }

    /// Decides what follows an input.
    pub fn step(&mut self, input: HandOverInput<'_>) -> HandOverEffect {
        let (next, effect) = match (self.0, input) {
            (State::Asked, HandOverInput::Line(line)) => match Request::parse(line) {
                Some(request) => (State::Offering, HandOverEffect::Offer(request)),
                None => (State::Refusing, HandOverEffect::Explain),
            },
            (State::Offering, HandOverInput::Offered(answer)) => {
                (State::Sending(answer), HandOverEffect::Send(answer))
            }
            (State::Sending(Answer::Serving), HandOverInput::Done) => {
                return HandOverEffect::End(End::Continues);
            }
            (State::Sending(answer), HandOverInput::Done) => {
                (State::Sent, HandOverEffect::Await(answer))
            }
            (State::Sent, HandOverInput::Line(SERVING)) => {
                (State::Releasing, HandOverEffect::Release)
            }
            (State::Sent, HandOverInput::Line(_)) => return HandOverEffect::End(End::Unexpected),
            (State::Releasing, HandOverInput::Released { own }) => {
                (State::Leaving, HandOverEffect::Leave { own })
            }
            (State::Leaving, _) => return HandOverEffect::End(End::TakenOver),
            (State::Refusing, HandOverInput::Done) => {
                return HandOverEffect::End(End::OtherVersion);
            }
            (
                State::Asked | State::Refusing | State::Offering | State::Sending(_),
                HandOverInput::Gone,
            ) => {
                return HandOverEffect::End(End::Gone);
            }
            _ => return HandOverEffect::End(End::Failed),
        };
        self.0 = next;
        effect
    }
}

/// What a process offers to a new one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Offered {
    /// All its listening sockets.
    Sockets,
    /// The socket of its admin endpoint.
    AdminSocket,
    /// Nothing, since it serves.
    Nothing,
}

/// What a process offers: one that serves keeps its sockets unless the new process takes over, and one that drains has
/// only that of its admin endpoint.
pub fn offer(drains: bool, request: Request) -> Offered {
    match (drains, request) {
        (true, _) => Offered::AdminSocket,
        (false, Request::TakeOver) => Offered::Sockets,
        (false, Request::IfDraining) => Offered::Nothing,
    }
}

#[cfg(test)]
mod tests {
    use super::super::messages::{REQUEST, REQUEST_IF_DRAINING};
    use super::*;
    use HandOverInput::{Done, Failed, Gone, Line, Offered, Released};

    fn run(inputs: &[HandOverInput<'_>]) -> Vec<HandOverEffect> {
        let (mut machine, first) = HandOver::new();
        assert_eq!(first, HandOverEffect::ReadRequest);
        inputs.iter().map(|&input| machine.step(input)).collect()
    }

    #[test]
    fn sockets_are_released_only_after_the_whole_exchange() {
        for (request, line, answer) in [
            (Request::TakeOver, REQUEST, Answer::Sockets(3)),
            (Request::TakeOver, REQUEST, Answer::Draining(1)),
            (Request::IfDraining, REQUEST_IF_DRAINING, Answer::Draining(0)),
        ] {
            for own in [false, true] {
                let inputs =
                    [Line(line), Offered(answer), Done, Line(SERVING), Released { own }, Failed];
                let expected = [
                    HandOverEffect::Offer(request),
                    HandOverEffect::Send(answer),
                    HandOverEffect::Await(answer),
                    HandOverEffect::Release,
                    HandOverEffect::Leave { own },
                    HandOverEffect::End(End::TakenOver),
                ];
                assert_eq!(run(&inputs), expected, "{answer:?}");
            }
        }
    }

    #[test]
    fn exchange_ends_at_each_step_as_documented() {
        let asked: &[HandOverInput<'_>] = &[];
        let offering = &[Line(REQUEST)];
        let sending = &[Line(REQUEST), Offered(Answer::Sockets(1))];
        let sent = &[Line(REQUEST), Offered(Answer::Sockets(1)), Done];
        let releasing = &[Line(REQUEST), Offered(Answer::Sockets(1)), Done, Line(SERVING)];
        let kept = &[Line(REQUEST_IF_DRAINING), Offered(Answer::Serving)];
        let refusing = &[Line("jackstay take-over 2")];
        for (before, input, end) in [
            (asked, Gone, End::Gone),
            (asked, Failed, End::Failed),
            (offering, Gone, End::Gone),
            (offering, Failed, End::Failed),
            (sending, Gone, End::Gone),
            (sending, Failed, End::Failed),
            (sent, Gone, End::Failed),
            (sent, Failed, End::Failed),
            (sent, Line("left"), End::Unexpected),
            (releasing, Failed, End::Failed),
            (kept, Done, End::Continues),
            (kept, Gone, End::Gone),
            (refusing, Done, End::OtherVersion),
            (refusing, Failed, End::Failed),
        ] {
            let inputs = [before, &[input]].concat();
            let last = run(&inputs).pop();
            assert_eq!(last, Some(HandOverEffect::End(end)), "{before:?} {input:?}");
        }
    }

    #[test]
    fn offer_depends_on_the_drain_and_on_the_request() {
        for (drains, request, expected) in [
            (false, Request::TakeOver, super::Offered::Sockets),
            (false, Request::IfDraining, super::Offered::Nothing),
            (true, Request::TakeOver, super::Offered::AdminSocket),
            (true, Request::IfDraining, super::Offered::AdminSocket),
        ] {
            assert_eq!(offer(drains, request), expected, "{drains} {request:?}");
        }
    }
}

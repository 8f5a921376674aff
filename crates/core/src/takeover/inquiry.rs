//! Finds out what serves a takeover socket.
//!
//! | input | effect |
//! |---|---|
//! | no process listens | `Found`: nothing |
//! | the accept queue is full | `Found`: silent |
//! | connecting has failed otherwise | `Fail` |
//! | connected | `Ask` |
//! | connected to the process that has closed a connection, which may be about to end | `Pause`, then `Connect`; [`ENDING`] after the close `Fail` |
//! | the process has answered | `Found` |
//! | no answer in time | `Found`: silent |
//! | the process has closed the connection | `Connect` |
//! | any other end of the question | `Fail` |

use std::time::{Duration, Instant};

/// Time for a process that has closed a connection to close its takeover socket too, if it ends.
pub const ENDING: Duration = Duration::from_millis(300);
/// How often a takeover socket is checked whose process may be about to end.
pub const ENDING_POLL: Duration = Duration::from_millis(100);

/// What the shell reports. A process id is `None` if the process runs in another PID namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Input {
    /// [`Effect::Connect`]: there is no socket file, or that of a process that has ended.
    NoListener,
    /// [`Effect::Connect`]: the accept queue is full.
    QueueFull,
    /// [`Effect::Connect`] has failed for another reason.
    ConnectFailed,
    /// [`Effect::Connect`]: connected to this process.
    Connected(Option<i32>),
    /// [`Effect::Pause`] is over.
    Continue,
    /// [`Effect::Ask`]: the process has answered.
    Answered,
    /// [`Effect::Ask`]: the process has not answered in time.
    Late,
    /// [`Effect::Ask`]: the process has closed the connection before its answer.
    Closed,
    /// [`Effect::Ask`] has failed for another reason.
    AskFailed,
}

/// What the shell does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// Connect to the takeover socket.
    Connect,
    /// Wait.
    Pause(Duration),
    /// Send the request on the last connection, and read the answer.
    Ask,
    /// No process serves the socket.
    Nothing,
    /// A process does not answer.
    Silent,
    /// The last answer tells.
    Answer,
    /// Fail with the error of the last effect.
    Fail,
    /// Fail, because the process has closed the connection.
    FailClosed,
}

/// The machine. See the table of the module.
#[derive(Debug, Default)]
pub struct Inquiry {
    /// The process at the other end of the last connection.
    process: Option<i32>,
    /// The process that has closed a connection, and when.
    closed: Option<(Option<i32>, Instant)>,
}

impl Inquiry {
    /// Decides what follows an input. The first effect is [`Effect::Connect`].
    pub fn step(&mut self, input: Input, now: Instant) -> Effect {
        match input {
            Input::NoListener => Effect::Nothing,
            Input::QueueFull | Input::Late => Effect::Silent,
            Input::ConnectFailed | Input::AskFailed => Effect::Fail,
            Input::Continue => Effect::Connect,
            Input::Answered => Effect::Answer,
            Input::Closed => {
                self.closed = Some((self.process, now));
                Effect::Connect
            }
            Input::Connected(process) => {
                self.process = process;
                match self.closed {
                    // Another process has replaced the one that has closed the connection.
                    Some((closed_by, _)) if closed_by != process => Effect::Ask,
                    Some((_, at)) if now.saturating_duration_since(at) >= ENDING => {
                        Effect::FailClosed
                    }
                    Some(_) => Effect::Pause(ENDING_POLL),
                    None => Effect::Ask,
                }
            }
        }
    }

    /// The process at the other end of the last connection, if it is in the same PID namespace.
    pub fn process(&self) -> Option<i32> {
        self.process
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_connection_is_followed_by_the_effect_of_the_table() {
        let now = Instant::now();
        for (input, effect) in [
            (Input::NoListener, Effect::Nothing),
            (Input::QueueFull, Effect::Silent),
            (Input::ConnectFailed, Effect::Fail),
            (Input::Connected(Some(7)), Effect::Ask),
            (Input::Connected(None), Effect::Ask),
            (Input::Continue, Effect::Connect),
            (Input::Answered, Effect::Answer),
            (Input::Late, Effect::Silent),
            (Input::Closed, Effect::Connect),
            (Input::AskFailed, Effect::Fail),
        ] {
            assert_eq!(Inquiry::default().step(input, now), effect, "{input:?}");
        }
    }

    #[test]
    fn process_that_closes_the_connection_is_asked_once() {
        let begin = Instant::now();
        for process in [Some(7), None] {
            let mut inquiry = Inquiry::default();
            assert_eq!(inquiry.step(Input::Connected(process), begin), Effect::Ask);
            assert_eq!(inquiry.step(Input::Closed, begin), Effect::Connect);
            for (ms, effect) in [
                (0, Effect::Pause(ENDING_POLL)),
                (299, Effect::Pause(ENDING_POLL)),
                (300, Effect::FailClosed),
            ] {
                let now = begin + Duration::from_millis(ms);
                assert_eq!(inquiry.step(Input::Connected(process), now), effect, "{ms} ms");
            }
            assert_eq!(inquiry.step(Input::Connected(Some(8)), begin), Effect::Ask, "another one");
            assert_eq!(inquiry.process(), Some(8));
        }
    }
}

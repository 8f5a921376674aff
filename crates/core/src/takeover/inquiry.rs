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
pub enum InquiryInput {
    /// [`InquiryEffect::Connect`]: there is no socket file, or that of a process that has ended.
    NoListener,
    /// [`InquiryEffect::Connect`]: the accept queue is full.
    QueueFull,
    /// [`InquiryEffect::Connect`] has failed for another reason.
    ConnectFailed,
    /// [`InquiryEffect::Connect`]: connected to this process.
    Connected(Option<i32>),
    /// [`InquiryEffect::Pause`] is over.
    Continue,
    /// [`InquiryEffect::Ask`]: the process has answered.
    Answered,
    /// [`InquiryEffect::Ask`]: the process has not answered in time.
    Late,
    /// [`InquiryEffect::Ask`]: the process has closed the connection before its answer.
    Closed,
    /// [`InquiryEffect::Ask`] has failed for another reason.
    AskFailed,
}

/// What the shell does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InquiryEffect {
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
    /// Decides what follows an input. The first effect is [`InquiryEffect::Connect`].
    pub fn step(&mut self, input: InquiryInput, now: Instant) -> InquiryEffect {
        match input {
            InquiryInput::NoListener => InquiryEffect::Nothing,
            InquiryInput::QueueFull | InquiryInput::Late => InquiryEffect::Silent,
            InquiryInput::ConnectFailed | InquiryInput::AskFailed => InquiryEffect::Fail,
            InquiryInput::Continue => InquiryEffect::Connect,
            InquiryInput::Answered => InquiryEffect::Answer,
            InquiryInput::Closed => {
                self.closed = Some((self.process, now));
                InquiryEffect::Connect
            }
            InquiryInput::Connected(process) => {
                self.process = process;
                match self.closed {
                    // Another process has replaced the one that has closed the connection.
                    Some((closed_by, _)) if closed_by != process => InquiryEffect::Ask,
                    Some((_, at)) if now.saturating_duration_since(at) >= ENDING => {
                        InquiryEffect::FailClosed
                    }
                    Some(_) => InquiryEffect::Pause(ENDING_POLL),
                    None => InquiryEffect::Ask,
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
            (InquiryInput::NoListener, InquiryEffect::Nothing),
            (InquiryInput::QueueFull, InquiryEffect::Silent),
            (InquiryInput::ConnectFailed, InquiryEffect::Fail),
            (InquiryInput::Connected(Some(7)), InquiryEffect::Ask),
            (InquiryInput::Connected(None), InquiryEffect::Ask),
            (InquiryInput::Continue, InquiryEffect::Connect),
            (InquiryInput::Answered, InquiryEffect::Answer),
            (InquiryInput::Late, InquiryEffect::Silent),
            (InquiryInput::Closed, InquiryEffect::Connect),
            (InquiryInput::AskFailed, InquiryEffect::Fail),
        ] {
            assert_eq!(Inquiry::default().step(input, now), effect, "{input:?}");
        }
    }

    #[test]
    fn process_that_closes_the_connection_is_asked_once() {
        let begin = Instant::now();
        for process in [Some(7), None] {
            let mut inquiry = Inquiry::default();
            assert_eq!(inquiry.step(InquiryInput::Connected(process), begin), InquiryEffect::Ask);
            assert_eq!(inquiry.step(InquiryInput::Closed, begin), InquiryEffect::Connect);
            for (ms, effect) in [
                (0, InquiryEffect::Pause(ENDING_POLL)),
                (299, InquiryEffect::Pause(ENDING_POLL)),
                (300, InquiryEffect::FailClosed),
            ] {
                let now = begin + Duration::from_millis(ms);
                assert_eq!(inquiry.step(InquiryInput::Connected(process), now), effect, "{ms} ms");
            }
            assert_eq!(
                inquiry.step(InquiryInput::Connected(Some(8)), begin),
                InquiryEffect::Ask,
                "another one"
            );
            assert_eq!(inquiry.process(), Some(8));
        }
    }
}

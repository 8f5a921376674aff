//! The lines of a takeover.

use std::fmt::{self, Display};

/// The first message of a process that takes over; the number is the version of the protocol.
pub const REQUEST: &str = "jackstay take-over 1";
/// The first message of a process that was started without `--take-over` and starts only beside a process that
/// drains. Versions that do not know it name [`REQUEST`] and close the connection.
pub const REQUEST_IF_DRAINING: &str = "jackstay take-over 1 if draining";
/// The message of the new process when it accepts connections, and the answer of a process that serves to
/// [`REQUEST_IF_DRAINING`].
pub const SERVING: &str = "serving";
/// The message of the old process when it has stopped accepting.
pub const LEFT: &str = "left";
/// The line after [`LEFT`] if only the two processes have the sockets, not a service manager too. An older version
/// closes the connection instead.
pub const OWN: &str = "own";
/// Maximum of sockets in a takeover. A listener has a few addresses, with one socket for each worker.
pub const MAX_SOCKETS: usize = 1024;

/// What a new process asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Request {
    /// All listening sockets, or those that a drain has left.
    TakeOver,
    /// The sockets that a drain has left.
    IfDraining,
}

impl Request {
    /// Every request.
    pub const ALL: [Self; 2] = [Self::TakeOver, Self::IfDraining];

    /// Reads the line of a request.
    pub fn parse(line: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|request| request.as_str() == line)
    }

    /// The line.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::TakeOver => REQUEST,
            Self::IfDraining => REQUEST_IF_DRAINING,
        }
    }
}

/// The answer of the old process to a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// It serves, and so many descriptors follow: all its listening sockets.
    Sockets(usize),
    /// It drains and has closed the sockets of its listeners. So many descriptors follow: the socket of its admin
    /// endpoint, unless another process has that.
    Draining(usize),
    /// It serves, and does not hand over its sockets.
    Serving,
}

impl Answer {
    /// Reads the line of an answer.
    pub fn parse(line: &str) -> Option<Self> {
        let count = |text: &str| text.parse().ok().filter(|count| *count <= MAX_SOCKETS);
        match line.split_once(' ') {
            Some(("sockets", text)) => count(text).map(Self::Sockets),
            Some(("draining", text)) => count(text).map(Self::Draining),
            None if line == SERVING => Some(Self::Serving),
            _ => None,
        }
    }

    /// The number of descriptors that follow.
    pub fn sockets(self) -> usize {
        match self {
            Self::Sockets(count) | Self::Draining(count) => count,
            Self::Serving => 0,
        }
    }

    /// What this line answers to a request; `None` if it is no answer to it.
    pub fn to_request(line: &str, request: Request) -> Option<Self> {
        match (Self::parse(line), request) {
            (Some(answer @ Self::Serving), Request::IfDraining)
            | (Some(answer @ Self::Sockets(_)), Request::TakeOver)
            | (Some(answer @ Self::Draining(_)), _) => Some(answer),
            // A version that does not know the request.
            (None, Request::IfDraining) if line.contains(REQUEST) => Some(Self::Serving),
            _ => None,
        }
    }
}

impl Display for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Sockets(count) => write!(f, "sockets {count}"),
            Self::Draining(count) => write!(f, "draining {count}"),
            Self::Serving => f.write_str(SERVING),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse_reads_what_display_writes_and_rejects_other_lines() {
        for answer in [Answer::Sockets(0), Answer::Draining(1), Answer::Serving] {
            assert_eq!(Answer::parse(&answer.to_string()), Some(answer));
        }
        for line in ["", "sockets", "sockets -1", "sockets 1025", "draining x", "serving 1", "left"]
        {
            assert_eq!(Answer::parse(line), None, "{line}");
        }
        for request in Request::ALL {
            assert_eq!(Request::parse(request.as_str()), Some(request));
        }
        assert_eq!(Request::parse("jackstay take-over 2"), None);
    }

    #[test]
    fn answer_must_be_one_to_the_request() {
        use Request::{IfDraining, TakeOver};
        let older = "this process understands `jackstay take-over 1`";
        for (line, request, expected) in [
            ("sockets 2", TakeOver, Some(Answer::Sockets(2))),
            ("sockets 2", IfDraining, None),
            ("draining 1", TakeOver, Some(Answer::Draining(1))),
            ("draining 0", IfDraining, Some(Answer::Draining(0))),
            ("serving", TakeOver, None),
            ("serving", IfDraining, Some(Answer::Serving)),
            (older, TakeOver, None),
            (older, IfDraining, Some(Answer::Serving)),
            ("no", IfDraining, None),
        ] {
            assert_eq!(Answer::to_request(line, request), expected, "{line} {request:?}");
        }
    }
}

//! The messages of a takeover, and how both sides read them.

use std::fmt::{self, Display};
use std::io::{self, ErrorKind};
use std::time::Duration;

use tokio::io::AsyncReadExt;
use tokio::net::UnixStream;

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
/// Maximum time for a peer to read a message or to answer one that it handles at once.
pub const REPLY_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum length of a line of either side, in bytes.
const MAX_LINE: usize = 128;

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

/// Reads a line byte by byte. A buffered reader would read beyond the line and lose descriptors that follow it.
///
/// # Errors
/// The line is too long, or the peer closes the connection.
pub async fn read_line(stream: &mut UnixStream) -> io::Result<String> {
    let mut line = Vec::new();
    while push(&mut line, stream.read_u8().await?)? {}
    Ok(String::from_utf8_lossy(&line).into_owned())
}

/// [`read_line`], blocking.
///
/// # Errors
/// Those of [`read_line`], or the timeout of the stream.
pub fn read_line_blocking(stream: &mut impl io::Read) -> io::Result<String> {
    let mut line = Vec::new();
    loop {
        let mut byte = [0];
        stream.read_exact(&mut byte)?;
        if !push(&mut line, byte[0])? {
            return Ok(String::from_utf8_lossy(&line).into_owned());
        }
    }
}

/// Appends a byte to a line. Returns false at the end of the line.
fn push(line: &mut Vec<u8>, byte: u8) -> io::Result<bool> {
    if byte == b'\n' {
        return Ok(false);
    }
    if line.len() == MAX_LINE {
        return Err(io::Error::new(ErrorKind::InvalidData, "line too long"));
    }
    line.push(byte);
    Ok(true)
}

/// Whether a process of this user may send or receive sockets: the user of this process, or root.
pub fn is_trusted(user: u32) -> bool {
    user == 0 || user == rustix::process::geteuid().as_raw()
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
    }

    #[test]
    fn is_trusted_accepts_own_user_and_root() {
        let own = rustix::process::geteuid().as_raw();
        assert!(is_trusted(own) && is_trusted(0));
        assert!(!is_trusted(own + 1));
    }
}

//! How both sides of a takeover read the lines of [`jackstay_core::takeover::messages`], and which peer they trust.

use std::io::{self, ErrorKind};
use std::path::PathBuf;
use std::time::Duration;

use tokio::io::AsyncReadExt;
use tokio::net::UnixStream;
use tokio::time::sleep;

/// Maximum time for a peer to read a message or to answer one that it handles at once.
pub const REPLY_TIMEOUT: Duration = Duration::from_secs(10);
/// How often a process checks whether another one has ended.
const END_POLL: Duration = Duration::from_millis(500);
/// Maximum length of a line of either side, in bytes.
const MAX_LINE: usize = 128;

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

/// The id of a peer, unless it runs in another PID namespace, for which the kernel reports 0.
pub fn visible_pid(pid: i32) -> Option<i32> {
    Some(pid).filter(|pid| *pid > 0)
}

/// Waits until a process has ended. Landlock does not restrict stat(2), unlike open(2).
pub async fn wait_until_ended(pid: i32) {
    let process = PathBuf::from(format!("/proc/{pid}"));
    while process.exists() {
        sleep(END_POLL).await;
    }
}

/// Whether a process of this user may send or receive sockets: the user of this process, or root.
pub fn is_trusted(user: u32) -> bool {
    user == 0 || user == rustix::process::geteuid().as_raw()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn visible_pid_is_none_for_another_namespace() {
        assert_eq!((visible_pid(0), visible_pid(1)), (None, Some(1)));
    }

    #[tokio::test(start_paused = true)]
    async fn wait_until_ended_returns_after_the_end_of_the_process() {
        let mut child =
            std::process::Command::new("cat").stdin(std::process::Stdio::piped()).spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        let ended = tokio::spawn(wait_until_ended(pid));
        tokio::task::yield_now().await;
        assert!(!ended.is_finished());
        // It reads to its end.
        drop(child.stdin.take());
        child.wait().unwrap();
        ended.await.unwrap();
    }

    #[test]
    fn is_trusted_accepts_own_user_and_root() {
        let own = rustix::process::geteuid().as_raw();
        assert!(is_trusted(own) && is_trusted(0));
        assert!(!is_trusted(own + 1));
    }
}

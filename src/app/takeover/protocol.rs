//! How both sides of a takeover read the lines of [`jackstay_core::takeover::messages`], and which peer they trust.

use std::io::{self, ErrorKind};
use std::time::Duration;

use tokio::io::AsyncReadExt;
use tokio::net::UnixStream;

/// Maximum time for a peer to read a message or to answer one that it handles at once.
pub const REPLY_TIMEOUT: Duration = Duration::from_secs(10);
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

/// Whether a process of this user may send or receive sockets: the user of this process, or root.
pub fn is_trusted(user: u32) -> bool {
    user == 0 || user == rustix::process::geteuid().as_raw()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_trusted_accepts_own_user_and_root() {
        let own = rustix::process::geteuid().as_raw();
        assert!(is_trusted(own) && is_trusted(0));
        assert!(!is_trusted(own + 1));
    }
}

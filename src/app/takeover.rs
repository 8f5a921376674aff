//! Replaces a running process by a new one without closing a listening socket.
//!
//! The running process serves a Unix socket in its state directory ([`socket_path`]). The new process connects
//! to it and receives duplicates of all listening sockets, so both share the accept queues. When the new
//! process is ready it accepts on them, and then sends `serving`. On this message the old process stops
//! accepting and drains as on SIGTERM. If the new process fails before, the old one continues to serve.
//!
//! ```text
//! new process                             old process
//!  │ reads and validates its configuration │ serves
//!  │── jackstay take-over 1 ──────────────▶│
//!  │◀── sockets N, then N descriptors ─────│
//!  │ connects to the apiservers            │ serves
//!  │ accepts                               │ serves
//!  │── serving ───────────────────────────▶│ sends the new PID to the service manager, stops accepting
//!  │◀── left ──────────────────────────────│
//!  │ serves the admin endpoint, is ready   │ drains and ends
//! ```
//!
//! Each side trusts only a peer that runs as the same user or as root (`SO_PEERCRED`, unix(7)). For the same
//! reason the mode of the socket file is 0600.

use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream as BlockingStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use socket2::{Domain, SockAddr, Socket, Type};
use tokio::io::{AsyncReadExt, AsyncWriteExt, Interest};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{mpsc, oneshot};
use tokio::time::{sleep, timeout};

use super::start_error::StartError;
use crate::net::process::descriptor_passing;
use crate::net::process::inherited_sockets::InheritedSockets;
use crate::net::sockets::listening;
use crate::observe::log::PidInLines;

/// The first message of the new process; the number is the version of the protocol.
const REQUEST: &str = "jackstay take-over 1";
/// The message of the new process when it accepts connections.
const SERVING: &str = "serving";
/// The message of the old process when it has stopped accepting.
const LEFT: &str = "left";
/// Maximum length of a line of either side, in bytes.
const MAX_LINE: usize = 128;
/// Maximum of sockets in a takeover. A listener has a few addresses, with one socket for each worker.
const MAX_SOCKETS: usize = 1024;
/// Maximum time for a peer to read a message or to answer one that it handles at once.
const REPLY_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum time from the connect of a new process to its request, which it sends at once. Other new processes
/// wait meanwhile.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum time for a new process to serve after it has received the sockets: more than twice the time for
/// which it waits for apiservers and for its workers. Other new processes wait meanwhile.
const SERVE_TIMEOUT: Duration = Duration::from_secs(20);
/// Maximum time for which a new process waits for the sockets, including other takeovers before it.
const QUEUE_TIMEOUT: Duration = Duration::from_secs(30);
/// Pause after a failed accept, so that the loop does not spin.
const ACCEPT_RETRY: Duration = Duration::from_secs(1);

/// How often a new process checks whether the old one has ended.
const END_POLL: Duration = Duration::from_millis(500);
/// Maximum time for which log lines have the field `pid` after a takeover: longer than the default of the drain
/// timeout. The id of the old process may be in use again later.
const MAX_OVERLAP: Duration = Duration::from_secs(120);

/// The takeover socket of a process with this state directory.
pub fn socket_path(state_dir: &Path) -> PathBuf {
    state_dir.join("take-over.sock")
}

/// The running process, from the view of the one that takes over.
#[derive(Debug)]
pub struct Predecessor {
    stream: BlockingStream,
    pid: Option<i32>,
    overlap: PidInLines,
}

/// Requests the sockets of the process that serves `path`. Returns `None` if no process does.
///
/// # Errors
/// The process does not hand over its sockets.
pub fn request_sockets(path: &Path) -> Result<Option<(Predecessor, InheritedSockets)>, StartError> {
    let stream = match connect(path) {
        Ok(stream) => stream,
        Err(error) => match error.kind() {
            // No file, or the file of a process that has ended.
            ErrorKind::NotFound | ErrorKind::ConnectionRefused => return Ok(None),
            ErrorKind::WouldBlock => {
                return Err(StartError::takeover(
                    path,
                    "it does not answer, and its queue is full",
                ));
            }
            _ => return Err(StartError::takeover(path, &error.to_string())),
        },
    };
    receive_sockets(stream).map(Some).map_err(|error| match error.kind() {
        ErrorKind::WouldBlock | ErrorKind::TimedOut => {
            StartError::takeover(path, "no answer within 30 s")
        }
        ErrorKind::UnexpectedEof => {
            StartError::takeover(path, "the other process closed the connection")
        }
        _ => StartError::takeover(path, &error.to_string()),
    })
}

/// Connects, but fails with `WouldBlock` if the accept queue is full. A blocking connect(2) would wait without
/// limit for a process that hangs.
fn connect(path: &Path) -> io::Result<BlockingStream> {
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    socket.set_nonblocking(true)?;
    socket.connect(&SockAddr::unix(path)?)?;
    socket.set_nonblocking(false)?;
    Ok(OwnedFd::from(socket).into())
}

/// Requests the sockets of the process at the other end of `stream`.
///
/// # Errors
/// The process is not trusted, or its answer is not that of the protocol.
pub fn receive_sockets(mut stream: BlockingStream) -> io::Result<(Predecessor, InheritedSockets)> {
    let peer = descriptor_passing::peer_credentials(stream.as_fd())?;
    if !is_trusted(peer.uid) {
        return Err(io::Error::other(format!(
            "it runs as user {}, which is not trusted",
            peer.uid
        )));
    }
    stream.set_read_timeout(Some(QUEUE_TIMEOUT))?;
    stream.set_write_timeout(Some(REPLY_TIMEOUT))?;
    stream.write_all(format!("{REQUEST}\n").as_bytes())?;
    let mut line = Vec::new();
    loop {
        let mut byte = [0];
        stream.read_exact(&mut byte)?;
        if !push(&mut line, byte[0])? {
            break;
        }
    }
    let answer = String::from_utf8_lossy(&line).into_owned();
    let count = answer.strip_prefix("sockets ").and_then(|count| count.parse().ok());
    let Some(count) = count.filter(|count| *count <= MAX_SOCKETS) else {
        return Err(io::Error::other(format!("unexpected answer: {answer}")));
    };
    let mut sockets = InheritedSockets::default();
    for _ in 0..count {
        let descriptor = descriptor_passing::receive(stream.as_fd())?;
        sockets.add(descriptor).map_err(io::Error::other)?;
    }
    // The kernel reports 0 for a process of another PID namespace.
    let pid = Some(peer.pid).filter(|pid| *pid > 0);
    Ok((Predecessor { stream, pid, overlap: PidInLines::start() }, sockets))
}

impl Predecessor {
    /// Its process id, unless it runs in another PID namespace.
    pub fn pid(&self) -> Option<i32> {
        self.pid
    }

    /// Reports to the old process that this one serves its sockets, and waits until the old one has stopped
    /// accepting. Log lines have the field `pid` until the old process has ended, for at most [`MAX_OVERLAP`].
    ///
    /// # Errors
    /// The old process has ended or does not answer.
    pub async fn replace(self) -> io::Result<()> {
        let Self { stream, pid, overlap } = self;
        drop(tokio::spawn(async move {
            // Without a visible process id, its end cannot be seen.
            let _ = timeout(MAX_OVERLAP, wait_until_ended(pid)).await;
            drop(overlap);
        }));
        stream.set_nonblocking(true)?;
        let mut stream = UnixStream::from_std(stream)?;
        stream.write_all(format!("{SERVING}\n").as_bytes()).await?;
        match timeout(REPLY_TIMEOUT, read_line(&mut stream)).await {
            Ok(Ok(line)) if line == LEFT => Ok(()),
            Ok(Ok(line)) => Err(io::Error::other(format!("unexpected answer: {line}"))),
            Ok(Err(error)) => Err(error),
            Err(_) => Err(ErrorKind::TimedOut.into()),
        }
    }
}

/// Waits until a process has ended; never ends without its id. Landlock does not restrict stat(2), unlike open(2).
async fn wait_until_ended(pid: Option<i32>) {
    let Some(pid) = pid else { return std::future::pending().await };
    let process = PathBuf::from(format!("/proc/{pid}"));
    while process.exists() {
        sleep(END_POLL).await;
    }
}

/// A request of the [`TakeoverServer`] to the control thread.
#[derive(Debug)]
pub enum TakeoverRequest {
    /// Duplicate the listening sockets.
    DuplicateSockets(oneshot::Sender<io::Result<Vec<OwnedFd>>>),
    /// Stop accepting, since the new process serves the sockets.
    ReleaseSockets {
        /// The new process, unless it runs in another PID namespace.
        pid: Option<i32>,
        /// Dropped when the workers have stopped accepting.
        done: oneshot::Sender<()>,
    },
}

/// Hands the sockets of this process to a new one.
#[derive(Debug)]
pub struct TakeoverServer(UnixListener);

impl TakeoverServer {
    /// Listens on `path`, and replaces the socket file of a process that has ended. With `replace` it also
    /// replaces the file of a running process, the one that this process has taken over from.
    ///
    /// # Errors
    /// The directory cannot be written, or another process serves `path`.
    pub fn listen(path: &Path, replace: bool) -> io::Result<Self> {
        if !replace && BlockingStream::connect(path).is_ok() {
            return Err(io::Error::other(
                "another process with this state_dir serves it; each jackstay needs a state_dir of its own",
            ));
        }
        UnixListener::from_std(listening::listen_unix(path, 0o600)?).map(Self)
    }

    /// Serves new processes one after the other, until one has taken over.
    pub async fn serve(self, requests: mpsc::UnboundedSender<TakeoverRequest>) {
        loop {
            let mut stream = match self.0.accept().await {
                Ok((stream, _)) => stream,
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a takeover request");
                    sleep(ACCEPT_RETRY).await;
                    continue;
                }
            };
            let overlap = PidInLines::start();
            match hand_over(&mut stream, &requests).await {
                Ok(()) => return overlap.until_exit(),
                Err(error) => tracing::warn!(%error, "takeover failed; continuing to serve"),
            }
        }
    }
}

/// Serves one new process. Returns `Ok` if it has taken over.
///
/// # Errors
/// The process is not trusted, does not follow the protocol, or ends before it serves.
pub async fn hand_over(
    stream: &mut UnixStream,
    requests: &mpsc::UnboundedSender<TakeoverRequest>,
) -> io::Result<()> {
    let shutting_down = || io::Error::other("this process is shutting down");
    let peer = stream.peer_cred()?;
    if !is_trusted(peer.uid()) {
        return Err(io::Error::other(format!("user {} is not trusted", peer.uid())));
    }
    let request =
        within(REQUEST_TIMEOUT, "the new process sent no request", read_line(stream)).await?;
    if request != REQUEST {
        let answer = format!("this process understands `{REQUEST}`\n");
        let write = stream.write_all(answer.as_bytes());
        within(REPLY_TIMEOUT, "the new process does not read", write).await?;
        return Err(io::Error::other("the new process uses another protocol version"));
    }
    let (reply, sockets) = oneshot::channel();
    requests.send(TakeoverRequest::DuplicateSockets(reply)).map_err(|_| shutting_down())?;
    let sockets = sockets.await.map_err(|_| shutting_down())??;
    let send = async {
        stream.write_all(format!("sockets {}\n", sockets.len()).as_bytes()).await?;
        for socket in &sockets {
            let send = || descriptor_passing::send(stream.as_fd(), socket.as_fd());
            stream.async_io(Interest::WRITABLE, send).await?;
        }
        Ok(())
    };
    within(REPLY_TIMEOUT, "the new process does not receive the sockets", send).await?;
    drop(sockets);
    tracing::info!(to = peer.pid(), "listening sockets sent to a new process");
    let message =
        within(SERVE_TIMEOUT, "the new process does not serve", read_line(stream)).await?;
    if message != SERVING {
        return Err(io::Error::other(format!("unexpected message: {message}")));
    }
    let (done, released) = oneshot::channel();
    let release = TakeoverRequest::ReleaseSockets { pid: peer.pid(), done };
    requests.send(release).map_err(|_| shutting_down())?;
    // The sender is dropped without a message.
    let _ = released.await;
    // The takeover has succeeded even if the new process does not read this message.
    let _ = timeout(REPLY_TIMEOUT, stream.write_all(format!("{LEFT}\n").as_bytes())).await;
    Ok(())
}

/// Awaits an operation on the connection to the new process for at most `limit`, then fails with `timed_out`.
async fn within<T>(
    limit: Duration,
    timed_out: &'static str,
    operation: impl Future<Output = io::Result<T>>,
) -> io::Result<T> {
    match timeout(limit, operation).await {
        Ok(Err(error)) if error.kind() == ErrorKind::UnexpectedEof => {
            Err(io::Error::other("the new process closed the connection"))
        }
        Ok(result) => result,
        Err(_) => Err(io::Error::new(ErrorKind::TimedOut, timed_out)),
    }
}

/// Reads a line byte by byte. A buffered reader would read beyond the line and lose descriptors that follow it.
async fn read_line(stream: &mut UnixStream) -> io::Result<String> {
    let mut line = Vec::new();
    while push(&mut line, stream.read_u8().await?)? {}
    Ok(String::from_utf8_lossy(&line).into_owned())
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
fn is_trusted(user: u32) -> bool {
    user == 0 || user == rustix::process::geteuid().as_raw()
}

#[cfg(test)]
mod tests;

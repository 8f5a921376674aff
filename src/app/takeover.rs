//! Replaces a running process by a new one without closing a listening socket.
//!
//! The running process serves a Unix socket in its state directory ([`socket_path`]). The new
//! process connects to it and receives duplicates of all listening sockets, so it shares their
//! queues. It accepts on them once it is ready, and only then tells the old process, which stops
//! accepting and drains as on SIGTERM. Until that message nothing has changed for the old process:
//! if the new one fails before, the old one continues to serve.
//!
//! ```text
//! new process                             old process
//!  │ reads and validates its configuration │ serves
//!  │── jackstay take-over 1 ──────────────▶│
//!  │◀── sockets N, then N descriptors ─────│
//!  │ connects to the apiservers            │ serves
//!  │ accepts                               │ serves
//!  │── serving ───────────────────────────▶│ stops accepting
//!  │◀── left ──────────────────────────────│ tells the service manager the new main process
//!  │ serves the admin endpoint, is ready   │ drains and ends
//! ```
//!
//! Each side accepts only a peer that runs as the same user or as root (`SO_PEERCRED`, unix(7)).
//! The mode of the socket file is 0600 for the same reason.

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

/// The first message of the new process; the number is the version of the protocol.
const REQUEST: &str = "jackstay take-over 1";
/// The message of the new process once it accepts.
const SERVING: &str = "serving";
/// The message of the old process once it has stopped accepting.
const LEFT: &str = "left";
/// Longest line of either side, in bytes.
const MAX_LINE: usize = 128;
/// Most sockets of a takeover: a listener has a few addresses, each with a socket for each worker.
const MAX_SOCKETS: usize = 1024;
/// How long the peer may take to read or to answer a message that it handles at once.
const REPLY_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a new process may take from the connect to its request, which it sends first. Other new
/// processes wait meanwhile.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(2);
/// How long a new process may take to serve: more than twice the time it waits for apiservers and
/// for its workers. Other new processes wait meanwhile.
const SERVE_TIMEOUT: Duration = Duration::from_secs(20);
/// How long a new process waits for the sockets, other takeovers included.
const QUEUE_TIMEOUT: Duration = Duration::from_secs(30);
/// Pause after a failed accept, so that the loop does not spin.
const ACCEPT_RETRY: Duration = Duration::from_secs(1);

/// The takeover socket of a process with this state directory.
pub fn socket_path(state_dir: &Path) -> PathBuf {
    state_dir.join("take-over.sock")
}

/// The process that is being replaced.
#[derive(Debug)]
pub struct Predecessor {
    stream: BlockingStream,
    pid: Option<i32>,
}

/// Requests the sockets of the process that serves `path`. Returns `None` if there is none.
///
/// # Errors
/// The process does not hand them over.
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

/// Connects without blocking. Fails with `WouldBlock` if the queue is full, since a blocking
/// connect(2) would wait for ever for a process that hangs.
fn connect(path: &Path) -> io::Result<BlockingStream> {
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    socket.set_nonblocking(true)?;
    socket.connect(&SockAddr::unix(path)?)?;
    socket.set_nonblocking(false)?;
    Ok(OwnedFd::from(socket).into())
}

fn receive_sockets(mut stream: BlockingStream) -> io::Result<(Predecessor, InheritedSockets)> {
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
    Ok((Predecessor { stream, pid }, sockets))
}

impl Predecessor {
    /// Its process id, unless it runs in another PID namespace.
    pub fn pid(&self) -> Option<i32> {
        self.pid
    }

    /// Tells the old process that its sockets are served, and waits until it has stopped accepting.
    ///
    /// # Errors
    /// The process has ended or does not answer. This one serves either way.
    pub async fn replace(self) -> io::Result<()> {
        self.stream.set_nonblocking(true)?;
        let mut stream = UnixStream::from_std(self.stream)?;
        stream.write_all(format!("{SERVING}\n").as_bytes()).await?;
        match timeout(REPLY_TIMEOUT, read_line(&mut stream)).await {
            Ok(Ok(line)) if line == LEFT => Ok(()),
            Ok(Ok(line)) => Err(io::Error::other(format!("unexpected answer: {line}"))),
            Ok(Err(error)) => Err(error),
            Err(_) => Err(ErrorKind::TimedOut.into()),
        }
    }
}

/// What the [`TakeoverServer`] asks of the control thread.
#[derive(Debug)]
pub enum TakeoverRequest {
    /// Duplicate the listening sockets.
    DuplicateSockets(oneshot::Sender<io::Result<Vec<OwnedFd>>>),
    /// Stop accepting: the new process serves.
    ReleaseSockets {
        /// The new process, unless it runs in another PID namespace.
        pid: Option<i32>,
        /// Dropped once nothing is accepted any more.
        done: oneshot::Sender<()>,
    },
}

/// Hands the sockets of this process to a new one.
#[derive(Debug)]
pub struct TakeoverServer(UnixListener);

impl TakeoverServer {
    /// Listens on `path`, which may be the file of a process that has ended. With `replace` it may
    /// also be the file of the process that this one has taken over from.
    ///
    /// # Errors
    /// The directory cannot be written, or another process serves `path`.
    pub fn listen(path: &Path, replace: bool) -> io::Result<Self> {
        if !replace && BlockingStream::connect(path).is_ok() {
            return Err(io::Error::other("another process with this state_dir serves it"));
        }
        UnixListener::from_std(listening::listen_unix(path)?).map(Self)
    }

    /// Serves one new process after the other, until one has taken over.
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
            match hand_over(&mut stream, &requests).await {
                Ok(()) => return,
                Err(error) => tracing::warn!(%error, "takeover failed; continuing to serve"),
            }
        }
    }
}

/// Serves one new process. Returns `Ok` if it has taken over.
async fn hand_over(
    stream: &mut UnixStream,
    requests: &mpsc::UnboundedSender<TakeoverRequest>,
) -> io::Result<()> {
    let ending = || io::Error::other("this process is shutting down");
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
    requests.send(TakeoverRequest::DuplicateSockets(reply)).map_err(|_| ending())?;
    let sockets = sockets.await.map_err(|_| ending())??;
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
    tracing::info!(pid = peer.pid(), "listening sockets sent to a new process");
    let message =
        within(SERVE_TIMEOUT, "the new process does not serve", read_line(stream)).await?;
    if message != SERVING {
        return Err(io::Error::other(format!("unexpected message: {message}")));
    }
    let (done, released) = oneshot::channel();
    let release = TakeoverRequest::ReleaseSockets { pid: peer.pid(), done };
    requests.send(release).map_err(|_| ending())?;
    // The sender is dropped, so this is always an error.
    let _ = released.await;
    // The new process serves, whether or not it reads this message.
    let _ = timeout(REPLY_TIMEOUT, stream.write_all(format!("{LEFT}\n").as_bytes())).await;
    Ok(())
}

/// Runs `operation` for at most `limit`; `timed_out` is the error after that.
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

/// Reads a line byte by byte: descriptors may follow it, which a buffered reader would lose.
async fn read_line(stream: &mut UnixStream) -> io::Result<String> {
    let mut line = Vec::new();
    while push(&mut line, stream.read_u8().await?)? {}
    Ok(String::from_utf8_lossy(&line).into_owned())
}

/// Appends a byte to a line. Returns false at its end.
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

/// Whether a process of this user may give or receive sockets: the own user, and root.
fn is_trusted(user: u32) -> bool {
    user == 0 || user == rustix::process::geteuid().as_raw()
}

#[cfg(test)]
mod tests;

//! Replaces a running process by a new one: the listening sockets change hands, connections do not.
//!
//! The running process owns a Unix socket in its state directory ([`path`]). A new one asks there, is
//! given the very sockets that are listened on, with every connection that waits in their queues,
//! and accepts on them as soon as it is ready to serve. Only then does it say so, and the old one
//! accepts no more and drains, as on SIGTERM. Until that word nothing has changed for the old one:
//! whatever becomes of the new one before it, the old one goes on.
//!
//! ```text
//! new                                     old
//!  │ configuration is read and valid       │ serves
//!  │── jackstay take-over 1 ──────────────▶│
//!  │◀── sockets N, then N descriptors ─────│
//!  │ connects to the apiservers            │ serves
//!  │ accepts                               │ serves
//!  │── serving ───────────────────────────▶│ accepts no more
//!  │◀── left ──────────────────────────────│ tells the service manager who the main process is now
//!  │ answers operators, is ready           │ drains and ends
//! ```
//!
//! Who may ask, and who is believed, is the same user and root (`SO_PEERCRED`, unix(7)); the socket's
//! mode says so too.

use std::fmt;
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

use crate::net::process::descriptor_passing;
use crate::net::process::inherited_sockets::InheritedSockets;
use crate::net::sockets::unix_listener;

/// What a new process asks; the number changes with the conversation.
const ASK: &str = "jackstay take-over 1";
/// What it says when it accepts.
const SERVING: &str = "serving";
/// What the old one says when it does not accept any more.
const LEFT: &str = "left";
/// Longest line of either side, in bytes.
const MAX_LINE: usize = 128;
/// Most sockets that are handed over: listeners have a few addresses, each a socket for each worker.
const MAX_SOCKETS: usize = 1024;
/// How long the other side may take for what it can do at once.
const PROMPT: Duration = Duration::from_secs(10);
/// How long whoever comes may take to ask: that is the first thing it does. Others wait for it.
const SILENCE: Duration = Duration::from_secs(2);
/// How long a new process may take to begin to serve: more than twice what it waits for apiservers
/// and for its workers. Others wait for it.
const BEGIN: Duration = Duration::from_secs(20);
/// How long a new process waits for its turn.
const TURN: Duration = Duration::from_secs(30);
/// Pause after the socket failed to accept, so that the loop does not spin.
const PAUSE: Duration = Duration::from_secs(1);

/// Why nothing was taken over although there is somebody.
#[derive(Debug)]
pub struct TakeOverError {
    path: PathBuf,
    why: String,
}

impl fmt::Display for TakeOverError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { path, why } = self;
        write!(f, "cannot take over by {}: {why}; what runs goes on", path.display())
    }
}

impl std::error::Error for TakeOverError {}

/// The socket by which a process with this state directory is asked.
pub fn path(state_dir: &Path) -> PathBuf {
    state_dir.join("take-over.sock")
}

/// The process whose place we take.
#[derive(Debug)]
pub struct Predecessor {
    stream: BlockingStream,
    /// Its process id, if the kernel shows it to us.
    pub pid: Option<i32>,
}

/// Asks for the sockets of the process that owns `path`; `None` if there is no such process.
///
/// # Errors
/// There is one, and it does not hand them over.
pub fn ask(path: &Path) -> Result<Option<(Predecessor, InheritedSockets)>, TakeOverError> {
    let failed = |why: String| TakeOverError { path: path.to_owned(), why };
    let stream = match knock(path) {
        Ok(stream) => stream,
        Err(error) => match error.kind() {
            // No file, or one whose process is gone.
            ErrorKind::NotFound | ErrorKind::ConnectionRefused => return Ok(None),
            ErrorKind::WouldBlock => {
                return Err(failed("many have asked there already and none was answered".into()));
            }
            _ => return Err(failed(error.to_string())),
        },
    };
    converse(stream).map(Some).map_err(|error| {
        failed(match error.kind() {
            ErrorKind::WouldBlock | ErrorKind::TimedOut => "no answer within 30 s".into(),
            ErrorKind::UnexpectedEof => "the other process ended the conversation".into(),
            _ => error.to_string(),
        })
    })
}

/// Connects, or fails at once with `WouldBlock` if as many wait there as may: a process that hangs
/// takes none of them, and connect(2) would wait with them for ever.
fn knock(path: &Path) -> io::Result<BlockingStream> {
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    socket.set_nonblocking(true)?;
    socket.connect(&SockAddr::unix(path)?)?;
    socket.set_nonblocking(false)?;
    Ok(OwnedFd::from(socket).into())
}

fn converse(mut stream: BlockingStream) -> io::Result<(Predecessor, InheritedSockets)> {
    let peer = descriptor_passing::peer_credentials(stream.as_fd())?;
    if !is_trusted(peer.uid) {
        return Err(io::Error::other(format!("user {} answers, who is not trusted", peer.uid)));
    }
    stream.set_read_timeout(Some(TURN))?;
    stream.set_write_timeout(Some(PROMPT))?;
    stream.write_all(format!("{ASK}\n").as_bytes())?;
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
        return Err(io::Error::other(format!("the other process says: {answer}")));
    };
    let mut sockets = InheritedSockets::default();
    for _ in 0..count {
        let descriptor = descriptor_passing::receive(stream.as_fd())?;
        sockets.add(descriptor).map_err(|error| io::Error::other(error.to_string()))?;
    }
    // 0 is a process of a namespace that we do not see into.
    let pid = Some(peer.pid).filter(|pid| *pid > 0);
    Ok((Predecessor { stream, pid }, sockets))
}

impl Predecessor {
    /// Tells it that its sockets are served, and waits until it has left them.
    ///
    /// # Errors
    /// It is gone, or does not answer. It accepts no more, or cannot be told: either way we serve.
    pub async fn leave(self) -> io::Result<()> {
        self.stream.set_nonblocking(true)?;
        let mut stream = UnixStream::from_std(self.stream)?;
        stream.write_all(format!("{SERVING}\n").as_bytes()).await?;
        match timeout(PROMPT, read_line(&mut stream)).await {
            Ok(Ok(line)) if line == LEFT => Ok(()),
            Ok(Ok(line)) => Err(io::Error::other(format!("it says: {line}"))),
            Ok(Err(error)) => Err(error),
            Err(_) => Err(ErrorKind::TimedOut.into()),
        }
    }
}

/// What a new process wants of this one.
#[derive(Debug)]
pub enum Wish {
    /// Copies of the listening sockets.
    Sockets(oneshot::Sender<io::Result<Vec<OwnedFd>>>),
    /// That they be left: it serves. The answer is that it was done.
    Leave {
        /// The new process, if the kernel shows it to us.
        pid: Option<i32>,
        /// To be dropped when nothing is accepted here any more.
        done: oneshot::Sender<()>,
    },
}

/// Where a new process asks.
#[derive(Debug)]
pub struct Door(UnixListener);

impl Door {
    /// Opens it at `path`, in the place of one that an earlier process has left; with `instead` also
    /// of one that somebody still answers.
    ///
    /// # Errors
    /// The directory cannot be written, or another process answers there.
    pub fn open(path: &Path, instead: bool) -> io::Result<Self> {
        if !instead && BlockingStream::connect(path).is_ok() {
            return Err(io::Error::other("another process with this state_dir answers there"));
        }
        UnixListener::from_std(unix_listener::listen(path)?).map(Self)
    }

    /// Answers one new process after the other until it is dropped.
    pub async fn answer(self, wishes: mpsc::UnboundedSender<Wish>) {
        loop {
            let mut stream = match self.0.accept().await {
                Ok((stream, _)) => stream,
                Err(error) => {
                    tracing::warn!(%error, "a new process cannot ask to take over");
                    sleep(PAUSE).await;
                    continue;
                }
            };
            match hand_over(&mut stream, &wishes).await {
                Ok(()) => return,
                Err(error) => {
                    tracing::warn!(%error, "nothing was handed over to a new process: going on");
                }
            }
        }
    }
}

/// The whole conversation with a new process. `Ok` if it has taken over.
async fn hand_over(
    stream: &mut UnixStream,
    wishes: &mpsc::UnboundedSender<Wish>,
) -> io::Result<()> {
    let gone = || io::Error::other("this process is about to end");
    let peer = stream.peer_cred()?;
    if !is_trusted(peer.uid()) {
        return Err(io::Error::other(format!("user {} may not ask for it", peer.uid())));
    }
    let asked = soon(SILENCE, "it asks for nothing", read_line(stream)).await?;
    if asked != ASK {
        let answer = format!("this process understands `{ASK}`\n");
        soon(PROMPT, "it does not read", stream.write_all(answer.as_bytes())).await?;
        return Err(io::Error::other("it speaks another version"));
    }
    let (reply, sockets) = oneshot::channel();
    wishes.send(Wish::Sockets(reply)).map_err(|_| gone())?;
    let sockets = sockets.await.map_err(|_| gone())??;
    let send = async {
        stream.write_all(format!("sockets {}\n", sockets.len()).as_bytes()).await?;
        for socket in &sockets {
            let send = || descriptor_passing::send(stream.as_fd(), socket.as_fd());
            stream.async_io(Interest::WRITABLE, send).await?;
        }
        Ok(())
    };
    soon(PROMPT, "it does not take the sockets", send).await?;
    drop(sockets);
    tracing::info!(pid = peer.pid(), "a new process has been given the listening sockets");
    let word = soon(BEGIN, "it does not begin to serve", read_line(stream)).await?;
    if word != SERVING {
        return Err(io::Error::other("it says something else than that it serves"));
    }
    let (done, left) = oneshot::channel();
    wishes.send(Wish::Leave { pid: peer.pid(), done }).map_err(|_| gone())?;
    // Dropped, not sent.
    let _ = left.await;
    // It serves, whether or not it still wants to hear this.
    let _ = timeout(PROMPT, stream.write_all(format!("{LEFT}\n").as_bytes())).await;
    Ok(())
}

async fn soon<T>(
    limit: Duration,
    otherwise: &'static str,
    what: impl Future<Output = io::Result<T>>,
) -> io::Result<T> {
    match timeout(limit, what).await {
        Ok(Err(error)) if error.kind() == ErrorKind::UnexpectedEof => {
            Err(io::Error::other("it is gone"))
        }
        Ok(result) => result,
        Err(_) => Err(io::Error::new(ErrorKind::TimedOut, otherwise)),
    }
}

/// Byte by byte: what follows a line may be descriptors, which a reader that reads ahead would lose.
async fn read_line(stream: &mut UnixStream) -> io::Result<String> {
    let mut line = Vec::new();
    while push(&mut line, stream.read_u8().await?)? {}
    Ok(String::from_utf8_lossy(&line).into_owned())
}

/// Adds a byte to a line. False at its end.
fn push(line: &mut Vec<u8>, byte: u8) -> io::Result<bool> {
    if byte == b'\n' {
        return Ok(false);
    }
    if line.len() == MAX_LINE {
        return Err(io::Error::new(ErrorKind::InvalidData, "a line that does not end"));
    }
    line.push(byte);
    Ok(true)
}

/// Whether a user may hand sockets to us, or take them: the one that we are, and root.
fn is_trusted(user: u32) -> bool {
    user == 0 || user == descriptor_passing::effective_user()
}

#[cfg(test)]
mod tests;

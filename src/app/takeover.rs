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
//!  │◀── left, own ─────────────────────────│ `own` only if no service manager has the sockets too
//!  │ serves the admin endpoint, is ready   │ drains and ends
//! ```
//!
//! A process that drains on a termination signal has closed the sockets of its listeners, so the new process binds
//! them anew. It gets only the socket of the admin endpoint:
//!
//! ```text
//! new process                             old process
//!  │── jackstay take-over 1 ──────────────▶│ drains
//!  │◀── draining 1, then the descriptor ───│
//!  │ binds its listeners, accepts          │ drains
//!  │── serving ───────────────────────────▶│ sends the new PID to the service manager, gives up the admin endpoint
//!  │◀── left ──────────────────────────────│
//! ```
//!
//! A new process without `--take-over` sends `jackstay take-over 1 if draining` when an address is in use. A process
//! that serves answers `serving` and keeps its sockets. A termination signal after the sockets were sent changes
//! nothing for the new process: it accepts on them, and the old process answers `serving` during its drain too.
//!
//! Each side trusts only a peer that runs as the same user or as root (`SO_PEERCRED`, unix(7)). For the same
//! reason the mode of the socket file is 0600.

mod predecessor;
mod protocol;

use std::convert::Infallible;
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream as BlockingStream;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::time::Duration;

use jackstay_core::takeover::hand_over::{End, HandOver, HandOverEffect, HandOverInput};
use jackstay_core::takeover::messages::{Answer, LEFT, OWN, REQUEST};
use jackstay_sys::process::descriptor_passing;
use jackstay_sys::sockets::listening;
use tokio::io::{AsyncWriteExt, Interest};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{Mutex, mpsc, oneshot};
use tokio::time::{sleep, timeout};

use self::protocol::{REPLY_TIMEOUT, is_trusted, read_line, visible_pid, wait_until_ended};
use super::shared_sockets::SentSockets;
use crate::observe::log::PidInLines;

pub use self::predecessor::{AskError, Found, Predecessor, ask, pause, request, show_pid_beside};
pub use jackstay_core::takeover::messages::Request;

/// Maximum time from the connect of a new process to its request, which it sends at once. Other new processes
/// wait meanwhile.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum time for a new process to serve after it has received the sockets: more than twice the time for
/// which it waits for apiservers and for its workers. Other new processes wait meanwhile.
const SERVE_TIMEOUT: Duration = Duration::from_secs(20);
/// Pause after a failed accept, so that the loop does not spin.
const ACCEPT_RETRY: Duration = Duration::from_secs(1);

/// The takeover socket of a process with this state directory.
pub fn socket_path(state_dir: &Path) -> PathBuf {
    state_dir.join("take-over.sock")
}

/// A request of the [`TakeoverServer`] to the control thread.
#[derive(Debug)]
pub enum TakeoverRequest {
    /// Duplicate what this process offers ([`hand_over::offer`](jackstay_core::takeover::hand_over::offer)).
    DuplicateSockets {
        /// What the new process asks for.
        request: Request,
        /// Receives them.
        reply: oneshot::Sender<io::Result<Offer>>,
    },
    /// Stop accepting, since the new process serves the sockets.
    ReleaseSockets {
        /// The new process, unless it runs in another PID namespace.
        pid: Option<i32>,
        /// Receives a value when the workers have stopped accepting: whether this process and the new one alone have
        /// the sockets.
        done: oneshot::Sender<bool>,
    },
}

/// What this process hands to a new one.
#[derive(Debug)]
pub enum Offer {
    /// This process serves: all its listening sockets.
    Sockets(Vec<OwnedFd>, SentSockets),
    /// This process drains: the socket of its admin endpoint, if it still has that.
    Draining(Vec<OwnedFd>),
    /// This process serves, and the new process wants only the sockets of a drain.
    Nothing,
}

impl Offer {
    fn into_parts(self) -> (Answer, Vec<OwnedFd>, SentSockets) {
        match self {
            Self::Sockets(sockets, sent) => (Answer::Sockets(sockets.len()), sockets, sent),
            // This process closes its own.
            Self::Draining(sockets) => {
                (Answer::Draining(sockets.len()), sockets, SentSockets::default())
            }
            Self::Nothing => (Answer::Serving, Vec::new(), SentSockets::default()),
        }
    }
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

    /// Serves new processes one after the other, until one has taken over, or until the sender of `stop` is dropped: then
    /// the socket is closed at once, but a new process that is being served is heard to its end, since it may serve
    /// already. Returns whether one has taken over.
    ///
    /// `turn` is held for each new process, since one at a time gets sockets; servers of two paths share it.
    pub async fn serve(
        self,
        requests: mpsc::UnboundedSender<TakeoverRequest>,
        mut stop: oneshot::Receiver<Infallible>,
        turn: &Mutex<()>,
    ) -> bool {
        let mut listener = Some(self.0);
        while let Some(socket) = &listener {
            let accepted = tokio::select! {
                biased;
                _ = &mut stop => return false,
                accepted = socket.accept() => accepted,
            };
            let mut stream = match accepted {
                Ok((stream, _)) => stream,
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a takeover request");
                    sleep(ACCEPT_RETRY).await;
                    continue;
                }
            };
            let _turn = tokio::select! {
                biased;
                _ = &mut stop => return false,
                turn = turn.lock() => turn,
            };
            let overlap = PidInLines::start();
            let mut exchange = pin!(hand_over(&mut stream, &requests));
            let result = tokio::select! {
                result = &mut exchange => result,
                _ = &mut stop => {
                    listener = None;
                    exchange.await
                }
            };
            match result {
                Ok(true) => {
                    overlap.until_exit();
                    return true;
                }
                Ok(false) => {}
                Err(error) => tracing::warn!(%error, "takeover failed; this process continues"),
            }
        }
        false
    }
}

/// Serves one new process, as [`HandOver`] decides. Returns whether it has taken over. It has not if this process
/// serves and the new one wants only the sockets of a drain, or if the new one has gone before it got sockets, as one
/// does that only looks whether another process serves.
///
/// # Errors
/// The process is not trusted, does not follow the protocol, or ends after it has got sockets and before it serves.
pub async fn hand_over(
    stream: &mut UnixStream,
    requests: &mpsc::UnboundedSender<TakeoverRequest>,
) -> io::Result<bool> {
    let peer = stream.peer_cred()?;
    if !is_trusted(peer.uid()) {
        return Err(io::Error::other(format!("user {} is not trusted", peer.uid())));
    }
    let pid = peer.pid().and_then(visible_pid);
    let (sockets, sent) = (Vec::new(), SentSockets::default());
    let mut exchange = Exchange { stream, requests, pid, sockets, sent };
    let (mut machine, mut effect) = HandOver::new();
    loop {
        let done = exchange.execute(effect).await;
        effect = machine.step(match &done {
            Ok(Done::Line(line)) => HandOverInput::Line(line),
            Ok(Done::Offered(answer)) => HandOverInput::Offered(*answer),
            Ok(Done::Released { own }) => HandOverInput::Released { own: *own },
            Ok(Done::Sent) => HandOverInput::Done,
            Err(error) if is_gone(error) => HandOverInput::Gone,
            Err(_) => HandOverInput::Failed,
        });
        if let HandOverEffect::End(end) = effect {
            return exchange.end(end, done);
        }
    }
}

/// The connection to a new process.
struct Exchange<'a> {
    stream: &'a mut UnixStream,
    requests: &'a mpsc::UnboundedSender<TakeoverRequest>,
    /// The new process.
    pid: Option<i32>,
    /// What it gets.
    sockets: Vec<OwnedFd>,
    sent: SentSockets,
}

/// The result of an effect.
enum Done {
    Line(String),
    Offered(Answer),
    Released { own: bool },
    Sent,
}

impl Exchange<'_> {
    async fn execute(&mut self, effect: HandOverEffect) -> io::Result<Done> {
        match effect {
            HandOverEffect::ReadRequest => {
                let read = read_line(self.stream);
                within(REQUEST_TIMEOUT, "the new process sent no request", read)
                    .await
                    .map(Done::Line)
            }
            HandOverEffect::Offer(request) => self.offer(request).await.map(Done::Offered),
            HandOverEffect::Explain => {
                let answer = format!("this process understands `{REQUEST}`\n");
                let write = self.stream.write_all(answer.as_bytes());
                within(REPLY_TIMEOUT, "the new process does not read", write).await?;
                Ok(Done::Sent)
            }
            HandOverEffect::Send(answer) => {
                let send = self.send(answer);
                within(REPLY_TIMEOUT, "the new process does not receive the sockets", send).await?;
                Ok(Done::Sent)
            }
            HandOverEffect::Await(answer) => {
                self.log_sent(answer);
                let read = read_line(self.stream);
                within(SERVE_TIMEOUT, "the new process does not serve", read).await.map(Done::Line)
            }
            HandOverEffect::Release => {
                let (done, released) = oneshot::channel();
                let release = TakeoverRequest::ReleaseSockets { pid: self.pid, done };
                self.requests.send(release).map_err(|_| shutting_down())?;
                Ok(Done::Released { own: released.await.unwrap_or(false) })
            }
            HandOverEffect::Leave { own } => {
                let left = if own { format!("{LEFT}\n{OWN}\n") } else { format!("{LEFT}\n") };
                let write = self.stream.write_all(left.as_bytes());
                within(REPLY_TIMEOUT, "the new process does not read", write).await?;
                Ok(Done::Sent)
            }
            HandOverEffect::End(_) => Ok(Done::Sent),
        }
    }

    async fn offer(&mut self, request: Request) -> io::Result<Answer> {
        let (reply, offer) = oneshot::channel();
        let duplicate = TakeoverRequest::DuplicateSockets { request, reply };
        self.requests.send(duplicate).map_err(|_| shutting_down())?;
        let (answer, sockets, sent) = offer.await.map_err(|_| shutting_down())??.into_parts();
        (self.sockets, self.sent) = (sockets, sent);
        Ok(answer)
    }

    async fn send(&mut self, answer: Answer) -> io::Result<()> {
        self.stream.write_all(format!("{answer}\n").as_bytes()).await?;
        for socket in &self.sockets {
            let send = || descriptor_passing::send(self.stream.as_fd(), socket.as_fd());
            self.stream.async_io(Interest::WRITABLE, send).await?;
        }
        Ok(())
    }

    fn log_sent(&self, answer: Answer) {
        let to = self.pid;
        match answer {
            Answer::Serving => {}
            // The sockets of the listeners are closed.
            Answer::Draining(count) => tracing::info!(
                to,
                admin_sockets = count,
                "only the socket of the admin endpoint sent to a new process"
            ),
            Answer::Sockets(count) => {
                tracing::info!(to, sockets = count, "all listening sockets sent to a new process");
            }
        }
    }

    /// The result of the exchange. `last`: that of its last effect.
    fn end(&mut self, end: End, last: io::Result<Done>) -> io::Result<bool> {
        let mut sent = std::mem::take(&mut self.sent);
        match (end, self.pid) {
            (End::TakenOver, _) => {}
            _ if last.as_ref().is_err_and(is_gone) => sent.process_has_ended(),
            (_, Some(pid)) => drop(tokio::spawn(async move {
                wait_until_ended(pid).await;
                sent.process_has_ended();
            })),
            (_, None) => {}
        }
        match (end, last) {
            (End::TakenOver, _) => Ok(true),
            (End::Continues, _) => Ok(false),
            (End::Gone, Err(error)) => {
                let from = self.pid;
                tracing::debug!(%error, from, "a new process has gone before it got sockets");
                Ok(false)
            }
            (End::OtherVersion, _) => {
                Err(io::Error::other("the new process uses another protocol version"))
            }
            (End::Unexpected, Ok(Done::Line(line))) => {
                Err(io::Error::other(format!("unexpected message: {line}")))
            }
            (_, Err(error)) => Err(error),
            (_, Ok(_)) => Err(io::Error::other("the takeover has not ended")),
        }
    }
}

fn shutting_down() -> io::Error {
    io::Error::other("this process is shutting down")
}

/// Whether an operation has failed because the peer has closed the connection.
fn is_gone(error: &io::Error) -> bool {
    use ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
    matches!(error.kind(), UnexpectedEof | BrokenPipe | ConnectionReset)
}

/// Awaits an operation on the connection to the new process for at most `limit`, then fails with `timed_out`.
async fn within<T>(
    limit: Duration,
    timed_out: &'static str,
    operation: impl Future<Output = io::Result<T>>,
) -> io::Result<T> {
    match timeout(limit, operation).await {
        Ok(Err(error)) if error.kind() == ErrorKind::UnexpectedEof => {
            Err(io::Error::new(error.kind(), "the new process closed the connection"))
        }
        Ok(result) => result,
        Err(_) => Err(io::Error::new(ErrorKind::TimedOut, timed_out)),
    }
}

#[cfg(test)]
mod tests;

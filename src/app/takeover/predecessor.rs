//! The running process, from the view of a new one with the same `state_dir`.

use std::io::{self, ErrorKind, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream as BlockingStream;
use std::path::Path;
use std::time::Duration;

use jackstay_core::takeover::inquiry::{Inquiry, InquiryEffect, InquiryInput};
use jackstay_core::takeover::messages::{Answer, LEFT, OWN, Request, SERVING};
use jackstay_sys::clock;
use jackstay_sys::process::descriptor_passing;
use jackstay_sys::process::inherited_sockets::InheritedSockets;
use socket2::{Domain, SockAddr, Socket, Type};
use tokio::io::AsyncWriteExt;
use tokio::net::UnixStream;
use tokio::task::spawn_blocking;
use tokio::time::timeout;

use super::protocol::{self, REPLY_TIMEOUT, read_line, visible_pid, wait_until_ended};
use crate::app::start_error::{OtherProcess, StartError};
use crate::observe::log::PidInLines;

/// Maximum time for the running process to answer. It includes a reload in progress, and another takeover that
/// waits for apiservers (3 s).
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum time for which log lines have the field `pid` after a takeover: longer than the default of the drain
/// timeout. The id of the old process may be in use again later.
const MAX_OVERLAP: Duration = Duration::from_secs(120);

/// The process that this one replaces. Log lines have the field `pid` while it exists.
#[derive(Debug)]
pub struct Predecessor {
    stream: BlockingStream,
    pid: Option<i32>,
    draining: bool,
    overlap: PidInLines,
}

/// What serves a takeover socket.
#[derive(Debug)]
pub enum Found {
    /// No process.
    Nothing,
    /// A process that hands over these sockets.
    Predecessor(Predecessor, InheritedSockets),
    /// A process that serves, with its PID if it is in the same PID namespace; only after [`Request::IfDraining`].
    Serving(Option<i32>),
    /// A process that does not answer, with its PID if it is in the same PID namespace.
    Silent(Option<i32>),
}

/// Asks the process that serves `path`, as [`Inquiry`] decides.
///
/// # Errors
/// The process refuses, or its answer is not that of the protocol.
pub fn request(path: &Path, request: Request) -> Result<Found, StartError> {
    let (mut inquiry, mut effect) = (Inquiry::default(), InquiryEffect::Connect);
    let (mut stream, mut found, mut error) = (None, Found::Nothing, None);
    loop {
        let input = match effect {
            InquiryEffect::Connect => match connect(path) {
                Ok(connected) => {
                    let pid = peer_pid(&connected);
                    stream = Some(connected);
                    InquiryInput::Connected(pid)
                }
                Err(failed) => connect_failed(path, &failed, &mut error),
            },
            InquiryEffect::Ask => match stream.take().map(|stream| ask(stream, request)) {
                Some(Ok(answer)) => {
                    found = answer;
                    InquiryInput::Answered
                }
                Some(Err(failed)) => ask_failed(path, failed, &mut error),
                None => InquiryInput::Continue,
            },
            InquiryEffect::Pause(time) => {
                pause(time);
                InquiryInput::Continue
            }
            InquiryEffect::Nothing => return Ok(Found::Nothing),
            InquiryEffect::Silent => return Ok(Found::Silent(inquiry.process())),
            InquiryEffect::Answer => return Ok(found),
            InquiryEffect::Fail | InquiryEffect::FailClosed => {
                let closed = || {
                    let reason = "the other process closed the connection";
                    StartError::takeover(path, reason, OtherProcess::Unknown)
                };
                return Err(error.unwrap_or_else(closed));
            }
        };
        effect = inquiry.step(input, clock::now());
    }
}

/// Why connecting has failed. `error` is set if the start fails for it.
fn connect_failed(path: &Path, failed: &io::Error, error: &mut Option<StartError>) -> InquiryInput {
    match failed.kind() {
        // No file, or the file of a process that has ended.
        ErrorKind::NotFound | ErrorKind::ConnectionRefused => InquiryInput::NoListener,
        ErrorKind::WouldBlock => InquiryInput::QueueFull,
        _ => {
            let unknown = OtherProcess::Unknown;
            *error = Some(StartError::takeover(path, &failed.to_string(), unknown));
            InquiryInput::ConnectFailed
        }
    }
}

/// Why asking has failed. `error` is set if the start fails for it.
fn ask_failed(path: &Path, failed: AskError, error: &mut Option<StartError>) -> InquiryInput {
    let (reason, state) = match failed {
        AskError::NoAnswer(failed) if is_timeout(&failed) => return InquiryInput::Late,
        AskError::NoAnswer(failed) if is_close(&failed) => return InquiryInput::Closed,
        AskError::NoAnswer(failed) => (failed.to_string(), OtherProcess::Unknown),
        AskError::Answered(failed) => (failed.to_string(), OtherProcess::Serves),
        AskError::Interrupted(failed) => {
            (format!("its sockets did not arrive: {failed}"), OtherProcess::Unknown)
        }
    };
    *error = Some(StartError::takeover(path, &reason, state));
    InquiryInput::AskFailed
}

/// Waits during a start, which runs on a thread without an event loop.
#[allow(clippy::disallowed_methods)]
pub fn pause(time: Duration) {
    std::thread::sleep(time);
}

/// Connects, but fails with `WouldBlock` if the accept queue is full. A blocking connect(2) would wait without
/// limit for a process that hangs.
pub(super) fn connect(path: &Path) -> io::Result<BlockingStream> {
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    socket.set_nonblocking(true)?;
    socket.connect(&SockAddr::unix(path)?)?;
    socket.set_nonblocking(false)?;
    Ok(OwnedFd::from(socket).into())
}

/// The process at the other end.
fn peer_pid(stream: &BlockingStream) -> Option<i32> {
    let peer = descriptor_passing::peer_credentials(stream.as_fd()).ok()?;
    visible_pid(peer.pid)
}

/// Why a request has no result.
#[derive(Debug)]
pub enum AskError {
    /// The process is not trusted or has not answered.
    NoAnswer(io::Error),
    /// It has answered, and the answer is not that of the protocol.
    Answered(io::Error),
    /// Not all of its sockets have arrived.
    Interrupted(io::Error),
}

/// Asks the process at the other end of `stream`.
///
/// # Errors
/// The process is not trusted, does not answer, or its answer is not that of the protocol.
pub fn ask(mut stream: BlockingStream, request: Request) -> Result<Found, AskError> {
    let pid = peer_pid(&stream);
    let line = exchange(&mut stream, request).map_err(AskError::NoAnswer)?;
    let Some(answer) = Answer::to_request(&line, request) else {
        return Err(AskError::Answered(io::Error::other(format!("unexpected answer: {line}"))));
    };
    if answer == Answer::Serving {
        return Ok(Found::Serving(pid));
    }
    let sockets = receive(&stream, answer.sockets()).map_err(AskError::Interrupted)?;
    let draining = matches!(answer, Answer::Draining(_));
    Ok(Found::Predecessor(
        Predecessor { stream, pid, draining, overlap: PidInLines::start() },
        sockets,
    ))
}

fn exchange(stream: &mut BlockingStream, request: Request) -> io::Result<String> {
    let user = descriptor_passing::peer_credentials(stream.as_fd())?.uid;
    if !protocol::is_trusted(user) {
        return Err(io::Error::other(format!("it runs as user {user}, which is not trusted")));
    }
    stream.set_read_timeout(Some(ANSWER_TIMEOUT))?;
    stream.set_write_timeout(Some(ANSWER_TIMEOUT))?;
    stream.write_all(format!("{}\n", request.as_str()).as_bytes())?;
    protocol::read_line_blocking(stream)
}

fn receive(stream: &BlockingStream, count: usize) -> io::Result<InheritedSockets> {
    let mut sockets = InheritedSockets::default();
    for _ in 0..count {
        let descriptor = descriptor_passing::receive(stream.as_fd())?;
        sockets.add(descriptor).map_err(io::Error::other)?;
    }
    Ok(sockets)
}

fn is_timeout(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut)
}

fn is_close(error: &io::Error) -> bool {
    use ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
    matches!(error.kind(), UnexpectedEof | ConnectionReset | BrokenPipe)
}

impl Predecessor {
    /// Its process id, unless it runs in another PID namespace.
    pub fn pid(&self) -> Option<i32> {
        self.pid
    }

    /// Whether it drains: it has closed the sockets of its listeners, and hands over the rest.
    pub fn is_draining(&self) -> bool {
        self.draining
    }

    /// [`Self::replace`]. If the old process has closed the connection before this one served, asks at `path` once more: it
    /// has given up waiting and continues to serve, or has ended.
    ///
    /// # Errors
    /// The old process has ended or does not answer.
    pub async fn replace_at(self, path: &Path) -> io::Result<bool> {
        let error = match self.replace().await {
            Err(error) if is_close(&error) => error,
            result => return result,
        };
        let path = path.to_owned();
        match spawn_blocking(move || request(&path, Request::TakeOver)).await? {
            // The sockets that it sends are those that this process has.
            Ok(Found::Predecessor(predecessor, _)) => predecessor.replace().await,
            _ => Err(error),
        }
    }

    /// Reports to the old process that this one serves its sockets, and waits until the old one has stopped
    /// accepting. Returns whether this process alone has the sockets then. Log lines have the field `pid` until the
    /// old process has ended, for at most [`MAX_OVERLAP`].
    ///
    /// # Errors
    /// The old process has ended or does not answer.
    pub async fn replace(self) -> io::Result<bool> {
        let Self { stream, pid, overlap, .. } = self;
        drop(tokio::spawn(show_pid_beside(pid, overlap)));
        stream.set_nonblocking(true)?;
        let mut stream = UnixStream::from_std(stream)?;
        stream.write_all(format!("{SERVING}\n").as_bytes()).await?;
        match timeout(REPLY_TIMEOUT, read_line(&mut stream)).await {
            Ok(Ok(line)) if line == LEFT => {
                let owner = timeout(REPLY_TIMEOUT, read_line(&mut stream)).await;
                Ok(owner.is_ok_and(|line| line.is_ok_and(|line| line == OWN)))
            }
            Ok(Ok(line)) => Err(io::Error::other(format!("unexpected answer: {line}"))),
            Ok(Err(error)) => Err(error),
            Err(_) => Err(ErrorKind::TimedOut.into()),
        }
    }
}

/// Keeps the field `pid` in log lines until the process `pid` has ended, for at most [`MAX_OVERLAP`].
pub async fn show_pid_beside(pid: Option<i32>, overlap: PidInLines) {
    let ended = async {
        match pid {
            Some(pid) => wait_until_ended(pid).await,
            // Its end cannot be seen.
            None => std::future::pending().await,
        }
    };
    let _ = timeout(MAX_OVERLAP, ended).await;
    drop(overlap);
}

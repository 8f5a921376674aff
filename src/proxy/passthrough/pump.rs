//! Moves the bytes of one flow both ways until both directions have ended, a side is broken, or
//! the flow is told to end.
//!
//! Nothing is held while nothing moves. Small messages are read into a buffer of the thread and
//! written out at once; what the other side does not take is kept, and no more is read until it
//! does. A direction that fills the buffer again and again is a transfer: then bytes go from socket
//! to socket inside the kernel ([`crate::net::sockets::splice`]) until the flow pauses.
//!
//! What a server said before it broke the flow was acknowledged to it by our kernel, so the client
//! is to have it: as without us, where its own kernel keeps it. A server that takes nothing more is
//! read to its end first, and the reset waits for [`Flow::delivered`].

use std::cell::RefCell;
use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::sleep;

use super::table::{Moved, Ticket};
use super::verdict::Verdict;
use crate::net::sockets::splice::SplicePipe;
use crate::net::sockets::tcp_info;
use crate::observe::PassthroughMetrics;
use crate::observe::passthrough::Direction;

/// Bytes read at once.
const BUFFER: usize = 64 * 1024;
/// Reads in a row before the other flows of the worker get their turn.
const TURNS: usize = 16;
/// Reads of at least half the buffer, in a row, that make a direction a transfer. Measured
/// (`cargo bench --bench splice`, Linux 6.18, CPU-milliseconds per MB, copied and spliced): messages
/// of 4 KiB 2.57 and 2.86, of 16 KiB 0.66 and 0.66, of 32 KiB 0.37 and 0.34, of 64 KiB 0.34 and
/// 0.28, of 256 KiB 0.26 and 0.13. So a pipe pays from half the buffer on, and a few such reads show
/// that more will come.
const TRANSFER: u8 = 4;
/// The pauses between two looks at what is still under way to a client, growing.
const FIRST_LOOK: Duration = Duration::from_millis(2);
const LAST_LOOK: Duration = Duration::from_millis(500);

thread_local! {
    static SCRATCH: RefCell<Box<[u8]>> = RefCell::new(vec![0; BUFFER].into_boxed_slice());
}

/// Which side of a flow broke it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The client's.
    Client,
    /// The apiserver's.
    Server,
}

/// How a flow ended that did not just end.
#[derive(Debug)]
pub enum Broken {
    /// A side failed.
    By(Side, io::Error),
    /// It was told to end.
    Told(Verdict),
}

/// One direction of a flow.
#[derive(Debug, Default)]
pub struct Lane {
    /// What was read and not yet taken.
    held: Box<[u8]>,
    /// How much of it was written.
    written: usize,
    /// While it is a transfer.
    pipe: Option<SplicePipe>,
    /// Large reads in a row.
    large: u8,
    /// Its end is no end that the sender meant, and is not passed on.
    cut: bool,
    state: State,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum State {
    #[default]
    Open,
    /// The end was read; it is passed on once nothing is held.
    Ending,
    /// The end was passed on.
    Ended,
    /// The side it leads to takes nothing more. Nothing is read for it.
    Refused(io::ErrorKind),
}

impl Lane {
    /// A lane that has these bytes to deliver first.
    pub fn with(first: Vec<u8>) -> Self {
        Self { held: first.into(), ..Self::default() }
    }
}

/// A flow between two sockets.
#[derive(Debug)]
pub struct Flow {
    /// The client's socket.
    pub client: TcpStream,
    /// The apiserver's.
    pub server: TcpStream,
    /// From the client to the server.
    pub up: Lane,
    /// From the server to the client.
    pub down: Lane,
}

impl Flow {
    /// Moves bytes until both lanes have ended.
    ///
    /// # Errors
    /// Which side broke, and how; or what it was told.
    pub async fn run(
        &mut self,
        ticket: &Ticket,
        metrics: &PassthroughMetrics,
    ) -> Result<(), Broken> {
        poll_fn(|cx| {
            if let Some(verdict) = ticket.verdict(cx) {
                return Poll::Ready(Err(Broken::Told(verdict)));
            }
            let Self { client, server, up: up_lane, down: down_lane } = self;
            let (mut sent, mut received) = (0, 0);
            let mut up = up_lane.step(cx, client, server, &mut sent).map_err(|(reading, error)| {
                Broken::By(if reading { Side::Client } else { Side::Server }, error)
            });
            if let Poll::Ready(Err(Broken::By(Side::Server, error))) = &up
                && let kind @ (io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe) =
                    error.kind()
            {
                up_lane.refuse(kind);
                // EPIPE: its end had come before (`tcp_reset`). Without one what it has said is cut
                // off, and must not look complete.
                down_lane.cut = kind == io::ErrorKind::ConnectionReset;
                up = Poll::Pending;
            }
            let mut down =
                down_lane.step(cx, server, client, &mut received).map_err(|(reading, error)| {
                    Broken::By(if reading { Side::Server } else { Side::Client }, error)
                });
            if let (State::Refused(kind), Poll::Ready(Ok(()))) = (up_lane.state, &down) {
                down = Poll::Ready(Err(Broken::By(Side::Server, kind.into())));
            }
            if sent > 0 {
                metrics.moved(Direction::ToServer, sent);
            }
            if received > 0 {
                metrics.moved(Direction::ToClient, received);
            }
            if sent + received > 0 {
                ticket.moved(Moved { up: sent > 0, down: received > 0 });
            }
            if down.is_ready() && up.is_pending() {
                ticket.ended();
            }
            match (up, down) {
                (Poll::Ready(Err(end)), _) | (_, Poll::Ready(Err(end))) => Poll::Ready(Err(end)),
                (Poll::Ready(Ok(())), Poll::Ready(Ok(()))) => Poll::Ready(Ok(())),
                _ => Poll::Pending,
            }
        })
        .await
    }
}

impl Flow {
    /// Waits until the client's kernel has all that was written to it, which a reset would take
    /// away. A client that does not read holds this up as it holds up a flow: until it is gone, or
    /// the flow is told to end.
    pub async fn delivered(&self, ticket: &Ticket) {
        let mut pause = FIRST_LOOK;
        let under_way = || {
            let client = tcp_info::read(&self.client);
            client.is_ok_and(|info| info.has_pending() && !info.closed)
        };
        while under_way() {
            tokio::select! {
                () = poll_fn(|cx| ticket.verdict(cx).map_or(Poll::Pending, |_| Poll::Ready(()))) => break,
                () = sleep(pause) => pause = (pause * 2).min(LAST_LOOK),
            }
        }
    }
}

/// The error of a step, and whether it came from reading.
type Failed = (bool, io::Error);

impl Lane {
    /// Moves what can be moved now; ready when the end was passed on.
    fn step(
        &mut self,
        cx: &mut Context<'_>,
        from: &mut TcpStream,
        to: &mut TcpStream,
        moved: &mut usize,
    ) -> Poll<Result<(), Failed>> {
        for _ in 0..TURNS {
            ready!(self.deliver(cx, to, moved)).map_err(|error| (false, error))?;
            match self.state {
                State::Open => {}
                State::Ending if self.cut => {
                    self.state = State::Ended;
                    return Poll::Ready(Ok(()));
                }
                State::Ending => {
                    // It fails when the other side is gone already, which its own lane tells.
                    let _ = ready!(Pin::new(&mut *to).poll_shutdown(cx));
                    self.state = State::Ended;
                    return Poll::Ready(Ok(()));
                }
                State::Ended => return Poll::Ready(Ok(())),
                State::Refused(_) => return Poll::Pending,
            }
            let taken = if self.pipe.is_some() {
                self.splice(cx, from).map_err(|error| (true, error))
            } else {
                self.copy(cx, from, to, moved)
            };
            if taken.is_pending() {
                // A pause: whoever moves bytes now may have the pipe.
                self.pipe = None;
                return Poll::Pending;
            }
            ready!(taken)?;
        }
        // Others have waited long enough.
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    /// Delivers nothing more.
    fn refuse(&mut self, kind: io::ErrorKind) {
        (self.held, self.written, self.pipe) = (Box::default(), 0, None);
        self.state = State::Refused(kind);
    }

    /// Writes what is held.
    fn deliver(
        &mut self,
        cx: &mut Context<'_>,
        to: &mut TcpStream,
        moved: &mut usize,
    ) -> Poll<io::Result<()>> {
        while self.written < self.held.len() {
            let n = ready!(Pin::new(&mut *to).poll_write(cx, &self.held[self.written..]))?;
            *moved += n;
            self.written += n;
        }
        if !self.held.is_empty() {
            self.held = Box::default();
            self.written = 0;
        }
        while let Some(pipe) = self.pipe.as_mut().filter(|pipe| pipe.buffered() > 0) {
            ready!(to.poll_write_ready(cx))?;
            match to.try_io(Interest::WRITABLE, || pipe.drain(to)) {
                Ok(n) => *moved += n,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
        Poll::Ready(Ok(()))
    }

    /// Takes what there is into the pipe.
    fn splice(&mut self, cx: &mut Context<'_>, from: &TcpStream) -> Poll<io::Result<()>> {
        let Some(pipe) = &mut self.pipe else { return Poll::Ready(Ok(())) };
        loop {
            ready!(from.poll_read_ready(cx))?;
            match from.try_io(Interest::READABLE, || pipe.fill(from)) {
                Ok(0) => self.state = State::Ending,
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
                Err(error) => return Poll::Ready(Err(error)),
            }
            return Poll::Ready(Ok(()));
        }
    }

    /// Takes what fits into the thread's buffer and writes it out at once.
    fn copy(
        &mut self,
        cx: &mut Context<'_>,
        from: &mut TcpStream,
        to: &mut TcpStream,
        moved: &mut usize,
    ) -> Poll<Result<(), Failed>> {
        SCRATCH.with_borrow_mut(|scratch| {
            let mut buf = ReadBuf::new(scratch);
            ready!(Pin::new(from).poll_read(cx, &mut buf)).map_err(|error| (true, error))?;
            let mut read = buf.filled();
            if read.is_empty() {
                self.state = State::Ending;
            }
            self.large = if read.len() >= BUFFER / 2 { self.large.saturating_add(1) } else { 0 };
            while !read.is_empty() {
                match Pin::new(&mut *to).poll_write(cx, read) {
                    Poll::Ready(written) => {
                        let n = written.map_err(|error| (false, error))?;
                        *moved += n;
                        read = &read[n..];
                    }
                    Poll::Pending => {
                        self.held = read.into();
                        break;
                    }
                }
            }
            if self.large >= TRANSFER {
                // Without one (no descriptors) it goes on as it is.
                self.pipe = SplicePipe::acquire().ok();
                self.large = 0;
            }
            Poll::Ready(Ok(()))
        })
    }
}

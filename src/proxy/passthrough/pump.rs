//! Moves the bytes of one flow both ways until both directions have ended or a side is broken.
//!
//! Nothing is held while nothing moves: bytes are read into a buffer of the thread and written out
//! at once; only what the other side does not take is kept, and no more is read until it does.

use std::cell::RefCell;
use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

use crate::observe::PassthroughMetrics;
use crate::observe::passthrough::Direction;

/// Bytes read at once.
const BUFFER: usize = 64 * 1024;
/// Reads in a row before the other flows of the worker get their turn.
const TURNS: usize = 16;

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

/// One direction of a flow.
#[derive(Debug, Default)]
pub struct Lane {
    /// What was read and not yet taken.
    held: Vec<u8>,
    /// How much of it was written.
    written: usize,
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
}

impl Lane {
    /// A lane that has these bytes to deliver first.
    pub fn with(first: Vec<u8>) -> Self {
        Self { held: first, ..Self::default() }
    }
}

/// Moves bytes until both lanes have ended.
///
/// # Errors
/// Which side broke, and how.
pub async fn run(
    client: &mut TcpStream,
    server: &mut TcpStream,
    up: &mut Lane,
    down: &mut Lane,
    metrics: &PassthroughMetrics,
) -> Result<(), (Side, io::Error)> {
    poll_fn(|cx| {
        let up = step(cx, up, client, server, metrics, Direction::ToServer);
        let down = step(cx, down, server, client, metrics, Direction::ToClient);
        match (up, down) {
            (Poll::Ready(Err(error)), _) | (_, Poll::Ready(Err(error))) => Poll::Ready(Err(error)),
            (Poll::Ready(Ok(())), Poll::Ready(Ok(()))) => Poll::Ready(Ok(())),
            _ => Poll::Pending,
        }
    })
    .await
}

/// Moves what can be moved now in one direction; ready when its end was passed on.
fn step(
    cx: &mut Context<'_>,
    lane: &mut Lane,
    from: &mut TcpStream,
    to: &mut TcpStream,
    metrics: &PassthroughMetrics,
    direction: Direction,
) -> Poll<Result<(), (Side, io::Error)>> {
    let (reading, writing) = match direction {
        Direction::ToServer => (Side::Client, Side::Server),
        Direction::ToClient => (Side::Server, Side::Client),
    };
    for _ in 0..TURNS {
        while lane.written < lane.held.len() {
            let rest = &lane.held[lane.written..];
            let n = ready!(Pin::new(&mut *to).poll_write(cx, rest)).map_err(|e| (writing, e))?;
            metrics.moved(direction, n);
            lane.written += n;
        }
        if !lane.held.is_empty() {
            // Given back: an idle flow holds nothing.
            lane.held = Vec::new();
            lane.written = 0;
        }
        match lane.state {
            State::Ended => return Poll::Ready(Ok(())),
            State::Ending => {
                let end = Pin::new(&mut *to).poll_shutdown(cx);
                // It fails when the other side is gone already, which its own lane tells.
                let _ = ready!(end);
                lane.state = State::Ended;
                return Poll::Ready(Ok(()));
            }
            State::Open => {}
        }
        ready!(SCRATCH.with_borrow_mut(|scratch| {
            let mut buf = ReadBuf::new(scratch);
            ready!(Pin::new(&mut *from).poll_read(cx, &mut buf)).map_err(|e| (reading, e))?;
            let mut read = buf.filled();
            if read.is_empty() {
                lane.state = State::Ending;
            }
            while !read.is_empty() {
                match Pin::new(&mut *to).poll_write(cx, read) {
                    Poll::Ready(n) => {
                        let n = n.map_err(|e| (writing, e))?;
                        metrics.moved(direction, n);
                        read = &read[n..];
                    }
                    Poll::Pending => {
                        lane.held = read.to_vec();
                        break;
                    }
                }
            }
            Poll::Ready(Ok(()))
        }))?;
    }
    cx.waker().wake_by_ref();
    Poll::Pending
}

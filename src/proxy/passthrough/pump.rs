//! Copies the bytes of one flow in both directions until both have ended, a side has failed, or the flow table
//! has ended the flow.
//!
//! An idle flow holds no buffer. Bytes are read into a buffer of the thread and written at once. Bytes that
//! the receiver does not accept are stored, and the pump reads no more until they are written. A direction
//! that repeatedly fills the buffer is a bulk transfer: its bytes move from socket to socket inside the
//! kernel ([`jackstay_sys::sockets::splice`]) until the flow pauses.
//!
//! Bytes that the endpoint has sent before it resets the flow are still delivered to the client, because this
//! host's kernel has acknowledged them. So the pump reads an endpoint that accepts no more bytes to its end
//! before it reports the failure, and the client is reset only after [`Pump::wait_delivered`].

use std::cell::RefCell;
use std::future::poll_fn;
use std::io::{self, Cursor};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Buf;
use jackstay_core::backoff::Backoff;
use jackstay_sys::clock;
use jackstay_sys::sockets::splice::SplicePipe;
use jackstay_sys::sockets::{tcp_info, tcp_options};
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::sleep;

use super::super::admission::connection_slots::ConnectionSlot;
use super::super::admission::flow_memory::FlowMemory;
use super::super::admission::socket_memory::{Peer, SocketMemory};
use super::super::lingering::DELIVERY_LIMIT;
use super::flow_entry::{EVICTED, EndReason, MEMORY, Progress};
use super::flow_table::FlowHandle;
use crate::observe::PassthroughMetrics;
use crate::observe::passthrough_metrics::Direction;

/// Maximum length of one read.
const BUFFER: usize = 64 * 1024;
/// Maximum length of one read when memory is short.
const SMALL_BUFFER: usize = 4 * 1024;
/// Consecutive reads before the task yields to the other flows of the worker.
const READS_PER_POLL: usize = 16;
/// Consecutive reads of at least half the buffer that make a direction a bulk transfer. Measured
/// (`cargo bench --bench splice`, Linux 6.18, CPU-milliseconds per MB, copied and spliced): messages
/// of 4 KiB 2.57 and 2.86, of 16 KiB 0.66 and 0.66, of 32 KiB 0.37 and 0.34, of 64 KiB 0.34 and
/// 0.28, of 256 KiB 0.26 and 0.13. So splicing is cheaper from half the buffer on, and a few such
/// reads indicate that more will follow.
const BULK_READS: u8 = 4;
/// First pause between two checks of the bytes that a client has not acknowledged. The pause doubles.
const FIRST_DELIVERY_CHECK: Duration = Duration::from_millis(2);
/// Maximum pause between two such checks.
const MAX_DELIVERY_CHECK: Duration = Duration::from_millis(500);

thread_local! {
    static SCRATCH: RefCell<Box<[u8]>> = RefCell::new(vec![0; BUFFER].into_boxed_slice());
}

/// Why a flow ended abnormally.
#[derive(Debug)]
pub enum FlowError {
    /// A socket failed.
    Failed(Peer, io::Error),
    /// The flow table ended the flow.
    Ended(EndReason),
}

/// One direction of a flow.
#[derive(Debug)]
struct HalfFlow {
    sender: Peer,
    /// Bytes that were read; the position is the first byte that was not written.
    pending: Cursor<Box<[u8]>>,
    /// Present during a bulk transfer.
    pipe: Option<SplicePipe>,
    /// Consecutive reads of at least half the buffer.
    large_reads: u8,
    /// At most so many bytes are read, and written, at once.
    longest_write: usize,
    /// Whether the sender reset the connection without an end of stream, so that none must be passed on.
    truncated: bool,
    state: HalfState,
}

#[derive(Debug, Clone, Copy)]
enum HalfState {
    Open,
    /// The end of stream was read. It is passed on when all bytes are written.
    Ending,
    /// The end of stream was passed on.
    Ended,
    /// The receiver accepts no more bytes, so the pump reads none.
    Refused(io::ErrorKind),
}

/// A flow between two sockets.
#[derive(Debug)]
pub struct Pump {
    client: TcpStream,
    endpoint: TcpStream,
    to_endpoint: HalfFlow,
    to_client: HalfFlow,
}

impl Pump {
    /// Creates the pump of a flow. `prefix` was read from the client already.
    pub fn new(client: TcpStream, endpoint: TcpStream, prefix: Vec<u8>) -> Self {
        let half = |sender, pending: Vec<u8>| HalfFlow {
            sender,
            pending: Cursor::new(pending.into()),
            pipe: None,
            large_reads: 0,
            longest_write: BUFFER,
            truncated: false,
            state: HalfState::Open,
        };
        let (to_endpoint, to_client) = (half(Peer::Client, prefix), half(Peer::Endpoint, vec![]));
        Self { client, endpoint, to_endpoint, to_client }
    }

    /// Copies bytes until both directions have ended. The connection's slot is in use once the client has sent bytes.
    ///
    /// # Errors
    /// A side has failed, or the flow table has ended the flow.
    pub async fn run(
        &mut self,
        handle: &FlowHandle,
        metrics: &PassthroughMetrics,
        (slot, memory): (&ConnectionSlot, &FlowMemory),
    ) -> Result<(), FlowError> {
        poll_fn(|cx| {
            if let Some(reason) = handle.poll_end(cx) {
                return Poll::Ready(Err(FlowError::Ended(reason)));
            }
            if slot.poll_evicted(cx).is_ready() {
                return Poll::Ready(Err(FlowError::Ended(EVICTED)));
            }
            if memory.sockets().is_shed() {
                return Poll::Ready(Err(FlowError::Ended(MEMORY)));
            }
            let Self { client, endpoint, to_endpoint, to_client } = self;
            let mut progress = Progress::default();
            let mut up =
                to_endpoint.poll(cx, (client, endpoint), &mut progress.to_endpoint, memory);
            if let Poll::Ready(Err(FlowError::Failed(Peer::Endpoint, error))) = &up
                && let kind @ (io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe) =
                    error.kind()
            {
                to_endpoint.refuse(kind);
                // EPIPE means that the endpoint had ended its direction before the reset (`tcp_reset`).
                // Otherwise that direction is truncated, and the client must not receive an end of stream.
                to_client.truncated = kind == io::ErrorKind::ConnectionReset;
                up = Poll::Pending;
            }
            let mut down = to_client.poll(cx, (endpoint, client), &mut progress.to_client, memory);
            memory.set_held(to_endpoint.held() + to_client.held());
            to_endpoint.record(memory.sockets(), progress.to_endpoint, cx);
            to_client.record(memory.sockets(), progress.to_client, cx);
            if let (HalfState::Refused(kind), Poll::Ready(Ok(()))) = (to_endpoint.state, &down) {
                down = Poll::Ready(Err(FlowError::Failed(Peer::Endpoint, kind.into())));
            }
            if progress.to_endpoint > 0 {
                slot.set_in_use();
                metrics.moved(Direction::ToServer, progress.to_endpoint);
            }
            if progress.to_client > 0 {
                metrics.moved(Direction::ToClient, progress.to_client);
            }
            if progress.to_endpoint + progress.to_client > 0 {
                to_endpoint.longest_write = longest_write(handle.record(progress));
            }
            if down.is_ready() && up.is_pending() {
                handle.record_endpoint_end();
            }
            match (up, down) {
                (Poll::Ready(Err(end)), _) | (_, Poll::Ready(Err(end))) => Poll::Ready(Err(end)),
                (Poll::Ready(Ok(())), Poll::Ready(Ok(()))) => Poll::Ready(Ok(())),
                _ => Poll::Pending,
            }
        })
        .await
    }

    /// Whether the client has not ended its direction.
    pub fn is_client_open(&self) -> bool {
        !matches!(self.to_endpoint.state, HalfState::Ending | HalfState::Ended)
    }

    /// Waits until the client's kernel has acknowledged all bytes, because a reset would discard the others. The client
    /// decides how long that takes, so the wait ends after [`DELIVERY_LIMIT`] and when memory is short. It also ends when
    /// the client has closed its connection or the flow table ends the flow.
    pub async fn wait_delivered(&self, handle: &FlowHandle, memory: &FlowMemory) {
        let end = clock::now() + DELIVERY_LIMIT;
        let mut pauses = Backoff::new(FIRST_DELIVERY_CHECK, MAX_DELIVERY_CHECK);
        let is_pending = || {
            let client = tcp_info::read(&self.client);
            client.is_ok_and(|info| info.has_pending() && !info.closed)
        };
        let may_wait = || clock::now() < end && !memory.is_short() && !memory.sockets().is_shed();
        while is_pending() && may_wait() {
            tokio::select! {
                () = poll_fn(|cx| handle.poll_end(cx).map_or(Poll::Pending, |_| Poll::Ready(()))) => break,
                () = sleep(pauses.failed()) => {}
            }
        }
    }

    /// Closes both sockets with a reset.
    pub fn reset(self) {
        tcp_options::close_with_reset(self.client);
        tcp_options::close_with_reset(self.endpoint);
    }
}

/// The most bytes to write at once while the bytes in flight are bounded. The kernel makes one buffer of each write, of up
/// to 64 KiB, and accepts it as long as the send queue is not full.
fn longest_write(bound: Option<u32>) -> usize {
    bound.map_or(BUFFER, |bound| (bound as usize / 4).clamp(SMALL_BUFFER, BUFFER))
}

impl HalfFlow {
    /// Copies the bytes that can be copied now. Ready when the end of stream was passed on.
    fn poll(
        &mut self,
        cx: &mut Context<'_>,
        (from, to): (&mut TcpStream, &mut TcpStream),
        moved: &mut usize,
        memory: &FlowMemory,
    ) -> Poll<Result<(), FlowError>> {
        for _ in 0..READS_PER_POLL {
            ready!(self.deliver(cx, to, moved)).map_err(|error| self.write_error(error))?;
            match self.state {
                HalfState::Open => {}
                HalfState::Ending => {
                    if !self.truncated {
                        // An error means that the receiver is gone, which the other direction reports.
                        let _ = ready!(Pin::new(&mut *to).poll_shutdown(cx));
                    }
                    self.state = HalfState::Ended;
                    return Poll::Ready(Ok(()));
                }
                HalfState::Ended => return Poll::Ready(Ok(())),
                HalfState::Refused(_) => return Poll::Pending,
            }
            if self.longest_write < BUFFER {
                self.pipe = None;
            }
            let read = if self.pipe.is_some() {
                self.splice(cx, from).map_err(|error| FlowError::Failed(self.sender, error))
            } else {
                self.copy(cx, (from, to), moved, memory)
            };
            if read.is_pending() {
                // The transfer pauses: another flow may use the pipe.
                self.pipe = None;
                return Poll::Pending;
            }
            ready!(read)?;
        }
        // Lets the other flows of the worker run.
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    fn write_error(&self, error: io::Error) -> FlowError {
        FlowError::Failed(self.receiver(), error)
    }

    fn receiver(&self) -> Peer {
        match self.sender {
            Peer::Client => Peer::Endpoint,
            Peer::Endpoint => Peer::Client,
        }
    }

    /// Records that so many bytes were written, and whether the receiver accepts no more: then the sender's bytes are
    /// not read.
    fn record(&self, sockets: &SocketMemory, written: usize, cx: &Context<'_>) {
        let is_refused = matches!(self.state, HalfState::Refused(_));
        let is_blocked = self.held() > 0;
        sockets.record_read(self.sender, is_blocked || is_refused);
        sockets.record_write(self.receiver(), written, is_blocked, cx.waker());
    }

    /// Bytes that were read and not written.
    fn held(&self) -> usize {
        self.pending.get_ref().len() + self.pipe.as_ref().map_or(0, SplicePipe::buffered)
    }

    /// Drops all pending bytes and stops this direction.
    fn refuse(&mut self, kind: io::ErrorKind) {
        (self.pending, self.pipe) = (Cursor::default(), None);
        self.state = HalfState::Refused(kind);
    }

    /// Writes the pending bytes.
    fn deliver(
        &mut self,
        cx: &mut Context<'_>,
        to: &mut TcpStream,
        moved: &mut usize,
    ) -> Poll<io::Result<()>> {
        while self.pending.has_remaining() {
            let n = ready!(Pin::new(&mut *to).poll_write(cx, self.pending.chunk()))?;
            *moved += n;
            self.pending.advance(n);
        }
        self.pending = Cursor::default();
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

    /// Reads into the pipe.
    fn splice(&mut self, cx: &mut Context<'_>, from: &TcpStream) -> Poll<io::Result<()>> {
        let Some(pipe) = &mut self.pipe else { return Poll::Ready(Ok(())) };
        loop {
            ready!(from.poll_read_ready(cx))?;
            match from.try_io(Interest::READABLE, || pipe.fill(from)) {
                Ok(0) => self.state = HalfState::Ending,
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
                Err(error) => return Poll::Ready(Err(error)),
            }
            return Poll::Ready(Ok(()));
        }
    }

    /// Reads into the thread's buffer and writes the bytes at once.
    fn copy(
        &mut self,
        cx: &mut Context<'_>,
        (from, to): (&mut TcpStream, &mut TcpStream),
        moved: &mut usize,
        memory: &FlowMemory,
    ) -> Poll<Result<(), FlowError>> {
        SCRATCH.with_borrow_mut(|scratch| {
            let is_short = memory.is_short();
            let length = if is_short { SMALL_BUFFER } else { self.longest_write };
            let mut buf = ReadBuf::new(&mut scratch[..length]);
            ready!(Pin::new(from).poll_read(cx, &mut buf))
                .map_err(|error| FlowError::Failed(self.sender, error))?;
            let mut read = buf.filled();
            if read.is_empty() {
                self.state = HalfState::Ending;
            }
            self.large_reads =
                if read.len() >= BUFFER / 2 { self.large_reads.saturating_add(1) } else { 0 };
            while !read.is_empty() {
                match Pin::new(&mut *to).poll_write(cx, read) {
                    Poll::Ready(written) => {
                        let n = written.map_err(|error| self.write_error(error))?;
                        *moved += n;
                        read = &read[n..];
                    }
                    Poll::Pending => {
                        self.pending = Cursor::new(read.into());
                        break;
                    }
                }
            }
            if self.large_reads >= BULK_READS && !is_short {
                // If no pipe can be opened (no descriptors left), the bytes are copied as before.
                self.pipe = SplicePipe::acquire().ok();
                self.large_reads = 0;
            }
            Poll::Ready(Ok(()))
        })
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net;
    use std::rc::Rc;
    use std::sync::Arc;

    use jackstay_core::admission::{MemoryBudget, MemoryKind};

    use tokio::task::LocalSet;
    use tokio::time::timeout;

    use super::super::super::admission::connection_slots::ConnectionSlots;
    use super::super::flow_table::tests::Setup;
    use super::*;
    use jackstay_sys::sockets::source::Source;
    use jackstay_sys::sockets::stream::SocketRef;

    /// A connection, and its peer.
    fn connection() -> (net::TcpStream, net::TcpStream) {
        let listener = net::TcpListener::bind("127.0.0.1:0").unwrap();
        let peer = net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (stream, _) = listener.accept().unwrap();
        stream.set_nonblocking(true).unwrap();
        (stream, peer)
    }

    /// A connection whose peer has not read what it was sent, and the peer.
    fn unread_connection() -> (net::TcpStream, net::TcpStream) {
        let (mut stream, peer) = connection();
        while stream.write(&[0; 16 << 10]).is_ok() {}
        (stream, peer)
    }

    /// The client answers the kernel's probes, and never reads.
    #[tokio::test(start_paused = true)]
    async fn wait_delivered_ends_after_its_limit_and_when_memory_is_short() {
        const MEMORY: usize = 64 << 20;
        let setup = Setup::new();
        let source = MemoryBudget::new(MEMORY).source(1);
        for (used, limit) in [(0, DELIVERY_LIMIT), (MEMORY, Duration::ZERO)] {
            let ((client, _peer), (endpoint, _server)) = (unread_connection(), unread_connection());
            let memory = FlowMemory::new(Arc::clone(&source), SocketRef::of(&client)).unwrap();
            let streams = [client, endpoint].map(|stream| TcpStream::from_std(stream).unwrap());
            let [client, endpoint] = streams;
            let (flow, pump) = (setup.insert(), Pump::new(client, endpoint, Vec::new()));
            source.add(MemoryKind::Flows, used);
            let begun = clock::now();
            let delivered = pump.wait_delivered(&flow, &memory);
            timeout(10 * DELIVERY_LIMIT, delivered).await.expect("the wait ends");
            let took = clock::elapsed(begun);
            source.subtract(MemoryKind::Flows, used);
            let latest = limit + 2 * MAX_DELIVERY_CHECK;
            assert!((limit..latest).contains(&took), "{used} used: {took:?}");
        }
    }

    #[test]
    fn writes_are_a_quarter_of_the_bound() {
        let expected = [(None, 65_536), (Some(192 << 10), 49_152), (Some(32 << 10), 8_192)];
        for (bound, expected) in [expected.as_slice(), &[(Some(8 << 10), 4_096)]].concat() {
            assert_eq!(longest_write(bound), expected, "{bound:?}");
        }
    }

    /// A flow begins with a bound, which the first look at its endpoint's socket sets.
    #[tokio::test(start_paused = true)]
    async fn bytes_in_flight_of_a_bounded_flow_are_written_piece_by_piece() {
        let (setup, slots) = (Setup::new(), Rc::<ConnectionSlots>::default());
        let source = MemoryBudget::new(64 << 20).source(1);
        let ((client, mut sender), (endpoint, mut server)) = (connection(), connection());
        let memory = FlowMemory::new(source, SocketRef::of(&client)).unwrap();
        let streams = [client, endpoint].map(|stream| TcpStream::from_std(stream).unwrap());
        let [client, endpoint] = streams;
        let mut pump = Pump::new(client, endpoint, Vec::new());
        let slot = slots.admit_proven(Source::User(1), clock::now());
        let run = async {
            let (flow, metrics) = (setup.insert(), setup.metrics());
            setup.check_flows();
            pump.run(&flow, &metrics, (&slot, &memory)).await.unwrap();
        };
        let transfer = std::thread::spawn(move || {
            sender.write_all(&vec![1; 1 << 20]).unwrap();
            sender.shutdown(net::Shutdown::Write).unwrap();
            assert_eq!(server.read_to_end(&mut Vec::new()).unwrap(), 1 << 20);
        });
        LocalSet::new().run_until(run).await;
        transfer.join().unwrap();
        assert_eq!(pump.to_endpoint.longest_write, 8_192);
    }
}

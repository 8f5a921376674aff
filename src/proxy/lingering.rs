//! Closed connections that wait for their clients.
//!
//! Linux sends RST when a socket with unread bytes is closed. A client that receives RST may discard data that
//! it has not read yet: it then sees `connection reset by peer` instead of GOAWAY, and must not retry a write.
//! So FIN is sent first, and data that arrive are discarded until the client closes too, for at most one second
//! (RFC 9112 section 9.6 recommends the same for HTTP/1.1).
//!
//! The kernel holds bytes that the client has not acknowledged after the socket is closed, too, for about a minute.
//! So the socket stays open and charged until they are acknowledged, at most [`DELIVERY_LIMIT`] and only while memory is
//! not short, and is reset then. A connection that ends while the client accepts no bytes is reset at once.
//!
//! A client decides how long its connection waits, and the slot of the connection is free then. Therefore
//!
//! * a connection to which nothing was sent has nothing to lose, and does not wait,
//! * at most [`MAX_LINGERING`] connections of the process wait, and no more than an eighth of the descriptors. Beyond
//!   that, the source with the most on this thread loses its oldest, which is reset.

use std::cell::RefCell;
use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use jackstay_core::admission::{Level, Places, Refusal};
use jackstay_sys::clock;
use jackstay_sys::process::resource_limits;
use jackstay_sys::sockets::stream::TcpStream;
use tokio::io::{AsyncRead, ReadBuf};
use tokio::sync::Notify;
use tokio::task::spawn_local;
use tokio::time::{sleep, timeout};

use super::admission::socket_memory::{Peer, SocketMemory};

/// How long to wait for the client to close.
const LIMIT: Duration = Duration::from_secs(1);
/// How long to wait for a client to acknowledge the last bytes, also at the end of a flow.
pub const DELIVERY_LIMIT: Duration = Duration::from_secs(30);
/// Interval of the checks whether it has.
const DELIVERY_CHECK: Duration = Duration::from_millis(500);
/// Closed connections of the process that wait for their clients. A drain closes all connections of a listener at once,
/// and a client on this node closes within a few milliseconds.
pub const MAX_LINGERING: usize = 1_024;
/// The part of the descriptors that they may have.
const DESCRIPTORS_DIVISOR: usize = 8;

/// Those of all threads.
static OF_PROCESS: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// Those of the worker that runs on this thread.
    static OF_WORKER: RefCell<LingeringConnections> = RefCell::default();
}

/// The connections of one worker that wait, while another worker runs on its thread.
#[derive(Default)]
pub struct LingeringConnections {
    /// By source, each with what resets it.
    places: Places<u128, Rc<Notify>>,
    /// Each connection that waits for its client to close has a clone.
    until_closed: Rc<()>,
}

impl LingeringConnections {
    /// Exchanges these and those of this thread.
    pub fn swap(&mut self) {
        OF_WORKER.with_borrow_mut(|current| std::mem::swap(current, self));
    }
}

/// How many connections of this worker wait for their clients to close.
pub fn lingering_connections() -> usize {
    OF_WORKER.with_borrow(|current| Rc::strong_count(&current.until_closed)) - 1
}

/// How many connections wait, and how many may.
#[derive(Clone, Copy)]
struct Limit {
    lingering: &'static AtomicUsize,
    max: usize,
}

impl Limit {
    fn of_process() -> Self {
        let of_descriptors = resource_limits::for_connections() / DESCRIPTORS_DIVISOR;
        Self { lingering: &OF_PROCESS, max: MAX_LINGERING.min(of_descriptors) }
    }
}

/// Closes a client's connection so that the client still receives the last bytes. Must be called within a `LocalSet`.
pub fn close(stream: TcpStream, memory: SocketMemory) {
    close_within(Limit::of_process(), stream, memory);
}

fn close_within(limit: Limit, stream: TcpStream, memory: SocketMemory) {
    if memory.is_client_blocked() {
        drop(memory);
        return stream.close_with_reset();
    }
    // `shutdown` fails if the client has reset the connection.
    if nothing_was_sent(&stream) || stream.shutdown_write().is_err() || is_at_end(&stream) {
        return;
    }
    let place = Place::take(limit, &memory);
    let until_closed = OF_WORKER.with_borrow(|current| Rc::clone(&current.until_closed));
    spawn_local(linger(stream, memory, place, until_closed));
}

/// A place among the connections that wait, until this is dropped.
struct Place {
    lingering: &'static AtomicUsize,
    source: u128,
    id: u64,
    displaced: Rc<Notify>,
}

impl Place {
    fn take(limit: Limit, memory: &SocketMemory) -> Self {
        let Limit { lingering, max } = limit;
        let source = memory.source();
        let is_full = lingering.fetch_add(1, Relaxed) >= max;
        // If all others are on other threads, this one is displaced.
        let displaced = Rc::<Notify>::default();
        let item = Rc::clone(&displaced);
        let (id, other) =
            OF_WORKER.with_borrow_mut(|current| current.places.take(source.key(), item, is_full));
        if is_full {
            source.budget().count(Refusal::Lingering);
        }
        if let Some(other) = other {
            other.notify_one();
        }
        Self { lingering, source: source.key(), id, displaced }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.lingering.fetch_sub(1, Relaxed);
        // The places may be destroyed already while the thread ends.
        let _ = OF_WORKER
            .try_with(|current| current.borrow_mut().places.give_back(self.source, self.id));
    }
}

/// Waits until the client has closed, or has acknowledged all bytes, or the place is needed.
async fn linger(mut stream: TcpStream, memory: SocketMemory, place: Place, until_closed: Rc<()>) {
    let is_delivered = tokio::select! {
        biased;
        () = place.displaced.notified() => false,
        is_delivered = until_delivered(&mut stream, &memory, until_closed) => is_delivered,
    };
    drop(memory);
    if !is_delivered {
        stream.close_with_reset();
    }
}

/// Returns whether the last bytes have arrived; if not, the connection must be reset.
async fn until_delivered(
    stream: &mut TcpStream,
    memory: &SocketMemory,
    until_closed: Rc<()>,
) -> bool {
    let end = clock::now() + DELIVERY_LIMIT;
    let is_closed = timeout(LIMIT, poll_fn(|cx| poll_closed(stream, cx))).await.is_ok();
    drop(until_closed);
    memory.record_read(Peer::Client, false);
    if is_closed {
        return true;
    }
    while stream.tcp_info().is_ok_and(|info| info.has_pending() && !info.closed) {
        if clock::now() >= end || memory.level() >= Level::High {
            return false;
        }
        sleep(DELIVERY_CHECK).await;
    }
    true
}

/// Discards what arrives, until the client closes. The buffer is no part of the task, because many connections wait.
fn poll_closed(stream: &mut TcpStream, cx: &mut Context<'_>) -> Poll<()> {
    let mut discarded = [0; 4096];
    loop {
        let mut buffer = ReadBuf::new(&mut discarded);
        let result = ready!(Pin::new(&mut *stream).poll_read(cx, &mut buffer));
        if result.is_err() || buffer.filled().is_empty() {
            return Poll::Ready(());
        }
    }
}

/// Whether the client can have received nothing but the acknowledgements of what it has sent.
fn nothing_was_sent(stream: &TcpStream) -> bool {
    stream.tcp_info().is_ok_and(|info| info.data_segments_sent == 0 && !info.has_pending())
}

/// Whether the client has closed or the connection has failed.
fn is_at_end(stream: &TcpStream) -> bool {
    match stream.try_read(&mut [0; 4096]) {
        Ok(n) => n == 0,
        Err(error) => error.kind() != io::ErrorKind::WouldBlock,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::super::client_socket::ClientSocket;
    use super::*;
    use jackstay_core::admission::{MemoryBudget, Shed};
    use jackstay_sys::sockets::tcp_options::MAX_UNSENT;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::{TcpListener, TcpStream as Client};
    use tokio::task::{LocalSet, yield_now};

    /// A client, and the accepted connection.
    async fn connect() -> (Client, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = Client::connect(listener.local_addr().unwrap()).await.unwrap();
        (client, listener.accept().await.unwrap().0.into())
    }

    #[tokio::test]
    async fn drop_with_unread_bytes_delivers_the_last_data() {
        LocalSet::new()
            .run_until(async {
                let (mut client, accepted) = connect().await;
                let budget = MemoryBudget::new(1 << 20);
                let mut ours = ClientSocket::new(accepted, budget.source(1));
                // These bytes are unread at the close, which would therefore send RST.
                client.write_all(&[1; 1000]).await.unwrap();
                ours.write_all(b"GOAWAY").await.unwrap();
                drop(ours);
                assert_eq!(lingering_connections(), 1);
                client.write_all(&[1; 1000]).await.unwrap();
                let mut received = Vec::new();
                client.read_to_end(&mut received).await.unwrap();
                assert_eq!(received, b"GOAWAY");
                drop(client);
                while lingering_connections() > 0 {
                    yield_now().await;
                }
            })
            .await;
    }

    #[tokio::test]
    async fn drop_while_the_client_accepts_no_bytes_resets_the_connection() {
        LocalSet::new()
            .run_until(async {
                let (mut client, accepted) = connect().await;
                let budget = MemoryBudget::new(1 << 20);
                let mut ours = ClientSocket::new(accepted, budget.source(1));
                let blocked = timeout(Duration::from_millis(50), async {
                    loop {
                        ours.write_all(&[1; 16 << 10]).await.unwrap();
                    }
                });
                assert!(blocked.await.is_err());
                drop(ours);
                assert_eq!(lingering_connections(), 0);
                let error = client.read_to_end(&mut Vec::new()).await.unwrap_err();
                assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
                assert_eq!(budget.used(), 0);
            })
            .await;
    }

    #[tokio::test]
    async fn drop_of_a_connection_to_which_nothing_was_sent_does_not_wait_for_its_client() {
        LocalSet::new()
            .run_until(async {
                for hello in [&b""[..], b"half a ClientHello"] {
                    let (mut client, accepted) = connect().await;
                    client.write_all(hello).await.unwrap();
                    let budget = MemoryBudget::new(1 << 20);
                    drop(ClientSocket::new(accepted, budget.source(1)));
                    assert_eq!(lingering_connections(), 0);
                    let closed = client.read_to_end(&mut Vec::new()).await;
                    let reset = closed.map_err(|error| error.kind());
                    let is_unread = !hello.is_empty();
                    let expected =
                        if is_unread { Err(io::ErrorKind::ConnectionReset) } else { Ok(0) };
                    assert_eq!(reset, expected);
                }
            })
            .await;
    }

    /// Closes a connection of this source that has received three bytes, of which the client has read nothing.
    async fn close_after_three_bytes(
        limit: Limit,
        budget: &Arc<MemoryBudget>,
        source: u128,
    ) -> Client {
        let (client, mut accepted) = connect().await;
        accepted.write_all(b"end").await.unwrap();
        let source = budget.source(source);
        let memory = SocketMemory::new(accepted.socket(), source, MAX_UNSENT);
        close_within(limit, accepted, memory);
        client
    }

    /// Whether the connection was reset. If it waits, what the client sends is discarded.
    async fn is_reset(client: &mut Client) -> bool {
        let mut received = Vec::new();
        client.read_to_end(&mut received).await.unwrap();
        assert_eq!(received, b"end", "what was sent before the end arrives in any case");
        client.write_all(b"x").await.is_err()
    }

    #[tokio::test]
    async fn close_beyond_the_limit_resets_the_oldest_of_the_source_with_the_most() {
        static LINGERING: AtomicUsize = AtomicUsize::new(0);
        LocalSet::new()
            .run_until(async {
                let limit = Limit { lingering: &LINGERING, max: 4 };
                let budget = MemoryBudget::new(1 << 20);
                let mut clients = Vec::new();
                for source in [1, 1, 1, 2, 2, 1] {
                    clients.push(close_after_three_bytes(limit, &budget, source).await);
                }
                // The tasks of those that are reset run, and no client closes its side.
                while LINGERING.load(Relaxed) > 4 {
                    yield_now().await;
                }
                assert_eq!(budget.shed(Shed::Lingering), 2);
                let mut reset = Vec::new();
                for client in &mut clients {
                    // A connection that waits has sent its FIN.
                    reset.push(is_reset(client).await);
                }
                assert_eq!(reset, [true, true, false, false, false, false]);
                drop(clients);
                while LINGERING.load(Relaxed) > 0 {
                    yield_now().await;
                }
                assert!(OF_WORKER.with_borrow(|current| current.places.is_empty()));
            })
            .await;
    }

    #[tokio::test]
    async fn close_while_all_places_are_used_by_other_threads_resets_the_connection() {
        static LINGERING: AtomicUsize = AtomicUsize::new(7);
        LocalSet::new()
            .run_until(async {
                let limit = Limit { lingering: &LINGERING, max: 7 };
                let budget = MemoryBudget::new(1 << 20);
                let mut client = close_after_three_bytes(limit, &budget, 1).await;
                while LINGERING.load(Relaxed) > 7 {
                    yield_now().await;
                }
                assert!(is_reset(&mut client).await);
            })
            .await;
    }

    fn size_of_future<F>(_: fn(TcpStream, SocketMemory, Place, Rc<()>) -> F) -> usize {
        size_of::<F>()
    }

    #[test]
    fn future_of_a_connection_that_lingers_is_small() {
        let size = size_of_future(linger);
        assert!(size <= 512, "{size}");
    }
}

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Wake;

use jackstay_core::admission::{MemoryBudget, Shed};
use jackstay_sys::clock;
use jackstay_sys::sockets::listening::listen;
use jackstay_sys::sockets::queue_memory;
use jackstay_sys::sockets::tcp_options::MAX_UNSENT;

use super::*;

const MIB: usize = 1 << 20;

/// Counts its wake-ups.
#[derive(Default)]
struct Task(AtomicUsize);

impl Wake for Task {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// A client and the accepted connection, both non-blocking.
fn pair() -> (TcpStream, TcpStream) {
    let listener: TcpListener = listen("127.0.0.1:0".parse().unwrap(), false).unwrap();
    listener.set_nonblocking(false).unwrap();
    let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (accepted, _) = listener.accept().unwrap();
    for socket in [&client, &accepted] {
        socket.set_nonblocking(true).unwrap();
    }
    (client, accepted)
}

fn fill(mut socket: &TcpStream) -> usize {
    std::iter::from_fn(|| socket.write(&[0; 16 << 10]).ok()).sum()
}

fn empty(mut socket: &TcpStream) {
    while socket.read(&mut [0; 8 << 10]).is_ok() {}
}

/// Measures all sockets of this thread. Returns the number of woken tasks, and whether none is due.
fn measure(now: Instant) -> (usize, bool) {
    let (woken, is_empty) = TABLE.with_borrow_mut(|table| table.measure(now));
    let count = woken.len();
    woken.into_iter().for_each(Waker::wake);
    (count, is_empty)
}

#[test]
fn blocked_socket_is_charged_until_its_bytes_are_taken() {
    let budget = MemoryBudget::new(100 * MIB);
    let (client, accepted) = pair();
    let memory = SocketMemory::new(SocketRef::of(&accepted), budget.source(1), MAX_UNSENT);
    let written = fill(&accepted);
    memory.record_write(Peer::Client, written, true, Waker::noop());
    assert!(memory.is_client_blocked());
    assert_eq!(measure(clock::now()), (0, false));
    let held = budget.used_for(MemoryKind::Sockets);
    assert!((64 << 10..MIB).contains(&held), "{held}");
    // All bytes have arrived once the socket is empty; the kernel delivers them as the client reads.
    while queue_memory::read(&accepted).unwrap().sent > 0 {
        empty(&client);
    }
    memory.record_write(Peer::Client, 1, false, Waker::noop());
    assert!(!memory.is_client_blocked());
    assert_eq!(measure(clock::now()), (0, true));
    assert_eq!(budget.used(), 0);
}

#[test]
fn written_bytes_are_charged_although_the_receiver_accepts_more() {
    let budget = MemoryBudget::new(100 * MIB);
    let (client, accepted) = pair();
    // Fills the client's receive queue, so that further bytes stay in the send queue.
    fill(&accepted);
    let memory = SocketMemory::new(SocketRef::of(&accepted), budget.source(1), MAX_UNSENT);
    memory.record_write(Peer::Client, MIN_WRITTEN - 1, false, Waker::noop());
    assert_eq!(measure(clock::now()), (0, true), "little was written");
    assert_eq!(budget.used(), 0);
    memory.record_write(Peer::Client, 1, false, Waker::noop());
    assert_eq!(measure(clock::now()), (0, false));
    assert!(budget.used() > 0);
    drop((memory, client));
    assert_eq!(budget.used(), 0, "the charge ends with the connection");
}

#[test]
fn queues_are_bounded_while_memory_is_short() {
    let budget = MemoryBudget::new(MIB);
    let (client, accepted) = pair();
    let memory = SocketMemory::new(SocketRef::of(&accepted), budget.source(1), MAX_UNSENT);
    memory.record_read(Peer::Client, true);
    let other = budget.source(1).charge(MemoryKind::Flows, 300 << 10);
    assert!(memory.level() >= Level::High);
    assert_eq!(measure(clock::now()), (0, false), "an unread socket stays due");
    let written = fill(&client);
    measure(clock::now());
    let held = budget.used_for(MemoryKind::Sockets);
    // One more packet may arrive at the limit; packets on loopback have 64 KiB.
    assert!((1..3 * MAX_RECEIVED).contains(&held), "{held}");
    drop(other);
    empty(&accepted);
    measure(clock::now());
    assert_eq!(memory.level(), Level::Free);
    let unsent = socket2::SockRef::from(&accepted).tcp_notsent_lowat().unwrap();
    assert_eq!(unsent, MAX_UNSENT, "the bounds are removed");
    drop((memory, client));
    assert!(written > 0);
    assert_eq!(budget.used(), 0);
}

#[test]
fn connection_that_is_blocked_for_two_seconds_is_shed_only_while_memory_is_short() {
    let budget = MemoryBudget::new(MIB);
    let (_client, accepted) = pair();
    let memory = SocketMemory::new(SocketRef::of(&accepted), budget.source(1), MAX_UNSENT);
    let task = Arc::new(Task::default());
    memory.record_write(Peer::Client, 0, true, &Waker::from(Arc::clone(&task)));
    let start = clock::now();
    assert_eq!(measure(start + MAX_BLOCKED * 2), (0, false));
    assert!(!memory.is_shed(), "memory is not short");
    let last_shed = Rc::<Cell<Option<Refusal>>>::default();
    memory.report_shed(Rc::clone(&last_shed));
    let rank = Rc::new(Cell::new(ClientRank::Identity));
    memory.follow_rank(Rc::clone(&rank));
    let _other = budget.source(1).charge(MemoryKind::Flows, 250 << 10);
    assert_eq!(measure(start + MAX_BLOCKED * 2), (0, false));
    assert!(!memory.is_shed(), "memory is not short for an identity");
    rank.set(ClientRank::Unproven);
    measure(start + MAX_BLOCKED / 2);
    assert!(!memory.is_shed(), "it has not been blocked for long");
    assert_eq!(measure(start + MAX_BLOCKED * 2).0, 1);
    assert!(memory.is_shed());
    assert_eq!(last_shed.take(), Some(Refusal::StalledReader));
    assert_eq!(task.0.load(Ordering::Relaxed), 1);
    measure(start + MAX_BLOCKED * 2);
    assert_eq!(budget.shed(Shed::StalledReader), 1, "it is counted once");
}

#[test]
fn largest_blocked_connections_are_shed_when_the_share_is_used_up() {
    // The share of the source is half of 5/8.
    let budget = MemoryBudget::new(2 * MIB);
    let connection = |fill_it: bool| {
        let (client, accepted) = pair();
        let memory = SocketMemory::new(SocketRef::of(&accepted), budget.source(1), MAX_UNSENT);
        if fill_it {
            fill(&accepted);
        }
        memory.record_write(Peer::Client, 0, true, Waker::noop());
        (memory, client, accepted)
    };
    let empty = connection(false);
    let full = connection(true);
    let now = clock::now();
    let _other = budget.source(1).charge(MemoryKind::Flows, 540 << 10);
    measure(now);
    assert!(!full.0.is_shed(), "its client may be about to read");
    measure(now + INTERVAL);
    assert!(full.0.is_shed());
    assert!(!empty.0.is_shed(), "the share suffices without the first");
    assert_eq!(budget.used_for(MemoryKind::Sockets), 0);
}

#[test]
fn both_sockets_of_a_flow_are_charged() {
    let budget = MemoryBudget::new(100 * MIB);
    let ((client, from_client), (endpoint, to_endpoint)) = (pair(), pair());
    let memory = SocketMemory::new(SocketRef::of(&from_client), budget.source(1), MAX_UNSENT);
    memory.set_endpoint(SocketRef::of(&to_endpoint));
    fill(&client);
    fill(&endpoint);
    memory.record_read(Peer::Client, true);
    measure(clock::now());
    let held = |socket: &TcpStream| queue_memory::read(socket).unwrap().total();
    let both = held(&from_client) + held(&to_endpoint);
    assert_eq!(budget.used_for(MemoryKind::Sockets), both);
    assert!(held(&to_endpoint) > 0);
}

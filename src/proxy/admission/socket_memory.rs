//! Charges the kernel memory of clients' sockets to the [memory budget](jackstay_core::admission).
//!
//! The kernel holds what a peer has sent and this process has not read, and what this process has written and the peer
//! has not acknowledged. [`jackstay_sys::sockets::tcp_options`] bounds the part that was not sent. The rest must be able to grow, because a
//! bulk transfer at a distance needs it. So each worker has a table of the sockets of its clients: those of L7
//! connections, and both of each L4 flow and tunnel. Every 50 ms it measures the sockets that may hold something, and
//! charges what they hold. A socket may hold something
//!
//! * if [`MIN_WRITTEN`] bytes were written to it since it was measured,
//! * if its receiver accepts no more bytes (it is *blocked*),
//! * if this process does not read from it (it is *unread*): the peer can fill its receive queue at any time,
//! * if it held something when it was measured.
//!
//! An idle connection is thus not measured. What happens while memory is short for the source of a client:
//!
//! | level | effect on sockets that are measured |
//! |---|---|
//! | [`Level::High`] | their queues hold at most 64 KiB received and 16 KiB unsent, until the level is [`Level::Free`]; connections that have been blocked for two seconds are reset |
//! | [`Level::Critical`] | those that have been blocked for 50 ms are reset, the ones that hold most first, until the level is lower |
//!
//! Kernels before Linux 4.12 do not report the memory; there the sockets have only their bound.

use std::cell::{Cell, RefCell};
use std::cmp::Reverse;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Waker;
use std::time::{Duration, Instant};

use jackstay_core::admission::{Level, MemoryKind, Refusal, SourceMemory};
use jackstay_core::credential_class::ClientRank;
use jackstay_sys::clock;
use jackstay_sys::sockets::stream::SocketRef;
use jackstay_sys::sockets::tcp_options::MIN_UNSENT;
use slab::Slab;
use tokio::sync::Notify;
use tokio::time::sleep;

/// Interval of the measurements.
const INTERVAL: Duration = Duration::from_millis(50);
/// Written bytes after which a socket is measured although its receiver accepts more. Fewer are part of the costs of a
/// connection and of a flow.
const MIN_WRITTEN: usize = 4 << 10;
/// How long a connection may be blocked while memory is short, as a stream
/// ([`super::super::body_progress`]).
const MAX_BLOCKED: Duration = Duration::from_secs(2);
/// Bytes that a receive queue may hold while memory is short.
const MAX_RECEIVED: usize = 64 << 10;

thread_local! {
    /// The table of the worker that runs on this thread.
    static TABLE: RefCell<Table> = RefCell::default();
}

/// The sockets of one worker, while another worker runs on its thread.
#[derive(Default)]
pub struct SocketTable(Table);

impl SocketTable {
    /// Exchanges this table and the one of this thread.
    pub fn swap(&mut self) {
        TABLE.with_borrow_mut(|table| std::mem::swap(table, &mut self.0));
    }
}

/// The number of sockets, or pairs of them, of the calling worker.
#[cfg(test)]
pub fn count() -> usize {
    TABLE.with_borrow(|table| table.entries.len())
}

/// Measures the sockets of the calling worker until the task is dropped.
pub async fn run() {
    let due = TABLE.with_borrow(|table| Rc::clone(&table.becomes_due));
    loop {
        due.notified().await;
        loop {
            sleep(INTERVAL).await;
            let (woken, is_empty) = TABLE.with_borrow_mut(|table| table.measure(clock::now()));
            woken.into_iter().for_each(Waker::wake);
            if is_empty {
                break;
            }
        }
    }
}

/// One of the two peers of this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Peer {
    /// The client, or the only peer of a socket that is charged alone.
    Client,
    /// The endpoint of a flow or tunnel.
    Endpoint,
}

/// The memory of a client's socket, or of both sockets of a flow. Dropping it ends the charge, which must happen on the
/// same worker and before the sockets are closed.
#[derive(Debug)]
pub struct SocketMemory {
    key: usize,
}

#[derive(Default)]
struct Table {
    entries: Slab<Entry>,
    /// The keys of the entries to measure.
    due: Vec<usize>,
    /// Notified when a socket becomes due in an empty table.
    becomes_due: Rc<Notify>,
}

struct Entry {
    sockets: [Option<Socket>; 2],
    source: Arc<SourceMemory>,
    /// What the client has proven; nothing without it.
    rank: Option<Rc<Cell<ClientRank>>>,
    /// What was last shed of the client, for its log.
    last_shed: Option<Rc<Cell<Option<Refusal>>>>,
    /// The usual bound of unsent bytes.
    max_unsent: u32,
    charged: usize,
    /// Bytes written since the last measurement.
    written: usize,
    is_due: bool,
    is_shed: bool,
    /// The task of the connection.
    task: Option<Waker>,
}

#[derive(Debug)]
struct Socket {
    state: SocketRef,
    is_unread: bool,
    /// Whether its queues have the bounds for short memory.
    is_bounded: bool,
    blocked_since: Option<Instant>,
}

impl SocketMemory {
    /// Charges the socket of a client that has proven nothing to `source`. Unless memory is short, it may hold
    /// `max_unsent` bytes.
    pub fn new(client: SocketRef, source: Arc<SourceMemory>, max_unsent: u32) -> Self {
        let entry = Entry {
            sockets: [Some(Socket::new(client)), None],
            source,
            rank: None,
            last_shed: None,
            max_unsent,
            charged: 0,
            written: 0,
            is_due: false,
            is_shed: false,
            task: None,
        };
        Self { key: TABLE.with_borrow_mut(|table| table.entries.insert(entry)) }
    }

    /// Charges the socket of the flow's endpoint too.
    pub fn set_endpoint(&self, endpoint: SocketRef) {
        self.update(|entry| entry.sockets[Peer::Endpoint as usize] = Some(Socket::new(endpoint)));
    }

    /// From now on, `rank` holds what the client has proven.
    pub fn follow_rank(&self, rank: Rc<Cell<ClientRank>>) {
        self.update(|entry| entry.rank = Some(rank));
    }

    /// From now on, `last_shed` is set when the connection is shed.
    pub fn report_shed(&self, last_shed: Rc<Cell<Option<Refusal>>>) {
        self.update(|entry| entry.last_shed = Some(last_shed));
    }

    /// The account of the client.
    pub fn source(&self) -> Arc<SourceMemory> {
        TABLE.with_borrow(|table| Arc::clone(&table.entries[self.key].source))
    }

    /// Records whether bytes that the peer sends now are not read.
    pub fn record_read(&self, from: Peer, is_unread: bool) {
        self.update(|entry| {
            if let Some(socket) = &mut entry.sockets[from as usize] {
                socket.is_unread = is_unread;
            }
        });
    }

    /// Records that so many bytes were written, and whether the receiver accepts no more. The task is then woken when
    /// the connection is shed.
    pub fn record_write(&self, to: Peer, bytes: usize, is_blocked: bool, task: &Waker) {
        self.update(|entry| {
            entry.written = entry.written.saturating_add(bytes);
            let Some(socket) = &mut entry.sockets[to as usize] else { return };
            if !is_blocked {
                socket.blocked_since = None;
                return;
            }
            if bytes > 0 || socket.blocked_since.is_none() {
                socket.blocked_since = Some(clock::now());
            }
            match &mut entry.task {
                Some(known) => known.clone_from(task),
                None => entry.task = Some(task.clone()),
            }
        });
    }

    /// Ends the bounds for short memory, before another [`SocketMemory`] follows the sockets.
    pub fn end_bounds(&self) {
        self.update(|entry| {
            for socket in entry.sockets.iter_mut().flatten() {
                socket.set_bounded(false, entry.max_unsent);
            }
        });
    }

    /// Whether the connection must be reset, because memory is short and a receiver accepts no bytes.
    pub fn is_shed(&self) -> bool {
        TABLE.with_borrow(|table| table.entries[self.key].is_shed)
    }

    /// Whether the client accepts no bytes.
    pub fn is_client_blocked(&self) -> bool {
        TABLE.with_borrow(|table| {
            let client = &table.entries[self.key].sockets[Peer::Client as usize];
            client.as_ref().is_some_and(|socket| socket.blocked_since.is_some())
        })
    }

    /// How short memory is for the client.
    pub fn level(&self) -> Level {
        TABLE.with_borrow(|table| table.entries[self.key].level())
    }

    fn update(&self, update: impl FnOnce(&mut Entry)) {
        TABLE.with_borrow_mut(|Table { entries, due, becomes_due }| {
            let entry = &mut entries[self.key];
            update(entry);
            if !entry.is_due && entry.may_hold() {
                entry.is_due = true;
                due.push(self.key);
                if due.len() == 1 {
                    becomes_due.notify_one();
                }
            }
        });
    }
}

impl Drop for SocketMemory {
    fn drop(&mut self) {
        // While the thread ends, its table may be destroyed already, with the charges.
        let _ = TABLE.try_with(|table| {
            let Table { entries, due, .. } = &mut *table.borrow_mut();
            if let Some(at) = due.iter().position(|key| *key == self.key) {
                due.swap_remove(at);
            }
            entries.remove(self.key)
        });
    }
}

impl Table {
    /// Measures the sockets that are due, and sheds what it must. Returns the tasks of connections that are shed, and
    /// whether no socket is due any more.
    fn measure(&mut self, now: Instant) -> (Vec<Waker>, bool) {
        let Self { entries, due, .. } = self;
        let mut is_short = false;
        for key in &*due {
            let entry = &mut entries[*key];
            if entry.may_hold() {
                entry.measure();
                is_short |= entry.level() >= Level::High;
            }
        }
        let mut woken = Vec::new();
        if is_short {
            due.sort_unstable_by_key(|key| Reverse(entries[*key].charged));
            for key in &*due {
                woken.extend(entries[*key].shed(now));
            }
        }
        due.retain(|key| {
            let entry = &mut entries[*key];
            entry.is_due = entry.may_hold();
            entry.is_due
        });
        (woken, due.is_empty())
    }
}

impl Entry {
    fn may_hold(&self) -> bool {
        let is_waiting = |socket: &Socket| socket.is_unread || socket.blocked_since.is_some();
        self.charged > 0
            || self.written >= MIN_WRITTEN
            || self.sockets.iter().flatten().any(is_waiting)
    }

    fn level(&self) -> Level {
        self.source.level(self.rank.as_ref().map_or(ClientRank::Unproven, |rank| rank.get()))
    }

    fn measure(&mut self) {
        let mut held = 0;
        for socket in self.sockets.iter().flatten() {
            let Ok(memory) = socket.state.queue_memory() else { continue };
            // The kernel keeps a reserve for an empty queue, too.
            if memory.received + memory.sent > 0 {
                held += memory.total();
            }
        }
        self.written = 0;
        self.charge(held);
        if self.level() == Level::Free {
            for socket in self.sockets.iter_mut().flatten() {
                socket.set_bounded(false, self.max_unsent);
            }
        }
    }

    /// Bounds what the sockets hold if memory is short for the client, and sheds the connection if it must be. Then the
    /// charge ends, so that no more connections are shed than needed, and the task to wake is returned.
    fn shed(&mut self, now: Instant) -> Option<Waker> {
        let max_blocked = match self.level() {
            Level::Free | Level::Half => return None,
            Level::High => MAX_BLOCKED,
            Level::Critical => INTERVAL,
        };
        let mut is_stalled = false;
        for socket in self.sockets.iter_mut().flatten() {
            socket.set_bounded(true, self.max_unsent);
            is_stalled |= socket.blocked_since.is_some_and(|since| now >= since + max_blocked);
        }
        if !is_stalled || self.is_shed {
            return None;
        }
        self.is_shed = true;
        self.source.budget().count(Refusal::StalledReader);
        if let Some(last_shed) = &self.last_shed {
            last_shed.set(Some(Refusal::StalledReader));
        }
        self.charge(0);
        self.task.take()
    }

    fn charge(&mut self, held: usize) {
        let before = std::mem::replace(&mut self.charged, held);
        if held > before {
            self.source.add(MemoryKind::Sockets, held - before);
        } else if held < before {
            self.source.subtract(MemoryKind::Sockets, before - held);
        }
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.charge(0);
    }
}

impl Socket {
    /// Sets the bounds for short memory, or the usual ones. An error leaves the socket as it is: it is closed.
    fn set_bounded(&mut self, is_bounded: bool, max_unsent: u32) {
        if std::mem::replace(&mut self.is_bounded, is_bounded) == is_bounded {
            return;
        }
        let (received, unsent) =
            if is_bounded { (Some(MAX_RECEIVED), MIN_UNSENT) } else { (None, max_unsent) };
        let _ = self.state.bound_received(received);
        let _ = self.state.bound_unsent(unsent);
    }

    fn new(state: SocketRef) -> Self {
        Self { state, is_unread: false, is_bounded: false, blocked_since: None }
    }
}

#[cfg(test)]
#[path = "socket_memory_tests.rs"]
mod tests;

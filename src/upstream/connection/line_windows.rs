//! Receive windows that follow the line (RFC 9113 section 5.2).
//!
//! A body moves at most one window in each round trip: with 64 KiB, a list of 20 MB takes 6 s on a line of 20 ms. Larger
//! windows for all streams would let stalled clients fill the memory. So the windows of a connection grow while it is
//! limited by them, and shrink when it is not:
//!
//! * **Grow.** When the bytes of one round trip reach two thirds of a stream's window, the window limits the line, as in
//!   the estimator of gRPC (`internal/transport/bdp_estimator.go`). The first step goes to what a fast line can carry,
//!   because one round trip for each doubling would cost as much as the body. Further ones quadruple, each when the
//!   apiserver has acknowledged the last one and its bytes arrive. Bytes that the clients have not read do not count,
//!   because then a client is the limit.
//! * **Follow.** While clients leave half a window unread, it is halved, so that it becomes what they read. A window of more than four times the largest round trip is reduced to twice that.
//! * **Shrink.** After a second without such bytes the windows are the initial ones again.
//!
//! What streams may hold beyond their initial window is lent by the [memory budget](jackstay_core::admission):
//! only what is free (below [`Level::Half`]; for identities, for which others give way, below [`Level::High`]), and it is
//! given back when memory gets short. The setting concerns all streams of the connection
//! (`SETTINGS_INITIAL_WINDOW_SIZE`), so the loan is the window of the connection. It ends when the apiserver has
//! acknowledged the smaller window.
//!
//! Bytes that a client does not read stay, also after the window has shrunk. They are charged until it reads them or its
//! stream is reset, and the window of the connection is larger by as much, so that they do not stall other streams.

use std::sync::Arc;
use std::time::{Duration, Instant};

use jackstay_core::admission::{Level, MemoryBudget, MemoryKind, SourceMemory};
use jackstay_core::credential_class::ClientRank;
use jackstay_core::receive_windows::ReceiveWindows;
use jackstay_sys::clock;

use crate::upstream::credentials::CredentialClass;

/// Rate for which windows grow, in bytes a second: 3.2 Gbit/s. On a short line the processors are the limit, and larger
/// windows would only hold more for clients that stall.
const FAST_LINE: f64 = 400e6;
/// Smallest window after a growth. It also serves a short line: fewer turns of the tasks on both sides.
const MIN_GROWN: u32 = 256 << 10;
/// Largest window of the first step: clients that stall at once hold so much.
const MAX_FIRST: u32 = 1 << 20;
/// Largest window: 1.6 Gbit/s at 80 ms.
const MAX_GROWN: u32 = 16 << 20;
/// Shortest time in which bytes are counted. On loopback the tasks of both sides take longer than a round trip.
const MIN_SAMPLE: Duration = Duration::from_millis(2);
/// Time without many bytes after which the windows shrink.
const KEEP: Duration = Duration::from_secs(1);
/// How often grown windows, and what streams hold beyond the initial window, are checked.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);
/// Pause after a loan that was refused or given back.
const REFUSED_PAUSE: Duration = Duration::from_secs(1);
/// The window of the connection follows held bytes in steps of this size.
const HELD_STEP: usize = 64 << 10;

/// The account of what a connection of this class may hold for its clients, and what these have proven.
pub(super) fn account_of(
    memory: &Arc<MemoryBudget>,
    class: CredentialClass,
) -> (Arc<SourceMemory>, ClientRank) {
    let rank = class.rank();
    (memory.upstream_windows(rank), rank)
}

/// The windows to announce.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Windows {
    /// Initial window of each stream.
    pub(super) stream: u32,
    /// Window of the connection, without what its streams hold beyond their initial windows.
    pub(super) connection: u32,
}

/// Bytes that streams have received and their clients have not read.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Held {
    /// Of all streams.
    pub(super) all: usize,
    /// Beyond the initial window of each stream.
    pub(super) beyond: usize,
}

/// The bytes of one round trip.
#[derive(Debug, Clone, Copy)]
struct Sample {
    since: Instant,
    /// Bytes that the connection had received before.
    before: u64,
}

/// The windows of one connection.
#[derive(Debug)]
pub(super) struct LineWindows {
    initial: Windows,
    /// The window of a stream that the line needs and the memory permits.
    stream: u32,
    /// The last one that was sent to the apiserver.
    announced: u32,
    /// The last one that the apiserver has acknowledged.
    acknowledged: u32,
    loan: Loan,
    /// The round trip without queues: the shortest of the last ones.
    rtt: Duration,
    sample: Sample,
    received: u64,
    /// The largest sample since `changed_at`.
    largest: u64,
    /// The bytes of a sample in which the window may have limited the line, since the last check.
    limited: Option<u64>,
    /// Bytes that had been received at the last check.
    checked: u64,
    /// Bytes that the streams held at the last check.
    held_before: usize,
    /// When a sample last needed more than the initial window.
    busy_at: Instant,
    changed_at: Instant,
    /// No growth before this.
    refused_until: Instant,
    check_at: Option<Instant>,
}

impl LineWindows {
    /// The windows of a connection that begins with `initial`. What streams may hold beyond is charged to `account`
    /// for clients of this rank.
    pub(super) fn new(
        initial: ReceiveWindows,
        (account, rank): (Arc<SourceMemory>, ClientRank),
        rtt: Duration,
        now: Instant,
    ) -> Self {
        Self {
            initial: Windows { stream: initial.stream, connection: initial.connection },
            stream: initial.stream,
            announced: initial.stream,
            acknowledged: initial.stream,
            loan: Loan { account, rank, bytes: 0 },
            rtt,
            sample: Sample { since: now, before: 0 },
            received: 0,
            largest: 0,
            limited: None,
            checked: 0,
            held_before: 0,
            busy_at: now,
            changed_at: now,
            refused_until: now,
            check_at: None,
        }
    }

    /// The windows when the line needs no more.
    pub(super) fn initial(&self) -> Windows {
        self.initial
    }

    /// When [`Self::adjust`] is due without further bytes.
    pub(super) fn check_at(&self) -> Option<Instant> {
        self.check_at
    }

    /// Whether a check is due without further bytes.
    pub(super) fn is_due(&self) -> bool {
        self.check_at.is_some_and(|at| clock::now() >= at)
    }

    /// Records a round trip. Queues on the line make it longer, so a longer one counts little.
    pub(super) fn round_trip(&mut self, rtt: Duration) {
        self.rtt = rtt.min(self.rtt + self.rtt / 16);
    }

    /// Records that this window of a stream was sent to the apiserver.
    pub(super) fn announced(&mut self, stream: u32) {
        self.announced = stream;
    }

    /// Records that the apiserver has acknowledged the announced window. What was in flight before does not fill it.
    pub(super) fn acknowledged(&mut self, now: Instant) {
        self.acknowledged = self.announced;
        self.sample = Sample { since: now, before: self.received };
    }

    /// Records that the connection has received `received` bytes in all. Returns whether [`Self::adjust`] is due.
    pub(super) fn received(&mut self, received: u64, now: Instant) -> bool {
        let length = self.rtt.max(MIN_SAMPLE);
        if now >= self.sample.since + length {
            self.sample = Sample { since: now, before: self.received };
        }
        self.received = received;
        let bytes = received - self.sample.before;
        self.largest = self.largest.max(bytes);
        let fills = |window: u32| bytes * 3 >= u64::from(window) * 2;
        if fills(self.initial.stream) {
            self.busy_at = now;
        }
        if self.acknowledged == self.stream
            && fills(self.stream)
            && self.stream < self.largest_useful()
        {
            self.limited = Some(bytes);
        }
        self.limited.is_some() && now >= self.refused_until
            || self.check_at.is_some_and(|at| now >= at)
    }

    /// Grows or shrinks the windows. Returns what to announce.
    pub(super) fn adjust(&mut self, Held { all, beyond: held }: Held, now: Instant) -> Windows {
        let wanted = self.wanted(all, held, now);
        self.checked = self.received;
        let granted = self.borrow(wanted, held);
        if granted < wanted {
            self.refused_until = now + REFUSED_PAUSE;
        }
        if granted != self.stream {
            (self.stream, self.changed_at, self.largest) = (granted, now, 0);
        }
        let idle = granted == self.initial.stream && self.loan.bytes == 0;
        self.check_at = (!idle).then(|| now + CHECK_INTERVAL.max(2 * self.rtt));
        let beyond = if granted > self.initial.stream { granted as usize } else { 0 };
        let connection =
            self.initial.connection as usize + beyond + held.next_multiple_of(HELD_STEP);
        Windows { stream: granted, connection: connection.min(MAX_WINDOW) as u32 }
    }

    /// The window of a stream that the line needs.
    fn wanted(&mut self, held: usize, beyond: usize, now: Instant) -> u32 {
        let initial = self.initial.stream;
        let waiting = held.saturating_sub(std::mem::replace(&mut self.held_before, held)) as u64;
        if self.stream > initial && 2 * beyond >= self.stream as usize {
            self.limited = None;
            return if self.stream / 2 < MIN_GROWN { initial } else { self.stream / 2 }
                .max(initial);
        }
        if let Some(bytes) = self.limited.take()
            && now >= self.refused_until
        {
            if bytes.saturating_sub(waiting) < u64::from(self.stream) / 2 {
                // The clients have not read them, or not yet.
                self.refused_until = now + self.rtt.max(MIN_SAMPLE);
                return self.stream;
            }
            return if self.stream == initial {
                self.largest_useful().min(MAX_FIRST)
            } else {
                (4 * self.stream).min(self.largest_useful().max(self.stream))
            };
        }
        if now >= self.busy_at + KEEP {
            return initial;
        }
        let needed = u32::try_from(2 * self.largest).unwrap_or(MAX_GROWN).max(MIN_GROWN);
        if now >= self.changed_at + KEEP && needed < self.stream / 2 {
            return needed.next_power_of_two().max(initial);
        }
        self.stream
    }

    /// The largest window that makes the line faster.
    fn largest_useful(&self) -> u32 {
        let product = (2.0 * self.rtt.as_secs_f64() * FAST_LINE) as u32;
        product.clamp(MIN_GROWN, MAX_GROWN).max(self.initial.stream)
    }

    /// Borrows for the largest window up to `wanted` that the memory permits.
    fn borrow(&mut self, wanted: u32, held: usize) -> u32 {
        let initial = self.initial.stream;
        // The apiserver may use the largest window that it knows.
        let known = self.announced.max(self.acknowledged);
        let mut stream = wanted;
        while stream > initial {
            if self.loan.resize(self.potential(stream.max(known)) + held) {
                return stream;
            }
            stream = stream / 4 * 2;
            if stream < MIN_GROWN {
                break;
            }
        }
        let lent = if known > initial { self.potential(known) } else { 0 };
        self.loan.force(held + lent);
        initial
    }

    /// Bytes that streams with this window may hold beyond their initial windows. As many as there are may be opened
    /// before the apiserver knows a smaller window, so only the window of the connection bounds them.
    fn potential(&self, stream: u32) -> usize {
        match self.loan.rank {
            // Its client harms itself if it stalls. Its initial windows are not charged, either.
            ClientRank::Identity => stream as usize,
            ClientRank::Token | ClientRank::Unproven => {
                self.initial.connection as usize + stream as usize
            }
        }
    }
}

/// Largest flow-control window (RFC 9113 section 6.9.1).
const MAX_WINDOW: usize = (1 << 31) - 1;

/// Memory that is lent to a connection, charged until this is dropped.
#[derive(Debug)]
struct Loan {
    account: Arc<SourceMemory>,
    rank: ClientRank,
    bytes: usize,
}

impl Loan {
    /// Changes the loan, if it does not make memory short. A loan that has become too large is refused, too.
    fn resize(&mut self, bytes: usize) -> bool {
        let before = self.bytes;
        self.force(bytes);
        let short = match self.rank {
            ClientRank::Identity => Level::High,
            ClientRank::Token | ClientRank::Unproven => Level::Half,
        };
        let fits = self.account.budget().level(self.rank) < short;
        if !fits {
            self.force(before);
        }
        fits
    }

    /// Changes the loan to what is held in any case.
    fn force(&mut self, bytes: usize) {
        if bytes > self.bytes {
            self.account.add(MemoryKind::UpstreamWindows, bytes - self.bytes);
        } else {
            self.account.subtract(MemoryKind::UpstreamWindows, self.bytes - bytes);
        }
        self.bytes = bytes;
    }
}

impl Drop for Loan {
    fn drop(&mut self) {
        self.force(0);
    }
}

#[cfg(test)]
#[path = "line_windows_tests.rs"]
mod tests;

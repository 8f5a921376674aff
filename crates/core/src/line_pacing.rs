//! Keeps the queue of a slow line short.
//!
//! A bulk transfer fills the queue in front of the slowest hop of its path as far as its windows permit (RFC 7567,
//! section 2: queues that are always full). All other connections of that line then wait: on 1 Mbit/s, a heartbeat waits
//! for seconds behind a large list. So the bytes in flight of such a transfer are bounded, in each direction: the
//! peer sends no more than the offered window, and the kernel no more than the send queue.
//!
//! The queue is what a round trip takes longer than the shortest one: `tcpi_rtt` for bytes that are sent, and
//! `tcpi_rcv_rtt` for those that are received.
//!
//! | direction | bytes since the last look | queue | what follows |
//! |---|---|---|---|
//! | free | [`BULK`] or more without pauses, in [`LONG_LOOKS`] looks | longer than [`LONG_QUEUE`] | the bound that [`WANTED_QUEUE`] needs at the present rate; none if that exceeds [`MAX_BOUND`] |
//! | bounded | the same | the same | three quarters of the bound, or what [`WANTED_QUEUE`] needs, at least [`MIN_BOUND`] |
//! | bounded | [`BULK`] or more | shorter than [`SHORT_QUEUE`] | five quarters of it, or what [`WANTED_QUEUE`] needs; free beyond [`MAX_BOUND`] |
//! | any | less than [`FEW`], for [`QUIET`] | | [`START_BOUND`] |
//! | at [`MIN_BOUND`] for [`IN_VAIN`] | | longer than [`FOREIGN_QUEUE`] | the queue is not ours: free for [`GIVE_UP`] |
//!
//! A congestion control that has seen only small requests may fill the queue at once, before anybody can look. So a
//! connection begins with [`START_BOUND`], which a fast line leaves after a look or two; or with what another connection
//! has found on the same line within [`QUIET`] ([`LineMemory`]).
//!
//! A change shows after a round trip, so the next one follows later. The kernel also counts the pause before an event of a
//! watch, and the time for which an apiserver prepares a response, as a part of the round trip of received bytes. Pauses
//! distinguish them from a transfer.

use std::time::{Duration, Instant};

use crate::round_trips::RoundTrips;
use crate::tcp_info::TcpInfo;

/// How often a connection that transfers bytes is looked at.
pub const LOOK_INTERVAL: Duration = Duration::from_millis(100);
/// Bytes in [`LOOK_INTERVAL`] that are a bulk transfer.
const BULK: u64 = 1_000;
/// Bytes between two looks that show that the connection is used.
const FEW: u64 = 100;
/// Looks in a row that show a long queue.
const LONG_LOOKS: u32 = 3;
/// Time without received bytes that is a pause: a segment takes 50 ms at 256 kbit/s.
const PAUSE: Duration = Duration::from_millis(80);
/// A queue that delays a heartbeat, in each direction.
const LONG_QUEUE: Duration = Duration::from_millis(200);
/// A queue that may grow. The line is not idle.
const SHORT_QUEUE: Duration = Duration::from_millis(100);
/// A queue that the smallest bound does not explain.
const FOREIGN_QUEUE: Duration = Duration::from_millis(800);
/// The queue for which a bound begins.
const WANTED_QUEUE: Duration = Duration::from_millis(150);
/// Smallest bound, in bytes: six segments.
const MIN_BOUND: u32 = 8 << 10;
/// Largest bound, in bytes: about 10 Mbit/s with [`WANTED_QUEUE`]. Most kernels do not allow a program to set much more
/// (`net.core.rmem_max`), and on a faster line the queue of most routers is shorter.
const MAX_BOUND: u32 = 192 << 10;
/// The bound of a line that is not known, in bytes: half of the window with which the kernel begins to receive.
const START_BOUND: u32 = 32 << 10;
/// Time without many bytes after which nothing is known of the line.
const QUIET: Duration = Duration::from_secs(60);
/// How long the smallest bound is tried.
const IN_VAIN: Duration = Duration::from_secs(10);
/// How long nothing is bounded after that.
const GIVE_UP: Duration = Duration::from_secs(60);
/// How long the shortest round trip counts at least.
const MEMORY: Duration = Duration::from_secs(1_800);

/// The bounds of both directions of a connection, in bytes of payload; `None` while the kernel chooses.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct QueueBounds {
    /// Of bytes that are sent.
    pub send: Option<u32>,
    /// Of bytes that are received.
    pub receive: Option<u32>,
}

/// New bounds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BoundsChange {
    /// The earlier ones.
    pub before: QueueBounds,
    /// The new ones.
    pub bounds: QueueBounds,
}

impl BoundsChange {
    /// The directions whose queue has turned out to be long, as metric labels.
    pub fn begun(&self) -> impl Iterator<Item = &'static str> {
        let Self { before, bounds } = *self;
        let is_slow = |bound: Option<u32>| bound.is_some_and(|bound| bound < START_BOUND);
        let send = (is_slow(bounds.send) && !is_slow(before.send)).then_some("send");
        let receive = (is_slow(bounds.receive) && !is_slow(before.receive)).then_some("receive");
        send.into_iter().chain(receive)
    }
}

/// What the connections of an endpoint have shown of their line.
#[derive(Debug, Default)]
pub struct LineMemory {
    /// The bounds of the last transfer, and when they were last needed.
    bounds: Option<(QueueBounds, Instant)>,
    shortest: Shortest,
}

impl LineMemory {
    /// A transfer with these bounds is under way.
    pub fn record(&mut self, bounds: QueueBounds, now: Instant) {
        self.bounds = Some((bounds, now));
    }

    /// With which bounds a connection begins; `None` if they are not known.
    fn bounds(&self, now: Instant) -> Option<QueueBounds> {
        self.bounds.filter(|(_, at)| now < *at + QUIET).map(|(bounds, _)| bounds)
    }
}

/// The pacing of one connection.
#[derive(Debug, Default)]
pub struct LinePacing {
    /// The bound while nothing is known of the line.
    start: Option<u32>,
    send: Direction,
    receive: Direction,
    began: Option<Instant>,
    looked_at: Option<Instant>,
    round_trips: RoundTrips,
    queue: Option<Duration>,
}

/// The shortest round trip of the last [`MEMORY`] or two. A connection that begins behind a long queue does not know it, and
/// under a transfer that goes on, the kernel forgets it after five minutes. A path may become longer for good.
#[derive(Debug, Default)]
struct Shortest {
    since: Option<Instant>,
    current: Duration,
    before: Option<Duration>,
}

impl Shortest {
    fn update(&mut self, min_rtt: Duration, now: Instant) -> Duration {
        if self.since.is_none_or(|since| now >= since + MEMORY) {
            self.before = self.since.map(|_| self.current);
            (self.since, self.current) = (Some(now), min_rtt);
        }
        self.current = self.current.min(min_rtt);
        self.before.map_or(self.current, |before| before.min(self.current))
    }
}

#[derive(Debug, Default)]
struct Direction {
    /// Bytes up to the last look.
    bytes: u64,
    bound: Option<u32>,
    /// No change before this.
    settles_at: Option<Instant>,
    /// The most that has moved lately in [`LOOK_INTERVAL`].
    recent: u64,
    /// The last look at a bulk transfer.
    bulk_at: Option<Instant>,
    /// The last look at which bytes had moved.
    used_at: Option<Instant>,
    /// Since when the smallest bound has been in vain.
    in_vain_since: Option<Instant>,
    /// Looks in a row at a transfer whose queue is long.
    long_looks: u32,
    /// The round trip at the last look.
    round_trip: Duration,
}

/// What a look at a direction shows.
#[derive(Debug, Clone, Copy)]
struct Look {
    /// Bytes in all.
    bytes: u64,
    round_trip: Duration,
    /// The shortest one.
    shortest: Duration,
    /// Since the last look.
    elapsed: Duration,
    /// No bytes have arrived for [`PAUSE`].
    is_paused: bool,
    /// When the connection was first looked at.
    began: Instant,
    /// The bound while nothing is known of the line.
    start: Option<u32>,
}

impl LinePacing {
    /// That of a connection on which a transfer is looked at as soon as it begins. The default is for others: while nothing
    /// is known of the line, they are free.
    pub fn watched() -> Self {
        Self { start: Some(START_BOUND), ..Self::default() }
    }

    /// When the next look is due, if bytes are transferred.
    pub fn is_due(&self, now: Instant) -> bool {
        self.looked_at.is_none_or(|at| now >= at + LOOK_INTERVAL)
    }

    /// Whether a transfer is under way: the connection is to be looked at again after [`LOOK_INTERVAL`].
    pub fn is_active(&self) -> bool {
        let is_active = |direction: &Direction| {
            direction.bulk_at.is_some() && direction.bulk_at == self.looked_at
        };
        is_active(&self.send) || is_active(&self.receive)
    }

    /// The queue that the last look has shown, if it has shown one: how much longer than the shortest round trip an
    /// acknowledgement has taken.
    pub fn queue(&self) -> Option<Duration> {
        self.queue
    }

    /// The present bounds.
    pub fn bounds(&self) -> QueueBounds {
        QueueBounds { send: self.send.bound, receive: self.receive.bound }
    }

    /// Looks at a connection of `line`, with whose bounds it begins. Returns the bounds if they have changed.
    pub fn look(
        &mut self,
        info: &TcpInfo,
        line: &mut LineMemory,
        now: Instant,
    ) -> Option<BoundsChange> {
        if !self.is_due(now) {
            return None;
        }
        let before = self.bounds();
        let shortest = line.shortest.update(info.min_rtt, now);
        let is_first = self.began.is_none();
        let began = *self.began.get_or_insert(now);
        let elapsed = self.looked_at.map_or(LOOK_INTERVAL, |at| now.saturating_duration_since(at));
        self.looked_at = Some(now);
        let send = Look {
            bytes: info.bytes_acked,
            round_trip: info.rtt,
            shortest,
            elapsed,
            is_paused: false,
            began,
            start: self.start,
        };
        let receive = Look {
            bytes: info.bytes_received,
            round_trip: info.receive_rtt,
            is_paused: info.last_data_recv >= PAUSE,
            ..send
        };
        if is_first {
            let start = QueueBounds { send: self.start, receive: self.start };
            let QueueBounds { send: send_bound, receive: receive_bound } =
                line.bounds(now).unwrap_or(start);
            (self.send.bytes, self.send.bound) = (send.bytes, send_bound);
            (self.receive.bytes, self.receive.bound) = (receive.bytes, receive_bound);
        } else {
            self.send.look(send, now);
            self.receive.look(receive, now);
        }
        self.queue = self.round_trips.look(info, shortest, now);
        let bounds = self.bounds();
        (bounds != before).then_some(BoundsChange { before, bounds })
    }
}

impl Direction {
    fn look(&mut self, look: Look, now: Instant) {
        let moved = look.bytes.saturating_sub(std::mem::replace(&mut self.bytes, look.bytes));
        let in_interval = look.in_interval(moved);
        self.recent = in_interval.max(self.recent / 4 * 3);
        let is_bulk = in_interval >= BULK;
        if is_bulk {
            self.bulk_at = Some(now);
        }
        if moved >= FEW {
            self.used_at = Some(now);
        }
        if now >= self.used_at.unwrap_or(look.began) + QUIET {
            (self.bound, self.long_looks) = (look.start, 0);
            return;
        }
        let queue = look.round_trip.saturating_sub(look.shortest);
        // The kernel measures the round trip of received bytes only if they come in full segments.
        let is_measured =
            std::mem::replace(&mut self.round_trip, look.round_trip) != look.round_trip;
        let is_long = is_bulk && is_measured && queue > LONG_QUEUE && !look.is_paused;
        self.long_looks = if is_long { self.long_looks + 1 } else { 0 };
        let wanted = look.wanted(self.recent);
        let settled = self.settles_at.is_none_or(|at| now >= at);
        match self.bound {
            None if settled && self.long_looks >= LONG_LOOKS => self.change(wanted, look, now),
            Some(MIN_BOUND) if queue > FOREIGN_QUEUE && moved >= FEW => {
                let since = *self.in_vain_since.get_or_insert(now);
                if now >= since + IN_VAIN {
                    (self.bound, self.in_vain_since) = (None, None);
                    self.settles_at = Some(now + GIVE_UP);
                }
            }
            Some(bound) if settled => {
                self.in_vain_since = None;
                if self.long_looks >= LONG_LOOKS {
                    self.change((bound / 4 * 3).min(wanted), look, now);
                } else if is_bulk && queue < SHORT_QUEUE {
                    self.change((bound / 4 * 5).max(wanted), look, now);
                }
            }
            None | Some(_) => {}
        }
    }

    fn change(&mut self, bound: u32, look: Look, now: Instant) {
        self.bound = (bound <= MAX_BOUND).then_some(bound.max(MIN_BOUND));
        self.long_looks = 0;
        self.settles_at = Some(now + look.round_trip);
    }
}

impl Look {
    /// Of the bytes that have moved since the last look, those of [`LOOK_INTERVAL`].
    fn in_interval(self, moved: u64) -> u64 {
        let share = LOOK_INTERVAL.as_secs_f64() / self.elapsed.max(LOOK_INTERVAL).as_secs_f64();
        (moved as f64 * share) as u64
    }

    /// The bound for [`WANTED_QUEUE`], if so many bytes move in [`LOOK_INTERVAL`].
    fn wanted(self, moved: u64) -> u32 {
        let rate = moved as f64 / LOOK_INTERVAL.as_secs_f64();
        (rate * (self.shortest + WANTED_QUEUE).as_secs_f64()) as u32
    }
}

#[cfg(test)]
mod tests;

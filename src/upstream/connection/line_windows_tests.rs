use jackstay_core::admission::MemoryBudget;
use jackstay_sys::clock;

use super::*;

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;
const LIMIT: usize = 192 * MIB;

/// A connection of this class on a line.
struct Line {
    budget: Arc<MemoryBudget>,
    windows: LineWindows,
    rtt: Duration,
    now: Instant,
    received: u64,
    announced: Windows,
    held: usize,
    /// Bytes that have just arrived.
    unread: usize,
    /// Whether the apiserver acknowledges its windows.
    acknowledges: bool,
}

impl Line {
    fn new(rank: ClientRank, rtt: Duration) -> Self {
        Self::within(MemoryBudget::new(LIMIT), rank, rtt)
    }

    fn within(budget: Arc<MemoryBudget>, rank: ClientRank, rtt: Duration) -> Self {
        let initial = ReceiveWindows::new(100, rank == ClientRank::Identity);
        let now = clock::now();
        let account = (budget.upstream_windows(rank), rank);
        let windows = LineWindows::new(initial, account, rtt, now);
        let announced = Windows { stream: initial.stream, connection: initial.connection };
        Self {
            budget,
            windows,
            rtt,
            now,
            received: 0,
            announced,
            held: 0,
            unread: 0,
            acknowledges: true,
        }
    }

    /// Bytes arrive.
    fn receive(&mut self, bytes: usize) {
        self.received += bytes as u64;
        self.unread = bytes.min(128 * KIB);
        self.acknowledge();
        if self.windows.received(self.received, self.now) {
            self.adjust();
        }
    }

    fn held(&self) -> Held {
        Held { all: self.unread + self.held, beyond: self.held }
    }

    /// The apiserver acknowledges the last change.
    fn acknowledge(&mut self) {
        if self.acknowledges && self.windows.acknowledged != self.windows.announced {
            self.windows.acknowledged(self.now);
        }
    }

    fn adjust(&mut self) {
        self.announced = self.windows.adjust(self.held(), self.now);
        if self.windows.acknowledged == self.windows.announced {
            self.windows.announced(self.announced.stream);
        }
    }

    /// Time passes; the checks are done.
    fn pass(&mut self, time: Duration) {
        let end = self.now + time;
        while let Some(at) = self.windows.check_at().filter(|at| *at <= end) {
            self.now = at;
            self.acknowledge();
            self.adjust();
        }
        self.now = end;
    }

    /// A body that fills each window, on a line of `rate` bytes a second. Returns its time.
    fn body(&mut self, mut bytes: usize, rate: f64) -> Duration {
        let begin = self.now;
        while bytes > 0 {
            let product = (self.rtt.as_secs_f64() * rate) as usize;
            let flight = bytes.min(self.announced.stream as usize).min(product.max(16 * KIB));
            self.pass(self.rtt);
            for piece in [flight - flight / 2, flight / 2] {
                self.receive(piece);
            }
            bytes -= flight;
        }
        self.now - begin
    }

    fn lent(&self) -> usize {
        self.budget.used_for(MemoryKind::UpstreamWindows)
    }
}

#[test]
fn list_takes_few_round_trips_and_its_windows_are_given_back() {
    for (rank, rtt, trips) in [
        (ClientRank::Token, 2, 18),
        (ClientRank::Token, 20, 5),
        (ClientRank::Token, 80, 5),
        (ClientRank::Unproven, 80, 5),
        (ClientRank::Identity, 20, 5),
        (ClientRank::Identity, 80, 5),
    ] {
        let rtt = Duration::from_millis(rtt);
        let mut line = Line::new(rank, rtt);
        let initial = line.announced;
        let time = line.body(20_000_000, 1e12);
        assert!(time <= rtt * trips, "{rank:?}: {time:?} at {rtt:?}");
        assert!(line.lent() > 0);
        line.pass(KEEP + 8 * rtt + 2 * CHECK_INTERVAL);
        assert_eq!((line.announced, line.lent()), (initial, 0), "{rank:?} at {rtt:?}");
        assert_eq!(line.windows.check_at(), None, "an idle connection has no timer");
    }
}

#[test]
fn window_follows_what_the_line_carries() {
    let rtt = Duration::from_millis(80);
    for (rate, expected) in [(5e6, 1 << 20), (20e6, 4 << 20), (1e9, 16 << 20)] {
        let mut line = Line::new(ClientRank::Identity, rtt);
        line.body((rate * 5.0) as usize, rate);
        let window = line.announced.stream;
        assert!((expected..=2 * expected).contains(&window), "{rate}: {window}");
    }
}

#[test]
fn small_responses_and_slow_lines_change_nothing() {
    let mut line = Line::new(ClientRank::Token, Duration::from_millis(20));
    let initial = line.announced;
    for _ in 0..1000 {
        line.receive(30 * KIB);
        line.pass(Duration::from_millis(20));
    }
    assert_eq!((line.announced, line.lent()), (initial, 0));
}

#[test]
fn windows_stay_small_on_a_short_line() {
    for rank in [ClientRank::Token, ClientRank::Identity] {
        let mut line = Line::new(rank, Duration::from_micros(100));
        for _ in 0..10_000 {
            line.receive(1 << 20);
            line.pass(Duration::from_millis(1));
        }
        assert_eq!(line.announced.stream, MIN_GROWN, "{rank:?}");
    }
}

#[test]
fn clients_that_do_not_read_cause_no_growth() {
    for rank in [ClientRank::Token, ClientRank::Identity] {
        let mut line = Line::new(rank, Duration::from_millis(20));
        let initial = line.announced;
        // Each stream fills its window.
        for stream in 1..=50 {
            line.received += u64::from(initial.stream);
            line.unread = stream * initial.stream as usize;
            if line.windows.received(line.received, line.now) {
                line.adjust();
            }
            line.pass(Duration::from_millis(5));
        }
        assert_eq!(line.announced, initial, "{rank:?}");
    }
}

#[test]
fn late_pongs_give_no_larger_windows_than_a_long_line() {
    let mut line = Line::new(ClientRank::Token, Duration::from_secs(3));
    let initial = line.announced;
    line.body(100 << 20, 1e12);
    assert!(line.announced.stream <= MAX_GROWN);
    assert!(line.lent() <= initial.connection as usize + MAX_GROWN as usize);
    let mut short = Line::new(ClientRank::Token, Duration::from_millis(1));
    for _ in 0..3 {
        short.windows.round_trip(Duration::from_secs(3));
    }
    assert!(short.windows.rtt < Duration::from_micros(1250), "{:?}", short.windows.rtt);
}

#[test]
fn windows_never_exceed_what_is_lent() {
    for rank in [ClientRank::Unproven, ClientRank::Token] {
        let budget = MemoryBudget::new(LIMIT);
        let rtt = Duration::from_millis(80);
        let mut lines: Vec<_> =
            (0..50).map(|_| Line::within(Arc::clone(&budget), rank, rtt)).collect();
        let initial = lines[0].announced;
        for line in &mut lines {
            line.body(30 << 20, 1e12);
            // All streams together can hold the window of the connection.
            if line.announced.stream > initial.stream {
                let lent = line.windows.loan.bytes;
                assert!(lent >= line.announced.connection as usize, "{rank:?}: {lent}");
            }
        }
        let grown = lines.iter().filter(|line| line.announced.stream > initial.stream).count();
        assert!((1..50).contains(&grown), "{rank:?}: {grown} connections borrow");
        assert!(budget.used() < LIMIT / 8 * 3, "{rank:?}: {}", budget.used());
        drop(lines);
        assert_eq!(budget.used(), 0);
    }
}

#[test]
fn windows_are_given_back_when_memory_gets_short() {
    for (rank, used) in [(ClientRank::Unproven, LIMIT / 3), (ClientRank::Token, LIMIT / 8 * 3)] {
        let mut line = Line::new(rank, Duration::from_millis(80));
        let initial = line.announced;
        line.body(10 << 20, 1e12);
        assert!(line.announced.stream > initial.stream);
        let other = line.budget.source(1).charge(MemoryKind::Streams, used);
        line.pass(2 * line.rtt);
        assert_eq!(line.announced, initial, "{rank:?}");
        line.pass(2 * line.rtt);
        assert_eq!(line.lent(), 0, "{rank:?}");
        // Nor does it grow now.
        line.pass(REFUSED_PAUSE);
        line.body(10 << 20, 1e12);
        assert_eq!(line.announced, initial, "{rank:?}");
        // Identities borrow still.
        let budget = Arc::clone(&line.budget);
        let mut identity = Line::within(budget, ClientRank::Identity, Duration::from_millis(80));
        identity.body(10 << 20, 1e12);
        assert!(identity.announced.stream >= 1 << 20);
        drop(other);
    }
}

#[test]
fn held_bytes_are_charged_and_do_not_stall_other_streams() {
    let mut line = Line::new(ClientRank::Token, Duration::from_millis(20));
    let initial = line.announced;
    line.body(10 << 20, 1e12);
    // The client stops reading.
    line.held = 8 * MIB;
    line.pass(KEEP + 2 * CHECK_INTERVAL);
    assert_eq!(line.announced.stream, initial.stream);
    assert_eq!(line.announced.connection, initial.connection + (8 << 20));
    assert_eq!(line.lent(), 8 * MIB);
    // It reads again.
    line.held = 0;
    line.pass(CHECK_INTERVAL);
    assert_eq!((line.announced, line.lent()), (initial, 0));
}

#[test]
fn loan_ends_when_the_smaller_window_is_acknowledged() {
    let mut line = Line::new(ClientRank::Token, Duration::from_millis(20));
    let initial = line.announced;
    line.body(10 << 20, 1e12);
    let grown = line.announced.stream as usize;
    line.acknowledges = false;
    line.pass(KEEP + 3600 * CHECK_INTERVAL);
    assert_eq!(line.announced, initial);
    assert_eq!(line.lent(), initial.connection as usize + grown, "the apiserver may send so much");
    line.acknowledges = true;
    line.pass(2 * CHECK_INTERVAL);
    assert_eq!((line.lent(), line.windows.check_at()), (0, None));
}

#[test]
fn windows_do_not_grow_until_the_last_change_is_acknowledged() {
    let mut line = Line::new(ClientRank::Identity, Duration::from_millis(20));
    line.body(1 << 20, 1e12);
    let first = line.announced.stream;
    line.acknowledges = false;
    line.body(10 << 20, 1e12);
    assert_eq!(line.announced.stream, first);
}

//! The drain of a process, of its listeners, and of their watches.
//!
//! A process drains in these steps. Each one is bounded, because a thread may be stalled:
//!
//! | step | by | until |
//! |---|---|---|
//! | new connections are diverted from the sockets | control thread | TCP handshakes that have begun are complete |
//! | all sockets are closed | each worker | all workers have closed theirs, at most [`MAX_SOCKETS_CLOSE`] after the signal |
//! | connections end | each worker, for each listener | [`ListenerDrain`] has ended |
//!
//! Before a restart by the service manager that keeps the sockets, they are not closed: new connections wait in the accept
//! queues for the next process, which starts when this one has ended. So the drain takes [`RESTART_DRAIN`] at most.
//!
//! A client whose connection ends dials anew at once. If a worker still closed a socket then, that connection could be in
//! the accept queue of the socket, and the close would reset it.
//!
//! # A listener
//!
//! | state | condition, the first that holds | next state | effect |
//! |---|---|---|---|
//! | Draining | no connection is open | | `End` |
//! | Draining | second termination signal | Closing | `Close` |
//! | Draining | the timeout is over | Closing | `Close` |
//! | Draining | otherwise | Draining | `EndDue` |
//! | Closing | no connection is open, or it has lasted [`CLOSE_TIMEOUT`] | | `End` |
//! | Closing | otherwise | Closing | `AwaitClose` |
//!
//! # The watches of a listener
//!
//! | stage | start | force | a watch ends |
//! |---|---|---|---|
//! | Open | Draining | Forced | no |
//! | Draining | Draining | Forced | at a random moment within the spread |
//! | Forced | Forced | Forced | at once |
//!
//! Without the [spread](watch_spread), the clients of thousands of nodes, or of a thousand watches on one node, would
//! reconnect at the same time.

use std::time::{Duration, Instant};

/// Maximum time from the termination signal for which a worker waits until all sockets are closed.
pub const MAX_SOCKETS_CLOSE: Duration = Duration::from_secs(1);
/// Maximum time of a drain after which the service manager starts the next process. New connections wait for that, so
/// it is a part of what a client waits for a connect and its first byte: client-go gives a TLS handshake 10 s.
pub const RESTART_DRAIN: Duration = Duration::from_millis(1500);
/// How long connections may take to close after the timeout of the drain.
pub const CLOSE_TIMEOUT: Duration = Duration::from_millis(500);
/// Maximum time over which the ends of watches are spread. Clients reconnect within a second.
const MAX_SPREAD: Duration = Duration::from_secs(5);

/// The time over which the ends of watches are spread in a drain with this timeout: its first quarter.
pub fn watch_spread(timeout: Duration) -> Duration {
    MAX_SPREAD.min(timeout / 4)
}

/// How far the drain of watches or of connections is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DrainStage {
    /// It has not begun.
    Open,
    /// Watches end within `spread` of `since`.
    Draining {
        /// When it has begun.
        since: Instant,
        /// See the variant.
        spread: Duration,
    },
    /// Everything ends at once.
    Forced,
}

impl DrainStage {
    /// Begins the drain. Returns whether that is a change.
    pub fn start(&mut self, spread: Duration, now: Instant) -> bool {
        let is_open = *self == Self::Open;
        if is_open {
            *self = Self::Draining { since: now, spread };
        }
        is_open
    }

    /// When one watch ends, with `random` in 0..1; `None` if at once. The drain has begun.
    pub fn watch_end(self, random: f64) -> Option<Instant> {
        match self {
            Self::Draining { since, spread } => Some(since + spread.mul_f64(random)),
            Self::Open | Self::Forced => None,
        }
    }
}

/// Why the open connections of a listener are closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CloseCause {
    /// A second termination signal.
    SecondSignal,
    /// The timeout of the drain.
    Timeout,
}

impl CloseCause {
    /// Text for the log.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::SecondSignal => "second termination signal",
            Self::Timeout => "drain timeout",
        }
    }
}

/// What the drain of a listener does next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DrainStep {
    /// End the L4 flows whose time has come, and look again a little later.
    EndDue,
    /// Look again a little later.
    AwaitClose,
    /// Close every connection.
    Close(CloseCause),
    /// Nothing more.
    End,
}

/// The drain of a listener. See the table of the module.
#[derive(Debug, Clone, Copy)]
pub struct ListenerDrain {
    /// The timeout of the drain, or the end of the time in which connections close.
    until: Instant,
    is_closing: bool,
}

impl ListenerDrain {
    /// A drain that began at `start`.
    pub fn new(start: Instant, timeout: Duration) -> Self {
        Self { until: start + timeout, is_closing: false }
    }

    /// Decides what follows. `is_forced`: a second termination signal has arrived.
    pub fn step(&mut self, connections: usize, is_forced: bool, now: Instant) -> DrainStep {
        let is_over = now >= self.until;
        if connections == 0 || self.is_closing && is_over {
            return DrainStep::End;
        }
        if self.is_closing {
            return DrainStep::AwaitClose;
        }
        if !is_forced && !is_over {
            return DrainStep::EndDue;
        }
        (self.is_closing, self.until) = (true, now + CLOSE_TIMEOUT);
        DrainStep::Close(if is_forced { CloseCause::SecondSignal } else { CloseCause::Timeout })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listener_drains_until_its_connections_end_or_are_closed() {
        use DrainStep::{AwaitClose, Close, End, EndDue};
        let start = Instant::now();
        // Milliseconds, open connections, second signal; expected.
        let table: [&[(u64, usize, bool, DrainStep)]; 5] = [
            &[(0, 0, false, End)],
            &[(0, 2, false, EndDue), (3_999, 1, false, EndDue), (3_999, 0, false, End)],
            &[
                (0, 2, false, EndDue),
                (4_000, 1, false, Close(CloseCause::Timeout)),
                (4_010, 1, false, AwaitClose),
                (4_020, 0, false, End),
            ],
            &[
                (10, 2, true, Close(CloseCause::SecondSignal)),
                (509, 1, true, AwaitClose),
                (510, 1, true, End),
            ],
            // A suspended process sees both at once.
            &[(9_000, 2, true, Close(CloseCause::SecondSignal)), (9_500, 2, true, End)],
        ];
        for steps in table {
            let mut drain = ListenerDrain::new(start, Duration::from_secs(4));
            for &(ms, connections, is_forced, expected) in steps {
                let step = drain.step(connections, is_forced, start + Duration::from_millis(ms));
                assert_eq!(step, expected, "{ms} ms of {steps:?}");
            }
        }
    }

    #[test]
    fn watches_end_within_the_first_quarter_of_the_drain() {
        for (timeout, spread) in [(0, 0), (4, 1), (20, 5), (3600, 5)] {
            let expected = Duration::from_secs(spread);
            assert_eq!(watch_spread(Duration::from_secs(timeout)), expected, "{timeout} s");
        }
        let (now, spread) = (Instant::now(), Duration::from_secs(4));
        let mut stage = DrainStage::Open;
        assert!(stage.start(spread, now));
        assert!(!stage.start(Duration::ZERO, now + spread), "a second start changes nothing");
        assert_eq!(stage.watch_end(0.0), Some(now));
        assert_eq!(stage.watch_end(0.5), Some(now + spread / 2));
        let mut forced = DrainStage::Forced;
        assert!(!forced.start(spread, now));
        assert_eq!(forced.watch_end(0.5), None);
    }
}

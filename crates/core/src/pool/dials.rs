//! The connects of a class: how many an endpoint needs, those in progress, and the pauses between them.
//!
//! The pauses spread the connects of a class for clients that have proven nothing. Such a client can make the
//! apiserver end a connection with each request, because the apiserver sends a GOAWAY after a request that it cannot
//! authenticate.

use std::time::{Duration, Instant};

use super::EndpointKey;
use crate::backoff::Backoff;

/// Limit of concurrent connects of one class to one endpoint.
pub const MAX_PARALLEL_DIALS: usize = 4;
/// The pause after the second of two connects.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
/// Connects further apart than this are independent of each other.
const RECENT: Duration = Duration::from_secs(5);

/// Counts of the connections of one class to one endpoint. Draining connections are not included, so
/// that they cannot block their replacements.
#[derive(Debug, Clone, Copy)]
pub(super) struct ConnectionCounts {
    pub(super) live: usize,
    pub(super) suspect: usize,
    pub(super) dialing: usize,
    /// Free streams on live connections.
    pub(super) free_streams: usize,
    /// Limit of streams on one connection, at least 1.
    pub(super) stream_limit: usize,
    /// Requests that wait for a stream of this endpoint.
    pub(super) waiters: usize,
}

impl ConnectionCounts {
    /// Number of connections to open. The number of connections that are wanted is the greatest of these:
    ///
    /// * the number of live connections that are missing from `min`; only one if more than half of the
    ///   connections are suspect,
    /// * one, if some connections are suspect and none is live,
    /// * one, if less than a tenth of a connection's streams is free,
    /// * the number of connections that the waiting requests need.
    pub(super) fn to_open(self, min: usize, max: usize) -> usize {
        let total = self.live + self.suspect;
        let mut want = min.saturating_sub(self.live);
        if self.suspect > 0 && self.live == 0 {
            want = want.max(1);
        }
        // If more than half are suspect, the cause is the endpoint rather than a single connection. Then one
        // connect at a time tests whether the endpoint is reachable.
        if self.suspect * 2 > total {
            want = want.min(1);
        }
        if self.live > 0 && self.free_streams * 10 < self.stream_limit {
            want = want.max(1);
        }
        if self.waiters > self.free_streams {
            want = want.max((self.waiters - self.free_streams).div_ceil(self.stream_limit));
        }
        want.saturating_sub(self.dialing)
            .min(MAX_PARALLEL_DIALS.saturating_sub(self.dialing))
            .min(max.saturating_sub(total + self.dialing))
    }
}

/// The connects of one class. There are a few endpoints, so the entries are searched.
#[derive(Debug, Default)]
pub(super) struct Dials {
    /// Number of connects in progress. An endpoint without any has no entry.
    in_progress: Vec<(EndpointKey, usize)>,
    /// The recent connects, of a class whose connects are paced.
    pauses: Vec<(EndpointKey, DialPause)>,
}

impl Dials {
    /// Counts a connect until [`Self::ended`]. It delays the next one if the connects of the class are `paced`.
    pub(super) fn started(&mut self, endpoint: EndpointKey, paced: bool, now: Instant) {
        if paced {
            self.pauses.retain(|(_, pause)| !pause.is_over(now));
            if !self.pauses.iter().any(|(key, _)| *key == endpoint) {
                self.pauses.push((endpoint, DialPause::default()));
            }
            let pauses = self.pauses.iter_mut().filter(|(key, _)| *key == endpoint);
            pauses.for_each(|(_, pause)| pause.dialled(now));
        }
        match self.in_progress.iter_mut().find(|(key, _)| *key == endpoint) {
            Some((_, count)) => *count += 1,
            None => self.in_progress.push((endpoint, 1)),
        }
    }

    /// Ends a connect.
    pub(super) fn ended(&mut self, endpoint: EndpointKey) {
        self.in_progress.retain_mut(|(key, count)| {
            *count -= usize::from(*key == endpoint);
            *count > 0
        });
    }

    /// Number of connects in progress to the endpoint.
    pub(super) fn count(&self, endpoint: EndpointKey) -> usize {
        self.in_progress.iter().find(|(key, _)| *key == endpoint).map_or(0, |(_, count)| *count)
    }

    /// Whether a connect is in progress.
    pub(super) fn any(&self) -> bool {
        !self.in_progress.is_empty()
    }

    /// Until when no connect to the endpoint starts, if the connections there keep ending.
    pub(super) fn paused_until(
        &self,
        endpoint: EndpointKey,
        longest: Option<Duration>,
        now: Instant,
    ) -> Option<Instant> {
        let (_, pause) = self.pauses.iter().find(|(key, _)| *key == endpoint)?;
        pause.next_at(longest?).filter(|next| now < *next)
    }

    /// Forgets the recent connects to an endpoint, because the connections stay in use.
    pub(super) fn forget(&mut self, endpoint: EndpointKey) {
        self.pauses.retain(|(key, _)| *key != endpoint);
    }

    /// Forgets the recent connects to endpoints that are not in the set any more.
    pub(super) fn retain(&mut self, is_in_set: impl Fn(EndpointKey) -> bool) {
        self.pauses.retain(|(key, _)| is_in_set(*key));
    }
}

/// The recent connects to one endpoint.
#[derive(Debug, Clone, Copy)]
struct DialPause {
    last: Option<Instant>,
    /// Counts the connects in a row that came soon after the one before.
    in_a_row: Backoff,
}

impl Default for DialPause {
    fn default() -> Self {
        Self { last: None, in_a_row: Backoff::new(FIRST_PAUSE, Duration::MAX) }
    }
}

impl DialPause {
    /// When the next connect may start.
    fn next_at(&self, longest: Duration) -> Option<Instant> {
        let last = self.last.filter(|_| self.in_a_row.failures() > 0)?;
        Some(last + self.in_a_row.pause().min(longest))
    }

    /// Records a connect.
    fn dialled(&mut self, now: Instant) {
        if self.is_over(now) {
            self.in_a_row.reset();
        } else {
            self.in_a_row.failed();
        }
        self.last = Some(now);
    }

    /// Whether the connects have no influence on the next one any more.
    fn is_over(&self, now: Instant) -> bool {
        self.last.is_none_or(|last| now >= last + RECENT)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_longest_and_end_after_a_quiet_time() {
        let longest = Duration::from_secs(1);
        let mut pause = DialPause::default();
        let mut now = Instant::now();
        let mut pauses = Vec::new();
        for _ in 0..8 {
            let next = pause.next_at(longest).unwrap_or(now);
            pauses.push(next.saturating_duration_since(now).as_millis());
            now = now.max(next);
            pause.dialled(now);
        }
        // Two connects may follow each other, as when one connection becomes full.
        assert_eq!(pauses, [0, 0, 50, 100, 200, 400, 800, 1000]);
        assert!(!pause.is_over(now));
        now += RECENT;
        assert!(pause.is_over(now));
        pause.dialled(now);
        assert_eq!(pause.next_at(longest), None);
    }

    #[test]
    fn dials_of_several_endpoints_are_counted_apart() {
        let (a, b, now) = (EndpointKey(1), EndpointKey(2), Instant::now());
        let mut dials = Dials::default();
        for endpoint in [a, a, b] {
            dials.started(endpoint, true, now);
        }
        assert_eq!((dials.count(a), dials.count(b)), (2, 1));
        let longest = Some(Duration::from_secs(1));
        assert_eq!(dials.paused_until(a, longest, now), Some(now + FIRST_PAUSE));
        assert_eq!(dials.paused_until(b, longest, now), None);
        assert_eq!(dials.paused_until(a, None, now), None);
        dials.retain(|endpoint| endpoint == b);
        assert_eq!(dials.paused_until(a, longest, now), None);
        for endpoint in [b, a, a] {
            assert!(dials.any());
            dials.ended(endpoint);
        }
        assert!(!dials.any());
        dials.ended(a);
        assert_eq!((dials.count(a), dials.count(b)), (0, 0));
    }

    #[test]
    fn to_open_by_the_rules() {
        // live, suspect, dialing, free streams, waiters, (min, max), expected; 100 streams on a connection.
        for (live, suspect, dialing, free_streams, waiters, (min, max), expected) in [
            // The connections missing from the minimum, one after the other if most are suspect.
            (0, 0, 0, 0, 0, (1, 8), 1),
            (0, 0, 0, 0, 0, (3, 8), 3),
            (1, 0, 0, 100, 0, (3, 8), 2),
            (1, 0, 2, 100, 0, (3, 8), 0),
            (1, 2, 0, 100, 0, (4, 8), 1),
            (0, 2, 0, 0, 0, (0, 8), 1),
            (0, 2, 1, 0, 0, (3, 8), 0),
            (1, 1, 0, 100, 0, (3, 8), 2),
            // Nearly full.
            (1, 0, 0, 10, 0, (1, 8), 0),
            (1, 0, 0, 9, 0, (1, 8), 1),
            (1, 0, 1, 9, 0, (1, 8), 0),
            // The requests that wait.
            (1, 0, 0, 50, 50, (1, 8), 0),
            (1, 0, 0, 50, 51, (1, 8), 1),
            (1, 0, 0, 0, 250, (1, 8), 3),
            (1, 0, 1, 0, 250, (1, 8), 2),
            // The limits.
            (0, 0, 0, 0, 9_000, (1, 8), MAX_PARALLEL_DIALS),
            (0, 0, 3, 0, 9_000, (1, 8), 1),
            (7, 0, 0, 0, 9_000, (1, 8), 1),
            (6, 1, 1, 0, 9_000, (1, 8), 0),
            (8, 0, 0, 0, 9_000, (1, 8), 0),
            (9, 0, 0, 0, 9_000, (1, 8), 0),
        ] {
            let counts = ConnectionCounts {
                live,
                suspect,
                dialing,
                free_streams,
                stream_limit: 100,
                waiters,
            };
            assert_eq!(counts.to_open(min, max), expected, "{counts:?} {min} {max}");
        }
    }
}

//! The connects of a class: how many an endpoint needs, those in progress, and their pace.
//!
//! The connects of a class for clients that have proven nothing are paced. Such a client can make the apiserver end a
//! connection with each request, because the apiserver sends a GOAWAY after a request that it cannot authenticate.

use std::time::{Duration, Instant};

use super::EndpointKey;
use crate::admission::turns::Pace;
use crate::backoff::Backoff;

/// The pauses between connects to an endpoint that refuses the credential.
const REFUSED: Backoff =
    Backoff::new(Duration::from_secs(1), Duration::from_secs(20)).with_factors(0.8, 1.2);

/// Limit of concurrent connects of one class to one endpoint.
pub const MAX_PARALLEL_DIALS: usize = 4;

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
    /// When an endpoint with recent connects has its whole burst again, of a class whose connects are paced.
    full_burst_at: Vec<(EndpointKey, Instant)>,
    refusals: Vec<CredentialRefusal>,
}

/// An endpoint that has refused a credential.
#[derive(Debug)]
struct CredentialRefusal {
    endpoint: EndpointKey,
    generation: u64,
    backoff: Backoff,
    until: Instant,
}

impl Dials {
    /// Counts a connect until [`Self::ended`]. It may delay the next ones, if the class has a `pace`.
    pub(super) fn started(&mut self, endpoint: EndpointKey, pace: Option<Pace>, now: Instant) {
        if let Some(pace) = pace {
            self.full_burst_at.retain(|(_, at)| now < *at);
            match self.full_burst_at.iter_mut().find(|(key, _)| *key == endpoint) {
                Some((_, at)) => *at += pace.interval,
                None => self.full_burst_at.push((endpoint, now + pace.interval)),
            }
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
        pace: Option<Pace>,
        now: Instant,
    ) -> Option<Instant> {
        let (_, at) = self.full_burst_at.iter().find(|(key, _)| *key == endpoint)?;
        Some(pace?.start_at(Some(*at), now)).filter(|next| now < *next)
    }

    /// The endpoint has refused this generation of the credential. `random` is in 0..1.
    pub(super) fn refused(
        &mut self,
        endpoint: EndpointKey,
        generation: u64,
        random: f64,
        now: Instant,
    ) {
        self.refusals.retain(|refusal| refusal.generation == generation);
        let known = self.refusals.iter().position(|refusal| refusal.endpoint == endpoint);
        let mut backoff = known.map_or(REFUSED, |at| self.refusals.swap_remove(at).backoff);
        backoff.failed();
        let until = now + backoff.pause_at(random);
        self.refusals.push(CredentialRefusal { endpoint, generation, backoff, until });
    }

    /// Until when no connect to the endpoint starts, because it has refused this generation of the credential.
    pub(super) fn refused_until(
        &self,
        endpoint: EndpointKey,
        generation: u64,
        now: Instant,
    ) -> Option<Instant> {
        let is_meant = |refusal: &&CredentialRefusal| {
            refusal.endpoint == endpoint && refusal.generation == generation
        };
        self.refusals
            .iter()
            .find(is_meant)
            .map(|refusal| refusal.until)
            .filter(|until| now < *until)
    }

    /// Whether the endpoint has refused a credential of the class, and no connect follows yet.
    pub(super) fn is_refused(&self, endpoint: EndpointKey, now: Instant) -> bool {
        let refuses = |one: &CredentialRefusal| one.endpoint == endpoint && now < one.until;
        self.refusals.iter().any(refuses)
    }

    /// Forgets the recent connects to an endpoint, because the connections stay in use.
    pub(super) fn forget(&mut self, endpoint: EndpointKey) {
        self.full_burst_at.retain(|(key, _)| *key != endpoint);
    }

    /// Forgets the recent connects to endpoints that are not in the set any more.
    pub(super) fn retain(&mut self, is_in_set: impl Fn(EndpointKey) -> bool) {
        self.full_burst_at.retain(|(key, _)| is_in_set(*key));
        self.refusals.retain(|refusal| is_in_set(refusal.endpoint));
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const PACE: Option<Pace> = Some(Pace { interval: Duration::from_millis(200), burst: 3 });

    #[test]
    fn connects_wait_for_their_interval_after_a_burst_and_a_quiet_time_gives_it_back() {
        let start = Instant::now();
        let (endpoint, mut dials, mut now) = (EndpointKey(1), Dials::default(), start);
        let mut connect = |now: &mut Instant| {
            *now = dials.paused_until(endpoint, PACE, *now).unwrap_or(*now);
            dials.started(endpoint, PACE, *now);
            (*now - start).as_millis()
        };
        let at: Vec<_> = (0..6).map(|_| connect(&mut now)).collect();
        assert_eq!(at, [0, 0, 0, 200, 400, 600]);
        now += Duration::from_millis(450);
        let at: Vec<_> = (0..3).map(|_| connect(&mut now)).collect();
        assert_eq!(at, [1_050, 1_050, 1_200]);
        now += Duration::from_secs(60);
        let at: Vec<_> = (0..4).map(|_| connect(&mut now)).collect();
        assert_eq!(at, [61_200, 61_200, 61_200, 61_400]);
    }

    #[test]
    fn dials_of_several_endpoints_are_counted_apart() {
        let (a, b, now) = (EndpointKey(1), EndpointKey(2), Instant::now());
        let mut dials = Dials::default();
        for endpoint in [a, a, a, b] {
            dials.started(endpoint, PACE, now);
        }
        assert_eq!((dials.count(a), dials.count(b)), (3, 1));
        assert_eq!(dials.paused_until(a, PACE, now), Some(now + Duration::from_millis(200)));
        assert_eq!(dials.paused_until(b, PACE, now), None);
        assert_eq!(dials.paused_until(a, None, now), None);
        dials.retain(|endpoint| endpoint == b);
        assert_eq!(dials.paused_until(a, PACE, now), None);
        for endpoint in [b, a, a, a] {
            assert!(dials.any());
            dials.ended(endpoint);
        }
        assert!(!dials.any());
        dials.ended(a);
        assert_eq!((dials.count(a), dials.count(b)), (0, 0));
    }

    #[test]
    fn connects_pause_for_longer_after_each_refusal_until_the_credential_changes() {
        let (a, b, start) = (EndpointKey(1), EndpointKey(2), Instant::now());
        let mut dials = Dials::default();
        let mut now = start;
        for pause in [1, 2, 4, 8, 16, 20, 20] {
            dials.refused(a, 7, 0.5, now);
            let until = now + Duration::from_secs(pause);
            assert_eq!(dials.refused_until(a, 7, now), Some(until));
            assert_eq!(
                (dials.refused_until(b, 7, now), dials.refused_until(a, 8, now)),
                (None, None)
            );
            assert_eq!(dials.refused_until(a, 7, until), None);
            now = until;
        }
        dials.refused(a, 8, 0.5, now);
        assert_eq!(dials.refused_until(a, 8, now), Some(now + Duration::from_secs(1)));
        dials.retain(|endpoint| endpoint == b);
        assert_eq!(dials.refused_until(a, 8, now), None);
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

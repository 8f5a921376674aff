//! Picks a connection for a request, or an endpoint for a passthrough flow: power of two choices by load.
//!
//! The less loaded of two random candidates is picked. The load is spread almost as evenly as by comparing
//! all candidates, and the nodes do not all pick the same one (Mitzenmacher, *The Power of Two Choices in
//! Randomized Load Balancing*, 2001). The load of a connection is the number of its outstanding streams,
//! weighted by peak-EWMA latency, so a slow apiserver receives fewer requests. The load of an endpoint is
//! the number of its passthrough flows.
//!
//! Time and randomness are arguments, so thousands of nodes can be simulated.

use std::cmp::Ordering;
use std::time::{Duration, Instant};

/// Time in which an old measurement loses 63 % of its weight.
const DECAY: Duration = Duration::from_secs(10);

/// Duration of the slow start of a recovered endpoint.
pub const SLOW_START: Duration = Duration::from_secs(30);

/// Share of its usual picks that an endpoint gets at the beginning of its slow start.
const FIRST_SHARE: f64 = 0.1;

/// Latency assumed before the first response, in seconds: that of a local apiserver.
const INITIAL: f64 = 0.001;

/// Moving average of latency that follows every peak at once and decays exponentially.
#[derive(Debug, Clone, Copy)]
pub struct PeakEwma {
    seconds: f64,
    at: Instant,
}

impl PeakEwma {
    /// Starts at [`INITIAL`].
    pub fn new(now: Instant) -> Self {
        Self { seconds: INITIAL, at: now }
    }

    /// Records a sample.
    pub fn observe(&mut self, latency: Duration, now: Instant) {
        let sample = latency.as_secs_f64();
        self.seconds = if sample > self.value(now) {
            sample
        } else {
            let keep = self.weight(now);
            self.seconds * keep + sample * (1.0 - keep)
        };
        self.at = now;
    }

    /// The value at `now`, in seconds. A peak decays even without new samples. Otherwise a connection that
    /// was slow once would never be picked again.
    pub fn value(&self, now: Instant) -> f64 {
        INITIAL + (self.seconds - INITIAL) * self.weight(now)
    }

    /// Weight of the stored average at `now`, in 0..=1.
    fn weight(&self, now: Instant) -> f64 {
        let age = now.saturating_duration_since(self.at);
        (-age.as_secs_f64() / DECAY.as_secs_f64()).exp()
    }
}

/// Load of a candidate: lower is better.
pub fn cost(outstanding: usize, latency: f64) -> f64 {
    (outstanding as f64 + 1.0) * latency
}

/// Share of its usual picks that an endpoint gets `ready_for` after its recovery. Its caches are cold, and
/// without a slow start all nodes would return to it at the same moment.
///
/// Dividing the cost by the share would not work. Most nodes have no outstanding requests when they pick,
/// so all of them would avoid the endpoint until its share is 1 and then return at the same moment.
pub fn slow_start(ready_for: Duration) -> f64 {
    let done = ready_for.as_secs_f64() / SLOW_START.as_secs_f64();
    (FIRST_SHARE + (1.0 - FIRST_SHARE) * done).min(1.0)
}

/// Picks the less loaded of two random candidates; `None` if there is no candidate.
///
/// One pass without an allocation: the two candidates are a reservoir sample (Vitter, *Random Sampling
/// with a Reservoir*, 1985).
pub fn pick<T>(
    candidates: impl Iterator<Item = T>,
    rng: &mut fastrand::Rng,
    cost: impl Fn(&T) -> f64,
) -> Option<T> {
    let mut kept: [Option<T>; 2] = [None, None];
    for (seen, candidate) in candidates.enumerate() {
        if seen < 2 {
            kept[seen] = Some(candidate);
        } else {
            let slot = rng.usize(..=seen);
            if slot < 2 {
                kept[slot] = Some(candidate);
            }
        }
    }
    let [first, second] = kept;
    let (Some(a), Some(b)) = (&first, &second) else { return first };
    let a_is_picked = match cost(a).total_cmp(&cost(b)) {
        Ordering::Less => true,
        Ordering::Greater => false,
        Ordering::Equal => rng.bool(),
    };
    if a_is_picked { first } else { second }
}

/// [`pick`] among candidates of which some may be in slow start; `share` returns the share of a candidate.
///
/// The picked candidate is kept with the probability of its share. Otherwise one of those with the greatest
/// share is picked, which are the candidates that are not in slow start. So each candidate in slow start gets
/// at most its share of its usual picks, also if several are. If all are, the shares count relative to the
/// greatest one: candidates that have recovered together are picked as usual.
pub fn pick_by_share<T>(
    candidates: impl Iterator<Item = T> + Clone,
    rng: &mut fastrand::Rng,
    cost: impl Fn(&T) -> f64,
    share: impl Fn(&T) -> f64,
) -> Option<T> {
    let picked = pick(candidates.clone(), rng, &cost)?;
    let picked_share = share(&picked);
    if picked_share >= 1.0 {
        return Some(picked);
    }
    let greatest = candidates.clone().map(|candidate| share(&candidate)).fold(0.0, f64::max);
    if rng.f64() * greatest < picked_share {
        return Some(picked);
    }
    pick(candidates.filter(|candidate| share(candidate) >= greatest), rng, cost).or(Some(picked))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BinaryHeap;

    #[test]
    fn pick_of_none_or_one_candidate_returns_it() {
        let mut rng = fastrand::Rng::with_seed(1);
        assert_eq!(pick(std::iter::empty::<u8>(), &mut rng, |_| 0.0), None);
        assert_eq!(pick([7].into_iter(), &mut rng, |_| 0.0), Some(7));
    }

    #[test]
    fn pick_of_two_returns_the_less_loaded() {
        let mut rng = fastrand::Rng::with_seed(1);
        for _ in 0..100 {
            assert_eq!(pick([5, 3].into_iter(), &mut rng, |&c| f64::from(c)), Some(3));
        }
    }

    #[test]
    fn pick_samples_every_candidate_evenly() {
        let mut rng = fastrand::Rng::with_seed(1);
        let mut hits = [0; 10];
        for _ in 0..10_000 {
            hits[pick(0..10_usize, &mut rng, |_| 1.0).unwrap()] += 1;
        }
        assert!(hits.iter().all(|&n| (800..1200).contains(&n)), "{hits:?}");
    }

    #[test]
    fn slow_start_raises_the_share_of_an_endpoint_gradually() {
        assert!((slow_start(Duration::ZERO) - FIRST_SHARE).abs() < 1e-9);
        assert!((slow_start(SLOW_START / 2) - 0.55).abs() < 1e-9);
        assert!(slow_start(SLOW_START) >= 1.0 && slow_start(SLOW_START * 9) <= 1.0);
        // The nodes are idle, and server 0 of three has recovered. It is picked more often as its share
        // grows.
        let mut rng = fastrand::Rng::with_seed(1);
        let mut before = -1.0;
        for share in [0.1, 0.4, 0.7, 1.0] {
            let mut picks = 0_u32;
            for _ in 0..10_000 {
                let share = |&server: &usize| if server == 0 { share } else { 1.0 };
                let picked = pick_by_share(0..3_usize, &mut rng, |_| cost(0, INITIAL), share);
                picks += u32::from(picked == Some(0));
            }
            let picked = f64::from(picks) / 10_000.0;
            assert!((picked - share / 3.0).abs() < 0.03, "{share}: {picked}");
            assert!(picked > before);
            before = picked;
        }
        // A single endpoint takes every request.
        for _ in 0..100 {
            assert_eq!(pick_by_share([5].into_iter(), &mut rng, |_| 1.0, |_| 0.1), Some(5));
        }
    }

    /// The nodes are idle. Of each table row: the shares of the servers, and the expected part of each in the picks.
    #[test]
    fn pick_by_share_gives_each_server_in_slow_start_at_most_its_share() {
        const THIRD: f64 = 1.0 / 3.0;
        const PICKS: u32 = 100_000;
        let table: &[(&[f64], &[f64])] = &[
            // One of three, at the beginning, in the middle and at the end of the ramp.
            (&[0.1, 1.0, 1.0], &[0.1 * THIRD, 0.483, 0.483]),
            (&[0.55, 1.0, 1.0], &[0.55 * THIRD, 0.408, 0.408]),
            (&[0.99, 1.0, 1.0], &[0.99 * THIRD, 0.335, 0.335]),
            // Two of three.
            (&[0.1, 0.1, 1.0], &[0.1 * THIRD, 0.1 * THIRD, 0.933]),
            (&[0.1, 0.55, 1.0], &[0.1 * THIRD, 0.55 * THIRD, 0.783]),
            (&[0.55, 0.9, 1.0], &[0.55 * THIRD, 0.9 * THIRD, 0.517]),
            // Four of five.
            (&[0.1, 0.1, 0.1, 0.1, 1.0], &[0.02, 0.02, 0.02, 0.02, 0.92]),
            // One of two.
            (&[0.1, 1.0], &[0.05, 0.95]),
            (&[0.55, 1.0], &[0.275, 0.725]),
            // All, which have recovered together.
            (&[0.1, 0.1, 0.1], &[THIRD, THIRD, THIRD]),
            (&[0.55, 0.55], &[0.5, 0.5]),
            // All, one after the other: relative to the greatest share.
            (&[0.1, 0.4, 0.8], &[0.125 * THIRD, 0.5 * THIRD, 0.792]),
            (&[0.1, 0.5], &[0.1, 0.9]),
            // None.
            (&[1.0, 1.0, 1.0], &[THIRD, THIRD, THIRD]),
        ];
        let mut rng = fastrand::Rng::with_seed(7);
        for (shares, expected) in table {
            let mut picks = vec![0_u32; shares.len()];
            for _ in 0..PICKS {
                let share = |&server: &usize| shares[server];
                let picked = pick_by_share(0..shares.len(), &mut rng, |_| cost(0, INITIAL), share);
                picks[picked.unwrap()] += 1;
            }
            let parts: Vec<_> =
                picks.iter().map(|&count| f64::from(count) / f64::from(PICKS)).collect();
            println!("shares {shares:.2?}: {parts:.3?} of the picks, expected {expected:.3?}");
            for (part, expected) in parts.iter().zip(*expected) {
                // Three standard deviations of a count are below 0.005.
                assert!((part - expected).abs() < 0.006, "{shares:?}: {parts:?}");
            }
        }
    }

    /// A server in slow start has no outstanding requests, so it would win each pick in which it is a candidate.
    #[test]
    fn pick_by_share_among_loaded_servers_bounds_those_in_slow_start() {
        let (shares, outstanding) = ([0.1, 0.1, 1.0], [0, 0, 50]);
        let mut rng = fastrand::Rng::with_seed(3);
        let mut picks = [0_u32; 3];
        for _ in 0..10_000 {
            let cost = |&server: &usize| cost(outstanding[server], INITIAL);
            let picked = pick_by_share(0..3_usize, &mut rng, cost, |&server| shares[server]);
            picks[picked.unwrap()] += 1;
        }
        assert!(picks[0] + picks[1] <= 1_100, "a tenth of the picks: {picks:?}");
    }

    #[test]
    fn peak_ewma_follows_a_peak_at_once_and_decays() {
        let start = Instant::now();
        let mut ewma = PeakEwma::new(start);
        ewma.observe(Duration::from_millis(500), start);
        assert!(ewma.value(start) > 0.49);
        let later = start + Duration::from_secs(60);
        assert!(ewma.value(later) < 0.005, "{}", ewma.value(later));
        ewma.observe(Duration::from_millis(2), later);
        assert!(ewma.value(later) < 0.005);
    }

    /// 1,000 nodes send 20 requests a second each to three servers, of which the third is five times as
    /// slow as the others.
    #[test]
    fn pick_by_simulated_nodes_gives_a_slow_server_fewer_requests() {
        let service = [0.005, 0.005, 0.025];
        let mut rng = fastrand::Rng::with_seed(42);
        let start = Instant::now();
        let mut nodes: Vec<[(usize, PeakEwma); 3]> =
            vec![std::array::from_fn(|_| (0, PeakEwma::new(start))); 1000];
        // (negative end, node, server, start); times in µs. The greatest element of the heap ends first.
        let mut running: BinaryHeap<(i64, usize, usize, i64)> = BinaryHeap::new();
        let mut taken = [0_u32; 3];
        for step in 0..200_000_i64 {
            let now_us = step * 50;
            while let Some(&(end, node, server, started)) = running.peek()
                && -end <= now_us
            {
                running.pop();
                let latency = Duration::from_micros((-end - started) as u64);
                let at = start + Duration::from_micros(-end as u64);
                nodes[node][server].0 -= 1;
                nodes[node][server].1.observe(latency, at);
            }
            let node = rng.usize(..1000);
            let now = start + Duration::from_micros(now_us as u64);
            let server = pick(0..3_usize, &mut rng, |&s| {
                cost(nodes[node][s].0, nodes[node][s].1.value(now))
            })
            .unwrap();
            nodes[node][server].0 += 1;
            taken[server] += 1;
            let duration = (service[server] * 1e6 * (0.5 + rng.f64())) as i64;
            running.push((-(now_us + duration), node, server, now_us));
        }
        let (a, b, slow) = (f64::from(taken[0]), f64::from(taken[1]), f64::from(taken[2]));
        assert!((a / b - 1.0).abs() < 0.1, "{taken:?}");
        assert!(slow < 0.5 * a, "{taken:?}");
        assert!(slow > 0.0, "the slow server still gets requests: {taken:?}");
    }
}

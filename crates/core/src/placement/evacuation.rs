//! Moves watches away from an apiserver whose `/readyz` fails while their streams still work.
//!
//! An apiserver that has lost its etcd answers PINGs and keeps its watches open, but delivers no events.
//! Closing these watches would make the outage worse. The client of a watch that can be resumed does not
//! notice a move, and a watch that no other endpoint accepts stays where it is. So a low threshold does no
//! harm:
//!
//! | latest `/readyz` of the endpoint | watches that move |
//! |---|---|
//! | ok | none |
//! | failed, or outstanding for half of its timeout | those that delivered events and have fallen silent |
//! | failed `fall` times in a row: the endpoint is degraded | all that can be resumed |
//!
//! A target must be ready, and a `/readyz` request that was sent to it at the first failure or later must have been
//! ok. The prober asks the other endpoints at once, in the same instant if the clock is coarse. If all apiservers lose
//! etcd together, no endpoint qualifies and nothing moves.
//!
//! All moves are offered within [`WINDOW`], after a random delay of up to [`START_JITTER`]. The pool spreads
//! the watches over the targets. When the apiserver has recovered, [`super::rebalance`] moves watches back
//! slowly.

use std::time::{Duration, Instant};

use super::MoveEligibility;
use crate::endpoint_health::EndpointReadiness;
use crate::endpoint_state::EndpointState;
use crate::pool::EndpointKey;

/// Upper limit of the random delay before an evacuation, because other nodes see the same failure at the
/// same time.
pub const START_JITTER: Duration = Duration::from_millis(200);
/// Time within which every watch that should move is offered a move.
pub const WINDOW: Duration = Duration::from_millis(400);
/// Shortest pause between two offers.
const OFFER_PAUSE: Duration = Duration::from_millis(100);

/// Whether an endpoint may take the watches of one whose probe has failed since `failing_since`.
fn may_take_over(target: &EndpointReadiness, failing_since: Instant) -> bool {
    target.state == EndpointState::Ready
        && target.probe_failing_since.is_none()
        && target.last_ready_probe.is_some_and(|asked_at| asked_at >= failing_since)
}

/// Which watches should leave an endpoint.
fn leaving_watches(source: &EndpointReadiness) -> Option<MoveEligibility> {
    source.probe_failing_since?;
    match source.state {
        EndpointState::Degraded => Some(MoveEligibility::All),
        // A stopped process is suspect long before its connections count as stopped.
        EndpointState::Ready | EndpointState::Connecting | EndpointState::Suspect => {
            Some(MoveEligibility::Silent)
        }
        // The connections are lost.
        EndpointState::Unverified
        | EndpointState::Ejected
        | EndpointState::NoH2
        | EndpointState::Leaving => None,
    }
}

/// Decides by the table of this module. Returns for each endpoint to evacuate its index, the watches that
/// leave, and the indices of the targets.
pub fn decide(
    endpoints: &[EndpointReadiness],
) -> impl Iterator<Item = (usize, MoveEligibility, Vec<usize>)> + '_ {
    endpoints.iter().enumerate().filter_map(|(index, source)| {
        let (eligible, failing_since) = (leaving_watches(source)?, source.probe_failing_since?);
        let targets: Vec<_> = (0..endpoints.len())
            .filter(|&other| other != index && may_take_over(&endpoints[other], failing_since))
            .collect();
        (!targets.is_empty()).then_some((index, eligible, targets))
    })
}

/// Number of moves to offer to this number of watches, when `elapsed` of the `remaining` time is over.
fn due_moves(watches: usize, elapsed: Duration, remaining: Duration) -> usize {
    let share = if elapsed < remaining { elapsed.div_duration_f64(remaining) } else { 1.0 };
    (watches as f64 * share).ceil() as usize
}

/// An evacuation that is due.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DueEvacuation {
    /// The endpoint that watches leave.
    pub endpoint: EndpointKey,
    /// The watches that leave it.
    pub eligible: MoveEligibility,
}

/// What the caller does. Evacuations and connections are indices into the arguments of [`ActiveEvacuations::tick`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EvacuationEffect {
    /// Withdraws the moves that are offered on the connections to the endpoint.
    Withdraw(EndpointKey),
    /// An evacuation has begun, which concerns this number of watches.
    Begun {
        /// The evacuation.
        evacuation: usize,
        /// Number of watches on all connections to the endpoint.
        watches: usize,
    },
    /// Offers moves to the targets of the evacuation.
    Offer {
        /// The connection whose watches may move.
        connection: usize,
        /// The evacuation.
        evacuation: usize,
        /// Number of watches that may move.
        count: usize,
    },
}

/// The evacuations in progress of one class of a pool.
#[derive(Debug, Default)]
pub struct ActiveEvacuations {
    active: Vec<ActiveEvacuation>,
}

#[derive(Debug)]
struct ActiveEvacuation {
    due: DueEvacuation,
    /// Not before this time. At first, when the window begins.
    next_offer: Instant,
    window_end: Instant,
}

impl ActiveEvacuations {
    /// Whether no evacuation is in progress.
    pub fn is_empty(&self) -> bool {
        self.active.is_empty()
    }

    /// Starts, continues and ends evacuations, so that the active ones are those that are `due`. `connections` have
    /// the endpoint and the number of watches of each connection.
    pub fn tick(
        &mut self,
        connections: &[(EndpointKey, usize)],
        due: &[DueEvacuation],
        now: Instant,
        rng: &mut fastrand::Rng,
    ) -> Vec<EvacuationEffect> {
        let mut effects = Vec::new();
        let is_over = |active: &mut ActiveEvacuation| {
            !due.iter().any(|due| due.endpoint == active.due.endpoint)
        };
        for ended in self.active.extract_if(.., is_over) {
            effects.push(EvacuationEffect::Withdraw(ended.due.endpoint));
        }
        for (evacuation, due) in due.iter().enumerate() {
            let with_watches = connections
                .iter()
                .enumerate()
                .filter(|(_, (endpoint, watches))| *endpoint == due.endpoint && *watches > 0)
                .map(|(connection, (_, watches))| (connection, *watches));
            let is_same = |active: &&mut ActiveEvacuation| active.due.endpoint == due.endpoint;
            let Some(active) = self.active.iter_mut().find(is_same) else {
                let next_offer = now + START_JITTER.mul_f64(rng.f64());
                let window_end = next_offer + WINDOW;
                self.active.push(ActiveEvacuation { due: *due, next_offer, window_end });
                let watches = with_watches.map(|(_, watches)| watches).sum();
                effects.push(EvacuationEffect::Begun { evacuation, watches });
                continue;
            };
            if active.due != *due {
                // Other watches leave it now, without another delay.
                active.due = *due;
                active.window_end = now + WINDOW;
            }
            if now < active.next_offer {
                continue;
            }
            let elapsed = OFFER_PAUSE + now.duration_since(active.next_offer);
            let remaining = active.window_end.saturating_duration_since(active.next_offer);
            active.next_offer = now + OFFER_PAUSE;
            effects.extend(with_watches.map(|(connection, watches)| EvacuationEffect::Offer {
                connection,
                evacuation,
                count: due_moves(watches, elapsed, remaining),
            }));
        }
        effects
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use EndpointState::{Connecting, Degraded, Ejected, Leaving, NoH2, Ready, Suspect};

    #[test]
    fn decide_evacuates_by_the_table() {
        let start = Instant::now();
        let at = |second: u64| start + Duration::from_secs(second);
        let readiness = |state, failing_since: Option<u64>, last_ready_probe: Option<u64>| {
            let probe_failing_since = failing_since.map(at);
            EndpointReadiness {
                state,
                probe_failing_since,
                last_ready_probe: last_ready_probe.map(at),
            }
        };
        // The probe of the source has failed since 20 s.
        let confirmed = readiness(Ready, None, Some(20));
        let unconfirmed = readiness(Ready, None, Some(19));
        for (source, others, expected) in [
            // The probe of the source is ok.
            (readiness(Ready, None, Some(5)), [confirmed, confirmed], None),
            // One probe failed or is overdue: silent watches move.
            (
                readiness(Ready, Some(20), Some(10)),
                [confirmed, confirmed],
                Some((MoveEligibility::Silent, vec![1, 2])),
            ),
            (
                readiness(Connecting, Some(20), None),
                [confirmed, confirmed],
                Some((MoveEligibility::Silent, vec![1, 2])),
            ),
            // The source is degraded: all watches move.
            (
                readiness(Degraded, Some(20), Some(10)),
                [confirmed, confirmed],
                Some((MoveEligibility::All, vec![1, 2])),
            ),
            (
                readiness(Degraded, Some(20), None),
                [unconfirmed, confirmed],
                Some((MoveEligibility::All, vec![2])),
            ),
            // No other endpoint has had an ok probe since the failure.
            (readiness(Degraded, Some(20), Some(10)), [unconfirmed, unconfirmed], None),
            (
                readiness(Ready, Some(20), Some(10)),
                [unconfirmed, readiness(Ready, None, None)],
                None,
            ),
            // The probes of all endpoints fail, one of them later.
            (
                readiness(Degraded, Some(20), Some(10)),
                [readiness(Ready, Some(21), Some(20)), readiness(Degraded, Some(20), Some(19))],
                None,
            ),
            // The others are not ready.
            (
                readiness(Degraded, Some(20), None),
                [readiness(Degraded, Some(5), Some(21)), readiness(Connecting, None, Some(21))],
                None,
            ),
            (
                readiness(Degraded, Some(20), None),
                [readiness(Ejected, None, Some(21)), readiness(Leaving, None, Some(21))],
                None,
            ),
            // A stopped process.
            (
                readiness(Suspect, Some(20), None),
                [confirmed, confirmed],
                Some((MoveEligibility::Silent, vec![1, 2])),
            ),
            // The health of the connections decides.
            (readiness(Ejected, Some(20), None), [confirmed, confirmed], None),
            (readiness(NoH2, Some(20), None), [confirmed, confirmed], None),
            (readiness(Leaving, Some(20), None), [confirmed, confirmed], None),
        ] {
            let all = [source, others[0], others[1]];
            let decision = decide(&all).find(|(index, ..)| *index == 0);
            let decision = decision.map(|(_, eligible, targets)| (eligible, targets));
            assert_eq!(decision, expected, "{all:?}");
        }
    }

    #[test]
    fn decide_without_a_target_evacuates_nothing() {
        let probe_failing_since = Some(Instant::now());
        let alone =
            EndpointReadiness { state: Degraded, probe_failing_since, last_ready_probe: None };
        assert_eq!(decide(&[alone]).count(), 0);
        assert_eq!(decide(&[]).count(), 0);
    }

    /// Watches that take each move that is offered, `pause` after `pause`, from the begin of the evacuation on. Returns
    /// the time when the last one has left, and the largest number that left at a time.
    fn leave(watches: usize, pause: Duration, seed: u64) -> (Duration, usize) {
        let start = Instant::now();
        let due = [DueEvacuation { endpoint: EndpointKey(1), eligible: MoveEligibility::Silent }];
        let mut evacuations = ActiveEvacuations::default();
        let mut rng = fastrand::Rng::with_seed(seed);
        let (mut left, mut at, mut took, mut most) = (watches, Duration::ZERO, Duration::ZERO, 0);
        while left > 0 {
            let connections = [(EndpointKey(1), left), (EndpointKey(2), 7)];
            for effect in evacuations.tick(&connections, &due, start + at, &mut rng) {
                match effect {
                    EvacuationEffect::Offer { connection: 0, evacuation: 0, count } => {
                        (left, took) = (left - count, at);
                        most = most.max(count);
                    }
                    EvacuationEffect::Begun { evacuation: 0, watches: of } if at.is_zero() => {
                        assert_eq!(of, watches);
                    }
                    effect => panic!("{effect:?} after {at:?}"),
                }
            }
            at += pause;
        }
        (took, most)
    }

    #[test]
    fn all_watches_are_offered_a_move_within_the_window() {
        for watches in [1, 2, 3, 5, 10, 400] {
            for pause in [50, 100, 170, 200].map(Duration::from_millis) {
                for seed in 0..20 {
                    let (took, most) = leave(watches, pause, seed);
                    assert!(
                        took < START_JITTER + WINDOW + pause,
                        "{watches} every {pause:?}: {took:?}"
                    );
                    assert!(watches < 100 || most * 4 <= watches * 3, "{most} of {watches}");
                }
            }
        }
    }

    #[test]
    fn endpoint_that_becomes_degraded_keeps_its_evacuation() {
        let start = Instant::now();
        let source = EndpointKey(1);
        let silent = [DueEvacuation { endpoint: source, eligible: MoveEligibility::Silent }];
        let all = [DueEvacuation { eligible: MoveEligibility::All, ..silent[0] }];
        let mut evacuations = ActiveEvacuations::default();
        let mut rng = fastrand::Rng::with_seed(1);
        let mut tick = |due: &[_], ms| {
            let now = start + Duration::from_millis(ms);
            evacuations.tick(&[(source, 100)], due, now, &mut rng)
        };
        let offer = |count| EvacuationEffect::Offer { connection: 0, evacuation: 0, count };
        assert_eq!(tick(&[], 0), []);
        let begun = EvacuationEffect::Begun { evacuation: 0, watches: 100 };
        assert_eq!(tick(&silent, 0), [begun]);
        assert_eq!(tick(&silent, 800), [offer(100)], "those that are silent");
        assert_eq!(tick(&all, 900), [offer(25)], "the window begins anew, without a delay");
        assert_eq!(tick(&all, 950), []);
        assert_eq!(tick(&all, 1_300), [offer(100)]);
        assert_eq!(tick(&[], 1_350), [EvacuationEffect::Withdraw(source)]);
        assert_eq!(tick(&[], 1_400), []);
    }
}

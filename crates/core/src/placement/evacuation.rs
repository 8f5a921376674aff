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

/// Number of moves to offer to this number of watches, `elapsed` after the last offer.
pub fn due_moves(watches: usize, elapsed: Duration) -> usize {
    let share = (elapsed.as_secs_f64() / WINDOW.as_secs_f64()).min(1.0);
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
    last_offer: Instant,
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
        for ended in self.active.extract_if(.., |active| !due.contains(&active.due)) {
            effects.push(EvacuationEffect::Withdraw(ended.due.endpoint));
        }
        for (evacuation, due) in due.iter().enumerate() {
            let with_watches = connections
                .iter()
                .enumerate()
                .filter(|(_, (endpoint, watches))| *endpoint == due.endpoint && *watches > 0)
                .map(|(connection, (_, watches))| (connection, *watches));
            let Some(active) = self.active.iter_mut().find(|active| active.due == *due) else {
                let last_offer = now + START_JITTER.mul_f64(rng.f64());
                self.active.push(ActiveEvacuation { due: *due, last_offer });
                let watches = with_watches.map(|(_, watches)| watches).sum();
                effects.push(EvacuationEffect::Begun { evacuation, watches });
                continue;
            };
            let elapsed = now.saturating_duration_since(active.last_offer);
            if elapsed < OFFER_PAUSE {
                continue;
            }
            active.last_offer = now;
            effects.extend(with_watches.map(|(connection, watches)| EvacuationEffect::Offer {
                connection,
                evacuation,
                count: due_moves(watches, elapsed),
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

    #[test]
    fn due_moves_sum_to_all_watches_over_the_window() {
        for watches in [0, 1, 3, 100, 6_400] {
            let step = WINDOW / 4;
            let offered: usize = (0..4).map(|_| due_moves(watches, step)).sum();
            assert!((watches..=watches + 4).contains(&offered), "{offered} of {watches}");
            assert_eq!(due_moves(watches, WINDOW * 9), watches);
            assert_eq!(due_moves(watches, Duration::ZERO), 0);
        }
    }

    #[test]
    fn tick_offers_all_watches_within_the_window_and_withdraws_what_is_not_due() {
        let start = Instant::now();
        let (source, other) = (EndpointKey(1), EndpointKey(2));
        let due = [DueEvacuation { endpoint: source, eligible: MoveEligibility::Silent }];
        let connections = [(source, 100), (other, 7), (source, 0)];
        let mut evacuations = ActiveEvacuations::default();
        let mut rng = fastrand::Rng::with_seed(1);
        let mut tick = |due: &[_], ms| {
            let now = start + Duration::from_millis(ms);
            evacuations.tick(&connections, due, now, &mut rng)
        };
        assert_eq!(tick(&[], 0), []);
        assert_eq!(tick(&due, 0), [EvacuationEffect::Begun { evacuation: 0, watches: 100 }]);
        let mut offered = 0;
        for ms in (0..=800).step_by(50) {
            for effect in tick(&due, ms) {
                let EvacuationEffect::Offer { connection: 0, evacuation: 0, count } = effect else {
                    panic!("{effect:?}")
                };
                assert!(count <= 50, "{count} at {ms} ms");
                offered += count;
            }
        }
        assert!(offered >= 100, "{offered} of 100");
        // Now all watches may move.
        let all = [DueEvacuation { eligible: MoveEligibility::All, ..due[0] }];
        let begun = EvacuationEffect::Begun { evacuation: 0, watches: 100 };
        assert_eq!(tick(&all, 900), [EvacuationEffect::Withdraw(source), begun]);
        assert_eq!(tick(&[], 950), [EvacuationEffect::Withdraw(source)]);
        assert_eq!(tick(&[], 1_000), []);
    }
}

//! Moves watches away from an apiserver whose `/readyz` fails, while their streams still work.
//!
//! An apiserver that has lost its etcd answers PINGs and keeps its watches open, but delivers no
//! events. To close these watches would make the outage worse. To move a watch that can be resumed is
//! invisible to its client, and a watch that no other endpoint takes stays where it is. So the
//! threshold is low:
//!
//! | the latest `/readyz` of the endpoint | watches that move |
//! |---|---|
//! | ok | none |
//! | failed, or outstanding for half of its timeout | those that delivered events and have fallen silent |
//! | failed `fall` times: the endpoint is degraded | all that can |
//!
//! A target must be ready, and its own `/readyz` must have been asked after the first failure and
//! been ok; the prober asks the other endpoints at once. Where all apiservers lose etcd together no
//! endpoint qualifies, and nothing moves.
//!
//! All moves are offered within [`WINDOW`], after a random delay of up to [`START_JITTER`]; the picker
//! spreads the watches over the ready endpoints. [`super::rebalance`] moves watches back slowly once
//! the apiserver has recovered.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::connection::{Connection, ConnectionState};
use super::endpoint::{Endpoint, EndpointReadiness, EndpointState};
use super::watch_moves::MoveEligibility;

/// An evacuation starts within this time of its cause, chosen at random: other nodes see the same
/// failure at the same time.
pub const START_JITTER: Duration = Duration::from_millis(200);
/// Time in which every watch that should move is offered a move.
pub const WINDOW: Duration = Duration::from_millis(400);
/// Least pause between two offers.
const OFFER_PAUSE: Duration = Duration::from_millis(100);

/// Whether an endpoint may take the watches of one whose probe fails since `failing_since`.
fn may_take_over(target: &EndpointReadiness, failing_since: Instant) -> bool {
    target.state == EndpointState::Ready
        && target.probe_failing_since.is_none()
        && target.last_ready_probe.is_some_and(|asked_at| asked_at > failing_since)
}

/// Which watches should leave an endpoint.
fn leaving_watches(source: &EndpointReadiness) -> Option<MoveEligibility> {
    source.probe_failing_since?;
    match source.state {
        EndpointState::Degraded => Some(MoveEligibility::All),
        EndpointState::Ready | EndpointState::Connecting => Some(MoveEligibility::Silent),
        // The connections are suspect or lost; their health decides.
        EndpointState::Suspect
        | EndpointState::Ejected
        | EndpointState::NoH2
        | EndpointState::Leaving => None,
    }
}

/// An endpoint to evacuate, the watches that leave it, and the endpoints that may take them.
#[derive(Debug)]
pub struct Evacuation {
    endpoint: Arc<Endpoint>,
    eligible: MoveEligibility,
    targets: Rc<[Arc<Endpoint>]>,
}

/// The endpoints to evacuate now. Allocates nothing while every probe is ok.
pub fn evacuations(endpoints: &[Arc<Endpoint>]) -> Vec<Evacuation> {
    if !endpoints.iter().any(|endpoint| endpoint.probe.is_failing()) {
        return Vec::new();
    }
    let readiness: Vec<_> = endpoints.iter().map(|endpoint| endpoint.readiness()).collect();
    decide(&readiness)
        .map(|(source, eligible, targets)| Evacuation {
            endpoint: Arc::clone(&endpoints[source]),
            eligible,
            targets: targets.into_iter().map(|target| Arc::clone(&endpoints[target])).collect(),
        })
        .collect()
}

/// The table of the module: for each endpoint to evacuate its index, the watches that leave, and the
/// indices of the targets.
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

/// How many of `watches` are offered a move, `elapsed` after the last offer.
pub fn due_moves(watches: usize, elapsed: Duration) -> usize {
    let part = (elapsed.as_secs_f64() / WINDOW.as_secs_f64()).min(1.0);
    (watches as f64 * part).ceil() as usize
}

/// The evacuations in progress of one class of a pool.
#[derive(Debug, Default)]
pub struct ActiveEvacuations {
    active: Vec<ActiveEvacuation>,
    rng: fastrand::Rng,
}

#[derive(Debug)]
struct ActiveEvacuation {
    source: Arc<Endpoint>,
    eligible: MoveEligibility,
    last_offer: Instant,
}

impl ActiveEvacuations {
    /// Starts, continues and ends evacuations. The pool calls it on every maintenance.
    pub fn tick(&mut self, connections: &[Rc<Connection>], wanted: &[Evacuation], now: Instant) {
        if wanted.is_empty() && self.active.is_empty() {
            return;
        }
        let continues = |active: &ActiveEvacuation| {
            wanted.iter().any(|evacuation| {
                Arc::ptr_eq(&evacuation.endpoint, &active.source)
                    && evacuation.eligible == active.eligible
            })
        };
        for ended in self.active.extract_if(.., |active| !continues(active)) {
            for connection in connections.iter().filter(|c| Arc::ptr_eq(&c.endpoint, &ended.source))
            {
                connection.moves.withdraw();
            }
        }
        for evacuation in wanted {
            self.advance(connections, evacuation, now);
        }
    }

    fn advance(&mut self, connections: &[Rc<Connection>], evacuation: &Evacuation, now: Instant) {
        let Evacuation { endpoint, eligible, targets } = evacuation;
        let with_watches = || {
            connections.iter().filter(|c| {
                Arc::ptr_eq(&c.endpoint, endpoint)
                    && c.state() != ConnectionState::Dead
                    && c.watches() > 0
            })
        };
        let active = self.active.iter_mut().find(|active| Arc::ptr_eq(&active.source, endpoint));
        let Some(active) = active else {
            self.active.push(ActiveEvacuation {
                source: Arc::clone(endpoint),
                eligible: *eligible,
                last_offer: now + START_JITTER.mul_f64(self.rng.f64()),
            });
            let watches: usize = with_watches().map(|c| c.watches()).sum();
            if watches > 0 {
                tracing::info!(
                    upstream = &*endpoint.upstream,
                    endpoint = &*endpoint.label,
                    watches,
                    eligible = if *eligible == MoveEligibility::All { "all" } else { "silent" },
                    targets = targets.len(),
                    "endpoint evacuated: its /readyz fails or is overdue"
                );
            }
            return;
        };
        let elapsed = now.saturating_duration_since(active.last_offer);
        if elapsed < OFFER_PAUSE {
            return;
        }
        active.last_offer = now;
        for connection in with_watches() {
            connection.offer_moves(*eligible, targets, due_moves(connection.watches(), elapsed));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use EndpointState::{Connecting, Degraded, Ejected, Leaving, NoH2, Ready};

    /// A readiness; times are in seconds.
    fn known(
        state: EndpointState,
        probe_failing_since: Option<u64>,
        last_ready_probe: Option<u64>,
    ) -> EndpointReadiness {
        let zero = Instant::now();
        // One zero for all of a table: `Instant::now` must not differ between its rows.
        thread_local!(static ZERO: std::cell::OnceCell<Instant> = const { std::cell::OnceCell::new() });
        let zero = ZERO.with(|cell| *cell.get_or_init(|| zero));
        let at = |seconds| zero + Duration::from_secs(seconds);
        EndpointReadiness {
            state,
            probe_failing_since: probe_failing_since.map(at),
            last_ready_probe: last_ready_probe.map(at),
        }
    }

    #[test]
    fn decide_evacuates_by_the_table() {
        let last_ready_probe = known(Ready, None, Some(21));
        let before = known(Ready, None, Some(20));
        for (here, others, expected) in [
            // Its probe is ok.
            (known(Ready, None, Some(5)), [last_ready_probe, last_ready_probe], None),
            // One probe failed or is overdue: silent watches move.
            (
                known(Ready, Some(20), Some(10)),
                [last_ready_probe, last_ready_probe],
                Some((MoveEligibility::Silent, vec![1, 2])),
            ),
            (
                known(Connecting, Some(20), None),
                [last_ready_probe, last_ready_probe],
                Some((MoveEligibility::Silent, vec![1, 2])),
            ),
            // It is degraded: all watches move.
            (
                known(Degraded, Some(20), Some(10)),
                [last_ready_probe, last_ready_probe],
                Some((MoveEligibility::All, vec![1, 2])),
            ),
            (
                known(Degraded, Some(20), None),
                [before, last_ready_probe],
                Some((MoveEligibility::All, vec![2])),
            ),
            // No other endpoint has had an ok probe since.
            (known(Degraded, Some(20), Some(10)), [before, before], None),
            (known(Ready, Some(20), Some(10)), [before, known(Ready, None, None)], None),
            // All fail, one of them a little later.
            (
                known(Degraded, Some(20), Some(10)),
                [known(Ready, Some(21), Some(20)), known(Degraded, Some(20), Some(19))],
                None,
            ),
            // The others are not ready.
            (
                known(Degraded, Some(20), None),
                [known(Degraded, Some(5), Some(21)), known(Connecting, None, Some(21))],
                None,
            ),
            (
                known(Degraded, Some(20), None),
                [known(Ejected, None, Some(21)), known(Leaving, None, Some(21))],
                None,
            ),
            // Connection health decides.
            (known(Ejected, Some(20), None), [last_ready_probe, last_ready_probe], None),
            (known(NoH2, Some(20), None), [last_ready_probe, last_ready_probe], None),
            (known(Leaving, Some(20), None), [last_ready_probe, last_ready_probe], None),
        ] {
            let all = [here, others[0], others[1]];
            let found = decide(&all).find(|(at, ..)| *at == 0).map(|(_, who, to)| (who, to));
            assert_eq!(found, expected, "{all:?}");
        }
    }

    #[test]
    fn decide_without_a_target_evacuates_nothing() {
        assert_eq!(decide(&[known(Degraded, Some(1), None)]).count(), 0);
        assert_eq!(decide(&[]).count(), 0);
    }

    #[test]
    fn due_moves_over_the_window_are_all_watches() {
        for watches in [0, 1, 3, 100, 6_400] {
            let step = WINDOW / 4;
            let offered: usize = (0..4).map(|_| due_moves(watches, step)).sum();
            assert!((watches..=watches + 4).contains(&offered), "{offered} of {watches}");
            assert_eq!(due_moves(watches, WINDOW * 9), watches);
            assert_eq!(due_moves(watches, Duration::ZERO), 0);
        }
    }
}

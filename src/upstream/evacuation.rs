//! Lets watches leave an apiserver that is unwell, while their streams still work.
//!
//! An apiserver without its etcd answers PINGs and keeps its watches, and they hear of nothing. To
//! cut them would make an outage worse. To move one that can be resumed is not to cut it: its
//! client does not notice, and if nobody takes it, it stays. So the bar is low, but there is one:
//!
//! | the latest `/readyz` here | who leaves |
//! |---|---|
//! | was right | nobody |
//! | failed, or keeps us waiting for half of its timeout | who was delivering and has fallen silent |
//! | the endpoint is degraded: it failed `fall` times | everyone who can |
//!
//! and in each case only to an endpoint that is ready and whose own `/readyz` was *asked after* that,
//! and was right; the prober asks the others for it at once. Where all lose their etcd together
//! nobody can show that, and nothing moves.
//!
//! Whoever leaves does so within [`WINDOW`], after a start by lot; the picker spreads them over
//! those who are last_ready_probe. What comes back to an apiserver that has recovered is up to
//! [`super::rebalance`], slowly.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::connection::Connection;
use super::endpoint::{Endpoint, EndpointState};
use super::health::ConnectionState;
use super::watch_moves::MoveEligibility;

/// A active begins within this time of its reason, by lot: other nodes see the same.
pub const START_JITTER: Duration = Duration::from_millis(200);
/// Time in which all who leave are offered a move.
pub const WINDOW: Duration = Duration::from_millis(400);
/// Least pause between two offers.
const ROUND: Duration = Duration::from_millis(100);

/// What is known of the readiness of an endpoint.
#[derive(Debug, Clone, Copy)]
pub struct EndpointReadiness {
    /// Its state.
    pub state: EndpointState,
    /// Since when its probes fail or keep us waiting; `None` when the latest was right.
    pub probe_failing_since: Option<Instant>,
    /// When the latest probe was asked that was right.
    pub last_ready_probe: Option<Instant>,
}

impl EndpointReadiness {
    /// Whether it may take the watches of one that is probe_failing_since since then.
    pub fn takes_over(&self, probe_failing_since: Instant) -> bool {
        self.state == EndpointState::Ready
            && self.probe_failing_since.is_none()
            && self
                .last_ready_probe
                .is_some_and(|last_ready_probe| last_ready_probe > probe_failing_since)
    }

    /// Whose watches leave it, if somebody takes them over.
    pub fn leaves(&self) -> Option<MoveEligibility> {
        self.probe_failing_since?;
        match self.state {
            EndpointState::Degraded => Some(MoveEligibility::All),
            EndpointState::Ready | EndpointState::Connecting => Some(MoveEligibility::Silent),
            // Transport, and its own rules.
            EndpointState::Suspect
            | EndpointState::Ejected
            | EndpointState::NoH2
            | EndpointState::Leaving => None,
        }
    }
}

/// An endpoint to leave, who leaves it, and where to.
#[derive(Debug)]
pub struct Evacuation {
    endpoint: Arc<Endpoint>,
    who: MoveEligibility,
    targets: Rc<[Arc<Endpoint>]>,
}

/// The endpoints to leave now. Empty, and cheap, as long as all are last_ready_probe.
pub fn evacuations(endpoints: &[Arc<Endpoint>]) -> Vec<Evacuation> {
    if !endpoints.iter().any(|endpoint| endpoint.is_probe_failing()) {
        return Vec::new();
    }
    let known: Vec<_> = endpoints.iter().map(|endpoint| endpoint.readiness()).collect();
    decide(&known)
        .map(|(here, who, targets)| Evacuation {
            endpoint: Arc::clone(&endpoints[here]),
            who,
            targets: targets.into_iter().map(|there| Arc::clone(&endpoints[there])).collect(),
        })
        .collect()
}

/// The table above: who leaves which endpoint, and which ones take them over; by index.
pub fn decide(
    known: &[EndpointReadiness],
) -> impl Iterator<Item = (usize, MoveEligibility, Vec<usize>)> + '_ {
    known.iter().enumerate().filter_map(|(here, readiness)| {
        let (who, probe_failing_since) = (readiness.leaves()?, readiness.probe_failing_since?);
        let targets: Vec<_> = (0..known.len())
            .filter(|&there| there != here && known[there].takes_over(probe_failing_since))
            .collect();
        (!targets.is_empty()).then_some((here, who, targets))
    })
}

/// How many of `watches` are offered a move, `elapsed` after the last offer.
pub fn due_moves(watches: usize, elapsed: Duration) -> usize {
    let part = (elapsed.as_secs_f64() / WINDOW.as_secs_f64()).min(1.0);
    (watches as f64 * part).ceil() as usize
}

/// The flights of one class of a pool.
#[derive(Debug, Default)]
pub struct ActiveEvacuations {
    under_way: Vec<ActiveEvacuation>,
    rng: fastrand::Rng,
}

#[derive(Debug)]
struct ActiveEvacuation {
    from: Arc<Endpoint>,
    who: MoveEligibility,
    last: Instant,
}

impl ActiveEvacuations {
    /// Offers moves to those who should leave. Called on every turn of the pool.
    pub fn turn(&mut self, connections: &[Rc<Connection>], leave: &[Evacuation], now: Instant) {
        if leave.is_empty() && self.under_way.is_empty() {
            return;
        }
        let goes_on = |active: &ActiveEvacuation| {
            leave.iter().any(|d| Arc::ptr_eq(&d.endpoint, &active.from) && d.who == active.who)
        };
        for over in self.under_way.extract_if(.., |active| !goes_on(active)) {
            for connection in connections.iter().filter(|c| Arc::ptr_eq(&c.endpoint, &over.from)) {
                connection.withdraw_moves();
            }
        }
        for departure in leave {
            self.depart(connections, departure, now);
        }
    }

    fn depart(&mut self, connections: &[Rc<Connection>], departure: &Evacuation, now: Instant) {
        let Evacuation { endpoint, who, targets } = departure;
        let here = || {
            connections.iter().filter(|c| {
                Arc::ptr_eq(&c.endpoint, endpoint)
                    && c.state() != ConnectionState::Dead
                    && c.watches() > 0
            })
        };
        let Some(active) = self.under_way.iter_mut().find(|f| Arc::ptr_eq(&f.from, endpoint))
        else {
            let last = now + START_JITTER.mul_f64(self.rng.f64());
            self.under_way.push(ActiveEvacuation { from: Arc::clone(endpoint), who: *who, last });
            let watches: usize = here().map(|c| c.watches()).sum();
            if watches > 0 {
                tracing::info!(
                    upstream = &*endpoint.upstream,
                    endpoint = &*endpoint.label,
                    watches,
                    who = if *who == MoveEligibility::All {
                        "all that can"
                    } else {
                        "those that fell silent"
                    },
                    targets = targets.len(),
                    "its /readyz fails or hangs: watches move away"
                );
            }
            return;
        };
        let elapsed = now.saturating_duration_since(active.last);
        if elapsed < ROUND {
            return;
        }
        active.last = now;
        for connection in here() {
            connection.offer_moves(*who, targets, due_moves(connection.watches(), elapsed));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use EndpointState::{Connecting, Degraded, Ejected, Leaving, NoH2, Ready};

    /// Seconds: when it has been probe_failing_since, and when it was last right.
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
    fn the_table() {
        let last_ready_probe = known(Ready, None, Some(21));
        let before = known(Ready, None, Some(20));
        for (here, others, expected) in [
            // Nothing is known against it.
            (known(Ready, None, Some(5)), [last_ready_probe, last_ready_probe], None),
            // One probe of it failed or hangs: silence is a reason to go.
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
            // It is degraded: to be there is.
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
            // Nobody has shown that he is any better since.
            (known(Degraded, Some(20), Some(10)), [before, before], None),
            (known(Ready, Some(20), Some(10)), [before, known(Ready, None, None)], None),
            // All have the same trouble, one a little later.
            (
                known(Degraded, Some(20), Some(10)),
                [known(Ready, Some(21), Some(20)), known(Degraded, Some(20), Some(19))],
                None,
            ),
            // The others are not ready, whatever was known of them.
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
            // Transport has its own rules.
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
    fn alone_there_is_nowhere_to_go() {
        assert_eq!(decide(&[known(Degraded, Some(1), None)]).count(), 0);
        assert_eq!(decide(&[]).count(), 0);
    }

    #[test]
    fn all_are_offered_a_move_within_the_window() {
        for watches in [0, 1, 3, 100, 6_400] {
            let step = WINDOW / 4;
            let offered: usize = (0..4).map(|_| due_moves(watches, step)).sum();
            assert!((watches..=watches + 4).contains(&offered), "{offered} of {watches}");
            assert_eq!(due_moves(watches, WINDOW * 9), watches);
            assert_eq!(due_moves(watches, Duration::ZERO), 0);
        }
    }
}

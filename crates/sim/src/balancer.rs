//! A load balancer in front of the apiservers of a scenario, which are reached by its address only.

use std::time::Duration;

use jackstay_config::EndpointKind;

use crate::faults::{Fault, FaultKind};

/// When health checks take a backend out and let it in again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HealthChecks {
    /// Time from the beginning of a fault until the backend gets no new connections.
    pub out_after: Duration,
    /// Time from its end until the backend gets new connections again.
    pub in_after: Duration,
}

/// By what the apiservers behind a balancer can be told apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Distinction {
    /// Each has a serving certificate of its own, and advertises an address of its own in `/api`.
    Certificate,
    /// They have one serving certificate, and each advertises an address of its own.
    Address,
    /// They have one serving certificate and advertise one address.
    Nothing,
}

/// The defaults of `HAProxy`: a check each 2 s, of which three fail or two succeed.
pub const CHECKED: HealthChecks =
    HealthChecks { out_after: Duration::from_secs(6), in_after: Duration::from_secs(4) };

/// A load balancer. It selects a backend at random for each connection, and does not close connections to one that is
/// out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Balancer {
    /// `None` for a balancer without health checks, as nftables.
    pub checks: Option<HealthChecks>,
    /// All connections of a node lead to one backend.
    pub is_sticky: bool,
    /// By what its backends can be told apart.
    pub distinction: Distinction,
    /// `kind` of the upstream.
    pub kind: EndpointKind,
}

impl Balancer {
    /// A balancer without health checks, in front of apiservers with a certificate each.
    pub const UNCHECKED: Self = Self {
        checks: None,
        is_sticky: false,
        distinction: Distinction::Certificate,
        kind: EndpointKind::Balancer,
    };

    /// The same with health checks.
    pub const CHECKED: Self = Self { checks: Some(CHECKED), ..Self::UNCHECKED };

    /// Whether a backend gets new connections at this time of a run with these faults.
    pub(crate) fn is_in(&self, faults: &[Fault], server: usize, at: Duration) -> bool {
        let Some(HealthChecks { out_after, in_after }) = self.checks else { return true };
        let is_out = |fault: &Fault| {
            let lasts = fault.until.unwrap_or(Duration::MAX).saturating_sub(fault.at);
            let until = fault.until.map_or(Duration::MAX, |until| until + in_after);
            lasts > out_after && (fault.at + out_after..until).contains(&at)
        };
        let mut of_server =
            faults.iter().filter(|fault| fault.server == server && fails_checks(fault.kind));
        !of_server.any(is_out)
    }

    /// The times at which the health checks may take a backend out or in because of a fault.
    pub(crate) fn changes(&self, fault: &Fault) -> impl Iterator<Item = Duration> + use<> {
        let checks = self.checks.filter(|_| fails_checks(fault.kind));
        let (at, until) = (fault.at, fault.until);
        let changes = checks.map(|HealthChecks { out_after, in_after }| {
            [Some(at + out_after), until.map(|until| until + in_after)]
        });
        changes.into_iter().flatten().flatten()
    }
}

/// Whether a request of `/readyz` fails.
fn fails_checks(kind: FaultKind) -> bool {
    matches!(
        kind,
        FaultKind::Blackhole
            | FaultKind::BlackholeOneWay
            | FaultKind::Stop
            | FaultKind::Kill
            | FaultKind::ShutDown
            | FaultKind::Hang
            | FaultKind::Unready
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn killed(until: Option<u32>) -> Fault {
        Fault { kind: FaultKind::Kill, server: 1, at: SECOND, until: until.map(|at| SECOND * at) }
    }

    fn out(fault: Fault, balancer: Balancer) -> Vec<u32> {
        (0..30).filter(|&at| !balancer.is_in(&[fault], 1, SECOND * at)).collect()
    }

    #[test]
    fn backend_is_out_from_the_third_failed_check_to_the_second_one_that_succeeds() {
        assert_eq!(out(killed(Some(10)), Balancer::CHECKED), [7, 8, 9, 10, 11, 12, 13]);
        assert_eq!(out(killed(None), Balancer::CHECKED).first(), Some(&7));
    }

    #[test]
    fn backend_stays_in_without_checks_and_in_a_short_fault() {
        assert_eq!(out(killed(None), Balancer::UNCHECKED), [0_u32; 0]);
        assert_eq!(out(killed(Some(6)), Balancer::CHECKED), [0_u32; 0]);
        let other = Fault { kind: FaultKind::Lag(SECOND), ..killed(None) };
        assert_eq!(out(other, Balancer::CHECKED), [0_u32; 0]);
    }
}

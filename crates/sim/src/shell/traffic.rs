//! What the jackstay of a node has sent, as apiservers, the network and its metrics show it.

use std::collections::{BTreeSet, HashMap};
use std::ops::Range;
use std::time::{Duration, Instant, SystemTime};

use jackstay_apiserver::audit::Record;

use super::program::APISERVER_PORT;
use crate::balancer::{Balancer, Distinction};
use crate::checker::traffic::{Arrival, Connect, Hang, Traffic};
use crate::faults::{Fault, FaultKind};
use crate::net::sockets;

/// A shorter outage does not hold watches until an apiserver is ready (`jackstay_core::outage`).
const SHORTEST_OUTAGE: Duration = Duration::from_secs(3);

/// The name of the client in the `Audit-ID` of its requests.
pub fn client_name(node: usize, client: u16) -> String {
    format!("n{node}c{client}")
}

/// The number of the client in an `Audit-ID` that [`client_name`] begins.
pub fn client_number(id: &str) -> Option<u16> {
    let (node, rest) = id.strip_prefix('n')?.split_once('c')?;
    node.parse::<usize>().ok()?;
    rest.split_once('-')?.0.parse().ok()
}

/// What is known of the traffic of a node.
#[derive(Debug)]
pub struct Sources<'a> {
    /// The requests that the apiservers have received.
    pub records: &'a [Record],
    /// The connects of jackstay's process.
    pub connects: &'a [sockets::Connect],
    /// The metrics of jackstay.
    pub metrics: &'a str,
    /// When clients have sent the requests whose order counts, by `Audit-ID`.
    pub sent: &'a HashMap<String, Instant>,
    /// The faults of the run.
    pub faults: &'a [Fault],
    /// The number of apiservers.
    pub servers: usize,
    /// The balancer that selects the apiserver of each connection.
    pub balancer: Option<Balancer>,
    /// How long the clients ran.
    pub time: Duration,
    /// The start of the run.
    pub start: (Instant, SystemTime),
}

impl Sources<'_> {
    /// The traffic of a node.
    pub fn traffic(&self, node: usize) -> Traffic {
        let name = format!("n{node}c");
        let of_node =
            |record: &&Record| record.audit_id.as_ref().is_some_and(|id| id.starts_with(&name));
        Traffic {
            arrivals: self
                .records
                .iter()
                .filter(of_node)
                .filter_map(|one| self.arrival(one))
                .collect(),
            connects: self.connects.iter().filter_map(|connect| self.connect(connect)).collect(),
            is_balanced: self.balancer.is_some(),
            requests: sum(self.metrics, "jackstay_requests_total", &[]),
            retries: sum(self.metrics, "jackstay_retries_total", &[]),
            hedges: sum(self.metrics, "jackstay_hedges_total", &["original", "hedge", "failed"]),
            hangs: self.hangs(),
            not_ready: self.not_ready(),
            kept: (self.kept(), self.time),
        }
    }

    fn arrival(&self, record: &Record) -> Option<Arrival> {
        Some(Arrival {
            at: record.time.duration_since(self.start.1).ok()?,
            server: record.server.rsplit('-').next()?.parse().ok()?,
            id: record.audit_id.clone()?,
            is_watch: record.verb == "watch",
            is_read: matches!(record.verb, "get" | "list"),
            sent: record
                .audit_id
                .as_ref()
                .and_then(|id| Some(self.sent.get(id)?.saturating_duration_since(self.start.0))),
        })
    }

    fn connect(&self, connect: &sockets::Connect) -> Option<Connect> {
        let is_apiserver =
            |server: &usize| *server < self.servers && connect.to.port() == APISERVER_PORT;
        let server = connect.host.map(usize::from).filter(is_apiserver)?;
        let at = connect.at.saturating_duration_since(self.start.0);
        let closed = connect.closed.map(|closed| closed.saturating_duration_since(self.start.0));
        Some(Connect { at, server, established: connect.established, closed })
    }

    /// The apiservers that never stop to accept connections once they have started, so that a lost connection is
    /// followed by another one at once; none if jackstay itself stands still, or cannot select the apiserver.
    fn kept(&self) -> BTreeSet<usize> {
        let stands_still =
            |fault: &Fault| matches!(fault.kind, FaultKind::ProxyKill | FaultKind::ProxyStop);
        if self.balancer.is_some() || self.faults.iter().any(stands_still) {
            return BTreeSet::new();
        }
        let is_kept = |server: &usize| {
            let of_server =
                |fault: &&Fault| !fault.kind.is_of_no_server() && fault.server == *server;
            self.faults.iter().filter(of_server).all(|fault| {
                matches!(fault.kind, FaultKind::ForgetFlows { dropped: [false, false] })
                    || fault.kind == FaultKind::Kill && fault.until.is_some()
            })
        };
        (0..self.servers).filter(is_kept).collect()
    }

    /// The time in which all apiservers refuse everybody, after an outage in which all were down.
    fn not_ready(&self) -> Option<Range<Duration>> {
        let of = |kind: FaultKind, server: usize| {
            let mut faults = self.faults.iter();
            faults.find(|fault| fault.kind == kind && fault.server == server)
        };
        let mut common: Option<Range<Duration>> = None;
        for server in 0..self.servers {
            let (kill, forbid) = (of(FaultKind::Kill, server)?, of(FaultKind::Forbid, server)?);
            if kill.until? != forbid.at || forbid.at.saturating_sub(kill.at) < SHORTEST_OUTAGE {
                return None;
            }
            let refuses = forbid.at..forbid.until?;
            let shared = common.get_or_insert(refuses.clone());
            *shared = shared.start.max(refuses.start)..shared.end.min(refuses.end);
        }
        common
    }

    /// The times in which requests of one apiserver hang, if nothing else goes wrong but that others are slow, and if
    /// jackstay can tell it apart.
    fn hangs(&self) -> Vec<Hang> {
        let hang = self.faults.iter().find(|fault| fault.kind == FaultKind::Hang);
        let is_known = |fault: &Fault| {
            let is_slow = matches!(fault.kind, FaultKind::Slow(_));
            Some(fault) == hang || is_slow && hang.is_some_and(|hang| hang.server != fault.server)
        };
        let distinction = self.balancer.map(|balancer| balancer.distinction);
        if distinction == Some(Distinction::Nothing) || !self.faults.iter().all(is_known) {
            return Vec::new();
        }
        let times = |hang: &Fault| {
            let until = hang.until.unwrap_or(Duration::MAX);
            Hang { server: hang.server, from: hang.at, until }
        };
        hang.into_iter().map(times).collect()
    }
}

/// The sum of the series of a counter; with `values`, of those that have one of these values of a label.
fn sum(metrics: &str, name: &str, values: &[&str]) -> u64 {
    let series = metrics.lines().filter_map(|line| line.strip_prefix(name)?.rsplit_once(' '));
    let has_value = |labels: &str| {
        values.is_empty() || values.iter().any(|value| labels.contains(&format!("=\"{value}\"")))
    };
    let series = series
        .filter(|(labels, _)| (labels.is_empty() || labels.starts_with('{')) && has_value(labels));
    series.filter_map(|(_, value)| value.parse::<u64>().ok()).sum()
}

#[cfg(test)]
mod tests {
    use super::sum;

    #[test]
    fn sum_adds_the_series_of_one_counter() {
        let metrics = "# TYPE a_total counter\n\
                       a_total{outcome=\"x\"} 2\n\
                       a_total{outcome=\"y\"} 3\n\
                       a_total_of_others 5\n";
        assert_eq!(sum(metrics, "a_total", &[]), 5);
        assert_eq!(sum(metrics, "a_total", &["y"]), 3);
        assert_eq!(sum(metrics, "a_total", &["z"]), 0);
    }
}

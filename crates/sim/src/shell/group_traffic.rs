//! The requests of the aggregated group, as apiservers show them.

use std::ops::Range;
use std::time::{Duration, SystemTime};

use jackstay_apiserver::aggregated;
use jackstay_apiserver::audit::Record;

use crate::checker::groups::{CutPath, GroupArrival, GroupTraffic};
use crate::faults::{Fault, FaultKind};

/// The traffic of the group of `servers` apiservers in a run that began at `start`. `None` if anything but the group
/// fails, or nothing does.
pub fn group_traffic(
    records: &[Record],
    faults: &[Fault],
    (servers, start): (usize, SystemTime),
) -> Option<GroupTraffic> {
    if faults.is_empty() || !faults.iter().all(|fault| fault.kind.is_of_group()) {
        return None;
    }
    let prefix = format!("/apis/{}/", aggregated::GROUP);
    let of_group = records.iter().filter(|record| record.path.starts_with(&prefix));
    let (unavailable, cuts): (Vec<_>, Vec<_>) =
        faults.iter().partition(|fault| fault.kind == FaultKind::GroupUnavailable);
    let cut = |fault: &Fault| CutPath { server: fault.server, time: time_of(fault) };
    Some(GroupTraffic {
        arrivals: of_group.filter_map(|record| arrival(record, start)).collect(),
        servers,
        cuts: cuts.into_iter().map(cut).collect(),
        unavailable: unavailable.into_iter().map(time_of).collect(),
    })
}

fn time_of(fault: &Fault) -> Range<Duration> {
    fault.at..fault.until.unwrap_or(Duration::MAX)
}

fn arrival(record: &Record, start: SystemTime) -> Option<GroupArrival> {
    Some(GroupArrival {
        at: record.time.duration_since(start).ok()?,
        server: record.server.rsplit('-').next()?.parse().ok()?,
        id: record.audit_id.clone()?,
        is_write: !matches!(record.verb, "get" | "list" | "watch"),
    })
}

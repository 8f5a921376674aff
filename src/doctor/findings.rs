//! Diagnoses causes from observations by pure rules; the most likely cause comes first.
//!
//! Each rule detects one cause and gives it a weight. A cause weighs more than its consequences: a
//! name that does not resolve more than the endpoint that is not reached, a certificate more than the
//! request that is never sent, a dead endpoint more than lost packets. Findings that differ only in
//! their endpoint are merged.
//!
//! | weight | cause |
//! |---|---|
//! | 100 | an invalid configuration; an endpoint that is jackstay itself |
//! | 95 | a port that another process holds; an address or port that cannot be bound (94) |
//! | 90 | name servers that do not answer; a name that does not exist |
//! | 85 | a clock that is off by enough to invalidate certificates |
//! | 80 | the server's certificate: expired, not yet valid, another CA, other names |
//! | 75 | a dead endpoint (84 if all are) |
//! | 74 | an expired client certificate |
//! | 72 | no HTTP/2 |
//! | 70 | a credential that is not accepted |
//! | 65 | established connections that fall silent while fresh ones work |
//! | 60 | an apiserver that is not ready |
//! | 50 | packet loss |
//! | 45 | some fresh connections that fail |
//! | 30 | one silent name server of several; a clock that is slightly off |
//! | 10 | notes: limits, IPv6, certificates that expire soon |

mod certificates;
mod finding;
mod machine;
mod path;
#[cfg(test)]
mod tests;

use std::borrow::Cow;

use super::observations::Observations;

pub use self::finding::{Cause, Finding, Level};

/// Largest number of different observations in a merged finding.
const MAX_REASONS: usize = 5;

/// Merges findings that are alike into one that names every endpoint.
fn group(found: Vec<Finding>) -> Vec<Finding> {
    let mut groups: Vec<Vec<Finding>> = Vec::new();
    for finding in found {
        match groups.iter_mut().find(|group| group[0].is_alike(&finding)) {
            Some(group) => group.push(finding),
            None => groups.push(vec![finding]),
        }
    }
    groups.iter().map(|group| merge(group)).collect()
}

fn merge(group: &[Finding]) -> Finding {
    let mut seen: Vec<Cow<'_, str>> = Vec::new();
    let mut reasons: Vec<&str> = Vec::new();
    for finding in group {
        let bare = finding.without_address(&finding.because);
        if !seen.contains(&bare) {
            seen.push(bare);
            reasons.push(&finding.because);
        }
    }
    let more = reasons.len().saturating_sub(MAX_REASONS);
    let mut because = reasons[..reasons.len() - more].join("; ");
    if more > 0 {
        because = format!("{because}; and {more} more");
    }
    let endpoints: Vec<String> = group.iter().flat_map(|f| f.endpoints.clone()).collect();
    let mut what = group[0].what.clone();
    if let [_, others @ .., last] = endpoints.as_slice() {
        let others = match others {
            [] => last.clone(),
            others => format!("{} and {last}", others.join(", ")),
        };
        what = format!("{what} The same holds for {others}.");
    }
    Finding { what, because, endpoints, ..group[0].clone() }
}

/// Applies every rule. Problems come before notes, and the most likely cause comes first.
pub fn diagnose(seen: &Observations) -> Vec<Finding> {
    let mut found = Vec::new();
    machine::configuration(seen, &mut found);
    machine::listen(seen, &mut found);
    machine::name_servers(seen, &mut found);
    machine::clocks(seen, &mut found);
    certificates::server(seen, &mut found);
    certificates::client(seen, &mut found);
    path::reachability(seen, &mut found);
    for endpoint in &seen.endpoints {
        path::credential(endpoint, &mut found);
        path::forgotten_flows(endpoint, seen, &mut found);
        path::readiness(endpoint, &mut found);
        path::intermittent(endpoint, &mut found);
    }
    path::loss(seen, &mut found);
    path::slow_balancers(seen, &mut found);
    machine::limits(seen, &mut found);
    let mut found = group(found);
    found.sort_by_key(|f| (f.level == Level::Note, std::cmp::Reverse(f.weight)));
    found
}

/// Whether a finding is a problem.
pub fn has_problems(findings: &[Finding]) -> bool {
    findings.iter().any(|finding| finding.level == Level::Problem)
}

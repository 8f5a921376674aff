//! Diagnoses causes from observations by pure rules. Each rule detects one cause; findings that differ
//! only in their endpoint are merged, and the most likely [`Cause`] comes first.

mod backends;
mod certificates;
mod finding;
mod host;
mod machine;
mod path;
mod recovered;
#[cfg(test)]
mod tests;
mod versions;

use std::borrow::Cow;

use super::observations::{EndpointSource, Observations};

pub use self::finding::{Cause, Finding, Level};

/// Largest number of observations in the text of a merged finding.
const MAX_REASONS: usize = 5;

/// Applies every rule. Problems come before notes, and the most likely cause comes first.
pub fn diagnose(observations: &Observations) -> Vec<Finding> {
    let mut found = Vec::new();
    machine::configuration(observations, &mut found);
    machine::listen(observations, &mut found);
    machine::images(observations, &mut found);
    machine::name_servers(observations, &mut found);
    found.extend(machine::clocks(observations));
    certificates::server(observations, &mut found);
    certificates::client(observations, &mut found);
    path::reachability(observations, &mut found);
    for endpoint in &observations.endpoints {
        found.extend(path::http2(endpoint));
        found.extend(path::plain_http(endpoint));
        found.extend(path::credential(endpoint));
        found.extend(path::forgotten_flows(endpoint, observations));
        found.extend(path::limited_pings(endpoint));
        found.extend(host::routes_by_host(endpoint));
        found.extend(path::readiness(endpoint));
        // An outage that has ended explains the connections that failed.
        let recovered = recovered::recovered(endpoint, observations);
        found.extend(recovered.or_else(|| path::intermittent(endpoint)));
    }
    found.extend(path::loss(observations));
    path::slow_balancers(observations, &mut found);
    backends::behind(observations, &mut found);
    found.extend(versions::version_skew(observations));
    found.extend(machine::limits(observations));
    for finding in &mut found {
        reduce_to_note(finding, observations);
    }
    let mut found = group(found);
    found.sort_by_key(|finding| (finding.level, finding.cause));
    found
}

/// Makes a finding a note if it concerns only addresses that the user has not given. The cluster names them,
/// and the examined clients do not use them.
fn reduce_to_note(finding: &mut Finding, observations: &Observations) {
    let is_given = |address: &String| {
        let mut endpoints = observations.endpoints.iter();
        endpoints.any(|e| e.address == *address && e.source == EndpointSource::Given)
    };
    let is_problem = finding.level == Level::Problem;
    if !is_problem || finding.endpoints.is_empty() || finding.endpoints.iter().any(is_given) {
        return;
    }
    finding.level = Level::Note;
    finding.advice = format!(
        "Only the cluster names this address. If jackstay is to use it (`discovery`, or as an \
         endpoint): {}",
        finding.advice
    );
}

/// Whether a finding is a problem.
pub fn has_problems(findings: &[Finding]) -> bool {
    findings.iter().any(|finding| finding.level == Level::Problem)
}

/// Merges findings that differ only in their endpoint into one finding that names every endpoint.
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
    // A summary may concern several endpoints.
    if let [only] = group {
        return only.clone();
    }
    let mut without_addresses: Vec<Cow<'_, str>> = Vec::new();
    let mut reasons: Vec<&str> = Vec::new();
    for finding in group {
        let reason = finding.without_address(&finding.because);
        if !without_addresses.contains(&reason) {
            without_addresses.push(reason);
            reasons.push(&finding.because);
        }
    }
    let more = reasons.len().saturating_sub(MAX_REASONS);
    let mut because = reasons[..reasons.len() - more].join("; ");
    if more > 0 {
        because = format!("{because}; and {more} more");
    }
    let mut endpoints: Vec<String> = Vec::new();
    for address in group.iter().flat_map(|finding| &finding.endpoints) {
        // A plan may contain an address twice.
        if !endpoints.contains(address) {
            endpoints.push(address.clone());
        }
    }
    let mut what = group[0].what.clone();
    match endpoints.as_slice() {
        [] | [_] => {}
        [_, other] => what = format!("{what} The same holds for {other}."),
        [_, others @ .., last] => {
            what = format!("{what} The same holds for {} and {last}.", others.join(", "));
        }
    }
    Finding { what, because, endpoints, ..group[0].clone() }
}

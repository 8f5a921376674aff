//! Causes on this machine: its configuration, its ports, its names, its clock, its limits.

use super::{Cause, Finding, note, problem};
use crate::doctor::observations::{Endpoint, ListenState, Observations, Resolved};

/// Seconds of skew that something notices: leases and tokens forgive less than certificates.
const SKEW: f64 = 5.0;
/// Seconds of skew that explain a certificate's dates.
const SKEW_FOR_CERTIFICATES: f64 = 300.0;

pub(super) fn configuration(seen: &Observations, found: &mut Vec<Finding>) {
    for error in &seen.configuration {
        let (cause, what) = if error.contains("would loop") {
            (
                Cause::Loop,
                "An endpoint is jackstay's own address: requests would go round in a circle.",
            )
        } else {
            (Cause::Configuration, "The configuration cannot be used.")
        };
        found.push(problem(100, cause, what, error, "Mend it; `jackstay check` says more."));
    }
    for endpoint in &seen.endpoints {
        if let Some(own) = endpoint.loops_to {
            let finding = problem(
                100,
                Cause::Loop,
                format!(
                    "{} leads back to this machine: requests would go round in a circle.",
                    endpoint.address
                ),
                format!("jackstay is to listen on {own}, and that address is behind the endpoint"),
                "Name the apiservers themselves, or listen on another port.",
            );
            found.push(finding.about(&endpoint.address));
        }
    }
}

pub(super) fn listen(seen: &Observations, found: &mut Vec<Finding>) {
    for place in &seen.host.listen {
        let (what, address) = (&place.what, place.address);
        let port = address.port();
        match &place.state {
            ListenState::Free | ListenState::Jackstay => {}
            ListenState::Taken(owner) => {
                let owner = owner.as_deref().unwrap_or("another process");
                found.push(problem(
                    95,
                    Cause::PortTaken,
                    format!("{what} cannot listen on {address}: {owner} has the port."),
                    "binding it fails: address already in use",
                    format!(
                        "Stop it or choose another port; `ss -ltnp 'sport = :{port}'` shows it."
                    ),
                ));
            }
            ListenState::NotOurs if address.is_ipv6() && !seen.host.ipv6 => found.push(note(
                Cause::NoIpv6,
                format!("{what} will not listen on {address}: this machine has no IPv6."),
                "binding it fails: no such address",
                "Harmless if an IPv4 address is bound as well.",
            )),
            ListenState::NotOurs => found.push(problem(
                94,
                Cause::AddressNotOurs,
                format!(
                    "{what} cannot listen on {address}: this machine does not have the address."
                ),
                "binding it fails: no such address",
                "Put the address on an interface (a dummy interface will do), or listen elsewhere.",
            )),
            ListenState::Failed(error) => found.push(problem(
                94,
                Cause::AddressNotOurs,
                format!("{what} cannot listen on {address}."),
                format!("binding it fails: {error}"),
                "A port below 1024 needs CAP_NET_BIND_SERVICE.",
            )),
        }
    }
}

pub(super) fn names(seen: &Observations, found: &mut Vec<Finding>) {
    let unanswered: Vec<&Endpoint> = seen
        .endpoints
        .iter()
        .filter(|endpoint| matches!(endpoint.resolved, Resolved::NoAnswer(_)))
        .collect();
    let servers = seen.dns.as_ref().map_or(&[][..], |dns| &dns.servers);
    let silent: Vec<String> =
        servers.iter().filter(|s| s.answered == 0).map(|s| s.address.ip().to_string()).collect();
    if !unanswered.is_empty() {
        let because = match seen.dns.as_ref().and_then(|dns| dns.resolv_conf.clone()) {
            Some(error) => error,
            None => format!(
                "none of the name servers in /etc/resolv.conf ({}) answers",
                silent.join(", ")
            ),
        };
        found.push(problem(
            90,
            Cause::DnsBlackHole,
            format!("Names cannot be resolved, {} among them.", unanswered[0].address),
            because,
            "Name the apiservers by IP address, so that nothing depends on DNS; or mend the name \
             servers.",
        ));
    } else if !silent.is_empty() {
        found.push(problem(
            30,
            Cause::DnsPartly,
            format!(
                "No answer from the name server {}; another one answers.",
                silent.join(", nor from ")
            ),
            "its questions timed out",
            "Each lookup may wait for it first: remove it from /etc/resolv.conf.",
        ));
    }
    for endpoint in &seen.endpoints {
        if endpoint.resolved == Resolved::NoSuchName {
            let finding = problem(
                89,
                Cause::NoSuchName,
                format!("The name in {} does not exist.", endpoint.address),
                "the name servers answer, and know no address for it",
                "Is it spelt right? Does this machine use the right name servers?",
            );
            found.push(finding.about(&endpoint.address));
        }
    }
}

pub(super) fn clocks(seen: &Observations, found: &mut Vec<Finding>) {
    let skewed = |e: &&Endpoint| e.clock_skew_s.is_some_and(|skew| skew.abs() > SKEW);
    let off: Vec<&Endpoint> = seen.endpoints.iter().filter(skewed).collect();
    let known = seen.endpoints.iter().filter(|e| e.clock_skew_s.is_some()).count();
    let Some(first) = off.first() else { return };
    let skew = first.clock_skew_s.unwrap_or_default();
    let way = if skew > 0.0 { "ahead of" } else { "behind" };
    // If all of them differ, it is we.
    let whose = if off.len() == known { "this machine's" } else { "its" };
    let weight = if skew.abs() > SKEW_FOR_CERTIFICATES { 85 } else { 30 };
    found.push(problem(
        weight,
        Cause::ClockSkew,
        format!("The clock of {} is {:.0} s {way} this machine's.", first.address, skew.abs()),
        format!("the Date of its answers ({} of {known} endpoints)", off.len()),
        format!("Set {whose} clock; certificates, tokens and leases depend on it."),
    ));
}

pub(super) fn limits(seen: &Observations, found: &mut Vec<Finding>) {
    // A client and an upstream socket for each, and what the process itself needs.
    let wanted = seen.host.wanted_connections * 2 + 64;
    if let Some(limit) = seen.host.open_files.filter(|limit| *limit < wanted) {
        found.push(note(
            Cause::OpenFiles,
            format!("A process may open {limit} files here; all connections that the configuration allows need {wanted}."),
            "the soft limit of this shell (`ulimit -n`)",
            "Raise LimitNOFILE in the unit, or lower limits.max_connections.",
        ));
    }
}

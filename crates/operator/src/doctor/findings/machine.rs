//! Rules for causes on this machine: configuration, listen addresses, name servers, clock, limits.

use super::finding::{Cause, Finding, note, problem};
use crate::doctor::image::{ImageState, PINNED_LABEL, PodImage};
use crate::doctor::observations::{EndpointObservation, ListenState, Observations, Resolution};

/// Largest clock skew in seconds that is not reported. Leases and tokens tolerate less skew than certificates.
const MIN_SKEW: f64 = 5.0;
/// Smallest skew in seconds that counts as the cause of invalid certificates.
const CERTIFICATE_SKEW: f64 = 300.0;

pub(super) fn configuration(observations: &Observations, found: &mut Vec<Finding>) {
    for error in &observations.configuration {
        let (cause, what) = if error.contains("would loop") {
            (Cause::Loop, "An endpoint is an address of jackstay itself: requests would loop.")
        } else {
            (Cause::Configuration, "The configuration is invalid.")
        };
        found.push(problem(cause, what, error, "Correct it; `jackstay check` lists every error."));
    }
    for endpoint in &observations.endpoints {
        if let Some(own) = endpoint.loops_to {
            let finding = problem(
                Cause::Loop,
                format!("{} leads back to jackstay itself: requests would loop.", endpoint.address),
                format!("the endpoint resolves to {own}, where jackstay listens"),
                "Name the apiservers themselves, or listen on another port.",
            );
            found.push(finding.about(&endpoint.address));
        }
    }
}

pub(super) fn listen(observations: &Observations, found: &mut Vec<Finding>) {
    for listener in &observations.host.listen {
        let (what, address) = (&listener.what, listener.address);
        let cannot = format!("{what} cannot listen on {address}");
        let unusable = |what: String, because: String, advice: &str| {
            problem(Cause::AddressNotOurs, what, because, advice)
        };
        found.push(match &listener.state {
            ListenState::Free | ListenState::Jackstay => continue,
            ListenState::Taken(owner) => problem(
                Cause::PortTaken,
                format!(
                    "{cannot}: {} listens there.",
                    owner.as_deref().unwrap_or("another process")
                ),
                "bind: address already in use",
                format!(
                    "Stop it or choose another port; `ss -ltnp 'sport = :{}'` shows the process.",
                    address.port()
                ),
            ),
            ListenState::NotLocal if address.is_ipv6() && !observations.host.ipv6 => note(
                Cause::NoIpv6,
                format!("{what} does not listen on {address}: this machine has no IPv6."),
                "bind: no such address",
                "Harmless if the listener has an IPv4 address too.",
            ),
            ListenState::NotLocal => unusable(
                format!("{cannot}: this machine does not have the address."),
                "bind: no such address".to_owned(),
                "Add the address to an interface (a dummy interface suffices), or set freebind, or \
                 listen on another address.",
            ),
            ListenState::Denied => unusable(
                format!("{cannot}: permission denied."),
                "bind: permission denied; the port is privileged".to_owned(),
                "Run jackstay with CAP_NET_BIND_SERVICE, or choose a port from 1024 on.",
            ),
            ListenState::Failed(error) => {
                unusable(cannot + ".", format!("bind: {error}"), "Choose another address.")
            }
        });
    }
}

pub(super) fn images(observations: &Observations, found: &mut Vec<Finding>) {
    for PodImage { manifest, image, state } in &observations.host.images {
        let manifest = manifest.display();
        found.push(match state {
            ImageState::Pinned => continue,
            ImageState::Missing => problem(
                Cause::ImageMissing,
                format!("The image {image} of the static pod is not on this node."),
                format!("{manifest} has `imagePullPolicy: Never`: the pod does not start again"),
                "Import it before the pod ends: `ctr -n k8s.io images import FILE`, then pin it (deploy/README.md#image).",
            ),
            ImageState::Unpinned(why) => problem(
                Cause::ImageUnpinned,
                format!("kubelet deletes the image {image} of the static pod when the disk is full and no container uses it."),
                format!("{why}; {manifest} has `imagePullPolicy: Never`"),
                format!(
                    "containerd: `ctr -n k8s.io images label {image} {PINNED_LABEL}`; CRI-O: pinned_images in \
                     /etc/crio/crio.conf.d (deploy/README.md#image)."
                ),
            ),
            ImageState::Unknown(why) => note(
                Cause::ImageUnknown,
                format!("It is not known whether the image {image} of the static pod is on this node and pinned."),
                why,
                "Run as root with crictl or ctr in PATH.",
            ),
        });
    }
}

pub(super) fn name_servers(observations: &Observations, found: &mut Vec<Finding>) {
    let unanswered: Vec<&EndpointObservation> = observations
        .endpoints
        .iter()
        .filter(|endpoint| matches!(endpoint.resolved, Resolution::NoAnswer(_)))
        .collect();
    let servers = observations.dns.as_ref().map_or(&[][..], |dns| &dns.servers);
    let mut silent: Vec<String> = Vec::new();
    for server in servers.iter().filter(|server| server.answered == 0) {
        // resolv.conf may name a server twice.
        let ip = server.address.ip().to_string();
        if !silent.contains(&ip) {
            silent.push(ip);
        }
    }
    if !unanswered.is_empty() {
        let none_answers = || {
            format!("none of the name servers in /etc/resolv.conf answers ({})", silent.join(", "))
        };
        let unreadable = observations.dns.as_ref().and_then(|dns| dns.resolv_conf.clone());
        found.push(problem(
            Cause::DnsBlackHole,
            format!("Names cannot be resolved, for example {}.", unanswered[0].address),
            unreadable.unwrap_or_else(none_answers),
            "Name the apiservers by IP address, so that nothing depends on DNS, or repair the name \
             servers.",
        ));
    } else if !silent.is_empty() {
        found.push(problem(
            Cause::DnsPartly,
            format!("The name server {} does not answer; another one does.", silent.join(" and ")),
            "every query timed out or failed",
            "A lookup may wait for it first: remove it from /etc/resolv.conf.",
        ));
    }
    for endpoint in &observations.endpoints {
        if endpoint.resolved == Resolution::NoSuchName {
            let finding = problem(
                Cause::NoSuchName,
                format!("The name in {} does not exist.", endpoint.address),
                "the name servers answer that it has no address",
                "Check its spelling and the name servers of this machine.",
            );
            found.push(finding.about(&endpoint.address));
        }
    }
}

pub(super) fn clocks(observations: &Observations) -> Option<Finding> {
    let skewed =
        |e: &&EndpointObservation| e.clock_skew_s.is_some_and(|skew| skew.abs() > MIN_SKEW);
    let off: Vec<&EndpointObservation> = observations.endpoints.iter().filter(skewed).collect();
    let known = observations.endpoints.iter().filter(|e| e.clock_skew_s.is_some()).count();
    let first = off.first()?;
    let skew = first.clock_skew_s.unwrap_or_default();
    let direction = if skew > 0.0 { "ahead of" } else { "behind" };
    // If all servers differ, the clock of this machine is wrong.
    let owner = if off.len() == known { "this machine's" } else { "its" };
    let invalidates = skew.abs() > CERTIFICATE_SKEW;
    Some(problem(
        if invalidates { Cause::ClockSkew } else { Cause::SmallClockSkew },
        format!(
            "The clock of {} is {:.0} s {direction} this machine's.",
            first.address,
            skew.abs()
        ),
        format!("Date header of its responses ({} of {known} endpoints)", off.len()),
        format!("Set {owner} clock: certificates, tokens and leases depend on it."),
    ))
}

pub(super) fn limits(observations: &Observations) -> Option<Finding> {
    // A client socket and an upstream socket for each connection, and 64 for the process itself.
    let wanted = observations.host.wanted_connections * 2 + 64;
    let limit = observations.host.open_files.filter(|limit| *limit < wanted)?;
    Some(note(
        Cause::OpenFiles,
        format!(
            "The limit of open files is {limit}; the connections that the configuration allows \
             need {wanted}."
        ),
        "soft limit of this shell (`ulimit -n`)",
        "Raise LimitNOFILE in the unit, or lower limits.max_connections.",
    ))
}

//! Causes on the way to an endpoint, and in the endpoint: dead, forgotten, sick, lossy, slow.

use std::net::IpAddr;

use super::{Cause, Finding, note, problem};
use crate::doctor::observations::{
    Attempt, Endpoint, Failure, Kind, Lasting, Observations, Resolved, Source, Step, percentile,
};
use crate::observe::counted;

/// A connection silent this long while fresh ones work has been forgotten by somebody. Loss does
/// not do that: at 5 % it takes more than ten retransmissions in a row, each 200 ms later.
const SILENT_MS: f64 = 3500.0;
/// Share of late round trips from which on loss is told.
const LOSS: f64 = 0.01;

/// Whether a failure is the transport's: nothing got through.
fn is_unreachable(attempt: &Attempt) -> bool {
    attempt.failure.as_ref().is_some_and(|failure| match failure.step {
        Step::Connect => true,
        Step::Tls | Step::Http2 => matches!(failure.kind, Kind::Timeout | Kind::Reset),
        _ => false,
    })
}

fn is_dead(endpoint: &Endpoint) -> bool {
    !endpoint.fresh.is_empty() && endpoint.fresh.iter().all(is_unreachable)
}

fn is_ipv6(endpoint: &Endpoint) -> bool {
    matches!(&endpoint.resolved, Resolved::Addresses(ips) if ips.iter().all(IpAddr::is_ipv6))
}

/// Fresh connections in a row at the end that make an endpoint one that has died: two seconds.
const TAIL: usize = 4;

/// How many of the last fresh connections failed, if all that came before them worked.
fn died(endpoint: &Endpoint) -> Option<usize> {
    let tail = endpoint.fresh.iter().rev().take_while(|a| is_unreachable(a)).count();
    let before = &endpoint.fresh[..endpoint.fresh.len() - tail];
    let worked = !before.is_empty() && !before.iter().any(is_unreachable);
    (tail >= TAIL && worked).then_some(tail)
}

/// What to do about an endpoint whose fresh connections fail. The last failure counts: while a
/// process is being killed, its kernel still accepts connections, and cuts them.
fn advice(endpoint: &Endpoint, failure: &Failure, seen: &Observations) -> &'static str {
    match (failure.step, failure.kind) {
        (Step::Connect, Kind::Refused) => {
            "The machine answers but nothing listens there: is the apiserver running, and is the port \
             right?"
        }
        (Step::Connect, Kind::Unreachable) if is_ipv6(endpoint) && !seen.host.ipv6 => {
            "It is an IPv6 address, and this machine has no IPv6: name an IPv4 address."
        }
        (Step::Connect, Kind::Timeout | Kind::Unreachable) => {
            "Its packets get no answer: is the machine up, and is no firewall in between?"
        }
        (_, Kind::Reset) => {
            "Connections are accepted and cut at once: an apiserver that is ending or starting, or \
             a load balancer without a live server behind it."
        }
        _ => {
            "Connections are accepted and then nothing: a load balancer without a live server \
             behind it, or a process that is stopped."
        }
    }
}

fn last_failure(endpoint: &Endpoint) -> Option<&Failure> {
    endpoint.fresh.iter().rev().find_map(|attempt| attempt.failure.as_ref())
}

pub(super) fn reach(seen: &Observations, found: &mut Vec<Finding>) {
    let dead: Vec<(&Endpoint, &Failure)> = seen
        .endpoints
        .iter()
        .filter(|endpoint| is_dead(endpoint))
        .filter_map(|endpoint| Some((endpoint, last_failure(endpoint)?)))
        .collect();
    let all = dead.len() == seen.endpoints.len() && dead.len() > 1;
    if all {
        let addresses: Vec<&str> = dead.iter().map(|(e, _)| e.address.as_str()).collect();
        let summary = problem(
            84,
            Cause::DeadEndpoint,
            format!("None of the {} endpoints can be reached.", dead.len()),
            format!("{} ({})", dead[0].1.text, addresses.join(", ")),
            "They do not all die at once: look at this machine's network, its routes and firewall.",
        );
        let endpoints = addresses.iter().map(ToString::to_string).collect();
        found.push(Finding { endpoints, ..summary });
    }
    // All of them in the same way: that has been said.
    let alike = dead.iter().all(|(_, f)| (f.step, f.kind) == (dead[0].1.step, dead[0].1.kind));
    let finding = |endpoint: &Endpoint, failure: &Failure, what: &str, failed: &str| {
        let of = endpoint.fresh.len();
        let finding = problem(
            75,
            Cause::DeadEndpoint,
            format!("{} {what}", endpoint.address),
            format!("{failed} of {of} fresh connections failed: {}", failure.text),
            advice(endpoint, failure, seen),
        );
        finding.about(&endpoint.address)
    };
    for (endpoint, failure) in dead.into_iter().filter(|_| !(all && alike)) {
        let all = endpoint.fresh.len().to_string();
        found.push(finding(endpoint, failure, "is dead.", &all));
    }
    for endpoint in &seen.endpoints {
        if let (Some(tail), Some(failure)) = (died(endpoint), last_failure(endpoint)) {
            let last = format!("the last {tail}");
            found.push(finding(endpoint, failure, "has died during the examination.", &last));
        }
    }
    for endpoint in &seen.endpoints {
        if let Some(failure) = endpoint.failures(Step::Http2).find(|f| f.kind == Kind::NoHttp2) {
            let finding = problem(
                72,
                Cause::NoHttp2,
                format!("{} does not speak HTTP/2.", endpoint.address),
                failure.text.clone(),
                "Is it an apiserver, or a proxy before it that ends TLS? Use mode passthrough there.",
            );
            found.push(finding.about(&endpoint.address));
        }
    }
}

pub(super) fn credential(endpoint: &Endpoint, found: &mut Vec<Finding>) {
    let refused = endpoint.fresh.iter().filter_map(|a| a.failure.as_ref());
    if let Some(failure) = refused.clone().find(|f| f.kind == Kind::Unauthorized)
        && endpoint.authenticated
    {
        let finding = problem(
            70,
            Cause::Unauthorized,
            format!("{} does not accept the credential.", endpoint.address),
            failure.text.clone(),
            "Has the client certificate or the token expired, or is it another cluster's?",
        );
        found.push(finding.about(&endpoint.address));
    }
}

pub(super) fn flows(endpoint: &Endpoint, seen: &Observations, found: &mut Vec<Finding>) {
    let keeps = |other: &&Endpoint| {
        other.source == Source::Cluster
            && !other.lasting.is_empty()
            && other.lasting.iter().all(|lasting| lasting.silent_ms.is_none())
    };
    let direct = if seen.endpoints.iter().any(|other| keeps(&other)) {
        "; on direct paths they last"
    } else {
        ""
    };
    let works_since = |from: f64| {
        let later = endpoint.fresh.iter().filter(|a| a.at_ms.0 >= from);
        later.filter(|a| a.time(Step::Http2).is_some()).count()
    };
    for lasting in &endpoint.lasting {
        let Some(silent) = lasting.silent_ms.filter(|silent| silent.0 >= SILENT_MS) else {
            continue;
        };
        let since = lasting.silent_at_ms.unwrap_or(lasting.at_ms);
        let fresh = works_since(since.0);
        if fresh < 2 {
            continue;
        }
        let finding = problem(
            65,
            Cause::ForgottenFlows,
            format!(
                "Established connections to {} fall silent while fresh ones work.",
                endpoint.address
            ),
            format!(
                "a connection answered {} and then nothing for {:.1} s; {fresh} fresh connections \
                 succeeded beside it{direct}",
                counted(lasting.pongs, "PING"),
                silent.0 / 1000.0
            ),
            "Something in between forgets its flow table: a load balancer, a firewall or NAT. \
             Through jackstay clients do not notice; name the apiservers themselves if you can.",
        );
        found.push(finding.about(&endpoint.address));
        return;
    }
    if let Some(idle) = endpoint.idle.as_ref().filter(|idle| !idle.alive)
        && works_since(0.0) >= 2
        && endpoint.lasting.iter().all(|l| l.silent_ms.is_none())
    {
        let finding = problem(
            64,
            Cause::ForgottenFlows,
            format!("Idle connections to {} are forgotten.", endpoint.address),
            format!(
                "one that was left alone for {:.0} s does not answer; busy and fresh ones do",
                idle.for_ms.0 / 1000.0
            ),
            "Something in between drops idle flows without a word: raise its idle timeout. jackstay \
             keeps its connections busy.",
        );
        found.push(finding.about(&endpoint.address));
    }
}

pub(super) fn readiness(endpoint: &Endpoint, found: &mut Vec<Finding>) {
    let connected = endpoint.connected();
    let is_sick = |kind: Kind| matches!(kind, Kind::Status(_) | Kind::Timeout);
    let sick: Vec<_> = endpoint.failures(Step::Readyz).filter(|f| is_sick(f.kind)).collect();
    if connected > 0 && sick.len() * 2 >= connected {
        let finding = problem(
            60,
            Cause::SickEndpoint,
            format!("{} is alive and not well: it says that it is not ready.", endpoint.address),
            format!("{} of {}: {}", sick.len(), counted(connected, "time"), sick[0].text),
            "Look at the apiserver's log and its etcd; `kubectl get --raw '/readyz?verbose'` lists \
             its checks.",
        );
        found.push(finding.about(&endpoint.address));
    }
}

/// Connects that took a SYN sent twice: the first retransmission comes after a second (RFC 6298).
fn late_connects(endpoint: &Endpoint) -> usize {
    let slow = |a: &&Attempt| a.time(Step::Connect).is_some_and(|ms| ms.0 >= 900.0);
    endpoint.fresh.iter().filter(slow).count()
}

pub(super) fn loss(seen: &Observations, found: &mut Vec<Finding>) {
    let mut paths = Vec::new();
    for endpoint in &seen.endpoints {
        let sum = |f: fn(&Lasting) -> usize| endpoint.lasting.iter().map(f).sum::<usize>();
        let (pongs, late) = (sum(|l| l.pongs), sum(|l| l.late));
        let retransmitted = sum(|l| l.retransmitted as usize);
        let connects = late_connects(endpoint);
        // A slow server is late as well; what is lost is sent again by our own kernel, nearly each
        // time: the PING itself, or for want of the acknowledgement that its PONG carries.
        let lost = late + connects;
        let share = late as f64 / pongs.max(1) as f64;
        let resent = retransmitted + connects;
        if pongs >= 20 && lost >= 3 && share >= LOSS && resent >= 2 && resent * 3 >= lost {
            paths.push((endpoint, share, late, pongs, retransmitted));
        }
    }
    let Some((first, share, late, pongs, retransmitted)) = paths.first() else { return };
    // A round trip is late if its packet is lost on either way.
    let each_way = (1.0 - (1.0 - share.min(0.99)).sqrt()) * 100.0;
    let whole = paths.len() == seen.endpoints.len() && paths.len() > 1;
    let place = if whole { "every endpoint".to_owned() } else { first.address.clone() };
    found.push(problem(
        50,
        Cause::PacketLoss,
        format!("Packets to {place} are lost: about {each_way:.0} % each way."),
        format!(
            "{late} of {pongs} round trips were late by a retransmission; segments sent again: \
             {retransmitted}"
        ),
        if whole {
            "All paths suffer: look at this machine's interface, cable and switch port."
        } else {
            "Look at the path to that endpoint: switches, links, a load balancer out of breath."
        },
    ));
}

pub(super) fn unsteady(endpoint: &Endpoint, found: &mut Vec<Finding>) {
    if is_dead(endpoint) || died(endpoint).is_some() {
        return;
    }
    let failed: Vec<_> = endpoint.fresh.iter().filter(|a| is_unreachable(a)).collect();
    // One of many may be anybody's bad luck.
    if failed.len() >= 2
        && failed.len() * 10 >= endpoint.fresh.len()
        && let Some(failure) = &failed[0].failure
    {
        found.push(problem(
            45,
            Cause::Unsteady,
            format!(
                "{} of {} fresh connections to {} failed.",
                failed.len(),
                endpoint.fresh.len(),
                endpoint.address
            ),
            failure.text.clone(),
            "A load balancer with one dead server behind it looks like this: compare the apiservers \
             one by one.",
        ));
    }
}

/// The median of a step over all fresh connections.
pub fn median(endpoint: &Endpoint, step: Step) -> Option<f64> {
    let mut times: Vec<f64> =
        endpoint.fresh.iter().filter_map(|a| a.time(step)).map(|ms| ms.0).collect();
    times.sort_by(f64::total_cmp);
    percentile(&times, 0.5)
}

/// The way through a load balancer against the direct ones.
pub(super) fn paths(seen: &Observations, found: &mut Vec<Finding>) {
    let direct: Vec<f64> = seen
        .endpoints
        .iter()
        .filter(|e| e.source == Source::Cluster)
        .filter_map(|e| median(e, Step::Http2))
        .collect();
    let Some(best) = direct.iter().copied().min_by(f64::total_cmp) else { return };
    for endpoint in seen.endpoints.iter().filter(|e| e.source == Source::Given) {
        if let Some(time) = median(endpoint, Step::Http2)
            && time > 3.0 * best
            && time > best + 20.0
        {
            found.push(note(
                Cause::SlowPath,
                format!(
                    "The way through {} takes {time:.0} ms, the best direct one {best:.1} ms.",
                    endpoint.address
                ),
                "median of the first PING of fresh connections",
                "Name the apiservers themselves as endpoints.",
            ));
        }
    }
}

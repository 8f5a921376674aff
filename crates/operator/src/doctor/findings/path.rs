//! Rules for causes on the path to an endpoint and in the endpoint itself: an unreachable or not ready
//! endpoint, forgotten flows, packet loss, a slow path.

use std::net::IpAddr;

use jackstay_core::quantity::quantity;

use super::finding::{Cause, Finding, note, problem};
use crate::doctor::observations::{
    ConnectAttempt, EndpointObservation, EndpointSource, Failure, FailureKind, LongLived,
    Observations, Resolution, Step, percentile,
};

/// A connection that is silent for this many milliseconds while fresh ones work was forgotten by a
/// device on the path.
///
/// Packet loss is no explanation. Linux retransmits a segment after the RTO, which is at least 200 ms
/// (`TCP_RTO_MIN`) and doubles each time (RFC 6298 section 5.5): a PING is sent at 0, 0.2, 0.6, 1.4 and
/// 3.0 s. With 5 % loss in each direction, 1 - 0.95² = 9.75 % of the attempts fail, and all five with a
/// probability of 0.0975⁵, about 1 in 100,000.
const SILENT_MS: f64 = 3500.0;
/// Smallest share of late round trips that is reported as loss.
const MIN_LOSS: f64 = 0.01;

/// Whether the connection failed in the transport, before any response.
pub(super) fn is_unreachable(attempt: &ConnectAttempt) -> bool {
    attempt.failure.as_ref().is_some_and(|failure| match failure.step {
        Step::Connect => true,
        Step::Tls | Step::Http2 => {
            matches!(failure.kind, FailureKind::Timeout | FailureKind::Reset)
        }
        _ => false,
    })
}

fn is_dead(endpoint: &EndpointObservation) -> bool {
    !endpoint.fresh.is_empty() && endpoint.fresh.iter().all(is_unreachable)
}

fn is_ipv6(endpoint: &EndpointObservation) -> bool {
    matches!(&endpoint.resolved, Resolution::Addresses(ips) if ips.iter().all(IpAddr::is_ipv6))
}

/// An endpoint counts as failed during the examination if at least this many of its last fresh
/// connections failed, which are those of the last 2 s.
const MIN_FAILED_TAIL: usize = 4;

/// The number of the last fresh connections that failed, if they are at least `MIN_FAILED_TAIL` and none
/// before them failed.
fn failed_tail(endpoint: &EndpointObservation) -> Option<usize> {
    let tail = endpoint.fresh.iter().rev().take_while(|a| is_unreachable(a)).count();
    let before = &endpoint.fresh[..endpoint.fresh.len() - tail];
    let worked = !before.is_empty() && !before.iter().any(is_unreachable);
    (tail >= MIN_FAILED_TAIL && worked).then_some(tail)
}

/// Advice for an endpoint whose fresh connections fail. The last failure decides, because earlier ones
/// may differ: while a process is being killed, its kernel still accepts connections and resets them.
pub(super) fn advice(
    endpoint: &EndpointObservation,
    failure: &Failure,
    observations: &Observations,
) -> &'static str {
    match (failure.step, failure.kind) {
        (Step::Connect, FailureKind::Refused) => {
            "The machine answers but nothing listens there: check that the apiserver is running and \
             the port is right."
        }
        (Step::Connect, FailureKind::Unreachable | FailureKind::NoRoute)
            if is_ipv6(endpoint) && !observations.host.ipv6 =>
        {
            "It is an IPv6 address, and this machine has no IPv6: name an IPv4 address."
        }
        (Step::Connect, FailureKind::NoRoute) => {
            "There is no path to the address: check the routes of this machine (`ip route get \
             ADDRESS`), that its VPN is connected, and that no router or firewall rejects the \
             address. In the same subnet the machine may be off."
        }
        (Step::Connect, FailureKind::Unreachable) => {
            "The kernel of this machine rejects the connection: check its firewall and routes."
        }
        (Step::Connect, FailureKind::Timeout) => {
            "Packets to it get no response: check that the machine is up and that no firewall drops \
             them."
        }
        (_, FailureKind::Reset) => {
            "Connections are accepted and closed at once: an apiserver that is starting or stopping, \
             a load balancer without a live server, or a port of another protocol than TLS."
        }
        (Step::Tls, _) => {
            "The network carries packets to it, because TCP connects; the process does not answer TLS. \
             A stopped, hung or overloaded apiserver does this, and a load balancer without a live \
             server. On the node of the apiserver look at the process and its log (`crictl ps -a --name \
             kube-apiserver`) and at the load and memory (`uptime`, `free`). If all is well there, the \
             path may lose large packets (MTU)."
        }
        _ => {
            "Connections are accepted without a response: a stopped process, or a load balancer \
             without a live server."
        }
    }
}

pub(super) fn reachability(observations: &Observations, found: &mut Vec<Finding>) {
    let (mut dead, mut failed) = (Vec::new(), Vec::new());
    for endpoint in &observations.endpoints {
        let last = endpoint.fresh.iter().rev().find_map(|attempt| attempt.failure.as_ref());
        let Some(failure) = last else { continue };
        let total = endpoint.fresh.len();
        let is_given = endpoint.source == EndpointSource::Given;
        let finding = |what: &str, failed: String| {
            problem(
                Cause::DeadEndpoint,
                format!("{} {what}", endpoint.address),
                format!("{failed} of {total} fresh connections failed: {}", failure.text),
                advice(endpoint, failure, observations),
            )
            .about(&endpoint.address)
        };
        if is_dead(endpoint) {
            let what = match (failure.step, failure.kind) {
                (Step::Tls, FailureKind::Timeout) => {
                    "accepts TCP connections but does not answer TLS."
                }
                _ if is_given => "is dead.",
                _ => "cannot be reached from here.",
            };
            dead.push((endpoint, failure, finding(what, total.to_string())));
        } else if let Some(tail) = failed_tail(endpoint) {
            failed.push(finding("has failed during the examination.", format!("the last {tail}")));
        }
    }
    let mut all_alike = false;
    let mut addresses: Vec<String> = dead.iter().map(|(e, ..)| e.address.clone()).collect();
    // A plan may contain an address twice.
    addresses.sort();
    addresses.dedup();
    if dead.len() == observations.endpoints.len() && addresses.len() > 1 {
        let (endpoint, first) = (dead[0].0, dead[0].1);
        all_alike = dead.iter().all(|(_, f, _)| (f.step, f.kind) == (first.step, first.kind));
        // Packets have come back from the others.
        let is_of_network = |f: &Failure| f.step == Step::Connect && f.kind != FailureKind::Refused;
        let advice = if dead.iter().all(|(_, f, _)| is_of_network(f)) {
            "All fail at once: check the network of this machine, its routes and its firewall."
        } else if all_alike {
            advice(endpoint, first, observations)
        } else {
            "They fail in different ways: see the advice for each."
        };
        let failure = match (first.step, first.kind) {
            (Step::Tls, FailureKind::Timeout) if all_alike => "answers TLS, although TCP connects",
            _ => "can be reached",
        };
        let summary = problem(
            Cause::DeadEndpoint,
            format!("None of the {} endpoints {failure}.", addresses.len()),
            format!("{} ({})", first.text, addresses.join(", ")),
            advice,
        );
        found.push(Finding { endpoints: addresses, ..summary });
    }
    // If all fail in the same way, the summary suffices.
    if !all_alike {
        found.extend(dead.into_iter().map(|(.., finding)| finding));
    }
    found.append(&mut failed);
}

/// A proxy that accepts TLS and forwards the requests without it.
pub(super) fn plain_http(endpoint: &EndpointObservation) -> Option<Finding> {
    let failure = endpoint.failures(Step::Readyz).find(|f| f.kind == FailureKind::PlainHttp)?;
    let finding = problem(
        Cause::Tls,
        format!("A proxy at {} sends plain HTTP to the apiserver.", endpoint.address),
        failure.text.clone(),
        "Let it pass TLS through (TCP mode): an apiserver accepts TLS only, and client certificates \
         do not pass a proxy that terminates TLS.",
    );
    Some(finding.about(&endpoint.address))
}

pub(super) fn http2(endpoint: &EndpointObservation) -> Option<Finding> {
    let failure = endpoint.failures(Step::Http2).find(|f| f.kind == FailureKind::NoHttp2)?;
    let finding = problem(
        Cause::NoHttp2,
        format!("{} does not speak HTTP/2.", endpoint.address),
        failure.text.clone(),
        "If a proxy in front of the apiserver terminates TLS, use mode passthrough there.",
    );
    Some(finding.about(&endpoint.address))
}

pub(super) fn credential(endpoint: &EndpointObservation) -> Option<Finding> {
    let mut failures = endpoint.fresh.iter().filter_map(|a| a.failure.as_ref());
    let failure =
        failures.find(|f| f.kind == FailureKind::Unauthorized && endpoint.authenticated)?;
    let finding = problem(
        Cause::Unauthorized,
        format!("{} does not accept the credential.", endpoint.address),
        failure.text.clone(),
        "Check that the client certificate or token has not expired and belongs to this cluster.",
    );
    Some(finding.about(&endpoint.address))
}

/// Whether a connection that stayed open fell silent.
fn fell_silent(endpoint: &EndpointObservation) -> bool {
    endpoint.long_lived.iter().any(|connection| connection.silent_ms.is_some())
}

/// A server that closes a connection because of PINGs.
pub(super) fn limited_pings(endpoint: &EndpointObservation) -> Option<Finding> {
    let refused = endpoint.long_lived.iter().find(|connection| connection.refuses_pings)?;
    let ended = refused.ended.as_deref().unwrap_or("closed");
    let finding = problem(
        Cause::LimitedPings,
        format!("{} closes connections because of PINGs.", endpoint.address),
        format!("{ended}, after {} without a request", quantity(refused.pongs, "PING")),
        "The server, or a front end before it, limits PINGs (keepalive enforcement of gRPC, which allows one in 5 minutes \
         by default). Let it accept one in each health.ping_interval of the upstream, or set that interval to what it \
         accepts. Until then jackstay sends fewer PINGs after each complaint (`jackstay status`), and notices a stopped \
         process only by the next request or /readyz.",
    );
    Some(finding.about(&endpoint.address))
}

pub(super) fn forgotten_flows(
    endpoint: &EndpointObservation,
    observations: &Observations,
) -> Option<Finding> {
    let connected_since = |from: f64| {
        let later = endpoint.fresh.iter().filter(|a| a.at_ms.0 >= from);
        later.filter(|a| a.time(Step::Http2).is_some()).count()
    };
    let forgotten = endpoint.long_lived.iter().find_map(|connection| {
        let silent = connection.silent_ms.filter(|silent| silent.0 >= SILENT_MS)?;
        let fresh = connected_since(connection.silent_at_ms.unwrap_or(connection.at_ms).0);
        (fresh >= 2).then_some((connection.pongs, silent, fresh))
    });
    let finding = if let Some((pongs, silent, fresh)) = forgotten {
        let stays_open = |other: &EndpointObservation| {
            other.source == EndpointSource::Cluster
                && !other.long_lived.is_empty()
                && !fell_silent(other)
        };
        let direct = if observations.endpoints.iter().any(stays_open) {
            "; on direct paths connections last"
        } else {
            ""
        };
        problem(
            Cause::ForgottenFlows,
            format!(
                "Established connections to {} fall silent while fresh ones work.",
                endpoint.address
            ),
            format!(
                "a connection answered {} and then was silent for {:.1} s, while {fresh} fresh \
                 connections succeeded{direct}",
                quantity(pongs, "PING"),
                silent.0 / 1000.0
            ),
            "A load balancer, firewall or NAT on the path forgets established flows. jackstay hides \
             this from clients; if you can, name the apiservers themselves.",
        )
    } else {
        let idle = endpoint.idle.as_ref().filter(|idle| !idle.alive)?;
        if connected_since(0.0) < 2 || fell_silent(endpoint) {
            return None;
        }
        problem(
            Cause::ForgottenFlows,
            format!("Idle connections to {} are forgotten.", endpoint.address),
            format!(
                "a connection that was idle for {:.0} s does not respond; busy and fresh ones do",
                idle.for_ms.0 / 1000.0
            ),
            "A device on the path drops idle flows silently: raise its idle timeout. jackstay keeps \
             its own connections busy.",
        )
    };
    Some(finding.about(&endpoint.address))
}

pub(super) fn readiness(endpoint: &EndpointObservation) -> Option<Finding> {
    let connected = endpoint.connected();
    let is_not_ready = |f: &&Failure| {
        matches!(
            f.kind,
            FailureKind::Status(_) | FailureKind::ErrorOfJackstay(_) | FailureKind::Timeout
        )
    };
    let failed: Vec<_> = endpoint.failures(Step::Readyz).filter(is_not_ready).collect();
    if connected == 0 || failed.len() * 2 < connected {
        return None;
    }
    // The host explains it.
    let routing = endpoint.host_routing.as_ref();
    if routing.is_some_and(|routing| routing.refused == endpoint.authority) {
        return None;
    }
    let own = failed.iter().find(|f| matches!(f.kind, FailureKind::ErrorOfJackstay(_)));
    let is_not_served = |f: &&&Failure| matches!(f.kind, FailureKind::Status(404 | 421));
    if let Some(failure) = failed.iter().find(is_not_served) {
        let finding = problem(
            Cause::NotServed,
            format!("{} has no apiserver at the host and path of the requests.", endpoint.address),
            failure.text.clone(),
            "Behind a gateway, upstreams[].path_prefix and authority must be the path and the host of `server` in a \
             kubeconfig that works (`jackstay kubeconfig` writes them), and the TLS server name must suit the host.",
        );
        return Some(finding.about(&endpoint.address));
    }
    let advice_of_apiserver = format!(
        "Check the log of the apiserver and its etcd; `kubectl get --raw '{}/readyz?verbose'` lists the checks.",
        endpoint.path_prefix
    );
    let (what, shown, advice) = match own {
        Some(own) => (
            "is a jackstay that answers, but it cannot reach an apiserver.",
            *own,
            "Its endpoints are the cause, not it: `jackstay status` on its machine lists them, and \
             `jackstay doctor --config` there examines them.",
        ),
        None => ("responds but is not ready.", failed[0], advice_of_apiserver.as_str()),
    };
    let finding = problem(
        Cause::NotReadyEndpoint,
        format!("{} {what}", endpoint.address),
        format!("{} of {}: {}", failed.len(), quantity(connected, "time"), shown.text),
        advice,
    );
    Some(finding.about(&endpoint.address))
}

/// Number of connects that took 900 ms or more, so that their SYN was retransmitted: the first
/// retransmission is sent after 1 s (RFC 6298 section 2).
fn late_connects(endpoint: &EndpointObservation) -> usize {
    let slow = |a: &&ConnectAttempt| a.time(Step::Connect).is_some_and(|ms| ms.0 >= 900.0);
    endpoint.fresh.iter().filter(slow).count()
}

pub(super) fn loss(observations: &Observations) -> Option<Finding> {
    let mut paths = Vec::new();
    for endpoint in &observations.endpoints {
        let sum = |f: fn(&LongLived) -> usize| endpoint.long_lived.iter().map(f).sum::<usize>();
        let (pongs, late) = (sum(|l| l.pongs), sum(|l| l.late));
        let retransmitted = sum(|l| l.retransmitted as usize);
        let connects = late_connects(endpoint);
        // A slow server answers late too, but only loss causes retransmissions: if the PING is lost, or the
        // PONG with the acknowledgement, this machine's kernel retransmits the PING.
        let lost = late + connects;
        let share = late as f64 / pongs.max(1) as f64;
        let retransmissions = retransmitted + connects;
        if pongs >= 20
            && lost >= 3
            && share >= MIN_LOSS
            && retransmissions >= 2
            && retransmissions * 3 >= lost
        {
            paths.push((endpoint, share, late, pongs, retransmitted));
        }
    }
    let (first, share, late, pongs, retransmitted) = paths.first()?;
    // A round trip is late if a packet is lost in one of the two directions.
    let each_way = (1.0 - (1.0 - share.min(0.99)).sqrt()) * 100.0;
    let all = paths.len() == observations.endpoints.len() && paths.len() > 1;
    let place = if all { "every endpoint" } else { &first.address };
    let finding = problem(
        Cause::PacketLoss,
        format!("Packets to {place} are lost: about {each_way:.0} % in each direction."),
        format!(
            "{late} of {pongs} round trips contained a retransmission; retransmitted segments: \
             {retransmitted}"
        ),
        if all {
            "All paths are affected: check the interface, cable and switch port of this machine."
        } else {
            "Check the path to that endpoint: switches, links, an overloaded load balancer."
        },
    );
    Some(if all { finding } else { finding.about(&first.address) })
}

pub(super) fn intermittent(endpoint: &EndpointObservation) -> Option<Finding> {
    if is_dead(endpoint) || failed_tail(endpoint).is_some() {
        return None;
    }
    let failed: Vec<_> = endpoint.fresh.iter().filter(|a| is_unreachable(a)).collect();
    // A single failure or less than 10 % may be an accident.
    if failed.len() < 2 || failed.len() * 10 < endpoint.fresh.len() {
        return None;
    }
    let (failures, total) = (failed.len(), endpoint.fresh.len());
    Some(problem(
        Cause::IntermittentEndpoint,
        format!("{failures} of {total} fresh connections to {} failed.", endpoint.address),
        failed[0].failure.as_ref()?.text.clone(),
        "A load balancer with one dead server fails like this: examine the apiservers one by one.",
    ))
}

/// Compares the endpoints that the user named with the direct paths to the apiservers.
pub(super) fn slow_balancers(observations: &Observations, found: &mut Vec<Finding>) {
    let from = |source| observations.endpoints.iter().filter(move |e| e.source == source);
    let median = |e: &EndpointObservation| percentile(&e.times(Step::Http2), 0.5);
    let direct = from(EndpointSource::Cluster).filter_map(median).min_by(f64::total_cmp);
    let Some(best) = direct else { return };
    for endpoint in from(EndpointSource::Given) {
        if let Some(time) =
            median(endpoint).filter(|time| *time > 3.0 * best && *time > best + 20.0)
        {
            found.push(note(
                Cause::SlowPath,
                format!(
                    "A round trip through {} takes {time:.0} ms, the fastest direct one {best:.1} ms.",
                    endpoint.address
                ),
                "median of the first PING of fresh connections",
                "Name the apiservers themselves as endpoints.",
            ));
        }
    }
}

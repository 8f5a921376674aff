//! Runs all probes side by side for a while, and gathers what they saw.

use std::cell::RefCell;
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustls::pki_types::CertificateDer;
use tokio::sync::Mutex;
use tokio::task::{JoinHandle, LocalSet};
use tokio::time::{Instant, sleep_until, timeout};

use super::dns::Resolver;
use super::host;
use super::lasting;
use super::observations::{
    Attempt, Certificate, Endpoint, Failure, Kind, Observations, Resolved, Shown, Step,
};
use super::probe::{self, Clock, Learned, STEP_LIMIT};
use super::target::{Place, Plan, Target};
use crate::net::tls::certificate::{CertInfo, Validity, cert_info};
use crate::net::tls::local_ca::subject_alt_names;
use crate::observe::utc::Utc;

/// Between two fresh connections to one endpoint: enough of them in ten seconds for a median, and
/// far below what a kubelet does after a restart.
const FRESH_EVERY: Duration = Duration::from_millis(500);
/// Most apiservers that are added because the cluster names them.
const MAX_SIBLINGS: usize = 16;

/// Examines everything for `duration`.
///
/// # Errors
/// The runtime could not be made.
pub fn run(plan: Plan, resolver: Resolver, duration: Duration) -> std::io::Result<Observations> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    Ok(LocalSet::new().block_on(&runtime, examine(plan, resolver, duration)))
}

async fn examine(plan: Plan, resolver: Resolver, duration: Duration) -> Observations {
    let resolver = Rc::new(Mutex::new(resolver));
    let host = host::look(&plan.places, &plan.running, plan.wanted_connections);
    let mut places = Vec::new();
    for target in plan.targets {
        let addresses = resolver.lock().await.resolve(&target.host).await;
        places.push((target, addresses));
    }
    for sibling in siblings(&places).await {
        let addresses = resolver.lock().await.resolve(&sibling.host).await;
        places.push((sibling, addresses));
    }
    let began = Instant::now();
    let until = began + duration;
    let running: Vec<_> = places
        .into_iter()
        .map(|(target, addresses)| {
            let resolver = Rc::clone(&resolver);
            let listen = plan.places.clone();
            tokio::task::spawn_local(async move {
                one(target, addresses, &listen, resolver, began, until).await
            })
        })
        .collect();
    let mut endpoints = Vec::new();
    for task in running {
        if let Ok(endpoint) = task.await {
            endpoints.push(endpoint);
        }
    }
    let dns = resolver.lock().await.observed();
    Observations { configuration: plan.configuration, host, dns, endpoints }
}

/// The apiservers that the cluster names and nobody gave, asked of the first that answers.
async fn siblings(resolved: &[(Target, Resolved)]) -> Vec<Target> {
    for (target, addresses) in resolved.iter().filter(|(target, _)| target.peer.authenticated) {
        let Resolved::Addresses(ips) = addresses else { continue };
        let Some(ip) = ips.first() else { continue };
        let asked = members(target, SocketAddr::new(*ip, target.port));
        let Ok(Some(members)) = timeout(STEP_LIMIT, asked).await else { continue };
        let known = |address: &SocketAddr| {
            resolved.iter().any(|(target, addresses)| {
                target.port == address.port()
                    && matches!(addresses, Resolved::Addresses(ips) if ips.contains(&address.ip()))
            })
        };
        return members
            .iter()
            .filter(|address| !known(address))
            .take(MAX_SIBLINGS)
            .filter_map(|address| target.sibling(*address).ok())
            .collect();
    }
    Vec::new()
}

/// The addresses that the cluster names, asked of one of its apiservers.
async fn members(target: &Target, address: SocketAddr) -> Option<Vec<SocketAddr>> {
    let mut clock = Clock::new(Instant::now());
    let mut opened = probe::open(&mut clock, address, &target.peer).await.ok()?;
    super::members::ask(&mut opened, &target.peer, "").await.ok()
}

/// Everything about one endpoint.
async fn one(
    target: Target,
    addresses: Resolved,
    places: &[Place],
    resolver: Rc<Mutex<Resolver>>,
    began: Instant,
    until: Instant,
) -> Endpoint {
    let ips = match &addresses {
        Resolved::Addresses(ips) => ips.clone(),
        Resolved::NoSuchName | Resolved::NoAnswer(_) => Vec::new(),
    };
    let loops_to = loops(&ips, target.port, places);
    let target = Rc::new(target);
    let mut endpoint = Endpoint {
        address: target.address.clone(),
        source: target.source,
        server_name: target.server_name.clone(),
        resolved: addresses,
        loops_to,
        fresh: Vec::new(),
        lasting: Vec::new(),
        idle: None,
        certificate: None,
        clock_skew_s: None,
        max_streams: None,
        authenticated: target.peer.authenticated,
        shown: target.shown().map(|info| Shown {
            subject: info.subject.to_string(),
            not_after: Utc(info.not_after).seconds(),
            expires_in_s: expires_in(info),
        }),
    };
    // What leads back here is not asked: the answer would be our own.
    if loops_to.is_some() || ips.is_empty() {
        return endpoint;
    }
    let stay = ips.first().map(|ip| {
        let address = SocketAddr::new(*ip, target.port);
        let (busy, idle) = (Rc::clone(&target), Rc::clone(&target));
        (
            tokio::task::spawn_local(async move {
                lasting::keep(address, &busy.peer, began, until).await
            }),
            tokio::task::spawn_local(async move {
                lasting::leave_alone(address, &idle.peer, began, until).await
            }),
        )
    });
    for learned in fresh(&target, &resolver, began, until).await {
        endpoint.fresh.extend(learned.attempt);
        endpoint.max_streams = learned.max_streams.or(endpoint.max_streams);
        // The exchange that took the least time is the truest.
        endpoint.clock_skew_s = match (endpoint.clock_skew_s, learned.skew) {
            (Some(known), Some(new)) if new.abs() < known.abs() => Some(new),
            (known, new) => known.or(new),
        };
    }
    if let Some((busy, idle)) = stay {
        endpoint.lasting = busy.await.unwrap_or_default();
        endpoint.idle = idle.await.ok().flatten();
    }
    endpoint.certificate = target.verifier.shown().and_then(|der| describe(&der));
    endpoint
}

/// Opens a fresh connection every while, whether or not the earlier ones are done.
async fn fresh(
    target: &Rc<Target>,
    resolver: &Rc<Mutex<Resolver>>,
    began: Instant,
    until: Instant,
) -> Vec<Learned> {
    let learned = Rc::new(RefCell::new(Vec::new()));
    let mut running: Vec<JoinHandle<()>> = Vec::new();
    let mut round = 0;
    loop {
        let (target, resolver) = (Rc::clone(target), Rc::clone(resolver));
        let results = Rc::clone(&learned);
        running.push(tokio::task::spawn_local(async move {
            let result = once(&target, &resolver, began, round).await;
            results.borrow_mut().push(result);
        }));
        round += 1;
        // Not all endpoints, nor all machines that ask, at the same moment.
        let next = began + FRESH_EVERY * round + FRESH_EVERY.mul_f64(fastrand::f64() / 4.0);
        if next >= until {
            break;
        }
        sleep_until(next).await;
    }
    for task in running {
        // A panic has been printed; the others count.
        let _ = task.await;
    }
    let mut all = learned.take();
    let at = |learned: &Learned| learned.attempt.as_ref().map_or(0.0, |attempt| attempt.at_ms.0);
    all.sort_by(|a, b| at(a).total_cmp(&at(b)));
    all
}

async fn once(target: &Target, resolver: &Mutex<Resolver>, began: Instant, round: u32) -> Learned {
    let mut clock = Clock::new(began);
    // Attempts that wait for silent name servers wait in a row.
    let answer = timeout(STEP_LIMIT, async { resolver.lock().await.resolve(&target.host).await });
    let answer = answer.await.unwrap_or_else(|_| {
        Resolved::NoAnswer(format!("no answer within {} ms", STEP_LIMIT.as_millis()))
    });
    let is_name = target.host.parse::<IpAddr>().is_err();
    if is_name && matches!(answer, Resolved::Addresses(_)) {
        clock.done(Step::Resolve);
    }
    match answer {
        Resolved::Addresses(ips) if !ips.is_empty() => {
            // Each address of a name in turn.
            let ip = ips[round as usize % ips.len()];
            probe::fresh(clock, SocketAddr::new(ip, target.port), &target.peer).await
        }
        other => {
            let text = match other {
                Resolved::NoAnswer(text) => text,
                _ => "no such name".to_owned(),
            };
            let failure = Failure { step: Step::Resolve, kind: Kind::Other, text };
            let attempt: Attempt = clock.end(Some(failure));
            Learned { attempt: Some(attempt), ..Learned::default() }
        }
    }
}

/// The place where jackstay is to listen that a connection to one of `ips` would end at.
fn loops(ips: &[IpAddr], port: u16, places: &[Place]) -> Option<SocketAddr> {
    let ends_at = |bind: &SocketAddr| {
        bind.port() == port
            && port != 0
            && ips.iter().any(|ip| {
                *ip == bind.ip()
                    || bind.ip().is_unspecified()
                        && ip.is_ipv4() == bind.is_ipv4()
                        && host::is_ours(*ip)
            })
    };
    places.iter().map(|place| place.bind).find(ends_at)
}

fn describe(der: &CertificateDer<'_>) -> Option<Certificate> {
    let info = cert_info(der).ok()?;
    Some(Certificate {
        subject: info.subject.to_string(),
        issuer: crate::net::tls::local_ca::issuer_name(der),
        names: subject_alt_names(der).unwrap_or_default(),
        not_before: Utc(info.not_before).seconds(),
        not_after: Utc(info.not_after).seconds(),
        expires_in_s: expires_in(&info),
    })
}

/// Seconds until a certificate ends; negative if it has.
fn expires_in(info: &CertInfo) -> i64 {
    let now = SystemTime::now();
    let seconds = |time: SystemTime| time.duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    let left = seconds(info.not_after).cast_signed() - seconds(now).cast_signed();
    if info.validity(now) == Validity::Expired { left.min(-1) } else { left }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loops_are_seen_through_wildcards() {
        let place = |bind: &str| {
            [Place { what: "listener x".into(), bind: bind.parse().unwrap(), freebind: false }]
        };
        let loops = |ip: &str, port, bind: &str| {
            super::loops(&[ip.parse().unwrap()], port, &place(bind)).is_some()
        };
        assert!(loops("127.0.0.1", 7443, "127.0.0.1:7443"));
        assert!(loops("127.0.0.1", 7443, "0.0.0.0:7443"));
        assert!(!loops("127.0.0.1", 7443, "[::]:7443"));
        assert!(!loops("192.0.2.1", 7443, "0.0.0.0:7443"));
        assert!(!loops("127.0.0.1", 7444, "127.0.0.1:7443"));
    }
}

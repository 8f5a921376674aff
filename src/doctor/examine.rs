//! Runs every probe concurrently for the duration of an examination and collects the observations.

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
use super::long_lived;
use super::observations::{
    ClientCertificate, EndpointObservation, Failure, FailureKind, Observations, Resolution,
    ServerCertificate, Step,
};
use super::probe::{self, FreshResult, STEP_LIMIT, StepTimer};
use super::target::{ExaminationPlan, PlannedListener, Target};
use crate::net::tls::certificate::{CertInfo, Validity, cert_info};
use crate::net::tls::local_ca::subject_alt_names;
use crate::observe::utc::{Utc, wall_clock};

/// Interval between fresh connections to one endpoint: 20 in 10 s are enough for a median, and far
/// fewer than a kubelet opens after a restart.
const FRESH_INTERVAL: Duration = Duration::from_millis(500);
/// Largest number of apiservers that are added because the cluster names them.
const MAX_SIBLINGS: usize = 16;

/// Carries out a plan for `duration`.
///
/// # Errors
/// The tokio runtime cannot be created.
pub fn run(
    plan: ExaminationPlan,
    resolver: Resolver,
    duration: Duration,
) -> std::io::Result<Observations> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    Ok(LocalSet::new().block_on(&runtime, examine(plan, resolver, duration)))
}

async fn examine(plan: ExaminationPlan, resolver: Resolver, duration: Duration) -> Observations {
    let resolver = Rc::new(Mutex::new(resolver));
    let host = host::check(&plan.listeners, &plan.running, plan.wanted_connections);
    let mut lookups = Vec::new();
    for target in plan.targets {
        let addresses = resolver.lock().await.resolve(&target.host).await;
        lookups.push((target, addresses));
    }
    for sibling in siblings(&lookups).await {
        let addresses = resolver.lock().await.resolve(&sibling.host).await;
        lookups.push((sibling, addresses));
    }
    let began = Instant::now();
    let until = began + duration;
    let tasks: Vec<_> = lookups
        .into_iter()
        .map(|(target, addresses)| {
            let resolver = Rc::clone(&resolver);
            let listeners = plan.listeners.clone();
            tokio::task::spawn_local(async move {
                examine_endpoint(target, addresses, &listeners, resolver, began, until).await
            })
        })
        .collect();
    let mut endpoints = Vec::new();
    for task in tasks {
        if let Ok(endpoint) = task.await {
            endpoints.push(endpoint);
        }
    }
    let dns = resolver.lock().await.observed();
    Observations { configuration: plan.configuration_errors, host, dns, endpoints }
}

/// The apiservers that the cluster names and the plan does not. The first endpoint that answers is
/// asked.
async fn siblings(resolved: &[(Target, Resolution)]) -> Vec<Target> {
    for (target, addresses) in resolved.iter().filter(|(target, _)| target.peer.authenticated) {
        let Resolution::Addresses(ips) = addresses else { continue };
        let Some(ip) = ips.first() else { continue };
        let asked = members(target, SocketAddr::new(*ip, target.port));
        let Ok(Some(members)) = timeout(STEP_LIMIT, asked).await else { continue };
        let known = |address: &SocketAddr| {
            resolved.iter().any(|(target, addresses)| {
                target.port == address.port()
                    && matches!(addresses, Resolution::Addresses(ips) if ips.contains(&address.ip()))
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

/// The apiservers that the cluster names, asked over a connection to one of them.
async fn members(target: &Target, address: SocketAddr) -> Option<Vec<SocketAddr>> {
    let mut timer = StepTimer::start(Instant::now());
    let mut opened = probe::open(&mut timer, address, &target.peer).await.ok()?;
    super::members::ask(&mut opened, &target.peer, "").await.ok()
}

/// Observes one endpoint until `until`.
async fn examine_endpoint(
    target: Target,
    addresses: Resolution,
    listeners: &[PlannedListener],
    resolver: Rc<Mutex<Resolver>>,
    began: Instant,
    until: Instant,
) -> EndpointObservation {
    let ips = match &addresses {
        Resolution::Addresses(ips) => ips.clone(),
        Resolution::NoSuchName | Resolution::NoAnswer(_) => Vec::new(),
    };
    let loops_to = find_loop(&ips, target.port, listeners);
    let target = Rc::new(target);
    let mut endpoint = EndpointObservation {
        address: target.address.clone(),
        source: target.source,
        server_name: target.server_name.clone(),
        resolved: addresses,
        loops_to,
        fresh: Vec::new(),
        long_lived: Vec::new(),
        idle: None,
        certificate: None,
        clock_skew_s: None,
        max_streams: None,
        authenticated: target.peer.authenticated,
        shown: target.client_certificate().map(|info| ClientCertificate {
            subject: info.subject.to_string(),
            not_after: Utc(info.not_after).seconds(),
            expires_in_s: expires_in(info),
        }),
    };
    // A loop is not probed: jackstay itself would answer.
    if loops_to.is_some() || ips.is_empty() {
        return endpoint;
    }
    let long_lived = ips.first().map(|ip| {
        let address = SocketAddr::new(*ip, target.port);
        let (busy, idle) = (Rc::clone(&target), Rc::clone(&target));
        (
            tokio::task::spawn_local(async move {
                long_lived::ping_until(address, &busy.peer, began, until).await
            }),
            tokio::task::spawn_local(async move {
                long_lived::ping_after_idle(address, &idle.peer, began, until).await
            }),
        )
    });
    for learned in fresh(&target, &resolver, began, until).await {
        endpoint.fresh.extend(learned.attempt);
        endpoint.max_streams = learned.max_streams.or(endpoint.max_streams);
        // The smallest skew has the least delay in it.
        endpoint.clock_skew_s = match (endpoint.clock_skew_s, learned.skew) {
            (Some(known), Some(new)) if new.abs() < known.abs() => Some(new),
            (known, new) => known.or(new),
        };
    }
    if let Some((busy, idle)) = long_lived {
        endpoint.long_lived = busy.await.unwrap_or_default();
        endpoint.idle = idle.await.ok().flatten();
    }
    endpoint.certificate =
        target.verifier.last_certificate().and_then(|der| describe_certificate(&der));
    endpoint
}

/// Opens a fresh connection at each interval, also while earlier ones are still open.
async fn fresh(
    target: &Rc<Target>,
    resolver: &Rc<Mutex<Resolver>>,
    began: Instant,
    until: Instant,
) -> Vec<FreshResult> {
    let learned = Rc::new(RefCell::new(Vec::new()));
    let mut tasks: Vec<JoinHandle<()>> = Vec::new();
    let mut round = 0;
    loop {
        let (target, resolver) = (Rc::clone(target), Rc::clone(resolver));
        let results = Rc::clone(&learned);
        tasks.push(tokio::task::spawn_local(async move {
            let result = connect_once(&target, &resolver, began, round).await;
            results.borrow_mut().push(result);
        }));
        round += 1;
        // Jitter spreads the load of several endpoints and several doctors.
        let next = began + FRESH_INTERVAL * round + FRESH_INTERVAL.mul_f64(fastrand::f64() / 4.0);
        if next >= until {
            break;
        }
        sleep_until(next).await;
    }
    for task in tasks {
        // The panic hook has printed a panic; the other results count.
        let _ = task.await;
    }
    let mut all = learned.take();
    let at =
        |learned: &FreshResult| learned.attempt.as_ref().map_or(0.0, |attempt| attempt.at_ms.0);
    all.sort_by(|a, b| at(a).total_cmp(&at(b)));
    all
}

async fn connect_once(
    target: &Target,
    resolver: &Mutex<Resolver>,
    began: Instant,
    round: u32,
) -> FreshResult {
    let mut timer = StepTimer::start(began);
    // The limit covers the wait for the lock too: queries to silent name servers queue up.
    let answer = timeout(STEP_LIMIT, async { resolver.lock().await.resolve(&target.host).await });
    let answer = answer.await.unwrap_or_else(|_| {
        Resolution::NoAnswer(format!("no answer within {} ms", STEP_LIMIT.as_millis()))
    });
    let is_name = target.host.parse::<IpAddr>().is_err();
    if is_name && matches!(answer, Resolution::Addresses(_)) {
        timer.done(Step::Resolve);
    }
    match answer {
        Resolution::Addresses(ips) if !ips.is_empty() => {
            // The addresses of a name take turns.
            let ip = ips[round as usize % ips.len()];
            probe::fresh(timer, SocketAddr::new(ip, target.port), &target.peer).await
        }
        other => {
            let text = match other {
                Resolution::NoAnswer(text) => text,
                _ => "no such name".to_owned(),
            };
            let failure = Failure { step: Step::Resolve, kind: FailureKind::Other, text };
            let attempt = timer.finish(Some(failure));
            FreshResult { attempt: Some(attempt), ..FreshResult::default() }
        }
    }
}

/// The listen address of jackstay that a connection to one of `ips` would reach.
fn find_loop(ips: &[IpAddr], port: u16, listeners: &[PlannedListener]) -> Option<SocketAddr> {
    let reached_by = |bind: &SocketAddr| {
        bind.port() == port
            && port != 0
            && ips.iter().any(|ip| {
                *ip == bind.ip()
                    || bind.ip().is_unspecified()
                        && ip.is_ipv4() == bind.is_ipv4()
                        && host::is_local(*ip)
            })
    };
    listeners.iter().map(|listener| listener.bind).find(reached_by)
}

fn describe_certificate(der: &CertificateDer<'_>) -> Option<ServerCertificate> {
    let info = cert_info(der).ok()?;
    Some(ServerCertificate {
        subject: info.subject.to_string(),
        issuer: crate::net::tls::local_ca::issuer_name(der),
        names: subject_alt_names(der).unwrap_or_default(),
        not_before: Utc(info.not_before).seconds(),
        not_after: Utc(info.not_after).seconds(),
        expires_in_s: expires_in(&info),
    })
}

/// Seconds until a certificate expires; negative if it has.
fn expires_in(info: &CertInfo) -> i64 {
    let now = wall_clock();
    let seconds = |time: SystemTime| time.duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    let left = seconds(info.not_after).cast_signed() - seconds(now).cast_signed();
    if info.validity(now) == Validity::Expired { left.min(-1) } else { left }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn find_loop_unspecified_address_covers_every_local_one() {
        let listener = |bind: &str| {
            [PlannedListener {
                name: "listener x".into(),
                bind: bind.parse().unwrap(),
                freebind: false,
            }]
        };
        let loops = |ip: &str, port, bind: &str| {
            find_loop(&[ip.parse().unwrap()], port, &listener(bind)).is_some()
        };
        assert!(loops("127.0.0.1", 7443, "127.0.0.1:7443"));
        assert!(loops("127.0.0.1", 7443, "0.0.0.0:7443"));
        assert!(!loops("127.0.0.1", 7443, "[::]:7443"));
        assert!(!loops("192.0.2.1", 7443, "0.0.0.0:7443"));
        assert!(!loops("127.0.0.1", 7444, "127.0.0.1:7443"));
    }
}

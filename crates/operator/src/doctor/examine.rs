//! Runs all probes concurrently for the duration of an examination and collects the observations.

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use futures_util::future::join_all;
use futures_util::stream::{FuturesUnordered, StreamExt};
use jackstay_core::backends::MAX_ADDRESSES;
use jackstay_core::discovery::address::parse_ip;
use jackstay_core::kubernetes_version::ServerVersion;
use jackstay_net::tls::certificate::{CertInfo, Validity, cert_info};
use jackstay_net::tls::local_ca::subject_alt_names;
use jackstay_sys::clock;
use jackstay_sys::utc::{Utc, wall_clock};
use rustls::pki_types::CertificateDer;
use tokio::sync::Mutex;
use tokio::task::LocalSet;
use tokio::time::{sleep_until, timeout, timeout_at};

use super::backends;
use super::dns::Resolver;
use super::host;
use super::host_routing::compare;
use super::image::{self, InstalledTools};
use super::long_lived;
use super::observations::{
    AddressBackends, ClientCertificate, EndpointObservation, EndpointSource, Failure, FailureKind,
    HostRouting, Observations, Resolution, ServerCertificate, Step,
};
use super::probe::{self, FreshResult, STEP_LIMIT, StepTimer};
use super::target::{ExaminationPlan, PlannedListener, Target};

/// Interval between fresh connections to one endpoint: 20 in 10 s. That is enough for a median, and far
/// fewer than a kubelet opens after a restart.
const FRESH_INTERVAL: Duration = Duration::from_millis(500);
/// Largest number of apiservers that are added because the cluster names them.
const MAX_SIBLINGS: usize = 16;

/// How much longer than its duration an examination takes if an endpoint does not answer: a connection that
/// begins at the end waits for [`STEP_LIMIT`], and a PING for half a second longer.
pub const OVERTIME: Duration = Duration::from_secs(4);

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
    let mut host = host::check(&plan.listeners, &plan.running, plan.wanted_connections);
    if let Some(directory) = &plan.static_pods {
        host.images = image::check(directory, &InstalledTools);
    }
    let resolver = Mutex::new(resolver);
    let mut targets = Vec::new();
    for target in plan.targets {
        let resolution = resolver.lock().await.resolve(&target.host).await;
        targets.push((target, resolution));
    }
    let began = clock::now();
    let until = began + duration;
    let addresses: usize = targets.iter().map(|(_, resolution)| resolution.addresses().len()).sum();
    let examines_backends = addresses <= MAX_ADDRESSES;
    let examine_all = async |targets: &[(Target, Resolution)]| {
        join_all(targets.iter().map(|(target, resolution)| {
            let is_given = target.source == EndpointSource::Given;
            let context = ExaminationContext {
                listeners: &plan.listeners,
                resolver: &resolver,
                examines_backends: examines_backends && is_given,
            };
            examine_endpoint(target, resolution, context, began, until)
        }))
        .await
    };
    // The endpoints of the plan are observed from the first moment: an outage may end before the cluster
    // names its apiservers.
    let (mut endpoints, named) = tokio::join!(examine_all(&targets), async {
        examine_all(&siblings(&targets, until).await).await
    });
    endpoints.extend(named);
    let dns = resolver.into_inner().into_observations();
    Observations { configuration: plan.configuration_errors, host, dns, endpoints }
}

/// The apiservers that the cluster names and the plan does not. All endpoints of the plan are asked at once,
/// and the first answer is used. There is none after `until` or [`STEP_LIMIT`].
async fn siblings(targets: &[(Target, Resolution)], until: Instant) -> Vec<(Target, Resolution)> {
    let deadline = until.min(clock::now() + STEP_LIMIT);
    // Below a path, the apiservers that the cluster names do not serve the path.
    let authenticated = targets
        .iter()
        .filter(|(target, _)| target.peer.authenticated && target.peer.root.prefix.is_empty());
    let mut answers: FuturesUnordered<_> = authenticated
        .map(|(target, resolution)| async move {
            let Resolution::Addresses(ips) = resolution else { return None };
            let address = target.socket_address(*ips.first()?);
            let members = timeout_at(deadline.into(), members(target, address)).await;
            Some((target, members.ok()??))
        })
        .collect();
    while let Some(answer) = answers.next().await {
        let Some((target, members)) = answer else { continue };
        let is_planned = |address: &SocketAddr| {
            targets.iter().any(|(target, resolution)| {
                target.port == address.port()
                    && matches!(resolution, Resolution::Addresses(ips) if ips.contains(&address.ip()))
            })
        };
        return members
            .iter()
            .filter(|address| !is_planned(address))
            .take(MAX_SIBLINGS)
            .filter_map(|address| {
                let resolution = Resolution::Addresses(vec![address.ip()]);
                Some((target.sibling(*address).ok()?, resolution))
            })
            .collect();
    }
    Vec::new()
}

/// Requests the addresses of the apiservers over a new connection to one of them.
async fn members(target: &Target, address: SocketAddr) -> Option<Vec<SocketAddr>> {
    let mut timer = StepTimer::start(clock::now());
    let mut opened = probe::open(&mut timer, address, &target.peer).await.ok()?;
    super::members::request(&mut opened, &target.peer).await.ok()
}

/// Requests the version of an apiserver over a new connection; none after `until` or [`STEP_LIMIT`].
async fn version(target: &Target, address: SocketAddr, until: Instant) -> Option<ServerVersion> {
    let deadline = until.min(clock::now() + STEP_LIMIT);
    let request = async {
        let mut timer = StepTimer::start(clock::now());
        let mut opened = probe::open(&mut timer, address, &target.peer).await.ok()?;
        super::version::request(&mut opened, &target.peer).await.ok()?
    };
    timeout_at(deadline.into(), request).await.ok()?
}

/// Whether the server selects the back end by the host of a request; `None` if that is not known [`STEP_LIMIT`] after
/// `until`.
async fn host_routing(target: &Target, address: SocketAddr, until: Instant) -> Option<HostRouting> {
    let deadline = until + STEP_LIMIT;
    let candidates = target.possible_authorities();
    let compared = compare(address, &target.peer, &target.clients, &candidates);
    timeout_at(deadline.into(), compared).await.ok()?
}

/// What is behind each address of an endpoint.
async fn behind(target: &Target, ips: &[IpAddr], until: Instant) -> Vec<AddressBackends> {
    let examine =
        |ip: &IpAddr| backends::examine(target, target.socket_address(*ip), until + STEP_LIMIT);
    join_all(ips.iter().map(examine)).await
}

/// What the examination of an endpoint needs besides the endpoint.
#[derive(Clone, Copy)]
struct ExaminationContext<'a> {
    listeners: &'a [PlannedListener],
    resolver: &'a Mutex<Resolver>,
    /// Whether to find out what is behind each address.
    examines_backends: bool,
}

/// Observes one endpoint until `until`.
async fn examine_endpoint(
    target: &Target,
    resolution: &Resolution,
    context: ExaminationContext<'_>,
    began: Instant,
    until: Instant,
) -> EndpointObservation {
    let ExaminationContext { listeners, resolver, examines_backends } = context;
    let ips = resolution.addresses().to_vec();
    let loops_to = find_loop(&ips, target.port, listeners);
    let mut endpoint = EndpointObservation {
        address: target.address.clone(),
        source: target.source,
        server_name: target.server_name.clone(),
        authority: target.peer.root.authority.to_string(),
        path_prefix: target.peer.root.prefix.to_string(),
        host_routing: None,
        verifies: target.verifier.verifies(),
        resolved: resolution.clone(),
        loops_to,
        fresh: Vec::new(),
        long_lived: Vec::new(),
        idle: None,
        certificate: None,
        clock_skew_s: None,
        max_streams: None,
        version: None,
        authenticated: target.peer.authenticated,
        shown: target.client_certificate().map(describe_client_certificate),
        behind: Vec::new(),
    };
    let Some(ip) = ips.first() else { return endpoint };
    // A probe of a loop would reach jackstay itself.
    if loops_to.is_some() {
        return endpoint;
    }
    let address = target.socket_address(*ip);
    let fresh;
    let examined = if examines_backends { &*ips } else { &[] };
    (
        endpoint.version,
        endpoint.host_routing,
        fresh,
        endpoint.long_lived,
        endpoint.idle,
        endpoint.behind,
    ) = tokio::join!(
        version(target, address, until),
        host_routing(target, address, until),
        fresh_connections(target, resolver, began, until),
        long_lived::ping_until(address, &target.peer, began, until),
        long_lived::ping_after_idle(address, &target.peer, began, until),
        behind(target, examined, until),
    );
    for result in fresh {
        endpoint.fresh.push(result.attempt);
        endpoint.max_streams = result.max_streams.or(endpoint.max_streams);
        // The delay of the response distorts the smallest skew least.
        let skews = [endpoint.clock_skew_s, result.skew].into_iter().flatten();
        endpoint.clock_skew_s = skews.min_by(|a, b| a.abs().total_cmp(&b.abs()));
    }
    endpoint.certificate =
        target.verifier.last_certificate().and_then(|der| describe_certificate(&der));
    endpoint
}

/// Opens a fresh connection at each interval, even if earlier ones are still open.
async fn fresh_connections(
    target: &Target,
    resolver: &Mutex<Resolver>,
    began: Instant,
    until: Instant,
) -> Vec<FreshResult> {
    // The examination of an apiserver that the cluster names begins later.
    let first = clock::now();
    // Jitter spreads the load of several endpoints and several doctors.
    let start = |round| match round {
        0 => first,
        _ => first + FRESH_INTERVAL * round + FRESH_INTERVAL.mul_f64(fastrand::f64() / 4.0),
    };
    let starts = (0..).map(|round| (round, start(round))).take_while(|(_, start)| *start < until);
    join_all(starts.map(|(round, start)| async move {
        sleep_until(start.into()).await;
        connect_once(target, resolver, began, round).await
    }))
    .await
}

async fn connect_once(
    target: &Target,
    resolver: &Mutex<Resolver>,
    began: Instant,
    round: u32,
) -> FreshResult {
    let mut timer = StepTimer::start(began);
    // The limit includes the wait for the lock, which concurrent lookups hold one after the other.
    let lookup = timeout(STEP_LIMIT, async { resolver.lock().await.resolve(&target.host).await });
    let resolution = lookup.await.unwrap_or_else(|_| {
        Resolution::NoAnswer(format!("no answer within {} ms", STEP_LIMIT.as_millis()))
    });
    let text = match resolution {
        Resolution::Addresses(ips) => {
            if parse_ip(&target.host).is_none() {
                timer.done(Step::Resolve);
            }
            // Each round uses the next address of the name.
            let ip = ips[round as usize % ips.len()];
            return probe::fresh(timer, target.socket_address(ip), &target.peer).await;
        }
        Resolution::NoSuchName => "no such name".to_owned(),
        Resolution::NoAnswer(text) => text,
    };
    let failure = Failure { step: Step::Resolve, kind: FailureKind::Other, text, remedy: None };
    FreshResult { attempt: timer.finish(Some(failure)), skew: None, max_streams: None }
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
        issuer: jackstay_net::tls::local_ca::issuer_name(der),
        names: subject_alt_names(der).unwrap_or_default(),
        not_before: Utc(info.not_before).seconds(),
        not_after: Utc(info.not_after).seconds(),
        expires_in_s: expires_in(&info),
    })
}

fn describe_client_certificate(info: &CertInfo) -> ClientCertificate {
    ClientCertificate {
        subject: info.subject.to_string(),
        not_after: Utc(info.not_after).seconds(),
        expires_in_s: expires_in(info),
        is_version_1: info.is_version_1,
    }
}

/// Seconds until a certificate expires; negative if it has expired.
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

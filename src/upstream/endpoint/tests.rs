//! Endpoints under sequences of observations, and connect attempts in a simulated outage.

use std::time::Duration;

use tokio::time::timeout;

use super::*;
use Responsiveness::{Responds, Silent, Unanswered};
use jackstay_core::connection::Responsiveness;
use jackstay_sys::clock;

use crate::observe::Metrics;
use crate::upstream::credentials::CredentialClass;
use crate::upstream::stats::ConnectionStats;

#[test]
fn downtime_sums_ejected_periods_including_the_current_one() {
    let (mut downtime, start) = (Downtime::default(), clock::now());
    let at = |seconds| start + Duration::from_secs(seconds);
    for (second, ejected, total, ejections) in [
        (0, false, 0, 0),
        (10, true, 0, 1),
        (12, true, 2, 1),
        (15, false, 5, 1),
        (20, false, 5, 1),
        (30, true, 5, 2),
        (31, true, 6, 2),
    ] {
        downtime.record(ejected, at(second));
        let found = (downtime.total(at(second)).as_secs(), downtime.ejections);
        assert_eq!(found, (total, ejections), "at {second} s");
    }
    assert_eq!(downtime.total(at(40)).as_secs(), 15);
}

#[test]
fn endpoint_state_all_is_in_the_order_of_the_discriminants() {
    for (index, state) in EndpointState::ALL.into_iter().enumerate() {
        assert_eq!(state as usize, index);
    }
}

#[test]
fn slow_start_share_is_below_one_only_after_a_recovery() {
    let endpoint = endpoint();
    let later = clock::now() + Duration::from_secs(15);
    let has_full_share = || endpoint.slow_start_share(later) >= 1.0;
    assert!(has_full_share() && endpoint.ready_for(later).is_none());
    endpoint.observe(Observation::Connected);
    endpoint.observe(Observation::ReadyzOk);
    assert!(has_full_share(), "the first start");
    assert!(endpoint.ready_for(later).is_some_and(|since| since.as_secs() >= 14));

    endpoint.observe(Observation::ReadyzFailing("etcd"));
    assert!(endpoint.ready_for(later).is_none());
    endpoint.observe(Observation::ReadyzOk);
    assert!(
        (0.5..0.6).contains(&endpoint.slow_start_share(later)),
        "{}",
        endpoint.slow_start_share(later)
    );
    assert!(endpoint.slow_start_share(clock::now() + Duration::from_secs(31)) >= 1.0);
    assert!(has_full_share(), "the slow start is over");

    endpoint.connect_failed(ConnectFailure::new(ConnectFailureKind::Failed, "no"), clock::now());
    endpoint.observe(Observation::Connected);
    assert_eq!(endpoint.state(), EndpointState::Connecting);
    endpoint.observe(Observation::ReadyzOk);
    assert!(!has_full_share(), "back from an ejection");
}

#[test]
fn endpoint_with_one_live_connection_is_not_ejected_by_a_failed_connect() {
    let endpoint = endpoint();
    let opened = || {
        let stats = ConnectionStats::new(CredentialClass::Anonymous, None, None, clock::now());
        endpoint.connection_opened(&stats);
    };
    let failed = || {
        endpoint
            .connect_failed(ConnectFailure::new(ConnectFailureKind::Failed, "no"), clock::now());
    };
    opened();
    endpoint.observe(Observation::ReadyzOk);
    opened();
    endpoint.connection_closed(Responds, "lost");
    failed();
    assert_eq!(endpoint.state(), EndpointState::Ready, "one connection is live");
    endpoint.connection_closed(Responds, "lost");
    assert_eq!(endpoint.state(), EndpointState::Connecting);
    assert!(!endpoint.is_usable());
    opened();
    assert_eq!(endpoint.state(), EndpointState::Connecting, "not ready before /readyz is ok");
    assert!(endpoint.is_usable());
    endpoint.connection_closed(Responds, "lost");
    failed();
    assert_eq!(endpoint.state(), EndpointState::Ejected);
    opened();
    assert_eq!(endpoint.state(), EndpointState::Connecting);
}

fn unanswered() -> Observation<'static> {
    Observation::ResponsivenessChanged { from: Responds, to: Unanswered }
}

fn answered() -> Observation<'static> {
    Observation::ResponsivenessChanged { from: Unanswered, to: Responds }
}

#[test]
fn suspect_endpoint_is_usable_until_a_connection_is_silent() {
    use EndpointState::{Ready, Suspect};
    let endpoint = endpoint();
    let silent = || Observation::ResponsivenessChanged { from: Unanswered, to: Silent };
    for _ in 0..2 {
        let stats = ConnectionStats::new(CredentialClass::Anonymous, None, None, clock::now());
        endpoint.connection_opened(&stats);
    }
    endpoint.observe(Observation::ReadyzOk);
    let usable = |observation| {
        endpoint.observe(observation);
        (endpoint.state(), endpoint.is_usable())
    };
    assert_eq!(usable(unanswered()), (Ready, true));
    assert_eq!(usable(unanswered()), (Suspect, true));
    assert_eq!(usable(silent()), (Suspect, false));
    assert_eq!(usable(answered()), (Ready, true), "one connection is silent, and the other works");
    endpoint.connection_closed(Responds, "closed by the apiserver");
    assert_eq!((endpoint.state(), endpoint.is_usable()), (Suspect, false));
}

#[test]
fn endpoint_is_suspect_while_every_ping_is_unanswered() {
    use EndpointState::{Connecting, Ready, Suspect};
    let endpoint = endpoint();
    let opened = || {
        let stats = ConnectionStats::new(CredentialClass::Anonymous, None, None, clock::now());
        endpoint.connection_opened(&stats);
    };
    let state = || (endpoint.state(), endpoint.reason());
    opened();
    opened();
    endpoint.observe(Observation::ReadyzOk);
    endpoint.observe(unanswered());
    assert_eq!(endpoint.state(), Ready, "the PING on one connection is answered");
    endpoint.observe(unanswered());
    assert_eq!(state(), (Suspect, "PING unanswered on every connection (2)".into()));
    assert!(endpoint.is_usable() && endpoint.deaths() == 0, "suspect endpoints are usable");
    // A fresh connection works.
    opened();
    assert_eq!(state(), (Ready, "/readyz is ok".into()));
    endpoint.connection_closed(Responds, "closed by the apiserver");
    assert_eq!(endpoint.state(), Suspect);
    endpoint.observe(answered());
    assert_eq!(endpoint.state(), Ready);
    let later = clock::now() + Duration::from_secs(1);
    assert!(endpoint.slow_start_share(later) >= 1.0, "no load moved away, so no slow start");
    // Both connections are closed.
    endpoint.observe(unanswered());
    endpoint.connection_closed(Unanswered, "the process is stopped");
    assert_eq!(state(), (Suspect, "PING unanswered on every connection (1)".into()));
    endpoint.connection_closed(Unanswered, "the process is stopped");
    assert_eq!(state(), (Connecting, "the process is stopped".into()));
    opened();
    assert_eq!(state(), (Connecting, "connected, /readyz not answered yet".into()));
}

#[test]
fn line_delay_is_shown_while_it_lasts_and_only_at_endpoints_that_are_late() {
    let (metrics, line) = (Metrics::new(), Arc::default());
    let [late, other] = ["10.0.0.1", "10.0.0.2"].map(|host| {
        let address = EndpointAddress { host: host.into(), port: 6443 };
        let metrics = metrics.endpoint("u", host);
        Endpoint::of_backend(&"u".into(), (&address, None), None, metrics, &line).unwrap()
    });
    let (start, second) = (clock::now(), Duration::from_secs(1));
    let look = |endpoint: &Endpoint, rtt, at| {
        let info = TcpInfo { rtt, min_rtt: Duration::from_millis(1), ..TcpInfo::default() };
        endpoint.pace(&mut LinePacing::default(), &info, at, |_| Ok(()));
    };
    let delays = |at| {
        let delays = [&late, &other].map(|endpoint| endpoint.line_delay(at));
        let shown = [&late, &other].map(|endpoint| endpoint.status().line_delay_s);
        let is_late = delays.map(|delay| Some(delay).filter(|delay| !delay.is_zero()));
        assert_eq!(shown, is_late.map(|delay| delay.map(|delay| delay.as_secs_f64())));
        delays
    };
    look(&late, second + Duration::from_millis(1), start);
    assert_eq!(delays(start), [second; 2], "the other endpoint has shown no round trip");
    look(&other, Duration::from_millis(2), start + second);
    assert_eq!(delays(start + second), [second, Duration::ZERO]);
    assert_eq!(delays(start + 20 * second), [Duration::ZERO; 2]);
    let events = metrics.events().last_notable(9);
    let events: Vec<_> = events.iter().map(|event| (&*event.name, &*event.to)).collect();
    let (late, other) = ("10.0.0.1:6443", "10.0.0.2:6443");
    let expected = [(late, "late"), (other, "late"), (other, "on time"), (late, "on time")];
    assert_eq!(events, expected);
}

/// The callers that connect on one node: two identities, tokens, anonymous requests, and the prober.
const CALLERS: usize = 5;
const NODES: usize = 5_000;
const OUTAGE: Duration = Duration::from_secs(120);

fn endpoint() -> Arc<Endpoint> {
    let address = EndpointAddress { host: "10.0.0.1".into(), port: 6443 };
    Endpoint::new(&"u".into(), &address, None, Metrics::new().endpoint("u", "e")).unwrap()
}

/// Simulates the connects of one node to an apiserver that is down, while requests wait all the time.
/// Each attempt is refused after 1 ms, or times out if there is a `timeout`. With `handshakes` TCP succeeds,
/// and TLS is in progress. Returns the number of attempts, the greatest number at the same time, and the
/// longest time without an attempt.
fn simulate_outage(timeout: Option<Duration>, handshakes: bool) -> (usize, usize, Duration) {
    let endpoint = endpoint();
    let zero = clock::now();
    let mut in_progress: Vec<(Instant, Option<HandshakeGuard<'_>>)> = Vec::new();
    let (mut attempts, mut most, mut longest) = (0, 0, Duration::ZERO);
    let mut idle_since = zero;
    // The last connection is lost.
    endpoint.connect_failed(ConnectFailure::new(ConnectFailureKind::Failed, "gone"), zero);
    for ms in 0..OUTAGE.as_millis() as u64 {
        let now = zero + Duration::from_millis(ms);
        while let Some(at) = in_progress.iter().position(|(until, _)| *until <= now) {
            in_progress.remove(at);
            let kind = match timeout {
                None => ConnectFailureKind::Failed,
                Some(_) => ConnectFailureKind::Timeout,
            };
            endpoint.connect_failed(ConnectFailure::new(kind, "no answer"), now);
            if in_progress.is_empty() {
                idle_since = now;
            }
        }
        for _ in 0..CALLERS {
            if !endpoint.claim_connect_attempt(true, now) {
                continue;
            }
            attempts += 1;
            if in_progress.is_empty() {
                longest = longest.max(now - idle_since);
            }
            let duration = timeout
                .map_or(Duration::from_millis(1), |base| endpoint.connect_timeout(base).limit());
            in_progress.push((now + duration, handshakes.then(|| endpoint.track_handshake())));
            most = most.max(in_progress.len());
        }
    }
    (attempts, most, longest)
}

/// All apiservers are down for two minutes. Prints the load that 5,000 nodes put on one of them, and how
/// soon a node finds out that it is back.
#[test]
fn claim_connect_attempt_in_an_outage_limits_attempts_and_pauses() {
    let per_second = |attempts: usize| attempts * NODES / OUTAGE.as_secs() as usize;
    // No process listens, so connects are refused: all callers share one attempt, at most 800 ms apart.
    let (attempts, most, longest) = simulate_outage(None, false);
    println!(
        "refused: {} SYNs a second of {NODES} nodes, recovery found within {longest:?}",
        per_second(attempts)
    );
    assert_eq!(most, 1);
    assert!(longest <= Duration::from_millis(801), "{longest:?}");
    assert!(attempts <= 120 * 10 / 4, "{attempts}");
    // The process accepts, but handshakes time out: one at a time, with a growing timeout.
    let (attempts, most, longest) = simulate_outage(Some(Duration::from_secs(3)), true);
    println!("busy: {} handshakes a second of {NODES} nodes", per_second(attempts));
    assert_eq!(most, 1, "handshakes of one node at the same time");
    assert!(attempts <= 20, "{attempts}");
    assert!(longest <= Duration::from_millis(801), "{longest:?}");
}

#[test]
fn connect_failed_is_a_death_only_if_the_endpoint_does_not_answer() {
    let endpoint = endpoint();
    let now = clock::now();
    let fails = |kind, reason: &str| {
        endpoint.connect_failed(ConnectFailure::new(kind, reason), now);
        (endpoint.state(), endpoint.reason(), endpoint.deaths())
    };
    let shortage = fails(ConnectFailureKind::LocalShortage, "too many open files");
    assert_eq!(shortage, (EndpointState::Connecting, "too many open files".into(), 0));
    assert!(!endpoint.claim_connect_attempt(true, now), "the backoff applies");
    endpoint.observe(Observation::Connected);
    endpoint.observe(Observation::ReadyzOk);
    assert_eq!(fails(ConnectFailureKind::LocalShortage, "no memory").0, EndpointState::Ready);
    let untrusted = fails(ConnectFailureKind::TlsFailed, "unknown issuer");
    assert_eq!(untrusted, (EndpointState::Ejected, "unknown issuer".into(), 0));
    endpoint.observe(Observation::Connected);
    let refused = fails(ConnectFailureKind::Failed, "refused");
    assert_eq!(refused, (EndpointState::Ejected, "refused".into(), 1));
}

#[test]
fn claim_connect_attempt_with_a_handshake_in_progress_is_refused_only_if_none_is_usable() {
    let endpoint = endpoint();
    let now = clock::now();
    let later = now + Duration::from_secs(6);
    let handshake = endpoint.track_handshake();
    assert!(endpoint.claim_connect_attempt(true, now), "nothing has failed");
    endpoint.connect_failed(ConnectFailure::new(ConnectFailureKind::Failed, "no"), now);
    assert!(endpoint.claim_connect_attempt(false, later), "another endpoint is usable");
    assert!(!endpoint.claim_connect_attempt(true, later + Duration::from_secs(6)));
    drop(handshake);
    assert!(endpoint.claim_connect_attempt(true, later + Duration::from_secs(6)));
}

#[tokio::test(start_paused = true)]
async fn no_response_expected_returns_2_s_after_the_last_unanswered_connection_is_closed() {
    const MS: Duration = Duration::from_millis(1);
    let endpoint = endpoint();
    let open = || {
        let stats = ConnectionStats::new(CredentialClass::Anonymous, None, None, clock::now());
        endpoint.connection_opened(&stats);
    };
    let lose = |reason| {
        endpoint.observe(unanswered());
        endpoint.connection_closed(Unanswered, reason);
    };
    let no_response_expected = async |sent: Instant| {
        let start = clock::now();
        let reason = timeout(60_000 * MS, endpoint.no_response_expected(sent)).await.ok()?;
        Some((reason, clock::elapsed(start)))
    };
    let sent = clock::now();
    open();
    endpoint.connection_closed(Responds, "GOAWAY");
    assert_eq!(no_response_expected(sent).await, None, "its PINGs were answered");
    open();
    open();
    lose("reset");
    assert_eq!(no_response_expected(sent).await, None, "another connection is open");
    lose("stopped");
    let (reason, elapsed) = no_response_expected(sent).await.unwrap();
    assert_eq!(reason, "stopped");
    assert!((2_000 * MS..=2_001 * MS).contains(&elapsed), "{elapsed:?}");
    assert_eq!(no_response_expected(clock::now()).await, None, "sent after the loss");
    open();
    assert_eq!(no_response_expected(sent).await, None, "a connection is open");
}

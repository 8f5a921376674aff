//! Tests each rule with the observations of its cause and with those of healthy endpoints.

use jackstay_core::backends::Kind;
use jackstay_core::kubernetes_version::ServerVersion;

use super::{Cause, Finding, Level, diagnose, has_problems};
use crate::doctor::image::{ImageState, PodImage};
use crate::doctor::observations::{
    AddressBackends, ClientCertificate, ConnectAttempt, Dns, EndpointObservation, EndpointSource,
    Failure, FailureKind, HostRouting, IdleConnection, ListenAddress, ListenState, LongLived, Ms,
    NameServer, Observations, Resolution, ServerCertificate, Step,
};

/// The steps up to `last`, each with a duration of 1 ms.
fn up_to(last: Step) -> Vec<(Step, Ms)> {
    let all = [Step::Connect, Step::Tls, Step::Http2, Step::Readyz, Step::Request];
    all.into_iter().take_while(|step| *step <= last).map(|step| (step, Ms(1.0))).collect()
}

fn succeeded(at_ms: f64) -> ConnectAttempt {
    ConnectAttempt { at_ms: Ms(at_ms), steps: up_to(Step::Request), failure: None }
}

fn failed(at_ms: f64, step: Step, kind: FailureKind) -> ConnectAttempt {
    let mut steps = up_to(step);
    steps.retain(|(done, _)| *done < step);
    let failure =
        Some(Failure { step, kind, text: format!("{} failed", step.as_str()), remedy: None });
    ConnectAttempt { at_ms: Ms(at_ms), steps, failure }
}

fn certificate() -> ServerCertificate {
    ServerCertificate {
        subject: "CN=kube-apiserver".into(),
        issuer: "CN=kubernetes".into(),
        names: vec!["kubernetes".into(), "10.0.0.1".into()],
        not_before: "2026-01-01T00:00:00Z".into(),
        not_after: "2027-01-01T00:00:00Z".into(),
        expires_in_s: 200 * 86_400,
    }
}

fn long_lived() -> LongLived {
    LongLived {
        at_ms: Ms(5.0),
        pongs: 180,
        p50_ms: Some(Ms(0.5)),
        p99_ms: Some(Ms(1.5)),
        late: 0,
        silent_ms: None,
        silent_at_ms: None,
        ended: None,
        refuses_pings: false,
        retransmitted: 0,
        sent: 400,
    }
}

fn endpoint(address: &str) -> EndpointObservation {
    EndpointObservation {
        address: address.into(),
        source: EndpointSource::Given,
        server_name: "kubernetes".into(),
        authority: "kubernetes.default.svc".into(),
        path_prefix: String::new(),
        host_routing: None,
        verifies: true,
        resolved: Resolution::Addresses(vec!["10.0.0.1".parse().unwrap()]),
        loops_to: None,
        fresh: (0..20).map(|i| succeeded(f64::from(i) * 500.0)).collect(),
        long_lived: vec![long_lived()],
        idle: Some(IdleConnection { for_ms: Ms(10_000.0), alive: true, sent: 0 }),
        certificate: Some(certificate()),
        clock_skew_s: Some(0.2),
        max_streams: Some(100),
        version: None,
        authenticated: true,
        shown: Some(ClientCertificate {
            subject: "CN=kubernetes-admin".into(),
            not_after: "2027-01-01T00:00:00Z".into(),
            expires_in_s: 200 * 86_400,
            is_version_1: false,
        }),
        behind: Vec::new(),
    }
}

fn observations(endpoints: Vec<EndpointObservation>) -> Observations {
    Observations { endpoints, ..Observations::default() }
}

/// An endpoint whose fresh connections all fail in the same step.
fn failing(step: Step, kind: FailureKind) -> EndpointObservation {
    let fresh = (0..20).map(|i| failed(f64::from(i) * 500.0, step, kind)).collect();
    let long_lived = if step > Step::Http2 { vec![long_lived()] } else { Vec::new() };
    EndpointObservation { fresh, long_lived, idle: None, ..endpoint("10.0.0.1:6443") }
}

fn first(observations: &Observations) -> Option<Cause> {
    diagnose(observations).first().map(|finding| finding.cause)
}

#[test]
fn diagnose_healthy_endpoints_has_no_finding() {
    let healthy = observations(vec![endpoint("10.0.0.1:6443"), endpoint("10.0.0.2:6443")]);
    assert_eq!(diagnose(&healthy), []);
    assert!(!has_problems(&diagnose(&healthy)));
}

#[test]
fn diagnose_each_cause_from_its_observations() {
    let forgotten = EndpointObservation {
        long_lived: vec![LongLived {
            silent_ms: Some(Ms(7000.0)),
            silent_at_ms: Some(Ms(3000.0)),
            ..long_lived()
        }],
        ..endpoint("lb:6443")
    };
    let idle = EndpointObservation {
        idle: Some(IdleConnection { for_ms: Ms(10_000.0), alive: false, sent: 0 }),
        ..endpoint("lb:6443")
    };
    let lossy = EndpointObservation {
        long_lived: vec![LongLived { late: 17, retransmitted: 20, ..long_lived() }],
        ..endpoint("10.0.0.1:6443")
    };
    let pings_refused = EndpointObservation {
        long_lived: vec![LongLived { pongs: 2, refuses_pings: true, ..long_lived() }],
        ..endpoint("gateway:443")
    };
    let looping = EndpointObservation {
        loops_to: Some("10.0.0.1:6443".parse().unwrap()),
        ..endpoint("10.0.0.1:6443")
    };
    let skewed = EndpointObservation { clock_skew_s: Some(-400.0), ..endpoint("10.0.0.1:6443") };
    let unresolved = EndpointObservation {
        resolved: Resolution::NoAnswer("no name server answers".into()),
        fresh: Vec::new(),
        ..endpoint("lb.example:6443")
    };
    let unknown = EndpointObservation {
        resolved: Resolution::NoSuchName,
        fresh: Vec::new(),
        ..endpoint("lb.example:1")
    };
    let mut half_dead = endpoint("lb:6443");
    for attempt in half_dead.fresh.iter_mut().step_by(2) {
        *attempt = failed(attempt.at_ms.0, Step::Connect, FailureKind::Timeout);
    }
    for (endpoint, expected) in [
        (failing(Step::Connect, FailureKind::Refused), Cause::DeadEndpoint),
        (failing(Step::Connect, FailureKind::Timeout), Cause::DeadEndpoint),
        (failing(Step::Tls, FailureKind::Timeout), Cause::DeadEndpoint),
        (failing(Step::Http2, FailureKind::Timeout), Cause::DeadEndpoint),
        (failing(Step::Tls, FailureKind::Expired), Cause::CertificateExpired),
        (failing(Step::Tls, FailureKind::NotYetValid), Cause::CertificateNotYetValid),
        (failing(Step::Tls, FailureKind::WrongName), Cause::SanMissing),
        (failing(Step::Tls, FailureKind::UnknownIssuer), Cause::WrongCa),
        (failing(Step::Tls, FailureKind::Tls), Cause::Tls),
        (failing(Step::Tls, FailureKind::PlainHttp), Cause::Tls),
        (failing(Step::Tls, FailureKind::NotTls), Cause::Tls),
        (failing(Step::Readyz, FailureKind::PlainHttp), Cause::Tls),
        (failing(Step::Http2, FailureKind::NoHttp2), Cause::NoHttp2),
        (failing(Step::Readyz, FailureKind::Status(500)), Cause::NotReadyEndpoint),
        (failing(Step::Readyz, FailureKind::Timeout), Cause::NotReadyEndpoint),
        (failing(Step::Readyz, FailureKind::Unauthorized), Cause::Unauthorized),
        (failing(Step::Request, FailureKind::Unauthorized), Cause::Unauthorized),
        (forgotten, Cause::ForgottenFlows),
        (idle, Cause::ForgottenFlows),
        (pings_refused, Cause::LimitedPings),
        (lossy, Cause::PacketLoss),
        (looping, Cause::Loop),
        (skewed, Cause::ClockSkew),
        (unresolved, Cause::DnsBlackHole),
        (unknown, Cause::NoSuchName),
        (half_dead, Cause::IntermittentEndpoint),
    ] {
        let address = endpoint.address.clone();
        let found = diagnose(&observations(vec![endpoint]));
        assert_eq!(found.first().map(|f| f.cause), Some(expected), "{address} {found:#?}");
        assert!(has_problems(&found));
        for finding in &found {
            assert!(finding.what.ends_with('.') && !finding.advice.is_empty(), "{finding:?}");
        }
    }
}

#[test]
fn diagnose_each_cause_on_this_machine() {
    let listen = |state| {
        let address = "127.0.0.1:7443".parse().unwrap();
        let mut all = observations(vec![endpoint("10.0.0.1:6443")]);
        all.host.listen = vec![ListenAddress { address, what: "listener x".into(), state }];
        all
    };
    for (state, expected) in [
        (ListenState::Free, None),
        (ListenState::Jackstay, None),
        (ListenState::Taken(Some("haproxy (pid 7)".into())), Some(Cause::PortTaken)),
        (ListenState::NotLocal, Some(Cause::AddressNotOurs)),
        (ListenState::Denied, Some(Cause::AddressNotOurs)),
        (ListenState::Failed("no buffer space".into()), Some(Cause::AddressNotOurs)),
    ] {
        assert_eq!(first(&listen(state.clone())), expected, "{state:?}");
    }
    let mut all = listen(ListenState::Free);
    all.configuration = vec!["f: upstreams[0].endpoints[0]: requests would loop".into()];
    assert_eq!(first(&all), Some(Cause::Loop));
    all.configuration = vec!["f: unknown key".into()];
    assert_eq!(first(&all), Some(Cause::Configuration));
    for (state, expected) in [
        (ImageState::Pinned, None),
        (ImageState::Missing, Some(Cause::ImageMissing)),
        (ImageState::Unpinned("no label".into()), Some(Cause::ImageUnpinned)),
        (ImageState::Unknown("ctr: not installed".into()), Some(Cause::ImageUnknown)),
    ] {
        let mut all = listen(ListenState::Free);
        let (manifest, image) = ("/m/jackstay.yaml".into(), "localhost/jackstay:1".into());
        all.host.images = vec![PodImage { manifest, image, state }];
        let found = diagnose(&all);
        assert_eq!(found.first().map(|finding| finding.cause), expected);
        let is_problem = !matches!(expected, None | Some(Cause::ImageUnknown));
        assert_eq!(has_problems(&found), is_problem, "{found:?}");
    }
    let mut all = listen(ListenState::Free);
    (all.host.open_files, all.host.wanted_connections) = (Some(1024), 4096);
    let found = diagnose(&all);
    assert_eq!((found[0].cause, found[0].level), (Cause::OpenFiles, Level::Note));
    assert!(!has_problems(&found), "a note is no problem");
}

#[test]
fn diagnose_cause_precedes_its_consequences() {
    let server = |answered| NameServer {
        address: "10.0.0.53:53".parse().unwrap(),
        asked: 4,
        answered,
        p50_ms: None,
        error: None,
    };
    let unresolved = EndpointObservation {
        resolved: Resolution::NoAnswer("no name server answers".into()),
        fresh: (0..5).map(|i| failed(f64::from(i), Step::Resolve, FailureKind::Other)).collect(),
        ..endpoint("lb.example:6443")
    };
    let mut all = observations(vec![failing(Step::Connect, FailureKind::Refused), unresolved]);
    all.dns = Some(Dns { resolv_conf: None, servers: vec![server(0)] });
    assert_eq!(first(&all), Some(Cause::DnsBlackHole));

    // A wrong clock makes valid certificates look invalid.
    let mut early = failing(Step::Tls, FailureKind::NotYetValid);
    early.clock_skew_s = Some(86_400.0);
    assert_eq!(first(&observations(vec![early])), Some(Cause::ClockSkew));

    // One silent name server of two is reported after the dead endpoint.
    let mut all = observations(vec![
        failing(Step::Connect, FailureKind::Refused),
        endpoint("lb.example:6443"),
    ]);
    all.dns = Some(Dns { resolv_conf: None, servers: vec![server(0), server(4)] });
    let causes: Vec<Cause> = diagnose(&all).iter().map(|finding| finding.cause).collect();
    assert_eq!(causes, [Cause::DeadEndpoint, Cause::DnsPartly]);

    // All endpoints dead at once: the cause is on this machine.
    let both = observations(vec![
        failing(Step::Connect, FailureKind::Timeout),
        EndpointObservation {
            address: "10.0.0.2:6443".into(),
            ..failing(Step::Connect, FailureKind::Timeout)
        },
    ]);
    assert!(diagnose(&both)[0].what.contains("None of the 2"), "{:?}", diagnose(&both)[0]);

    // A silent connection without working fresh ones is a dead endpoint, not a forgotten flow.
    let mut gone = endpoint("10.0.0.1:6443");
    gone.long_lived = vec![LongLived {
        silent_ms: Some(Ms(6000.0)),
        silent_at_ms: Some(Ms(4000.0)),
        ..long_lived()
    }];
    for attempt in &mut gone.fresh {
        if attempt.at_ms.0 > 4000.0 {
            *attempt = failed(attempt.at_ms.0, Step::Connect, FailureKind::Timeout);
        }
    }
    let found = diagnose(&observations(vec![gone]));
    assert_eq!(found.iter().map(|f| f.cause).collect::<Vec<_>>(), [Cause::DeadEndpoint]);
    assert!(found[0].what.contains("has failed during the examination"), "{found:#?}");

    // An expired client certificate explains the refusal; it is reported once.
    let refused = |address: &str| {
        let mut endpoint = failing(Step::Readyz, FailureKind::Unauthorized);
        endpoint.address = address.into();
        endpoint.shown.as_mut().unwrap().expires_in_s = -5;
        endpoint
    };
    let causes: Vec<Cause> = diagnose(&observations(vec![refused("a:1"), refused("b:1")]))
        .iter()
        .map(|f| f.cause)
        .collect();
    assert_eq!(causes, [Cause::ClientCertificateExpired, Cause::Unauthorized]);

    // Late responses with few retransmissions come from a slow server.
    for retransmitted in [0, 3] {
        let long_lived = vec![LongLived { late: 20, retransmitted, ..long_lived() }];
        let slow = EndpointObservation { long_lived, ..endpoint("10.0.0.1:6443") };
        assert_eq!(first(&observations(vec![slow])), None);
    }
}

#[test]
fn diagnose_merges_findings_that_differ_only_in_the_endpoint() {
    let named = |address: &str, endpoint: EndpointObservation| {
        let mut endpoint = EndpointObservation { address: address.into(), ..endpoint };
        for failure in endpoint.fresh.iter_mut().filter_map(|a| a.failure.as_mut()) {
            failure.text = format!("connect to {address}: refused");
        }
        endpoint
    };
    let refusing = |address| named(address, failing(Step::Connect, FailureKind::Refused));
    let silent = |address| named(address, failing(Step::Connect, FailureKind::Timeout));
    let found = diagnose(&observations(vec![
        refusing("a:1"),
        endpoint("b:1"),
        refusing("c:1"),
        refusing("d:1"),
    ]));
    assert_eq!(found.len(), 1, "{found:#?}");
    assert_eq!(found[0].what, "a:1 is dead. The same holds for c:1 and d:1.");
    assert_eq!(found[0].because, "20 of 20 fresh connections failed: connect to a:1: refused");
    assert_eq!(found[0].endpoints, ["a:1", "c:1", "d:1"]);
    // Findings with different advice stay apart.
    assert_eq!(
        diagnose(&observations(vec![refusing("a:1"), endpoint("b:1"), silent("c:1")])).len(),
        2
    );
    // If all fail alike there is one finding; otherwise the summary and one for each kind.
    assert_eq!(diagnose(&observations(vec![silent("a:1"), silent("b:1"), silent("c:1")])).len(), 1);
    assert_eq!(diagnose(&observations(vec![refusing("a:1"), silent("b:1")])).len(), 3);

    let mut all = observations(vec![endpoint("a:1")]);
    all.configuration = (0..7).map(|i| format!("f: mistake {i}")).collect();
    let found = diagnose(&all);
    assert_eq!(found.len(), 1, "{found:#?}");
    assert!(found[0].because.ends_with("f: mistake 4; and 2 more"), "{found:#?}");

    let expiring = |address: &str| {
        let certificate = ServerCertificate { expires_in_s: 5 * 86_400, ..certificate() };
        EndpointObservation { certificate: Some(certificate), ..endpoint(address) }
    };
    let found = diagnose(&observations(vec![expiring("a:1"), expiring("b:1")]));
    assert_eq!(found.len(), 1, "{found:#?}");
    assert_eq!(found[0].what, "The certificate of a:1 expires in 5 days. The same holds for b:1.");
}

/// While a process is killed, its kernel still accepts connections and resets them; later it refuses them.
#[test]
fn advice_depends_on_the_last_failure() {
    let mut killed = failing(Step::Connect, FailureKind::Refused);
    killed.fresh[0] = failed(0.0, Step::Tls, FailureKind::Reset);
    killed.fresh[1] = failed(500.0, Step::Http2, FailureKind::Timeout);
    let found = diagnose(&observations(vec![killed, endpoint("b:1")]));
    assert_eq!(found.len(), 1, "{found:#?}");
    assert!(found[0].advice.contains("the apiserver is running"), "{found:#?}");
    let found =
        diagnose(&observations(vec![failing(Step::Tls, FailureKind::Reset), endpoint("b:1")]));
    assert!(found[0].advice.contains("closed at once"), "{found:#?}");
    assert!(!found[0].advice.contains("stopped"), "{found:#?}");
    let found =
        diagnose(&observations(vec![failing(Step::Tls, FailureKind::Timeout), endpoint("b:1")]));
    assert!(found[0].advice.contains("A stopped, hung or overloaded apiserver"), "{found:#?}");
}

/// A stopped apiserver: its kernel accepts TCP connections, and the network is not the cause.
#[test]
fn advice_for_unanswered_tls_names_the_process_and_not_the_network() {
    let named = |address: &str, step, kind| EndpointObservation {
        address: address.into(),
        ..failing(step, kind)
    };
    let silent = |address| named(address, Step::Tls, FailureKind::Timeout);
    let is_of_process = |finding: &Finding| {
        let advice = &finding.advice;
        assert!(!finding.what.contains("reached") && !finding.what.contains("dead"), "{finding:?}");
        assert!(advice.contains("crictl ps") && advice.contains("stopped, hung"), "{finding:?}");
        assert!(!advice.contains("firewall") && !advice.contains("routes"), "{finding:?}");
    };
    let found = diagnose(&observations(vec![silent("a:1"), silent("b:1"), silent("c:1")]));
    assert_eq!(found.len(), 1, "{found:#?}");
    assert_eq!(found[0].what, "None of the 3 endpoints answers TLS, although TCP connects.");
    is_of_process(&found[0]);

    let found = diagnose(&observations(vec![silent("a:1"), endpoint("b:1"), silent("c:1")]));
    assert_eq!(found.len(), 1, "{found:#?}");
    let what = "a:1 accepts TCP connections but does not answer TLS. The same holds for c:1.";
    assert_eq!(found[0].what, what);
    is_of_process(&found[0]);

    // The summary of different failures does not blame the network either.
    let refusing = named("b:1", Step::Connect, FailureKind::Refused);
    let lost = named("c:1", Step::Connect, FailureKind::Timeout);
    let found = diagnose(&observations(vec![silent("a:1"), refusing, lost]));
    assert_eq!(found.len(), 4, "{found:#?}");
    assert!(found[0].advice.contains("see the advice for each"), "{found:#?}");
    is_of_process(&found[1]);

    // Nothing listens at any address: the network works as well.
    let refusing = |address| named(address, Step::Connect, FailureKind::Refused);
    let found = diagnose(&observations(vec![refusing("a:1"), refusing("b:1")]));
    assert!(found.len() == 1 && found[0].advice.contains("nothing listens"), "{found:#?}");
}

#[test]
fn advice_for_no_route_differs_from_refused_and_timeout() {
    let advice = |kind| {
        let found = diagnose(&observations(vec![failing(Step::Connect, kind), endpoint("b:1")]));
        found[0].advice.clone()
    };
    let no_route = advice(FailureKind::NoRoute);
    assert!(no_route.contains("ip route get") && no_route.contains("VPN"), "{no_route}");
    let all = [FailureKind::Refused, FailureKind::Timeout, FailureKind::Unreachable].map(advice);
    assert!(!all.contains(&no_route), "{all:?}");
    assert!(all[1].contains("get no response"), "{all:?}");
}

#[test]
fn diagnose_address_that_only_the_cluster_names_is_a_note() {
    for (step, kind) in [
        (Step::Connect, FailureKind::Timeout),
        (Step::Tls, FailureKind::WrongName),
        (Step::Readyz, FailureKind::Status(500)),
    ] {
        let cluster = |address: &str| EndpointObservation {
            source: EndpointSource::Cluster,
            address: address.into(),
            ..failing(step, kind)
        };
        let all = vec![endpoint("lb:6443"), cluster("10.0.0.2:6443"), cluster("10.0.0.3:6443")];
        let found = diagnose(&observations(all));
        assert!(!has_problems(&found) && found.len() == 1, "{found:#?}");
        assert!(found[0].what.contains("10.0.0.2:6443"), "{found:#?}");
        assert!(found[0].what.ends_with("The same holds for 10.0.0.3:6443."), "{found:#?}");
        assert!(found[0].advice.starts_with("Only the cluster names this address."), "{found:#?}");
        // The same address as an endpoint of the user is a problem.
        let mut given = cluster("10.0.0.2:6443");
        given.source = EndpointSource::Given;
        assert!(has_problems(&diagnose(&observations(vec![endpoint("lb:6443"), given]))));
    }
}

#[test]
fn diagnose_lists_no_name_twice() {
    let twice = |step, kind| vec![failing(step, kind), failing(step, kind)];
    for (step, kind) in [
        (Step::Connect, FailureKind::Refused),
        (Step::Tls, FailureKind::WrongName),
        (Step::Tls, FailureKind::NotTls),
    ] {
        let found = diagnose(&observations(twice(step, kind)));
        assert_eq!(found.len(), 1, "{found:#?}");
        assert_eq!(found[0].endpoints, ["10.0.0.1:6443"]);
        assert!(!found[0].what.contains("The same holds"), "{found:#?}");
        let text = format!("{} {} {}", found[0].what, found[0].because, found[0].advice);
        assert!(text.matches("kubernetes, 10.0.0.1").count() <= 1, "{text}");
    }
    let server = || NameServer {
        address: "10.0.0.53:53".parse().unwrap(),
        asked: 4,
        answered: 0,
        p50_ms: None,
        error: None,
    };
    let mut all = observations(vec![endpoint("lb.example:6443")]);
    all.dns = Some(Dns { resolv_conf: None, servers: vec![server(), server()] });
    assert_eq!(
        diagnose(&all)[0].what,
        "The name server 10.0.0.53 does not answer; another one does."
    );
}

#[test]
fn diagnose_slow_load_balancer_is_a_note() {
    let mut balancer = endpoint("lb:6443");
    for attempt in &mut balancer.fresh {
        for (step, ms) in &mut attempt.steps {
            if *step == Step::Http2 {
                *ms = Ms(80.0);
            }
        }
    }
    let direct =
        EndpointObservation { source: EndpointSource::Cluster, ..endpoint("10.0.0.1:6443") };
    let found = diagnose(&observations(vec![balancer, direct]));
    assert_eq!((found[0].cause, found[0].level), (Cause::SlowPath, Level::Note));
}

/// A fresh connection that is answered at a time, after a TLS handshake that waited for it.
fn answered_at(at_ms: f64, answered_ms: f64) -> ConnectAttempt {
    let mut attempt = succeeded(at_ms);
    attempt.steps[1].1 = Ms((answered_ms - at_ms - 2.0).max(1.0));
    attempt
}

#[test]
fn diagnose_outage_at_the_beginning_that_ends_is_a_problem() {
    let times = |count: u32| (0..count).map(|i| f64::from(i) * 500.0);
    // An outage in which TLS is not answered until `end`; connections wait for 3.5 s.
    let frozen = |end: f64, count| {
        let attempt = |at: f64| match end - at {
            wait if wait > 3500.0 => failed(at, Step::Tls, FailureKind::Timeout),
            _ => answered_at(at, end),
        };
        EndpointObservation { fresh: times(count).map(attempt).collect(), ..endpoint("a:1") }
    };
    for (end, count, failures) in [
        (9000.0, 20, "11 of 20"),
        (5000.0, 6, "3 of 6"),
        (3600.0, 6, "1 of 6"),
        (2500.0, 20, "0 of 20"),
    ] {
        let found = diagnose(&observations(vec![frozen(end, count)]));
        let [finding] = &found[..] else { panic!("{end} {found:#?}") };
        assert_eq!((finding.cause, finding.level), (Cause::IntermittentEndpoint, Level::Problem));
        let what = "a:1 did not answer TLS at the beginning of the examination and answers now.";
        assert_eq!(finding.what, what);
        let because = format!("no answer for the first {:.1} s: {failures} fresh", end / 1000.0);
        assert!(finding.because.starts_with(&because), "{finding:#?}");
        assert!(finding.advice.contains("stopped, hung or overloaded"), "{finding:#?}");
    }
    // All apiservers at once: one finding.
    let b = EndpointObservation { address: "b:1".into(), ..frozen(5200.0, 20) };
    let found = diagnose(&observations(vec![frozen(5000.0, 20), b]));
    assert_eq!(found.len(), 1, "{found:#?}");
    assert!(found[0].what.ends_with("The same holds for b:1."), "{found:#?}");
    // An apiserver that starts.
    let fresh = times(20).map(|at| match at {
        ..3000.0 => failed(at, Step::Connect, FailureKind::Refused),
        _ => succeeded(at),
    });
    let starting = EndpointObservation { fresh: fresh.collect(), ..endpoint("a:1") };
    let found = diagnose(&observations(vec![starting]));
    assert!(found[0].what.contains("did not answer at the beginning"), "{found:#?}");
    assert!(found[0].advice.contains("nothing listens"), "{found:#?}");
    // One late connection, and a server that is slow all the time, are no outage.
    let mut late = endpoint("a:1");
    late.fresh[0] = answered_at(0.0, 3000.0);
    let slow = times(20).map(|at| answered_at(at, at + 2500.0)).collect();
    let slow = EndpointObservation { fresh: slow, ..endpoint("a:1") };
    for endpoint in [late, slow] {
        assert_eq!(diagnose(&observations(vec![endpoint])), []);
    }
}

#[test]
fn diagnose_error_of_jackstay_repeats_its_reasons() {
    let mut through = failing(Step::Readyz, FailureKind::ErrorOfJackstay(503));
    for failure in through.fresh.iter_mut().filter_map(|a| a.failure.as_mut()) {
        failure.text = "/readyz responds with 503: jackstay: no apiserver is reachable: x".into();
    }
    let found = diagnose(&observations(vec![through]));
    let [finding] = &found[..] else { panic!("{found:#?}") };
    assert_eq!((finding.cause, finding.level), (Cause::NotReadyEndpoint, Level::Problem));
    assert!(finding.what.contains("is a jackstay that answers"), "{finding:#?}");
    assert!(finding.because.ends_with("jackstay: no apiserver is reachable: x"), "{finding:#?}");
    assert!(!finding.advice.contains("etcd"), "{finding:#?}");
}

/// An apiserver accepts it, so it is not a problem without jackstay.
#[test]
fn diagnose_client_certificate_of_version_1_is_noted_with_the_remedy() {
    let mut old = endpoint("10.0.0.1:6443");
    if let Some(shown) = &mut old.shown {
        shown.is_version_1 = true;
    }
    let found = diagnose(&observations(vec![old.clone(), old]));
    let [finding] = &found[..] else { panic!("{found:#?}") };
    assert_eq!((finding.cause, finding.level), (Cause::ClientCertificateVersion1, Level::Note));
    assert!(finding.what.contains("is X.509 version 1.") && finding.advice.contains("version 3"));
}

#[test]
fn apiservers_more_than_one_minor_version_apart_are_a_problem() {
    let with = |address: &str, minor: u16| EndpointObservation {
        version: Some(
            ServerVersion::parse(format!(r#"{{"gitVersion":"v1.{minor}.0"}}"#).as_bytes()).unwrap(),
        ),
        ..endpoint(address)
    };
    let found = |versions: &[u16]| {
        let endpoints = versions.iter().enumerate();
        let endpoints = endpoints.map(|(i, minor)| with(&format!("10.0.0.{i}:6443"), *minor));
        diagnose(&observations(endpoints.collect()))
    };
    assert_eq!(found(&[36, 37, 36]), []);
    assert_eq!(found(&[36]), []);
    let findings = found(&[36, 37, 35]);
    assert_eq!(findings.len(), 1, "{findings:?}");
    assert_eq!((findings[0].cause, findings[0].level), (Cause::VersionSkew, Level::Problem));
    assert_eq!(findings[0].because, "v1.35.0 and v1.37.0 at /version");
    assert_eq!(findings[0].endpoints, ["10.0.0.2:6443", "10.0.0.1:6443"]);
}

#[test]
fn server_that_routes_by_host_is_named_with_both_hosts() {
    let routing = |served: &str, refused: &str| EndpointObservation {
        authority: "rancher.example.com".into(),
        host_routing: Some(HostRouting {
            served: served.into(),
            refused: refused.into(),
            status: 421,
        }),
        ..endpoint("10.0.0.1:6443")
    };
    let found = |endpoint| diagnose(&observations(vec![endpoint])).remove(0);
    // The clients of a listener in mode passthrough.
    let finding = found(routing("rancher.example.com", "127.0.0.1:7443"));
    assert_eq!((finding.level, finding.cause), (Level::Problem, Cause::RoutesByHost));
    assert!(finding.because.contains("with 421 to the host 127.0.0.1:7443"), "{finding:?}");
    assert!(finding.advice.contains("Use mode terminate"), "{finding:?}");
    // jackstay itself: the failed `/readyz` has the same cause.
    let own = EndpointObservation {
        fresh: failing(Step::Readyz, FailureKind::Status(421)).fresh,
        ..routing("api.example.com", "rancher.example.com")
    };
    let findings = diagnose(&observations(vec![own]));
    let causes: Vec<_> = findings.iter().map(|finding| finding.cause).collect();
    assert_eq!(causes, [Cause::RoutesByHost]);
    assert!(findings[0].advice.contains("Set upstreams[].authority to api.example.com"));
}

#[test]
fn status_404_or_421_is_no_sign_of_an_apiserver() {
    for (status, cause) in [
        (404, Cause::NotServed),
        (421, Cause::NotServed),
        (500, Cause::NotReadyEndpoint),
        (503, Cause::NotReadyEndpoint),
    ] {
        let failing = failing(Step::Readyz, FailureKind::Status(status));
        assert_eq!(first(&observations(vec![failing])), Some(cause), "{status}");
    }
}

/// What six connections to an address have shown.
fn behind(address: &str, kind: Kind, backends: &[&str]) -> AddressBackends {
    let backends = backends.iter().map(ToString::to_string).collect();
    AddressBackends { address: address.parse().unwrap(), kind, backends, connections: 6 }
}

#[test]
fn diagnose_address_of_several_apiservers_names_them() {
    let apiservers = ["10.0.0.11:6443", "10.0.0.12:6443", "certificate-0a1b2c3d"];
    let lb = EndpointObservation {
        behind: vec![behind("10.0.0.1:443", Kind::Several(2), &apiservers)],
        ..endpoint("lb.example.com:443")
    };
    let found = diagnose(&observations(vec![lb]));
    let [finding] = &found[..] else { panic!("{found:#?}") };
    assert_eq!((finding.level, finding.cause), (Level::Note, Cause::SeveralApiservers));
    assert_eq!(finding.what, "lb.example.com:443 (10.0.0.1:443) leads to several apiservers.");
    let because = "6 connections have reached 3 apiservers (10.0.0.11:6443, 10.0.0.12:6443, certificate-0a1b2c3d)";
    assert_eq!(finding.because, because);
    for part in ["In mode terminate jackstay judges each", "In mode passthrough it cannot"] {
        assert!(finding.advice.contains(part), "{finding:#?}");
    }
}

#[test]
fn diagnose_single_address_of_one_apiserver_says_what_it_may_be() {
    let address = behind("10.0.0.1:6443", Kind::One, &["10.0.0.11:6443"]);
    let one = |address: AddressBackends| EndpointObservation {
        behind: vec![address],
        ..endpoint("10.0.0.1:6443")
    };
    let found = diagnose(&observations(vec![one(address.clone())]));
    let [finding] = &found[..] else { panic!("{found:#?}") };
    assert_eq!((finding.level, finding.cause), (Level::Note, Cause::OneApiserver));
    assert_eq!(finding.because, "6 connections, 10.0.0.11:6443");
    assert!(finding.advice.contains("client IP affinity"), "{finding:#?}");
    // Too few connections, no connection, and a second address show nothing.
    let few = AddressBackends { connections: 5, ..address.clone() };
    assert_eq!(diagnose(&observations(vec![one(few)])), []);
    let none = behind("10.0.0.1:6443", Kind::Unknown, &[]);
    assert_eq!(diagnose(&observations(vec![one(none)])), []);
    assert_eq!(diagnose(&observations(vec![one(address), endpoint("10.0.0.2:6443")])), []);
}

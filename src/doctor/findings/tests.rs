//! Each cause from what it looks like, and nothing from what is well.

use super::{Cause, Level, is_wrong, judge};
use crate::doctor::observations::{
    Attempt, Certificate, Dns, Endpoint, Failure, Idle, Kind, Lasting, Listen, ListenState, Ms,
    NameServer, Observations, Resolved, Shown, Source, Step,
};

/// The steps up to and including one, each of a millisecond.
fn up_to(last: Step) -> Vec<(Step, Ms)> {
    let all = [Step::Connect, Step::Tls, Step::Http2, Step::Readyz, Step::Request];
    all.into_iter().take_while(|step| *step <= last).map(|step| (step, Ms(1.0))).collect()
}

fn good(at_ms: f64) -> Attempt {
    Attempt { at_ms: Ms(at_ms), steps: up_to(Step::Request), failure: None }
}

fn bad(at_ms: f64, step: Step, kind: Kind) -> Attempt {
    let mut steps = up_to(step);
    steps.retain(|(done, _)| *done < step);
    let failure = Some(Failure { step, kind, text: format!("{} failed", step.as_str()) });
    Attempt { at_ms: Ms(at_ms), steps, failure }
}

fn certificate() -> Certificate {
    Certificate {
        subject: "CN=kube-apiserver".into(),
        issuer: "CN=kubernetes".into(),
        names: vec!["kubernetes".into(), "10.0.0.1".into()],
        not_before: "2026-01-01T00:00:00Z".into(),
        not_after: "2027-01-01T00:00:00Z".into(),
        expires_in_s: 200 * 86_400,
    }
}

fn lasting() -> Lasting {
    Lasting {
        at_ms: Ms(5.0),
        pongs: 180,
        p50_ms: Some(Ms(0.5)),
        p99_ms: Some(Ms(1.5)),
        late: 0,
        silent_ms: None,
        silent_at_ms: None,
        ended: None,
        retransmitted: 0,
        sent: 400,
    }
}

fn endpoint(address: &str) -> Endpoint {
    Endpoint {
        address: address.into(),
        source: Source::Given,
        server_name: "kubernetes".into(),
        resolved: Resolved::Addresses(vec!["10.0.0.1".parse().unwrap()]),
        loops_to: None,
        fresh: (0..20).map(|i| good(f64::from(i) * 500.0)).collect(),
        lasting: vec![lasting()],
        idle: Some(Idle { for_ms: Ms(10_000.0), alive: true, sent: 0 }),
        certificate: Some(certificate()),
        clock_skew_s: Some(0.2),
        max_streams: Some(100),
        authenticated: true,
        shown: Some(Shown {
            subject: "CN=kubernetes-admin".into(),
            not_after: "2027-01-01T00:00:00Z".into(),
            expires_in_s: 200 * 86_400,
        }),
    }
}

fn seen(endpoints: Vec<Endpoint>) -> Observations {
    Observations { endpoints, ..Observations::default() }
}

/// An endpoint all of whose fresh connections fail alike.
fn failing(step: Step, kind: Kind) -> Endpoint {
    let fresh = (0..20).map(|i| bad(f64::from(i) * 500.0, step, kind)).collect();
    let lasting = if step > Step::Http2 { vec![lasting()] } else { Vec::new() };
    Endpoint { fresh, lasting, idle: None, ..endpoint("10.0.0.1:6443") }
}

fn first(observations: &Observations) -> Option<Cause> {
    judge(observations).first().map(|finding| finding.cause)
}

#[test]
fn nothing_is_wrong_with_what_is_well() {
    let well = seen(vec![endpoint("10.0.0.1:6443"), endpoint("10.0.0.2:6443")]);
    assert_eq!(judge(&well), []);
    assert!(!is_wrong(&judge(&well)));
}

#[test]
fn each_cause_from_how_it_looks() {
    let forgotten = Endpoint {
        lasting: vec![Lasting {
            silent_ms: Some(Ms(7000.0)),
            silent_at_ms: Some(Ms(3000.0)),
            ..lasting()
        }],
        ..endpoint("lb:6443")
    };
    let idle = Endpoint {
        idle: Some(Idle { for_ms: Ms(10_000.0), alive: false, sent: 0 }),
        ..endpoint("lb:6443")
    };
    let lossy = Endpoint {
        lasting: vec![Lasting { late: 17, retransmitted: 20, ..lasting() }],
        ..endpoint("10.0.0.1:6443")
    };
    let looping =
        Endpoint { loops_to: Some("10.0.0.1:6443".parse().unwrap()), ..endpoint("10.0.0.1:6443") };
    let skewed = Endpoint { clock_skew_s: Some(-400.0), ..endpoint("10.0.0.1:6443") };
    let nowhere = Endpoint {
        resolved: Resolved::NoAnswer("no name server answers".into()),
        fresh: Vec::new(),
        ..endpoint("lb.example:6443")
    };
    let unknown =
        Endpoint { resolved: Resolved::NoSuchName, fresh: Vec::new(), ..endpoint("lb.example:1") };
    let mut half_dead = endpoint("lb:6443");
    for attempt in half_dead.fresh.iter_mut().step_by(2) {
        *attempt = bad(attempt.at_ms.0, Step::Connect, Kind::Timeout);
    }
    for (endpoint, expected) in [
        (failing(Step::Connect, Kind::Refused), Cause::DeadEndpoint),
        (failing(Step::Connect, Kind::Timeout), Cause::DeadEndpoint),
        (failing(Step::Tls, Kind::Timeout), Cause::DeadEndpoint),
        (failing(Step::Http2, Kind::Timeout), Cause::DeadEndpoint),
        (failing(Step::Tls, Kind::Expired), Cause::CertificateExpired),
        (failing(Step::Tls, Kind::NotYetValid), Cause::CertificateNotYetValid),
        (failing(Step::Tls, Kind::WrongName), Cause::SanMissing),
        (failing(Step::Tls, Kind::UnknownIssuer), Cause::WrongCa),
        (failing(Step::Tls, Kind::Tls), Cause::Tls),
        (failing(Step::Http2, Kind::NoHttp2), Cause::NoHttp2),
        (failing(Step::Readyz, Kind::Status(500)), Cause::SickEndpoint),
        (failing(Step::Readyz, Kind::Timeout), Cause::SickEndpoint),
        (failing(Step::Readyz, Kind::Unauthorized), Cause::Unauthorized),
        (failing(Step::Request, Kind::Unauthorized), Cause::Unauthorized),
        (forgotten, Cause::ForgottenFlows),
        (idle, Cause::ForgottenFlows),
        (lossy, Cause::PacketLoss),
        (looping, Cause::Loop),
        (skewed, Cause::ClockSkew),
        (nowhere, Cause::DnsBlackHole),
        (unknown, Cause::NoSuchName),
        (half_dead, Cause::Unsteady),
    ] {
        let said = format!("{:?}", endpoint.address);
        let found = judge(&seen(vec![endpoint]));
        assert_eq!(found.first().map(|f| f.cause), Some(expected), "{said} {found:#?}");
        assert!(is_wrong(&found));
        for finding in &found {
            assert!(finding.what.ends_with('.') && !finding.advice.is_empty(), "{finding:?}");
        }
    }
}

#[test]
fn this_machine() {
    let listen = |state| {
        let address = "127.0.0.1:7443".parse().unwrap();
        let mut all = seen(vec![endpoint("10.0.0.1:6443")]);
        all.host.listen = vec![Listen { address, what: "listener x".into(), state }];
        all
    };
    for (state, expected) in [
        (ListenState::Free, None),
        (ListenState::Jackstay, None),
        (ListenState::Taken(Some("haproxy (pid 7)".into())), Some(Cause::PortTaken)),
        (ListenState::NotOurs, Some(Cause::AddressNotOurs)),
        (ListenState::Failed("permission denied".into()), Some(Cause::AddressNotOurs)),
    ] {
        assert_eq!(first(&listen(state.clone())), expected, "{state:?}");
    }
    let mut all = listen(ListenState::Free);
    all.configuration = vec!["f: upstreams[0].endpoints[0]: requests would loop".into()];
    assert_eq!(first(&all), Some(Cause::Loop));
    all.configuration = vec!["f: unknown key".into()];
    assert_eq!(first(&all), Some(Cause::Configuration));
    let mut all = listen(ListenState::Free);
    (all.host.open_files, all.host.wanted_connections) = (Some(1024), 4096);
    let found = judge(&all);
    assert_eq!((found[0].cause, found[0].level), (Cause::OpenFiles, Level::Note));
    assert!(!is_wrong(&found), "a note is nothing wrong");
}

#[test]
fn what_explains_the_rest_comes_first() {
    let server = |answered| NameServer {
        address: "10.0.0.53:53".parse().unwrap(),
        asked: 4,
        answered,
        p50_ms: None,
        error: None,
    };
    let nowhere = Endpoint {
        resolved: Resolved::NoAnswer("no name server answers".into()),
        fresh: (0..5).map(|i| bad(f64::from(i), Step::Resolve, Kind::Other)).collect(),
        ..endpoint("lb.example:6443")
    };
    let mut all = seen(vec![failing(Step::Connect, Kind::Refused), nowhere]);
    all.dns = Some(Dns { resolv_conf: None, servers: vec![server(0)] });
    assert_eq!(first(&all), Some(Cause::DnsBlackHole));

    // A clock that is wrong makes certificates look wrong.
    let mut early = failing(Step::Tls, Kind::NotYetValid);
    early.clock_skew_s = Some(86_400.0);
    assert_eq!(first(&seen(vec![early])), Some(Cause::ClockSkew));

    // One silent name server of two is worth a word, after the dead endpoint.
    let mut all = seen(vec![failing(Step::Connect, Kind::Refused), endpoint("lb.example:6443")]);
    all.dns = Some(Dns { resolv_conf: None, servers: vec![server(0), server(4)] });
    let causes: Vec<Cause> = judge(&all).iter().map(|finding| finding.cause).collect();
    assert_eq!(causes, [Cause::DeadEndpoint, Cause::DnsPartly]);

    // All dead at once: it is we, not they.
    let both = seen(vec![
        failing(Step::Connect, Kind::Timeout),
        Endpoint { address: "10.0.0.2:6443".into(), ..failing(Step::Connect, Kind::Timeout) },
    ]);
    assert!(judge(&both)[0].what.contains("None of the 2"), "{:?}", judge(&both)[0]);

    // A silence with nothing fresh beside it is a death, not a forgotten flow.
    let mut gone = endpoint("10.0.0.1:6443");
    gone.lasting =
        vec![Lasting { silent_ms: Some(Ms(6000.0)), silent_at_ms: Some(Ms(4000.0)), ..lasting() }];
    for attempt in &mut gone.fresh {
        if attempt.at_ms.0 > 4000.0 {
            *attempt = bad(attempt.at_ms.0, Step::Connect, Kind::Timeout);
        }
    }
    let found = judge(&seen(vec![gone]));
    assert_eq!(found.iter().map(|f| f.cause).collect::<Vec<_>>(), [Cause::DeadEndpoint]);
    assert!(found[0].what.contains("has died during the examination"), "{found:#?}");

    // A client certificate that is over is why it is refused; that is said once.
    let refused = |address: &str| {
        let mut endpoint = failing(Step::Readyz, Kind::Unauthorized);
        endpoint.address = address.into();
        endpoint.shown.as_mut().unwrap().expires_in_s = -5;
        endpoint
    };
    let causes: Vec<Cause> =
        judge(&seen(vec![refused("a:1"), refused("b:1")])).iter().map(|f| f.cause).collect();
    let refusal = Cause::Unauthorized;
    assert_eq!(causes, [Cause::ClientCertificateExpired, refusal]);

    // Late answers with hardly a segment sent again are a slow server's.
    for retransmitted in [0, 3] {
        let lasting = vec![Lasting { late: 20, retransmitted, ..lasting() }];
        let slow = Endpoint { lasting, ..endpoint("10.0.0.1:6443") };
        assert_eq!(first(&seen(vec![slow])), None);
    }
}

#[test]
fn findings_that_are_alike_become_one_that_names_every_endpoint() {
    let named = |address: &str, endpoint: Endpoint| {
        let mut endpoint = Endpoint { address: address.into(), ..endpoint };
        for failure in endpoint.fresh.iter_mut().filter_map(|a| a.failure.as_mut()) {
            failure.text = format!("connect to {address}: refused");
        }
        endpoint
    };
    let refusing = |address| named(address, failing(Step::Connect, Kind::Refused));
    let silent = |address| named(address, failing(Step::Connect, Kind::Timeout));
    let found =
        judge(&seen(vec![refusing("a:1"), endpoint("b:1"), refusing("c:1"), refusing("d:1")]));
    assert_eq!(found.len(), 1, "{found:#?}");
    assert_eq!(found[0].what, "a:1 is dead. The same holds for c:1 and d:1.");
    assert_eq!(found[0].because, "20 of 20 fresh connections failed: connect to a:1: refused");
    assert_eq!(found[0].endpoints, ["a:1", "c:1", "d:1"]);
    // What needs other advice stays apart.
    assert_eq!(judge(&seen(vec![refusing("a:1"), endpoint("b:1"), silent("c:1")])).len(), 2);
    // All of them in one way is one finding; in two ways it is the whole and each way.
    assert_eq!(judge(&seen(vec![silent("a:1"), silent("b:1"), silent("c:1")])).len(), 1);
    assert_eq!(judge(&seen(vec![refusing("a:1"), silent("b:1")])).len(), 3);

    let mut all = seen(vec![endpoint("a:1")]);
    all.configuration = (0..7).map(|i| format!("f: mistake {i}")).collect();
    let found = judge(&all);
    assert_eq!(found.len(), 1, "{found:#?}");
    assert!(found[0].because.ends_with("f: mistake 4; and 2 more"), "{found:#?}");

    let expiring = |address: &str| {
        let certificate = Certificate { expires_in_s: 5 * 86_400, ..certificate() };
        Endpoint { certificate: Some(certificate), ..endpoint(address) }
    };
    let found = judge(&seen(vec![expiring("a:1"), expiring("b:1")]));
    assert_eq!(found.len(), 1, "{found:#?}");
    assert_eq!(found[0].what, "The certificate of a:1 expires in 5 days. The same holds for b:1.");
}

/// While a process is being killed its kernel accepts connections and cuts them; afterwards they are
/// refused.
#[test]
fn advice_after_a_kill_is_that_of_the_last_failure() {
    let mut killed = failing(Step::Connect, Kind::Refused);
    killed.fresh[0] = bad(0.0, Step::Tls, Kind::Reset);
    killed.fresh[1] = bad(500.0, Step::Http2, Kind::Timeout);
    let found = judge(&seen(vec![killed, endpoint("b:1")]));
    assert_eq!(found.len(), 1, "{found:#?}");
    assert!(found[0].advice.contains("is the apiserver running"), "{found:#?}");
    let found = judge(&seen(vec![failing(Step::Tls, Kind::Reset), endpoint("b:1")]));
    assert!(found[0].advice.contains("cut at once"), "{found:#?}");
    assert!(!found[0].advice.contains("stopped"), "{found:#?}");
    let found = judge(&seen(vec![failing(Step::Tls, Kind::Timeout), endpoint("b:1")]));
    assert!(found[0].advice.contains("stopped"), "{found:#?}");
}

#[test]
fn a_slow_load_balancer_is_told() {
    let mut balancer = endpoint("lb:6443");
    for attempt in &mut balancer.fresh {
        for (step, ms) in &mut attempt.steps {
            if *step == Step::Http2 {
                *ms = Ms(80.0);
            }
        }
    }
    let direct = Endpoint { source: Source::Cluster, ..endpoint("10.0.0.1:6443") };
    let found = judge(&seen(vec![balancer, direct]));
    assert_eq!((found[0].cause, found[0].level), (Cause::SlowPath, Level::Note));
}

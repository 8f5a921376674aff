use super::*;
use crate::request::path_prefix::PathPrefix;
use http::{Method, Request};

const A: EndpointKey = EndpointKey(1);
const B: EndpointKey = EndpointKey(2);
const GROUP: &str = "metrics.k8s.io";
const MS: Duration = Duration::from_millis(1);

fn failure(is_probe: bool) -> GroupFailure<'static> {
    GroupFailure { reason: "dial tcp: refused", is_silent: false, is_probe }
}

#[test]
fn signal_follows_the_table() {
    use GroupSignal::{Failed, Unavailable};
    let (text, json) = ("text/plain; charset=utf-8", "application/json");
    let refused =
        "error trying to reach service: dial tcp 10.0.0.9:443: connect: connection refused\n";
    let lost = "error trying to reach service: http2: client connection lost\n";
    let conversion = r#""message":"conversion webhook for example.com/v1, Kind=Gauge failed: Post \"https://c.ns.svc:443/?timeout=30s\": dial tcp 10.0.0.9:443: connect: connection refused""#;
    let rejected = "conversion webhook for example.com/v1, Kind=Gauge failed: unexpected field";
    let long = "x".repeat(MAX_BODY + 1);
    for (status, content_type, body, expected) in [
        (503, text, refused, Some(Failed)),
        (503, text, lost, Some(Failed)),
        (503, text, "", Some(Failed)),
        (503, text, "service unavailable\n", Some(Unavailable)),
        (503, text, &*long, None),
        (503, json, "service unavailable\n", None),
        (503, "application/vnd.kubernetes.protobuf", refused, None),
        (503, "", refused, None),
        (504, json, "Timeout: request did not complete within the allotted timeout", Some(Failed)),
        (500, json, conversion, Some(Failed)),
        (500, json, rejected, None),
        (500, json, "Post \"https://c.ns.svc\" conversion webhook for x", None),
        (500, json, "Internal error occurred", None),
        (502, text, refused, None),
        (429, text, refused, None),
        (200, text, refused, None),
        (404, text, refused, None),
    ] {
        let mut headers = HeaderMap::new();
        if !content_type.is_empty() {
            headers.insert(header::CONTENT_TYPE, content_type.parse().unwrap());
        }
        let code = StatusCode::from_u16(status).unwrap();
        let signal = signal_of(code, &headers, body.as_bytes(), false);
        assert_eq!(signal, expected, "{status} {content_type} {body}");
    }
}

#[test]
fn deadline_that_the_client_has_chosen_shows_nothing() {
    let mut headers = HeaderMap::new();
    headers.insert(header::CONTENT_TYPE, "text/plain".parse().unwrap());
    let refused = b"error trying to reach service: dial tcp: connection refused";
    let late = b"error trying to reach service: context deadline exceeded";
    for (status, body, expected) in [
        (StatusCode::GATEWAY_TIMEOUT, &b""[..], None),
        (StatusCode::SERVICE_UNAVAILABLE, late, None),
        (StatusCode::SERVICE_UNAVAILABLE, refused, Some(GroupSignal::Failed)),
    ] {
        assert_eq!(signal_of(status, &headers, body, true), expected, "{status}");
        let without = signal_of(status, &headers, body, false);
        assert_eq!(without, Some(GroupSignal::Failed), "{status}");
    }
}

#[test]
fn group_that_stays_unavailable_is_not_asked_again() {
    let start = Instant::now();
    let asked = |is_disputed| {
        let mut health = GroupHealth::default();
        let times = [0, 999, 1_000, 2_999, 3_000, 5_000];
        let is_new = times.map(|at| health.unavailable(GROUP, is_disputed, start + at * MS));
        (health, is_new)
    };
    let (mut health, is_new) = asked(false);
    assert_eq!(is_new, [true, true, false, false, false, false]);
    assert_eq!(asked(true).1, [true, true, true, true, false, false]);
    assert!(health.any_fails());
    health.answered(GROUP, A, (start, false), start + 5_001 * MS);
    assert!(!health.any_fails());
    assert!(health.unavailable(GROUP, false, start + 6_000 * MS), "it was available meanwhile");
    // Forgotten after a time without requests.
    assert!(health.unavailable(GROUP, false, start + 6_000 * MS + LONGEST_PAUSE));
}

#[test]
fn webhook_is_named_only_if_it_cannot_be_reached() {
    let json = r#"{"message":"Internal error occurred: failed calling webhook \"policy.example.com\": failed to call webhook: Post \"https://p.ns.svc:443/v?timeout=10s\": dial tcp 10.0.0.9:443: connect: connection refused"}"#;
    let protobuf = "k8s\0failed calling webhook \"policy.example.com\": failed to call webhook: Post \"https://p\": context deadline exceeded\"\rInternalError";
    let answered = r#"failed calling webhook \"policy.example.com\": failed to call webhook: the server could not find the requested resource"#;
    let long = format!("failed calling webhook \"{}\": Post ", "a".repeat(MAX_NAME + 1));
    for (body, expected) in [
        (json, Some("policy.example.com")),
        (protobuf, Some("policy.example.com")),
        (answered, None),
        (&*long, None),
        ("failed calling webhook \"a b\": Post ", None),
        ("failed calling webhook \"\": Post ", None),
        ("failed calling webhook \"open", None),
        ("failed calling webhook ", None),
        ("", None),
    ] {
        let found = unreachable_webhook(body.as_bytes());
        assert_eq!(found.map(|(name, _)| name), expected, "{body}");
        let words = found.map(|(_, words)| String::from_utf8_lossy(words));
        let end = words
            .as_ref()
            .is_none_or(|words| words.ends_with("refused") || words.ends_with("exceeded"));
        assert!(words.as_ref().is_none_or(|words| words.starts_with("Post ")) && end, "{words:?}");
    }
}

#[test]
fn reason_is_short_and_printable() {
    assert_eq!(reason(b"service unavailable\n"), "service unavailable");
    assert_eq!(
        reason(br#"{"kind":"Status","message":"Post \"https://c\": EOF"}"#),
        "Post \"https://c\": EOF"
    );
    assert_eq!(reason(b"a\x1b[31m\n\xffb"), "a [31m  b");
    assert!(reason(&[b'x'; 10_000]).len() <= MAX_REASON);
    assert!(reason("ä".repeat(1_000).as_bytes()).len() <= MAX_REASON + 3);
}

#[test]
fn pause_doubles_with_each_failed_probe_until_an_answer() {
    let (mut health, start) = (GroupHealth::default(), Instant::now());
    assert_eq!(Some(GroupNews::Fails), health.failed(GROUP, A, failure(false), start), "begins");
    assert!(health.any_fails());
    let mut now = start;
    for seconds in [1, 2, 4, 8, 16, 30, 30] {
        let due = now + Duration::from_secs(seconds);
        assert_eq!(health.due(GROUP, due.checked_sub(MS).unwrap()), None, "{seconds}");
        assert!(!health.sent(GROUP, A, due.checked_sub(MS).unwrap()), "{seconds}");
        assert_eq!(health.due(GROUP, due), Some(A), "{seconds}");
        assert_eq!(health.avoided(GROUP), [A], "a write is no probe");
        assert!(health.sent(GROUP, A, due) && !health.sent(GROUP, A, due), "one probe at a time");
        assert_eq!(health.due(GROUP, due), None, "while it is probed");
        now = due + 100 * MS;
        assert_eq!(health.failed(GROUP, A, failure(true), now), Some(GroupNews::None));
    }
    let due = now + LONGEST_PAUSE;
    assert!(health.sent(GROUP, A, due));
    assert!(health.answered(GROUP, A, (start, true), due), "the probe was answered");
    assert!(!health.any_fails() && health.avoided(GROUP).is_empty());
    // It fails again soon: the pauses go on growing.
    assert_eq!(Some(GroupNews::FailsAgain), health.failed(GROUP, A, failure(false), due + MS));
    assert_eq!(health.failing()[0].probe_at, due + MS + LONGEST_PAUSE);
    assert_eq!(health.failing()[0].failures, 1);
    // After a long time without a failure it begins anew.
    assert!(health.answered(GROUP, A, (due + 2 * MS, false), due + 2 * MS));
    let later = due + 3 * LONGEST_PAUSE;
    assert_eq!(Some(GroupNews::Fails), health.failed(GROUP, A, failure(false), later));
    assert_eq!(health.failing()[0].probe_at, later + FIRST_PAUSE);
}

#[test]
fn failures_within_a_pause_do_not_extend_it() {
    let (mut health, start) = (GroupHealth::default(), Instant::now());
    for at in [0, 1, 500, 999] {
        health.failed(GROUP, A, failure(false), start + at * MS);
    }
    assert_eq!(health.failing()[0].probe_at, start + FIRST_PAUSE);
    assert_eq!(health.failing()[0].failures, 4);
    // Without a probe, because no other endpoint is left.
    health.failed(GROUP, A, failure(false), start + 1_001 * MS);
    assert_eq!(health.failing()[0].probe_at, start + 3_001 * MS);
}

#[test]
fn answer_to_an_older_request_does_not_end_a_failure() {
    let (mut health, start) = (GroupHealth::default(), Instant::now());
    health.failed(GROUP, A, failure(false), start + 10 * MS);
    for (sent, ends) in [(0, false), (10, false), (11, true), (12, false)] {
        let sent_at = start + sent * MS;
        assert_eq!(health.answered(GROUP, A, (sent_at, false), start + 20 * MS), ends, "{sent}");
    }
    assert!(!health.answered(GROUP, B, (start, true), start), "never failed");
}

#[test]
fn silence_is_a_suspicion_until_the_probe_is_silent() {
    let silent = |is_probe| GroupFailure { is_silent: true, ..failure(is_probe) };
    let (mut health, start) = (GroupHealth::default(), Instant::now());
    for (at, expected, fails) in [
        (0, GroupNews::None, None),
        (1, GroupNews::Suspected, Some(false)),
        (2, GroupNews::None, Some(false)),
    ] {
        let news = health.failed(GROUP, A, silent(false), start + at * MS);
        assert_eq!(news, Some(expected), "{at}");
        assert_eq!(health.fails_at(GROUP, A), fails, "{at}");
    }
    assert_eq!(health.avoided(GROUP), [A]);
    assert_eq!(health.failing().len(), 0);
    let due = start + FIRST_PAUSE;
    assert!(health.sent(GROUP, A, due));
    assert_eq!(health.failed(GROUP, A, silent(true), due), Some(GroupNews::Fails));
    assert_eq!(health.fails_at(GROUP, A), Some(true));
    // Each further probe waits twice as long.
    for wait in [500, 1_000, 1_000] {
        assert_eq!(health.head_wait(GROUP, Some(A), due), wait * MS);
        let due = health.failing()[0].probe_at;
        assert!(health.sent(GROUP, A, due));
        health.failed(GROUP, A, silent(true), due);
    }
    // A suspicion ends without news.
    health.failed(GROUP, B, silent(false), start);
    assert!(!health.answered(GROUP, B, (start + MS, false), start + 2 * MS));
    assert_eq!(health.avoided(GROUP), [A]);
}

#[test]
fn abandoned_probe_may_be_followed_by_another() {
    let (mut health, start) = (GroupHealth::default(), Instant::now());
    health.failed(GROUP, A, failure(false), start);
    let due = start + FIRST_PAUSE;
    assert!(health.sent(GROUP, A, due));
    health.probe_abandoned(GROUP, A);
    assert!(health.sent(GROUP, A, due));
}

#[test]
fn head_wait_follows_the_slowest_recent_answer() {
    let (mut health, start) = (GroupHealth::default(), Instant::now());
    assert_eq!(health.head_wait(GROUP, None, start), HEAD_WAIT);
    assert_eq!(health.head_wait(GROUP, Some(A), start), PROBE_WAIT);
    for (latency, wait) in [(600, 1_200), (550, 1_200), (2_000, 4_000), (9_000, 5_000)] {
        health.took(GROUP, latency * MS, start);
        assert_eq!(health.head_wait(GROUP, None, start), wait * MS, "{latency}");
        assert_eq!(health.head_wait(GROUP, Some(A), start), wait * MS, "{latency}");
    }
    assert!(health.any_slow());
    assert_eq!(health.head_wait(GROUP, None, start + SLOW_MEMORY), HEAD_WAIT, "forgotten");
    health.retain(&[], start + SLOW_MEMORY);
    assert!(!health.any_slow());
}

#[test]
fn groups_are_bounded_and_forgotten_with_their_endpoints() {
    let (mut health, now) = (GroupHealth::default(), Instant::now());
    assert_eq!(health.failed(&"a".repeat(MAX_NAME + 1), A, failure(false), now), None);
    let failed =
        (0..10_000).filter(|n| health.failed(&format!("g{n}"), A, failure(false), now).is_some());
    assert_eq!(failed.count(), MAX_GROUPS);
    assert_eq!(
        Some(GroupNews::Fails),
        health.failed("g1", B, failure(false), now),
        "a group that is remembered"
    );
    assert_eq!(health.fails_at("g1", B), Some(false));
    assert_eq!(health.fails_at("g9999", A), None);
    assert_eq!(health.retain(&[B], now).len(), MAX_GROUPS);
    assert_eq!(health.failing().len(), 1);
    let before = now + MEMORY.checked_sub(MS).unwrap();
    assert_eq!(health.retain(&[B], before), []);
    assert_eq!(health.retain(&[B], now + MEMORY), [("g1".into(), B)]);
    assert!(!health.any_fails());
}

#[test]
fn built_in_groups_are_shown_by_what_etcd_must_answer() {
    let info = |method: Method, target| {
        let request = Request::builder().method(method).uri(target).body(()).unwrap();
        RequestInfo::new(&request.into_parts().0, &PathPrefix::default())
    };
    for (method, target, expected) in [
        (Method::GET, "/api/v1/nodes/n", true),
        (Method::GET, "/api/v1/nodes/n?resourceVersion=", true),
        (Method::GET, "/api/v1/nodes/n?resourceVersion=0", false),
        (Method::GET, "/api/v1/nodes/n?resourceVersion=7", false),
        (Method::GET, "/api/v1/nodes", true),
        (Method::GET, "/api/v1/nodes?limit=500", true),
        (Method::GET, "/api/v1/nodes?resourceVersion=0", false),
        (Method::GET, "/api/v1/nodes?limit=500&continue=abc", false),
        (Method::GET, "/api/v1/nodes?watch=1", false),
        (Method::GET, "/api/v1/namespaces/a/pods/p/log", false),
        (Method::GET, "/api/v1/namespaces/a/events/e", false),
        (Method::POST, "/apis/events.k8s.io/v1/namespaces/a/events", false),
        (Method::PUT, "/apis/coordination.k8s.io/v1/namespaces/a/leases/l", true),
        (Method::PATCH, "/api/v1/nodes/n/status", true),
        (Method::PUT, "/api/v1/nodes/n/status?dryRun=All", false),
        (Method::POST, "/apis/authorization.k8s.io/v1/subjectaccessreviews", false),
        (Method::GET, "/version", false),
    ] {
        assert_eq!(asks_etcd(&info(method.clone(), target)), expected, "{method} {target}");
    }
    for (status, expected) in [
        (200, true),
        (201, true),
        (409, true),
        (404, false),
        (422, false),
        (429, false),
        (500, false),
    ] {
        assert_eq!(shows_etcd(StatusCode::from_u16(status).unwrap()), expected, "{status}");
    }
}

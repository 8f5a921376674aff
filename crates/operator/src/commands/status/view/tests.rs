//! The text of a status that has every part, and of malformed ones.

use serde_json::json;

use super::*;

fn status() -> Value {
    json!({
        "version": "1.2", "commit": "abc", "now": "2026-07-26T12:00:00Z", "started_at": "2026-07-26T08:48:00Z",
        "draining": false,
        "memory": {"limit_bytes": 187_904_819, "used_bytes": 3_250_586,
            "by_kind": {"connections": 3_250_586}, "shed": {"stalled_reader": 12, "stream_refused": 3}},
        "threads": {"workers": 2, "worker_connections": 1,
            "identity_lane": true, "identity_lane_connections": 3},
        "listeners": [
            {"name": "apiserver", "mode": "terminate", "upstream": "cp",
             "bind": ["127.0.0.1:7443", "[::1]:7443"], "connections": 3,
             "requests_in_flight": 90, "watches": 87, "tunnels": 0,
             "own_errors": [
                {"code": 429, "reason": "limit", "count": 1, "last": "2026-07-26T11:00:00Z"},
                {"code": 503, "reason": "no_upstream", "count": 33, "last": "2026-07-26T11:59:57Z"}],
             "certificate": {"state": "loaded", "subject": "CN=localhost",
                "not_after": "2026-10-01T12:00:00Z", "error": "/s.key: gone"},
             "client_ca": {"file": "/c.crt", "certificates": 2, "expired": 1, "error": "1 of 2"},
             "identities": [{"state": "awaited", "cert_file": "/k.pem", "error": "missing"},
                {"state": "expired", "subject": "CN=n1", "not_after": "2026-07-26T09:00:00Z",
                 "error": "certificate expired 3 h ago, on 2026-07-26T09:00:00Z"},
                {"state": "loaded", "subject": "CN=n2", "not_after": "2026-07-26T14:03:00Z"}]},
            {"name": "lb", "mode": "passthrough", "upstream": "cp", "bind": [], "flows": 7}],
        "upstreams": [{"name": "cp",
            "ca": {"file": "/u.crt", "certificates": 1, "expired": 1, "error": "every"},
            "endpoints": [
                {"address": "10.0.0.1:6443", "state": "ready", "reason": "/readyz is ok",
                 "since": "2026-07-26T08:48:01Z", "rtt": {"p50_ms": 0.42, "p99_ms": 12.6},
                 "connections": [{"state": "live"}, {"state": "suspect"}], "streams": 40,
                 "watches": 29, "flows": 0, "answers": 1234, "errors": 2,
                 "last_ejection": null},
                {"address": "10.0.0.2:6443", "state": "ejected", "reason": "refused\u{1b}[2J",
                 "since": "2026-07-26T11:59:48.500Z", "rtt": null, "connections": [],
                 "streams": 0, "watches": 0, "answers": 0, "errors": 0,
                 "capabilities": {"sharded": null, "features": null, "error": "/metrics: 403 Forbidden"},
                 "last_ejection": {"at": "2026-07-26T11:59:48Z", "reason": "refused"}}],
            "sources": [{"source": "dns", "last_success": "2026-07-26T11:58:45Z",
                "age_seconds": 75, "endpoints": 2, "error": "no answer", "note": null}],
            "gzip_failure": {"endpoint": "10.0.0.1:6443", "since": "2026-07-26T11:59:00Z",
                "reason": "the data of a gzip member is corrupt"},
            "unordered_groups": [{"group": "example.com", "reason": "version_not_growing",
                "since": "2026-07-26T11:57:00Z"}],
            "failing_groups": [{"group": "metrics.k8s.io", "endpoint": "10.0.0.2:6443",
                "reason": "error trying to reach service: refused\u{1b}[2J", "failures": 5,
                "since": "2026-07-26T11:58:00Z", "probe_in_s": 2.5}],
            "failing_webhooks": [{"webhook": "pods.example.com", "endpoint": "10.0.0.1:6443",
                "reason": "Post \"https://hook.x.svc\": no\nroute", "failures": 1,
                "since": "2026-07-26T11:59:55Z"}]}],
        "config": {"last_reload": {"at": "2026-07-26T11:00:00Z", "outcome": "failed",
            "errors": ["f: workers: is no number", "f: x: unknown"]}},
        "events": [
            {"at": "2026-07-26T11:59:48.500Z", "kind": "endpoint", "name": "10.0.0.2:6443",
             "from": "ready", "to": "ejected", "reason": "refused", "times": 3, "bad": true}],
    })
}

#[test]
fn text_wide_has_every_part() {
    let text = text(&status(), Style::default());
    for part in [
        "watches of shards or with unknown parameters not resumed at 10.0.0.2:6443: /metrics: 403 Forbidden",
        "jackstay 1.2 (abc)  ·  up 3h12m  ·  1 of 2 endpoints ready  ·  40 streams (29 watches)",
        "\nmemory for clients: 3.1 MiB of 179.2 MiB; shed: 12 stalled_reader, 3 stream_refused\n",
        "\n2 workers: 1 connection; identity lane: 3 connections\n",
        "apiserver  terminate    127.0.0.1:7443, [::1]:7443  cp              3        90       87        0      -",
        "  ·  34 errors answered by jackstay itself\n",
        "      own error 429 limit: 1 time, last 1h00m ago\n",
        "      own error 503 no_upstream: 33 times, last 3s ago\n",
        "identity awaited /k.pem: missing",
        "certificate loaded CN=localhost, expires in 67d00h: /s.key: gone\n",
        "client CA bundle /c.crt: 1 of 2\n",
        "\napiserver CA bundle /u.crt: every\n",
        "\nwatches of group example.com not resumed: version_not_growing, 3m00s ago\n",
        "\ngroup metrics.k8s.io fails at 10.0.0.2:6443: error trying to reach service: refused [2J, since 2m00s\n",
        "\nwebhook pods.example.com not reached at 10.0.0.1:6443: Post \"https://hook.x.svc\": no route, since 5s\n",
        "\nwatches without gzip: the data of a gzip member is corrupt, from 10.0.0.1:6443 1m00s ago\n",
        "identity expired CN=n1: certificate expired 3 h ago, on 2026-07-26T09:00:00Z\n",
        "identity loaded CN=n2, expires in 2h03m\n",
        "lb         passthrough  not bound",
        "10.0.0.1:6443  ready    3h11m  0.42 ms  13 ms  2 (1 not live)       40       29      0    2  /readyz is ok  never",
        "10.0.0.2:6443  ejected  11s          -      -               0        0        0      -    0  refused [2J    12s ago: refused",
        "dns     1m15s ago             2  no answer",
        "last reload 1h00m ago failed, the old configuration stays: f: workers: is no number; f: x",
        "11s ago       endpoint 10.0.0.2:6443  ready -> ejected: refused (3 times)",
    ] {
        assert!(text.contains(part), "no `{part}` in\n{text}");
    }
    assert!(!text.contains('\x1b'), "{text}");
}

#[test]
fn text_narrow_has_reasons_below_their_rows() {
    let style = Style { colour: true, width: Some(100) };
    let text = text(&status(), style);
    assert!(text.contains("\x1b[1;31mejected\x1b[0m"), "{text}");
    assert!(text.contains("\n      \x1b[1;31mrefused [2J\x1b[0m\n"), "{text}");
    assert!(!text.contains("LAST EJECTION"), "{text}");
}

#[test]
fn text_has_versions_and_the_canary_if_they_are_known() {
    let mut status = status();
    assert!(!text(&status, Style::default()).contains("VERSION"));
    status["upstreams"][0]["endpoints"][0]["version"] = json!("v1.37.0");
    status["upstreams"][0]["canary"] =
        json!({"share": "10%", "state": "withdrawn", "version": "1.37", "reason": "9 of 90"});
    let text = text(&status, Style::default());
    for part in [
        "2  v1.37.0  /readyz is ok",
        "0  -        refused",
        "\ncanary: 10% of new requests to 1.37, withdrawn: 9 of 90\n",
    ] {
        assert!(text.contains(part), "no `{part}` in\n{text}");
    }
}

#[test]
fn text_without_identity_lane_says_so() {
    let mut status = status();
    status["threads"]["identity_lane"] = json!(false);
    let text = text(&status, Style::default());
    assert!(text.contains("\n2 workers: 1 connection; identity lane: off\n"), "{text}");
}

#[test]
fn text_malformed_status_does_not_panic() {
    for malformed in [
        json!(null),
        json!([]),
        json!({"listeners": 3, "upstreams": [{"endpoints": [1], "sources": [{}]}], "events": [2]}),
    ] {
        text(&malformed, Style::default());
    }
}

#[test]
fn format_age_has_at_most_two_units() {
    for (seconds, expected) in
        [(0, "0s"), (59, "59s"), (65, "1m05s"), (3600, "1h00m"), (90_000, "1d01h")]
    {
        assert_eq!(format_age(Duration::from_secs(seconds)), expected);
    }
}

//! Metrics and access log lines for every way in which a request can end.

use super::*;
use crate::observe::Metrics;
use crate::observe::log::tests::Captured;
use jackstay_config::{Level, Log, LogFormat};
use std::time::Duration;

fn request_head(path: &str) -> request::Parts {
    let request = http::Request::get(path).header("user-agent", "kubelet/v1.30").body(());
    request.expect("a valid request").into_parts().0
}

fn begin(metrics: &Arc<Metrics>, access: AccessLog) -> Outcome {
    let client = IpAddr::from([127, 0, 0, 1]);
    let head = request_head("/api/v1/pods?limit=5&token=hunter2");
    Outcome::begin(&metrics.listener("a"), access, client, &head)
}

/// The labels `verb` and `code`, and the value, of each series of `jackstay_requests_total`.
fn recorded_requests(metrics: &Metrics) -> Vec<String> {
    let text = metrics.render();
    let lines = text.lines().filter(|line| line.starts_with("jackstay_requests_total"));
    lines.map(|line| line.rsplit_once("verb=").expect("a verb").1.to_owned()).collect()
}

/// The value of the only series of a metric, or `absent`.
fn metric_value(metrics: &Metrics, name: &str) -> String {
    let text = metrics.render();
    let line = text.lines().find(|line| line.starts_with(&format!("{name}{{")));
    line.map_or("absent", |line| line.rsplit_once(' ').expect("a value").1).to_owned()
}

#[test]
fn drop_of_complete_request_records_it_once() {
    let metrics = Metrics::new();
    let mut outcome = begin(&metrics, AccessLog::Off);
    assert_eq!(metric_value(&metrics, "jackstay_requests_in_flight"), "1");
    outcome.classified("list", false);
    outcome.code = Some(200);
    outcome.complete();
    drop(outcome);
    assert_eq!(recorded_requests(&metrics), [r#""list",code="200"} 1"#]);
    assert_eq!(metric_value(&metrics, "jackstay_requests_in_flight"), "0");
    assert_eq!(metric_value(&metrics, "jackstay_request_duration_seconds_count"), "1");
    assert_eq!(metric_value(&metrics, "jackstay_responses_cut_total"), "absent");
}

#[tokio::test(start_paused = true)]
async fn drop_in_cancelled_task_records_499() {
    let metrics = Metrics::new();
    let outcome = begin(&metrics, AccessLog::Off);
    let task = tokio::spawn(async move {
        let _outcome = outcome;
        std::future::pending::<()>().await;
    });
    tokio::task::yield_now().await;
    task.abort();
    assert!(task.await.expect_err("it was aborted").is_cancelled());
    assert_eq!(recorded_requests(&metrics), [r#""other",code="499"} 1"#]);
    assert_eq!(metric_value(&metrics, "jackstay_requests_in_flight"), "0");
}

#[test]
fn drop_in_panic_records_500() {
    let metrics = Metrics::new();
    let mut outcome = begin(&metrics, AccessLog::Off);
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(move || {
        outcome.classified("get", false);
        panic!("expected by this test");
    }));
    assert!(panicked.is_err());
    assert_eq!(recorded_requests(&metrics), [r#""get",code="500"} 1"#]);
}

#[test]
fn gauges_count_watches_and_tunnels_and_long_running_requests_have_no_duration() {
    let metrics = Metrics::new();
    let mut watch = begin(&metrics, AccessLog::Off);
    watch.classified("watch", true);
    watch.classified("watch", true);
    let mut tunnel = begin(&metrics, AccessLog::Off);
    tunnel.upgraded();
    tunnel.upgraded();
    assert_eq!(metric_value(&metrics, "jackstay_watches"), "1");
    assert_eq!(metric_value(&metrics, "jackstay_tunnels"), "1");
    assert_eq!(metric_value(&metrics, "jackstay_requests_in_flight"), "2");
    drop((watch, tunnel));
    assert_eq!(metric_value(&metrics, "jackstay_watches"), "0");
    assert_eq!(metric_value(&metrics, "jackstay_tunnels"), "0");
    assert_eq!(metric_value(&metrics, "jackstay_request_duration_seconds_count"), "absent");
}

#[test]
fn drop_records_code_cutting_side_and_log_line_for_every_end() {
    use Side::{Client, Jackstay, Upstream};
    // Input: code of the response head, completed, side that cut the response, long-running.
    // Expected: recorded code, side in `jackstay_responses_cut_total`, a line at `access: errors`.
    let table = [
        (Some(200), true, None, false, 200, None, false),
        (Some(404), true, None, false, 404, None, false),
        (Some(503), true, None, false, 503, None, true),
        (Some(200), true, Some(Upstream), false, 200, None, false),
        (Some(200), false, None, false, 200, Some(Client), true),
        (Some(200), false, None, true, 200, Some(Client), false),
        (Some(200), false, Some(Upstream), true, 200, Some(Upstream), true),
        (Some(200), false, Some(Jackstay), true, 200, Some(Jackstay), true),
        (None, false, None, false, 499, None, true),
        (None, false, Some(Client), true, 499, None, true),
        (None, false, Some(Upstream), false, 502, None, true),
        (None, false, Some(Jackstay), false, 503, None, true),
    ];
    for row in table {
        let (head_code, complete, cut_by, long_running, code, counted, logged) = row;
        let metrics = Metrics::new();
        let captured = Captured::default();
        captured.during(LogFormat::Text, || {
            let mut outcome = begin(&metrics, AccessLog::Errors);
            outcome.classified("get", long_running);
            outcome.code = head_code;
            if complete {
                outcome.complete();
            }
            if let Some(side) = cut_by {
                outcome.cut(side, "why");
                outcome.cut(Client, "later");
            }
        });
        assert_eq!(
            recorded_requests(&metrics),
            [format!("\"get\",code=\"{code}\"}} 1")],
            "{row:?}"
        );
        let text = metrics.render();
        let cuts: Vec<_> =
            text.lines().filter(|line| line.starts_with("jackstay_responses_cut_total")).collect();
        let expected: Vec<_> = counted
            .iter()
            .map(|side: &Side| {
                let side = side.as_str();
                format!("jackstay_responses_cut_total{{listener=\"a\",side=\"{side}\"}} 1")
            })
            .collect();
        assert_eq!(cuts, expected, "{row:?}");
        assert_eq!(captured.lines().len(), usize::from(logged), "{row:?}");
    }
}

#[test]
fn access_line_has_every_field_and_no_secret() {
    let metrics = Metrics::new();
    let captured = Captured::default();
    let endpoint = metrics.endpoint("u", "10.0.0.11:6443");
    let other = metrics.endpoint("u", "10.0.0.12:6443");
    captured.during(LogFormat::Json, || {
        let mut outcome = begin(&metrics, AccessLog::All);
        outcome.classified("list", false);
        outcome.class = Some(CredentialClass::Token);
        outcome.sent_to(other.label(), false);
        outcome.sent_to(other.label(), false);
        outcome.hedged = true;
        outcome.answered_by(endpoint.label(), true);
        outcome.code = Some(200);
        outcome.bytes += 1234;
        outcome.complete();
    });
    let lines = captured.lines();
    assert_eq!(lines.len(), 1);
    assert!(!lines[0].contains("hunter2"), "{}", lines[0]);
    let line: serde_json::Value = serde_json::from_str(&lines[0]).expect("JSON");
    for (key, expected) in [
        ("listener", serde_json::json!("a")),
        ("client", serde_json::json!("127.0.0.1")),
        ("method", serde_json::json!("GET")),
        ("path", serde_json::json!("/api/v1/pods?limit=5&token=***")),
        ("verb", serde_json::json!("list")),
        ("code", serde_json::json!(200)),
        ("bytes", serde_json::json!(1234)),
        ("endpoint", serde_json::json!("10.0.0.11:6443")),
        ("attempts", serde_json::json!(2)),
        ("reused", serde_json::json!(true)),
        ("hedged", serde_json::json!(true)),
        ("user", serde_json::json!("token")),
        ("user_agent", serde_json::json!("kubelet/v1.30")),
        ("message", serde_json::json!("request")),
    ] {
        assert_eq!(line[key], expected, "{key} in {line}");
    }
    assert!(line.get("cut_by").is_none() && line.get("resumes").is_none(), "{line}");
}

#[test]
fn access_line_shortens_long_strings_of_the_client() {
    let metrics = Metrics::new();
    let captured = Captured::default();
    let long = "M".repeat(60_000);
    let head = http::Request::builder()
        .method(long.as_str())
        .uri(format!("/{0}?{0}={0}", &long[..20_000]))
        .header("user-agent", &long)
        .body(())
        .expect("a valid request")
        .into_parts()
        .0;
    captured.during(LogFormat::Text, || {
        let client = IpAddr::from([127, 0, 0, 1]);
        let listener = metrics.listener("a");
        let mut outcome = Outcome::begin(&listener, AccessLog::Errors, client, &head);
        outcome.cut(Side::Client, format!("Connection names {long}"));
    });
    let lines = captured.lines();
    assert_eq!(lines.len(), 1);
    assert!(lines[0].len() < 2_500, "{} bytes: {:.500}", lines[0].len(), lines[0]);
    let method = format!("method=\"{}…\"", &long[..32]);
    assert!(lines[0].contains(&method), "{}", lines[0]);
}

#[tokio::test(start_paused = true)]
async fn access_log_limits_lines_for_clients_that_leave_and_counts_suppressed_ones() {
    let metrics = Metrics::new();
    let captured = Captured::default();
    // Each round ends two requests: one before and one after the response head.
    let abandon_requests = |access, rounds| {
        for _ in 0..rounds {
            drop(begin(&metrics, access));
            let mut cut = begin(&metrics, access);
            cut.code = Some(200);
        }
    };
    // The number of access lines, and the sum of the lines that they report as suppressed.
    let written_and_suppressed = |captured: &Captured| -> (usize, u64) {
        let lines = captured.lines();
        let count = |line: &String| line.split_once("suppressed=")?.1.parse::<u64>().ok();
        let written = lines.iter().filter(|line| line.contains(" request ")).count();
        (written, lines.iter().filter_map(count).sum())
    };
    captured.during(LogFormat::Text, || abandon_requests(AccessLog::Errors, 500));
    assert_eq!(written_and_suppressed(&captured), (10, 0));
    tokio::time::advance(Duration::from_secs(6)).await;
    captured.during(LogFormat::Text, || abandon_requests(AccessLog::Errors, 500));
    assert_eq!(
        written_and_suppressed(&captured),
        (20, 990),
        "the first line after the limit reports the suppressed ones"
    );
    tokio::time::advance(Duration::from_secs(6)).await;
    captured.during(LogFormat::Text, || metrics.upkeep());
    assert_eq!(
        written_and_suppressed(&captured),
        (20, 1_980),
        "upkeep reports the other suppressed lines"
    );
    let last = captured.lines().pop().expect("a line");
    assert!(last.contains(r#"access log lines suppressed listener="a""#), "{last}");

    let all = Captured::default();
    all.during(LogFormat::Text, || abandon_requests(AccessLog::All, 500));
    assert_eq!(written_and_suppressed(&all), (1_000, 0), "`access: all` has a larger limit");
}

#[tokio::test(start_paused = true)]
async fn log_of_all_requests_and_of_ended_watches_is_limited_by_source_except_for_identities() {
    let metrics = Metrics::new();
    for (source, class, requests, watches) in [
        (Source::User(1), Some(CredentialClass::Token), 1_000, 20),
        (Source::User(2), Some(CredentialClass::Anonymous), 1_000, 20),
        (Source::Address([127, 0, 0, 1].into()), None, 0, 0),
        (Source::User(1), Some(CredentialClass::Identity(0)), 1_200, 1_200),
    ] {
        let captured = Captured::default();
        let mut admitted = 0;
        captured.during(LogFormat::Text, || {
            for _ in 0..1_200 {
                let mut outcome = begin(&metrics, AccessLog::All);
                (outcome.source, outcome.class, outcome.code) = (source, class, Some(200));
                admitted += usize::from(outcome.admit_watch_line().is_some());
                outcome.complete();
            }
        });
        assert_eq!((captured.lines().len(), admitted), (requests, watches), "{source} {class:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn access_log_limits_error_lines_by_source_except_those_of_identities() {
    let metrics = Metrics::new();
    for (source, class, expected) in [
        (Source::User(1), Some(CredentialClass::Token), 100),
        (Source::User(2), Some(CredentialClass::Anonymous), 100),
        (Source::Address([127, 0, 0, 1].into()), None, 0),
        (Source::User(1), Some(CredentialClass::Identity(0)), 300),
    ] {
        let captured = Captured::default();
        captured.during(LogFormat::Text, || {
            for _ in 0..300 {
                let mut outcome = begin(&metrics, AccessLog::Errors);
                (outcome.source, outcome.class) = (source, class);
                outcome.own_error(503, "no_upstream", "no endpoint");
                outcome.complete();
            }
        });
        assert_eq!(captured.lines().len(), expected, "{source} {class:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn access_log_shows_401s_of_jackstay_itself_limited_by_source() {
    let metrics = Metrics::new();
    let captured = Captured::default();
    captured.during(LogFormat::Text, || {
        // The client of a 401 of the apiserver has a token that the apiserver knows best.
        let mut outcome = begin(&metrics, AccessLog::Errors);
        outcome.code = Some(401);
        outcome.complete();
        drop(outcome);
        for _ in 0..300 {
            let mut outcome = begin(&metrics, AccessLog::Errors);
            outcome.source = Source::User(1);
            outcome.own_error(401, "unauthorized", "the certificate of CN=n1 is not configured");
            outcome.complete();
        }
    });
    let lines = captured.lines();
    assert_eq!(lines.len(), 100, "{lines:?}");
    let reason = "reason=\"the certificate of CN=n1 is not configured\"";
    assert!(lines[0].contains("code=401") && lines[0].contains(reason), "{}", lines[0]);
    assert!(!lines[0].contains("hunter2"), "{}", lines[0]);
}

#[test]
fn access_lines_are_written_at_every_log_level() {
    let metrics = Metrics::new();
    let captured = Captured::default();
    let log = Log { level: Level::Error, format: LogFormat::Text, access: AccessLog::All };
    captured.with(&log, || {
        tracing::info!("suppressed by level `error`");
        begin(&metrics, AccessLog::All).code = Some(200);
    });
    let lines = captured.lines();
    assert_eq!(lines.len(), 1, "{lines:?}");
    assert!(lines[0].contains(r#"request listener="a" client=127.0.0.1"#), "{lines:?}");
}

/// Every response body contains an `Outcome`, including those of idle watches. The limit is a size class of the
/// allocator; the next one is 320.
#[test]
fn outcome_is_at_most_256_bytes() {
    assert!(size_of::<Outcome>() <= 256, "{}", size_of::<Outcome>());
}

#[allow(clippy::disallowed_methods)] // measures real time
#[test]
#[ignore = "a measurement: cargo test --release -- --ignored --nocapture cost_of_a_successful"]
fn cost_of_a_successful_request() {
    let started = std::time::Instant::now();
    let metrics = Metrics::new();
    println!("Metrics::new took {:?}", started.elapsed());
    let head = request_head("/api/v1/pods?limit=5");
    let listener = metrics.listener("a");
    let endpoint = metrics.endpoint("u", "e");
    for access in [AccessLog::Off, AccessLog::Errors] {
        let (rounds, mut spent) = (2_000_000_u32, Duration::ZERO);
        for _ in 0..20 {
            let round = std::time::Instant::now();
            for _ in 0..rounds / 20 {
                let client = IpAddr::from([127, 0, 0, 1]);
                let mut outcome = Outcome::begin(&listener, access, client, &head);
                outcome.classified("get", false);
                outcome.sent_to(endpoint.label(), true);
                outcome.code = Some(200);
                outcome.complete();
            }
            spent += round.elapsed();
            metrics.upkeep();
        }
        println!("{access:?}: {:?} per request", spent / rounds);
    }
}

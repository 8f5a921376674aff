//! Errors that jackstay itself returns are counted apart from those of the apiservers.

use crate::support::{CONFIGMAPS, Certs, TestCluster, refusing_address};
use http::Method;
use serde_json::Value;

/// Code, reason and count of each line.
fn lines(status: &Value) -> Vec<(Option<u64>, String, u64)> {
    let lines = status["listeners"][0]["own_errors"].as_array().expect("a list");
    let line = |line: &Value| {
        assert!(line["last"].as_str().is_some_and(|at| at.ends_with('Z')), "{line}");
        let reason = line["reason"].as_str().expect("a reason").to_owned();
        (line["code"].as_u64(), reason, line["count"].as_u64().expect("a count"))
    };
    lines.iter().map(line).collect()
}

#[tokio::test]
async fn own_errors_are_counted_when_no_endpoint_is_reachable() {
    let certs = Certs::new();
    let proxy = certs.start(certs.config(&[refusing_address(), refusing_address()]));
    let client = proxy.client().await;
    for _ in 0..3 {
        assert_eq!(client.get(CONFIGMAPS).await.unwrap().status, 503);
    }
    let odd =
        client.request(Method::GET, CONFIGMAPS, &[("x-remote-user", "a\tb")], "").await.unwrap();
    assert_eq!(odd.status, 503, "the header is stripped");
    let status = proxy.status().await;
    assert_eq!(lines(&status), [(Some(503), "no_upstream".into(), 4)]);
    let counted =
        r#"jackstay_own_errors_total{listener="apiserver",code="503",reason="no_upstream"} 4"#;
    let metrics = proxy.page("/metrics").await;
    assert!(metrics.lines().any(|line| line == counted), "{metrics}");
}

#[tokio::test]
async fn own_errors_do_not_include_errors_of_the_apiserver() {
    let cluster = TestCluster::new(1);
    let proxy = cluster.start().await;
    let client = proxy.client().await;
    assert_eq!(client.get(&format!("{CONFIGMAPS}/missing")).await.unwrap().status, 404);
    assert_eq!(lines(&proxy.status().await), []);
}

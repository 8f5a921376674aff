//! The counters of the errors that jackstay itself returns, which exclude errors of the apiservers.

use crate::support::{CONFIGMAPS, Certs, TestCluster, refusing_address};
use http::Method;
use serde_json::Value;

/// Code, reason and count of each entry of `own_errors` in `/status`.
fn own_errors(status: &Value) -> Vec<(Option<u64>, String, u64)> {
    let errors = status["listeners"][0]["own_errors"].as_array().expect("a list");
    let entry = |error: &Value| {
        assert!(error["last"].as_str().is_some_and(|time| time.ends_with('Z')), "{error}");
        let reason = error["reason"].as_str().expect("a reason").to_owned();
        (error["code"].as_u64(), reason, error["count"].as_u64().expect("a count"))
    };
    errors.iter().map(entry).collect()
}

#[tokio::test]
async fn own_errors_are_counted_when_no_endpoint_is_reachable() {
    let certs = Certs::new();
    let proxy = certs.start(certs.config(&[refusing_address(), refusing_address()]));
    let client = proxy.client().await;
    for _ in 0..3 {
        assert_eq!(client.get(CONFIGMAPS).await.unwrap().status, 503);
    }
    // jackstay removes this header, so its odd value does not lead to another error.
    let headers = [("x-remote-user", "a\tb")];
    let reply = client.request(Method::GET, CONFIGMAPS, &headers, "").await.unwrap();
    assert_eq!(reply.status, 503);
    let status = proxy.status().await;
    assert_eq!(own_errors(&status), [(Some(503), "no_upstream".into(), 4)]);
    let series =
        r#"jackstay_own_errors_total{listener="apiserver",code="503",reason="no_upstream"} 4"#;
    let metrics = proxy.page("/metrics").await;
    assert!(metrics.lines().any(|line| line == series), "{metrics}");
}

#[tokio::test]
async fn own_errors_do_not_include_errors_of_the_apiserver() {
    let cluster = TestCluster::new(1);
    let proxy = cluster.start().await;
    let client = proxy.client().await;
    assert_eq!(client.get(&format!("{CONFIGMAPS}/missing")).await.unwrap().status, 404);
    assert_eq!(own_errors(&proxy.status().await), []);
}

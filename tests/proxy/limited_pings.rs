//! Front ends that limit PINGs, as gRPC servers do: `GOAWAY too_many_pings`.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use crate::scripted_peer::setup_with;
use crate::support::wait::until_within;
use crate::support::{CONFIGMAPS, PATIENCE, soon};

/// Each complaint ends a connection, and makes the interval four times as long.
const INTERVAL: Duration = Duration::from_millis(100);

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn endpoint_that_limits_pings_gets_fewer_and_names_the_reason() {
    let (peers, proxy, client) = setup_with(1, |config| {
        config.upstreams[0].health.ping_interval = INTERVAL;
    })
    .await;
    peers.ping_limit.store(3, Relaxed);
    let limit = async || {
        let status = proxy.status().await;
        status["upstreams"][0]["endpoints"][0]["ping_limit_s"].as_f64().unwrap_or_default()
    };
    until_within(6 * PATIENCE, "PINGs are sent every 6.4 s", async || limit().await >= 6.4).await;
    // One for each connection that was open: that of requests, that of the prober.
    let complaints = peers.ping_complaints.load(Relaxed);
    assert!((3..=6).contains(&complaints), "{complaints}");
    let metric = "jackstay_endpoint_ping_limit_seconds";
    assert!(proxy.metric(metric).await >= 6.4);
    let events = proxy.status().await["events"].to_string();
    for words in [
        "a PING every 100ms",
        "a PING every 400ms",
        "GOAWAY ENHANCE_YOUR_CALM (too_many_pings)",
        "health.ping_interval",
    ] {
        assert!(events.contains(words), "{words}: {events}");
    }
    assert_eq!(soon("a response", client.get(CONFIGMAPS)).await.unwrap().status, 200);
}

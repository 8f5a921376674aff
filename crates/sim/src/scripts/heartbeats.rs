//! Heartbeats on an apiserver that is not healthy end while there is time for another attempt; other writes keep their
//! time.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use http::Method;
use jackstay_config::{HeartbeatResource, Mode};
use serde_json::json;
use tokio::time::sleep;

use super::objects::{CONFIG_MAPS, config_map};
use super::requests::{Reply, create, send};
use super::testbed::{Testbed, until};
use crate::faults::FaultKind;
use crate::peers::transport::Outgoing;

const LEASES: &str = "/apis/coordination.k8s.io/v1/namespaces/default/leases";
/// The time after which a heartbeat ends on an apiserver that is not healthy.
const WAIT: Duration = Duration::from_secs(4);

fn lease() -> serde_json::Value {
    json!({
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": { "name": "leader", "namespace": "default" },
        "spec": { "holderIdentity": "a" },
    })
}

fn expect_ended(reply: &Reply, reason: &str) {
    let message = reply.own_error(504);
    assert_eq!(reply.json()["reason"], "Timeout");
    assert!(message.contains("may or may not have been carried out"), "{message}");
    assert!(message.contains(reason), "{message}");
}

/// On an apiserver that hangs a heartbeat ends after 4 s, and another write waits.
pub async fn hanging(testbed: Rc<Testbed>) {
    let proxy = testbed.start_connected(|_| {}).await;
    let client = testbed.client(&proxy);
    let created = send(&client, Outgoing::json(Method::POST, LEASES, &lease())).await;
    assert_eq!(created.status, 201);
    testbed.set_faults(0, |faults| faults.hang = true);
    let has_ended = Cell::new(false);
    let other = async {
        let reply = create(&client, "other").await;
        has_ended.set(true);
        reply
    };
    let heartbeat = async {
        let beat = Outgoing::json(Method::PUT, format!("{LEASES}/leader"), &lease());
        let reply = send(&client, beat.audit_id("beat")).await;
        expect_ended(&reply, "no response for 4 s, and /readyz fails or is overdue");
        assert!(reply.took >= WAIT, "it ended after {:?}", reply.took);
        testbed.check(
            "a heartbeat ends after 4 s",
            reply.took.saturating_sub(WAIT),
            Duration::from_secs(1),
        );
        assert!(!has_ended.get(), "a write that is no heartbeat ended");
        let series = "jackstay_own_errors_total{listener=\"clients\",code=\"504\",reason=\"heartbeat_ended\"}";
        assert_eq!(proxy.metric(series), 1);
        testbed.set_faults(0, |faults| faults.hang = false);
    };
    let (other, ()) = tokio::join!(other, heartbeat);
    assert_eq!(other.status, 201);
    let sent = testbed.cluster().audit().count_id("beat");
    assert!(sent <= 1, "the heartbeat was sent {sent} times");
}

/// A heartbeat waits for longer than 4 s on a healthy apiserver, and ends when it becomes unhealthy.
pub async fn later(testbed: Rc<Testbed>) {
    let proxy = testbed.start_connected(|config| {
        config.upstreams[0].health.readyz.interval = Duration::from_secs(1);
        if let Mode::Terminate(mode) = &mut config.listeners[0].mode {
            mode.heartbeats = HeartbeatResource::parse("configmaps").into_iter().collect();
        }
    });
    let proxy = proxy.await;
    let client = testbed.client(&proxy);
    testbed.create("beat");
    // The server carries out the write and does not answer. A webhook may take as long.
    testbed.set_faults(0, |faults| faults.lose_next = 1);
    let has_ended = Cell::new(false);
    let heartbeat = async {
        let object = config_map("beat", "2");
        let beat = Outgoing::json(Method::PUT, format!("{CONFIG_MAPS}/beat"), &object);
        let reply = send(&client, beat.audit_id("beat")).await;
        has_ended.set(true);
        reply
    };
    let sent = || testbed.cluster().audit().count_id("beat");
    let fault = async {
        until("the write is carried out", || sent() == 1).await;
        sleep(WAIT.mul_f64(1.0 + fastrand::f64())).await;
        assert!(!has_ended.get(), "it ended on a healthy apiserver");
        testbed.begin(0, FaultKind::Unready);
    };
    let (reply, ()) = tokio::join!(heartbeat, fault);
    expect_ended(&reply, "/readyz fails");
    assert_eq!(sent(), 1);
    testbed.end(0, FaultKind::Unready);
}

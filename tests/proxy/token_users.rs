//! Listeners whose clients bring tokens and that have no identity: jackstay has no credential of its
//! own to ask `/readyz` with.

use crate::support::{MAPS, World, terminate, until};
use jackstay::config::Config;
use jackstay::demo::apiserver::identity::User;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, SystemTime};

const UNKNOWN: &str = "readiness unknown: set readyz.token_file";

/// As `jackstay kubeconfig` sets it up for a user with a token.
fn without_credential(world: &World) -> Config {
    let mut config = world.config();
    config.upstreams[0].health.readyz.cert = None;
    terminate(&mut config).identities.clear();
    config
}

fn questions(world: &World, server: &str) -> Vec<SystemTime> {
    let asked = world.cluster.audit().select(|r| r.server == server && r.path == "/readyz");
    asked.into_iter().map(|record| record.time).collect()
}

/// The apiserver ends each connection that an anonymous question came on.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn endpoint_is_ready_while_it_lives_when_readyz_has_no_credential() {
    let world = World::new(2);
    world.cluster.add_token("alice", User::new("alice", &[]));
    let proxy = world.certs.start(without_credential(&world));
    proxy.usable(2).await;
    // Each has answered an anonymous question, and the connection that it came on is gone.
    until("both have sent a connection away", async || {
        world.servers.iter().all(|server| {
            server.counters().goaways.load(Relaxed) == 1
                && server.counters().open.load(Relaxed) == 1
        })
    })
    .await;
    for endpoint in proxy.endpoints().await {
        assert_eq!(endpoint["state"], "ready", "{endpoint}");
        assert_eq!(
            (&endpoint["reason"], &endpoint["readiness"]),
            (&UNKNOWN.into(), &"unknown".into())
        );
        assert_eq!(endpoint["connections"].as_array().unwrap().len(), 1, "{endpoint}");
    }
    let client = proxy.client(&world.certs.nobody().token("alice")).await;
    assert_eq!(client.get(MAPS).await.unwrap().status, 200);
    let events = proxy.status().await["events"].as_array().unwrap().clone();
    let expected =
        |event: &serde_json::Value| event["kind"] == "endpoint" && event["to"] == "ready";
    assert!(events.iter().all(expected) && events.len() == 2, "only two became ready: {events:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn endpoint_is_degraded_when_an_anonymous_readyz_fails() {
    let world = World::new(2);
    world.servers[0].set_ready(false);
    let proxy = world.certs.start(without_credential(&world));
    let sick = world.servers[0].addr.to_string();
    until("one is degraded and one is ready", async || {
        proxy.endpoints().await.iter().all(|endpoint| {
            let degraded = endpoint["state"] == "degraded";
            (endpoint["address"] == *sick) == degraded && (degraded || endpoint["state"] == "ready")
        })
    })
    .await;
    for endpoint in proxy.endpoints().await.iter().filter(|e| e["address"] == *sick) {
        assert_eq!(endpoint["reason"], "/readyz answers 500: etcd");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn readyz_is_asked_with_a_token_as_soon_as_its_file_is_there() {
    let world = World::new(1);
    world.cluster.add_token("probe", User::new("probe", &[]));
    let mut config = without_credential(&world);
    let file = world.certs.path().join("probe-token");
    config.upstreams[0].health.readyz.token_file = Some(file.clone());
    let proxy = world.certs.start(config);
    proxy.usable(1).await;
    let reason = async || proxy.endpoints().await[0]["reason"].as_str().unwrap().to_owned();
    assert_eq!(reason().await, "readiness unknown: readyz.token_file cannot be read");
    std::fs::write(&file, "probe\n").unwrap();
    until("it is asked", async || reason().await == "/readyz is ok").await;
    assert_eq!(proxy.endpoints().await[0]["readiness"], "ok");
}

/// 5,000 nodes that ask an apiserver in trouble once a second each are a load that it can do without.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn questions_back_off_when_readyz_keeps_failing() {
    let world = World::new(1);
    world.servers[0].set_ready(false);
    let mut config = world.config();
    config.upstreams[0].health.readyz.interval = Duration::from_secs(60);
    let _proxy = world.certs.start(config);
    until("it was asked four times", async || questions(&world, "server-0").len() >= 4).await;
    let asked = questions(&world, "server-0");
    let gaps: Vec<_> = asked.windows(2).map(|two| two[1].duration_since(two[0]).unwrap()).collect();
    println!("asked after {gaps:?}");
    // 1 s, 2 s, 4 s, each within a fifth of it. A busy machine asks later, never sooner.
    for (gap, least) in gaps.iter().zip([780, 1_580, 3_180]) {
        assert!(*gap >= Duration::from_millis(least), "{gaps:?}");
    }
}

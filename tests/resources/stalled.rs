//! Clients that stop reading: other requests are as fast as without them, and the memory for them is bounded.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use http::Method;

use jackstay_apiserver::kinds::{CONFIG_MAPS, ObjectRef};
use serde_json::Value;

use crate::allocator::BYTES;
use crate::support::{CONFIGMAPS, TestCluster, config_map, soon};

/// All requests share one upstream connection.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn stalled_readers_do_not_slow_other_requests() {
    let _alone = crate::alone().await;
    let cluster = TestCluster::new(1);
    let proxy = cluster.start_with(|config| config.upstreams[0].connections.max = 1).await;
    for n in 0..20 {
        let mut object = config_map(&format!("m{n}"), "1");
        object["data"]["big"] = "x".repeat(10_000).into();
        cluster.state.create(&CONFIG_MAPS, "default", object, false).unwrap();
    }
    let lister = proxy.client().await;
    // The median of 100 lists: a pause of the machine delays only a few of them.
    let list_duration = async || {
        let mut durations = Vec::new();
        for _ in 0..100 {
            let start = Instant::now();
            let reply = soon("a list", lister.get(CONFIGMAPS)).await.unwrap();
            assert_eq!(reply.status, 200);
            durations.push(start.elapsed());
        }
        durations.sort_unstable();
        durations[durations.len() / 2]
    };
    list_duration().await; // warms up
    let alone = list_duration().await;
    // Watches and long downloads that the client never reads.
    let stalled_client = proxy.client().await;
    let mut stalled = Vec::new();
    // Of the whole process, including the servers and clients of the test.
    let memory = BYTES.load(Relaxed);
    for _ in 0..10 {
        for path in [&format!("{CONFIGMAPS}?watch=1"), "/bytes?size=1000000000"] {
            stalled.push(stalled_client.send(Method::GET, path, &[], "").await.unwrap());
        }
    }
    for round in 0..50 {
        for n in 0..20 {
            let name = &format!("m{n}");
            let object_ref = ObjectRef { kind: &CONFIG_MAPS, namespace: "default", name };
            let change = |current: &Value| {
                let mut changed = current.clone();
                changed["data"]["round"] = round.to_string().into();
                Ok(changed)
            };
            cluster.state.modify(object_ref, false, change).unwrap();
        }
    }
    // The fastest of three rounds, because other processes may slow one.
    let mut with_stalled = list_duration().await;
    for _ in 0..2 {
        with_stalled = with_stalled.min(list_duration().await);
    }
    let growth = (BYTES.load(Relaxed) - memory) >> 20;
    println!(
        "LIST: {alone:?} alone, {with_stalled:?} with 20 stalled readers; allocated memory grew by \
         {growth} MiB"
    );
    assert_eq!(proxy.connections("identity-0").await.len(), 1);
    assert!(with_stalled < alone * 5, "{alone:?} alone, {with_stalled:?} with stalled readers");
    // 20 streams × (256 KiB for the client + 256 KiB for the endpoint + the server's buffers), and the
    // servers' history of 1,000 changes of 10 KB each.
    assert!(growth < 100, "{growth} MiB");
    drop(stalled);
    assert_eq!(stalled_client.get(CONFIGMAPS).await.unwrap().status, 200);
}

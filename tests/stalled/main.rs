//! Clients that stop reading. The test has its own process, since it measures memory and the time
//! of other requests.

#![cfg(feature = "demo")]

#[path = "../support/mod.rs"]
mod support;

use std::time::Instant;

use http::Method;

use support::{CONFIGMAPS, TestCluster, config_map, soon};

/// Resident memory of this process, servers and clients of the test included.
fn resident() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
}

/// All requests use one upstream connection.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn stalled_readers_do_not_slow_other_requests() {
    let cluster = TestCluster::new(1);
    let proxy = cluster.start_with(|config| config.upstreams[0].connections.max = 1).await;
    let kind = &jackstay::demo::apiserver::kinds::CONFIG_MAPS;
    let big = |name: &str| {
        let mut object = config_map(name, "1");
        object["data"]["big"] = "x".repeat(10_000).into();
        object
    };
    for n in 0..20 {
        cluster.state.create(kind, "default", big(&format!("m{n}")), false).unwrap();
    }
    let lister = proxy.client().await;
    // The median, since a pause of the machine delays only a few of them.
    let lists = async || {
        let mut times = Vec::new();
        for _ in 0..100 {
            let start = Instant::now();
            let reply = soon("a list", lister.get(CONFIGMAPS)).await.unwrap();
            assert_eq!(reply.status, 200);
            times.push(start.elapsed());
        }
        times.sort_unstable();
        times[times.len() / 2]
    };
    lists().await;
    let alone = lists().await;
    // Watches and long downloads that are never read.
    let idler = proxy.client().await;
    let mut stalled = Vec::new();
    let memory = resident();
    for _ in 0..10 {
        for path in [&format!("{CONFIGMAPS}?watch=1"), "/bytes?size=1000000000"] {
            stalled.push(idler.send(Method::GET, path, &[], "").await.unwrap());
        }
    }
    for round in 0..50 {
        for n in 0..20 {
            let place = jackstay::demo::apiserver::kinds::ObjectRef {
                kind,
                namespace: "default",
                name: &format!("m{n}"),
            };
            let change = |now: &serde_json::Value| {
                let mut next = now.clone();
                next["data"]["round"] = round.to_string().into();
                Ok(next)
            };
            cluster.state.modify(place, false, change).unwrap();
        }
    }
    let beside = lists().await;
    let grown = resident().saturating_sub(memory) >> 20;
    println!(
        "a LIST alone {alone:?}, beside 20 stalled readers {beside:?}; {grown} MiB more resident"
    );
    assert_eq!(proxy.connections("identity-0").await.len(), 1);
    assert!(beside < alone * 5, "{alone:?} alone, {beside:?} beside");
    // 20 streams × (256 KiB here + 256 KiB there + the server's), and 20 MB of history.
    assert!(grown < 100, "{grown} MiB");
    drop(stalled);
    assert_eq!(idler.get(CONFIGMAPS).await.unwrap().status, 200);
}

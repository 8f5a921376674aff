//! The update path under everything at once: it is never stuck behind a drain, and no lock order,
//! no wait and no drop of a task brings it to a halt.
//!
//! The long forms (`JACKSTAY_LONG=1`) take minutes: 1,000 updates under a stuck drain, and a minute
//! of everything at once.

use crate::support::{MAPS, World, long, until};
use crate::traffic::{set, set_is};
use std::path::Path;
use std::time::{Duration, Instant};

fn write(path: &Path, lines: &[String]) {
    let new = path.with_extension("new");
    std::fs::write(&new, lines.join("\n")).unwrap();
    std::fs::rename(&new, path).unwrap();
}

/// A hundred watches that can neither be moved nor end hang on an endpoint that leaves.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn updates_are_made_while_a_drain_is_stuck() {
    let world = World::new(2);
    let addresses: Vec<_> = world.addresses().iter().map(ToString::to_string).collect();
    let path = world.certs.path().join("endpoints");
    write(&path, &addresses[..1]);
    let mut config = world.config();
    config.upstreams[0].endpoints.clear();
    config.upstreams[0].endpoints_file = Some(path.clone());
    let proxy = world.certs.start(config);
    proxy.ready(1).await;
    // Without a version and with something sent they are in their first phase: never resumed.
    let kind = &jackstay::demo::kinds::CONFIG_MAPS;
    world.cluster.create(kind, "default", crate::support::map("a", "1"), false).unwrap();
    let client = proxy.client(&world.certs.credentials()).await;
    let mut watches = Vec::new();
    for _ in 0..100 {
        let mut watch = client.watch(&format!("{MAPS}?watch=1")).await.unwrap();
        assert_eq!(watch.next().await.unwrap().unwrap()["type"], "ADDED");
        watches.push(watch);
    }
    write(&path, &addresses[1..]);
    set_is(&proxy, &addresses[1..]).await;

    let updates = if long() { 1000 } else { 12 };
    let mut slowest = Duration::ZERO;
    for update in 0..updates {
        let there = format!("127.2.0.{}:9", update % 200 + 1);
        let start = Instant::now();
        write(&path, &[addresses[1].clone(), there.clone()]);
        until("the update is made", async || {
            let set = set(&proxy).await;
            set.len() == 2 && set.contains(&there)
        })
        .await;
        slowest = slowest.max(start.elapsed());
    }
    // A second until the file is looked at belongs to the source, not to the update.
    println!(
        "{updates} updates, the slowest seen after {slowest:?} (promised 1.5 s, and 1 s to see it)"
    );
    assert!(slowest < Duration::from_secs(5), "{slowest:?}");
    let running = proxy.metric("jackstay_watches").await;
    assert!((99.5..100.5).contains(&running), "the drain is still stuck: {running}");
    world.cluster.create(kind, "default", crate::support::map("b", "1"), false).unwrap();
    for mut watch in watches {
        assert_eq!(watch.next().await.unwrap().unwrap()["type"], "ADDED", "and they still live");
    }
}

/// Reconcile, dial, eject, close-all, at once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn everything_at_once() {
    let world = World::new(3);
    let addresses: Vec<_> = world.addresses().iter().map(ToString::to_string).collect();
    let path = world.certs.path().join("endpoints");
    write(&path, &addresses);
    let mut config = world.config();
    config.workers = 2;
    config.upstreams[0].endpoints_file = Some(path.clone());
    config.state_dir = Some(world.certs.path().join("state"));
    let proxy = world.certs.start(config);
    proxy.ready(3).await;
    let time = Duration::from_secs(if long() { 60 } else { 5 });
    let mut clients = Vec::new();
    for _ in 0..4 {
        let client = proxy.client(&world.certs.credentials()).await;
        clients.push(tokio::spawn(async move {
            let (start, mut served) = (Instant::now(), 0);
            while start.elapsed() < time {
                // Some fail: servers are killed. None may hang.
                let reply = tokio::time::timeout(Duration::from_secs(10), client.get(MAPS)).await;
                let reply = reply.expect("no request hangs");
                served += usize::from(reply.is_ok_and(|reply| reply.status == 200));
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
            served
        }));
    }
    let (start, mut step) = (Instant::now(), 0_usize);
    while start.elapsed() < time {
        let server = &world.servers[step % 3];
        match step % 7 {
            0 => server.kill(),
            1 => world.servers[(step - 1) % 3].restart().unwrap(),
            2 => server.reset_connections(),
            3 => server.goaway(),
            4 => write(&path, &addresses[step % 3..]),
            5 => write(&path, &[format!("127.3.0.{}:9", step % 250 + 1), addresses[0].clone()]),
            _ => {
                proxy.status().await;
            }
        }
        step += 1;
        tokio::time::sleep(Duration::from_millis(30)).await;
    }
    for client in clients {
        let served = client.await.expect("no request hangs");
        assert!(served > 0);
    }
    for server in world.servers.iter().filter(|server| !server.is_running()) {
        server.restart().unwrap();
    }
    write(&path, &addresses);
    set_is(&proxy, &addresses).await;
    proxy.ready(3).await;
    println!("{step} disturbances in {:?}", start.elapsed());
    let ready = proxy.page("/readyz").await;
    assert!(ready.starts_with("HTTP/1.1 200") && !ready.contains("loop has not turned"), "{ready}");
}

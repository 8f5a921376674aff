//! A client beyond a limit is refused as documented, and others are served in time.

use std::future::pending;
use std::rc::Rc;
use std::time::{Duration, SystemTime};

use http::Method;
use jackstay_config::MemoryLimit;
use jackstay_core::admission::DEFAULT_LIMIT;
use jackstay_sys::clock;
use tokio::task::spawn_local;
use tokio::time::sleep;

use super::objects::{CONFIG_MAPS, config_map};
use super::requests::get;
use super::testbed::{Proxy, Testbed, all, until};
use crate::peers::transport::{Client, Outgoing};

/// The user of the clients that exceed a limit.
const FLOOD: u32 = 1_000;
/// Other users.
const OTHERS: [u32; 2] = [2_000, 3_000];
/// The promise for other clients, with their connects.
const SERVED_WITHIN: Duration = Duration::from_millis(50);

/// The promise for the first request with a token. The flood makes apiservers close the connections for unproven
/// tokens, and one connect follows each 200 ms (`core/pool/limits.rs`, `UNPROVEN_PACE`).
const NEW_TOKEN_WITHIN: Duration = Duration::from_millis(250);

/// New connections of a client with an identity and of one of another user are served in time.
async fn expect_served(testbed: &Testbed, proxy: &Proxy) {
    let identity = testbed.client(proxy);
    let other = testbed.user_client(proxy, "other", OTHERS[0]);
    for client in [identity, other] {
        let reply = get(&client, CONFIG_MAPS).await;
        assert_eq!(reply.status, 200, "beside a client that exceeds a limit");
        testbed.check("a read of another client", reply.took, SERVED_WITHIN);
    }
}

/// A single user without an identity may hold so many bytes: all such clients share three quarters of the limit, and a
/// user gets half of what the others leave (`core/admission/memory_budget.rs`).
const fn share_of_source(limit: usize) -> u64 {
    (limit / 4 * 3 / 2) as u64
}

/// The connections that were refused because their source has its share.
fn refused_of_source(proxy: &Proxy) -> u64 {
    let name = "jackstay_downstream_refused_total{listener=\"clients\",reason=";
    let by_source = proxy.metric(&format!("{name}\"source\""));
    assert_eq!(proxy.metric(name), by_source, "connections are refused for another reason");
    by_source
}

/// One user gets at most half of the connections, and keeps those that it has.
pub async fn connections(testbed: Rc<Testbed>) {
    const LIMIT: usize = 48;
    let proxy =
        testbed.start_connected(|config| config.listeners[0].limits_mut().max_connections = LIMIT);
    let proxy = proxy.await;
    let mut held = Vec::new();
    for _ in 0..LIMIT {
        let client = testbed.user_client(&proxy, "flood", FLOOD);
        let watch = Outgoing::get(testbed.watch_path());
        let response = client.open(client.next_request(), &watch).await;
        if let Ok(response) = response {
            assert_eq!(response.head.status, 200);
            held.push((client, response));
        }
    }
    // Half of those beside the reserve of 16.
    assert_eq!((held.len(), refused_of_source(&proxy)), (16, 32));
    expect_served(&testbed, &proxy).await;
    testbed.create("new");
    for (_, response) in &mut held {
        let event = response.chunk().await.expect("the watch has not ended");
        assert!(event.is_some(), "the watch has not ended");
    }
}

/// Connections of which nothing is read hold no more than their windows and buffers, however many events come.
pub async fn never_reads(testbed: Rc<Testbed>) {
    const LIMIT: usize = 64;
    const WINDOW: u32 = 1 << 10;
    // More than the buffers of a socket.
    const LARGE: usize = 100 << 10;
    for number in 0..10 {
        testbed.create_with(&format!("large-{number}"), &"x".repeat(LARGE));
    }
    let proxy =
        testbed.start_connected(|config| config.listeners[0].limits_mut().max_connections = LIMIT);
    let proxy = proxy.await;
    let other = testbed.user_client(&proxy, "other", OTHERS[0]);
    let watch = Outgoing::get(testbed.watch_path());
    let mut events = other.open(other.next_request(), &watch).await.expect("a watch");
    let (list, mut held) = (Outgoing::get(CONFIG_MAPS), Vec::new());
    for number in 0..LIMIT {
        // By turns, the windows of its streams close, and that of its socket.
        let is_narrow = number % 2 == 0;
        let client = if is_narrow {
            testbed.narrow_client(&proxy, ("flood", FLOOD), WINDOW)
        } else {
            testbed.user_client(&proxy, "flood", FLOOD)
        };
        let mut opened = Vec::new();
        for request in [&list, &watch] {
            let Ok(response) = client.open(client.next_request(), request).await else { break };
            assert_eq!(response.head.status, 200);
            opened.push(response);
        }
        if let Some(response) = opened.first().filter(|_| !is_narrow) {
            response.stop_reading();
        }
        if !opened.is_empty() {
            held.push((client, opened));
        }
    }
    // The other client has one of the 48 beside the reserve.
    assert_eq!((held.len(), refused_of_source(&proxy)), (24, 40));
    let used = || proxy.metric("jackstay_memory_budget_bytes");
    for number in 0..100 {
        let began = clock::now();
        testbed.create(&format!("new-{number}"));
        let event = events.chunk().await.expect("the watch has not ended");
        assert!(event.is_some(), "the watch has not ended");
        testbed.check("an event of another client", clock::elapsed(began), SERVED_WITHIN);
        if number % 10 == 0 {
            expect_served(&testbed, &proxy).await;
        }
        assert!(used() <= share_of_source(DEFAULT_LIMIT), "{} bytes", used());
        sleep(Duration::from_millis(300)).await;
    }
    assert!(used() > 1 << 20, "{} bytes", used());
    drop(held);
    until("the memory is free again", || used() < 1 << 20).await;
}

/// Uploads that do not go on fill the memory of their user: more of them are refused.
pub async fn memory(testbed: Rc<Testbed>) {
    const CLIENTS: usize = 24;
    const UPLOADS: usize = 40;
    const MEMORY: usize = 8 << 20;
    let limited =
        testbed.start_connected(|config| config.memory_limit = MemoryLimit::Bytes(MEMORY as u64));
    let proxy = limited.await;
    let refused = || proxy.metric("jackstay_shed_total{reason=\"stream_refused\"");
    let used = || proxy.metric("jackstay_memory_budget_bytes");
    let used_before = used();
    let mut uploads = Vec::new();
    for _ in 0..CLIENTS {
        let client = testbed.user_client(&proxy, "flood", FLOOD);
        uploads.extend((0..UPLOADS).map(|_| spawn_local(upload(client.clone()))));
    }
    until("an upload is refused", || refused() > 0).await;
    let held = used() - used_before;
    let share = share_of_source(MEMORY);
    assert!((share / 2..=share).contains(&held), "{held} bytes");
    for _ in 0..10 {
        expect_served(&testbed, &proxy).await;
        sleep(Duration::from_millis(100)).await;
    }
    for upload in &uploads {
        upload.abort();
    }
    until("the memory is free again", || used() < 1 << 20).await;
}

/// Begins an upload that does not go on.
async fn upload(client: Client) {
    let begin = config_map("large", "1").to_string().into_bytes();
    let outgoing = Outgoing::with_body(Method::POST, CONFIG_MAPS, begin.into());
    // A connection may be refused, too.
    let _ = client.send_unfinished(&outgoing, pending()).await;
}

/// A token that the apiservers do not accept any more is sent to them at the pace of such tokens, and does not delay
/// others.
pub async fn revoked_token(testbed: Rc<Testbed>) {
    const REQUESTS: u32 = 600;
    const INTERVAL: Duration = Duration::from_millis(5);
    let proxy = testbed.start_connected(|_| {}).await;
    let flood = testbed.user_client(&proxy, "flood", FLOOD);
    let known = testbed.user_client(&proxy, "known", OTHERS[0]);
    for client in [&flood, &known] {
        assert_eq!(get(client, CONFIG_MAPS).await.status, 200);
    }
    testbed.cluster().remove_token("flood");
    let began = testbed.date();
    let requests = all((0..REQUESTS).map(async |number| {
        sleep(INTERVAL * number).await;
        let status = get(&flood, CONFIG_MAPS).await.status;
        assert!(matches!(status, 401 | 429), "{status}");
    }));
    let others = async {
        for number in 0..50 {
            let reply = get(&known, CONFIG_MAPS).await;
            assert_eq!(reply.status, 200);
            testbed.check("a read with a valid token", reply.took, SERVED_WITHIN);
            if number % 10 == 5 {
                let new = testbed.user_client(&proxy, &format!("new-{number}"), OTHERS[1]);
                let reply = get(&new, CONFIG_MAPS).await;
                assert_eq!(reply.status, 200);
                testbed.check("a read with a new token", reply.took, NEW_TOKEN_WITHIN);
            }
            sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::join!(requests, others);
    let rejected = testbed.received(|record| record.status == Some(401));
    let within = |after: Duration| {
        let until: SystemTime = began + after;
        rejected.iter().filter(|record| record.time < until).count()
    };
    // 20 rejections in 10 s and those in progress meanwhile, then one in 50 ms, and one in 100 ms of a connection
    // without rejections (`core/admission/fair_queue.rs`). Each is asked of every apiserver, because all have just
    // started (`core/request/start_up.rs`).
    let (sent, requests) = (within(INTERVAL * REQUESTS), (20 + 32 + 90) * testbed.servers());
    assert!(sent <= requests, "{sent} requests with a rejected token within 3 s");
    assert!(sent >= 20, "{sent} requests have arrived");
}

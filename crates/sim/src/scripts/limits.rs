//! A client beyond a limit is refused as documented, and others are served in time.

use std::future::pending;
use std::rc::Rc;
use std::time::{Duration, SystemTime};

use http::Method;
use jackstay_config::MemoryLimit;
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
    let refused = (LIMIT - held.len()) as u64;
    assert!((LIMIT / 4..=LIMIT / 2).contains(&held.len()), "{} connections", held.len());
    let counted = proxy.metric("jackstay_downstream_refused_total");
    assert!(counted >= refused, "{counted} of {refused} refusals are counted");
    expect_served(&testbed, &proxy).await;
    testbed.create("new");
    for (_, response) in &mut held {
        let event = response.chunk().await.expect("the watch has not ended");
        assert!(event.is_some(), "the watch has not ended");
    }
}

/// Uploads that do not go on fill the memory of their user: more of them are refused.
pub async fn memory(testbed: Rc<Testbed>) {
    const CLIENTS: usize = 24;
    const UPLOADS: usize = 40;
    let proxy = testbed.start_connected(|config| config.memory_limit = MemoryLimit::Bytes(8 << 20));
    let proxy = proxy.await;
    let refused = || proxy.metric("jackstay_shed_total{reason=\"stream_refused\"");
    let mut uploads = Vec::new();
    for _ in 0..CLIENTS {
        let client = testbed.user_client(&proxy, "flood", FLOOD);
        uploads.extend((0..UPLOADS).map(|_| spawn_local(upload(client.clone()))));
    }
    until("an upload is refused", || refused() > 0).await;
    for _ in 0..10 {
        expect_served(&testbed, &proxy).await;
        sleep(Duration::from_millis(100)).await;
    }
    for upload in &uploads {
        upload.abort();
    }
    let used = || proxy.metric("jackstay_memory_budget_bytes");
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

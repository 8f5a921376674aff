//! Outages: every server is gone or silent, or one server is degraded or stopped.

use crate::scripted_peer::{Action, Peers, silent_listener};
use crate::support::figures::check_figure;
use crate::support::stopwatch::Stopwatch;
use crate::support::{
    CONFIGMAPS, Certs, TestCluster, config_map, join_all, pause, refusing_address, soon, until,
};
use http::Method;
use jackstay_apiserver::audit::Record;
use jackstay_apiserver::client::Client;
use jackstay_apiserver::faulty_relay::FaultyRelay;
use std::net::Ipv4Addr;
use std::time::{Duration, Instant};
use tokio::io::AsyncReadExt;
use tokio::net::TcpListener;

/// Asserts that requests other than watches get 503 within the promised time, with a Status and without
/// Retry-After. `fault` names the outage.
async fn expect_503(client: &Client, fault: &str) {
    let start = Instant::now();
    let requests = [
        (Method::GET, CONFIGMAPS.to_owned()),
        (Method::POST, CONFIGMAPS.to_owned()),
        (Method::DELETE, format!("{CONFIGMAPS}/a")),
        (Method::GET, "/api/v1/namespaces/default/pods/p/log".to_owned()),
    ];
    let all = requests.into_iter().map(|(method, path)| async move {
        let start = Stopwatch::start();
        let body = if method == Method::POST { "{}" } else { "" };
        let reply = client.request(method, &path, &[], body).await.unwrap();
        let took = start.elapsed();
        assert_eq!(reply.status, 503, "{path}: {:?}", reply.body);
        assert!(!reply.headers.contains_key("retry-after"), "{path}");
        let status = reply.json();
        assert_eq!(status["kind"], "Status", "{path}");
        assert!(status["message"].as_str().unwrap().contains("127.0.0.1"), "{status}");
        took
    });
    let durations = soon(fault, join_all(all)).await;
    println!("{fault}: all requests failed within {:?}", start.elapsed());
    let slowest = durations.into_iter().max().unwrap();
    check_figure(&format!("{fault}: slowest failure"), slowest, Duration::from_millis(1_500));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn requests_get_503_when_every_apiserver_refuses() {
    let certs = Certs::new();
    let proxy =
        certs.start(certs.config(&[refusing_address(), refusing_address(), refusing_address()]));
    let client = proxy.client().await;
    for _ in 0..3 {
        expect_503(&client, "every apiserver refuses").await;
    }
    let page = proxy.page("/readyz").await;
    assert!(page.starts_with("HTTP/1.1 503") || page.starts_with("HTTP/1.1 500"), "{page}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn requests_get_503_when_every_apiserver_is_silent() {
    let certs = Certs::new();
    let listeners = [silent_listener(), silent_listener()];
    let addresses = listeners.each_ref().map(|listener| listener.local_addr().unwrap());
    let proxy = certs.start(certs.config(&addresses));
    let client = proxy.client().await;
    expect_503(&client, "every apiserver is silent").await;
    expect_503(&client, "every apiserver is silent").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn requests_succeed_within_a_second_after_one_endpoint_returns() {
    let cluster = TestCluster::new(2);
    let proxy = cluster.start().await;
    let client = proxy.client().await;
    let token_client = proxy.client_with(&cluster.certs.anonymous().token("alice")).await;
    cluster.state.add_token("alice", jackstay_apiserver::identity::User::new("alice", &[]));
    assert_eq!(token_client.get(CONFIGMAPS).await.unwrap().status, 200);
    cluster.kill_all();
    expect_503(&client, "every apiserver is killed").await;
    // Meanwhile the backoff between connection attempts grows to its maximum.
    for _ in 0..10 {
        assert_eq!(client.get(CONFIGMAPS).await.unwrap().status, 503);
    }
    let start = Stopwatch::start();
    cluster.servers[1].restart().unwrap();
    for (client, credential) in [(&client, "a certificate"), (&token_client, "a token")] {
        let mut requests = 0;
        until("requests succeed", async || {
            requests += 1;
            client.get(CONFIGMAPS).await.unwrap().status == 200
        })
        .await;
        println!("{requests} requests with {credential}");
        let name = format!("requests with {credential} after the first endpoint returned");
        check_figure(&name, start.elapsed(), Duration::from_secs(1));
    }
}

/// Prober and admin endpoint run on the same thread.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn silent_probe_connection_does_not_block_the_admin_endpoint() {
    let cluster = TestCluster::new(2);
    let (relays, proxy) = cluster.start_behind_relays(|_| {}).await;
    relays[0].refuse_new(true);
    assert!(relays[0].drop_all_packets().unwrap() > 0);
    let suspected = async || {
        let page = soon("a response", proxy.page("/events")).await;
        page.contains("\"to\": \"suspect\"")
    };
    until("a connection is suspect", suspected).await;
    soon("the endpoint is ejected", proxy.wait_state(relays[0].addr, "ejected")).await;
    relays[0].clear_faults();
    soon("all endpoints are ready", proxy.wait_all("ready")).await;
}

/// A server of plain HTTP, such as etcd's, may close a connection that begins with TLS.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn endpoint_that_closes_in_the_tls_handshake_is_ejected_with_a_sentence() {
    let certs = Certs::new();
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let address = listener.local_addr().unwrap();
    let server = tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            // Unread bytes at the close would reset the connection.
            let _ = stream.read(&mut [0; 4096]).await;
        }
    });
    let proxy = certs.start(certs.config(&[address]));
    proxy.wait_state(address, "ejected").await;
    let reason = proxy.endpoint(address).await["reason"].as_str().unwrap().to_owned();
    let expected = "the server closed the connection in the TLS handshake: it may not speak TLS";
    assert!(reason.contains(expected), "{reason}");
    server.abort();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn degraded_endpoint_loses_its_watches_and_gets_no_requests() {
    let cluster = TestCluster::new(3);
    let proxy = cluster.start().await;
    let client = proxy.client().await;
    let mut watches = Vec::new();
    let path = cluster.watch_path();
    for _ in 0..12 {
        watches.push(client.watch(&path).await.unwrap());
    }
    let all = || (0..3).map(|at| cluster.watches(at)).sum::<u64>();
    until("all watches run", async || all() == 12).await;
    let degraded = (0..3).find(|&at| cluster.watches(at) > 0).unwrap();
    let before = cluster.watches(degraded);
    cluster.servers[degraded].set_faults(|faults| faults.unready = true);
    proxy.wait_state(cluster.servers[degraded].addr, "degraded").await;
    cluster.state.audit().clear();
    for n in 0..40 {
        assert_eq!(client.get(CONFIGMAPS).await.unwrap().status, 200);
        if n == 20 {
            assert_eq!(client.post(CONFIGMAPS, &config_map("a", "1")).await.unwrap().status, 201);
        }
    }
    let name = cluster.servers[degraded].name();
    let forwarded = |r: &Record| r.server == name && r.forwarded_for.is_some();
    let records = cluster.state.audit().select(forwarded);
    assert!(records.is_empty(), "new requests went to the degraded server: {records:?}");
    until("the watches have moved", async || cluster.watches(degraded) == 0).await;
    let moved = format!("{before} watches have moved, and all 12 run");
    until(&moved, async || all() == 12).await;
    for watch in &mut watches {
        let event = soon("an event", watch.next()).await.unwrap().unwrap();
        assert_eq!(event["object"]["metadata"]["name"], "a");
    }
    // Panic mode: every endpoint is degraded, so jackstay uses all of them.
    cluster.servers.iter().for_each(|server| server.set_faults(|faults| faults.unready = true));
    proxy.wait_all("degraded").await;
    for _ in 0..10 {
        assert_eq!(client.get(CONFIGMAPS).await.unwrap().status, 200, "panic mode");
    }
    cluster.servers.iter().for_each(|server| server.set_faults(|faults| faults.unready = false));
    proxy.wait_connected(3).await;
}

/// Existing and new flows fall silent, as behind a cut cable. A write that was sent fails when its connection is
/// dead. A read waits for another connection from the moment that its connection is suspect, so its wait is over
/// soon after the failure of the write.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn requests_end_when_all_flows_fall_silent() {
    let peers = Peers::start(1);
    let relay = FaultyRelay::start(peers.addresses[0]).unwrap();
    let proxy = peers.certs.start(peers.certs.config(&[relay.addr]));
    proxy.wait_connected(1).await;
    let client = proxy.client().await;
    // Both requests use the only connection. The write ends with it, and so shows when it was found dead.
    peers.set_actions(std::iter::repeat_n(Action::Hang, 8));
    let start = Stopwatch::start();
    let in_flight = async |method, body| {
        let reply = client.request(method, CONFIGMAPS, &[], body).await.unwrap();
        (reply.status.as_u16(), start.elapsed())
    };
    let interrupt = async {
        until("both requests are in flight", async || peers.requests().len() >= 2).await;
        relay.silence_new(true);
        assert!(relay.drop_all_packets().unwrap() > 0);
        start.elapsed()
    };
    let all = async {
        tokio::join!(in_flight(Method::GET, ""), in_flight(Method::POST, "{}"), interrupt)
    };
    let ((read, read_end), (write, write_end), interrupted) = soon("both requests end", all).await;
    println!("the read failed {:?} after the write", read_end.saturating_sub(write_end));
    let write_failed = write_end.saturating_sub(interrupted);
    check_figure(
        "all flows silent: a write in flight fails",
        write_failed,
        Duration::from_millis(2_500),
    );
    assert_eq!((read, write), (503, 502));
    assert!(read_end < write_end + Duration::from_secs(1), "the read began to wait too late");
    expect_503(&client, "all flows are silent").await;
}

/// The only connection is silent but not yet declared dead. A new write gets 503: if it were sent, its outcome
/// would be unknown when the connection ends.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn write_is_not_sent_on_a_connection_that_does_not_respond() {
    let peers = Peers::start(1);
    let relay = FaultyRelay::start(peers.addresses[0]).unwrap();
    let mut config = peers.certs.config(&[relay.addr]);
    // The connection stays suspect long enough for several writes.
    config.upstreams[0].health.dead_after = Duration::from_millis(4_500);
    let proxy = peers.certs.start(config);
    proxy.wait_connected(1).await;
    let client = proxy.client().await;
    peers.set_actions([Action::Hang]);
    let in_flight = async {
        let reply = client.post(CONFIGMAPS, &config_map("first", "1")).await.unwrap();
        assert_eq!(reply.status, 502, "the write ends with its connection");
        reply
    };
    let later_write = async {
        until("the first write is in flight", async || peers.requests().len() == 1).await;
        relay.silence_new(true);
        assert!(relay.drop_all_packets().unwrap() > 0);
        let mut writes = tokio::task::JoinSet::new();
        let start = Instant::now();
        // A write at each interval, because the first ones may come before the connection is suspect.
        loop {
            let client = proxy.client().await;
            writes.spawn(async move {
                let start = Instant::now();
                let reply = client.post(CONFIGMAPS, &config_map("later", "1")).await.unwrap();
                (start.elapsed(), reply)
            });
            let pause = pause(Duration::from_millis(100));
            tokio::select! {
                Some(write) = writes.join_next() => {
                    let (took, reply) = write.unwrap();
                    assert_eq!(reply.status, 503, "{:?}", reply.body);
                    println!("rejected after {took:?}, {:?} after the flows fell silent", start.elapsed());
                    return reply;
                }
                () = pause => {}
            }
        }
    };
    let rejection = async {
        tokio::select! {
            reply = later_write => reply,
            reply = in_flight => panic!("the later writes waited until the connection ended: {:?}", reply.body),
        }
    };
    // Boxed, since the future is large.
    let reply = Box::pin(soon("a response", rejection)).await;
    let message = reply.json()["message"].as_str().unwrap().to_owned();
    assert!(message.contains("does not answer: PING unanswered"), "{message}");
    assert_eq!(peers.requests().len(), 1);
}

/// SIGTERM during an outage ends a watch that waits for an endpoint.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn watch_without_an_endpoint_ends_cleanly_when_its_listener_drains() {
    let cluster = TestCluster::new(2);
    // Watches end within the first quarter of the drain timeout. At its end, open watches would be reset.
    let drain = Duration::from_secs(12);
    let proxy = cluster.start_with(|config| config.shutdown.drain_timeout = drain).await;
    let client = proxy.client().await;
    let mut watch = client.watch(&cluster.watch_path()).await.unwrap();
    assert_eq!(client.post(CONFIGMAPS, &config_map("a", "1")).await.unwrap().status, 201);
    soon("an event", watch.next()).await.unwrap().unwrap();
    cluster.kill_all();
    expect_503(&client, "every apiserver is killed").await;
    let start = Instant::now();
    proxy.running.drain();
    let end = soon("the end of the watch", watch.next()).await;
    assert!(end.unwrap().is_none(), "the watch has delivered another event");
    println!("a watch without an apiserver ended {:?} after the drain began", start.elapsed());
}

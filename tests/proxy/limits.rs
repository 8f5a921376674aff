//! Limits for clients, malformed requests, timeouts and drains: a client that breaks a rule gets an error, and
//! other clients are not affected.

use crate::scripted_peer::{Action, Reply, setup};
use crate::support::http2::{
    CANCEL, DATA, END_HEADERS, END_STREAM, GOAWAY, HEADERS, INITIAL_WINDOW_SIZE, PING,
    REFUSED_STREAM, RST_STREAM, SETTINGS, WINDOW_UPDATE, field_block, frame, read_until, settings,
};
use crate::support::{
    CONFIGMAPS, PATIENCE, TestCluster, config_map, join_all, pause, soon, terminate_mode, until,
};
use http::Method;
use jackstay_apiserver::client::Client;
use jackstay_config::Config;
use std::io;
use std::pin::Pin;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// A HEADERS frame; `end` sets `END_STREAM`.
fn request(id: u32, method: &str, path: &str, end: bool, headers: &[(&str, &str)]) -> Vec<u8> {
    let mut list =
        vec![(":method", method), (":scheme", "https"), (":authority", "a"), (":path", path)];
    list.extend(headers);
    frame(HEADERS, END_HEADERS | if end { END_STREAM } else { 0 }, id, &field_block(&list))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn request_with_headers_above_the_limit_gets_431() {
    let cluster = TestCluster::new(1);
    let proxy = cluster.start().await;
    let other_client = proxy.client().await;
    let value = "x".repeat(80 << 10);
    for http2 in [true, false] {
        let client = proxy.client_over(http2).await;
        let headers = [("x-big", value.as_str())];
        let reply = client.request(Method::GET, CONFIGMAPS, &headers, "");
        let reply = soon("a response", reply).await.unwrap();
        assert_eq!(reply.status, 431, "http2: {http2}");
        if http2 {
            assert_eq!(
                client.get(CONFIGMAPS).await.unwrap().status,
                200,
                "the connection stays open"
            );
        }
    }
    assert_eq!(other_client.get(CONFIGMAPS).await.unwrap().status, 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn streams_above_the_limit_get_refused_stream() {
    let cluster = TestCluster::new(1);
    let proxy =
        cluster.start_with(|config| terminate_mode(config).limits.requests.max_streams = 5).await;
    let mut stream = proxy.wire(&cluster.certs, "h2").await;
    let mut bytes = [PREFACE, &settings(&[])].concat();
    for n in 0..8 {
        bytes.extend(request(2 * n + 1, "GET", &format!("{CONFIGMAPS}?watch=1"), true, &[]));
    }
    stream.write_all(&bytes).await.unwrap();
    let mut refused = Vec::new();
    let all = read_until(&mut stream, |kind, id, payload| {
        assert_ne!(kind, GOAWAY, "jackstay closes the connection");
        if kind == RST_STREAM {
            assert_eq!(payload, REFUSED_STREAM.to_be_bytes());
            refused.push(id);
        }
        refused.len() == 3
    });
    soon("three refusals", all).await.unwrap();
    assert_eq!(refused, [11, 13, 15]);
    until("five watches run", async || cluster.watches(0) == 5).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn request_whose_body_contradicts_content_length_is_reset() {
    let cluster = TestCluster::new(1);
    let proxy = cluster.start().await;
    let object = config_map("too-long", "1").to_string();
    for declared in [object.len() - 5, object.len() + 5] {
        let mut stream = proxy.wire(&cluster.certs, "h2").await;
        let length = declared.to_string();
        let headers = [("content-type", "application/json"), ("content-length", length.as_str())];
        let bytes = [
            PREFACE.to_vec(),
            settings(&[]),
            request(1, "POST", CONFIGMAPS, false, &headers),
            frame(DATA, END_STREAM, 1, object.as_bytes()),
            request(3, "GET", CONFIGMAPS, true, &[]),
        ]
        .concat();
        stream.write_all(&bytes).await.unwrap();
        let reset = read_until(&mut stream, |kind, id, _| {
            assert_ne!(kind, GOAWAY, "jackstay closes the connection");
            kind == RST_STREAM && id == 1
        });
        soon("a stream error", reset)
            .await
            .unwrap_or_else(|| panic!("content-length {declared}: the connection was closed"));
    }
    let client = proxy.client().await;
    let reply = client.get(&format!("{CONFIGMAPS}/too-long")).await.unwrap();
    assert_eq!(reply.status, 404, "the object was created");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn malformed_request_ends_only_its_own_connection() {
    let cluster = TestCluster::new(1);
    let proxy = cluster.start().await;
    let other_client = proxy.client().await;
    let mut watch = other_client.watch(&format!("{CONFIGMAPS}?watch=1")).await.unwrap();
    for garbage in
        [&b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"[..], &[0; 4096], &[0xff; 4096], b"\x16\x03"]
    {
        let mut stream = TcpStream::connect(proxy.addr).await.unwrap();
        // The connection may be closed before everything is written.
        let _ = stream.write_all(garbage).await;
        let _ = stream.shutdown().await;
        let mut rest = Vec::new();
        let _ = soon("the end of the connection", stream.read_to_end(&mut rest)).await;
        assert!(rest.len() < 100, "jackstay sent more than a TLS alert");
    }
    for garbage in
        [&b"longer than a connection preface, but not a preface at all\r\n\r\n"[..], PREFACE]
    {
        let mut stream = proxy.wire(&cluster.certs, "h2").await;
        let bytes = [garbage, &frame(DATA, 0, 0, b"x"), &frame(SETTINGS, 0, 1, b"x")].concat();
        let _ = stream.write_all(&bytes).await;
        let end = read_until(&mut stream, |_, _, _| false);
        assert!(soon("the end of the connection", end).await.is_none());
    }
    for garbage in [
        "GET http://elsewhere/ HTTP/1.1\r\nHost: a\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        "CONNECT a:443 HTTP/1.1\r\nHost: a\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: a\r\n folded: yes\r\n\r\n",
        "GET / HTTP/1.1\r\n\r\n",
        "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1, 2\r\n\r\nx",
        "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        "\0\r\n\r\n",
    ] {
        let mut stream = proxy.wire(&cluster.certs, "http/1.1").await;
        stream.write_all(garbage.as_bytes()).await.unwrap();
        let mut response = vec![0; 4096];
        let size = soon(garbage, stream.read(&mut response)).await.unwrap_or(0);
        let response = String::from_utf8_lossy(&response[..size]);
        assert!(
            response.is_empty() || response.starts_with("HTTP/1.1 4"),
            "{garbage:?}: {response}"
        );
    }
    assert_eq!(other_client.get(CONFIGMAPS).await.unwrap().status, 200);
    other_client.post(CONFIGMAPS, &config_map("a", "1")).await.unwrap();
    assert!(soon("an event", watch.next()).await.unwrap().is_some());
}

/// kube-apiserver sends the same response to any plain HTTP request (`conn.serve` of Go's `net/http`).
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn plain_http_on_a_tls_port_gets_400() {
    const RESPONSE: &str =
        "HTTP/1.0 400 Bad Request\r\n\r\nClient sent an HTTP request to an HTTPS server.\n";
    let cluster = TestCluster::new(1);
    let proxy = cluster.start().await;
    let large = format!("POST / HTTP/1.1\r\nHost: a\r\n\r\n{}", "x".repeat(1 << 20));
    for request in [
        "GET / HTTP/1.1\r\nHost: a\r\n\r\n",
        "HEAD / HTTP/1.0\r\n\r\n",
        "PATCH /api HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{}",
        "OPTIONS * HTTP/1.1\r\n\r\n",
        large.as_str(),
    ] {
        let mut stream = TcpStream::connect(proxy.addr).await.unwrap();
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut response = String::new();
        let name = &request[..request.len().min(40)];
        soon(name, stream.read_to_string(&mut response)).await.unwrap();
        assert_eq!(response, RESPONSE, "{name}");
    }
    let refused = "jackstay_downstream_refused_total{listener=\"apiserver\",reason=\"handshake\"}";
    until("the refusals are counted", async || proxy.metric(refused).await > 4.5).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn response_without_a_body_keeps_the_client_connection_open() {
    let (peers, proxy, http2) = setup(1).await;
    let http1 = proxy.client_over(false).await;
    let without_body = |status: &'static str, length: Option<&'static str>| {
        Action::raw(move |id| {
            let mut list = vec![(":status", status), ("content-type", "application/json")];
            list.extend(length.map(|length| ("content-length", length)));
            frame(HEADERS, END_HEADERS | END_STREAM, id, &field_block(&list))
        })
    };
    for _ in 0..3 {
        for client in [&http1, &http2] {
            peers.set_actions([without_body("204", None)]);
            let reply =
                soon("204", client.request(Method::DELETE, CONFIGMAPS, &[], "")).await.unwrap();
            assert_eq!((reply.status.as_u16(), reply.body.len()), (204, 0));
            peers.set_actions([without_body("304", None)]);
            assert_eq!(soon("304", client.get(CONFIGMAPS)).await.unwrap().status, 304);
            peers.set_actions([without_body("200", Some("1234"))]);
            let reply = soon("HEAD", client.request(Method::HEAD, "/version", &[], "")).await;
            let reply = reply.unwrap();
            assert_eq!((reply.status.as_u16(), reply.body.len()), (200, 0));
            assert_eq!(reply.headers["content-length"], "1234");
            peers.set_actions([Action::Answer(Reply::ok("{}"))]);
            assert_eq!(soon("GET", client.get(CONFIGMAPS)).await.unwrap().body, "{}");
        }
    }
    assert!(!http1.is_closed() && !http2.is_closed(), "a connection was closed");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn response_trailers_reach_the_client() {
    let (peers, _proxy, http2) = setup(1).await;
    let trailers = Action::partial(Reply::ok("{}"), |id| {
        frame(HEADERS, END_HEADERS | END_STREAM, id, &field_block(&[("x-checksum", "abc")]))
    });
    peers.set_actions([trailers]);
    let response = http2.send(Method::GET, CONFIGMAPS, &[], "").await.unwrap();
    let mut body = response.into_body();
    let mut found = None;
    while let Some(frame) = soon("a frame", next_frame(&mut body)).await {
        if let Ok(trailers) = frame.unwrap().into_trailers() {
            found = Some(trailers["x-checksum"].clone());
        }
    }
    assert_eq!(found.unwrap(), "abc");
}

async fn next_frame(
    body: &mut hyper::body::Incoming,
) -> Option<Result<http_body::Frame<bytes::Bytes>, hyper::Error>> {
    use http_body::Body;
    std::future::poll_fn(|cx| Pin::new(&mut *body).poll_frame(cx)).await
}

/// A drain, as after SIGTERM, also refuses new connections.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn drain_finishes_requests_and_ends_watches_cleanly() {
    let cluster = TestCluster::new(2);
    // The timeout is longer than the limit of each wait below, so it cannot be what ends requests and watches.
    let proxy = cluster.start_with(|config| config.shutdown.drain_timeout = 2 * PATIENCE).await;
    let clients = join_all([true, true, false].map(|http2| proxy.client_over(http2))).await;
    let watcher = proxy.client().await;
    let mut watch = watcher.watch(&cluster.watch_path()).await.unwrap();
    clients[0].post(CONFIGMAPS, &config_map("a", "1")).await.unwrap();
    soon("an event", watch.next()).await.unwrap().unwrap();
    cluster
        .servers
        .iter()
        .for_each(|server| server.set_faults(|faults| faults.delay = Duration::from_millis(700)));
    cluster.state.audit().clear();
    let running: Vec<_> = clients
        .into_iter()
        .enumerate()
        .map(|(n, client)| {
            tokio::spawn(async move {
                client.post(CONFIGMAPS, &config_map(&format!("d{n}"), "1")).await
            })
        })
        .collect();
    let running_writes = || cluster.state.audit().select(|r| r.verb == "create").len();
    until("three writes run", async || running_writes() == 3).await;
    let addr = proxy.addr;
    let start = Instant::now();
    proxy.running.drain();
    let stopped = tokio::task::spawn_blocking(move || proxy.running.stop());
    until("new connections are refused", async || {
        let refused = TcpStream::connect(addr).await;
        refused.is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
    })
    .await;
    for request in running {
        assert_eq!(soon("a response", request).await.unwrap().unwrap().status, 201);
    }
    // Events may still arrive before the clean end.
    while soon("the end of the watch", watch.next()).await.unwrap().is_some() {}
    drop(watcher);
    assert!(soon("the end of jackstay", stopped).await.unwrap(), "a worker panicked");
    println!("drained in {:?}", start.elapsed());
}

/// Its client has connected before the drain and sends its request a moment later, as one does whose connection was in
/// the accept queue.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn drain_serves_the_first_request_of_an_http1_connection() {
    let cluster = TestCluster::new(1);
    let proxy = cluster.start_with(|config| config.shutdown.drain_timeout = 2 * PATIENCE).await;
    let get = format!("GET {CONFIGMAPS} HTTP/1.1\r\nHost: a\r\n\r\n");
    let connect = async || proxy.wire(&cluster.certs, "http/1.1").await;
    let mut silent = connect().await;
    // Enough for each worker to have some of both.
    let (mut fresh, mut used) = (Vec::new(), Vec::new());
    for _ in 0..8 {
        fresh.push(connect().await);
        let mut stream = connect().await;
        stream.write_all(get.as_bytes()).await.unwrap();
        soon("a response", stream.read_exact(&mut [0])).await.unwrap();
        used.push(stream);
    }
    proxy.running.drain();
    let stopped = tokio::task::spawn_blocking(move || proxy.running.stop());
    // Then the workers have told every connection to end.
    for mut stream in used {
        soon("the end of a used connection", stream.read_to_end(&mut Vec::new())).await.unwrap();
    }
    for stream in &mut fresh {
        stream.write_all(get.as_bytes()).await.unwrap();
    }
    for mut stream in fresh {
        let mut answer = String::new();
        soon("an answer", stream.read_to_string(&mut answer)).await.unwrap();
        assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
        assert!(answer.contains("\r\nconnection: close\r\n"), "{answer}");
    }
    let mut nothing = Vec::new();
    let _ = soon("the end of the silent connection", silent.read_to_end(&mut nothing)).await;
    assert_eq!(nothing, b"");
    assert!(soon("the end of jackstay", stopped).await.unwrap(), "a worker panicked");
}

/// A connection that has carried a request may stay idle, as that of a kubelet does.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn connection_without_a_request_is_closed_at_the_header_timeout() {
    let cluster = TestCluster::new(1);
    // Long enough for a handshake on a slow machine.
    let limit = Duration::from_secs(2);
    let proxy = cluster
        .start_with(|config| {
            terminate_mode(config).limits.requests.header_timeout = limit;
            config.listeners[0].limits_mut().handshake_timeout = limit;
        })
        .await;
    let kubelet = proxy.client().await;
    assert_eq!(kubelet.get(CONFIGMAPS).await.unwrap().status, 200);
    let refused = async || {
        proxy
            .metric("jackstay_downstream_refused_total{listener=\"apiserver\",reason=\"timeout\"")
            .await
    };
    let before = refused().await;

    let without_handshake = async {
        let mut stream = TcpStream::connect(proxy.addr).await.unwrap();
        let mut rest = Vec::new();
        let _ = soon("the end of the connection", stream.read_to_end(&mut rest)).await;
        assert!(rest.is_empty());
    };
    let head = request(1, "GET", CONFIGMAPS, true, &[]);
    let half_head = frame(HEADERS, END_STREAM, 1, &head[9..20]);
    let incomplete = [
        ("half an HTTP/1.1 head", "http/1.1", b"GET / HTTP/1.1\r\nHost:".to_vec()),
        ("no preface", "h2", Vec::new()),
        ("a preface", "h2", [PREFACE, &settings(&[])].concat()),
        ("half a header block", "h2", [PREFACE, &settings(&[]), &half_head].concat()),
    ];
    let incomplete = incomplete.map(async |(sent, alpn, bytes)| {
        let mut stream = proxy.wire(&cluster.certs, alpn).await;
        stream.write_all(&bytes).await.unwrap();
        let mut rest = Vec::new();
        let _ = soon(sent, stream.read_to_end(&mut rest)).await;
    });
    tokio::join!(without_handshake, join_all(incomplete));
    // hyper closes the HTTP/1.1 connection, which jackstay therefore does not count. The limit of frames closes the one
    // with half a header block.
    assert!(refused().await >= before + 3.0, "{} {before}", refused().await);
    let blocks =
        "jackstay_downstream_frame_limit_total{listener=\"apiserver\",frame=\"header_block\"";
    assert!(proxy.metric(blocks).await >= 1.0);
    assert!(!kubelet.is_closed(), "the idle connection was closed");
    assert_eq!(soon("a response", kubelet.get(CONFIGMAPS)).await.unwrap().status, 200);
    assert!(!kubelet.is_closed(), "the connection was closed after its second request");
}

/// Clients keep a connection as long as kube-apiserver does, which is longer than its time for a head.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn idle_http1_connection_outlasts_the_header_timeout_until_a_head_begins() {
    let cluster = TestCluster::new(1);
    let limit = Duration::from_secs(1);
    let proxy = cluster
        .start_with(|config| terminate_mode(config).limits.requests.header_timeout = limit)
        .await;
    let mut stream = proxy.wire(&cluster.certs, "http/1.1").await;
    for idle in [limit * 2, Duration::ZERO] {
        stream.write_all(b"GET /version HTTP/1.1\r\nHost: a\r\n\r\n").await.unwrap();
        let mut response = Vec::new();
        while !response.ends_with(b"}") {
            let read = soon("a response", stream.read_buf(&mut response)).await.unwrap();
            assert!(read > 0, "closed after {}", String::from_utf8_lossy(&response));
        }
        assert!(response.starts_with(b"HTTP/1.1 200 "));
        pause(idle).await;
    }
    stream.write_all(b"G").await.unwrap();
    let begun = Instant::now();
    let mut rest = Vec::new();
    let _ = soon("the end of the connection", stream.read_to_end(&mut rest)).await;
    assert!(rest.is_empty() && begun.elapsed() >= limit / 2, "{:?}", begun.elapsed());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn connection_without_a_request_stays_open_while_the_client_sends_pings() {
    let cluster = TestCluster::new(1);
    // Longer than the test ever needs from one PING to the next.
    let limit = Duration::from_secs(3);
    let proxy = cluster
        .start_with(|config| terminate_mode(config).limits.requests.header_timeout = limit)
        .await;
    let mut stream = proxy.wire(&cluster.certs, "h2").await;
    stream.write_all(&[PREFACE, &settings(&[])].concat()).await.unwrap();
    let start = Instant::now();
    while start.elapsed() < limit * 2 {
        stream.write_all(&frame(PING, 0, 0, b"opaque00")).await.unwrap();
        stream.flush().await.unwrap();
        let pong = read_until(&mut stream, |kind, _, payload| {
            assert_ne!(kind, GOAWAY, "closed after {:?}", start.elapsed());
            kind == PING && payload == b"opaque00"
        });
        assert!(soon("a PONG", pong).await.is_some(), "closed after {:?}", start.elapsed());
        pause(Duration::from_millis(20)).await;
    }
    stream.write_all(&request(1, "GET", CONFIGMAPS, true, &[])).await.unwrap();
    let response = read_until(&mut stream, |kind, id, _| kind == HEADERS && id == 1);
    assert!(soon("a response", response).await.is_some());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn connection_above_the_limit_is_refused_until_another_one_closes() {
    let cluster = TestCluster::new(1);
    let proxy =
        cluster.start_with(|config| config.listeners[0].limits_mut().max_connections = 2).await;
    let credentials = cluster.certs.credentials();
    let one = proxy.client_with(&credentials).await;
    let two = proxy.client_with(&credentials).await;
    assert!(soon("a refusal", Client::connect(proxy.addr, &credentials)).await.is_err());
    assert!(proxy.metric("jackstay_downstream_refused_total").await >= 1.0);
    assert_eq!(one.get(CONFIGMAPS).await.unwrap().status, 200);
    assert_eq!(two.get(CONFIGMAPS).await.unwrap().status, 200);
    drop(one);
    until("another connection is accepted", async || {
        Client::connect(proxy.addr, &credentials).await.is_ok()
    })
    .await;
}

fn short_stall_timeout(config: &mut Config) {
    terminate_mode(config).limits.requests.stall_timeout = Duration::from_millis(500);
}

/// Its request ends too.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn client_that_reads_nothing_is_disconnected_at_the_stall_timeout() {
    let cluster = TestCluster::new(1);
    let proxy = cluster.start_with(short_stall_timeout).await;
    let mut stream = proxy.wire(&cluster.certs, "http/1.1").await;
    // The response is larger than all buffers on the path together.
    let request = b"GET /bytes?size=100000000 HTTP/1.1\r\nHost: a\r\n\r\n";
    stream.write_all(request).await.unwrap();
    let open = "jackstay_downstream_connections";
    let requests = || cluster.state.audit().select(|r| r.path.starts_with("/bytes"));
    until("the request is open", async || !requests().is_empty()).await;
    until("the client is disconnected", async || proxy.metric(open).await < 1.0).await;
    assert!(proxy.metric("jackstay_requests_in_flight").await < 1.0);
}

/// The client reads the connection but opens no flow-control window for one of its watches.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn stream_without_a_window_is_reset_at_the_stall_timeout_and_others_continue() {
    let cluster = TestCluster::new(1);
    let proxy = cluster.start_with(short_stall_timeout).await;
    let mut stream = proxy.wire(&cluster.certs, "h2").await;
    let path = cluster.watch_path();
    let window = |id: u32| frame(WINDOW_UPDATE, 0, id, &(1u32 << 20).to_be_bytes());
    let bytes = [
        PREFACE.to_vec(),
        settings(&[(INITIAL_WINDOW_SIZE, 0)]),
        window(0),
        request(1, "GET", &path, true, &[]),
        request(3, "GET", &path, true, &[]),
        window(3),
        // This stream has no window either, but no event matches the selector of its watch.
        request(5, "GET", &format!("{path}&labelSelector=v%3Dnone"), true, &[]),
    ]
    .concat();
    stream.write_all(&bytes).await.unwrap();
    let watches = || cluster.watches(0);
    until("three watches run", async || watches() == 3).await;
    cluster.create_config_map("m0");
    // The event on stream 3 may arrive before or after the reset of stream 1.
    let (mut events, mut is_reset) = (0, false);
    let reset = read_until(&mut stream, |kind, id, payload| {
        assert_ne!(kind, GOAWAY, "jackstay closes the connection");
        events += usize::from(kind == DATA && id == 3 && !payload.is_empty());
        if kind == RST_STREAM {
            assert_eq!((id, payload), (1, &CANCEL.to_be_bytes()[..]));
            is_reset = true;
        }
        is_reset && events > 0
    });
    soon("a reset and an event", reset).await.unwrap();
    until("the reset watch has ended upstream", async || watches() == 2).await;
    assert_eq!(events, 1);
    cluster.create_config_map("m1");
    let second_event = read_until(&mut stream, |kind, id, _| {
        assert_ne!(kind, RST_STREAM);
        kind == DATA && id == 3
    });
    soon("another event", second_event).await.unwrap();
    assert_eq!(watches(), 2);
}

/// h2 counts the streams that it resets because of errors of the client. Too many of them end the
/// connection with `ENHANCE_YOUR_CALM`.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn endless_stream_errors_end_the_connection() {
    let cluster = TestCluster::new(1);
    let proxy = cluster.start().await;
    let other_client = proxy.client().await;
    let mut stream = proxy.wire(&cluster.certs, "h2").await;
    let mut bytes = [PREFACE, &settings(&[])].concat();
    for n in 0..1_200 {
        bytes.extend(request(2 * n + 1, "GET", CONFIGMAPS, true, &[("connection", "close")]));
    }
    // The connection may be closed before everything is written.
    let _ = stream.write_all(&bytes).await;
    let mut resets = 0;
    let goaway = read_until(&mut stream, |kind, _, payload| {
        resets += usize::from(kind == RST_STREAM);
        kind == GOAWAY && payload[4..8] == 11u32.to_be_bytes()
    });
    // The GOAWAY may be lost, because the kernel resets a connection that is closed with unread data.
    let received = soon("ENHANCE_YOUR_CALM, or the end", goaway).await;
    println!("{resets} resets, then the end; GOAWAY received: {}", received.is_some());
    assert!(resets <= 1_024, "{resets}");
    assert_eq!(other_client.get(CONFIGMAPS).await.unwrap().status, 200);
}

//! Limits, malformed requests, and the end of the program: whoever breaks a rule is told so, and
//! nobody else notices.

use crate::hostile::{before, join_all};
use crate::peer::{
    Act, DATA, END_HEADERS, END_STREAM, GOAWAY, HEADERS, INITIAL_WINDOW_SIZE, PING, Peers,
    RST_STREAM, Reply, SETTINGS, WINDOW_UPDATE, fields, frame, settings,
};
use crate::support::wire::{self, Wire};
use crate::support::{Certs, MAPS, PATIENCE, Proxy, World, map, pass, soon, terminate, until};
use http::Method;
use jackstay::demo::client::Client;
use std::io;
use std::pin::Pin;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// Reads frames until one is wanted; its flags and payload. `None` at the end of the connection.
async fn read_until(
    stream: &mut Wire,
    mut wanted: impl FnMut(u8, u32, &[u8]) -> bool,
) -> Option<Vec<u8>> {
    loop {
        let mut head = [0; 9];
        stream.read_exact(&mut head).await.ok()?;
        let length = usize::from(head[0]) << 16 | usize::from(head[1]) << 8 | usize::from(head[2]);
        let mut payload = vec![0; length];
        stream.read_exact(&mut payload).await.ok()?;
        let id = u32::from_be_bytes(head[5..].try_into().unwrap());
        if wanted(head[3], id, &payload) {
            return Some(payload);
        }
    }
}

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

fn request(id: u32, method: &str, path: &str, end: bool, more: &[(&str, &str)]) -> Vec<u8> {
    let mut list =
        vec![(":method", method), (":scheme", "https"), (":authority", "a"), (":path", path)];
    list.extend(more);
    frame(HEADERS, END_HEADERS | if end { END_STREAM } else { 0 }, id, &fields(&list))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn headers_above_the_limit() {
    let world = World::new(1);
    let proxy = world.start().await;
    let bystander = proxy.client(&world.certs.credentials()).await;
    let value = "x".repeat(80 << 10);
    for http2 in [true, false] {
        let who = world.certs.credentials();
        let client = if http2 {
            Client::connect(proxy.addr, &who).await.unwrap()
        } else {
            Client::connect_http1(proxy.addr, &who).await.unwrap()
        };
        let headers = [("x-big", value.as_str())];
        let reply = client.request(Method::GET, MAPS, &headers, "");
        let reply = soon("an answer", reply).await.unwrap();
        assert_eq!(reply.status, 431, "http2: {http2}");
        if http2 {
            assert_eq!(client.get(MAPS).await.unwrap().status, 200, "its connection lives");
        }
    }
    assert_eq!(bystander.get(MAPS).await.unwrap().status, 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn too_many_streams_are_refused() {
    let world = World::new(1);
    let proxy = world.start_with(|config| terminate(config).limits.max_streams = 5).await;
    let mut stream = wire::connect(&proxy, &world.certs, "h2").await;
    let mut bytes = [PREFACE, &settings(&[])].concat();
    for n in 0..8 {
        bytes.extend(request(2 * n + 1, "GET", &format!("{MAPS}?watch=1"), true, &[]));
    }
    stream.write_all(&bytes).await.unwrap();
    let mut refused = Vec::new();
    let all = read_until(&mut stream, |kind, id, payload| {
        assert_ne!(kind, GOAWAY, "the connection goes on");
        if kind == RST_STREAM {
            assert_eq!(payload, 7u32.to_be_bytes(), "REFUSED_STREAM");
            refused.push(id);
        }
        refused.len() == 3
    });
    soon("three refusals", all).await.unwrap();
    assert_eq!(refused, [11, 13, 15]);
    until("five watches run", async || world.servers[0].counters().watches.load(Relaxed) == 5)
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_body_that_is_not_as_long_as_it_says() {
    let world = World::new(1);
    let proxy = world.start().await;
    let object = map("too-long", "1").to_string();
    for (n, declared) in [object.len() - 5, object.len() + 5].into_iter().enumerate() {
        let mut stream = wire::connect(&proxy, &world.certs, "h2").await;
        let length = declared.to_string();
        let more = [("content-type", "application/json"), ("content-length", length.as_str())];
        let bytes = [
            PREFACE.to_vec(),
            settings(&[]),
            request(1, "POST", MAPS, false, &more),
            frame(DATA, END_STREAM, 1, object.as_bytes()),
            request(3, "GET", MAPS, true, &[]),
        ]
        .concat();
        stream.write_all(&bytes).await.unwrap();
        let reset = read_until(&mut stream, |kind, id, _| {
            assert_ne!(kind, GOAWAY);
            kind == RST_STREAM && id == 1
        });
        soon("a stream error", reset).await.unwrap_or_else(|| panic!("{n}: closed"));
    }
    let there = world.certs.credentials();
    let client = proxy.client(&there).await;
    let reply = client.get(&format!("{MAPS}/too-long")).await.unwrap();
    assert_eq!(reply.status, 404, "half a body was carried out");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn garbage_costs_its_own_connection_only() {
    let world = World::new(1);
    let proxy = world.start().await;
    let bystander = proxy.client(&world.certs.credentials()).await;
    let mut watch = bystander.watch(&format!("{MAPS}?watch=1")).await.unwrap();
    for garbage in
        [&b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"[..], &[0; 4096], &[0xff; 4096], b"\x16\x03"]
    {
        let mut stream = TcpStream::connect(proxy.addr).await.unwrap();
        // It may be closed before all is written.
        let _ = stream.write_all(garbage).await;
        let _ = stream.shutdown().await;
        let mut rest = Vec::new();
        let _ = soon("its end", stream.read_to_end(&mut rest)).await;
        assert!(rest.len() < 100, "an alert at most");
    }
    for garbage in [&b"no preface at all, but long enough to be taken for one\r\n\r\n"[..], PREFACE]
    {
        let mut stream = wire::connect(&proxy, &world.certs, "h2").await;
        let bytes = [garbage, &frame(DATA, 0, 0, b"x"), &frame(SETTINGS, 0, 1, b"x")].concat();
        let _ = stream.write_all(&bytes).await;
        let end = read_until(&mut stream, |_, _, _| false);
        assert!(soon("its end", end).await.is_none());
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
        let mut stream = wire::connect(&proxy, &world.certs, "http/1.1").await;
        stream.write_all(garbage.as_bytes()).await.unwrap();
        let mut answer = vec![0; 4096];
        let size = soon(garbage, stream.read(&mut answer)).await.unwrap_or(0);
        let answer = String::from_utf8_lossy(&answer[..size]);
        assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 4"), "{garbage:?}: {answer}");
    }
    assert_eq!(bystander.get(MAPS).await.unwrap().status, 200);
    bystander.post(MAPS, &map("a", "1")).await.unwrap();
    assert!(soon("an event", watch.next()).await.unwrap().is_some());
}

/// As kube-apiserver answers it (`net/http`, `conn.serve`), however the request is cut into segments
/// and whatever follows it.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn plain_http_on_a_tls_port_is_answered_with_400() {
    const ANSWER: &str =
        "HTTP/1.0 400 Bad Request\r\n\r\nClient sent an HTTP request to an HTTPS server.\n";
    let world = World::new(1);
    let proxy = world.start().await;
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
        let mut answer = String::new();
        let name = &request[..request.len().min(40)];
        soon(name, stream.read_to_string(&mut answer)).await.unwrap();
        assert_eq!(answer, ANSWER, "{name}");
    }
    let refused = "jackstay_downstream_refused_total{listener=\"apiserver\",reason=\"handshake\"}";
    until("they are counted", async || proxy.metric(refused).await > 4.5).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn http1_and_answers_without_a_body() {
    let certs = Certs::new();
    let peers = Peers::start(&certs, 1);
    // Each act is for one request: none is to be sent twice because a PONG takes its time.
    let proxy = before(&peers, &certs).await;
    let who = certs.credentials();
    let http1 = Client::connect_http1(proxy.addr, &who).await.unwrap();
    let http2 = Client::connect(proxy.addr, &who).await.unwrap();
    let bare = |status: &'static str, length: Option<&'static str>| {
        Act::raw(move |id| {
            let mut list = vec![(":status", status), ("content-type", "application/json")];
            list.extend(length.map(|length| ("content-length", length)));
            frame(HEADERS, END_HEADERS | END_STREAM, id, &fields(&list))
        })
    };
    for _ in 0..3 {
        for client in [&http1, &http2] {
            peers.script.play([bare("204", None)]);
            let reply = soon("204", client.request(Method::DELETE, MAPS, &[], "")).await.unwrap();
            assert_eq!((reply.status.as_u16(), reply.body.len()), (204, 0));
            peers.script.play([bare("304", None)]);
            assert_eq!(soon("304", client.get(MAPS)).await.unwrap().status, 304);
            peers.script.play([bare("200", Some("1234"))]);
            let reply = soon("HEAD", client.request(Method::HEAD, "/version", &[], "")).await;
            let reply = reply.unwrap();
            assert_eq!((reply.status.as_u16(), reply.body.len()), (200, 0));
            assert_eq!(reply.headers["content-length"], "1234");
            peers.script.play([Act::Answer(Reply::ok("{}"))]);
            assert_eq!(soon("GET", client.get(MAPS)).await.unwrap().body, "{}");
        }
    }
    assert!(!http1.is_closed() && !http2.is_closed(), "kept alive");

    // Trailers.
    let trailers = Act::partly(Reply::ok("{}"), |id| {
        frame(HEADERS, END_HEADERS | END_STREAM, id, &fields(&[("x-checksum", "abc")]))
    });
    peers.script.play([trailers]);
    let response = http2.send(Method::GET, MAPS, &[], "").await.unwrap();
    let mut body = response.into_body();
    let mut found = None;
    while let Some(frame) = soon("a frame", next(&mut body)).await {
        if let Ok(trailers) = frame.unwrap().into_trailers() {
            found = Some(trailers["x-checksum"].clone());
        }
    }
    assert_eq!(found.unwrap(), "abc");
}

async fn next(
    body: &mut hyper::body::Incoming,
) -> Option<Result<http_body::Frame<bytes::Bytes>, hyper::Error>> {
    use http_body::Body;
    std::future::poll_fn(|cx| Pin::new(&mut *body).poll_frame(cx)).await
}

/// SIGTERM: what runs is finished, watches end cleanly, nobody new is let in.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn drain() {
    let world = World::new(2);
    // What waits for more than is running waits for all of this.
    let proxy = world.start_with(|config| config.shutdown.drain_timeout = 2 * PATIENCE).await;
    let mut clients = Vec::new();
    for http2 in [true, true, false] {
        let who = world.certs.credentials();
        clients.push(if http2 {
            Client::connect(proxy.addr, &who).await.unwrap()
        } else {
            Client::connect_http1(proxy.addr, &who).await.unwrap()
        });
    }
    let path = format!("{MAPS}?watch=1&resourceVersion={}", world.cluster.version());
    let watcher = proxy.client(&world.certs.credentials()).await;
    let mut watch = watcher.watch(&path).await.unwrap();
    clients[0].post(MAPS, &map("a", "1")).await.unwrap();
    soon("an event", watch.next()).await.unwrap().unwrap();
    world.servers.iter().for_each(|server| server.delay(Duration::from_millis(700)));
    world.cluster.audit().clear();
    let running: Vec<_> = clients
        .into_iter()
        .enumerate()
        .map(|(n, client)| {
            tokio::spawn(async move { client.post(MAPS, &map(&format!("d{n}"), "1")).await })
        })
        .collect();
    let begun = || world.cluster.audit().select(|r| r.verb == "create").len();
    until("three writes run", async || begun() == 3).await;
    let addr = proxy.addr;
    let start = Instant::now();
    proxy.running.drain();
    let stopped = tokio::task::spawn_blocking(move || proxy.running.stop());
    until("nobody is let in", async || {
        let refused = TcpStream::connect(addr).await;
        refused.is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
    })
    .await;
    for request in running {
        assert_eq!(soon("an answer", request).await.unwrap().unwrap().status, 201);
    }
    // What is written meanwhile still comes; an error would be no clean end.
    while soon("the watch's end", watch.next()).await.unwrap().is_some() {}
    drop(watcher);
    assert!(soon("the end", stopped).await.unwrap(), "no worker panicked");
    println!("drained in {:?}", start.elapsed());
}

/// Connections that never get to a request hold a place for a bounded time; one that has had a
/// request may be idle for as long as it likes, as kubelet's is.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn who_asks_for_nothing_is_let_go() {
    let world = World::new(1);
    // Long enough for a handshake on a slow machine.
    let limit = Duration::from_secs(2);
    let proxy = world
        .start_with(|config| {
            terminate(config).limits.header_timeout = limit;
            config.listeners[0].limits.handshake_timeout = limit;
        })
        .await;
    let kubelet = proxy.client(&world.certs.credentials()).await;
    assert_eq!(kubelet.get(MAPS).await.unwrap().status, 200);
    let refused = async || {
        proxy
            .metric("jackstay_downstream_refused_total{listener=\"apiserver\",reason=\"timeout\"")
            .await
    };
    let before = refused().await;

    let silent = async {
        let mut silent = TcpStream::connect(proxy.addr).await.unwrap();
        let mut rest = Vec::new();
        let _ = soon("no handshake", silent.read_to_end(&mut rest)).await;
        assert!(rest.is_empty());
    };
    let half = request(1, "GET", MAPS, true, &[]);
    let half = frame(HEADERS, END_STREAM, 1, &half[9..20]);
    let others = [
        ("half an HTTP/1.1 head", "http/1.1", b"GET / HTTP/1.1\r\nHost:".to_vec()),
        ("no preface", "h2", Vec::new()),
        ("a preface", "h2", [PREFACE, &settings(&[])].concat()),
        ("half a header block", "h2", [PREFACE, &settings(&[]), &half].concat()),
    ];
    let others = others.map(async |(what, alpn, bytes)| {
        let mut stream = wire::connect(&proxy, &world.certs, alpn).await;
        stream.write_all(&bytes).await.unwrap();
        let mut rest = Vec::new();
        let _ = soon(what, stream.read_to_end(&mut rest)).await;
    });
    tokio::join!(silent, join_all(others));
    // The HTTP/1.1 one is hyper's, which does not tell.
    assert!(refused().await >= before + 4.0, "{} {before}", refused().await);
    assert!(!kubelet.is_closed());
    assert_eq!(soon("an answer", kubelet.get(MAPS)).await.unwrap().status, 200);
    assert!(!kubelet.is_closed(), "it was told to go away");
}

/// Whoever keeps a connection ready for a first request, and says so by PINGs, keeps its place.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn who_pings_may_ask_later() {
    let world = World::new(1);
    let limit = Duration::from_secs(1);
    let proxy = world.start_with(|config| terminate(config).limits.header_timeout = limit).await;
    let start = Instant::now();
    // A test that was itself held up, so that too few PINGs came, has shown nothing.
    while let Err(pause) = ask_later(&proxy, &world.certs, limit * 3).await {
        assert!(pause >= limit / 2, "let go, with a PING answered every {pause:?}");
        assert!(start.elapsed() < PATIENCE * 4, "this machine is too slow");
    }
}

/// Sends PINGs for so long and then a request.
///
/// # Errors
/// The connection was ended. The longest pause between two answers.
async fn ask_later(proxy: &Proxy, certs: &Certs, after: Duration) -> Result<(), Duration> {
    let mut stream = wire::connect(proxy, certs, "h2").await;
    let start = Instant::now();
    stream.write_all(&[PREFACE, &settings(&[])].concat()).await.unwrap();
    let (mut last, mut longest) = (start, Duration::ZERO);
    while start.elapsed() < after {
        // It fails where the connection was ended, which the read tells.
        let _ = stream.write_all(&frame(PING, 0, 0, b"anybody?")).await;
        let mut ended = false;
        let answer = read_until(&mut stream, |kind, _, payload| {
            ended |= kind == GOAWAY;
            ended || (kind == PING && payload == b"anybody?")
        });
        let answer = soon("a PONG", answer).await;
        longest = longest.max(last.elapsed());
        last = Instant::now();
        if ended || answer.is_none() {
            return Err(longest);
        }
        pass(Duration::from_millis(20)).await;
    }
    stream.write_all(&request(1, "GET", MAPS, true, &[])).await.unwrap();
    let answer = read_until(&mut stream, |kind, id, _| kind == HEADERS && id == 1);
    assert!(soon("an answer", answer).await.is_some());
    Ok(())
}

/// Above the cap nobody is let in, and a place that is given back is taken again.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn connections_have_a_cap() {
    let world = World::new(1);
    let proxy = world.start_with(|config| config.listeners[0].limits.max_connections = 2).await;
    let who = world.certs.credentials();
    let one = proxy.client(&who).await;
    let two = proxy.client(&who).await;
    assert!(soon("a refusal", Client::connect(proxy.addr, &who)).await.is_err());
    assert!(proxy.metric("jackstay_downstream_refused_total").await >= 1.0);
    assert_eq!(one.get(MAPS).await.unwrap().status, 200);
    assert_eq!(two.get(MAPS).await.unwrap().status, 200);
    drop(one);
    until("its place is free", async || Client::connect(proxy.addr, &who).await.is_ok()).await;
}

/// A client that reads nothing at all is cut off; the apiserver's stream is free again.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn who_reads_nothing_is_cut_off() {
    let world = World::new(1);
    let proxy = world
        .start_with(|config| terminate(config).limits.stall_timeout = Duration::from_millis(500))
        .await;
    let mut stream = wire::connect(&proxy, &world.certs, "http/1.1").await;
    // More than all buffers on the way hold.
    let ask = b"GET /bytes?size=100000000 HTTP/1.1\r\nHost: a\r\n\r\n";
    stream.write_all(ask).await.unwrap();
    let open = "jackstay_downstream_connections";
    let asked = || world.cluster.audit().select(|r| r.path.starts_with("/bytes"));
    until("it is open", async || !asked().is_empty()).await;
    until("it is cut off", async || proxy.metric(open).await < 1.0).await;
    assert!(proxy.metric("jackstay_requests_in_flight").await < 1.0);
}

/// A client that reads, and gives one stream no window: that stream is cut off and its watch with
/// it; its other streams go on.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn who_gives_a_stream_no_window_loses_it() {
    let world = World::new(1);
    let proxy = world
        .start_with(|config| terminate(config).limits.stall_timeout = Duration::from_millis(500))
        .await;
    let mut stream = wire::connect(&proxy, &world.certs, "h2").await;
    let path = format!("{MAPS}?watch=1&resourceVersion={}", world.cluster.version());
    let window = |id: u32| frame(WINDOW_UPDATE, 0, id, &(1u32 << 20).to_be_bytes());
    let bytes = [
        PREFACE.to_vec(),
        settings(&[(INITIAL_WINDOW_SIZE, 0)]),
        window(0),
        request(1, "GET", &path, true, &[]),
        request(3, "GET", &path, true, &[]),
        window(3),
        // Nothing waits for this one.
        request(5, "GET", &format!("{path}&labelSelector=v%3Dnone"), true, &[]),
    ]
    .concat();
    stream.write_all(&bytes).await.unwrap();
    let watches = || world.servers[0].counters().watches.load(Relaxed);
    until("three watches run", async || watches() == 3).await;
    let kind = jackstay::demo::apiserver::kinds::find("", "v1", "configmaps").unwrap();
    let write = |n: usize| {
        world.cluster.create(kind, "default", map(&format!("m{n}"), "1"), false).unwrap();
    };
    write(0);
    // The event of the other one may come behind the end of this one.
    let (mut events, mut is_cut) = (0, false);
    let cut = read_until(&mut stream, |kind, id, payload| {
        assert_ne!(kind, GOAWAY, "its connection goes on");
        events += usize::from(kind == DATA && id == 3 && !payload.is_empty());
        if kind == RST_STREAM {
            assert_eq!((id, payload), (1, &8u32.to_be_bytes()[..]), "CANCEL");
            is_cut = true;
        }
        is_cut && events > 0
    });
    soon("its end", cut).await.unwrap();
    until("the watch has ended upstream too", async || watches() == 2).await;
    assert_eq!(events, 1);
    write(1);
    let more = read_until(&mut stream, |kind, id, _| {
        assert_ne!(kind, RST_STREAM);
        kind == DATA && id == 3
    });
    soon("another event", more).await.unwrap();
    assert_eq!(watches(), 2);
}

/// Streams that we have to reset because of the client's errors are counted, and a client that
/// makes nothing else is told to calm down.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn errors_without_end_end_the_connection() {
    let world = World::new(1);
    let proxy = world.start().await;
    let bystander = proxy.client(&world.certs.credentials()).await;
    let mut stream = wire::connect(&proxy, &world.certs, "h2").await;
    let mut bytes = [PREFACE, &settings(&[])].concat();
    for n in 0..1_200 {
        bytes.extend(request(2 * n + 1, "GET", MAPS, true, &[("connection", "close")]));
    }
    // It may be closed before all is written.
    let _ = stream.write_all(&bytes).await;
    let mut resets = 0;
    let calm = read_until(&mut stream, |kind, _, payload| {
        resets += usize::from(kind == RST_STREAM);
        kind == GOAWAY && payload[4..8] == 11u32.to_be_bytes()
    });
    // What is closed while more arrives may lose its last words.
    let told = soon("ENHANCE_YOUR_CALM, or the end", calm).await;
    println!("{resets} resets, then the end; told: {}", told.is_some());
    assert!(resets <= 1_024, "{resets}");
    assert_eq!(bystander.get(MAPS).await.unwrap().status, 200);
}

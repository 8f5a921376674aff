//! The admin endpoint over real sockets. Requests are sent as raw bytes, since some are malformed.

use super::*;
use crate::admin::connections::{MAX_CONNECTIONS, REQUEST_GRACE};
use crate::admin::status_provider::{Readiness, ReadinessCheck};
use jackstay_sys::clock;
use jackstay_sys::sockets::listening;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};

struct FakeStatus {
    alive: bool,
    ready: bool,
}

impl StatusProvider for FakeStatus {
    fn liveness(&self) -> Result<(), String> {
        if self.alive { Ok(()) } else { Err("worker 0: event loop stalled".into()) }
    }

    fn readiness(&self) -> Readiness {
        let check = |name: &str, ok, required, detail: &str| ReadinessCheck {
            name: name.into(),
            ok,
            required,
            detail: detail.into(),
        };
        let detail = if self.ready { "" } else { "no endpoint usable:\nrefused" };
        Readiness {
            ready: self.ready,
            checks: vec![
                check("listener apiserver", true, true, ""),
                check("identity 0", false, false, "awaited"),
                check("upstream control-plane", self.ready, true, detail),
            ],
        }
    }

    fn status(&self) -> serde_json::Value {
        json!({"version": "0", "listeners": [{"name": "</script><script>alert(1)</script>"}]})
    }

    fn events(&self) -> serde_json::Value {
        json!({"events": [{"seq": 1, "to": "ready"}]})
    }

    fn history(&self) -> serde_json::Value {
        json!({"step_s": 5, "endpoints": []})
    }

    fn config(&self) -> serde_json::Value {
        json!({"workers": 1})
    }

    fn metrics(&self) -> String {
        assert!(self.alive, "a panic for the test");
        "jackstay_build_info 1\n".into()
    }
}

fn start(alive: bool, ready: bool) -> SocketAddr {
    let socket = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    let admin = Admin::from_std(socket).expect("a socket");
    let address = admin.local_addr().expect("an address");
    tokio::spawn(admin.serve(Arc::new(FakeStatus { alive, ready }), std::future::pending()));
    address
}

async fn send(address: SocketAddr, bytes: &[u8]) -> String {
    let mut stream = TcpStream::connect(address).await.expect("it listens");
    stream.write_all(bytes).await.expect("it reads");
    read_response(stream).await
}

async fn read_response(mut stream: TcpStream) -> String {
    let mut response = Vec::new();
    // The server closes after one response, possibly with a reset.
    let _ = stream.read_to_end(&mut response).await;
    String::from_utf8_lossy(&response).into_owned()
}

/// Status, head and body of the response to one request.
async fn request(address: SocketAddr, method: &str, path: &str) -> (u16, String, String) {
    let head = format!("{method} {path} HTTP/1.1\r\nHost: localhost:9643\r\n\r\n");
    let response = send(address, head.as_bytes()).await;
    let (head, body) = response.split_once("\r\n\r\n").expect("a head");
    let code = head.split(' ').nth(1).and_then(|code| code.parse().ok()).expect("a code");
    (code, head.to_owned(), body.to_owned())
}

#[tokio::test]
async fn serve_each_route_returns_type_headers_and_body() {
    let address = start(true, true);
    for (path, content_type, content) in [
        ("/livez", "text/plain; charset=utf-8", "ok\n"),
        ("/livez?verbose", "text/plain; charset=utf-8", "ok\n"),
        ("/readyz", "text/plain; charset=utf-8", "[+]listener apiserver ok\n"),
        ("/metrics", "text/plain; version=0.0.4; charset=utf-8", "jackstay_build_info 1\n"),
        ("/status", "application/json", "\"version\": \"0\""),
        ("/events", "application/json", "\"seq\": 1"),
        ("/history", "application/json", "\"step_s\": 5"),
        ("/config", "application/json", "\"workers\": 1"),
        ("/", "text/html; charset=utf-8", "<!doctype html>"),
    ] {
        let (code, head, body) = request(address, "GET", path).await;
        assert_eq!(code, 200, "{path}");
        assert!(head.contains(&format!("content-type: {content_type}\r\n")), "{path}: {head}");
        assert!(head.contains("x-content-type-options: nosniff"), "{head}");
        assert!(head.contains("content-security-policy: default-src 'none'"), "{head}");
        assert!(body.contains(content), "{path}: {body}");

        let (code, head, body) = request(address, "HEAD", path).await;
        assert_eq!((code, body.as_str()), (200, ""), "{path}");
        assert!(head.contains("content-length: "), "{head}");
    }
}

#[tokio::test]
async fn serve_readyz_with_failed_check_returns_503_and_one_line_per_check() {
    let (code, _, body) = request(start(true, false), "GET", "/readyz").await;
    let expected = "[+]listener apiserver ok\n[-]identity 0 excluded: awaited\n\
        [-]upstream control-plane failed: no endpoint usable: refused\nreadyz check failed\n";
    assert_eq!((code, body.as_str()), (503, expected));
    let (code, _, body) = request(start(true, true), "GET", "/readyz").await;
    let expected = "[+]listener apiserver ok\n[-]identity 0 excluded: awaited\n\
        [+]upstream control-plane ok\nreadyz check passed; excluded checks do not count\n";
    assert_eq!((code, body.as_str()), (200, expected));

    let (code, _, body) = request(start(false, true), "GET", "/livez").await;
    assert_eq!((code, body.as_str()), (503, "not alive: worker 0: event loop stalled\n"));
}

#[tokio::test]
async fn serve_other_methods_and_paths_are_refused() {
    let address = start(true, true);
    for method in ["POST", "PUT", "DELETE", "OPTIONS", "BREW"] {
        let (code, head, _) = request(address, method, "/status").await;
        assert_eq!(code, 405, "{method}");
        assert!(head.contains("allow: GET, HEAD"), "{head}");
    }
    for path in ["/nothing", "/status/", "/livez/x", "//", "/../etc/passwd", "/%00"] {
        let (code, _, body) = request(address, "GET", path).await;
        assert_eq!(code, 404, "{path}");
        assert!(body.contains("/readyz") && body.contains("/config"), "{body}");
    }
}

#[tokio::test]
async fn serve_foreign_host_on_loopback_is_refused() {
    let address = start(true, true);
    let response = send(address, b"GET /config HTTP/1.1\r\nHost: evil.example\r\n\r\n").await;
    assert!(response.starts_with("HTTP/1.1 421 "), "{response}");
    assert!(!response.contains("workers"), "{response}");
    let two = b"GET /config HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n";
    assert!(!send(address, two).await.contains("workers"));
    let response = send(address, b"GET /livez HTTP/1.0\r\n\r\n").await;
    assert!(response.starts_with("HTTP/1.0 200 "), "{response}");
}

#[tokio::test]
async fn serve_malformed_request_and_panic_affect_only_their_connection() {
    let address = start(true, true);
    let long = [b"GET /".as_slice(), &vec![b'a'; 100_000], b" HTTP/1.1\r\n\r\n"].concat();
    let malformed: [&[u8]; 5] = [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"\r\n\r\n \0\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        &long,
    ];
    for bytes in malformed {
        let response = send(address, bytes).await;
        assert!(!response.contains(" 200 "), "{response}");
    }
    assert_eq!(request(address, "GET", "/livez").await.0, 200);

    // `metrics` panics if the process is not alive.
    let panicking = start(false, true);
    assert_eq!(send(panicking, b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n").await, "");
    assert_eq!(request(panicking, "GET", "/readyz").await.0, 200);
}

#[tokio::test(start_paused = true)]
async fn serve_with_idle_connections_in_all_slots_answers_the_next_request() {
    let address = start(true, true);
    let mut idle = Vec::new();
    for _ in 0..MAX_CONNECTIONS + 10 {
        idle.push(TcpStream::connect(address).await.expect("the backlog takes it"));
    }
    // The paused clock advances to the next timer when no task can run.
    assert_eq!(request(address, "GET", "/livez").await.0, 200);
}

#[tokio::test(start_paused = true)]
async fn serve_with_idle_connections_in_all_slots_evicts_the_oldest_within_a_second() {
    let address = start(true, true);
    let mut idle = Vec::new();
    for _ in 0..MAX_CONNECTIONS + 100 {
        idle.push(TcpStream::connect(address).await.expect("the backlog takes it"));
    }
    let start_time = clock::now();
    assert_eq!(request(address, "GET", "/livez").await.0, 200);
    assert!(
        clock::elapsed(start_time) < Duration::from_secs(1),
        "{:?}",
        clock::elapsed(start_time)
    );
    // The oldest connection is evicted, the newest one stays.
    let mut byte = [0];
    assert_eq!(idle[0].read(&mut byte).await.unwrap_or(0), 0);
    let newest = idle.last_mut().expect("a connection");
    let request = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n";
    newest.write_all(request).await.expect("it is open");
    let mut response = Vec::new();
    newest.read_to_end(&mut response).await.expect("a response");
    assert!(response.starts_with(b"HTTP/1.1 200 "), "{}", String::from_utf8_lossy(&response));
}

async fn open(connections: &mut Connections, source: Source) -> DuplexStream {
    let (client, server) = duplex(4096);
    connections.add(server, source, false).await;
    client
}

#[tokio::test(start_paused = true)]
async fn connections_in_all_slots_lose_those_of_the_source_with_the_most() {
    let provider: Arc<dyn StatusProvider> = Arc::new(FakeStatus { alive: true, ready: true });
    let mut connections = Connections::new(&provider);
    // The connection of the slow probe is the oldest.
    let mut probe = open(&mut connections, Source::User(0)).await;
    let mut idle = Vec::new();
    for _ in 0..MAX_CONNECTIONS + 10 {
        idle.push(open(&mut connections, Source::User(65_534)).await);
    }
    assert_eq!(idle[0].read(&mut [0]).await.unwrap(), 0, "evicted");
    probe.write_all(b"GET /livez HTTP/1.1\r\nHost: a\r\n\r\n").await.unwrap();
    let mut response = String::new();
    probe.read_to_string(&mut response).await.unwrap();
    assert!(response.starts_with("HTTP/1.1 200"), "{response}");
}

/// The thread does not run while the requests arrive and the time for them ends.
#[tokio::test]
async fn connections_whose_requests_arrived_in_time_are_not_evicted() {
    let provider: Arc<dyn StatusProvider> = Arc::new(FakeStatus { alive: true, ready: true });
    let mut connections = Connections::new(&provider);
    let mut clients = Vec::new();
    for _ in 0..MAX_CONNECTIONS {
        let (client, server) = std::os::unix::net::UnixStream::pair().expect("a socket pair");
        client.set_nonblocking(true).expect("a socket");
        server.set_nonblocking(true).expect("a socket");
        let server = tokio::net::UnixStream::from_std(server).expect("a runtime");
        connections.add(server, Source::User(0), false).await;
        clients.push(client);
    }
    let opened = clock::now();
    let (_client, another) = duplex(4096);
    let blocked = async {
        for mut client in &clients {
            std::io::Write::write_all(&mut client, b"GET /livez HTTP/1.1\r\nHost: a\r\n\r\n")
                .expect("the kernel takes it");
        }
        while clock::elapsed(opened) < 2 * REQUEST_GRACE {
            std::hint::spin_loop();
        }
    };
    tokio::join!(biased; connections.add(another, Source::User(0), false), blocked);
    for client in clients {
        let mut client = tokio::net::UnixStream::from_std(client).expect("a runtime");
        let mut response = String::new();
        client.read_to_string(&mut response).await.expect("a response");
        assert!(response.starts_with("HTTP/1.1 200"), "{response}");
    }
}

#[tokio::test]
async fn serve_unix_answers_probes() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("admin.sock");
    let listener = listening::listen_unix(&path, SOCKET_MODE).expect("a socket");
    let listener = UnixListener::from_std(listener).expect("a runtime");
    tokio::spawn(serve_unix(listener, Arc::new(FakeStatus { alive: true, ready: false })));
    for (route, code) in [("/livez", "200"), ("/readyz", "503")] {
        let mut stream = tokio::net::UnixStream::connect(&path).await.expect("it listens");
        let request = format!("GET {route} HTTP/1.0\r\n\r\n");
        stream.write_all(request.as_bytes()).await.expect("it reads");
        let mut response = String::new();
        stream.read_to_string(&mut response).await.expect("a response");
        assert!(response.starts_with(&format!("HTTP/1.0 {code} ")), "{response}");
    }
}

/// Serves a socket that is stopped before the first accept, while more connections than slots wait in its
/// accept queue. Returns its address, the clients, and a duplicate of the socket.
async fn serve_stopped_with_queue(
    reason: StopReason,
) -> (SocketAddr, Vec<TcpStream>, std::net::TcpListener) {
    // The listener of the standard library has a backlog of only 128.
    let any = "127.0.0.1:0".parse().expect("an address");
    let socket = listening::listen(any, false).expect("a free port");
    let copy = socket.try_clone().expect("a descriptor");
    let admin = Admin::from_std(socket).expect("a socket");
    let address = admin.local_addr().expect("an address");
    let mut queue = Vec::new();
    for _ in 0..MAX_CONNECTIONS + 10 {
        let mut stream = TcpStream::connect(address).await.expect("the backlog takes it");
        let request = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n";
        stream.write_all(request).await.expect("the kernel takes it");
        queue.push(stream);
    }
    tokio::spawn(
        admin.serve(Arc::new(FakeStatus { alive: true, ready: true }), async move { reason }),
    );
    (address, queue, copy)
}

#[tokio::test]
async fn serve_socket_moved_answers_its_accept_queue() {
    let (address, queue, copy) = serve_stopped_with_queue(StopReason::Moved).await;
    // The served socket is then the last duplicate, as in production.
    drop(copy);
    for stream in queue {
        let response = read_response(stream).await;
        assert!(response.starts_with("HTTP/1.1 200 "), "{response:?}");
    }
    let refused = TcpStream::connect(address).await.expect_err("it is closed");
    assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
}

#[tokio::test]
async fn serve_socket_taken_over_leaves_its_accept_queue() {
    let (_, queue, copy) = serve_stopped_with_queue(StopReason::TakenOver).await;
    let next_process = Admin::from_std(copy).expect("a socket");
    let status = Arc::new(FakeStatus { alive: false, ready: true });
    tokio::spawn(next_process.serve(status, std::future::pending()));
    for stream in queue {
        let response = read_response(stream).await;
        assert!(response.starts_with("HTTP/1.1 503 "), "served by the next process: {response:?}");
    }
}

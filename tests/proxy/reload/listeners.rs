//! Clients of listeners and upstreams that reloads remove, move or change.

use crate::reload::setup::{Setup, Traffic};
use crate::support::{TestCluster, passthrough_config, pause, soon, until};
use http::Method;
use jackstay::app::reload::ReloadOutcome;
use jackstay_apiserver::audit::Record;
use jackstay_apiserver::client::{Client, next_data};
use jackstay_config::Config;
use jackstay_core::discovery::address::EndpointAddress;
use std::collections::VecDeque;
use std::io::{ErrorKind, Read as _};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;
use tokio::net::TcpStream;

const PATH: &str = "/api/v1/namespaces/default";

fn add_second_listener(config: &mut Config) {
    let mut second = config.listeners[0].clone();
    second.name = "second".into();
    config.listeners.push(second);
}

async fn is_refused(address: SocketAddr) -> bool {
    TcpStream::connect(address).await.is_err()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn removed_listener_completes_requests_and_ends_watches() {
    let mut setup = Setup::with(2, |config| {
        config.shutdown.drain_timeout = Duration::from_secs(8);
        add_second_listener(config);
    })
    .await;
    let address = setup.listener("second").await.unwrap();
    let credentials = setup.cluster.certs.credentials();
    let client = Client::connect(address, &credentials).await.unwrap();
    let watch = setup.watch(&client).await;
    watch.expect_complete(&setup).await;
    let client_of_first = setup.client().await;
    let watch_of_first = setup.watch(&client_of_first).await;

    // A response is pending when the listener is removed.
    setup
        .cluster
        .servers
        .iter()
        .for_each(|server| server.set_faults(|faults| faults.delay = Duration::from_millis(500)));
    let before = request_count(&setup.cluster);
    let slow_request = tokio::spawn(async move {
        let reply = client.get(PATH).await;
        (client, reply)
    });
    until("the request is in flight", async || request_count(&setup.cluster) > before).await;
    let changes = setup.change(|config| drop(config.listeners.pop())).await;
    assert_eq!(changes, ["listener `second` removed"]);
    until("the address is closed", async || is_refused(address).await).await;
    let (client, reply) = soon("the response", slow_request).await.unwrap();
    assert_eq!(reply.unwrap().status, 200);
    assert_eq!(
        watch.recorder.wait_end().await,
        Ok(()),
        "a clean end lets the client continue without a list"
    );
    until("the connection ends", async || client.is_closed()).await;

    setup
        .cluster
        .servers
        .iter()
        .for_each(|server| server.set_faults(|faults| faults.delay = Duration::ZERO));
    watch_of_first.expect_complete(&setup).await;
    assert!(setup.listener("second").await.is_none());
    let open = r#"jackstay_downstream_connections{listener="second"}"#;
    until("the listener counts no connection", async || setup.proxy.metric(open).await < 0.5).await;
}

/// Number of requests for [`PATH`] that the servers have answered, and of all requests in flight.
fn request_count(cluster: &TestCluster) -> u64 {
    let answered = cluster.state.audit().select(|record| record.path.ends_with(PATH));
    let running: u64 = cluster.servers.iter().map(|s| s.counters().in_flight.load(Relaxed)).sum();
    answered.len() as u64 + running
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn removed_listener_resets_open_streams_after_the_drain_timeout() {
    let mut setup = Setup::with(1, |config| {
        config.shutdown.drain_timeout = Duration::from_secs(1);
        add_second_listener(config);
    })
    .await;
    let address = setup.listener("second").await.unwrap();
    let client = Client::connect(address, &setup.cluster.certs.credentials()).await.unwrap();
    // A watch without a resourceVersion cannot be ended cleanly: its initial events may be incomplete.
    let watch = client.send(Method::GET, &format!("{PATH}/configmaps?watch=1"), &[], "").await;
    let mut body = watch.unwrap().into_body();
    setup.change(|config| drop(config.listeners.pop())).await;
    let end = soon("the reset", async {
        loop {
            match next_data(&mut body).await {
                Ok(Some(_)) => {}
                Ok(None) => break Ok(()),
                Err(error) => break Err(error),
            }
        }
    })
    .await;
    assert!(end.is_err(), "after a clean end the client would take partial state for complete");
    let watches = r#"jackstay_watches{listener="second"}"#;
    until("the listener counts no watch", async || setup.proxy.metric(watches).await < 0.5).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn moved_listener_keeps_its_connections() {
    let mut setup = Setup::new(2).await;
    let traffic = Traffic::start(&setup, 100).await;
    let client = setup.client().await;
    let watch = setup.watch(&client).await;
    let old = setup.proxy.addr;
    let mut new = old;
    new.set_ip("127.0.0.2".parse().unwrap());
    setup.change(|config| config.listeners[0].bind = vec![new]).await;
    until("the old address is closed", async || is_refused(old).await).await;
    setup.proxy.addr = new;
    // The certificate is not valid for the new address, so the test only connects.
    assert!(!is_refused(new).await);
    traffic.expect_progress().await;
    watch.expect_complete(&setup).await;
    assert_eq!(client.get(PATH).await.unwrap().status, 200);
    traffic.end().await;
}

/// If it were still in use, a reload that follows at once could not bind it.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn address_that_a_listener_has_left_is_free_when_the_reload_ends() {
    let mut setup = Setup::new(1).await;
    // No other test binds these.
    let (mut first, mut second) = (setup.proxy.addr, setup.proxy.addr);
    first.set_ip("127.0.77.1".parse().unwrap());
    second.set_ip("127.0.77.2".parse().unwrap());
    for move_number in 0..50 {
        let (from, to) = if move_number % 2 == 0 { (first, second) } else { (second, first) };
        setup.change(|config| config.listeners[0].bind = vec![to]).await;
        if let Err(error) = std::net::TcpListener::bind(from) {
            panic!("move {move_number}: {error}");
        }
    }
}

/// During each move, the wildcard address and the other address overlap on one port.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn listener_moved_to_the_wildcard_address_and_back_refuses_no_connection() {
    let mut setup = Setup::new(2).await;
    let narrow = setup.proxy.addr;
    let wide = SocketAddr::new(std::net::Ipv4Addr::UNSPECIFIED.into(), narrow.port());
    let mut other = narrow;
    other.set_ip("127.0.0.2".parse().unwrap());
    setup.change(|config| config.listeners[0].bind = vec![narrow]).await;
    let traffic = Traffic::start(&setup, 100).await;
    let client = setup.client().await;
    let watch = setup.watch(&client).await;
    let connect_loop = ConnectLoop::at(narrow);
    for _ in 0..3 {
        setup.change(|config| config.listeners[0].bind = vec![wide]).await;
        assert!(!is_refused(other).await);
        traffic.expect_progress().await;
        setup.change(|config| config.listeners[0].bind = vec![narrow]).await;
        until("the other address is closed", async || is_refused(other).await).await;
        watch.expect_complete(&setup).await;
    }
    connect_loop.expect_no_refusal();
    let new = setup.client().await;
    assert_eq!(new.get(PATH).await.unwrap().status, 200);
    traffic.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn admin_endpoint_moved_to_the_wildcard_address_and_back_refuses_no_connection() {
    let mut setup = Setup::new(1).await;
    let narrow = setup.proxy.admin;
    let wide = SocketAddr::new(std::net::Ipv4Addr::UNSPECIFIED.into(), narrow.port());
    for _ in 0..4 {
        for bind in [wide, narrow] {
            let connect_loop = ConnectLoop::at(narrow);
            setup.change(|config| config.admin.bind = bind).await;
            // The loop can fill the slots of the admin endpoint. While it runs, a client of the same user that
            // takes more than 50 ms to send its request is evicted.
            connect_loop.expect_no_refusal();
            assert!(setup.proxy.page("/readyz").await.starts_with("HTTP/1.1 200"));
        }
    }
}

/// A thread that opens connections one after the other and sends nothing on them.
struct ConnectLoop {
    stop: Arc<AtomicBool>,
    /// Returns the numbers of connections that were opened, refused and reset.
    thread: std::thread::JoinHandle<[usize; 3]>,
}

impl ConnectLoop {
    fn at(address: SocketAddr) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let is_stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let [mut connects, mut refused, mut reset] = [0; 3];
            let is_reset = |mut stream: std::net::TcpStream| {
                stream.set_nonblocking(true).unwrap();
                let read = stream.read(&mut [0]);
                usize::from(read.is_err_and(|error| error.kind() != ErrorKind::WouldBlock))
            };
            let mut open = VecDeque::new();
            while !is_stopped.load(Relaxed) {
                connects += 1;
                match std::net::TcpStream::connect(address) {
                    Ok(stream) => open.push_back(stream),
                    Err(_) => refused += 1,
                }
                // A reset may arrive after the connect, so a connection is checked 50 connections later.
                if open.len() > 50 {
                    reset += open.pop_front().map_or(0, is_reset);
                }
            }
            reset += open.into_iter().map(is_reset).sum::<usize>();
            [connects, refused, reset]
        });
        Self { stop, thread }
    }

    #[track_caller]
    fn expect_no_refusal(self) {
        self.stop.store(true, Relaxed);
        let [connects, refused, reset] = self.thread.join().unwrap();
        assert!(connects > 0);
        assert_eq!([refused, reset], [0, 0], "refused and reset, of {connects} connections");
    }
}

/// Clients that connect during the rename wait in the accept queue.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn renamed_listener_keeps_its_socket_and_ends_its_watches() {
    let mut setup = Setup::new(1).await;
    let address = setup.proxy.addr;
    setup.change(|config| config.listeners[0].bind = vec![address]).await;
    let before = setup.client().await;
    let watch = setup.watch(&before).await;
    let refused = async {
        let mut refused = 0;
        for _ in 0..300 {
            refused += usize::from(is_refused(address).await);
            pause(Duration::from_millis(1)).await;
        }
        refused
    };
    let (refused, ()) = tokio::join!(refused, async {
        for name in ["renamed", "and-again", "apiserver"] {
            setup.change(|config| config.listeners[0].name = name.into()).await;
        }
    });
    assert_eq!(refused, 0);
    assert_eq!(watch.recorder.wait_end().await, Ok(()), "the watch ends with the old listener");
    let after = setup.client().await;
    assert_eq!(after.get(PATH).await.unwrap().status, 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn listener_with_changed_mode_keeps_its_address() {
    let mut setup = Setup::new(1).await;
    let address = setup.proxy.addr;
    setup.change(|config| config.listeners[0].bind = vec![address]).await;
    let terminated = setup.config.clone();
    let passed = passthrough_config(terminated.clone());
    let credentials = setup.cluster.certs.credentials();
    for _ in 0..2 {
        setup.change(|config| *config = passed.clone()).await;
        // TLS is end to end: the client verifies the certificate of the server.
        let client = soon("a flow", Client::connect(address, &credentials)).await.unwrap();
        assert_eq!(client.get(PATH).await.unwrap().status, 200);
        assert_eq!(setup.proxy.status().await["listeners"][0]["mode"], "passthrough");
        setup.change(|config| *config = terminated.clone()).await;
        let client = soon("a connection", Client::connect(address, &credentials)).await.unwrap();
        assert_eq!(client.get(PATH).await.unwrap().status, 200);
        assert_eq!(setup.proxy.status().await["listeners"][0]["mode"], "terminate");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn changed_socket_options_keep_the_address_open() {
    let mut setup = Setup::new(1).await;
    let address = setup.proxy.addr;
    setup
        .change(|config| {
            *config = passthrough_config(config.clone());
            config.listeners[0].bind = vec![address];
        })
        .await;
    let credentials = setup.cluster.certs.credentials();
    let first = Client::connect(address, &credentials).await.unwrap();
    for freebind in [true, false] {
        let changes = setup.change(|config| config.listeners[0].freebind = freebind).await;
        assert_eq!(changes, ["listener `apiserver` changed"]);
        let client = soon("a flow", Client::connect(address, &credentials)).await.unwrap();
        assert_eq!(client.get(PATH).await.unwrap().status, 200);
    }
    let transparent = |to| move |config: &mut Config| config.listeners[0].transparent = to;
    match setup.reload(transparent(true)).await {
        ReloadOutcome::Ok { .. } => {
            let direct =
                soon("the connection attempt", Client::connect(address, &credentials)).await;
            assert!(direct.is_err(), "a direct connection is refused");
        }
        // The test does not run as root.
        ReloadOutcome::Failed { errors } => {
            assert!(errors[0].contains("CAP_NET_ADMIN"), "{errors:?}");
            let client = soon("a flow", Client::connect(address, &credentials)).await.unwrap();
            assert_eq!(client.get(PATH).await.unwrap().status, 200);
        }
    }
    setup.change(transparent(false)).await;
    let client = soon("a flow", Client::connect(address, &credentials)).await.unwrap();
    assert_eq!(client.get(PATH).await.unwrap().status, 200);
    assert_eq!(first.get(PATH).await.unwrap().status, 200, "an existing flow continues");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn listener_with_changed_upstream_sends_next_requests_there_and_ends_watches() {
    let mut setup = Setup::with(2, |config| {
        config.shutdown.drain_timeout = Duration::from_secs(4);
        let mut second = config.upstreams[0].clone();
        config.upstreams[0].endpoints.truncate(1);
        second.name = "second".into();
        second.endpoints.remove(0);
        config.upstreams.push(second);
    })
    .await;
    let traffic = Traffic::start(&setup, 100).await;
    let client = setup.client().await;
    let watch = setup.watch(&client).await;
    traffic.expect_progress().await;
    let by_clients = |record: &Record| {
        let is_probe = matches!(&*record.path, "/readyz" | "/livez" | "/version");
        record.server == "server-1" && !is_probe
    };
    assert_eq!(setup.cluster.state.audit().select(by_clients).len(), 0);

    setup.change(|config| config.listeners[0].upstream = "second".into()).await;
    traffic.expect_progress().await;
    assert_eq!(
        watch.recorder.wait_end().await,
        Ok(()),
        "the watch ends, since the objects of the other upstream differ"
    );
    assert!(!client.is_closed());
    let second_watch = setup.watch(&client).await;
    let watches = |server: usize| setup.cluster.servers[server].counters().watches.load(Relaxed);
    until("the watch is on the second server", async || (watches(0), watches(1)) == (0, 1)).await;
    second_watch.expect_complete(&setup).await;

    // The removed upstream closes all its connections.
    setup.change(|config| drop(config.upstreams.remove(0))).await;
    let open = |server: usize| setup.cluster.servers[server].counters().open.load(Relaxed);
    until("no connection to the first server", async || open(0) == 0).await;
    second_watch.expect_complete(&setup).await;
    traffic.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn reload_that_replaces_all_endpoints_keeps_watches_and_requests() {
    let mut setup = Setup::with(4, |config| config.upstreams[0].endpoints.truncate(2)).await;
    let all: Vec<EndpointAddress> = setup.cluster.config().upstreams[0].endpoints.clone();
    let traffic = Traffic::start(&setup, 100).await;
    let client = setup.client().await;
    let watch = setup.watch(&client).await;
    for half in [&all[2..], &all[..2], &all[2..]] {
        setup.change(|config| config.upstreams[0].endpoints = half.to_vec()).await;
        traffic.expect_progress().await;
        watch.expect_complete(&setup).await;
    }
    traffic.end().await;
}

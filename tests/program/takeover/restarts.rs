//! A process gets a termination signal, and the next one starts while it drains.

use super::load::ReconnectingClient;
use super::setup::Setup;
use super::silent_predecessor;
use crate::support::child::Process;
use crate::support::wait::{PATIENCE, pause, until, until_within};
use crate::support::{CONFIGMAPS, long_form, passthrough_config};
use jackstay_apiserver::client::{Client, Credentials, Watch};
use jackstay_config::Config;
use std::io::{self, ErrorKind, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::time::timeout;

/// Limit for a new process to serve beside one that drains. It serves within 0.2 s on an idle machine.
const SERVES: Duration = Duration::from_secs(5);

/// Limit for a start that waits for a process which does not answer.
const FAILS: Duration = Duration::from_secs(10);

fn configure(mode: &str, drain_timeout: Duration, config: &mut Config) {
    config.workers = 2;
    config.shutdown.drain_timeout = drain_timeout;
    if mode == "L4" {
        *config = passthrough_config(config.clone());
    }
}

/// A setup with a watch open, so that a drain lasts.
async fn setup_with_watch(mode: &str) -> (Setup, Client, Watch) {
    let drain_timeout = Duration::from_secs(60);
    let setup = Setup::with(1, |config| configure(mode, drain_timeout, config)).await;
    let client = Client::connect(setup.address, &setup.cluster.certs.credentials()).await.unwrap();
    let watch = client.watch(&format!("{CONFIGMAPS}?watch=1")).await.unwrap();
    (setup, client, watch)
}

/// Waits until the process has executed its termination signal, which it logs before.
async fn until_drains(setup: &Setup) {
    until("the process drains", async || {
        setup.try_page("/status").await.is_ok_and(|page| page.contains("\"draining\": true"))
    })
    .await;
}

/// Waits until a process that does not drain has the admin endpoint.
async fn expect_admin(setup: &Setup, process: &mut Process, what: &str) {
    until_within(SERVES, &format!("{what}: the new process has the admin endpoint"), async || {
        assert!(process.is_running(), "{what}:\n{}", process.output());
        let page = answered("admin endpoint", setup.try_page("/status")).await;
        page.is_ok_and(|page| page.contains("\"draining\": false"))
    })
    .await;
}

/// Sends a request on a new connection.
async fn request(setup: &Setup) -> io::Result<()> {
    answered("request of the test", get(setup.address, &setup.cluster.certs.credentials())).await
}

async fn get(address: SocketAddr, credentials: &Credentials) -> io::Result<()> {
    let connect = Client::connect(address, credentials);
    let client = answered("connect", connect).await?;
    let reply = answered("request on a new connection", client.get(CONFIGMAPS)).await?;
    if reply.status.is_success() { Ok(()) } else { Err(io::Error::other(reply.status.as_str())) }
}

/// The result of an exchange, which fails if it lasts for longer than a drain and a start.
pub async fn answered<T>(
    what: &str,
    exchange: impl Future<Output = io::Result<T>>,
) -> io::Result<T> {
    let late = |_| Err(io::Error::new(ErrorKind::TimedOut, format!("{what}: no answer")));
    timeout(PATIENCE, Box::pin(exchange)).await.unwrap_or_else(late)
}

/// Without an answer of the draining process, the new one fails, and no process serves.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn start_beside_a_process_that_drains_serves_and_has_the_admin_endpoint() {
    for mode in ["L4", "L7"] {
        for flags in [&["--take-over"][..], &[]] {
            let what = format!("{mode} {flags:?}");
            let (mut setup, client, mut watch) = setup_with_watch(mode).await;
            setup.process.signal("TERM");
            until_drains(&setup).await;
            let start = Instant::now();
            let mut new = setup.start(flags);
            expect_admin(&setup, &mut new, &what).await;
            request(&setup).await.unwrap();
            println!("{what}: serves after {:?}", start.elapsed());
            if mode == "L4" {
                assert!(setup.process.is_running(), "{what}: the drain lasts");
                assert_eq!(client.get(CONFIGMAPS).await.unwrap().status, 200, "{what}");
                let line = new.wait_output("starting beside a process that drains").await;
                assert!(line.contains(" admin_sockets=1"), "{line}");
                let sent = "only the socket of the admin endpoint sent to a new process";
                let line = setup.process.wait_output(sent).await;
                assert!(line.contains(" admin_sockets=1"), "{line}");
                assert!(!setup.process.output().contains("all listening sockets"), "{what}");
                setup.process.wait_output("handed over: this process drains and ends").await;
            }
            // The second signal ends the drain.
            setup.process.signal("TERM");
            while let Ok(Some(_)) = watch.next().await {}
            let mut old = setup.replace(new);
            assert!(old.wait_exit().await.success(), "{what}:\n{}", old.output());
            // The next process can replace this one.
            let next = setup.start(&["--take-over"]);
            let mut old = setup.replace(next);
            assert!(old.wait_exit().await.success(), "{what}:\n{}", old.output());
        }
    }
}

/// A process accepts connections before its takeover socket is open.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn takeover_succeeds_when_the_socket_of_a_serving_process_opens_late() {
    let mut setup = Setup::new(1, 2).await;
    let socket = setup.state_dir().join("take-over.sock");
    let unopened = setup.state_dir().join("unopened.sock");
    std::fs::rename(&socket, &unopened).unwrap();
    let mut new = setup.start(&["--take-over"]);
    new.wait_output("no process to take over from").await;
    std::fs::rename(&unopened, &socket).unwrap();
    new.wait_output("taken over: this process accepts connections").await;
    expect_admin(&setup, &mut new, "late socket").await;
    request(&setup).await.unwrap();
    let mut old = setup.replace(new);
    assert!(old.wait_exit().await.success(), "{}", old.output());
}

/// The test is the new process. Its message arrives when the old process drains already.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn termination_signal_between_sockets_and_serving_does_not_delay_the_answer() {
    let (mut setup, _client, _watch) = setup_with_watch("L4").await;
    let mut stream = UnixStream::connect(setup.state_dir().join("take-over.sock")).unwrap();
    stream.write_all(b"jackstay take-over 1\n").unwrap();
    setup.process.wait_output("all listening sockets sent to a new process").await;
    setup.process.signal("TERM");
    setup.process.wait_output("draining").await;
    stream.write_all(b"serving\n").unwrap();
    stream.set_read_timeout(Some(SERVES)).unwrap();
    let mut answers = String::new();
    stream.read_to_string(&mut answers).unwrap();
    // Each descriptor has one byte.
    assert_eq!(answers, "sockets 3\nDDDleft\nown\n");
    assert!(setup.process.is_running(), "the drain lasts");
}

/// The old process ends while the new one waits for a usable endpoint.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn new_process_serves_the_sockets_of_a_process_that_has_ended() {
    let mut setup = Setup::new(1, 2).await;
    setup.cluster.servers[0].stop();
    let mut new = setup.start(&["--take-over"]);
    setup.process.wait_output("all listening sockets sent to a new process").await;
    setup.process.signal("TERM");
    setup.process.signal("TERM");
    // It waits in the accept queue.
    let _connection = std::net::TcpStream::connect(setup.address).unwrap();
    assert!(setup.process.wait_exit().await.success());
    new.wait_output("taken over: this process accepts connections").await;
    expect_admin(&setup, &mut new, "after the signal").await;
    setup.cluster.servers[0].cont();
    until_within(SERVES, "requests succeed", async || request(&setup).await.is_ok()).await;
}

/// With several workers the kernel would let the new process share the addresses.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn start_beside_a_stopped_process_fails_with_its_pid() {
    for workers in [1, 2] {
        let setup = Setup::new(1, workers).await;
        setup.process.signal("STOP");
        for flags in [&["--take-over"][..], &[]] {
            let start = Instant::now();
            let mut new = setup.start(flags);
            assert_eq!(new.wait_exit().await.code(), Some(1), "{}", new.output());
            assert!(start.elapsed() < FAILS, "{flags:?}: {:?}", start.elapsed());
            let pid = setup.process.pid();
            let line = new.wait_output("does not respond (stopped?)").await;
            assert!(line.contains(&format!("`kill -KILL {pid}` ends it")), "{line}");
            assert!(!line.contains("continues to serve"), "{line}");
        }
        setup.process.signal("CONT");
    }
}

/// A process of an older version does not answer during its drain, and keeps its admin endpoint.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn start_beside_a_silent_process_without_listeners_gets_the_admin_address_when_it_is_free() {
    for flags in [&["--take-over"][..], &[]] {
        start_beside_a_silent_process(flags).await;
    }
}

async fn start_beside_a_silent_process(flags: &[&str]) {
    let (setup, _state, _silent) = silent_predecessor().await;
    let admin = TcpListener::bind(setup.config.admin.bind).unwrap();
    let mut new = setup.start(flags);
    new.wait_output("starting beside it").await;
    new.wait_output("the admin endpoint waits").await;
    until_within(SERVES, "requests succeed", async || request(&setup).await.is_ok()).await;
    drop(admin);
    let line = new.wait_output("the admin endpoint listens: its address is free").await;
    let fields = format!(" address={} pid={}", setup.config.admin.bind, new.pid());
    assert!(line.ends_with(&fields), "two processes run: {line}");
    expect_admin(&setup, &mut new, "after the other process has ended").await;
    // The takeover socket is that of the new process.
    let mut next = setup.start(&["--take-over"]);
    next.wait_output("taken over: this process accepts connections").await;
}

/// The results of all requests during restarts.
#[derive(Default)]
struct Results {
    succeeded: AtomicUsize,
    refused: AtomicUsize,
    /// Requests on kept connections that were reset.
    reset: AtomicUsize,
    failures: Mutex<Vec<String>>,
    stop: AtomicBool,
}

impl Results {
    fn record(&self, result: io::Result<()>, may_be_reset: bool) {
        let counter = match result {
            Ok(()) => &self.succeeded,
            Err(error) if error.kind() == ErrorKind::ConnectionRefused => &self.refused,
            Err(error) if may_be_reset && error.kind() != ErrorKind::TimedOut => &self.reset,
            Err(error) => {
                let text = format!("{error}: {:?}", error.get_ref());
                return self.failures.lock().unwrap().push(text);
            }
        };
        counter.fetch_add(1, Relaxed);
    }
}

/// Clients with a new connection for each request, and with kept connections.
const CLIENTS: usize = 4;

/// Drain timeout of the restarts in a loop. L4 connections that outlast it are reset, so it exceeds the longest request
/// on a loaded machine: with 1 s, five runs at once had connections that were reset before their handshake.
const LOOP_DRAIN: Duration = Duration::from_secs(4);

/// Interval of the requests of a client.
const INTERVAL: Duration = Duration::from_millis(5);

/// Restarts with each flag under load. A connection that was accepted is never reset, but for L4 connections that are
/// still open when the drain ends. All other failures are refused connections while no process serves.
async fn restart_in_a_loop(mode: &'static str) {
    let rounds = if long_form() { 50 } else { 10 };
    let mut setup = Setup::with(1, |config| configure(mode, LOOP_DRAIN, config)).await;
    for flags in [&["--take-over"][..], &[]] {
        let results = Arc::<Results>::default();
        let clients: Vec<_> =
            (0..CLIENTS).flat_map(|_| start_clients(&setup, &results, mode)).collect();
        let mut old = Vec::new();
        let mut longest = Duration::ZERO;
        for round in 0..rounds {
            let what = format!("{mode} {flags:?} round {round}");
            let succeeded = results.succeeded.load(Relaxed);
            until_within(SERVES, &format!("{what}: progress"), async || {
                results.succeeded.load(Relaxed) > succeeded + 10
            })
            .await;
            setup.process.signal("TERM");
            let start = Instant::now();
            let mut new = setup.start(flags);
            // A page of the old process may say the same until that handles the signal.
            new.wait_output("INFO listening ").await;
            expect_admin(&setup, &mut new, &what).await;
            until_within(SERVES, &what, async || request(&setup).await.is_ok()).await;
            longest = longest.max(start.elapsed());
            old.push(setup.replace(new));
        }
        results.stop.store(true, Relaxed);
        for client in clients {
            client.await.unwrap();
        }
        for mut process in old {
            assert!(process.wait_exit().await.success(), "{}", process.output());
        }
        let (succeeded, refused) = (results.succeeded.load(Relaxed), results.refused.load(Relaxed));
        let reset = results.reset.load(Relaxed);
        println!(
            "{mode} {flags:?}: {rounds} restarts, the longest {longest:?}; {succeeded} requests succeeded, \
             {refused} connections refused, {reset} requests reset"
        );
        assert_eq!(*results.failures.lock().unwrap(), [""; 0], "{mode} {flags:?}");
        // One request at a time on each kept connection, and each drain ends each of them at most once.
        assert!(reset <= CLIENTS * rounds, "{mode} {flags:?}: {reset} requests reset");
    }
}

/// The rows of `/proc/net/tcp` (proc(5)) for a port, without those in `TIME_WAIT`: states, and bytes in the queues of
/// both ends of each connection.
fn sockets_of_port(port: u16) -> String {
    let end = format!(":{port:04X}");
    let table = std::fs::read_to_string("/proc/net/tcp").unwrap_or_default();
    let rows = table.lines().filter(|row| {
        let mut fields = row.split_whitespace().skip(1);
        let ends: Vec<&str> = fields.by_ref().take(2).collect();
        ends.iter().any(|address| address.ends_with(&end)) && fields.next() != Some("06")
    });
    rows.collect::<Vec<_>>().join("\n")
}

/// Starts one client of each kind.
fn start_clients(
    setup: &Setup,
    results: &Arc<Results>,
    mode: &str,
) -> [tokio::task::JoinHandle<()>; 2] {
    let (address, credentials) = (setup.address, setup.cluster.certs.credentials());
    let recorded = Arc::clone(results);
    let new_connections = tokio::spawn(async move {
        while !recorded.stop.load(Relaxed) {
            recorded.record(get(address, &credentials).await, false);
            pause(INTERVAL).await;
        }
    });
    let (recorded, may_be_reset) = (Arc::clone(results), mode == "L4");
    let client = ReconnectingClient::new(setup, &Arc::default());
    let kept_connection = tokio::spawn(async move {
        while !recorded.stop.load(Relaxed) {
            let mut request = Box::pin(client.request(CONFIGMAPS, None));
            let result = answered("request on a kept connection", request.as_mut()).await;
            // The request still holds its socket, perhaps of a connect.
            if result.as_ref().is_err_and(|error| error.kind() == ErrorKind::TimedOut) {
                println!("{address}, {client}:\n{}", sockets_of_port(address.port()));
            }
            drop(request);
            recorded.record(result.map(drop), may_be_reset);
            pause(INTERVAL).await;
        }
    });
    [new_connections, kept_connection]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn l7_restarts_under_load_reset_no_connection() {
    restart_in_a_loop("L7").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn l4_restarts_under_load_reset_only_connections_whose_drain_ends() {
    restart_in_a_loop("L4").await;
}

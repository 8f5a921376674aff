//! Listeners and upstreams that come, go and move, and what their clients see of it.

use crate::setup::{Setup, Traffic};
use crate::support::{TestCluster, passthrough_config, passthrough_mode, pause, soon, until};
use http::Method;
use jackstay::app::reload::ReloadOutcome;
use jackstay::config::{Config, EndpointAddress};
use jackstay::demo::apiserver::audit::Record;
use jackstay::demo::client::{Client, next_data};
use std::collections::VecDeque;
use std::io::{ErrorKind, Read as _};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;
use tokio::net::TcpStream;

const PATH: &str = "/api/v1/namespaces/default";

async fn is_refused(address: SocketAddr) -> bool {
    TcpStream::connect(address).await.is_err()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_listener_that_goes_lets_its_clients_finish() {
    let mut setup = Setup::with(2, |config| {
        config.shutdown.drain_timeout = Duration::from_secs(8);
        let mut second = config.listeners[0].clone();
        second.name = "second".into();
        config.listeners.push(second);
    })
    .await;
    let address = setup.listener("second").await.unwrap();
    let who = setup.cluster.certs.credentials();
    let client = Client::connect(address, &who).await.unwrap();
    let watch = setup.watch(&client).await;
    watch.is_complete(&setup).await;
    let other = setup.client().await;
    let steady = setup.watch(&other).await;

    // An answer that is under way when the listener goes.
    setup.cluster.servers.iter().for_each(|server| server.delay(Duration::from_millis(500)));
    let asked: u64 = requests(&setup.cluster);
    let slow = tokio::spawn(async move {
        let reply = client.get(PATH).await;
        (client, reply)
    });
    until("the request is under way", async || requests(&setup.cluster) > asked).await;
    let said = setup.change(|config| drop(config.listeners.pop())).await;
    assert_eq!(said, ["listener `second` removed"]);
    until("nobody listens there", async || is_refused(address).await).await;
    let (client, reply) = soon("the answer", slow).await.unwrap();
    assert_eq!(reply.unwrap().status, 200);
    assert_eq!(
        watch.recorder.ended().await,
        Ok(()),
        "cleanly, so that its client goes on without a list"
    );
    until("its connection ends", async || client.is_closed()).await;

    setup.cluster.servers.iter().for_each(|server| server.delay(Duration::ZERO));
    steady.is_complete(&setup).await;
    assert!(setup.listener("second").await.is_none());
    let open = r#"jackstay_downstream_connections{listener="second"}"#;
    until("it counts nothing", async || setup.proxy.metric(open).await < 0.5).await;
}

fn requests(cluster: &TestCluster) -> u64 {
    let seen = cluster.state.audit().select(|record| record.path.ends_with(PATH));
    let running: u64 = cluster.servers.iter().map(|s| s.counters().in_flight.load(Relaxed)).sum();
    seen.len() as u64 + running
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn what_does_not_end_is_cut_when_its_time_is_over() {
    let mut setup = Setup::with(1, |config| {
        config.shutdown.drain_timeout = Duration::from_secs(1);
        let mut second = config.listeners[0].clone();
        second.name = "second".into();
        config.listeners.push(second);
    })
    .await;
    let address = setup.listener("second").await.unwrap();
    let client = Client::connect(address, &setup.cluster.certs.credentials()).await.unwrap();
    // A watch from nowhere has no clean end before it has seen its initial state.
    let watch = client.send(Method::GET, &format!("{PATH}/configmaps?watch=1"), &[], "").await;
    let mut body = watch.unwrap().into_body();
    setup.change(|config| drop(config.listeners.pop())).await;
    let end = soon("the cut", async {
        loop {
            match next_data(&mut body).await {
                Ok(Some(_)) => {}
                Ok(None) => break Ok(()),
                Err(error) => break Err(error),
            }
        }
    })
    .await;
    assert!(end.is_err(), "a clean end would make a partial state look complete");
    let upstream = r#"jackstay_watches{listener="second"}"#;
    until("nothing of it is left", async || setup.proxy.metric(upstream).await < 0.5).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_listener_moves_and_its_connections_stay() {
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
    // The certificate is not for that address; that somebody is there is enough.
    assert!(!is_refused(new).await);
    traffic.goes_on().await;
    watch.is_complete(&setup).await;
    assert_eq!(client.get(PATH).await.unwrap().status, 200);
    traffic.end().await;
}

/// The new address holds the old one, or the other way round: both on one port for a moment.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_listener_moves_to_every_address_and_back() {
    let mut setup = Setup::new(2).await;
    let narrow = setup.proxy.addr;
    let wide = SocketAddr::new(std::net::Ipv4Addr::UNSPECIFIED.into(), narrow.port());
    let mut other = narrow;
    other.set_ip("127.0.0.2".parse().unwrap());
    setup.change(|config| config.listeners[0].bind = vec![narrow]).await;
    let traffic = Traffic::start(&setup, 100).await;
    let client = setup.client().await;
    let watch = setup.watch(&client).await;
    let knocking = Knocking::at(narrow);
    for _ in 0..3 {
        setup.change(|config| config.listeners[0].bind = vec![wide]).await;
        assert!(!is_refused(other).await);
        traffic.goes_on().await;
        setup.change(|config| config.listeners[0].bind = vec![narrow]).await;
        until("the rest is closed", async || is_refused(other).await).await;
        watch.is_complete(&setup).await;
    }
    knocking.was_let_in();
    let new = setup.client().await;
    assert_eq!(new.get(PATH).await.unwrap().status, 200);
    traffic.end().await;
}

/// The same of the admin endpoint.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn the_admin_endpoint_moves_to_every_address_and_back() {
    let mut setup = Setup::new(1).await;
    let narrow = setup.proxy.admin;
    let wide = SocketAddr::new(std::net::Ipv4Addr::UNSPECIFIED.into(), narrow.port());
    let knocking = Knocking::at(narrow);
    for _ in 0..4 {
        for bind in [wide, narrow] {
            setup.change(|config| config.admin.bind = bind).await;
            assert!(setup.proxy.page("/readyz").await.starts_with("HTTP/1.1 200"));
        }
    }
    knocking.was_let_in();
}

/// Connects again and again, faster than any client, and says nothing.
struct Knocking {
    over: Arc<AtomicBool>,
    thread: std::thread::JoinHandle<[usize; 3]>,
}

impl Knocking {
    fn at(address: SocketAddr) -> Self {
        let over = Arc::new(AtomicBool::new(false));
        let is_over = Arc::clone(&over);
        let thread = std::thread::spawn(move || {
            let [mut knocks, mut refused, mut reset] = [0; 3];
            let is_reset = |mut stream: std::net::TcpStream| {
                stream.set_nonblocking(true).unwrap();
                let read = stream.read(&mut [0]);
                usize::from(read.is_err_and(|error| error.kind() != ErrorKind::WouldBlock))
            };
            let mut open = VecDeque::new();
            while !is_over.load(Relaxed) {
                knocks += 1;
                match std::net::TcpStream::connect(address) {
                    Ok(stream) => open.push_back(stream),
                    Err(_) => refused += 1,
                }
                // What becomes of one is seen later.
                if open.len() > 50 {
                    reset += open.pop_front().map_or(0, is_reset);
                }
            }
            reset += open.into_iter().map(is_reset).sum::<usize>();
            [knocks, refused, reset]
        });
        Self { over, thread }
    }

    #[track_caller]
    fn was_let_in(self) {
        self.over.store(true, Relaxed);
        let [knocks, refused, reset] = self.thread.join().unwrap();
        assert!(knocks > 0);
        assert_eq!([refused, reset], [0, 0], "refused and reset, of {knocks} connections");
    }
}

/// One that is named anew takes its socket along: whoever connects meanwhile waits in its queue.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_listener_that_is_renamed_keeps_its_socket() {
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
    assert_eq!(watch.recorder.ended().await, Ok(()), "its listener is another one");
    let after = setup.client().await;
    assert_eq!(after.get(PATH).await.unwrap().status, 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_listener_turns_from_one_mode_into_the_other() {
    let mut setup = Setup::new(1).await;
    let address = setup.proxy.addr;
    setup.change(|config| config.listeners[0].bind = vec![address]).await;
    let terminated = setup.config.clone();
    let passed = passthrough_config(terminated.clone());
    let admin = setup.cluster.certs.credentials();
    for _ in 0..2 {
        setup.change(|config| *config = passed.clone()).await;
        // End to end: the certificate of the server itself is seen, and ours is not needed.
        let client = soon("a flow", Client::connect(address, &admin)).await.unwrap();
        assert_eq!(client.get(PATH).await.unwrap().status, 200);
        assert_eq!(setup.proxy.status().await["listeners"][0]["mode"], "passthrough");
        setup.change(|config| *config = terminated.clone()).await;
        let client = soon("a connection", Client::connect(address, &admin)).await.unwrap();
        assert_eq!(client.get(PATH).await.unwrap().status, 200);
        assert_eq!(setup.proxy.status().await["listeners"][0]["mode"], "terminate");
    }
}

/// What a socket was bound with is changed where it is: an address that stays is never let go.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_listener_is_bound_otherwise_at_the_same_address() {
    let mut setup = Setup::new(1).await;
    let address = setup.proxy.addr;
    setup
        .change(|config| {
            *config = passthrough_config(config.clone());
            config.listeners[0].bind = vec![address];
        })
        .await;
    let admin = setup.cluster.certs.credentials();
    let steady = Client::connect(address, &admin).await.unwrap();
    for freebind in [true, false] {
        let said = setup.change(|config| config.listeners[0].freebind = freebind).await;
        assert_eq!(said, ["listener `apiserver` changed"]);
        let client = soon("a flow", Client::connect(address, &admin)).await.unwrap();
        assert_eq!(client.get(PATH).await.unwrap().status, 200);
    }
    let transparent = |to| move |config: &mut Config| passthrough_mode(config).transparent = to;
    match setup.reload(transparent(true)).await {
        ReloadOutcome::Ok { .. } => {
            let direct = soon("an end", Client::connect(address, &admin)).await;
            assert!(direct.is_err(), "nobody has redirected it");
        }
        // Not as root.
        ReloadOutcome::Failed { errors } => {
            assert!(errors[0].contains("CAP_NET_ADMIN"), "{errors:?}");
            let client = soon("a flow", Client::connect(address, &admin)).await.unwrap();
            assert_eq!(client.get(PATH).await.unwrap().status, 200);
        }
    }
    setup.change(transparent(false)).await;
    let client = soon("a flow", Client::connect(address, &admin)).await.unwrap();
    assert_eq!(client.get(PATH).await.unwrap().status, 200);
    assert_eq!(steady.get(PATH).await.unwrap().status, 200, "a flow goes the way that it found");
}

/// The listener's requests go elsewhere from one request to the next, on the same connections.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_listener_leads_elsewhere() {
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
    traffic.goes_on().await;
    let by_clients = |record: &Record| record.server == "server-1" && record.path != "/readyz";
    assert_eq!(setup.cluster.state.audit().select(by_clients).len(), 0);

    setup.change(|config| config.listeners[0].upstream = "second".into()).await;
    traffic.goes_on().await;
    assert_eq!(watch.recorder.ended().await, Ok(()), "what it saw there may not exist here");
    assert!(!client.is_closed());
    let again = setup.watch(&client).await;
    let on = |server: usize| setup.cluster.servers[server].counters().watches.load(Relaxed);
    until("it is there", async || (on(0), on(1)) == (0, 1)).await;
    again.is_complete(&setup).await;

    // The one that nobody uses goes, with all of its connections.
    setup.change(|config| drop(config.upstreams.remove(0))).await;
    let open = |server: usize| setup.cluster.servers[server].counters().open.load(Relaxed);
    until("nothing is left of it", async || open(0) == 0).await;
    again.is_complete(&setup).await;
    traffic.end().await;
}

/// Every endpoint replaced at once by a reload.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn all_endpoints_are_replaced_at_once() {
    let mut setup = Setup::with(4, |config| config.upstreams[0].endpoints.truncate(2)).await;
    let all: Vec<EndpointAddress> = setup.cluster.config().upstreams[0].endpoints.clone();
    let traffic = Traffic::start(&setup, 100).await;
    let client = setup.client().await;
    let watch = setup.watch(&client).await;
    for half in [&all[2..], &all[..2], &all[2..]] {
        setup.change(|config| config.upstreams[0].endpoints = half.to_vec()).await;
        traffic.goes_on().await;
        watch.is_complete(&setup).await;
    }
    traffic.end().await;
}

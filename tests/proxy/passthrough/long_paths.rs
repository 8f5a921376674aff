//! Flows to endpoints at a distance and behind packet loss, beside flows to others. These tests need root, Python and a
//! network namespace of their own, as those of [`crate::passthrough::faults`].

use std::net::SocketAddr;
use std::time::Duration;

use jackstay_core::flow_health::LOSSY_SERVER;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;

use crate::passthrough::faults::DropRules;
use crate::passthrough::peer::{Peer, client_hello, exchange};
use crate::support::figures::check_figure;
use crate::support::long_path::LongPath;
use crate::support::stopwatch::Stopwatch;
use crate::support::{Certs, Proxy, passthrough_config, pause};

/// The promised limit for the reset of a dead flow.
const RESET: Duration = Duration::from_secs(3);
/// The round trip of the long path.
const ROUND_TRIP: Duration = Duration::from_millis(300);

/// The address of servers on the long path, and the one at which they are reached.
const FAR: ([u8; 4], [u8; 4]) = ([10, 9, 0, 1], [10, 9, 0, 2]);

/// A server, the address at which jackstay reaches it, and a listener for it alone. All share one worker.
struct Route {
    peer: Peer,
    listener: SocketAddr,
}

impl Route {
    async fn flow(&self) -> (TcpStream, TcpStream) {
        let mut client = TcpStream::connect(self.listener).await.unwrap();
        client.write_all(&client_hello(0)).await.unwrap();
        let mut flow = (client, self.peer.accept().await);
        exchange(&mut flow).await;
        flow
    }

    async fn flows(&self, count: usize) -> Vec<(TcpStream, TcpStream)> {
        let mut flows = Vec::new();
        for _ in 0..count {
            flows.push(self.flow().await);
        }
        flows
    }

    fn drop_rules(&self, condition: &str) -> String {
        let port = self.peer.address.port();
        format!("tcp dport {port} {condition};tcp sport {port} {condition}")
    }

    /// Loses all packets of a new flow. Returns how long it takes until the client is reset.
    async fn time_to_reset(&self) -> Duration {
        let (mut client, server) = self.flow().await;
        let port = server.peer_addr().unwrap().port();
        let rules = format!("tcp dport {port} drop;tcp sport {port} drop");
        let rules = DropRules::named("lost", "input", &rules);
        let start = Stopwatch::start();
        let error = timeout(Duration::from_secs(20), client.read_u8()).await.expect("a reset");
        assert_eq!(error.unwrap_err().kind(), std::io::ErrorKind::ConnectionReset);
        drop((rules, server));
        start.elapsed()
    }
}

/// Peers at these addresses, each behind a listener of its own.
async fn routes<const N: usize>(servers: [([u8; 4], [u8; 4]); N]) -> (Proxy, [Route; N]) {
    let certs = Certs::new();
    let mut peers = Vec::new();
    for (local, remote) in servers {
        let listener = TcpListener::bind(SocketAddr::from((local, 0))).await.unwrap();
        let address = SocketAddr::from((remote, listener.local_addr().unwrap().port()));
        peers.push(Peer { listener, address, certs: Certs::new() });
    }
    let mut config = passthrough_config(certs.config(&[peers[0].address]));
    config.workers = 1;
    // The handshake timeout must not end the flows.
    config.listeners[0].limits_mut().handshake_timeout = Duration::from_secs(60);
    for (index, peer) in peers.iter().enumerate().skip(1) {
        let (mut upstream, mut listener) =
            (config.upstreams[0].clone(), config.listeners[0].clone());
        upstream.name = format!("upstream-{index}");
        upstream.endpoints.clone_from(&certs.config(&[peer.address]).upstreams[0].endpoints);
        listener.name = format!("listener-{index}");
        listener.upstream.clone_from(&upstream.name);
        config.upstreams.push(upstream);
        config.listeners.push(listener);
    }
    let proxy = certs.start(config);
    let status = proxy.status().await;
    let bound = status["listeners"].as_array().unwrap().iter();
    let bound: Vec<SocketAddr> =
        bound.map(|one| one["bind"][0].as_str().unwrap().parse().unwrap()).collect();
    let routes = peers.into_iter().zip(bound).map(|(peer, listener)| Route { peer, listener });
    let routes: Vec<_> = routes.collect();
    (proxy, routes.try_into().unwrap_or_else(|_| panic!("a listener for each")))
}

async fn closed(proxy: &Proxy, listener: &str, reason: &str) -> f64 {
    let labels = format!("listener=\"{listener}\",reason=\"{reason}\"");
    proxy.metric(&format!("jackstay_passthrough_closed_total{{{labels}}}")).await
}

/// The flows of all endpoints are checked by one worker. An endpoint that loses packets, or is far away, changes nothing
/// for the others.
#[tokio::test]
#[ignore = "needs root and a network namespace of its own"]
async fn lossy_and_distant_endpoints_delay_no_reset_at_others() {
    const NEAR: [u8; 4] = [127, 0, 0, 1];
    let _path = LongPath::start("long0", "10.9.0.1/24", ROUND_TRIP);
    let (proxy, [near, lossy, distant]) = routes([(NEAR, NEAR), (NEAR, NEAR), FAR]).await;
    let _quiet = (lossy.flows(20).await, distant.flows(20).await);
    let loss = DropRules::new("input", &lossy.drop_rules("numgen random mod 100 < 10 drop"));
    // Suspicions are refuted.
    pause(Duration::from_secs(10)).await;
    for round in 0..3 {
        let name = format!("beside a lossy and a distant endpoint, round {round}: reset");
        let took = near.time_to_reset().await;
        check_figure(&name, took, RESET);
        assert!(Some(took) < LOSSY_SERVER.idle_after, "judged as a flow on a lossy path: {took:?}");
    }
    // Answers are missed when they are late for the distance.
    let limit = RESET + 3 * ROUND_TRIP;
    check_figure("at 300 ms of distance: reset", distant.time_to_reset().await, limit);
    drop(loss);
    for listener in ["listener-1", "listener-2"] {
        let ended = closed(&proxy, listener, "unanswered").await;
        let of_test = if listener == "listener-2" { 1.0 } else { 0.0 };
        assert!((ended - of_test).abs() < 0.5, "{listener}: {ended} flows were reset");
    }
}

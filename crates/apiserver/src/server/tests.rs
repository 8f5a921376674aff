//! The server on in-memory connections and a paused clock.

mod faults;
mod memory_network;

use self::memory_network::{ADDR, Network, network};
use super::*;
use crate::client::{Client, Credentials, Reply, tls_config};
use crate::kinds::{CONFIG_MAPS, ObjectRef};
use crate::pki::{Subject, Validity};
use crate::timestamps;
use crate::wall_clock::WallClock;
use jackstay_sys::utc;
use rustls::HandshakeKind;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::task::LocalSet;

const MAPS: &str = "/api/v1/namespaces/default/configmaps";
const MAP: ObjectRef<'_> = ObjectRef { kind: &CONFIG_MAPS, namespace: "default", name: "a" };

/// A server with its process.
struct Simulation {
    pki: Pki,
    cluster: Cluster,
    server: ApiServer,
    network: Network,
    credentials: Credentials,
    /// Dropped by SIGKILL.
    process: LocalSet,
}

impl Simulation {
    fn new() -> Self {
        let validity = Validity::usual();
        let pki = Pki::new_ed25519("kubernetes", validity).unwrap();
        let now = utc::wall_clock() + Duration::from_secs(7200);
        let cluster = Cluster::with_clock(WallClock::starting_at(now));
        let host = ADDR.ip().to_string();
        let mut options = Options::named("s1");
        options.certificate = Some(pki.server_for(&[&host], validity).unwrap());
        let server = ApiServer::new(&cluster, &pki, options).unwrap();
        let admin = pki.client(&Subject::admin()).unwrap();
        let credentials = Credentials::anonymous(&pki.ca_pem()).certificate(&admin);
        let (network, listener) = network();
        let process = LocalSet::new();
        process.spawn_local(server.serve(TcpListener::Virtual(Box::new(listener))));
        Self { pki, cluster, server, network, credentials, process }
    }

    fn kill(&mut self) {
        self.process = LocalSet::new();
    }

    fn restart(&mut self) {
        let (network, listener) = network();
        self.network = network;
        self.process.spawn_local(self.server.serve(TcpListener::Virtual(Box::new(listener))));
    }

    /// Lets the process run while the future of a client runs.
    async fn run<T>(&self, client: impl Future<Output = T>) -> T {
        self.process.run_until(client).await
    }

    async fn connect(&self) -> Client {
        let stream = self.network.connect().unwrap();
        self.run(Client::over(stream, ADDR, &self.credentials, true)).await.unwrap()
    }

    async fn get(&self, client: &Client, path: &str) -> Reply {
        self.run(client.get(path)).await.unwrap()
    }

    fn create_map(&self) -> u64 {
        let map = json!({ "metadata": { "name": "a" }, "data": { "k": "0" } });
        self.cluster.create(&CONFIG_MAPS, "default", map, false).unwrap().version
    }

    fn set_map(&self, value: &str) -> u64 {
        let change = |now: &Value| {
            let mut next = now.clone();
            next["data"]["k"] = value.into();
            Ok(next)
        };
        self.cluster.modify(MAP, false, change).unwrap().version
    }
}

#[tokio::test(start_paused = true)]
async fn request_on_a_simulated_connection_has_a_response_with_the_date_of_the_run() {
    let simulation = Simulation::new();
    let client = simulation.connect().await;
    tokio::time::advance(Duration::from_secs(600)).await;
    simulation.create_map();
    let reply = simulation.get(&client, &format!("{MAPS}/a")).await;
    assert_eq!(reply.status, 200);
    let now = simulation.cluster.clock().now();
    assert_eq!(reply.headers["date"], httpdate::fmt_http_date(now));
    let created = timestamps::rfc3339(now);
    assert_eq!(reply.json()["metadata"]["creationTimestamp"], created);
    assert_eq!(simulation.cluster.audit().records()[0].time, now);
}

#[tokio::test(start_paused = true)]
async fn dropped_process_closes_its_connections_and_serves_again_after_a_restart() {
    let mut simulation = Simulation::new();
    let client = simulation.connect().await;
    let mut watch = simulation.run(client.watch(&format!("{MAPS}?watch=1"))).await.unwrap();
    assert_eq!(simulation.server.counters().watches.load(Relaxed), 1);

    simulation.kill();
    let counters = simulation.server.counters();
    let open = [&counters.open, &counters.watches, &counters.in_flight];
    assert_eq!(open.map(|counter| counter.load(Relaxed)), [0; 3], "no task is left");
    assert!(watch.next().await.is_err(), "the watch breaks");
    assert!(client.get("/version").await.is_err());
    assert!(simulation.network.connect().is_none(), "its port is closed");

    simulation.restart();
    let client = simulation.connect().await;
    assert_eq!(simulation.get(&client, "/version").await.status, 200);
}

/// How a TLS handshake was made, and the certificate that the server has.
async fn handshake(
    simulation: &Simulation,
    config: &Arc<rustls::ClientConfig>,
) -> (HandshakeKind, Vec<u8>) {
    let connector = tokio_rustls::TlsConnector::from(config.clone());
    let stream = simulation.network.connect().unwrap();
    let request = async {
        let mut tls = connector.connect(ADDR.ip().into(), stream).await.unwrap();
        tls.write_all(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
        // Tickets come before the response.
        tls.read_u8().await.unwrap();
        let connection = tls.get_ref().1;
        let certificate = connection.peer_certificates().unwrap()[0].to_vec();
        (connection.handshake_kind().unwrap(), certificate)
    };
    Box::pin(simulation.run(request)).await
}

#[tokio::test(start_paused = true)]
async fn tls_sessions_are_resumed_until_a_restart() {
    let mut simulation = Simulation::new();
    let config = Arc::new(tls_config(&simulation.credentials, false).unwrap());
    assert_eq!(handshake(&simulation, &config).await.0, HandshakeKind::Full);
    assert_eq!(handshake(&simulation, &config).await.0, HandshakeKind::Resumed);
    simulation.kill();
    simulation.restart();
    assert_eq!(handshake(&simulation, &config).await.0, HandshakeKind::Full);
}

#[tokio::test(start_paused = true)]
async fn new_certificate_is_shown_on_new_connections() {
    let simulation = Simulation::new();
    let config = || Arc::new(tls_config(&simulation.credentials, false).unwrap());
    let (first, host) = (config(), ADDR.ip().to_string());
    let before = handshake(&simulation, &first).await.1;
    let renewed = simulation.pki.server_for(&[&host], Validity::usual()).unwrap();
    simulation.server.set_certificate(&renewed).unwrap();
    assert_eq!(handshake(&simulation, &config()).await.1, renewed.cert_der().to_vec());
    // The certificate of a resumed session is that of its first handshake.
    assert_eq!(handshake(&simulation, &first).await, (HandshakeKind::Resumed, before));
}

#[tokio::test(start_paused = true)]
async fn process_that_is_not_polled_responds_when_it_goes_on() {
    let simulation = Simulation::new();
    let client = simulation.connect().await;
    let second = Duration::from_secs(1);
    let mut request = Box::pin(client.get("/version"));
    assert!(tokio::time::timeout(second, &mut request).await.is_err(), "not without its process");
    assert_eq!(simulation.run(request).await.unwrap().status, 200);
}

#[tokio::test(start_paused = true)]
async fn drained_server_completes_requests_and_ends_watches_cleanly() {
    let mut simulation = Simulation::new();
    let client = simulation.connect().await;
    let mut watch = simulation.run(client.watch(&format!("{MAPS}?watch=1"))).await.unwrap();
    let (delay, grace) = (Duration::from_millis(300), Duration::from_secs(5));
    simulation.server.set_faults(|faults| faults.delay = delay);
    let started = Instant::now();
    let (reply, probe, ()) = simulation
        .run(async {
            tokio::join!(client.get(MAPS), client.get("/readyz"), async {
                tokio::time::sleep(delay / 2).await;
                simulation.server.drain(grace);
            })
        })
        .await;
    assert_eq!((reply.unwrap().status.as_u16(), probe.unwrap().status.as_u16()), (200, 500));
    assert_eq!(simulation.run(watch.next()).await.unwrap(), None, "watches end cleanly");
    drop(client);
    std::mem::take(&mut simulation.process).await;
    assert!(started.elapsed() < grace, "it ends when its connections have ended");
    assert!(simulation.network.connect().is_none(), "its port is closed");
}

#[tokio::test(start_paused = true)]
async fn handshakes_with_ed25519_have_a_fixed_length() {
    let simulation = Simulation::new();
    let mut lengths = Vec::new();
    for _ in 0..20 {
        let stream = simulation.network.connect().unwrap();
        let bytes = stream.bytes();
        let connected = Client::over(stream, ADDR, &simulation.credentials, true);
        let client = simulation.run(connected).await.unwrap();
        assert_eq!(simulation.get(&client, "/livez").await.status, 200);
        lengths.push(bytes.sum());
    }
    lengths.dedup();
    assert_eq!(lengths.len(), 1, "{lengths:?}");
}

//! The real data plane in this process, in front of whatever a test gives it.

#![allow(dead_code)] // each test crate uses its part

pub mod child;
pub mod figures;
pub mod netns;
pub mod stopwatch;
pub mod wait;
pub mod wire;

#[allow(unused_imports)] // each test crate uses its part
pub use wait::{PATIENCE, pass, soon, until};

use jackstay::app::{App, Running};
use jackstay::config::{
    AccessLog, Admin, CertPaths, Config, Connections, Discovery, EndpointAddress, Health, Level,
    Limits, Listener, Log, LogFormat, Mode, Passthrough, Readyz, RequestLimits, Shutdown,
    Terminate, Upstream, UpstreamTls, UsedBy,
};
use jackstay::demo::apiserver::cluster::Cluster;
use jackstay::demo::apiserver::{self, ApiServerHandle, Options};
use jackstay::demo::client::{Client, Credentials};
use jackstay::demo::faulty_relay::FaultyRelay;
use jackstay::demo::pki::{Issued, Pki, Subject};
use serde_json::{Value, json};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

pub const MAPS: &str = "/api/v1/namespaces/default/configmaps";

/// Certificates for everybody, on disk where jackstay reads them.
pub struct Certs {
    pub pki: Pki,
    pub dir: tempfile::TempDir,
    /// The client's certificate, and the identity that is configured for it.
    pub admin: Issued,
    /// What jackstay asks for `/readyz` with, so that a peer can tell its probes from requests.
    pub probe: Issued,
    ca_file: PathBuf,
    serving: CertPaths,
    identity: CertPaths,
    probing: CertPaths,
}

impl Certs {
    pub fn new() -> Self {
        let pki = Pki::new("demo").unwrap();
        let dir = tempfile::tempdir().unwrap();
        let admin = pki.client(&Subject::admin()).unwrap();
        let probe = pki.client(&Subject::new("probe", &[])).unwrap();
        let ca_file = pki.write_ca(dir.path()).unwrap();
        let paths = |(cert_file, key_file)| CertPaths { cert_file, key_file };
        let serving = paths(pki.server().unwrap().write_to(dir.path(), "serving").unwrap());
        let identity = paths(admin.write_to(dir.path(), "admin").unwrap());
        let probing = paths(probe.write_to(dir.path(), "probe").unwrap());
        Self { pki, dir, admin, probe, ca_file, serving, identity, probing }
    }

    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// A client with the certificate of the configured identity.
    pub fn credentials(&self) -> Credentials {
        self.nobody().certificate(&self.admin)
    }

    pub fn nobody(&self) -> Credentials {
        Credentials::anonymous(&self.pki.ca_pem())
    }

    /// The defaults of jackstay, with readiness asked every second.
    pub fn config(&self, endpoints: &[SocketAddr]) -> Config {
        Config {
            admin: Admin { bind: (Ipv4Addr::LOCALHOST, 0).into(), socket: None },
            state_dir: None,
            workers: 1,
            mark: 0,
            log: Log { level: Level::Info, format: LogFormat::Text, access: AccessLog::Errors },
            shutdown: Shutdown { drain_timeout: Duration::from_secs(2) },
            upstreams: vec![Upstream {
                name: "control-plane".into(),
                endpoints: endpoints
                    .iter()
                    .map(|a| EndpointAddress { host: a.ip().to_string(), port: a.port() })
                    .collect(),
                endpoints_file: None,
                discovery: Discovery::default(),
                tls: UpstreamTls { ca_file: Some(self.ca_file.clone()), server_name: None },
                used_by: UsedBy { terminate: true, passthrough: false },
                connections: Connections { min: 1, max: 64, max_streams: 100 },
                rebalance: true,
                health: Health {
                    ping_interval: Duration::from_secs(1),
                    suspect_after: None,
                    dead_after: Duration::from_secs(2),
                    tunnel_dead_after: Duration::from_secs(20),
                    connect_timeout: Duration::from_secs(3),
                    readyz: Readyz {
                        path: "/readyz".into(),
                        interval: Duration::from_secs(1),
                        timeout: Duration::from_secs(1),
                        rise: 2,
                        fall: 2,
                        cert: Some(self.probing.clone()),
                        token_file: None,
                    },
                },
            }],
            listeners: vec![Listener {
                freebind: false,
                name: "apiserver".into(),
                bind: vec![(Ipv4Addr::LOCALHOST, 0).into()],
                upstream: "control-plane".into(),
                mode: Mode::Terminate(Terminate {
                    tls: self.serving.clone(),
                    issuer: None,
                    client_ca_file: Some(self.ca_file.clone()),
                    identities: vec![self.identity.clone()],
                    resume_groups: Vec::new(),
                    limits: RequestLimits {
                        max_streams: 1000,
                        max_header_bytes: 64 << 10,
                        header_timeout: Duration::from_secs(60),
                        stall_timeout: Duration::from_secs(60),
                    },
                }),
                limits: Limits { max_connections: 1000, handshake_timeout: Duration::from_secs(5) },
            }],
        }
    }

    /// Starts the data plane.
    #[allow(clippy::unused_self)] // its files must live: they are read again when they change
    pub fn start(&self, config: Config) -> Proxy {
        if std::env::var_os("JACKSTAY_TEST_LOG").is_some() {
            let _ = tracing_subscriber::fmt()
                .with_max_level(tracing_subscriber::filter::LevelFilter::DEBUG)
                .try_init();
        }
        let app = App::bind(config).unwrap();
        let addr = app.listener_addresses("apiserver")[0];
        let admin = app.admin_address().unwrap();
        Proxy { addr, admin, running: app.start().unwrap() }
    }
}

/// What the first listener of a configuration terminates with.
pub fn terminate(config: &mut Config) -> &mut Terminate {
    match &mut config.listeners[0].mode {
        Mode::Terminate(terminate) => terminate,
        Mode::Passthrough(_) => panic!("the first listener passes through"),
    }
}

/// A configuration whose listener passes connections through.
pub fn passing(mut config: Config) -> Config {
    config.listeners[0].mode = Mode::Passthrough(Passthrough {
        destinations: vec![],
        transparent: false,
        routes: Vec::new(),
        idle_timeout: None,
        leave_timeout: Duration::from_secs(3600),
        rebalance: false,
    });
    config.upstreams[0].used_by = UsedBy { terminate: false, passthrough: true };
    config
}

/// A configuration that suspects nobody soon: for tests that count what each server was asked. On a
/// busy machine a PONG takes longer than 100 ms, and a read is hedged then, rightly.
pub fn patient(mut config: Config) -> Config {
    let health = &mut config.upstreams[0].health;
    health.suspect_after = Some(PATIENCE / 2);
    health.dead_after = PATIENCE;
    health.readyz.timeout = PATIENCE / 2;
    config
}

/// How the first listener of a configuration passes connections through.
pub fn passthrough(config: &mut Config) -> &mut Passthrough {
    match &mut config.listeners[0].mode {
        Mode::Passthrough(passthrough) => passthrough,
        Mode::Terminate(_) => panic!("the first listener terminates TLS"),
    }
}

/// A running data plane.
pub struct Proxy {
    pub addr: SocketAddr,
    pub admin: SocketAddr,
    pub running: Running,
}

impl Proxy {
    pub async fn client(&self, who: &Credentials) -> Client {
        Client::connect(self.addr, who).await.unwrap()
    }

    /// A page of the admin endpoint.
    pub async fn page(&self, path: &str) -> String {
        let mut stream = TcpStream::connect(self.admin).await.unwrap();
        let request =
            format!("GET {path} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n\r\n", self.admin);
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    }

    pub async fn status(&self) -> Value {
        self.json("/status").await
    }

    pub async fn json(&self, path: &str) -> Value {
        let page = self.page(path).await;
        let json = page.split_once("\r\n\r\n").map_or("", |(_, body)| body);
        serde_json::from_str(json).unwrap_or_else(|e| panic!("{e}: {page}"))
    }

    /// The connections of clients that were ever lost and why, as `/events` tells it: also those that
    /// came and went between two looks at `/status`.
    pub async fn lost_connections(&self) -> Vec<String> {
        let lost = |event: &&Value| {
            event["kind"] == "connection"
                && (event["to"] == "dead" || event["to"] == "draining")
                && !event["detail"].as_str().unwrap().starts_with("class probe")
        };
        let tell = |event: &Value| {
            let (to, why, detail) = (&event["to"], &event["reason"], &event["detail"]);
            format!("{} to {to}: {why}, {} times ({detail})", event["name"], event["times"])
        };
        let events = self.json("/events").await;
        let events = events["events"].as_array().unwrap();
        events.iter().filter(lost).map(tell).collect()
    }

    /// The endpoints in `/status`.
    pub async fn endpoints(&self) -> Vec<Value> {
        self.status().await["upstreams"][0]["endpoints"].as_array().unwrap().clone()
    }

    /// The live connections of an identity, by local address.
    pub async fn connections(&self, class: &str) -> Vec<String> {
        let mut found = Vec::new();
        for endpoint in self.endpoints().await {
            for connection in endpoint["connections"].as_array().unwrap() {
                if connection["class"].as_str().unwrap().starts_with(class)
                    && connection["state"] == "live"
                {
                    found.push(connection["local"].as_str().unwrap().to_owned());
                }
            }
        }
        found.sort();
        found
    }

    /// Waits until that many endpoints are ready.
    pub async fn usable(&self, count: usize) {
        until("endpoints are ready", async || {
            self.endpoints().await.iter().filter(|e| e["state"] == "ready").count() >= count
        })
        .await;
    }

    /// Waits until that many endpoints are ready and carry a connection for the identity.
    pub async fn ready(&self, count: usize) {
        until("endpoints are ready", async || {
            let endpoints = self.endpoints().await;
            let ready = |e: &&Value| {
                e["state"] == "ready"
                    && e["connections"].as_array().unwrap().iter().any(|c| {
                        c["state"] == "live" && c["class"].as_str().unwrap().starts_with("identity")
                    })
            };
            endpoints.iter().filter(ready).count() >= count
        })
        .await;
    }

    /// The value of a metric, all its series added up.
    pub async fn metric(&self, name: &str) -> f64 {
        let page = self.page("/metrics").await;
        page.lines()
            .filter(|line| line.starts_with(name))
            .filter_map(|line| line.rsplit_once(' ')?.1.parse::<f64>().ok())
            .sum()
    }
}

/// A demo cluster with servers, and the data plane in front of them.
pub struct World {
    pub certs: Certs,
    pub cluster: Cluster,
    pub servers: Vec<ApiServerHandle>,
}

impl World {
    pub fn new(servers: usize) -> Self {
        let (certs, cluster) = (Certs::new(), Cluster::new());
        let start = |index| {
            let options = Options::named(&format!("server-{index}"));
            apiserver::start(&cluster, &certs.pki, options).unwrap()
        };
        let servers = (0..servers).map(start).collect();
        Self { certs, cluster, servers }
    }

    pub fn addresses(&self) -> Vec<SocketAddr> {
        self.servers.iter().map(|server| server.addr).collect()
    }

    pub fn config(&self) -> Config {
        self.certs.config(&self.addresses())
    }

    pub async fn start(&self) -> Proxy {
        self.start_with(|_| {}).await
    }

    pub async fn start_with(&self, change: impl FnOnce(&mut Config)) -> Proxy {
        let mut config = self.config();
        change(&mut config);
        let proxy = self.certs.start(config);
        proxy.ready(self.servers.len()).await;
        proxy
    }
}

impl World {
    /// The data plane, and a relay before each server whose flows can fall silent.
    pub async fn start_behind_holes(&self) -> (Vec<FaultyRelay>, Proxy) {
        let hole = |server: &ApiServerHandle| FaultyRelay::start(server.addr).unwrap();
        let holes: Vec<_> = self.servers.iter().map(hole).collect();
        let addresses: Vec<_> = holes.iter().map(|hole| hole.addr).collect();
        let proxy = self.certs.start(self.certs.config(&addresses));
        proxy.ready(holes.len()).await;
        (holes, proxy)
    }
}

/// An address that refuses connections. It stays bound, so that nobody else is given it; whoever
/// knows it may listen there.
pub fn refusing() -> SocketAddr {
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    socket.set_reuse_address(true).unwrap();
    socket.bind(&SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into()).unwrap();
    let address = socket.local_addr().unwrap().as_socket().unwrap();
    std::mem::forget(socket);
    address
}

/// A config map.
pub fn map(name: &str, value: &str) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": { "name": name, "namespace": "default", "labels": { "v": value } },
        "data": { "v": value },
    })
}

/// Whether the long form of the tests is asked for.
pub fn long() -> bool {
    std::env::var_os("JACKSTAY_LONG").is_some()
}

/// The HTTP/2 error at the bottom of an error of the client, if there is one.
pub fn h2_error(error: &std::io::Error) -> Option<&h2::Error> {
    let mut source: Option<&(dyn std::error::Error + 'static)> = Some(error.get_ref()?);
    while let Some(inner) = source {
        if let Some(h2) = inner.downcast_ref::<h2::Error>() {
            return Some(h2);
        }
        source = inner.source();
    }
    None
}

/// Addresses as a file of endpoints has them.
pub fn strings(addresses: &[SocketAddr]) -> Vec<String> {
    addresses.iter().map(ToString::to_string).collect()
}

/// Writes a file as operators' tools do: a new one, renamed over the old.
pub fn replace(path: &Path, text: &str) {
    let new = path.with_extension("new");
    std::fs::write(&new, text).unwrap();
    std::fs::rename(&new, path).unwrap();
}

/// Runs futures side by side; the crate has no dependency that does.
pub async fn join_all<F: Future>(futures: impl IntoIterator<Item = F>) -> Vec<F::Output> {
    let mut all: Vec<_> = futures.into_iter().map(|f| (Box::pin(f), None)).collect();
    std::future::poll_fn(|cx| {
        let mut done = true;
        for (future, output) in &mut all {
            if output.is_none() {
                match future.as_mut().poll(cx) {
                    std::task::Poll::Ready(value) => *output = Some(value),
                    std::task::Poll::Pending => done = false,
                }
            }
        }
        if done { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
    })
    .await;
    all.into_iter().map(|(_, output)| output.expect("polled to its end")).collect()
}

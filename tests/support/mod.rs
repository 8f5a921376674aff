//! Runs the real data plane in the process of the test, in front of demo apiservers or of other upstreams.

#![allow(dead_code)] // each test crate uses a part

pub mod balancer;
pub mod long_path;
pub mod versioned_client;

#[allow(unused_imports)] // each test crate uses a part
pub use futures_util::future::join_all;
#[allow(unused_imports)] // each test crate uses a part
pub use jackstay_testkit::wait::{PATIENCE, pause, soon, until};
#[allow(unused_imports)] // each test crate uses a part
pub use jackstay_testkit::{
    child, figures, http2, netns, pages, peers, stopwatch, tls, wait, watch_recorder, wire,
};

use http::Method;
use hyper::body::Incoming;
use jackstay::app::{App, Running};
use jackstay::observe::Metrics;
use jackstay::upstream;
use jackstay_apiserver as apiserver;
use jackstay_apiserver::client::{Client, Credentials, next_data};
use jackstay_apiserver::cluster::Cluster;
use jackstay_apiserver::faulty_relay::FaultyRelay;
use jackstay_apiserver::kinds::CONFIG_MAPS;
use jackstay_apiserver::pki::{Issued, Pki, Subject};
use jackstay_apiserver::{ApiServerHandle, Options};
use jackstay_config::{
    AccessLog, Admin, CertPaths, Compression, Config, Connections, ConsistentReads, Discovery,
    EndpointKind, EndpointPreference, FlowSettings, Health, Level, Limits, Listener, Log,
    LogFormat, MemoryLimit, Mode, Passthrough, Percent, Readyz, RequestLimits, SOURCE_PREFIX_V6,
    Sandbox, Seccomp, ServingCert, Shutdown, Switch, Terminate, TerminateLimits, Upstream,
    UpstreamTls, UsedBy, VersionPreference,
};
use jackstay_core::admission::{DEFAULT_LIMIT, MemoryBudget};
use jackstay_core::discovery::address::EndpointAddress;
use jackstay_core::request::path_prefix::PathPrefix;
use jackstay_net::loaded_files::LoadedFiles;
use serde_json::{Value, json};
use std::cell::OnceCell;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;
use watch_recorder::WatchRecorder;
use wire::Wire;

/// The collection of config maps in the namespace `default`.
pub const CONFIGMAPS: &str = "/api/v1/namespaces/default/configmaps";

/// A CA, and the certificates that it issued to clients, servers and jackstay. jackstay reads them as files.
pub struct Certs {
    pub pki: Pki,
    pub dir: tempfile::TempDir,
    /// The certificate of the default client. jackstay uses the same one as its configured identity.
    pub admin: Issued,
    /// The certificate of the `/readyz` prober. Peers tell probes from requests by it.
    pub probe: Issued,
    ca_file: PathBuf,
    serving: CertPaths,
    identity: CertPaths,
    probing: CertPaths,
}

impl AsRef<Pki> for Certs {
    fn as_ref(&self) -> &Pki {
        &self.pki
    }
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
        self.anonymous().certificate(&self.admin)
    }

    /// A client without credentials.
    pub fn anonymous(&self) -> Credentials {
        Credentials::anonymous(&self.pki.ca_pem())
    }

    /// A configuration with one listener, which terminates TLS, and one upstream with these endpoints. Unlike
    /// with the defaults, `/readyz` is probed every second, and a drain lasts 2 s.
    pub fn config(&self, endpoints: &[SocketAddr]) -> Config {
        Config {
            admin: Admin::new((Ipv4Addr::LOCALHOST, 0).into(), None),
            state_dir: None,
            workers: 1,
            identity_lane: true,
            mark: 0,
            memory_limit: MemoryLimit::Auto,
            log: Log { level: Level::Info, format: LogFormat::Text, access: AccessLog::Errors },
            shutdown: Shutdown { drain_timeout: Duration::from_secs(2) },
            // A process that makes a system call outside of the list dies, and its test fails.
            sandbox: Sandbox {
                not_dumpable: Switch::On,
                no_new_privs: Switch::On,
                seccomp: Seccomp::Kill,
                landlock: Switch::On,
            },
            upstreams: vec![Upstream {
                // Tests count connections.
                kind: EndpointKind::Apiserver,
                prefer: EndpointPreference::None,
                compression: Compression::Auto,
                consistent_reads: ConsistentReads::Floor,
                name: "control-plane".into(),
                path_prefix: PathPrefix::default(),
                authority: None,
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
                version_preference: VersionPreference::None,
                canary: Percent::ZERO,
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
                transparent: false,
                name: "apiserver".into(),
                bind: vec![(Ipv4Addr::LOCALHOST, 0).into()],
                upstream: "control-plane".into(),
                mode: Mode::Terminate(Terminate {
                    tls: ServingCert { paths: self.serving.clone(), issuer: None },
                    client_ca_file: Some(self.ca_file.clone()),
                    identities: vec![self.identity.clone().into()],
                    never_resume_groups: Vec::new(),
                    heartbeats: Vec::new(),
                    passed_through: None,
                    limits: TerminateLimits {
                        connections: limits(),
                        requests: RequestLimits {
                            max_streams: 1000,
                            max_header_bytes: 64 << 10,
                            header_timeout: Duration::from_secs(60),
                            stall_timeout: Duration::from_secs(60),
                        },
                    },
                }),
            }],
        }
    }

    /// Starts the data plane. `self` must outlive it, because jackstay reloads the files of `self`.
    pub fn start(&self, config: Config) -> Proxy {
        if std::env::var_os("JACKSTAY_TEST_LOG").is_some() {
            let _ = tracing_subscriber::fmt()
                .with_max_level(tracing_subscriber::filter::LevelFilter::DEBUG)
                .try_init();
        }
        Proxy::start(App::bind(config).unwrap(), self)
    }
}

fn limits() -> Limits {
    Limits {
        max_connections: 1000,
        source_prefix_v6: SOURCE_PREFIX_V6,
        handshake_timeout: Duration::from_secs(5),
    }
}

/// The settings of the first listener, which terminates TLS.
pub fn terminate_mode(config: &mut Config) -> &mut Terminate {
    match &mut config.listeners[0].mode {
        Mode::Terminate(terminate) => terminate,
        Mode::Passthrough(_) => panic!("the first listener is a passthrough listener"),
    }
}

/// The state of an upstream without endpoints, as the workers share it.
pub fn new_upstream(config: Upstream, identities: &[CertPaths]) -> Arc<upstream::Upstream> {
    let files = &mut LoadedFiles::default();
    let identities: Vec<_> = identities.iter().cloned().map(Into::into).collect();
    let credentials =
        upstream::credentials::Credentials::load(&config, &identities, files).unwrap();
    let memory = MemoryBudget::new(DEFAULT_LIMIT);
    Arc::new(upstream::Upstream::new(config, credentials, &Metrics::new(), &memory))
}

/// The settings of the first listener, which is a passthrough listener.
pub fn passthrough_mode(config: &mut Config) -> &mut Passthrough {
    match &mut config.listeners[0].mode {
        Mode::Passthrough(passthrough) => passthrough,
        Mode::Terminate(_) => panic!("the first listener terminates TLS"),
    }
}

/// Makes the first listener a passthrough listener.
pub fn passthrough_config(mut config: Config) -> Config {
    config.listeners[0].mode = Mode::Passthrough(Passthrough {
        destinations: vec![],
        routes: Vec::new(),
        flows: FlowSettings::default(),
        limits: limits(),
    });
    config.upstreams[0].used_by = UsedBy { terminate: false, passthrough: true };
    config
}

/// Lets jackstay suspect a connection only after seconds, for tests that count the requests of each server.
/// On a busy machine a PONG may take longer than 100 ms, after which jackstay would hedge reads.
pub fn without_suspicion(config: &mut Config) {
    tolerate_late_pongs(config);
    config.upstreams[0].health.readyz.timeout = PATIENCE / 2;
}

/// On a busy machine a PONG may take long, and a connection that is suspected for it is not live.
pub fn tolerate_late_pongs(config: &mut Config) {
    let health = &mut config.upstreams[0].health;
    (health.suspect_after, health.dead_after) = (Some(PATIENCE / 2), PATIENCE);
}

/// A running data plane.
pub struct Proxy {
    pub addr: SocketAddr,
    pub admin: SocketAddr,
    pub running: Running,
    pub credentials: Credentials,
}

impl Proxy {
    pub fn start(app: App, certs: &Certs) -> Self {
        let addr = app.listener_addresses("apiserver")[0];
        let admin = app.admin_address().unwrap();
        Self { addr, admin, running: app.start().unwrap(), credentials: certs.credentials() }
    }

    /// An HTTP/2 client with the certificate of the configured identity.
    pub async fn client(&self) -> Client {
        self.client_with(&self.credentials).await
    }

    /// A client with the certificate of the configured identity, over HTTP/2 or HTTP/1.1.
    pub async fn client_over(&self, http2: bool) -> Client {
        if http2 {
            return self.client().await;
        }
        Client::connect_http1(self.addr, &self.credentials).await.unwrap()
    }

    /// An HTTP/2 client with these credentials.
    pub async fn client_with(&self, credentials: &Credentials) -> Client {
        Client::connect(self.addr, credentials).await.unwrap()
    }

    /// A TLS connection with the certificate of the configured identity, offering only the ALPN protocol `alpn`.
    pub async fn wire(&self, certs: &Certs, alpn: &str) -> Wire {
        wire::connect_with(self.addr, certs, Some(&certs.admin), alpn).await
    }

    /// The response of the admin endpoint for a path: head and body.
    pub async fn page(&self, path: &str) -> String {
        pages::get(self.admin, path).await.unwrap()
    }

    /// The JSON body of the admin endpoint's response for a path.
    pub async fn json(&self, path: &str) -> Value {
        let page = self.page(path).await;
        let json = page.split_once("\r\n\r\n").map_or("", |(_, body)| body);
        serde_json::from_str(json).unwrap_or_else(|e| panic!("{e}: {page}"))
    }

    pub async fn status(&self) -> Value {
        self.json("/status").await
    }

    pub async fn events(&self) -> Vec<Value> {
        self.json("/events").await["events"].as_array().unwrap().clone()
    }

    /// Describes each upstream connection that was declared dead or drained, except those of the prober. The
    /// source is `/events`, because `/status` does not show a connection that was opened and lost between
    /// two reads.
    pub async fn lost_connections(&self) -> Vec<String> {
        let lost = |event: &&Value| {
            event["kind"] == "connection"
                && (event["to"] == "dead" || event["to"] == "draining")
                && !event["detail"].as_str().unwrap().starts_with("class probe")
        };
        let describe = |event: &Value| {
            let (to, why, detail) = (&event["to"], &event["reason"], &event["detail"]);
            format!("{} to {to}: {why}, {} times ({detail})", event["name"], event["times"])
        };
        self.events().await.iter().filter(lost).map(describe).collect()
    }

    /// The endpoints in `/status`.
    pub async fn endpoints(&self) -> Vec<Value> {
        self.status().await["upstreams"][0]["endpoints"].as_array().unwrap().clone()
    }

    /// The endpoint with this address in `/status`.
    pub async fn endpoint(&self, address: SocketAddr) -> Value {
        let mut endpoints = self.endpoints().await.into_iter();
        endpoints.find(|endpoint| endpoint["address"] == address.to_string()).unwrap()
    }

    /// Waits until an endpoint has this state.
    pub async fn wait_state(&self, address: SocketAddr, state: &str) {
        let what = format!("{address} is {state}");
        until(&what, async || self.endpoint(address).await["state"] == state).await;
    }

    /// Waits until all endpoints have this state.
    pub async fn wait_all(&self, state: &str) {
        let what = format!("all endpoints are {state}");
        until(&what, async || self.endpoints().await.iter().all(|e| e["state"] == state)).await;
    }

    /// The local addresses of the live connections whose credential class starts with `class`, sorted.
    pub async fn connections(&self, class: &str) -> Vec<String> {
        let live = self.live_connections(class).await.into_iter();
        let mut found: Vec<_> =
            live.map(|connection| connection["local"].as_str().unwrap().to_owned()).collect();
        found.sort();
        found
    }

    /// The status of the live connections whose credential class starts with `class`.
    pub async fn live_connections(&self, class: &str) -> Vec<Value> {
        let endpoints = self.endpoints().await;
        let all = endpoints.iter().flat_map(|one| one["connections"].as_array().unwrap());
        let live = all.filter(|connection| {
            connection["class"].as_str().unwrap().starts_with(class)
                && connection["state"] == "live"
        });
        live.cloned().collect()
    }

    /// Waits until at least `count` endpoints are ready.
    pub async fn wait_ready(&self, count: usize) {
        until(&format!("{count} endpoints are ready"), async || {
            self.endpoints().await.iter().filter(|e| e["state"] == "ready").count() >= count
        })
        .await;
    }

    /// Waits until at least `count` endpoints are ready and have a live connection of an identity.
    pub async fn wait_connected(&self, count: usize) {
        until(&format!("{count} endpoints are ready and connected"), async || {
            let endpoints = self.endpoints().await;
            let connected = |e: &&Value| {
                e["state"] == "ready"
                    && e["connections"].as_array().unwrap().iter().any(|c| {
                        c["state"] == "live" && c["class"].as_str().unwrap().starts_with("identity")
                    })
            };
            endpoints.iter().filter(connected).count() >= count
        })
        .await;
    }

    /// The sum of all series in `/metrics` that start with `name`, which may include labels.
    pub async fn metric(&self, name: &str) -> f64 {
        let page = self.page("/metrics").await;
        page.lines()
            .filter(|line| line.starts_with(name))
            .filter_map(|line| line.rsplit_once(' ')?.1.parse::<f64>().ok())
            .sum()
    }

    /// The number of watch resumes with this outcome.
    pub async fn resumes(&self, outcome: &str) -> f64 {
        self.metric(&format!("jackstay_watch_resumes_total{{outcome=\"{outcome}\"")).await
    }

    /// The number of hedges with this outcome.
    pub async fn hedges(&self, outcome: &str) -> f64 {
        self.metric(&format!("jackstay_hedges_total{{outcome=\"{outcome}\"")).await
    }

    /// Waits until `/metrics` contains this text.
    pub async fn wait_metrics(&self, text: &str) {
        until(text, async || self.page("/metrics").await.contains(text)).await;
    }
}

/// Demo apiservers that share one state as if they used one etcd, and the certificates for jackstay in front
/// of them.
pub struct TestCluster {
    pub certs: Certs,
    pub state: Cluster,
    pub servers: Vec<ApiServerHandle>,
}

impl TestCluster {
    pub fn new(servers: usize) -> Self {
        Self::with(servers, |options, _| options)
    }

    /// Servers with changed options.
    pub fn with(servers: usize, change: impl Fn(Options, &Certs) -> Options) -> Self {
        let (certs, state) = (Certs::new(), Cluster::new());
        let start = |index| {
            let options = change(Options::named(&format!("server-{index}")), &certs);
            apiserver::start(&state, &certs.pki, options).unwrap()
        };
        let servers = (0..servers).map(start).collect();
        Self { certs, state, servers }
    }

    /// Servers that have one serving certificate.
    pub fn with_one_certificate(
        servers: usize,
        change: impl Fn(Options, &Certs) -> Options,
    ) -> Self {
        let shared = OnceCell::new();
        Self::with(servers, |options, certs| {
            let certificate = shared.get_or_init(|| certs.pki.server().unwrap()).clone();
            Options { certificate: Some(certificate), ..change(options, certs) }
        })
    }

    /// Starts the data plane with a balancer as its only endpoint, whose kind is `auto`.
    pub async fn start_behind(
        &self,
        balancer: SocketAddr,
        change: impl FnOnce(&mut Config),
    ) -> Proxy {
        let mut config = self.certs.config(&[balancer]);
        without_suspicion(&mut config);
        config.upstreams[0].kind = EndpointKind::Auto;
        change(&mut config);
        let proxy = self.certs.start(config);
        proxy.wait_connected(1).await;
        proxy
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
        proxy.wait_connected(self.servers.len()).await;
        proxy
    }

    /// Starts a relay in front of each server, and the data plane in front of the relays. Tests interrupt flows
    /// at the relays.
    pub async fn start_behind_relays(
        &self,
        change: impl FnOnce(&mut Config),
    ) -> (Vec<FaultyRelay>, Proxy) {
        let relays = start_relays(&self.addresses());
        let addresses: Vec<_> = relays.iter().map(|relay| relay.addr).collect();
        let mut config = self.certs.config(&addresses);
        change(&mut config);
        let proxy = self.certs.start(config);
        proxy.wait_connected(relays.len()).await;
        (relays, proxy)
    }

    /// Creates a config map in the shared state, without a request. Returns its resource version.
    pub fn create_config_map(&self, name: &str) -> u64 {
        let object = config_map(name, "1");
        self.state.create(&CONFIG_MAPS, "default", object, false).unwrap().version
    }

    /// A watch of the config maps from the present resource version.
    pub fn watch_path(&self) -> String {
        format!("{CONFIGMAPS}?watch=1&resourceVersion={}", self.state.version())
    }

    /// The number of watches that are open on a server.
    pub fn watches(&self, server: usize) -> u64 {
        self.servers[server].counters().watches.load(Relaxed)
    }

    /// The number of watches that are open on each server.
    pub fn watch_counts(&self) -> Vec<u64> {
        (0..self.servers.len()).map(|server| self.watches(server)).collect()
    }

    /// Starts watches of the config maps from the present resource version, and waits until they run.
    pub async fn start_watches(&self, client: &Client, count: u64) -> Vec<WatchRecorder> {
        let path = self.watch_path();
        let mut watches = Vec::new();
        for _ in 0..count {
            watches.push(WatchRecorder::start(client, &path).await);
        }
        until("all watches run", async || self.watch_counts().iter().sum::<u64>() == count).await;
        watches
    }

    /// Sends lists with this User-Agent, and returns how many each server got. A server may answer with 503.
    pub async fn spread(&self, client: &Client, agent: &str, requests: usize) -> Vec<usize> {
        let path = format!("{CONFIGMAPS}?probe={}", fastrand::u64(..));
        for _ in 0..requests {
            let headers = [("user-agent", agent)];
            let reply = client.request(Method::GET, &path, &headers, "").await.unwrap();
            assert!(reply.status.is_success() || reply.status == 503, "{}", reply.status);
        }
        let records = self.state.audit().records();
        let of = |name: &str| records.iter().filter(|r| r.server == name && r.path == path).count();
        self.servers.iter().map(|server| of(server.name())).collect()
    }

    /// Waits until each server in turn gets most requests with this User-Agent, because the others answer late.
    /// Without that, one slow response could keep the load of a server above that of the others for a minute.
    pub async fn expect_load_decides(&self, client: &Client, agent: &str) {
        const DELAY: Duration = Duration::from_millis(100);
        for fastest in 0..self.servers.len() {
            for (at, server) in self.servers.iter().enumerate() {
                let delay = if at == fastest { Duration::ZERO } else { DELAY };
                server.set_faults(|faults| faults.delay = delay);
            }
            wait::until_within(6 * PATIENCE, "the fastest server gets most requests", async || {
                self.spread(client, agent, 10).await[fastest] > 5
            })
            .await;
        }
        self.servers.iter().for_each(|server| server.set_faults(|f| f.delay = Duration::ZERO));
    }

    pub fn kill_all(&self) {
        self.servers.iter().for_each(ApiServerHandle::kill);
    }
}

/// Starts a relay in front of each address.
pub fn start_relays(targets: &[SocketAddr]) -> Vec<FaultyRelay> {
    targets.iter().map(|target| FaultyRelay::start(*target).unwrap()).collect()
}

/// An endpoint to which every connection attempt hangs, because the queue of its socket is full.
pub struct HangingEndpoint {
    socket: std::net::TcpListener,
    _in_queue: std::net::TcpStream,
}

impl HangingEndpoint {
    pub fn start() -> Self {
        let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None);
        let socket = socket.unwrap();
        socket.bind(&SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into()).unwrap();
        socket.listen(0).unwrap();
        let socket = std::net::TcpListener::from(socket);
        let in_queue = std::net::TcpStream::connect(socket.local_addr().unwrap()).unwrap();
        Self { socket, _in_queue: in_queue }
    }

    pub fn address(&self) -> SocketAddr {
        self.socket.local_addr().unwrap()
    }
}

/// An address that refuses connections. A leaked socket stays bound to it with `SO_REUSEADDR`: no other process
/// is assigned the port, and the test may listen on it later.
pub fn refusing_address() -> SocketAddr {
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    socket.set_reuse_address(true).unwrap();
    socket.bind(&SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into()).unwrap();
    let address = socket.local_addr().unwrap().as_socket().unwrap();
    std::mem::forget(socket);
    address
}

/// A config map with `value` in its data and in its label `v`.
pub fn config_map(name: &str, value: &str) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": { "name": name, "namespace": "default", "labels": { "v": value } },
        "data": { "v": value },
    })
}

/// Whether `JACKSTAY_LONG` selects the long form of the tests.
pub fn long_form() -> bool {
    std::env::var_os("JACKSTAY_LONG").is_some()
}

/// Reads a response body to its end. Returns the data, and the error unless the end is clean.
pub async fn read_body(mut body: Incoming) -> (Vec<u8>, io::Result<()>) {
    let mut received = Vec::new();
    loop {
        match next_data(&mut body).await {
            Ok(Some(data)) => received.extend_from_slice(&data),
            Ok(None) => return (received, Ok(())),
            Err(error) => return (received, Err(error)),
        }
    }
}

/// The HTTP/2 error among the sources of an error of the client.
pub fn h2_error(error: &io::Error) -> Option<&h2::Error> {
    let mut source: Option<&(dyn std::error::Error + 'static)> = Some(error.get_ref()?);
    while let Some(inner) = source {
        if let Some(h2) = inner.downcast_ref::<h2::Error>() {
            return Some(h2);
        }
        source = inner.source();
    }
    None
}

/// Formats addresses as the lines of an endpoints file.
pub fn to_strings(addresses: &[SocketAddr]) -> Vec<String> {
    addresses.iter().map(ToString::to_string).collect()
}

/// Writes a new file and renames it over the old one, as deployment tools do.
pub fn replace_file(path: &Path, text: &str) {
    let new = path.with_extension("new");
    std::fs::write(&new, text).unwrap();
    std::fs::rename(&new, path).unwrap();
}

/// Replaces a file by these lines, e.g. an endpoints file.
pub fn write_lines(path: &Path, lines: &[String]) {
    replace_file(path, &lines.join("\n"));
}

/// Replaces a configuration file.
pub fn write_config(path: &Path, config: &Config) {
    replace_file(path, &config.to_json().to_string());
}

/// Points a symlink at another file by a rename, as kubelet does.
pub fn replace_symlink(link: &Path, target: &Path) {
    let next = link.with_extension("next");
    std::os::unix::fs::symlink(target, &next).unwrap();
    std::fs::rename(next, link).unwrap();
}

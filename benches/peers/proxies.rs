//! The proxies under test: where each is found, the configuration each gets, and how it starts.
//!
//! At L7, as follows; at L4 in `passthrough`. One worker thread each, since one is jackstay's default; TLS 1.3 and HTTP/2 on both sides; the
//! origin's certificate verified, a client certificate asked for; `/readyz` checked every 10 s;
//! no access log; no timeout that an idle watch could reach. Beyond that each keeps its defaults.

mod passthrough;

use std::{
    fs,
    net::{SocketAddr, TcpListener},
    path::{Path, PathBuf},
    process::Command,
    sync::Arc,
    time::Duration,
};

use rustls::ClientConfig;
use tokio::time::Instant;

use crate::{
    Result,
    client::Client,
    origin,
    pki::{Pki, SERVER_NAME},
    process::{Process, find_program},
    raw,
};

/// How long a proxy may take until it answers its first request.
const START: Duration = Duration::from_secs(15);

/// What stands, or does not stand, between client and origin.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, clap::ValueEnum)]
pub enum Target {
    /// No proxy.
    Direct,
    /// The yardstick of every ratio.
    Haproxy,
    /// At L4 alone.
    Nginx,
    /// Envoy.
    Envoy,
    /// Another binary of jackstay, to see what a change costs.
    Before,
    /// This crate's binary.
    Jackstay,
}

/// What is done with the bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub enum Layer {
    /// TLS ends in the proxy, and each request is one.
    L7,
    /// Bytes pass.
    L4,
}

impl Target {
    /// The proxies, in the order of the table.
    pub const PROXIES: [Self; 4] = [Self::Haproxy, Self::Nginx, Self::Envoy, Self::Jackstay];

    /// Whether it is a peer at that layer: nginx speaks no HTTP/2 to its upstreams.
    pub fn works_at(self, layer: Layer) -> bool {
        layer == Layer::L4 || self != Self::Nginx
    }

    /// As printed, and as the key in the JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Haproxy => "haproxy",
            Self::Nginx => "nginx",
            Self::Envoy => "envoy",
            Self::Before => "before",
            Self::Jackstay => "jackstay",
        }
    }

    /// Its program, or the reason why it is left out.
    pub fn program(self) -> std::result::Result<PathBuf, &'static str> {
        let found = |variable: &str, default: PathBuf| {
            let file = std::env::var_os(variable).map_or(default, PathBuf::from);
            find_program([file.as_path()])
        };
        match self {
            Self::Direct => Err("not a program"),
            Self::Haproxy => found("HAPROXY_BIN", "haproxy".into())
                .ok_or("no haproxy: run benches/setup or set HAPROXY_BIN"),
            Self::Nginx => found("NGINX_BIN", "nginx".into())
                .ok_or("no nginx: run benches/setup or set NGINX_BIN"),
            Self::Envoy => found("ENVOY_BIN", cache_dir().join("envoy"))
                .ok_or("no envoy: run benches/setup or set ENVOY_BIN"),
            Self::Before => found("JACKSTAY_BENCH_BEFORE", PathBuf::new())
                .ok_or("JACKSTAY_BENCH_BEFORE names no file"),
            Self::Jackstay => found("JACKSTAY_BIN", env!("CARGO_BIN_EXE_jackstay").into())
                .ok_or("no jackstay binary: JACKSTAY_BIN names no file"),
        }
    }
}

/// Where `benches/setup` puts Envoy.
fn cache_dir() -> PathBuf {
    let home = || PathBuf::from(std::env::var_os("HOME").unwrap_or_default()).join(".cache");
    std::env::var_os("XDG_CACHE_HOME").map_or_else(home, PathBuf::from).join("jackstay/bench")
}

/// A running proxy.
pub struct Proxy {
    /// Which one.
    pub target: Target,
    /// Where it listens.
    pub address: SocketAddr,
    /// To ask for CPU and memory.
    pub process: Process,
}

/// Everything a proxy is started from.
pub struct Setting<'a> {
    /// Directory of the run: certificates, configurations, logs.
    pub dir: &'a Path,
    /// The certificates in it.
    pub pki: &'a Pki,
    /// Where the origin listens.
    pub origin: SocketAddr,
    /// Flows that it must be able to hold at L4.
    pub flows: usize,
    /// The client that asks whether it is up.
    pub tls: &'a Arc<ClientConfig>,
}

impl Setting<'_> {
    /// Starts `target` and waits for its first answer.
    pub async fn start(&self, target: Target, layer: Layer) -> Result<Proxy> {
        let program = target.program()?;
        let address = free_address()?;
        let file = |name: &str| self.dir.join(format!("{}.{name}", target.name()));
        let (config, text) = match (target, layer) {
            (Target::Direct, _) | (Target::Nginx, Layer::L7) => return Err("no such proxy".into()),
            (Target::Haproxy, Layer::L7) => (file("cfg"), self.haproxy(address)),
            (Target::Envoy, Layer::L7) => (file("yaml"), self.envoy(address)),
            (Target::Before | Target::Jackstay, Layer::L7) => {
                (file("yaml"), self.jackstay(address, free_address()?))
            }
            (Target::Haproxy, Layer::L4) => (file("cfg"), self.haproxy_l4(address)),
            (Target::Nginx, Layer::L4) => (file("conf"), self.nginx_l4(address)),
            (Target::Envoy, Layer::L4) => (file("yaml"), self.envoy_l4(address)),
            (Target::Before | Target::Jackstay, Layer::L4) => {
                (file("yaml"), self.jackstay_l4(address, free_address()?))
            }
        };
        fs::write(&config, text)?;

        let mut command = Command::new(program);
        match target {
            // One process in the foreground, so that its pid is the one we measure and kill.
            Target::Haproxy => command.arg("-db").arg("-f").arg(&config),
            Target::Nginx => command.arg("-c").arg(&config),
            Target::Envoy => command
                .args(["--concurrency", "1", "--disable-hot-restart", "-l", "warn", "-c"])
                .arg(&config),
            _ => command.args(["run", "--config"]).arg(&config),
        };
        let mut process = Process::start(command, &file("log"))?;

        let end = Instant::now() + START;
        loop {
            let answer = match layer {
                Layer::L7 => self.ask(address).await,
                Layer::L4 => raw::once(address).await,
            };
            let error = match answer {
                Ok(()) => return Ok(Proxy { target, address, process }),
                Err(error) => error,
            };
            if let Some(status) = process.ended()? {
                let log = process.output();
                return Err(format!("ended before it answered ({status}) {log}").into());
            }
            if Instant::now() > end {
                let log = process.output();
                return Err(format!("no answer in {START:?}: {error}\n{log}").into());
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    async fn ask(&self, address: SocketAddr) -> Result<()> {
        Client::connect(address, self.tls).await?.get(origin::OBJECT).await?;
        Ok(())
    }

    fn haproxy(&self, listen: SocketAddr) -> String {
        let (ca, both, origin) =
            (self.pki.ca.display(), self.pki.server_both.display(), self.origin);
        format!(
            "\
global
    nbthread 1
    maxconn 2000
defaults
    mode http
    timeout connect 3s
    timeout client 1h
    timeout server 1h
frontend apiserver
    bind {listen} ssl crt {both} alpn h2,http/1.1 ca-file {ca} verify optional
    default_backend control-plane
backend control-plane
    http-reuse always
    option httpchk GET /readyz
    server a {origin} ssl alpn h2 ca-file {ca} verify required verifyhost {SERVER_NAME} check check-alpn h2 inter 10s
"
        )
    }

    fn envoy(&self, listen: SocketAddr) -> String {
        let Pki { ca, server_cert, server_key, .. } = self.pki;
        let (ca, cert, key) = (ca.display(), server_cert.display(), server_key.display());
        let (port, origin_port) = (listen.port(), self.origin.port());
        format!(
            r#"
static_resources:
  listeners:
  - name: apiserver
    address: {{ socket_address: {{ address: 127.0.0.1, port_value: {port} }} }}
    filter_chains:
    - transport_socket:
        name: tls
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.DownstreamTlsContext
          common_tls_context:
            tls_params: {{ tls_maximum_protocol_version: TLSv1_3 }}
            alpn_protocols: [h2, http/1.1]
            tls_certificates: [{{ certificate_chain: {{ filename: {cert} }}, private_key: {{ filename: {key} }} }}]
            validation_context: {{ trusted_ca: {{ filename: {ca} }} }}
      filters:
      - name: http
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: apiserver
          stream_idle_timeout: 0s
          route_config:
            virtual_hosts:
            - name: all
              domains: ["*"]
              routes: [{{ match: {{ prefix: / }}, route: {{ cluster: control-plane, timeout: 0s }} }}]
          http_filters:
          - name: router
            typed_config: {{ "@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router }}
  clusters:
  - name: control-plane
    connect_timeout: 3s
    # The default of 1,024 requests at once is too near to 1,000 watches.
    circuit_breakers: {{ thresholds: [{{ max_connections: 10000, max_requests: 10000, max_pending_requests: 10000 }}] }}
    health_checks:
    - timeout: 1s
      interval: 10s
      unhealthy_threshold: 2
      healthy_threshold: 2
      http_health_check: {{ path: /readyz, codec_client_type: HTTP2 }}
    typed_extension_protocol_options:
      envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
        "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
        explicit_http_config: {{ http2_protocol_options: {{}} }}
    transport_socket:
      name: tls
      typed_config:
        "@type": type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext
        sni: {SERVER_NAME}
        common_tls_context:
          # Envoy's client stops at TLS 1.2 unless told otherwise.
          tls_params: {{ tls_maximum_protocol_version: TLSv1_3 }}
          alpn_protocols: [h2]
          validation_context:
            trusted_ca: {{ filename: {ca} }}
            match_typed_subject_alt_names: [{{ san_type: DNS, matcher: {{ exact: {SERVER_NAME} }} }}]
    load_assignment:
      cluster_name: control-plane
      endpoints:
      - lb_endpoints:
        - endpoint: {{ address: {{ socket_address: {{ address: 127.0.0.1, port_value: {origin_port} }} }} }}
"#
        )
    }

    fn jackstay(&self, listen: SocketAddr, admin: SocketAddr) -> String {
        let Pki { ca, server_cert, server_key, client_cert, client_key, .. } = self.pki;
        let (ca, cert, key) = (ca.display(), server_cert.display(), server_key.display());
        let (client_cert, client_key) = (client_cert.display(), client_key.display());
        let origin = self.origin;
        format!(
            r#"
admin: {{ bind: "{admin}" }}
state_dir: ""
workers: 1
upstreams:
  - name: control-plane
    endpoints: ["{origin}"]
    tls: {{ ca_file: {ca} }}
listeners:
  - name: apiserver
    bind: ["{listen}"]
    mode: terminate
    upstream: control-plane
    tls: {{ cert_file: {cert}, key_file: {key} }}
    client_ca_file: {ca}
    identities:
      - cert_file: {client_cert}
        key_file: {client_key}
"#
        )
    }
}

/// A port that was free a moment ago; a proxy that loses the race for it fails to start, loudly.
fn free_address() -> Result<SocketAddr> {
    Ok(TcpListener::bind(("127.0.0.1", 0))?.local_addr()?)
}

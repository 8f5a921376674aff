//! The validated configuration, as typed values.
//!
//! A value of these types has passed every rule: addresses parse, names are unique, durations are
//! within bounds. A field has the name of its configuration key. [`Config`] serializes to the keys
//! and formats of the file. It holds paths of secrets, and never a secret.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::ValueEnum;
use http::uri::Authority;
use jackstay_core::discovery::address::EndpointAddress;
use jackstay_core::request::path_prefix::PathPrefix;
use serde::Serialize;

use super::listener::{CertPaths, Listener, ServingCert, ServingFiles};
use super::logging::Log;
use super::sandbox::Sandbox;
use super::serialize as as_in_file;
use super::units::{Percent, format_size};

/// The configuration of one process.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Config {
    /// The admin endpoint.
    pub admin: Admin,
    /// Directory of the last good endpoint set and of the takeover socket; `None` disables both.
    #[serde(serialize_with = "as_in_file::optional_text")]
    pub state_dir: Option<PathBuf>,
    /// Number of data-plane threads. Each runs its own event loop with its own connections.
    pub workers: usize,
    /// Whether the connections of clients with a configured identity have a thread of their own.
    pub identity_lane: bool,
    /// `SO_MARK` of the connections to endpoints while a listener is transparent. The redirecting
    /// rules exempt connections with this mark. 0 sets no mark.
    #[serde(serialize_with = "as_in_file::hex")]
    pub mark: u32,
    /// Limit of the memory that clients make the process hold.
    #[serde(serialize_with = "as_in_file::display")]
    pub memory_limit: MemoryLimit,
    /// Logging.
    pub log: Log,
    /// Shutdown after a termination signal or a takeover.
    pub shutdown: Shutdown,
    /// The restrictions that the process places on itself at the start.
    pub sandbox: Sandbox,
    /// The sets of apiservers; names are unique.
    pub upstreams: Vec<Upstream>,
    /// The listeners for clients; names are unique.
    pub listeners: Vec<Listener>,
}

impl Config {
    /// The configuration with the keys and formats of the file, for the admin endpoint. A file with
    /// this content loads to the same configuration.
    pub fn to_json(&self) -> serde_json::Value {
        // Cannot fail: every map has text keys, and every path was read from UTF-8.
        serde_json::to_value(self).unwrap_or_default()
    }
}

/// Limit of the memory that clients make the process hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryLimit {
    /// 70 % of the cgroup's limit, or 192 MiB without one.
    Auto,
    /// This many bytes.
    Bytes(u64),
}

impl fmt::Display for MemoryLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Bytes(bytes) => f.write_str(&format_size(*bytes)),
        }
    }
}

/// The admin endpoint: health, metrics, status.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Admin {
    /// Listening address; the default is a loopback address.
    #[serde(serialize_with = "as_in_file::display")]
    pub bind: SocketAddr,
    /// Unix socket with the same endpoints, for probes that must not depend on a TCP port.
    #[serde(serialize_with = "as_in_file::optional_text")]
    pub socket: Option<PathBuf>,
    /// Another address, which serves only the metrics, over TLS and to authorised clients.
    #[serde(serialize_with = "as_in_file::optional_display")]
    pub metrics_bind: Option<SocketAddr>,
    /// Its serving certificate; set if `metrics_bind` is.
    #[serde(serialize_with = "as_in_file::optional_text")]
    pub metrics_cert_file: Option<PathBuf>,
    /// The key of that certificate.
    #[serde(serialize_with = "as_in_file::optional_text")]
    pub metrics_key_file: Option<PathBuf>,
    /// CA bundle that verifies client certificates there; `None` requests none.
    #[serde(serialize_with = "as_in_file::optional_text")]
    pub metrics_client_ca_file: Option<PathBuf>,
    /// The common name of the client certificates that need no review.
    #[serde(serialize_with = "as_in_file::optional_text")]
    pub metrics_client_name: Option<String>,
    /// The upstream whose apiservers review tokens and other client certificates.
    #[serde(serialize_with = "as_in_file::optional_text")]
    pub metrics_review_upstream: Option<String>,
}

impl Admin {
    /// Only the local addresses.
    pub fn new(bind: SocketAddr, socket: Option<PathBuf>) -> Self {
        Self {
            bind,
            socket,
            metrics_bind: None,
            metrics_cert_file: None,
            metrics_key_file: None,
            metrics_client_ca_file: None,
            metrics_client_name: None,
            metrics_review_upstream: None,
        }
    }

    /// The TLS files of `metrics_bind`.
    pub fn metrics_files(&self) -> Option<ServingFiles> {
        self.metrics_bind?;
        let cert_file = self.metrics_cert_file.clone()?;
        let paths = CertPaths { cert_file, key_file: self.metrics_key_file.clone()? };
        let client_ca_file = self.metrics_client_ca_file.clone();
        Some(ServingFiles { tls: ServingCert { paths, issuer: None }, client_ca_file })
    }
}

/// Shutdown after a termination signal or a takeover.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Shutdown {
    /// Time for running requests to complete before they are cut off.
    #[serde(serialize_with = "as_in_file::duration")]
    pub drain_timeout: Duration,
}

/// A set of apiservers that serve the same cluster.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Upstream {
    /// Unique name; a label in metrics.
    pub name: String,
    /// The path below which the servers have the API, such as `/k8s/clusters/c-1`.
    #[serde(serialize_with = "as_in_file::display")]
    pub path_prefix: PathPrefix,
    /// `:authority` and `Host` of requests; `None` is the client's own.
    #[serde(serialize_with = "as_in_file::optional_display")]
    pub authority: Option<Authority>,
    /// Static endpoints and DNS names.
    #[serde(serialize_with = "as_in_file::display_all")]
    pub endpoints: Vec<EndpointAddress>,
    /// A file with one address a line, which is read again when it changes.
    #[serde(serialize_with = "as_in_file::optional_text")]
    pub endpoints_file: Option<PathBuf>,
    /// Discovery of more endpoints.
    pub discovery: Discovery,
    /// Verification of the apiservers.
    pub tls: UpstreamTls,
    /// The modes of the listeners that use this upstream; derived, not a key.
    #[serde(skip)]
    pub used_by: UsedBy,
    /// Limits of the connection pool.
    pub connections: Connections,
    /// Whether watches ask the apiservers for gzip.
    pub compression: Compression,
    /// Whether reads of a client may go back in time.
    pub consistent_reads: ConsistentReads,
    /// What is behind each endpoint.
    pub kind: EndpointKind,
    /// Which endpoints are preferred; the others are fallbacks.
    pub prefer: EndpointPreference,
    /// Whether watches move gradually to an apiserver that has become ready again.
    pub rebalance: bool,
    /// Which apiservers a client's requests prefer while the versions of the apiservers differ.
    pub version_preference: VersionPreference,
    /// Share of new requests that go to the newest version while the versions of the apiservers differ. 0 % leaves
    /// the choice to the load.
    #[serde(serialize_with = "as_in_file::display")]
    pub canary: Percent,
    /// When a connection or an endpoint counts as failed.
    pub health: Health,
}

/// Whether watches ask the apiservers for gzip.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum Compression {
    /// If the client accepts it, and if a watch begins with all objects and its client says nothing about it.
    #[default]
    Auto,
    /// Never.
    Off,
}

/// What keeps the reads of a client from going back in time when they are answered by different apiservers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum ConsistentReads {
    /// A read of any version (`resourceVersion=0`) is not older than what the client has seen of the resource.
    #[default]
    Floor,
    /// Nothing.
    Off,
}

/// What is behind the endpoints of an upstream.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum EndpointKind {
    /// One or two endpoints are examined: connections to a load balancer reach different apiservers.
    #[default]
    Auto,
    /// Each endpoint is one apiserver.
    Apiserver,
    /// Each endpoint is a load balancer, a virtual IP address, or another address of several apiservers.
    Balancer,
}

/// Which endpoints of an upstream are preferred.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum EndpointPreference {
    /// Those on this host: with loopback or an interface's address. The others are used while none of these is usable.
    Local,
    /// None: the load decides.
    #[default]
    None,
}

/// Which apiservers a client's requests prefer while the versions of the apiservers differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum VersionPreference {
    /// Those at least as new as the client, according to its User-Agent.
    Newest,
    /// None: the load decides.
    None,
}

/// Discovery of endpoints that the configuration does not list.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Discovery {
    /// The kubeconfig whose user may watch the `EndpointSlices` of `default/kubernetes`. Discovery
    /// uses the endpoints and the CA of the upstream instead of its cluster.
    #[serde(serialize_with = "as_in_file::optional_text")]
    pub kubeconfig: Option<PathBuf>,
}

/// Verification of the apiserver's certificate.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct UpstreamTls {
    /// PEM bundle of CAs. `None` only if all listeners of the upstream are passthrough: then probes
    /// verify no certificate and send no credential.
    #[serde(serialize_with = "as_in_file::optional_text")]
    pub ca_file: Option<PathBuf>,
    /// Name for SNI and verification; `None` is the host of each endpoint.
    #[serde(serialize_with = "as_in_file::optional_text")]
    pub server_name: Option<String>,
}

/// The modes of the listeners that use an upstream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct UsedBy {
    /// At least one listener terminates TLS and sends requests.
    pub terminate: bool,
    /// At least one listener passes connections through, in either mode; they end when their endpoint fails.
    pub passthrough: bool,
}

/// Limits of the connection pool.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Connections {
    /// Connections kept open to each endpoint for each configured identity.
    pub min: usize,
    /// Maximum of connections of each worker to one endpoint for one credential class. Workers share
    /// no connections, and one worker serves all requests of a client connection.
    pub max: usize,
    /// Maximum of streams of one connection; the peer's SETTINGS may lower it. kube-apiserver allows
    /// 100.
    pub max_streams: usize,
}

/// Health of connections and endpoints.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Health {
    /// Interval between PINGs on a connection.
    #[serde(serialize_with = "as_in_file::duration")]
    pub ping_interval: Duration,
    /// When a PING counts as late; `None` is adaptive: max(4·srtt + 4·rttvar, 100 ms).
    #[serde(serialize_with = "as_in_file::duration_or_adaptive")]
    pub suspect_after: Option<Duration>,
    /// A connection is closed if a PING is unanswered for this long and no other bytes arrive
    /// meanwhile.
    #[serde(serialize_with = "as_in_file::duration")]
    pub dead_after: Duration,
    /// The same for tunnels and for connections with a response that cannot be requested again.
    #[serde(serialize_with = "as_in_file::duration")]
    pub tunnel_dead_after: Duration,
    /// Limit of TCP, TLS and the first PONG together.
    #[serde(serialize_with = "as_in_file::duration")]
    pub connect_timeout: Duration,
    /// The readiness probe of each endpoint.
    pub readyz: Readyz,
}

/// The `/readyz` probe of an endpoint.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Readyz {
    /// Path of the GET request.
    pub path: String,
    /// Pause between probes, ±20 %.
    #[serde(serialize_with = "as_in_file::duration")]
    pub interval: Duration,
    /// A probe without an answer after this time has failed.
    #[serde(serialize_with = "as_in_file::duration")]
    pub timeout: Duration,
    /// Successes in a row that make an endpoint ready again.
    pub rise: u32,
    /// Failures in a row that make it degraded.
    pub fall: u32,
    /// Client certificate of the probe. `None` is the first loaded identity of a listener that uses
    /// this upstream.
    #[serde(flatten, serialize_with = "as_in_file::value_or_default")]
    pub cert: Option<CertPaths>,
    /// File with a bearer token for the probe.
    #[serde(serialize_with = "as_in_file::optional_text")]
    pub token_file: Option<PathBuf>,
}

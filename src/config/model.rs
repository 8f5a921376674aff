//! The validated configuration, as typed values with their defaults.
//!
//! A value of these types has passed every rule of `validate`: addresses parse, names are unique,
//! durations are within bounds. Names follow the configuration keys one to one.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use super::destination::Destination;

/// The whole configuration of one process.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// The admin endpoint.
    pub admin: Admin,
    /// Where the last good set of endpoints is kept; `None` keeps nothing.
    pub state_dir: Option<PathBuf>,
    /// Data-plane threads: each one runs its own event loop with its own connections.
    pub workers: usize,
    /// `SO_MARK` of our own connections to endpoints, while a listener is transparent: what an
    /// interception lets pass. 0 is none.
    pub mark: u32,
    /// What is logged and how.
    pub log: Log,
    /// How a shutdown goes.
    pub shutdown: Shutdown,
    /// The sets of apiservers, by name.
    pub upstreams: Vec<Upstream>,
    /// The places clients connect to.
    pub listeners: Vec<Listener>,
}

/// The admin endpoint: health, metrics, status.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Admin {
    /// Address it listens on; loopback unless the operator says otherwise.
    pub bind: SocketAddr,
    /// Unix socket that it listens on as well, for probes that nothing else on the host can hinder.
    pub socket: Option<PathBuf>,
}

/// Logging.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Log {
    /// The least severe level that is written.
    pub level: Level,
    /// Lines for people or for machines.
    pub format: LogFormat,
    /// Which requests get a line.
    pub access: AccessLog,
}

/// Severity of a log line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Level {
    /// Only errors.
    Error,
    /// Errors and warnings.
    Warn,
    /// State changes as well.
    Info,
    /// What a developer wants to see.
    Debug,
    /// Everything, in a debug build. Release builds leave such lines out (feature
    /// `release_max_level_debug` of tracing): the span around every HTTP/2 frame costs time even
    /// when nobody looks.
    Trace,
}

impl Level {
    /// Each value with its name in the configuration.
    pub const WORDS: [(&'static str, Self); 5] = [
        ("error", Self::Error),
        ("warn", Self::Warn),
        ("info", Self::Info),
        ("debug", Self::Debug),
        ("trace", Self::Trace),
    ];

    /// Its name in the configuration.
    pub fn as_str(self) -> &'static str {
        word(&Self::WORDS, self)
    }
}

/// Shape of a log line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}

impl LogFormat {
    /// Each value with its name in the configuration.
    pub const WORDS: [(&'static str, Self); 2] = [("text", Self::Text), ("json", Self::Json)];

    /// Its name in the configuration.
    pub fn as_str(self) -> &'static str {
        word(&Self::WORDS, self)
    }
}

/// Which requests are logged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AccessLog {
    /// None.
    Off,
    /// Those that failed: status 500 and above, and whatever was cut off.
    Errors,
    /// Every one.
    All,
}

impl AccessLog {
    /// Each value with its name in the configuration.
    pub const WORDS: [(&'static str, Self); 3] =
        [("off", Self::Off), ("errors", Self::Errors), ("all", Self::All)];

    /// Its name in the configuration.
    pub fn as_str(self) -> &'static str {
        word(&Self::WORDS, self)
    }
}

/// The word for a value of an enumeration that lists all of its words.
fn word<T: PartialEq + Copy>(words: &[(&'static str, T)], value: T) -> &'static str {
    words.iter().find(|(_, known)| *known == value).map_or("", |(word, _)| word)
}

/// Shutdown on SIGTERM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shutdown {
    /// How long running requests may take to finish before they are cut.
    pub drain_timeout: Duration,
}

/// A set of apiservers that serve the same cluster.
#[derive(Debug, Clone, PartialEq)]
pub struct Upstream {
    /// Name, unique; a label in metrics.
    pub name: String,
    /// Static endpoints and DNS names (the seeds).
    pub endpoints: Vec<EndpointAddress>,
    /// A file with one address a line, which is read again when it changes.
    pub endpoints_file: Option<PathBuf>,
    /// How more endpoints are found.
    pub discovery: Discovery,
    /// How to verify the apiservers.
    pub tls: UpstreamTls,
    /// Which modes of listener lead here; follows from the listeners, no key of its own.
    pub used_by: UsedBy,
    /// Limits of the pool.
    pub connections: Connections,
    /// Whether watches move, slowly, to an apiserver that has come back.
    pub rebalance: bool,
    /// When a connection or an endpoint is given up.
    pub health: Health,
}

/// Address of one endpoint as the user wrote it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EndpointAddress {
    /// IP literal without brackets, `localhost`, or a DNS name in lower case.
    pub host: String,
    /// TCP port.
    pub port: u16,
}

impl std::fmt::Display for EndpointAddress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

/// How endpoints are found beyond those that are written down.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Discovery {
    /// The kubeconfig whose user may watch the `EndpointSlices` of `default/kubernetes`; its server
    /// and CA are not used, those of the upstream are.
    pub kubeconfig: Option<PathBuf>,
}

/// Verification of the apiserver's certificate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UpstreamTls {
    /// PEM bundle the chain must end in. `None` only where nothing but passthrough leads there:
    /// then the probes verify nobody, and send nothing that is secret.
    pub ca_file: Option<PathBuf>,
    /// Name for SNI and verification; `None` takes the endpoint's host.
    pub server_name: Option<String>,
}

/// The modes of the listeners that lead to an upstream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct UsedBy {
    /// One at least terminates TLS: requests are sent there.
    pub terminate: bool,
    /// One at least passes connections through: an endpoint's death ends them.
    pub passthrough: bool,
}

/// Limits of the connection pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Connections {
    /// Kept open per endpoint for each configured identity.
    pub min: usize,
    /// Most connections per endpoint and identity class, of each worker: they share none, and a
    /// client's connection, with all that it asks for, is one worker's.
    pub max: usize,
    /// Most streams per connection; the peer's SETTINGS may lower it. kube-apiserver allows 100.
    pub max_streams: usize,
}

/// Health of connections and endpoints.
#[derive(Debug, Clone, PartialEq)]
pub struct Health {
    /// A PING goes out this often on every connection.
    pub ping_interval: Duration,
    /// When a PING counts as late; `None` is adaptive: max(4·srtt + 4·rttvar, 100 ms).
    pub suspect_after: Option<Duration>,
    /// A PING out this long with no evidence of life in one direction is the connection's death.
    pub dead_after: Duration,
    /// The same for what nothing can take the place of: a tunnel, and a connection with a response
    /// under way that cannot be asked for again.
    pub tunnel_dead_after: Duration,
    /// Bound on TCP, TLS and the first PONG together.
    pub connect_timeout: Duration,
    /// The apiserver's own opinion of itself.
    pub readyz: Readyz,
}

/// The `/readyz` probe of an endpoint.
#[derive(Debug, Clone, PartialEq)]
pub struct Readyz {
    /// Path asked with GET.
    pub path: String,
    /// Pause between probes, ±20 %.
    pub interval: Duration,
    /// An answer that takes longer is a failure.
    pub timeout: Duration,
    /// Successes in a row that make an endpoint ready again.
    pub rise: u32,
    /// Failures in a row that make it degraded.
    pub fall: u32,
    /// Client certificate of the probe; default the first loaded identity of a listener that
    /// uses this upstream.
    pub cert: Option<CertPaths>,
    /// File with a bearer token for the probe.
    pub token_file: Option<PathBuf>,
}

/// A certificate chain and its key, as PEM files; both may be the same file.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct CertPaths {
    /// Certificate chain, leaf first.
    pub cert_file: PathBuf,
    /// Private key.
    pub key_file: PathBuf,
}

/// A place clients connect to.
#[derive(Debug, Clone, PartialEq)]
pub struct Listener {
    /// Name, unique; a label in metrics.
    pub name: String,
    /// Addresses to listen on.
    pub bind: Vec<SocketAddr>,
    /// Listens on addresses that this host does not have yet, too.
    pub freebind: bool,
    /// Name of the upstream that its requests or connections go to.
    pub upstream: String,
    /// What is done with a connection.
    pub mode: Mode,
    /// Bounds on the connections of clients, in either mode.
    pub limits: Limits,
}

impl Listener {
    /// What it terminates with, if it terminates TLS.
    pub fn terminate(&self) -> Option<&Terminate> {
        match &self.mode {
            Mode::Terminate(terminate) => Some(terminate),
            Mode::Passthrough(_) => None,
        }
    }

    /// How it passes connections through, if it does.
    pub fn passthrough(&self) -> Option<&Passthrough> {
        match &self.mode {
            Mode::Terminate(_) => None,
            Mode::Passthrough(passthrough) => Some(passthrough),
        }
    }

    /// Every upstream it leads to, the default first; a name may come twice.
    pub fn upstreams(&self) -> impl Iterator<Item = &str> {
        let mode = self.passthrough();
        let routes = mode.map_or(&[][..], |mode| &mode.routes).iter().map(|r| &r.upstream);
        let meant = mode.map_or(&[][..], |mode| &mode.destinations).iter().map(|d| &d.upstream);
        std::iter::once(&self.upstream).chain(routes).chain(meant).map(String::as_str)
    }

    /// Whether it takes redirected connections.
    pub fn is_transparent(&self) -> bool {
        self.passthrough().is_some_and(|mode| mode.transparent)
    }
}

/// What a listener does with a connection.
#[derive(Debug, Clone, PartialEq)]
pub enum Mode {
    /// L7: TLS ends here, and each request finds its own way.
    Terminate(Terminate),
    /// L4: TLS is the client's and the apiserver's; the connection is passed through.
    Passthrough(Passthrough),
}

impl Mode {
    /// Its name in the configuration.
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Terminate(_) => "terminate",
            Self::Passthrough(_) => "passthrough",
        }
    }
}

/// `mode: terminate`.
#[derive(Debug, Clone, PartialEq)]
pub struct Terminate {
    /// Serving certificate.
    pub tls: CertPaths,
    /// A CA of this machine that the serving certificate is renewed from; certificate and key are
    /// then one file.
    pub issuer: Option<CertPaths>,
    /// CA bundle that client certificates are verified against; `None`: client certificates
    /// prove nothing here and are refused.
    pub client_ca_file: Option<PathBuf>,
    /// Which credential goes upstream for which proven client.
    pub identities: Vec<CertPaths>,
    /// API groups beyond the built-in ones whose watches may be resumed.
    pub resume_groups: Vec<String>,
    /// Bounds on requests.
    pub limits: RequestLimits,
}

/// `mode: passthrough`.
#[derive(Debug, Clone, PartialEq)]
pub struct Passthrough {
    /// Connections were redirected here; their original destination picks the upstream.
    pub transparent: bool,
    /// Upstreams by original destination; the first match counts, and comes before `routes`.
    pub destinations: Vec<Intended>,
    /// Upstreams by the server name that the client asks for; the first match counts.
    pub routes: Vec<Route>,
    /// A connection on which nothing moves for this long is closed; `None` never.
    pub idle_timeout: Option<Duration>,
    /// How long connections to an endpoint that was removed may go on.
    pub leave_timeout: Duration,
    /// Whether long-lived connections are closed, slowly, so that an endpoint that has come back
    /// gets its share when their clients reconnect.
    pub rebalance: bool,
}

/// Original destinations that lead to another upstream than the listener's own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Intended {
    /// Where the connection was meant to go.
    pub to: Vec<Destination>,
    /// Name of the upstream.
    pub upstream: String,
}

/// Server names that lead to another upstream than the listener's own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Route {
    /// Names in lower case; `*.example.com` is any name one label below `example.com`.
    pub server_names: Vec<String>,
    /// Name of the upstream.
    pub upstream: String,
}

/// Bounds on the connections of one listener, in either mode.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Open client connections, each worker its share.
    pub max_connections: usize,
    /// Bound on the TLS handshake; in passthrough, on the time until the server's first byte.
    pub handshake_timeout: Duration,
}

/// Bounds on what the requests of one listener may use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RequestLimits {
    /// Concurrent HTTP/2 streams of one client connection.
    pub max_streams: u32,
    /// Bytes of request headers.
    pub max_header_bytes: u32,
    /// Bound on the arrival of a whole HTTP/1.1 request head; of an HTTP/2 connection, on its silence
    /// (PINGs break it) before the first request.
    pub header_timeout: Duration,
    /// A client that takes none of the bytes that wait for it for this long is disconnected; one
    /// that opens no window for one HTTP/2 stream loses that stream.
    pub stall_timeout: Duration,
}

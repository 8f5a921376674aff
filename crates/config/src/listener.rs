//! The validated configuration of a listener.

use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Serialize;

use super::destination::Destination;
use super::heartbeat::HeartbeatResource;
use super::serialize as as_in_file;

/// A set of addresses where clients connect.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Listener {
    /// Unique name; a label in metrics.
    pub name: String,
    /// Listening addresses.
    #[serde(serialize_with = "as_in_file::display_all")]
    pub bind: Vec<SocketAddr>,
    /// Whether it also listens on addresses that this host does not have yet (`IP_FREEBIND`).
    pub freebind: bool,
    /// Connections are redirected to this listener; their original destination selects the
    /// upstream. Mode `passthrough` only.
    pub transparent: bool,
    /// Name of the default upstream of its requests or connections.
    pub upstream: String,
    /// What happens to a connection.
    #[serde(flatten)]
    pub mode: Mode,
}

impl Listener {
    /// The settings of mode `terminate`.
    pub fn terminate(&self) -> Option<&Terminate> {
        match &self.mode {
            Mode::Terminate(terminate) => Some(terminate),
            Mode::Passthrough(_) => None,
        }
    }

    /// The settings of mode `passthrough`.
    pub fn passthrough(&self) -> Option<&Passthrough> {
        match &self.mode {
            Mode::Terminate(_) => None,
            Mode::Passthrough(passthrough) => Some(passthrough),
        }
    }

    /// Whether connections are passed through: all, or those with some server names.
    pub fn has_flows(&self) -> bool {
        self.terminate().is_none_or(|terminate| terminate.passed_through.is_some())
    }

    /// The names of all upstreams of this listener, the default first. A name may appear twice.
    pub fn upstreams(&self) -> impl Iterator<Item = &str> {
        let mode = self.passthrough();
        let routes = mode.map_or(&[][..], |mode| &mode.routes).iter().map(|r| &r.upstream);
        let destinations =
            mode.map_or(&[][..], |mode| &mode.destinations).iter().map(|d| &d.upstream);
        std::iter::once(&self.upstream).chain(routes).chain(destinations).map(String::as_str)
    }

    /// Limits of client connections, in either mode.
    pub fn limits(&self) -> &Limits {
        match &self.mode {
            Mode::Terminate(terminate) => &terminate.limits.connections,
            Mode::Passthrough(passthrough) => &passthrough.limits,
        }
    }

    /// [`Self::limits`], for callers that change them.
    pub fn limits_mut(&mut self) -> &mut Limits {
        match &mut self.mode {
            Mode::Terminate(terminate) => &mut terminate.limits.connections,
            Mode::Passthrough(passthrough) => &mut passthrough.limits,
        }
    }
}

/// What a listener does with a connection.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "mode", rename_all = "lowercase")]
pub enum Mode {
    /// L7: the listener terminates TLS and forwards each request on its own.
    Terminate(Terminate),
    /// L4: the listener passes the connection through; TLS is between client and apiserver.
    Passthrough(Passthrough),
}

impl Mode {
    /// The name in the configuration.
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Terminate(_) => "terminate",
            Self::Passthrough(_) => "passthrough",
        }
    }
}

/// The name of the file to which `jackstay kubeconfig` copies a client certificate, beside the configuration.
pub const COPIED_CERTIFICATE: &str = "client.crt";
/// The name of the file with the key of [`COPIED_CERTIFICATE`].
pub const COPIED_KEY: &str = "client.key";

/// What to do about an identity with these files.
pub const COPIED_IDENTITY: &str = "a copy of the certificate in a kubeconfig, which nothing renews: write the \
    configuration again with `jackstay kubeconfig --force` and the options of the first time (after `jackstay install`: \
    --kubeconfig KUBECONFIG --in-place --mode terminate --config-out CONFIG); the identity is then the certificate that kubelet \
    rotates, or follows the kubeconfig";

/// A certificate chain and its key, as PEM files; both may be the same file.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize)]
pub struct CertPaths {
    /// Certificate chain, leaf first.
    pub cert_file: PathBuf,
    /// Private key.
    pub key_file: PathBuf,
}

/// The client certificate of a user in a kubeconfig: the data in it, or the files that it names.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize)]
pub struct KubeconfigUser {
    /// The kubeconfig.
    pub kubeconfig: PathBuf,
    /// The name of the user; `None` is the user of the current context.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
}

/// Where the client certificate of an identity is read, and read again when it changes.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize)]
#[serde(untagged)]
pub enum IdentitySource {
    /// PEM files.
    Files(CertPaths),
    /// A user of a kubeconfig.
    Kubeconfig(KubeconfigUser),
}

impl IdentitySource {
    /// The file that holds or names the certificate: the PEM file, or the kubeconfig.
    pub fn file(&self) -> &Path {
        match self {
            Self::Files(paths) => &paths.cert_file,
            Self::Kubeconfig(user) => &user.kubeconfig,
        }
    }

    /// The configured files.
    pub fn files(&self) -> Vec<&Path> {
        match self {
            Self::Files(paths) => vec![&paths.cert_file, &paths.key_file],
            Self::Kubeconfig(user) => vec![&user.kubeconfig],
        }
    }

    /// The configuration key of [`Self::file`].
    pub fn key(&self) -> &'static str {
        match self {
            Self::Files(_) => "cert_file",
            Self::Kubeconfig(_) => "kubeconfig",
        }
    }

    /// Whether a path is missing, which the validation of the configuration reports.
    pub fn is_incomplete(&self) -> bool {
        self.files().iter().any(|file| file.as_os_str().is_empty())
    }

    /// Whether these are the files to which `jackstay kubeconfig` copies the certificate in a kubeconfig, beside the
    /// configuration `config`. Nothing renews a copy.
    pub fn is_copy(&self, config: &Path) -> bool {
        let Self::Files(paths) = self else { return false };
        let beside = |name: &str| config.parent().map(|directory| directory.join(name));
        Some(&paths.cert_file) == beside(COPIED_CERTIFICATE).as_ref()
            && Some(&paths.key_file) == beside(COPIED_KEY).as_ref()
    }
}

impl fmt::Display for IdentitySource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Kubeconfig(KubeconfigUser { kubeconfig, user: Some(user) }) => {
                write!(f, "user {user:?} of {}", kubeconfig.display())
            }
            Self::Files(_) | Self::Kubeconfig(_) => self.file().display().fmt(f),
        }
    }
}

impl From<CertPaths> for IdentitySource {
    fn from(paths: CertPaths) -> Self {
        Self::Files(paths)
    }
}

/// The serving certificate of a listener.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ServingCert {
    /// Its files.
    #[serde(flatten)]
    pub paths: CertPaths,
    /// A local CA that renews it; certificate and key are then one file.
    #[serde(serialize_with = "as_in_file::value_or_default")]
    pub issuer: Option<CertPaths>,
}

/// The files with which a server terminates TLS.
#[derive(Debug, Clone, PartialEq)]
pub struct ServingFiles {
    /// Serving certificate.
    pub tls: ServingCert,
    /// CA bundle that verifies client certificates; `None` requests none.
    pub client_ca_file: Option<PathBuf>,
}

/// The settings of mode `terminate`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Terminate {
    /// Serving certificate.
    pub tls: ServingCert,
    /// CA bundle that verifies client certificates; `None` refuses client certificates.
    #[serde(serialize_with = "as_in_file::optional_text")]
    pub client_ca_file: Option<PathBuf>,
    /// The credentials to use upstream for clients that have proven the same identity.
    pub identities: Vec<IdentitySource>,
    /// API groups whose watches are not resumed, such as those of an aggregated apiserver whose replicas have
    /// stores of their own.
    pub never_resume_groups: Vec<String>,
    /// Resources besides leases and the status of nodes whose updates and patches are heartbeats.
    #[serde(serialize_with = "as_in_file::display_all")]
    pub heartbeats: Vec<HeartbeatResource>,
    /// The connections that are passed through; `None` if all are terminated.
    #[serde(flatten)]
    pub passed_through: Option<Box<PassedThrough>>,
    /// Limits of connections and requests.
    pub limits: TerminateLimits,
}

impl Terminate {
    /// Its TLS files.
    pub fn files(&self) -> ServingFiles {
        ServingFiles { tls: self.tls.clone(), client_ca_file: self.client_ca_file.clone() }
    }
}

/// The settings of mode `passthrough`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Passthrough {
    /// Upstreams by original destination. The first match applies, and precedes `routes`.
    pub destinations: Vec<DestinationRoute>,
    /// Upstreams by the server name in the `ClientHello`. The first match applies.
    pub routes: Vec<Route>,
    /// When connections end that are passed through.
    #[serde(flatten)]
    pub flows: FlowSettings,
    /// Limits of connections.
    pub limits: Limits,
}

/// When connections end that are passed through.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct FlowSettings {
    /// A connection without traffic for this long is closed; `None` closes none.
    #[serde(serialize_with = "as_in_file::duration_or_zero")]
    pub idle_timeout: Option<Duration>,
    /// How long connections to an endpoint that was removed may continue.
    #[serde(serialize_with = "as_in_file::duration")]
    pub leave_timeout: Duration,
    /// Whether long-lived connections are closed gradually, so that an endpoint that has become
    /// ready again gets its share when the clients reconnect.
    pub rebalance: bool,
}

impl Default for FlowSettings {
    fn default() -> Self {
        Self { idle_timeout: None, leave_timeout: Duration::from_secs(60), rebalance: false }
    }
}

/// The connections that a listener in mode `terminate` passes through.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PassedThrough {
    /// Connections with one of these server names in their `ClientHello` are passed through. Names in lower case;
    /// `*.example.com` matches names one label below `example.com`.
    #[serde(rename = "passthrough_server_names")]
    pub server_names: Vec<String>,
    /// When these connections end.
    #[serde(flatten)]
    pub flows: FlowSettings,
}

/// The upstream of some original destinations.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DestinationRoute {
    /// Original destinations.
    #[serde(serialize_with = "as_in_file::display_all")]
    pub to: Vec<Destination>,
    /// Name of the upstream.
    pub upstream: String,
}

/// The upstream of some server names.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Route {
    /// Names in lower case; `*.example.com` matches names one label below `example.com`.
    pub server_names: Vec<String>,
    /// Name of the upstream.
    pub upstream: String,
}

/// The default of [`Limits::source_prefix_v6`].
pub const SOURCE_PREFIX_V6: u8 = 64;

/// Limits of the connections of one listener, in either mode.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Limits {
    /// Open client connections; each worker has an equal share.
    pub max_connections: usize,
    /// Client addresses of IPv6 with the same first bits, as many as this, are one source; each source has a share of
    /// the connections, handshakes and memory.
    pub source_prefix_v6: u8,
    /// Limit of the TLS handshake. In mode `passthrough`: limit of the time until the `ClientHello`,
    /// and of the time until the server's first byte.
    #[serde(serialize_with = "as_in_file::duration")]
    pub handshake_timeout: Duration,
}

/// Limits of one listener in mode `terminate`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct TerminateLimits {
    /// Limits of connections.
    #[serde(flatten)]
    pub connections: Limits,
    /// Limits of requests.
    #[serde(flatten)]
    pub requests: RequestLimits,
}

/// Limits of the requests of one listener.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct RequestLimits {
    /// Concurrent HTTP/2 streams of one client connection.
    pub max_streams: u32,
    /// Bytes of request headers.
    #[serde(serialize_with = "as_in_file::size")]
    pub max_header_bytes: u32,
    /// HTTP/1.1: limit of the time from the first byte of a request head until it is complete, and of the time without
    /// any byte before the first request. HTTP/2: limit of the time without any frame, PINGs included, before the
    /// first request.
    #[serde(serialize_with = "as_in_file::duration")]
    pub header_timeout: Duration,
    /// A client that reads none of the queued bytes for this long is disconnected. If it only opens
    /// no window for one HTTP/2 stream, that stream is reset.
    #[serde(serialize_with = "as_in_file::duration")]
    pub stall_timeout: Duration,
}

/// Whether a configured pattern matches a server name. `*` matches exactly one label. Both are in lower case.
pub fn server_name_matches(pattern: &str, name: &str) -> bool {
    match pattern.strip_prefix("*.") {
        None => pattern == name,
        Some(parent) => {
            name.split_once('.').is_some_and(|(label, rest)| !label.is_empty() && rest == parent)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matches_exact_names_and_one_wildcard_label() {
        for (pattern, name, expected) in [
            ("a.example", "a.example", true),
            ("a.example", "b.example", false),
            ("a.example", "x.a.example", false),
            ("*.example", "a.example", true),
            ("*.example", "a.b.example", false),
            ("*.example", ".example", false),
            ("*.example", "example", false),
        ] {
            assert_eq!(server_name_matches(pattern, name), expected, "{pattern} {name}");
        }
    }
}

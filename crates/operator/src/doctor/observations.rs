//! The results of an examination as plain data: the input of the findings, and part of `-o json`.
//!
//! Field names are keys of that output.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use jackstay_core::backends::{Kind, SURVEY};
use jackstay_core::kubernetes_version::ServerVersion;
use jackstay_core::quantity::quantity;
use serde::{Serialize, Serializer};

use super::image::PodImage;

/// A duration in milliseconds with a resolution of 1 µs.
#[derive(Debug, Clone, Copy, PartialEq, PartialOrd, Serialize)]
#[serde(transparent)]
pub struct Ms(pub f64);

impl From<Duration> for Ms {
    fn from(duration: Duration) -> Self {
        Self((duration.as_secs_f64() * 1e6).round() / 1e3)
    }
}

/// The results of an examination.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Observations {
    /// Errors of the configuration.
    pub configuration: Vec<String>,
    /// Checks of this machine.
    pub host: Host,
    /// The name servers; `None` if no name needed one.
    pub dns: Option<Dns>,
    /// The endpoints of the plan, followed by those that the cluster names.
    pub endpoints: Vec<EndpointObservation>,
}

/// Checks of this machine.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Host {
    /// The addresses where jackstay is to listen.
    pub listen: Vec<ListenAddress>,
    /// Whether `::1` can be bound.
    pub ipv6: bool,
    /// Soft limit of open files (`RLIMIT_NOFILE`).
    pub open_files: Option<u64>,
    /// Client connections that the configuration allows.
    pub wanted_connections: u64,
    /// The images of static pods of jackstay that kubelet does not pull.
    pub images: Vec<PodImage>,
}

/// An address where jackstay is to listen.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ListenAddress {
    /// The address.
    pub address: SocketAddr,
    /// The name of the listener, or `the admin endpoint`.
    pub what: String,
    /// Whether it can be bound.
    pub state: ListenState,
}

/// Whether an address can be bound.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ListenState {
    /// It can be bound.
    Free,
    /// A jackstay listens there.
    Jackstay,
    /// Another process listens there; its name and id, if this user may see them.
    Taken(Option<String>),
    /// No interface of this machine has the address.
    #[serde(rename = "not_ours")]
    NotLocal,
    /// The port is privileged (`ip_unprivileged_port_start`, 1024 by default).
    Denied,
    /// Binding fails for another reason.
    Failed(String),
}

/// Results of name resolution.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Dns {
    /// Why resolv.conf names no server.
    pub resolv_conf: Option<String>,
    /// The name servers of resolv.conf.
    pub servers: Vec<NameServer>,
}

/// The answers of a name server.
#[derive(Debug, Clone, Serialize)]
pub struct NameServer {
    /// Its address.
    pub address: SocketAddr,
    /// Queries sent.
    pub asked: u32,
    /// Queries answered.
    pub answered: u32,
    /// Median time of an answered query.
    pub p50_ms: Option<Ms>,
    /// The last error.
    pub error: Option<String>,
}

/// Everything observed of an endpoint: an apiserver, or a load balancer of several.
#[derive(Debug, Clone, Serialize)]
pub struct EndpointObservation {
    /// Address as the user or the cluster gave it.
    pub address: String,
    /// Whether the user or the cluster named it.
    pub source: EndpointSource,
    /// The name that its certificate must contain.
    pub server_name: String,
    /// `:authority` of the requests to it.
    pub authority: String,
    /// The path below which it has the API.
    pub path_prefix: String,
    /// That it answers to one host and not to another, if that was seen.
    pub host_routing: Option<HostRouting>,
    /// Whether its certificate must be verified; `false` without a CA.
    pub verifies: bool,
    /// The addresses of its host.
    pub resolved: Resolution,
    /// The listen address of jackstay that a connection to it would reach.
    pub loops_to: Option<SocketAddr>,
    /// Connections that were opened for one measurement each, in the order of their start.
    pub fresh: Vec<ConnectAttempt>,
    /// Connections that were pinged continuously, one after the other.
    #[serde(rename = "lasting")]
    pub long_lived: Vec<LongLived>,
    /// A connection that was idle until a PING at the end.
    pub idle: Option<IdleConnection>,
    /// The certificate that it presented.
    pub certificate: Option<ServerCertificate>,
    /// Its clock minus this machine's, in seconds.
    pub clock_skew_s: Option<f64>,
    /// `SETTINGS_MAX_CONCURRENT_STREAMS`.
    pub max_streams: Option<usize>,
    /// The version that it reports at `/version`, such as `v1.36.2`.
    #[serde(serialize_with = "as_git_version")]
    pub version: Option<ServerVersion>,
    /// Whether a credential was sent.
    pub authenticated: bool,
    /// The client certificate that was presented to it.
    pub shown: Option<ClientCertificate>,
    /// What is behind each of its addresses; empty if they were not examined.
    #[serde(rename = "balancers")]
    pub behind: Vec<AddressBackends>,
}

/// What is behind an address.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct AddressBackends {
    /// The address.
    pub address: SocketAddr,
    /// What connections have reached.
    pub kind: Kind,
    /// The names of the apiservers that connections have reached.
    pub backends: Vec<String>,
    /// The number of these connections.
    pub connections: usize,
}

impl AddressBackends {
    /// How many apiservers the connections have reached, and which; `None` if that is not several.
    pub fn several(&self) -> Option<String> {
        let names = || self.backends.join(", ");
        let is_several = matches!(self.kind, Kind::Several(_));
        is_several.then(|| format!("{} ({})", quantity(self.backends.len(), "apiserver"), names()))
    }

    /// Whether enough connections have been opened, and all have reached one apiserver.
    pub fn is_always_one(&self) -> bool {
        self.kind == Kind::One && self.connections >= SURVEY
    }
}

// serde passes every field by reference.
#[allow(clippy::ref_option)]
fn as_git_version<S: Serializer>(version: &Option<ServerVersion>, s: S) -> Result<S::Ok, S::Error> {
    version.as_ref().map(|version| &*version.git_version).serialize(s)
}

/// That a server answers as an apiserver to one host, and not to another.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct HostRouting {
    /// The host to which it answers as an apiserver.
    pub served: String,
    /// A host to which it does not.
    pub refused: String,
    /// The status of that response.
    pub status: u16,
}

/// The client certificate that was presented to an endpoint.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ClientCertificate {
    /// Its subject.
    pub subject: String,
    /// End of its validity (RFC 3339).
    pub not_after: String,
    /// Seconds until it expires; negative if it has expired.
    pub expires_in_s: i64,
    /// Whether it is X.509 version 1.
    pub is_version_1: bool,
}

/// Where the address of an endpoint comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum EndpointSource {
    /// From the user.
    Given,
    /// From the cluster, as the address of one of its apiservers. The path to it is direct.
    Cluster,
}

/// The result of resolving a host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Resolution {
    /// At least one address.
    Addresses(Vec<IpAddr>),
    /// The name servers answer that the name has no address.
    NoSuchName,
    /// No name server answered, for this reason.
    NoAnswer(String),
}

impl Resolution {
    /// The addresses; none without an answer.
    pub fn addresses(&self) -> &[IpAddr] {
        match self {
            Self::Addresses(ips) => ips,
            Self::NoSuchName | Self::NoAnswer(_) => &[],
        }
    }
}

/// The steps of a fresh connection in their order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Step {
    /// Resolving the host.
    Resolve,
    /// The TCP handshake.
    Connect,
    /// The TLS handshake.
    Tls,
    /// The HTTP/2 preface and the first PONG, which comes after SETTINGS.
    Http2,
    /// The response of `/readyz`.
    Readyz,
    /// A request that needs a credential.
    Request,
}

impl Step {
    /// Every step.
    pub const ALL: [Self; 6] =
        [Self::Resolve, Self::Connect, Self::Tls, Self::Http2, Self::Readyz, Self::Request];

    /// Its name in the report.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Resolve => "resolve",
            Self::Connect => "connect",
            Self::Tls => "tls",
            Self::Http2 => "http/2 ping",
            Self::Readyz => "/readyz",
            Self::Request => "request",
        }
    }
}

/// A fresh connection.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ConnectAttempt {
    /// Its start, since the start of the examination.
    pub at_ms: Ms,
    /// Each completed step and its duration.
    pub steps: Vec<(Step, Ms)>,
    /// The failure that ended it before its last step.
    pub failure: Option<Failure>,
}

impl ConnectAttempt {
    /// The duration of a step, if it was completed.
    pub fn time(&self, step: Step) -> Option<Ms> {
        self.steps.iter().find(|(s, _)| *s == step).map(|(_, ms)| *ms)
    }
}

/// Why a fresh connection failed.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Failure {
    /// The step that failed.
    pub step: Step,
    /// The kind of failure.
    pub kind: FailureKind,
    /// The error as text, with the remedy if there is one.
    pub text: String,
    /// What to do, at the end of the text, if a failure of TLS says so.
    pub remedy: Option<String>,
}

/// Kinds of failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FailureKind {
    /// No response within the limit.
    Timeout,
    /// No process listens there.
    Refused,
    /// `connect` fails in another way, such as `EPERM` of a local firewall.
    Unreachable,
    /// There is no path to the address: this machine has no route (`ENETUNREACH`), or no machine has the
    /// address or a router rejects it (`EHOSTUNREACH`).
    NoRoute,
    /// The peer closed the connection.
    Reset,
    /// Another CA has signed the certificate.
    UnknownIssuer,
    /// The certificate has expired.
    Expired,
    /// The certificate is not valid yet.
    NotYetValid,
    /// The certificate is for other names.
    WrongName,
    /// The certificate, or one of its CAs, is refused for another reason.
    Certificate,
    /// The peer, or the server behind a proxy, speaks HTTP without TLS.
    PlainHttp,
    /// The peer speaks a protocol that is neither TLS nor HTTP.
    NotTls,
    /// TLS failed in another way.
    Tls,
    /// The server does not offer HTTP/2.
    NoHttp2,
    /// The response has this status instead of 200.
    Status(u16),
    /// The response is an error of a jackstay on the path, with this status.
    ErrorOfJackstay(u16),
    /// The server does not accept the credential.
    Unauthorized,
    /// Any other failure.
    Other,
}

/// A connection that was pinged continuously.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LongLived {
    /// When it was established, since the start of the examination.
    pub at_ms: Ms,
    /// PINGs answered.
    pub pongs: usize,
    /// Median round trip.
    pub p50_ms: Option<Ms>,
    /// 99th percentile of the round trips.
    pub p99_ms: Option<Ms>,
    /// Round trips so long that they contained a retransmission.
    pub late: usize,
    /// How long the last PING waited, if no PONG came.
    pub silent_ms: Option<Ms>,
    /// When that PING was sent, since the start of the examination.
    pub silent_at_ms: Option<Ms>,
    /// Why the server ended it.
    pub ended: Option<String>,
    /// Whether that was because of the PINGs.
    pub refuses_pings: bool,
    /// TCP segments that were retransmitted.
    pub retransmitted: u32,
    /// TCP segments sent.
    pub sent: u32,
}

/// A connection that was idle.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct IdleConnection {
    /// How long it was idle.
    pub for_ms: Ms,
    /// Whether the server answered a PING afterwards.
    pub alive: bool,
    /// TCP segments that this machine sent while it was idle: acknowledgements of data from the server.
    pub sent: u32,
}

/// A server's certificate.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ServerCertificate {
    /// Its subject.
    pub subject: String,
    /// Its issuer.
    pub issuer: String,
    /// Its subject alternative names.
    pub names: Vec<String>,
    /// Start of its validity (RFC 3339).
    pub not_before: String,
    /// End of its validity (RFC 3339).
    pub not_after: String,
    /// Seconds until it expires; negative if it has expired.
    pub expires_in_s: i64,
}

impl FailureKind {
    /// Whether the server's certificate was not accepted.
    pub fn is_of_certificate(self) -> bool {
        matches!(
            self,
            Self::UnknownIssuer
                | Self::Expired
                | Self::NotYetValid
                | Self::WrongName
                | Self::Certificate
        )
    }
}

impl EndpointObservation {
    /// The number of fresh connections that received a PONG.
    pub fn connected(&self) -> usize {
        self.fresh.iter().filter(|a| a.time(Step::Http2).is_some()).count()
    }

    /// Whether a handshake has verified its certificate.
    pub fn is_verified(&self) -> bool {
        self.verifies && self.fresh.iter().any(|a| a.time(Step::Tls).is_some())
    }

    /// The durations of a completed step over all fresh connections in milliseconds, sorted.
    pub fn times(&self, step: Step) -> Vec<f64> {
        let mut times: Vec<f64> =
            self.fresh.iter().filter_map(|a| a.time(step)).map(|ms| ms.0).collect();
        times.sort_by(f64::total_cmp);
        times
    }

    /// The failures of a step.
    pub fn failures(&self, step: Step) -> impl Iterator<Item = &Failure> {
        self.fresh.iter().filter_map(|a| a.failure.as_ref()).filter(move |f| f.step == step)
    }
}

/// The `q` quantile (0..1) of sorted values.
pub fn percentile(sorted: &[f64], q: f64) -> Option<f64> {
    let last = sorted.len().checked_sub(1)?;
    Some(sorted[(last as f64 * q).ceil() as usize])
}

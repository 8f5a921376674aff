//! What was seen, as plain data: the input of the findings and the `--output json` of the command.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use serde::Serialize;

/// A time in milliseconds, as people read them.
#[derive(Debug, Clone, Copy, PartialEq, PartialOrd, Serialize)]
#[serde(transparent)]
pub struct Ms(pub f64);

impl From<Duration> for Ms {
    fn from(duration: Duration) -> Self {
        // Microseconds are enough, and short.
        Self((duration.as_secs_f64() * 1e6).round() / 1e3)
    }
}

/// Everything.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Observations {
    /// Mistakes of the configuration, if there was one to read.
    pub configuration: Vec<String>,
    /// This machine.
    pub host: Host,
    /// The name servers, if a name had to be resolved.
    pub dns: Option<Dns>,
    /// Each endpoint.
    pub endpoints: Vec<Endpoint>,
}

/// This machine.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Host {
    /// Where jackstay is to listen.
    pub listen: Vec<Listen>,
    /// Whether an IPv6 address can be bound here.
    pub ipv6: bool,
    /// Most open files a process started here may have (the soft limit).
    pub open_files: Option<u64>,
    /// Connections that the configuration allows.
    pub wanted_connections: u64,
}

/// A place to listen.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Listen {
    /// Where.
    pub address: SocketAddr,
    /// What for.
    pub what: String,
    /// Whether it can be had.
    pub state: ListenState,
}

/// Whether a place to listen can be had.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ListenState {
    /// It is free.
    Free,
    /// A jackstay listens there.
    Jackstay,
    /// Another process listens there: its name and id, if they may be known.
    Taken(Option<String>),
    /// This host does not have the address.
    NotOurs,
    /// Something else.
    Failed(String),
}

/// Name resolution.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Dns {
    /// What is wrong with resolv.conf, if anything.
    pub resolv_conf: Option<String>,
    /// Each name server it names.
    pub servers: Vec<NameServer>,
}

/// One name server.
#[derive(Debug, Clone, Serialize)]
pub struct NameServer {
    /// Where it is.
    pub address: SocketAddr,
    /// Questions asked.
    pub asked: u32,
    /// Questions answered.
    pub answered: u32,
    /// Median time of an answer.
    pub p50_ms: Option<Ms>,
    /// The last thing that was no answer.
    pub error: Option<String>,
}

/// An apiserver, or what stands before some.
#[derive(Debug, Clone, Serialize)]
pub struct Endpoint {
    /// Its address as the user or the cluster gave it.
    pub address: String,
    /// How it was found.
    pub source: Source,
    /// The name its certificate is verified against.
    pub server_name: String,
    /// What the name resolves to.
    pub resolved: Resolved,
    /// An address of this machine where jackstay listens is behind it.
    pub loops_to: Option<SocketAddr>,
    /// Fresh connections.
    pub fresh: Vec<Attempt>,
    /// Connections that were kept and pinged all the time, one after the other.
    pub lasting: Vec<Lasting>,
    /// A connection that was left alone and pinged at the end.
    pub idle: Option<Idle>,
    /// The certificate it shows.
    pub certificate: Option<Certificate>,
    /// Its clock minus ours, in seconds.
    pub clock_skew_s: Option<f64>,
    /// Streams it allows on a connection.
    pub max_streams: Option<usize>,
    /// A credential was sent.
    pub authenticated: bool,
    /// The client certificate that was shown.
    pub shown: Option<Shown>,
}

/// A client certificate.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Shown {
    /// Whom it names.
    pub subject: String,
    /// End of its validity.
    pub not_after: String,
    /// Seconds until then; negative if it is over.
    pub expires_in_s: i64,
}

/// How an endpoint was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    /// The user named it.
    Given,
    /// The cluster names it as one of its apiservers: a direct path.
    Cluster,
}

/// What a host name resolves to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Resolved {
    /// Addresses.
    Addresses(Vec<IpAddr>),
    /// The name servers say that it does not exist.
    NoSuchName,
    /// Nobody answered.
    NoAnswer(String),
}

/// The steps of a fresh connection, in their order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Step {
    /// The name.
    Resolve,
    /// TCP.
    Connect,
    /// The TLS handshake.
    Tls,
    /// The HTTP/2 preface and the first PONG, which comes after SETTINGS.
    Http2,
    /// `/readyz`.
    Readyz,
    /// A request that needs a credential.
    Request,
}

impl Step {
    /// Every step.
    pub const ALL: [Self; 6] =
        [Self::Resolve, Self::Connect, Self::Tls, Self::Http2, Self::Readyz, Self::Request];

    /// What it is called in the report.
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

/// One fresh connection.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Attempt {
    /// When it began, in milliseconds since the examination began.
    pub at_ms: Ms,
    /// How long each step took that was done.
    pub steps: Vec<(Step, Ms)>,
    /// Where and how it failed, if it did.
    pub failure: Option<Failure>,
}

impl Attempt {
    /// How long a step took, if it was done.
    pub fn time(&self, step: Step) -> Option<Ms> {
        self.steps.iter().find(|(s, _)| *s == step).map(|(_, ms)| *ms)
    }
}

/// How an attempt failed.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Failure {
    /// In which step.
    pub step: Step,
    /// The kind of failure.
    pub kind: Kind,
    /// What was said.
    pub text: String,
}

/// Kinds of failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// Nothing came in time.
    Timeout,
    /// Nobody listens there.
    Refused,
    /// No route, or a firewall that says so.
    Unreachable,
    /// Cut by the other side.
    Reset,
    /// The certificate chains to another CA.
    UnknownIssuer,
    /// The certificate has expired.
    Expired,
    /// The certificate is not valid yet.
    NotYetValid,
    /// The certificate is for other names.
    WrongName,
    /// TLS failed in another way.
    Tls,
    /// The server does not offer HTTP/2.
    NoHttp2,
    /// The answer has another status than 200.
    Status(u16),
    /// The server does not know the credential.
    Unauthorized,
    /// Something else.
    Other,
}

/// A connection that was kept.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Lasting {
    /// When it was up, in milliseconds since the examination began.
    pub at_ms: Ms,
    /// PINGs answered.
    pub pongs: usize,
    /// Median round trip.
    pub p50_ms: Option<Ms>,
    /// 99th percentile.
    pub p99_ms: Option<Ms>,
    /// Round trips that took a retransmission longer than usual.
    pub late: usize,
    /// A PING has been out this long and nothing at all has come back.
    pub silent_ms: Option<Ms>,
    /// When that PING went out, in milliseconds since the examination began.
    pub silent_at_ms: Option<Ms>,
    /// How it ended, if the other side ended it.
    pub ended: Option<String>,
    /// Segments sent again.
    pub retransmitted: u32,
    /// Segments sent.
    pub sent: u32,
}

/// A connection that was left alone.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Idle {
    /// For how long.
    pub for_ms: Ms,
    /// Whether it answered a PING afterwards.
    pub alive: bool,
    /// Segments that this machine sent on it meanwhile: acknowledgements of what the server sent.
    pub sent: u32,
}

/// A server's certificate.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Certificate {
    /// Whom it names.
    pub subject: String,
    /// Who signed it.
    pub issuer: String,
    /// The names and addresses it is for.
    pub names: Vec<String>,
    /// Start of its validity.
    pub not_before: String,
    /// End of its validity.
    pub not_after: String,
    /// Seconds until then; negative if it is over.
    pub expires_in_s: i64,
}

impl Endpoint {
    /// Fresh connections that got a PONG: the transport works.
    pub fn connected(&self) -> usize {
        self.fresh.iter().filter(|a| a.time(Step::Http2).is_some()).count()
    }

    /// Failures in a step.
    pub fn failures(&self, step: Step) -> impl Iterator<Item = &Failure> {
        self.fresh.iter().filter_map(|a| a.failure.as_ref()).filter(move |f| f.step == step)
    }
}

/// The value that a share `q` (0..1) of sorted values does not exceed.
pub fn percentile(sorted: &[f64], q: f64) -> Option<f64> {
    let last = sorted.len().checked_sub(1)?;
    Some(sorted[(last as f64 * q).ceil() as usize])
}

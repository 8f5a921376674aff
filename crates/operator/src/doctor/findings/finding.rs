//! A finding with its severity, its cause and its texts.

use std::borrow::Cow;

use serde::Serialize;

/// The severity of a finding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Level {
    /// Must be repaired; the exit code is 1.
    Problem,
    /// For information.
    Note,
}

/// The cause of a finding: a stable name for programs.
///
/// The order is that of the report, in which a cause precedes its consequences: an unresolved name before
/// an unreachable endpoint, an invalid certificate before a refused request, a dead endpoint before lost
/// packets. [`NoIpv6`](Self::NoIpv6) and the causes after it are notes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// The configuration cannot be used.
    Configuration,
    /// An endpoint is jackstay's own address.
    Loop,
    /// Another process listens on the port.
    PortTaken,
    /// The listen address cannot be bound.
    AddressNotOurs,
    /// The image of the static pod is not on this node, and kubelet does not pull it.
    ImageMissing,
    /// kubelet may delete the image of the static pod, and does not pull it again.
    ImageUnpinned,
    /// No name server answers.
    DnsBlackHole,
    /// The name does not exist.
    NoSuchName,
    /// The clocks of the server and this machine differ by enough to invalidate certificates.
    ClockSkew,
    /// The certificate has expired.
    CertificateExpired,
    /// The certificate is not valid yet.
    CertificateNotYetValid,
    /// Another CA has signed the certificate.
    WrongCa,
    /// The certificate is for other names.
    SanMissing,
    /// TLS fails for another reason.
    Tls,
    /// The endpoint cannot be reached.
    DeadEndpoint,
    /// The client certificate has expired.
    ClientCertificateExpired,
    /// The endpoint does not speak HTTP/2.
    NoHttp2,
    /// The credential is not accepted.
    Unauthorized,
    /// The server answers to another host only.
    RoutesByHost,
    /// The server has no apiserver at the host and path of requests.
    NotServed,
    /// A device on the path forgets established connections.
    ForgottenFlows,
    /// The server closes connections because of PINGs.
    LimitedPings,
    /// The apiserver is not ready.
    #[serde(rename = "sick_endpoint")]
    NotReadyEndpoint,
    /// Packets are lost.
    PacketLoss,
    /// Some connections fail.
    #[serde(rename = "unsteady")]
    IntermittentEndpoint,
    /// The clocks differ by less than invalidates certificates.
    #[serde(rename = "clock_skew")]
    SmallClockSkew,
    /// The versions of the apiservers are further apart than Kubernetes supports.
    VersionSkew,
    /// Some name servers do not answer.
    DnsPartly,
    /// Whether the image of the static pod is there and pinned is not known.
    ImageUnknown,
    /// A listener has an IPv6 address and this machine has no IPv6.
    NoIpv6,
    /// The certificate will expire soon.
    ExpiresSoon,
    /// The client certificate is X.509 version 1.
    ClientCertificateVersion1,
    /// A path is much slower than another.
    SlowPath,
    /// An address leads to several apiservers.
    SeveralApiservers,
    /// The only address always leads to the same apiserver.
    OneApiserver,
    /// Too few open files are allowed.
    OpenFiles,
}

/// A diagnosed cause.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Finding {
    /// The severity.
    pub level: Level,
    /// The cause.
    pub cause: Cause,
    /// The problem, as a sentence.
    pub what: String,
    /// The observation that shows it.
    pub because: String,
    /// What the user can do.
    pub advice: String,
    /// The endpoints concerned; empty if the finding concerns this machine.
    pub endpoints: Vec<String>,
}

impl Finding {
    /// Sets the endpoint concerned, whose address is part of the texts.
    pub(super) fn about(self, address: &str) -> Self {
        Self { endpoints: vec![address.to_owned()], ..self }
    }

    /// A text of this finding without the address of its endpoint.
    pub(super) fn without_address<'a>(&self, text: &'a str) -> Cow<'a, str> {
        match self.endpoints.first() {
            Some(address) => Cow::Owned(text.replace(address.as_str(), "")),
            None => Cow::Borrowed(text),
        }
    }

    /// Whether two findings differ at most in endpoint and observation.
    pub(super) fn is_alike(&self, other: &Self) -> bool {
        (self.level, self.cause) == (other.level, other.cause)
            && self.without_address(&self.what) == other.without_address(&other.what)
            && self.without_address(&self.advice) == other.without_address(&other.advice)
    }
}

pub(super) fn problem(
    cause: Cause,
    what: impl Into<String>,
    because: impl Into<String>,
    advice: impl Into<String>,
) -> Finding {
    Finding {
        level: Level::Problem,
        cause,
        what: what.into(),
        because: because.into(),
        advice: advice.into(),
        endpoints: Vec::new(),
    }
}

pub(super) fn note(
    cause: Cause,
    what: impl Into<String>,
    because: impl Into<String>,
    advice: impl Into<String>,
) -> Finding {
    Finding { level: Level::Note, ..problem(cause, what, because, advice) }
}

//! A finding: its cause, its severity and its texts.

use std::borrow::Cow;

use serde::Serialize;

/// The severity of a finding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Level {
    /// Needs a fix; exit code 1.
    Problem,
    /// For information.
    Note,
}

/// The cause of a finding: a stable name for programs.
///
/// The order is that of the report: a cause precedes its consequences. A name that does not resolve
/// precedes the endpoint that is not reached, a certificate the request that is never sent, a dead
/// endpoint lost packets. The last four are notes.
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
    /// No name server answers.
    DnsBlackHole,
    /// The name does not exist.
    NoSuchName,
    /// The clocks of server and machine differ by enough to invalidate certificates.
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
    /// A device on the path forgets established connections.
    ForgottenFlows,
    /// The apiserver is not ready.
    #[serde(rename = "sick_endpoint")]
    NotReadyEndpoint,
    /// Packets are lost.
    PacketLoss,
    /// Some connections fail.
    #[serde(rename = "unsteady")]
    IntermittentEndpoint,
    /// The clocks of server and machine differ by a little.
    #[serde(rename = "clock_skew")]
    SmallClockSkew,
    /// Some name servers do not answer.
    DnsPartly,
    /// A listener has an IPv6 address and this machine has no IPv6.
    NoIpv6,
    /// The certificate will expire soon.
    ExpiresSoon,
    /// A path is much slower than another.
    SlowPath,
    /// Too few open files are allowed.
    OpenFiles,
}

/// A diagnosed cause.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Finding {
    /// Its severity.
    pub level: Level,
    /// The cause.
    pub cause: Cause,
    /// What is wrong: a sentence.
    pub what: String,
    /// The observation behind it.
    pub because: String,
    /// What to do.
    pub advice: String,
    /// The endpoints concerned; empty if it concerns this machine.
    pub endpoints: Vec<String>,
}

impl Finding {
    /// Sets the endpoint concerned, whose address is part of the text.
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

    /// Whether two findings differ at most in their endpoint and observation.
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

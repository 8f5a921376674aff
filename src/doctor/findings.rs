//! Diagnoses causes from observations by pure rules; the most likely cause comes first.
//!
//! Each rule detects one cause and gives it a weight. A cause weighs more than its consequences: a
//! name that does not resolve more than the endpoint that is not reached, a certificate more than the
//! request that is never sent, a dead endpoint more than lost packets. Findings that differ only in
//! their endpoint are merged.
//!
//! | weight | cause |
//! |---|---|
//! | 100 | an invalid configuration; an endpoint that is jackstay itself |
//! | 95 | a port that another process holds; an address or port that cannot be bound (94) |
//! | 90 | name servers that do not answer; a name that does not exist |
//! | 85 | a clock that is off by enough to invalidate certificates |
//! | 80 | the server's certificate: expired, not yet valid, another CA, other names |
//! | 75 | a dead endpoint (84 if all are) |
//! | 74 | an expired client certificate |
//! | 72 | no HTTP/2 |
//! | 70 | a credential that is not accepted |
//! | 65 | established connections that fall silent while fresh ones work |
//! | 60 | an apiserver that is not ready |
//! | 50 | packet loss |
//! | 45 | some fresh connections that fail |
//! | 30 | one silent name server of several; a clock that is slightly off |
//! | 10 | notes: limits, IPv6, certificates that expire soon |

mod certificates;
mod machine;
mod path;
#[cfg(test)]
mod tests;

use std::borrow::Cow;

use serde::Serialize;

use super::observations::Observations;

/// The severity of a finding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Level {
    /// Needs a fix; exit code 1.
    Problem,
    /// For information.
    Note,
}

/// The cause of a finding: a stable name for programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
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
    /// Some name servers do not answer.
    DnsPartly,
    /// The name does not exist.
    NoSuchName,
    /// The clocks of server and machine differ.
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
    /// The endpoint does not speak HTTP/2.
    NoHttp2,
    /// The client certificate has expired.
    ClientCertificateExpired,
    /// The credential is not accepted.
    Unauthorized,
    /// A device on the path forgets established connections.
    ForgottenFlows,
    /// The apiserver is not ready.
    SickEndpoint,
    /// Packets are lost.
    PacketLoss,
    /// Some connections fail.
    Unsteady,
    /// The certificate will expire soon.
    ExpiresSoon,
    /// Too few open files are allowed.
    OpenFiles,
    /// A listener has an IPv6 address and this machine has no IPv6.
    NoIpv6,
    /// A path is much slower than another.
    SlowPath,
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
    #[serde(skip)]
    weight: u32,
}

impl Finding {
    /// Sets the endpoint concerned, whose address is part of the text.
    fn about(self, address: &str) -> Self {
        Self { endpoints: vec![address.to_owned()], ..self }
    }

    /// A text of this finding without the address of its endpoint.
    fn without_address<'a>(&self, text: &'a str) -> Cow<'a, str> {
        match self.endpoints.first() {
            Some(address) => Cow::Owned(text.replace(address.as_str(), "")),
            None => Cow::Borrowed(text),
        }
    }

    /// Whether two findings differ at most in their endpoint and observation.
    fn is_alike(&self, other: &Self) -> bool {
        (self.level, self.cause, self.weight) == (other.level, other.cause, other.weight)
            && self.without_address(&self.what) == other.without_address(&other.what)
            && self.without_address(&self.advice) == other.without_address(&other.advice)
    }
}

/// Largest number of different observations in a merged finding.
const MAX_REASONS: usize = 5;

/// Merges findings that are alike into one that names every endpoint.
fn group(found: Vec<Finding>) -> Vec<Finding> {
    let mut groups: Vec<Vec<Finding>> = Vec::new();
    for finding in found {
        match groups.iter_mut().find(|group| group[0].is_alike(&finding)) {
            Some(group) => group.push(finding),
            None => groups.push(vec![finding]),
        }
    }
    groups.iter().map(|group| merge(group)).collect()
}

fn merge(group: &[Finding]) -> Finding {
    let mut seen: Vec<Cow<'_, str>> = Vec::new();
    let mut reasons: Vec<&str> = Vec::new();
    for finding in group {
        let bare = finding.without_address(&finding.because);
        if !seen.contains(&bare) {
            seen.push(bare);
            reasons.push(&finding.because);
        }
    }
    let more = reasons.len().saturating_sub(MAX_REASONS);
    let mut because = reasons[..reasons.len() - more].join("; ");
    if more > 0 {
        because = format!("{because}; and {more} more");
    }
    let endpoints: Vec<String> = group.iter().flat_map(|f| f.endpoints.clone()).collect();
    let mut what = group[0].what.clone();
    if let [_, others @ .., last] = endpoints.as_slice() {
        let others = match others {
            [] => last.clone(),
            others => format!("{} and {last}", others.join(", ")),
        };
        what = format!("{what} The same holds for {others}.");
    }
    Finding { what, because, endpoints, ..group[0].clone() }
}

/// Applies every rule. Problems come before notes, and the most likely cause comes first.
pub fn diagnose(seen: &Observations) -> Vec<Finding> {
    let mut found = Vec::new();
    machine::configuration(seen, &mut found);
    machine::listen(seen, &mut found);
    machine::name_servers(seen, &mut found);
    machine::clocks(seen, &mut found);
    certificates::server(seen, &mut found);
    certificates::client(seen, &mut found);
    path::reachability(seen, &mut found);
    for endpoint in &seen.endpoints {
        path::credential(endpoint, &mut found);
        path::forgotten_flows(endpoint, seen, &mut found);
        path::readiness(endpoint, &mut found);
        path::intermittent(endpoint, &mut found);
    }
    path::loss(seen, &mut found);
    path::slow_balancers(seen, &mut found);
    machine::limits(seen, &mut found);
    let mut found = group(found);
    found.sort_by_key(|f| (f.level == Level::Note, std::cmp::Reverse(f.weight)));
    found
}

/// Whether a finding is a problem.
pub fn has_problems(findings: &[Finding]) -> bool {
    findings.iter().any(|finding| finding.level == Level::Problem)
}

fn problem(
    weight: u32,
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
        weight,
    }
}

fn note(
    cause: Cause,
    what: impl Into<String>,
    because: impl Into<String>,
    advice: impl Into<String>,
) -> Finding {
    Finding { level: Level::Note, ..problem(10, cause, what, because, advice) }
}

//! From what was seen to what is wrong: pure rules, the most likely cause first.
//!
//! Each rule looks for one cause and gives it a weight. A cause that explains others weighs more
//! than what it explains: a name that nobody resolves more than the endpoint that is not reached, a
//! certificate more than the request that was never sent, a dead endpoint more than lost packets.
//! Findings that differ in their endpoint alone become one.
//!
//! | weight | cause |
//! |---|---|
//! | 100 | the configuration itself; requests would loop |
//! | 95 | a port that another process has |
//! | 90 | name servers that do not answer; a name that does not exist |
//! | 85 | a clock that is wrong by more than a certificate forgives |
//! | 80 | the certificate: expired, not yet valid, another CA, other names |
//! | 75 | a dead endpoint (all of them: 84) |
//! | 74 | our own client certificate has expired |
//! | 72 | no HTTP/2 |
//! | 70 | the credential is not accepted |
//! | 65 | established connections fall silent while fresh ones work |
//! | 60 | the apiserver says that it is not ready |
//! | 50 | packets are lost |
//! | 45 | some connections fail |
//! | 30 | one name server of several is silent; a clock that is off |
//! | 10 | notes: limits, IPv6, expiry to come |

mod certificates;
mod machine;
mod path;
#[cfg(test)]
mod tests;

use std::borrow::Cow;

use serde::Serialize;

use super::observations::Observations;

/// How much a finding matters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Level {
    /// Something is wrong.
    Problem,
    /// Good to know.
    Note,
}

/// Kinds of cause, for machines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// The configuration cannot be used.
    Configuration,
    /// An endpoint is jackstay's own address.
    Loop,
    /// Another process has the port.
    PortTaken,
    /// The address to listen on is not this host's.
    AddressNotOurs,
    /// No name server answers.
    DnsBlackHole,
    /// Some name servers do not answer.
    DnsPartly,
    /// The name does not exist.
    NoSuchName,
    /// A clock is wrong.
    ClockSkew,
    /// The certificate has expired.
    CertificateExpired,
    /// The certificate is not valid yet.
    CertificateNotYetValid,
    /// The certificate chains to another CA.
    WrongCa,
    /// The certificate is for other names.
    SanMissing,
    /// TLS fails in another way.
    Tls,
    /// The endpoint cannot be reached.
    DeadEndpoint,
    /// The endpoint does not speak HTTP/2.
    NoHttp2,
    /// The client certificate has expired.
    ClientCertificateExpired,
    /// The credential is refused.
    Unauthorized,
    /// Established connections fall silent.
    ForgottenFlows,
    /// The apiserver says that it is not ready.
    SickEndpoint,
    /// Packets are lost.
    PacketLoss,
    /// Some connections fail.
    Unsteady,
    /// The certificate will expire soon.
    ExpiresSoon,
    /// Too few open files are allowed.
    OpenFiles,
    /// An IPv6 address is wanted and there is no IPv6.
    NoIpv6,
    /// A path is much slower than another.
    SlowPath,
}

/// Something found.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Finding {
    /// How much it matters.
    pub level: Level,
    /// The cause.
    pub cause: Cause,
    /// What is wrong, in a sentence.
    pub what: String,
    /// What was seen.
    pub because: String,
    /// What to do.
    pub advice: String,
    /// The endpoints that it is about; none where it is about this machine.
    pub endpoints: Vec<String>,
    #[serde(skip)]
    weight: u32,
}

impl Finding {
    /// A finding about one endpoint, whose address is part of its text.
    fn about(self, address: &str) -> Self {
        Self { endpoints: vec![address.to_owned()], ..self }
    }

    /// A text of it without its own address.
    fn without_address<'a>(&self, text: &'a str) -> Cow<'a, str> {
        match self.endpoints.first() {
            Some(address) => Cow::Owned(text.replace(address.as_str(), "")),
            None => Cow::Borrowed(text),
        }
    }

    /// Whether two findings differ at most in their endpoint and in what was seen.
    fn is_alike(&self, other: &Self) -> bool {
        (self.level, self.cause, self.weight) == (other.level, other.cause, other.weight)
            && self.without_address(&self.what) == other.without_address(&other.what)
            && self.without_address(&self.advice) == other.without_address(&other.advice)
    }
}

/// Most different observations that one finding shows.
const SHOWN: usize = 5;

/// Findings that are alike become one, which names every endpoint.
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
    let more = reasons.len().saturating_sub(SHOWN);
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

/// Judges. The result is sorted: problems before notes, the most likely cause first.
pub fn judge(seen: &Observations) -> Vec<Finding> {
    let mut found = Vec::new();
    machine::configuration(seen, &mut found);
    machine::listen(seen, &mut found);
    machine::names(seen, &mut found);
    machine::clocks(seen, &mut found);
    certificates::certificates(seen, &mut found);
    certificates::shown(seen, &mut found);
    path::reach(seen, &mut found);
    for endpoint in &seen.endpoints {
        path::credential(endpoint, &mut found);
        path::flows(endpoint, seen, &mut found);
        path::readiness(endpoint, &mut found);
        path::unsteady(endpoint, &mut found);
    }
    path::loss(seen, &mut found);
    path::paths(seen, &mut found);
    machine::limits(seen, &mut found);
    let mut found = group(found);
    found.sort_by_key(|f| (f.level == Level::Note, std::cmp::Reverse(f.weight)));
    found
}

/// Whether something is wrong.
pub fn is_wrong(findings: &[Finding]) -> bool {
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

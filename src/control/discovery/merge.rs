//! From what the sources last said to the set of endpoints: one pure function.
//!
//! | an entry is in | it is |
//! |---|---|
//! | a source that discovers (`endpoints_file`, `EndpointSlices`) | a first choice |
//! | a seed only (static address, DNS name), and something was discovered | a fallback |
//! | a seed only, and nothing was discovered | a first choice |
//! | the state file, and its source has answered since | not in the set |
//! | the state file, and its source has not answered | as if its source had said it |
//!
//! The same address from two sources is one endpoint, with the name to verify of the more trusted
//! one ([`EndpointSource`]'s order). Our own addresses are never endpoints: requests would loop.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use crate::config::EndpointAddress;
use crate::control::endpoint_set::EndpointSpec;
use crate::upstream::endpoint_sources::EndpointSource;

/// Most endpoints in the set. Each costs connections here and at the apiserver, and no control
/// plane has as many servers; a list that has is a mistake or an attack.
pub const MOST: usize = 64;

/// The name that discovered apiservers prove: every kubeadm, k3s and managed cluster has it in its
/// serving certificates, and it does not depend on an address.
pub const DISCOVERED_NAME: &str = "kubernetes.default.svc";

/// One endpoint as a source names it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Candidate {
    /// Where it is.
    pub address: EndpointAddress,
    /// Name to verify unless the configuration says one; `None` is the host.
    pub server_name: Option<String>,
}

/// The last good answer of a source.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SourceAnswer {
    /// What it names.
    pub entries: Vec<Candidate>,
    /// Every part of the source has answered: what the state file remembers of it is obsolete.
    pub complete: bool,
}

/// What was remembered of an earlier run, by the source that said it.
pub type SavedEndpoints = Vec<(EndpointSource, Candidate)>;

/// Addresses that lead to ourselves.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct OwnAddresses {
    /// What our listeners are bound to.
    pub bound: Vec<SocketAddr>,
    /// The addresses of this host, for listeners that are bound to all of them.
    pub host: Vec<IpAddr>,
}

impl OwnAddresses {
    /// Whether a connection to `address` would end at a listener of ours.
    pub fn is(&self, address: &EndpointAddress) -> bool {
        targets(address)
            .iter()
            .any(|target| self.bound.iter().any(|bind| self.hits(*target, *bind)))
    }

    fn hits(&self, target: SocketAddr, bind: SocketAddr) -> bool {
        let ip = target.ip();
        target.port() == bind.port()
            && target.is_ipv4() == bind.is_ipv4()
            && (ip == bind.ip()
                || (bind.ip().is_unspecified() && (ip.is_loopback() || self.host.contains(&ip))))
    }
}

/// The sockets that an address stands for.
fn targets(address: &EndpointAddress) -> Vec<SocketAddr> {
    let ips = match address.host.parse::<IpAddr>() {
        Ok(ip) => vec![ip.to_canonical()],
        Err(_) => vec![Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()],
    };
    ips.into_iter().map(|ip| SocketAddr::new(ip, address.port)).collect()
}

/// What is left of an answer without our own addresses, and those.
pub fn without_own(
    entries: Vec<Candidate>,
    own: &OwnAddresses,
) -> (Vec<Candidate>, Vec<Candidate>) {
    entries.into_iter().partition(|entry| !own.is(&entry.address))
}

/// What the set should be.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Merged {
    /// The endpoints, the first choice first.
    pub members: Vec<EndpointSpec>,
    /// How many had to be left out for being more than [`MOST`].
    pub too_many: usize,
}

/// Merges the answers. `server_name` is what the configuration wants to be verified everywhere;
/// `usable` says which addresses serve now, and `lot` which of the others are tried where not all
/// can be.
pub fn merge(
    answers: &BTreeMap<EndpointSource, SourceAnswer>,
    remembered: &SavedEndpoints,
    own: &OwnAddresses,
    server_name: Option<&str>,
    usable: &dyn Fn(&EndpointAddress) -> bool,
    lot: u64,
) -> Merged {
    let mut said: Vec<(EndpointSource, EndpointSource, &Candidate)> = Vec::new();
    for (source, answer) in answers {
        said.extend(answer.entries.iter().map(|entry| (*source, *source, entry)));
    }
    for (source, entry) in remembered {
        if answers.get(source).is_none_or(|answer| !answer.complete) {
            said.push((EndpointSource::State, *source, entry));
        }
    }
    // By trust; the sort is stable, so that each source's own order stays.
    said.sort_by_key(|(trust, ..)| *trust);
    let discovered: HashSet<&EndpointAddress> = said
        .iter()
        .filter(|(_, source, entry)| source.discovers() && !own.is(&entry.address))
        .map(|(.., entry)| &entry.address)
        .collect();
    let mut seen = HashSet::new();
    let mut members: Vec<(bool, EndpointSpec)> = said
        .iter()
        .filter(|(.., entry)| !own.is(&entry.address) && seen.insert(&entry.address))
        .map(|(trust, _, entry)| {
            let member = EndpointSpec {
                address: entry.address.clone(),
                server_name: server_name.map(str::to_owned).or_else(|| entry.server_name.clone()),
                fallback: !discovered.is_empty() && !discovered.contains(&entry.address),
            };
            (matches!(trust, EndpointSource::Static | EndpointSource::Dns), member)
        })
        .collect();
    let too_many = members.len().saturating_sub(MOST);
    if too_many > 0 {
        // What serves now stays, then the seeds; the rest takes turns, another one on each node.
        let keys: HashMap<_, _> = members
            .iter()
            .map(|(seed, member)| {
                let mut hasher = DefaultHasher::new();
                (lot, &member.address).hash(&mut hasher);
                let key = (!usable(&member.address), !seed, hasher.finish());
                (member.address.clone(), key)
            })
            .collect();
        let mut order: Vec<_> = keys.values().copied().collect();
        order.sort_unstable();
        let last = order[MOST - 1];
        members.retain(|(_, member)| keys[&member.address] <= last);
        members.truncate(MOST);
    }
    let mut members: Vec<_> = members.into_iter().map(|(_, member)| member).collect();
    members.sort_by_key(|member| member.fallback);
    Merged { members, too_many }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn entry(text: &str) -> Candidate {
        let (host, port) = text.rsplit_once(':').unwrap();
        let host = host.trim_matches(['[', ']']).to_owned();
        let address = EndpointAddress { host, port: port.parse().unwrap() };
        Candidate { address, server_name: None }
    }

    fn answer(texts: &[&str]) -> SourceAnswer {
        SourceAnswer { entries: texts.iter().map(|t| entry(t)).collect(), complete: true }
    }

    fn named(mut answer: SourceAnswer, name: &str) -> SourceAnswer {
        answer.entries.iter_mut().for_each(|e| e.server_name = Some(name.to_owned()));
        answer
    }

    fn merged(
        answers: &BTreeMap<EndpointSource, SourceAnswer>,
        remembered: &SavedEndpoints,
    ) -> Vec<String> {
        let merged = merge(answers, remembered, &OwnAddresses::default(), None, &|_| false, 0);
        let text = |m: &EndpointSpec| {
            let name = m.server_name.as_deref().map(|n| format!(" {n}")).unwrap_or_default();
            format!("{}{name}{}", m.address, if m.fallback { " fallback" } else { "" })
        };
        merged.members.iter().map(text).collect()
    }

    #[test]
    fn seeds_are_a_fallback_once_something_was_discovered() {
        let mut answers =
            BTreeMap::from([(EndpointSource::Static, answer(&["10.0.0.1:1", "10.0.0.2:1"]))]);
        let dns = named(answer(&["10.0.0.9:1"]), "lb.example");
        answers.insert(EndpointSource::Dns, dns);
        let seeds = ["10.0.0.1:1", "10.0.0.2:1", "10.0.0.9:1 lb.example"];
        assert_eq!(merged(&answers, &vec![]), seeds);

        let slices = named(answer(&["10.0.0.2:1", "[fd00::3]:1"]), DISCOVERED_NAME);
        answers.insert(EndpointSource::Slices, slices);
        let all = [
            "10.0.0.2:1",
            "[fd00::3]:1 kubernetes.default.svc",
            "10.0.0.1:1 fallback",
            "10.0.0.9:1 lb.example fallback",
        ];
        assert_eq!(merged(&answers, &vec![]), all);

        answers.insert(EndpointSource::File, answer(&["10.0.0.1:1"]));
        assert_eq!(merged(&answers, &vec![])[0], "10.0.0.1:1", "no longer a fallback");
    }

    #[test]
    fn what_was_remembered_counts_until_its_source_has_answered() {
        let slice = Candidate { server_name: Some(DISCOVERED_NAME.into()), ..entry("10.0.0.7:1") };
        let remembered =
            vec![(EndpointSource::Slices, slice), (EndpointSource::Dns, entry("10.0.0.8:1"))];
        let mut answers = BTreeMap::from([(EndpointSource::Static, answer(&["10.0.0.1:1"]))]);
        let start =
            ["10.0.0.7:1 kubernetes.default.svc", "10.0.0.1:1 fallback", "10.0.0.8:1 fallback"];
        assert_eq!(merged(&answers, &remembered), start);
        answers.insert(
            EndpointSource::Dns,
            SourceAnswer { complete: false, ..answer(&["10.0.0.9:1"]) },
        );
        assert_eq!(merged(&answers, &remembered).len(), 4, "one name of two is resolved");
        answers.insert(EndpointSource::Dns, answer(&["10.0.0.9:1"]));
        answers.insert(EndpointSource::Slices, answer(&["10.0.0.6:1"]));
        let now = ["10.0.0.6:1", "10.0.0.1:1 fallback", "10.0.0.9:1 fallback"];
        assert_eq!(merged(&answers, &remembered), now);
    }

    #[test]
    fn a_configured_name_wins_everywhere() {
        let slices = named(answer(&["10.0.0.2:1"]), DISCOVERED_NAME);
        let answers = BTreeMap::from([
            (EndpointSource::Static, answer(&["10.0.0.1:1"])),
            (EndpointSource::Slices, slices),
        ]);
        let merged = merge(&answers, &vec![], &OwnAddresses::default(), Some("api"), &|_| false, 0);
        assert!(merged.members.iter().all(|m| m.server_name.as_deref() == Some("api")));
    }

    #[test]
    fn our_own_addresses() {
        let own = |bound: &[&str], host: &[&str]| OwnAddresses {
            bound: bound.iter().map(|b| b.parse().unwrap()).collect(),
            host: host.iter().map(|h| h.parse().unwrap()).collect(),
        };
        let loopback = own(&["127.0.0.1:6443", "[::1]:6443"], &["10.0.0.5", "fd00::5"]);
        let wildcard = own(&["0.0.0.0:6443"], &["10.0.0.5", "fd00::5"]);
        let both = own(&["0.0.0.0:6443", "[::]:6443"], &["10.0.0.5", "fd00::5"]);
        for (text, expected) in [
            ("127.0.0.1:6443", [true, true, true]),
            ("127.0.0.2:6443", [false, true, true]),
            ("localhost:6443", [true, true, true]),
            ("10.0.0.5:6443", [false, true, true]),
            ("10.0.0.5:6444", [false, false, false]),
            ("10.0.0.6:6443", [false, false, false]),
            ("[fd00::5]:6443", [false, false, true]),
            ("[::1]:6443", [true, false, true]),
            ("[::ffff:10.0.0.5]:6443", [false, true, true]),
        ] {
            let is = [&loopback, &wildcard, &both].map(|own| own.is(&entry(text).address));
            assert_eq!(is, expected, "{text}");
        }
        let answers = BTreeMap::from([(
            EndpointSource::Static,
            answer(&["127.0.0.1:6443", "10.0.0.1:6443"]),
        )]);
        let merged = merge(&answers, &vec![], &loopback, None, &|_| false, 0);
        assert_eq!(merged.members.len(), 1);
        let (kept, ours) = without_own(answers[&EndpointSource::Static].entries.clone(), &loopback);
        assert_eq!((kept.len(), ours.len()), (1, 1));
    }

    #[test]
    fn of_too_many_what_serves_and_the_seeds_stay_and_the_rest_takes_turns() {
        let many: Vec<String> =
            (0..1000).map(|i| format!("10.1.{}.{}:1", i / 250, i % 250)).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        let answers = BTreeMap::from([
            (EndpointSource::Static, answer(&["10.0.0.1:1", "10.0.0.2:1"])),
            (EndpointSource::Slices, answer(&many)),
        ]);
        let serves = [entry("10.1.2.7:1").address, entry("10.1.3.200:1").address];
        let mut tried = HashSet::new();
        for lot in 0..200 {
            let usable = |a: &EndpointAddress| serves.contains(a);
            let merged = merge(&answers, &vec![], &OwnAddresses::default(), None, &usable, lot);
            assert_eq!((merged.members.len(), merged.too_many), (MOST, 1002 - MOST));
            let is_in = |a| merged.members.iter().any(|m| m.address == a);
            assert!(serves.iter().all(|a| is_in(a.clone())), "what serves stays");
            assert!(is_in(entry("10.0.0.1:1").address) && is_in(entry("10.0.0.2:1").address));
            tried.extend(merged.members.into_iter().map(|m| m.address));
        }
        assert_eq!(tried.len(), 1002, "everybody is tried some day");
    }

    proptest! {
        /// Every address is in the set once, no matter who says it; nothing of ours is; and with
        /// any first choice at all there is one that is no fallback.
        #[test]
        fn the_set_is_a_set(
            said in proptest::collection::vec((0..5_usize, 0..12_u8, any::<bool>()), 0..40),
        ) {
            let mut answers: BTreeMap<EndpointSource, SourceAnswer> = BTreeMap::new();
            let mut remembered = Vec::new();
            for (source, host, complete) in said {
                let entry = entry(&format!("10.0.0.{host}:6443"));
                match EndpointSource::ALL[source] {
                    EndpointSource::State => remembered.push((EndpointSource::Slices, entry)),
                    source => {
                        let answer = answers.entry(source).or_default();
                        answer.entries.push(entry);
                        answer.complete = complete;
                    }
                }
            }
            let own = OwnAddresses { bound: vec!["10.0.0.3:6443".parse().unwrap()], host: vec![] };
            let merged = merge(&answers, &remembered, &own, None, &|_| false, 0);
            let addresses: HashSet<_> = merged.members.iter().map(|m| &m.address).collect();
            prop_assert_eq!(addresses.len(), merged.members.len());
            prop_assert!(merged.members.iter().all(|m| m.address.host != "10.0.0.3"));
            prop_assert!(merged.members.first().is_none_or(|m| !m.fallback));
            for entry in answers.values().flat_map(|a| &a.entries) {
                prop_assert!(own.is(&entry.address) || addresses.contains(&entry.address));
            }
        }
    }
}

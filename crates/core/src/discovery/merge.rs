//! Merges the last answers of all sources into the wanted endpoint set.
//!
//! | a candidate comes from | it becomes |
//! |---|---|
//! | a source that discovers (`endpoints_file`, `EndpointSlices`) | a preferred endpoint |
//! | only a seed (static address, DNS name), and other endpoints were discovered | a fallback |
//! | only a seed, and no endpoint was discovered | a preferred endpoint |
//! | the state file, and its source has answered about it in this run ([`SourceAnswer::is_about`]) | no endpoint |
//! | the state file, and its source has not | the same as if its source had offered it |
//!
//! Two candidates with the same address are one endpoint. It is verified by the server name of the
//! more trusted source, in the order of [`EndpointSource`]. Addresses of this process are left out. With a preference for
//! this host ([`prefer_local`]) the table applies only while no endpoint is on this host.

use std::collections::{BTreeMap, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::IpAddr;

use super::address::EndpointAddress;
use super::own_addresses::OwnAddresses;
use super::source::{
    Candidate, EndpointIdentity, EndpointSource, EndpointSpec, SavedEndpoints, SourceAnswer,
};

/// Largest endpoint set. Each endpoint costs connections here and at the apiserver. No control
/// plane has 64 apiservers, so a longer list is a mistake or an attack.
pub const MAX_ENDPOINTS: usize = 64;

/// The server name of discovered apiservers. kubeadm, k3s and managed clusters put it into every
/// serving certificate, and it does not depend on an address.
pub const DISCOVERED_SERVER_NAME: &str = "kubernetes.default.svc";

/// The wanted endpoint set.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct MergedEndpoints {
    /// The endpoints, preferred ones before fallbacks.
    pub endpoints: Vec<EndpointSpec>,
    /// Number of endpoints beyond [`MAX_ENDPOINTS`] that were left out.
    pub excess: usize,
}

/// What the merged set depends on besides the answers.
#[derive(Debug, Clone, Copy)]
pub struct MergeContext<'a> {
    /// The addresses of this process.
    pub own: &'a OwnAddresses,
    /// A server name from the configuration, which applies to every endpoint.
    pub server_name: Option<&'a str>,
    /// The addresses of this host's interfaces, if its endpoints are preferred ([`prefer_local`]).
    pub local: Option<&'a [IpAddr]>,
    /// The usable endpoints.
    pub usable: &'a HashSet<EndpointIdentity>,
    /// Selects among more than [`MAX_ENDPOINTS`]: a new value makes another selection.
    pub rotation: u64,
}

/// Merges `answers` and `saved`. If there are more than [`MAX_ENDPOINTS`], preferred endpoints of this host are selected
/// first, then addresses that are usable, then seeds.
pub fn merge(
    answers: &BTreeMap<EndpointSource, SourceAnswer>,
    saved: &SavedEndpoints,
    context: &MergeContext<'_>,
) -> MergedEndpoints {
    // Each candidate with its rank and the source that offered it. The rank is that source too, except
    // that a saved candidate ranks last.
    let mut ranked_candidates: Vec<(EndpointSource, EndpointSource, &Candidate)> = Vec::new();
    for (source, answer) in answers {
        ranked_candidates
            .extend(answer.candidates.iter().map(|candidate| (*source, *source, candidate)));
    }
    for (source, candidate) in saved {
        if answers.get(source).is_none_or(|answer| !answer.is_about(candidate)) {
            ranked_candidates.push((EndpointSource::State, *source, candidate));
        }
    }
    ranked_candidates.retain(|(.., candidate)| !context.own.contains(&candidate.address));
    // A stable sort keeps each source's own order.
    ranked_candidates.sort_by_key(|(rank, ..)| *rank);
    let discovered: HashSet<&EndpointAddress> = ranked_candidates
        .iter()
        .filter(|(_, source, _)| source.discovers())
        .map(|(.., candidate)| &candidate.address)
        .collect();
    let mut seen = HashSet::new();
    let mut endpoints = Vec::new();
    let mut seeds = HashSet::new();
    for (rank, _, candidate) in ranked_candidates {
        if !seen.insert(&candidate.address) {
            continue;
        }
        let server_name = context.server_name.map(str::to_owned);
        endpoints.push(EndpointSpec {
            address: candidate.address.clone(),
            server_name: server_name.or_else(|| candidate.server_name.clone()),
            fallback: !discovered.is_empty() && !discovered.contains(&candidate.address),
        });
        if matches!(rank, EndpointSource::Static | EndpointSource::Dns) {
            seeds.insert(&candidate.address);
        }
    }
    endpoints.sort_by_key(|spec| spec.fallback);
    let has_local = context.local.is_some_and(|host| prefer_local(&mut endpoints, host));
    let excess = endpoints.len().saturating_sub(MAX_ENDPOINTS);
    if excess > 0 {
        let usable: HashSet<_> = context.usable.iter().map(|one| &one.address).collect();
        keep_most_useful(&mut endpoints, |spec| {
            let mut hasher = DefaultHasher::new();
            (context.rotation, &spec.address).hash(&mut hasher);
            let (usable, seed) = (usable.contains(&spec.address), seeds.contains(&spec.address));
            (has_local && spec.fallback, !usable, !seed, hasher.finish())
        });
    }
    MergedEndpoints { endpoints, excess }
}

/// Makes endpoints of other hosts fallbacks, if there is one on this host, and returns whether there is. `host`: the
/// addresses of its interfaces.
pub fn prefer_local(endpoints: &mut [EndpointSpec], host: &[IpAddr]) -> bool {
    let is_local = |spec: &EndpointSpec| match spec.address.ip() {
        Some(ip) => ip.to_canonical().is_loopback() || host.contains(&ip.to_canonical()),
        None => spec.address.host == "localhost",
    };
    let has_local = endpoints.iter().any(is_local);
    if has_local {
        for spec in endpoints.iter_mut() {
            spec.fallback = !is_local(spec);
        }
        endpoints.sort_by_key(|spec| spec.fallback);
    }
    has_local
}

/// Reduces `endpoints` to the [`MAX_ENDPOINTS`] with the lowest ranks, in the same order.
fn keep_most_useful<R: Ord>(endpoints: &mut Vec<EndpointSpec>, rank: impl Fn(&EndpointSpec) -> R) {
    let mut ranked: Vec<_> = endpoints.drain(..).enumerate().collect();
    ranked.sort_by_cached_key(|(_, spec)| rank(spec));
    ranked.truncate(MAX_ENDPOINTS);
    ranked.sort_by_key(|(position, _)| *position);
    endpoints.extend(ranked.into_iter().map(|(_, spec)| spec));
}

#[cfg(test)]
mod tests {
    use std::sync::LazyLock;

    use super::*;
    use proptest::prelude::*;

    fn candidate(text: &str) -> Candidate {
        Candidate { address: EndpointAddress::parse(text).unwrap(), server_name: None }
    }

    fn answer(texts: &[&str]) -> SourceAnswer {
        let candidates = texts.iter().map(|text| candidate(text)).collect();
        SourceAnswer { candidates, ..SourceAnswer::default() }
    }

    fn with_server_name(mut answer: SourceAnswer, name: &str) -> SourceAnswer {
        answer.candidates.iter_mut().for_each(|c| c.server_name = Some(name.to_owned()));
        answer
    }

    static NO_OWN: LazyLock<OwnAddresses> = LazyLock::new(OwnAddresses::default);
    static NONE_USABLE: LazyLock<HashSet<EndpointIdentity>> = LazyLock::new(HashSet::new);

    /// Merges with no other setting than those of `change`.
    fn merge_with<'a>(
        answers: &BTreeMap<EndpointSource, SourceAnswer>,
        saved: &SavedEndpoints,
        change: impl FnOnce(&mut MergeContext<'a>),
    ) -> MergedEndpoints {
        let mut context = MergeContext {
            own: &NO_OWN,
            server_name: None,
            local: None,
            usable: &NONE_USABLE,
            rotation: 0,
        };
        change(&mut context);
        merge(answers, saved, &context)
    }

    fn merged(
        answers: &BTreeMap<EndpointSource, SourceAnswer>,
        saved: &SavedEndpoints,
    ) -> Vec<String> {
        let merged = merge_with(answers, saved, |_| {});
        let text = |spec: &EndpointSpec| {
            let name = spec.server_name.as_deref().map(|n| format!(" {n}")).unwrap_or_default();
            format!("{}{name}{}", spec.address, if spec.fallback { " fallback" } else { "" })
        };
        merged.endpoints.iter().map(text).collect()
    }

    #[test]
    fn prefer_local_makes_other_hosts_fallbacks_while_one_is_local() {
        let host = ["10.0.0.11".parse().unwrap(), "fd00::11".parse().unwrap()];
        let preferred = |texts: &[&str]| -> Vec<String> {
            let spec = |text: &&str| EndpointSpec {
                address: EndpointAddress::parse(text).unwrap(),
                server_name: None,
                fallback: text.starts_with("lb"),
            };
            let mut specs: Vec<EndpointSpec> = texts.iter().map(spec).collect();
            prefer_local(&mut specs, &host);
            let preferred = specs.iter().filter(|spec| !spec.fallback);
            preferred.map(|spec| spec.address.host.clone()).collect()
        };
        for (texts, expected) in [
            (&["10.0.0.12:6443", "10.0.0.11:6443", "lb.example:6443"][..], &["10.0.0.11"][..]),
            (&["10.0.0.12:6443", "[fd00::11]:6443"], &["fd00::11"]),
            (&["10.0.0.12:6443", "127.0.0.1:6444", "localhost:6445"], &["127.0.0.1", "localhost"]),
            // None is local: nothing changes.
            (&["10.0.0.12:6443", "10.0.0.13:6443", "lb.example:6443"], &["10.0.0.12", "10.0.0.13"]),
            (&[], &[]),
        ] {
            assert_eq!(preferred(texts), expected, "{texts:?}");
        }
    }

    #[test]
    fn merge_discovered_endpoints_make_other_seeds_fallbacks() {
        let mut answers =
            BTreeMap::from([(EndpointSource::Static, answer(&["10.0.0.1:1", "10.0.0.2:1"]))]);
        let dns = with_server_name(answer(&["10.0.0.9:1"]), "lb.example");
        answers.insert(EndpointSource::Dns, dns);
        let seeds = ["10.0.0.1:1", "10.0.0.2:1", "10.0.0.9:1 lb.example"];
        assert_eq!(merged(&answers, &vec![]), seeds);

        let slices =
            with_server_name(answer(&["10.0.0.2:1", "[fd00::3]:1"]), DISCOVERED_SERVER_NAME);
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
    fn merge_saved_endpoints_count_until_their_source_has_answered() {
        let slice = Candidate {
            server_name: Some(DISCOVERED_SERVER_NAME.into()),
            ..candidate("10.0.0.7:1")
        };
        let of_name = |text, name: &str| {
            let candidate = Candidate { server_name: Some(name.into()), ..candidate(text) };
            (EndpointSource::Dns, candidate)
        };
        let saved = vec![
            (EndpointSource::Slices, slice),
            of_name("10.0.0.8:1", "a.example"),
            of_name("10.0.0.18:1", "b.example"),
            of_name("10.0.0.28:1", "removed.example"),
        ];
        let mut answers = BTreeMap::from([(EndpointSource::Static, answer(&["10.0.0.1:1"]))]);
        let slice = "10.0.0.7:1 kubernetes.default.svc";
        let start = [
            slice,
            "10.0.0.1:1 fallback",
            "10.0.0.8:1 a.example fallback",
            "10.0.0.18:1 b.example fallback",
            "10.0.0.28:1 removed.example fallback",
        ];
        assert_eq!(merged(&answers, &saved), start);
        // One name of two is resolved, and has another address now.
        let unresolved = ["b.example".to_owned()].into();
        let partial = SourceAnswer { unresolved, ..answer(&["10.0.0.9:1"]) };
        answers.insert(EndpointSource::Dns, partial);
        let now =
            [slice, "10.0.0.1:1 fallback", "10.0.0.9:1 fallback", "10.0.0.18:1 b.example fallback"];
        assert_eq!(merged(&answers, &saved), now);
        answers.insert(EndpointSource::Dns, answer(&["10.0.0.9:1"]));
        answers.insert(EndpointSource::Slices, answer(&["10.0.0.6:1"]));
        let now = ["10.0.0.6:1", "10.0.0.1:1 fallback", "10.0.0.9:1 fallback"];
        assert_eq!(merged(&answers, &saved), now);
    }

    #[test]
    fn merge_configured_server_name_applies_to_every_endpoint() {
        let slices = with_server_name(answer(&["10.0.0.2:1"]), DISCOVERED_SERVER_NAME);
        let answers = BTreeMap::from([
            (EndpointSource::Static, answer(&["10.0.0.1:1"])),
            (EndpointSource::Slices, slices),
        ]);
        let merged = merge_with(&answers, &vec![], |context| context.server_name = Some("api"));
        assert!(merged.endpoints.iter().all(|spec| spec.server_name.as_deref() == Some("api")));
    }

    #[test]
    fn merge_own_address_is_left_out() {
        let answers = BTreeMap::from([(
            EndpointSource::Static,
            answer(&["127.0.0.1:6443", "10.0.0.1:6443"]),
        )]);
        let own = OwnAddresses::new(vec!["127.0.0.1:6443".parse().unwrap()], Vec::new());
        let merged = merge_with(&answers, &vec![], |context| context.own = &own);
        assert_eq!(merged.endpoints.len(), 1);
    }

    #[test]
    fn merge_too_many_keeps_usable_and_seeds_and_rotates_the_others() {
        let many: Vec<String> =
            (0..1000).map(|i| format!("10.1.{}.{}:1", i / 250, i % 250)).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        let answers = BTreeMap::from([
            (EndpointSource::Static, answer(&["10.0.0.1:1", "10.0.0.2:1"])),
            (EndpointSource::Slices, answer(&many)),
        ]);
        let usable = ["10.1.2.7:1", "10.1.3.200:1"].map(|text| candidate(text).address);
        // By another name than before: `tls.server_name` has changed.
        let identities = usable.iter().map(|address| EndpointIdentity::new(address, "other"));
        let identities: HashSet<_> = identities.collect();
        let mut selected = HashSet::new();
        for rotation in 0..200 {
            let merged = merge_with(&answers, &vec![], |context| {
                (context.usable, context.rotation) = (&identities, rotation);
            });
            let sizes = (merged.endpoints.len(), merged.excess);
            assert_eq!(sizes, (MAX_ENDPOINTS, 1002 - MAX_ENDPOINTS));
            let contains = |a: &_| merged.endpoints.iter().any(|spec| spec.address == *a);
            assert!(usable.iter().all(contains), "usable endpoints stay");
            assert!(["10.0.0.1:1", "10.0.0.2:1"].iter().all(|a| contains(&candidate(a).address)));
            selected.extend(merged.endpoints.into_iter().map(|spec| spec.address));
        }
        assert_eq!(selected.len(), 1002, "each candidate is selected by some rotation");
    }

    #[test]
    fn merge_too_many_keeps_the_preferred_endpoints_of_this_host() {
        let many: Vec<String> = (1..200).map(|i| format!("10.1.0.{i}:1")).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        let answers = BTreeMap::from([(EndpointSource::Slices, answer(&many))]);
        let host = ["10.1.0.150".parse().unwrap(), "10.1.0.151".parse().unwrap()];
        for rotation in 0..100 {
            let merged = merge_with(&answers, &vec![], |context| {
                (context.local, context.rotation) = (Some(&host[..]), rotation);
            });
            let preferred = merged.endpoints.iter().filter(|spec| !spec.fallback);
            let preferred: Vec<_> = preferred.map(|spec| spec.address.host.as_str()).collect();
            assert_eq!(
                (preferred, merged.endpoints.len()),
                (vec!["10.1.0.150", "10.1.0.151"], MAX_ENDPOINTS)
            );
        }
    }

    proptest! {
        /// Each address is in the set once, whichever sources offer it; own addresses are not in
        /// it; and a set that is not empty starts with a preferred endpoint.
        #[test]
        fn merge_any_answers_gives_a_set_with_a_preferred_endpoint(
            candidates in proptest::collection::vec((0..5_usize, 0..12_u8), 0..40),
        ) {
            let mut answers: BTreeMap<EndpointSource, SourceAnswer> = BTreeMap::new();
            let mut saved = Vec::new();
            for (source, host) in candidates {
                let candidate = candidate(&format!("10.0.0.{host}:6443"));
                match EndpointSource::ALL[source] {
                    EndpointSource::State => saved.push((EndpointSource::Slices, candidate)),
                    source => {
                        let answer = answers.entry(source).or_default();
                        answer.candidates.push(candidate);
                    }
                }
            }
            let own = OwnAddresses::new(vec!["10.0.0.3:6443".parse().unwrap()], Vec::new());
            let merged = merge_with(&answers, &saved, |context| context.own = &own);
            let addresses: HashSet<_> = merged.endpoints.iter().map(|s| &s.address).collect();
            prop_assert_eq!(addresses.len(), merged.endpoints.len());
            prop_assert!(merged.endpoints.iter().all(|s| s.address.host != "10.0.0.3"));
            prop_assert!(merged.endpoints.first().is_none_or(|s| !s.fallback));
            for candidate in answers.values().flat_map(|a| &a.candidates) {
                let address = &candidate.address;
                prop_assert!(own.contains(address) || addresses.contains(address));
            }
        }
    }
}

//! Tests of the use of lookups, and of the whole source, with a local name server.

use std::net::IpAddr;
use std::sync::Arc;

use jackstay_core::discovery::own_addresses::OwnAddresses;
use jackstay_sys::clock;
use jackstay_testkit::name_server::{Reply, ResolverSetup, parse as ips};
use jackstay_testkit::wait::until;
use tokio::task::LocalSet;

use super::*;
use crate::control::discovery::tests::config;
use crate::observe::Metrics;
use crate::upstream::Upstream;
use crate::upstream::endpoint::Observation;

/// The files of a resolver that refer to its name server.
fn files_of(setup: &ResolverSetup) -> ResolverFiles {
    ResolverFiles {
        hosts: setup.hosts.clone(),
        resolv_conf: setup.resolv_conf.clone(),
        port: setup.server.address().port(),
    }
}

/// An upstream without endpoints, and the states of its sources.
fn new_source_states() -> (Arc<Upstream>, Rc<SourceStates>) {
    let upstream = Upstream::load(config(), &[], &Metrics::new());
    let states = SourceStates::new(Arc::clone(&upstream), Box::new(OwnAddresses::default));
    (upstream, states)
}

/// The addresses in the last answer of the source.
fn published(states: &SourceStates) -> Vec<String> {
    states.read(|answers, _| {
        let answer = answers.get(&EndpointSource::Dns);
        let candidates = answer.into_iter().flat_map(|answer| &answer.candidates);
        candidates.map(|candidate| candidate.address.to_string()).collect()
    })
}

/// Waits until the last answer of the source has these addresses.
async fn wait_for(states: &SourceStates, addresses: &[&str]) {
    while published(states) != addresses {
        states.changed().await;
    }
}

/// The result of a lookup with this TTL.
fn found(v4: &[&str], v6: Result<&[&str], LookupError>, ttl: u64) -> Found {
    Found {
        v4: Ok(ips(v4)),
        v6: v6.map(ips),
        name: Some("api.example.com.".into()),
        doubt: None,
        ttl: Duration::from_secs(ttl),
        complete: false,
    }
}

#[test]
fn apply_result_failed_lookup_keeps_addresses_and_backs_off() {
    let mut known = NameState::default();
    let (mut backoff, now) = (RETRIES, clock::now());
    // Applies a result and returns the seconds until the next lookup.
    let mut next = |known: &mut NameState, result| {
        apply_result(known, result, &mut backoff, &|_| false, now).as_secs()
    };
    assert_eq!(next(&mut known, Ok(found(&["10.0.0.1"], Ok(&["fd00::1"]), 60))), 60);
    // A family whose query failed keeps its addresses, and the next lookup follows after 1 s.
    let failed = || Err(LookupError::TimedOut);
    assert_eq!(next(&mut known, Ok(found(&["10.0.0.2"], failed(), 60))), 1);
    assert_eq!(known.addresses().collect::<Vec<_>>(), ips(&["10.0.0.2", "fd00::1"]));
    assert!(matches!(known.error, Some(LookupError::TimedOut)));
    // A family that the name has no more loses its addresses.
    assert_eq!(next(&mut known, Ok(found(&["10.0.0.2"], Ok(&[]), 60))), 60);
    assert_eq!(known.addresses().collect::<Vec<_>>(), ips(&["10.0.0.2"]));
    // A family that it never had may fail.
    for pause in [1, 2, 4, 5, 5] {
        assert_eq!(next(&mut known, Ok(found(&["10.0.0.2"], failed(), 5))), pause);
        assert!(known.error.is_none());
    }
    assert_eq!(next(&mut known, Ok(found(&["10.0.0.2"], Ok(&[]), 60))), 60);
    // Without any address the known ones stay.
    for (round, pause) in [1, 2, 4, 8, 16, 30, 30].into_iter().enumerate() {
        assert_eq!(next(&mut known, Err(LookupError::NoAddress)), pause, "round {round}");
    }
    assert_eq!(known.addresses().collect::<Vec<_>>(), ips(&["10.0.0.2"]));
    assert_eq!(next(&mut known, Err(LookupError::NoSuchName)), 30);
    assert_eq!(known.addresses().count(), 1);
}

/// While a name server fails for the name, a name of the search list may have addresses: those of another host.
#[test]
fn apply_result_of_another_name_counts_only_if_it_is_certain() {
    let of_name = |name: &str, address, v6, doubt| Found {
        name: Some(name.into()),
        doubt,
        ..found(&[address], v6, 60)
    };
    let mut known = NameState::default();
    let (mut backoff, now) = (RETRIES, clock::now());
    let mut apply = |known: &mut NameState, found| {
        apply_result(known, Ok(found), &mut backoff, &|_| false, now);
        known.addresses().collect::<Vec<_>>()
    };
    let doubt = || Some(LookupError::TimedOut);
    // Nothing is known: it is used, as by any other resolver.
    let stranger = || of_name("api.corp.test.", "10.9.9.9", Ok(&["fd00::9"][..]), doubt());
    assert_eq!(apply(&mut known, stranger()), ips(&["10.9.9.9", "fd00::9"]));
    // The addresses of the name itself; the failed family had those of another name.
    let own = |address| of_name("api.", address, Err(LookupError::TimedOut), None);
    assert_eq!(apply(&mut known, own("10.0.0.1")), ips(&["10.0.0.1"]));
    assert_eq!(apply(&mut known, stranger()), ips(&["10.0.0.1"]));
    assert!(matches!(known.error, Some(LookupError::TimedOut)));
    let same = of_name("api.", "10.0.0.2", Ok(&[]), doubt());
    assert_eq!(apply(&mut known, same), ips(&["10.0.0.2"]), "the name as before");
    let certain = of_name("api.corp.test.", "10.9.9.9", Ok(&[]), None);
    assert_eq!(apply(&mut known, certain), ips(&["10.9.9.9"]));
}

/// One response arrives in each TTL.
#[tokio::test(start_paused = true)]
async fn apply_result_omitted_usable_address_stays_for_three_ttls() {
    const TTL: Duration = Duration::from_secs(60);
    let all = ips(&["10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4"]);
    let (mut known, mut backoff) = (NameState::default(), RETRIES);
    let mut respond = |known: &mut NameState, v4: &[IpAddr], usable: &dyn Fn(IpAddr) -> bool| {
        let found = Found { v4: Ok(v4.to_vec()), ..found(&[], Ok(&[]), TTL.as_secs()) };
        assert_eq!(apply_result(known, Ok(found), &mut backoff, usable, clock::now()), TTL);
        let mut set: Vec<_> = known.addresses().collect();
        set.sort_unstable();
        set
    };
    // Responses alternate between two pairs of addresses. From the second response on, all four are known.
    for round in 0..20 {
        let pair = if round % 2 == 0 { &all[..2] } else { &all[2..] };
        let set = respond(&mut known, pair, &|_| true);
        assert_eq!(set, if round == 0 { &all[..2] } else { &all[..] }, "round {round}");
        tokio::time::advance(TTL).await;
    }
    // .3 and .4 were in the response of one TTL ago, so they are removed after two more TTLs.
    let expected_sets = [4, 4, 2, 2].map(|count| &all[..count]);
    for (round, expected) in expected_sets.into_iter().enumerate() {
        assert_eq!(respond(&mut known, &all[..2], &|_| true), expected, "round {round}");
        tokio::time::advance(TTL).await;
    }
    // .2 is omitted and not usable, so it is removed at once.
    assert_eq!(respond(&mut known, &all[..1], &|ip| ip != all[1]), &all[..1]);
}

#[tokio::test(start_paused = true)]
async fn apply_result_omitted_address_known_before_stays_for_three_ttls() {
    let before = NameAddress { ip: ips(&["10.0.0.2"])[0], keep_until: None };
    let mut known = NameState { v4: vec![before], ..NameState::default() };
    let mut backoff = RETRIES;
    for expected in [2, 2, 2, 1] {
        let found = found(&["10.0.0.1"], Ok(&[]), 60);
        let ttl = apply_result(&mut known, Ok(found), &mut backoff, &|_| true, clock::now());
        assert_eq!(known.v4.len(), expected);
        tokio::time::advance(ttl).await;
    }
}

/// A hosts file has all addresses of a name, so an address that it omits is removed at once.
#[test]
fn apply_result_address_omitted_by_hosts_file_is_removed_at_once() {
    let now = clock::now();
    let mut known = NameState::default();
    for (v4, complete) in [(["10.0.0.1"], false), (["10.0.0.2"], true)] {
        let found = Found { complete, ..found(&v4, Ok(&[]), 60) };
        apply_result(&mut known, Ok(found), &mut { RETRIES }, &|_| true, now);
        assert_eq!(known.addresses().collect::<Vec<_>>(), ips(&v4));
    }
}

#[tokio::test]
async fn follow_omitted_address_stays_while_its_endpoint_is_usable() {
    let setup = ResolverSetup::start();
    setup.server.set_addresses("api.example.com", &["10.0.0.1", "10.0.0.2", "10.0.0.3"], 60);
    let (upstream, states) = new_source_states();
    let names = vec![EndpointAddress { host: "api.example.com".into(), port: 6443 }];
    let test = async {
        let task = follow(names, files_of(&setup), Rc::clone(&states));
        let task = tokio::task::spawn_local(task);
        wait_for(&states, &["10.0.0.1:6443", "10.0.0.2:6443", "10.0.0.3:6443"]).await;
        let specs: Vec<_> = states.read(|answers, _| {
            let entries = answers[&EndpointSource::Dns].candidates.iter();
            let spec = |entry: &Candidate| jackstay_core::discovery::source::EndpointSpec {
                address: entry.address.clone(),
                server_name: entry.server_name.clone(),
                fallback: false,
            };
            entries.map(spec).collect()
        });
        crate::control::endpoint_set::replace_endpoints(&upstream, &specs);
        for endpoint in upstream.endpoints().iter() {
            if endpoint.address.host != "10.0.0.3" {
                endpoint.observe(Observation::Connected);
                endpoint.observe(Observation::ReadyzOk);
            }
        }
        setup.server.set_addresses("api.example.com", &["10.0.0.1"], 60);
        tokio::time::pause();
        tokio::time::advance(Duration::from_secs(67)).await;
        tokio::time::resume();
        wait_for(&states, &["10.0.0.1:6443", "10.0.0.2:6443"]).await;
        task.abort();
    };
    LocalSet::new().run_until(test).await;
}

/// A wildcard of a search zone has an address of the family that the name has lost.
#[tokio::test]
async fn follow_withdrawn_family_leaves_the_set_and_a_search_zone_adds_no_stranger() {
    let setup = ResolverSetup::start();
    setup.write_resolv_conf("search corp.test\n");
    setup.server.set_domain("corp.test", Reply::Addresses(ips(&["fd00::bad"]), 60));
    setup.server.set_addresses("api.example.com", &["10.0.0.1", "fd00::1"], 60);
    let (upstream, states) = new_source_states();
    let names = vec![EndpointAddress { host: "api.example.com".into(), port: 6443 }];
    let test = async {
        let task = follow(names, files_of(&setup), Rc::clone(&states));
        let task = tokio::task::spawn_local(task);
        wait_for(&states, &["10.0.0.1:6443", "[fd00::1]:6443"]).await;
        setup.server.set_addresses("api.example.com", &["10.0.0.1"], 60);
        tokio::time::pause();
        tokio::time::advance(Duration::from_secs(67)).await;
        tokio::time::resume();
        wait_for(&states, &["10.0.0.1:6443"]).await;
        assert_eq!(upstream.sources.current_errors(), "");
        task.abort();
    };
    LocalSet::new().run_until(test).await;
}

#[tokio::test]
async fn follow_hosts_file_changed_publishes_new_addresses() {
    let setup = ResolverSetup::start();
    setup.server.set_addresses("api.example.com", &["10.0.0.1"], 300);
    let (upstream, states) = new_source_states();
    let name = |host: &str, port| EndpointAddress { host: host.into(), port };
    let names = vec![name("api.example.com", 6443), name("added.example.com", 443)];
    let is_complete =
        || states.read(|answers, _| answers[&EndpointSource::Dns].unresolved.is_empty());
    LocalSet::new()
        .run_until(async {
            let task = follow(names, files_of(&setup), Rc::clone(&states));
            let task = tokio::task::spawn_local(task);
            wait_for(&states, &["10.0.0.1:6443"]).await;
            assert!(!is_complete(), "added.example.com is not resolved");
            let error = "dns: added.example.com: there is no such name";
            until("the failed lookup is reported", async || {
                upstream.sources.current_errors() == error
            })
            .await;
            assert_eq!(upstream.sources.reports()[&EndpointSource::Dns].endpoints, 1);
            std::fs::write(&setup.hosts, "fd00::7 added.example.com\n").unwrap();
            wait_for(&states, &["10.0.0.1:6443", "[fd00::7]:443"]).await;
            assert!(is_complete());
            task.abort();
        })
        .await;
    let entry = states.read(|answers, _| answers[&EndpointSource::Dns].candidates[0].clone());
    assert_eq!(
        entry.server_name.as_deref(),
        Some("api.example.com"),
        "certificates are verified against the DNS name"
    );
}

#[tokio::test]
async fn follow_name_added_keeps_addresses_of_the_others() {
    let setup = ResolverSetup::start();
    setup.server.set_addresses("a.example.com", &["10.0.0.1", "fd00::1"], 300);
    setup.server.set_addresses("b.example.com", &["10.0.0.2"], 300);
    let (upstream, states) = new_source_states();
    let names = |hosts: &[&str]| -> Vec<_> {
        let name = |host: &&str| EndpointAddress { host: (*host).to_owned(), port: 6443 };
        hosts.iter().map(name).collect()
    };
    let test = async {
        let first = follow(
            names(&["a.example.com", "b.example.com"]),
            files_of(&setup),
            Rc::clone(&states),
        );
        let first = tokio::task::spawn_local(first);
        wait_for(&states, &["10.0.0.1:6443", "[fd00::1]:6443", "10.0.0.2:6443"]).await;
        first.abort();
        // From now on lookups at the name server fail. The hosts file has only the added name.
        std::fs::write(&setup.resolv_conf, "# empty\n").unwrap();
        std::fs::write(&setup.hosts, "10.0.0.3 c.example.com\n").unwrap();
        let next = names(&["c.example.com", "b.example.com", "a.example.com"]);
        let second = follow(next, files_of(&setup), Rc::clone(&states));
        let second = tokio::task::spawn_local(second);
        let all = ["10.0.0.3:6443", "10.0.0.2:6443", "10.0.0.1:6443", "[fd00::1]:6443"];
        while published(&states) != all {
            let published = published(&states);
            assert!(published.contains(&"10.0.0.1:6443".to_owned()), "{published:?}");
            states.changed().await;
        }
        let reported = async || upstream.sources.current_errors().contains("a.example.com: ");
        until("the failed lookup is reported", reported).await;
        assert_eq!(published(&states), all);
        second.abort();
    };
    LocalSet::new().run_until(test).await;
}

#[tokio::test]
async fn follow_queries_again_when_the_ttl_expires() {
    let setup = ResolverSetup::start();
    setup.server.set_addresses("api.example.com", &["10.0.0.1"], 60);
    let (_, states) = new_source_states();
    let names = vec![EndpointAddress { host: "api.example.com".into(), port: 6443 }];
    let test = async {
        let task = follow(names, files_of(&setup), Rc::clone(&states));
        let task = tokio::task::spawn_local(task);
        wait_for(&states, &["10.0.0.1:6443"]).await;
        let before = setup.server.query_count();
        setup.server.set_addresses("api.example.com", &["10.0.0.2"], 60);
        // The jitter is at most a tenth of the TTL, so the next lookup starts after 54 s to 66 s. The clock
        // is paused only between lookups, because the name server responds in real time.
        tokio::time::pause();
        tokio::time::advance(Duration::from_secs(50)).await;
        assert_eq!(setup.server.query_count(), before, "no query before the TTL expires");
        tokio::time::advance(Duration::from_secs(17)).await;
        tokio::time::resume();
        wait_for(&states, &["10.0.0.2:6443"]).await;
        task.abort();
    };
    LocalSet::new().run_until(test).await;
}

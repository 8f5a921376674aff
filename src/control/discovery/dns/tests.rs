//! Tests of lookups, of the use of their results, and of the whole source, with a local name server.

use std::collections::HashMap;
use std::net::UdpSocket;
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use hickory_resolver::proto::op::{Message, ResponseCode};
use hickory_resolver::proto::rr::rdata::{A, AAAA};
use hickory_resolver::proto::rr::{RData, Record, RecordType};
use jackstay_sys::clock;
use tokio::task::LocalSet;

use super::lookup::{LOOKUP_TIMEOUT, LookupResult};
use super::*;
use crate::control::discovery::tests::config;
use crate::observe::Metrics;
use crate::upstream::Upstream;
use crate::upstream::endpoint::Observation;
use jackstay_core::discovery::own_addresses::OwnAddresses;
use jackstay_testkit::wait::until;

/// The addresses of each name, and their TTL in seconds.
type Zone = HashMap<String, (Vec<IpAddr>, u32)>;

/// A UDP name server on a free port, and resolver files that refer to it.
struct TestServer {
    files: ResolverFiles,
    zone: Arc<Mutex<Zone>>,
    /// The server receives queries but does not respond.
    silent: Arc<AtomicBool>,
    queries: Arc<AtomicUsize>,
    _dir: tempfile::TempDir,
}

impl TestServer {
    fn new() -> Self {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let dir = tempfile::tempdir().unwrap();
        let files = ResolverFiles {
            hosts: dir.path().join("hosts"),
            resolv_conf: dir.path().join("resolv.conf"),
            port: socket.local_addr().unwrap().port(),
        };
        std::fs::write(&files.resolv_conf, "nameserver 127.0.0.1\n").unwrap();
        let server = Self {
            files,
            zone: Arc::default(),
            silent: Arc::default(),
            queries: Arc::default(),
            _dir: dir,
        };
        let (zone, silent) = (Arc::clone(&server.zone), Arc::clone(&server.silent));
        let queries = Arc::clone(&server.queries);
        std::thread::spawn(move || {
            let mut buffer = [0; 1500];
            while let Ok((size, peer)) = socket.recv_from(&mut buffer) {
                queries.fetch_add(1, Ordering::Relaxed);
                if silent.load(Ordering::Relaxed) {
                    continue;
                }
                let question = Message::from_vec(&buffer[..size]).unwrap();
                let response = response_to(&question, &zone.lock().unwrap());
                let _ = socket.send_to(&response.to_vec().unwrap(), peer);
            }
        });
        server
    }

    fn set_addresses(&self, name: &str, addresses: &[&str], ttl: u32) {
        let addresses = addresses.iter().map(|a| a.parse().unwrap()).collect();
        self.zone.lock().unwrap().insert(name.to_owned(), (addresses, ttl));
    }

    fn query_count(&self) -> usize {
        self.queries.load(Ordering::Relaxed)
    }
}

fn response_to(question: &Message, zone: &Zone) -> Message {
    let query = question.queries[0].clone();
    let mut message = Message::response(question.metadata.id, question.metadata.op_code);
    let name = query.name().to_string().to_ascii_lowercase();
    match zone.get(name.trim_end_matches('.')) {
        None => message.metadata.response_code = ResponseCode::NXDomain,
        Some((addresses, ttl)) => {
            for ip in addresses {
                let data = match (ip, query.query_type()) {
                    (IpAddr::V4(ip), RecordType::A) => RData::A(A(*ip)),
                    (IpAddr::V6(ip), RecordType::AAAA) => RData::AAAA(AAAA(*ip)),
                    _ => continue,
                };
                message.add_answer(Record::from_rdata(query.name().clone(), *ttl, data));
            }
        }
    }
    message.add_query(query);
    message
}

fn ips(texts: &[&str]) -> Vec<IpAddr> {
    texts.iter().map(|text| IpAddr::from_str(text).unwrap()).collect()
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

#[tokio::test]
async fn look_up_both_families_returns_addresses_and_ttl() {
    let server = TestServer::new();
    server.set_addresses("api.example.com", &["10.0.0.1", "10.0.0.2", "fd00::1"], 60);
    let found = look_up("api.example.com", &server.files).await;
    let mut v4 = found.v4.unwrap();
    v4.sort();
    assert_eq!(v4, ips(&["10.0.0.1", "10.0.0.2"]));
    assert_eq!(found.v6.unwrap(), ips(&["fd00::1"]));
    assert!((50..=60).contains(&found.ttl.as_secs()), "{:?}", found.ttl);

    server.set_addresses("four.example.com", &["10.0.0.4"], 60);
    let found = look_up("four.example.com", &server.files).await;
    assert_eq!((found.v4.unwrap().len(), found.v6.unwrap().len()), (1, 0));
    let found = look_up("nowhere.example.com", &server.files).await;
    assert!(matches!(found.v4, Err(LookupError::NoSuchName)));
}

#[tokio::test]
async fn look_up_name_in_hosts_file_or_below_localhost_causes_no_query() {
    let server = TestServer::new();
    server.set_addresses("api.example.com", &["10.0.0.1"], 60);
    let hosts = "# local\n10.1.1.1 API.example.com other\nfd00::9 api.example.com\nnonsense\n";
    std::fs::write(&server.files.hosts, hosts).unwrap();
    let found = look_up("api.example.com", &server.files).await;
    assert_eq!(found.v4.unwrap(), ips(&["10.1.1.1"]));
    assert_eq!(found.v6.unwrap(), ips(&["fd00::9"]));
    let found = look_up("node.localhost", &server.files).await;
    assert_eq!((found.v4.unwrap(), found.v6.unwrap()), (ips(&["127.0.0.1"]), ips(&["::1"])));
    assert_eq!(server.query_count(), 0);
    std::fs::remove_file(&server.files.hosts).unwrap();
    let found = look_up("api.example.com", &server.files).await;
    assert_eq!(
        found.v4.unwrap(),
        ips(&["10.0.0.1"]),
        "the name server is queried if there is no hosts file"
    );
}

#[tokio::test]
async fn look_up_without_configured_name_servers_fails() {
    let server = TestServer::new();
    std::fs::remove_file(&server.files.resolv_conf).unwrap();
    let found = look_up("api.example.com", &server.files).await;
    assert!(found.v4.unwrap_err().to_string().contains("resolv.conf"));
    std::fs::write(&server.files.resolv_conf, "# nothing\nnonsense here\n").unwrap();
    let found = look_up("api.example.com", &server.files).await;
    assert!(found.v6.unwrap_err().to_string().contains("resolv.conf"));
}

#[tokio::test]
async fn look_up_pipes_as_files_do_not_block_and_bad_lines_are_skipped() {
    let server = TestServer::new();
    server.set_addresses("api.example.com", &["10.0.0.1"], 60);
    // Opening a named pipe without a writer blocks the reader.
    for path in [&server.files.hosts, &server.files.resolv_conf] {
        let _ = std::fs::remove_file(path);
        assert!(std::process::Command::new("mkfifo").arg(path).status().unwrap().success());
    }
    let found = look_up("api.example.com", &server.files).await;
    let why = found.v4.unwrap_err().to_string();
    assert!(why.contains("resolv.conf") && why.contains("not a regular file"), "{why}");
    for path in [&server.files.hosts, &server.files.resolv_conf] {
        std::fs::remove_file(path).unwrap();
    }
    // The lookup works with `timeout:0`, which is raised to 1 s, and with unknown options.
    let resolv_conf = "nameserver 127.0.0.1\noptions timeout:0 attempts:0 trust-ad unknown:1\n";
    std::fs::write(&server.files.resolv_conf, resolv_conf).unwrap();
    let found = look_up("api.example.com", &server.files).await;
    assert_eq!(found.v4.unwrap(), ips(&["10.0.0.1"]));
    // A comment that is not UTF-8 does not invalidate the file.
    let hosts = b"# R\xe9seau\n10.1.1.1 api.example.com # l'\xe9quipe\n";
    std::fs::write(&server.files.hosts, hosts).unwrap();
    let found = look_up("api.example.com", &server.files).await;
    assert_eq!(found.v4.unwrap(), ips(&["10.1.1.1"]));
}

#[test]
fn apply_result_failed_lookup_keeps_addresses_and_backs_off() {
    let found = |v4: Result<&[&str], LookupError>, v6: Result<&[&str], LookupError>| {
        let family = |f: Result<&[&str], LookupError>| f.map(ips);
        LookupResult {
            v4: family(v4),
            v6: family(v6),
            ttl: Duration::from_secs(60),
            complete: false,
        }
    };
    let mut known = NameState::default();
    let (mut backoff, now) = (RETRIES, clock::now());
    // Applies a result and returns the seconds until the next lookup.
    let mut next = |known: &mut NameState, found| {
        apply_result(known, found, &mut backoff, &|_| false, now).as_secs()
    };
    assert_eq!(next(&mut known, found(Ok(&["10.0.0.1"]), Ok(&["fd00::1"]))), 60);
    // A family whose query failed keeps its addresses, and the next lookup follows after 1 s.
    assert_eq!(next(&mut known, found(Ok(&["10.0.0.2"]), Err(LookupError::TimedOut))), 1);
    assert_eq!(known.addresses().collect::<Vec<_>>(), ips(&["10.0.0.2", "fd00::1"]));
    assert!(matches!(known.error, Some(LookupError::TimedOut)));
    // A family for which a successful response has no addresses loses its addresses.
    assert_eq!(next(&mut known, found(Ok(&["10.0.0.2"]), Ok(&[]))), 60);
    assert_eq!(known.addresses().collect::<Vec<_>>(), ips(&["10.0.0.2"]));
    // A response without any address is a failure: the known addresses stay.
    for (round, pause) in [1, 2, 4, 8, 16, 30, 30].into_iter().enumerate() {
        assert_eq!(next(&mut known, found(Ok(&[]), Ok(&[]))), pause, "round {round}");
    }
    assert_eq!(known.addresses().collect::<Vec<_>>(), ips(&["10.0.0.2"]));
    assert_eq!(
        next(&mut known, found(Err(LookupError::NoSuchName), Err(LookupError::NoSuchName))),
        30
    );
    assert_eq!(known.addresses().count(), 1);
    let without_ttl = LookupResult { ttl: Duration::ZERO, ..found(Ok(&["10.0.0.1"]), Ok(&[])) };
    assert_eq!(next(&mut known, without_ttl), 5, "a TTL of 0 is raised to 5 s");
    let long_ttl =
        LookupResult { ttl: Duration::from_secs(86_400), ..found(Ok(&["10.0.0.1"]), Ok(&[])) };
    assert_eq!(next(&mut known, long_ttl), 300, "a TTL of a day is reduced to 300 s");
}

/// One response arrives in each TTL.
#[tokio::test(start_paused = true)]
async fn apply_result_omitted_usable_address_stays_for_three_ttls() {
    const TTL: Duration = Duration::from_secs(60);
    let all = ips(&["10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4"]);
    let (mut known, mut backoff) = (NameState::default(), RETRIES);
    let mut respond = |known: &mut NameState, v4: &[IpAddr], usable: &dyn Fn(IpAddr) -> bool| {
        let found = LookupResult { v4: Ok(v4.to_vec()), v6: Ok(vec![]), ttl: TTL, complete: false };
        assert_eq!(apply_result(known, found, &mut backoff, usable, clock::now()), TTL);
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
        let ttl = Duration::from_secs(60);
        let found =
            LookupResult { v4: Ok(ips(&["10.0.0.1"])), v6: Ok(vec![]), ttl, complete: false };
        apply_result(&mut known, found, &mut backoff, &|_| true, clock::now());
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
        let ttl = Duration::from_secs(60);
        let found = LookupResult { v4: Ok(ips(&v4)), v6: Ok(vec![]), ttl, complete };
        apply_result(&mut known, found, &mut { RETRIES }, &|_| true, now);
        assert_eq!(known.addresses().collect::<Vec<_>>(), ips(&v4));
    }
}

#[tokio::test]
async fn follow_omitted_address_stays_while_its_endpoint_is_usable() {
    let server = TestServer::new();
    server.set_addresses("api.example.com", &["10.0.0.1", "10.0.0.2", "10.0.0.3"], 60);
    let (upstream, states) = new_source_states();
    let names = vec![EndpointAddress { host: "api.example.com".into(), port: 6443 }];
    let test = async {
        let task = follow(names, server.files.clone(), Rc::clone(&states));
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
        server.set_addresses("api.example.com", &["10.0.0.1"], 60);
        tokio::time::pause();
        tokio::time::advance(Duration::from_secs(67)).await;
        tokio::time::resume();
        wait_for(&states, &["10.0.0.1:6443", "10.0.0.2:6443"]).await;
        task.abort();
    };
    LocalSet::new().run_until(test).await;
}

#[tokio::test]
async fn follow_hosts_file_changed_publishes_new_addresses() {
    let server = TestServer::new();
    server.set_addresses("api.example.com", &["10.0.0.1"], 300);
    let (upstream, states) = new_source_states();
    let name = |host: &str, port| EndpointAddress { host: host.into(), port };
    let names = vec![name("api.example.com", 6443), name("added.example.com", 443)];
    let is_complete = || states.read(|answers, _| answers[&EndpointSource::Dns].complete);
    LocalSet::new()
        .run_until(async {
            let task = follow(names, server.files.clone(), Rc::clone(&states));
            let task = tokio::task::spawn_local(task);
            wait_for(&states, &["10.0.0.1:6443"]).await;
            assert!(!is_complete(), "added.example.com is not resolved");
            let error = "dns: added.example.com: there is no such name";
            until("the failed lookup is reported", async || {
                upstream.sources.current_errors() == error
            })
            .await;
            assert_eq!(upstream.sources.reports()[&EndpointSource::Dns].endpoints, 1);
            std::fs::write(&server.files.hosts, "fd00::7 added.example.com\n").unwrap();
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
    let server = TestServer::new();
    server.set_addresses("a.example.com", &["10.0.0.1", "fd00::1"], 300);
    server.set_addresses("b.example.com", &["10.0.0.2"], 300);
    let (upstream, states) = new_source_states();
    let names = |hosts: &[&str]| -> Vec<_> {
        let name = |host: &&str| EndpointAddress { host: (*host).to_owned(), port: 6443 };
        hosts.iter().map(name).collect()
    };
    let test = async {
        let first = follow(
            names(&["a.example.com", "b.example.com"]),
            server.files.clone(),
            Rc::clone(&states),
        );
        let first = tokio::task::spawn_local(first);
        wait_for(&states, &["10.0.0.1:6443", "[fd00::1]:6443", "10.0.0.2:6443"]).await;
        first.abort();
        // From now on lookups at the name server fail. The hosts file has only the added name.
        std::fs::write(&server.files.resolv_conf, "# empty\n").unwrap();
        std::fs::write(&server.files.hosts, "10.0.0.3 c.example.com\n").unwrap();
        let next = names(&["c.example.com", "b.example.com", "a.example.com"]);
        let second = follow(next, server.files.clone(), Rc::clone(&states));
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
    let server = TestServer::new();
    server.set_addresses("api.example.com", &["10.0.0.1"], 60);
    let (_, states) = new_source_states();
    let names = vec![EndpointAddress { host: "api.example.com".into(), port: 6443 }];
    let test = async {
        let task = follow(names, server.files.clone(), Rc::clone(&states));
        let task = tokio::task::spawn_local(task);
        wait_for(&states, &["10.0.0.1:6443"]).await;
        let before = server.query_count();
        server.set_addresses("api.example.com", &["10.0.0.2"], 60);
        // The jitter is at most a tenth of the TTL, so the next lookup starts after 54 s to 66 s. The clock
        // is paused only between lookups, because the name server responds in real time.
        tokio::time::pause();
        tokio::time::advance(Duration::from_secs(50)).await;
        assert_eq!(server.query_count(), before, "no query before the TTL expires");
        tokio::time::advance(Duration::from_secs(17)).await;
        tokio::time::resume();
        wait_for(&states, &["10.0.0.2:6443"]).await;
        task.abort();
    };
    LocalSet::new().run_until(test).await;
}

#[tokio::test(start_paused = true)]
async fn look_up_silent_name_server_fails_within_timeout() {
    let server = TestServer::new();
    server.silent.store(true, Ordering::Relaxed);
    let start = clock::now();
    let found = look_up("api.example.com", &server.files).await;
    assert!(found.v4.is_err() && found.v6.is_err());
    assert!(
        clock::elapsed(start) <= LOOKUP_TIMEOUT + Duration::from_secs(1),
        "{:?}",
        clock::elapsed(start)
    );
}

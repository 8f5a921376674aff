//! Questions to a name server of our own.

use std::collections::HashMap;
use std::net::UdpSocket;
use std::str::FromStr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use hickory_resolver::proto::op::{Message, ResponseCode};
use hickory_resolver::proto::rr::rdata::{A, AAAA};
use hickory_resolver::proto::rr::{RData, Record};
use tokio::task::LocalSet;

use super::*;
use crate::control::discovery::merge::OwnAddresses;
use crate::observe::Metrics;
use crate::upstream::Upstream;
use crate::upstream::credentials::Credentials;
use crate::wait::until;

/// The addresses of each name, and their time to live.
type Zone = HashMap<String, (Vec<IpAddr>, u32)>;

/// A name server on a port of its own, and files that name it.
struct World {
    system: ResolverFiles,
    zone: Arc<Mutex<Zone>>,
    silent: Arc<std::sync::atomic::AtomicBool>,
    asked: Arc<AtomicUsize>,
    _dir: tempfile::TempDir,
}

impl World {
    fn new() -> Self {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let dir = tempfile::tempdir().unwrap();
        let system = ResolverFiles {
            hosts: dir.path().join("hosts"),
            resolv_conf: dir.path().join("resolv.conf"),
            port: socket.local_addr().unwrap().port(),
        };
        std::fs::write(&system.resolv_conf, "nameserver 127.0.0.1\n").unwrap();
        let world = Self {
            system,
            zone: Arc::default(),
            silent: Arc::default(),
            asked: Arc::default(),
            _dir: dir,
        };
        let (zone, silent) = (Arc::clone(&world.zone), Arc::clone(&world.silent));
        let asked = Arc::clone(&world.asked);
        std::thread::spawn(move || {
            let mut buffer = [0; 1500];
            while let Ok((size, peer)) = socket.recv_from(&mut buffer) {
                asked.fetch_add(1, Ordering::Relaxed);
                if silent.load(Ordering::Relaxed) {
                    continue;
                }
                let question = Message::from_vec(&buffer[..size]).unwrap();
                let answer = answer(&question, &zone.lock().unwrap());
                let _ = socket.send_to(&answer.to_vec().unwrap(), peer);
            }
        });
        world
    }

    fn say(&self, name: &str, addresses: &[&str], ttl: u32) {
        let addresses = addresses.iter().map(|a| a.parse().unwrap()).collect();
        self.zone.lock().unwrap().insert(name.to_owned(), (addresses, ttl));
    }

    fn asked(&self) -> usize {
        self.asked.load(Ordering::Relaxed)
    }
}

fn answer(question: &Message, zone: &Zone) -> Message {
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

#[tokio::test]
async fn both_families_and_the_shorter_time() {
    let world = World::new();
    world.say("api.example.com", &["10.0.0.1", "10.0.0.2", "fd00::1"], 60);
    let found = look_up("api.example.com", &world.system).await;
    let mut v4 = found.v4.unwrap();
    v4.sort();
    assert_eq!(v4, ips(&["10.0.0.1", "10.0.0.2"]));
    assert_eq!(found.v6.unwrap(), ips(&["fd00::1"]));
    assert!((50..=60).contains(&found.ttl.as_secs()), "{:?}", found.ttl);

    world.say("four.example.com", &["10.0.0.4"], 60);
    let found = look_up("four.example.com", &world.system).await;
    assert_eq!((found.v4.unwrap().len(), found.v6.unwrap().len()), (1, 0));
    let found = look_up("nowhere.example.com", &world.system).await;
    assert_eq!(found.v4.unwrap_err(), "there is no such name");
}

#[tokio::test]
async fn hosts_come_before_dns_and_localhost_is_never_asked_for() {
    let world = World::new();
    world.say("api.example.com", &["10.0.0.1"], 60);
    let hosts = "# ours\n10.1.1.1 API.example.com other\nfd00::9 api.example.com\nnonsense\n";
    std::fs::write(&world.system.hosts, hosts).unwrap();
    let found = look_up("api.example.com", &world.system).await;
    assert_eq!(found.v4.unwrap(), ips(&["10.1.1.1"]));
    assert_eq!(found.v6.unwrap(), ips(&["fd00::9"]));
    let found = look_up("node.localhost", &world.system).await;
    assert_eq!((found.v4.unwrap(), found.v6.unwrap()), (ips(&["127.0.0.1"]), ips(&["::1"])));
    assert_eq!(world.asked(), 0);
    std::fs::remove_file(&world.system.hosts).unwrap();
    let found = look_up("api.example.com", &world.system).await;
    assert_eq!(found.v4.unwrap(), ips(&["10.0.0.1"]), "no hosts file is no hosts");
}

#[tokio::test]
async fn without_name_servers_there_is_an_error_and_no_question_to_strangers() {
    let world = World::new();
    std::fs::remove_file(&world.system.resolv_conf).unwrap();
    let found = look_up("api.example.com", &world.system).await;
    assert!(found.v4.unwrap_err().contains("resolv.conf"));
    std::fs::write(&world.system.resolv_conf, "# nothing\nnonsense here\n").unwrap();
    let found = look_up("api.example.com", &world.system).await;
    assert!(found.v6.unwrap_err().contains("resolv.conf"));
}

#[tokio::test]
async fn files_of_the_system_that_are_strange() {
    let world = World::new();
    world.say("api.example.com", &["10.0.0.1"], 60);
    // Pipes that nobody writes to, where files should be.
    for path in [&world.system.hosts, &world.system.resolv_conf] {
        let _ = std::fs::remove_file(path);
        assert!(std::process::Command::new("mkfifo").arg(path).status().unwrap().success());
    }
    let found = look_up("api.example.com", &world.system).await;
    let why = found.v4.unwrap_err();
    assert!(why.contains("resolv.conf") && why.contains("not a regular file"), "{why}");
    for path in [&world.system.hosts, &world.system.resolv_conf] {
        std::fs::remove_file(path).unwrap();
    }
    // A time of nothing is no time to answer in; a comment in Latin-1 spoils no line but its own.
    let resolv_conf = "nameserver 127.0.0.1\noptions timeout:0 attempts:0 trust-ad what:ever\n";
    std::fs::write(&world.system.resolv_conf, resolv_conf).unwrap();
    let found = look_up("api.example.com", &world.system).await;
    assert_eq!(found.v4.unwrap(), ips(&["10.0.0.1"]));
    let hosts = b"# R\xe9seau\n10.1.1.1 api.example.com # l'\xe9quipe\n";
    std::fs::write(&world.system.hosts, hosts).unwrap();
    let found = look_up("api.example.com", &world.system).await;
    assert_eq!(found.v4.unwrap(), ips(&["10.1.1.1"]));
}

#[test]
fn what_is_known_stays_until_there_is_something_better() {
    let found = |v4: Result<&[&str], &str>, v6: Result<&[&str], &str>| {
        let family = |f: Result<&[&str], &str>| f.map(ips).map_err(str::to_owned);
        Found { v4: family(v4), v6: family(v6), ttl: Duration::from_secs(60), complete: false }
    };
    let mut known = Known::default();
    let (mut failures, now) = (0, Instant::now());
    let mut next =
        |known: &mut Known, found| take(known, found, &mut failures, &|_| false, now).as_secs();
    assert_eq!(next(&mut known, found(Ok(&["10.0.0.1"]), Ok(&["fd00::1"]))), 60);
    // One family fails: it keeps what it had, and is asked for again soon.
    assert_eq!(next(&mut known, found(Ok(&["10.0.0.2"]), Err("timed out"))), 1);
    assert_eq!(known.addresses().collect::<Vec<_>>(), ips(&["10.0.0.2", "fd00::1"]));
    assert_eq!(known.error.as_deref(), Some("timed out"));
    // One family is gone, and says so.
    assert_eq!(next(&mut known, found(Ok(&["10.0.0.2"]), Ok(&[]))), 60);
    assert_eq!(known.addresses().collect::<Vec<_>>(), ips(&["10.0.0.2"]));
    // Nothing at all is no answer.
    for (turn, pause) in [1, 2, 4, 8, 16, 30, 30].into_iter().enumerate() {
        assert_eq!(next(&mut known, found(Ok(&[]), Ok(&[]))), pause, "turn {turn}");
    }
    assert_eq!(known.addresses().collect::<Vec<_>>(), ips(&["10.0.0.2"]));
    assert_eq!(next(&mut known, found(Err("no such name"), Err("no such name"))), 30);
    assert_eq!(known.addresses().count(), 1);
    let quick = Found { ttl: Duration::ZERO, ..found(Ok(&["10.0.0.1"]), Ok(&[])) };
    assert_eq!(next(&mut known, quick), 5, "a TTL of 0 is no flood");
    let slow = Found { ttl: Duration::from_secs(86_400), ..found(Ok(&["10.0.0.1"]), Ok(&[])) };
    assert_eq!(next(&mut known, slow), 300, "a TTL of a day is no blindness");
}

/// One answer in each TTL: an address that an answer omits stays for three TTLs while it is usable.
#[tokio::test(start_paused = true)]
async fn answers_that_rotate_subsets_keep_usable_addresses_for_three_ttls() {
    const TTL: Duration = Duration::from_secs(60);
    let all = ips(&["10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4"]);
    let (mut known, mut failures) = (Known::default(), 0);
    let mut answer = |known: &mut Known, v4: &[IpAddr], usable: &dyn Fn(IpAddr) -> bool| {
        let found = Found { v4: Ok(v4.to_vec()), v6: Ok(vec![]), ttl: TTL, complete: false };
        assert_eq!(take(known, found, &mut failures, usable, Instant::now()), TTL);
        let mut set: Vec<_> = known.addresses().collect();
        set.sort_unstable();
        set
    };
    // Two of four, another pair each time: all are known after two answers, and then for ever.
    for turn in 0..20 {
        let pair = if turn % 2 == 0 { &all[..2] } else { &all[2..] };
        let set = answer(&mut known, pair, &|_| true);
        assert_eq!(set, if turn == 0 { &all[..2] } else { &all[..] }, "turn {turn}");
        tokio::time::advance(TTL).await;
    }
    // .3 and .4 are named no more. They were named one TTL ago; three TTLs after that they leave.
    let unnamed = [4, 4, 2, 2].map(|count| &all[..count]);
    for (turn, expected) in unnamed.into_iter().enumerate() {
        assert_eq!(answer(&mut known, &all[..2], &|_| true), expected, "turn {turn}");
        tokio::time::advance(TTL).await;
    }
    // .2 is left out, and nothing can be reached there.
    assert_eq!(answer(&mut known, &all[..1], &|ip| ip != all[1]), &all[..1]);
}

#[tokio::test(start_paused = true)]
async fn an_address_that_was_known_before_the_task_began_stays_for_three_ttls_too() {
    let before = Address { ip: ips(&["10.0.0.2"])[0], until: None };
    let mut known = Known { v4: vec![before], ..Known::default() };
    let mut failures = 0;
    for expected in [2, 2, 2, 1] {
        let ttl = Duration::from_secs(60);
        let found = Found { v4: Ok(ips(&["10.0.0.1"])), v6: Ok(vec![]), ttl, complete: false };
        take(&mut known, found, &mut failures, &|_| true, Instant::now());
        assert_eq!(known.v4.len(), expected);
        tokio::time::advance(ttl).await;
    }
}

/// The hosts file is edited by the operator: what it no longer has is meant to be gone.
#[test]
fn what_the_hosts_file_leaves_out_leaves_at_once() {
    let now = Instant::now();
    let mut known = Known::default();
    for (v4, complete) in [(["10.0.0.1"], false), (["10.0.0.2"], true)] {
        let ttl = Duration::from_secs(60);
        let found = Found { v4: Ok(ips(&v4)), v6: Ok(vec![]), ttl, complete };
        take(&mut known, found, &mut 0, &|_| true, now);
        assert_eq!(known.addresses().collect::<Vec<_>>(), ips(&v4));
    }
}

#[tokio::test]
async fn the_board_keeps_an_address_left_out_while_its_endpoint_is_usable() {
    let world = World::new();
    world.say("api.example.com", &["10.0.0.1", "10.0.0.2", "10.0.0.3"], 60);
    let config = crate::control::discovery::tests::config();
    let credentials = Credentials::load(&config, &[]).unwrap();
    let upstream = Arc::new(Upstream::new(config, credentials, &Metrics::new()));
    let board = SourceStates::new(Arc::clone(&upstream), Box::new(OwnAddresses::default));
    let names = vec![EndpointAddress { host: "api.example.com".into(), port: 6443 }];
    let becomes = async |hosts: &[&str]| loop {
        let mut now: Vec<_> = board.with(|answers, _| {
            let entries =
                answers.get(&EndpointSource::Dns).map_or(&[][..], |answer| &answer.entries);
            entries.iter().map(|entry| entry.address.host.clone()).collect()
        });
        now.sort();
        if now == hosts {
            break;
        }
        board.changed().await;
    };
    let test = async {
        let task = follow(names, world.system.clone(), Rc::clone(&board));
        let task = tokio::task::spawn_local(task);
        becomes(&["10.0.0.1", "10.0.0.2", "10.0.0.3"]).await;
        let members: Vec<_> = board.with(|answers, _| {
            let entries = answers[&EndpointSource::Dns].entries.iter();
            let member = |entry: &Candidate| crate::control::endpoint_set::EndpointSpec {
                address: entry.address.clone(),
                server_name: entry.server_name.clone(),
                fallback: false,
            };
            entries.map(member).collect()
        });
        crate::control::endpoint_set::replace_endpoints(&upstream, &members);
        for endpoint in upstream.endpoints().iter() {
            if endpoint.address.host != "10.0.0.3" {
                endpoint.connected();
                endpoint.readyz_ok();
            }
        }
        world.say("api.example.com", &["10.0.0.1"], 60);
        tokio::time::pause();
        tokio::time::advance(Duration::from_secs(67)).await;
        tokio::time::resume();
        becomes(&["10.0.0.1", "10.0.0.2"]).await;
        task.abort();
    };
    LocalSet::new().run_until(test).await;
}

#[tokio::test]
async fn the_board_hears_of_names_and_of_changes_in_hosts() {
    let world = World::new();
    world.say("api.example.com", &["10.0.0.1"], 300);
    let config = crate::control::discovery::tests::config();
    let credentials = Credentials::load(&config, &[]).unwrap();
    let upstream = Arc::new(Upstream::new(config, credentials, &Metrics::new()));
    let board = SourceStates::new(Arc::clone(&upstream), Box::new(OwnAddresses::default));
    let name = |host: &str, port| EndpointAddress { host: host.into(), port };
    let names = vec![name("api.example.com", 6443), name("late.example.com", 443)];
    let known = |board: &SourceStates| {
        board.with(|answers, _| {
            let answer = answers.get(&EndpointSource::Dns).cloned().unwrap_or_default();
            let mut labels: Vec<_> = answer.entries.iter().map(|e| e.address.to_string()).collect();
            labels.sort();
            (labels, answer.complete)
        })
    };
    let local = LocalSet::new();
    local
        .run_until(async {
            let task = follow(names, world.system.clone(), Rc::clone(&board));
            let task = tokio::task::spawn_local(task);
            while known(&board).0 != ["10.0.0.1:6443"] {
                board.changed().await;
            }
            assert!(!known(&board).1, "one name has no answer");
            let why = "dns: late.example.com: there is no such name";
            until("why", async || upstream.sources.complaints() == why).await;
            assert_eq!(upstream.sources.reports()[&EndpointSource::Dns].endpoints, 1);
            std::fs::write(&world.system.hosts, "fd00::7 late.example.com\n").unwrap();
            while known(&board) != (vec!["10.0.0.1:6443".into(), "[fd00::7]:443".into()], true) {
                board.changed().await;
            }
            task.abort();
        })
        .await;
    let entry = board.with(|answers, _| answers[&EndpointSource::Dns].entries[0].clone());
    assert_eq!(entry.server_name.as_deref(), Some("api.example.com"), "the name is verified");
}

#[tokio::test]
async fn a_name_beside_it_takes_nothing_from_one_that_was_known() {
    let world = World::new();
    world.say("a.example.com", &["10.0.0.1", "fd00::1"], 300);
    world.say("b.example.com", &["10.0.0.2"], 300);
    let config = crate::control::discovery::tests::config();
    let credentials = Credentials::load(&config, &[]).unwrap();
    let upstream = Arc::new(Upstream::new(config, credentials, &Metrics::new()));
    let board = SourceStates::new(Arc::clone(&upstream), Box::new(OwnAddresses::default));
    let names = |hosts: &[&str]| -> Vec<_> {
        let name = |host: &&str| EndpointAddress { host: (*host).to_owned(), port: 6443 };
        hosts.iter().map(name).collect()
    };
    let known = || -> Vec<String> {
        board.with(|answers, _| {
            let entries =
                answers.get(&EndpointSource::Dns).map_or(&[][..], |answer| &answer.entries);
            entries.iter().map(|e| e.address.host.clone()).collect()
        })
    };
    let test = async {
        let first = follow(
            names(&["a.example.com", "b.example.com"]),
            world.system.clone(),
            Rc::clone(&board),
        );
        let first = tokio::task::spawn_local(first);
        while known() != ["10.0.0.1", "fd00::1", "10.0.0.2"] {
            board.changed().await;
        }
        first.abort();
        // No name server answers any more, but there is one in the file that needs none.
        std::fs::write(&world.system.resolv_conf, "# nothing\n").unwrap();
        std::fs::write(&world.system.hosts, "10.0.0.3 c.example.com\n").unwrap();
        let next = names(&["c.example.com", "b.example.com", "a.example.com"]);
        let second = follow(next, world.system.clone(), Rc::clone(&board));
        let second = tokio::task::spawn_local(second);
        while known() != ["10.0.0.3", "10.0.0.2", "10.0.0.1", "fd00::1"] {
            assert!(known().contains(&"10.0.0.1".to_owned()), "{:?}", known());
            board.changed().await;
        }
        let told = async || upstream.sources.complaints().contains("a.example.com: ");
        until("its failure is known", told).await;
        assert_eq!(known().len(), 4);
        second.abort();
    };
    LocalSet::new().run_until(test).await;
}

#[tokio::test]
async fn a_name_is_asked_for_again_when_its_time_is_over() {
    let world = World::new();
    world.say("api.example.com", &["10.0.0.1"], 60);
    let config = crate::control::discovery::tests::config();
    let credentials = Credentials::load(&config, &[]).unwrap();
    let upstream = Arc::new(Upstream::new(config, credentials, &Metrics::new()));
    let board = SourceStates::new(upstream, Box::new(OwnAddresses::default));
    let names = vec![EndpointAddress { host: "api.example.com".into(), port: 6443 }];
    let becomes = async |host: &str| {
        let is = |answers: &BTreeMap<EndpointSource, super::super::merge::SourceAnswer>| {
            answers
                .get(&EndpointSource::Dns)
                .is_some_and(|answer| answer.entries[0].address.host == host)
        };
        while !board.with(|answers, _| is(answers)) {
            board.changed().await;
        }
    };
    let test = async {
        let task = follow(names, world.system.clone(), Rc::clone(&board));
        let task = tokio::task::spawn_local(task);
        becomes("10.0.0.1").await;
        let asked = world.asked();
        world.say("api.example.com", &["10.0.0.2"], 60);
        // A tenth of the time is jitter. The clock stands still only while nobody is asked: a name
        // server answers in real time.
        tokio::time::pause();
        tokio::time::advance(Duration::from_secs(50)).await;
        assert_eq!(world.asked(), asked, "not before");
        tokio::time::advance(Duration::from_secs(17)).await;
        tokio::time::resume();
        becomes("10.0.0.2").await;
        task.abort();
    };
    LocalSet::new().run_until(test).await;
}

#[tokio::test(start_paused = true)]
async fn silence_ends() {
    let world = World::new();
    world.silent.store(true, Ordering::Relaxed);
    let start = Instant::now();
    let found = look_up("api.example.com", &world.system).await;
    assert!(found.v4.is_err() && found.v6.is_err());
    assert!(start.elapsed() <= LOOKUP + Duration::from_secs(1), "{:?}", start.elapsed());
}

//! Lookups with a name server.

use std::net::IpAddr;
use std::time::Duration;

use jackstay_sys::clock;
use jackstay_testkit::name_server::Reply::{Cut, Failure, NoSuchName, Refusal, Silence};
use jackstay_testkit::name_server::{NameServer, RecordType, Reply, ResolverSetup, parse as ips};

use super::*;

const API: &str = "api.example.com";

/// A name server, and resolver files that refer to it.
struct Setup {
    resolver: ResolverSetup,
    server: NameServer,
    files: ResolverFiles,
}

impl Setup {
    fn new() -> Self {
        let resolver = ResolverSetup::start();
        let server = resolver.server.clone();
        let files = ResolverFiles {
            hosts: resolver.hosts.clone(),
            resolv_conf: resolver.resolv_conf.clone(),
            port: server.address().port(),
        };
        Self { resolver, server, files }
    }

    fn resolv_conf(&self, lines: &str) {
        self.resolver.write_resolv_conf(lines);
    }

    async fn look_up(&self, host: &str) -> Result<Found, LookupError> {
        look_up(host, &self.files).await
    }
}

fn addresses(found: Found) -> Vec<IpAddr> {
    let mut all = found.v4.unwrap_or_default();
    all.extend(found.v6.unwrap_or_default());
    all.sort();
    all
}

fn none() -> Reply {
    Reply::Addresses(Vec::new(), 60)
}

fn some(addresses: &[&str]) -> Reply {
    Reply::Addresses(ips(addresses), 60)
}

#[tokio::test]
async fn look_up_both_families_returns_addresses_and_ttl() {
    let setup = Setup::new();
    setup.server.set_addresses("api.example.com", &["10.0.0.1", "10.0.0.2", "fd00::1"], 60);
    let found = setup.look_up("api.example.com").await.unwrap();
    assert!((50..=60).contains(&found.ttl.as_secs()), "{:?}", found.ttl);
    assert_eq!(found.name.as_deref(), Some("api.example.com."));
    assert_eq!(addresses(found), ips(&["10.0.0.1", "10.0.0.2", "fd00::1"]));
    for (seconds, expected) in [(0, TTL_MIN), (86_400, TTL_MAX)] {
        setup.server.set_addresses("api.example.com", &["10.0.0.1"], seconds);
        assert_eq!(setup.look_up("api.example.com").await.unwrap().ttl, expected);
    }
}

/// The table of the module: what is asked, and what is found.
#[tokio::test]
async fn look_up_ends_at_the_first_name_with_an_address_of_either_family() {
    const A: RecordType = RecordType::A;
    const AAAA: RecordType = RecordType::AAAA;
    /// resolv.conf, the host, what is scripted, the addresses or the error, and the names that are asked for. A name
    /// with `?` is asked for at the same time as the one that is found, so that its query may be cancelled before.
    type Row<'a> = (
        &'a str,
        &'a str,
        &'a [(&'a str, Option<RecordType>, Reply)],
        Result<&'a [&'a str], &'a str>,
        &'a [&'a str],
    );
    let corp = "search corp.test\n";
    let k8s = "search ns.svc.test svc.test\noptions ndots:5\n";
    let v4 = || some(&["10.0.0.1"]);
    let rows: &[Row] = &[
        // IPv4 only, as names of balancers are: the search list is not asked.
        (corp, API, &[(API, None, v4())], Ok(&["10.0.0.1"]), &[API]),
        (corp, API, &[(API, None, some(&["fd00::1"]))], Ok(&["fd00::1"]), &[API]),
        // A wildcard in the zone of a search domain is no stranger's address.
        (
            corp,
            API,
            &[(API, None, v4()), ("*.corp.test", None, some(&["fd00::bad"]))],
            Ok(&["10.0.0.1"]),
            &[API],
        ),
        // A name server that denies the name for the other family.
        (
            corp,
            API,
            &[(API, Some(A), v4()), (API, Some(AAAA), NoSuchName)],
            Ok(&["10.0.0.1"]),
            &[API],
        ),
        // Few dots: the search list is first, and each name is asked for both families.
        (
            k8s,
            API,
            &[(API, None, v4())],
            Ok(&["10.0.0.1"]),
            &["api.example.com.ns.svc.test", "api.example.com.svc.test", API],
        ),
        (
            k8s,
            "api",
            &[("api.svc.test", None, v4()), ("api", None, some(&["fd00::bad"]))],
            Ok(&["10.0.0.1"]),
            &["api.ns.svc.test", "api.svc.test", "api?"],
        ),
        // NODATA of both families: the next name.
        (
            k8s,
            "api",
            &[("api.ns.svc.test", None, none()), ("api", None, v4())],
            Ok(&["10.0.0.1"]),
            &["api.ns.svc.test", "api.svc.test", "api"],
        ),
        // A final dot.
        (
            k8s,
            "api.example.com.",
            &[("*.test", None, some(&["10.0.0.99"])), (API, None, v4())],
            Ok(&["10.0.0.1"]),
            &[API],
        ),
        (
            k8s,
            "api.svc.",
            &[("*.test", None, some(&["10.0.0.99"]))],
            Err("there is no such name"),
            &["api.svc"],
        ),
        // Nothing is found.
        (corp, API, &[], Err("there is no such name"), &[API, "api.example.com.corp.test"]),
        (
            corp,
            API,
            &[(API, None, none())],
            Err("it has no address"),
            &[API, "api.example.com.corp.test"],
        ),
        ("search .\n", "api", &[], Err("there is no such name"), &["api"]),
        // A name server that fails for one name: the next one.
        (
            corp,
            "api",
            &[("api.corp.test", None, Failure), ("api", None, v4())],
            Ok(&["10.0.0.1"]),
            &["api.corp.test", "api"],
        ),
        (
            corp,
            "api",
            &[("api.corp.test", None, Refusal), ("api", None, v4())],
            Ok(&["10.0.0.1"]),
            &["api.corp.test", "api"],
        ),
        (corp, API, &[(API, Some(A), v4()), (API, Some(AAAA), Failure)], Ok(&["10.0.0.1"]), &[API]),
        // A response that is cut is asked for again over TCP.
        (
            corp,
            API,
            &[(API, None, Cut(ips(&["10.0.0.1", "10.0.0.2", "fd00::1"]), 60))],
            Ok(&["10.0.0.1", "10.0.0.2", "fd00::1"]),
            &[API],
        ),
        (
            "search corp.test\noptions use-vc\n",
            API,
            &[(API, None, Cut(ips(&["10.0.0.1"]), 60))],
            Ok(&["10.0.0.1"]),
            &[API],
        ),
        (
            "search .\noptions no-aaaa\n",
            API,
            &[(API, None, some(&["10.0.0.1", "fd00::1"]))],
            Ok(&["10.0.0.1"]),
            &[API],
        ),
        (
            "search .\noptions no-aaaa\n",
            API,
            &[(API, None, some(&["fd00::1"]))],
            Err("it has no address"),
            &[API],
        ),
        // Options and lines that are wrong.
        (
            "search corp.test -- a..b\noptions timeout:0 attempts:0 ndots:x trust-ad unknown:1\nnonsense\n",
            API,
            &[(API, None, v4())],
            Ok(&["10.0.0.1"]),
            &[API],
        ),
        (
            "domain corp.test\n",
            "api",
            &[("api.corp.test", None, v4())],
            Ok(&["10.0.0.1"]),
            &["api.corp.test"],
        ),
        (
            "search a.test\nsearch corp.test\n",
            "api",
            &[("api.corp.test", None, v4())],
            Ok(&["10.0.0.1"]),
            &["api.corp.test"],
        ),
    ];
    for (conf, host, script, expected, asked) in rows {
        let setup = Setup::new();
        setup.resolv_conf(conf);
        for (name, kind, reply) in *script {
            match (name.strip_prefix("*."), kind) {
                (Some(domain), _) => setup.server.set_domain(domain, reply.clone()),
                (None, Some(kind)) => setup.server.set_type(name, *kind, reply.clone()),
                (None, None) => setup.server.set(name, reply.clone()),
            }
        }
        let found = setup.look_up(host).await.map(addresses).map_err(|error| error.to_string());
        assert_eq!(found, expected.map(ips).map_err(str::to_owned), "{conf} {host} {script:?}");
        let mut names = setup.server.take_names();
        // The second and later names are asked for at the same time.
        names.sort();
        names.dedup();
        let mut asked: Vec<_> = asked
            .iter()
            .map(|name| name.trim_end_matches('?').to_owned())
            .filter(|name| names.contains(name) || asked.contains(&name.as_str()))
            .collect();
        asked.sort();
        assert_eq!(names, asked, "{conf} {host} {script:?}");
    }
}

/// The time of a lookup is that of a few queries, however many names hang.
#[tokio::test]
async fn look_up_with_names_that_hang_finds_the_address() {
    for (hanging, doubted) in [(&["hang.test"][..], true), (&[], false)] {
        let setup = Setup::new();
        let domains: Vec<_> = (0..8).map(|n| format!("d{n}.hang.test")).collect();
        setup.resolv_conf(&format!("search {}\noptions ndots:5\n", domains.join(" ")));
        setup.server.set_addresses("api.example.com", &["10.0.0.1"], 60);
        for domain in hanging {
            setup.server.set_domain(domain, Silence);
        }
        let start = clock::now();
        let found = setup.look_up("api.example.com").await.unwrap();
        assert_eq!(found.doubt.is_some(), doubted);
        assert_eq!(addresses(found), ips(&["10.0.0.1"]));
        let limit = if doubted { QUERY_LIMIT * 4 } else { Duration::from_secs(2) };
        assert!(clock::elapsed(start) < limit, "{:?}", clock::elapsed(start));
    }
}

/// Starts another name server at an address with the port of the first.
fn start_server(setup: &Setup, ip: &str) -> NameServer {
    NameServer::start_at((ip.parse::<IpAddr>().unwrap(), setup.files.port).into()).unwrap()
}

/// The first name server that answers decides, also by a denial.
#[tokio::test]
async fn look_up_asks_name_servers_in_their_order() {
    let setup = Setup::new();
    let (first, second) = (&setup.server, start_server(&setup, "127.0.0.2"));
    setup.resolv_conf("nameserver 127.0.0.2\nsearch .\n");
    second.set_addresses(API, &["10.0.0.2"], 60);
    for (reply, expected) in [
        (some(&["10.0.0.1"]), Ok(ips(&["10.0.0.1"]))),
        (NoSuchName, Err("there is no such name")),
        (none(), Err("it has no address")),
        (Failure, Ok(ips(&["10.0.0.2"]))),
        (Refusal, Ok(ips(&["10.0.0.2"]))),
        (Silence, Ok(ips(&["10.0.0.2"]))),
    ] {
        first.set(API, reply.clone());
        // The response of the second one would arrive first about every second time.
        let rounds = if reply == Silence { 1 } else { 10 };
        for _ in 0..rounds {
            let found = setup.look_up(API).await.map(addresses).map_err(|why| why.to_string());
            assert_eq!(found, expected.clone().map_err(str::to_owned), "{reply:?}");
        }
    }
}

#[tokio::test]
async fn look_up_with_rotate_begins_at_each_name_server() {
    let setup = Setup::new();
    let second = start_server(&setup, "127.0.0.2");
    setup.server.set_addresses(API, &["10.0.0.1"], 60);
    second.set_addresses(API, &["10.0.0.2"], 60);
    for (options, expected) in
        [("", &["10.0.0.1"][..]), ("options rotate\n", &["10.0.0.1", "10.0.0.2"])]
    {
        setup.resolv_conf(&format!("nameserver 127.0.0.2\nsearch .\n{options}"));
        let mut seen = Vec::new();
        // That all begin at the same one has a probability of 1 in 2^63.
        for _ in 0..64 {
            seen.extend(addresses(setup.look_up(API).await.unwrap()));
        }
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen, ips(expected), "{options}");
    }
}

#[tokio::test]
async fn look_up_ignores_name_servers_after_the_third() {
    let setup = Setup::new();
    setup.server.set(API, Refusal);
    let servers = [2, 3, 4].map(|n| start_server(&setup, &format!("127.0.0.{n}")));
    for server in &servers[..2] {
        server.set(API, Refusal);
    }
    servers[2].set_addresses(API, &["10.0.0.1"], 60);
    setup.resolv_conf(
        "nameserver 127.0.0.2\nnameserver 127.0.0.3\nnameserver 127.0.0.4\nsearch .\n",
    );
    assert!(setup.look_up(API).await.is_err());
    assert_eq!(servers.map(|server| server.query_count() > 0), [true, true, false]);
}

#[tokio::test]
async fn look_up_limits_the_attempts_at_a_server_that_refuses() {
    let setup = Setup::new();
    setup.server.set(API, Refusal);
    for (attempts, queries) in [(0, 2), (3, 3), (u32::MAX, 5)] {
        setup.resolv_conf(&format!("search .\noptions no-aaaa attempts:{attempts}\n"));
        let before = setup.server.query_count();
        assert!(setup.look_up(API).await.is_err());
        assert_eq!(setup.server.query_count() - before, queries, "attempts:{attempts}");
    }
}

/// A name server that never answers for AAAA.
#[tokio::test]
async fn look_up_waits_for_the_other_family_only_for_a_second() {
    let setup = Setup::new();
    setup.server.set_addresses("api.example.com", &["10.0.0.1"], 60);
    setup.server.set_type("api.example.com", RecordType::AAAA, Silence);
    let start = clock::now();
    let found = setup.look_up("api.example.com").await.unwrap();
    assert!(matches!(found.v6, Err(LookupError::TimedOut)), "{found:?}");
    assert_eq!(found.v4.unwrap(), ips(&["10.0.0.1"]));
    assert!(clock::elapsed(start) < OTHER_FAMILY * 3, "{:?}", clock::elapsed(start));
}

#[tokio::test]
async fn look_up_name_in_hosts_file_or_below_localhost_causes_no_query() {
    let setup = Setup::new();
    setup.server.set_addresses("api.example.com", &["10.0.0.1"], 60);
    let hosts = "# local\n10.1.1.1 API.example.com other\nfd00::9 api.example.com\nnonsense\n";
    std::fs::write(&setup.files.hosts, hosts).unwrap();
    for host in ["api.example.com", "api.example.com."] {
        let found = setup.look_up(host).await.unwrap();
        assert_eq!((found.name.as_ref(), found.complete), (None, true));
        assert_eq!(addresses(found), ips(&["10.1.1.1", "fd00::9"]));
    }
    for host in ["node.localhost", "node.localhost."] {
        assert_eq!(addresses(setup.look_up(host).await.unwrap()), ips(&["127.0.0.1", "::1"]));
    }
    assert_eq!(setup.server.query_count(), 0);
    std::fs::remove_file(&setup.files.hosts).unwrap();
    let found = setup.look_up("api.example.com").await.unwrap();
    assert_eq!(addresses(found), ips(&["10.0.0.1"]), "asked if there is no hosts file");
}

#[tokio::test]
async fn look_up_without_configured_name_servers_fails() {
    let setup = Setup::new();
    std::fs::remove_file(&setup.files.resolv_conf).unwrap();
    let error = setup.look_up("api.example.com").await.unwrap_err().to_string();
    assert!(error.contains("resolv.conf"), "{error}");
    std::fs::write(&setup.files.resolv_conf, "# nothing\nnonsense here\n").unwrap();
    let error = setup.look_up("api.example.com").await.unwrap_err().to_string();
    assert!(error.ends_with("resolv.conf: it names no name server"), "{error}");
}

#[tokio::test]
async fn look_up_pipes_as_files_do_not_block_and_bad_lines_are_skipped() {
    let setup = Setup::new();
    setup.server.set_addresses("api.example.com", &["10.0.0.1"], 60);
    // Opening a named pipe without a writer blocks the reader.
    for path in [&setup.files.hosts, &setup.files.resolv_conf] {
        let _ = std::fs::remove_file(path);
        assert!(std::process::Command::new("mkfifo").arg(path).status().unwrap().success());
    }
    let error = setup.look_up("api.example.com").await.unwrap_err().to_string();
    assert!(error.contains("resolv.conf") && error.contains("not a regular file"), "{error}");
    for path in [&setup.files.hosts, &setup.files.resolv_conf] {
        std::fs::remove_file(path).unwrap();
    }
    setup.resolv_conf("");
    // A comment that is not UTF-8 does not invalidate the file.
    let hosts = b"# R\xe9seau\n10.1.1.1 api.example.com # l'\xe9quipe\n";
    std::fs::write(&setup.files.hosts, hosts).unwrap();
    assert_eq!(addresses(setup.look_up("api.example.com").await.unwrap()), ips(&["10.1.1.1"]));
}

#[tokio::test(start_paused = true)]
async fn look_up_silent_name_server_fails_within_its_limit() {
    let setup = Setup::new();
    setup.resolv_conf("search a.test b.test c.test d.test e.test\noptions ndots:5\n");
    setup.server.set_silent(true);
    let start = clock::now();
    let error = setup.look_up("api.example.com").await.unwrap_err().to_string();
    assert!(error.starts_with("no name server answers"), "{error}");
    assert!(clock::elapsed(start) <= QUERY_LIMIT * 3 + Duration::from_secs(1));
}

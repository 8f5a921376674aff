//! What `getent` (glibc), `kubectl` (Go) and the built jackstay find for a name, with the same resolv.conf and the same name
//! servers. The table of `config/README.md` has the same rows. The test needs its own namespaces, as those of
//! [`super::host_faults`]. `KUBECTL` names kubectl; without it, Go is left out.

use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use jackstay_testkit::name_server::RecordType::{self, A, AAAA};
use jackstay_testkit::name_server::Reply::{
    Addresses, Alias, Cut, Failure, NoSuchName, Refusal, Silence,
};
use jackstay_testkit::name_server::{NameServer, Reply, parse};
use serde_json::Value;

use super::host_faults::{HostChange, run};
use crate::support::child::{KillOnDrop, free_address};
use crate::support::{Certs, pages, wait};

/// Limit of a lookup: a few names at servers that do not answer.
const LOOKUP_LIMIT: Duration = Duration::from_secs(30);
/// The name of most rows, and its name in the search domain.
const API: &str = "api.example.com";
const API_CORP: &str = "api.example.com.corp.test";
const SEARCH: &str = "search corp.test\noptions timeout:1 attempts:1\n";
const NDOTS: &str = "search corp.test\noptions ndots:5 timeout:1 attempts:1\n";
const TWO_DOMAINS: &str = "search first.test corp.test\noptions ndots:5 timeout:1 attempts:1\n";
const V4: &[&str] = &["10.0.0.1"];
const V6: &[&str] = &["fd00::1"];
const V4_OF_SEARCH: &[&str] = &["10.0.0.2"];
const V4_OF_HOSTS: &[&str] = &["10.0.0.3"];
const LOOPBACK: &[&str] = &["127.0.0.1", "::1"];

/// What a resolver finds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    Its(&'static [&'static str]),
    OfSearchName,
    OfHostsFile,
    Loopback,
    Error,
}
use Outcome::{Error, Its, Loopback, OfHostsFile, OfSearchName};

impl Outcome {
    /// The cell of the table.
    fn text(self) -> &'static str {
        match self {
            Its(_) => "its addresses",
            OfSearchName => "those of the search name",
            OfHostsFile => "those of the hosts file",
            Loopback => "loopback addresses",
            Error => "error",
        }
    }

    /// The addresses; `None` if the lookup fails.
    fn addresses(self) -> Option<Vec<IpAddr>> {
        let addresses = match self {
            Its(addresses) => addresses,
            OfSearchName => V4_OF_SEARCH,
            OfHostsFile => V4_OF_HOSTS,
            Loopback => LOOPBACK,
            Error => return None,
        };
        Some(parse(addresses))
    }
}

/// Replies of one name server by name, and by record type if it is given.
type Script = &'static [(&'static str, Option<RecordType>, fn() -> Reply)];

/// A row of the table.
struct Row {
    title: &'static str,
    host: &'static str,
    /// resolv.conf, without the lines `nameserver`.
    conf: &'static str,
    /// The replies of 127.0.0.1, 127.0.0.2 and so on.
    servers: &'static [Script],
    /// What glibc, Go and jackstay find.
    outcomes: [Outcome; 3],
}

fn v4() -> Reply {
    Addresses(parse(V4), 60)
}

fn v6() -> Reply {
    Addresses(parse(V6), 60)
}

fn v4_of_search() -> Reply {
    Addresses(parse(V4_OF_SEARCH), 60)
}

fn stranger() -> Reply {
    Addresses(parse(&["fd00::bad"]), 60)
}

fn none() -> Reply {
    Addresses(Vec::new(), 60)
}

fn cut() -> Reply {
    Cut(parse(&["10.0.0.1", "10.0.0.4"]), 60)
}

const fn row(
    title: &'static str,
    host: &'static str,
    conf: &'static str,
    servers: &'static [Script],
    outcomes: [Outcome; 3],
) -> Row {
    Row { title, host, conf, servers, outcomes }
}

const ROWS: &[Row] = &[
    row("IPv4 addresses only", API, SEARCH, &[&[(API, None, v4)]], [Its(V4); 3]),
    row("IPv6 addresses only", API, SEARCH, &[&[(API, None, v6)]], [Its(V6); 3]),
    row(
        "IPv4 only, and the search domain has IPv6 addresses for every name (a wildcard)",
        API,
        SEARCH,
        &[&[(API, None, v4), ("*.corp.test", None, stranger)]],
        [Its(V4); 3],
    ),
    row(
        "an alias (CNAME)",
        API,
        SEARCH,
        &[&[(API, None, || Alias("lb.example.com".into(), parse(V4), 60))]],
        [Its(V4); 3],
    ),
    row(
        "the response is cut (TC); all over TCP",
        API,
        SEARCH,
        &[&[(API, None, cut)]],
        [Its(&["10.0.0.1", "10.0.0.4"]); 3],
    ),
    row(
        "no such name (NXDOMAIN), and the search name has addresses",
        API,
        SEARCH,
        &[&[(API_CORP, None, v4_of_search)]],
        [OfSearchName; 3],
    ),
    row(
        "no address (NODATA), and the search name has addresses",
        API,
        SEARCH,
        &[&[(API, None, none), (API_CORP, None, v4_of_search)]],
        [OfSearchName; 3],
    ),
    row(
        "SERVFAIL, and the search name has addresses",
        API,
        SEARCH,
        &[&[(API, None, || Failure), (API_CORP, None, v4_of_search)]],
        [OfSearchName; 3],
    ),
    row(
        "REFUSED, and the search name has addresses",
        API,
        SEARCH,
        &[&[(API, None, || Refusal), (API_CORP, None, v4_of_search)]],
        [OfSearchName; 3],
    ),
    row(
        "no response, and the search name has addresses",
        API,
        SEARCH,
        &[&[(API, None, || Silence), (API_CORP, None, v4_of_search)]],
        [OfSearchName; 3],
    ),
    row(
        "`ndots:5`: SERVFAIL for a first search name, and a second one has addresses",
        API,
        TWO_DOMAINS,
        &[&[("api.example.com.first.test", None, || Failure), (API_CORP, None, v4_of_search)]],
        [OfSearchName; 3],
    ),
    row(
        "`ndots:5`: REFUSED for a first search name, and a second one has addresses",
        API,
        TWO_DOMAINS,
        &[&[("api.example.com.first.test", None, || Refusal), (API_CORP, None, v4_of_search)]],
        [Error, OfSearchName, OfSearchName],
    ),
    row(
        "`ndots:5`: no response for a first search name, and a second one has addresses",
        API,
        TWO_DOMAINS,
        &[&[("api.example.com.first.test", None, || Silence), (API_CORP, None, v4_of_search)]],
        [Error, OfSearchName, OfSearchName],
    ),
    row(
        "`ndots:5`, and the search name has addresses, too",
        API,
        NDOTS,
        &[&[(API, None, v4), (API_CORP, None, v4_of_search)]],
        [OfSearchName; 3],
    ),
    row(
        "`ndots:1` (the default), and the search name has addresses, too",
        API,
        SEARCH,
        &[&[(API, None, v4), (API_CORP, None, v4_of_search)]],
        [Its(V4); 3],
    ),
    row(
        "`ndots:5`, and only the name itself has addresses",
        API,
        NDOTS,
        &[&[(API, None, v4)]],
        [Its(V4); 3],
    ),
    row(
        "a final dot, `ndots:5`",
        "api.example.com.",
        NDOTS,
        &[&[(API, None, v4), (API_CORP, None, v4_of_search)]],
        [Its(V4); 3],
    ),
    row(
        "a final dot, and only the search name has addresses",
        "api.example.com.",
        NDOTS,
        &[&[(API_CORP, None, v4_of_search)]],
        [Error; 3],
    ),
    row(
        "no line `search`; the search name is that of the host's own domain",
        "api",
        "",
        &[&[("api.corp.test", None, v4_of_search)]],
        [OfSearchName; 3],
    ),
    row(
        "SERVFAIL for AAAA only",
        API,
        SEARCH,
        &[&[(API, Some(A), v4), (API, Some(AAAA), || Failure)]],
        [Its(V4); 3],
    ),
    row(
        "no response for AAAA only",
        API,
        SEARCH,
        &[&[(API, Some(A), v4), (API, Some(AAAA), || Silence)]],
        [Its(V4); 3],
    ),
    row(
        "NXDOMAIN for AAAA only (a broken name server)",
        API,
        SEARCH,
        &[&[(API, Some(A), v4), (API, Some(AAAA), || NoSuchName)]],
        [Its(V4); 3],
    ),
    row(
        "the first name server says NXDOMAIN, the second has addresses",
        API,
        SEARCH,
        &[&[], &[(API, None, v4)]],
        [Error; 3],
    ),
    row(
        "the first name server says SERVFAIL, the second has addresses",
        API,
        SEARCH,
        &[&[(API, None, || Failure)], &[(API, None, v4)]],
        [Its(V4); 3],
    ),
    row(
        "the first name server says REFUSED, the second has addresses",
        API,
        SEARCH,
        &[&[(API, None, || Refusal)], &[(API, None, v4)]],
        [Its(V4); 3],
    ),
    row(
        "the first name server is silent, the second has addresses",
        API,
        SEARCH,
        &[&[(API, None, || Silence)], &[(API, None, v4)]],
        [Its(V4); 3],
    ),
    row(
        "three name servers say REFUSED, the fourth has addresses",
        API,
        SEARCH,
        &[
            &[("*.com", None, || Refusal)],
            &[("*.com", None, || Refusal)],
            &[("*.com", None, || Refusal)],
            &[(API, None, v4)],
        ],
        [Error; 3],
    ),
    row(
        "IPv6 addresses only, `no-aaaa`",
        API,
        "search corp.test\noptions no-aaaa\n",
        &[&[(API, None, v6)]],
        [Error, Its(V6), Error],
    ),
    row(
        "no line `nameserver`; 127.0.0.1 has addresses",
        API,
        "# none\n",
        &[],
        [Its(V4), Its(V4), Error],
    ),
    row(
        "the hosts file has the name",
        "hosts.example.com",
        SEARCH,
        &[&[("hosts.example.com", None, v4)]],
        [OfHostsFile; 3],
    ),
    row(
        "a name below `localhost`",
        "node.localhost",
        SEARCH,
        &[&[("node.localhost", None, v4)]],
        [Its(V4), Its(V4), Loopback],
    ),
];

#[test]
fn readme_has_the_rows_of_this_test() {
    let readme = include_str!("../../../config/README.md");
    let lines: Vec<_> = ROWS
        .iter()
        .map(|row| {
            let [glibc, go, jackstay] = row.outcomes.map(Outcome::text);
            format!("| {} | {glibc} | {go} | {jackstay} |\n", row.title)
        })
        .collect();
    assert!(readme.contains(&lines.concat()), "the table should be:\n{}", lines.concat());
}

/// Four name servers on loopback addresses, and an `/etc` that can refer to them.
struct Setup {
    servers: Vec<NameServer>,
    certs: Certs,
    program: std::ffi::OsString,
    _etc: HostChange,
}

impl Setup {
    /// The name servers run until the process ends, so that each test has its own `network`: 127.0.0.1 to 127.0.0.4 for 0.
    fn new(network: u8) -> Self {
        let at = |n| NameServer::start_at(SocketAddr::from(([127, 0, network, n], 53))).unwrap();
        let servers = (1..=4).map(at).collect();
        // Mounts of this test must not propagate to the host.
        run("mount --make-rprivate / && mount -t tmpfs none /etc");
        let etc = HostChange("umount -l /etc");
        std::fs::write("/etc/nsswitch.conf", "hosts: files dns\n").unwrap();
        std::fs::write("/etc/hosts", "127.0.0.1 localhost\n10.0.0.3 hosts.example.com\n").unwrap();
        let program = std::env::var_os("JACKSTAY_BIN");
        let program = program.unwrap_or_else(|| env!("CARGO_BIN_EXE_jackstay").into());
        Self { servers, certs: Certs::new(), program, _etc: etc }
    }

    /// Writes resolv.conf with the first name servers.
    fn write_resolv_conf(&self, servers: usize, lines: &str) {
        let servers = self.servers[..servers].iter();
        let servers = servers.map(|server| format!("nameserver {}\n", server.address().ip()));
        std::fs::write("/etc/resolv.conf", servers.collect::<String>() + lines).unwrap();
    }

    fn apply(&self, row: &Row) {
        self.write_resolv_conf(row.servers.len(), row.conf);
        for server in &self.servers {
            server.forget();
        }
        if row.servers.is_empty() {
            self.servers[0].set(API, v4());
        }
        for (server, script) in self.servers.iter().zip(row.servers) {
            for (name, kind, reply) in *script {
                match (name.strip_prefix("*."), kind) {
                    (Some(domain), _) => server.set_domain(domain, reply()),
                    (None, Some(kind)) => server.set_type(name, *kind, reply()),
                    (None, None) => server.set(name, reply()),
                }
            }
        }
    }

    fn start_jackstay(&self, host: &str) -> Jackstay {
        let (listener, admin) = (free_address(), free_address());
        let file = self.certs.path().join("jackstay.yaml");
        let text = format!(
            "admin: {{ bind: {admin} }}\nstate_dir: ''\nupstreams:\n- name: names\n  endpoints: ['{host}:1']\n\
             listeners:\n- {{ name: l4, bind: ['{listener}'], mode: passthrough, upstream: names }}\n"
        );
        std::fs::write(&file, text).unwrap();
        let mut command = on_host(&self.program);
        command.args(["run", "--config"]).arg(&file);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        Jackstay { admin, _process: KillOnDrop(command.spawn().unwrap()) }
    }

    /// What jackstay finds, and the error that it reports.
    fn jackstay(&self, host: &str) -> (Vec<IpAddr>, Option<String>) {
        let jackstay = self.start_jackstay(host);
        wait::until_blocking(LOOKUP_LIMIT, "jackstay has looked the name up", || {
            jackstay.upstream().is_some_and(|upstream| {
                let (found, error) = results(&upstream);
                !found.is_empty() || error.is_some()
            })
        });
        results(&jackstay.upstream().unwrap())
    }
}

/// A process of jackstay with one name as its endpoints.
struct Jackstay {
    admin: SocketAddr,
    _process: KillOnDrop,
}

impl Jackstay {
    fn upstream(&self) -> Option<Value> {
        let page = pages::get_blocking(self.admin, "/status").ok()?;
        let body = page.split_once("\r\n\r\n")?.1;
        Some(serde_json::from_str::<Value>(body).ok()?["upstreams"][0].clone())
    }
}

/// The addresses of an upstream in `/status`, and the error of its source DNS.
fn results(upstream: &Value) -> (Vec<IpAddr>, Option<String>) {
    let endpoints = upstream["endpoints"].as_array().unwrap().iter();
    let mut found: Vec<IpAddr> = endpoints
        .map(|endpoint| endpoint["address"].as_str().unwrap().parse::<SocketAddr>().unwrap().ip())
        .collect();
    found.sort_unstable();
    let sources = upstream["sources"].as_array().unwrap();
    let dns = sources.iter().find(|source| source["source"] == "dns");
    let error = dns.and_then(|source| source["error"].as_str());
    (found, error.map(str::to_owned))
}

/// A command on a host with the name `node.corp.test`.
fn on_host(program: impl AsRef<std::ffi::OsStr>) -> Command {
    let mut command = Command::new("unshare");
    let script = "echo node.corp.test >/proc/sys/kernel/hostname && exec \"$@\"";
    command.args(["--uts", "sh", "-c", script, "sh"]).arg(program);
    command
}

/// The addresses that glibc finds.
fn getent(host: &str) -> Option<Vec<IpAddr>> {
    let output = on_host("getent").args(["ahosts", "--no-addrconfig", host]).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let addresses = text.lines().map(|line| line.split_whitespace().next().unwrap());
    let mut found: Vec<IpAddr> = addresses.map(|address| address.parse().unwrap()).collect();
    found.sort_unstable();
    found.dedup();
    output.status.success().then_some(found)
}

/// The address to which kubectl connects, the first that Go's own resolver finds.
fn kubectl(program: &Path, host: &str) -> Option<IpAddr> {
    let mut command = on_host(program);
    command.env("GODEBUG", "netdns=go").args(["--kubeconfig=/dev/null", "--token=none"]);
    command.arg(format!("--server=https://{host}:1")).args(["get", "--raw", "/livez"]);
    let output = command.output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    let dialed = text.split_once("dial tcp ").map(|(_, rest)| rest.split_once(": ").unwrap().0);
    assert!(dialed.is_some() || text.contains("dial tcp: lookup "), "{text}");
    dialed.map(|address| address.parse::<SocketAddr>().unwrap().ip())
}

#[test]
#[ignore = "is the name server of the whole host; needs its own namespaces"]
fn names_are_resolved_as_the_table_says() {
    let setup = Setup::new(0);
    let go = std::env::var_os("KUBECTL");
    let mut wrong = Vec::new();
    for row in ROWS {
        let mut check = |resolver: &str, found: Result<(), String>, start: Instant| {
            println!("{:5.1} s {resolver:8} {}", start.elapsed().as_secs_f64(), row.title);
            wrong.extend(found.err().map(|found| format!("{}: {resolver}: {found}", row.title)));
        };
        let equal = |found: Option<Vec<IpAddr>>, outcome: Outcome| {
            if found == outcome.addresses() { Ok(()) } else { Err(format!("{found:?}")) }
        };
        setup.apply(row);
        let start = Instant::now();
        check("glibc", equal(getent(row.host), row.outcomes[0]), start);
        if let Some(go) = &go {
            let start = Instant::now();
            let found = kubectl(Path::new(go), row.host);
            let expected = row.outcomes[1].addresses();
            let is_right = match (found, &expected) {
                (Some(found), Some(expected)) => expected.contains(&found),
                (found, expected) => found.is_none() && expected.is_none(),
            };
            check("Go", if is_right { Ok(()) } else { Err(format!("{found:?}")) }, start);
        }
        let start = Instant::now();
        let found = setup.jackstay(row.host);
        let is_right = match row.outcomes[2].addresses() {
            Some(expected) => found == (expected, None),
            None => found.0.is_empty() && found.1.is_some(),
        };
        check("jackstay", if is_right { Ok(()) } else { Err(format!("{found:?}")) }, start);
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    println!("Go is {}", if go.is_some() { "compared" } else { "left out: KUBECTL is not set" });
}

/// The name loses a family, and then a search domain has addresses of that family for every name.
#[test]
#[ignore = "is the name server of the whole host; needs its own namespaces"]
fn withdrawn_family_leaves_the_endpoints() {
    let setup = Setup::new(1);
    setup.write_resolv_conf(1, SEARCH);
    setup.servers[0].set_addresses(API, &["10.0.0.1", "fd00::1"], 5);
    let jackstay = setup.start_jackstay(API);
    let is = |addresses: &[&str]| {
        let expected = (parse(addresses), None);
        jackstay.upstream().is_some_and(|upstream| results(&upstream) == expected)
    };
    wait::until_blocking(LOOKUP_LIMIT, "both families", || is(&["10.0.0.1", "fd00::1"]));
    setup.servers[0].set_domain("corp.test", stranger());
    setup.servers[0].set_addresses(API, &["10.0.0.1"], 5);
    wait::until_blocking(LOOKUP_LIMIT, "one family", || is(&["10.0.0.1"]));
}

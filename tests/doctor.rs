//! `jackstay doctor` with real sockets: the right cause comes first.
//!
//! What needs root (packets that are really lost, name servers that are really silent) is ignored
//! here and run by `.ci/run` in a network namespace of its own.

#![cfg(all(feature = "demo", feature = "doctor"))]

#[path = "support/child.rs"]
mod child;
#[path = "support/wait.rs"]
mod wait;

use std::collections::{HashMap, HashSet};
use std::io::{BufRead, BufReader};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, UdpSocket};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use child::KillOnDrop;
use jackstay::config::CertPaths;
use jackstay::demo::apiserver::cluster::Cluster;
use jackstay::demo::apiserver::{self, ApiServerHandle, Options};
use jackstay::demo::faulty_relay::FaultyRelay;
use jackstay::demo::pki::{Issued, Pki, Subject, Validity};
use jackstay::doctor::dns::Resolver;
use jackstay::doctor::examine;
use jackstay::doctor::findings::{Cause, Finding, Level, diagnose};
use jackstay::doctor::observations::{EndpointSource, Observations, Step};
use jackstay::doctor::report;
use jackstay::doctor::target::{CredentialFiles, ExaminationPlan, PlannedListener, Target, Trust};
use jackstay::kubeconfig::ServerUrl;
use socket2::{Domain, Socket, Type};

/// Long enough for a slow machine; nothing waits for it to pass where things work.
const PATIENCE: Duration = Duration::from_secs(30);

struct World {
    dir: tempfile::TempDir,
    pki: Pki,
    server: ApiServerHandle,
}

impl World {
    fn new() -> Self {
        Self::with(|_| None)
    }

    /// With another serving certificate.
    fn with(certificate: impl FnOnce(&Pki) -> Option<Issued>) -> Self {
        let pki = Pki::new("kubernetes").unwrap();
        let certificate = certificate(&pki);
        let options = Options { certificate, ..Options::named("a") };
        let server = apiserver::start(&Cluster::new(), &pki, options).unwrap();
        let dir = tempfile::tempdir().unwrap();
        pki.write_ca(dir.path()).unwrap();
        Self { dir, pki, server }
    }

    fn files(&self) -> CredentialFiles {
        let admin = self.pki.client(&Subject::admin()).unwrap();
        let (cert_file, key_file) = admin.write_to(self.dir.path(), "admin").unwrap();
        CredentialFiles {
            ca: Some(self.dir.path().join("ca.crt")),
            certificate: Some(CertPaths { cert_file, key_file }),
            token: None,
        }
    }

    fn plan(&self, addresses: &[SocketAddr]) -> ExaminationPlan {
        let trust = Trust::of_files(&self.files()).unwrap();
        let target = |address: &SocketAddr| {
            let server = ServerUrl::parse(&address.to_string()).unwrap();
            Target::new(&server, EndpointSource::Given, None, &trust).unwrap()
        };
        ExaminationPlan {
            targets: addresses.iter().map(target).collect(),
            ..ExaminationPlan::default()
        }
    }

    /// Examines the server itself.
    fn examine(&self, seconds: u64) -> (Observations, Vec<Finding>) {
        examine(self.plan(&[self.server.addr]), seconds)
    }
}

fn examine(plan: ExaminationPlan, seconds: u64) -> (Observations, Vec<Finding>) {
    let nobody = Resolver::of_servers(Vec::new());
    let seen = examine::run(plan, nobody, Duration::from_secs(seconds)).unwrap();
    let found = problems(&seen);
    (seen, found)
}

/// What is wrong; that a certificate of a test lives a day only is a note.
fn problems(seen: &Observations) -> Vec<Finding> {
    diagnose(seen).into_iter().filter(|finding| finding.level == Level::Problem).collect()
}

#[track_caller]
fn assert_first(found: &[Finding], cause: Cause) {
    assert_eq!(found.first().map(|f| f.cause), Some(cause), "{found:#?}");
}

/// Waits for what another thread brings about.
fn until(what: &str, condition: impl FnMut() -> bool) {
    wait::until_blocking(PATIENCE, what, condition);
}

#[test]
fn a_well_server_and_every_step() {
    let world = World::new();
    let (seen, found) = world.examine(3);
    assert_eq!(found, []);
    let endpoint = &seen.endpoints[0];
    assert!(endpoint.authenticated && endpoint.max_streams == Some(100), "{endpoint:#?}");
    assert!(endpoint.long_lived[0].pongs > 0, "{endpoint:#?}");
    // Idle on the wire, too: a firewall would take a keepalive for life.
    assert!(
        endpoint.idle.as_ref().is_some_and(|idle| idle.alive && idle.sent == 0),
        "{endpoint:#?}"
    );
    assert!(endpoint.clock_skew_s.is_some_and(|skew| skew.abs() < 5.0), "{endpoint:#?}");
    let names = &endpoint.certificate.as_ref().unwrap().names;
    assert!(names.contains(&"kubernetes.default.svc".to_owned()), "{names:?}");
    for step in [Step::Connect, Step::Tls, Step::Http2, Step::Readyz, Step::Request] {
        assert!(endpoint.fresh.iter().any(|a| a.time(step).is_some()), "{step:?} {endpoint:#?}");
    }
}

#[test]
fn a_load_balancer_that_forgets_its_flows() {
    let world = World::new();
    let hole = Arc::new(FaultyRelay::start(world.server.addr).unwrap());
    let forget = Arc::clone(&hole);
    let fault = std::thread::spawn(move || {
        // The busy connection has had a few PONGs, which come one by one: whatever else there is asks
        // two things and is closed, or is left alone.
        let mut grown = HashMap::<u64, HashSet<u64>>::new();
        until("connections last", || {
            let flows = forget.flows();
            flows.len() >= 2
                && flows.iter().any(|flow| {
                    let sizes = grown.entry(flow.id).or_default();
                    sizes.insert(flow.to_client);
                    sizes.len() > 12
                })
        });
        forget.lose_all().unwrap()
    });
    let (seen, found) = examine(world.plan(&[hole.addr]), 6);
    assert!(fault.join().unwrap() >= 2);
    assert_first(&found, Cause::ForgottenFlows);
    assert!(seen.endpoints[0].long_lived[0].silent_ms.is_some(), "{seen:#?}");
}

#[test]
fn certificates_that_are_wrong() {
    let loopback = ["127.0.0.1", "localhost"];
    let expired = World::with(|pki| pki.server_for(&loopback, Validity::expired()).ok());
    let elsewhere =
        World::with(|pki| pki.server_for(&["lb.example", "10.9.9.9"], Validity::usual()).ok());
    let stranger = World::new();
    let mut other = stranger.files();
    other.ca = Some(Pki::new("kubernetes").unwrap().write_ca(expired.dir.path()).unwrap());
    let trust = Trust::of_files(&other).unwrap();
    // The file has been read; put the right one back for the others.
    expired.pki.write_ca(expired.dir.path()).unwrap();
    let server = ServerUrl::parse(&stranger.server.addr.to_string()).unwrap();
    let wrong_ca = ExaminationPlan {
        targets: vec![Target::new(&server, EndpointSource::Given, None, &trust).unwrap()],
        ..ExaminationPlan::default()
    };
    std::thread::scope(|scope| {
        let expired = scope.spawn(|| expired.examine(2).1);
        let elsewhere = scope.spawn(|| elsewhere.examine(2).1);
        let wrong_ca = scope.spawn(|| examine(wrong_ca, 2).1);
        assert_first(&expired.join().unwrap(), Cause::CertificateExpired);
        let found = elsewhere.join().unwrap();
        assert_first(&found, Cause::SanMissing);
        assert!(found[0].advice.contains("lb.example, 10.9.9.9"), "{found:#?}");
        assert_first(&wrong_ca.join().unwrap(), Cause::WrongCa);
    });
    // Nobody unverified was shown the credential.
    assert_eq!(stranger.server.counters().requests.load(std::sync::atomic::Ordering::Relaxed), 0);
}

#[test]
fn a_dead_endpoint_beside_a_live_one() {
    let world = World::new();
    // Bound, so that nobody else is given it, and not listening.
    let held = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    held.bind(&SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into()).unwrap();
    let gone = held.local_addr().unwrap().as_socket().unwrap();
    let (_, found) = examine(world.plan(&[world.server.addr, gone]), 2);
    assert_first(&found, Cause::DeadEndpoint);
    assert!(found[0].what.starts_with(&gone.to_string()), "{found:#?}");
}

#[test]
fn a_stopped_server_is_dead_too() {
    let world = World::new();
    world.server.stop();
    let (_, found) = world.examine(2);
    world.server.cont();
    assert_first(&found, Cause::DeadEndpoint);
}

#[test]
fn an_endpoint_that_is_not_ready() {
    let world = World::new();
    world.server.set_ready(false);
    let (_, found) = world.examine(2);
    assert_first(&found, Cause::NotReadyEndpoint);
}

#[test]
fn a_token_that_nobody_knows() {
    let world = World::new();
    let token = world.dir.path().join("token");
    std::fs::write(&token, "planted-and-unknown\n").unwrap();
    let trust = Trust::of_files(&CredentialFiles {
        ca: Some(world.dir.path().join("ca.crt")),
        certificate: None,
        token: Some(token),
    });
    let server = ServerUrl::parse(&world.server.addr.to_string()).unwrap();
    let target = Target::new(&server, EndpointSource::Given, None, &trust.unwrap()).unwrap();
    let (seen, found) =
        examine(ExaminationPlan { targets: vec![target], ..ExaminationPlan::default() }, 2);
    assert_first(&found, Cause::Unauthorized);
    let all = report::json(&seen, &found, &[]).to_string() + &report::text(&seen, &found, &[]);
    assert!(!all.contains("planted"), "{all}");
}

#[test]
fn a_client_certificate_that_is_over() {
    let world = World::new();
    let old = world.pki.client_valid(&Subject::admin(), Validity::expired()).unwrap();
    let (cert_file, key_file) = old.write_to(world.dir.path(), "old").unwrap();
    let certificate = Some(CertPaths { cert_file, key_file });
    let trust = Trust::of_files(&CredentialFiles { certificate, ..world.files() }).unwrap();
    let server = ServerUrl::parse(&world.server.addr.to_string()).unwrap();
    let target = Target::new(&server, EndpointSource::Given, None, &trust).unwrap();
    let (_, found) =
        examine(ExaminationPlan { targets: vec![target], ..ExaminationPlan::default() }, 2);
    assert_first(&found, Cause::ClientCertificateExpired);
}

#[test]
fn name_servers_that_are_silent() {
    let world = World::new();
    let trust = Trust::of_files(&world.files()).unwrap();
    let server = ServerUrl::parse("https://lb.example:6443").unwrap();
    let named = Target::new(&server, EndpointSource::Given, None, &trust).unwrap();
    let mut plan = world.plan(&[world.server.addr]);
    plan.targets.push(named);
    // A socket that nobody reads.
    let silent = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let resolver = Resolver::of_servers(vec![silent.local_addr().unwrap()]);
    let seen = examine::run(plan, resolver, Duration::from_secs(2)).unwrap();
    let found = diagnose(&seen);
    assert_first(&found, Cause::DnsBlackHole);
    assert!(seen.dns.as_ref().is_some_and(|dns| dns.servers[0].answered == 0), "{seen:#?}");
}

#[test]
fn a_port_that_is_taken_and_a_loop() {
    let world = World::new();
    let taken = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let bind = taken.local_addr().unwrap();
    let place = PlannedListener { name: "listener apiserver".into(), bind, freebind: false };
    let mut plan = world.plan(&[world.server.addr]);
    plan.listeners = vec![place.clone()];
    let (_, found) = examine(plan, 2);
    assert_first(&found, Cause::PortTaken);

    let mut plan = world.plan(&[bind]);
    plan.listeners = vec![place];
    let (_, found) = examine(plan, 2);
    assert_first(&found, Cause::Loop);
}

fn jackstay(args: &[&str]) -> (Option<i32>, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_jackstay"))
        .args([&["doctor"], args].concat())
        .env_remove("KUBECONFIG")
        .output()
        .unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

#[test]
fn the_command_reads_a_configuration() {
    let world = World::new();
    let files = world.files();
    let certificate = files.certificate.unwrap();
    let write = |name: &str, bind: SocketAddr, endpoint: SocketAddr| {
        let text = format!(
            "admin: {{bind: '127.0.0.1:0'}}\n\
             upstreams: [{{name: u, endpoints: ['{endpoint}'], tls: {{ca_file: {}}}, \
             health: {{readyz: {{cert_file: {}, key_file: {}}}}}}}]\n\
             listeners: [{{name: l, mode: passthrough, bind: ['{bind}'], upstream: u}}]\n",
            files.ca.as_ref().unwrap().display(),
            certificate.cert_file.display(),
            certificate.key_file.display(),
        );
        let path: PathBuf = world.dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    let any = (Ipv4Addr::LOCALHOST, 0).into();
    let good = write("good.yaml", any, world.server.addr);
    let args = ["--config", good.to_str().unwrap(), "--duration", "2s"];
    let (code, out, err) = jackstay(&args);
    assert_eq!(code, Some(0), "{out}{err}");
    assert!(out.contains("No problem found.") && out.contains("/readyz"), "{out}");

    let own: SocketAddr = "127.0.0.1:7443".parse().unwrap();
    let looping = write("loop.yaml", own, own);
    let (code, out, err) =
        jackstay(&["--config", looping.to_str().unwrap(), "--output", "json", "--duration", "1s"]);
    assert_eq!(code, Some(1), "{out}{err}");
    let report: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!(report["findings"][0]["cause"], "loop", "{out}");
    assert_eq!(report["ok"], false);

    let (code, out, err) = jackstay(&["--config", "/none/such.yaml"]);
    assert_eq!((code, out.as_str()), (Some(2), ""), "{err}");
    assert!(err.contains("/none/such.yaml"), "{err}");
}

/// Who has a socket may not be known, or not say much: whether it is a jackstay, it says itself. And
/// an address that is to come is none that is missing.
#[test]
fn a_jackstay_that_runs_is_not_in_its_own_way() {
    let world = World::new();
    // By another name, as by another user, it cannot be told by its process.
    let binary = world.dir.path().join("another-name");
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_jackstay"), &binary).unwrap();
    let upstream = world.server.addr.to_string();
    let child = Command::new(&binary)
        .args(["run", "--listen", "127.0.0.1:0", "--upstream", &upstream, "--admin", "127.0.0.1:0"])
        .env("JACKSTAY__STATE_DIR", "")
        .stderr(Stdio::piped())
        .spawn();
    let mut running = KillOnDrop(child.unwrap());
    let mut said = BufReader::new(running.0.stderr.take().unwrap()).lines().map(Result::unwrap);
    let mut address = |words: &str| -> SocketAddr {
        let line = said.find(|line| line.contains(words)).expect("it says where it listens");
        let part = |c: &char| c.is_ascii_digit() || ".:".contains(*c);
        let text: String =
            line[line.find("127.0.0.1:").unwrap()..].chars().take_while(part).collect();
        text.parse().unwrap()
    };
    let (admin, bind) = (address("the admin endpoint listens"), address("listener="));
    let file = world.dir.path().join("of-the-running.yaml");
    // TEST-NET-1 (RFC 5737).
    let text = format!(
        "admin: {{bind: '{admin}'}}\n\
         upstreams: [{{name: u, endpoints: ['{upstream}'], tls: {{ca_file: {}}}}}]\n\
         listeners: [{{name: l, mode: passthrough, freebind: true, upstream: u, \
         bind: ['{bind}', '192.0.2.1:{}']}}]\n",
        world.dir.path().join("ca.crt").display(),
        bind.port(),
    );
    std::fs::write(&file, text).unwrap();
    let (code, out, err) = jackstay(&["--config", file.to_str().unwrap(), "--duration", "1s"]);
    assert_eq!(code, Some(0), "{out}{err}");
    // Something else is in the way as ever.
    drop(running);
    let _taken = TcpListener::bind(bind).unwrap();
    let (code, out, err) = jackstay(&["--config", file.to_str().unwrap(), "--duration", "1s"]);
    assert_eq!(code, Some(1), "{out}{err}");
    assert!(out.contains(&format!("cannot listen on {bind}")), "{out}");
}

/// Rules for the network namespace that this process was started in; they replace earlier ones and
/// are gone with it.
fn nft(rules: &[String]) {
    nft_with("", rules);
}

/// The same with sets that the rules use.
fn nft_with(sets: &str, rules: &[String]) {
    let rules = rules.join("\n");
    let script = format!(
        "add table inet doctor\ndelete table inet doctor\ntable inet doctor {{\n{sets}\nchain input {{\n\
         type filter hook input priority 0;\n{rules}\n}}\n}}\n"
    );
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), &script).unwrap();
    let output = Command::new("nft").arg("-f").arg(file.path()).output().unwrap();
    assert!(output.status.success(), "{script}{output:?}");
}

#[test]
#[ignore = "needs a network namespace of its own: unshare --net"]
fn five_percent_loss_is_named_and_nothing_else() {
    let world = World::new();
    let port = world.server.addr.port();
    nft(&["dport", "sport"]
        .map(|way| format!("tcp {way} {port} numgen random mod 100 < 5 counter drop")));
    let (seen, found) = world.examine(20);
    nft(&[]);
    assert_first(&found, Cause::PacketLoss);
    assert_eq!(found.len(), 1, "{found:#?}\n{seen:#?}");
}

/// A connection that is opened for one question ends within milliseconds.
const LASTING: Duration = Duration::from_millis(1500);

/// The local ports of the connections to a port of this host.
fn ports_connected_to(server: u16) -> Vec<u16> {
    let table = std::fs::read_to_string("/proc/net/tcp").unwrap();
    let of_flow = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let port_of = |word: &str| u16::from_str_radix(word.rsplit_once(':')?.1, 16).ok();
        let to_server = port_of(words.get(2)?)? == server && words[3] == "01";
        to_server.then(|| port_of(words[1]))?
    };
    table.lines().skip(1).filter_map(of_flow).collect()
}

#[test]
#[ignore = "needs a network namespace of its own: unshare --net"]
fn packets_of_established_flows_are_dropped() {
    let world = World::new();
    let port = world.server.addr.port();
    let server = world.server.addr;
    std::thread::scope(|scope| {
        let examined = scope.spawn(|| world.examine(8));
        // The two that last, by their ports: new ones work.
        let mut since: HashMap<u16, Instant> = HashMap::new();
        let mut flows: Vec<String> = Vec::new();
        until("two connections last", || {
            let ports = ports_connected_to(server.port());
            since.retain(|port, _| ports.contains(port));
            for port in ports {
                since.entry(port).or_insert_with(Instant::now);
            }
            let lasting = since.iter().filter(|(_, since)| since.elapsed() > LASTING);
            flows = lasting.map(|(port, _)| port.to_string()).collect();
            flows.len() >= 2
        });
        let flows = flows.join(", ");
        nft(&[
            format!("tcp dport {port} tcp sport {{ {flows} }} counter drop"),
            format!("tcp sport {port} tcp dport {{ {flows} }} counter drop"),
        ]);
        let (_, found) = examined.join().unwrap();
        nft(&[]);
        assert_first(&found, Cause::ForgottenFlows);
    });
}

/// A flow is known by its client's port for three seconds after each packet; what belongs to no known
/// flow is dropped, as by a firewall that forgets idle flows without a word.
#[test]
#[ignore = "needs a network namespace of its own: unshare --net"]
fn a_firewall_that_forgets_idle_flows_is_found() {
    let world = World::new();
    let port = world.server.addr.port();
    nft_with(
        "set flows { type inet_service; flags dynamic, timeout; timeout 3s; }",
        &[
            format!(
                "tcp dport {port} tcp flags & (syn | ack) == syn update @flows {{ tcp sport }} accept"
            ),
            format!("tcp dport {port} tcp sport @flows update @flows {{ tcp sport }} accept"),
            format!("tcp dport {port} counter drop"),
            format!("tcp sport {port} tcp dport @flows update @flows {{ tcp dport }} accept"),
            format!("tcp sport {port} counter drop"),
        ],
    );
    let (seen, found) = world.examine(8);
    nft(&[]);
    assert_first(&found, Cause::ForgottenFlows);
    assert_eq!(found.len(), 1, "{found:#?}");
    assert!(found[0].what.starts_with("Idle connections to "), "{found:#?}\n{seen:#?}");
}

#[test]
#[ignore = "needs a network namespace of its own: unshare --net"]
fn questions_to_name_servers_are_dropped() {
    let world = World::new();
    nft(&["udp", "tcp"].map(|protocol| format!("{protocol} dport 53 counter drop")));
    let trust = Trust::of_files(&world.files()).unwrap();
    let server = ServerUrl::parse("https://lb.example:6443").unwrap();
    let targets = vec![Target::new(&server, EndpointSource::Given, None, &trust).unwrap()];
    let server = SocketAddr::from((Ipv4Addr::LOCALHOST, 53));
    let resolver = Resolver::of_servers(vec![server]);
    let plan = ExaminationPlan { targets, ..ExaminationPlan::default() };
    let seen = examine::run(plan, resolver, Duration::from_secs(2)).unwrap();
    nft(&[]);
    assert_first(&diagnose(&seen), Cause::DnsBlackHole);
}

//! `jackstay doctor` with real sockets: the first finding is the right cause.
//!
//! Tests that drop packets need root and are ignored; `.ci/run` runs them in a network namespace.

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

/// Timeout of waits, long enough for a slow machine.
const TIMEOUT: Duration = Duration::from_secs(30);

struct World {
    dir: tempfile::TempDir,
    pki: Pki,
    server: ApiServerHandle,
}

impl World {
    fn new() -> Self {
        Self::with(|_| None)
    }

    /// Starts the server with this serving certificate.
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

    /// Examines the server.
    fn examine(&self, seconds: u64) -> (Observations, Vec<Finding>) {
        examine(self.plan(&[self.server.addr]), seconds)
    }
}

fn examine(plan: ExaminationPlan, seconds: u64) -> (Observations, Vec<Finding>) {
    let nobody = Resolver::of_servers(Vec::new());
    let observations = examine::run(plan, nobody, Duration::from_secs(seconds)).unwrap();
    let findings = problems(&observations);
    (observations, findings)
}

/// The problems, without notes such as the short validity of the tests' certificates.
fn problems(observations: &Observations) -> Vec<Finding> {
    diagnose(observations).into_iter().filter(|finding| finding.level == Level::Problem).collect()
}

#[track_caller]
fn assert_first(findings: &[Finding], cause: Cause) {
    assert_eq!(findings.first().map(|f| f.cause), Some(cause), "{findings:#?}");
}

/// Waits for a condition that another thread makes true.
fn until(what: &str, condition: impl FnMut() -> bool) {
    wait::until_blocking(TIMEOUT, what, condition);
}

#[test]
fn doctor_healthy_server_measures_every_step() {
    let world = World::new();
    let (observations, findings) = world.examine(3);
    assert_eq!(findings, []);
    let endpoint = &observations.endpoints[0];
    assert!(endpoint.authenticated && endpoint.max_streams == Some(100), "{endpoint:#?}");
    assert!(endpoint.long_lived[0].pongs > 0, "{endpoint:#?}");
    // The idle connection sends nothing, not even keepalives, which would keep a firewall's state alive.
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
fn doctor_load_balancer_dropping_flows_is_forgotten_flows() {
    let world = World::new();
    let relay = Arc::new(FaultyRelay::start(world.server.addr).unwrap());
    let forget = Arc::clone(&relay);
    let fault = std::thread::spawn(move || {
        // The busy connection is recognized by its PONGs, which arrive one by one. All other connections send two
        // requests and close, or stay idle.
        let mut grown = HashMap::<u64, HashSet<u64>>::new();
        until("connections last", || {
            let flows = forget.flows();
            flows.len() >= 2
                && flows.iter().any(|flow| {
                    let sizes = grown.entry(flow.id).or_default();
                    sizes.insert(flow.bytes_to_client);
                    sizes.len() > 12
                })
        });
        forget.drop_all_packets().unwrap()
    });
    let (observations, findings) = examine(world.plan(&[relay.addr]), 6);
    assert!(fault.join().unwrap() >= 2);
    assert_first(&findings, Cause::ForgottenFlows);
    assert!(observations.endpoints[0].long_lived[0].silent_ms.is_some(), "{observations:#?}");
}

#[test]
fn doctor_wrong_server_certificates_are_named() {
    let loopback = ["127.0.0.1", "localhost"];
    let expired = World::with(|pki| pki.server_for(&loopback, Validity::expired()).ok());
    let other_names =
        World::with(|pki| pki.server_for(&["lb.example", "10.9.9.9"], Validity::usual()).ok());
    let wrong_ca_world = World::new();
    let mut files = wrong_ca_world.files();
    files.ca = Some(Pki::new("kubernetes").unwrap().write_ca(expired.dir.path()).unwrap());
    let trust = Trust::of_files(&files).unwrap();
    // The file has been read; restore it for the other examination.
    expired.pki.write_ca(expired.dir.path()).unwrap();
    let server = ServerUrl::parse(&wrong_ca_world.server.addr.to_string()).unwrap();
    let wrong_ca = ExaminationPlan {
        targets: vec![Target::new(&server, EndpointSource::Given, None, &trust).unwrap()],
        ..ExaminationPlan::default()
    };
    std::thread::scope(|scope| {
        let expired = scope.spawn(|| expired.examine(2).1);
        let other_names = scope.spawn(|| other_names.examine(2).1);
        let wrong_ca = scope.spawn(|| examine(wrong_ca, 2).1);
        assert_first(&expired.join().unwrap(), Cause::CertificateExpired);
        let findings = other_names.join().unwrap();
        assert_first(&findings, Cause::SanMissing);
        assert!(findings[0].advice.contains("lb.example, 10.9.9.9"), "{findings:#?}");
        assert_first(&wrong_ca.join().unwrap(), Cause::WrongCa);
    });
    // The credential was not sent to the unverified server.
    assert_eq!(
        wrong_ca_world.server.counters().requests.load(std::sync::atomic::Ordering::Relaxed),
        0
    );
}

#[test]
fn doctor_refusing_endpoint_is_dead_endpoint() {
    let world = World::new();
    // Bound, so that no other process gets the port, but not listening.
    let held = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    held.bind(&SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into()).unwrap();
    let gone = held.local_addr().unwrap().as_socket().unwrap();
    let (_, findings) = examine(world.plan(&[world.server.addr, gone]), 2);
    assert_first(&findings, Cause::DeadEndpoint);
    assert!(findings[0].what.starts_with(&gone.to_string()), "{findings:#?}");
}

#[test]
fn doctor_stopped_server_is_dead_endpoint() {
    let world = World::new();
    world.server.stop();
    let (_, findings) = world.examine(2);
    world.server.cont();
    assert_first(&findings, Cause::DeadEndpoint);
}

#[test]
fn doctor_failing_readyz_is_not_ready_endpoint() {
    let world = World::new();
    world.server.set_faults(|faults| faults.unready = true);
    let (_, findings) = world.examine(2);
    assert_first(&findings, Cause::NotReadyEndpoint);
}

#[test]
fn doctor_unknown_token_is_unauthorized_and_not_printed() {
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
    let (observations, findings) =
        examine(ExaminationPlan { targets: vec![target], ..ExaminationPlan::default() }, 2);
    assert_first(&findings, Cause::Unauthorized);
    let all = report::json(&observations, &findings, &[]).to_string()
        + &report::text(&observations, &findings, &[]);
    assert!(!all.contains("planted"), "{all}");
}

#[test]
fn doctor_expired_client_certificate_is_named() {
    let world = World::new();
    let old = world.pki.client_valid(&Subject::admin(), Validity::expired()).unwrap();
    let (cert_file, key_file) = old.write_to(world.dir.path(), "old").unwrap();
    let certificate = Some(CertPaths { cert_file, key_file });
    let trust = Trust::of_files(&CredentialFiles { certificate, ..world.files() }).unwrap();
    let server = ServerUrl::parse(&world.server.addr.to_string()).unwrap();
    let target = Target::new(&server, EndpointSource::Given, None, &trust).unwrap();
    let (_, findings) =
        examine(ExaminationPlan { targets: vec![target], ..ExaminationPlan::default() }, 2);
    assert_first(&findings, Cause::ClientCertificateExpired);
}

#[test]
fn doctor_silent_name_server_is_dns_black_hole() {
    let world = World::new();
    let trust = Trust::of_files(&world.files()).unwrap();
    let server = ServerUrl::parse("https://lb.example:6443").unwrap();
    let named = Target::new(&server, EndpointSource::Given, None, &trust).unwrap();
    let mut plan = world.plan(&[world.server.addr]);
    plan.targets.push(named);
    // A socket that never responds.
    let silent = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let resolver = Resolver::of_servers(vec![silent.local_addr().unwrap()]);
    let observations = examine::run(plan, resolver, Duration::from_secs(2)).unwrap();
    let findings = diagnose(&observations);
    assert_first(&findings, Cause::DnsBlackHole);
    assert!(
        observations.dns.as_ref().is_some_and(|dns| dns.servers[0].answered == 0),
        "{observations:#?}"
    );
}

#[test]
fn doctor_taken_port_and_loop_are_named() {
    let world = World::new();
    let taken = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let bind = taken.local_addr().unwrap();
    let place = PlannedListener { name: "listener apiserver".into(), bind, freebind: false };
    let mut plan = world.plan(&[world.server.addr]);
    plan.listeners = vec![place.clone()];
    let (_, findings) = examine(plan, 2);
    assert_first(&findings, Cause::PortTaken);

    let mut plan = world.plan(&[bind]);
    plan.listeners = vec![place];
    let (_, findings) = examine(plan, 2);
    assert_first(&findings, Cause::Loop);
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
fn doctor_command_reads_a_configuration() {
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

/// The owner of a port may be unknown, so doctor asks the admin endpoint whether it is jackstay. With `freebind` an
/// address may be missing.
#[test]
fn doctor_running_jackstay_is_not_a_port_conflict() {
    let world = World::new();
    // Under another name, as under another user, its process does not identify it.
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
        let line = said.find(|line| line.contains(words)).expect("the log has the address");
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
    // Another program on the port is a conflict.
    drop(running);
    let _taken = TcpListener::bind(bind).unwrap();
    let (code, out, err) = jackstay(&["--config", file.to_str().unwrap(), "--duration", "1s"]);
    assert_eq!(code, Some(1), "{out}{err}");
    assert!(out.contains(&format!("cannot listen on {bind}")), "{out}");
}

/// Installs rules in the network namespace of this process; they replace earlier ones.
fn nft(rules: &[String]) {
    nft_with("", rules);
}

/// Like [`nft`], with sets for the rules.
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
fn doctor_5_percent_loss_is_packet_loss() {
    let world = World::new();
    let port = world.server.addr.port();
    nft(&["dport", "sport"]
        .map(|way| format!("tcp {way} {port} numgen random mod 100 < 5 counter drop")));
    let (observations, findings) = world.examine(20);
    nft(&[]);
    assert_first(&findings, Cause::PacketLoss);
    assert_eq!(findings.len(), 1, "{findings:#?}\n{observations:#?}");
}

/// Connections for single requests end within milliseconds; older ones are the two lasting connections.
const LASTING_AFTER: Duration = Duration::from_millis(1500);

/// The local ports of the established connections to a port of this host.
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
fn doctor_dropped_established_flows_are_forgotten_flows() {
    let world = World::new();
    let port = world.server.addr.port();
    let server = world.server.addr;
    std::thread::scope(|scope| {
        let examined = scope.spawn(|| world.examine(8));
        // Drops the packets of the two lasting connections; new ones work.
        let mut since: HashMap<u16, Instant> = HashMap::new();
        let mut flows: Vec<String> = Vec::new();
        until("two connections last", || {
            let ports = ports_connected_to(server.port());
            since.retain(|port, _| ports.contains(port));
            for port in ports {
                since.entry(port).or_insert_with(Instant::now);
            }
            let lasting = since.iter().filter(|(_, since)| since.elapsed() > LASTING_AFTER);
            flows = lasting.map(|(port, _)| port.to_string()).collect();
            flows.len() >= 2
        });
        let flows = flows.join(", ");
        nft(&[
            format!("tcp dport {port} tcp sport {{ {flows} }} counter drop"),
            format!("tcp sport {port} tcp dport {{ {flows} }} counter drop"),
        ]);
        let (_, findings) = examined.join().unwrap();
        nft(&[]);
        assert_first(&findings, Cause::ForgottenFlows);
    });
}

/// The rules know a flow by its client's port for three seconds after each packet and drop packets of unknown flows, as a
/// firewall does that forgets idle flows silently.
#[test]
#[ignore = "needs a network namespace of its own: unshare --net"]
fn doctor_firewall_dropping_idle_flows_is_forgotten_flows() {
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
    let (observations, findings) = world.examine(8);
    nft(&[]);
    assert_first(&findings, Cause::ForgottenFlows);
    assert_eq!(findings.len(), 1, "{findings:#?}");
    assert!(
        findings[0].what.starts_with("Idle connections to "),
        "{findings:#?}\n{observations:#?}"
    );
}

#[test]
#[ignore = "needs a network namespace of its own: unshare --net"]
fn doctor_dropped_dns_queries_are_dns_black_hole() {
    let world = World::new();
    nft(&["udp", "tcp"].map(|protocol| format!("{protocol} dport 53 counter drop")));
    let trust = Trust::of_files(&world.files()).unwrap();
    let server = ServerUrl::parse("https://lb.example:6443").unwrap();
    let targets = vec![Target::new(&server, EndpointSource::Given, None, &trust).unwrap()];
    let server = SocketAddr::from((Ipv4Addr::LOCALHOST, 53));
    let resolver = Resolver::of_servers(vec![server]);
    let plan = ExaminationPlan { targets, ..ExaminationPlan::default() };
    let observations = examine::run(plan, resolver, Duration::from_secs(2)).unwrap();
    nft(&[]);
    assert_first(&diagnose(&observations), Cause::DnsBlackHole);
}

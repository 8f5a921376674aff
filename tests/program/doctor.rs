//! `jackstay doctor` with real sockets and faults: the first finding names the fault that the test causes.
//!
//! Tests that drop packets with nftables need root and are ignored; `.ci/run` runs them in a network
//! namespace.

use crate::support::wait;
use std::collections::{HashMap, HashSet};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, UdpSocket};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::support::child::KillOnDrop;
use jackstay_apiserver as apiserver;
use jackstay_apiserver::cluster::Cluster;
use jackstay_apiserver::faulty_relay::FaultyRelay;
use jackstay_apiserver::kinds::ENDPOINT_SLICES;
use jackstay_apiserver::pki::{Issued, Pki, Subject, Validity};
use jackstay_apiserver::{ApiServerHandle, Options};
use jackstay_config::CertPaths;
use jackstay_config::api_root::ApiRoot;
use jackstay_kubeconfig::ServerUrl;
use jackstay_operator::doctor::dns::Resolver;
use jackstay_operator::doctor::examine;
use jackstay_operator::doctor::findings::{Cause, Finding, Level, diagnose};
use jackstay_operator::doctor::observations::{EndpointSource, Observations, Step};
use jackstay_operator::doctor::report;
use jackstay_operator::doctor::survey::{SurveyRequest, survey};
use jackstay_operator::doctor::target::{
    CredentialFiles, ExaminationPlan, PlannedListener, Target, Trust,
};
use serde_json::json;
use socket2::{Domain, Socket, Type};

/// Timeout of waits, long enough for a slow machine.
const TIMEOUT: Duration = Duration::from_secs(30);

/// A demo apiserver, and a directory with the CA and the files of credentials.
struct TestServer {
    dir: tempfile::TempDir,
    cluster: Cluster,
    pki: Pki,
    server: ApiServerHandle,
}

impl TestServer {
    fn new() -> Self {
        Self::with(|_| None)
    }

    /// Starts the server with this serving certificate.
    fn with(certificate: impl FnOnce(&Pki) -> Option<Issued>) -> Self {
        let pki = Pki::new("kubernetes").unwrap();
        let certificate = certificate(&pki);
        let options = Options { certificate, ..Options::named("a") };
        let cluster = Cluster::new();
        let server = apiserver::start(&cluster, &pki, options).unwrap();
        let dir = tempfile::tempdir().unwrap();
        pki.write_ca(dir.path()).unwrap();
        Self { dir, cluster, pki, server }
    }

    /// The credential of an administrator.
    fn files(&self) -> CredentialFiles {
        let admin = self.pki.client(&Subject::admin()).unwrap();
        let (cert_file, key_file) = admin.write_to(self.dir.path(), "admin").unwrap();
        CredentialFiles {
            ca: Some(self.dir.path().join("ca.crt")),
            certificate: Some(CertPaths { cert_file, key_file }),
            token: None,
        }
    }

    /// A plan that examines these addresses.
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
    let no_resolver = Resolver::of_servers(&[]);
    let observations = examine::run(plan, no_resolver, Duration::from_secs(seconds)).unwrap();
    let findings = problems(&observations);
    (observations, findings)
}

/// The findings of level problem. Notes report, for example, that the tests' certificates expire soon.
fn problems(observations: &Observations) -> Vec<Finding> {
    diagnose(observations).into_iter().filter(|finding| finding.level == Level::Problem).collect()
}

#[track_caller]
fn assert_first(findings: &[Finding], cause: Cause) {
    assert_eq!(findings.first().map(|f| f.cause), Some(cause), "{findings:#?}");
}

/// Waits for a condition that another thread makes true.
fn until(description: &str, condition: impl FnMut() -> bool) {
    wait::until_blocking(TIMEOUT, description, condition);
}

#[test]
fn doctor_healthy_server_measures_every_step() {
    let test = TestServer::new();
    let (observations, findings) = test.examine(3);
    assert_eq!(findings, []);
    let endpoint = &observations.endpoints[0];
    assert!(endpoint.authenticated && endpoint.max_streams == Some(100), "{endpoint:#?}");
    assert!(endpoint.long_lived[0].pongs > 0, "{endpoint:#?}");
    // The idle connection sends nothing: keepalives would refresh the state of a firewall.
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
fn doctor_relay_dropping_established_flows_finds_forgotten_flows() {
    let test = TestServer::new();
    let relay = Arc::new(FaultyRelay::start(test.server.addr).unwrap());
    let faulty = Arc::clone(&relay);
    let fault = std::thread::spawn(move || {
        // The busy connection is recognized by its PONGs, each of which changes its byte count. The other
        // connections send two requests and close, or stay idle.
        let mut byte_counts = HashMap::<u64, HashSet<u64>>::new();
        until("the busy and the idle connection exist", || {
            let flows = faulty.flows();
            flows.len() >= 2
                && flows.iter().any(|flow| {
                    let counts = byte_counts.entry(flow.id).or_default();
                    counts.insert(flow.bytes_to_client);
                    counts.len() > 12
                })
        });
        faulty.drop_all_packets().unwrap()
    });
    let (observations, findings) = examine(test.plan(&[relay.addr]), 6);
    assert!(fault.join().unwrap() >= 2);
    assert_first(&findings, Cause::ForgottenFlows);
    assert!(observations.endpoints[0].long_lived[0].silent_ms.is_some(), "{observations:#?}");
}

#[test]
fn doctor_invalid_server_certificate_finds_its_defect() {
    let loopback = ["127.0.0.1", "localhost"];
    let expired = TestServer::with(|pki| pki.server_for(&loopback, Validity::expired()).ok());
    let other_names =
        TestServer::with(|pki| pki.server_for(&["lb.example", "10.9.9.9"], Validity::usual()).ok());
    let wrong_ca_server = TestServer::new();
    let mut files = wrong_ca_server.files();
    files.ca = Some(Pki::new("kubernetes").unwrap().write_ca(expired.dir.path()).unwrap());
    let trust = Trust::of_files(&files).unwrap();
    // `trust` has read the file; the other examination needs the original CA.
    expired.pki.write_ca(expired.dir.path()).unwrap();
    let server = ServerUrl::parse(&wrong_ca_server.server.addr.to_string()).unwrap();
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
        assert!(findings[0].because.ends_with(" only for lb.example, 10.9.9.9"), "{findings:#?}");
        assert_first(&wrong_ca.join().unwrap(), Cause::WrongCa);
    });
    // The credential was not sent to the unverified server.
    assert_eq!(
        wrong_ca_server.server.counters().requests.load(std::sync::atomic::Ordering::Relaxed),
        0
    );
}

#[test]
fn doctor_refusing_endpoint_finds_dead_endpoint() {
    let test = TestServer::new();
    // The socket is bound, so that no other process gets the port, and does not listen.
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    socket.bind(&SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into()).unwrap();
    let refusing = socket.local_addr().unwrap().as_socket().unwrap();
    let (_, findings) = examine(test.plan(&[test.server.addr, refusing]), 2);
    assert_first(&findings, Cause::DeadEndpoint);
    assert!(findings[0].what.starts_with(&refusing.to_string()), "{findings:#?}");
}

/// Accepts connections and answers the first bytes of each with `answer`. Returns the address. The thread
/// ends with the process.
fn serve_bytes(answer: &'static [u8]) -> SocketAddr {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for mut stream in listener.incoming().map_while(Result::ok) {
            std::thread::spawn(move || {
                let mut buffer = [0; 4096];
                if stream.read(&mut buffer).is_ok_and(|n| n > 0) && stream.write_all(answer).is_ok()
                {
                    // Unread bytes at the close would reset the connection before the answer is read.
                    let _ = stream.shutdown(Shutdown::Write);
                    while stream.read(&mut buffer).is_ok_and(|n| n > 0) {}
                }
            });
        }
    });
    address
}

/// Stopped apiservers: the kernel accepts connections, and TLS is not answered.
#[test]
fn doctor_unanswered_tls_of_every_endpoint_names_the_process_and_not_the_network() {
    let test = TestServer::new();
    let stopped = [(); 2].map(|()| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap());
    let addresses = stopped.each_ref().map(|listener| listener.local_addr().unwrap());
    let (_, findings) = examine(test.plan(&addresses), 1);
    let [finding] = &findings[..] else { panic!("{findings:#?}") };
    assert_eq!(finding.cause, Cause::DeadEndpoint);
    assert_eq!(finding.what, "None of the 2 endpoints answers TLS, although TCP connects.");
    assert!(finding.because.contains("TLS is not answered within"), "{finding:#?}");
    assert!(finding.advice.contains("crictl ps"), "{finding:#?}");
    assert!(!finding.advice.contains("routes"), "{finding:#?}");
}

#[test]
fn doctor_peer_without_tls_is_named() {
    let test = TestServer::new();
    let http = serve_bytes(
        b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nConnection: close\r\n\r\n400 Bad Request",
    );
    let ssh = serve_bytes(b"SSH-2.0-OpenSSH_9.2p1 Debian-2\r\n");
    let (_, findings) = examine(test.plan(&[http, ssh]), 2);
    let causes: Vec<Cause> = findings.iter().map(|finding| finding.cause).collect();
    assert_eq!(causes, [Cause::Tls, Cause::Tls], "{findings:#?}");
    assert_eq!(findings[0].what, format!("{http} speaks plain HTTP, not TLS."));
    assert!(findings[0].because.contains("HTTP/1.1 400 Bad Request"), "{findings:#?}");
    assert_eq!(findings[1].what, format!("{ssh} does not speak TLS: it is another service."));
    assert!(findings[1].because.contains("SSH-2.0-OpenSSH_9.2p1"), "{findings:#?}");
    assert!(!findings.iter().any(|f| f.because.contains('?')), "{findings:#?}");
}

#[test]
fn doctor_unreachable_address_that_only_the_cluster_names_is_a_note() {
    let test = TestServer::new();
    // The socket is bound, so that no other process gets the port, and does not listen.
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    socket.bind(&SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into()).unwrap();
    let refusing = socket.local_addr().unwrap().as_socket().unwrap();
    let slice = json!({
        "metadata": { "name": "kubernetes",
                      "labels": { "kubernetes.io/service-name": "kubernetes" } },
        "endpoints": [{ "addresses": [refusing.ip().to_string()] }],
        "ports": [{ "name": "https", "port": refusing.port() }],
    });
    test.cluster.create(&ENDPOINT_SLICES, "default", slice, false).unwrap();
    let files = test.files();
    let (ca, pair) = (files.ca.unwrap(), files.certificate.unwrap());
    let server = test.server.addr.to_string();
    let args = |endpoint: &str| {
        let paths = [&ca, &pair.cert_file, &pair.key_file].map(|path| path.to_str().unwrap());
        let options = ["--ca-file", paths[0], "--cert-file", paths[1], "--key-file", paths[2]];
        [&["--duration", "1s", "--endpoint", &server, "--endpoint", endpoint], &options[..]]
            .concat()
            .iter()
            .map(ToString::to_string)
            .collect::<Vec<String>>()
    };
    let run = |endpoint: &str| {
        let args = args(endpoint);
        jackstay(&args.iter().map(String::as_str).collect::<Vec<_>>())
    };
    let (code, out, err) = run(&server);
    assert_eq!(code, Some(0), "{out}{err}");
    assert!(out.contains("No problem found."), "{out}");
    let note = format!("(note) {refusing} cannot be reached from here.");
    assert!(out.contains(&note) && out.contains("Only the cluster names this address."), "{out}");
    assert!(out.contains(&format!("{server}, verified as 127.0.0.1\n")), "{out}");
    assert!(out.contains(", not verified (must be kubernetes.default.svc)\n"), "{out}");
    // The same address as an endpoint of the user is a problem.
    let (code, out, err) = run(&refusing.to_string());
    assert_eq!(code, Some(1), "{out}{err}");
    assert!(out.contains(&format!("{refusing} is dead.")), "{out}");
}

#[test]
fn doctor_command_asks_for_a_port_and_mentions_proxy_url() {
    for (endpoint, expected) in [
        ("10.0.0.1", "--endpoint: \"10.0.0.1\" has no port: write it as 10.0.0.11:6443"),
        ("fd00::1", "--endpoint: \"fd00::1\" is an IPv6 address without brackets and port"),
    ] {
        let (code, out, err) = jackstay(&["--endpoint", endpoint]);
        assert_eq!((code, out.as_str()), (Some(2), ""), "{err}");
        assert!(err.starts_with(expected), "{err}");
    }

    let test = TestServer::new();
    let file = test.dir.path().join("kubeconfig");
    let cluster = json!({ "server": format!("https://{}", test.server.addr),
        "insecure-skip-tls-verify": true, "proxy-url": "http://user:s3cret@proxy.example:3128" });
    let text = json!({ "current-context": "c",
        "clusters": [{ "name": "demo", "cluster": cluster }],
        "contexts": [{ "name": "c", "context": { "cluster": "demo", "user": "" } }] });
    std::fs::write(&file, text.to_string()).unwrap();
    let (code, out, err) = jackstay(&["--kubeconfig", file.to_str().unwrap(), "--duration", "1s"]);
    assert_eq!(code, Some(0), "{out}{err}");
    assert!(out.contains("not through the proxy http://proxy.example:3128"), "{out}");
    assert!(!out.contains("s3cret"), "{out}");
    // Without a CA nothing is verified.
    assert!(out.contains(", not verified (no CA)\n") && !out.contains("verified as"), "{out}");
}

#[test]
fn doctor_stopped_server_finds_dead_endpoint() {
    let test = TestServer::new();
    test.server.stop();
    let (_, findings) = test.examine(2);
    test.server.cont();
    assert_first(&findings, Cause::DeadEndpoint);
}

/// Whether the client has closed a connection to this port of this host that the server has not closed:
/// `CLOSE_WAIT` is state 8 (`include/net/tcp_states.h`).
fn is_abandoned_by_client(port: u16) -> bool {
    let table = std::fs::read_to_string("/proc/net/tcp").unwrap();
    let local = format!(":{port:04X}");
    table.lines().skip(1).any(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        words[1].ends_with(&local) && words[3] == "08"
    })
}

/// The server answers again as soon as the first connection has waited in vain.
#[test]
fn doctor_started_in_an_outage_that_ends_reports_it() {
    let test = TestServer::new();
    test.server.stop();
    let (observations, findings) = std::thread::scope(|scope| {
        let examined = scope.spawn(|| test.examine(3));
        until("a connection was given up", || is_abandoned_by_client(test.server.addr.port()));
        test.server.cont();
        examined.join().unwrap()
    });
    assert!(observations.endpoints[0].connected() > 0, "{observations:#?}");
    assert_first(&findings, Cause::IntermittentEndpoint);
    let what = format!(
        "{} did not answer TLS at the beginning of the examination and answers now.",
        test.server.addr
    );
    assert_eq!(findings[0].what, what, "{findings:#?}");
    assert!(findings[0].because.starts_with("no answer for the first "), "{findings:#?}");
}

#[test]
fn doctor_failing_readyz_finds_not_ready_endpoint() {
    let test = TestServer::new();
    test.server.set_faults(|faults| faults.unready = true);
    let (_, findings) = test.examine(2);
    assert_first(&findings, Cause::NotReadyEndpoint);
}

#[test]
fn doctor_unknown_token_finds_unauthorized_and_prints_no_token() {
    let test = TestServer::new();
    let token = test.dir.path().join("token");
    std::fs::write(&token, "unknown-secret\n").unwrap();
    let trust = Trust::of_files(&CredentialFiles {
        ca: Some(test.dir.path().join("ca.crt")),
        certificate: None,
        token: Some(token),
    });
    let server = ServerUrl::parse(&test.server.addr.to_string()).unwrap();
    let target = Target::new(&server, EndpointSource::Given, None, &trust.unwrap()).unwrap();
    let (observations, findings) =
        examine(ExaminationPlan { targets: vec![target], ..ExaminationPlan::default() }, 2);
    assert_first(&findings, Cause::Unauthorized);
    let all = report::json(&observations, &findings, &[]).to_string()
        + &report::text(&observations, &findings, &[]);
    assert!(!all.contains("unknown-secret"), "{all}");
}

#[test]
fn doctor_expired_client_certificate_is_found() {
    let test = TestServer::new();
    let expired = test.pki.client_valid(&Subject::admin(), Validity::expired()).unwrap();
    let (cert_file, key_file) = expired.write_to(test.dir.path(), "expired").unwrap();
    let certificate = Some(CertPaths { cert_file, key_file });
    let trust = Trust::of_files(&CredentialFiles { certificate, ..test.files() }).unwrap();
    let server = ServerUrl::parse(&test.server.addr.to_string()).unwrap();
    let target = Target::new(&server, EndpointSource::Given, None, &trust).unwrap();
    let (_, findings) =
        examine(ExaminationPlan { targets: vec![target], ..ExaminationPlan::default() }, 2);
    assert_first(&findings, Cause::ClientCertificateExpired);
}

#[test]
fn doctor_silent_name_server_finds_dns_black_hole() {
    let test = TestServer::new();
    let trust = Trust::of_files(&test.files()).unwrap();
    let server = ServerUrl::parse("https://lb.example:6443").unwrap();
    let named = Target::new(&server, EndpointSource::Given, None, &trust).unwrap();
    let mut plan = test.plan(&[test.server.addr]);
    plan.targets.push(named);
    // A socket that never responds.
    let silent = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let resolver = Resolver::of_servers(&[silent.local_addr().unwrap()]);
    let observations = examine::run(plan, resolver, Duration::from_secs(2)).unwrap();
    let findings = diagnose(&observations);
    assert_first(&findings, Cause::DnsBlackHole);
    assert!(
        observations.dns.as_ref().is_some_and(|dns| dns.servers[0].answered == 0),
        "{observations:#?}"
    );
}

#[test]
fn doctor_taken_port_and_loop_are_found() {
    let test = TestServer::new();
    let taken = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let bind = taken.local_addr().unwrap();
    let listener = PlannedListener { name: "listener apiserver".into(), bind, freebind: false };
    let mut plan = test.plan(&[test.server.addr]);
    plan.listeners = vec![listener.clone()];
    let (_, findings) = examine(plan, 2);
    assert_first(&findings, Cause::PortTaken);

    let mut plan = test.plan(&[bind]);
    plan.listeners = vec![listener];
    let (_, findings) = examine(plan, 2);
    assert_first(&findings, Cause::Loop);
}

/// Runs `jackstay doctor` and returns its exit code, stdout and stderr.
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
    let test = TestServer::new();
    let files = test.files();
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
        let path: PathBuf = test.dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    let free_port = (Ipv4Addr::LOCALHOST, 0).into();
    let good = write("good.yaml", free_port, test.server.addr);
    let args = ["--config", good.to_str().unwrap(), "--duration", "2s"];
    let (code, out, err) = jackstay(&args);
    assert_eq!(code, Some(0), "{out}{err}");
    assert!(out.contains("No problem found.") && out.contains("/readyz"), "{out}");

    let bind: SocketAddr = "127.0.0.1:7443".parse().unwrap();
    let looping = write("loop.yaml", bind, bind);
    let (code, out, err) =
        jackstay(&["--config", looping.to_str().unwrap(), "--output", "json", "--duration", "1s"]);
    assert_eq!(code, Some(1), "{out}{err}");
    let report: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!(report["findings"][0]["cause"], "loop", "{out}");
    assert_eq!(report["ok"], false);

    let (code, out, err) = jackstay(&["--config", "/does/not/exist.yaml"]);
    assert_eq!((code, out.as_str()), (Some(2), ""), "{err}");
    assert!(err.contains("/does/not/exist.yaml"), "{err}");
}

/// doctor may not see which process owns a port, so it asks the admin endpoint whether it is jackstay. With `freebind`
/// an address may be missing on the host.
#[test]
fn doctor_running_jackstay_is_not_a_port_conflict() {
    let test = TestServer::new();
    // The name of the process does not identify it, as if another user ran it.
    let binary = test.dir.path().join("another-name");
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_jackstay"), &binary).unwrap();
    let upstream = test.server.addr.to_string();
    let child = Command::new(&binary)
        .args(["run", "--listen", "127.0.0.1:0", "--endpoint", &upstream, "--admin", "127.0.0.1:0"])
        .env("JACKSTAY__STATE_DIR", "")
        .stderr(Stdio::piped())
        .spawn();
    let mut running = KillOnDrop(child.unwrap());
    let mut log = BufReader::new(running.0.stderr.take().unwrap()).lines().map(Result::unwrap);
    let mut address = |words: &str| -> SocketAddr {
        let line = log.find(|line| line.contains(words)).expect("the log has the address");
        let is_address = |c: &char| c.is_ascii_digit() || ".:".contains(*c);
        let text: String =
            line[line.find("127.0.0.1:").unwrap()..].chars().take_while(is_address).collect();
        text.parse().unwrap()
    };
    let (admin, bind) = (address("the admin endpoint listens"), address("listener="));
    let file = test.dir.path().join("running.yaml");
    // 192.0.2.1 is in TEST-NET-1 (RFC 5737), which no host has.
    let text = format!(
        "admin: {{bind: '{admin}'}}\n\
         upstreams: [{{name: u, endpoints: ['{upstream}'], tls: {{ca_file: {}}}}}]\n\
         listeners: [{{name: l, mode: passthrough, freebind: true, upstream: u, \
         bind: ['{bind}', '192.0.2.1:{}']}}]\n",
        test.dir.path().join("ca.crt").display(),
        bind.port(),
    );
    std::fs::write(&file, text).unwrap();
    let (code, out, err) = jackstay(&["--config", file.to_str().unwrap(), "--duration", "1s"]);
    assert_eq!(code, Some(0), "{out}{err}");
    // Another process on the port is a conflict.
    drop(running);
    let _taken = TcpListener::bind(bind).unwrap();
    let (code, out, err) = jackstay(&["--config", file.to_str().unwrap(), "--duration", "1s"]);
    assert_eq!(code, Some(1), "{out}{err}");
    assert!(out.contains(&format!("cannot listen on {bind}")), "{out}");
}

#[test]
fn survey_sends_the_credential_only_to_the_apiserver_of_the_kubeconfig() {
    let (test, cluster) = (TestServer::new(), Cluster::new());
    let start = |name| apiserver::start(&cluster, &test.pki, Options::named(name)).unwrap();
    let (own, other) = (start("own"), start("other"));
    // TEST-NET-1 (RFC 5737).
    let member: SocketAddr = "192.0.2.1:6443".parse().unwrap();
    for address in [own.addr, other.addr, member] {
        let slice = json!({
            "metadata": { "generateName": "kubernetes-",
                          "labels": { "kubernetes.io/service-name": "kubernetes" } },
            "endpoints": [{ "addresses": [address.ip().to_string()] }],
            "ports": [{ "name": "https", "port": address.port() }],
        });
        cluster.create(&ENDPOINT_SLICES, "default", slice, false).unwrap();
    }
    let trust = Trust::of_files(&test.files()).unwrap();
    let url = |server: &ApiServerHandle| ServerUrl::parse(&server.addr.to_string()).unwrap();
    let request = SurveyRequest {
        root: &ApiRoot::default(),
        clients: None,
        own: &url(&own),
        verified_name: "localhost",
        others: &[url(&other)],
        trust: &trust,
        query_members: true,
    };
    let result = survey(&request, Resolver::of_servers(&[])).unwrap();
    assert_eq!(result.members, Ok(vec![member]), "members that the request does not name");
    let certificates: Vec<_> = result.certificates.iter().map(|c| c.address.as_str()).collect();
    assert_eq!(certificates, [own.addr.to_string(), other.addr.to_string()]);
    let records = cluster.audit().records();
    let (with, without): (Vec<_>, Vec<_>) =
        records.iter().partition(|record| record.certificate_serial.is_some());
    assert!(!with.is_empty() && with.iter().all(|record| record.server == "own"), "{with:?}");
    let only_version = without.iter().all(|r| r.server == "other" && r.path == "/version");
    assert!(!without.is_empty() && only_version, "{without:?}");
    assert_eq!(result.not_apiservers, []);

    own.kill();
    let result = survey(&request, Resolver::of_servers(&[])).unwrap();
    assert!(result.members.is_err(), "the other apiserver is not queried: {result:?}");
    assert_eq!(result.certificates[0].address, other.addr.to_string());
    assert_eq!(result.without_certificate[0].0, own.addr.to_string());
    assert_eq!(result.not_apiservers[0].address, own.addr.to_string());
}

/// Replaces the rules in the network namespace of this process.
fn nft(rules: &[String]) {
    nft_with("", rules);
}

/// Like [`nft`], with sets that the rules use.
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
fn doctor_5_percent_loss_finds_packet_loss() {
    let test = TestServer::new();
    let port = test.server.addr.port();
    nft(&["dport", "sport"]
        .map(|way| format!("tcp {way} {port} numgen random mod 100 < 5 counter drop")));
    let (observations, findings) = test.examine(20);
    nft(&[]);
    assert_first(&findings, Cause::PacketLoss);
    assert_eq!(findings.len(), 1, "{findings:#?}\n{observations:#?}");
}

/// Age from which a connection is one of the two long-lived ones: the others end within milliseconds.
const LONG_LIVED_AFTER: Duration = Duration::from_millis(1500);

/// The local ports of the established connections to a port of this host.
fn ports_connected_to(server: u16) -> Vec<u16> {
    let table = std::fs::read_to_string("/proc/net/tcp").unwrap();
    let local_port = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let port_of = |word: &str| u16::from_str_radix(word.rsplit_once(':')?.1, 16).ok();
        let to_server = port_of(words.get(2)?)? == server && words[3] == "01";
        to_server.then(|| port_of(words[1]))?
    };
    table.lines().skip(1).filter_map(local_port).collect()
}

#[test]
#[ignore = "needs a network namespace of its own: unshare --net"]
fn doctor_dropped_established_flows_finds_forgotten_flows() {
    let test = TestServer::new();
    let port = test.server.addr.port();
    let server = test.server.addr;
    std::thread::scope(|scope| {
        let examined = scope.spawn(|| test.examine(8));
        // Drops the packets of the two long-lived connections; new connections work.
        let mut since: HashMap<u16, Instant> = HashMap::new();
        let mut flows: Vec<String> = Vec::new();
        until("two long-lived connections exist", || {
            let ports = ports_connected_to(server.port());
            since.retain(|port, _| ports.contains(port));
            for port in ports {
                since.entry(port).or_insert_with(Instant::now);
            }
            let long_lived = since.iter().filter(|(_, since)| since.elapsed() > LONG_LIVED_AFTER);
            flows = long_lived.map(|(port, _)| port.to_string()).collect();
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

/// The rules store the client's port of a flow for three seconds after each packet and drop packets of other flows,
/// like a firewall that forgets idle flows.
#[test]
#[ignore = "needs a network namespace of its own: unshare --net"]
fn doctor_firewall_dropping_idle_flows_finds_forgotten_flows() {
    let test = TestServer::new();
    let port = test.server.addr.port();
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
    let (observations, findings) = test.examine(8);
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
fn doctor_dropped_dns_queries_finds_dns_black_hole() {
    let test = TestServer::new();
    nft(&["udp", "tcp"].map(|protocol| format!("{protocol} dport 53 counter drop")));
    let trust = Trust::of_files(&test.files()).unwrap();
    let server = ServerUrl::parse("https://lb.example:6443").unwrap();
    let targets = vec![Target::new(&server, EndpointSource::Given, None, &trust).unwrap()];
    let server = SocketAddr::from((Ipv4Addr::LOCALHOST, 53));
    let resolver = Resolver::of_servers(&[server]);
    let plan = ExaminationPlan { targets, ..ExaminationPlan::default() };
    let observations = examine::run(plan, resolver, Duration::from_secs(2)).unwrap();
    nft(&[]);
    assert_first(&diagnose(&observations), Cause::DnsBlackHole);
}

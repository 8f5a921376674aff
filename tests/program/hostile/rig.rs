//! The proxy under attack, its apiservers, the identity client and the attacker.

use std::fs;
use std::net::SocketAddr;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use jackstay_apiserver::client::Client;
use jackstay_apiserver::identity::User;
use jackstay_apiserver::kinds::CONFIG_MAPS;

use crate::hostile::attacks::Attack;
use crate::hostile::cgroup::MemoryCgroup;
use crate::hostile::identity_client::{IdentityClient, Report, Settings};
use crate::hostile::peers;
use crate::hostile::raw::tls_config;
use crate::hostile::socket_memory::socket_memory;
use crate::support::child::{KillOnDrop, Process, free_address};
use crate::support::{CONFIGMAPS, TestCluster, config_map, pause, wait};

/// The limit of memory in the manifests of `deploy/`.
const MEMORY_LIMIT: u64 = 256 << 20;
/// What the proxy and its sockets may hold: the default of `memory_limit` under that limit.
const MEMORY_BUDGET: u64 = MEMORY_LIMIT / 10 * 7;
/// The descriptors for which jackstay checks the limit of the process, with 4,096 connections of one listener.
const MAX_DESCRIPTORS: usize = 2 * 4_096 + 64;
/// Long enough for a proxy to start on a slow machine.
const START: Duration = Duration::from_secs(20);
/// The client runs this long before and after the attack.
const QUIET: Duration = Duration::from_secs(1);
/// The server name of connections that the L7 listener passes through.
pub const PASSED_THROUGH: &str = "kubernetes.default.svc";
/// The highest uid of an attacker. Further attackers have the uids below it.
const ATTACKER_UID: u32 = 65_534;
/// A token that the apiservers accept, and that the attacker knows.
pub const VALID_TOKEN: &str = "valid";
/// The bound of a request's 99th percentile.
const P99: Duration = Duration::from_millis(50);
/// The bound of the 99th percentile while the machine also runs other things.
const CI_P99: Duration = Duration::from_secs(1);
/// The bound of a new connection with its first PING.
const HANDSHAKE: Duration = Duration::from_millis(100);
/// The same in CI for an attack that reaches the apiservers or fills the accept queue: builds without optimization, of proxy and apiservers, share
/// the processors with it. Requests that delay handshakes do so for 5 s there.
const CI_HANDSHAKE: Duration = Duration::from_secs(2);
/// The bound of a new connection with its first request, and a token that is valid and new.
const NEW_TOKEN: Duration = Duration::from_secs(1);
/// Lines of the log that are shown after an attack that succeeded.
const LOG_LINES: usize = 100;
/// The size of the value of each object of the large list.
const VALUE: usize = 100 << 10;

/// The attack that the attacker's process makes, from its environment.
#[derive(Debug, Clone)]
pub struct Target {
    pub attack: Attack,
    pub server: SocketAddr,
    /// The L4 listener; that of L7 if the proxy has none.
    pub passthrough: SocketAddr,
    pub admin: Option<SocketAddr>,
    pub duration: Duration,
}

impl Target {
    /// The target in the environment of this process.
    pub fn from_env() -> Option<Self> {
        let value = |name: &str| std::env::var(format!("JACKSTAY_ATTACK_{name}")).ok();
        let name = value("NAME")?;
        Some(Self {
            attack: *Attack::ALL.iter().find(|attack| attack.name() == name)?,
            server: value("SERVER")?.parse().ok()?,
            passthrough: value("PASSTHROUGH")?.parse().ok()?,
            admin: value("ADMIN")?.parse().ok(),
            duration: Duration::from_secs(value("SECONDS")?.parse().ok()?),
        })
    }

    fn set_env(&self, command: &mut Command) {
        let admin = self.admin.map_or_else(String::new, |admin| admin.to_string());
        command
            .env("JACKSTAY_ATTACK_NAME", self.attack.name())
            .env("JACKSTAY_ATTACK_SERVER", self.server.to_string())
            .env("JACKSTAY_ATTACK_PASSTHROUGH", self.passthrough.to_string())
            .env("JACKSTAY_ATTACK_ADMIN", admin)
            .env("JACKSTAY_ATTACK_SECONDS", self.duration.as_secs().to_string());
    }
}

/// A proxy in front of two apiservers.
pub struct Rig {
    cluster: TestCluster,
    server: SocketAddr,
    passthrough: SocketAddr,
    admin: Option<SocketAddr>,
    process: Process,
    // Removed after its process has ended.
    cgroup: Option<MemoryCgroup>,
}

impl Rig {
    /// Starts apiservers and proxy with the limits for this attack, and waits until a request succeeds.
    pub async fn start_for(attack: Attack) -> Self {
        Self::start(attack.descriptor_limit()).await
    }

    /// Starts apiservers and proxy, which may have this limit on descriptors, and waits until a request succeeds.
    pub async fn start(descriptors: Option<u32>) -> Self {
        let cluster = TestCluster::new(2);
        cluster.state.add_token(VALID_TOKEN, User::new("neighbour", &["devs"]));
        let value = "x".repeat(VALUE);
        for at in 0..10 {
            let mut object = config_map(&format!("large-{at}"), &value);
            object["metadata"]["namespace"] = "kube-system".into();
            object["metadata"]["labels"] = serde_json::Value::Null;
            cluster.state.create(&CONFIG_MAPS, "kube-system", object, false).unwrap();
        }
        cluster.create_config_map("lease");
        let server = free_address();
        let (proxy, passthrough, admin) = if let Some(peer) = peers::from_env() {
            let (dir, servers) = (cluster.certs.path(), cluster.addresses());
            let command = peers::command(peer, dir, server, &servers);
            (command, server, None)
        } else {
            let (passthrough, admin) = (free_address(), free_address());
            (jackstay(&cluster, (server, passthrough), admin), passthrough, Some(admin))
        };
        let cgroup = MemoryCgroup::new(MEMORY_LIMIT);
        let mut command = Command::new("sh");
        let processes = cgroup.as_ref().map_or("/dev/null".into(), MemoryCgroup::processes);
        let limit = descriptors.map_or_else(String::new, |limit| format!("ulimit -n {limit} && "));
        command.args(["-c", &format!("echo 0 >\"$0\" && {limit}exec \"$@\"")]).arg(processes);
        command.arg(proxy.get_program()).args(proxy.get_args());
        let mut process = Process::spawn(command);
        let credentials = cluster.certs.credentials();
        wait::until_ok(START, "the proxy is ready", async || {
            assert!(process.is_running(), "{}", process.output());
            let client = Client::connect(server, &credentials).await;
            let client = client.map_err(|error| error.to_string())?;
            let reply = client.get(CONFIGMAPS).await.map_err(|error| error.to_string())?;
            reply.status.is_success().then_some(()).ok_or_else(|| reply.status.to_string())
        })
        .await;
        Self { cluster, server, passthrough, admin, process, cgroup }
    }

    /// Runs an attack beside the identity client.
    pub async fn run(&mut self, attack: Attack, duration: Duration) -> Outcome {
        let credentials = self.cluster.certs.credentials();
        let admin = &self.cluster.certs.admin;
        let tls = tls_config("h2", Some((vec![admin.cert_der()], admin.key_der())));
        let without_proxy = IdentityClient::start(Settings {
            server: self.cluster.addresses()[0],
            admin: None,
            credentials: credentials.clone(),
            tls: Arc::clone(&tls),
            new_tokens: None,
        });
        let client = IdentityClient::start(Settings {
            server: self.server,
            admin: self.admin,
            credentials,
            tls,
            new_tokens: attack
                .has_tokens()
                .then(|| (self.cluster.state.clone(), self.cluster.certs.anonymous())),
        });
        pause(QUIET).await;
        let target = Target {
            attack,
            server: self.server,
            passthrough: self.passthrough,
            admin: self.admin,
            duration,
        };
        let uids = (0..attack.users()).map(|n| ATTACKER_UID - n);
        let attackers: Vec<_> = uids.map(|uid| spawn_attacker(&target, uid)).collect();
        let handshakes_before = self.upstream_handshakes();
        let begun = Instant::now();
        let (mut memory, mut with_sockets, mut descriptors) = (0, 0, 0);
        while begun.elapsed() < duration {
            let resident = self.resident();
            memory = memory.max(resident);
            with_sockets = with_sockets.max(resident + socket_memory(self.process.pid()));
            descriptors = descriptors.max(self.descriptors());
            pause(Duration::from_millis(200)).await;
        }
        let handshakes = self.upstream_handshakes() - handshakes_before;
        drop(attackers);
        pause(QUIET).await;
        let killed = !self.process.is_running();
        let report = client.stop();
        let p99_without_proxy = without_proxy.stop().requests.quantile(0.99);
        let log = self.process.output();
        Outcome {
            attack,
            report,
            p99_without_proxy,
            memory,
            with_sockets,
            descriptors,
            killed,
            log_lines: log.lines().count(),
            handshakes_per_second: handshakes as f64 / duration.as_secs_f64(),
            peak: self.cgroup.as_ref().map_or(memory, MemoryCgroup::peak),
        }
    }

    /// The number of open descriptors of the proxy, without its connections to the apiservers: after a burst of
    /// requests it keeps them for five minutes.
    pub fn descriptors(&self) -> usize {
        let descriptors = fs::read_dir(format!("/proc/{}/fd", self.process.pid()));
        let upstream: u64 =
            self.cluster.servers.iter().map(|server| server.counters().open.load(Relaxed)).sum();
        descriptors.map_or(0, Iterator::count).saturating_sub(upstream as usize)
    }

    /// The last lines that the proxy has logged.
    pub fn last_log_lines(&self) -> String {
        let log = self.process.output();
        let skipped = log.lines().count().saturating_sub(LOG_LINES);
        log.lines().skip(skipped).collect::<Vec<_>>().join("\n")
    }

    /// Connections that the apiservers have accepted.
    fn upstream_handshakes(&self) -> u64 {
        self.cluster.servers.iter().map(|server| server.counters().accepted.load(Relaxed)).sum()
    }

    /// Resident memory of the proxy in bytes.
    pub fn resident(&self) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.process.pid()));
        let line = status.unwrap_or_default();
        let kib = line.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kib = kib.and_then(|kib| kib.trim().strip_suffix(" kB")?.parse::<u64>().ok());
        kib.unwrap_or(0) << 10
    }
}

/// The result of an attack.
#[derive(Debug)]
pub struct Outcome {
    attack: Attack,
    report: Report,
    /// The 99th percentile of the same requests, sent to an apiserver without the proxy. The attack delays them, too,
    /// if its requests reach the apiservers or use the processors that these share with the proxy.
    p99_without_proxy: Duration,
    /// The largest resident memory in bytes.
    memory: u64,
    /// The largest sum of it and of what the kernel holds for the proxy's sockets, in bytes.
    with_sockets: u64,
    /// The largest number of descriptors, without those of connections to the apiservers.
    descriptors: usize,
    /// The largest use of the cgroup in bytes.
    peak: u64,
    /// The proxy ended.
    killed: bool,
    log_lines: usize,
    /// Connections that the proxy opened to the apiservers.
    handshakes_per_second: f64,
}

impl Outcome {
    pub const HEADER: &str = "| attack | requests failed | p99 | slowest | new connections failed | slowest | handshakes failed | slowest | /livez failed | resident | with sockets | cgroup | descriptors | log lines | new tokens failed | slowest | upstream handshakes | p99 without the proxy |\n|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|";

    pub fn row(&self) -> String {
        let Report { requests, connections, handshakes, probes, tokens } = &self.report;
        let failed = |results: &crate::hostile::identity_client::Results| {
            format!("{} of {}", results.failures().len(), results.count())
        };
        let ms = |time: Duration| format!("{:.0} ms", time.as_secs_f64() * 1e3);
        format!(
            "| {} | {} | {} | {} | {} | {} | {} | {} | {} | {} MiB{} | {} MiB | {} MiB | {} | {} | {} | {} | {:.1}/s | {} |",
            self.attack.name(),
            failed(requests),
            ms(requests.quantile(0.99)),
            ms(requests.quantile(1.0)),
            failed(connections),
            ms(connections.quantile(1.0)),
            failed(handshakes),
            ms(handshakes.quantile(1.0)),
            failed(probes),
            self.memory >> 20,
            if self.killed { ", killed" } else { "" },
            self.with_sockets >> 20,
            self.peak >> 20,
            self.descriptors,
            self.log_lines,
            failed(tokens),
            ms(tokens.quantile(1.0)),
            self.handshakes_per_second,
            ms(self.p99_without_proxy),
        )
    }

    /// Why the attack succeeded; `None` if the proxy withstood it.
    pub fn failure(&self) -> Option<String> {
        let Report { requests, connections, handshakes, probes, tokens } = &self.report;
        if self.killed {
            return Some("the proxy ended".into());
        }
        // Only without a cgroup can the process exceed the limit and live.
        if self.memory > MEMORY_LIMIT {
            return Some(format!("{} MiB of memory", self.memory >> 20));
        }
        // On cgroup v1, the memory of sockets does not count.
        if self.with_sockets > MEMORY_BUDGET {
            return Some(format!("{} MiB of memory with sockets", self.with_sockets >> 20));
        }
        if self.descriptors > MAX_DESCRIPTORS {
            return Some(format!("{} descriptors", self.descriptors));
        }
        for (name, results) in [
            ("request", requests),
            ("new connection", connections),
            ("handshake", handshakes),
            ("/livez", probes),
            ("new token", tokens),
        ] {
            if let [first, ..] = results.failures() {
                return Some(format!("{name}: {} failed: {first}", results.failures().len()));
            }
        }
        let p99 = requests.quantile(0.99);
        let is_strict = std::env::var_os("JACKSTAY_STRICT").is_some();
        let slowest_handshake = handshakes.quantile(1.0);
        let is_slow = self.attack.reaches_apiservers() || self.attack.fills_accept_queue();
        let handshake_limit = match (is_strict, is_slow) {
            (true, _) => HANDSHAKE,
            (false, true) => CI_HANDSHAKE,
            (false, false) => 4 * HANDSHAKE,
        };
        if slowest_handshake > handshake_limit {
            return Some(format!("a new connection was served after {slowest_handshake:?}"));
        }
        let slowest_token = tokens.quantile(1.0);
        if slowest_token > NEW_TOKEN * if is_strict { 1 } else { 4 } {
            return Some(format!("a new token was served after {slowest_token:?}"));
        }
        if is_strict {
            return (p99 > P99).then(|| format!("p99 of {p99:?}"));
        }
        // Client, apiservers and attacker share the processors with the proxy, so that an attack that reaches the
        // apiservers delays the client there. Only a run on an idle machine can compare with the promise.
        (!self.attack.reaches_apiservers() && p99 > CI_P99).then(|| format!("p99 of {p99:?}"))
    }
}

fn spawn_attacker(target: &Target, uid: u32) -> KillOnDrop {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["hostile::attacker", "--exact", "--ignored", "--nocapture"]);
    command.uid(uid).stdout(Stdio::null());
    target.set_env(&mut command);
    KillOnDrop(command.spawn().expect("the attacker starts"))
}

/// The command that runs jackstay.
fn jackstay(
    cluster: &TestCluster,
    listeners: (SocketAddr, SocketAddr),
    admin: SocketAddr,
) -> Command {
    let file = cluster.certs.path().join("jackstay.yaml");
    fs::write(&file, configuration(cluster, listeners, admin)).unwrap();
    let binary = std::env::var_os("JACKSTAY_BIN")
        .map_or_else(|| PathBuf::from(env!("CARGO_BIN_EXE_jackstay")), PathBuf::from);
    let mut command = Command::new(binary);
    command.args(["run", "--config"]).arg(file);
    command
}

/// The shipped defaults, and a server name that is passed through.
fn configuration(
    cluster: &TestCluster,
    (server, passthrough): (SocketAddr, SocketAddr),
    admin: SocketAddr,
) -> String {
    let dir = cluster.certs.path();
    let file = |name: &str| dir.join(name).display().to_string();
    let endpoints = cluster.addresses();
    format!(
        r#"
admin: {{ bind: "{admin}" }}
state_dir: ""
upstreams:
  - name: control-plane
    endpoints: {endpoints:?}
    tls: {{ ca_file: {ca} }}
listeners:
  - name: apiserver
    bind: ["{server}"]
    mode: terminate
    upstream: control-plane
    tls: {{ cert_file: {serving_cert}, key_file: {serving_key} }}
    client_ca_file: {ca}
    identities:
      - cert_file: {admin_cert}
        key_file: {admin_key}
    passthrough_server_names: [{PASSED_THROUGH}]
  - name: flows
    bind: ["{passthrough}"]
    mode: passthrough
    upstream: control-plane
"#,
        endpoints = crate::support::to_strings(&endpoints),
        ca = file("ca.crt"),
        serving_cert = file("serving.crt"),
        serving_key = file("serving.key"),
        admin_cert = file("admin.crt"),
        admin_key = file("admin.key"),
    )
}

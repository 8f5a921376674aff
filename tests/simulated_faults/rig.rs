//! The real side: jackstay as a process, apiservers and clients on real sockets, in a network namespace of its own.
//!
//! The apiservers share a store, so they are threads of the test, each with an address of its own. A stopped one reads
//! and writes nothing while the kernel goes on to acknowledge what arrives, and a killed one loses its sockets, as with
//! SIGSTOP and SIGKILL.

use std::fs::File;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::AsFd;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use jackstay_apiserver::client::Client;
use jackstay_apiserver::cluster::Cluster;
use jackstay_apiserver::kinds::{CONFIG_MAPS, PODS};
use jackstay_apiserver::pki::Validity;
use jackstay_apiserver::{ApiServerHandle, Options};
use jackstay_sim::scenario::{Role, Scenario};
use jackstay_sim::world;
use rustix::thread::{LinkNameSpaceType, gettid, move_into_link_name_space};
use serde_json::json;

use crate::clients::{self, Ledger, Tasks};
use crate::faults::Beginning;
use crate::support::child::Process;
use crate::support::{Certs, pause};
use crate::timeline::{Figures, figures};
use crate::{faults, observer, simulated};

/// The port of the apiservers.
const PORT: u16 = 6443;
/// The addresses of jackstay.
const LISTENER: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 8443);
const PASSTHROUGH: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 8444);
const ADMIN: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 8080);
/// Time between two bookmarks of a watch, as in the simulation.
const BOOKMARKS: Duration = Duration::from_secs(5);

/// What a run has shown.
pub struct Real {
    pub figures: Figures,
    /// Whether every endpoint has the fault.
    pub hits_all_endpoints: bool,
    /// The longest pause of the machine.
    pub longest_pause: Duration,
}

/// Runs a scenario.
pub fn run(scenario: &'static Scenario, seed: u64) -> Real {
    let run = move || {
        run_before_others();
        let _namespace = Namespace::enter(scenario.name);
        faults::prepare();
        // The threads of the runtime inherit the namespace.
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
        runtime.unwrap().block_on(Rig::start().run(scenario, seed))
    };
    // No other thread of the process enters the namespace.
    std::thread::spawn(run).join().unwrap()
}

/// Gives this thread, and the threads and processes that it starts, the policy `SCHED_RR`, so that other processes of the
/// machine do not delay them. Fails where that is not permitted; the run then shows longer pauses.
fn run_before_others() {
    let thread = gettid().as_raw_nonzero().to_string();
    let _ = Command::new("chrt").args(["--rr", "--pid", "1", &thread]).status();
}

/// A network namespace, which the thread has entered. It is deleted on drop.
struct Namespace(String);

impl Namespace {
    fn enter(scenario: &str) -> Self {
        let name = format!("jackstay-{}-{scenario}", std::process::id());
        ip(&["netns", "add", &name]);
        let namespace = Self(name);
        ip(&["-n", &namespace.0, "link", "set", "lo", "up"]);
        let file = File::open(format!("/run/netns/{}", namespace.0)).unwrap();
        move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network)).unwrap();
        namespace
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["netns", "delete", &self.0]).status();
    }
}

fn ip(arguments: &[&str]) {
    assert!(Command::new("ip").args(arguments).status().unwrap().success(), "ip {arguments:?}");
}

/// Certificates, apiservers, and one more without faults, by which the times of writes are measured.
struct Rig {
    certs: Certs,
    cluster: Cluster,
    servers: Vec<ApiServerHandle>,
    reference: ApiServerHandle,
}

impl Rig {
    fn start() -> Self {
        let (certs, cluster) = (Certs::new(), Cluster::new());
        cluster.set_bookmark_interval(BOOKMARKS);
        for (kind, count) in [(&PODS, world::PODS), (&CONFIG_MAPS, world::CONFIG_MAPS)] {
            for key in 0..count {
                cluster.create(kind, "default", clients::object(key, ""), false).unwrap();
            }
        }
        let start = |number: u8| {
            let address = SocketAddr::from(([127, 0, 1, number], PORT));
            let certificate =
                certs.pki.server_for(&[&address.ip().to_string()], Validity::usual()).unwrap();
            let options = Options {
                bind: address,
                certificate: Some(certificate),
                ..Options::named(&format!("server-{number}"))
            };
            jackstay_apiserver::start(&cluster, &certs.pki, options).unwrap()
        };
        let servers = (1..=3).map(start).collect();
        let reference = start(4);
        Self { certs, cluster, servers, reference }
    }

    async fn run(self, scenario: &Scenario, seed: u64) -> Real {
        let roles: Vec<Role> = (scenario.sim)(seed).roles().collect();
        let wall_clock = SystemTime::now();
        let ledger = Ledger::new(Instant::now());
        let mut process = self.start_jackstay();
        process.wait_output("the admin endpoint listens").await;
        let credentials = self.certs.credentials();
        let mut tasks = Tasks::new();
        let reference = Client::connect(self.reference.addr, &credentials).await.unwrap();
        let version = self.cluster.version();
        tasks.spawn(clients::record_writes(reference, version, Arc::clone(&ledger)));
        let reference = Client::connect(self.reference.addr, &credentials).await.unwrap();
        tasks.spawn(clients::record_pauses(reference, Arc::clone(&ledger)));
        let endpoints: Vec<_> = self.servers.iter().map(|server| server.addr).collect();
        tasks.spawn(observer::follow_status(ADMIN, endpoints.clone(), Arc::clone(&ledger)));
        // The simulation starts with the process.
        let started = ledger.now();
        clients::start(&mut tasks, &roles, LISTENER, &credentials, &ledger).await;
        let mut fault = simulated::fault(scenario, seed);
        self.inject(scenario, seed, started, &ledger, &mut fault).await;
        pause((started + scenario.time).saturating_sub(ledger.now())).await;
        drop(tasks);
        let mut timeline = ledger.timeline();
        timeline.extend(observer::read_log(&process.output(), wall_clock, &endpoints));
        timeline.sort_by_key(|(at, _)| *at);
        save(scenario, &process, &timeline);
        Real {
            figures: figures(&timeline, &fault),
            hits_all_endpoints: fault.hits_all(),
            longest_pause: ledger.longest_pause(),
        }
    }

    /// Begins and ends the faults of a seed, and notes when that was.
    async fn inject(
        &self,
        scenario: &Scenario,
        seed: u64,
        started: Duration,
        ledger: &Ledger,
        fault: &mut crate::timeline::Fault,
    ) {
        let sim = (scenario.sim)(seed);
        let faults = sim.faults();
        let mut times: Vec<_> =
            faults.iter().flat_map(|fault| [Some(fault.at), fault.until]).flatten().collect();
        times.sort();
        times.dedup();
        let (first, last) = (times[0], fault.ends);
        for time in times {
            pause((started + time).saturating_sub(ledger.now())).await;
            let beginning = faults.iter().filter(|one| one.at == time).copied().collect();
            let beginning = Beginning::new(beginning, &self.servers);
            if time == first {
                fault.begins = fault.begins.max(ledger.now());
            }
            for ending in faults.iter().filter(|fault| fault.until == Some(time)) {
                crate::faults::end(ending, &self.servers);
            }
            beginning.begin();
            if last == Some(time) {
                fault.ends = Some(ledger.now());
            }
        }
    }

    fn start_jackstay(&self) -> Process {
        let addresses: Vec<_> = self.servers.iter().map(|server| server.addr).collect();
        let mut config = self.certs.config(&addresses).to_json();
        // The defaults of the program, but for the certificate of the prober.
        let upstream = &mut config["upstreams"][0];
        let readyz = upstream["health"]["readyz"].take();
        let certificate =
            json!({ "cert_file": readyz["cert_file"], "key_file": readyz["key_file"] });
        upstream["health"] = json!({ "readyz": certificate });
        upstream.as_object_mut().unwrap().remove("connections");
        config["admin"]["bind"] = json!(ADMIN);
        config["listeners"][0]["bind"] = json!([LISTENER]);
        config["log"] = json!({ "level": "debug", "format": "json", "access": "all" });
        // Endpoints are examined only if connections are passed through to them.
        let passthrough = json!({
            "name": "passthrough", "bind": [PASSTHROUGH], "upstream": "control-plane", "mode": "passthrough",
        });
        config["listeners"].as_array_mut().unwrap().push(passthrough);
        let file = self.certs.path().join("jackstay.yaml");
        std::fs::write(&file, config.to_string()).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_jackstay"));
        command.args(["run", "--config"]).arg(file);
        Process::spawn(command)
    }
}

/// Writes the log of jackstay and the timeline to files, if `JACKSTAY_TIMELINES` names a folder.
fn save(scenario: &Scenario, process: &Process, timeline: &crate::timeline::Timeline) {
    let Some(folder) = std::env::var_os("JACKSTAY_TIMELINES") else { return };
    let folder = std::path::PathBuf::from(folder);
    let lines =
        timeline.iter().map(|(at, entry)| format!("{:>12.6} {entry:?}\n", at.as_secs_f64()));
    std::fs::write(folder.join(format!("{}.timeline", scenario.name)), lines.collect::<String>())
        .unwrap();
    std::fs::write(folder.join(format!("{}.log", scenario.name)), process.output()).unwrap();
}

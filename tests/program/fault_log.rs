//! `grep -E 'WARN|ERROR'` over the log tells the story of a fault in at most five lines.

use crate::support::child::{PROCESS_TIMEOUT, Process, first_address};
use crate::support::wait::until_within;
use crate::support::{
    CONFIGMAPS, PATIENCE, TestCluster, pages, passthrough_config, pause, start_relays, until,
    write_config,
};
use http::Method;
use jackstay_apiserver::client::{Client, Watch};
use jackstay_apiserver::faulty_relay::FaultyRelay;
use jackstay_apiserver::pki::Pki;
use jackstay_config::Config;
use jackstay_core::discovery::address::EndpointAddress;
use std::net::SocketAddr;
use std::process::Command;
use std::time::Duration;

const BINARY: &str = env!("CARGO_BIN_EXE_jackstay");
/// Number of open watches.
const WATCHES: usize = 12;
/// Maximum number of warnings and errors about one fault.
const MAX_LINES: usize = 5;

/// A jackstay process, its apiservers, and open watches through it.
struct Drill {
    process: Process,
    cluster: TestCluster,
    client: Client,
    watches: Vec<Watch>,
    /// Length of the log at the start of the fault.
    start: usize,
}

impl Drill {
    async fn new(change: impl FnOnce(&mut Config)) -> Self {
        let (process, cluster, address) = start(change).await;
        let credentials = cluster.certs.credentials();
        let client = Client::connect(address, &credentials).await.unwrap();
        let path = cluster.watch_path();
        let mut watches = Vec::new();
        for _ in 0..WATCHES {
            watches.push(client.watch(&path).await.unwrap());
        }
        let open = async || (0..3).map(|at| cluster.watches(at)).sum::<u64>() == 12;
        until("all watches are open", open).await;
        let start = process.output().len();
        Self { process, cluster, client, watches, start }
    }

    /// The apiserver with the most watches.
    fn busiest(&self) -> usize {
        (0..3).max_by_key(|&at| self.cluster.watches(at)).unwrap()
    }

    /// The warnings and errors since the fault began.
    fn story(&self) -> Vec<String> {
        story(&self.process, self.start)
    }

    async fn wait_story(&self, text: &str) {
        wait_story(&self.process, self.start, text).await;
    }

    /// Waits until no more lines of the fault are due, and returns its story.
    async fn finish(mut self, fault: &str) -> Vec<String> {
        // Two bursts: the time in which a line may be withheld.
        pause(Duration::from_secs(7)).await;
        let story = self.story();
        println!("{fault}:");
        for line in &story {
            println!("    {line}");
        }
        assert!(!story.is_empty() && story.len() <= MAX_LINES, "{fault}: {story:#?}");
        self.cluster.create_config_map("after");
        for watch in &mut self.watches {
            let event = tokio::time::timeout(PATIENCE, watch.next()).await;
            event.expect("an event").unwrap().expect("the watch continues");
        }
        story
    }
}

/// Starts jackstay in front of three apiservers, and waits until they are ready. Returns the address of its
/// listener.
async fn start(change: impl FnOnce(&mut Config)) -> (Process, TestCluster, SocketAddr) {
    let cluster = TestCluster::new(3);
    let mut config = cluster.config();
    config.workers = 2;
    change(&mut config);
    let (process, admin, address) = spawn(&cluster, &config).await;
    let all_ready = async || {
        let status = pages::get(admin, "/status").await.unwrap();
        status.matches(r#""state": "ready""#).count() == 3
    };
    until("all endpoints are ready", all_ready).await;
    (process, cluster, address)
}

/// Starts jackstay. Returns the addresses of its admin endpoint and of its listener.
async fn spawn(cluster: &TestCluster, config: &Config) -> (Process, SocketAddr, SocketAddr) {
    let file = cluster.certs.path().join("jackstay.yaml");
    write_config(&file, config);
    let mut command = Command::new(BINARY);
    command.args(["run", "--config"]).arg(file);
    let mut process = Process::spawn(command);
    let admin = first_address(&process.wait_output("the admin endpoint listens").await);
    let address = first_address(&process.wait_output("\"apiserver\"").await);
    (process, admin, address)
}

/// The warnings and errors in the log after byte `start`.
fn story(process: &Process, start: usize) -> Vec<String> {
    let output = process.output();
    let bad = |line: &&str| line.contains(" WARN ") || line.contains(" ERROR ");
    output[start..].lines().filter(bad).map(str::to_owned).collect()
}

async fn wait_story(process: &Process, start: usize, text: &str) {
    let what = format!("a warning has `{text}`");
    let has = async || story(process, start).iter().any(|line| line.contains(text));
    until_within(PROCESS_TIMEOUT, &what, has).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_apiserver_has_one_warning_with_its_watches() {
    let drill = Drill::new(|_| {}).await;
    let server = drill.busiest();
    let (lost, address) = {
        let cluster = &drill.cluster;
        (cluster.watches(server), cluster.servers[server].addr.to_string())
    };
    drill.cluster.servers[server].kill();
    drill.wait_story("ejected").await;
    let story = drill.finish("an apiserver is killed").await;
    assert!(story.iter().all(|line| line.contains(&address)), "{story:#?}");
    let watches = if lost == 1 { "1 watch".to_owned() } else { format!("{lost} watches") };
    assert!(story.iter().any(|line| line.contains(&watches)), "no {watches} in {story:#?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stopped_apiserver_is_named_in_its_warnings() {
    let drill = Drill::new(|_| {}).await;
    let server = drill.busiest();
    let address = drill.cluster.servers[server].addr.to_string();
    drill.cluster.servers[server].stop();
    // Its watches move before connections are lost.
    drill.wait_story(r#"to="suspect""#).await;
    drill.cluster.servers[server].cont();
    let story = drill.finish("an apiserver is stopped").await;
    assert!(story.iter().all(|line| line.contains(&address)), "{story:#?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn outage_has_one_error_and_the_end_has_its_length_and_failures() {
    let drill = Drill::new(|_| {}).await;
    drill.cluster.kill_all();
    for _ in 0..3 {
        assert_eq!(drill.client.get(CONFIGMAPS).await.unwrap().status, 503);
    }
    drill.wait_story(" ERROR ").await;
    for _ in 0..4 {
        assert_eq!(drill.client.get(CONFIGMAPS).await.unwrap().status, 503);
    }
    let held = format!("{WATCHES} watches held");
    let servers = &drill.cluster.servers;
    for server in servers {
        server.restart().unwrap();
    }
    drill.wait_story("usable again").await;
    // The line above has the length of the outage. Watches resume later.
    let resumed = || {
        drill
            .process
            .output()
            .lines()
            .find(|l| l.contains("held watches resume"))
            .map(str::to_owned)
    };
    until_within(PROCESS_TIMEOUT, "held watches resume", async || resumed().is_some()).await;
    let resumed = resumed().unwrap();
    assert!(resumed.contains(" reason=") && !resumed.contains("outage"), "{resumed}");
    let story = drill.finish("all apiservers are killed and return").await;
    let errors: Vec<_> = story.iter().filter(|line| line.contains(" ERROR ")).collect();
    let [error] = errors[..] else { panic!("not one error: {story:#?}") };
    let text = "upstream control-plane: no usable endpoint, requests get 503, ";
    // A watch is counted as soon as it waits, between two attempts.
    for part in [text, " watches held ", " is ejected ("] {
        assert!(error.contains(part), "no `{part}` in {error}");
    }
    let end = story.iter().find(|line| line.contains("usable again after ")).unwrap();
    assert!(end.contains(" WARN "), "{end}");
    let counts = format!(" s; meanwhile 7 requests got 503, {held}");
    assert!(end.contains(&counts), "no `{counts}` in {end}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn outage_of_stopped_apiservers_counts_watches_on_their_connections() {
    let drill = Drill::new(|_| {}).await;
    for server in &drill.cluster.servers {
        server.stop();
    }
    drill.wait_story(" ERROR ").await;
    for server in &drill.cluster.servers {
        server.cont();
    }
    drill.wait_story("usable again").await;
    let story = drill.finish("all apiservers are stopped and return").await;
    let held = format!("{WATCHES} watches held");
    for part in ["no usable endpoint, requests get 503, ", "usable again after "] {
        let line = story.iter().find(|line| line.contains(part)).unwrap();
        assert!(line.contains(&held), "no `{held}` in {line}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dropped_flows_are_a_warning_with_their_watches() {
    let mut relays: Vec<FaultyRelay> = Vec::new();
    let drill = Drill::new(|config| {
        let endpoints = &mut config.upstreams[0].endpoints;
        let targets: Vec<_> = endpoints.iter().map(|e| e.to_string().parse().unwrap()).collect();
        relays = start_relays(&targets);
        for (endpoint, relay) in endpoints.iter_mut().zip(&relays) {
            *endpoint =
                EndpointAddress { host: relay.addr.ip().to_string(), port: relay.addr.port() };
        }
    })
    .await;
    let dropped: usize = relays.iter().map(|relay| relay.drop_all_packets().unwrap()).sum();
    assert!(dropped > 0);
    drill.wait_story("connections lost").await;
    // New connections work.
    let reply = drill.client.request(Method::GET, CONFIGMAPS, &[], "").await.unwrap();
    assert_eq!(reply.status, 200);
    let story = drill.finish("flows are dropped").await;
    let lost: Vec<_> = story.iter().filter(|line| line.contains("connections lost")).collect();
    let named = |line: &&String| relays.iter().any(|r| line.contains(&r.addr.to_string()));
    assert!(lost.iter().all(named), "{story:#?}");
    assert!(lost.iter().any(|line| line.contains(" watch")), "{story:#?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn outage_of_a_passthrough_upstream_has_its_resets() {
    let (process, cluster, address) =
        start(|config| *config = passthrough_config(config.clone())).await;
    let start = process.output().len();
    cluster.kill_all();
    let credentials = cluster.certs.credentials();
    wait_story(&process, start, "no usable endpoint, connections are reset").await;
    for _ in 0..3 {
        let client = Client::connect(address, &credentials).await;
        assert!(client.is_err(), "no apiserver runs");
    }
    for server in &cluster.servers {
        server.restart().unwrap();
    }
    wait_story(&process, start, "usable again after ").await;
    let story = story(&process, start);
    println!("{story:#?}");
    assert!(story.len() <= MAX_LINES, "{story:#?}");
    let end = story.iter().find(|line| line.contains("usable again")).unwrap();
    assert!(end.contains("3 connections reset"), "{end}");
}

/// The probe does not trust the apiservers' certificates; the clients, who make TLS connections of their own, do.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn passthrough_upstream_that_only_the_probe_refuses_is_no_outage() {
    let cluster = TestCluster::new(3);
    let mut config = passthrough_config(cluster.config());
    let other_ca = cluster.certs.path().join("other-ca.crt");
    std::fs::write(&other_ca, Pki::new("another").unwrap().ca_pem()).unwrap();
    config.upstreams[0].tls.ca_file = Some(other_ca);
    let (process, admin, address) = spawn(&cluster, &config).await;

    let wait = ["status", "--wait", "--timeout", "20s", "--admin", &admin.to_string()];
    let output = Command::new(BINARY).args(wait).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let table = String::from_utf8_lossy(&output.stdout);
    assert!(table.contains("unverified") && table.contains("flows are forwarded"), "{table}");
    let credentials = cluster.certs.credentials();
    for _ in 0..8 {
        let client = Client::connect(address, &credentials).await.unwrap();
        assert_eq!(client.get(CONFIGMAPS).await.unwrap().status, 200);
    }
    wait_story(&process, 0, "flows are forwarded").await;
    // An outage is reported after a second.
    pause(Duration::from_secs(2)).await;
    let readyz = pages::get(admin, "/readyz?verbose").await.unwrap();
    assert!(readyz.starts_with("HTTP/1.1 200"), "{readyz}");
    let story = story(&process, 0);
    let is_outage = |line: &String| line.contains("no usable endpoint") || line.contains("reset");
    assert!(!story.iter().any(is_outage), "{story:#?}");
    assert!(story.len() <= MAX_LINES, "{story:#?}");
}

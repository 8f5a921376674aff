//! The identity lane of the running program: clients with a configured identity are served by a thread of their own.

use std::collections::BTreeMap;
use std::fs;
use std::net::SocketAddr;
use std::process::Command;

use crate::support::child::{Process, first_address};
use crate::support::{CONFIGMAPS, TestCluster, until, write_config};
use jackstay::demo::apiserver::identity::User;
use jackstay::demo::client::{Client, Credentials};

/// Requests of each client.
const REQUESTS: u64 = 200;

/// jackstay as a process, in front of one apiserver.
struct Setup {
    cluster: TestCluster,
    process: Process,
    address: SocketAddr,
}

impl Setup {
    async fn new(identity_lane: bool) -> Self {
        let cluster = TestCluster::new(1);
        let mut config = cluster.config();
        config.identity_lane = identity_lane;
        let file = cluster.certs.path().join("jackstay.yaml");
        write_config(&file, &config);
        let mut command = Command::new(env!("CARGO_BIN_EXE_jackstay"));
        command.args(["run", "--config"]).arg(&file);
        let mut process = Process::spawn(command);
        let address = first_address(&process.wait_output("\"apiserver\"").await);
        Self { cluster, process, address }
    }

    /// A client that has had a response on its connection.
    async fn client(&self, credentials: &Credentials) -> Client {
        let client = Client::connect(self.address, credentials).await.unwrap();
        until("a response", async || client.get(CONFIGMAPS).await.is_ok()).await;
        client
    }

    /// How often each data-plane thread has waited, by the name of the thread.
    fn waits(&self) -> BTreeMap<String, u64> {
        let tasks = fs::read_dir(format!("/proc/{}/task", self.process.pid())).unwrap();
        let mut waits = BTreeMap::new();
        for task in tasks {
            let path = task.unwrap().path();
            let name = fs::read_to_string(path.join("comm")).unwrap().trim().to_owned();
            let status = fs::read_to_string(path.join("status")).unwrap();
            let count =
                status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
            if name == "identity-lane" || name.starts_with("worker-") {
                waits.insert(name, count.expect("a count").trim().parse().unwrap());
            }
        }
        waits
    }

    /// How often each data-plane thread waits while the client makes its requests, one after another.
    async fn waits_during_requests(&self, client: &Client) -> BTreeMap<String, u64> {
        let before = self.waits();
        for _ in 0..REQUESTS {
            client.get(CONFIGMAPS).await.unwrap();
        }
        self.waits()
            .into_iter()
            .map(|(name, count)| (name.clone(), count - before[&name]))
            .collect()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn each_thread_serves_its_own_clients() {
    let setup = Setup::new(true).await;
    let identity = setup.client(&setup.cluster.certs.credentials()).await;
    setup.cluster.state.add_token("alice", User::new("alice", &["devs"]));
    let token = setup.client(&setup.cluster.certs.anonymous().token("alice")).await;
    // Each request needs one wait at least, and a thread without requests waits only for its timers.
    for (client, serves, rests) in
        [(&identity, "identity-lane", "worker-0"), (&token, "worker-0", "identity-lane")]
    {
        let waits = setup.waits_during_requests(client).await;
        assert!(waits[serves] >= REQUESTS && waits[rests] * 2 < waits[serves], "{waits:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn identity_lane_false_leaves_all_clients_to_the_workers() {
    let setup = Setup::new(false).await;
    let client = setup.client(&setup.cluster.certs.credentials()).await;
    let waits = setup.waits_during_requests(&client).await;
    assert!(waits["worker-0"] >= REQUESTS && waits.len() == 1, "{waits:?}");
}

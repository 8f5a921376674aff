//! The identity lane of the running program: clients with a configured identity are served by a thread of their own.

use std::collections::BTreeMap;
use std::fs;
use std::net::SocketAddr;
use std::process::Command;
use std::time::Duration;

use jackstay_apiserver::client::{Client, Credentials};
use jackstay_apiserver::identity::User;

use crate::support::child::{Process, first_address};
use crate::support::{CONFIGMAPS, TestCluster, until, write_config};

/// Requests of each client.
const REQUESTS: usize = 200;

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

    /// The CPU time of each data-plane thread, by its name. Unlike numbers of waits, it hardly depends on the load of
    /// the machine.
    fn cpu_times(&self) -> BTreeMap<String, Duration> {
        let tasks = fs::read_dir(format!("/proc/{}/task", self.process.pid())).unwrap();
        let mut times = BTreeMap::new();
        for task in tasks {
            let path = task.unwrap().path();
            let name = fs::read_to_string(path.join("comm")).unwrap().trim().to_owned();
            if name == "identity-lane" || name.starts_with("worker-") {
                // Time on a CPU in nanoseconds, time in the run queue, and number of time slices.
                let times_of_task = fs::read_to_string(path.join("schedstat")).unwrap();
                let on_cpu = times_of_task.split(' ').next().unwrap().parse().unwrap();
                times.insert(name, Duration::from_nanos(on_cpu));
            }
        }
        times
    }

    /// The CPU time of each data-plane thread while the client makes its requests, one after another.
    async fn cpu_times_of_requests(&self, client: &Client) -> BTreeMap<String, Duration> {
        let before = self.cpu_times();
        for _ in 0..REQUESTS {
            client.get(CONFIGMAPS).await.unwrap();
        }
        let after = self.cpu_times().into_iter();
        after.map(|(name, time)| (name.clone(), time.saturating_sub(before[&name]))).collect()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn each_thread_serves_its_own_clients() {
    let setup = Setup::new(true).await;
    let identity = setup.client(&setup.cluster.certs.credentials()).await;
    setup.cluster.state.add_token("alice", User::new("alice", &["devs"]));
    let token = setup.client(&setup.cluster.certs.anonymous().token("alice")).await;
    // A thread without requests runs only for its timers.
    for (client, serves, rests) in
        [(&identity, "identity-lane", "worker-0"), (&token, "worker-0", "identity-lane")]
    {
        let times = setup.cpu_times_of_requests(client).await;
        println!("{times:?}");
        assert!(times[rests] * 2 < times[serves], "{times:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn identity_lane_false_leaves_all_clients_to_the_workers() {
    let setup = Setup::new(false).await;
    let client = setup.client(&setup.cluster.certs.credentials()).await;
    let times = setup.cpu_times_of_requests(&client).await;
    assert!(times["worker-0"] > Duration::ZERO && times.len() == 1, "{times:?}");
}

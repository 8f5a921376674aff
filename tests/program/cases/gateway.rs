//! A home directory with a kubeconfig, apiservers behind gateways, and the built binary.

use std::fs;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use jackstay_apiserver as apiserver;
use jackstay_apiserver::client::{Client, Credentials};
use jackstay_apiserver::cluster::Cluster;
use jackstay_apiserver::kinds::CONFIG_MAPS;
use jackstay_apiserver::pki::{Issued, Pki, Subject, kubeconfig};
use jackstay_apiserver::{ApiServerHandle, Gateway, Options};
use jackstay_testkit::child::{Process, free_address};
use jackstay_testkit::pages;
use jackstay_testkit::wait::{PATIENCE, until, until_within};
use serde_json::{Value, json};

/// The collection of config maps in the namespace `default`.
pub const CONFIGMAPS: &str = "/api/v1/namespaces/default/configmaps";

/// Apiservers of one cluster behind gateways, and a home directory.
pub struct Site {
    pub dir: tempfile::TempDir,
    pub pki: Pki,
    pub admin: Issued,
    pub cluster: Cluster,
    pub servers: Vec<ApiServerHandle>,
    pub listen: SocketAddr,
    pub admin_endpoint: SocketAddr,
}

impl Site {
    /// Starts two servers, each behind the gateway that `gateway` returns for the address of the first one.
    pub fn start(gateway: impl Fn(&str) -> Gateway) -> Self {
        let pki = Pki::new("kubernetes").unwrap();
        let admin = pki.client(&Subject::admin()).unwrap();
        let cluster = Cluster::new();
        apiserver::seed::fill(&cluster).unwrap();
        let addresses = [free_address(), free_address()];
        let gateway = gateway(&addresses[0].to_string());
        let server = |bind: SocketAddr| {
            let gateway = gateway.clone();
            let options = Options { bind, gateway, ..Options::named(&bind.to_string()) };
            apiserver::start(&cluster, &pki, options).unwrap()
        };
        let servers = addresses.map(server).into();
        let dir = tempfile::tempdir().unwrap();
        let (listen, admin_endpoint) = (free_address(), free_address());
        Self { dir, pki, admin, cluster, servers, listen, admin_endpoint }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Writes the kubeconfig of the user, whose server is the first one with this path.
    pub fn write_kubeconfig(&self, path: &str) {
        let url = format!("https://{}{path}", self.servers[0].addr);
        let text = kubeconfig(&url, &self.pki.ca_pem(), Some(&self.admin), None);
        fs::write(self.path("config"), text).unwrap();
    }

    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_jackstay"));
        command
            .args(args)
            .current_dir(self.dir.path())
            .env_clear()
            .env("HOME", self.dir.path())
            .env("JACKSTAY__ADMIN__BIND", self.admin_endpoint.to_string())
            .env("JACKSTAY__SHUTDOWN__DRAIN_TIMEOUT", "1s")
            .stdin(Stdio::null());
        command
    }

    /// Runs the binary to its end, and returns exit code and all output.
    pub fn run(&self, args: &[&str]) -> (i32, String) {
        let Output { status, stdout, stderr } = self.command(args).output().unwrap();
        let text = String::from_utf8([stdout, stderr].concat()).unwrap();
        (status.code().unwrap(), text)
    }

    /// Runs `jackstay kubeconfig` for both servers.
    pub fn set_up(&self, mode: &str, more: &[&str]) -> (i32, String) {
        let (listen, other) = (self.listen.to_string(), self.servers[1].addr.to_string());
        let args = ["kubeconfig", "--mode", mode, "--listen", &listen, "--kubeconfig", "config"];
        let others = ["--endpoint", &other, "--out", "out", "--config-out", "js/jackstay.yaml"];
        self.run(&[&args[..], &others, more].concat())
    }

    /// The upstream in the written configuration.
    pub fn upstream(&self) -> Value {
        let text = fs::read_to_string(self.path("js/jackstay.yaml")).unwrap();
        serde_saphyr::from_str::<Value>(&text).unwrap()["upstreams"][0].clone()
    }

    /// Starts jackstay, and waits until both endpoints are ready.
    pub async fn start_jackstay(&self) -> Process {
        let process = self.start_alone().await;
        until_within(PATIENCE * 3, "both endpoints are ready", async || {
            let states = self.endpoints().await;
            states.len() == 2 && states.iter().all(|endpoint| endpoint["state"] == "ready")
        })
        .await;
        process
    }

    /// Starts jackstay, and waits until it listens.
    pub async fn start_alone(&self) -> Process {
        let mut command = self.command(&["run", "--config", "js/jackstay.yaml"]);
        command.env("JACKSTAY__WORKERS", "1");
        let process = Process::spawn(command);
        until_within(PATIENCE * 3, "jackstay listens", async || {
            tokio::net::TcpStream::connect(self.listen).await.is_ok()
        })
        .await;
        process
    }

    /// The endpoints in the status.
    pub async fn endpoints(&self) -> Vec<Value> {
        let Ok(page) = pages::get(self.admin_endpoint, "/status").await else { return Vec::new() };
        let body = page.split_once("\r\n\r\n").map_or("", |(_, body)| body);
        let status: Value = serde_json::from_str(body).unwrap_or_default();
        status["upstreams"][0]["endpoints"].as_array().cloned().unwrap_or_default()
    }

    /// The value of a metric, summed over its labels.
    pub async fn metric(&self, name: &str) -> f64 {
        let page = pages::get(self.admin_endpoint, "/metrics").await.unwrap();
        let values = page.lines().filter(|line| line.starts_with(name));
        values.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
    }

    fn credentials(&self) -> Credentials {
        let ca = fs::read_to_string(self.path("js/local-ca.crt")).unwrap();
        Credentials::anonymous(&ca).certificate(&self.admin)
    }

    pub async fn client(&self) -> Client {
        Client::connect(self.listen, &self.credentials()).await.unwrap()
    }

    pub async fn client_over_http1(&self) -> Client {
        Client::connect_http1(self.listen, &self.credentials()).await.unwrap()
    }

    /// Creates a config map in the cluster without a request. Returns its resource version.
    pub fn create_config_map(&self, name: &str) -> u64 {
        let object = json!({ "metadata": { "name": name }, "data": { "a": "b" } });
        self.cluster.create(&CONFIG_MAPS, "default", object, false).unwrap().version
    }

    /// Kills the server with the watch as SIGKILL does.
    pub async fn kill_the_one_with_the_watch(&self) {
        let watches = |server: &&ApiServerHandle| {
            server.counters().watches.load(std::sync::atomic::Ordering::Relaxed) > 0
        };
        until("a server has the watch", async || self.servers.iter().any(|s| watches(&s))).await;
        self.servers.iter().find(watches).unwrap().kill();
    }

    /// What the gateways have not forwarded.
    pub fn refused(&self) -> Vec<String> {
        self.servers.iter().flat_map(ApiServerHandle::refused_by_gateway).collect()
    }
}

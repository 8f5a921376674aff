//! Takeovers between this release and another one, up and down, under load.

use super::load::Load;
use super::restarts::answered;
use super::setup::Setup;
use crate::support::child::Process;
use crate::support::wait::{pause, until};
use crate::support::{CONFIGMAPS, long_form, refusing_address};
use jackstay_apiserver::client::{Client, Credentials};
use std::fmt::Write as _;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::task::JoinHandle;

/// The requests of a long flow: it lasts for less than a drain, after which flows are reset.
const REQUESTS: usize = 50;

/// Interval of the requests of a client.
const INTERVAL: Duration = Duration::from_millis(20);

/// Clients that open connections all the time, with one request or [`REQUESTS`] on each. None may fail.
#[derive(Default)]
struct Connections {
    succeeded: AtomicUsize,
    opened: AtomicUsize,
    failures: Mutex<Vec<String>>,
    stop: AtomicBool,
}

impl Connections {
    fn start(self: &Arc<Self>, to: SocketAddr, credentials: &Credentials) -> [JoinHandle<()>; 2] {
        [1, REQUESTS].map(|requests| {
            let (counters, credentials) = (Arc::clone(self), credentials.clone());
            tokio::spawn(async move {
                while !counters.stop.load(Relaxed) {
                    if let Err(error) = counters.open(to, &credentials, requests).await {
                        let text = format!("{to}, {requests} requests: {error:?}");
                        counters.failures.lock().unwrap().push(text);
                    }
                }
            })
        })
    }

    async fn open(
        &self,
        to: SocketAddr,
        credentials: &Credentials,
        requests: usize,
    ) -> std::io::Result<()> {
        let client = answered("connect", Client::connect(to, credentials)).await?;
        self.opened.fetch_add(1, Relaxed);
        for request in 0..requests {
            // A listener of requests ends its connections in a drain.
            if requests > 1 && client.is_closed() {
                return Ok(());
            }
            let what = format!("request {request}, closed before: {}", client.is_closed());
            let reply = match answered(&what, client.get(CONFIGMAPS)).await {
                Err(error) if super::load::was_not_processed(&error) => return Ok(()),
                reply => reply?,
            };
            if !reply.status.is_success() {
                return Err(std::io::Error::other(reply.status.as_str().to_owned()));
            }
            self.succeeded.fetch_add(1, Relaxed);
            pause(INTERVAL).await;
        }
        Ok(())
    }

    async fn wait_progress(&self) {
        let before = self.succeeded.load(Relaxed);
        until("connections succeed", async || {
            assert_eq!(*self.failures.lock().unwrap(), [""; 0]);
            self.succeeded.load(Relaxed) > before + 20
        })
        .await;
    }
}

/// A configuration that each release with the takeover protocol reads, with a listener of requests and one of flows.
fn write_common_config(setup: &Setup, flows: SocketAddr) -> PathBuf {
    let dir = setup.cluster.certs.path();
    let file = |name: &str| dir.join(name).display().to_string();
    let endpoints = setup.cluster.addresses();
    let mut text = format!(
        "admin: {{bind: '{}'}}\nstate_dir: {}\nshutdown: {{drain_timeout: 10s}}\nupstreams:\n",
        setup.config.admin.bind,
        setup.state_dir().display()
    );
    for name in ["requests", "flows"] {
        let _ = writeln!(text, "- name: {name}\n  endpoints: {endpoints:?}");
        let _ = writeln!(text, "  tls: {{ca_file: {}}}", file("ca.crt"));
    }
    let _ = writeln!(
        text,
        "listeners:\n- {{name: flows, mode: passthrough, bind: ['{flows}'], upstream: flows}}\n\
         - name: apiserver\n  mode: terminate\n  bind: ['{}']\n  upstream: requests\n  \
         tls: {{cert_file: {}, key_file: {}}}\n  client_ca_file: {}\n  \
         identities: [{{cert_file: {}, key_file: {}}}]",
        setup.address,
        file("serving.crt"),
        file("serving.key"),
        file("ca.crt"),
        file("admin.crt"),
        file("admin.key"),
    );
    let path = dir.join("common.yaml");
    std::fs::write(&path, text).unwrap();
    path
}

/// `JACKSTAY_OTHER_RELEASE` names its program.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs JACKSTAY_OTHER_RELEASE, the program of another release"]
async fn takeover_beside_another_release_fails_no_request() {
    let other = PathBuf::from(std::env::var_os("JACKSTAY_OTHER_RELEASE").unwrap());
    let mut setup = Setup::new(2, 1).await;
    let (requests, flows) = (setup.address, refusing_address());
    let file = write_common_config(&setup, flows);
    let start = |binary: &Path| {
        let mut command = super::setup::command(binary, &file, &["--take-over"]);
        command.env_remove("JACKSTAY_OTHER_RELEASE");
        Process::spawn(command)
    };
    let this = Path::new(super::setup::BINARY);
    let mut old = setup.replace(start(this));
    assert!(old.wait_exit().await.success(), "{}", old.output());
    setup.wait_ready().await;

    let load = Load::start(&setup).await;
    let connections = Arc::<Connections>::default();
    let credentials = setup.cluster.certs.credentials();
    let clients = [requests, flows].map(|to| connections.start(to, &credentials));
    let rounds = if long_form() { 20 } else { 4 };
    for round in 0..rounds {
        connections.wait_progress().await;
        let new = start(if round % 2 == 0 { &other } else { this });
        let mut old = setup.replace(new);
        let status = old.wait_exit().await;
        assert!(status.success(), "{status}:\n{}\n{}", old.output(), setup.process.output());
        assert!(setup.process.is_running(), "{}", setup.process.output());
        load.wait_progress().await;
        connections.wait_progress().await;
    }
    connections.stop.store(true, Relaxed);
    for client in clients.into_iter().flatten() {
        client.await.unwrap();
    }
    let report = load.end().await;
    assert_eq!(*connections.failures.lock().unwrap(), [""; 0]);
    println!(
        "{rounds} takeovers: {report}; {} requests on {} connections and flows, none failed",
        connections.succeeded.load(Relaxed),
        connections.opened.load(Relaxed)
    );
}

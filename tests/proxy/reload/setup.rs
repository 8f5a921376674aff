//! A jackstay that follows a configuration file, watches that must miss no event, and traffic that must not
//! fail.

#![allow(dead_code)] // not every test crate uses all of it

use crate::support::watch_recorder::WatchRecorder;
use crate::support::{
    CONFIGMAPS, Certs, PATIENCE, Proxy, TestCluster, config_map, soon, until, write_config,
};
use jackstay::app::App;
use jackstay::app::reload::{CheckedConfig, ConfigSource, ReloadOutcome};
use jackstay_apiserver::client::Client;
use jackstay_apiserver::kinds::{CONFIG_MAPS, ObjectRef};
use jackstay_config::{self as config, Config, ConfigErrors, Overrides};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::task::JoinHandle;

pub struct Setup {
    pub cluster: TestCluster,
    pub proxy: Proxy,
    /// The configuration file.
    pub file: PathBuf,
    /// The configuration in the file.
    pub config: Config,
    /// The versions of the objects that [`Setup::write_config_map`] has written.
    written: Mutex<Vec<u64>>,
}

impl Setup {
    pub async fn new(servers: usize) -> Self {
        Self::with(servers, |_| {}).await
    }

    pub async fn with(servers: usize, change: impl FnOnce(&mut Config)) -> Self {
        Self::of(TestCluster::new(servers), change).await
    }

    pub async fn of(cluster: TestCluster, change: impl FnOnce(&mut Config)) -> Self {
        let mut config = cluster.config();
        change(&mut config);
        let file = cluster.certs.path().join("jackstay.yaml");
        write_config(&file, &config);
        let proxy = follow(&file, &cluster.certs);
        let setup = Self { cluster, proxy, file, config, written: Mutex::default() };
        setup.proxy.wait_ready(setup.config.upstreams[0].endpoints.len()).await;
        setup
    }

    /// Writes a changed configuration and reloads it.
    pub async fn reload(&mut self, change: impl FnOnce(&mut Config)) -> ReloadOutcome {
        change(&mut self.config);
        write_config(&self.file, &self.config);
        self.reload_file().await
    }

    /// Writes a changed configuration and reloads it, which must succeed. Returns the reported changes.
    pub async fn change(&mut self, change: impl FnOnce(&mut Config)) -> Vec<String> {
        match self.reload(change).await {
            ReloadOutcome::Ok { changed, needs_restart } => {
                assert_eq!(needs_restart, [""; 0]);
                changed
            }
            ReloadOutcome::Failed { errors } => panic!("{errors:?}"),
        }
    }

    /// Reloads the file as it is.
    pub async fn reload_file(&self) -> ReloadOutcome {
        let result = soon("a reload", self.proxy.running.reload("test")).await.unwrap();
        result.outcome().clone()
    }

    pub async fn client(&self) -> Client {
        self.proxy.client().await
    }

    /// The address of a listener, if it exists.
    pub async fn listener(&self, name: &str) -> Option<SocketAddr> {
        let status = self.proxy.status().await;
        let listeners = status["listeners"].as_array().unwrap();
        let listener = listeners.iter().find(|listener| listener["name"] == name)?;
        listener["bind"][0].as_str()?.parse().ok()
    }

    /// Starts a watch at the current version.
    pub async fn watch(&self, client: &Client) -> CheckedWatch {
        CheckedWatch::start(client, self.cluster.state.version()).await
    }

    /// Writes an object, of which every watch must receive an event.
    pub fn write_config_map(&self) {
        let mut written = self.written.lock().unwrap();
        // Always the same object, so that the state of the servers does not grow.
        let object = config_map("m0", &written.len().to_string());
        let stored = if written.is_empty() {
            self.cluster.state.create(&CONFIG_MAPS, "default", object, false).unwrap()
        } else {
            let object_ref = ObjectRef { kind: &CONFIG_MAPS, namespace: "default", name: "m0" };
            self.cluster.state.modify(object_ref, false, |_| Ok(object)).unwrap()
        };
        written.push(stored.version);
    }
}

/// Starts jackstay with a configuration file that it follows, as `jackstay run` does.
fn follow(file: &Path, certs: &Certs) -> Proxy {
    let path = file.to_owned();
    let read = move || {
        let loaded = config::load(&path, [], &Overrides::default());
        let errors = |e: ConfigErrors| e.0.iter().map(ToString::to_string).collect::<Vec<_>>();
        loaded.map(CheckedConfig::from).map_err(errors)
    };
    let config = read().unwrap().config;
    let source = ConfigSource { file: file.to_owned(), read: Box::new(read), log: None };
    Proxy::start(App::bind(config).unwrap().with_config_source(source), certs)
}

/// A watch that must receive an event of every object that [`Setup::write_config_map`] writes.
pub struct CheckedWatch {
    pub recorder: WatchRecorder,
    /// The version at which the watch started.
    from: u64,
}

impl CheckedWatch {
    pub async fn start(client: &Client, from: u64) -> Self {
        let path = format!("{CONFIGMAPS}?watch=1&resourceVersion={from}");
        Self { recorder: WatchRecorder::start(client, &path).await, from }
    }

    /// Writes an object, and expects the events of all objects written since the start: each once, in order,
    /// without an end of the watch.
    pub async fn expect_complete(&self, setup: &Setup) {
        setup.write_config_map();
        let written = setup.written.lock().unwrap().clone();
        let expected: Vec<_> = written.into_iter().filter(|version| *version > self.from).collect();
        self.recorder.expect_versions(&expected).await;
    }
}

/// Requests at a steady rate on one connection: nine reads to one write. Failures are recorded.
pub struct Traffic {
    failures: Arc<Mutex<Vec<String>>>,
    /// Number of completed requests.
    completed: Arc<AtomicUsize>,
    stop: Arc<AtomicBool>,
    tasks: Vec<JoinHandle<()>>,
    started: Instant,
}

/// Tasks that send requests, each one at a time.
const CONCURRENCY: u32 = 8;

impl Traffic {
    /// Starts at most `rate` requests a second, or fewer on a slow machine.
    pub async fn start(setup: &Setup, rate: u32) -> Self {
        let client = Arc::new(setup.client().await);
        let failures = Arc::<Mutex<Vec<String>>>::default();
        let completed = Arc::<AtomicUsize>::default();
        let stop = Arc::<AtomicBool>::default();
        let spawn_task = |index: u32| {
            let name = format!("t{index}");
            // The object exists if there was traffic before.
            let _ = setup.cluster.state.create(
                &CONFIG_MAPS,
                "kube-system",
                kube_system_config_map(&name),
                false,
            );
            let (client, failures) = (Arc::clone(&client), Arc::clone(&failures));
            let (completed, stop) = (Arc::clone(&completed), Arc::clone(&stop));
            tokio::spawn(async move {
                let mut ticks = tokio::time::interval(Duration::from_secs(1) * CONCURRENCY / rate);
                ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
                let path = format!("/api/v1/namespaces/kube-system/configmaps/{name}");
                for number in 0.. {
                    ticks.tick().await;
                    if stop.load(Relaxed) {
                        return;
                    }
                    // One in ten is a write, which jackstay does not retry.
                    let reply = if number % 10 == 9 {
                        client.put(&path, &kube_system_config_map(&name)).await
                    } else {
                        client.get("/api/v1/namespaces/default").await
                    };
                    match reply {
                        Ok(reply) if reply.status.is_success() => {}
                        Ok(reply) => {
                            let why = String::from_utf8_lossy(&reply.body).into_owned();
                            failures.lock().unwrap().push(format!("{}: {why}", reply.status));
                        }
                        Err(error) => failures.lock().unwrap().push(error.to_string()),
                    }
                    completed.fetch_add(1, Relaxed);
                }
            })
        };
        let tasks = (0..CONCURRENCY).map(spawn_task).collect();
        Self { failures, completed, stop, tasks, started: Instant::now() }
    }

    /// Waits for ten more responses, and expects no failure so far.
    pub async fn expect_progress(&self) {
        let before = self.completed.load(Relaxed);
        until("ten more responses", async || self.completed.load(Relaxed) >= before + 10).await;
        assert_eq!(*self.failures.lock().unwrap(), [""; 0]);
    }

    /// Stops the requests, and expects no failure. Returns the rate in requests a second.
    pub async fn end(mut self) -> f64 {
        self.stop.store(true, Relaxed);
        for task in std::mem::take(&mut self.tasks) {
            tokio::time::timeout(PATIENCE, task).await.expect("requests end").unwrap();
        }
        assert_eq!(*self.failures.lock().unwrap(), [""; 0]);
        self.completed.load(Relaxed) as f64 / self.started.elapsed().as_secs_f64()
    }
}

/// A config map in `kube-system` whose content differs from that of all others.
fn kube_system_config_map(name: &str) -> serde_json::Value {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let mut object = config_map(name, &NEXT.fetch_add(1, Relaxed).to_string());
    object["metadata"]["namespace"] = "kube-system".into();
    object
}

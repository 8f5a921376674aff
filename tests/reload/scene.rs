//! A jackstay that follows a file, and clients that notice everything.

#![allow(dead_code)] // each test crate uses its part

use crate::support::{MAPS, PATIENCE, Proxy, World, map, soon, until};
use jackstay::app::App;
use jackstay::app::reload::{ConfigSource, LoadedConfig, ReloadOutcome};
use jackstay::config::{self, Config, Overrides};
use jackstay::demo::apiserver::kinds::ObjectRef;
use jackstay::demo::client::Client;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::task::JoinHandle;

pub struct Scene {
    pub world: World,
    pub proxy: Proxy,
    pub file: PathBuf,
    /// What the file says.
    pub config: Config,
    /// Versions of what was written for watches.
    written: Mutex<Vec<u64>>,
}

impl Scene {
    pub async fn new(servers: usize) -> Self {
        Self::with(servers, |_| {}).await
    }

    pub async fn with(servers: usize, change: impl FnOnce(&mut Config)) -> Self {
        let world = World::new(servers);
        let mut config = world.config();
        change(&mut config);
        let file = world.certs.path().join("jackstay.yaml");
        write(&file, &config);
        let proxy = follow(&file);
        let scene = Self { world, proxy, file, config, written: Mutex::default() };
        scene.proxy.usable(scene.config.upstreams[0].endpoints.len()).await;
        scene
    }

    /// Writes a changed configuration and has it followed.
    pub async fn reload(&mut self, change: impl FnOnce(&mut Config)) -> ReloadOutcome {
        change(&mut self.config);
        write(&self.file, &self.config);
        self.hup().await
    }

    /// The same, which must succeed: what it says it changed.
    pub async fn change(&mut self, change: impl FnOnce(&mut Config)) -> Vec<String> {
        match self.reload(change).await {
            ReloadOutcome::Ok { changed, needs_restart } => {
                assert_eq!(needs_restart, [""; 0]);
                changed
            }
            ReloadOutcome::Failed { errors } => panic!("{errors:?}"),
        }
    }

    /// Has the file followed as it is.
    pub async fn hup(&self) -> ReloadOutcome {
        let attempt = soon("a reload", self.proxy.running.reload("test")).await.unwrap();
        attempt.outcome().clone()
    }

    pub async fn client(&self) -> Client {
        self.proxy.client(&self.world.certs.credentials()).await
    }

    /// Where a listener listens.
    pub async fn listener(&self, name: &str) -> Option<SocketAddr> {
        let status = self.proxy.status().await;
        let listeners = status["listeners"].as_array().unwrap();
        let listener = listeners.iter().find(|listener| listener["name"] == name)?;
        listener["bind"][0].as_str()?.parse().ok()
    }

    pub fn write_map(&self) {
        let kind = jackstay::demo::apiserver::kinds::find("", "v1", "configmaps").unwrap();
        let mut written = self.written.lock().unwrap();
        // One map: what a test adds to its servers grows with it.
        let next = map("m0", &written.len().to_string());
        let map = if written.is_empty() {
            self.world.cluster.create(kind, "default", next, false).unwrap()
        } else {
            let place = ObjectRef { kind, namespace: "default", name: "m0" };
            self.world.cluster.modify(place, false, |_| Ok(next)).unwrap()
        };
        written.push(map.version);
    }
}

/// Starts jackstay with a file, as `jackstay run` does.
pub fn follow(file: &Path) -> Proxy {
    let path = file.to_owned();
    let read = move || {
        let loaded = config::load(&path, [], &Overrides::default());
        let loaded = loaded.map_err(|e| e.0.iter().map(ToString::to_string).collect::<Vec<_>>())?;
        Ok(LoadedConfig { config: loaded.config, warnings: loaded.warnings })
    };
    let config = read().unwrap().config;
    let origin = ConfigSource { file: file.to_owned(), read: Box::new(read), log: None };
    let app = App::bind(config).unwrap().with_config_source(origin);
    let addr = app.listener_addresses("apiserver")[0];
    let admin = app.admin_address().unwrap();
    Proxy { addr, admin, running: app.start().unwrap() }
}

/// Writes a configuration as editors do: beside, and then over the old one.
pub fn write(file: &Path, config: &Config) {
    let new = file.with_extension("new");
    std::fs::write(&new, config.to_json().to_string()).unwrap();
    std::fs::rename(&new, file).unwrap();
}

/// A watch that is read all the time.
pub struct Watching {
    versions: Arc<Mutex<Vec<u64>>>,
    end: Arc<Mutex<Option<Result<(), String>>>>,
    from: u64,
    task: JoinHandle<()>,
}

impl Drop for Watching {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Watching {
    pub async fn start(client: &Client, from: u64) -> Self {
        let path = format!("{MAPS}?watch=1&resourceVersion={from}");
        let mut watch = soon("a watch", client.watch(&path)).await.unwrap();
        let versions = Arc::<Mutex<Vec<u64>>>::default();
        let end = Arc::<Mutex<Option<Result<(), String>>>>::default();
        let (into, ended) = (Arc::clone(&versions), Arc::clone(&end));
        let task = tokio::spawn(async move {
            let how = loop {
                match watch.next().await {
                    Ok(Some(event)) => {
                        let version = &event["object"]["metadata"]["resourceVersion"];
                        into.lock().unwrap().push(version.as_str().unwrap().parse().unwrap());
                    }
                    Ok(None) => break Ok(()),
                    Err(error) => break Err(error.to_string()),
                }
            };
            *ended.lock().unwrap() = Some(how);
        });
        Self { versions, end, from, task }
    }

    pub fn end(&self) -> Option<Result<(), String>> {
        self.end.lock().unwrap().clone()
    }

    /// Waits for every event up to now: each once, in order, and no end.
    pub async fn is_whole(&self, scene: &Scene) {
        scene.write_map();
        let written = scene.written.lock().unwrap().clone();
        let last = *written.last().unwrap();
        until("the last event", async || {
            self.end().is_some() || self.versions.lock().unwrap().last() == Some(&last)
        })
        .await;
        assert_eq!(self.end(), None, "the watch ended");
        let versions = self.versions.lock().unwrap().clone();
        let wanted: Vec<_> = written.into_iter().filter(|version| *version > self.from).collect();
        assert_eq!(versions, wanted);
    }

    /// Waits for its end.
    pub async fn ends(&self) -> Result<(), String> {
        until("the watch ends", async || self.end().is_some()).await;
        self.end().unwrap()
    }
}

/// Requests at a steady rate on one connection, reads and now and then a write: whatever goes wrong
/// is kept.
pub struct Traffic {
    failures: Arc<Mutex<Vec<String>>>,
    done: Arc<AtomicUsize>,
    stop: Arc<AtomicBool>,
    tasks: Vec<JoinHandle<()>>,
    began: Instant,
}

/// Requests that may run at the same time.
const SIDE_BY_SIDE: u32 = 8;

impl Traffic {
    /// At most `rate` requests a second: as many as the machine can do.
    pub async fn start(scene: &Scene, rate: u32) -> Self {
        let client = Arc::new(scene.client().await);
        let failures = Arc::<Mutex<Vec<String>>>::default();
        let done = Arc::<AtomicUsize>::default();
        let stop = Arc::<AtomicBool>::default();
        let kind = jackstay::demo::apiserver::kinds::find("", "v1", "configmaps").unwrap();
        let one = |index: u32| {
            let name = format!("t{index}");
            // It is there already if there was traffic before.
            let _ = scene.world.cluster.create(kind, "kube-system", small(&name), false);
            let (client, failures) = (Arc::clone(&client), Arc::clone(&failures));
            let (done, stop) = (Arc::clone(&done), Arc::clone(&stop));
            tokio::spawn(async move {
                let mut ticks = tokio::time::interval(Duration::from_secs(1) * SIDE_BY_SIDE / rate);
                ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
                let path = format!("/api/v1/namespaces/kube-system/configmaps/t{index}");
                for number in 0.. {
                    ticks.tick().await;
                    if stop.load(Relaxed) {
                        return;
                    }
                    // One in ten is a write, which is not sent twice.
                    let reply = if number % 10 == 9 {
                        client.put(&path, &small(&name)).await
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
                    done.fetch_add(1, Relaxed);
                }
            })
        };
        let tasks = (0..SIDE_BY_SIDE).map(one).collect();
        Self { failures, done, stop, tasks, began: Instant::now() }
    }

    /// Waits for some more requests to be answered, and that nothing went wrong so far.
    pub async fn goes_on(&self) {
        let before = self.done.load(Relaxed);
        until("traffic goes on", async || self.done.load(Relaxed) >= before + 10).await;
        assert_eq!(*self.failures.lock().unwrap(), [""; 0]);
    }

    /// Ends it. Nothing may have failed. The rate, in requests a second.
    pub async fn end(mut self) -> f64 {
        self.stop.store(true, Relaxed);
        for task in std::mem::take(&mut self.tasks) {
            tokio::time::timeout(PATIENCE, task).await.expect("requests end").unwrap();
        }
        assert_eq!(*self.failures.lock().unwrap(), [""; 0]);
        self.done.load(Relaxed) as f64 / self.began.elapsed().as_secs_f64()
    }
}

static NEXT: AtomicUsize = AtomicUsize::new(0);

fn small(name: &str) -> serde_json::Value {
    // No update is like the one before.
    let mut object = map(name, &NEXT.fetch_add(1, Relaxed).to_string());
    object["metadata"]["namespace"] = "kube-system".into();
    object
}

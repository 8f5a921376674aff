//! The control thread: discovery, certificates, the admin endpoint, reloads and takeovers.
//!
//! Only this thread changes the active configuration, one change at a time. It does not wait for drains.
//!
//! | event | action |
//! |---|---|
//! | start | starts the tasks of the configuration, serves the admin endpoint, notifies readiness |
//! | start with `--take-over` | before it serves the admin endpoint: waits until every upstream has a usable endpoint, sends the sockets to the workers, and has the old process stop accepting |
//! | start beside a process that drains | before it serves the admin endpoint: has the old process give that up |
//! | reload request, the file has changed, or the last reload has failed (each second) | prepares the new configuration, activates it, and sends it to the workers |
//! | takeover request | sends the sockets to the new process; when that serves, makes the workers release theirs |
//! | drain of a restart | leaves the sockets and their accept queues to the next process, and makes the workers end connections soon |
//! | drain | makes the workers close their sockets, then end connections; continues its tasks until it is stopped ([`drain`]) |
//! | takeover request in a drain | sends the socket of the admin endpoint to the new process, and gives it up when that serves |

mod drain;
mod metrics_server;
mod tasks;

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use jackstay_core::admission::MemoryBudget;
use jackstay_core::takeover::hand_over::{self, Offered};
use jackstay_sys::process::code_pages;
use jackstay_sys::process::inherited_sockets::{InheritedSockets, stored_name};
use jackstay_sys::process::service_manager::ServiceManager;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::{oneshot, watch};
use tokio::task::{LocalSet, spawn_local};
use tokio::time::{MissedTickBehavior, interval, sleep, timeout};
use tracing::dispatcher::{Dispatch, with_default};

use self::tasks::Tasks;
use super::active::{ActiveConfig, PreparedConfig, client_memory_limit};
use super::admin_socket::AdminBind;
use super::descriptors::raise_descriptor_limit;
use super::reload::{
    CheckedConfig, ConfigFollower, RETRY, ReloadOutcome, ReloadRequest, ReloadResult, changes,
};
use super::sockets::NewSockets;
use super::status::ProcessStatus;
use super::takeover::{self, Offer, Predecessor, Request, TakeoverRequest};
use super::workers::CommandSender;
use crate::admin::StatusProvider as _;
use crate::control::discovery::SharedContext;
use crate::control::saved_floors::LAST_WRITE;
use crate::control::watchdog;
use crate::observe::Metrics;
use crate::observe::events::{Change, EventKind};

/// How often recorded samples are aggregated into histogram buckets.
const METRICS_UPKEEP: Duration = Duration::from_secs(1);
/// How often the configuration file is checked. A change is applied when two checks find the same version. After a
/// failed reload the same version is tried again as often.
const FILE_CHECK: Duration = Duration::from_secs(1);
/// Time after the start at which the memory of startup code is released. By then all files are read and every
/// endpoint was tried.
const STARTUP: Duration = Duration::from_secs(1);
/// Time for TCP handshakes to complete that have started on a socket that is being replaced: many round trips
/// within a cluster, also while the machine is under load.
const TCP_HANDSHAKE: Duration = Duration::from_millis(250);
/// Time for the workers to execute a command, after which a warning is logged.
const WORKER_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum time for which a process that takes over waits until every upstream has a usable endpoint, while the
/// old process serves: the default of `connect_timeout`. After that it takes over nevertheless, since the old
/// process probably has no usable endpoint either.
const WARM_UP: Duration = Duration::from_secs(3);
/// How often a process that takes over checks for usable endpoints.
const WARM_UP_POLL: Duration = Duration::from_millis(10);

/// The parameters and the state of the control thread.
pub struct ControlThread {
    pub active: ActiveConfig,
    pub metrics: Arc<Metrics>,
    /// The account of the memory that clients make the process hold.
    pub memory: Arc<MemoryBudget>,
    /// Receives readiness, reloads, and watchdog messages while no worker is stalled.
    pub manager: Arc<ServiceManager>,
    pub status: Arc<ProcessStatus>,
    pub context: Arc<SharedContext>,
    pub workers: CommandSender,
    /// Reads the configuration again; `None` if it does not come from a file.
    pub follower: Option<ConfigFollower>,
    pub requests: UnboundedReceiver<ReloadRequest>,
    pub draining: watch::Receiver<bool>,
    /// Whether the drain is that of a restart.
    pub restarts: Arc<AtomicBool>,
    /// Becomes true when the workers have closed their listening sockets, so that connections shall end.
    pub sockets_closed: watch::Sender<bool>,
    /// The process to take over from, and the sockets that the workers get when this one can serve. They have theirs
    /// if that process drains.
    pub predecessor: Option<(Predecessor, NewSockets)>,
    /// Whether sockets may come from a service manager, which still has them.
    pub manager_sockets: bool,
    /// The addresses of inherited sockets that no listener uses.
    pub unused_sockets: Vec<SocketAddr>,
    /// Whether the takeover socket belongs to another process that this one replaces.
    pub replaces: bool,
    /// Becomes true when another process has taken over.
    pub replaced: watch::Sender<bool>,
}

impl ControlThread {
    /// Runs until `stopped` is sent or dropped.
    pub fn run(self, stopped: oneshot::Receiver<()>) {
        let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
            Ok(runtime) => runtime,
            Err(error) => {
                tracing::error!(%error, "control thread cannot create its runtime");
                return;
            }
        };
        let tasks = LocalSet::new();
        let (end, ended) = watch::channel(false);
        let replaced = self.replaced.subscribe();
        tasks.block_on(&runtime, async move {
            tokio::select! {
                () = self.serve(ended) => {}
                _ = stopped => {}
            }
            if !*replaced.borrow() {
                end.send_replace(true);
                // The tasks that save the floors drop the receivers when they have.
                let _ = timeout(LAST_WRITE, end.closed()).await;
            }
        });
        // Dropping the probers changes endpoint states, which shall not be logged.
        with_default(&Dispatch::none(), || drop(tasks));
        // Does not wait for blocking threads, which may hang on a disk.
        runtime.shutdown_background();
    }

    /// `ended` becomes true when the process ends.
    async fn serve(mut self, ended: watch::Receiver<bool>) {
        self.start_upkeep();
        let (status, context) = (Arc::clone(&self.status), Arc::clone(&self.context));
        let mut tasks = Tasks::new(status, context, self.draining.clone(), ended);
        tasks.start_new(&self.active);
        let (sender, mut takeovers) = unbounded_channel();
        let predecessor = self.predecessor.take();
        let starts = match predecessor {
            Some((predecessor, _)) if predecessor.is_draining() => {
                self.replace_draining(predecessor).await;
                true
            }
            Some((predecessor, sockets)) => self.take_over(predecessor, sockets).await,
            None => true,
        };
        if starts {
            tasks.serve_admin(&self.active);
            // This process is the main process of its service now.
            for address in &self.unused_sockets {
                self.manager.discard(&stored_name(*address));
            }
            self.store_sockets();
            // Readiness does not wait for an endpoint: an apiserver may need units that systemd starts only
            // after this one is ready.
            self.manager.notify_ready();
            tasks.serve_takeover(&self.active, &sender, &self.replaced, self.replaces).await;
            self.serve_requests(&mut tasks, &sender, &mut takeovers).await;
        }
        self.drain(&mut tasks, &mut takeovers).await;
    }

    /// Executes requests until this process drains.
    async fn serve_requests(
        &mut self,
        tasks: &mut Tasks,
        sender: &UnboundedSender<TakeoverRequest>,
        takeovers: &mut UnboundedReceiver<TakeoverRequest>,
    ) {
        let mut file_checks = interval(FILE_CHECK);
        file_checks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut draining = self.draining.clone();
        loop {
            let request = tokio::select! {
                _ = draining.wait_for(|draining| *draining) => return,
                request = self.requests.recv() => {
                    let Some(request) = request else { return };
                    request
                }
                _ = file_checks.tick() => {
                    let last = self.status.last_reload();
                    let follower = self.follower.as_mut();
                    let trigger = follower.and_then(|follower| follower.trigger(last.as_ref()));
                    let Some(trigger) = trigger else { continue };
                    ReloadRequest { trigger, reply: None }
                }
                Some(request) = takeovers.recv() => match request {
                    TakeoverRequest::DuplicateSockets { request, reply } => {
                        // The receiver may be dropped.
                        let _ = reply.send(self.offer(false, request));
                        continue;
                    }
                    TakeoverRequest::ReleaseSockets { pid, done } => {
                        self.release_sockets(pid, tasks).await;
                        let own = self.active.shares_sockets_with_one();
                        self.manager.leave_descriptors();
                        // So that the new process has the last duplicates.
                        self.active.sockets.clear();
                        // The receiver may be dropped.
                        let _ = done.send(own);
                        return;
                    }
                },
            };
            let result = self.reload(request.trigger, tasks).await;
            tasks.serve_takeover(&self.active, sender, &self.replaced, false).await;
            if let Some(reply) = request.reply {
                // The receiver may be dropped.
                let _ = reply.send(result);
            }
        }
    }

    /// Starts the tasks that do not depend on the configuration.
    fn start_upkeep(&self) {
        let metrics = Arc::clone(&self.metrics);
        spawn_local(async move {
            let mut ticks = interval(METRICS_UPKEEP);
            loop {
                ticks.tick().await;
                metrics.upkeep();
            }
        });
        spawn_local(async {
            sleep(STARTUP).await;
            if let Err(error) = code_pages::release_startup_code() {
                tracing::debug!(%error, "cannot release the memory of startup code");
            }
        });
        let status = Arc::clone(&self.status);
        spawn_local(watchdog::feed(Arc::clone(&self.manager), move || status.liveness()));
    }

    /// Takes over from another process when requests can be forwarded. Returns false if this process drains
    /// before that. The other one then continues to serve.
    async fn take_over(&mut self, predecessor: Predecessor, sockets: NewSockets) -> bool {
        let mut draining = self.draining.clone();
        tokio::select! {
            biased;
            _ = draining.wait_for(|draining| *draining) => return false,
            () = warm_up(&self.active) => {}
        }
        let applied = self.workers.apply(&self.active, sockets);
        wait_for_workers(applied, "a worker does not accept connections after 5 s").await;
        let from = predecessor.pid();
        let path = self.active.config.state_dir.as_deref().map(takeover::socket_path);
        let reason = match predecessor.replace_at(&path.unwrap_or_default()).await {
            Ok(own) => {
                if own && !self.manager_sockets {
                    self.active.predecessor_has_closed_sockets();
                }
                "the old process has stopped accepting and drains".to_owned()
            }
            // The old process may have ended. If it has not, both accept connections.
            Err(error) => format!("the old process has not confirmed: {error}"),
        };
        let effect = "taken over: this process accepts connections";
        self.report_takeover(from, own_pid(), &reason, effect);
        true
    }

    /// Makes a process that drains give up its admin endpoint. The workers accept already.
    async fn replace_draining(&self, predecessor: Predecessor) {
        let from = predecessor.pid();
        let reason = match predecessor.replace().await {
            Ok(_) => "the old process drains".to_owned(),
            // It may have ended. If it has not, both serve the admin endpoint.
            Err(error) => format!("the old process drains and has not confirmed: {error}"),
        };
        let effect = "started beside it: this process accepts connections";
        self.report_takeover(from, own_pid(), &reason, effect);
    }

    /// What a new process gets that sends this request.
    fn offer(&self, drains: bool, request: Request) -> io::Result<Offer> {
        match hand_over::offer(drains, request) {
            Offered::Sockets => {
                let (sockets, sent) = self.active.duplicate_sockets()?;
                Ok(Offer::Sockets(sockets, sent))
            }
            Offered::AdminSocket => {
                let admin = self.active.admin.duplicate();
                admin.into_iter().collect::<Result<_, _>>().map(Offer::Draining)
            }
            Offered::Nothing => Ok(Offer::Nothing),
        }
    }

    /// Stops accepting, since the process `pid` serves the sockets.
    async fn release_sockets(&mut self, pid: Option<i32>, tasks: &mut Tasks) {
        self.notify_main_process(pid);
        let released = self.workers.release_sockets();
        wait_for_workers(released, "a worker still accepts connections after 5 s").await;
        tasks.release_admin();
        let effect = "handed over: this process drains and ends";
        self.report_takeover(own_pid(), pid, "a new process serves", effect);
    }

    /// Has the service manager keep the sockets of the listeners for the next process.
    fn store_sockets(&self) {
        self.manager.keep(&self.active.stored_sockets());
    }

    fn notify_main_process(&self, pid: Option<i32>) {
        if let Some(pid) = pid {
            // Only the main process may feed the watchdog. The new one does so in half of the interval; if another takeover
            // follows before that, no process would.
            self.manager.notify(&format!("MAINPID={pid}\nWATCHDOG=1"));
        }
    }

    fn report_takeover(&self, from: Option<i32>, to: Option<i32>, reason: &str, effect: &str) {
        self.metrics.events().changed(&Change {
            kind: EventKind::Process,
            upstream: None,
            name: "listening sockets",
            detail: "",
            from: &process_name(from),
            to: &process_name(to),
            reason,
            effect,
            bad: false,
        });
    }

    /// Reads the configuration again and applies it. After an error, the current one stays in use. A retry with the
    /// result of the last reload is not reported.
    async fn reload(&mut self, trigger: &'static str, tasks: &mut Tasks) -> ReloadResult {
        let is_retry = trigger == RETRY;
        if !is_retry {
            self.manager.notify_reloading();
        }
        let mut warnings = Vec::new();
        let outcome = match self.prepare(&mut warnings) {
            Ok(prepared) => self.apply(prepared, tasks).await,
            Err(errors) => ReloadOutcome::Failed { errors },
        };
        let result = ReloadResult::new(trigger, outcome);
        let previous = self.status.last_reload();
        if is_retry && !result.is_event(previous.as_ref()) {
            return result;
        }
        for warning in warnings {
            tracing::warn!("{warning}");
        }
        result.report(previous.as_ref(), self.metrics.events());
        self.metrics.config_reloaded(result.is_ok());
        self.status.record_reload(result.clone());
        // Also after a failure, since the current configuration serves.
        self.manager.notify_ready();
        result
    }

    /// Reads the configuration again and loads what it names. Appends what the log shall warn of.
    fn prepare(&mut self, warnings: &mut Vec<String>) -> Result<PreparedConfig, Vec<String>> {
        let Some(follower) = &mut self.follower else {
            return Err(vec!["there is no configuration file to read again".to_owned()]);
        };
        let CheckedConfig { mut config, warnings: found, mut files } = follower.read()?;
        warnings.extend(found);
        // These settings are fixed until the next start.
        config.workers = self.workers.count();
        config.identity_lane = self.workers.has_identity_lane();
        config.sandbox = self.active.config.sandbox;
        let mut inherited = InheritedSockets::default();
        let sockets = (&mut inherited, AdminBind::Required);
        PreparedConfig::new(
            (config, &mut files),
            Some(&self.active),
            sockets,
            (&self.metrics, &self.memory),
        )
        .map_err(|error| vec![error.to_string()])
    }

    async fn apply(&mut self, prepared: PreparedConfig, tasks: &mut Tasks) -> ReloadOutcome {
        let new_sockets = prepared.next().new_sockets(Some(&self.active), self.workers.count());
        let new_sockets = match new_sockets {
            Ok(new_sockets) => new_sockets,
            Err(error) => return ReloadOutcome::Failed { errors: vec![error.to_string()] },
        };
        // From here on nothing can fail.
        let previous = std::mem::replace(&mut self.active, prepared.activate());
        let changed = changes(&previous.config, &self.active.config);
        raise_descriptor_limit(&self.active.config);
        self.memory.set_limit(client_memory_limit(&self.active.config));
        let log = &self.active.config.log;
        if previous.config.log != *log
            && let Some(follower) = &self.follower
        {
            follower.set_log(log);
        }
        if previous.divert_replaced_sockets(&self.active) {
            sleep(TCP_HANDSHAKE).await;
        }
        // The workers then have the last duplicates of removed sockets. They accept the queued connections
        // before they close them.
        drop(previous);
        tasks.start_new(&self.active);
        tasks.serve_admin(&self.active);
        let applied = self.workers.apply(&self.active, new_sockets);
        wait_for_workers(applied, "a worker has not applied the configuration after 5 s").await;
        // The workers do not use the removed upstreams, listeners and identities any more.
        tasks.end_removed(&self.active);
        self.active.retire_identities();
        self.store_sockets();
        let follower = self.follower.as_ref();
        let needs_restart = follower.map(|follower| follower.needs_restart(&self.active.config));
        ReloadOutcome::Ok { changed, needs_restart: needs_restart.unwrap_or_default() }
    }
}

/// Waits until all workers have executed a command. Logs `warning` and stops waiting after [`WORKER_TIMEOUT`].
async fn wait_for_workers(executed: impl Future<Output = ()>, warning: &str) {
    if timeout(WORKER_TIMEOUT, executed).await.is_err() {
        tracing::warn!("{warning}");
    }
}

/// Waits until every upstream has a usable endpoint, for at most [`WARM_UP`].
async fn warm_up(active: &ActiveConfig) {
    let usable = async {
        while !active.upstreams.iter().all(|upstream| upstream.is_serving()) {
            sleep(WARM_UP_POLL).await;
        }
    };
    if timeout(WARM_UP, usable).await.is_err() {
        tracing::warn!("an upstream has no usable endpoint after 3 s; taking over without one");
    }
}

fn own_pid() -> Option<i32> {
    i32::try_from(std::process::id()).ok()
}

/// The name of a process in events.
fn process_name(pid: Option<i32>) -> String {
    pid.map_or_else(|| "another process".to_owned(), |pid| format!("process {pid}"))
}

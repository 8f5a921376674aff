//! The thread beside the path of requests: it answers operators, keeps the picture of the world
//! true, and follows the configuration.
//!
//! What is configured is changed here and nowhere else, one change at a time, so that no two of
//! them meet. Nothing of it waits for a drain.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::UnixListener;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::{oneshot, watch};
use tokio::task::{AbortHandle, LocalSet, spawn_blocking, spawn_local};
use tokio::time::{MissedTickBehavior, interval, sleep, timeout};
use tracing::dispatcher::{Dispatch, with_default};

use super::StartError;
use super::build::{AdminSocket, Bound, Built, Plan, retire_identities};
use super::facts::Facts;
use super::open_files;
use super::reload::{Attempt, Follower, Outcome, Request, changes};
use super::takeover::{self, Door, Predecessor, Wish};
use super::worker::{Assignment, Order, Part};
use crate::admin::{self, Admin, CONNECTION_TIME, StatusProvider as _, StopReason};
use crate::control::discovery::{self, SharedContext};
use crate::control::{certificates, watchdog};
use crate::net::process::code_pages;
use crate::net::process::inherited_sockets::InheritedSockets;
use crate::net::process::service_manager::ServiceManager;
use crate::net::sockets::unix_listener;
use crate::net::tls::serving::ServingTls;
use crate::observe::Metrics;
use crate::observe::events::{Change, Kind};
use crate::upstream::Upstream;

/// How often the histograms are emptied into their buckets.
const UPKEEP: Duration = Duration::from_secs(1);
/// How often the configuration file is looked at: a change is followed when it has lasted as long.
const LOOK: Duration = Duration::from_secs(1);
/// When the start is over: every file is read and every endpoint has been tried.
const STARTED: Duration = Duration::from_secs(1);
/// How long a handshake may take that has begun with a socket that goes: round trips of a cluster, of
/// which a full machine may make many times as much.
const HANDSHAKE: Duration = Duration::from_millis(250);
/// How long the workers may take to follow before that is worth a warning.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long it may take to open the socket for new processes: a file is made.
const PROMPT: Duration = Duration::from_secs(2);
/// How long a process that takes over waits for an apiserver of every upstream, while its predecessor
/// serves: the default of `connect_timeout`. Then it serves without, as that one would have to.
const WARM_UP: Duration = Duration::from_secs(3);
/// How often it is looked whether there is one.
const WARM_UP_TICK: Duration = Duration::from_millis(10);

/// Everything that the thread needs.
pub struct Control {
    /// What is to serve.
    pub built: Built,
    /// Where everything counts.
    pub metrics: Arc<Metrics>,
    /// Wants to know that we live, and that we reload.
    pub manager: Arc<ServiceManager>,
    /// What the admin endpoint shows.
    pub facts: Arc<Facts>,
    /// What those who look for endpoints need to know.
    pub around: Arc<SharedContext>,
    /// Lead the workers, in their order.
    pub workers: Vec<UnboundedSender<Order>>,
    /// Where the configuration comes from, if it can be read again.
    pub follower: Option<Follower>,
    /// Asks to read it again.
    pub requests: UnboundedReceiver<Request>,
    /// Turns true when everything ends.
    pub draining: watch::Receiver<bool>,
    /// The process whose place we take, and what the workers are to be told when we are ready to.
    pub succession: Option<(Predecessor, Vec<Vec<Part>>)>,
    /// Is told that a new process has taken our place.
    pub replaced: watch::Sender<bool>,
}

impl Control {
    /// Runs until it is told to stop.
    pub fn run(self, stopped: oneshot::Receiver<()>) {
        let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
            Ok(runtime) => runtime,
            Err(error) => {
                tracing::error!(%error, "the control thread has no runtime");
                return;
            }
        };
        let tasks = LocalSet::new();
        tasks.block_on(&runtime, async move {
            tokio::select! {
                () = self.serve() => {}
                _ = stopped => {}
            }
        });
        // Probes end with them, and what was known of the endpoints: that we look no more is no news
        // of theirs.
        with_default(&Dispatch::none(), || drop(tasks));
        // A disk that hangs must not hold up the end.
        runtime.shutdown_background();
    }

    async fn serve(mut self) {
        let metrics = Arc::clone(&self.metrics);
        spawn_local(async move {
            let mut ticks = interval(UPKEEP);
            loop {
                ticks.tick().await;
                metrics.upkeep();
            }
        });
        spawn_local(async {
            sleep(STARTED).await;
            if let Err(error) = code_pages::release_startup_code() {
                tracing::debug!(%error, "the code of the start stays in memory");
            }
        });
        let facts = Arc::clone(&self.facts);
        spawn_local(watchdog::feed(Arc::clone(&self.manager), move || facts.liveness()));
        let mut tasks = Tasks::default();
        tasks.begin(&self.built, &self.facts, &self.around);
        let succeeds = self.succession.is_some();
        if let Some((predecessor, parts)) = self.succession.take()
            && !self.take_over(predecessor, parts).await
        {
            return std::future::pending().await;
        }
        tasks.answer(&self.built.admin, &self.facts);
        tasks.answer_unix(self.built.config.admin.socket.as_ref(), &self.facts);
        // It serves; whether an apiserver can be reached is not what others should wait for.
        self.manager.notify_ready();
        let (wishes, mut asked) = unbounded_channel();
        tasks.open_door(&self.built, &wishes, &self.replaced, succeeds).await;
        let mut look = interval(LOOK);
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut draining = self.draining.clone();
        loop {
            tokio::select! {
                _ = draining.wait_for(|draining| *draining) => break,
                request = self.requests.recv() => {
                    let Some(request) = request else { break };
                    let attempt = self.reload(request.trigger, &mut tasks).await;
                    tasks.open_door(&self.built, &wishes, &self.replaced, false).await;
                    if let Some(reply) = request.reply {
                        // Whoever asked may have gone.
                        let _ = reply.send(attempt);
                    }
                }
                _ = look.tick() => {
                    if self.follower.as_mut().is_some_and(Follower::has_changed) {
                        self.reload("file changed", &mut tasks).await;
                        tasks.open_door(&self.built, &wishes, &self.replaced, false).await;
                    }
                }
                Some(wish) = asked.recv() => match wish {
                    // Whoever asked may have gone.
                    Wish::Sockets(reply) => drop(reply.send(self.built.descriptors())),
                    Wish::Leave { pid, done: _done } => {
                        self.leave(pid, &mut tasks).await;
                        break;
                    }
                },
            }
        }
        // Our copies of the sockets would keep them open.
        self.built.listeners.clear();
        std::future::pending::<()>().await;
    }

    /// Begins to serve in the place of another process, as soon as requests would have somewhere to
    /// go. False if we end before that: then it goes on.
    async fn take_over(&mut self, predecessor: Predecessor, parts: Vec<Vec<Part>>) -> bool {
        let mut draining = self.draining.clone();
        tokio::select! {
            biased;
            _ = draining.wait_for(|draining| *draining) => return false,
            () = warm_up(&self.built) => {}
        }
        let followed = assign(&self.workers, &self.built, parts);
        if timeout(PATIENCE, followed).await.is_err() {
            tracing::warn!("a worker does not accept connections yet after 5 s");
        }
        let from = process(predecessor.pid);
        let reason = match predecessor.leave().await {
            Ok(()) => "it accepts no more, and drains".to_owned(),
            // It may have died meanwhile. If it lives, both accept.
            Err(error) => format!("it did not say that it accepts no more: {error}"),
        };
        self.metrics.events().changed(&Change {
            kind: Kind::Process,
            upstream: None,
            name: "listening sockets",
            detail: "",
            from: &from,
            to: &process(i32::try_from(std::process::id()).ok()),
            reason: &reason,
            effect: "taken over: this process accepts connections",
            bad: false,
        });
        true
    }

    /// Leaves the sockets to another process, which serves.
    async fn leave(&mut self, pid: Option<i32>, tasks: &mut Tasks) {
        if let Some(pid) = pid {
            self.manager.notify(&format!("MAINPID={pid}"));
        }
        let (done, mut left) = unbounded_channel();
        for worker in &self.workers {
            let _ = worker.send(Order::Leave(done.clone()));
        }
        drop(done);
        if timeout(PATIENCE, async { while left.recv().await.is_some() {} }).await.is_err() {
            tracing::warn!("a worker has not left its sockets within 5 s");
        }
        tasks.leave();
        self.metrics.events().changed(&Change {
            kind: Kind::Process,
            upstream: None,
            name: "listening sockets",
            detail: "",
            from: &process(i32::try_from(std::process::id()).ok()),
            to: &process(pid),
            reason: "a new process serves",
            effect: "handed over: this process drains and ends",
            bad: false,
        });
    }

    /// Reads the configuration again and follows it, or stays with what there is.
    async fn reload(&mut self, trigger: &'static str, tasks: &mut Tasks) -> Attempt {
        self.manager.notify_reloading();
        let outcome = match self.plan() {
            Ok(plan) => self.follow(plan, tasks).await,
            Err(errors) => Outcome::Failed { errors },
        };
        let attempt = Attempt::new(trigger, outcome);
        attempt.tell(self.facts.last_reload().as_ref(), self.metrics.events());
        self.metrics.config_reloaded(attempt.is_ok());
        self.facts.reloaded(attempt.clone());
        // Also after one that failed: what serves is ready.
        self.manager.notify_ready();
        attempt
    }

    fn plan(&mut self) -> Result<Plan, Vec<String>> {
        let Some(follower) = &mut self.follower else {
            return Err(vec!["there is no configuration file to read again".to_owned()]);
        };
        let mut config = follower.read()?;
        // What is bound to a number of threads stays as it is until the next start.
        config.workers = self.workers.len();
        let mut nothing = InheritedSockets::default();
        let plan = Plan::new(config, Some(&self.built), &mut nothing, &self.metrics);
        plan.map_err(|error: StartError| vec![error.to_string()])
    }

    async fn follow(&mut self, plan: Plan, tasks: &mut Tasks) -> Outcome {
        let parts = match parts(Some(&self.built), plan.next(), self.workers.len()) {
            Ok(parts) => parts,
            Err(error) => return Outcome::Failed { errors: vec![error.to_string()] },
        };
        // From here on nothing can fail.
        let before = std::mem::replace(&mut self.built, plan.commit());
        let changed = changes(&before.config, &self.built.config);
        open_files::allow(&self.built.config);
        let log = &self.built.config.log;
        if before.config.log != *log
            && let Some(follower) = &self.follower
        {
            follower.set_log(log);
        }
        if before.give_way(&self.built) {
            sleep(HANDSHAKE).await;
        }
        // The last copy of a socket that goes is a worker's, which empties its queue.
        drop(before);
        tasks.begin(&self.built, &self.facts, &self.around);
        tasks.answer(&self.built.admin, &self.facts);
        tasks.answer_unix(self.built.config.admin.socket.as_ref(), &self.facts);
        let followed = assign(&self.workers, &self.built, parts);
        if timeout(PATIENCE, followed).await.is_err() {
            tracing::warn!("a worker has not followed the new configuration within 5 s");
        }
        // Nobody asks for it any more.
        tasks.end(&self.built);
        retire_identities(&self.built);
        let pending = self.follower.as_ref().map(|f| f.needs_restart(&self.built.config));
        Outcome::Ok { changed, needs_restart: pending.unwrap_or_default() }
    }
}

/// What each worker is to be told of the listeners, given what runs.
///
/// # Errors
/// There are no descriptors left.
pub fn parts(now: Option<&Built>, next: &Built, workers: usize) -> std::io::Result<Vec<Vec<Part>>> {
    let has = |bound: &Bound| -> Vec<u64> {
        let known = now.iter().flat_map(|now| &now.listeners).find(|known| known.is(bound));
        known.into_iter().flat_map(|known| &known.places).map(|place| place.id).collect()
    };
    let of = |worker| {
        let listeners = next.listeners.iter();
        listeners.map(|bound| Part::new((worker, workers), bound, &has(bound))).collect()
    };
    (0..workers).map(of).collect()
}

/// Tells the workers; the future ends when all of them have followed.
pub fn assign(
    workers: &[UnboundedSender<Order>],
    built: &Built,
    parts: Vec<Vec<Part>>,
) -> impl Future<Output = ()> + use<> {
    let (done, mut followed) = unbounded_channel();
    let listening = built.listening();
    for (worker, listeners) in workers.iter().zip(parts) {
        // A worker that is gone has panicked, and `/livez` says so.
        let _ = worker.send(Order::Follow(Assignment {
            listeners,
            access: built.config.log.access,
            drain_timeout: built.config.shutdown.drain_timeout,
            listening: Arc::clone(&listening),
            _done: done.clone(),
        }));
    }
    drop(done);
    // It has no value: each worker drops its end when it has followed.
    async move { while followed.recv().await.is_some() {} }
}

/// Waits until every upstream has an apiserver that can be asked, within [`WARM_UP`].
async fn warm_up(built: &Built) {
    let usable = async {
        while !built.upstreams.iter().all(|upstream| upstream.is_usable()) {
            sleep(WARM_UP_TICK).await;
        }
    };
    if timeout(WARM_UP, usable).await.is_err() {
        tracing::warn!("no apiserver is usable after 3 s: taking over without one");
    }
}

/// What a process is called in events.
fn process(pid: Option<i32>) -> String {
    pid.map_or_else(|| "another process".to_owned(), |pid| format!("process {pid}"))
}

/// The tasks that belong to what is configured.
#[derive(Default)]
struct Tasks {
    upstreams: Vec<(Arc<Upstream>, [AbortHandle; 2])>,
    listeners: Vec<(Arc<ServingTls>, AbortHandle)>,
    admin: Option<Answering>,
    /// The answers on the Unix socket of the admin endpoint.
    admin_unix: Option<(PathBuf, AbortHandle)>,
    /// Where a new process asks for the sockets.
    door: Option<(PathBuf, AbortHandle)>,
}

/// The answers to operators on a socket.
struct Answering {
    socket: Arc<AdminSocket>,
    task: AbortHandle,
    /// Told when the endpoint has moved, dropped when somebody else answers there.
    left: Option<oneshot::Sender<StopReason>>,
}

impl Tasks {
    /// Begins those of what is new.
    fn begin(&mut self, built: &Built, facts: &Arc<Facts>, around: &Arc<SharedContext>) {
        facts.show(built);
        around.bound.store(Arc::new(built.listening().to_vec()));
        around.state_dir.store(Arc::new(built.config.state_dir.clone()));
        for upstream in &built.upstreams {
            if !self.upstreams.iter().any(|(known, _)| Arc::ptr_eq(known, upstream)) {
                let certificates = certificates::watch_credentials(Arc::clone(upstream));
                let endpoints = discovery::run(Arc::clone(upstream), Arc::clone(around));
                let tasks = [
                    spawn_local(certificates).abort_handle(),
                    spawn_local(endpoints).abort_handle(),
                ];
                self.upstreams.push((Arc::clone(upstream), tasks));
            }
        }
        for listener in &built.listeners {
            let Some(tls) = listener.plane.tls() else { continue };
            if !self.listeners.iter().any(|(known, _)| Arc::ptr_eq(known, tls)) {
                let (metrics, all) = (&listener.metrics, &listener.upstream.metrics);
                let watch = certificates::watch_serving(
                    Arc::clone(tls),
                    Arc::clone(metrics),
                    Arc::clone(all),
                );
                self.listeners.push((Arc::clone(tls), spawn_local(watch).abort_handle()));
            }
        }
    }

    /// Ends those of what is gone.
    fn end(&mut self, built: &Built) {
        self.upstreams.retain(|(known, tasks)| {
            let stays = built.upstreams.iter().any(|upstream| Arc::ptr_eq(known, upstream));
            if !stays {
                tasks.iter().for_each(AbortHandle::abort);
                discovery::retire(known);
            }
            stays
        });
        self.listeners.retain(|(known, task)| {
            let tls = |bound: &Bound| bound.plane.tls().is_some_and(|tls| Arc::ptr_eq(known, tls));
            let stays = built.listeners.iter().any(tls);
            if !stays {
                task.abort();
            }
            stays
        });
    }

    /// Lets new processes ask for the sockets there from now on, `instead` of one that does. A disk
    /// may hang, and so may whoever answers there: then nobody can ask until that is over, and
    /// everything else goes on.
    async fn open_door(
        &mut self,
        built: &Built,
        wishes: &UnboundedSender<Wish>,
        replaced: &watch::Sender<bool>,
        instead: bool,
    ) {
        let path = built.config.state_dir.as_deref().map(takeover::path);
        // One that could not be opened is tried again.
        let open = self.door.as_ref().filter(|(_, task)| !task.is_finished());
        if open.map(|(path, _)| path) == path.as_ref() {
            return;
        }
        if let Some((_, before)) = self.door.take() {
            before.abort();
        }
        let Some(path) = path else { return };
        let (wishes, replaced, at) = (wishes.clone(), replaced.clone(), path.clone());
        let (tried, mut opening) = oneshot::channel::<()>();
        let task = spawn_local(async move {
            let place = at.clone();
            let opened = spawn_blocking(move || Door::open(&place, instead)).await;
            drop(tried);
            match opened.unwrap_or_else(|error| Err(error.into())) {
                Ok(door) => {
                    door.answer(wishes).await;
                    replaced.send_replace(true);
                }
                // It serves all the same.
                Err(error) => tracing::info!(
                    path = %at.display(),
                    %error,
                    "a new process cannot take over from this one without a gap"
                ),
            }
        });
        self.door = Some((path.clone(), task.abort_handle()));
        if timeout(PROMPT, &mut opening).await.is_err() {
            tracing::warn!(
                path = %path.display(),
                "nothing answers there, the disk or another process: until it does, a new process \
                 cannot take over from this one"
            );
        }
    }

    /// Answers no operators any more, but those who have asked.
    fn leave(&mut self) {
        if let Some(admin) = &mut self.admin {
            admin.left = None;
        }
    }

    /// Answers operators on this Unix socket from now on, if not yet, and on no other. A disk may hang:
    /// that holds up nothing else.
    fn answer_unix(&mut self, path: Option<&PathBuf>, facts: &Arc<Facts>) {
        let open = self.admin_unix.as_ref().filter(|(_, task)| !task.is_finished());
        if open.map(|(path, _)| path) == path {
            return;
        }
        if let Some((_, before)) = self.admin_unix.take() {
            before.abort();
        }
        let Some(path) = path else { return };
        let (at, facts) =
            (path.clone(), Arc::clone(facts) as Arc<dyn crate::admin::StatusProvider>);
        let task = spawn_local(async move {
            let place = at.clone();
            let opened = spawn_blocking(move || unix_listener::listen(&place)).await;
            let listener = opened.unwrap_or_else(|error| Err(error.into()));
            match listener.and_then(UnixListener::from_std) {
                Ok(listener) => {
                    tracing::info!(path = %at.display(), "admin socket listens");
                    admin::serve_unix(listener, facts).await;
                }
                Err(error) => tracing::error!(
                    path = %at.display(),
                    %error,
                    "admin.socket cannot be opened: probes that use it fail; is its directory writable?"
                ),
            }
        });
        self.admin_unix = Some((path.clone(), task.abort_handle()));
    }

    /// Answers operators here from now on, if not yet. Where they asked before they are still
    /// answered for as long as an answer may take.
    fn answer(&mut self, socket: &Arc<AdminSocket>, facts: &Arc<Facts>) {
        if self.admin.as_ref().is_some_and(|known| Arc::ptr_eq(&known.socket, socket)) {
            return;
        }
        let admin = match socket.socket.try_clone().and_then(Admin::from_std) {
            Ok(admin) => admin,
            Err(error) => {
                tracing::error!(%error, "the admin endpoint does not work");
                return;
            }
        };
        let facts: Arc<dyn crate::admin::StatusProvider> = Arc::clone(facts) as _;
        let (sender, left) = oneshot::channel();
        let left = async { left.await.unwrap_or(StopReason::TakenOver) };
        let task = spawn_local(admin.serve(facts, left)).abort_handle();
        let now = Answering { socket: Arc::clone(socket), task, left: Some(sender) };
        if let Some(Answering { socket, task, left }) = self.admin.replace(now) {
            // The last copy is the task's, which empties its queue.
            drop(socket);
            if let Some(left) = left {
                // A task that has ended asks nobody.
                let _ = left.send(StopReason::Moved);
            }
            spawn_local(async move {
                sleep(CONNECTION_TIME).await;
                task.abort();
            });
        }
    }
}

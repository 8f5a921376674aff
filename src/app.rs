//! The life of the process: start, reload, takeover and drain.
//!
//! 1. [`App::bind`] loads every file and binds every address ([`active`]; sockets in [`sockets`],
//!    listeners in [`listener`]). All errors of the configuration are found here. The bound addresses are
//!    known afterwards, so tests bind port 0. With `--take-over` the sockets come from the running process
//!    ([`takeover`]). Beside a process that drains, the addresses of the listeners are free.
//! 2. [`App::start`] starts the [`workers`] and the control thread ([`control`]).
//! 3. Each [`worker`] applies the configuration that it receives. The first configuration is applied like
//!    every later one.
//! 4. A reload ([`reload`]) prepares a new configuration in the same way, reuses the resources in use, and
//!    sends it to the workers.
//! 5. When another process takes over, the workers release their sockets, and this process drains.
//! 6. [`Running::stop`] drains: the workers close their listening sockets ([`drain_signal`]), and end when their
//!    connections have ended or at the drain timeout.
//!
//! ```text
//! control thread   discovery, /readyz probers, certificates, admin endpoint, reloads, takeover
//!   │ commands
//!   ▼
//! worker threads   listeners -> requests -> pools. Each worker has its own event loop and connections;
//!                  all share the endpoint sets (arc-swap) and atomic counters
//! ```

pub mod active;
mod admin_socket;
mod bind;
mod control;
mod descriptors;
pub mod drain_signal;
mod fault_reports;
pub mod listener;
pub mod reload;
pub mod sandbox;
pub mod shared_sockets;
mod sockets;
mod start_error;
mod status;
pub mod takeover;
pub mod worker;
mod workers;

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use jackstay_core::admission::MemoryBudget;
use jackstay_sys::process::service_manager::ServiceManager;
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tokio::sync::{oneshot, watch};

use self::active::ActiveConfig;
use self::control::ControlThread;
use self::drain_signal::DrainSignal;
use self::reload::{ConfigFollower, ConfigSource, ReloadRequest, ReloadResult};
use self::sandbox::ProcessSandbox;
use self::status::ProcessStatus;
use self::takeover::Predecessor;
use self::workers::WorkerThreads;
use crate::control::discovery::SharedContext;
use crate::observe::Metrics;

pub use self::sockets::SocketId;
pub use self::start_error::StartError;

/// A process with all files loaded and all addresses bound, before it serves.
pub struct App {
    active: ActiveConfig,
    metrics: Arc<Metrics>,
    memory: Arc<MemoryBudget>,
    context: Arc<SharedContext>,
    follower: Option<ConfigFollower>,
    predecessor: Option<Predecessor>,
    /// Whether sockets may come from a service manager.
    manager_sockets: bool,
    /// The addresses of inherited sockets that no listener uses.
    unused_sockets: Vec<SocketAddr>,
    /// Whether the takeover socket belongs to another process that this one replaces.
    replaces: bool,
    sandbox: Option<Arc<ProcessSandbox>>,
}

impl App {
    /// Makes the configuration reloadable: on request, and when its file changes.
    #[must_use]
    pub fn with_config_source(mut self, source: ConfigSource) -> Self {
        self.follower = Some(ConfigFollower::new(source, &self.active.config));
        self
    }

    /// Shows the restrictions of this process in the status.
    #[must_use]
    pub fn with_sandbox(mut self, sandbox: Arc<ProcessSandbox>) -> Self {
        self.sandbox = Some(sandbox);
        self
    }

    /// The addresses that a listener is bound to.
    pub fn listener_addresses(&self, name: &str) -> Vec<SocketAddr> {
        let mut listeners = self.active.listeners.iter();
        let listener = listeners.find(|listener| listener.name() == name);
        listener.map(|listener| listener.addresses()).unwrap_or_default()
    }

    /// The address of the admin endpoint.
    ///
    /// # Errors
    /// The kernel does not return the address.
    pub fn admin_address(&self) -> io::Result<SocketAddr> {
        self.active.admin.address()
    }

    /// The account of the memory that clients make the process hold.
    pub fn memory(&self) -> Arc<MemoryBudget> {
        Arc::clone(&self.memory)
    }

    /// Starts all threads, without a service manager.
    ///
    /// # Errors
    /// A thread cannot be created.
    pub fn start(self) -> Result<Running, StartError> {
        self.start_under(Arc::default())
    }

    /// Starts all threads. The service manager is notified of readiness and reloads, and its
    /// watchdog is fed.
    ///
    /// # Errors
    /// A thread cannot be created.
    #[expect(
        clippy::too_many_lines,
        reason = "takes the application apart and starts each part once"
    )]
    pub fn start_under(self, manager: Arc<ServiceManager>) -> Result<Running, StartError> {
        let Self {
            active,
            metrics,
            memory,
            context,
            follower,
            predecessor,
            manager_sockets,
            unused_sockets,
            replaces,
            sandbox,
        } = self;
        let (drain, draining) = watch::channel(false);
        let (close, closed) = watch::channel(false);
        let (force, forced) = watch::channel(false);
        let (replaced, is_replaced) = watch::channel(false);
        let restarts = Arc::new(AtomicBool::new(false));
        let (reload, requests) = unbounded_channel();
        let (stop, stopped) = oneshot::channel();
        let WorkerThreads { commands, threads, liveness } = {
            let config = &active.config;
            let drain = DrainSignal::new(draining.clone(), closed);
            workers::start(config.workers, config.identity_lane, &metrics, &drain, &forced)?
        };

        let sockets = active.new_sockets(None, commands.count())?;
        let (sockets, predecessor) = match predecessor {
            // No process accepts, so the workers do at once.
            Some(predecessor) if predecessor.is_draining() => {
                (sockets, Some((predecessor, Vec::new())))
            }
            // The old process accepts until this one can serve. The control thread then sends the
            // sockets to the workers.
            Some(predecessor) => (Vec::new(), Some((predecessor, sockets))),
            None => (sockets, None),
        };
        // Not awaited: connections wait in the accept queues until the workers have applied it.
        drop(commands.apply(&active, sockets));
        log_addresses(&active);

        let file = follower.as_ref().map(|follower| follower.file().to_owned());
        let status = ProcessStatus::new(
            &active,
            (&metrics, &memory),
            liveness,
            draining.clone(),
            &context,
            file,
        )
        .with_sandbox(sandbox);
        let control = ControlThread {
            active,
            metrics,
            memory,
            manager,
            status: Arc::new(status),
            context,
            workers: commands,
            follower,
            requests,
            draining,
            restarts: Arc::clone(&restarts),
            sockets_closed: close,
            predecessor,
            manager_sockets,
            unused_sockets,
            replaces,
            replaced,
        };
        let control = std::thread::Builder::new()
            .name("control".into())
            .spawn(move || control.run(stopped))?;
        Ok(Running {
            drain,
            restarts,
            force: Arc::new(force),
            reload,
            replaced: is_replaced,
            stop: Some(stop),
            workers: threads,
            control: Some(control),
        })
    }
}

fn log_addresses(active: &ActiveConfig) {
    if active.admin.socket().is_some()
        && let Ok(address) = active.admin.address()
    {
        tracing::info!(%address, "the admin endpoint listens");
    }
    for listener in &active.listeners {
        tracing::info!(
            listener = listener.name(),
            bind = ?listener.addresses(),
            upstream = listener.config.upstream,
            "listening"
        );
    }
}

/// A process that serves. Dropping it drains it.
pub struct Running {
    drain: watch::Sender<bool>,
    restarts: Arc<AtomicBool>,
    force: Arc<watch::Sender<bool>>,
    reload: UnboundedSender<ReloadRequest>,
    replaced: watch::Receiver<bool>,
    stop: Option<oneshot::Sender<()>>,
    workers: Vec<JoinHandle<()>>,
    control: Option<JoinHandle<()>>,
}

impl Running {
    /// Requests a reload. `trigger` is the cause, for the log. The receiver gets the result and may be
    /// dropped. It fails if the control thread has ended.
    pub fn reload(&self, trigger: &'static str) -> oneshot::Receiver<ReloadResult> {
        let (reply, result) = oneshot::channel();
        let _ = self.reload.send(ReloadRequest { trigger, reply: Some(reply) });
        result
    }

    /// Waits until a new process has taken over. This process then accepts no more connections, and the
    /// caller should call [`Running::stop`].
    pub async fn replaced(&self) {
        // An error means that the control thread has ended, so no process can take over any more.
        if self.replaced.clone().wait_for(|replaced| *replaced).await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// Starts the drain: stops accepting, then sends GOAWAY to clients and ends watches.
    pub fn drain(&self) {
        self.drain.send_replace(true);
    }

    /// Makes the drain that follows the one of a restart: the service manager starts another process when this one has
    /// ended, and keeps the listening sockets meanwhile. So new connections wait in the accept queues, and the drain is
    /// short. Without a service manager that keeps them this changes nothing.
    pub fn restarts(&self) {
        self.restarts.store(true, Ordering::Release);
    }

    /// Returns a function that closes all connections at once. It also works while [`Running::stop`] waits
    /// for the drain, which it ends.
    pub fn force_close(&self) -> impl Fn() + use<> {
        let force = Arc::clone(&self.force);
        move || {
            force.send_replace(true);
        }
    }

    /// Drains, waits until the workers have ended, at the latest at the drain timeout, and stops the control
    /// thread. Returns false if a thread has panicked.
    pub fn stop(mut self) -> bool {
        self.end()
    }

    fn end(&mut self) -> bool {
        self.drain();
        let workers = self.workers.drain(..).all(|worker| worker.join().is_ok());
        drop(self.stop.take());
        let control = self.control.take().is_none_or(|control| control.join().is_ok());
        workers && control
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.end();
    }
}

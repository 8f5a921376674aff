//! Puts the parts together: loads, binds everything, starts the threads, drains them.
//!
//! ```text
//! control thread   admin, /readyz probers, certificates, metrics upkeep
//! worker threads   listeners -> requests -> pools; one event loop each, nothing shared on the path
//!                  of a request but the endpoints (arc-swap) and atomic counters
//! ```
//!
//! Everything that can fail fails in [`App::bind`], before anything is served, and the bound
//! addresses are known afterwards: tests bind port 0. A reload goes the same way ([`build`]), from
//! what runs instead of from nothing. So does a new process that takes the place of a running one
//! ([`takeover`]), from that one's sockets.

mod build;
mod control;
mod facts;
mod open_files;
pub mod reload;
mod sockets;
mod takeover;
mod worker;

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::thread::JoinHandle;

use arc_swap::ArcSwap;
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tokio::sync::{oneshot, watch};

use crate::config::Config;
use crate::control::discovery::SharedContext;
use crate::control::discovery::dns::ResolverFiles;
use crate::net::process::inherited_sockets::InheritedSockets;
use crate::net::process::service_manager::ServiceManager;
use crate::net::tls::file_error::TlsFileError;
use crate::observe::{LivenessMonitor, Metrics};
use crate::proxy::request_body;
use build::{Built, Plan};
use control::Control;
use facts::Facts;
use reload::{Attempt, Follower, Origin, Request};
use takeover::{Predecessor, TakeOverError};

/// Why the program could not start.
#[derive(Debug)]
pub enum StartError {
    /// A certificate, key or CA bundle.
    Tls(TlsFileError),
    /// No address of a listener, or not the admin's, could be bound.
    Bind {
        /// What was to listen there.
        what: String,
        /// Where.
        address: SocketAddr,
        /// Why not.
        error: io::Error,
    },
    /// A server name that cannot be verified.
    ServerName(String),
    /// This process may not do what a transparent listener needs.
    Capability {
        /// Which listener.
        listener: String,
        /// What was tried.
        what: &'static str,
        /// What the kernel said.
        error: io::Error,
    },
    /// A socket was handed over that is transparent, and the listener is not; or the other way.
    OtherKind {
        /// Which listener.
        listener: String,
        /// Where.
        address: SocketAddr,
        /// What the configuration wants.
        transparent: bool,
    },
    /// Another process does not hand its sockets over.
    TakeOver(TakeOverError),
    /// A thread or a runtime.
    System(io::Error),
}

impl fmt::Display for StartError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tls(error) => error.fmt(f),
            Self::Bind { what, address, error } if error.kind() == io::ErrorKind::AddrInUse => {
                write!(
                    f,
                    "{what} cannot listen on {address}: {error}; another process listens there \
                     (`ss -ltnp 'sport = :{}'` shows which; if it is a jackstay that this one should \
                     replace: `--take-over`)",
                    address.port()
                )
            }
            Self::Bind { what, address, error }
                if error.kind() == io::ErrorKind::AddrNotAvailable =>
            {
                write!(
                    f,
                    "{what} cannot listen on {address}: {error}; this host does not have the \
                     address (`ip addr` shows those it has), and with `freebind: true` a listener \
                     need not wait for it"
                )
            }
            Self::Bind { what, address, error } => {
                write!(f, "{what} cannot listen on {address}: {error}")
            }
            Self::ServerName(error) => f.write_str(error),
            Self::Capability { listener, what, error } => write!(
                f,
                "listener `{listener}` is transparent, and for that this process may not {what}: \
                 {error}; give it CAP_NET_ADMIN (systemd: AmbientCapabilities=CAP_NET_ADMIN; a \
                 pod: securityContext.capabilities.add: [NET_ADMIN]), or write `transparent: false`"
            ),
            Self::OtherKind { listener, address, transparent } => write!(
                f,
                "listener `{listener}` says `transparent: {transparent}`, and the socket on {address} \
                 that was handed over is of the other kind; sockets change hands as they are: change \
                 that first (the process that runs does so on SIGHUP; a unit: Transparent={}), or stop \
                 what has the socket and start anew",
                if *transparent { "yes" } else { "no" }
            ),
            Self::TakeOver(error) => error.fmt(f),
            Self::System(error) => write!(f, "cannot start: {error}"),
        }
    }
}

impl std::error::Error for StartError {}

impl StartError {
    /// Whether the configuration is to blame, rather than the machine.
    pub fn is_configuration(&self) -> bool {
        matches!(self, Self::Tls(_) | Self::ServerName(_))
    }
}

/// Everything loaded and bound, nothing served yet.
pub struct App {
    built: Built,
    metrics: Arc<Metrics>,
    around: Arc<SharedContext>,
    follower: Option<Follower>,
    predecessor: Option<Predecessor>,
}

impl App {
    /// Loads every file and binds every address.
    ///
    /// # Errors
    /// The first thing that cannot be.
    pub fn bind(config: Config) -> Result<Self, StartError> {
        Self::bind_with(config, InheritedSockets::default())
    }

    /// Loads every file, uses the sockets that were inherited, and binds every other address.
    ///
    /// # Errors
    /// The first thing that cannot be.
    pub fn bind_with(config: Config, inherited: InheritedSockets) -> Result<Self, StartError> {
        Self::build(config, inherited, None)
    }

    /// As [`App::bind_with`], with the sockets of the process that runs with this `state_dir`. It goes
    /// on as if nothing had happened until this one serves, and drains then. If there is none, this
    /// is a start like any other.
    ///
    /// # Errors
    /// The first thing that cannot be. The other process goes on then.
    pub fn take_over(config: Config, mut inherited: InheritedSockets) -> Result<Self, StartError> {
        let path = config.state_dir.as_deref().map(takeover::path);
        let asked = path.as_deref().map(takeover::ask).transpose();
        let Some((predecessor, sockets)) = asked.map_err(StartError::TakeOver)?.flatten() else {
            match path {
                Some(path) => {
                    tracing::info!(path = %path.display(), "there is no process to take over from");
                }
                None => {
                    tracing::warn!("state_dir is \"\": there is nowhere to ask a running process");
                }
            }
            return Self::build(config, inherited, None);
        };
        let pid = predecessor.pid;
        tracing::info!(pid, sockets = sockets.len(), "taking over from a running process");
        inherited.append(sockets);
        Self::build(config, inherited, Some(predecessor))
    }

    fn build(
        config: Config,
        mut inherited: InheritedSockets,
        predecessor: Option<Predecessor>,
    ) -> Result<Self, StartError> {
        open_files::allow(&config);
        let metrics = Metrics::new();
        let built = Plan::new(config, None, &mut inherited, &metrics)?.commit();
        if !inherited.is_empty() {
            let addresses = inherited.addresses();
            tracing::warn!(?addresses, "sockets that no listener wants are closed");
        }
        let around = Arc::new(SharedContext {
            bound: ArcSwap::from_pointee(built.listening().to_vec()),
            state_dir: ArcSwap::from_pointee(built.config.state_dir.clone()),
            liveness: LivenessMonitor::start().map_err(StartError::System)?,
            system: ResolverFiles::default(),
        });
        Ok(Self { built, metrics, around, follower: None, predecessor })
    }

    /// Follows the configuration when it changes there.
    #[must_use]
    pub fn following(mut self, origin: Origin) -> Self {
        self.follower = Some(Follower::new(origin, &self.built.config));
        self
    }

    /// Where a listener listens.
    pub fn listener_addresses(&self, name: &str) -> Vec<SocketAddr> {
        let listener = self.built.listeners.iter().find(|bound| bound.config.name == name);
        listener.map(build::Bound::addresses).unwrap_or_default()
    }

    /// Where the admin endpoint listens.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn admin_address(&self) -> io::Result<SocketAddr> {
        self.built.admin.socket.local_addr()
    }

    /// Starts all threads; no service manager watches.
    ///
    /// # Errors
    /// A thread or a runtime could not be made.
    pub fn start(self) -> Result<Running, StartError> {
        self.start_under(Arc::default())
    }

    /// Starts all threads, feeds the watchdog of a service manager and tells it of reloads.
    ///
    /// # Errors
    /// A thread or a runtime could not be made.
    pub fn start_under(self, manager: Arc<ServiceManager>) -> Result<Running, StartError> {
        let Self { built, metrics, around, follower, predecessor } = self;
        let (drain, draining) = watch::channel(false);
        let (cut, is_cut) = watch::channel(false);
        let (replaced, is_replaced) = watch::channel(false);
        let mut workers = Vec::new();
        let mut liveness = Vec::new();
        let mut leads = Vec::new();
        let count = built.config.workers;
        let bodies = request_body::budget(&metrics);
        for index in 0..count {
            let (setup, lead) = worker::Setup::new(
                index,
                &metrics,
                &bodies,
                count,
                draining.clone(),
                is_cut.clone(),
            );
            liveness.push(setup.liveness.clone());
            leads.push(lead);
            let thread = std::thread::Builder::new().name(format!("worker-{index}"));
            workers.push(thread.spawn(move || setup.run()).map_err(StartError::System)?);
        }
        let mut parts = control::parts(None, &built, count).map_err(StartError::System)?;
        let succession = match predecessor {
            Some(predecessor) => {
                // First everything but the sockets: it accepts until we are ready to.
                let without = control::parts(Some(&built), &built, count);
                let all = std::mem::replace(&mut parts, without.map_err(StartError::System)?);
                Some((predecessor, all))
            }
            None => None,
        };
        // They follow in their own time; connections wait in the queues of the sockets.
        drop(control::assign(&leads, &built, parts));
        if let Ok(address) = built.admin.socket.local_addr() {
            tracing::info!(%address, "the admin endpoint listens");
        }
        for listener in &built.listeners {
            tracing::info!(
                listener = listener.config.name,
                bind = ?listener.addresses(),
                upstream = listener.config.upstream,
                "listening"
            );
        }
        let file = follower.as_ref().map(|follower| follower.file().to_owned());
        let facts =
            Arc::new(Facts::new(&built, &metrics, liveness, draining.clone(), &around, file));
        let (stop, stopped) = oneshot::channel();
        let (reload, requests) = unbounded_channel();
        let control = Control {
            built,
            metrics,
            manager,
            facts,
            around,
            workers: leads,
            follower,
            requests,
            draining,
            succession,
            replaced,
        };
        let control = std::thread::Builder::new()
            .name("control".into())
            .spawn(move || control.run(stopped))
            .map_err(StartError::System)?;
        Ok(Running {
            drain,
            cut: Arc::new(cut),
            reload,
            replaced: is_replaced,
            stop: Some(stop),
            workers,
            control: Some(control),
        })
    }
}

/// A started program; dropping it drains it.
pub struct Running {
    drain: watch::Sender<bool>,
    cut: Arc<watch::Sender<bool>>,
    reload: UnboundedSender<Request>,
    replaced: watch::Receiver<bool>,
    stop: Option<oneshot::Sender<()>>,
    workers: Vec<JoinHandle<()>>,
    control: Option<JoinHandle<()>>,
}

impl Running {
    /// Reads the configuration again and follows it. `trigger` says why, for the log. The receiver
    /// hears what came of it; nobody need listen.
    pub fn reload(&self, trigger: &'static str) -> oneshot::Receiver<Attempt> {
        let (reply, heard) = oneshot::channel();
        // A control thread that is gone has panicked, and the receiver says so.
        let _ = self.reload.send(Request { trigger, reply: Some(reply) });
        heard
    }

    /// Waits until a new process has taken our place: nothing is accepted here any more, and what
    /// is left to do is [`Running::stop`].
    pub async fn replaced(&self) {
        // If the control thread is gone, nobody will.
        if self.replaced.clone().wait_for(|replaced| *replaced).await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// Begins the drain: stops accepting, tells clients, ends watches.
    pub fn drain(&self) {
        self.drain.send_replace(true);
    }

    /// Cuts a drain short, also while [`Running::stop`] waits for it: what is left is closed.
    pub fn cutter(&self) -> impl Fn() + use<> {
        let cut = Arc::clone(&self.cut);
        move || {
            cut.send_replace(true);
        }
    }

    /// Drains, waits for the workers (they bound their time themselves) and stops the rest.
    /// False if a worker panicked.
    pub fn stop(mut self) -> bool {
        self.end()
    }

    fn end(&mut self) -> bool {
        self.drain();
        let healthy = self.workers.drain(..).all(|worker| worker.join().is_ok());
        drop(self.stop.take());
        let control = self.control.take().is_none_or(|control| control.join().is_ok());
        healthy && control
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.end();
    }
}

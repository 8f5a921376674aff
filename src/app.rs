//! Puts the parts together: loads, binds everything, starts the threads, drains them.
//!
//! ```text
//! control thread   admin, /readyz probers, certificates, metrics upkeep
//! worker threads   listeners -> requests -> pools; one event loop each, nothing shared on the path
//!                  of a request but the endpoints (arc-swap) and atomic counters
//! ```
//!
//! Everything that can fail fails in [`App::bind`], before anything is served, and the bound
//! addresses are known afterwards: tests bind port 0.

mod facts;
mod worker;

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use arc_swap::ArcSwap;
use tokio::sync::{oneshot, watch};
use tokio::task::LocalSet;

use crate::admin::{Admin, Facts as _};
use crate::config::{self, CertPaths, Config};
use crate::control::discovery::dns::System;
use crate::control::discovery::{self, Surroundings};
use crate::control::heartbeat::Heartbeats;
use crate::control::{certificates, members, watchdog};
use crate::net::notify::ServiceManager;
use crate::net::outgoing::Outgoing;
use crate::net::serving::ServingTls;
use crate::net::socket::{self, Listening};
use crate::net::tls_files::TlsFileError;
use crate::observe::{ListenerMetrics, Metrics};
use crate::upstream::credentials::Credentials;
use crate::upstream::pool::Upstream;
use facts::Facts;

/// How often the histograms are emptied into their buckets.
const UPKEEP: Duration = Duration::from_secs(1);

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
                     (`ss -ltnp 'sport = :{}'` shows which)",
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

/// A listener that is bound.
#[derive(Debug)]
struct BoundListener {
    config: config::Listener,
    addresses: Vec<SocketAddr>,
    /// One set of sockets for each worker.
    sockets: Vec<Vec<std::net::TcpListener>>,
    metrics: Arc<ListenerMetrics>,
    upstream: Arc<Upstream>,
    plane: Plane,
}

/// What a listener has of its own, by its mode.
#[derive(Debug, Clone)]
enum Plane {
    /// L7.
    Terminate {
        config: config::Terminate,
        tls: Arc<ServingTls>,
        /// Which slots of the upstream's credentials it may use.
        slots: Vec<usize>,
    },
    /// L4.
    Passthrough {
        config: config::Passthrough,
        /// The upstreams of its routes, in their order.
        routes: Vec<Arc<Upstream>>,
        /// Upstreams by original destination, in their order.
        destinations: Vec<(Vec<config::Destination>, Arc<Upstream>)>,
    },
}

/// Everything loaded and bound, nothing served yet.
pub struct App {
    config: Arc<Config>,
    metrics: Arc<Metrics>,
    upstreams: Vec<Arc<Upstream>>,
    listeners: Vec<BoundListener>,
    admin: std::net::TcpListener,
    around: Arc<Surroundings>,
}

impl App {
    /// Loads every file and binds every address.
    ///
    /// # Errors
    /// The first thing that cannot be.
    pub fn bind(config: Config) -> Result<Self, StartError> {
        let metrics = Metrics::new();
        let outgoing = outgoing(&config)?;
        let upstreams = config
            .upstreams
            .iter()
            .map(|upstream| load_upstream(upstream, &config, &metrics, &outgoing).map(Arc::new))
            .collect::<Result<Vec<_>, _>>()?;
        let listeners = config
            .listeners
            .iter()
            .map(|listener| bind_listener(listener, &upstreams, config.workers, &metrics))
            .collect::<Result<Vec<_>, _>>()?;
        let address = config.admin.bind;
        let admin = socket::listen(address, false).map_err(|error| StartError::Bind {
            what: "admin".into(),
            address,
            error,
        })?;
        let mut bound: Vec<_> = listeners.iter().flat_map(|l| l.addresses.clone()).collect();
        bound.extend(admin.local_addr());
        let around = Arc::new(Surroundings {
            bound: ArcSwap::from_pointee(bound),
            state_dir: ArcSwap::from_pointee(config.state_dir.clone()),
            heartbeats: Heartbeats::start().map_err(StartError::System)?,
            system: System::default(),
        });
        Ok(Self { config: Arc::new(config), metrics, upstreams, listeners, admin, around })
    }

    /// Where a listener listens.
    pub fn listener_addresses(&self, name: &str) -> &[SocketAddr] {
        self.listeners
            .iter()
            .find(|listener| listener.config.name == name)
            .map_or(&[], |listener| &listener.addresses)
    }

    /// Where the admin endpoint listens.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn admin_address(&self) -> io::Result<SocketAddr> {
        self.admin.local_addr()
    }

    /// Starts all threads; no service manager watches.
    ///
    /// # Errors
    /// A thread or a runtime could not be made.
    pub fn start(self) -> Result<Running, StartError> {
        self.start_under(Arc::default())
    }

    /// Starts all threads, and feeds the watchdog of a service manager.
    ///
    /// # Errors
    /// A thread or a runtime could not be made.
    pub fn start_under(self, manager: Arc<ServiceManager>) -> Result<Running, StartError> {
        let (drain, draining) = watch::channel(false);
        let mut workers = Vec::new();
        let mut pulses = Vec::new();
        let mut listeners = self.listeners;
        let listening: Arc<[SocketAddr]> = listeners
            .iter()
            .flat_map(|listener| listener.addresses.iter().copied())
            .chain(self.admin.local_addr())
            .collect();
        for index in 0..self.config.workers {
            let setup = worker::Setup::new(
                index,
                &self.config,
                &self.metrics,
                &mut listeners,
                &listening,
                draining.clone(),
            );
            pulses.push(setup.pulse());
            let thread = std::thread::Builder::new().name(format!("worker-{index}"));
            workers.push(thread.spawn(move || setup.run()).map_err(StartError::System)?);
        }
        let facts = Arc::new(Facts::new(
            &self.config,
            &self.metrics,
            &self.upstreams,
            &listeners,
            pulses,
            draining,
            &self.around,
        ));
        if let Ok(address) = self.admin.local_addr() {
            tracing::info!(%address, "the admin endpoint listens");
        }
        for listener in &listeners {
            tracing::info!(
                listener = listener.config.name,
                bind = ?listener.addresses,
                upstream = listener.config.upstream,
                "listening"
            );
        }
        let (stop, stopped) = oneshot::channel();
        let control = Control {
            admin: self.admin,
            manager,
            facts,
            metrics: self.metrics,
            upstreams: self.upstreams,
            around: self.around,
            serving: listeners
                .into_iter()
                .filter_map(|listener| match listener.plane {
                    Plane::Terminate { tls, .. } => {
                        Some((listener.config.name, tls, listener.metrics))
                    }
                    Plane::Passthrough { .. } => None,
                })
                .collect(),
        };
        let control = std::thread::Builder::new()
            .name("control".into())
            .spawn(move || control.run(stopped))
            .map_err(StartError::System)?;
        Ok(Running { drain, stop: Some(stop), workers, control: Some(control) })
    }
}

/// A started program; dropping it drains it.
pub struct Running {
    drain: watch::Sender<bool>,
    stop: Option<oneshot::Sender<()>>,
    workers: Vec<JoinHandle<()>>,
    control: Option<JoinHandle<()>>,
}

impl Running {
    /// Begins the drain: stops accepting, tells clients, ends watches.
    pub fn drain(&self) {
        self.drain.send_replace(true);
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

/// What runs beside the path of requests.
struct Control {
    admin: std::net::TcpListener,
    manager: Arc<ServiceManager>,
    facts: Arc<Facts>,
    metrics: Arc<Metrics>,
    upstreams: Vec<Arc<Upstream>>,
    around: Arc<Surroundings>,
    serving: Vec<(String, Arc<ServingTls>, Arc<ListenerMetrics>)>,
}

impl Control {
    fn run(self, stopped: oneshot::Receiver<()>) {
        let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
            Ok(runtime) => runtime,
            Err(error) => {
                tracing::error!(%error, "the control thread has no runtime");
                return;
            }
        };
        LocalSet::new().block_on(&runtime, async move {
            for upstream in &self.upstreams {
                tokio::task::spawn_local(certificates::watch_credentials(Arc::clone(upstream)));
                tokio::task::spawn_local(discovery::keep(
                    Arc::clone(upstream),
                    Arc::clone(&self.around),
                ));
            }
            for (name, tls, metrics) in self.serving {
                tokio::task::spawn_local(certificates::watch_serving(name, tls, metrics));
            }
            let facts = Arc::clone(&self.facts);
            tokio::task::spawn_local(watchdog::feed(self.manager, move || facts.live()));
            let metrics = self.metrics;
            tokio::task::spawn_local(async move {
                let mut ticks = tokio::time::interval(UPKEEP);
                loop {
                    ticks.tick().await;
                    metrics.upkeep();
                }
            });
            match Admin::from_std(self.admin) {
                Ok(admin) => tokio::select! {
                    () = admin.serve(self.facts) => {}
                    _ = stopped => {}
                },
                Err(error) => {
                    tracing::error!(%error, "the admin endpoint does not work");
                    let _ = stopped.await;
                }
            }
        });
        // A disk that hangs must not hold up the end.
        runtime.shutdown_background();
    }
}

/// How connections to endpoints leave: marked, if a listener is transparent.
fn outgoing(config: &Config) -> Result<Arc<Outgoing>, StartError> {
    let Some(listener) = config.listeners.iter().find(|listener| listener.is_transparent()) else {
        return Ok(Arc::default());
    };
    Outgoing::marked(config.mark).map(Arc::new).map_err(|error| StartError::Capability {
        listener: listener.name.clone(),
        what: "mark its connections (SO_MARK)",
        error,
    })
}

fn load_upstream(
    upstream: &config::Upstream,
    config: &Config,
    metrics: &Arc<Metrics>,
    outgoing: &Arc<Outgoing>,
) -> Result<Upstream, StartError> {
    let credentials =
        Credentials::load(upstream, &identities_of(upstream, config)).map_err(StartError::Tls)?;
    let mut loaded = Upstream::new(upstream.clone(), credentials, metrics);
    loaded.outgoing = Arc::clone(outgoing);
    match members::place(&loaded, &members::seeds(upstream)).refused.pop() {
        None => Ok(loaded),
        Some(why) => Err(StartError::ServerName(why)),
    }
}

/// The identities of all listeners of an upstream, each once, and the probe's own.
fn identities_of(upstream: &config::Upstream, config: &Config) -> Vec<CertPaths> {
    let mut all: Vec<CertPaths> = Vec::new();
    let listeners = config.listeners.iter().filter(|l| l.upstream == upstream.name);
    let terminating = listeners.filter_map(|l| l.terminate());
    let configured = terminating.flat_map(|t| &t.identities).chain(&upstream.health.readyz.cert);
    for paths in configured {
        if !all.contains(paths) {
            all.push(paths.clone());
        }
    }
    all
}

fn bind_listener(
    listener: &config::Listener,
    upstreams: &[Arc<Upstream>],
    workers: usize,
    metrics: &Arc<Metrics>,
) -> Result<BoundListener, StartError> {
    let find = |name: &str| {
        let found = upstreams.iter().find(|upstream| *upstream.name == *name).map(Arc::clone);
        found.ok_or_else(|| StartError::ServerName(format!("upstream `{name}` does not exist")))
    };
    let upstream = find(&listener.upstream)?;
    let plane = match &listener.mode {
        config::Mode::Terminate(config) => Plane::Terminate {
            tls: Arc::new(ServingTls::load(config).map_err(StartError::Tls)?),
            slots: slots_of(&config.identities, &upstream),
            config: config.clone(),
        },
        config::Mode::Passthrough(config) => Plane::Passthrough {
            routes: config
                .routes
                .iter()
                .map(|route| find(&route.upstream))
                .collect::<Result<_, _>>()?,
            destinations: config
                .destinations
                .iter()
                .map(|meant| Ok((meant.to.clone(), find(&meant.upstream)?)))
                .collect::<Result<_, _>>()?,
            config: config.clone(),
        },
    };
    let mut bound = BoundListener {
        config: listener.clone(),
        addresses: Vec::new(),
        sockets: (0..workers).map(|_| Vec::new()).collect(),
        metrics: metrics.listener(&listener.name),
        upstream,
        plane,
    };
    let mut skipped = None;
    for &address in &listener.bind {
        match bind_address(address, listener, &mut bound.sockets) {
            Ok(actual) => bound.addresses.push(actual),
            Err(error) if socket::family_is_missing(address, &error) => {
                tracing::warn!(
                    listener = listener.name,
                    %address,
                    %error,
                    "not listening there: this host has no such address family"
                );
                skipped = Some((address, error));
            }
            Err(error) => return Err(bind_error(listener, address, error)),
        }
    }
    match skipped {
        Some((address, error)) if bound.addresses.is_empty() => {
            Err(bind_error(listener, address, error))
        }
        _ => Ok(bound),
    }
}

/// The slots of an upstream's credentials that hold these identities.
fn slots_of(identities: &[CertPaths], upstream: &Upstream) -> Vec<usize> {
    let slots: HashMap<_, _> = upstream
        .credentials
        .slots()
        .iter()
        .enumerate()
        .map(|(index, slot)| (&slot.paths, index))
        .collect();
    identities.iter().filter_map(|paths| slots.get(paths).copied()).collect()
}

/// One socket for each worker, all on the same port even where that was left to the kernel.
fn bind_address(
    mut address: SocketAddr,
    listener: &config::Listener,
    workers: &mut [Vec<std::net::TcpListener>],
) -> io::Result<SocketAddr> {
    let options = Listening {
        shared: workers.len() > 1,
        freebind: listener.freebind,
        transparent: listener.is_transparent(),
    };
    for sockets in workers {
        let socket = socket::listen_as(address, &options)?;
        address = socket.local_addr()?;
        sockets.push(socket);
    }
    Ok(address)
}

fn bind_error(listener: &config::Listener, address: SocketAddr, error: io::Error) -> StartError {
    // A port below 1024 may be what is not permitted.
    if listener.is_transparent() && error.kind() == io::ErrorKind::PermissionDenied {
        let (listener, what) = (listener.name.clone(), "listen for others (IP_TRANSPARENT)");
        return StartError::Capability { listener, what, error };
    }
    StartError::Bind { what: format!("listener `{}`", listener.name), address, error }
}

//! The configuration in use, and how the next one replaces it.
//!
//! [`PreparedConfig::new`] loads every file and binds every address that the new configuration needs. If it
//! fails, nothing has changed. [`PreparedConfig::activate`] cannot fail. An upstream or listener with an
//! unchanged name, and a socket with an unchanged address, stays the same object with new settings, so its
//! connections, health and history continue. A start is the same, without a configuration in use.

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use jackstay_config::{self as config, Config, IdentitySource, MemoryLimit};
use jackstay_core::admission::{DEFAULT_LIMIT, MemoryBudget};
use jackstay_net::loaded_files::LoadedFiles;
use jackstay_net::tls::serving::{self, ServingTls};
use jackstay_sys::process::inherited_sockets::{InheritedSockets, stored_name};
use jackstay_sys::process::memory_limit;
use jackstay_sys::sockets::connector::Connector;
use jackstay_sys::sockets::stream::DetachedListener;

use super::admin_socket::{AdminBind, AdminSocket};
use super::descriptors::DescriptorShare;
use super::listener::{BoundListener, ListenerMode};
use super::shared_sockets::SentSockets;
use super::sockets::{BoundSocket, NewSockets, SocketBinder, SocketId};
use super::start_error::StartError;
use super::worker::DesiredState;
use crate::control::endpoint_set;
use crate::observe::Metrics;
use crate::proxy::identity_lane::LaneConnections;
use crate::upstream::Upstream;
use crate::upstream::credentials::{self, Credentials, IdentitySlot};

/// The part of the cgroup's limit that clients may use, in percent.
const CGROUP_PERCENT: u64 = 70;

/// A configuration in use, with its resources.
#[derive(Debug)]
pub struct ActiveConfig {
    /// The settings.
    pub config: Arc<Config>,
    /// The upstreams, in the order of the configuration.
    pub upstreams: Vec<Arc<Upstream>>,
    /// The listeners, in the order of the configuration.
    pub listeners: Vec<Arc<BoundListener>>,
    /// The sockets of all listeners.
    pub sockets: Vec<Arc<BoundSocket>>,
    /// The TCP socket of the admin endpoint.
    pub admin: Arc<AdminSocket>,
    /// TLS of `admin.metrics_bind`.
    pub metrics_tls: Option<Arc<ServingTls>>,
    /// Opens the connections to endpoints.
    connector: Arc<Connector>,
}

impl ActiveConfig {
    /// A configuration whose sockets are opened by the caller, which gives them to the workers. `connector` opens the
    /// connections to endpoints. Nothing is bound, the admin endpoint included.
    ///
    /// # Errors
    /// The first file that cannot be loaded, or a wrong endpoint.
    pub fn without_sockets(
        loaded: (Config, &mut LoadedFiles),
        connector: Arc<Connector>,
        shared: (&Arc<Metrics>, &Arc<MemoryBudget>),
    ) -> Result<Self, StartError> {
        let admin = AdminSocket::unbound(loaded.0.admin.bind);
        let bind = |config: &Config| {
            let sockets = |listener: &config::Listener| {
                let addresses = listener.bind.iter();
                addresses.map(|address| Arc::new(BoundSocket::elsewhere(*address))).collect()
            };
            Ok(config.listeners.iter().map(sockets).collect())
        };
        let prepared = PreparedConfig::with(loaded, None, (admin, connector, bind), shared)?;
        Ok(prepared.activate())
    }

    /// What a worker shall serve, which does not have `new_sockets` yet.
    pub fn desired_state(
        &self,
        new_sockets: HashMap<SocketId, Vec<DetachedListener>>,
    ) -> DesiredState {
        DesiredState {
            listeners: self.listeners.clone(),
            new_sockets,
            access: self.config.log.access,
            drain_timeout: self.config.shutdown.drain_timeout,
            listen_addresses: self.listen_addresses(),
        }
    }

    /// Duplicates of every listening socket, for another process.
    pub fn duplicate_sockets(&self) -> io::Result<(Vec<OwnedFd>, SentSockets)> {
        let listeners = self.sockets.iter().flat_map(|socket| socket.duplicates());
        let sockets = listeners.chain(self.admin.duplicate()).collect::<Result<_, _>>()?;
        let sent = self.sockets.iter().map(|socket| socket.other_owners());
        Ok((sockets, SentSockets::new(sent.chain([self.admin.other_owners()]).cloned())))
    }

    /// Records that the process that the sockets of the listeners were inherited from has closed them, and that no
    /// service manager has them.
    pub fn predecessor_has_closed_sockets(&self) {
        self.sockets.iter().for_each(|socket| socket.other_owners().predecessor_has_closed());
    }

    /// The sockets of the listeners, with their names in the service manager.
    pub fn stored_sockets(&self) -> Vec<(String, Vec<BorrowedFd<'_>>)> {
        let sockets = self.sockets.iter();
        sockets.map(|one| (stored_name(one.address()), one.descriptors().collect())).collect()
    }

    /// Every address that this process listens on.
    pub fn listen_addresses(&self) -> Arc<[SocketAddr]> {
        let listeners = self.sockets.iter().map(|socket| socket.address());
        listeners.chain(self.admin.address()).collect()
    }

    /// For each worker, the sockets of this configuration that it does not have yet. The workers serve
    /// `current`.
    pub fn new_sockets(&self, current: Option<&Self>, workers: usize) -> io::Result<NewSockets> {
        let mut new = Vec::new();
        for listener in &self.listeners {
            let mut current = current.iter().flat_map(|current| &current.listeners);
            let current = current.find(|current| current.is_same_listener(listener));
            let known = current.map_or(&[][..], |current| &current.sockets);
            let sockets = listener.sockets.iter().filter(|socket| !known.contains(socket));
            new.extend(sockets.map(|(id, _)| *id));
        }
        let for_worker = |worker| {
            let sockets = self.sockets.iter().filter(|socket| new.contains(&socket.id()));
            sockets.map(|socket| Ok((socket.id(), socket.for_worker(worker, workers)?))).collect()
        };
        (0..workers).map(for_worker).collect()
    }

    /// Excludes each socket that `next` replaces on its port from new connections, which would be reset if
    /// they arrived while it is closed. Returns whether there is such a socket; TCP handshakes that have
    /// started on it still complete there.
    pub fn divert_replaced_sockets(&self, next: &Self) -> bool {
        let mut any = false;
        for socket in &self.sockets {
            let stays = next.sockets.iter().any(|other| other.id() == socket.id());
            let collides =
                |other: &Arc<BoundSocket>| config::collide(other.address(), socket.address());
            if !stays && next.sockets.iter().any(collides) {
                any |= socket.divert_new_connections();
            }
        }
        self.admin.divert_if_replaced(&next.admin) || any
    }

    /// Whether only this process and one that it has sent the sockets of the listeners to may have them.
    pub fn shares_sockets_with_one(&self) -> bool {
        self.sockets.iter().all(|socket| socket.other_owners().are_at_most(1))
    }

    /// Excludes the sockets of the listeners from new connections before a drain closes them. Returns whether TCP
    /// handshakes that have started on one must be waited for.
    pub fn divert_new_connections(&self) -> bool {
        let diverted = self.sockets.iter().filter(|socket| socket.divert_new_connections());
        diverted.count() > 0
    }

    /// Drops the identities that the configuration does not name any more. Called when the workers have
    /// applied it.
    pub fn retire_identities(&self) {
        for upstream in &self.upstreams {
            let wanted = identities_of(&upstream.config(), &self.config);
            upstream.credentials.retire(&wanted);
        }
    }

    fn upstream(&self, name: &str) -> Result<Arc<Upstream>, StartError> {
        let found = self.upstreams.iter().find(|upstream| *upstream.name == *name);
        let missing = || StartError::configuration(&format!("upstream `{name}` does not exist"));
        found.cloned().ok_or_else(missing)
    }

    /// The sockets, each with the name of its listener.
    fn sockets_by_listener(&self) -> Vec<(&str, &Arc<BoundSocket>)> {
        let mut sockets = Vec::new();
        for listener in &self.listeners {
            let ids: Vec<_> = listener.sockets.iter().map(|(id, _)| *id).collect();
            let own = self.sockets.iter().filter(|socket| ids.contains(&socket.id()));
            sockets.extend(own.map(|socket| (listener.name(), socket)));
        }
        sockets
    }
}

/// A configuration with its resources, before it is in use.
#[derive(Debug)]
pub struct PreparedConfig {
    next: ActiveConfig,
    /// New settings for upstreams in use.
    upstreams: Vec<(Arc<Upstream>, config::Upstream, credentials::PreparedCredentials)>,
    /// New TLS files for listeners in use.
    serving: Vec<(Arc<ServingTls>, serving::LoadedServingTls)>,
    /// The identities of each upstream, by its name.
    identities: HashMap<String, Vec<Arc<IdentitySlot>>>,
}

impl PreparedConfig {
    /// Loads every file that is not in `files` yet, and binds every address that the `current` configuration does not
    /// have. Matching `inherited` sockets are used before new ones are bound. `admin` says whether the admin endpoint
    /// may wait for its address.
    ///
    /// # Errors
    /// The first file that cannot be loaded or address that cannot be bound. Nothing has changed then.
    pub fn new(
        (config, files): (Config, &mut LoadedFiles),
        current: Option<&ActiveConfig>,
        (inherited, admin): (&mut InheritedSockets, AdminBind),
        (metrics, memory): (&Arc<Metrics>, &Arc<MemoryBudget>),
    ) -> Result<Self, StartError> {
        let current_admin = current.map(|current| &current.admin);
        let admin = AdminSocket::bind(config.admin.bind, current_admin, inherited, admin)?;
        let connector = connector(&config, current)?;
        let bind = |config: &Config| {
            let sockets = current.map(ActiveConfig::sockets_by_listener).unwrap_or_default();
            SocketBinder::new(sockets, inherited, config.workers).bind(&config.listeners)
        };
        Self::with((config, files), current, (admin, connector, bind), (metrics, memory))
    }

    /// The same with sockets that `bind` binds once every file is loaded: those of each listener.
    fn with(
        (config, files): (Config, &mut LoadedFiles),
        current: Option<&ActiveConfig>,
        (admin, connector, bind): (
            Arc<AdminSocket>,
            Arc<Connector>,
            impl FnOnce(&Config) -> Result<Vec<Vec<Arc<BoundSocket>>>, StartError>,
        ),
        (metrics, memory): (&Arc<Metrics>, &Arc<MemoryBudget>),
    ) -> Result<Self, StartError> {
        let config = Arc::new(config);
        let mut prepared = Self {
            upstreams: Vec::new(),
            serving: Vec::new(),
            identities: HashMap::new(),
            next: ActiveConfig {
                config: Arc::clone(&config),
                upstreams: Vec::new(),
                listeners: Vec::new(),
                sockets: Vec::new(),
                admin,
                metrics_tls: None,
                connector,
            },
        };
        prepared.load_metrics_tls(files, current)?;
        for upstream in &config.upstreams {
            prepared.add_upstream(upstream, files, current, (metrics, memory))?;
        }
        let mut modes = Vec::new();
        for listener in &config.listeners {
            modes.push(prepared.load_mode(listener, files, current)?);
        }
        let sockets = bind(&config)?;
        let descriptors = DescriptorShare::of(&config);
        for ((listener, mode), sockets) in config.listeners.iter().zip(modes).zip(sockets) {
            let next = &mut prepared.next;
            let listener = BoundListener {
                sockets: sockets.iter().map(|socket| (socket.id(), socket.address())).collect(),
                metrics: metrics.listener(&listener.name),
                upstream: next.upstream(&listener.upstream)?,
                config: descriptors.bounded(listener),
                mode,
                lane_connections: lane_connections(current, &listener.name),
            };
            next.listeners.push(Arc::new(listener));
            next.sockets.extend(sockets);
        }
        Ok(prepared)
    }

    /// The configuration that [`Self::activate`] puts into use.
    pub fn next(&self) -> &ActiveConfig {
        &self.next
    }

    /// Puts the configuration into use, except for the workers, which apply it afterwards. They may use removed
    /// identities until [`ActiveConfig::retire_identities`].
    pub fn activate(self) -> ActiveConfig {
        for (upstream, config, prepared) in self.upstreams {
            upstream.credentials.install(prepared);
            upstream.set_connector(Arc::clone(&self.next.connector));
            if **upstream.config() != config {
                upstream.reconfigure(config);
            }
        }
        for (tls, loaded) in self.serving {
            tls.install(loaded);
        }
        for socket in &self.next.sockets {
            socket.apply_options();
        }
        self.next
    }

    /// Loads the TLS files of `admin.metrics_bind`.
    fn load_metrics_tls(
        &mut self,
        files: &mut LoadedFiles,
        current: Option<&ActiveConfig>,
    ) -> Result<(), StartError> {
        let Some(wanted) = self.next.config.admin.metrics_files() else { return Ok(()) };
        let loaded = serving::LoadedServingTls::load(&wanted, files)?;
        let current = current.and_then(|current| current.metrics_tls.as_ref());
        self.next.metrics_tls = Some(match current {
            Some(tls) => {
                self.serving.push((Arc::clone(tls), loaded));
                Arc::clone(tls)
            }
            None => Arc::new(ServingTls::new(loaded)),
        });
        Ok(())
    }

    fn add_upstream(
        &mut self,
        config: &config::Upstream,
        files: &mut LoadedFiles,
        current: Option<&ActiveConfig>,
        (metrics, memory): (&Arc<Metrics>, &Arc<MemoryBudget>),
    ) -> Result<(), StartError> {
        let identities = identities_of(config, &self.next.config);
        let mut current = current.iter().flat_map(|current| &current.upstreams);
        // Below another path is another cluster, whose versions have nothing to do with those of this one.
        let current = current.find(|current| {
            *current.name == *config.name && current.path_prefix == config.path_prefix
        });
        let (upstream, slots) = if let Some(current) = current {
            let prepared = current.credentials.prepare(config, &identities, files)?;
            let slots = prepared.identities().to_vec();
            self.upstreams.push((Arc::clone(current), config.clone(), prepared));
            (Arc::clone(current), slots)
        } else {
            let credentials = Credentials::load(config, &identities, files)?;
            let slots = credentials.identities();
            let new = Upstream::new(config.clone(), credentials, metrics, memory);
            new.set_connector(Arc::clone(&self.next.connector));
            let endpoints = endpoint_set::static_endpoints(config);
            let mut replaced = endpoint_set::replace_endpoints(&new, &endpoints);
            if let Some(why) = replaced.refused.pop() {
                return Err(StartError::configuration(&why));
            }
            (Arc::new(new), slots)
        };
        self.identities.insert(config.name.clone(), slots);
        self.next.upstreams.push(upstream);
        Ok(())
    }

    /// Loads the resources of a listener that depend on its mode.
    fn load_mode(
        &mut self,
        config: &config::Listener,
        files: &mut LoadedFiles,
        current: Option<&ActiveConfig>,
    ) -> Result<ListenerMode, StartError> {
        match &config.mode {
            config::Mode::Terminate(terminate) => {
                let loaded = serving::LoadedServingTls::load(&terminate.files(), files)?;
                let mut current = current.iter().flat_map(|current| &current.listeners);
                let current = current.find(|current| current.name() == config.name);
                let tls = match current.and_then(|current| current.mode.tls()) {
                    Some(tls) => {
                        self.serving.push((Arc::clone(tls), loaded));
                        Arc::clone(tls)
                    }
                    None => Arc::new(ServingTls::new(loaded)),
                };
                let slots = self.identities.get(&config.upstream).map_or(&[][..], Vec::as_slice);
                let wanted = terminate.identities.iter();
                let identities =
                    wanted.filter_map(|source| slots.iter().find(|slot| slot.source == *source));
                Ok(ListenerMode::Terminate {
                    tls,
                    identities: identities.cloned().collect(),
                    config: terminate.clone(),
                })
            }
            config::Mode::Passthrough(passthrough) => {
                let routes =
                    passthrough.routes.iter().map(|route| self.next.upstream(&route.upstream));
                let destinations = passthrough.destinations.iter().map(|destination| {
                    Ok((destination.to.clone(), self.next.upstream(&destination.upstream)?))
                });
                Ok(ListenerMode::Passthrough {
                    routes: routes.collect::<Result<_, StartError>>()?,
                    destinations: destinations.collect::<Result<_, StartError>>()?,
                    config: passthrough.clone(),
                })
            }
        }
    }
}

/// The count of a listener's connections on the identity lane, which a reload keeps.
fn lane_connections(current: Option<&ActiveConfig>, listener: &str) -> LaneConnections {
    let mut listeners = current.iter().flat_map(|current| &current.listeners);
    let listener = listeners.find(|current| current.name() == listener);
    listener.map(|listener| listener.lane_connections.clone()).unwrap_or_default()
}

/// The connector for endpoints: with `SO_MARK` and loop detection if a listener is transparent. The one in use
/// is kept if its mark stays, since it remembers the connections by which loops are detected.
fn connector(
    config: &Config,
    current: Option<&ActiveConfig>,
) -> Result<Arc<Connector>, StartError> {
    let transparent = |config: &Config| config.listeners.iter().any(|l| l.transparent);
    let mark = |config: &Config| transparent(config).then_some(config.mark);
    if let Some(current) = current.filter(|current| mark(&current.config) == mark(config)) {
        return Ok(Arc::clone(&current.connector));
    }
    let Some(listener) = config.listeners.iter().find(|listener| listener.transparent) else {
        return Ok(Arc::default());
    };
    Connector::marked(config.mark).map(Arc::new).map_err(|error| {
        StartError::capability(&listener.name, "mark its connections (SO_MARK)", &error)
    })
}

/// The identities of all listeners of an upstream, each once.
fn identities_of(upstream: &config::Upstream, config: &Config) -> Vec<IdentitySource> {
    let mut all: Vec<IdentitySource> = Vec::new();
    let listeners = config.listeners.iter().filter(|l| l.upstream == upstream.name);
    let terminating = listeners.filter_map(|l| l.terminate());
    for source in terminating.flat_map(|terminate| &terminate.identities) {
        if !all.contains(source) {
            all.push(source.clone());
        }
    }
    all
}

/// The limit in bytes of the memory that clients make the process hold.
pub fn client_memory_limit(config: &Config) -> usize {
    let bytes = match config.memory_limit {
        MemoryLimit::Bytes(bytes) => bytes,
        MemoryLimit::Auto => memory_limit::cgroup_limit()
            .map_or(DEFAULT_LIMIT as u64, |limit| limit / 100 * CGROUP_PERCENT),
    };
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

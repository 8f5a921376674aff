//! The configuration in use, and how the next one replaces it.
//!
//! [`PreparedConfig::new`] loads every file and binds every address that the new configuration
//! needs. It may fail, and then nothing has changed. [`PreparedConfig::activate`] cannot fail. An
//! upstream, listener or socket that keeps its name or address stays the same object with new
//! settings, so its connections, health and history continue. A start prepares a configuration
//! while none is in use.

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use super::listener::{BoundListener, ListenerMode};
use super::sockets::{AdminSocket, BoundSocket, NewSockets, SocketBinder};
use super::start_error::StartError;
use crate::config::{self, CertPaths, Config};
use crate::control::endpoint_set;
use crate::net::process::inherited_sockets::InheritedSockets;
use crate::net::process::resource_limits;
use crate::net::sockets::connector::Connector;
use crate::net::tls::serving::{self, ServingTls};
use crate::observe::Metrics;
use crate::upstream::Upstream;
use crate::upstream::credentials::{self, Credentials, IdentitySlot};

/// Descriptors for everything but client connections: endpoints, files, threads.
const RESERVED_DESCRIPTORS: u64 = 64;

/// A configuration in use, with its resources.
#[derive(Debug)]
pub struct ActiveConfig {
    pub config: Arc<Config>,
    /// The upstreams, in the order of the configuration.
    pub upstreams: Vec<Arc<Upstream>>,
    /// The listeners, in the order of the configuration.
    pub listeners: Vec<Arc<BoundListener>>,
    /// The sockets of all listeners.
    pub sockets: Vec<Arc<BoundSocket>>,
    /// The TCP socket of the admin endpoint.
    pub admin: Arc<AdminSocket>,
    connector: Arc<Connector>,
}

impl ActiveConfig {
    /// Duplicates of every listening socket, for another process.
    pub fn duplicate_sockets(&self) -> io::Result<Vec<OwnedFd>> {
        let listeners = self.sockets.iter().flat_map(|socket| socket.duplicates());
        listeners.chain([self.admin.socket().as_fd().try_clone_to_owned()]).collect()
    }

    /// Every address that this process listens on.
    pub fn listen_addresses(&self) -> Arc<[SocketAddr]> {
        let listeners = self.sockets.iter().map(|socket| socket.address());
        listeners.chain(self.admin.socket().local_addr()).collect()
    }

    /// The sockets that a worker needs to serve this configuration and does not have yet, for each
    /// worker. `current` is what the workers serve now.
    pub fn new_sockets(&self, current: Option<&Self>, workers: usize) -> io::Result<NewSockets> {
        let mut new = Vec::new();
        for listener in &self.listeners {
            let mut current = current.iter().flat_map(|current| &current.listeners);
            let current = current.find(|current| current.is_same_listener(listener));
            let has = |id| current.is_some_and(|current| current.sockets.iter().any(|s| s.0 == id));
            new.extend(listener.sockets.iter().map(|(id, _)| *id).filter(|id| !has(*id)));
        }
        let sockets = || self.sockets.iter().filter(|socket| new.contains(&socket.id()));
        let of_worker = |worker| {
            sockets().map(|socket| Ok((socket.id(), socket.for_worker(worker, workers)?))).collect()
        };
        (0..workers).map(of_worker).collect()
    }

    /// Hides each socket that `next` replaces by another one on the same port: connections that
    /// arrive while a socket is being closed would be reset. Returns whether there was one;
    /// handshakes that have started on it still complete there.
    pub fn release_conflicting_sockets(&self, next: &Self) -> bool {
        let mut any = false;
        for socket in &self.sockets {
            let stays = next.sockets.iter().any(|other| other.id() == socket.id());
            let conflicts =
                |other: &Arc<BoundSocket>| config::collide(other.address(), socket.address());
            if !stays && next.sockets.iter().any(conflicts) {
                socket.hide();
                any = true;
            }
        }
        self.admin.release_if_conflicting(&next.admin) || any
    }

    /// Drops the identities that the configuration does not name any more. Called after the
    /// workers have applied it.
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
        let find = |id| self.sockets.iter().find(move |socket| socket.id() == id);
        let of = |listener: &'_ Arc<BoundListener>| -> Vec<_> {
            listener.sockets.iter().filter_map(|(id, _)| find(*id)).collect()
        };
        let listeners = self.listeners.iter();
        listeners.flat_map(|l| of(l).into_iter().map(move |socket| (l.name(), socket))).collect()
    }
}

/// A configuration that is loaded and bound, and not yet in use.
#[derive(Debug)]
pub struct PreparedConfig {
    next: ActiveConfig,
    /// New settings of upstreams that stay.
    upstreams: Vec<(Arc<Upstream>, config::Upstream, credentials::PreparedCredentials)>,
    /// New certificates of listeners that stay.
    serving: Vec<(Arc<ServingTls>, serving::LoadedServingTls)>,
    /// The identities by upstream name.
    identities: HashMap<String, Vec<Arc<IdentitySlot>>>,
}

impl PreparedConfig {
    /// Loads every file and binds every address that is not in use already. `current` is the
    /// configuration in use; matching `inherited` sockets are taken before new ones are bound.
    ///
    /// # Errors
    /// The first file that cannot be loaded or address that cannot be bound; nothing has changed
    /// then.
    pub fn new(
        config: Config,
        current: Option<&ActiveConfig>,
        inherited: &mut InheritedSockets,
        metrics: &Arc<Metrics>,
    ) -> Result<Self, StartError> {
        let admin =
            AdminSocket::bind(config.admin.bind, current.map(|current| &current.admin), inherited)?;
        let connector = connector(&config, current)?;
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
                connector,
            },
        };
        for upstream in &config.upstreams {
            prepared.add_upstream(upstream, current, metrics)?;
        }
        let mut modes = Vec::new();
        for listener in &config.listeners {
            modes.push(prepared.mode(listener, current)?);
        }
        let sockets = current.map(ActiveConfig::sockets_by_listener).unwrap_or_default();
        let binder = SocketBinder::new(sockets, inherited, config.workers);
        let sockets = binder.bind(&config.listeners)?;
        for ((listener, mode), sockets) in config.listeners.iter().zip(modes).zip(sockets) {
            let next = &mut prepared.next;
            let listener = BoundListener {
                sockets: sockets.iter().map(|socket| (socket.id(), socket.address())).collect(),
                metrics: metrics.listener(&listener.name),
                upstream: next.upstream(&listener.upstream)?,
                config: listener.clone(),
                mode,
            };
            next.listeners.push(Arc::new(listener));
            next.sockets.extend(sockets);
        }
        Ok(prepared)
    }

    /// What will be in use.
    pub fn next(&self) -> &ActiveConfig {
        &self.next
    }

    /// Puts everything into use that needs no worker. Identities that are no longer configured stay
    /// for the workers until [`ActiveConfig::retire_identities`].
    pub fn activate(self) -> ActiveConfig {
        for (upstream, config, prepared) in self.upstreams {
            upstream.credentials.install(prepared);
            upstream.set_connector(Arc::clone(&self.next.connector));
            if **upstream.config() != config {
                upstream.reconfigure(config);
            }
        }
        for (tls, prepared) in self.serving {
            tls.install(prepared);
        }
        for socket in &self.next.sockets {
            socket.apply_options();
        }
        self.next
    }

    fn add_upstream(
        &mut self,
        config: &config::Upstream,
        current: Option<&ActiveConfig>,
        metrics: &Arc<Metrics>,
    ) -> Result<(), StartError> {
        let identities = identities_of(config, &self.next.config);
        let mut current = current.iter().flat_map(|current| &current.upstreams);
        let current = current.find(|current| *current.name == *config.name);
        let (upstream, slots) = if let Some(current) = current {
            let prepared = current.credentials.prepare(config, &identities)?;
            let slots = prepared.slots().to_vec();
            self.upstreams.push((Arc::clone(current), config.clone(), prepared));
            (Arc::clone(current), slots)
        } else {
            let credentials = Credentials::load(config, &identities)?;
            let slots = credentials.slots();
            let new = Upstream::new(config.clone(), credentials, metrics);
            new.set_connector(Arc::clone(&self.next.connector));
            let endpoints = endpoint_set::static_endpoints(config);
            let mut placed = endpoint_set::replace_endpoints(&new, &endpoints);
            if let Some(why) = placed.refused.pop() {
                return Err(StartError::configuration(&why));
            }
            (Arc::new(new), slots)
        };
        self.identities.insert(config.name.clone(), slots);
        self.next.upstreams.push(upstream);
        Ok(())
    }

    /// The resources of a listener that depend on its mode.
    fn mode(
        &mut self,
        config: &config::Listener,
        current: Option<&ActiveConfig>,
    ) -> Result<ListenerMode, StartError> {
        match &config.mode {
            config::Mode::Terminate(terminate) => {
                let prepared = serving::LoadedServingTls::load(terminate)?;
                let mut current = current.iter().flat_map(|current| &current.listeners);
                let current = current.find(|current| current.name() == config.name);
                let tls = match current.and_then(|current| current.mode.tls()) {
                    Some(tls) => {
                        self.serving.push((Arc::clone(tls), prepared));
                        Arc::clone(tls)
                    }
                    None => Arc::new(ServingTls::new(prepared)),
                };
                let all = self.identities.get(&config.upstream).map_or(&[][..], Vec::as_slice);
                let wanted = terminate.identities.iter();
                let identities =
                    wanted.filter_map(|paths| all.iter().find(|slot| slot.paths == *paths));
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

/// How connections to endpoints are opened: with `SO_MARK` if a listener is transparent.
fn connector(
    config: &Config,
    current: Option<&ActiveConfig>,
) -> Result<Arc<Connector>, StartError> {
    let transparent = |config: &Config| -> Option<(String, u32)> {
        let listener = config.listeners.iter().find(|listener| listener.transparent)?;
        Some((listener.name.clone(), config.mark))
    };
    let wanted = transparent(config);
    let mark = |of: &Option<(String, u32)>| of.as_ref().map(|(_, mark)| *mark);
    if let Some(now) = current.filter(|now| mark(&transparent(&now.config)) == mark(&wanted)) {
        // It remembers the connections that it has opened, by which loops are detected.
        return Ok(Arc::clone(&now.connector));
    }
    let Some((listener, mark)) = wanted else { return Ok(Arc::default()) };
    let connector = Connector::marked(mark).map(Arc::new);
    let what = "mark its connections (SO_MARK)";
    connector.map_err(|error| StartError::capability(&listener, what, &error))
}

/// The identities of all listeners of an upstream and of its probes, each once.
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

/// Raises the limit on open files as far as the system allows, and warns if it is too low for the
/// configuration.
pub fn raise_descriptor_limit(config: &Config) {
    let limit = match resource_limits::raise_descriptor_limit() {
        Ok(limit) => limit,
        Err(error) => return tracing::warn!(%error, "cannot raise the limit on open files"),
    };
    // Two for each client connection: an L4 flow has one to its endpoint as well.
    let clients: usize = config.listeners.iter().map(|l| l.limits().max_connections).sum();
    let needed = 2 * clients as u64 + RESERVED_DESCRIPTORS;
    if limit < needed {
        tracing::warn!(
            limit,
            needed,
            "too few open files are allowed for limits.max_connections of all listeners: clients \
             will be refused earlier (systemd: LimitNOFILE=; elsewhere: ulimit -Hn)"
        );
    }
}

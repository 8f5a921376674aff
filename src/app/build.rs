//! Builds what a configuration asks for, out of what there is already.
//!
//! What is named as before is the same object with its parts swapped: its connections, its health
//! and its history go on. What is new is loaded and bound. All of that happens in [`Plan::new`],
//! where it may fail and has changed nothing yet; [`Plan::commit`] cannot fail. A start is a plan
//! that finds nothing.

use std::collections::HashMap;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use super::StartError;
use super::sockets::{self, Place, Places};
use crate::config::{self, CertPaths, Config};
use crate::control::endpoint_set;
use crate::net::process::inherited_sockets::InheritedSockets;
use crate::net::sockets::connector::Connector;
use crate::net::sockets::listening::{self, ListenOptions};
use crate::net::tls::serving::{self, ServingTls};
use crate::observe::{ListenerMetrics, Metrics};
use crate::upstream::Upstream;
use crate::upstream::credentials::{self, Credentials, IdentitySlot};

/// Everything that serves, and the configuration that it follows.
#[derive(Debug)]
pub struct Built {
    /// The configuration.
    pub config: Arc<Config>,
    /// Its upstreams, in its order.
    pub upstreams: Vec<Arc<Upstream>>,
    /// Its listeners, in its order.
    pub listeners: Vec<Bound>,
    /// Where the admin endpoint listens.
    pub admin: Arc<AdminSocket>,
    /// How connections to endpoints leave.
    pub outgoing: Arc<Connector>,
}

impl Built {
    /// Copies of every socket that is listened on, to be given to another process.
    ///
    /// # Errors
    /// There are no descriptors left.
    pub fn descriptors(&self) -> io::Result<Vec<OwnedFd>> {
        let places = self.listeners.iter().flat_map(|bound| &bound.places);
        let copies = places.flat_map(|place| place.copies());
        copies.chain([self.admin.socket.as_fd().try_clone_to_owned()]).collect()
    }

    /// Every address that is listened on.
    pub fn listening(&self) -> Arc<[SocketAddr]> {
        let listeners = self.listeners.iter().flat_map(Bound::addresses);
        listeners.chain(self.admin.socket.local_addr()).collect()
    }

    /// Leaves who connects from now on to `next`, where that listens on the port of a socket that
    /// goes: what came to that one in the moment of its close would be reset with it. True if there
    /// is such a socket: handshakes that have begun with it still end there.
    pub fn give_way(&self, next: &Self) -> bool {
        let mut any = false;
        let places = || next.listeners.iter().flat_map(|bound| &bound.places);
        for place in self.listeners.iter().flat_map(|bound| &bound.places) {
            let stays = places().any(|other| other.id == place.id);
            if !stays && places().any(|other| config::collide(other.address, place.address)) {
                place.hide();
                any = true;
            }
        }
        self.admin.give_way(&next.admin) || any
    }
}

/// A listener with its sockets.
#[derive(Debug)]
pub struct Bound {
    /// What the configuration says.
    pub config: config::Listener,
    /// Where it listens.
    pub places: Vec<Arc<Place>>,
    /// What it counts.
    pub metrics: Arc<ListenerMetrics>,
    /// Where it leads.
    pub upstream: Arc<Upstream>,
    /// What it has of its own, by its mode.
    pub plane: Plane,
}

impl Bound {
    /// Whether a worker that has this listener has `other` too: a change of mode makes it another.
    pub fn is(&self, other: &Self) -> bool {
        self.config.name == other.config.name
            && self.plane.tls().is_some() == other.plane.tls().is_some()
    }

    /// Its real addresses.
    pub fn addresses(&self) -> Vec<SocketAddr> {
        self.places.iter().map(|place| place.address).collect()
    }
}

/// What a listener has of its own, by its mode.
#[derive(Debug, Clone)]
pub enum Plane {
    /// L7.
    Terminate {
        /// What the configuration says.
        config: config::Terminate,
        /// Its TLS.
        tls: Arc<ServingTls>,
        /// The identities that it may use.
        slots: Vec<Arc<IdentitySlot>>,
    },
    /// L4.
    Passthrough {
        /// What the configuration says.
        config: config::Passthrough,
        /// The upstreams of its routes, in their order.
        routes: Vec<Arc<Upstream>>,
        /// Upstreams by original destination, in their order.
        destinations: Destinations,
    },
}

impl Plane {
    /// Its TLS, if it terminates any.
    pub fn tls(&self) -> Option<&Arc<ServingTls>> {
        match self {
            Self::Terminate { tls, .. } => Some(tls),
            Self::Passthrough { .. } => None,
        }
    }
}

/// Upstreams by original destination.
pub type Destinations = Vec<(Vec<config::Destination>, Arc<Upstream>)>;

/// The socket of the admin endpoint.
#[derive(Debug)]
pub struct AdminSocket {
    /// What the configuration says.
    pub wanted: SocketAddr,
    /// The socket.
    pub socket: TcpListener,
    /// Whether somebody else may have it too.
    inherited: bool,
}

impl AdminSocket {
    fn give_way(self: &Arc<Self>, next: &Arc<Self>) -> bool {
        let collide = |a: &Self, b: &Self| -> io::Result<bool> {
            Ok(config::collide(a.socket.local_addr()?, b.socket.local_addr()?))
        };
        let gives =
            !self.inherited && !Arc::ptr_eq(self, next) && collide(self, next).is_ok_and(|is| is);
        if gives {
            sockets::hide(&self.socket);
        }
        gives
    }
}

/// A configuration that is loaded and bound, and not yet in use.
#[derive(Debug)]
pub struct Plan {
    next: Built,
    /// What changes in upstreams that stay.
    upstreams: Vec<(Arc<Upstream>, config::Upstream, credentials::PreparedCredentials)>,
    /// What changes in listeners that stay.
    serving: Vec<(Arc<ServingTls>, serving::LoadedServingTls)>,
    /// The identities of each upstream.
    slots: HashMap<String, Vec<Arc<IdentitySlot>>>,
}

impl Plan {
    /// Loads every file and binds every address that is not there yet. `now` is what runs;
    /// `inherited` are sockets that were open before us, of which those that fit are taken.
    ///
    /// # Errors
    /// The first thing that cannot be. Nothing has changed then.
    pub fn new(
        config: Config,
        now: Option<&Built>,
        inherited: &mut InheritedSockets,
        metrics: &Arc<Metrics>,
    ) -> Result<Self, StartError> {
        let admin = admin(config.admin.bind, now, inherited)?;
        let outgoing = outgoing(&config, now)?;
        let mut plan = Self {
            upstreams: Vec::new(),
            serving: Vec::new(),
            slots: HashMap::new(),
            next: Built {
                config: Arc::new(config),
                upstreams: Vec::new(),
                listeners: Vec::new(),
                admin,
                outgoing,
            },
        };
        let config = Arc::clone(&plan.next.config);
        for upstream in &config.upstreams {
            plan.upstream(upstream, now, metrics)?;
        }
        let known = now.iter().flat_map(|now| &now.listeners);
        let known =
            known.flat_map(|l| l.places.iter().map(|place| (l.config.name.as_str(), place)));
        let mut places = Places::new(known.collect(), inherited, config.workers);
        let mut own = Vec::new();
        for listener in &config.listeners {
            let known = now.and_then(|now| {
                now.listeners.iter().find(|known| known.config.name == listener.name)
            });
            own.push(plan.plane(listener, known)?);
        }
        let places = places.of(&config.listeners)?;
        for ((listener, plane), places) in config.listeners.iter().zip(own).zip(places) {
            plan.next.listeners.push(Bound {
                places,
                metrics: metrics.listener(&listener.name),
                upstream: plan.find(&listener.upstream)?,
                config: listener.clone(),
                plane,
            });
        }
        Ok(plan)
    }

    /// What will be.
    pub fn next(&self) -> &Built {
        &self.next
    }

    fn upstream(
        &mut self,
        config: &config::Upstream,
        now: Option<&Built>,
        metrics: &Arc<Metrics>,
    ) -> Result<(), StartError> {
        let identities = identities_of(config, &self.next.config);
        let known = now.iter().flat_map(|now| &now.upstreams);
        let known = known.into_iter().find(|known| *known.name == *config.name);
        let (upstream, slots) = if let Some(known) = known {
            let prepared = known.credentials.prepare(config, &identities);
            let prepared = prepared.map_err(StartError::Tls)?;
            let slots = prepared.slots().to_vec();
            self.upstreams.push((Arc::clone(known), config.clone(), prepared));
            (Arc::clone(known), slots)
        } else {
            let credentials = Credentials::load(config, &identities).map_err(StartError::Tls)?;
            let slots = credentials.slots();
            let new = Upstream::new(config.clone(), credentials, metrics);
            new.outgoing.store(Arc::clone(&self.next.outgoing));
            if let Some(why) =
                endpoint_set::replace_endpoints(&new, &endpoint_set::static_endpoints(config))
                    .refused
                    .pop()
            {
                return Err(StartError::ServerName(why));
            }
            (Arc::new(new), slots)
        };
        self.slots.insert(config.name.clone(), slots);
        self.next.upstreams.push(upstream);
        Ok(())
    }

    /// What a listener has of its own; `known` is the one of its name that runs.
    fn plane(
        &mut self,
        config: &config::Listener,
        known: Option<&Bound>,
    ) -> Result<Plane, StartError> {
        Ok(match &config.mode {
            config::Mode::Terminate(terminate) => {
                let prepared =
                    serving::LoadedServingTls::load(terminate).map_err(StartError::Tls)?;
                let tls = match known.and_then(|known| known.plane.tls()) {
                    Some(tls) => {
                        self.serving.push((Arc::clone(tls), prepared));
                        Arc::clone(tls)
                    }
                    None => Arc::new(ServingTls::new(prepared)),
                };
                Plane::Terminate {
                    tls,
                    slots: self.slots_of(config, terminate),
                    config: terminate.clone(),
                }
            }
            config::Mode::Passthrough(passthrough) => {
                let routes = passthrough.routes.iter().map(|route| self.find(&route.upstream));
                let meant = passthrough.destinations.iter();
                let meant = meant.map(|meant| Ok((meant.to.clone(), self.find(&meant.upstream)?)));
                Plane::Passthrough {
                    routes: routes.collect::<Result<_, _>>()?,
                    destinations: meant.collect::<Result<_, _>>()?,
                    config: passthrough.clone(),
                }
            }
        })
    }

    /// The slots of its upstream's credentials that hold the identities of a listener.
    fn slots_of(
        &self,
        listener: &config::Listener,
        terminate: &config::Terminate,
    ) -> Vec<Arc<IdentitySlot>> {
        let all = self.slots.get(&listener.upstream).map_or(&[][..], Vec::as_slice);
        let identities = terminate.identities.iter();
        identities.filter_map(|paths| all.iter().find(|s| s.paths == *paths)).cloned().collect()
    }

    fn find(&self, name: &str) -> Result<Arc<Upstream>, StartError> {
        let found = self.next.upstreams.iter().find(|upstream| *upstream.name == *name);
        found
            .cloned()
            .ok_or_else(|| StartError::ServerName(format!("upstream `{name}` does not exist")))
    }

    /// Puts everything into use that needs no worker. What is no longer configured is still there
    /// for them, until [`retire_identities`].
    pub fn commit(self) -> Built {
        for (upstream, config, prepared) in self.upstreams {
            upstream.credentials.install(prepared);
            upstream.outgoing.store(Arc::clone(&self.next.outgoing));
            if **upstream.config() != config {
                upstream.reconfigure(config);
            }
        }
        for (tls, prepared) in self.serving {
            tls.install(prepared);
        }
        for place in self.next.listeners.iter().flat_map(|bound| &bound.places) {
            place.change();
        }
        self.next
    }
}

/// Forgets the identities that no configuration names any more.
pub fn retire_identities(now: &Built) {
    for upstream in &now.upstreams {
        let wanted = identities_of(&upstream.config(), &now.config);
        upstream.credentials.retire(&wanted);
    }
}

/// Where the admin endpoint listens.
fn admin(
    wanted: SocketAddr,
    now: Option<&Built>,
    inherited: &mut InheritedSockets,
) -> Result<Arc<AdminSocket>, StartError> {
    let now = now.map(|now| &now.admin);
    if let Some(kept) = now.filter(|admin| admin.wanted == wanted) {
        return Ok(Arc::clone(kept));
    }
    if let Some(socket) = inherited.take(wanted, false).pop() {
        return Ok(Arc::new(AdminSocket { wanted, socket, inherited: true }));
    }
    let in_the_way = |socket: &&TcpListener| {
        let at = socket.local_addr();
        at.is_ok_and(|at| at != wanted && config::collide(at, wanted))
    };
    let ours: Vec<_> = now.map(|admin| &admin.socket).filter(in_the_way).into_iter().collect();
    match listening::listen_alongside(wanted, &ListenOptions::default(), &ours) {
        Ok(socket) => Ok(Arc::new(AdminSocket { wanted, socket, inherited: false })),
        Err(error) => Err(StartError::Bind { what: "admin".into(), address: wanted, error }),
    }
}

/// How connections to endpoints leave: marked, if a listener is transparent.
fn outgoing(config: &Config, now: Option<&Built>) -> Result<Arc<Connector>, StartError> {
    let transparent = |config: &Config| -> Option<(String, u32)> {
        let listener = config.listeners.iter().find(|listener| listener.is_transparent())?;
        Some((listener.name.clone(), config.mark))
    };
    let wanted = transparent(config);
    let mark = |of: &Option<(String, u32)>| of.as_ref().map(|(_, mark)| *mark);
    if let Some(now) = now.filter(|now| mark(&transparent(&now.config)) == mark(&wanted)) {
        // It remembers what it has opened.
        return Ok(Arc::clone(&now.outgoing));
    }
    let Some((listener, mark)) = wanted else { return Ok(Arc::default()) };
    Connector::marked(mark).map(Arc::new).map_err(|error| StartError::Capability {
        listener,
        what: "mark its connections (SO_MARK)",
        error,
    })
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

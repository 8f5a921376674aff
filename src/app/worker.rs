//! One worker: a thread with its own event loop, its own sockets and its own connections.

use std::cell::Cell;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::{LocalSet, spawn_local};
use tokio::time::{Instant, sleep};

use super::{BoundListener, Plane};
use crate::config::{AccessLog, Config, Listener as ListenerConfig};
use crate::net::linger::lingering;
use crate::observe::{ListenerMetrics, Metrics};
use crate::proxy::identify::{Identifier, ProvenTokens};
use crate::proxy::line::Line;
use crate::proxy::listener::Listener;
use crate::proxy::passthrough::transparent::Transparent;
use crate::proxy::passthrough::{self, table::SHUTDOWN};
use crate::proxy::retry::HedgeBudget;
use crate::proxy::serve::Service;
use crate::proxy::upgrade::Tunnels;
use crate::upstream::pool::{Pool, Upstream};

/// How often a worker shows that its loop turns.
const PULSE: Duration = Duration::from_secs(1);
/// How often a draining worker looks whether it is done.
const DRAIN_TICK: Duration = Duration::from_millis(10);

/// How long what was told to end may take to end.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// Shows that a worker's loop turns: seconds of its own clock, plus one.
pub type Pulse = Arc<AtomicU64>;

/// What a worker is made of, before its thread runs.
pub struct Setup {
    listeners: Vec<Part>,
    metrics: Arc<Metrics>,
    access: AccessLog,
    drain_timeout: Duration,
    drain: watch::Receiver<bool>,
    workers: usize,
    pulse: Pulse,
    /// Every address that this process listens on.
    listening: Arc<[SocketAddr]>,
}

struct Part {
    config: ListenerConfig,
    sockets: Vec<std::net::TcpListener>,
    metrics: Arc<ListenerMetrics>,
    upstream: Arc<Upstream>,
    plane: Plane,
}

impl Setup {
    /// Takes the sockets of worker `index` from the listeners.
    pub fn new(
        index: usize,
        config: &Config,
        metrics: &Arc<Metrics>,
        listeners: &mut [BoundListener],
        listening: &Arc<[SocketAddr]>,
        drain: watch::Receiver<bool>,
    ) -> Self {
        let listeners = listeners
            .iter_mut()
            .map(|bound| Part {
                config: bound.config.clone(),
                sockets: std::mem::take(&mut bound.sockets[index]),
                metrics: Arc::clone(&bound.metrics),
                upstream: Arc::clone(&bound.upstream),
                plane: bound.plane.clone(),
            })
            .collect();
        Self {
            listeners,
            metrics: Arc::clone(metrics),
            access: config.log.access,
            drain_timeout: config.shutdown.drain_timeout,
            drain,
            workers: config.workers,
            pulse: Arc::new(AtomicU64::new(0)),
            listening: Arc::clone(listening),
        }
    }

    /// Where the worker shows that it turns.
    pub fn pulse(&self) -> Pulse {
        Arc::clone(&self.pulse)
    }

    /// Runs until the drain is over.
    pub fn run(self) {
        let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
            Ok(runtime) => runtime,
            Err(error) => {
                tracing::error!(%error, "a worker has no runtime");
                return;
            }
        };
        LocalSet::new().block_on(&runtime, self.serve());
    }

    async fn serve(self) {
        let beat = Arc::clone(&self.pulse);
        spawn_local(async move {
            let start = Instant::now();
            loop {
                beat.store(start.elapsed().as_secs() + 1, Ordering::Relaxed);
                sleep(PULSE).await;
            }
        });
        let mut lines: Vec<Rc<Line>> = Vec::new();
        let mut listeners = Vec::new();
        let mut passing = Vec::new();
        let table = passthrough::table::Table::new();
        spawn_local(Rc::clone(&table).run());
        for mut part in self.listeners {
            let name = part.config.name.clone();
            let mut limits = part.config.limits.clone();
            limits.max_connections = limits.max_connections.div_ceil(self.workers);
            let sockets = sockets(&name, std::mem::take(&mut part.sockets));
            match part.plane {
                Plane::Terminate { config, tls, slots } => {
                    let listener = Rc::new(Listener {
                        service: Rc::new(Service {
                            line: line(&mut lines, &part.upstream, &self.metrics, &self.drain),
                            identifier: Identifier {
                                slots,
                                listener: name.clone(),
                                tokens: Rc::new(ProvenTokens::default()),
                            },
                            metrics: part.metrics,
                            access: self.access,
                            resume_groups: config.resume_groups,
                            max_header_bytes: config.limits.max_header_bytes,
                            tunnels: Tunnels::default(),
                        }),
                        name,
                        tls,
                        limits,
                        requests: config.limits,
                        open: Cell::new(0),
                        drain: self.drain.clone(),
                    });
                    for socket in sockets {
                        spawn_local(Rc::clone(&listener).accept(socket));
                    }
                    listeners.push(listener);
                }
                Plane::Passthrough { config, routes, destinations } => {
                    let transparent = config
                        .transparent
                        .then(|| Transparent::new(Arc::clone(&self.listening), destinations));
                    let listener = Rc::new(passthrough::Listener {
                        flows: self.metrics.passthrough(&name),
                        name,
                        upstream: part.upstream,
                        routes,
                        transparent,
                        config,
                        limits,
                        metrics: part.metrics,
                        table: Rc::clone(&table),
                        open: Cell::new(0),
                        drain: self.drain.clone(),
                    });
                    for socket in sockets {
                        spawn_local(Rc::clone(&listener).accept(socket));
                    }
                    passing.push(listener);
                }
            }
        }
        let mut drain = self.drain;
        // An error means that the sender is gone: the program ends.
        let _ = drain.wait_for(|draining| *draining).await;
        let deadline = Instant::now() + self.drain_timeout;
        let tunnels = || listeners.iter().map(|l| l.service.tunnels.open()).sum::<usize>();
        let open = || {
            let connections: usize = listeners.iter().map(|listener| listener.open.get()).sum();
            let flows: usize = passing.iter().map(|listener| listener.open.get()).sum();
            connections + flows + tunnels() + lingering()
        };
        while open() > 0 && Instant::now() < deadline {
            sleep(DRAIN_TICK).await;
        }
        if open() > 0 {
            tracing::warn!(connections = open(), "the drain timeout is over: closing what is left");
            for listener in &listeners {
                listener.service.tunnels.end();
            }
            table.end(SHUTDOWN, |_| true);
            // The flows' own tasks reset both sides.
            let reset = Instant::now() + LAST_WORDS;
            while !table.is_empty() && Instant::now() < reset {
                sleep(DRAIN_TICK).await;
            }
        }
    }
}

/// A listener's sockets on this worker's runtime.
fn sockets(listener: &str, sockets: Vec<std::net::TcpListener>) -> Vec<TcpListener> {
    let on_runtime = |socket| {
        TcpListener::from_std(socket)
            .inspect_err(|error| tracing::error!(listener, %error, "cannot listen"))
            .ok()
    };
    sockets.into_iter().filter_map(on_runtime).collect()
}

/// The worker's line to an upstream; listeners that share the upstream share it.
fn line(
    lines: &mut Vec<Rc<Line>>,
    upstream: &Arc<Upstream>,
    metrics: &Arc<Metrics>,
    drain: &watch::Receiver<bool>,
) -> Rc<Line> {
    if let Some(line) = lines.iter().find(|line| Arc::ptr_eq(line.pool.upstream(), upstream)) {
        return Rc::clone(line);
    }
    let pool = Pool::new(Arc::clone(upstream));
    spawn_local(Pool::run(Rc::clone(&pool)));
    let line = Rc::new(Line {
        pool,
        budget: HedgeBudget::default(),
        metrics: Arc::clone(metrics),
        drain: drain.clone(),
    });
    lines.push(Rc::clone(&line));
    line
}

//! L4: passes connections through, byte for byte. TLS stays between the client and the apiserver,
//! so no certificate is needed and every client works.
//!
//! ```text
//! accept -> (cap) -> (server name, if there are routes) -> connect, raced -> pump both ways
//!        -> count why it ended
//! ```
//!
//! Whatever breaks one side breaks the other the same way: a reset is passed on as a reset, an end
//! as an end of that direction. What we end ourselves ends with a reset, since that is what makes a
//! client reconnect at once; silence is what it would wait on.

pub mod connect;
pub mod hello;
pub mod pump;
pub mod rebalance;
pub mod table;
pub mod transparent;
pub mod verdict;

use std::cell::{Cell, RefCell};
use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::AsyncReadExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::spawn_local;
use tokio::time::timeout;

use super::accept;
use super::drain::DrainWatcher;
use crate::config::{Limits, Passthrough, Route};
use crate::net::sockets::tcp_options;
use crate::observe::{ListenerMetrics, PassthroughMetrics, RateLimitedWarnings};
use crate::upstream::Upstream;
use hello::Hello;
use pump::{Broken, Flow, Lane, Side};
use table::Table;
use transparent::Transparent;

/// Forwards the connections of one L4 listener on one worker.
pub struct TcpForwarder {
    name: String,
    routing: RefCell<Rc<Routing>>,
    metrics: Arc<ListenerMetrics>,
    flow_metrics: Arc<PassthroughMetrics>,
    table: Rc<Table>,
    open: Cell<usize>,
    warnings: RateLimitedWarnings,
}

/// What a reload may change of a listener. A connection follows what it found.
pub struct Routing {
    /// Where connections go that no route takes.
    pub upstream: Arc<Upstream>,
    /// The upstreams of the configured routes, in their order.
    pub routes: Vec<Arc<Upstream>>,
    /// Present if it is transparent.
    pub transparent: Option<Transparent>,
    /// How it passes connections through.
    pub config: Passthrough,
    /// Bounds on connections.
    pub limits: Limits,
}

impl TcpForwarder {
    /// A forwarder of the listener of that name. `table` holds the flows of all listeners of the
    /// worker.
    pub fn new(
        name: String,
        routing: Routing,
        (metrics, flow_metrics): (Arc<ListenerMetrics>, Arc<PassthroughMetrics>),
        table: Rc<Table>,
    ) -> Self {
        Self {
            name,
            routing: RefCell::new(Rc::new(routing)),
            metrics,
            flow_metrics,
            table,
            open: Cell::new(0),
            warnings: RateLimitedWarnings::new(accept::WARNING_INTERVAL),
        }
    }

    /// The name of the listener.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Open connections.
    pub fn connections(&self) -> usize {
        self.open.get()
    }

    /// Routes the next connections in another way.
    pub fn replace_routing(&self, routing: Routing) {
        self.routing.replace(Rc::new(routing));
    }

    /// Resets the flows that are due, `elapsed` after the start of a drain that may take `timeout`.
    pub fn end_due_flows(&self, elapsed: Duration, timeout: Duration) {
        self.table.drain(self, elapsed, timeout);
    }

    /// Accepts on one socket until `drain` starts.
    pub async fn accept(self: Rc<Self>, socket: TcpListener, drain: DrainWatcher) {
        let about = (self.name.as_str(), &*self.metrics, &self.warnings);
        accept::until_drain(socket, drain, about, |stream, from| self.admit(stream, from)).await;
    }

    /// The routing of a connection that starts now.
    pub fn routing(&self) -> Rc<Routing> {
        Rc::clone(&self.routing.borrow())
    }

    fn admit(self: &Rc<Self>, client: TcpStream, from: SocketAddr) {
        let most = self.routing.borrow().limits.max_connections;
        if self.open.get() >= most {
            self.metrics.refused("cap");
            self.warnings.warn(&accept::limit_reached(&self.name, most), from);
            tcp_options::close_with_reset(client);
            return;
        }
        let open = Open::new(self);
        spawn_local(async move { open.run(client, from).await });
    }
}

impl Routing {
    /// The upstream for a connection, by where it was meant to go or by the server name that it
    /// asks for, and what was read to know it. What asks for none, or is no TLS, goes where the
    /// listener goes. `listener` is whose routing it is.
    ///
    /// # Errors
    /// The reason for which the connection ends here: it was closed, said too little in time, or
    /// was not redirected.
    async fn route(
        &self,
        listener: &TcpForwarder,
        client: &mut TcpStream,
        from: SocketAddr,
    ) -> Result<(Arc<Upstream>, Vec<u8>), &'static str> {
        let mut first = Vec::new();
        if let Some(transparent) = &self.transparent {
            let meant = transparent.place(client, from, &self.upstream).map_err(|refusal| {
                let line = format!("listener {}: refused ({})", listener.name, refusal.reason());
                listener.warnings.warn(&line, format_args!("client {from}: {refusal}"));
                refusal.reason()
            })?;
            if let Some(upstream) = meant {
                return Ok((Arc::clone(upstream), first));
            }
        }
        if self.routes.is_empty() {
            return Ok((Arc::clone(&self.upstream), first));
        }
        let reading = async {
            loop {
                match client.read_buf(&mut first).await {
                    Ok(n) if n > 0 => {}
                    _ => return Err("client_reset"),
                }
                match hello::read(&first) {
                    Hello::Partial => {}
                    Hello::Name(name) => return Ok(self.routed(&name)),
                    Hello::NoName | Hello::Odd => return Ok(&self.upstream),
                }
            }
        };
        match timeout(self.limits.handshake_timeout, reading).await {
            Ok(upstream) => upstream.map(|upstream| (Arc::clone(upstream), first)),
            Err(_) => Err("handshake_timeout"),
        }
    }

    fn routed(&self, name: &str) -> &Arc<Upstream> {
        let meant = |route: &Route| route.server_names.iter().any(|p| hello::matches(p, name));
        let found = self.config.routes.iter().position(meant);
        found.and_then(|index| self.routes.get(index)).unwrap_or(&self.upstream)
    }
}

/// An accepted connection, counted once however it ends.
struct Open {
    listener: Rc<TcpForwarder>,
    reason: Cell<&'static str>,
}

impl Open {
    fn new(listener: &Rc<TcpForwarder>) -> Self {
        listener.open.set(listener.open.get() + 1);
        listener.metrics.connections.increment(1);
        listener.flow_metrics.opened();
        Self { listener: Rc::clone(listener), reason: Cell::new("shutdown") }
    }

    async fn run(self, mut client: TcpStream, from: SocketAddr) {
        let listener = &self.listener;
        if tcp_options::configure_accepted(&client).is_err() {
            self.reason.set("client_reset");
            return;
        }
        // Boxed: an idle flow carries no room for how it began.
        let routing = listener.routing();
        let routed = Box::pin(routing.route(listener, &mut client, from)).await;
        drop(routing);
        let (upstream, first) = match routed {
            Ok(routed) => routed,
            Err(reason) => {
                self.reason.set(reason);
                tracing::debug!(listener = listener.name, client = %from, reason, "not routed");
                tcp_options::close_with_reset(client);
                return;
            }
        };
        let connected = Box::pin(connect::connect(&upstream)).await;
        let (server, endpoint) = match connected {
            Ok(connected) => connected,
            Err(why) => {
                self.reason.set("unreachable");
                let line = format!("listener {}: no endpoint reached", listener.name);
                listener.warnings.warn(&line, format_args!("client {from} is reset; {why}"));
                tcp_options::close_with_reset(client);
                return;
            }
        };
        tcp_options::bound_retransmission_timeout(&server);
        let _guard = endpoint.track_flow();
        let (descriptors, table) = ((client.as_raw_fd(), server.as_raw_fd()), &listener.table);
        let mut flow = Flow { client, server, up: Lane::with(first), down: Lane::default() };
        // Declared after the sockets, so that it goes before them.
        let ticket = table.enter(listener, &upstream, &endpoint, descriptors);
        let by = match flow.run(&ticket, &listener.flow_metrics).await {
            Ok(()) => return self.reason.set("done"),
            Err(Broken::Told(verdict)) => {
                self.reason.set(verdict.reason);
                None
            }
            Err(Broken::By(side, error)) => {
                tracing::debug!(listener = listener.name, client = %from, ?side, %error, "broken");
                self.reason.set(match side {
                    Side::Client => "client_reset",
                    Side::Server => "server_reset",
                });
                Some(side)
            }
        };
        if by == Some(Side::Server) {
            Box::pin(flow.delivered(&ticket)).await;
        }
        drop(ticket);
        tcp_options::close_with_reset(flow.client);
        tcp_options::close_with_reset(flow.server);
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.listener.open.set(self.listener.open.get() - 1);
        self.listener.metrics.connections.decrement(1);
        let reason = self.reason.get();
        self.listener.flow_metrics.closed(reason);
        if reason == "unreachable" {
            self.listener.metrics.own_errors.count(None, reason);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn size_of_future<F>(_: fn(Open, TcpStream, SocketAddr) -> F) -> usize {
        size_of::<F>()
    }

    /// With what tokio adds it fits into 768 bytes, the next class of the allocator is 896.
    #[test]
    fn the_task_of_a_flow_is_small() {
        let size = size_of_future(Open::run);
        assert!(size <= 700, "{size}");
    }
}

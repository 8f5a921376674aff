//! Accepts the connections of one L4 listener and runs their flows.

use std::cell::Cell;
use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::task::spawn_local;

use super::super::accept;
use super::super::drain::DrainWatcher;
use super::connect;
use super::flow_table::FlowTable;
use super::pump::{FlowError, Peer, Pump};
use super::routing::{ListenerRouting, Routing};
use crate::net::sockets::tcp_options;
use crate::observe::{ListenerMetrics, PassthroughMetrics, RateLimitedWarnings};

/// Forwards the connections of one L4 listener on one worker.
pub struct TcpForwarder {
    routing: Rc<ListenerRouting>,
    metrics: Arc<ListenerMetrics>,
    flow_metrics: Arc<PassthroughMetrics>,
    flows: Rc<FlowTable>,
    open: Cell<usize>,
    warnings: RateLimitedWarnings,
}

impl TcpForwarder {
    /// Creates the forwarder of the listener `name`. `flows` holds the flows of all listeners of the worker.
    pub fn new(
        name: String,
        routing: Routing,
        (metrics, flow_metrics): (Arc<ListenerMetrics>, Arc<PassthroughMetrics>),
        flows: Rc<FlowTable>,
    ) -> Self {
        Self {
            routing: Rc::new(ListenerRouting::new(name, routing)),
            metrics,
            flow_metrics,
            flows,
            open: Cell::new(0),
            warnings: RateLimitedWarnings::new(accept::WARNING_INTERVAL),
        }
    }

    /// The routing of the listener's connections.
    pub fn routing(&self) -> &Rc<ListenerRouting> {
        &self.routing
    }

    /// The number of open connections.
    pub fn connections(&self) -> usize {
        self.open.get()
    }

    /// Ends the flows that are due when a drain with this timeout has lasted for `elapsed`.
    pub fn end_due_flows(&self, elapsed: Duration, timeout: Duration) {
        self.flows.end_due(&self.routing, elapsed, timeout);
    }

    /// Accepts connections on one socket until `drain` starts.
    pub async fn accept(self: Rc<Self>, socket: TcpListener, drain: DrainWatcher) {
        let about = (self.routing.name(), &*self.metrics, &self.warnings);
        accept::until_drain(socket, drain, about, |stream, from| self.admit(stream, from)).await;
    }

    fn admit(self: &Rc<Self>, client: TcpStream, from: SocketAddr) {
        let limit = self.routing.current().limits.max_connections;
        if self.open.get() >= limit {
            self.metrics.refused("cap");
            self.warnings.warn(&accept::limit_reached(self.routing.name(), limit), from);
            tcp_options::close_with_reset(client);
            return;
        }
        let connection = OpenConnection::new(self);
        spawn_local(async move { connection.run(client, from).await });
    }
}

/// An accepted connection. Dropping it counts it with the reason for its end.
struct OpenConnection {
    forwarder: Rc<TcpForwarder>,
    /// The label of the reason; `shutdown` if the task is dropped.
    end: Cell<&'static str>,
}

impl OpenConnection {
    fn new(forwarder: &Rc<TcpForwarder>) -> Self {
        forwarder.open.set(forwarder.open.get() + 1);
        forwarder.metrics.connections.increment(1);
        forwarder.flow_metrics.opened();
        Self { forwarder: Rc::clone(forwarder), end: Cell::new("shutdown") }
    }

    /// Runs the flow of the connection until it has ended.
    async fn run(self, mut client: TcpStream, from: SocketAddr) {
        let forwarder = &self.forwarder;
        let listener = forwarder.routing.name();
        if tcp_options::configure_accepted(&client).is_err() {
            self.end.set("client_reset");
            return;
        }
        // The futures of routing and connecting are boxed, so that an idle flow does not keep their memory.
        let routing = forwarder.routing.current();
        let routed = Box::pin(routing.route(&mut client, from)).await;
        drop(routing);
        let (upstream, prefix) = match routed {
            Ok(routed) => routed,
            Err(error) => {
                let label = error.label();
                self.end.set(label);
                if error.is_misconfiguration() {
                    let line = format!("listener {listener}: refused ({label})");
                    forwarder.warnings.warn(&line, format_args!("client {from}: {error}"));
                }
                tracing::debug!(listener, client = %from, reason = %error, "connection not routed");
                tcp_options::close_with_reset(client);
                return;
            }
        };
        let (stream, endpoint) = match Box::pin(connect::connect(&upstream)).await {
            Ok(connected) => connected,
            Err(reason) => {
                self.end.set("unreachable");
                let line = format!("listener {listener}: no endpoint reached");
                forwarder.warnings.warn(&line, format_args!("client {from} is reset; {reason}"));
                tcp_options::close_with_reset(client);
                return;
            }
        };
        tcp_options::bound_retransmission_timeout(&stream);
        let _tracked = endpoint.track_flow();
        let sockets = (client.as_raw_fd(), stream.as_raw_fd());
        let mut pump = Pump::new(client, stream, prefix);
        // Declared after the pump, so that it is dropped before the sockets are closed.
        let handle = forwarder.flows.insert(&forwarder.routing, &upstream, &endpoint, sockets);
        match pump.run(&handle, &forwarder.flow_metrics).await {
            Ok(()) => return self.end.set("done"),
            Err(FlowError::Ended(reason)) => self.end.set(reason.label),
            Err(FlowError::Failed(peer, error)) => {
                tracing::debug!(listener, client = %from, ?peer, %error, "flow failed");
                if peer == Peer::Endpoint {
                    self.end.set("server_reset");
                    Box::pin(pump.wait_delivered(&handle)).await;
                } else {
                    self.end.set("client_reset");
                }
            }
        }
        drop(handle);
        pump.reset();
    }
}

impl Drop for OpenConnection {
    fn drop(&mut self) {
        let forwarder = &self.forwarder;
        forwarder.open.set(forwarder.open.get() - 1);
        forwarder.metrics.connections.decrement(1);
        let end = self.end.get();
        forwarder.flow_metrics.closed(end);
        if end == "unreachable" {
            forwarder.metrics.own_errors.count(None, end);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn size_of_future<F>(_: fn(OpenConnection, TcpStream, SocketAddr) -> F) -> usize {
        size_of::<F>()
    }

    /// With tokio's task header the future fits into 768 bytes; the next size class of the allocator is 896.
    #[test]
    fn run_future_fits_its_size_class() {
        let size = size_of_future(OpenConnection::run);
        assert!(size <= 700, "{size}");
    }
}

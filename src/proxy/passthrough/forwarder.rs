//! Accepts the connections of one L4 listener and runs their flows.

use std::cell::Cell;
use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use jackstay_core::admission::Refusal;
use jackstay_sys::sockets::tcp_options;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::spawn_local;

use super::super::accept;
use super::super::admission::connection_slots::{ConnectionSlot, SlotLimit};
use super::super::admission::flow_memory::FlowMemory;
use super::super::admission::listener_admission::ListenerAdmission;
use super::super::admission::socket_memory::Peer;
use super::super::drain::DrainWatcher;
use super::connect;
use super::flow_entry::{EVICTED, MEMORY};
use super::flow_table::FlowTable;
use super::pump::{FlowError, Pump};
use super::routing::{ListenerRouting, RouteError, Routing};
use crate::observe::PassthroughMetrics;
use crate::upstream::Upstream;

/// Forwards the connections of one L4 listener on one worker.
pub struct TcpForwarder {
    routing: Rc<ListenerRouting>,
    admission: ListenerAdmission,
    flow_metrics: Arc<PassthroughMetrics>,
    flows: Rc<FlowTable>,
}

impl TcpForwarder {
    /// Creates the forwarder of a listener. `flows` holds the flows of all listeners of the worker.
    pub fn new(
        admission: ListenerAdmission,
        routing: Routing,
        flow_metrics: Arc<PassthroughMetrics>,
        flows: Rc<FlowTable>,
    ) -> Self {
        Self {
            routing: Rc::new(ListenerRouting::new(admission.listener().to_owned(), routing)),
            admission,
            flow_metrics,
            flows,
        }
    }

    /// The routing of the listener's connections.
    pub fn routing(&self) -> &Rc<ListenerRouting> {
        &self.routing
    }

    /// The number of open connections.
    pub fn connections(&self) -> usize {
        self.admission.open()
    }

    /// Ends the flows that are due when a drain with this timeout has lasted for `elapsed`.
    pub fn end_due_flows(&self, elapsed: Duration, timeout: Duration) {
        self.flows.end_due(&self.routing, elapsed, timeout);
    }

    /// Accepts connections on one socket until `drain` starts.
    pub async fn accept(self: Rc<Self>, socket: TcpListener, drain: DrainWatcher) {
        let admit = |stream, from| self.admit(stream, from);
        let unsent = tcp_options::MAX_UNSENT_OF_FLOW;
        accept::until_drain(socket, unsent, drain, &self.admission, admit).await;
    }

    fn admit(self: &Rc<Self>, client: TcpStream, from: SocketAddr) {
        let routing = self.routing.current();
        let (slots, prefix) = (routing.limits.max_connections, routing.limits.source_prefix_v6);
        // No client of L4 proves an identity to this process, so there is no reserve.
        let limit = SlotLimit { slots, has_identities: false, handed_over: 0 };
        let Some(slot) = self.admission.admit((&client, from), prefix, limit) else {
            tcp_options::close_with_reset(client);
            return;
        };
        let source = slot.source();
        let Some(memory) = FlowMemory::new(self.admission.memory(source), client.as_raw_fd())
        else {
            self.admission.report_no_memory(source);
            tcp_options::close_with_reset(client);
            return;
        };
        let connection = OpenConnection::new(self, slot, memory);
        spawn_local(async move { connection.run(client, from).await });
    }
}

/// An accepted connection. Dropping it counts it with the reason for its end.
struct OpenConnection {
    forwarder: Rc<TcpForwarder>,
    slot: ConnectionSlot,
    memory: FlowMemory,
    /// The label of the reason; `shutdown` if the task is dropped.
    end: Cell<&'static str>,
}

impl OpenConnection {
    fn new(forwarder: &Rc<TcpForwarder>, slot: ConnectionSlot, memory: FlowMemory) -> Self {
        forwarder.admission.metrics.connections.increment(1);
        forwarder.flow_metrics.opened();
        Self { forwarder: Rc::clone(forwarder), slot, memory, end: Cell::new("shutdown") }
    }

    /// Runs the flow of the connection until it has ended, or until the connection is closed for another one
    /// because the client has sent nothing.
    async fn run(self, mut client: TcpStream, from: SocketAddr) {
        let forwarder = &*self.forwarder;
        // The futures of routing and connecting are boxed, so that an idle flow does not keep their memory.
        let (upstream, prefix) =
            match Box::pin(self.unless_evicted(self.route(&mut client, from))).await {
                None => return,
                Some(Ok(routed)) => routed,
                Some(Err(error)) => {
                    self.not_routed(&error, from);
                    return tcp_options::close_with_reset(client);
                }
            };
        let (stream, endpoint) = match Box::pin(self.unless_evicted(connect::connect(&upstream)))
            .await
        {
            None => return,
            Some(Ok(connected)) => connected,
            Some(Err(reason)) => {
                self.end.set("unreachable");
                // The own errors of the listener are summarised as a warning.
                tracing::debug!(listener = forwarder.routing.name(), client = %from, %reason, "no endpoint reached; the client is reset");
                return tcp_options::close_with_reset(client);
            }
        };
        tcp_options::bound_retransmission_timeout(&stream);
        let _tracked = endpoint.track_flow();
        let sockets = (client.as_raw_fd(), stream.as_raw_fd());
        self.memory.sockets().set_endpoint(stream.as_raw_fd());
        let mut pump = Pump::new(client, stream, prefix);
        // Declared after the pump, so that it is dropped before the sockets are closed.
        let handle = forwarder.flows.insert(&forwarder.routing, &upstream, &endpoint, sockets);
        match pump.run(&handle, &forwarder.flow_metrics, (&self.slot, &self.memory)).await {
            Ok(()) => {
                handle.report_end();
                return self.end.set("done");
            }
            Err(FlowError::Ended(reason)) => {
                self.end.set(reason.label);
                if reason == EVICTED {
                    forwarder.admission.count(Refusal::Evicted);
                }
                if reason == MEMORY {
                    let line = format!("flow ended: {}", reason.description);
                    forwarder.admission.warn(&line, format_args!("client {from} is reset"));
                }
            }
            Err(FlowError::Failed(peer, error)) => {
                tracing::debug!(listener = forwarder.routing.name(), client = %from, ?peer, %error, "flow failed");
                if peer == Peer::Endpoint {
                    self.end.set("server_reset");
                    // A server may reset what its client has closed.
                    if pump.is_client_open() {
                        handle.report_failure(&error);
                    }
                    Box::pin(pump.wait_delivered(&handle)).await;
                } else {
                    self.end.set("client_reset");
                }
            }
        }
        drop(handle);
        pump.reset();
    }

    /// Records that no upstream was found for the connection.
    fn not_routed(&self, error: &RouteError, from: SocketAddr) {
        let (forwarder, label) = (&*self.forwarder, error.label());
        self.end.set(label);
        if error.is_misconfiguration() {
            let line = format!("refused ({label})");
            forwarder.admission.warn(&line, format_args!("client {from}: {error}"));
        }
        tracing::debug!(listener = forwarder.routing.name(), client = %from, reason = %error, "connection not routed");
    }
}

impl OpenConnection {
    /// Routes the connection. It is in use once its `ClientHello` was read.
    async fn route(
        &self,
        client: &mut TcpStream,
        from: SocketAddr,
    ) -> Result<(Arc<Upstream>, Vec<u8>), RouteError> {
        let routing = self.forwarder.routing.current();
        let routed = routing.route(client, from).await;
        if routed.as_ref().is_ok_and(|(_, prefix)| !prefix.is_empty()) {
            self.slot.set_in_use();
        }
        routed
    }

    /// The result of a future; `None` if the connection is closed for another one meanwhile.
    async fn unless_evicted<T>(&self, future: impl Future<Output = T>) -> Option<T> {
        tokio::select! {
            result = future => Some(result),
            () = self.slot.evicted() => {
                self.forwarder.admission.count(Refusal::Evicted);
                self.end.set(EVICTED.label);
                None
            }
        }
    }
}

impl Drop for OpenConnection {
    fn drop(&mut self) {
        let forwarder = &self.forwarder;
        forwarder.admission.metrics.connections.decrement(1);
        let end = self.end.get();
        forwarder.flow_metrics.closed(end);
        if end == "unreachable" {
            forwarder.admission.metrics.own_errors.count(None, end);
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

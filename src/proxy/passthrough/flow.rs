//! Runs one flow. Connections of a listener in mode `passthrough`, and those that a listener in mode `terminate` passes
//! through by their server name, take the same path.

use std::cell::Cell;
use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use jackstay_core::admission::Refusal;
use jackstay_sys::sockets::stream::SocketRef;
use jackstay_sys::sockets::tcp_options;
use tokio::net::TcpStream;

use super::super::admission::connection_slots::ConnectionSlot;
use super::super::admission::flow_memory::FlowMemory;
use super::super::admission::listener_admission::ListenerAdmission;
use super::super::admission::socket_memory::Peer;
use super::super::drain::DrainWatcher;
use super::connect;
use super::flow_entry::{EVICTED, MEMORY};
use super::flow_table::FlowTable;
use super::pump::{FlowError, Pump};
use super::routing::{ListenerRouting, RouteError, RoutedTo, Routing};
use crate::observe::PassthroughMetrics;
use crate::upstream::Upstream;
use crate::upstream::endpoint::Endpoint;

/// What the flows of one listener on one worker share.
pub struct ListenerFlows {
    /// The connections of the listener.
    pub admission: Rc<ListenerAdmission>,
    /// The routing of its connections.
    pub routing: Rc<ListenerRouting>,
    metrics: Arc<PassthroughMetrics>,
    table: Rc<FlowTable>,
    drain: DrainWatcher,
}

impl ListenerFlows {
    /// The flows of the listener of `admission`. `table` holds the flows of all listeners of the worker once they are
    /// connected. Before that, they end when `drain`, the one of the listener, is forced.
    pub fn new(
        admission: Rc<ListenerAdmission>,
        routing: Routing,
        metrics: Arc<PassthroughMetrics>,
        table: Rc<FlowTable>,
        drain: DrainWatcher,
    ) -> Rc<Self> {
        let routing = Rc::new(ListenerRouting::new(admission.listener().to_owned(), routing));
        Rc::new(Self { admission, routing, metrics, table, drain })
    }

    /// Ends the flows that are due when a drain with this timeout has lasted for `elapsed`.
    pub fn end_due(&self, elapsed: Duration, timeout: Duration) {
        self.table.end_due(&self.routing, elapsed, timeout);
    }

    /// Runs the flow of an accepted connection until it has ended, or until the connection is closed for another one
    /// because the client has sent nothing. `routed` is where it goes, if that is known already. The client of a refused
    /// flow is reset.
    pub fn run(
        self: &Rc<Self>,
        client: TcpStream,
        from: SocketAddr,
        slot: ConnectionSlot,
        routed: Option<RoutedTo>,
    ) -> Option<impl Future<Output = ()> + use<>> {
        let source = slot.source();
        let memory = FlowMemory::new(self.admission.memory(source), SocketRef::of(&client));
        let Some(memory) = memory else {
            self.admission.report_no_memory(source);
            tcp_options::close_with_reset(client);
            return None;
        };
        let connection = OpenConnection::new(self, slot, memory);
        Some(connection.run(client, from, routed.map(Box::new)))
    }
}

/// An accepted connection. Dropping it counts it with the reason for its end.
struct OpenConnection {
    flows: Rc<ListenerFlows>,
    slot: ConnectionSlot,
    memory: FlowMemory,
    /// The label of the reason; `shutdown` if the task is dropped.
    end: Cell<&'static str>,
}

/// The endpoint's side of a connection.
struct Connected {
    stream: TcpStream,
    endpoint: Arc<Endpoint>,
    upstream: Arc<Upstream>,
    /// Bytes that were read from the client already.
    prefix: Vec<u8>,
}

impl OpenConnection {
    fn new(flows: &Rc<ListenerFlows>, slot: ConnectionSlot, memory: FlowMemory) -> Self {
        flows.admission.metrics.connections.increment(1);
        flows.metrics.opened();
        Self { flows: Rc::clone(flows), slot, memory, end: Cell::new("shutdown") }
    }

    /// See [`ListenerFlows::run`].
    #[allow(clippy::manual_async_fn)] // An async function would store its arguments twice.
    fn run(
        self,
        mut client: TcpStream,
        from: SocketAddr,
        routed: Option<Box<RoutedTo>>,
    ) -> impl Future<Output = ()> {
        async move {
            let flows = &*self.flows;
            // Boxed, so that an idle flow does not keep the memory of this future.
            let Some(Connected { stream, endpoint, upstream, prefix }) =
                Box::pin(self.connect(&mut client, from, routed)).await
            else {
                return tcp_options::close_with_reset(client);
            };
            let sockets = (client.as_raw_fd(), stream.as_raw_fd());
            let mut pump = Pump::new(client, stream, prefix);
            // Declared after the pump, so that it is dropped before the sockets are closed.
            let handle = flows.table.insert(&flows.routing, &upstream, &endpoint, sockets);
            match pump.run(&handle, &flows.metrics, (&self.slot, &self.memory)).await {
                Ok(()) => {
                    handle.report_end();
                    return self.end.set("done");
                }
                Err(FlowError::Ended(reason)) => {
                    self.end.set(reason.label);
                    if reason == EVICTED {
                        flows.admission.count(Refusal::Evicted);
                    }
                    if reason == MEMORY {
                        let line = format!("flow ended: {}", reason.description);
                        flows.admission.warn(&line, format_args!("client {from} is reset"));
                    }
                }
                Err(FlowError::Failed(peer, error)) => {
                    tracing::debug!(listener = flows.routing.name(), client = %from, ?peer, %error, "flow failed");
                    if peer == Peer::Endpoint {
                        self.end.set("server_reset");
                        // A server may reset what its client has closed.
                        if pump.is_client_open() {
                            handle.report_failure(&error);
                        }
                        Box::pin(pump.wait_delivered(&handle, &self.memory)).await;
                    } else {
                        self.end.set("client_reset");
                    }
                }
            }
            drop(handle);
            pump.reset();
        }
    }

    /// Records that no upstream was found for the connection.
    fn not_routed(&self, error: RouteError, from: SocketAddr) {
        let (flows, label) = (&*self.flows, error.label());
        self.end.set(label);
        if error.is_misconfiguration() {
            let line = format!("refused ({label})");
            flows.admission.warn(&line, format_args!("client {from}: {error}"));
        }
        tracing::debug!(listener = flows.routing.name(), client = %from, reason = %error, "connection not routed");
    }
}

impl OpenConnection {
    /// Routes and connects a connection. It is in use once its `ClientHello` was read. `None` if it must be closed.
    async fn connect(
        &self,
        client: &mut TcpStream,
        from: SocketAddr,
        routed: Option<Box<RoutedTo>>,
    ) -> Option<Connected> {
        let flows = &*self.flows;
        let routed = if let Some(routed) = routed {
            Ok(*routed)
        } else {
            let routing = flows.routing.current();
            self.unless_ended(routing.route(client, from)).await?
        };
        let (upstream, prefix) = match routed {
            Ok(routed) => routed,
            Err(error) => {
                self.not_routed(error, from);
                return None;
            }
        };
        if !prefix.is_empty() {
            self.slot.set_in_use();
            self.memory.set_held(prefix.capacity());
        }
        let (stream, endpoint) = match self.unless_ended(connect::connect(&upstream)).await? {
            Ok(connected) => connected,
            Err(reason) => {
                self.end.set("unreachable");
                // The own errors of the listener are summarised as a warning.
                tracing::debug!(listener = flows.routing.name(), client = %from, %reason, "no endpoint reached; the client is reset");
                return None;
            }
        };
        tcp_options::bound_retransmission_timeout(&stream);
        self.memory.sockets().set_endpoint(SocketRef::of(&stream));
        Some(Connected { stream, endpoint, upstream, prefix })
    }

    /// The result of a future; `None` if meanwhile the connection is closed for another one, or the drain is forced. A
    /// flow that connects later would be in the table after the drain has ended all flows there.
    async fn unless_ended<T>(&self, future: impl Future<Output = T>) -> Option<T> {
        let mut drain = self.flows.drain.clone();
        tokio::select! {
            biased;
            () = drain.forced() => None,
            () = self.slot.evicted() => {
                self.flows.admission.count(Refusal::Evicted);
                self.end.set(EVICTED.label);
                None
            }
            result = future => Some(result),
        }
    }
}

impl Drop for OpenConnection {
    fn drop(&mut self) {
        let flows = &self.flows;
        flows.admission.metrics.connections.decrement(1);
        let end = self.end.get();
        flows.metrics.closed(end);
        if end == "unreachable" {
            flows.admission.metrics.own_errors.count(None, end);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn size_of_future<F>(
        _: fn(OpenConnection, TcpStream, SocketAddr, Option<Box<RoutedTo>>) -> F,
    ) -> usize {
        size_of::<F>()
    }

    /// With tokio's task header the future fits into 768 bytes; the next size class of the allocator is 896.
    #[test]
    fn run_future_fits_its_size_class() {
        let size = size_of_future(OpenConnection::run);
        assert!(size <= 700, "{size}");
    }
}

//! Accepts the connections of one L4 listener. [`super::flow`] runs their flows.

use std::net::SocketAddr;
use std::rc::Rc;

use jackstay_sys::sockets::stream::{TcpListener, TcpStream};
use jackstay_sys::sockets::tcp_options;
use tokio::task::spawn_local;

use super::super::accept;
use super::super::admission::connection_slots::SlotLimit;
use super::super::drain::DrainWatcher;
use super::flow::ListenerFlows;

/// Accepts the connections of one L4 listener on one worker.
pub struct TcpForwarder {
    flows: Rc<ListenerFlows>,
}

impl TcpForwarder {
    /// The forwarder of the listener of these flows.
    pub fn new(flows: Rc<ListenerFlows>) -> Self {
        Self { flows }
    }

    /// The flows of the listener.
    pub fn flows(&self) -> &Rc<ListenerFlows> {
        &self.flows
    }

    /// The number of open connections.
    pub fn connections(&self) -> usize {
        self.flows.admission.open()
    }

    /// Accepts connections on one socket until `drain` starts.
    pub async fn accept(self: Rc<Self>, socket: TcpListener, drain: DrainWatcher) {
        let admit = |stream, from| self.admit(stream, from);
        let unsent = tcp_options::MAX_UNSENT_OF_FLOW;
        accept::until_drain(socket, unsent, drain, &self.flows.admission, admit).await;
    }

    fn admit(&self, client: TcpStream, from: SocketAddr) {
        let ListenerFlows { admission, routing, .. } = &*self.flows;
        let routing = routing.current();
        let (slots, prefix) = (routing.limits.max_connections, routing.limits.source_prefix_v6);
        // No client of L4 proves an identity to this process, so there is no reserve.
        let limit = SlotLimit { slots, has_identities: false, handed_over: 0 };
        let Some(slot) = admission.admit((&client, from), prefix, limit) else {
            client.close_with_reset();
            return;
        };
        // A flow is spliced, which only the kernel does.
        let Ok(client) = client.into_kernel() else { return };
        if let Some(flow) = self.flows.run(client, from, slot, None) {
            spawn_local(flow);
        }
    }
}

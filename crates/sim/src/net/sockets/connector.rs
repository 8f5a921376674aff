//! The network as a process sees it: its connects.

use std::net::SocketAddr;
use std::sync::Arc;

use jackstay_sys::sockets::virtual_network::{Connecting, VirtualNetwork};

use super::network::SocketNetwork;
use super::stream::Stream;
use crate::net::{ProcessId, Side, SocketOptions};

impl SocketNetwork {
    /// The network as a process sees it. Its sockets have the options of jackstay's upstream connections.
    pub fn of_process(&self, process: ProcessId) -> Arc<dyn VirtualNetwork> {
        self.of_process_with(process, SocketOptions::upstream())
    }

    /// The network as a process sees it whose sockets have these options.
    pub fn of_process_with(
        &self,
        process: ProcessId,
        options: SocketOptions,
    ) -> Arc<dyn VirtualNetwork> {
        Arc::new(ProcessNetwork { network: self.clone(), process, options })
    }
}

/// The network as a process sees it.
#[derive(Debug)]
struct ProcessNetwork {
    network: SocketNetwork,
    process: ProcessId,
    options: SocketOptions,
}

impl VirtualNetwork for ProcessNetwork {
    fn connect(&self, to: SocketAddr) -> Connecting<'_> {
        Box::pin(async move {
            let id = self.network.with(|state| state.connect(self.process, to, self.options))?;
            // A connect that is given up drops the stream, which closes the socket.
            let stream = Stream::new(self.network.clone(), id, Side::Client);
            stream.connected().await?;
            Ok(Box::new(stream) as _)
        })
    }
}

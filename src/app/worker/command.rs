//! The commands of the control thread to a worker.

use std::collections::HashMap;
use std::convert::Infallible;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc::UnboundedSender;

use crate::app::listener::BoundListener;
use crate::app::sockets::SocketId;
use crate::config::AccessLog;

/// Dropped by a worker when it has carried out a command. No value is ever sent.
pub type Done = UnboundedSender<Infallible>;

/// A command to a worker.
#[derive(Debug)]
pub enum Command {
    /// Serve this configuration from now on.
    Apply(DesiredState, Done),
    /// Stop accepting at once: another process has the same sockets, and the connections in their
    /// queues are left to it. Open connections continue.
    ReleaseSockets(Done),
}

/// What a worker is to serve.
#[derive(Debug)]
pub struct DesiredState {
    /// All listeners. A listener of the worker that is not among them drains.
    pub listeners: Vec<Arc<BoundListener>>,
    /// The sockets of `listeners` that the worker does not have yet.
    pub new_sockets: HashMap<SocketId, Vec<TcpListener>>,
    /// Which requests are logged.
    pub access: AccessLog,
    /// How long a drain may take.
    pub drain_timeout: Duration,
    /// Every address that this process listens on.
    pub listen_addresses: Arc<[SocketAddr]>,
}

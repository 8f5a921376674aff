//! The commands of the control thread to a worker.

use std::collections::HashMap;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use jackstay_config::AccessLog;
use jackstay_sys::sockets::stream::DetachedListener;
use tokio::sync::mpsc::UnboundedSender;

use crate::app::listener::BoundListener;
use crate::app::sockets::SocketId;

/// A worker drops it after it has executed a command. No value is ever sent.
pub type Completion = UnboundedSender<Infallible>;

/// A command to a worker.
#[derive(Debug)]
pub enum Command {
    /// Serve this configuration from now on, and close the sockets that it does not have.
    Apply(DesiredState, Completion),
    /// Stop accepting at once, and leave the connections in the accept queues to another process that has the
    /// same sockets. Open connections continue.
    ReleaseSockets(Completion),
    /// Let the drain take no longer than this.
    LimitDrain(Duration, Completion),
    /// Stop accepting, accept the connections in the accept queues, and close the sockets. Open connections continue.
    CloseSockets(Completion),
}

/// The configuration that a worker shall serve.
#[derive(Debug)]
pub struct DesiredState {
    /// All listeners. The worker drains its listeners that are not among them.
    pub listeners: Vec<Arc<BoundListener>>,
    /// The sockets of `listeners` that the worker does not have yet.
    pub new_sockets: HashMap<SocketId, Vec<DetachedListener>>,
    /// Which requests are logged.
    pub access: AccessLog,
    /// The time limit of a drain.
    pub drain_timeout: Duration,
    /// Every address that this process listens on.
    pub listen_addresses: Arc<[SocketAddr]>,
}

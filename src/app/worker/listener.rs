//! A listener as one worker runs it: its accept loops, its server, and its drain.
//!
//! A drain stops accepting, announces the end to clients, ends watches at staggered moments and
//! waits for the rest until its [`DrainDeadline`]. Then it closes all open connections. L4 flows
//! cannot be announced their end, so they are reset one by one towards the deadline.

use std::collections::HashMap;
use std::net::{SocketAddr, TcpListener as StdListener};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::spawn_local;
use tokio::time::{Instant, sleep, sleep_until};

use crate::app::listener::BoundListener;
use crate::app::sockets::SocketId;
use crate::proxy::drain::{self, DrainTrigger, DrainWatcher};
use crate::proxy::https_server::HttpsServer;
use crate::proxy::passthrough::forwarder::TcpForwarder;
use crate::proxy::upstream_client::UpstreamClient;

/// How often a drain checks whether connections are left.
pub const DRAIN_POLL: Duration = Duration::from_millis(10);
/// How long connections may take to end after the drain was forced.
const FORCED_CLOSE_TIMEOUT: Duration = Duration::from_millis(500);

/// Longest time over which watches end. Clients reconnect within a second, so the spread keeps a
/// node with a thousand watches from reconnecting all of them at once.
const MAX_SPREAD: Duration = Duration::from_secs(5);

/// The deadline of a drain: a timeout, or the signal to close everything at once.
#[derive(Debug, Clone)]
pub struct DrainDeadline {
    start: Instant,
    timeout: Duration,
    force: watch::Receiver<bool>,
}

impl DrainDeadline {
    /// A drain that starts now. It is over early if `force` turns true.
    pub fn new(timeout: Duration, force: watch::Receiver<bool>) -> Self {
        Self { start: Instant::now(), timeout, force }
    }

    /// The time since the start.
    pub fn elapsed(&self) -> Duration {
        self.start.elapsed()
    }

    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Whether the drain must end now.
    pub fn is_over(&self) -> bool {
        self.is_forced() || Instant::now() >= self.start + self.timeout
    }

    /// Whether the drain was ended before its timeout.
    pub fn is_forced(&self) -> bool {
        *self.force.borrow()
    }

    /// Waits until the drain must end.
    pub async fn over(mut self) {
        let forced = async {
            if self.force.wait_for(|force| *force).await.is_err() {
                // The sender is gone, so the drain cannot be forced any more.
                std::future::pending::<()>().await;
            }
        };
        tokio::select! {
            () = sleep_until(self.start + self.timeout) => {}
            () = forced => {}
        }
    }

    /// The time over which watches end.
    pub fn spread(&self) -> Duration {
        MAX_SPREAD.min(self.timeout / 4)
    }
}

/// A listener of one worker.
pub struct WorkerListener {
    bound: Arc<BoundListener>,
    server: Server,
    /// Drains the connections.
    drain: DrainTrigger,
    /// Drains the watches on the current upstream.
    watches: (DrainTrigger, DrainWatcher),
    /// Ends the accept loops of each socket.
    sockets: HashMap<SocketId, DrainTrigger>,
}

/// What serves the connections of a listener.
pub enum Server {
    /// L7.
    Https(Rc<HttpsServer>),
    /// L4.
    Tcp(Rc<TcpForwarder>),
}

impl Server {
    fn accept(&self, socket: TcpListener, drain: DrainWatcher) {
        match self {
            Self::Https(server) => spawn_local(Rc::clone(server).accept(socket, drain)),
            Self::Tcp(forwarder) => spawn_local(Rc::clone(forwarder).accept(socket, drain)),
        };
    }

    /// Open connections, tunnels included.
    fn connections(&self) -> usize {
        match self {
            Self::Https(server) => server.connections(),
            Self::Tcp(forwarder) => forwarder.connections(),
        }
    }
}

impl WorkerListener {
    pub fn new(
        bound: Arc<BoundListener>,
        server: Server,
        drain: DrainTrigger,
        watches: (DrainTrigger, DrainWatcher),
    ) -> Self {
        Self { bound, server, drain, watches, sockets: HashMap::new() }
    }

    /// Whether `bound` is a later configuration of this listener.
    pub fn is_same_listener(&self, bound: &BoundListener) -> bool {
        self.bound.is_same_listener(bound)
    }

    /// Whether requests go through this client.
    pub fn uses(&self, client: &Rc<UpstreamClient>) -> bool {
        match &self.server {
            Server::Https(server) => Rc::ptr_eq(&server.service().upstream, client),
            Server::Tcp(_) => false,
        }
    }

    /// What serves the connections.
    pub fn server(&self) -> &Server {
        &self.server
    }

    /// Sets the configuration. Returns whether it has another upstream.
    pub fn replace_bound(&mut self, bound: Arc<BoundListener>) -> bool {
        let previous = std::mem::replace(&mut self.bound, bound);
        !Arc::ptr_eq(&previous.upstream, &self.bound.upstream)
    }

    /// Drains the watches that start from now on.
    pub fn watch_drain(&self) -> DrainWatcher {
        self.watches.1.clone()
    }

    /// Separates the watches that start from now on from the current ones, whose drain is returned.
    pub fn replace_watch_drain(&mut self) -> DrainTrigger {
        std::mem::replace(&mut self.watches, drain::channel()).0
    }

    /// Accepts on these sockets and on no others. `new_sockets` holds those that the listener does
    /// not have yet; they are taken out of it.
    pub fn listen(
        &mut self,
        sockets: &[(SocketId, SocketAddr)],
        new_sockets: &mut HashMap<SocketId, Vec<StdListener>>,
    ) {
        for (id, address) in sockets {
            let Some(new) = new_sockets.remove(id) else { continue };
            let (trigger, watcher) = drain::channel();
            for socket in new {
                match TcpListener::from_std(socket) {
                    Ok(socket) => self.server.accept(socket, watcher.clone()),
                    Err(error) => {
                        let listener = self.bound.name();
                        tracing::error!(listener, %address, %error, "cannot accept on socket");
                    }
                }
            }
            self.sockets.insert(*id, trigger);
        }
        self.sockets.retain(|id, trigger| {
            let is_used = sockets.iter().any(|(used, _)| used == id);
            if !is_used {
                trigger.start(Duration::ZERO);
            }
            is_used
        });
    }

    /// Stops accepting on some sockets at once. The connections in their queues are left to the
    /// other owner of the socket.
    pub fn release_sockets(&mut self, is_released: impl Fn(SocketId) -> bool) {
        self.sockets.retain(|id, trigger| {
            let released = is_released(*id);
            if released {
                trigger.force();
            }
            !released
        });
    }

    /// Stops accepting, announces the end to clients, waits for them, and closes all open
    /// connections at the deadline.
    pub async fn drain(mut self, deadline: DrainDeadline) {
        let spread = deadline.spread();
        self.listen(&[], &mut HashMap::new());
        self.drain.start(spread);
        self.watches.0.start(spread);
        while self.server.connections() > 0 && !deadline.is_over() {
            if let Server::Tcp(forwarder) = &self.server {
                forwarder.end_due_flows(deadline.elapsed(), deadline.timeout());
            }
            sleep(DRAIN_POLL).await;
        }
        let connections = self.server.connections();
        if connections == 0 {
            return;
        }
        tracing::warn!(
            listener = self.bound.name(),
            connections,
            reason =
                if deadline.is_forced() { "second termination signal" } else { "drain timeout" },
            "drain ended; closing open connections"
        );
        match &self.server {
            Server::Https(server) => server.service().tunnels.close_all(),
            Server::Tcp(forwarder) => {
                forwarder.end_due_flows(deadline.timeout(), deadline.timeout());
            }
        }
        self.drain.force();
        self.watches.0.force();
        let end = Instant::now() + FORCED_CLOSE_TIMEOUT;
        while self.server.connections() > 0 && Instant::now() < end {
            sleep(DRAIN_POLL).await;
        }
    }
}

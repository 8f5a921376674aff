//! A listener of one worker: its accept loops, its server, and its drain.
//!
//! A drain stops accepting, sends GOAWAY to clients, ends watches spread over some time, and waits for other
//! requests until its [`DrainDeadline`]. Then it closes all open connections. The protocol of an L4 flow is
//! unknown, so no end can be announced: flows are reset, spread over the time until the deadline. One that has no
//! endpoint yet is reset at the deadline.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use jackstay_core::drain::{CloseCause, DrainStep, ListenerDrain, watch_spread};
use jackstay_sys::clock;
use jackstay_sys::sockets::stream::{DetachedListener, TcpListener};
use tokio::sync::watch;
use tokio::task::spawn_local;
use tokio::time::{sleep, sleep_until};

use crate::app::listener::BoundListener;
use crate::app::sockets::SocketId;
use crate::proxy::drain::{self, DrainTrigger, DrainWatcher};
use crate::proxy::https_server::HttpsServer;
use crate::proxy::passthrough::forwarder::TcpForwarder;
use crate::proxy::upstream_client::UpstreamClient;

/// How often a drain checks for open connections.
pub const DRAIN_POLL: Duration = Duration::from_millis(10);

/// The deadline of a drain: its timeout, or the signal to close all connections at once.
#[derive(Debug, Clone)]
pub struct DrainDeadline {
    start: Instant,
    timeout: Duration,
    force: watch::Receiver<bool>,
}

impl DrainDeadline {
    /// The deadline of a drain that starts now. It is over early if `force` becomes true.
    pub fn new(timeout: Duration, force: watch::Receiver<bool>) -> Self {
        Self { start: clock::now(), timeout, force }
    }

    /// Time since the start of the drain.
    pub fn elapsed(&self) -> Duration {
        clock::elapsed(self.start)
    }

    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Whether the deadline has passed.
    pub fn is_over(&self) -> bool {
        self.is_forced() || clock::now() >= self.start + self.timeout
    }

    /// Whether the signal to close all connections was sent.
    pub fn is_forced(&self) -> bool {
        *self.force.borrow()
    }

    /// Waits for the deadline.
    pub async fn over(mut self) {
        let forced = async {
            if self.force.wait_for(|force| *force).await.is_err() {
                // The sender is dropped, so the drain cannot be forced any more.
                std::future::pending::<()>().await;
            }
        };
        tokio::select! {
            () = sleep_until((self.start + self.timeout).into()) => {}
            () = forced => {}
        }
    }

    /// The time over which the ends of watches are spread.
    pub fn spread(&self) -> Duration {
        watch_spread(self.timeout)
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
    /// Stops the accept loops of each socket.
    sockets: HashMap<SocketId, DrainTrigger>,
}

/// The server of a listener's connections.
pub enum Server {
    /// L7.
    Https(Rc<HttpsServer>),
    /// L4.
    Tcp(Rc<TcpForwarder>),
}

impl Server {
    fn accept(&self, socket: TcpListener, drain: DrainWatcher) {
        match self {
            Self::Https(server) => Rc::clone(server).accept(socket, drain),
            Self::Tcp(forwarder) => {
                spawn_local(Rc::clone(forwarder).accept(socket, drain));
            }
        }
    }

    /// Open connections, tunnels included.
    fn connections(&self) -> usize {
        match self {
            Self::Https(server) => server.connections(),
            Self::Tcp(forwarder) => forwarder.connections(),
        }
    }

    /// Ends the flows that are due when a drain with this timeout has lasted for `elapsed`.
    fn end_due_flows(&self, elapsed: Duration, timeout: Duration) {
        match self {
            Self::Https(server) => {
                if let Some(flows) = server.flows() {
                    flows.end_due(elapsed, timeout);
                }
            }
            Self::Tcp(forwarder) => forwarder.flows().end_due(elapsed, timeout),
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

    /// See [`BoundListener::is_same_listener`].
    pub fn is_same_listener(&self, bound: &BoundListener) -> bool {
        self.bound.is_same_listener(bound)
    }

    pub fn name(&self) -> &str {
        self.bound.name()
    }

    /// Whether requests go through this client.
    pub fn uses(&self, client: &Rc<UpstreamClient>) -> bool {
        match &self.server {
            Server::Https(server) => Rc::ptr_eq(&server.service().upstream, client),
            Server::Tcp(_) => false,
        }
    }

    /// The server of the connections.
    pub fn server(&self) -> &Server {
        &self.server
    }

    /// Sets a changed configuration. Returns whether its upstream is another one.
    pub fn replace_bound(&mut self, bound: Arc<BoundListener>) -> bool {
        let previous = std::mem::replace(&mut self.bound, bound);
        !Arc::ptr_eq(&previous.upstream, &self.bound.upstream)
    }

    /// The drain of the watches that start from now on.
    pub fn watch_drain(&self) -> DrainWatcher {
        self.watches.1.clone()
    }

    /// Gives watches that start from now on a drain of their own. Returns the drain of the current watches.
    pub fn replace_watch_drain(&mut self) -> DrainTrigger {
        std::mem::replace(&mut self.watches, drain::channel()).0
    }

    /// Accepts on exactly these sockets. Those that the listener does not have yet are removed from
    /// `new_sockets`. Returns one trigger for each other address, which is unwatched when its sockets are closed.
    pub fn listen(
        &mut self,
        sockets: &[(SocketId, SocketAddr)],
        new_sockets: &mut HashMap<SocketId, Vec<DetachedListener>>,
    ) -> Vec<DrainTrigger> {
        for (id, address) in sockets {
            let Some(new) = new_sockets.remove(id) else { continue };
            let (trigger, watcher) = drain::channel();
            for socket in new {
                match socket.attach() {
                    Ok(socket) => self.server.accept(socket, watcher.clone()),
                    Err(error) => {
                        let listener = self.bound.name();
                        tracing::error!(listener, %address, %error, "cannot accept on socket");
                    }
                }
            }
            self.sockets.insert(*id, trigger);
        }
        let is_removed = |id: &SocketId| !sockets.iter().any(|(used, _)| used == id);
        let removed = self.sockets.extract_if(|id, _| is_removed(id)).map(|(_, trigger)| trigger);
        removed.inspect(|trigger| trigger.start(Duration::ZERO)).collect()
    }

    /// Stops accepting on some sockets at once. The connections in their queues are left to the other owner of
    /// the sockets.
    pub fn release_sockets(&mut self, is_released: impl Fn(SocketId) -> bool) {
        self.sockets.retain(|id, trigger| {
            let released = is_released(*id);
            if released {
                trigger.force();
            }
            !released
        });
    }

    /// Stops accepting, and accepts what the queues of the sockets hold. Returns what [`Self::listen`] does.
    pub fn close_sockets(&mut self) -> Vec<DrainTrigger> {
        self.listen(&[], &mut HashMap::new())
    }

    /// Drains the listener, as [`ListenerDrain`] decides.
    pub async fn drain(mut self, deadline: DrainDeadline) {
        let spread = deadline.spread();
        self.close_sockets();
        self.drain.start(spread);
        self.watches.0.start(spread);
        let mut drain = ListenerDrain::new(deadline.start, deadline.timeout);
        loop {
            match drain.step(self.server.connections(), deadline.is_forced(), clock::now()) {
                DrainStep::End => return,
                DrainStep::Close(cause) => self.close(cause, &deadline),
                DrainStep::EndDue => {
                    self.server.end_due_flows(deadline.elapsed(), deadline.timeout());
                    sleep(DRAIN_POLL).await;
                }
                DrainStep::AwaitClose => sleep(DRAIN_POLL).await,
            }
        }
    }

    /// Closes all open connections.
    fn close(&self, cause: CloseCause, deadline: &DrainDeadline) {
        tracing::warn!(
            listener = self.bound.name(),
            connections = self.server.connections(),
            reason = cause.as_str(),
            "drain ended; closing open connections"
        );
        if let Server::Https(server) = &self.server {
            server.service().tunnels.close_all();
        }
        self.server.end_due_flows(deadline.timeout(), deadline.timeout());
        self.drain.force();
        self.watches.0.force();
    }
}

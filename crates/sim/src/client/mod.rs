//! Clients: Go's HTTP/2 below, and a model of what the client wants above.

mod bulk;
mod informer;
mod lease;
mod requests;
mod transport;

use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

pub use self::bulk::{BulkMode, BulkReader};
pub use self::informer::Informer;
pub use self::lease::LeaseHolder;
pub use self::requests::{Burst, Reader, Writer};
pub use self::transport::{Failure, Reply, RequestId, Transport};
use crate::apiserver::Store;
use crate::http2::Request;
use crate::invariants::Findings;
use crate::net::{Arrival, ConnectionId, Network, ProcessId};
use crate::scheduler::{Scheduler, Timer};
use crate::trace::Entry;

/// A timer of a client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClientTimer {
    /// A connection is checked.
    Connection(ConnectionId),
    /// The model acts.
    Act(u32),
    /// A request has taken too long.
    Timeout(RequestId),
}

/// What a client wants.
pub trait Model: std::fmt::Debug {
    /// The client starts.
    fn start(&mut self, port: &mut Port<'_>);
    /// A timer that the model has started.
    fn act(&mut self, port: &mut Port<'_>, what: u32);
    /// Something has happened to a request.
    fn replied(&mut self, port: &mut Port<'_>, request: RequestId, reply: Reply);
    /// A request has taken too long. It is cancelled.
    fn timed_out(&mut self, port: &mut Port<'_>, request: RequestId);
    /// The run is over: is anything missing?
    fn finish(&mut self, _port: &mut Port<'_>) {}
}

/// What a model can do.
#[derive(Debug)]
pub struct Port<'a> {
    /// Number of the client.
    pub client: u16,
    /// Its process.
    pub process: ProcessId,
    /// Time, random numbers and log.
    pub s: &'a mut Scheduler,
    /// The network.
    pub net: &'a mut Network,
    /// The client's connections.
    pub transport: &'a mut Transport,
    /// The store, to compare what the client sees with.
    pub store: &'a Store,
    /// What is reported.
    pub findings: &'a mut Findings,
    /// Requests that failed because the model has closed the connections.
    pub failed: &'a mut Vec<(RequestId, Reply)>,
}

impl Port<'_> {
    /// Sends a request.
    pub fn submit(&mut self, request: Rc<Request>, timeout: Option<Duration>) -> RequestId {
        let id = self.transport.submit(self.s, self.net, request);
        self.s.record(Entry::Sent { client: self.client, request: id });
        if let Some(timeout) = timeout {
            let timer = Timer::Client(ClientTimer::Timeout(id));
            self.s.timer(self.s.now + timeout, self.process, timer);
        }
        id
    }

    /// Starts a timer of the model.
    pub fn act_after(&mut self, pause: Duration, what: u32) {
        self.s.timer(self.s.now + pause, self.process, Timer::Client(ClientTimer::Act(what)));
    }

    /// A number for a write.
    pub fn token(&mut self) -> u64 {
        self.s.rng.u64(1..)
    }

    /// Closes the connections of the client.
    pub fn close_connections(&mut self) {
        let failed = self.transport.close_all(self.s, self.net);
        self.failed.extend(failed);
    }
}

/// A client.
#[derive(Debug)]
pub struct Client {
    index: u16,
    /// Its process.
    pub process: ProcessId,
    transport: Transport,
    model: Box<dyn Model>,
    failed: Vec<(RequestId, Reply)>,
    /// The responses that have begun: the bytes of their bodies so far, and of the whole body if it is a list.
    begun: BTreeMap<RequestId, (u32, u32)>,
    stopped: bool,
}

/// What a client needs from the world.
#[derive(Debug)]
pub struct Surroundings<'a> {
    /// Time, random numbers and log.
    pub s: &'a mut Scheduler,
    /// The network.
    pub net: &'a mut Network,
    /// The store.
    pub store: &'a Store,
    /// What is reported.
    pub findings: &'a mut Findings,
}

impl Client {
    /// A client of these servers.
    pub fn new(
        index: u16,
        process: ProcessId,
        servers: Vec<ProcessId>,
        model: Box<dyn Model>,
    ) -> Self {
        let transport = Transport::new(process, servers);
        Self {
            index,
            process,
            transport,
            model,
            failed: Vec::new(),
            begun: BTreeMap::new(),
            stopped: false,
        }
    }

    /// Starts the client.
    pub fn start(&mut self, around: Surroundings<'_>) {
        self.with_model(around, |model, port| model.start(port));
    }

    /// Takes in what has arrived.
    pub fn arrived(&mut self, around: Surroundings<'_>, id: ConnectionId, what: Arrival) {
        if self.stopped {
            return;
        }
        let replies = self.transport.arrived(around.s, around.net, id, what);
        self.replied(around, replies);
    }

    /// Takes in the end of a timer.
    pub fn timer(&mut self, around: Surroundings<'_>, timer: ClientTimer) {
        if self.stopped {
            return;
        }
        match timer {
            ClientTimer::Connection(id) => {
                let replies = self.transport.timer(around.s, around.net, id);
                self.replied(around, replies);
            }
            ClientTimer::Act(what) => self.with_model(around, |model, port| model.act(port, what)),
            ClientTimer::Timeout(id) => {
                self.transport.cancel(around.s, around.net, id);
                self.with_model(around, |model, port| model.timed_out(port, id));
            }
        }
    }

    /// Ends the client: it closes its connections.
    #[allow(clippy::needless_pass_by_value)] // as its other methods have it
    pub fn stop(&mut self, around: Surroundings<'_>) {
        let reborrowed = Surroundings {
            s: around.s,
            net: around.net,
            store: around.store,
            findings: around.findings,
        };
        self.with_model(reborrowed, |model, port| model.finish(port));
        self.stopped = true;
        self.transport.close_all(around.s, around.net);
        around.findings.clients_stopped += 1;
    }

    #[allow(clippy::needless_pass_by_value)] // as its callers have it
    fn replied(&mut self, around: Surroundings<'_>, replies: Vec<(RequestId, Reply)>) {
        if replies.is_empty() {
            return;
        }
        for (id, reply) in &replies {
            if let Some(fault) = self.follow(*id, reply) {
                let text = format!("client {}: request {id}: {fault}", self.index);
                around.findings.violation(text);
            }
        }
        self.with_model(around, |model, port| {
            for (id, reply) in replies {
                model.replied(port, id, reply);
            }
        });
    }

    /// Follows a response: one head, then its body, and of a list all of it once. Returns what is wrong.
    fn follow(&mut self, id: RequestId, reply: &Reply) -> Option<&'static str> {
        match reply {
            Reply::Head(head) => self.begun.insert(id, (0, head.length)).map(|_| "a second head"),
            Reply::Data(data) => {
                let Some((bytes, _)) = self.begun.get_mut(&id) else {
                    return Some("a body without a head");
                };
                *bytes += data.len();
                None
            }
            Reply::End => {
                let (bytes, length) = self.begun.remove(&id)?;
                let is_whole = length == 0 || bytes == length;
                (!is_whole).then_some("a list with parts of another response")
            }
            Reply::Failed(_) => {
                self.begun.remove(&id);
                None
            }
        }
    }

    #[allow(clippy::needless_pass_by_value)] // its parts are moved to the port
    fn with_model(
        &mut self,
        around: Surroundings<'_>,
        act: impl FnOnce(&mut dyn Model, &mut Port<'_>),
    ) {
        let mut port = Port {
            client: self.index,
            process: self.process,
            s: around.s,
            net: around.net,
            transport: &mut self.transport,
            store: around.store,
            findings: around.findings,
            failed: &mut self.failed,
        };
        act(&mut *self.model, &mut port);
        while let Some((id, reply)) = port.failed.pop() {
            self.model.replied(&mut port, id, reply);
        }
    }
}

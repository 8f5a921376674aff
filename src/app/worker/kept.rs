//! A listener that a worker has: where it accepts, what is open on it, and its end.
//!
//! It ends as its clients want it: it accepts no more, tells them, lets watches go one by one and
//! waits for the rest, until its [`Deadline`] is over. What is left then is closed; passed connections,
//! which cannot be told, are reset one by one before that.

use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::spawn_local;
use tokio::time::{Instant, sleep, sleep_until};

use super::{DRAIN_TICK, Part};
use crate::proxy::drain::{self, DrainTrigger, DrainWatcher};
use crate::proxy::listener::Listener;
use crate::proxy::passthrough;
use crate::proxy::upstream_client::UpstreamClient;
use crate::upstream::Upstream;

/// Longest time over which the watches of a listener that goes are let go. Their clients come back
/// within a second, so this is what keeps a node with a thousand of them from being a herd.
const SPREAD: Duration = Duration::from_secs(5);
/// How long what was told to end may take to end.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// Until when a drain may go on: for a time, or until somebody wants the end at once.
#[derive(Debug, Clone)]
pub struct Deadline {
    from: Instant,
    timeout: Duration,
    cut: watch::Receiver<bool>,
}

impl Deadline {
    /// A drain that begins now. It is cut short when `cut` turns true.
    pub fn new(timeout: Duration, cut: watch::Receiver<bool>) -> Self {
        Self { from: Instant::now(), timeout, cut }
    }

    /// Whether it may go on no longer.
    pub fn is_over(&self) -> bool {
        self.is_cut() || Instant::now() >= self.from + self.timeout
    }

    /// Waits until then.
    pub async fn over(mut self) {
        let cut = async {
            if self.cut.wait_for(|cut| *cut).await.is_err() {
                // Nobody can want it any more.
                std::future::pending::<()>().await;
            }
        };
        tokio::select! {
            () = sleep_until(self.from + self.timeout) => {}
            () = cut => {}
        }
    }

    /// The time over which watches are let go.
    pub fn spread(&self) -> Duration {
        SPREAD.min(self.timeout / 4)
    }

    fn is_cut(&self) -> bool {
        *self.cut.borrow()
    }
}

/// A listener that a worker has.
pub struct Kept {
    /// Its name.
    pub name: String,
    /// Where it leads, and the end of the watches that go there.
    pub upstream: Arc<Upstream>,
    pub watches: (DrainTrigger, DrainWatcher),
    /// The end of its connections.
    pub trigger: DrainTrigger,
    /// Where it listens, and the end of that.
    pub places: HashMap<u64, DrainTrigger>,
    /// What it does with connections.
    pub kind: Kind,
}

/// What a listener does with connections.
pub enum Kind {
    /// L7.
    Terminate(Rc<Listener>),
    /// L4.
    Passthrough(Rc<passthrough::Listener>),
}

impl Kind {
    /// Connections and tunnels.
    fn open(&self) -> usize {
        match self {
            Self::Terminate(listener) => {
                listener.open.get() + listener.serving.now().tunnels.open()
            }
            Self::Passthrough(listener) => listener.open.get(),
        }
    }

    /// Ends the passed connections whose turn has come.
    fn drain(&self, taken: Duration, timeout: Duration) {
        if let Self::Passthrough(listener) = self {
            listener.table.drain(listener, taken, timeout);
        }
    }
}

impl Kept {
    /// Whether it is the listener of that name, in that mode.
    pub fn is(&self, part: &Part) -> bool {
        self.name == part.config.name
            && matches!(self.kind, Kind::Terminate(_)) == part.plane.tls().is_some()
    }

    /// Whether its requests use this client.
    pub fn uses(&self, client: &Rc<UpstreamClient>) -> bool {
        match &self.kind {
            Kind::Terminate(listener) => Rc::ptr_eq(&listener.serving.now().upstream, client),
            Kind::Passthrough(_) => false,
        }
    }

    /// Listens at these places, first at the new ones, and at no other.
    pub fn listen(&mut self, places: &[u64], sockets: Vec<(u64, Vec<std::net::TcpListener>)>) {
        for (place, sockets) in sockets {
            let (trigger, drain) = drain::channel();
            for socket in sockets {
                let socket = match TcpListener::from_std(socket) {
                    Ok(socket) => socket,
                    Err(error) => {
                        tracing::error!(listener = self.name, %error, "cannot listen");
                        continue;
                    }
                };
                let drain = drain.clone();
                match &self.kind {
                    Kind::Terminate(listener) => {
                        spawn_local(Rc::clone(listener).accept(socket, drain));
                    }
                    Kind::Passthrough(listener) => {
                        spawn_local(Rc::clone(listener).accept(socket, drain));
                    }
                }
            }
            self.places.insert(place, trigger);
        }
        self.places.retain(|place, trigger| {
            let stays = places.contains(place);
            if !stays {
                trigger.start(Duration::ZERO);
            }
            stays
        });
    }

    /// Leaves places, with all that waits there, to those who have them now.
    pub fn hand_over(&mut self, is_theirs: impl Fn(u64) -> bool) {
        self.places.retain(|place, trigger| {
            let theirs = is_theirs(*place);
            if theirs {
                trigger.force();
            }
            !theirs
        });
    }

    /// Accepts no more, lets clients know, waits for them, and cuts what is left at the deadline.
    pub async fn end(mut self, deadline: Deadline) {
        let spread = deadline.spread();
        self.listen(&[], Vec::new());
        self.trigger.start(spread);
        self.watches.0.start(spread);
        while self.kind.open() > 0 && !deadline.is_over() {
            self.kind.drain(deadline.from.elapsed(), deadline.timeout);
            sleep(DRAIN_TICK).await;
        }
        if self.kind.open() > 0 {
            tracing::warn!(
                listener = self.name,
                connections = self.kind.open(),
                "{}: closing what is left",
                if deadline.is_cut() { "told again to end" } else { "the drain timeout is over" }
            );
            if let Kind::Terminate(listener) = &self.kind {
                listener.serving.now().tunnels.end();
            }
            self.kind.drain(deadline.timeout, deadline.timeout);
            self.trigger.force();
            self.watches.0.force();
            let deadline = Instant::now() + LAST_WORDS;
            while self.kind.open() > 0 && Instant::now() < deadline {
                sleep(DRAIN_TICK).await;
            }
        }
    }
}

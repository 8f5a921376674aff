//! Holds back the requests of clients that have proven nothing, in the order of [`jackstay_core::admission::fair_queue`]: requests with
//! tokens that no response has proven yet, and upgrades with such a token or none. A request keeps its place among
//! those in progress until its response head arrives, or for a second after it was sent
//! ([`UnprovenRequest::sent`]). An upgrade keeps it until its response head arrives, because it has a connection of
//! its own.

use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::{Duration, Instant};

use jackstay_core::admission::fair_queue::{Ended, FairQueue, QueueLimits, is_often_rejected};
use jackstay_core::admission::turns::{Next, Waits};
use jackstay_core::admission::{MemoryBudget, Refusal};
use jackstay_core::request::status_error::StatusError;
use jackstay_sys::clock;
use jackstay_sys::sockets::source::Source;
use tokio::sync::oneshot;
use tokio::task::spawn_local;
use tokio::time::{sleep_until, timeout};

use super::proven_tokens::TokenKey;
use crate::observe::RateLimitedWarnings;

/// Requests with tokens that no response has proven yet. They share a few HTTP/2 connections.
pub const REQUESTS: Unproven = Unproven {
    limits: QueueLimits { in_progress: 128, source_in_progress: 32, source_waiting: 256 },
    subject: "requests with unproven tokens",
    refusal: Refusal::UnprovenRequests,
};
/// Upgrades with such a token or none. Each opens a connection.
pub const UPGRADES: Unproven = Unproven {
    limits: QueueLimits { in_progress: 32, source_in_progress: 8, source_waiting: 64 },
    subject: "upgrades without a proven token",
    refusal: Refusal::UnprovenUpgrades,
};
/// A request waits no longer than this.
const MAX_WAIT: Duration = Duration::from_secs(5);
/// Number of favored requests of one client connection at a time.
const MAX_FAVORED: usize = 8;
const WARNING_INTERVAL: Duration = Duration::from_secs(5);

/// What is held back.
#[derive(Debug, Clone, Copy)]
pub struct Unproven {
    limits: QueueLimits,
    /// Its name in logs.
    subject: &'static str,
    /// Why one is refused.
    refusal: Refusal,
}

/// The requests of one worker to one upstream.
pub struct UnprovenRequests {
    queue: RefCell<FairQueue<Source, Waiting>>,
    /// When the timer that starts requests of slowed sources is due.
    timer: Cell<Option<Instant>>,
    warnings: RateLimitedWarnings,
    memory: Arc<MemoryBudget>,
    kind: Unproven,
    this: Weak<Self>,
}

struct Waiting {
    token: Option<TokenKey>,
    open: OpenRequest,
    start: oneshot::Sender<Start>,
}

/// Why a request waits no longer.
enum Start {
    InProgress(Rc<UnprovenRequest>),
    /// Another request with the same token has proven it.
    Proven,
}

/// What a client connection has sent.
#[derive(Debug, Default)]
pub struct ConnectionRecord {
    rejected: Cell<bool>,
    /// Number of requests that wait or are in progress.
    open: Cell<usize>,
}

/// Counts a request of a client connection until it is dropped.
struct OpenRequest(Rc<ConnectionRecord>);

impl OpenRequest {
    fn new(record: &Rc<ConnectionRecord>) -> Self {
        record.open.set(record.open.get() + 1);
        Self(Rc::clone(record))
    }
}

impl Drop for OpenRequest {
    fn drop(&mut self) {
        self.0.open.set(self.0.open.get() - 1);
    }
}

/// A request in progress.
pub struct UnprovenRequest {
    requests: Rc<UnprovenRequests>,
    source: Source,
    id: u64,
    open: OpenRequest,
    is_sent: Cell<bool>,
    ended: Cell<Ended>,
    /// Whether it belongs on the connections for clients whose tokens keep being rejected.
    pub is_often_rejected: bool,
}

impl UnprovenRequests {
    /// An empty queue. Refusals are counted in `memory`.
    pub fn new(kind: Unproven, memory: &Arc<MemoryBudget>) -> Rc<Self> {
        Rc::new_cyclic(|this| Self {
            queue: RefCell::new(FairQueue::new(kind.limits)),
            timer: Cell::new(None),
            warnings: RateLimitedWarnings::new(WARNING_INTERVAL),
            memory: Arc::clone(memory),
            kind,
            this: this.clone(),
        })
    }

    /// Waits until a request may be sent. `None` if its token has been proven meanwhile.
    ///
    /// # Errors
    /// 429 if too many requests of the source wait, or if it has waited for too long.
    pub async fn admit(
        self: &Rc<Self>,
        source: Source,
        record: &Rc<ConnectionRecord>,
        token: Option<TokenKey>,
    ) -> Result<Option<Rc<UnprovenRequest>>, StatusError> {
        let favored = !record.rejected.get() && record.open.get() < MAX_FAVORED;
        let (start, started) = oneshot::channel();
        let waiting = Waiting { token, open: OpenRequest::new(record), start };
        let arrival = self.queue.borrow_mut().arrive(source, favored, waiting, clock::now());
        let Ok(Waits { id, displaced }) = arrival else { return Err(self.refused()) };
        // Its sender is dropped, which refuses it.
        drop(displaced);
        let _place = Place { requests: self, source, id };
        self.start_due();
        match timeout(MAX_WAIT, started).await {
            Ok(Ok(Start::InProgress(request))) => Ok(Some(request)),
            Ok(Ok(Start::Proven)) => Ok(None),
            Ok(Err(_)) | Err(_) => Err(self.refused()),
        }
    }

    /// A token has been proven: the waiting requests with the same token wait no longer.
    pub fn proven(&self, token: TokenKey) {
        let waiting = self.queue.borrow_mut().cancel_if(|waiting| waiting.token == Some(token));
        for waiting in waiting {
            let _ = waiting.start.send(Start::Proven);
        }
    }

    fn refused(&self) -> StatusError {
        self.memory.count(self.kind.refusal);
        self.kind.refusal.into()
    }

    /// Starts the requests that may start, and sets the timer for the next one.
    fn start_due(&self) {
        let Some(requests) = self.this.upgrade() else { return };
        let now = clock::now();
        let at = loop {
            let next = self.queue.borrow_mut().next(now);
            let started = match next {
                Next::Start(started) => started,
                Next::Wait(Some(at)) => break at,
                Next::Wait(None) | Next::Evict(_) | Next::Empty => return,
            };
            let is_often_rejected = is_often_rejected(&started);
            let Waiting { open, start, .. } = started.item;
            let request = UnprovenRequest {
                requests: Rc::clone(&requests),
                source: started.key,
                id: started.id,
                open,
                is_sent: Cell::new(false),
                ended: Cell::new(Ended::Unknown),
                is_often_rejected,
            };
            // If the request was cancelled, this drops it, which ends it.
            let _ = start.send(Start::InProgress(Rc::new(request)));
        };
        if self.timer.get().is_some_and(|timer| timer > now && timer <= at) {
            return;
        }
        self.timer.set(Some(at));
        let this = self.this.clone();
        spawn_local(async move {
            sleep_until(at.into()).await;
            if let Some(this) = this.upgrade() {
                this.start_due();
            }
        });
    }
}

/// The place of a waiting request, which it leaves when this is dropped.
struct Place<'a> {
    requests: &'a UnprovenRequests,
    source: Source,
    id: u64,
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let cancelled = self.requests.queue.borrow_mut().cancel(self.source, self.id);
        drop(cancelled);
    }
}

impl UnprovenRequest {
    /// The request is sent to an apiserver, for the first time or again.
    pub fn sent(&self) {
        if self.is_sent.replace(true) {
            return;
        }
        let mut queue = self.requests.queue.borrow_mut();
        queue.sent(self.source, self.id, clock::now());
        let is_waited_for = queue.waiting() > 0;
        drop(queue);
        if is_waited_for {
            // A waiting request may start when the response is late.
            self.requests.start_due();
        }
    }

    /// Records what the response shows.
    pub fn ended(&self, ended: Ended) {
        self.ended.set(ended);
        match ended {
            Ended::Rejected => self.open.0.rejected.set(true),
            Ended::Accepted => self.open.0.rejected.set(false),
            Ended::Unknown => {}
        }
    }
}

impl Drop for UnprovenRequest {
    fn drop(&mut self) {
        let requests = &self.requests;
        let now = clock::now();
        if requests.queue.borrow_mut().end(self.source, self.id, self.ended.get(), now) {
            let line =
                format!("{} slowed because the apiserver rejects them", requests.kind.subject);
            requests.warnings.warn(&line, format_args!("source {}", self.source));
        }
        requests.start_due();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::task::LocalSet;

    /// The requests of a source, one on each connection, that start at once.
    async fn start(
        requests: &Rc<UnprovenRequests>,
        source: Source,
        count: usize,
    ) -> Vec<Rc<UnprovenRequest>> {
        let mut started = Vec::new();
        for _ in 0..count {
            let request = requests.admit(source, &Rc::default(), None).await;
            started.extend(request.unwrap_or_else(|_| panic!("{source} is refused")));
        }
        started
    }

    #[tokio::test(start_paused = true)]
    async fn request_of_a_fifth_source_starts_when_the_responses_to_four_others_are_late() {
        let test = async {
            let memory = MemoryBudget::new(1 << 20);
            let requests = UnprovenRequests::new(REQUESTS, &memory);
            let begin = clock::now();
            let mut others = Vec::new();
            for uid in 1..=4 {
                others.extend(start(&requests, Source::User(uid), 32).await);
            }
            assert_eq!((others.len(), clock::elapsed(begin)), (128, Duration::ZERO));
            let own = ConnectionRecord::default().into();
            let waiting = requests.admit(Source::User(5), &own, None);
            let sending = async {
                tokio::task::yield_now().await;
                for pause in [900, 0] {
                    for request in &others {
                        request.sent();
                    }
                    // A second attempt does not begin the time anew.
                    tokio::time::sleep(Duration::from_millis(pause)).await;
                }
            };
            let (fifth, ()) = tokio::join!(waiting, sending);
            assert!(fifth.is_ok_and(|request| request.is_some()));
            let waited = clock::elapsed(begin);
            assert!((1_000..1_010).contains(&waited.as_millis()), "{waited:?}");
            // The others have their limit.
            let more = requests.admit(Source::User(1), &own, None).await;
            assert!(more.is_err() && clock::elapsed(begin) >= waited + MAX_WAIT);
        };
        LocalSet::new().run_until(test).await;
    }
}

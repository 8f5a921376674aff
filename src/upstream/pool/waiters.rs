//! The requests of one class that wait for a stream, in the order in which they came. A request only registers;
//! the pool's task grants the streams ([`super::Pool::run`]).

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Arc;

use std::time::Instant;
use tokio::sync::oneshot;

use super::requirements::{PreviousFailure, StreamRequirements, Unavailable};
use crate::net::tls::certificate::Subject;
use crate::upstream::connection::{Connection, Permit};
use crate::upstream::endpoint::Endpoint;
use crate::upstream::resource_versions::ResourceRecord;
use crate::upstream::version_preference::PreferredVersions;

/// The outcome of a wait.
pub(super) type Granted = Result<Permit, Unavailable>;

/// The waiting requests of one class.
#[derive(Default)]
pub(super) struct Waiters {
    queue: RefCell<BTreeMap<u64, Waiter>>,
    next_id: Cell<u64>,
    /// Number of waiting requests that can use any stream.
    unrestricted: Cell<usize>,
}

/// A request that waits for a stream.
pub(super) struct Waiter {
    required: OwnedRequirements,
    /// When the request began to wait.
    pub(super) start: Instant,
    /// When it lost its previous connection, if that was earlier.
    pub(super) without_since: Instant,
    result: oneshot::Sender<Granted>,
}

/// [`StreamRequirements`] without references.
struct OwnedRequirements {
    watch: bool,
    previous_failure: Option<PreviousFailureKind>,
    excluded_endpoints: Vec<Arc<Endpoint>>,
    without_connection_since: Option<Instant>,
    held: bool,
    live_only: bool,
    resource_version: Option<(Arc<ResourceRecord>, u64)>,
    client_subject: Option<Subject>,
    versions: PreferredVersions,
}

enum PreviousFailureKind {
    Silence(std::rc::Rc<Connection>),
    Refusal(std::rc::Rc<Connection>),
}

impl OwnedRequirements {
    fn new(required: StreamRequirements<'_>) -> Self {
        Self {
            watch: required.watch,
            previous_failure: required.previous_failure.map(|failure| match failure {
                PreviousFailure::Silence(at) => PreviousFailureKind::Silence(at.clone()),
                PreviousFailure::Refusal(at) => PreviousFailureKind::Refusal(at.clone()),
            }),
            excluded_endpoints: required.excluded_endpoints.to_vec(),
            without_connection_since: required.without_connection_since,
            held: required.held,
            live_only: required.live_only,
            resource_version: required
                .resource_version
                .map(|(record, version)| (Arc::clone(record), version)),
            client_subject: required.client_subject.cloned(),
            versions: required.versions,
        }
    }

    fn borrowed(&self) -> StreamRequirements<'_> {
        StreamRequirements {
            watch: self.watch,
            previous_failure: self.previous_failure.as_ref().map(|failure| match failure {
                PreviousFailureKind::Silence(at) => PreviousFailure::Silence(at),
                PreviousFailureKind::Refusal(at) => PreviousFailure::Refusal(at),
            }),
            excluded_endpoints: &self.excluded_endpoints,
            without_connection_since: self.without_connection_since,
            held: self.held,
            live_only: self.live_only,
            resource_version: self
                .resource_version
                .as_ref()
                .map(|(record, version)| (record, *version)),
            client_subject: self.client_subject.as_ref(),
            versions: self.versions,
        }
    }

    /// Whether a request with these requirements can use any stream that another request can use.
    fn is_unrestricted(&self) -> bool {
        !self.watch && self.excluded_endpoints.is_empty()
    }
}

impl Waiter {
    pub(super) fn required(&self) -> StreamRequirements<'_> {
        self.required.borrowed()
    }
}

impl Waiters {
    pub(super) fn len(&self) -> usize {
        self.queue.borrow().len()
    }

    /// Whether a new request has to wait behind those that wait already. It need not if all of them wait for
    /// streams of a special kind.
    pub(super) fn block_newcomers(&self) -> bool {
        self.unrestricted.get() > 0
    }

    /// Adds a request at the end. It leaves the queue when the returned value is dropped.
    pub(super) fn register(
        &self,
        required: StreamRequirements<'_>,
        start: Instant,
    ) -> (Registration<'_>, oneshot::Receiver<Granted>) {
        let (result, granted) = oneshot::channel();
        let id = self.next_id.replace(self.next_id.get() + 1);
        let without_since = required.without_connection_since.unwrap_or(start).min(start);
        let required = OwnedRequirements::new(required);
        if required.is_unrestricted() {
            self.unrestricted.set(self.unrestricted.get() + 1);
        }
        self.queue.borrow_mut().insert(id, Waiter { required, start, without_since, result });
        (Registration { waiters: self, id }, granted)
    }

    /// Offers each request to `decide` in order, until that breaks the loop. A request for which it has a result
    /// receives it and leaves the queue.
    pub(super) fn serve(&self, mut decide: impl FnMut(&Waiter) -> Decision) {
        let mut served: Option<u64> = None;
        loop {
            let queue = self.queue.borrow();
            let after = served.map_or(Bound::Unbounded, Bound::Excluded);
            let mut decided = None;
            for (id, waiter) in queue.range((after, Bound::Unbounded)) {
                match decide(waiter) {
                    Decision::Wait => {}
                    Decision::Stop => return,
                    Decision::Answer(result) => {
                        decided = Some((*id, result));
                        break;
                    }
                }
            }
            drop(queue);
            let Some((id, result)) = decided else { return };
            served = Some(id);
            if let Some(waiter) = self.remove(id) {
                // An error means that the request was cancelled; the stream becomes free again.
                let _ = waiter.result.send(result);
            }
        }
    }

    fn remove(&self, id: u64) -> Option<Waiter> {
        let waiter = self.queue.borrow_mut().remove(&id)?;
        if waiter.required.is_unrestricted() {
            self.unrestricted.set(self.unrestricted.get() - 1);
        }
        Some(waiter)
    }
}

/// What happens to a waiting request.
pub(super) enum Decision {
    /// It waits on, and the next one is considered.
    Wait,
    /// It waits on, and so do all behind it.
    Stop,
    /// It waits no longer.
    Answer(Granted),
}

/// The place of a request in the queue, which it leaves when this is dropped.
pub(super) struct Registration<'a> {
    waiters: &'a Waiters,
    id: u64,
}

impl Drop for Registration<'_> {
    fn drop(&mut self) {
        self.waiters.remove(self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use jackstay_sys::clock;

    fn required(watch: bool) -> StreamRequirements<'static> {
        StreamRequirements { watch, ..StreamRequirements::for_client(None) }
    }

    #[test]
    fn requests_are_served_in_order_and_passed_over_if_they_cannot_be() {
        let (waiters, now) = (Waiters::default(), clock::now());
        let mut watch = waiters.register(required(true), now);
        assert!(!waiters.block_newcomers(), "a watch may wait while other requests need not");
        let mut first = waiters.register(required(false), now);
        let cancelled = waiters.register(required(false), now);
        let mut second = waiters.register(required(false), now);
        assert!(waiters.block_newcomers());
        drop(cancelled);
        assert_eq!(waiters.len(), 3);
        let mut free = 1;
        waiters.serve(|waiter| match free {
            0 => Decision::Stop,
            _ if waiter.required().watch => Decision::Wait,
            _ => {
                free -= 1;
                Decision::Answer(Err(Unavailable::Exhausted))
            }
        });
        assert!(first.1.try_recv().is_ok());
        assert!(second.1.try_recv().is_err() && watch.1.try_recv().is_err());
        assert_eq!(waiters.len(), 2);
        waiters.serve(|_| Decision::Answer(Err(Unavailable::NoCredential)));
        assert!(second.1.try_recv().is_ok() && watch.1.try_recv().is_ok());
        drop((watch, first, second));
        assert_eq!((waiters.len(), waiters.block_newcomers()), (0, false));
    }

    #[test]
    fn each_request_is_considered_once_in_a_round() {
        let (waiters, now) = (Waiters::default(), clock::now());
        let registered: Vec<_> =
            (0..1000).map(|_| waiters.register(required(false), now)).collect();
        let mut considered = 0;
        waiters.serve(|_| {
            considered += 1;
            if considered % 2 == 0 {
                Decision::Wait
            } else {
                Decision::Answer(Err(Unavailable::Exhausted))
            }
        });
        assert_eq!((considered, waiters.len()), (1000, 500));
        drop(registered);
        assert_eq!(waiters.len(), 0);
    }
}

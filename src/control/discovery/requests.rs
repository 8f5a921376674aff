//! The requests of discovery: lists and watches over connections of jackstay, with the credential of discovery.
//!
//! Discovery has a connection pool of its own, with the health checks and the failover of the pool for
//! clients' requests. A server may send a list without an end, or end each watch immediately, so sizes and the rate of
//! requests are limited.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use h2::RecvStream;
use http::{HeaderValue, Request, StatusCode, header};
use jackstay_core::discovery::source::EndpointSource;
use jackstay_kubeconfig::discovery::DiscoveryToken;
use jackstay_sys::clock;
use tokio::time::{sleep_until, timeout};

use crate::upstream::Upstream;
use crate::upstream::connection::Permit;
use crate::upstream::credentials::CredentialClass;
use crate::upstream::pool::{Pool, StreamRequest, StreamRequirements, Unavailable};

/// Limit for a response head; a list of a few objects takes milliseconds.
const HEAD_TIMEOUT: Duration = Duration::from_secs(30);
/// Largest list with all its pages, and largest event of a watch, in bytes. A slice with 1,000 endpoints, the most that
/// Kubernetes allows, has 200 KiB, and at most 5,000 endpoints are kept. JSON of many small maps takes almost 100 times
/// its size when it is parsed: 98 MiB.
pub const MAX_BYTES: usize = 1 << 20;
/// Rate limit: a burst of requests, then one in each interval.
const BURST: u32 = 6;
const INTERVAL: Duration = Duration::from_secs(1);

/// Why a request got no response, or not all of it.
pub type RequestError = String;

/// Sends GET requests.
pub trait Requests {
    /// The body of a response.
    type Body: ResponseChunks;

    /// Sends a request for this path and query. Returns the status and the body.
    fn get(
        &self,
        target: &str,
        is_watch: bool,
    ) -> impl Future<Output = Result<(StatusCode, Self::Body), RequestError>>;
}

/// The body of a response, as it arrives.
pub trait ResponseChunks {
    /// The next part; `None` at the end. `in_event`: a part of an event has arrived, so the body of a watch cannot end
    /// without losing it.
    fn next(&mut self, in_event: bool)
    -> impl Future<Output = Option<Result<Bytes, RequestError>>>;
}

/// Sends requests over a pool of discovery's own, whose connections close when this is dropped.
pub struct PooledRequests {
    upstream: Arc<Upstream>,
    pool: Rc<Pool>,
    token: DiscoveryToken,
    rate: RateLimit,
}

impl PooledRequests {
    /// Requests that authenticate with `token`. The future maintains the connections, and must run meanwhile.
    pub fn new(
        upstream: &Arc<Upstream>,
        token: DiscoveryToken,
    ) -> (Self, impl Future<Output = ()> + use<>) {
        let pool = Pool::for_internal_requests(Arc::clone(upstream));
        let run = Pool::run(Rc::clone(&pool));
        (Self { upstream: Arc::clone(upstream), pool, token, rate: RateLimit::default() }, run)
    }
}

impl Drop for PooledRequests {
    fn drop(&mut self) {
        self.pool.close();
    }
}

impl Requests for PooledRequests {
    type Body = PooledBody;

    async fn get(
        &self,
        target: &str,
        is_watch: bool,
    ) -> Result<(StatusCode, PooledBody), RequestError> {
        sleep_until((self.rate.next_slot(clock::now())).into()).await;
        let class = self.pool.class(CredentialClass::Discovery);
        let required =
            StreamRequirements { long_running: is_watch, ..StreamRequirements::default() };
        let request_stream = StreamRequest { required, ..StreamRequest::for_client(None) };
        let permit = self.pool.acquire(&class, request_stream).await;
        let mut permit = permit.map_err(|unavailable| match unavailable {
            Unavailable::Unreachable(why) => format!("no apiserver: {why}"),
            Unavailable::Exhausted => "no free stream to an apiserver".to_owned(),
            Unavailable::NoCredential => "the credential is not loaded".to_owned(),
        })?;
        let mut head = Request::new(());
        *head.uri_mut() = permit.connection().endpoint.api_root().uri(target);
        let headers = head.headers_mut();
        headers.insert(header::ACCEPT, HeaderValue::from_static("application/json"));
        let agent = concat!("jackstay-discovery/", env!("CARGO_PKG_VERSION"));
        headers.insert(header::USER_AGENT, HeaderValue::from_static(agent));
        if let Some(token) = self.token.header().map_err(|error| error.to_string())? {
            headers.insert(header::AUTHORIZATION, token);
        }
        let (response, _) = permit.open(head, true).map_err(connection_lost)?;
        let timed_out = |_| format!("no answer within {} s", HEAD_TIMEOUT.as_secs());
        let response =
            timeout(HEAD_TIMEOUT, response).await.map_err(timed_out)?.map_err(connection_lost)?;
        permit.head_arrived(clock::now());
        let (head, recv) = response.into_parts();
        let is_watch = is_watch && head.status.is_success();
        let watched = is_watch.then(|| Watched(Arc::clone(&self.upstream)));
        if let Some(watched) = &watched {
            watched.confirm();
        }
        Ok((head.status, PooledBody { recv, permit, watched }))
    }
}

/// The body of a response to [`PooledRequests`].
pub struct PooledBody {
    recv: RecvStream,
    permit: Permit,
    /// `Some` for a watch that was accepted.
    watched: Option<Watched>,
}

struct Watched(Arc<Upstream>);

impl Watched {
    /// Records that the endpoints are current, because an apiserver answers.
    fn confirm(&self) {
        self.0.sources.confirmed(EndpointSource::Slices);
    }
}

impl ResponseChunks for PooledBody {
    /// If the connection of a watch is lost or should drain between two events, the body ends without an error: the
    /// watch continues on another connection.
    async fn next(&mut self, in_event: bool) -> Option<Result<Bytes, RequestError>> {
        let connection = Rc::clone(self.permit.connection());
        let may_leave = self.watched.is_some() && !in_event;
        let next = tokio::select! {
            next = self.recv.data() => next,
            () = connection.until_should_drain(), if may_leave => return None,
        };
        match next {
            Some(Ok(data)) => {
                let _ = self.recv.flow_control().release_capacity(data.len());
                if let Some(watched) = &self.watched {
                    watched.confirm();
                }
                Some(Ok(data))
            }
            Some(Err(_)) if may_leave => None,
            Some(Err(error)) => Some(Err(connection_lost(error))),
            None => {
                self.permit.finished();
                None
            }
        }
    }
}

#[allow(clippy::needless_pass_by_value)] // for `map_err`
fn connection_lost(error: h2::Error) -> RequestError {
    format!("the connection was lost: {error}")
}

/// Allows [`BURST`] requests at once, then one in each [`INTERVAL`] (generic cell rate algorithm).
#[derive(Debug, Default)]
struct RateLimit {
    /// When the next request would be sent if one was sent in each interval.
    theoretical_slot: Cell<Option<Instant>>,
}

impl RateLimit {
    /// When the next request may be sent.
    fn next_slot(&self, now: Instant) -> Instant {
        let next = self.theoretical_slot.get().map_or(now, |at| at.max(now)) + INTERVAL;
        self.theoretical_slot.set(Some(next));
        next.checked_sub(INTERVAL * BURST).map_or(now, |slot| slot.max(now))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn next_slot_after_a_burst_allows_one_request_per_second() {
        let (rate, start) = (RateLimit::default(), clock::now());
        let at = |slot: Instant| slot.saturating_duration_since(start).as_secs();
        let slots: Vec<_> = (0..10).map(|_| at(rate.next_slot(start))).collect();
        assert_eq!(slots, [0, 0, 0, 0, 0, 0, 1, 2, 3, 4]);
        let later = start + Duration::from_secs(60);
        assert_eq!(at(rate.next_slot(later)), 60, "the burst is allowed again after a pause");
    }
}

//! Sends the requests of kube's client over connections of jackstay, with the credential of discovery.
//!
//! Discovery has a connection pool of its own, with the health checks and the failover of the pool for
//! clients' requests. kube requires a transport that is `Send`, but a connection belongs to one thread.
//! The transport is therefore a channel, and [`TransportTask`] on the control thread executes the requests.
//!
//! All requests are GETs: lists and watches. kube buffers a list without a limit, and repeats without a
//! pause a watch that ends immediately, so the task limits sizes and the request rate.

use std::cell::Cell;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use h2::RecvStream;
use http::{HeaderValue, Request, Response, header};
use http_body::{Body, Frame};
use jackstay_core::discovery::source::EndpointSource;
use jackstay_sys::clock;
use kube::client::Body as KubeBody;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{sleep_until, timeout};
use tower::service_fn;
use tower::util::BoxService;

use super::kubeconfig::DiscoveryToken;
use crate::upstream::Upstream;
use crate::upstream::connection::Permit;
use crate::upstream::credentials::CredentialClass;
use crate::upstream::pool::{Pool, StreamRequest, StreamRequirements, Unavailable};

/// Limit for a response head; a list of a few objects takes milliseconds.
const HEAD_TIMEOUT: Duration = Duration::from_secs(30);
/// Largest list, and largest event of a watch, in bytes. A slice with 1,000 endpoints, the most that
/// Kubernetes allows, has 200 KiB.
const MAX_BYTES: usize = 8 << 20;
/// Capacity of the channels for requests and for the chunks of a response.
const CHANNEL_SIZE: usize = 8;
/// Rate limit: a burst of requests, then one in each interval.
const BURST: u32 = 6;
const INTERVAL: Duration = Duration::from_secs(1);

/// Why a request got no response.
pub type TransportError = tower::BoxError;

type ResponseResult = Result<Response<TransportBody>, TransportError>;

/// A request, and the channel for its response.
type QueuedRequest = (Request<()>, oneshot::Sender<ResponseResult>);

/// The transport of kube's client.
pub type Transport = BoxService<Request<KubeBody>, Response<TransportBody>, TransportError>;

/// A response body: the chunks that [`TransportTask`] sends.
pub struct TransportBody(pub(super) mpsc::Receiver<Result<Bytes, TransportError>>);

impl Body for TransportBody {
    type Data = Bytes;
    type Error = TransportError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, TransportError>>> {
        self.0.poll_recv(cx).map(|next| next.map(|chunk| chunk.map(Frame::data)))
    }
}

/// Executes the requests of a transport.
pub struct TransportTask {
    upstream: Arc<Upstream>,
    pool: Rc<Pool>,
    token: DiscoveryToken,
    rate: RateLimit,
}

impl TransportTask {
    /// Returns a transport that authenticates with `token`, and the future that executes its requests.
    /// The future ends when the transport is dropped. At its end, or when it is dropped, its connections
    /// close.
    pub fn start(
        upstream: &Arc<Upstream>,
        token: DiscoveryToken,
    ) -> (Transport, impl Future<Output = ()> + use<>) {
        let (requests, mut queue) = mpsc::channel::<QueuedRequest>(CHANNEL_SIZE);
        let pool = Pool::for_internal_requests(Arc::clone(upstream));
        let upstream = Arc::clone(upstream);
        let run = async move {
            let mut tasks = tokio::task::JoinSet::new();
            tasks.spawn_local(Pool::run(Rc::clone(&pool)));
            let close_pool = ClosePoolOnDrop(Rc::clone(&pool));
            let task = Rc::new(Self { upstream, pool, token, rate: RateLimit::default() });
            while let Some((request, respond)) = queue.recv().await {
                tasks.spawn_local(Rc::clone(&task).execute(request, respond));
                while tasks.try_join_next().is_some() {}
            }
            drop(close_pool);
        };
        let transport = service_fn(move |request: Request<KubeBody>| {
            let (requests, (respond, response)) = (requests.clone(), oneshot::channel());
            async move {
                let ended = "discovery has ended";
                requests.send((request.map(|_| ()), respond)).await.map_err(|_| ended)?;
                response.await.map_err(|_| ended)?
            }
        });
        (BoxService::new(transport), run)
    }

    async fn execute(
        self: Rc<Self>,
        request: Request<()>,
        respond: oneshot::Sender<ResponseResult>,
    ) {
        let watch = request.uri().query().is_some_and(|query| query.contains("watch="));
        sleep_until((self.rate.next_slot(clock::now())).into()).await;
        match self.send(request, watch).await {
            Err(error) => drop(respond.send(Err(error))),
            Ok((mut permit, response)) => {
                let ok = response.status().is_success();
                if ok && watch {
                    self.upstream.sources.confirmed(EndpointSource::Slices);
                }
                let (parts, recv) = response.into_parts();
                let (chunks, body) = mpsc::channel(CHANNEL_SIZE);
                let response = Response::from_parts(parts, TransportBody(body));
                if respond.send(Ok(response)).is_ok() {
                    self.stream_body(recv, &mut permit, &chunks, ok && watch).await;
                }
            }
        }
    }

    /// Sends a request and waits for the response head.
    async fn send(
        &self,
        request: Request<()>,
        watch: bool,
    ) -> Result<(Permit, Response<RecvStream>), TransportError> {
        let class = self.pool.class(CredentialClass::Discovery);
        let required = StreamRequirements { long_running: watch, ..StreamRequirements::default() };
        let request_stream = StreamRequest { required, ..StreamRequest::for_client(None) };
        let permit = self.pool.acquire(&class, request_stream).await;
        let mut permit = permit.map_err(|unavailable| match unavailable {
            Unavailable::Unreachable(why) => format!("no apiserver: {why}"),
            Unavailable::Exhausted => "no free stream to an apiserver".to_owned(),
            Unavailable::NoCredential => "the credential is not loaded".to_owned(),
        })?;
        let mut head = Request::new(());
        let target = request.uri().path_and_query().map_or("/", |target| target.as_str());
        *head.uri_mut() = permit.connection().endpoint.api_root().uri(target);
        let headers = head.headers_mut();
        headers.insert(header::ACCEPT, HeaderValue::from_static("application/json"));
        let agent = concat!("jackstay-discovery/", env!("CARGO_PKG_VERSION"));
        headers.insert(header::USER_AGENT, HeaderValue::from_static(agent));
        if let Some(token) = self.token.header()? {
            headers.insert(header::AUTHORIZATION, token);
        }
        let (response, _) = permit.open(head, true).map_err(connection_lost)?;
        let timed_out = |_| format!("no answer within {} s", HEAD_TIMEOUT.as_secs());
        let response =
            timeout(HEAD_TIMEOUT, response).await.map_err(timed_out)?.map_err(connection_lost)?;
        permit.head_arrived(clock::now());
        Ok((permit, response))
    }

    /// Sends the body to kube in chunks. If the connection of a watch is lost or should drain while no
    /// event is incomplete, the body ends without an error. kube's watcher then resumes the watch without
    /// a new list.
    async fn stream_body(
        &self,
        mut recv: RecvStream,
        permit: &mut Permit,
        chunks: &mpsc::Sender<Result<Bytes, TransportError>>,
        watch: bool,
    ) {
        let connection = Rc::clone(permit.connection());
        let mut notifications = connection.moves.notification_count();
        // Size of the list so far, or of the incomplete event at the end of a watch.
        let mut pending = 0;
        loop {
            let next = tokio::select! {
                next = recv.data() => next,
                () = connection.drain_or_notification(notifications), if watch && pending == 0 => {
                    if connection.should_drain() {
                        return;
                    }
                    notifications = connection.moves.notification_count();
                    continue;
                }
                // kube has dropped the body.
                () = chunks.closed() => return,
            };
            match next {
                Some(Ok(data)) => {
                    let size = data.len();
                    pending = match data.iter().rposition(|byte| *byte == b'\n') {
                        Some(end) if watch => size - end - 1,
                        _ => pending + size,
                    };
                    if pending > MAX_BYTES {
                        let error = format!("a response of more than {MAX_BYTES} bytes");
                        let _ = chunks.send(Err(error.into())).await;
                        return;
                    }
                    if chunks.send(Ok(data)).await.is_err() {
                        return;
                    }
                    let _ = recv.flow_control().release_capacity(size);
                    if watch {
                        self.upstream.sources.confirmed(EndpointSource::Slices);
                    }
                }
                Some(Err(_)) if watch && pending == 0 => return,
                Some(Err(error)) => {
                    let _ = chunks.send(Err(connection_lost(error))).await;
                    return;
                }
                None => {
                    permit.finished();
                    return;
                }
            }
        }
    }
}

#[allow(clippy::needless_pass_by_value)] // for `map_err`
fn connection_lost(error: h2::Error) -> TransportError {
    format!("the connection was lost: {error}").into()
}

/// Closes the pool's connections when the task ends or is aborted.
struct ClosePoolOnDrop(Rc<Pool>);

impl Drop for ClosePoolOnDrop {
    fn drop(&mut self) {
        self.0.close();
    }
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

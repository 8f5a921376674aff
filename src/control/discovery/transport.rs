//! Carries kube's requests over our own connections: the same pool, the same health, the same
//! failover as everybody's requests, with a credential of their own.
//!
//! kube wants a transport that can be sent between threads; our connections live on one. So its
//! half is a channel and the other half a task on the control thread. Only GET is carried: lists
//! and watches. What a server may send is bounded, since kube would collect it without end, and so
//! is how often it is asked, since a watch that ends at once is asked for again at once.

use std::cell::Cell;
use std::fmt;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use h2::RecvStream;
use http::{HeaderValue, Request, Response, header};
use http_body::{Body, Frame};
use kube::client::Body as KubeBody;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, sleep_until, timeout};

use super::kubeconfig::Token;
use crate::upstream::Upstream;
use crate::upstream::connection::Permit;
use crate::upstream::credentials::CredentialClass;
use crate::upstream::endpoint_sources::EndpointSource;
use crate::upstream::pool::{Pool, StreamRequirements, Unavailable};

/// How long a response head may take; a list of a few objects takes milliseconds.
const HEAD_TIMEOUT: Duration = Duration::from_secs(30);
/// Largest list, and largest frame of a watch. A slice with a thousand endpoints has 200 KiB.
const MAX_BYTES: usize = 8 << 20;
/// Chunks on their way to kube.
const CHUNKS: usize = 8;
/// Requests that may go out at once, and how long one costs: after a burst, one in this time.
const BURST: u32 = 6;
const PAUSE: Duration = Duration::from_secs(1);

/// Why a request got no answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TransportError(String);

impl fmt::Display for TransportError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for TransportError {}

struct Asked {
    request: Request<()>,
    answer: oneshot::Sender<Result<Response<TransportBody>, TransportError>>,
}

/// kube's half.
#[derive(Clone)]
pub struct KubeTransport {
    asked: mpsc::Sender<Asked>,
}

impl tower_service::Service<Request<KubeBody>> for KubeTransport {
    type Response = Response<TransportBody>;
    type Error = TransportError;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, TransportError>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), TransportError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<KubeBody>) -> Self::Future {
        let asked = self.asked.clone();
        let request = request.map(|_| ());
        Box::pin(async move {
            let gone = || TransportError("discovery has ended".into());
            let (answer, answered) = oneshot::channel();
            asked.send(Asked { request, answer }).await.map_err(|_| gone())?;
            answered.await.map_err(|_| gone())?
        })
    }
}

/// A response body on its way to kube.
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

/// Our half: carries until kube's half is dropped, or it is itself.
pub struct TransportTask {
    upstream: Arc<Upstream>,
    pool: Rc<Pool>,
    token: Token,
    pace: Pace,
}

impl TransportTask {
    /// A carrier and the road it goes. The road ends with the returned future.
    pub fn open(
        upstream: &Arc<Upstream>,
        token: Token,
    ) -> (KubeTransport, impl Future<Output = ()> + use<>) {
        let (asked, mut requests) = mpsc::channel::<Asked>(CHUNKS);
        let pool = Pool::for_internal_requests(Arc::clone(upstream));
        let upstream = Arc::clone(upstream);
        let road = async move {
            let mut tasks = tokio::task::JoinSet::new();
            tasks.spawn_local(Pool::run(Rc::clone(&pool)));
            let closing = Closing(Rc::clone(&pool));
            let road = Rc::new(Self { upstream, pool, token, pace: Pace::default() });
            while let Some(Asked { request, answer }) = requests.recv().await {
                tasks.spawn_local(Rc::clone(&road).carry(request, answer));
                while tasks.try_join_next().is_some() {}
            }
            drop(closing);
        };
        (KubeTransport { asked }, road)
    }

    async fn carry(
        self: Rc<Self>,
        request: Request<()>,
        answer: oneshot::Sender<Result<Response<TransportBody>, TransportError>>,
    ) {
        let watch = request.uri().query().is_some_and(|query| query.contains("watch="));
        sleep_until(self.pace.slot(Instant::now())).await;
        match self.ask(request, watch).await {
            Err(error) => drop(answer.send(Err(error))),
            Ok((mut permit, response)) => {
                let ok = response.status().is_success();
                if ok && watch {
                    self.upstream.sources.confirmed(EndpointSource::Slices);
                }
                let (parts, recv) = response.into_parts();
                let (chunks, body) = mpsc::channel(CHUNKS);
                if answer.send(Ok(Response::from_parts(parts, TransportBody(body)))).is_ok() {
                    self.stream(recv, &mut permit, &chunks, ok && watch).await;
                }
            }
        }
    }

    async fn ask(
        &self,
        request: Request<()>,
        watch: bool,
    ) -> Result<(Permit, Response<RecvStream>), TransportError> {
        let class = self.pool.class(CredentialClass::Discovery);
        let permit = self
            .pool
            .acquire(&class, StreamRequirements { watch, ..StreamRequirements::for_client(None) })
            .await;
        let mut permit = permit.map_err(|unavailable| match unavailable {
            Unavailable::Unreachable(why) => TransportError(format!("no apiserver: {why}")),
            Unavailable::Exhausted => TransportError("no free stream to an apiserver".into()),
            Unavailable::NoCredential => TransportError("the credential is not loaded".into()),
        })?;
        let mut head = Request::new(());
        let target = request.uri().path_and_query().map_or("/", |target| target.as_str());
        *head.uri_mut() = format!("https://kubernetes.default.svc{target}")
            .parse()
            .map_err(|_| TransportError("a request that cannot be sent".into()))?;
        let headers = head.headers_mut();
        headers.insert(header::ACCEPT, HeaderValue::from_static("application/json"));
        let agent = concat!("jackstay-discovery/", env!("CARGO_PKG_VERSION"));
        headers.insert(header::USER_AGENT, HeaderValue::from_static(agent));
        if let Some(token) = self.token.header().map_err(TransportError)? {
            headers.insert(header::AUTHORIZATION, token);
        }
        let lost = |error: h2::Error| TransportError(format!("the connection was lost: {error}"));
        let (response, _) = permit.open(head, true).map_err(lost)?;
        let late = |_| TransportError(format!("no answer within {} s", HEAD_TIMEOUT.as_secs()));
        let response = timeout(HEAD_TIMEOUT, response).await.map_err(late)?.map_err(lost)?;
        permit.head_arrived(Instant::now());
        Ok((permit, response))
    }

    /// Passes the body on. A watch whose connection is lost or drains ends cleanly if it is at the
    /// end of a frame: the watcher then goes on where it was, without asking for everything anew.
    async fn stream(
        &self,
        mut recv: RecvStream,
        permit: &mut Permit,
        chunks: &mpsc::Sender<Result<Bytes, TransportError>>,
        watch: bool,
    ) {
        let connection = Rc::clone(permit.connection());
        let mut asked = connection.notification_count();
        let mut open = 0;
        loop {
            let next = tokio::select! {
                next = recv.data() => next,
                () = connection.drain_or_notification(asked), if watch && open == 0 => {
                    if connection.should_drain() {
                        return;
                    }
                    asked = connection.notification_count();
                    continue;
                }
                // kube is no longer interested.
                () = chunks.closed() => return,
            };
            match next {
                Some(Ok(data)) => {
                    let size = data.len();
                    open = match data.iter().rposition(|byte| *byte == b'\n') {
                        Some(end) if watch => size - end - 1,
                        _ => open + size,
                    };
                    if open > MAX_BYTES {
                        let error =
                            TransportError(format!("an answer of more than {MAX_BYTES} bytes"));
                        let _ = chunks.send(Err(error)).await;
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
                Some(Err(_)) if watch && open == 0 => return,
                Some(Err(error)) => {
                    let error = TransportError(format!("the connection was lost: {error}"));
                    let _ = chunks.send(Err(error)).await;
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

/// Closes the pool's connections with the road.
struct Closing(Rc<Pool>);

impl Drop for Closing {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// How often the apiserver is asked: a burst, then one request in each [`PAUSE`].
#[derive(Debug, Default)]
struct Pace {
    /// When all that was asked is paid for.
    paid: Cell<Option<Instant>>,
}

impl Pace {
    /// When the next request may go.
    fn slot(&self, now: Instant) -> Instant {
        let paid = self.paid.get().map_or(now, |paid| paid.max(now)) + PAUSE;
        self.paid.set(Some(paid));
        paid.checked_sub(PAUSE * BURST).map_or(now, |slot| slot.max(now))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_and_then_one_a_second() {
        let (pace, start) = (Pace::default(), Instant::now());
        let at = |slot: Instant| slot.saturating_duration_since(start).as_secs();
        let slots: Vec<_> = (0..10).map(|_| at(pace.slot(start))).collect();
        assert_eq!(slots, [0, 0, 0, 0, 0, 0, 1, 2, 3, 4]);
        let later = start + Duration::from_secs(60);
        assert_eq!(at(pace.slot(later)), 60, "paid for");
    }
}

//! Dedicated HTTP/1.1 connections for upgrades. Each is opened for one request; after the response it
//! becomes a tunnel or is closed.

use std::error::Error as _;
use std::future::pending;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use http::{Request, Response};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper::ext::on_informational;
use hyper_util::rt::TokioIo;
use jackstay_core::group_health::remembered_name;
use jackstay_core::request::hygiene::{FIELD_OVERHEAD, MAX_RESPONSE_HEAD};
use jackstay_net::tls::certificate::Subject;
use jackstay_sys::clock;
use jackstay_sys::sockets::stream::SocketRef;
use jackstay_sys::sockets::tracked_stream::StreamObserver;
use jackstay_sys::sockets::tunnel_stream::TunnelStream;
use tokio::sync::Notify;
use tokio::task::{JoinError, JoinHandle, spawn_local};
use tokio::time::timeout;

use super::backends::dial_backend_http1;
use super::connect_race;
use super::credentials::CredentialClass;
use super::dial::UpstreamStream;
use super::endpoint::{ConnectFailure, Endpoint, EndpointState, TunnelledWatchGuard};
use super::pool::{UNAVAILABLE_AFTER, Unavailable};
use super::shared::Upstream;
use super::version_preference::PreferredVersions;
use crate::upstream::flow_check::FlowHealthCheck;

/// Time after which the next endpoint is tried in parallel to one that has not answered. It is twice the
/// time after which a dial starts its own second attempt.
const NEXT_AFTER: Duration = Duration::from_millis(500);
/// Interim responses (1xx) that one request may get. hyper skips them without a limit.
const MAX_INTERIM_RESPONSES: usize = 100;
/// Fields of a response head: no head of [`MAX_RESPONSE_HEAD`] bytes has more, as HTTP/2 counts them.
const MAX_FIELDS: usize = MAX_RESPONSE_HEAD / FIELD_OVERHEAD;

/// The stream of a connection after a response 101.
pub type Tunnelled = TunnelStream<UpstreamStream>;

/// Why a connection has failed.
#[derive(Debug, thiserror::Error)]
pub enum Http1Error {
    /// HTTP failed on it.
    #[error("{}", hyper_text(.0))]
    Hyper(#[source] hyper::Error),
    /// Its flow is dead, for this reason.
    #[error("{0}")]
    FlowDead(&'static str),
    /// Another connection to the endpoint was lost, so that no response can be expected.
    #[error("{0}")]
    NoResponseExpected(String),
    /// The request got more than [`MAX_INTERIM_RESPONSES`] interim responses.
    #[error("more than {MAX_INTERIM_RESPONSES} interim responses")]
    InterimResponses,
    /// Its task has panicked or was cancelled.
    #[error("{0}")]
    Task(#[source] JoinError),
}

fn hyper_text(error: &hyper::Error) -> String {
    if error.is_parse_too_large() {
        return format!("the head of the response is larger than {} KiB", MAX_RESPONSE_HEAD / 1024);
    }
    // hyper does not print the cause.
    match error.source() {
        Some(cause) => format!("{error}: {cause}"),
        None => error.to_string(),
    }
}

/// An open connection on which no request was sent yet.
pub struct Http1Connection {
    pub endpoint: Arc<Endpoint>,
    stream: UpstreamStream,
    observer: StreamObserver,
    /// How long the flow may be without evidence of life once its request is answered.
    tunnel_dead_after: Duration,
    /// Whether the request is a watch, which ends with its endpoint.
    watch: Option<TunnelledWatchGuard>,
}

/// A response on such a connection.
pub struct Http1Response {
    /// The head, and the body of a response that declines the upgrade.
    pub response: Response<Incoming>,
    /// The connection.
    pub driver: Http1Driver,
    /// `Some` for a watch.
    pub watch: Option<TunnelledWatchGuard>,
}

/// Opens a connection to the best endpoint, or to the next one if that fails or is slow. `proven` is
/// the subject that the client has proven, if the request goes upstream with a certificate. `load`
/// returns the load of an endpoint by its label. Endpoints at which the API group `group` fails come last of their state.
///
/// # Errors
/// No credential matches, every endpoint failed, or the time limit is over.
pub async fn open(
    upstream: &Upstream,
    class: CredentialClass,
    proven: Option<&Subject>,
    (versions, group): (PreferredVersions, &str),
    load: impl Fn(&Arc<str>) -> usize,
) -> Result<Http1Connection, Unavailable> {
    let tls = upstream.credentials.tls(class).ok_or(Unavailable::NoCredential)?;
    if tls.certificate.as_ref().map(|shown| &shown.subject) != proven {
        return Err(Unavailable::NoCredential);
    }
    let config = upstream.config();
    let base = config.health.connect_timeout;
    let tunnel_dead_after = config.health.tunnel_dead_after;
    drop(config);
    // Without a usable endpoint the client receives its error as soon as for any other request.
    let limit = if upstream.is_usable() { base } else { base.min(UNAVAILABLE_AFTER) };
    let avoided = upstream.group_failures.avoided(remembered_name(group));
    let mut candidates: Vec<_> = upstream
        .endpoints()
        .iter()
        .map(|endpoint| Candidate {
            rank: (
                endpoint.state(),
                avoided.contains(&endpoint.key()),
                versions.rank_of(endpoint),
                endpoint.is_fallback(),
            ),
            load: load(&endpoint.label),
            endpoint: Arc::clone(endpoint),
        })
        .collect();
    order(&mut candidates, &mut fastrand::Rng::new());
    let mut candidates = candidates.into_iter();
    let next = |_: &[String]| {
        let Candidate { endpoint, .. } = candidates.next()?;
        let tls = Arc::clone(&tls);
        Some(async move {
            let limit = endpoint.connect_timeout(base);
            match dial_backend_http1(upstream, (&endpoint, &tls), limit).await {
                Ok((stream, observer)) => {
                    endpoint.metrics.dialled("ok");
                    let watch = None;
                    Ok(Http1Connection { endpoint, stream, observer, tunnel_dead_after, watch })
                }
                Err(failure) => Err(record_failure(&endpoint, failure)),
            }
        })
    };
    let mut failures = Vec::new();
    match timeout(limit, connect_race::race(next, || NEXT_AFTER, &mut failures)).await {
        Ok(Some(connection)) => return Ok(connection),
        Ok(None) => {}
        Err(_) => failures.push(format!("no connection within {limit:?}")),
    }
    Err(Unavailable::Unreachable(connect_race::joined(&failures)))
}

/// Records a failed connect and returns its reason. It does not change the state of an ejected endpoint:
/// a client that retries would otherwise extend the backoff of the pool's own connects.
fn record_failure(endpoint: &Endpoint, failure: ConnectFailure) -> String {
    let reason = failure.reason.clone();
    let state = endpoint.state();
    if matches!(state, EndpointState::Unverified | EndpointState::Ejected | EndpointState::NoH2) {
        endpoint.count_connect_failure(&failure);
    } else {
        endpoint.connect_failed(failure, clock::now());
    }
    reason
}

struct Candidate {
    /// State, whether the API group fails there, rank by the preferred versions, and whether it is a fallback.
    rank: (EndpointState, bool, u8, bool),
    load: usize,
    endpoint: Arc<Endpoint>,
}

/// Sorts by rank; the order within a rank is random. The first candidate is the less loaded of two random
/// ones of the best rank.
fn order(candidates: &mut [Candidate], rng: &mut fastrand::Rng) {
    rng.shuffle(candidates);
    candidates.sort_by_key(|candidate| candidate.rank);
    if let [first, second, ..] = candidates
        && first.rank == second.rank
        && second.load < first.load
    {
        candidates.swap(0, 1);
    }
}

impl Http1Connection {
    /// The request is a watch. It needs evidence of life as any flow to an apiserver does, and not as a tunnel.
    pub fn is_for_watch(&mut self) {
        self.watch = Some(self.endpoint.track_watch());
    }

    /// Sends a request and waits for its response head. Stops waiting when the flow is dead or no response
    /// can be expected from the endpoint.
    ///
    /// # Errors
    /// No response arrived. The request may have been processed.
    pub async fn send(self, mut request: Request<Incoming>) -> Result<Http1Response, Http1Error> {
        let (mut sender, connection) = http1::Builder::new()
            // As on HTTP/2 connections. The default is 400 KiB.
            .max_buf_size(MAX_RESPONSE_HEAD)
            .max_headers(MAX_FIELDS)
            .handshake(TokioIo::new(self.stream))
            .await
            .map_err(Http1Error::Hyper)?;
        let too_many_interim = limit_interim_responses(&mut request);
        let flow = FlowHealthCheck {
            observer: self.observer,
            endpoint: Arc::clone(&self.endpoint),
            is_tunnel: Rc::default(),
            tunnel_dead_after: self.tunnel_dead_after,
        };
        let driver = Http1Driver { task: spawn_local(drive(connection, flow.clone())), flow };
        let sent = clock::now();
        let response = tokio::select! {
            biased;
            response = sender.send_request(request) => response,
            reason = self.endpoint.no_response_expected(sent) => {
                return Err(Http1Error::NoResponseExpected(reason));
            }
            reason = died(self.watch.as_ref()) => return Err(Http1Error::NoResponseExpected(reason)),
            () = too_many_interim.notified() => {
                self.endpoint.metrics.closed_for_frames("interim_responses");
                return Err(Http1Error::InterimResponses);
            }
        };
        match response {
            Ok(response) => {
                driver.flow.is_tunnel.set(self.watch.is_none());
                Ok(Http1Response { response, driver, watch: self.watch })
            }
            Err(error) => Err(driver.error().await.unwrap_or(Http1Error::Hyper(error))),
        }
    }
}

/// Waits until the endpoint of a watch has died.
async fn died(watch: Option<&TunnelledWatchGuard>) -> String {
    match watch {
        Some(watch) => watch.died().await,
        None => pending().await,
    }
}

/// Counts the interim responses of a request. The result is notified after [`MAX_INTERIM_RESPONSES`].
fn limit_interim_responses<B>(request: &mut Request<B>) -> Arc<Notify> {
    let exceeded = Arc::new(Notify::new());
    let (notify, count) = (Arc::clone(&exceeded), AtomicUsize::new(0));
    on_informational(request, move |_| {
        if count.fetch_add(1, Ordering::Relaxed) >= MAX_INTERIM_RESPONSES {
            notify.notify_one();
        }
    });
    exceeded
}

/// Runs the HTTP side of a connection. Returns the stream once HTTP has ended on it, as after a response
/// 101, or the reason why the connection failed.
async fn drive(
    connection: http1::Connection<TokioIo<UpstreamStream>, Incoming>,
    flow: FlowHealthCheck,
) -> Result<Tunnelled, Http1Error> {
    tokio::select! {
        parts = connection.without_shutdown() => {
            let parts = parts.map_err(Http1Error::Hyper)?;
            let stream = TunnelStream::new(parts.read_buf, parts.io.into_inner());
            Ok(stream.discard_writes_after_close())
        }
        reason = flow.wait_until_dead() => Err(Http1Error::FlowDead(reason)),
    }
}

/// The task that runs the HTTP side of a connection. Dropping this closes the connection.
#[derive(Debug)]
pub struct Http1Driver {
    task: JoinHandle<Result<Tunnelled, Http1Error>>,
    flow: FlowHealthCheck,
}

impl Http1Driver {
    /// The socket of the connection, which is open as long as this exists.
    pub fn socket(&self) -> SocketRef {
        self.flow.observer.socket()
    }

    /// Returns the stream after a response 101, and the health check of its flow.
    ///
    /// # Errors
    /// The connection has failed.
    pub async fn reclaim(mut self) -> Result<(Tunnelled, FlowHealthCheck), Http1Error> {
        let stream = (&mut self.task).await.map_err(Http1Error::Task)??;
        Ok((stream, self.flow.clone()))
    }

    /// The error with which the task has ended, if it has ended. It is more precise than that of hyper's sender.
    async fn error(mut self) -> Option<Http1Error> {
        if !self.task.is_finished() {
            return None;
        }
        (&mut self.task).await.ok()?.err()
    }
}

impl Drop for Http1Driver {
    fn drop(&mut self) {
        self.task.abort();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe::Metrics;
    use jackstay_core::discovery::address::EndpointAddress;

    fn candidate(name: &str, state: EndpointState, load: usize) -> Candidate {
        let metrics = Metrics::new().endpoint("u", name);
        let address = EndpointAddress { host: name.to_owned(), port: 6443 };
        let endpoint = Endpoint::new(&"u".into(), &address, None, metrics).unwrap();
        Candidate { rank: (state, false, 0, false), load, endpoint }
    }

    #[test]
    fn order_puts_the_less_loaded_of_the_best_state_first() {
        for seed in 0..50 {
            let mut candidates = [
                candidate("ejected", EndpointState::Ejected, 0),
                candidate("busy", EndpointState::Ready, 5),
                candidate("degraded", EndpointState::Degraded, 0),
                candidate("idle", EndpointState::Ready, 1),
            ];
            order(&mut candidates, &mut fastrand::Rng::with_seed(seed));
            let names: Vec<_> = candidates.iter().map(|c| &*c.endpoint.address.host).collect();
            assert_eq!(names, ["idle", "busy", "degraded", "ejected"]);
        }
    }
}

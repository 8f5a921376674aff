//! Probes an endpoint with a fresh connection in steps: TCP, TLS, the first PONG, `/readyz`, a request
//! that needs a credential. Each step has its own limit, so that the step that hangs is known.

use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use h2::client::SendRequest;
use h2::{Ping, PingPong};
use http::{HeaderValue, Request, StatusCode, header};
use jackstay_config::api_root::ApiRoot;
use jackstay_config::describe_io_error;
use jackstay_net::http2_error::{describe_h2_error, is_ping_complaint};
use jackstay_net::readyz::{failed_checks, not_served};
use jackstay_net::tls::tls_error;
use jackstay_sys::clock;
use jackstay_sys::sockets::connector::Connector;
use jackstay_sys::sockets::tracked_stream;
use jackstay_sys::sockets::tracked_stream::StreamObserver;
use jackstay_sys::utc::wall_clock;
use rustls::ClientConfig;
use rustls::pki_types::{CertificateDer, ServerName};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::first_bytes::FirstBytes;
use super::observations::{ConnectAttempt, Failure, FailureKind, Ms, Step};
use super::verify;

/// Limit of each step. A connect with two lost SYNs takes 3 s (RFC 6298 section 2) and still succeeds.
pub(super) const STEP_LIMIT: Duration = Duration::from_millis(3500);

/// The response of Go's TLS server to a request without TLS (`net/http`, `conn.serve`), which a proxy passes
/// on.
const HTTP_TO_HTTPS: &str = "Client sent an HTTP request to an HTTPS server";

/// Number of bytes after which no more of a response body is kept.
const MAX_BODY: usize = 256 << 10;

/// The end of a connection.
pub(super) struct End {
    /// Why it ended.
    pub(super) text: String,
    /// Whether the server does not accept the PINGs on it.
    pub(super) refuses_pings: bool,
}

/// An open HTTP/2 connection over TLS. Dropping it ends the task that drives it.
pub(super) struct ProbeConnection {
    pub(super) send: SendRequest<Bytes>,
    pub(super) ping: PingPong,
    pub(super) observer: StreamObserver,
    /// The certificate that the server has shown.
    pub(super) certificate: Option<CertificateDer<'static>>,
    /// Drives the connection, and returns why it ended.
    pub(super) driver: tokio::task::JoinHandle<End>,
}

/// How to connect to an endpoint.
#[derive(Debug, Clone)]
pub(super) struct PeerConfig {
    pub(super) server_name: ServerName<'static>,
    pub(super) tls: Arc<ClientConfig>,
    /// A bearer token; present only if the server is verified.
    pub(super) token: Option<HeaderValue>,
    /// Whether a token or a client certificate is sent.
    pub(super) authenticated: bool,
    /// Where its API begins.
    pub(super) root: ApiRoot,
}

/// The result of a fresh connection.
#[derive(Debug)]
pub(super) struct FreshResult {
    pub(super) attempt: ConnectAttempt,
    /// The server's clock minus this machine's, in seconds.
    pub(super) skew: Option<f64>,
    /// `SETTINGS_MAX_CONCURRENT_STREAMS` of the server.
    pub(super) max_streams: Option<usize>,
}

/// Measures the steps of a connection.
pub(super) struct StepTimer {
    at: Ms,
    steps: Vec<(Step, Ms)>,
    since: Instant,
}

impl StepTimer {
    /// Starts the first step of a connection in an examination that began at `began`.
    pub(super) fn start(began: Instant) -> Self {
        let now = clock::now();
        Self { at: (now - began).into(), steps: Vec::new(), since: now }
    }

    /// Ends a step and starts the next.
    pub(super) fn done(&mut self, step: Step) {
        let now = clock::now();
        self.steps.push((step, (now - self.since).into()));
        self.since = now;
    }

    /// The measured connection, with the failure that ended it early.
    pub(super) fn finish(self, failure: Option<Failure>) -> ConnectAttempt {
        ConnectAttempt { at_ms: self.at, steps: self.steps, failure }
    }
}

fn failure(step: Step, kind: FailureKind, text: impl Into<String>) -> Failure {
    Failure { step, kind, text: text.into(), remedy: None }
}

/// The result of a step, which fails if it takes longer than [`STEP_LIMIT`].
async fn limited<T, E>(
    step: Step,
    action: impl Future<Output = Result<T, E>>,
    describe: impl FnOnce(E) -> (FailureKind, String),
) -> Result<T, Failure> {
    limited_to_failure(step, action, |error| {
        let (kind, text) = describe(error);
        failure(step, kind, text)
    })
    .await
}

/// [`limited`] with the whole failure.
async fn limited_to_failure<T, E>(
    step: Step,
    action: impl Future<Output = Result<T, E>>,
    describe: impl FnOnce(E) -> Failure,
) -> Result<T, Failure> {
    let Ok(result) = timeout(STEP_LIMIT, action).await else {
        let limit = STEP_LIMIT.as_millis();
        let text = match step {
            Step::Tls => format!("TCP connects, but TLS is not answered within {limit} ms"),
            _ => format!("{}: no response within {limit} ms", step.as_str()),
        };
        return Err(failure(step, FailureKind::Timeout, text));
    };
    result.map_err(describe)
}

/// Runs every step after the resolution of the name.
pub(super) async fn fresh(
    mut timer: StepTimer,
    address: SocketAddr,
    peer: &PeerConfig,
) -> FreshResult {
    let (mut skew, mut max_streams) = (None, None);
    let steps = async {
        let mut opened = open(&mut timer, address, peer).await?;
        max_streams = Some(opened.send.current_max_send_streams());
        let (status, body, measured) =
            get_step(Step::Readyz, &mut opened.send, "/readyz", peer).await?;
        skew = measured;
        check_readyz(status, &body, (peer.authenticated, &peer.root))?;
        timer.done(Step::Readyz);
        if peer.authenticated {
            let (status, body, _) = get_step(Step::Request, &mut opened.send, "/api", peer).await?;
            check_authenticated(status, &body)?;
            timer.done(Step::Request);
        }
        Ok(())
    };
    let failure = steps.await.err();
    FreshResult { attempt: timer.finish(failure), skew, max_streams }
}

async fn get_step(
    step: Step,
    send: &mut SendRequest<Bytes>,
    path: &str,
    peer: &PeerConfig,
) -> Result<GetResult, Failure> {
    let reset = |error| (FailureKind::Reset, format!("{path}: {error}"));
    limited(step, get(send, path, peer), reset).await
}

/// Opens a connection up to its first PONG.
pub(super) async fn open(
    timer: &mut StepTimer,
    address: SocketAddr,
    peer: &PeerConfig,
) -> Result<ProbeConnection, Failure> {
    let connector = Connector::unmarked();
    let stream = limited(Step::Connect, connector.connect(address), |error| {
        let text = format!("connect to {address}: {}", describe_io_error(&error));
        (connect_failure(error.kind()), text)
    })
    .await?;
    timer.done(Step::Connect);
    let (stream, observer) = tracked_stream::track(stream);
    let connector = TlsConnector::from(Arc::clone(&peer.tls));
    let handshake = connector.connect(peer.server_name.clone(), FirstBytes::new(stream));
    let stream = limited_to_failure(Step::Tls, handshake.into_fallible(), |(error, stream)| {
        if let Some((kind, text)) = stream.not_tls() {
            return failure(Step::Tls, kind, text);
        }
        let text = format!("TLS: {}", tls_error::describe_server_handshake_error(&error));
        let remedy = tls_error::server_remedy(&error);
        Failure { remedy, ..failure(Step::Tls, verify::kind_of(&error), text) }
    })
    .await?;
    timer.done(Step::Tls);
    if stream.get_ref().1.alpn_protocol() != Some(b"h2") {
        let text = "the server does not select h2 by ALPN";
        return Err(failure(Step::Http2, FailureKind::NoHttp2, text));
    }
    let reset = |error: h2::Error| {
        (
            FailureKind::Reset,
            format!("HTTP/2: {}", tls_error::describe_alert_in(&error.to_string())),
        )
    };
    let opened = limited(Step::Http2, Box::pin(start_http2(stream, observer)), reset).await?;
    timer.done(Step::Http2);
    Ok(opened)
}

/// The kind of a failed `connect`.
fn connect_failure(error: io::ErrorKind) -> FailureKind {
    match error {
        io::ErrorKind::ConnectionRefused => FailureKind::Refused,
        io::ErrorKind::TimedOut => FailureKind::Timeout,
        io::ErrorKind::ConnectionReset => FailureKind::Reset,
        io::ErrorKind::NetworkUnreachable | io::ErrorKind::HostUnreachable => FailureKind::NoRoute,
        _ => FailureKind::Unreachable,
    }
}

/// The HTTP/2 preface up to the first PONG, which the server's SETTINGS precede (RFC 9113 section 3.4).
async fn start_http2<S: AsyncRead + AsyncWrite + Unpin + 'static>(
    stream: TlsStream<S>,
    observer: StreamObserver,
) -> Result<ProbeConnection, h2::Error> {
    let mut builder = h2::client::Builder::new();
    let chain = stream.get_ref().1.peer_certificates();
    let certificate = chain.and_then(|chain| chain.first()).map(|leaf| leaf.clone().into_owned());
    let (send, mut connection) = builder.enable_push(false).handshake(stream).await?;
    let mut ping = connection.ping_pong().ok_or(h2::Reason::INTERNAL_ERROR)?;
    let driver = tokio::task::spawn_local(async move {
        let ended = poll_fn(|cx| Pin::new(&mut connection).poll(cx)).await;
        match ended {
            Ok(()) => End { text: "closed by the server".to_owned(), refuses_pings: false },
            Err(error) => End {
                text: describe_h2_error(&error),
                // The connections on which it matters carry PINGs only.
                refuses_pings: is_ping_complaint(&error, Some(Duration::MAX), Duration::ZERO),
            },
        }
    });
    ping.ping(Ping::opaque()).await?;
    Ok(ProbeConnection { send, ping, observer, certificate, driver })
}

impl Drop for ProbeConnection {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

/// Status, body, and the server's clock minus this machine's in seconds.
type GetResult = (StatusCode, String, Option<f64>);

/// Sends a GET for a path of the API with the credential.
pub(super) async fn get(
    send: &mut SendRequest<Bytes>,
    path: &str,
    peer: &PeerConfig,
) -> Result<GetResult, h2::Error> {
    let mut request = Request::new(());
    *request.uri_mut() = peer.root.uri(path);
    let headers = request.headers_mut();
    headers.insert(header::USER_AGENT, HeaderValue::from_static("jackstay-doctor"));
    headers.insert(header::ACCEPT, HeaderValue::from_static("application/json, */*"));
    if let Some(token) = &peer.token {
        headers.insert(header::AUTHORIZATION, token.clone());
    }
    let sent = wall_clock();
    poll_fn(|cx| send.poll_ready(cx)).await?;
    let (response, _) = send.send_request(request, true)?;
    let response = response.await?;
    let now = wall_clock();
    // `Date` has a resolution of 1 s. The middle of that second is compared with the middle of the exchange.
    let middle = sent + now.duration_since(sent).unwrap_or_default() / 2;
    let skew = response.headers().get(header::DATE).and_then(|date| {
        let since_epoch = |time: SystemTime| {
            time.duration_since(SystemTime::UNIX_EPOCH).map(|since| since.as_secs_f64()).ok()
        };
        let date = httpdate::parse_http_date(date.to_str().ok()?).ok()?;
        Some(since_epoch(date)? + 0.5 - since_epoch(middle)?)
    });
    let status = response.status();
    let mut body = response.into_body();
    let mut bytes = Vec::new();
    while let Some(data) = body.data().await {
        let data = data?;
        let _ = body.flow_control().release_capacity(data.len());
        if bytes.len() < MAX_BODY {
            bytes.extend_from_slice(&data);
        }
    }
    Ok((status, String::from_utf8_lossy(&bytes).into_owned(), skew))
}

/// Checks the response of `/readyz`. 403 is no failure, nor is 401 without a credential: they do not depend
/// on the health of the server.
fn check_readyz(
    status: StatusCode,
    body: &str,
    (authenticated, root): (bool, &ApiRoot),
) -> Result<(), Failure> {
    let (kind, text) = match status {
        StatusCode::UNAUTHORIZED if authenticated => (
            FailureKind::Unauthorized,
            "/readyz responds with 401: the server does not accept the credential".to_owned(),
        ),
        StatusCode::OK | StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => return Ok(()),
        StatusCode::BAD_REQUEST if body.contains(HTTP_TO_HTTPS) => (
            FailureKind::PlainHttp,
            format!("/readyz responds with 400: {}", body.lines().next().unwrap_or_default()),
        ),
        other => {
            let code = other.as_u16();
            match error_of_jackstay(body) {
                Some(message) => (
                    FailureKind::ErrorOfJackstay(code),
                    format!("/readyz responds with {code}: {message}"),
                ),
                None => (
                    FailureKind::Status(code),
                    format!(
                        "{} responds with {code}{}{}",
                        root.path("/readyz"),
                        failed_checks(body),
                        not_served(code, root)
                    ),
                ),
            }
        }
    };
    Err(failure(Step::Readyz, kind, text))
}

/// The message of a `metav1.Status` that jackstay itself has created: only such messages begin with its name.
fn error_of_jackstay(body: &str) -> Option<String> {
    let status: serde_json::Value = serde_json::from_str(body).ok()?;
    let message = status["message"].as_str().filter(|_| status["kind"] == "Status")?;
    message.starts_with("jackstay: ").then(|| message.to_owned())
}

/// Checks the response of `/api`. A 403 for a named user shows that the credential was accepted.
fn check_authenticated(status: StatusCode, body: &str) -> Result<(), Failure> {
    let code = status.as_u16();
    let (kind, text) = match status {
        StatusCode::FORBIDDEN if !body.contains("system:anonymous") => return Ok(()),
        status if status.is_success() => return Ok(()),
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => (
            FailureKind::Unauthorized,
            format!("/api responds with {code}: the server does not accept the credential"),
        ),
        _ => (FailureKind::Status(code), format!("/api responds with {code}")),
    };
    Err(failure(Step::Request, kind, text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connect_failure_separates_no_route_from_refused_and_timeout() {
        for (errno, expected) in [
            (libc::ECONNREFUSED, FailureKind::Refused),
            (libc::ETIMEDOUT, FailureKind::Timeout),
            (libc::ENETUNREACH, FailureKind::NoRoute),
            (libc::EHOSTUNREACH, FailureKind::NoRoute),
            (libc::EPERM, FailureKind::Unreachable),
        ] {
            assert_eq!(connect_failure(io::Error::from_raw_os_error(errno).kind()), expected);
        }
    }

    #[test]
    fn check_readyz_and_authenticated_fail_for_errors_and_unknown_credentials() {
        let ready = |code: u16, body: &str, known| {
            let root = ApiRoot::default();
            let checked = check_readyz(StatusCode::from_u16(code).unwrap(), body, (known, &root));
            checked.err().map(|f| f.kind)
        };
        assert_eq!(ready(200, "ok", true), None);
        assert_eq!(ready(401, "", true), Some(FailureKind::Unauthorized));
        assert_eq!(ready(401, "", false), None);
        assert_eq!(ready(403, "", true), None);
        let plain = "Client sent an HTTP request to an HTTPS server.\n";
        assert_eq!(ready(400, plain, true), Some(FailureKind::PlainHttp));
        assert_eq!(ready(400, "", true), Some(FailureKind::Status(400)));
        assert_eq!(
            ready(500, "[-]etcd failed: reason withheld", true),
            Some(FailureKind::Status(500))
        );
        let own =
            "{\"kind\":\"Status\",\"message\":\"jackstay: no apiserver is reachable: a: refused\"}";
        assert_eq!(ready(503, own, true), Some(FailureKind::ErrorOfJackstay(503)));
        let other = "{\"kind\":\"Status\",\"message\":\"apiserver is shutting down\"}";
        assert_eq!(ready(503, other, true), Some(FailureKind::Status(503)));
        let request = |code: u16, body: &str| {
            check_authenticated(StatusCode::from_u16(code).unwrap(), body).err().map(|f| f.kind)
        };
        assert_eq!(request(200, ""), None);
        assert_eq!(request(403, "User \"alice\" cannot get path \"/api\""), None);
        let unauthenticated = "User \"system:anonymous\" cannot get path \"/api\"";
        assert_eq!(request(403, unauthenticated), Some(FailureKind::Unauthorized));
        assert_eq!(request(401, ""), Some(FailureKind::Unauthorized));
        assert_eq!(request(503, ""), Some(FailureKind::Status(503)));
    }
}

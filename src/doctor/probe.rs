//! One fresh connection, step by step: TCP, TLS, the first PONG, `/readyz`, a request that needs a
//! credential. Each step has its time and its own bound, so that what hangs is named.

use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use h2::client::SendRequest;
use h2::{Ping, PingPong};
use http::{HeaderValue, Request, StatusCode, header};
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::time::{Instant, timeout};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::observations::{Attempt, Failure, Kind, Ms, Step};
use super::verify;
use crate::net::sockets::connector::Connector;
use crate::net::sockets::tracked_stream::{self, StreamObserver, TrackedStream};
use crate::upstream::readyz::failed_checks;

/// Bound on each step. Two lost SYNs cost 3 s (RFC 6298), and are still an answer.
pub(super) const STEP_LIMIT: Duration = Duration::from_millis(3500);

/// Most bytes of an answer that are looked at.
const MAX_ANSWER: usize = 256 << 10;

/// HTTP/2 on TLS, driven by a task of its own that ends with the last handle.
pub(super) struct Opened {
    pub(super) send: SendRequest<Bytes>,
    pub(super) ping: PingPong,
    pub(super) observer: StreamObserver,
    /// Ends when the connection does, and says how.
    pub(super) driver: tokio::task::JoinHandle<String>,
}

/// What a probe needs to know of an endpoint.
#[derive(Debug, Clone)]
pub(super) struct Peer {
    pub(super) server_name: ServerName<'static>,
    pub(super) tls: Arc<ClientConfig>,
    /// A bearer token, if the user has one and the server is verified.
    pub(super) token: Option<HeaderValue>,
    /// Whether any credential is shown: then a request that needs one is made.
    pub(super) authenticated: bool,
}

/// What a fresh connection tells beyond its times.
#[derive(Debug, Default)]
pub(super) struct Learned {
    pub(super) attempt: Option<Attempt>,
    /// The server's clock minus ours.
    pub(super) skew: Option<f64>,
    pub(super) max_streams: Option<usize>,
}

/// Times the steps of an attempt.
pub(super) struct Clock {
    at: Ms,
    steps: Vec<(Step, Ms)>,
    since: Instant,
}

impl Clock {
    /// Starts now; the examination began at `began`.
    pub(super) fn new(began: Instant) -> Self {
        let now = Instant::now();
        Self { at: (now - began).into(), steps: Vec::new(), since: now }
    }

    /// A step is done.
    pub(super) fn done(&mut self, step: Step) {
        let now = Instant::now();
        self.steps.push((step, (now - self.since).into()));
        self.since = now;
    }

    /// The attempt is over.
    pub(super) fn end(self, failure: Option<Failure>) -> Attempt {
        Attempt { at_ms: self.at, steps: self.steps, failure }
    }
}

fn failure(step: Step, kind: Kind, text: impl Into<String>) -> Failure {
    Failure { step, kind, text: text.into() }
}

fn late(step: Step) -> Failure {
    let text = format!("{}: nothing within {} ms", step.as_str(), STEP_LIMIT.as_millis());
    failure(step, Kind::Timeout, text)
}

/// Runs all steps after the name.
pub(super) async fn fresh(mut clock: Clock, address: SocketAddr, peer: &Peer) -> Learned {
    let mut learned = Learned::default();
    let result = steps(&mut clock, address, peer, &mut learned).await;
    learned.attempt = Some(clock.end(result.err()));
    learned
}

async fn steps(
    clock: &mut Clock,
    address: SocketAddr,
    peer: &Peer,
    learned: &mut Learned,
) -> Result<(), Failure> {
    let mut opened = open(clock, address, peer).await?;
    learned.max_streams = Some(opened.send.current_max_send_streams());
    let ready = get(&mut opened.send, "/readyz", peer);
    let (status, body, skew) = timeout(STEP_LIMIT, ready)
        .await
        .map_err(|_| late(Step::Readyz))?
        .map_err(|error| failure(Step::Readyz, Kind::Reset, format!("/readyz: {error}")))?;
    learned.skew = skew;
    judge_readyz(status, &body, peer.authenticated)?;
    clock.done(Step::Readyz);
    if peer.authenticated {
        let listing = get(&mut opened.send, "/api", peer);
        let (status, body, _) = timeout(STEP_LIMIT, listing)
            .await
            .map_err(|_| late(Step::Request))?
            .map_err(|error| failure(Step::Request, Kind::Reset, format!("/api: {error}")))?;
        judge_request(status, &body)?;
        clock.done(Step::Request);
    }
    Ok(())
}

/// Opens a connection up to its first PONG.
pub(super) async fn open(
    clock: &mut Clock,
    address: SocketAddr,
    peer: &Peer,
) -> Result<Opened, Failure> {
    let stream = timeout(STEP_LIMIT, Connector::unmarked().connect(address))
        .await
        .map_err(|_| late(Step::Connect))?
        .map_err(|error| {
            let kind = match error.kind() {
                io::ErrorKind::ConnectionRefused => Kind::Refused,
                io::ErrorKind::TimedOut => Kind::Timeout,
                io::ErrorKind::ConnectionReset => Kind::Reset,
                _ => Kind::Unreachable,
            };
            let reason = error.to_string();
            let reason = reason.split(" (os error").next().unwrap_or_default();
            failure(Step::Connect, kind, format!("connect to {address}: {reason}"))
        })?;
    clock.done(Step::Connect);
    let (stream, observer) = tracked_stream::track(stream);
    let connector = TlsConnector::from(Arc::clone(&peer.tls));
    let stream = timeout(STEP_LIMIT, connector.connect(peer.server_name.clone(), stream))
        .await
        .map_err(|_| late(Step::Tls))?
        .map_err(|error| failure(Step::Tls, verify::kind_of(&error), format!("TLS: {error}")))?;
    clock.done(Step::Tls);
    if stream.get_ref().1.alpn_protocol() != Some(b"h2") {
        let text = "it did not choose HTTP/2 when TLS offered it (ALPN)";
        return Err(failure(Step::Http2, Kind::NoHttp2, text));
    }
    let opened = timeout(STEP_LIMIT, handshake(stream, observer))
        .await
        .map_err(|_| late(Step::Http2))?
        .map_err(|error| failure(Step::Http2, Kind::Reset, format!("HTTP/2: {error}")))?;
    clock.done(Step::Http2);
    Ok(opened)
}

/// HTTP/2 up to the first PONG. The server's SETTINGS come before it (RFC 9113 section 3.4).
async fn handshake(
    stream: TlsStream<TrackedStream>,
    observer: StreamObserver,
) -> Result<Opened, h2::Error> {
    let mut builder = h2::client::Builder::new();
    let (send, mut connection) = builder.enable_push(false).handshake(stream).await?;
    let mut ping = connection.ping_pong().ok_or(h2::Reason::INTERNAL_ERROR)?;
    let driver = tokio::task::spawn_local(async move {
        let ended = poll_fn(|cx| Pin::new(&mut connection).poll(cx)).await;
        ended.err().map_or_else(|| "closed by the server".to_owned(), |error| error.to_string())
    });
    ping.ping(Ping::opaque()).await?;
    Ok(Opened { send, ping, observer, driver })
}

impl Drop for Opened {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

/// A GET, with the credential; also what the server's clock says.
pub(super) async fn get(
    send: &mut SendRequest<Bytes>,
    path: &str,
    peer: &Peer,
) -> Result<(StatusCode, String, Option<f64>), h2::Error> {
    let mut request = Request::new(());
    let target = format!("https://kubernetes.default.svc{path}");
    *request.uri_mut() = target.parse().unwrap_or_default();
    let headers = request.headers_mut();
    headers.insert(header::USER_AGENT, HeaderValue::from_static("jackstay-doctor"));
    headers.insert(header::ACCEPT, HeaderValue::from_static("application/json, */*"));
    if let Some(token) = &peer.token {
        headers.insert(header::AUTHORIZATION, token.clone());
    }
    let asked = SystemTime::now();
    poll_fn(|cx| send.poll_ready(cx)).await?;
    let (response, _) = send.send_request(request, true)?;
    let response = response.await?;
    let now = SystemTime::now();
    // The middle of the exchange, and of the second that the header rounds down to.
    let middle = asked + now.duration_since(asked).unwrap_or_default() / 2;
    let skew = response.headers().get(header::DATE).and_then(|date| {
        let date = parse_date(date.to_str().ok()?)?;
        Some(date + 0.5 - middle.duration_since(SystemTime::UNIX_EPOCH).ok()?.as_secs_f64())
    });
    let status = response.status();
    let mut body = response.into_body();
    let mut bytes = Vec::new();
    while let Some(data) = body.data().await {
        let data = data?;
        let _ = body.flow_control().release_capacity(data.len());
        if bytes.len() < MAX_ANSWER {
            bytes.extend_from_slice(&data);
        }
    }
    Ok((status, String::from_utf8_lossy(&bytes).into_owned(), skew))
}

/// `Sun, 06 Nov 1994 08:49:37 GMT` (RFC 9110 section 5.6.7) in seconds since 1970.
fn parse_date(text: &str) -> Option<f64> {
    let words: Vec<&str> = text.split([' ', ':', ',']).filter(|w| !w.is_empty()).collect();
    let [_, day, month, year, hour, minute, second, "GMT"] = words.as_slice() else { return None };
    let months =
        ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
    let month = i64::try_from(months.iter().position(|m| m == month)?).ok()? + 1;
    let number = |text: &&str| text.parse::<i64>().ok().filter(|n| (0..10_000).contains(n));
    let (day, year) = (number(day)?, number(year)?);
    // Howard Hinnant's days_from_civil.
    let (y, m) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let (era, of_era) = (y.div_euclid(400), y.rem_euclid(400));
    let days = era * 146_097 + of_era * 365 + of_era / 4 - of_era / 100 + (153 * m + 2) / 5 + day
        - 1
        - 719_468;
    let seconds = days * 86_400 + number(hour)? * 3600 + number(minute)? * 60 + number(second)?;
    Some(seconds as f64)
}

/// What `/readyz` says. Without a credential a refusal says nothing of its health.
fn judge_readyz(status: StatusCode, body: &str, authenticated: bool) -> Result<(), Failure> {
    match status {
        StatusCode::UNAUTHORIZED if authenticated => Err(failure(
            Step::Readyz,
            Kind::Unauthorized,
            "/readyz answers 401: the credential is not known there",
        )),
        StatusCode::OK | StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => Ok(()),
        other => {
            let detail = failed_checks(body);
            let code = other.as_u16();
            let text = format!("/readyz answers {code}{detail}");
            Err(failure(Step::Readyz, Kind::Status(code), text))
        }
    }
}

/// What `/api` says to a credential. A user who may not read it is known all the same.
fn judge_request(status: StatusCode, body: &str) -> Result<(), Failure> {
    let anonymous = body.contains("system:anonymous");
    match status {
        StatusCode::FORBIDDEN if !anonymous => Ok(()),
        status if status.is_success() => Ok(()),
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => Err(failure(
            Step::Request,
            Kind::Unauthorized,
            format!("/api answers {}: the credential is not known there", status.as_u16()),
        )),
        other => Err(failure(
            Step::Request,
            Kind::Status(other.as_u16()),
            format!("/api answers {}", other.as_u16()),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates() {
        for (text, seconds) in [
            ("Thu, 01 Jan 1970 00:00:00 GMT", Some(0.0)),
            ("Sun, 06 Nov 1994 08:49:37 GMT", Some(784_111_777.0)),
            ("Thu, 29 Feb 2024 23:59:59 GMT", Some(1_709_251_199.0)),
            ("Sun, 06 Nov 1994 08:49:37 CET", None),
            ("yesterday", None),
            ("", None),
        ] {
            assert_eq!(parse_date(text), seconds, "{text}");
        }
    }

    #[test]
    fn answers() {
        let ready = |code: u16, body: &str, known| {
            judge_readyz(StatusCode::from_u16(code).unwrap(), body, known).err().map(|f| f.kind)
        };
        assert_eq!(ready(200, "ok", true), None);
        assert_eq!(ready(401, "", true), Some(Kind::Unauthorized));
        assert_eq!(ready(401, "", false), None);
        assert_eq!(ready(403, "", true), None);
        assert_eq!(ready(500, "[-]etcd failed: reason withheld", true), Some(Kind::Status(500)));
        let request = |code: u16, body: &str| {
            judge_request(StatusCode::from_u16(code).unwrap(), body).err().map(|f| f.kind)
        };
        assert_eq!(request(200, ""), None);
        assert_eq!(request(403, "User \"alice\" cannot get path \"/api\""), None);
        let nobody = "User \"system:anonymous\" cannot get path \"/api\"";
        assert_eq!(request(403, nobody), Some(Kind::Unauthorized));
        assert_eq!(request(401, ""), Some(Kind::Unauthorized));
        assert_eq!(request(503, ""), Some(Kind::Status(503)));
    }
}

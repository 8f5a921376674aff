//! Opens one connection to an endpoint: TCP, TLS and, for HTTP/2, the first PONG.
//!
//! Only the PONG proves that the apiserver answers: a TCP load balancer accepts connections for servers
//! that are gone. One time limit covers all steps. A second attempt starts after 250 ms, because the
//! kernel sends a lost SYN again only after a second (RFC 6298 section 2, initial RTO).

use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use h2::client::{Connection as H2Connection, SendRequest};
use h2::{Ping, PingPong};
use jackstay_core::backends;
use jackstay_core::receive_windows::ReceiveWindows;
use jackstay_core::request::hygiene::MAX_RESPONSE_HEAD;
use jackstay_net::frame_limiter::{FrameLimiter, PeerFrames, SentHeads};
use jackstay_net::tls::tls_error::{describe_alert_in, describe_server_handshake_error, tls_error};
use jackstay_sys::clock;
use jackstay_sys::process::resource_limits;
use jackstay_sys::sockets::connector::Connector;
use jackstay_sys::sockets::cork::{Cork, Uncork, cork};
use jackstay_sys::sockets::read_ahead::{ReadAhead, Turn};
use jackstay_sys::sockets::stream::TcpStream;
use jackstay_sys::sockets::tracked_stream;
use jackstay_sys::sockets::tracked_stream::{StreamObserver, TrackedStream};
use rustls::{AlertDescription, ClientConfig};
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::connect_race;
use super::credentials::ClientTls;
use super::endpoint::{ConnectFailure, ConnectFailureKind, ConnectTimeout, Endpoint};

/// Time without success after which a second attempt starts in parallel to the first.
const RACE_AFTER: Duration = Duration::from_millis(250);

/// Largest frame that the peer may send. h2's default is 16 KiB; fewer and larger frames make LISTs
/// cheaper.
const MAX_FRAME: u32 = 64 * 1024;
/// Largest header list that the peer may send. Response headers of an apiserver are small.
const MAX_HEADER_LIST: u32 = MAX_RESPONSE_HEAD as u32;
/// Stream limit assumed until the peer's SETTINGS arrive, which is before the first PONG.
const INITIAL_STREAMS: usize = 100;
/// Bytes that h2 buffers for sending on each stream, at most.
const SEND_BUFFER: usize = 256 * 1024;
/// Locally reset streams that h2 remembers, and for how long. Clients may cancel thousands of watches
/// at once, and a late frame on a forgotten stream is a connection error (h2's default is 50 for 1 s).
const RESET_STREAMS: usize = 4096;
const RESET_MEMORY: Duration = Duration::from_secs(30);
/// Streams that h2 may reset for protocol errors of the peer before it closes the connection. Late
/// frames on forgotten streams count, so a connection that is used for weeks would reach h2's default
/// of 1024. A hostile peer can cause as many resets of 13 bytes.
const ERROR_RESETS: usize = 64 * 1024;
/// The TLS stream of a connection to an endpoint.
pub type UpstreamStream = TlsStream<ReadAhead<TrackedStream>>;

/// The same below HTTP/2.
pub type Http2Stream = FrameLimiter<Cork<UpstreamStream>>;

/// A connection whose first PING was answered.
pub struct DialedConnection {
    pub send: SendRequest<Bytes>,
    /// Sends and receives while it is polled.
    pub h2: H2Connection<Http2Stream, Bytes>,
    pub ping: PingPong,
    /// Streams that the caller may open at a time, for which the receive windows are made.
    pub max_streams: usize,
    pub windows: ReceiveWindows,
    /// Sends what `h2` has written. The caller polls it after each poll of `h2`.
    pub uncork: Uncork<UpstreamStream>,
    /// The [`certificate_hash`] of this connection.
    pub certificate: u64,
    /// Whether it is for the request alone whose token an apiserver behind the address has refused.
    pub for_one_request: bool,
    /// What the frames of the apiserver have shown.
    pub frames: PeerFrames,
    /// Where the heads of requests are in what was sent.
    pub heads: SentHeads,
    /// Reads the TCP statistics of the connection.
    pub observer: StreamObserver,
    /// Round-trip time of the first PING.
    pub rtt: Duration,
}

/// Opens an HTTP/2 connection within `limit`. The caller opens at most `max_streams` streams at a time on it.
pub async fn dial_h2(
    connector: &Connector,
    endpoint: &Endpoint,
    tls: &ClientTls,
    limit: ConnectTimeout,
    max_streams: usize,
) -> Result<DialedConnection, ConnectFailure> {
    // Boxed, because the handshakes of rustls and h2 keep 30 KiB of state while they wait.
    Box::pin(race(endpoint, limit, |address| async move {
        let tcp = connect(connector, address).await?;
        let _handshake = endpoint.track_handshake();
        let (stream, observer) = secure(tcp, endpoint, address, &tls.h2).await?;
        if stream.get_ref().1.alpn_protocol() != Some(b"h2") {
            return Err(ConnectFailure::new(
                ConnectFailureKind::NoH2,
                format!(
                    "{address} does not speak HTTP/2 (ALPN): is it an apiserver, or a proxy before it?"
                ),
            ));
        }
        let windows = ReceiveWindows::new(max_streams, tls.certificate.is_some());
        first_pong(stream, observer, (windows, max_streams)).await.map_err(|error| {
            let kind = if is_late_alert(&error) {
                ConnectFailureKind::TlsFailed
            } else {
                ConnectFailureKind::Failed
            };
            let text = describe_alert_in(&error.to_string());
            ConnectFailure::new(kind, format!("HTTP/2 to {address} failed: {text}"))
        })
    }))
    .await
}

/// Opens a TLS connection with ALPN `http/1.1` for one upgrade, within `limit`.
pub async fn dial_http1(
    connector: &Connector,
    endpoint: &Endpoint,
    tls: &ClientTls,
    limit: ConnectTimeout,
) -> Result<(UpstreamStream, StreamObserver), ConnectFailure> {
    Box::pin(race(endpoint, limit, |address| async move {
        let tcp = connect(connector, address).await?;
        let _handshake = endpoint.track_handshake();
        secure(tcp, endpoint, address, &tls.http1).await.map_err(|mut failure| {
            // HTTP/2 was not offered, so the failure does not show that the peer lacks it.
            if failure.kind == ConnectFailureKind::NoH2 {
                failure.kind = ConnectFailureKind::Failed;
            }
            failure
        })
    }))
    .await
}

/// Runs `attempt` within `limit`, and a second one in parallel if the first is slow. `localhost` has two
/// addresses: the second attempt is for the second one, and starts at once if the first fails.
async fn race<T, F, Fut>(
    endpoint: &Endpoint,
    limit: ConnectTimeout,
    attempt: F,
) -> Result<T, ConnectFailure>
where
    F: Fn(SocketAddr) -> Fut,
    Fut: Future<Output = Result<T, ConnectFailure>>,
{
    let addresses = endpoint.socket_addresses();
    let first = addresses[0];
    let second = *addresses.last().unwrap_or(&first);
    let mut begun = 0;
    let next = |failures: &[ConnectFailure]| {
        begun += 1;
        let may_retry = first != second || failures.is_empty();
        match begun {
            1 => Some(attempt(first)),
            2 => may_retry.then(|| attempt(second)),
            _ => None,
        }
    };
    let mut failures = Vec::new();
    let both = connect_race::race(next, || RACE_AFTER, &mut failures);
    let ended = timeout(limit.limit(), both).await.ok();
    match (ended, failures.pop()) {
        (Some(Some(connected)), _) => Ok(connected),
        (Some(None), Some(last)) => Err(last),
        (Some(None), None) | (None, _) => {
            let reason = format!("no connection to {} {limit}", endpoint.label);
            Err(ConnectFailure::new(ConnectFailureKind::Timeout, reason))
        }
    }
}

async fn connect(connector: &Connector, address: SocketAddr) -> Result<TcpStream, ConnectFailure> {
    connector.connect(address).await.map_err(|error| {
        let kind = if resource_limits::is_local_shortage(&error, address) {
            ConnectFailureKind::LocalShortage
        } else {
            ConnectFailureKind::Failed
        };
        ConnectFailure::new(kind, format!("TCP to {address} failed: {error}"))
    })
}

async fn secure(
    stream: TcpStream,
    endpoint: &Endpoint,
    address: SocketAddr,
    config: &Arc<ClientConfig>,
) -> Result<(UpstreamStream, StreamObserver), ConnectFailure> {
    let (stream, observer) = tracked_stream::track(stream);
    let mut stream = TlsConnector::from(Arc::clone(config))
        .connect(endpoint.server_name.clone(), ReadAhead::new(stream, Turn::SERVER))
        .await
        .map_err(|error| handshake_failure(address, &error))?;
    stream.get_mut().0.established();
    Ok((stream, observer))
}

/// The failure of a TLS handshake. Without an error of TLS itself, the process may have ended meanwhile.
fn handshake_failure(address: SocketAddr, error: &io::Error) -> ConnectFailure {
    if is_no_common_protocol(error) {
        let reason = format!(
            "{address} speaks none of the protocols offered (ALPN): is it an apiserver, or a proxy before it?"
        );
        return ConnectFailure::new(ConnectFailureKind::NoH2, reason);
    }
    let kind = match tls_error(error) {
        Some(_) => ConnectFailureKind::TlsFailed,
        None => ConnectFailureKind::Failed,
    };
    let text = describe_server_handshake_error(error);
    ConnectFailure::new(kind, format!("TLS to {address} failed: {text}"))
}

/// [`backends::certificate_hash`] of the certificate that the server has shown; 0 if it has shown none.
pub fn certificate_hash(stream: &UpstreamStream) -> u64 {
    let chain = stream.get_ref().1.peer_certificates();
    chain.and_then(|chain| chain.first()).map_or(0, |leaf| backends::certificate_hash(leaf))
}

/// Whether the server ended the handshake with the ALPN alert (RFC 7301 section 3.2). Other servers
/// complete it without choosing a protocol.
fn is_no_common_protocol(error: &io::Error) -> bool {
    let alert = rustls::Error::AlertReceived(AlertDescription::NoApplicationProtocol);
    tls_error(error) == Some(&alert)
}

/// Whether an error of h2 was caused by a TLS alert. With TLS 1.3 a server rejects a client certificate
/// after the client has finished its handshake (RFC 8446 section 4.4.2.4), so h2 receives the alert. h2
/// keeps only the kind and the text of the error. tokio-rustls uses the kind `InvalidData` for all TLS
/// errors and nothing else.
fn is_late_alert(error: &io::Error) -> bool {
    let h2_error = error.get_ref().and_then(|inner| inner.downcast_ref::<h2::Error>());
    let io_error = h2_error.and_then(h2::Error::get_io);
    io_error.is_some_and(|error| error.kind() == io::ErrorKind::InvalidData)
}

/// Starts HTTP/2 on a TLS stream and waits for the first PONG.
async fn first_pong(
    stream: UpstreamStream,
    observer: StreamObserver,
    (windows, max_streams): (ReceiveWindows, usize),
) -> Result<DialedConnection, io::Error> {
    let certificate = certificate_hash(&stream);
    let (stream, uncork) = cork(stream);
    let heads = SentHeads::new(observer.clone());
    let (stream, frames) = FrameLimiter::of_server(stream, max_streams as u32);
    let stream = stream.noting_heads(heads.clone());
    let (send, mut h2) = h2::client::Builder::new()
        .initial_window_size(windows.stream)
        .initial_connection_window_size(windows.connection)
        .max_frame_size(MAX_FRAME)
        .max_header_list_size(MAX_HEADER_LIST)
        .initial_max_send_streams(INITIAL_STREAMS)
        .max_send_buffer_size(SEND_BUFFER)
        .max_concurrent_reset_streams(RESET_STREAMS)
        .reset_stream_duration(RESET_MEMORY)
        .max_local_error_reset_streams(Some(ERROR_RESETS))
        .data_frame_budget(windows.data_frame_budget)
        .enable_push(false)
        .handshake(stream)
        .await
        .map_err(io::Error::other)?;
    let mut ping = h2.ping_pong().ok_or_else(|| io::Error::other("no PING handle"))?;
    ping.send_ping(Ping::opaque()).map_err(io::Error::other)?;
    let pinged_at = clock::now();
    poll_fn(|cx| {
        match Pin::new(&mut h2).poll(cx) {
            Poll::Ready(Ok(())) => {
                return Poll::Ready(Err(io::Error::other("closed before the first PONG")));
            }
            Poll::Ready(Err(error)) => return Poll::Ready(Err(io::Error::other(error))),
            Poll::Pending => {}
        }
        if let Poll::Ready(Err(error)) = uncork.poll(cx) {
            return Poll::Ready(Err(error));
        }
        ping.poll_pong(cx).map_ok(|_| ()).map_err(io::Error::other)
    })
    .await?;
    let rtt = clock::elapsed(pinged_at);
    Ok(DialedConnection {
        send,
        h2,
        ping,
        max_streams,
        windows,
        uncork,
        certificate,
        for_one_request: false,
        frames,
        heads,
        observer,
        rtt,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustls::Error;

    #[test]
    fn handshake_failure_distinguishes_errors_of_tls() {
        let address = SocketAddr::from(([127, 0, 0, 1], 6443));
        let tls = |error: Error| io::Error::new(io::ErrorKind::InvalidData, error);
        let no_protocol = Error::AlertReceived(AlertDescription::NoApplicationProtocol);
        for (error, kind, reason) in [
            (
                io::ErrorKind::ConnectionReset.into(),
                ConnectFailureKind::Failed,
                "TLS to 127.0.0.1:6443 failed: the server closed the connection in the TLS handshake: \
                 it may not speak TLS, or be starting or stopping",
            ),
            (
                tls(Error::NoCertificatesPresented),
                ConnectFailureKind::TlsFailed,
                "TLS to 127.0.0.1:6443 failed: the peer sent no certificate",
            ),
            (
                tls(no_protocol),
                ConnectFailureKind::NoH2,
                "127.0.0.1:6443 speaks none of the protocols offered (ALPN): is it an apiserver, or a proxy before it?",
            ),
        ] {
            assert_eq!(handshake_failure(address, &error), ConnectFailure::new(kind, reason));
        }
    }
}

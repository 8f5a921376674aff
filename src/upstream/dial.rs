//! Opens one connection to an endpoint: TCP, TLS and, for HTTP/2, the first PONG.
//!
//! Only the PONG proves that the apiserver answers: a load balancer completes handshakes for servers
//! that are gone. One time limit covers all steps. A second attempt starts after 250 ms, since one lost
//! SYN costs a second (RFC 6298 section 2, initial RTO).

use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use h2::client::{Connection as H2Connection, SendRequest};
use h2::{Ping, PingPong};
use rustls::{AlertDescription, CertificateError, ClientConfig};
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep, timeout};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::endpoint::{ConnectFailure, ConnectTimeout, Endpoint};
use crate::net::process::resource_limits;
use crate::net::sockets::connector::Connector;
use crate::net::sockets::read_ahead::ReadAhead;
use crate::net::sockets::tracked_stream::{self, StreamObserver, TrackedStream};

/// When a second attempt starts in parallel to one that has not succeeded.
const RACE_AFTER: Duration = Duration::from_millis(250);

/// Receive window of one stream. It also bounds the memory of a stream whose client does not read;
/// 256 KiB allows 2 Gbit/s at a round-trip time of 1 ms.
const STREAM_WINDOW: u32 = 256 * 1024;
/// Receive window of a connection: all 100 streams that kube-apiserver allows may be stalled without
/// an effect on the others.
const CONNECTION_WINDOW: u32 = STREAM_WINDOW * 128;
/// Largest frame accepted: fewer, larger frames make LISTs cheaper.
const MAX_FRAME: u32 = 64 * 1024;
/// Response headers of an apiserver are small.
const MAX_HEADER_LIST: u32 = 64 * 1024;
/// Stream limit assumed until the peer's SETTINGS arrive, which is before the first PONG.
const INITIAL_STREAMS: usize = 100;
/// Bytes buffered per stream for sending before `send_data` makes us wait.
const SEND_BUFFER: usize = 256 * 1024;
/// Locally reset streams that h2 remembers, and for how long. Clients may cancel thousands of watches
/// at once, and a late frame on a forgotten stream is a connection error (h2's default is 50 for 1 s).
const RESET_STREAMS: usize = 4096;
const RESET_MEMORY: Duration = Duration::from_secs(30);
/// Streams that h2 may reset for protocol errors of the peer before it closes the connection. Late
/// frames on forgotten streams count, so a connection that is used for weeks would reach h2's default
/// of 1024. A hostile peer can cause as many resets of 13 bytes.
const ERROR_RESETS: usize = 64 * 1024;
/// Budget for small DATA frames, shared by all streams. Watch events are small, and h2's default closes
/// a connection with about a hundred unread ones.
const DATA_FRAME_BUDGET: usize = CONNECTION_WINDOW as usize;

/// A connection that has answered its first PING.
pub struct DialedConnection {
    pub send: SendRequest<Bytes>,
    /// Must be polled for anything to happen.
    pub connection: H2Connection<TlsStream<ReadAhead<TrackedStream>>, Bytes>,
    pub ping: PingPong,
    /// Evidence of life.
    pub observer: StreamObserver,
    /// Round-trip time of the first PING.
    pub rtt: Duration,
}

/// Opens an HTTP/2 connection within `limit`.
pub async fn dial_h2(
    outgoing: &Connector,
    endpoint: &Endpoint,
    tls: &Arc<ClientConfig>,
    limit: ConnectTimeout,
) -> Result<DialedConnection, ConnectFailure> {
    // Boxed: the handshakes of rustls and h2 keep 30 KiB of state while they wait.
    Box::pin(race(endpoint, limit, |address| async move {
        let tcp = connect(outgoing, address).await?;
        let _under_way = endpoint.track_handshake();
        let (stream, observer) = secure(tcp, endpoint, address, tls).await?;
        if stream.get_ref().1.alpn_protocol() != Some(b"h2") {
            return Err(ConnectFailure::NoH2(format!(
                "{address} does not speak HTTP/2 (ALPN): is it an apiserver, or a proxy before it?"
            )));
        }
        first_pong(stream, observer).await.map_err(|error| {
            let kind = if is_late_alert(&error) {
                ConnectFailure::TlsFailed
            } else {
                ConnectFailure::Refused
            };
            kind(format!("HTTP/2 to {address} failed: {error}"))
        })
    }))
    .await
}

/// Opens a TLS connection with ALPN `http/1.1` for one upgrade, within `limit`.
pub async fn dial_http1(
    outgoing: &Connector,
    endpoint: &Endpoint,
    tls: &Arc<ClientConfig>,
    limit: ConnectTimeout,
) -> Result<(TlsStream<ReadAhead<TrackedStream>>, StreamObserver), ConnectFailure> {
    Box::pin(race(endpoint, limit, |address| async move {
        let tcp = connect(outgoing, address).await?;
        let _under_way = endpoint.track_handshake();
        secure(tcp, endpoint, address, tls).await.map_err(|failure| match failure {
            // It says nothing about HTTP/2, which was not offered.
            ConnectFailure::NoH2(why) => ConnectFailure::Refused(why),
            other => other,
        })
    }))
    .await
}

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
    let both = async {
        let mut one = pin!(attempt(first));
        tokio::select! {
            result = &mut one => match result {
                // `localhost` may be one family only.
                Err(_) if first != second => return attempt(second).await,
                result => return result,
            },
            () = sleep(RACE_AFTER) => {}
        }
        let mut two = pin!(attempt(second));
        tokio::select! {
            result = &mut one => match result {
                Ok(done) => Ok(done),
                Err(_) => two.await,
            },
            result = &mut two => match result {
                Ok(done) => Ok(done),
                Err(_) => one.await,
            },
        }
    };
    timeout(limit.limit(), both).await.unwrap_or_else(|_| {
        Err(ConnectFailure::Timeout(format!("no connection to {} {limit}", endpoint.label)))
    })
}

async fn connect(outgoing: &Connector, address: SocketAddr) -> Result<TcpStream, ConnectFailure> {
    outgoing.connect(address).await.map_err(|error| {
        let kind = if resource_limits::is_local_shortage(&error, address) {
            ConnectFailure::LocalShortage
        } else {
            ConnectFailure::Refused
        };
        kind(format!("TCP to {address} failed: {error}"))
    })
}

async fn secure(
    stream: TcpStream,
    endpoint: &Endpoint,
    address: SocketAddr,
    tls: &Arc<ClientConfig>,
) -> Result<(TlsStream<ReadAhead<TrackedStream>>, StreamObserver), ConnectFailure> {
    let (stream, observer) = tracked_stream::track(stream);
    let stream = TlsConnector::from(Arc::clone(tls))
        .connect(endpoint.server_name.clone(), ReadAhead::new(stream))
        .await
        .map_err(|error| {
            if is_no_common_protocol(&error) {
                return ConnectFailure::NoH2(format!(
                    "{address} speaks none of the protocols offered (ALPN): is it an apiserver, or \
                     a proxy before it?"
                ));
            }
            let kind = match of_tls(&error) {
                Some(_) => ConnectFailure::TlsFailed,
                None => ConnectFailure::Refused,
            };
            kind(format!("TLS to {address} failed: {}", tls_error_text(&error)))
        })?;
    Ok((stream, observer))
}

/// A server may end the handshake over ALPN with an alert instead of choosing nothing (RFC 7301
/// section 3.2).
fn is_no_common_protocol(error: &io::Error) -> bool {
    let alert = rustls::Error::AlertReceived(AlertDescription::NoApplicationProtocol);
    of_tls(error) == Some(&alert)
}

/// The TLS error, if it is one: the peer has answered.
fn of_tls(error: &io::Error) -> Option<&rustls::Error> {
    error.get_ref().and_then(|inner| inner.downcast_ref())
}

/// With TLS 1.3 a server rejects a client certificate only after the client's part of the handshake
/// (RFC 8446 section 4.4.2.4). h2 receives the alert and keeps the kind and text of the error;
/// tokio-rustls uses `InvalidData` for all TLS errors and nothing else.
fn is_late_alert(error: &io::Error) -> bool {
    let of_h2 = error.get_ref().and_then(|inner| inner.downcast_ref::<h2::Error>());
    let below = of_h2.and_then(h2::Error::get_io);
    below.is_some_and(|error| error.kind() == io::ErrorKind::InvalidData)
}

/// The text of a TLS error. rustls lists the names of a certificate as `DnsName("kubernetes")`;
/// the names alone are what an operator compares.
fn tls_error_text(error: &io::Error) -> String {
    match of_tls(error) {
        Some(rustls::Error::InvalidCertificate(CertificateError::NotValidForNameContext {
            expected,
            presented,
        })) => {
            let names: Vec<_> = presented.iter().map(|name| bare_name(name)).collect();
            format!(
                "certificate not valid for {}; it is valid for {}",
                expected.to_str(),
                names.join(", ")
            )
        }
        _ => error.to_string(),
    }
}

/// `kubernetes` of `DnsName("kubernetes")`.
fn bare_name(name: &str) -> &str {
    let inner = name.split_once('(').and_then(|(_, rest)| rest.strip_suffix(')'));
    inner.unwrap_or(name).trim_matches('"')
}

async fn first_pong(
    stream: TlsStream<ReadAhead<TrackedStream>>,
    observer: StreamObserver,
) -> Result<DialedConnection, io::Error> {
    let (send, mut connection) = h2::client::Builder::new()
        .initial_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_frame_size(MAX_FRAME)
        .max_header_list_size(MAX_HEADER_LIST)
        .initial_max_send_streams(INITIAL_STREAMS)
        .max_send_buffer_size(SEND_BUFFER)
        .max_concurrent_reset_streams(RESET_STREAMS)
        .reset_stream_duration(RESET_MEMORY)
        .max_local_error_reset_streams(Some(ERROR_RESETS))
        .data_frame_budget(DATA_FRAME_BUDGET)
        .enable_push(false)
        .handshake(stream)
        .await
        .map_err(io::Error::other)?;
    let mut ping = connection.ping_pong().ok_or_else(|| io::Error::other("no PING handle"))?;
    ping.send_ping(Ping::opaque()).map_err(io::Error::other)?;
    let pinged_at = Instant::now();
    poll_fn(|cx| {
        match Pin::new(&mut connection).poll(cx) {
            Poll::Ready(Ok(())) => {
                return Poll::Ready(Err(io::Error::other("closed before the first PONG")));
            }
            Poll::Ready(Err(error)) => return Poll::Ready(Err(io::Error::other(error))),
            Poll::Pending => {}
        }
        ping.poll_pong(cx).map_ok(|_| ()).map_err(io::Error::other)
    })
    .await?;
    let rtt = pinged_at.elapsed();
    Ok(DialedConnection { send, connection, ping, observer, rtt })
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustls::pki_types::ServerName;

    #[test]
    fn tls_error_text_of_a_wrong_name_lists_bare_names() {
        let error = rustls::Error::InvalidCertificate(CertificateError::NotValidForNameContext {
            expected: ServerName::try_from("10.0.0.1").unwrap(),
            presented: vec!["DnsName(\"kubernetes\")".into(), "IpAddress(10.96.0.1)".into()],
        });
        let text = tls_error_text(&io::Error::new(io::ErrorKind::InvalidData, error));
        let expected = "certificate not valid for 10.0.0.1; it is valid for kubernetes, 10.96.0.1";
        assert_eq!(text, expected);
    }
}

//! HTTP client of the admin endpoint, over TCP or over its Unix socket: `status`, `probe`, `doctor`
//! and `demo` use it.

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response, StatusCode, header};
use http_body_util::{BodyExt, Empty, Limited};
use hyper_util::rt::TokioIo;
use jackstay_config::format_duration;
use serde_json::Value;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};

/// The default of `admin.bind`.
pub const DEFAULT_ADMIN: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 9643);

/// Limit of one request for `/status`.
pub const STATUS_TIMEOUT: Duration = Duration::from_secs(5);

/// Largest accepted body. `/status` of 256 endpoints with all their connections is smaller.
const MAX_BODY: usize = 16 << 20;

/// The TCP address of an admin endpoint, as in `--admin`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TcpAddress {
    /// An IP address and a port.
    Ip(SocketAddr),
    /// Both loopback addresses (RFC 6761 section 6.3) and a port. DNS is not asked.
    Localhost(u16),
}

impl TcpAddress {
    /// Connects. Of `localhost`, the IPv6 address is tried after the IPv4 address has failed; if both fail,
    /// the error is that of IPv4.
    async fn connect(self) -> io::Result<TcpStream> {
        let port = match self {
            Self::Ip(address) => return TcpStream::connect(address).await,
            Self::Localhost(port) => port,
        };
        match TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await {
            Ok(stream) => Ok(stream),
            Err(error) => TcpStream::connect((Ipv6Addr::LOCALHOST, port)).await.or(Err(error)),
        }
    }
}

impl From<SocketAddr> for TcpAddress {
    fn from(address: SocketAddr) -> Self {
        Self::Ip(address)
    }
}

/// A text is not an address that can be connected to without a DNS lookup.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "write an IP address and a port, as in 127.0.0.1:9643 or [::1]:9643, or localhost:9643; other names are \
     not looked up"
)]
pub struct TcpAddressError;

impl FromStr for TcpAddress {
    type Err = TcpAddressError;

    fn from_str(text: &str) -> Result<Self, TcpAddressError> {
        if let Ok(address) = text.parse() {
            return Ok(Self::Ip(address));
        }
        let localhost = text.rsplit_once(':').filter(|(host, port)| {
            host.eq_ignore_ascii_case("localhost") && port.bytes().all(|b| b.is_ascii_digit())
        });
        localhost
            .and_then(|(_, port)| port.parse().ok())
            .map(Self::Localhost)
            .ok_or(TcpAddressError)
    }
}

impl fmt::Display for TcpAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ip(address) => address.fmt(f),
            Self::Localhost(port) => write!(f, "localhost:{port}"),
        }
    }
}

/// Where an admin endpoint listens.
#[derive(Debug, Clone)]
pub enum AdminAddress {
    /// `admin.bind`
    Tcp(TcpAddress),
    /// `admin.socket`
    Unix(PathBuf),
}

impl fmt::Display for AdminAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => address.fmt(f),
            Self::Unix(path) => path.display().fmt(f),
        }
    }
}

/// Runs a request to its end, for callers without a tokio runtime.
pub fn block_on<T>(request: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(request)
}

/// A limit for people, rounded to milliseconds: what is left until a deadline has an odd number of nanoseconds.
fn format_limit(limit: Duration) -> String {
    let millis = (limit + Duration::from_micros(500)).as_millis().max(1);
    format_duration(Duration::from_millis(u64::try_from(millis).unwrap_or(u64::MAX)))
}

/// Sends a GET request and reads the response, all within `limit`.
///
/// # Errors
/// `InvalidData` if the peer does not speak HTTP, `TimedOut` after `limit`, else the error of the
/// socket.
pub async fn get(
    address: &AdminAddress,
    path: &str,
    limit: Duration,
) -> io::Result<Response<Bytes>> {
    let exchange = async {
        match address {
            AdminAddress::Tcp(address) => {
                exchange(address.connect().await?, &address.to_string(), path).await
            }
            // A nonblocking connect(2) fails with EAGAIN while the socket's backlog is full.
            AdminAddress::Unix(socket) => {
                exchange(UnixStream::connect(socket).await?, "localhost", path).await
            }
        }
    };
    let timed_out = |_| {
        let text = format!("no answer within {}", format_limit(limit));
        io::Error::new(io::ErrorKind::TimedOut, text)
    };
    tokio::time::timeout(limit, exchange).await.map_err(timed_out)?
}

/// Reads `/status` within `limit`.
///
/// # Errors
/// Those of [`get`]; `InvalidData` for a status code other than 200 or a body that is not JSON.
pub async fn get_status(admin: impl Into<TcpAddress>, limit: Duration) -> io::Result<Value> {
    let response = get(&AdminAddress::Tcp(admin.into()), "/status", limit).await?;
    if response.status() != StatusCode::OK {
        return Err(invalid_data(format!("/status is answered with {}", response.status())));
    }
    serde_json::from_slice(response.body())
        .map_err(|error| invalid_data(format!("/status is not JSON: {error}")))
}

/// [`get_status`] for callers without a tokio runtime.
pub fn fetch_status(admin: impl Into<TcpAddress>) -> io::Result<Value> {
    block_on(get_status(admin, STATUS_TIMEOUT))
}

/// Explains in one line why `/status` could not be read, and what to do.
pub fn explain_no_status(admin: impl Into<TcpAddress>, error: &io::Error) -> String {
    let admin = admin.into();
    let reason = match error.kind() {
        io::ErrorKind::ConnectionRefused => format!(
            "nothing listens on {admin}: jackstay does not run there, or its admin.bind is another \
             address (--admin ADDR; `ss -ltnp` lists the listening sockets)"
        ),
        io::ErrorKind::TimedOut => format!(
            "{admin} gives {error}: the process is stopped or overloaded, or a firewall \
             drops packets"
        ),
        io::ErrorKind::InvalidData => {
            format!("{admin} is not the admin endpoint of jackstay: {error}")
        }
        _ => format!("cannot ask {admin}: {error}"),
    };
    format!("no status: {reason}")
}

/// Sends one request on a new connection. The admin endpoint refuses hosts other than `localhost` and IP
/// addresses.
async fn exchange(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    host: &str,
    path: &str,
) -> io::Result<Response<Bytes>> {
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(io_error)?;
    // The task ends when the connection closes, or when `sender` and the body are dropped.
    drop(tokio::spawn(connection));
    let request = Request::get(path)
        .header(header::HOST, host)
        .header(header::CONNECTION, "close")
        .body(Empty::<Bytes>::new())
        .map_err(io::Error::other)?;
    let (head, body) = sender.send_request(request).await.map_err(io_error)?.into_parts();
    let body = Limited::new(body, MAX_BODY).collect().await;
    let body = body.map_err(|error| match error.downcast::<hyper::Error>() {
        Ok(error) => io_error(*error),
        Err(error) => invalid_data(error.to_string()),
    })?;
    Ok(Response::from_parts(head, body.to_bytes()))
}

/// The error of the socket, or `InvalidData` for an answer that is not HTTP.
fn io_error(error: hyper::Error) -> io::Error {
    let source = std::error::Error::source(&error).and_then(|e| e.downcast_ref::<io::Error>());
    match source {
        Some(socket) if !is_unexpected_close(socket.kind()) => io::Error::new(socket.kind(), error),
        _ => invalid_data(format!("not HTTP: {error}")),
    }
}

/// Whether the peer closed the connection before its answer was complete.
fn is_unexpected_close(kind: io::ErrorKind) -> bool {
    matches!(
        kind,
        io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset | io::ErrorKind::UnexpectedEof
    )
}

fn invalid_data(text: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, text)
}

#[cfg(test)]
mod tests {
    use jackstay_sys::sockets::listening;

    use super::*;
    use std::io::{Read, Write};
    use std::net::TcpListener;

    const LIMIT: Duration = Duration::from_secs(10);

    /// Reads a request head and answers with these bytes.
    fn serve_once(mut stream: impl Read + Write, answer: &str) {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            let mut byte = [0];
            stream.read_exact(&mut byte).unwrap();
            head.push(byte[0]);
        }
        let _ = stream.write_all(answer.as_bytes());
    }

    fn tcp_server(answer: &'static str) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        std::thread::spawn(move || serve_once(listener.accept().unwrap().0, answer));
        address
    }

    #[test]
    fn fetch_status_ok_response_is_parsed() {
        let server = tcp_server("HTTP/1.0 200 OK\r\n\r\n{\"version\": \"1\"}");
        assert_eq!(fetch_status(server).unwrap()["version"], "1");
    }

    #[test]
    fn tcp_address_accepts_ip_addresses_and_localhost_only() {
        for text in ["127.0.0.1:9643", "[::1]:9643", "localhost:9643"] {
            assert_eq!(text.parse::<TcpAddress>().unwrap().to_string(), text);
        }
        assert_eq!("LocalHost:1".parse(), Ok(TcpAddress::Localhost(1)));
        for text in
            ["localhost", "localhost:", "localhost:70000", "localhost:+1", "node-1:9643", ""]
        {
            assert_eq!(text.parse::<TcpAddress>(), Err(TcpAddressError), "{text}");
        }
    }

    #[test]
    fn fetch_status_of_localhost_reaches_either_loopback_address() {
        for bind in ["127.0.0.1:0", "[::1]:0"] {
            let Ok(listener) = TcpListener::bind(bind) else {
                println!("skipped: {bind} cannot be bound");
                continue;
            };
            let port = listener.local_addr().unwrap().port();
            std::thread::spawn(move || {
                serve_once(
                    listener.accept().unwrap().0,
                    "HTTP/1.0 200 OK\r\n\r\n{\"version\": \"1\"}",
                );
            });
            assert_eq!(
                fetch_status(TcpAddress::Localhost(port)).unwrap()["version"],
                "1",
                "{bind}"
            );
        }
    }

    #[test]
    fn fetch_status_foreign_server_is_invalid_data() {
        for (answer, part) in [
            ("HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n", "404 Not Found"),
            ("HTTP/1.0 200 OK\r\n\r\n<html>", "is not JSON"),
            ("SSH-2.0-OpenSSH_9.2\r\n", "not HTTP"),
            ("", "not HTTP"),
        ] {
            let error = fetch_status(tcp_server(answer)).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{answer:?}: {error}");
            assert!(error.to_string().contains(part), "{answer:?}: {error}");
        }
    }

    #[test]
    fn explain_no_status_closed_port_names_the_option() {
        // The socket is bound, so that no other process gets the port, and does not listen.
        let socket =
            socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
        socket.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
        let address = socket.local_addr().unwrap().as_socket().unwrap();
        let text = explain_no_status(address, &fetch_status(address).unwrap_err());
        assert!(text.starts_with(&format!("no status: nothing listens on {address}: ")), "{text}");
        assert!(text.contains("--admin"), "{text}");
    }

    #[test]
    fn explain_no_status_foreign_server_is_one_line_with_its_address() {
        let address = SocketAddr::from(([127, 0, 0, 1], 22));
        let text =
            explain_no_status(address, &io::Error::new(io::ErrorKind::InvalidData, "not HTTP"));
        assert_eq!(text, "no status: 127.0.0.1:22 is not the admin endpoint of jackstay: not HTTP");
    }

    #[test]
    fn get_over_unix_socket_returns_status_and_body() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("admin.sock");
        let address = AdminAddress::Unix(path.clone());
        let ask = || block_on(get(&address, "/livez", LIMIT));
        assert_eq!(ask().unwrap_err().kind(), io::ErrorKind::NotFound);
        let serve = |answer| {
            let listener = listening::listen_unix(&path, 0o660).unwrap();
            listener.set_nonblocking(false).unwrap();
            std::thread::spawn(move || serve_once(listener.accept().unwrap().0, answer));
        };
        serve("HTTP/1.0 200 OK\r\n\r\nok\n");
        let response = ask().unwrap();
        assert_eq!((response.status(), &response.body()[..]), (StatusCode::OK, &b"ok\n"[..]));
        serve("HTTP/1.0 503 Service Unavailable\r\n\r\nnot alive: worker 0\n");
        assert_eq!(ask().unwrap().status(), StatusCode::SERVICE_UNAVAILABLE);
    }

    #[test]
    fn format_limit_rounds_to_milliseconds() {
        for (nanos, expected) in [
            (1_999_999_790, "2s"),
            (2_000_000_000, "2s"),
            (437_400_001, "437ms"),
            (59_999_900_000, "1m"),
            (100, "1ms"),
        ] {
            assert_eq!(format_limit(Duration::from_nanos(nanos)), expected);
        }
    }

    #[test]
    fn get_silent_server_times_out() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("admin.sock");
        let _listener = listening::listen_unix(&path, 0o660).unwrap();
        let limit = Duration::from_millis(50);
        let error = block_on(get(&AdminAddress::Unix(path), "/livez", limit)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }
}

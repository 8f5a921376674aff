//! A plain client for the demo, the tests and the benches: one TLS connection and no retries, so that every
//! failure is visible.

use crate::ResponseBody;
use crate::pki::Issued;
use bytes::{Bytes, BytesMut};
use http::{HeaderMap, Method, Request, Response, StatusCode};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use rustls::crypto::aws_lc_rs::sign::any_supported_type;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use serde_json::Value;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;

const JSON: [(&str, &str); 1] = [("content-type", "application/json")];

/// Trust and credentials of a client.
#[derive(Debug, Clone, Default)]
pub struct Credentials {
    /// Trusted CA certificates.
    ca_pem: String,
    certificate: Option<Issued>,
    /// Bearer token, sent with each request.
    token: Option<String>,
    /// Name that the serving certificate must contain; by default the IP address of the server.
    server_name: Option<String>,
}

impl Credentials {
    /// No credentials.
    pub fn anonymous(ca_pem: &str) -> Self {
        Self { ca_pem: ca_pem.to_owned(), ..Self::default() }
    }

    /// Adds a client certificate.
    #[must_use]
    pub fn certificate(mut self, certificate: &Issued) -> Self {
        self.certificate = Some(certificate.clone());
        self
    }

    /// Requires this name in the serving certificate.
    #[must_use]
    pub fn expecting(mut self, name: &str) -> Self {
        self.server_name = Some(name.to_owned());
        self
    }

    /// Adds a bearer token.
    #[must_use]
    pub fn token(mut self, token: &str) -> Self {
        self.token = Some(token.to_owned());
        self
    }
}

/// One connection, closed on drop.
#[derive(Debug)]
pub struct Client {
    sender: Sender,
    authority: String,
    token: Option<String>,
    driver: tokio::task::JoinHandle<()>,
}

#[derive(Debug, Clone)]
enum Sender {
    Http1(Arc<tokio::sync::Mutex<hyper::client::conn::http1::SendRequest<ResponseBody>>>),
    Http2(Http2Sender),
}

/// The sender of a connection; none once the connection is closed. tokio keeps a message whose `send` overlaps the drop
/// of the receiver until the last sender is dropped (`Rx::drop` in its `sync/mpsc/chan.rs`), so a request that is sent
/// while the connection closes would never end if a sender remained.
type Http2Sender = Arc<Mutex<Option<hyper::client::conn::http2::SendRequest<ResponseBody>>>>;

/// A complete response.
#[derive(Debug)]
pub struct Reply {
    /// The status code.
    pub status: StatusCode,
    /// The headers.
    pub headers: HeaderMap,
    /// The body.
    pub body: Bytes,
}

impl Reply {
    /// The body as JSON; null if it is not JSON.
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_default()
    }
}

impl Client {
    /// Connects with HTTP/2.
    pub async fn connect(addr: SocketAddr, credentials: &Credentials) -> io::Result<Self> {
        Self::connect_with(addr, credentials, true).await
    }

    /// Connects with HTTP/1.1. Concurrent requests wait for each other.
    pub async fn connect_http1(addr: SocketAddr, credentials: &Credentials) -> io::Result<Self> {
        Self::connect_with(addr, credentials, false).await
    }

    async fn connect_with(
        addr: SocketAddr,
        credentials: &Credentials,
        http2: bool,
    ) -> io::Result<Self> {
        let stream = TcpStream::connect(addr).await?;
        stream.set_nodelay(true)?;
        Self::over(stream, addr, credentials, http2).await
    }

    /// Begins TLS, and HTTP/2 or HTTP/1.1, on a connection to `addr`.
    pub async fn over<S>(
        stream: S,
        addr: SocketAddr,
        credentials: &Credentials,
        http2: bool,
    ) -> io::Result<Self>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        // The future of a handshake is large.
        Box::pin(Self::begin(stream, addr, credentials, http2)).await
    }

    async fn begin<S>(
        stream: S,
        addr: SocketAddr,
        credentials: &Credentials,
        http2: bool,
    ) -> io::Result<Self>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let config = tls_config(credentials, http2)?;
        let name = match &credentials.server_name {
            Some(name) => ServerName::try_from(name.clone()).map_err(io::Error::other)?,
            None => ServerName::from(addr.ip()),
        };
        let tls = tokio_rustls::TlsConnector::from(Arc::new(config)).connect(name, stream).await?;
        let has_http2 = tls.get_ref().1.alpn_protocol() == Some(b"h2");
        if http2 != has_http2 {
            return Err(io::Error::other("the server does not offer the requested HTTP version"));
        }
        let io = TokioIo::new(tls);
        let (sender, driver) = if http2 {
            let (sender, connection) =
                hyper::client::conn::http2::Builder::new(TokioExecutor::new())
                    .timer(TokioTimer::new())
                    // The limit until the server's SETTINGS arrive.
                    .initial_max_send_streams(1000)
                    .handshake(io)
                    .await
                    .map_err(io::Error::other)?;
            let sender = Arc::new(Mutex::new(Some(sender)));
            let closed = Arc::clone(&sender);
            let driver = tokio::spawn(async move {
                // A connection error is also the error of each request on the connection.
                let _ = connection.await;
                closed.lock().unwrap_or_else(PoisonError::into_inner).take();
            });
            (Sender::Http2(sender), driver)
        } else {
            let (sender, connection) =
                hyper::client::conn::http1::handshake(io).await.map_err(io::Error::other)?;
            let sender = Sender::Http1(Arc::new(tokio::sync::Mutex::new(sender)));
            (sender, tokio::spawn(async { drop(connection.with_upgrades().await) }))
        };
        Ok(Self { sender, authority: addr.to_string(), token: credentials.token.clone(), driver })
    }

    /// Whether the connection is closed.
    pub fn is_closed(&self) -> bool {
        self.driver.is_finished()
    }

    /// Sends a request and returns when the response head has arrived.
    pub async fn send(
        &self,
        method: Method,
        path: &str,
        headers: &[(&str, &str)],
        body: impl Into<Bytes>,
    ) -> io::Result<Response<Incoming>> {
        let mut request = Request::builder().method(method);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        if let Some(token) = &self.token {
            request = request.header("authorization", format!("Bearer {token}"));
        }
        let request = match self.sender {
            Sender::Http1(_) => request.uri(path).header("host", &self.authority),
            Sender::Http2(_) => request.uri(format!("https://{}{path}", self.authority)),
        };
        let request = request.body(ResponseBody::full(body)).map_err(io::Error::other)?;
        let response = match &self.sender {
            Sender::Http1(sender) => {
                let mut sender = sender.lock().await;
                sender.ready().await.map_err(io::Error::other)?;
                sender.send_request(request).await
            }
            Sender::Http2(sender) => {
                let open = sender.lock().unwrap_or_else(PoisonError::into_inner).clone();
                let Some(mut open) = open else { return Err(io::ErrorKind::NotConnected.into()) };
                let response = open.send_request(request);
                drop(open);
                response.await
            }
        };
        response.map_err(io::Error::other)
    }

    /// Sends a request and waits for the complete response.
    pub async fn request(
        &self,
        method: Method,
        path: &str,
        headers: &[(&str, &str)],
        body: impl Into<Bytes>,
    ) -> io::Result<Reply> {
        let (head, body) = self.send(method, path, headers, body).await?.into_parts();
        let body = body.collect().await.map_err(io::Error::other)?.to_bytes();
        Ok(Reply { status: head.status, headers: head.headers, body })
    }

    /// Sends GET with `Accept: application/json`.
    pub async fn get(&self, path: &str) -> io::Result<Reply> {
        self.request(Method::GET, path, &[("accept", "application/json")], Bytes::new()).await
    }

    /// Sends POST with a JSON body.
    pub async fn post(&self, path: &str, object: &Value) -> io::Result<Reply> {
        self.request(Method::POST, path, &JSON, object.to_string()).await
    }

    /// Sends PUT with a JSON body.
    pub async fn put(&self, path: &str, object: &Value) -> io::Result<Reply> {
        self.request(Method::PUT, path, &JSON, object.to_string()).await
    }

    /// Starts a watch; the path must contain `watch=1`.
    ///
    /// # Errors
    /// The request failed, or the status is not 200.
    pub async fn watch(&self, path: &str) -> io::Result<Watch> {
        let response = self.send(Method::GET, path, &[], Bytes::new()).await?;
        if response.status() != StatusCode::OK {
            return Err(io::Error::other(format!("watch: {}", response.status())));
        }
        Ok(Watch { body: response.into_body(), buffer: BytesMut::new() })
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

/// The event stream of a JSON watch.
#[derive(Debug)]
pub struct Watch {
    body: Incoming,
    buffer: BytesMut,
}

impl Watch {
    /// The next event; `None` when the server ends the stream cleanly.
    ///
    /// # Errors
    /// The stream was reset, or it ended inside an event.
    pub async fn next(&mut self) -> io::Result<Option<Value>> {
        loop {
            if let Some(end) = self.buffer.iter().position(|byte| *byte == b'\n') {
                let line = self.buffer.split_to(end + 1);
                return serde_json::from_slice(&line).map(Some).map_err(io::Error::other);
            }
            match next_data(&mut self.body).await? {
                Some(data) => self.buffer.extend_from_slice(&data),
                None if self.buffer.is_empty() => return Ok(None),
                None => return Err(io::ErrorKind::UnexpectedEof.into()),
            }
        }
    }
}

/// The next data of a body; `None` when the server ends the body cleanly.
pub async fn next_data(body: &mut Incoming) -> io::Result<Option<Bytes>> {
    while let Some(frame) = body.frame().await {
        if let Ok(data) = frame.map_err(io::Error::other)?.into_data() {
            return Ok(Some(data));
        }
    }
    Ok(None)
}

pub(crate) fn tls_config(
    credentials: &Credentials,
    http2: bool,
) -> io::Result<rustls::ClientConfig> {
    let mut roots = rustls::RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(credentials.ca_pem.as_bytes()) {
        roots.add(certificate.map_err(io::Error::other)?).map_err(io::Error::other)?;
    }
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let builder = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(io::Error::other)?
        .with_root_certificates(roots);
    let mut config = match &credentials.certificate {
        // `with_client_auth_cert` refuses a certificate of X.509 version 1, which other clients present.
        Some(issued) => {
            let key = any_supported_type(&issued.key_der()).map_err(io::Error::other)?;
            let certified = CertifiedKey::new(vec![issued.cert_der()], key);
            builder.with_client_cert_resolver(Arc::new(SingleCertAndKey::from(certified)))
        }
        None => builder.with_no_client_auth(),
    };
    config.alpn_protocols = vec![if http2 { b"h2".to_vec() } else { b"http/1.1".to_vec() }];
    Ok(config)
}

//! Requests as client-go makes them: on one connection until its streams are used up, sent again if the server has not
//! processed them, and after a `Retry-After`.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use h2::RecvStream;
use http::header::{
    ACCEPT, ACCEPT_ENCODING, AUTHORIZATION, CONTENT_ENCODING, CONTENT_TYPE, RETRY_AFTER, USER_AGENT,
};
use http::{HeaderValue, Method, Request, response};
use jackstay_sys::clock;
use jackstay_sys::sockets::virtual_network::VirtualNetwork;
use rustls::ClientConfig;
use rustls::client::Resumption;
use rustls::pki_types::ServerName;
use tokio::sync::{Notify, oneshot};
use tokio_rustls::TlsConnector;

pub use super::connection::Failure;
use super::connection::{Connection, Destination, NoHead, StreamPermit, dial};
use super::gzip::GzipBody;

/// Window of a stream in bytes (`x/net/http2`, `transportDefaultStreamFlow`).
const STREAM_WINDOW: u32 = 4 << 20;
/// How often an unprocessed request is sent again (`x/net/http2`, `RoundTripOpt`).
const MAX_REPEATS: u32 = 6;
/// How often a request is sent again after a `Retry-After` (client-go, `rest/request.go`, `maxRetries`).
const MAX_RETRIES: u32 = 10;
const JSON: HeaderValue = HeaderValue::from_static("application/json");
const GZIP: HeaderValue = HeaderValue::from_static("gzip");
const AGENT: HeaderValue = HeaderValue::from_static("jackstay-sim");

/// How a client differs from the usual one.
#[derive(Debug, Clone)]
pub struct ClientOptions {
    /// The bearer token. See [`Client::set_token`].
    pub token: Option<String>,
    /// Window of a stream in bytes.
    pub stream_window: u32,
    /// Whether a response of 429 or 5xx with a `Retry-After` makes it send the request again, whatever its method, as
    /// client-go does.
    pub retries_after: bool,
    /// Whether it accepts compressed responses, as client-go does unless its user has turned that off.
    pub accepts_gzip: bool,
    /// The `Audit-ID` of a request that has none is this name and the number of the request, by which the record of an
    /// apiserver shows whose request it was. None by default.
    pub name: Option<String>,
}

impl Default for ClientOptions {
    fn default() -> Self {
        Self {
            token: None,
            stream_window: STREAM_WINDOW,
            retries_after: true,
            accepts_gzip: false,
            name: None,
        }
    }
}

/// A request.
#[derive(Debug, Clone)]
pub struct Outgoing {
    method: Method,
    /// Path and query.
    target: String,
    /// Content-Type and body.
    body: Option<(HeaderValue, Bytes)>,
    /// `Audit-ID`, which kube-apiserver keeps.
    audit_id: Option<HeaderValue>,
}

/// The client of one user at one address. Clones share its connections, whose tasks run in the `LocalSet` of the first
/// request.
#[derive(Clone)]
pub struct Client(Rc<Shared>);

struct Shared {
    to: Destination,
    options: ClientOptions,
    authorization: RefCell<Option<HeaderValue>>,
    /// Whether the apiservers do not accept the token.
    is_revoked: Cell<bool>,
    authority: String,
    connections: RefCell<Vec<Rc<Connection>>>,
    /// A connection was established or has ended.
    changed: Notify,
    requests: Cell<u64>,
    /// Requests that were sent, those that were sent again included.
    sent: Cell<u64>,
    /// When those were sent that have a name of the client, by `Audit-ID`.
    sent_at: RefCell<Vec<(String, Instant)>>,
    dials: Cell<u64>,
}

/// A response whose body is still to be read. Dropping it resets the stream.
pub struct Response {
    /// The number of the request.
    pub request: u64,
    /// The head.
    pub head: response::Parts,
    body: RecvStream,
    /// Decodes the body, if it is compressed.
    gzip: Option<GzipBody>,
    stream: StreamPermit,
}

/// A whole response.
#[derive(Debug, Clone)]
pub struct Answer {
    /// The status.
    pub status: u16,
    /// The body.
    pub body: Bytes,
}

impl Outgoing {
    /// A GET.
    pub fn get(target: impl Into<String>) -> Self {
        Self { method: Method::GET, target: target.into(), body: None, audit_id: None }
    }

    /// A request with a JSON body.
    pub fn json(method: Method, target: impl Into<String>, body: &serde_json::Value) -> Self {
        Self::with_body(method, target, body.to_string().into())
    }

    /// A request with these bytes of JSON.
    pub fn with_body(method: Method, target: impl Into<String>, body: Bytes) -> Self {
        Self { method, target: target.into(), body: Some((JSON, body)), audit_id: None }
    }

    /// A DELETE.
    pub fn delete(target: impl Into<String>) -> Self {
        Self { method: Method::DELETE, ..Self::get(target) }
    }

    /// Names another type of the body.
    #[must_use]
    pub fn content_type(mut self, content_type: &'static str) -> Self {
        if let Some((current, _)) = &mut self.body {
            *current = HeaderValue::from_static(content_type);
        }
        self
    }

    /// Sets the `Audit-ID`.
    #[must_use]
    pub fn audit_id(mut self, id: &str) -> Self {
        self.audit_id = HeaderValue::from_str(id).ok();
        self
    }

    /// Method, path and query.
    pub fn describe(&self) -> String {
        format!("{} {}", self.method, self.target)
    }
}

impl Client {
    /// A client without connections. `tls` has the trust and the certificate; ALPN and the resumption of sessions are
    /// set as client-go has them.
    pub fn new(
        network: Arc<dyn VirtualNetwork>,
        address: SocketAddr,
        mut tls: ClientConfig,
        server_name: ServerName<'static>,
        options: ClientOptions,
    ) -> Self {
        tls.alpn_protocols = vec![b"h2".to_vec()];
        tls.resumption = Resumption::disabled();
        let authorization = RefCell::new(options.token.as_deref().and_then(bearer));
        let to = Destination {
            network,
            address,
            tls: TlsConnector::from(Arc::new(tls)),
            server_name,
            stream_window: options.stream_window,
        };
        Self(Rc::new(Shared {
            to,
            options,
            authorization,
            is_revoked: Cell::new(false),
            authority: address.to_string(),
            connections: RefCell::default(),
            changed: Notify::new(),
            requests: Cell::new(0),
            sent: Cell::new(0),
            sent_at: RefCell::default(),
            dials: Cell::new(0),
        }))
    }

    /// The token of requests from now on, which the apiservers accept. Connections stay.
    pub fn set_token(&self, token: &str) {
        self.0.authorization.replace(bearer(token));
        self.0.is_revoked.set(false);
    }

    /// The apiservers do not accept the token from now on.
    pub fn token_revoked(&self) {
        self.0.is_revoked.set(true);
    }

    /// Whether the apiservers do not accept the token.
    pub fn is_revoked(&self) -> bool {
        self.0.is_revoked.get()
    }

    /// A number for the next request. Numbers are not used again.
    pub fn next_request(&self) -> u64 {
        self.0.requests.set(self.0.requests.get() + 1);
        self.0.requests.get()
    }

    /// Sends a request and returns its response with the body still to be read.
    ///
    /// # Errors
    /// There is no connection, or the request got no response head.
    pub async fn open(&self, request: u64, outgoing: &Outgoing) -> Result<Response, Failure> {
        let mut retries = 0;
        loop {
            let response = self.open_once(request, outgoing).await?;
            let status = response.head.status;
            let is_retried = status.as_u16() == 429 || status.is_server_error();
            let after = response.head.headers.get(RETRY_AFTER).and_then(|v| v.to_str().ok());
            let after = after.and_then(|seconds| seconds.parse::<u32>().ok());
            match after {
                Some(seconds)
                    if is_retried && self.0.options.retries_after && retries < MAX_RETRIES =>
                {
                    retries += 1;
                    drop(response);
                    tokio::time::sleep(Duration::from_secs(seconds.into())).await;
                }
                _ => return Ok(response),
            }
        }
    }

    /// Sends a request whose body does not end, and resets its stream when `until` is ready or the response arrives.
    ///
    /// # Errors
    /// There is no connection, or the request was not sent.
    pub async fn send_unfinished(
        &self,
        outgoing: &Outgoing,
        until: impl Future<Output = ()>,
    ) -> Result<(), Failure> {
        let stream = self.stream().await?;
        let body = outgoing.body.as_ref().map(|body| body.1.clone()).unwrap_or_default();
        let sent = stream.send_unfinished(self.request_head(outgoing), body).await;
        let (response, _body) = sent.map_err(|_| Failure::Closed)?;
        tokio::select! {
            biased;
            _ = response => {}
            () = until => {}
        }
        Ok(())
    }

    /// Sends a request and reads the whole response.
    ///
    /// # Errors
    /// Those of [`Self::open`] and of the body; [`Failure::Timeout`] if it takes longer than `limit`.
    pub async fn call(
        &self,
        request: u64,
        outgoing: &Outgoing,
        limit: Duration,
    ) -> Result<Answer, Failure> {
        let exchange = async {
            let mut response = self.open(request, outgoing).await?;
            let mut body = BytesMut::new();
            while let Some(chunk) = response.chunk().await? {
                body.extend_from_slice(&chunk);
            }
            Ok(Answer { status: response.head.status.as_u16(), body: body.freeze() })
        };
        tokio::time::timeout(limit, exchange).await.unwrap_or(Err(Failure::Timeout))
    }

    /// Sends a request, again if the server has not processed it.
    async fn open_once(&self, request: u64, outgoing: &Outgoing) -> Result<Response, Failure> {
        let mut repeats = 0;
        loop {
            let stream = self.stream().await?;
            match self.exchange(stream, request, outgoing).await {
                Ok(response) => return Ok(response),
                Err(NoHead::Failed(failure)) => return Err(failure),
                Err(NoHead::Unprocessed) if repeats > MAX_REPEATS => return Err(Failure::Reset),
                Err(NoHead::Unprocessed) => {
                    // The first time at once, then after 1 s, 2 s, 4 s with 10 % jitter.
                    if repeats > 0 {
                        let pause = Duration::from_secs(1 << (repeats - 1));
                        tokio::time::sleep(pause.mul_f64(1.0 + 0.1 * fastrand::f64())).await;
                    }
                    repeats += 1;
                }
            }
        }
    }

    async fn exchange(
        &self,
        stream: StreamPermit,
        request: u64,
        outgoing: &Outgoing,
    ) -> Result<Response, NoHead> {
        let body = outgoing.body.as_ref().map(|body| body.1.clone()).unwrap_or_default();
        let response = stream.send(self.request_head(outgoing), body).await?;
        let response = response.await.map_err(|error| stream.no_head(&error))?;
        let (head, body) = response.into_parts();
        let is_compressed = head.headers.get(CONTENT_ENCODING).is_some_and(|coding| coding == GZIP);
        Ok(Response { request, head, body, gzip: is_compressed.then(GzipBody::new), stream })
    }

    fn request_head(&self, outgoing: &Outgoing) -> Request<()> {
        self.0.sent.set(self.0.sent.get() + 1);
        let uri = format!("https://{}{}", self.0.authority, outgoing.target);
        let mut head = Request::builder().method(outgoing.method.clone()).uri(uri);
        if let Some(headers) = head.headers_mut() {
            headers.insert(ACCEPT, JSON);
            headers.insert(USER_AGENT, AGENT);
            if self.0.options.accepts_gzip {
                headers.insert(ACCEPT_ENCODING, GZIP);
            }
            if let Some(authorization) = &*self.0.authorization.borrow() {
                headers.insert(AUTHORIZATION, authorization.clone());
            }
            if let Some((content_type, _)) = &outgoing.body {
                headers.insert(CONTENT_TYPE, content_type.clone());
            }
            if let Some(id) = &outgoing.audit_id {
                headers.insert("audit-id", id.clone());
            } else if let Some(name) = &self.0.options.name {
                let id = format!("{name}-{}", self.0.sent.get());
                self.0.sent_at.borrow_mut().push((id.clone(), clock::now()));
                headers.insert("audit-id", HeaderValue::try_from(id).expect("letters and digits"));
            }
        }
        head.body(()).expect("the path and the headers are valid")
    }

    /// A stream of a connection; of a new one if there is none. As Go's client, it dials once for each request that
    /// finds no connection.
    async fn stream(&self) -> Result<StreamPermit, Failure> {
        loop {
            if let Some(stream) = self.free_stream() {
                return Ok(stream);
            }
            let mut dialed = self.start_dial();
            loop {
                let changed = self.0.changed.notified();
                if let Some(stream) = self.free_stream() {
                    return Ok(stream);
                }
                tokio::select! {
                    biased;
                    result = &mut dialed => {
                        result.unwrap_or(Err(Failure::Connect))?;
                        break;
                    }
                    () = changed => {}
                }
            }
        }
    }

    /// Dials, also if the request ends before the dial.
    fn start_dial(&self) -> oneshot::Receiver<Result<(), Failure>> {
        let (sender, dialed) = oneshot::channel();
        let client = self.clone();
        tokio::task::spawn_local(async move {
            let result = client.connect().await;
            client.0.changed.notify_waiters();
            // The request may be over.
            let _ = sender.send(result);
        });
        dialed
    }

    async fn connect(&self) -> Result<(), Failure> {
        self.0.dials.set(self.0.dials.get() + 1);
        let dialed = dial(&self.0.to).await?;
        if self.has_free_stream() {
            // Another dial was faster (`x/net/http2`, `addConnIfNeeded`).
            return Ok(());
        }
        let shared = Rc::downgrade(&self.0);
        let changed = move || {
            if let Some(shared) = shared.upgrade() {
                shared.changed.notify_waiters();
            }
        };
        let connection = dialed.start(self.0.to.stream_window, changed).await?;
        self.0.connections.borrow_mut().push(connection);
        Ok(())
    }

    fn free_stream(&self) -> Option<StreamPermit> {
        let mut connections = self.0.connections.borrow_mut();
        connections.retain(|connection| !connection.has_ended());
        connections.iter().find_map(Connection::stream)
    }

    fn has_free_stream(&self) -> bool {
        self.free_stream().is_some()
    }

    /// Closes all connections. Their requests fail.
    pub fn close_connections(&self) {
        for connection in self.0.connections.take() {
            connection.close();
        }
    }

    /// When each request was sent that has a name of the client, by `Audit-ID`.
    pub fn sent(&self) -> Vec<(String, Instant)> {
        self.0.sent_at.borrow().clone()
    }

    /// Dials so far.
    pub fn dials(&self) -> u64 {
        self.0.dials.get()
    }
}

/// The value of `authorization`.
fn bearer(token: &str) -> Option<HeaderValue> {
    HeaderValue::try_from(format!("Bearer {token}")).ok()
}

impl Drop for Shared {
    /// Closes all connections: the process has ended.
    fn drop(&mut self) {
        for connection in self.connections.take() {
            connection.close();
        }
    }
}

impl Response {
    /// The next part of the body, `None` at its end. The window of the stream grows by what was read.
    ///
    /// # Errors
    /// The stream or its connection has failed, or the body cannot be decoded.
    pub async fn chunk(&mut self) -> Result<Option<Bytes>, Failure> {
        match (self.body.data().await, &mut self.gzip) {
            (None, None) => Ok(None),
            (None, Some(gzip)) => gzip.end().map(|()| None),
            (Some(Err(error)), _) => Err(self.stream.failure(&error)),
            (Some(Ok(chunk)), gzip) => {
                // It fails if the stream has ended, which the next call shows.
                let _ = self.body.flow_control().release_capacity(chunk.len());
                gzip.as_mut().map_or(Ok(chunk.clone()), |gzip| gzip.decode(&chunk)).map(Some)
            }
        }
    }

    /// Stops reading from the socket of its connection, for ever.
    pub fn stop_reading(&self) {
        self.stream.stop_reading();
    }
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client").field("address", &self.0.to.address).finish_non_exhaustive()
    }
}

impl fmt::Debug for Response {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (request, status) = (self.request, self.head.status);
        let mut response = f.debug_struct("Response");
        response.field("request", &request).field("status", &status).finish_non_exhaustive()
    }
}

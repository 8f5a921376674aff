//! A small apiserver over HTTP/2, and a network of pipes in memory. The store keeps its history for the checker.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::future::pending;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use h2::server::SendResponse;
use h2::{Reason, RecvStream};
use http::{Method, Request, Response};
use jackstay_apiserver::pki::Pki;
use jackstay_sys::clock;
use jackstay_sys::sockets::virtual_network::{
    Connecting, VirtualNetwork, VirtualSocket, VirtualStream,
};
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncWrite, DuplexStream, ReadBuf};
use tokio::sync::{Notify, mpsc, watch};
use tokio_rustls::TlsAcceptor;

use super::super::objects::{TOKEN, parse_token};
use super::super::transport::{Client, ClientOptions};
use crate::checker::{Change, ChangeKind, Collection, History};

/// The address of the server.
pub const ADDRESS: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 6443);
/// The time between two bookmarks.
const BOOKMARKS: Duration = Duration::from_millis(700);

/// What the server does wrong, or in its own way.
#[derive(Debug, Default, Clone)]
// The faults are independent of each other.
#[allow(clippy::struct_excessive_bools)]
pub struct Faults {
    /// Connects are refused.
    pub refuses: bool,
    /// Connects get no answer.
    pub ignores_connects: bool,
    /// TLS handshakes get no answer.
    pub ignores_handshakes: bool,
    /// Reads from any state show this version.
    pub stale_at: Option<u64>,
    /// Watches skip this version.
    pub skips: Option<u64>,
    /// Writes are made a second time at the end.
    pub doubles: bool,
    /// So many requests are refused with this reason.
    pub resets: Option<(u32, Reason)>,
    /// So many requests get 429 with this `Retry-After`.
    pub overloaded: Option<(u32, u32)>,
    /// Requests get no response.
    pub hangs: bool,
    /// Watches from a version below this one get 410.
    pub oldest: u64,
    /// Watches end as this says, after the next change.
    pub watch_end: Option<WatchEnd>,
    /// The limit of streams.
    pub max_streams: Option<u32>,
}

/// How a watch ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WatchEnd {
    /// The end of the stream.
    Clean,
    /// A part of an event, then the end of the stream.
    Torn,
    /// `RST_STREAM`.
    Reset,
}

/// The store and the server.
#[derive(Debug)]
pub struct Server {
    /// What it has committed.
    pub history: RefCell<History>,
    /// What it does wrong.
    pub faults: RefCell<Faults>,
    /// Requests so far.
    pub requests: RefCell<Vec<String>>,
    /// Each connection has a clone.
    pub open: Rc<()>,
    /// Streams that clients have reset.
    pub cancelled: RefCell<u32>,
    bodies: RefCell<HashMap<(String, u64), Value>>,
    changed: Notify,
    /// Each message is for all connections.
    orders: watch::Sender<Order>,
}

/// What all connections do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// They go on.
    Run,
    /// They send GOAWAY, and end with their last stream.
    GoAway,
    /// They are closed.
    Close,
    /// They are not polled any more.
    Freeze,
}

/// Connects to the server.
#[derive(Debug)]
struct Pipes {
    accept: mpsc::UnboundedSender<DuplexStream>,
    /// Whether it refuses, and whether it ignores connects.
    state: watch::Receiver<(bool, bool)>,
}

#[derive(Debug)]
struct Pipe(DuplexStream);

/// A server, and what its clients need.
pub struct Rig {
    /// The server.
    pub server: Rc<Server>,
    network: Arc<Pipes>,
    state: watch::Sender<(bool, bool)>,
    tls: ClientConfig,
}

impl Rig {
    /// A server with the objects `o0` to `o9` of config maps, in the present `LocalSet`.
    pub fn start() -> Self {
        let pki = Pki::new("test").unwrap();
        let issued = pki.server().unwrap();
        let mut config = ServerConfig::builder()
            .with_no_client_auth()
            .with_single_cert(vec![issued.cert_der()], issued.key_der())
            .unwrap();
        config.alpn_protocols = vec![b"h2".to_vec()];
        let mut roots = RootCertStore::empty();
        roots.add(pki.ca_der()).unwrap();
        let tls = ClientConfig::builder().with_root_certificates(roots).with_no_client_auth();
        let server = Rc::new(Server {
            history: RefCell::default(),
            faults: RefCell::default(),
            requests: RefCell::default(),
            open: Rc::default(),
            cancelled: RefCell::default(),
            bodies: RefCell::default(),
            changed: Notify::new(),
            orders: watch::Sender::new(Order::Run),
        });
        for number in 0..10 {
            let name = format!("o{number}");
            let body = super::super::objects::object(&Collection::CONFIG_MAPS, &name, 1 + number);
            server.commit("configmaps", "default", &name, ChangeKind::Added, body);
        }
        let (accept, mut accepted) = mpsc::unbounded_channel::<DuplexStream>();
        let acceptor = TlsAcceptor::from(Arc::new(config));
        let serving = Rc::clone(&server);
        tokio::task::spawn_local(async move {
            while let Some(stream) = accepted.recv().await {
                tokio::task::spawn_local(Rc::clone(&serving).connection(acceptor.clone(), stream));
            }
        });
        let (state, receiver) = watch::channel((false, false));
        Self { server, network: Arc::new(Pipes { accept, state: receiver }), state, tls }
    }

    /// A client of the server.
    pub fn client(&self, options: ClientOptions) -> Client {
        let name = "localhost".try_into().unwrap();
        Client::new(self.network.clone(), ADDRESS, self.tls.clone(), name, options)
    }

    /// Changes the faults.
    pub fn fault(&self, change: impl FnOnce(&mut Faults)) {
        let mut faults = self.server.faults.borrow_mut();
        change(&mut faults);
        self.state.send_replace((faults.refuses, faults.ignores_connects));
    }

    /// Tells all connections what to do. New connections run.
    pub fn order(&self, order: Order) {
        self.server.orders.send_replace(order);
    }
}

impl Server {
    async fn connection(self: Rc<Self>, acceptor: TlsAcceptor, stream: DuplexStream) {
        if self.faults.borrow().ignores_handshakes {
            let _held = stream;
            return pending().await;
        }
        let _open = Rc::clone(&self.open);
        let mut orders = self.orders.subscribe();
        let Ok(tls) = acceptor.accept(stream).await else { return };
        let mut builder = h2::server::Builder::new();
        if let Some(max) = self.faults.borrow().max_streams {
            builder.max_concurrent_streams(max);
        }
        let Ok(mut connection) = builder.handshake::<_, Bytes>(tls).await else { return };
        loop {
            tokio::select! {
                biased;
                Ok(()) = orders.changed() => match *orders.borrow_and_update() {
                    Order::Run => {}
                    Order::GoAway => connection.graceful_shutdown(),
                    Order::Close => return,
                    Order::Freeze => pending().await,
                },
                accepted = connection.accept() => {
                    let Some(Ok((request, respond))) = accepted else { return };
                    tokio::task::spawn_local(Rc::clone(&self).request(request, respond));
                }
            }
        }
    }

    async fn request(
        self: Rc<Self>,
        request: Request<RecvStream>,
        mut respond: SendResponse<Bytes>,
    ) {
        let (head, mut body) = request.into_parts();
        self.requests.borrow_mut().push(format!(
            "{} {}",
            head.method,
            head.uri.path_and_query().unwrap()
        ));
        let mut bytes = Vec::new();
        while let Some(Ok(chunk)) = body.data().await {
            let _ = body.flow_control().release_capacity(chunk.len());
            bytes.extend_from_slice(&chunk);
        }
        if let Some(reason) = self.next_reset() {
            return respond.send_reset(reason);
        }
        if let Some(seconds) = self.next_overload() {
            let response = Response::builder().status(429).header("retry-after", seconds);
            respond.send_response(response.body(()).unwrap(), true).ok();
            return;
        }
        let query = head.uri.query().unwrap_or_default().to_owned();
        if query.contains("watch=true") {
            return self.watch(respond, &head.uri, &query).await;
        }
        let served = async {
            if self.faults.borrow().hangs {
                pending::<()>().await;
            }
            // A request takes time, so that some are cancelled.
            super::pass(Duration::from_millis(2)).await;
        };
        tokio::select! {
            biased;
            () = served => {}
            _ = std::future::poll_fn(|cx| respond.poll_reset(cx)) => {
                *self.cancelled.borrow_mut() += 1;
                return;
            }
        }
        let body = serde_json::from_slice(&bytes).unwrap_or(Value::Null);
        let (status, answer) = self.answer(&head.method, head.uri.path(), &query, &body);
        let response = Response::builder().status(status).body(()).unwrap();
        if let Ok(mut stream) = respond.send_response(response, false) {
            stream.send_data(answer.to_string().into(), true).ok();
        }
    }

    fn next_reset(&self) -> Option<Reason> {
        let resets = &mut self.faults.borrow_mut().resets;
        let (left, reason) = resets.as_mut().filter(|(left, _)| *left > 0)?;
        *left -= 1;
        Some(*reason)
    }

    fn next_overload(&self) -> Option<u32> {
        let overloaded = &mut self.faults.borrow_mut().overloaded;
        let (left, seconds) = overloaded.as_mut().filter(|(left, _)| *left > 0)?;
        *left -= 1;
        Some(*seconds)
    }

    /// The changes up to a version, by object.
    fn state(&self, resource: &str, namespace: &str, version: u64) -> BTreeMap<String, u64> {
        let mut objects = BTreeMap::new();
        let history = self.history.borrow();
        let is_in = |change: &&Change| {
            change.resource == resource
                && change.namespace == namespace
                && change.version <= version
        };
        for change in history.changes.iter().filter(is_in) {
            if change.kind == ChangeKind::Deleted {
                objects.remove(&change.name);
            } else {
                objects.insert(change.name.clone(), change.version);
            }
        }
        objects
    }

    fn body(&self, name: &str, version: u64) -> Value {
        self.bodies.borrow()[&(name.to_owned(), version)].clone()
    }

    fn answer(&self, method: &Method, path: &str, query: &str, body: &Value) -> (u16, Value) {
        let (resource, namespace, name) = target(path);
        let now = self.history.borrow().version();
        let seen = match self.faults.borrow().stale_at {
            Some(stale) if query.contains("resourceVersion=0") => stale,
            _ => now,
        };
        let state = self.state(&resource, &namespace, seen);
        let failed = |code: u16| (code, json!({ "kind": "Status", "code": code }));
        let Some(name) = name else {
            if *method == Method::POST {
                let name = body["metadata"]["name"].as_str().unwrap();
                if state.contains_key(name) {
                    return failed(409);
                }
                return (
                    201,
                    self.commit(&resource, &namespace, name, ChangeKind::Added, body.clone()),
                );
            }
            let items: Vec<_> =
                state.iter().map(|(name, version)| self.body(name, *version)).collect();
            return (
                200,
                json!({ "metadata": { "resourceVersion": seen.to_string() }, "items": items }),
            );
        };
        let Some(&version) = state.get(&name) else { return failed(404) };
        let current = self.body(&name, version);
        let next = match *method {
            Method::GET => return (200, current),
            Method::DELETE => {
                self.commit(&resource, &namespace, &name, ChangeKind::Deleted, current);
                return (200, json!({ "kind": "Status" }));
            }
            Method::PATCH => {
                let mut next = current;
                next["metadata"]["annotations"] = body["metadata"]["annotations"].clone();
                next
            }
            _ => {
                let wanted = body["metadata"]["resourceVersion"].as_str();
                if wanted.is_some_and(|wanted| wanted != version.to_string()) {
                    return failed(409);
                }
                body.clone()
            }
        };
        let kind = ChangeKind::Modified;
        if self.faults.borrow().doubles {
            self.commit(&resource, &namespace, &name, kind, next.clone());
        }
        (200, self.commit(&resource, &namespace, &name, kind, next))
    }

    /// Makes a change, and returns the object.
    pub fn commit(
        &self,
        resource: &str,
        namespace: &str,
        name: &str,
        kind: ChangeKind,
        mut object: Value,
    ) -> Value {
        let version = self.history.borrow().version() + 1;
        object["metadata"]["resourceVersion"] = version.to_string().into();
        let token = object["metadata"]["annotations"][TOKEN].as_str().and_then(parse_token);
        self.bodies.borrow_mut().insert((name.to_owned(), version), object.clone());
        self.history.borrow_mut().changes.push(Change {
            version,
            at: clock::now(),
            resource: resource.to_owned(),
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            kind,
            token,
        });
        self.changed.notify_waiters();
        object
    }

    async fn watch(self: Rc<Self>, mut respond: SendResponse<Bytes>, uri: &http::Uri, query: &str) {
        let (resource, namespace, _) = target(uri.path());
        let cursor = query.split('&').find_map(|part| part.strip_prefix("resourceVersion="));
        let mut cursor: u64 = cursor.unwrap_or("0").parse().unwrap();
        let Ok(mut stream) = respond.send_response(Response::new(()), false) else { return };
        if cursor < self.faults.borrow().oldest {
            let error = json!({ "type": "ERROR", "object": { "kind": "Status", "code": 410 } });
            stream.send_data(format!("{error}\n").into(), true).ok();
            return;
        }
        let mut bookmark = tokio::time::interval(BOOKMARKS);
        loop {
            let changed = self.changed.notified();
            let mut lines = String::new();
            let changes = self.history.borrow().changes.clone();
            for change in changes.iter().filter(|change| change.version > cursor) {
                let is_in = change.resource == resource && change.namespace == namespace;
                if is_in && self.faults.borrow().skips != Some(change.version) {
                    let object = self.body(&change.name, change.version);
                    let kind = format!("{:?}", change.kind).to_uppercase();
                    lines += &json!({ "type": kind, "object": object }).to_string();
                    lines.push('\n');
                }
            }
            cursor = self.history.borrow().version();
            let end = self.faults.borrow().watch_end.filter(|_| !lines.is_empty());
            if end == Some(WatchEnd::Torn) {
                lines += "{\"type\":";
            }
            let ends = end.is_some_and(|end| end != WatchEnd::Reset);
            if stream.send_data(lines.into(), ends).is_err() || ends {
                return;
            }
            if end == Some(WatchEnd::Reset) {
                tokio::task::yield_now().await;
                return stream.send_reset(Reason::INTERNAL_ERROR);
            }
            tokio::select! {
                biased;
                () = changed => {}
                _ = std::future::poll_fn(|cx| stream.poll_reset(cx)) => return,
                _ = bookmark.tick() => {
                    let object = json!({ "metadata": { "resourceVersion": cursor.to_string() } });
                    let line = json!({ "type": "BOOKMARK", "object": object });
                    stream.send_data(format!("{line}\n").into(), false).ok();
                }
            }
        }
    }
}

/// Resource, namespace and name of a path.
fn target(path: &str) -> (String, String, Option<String>) {
    let (_, rest) = path.split_once("/namespaces/").unwrap();
    let mut parts = rest.split('/').map(str::to_owned);
    let (namespace, resource) = (parts.next().unwrap(), parts.next().unwrap());
    (resource, namespace, parts.next())
}

impl VirtualNetwork for Pipes {
    fn connect(&self, _: SocketAddr) -> Connecting<'_> {
        Box::pin(async {
            let (refuses, ignores) = *self.state.borrow();
            if ignores {
                pending::<()>().await;
            }
            let (near, far) = tokio::io::duplex(64 << 10);
            if refuses || self.accept.send(far).is_err() {
                return Err(io::ErrorKind::ConnectionRefused.into());
            }
            let stream: Box<dyn VirtualStream> = Box::new(Pipe(near));
            Ok(stream)
        })
    }
}

impl VirtualStream for Pipe {
    fn local_addr(&self) -> SocketAddr {
        ADDRESS
    }

    fn peer_addr(&self) -> SocketAddr {
        ADDRESS
    }

    fn poll_peek(&self, _: &mut Context<'_>, _: &mut ReadBuf<'_>) -> Poll<io::Result<usize>> {
        Poll::Ready(Err(io::ErrorKind::Unsupported.into()))
    }

    fn try_read(&self, _: &mut [u8]) -> io::Result<usize> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn shutdown_write(&self) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn reset_when_closed(&self) {}

    fn socket(&self) -> Arc<dyn VirtualSocket> {
        unimplemented!("clients do not look at their sockets")
    }
}

impl AsyncRead for Pipe {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(cx, buf)
    }
}

impl AsyncWrite for Pipe {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(cx)
    }
}

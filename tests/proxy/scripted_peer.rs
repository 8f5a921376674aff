//! A scripted HTTP/2 server over TLS. It reads and writes frames one by one (RFC 9113), so that a test can
//! send frames that no HTTP/2 library sends.
//!
//! Several peers share one [`Script`], a queue of actions. Each request takes the next action, whichever peer
//! receives it; when the queue is empty, requests get the default reply. Each HEADERS frame is one request,
//! and the peers do not decode HPACK.

use bytes::BytesMut;
use flate2::Compression;
use flate2::write::GzEncoder;
use std::collections::{HashSet, VecDeque};
use std::io::{self, Write as _};
use std::net::{Ipv4Addr, SocketAddr};
use std::ops::Deref;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::server::TlsStream;

use crate::support::http2::{
    ACK, DATA, END_HEADERS, END_STREAM, GOAWAY, HEADERS, NO_ERROR, PING, RST_STREAM, SETTINGS,
    WINDOW_UPDATE, field_block, frame, goaway, settings,
};
use crate::support::{Certs, Proxy, tls, without_suspicion};
use jackstay_apiserver::client::Client;
use jackstay_apiserver::identity::Certificate;
use jackstay_apiserver::requested_certificate::RequestedCertificate;
use jackstay_config::Config;

/// Watch events without their line feed. `BOOKMARK` has the same resource version as `FIRST`.
pub const FIRST: &str = r#"{"type":"ADDED","object":{"kind":"ConfigMap","apiVersion":"v1","metadata":{"name":"a","resourceVersion":"6"}}}"#;
pub const SECOND: &str = r#"{"type":"ADDED","object":{"kind":"ConfigMap","apiVersion":"v1","metadata":{"name":"b","resourceVersion":"7"}}}"#;
pub const BOOKMARK: &str = r#"{"type":"BOOKMARK","object":{"kind":"ConfigMap","apiVersion":"v1","metadata":{"resourceVersion":"6"}}}"#;

/// Events as the body of a watch, each with its line feed.
pub fn lines(events: &[&str]) -> String {
    events.iter().flat_map(|event| [*event, "\n"]).collect()
}

/// Data as one gzip member.
pub fn member(data: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(data).unwrap();
    encoder.finish().unwrap()
}

/// A response of a peer.
#[derive(Debug, Clone)]
pub struct Reply {
    pub status: &'static str,
    pub headers: Vec<(&'static str, &'static str)>,
    pub body: Vec<u8>,
}

impl Reply {
    pub fn ok(body: &str) -> Self {
        let headers = vec![("content-type", "application/json")];
        Self { status: "200", headers, body: body.as_bytes().to_vec() }
    }

    /// A compressed watch.
    pub fn gzip(body: Vec<u8>) -> Self {
        let reply = Self::ok("").header("content-encoding", "gzip");
        Self { body, ..reply.header("vary", "Accept-Encoding") }
    }

    pub fn status(status: &'static str, body: &str) -> Self {
        Self { status, ..Self::ok(body) }
    }

    pub fn header(mut self, name: &'static str, value: &'static str) -> Self {
        self.headers.push((name, value));
        self
    }

    fn head(&self, stream: u32, flags: u8) -> Vec<u8> {
        let mut list = vec![(":status", self.status)];
        list.extend(&self.headers);
        frame(HEADERS, flags, stream, &field_block(&list))
    }
}

type MakeBytes = Arc<dyn Fn(u32) -> Vec<u8> + Send + Sync>;

/// What a peer does with a request.
#[derive(Clone)]
pub enum Action {
    /// Sends no response. The connection still answers PINGs.
    Hang,
    /// Sends no response and stops answering PINGs.
    Unresponsive,
    Answer(Reply),
    /// Sends a GOAWAY between head and body of a reply, and ignores the requests that follow on the connection.
    AnswerWithGoAway(Reply),
    /// Sends the bytes that the function returns for the stream id.
    Raw(MakeBytes),
    /// The same, and ends the connection, but reads on.
    RawThenEnd(MakeBytes),
    /// Sends the bytes that the function returns for the stream id, repeatedly until the connection closes.
    Flood(MakeBytes),
    /// Performs another action when the whole request has arrived, unless the client resets the request before.
    AfterBody(Box<Action>),
    /// Sends head and body of a reply without `END_STREAM`, and then the bytes that the function returns.
    Partial(Reply, MakeBytes),
    /// Sends head and body of a reply without `END_STREAM`, and closes the connection.
    PartialThenClose(Reply),
    /// Sends head and body of a reply without `END_STREAM`, and stops answering PINGs.
    PartialThenUnresponsive(Reply),
    /// Sends head and body of a reply without `END_STREAM`, and answers only one more PING.
    PartialThenOnePong(Reply),
    /// Closes the connection.
    Close,
    /// Sends a GOAWAY whose last stream is this request, and closes the connection.
    GoAwayThenClose,
}

impl Action {
    pub fn raw(bytes: impl Fn(u32) -> Vec<u8> + Send + Sync + 'static) -> Self {
        Self::Raw(Arc::new(bytes))
    }

    pub fn raw_then_end(bytes: impl Fn(u32) -> Vec<u8> + Send + Sync + 'static) -> Self {
        Self::RawThenEnd(Arc::new(bytes))
    }

    pub fn flood(bytes: impl Fn(u32) -> Vec<u8> + Send + Sync + 'static) -> Self {
        Self::Flood(Arc::new(bytes))
    }

    pub fn partial(reply: Reply, then: impl Fn(u32) -> Vec<u8> + Send + Sync + 'static) -> Self {
        Self::Partial(reply, Arc::new(then))
    }

    pub fn after_body(action: Self) -> Self {
        Self::AfterBody(Box::new(action))
    }
}

/// A request that a peer has received.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Request {
    pub peer: usize,
    pub connection: usize,
    pub stream: u32,
}

/// The actions of all peers of a test, and a record of the frames that they have received. Connections of the
/// `/readyz` prober are neither scripted nor recorded.
#[derive(Default)]
pub struct Script {
    actions: Mutex<VecDeque<Action>>,
    default: Mutex<Option<Reply>>,
    requests: Mutex<Vec<Request>>,
    resets: Mutex<Vec<(usize, u32, u32)>>,
    completed: Mutex<Vec<(usize, u32)>>,
    /// The number of connections that were accepted.
    pub accepted: AtomicUsize,
    /// The number of connections that have ended.
    pub ended: AtomicUsize,
    /// The number of GOAWAY frames from jackstay.
    pub goaways: AtomicUsize,
    /// The number of PINGs without a request between them that the peers accept; 0 for any number. One more is answered
    /// as by gRPC servers: GOAWAY `ENHANCE_YOUR_CALM` with `too_many_pings`, and the end of the connection.
    pub ping_limit: AtomicUsize,
    /// The number of those GOAWAYs.
    pub ping_complaints: AtomicUsize,
    /// Every so many requests the response contains a GOAWAY, and its connection ignores the requests that its peer
    /// has not read yet, as Go does with `--goaway-chance` of kube-apiserver; 0 for never. Only for replies to
    /// requests without an action.
    pub goaway_every: AtomicUsize,
    /// The bytes of window that jackstay has granted on streams.
    pub granted: AtomicUsize,
    /// The peers send no `WINDOW_UPDATE` for uploads.
    pub withhold_window: AtomicBool,
    /// What the peers send in response to a request over HTTP/1.1: the first bytes, and then the second ones until
    /// the connection closes. `None` for peers that offer only HTTP/2.
    pub http1: Mutex<Option<(Vec<u8>, Vec<u8>)>>,
    /// The SETTINGS of new connections.
    pub settings: Mutex<Vec<(u16, u32)>>,
    /// The id of the next connection, which may be one of the prober.
    next_connection: AtomicUsize,
}

impl Script {
    /// Replaces the queue of actions, and clears the record of requests, resets and completed requests.
    pub fn set_actions(&self, actions: impl IntoIterator<Item = Action>) {
        *self.actions.lock().unwrap() = actions.into_iter().collect();
        self.requests.lock().unwrap().clear();
        self.resets.lock().unwrap().clear();
        self.completed.lock().unwrap().clear();
    }

    /// Sets the reply to requests that arrive while the queue is empty.
    pub fn set_default(&self, reply: Reply) {
        *self.default.lock().unwrap() = Some(reply);
    }

    pub fn requests(&self) -> Vec<Request> {
        self.requests.lock().unwrap().clone()
    }

    /// The requests that jackstay has reset: connection, stream, error code.
    pub fn resets(&self) -> Vec<(usize, u32, u32)> {
        self.resets.lock().unwrap().clone()
    }

    /// The requests that have arrived up to their `END_STREAM`: connection, stream.
    pub fn completed(&self) -> Vec<(usize, u32)> {
        self.completed.lock().unwrap().clone()
    }

    /// Records a request and takes its action.
    fn next_action(&self, peer: usize, connection: usize, stream: u32) -> Action {
        self.requests.lock().unwrap().push(Request { peer, connection, stream });
        let action = self.actions.lock().unwrap().pop_front();
        action.unwrap_or_else(|| {
            let default = self.default.lock().unwrap().clone();
            let reply = default.unwrap_or_else(|| Reply::ok("{\"kind\":\"ConfigMapList\"}\n"));
            let every = self.goaway_every.load(Relaxed);
            if self.requests.lock().unwrap().len().is_multiple_of(every) {
                Action::AnswerWithGoAway(reply)
            } else {
                Action::Answer(reply)
            }
        })
    }
}

/// Peers that share a script and run on a thread of their own.
pub struct Peers {
    pub addresses: Vec<SocketAddr>,
    pub certs: Certs,
    script: Arc<Script>,
    stop: Option<tokio::sync::oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Peers {
    pub fn start(count: usize) -> Self {
        let certs = Certs::new();
        let verifier = tls::clients_of(certs.pki.ca_der(), false);
        let clients = Arc::new(RequestedCertificate(verifier.clone()));
        let config = tls::server(&certs.pki.server().unwrap(), clients, &["h2", "http/1.1"]);
        let sockets: Vec<_> = (0..count)
            .map(|_| {
                let socket = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
                socket.set_nonblocking(true).unwrap();
                socket
            })
            .collect();
        let addresses = sockets.iter().map(|socket| socket.local_addr().unwrap()).collect();
        let script = Arc::new(Script::default());
        let shared = script.clone();
        let (stop, stopped) = tokio::sync::oneshot::channel();
        let thread = std::thread::spawn(move || {
            let runtime =
                tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async move {
                for (peer, socket) in sockets.into_iter().enumerate() {
                    let (script, verifier) = (shared.clone(), verifier.clone());
                    let socket = TcpListener::from_std(socket).unwrap();
                    let serve = move |stream: TlsStream<TcpStream>| async move {
                        if stream.get_ref().1.alpn_protocol() != Some(b"h2") {
                            let _ = serve_http1(stream, &script).await;
                            return;
                        }
                        let chain = stream.get_ref().1.peer_certificates();
                        let probe = matches!(
                            Certificate::verify(chain, &*verifier),
                            Certificate::User { user, .. } if user.name == "probe"
                        );
                        let id = script.next_connection.fetch_add(1, Relaxed);
                        let mut connection = Connection::new(stream, script, peer, id, probe);
                        // Many tests cause an error of the connection, so it is ignored.
                        let _ = connection.serve().await;
                        if !probe {
                            connection.script.ended.fetch_add(1, Relaxed);
                        }
                    };
                    tokio::spawn(tls::accept_each(socket, config.clone(), serve));
                }
                let _ = stopped.await;
            });
        });
        Self { addresses, certs, script, stop: Some(stop), thread: Some(thread) }
    }

    /// Starts jackstay in front of these peers.
    pub async fn start_proxy(&self, change: impl FnOnce(&mut Config)) -> Proxy {
        let mut config = self.certs.config(&self.addresses);
        change(&mut config);
        let proxy = self.certs.start(config);
        proxy.wait_connected(self.addresses.len()).await;
        proxy
    }
}

impl Deref for Peers {
    type Target = Script;

    fn deref(&self) -> &Script {
        &self.script
    }
}

/// Peers, jackstay in front of them, and a client. jackstay suspects connections late
/// ([`without_suspicion`]), so that a test can count the requests of each peer.
pub async fn setup(count: usize) -> (Peers, Proxy, Client) {
    setup_with(count, without_suspicion).await
}

/// [`setup`] with `change` instead of [`without_suspicion`].
pub async fn setup_with(count: usize, change: impl FnOnce(&mut Config)) -> (Peers, Proxy, Client) {
    let peers = Peers::start(count);
    let proxy = peers.start_proxy(change).await;
    let client = proxy.client().await;
    (peers, proxy, client)
}

impl Drop for Peers {
    fn drop(&mut self) {
        drop(self.stop.take());
        let _ = self.thread.take().unwrap().join();
    }
}

/// Reads a request head over HTTP/1.1 and responds with [`Script::http1`].
async fn serve_http1(mut stream: TlsStream<TcpStream>, script: &Script) -> io::Result<()> {
    let Some((first, rest)) = script.http1.lock().unwrap().clone() else { return Ok(()) };
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await?);
    }
    stream.write_all(&first).await?;
    stream.flush().await?;
    while !rest.is_empty() {
        stream.write_all(&rest).await?;
    }
    Ok(())
}

/// One connection of a peer.
struct Connection {
    stream: TlsStream<TcpStream>,
    buffer: BytesMut,
    script: Arc<Script>,
    peer: usize,
    id: usize,
    /// The client is the `/readyz` prober.
    probe: bool,
    /// The number of PINGs that will still be answered; `None` if all are.
    pongs_left: Option<u32>,
    /// The number of PINGs since the last request.
    pings: usize,
    /// jackstay has answered a PING of the peer.
    pong_received: bool,
    /// Further requests are ignored.
    goaway_sent: bool,
    /// Requests that have arrived up to their `END_STREAM`.
    completed: HashSet<u32>,
    /// Requests that were reset.
    reset: HashSet<u32>,
    /// Requests that arrived while an action waited for another frame.
    queue: VecDeque<u32>,
}

impl Connection {
    fn new(
        stream: TlsStream<TcpStream>,
        script: Arc<Script>,
        peer: usize,
        id: usize,
        probe: bool,
    ) -> Self {
        if !probe {
            script.accepted.fetch_add(1, Relaxed);
        }
        Self {
            stream,
            buffer: BytesMut::new(),
            script,
            peer,
            id,
            probe,
            pongs_left: None,
            pings: 0,
            pong_received: false,
            goaway_sent: false,
            completed: HashSet::new(),
            reset: HashSet::new(),
            queue: VecDeque::new(),
        }
    }

    async fn serve(&mut self) -> io::Result<()> {
        let list = if self.probe { vec![] } else { self.script.settings.lock().unwrap().clone() };
        self.write(&settings(&list)).await?;
        let mut preface = [0; 24];
        self.stream.read_exact(&mut preface).await?;
        loop {
            let stream = match self.queue.pop_front() {
                Some(stream) => stream,
                None => match self.handle_frame().await? {
                    Some(stream) => stream,
                    None => continue,
                },
            };
            if self.goaway_sent {
                continue;
            }
            let action = if self.probe {
                Action::Answer(Reply::ok("ok"))
            } else {
                self.script.next_action(self.peer, self.id, stream)
            };
            if !self.perform(action, stream).await? {
                return Ok(());
            }
        }
    }

    /// Performs an action. Returns false when the connection must end.
    async fn perform(&mut self, action: Action, stream: u32) -> io::Result<bool> {
        match action {
            Action::Hang => {}
            Action::Unresponsive => self.pongs_left = Some(0),
            Action::Answer(reply) => {
                let head = reply.head(stream, END_HEADERS);
                let body = frame(DATA, END_STREAM, stream, &reply.body);
                self.write(&[head, body].concat()).await?;
            }
            Action::AnswerWithGoAway(reply) => {
                let head = reply.head(stream, END_HEADERS);
                let body = frame(DATA, END_STREAM, stream, &reply.body);
                self.write(&[head, goaway(stream, NO_ERROR), body].concat()).await?;
                self.goaway_sent = true;
            }
            Action::Raw(bytes) => self.write(&bytes(stream)).await?,
            Action::RawThenEnd(bytes) => {
                self.write(&bytes(stream)).await?;
                self.stream.shutdown().await?;
                self.goaway_sent = true;
            }
            Action::Flood(bytes) => {
                let bytes = bytes(stream);
                self.write(&bytes).await?;
                loop {
                    self.write(&bytes).await?;
                }
            }
            Action::AfterBody(action) => {
                while !self.completed.contains(&stream) {
                    if self.reset.contains(&stream) {
                        return Ok(true);
                    }
                    if let Some(other) = self.handle_frame().await? {
                        self.queue.push_back(other);
                    }
                }
                return Box::pin(self.perform(*action, stream)).await;
            }
            Action::Partial(reply, then) => {
                self.send_partial(&reply, stream).await?;
                self.write(&then(stream)).await?;
            }
            Action::PartialThenClose(reply) => {
                self.send_partial(&reply, stream).await?;
                // A close discards data that jackstay has not read, so the peer waits for a PONG.
                self.write(&frame(PING, 0, 0, b"read all")).await?;
                while !std::mem::take(&mut self.pong_received) {
                    if let Some(other) = self.handle_frame().await? {
                        self.queue.push_back(other);
                    }
                }
                return Ok(false);
            }
            Action::PartialThenUnresponsive(reply) => {
                self.send_partial(&reply, stream).await?;
                self.pongs_left = Some(0);
            }
            Action::PartialThenOnePong(reply) => {
                self.send_partial(&reply, stream).await?;
                self.pongs_left = Some(1);
            }
            Action::Close => return Ok(false),
            Action::GoAwayThenClose => {
                self.write(&goaway(stream, NO_ERROR)).await?;
                return Ok(false);
            }
        }
        Ok(true)
    }

    async fn send_partial(&mut self, reply: &Reply, stream: u32) -> io::Result<()> {
        let mut bytes = reply.head(stream, END_HEADERS);
        if !reply.body.is_empty() {
            bytes.extend(frame(DATA, 0, stream, &reply.body));
        }
        self.write(&bytes).await
    }

    /// Reads a frame and handles it. Returns the stream id if the frame begins a request.
    async fn handle_frame(&mut self) -> io::Result<Option<u32>> {
        let (kind, flags, stream, payload) = self.read_frame().await?;
        self.pings = match kind {
            HEADERS => 0,
            PING if flags & ACK == 0 => self.pings + 1,
            _ => self.pings,
        };
        match kind {
            PING if (1..self.pings).contains(&self.script.ping_limit.load(Relaxed)) => {
                self.script.ping_complaints.fetch_add(1, Relaxed);
                let payload = [&[0; 7], &[0xb][..], b"too_many_pings"].concat();
                self.write(&frame(GOAWAY, 0, 0, &payload)).await?;
                self.stream.shutdown().await?;
                return Err(io::ErrorKind::ConnectionAborted.into());
            }
            SETTINGS if flags & ACK == 0 => self.write(&frame(SETTINGS, ACK, 0, &[])).await?,
            PING if flags & ACK == 0 && self.pongs_left != Some(0) => {
                self.write(&frame(PING, ACK, 0, &payload)).await?;
                self.pongs_left = self.pongs_left.map(|left| left - 1);
            }
            PING => self.pong_received |= flags & ACK != 0,
            GOAWAY if !self.probe => {
                self.script.goaways.fetch_add(1, Relaxed);
            }
            WINDOW_UPDATE if !self.probe && stream != 0 => {
                let bytes = u32::from_be_bytes(payload[..4].try_into().unwrap()) as usize;
                self.script.granted.fetch_add(bytes, Relaxed);
            }
            RST_STREAM if !self.probe => {
                let code = u32::from_be_bytes(payload[..4].try_into().unwrap());
                self.script.resets.lock().unwrap().push((self.id, stream, code));
                self.reset.insert(stream);
            }
            DATA => {
                if flags & END_STREAM != 0 {
                    self.request_completed(stream);
                } else if !payload.is_empty() && !self.script.withhold_window.load(Relaxed) {
                    let size = u32::try_from(payload.len()).unwrap().to_be_bytes();
                    self.write(&frame(WINDOW_UPDATE, 0, 0, &size)).await?;
                    self.write(&frame(WINDOW_UPDATE, 0, stream, &size)).await?;
                }
            }
            HEADERS => {
                let mut last = flags;
                while last & END_HEADERS == 0 {
                    last = self.read_frame().await?.1;
                }
                if flags & END_STREAM != 0 {
                    self.request_completed(stream);
                }
                return Ok(Some(stream));
            }
            _ => {}
        }
        Ok(None)
    }

    fn request_completed(&mut self, stream: u32) {
        self.completed.insert(stream);
        if !self.probe {
            self.script.completed.lock().unwrap().push((self.id, stream));
        }
    }

    /// The type, the flags, the stream id and the payload of the next frame.
    async fn read_frame(&mut self) -> io::Result<(u8, u8, u32, BytesMut)> {
        while self.buffer.len() < 9 {
            self.fill().await?;
        }
        let head = self.buffer.split_to(9);
        let length = usize::from(head[0]) << 16 | usize::from(head[1]) << 8 | usize::from(head[2]);
        while self.buffer.len() < length {
            self.fill().await?;
        }
        let stream = u32::from_be_bytes(head[5..9].try_into().unwrap()) & 0x7fff_ffff;
        Ok((head[3], head[4], stream, self.buffer.split_to(length)))
    }

    async fn fill(&mut self) -> io::Result<()> {
        match self.stream.read_buf(&mut self.buffer).await? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            _ => Ok(()),
        }
    }

    async fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.write_all(bytes).await?;
        self.stream.flush().await
    }
}

//! A scripted HTTP/2 server: TLS, and then frames written and read by hand (RFC 9113), so that
//! what no HTTP/2 library would say can be said.
//!
//! Several peers share one [`Script`]: the first request that reaches any of them meets the first
//! act, the second one the second, and all that follow get a usual answer. Requests are counted as
//! HEADERS frames, so nothing needs to decode HPACK.

use bytes::BytesMut;
use jackstay::demo::apiserver::identity::Certificate;
use jackstay::net::tls::serving::DeferredClientVerification;
use rustls::server::WebPkiClientVerifier;
use std::collections::{HashSet, VecDeque};
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use crate::support::Certs;

pub const DATA: u8 = 0;
pub const HEADERS: u8 = 1;
pub const RST_STREAM: u8 = 3;
pub const SETTINGS: u8 = 4;
pub const PING: u8 = 6;
pub const GOAWAY: u8 = 7;
pub const WINDOW_UPDATE: u8 = 8;
pub const CONTINUATION: u8 = 9;

pub const END_STREAM: u8 = 1;
pub const ACK: u8 = 1;
pub const END_HEADERS: u8 = 4;

pub const NO_ERROR: u32 = 0;
pub const INTERNAL_ERROR: u32 = 2;
pub const REFUSED_STREAM: u32 = 7;
pub const CANCEL: u32 = 8;

pub const MAX_CONCURRENT_STREAMS: u16 = 3;
pub const INITIAL_WINDOW_SIZE: u16 = 4;

/// A frame as bytes.
pub fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    let mut frame = length[1..].to_vec();
    frame.extend([kind, flags]);
    frame.extend(stream.to_be_bytes());
    frame.extend(payload);
    frame
}

/// Header fields, each as a literal without indexing and without Huffman coding (RFC 7541, 6.2.2).
pub fn fields(list: &[(&str, &str)]) -> Vec<u8> {
    fn string(out: &mut Vec<u8>, text: &str) {
        match text.len() {
            short @ 0..127 => out.push(short as u8),
            long => {
                out.push(127);
                let mut rest = long - 127;
                while rest >= 128 {
                    out.push((rest % 128) as u8 | 128);
                    rest /= 128;
                }
                out.push(rest as u8);
            }
        }
        out.extend(text.as_bytes());
    }
    let mut out = Vec::new();
    for (name, value) in list {
        out.push(0);
        string(&mut out, name);
        string(&mut out, value);
    }
    out
}

pub fn settings(list: &[(u16, u32)]) -> Vec<u8> {
    let mut payload = Vec::new();
    for (name, value) in list {
        payload.extend(name.to_be_bytes());
        payload.extend(value.to_be_bytes());
    }
    frame(SETTINGS, 0, 0, &payload)
}

pub fn reset(stream: u32, code: u32) -> Vec<u8> {
    frame(RST_STREAM, 0, stream, &code.to_be_bytes())
}

pub fn goaway(last: u32, code: u32) -> Vec<u8> {
    frame(GOAWAY, 0, 0, &[last.to_be_bytes(), code.to_be_bytes()].concat())
}

/// What a peer answers.
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
        frame(HEADERS, flags, stream, &fields(&list))
    }
}

/// What happens to a request.
#[derive(Clone)]
pub enum Act {
    /// Nothing, for ever; PINGs are answered.
    Hang,
    /// Nothing, for ever, and PINGs are not answered either.
    Mute,
    /// An answer.
    Answer(Reply),
    /// Whatever bytes this makes of the stream's id.
    Raw(Arc<dyn Fn(u32) -> Vec<u8> + Send + Sync>),
    /// The same bytes again and again until the connection is closed.
    Flood(Arc<dyn Fn(u32) -> Vec<u8> + Send + Sync>),
    /// The whole request is read, and then this happens, unless the client gives the request up.
    Late(Box<Act>),
    /// Head and body of an answer, but not its end, and then these bytes.
    Partly(Reply, Arc<dyn Fn(u32) -> Vec<u8> + Send + Sync>),
    /// The same, and then the connection is cut.
    PartlyCut(Reply),
    /// The same, and from then on PINGs have no answer.
    PartlyMute(Reply),
    /// The same, but one PING has its answer yet.
    PartlyFade(Reply),
    /// The connection is cut.
    Cut,
    /// GOAWAY that says that this request was seen, then the connection is cut.
    GoAwaySeen,
}

impl Act {
    pub fn raw(bytes: impl Fn(u32) -> Vec<u8> + Send + Sync + 'static) -> Self {
        Self::Raw(Arc::new(bytes))
    }

    pub fn flood(bytes: impl Fn(u32) -> Vec<u8> + Send + Sync + 'static) -> Self {
        Self::Flood(Arc::new(bytes))
    }

    pub fn partly(reply: Reply, then: impl Fn(u32) -> Vec<u8> + Send + Sync + 'static) -> Self {
        Self::Partly(reply, Arc::new(then))
    }
}

/// What all peers of a test play.
#[derive(Default)]
pub struct Script {
    acts: Mutex<VecDeque<Act>>,
    usual: Mutex<Option<Reply>>,
    /// Requests that were seen: peer, connection, stream.
    seen: Mutex<Vec<(usize, usize, u32)>>,
    /// Requests that were given up by `RST_STREAM`, with the reason.
    given_up: Mutex<Vec<(usize, u32, u32)>>,
    /// Requests that arrived up to their `END_STREAM`: connection, stream.
    whole: Mutex<Vec<(usize, u32)>>,
    /// Connections for requests that were accepted, and those that ended.
    pub accepted: AtomicUsize,
    pub ended: AtomicUsize,
    /// GOAWAYs that jackstay sent.
    pub goaways: AtomicUsize,
    /// The next PING of an idle connection is met by GOAWAY and the end, once.
    pub leave: AtomicBool,
    /// Send no window for uploads.
    pub stingy: AtomicBool,
    /// SETTINGS of new connections.
    pub settings: Mutex<Vec<(u16, u32)>>,
    connections: AtomicUsize,
}

impl Script {
    /// What the next requests meet; forgets what was seen.
    pub fn play(&self, acts: impl IntoIterator<Item = Act>) {
        *self.acts.lock().unwrap() = acts.into_iter().collect();
        self.seen.lock().unwrap().clear();
        self.given_up.lock().unwrap().clear();
        self.whole.lock().unwrap().clear();
    }

    /// What all other requests get.
    pub fn usually(&self, reply: Reply) {
        *self.usual.lock().unwrap() = Some(reply);
    }

    pub fn seen(&self) -> Vec<(usize, usize, u32)> {
        self.seen.lock().unwrap().clone()
    }

    pub fn given_up(&self) -> Vec<(usize, u32, u32)> {
        self.given_up.lock().unwrap().clone()
    }

    pub fn whole(&self) -> Vec<(usize, u32)> {
        self.whole.lock().unwrap().clone()
    }

    fn next(&self, peer: usize, connection: usize, stream: u32) -> Act {
        self.seen.lock().unwrap().push((peer, connection, stream));
        let act = self.acts.lock().unwrap().pop_front();
        act.unwrap_or_else(|| {
            let usual = self.usual.lock().unwrap().clone();
            Act::Answer(usual.unwrap_or_else(|| Reply::ok("{\"kind\":\"ConfigMapList\"}\n")))
        })
    }
}

/// Peers that share a script, on a thread of their own.
pub struct Peers {
    pub addresses: Vec<SocketAddr>,
    pub script: Arc<Script>,
    stop: Option<tokio::sync::oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Peers {
    pub fn start(certs: &Certs, count: usize) -> Self {
        let mut roots = rustls::RootCertStore::empty();
        roots.add(certs.pki.ca_der()).unwrap();
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let verifier = WebPkiClientVerifier::builder_with_provider(roots.into(), provider.clone())
            .build()
            .unwrap();
        let server = certs.pki.server().unwrap();
        let mut tls = rustls::ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_client_cert_verifier(Arc::new(DeferredClientVerification(verifier.clone())))
            .with_single_cert(vec![server.cert_der()], server.key_der())
            .unwrap();
        tls.alpn_protocols = vec![b"h2".to_vec()];
        let tls = TlsAcceptor::from(Arc::new(tls));
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
                    let (tls, script, verifier) = (tls.clone(), shared.clone(), verifier.clone());
                    let socket = TcpListener::from_std(socket).unwrap();
                    tokio::spawn(async move {
                        while let Ok((stream, _)) = socket.accept().await {
                            let (tls, script) = (tls.clone(), script.clone());
                            let verifier = verifier.clone();
                            tokio::spawn(async move {
                                let _ = stream.set_nodelay(true);
                                let Ok(stream) = tls.accept(stream).await else { return };
                                let chain = stream.get_ref().1.peer_certificates();
                                let probe = matches!(
                                    Certificate::verify(chain, &*verifier),
                                    Certificate::User { user, .. } if user.name == "probe"
                                );
                                let connection = script.connections.fetch_add(1, Relaxed);
                                let mut wire = Wire::new(stream, script, peer, connection, probe);
                                // Errors are the end of the connection, and often the point.
                                let _ = wire.serve().await;
                                wire.bye();
                            });
                        }
                    });
                }
                let _ = stopped.await;
            });
        });
        Self { addresses, script, stop: Some(stop), thread: Some(thread) }
    }
}

impl Drop for Peers {
    fn drop(&mut self) {
        drop(self.stop.take());
        let _ = self.thread.take().unwrap().join();
    }
}

/// One connection, as frames.
struct Wire {
    stream: TlsStream<TcpStream>,
    buffer: BytesMut,
    script: Arc<Script>,
    peer: usize,
    connection: usize,
    probe: bool,
    /// So many PINGs are still answered; all, if none.
    answers: Option<u32>,
    /// A PING of ours was answered.
    ponged: bool,
    /// Requests that have arrived whole.
    whole: HashSet<u32>,
    /// Requests that were reset.
    given_up: HashSet<u32>,
    /// Requests that arrived while another one was waited for.
    queue: VecDeque<u32>,
}

impl Wire {
    fn new(
        stream: TlsStream<TcpStream>,
        script: Arc<Script>,
        peer: usize,
        connection: usize,
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
            connection,
            probe,
            answers: None,
            ponged: false,
            whole: HashSet::new(),
            given_up: HashSet::new(),
            queue: VecDeque::new(),
        }
    }

    fn bye(&self) {
        if !self.probe {
            self.script.ended.fetch_add(1, Relaxed);
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
                None => match self.frame().await? {
                    Some(stream) => stream,
                    None => continue,
                },
            };
            let act = if self.probe {
                Act::Answer(Reply::ok("ok"))
            } else {
                self.script.next(self.peer, self.connection, stream)
            };
            if !self.act(act, stream).await? {
                return Ok(());
            }
        }
    }

    /// Plays; false when the connection is to end.
    async fn act(&mut self, act: Act, stream: u32) -> io::Result<bool> {
        match act {
            Act::Hang => {}
            Act::Mute => self.answers = Some(0),
            Act::Answer(reply) => {
                let head = reply.head(stream, END_HEADERS);
                let body = frame(DATA, END_STREAM, stream, &reply.body);
                self.write(&[head, body].concat()).await?;
            }
            Act::Raw(bytes) => self.write(&bytes(stream)).await?,
            Act::Flood(bytes) => {
                let bytes = bytes(stream);
                self.write(&bytes).await?;
                loop {
                    self.write(&bytes).await?;
                }
            }
            Act::Late(act) => {
                while !self.whole.contains(&stream) {
                    if self.given_up.contains(&stream) {
                        return Ok(true);
                    }
                    if let Some(other) = self.frame().await? {
                        self.queue.push_back(other);
                    }
                }
                return Box::pin(self.act(*act, stream)).await;
            }
            Act::Partly(reply, then) => {
                self.partly(&reply, stream).await?;
                self.write(&then(stream)).await?;
            }
            Act::PartlyCut(reply) => {
                self.partly(&reply, stream).await?;
                // A cut takes away what has not been read.
                self.write(&frame(PING, 0, 0, b"read all")).await?;
                while !std::mem::take(&mut self.ponged) {
                    if let Some(other) = self.frame().await? {
                        self.queue.push_back(other);
                    }
                }
                return Ok(false);
            }
            Act::PartlyMute(reply) => {
                self.partly(&reply, stream).await?;
                self.answers = Some(0);
            }
            Act::PartlyFade(reply) => {
                self.partly(&reply, stream).await?;
                self.answers = Some(1);
            }
            Act::Cut => return Ok(false),
            Act::GoAwaySeen => {
                self.write(&goaway(stream, NO_ERROR)).await?;
                return Ok(false);
            }
        }
        Ok(true)
    }

    async fn partly(&mut self, reply: &Reply, stream: u32) -> io::Result<()> {
        let mut bytes = reply.head(stream, END_HEADERS);
        if !reply.body.is_empty() {
            bytes.extend(frame(DATA, 0, stream, &reply.body));
        }
        self.write(&bytes).await
    }

    /// Reads a frame and does what the protocol asks for; a request's stream when one began.
    async fn frame(&mut self) -> io::Result<Option<u32>> {
        let (kind, flags, stream, payload) = self.read().await?;
        match kind {
            SETTINGS if flags & ACK == 0 => self.write(&frame(SETTINGS, ACK, 0, &[])).await?,
            PING if flags & ACK == 0 && !self.probe && self.script.leave.swap(false, Relaxed) => {
                self.write(&goaway(0, NO_ERROR)).await?;
                self.stream.shutdown().await?;
                return Err(io::ErrorKind::ConnectionAborted.into());
            }
            PING if flags & ACK == 0 && self.answers != Some(0) => {
                self.write(&frame(PING, ACK, 0, &payload)).await?;
                self.answers = self.answers.map(|left| left - 1);
            }
            PING => self.ponged |= flags & ACK != 0,
            GOAWAY if !self.probe => {
                self.script.goaways.fetch_add(1, Relaxed);
            }
            RST_STREAM if !self.probe => {
                let code = u32::from_be_bytes(payload[..4].try_into().unwrap());
                self.script.given_up.lock().unwrap().push((self.connection, stream, code));
                self.given_up.insert(stream);
            }
            DATA => {
                if flags & END_STREAM != 0 {
                    self.arrived_whole(stream);
                } else if !payload.is_empty() && !self.script.stingy.load(Relaxed) {
                    let size = u32::try_from(payload.len()).unwrap().to_be_bytes();
                    self.write(&frame(WINDOW_UPDATE, 0, 0, &size)).await?;
                    self.write(&frame(WINDOW_UPDATE, 0, stream, &size)).await?;
                }
            }
            HEADERS => {
                let mut last = flags;
                while last & END_HEADERS == 0 {
                    last = self.read().await?.1;
                }
                if flags & END_STREAM != 0 {
                    self.arrived_whole(stream);
                }
                return Ok(Some(stream));
            }
            _ => {}
        }
        Ok(None)
    }

    fn arrived_whole(&mut self, stream: u32) {
        self.whole.insert(stream);
        if !self.probe {
            self.script.whole.lock().unwrap().push((self.connection, stream));
        }
    }

    async fn read(&mut self) -> io::Result<(u8, u8, u32, BytesMut)> {
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

/// A port that accepts TCP by its backlog and never says a word.
pub fn black_hole() -> std::net::TcpListener {
    std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap()
}

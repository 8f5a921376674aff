//! An apiserver whose responses a test writes part by part, and the built binary in front of several.

use crate::support::child::{Process, first_address};
use crate::support::{Certs, pages, tls, until, write_config};
use bytes::Bytes;
use h2::server::SendResponse;
use http::{Request, Response};
use jackstay_apiserver::client::Client;
use jackstay_config::Config;
use std::collections::HashMap;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, watch};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

const BINARY: &str = env!("CARGO_BIN_EXE_jackstay");

/// A part of a response.
#[derive(Clone)]
pub enum Part {
    /// The head, with a content type and further headers.
    Head(u16, &'static str, Vec<(&'static str, String)>),
    Data(Bytes),
    /// Nothing for this time. The connection answers PINGs.
    Pause(Duration),
    /// Nothing until the test notifies it.
    Wait(Arc<Notify>),
    /// The end of the body.
    End,
    /// The end of the connection.
    Close,
}

impl Part {
    /// The head of a response in JSON.
    pub fn json() -> Self {
        Self::Head(200, "application/json", vec![])
    }

    pub fn data(data: impl Into<Bytes>) -> Self {
        Self::Data(data.into())
    }
}

/// The responses of all peers by path. A path takes the first of its responses, and keeps the last one.
#[derive(Clone, Default)]
pub struct Script {
    responses: Arc<Mutex<HashMap<String, Vec<Vec<Part>>>>>,
    requests: Arc<Mutex<Vec<(usize, String)>>>,
}

impl Script {
    /// Sets the responses to requests with this path.
    pub fn set(&self, path: &str, responses: &[&[Part]]) {
        let responses = responses.iter().rev().map(|parts| parts.to_vec()).collect();
        self.responses.lock().unwrap().insert(path.to_owned(), responses);
    }

    /// The peers that have received requests with this path, and the queries.
    pub fn requests(&self, path: &str) -> Vec<(usize, String)> {
        let requests = self.requests.lock().unwrap();
        let split = requests.iter().map(|(peer, target)| {
            let (path, query) = target.split_once('?').unwrap_or((target, ""));
            (path, (*peer, query.to_owned()))
        });
        split.filter(|(of, _)| *of == path).map(|(_, request)| request).collect()
    }

    fn response(&self, peer: usize, request: &Request<h2::RecvStream>) -> Vec<Part> {
        let path = request.uri().path();
        match path {
            "/version" => {
                let version = r#"{"major":"1","minor":"36","gitVersion":"v1.36.2"}"#;
                return vec![Part::json(), Part::data(version), Part::End];
            }
            "/readyz" | "/livez" => {
                return vec![Part::Head(200, "text/plain", vec![]), Part::data("ok"), Part::End];
            }
            _ => {}
        }
        let target = request.uri().path_and_query().unwrap().to_string();
        self.requests.lock().unwrap().push((peer, target));
        let mut responses = self.responses.lock().unwrap();
        match responses.get_mut(path) {
            Some(responses) if responses.len() > 1 => responses.pop().unwrap(),
            Some(responses) => responses[0].clone(),
            None => vec![Part::Head(404, "text/plain", vec![]), Part::End],
        }
    }
}

/// What a peer does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Life {
    Runs,
    /// As a process after SIGSTOP: the kernel accepts and acknowledges, and nothing answers.
    Stopped,
    /// As a process after SIGKILL.
    Killed,
}

/// One apiserver.
pub struct Peer {
    pub address: SocketAddr,
    life: watch::Sender<Life>,
    /// The number of watches over WebSocket that it has accepted.
    pub watches: Arc<AtomicUsize>,
}

impl Peer {
    pub fn set_life(&self, life: Life) {
        self.life.send_replace(life);
    }
}

/// Starts peers that share a script.
pub async fn start_peers(certs: &Certs, count: usize, script: &Script) -> Vec<Peer> {
    let clients = tls::clients_of(certs.pki.ca_der(), true);
    let config = tls::server(&certs.pki.server().unwrap(), clients, &["h2", "http/1.1"]);
    let mut peers = Vec::new();
    for number in 0..count {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let (life, watcher) = watch::channel(Life::Runs);
        let watches = Arc::<AtomicUsize>::default();
        let address = listener.local_addr().unwrap();
        let served = (TlsAcceptor::from(config.clone()), script.clone(), watches.clone());
        tokio::spawn(accept(listener, number, served, watcher));
        peers.push(Peer { address, life, watches });
    }
    peers
}

/// The addresses of peers.
pub fn addresses(peers: &[Peer]) -> Vec<SocketAddr> {
    peers.iter().map(|peer| peer.address).collect()
}

async fn accept(
    listener: TcpListener,
    peer: usize,
    (acceptor, script, watches): (TlsAcceptor, Script, Arc<AtomicUsize>),
    life: watch::Receiver<Life>,
) {
    let accept_all = async {
        while let Ok((stream, _)) = listener.accept().await {
            let (handshake, script) = (acceptor.accept(stream), script.clone());
            let watches = watches.clone();
            tokio::spawn(while_alive(life.clone(), async move {
                let Ok(stream) = handshake.await else { return };
                // The end of a connection is an error for some of its tasks.
                if stream.get_ref().1.alpn_protocol() == Some(b"h2") {
                    let _ = serve(stream, peer, script).await;
                } else {
                    let _ = serve_watch(stream, &watches).await;
                }
            }));
        }
    };
    while_alive(life.clone(), accept_all).await;
}

/// Runs a future, but not while its peer is stopped, and drops it when the peer is killed.
async fn while_alive(life: watch::Receiver<Life>, future: impl Future<Output = ()>) {
    let mut future = std::pin::pin!(future);
    loop {
        let mut changed = life.clone();
        let now = *changed.borrow_and_update();
        let changed = tokio::select! {
            () = &mut future, if now == Life::Runs => return,
            changed = changed.changed() => changed,
        };
        match changed {
            Ok(()) if *life.borrow() == Life::Killed => return,
            Ok(()) => {}
            // The test does not change it any more.
            Err(_) => return future.await,
        }
    }
}

/// Serves an upgrade to WebSocket with an event in one text frame, and nothing more.
async fn serve_watch(mut stream: TlsStream<TcpStream>, watches: &AtomicUsize) -> io::Result<()> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await?);
    }
    let answer =
        "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n";
    stream.write_all(answer.as_bytes()).await?;
    stream.write_all(EVENT_FRAME).await?;
    stream.flush().await?;
    watches.fetch_add(1, Relaxed);
    stream.read_to_end(&mut head).await.map(drop)
}

/// A text frame of WebSocket (RFC 6455, 5.2).
pub const EVENT_FRAME: &[u8] = b"\x81\x16{\"type\":\"BOOKMARK\"...}";

async fn serve(stream: TlsStream<TcpStream>, peer: usize, script: Script) -> Result<(), h2::Error> {
    let mut connection = h2::server::handshake(stream).await?;
    let closed = Arc::new(Notify::new());
    loop {
        let accepted = tokio::select! {
            accepted = connection.accept() => accepted,
            () = closed.notified() => return Ok(()),
        };
        let Some((request, send)) = accepted.transpose()? else { return Ok(()) };
        let parts = script.response(peer, &request);
        let closed = Arc::clone(&closed);
        tokio::spawn(async move {
            let _ = respond(send, parts, closed).await;
        });
    }
}

async fn respond(
    mut send: SendResponse<Bytes>,
    parts: Vec<Part>,
    closed: Arc<Notify>,
) -> Result<(), h2::Error> {
    let mut body = None;
    let mut parts = parts.into_iter().peekable();
    while let Some(part) = parts.next() {
        let is_last = matches!(parts.peek(), Some(Part::End));
        match part {
            Part::Head(status, content_type, headers) => {
                let mut head =
                    Response::builder().status(status).header("content-type", content_type);
                for (name, value) in headers {
                    head = head.header(name, value);
                }
                body = Some(send.send_response(head.body(()).unwrap(), is_last)?);
            }
            Part::Data(data) => body.as_mut().expect("a head").send_data(data, is_last)?,
            Part::Pause(time) => crate::support::pause(time).await,
            Part::Wait(notify) => notify.notified().await,
            Part::End => {
                // The part before has ended the stream, unless it was a pause.
                if let Some(body) = &mut body {
                    let _ = body.send_data(Bytes::new(), true);
                }
            }
            Part::Close => closed.notify_one(),
        }
    }
    // A response that has not ended stays open as long as the connection.
    std::future::pending().await
}

/// The built binary in front of apiservers.
pub struct Rig {
    process: Process,
    config: PathBuf,
    pub certs: Certs,
    pub admin: SocketAddr,
    pub address: SocketAddr,
}

impl Rig {
    /// Starts jackstay in front of these apiservers, and waits until they are ready.
    pub async fn start(
        certs: Certs,
        apiservers: &[SocketAddr],
        change: impl FnOnce(&mut Config),
    ) -> Self {
        let mut config = certs.config(apiservers);
        change(&mut config);
        let file = certs.path().join("jackstay.yaml");
        write_config(&file, &config);
        let mut command = Command::new(BINARY);
        command.args(["run", "--config"]).arg(&file);
        let mut process = Process::spawn(command);
        let admin = first_address(&process.wait_output("the admin endpoint listens").await);
        let address = first_address(&process.wait_output("\"apiserver\"").await);
        let rig = Self { process, config: file, certs, admin, address };
        let are_ready = async || {
            rig.page("/status").await.matches(r#""state": "ready""#).count() == apiservers.len()
        };
        until("all endpoints are ready", are_ready).await;
        rig
    }

    /// Changes the configuration, which is read again.
    pub fn reconfigure(&self, apiservers: &[SocketAddr], change: impl FnOnce(&mut Config)) {
        let mut config = self.certs.config(apiservers);
        change(&mut config);
        write_config(&self.config, &config);
        self.process.signal("HUP");
    }

    /// The output of `jackstay status`.
    pub async fn status(&self) -> String {
        let mut command = Command::new(BINARY);
        command.args(["status", "--admin", &self.admin.to_string()]);
        let output = tokio::task::spawn_blocking(move || command.output()).await.unwrap().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// A response of the admin endpoint.
    pub async fn page(&self, path: &str) -> String {
        pages::get(self.admin, path).await.unwrap()
    }

    /// A client with the certificate of the configured identity.
    pub async fn client(&self, http2: bool) -> Client {
        let credentials = self.certs.credentials();
        if http2 {
            return Client::connect(self.address, &credentials).await.unwrap();
        }
        Client::connect_http1(self.address, &credentials).await.unwrap()
    }
}

//! Bytes of a client at the serving path: jackstay in this process, with a client that sends the bytes over TLS and
//! an apiserver that answers and records every request.

use std::collections::HashMap;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::panic;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, Once, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{HeaderMap, Response};
use jackstay::app::{App, Running};
use jackstay::config::validate_text;
use jackstay_apiserver::pki::Pki;
use jackstay_core::admission::MemoryBudget;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use socket2::{Domain, Socket, Type};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;

/// How long a client waits for more of the responses before it closes its connection.
const QUIET: Duration = Duration::from_millis(3);
/// Maximum time in which the server ends a connection that its client has closed. On a busy machine, at the lowest
/// priority, a thread can wait for a processor for seconds.
const END_LIMIT: Duration = Duration::from_secs(60);
/// Maximum time for the first response.
const START_LIMIT: Duration = Duration::from_secs(120);
/// The time after which a lost wakeup of the waiting thread would be noticed.
const POLL_INTERVAL: Duration = Duration::from_micros(200);

/// A request that the apiserver has received.
#[derive(Debug, Clone, Default)]
pub(super) struct Received {
    pub(super) method: String,
    pub(super) target: String,
    pub(super) body: Vec<u8>,
    /// The body has ended as HTTP provides for.
    pub(super) is_complete: bool,
}

/// The requests of each client, by the last address in `X-Forwarded-For`.
type Record = Arc<Mutex<HashMap<Ipv4Addr, Vec<Received>>>>;

/// jackstay between a client and an apiserver.
pub(super) struct Server {
    address: SocketAddr,
    tls: Arc<ClientConfig>,
    memory: Arc<MemoryBudget>,
    record: Record,
    /// The number of the next connection, which determines its source address.
    next: u16,
    _running: Running,
    _files: tempfile::TempDir,
}

/// A thread of jackstay has panicked.
static PANICKED: AtomicBool = AtomicBool::new(false);

impl Server {
    /// Starts jackstay and the apiserver, and waits until a request is answered.
    pub(super) fn start(alpn: &str, request: &[u8], answer: &[u8]) -> Self {
        record_panics();
        let (pki, files) = (Pki::new("fuzz").unwrap(), tempfile::tempdir().unwrap());
        let record = Record::default();
        let apiserver = start_apiserver(&pki, &record);
        pki.write_ca(files.path()).unwrap();
        pki.server().unwrap().write_to(files.path(), "serving").unwrap();
        let text = configuration(files.path(), apiserver);
        let mut config = validate_text(&files.path().join("fuzz.yaml"), &text).unwrap().config;
        config.listeners[0].bind = vec![(Ipv4Addr::LOCALHOST, 0).into()];
        config.admin.bind = (Ipv4Addr::LOCALHOST, 0).into();
        let app = App::bind(config).unwrap();
        let (address, memory) = (app.listener_addresses("apiserver")[0], app.memory());
        let (running, tls) = (app.start().unwrap(), client_config(&pki, alpn));
        let mut server =
            Self { address, tls, memory, record, next: 0, _running: running, _files: files };
        let end = Instant::now() + START_LIMIT;
        let is_answered = |received: &[u8]| received.windows(answer.len()).any(|it| it == answer);
        while !is_answered(&server.exchange(request, Duration::from_millis(200)).1) {
            assert!(Instant::now() < end, "jackstay does not forward requests");
        }
        server
    }

    /// Sends bytes on a new connection and closes it when the server is quiet. Returns what the apiserver has
    /// received.
    ///
    /// # Panics
    /// jackstay has panicked, does not close the connection, or still charges memory for it.
    pub(super) fn send(&mut self, bytes: &[u8]) -> Vec<Received> {
        self.exchange(bytes, QUIET).0
    }

    fn exchange(&mut self, bytes: &[u8], quiet: Duration) -> (Vec<Received>, Vec<u8>) {
        let [high, low] = self.next.to_be_bytes();
        self.next = self.next.wrapping_add(1);
        let client = Ipv4Addr::new(127, 1, high, low);
        self.record.lock().unwrap().insert(client, Vec::new());
        let answer = self.converse(client, bytes, quiet).expect("a connection");
        let end = Instant::now() + END_LIMIT;
        while self.memory.used() > 0 {
            let status = self.memory.status();
            assert!(Instant::now() < end, "memory is charged without a client: {status:?}");
            thread::park_timeout(POLL_INTERVAL);
        }
        assert!(!PANICKED.load(SeqCst), "a thread of jackstay has panicked");
        (self.record.lock().unwrap().remove(&client).unwrap_or_default(), answer)
    }

    /// Sends the bytes and reads until the server closes the connection. Returns what the server has sent.
    fn converse(&self, client: Ipv4Addr, bytes: &[u8], quiet: Duration) -> io::Result<Vec<u8>> {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
        socket.bind(&SocketAddr::from((client, 0)).into())?;
        socket.connect(&self.address.into())?;
        let tcp = TcpStream::from(socket);
        tcp.set_nodelay(true)?;
        tcp.set_read_timeout(Some(END_LIMIT))?;
        tcp.set_write_timeout(Some(END_LIMIT))?;
        let name = ServerName::from(self.address.ip());
        let tls = ClientConnection::new(Arc::clone(&self.tls), name).map_err(io::Error::other)?;
        let mut stream = StreamOwned::new(tls, tcp);
        while stream.conn.is_handshaking() {
            stream.conn.complete_io(&mut stream.sock)?;
        }
        // The server may close the connection before it has read everything.
        let _ = stream.write_all(bytes);
        stream.sock.set_read_timeout(Some(quiet))?;
        let (mut received, mut buffer) = (Vec::new(), [0; 4096]);
        loop {
            match stream.read(&mut buffer) {
                Ok(0) => break,
                Ok(length) => received.extend_from_slice(&buffer[..length]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(_) => break,
            }
        }
        stream.conn.send_close_notify();
        let _ = stream.conn.complete_io(&mut stream.sock);
        let _ = stream.sock.shutdown(std::net::Shutdown::Write);
        stream.sock.set_read_timeout(Some(END_LIMIT))?;
        loop {
            match stream.sock.read(&mut buffer) {
                Ok(0) => return Ok(received),
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    panic!("the server keeps a connection that its client has closed")
                }
                // A reset: the server did not read everything.
                Err(_) => return Ok(received),
            }
        }
    }
}

/// Notes panics of jackstay's threads, which its runtimes catch.
fn record_panics() {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let next = panic::take_hook();
        panic::set_hook(Box::new(move |panic| {
            let thread = thread::current();
            let name = thread.name().unwrap_or_default();
            if ["worker", "identity-lane", "control"].iter().any(|known| name.starts_with(known)) {
                PANICKED.store(true, SeqCst);
            }
            next(panic);
        }));
    });
}

/// The default limits. `suspect_after` is late, so that a busy machine causes no hedges, which are requests that no
/// client has sent. The ports are replaced by free ones.
fn configuration(files: &Path, apiserver: SocketAddr) -> String {
    let files = files.display();
    format!(
        r#"
admin: {{ bind: "127.0.0.1:9443" }}
state_dir: ""
workers: 1
identity_lane: false
log: {{ level: error, access: "off" }}
upstreams:
  - name: control-plane
    endpoints: ["{apiserver}"]
    tls: {{ ca_file: {files}/ca.crt }}
    health: {{ suspect_after: 20s, dead_after: 40s, readyz: {{ timeout: 10s }} }}
listeners:
  - name: apiserver
    bind: ["127.0.0.1:7443"]
    mode: terminate
    upstream: control-plane
    tls: {{ cert_file: {files}/serving.crt, key_file: {files}/serving.key }}
    limits: {{ handshake_timeout: 1m }}
"#
    )
}

fn client_config(pki: &Pki, alpn: &str) -> Arc<ClientConfig> {
    let mut roots = RootCertStore::empty();
    roots.add(pki.ca_der()).unwrap();
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let builder = ClientConfig::builder_with_provider(provider);
    let builder = builder.with_safe_default_protocol_versions().unwrap();
    let mut config = builder.with_root_certificates(roots).with_no_client_auth();
    config.alpn_protocols = vec![alpn.as_bytes().to_vec()];
    Arc::new(config)
}

/// Starts a thread that answers requests over HTTP/2, and upgrades over HTTP/1.1.
fn start_apiserver(pki: &Pki, record: &Record) -> SocketAddr {
    let socket = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = socket.local_addr().unwrap();
    socket.set_nonblocking(true).unwrap();
    let server = pki.server().unwrap();
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let mut config = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![server.cert_der()], server.key_der())
        .unwrap();
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    let (tls, record) = (TlsAcceptor::from(Arc::new(config)), Arc::clone(record));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    thread::spawn(move || {
        runtime.block_on(async move {
            let socket = TcpListener::from_std(socket).unwrap();
            while let Ok((stream, _)) = socket.accept().await {
                let (tls, record) = (tls.clone(), Arc::clone(&record));
                tokio::spawn(async move {
                    let Ok(stream) = tls.accept(stream).await else { return };
                    // jackstay may close its connections at any time.
                    if stream.get_ref().1.alpn_protocol() == Some(b"h2") {
                        let _ = serve_http2(stream, &record).await;
                    } else {
                        let _ = refuse_upgrade(stream, &record).await;
                    }
                });
            }
        });
    });
    address
}

type ServerStream = tokio_rustls::server::TlsStream<tokio::net::TcpStream>;

async fn serve_http2(stream: ServerStream, record: &Record) -> Result<(), h2::Error> {
    let mut connection = h2::server::handshake(stream).await?;
    while let Some(accepted) = connection.accept().await {
        let (request, mut respond) = accepted?;
        let record = Arc::clone(record);
        tokio::spawn(async move {
            let (head, mut body) = request.into_parts();
            let client = client(&head.headers);
            let target = head.uri.path_and_query().map(ToString::to_string).unwrap_or_default();
            let method = head.method.to_string();
            let received = Received { method, target, ..Received::default() };
            let index = add(&record, client, received);
            let update = |change: &dyn Fn(&mut Received)| {
                let mut record = record.lock().unwrap_or_else(PoisonError::into_inner);
                let list = client.and_then(|client| record.get_mut(&client));
                if let Some(received) = list.and_then(|list| list.get_mut(index)) {
                    change(received);
                }
            };
            while let Some(data) = body.data().await {
                let Ok(data) = data else { return };
                let _ = body.flow_control().release_capacity(data.len());
                update(&|received| received.body.extend_from_slice(&data));
            }
            if body.trailers().await.is_err() {
                return;
            }
            update(&|received| received.is_complete = true);
            if let Ok(mut send) = respond.send_response(Response::new(()), false) {
                let _ = send.send_data(Bytes::from_static(b"answered\n"), true);
            }
        });
    }
    Ok(())
}

/// Reads the head of a request over HTTP/1.1, which is an upgrade, and refuses it.
async fn refuse_upgrade(mut stream: ServerStream, record: &Record) -> io::Result<()> {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await?);
    }
    let text = String::from_utf8_lossy(&head).to_ascii_lowercase();
    let field = |line: &str| line.strip_prefix("x-forwarded-for:").map(str::to_owned);
    let forwarded: Vec<String> = text.lines().filter_map(field).collect();
    let client = last_address(&forwarded.join(","));
    let mut words = head.split(|byte| *byte == b' ');
    let mut word = || String::from_utf8_lossy(words.next().unwrap_or_default()).into_owned();
    let received = Received { method: word(), target: word(), ..Received::default() };
    add(record, client, received);
    stream.write_all(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n").await?;
    stream.shutdown().await
}

/// Records a request. Returns its index in the list of its client.
fn add(record: &Record, client: Option<Ipv4Addr>, received: Received) -> usize {
    let mut record = record.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(list) = client.and_then(|client| record.get_mut(&client)) else { return 0 };
    list.push(received);
    list.len() - 1
}

/// The client of a request; probes have none.
fn client(headers: &HeaderMap) -> Option<Ipv4Addr> {
    let values = headers.get_all("x-forwarded-for").iter();
    let values: Vec<_> = values.filter_map(|value| value.to_str().ok()).collect();
    last_address(&values.join(","))
}

fn last_address(list: &str) -> Option<Ipv4Addr> {
    list.rsplit(',').next()?.trim().parse().ok()
}

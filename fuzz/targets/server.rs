//! Bytes of a client at the serving path: jackstay in this process, with a client that sends the bytes over TLS and
//! an upstream that records every request.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::panic;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Once};
use std::thread;
use std::time::{Duration, Instant};

use jackstay::app::{App, Running};
use jackstay_apiserver::pki::Pki;
use jackstay_config::validate_text;
use jackstay_core::admission::MemoryBudget;
use jackstay_testkit::recorder::{Record, Recorded, Recorder};
use jackstay_testkit::tls::{self, Trust};
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, StreamOwned};
use socket2::{Domain, Socket, Type};

/// How long a client waits for more of the responses before it closes its connection.
const QUIET: Duration = Duration::from_millis(3);
/// Maximum time in which the server ends a connection that its client has closed. On a busy machine, at the lowest
/// priority, a thread can wait for a processor for seconds.
const END_LIMIT: Duration = Duration::from_secs(60);
/// Maximum time for the first response.
const START_LIMIT: Duration = Duration::from_secs(120);
/// The time after which a lost wakeup of the waiting thread would be noticed.
const POLL_INTERVAL: Duration = Duration::from_micros(200);

/// jackstay between a client and a recorder.
pub(super) struct Server {
    address: SocketAddr,
    tls: Arc<ClientConfig>,
    memory: Arc<MemoryBudget>,
    record: Arc<Record>,
    /// The number of the next connection, which determines its source address.
    next: u16,
    _running: Running,
    _files: tempfile::TempDir,
}

/// A thread of jackstay has panicked.
static PANICKED: AtomicBool = AtomicBool::new(false);

impl Server {
    /// Starts jackstay and the recorder, and waits until a request is answered.
    pub(super) fn start(alpn: &str, request: &[u8], answer: &[u8]) -> Self {
        record_panics();
        let (pki, files) = (Pki::new("fuzz").unwrap(), tempfile::tempdir().unwrap());
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let recorder = runtime.block_on(Recorder::start(&pki));
        thread::spawn(move || runtime.block_on(std::future::pending::<()>()));
        pki.write_ca(files.path()).unwrap();
        pki.server().unwrap().write_to(files.path(), "serving").unwrap();
        let text = configuration(files.path(), recorder.tls);
        let mut config = validate_text(&files.path().join("fuzz.yaml"), &text).unwrap().config;
        config.listeners[0].bind = vec![(Ipv4Addr::LOCALHOST, 0).into()];
        config.admin.bind = (Ipv4Addr::LOCALHOST, 0).into();
        let app = App::bind(config).unwrap();
        let (address, memory) = (app.listener_addresses("apiserver")[0], app.memory());
        let mut server = Self {
            address,
            tls: tls::client(Trust::Ca(pki.ca_der()), None, alpn),
            memory,
            record: recorder.record,
            next: 0,
            _running: app.start().unwrap(),
            _files: files,
        };
        let end = Instant::now() + START_LIMIT;
        let is_answered = |received: &[u8]| received.windows(answer.len()).any(|it| it == answer);
        while !is_answered(&server.exchange(request, Duration::from_millis(200)).1) {
            assert!(Instant::now() < end, "jackstay does not forward requests");
        }
        server
    }

    /// Sends bytes on a new connection and closes it when the server is quiet. Returns what the recorder has
    /// received.
    ///
    /// # Panics
    /// jackstay has panicked, does not close the connection, or still charges memory for it.
    pub(super) fn send(&mut self, bytes: &[u8]) -> Vec<Recorded> {
        self.exchange(bytes, QUIET).0
    }

    fn exchange(&mut self, bytes: &[u8], quiet: Duration) -> (Vec<Recorded>, Vec<u8>) {
        let [high, low] = self.next.to_be_bytes();
        self.next = self.next.wrapping_add(1);
        let client = Ipv4Addr::new(127, 1, high, low);
        // Requests of earlier clients that have arrived late, and probes.
        self.record.clear();
        let answer = self.converse(client, bytes, quiet).expect("a connection");
        let end = Instant::now() + END_LIMIT;
        while self.memory.used() > 0 {
            let status = self.memory.status();
            assert!(Instant::now() < end, "memory is charged without a client: {status:?}");
            thread::park_timeout(POLL_INTERVAL);
        }
        assert!(!PANICKED.load(SeqCst), "a thread of jackstay has panicked");
        (self.record.of(Some(client)), answer)
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
fn configuration(files: &Path, upstream: SocketAddr) -> String {
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
    endpoints: ["{upstream}"]
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

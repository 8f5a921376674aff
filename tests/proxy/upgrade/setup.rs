//! A listener of jackstay between clients and an apiserver whose bytes the test reads and writes.

use std::cell::RefCell;
use std::net::{Ipv4Addr, SocketAddr};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use jackstay::observe::Metrics;
use jackstay::proxy::admission::handshake_queue::HandshakeQueue;
use jackstay::proxy::admission::listener_admission::ListenerAdmission;
use jackstay::proxy::credential_selector::CredentialSelector;
use jackstay::proxy::drain;
use jackstay::proxy::https_server::{HttpsServer, ServedClients};
use jackstay::proxy::listener_service::ListenerService;
use jackstay::proxy::request_body;
use jackstay::proxy::task_queues::TaskQueues;
use jackstay::proxy::tunnels::Tunnels;
use jackstay::proxy::upstream_client::UpstreamClient;
use jackstay::upstream::Upstream;
use jackstay::upstream::credentials::Credentials;
use jackstay::upstream::endpoint::Endpoint;
use jackstay::upstream::pool::{Pool, WarmClasses};
use jackstay_apiserver::faulty_relay::FaultyRelay;
use jackstay_apiserver::pki::Issued;
use jackstay_config::AccessLog;
use jackstay_core::admission::{DEFAULT_LIMIT, MemoryBudget};
use jackstay_net::loaded_files::LoadedFiles;
use jackstay_net::tls::serving::{LoadedServingTls, ServingTls};
use jackstay_sys::sockets::listening;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;
use tokio_rustls::{TlsAcceptor, TlsStream};

use crate::support::{Certs, tls, wire};

/// Time limit of a test, reached only in a failure.
const TIME_LIMIT: Duration = Duration::from_secs(20);
/// `tunnel_dead_after` of tests that do not depend on it.
const TUNNEL_DEAD_AFTER: Duration = Duration::from_secs(20);

thread_local! {
    /// The queues of the test that runs.
    static TASKS: RefCell<Option<TaskQueues>> = const { RefCell::new(None) };
}

/// Runs a test on one thread, as a worker does.
pub fn run(test: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(TaskQueues::run(async |tasks| {
        TASKS.set(Some(tasks));
        timeout(TIME_LIMIT, test).await.expect("the test ends");
    }));
}

/// One end of a TLS connection.
pub struct Connection(BufReader<TlsStream<TcpStream>>);

impl Connection {
    pub async fn send(&mut self, text: &str) {
        self.0.write_all(text.as_bytes()).await.unwrap();
        self.0.flush().await.unwrap();
    }

    /// Ends this direction and leaves the other one open.
    pub async fn half_close(&mut self) {
        self.0.shutdown().await.unwrap();
    }

    /// Reads the head of a request or of a response, and no byte more.
    pub async fn head(&mut self) -> String {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(self.0.read_u8().await.unwrap());
        }
        String::from_utf8(head).unwrap()
    }

    /// Reads this many bytes.
    pub async fn read(&mut self, length: usize) -> String {
        let mut data = vec![0; length];
        self.0.read_exact(&mut data).await.unwrap();
        String::from_utf8(data).unwrap()
    }

    pub async fn expect(&mut self, text: &str) {
        assert_eq!(self.read(text.len()).await, text);
    }

    /// Reads up to the end. Returns the data, and whether the end was clean.
    pub async fn read_to_end(&mut self) -> (String, bool) {
        let mut data = Vec::new();
        let end = self.0.read_to_end(&mut data).await;
        (String::from_utf8(data).unwrap(), end.is_ok())
    }

    /// Reads up to the end, which must be clean.
    pub async fn read_to_clean_end(&mut self) -> String {
        let (data, is_clean) = self.read_to_end().await;
        assert!(is_clean, "the connection was lost after {data:?}");
        data
    }

    /// Waits until there is unread data.
    pub async fn wait_unread(&self) {
        self.0.get_ref().get_ref().0.peek(&mut [0]).await.unwrap();
    }

    /// Whether the other end has sent a certificate.
    pub fn has_peer_certificate(&self) -> bool {
        self.0.get_ref().get_ref().1.peer_certificates().is_some()
    }
}

/// An apiserver that speaks HTTP/1.1 and whose responses the test writes.
pub struct Peer {
    listener: TcpListener,
    acceptor: TlsAcceptor,
}

impl Peer {
    pub async fn start(certs: &Certs) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let clients = tls::clients_of(certs.pki.ca_der(), true);
        let config = tls::server(&certs.pki.server().unwrap(), clients, &["http/1.1"]);
        Self { listener, acceptor: config.into() }
    }

    pub fn address(&self) -> SocketAddr {
        self.listener.local_addr().unwrap()
    }

    /// The next connection on which data arrives. If a handshake takes long, jackstay opens a second
    /// connection, and closes one of them without data.
    pub async fn accept(&self) -> Connection {
        loop {
            let (stream, _) = self.listener.accept().await.unwrap();
            let Ok(stream) = self.acceptor.accept(stream).await else { continue };
            let mut connection = Connection(BufReader::new(stream.into()));
            if connection.0.fill_buf().await.is_ok_and(|data| !data.is_empty()) {
                return connection;
            }
        }
    }

    /// Whether there is another connection with data.
    pub async fn has_connection(&self) -> bool {
        timeout(Duration::from_millis(100), self.accept()).await.is_ok()
    }
}

/// A listener in front of some endpoints.
pub struct Proxy {
    pub tunnels: Tunnels,
    pub metrics: Arc<Metrics>,
    pub memory: Arc<MemoryBudget>,
    address: SocketAddr,
    _drain: drain::DrainTrigger,
}

impl Proxy {
    pub fn start(certs: &Certs, endpoints: &[SocketAddr]) -> Self {
        Self::start_with(certs, endpoints, TUNNEL_DEAD_AFTER)
    }

    pub fn start_with(
        certs: &Certs,
        endpoints: &[SocketAddr],
        tunnel_dead_after: Duration,
    ) -> Self {
        let mut config = certs.config(endpoints);
        config.upstreams[0].health.tunnel_dead_after = tunnel_dead_after;
        let (listener, upstream) = (&config.listeners[0], &config.upstreams[0]);
        let terminate = listener.terminate().unwrap();
        let metrics = Metrics::new();
        let memory = MemoryBudget::new(DEFAULT_LIMIT);
        let credentials =
            Credentials::load(upstream, &terminate.identities, &mut LoadedFiles::default())
                .unwrap();
        let shared = Upstream::new(upstream.clone(), credentials, &metrics, &memory);
        let endpoints = upstream.endpoints.iter().map(|address| {
            let metrics = metrics.endpoint(&shared.name, &address.to_string());
            Endpoint::new(&shared.name, address, None, metrics).unwrap()
        });
        shared.set_endpoints(endpoints.collect());
        let pool = Pool::new(Arc::new(shared), WarmClasses::Identities);
        let tunnels = Tunnels::default();
        let (trigger, drain) = drain::channel();
        let slots = pool.upstream().credentials.slots();
        let service = ListenerService {
            upstream: Rc::new(UpstreamClient::new(
                pool,
                Arc::clone(&metrics),
                request_body::budget(),
            )),
            credentials: CredentialSelector {
                slots,
                listener: listener.name.clone(),
                passthrough_names: Vec::new(),
                tokens: Rc::default(),
            },
            metrics: metrics.listener(&listener.name),
            access_log: AccessLog::Off,
            never_resume_groups: Vec::new(),
            heartbeats: Vec::new(),
            limits: listener.limits().clone(),
            request_limits: terminate.limits.requests.clone(),
            tunnels: tunnels.clone(),
            drain: drain.clone(),
        };
        let tls = Arc::new(ServingTls::new(
            LoadedServingTls::load(&terminate.files(), &mut LoadedFiles::default()).unwrap(),
        ));
        let admission = ListenerAdmission::new(
            listener.name.clone(),
            Arc::clone(&service.metrics),
            Arc::clone(&memory),
        );
        let tasks = TASKS.with_borrow(|tasks| tasks.clone().expect("`run` runs the test"));
        let server = HttpsServer::new(
            Rc::new(admission),
            Rc::new(service),
            tls,
            HandshakeQueue::new(1),
            drain.clone(),
            ServedClients::All,
            tasks,
        );
        let socket = listening::listen((Ipv4Addr::LOCALHOST, 0).into(), false).unwrap();
        let address = socket.local_addr().unwrap();
        Rc::new(server).accept(TcpListener::from_std(socket).unwrap().into(), drain);
        Self { tunnels, metrics, memory, address, _drain: trigger }
    }

    /// A client connection, with this certificate if there is one.
    pub async fn connect(&self, certs: &Certs, certificate: Option<&Issued>) -> Connection {
        let stream = wire::connect_with(self.address, certs, certificate, "http/1.1").await;
        Connection(BufReader::new(stream.into()))
    }
}

/// One apiserver, and a listener in front of it.
pub struct Setup {
    pub certs: Certs,
    pub peer: Peer,
    pub proxy: Proxy,
}

impl Setup {
    pub async fn new() -> Self {
        Self::with(TUNNEL_DEAD_AFTER).await
    }

    pub async fn with(tunnel_dead_after: Duration) -> Self {
        let certs = Certs::new();
        let peer = Peer::start(&certs).await;
        let proxy = Proxy::start_with(&certs, &[peer.address()], tunnel_dead_after);
        Self { certs, peer, proxy }
    }

    /// A setup in which the upstream connections run through a relay, which can drop their packets.
    pub async fn behind_relay(tunnel_dead_after: Duration) -> (FaultyRelay, Self) {
        let certs = Certs::new();
        let peer = Peer::start(&certs).await;
        let relay = FaultyRelay::start(peer.address()).unwrap();
        let proxy = Proxy::start_with(&certs, &[relay.addr], tunnel_dead_after);
        (relay, Self { certs, peer, proxy })
    }

    /// A client without a certificate.
    pub async fn client(&self) -> Connection {
        self.proxy.connect(&self.certs, None).await
    }

    /// A client with the certificate of the configured identity.
    pub async fn identity_client(&self) -> Connection {
        self.proxy.connect(&self.certs, Some(&self.certs.admin)).await
    }

    /// Sends a request. Returns the apiserver's connection, and the head that the apiserver receives.
    pub async fn request(&self, client: &mut Connection, request: &str) -> (Connection, String) {
        client.send(request).await;
        let mut server = self.peer.accept().await;
        let head = server.head().await;
        (server, head)
    }
}

/// Sends a response of the apiserver. Returns the head that the client receives.
pub async fn respond(server: &mut Connection, client: &mut Connection, response: &str) -> String {
    server.send(response).await;
    client.head().await
}

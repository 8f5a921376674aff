//! A listener of jackstay between a client and scripted apiservers.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use jackstay::config::{self, AccessLog, CertPaths, Overrides};
use jackstay::net::sockets::listening;
use jackstay::net::tls::pem_files;
use jackstay::net::tls::serving::{LoadedServingTls, ServingTls};
use jackstay::observe::Metrics;
use jackstay::proxy::credential_selector::CredentialSelector;
use jackstay::proxy::drain;
use jackstay::proxy::https_server::HttpsServer;
use jackstay::proxy::listener_service::ListenerService;
use jackstay::proxy::request_body;
use jackstay::proxy::tunnels::Tunnels;
use jackstay::proxy::upstream_client::UpstreamClient;
use jackstay::upstream::Upstream;
use jackstay::upstream::credentials::{Credentials, client_tls};
use jackstay::upstream::endpoint::Endpoint;
use jackstay::upstream::pool::Pool;
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};
use rustls::ServerConfig;
use rustls::server::WebPkiClientVerifier;
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{LocalSet, spawn_local};
use tokio::time::timeout;
use tokio_rustls::{TlsAcceptor, TlsConnector, TlsStream};

/// Far longer than any test takes.
const PATIENCE: Duration = Duration::from_secs(20);

/// Runs a test on one thread, as a worker does.
pub fn run(test: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(LocalSet::new().run_until(async {
        timeout(PATIENCE, test).await.expect("the test ends");
    }));
}

/// A certificate authority and the files that it has written.
pub struct Ca {
    dir: TempDir,
    issuer: Issuer<'static, KeyPair>,
}

impl Ca {
    pub fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, "test CA");
        std::fs::write(dir.path().join("ca.crt"), params.self_signed(&key).unwrap().pem()).unwrap();
        let ca = Self { dir, issuer: Issuer::new(params, key) };
        ca.issue("server", "127.0.0.1");
        ca.issue("node", "system:node:n1");
        ca
    }

    fn issue(&self, file: &str, name: &str) {
        self.issue_until(file, name, SystemTime::now() + Duration::from_secs(3600));
    }

    /// Issues a certificate that expires at this time.
    pub fn issue_until(&self, file: &str, name: &str, not_after: SystemTime) {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap();
        let since_1970 = not_after.duration_since(SystemTime::UNIX_EPOCH).unwrap();
        params.not_after = rcgen::date_time_ymd(1970, 1, 1) + since_1970;
        params.distinguished_name.push(DnType::CommonName, name);
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        let paths = self.paths(file);
        std::fs::write(paths.cert_file, certificate.pem()).unwrap();
        std::fs::write(paths.key_file, key.serialize_pem()).unwrap();
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn paths(&self, name: &str) -> CertPaths {
        CertPaths {
            cert_file: self.path(&format!("{name}.crt")),
            key_file: self.path(&format!("{name}.key")),
        }
    }
}

/// An apiserver whose responses the test writes.
pub struct Peer {
    listener: TcpListener,
    acceptor: TlsAcceptor,
}

impl Peer {
    pub async fn start(ca: &Ca) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let roots = pem_files::load_ca(&ca.path("ca.crt")).unwrap().roots;
        let server = pem_files::load_cert(&ca.paths("server")).unwrap();
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let verifier = WebPkiClientVerifier::builder_with_provider(roots, Arc::clone(&provider))
            .allow_unauthenticated()
            .build()
            .unwrap();
        let resolver = rustls::sign::SingleCertAndKey::from(Arc::clone(&server.certified));
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_client_cert_verifier(verifier)
            .with_cert_resolver(Arc::new(resolver));
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Self { listener, acceptor: TlsAcceptor::from(Arc::new(config)) }
    }

    pub fn address(&self) -> SocketAddr {
        self.listener.local_addr().unwrap()
    }

    /// The next connection on which data arrives. If a handshake takes long, jackstay opens a
    /// second connection, and closes one of them without data.
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

/// One end of a TLS connection.
pub struct Connection(pub BufReader<TlsStream<TcpStream>>);

impl Connection {
    pub async fn send(&mut self, text: &str) {
        self.0.write_all(text.as_bytes()).await.unwrap();
        self.0.flush().await.unwrap();
    }

    /// Ends this direction and leaves the other one open.
    pub async fn half_close(&mut self) {
        self.0.shutdown().await.unwrap();
    }

    /// Reads a head, and no byte more.
    pub async fn head(&mut self) -> String {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(self.0.read_u8().await.unwrap());
        }
        String::from_utf8(head).unwrap()
    }

    pub async fn expect(&mut self, text: &str) {
        let mut received = vec![0; text.len()];
        self.0.read_exact(&mut received).await.unwrap();
        assert_eq!(String::from_utf8(received).unwrap(), text);
    }

    /// The data up to a clean end.
    pub async fn rest(&mut self) -> String {
        let mut rest = String::new();
        self.0.read_to_string(&mut rest).await.unwrap();
        rest
    }

    /// The data up to the end, clean or not.
    pub async fn read_to_end(&mut self) -> String {
        let mut rest = Vec::new();
        let _ = self.0.read_to_end(&mut rest).await;
        String::from_utf8(rest).unwrap()
    }

    /// Waits until there is unread data.
    pub async fn has_unread(&self) {
        self.0.get_ref().get_ref().0.peek(&mut [0]).await.unwrap();
    }

    pub fn has_client_certificate(&self) -> bool {
        self.0.get_ref().get_ref().1.peer_certificates().is_some()
    }
}

/// A listener in front of some endpoints.
pub struct Proxy {
    pub tunnels: Tunnels,
    pub metrics: Arc<Metrics>,
    address: SocketAddr,
    _drain: drain::DrainTrigger,
}

impl Proxy {
    pub fn start(ca: &Ca, endpoints: &[SocketAddr]) -> Self {
        Self::start_with(ca, endpoints, "")
    }

    /// Starts with these keys of `health`.
    pub fn start_with(ca: &Ca, endpoints: &[SocketAddr], health: &str) -> Self {
        let config = load(ca, endpoints, health);
        let (listener, upstream) = (&config.listeners[0], &config.upstreams[0]);
        let terminate = listener.terminate().unwrap();
        let metrics = Metrics::new();
        let credentials = Credentials::load(upstream, &terminate.identities).unwrap();
        let shared = Upstream::new(upstream.clone(), credentials, &metrics);
        let endpoints = upstream.endpoints.iter().map(|address| {
            let metrics = metrics.endpoint(&shared.name, &address.to_string());
            Endpoint::new(&shared.name, address, None, metrics).unwrap()
        });
        shared.set_endpoints(endpoints.collect());
        let pool = Pool::new(Arc::new(shared));
        let tunnels = Tunnels::default();
        let (trigger, drain) = drain::channel();
        let slots = pool.upstream().credentials.slots();
        let service = ListenerService {
            upstream: Rc::new(UpstreamClient::new(
                pool,
                Arc::clone(&metrics),
                request_body::budget(&metrics),
            )),
            credentials: CredentialSelector {
                slots,
                listener: listener.name.clone(),
                tokens: Rc::default(),
            },
            metrics: metrics.listener(&listener.name),
            access_log: AccessLog::Off,
            resume_groups: Vec::new(),
            limits: listener.limits().clone(),
            request_limits: terminate.limits.requests.clone(),
            tunnels: tunnels.clone(),
            drain: drain.clone(),
        };
        let tls = Arc::new(ServingTls::new(LoadedServingTls::load(terminate).unwrap()));
        let worker =
            Rc::new(HttpsServer::new(listener.name.clone(), Rc::new(service), tls, drain.clone()));
        let socket = listening::listen((Ipv4Addr::LOCALHOST, 0).into(), false).unwrap();
        let address = socket.local_addr().unwrap();
        spawn_local(worker.accept(tokio::net::TcpListener::from_std(socket).unwrap(), drain));
        Self { tunnels, metrics, address, _drain: trigger }
    }

    /// A client without a certificate.
    pub async fn client(&self, ca: &Ca) -> Connection {
        self.connect(ca, None).await
    }

    /// A client with the certificate of the configured identity.
    pub async fn node(&self, ca: &Ca) -> Connection {
        self.client_with(ca, "node").await
    }

    /// A client with the certificate in this file.
    pub async fn client_with(&self, ca: &Ca, file: &str) -> Connection {
        self.connect(ca, Some(pem_files::load_cert(&ca.paths(file)).unwrap())).await
    }

    async fn connect(&self, ca: &Ca, certificate: Option<pem_files::LoadedCert>) -> Connection {
        let roots = pem_files::load_ca(&ca.path("ca.crt")).unwrap();
        let tls = client_tls(&roots, certificate.as_ref()).http1;
        let stream = TcpStream::connect(self.address).await.unwrap();
        let name = "127.0.0.1".try_into().unwrap();
        let stream = TlsConnector::from(tls).connect(name, stream).await.unwrap();
        Connection(BufReader::new(stream.into()))
    }
}

fn load(ca: &Ca, endpoints: &[SocketAddr], health: &str) -> config::Config {
    let dir = ca.dir.path().display();
    let list: Vec<_> = endpoints.iter().map(|endpoint| format!("'{endpoint}'")).collect();
    let list = list.join(", ");
    let text = format!(
        "upstreams: [{{name: u, endpoints: [{list}], tls: {{ca_file: '{dir}/ca.crt'}}, \
         health: {{{health}}}}}]\n\
         listeners: [{{name: l, bind: ['127.0.0.1:1'], upstream: u, \
         tls: {{cert_file: '{dir}/server.crt', key_file: '{dir}/server.key'}}, \
         client_ca_file: '{dir}/ca.crt', \
         identities: [{{cert_file: '{dir}/node.crt', key_file: '{dir}/node.key'}}]}}]\n"
    );
    let path = ca.path("jackstay.yaml");
    std::fs::write(&path, text).unwrap();
    config::load(&path, [], &Overrides::default()).unwrap().config
}

/// One peer, and jackstay in front of it.
pub async fn scene() -> (Ca, Peer, Proxy) {
    let ca = Ca::new();
    let peer = Peer::start(&ca).await;
    let proxy = Proxy::start(&ca, &[peer.address()]);
    (ca, peer, proxy)
}

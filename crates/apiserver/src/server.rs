//! One apiserver of a cluster, without a thread and without a socket of its own.
//!
//! [`ApiServer::serve`] runs on the caller's runtime, on sockets of the kernel or of a simulated network. All its tasks
//! belong to the current [`tokio::task::LocalSet`]: a set that is not polled is a process after SIGSTOP, and the drop
//! of the set is SIGKILL.

use crate::cluster::Cluster;
use crate::connection;
use crate::gateway::{Gateway, Refused};
use crate::lock;
use crate::pki::{Issued, Pki};
use crate::requested_certificate::RequestedCertificate;
use crate::state::{Counters, Faults, Phase, ServerState};
use jackstay_sys::sockets::stream::{TcpListener, TcpStream};
use rustls::RootCertStore;
use rustls::crypto::CryptoProvider;
use rustls::server::{ServerSessionMemoryCache, WebPkiClientVerifier};
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::Instant;

/// Pause after a failed accept, and between two looks at the open connections of a server that shuts down.
const PAUSE: Duration = Duration::from_millis(10);
/// The number of TLS sessions that can be resumed, as rustls has it by default.
const SESSIONS: usize = 256;

/// Settings of a server.
pub struct Options {
    /// The name in audit records.
    pub name: String,
    /// The version that it reports, such as `v1.33.0`.
    pub version: String,
    /// The address that [`crate::start`] listens on. Port 0 selects a free port; `restart` uses the same port again.
    pub bind: SocketAddr,
    /// Whether HTTP/2 is offered by ALPN.
    pub http2: bool,
    /// Whether watches that begin with all objects are compressed for clients that accept gzip.
    pub compresses_watch_lists: bool,
    /// Whether large responses are compressed for clients that accept gzip.
    pub compresses_responses: bool,
    /// The serving certificate; by default one is issued for loopback.
    pub certificate: Option<Issued>,
    /// What forwards the requests to it.
    pub gateway: Gateway,
}

impl Options {
    /// Settings like kube-apiserver's, on a free port of 127.0.0.1.
    pub fn named(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            version: "v1.33.0-demo".to_owned(),
            bind: (Ipv4Addr::LOCALHOST, 0).into(),
            http2: true,
            compresses_watch_lists: true,
            compresses_responses: false,
            certificate: None,
            gateway: Gateway::default(),
        }
    }
}

/// A server; clones are the same server. Its faults and counters outlive a restart.
#[derive(Clone)]
pub struct ApiServer {
    state: Arc<ServerState>,
}

impl ApiServer {
    /// A server for `cluster` that accepts client certificates issued by `pki`. `options.bind` is not used.
    ///
    /// # Errors
    /// The certificate cannot be used.
    pub fn new(cluster: &Cluster, pki: &Pki, options: Options) -> io::Result<Self> {
        let certificate = match options.certificate {
            Some(certificate) => certificate,
            None => pki.server()?,
        };
        let mut roots = RootCertStore::empty();
        roots.add(pki.ca_der()).map_err(io::Error::other)?;
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let verifier = WebPkiClientVerifier::builder_with_provider(roots.into(), provider.clone())
            .build()
            .map_err(io::Error::other)?;
        let time = cluster.clock().time_provider();
        let mut tls = rustls::ServerConfig::builder_with_details(provider, time)
            .with_safe_default_protocol_versions()
            .map_err(io::Error::other)?
            .with_client_cert_verifier(Arc::new(RequestedCertificate(verifier.clone())))
            .with_single_cert(vec![certificate.cert_der()], certificate.key_der())
            .map_err(io::Error::other)?;
        tls.alpn_protocols = if options.http2 {
            vec![b"h2".to_vec(), b"http/1.1".to_vec()]
        } else {
            vec![b"http/1.1".to_vec()]
        };
        let state = ServerState {
            name: options.name,
            gateway: options.gateway,
            refused: Refused::default(),
            compresses_watch_lists: options.compresses_watch_lists,
            compresses_responses: options.compresses_responses,
            version: Mutex::new(options.version),
            cluster: cluster.clone(),
            tls: Mutex::new(Arc::new(tls)),
            verifier,
            counters: Counters::default(),
            faults: watch::Sender::default(),
            cached: cluster.version().into(),
            compacted: 0.into(),
            end_watches: watch::Sender::default(),
            goaway: watch::Sender::default(),
            reset: watch::Sender::default(),
            phase: watch::Sender::new(Phase::Running),
        };
        Ok(Self { state: Arc::new(state) })
    }

    /// Serves until [`Self::drain`] has ended. Its connections are tasks of the current [`tokio::task::LocalSet`],
    /// whose drop closes them. After that, the server can serve again with a new listener: that is a restart.
    ///
    /// # Panics
    /// The future panics outside a `LocalSet`.
    pub fn serve(&self, listener: TcpListener) -> impl Future<Output = ()> + use<> {
        self.prepare();
        serve(self.state.clone(), listener)
    }

    /// Begins a shutdown as kube-apiserver does on SIGTERM: `/readyz` fails, the listener closes, every connection gets
    /// GOAWAY, watches end, and requests in flight may finish within `grace`.
    pub fn drain(&self, grace: Duration) {
        self.end(Phase::Draining(grace));
    }

    /// The name given in the options.
    pub fn name(&self) -> &str {
        &self.state.name
    }

    /// The requests that its gateway did not forward: method, host and target of each.
    pub fn refused_by_gateway(&self) -> Vec<String> {
        self.state.refused.all()
    }

    /// Counters since the server was created.
    pub fn counters(&self) -> &Counters {
        &self.state.counters
    }

    /// Changes the version that it reports, for a server that is started again after an upgrade.
    pub fn set_version(&self, version: &str) {
        version.clone_into(&mut lock(&self.state.version));
    }

    /// Shows this certificate on new connections. TLS sessions of earlier ones can be resumed, as with kube-apiserver.
    ///
    /// # Errors
    /// The certificate cannot be used.
    pub fn set_certificate(&self, certificate: &Issued) -> io::Result<()> {
        let mut tls = lock(&self.state.tls);
        let key = certified_key(certificate, tls.crypto_provider())?;
        Arc::make_mut(&mut tls).cert_resolver = Arc::new(SingleCertAndKey::from(key));
        Ok(())
    }

    /// Changes the faults in force.
    pub fn set_faults(&self, change: impl FnOnce(&mut Faults)) {
        // The watch cache does not go back when its lag grows.
        self.state.cached_version();
        self.state.faults.send_modify(change);
    }

    /// The version that its watch cache has reached; that of the store without [`Faults::cache_lag`].
    pub fn cached_version(&self) -> u64 {
        self.state.cached_version()
    }

    /// Ends every watch cleanly, as its timeout does.
    pub fn end_watches(&self) {
        self.state.end_watches.send_replace(());
    }

    /// Sends a graceful GOAWAY on every HTTP/2 connection (`Connection: close` on HTTP/1.1).
    pub fn goaway(&self) {
        self.state.goaway.send_replace(());
    }

    /// Resets every connection; new connections work.
    pub fn reset_connections(&self) {
        self.state.reset.send_replace(());
    }

    /// Drops the watch history of this server only: a watch from an older version gets 410 on this server
    /// and succeeds on the others. Returns the current version.
    pub fn compact(&self) -> u64 {
        let version = self.state.cluster.version();
        self.state.compacted.store(version, Relaxed);
        version
    }

    /// Makes a server ready to be started: it knows no TLS sessions, and its watch cache begins with the present state
    /// of the store.
    pub(super) fn prepare(&self) {
        let sessions = ServerSessionMemoryCache::new(SESSIONS);
        Arc::make_mut(&mut lock(&self.state.tls)).session_storage = sessions;
        self.state.cached.store(self.state.cluster.version(), Relaxed);
        self.state.phase.send_replace(Phase::Running);
    }

    /// Ends [`serve`], at once or after a shutdown.
    pub(super) fn end(&self, phase: Phase) {
        self.state.phase.send_replace(phase);
    }

    /// Serves after [`Self::prepare`].
    pub(super) fn serve_prepared(&self, listener: TcpListener) -> impl Future<Output = ()> + use<> {
        serve(self.state.clone(), listener)
    }
}

fn certified_key(certificate: &Issued, provider: &CryptoProvider) -> io::Result<CertifiedKey> {
    let (chain, key) = (vec![certificate.cert_der()], certificate.key_der());
    CertifiedKey::from_der(chain, key, provider).map_err(io::Error::other)
}

/// Accepts connections until the server is killed or has shut down.
async fn serve(server: Arc<ServerState>, listener: TcpListener) {
    let mut listener = Some(listener);
    let mut phase = server.phase.subscribe();
    phase.mark_changed();
    let mut deadline = None;
    loop {
        tokio::select! {
            biased;
            _ = phase.changed() => match *phase.borrow_and_update() {
                Phase::Running => {}
                Phase::Killed => return,
                Phase::Draining(grace) => {
                    listener = None;
                    server.goaway.send_replace(());
                    server.end_watches.send_replace(());
                    deadline = Some(Instant::now() + grace);
                }
            },
            accepted = accept(listener.as_ref()) => {
                if let Ok((stream, _)) = accepted {
                    tokio::task::spawn_local(connection::serve(stream, server.clone()));
                } else {
                    tokio::time::sleep(PAUSE).await;
                }
            }
            () = tokio::time::sleep(PAUSE), if deadline.is_some() => {
                let idle = server.counters.open.load(Relaxed) == 0;
                if idle || deadline.is_some_and(|at| Instant::now() >= at) {
                    return;
                }
            }
        }
    }
}

async fn accept(listener: Option<&TcpListener>) -> io::Result<(TcpStream, SocketAddr)> {
    match listener {
        Some(listener) => listener.accept().await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests;

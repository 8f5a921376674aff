//! The plan of an examination: the endpoints of a configuration, of a kubeconfig or of the command line,
//! each with the CA that verifies it and the credential to present.

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use http::HeaderValue;
use http::uri::Authority;
pub use jackstay_config::api_root::ApiRoot;
use jackstay_config::api_root::default_authority;
use jackstay_config::{CertPaths, Config, IdentitySource, Listener, Upstream};
use jackstay_core::discovery::address::{split_zone, tls_name};
use jackstay_core::request::path_prefix::{PathPrefix, PathPrefixError};
use jackstay_kubeconfig::{
    Credential, KubeconfigError, PemSource, ResolvedContext, ServerUrl, client_certificate,
    sent_authority,
};
use jackstay_net::tls::certificate::{CertInfo, Validity};
use jackstay_net::tls::file_error::TlsFileError;
use jackstay_net::tls::pem_files::{LoadedCert, ca_from_pem, cert_from_pem, load_ca, load_cert};
use jackstay_net::tls::verification::TrustedCas;
use jackstay_sys::sockets::zone;
use jackstay_sys::utc::wall_clock;
use rustls::pki_types::ServerName;

use super::observations::EndpointSource;
use super::probe::PeerConfig;
use super::verify::RecordingVerifier;
use crate::kubeconfig::setup::system_cas;

/// An endpoint to examine.
pub struct Target {
    /// Address as the user or the cluster gave it.
    pub(super) address: String,
    /// Host of the address, without brackets.
    pub(super) host: String,
    pub(super) port: u16,
    /// Whether the user or the cluster named the endpoint.
    pub(super) source: EndpointSource,
    /// The name that its certificate must contain.
    pub(super) server_name: String,
    trust: Trust,
    pub(super) verifier: Arc<RecordingVerifier>,
    pub(super) peer: PeerConfig,
    /// What clients send as host through listeners that pass their connections through.
    pub(super) clients: Vec<Authority>,
}

impl fmt::Debug for Target {
    /// Omits the credential.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Target")
            .field("address", &self.address)
            .field("server_name", &self.server_name)
            .finish_non_exhaustive()
    }
}

/// Why an endpoint cannot be examined.
#[derive(Debug, thiserror::Error)]
pub enum TargetError {
    /// A certificate, key or CA cannot be used.
    #[error("{0}")]
    File(#[from] TlsFileError),
    /// A PEM file of a kubeconfig cannot be read.
    #[error("{0}")]
    Pem(#[from] KubeconfigError),
    /// The token file cannot be read.
    #[error("cannot read {0}: {1}")]
    TokenFile(PathBuf, #[source] io::Error),
    /// The text in the file, or in the kubeconfig, cannot be a bearer token.
    #[error("{}", no_token(.0.as_deref()))]
    Token(Option<PathBuf>),
    /// The name to verify is neither a DNS name nor an IP address.
    #[error("{0:?} cannot be verified in a certificate")]
    Name(String),
    /// TLS cannot be configured.
    #[error("{0}")]
    Tls(#[source] rustls::Error),
}

/// The text for a file, or for a kubeconfig, without a bearer token.
fn no_token(file: Option<&Path>) -> String {
    let place = file.map(|file| format!("{}: ", file.display())).unwrap_or_default();
    format!("{place}not a bearer token")
}

/// The CA that verifies servers and the credential for verified servers.
#[derive(Clone, Default)]
pub struct Trust {
    roots: Option<Arc<TrustedCas>>,
    certificate: Option<Arc<LoadedCert>>,
    token: Option<HeaderValue>,
}

/// Everything to examine.
#[derive(Debug, Default)]
pub struct ExaminationPlan {
    /// Endpoints of the user.
    pub targets: Vec<Target>,
    /// Addresses where jackstay is to listen.
    pub listeners: Vec<PlannedListener>,
    /// Addresses where a jackstay listens already, from its `/status`.
    pub running: Vec<SocketAddr>,
    /// Connections that the configuration allows (`limits.max_connections` of all listeners).
    pub wanted_connections: u64,
    /// The directory of kubelet's static pods, if the images of those of jackstay are to be checked.
    pub static_pods: Option<PathBuf>,
    /// Errors of the configuration. If there are any, the plan has no endpoint of it.
    pub configuration_errors: Vec<String>,
    /// Credentials and CAs that are not used, and why.
    pub notes: Vec<String>,
}

/// An address where jackstay is to listen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedListener {
    /// The name of the listener, or of the admin endpoint.
    pub name: String,
    /// The address to bind.
    pub bind: SocketAddr,
    /// Whether the host may lack the address for now (`IP_FREEBIND`).
    pub freebind: bool,
}

/// Files with a CA and a credential.
#[derive(Debug, Clone, Default)]
pub struct CredentialFiles {
    /// The CA that verifies servers.
    pub ca: Option<PathBuf>,
    /// A client certificate and its key.
    pub certificate: Option<CertPaths>,
    /// A bearer token.
    pub token: Option<PathBuf>,
}

/// Whether the exec plugin of a kubeconfig user is run to obtain a credential.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExecPlugins {
    /// The plugin is run, because the user has requested something that needs a credential.
    Run,
    /// The plugin is not run: it may open a browser, ask for a second factor or take long.
    Skip,
}

/// Where the API begins of a server with this URL, which has the path `path`.
///
/// # Errors
/// Clients do not send such a path.
pub fn root_of_url(url: &str, path: &str) -> Result<ApiRoot, PathPrefixError> {
    Ok(ApiRoot {
        authority: sent_authority(url).unwrap_or_else(default_authority),
        prefix: PathPrefix::of_url_path(path)?,
    })
}

/// Where the API of a context begins.
pub fn root_of_context(context: &ResolvedContext) -> ApiRoot {
    ApiRoot {
        authority: context.authority.clone().unwrap_or_else(default_authority),
        prefix: context.path_prefix.clone(),
    }
}

impl Trust {
    /// Loads the CA and the credential from files.
    ///
    /// # Errors
    /// A file cannot be used.
    pub fn of_files(files: &CredentialFiles) -> Result<Self, TargetError> {
        let roots = files.ca.as_deref().map(load_ca).transpose()?;
        let certificate = files.certificate.as_ref().map(load_cert).transpose()?;
        Ok(Self {
            roots: roots.map(|ca| ca.roots),
            certificate: certificate.map(Arc::new),
            token: files.token.as_deref().map(token_of_file).transpose()?,
        })
    }

    /// Loads the CA and the credential of a kubeconfig context. A kind of credential that the doctor
    /// does not support becomes a note.
    ///
    /// # Errors
    /// A file or inline data cannot be used.
    pub fn of_context(
        context: &ResolvedContext,
        plugins: ExecPlugins,
        notes: &mut Vec<String>,
    ) -> Result<Self, TargetError> {
        let mut trust = Self::default();
        match &context.ca {
            Some(ca) => {
                let origin = ca.origin(format!("cluster {:?} of the kubeconfig", context.cluster));
                trust.roots = Some(ca_from_pem(&origin, &ca.read()?)?.roots);
            }
            None if context.insecure => notes.push(
                "insecure-skip-tls-verify is set: nothing is verified, no credential is sent"
                    .to_owned(),
            ),
            None => match system_cas() {
                Some(file) => trust.roots = Some(load_ca(&file)?.roots),
                None => notes.push(
                    "the cluster names no CA and this system has none: nothing is verified, no \
                     credential is sent"
                        .to_owned(),
                ),
            },
        }
        match &context.credential {
            Credential::Certificate(certificate, key) => {
                let read = |pem: &PemSource| {
                    let user = format!("user {:?} of the kubeconfig", context.user);
                    Ok::<_, TargetError>((pem.origin(user), pem.read()?))
                };
                let (certificate, key) = (read(certificate)?, read(key)?);
                let loaded = cert_from_pem((&certificate.0, &certificate.1), (&key.0, &key.1));
                trust.certificate = Some(Arc::new(loaded?));
            }
            Credential::Token(token) => trust.token = Some(token_header(token, None)?),
            Credential::TokenFile(file) => trust.token = Some(token_of_file(file)?),
            Credential::Anonymous => {}
            Credential::Exec(_) if plugins == ExecPlugins::Skip => {}
            // Without a CA no credential may be sent, so the plugin is not run.
            Credential::Exec(plugin) if trust.roots.is_some() => match plugin.run() {
                Ok(yielded) => {
                    let token = yielded.token.as_deref();
                    trust.token = token.map(|token| token_header(token, None)).transpose()?;
                    if let Some((cert_pem, key_pem)) = yielded.certificate {
                        let origin = PathBuf::from(format!("credential of {:?}", plugin.command));
                        let (certificate, key) = (cert_pem.as_bytes(), key_pem.as_bytes());
                        let loaded = cert_from_pem((&origin, certificate), (&origin, key));
                        trust.certificate = Some(Arc::new(loaded?));
                    }
                }
                Err(error) => {
                    notes.push(format!("{error}: requests that need a credential are left out"));
                }
            },
            other => notes.push(format!(
                "{} is not supported here: requests that need a credential are left out",
                other.describe()
            )),
        }
        Ok(trust)
    }

    /// Whether there is a CA that verifies servers.
    pub fn verifies(&self) -> bool {
        self.roots.is_some()
    }

    /// The CA alone.
    #[must_use]
    pub fn without_credential(&self) -> Self {
        Self { roots: self.roots.clone(), ..Self::default() }
    }

    /// The CA of an upstream and the credential that jackstay presents to it.
    fn of_upstream(config: &Config, upstream: &Upstream) -> Result<Self, TargetError> {
        let readyz = &upstream.health.readyz;
        let identities = config
            .listeners
            .iter()
            .filter(|listener| listener.upstream == upstream.name)
            .filter_map(|listener| listener.terminate())
            .flat_map(|terminate| &terminate.identities);
        let token = readyz.token_file.clone();
        let probe = readyz.cert.clone().map(IdentitySource::Files);
        let has_token = token.is_some();
        let certificates = probe.iter().chain(identities.filter(|_| !has_token));
        let mut trust = Self::of_files(&CredentialFiles {
            ca: upstream.tls.ca_file.clone(),
            certificate: None,
            token,
        })?;
        // The first that exists and has not expired, or else the first that exists: kubelet writes its certificate only
        // after it has joined the cluster.
        let mut loaded = Vec::new();
        for source in certificates.filter(|source| source.file().exists()) {
            loaded.push(client_certificate::load(source)?);
        }
        let now = wall_clock();
        let valid = loaded.iter().position(|loaded| loaded.info.validity(now) == Validity::Valid);
        trust.certificate = loaded.into_iter().nth(valid.unwrap_or(0)).map(Arc::new);
        Ok(trust)
    }
}

fn token_of_file(file: &Path) -> Result<HeaderValue, TargetError> {
    let text = std::fs::read_to_string(file)
        .map_err(|error| TargetError::TokenFile(file.to_owned(), error))?;
    token_header(text.trim(), Some(file))
}

/// The value of the header with a token, which is from `file` if that is given.
fn token_header(token: &str, file: Option<&Path>) -> Result<HeaderValue, TargetError> {
    let mut value = HeaderValue::from_str(&format!("Bearer {token}"))
        .map_err(|_| TargetError::Token(file.map(ToOwned::to_owned)))?;
    value.set_sensitive(true);
    Ok(value)
}

impl Target {
    /// Prepares TLS for an endpoint.
    ///
    /// # Errors
    /// The name is not a DNS name or IP address.
    pub fn new(
        server: &ServerUrl,
        source: EndpointSource,
        server_name: Option<&str>,
        trust: &Trust,
    ) -> Result<Self, TargetError> {
        let name = server_name.unwrap_or(tls_name(&server.host));
        let parsed = ServerName::try_from(name.to_owned())
            .map_err(|_| TargetError::Name(name.to_owned()))?;
        let verifier = RecordingVerifier::new(trust.roots.as_ref());
        // An unverified server gets no credential.
        let token = trust.token.clone().filter(|_| verifier.verifies());
        // An apiserver prefers the certificate where both are present.
        let certificate = trust.certificate.as_deref().filter(|_| verifier.verifies());
        let peer = PeerConfig {
            server_name: parsed,
            tls: verifier.client(certificate).map_err(TargetError::Tls)?,
            authenticated: token.is_some() || certificate.is_some(),
            token,
            root: ApiRoot::default(),
        };
        Ok(Self {
            address: server.address(),
            host: server.host.clone(),
            port: server.port,
            source,
            server_name: name.to_owned(),
            trust: trust.clone(),
            verifier,
            peer,
            clients: Vec::new(),
        })
    }

    /// The same endpoint, whose API begins there.
    #[must_use]
    pub fn with_root(mut self, root: ApiRoot) -> Self {
        self.peer.root = root;
        self
    }

    /// The hosts to which a server at this address may answer.
    pub(super) fn possible_authorities(&self) -> Vec<Authority> {
        let host = self.address.rsplit_once(':').map_or(&*self.address, |(host, _)| host);
        let port = format!("{}:{}", self.server_name, self.port);
        let texts = [self.address.as_str(), host, &port, &self.server_name];
        let mut found: Vec<Authority> = Vec::new();
        for authority in texts.into_iter().filter_map(|text| Authority::try_from(text).ok()) {
            if !found.contains(&authority) {
                found.push(authority);
            }
        }
        found
    }

    /// The socket address of the host, which has this IP address.
    pub(super) fn socket_address(&self, ip: IpAddr) -> SocketAddr {
        zone::socket_address(ip, self.port, split_zone(&self.host).1)
    }

    /// The client certificate that is presented to the server.
    pub(super) fn client_certificate(&self) -> Option<&CertInfo> {
        let certificate = self.trust.certificate.as_ref().filter(|_| self.verifier.verifies());
        certificate.map(|loaded| &loaded.info)
    }

    /// The same endpoint without verification and without a credential.
    pub(super) fn unverified(&self) -> Result<Self, TargetError> {
        let server = ServerUrl { host: self.host.clone(), port: self.port, path: String::new() };
        let target = Self::new(&server, self.source, Some(&self.server_name), &Trust::default())?;
        Ok(target.with_root(self.peer.root.clone()))
    }

    /// Another apiserver of the same cluster, which the cluster names. It is verified by the name of the
    /// Service, which every apiserver's certificate contains.
    pub(super) fn sibling(&self, address: SocketAddr) -> Result<Self, TargetError> {
        let server =
            ServerUrl { host: address.ip().to_string(), port: address.port(), path: String::new() };
        Self::new(&server, EndpointSource::Cluster, Some("kubernetes.default.svc"), &self.trust)
    }
}

/// What clients send as host through the listeners in mode passthrough of an upstream: the addresses of the listeners.
/// Clients of a transparent listener connect to the server by its own address.
fn authorities_of_clients(config: &Config, upstream: &Upstream) -> Vec<Authority> {
    let passes = |listener: &&Listener| {
        let is_used = listener.upstreams().any(|name| name == upstream.name);
        is_used && listener.passthrough().is_some() && !listener.transparent
    };
    let binds = config.listeners.iter().filter(passes).flat_map(|listener| &listener.bind);
    let hosts = binds.map(|bind| {
        let (ip, port) = (bind.ip(), bind.port());
        if ip.is_unspecified() { format!("localhost:{port}") } else { bind.to_string() }
    });
    hosts.filter_map(|host| Authority::try_from(host).ok()).collect()
}

/// Plans the examination of everything that a configuration names.
///
/// # Errors
/// A certificate, key or CA cannot be used.
pub fn of_config(config: &Config) -> Result<ExaminationPlan, TargetError> {
    let mut plan = ExaminationPlan::default();
    for upstream in &config.upstreams {
        let trust = Trust::of_upstream(config, upstream)?;
        for endpoint in &upstream.endpoints {
            let server =
                ServerUrl { host: endpoint.host.clone(), port: endpoint.port, path: String::new() };
            let name = upstream.tls.server_name.as_deref();
            let mut target = Target::new(&server, EndpointSource::Given, name, &trust)?;
            target.clients = authorities_of_clients(config, upstream);
            plan.targets.push(target.with_root(ApiRoot::from(upstream)));
        }
    }
    for listener in &config.listeners {
        let name = format!("listener {}", listener.name);
        let freebind = listener.freebind;
        let planned =
            |bind: &SocketAddr| PlannedListener { name: name.clone(), bind: *bind, freebind };
        plan.listeners.extend(listener.bind.iter().map(planned));
        plan.wanted_connections += listener.limits().max_connections as u64;
    }
    let name = "the admin endpoint".to_owned();
    plan.listeners.push(PlannedListener { name, bind: config.admin.bind, freebind: false });
    Ok(plan)
}

//! What to examine: endpoints with what is needed to verify them, from a configuration, from a
//! kubeconfig, or from addresses alone.

use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use http::HeaderValue;
use rustls::RootCertStore;
use rustls::pki_types::ServerName;

use super::observations::Source;
use super::probe::Peer;
use super::verify::Verifier;
use crate::config::{CertPaths, Config, Upstream};
use crate::kubeconfig::system_cas;
use crate::kubeconfig::{Credential, PemSource, ResolvedContext, ServerUrl};
use crate::net::tls::certificate::CertInfo;
use crate::net::tls::pem_files::{LoadedCert, ca_from_pem, cert_from_pem, load_ca, load_cert};

/// How one endpoint is examined.
pub struct Target {
    /// Its address as it was given.
    pub address: String,
    /// Host without brackets.
    pub host: String,
    /// Port.
    pub port: u16,
    /// How it was found.
    pub source: Source,
    /// The name it is verified against.
    pub server_name: String,
    trust: Trust,
    pub(super) verifier: Arc<Verifier>,
    pub(super) peer: Peer,
}

impl fmt::Debug for Target {
    /// Without the credential.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Target")
            .field("address", &self.address)
            .field("server_name", &self.server_name)
            .finish_non_exhaustive()
    }
}

/// What servers are verified with, and what they are shown.
#[derive(Clone, Default)]
pub struct Trust {
    roots: Option<Arc<RootCertStore>>,
    certificate: Option<Arc<LoadedCert>>,
    token: Option<HeaderValue>,
}

/// Everything to examine.
#[derive(Debug, Default)]
pub struct Plan {
    /// The endpoints.
    pub targets: Vec<Target>,
    /// Where jackstay is to listen.
    pub places: Vec<Place>,
    /// Where a jackstay listens already, as it says itself.
    pub running: Vec<SocketAddr>,
    /// Connections that the configuration allows.
    pub wanted_connections: u64,
    /// Mistakes of the configuration.
    pub configuration: Vec<String>,
    /// What could not be used, for people.
    pub notes: Vec<String>,
}

/// A place where jackstay is to listen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// What for.
    pub what: String,
    /// Where.
    pub bind: SocketAddr,
    /// Whether it may be an address that this host does not have yet.
    pub freebind: bool,
}

/// Files that the command line names.
#[derive(Debug, Clone, Default)]
pub struct Files {
    /// The CA that servers are verified with.
    pub ca: Option<PathBuf>,
    /// A client certificate and its key.
    pub certificate: Option<CertPaths>,
    /// A bearer token.
    pub token: Option<PathBuf>,
}

/// Whether the exec plugin of a user is run for its credential.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExecPlugins {
    /// It is: the user has asked for what needs a credential.
    Run,
    /// It is not: a plugin may open a browser, ask for a second factor, or take long.
    Leave,
}

impl Trust {
    /// From files.
    ///
    /// # Errors
    /// Which file cannot be used, and why.
    pub fn of_files(files: &Files) -> Result<Self, String> {
        let roots = files.ca.as_deref().map(load_ca).transpose().map_err(|e| e.to_string())?;
        let certificate = files.certificate.as_ref().map(load_cert).transpose();
        Ok(Self {
            roots: roots.map(|ca| ca.roots),
            certificate: certificate.map_err(|e| e.to_string())?.map(Arc::new),
            token: files.token.as_deref().map(token_of_file).transpose()?,
        })
    }

    /// From a context of a kubeconfig; what cannot be used here becomes a note.
    ///
    /// # Errors
    /// A file or a datum cannot be read.
    pub fn of_access(
        access: &ResolvedContext,
        plugins: ExecPlugins,
        notes: &mut Vec<String>,
    ) -> Result<Self, String> {
        let mut trust = Self::default();
        let place = PathBuf::from(format!("cluster {:?} of the kubeconfig", access.cluster));
        match &access.ca {
            Some(ca) => {
                let pem = ca.read().map_err(|e| e.to_string())?;
                let origin = if let PemSource::File(file) = ca { file } else { &place };
                trust.roots = Some(ca_from_pem(origin, &pem).map_err(|e| e.to_string())?.roots);
            }
            None if access.insecure => notes.push(
                "the cluster switches verification off: nothing is verified, no credential sent"
                    .to_owned(),
            ),
            None => match system_cas() {
                Some(file) => trust.roots = Some(load_ca(&file).map_err(|e| e.to_string())?.roots),
                None => notes.push(
                    "the cluster names no CA and this system has none: nothing is verified, no \
                     credential sent"
                        .to_owned(),
                ),
            },
        }
        match &access.credential {
            Credential::Certificate(certificate, key) => {
                let user = PathBuf::from(format!("user {:?} of the kubeconfig", access.user));
                let origin = |pem: &PemSource| match pem {
                    PemSource::File(file) => file.clone(),
                    PemSource::Inline(_) => user.clone(),
                };
                let read = |pem: &PemSource| pem.read().map_err(|e| e.to_string());
                let (cert_pem, key_pem) = (read(certificate)?, read(key)?);
                let loaded =
                    cert_from_pem((&origin(certificate), &cert_pem), (&origin(key), &key_pem));
                trust.certificate = Some(Arc::new(loaded.map_err(|e| e.to_string())?));
            }
            Credential::Token(token) => trust.token = Some(token_header(token)?),
            Credential::TokenFile(file) => trust.token = Some(token_of_file(file)?),
            Credential::Anonymous => {}
            Credential::Exec(_) if plugins == ExecPlugins::Leave => {}
            // It is asked only where its answer may be shown.
            Credential::Exec(plugin) if trust.roots.is_some() => match plugin.run() {
                Ok(yielded) => {
                    trust.token = yielded.token.as_deref().map(token_header).transpose()?;
                    if let Some((cert_pem, key_pem)) = yielded.certificate {
                        let origin = PathBuf::from(format!("what {:?} yielded", plugin.command));
                        let loaded = cert_from_pem(
                            (&origin, cert_pem.as_bytes()),
                            (&origin, key_pem.as_bytes()),
                        );
                        trust.certificate = Some(Arc::new(loaded.map_err(|e| e.to_string())?));
                    }
                }
                Err(error) => {
                    notes.push(format!("{error}: nothing is asked that needs a credential"));
                }
            },
            other => notes.push(format!(
                "{} is not used here: nothing is asked that needs a credential",
                other.describe()
            )),
        }
        Ok(trust)
    }

    /// The same without anything to show.
    #[must_use]
    pub fn without_credential(&self) -> Self {
        Self { roots: self.roots.clone(), ..Self::default() }
    }

    fn of_upstream(config: &Config, upstream: &Upstream) -> Result<Self, String> {
        let readyz = &upstream.health.readyz;
        let identities = config
            .listeners
            .iter()
            .filter(|listener| listener.upstream == upstream.name)
            .filter_map(|listener| listener.terminate())
            .flat_map(|terminate| &terminate.identities);
        let ca = upstream.tls.ca_file.clone();
        let token = readyz.token_file.clone();
        // The first identity that exists already: kubelet's comes when it has joined.
        let mut certificates = readyz.cert.iter().chain(identities.filter(|_| token.is_none()));
        let certificate = certificates.find(|paths| paths.cert_file.exists()).cloned();
        Self::of_files(&Files { ca, certificate, token })
    }
}

fn token_of_file(file: &Path) -> Result<HeaderValue, String> {
    let text = std::fs::read_to_string(file)
        .map_err(|error| format!("cannot read {}: {error}", file.display()))?;
    token_header(text.trim()).map_err(|error| format!("{}: {error}", file.display()))
}

fn token_header(token: &str) -> Result<HeaderValue, String> {
    let mut value = HeaderValue::from_str(&format!("Bearer {token}"))
        .map_err(|_| "not a bearer token".to_owned())?;
    value.set_sensitive(true);
    Ok(value)
}

impl Target {
    /// An endpoint to examine.
    ///
    /// # Errors
    /// The name cannot be verified in a certificate.
    pub fn new(
        server: &ServerUrl,
        source: Source,
        server_name: Option<&str>,
        trust: &Trust,
    ) -> Result<Self, String> {
        let name = server_name.unwrap_or(&server.host);
        let parsed = ServerName::try_from(name.to_owned())
            .map_err(|_| format!("{name:?} cannot be verified in a certificate"))?;
        let verifier = Verifier::new(trust.roots.clone())?;
        // Nobody unverified is shown a secret.
        let token = trust.token.clone().filter(|_| verifier.verifies());
        // The certificate wins in the apiserver, and a token under it would be wasted.
        let certificate = trust.certificate.as_deref().filter(|_| verifier.verifies());
        let peer = Peer {
            server_name: parsed,
            tls: verifier.client(certificate)?,
            authenticated: token.is_some() || certificate.is_some(),
            token,
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
        })
    }

    /// The client certificate that it is shown.
    pub(super) fn shown(&self) -> Option<&CertInfo> {
        let certificate = self.trust.certificate.as_ref().filter(|_| self.verifier.verifies());
        certificate.map(|loaded| &loaded.info)
    }

    /// Another apiserver of the same cluster, as the cluster itself names it. Every apiserver's
    /// certificate holds the name of its Service.
    pub(super) fn sibling(&self, address: SocketAddr) -> Result<Self, String> {
        let server =
            ServerUrl { host: address.ip().to_string(), port: address.port(), path: String::new() };
        Self::new(&server, Source::Cluster, Some("kubernetes.default.svc"), &self.trust)
    }
}

/// What a configuration is about.
///
/// # Errors
/// A certificate, key or CA cannot be used.
pub fn of_config(config: &Config) -> Result<Plan, String> {
    let mut plan = Plan::default();
    for upstream in &config.upstreams {
        let trust = Trust::of_upstream(config, upstream)?;
        for endpoint in &upstream.endpoints {
            let server =
                ServerUrl { host: endpoint.host.clone(), port: endpoint.port, path: String::new() };
            let name = upstream.tls.server_name.as_deref();
            plan.targets.push(Target::new(&server, Source::Given, name, &trust)?);
        }
    }
    for listener in &config.listeners {
        let what = format!("listener {}", listener.name);
        let freebind = listener.freebind;
        let place = |bind: &SocketAddr| Place { what: what.clone(), bind: *bind, freebind };
        plan.places.extend(listener.bind.iter().map(place));
        plan.wanted_connections += listener.limits.max_connections as u64;
    }
    let what = "the admin endpoint".to_owned();
    plan.places.push(Place { what, bind: config.admin.bind, freebind: false });
    Ok(plan)
}

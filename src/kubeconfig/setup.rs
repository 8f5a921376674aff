//! The other half of a move: the configuration of a jackstay between the local endpoint and the
//! cluster, and the files it names.
//!
//! Everything is decided first, as a list of files, and written afterwards; so what is refused has
//! changed nothing, and what a second run would write again is recognised.

mod serving;

use std::fmt::Write as _;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::server::WebPkiClientVerifier;

use super::access::{Credential, PemSource, ResolvedContext};
use super::load::Error;
use super::tree::{Node, emit};
use crate::net::files::atomic_write::{PRIVATE, PUBLIC};

/// Where distributions keep the CAs that a kubeconfig without one relies on, as Go looks for them
/// (`crypto/x509/root_linux.go`).
const SYSTEM_CAS: [&str; 5] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
    "/etc/ssl/cert.pem",
];

/// The CAs of this system, if it has any.
pub fn system_cas() -> Option<PathBuf> {
    SYSTEM_CAS.iter().map(PathBuf::from).find(|file| file.exists())
}

/// What jackstay does with the TLS of a client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// L4: passes it on.
    Passthrough,
    /// L7: ends it, with a certificate of a local CA.
    Terminate,
}

/// What the user asked for.
#[derive(Debug, Clone)]
pub struct SetupRequest {
    /// L4 or L7.
    pub mode: Mode,
    /// The local endpoint as clients will name it.
    pub host: String,
    /// Its port.
    pub port: u16,
    /// The configuration file; the others go beside it.
    pub config: PathBuf,
    /// Apiservers besides the one in the kubeconfig.
    pub upstreams: Vec<String>,
    /// The name in the certificates of all of them, if not each one's own host.
    pub server_name: Option<String>,
    /// The cluster's CA, where the kubeconfig names none.
    pub ca_file: Option<PathBuf>,
    /// The CA of client certificates, where it is not the cluster's.
    pub client_ca_file: Option<PathBuf>,
    /// Name of this machine, for the serving certificate.
    pub node_name: String,
    /// The time.
    pub now: SystemTime,
}

/// A file to write.
#[derive(Clone, PartialEq, Eq)]
pub struct OutputFile {
    /// Where.
    pub path: PathBuf,
    /// What.
    pub bytes: Vec<u8>,
    /// Its permissions.
    pub mode: u32,
    /// What it is, for people.
    pub what: &'static str,
}

/// What a jackstay for this access needs.
pub struct SetupPlan {
    /// The files, the configuration last.
    pub files: Vec<OutputFile>,
    /// The local CA, PEM, that clients are to trust (terminate only).
    pub local_ca: Option<Vec<u8>>,
    /// What the user should know.
    pub notes: Vec<String>,
}

/// Decides what to write.
///
/// # Errors
/// What cannot be made of this kubeconfig, and what to do about it.
pub fn plan(access: &ResolvedContext, request: &SetupRequest) -> Result<SetupPlan, Error> {
    let dir = request.config.parent().unwrap_or(Path::new("/"));
    let mut plan = SetupPlan { files: Vec::new(), local_ca: None, notes: Vec::new() };
    let binds = binds(&request.host, request.port)?;
    let ca_file = cluster_ca(access, request, dir, &mut plan)?;

    let mut tls = Node::map();
    if let Some(file) = &ca_file {
        tls.set("ca_file", path(file));
    }
    if let Some(name) = &request.server_name {
        tls.set("server_name", Node::text(name));
    }
    let mut endpoints = vec![Node::text(access.server.address())];
    for upstream in &request.upstreams {
        let endpoint = Node::text(upstream);
        if !endpoints.contains(&endpoint) {
            endpoints.push(endpoint);
        }
    }
    let mut upstream = Node::Map(vec![
        ("name".into(), Node::text("control-plane")),
        ("endpoints".into(), Node::List(endpoints)),
    ]);
    if !tls.is_empty() {
        upstream.set("tls", tls);
    }
    let mut listener = Node::Map(vec![
        ("name".into(), Node::text("apiserver")),
        ("bind".into(), Node::List(binds.iter().map(|b| Node::text(b.to_string())).collect())),
        ("upstream".into(), Node::text("control-plane")),
    ]);
    match request.mode {
        Mode::Passthrough => {
            listener.set("mode", Node::text("passthrough"));
            if let Some(readyz) = readyz_of_files(&access.credential)
                && ca_file.is_some()
            {
                upstream.set("health", Node::Map(vec![("readyz".into(), readyz)]));
            }
        }
        Mode::Terminate => {
            listener.set("mode", Node::text("terminate"));
            let tls = serving::files(request, dir, &mut plan)?;
            listener.set("tls", tls);
            identity(access, request, dir, ca_file.as_deref(), &mut listener, &mut plan)?;
            if let Credential::TokenFile(_) = access.credential
                && let Some(readyz) = readyz_of_files(&access.credential)
            {
                upstream.set("health", Node::Map(vec![("readyz".into(), readyz)]));
            }
        }
    }
    let config = Node::Map(vec![
        ("state_dir".into(), path(&dir.join("state"))),
        ("upstreams".into(), Node::List(vec![upstream])),
        ("listeners".into(), Node::List(vec![listener])),
    ]);
    let text = format!(
        "# Written by `jackstay kubeconfig` for the context {:?}.\n{}",
        access.context,
        emit(&config)
    );
    plan.files.push(OutputFile {
        path: request.config.clone(),
        bytes: text.into_bytes(),
        mode: PUBLIC,
        what: "the configuration of jackstay",
    });
    Ok(plan)
}

fn path(path: &Path) -> Node {
    Node::text(path.to_string_lossy())
}

/// What to listen on for clients that connect to `host`. A name other than `localhost` is
/// somebody else's to resolve.
fn binds(host: &str, port: u16) -> Result<Vec<SocketAddr>, Error> {
    match host.parse::<IpAddr>() {
        Ok(ip) => Ok(vec![SocketAddr::new(ip, port)]),
        Err(_) if host == "localhost" => {
            let both = [IpAddr::from(Ipv4Addr::LOCALHOST), Ipv6Addr::LOCALHOST.into()];
            Ok(both.map(|ip| SocketAddr::new(ip, port)).to_vec())
        }
        Err(_) => Err(Error::from(format!(
            "--server {host}:{port}: a configuration needs an IP address to listen on, or localhost"
        ))),
    }
}

/// The file with the cluster's CA; made of what is inline.
fn cluster_ca(
    access: &ResolvedContext,
    request: &SetupRequest,
    dir: &Path,
    plan: &mut SetupPlan,
) -> Result<Option<PathBuf>, Error> {
    if let Some(file) = &request.ca_file {
        return Ok(Some(file.clone()));
    }
    match &access.ca {
        Some(PemSource::File(file)) => return Ok(Some(file.clone())),
        Some(PemSource::Inline(bytes)) => {
            let file = dir.join("cluster-ca.crt");
            plan.files.push(OutputFile {
                path: file.clone(),
                bytes: bytes.clone(),
                mode: PUBLIC,
                what: "the cluster's CA",
            });
            return Ok(Some(file));
        }
        None => {}
    }
    if access.insecure {
        if request.mode == Mode::Terminate {
            return Err(Error::from(format!(
                "cluster {:?} does not verify its server (insecure-skip-tls-verify), and jackstay \
                 always does: name the cluster's CA with --ca-file",
                access.cluster
            )));
        }
        plan.notes.push(
            "the cluster names no CA: health checks of jackstay verify nothing and send no \
             credential; --ca-file names one"
                .to_owned(),
        );
        return Ok(None);
    }
    system_cas().map(Some).ok_or_else(|| {
        Error::from(format!(
            "cluster {:?} names no CA and this system has none: name one with --ca-file",
            access.cluster
        ))
    })
}

/// Credentials of the kubeconfig that are files already: the probe may use them as well.
fn readyz_of_files(credential: &Credential) -> Option<Node> {
    match credential {
        Credential::Certificate(PemSource::File(certificate), PemSource::File(key)) => {
            Some(Node::Map(vec![
                ("cert_file".into(), path(certificate)),
                ("key_file".into(), path(key)),
            ]))
        }
        Credential::TokenFile(file) => Some(Node::Map(vec![("token_file".into(), path(file))])),
        _ => None,
    }
}

/// What goes upstream for the user, if it is a certificate.
fn identity(
    access: &ResolvedContext,
    request: &SetupRequest,
    dir: &Path,
    ca_file: Option<&Path>,
    listener: &mut Node,
    plan: &mut SetupPlan,
) -> Result<(), Error> {
    let (certificate, key) = match &access.credential {
        Credential::Certificate(certificate, key) => (certificate, key),
        Credential::Exec(plugin) => {
            if let Some(file) = &request.client_ca_file {
                listener.set("client_ca_file", path(file));
            }
            plan.notes.push(format!(
                "the exec plugin {:?} runs in the client as before: its tokens pass; if it \
                 yields client certificates, use --mode passthrough, since here jackstay would \
                 need them too (listeners[0].identities)",
                plugin.command
            ));
            return Ok(());
        }
        _ => return Ok(()),
    };
    let authority = match &request.client_ca_file {
        Some(file) => file.clone(),
        None => proven_by_cluster_ca(access, certificate, ca_file)?,
    };
    let mut place = |pem: &PemSource, name: &str, mode: u32, what: &'static str| match pem {
        PemSource::File(file) => file.clone(),
        PemSource::Inline(bytes) => {
            let file = dir.join(name);
            let (path, bytes) = (file.clone(), bytes.clone());
            plan.files.push(OutputFile { path, bytes, mode, what });
            file
        }
    };
    let certificate = place(certificate, "client.crt", PUBLIC, "the user's client certificate");
    let key = place(key, "client.key", PRIVATE, "its key");
    listener.set("client_ca_file", path(&authority));
    let identity =
        Node::Map(vec![("cert_file".into(), path(&certificate)), ("key_file".into(), path(&key))]);
    listener.set("identities", Node::List(vec![identity]));
    Ok(())
}

/// The cluster's CA, if the user's certificate is one of its own.
fn proven_by_cluster_ca(
    access: &ResolvedContext,
    certificate: &PemSource,
    ca_file: Option<&Path>,
) -> Result<PathBuf, Error> {
    let ca = match (&access.ca, ca_file) {
        (Some(ca), _) => ca.read()?,
        (None, Some(file)) => PemSource::File(file.to_owned()).read()?,
        (None, None) => Vec::new(),
    };
    let chain = certificates(&certificate.read()?);
    let mut roots = rustls::RootCertStore::empty();
    roots.add_parsable_certificates(certificates(&ca));
    let verifier = WebPkiClientVerifier::builder_with_provider(
        roots.into(),
        rustls::crypto::aws_lc_rs::default_provider().into(),
    )
    .build();
    let proven = match (verifier, chain.split_first()) {
        (Ok(verifier), Some((leaf, rest))) => {
            let now = rustls::pki_types::UnixTime::now();
            match verifier.verify_client_cert(leaf, rest, now) {
                Ok(_) => Ok(()),
                Err(error) => Err(error.to_string()),
            }
        }
        (Err(error), _) => Err(error.to_string()),
        (_, None) => Err("it holds no certificate".to_owned()),
    };
    match (proven, ca_file) {
        (Ok(()), Some(file)) => Ok(file.to_owned()),
        (result, _) => {
            let why = result.err().unwrap_or_default();
            let mut message = String::new();
            let _ = write!(
                message,
                "user {:?}: the client certificate does not chain to the cluster's CA ({why}); if \
                 the cluster signs clients with a CA of its own, name it with --client-ca-file, or \
                 use --mode passthrough",
                access.user
            );
            Err(Error::from(message))
        }
    }
}

fn certificates(pem: &[u8]) -> Vec<CertificateDer<'static>> {
    CertificateDer::pem_slice_iter(pem).filter_map(Result::ok).collect()
}

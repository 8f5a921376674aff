//! Why the files for a jackstay cannot be planned.

use std::error::Error;
use std::fmt;
use std::io;
use std::path::PathBuf;

use jackstay_kubeconfig::{KubeconfigError, Unwritable};
use jackstay_net::tls::certificate::X509Error;
use jackstay_net::tls::file_error::TlsFileError;
use jackstay_net::tls::local_ca::LocalCaError;
use jackstay_net::tls::refusal::CertificateRefusal;

/// Why the configuration and the certificates of a jackstay cannot be planned.
#[derive(Debug)]
pub enum SetupError {
    /// Clients are to connect to a host on which jackstay cannot listen.
    Host {
        /// The host.
        host: String,
        /// The port.
        port: u16,
    },
    /// This cluster does not verify its server, which jackstay in mode `terminate` must do.
    Insecure(String),
    /// This cluster names no CA and the system has none.
    NoCa(String),
    /// The client certificate of the user cannot be verified with the cluster's CA.
    ClientCertificate {
        /// The user.
        user: String,
        /// Why.
        error: ClientCertificateError,
    },
    /// A PEM file of the kubeconfig cannot be read.
    Pem(KubeconfigError),
    /// A certificate or a key of the kubeconfig, or the serving certificate, cannot be used.
    TlsFile(TlsFileError),
    /// The names in the serving certificate, which is in this file, cannot be read.
    ServingNames(PathBuf, X509Error),
    /// The file with the certificate of the local CA cannot be read.
    LocalCaFile(PathBuf, io::Error),
    /// The file with the certificate of the local CA holds none.
    NoLocalCa(PathBuf),
    /// The certificate of the local CA cannot be read.
    LocalCaCertificate(X509Error),
    /// A certificate cannot be issued.
    Issue(LocalCaError),
    /// The configuration cannot be written as YAML.
    Unwritable(Unwritable),
}

/// Why a client certificate cannot be verified.
#[derive(Debug)]
pub enum ClientCertificateError {
    /// The CA refuses it.
    Refused(CertificateRefusal),
    /// The CA cannot be used.
    Ca(TlsFileError),
    /// There is no certificate.
    None,
}

impl fmt::Display for ClientCertificateError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused(refusal) => refusal.fmt(f),
            Self::Ca(error) => error.fmt(f),
            Self::None => f.write_str("it holds no certificate"),
        }
    }
}

impl Error for ClientCertificateError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::Refused(error) => Some(error),
            Self::Ca(error) => Some(error),
            Self::None => None,
        }
    }
}

impl fmt::Display for SetupError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host { host, port } => write!(
                f,
                "--listen {host}:{port}: a configuration needs an IP address to listen on, or localhost"
            ),
            Self::Insecure(cluster) => write!(
                f,
                "cluster {cluster:?} does not verify its server (insecure-skip-tls-verify), and jackstay \
                 always does: name the cluster's CA with --ca-file"
            ),
            Self::NoCa(cluster) => write!(
                f,
                "cluster {cluster:?} names no CA and this system has none: name one with --ca-file"
            ),
            Self::ClientCertificate { user, error } => write!(
                f,
                "user {user:?}: the client certificate cannot be verified with the cluster's CA: {error}; \
                 if the cluster signs clients with a CA of its own, name it with --client-ca-file, or \
                 use --mode passthrough"
            ),
            Self::Pem(error) => error.fmt(f),
            Self::TlsFile(error) => error.fmt(f),
            Self::ServingNames(file, error) => write!(f, "{}: {error}", file.display()),
            Self::LocalCaFile(file, error) => write!(f, "{}: {error}", file.display()),
            Self::NoLocalCa(file) => write!(f, "{}: holds no certificate", file.display()),
            Self::LocalCaCertificate(error) => error.fmt(f),
            Self::Issue(error) => error.fmt(f),
            Self::Unwritable(error) => error.fmt(f),
        }
    }
}

impl Error for SetupError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        Some(match self {
            Self::Host { .. } | Self::Insecure(_) | Self::NoCa(_) | Self::NoLocalCa(_) => {
                return None;
            }
            Self::ClientCertificate { error, .. } => error,
            Self::Pem(error) => error,
            Self::TlsFile(error) => error,
            Self::ServingNames(_, error) | Self::LocalCaCertificate(error) => error,
            Self::LocalCaFile(_, error) => error,
            Self::Issue(error) => error,
            Self::Unwritable(error) => error,
        })
    }
}

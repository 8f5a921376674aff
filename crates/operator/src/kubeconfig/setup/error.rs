//! Why the files for a jackstay cannot be planned.

use std::io;
use std::path::PathBuf;

use jackstay_kubeconfig::{KubeconfigError, Unwritable};
use jackstay_net::tls::certificate::X509Error;
use jackstay_net::tls::file_error::TlsFileError;
use jackstay_net::tls::local_ca::LocalCaError;
use jackstay_net::tls::refusal::CertificateRefusal;

/// Why the configuration and the certificates of a jackstay cannot be planned.
#[derive(Debug, thiserror::Error)]
pub enum SetupError {
    /// Clients are to connect to a host on which jackstay cannot listen.
    #[error(
        "--listen {host}:{port}: a configuration needs an IP address to listen on, or localhost"
    )]
    Host {
        /// The host.
        host: String,
        /// The port.
        port: u16,
    },
    /// This cluster does not verify its server, which jackstay in mode `terminate` must do.
    #[error(
        "cluster {0:?} does not verify its server (insecure-skip-tls-verify), and jackstay always does: name \
         the cluster's CA with --ca-file"
    )]
    Insecure(String),
    /// This cluster names no CA and the system has none.
    #[error("cluster {0:?} names no CA and this system has none: name one with --ca-file")]
    NoCa(String),
    /// The client certificate of the user cannot be verified with the cluster's CA.
    #[error(
        "user {user:?}: the client certificate cannot be verified with the cluster's CA: {error}; if the \
         cluster signs clients with a CA of its own, name it with --client-ca-file, or use --mode \
         passthrough"
    )]
    ClientCertificate {
        /// The user.
        user: String,
        /// Why.
        #[source]
        error: ClientCertificateError,
    },
    /// A PEM file of the kubeconfig cannot be read.
    #[error("{0}")]
    Pem(#[source] KubeconfigError),
    /// A certificate or a key of the kubeconfig, or the serving certificate, cannot be used.
    #[error("{0}")]
    TlsFile(#[source] TlsFileError),
    /// The names in the serving certificate, which is in this file, cannot be read.
    #[error("{0}: {1}")]
    ServingNames(PathBuf, #[source] X509Error),
    /// The file with the certificate of the local CA cannot be read.
    #[error("{0}: {1}")]
    LocalCaFile(PathBuf, #[source] io::Error),
    /// The file with the certificate of the local CA holds none.
    #[error("{0}: holds no certificate")]
    NoLocalCa(PathBuf),
    /// The certificate of the local CA cannot be read.
    #[error("{0}")]
    LocalCaCertificate(#[source] X509Error),
    /// A certificate cannot be issued.
    #[error("{0}")]
    Issue(#[source] LocalCaError),
    /// The configuration cannot be written as YAML.
    #[error("{0}")]
    Unwritable(#[source] Unwritable),
}

/// Why a client certificate cannot be verified.
#[derive(Debug, thiserror::Error)]
pub enum ClientCertificateError {
    /// The CA refuses it.
    #[error("{0}")]
    Refused(#[source] CertificateRefusal),
    /// The CA cannot be used.
    #[error("{0}")]
    Ca(#[source] TlsFileError),
    /// There is no certificate.
    #[error("it holds no certificate")]
    None,
}

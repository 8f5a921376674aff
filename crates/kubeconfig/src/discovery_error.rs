//! Why the user of a kubeconfig cannot be used for discovery.

use std::io;
use std::path::PathBuf;

use jackstay_net::tls::file_error::TlsFileError;
use jackstay_sys::files::{TokenError, TokenFileError};

use super::{CredentialError, KubeconfigError};

/// Why a kubeconfig cannot be used for discovery. It holds no secret.
#[derive(Debug, thiserror::Error)]
pub enum DiscoveryError {
    /// The kubeconfig cannot be read.
    #[error("{0}: {1}")]
    Read(PathBuf, #[source] io::Error),
    /// The file is not a kubeconfig.
    #[error("{0}")]
    Kubeconfig(#[source] KubeconfigError),
    /// The user of its current context cannot be used.
    #[error("{0}: {1}")]
    User(PathBuf, #[source] UserError),
}

/// Why the user of the current context cannot be used for discovery.
#[derive(Debug, thiserror::Error)]
pub enum UserError {
    /// There is no current context.
    #[error("there is no current-context")]
    NoCurrentContext,
    /// The current context, with this name, has no user.
    #[error("the current context {0:?} names no user")]
    NoUser(String),
    /// There is no user of this name.
    #[error("there is no user {0:?}")]
    Unknown(String),
    /// The credential of the user of this name cannot be read.
    #[error("the user {0:?} {1}")]
    Credential(String, #[source] CredentialError),
    /// Discovery does not support the credential of the user of this name.
    #[error(
        "the user {0:?} has {credential}; use a client certificate, a token or a tokenFile",
        credential = .1.as_str()
    )]
    Unsupported(String, UnsupportedCredential),
    /// The user of this name has no credential.
    #[error(
        "the user {0:?} has no credential: it needs a client certificate, a token or a tokenFile"
    )]
    NoCredential(String),
    /// The file of a key cannot be read.
    #[error("{key}: {path}: {error}")]
    Pem {
        /// The key in the kubeconfig.
        key: &'static str,
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        error: io::Error,
    },
    /// The client certificate or its key cannot be used.
    #[error("{0}")]
    Certificate(#[source] TlsFileError),
    /// The token in the kubeconfig is not one.
    #[error("token: {0}")]
    Token(#[source] TokenError),
}

/// A credential that discovery does not support.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UnsupportedCredential {
    /// An exec plugin.
    Exec,
    /// An auth provider.
    AuthProvider,
    /// A user name and a password.
    Password,
    /// The user acts as another one.
    Impersonation,
}

impl UnsupportedCredential {
    /// The credential and why it is not supported.
    fn as_str(self) -> &'static str {
        match self {
            Self::Exec => "an exec plugin, which discovery does not run",
            Self::AuthProvider => "an auth provider, which Kubernetes no longer supports",
            Self::Password => "a user name and password, which Kubernetes no longer accepts",
            Self::Impersonation => "impersonation: give discovery a user of its own",
        }
    }
}

/// Why there is no token for a request of discovery.
#[derive(Debug, thiserror::Error)]
#[error("token file {0}")]
pub struct DiscoveryTokenError(#[source] pub(super) TokenFileError);

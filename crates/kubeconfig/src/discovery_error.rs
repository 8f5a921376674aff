//! Why the user of a kubeconfig cannot be used for discovery.

use std::error::Error;
use std::fmt;
use std::io;
use std::path::PathBuf;

use jackstay_net::tls::file_error::TlsFileError;
use jackstay_sys::files::{TokenError, TokenFileError};

use super::{CredentialError, KubeconfigError};

/// Why a kubeconfig cannot be used for discovery. It holds no secret.
#[derive(Debug)]
pub enum DiscoveryError {
    /// The kubeconfig cannot be read.
    Read(PathBuf, io::Error),
    /// The file is not a kubeconfig.
    Kubeconfig(KubeconfigError),
    /// The user of its current context cannot be used.
    User(PathBuf, UserError),
}

impl fmt::Display for DiscoveryError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Read(path, error) => write!(f, "{}: {error}", path.display()),
            Self::Kubeconfig(error) => error.fmt(f),
            Self::User(path, error) => write!(f, "{}: {error}", path.display()),
        }
    }
}

impl Error for DiscoveryError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        Some(match self {
            Self::Read(_, error) => error,
            Self::Kubeconfig(error) => error,
            Self::User(_, error) => error,
        })
    }
}

/// Why the user of the current context cannot be used for discovery.
#[derive(Debug)]
pub enum UserError {
    /// There is no current context.
    NoCurrentContext,
    /// The current context, with this name, has no user.
    NoUser(String),
    /// There is no user of this name.
    Unknown(String),
    /// The credential of the user of this name cannot be read.
    Credential(String, CredentialError),
    /// Discovery does not support the credential of the user of this name.
    Unsupported(String, UnsupportedCredential),
    /// The user of this name has no credential.
    NoCredential(String),
    /// The file of a key cannot be read.
    Pem {
        /// The key in the kubeconfig.
        key: &'static str,
        /// The file.
        path: PathBuf,
        /// Why.
        error: io::Error,
    },
    /// The client certificate or its key cannot be used.
    Certificate(TlsFileError),
    /// The token in the kubeconfig is not one.
    Token(TokenError),
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

impl fmt::Display for UserError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoCurrentContext => f.write_str("there is no current-context"),
            Self::NoUser(context) => write!(f, "the current context {context:?} names no user"),
            Self::Unknown(user) => write!(f, "there is no user {user:?}"),
            Self::Credential(user, error) => write!(f, "the user {user:?} {error}"),
            Self::Unsupported(user, credential) => write!(
                f,
                "the user {user:?} has {}; use a client certificate, a token or a tokenFile",
                credential.as_str()
            ),
            Self::NoCredential(user) => write!(
                f,
                "the user {user:?} has no credential: it needs a client certificate, a token or a \
                 tokenFile"
            ),
            Self::Pem { key, path, error } => write!(f, "{key}: {}: {error}", path.display()),
            Self::Certificate(error) => error.fmt(f),
            Self::Token(error) => write!(f, "token: {error}"),
        }
    }
}

impl Error for UserError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        Some(match self {
            Self::Credential(_, error) => error,
            Self::Pem { error, .. } => error,
            Self::Certificate(error) => error,
            Self::Token(error) => error,
            Self::NoCurrentContext
            | Self::NoUser(_)
            | Self::Unknown(_)
            | Self::Unsupported(..)
            | Self::NoCredential(_) => return None,
        })
    }
}

/// Why there is no token for a request of discovery.
#[derive(Debug)]
pub struct DiscoveryTokenError(pub(super) TokenFileError);

impl fmt::Display for DiscoveryTokenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "token file {}", self.0)
    }
}

impl Error for DiscoveryTokenError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        Some(&self.0)
    }
}

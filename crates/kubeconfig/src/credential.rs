//! The credential of a user: a client certificate, a bearer token, or a plugin that returns one.

use std::fmt;
use std::path::PathBuf;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use jackstay_net::tls::pem_files::MAX_PEM_FILE;
use jackstay_sys::files;
use zeroize::Zeroizing;

use super::error::KubeconfigError;
use super::exec::ExecPlugin;
use crate::model::{AuthInfo, Cluster, Secret};

/// Why the credential of a user, or the CA of a cluster, cannot be read from a kubeconfig.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum CredentialError {
    /// The value of `KEY-data` is not base64; this is `KEY`.
    #[error("{0}-data is not base64")]
    NotBase64(&'static str),
    /// The value of `KEY-data` is PEM, not its Base64; this is `KEY`.
    #[error("{0}-data is PEM: it must hold the Base64 of it (base64 -w 0 FILE), or {0} the file")]
    PemText(&'static str),
    /// There is a client certificate without its key.
    #[error("has a client-certificate without a client-key")]
    NoKey,
    /// There is a client key without its certificate.
    #[error("has a client-key without a client-certificate")]
    NoCertificate,
    /// The exec plugin has no command.
    #[error("exec names no command")]
    NoCommand,
}

/// PEM data, or the file that holds it.
#[derive(Clone, PartialEq, Eq)]
pub enum PemSource {
    /// Data in the kubeconfig. It may be a private key, so it is overwritten when it is dropped.
    Inline(Zeroizing<Vec<u8>>),
    /// A file.
    File(PathBuf),
}

impl fmt::Debug for PemSource {
    /// Prints only the length of inline data, which may be a key.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Inline(bytes) => write!(f, "Inline({} bytes)", bytes.len()),
            Self::File(path) => write!(f, "File({})", path.display()),
        }
    }
}

impl PemSource {
    /// The value of `KEY-data`, or else that of `KEY`, which is a path. Data overrides the file, as in
    /// client-go.
    pub(super) fn new(
        key: &'static str,
        data: Option<&str>,
        file: Option<&str>,
    ) -> Result<Option<Self>, CredentialError> {
        if let Some(data) = data.filter(|data| !data.is_empty()) {
            if data.contains("-----BEGIN ") {
                return Err(CredentialError::PemText(key));
            }
            let mut joined = Zeroizing::new(String::with_capacity(data.len()));
            joined.extend(data.split_ascii_whitespace());
            return STANDARD
                .decode(joined.as_bytes())
                .map(|bytes| Some(Self::Inline(Zeroizing::new(bytes))))
                .map_err(|_| CredentialError::NotBase64(key));
        }
        let file = file.filter(|file| !file.is_empty());
        Ok(file.map(|file| Self::File(PathBuf::from(file))))
    }

    /// The PEM bytes, which are overwritten when they are dropped.
    ///
    /// # Errors
    /// The file cannot be read, is not a regular file, or is too large for PEM.
    pub fn read(&self) -> Result<Zeroizing<Vec<u8>>, KubeconfigError> {
        match self {
            Self::Inline(bytes) => Ok(bytes.clone()),
            Self::File(path) => files::read(path, MAX_PEM_FILE)
                .map(Zeroizing::new)
                .map_err(|error| KubeconfigError::unreadable(path, error)),
        }
    }

    /// The origin of the PEM in error texts: its file, or the entry of the kubeconfig that holds it.
    pub fn origin(&self, entry: String) -> PathBuf {
        match self {
            Self::File(file) => file.clone(),
            Self::Inline(_) => entry.into(),
        }
    }
}

/// A bearer token, or the file that holds it.
#[derive(Clone, PartialEq, Eq)]
pub enum TokenSource {
    /// A token in the kubeconfig.
    Inline(String),
    /// A file, whose content may change.
    File(PathBuf),
}

/// All credentials of a user. Paths are as in the kubeconfig.
#[derive(Clone)]
pub struct UserCredentials {
    /// Client certificate and key.
    pub certificate: Option<(PemSource, PemSource)>,
    /// Bearer token.
    pub token: Option<TokenSource>,
    exec: Option<ExecPlugin>,
    /// The kind of a credential that jackstay does not use: a password or an auth-provider.
    other: Option<&'static str>,
}

impl UserCredentials {
    /// Reads a user. `cluster` is described to an exec plugin that asks for it.
    ///
    /// # Errors
    /// A certificate without its key, data that is not base64, or a plugin without a command.
    pub fn new(user: &AuthInfo, cluster: &Cluster) -> Result<Self, CredentialError> {
        let certificate = PemSource::new(
            "client-certificate",
            user.client_certificate_data.as_deref(),
            user.client_certificate.as_deref(),
        )?;
        let key_data = user.client_key_data.as_ref().map(Secret::expose);
        let key = PemSource::new("client-key", key_data, user.client_key.as_deref())?;
        let certificate = match (certificate, key) {
            (Some(certificate), Some(key)) => Some((certificate, key)),
            (Some(_), None) => return Err(CredentialError::NoKey),
            (None, Some(_)) => return Err(CredentialError::NoCertificate),
            (None, None) => None,
        };
        // The file overrides the token in the kubeconfig, as in client-go: the file may change.
        let file = user.token_file.as_deref().filter(|file| !file.is_empty());
        let inline = user.token.as_ref().map(Secret::expose);
        let token = match (file, inline.filter(|token| !token.is_empty())) {
            (Some(file), _) => Some(TokenSource::File(PathBuf::from(file))),
            (None, Some(token)) => Some(TokenSource::Inline(token.to_owned())),
            (None, None) => None,
        };
        let other = if user.username.as_ref().is_some_and(|name| !name.is_empty()) {
            Some("a password")
        } else {
            user.auth_provider.as_ref().map(|_| "an auth-provider")
        };
        // A plugin that is not used may be incomplete.
        let uses_plugin = certificate.is_none() && token.is_none();
        let exec = user.exec.as_ref().filter(|_| uses_plugin);
        let exec = exec
            .map(|exec| ExecPlugin::new(exec, cluster).ok_or(CredentialError::NoCommand))
            .transpose()?;
        Ok(Self { certificate, token, exec, other })
    }

    /// The credential that identifies the user. A client certificate takes precedence over a token,
    /// because kube-apiserver authenticates by the certificate first.
    pub fn preferred(self) -> Credential {
        match (self.certificate, self.token, self.exec, self.other) {
            (Some((certificate, key)), ..) => Credential::Certificate(certificate, key),
            (None, Some(TokenSource::File(file)), ..) => Credential::TokenFile(file),
            (None, Some(TokenSource::Inline(token)), ..) => Credential::Token(token),
            (None, None, Some(plugin), _) => Credential::Exec(plugin),
            (None, None, None, Some(other)) => Credential::Other(other),
            (None, None, None, None) => Credential::Anonymous,
        }
    }
}

/// The credential that identifies a user.
#[derive(Clone)]
pub enum Credential {
    /// No credential.
    Anonymous,
    /// A client certificate and its key.
    Certificate(PemSource, PemSource),
    /// A bearer token in the kubeconfig.
    Token(String),
    /// A bearer token in a file.
    TokenFile(PathBuf),
    /// A plugin that returns a token or a certificate.
    Exec(ExecPlugin),
    /// A password or an auth-provider, which jackstay does not use.
    Other(&'static str),
}

impl fmt::Debug for Credential {
    /// Prints only the kind.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.describe())
    }
}

impl Credential {
    /// The kind of credential, for messages.
    pub fn describe(&self) -> &'static str {
        match self {
            Self::Anonymous => "no credential",
            Self::Certificate(..) => "a client certificate",
            Self::Token(_) => "a token",
            Self::TokenFile(_) => "a token file",
            Self::Exec(_) => "an exec plugin",
            Self::Other(kind) => kind,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn credential(user: &str) -> Result<Credential, CredentialError> {
        let user: AuthInfo = serde_saphyr::from_str(user).unwrap();
        UserCredentials::new(&user, &Cluster::default()).map(UserCredentials::preferred)
    }

    #[test]
    fn preferred_follows_the_precedence_of_client_go() {
        for (user, expected) in [
            ("{}", "no credential"),
            ("{token: a, tokenFile: b}", "a token file"),
            ("{token: a, exec: {command: aws}}", "a token"),
            ("{token: '', exec: {command: aws}}", "an exec plugin"),
            ("{client-certificate: a, client-key: b, token: c}", "a client certificate"),
            ("{exec: {command: aws}}", "an exec plugin"),
            ("{username: a, password: b}", "a password"),
            ("{auth-provider: {name: oidc}}", "an auth-provider"),
        ] {
            assert_eq!(credential(user).unwrap().describe(), expected, "{user}");
        }
    }

    #[test]
    fn user_credentials_incomplete_credential_error_holds_no_value() {
        for (user, expected) in [
            ("{client-certificate: a}", "has a client-certificate without a client-key"),
            ("{client-key-data: YQ==}", "has a client-key without a client-certificate"),
            ("{client-certificate-data: 's3cret%', client-key: b}", "is not base64"),
            ("{client-certificate-data: 'aG=sbG8=', client-key: b}", "is not base64"),
            (
                "{client-certificate-data: '-----BEGIN CERTIFICATE----- s3cret', client-key: b}",
                "is PEM: it must hold",
            ),
            ("{exec: {args: [a]}}", "exec names no command"),
        ] {
            let error = credential(user).unwrap_err().to_string();
            assert!(error.contains(expected) && !error.contains("s3cret"), "{user}: {error}");
        }
    }

    #[test]
    fn pem_source_wrapped_data_is_decoded_and_overrides_the_file() {
        let pem = PemSource::new("k", Some("aGVs\n bG8=\n"), Some("file")).unwrap();
        assert_eq!(pem, Some(PemSource::Inline(b"hello".to_vec().into())));
    }
}

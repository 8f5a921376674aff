//! The credential for discovery: the user of the current context of a kubeconfig.
//!
//! Discovery connects to the endpoints of the upstream and verifies them with the upstream's CA, so the
//! cluster of the context is not used. A client certificate, a token and a token file are supported. A
//! user with an exec plugin, a password or impersonation is refused.

use std::fmt;
use std::path::{Path, PathBuf};

use http::HeaderValue;
use jackstay_net::tls::pem_files::{self, LoadedCert};
use jackstay_sys::files;
use zeroize::Zeroizing;

use super::discovery_error::{
    DiscoveryError, DiscoveryTokenError, UnsupportedCredential, UserError,
};
use super::{
    KubeconfigError, KubeconfigFile, MAX_KUBECONFIG, PemSource, TokenSource, UserCredentials,
};
use crate::model::{AuthInfo, Cluster, Kubeconfig};

/// The credential for discovery.
#[derive(Debug)]
pub struct DiscoveryUser {
    /// The client certificate.
    pub certificate: Option<LoadedCert>,
    /// The bearer token.
    pub token: DiscoveryToken,
    /// The files from which it was loaded, the kubeconfig first. It must be loaded again when one of them
    /// changes.
    pub files: Vec<PathBuf>,
}

/// A bearer token.
#[derive(Clone, PartialEq, Eq)]
pub enum DiscoveryToken {
    /// No token.
    None,
    /// A token in the kubeconfig.
    Fixed(HeaderValue),
    /// A file that is read for every request, because the token in it rotates.
    File(PathBuf),
}

impl fmt::Debug for DiscoveryToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("None"),
            Self::Fixed(_) => f.write_str("Fixed(***)"),
            Self::File(path) => write!(f, "File({})", path.display()),
        }
    }
}

impl DiscoveryToken {
    /// The current value of the `authorization` header, if there is a token.
    ///
    /// # Errors
    /// The file cannot be read or holds no token.
    pub fn header(&self) -> Result<Option<HeaderValue>, DiscoveryTokenError> {
        match self {
            Self::None => Ok(None),
            Self::Fixed(value) => Ok(Some(value.clone())),
            Self::File(path) => {
                files::authorization_from_file(path).map(Some).map_err(DiscoveryTokenError)
            }
        }
    }
}

/// Reads the kubeconfig and the files that its user names.
///
/// # Errors
/// The user cannot be read or is not supported.
pub fn load(path: &Path) -> Result<DiscoveryUser, DiscoveryError> {
    let bytes = files::read(path, MAX_KUBECONFIG).map(Zeroizing::new);
    let bytes = bytes.map_err(|error| DiscoveryError::Read(path.to_owned(), error))?;
    let file = KubeconfigFile::parse(path, &bytes).map_err(DiscoveryError::Kubeconfig)?;
    load_user(path, &file.with_absolute_paths()).map_err(|error| match &error {
        UserError::Unknown(name) => match file.mistake("users", name) {
            Some(mistake) => DiscoveryError::Kubeconfig(KubeconfigError::Invalid(
                path.to_owned(),
                mistake.clone(),
            )),
            None => DiscoveryError::User(path.to_owned(), error),
        },
        _ => DiscoveryError::User(path.to_owned(), error),
    })
}

fn load_user(path: &Path, config: &Kubeconfig) -> Result<DiscoveryUser, UserError> {
    let (name, user) = current_user(config)?;
    refuse_unsupported(name, user)?;
    let credentials = UserCredentials::new(user, &Cluster::default())
        .map_err(|error| UserError::Credential(name.to_owned(), error))?;
    let mut files = vec![path.to_owned()];
    let certificate = match &credentials.certificate {
        Some((certificate, key)) => {
            let (cert_file, cert_pem) =
                read_pem("client-certificate", certificate, path, &mut files)?;
            let (key_file, key_pem) = read_pem("client-key", key, path, &mut files)?;
            let loaded = pem_files::cert_from_pem((&cert_file, &cert_pem), (&key_file, &key_pem));
            Some(loaded.map_err(UserError::Certificate)?)
        }
        None => None,
    };
    let token = match credentials.token {
        Some(TokenSource::File(file)) => {
            files.push(file.clone());
            DiscoveryToken::File(file)
        }
        Some(TokenSource::Inline(token)) => {
            DiscoveryToken::Fixed(files::authorization(&token).map_err(UserError::Token)?)
        }
        None if certificate.is_none() => return Err(UserError::NoCredential(name.to_owned())),
        None => DiscoveryToken::None,
    };
    Ok(DiscoveryUser { certificate, token, files })
}

/// The user of the current context, with its name.
fn current_user(config: &Kubeconfig) -> Result<(&str, &AuthInfo), UserError> {
    let current = config.current_context.as_deref().unwrap_or_default();
    if current.is_empty() {
        return Err(UserError::NoCurrentContext);
    }
    let context = config.contexts.iter().find(|context| context.name == current);
    let user = context
        .and_then(|context| context.context.as_ref()?.user.as_deref())
        .ok_or_else(|| UserError::NoUser(current.to_owned()))?;
    let named = config.auth_infos.iter().find(|named| named.name == user);
    let info = named
        .and_then(|named| named.auth_info.as_ref())
        .ok_or_else(|| UserError::Unknown(user.to_owned()))?;
    Ok((user, info))
}

/// Refuses a user whose credential discovery does not support. An empty text counts as absent, as in client-go.
fn refuse_unsupported(name: &str, user: &AuthInfo) -> Result<(), UserError> {
    let is_set = |text: Option<&String>| text.is_some_and(|text| !text.is_empty());
    let unsupported = [
        (user.exec.is_some(), UnsupportedCredential::Exec),
        (user.auth_provider.is_some(), UnsupportedCredential::AuthProvider),
        (is_set(user.username.as_ref()), UnsupportedCredential::Password),
        (is_set(user.impersonate.as_ref()), UnsupportedCredential::Impersonation),
    ];
    match unsupported.iter().find(|(is_set, _)| *is_set) {
        Some((_, credential)) => Err(UserError::Unsupported(name.to_owned(), *credential)),
        None => Ok(()),
    }
}

/// Reads the PEM data of `key`. Returns it with the file that holds it, and adds that file to `files`.
fn read_pem(
    key: &'static str,
    pem: &PemSource,
    kubeconfig: &Path,
    files: &mut Vec<PathBuf>,
) -> Result<(PathBuf, Zeroizing<Vec<u8>>), UserError> {
    match pem {
        PemSource::Inline(bytes) => {
            let origin = format!("{}: {key}-data", kubeconfig.display());
            Ok((origin.into(), bytes.clone()))
        }
        PemSource::File(path) => {
            let bytes = files::read(path, MAX_KUBECONFIG).map_err(|error| UserError::Pem {
                key,
                path: path.clone(),
                error,
            })?;
            files.push(path.clone());
            Ok((path.clone(), Zeroizing::new(bytes)))
        }
    }
}

#[cfg(test)]
mod tests {
    use base64::Engine as _;
    use base64::engine::general_purpose::STANDARD;

    use super::*;

    fn write(dir: &Path, user: &str) -> PathBuf {
        let path = dir.join("config");
        let text = format!(
            "apiVersion: v1\nkind: Config\ncurrent-context: c\ncontexts: [{{name: c, context: \
             {{cluster: k, user: u}}}}]\nclusters: [{{name: k, cluster: {{server: \
             'https://127.0.0.1:1'}}}}]\nusers: [{{name: u, user: {user}}}]\n"
        );
        std::fs::write(&path, text).unwrap();
        path
    }

    #[test]
    fn load_reads_a_certificate_from_files_or_inline_data() {
        let dir = tempfile::tempdir().unwrap();
        let key = rcgen::KeyPair::generate().unwrap();
        let params = rcgen::CertificateParams::new(vec!["x".into()]).unwrap();
        let (cert, key) = (params.self_signed(&key).unwrap().pem(), key.serialize_pem());
        std::fs::write(dir.path().join("c.pem"), &cert).unwrap();
        std::fs::write(dir.path().join("k.pem"), &key).unwrap();
        let files = write(dir.path(), "{client-certificate: c.pem, client-key: k.pem}");
        let user = load(&files).unwrap();
        assert!(user.certificate.is_some());
        assert_eq!(user.files.len(), 3, "relative to the kubeconfig: {:?}", user.files);
        let (cert, key) = (STANDARD.encode(cert), STANDARD.encode(key));
        let inline = format!("{{client-certificate-data: {cert}, client-key-data: {key}}}");
        let user = load(&write(dir.path(), &inline)).unwrap();
        assert!(user.certificate.is_some());
        assert_eq!(user.files.len(), 1);
    }

    #[test]
    fn header_token_file_is_read_each_time_and_overrides_a_token() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("token");
        std::fs::write(&file, "one\n").unwrap();
        let user = load(&write(dir.path(), "{token: fixed, tokenFile: token}")).unwrap();
        assert_eq!(user.token.header().unwrap().unwrap(), "Bearer one");
        std::fs::write(&file, "two").unwrap();
        let header = user.token.header().unwrap().unwrap();
        assert!(header.is_sensitive() && header == "Bearer two");
        std::fs::write(&file, "\n").unwrap();
        assert!(user.token.header().unwrap_err().to_string().ends_with("it is empty"));
        std::fs::remove_file(&file).unwrap();
        assert!(user.token.header().is_err());
        let user = load(&write(dir.path(), "{token: fixed}")).unwrap();
        assert_eq!(user.token.header().unwrap().unwrap(), "Bearer fixed");
        assert!(!format!("{user:?}").contains("fixed"));
    }

    #[test]
    fn load_refuses_unsupported_users_with_advice_and_without_secrets() {
        let dir = tempfile::tempdir().unwrap();
        for (user, expected) in [
            ("{exec: {command: aws, apiVersion: client.authentication.k8s.io/v1}}", "exec plugin"),
            ("{username: admin, password: s3cret}", "user name and password"),
            ("{token: s3cret, as: root}", "impersonation"),
            ("{auth-provider: {name: gcp, config: {}}}", "auth provider"),
            ("{}", "has no credential"),
            ("{token: \"s3cret\\n\\x01\"}", "token: it holds a line break"),
            ("{client-certificate: nowhere.pem, client-key: k}", "nowhere.pem"),
            ("{client-certificate-data: 's3cret%'}", "not base64"),
            ("{client-key-data: czNjcmV0}", "without a client-certificate"),
            ("{token: s3cret", "not valid YAML"),
            ("[s3cret]", "users[0].user: expected a map of keys"),
        ] {
            let error = load(&write(dir.path(), user)).unwrap_err().to_string();
            assert!(error.contains(expected), "{user}: {error}");
            assert!(!error.contains("s3cret"), "{error}");
        }
        let path = dir.path().join("config");
        for text in ["", "current-context: c\n", "current-context: c\ncontexts: [{name: c}]\n"] {
            std::fs::write(&path, text).unwrap();
            assert!(load(&path).is_err(), "{text}");
        }
        let error = load(&dir.path().join("missing")).unwrap_err();
        assert!(matches!(error, DiscoveryError::Read(..)), "{error}");
    }
}

//! The credential for discovery: the user of a kubeconfig's current context.
//!
//! Its server and its CA are not used: what is asked are the upstream's own endpoints, verified as
//! everywhere. A client certificate, a token and a token file are understood, in the precedence of
//! client-go. What would have to start a program or hold a password is refused in words.

use std::fmt;
use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use http::HeaderValue;
use kube::config::Kubeconfig;
use serde_json::Value;

use crate::net::files::{bearer_token, bounded_read};
use crate::net::tls::pem_files::{self, LoadedCert};

/// Largest file read, a kubeconfig with the certificates of many clusters.
const MAX_FILE: u64 = 16 << 20;

/// What is shown to an apiserver.
#[derive(Debug)]
pub struct User {
    /// The client certificate.
    pub certificate: Option<LoadedCert>,
    /// The bearer token.
    pub token: Token,
    /// The files it is made of, the kubeconfig first: when one changes, it is read again.
    pub files: Vec<PathBuf>,
}

/// A bearer token.
#[derive(Clone, PartialEq, Eq)]
pub enum Token {
    /// None.
    None,
    /// One that is written in the kubeconfig.
    Fixed(HeaderValue),
    /// One in a file, which rotates: it is read for every request.
    File(PathBuf),
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("None"),
            Self::Fixed(_) => f.write_str("Fixed(***)"),
            Self::File(path) => write!(f, "File({})", path.display()),
        }
    }
}

impl Token {
    /// The value of the `authorization` header now, if there is a token.
    ///
    /// # Errors
    /// The file cannot be read, or what is in it is no token.
    pub fn header(&self) -> Result<Option<HeaderValue>, String> {
        match self {
            Self::None => Ok(None),
            Self::Fixed(value) => Ok(Some(value.clone())),
            Self::File(path) => bearer_token::authorization_from_file(path)
                .map(Some)
                .map_err(|why| format!("token file {why}")),
        }
    }
}

/// Reads the kubeconfig and everything that its user refers to.
///
/// # Errors
/// What is wrong, in words for whoever wrote the file; never a part of a secret.
pub fn load(path: &Path) -> Result<User, String> {
    let fail = |why: String| format!("{}: {why}", path.display());
    let text = bounded_read::read_text(path, MAX_FILE).map_err(|error| fail(error.to_string()))?;
    // The parser's own words may quote what stands beside a mistake.
    let config = Kubeconfig::from_yaml(&text)
        .map_err(|_| fail("not a kubeconfig: it cannot be parsed".into()))?;
    let named = current_user(&config).map_err(&fail)?;
    let name = named.0;
    let user = Fields { user: &named.1, dir: path.parent().unwrap_or(Path::new("")) };
    user.refuse(name).map_err(&fail)?;
    let mut files = vec![path.to_owned()];
    let certificate = user.certificate(path, &mut files).map_err(&fail)?;
    let token = user.token(&mut files).map_err(&fail)?;
    if certificate.is_none() && token == Token::None {
        return Err(fail(format!(
            "the user {name:?} has no credential: it needs a client certificate, a token or a \
             tokenFile"
        )));
    }
    Ok(User { certificate, token, files })
}

/// The user of the current context, its name first.
fn current_user(config: &Kubeconfig) -> Result<(&str, Value), String> {
    let wanted = config.current_context.as_deref().unwrap_or_default();
    if wanted.is_empty() {
        return Err("there is no current-context".into());
    }
    let context = config.contexts.iter().find(|context| context.name == wanted);
    let user = context
        .and_then(|context| context.context.as_ref()?.user.as_deref())
        .ok_or_else(|| format!("the current context {wanted:?} names no user"))?;
    let found = config.auth_infos.iter().find(|named| named.name == user);
    let info = found
        .and_then(|named| named.auth_info.as_ref())
        .ok_or_else(|| format!("there is no user {user:?}"))?;
    // As JSON, since kube hides tokens in a type of another crate.
    let value = serde_json::to_value(info).map_err(|_| format!("user {user:?} is unreadable"))?;
    Ok((user, value))
}

/// A user entry, with paths relative to the kubeconfig.
struct Fields<'a> {
    user: &'a Value,
    dir: &'a Path,
}

impl Fields<'_> {
    fn text(&self, key: &str) -> Option<&str> {
        self.user[key].as_str().filter(|text| !text.is_empty())
    }

    fn path(&self, key: &str) -> Option<PathBuf> {
        self.text(key).map(|text| self.dir.join(text))
    }

    /// What we cannot or will not do.
    fn refuse(&self, name: &str) -> Result<(), String> {
        let refused = [
            ("exec", "an exec plugin: jackstay starts no programs"),
            ("auth-provider", "an auth provider, which Kubernetes no longer has"),
            ("username", "a user name and password, which Kubernetes no longer takes"),
            ("as", "impersonation: give discovery a user of its own"),
        ];
        match refused.iter().find(|(key, _)| !self.user[*key].is_null()) {
            Some((_, what)) => Err(format!(
                "the user {name:?} has {what}; use a client certificate, a token or a tokenFile"
            )),
            None => Ok(()),
        }
    }

    fn certificate(
        &self,
        kubeconfig: &Path,
        files: &mut Vec<PathBuf>,
    ) -> Result<Option<LoadedCert>, String> {
        let mut part = |kind: &str| -> Result<Option<(PathBuf, Vec<u8>)>, String> {
            if let Some(data) = self.text(&format!("{kind}-data")) {
                let decoded = STANDARD.decode(data.trim());
                return decoded
                    .map(|pem| Some((kubeconfig.to_owned(), pem)))
                    .map_err(|_| format!("{kind}-data is not base64"));
            }
            let Some(path) = self.path(kind) else { return Ok(None) };
            let pem = bounded_read::read(&path, MAX_FILE)
                .map_err(|error| format!("{kind}: {}: {error}", path.display()))?;
            files.push(path.clone());
            Ok(Some((path, pem)))
        };
        match (part("client-certificate")?, part("client-key")?) {
            (None, None) => Ok(None),
            (Some(_), None) => Err("there is a client-certificate and no client-key".into()),
            (None, Some(_)) => Err("there is a client-key and no client-certificate".into()),
            (Some(cert), Some(key)) => {
                pem_files::cert_from_pem((&cert.0, &cert.1), (&key.0, &key.1))
                    .map(Some)
                    .map_err(|error| error.to_string())
            }
        }
    }

    /// Where there are both, the file wins, as in client-go: it is the one that rotates.
    fn token(&self, files: &mut Vec<PathBuf>) -> Result<Token, String> {
        if let Some(path) = self.path("tokenFile") {
            files.push(path.clone());
            return Ok(Token::File(path));
        }
        match self.text("token") {
            Some(token) => bearer_token::authorization(token)
                .map(Token::Fixed)
                .map_err(|why| format!("token: {why}")),
            None => Ok(Token::None),
        }
    }
}

#[cfg(test)]
mod tests {
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
    fn a_certificate_in_files_or_inside() {
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
        let inside = format!("{{client-certificate-data: {cert}, client-key-data: {key}}}");
        let user = load(&write(dir.path(), &inside)).unwrap();
        assert!(user.certificate.is_some());
        assert_eq!(user.files.len(), 1);
    }

    #[test]
    fn a_token_file_rotates_and_wins_over_a_token() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("token");
        std::fs::write(&file, "one\n").unwrap();
        let user = load(&write(dir.path(), "{token: fixed, tokenFile: token}")).unwrap();
        assert_eq!(user.token.header().unwrap().unwrap(), "Bearer one");
        std::fs::write(&file, "two").unwrap();
        let header = user.token.header().unwrap().unwrap();
        assert!(header.is_sensitive() && header == "Bearer two");
        std::fs::write(&file, "\n").unwrap();
        assert!(user.token.header().unwrap_err().ends_with("it is empty"));
        std::fs::remove_file(&file).unwrap();
        assert!(user.token.header().is_err());
        let user = load(&write(dir.path(), "{token: fixed}")).unwrap();
        assert_eq!(user.token.header().unwrap().unwrap(), "Bearer fixed");
        assert!(!format!("{user:?}").contains("fixed"));
    }

    #[test]
    fn what_is_refused_says_what_to_do_and_no_secret() {
        let dir = tempfile::tempdir().unwrap();
        for (user, expected) in [
            ("{exec: {command: aws, apiVersion: client.authentication.k8s.io/v1}}", "exec plugin"),
            ("{username: admin, password: s3cret}", "user name and password"),
            ("{token: s3cret, as: root}", "impersonation"),
            ("{auth-provider: {name: gcp, config: {}}}", "auth provider"),
            ("{}", "has no credential"),
            ("{token: \"s3cret\\n\\x01\"}", "token: it holds a line break"),
            ("{client-certificate: nowhere.pem}", "nowhere.pem"),
            ("{client-certificate-data: 's3cret%'}", "not base64"),
            ("{client-key-data: czNjcmV0}", "no client-certificate"),
            ("{token: s3cret", "cannot be parsed"),
            ("[s3cret]", "cannot be parsed"),
        ] {
            let error = load(&write(dir.path(), user)).unwrap_err();
            assert!(error.contains(expected), "{user}: {error}");
            assert!(!error.contains("s3cret"), "{error}");
        }
        let path = dir.path().join("config");
        for text in ["", "current-context: c\n", "current-context: c\ncontexts: [{name: c}]\n"] {
            std::fs::write(&path, text).unwrap();
            assert!(load(&path).is_err(), "{text}");
        }
        assert!(load(&dir.path().join("missing")).unwrap_err().contains("missing"));
    }
}

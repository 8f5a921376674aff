//! What one context of a kubeconfig stands for: a server, how to verify it, and who the user is.

use std::fmt;
use std::path::{Path, PathBuf};

use super::exec::ExecPlugin;
use super::load::{Error, entry, names};
use super::tree::Node;

/// Where the apiserver is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerUrl {
    /// Name or IP address, without brackets.
    pub host: String,
    /// Port; 443 if the URL names none.
    pub port: u16,
    /// What follows, as `/k8s/clusters/c-1`; empty for most.
    pub path: String,
}

impl ServerUrl {
    /// Reads the `server` of a cluster.
    ///
    /// # Errors
    /// Why it is no HTTPS address.
    pub fn parse(text: &str) -> Result<Self, String> {
        let fail = |why: &str| Err(format!("server {text:?} {why}"));
        let rest = match text.split_once("://") {
            Some(("https", rest)) => rest,
            Some(("http", _)) => return fail("is not encrypted: jackstay speaks TLS only"),
            Some(_) => return fail("is not an https URL"),
            None => text,
        };
        let (authority, path) = match rest.find(['/', '?', '#']) {
            Some(at) => rest.split_at(at),
            None => (rest, ""),
        };
        if authority.contains('@') {
            return fail("has a user in its URL, which no Kubernetes client would send");
        }
        if path.contains(['?', '#']) {
            return fail("has a query");
        }
        let (host, port) = match authority.strip_prefix('[') {
            Some(rest) => match rest.split_once(']') {
                Some((host, "")) => (host, None),
                Some((host, port)) => (host, port.strip_prefix(':')),
                None => return fail("has a broken IPv6 address"),
            },
            None => match authority.rsplit_once(':') {
                Some((host, _)) if host.contains(':') => {
                    return fail("has an IPv6 address without brackets");
                }
                Some((host, port)) => (host, Some(port)),
                None => (authority, None),
            },
        };
        let port = match port {
            None => Ok(443),
            Some(port) => port.parse(),
        };
        match port {
            Ok(port) if port > 0 && !host.is_empty() => Ok(Self {
                host: host.to_owned(),
                port,
                path: path.trim_end_matches('/').to_owned(),
            }),
            _ => fail("is not an address such as https://10.0.0.1:6443"),
        }
    }

    /// Host and port, as an endpoint of a configuration.
    pub fn address(&self) -> String {
        if self.host.contains(':') {
            format!("[{}]:{}", self.host, self.port)
        } else {
            format!("{}:{}", self.host, self.port)
        }
    }
}

impl fmt::Display for ServerUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "https://{}{}", self.address(), self.path)
    }
}

/// PEM, in the kubeconfig or beside it.
#[derive(Clone, PartialEq, Eq)]
pub enum PemSource {
    /// In the kubeconfig.
    Inline(Vec<u8>),
    /// In a file.
    File(PathBuf),
}

impl fmt::Debug for PemSource {
    /// Without what is inline: it may be a key.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Inline(bytes) => write!(f, "Inline({} bytes)", bytes.len()),
            Self::File(path) => write!(f, "File({})", path.display()),
        }
    }
}

/// How the user says who they are.
#[derive(Clone, PartialEq, Eq)]
pub enum Credential {
    /// Nothing.
    Anonymous,
    /// A client certificate and its key.
    Certificate(PemSource, PemSource),
    /// A bearer token in the kubeconfig.
    Token(String),
    /// A bearer token in a file.
    TokenFile(PathBuf),
    /// A plugin that yields one or the other.
    Exec(ExecPlugin),
    /// Something else that travels in a header (basic, auth-provider).
    Other(&'static str),
}

impl fmt::Debug for Credential {
    /// Without the secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.describe())
    }
}

impl Credential {
    /// What it is, for people.
    pub fn describe(&self) -> &'static str {
        match self {
            Self::Anonymous => "no credential",
            Self::Certificate(..) => "a client certificate",
            Self::Token(_) => "a token",
            Self::TokenFile(_) => "a token file",
            Self::Exec(_) => "an exec plugin",
            Self::Other(what) => what,
        }
    }
}

/// One context, resolved.
#[derive(Debug, Clone)]
pub struct ResolvedContext {
    /// Name of the context.
    pub context: String,
    /// Name of its cluster.
    pub cluster: String,
    /// Name of its user.
    pub user: String,
    /// Where the apiserver is: before the move, if the cluster was moved.
    pub server: ServerUrl,
    /// What its certificate must chain to; `None`: the system's CAs.
    pub ca: Option<PemSource>,
    /// The name its certificate must hold, if not the host's.
    pub tls_server_name: Option<String>,
    /// Verification is switched off.
    pub insecure: bool,
    /// A proxy stands before it.
    pub proxy_url: Option<String>,
    /// Who the user is.
    pub credential: Credential,
}

impl ResolvedContext {
    /// Resolves a context of a tree whose paths are absolute; default is the current context.
    ///
    /// # Errors
    /// What is missing or cannot be understood.
    pub fn resolve(tree: &Node, context: Option<&str>) -> Result<Self, Error> {
        let all = |list| match names(tree, list).as_slice() {
            [] => "there is none".to_owned(),
            names => format!("there is {}", names.join(", ")),
        };
        let context = context.or_else(|| tree.str("current-context")).ok_or_else(|| {
            format!("no current-context: choose one with --context ({})", all("contexts"))
        })?;
        let body = entry(tree, "contexts", context)
            .ok_or_else(|| format!("no context {context:?}: {}", all("contexts")))?;
        let cluster =
            body.str("cluster").ok_or_else(|| format!("context {context:?} names no cluster"))?;
        let user = body.str("user").unwrap_or_default();
        let at = |error: String| Error::from(format!("cluster {cluster:?}: {error}"));
        let now = entry(tree, "clusters", cluster)
            .ok_or_else(|| format!("context {context:?}: no cluster {cluster:?}"))?;
        let before = super::moved::original(now).unwrap_or(now);
        let server = before.str("server").ok_or_else(|| at("has no server".to_owned()))?;
        let empty = Node::map();
        let user_body = match entry(tree, "users", user) {
            Some(body) => body,
            None if user.is_empty() => &empty,
            None => {
                return Err(format!("context {context:?}: no user {user:?}").into());
            }
        };
        Ok(Self {
            context: context.to_owned(),
            cluster: cluster.to_owned(),
            user: user.to_owned(),
            server: ServerUrl::parse(server).map_err(at)?,
            ca: pem(before, "certificate-authority").map_err(at)?,
            tls_server_name: before.str("tls-server-name").map(ToOwned::to_owned),
            insecure: before.is_true("insecure-skip-tls-verify"),
            proxy_url: before.str("proxy-url").map(ToOwned::to_owned),
            credential: credential(user_body)
                .map_err(|error| Error::from(format!("user {user:?}: {error}")))?,
        })
    }

    /// The name its certificate is verified against.
    pub fn verified_name(&self) -> &str {
        self.tls_server_name.as_deref().unwrap_or(&self.server.host)
    }
}

/// As client-go chooses: a certificate is shown besides whatever else there is and wins in the
/// apiserver; a token file wins over a token.
fn credential(user: &Node) -> Result<Credential, String> {
    let pair = (pem(user, "client-certificate")?, pem(user, "client-key")?);
    Ok(match pair {
        (Some(certificate), Some(key)) => Credential::Certificate(certificate, key),
        (Some(_), None) => return Err("has a client-certificate without a client-key".to_owned()),
        (None, Some(_)) => return Err("has a client-key without a client-certificate".to_owned()),
        (None, None) => match (user.str("tokenFile"), user.str("token"), user.get("exec")) {
            (Some(file), ..) => Credential::TokenFile(PathBuf::from(file)),
            (None, Some(token), _) => Credential::Token(token.to_owned()),
            (None, None, Some(exec @ Node::Map(_))) => Credential::Exec(ExecPlugin::of(exec)?),
            _ if user.str("username").is_some() => Credential::Other("a password"),
            _ if user.get("auth-provider").is_some_and(|p| !p.is_empty()) => {
                Credential::Other("an auth-provider")
            }
            _ => Credential::Anonymous,
        },
    })
}

/// `KEY-data`, which wins, or `KEY`.
fn pem(node: &Node, key: &str) -> Result<Option<PemSource>, String> {
    if let Some(data) = node.str(&format!("{key}-data")) {
        let data: String = data.split_ascii_whitespace().collect();
        return decode(&data)
            .map(|bytes| Some(PemSource::Inline(bytes)))
            .ok_or_else(|| format!("{key}-data is not base64"));
    }
    Ok(node.str(key).map(|path| PemSource::File(PathBuf::from(path))))
}

/// Standard base64 with padding (RFC 4648 section 4), which is what Go's `[]byte` is in JSON.
pub fn decode(text: &str) -> Option<Vec<u8>> {
    let body = text.trim_end_matches('=');
    if !text.len().is_multiple_of(4) || text.len() - body.len() > 2 {
        return None;
    }
    let mut out = Vec::with_capacity(text.len() / 4 * 3);
    let (mut bits, mut held) = (0_u32, 0);
    for byte in body.bytes() {
        let value = match byte {
            b'A'..=b'Z' => byte - b'A',
            b'a'..=b'z' => byte - b'a' + 26,
            b'0'..=b'9' => byte - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => return None,
        };
        bits = bits << 6 | u32::from(value);
        held += 6;
        if held >= 8 {
            held -= 8;
            out.push((bits >> held) as u8);
            bits &= (1 << held) - 1;
        }
    }
    (bits == 0).then_some(out)
}

/// The reverse of [`decode`].
pub fn encode(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut out = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for chunk in bytes.chunks(3) {
        let mut block = [0; 3];
        block[..chunk.len()].copy_from_slice(chunk);
        let bits = u32::from_be_bytes([0, block[0], block[1], block[2]]);
        for i in 0..4 {
            let digit = DIGITS[(bits >> (18 - 6 * i) & 63) as usize];
            out.push(if i <= chunk.len() { char::from(digit) } else { '=' });
        }
    }
    out
}

impl PemSource {
    /// The PEM bytes.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn read(&self) -> Result<Vec<u8>, Error> {
        match self {
            Self::Inline(bytes) => Ok(bytes.clone()),
            Self::File(path) => read_file(path),
        }
    }
}

fn read_file(path: &Path) -> Result<Vec<u8>, Error> {
    std::fs::read(path).map_err(|error| {
        let reason = error.to_string();
        let reason = reason.split(" (os error").next().unwrap_or_default().to_owned();
        Error::from(format!("cannot read {}: {reason}", path.display()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kubeconfig::tree::parse;

    #[test]
    fn servers() {
        for (text, address, shown) in [
            ("https://10.0.0.1:6443", "10.0.0.1:6443", "https://10.0.0.1:6443"),
            ("https://lb.example", "lb.example:443", "https://lb.example:443"),
            ("https://[fd00::1]:6443/", "[fd00::1]:6443", "https://[fd00::1]:6443"),
            ("https://[fd00::1]", "[fd00::1]:443", "https://[fd00::1]:443"),
            ("lb.example:8443", "lb.example:8443", "https://lb.example:8443"),
            ("https://r/k8s/clusters/c-1", "r:443", "https://r:443/k8s/clusters/c-1"),
        ] {
            let server = ServerUrl::parse(text).unwrap();
            assert_eq!((server.address().as_str(), server.to_string().as_str()), (address, shown));
        }
        for text in [
            "http://10.0.0.1:8080",
            "ftp://x",
            "https://",
            "https://a:b",
            "https://a:0",
            "https://fd00::1:6443",
            "https://u@h",
            "https://h/?q",
            "https://[::1",
            "https://h:99999",
        ] {
            assert!(ServerUrl::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn base64_round_trips_and_garbage_is_refused() {
        for length in 0..70_u8 {
            let bytes: Vec<u8> = (0..length).map(|b| b.wrapping_mul(37)).collect();
            assert_eq!(decode(&encode(&bytes)), Some(bytes));
        }
        assert_eq!(encode(b"hello"), "aGVsbG8=");
        for bad in ["a", "aGVsbG8", "aGVs bG8=", "====", "aGVsbG9=", "aG=sbG8="] {
            assert_eq!(decode(bad), None, "{bad}");
        }
    }

    #[test]
    fn users() {
        for (text, expected) in [
            ("{}", "no credential"),
            ("{token: a, tokenFile: b}", "a token file"),
            ("{token: a}", "a token"),
            ("{client-certificate: a, client-key: b, token: c}", "a client certificate"),
            ("{exec: {command: aws}}", "an exec plugin"),
            ("{username: a, password: b}", "a password"),
            ("{auth-provider: {name: oidc}}", "an auth-provider"),
        ] {
            let node = parse(&format!("u: {text}")).unwrap().unwrap();
            let user = node.get("u").unwrap();
            assert_eq!(credential(user).unwrap().describe(), expected, "{text}");
        }
        for bad in [
            "{client-certificate: a}",
            "{client-key-data: YQ==}",
            "{client-certificate-data: '%', client-key: b}",
        ] {
            let node = parse(&format!("u: {bad}")).unwrap().unwrap();
            assert!(credential(node.get("u").unwrap()).is_err(), "{bad}");
        }
    }

    #[test]
    fn what_is_missing_is_named() {
        let text = "contexts: [{name: a, context: {cluster: c, user: u}}, {name: b, context: {}}]\n\
                    clusters: [{name: c, cluster: {server: 'https://h:1', \
                    insecure-skip-tls-verify: true}}]\n";
        let mut tree = parse(text).unwrap().unwrap();
        let of = |tree: &Node, context| {
            ResolvedContext::resolve(tree, context).map_err(|e| e.to_string())
        };
        assert_eq!(
            of(&tree, None).unwrap_err(),
            "no current-context: choose one with --context (there is a, b)"
        );
        assert_eq!(of(&tree, Some("x")).unwrap_err(), "no context \"x\": there is a, b");
        assert_eq!(of(&tree, Some("b")).unwrap_err(), "context \"b\" names no cluster");
        assert_eq!(of(&tree, Some("a")).unwrap_err(), "context \"a\": no user \"u\"");
        tree.set("users", parse("[{name: u, user: {token: t}}]").unwrap().unwrap());
        let access = of(&tree, Some("a")).unwrap();
        assert!(access.insecure && access.ca.is_none());
        assert_eq!(access.verified_name(), "h");
        assert!(!format!("{access:?}").contains("\"t\""), "a secret in {access:?}");
    }
}

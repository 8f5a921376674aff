//! The content of a kubeconfig (`k8s.io/client-go/tools/clientcmd/api/v1`). Keys that jackstay does not use are
//! preserved in `other`.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use zeroize::Zeroizing;

/// The keys that jackstay does not use.
pub type Other = BTreeMap<String, Value>;

/// A kubeconfig.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Kubeconfig {
    /// The clusters.
    #[serde(default)]
    pub clusters: Vec<NamedCluster>,
    /// The users.
    #[serde(default, rename = "users")]
    pub auth_infos: Vec<NamedAuthInfo>,
    /// The contexts.
    #[serde(default)]
    pub contexts: Vec<NamedContext>,
    /// The name of the context in use.
    #[serde(rename = "current-context", skip_serializing_if = "Option::is_none")]
    pub current_context: Option<String>,
    /// `Config`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    /// `v1`.
    #[serde(rename = "apiVersion", skip_serializing_if = "Option::is_none")]
    pub api_version: Option<String>,
    /// The other keys.
    #[serde(flatten)]
    pub other: Other,
}

impl Kubeconfig {
    /// Adds what this file does not have yet: of two values or entries of one name the first one counts, as in kubectl.
    pub(super) fn merge(&mut self, next: Self) {
        fn add<T>(all: &mut Vec<T>, next: Vec<T>, name: impl Fn(&T) -> &str) {
            let known: HashSet<String> = all.iter().map(|one| name(one).to_owned()).collect();
            all.extend(next.into_iter().filter(|one| !known.contains(name(one))));
        }
        add(&mut self.clusters, next.clusters, |named| &named.name);
        add(&mut self.auth_infos, next.auth_infos, |named| &named.name);
        add(&mut self.contexts, next.contexts, |named| &named.name);
        self.current_context = self.current_context.take().or(next.current_context);
        self.kind = self.kind.take().or(next.kind);
        self.api_version = self.api_version.take().or(next.api_version);
        for (key, value) in next.other {
            self.other.entry(key).or_insert(value);
        }
    }
}

/// A cluster with its name.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct NamedCluster {
    /// The name.
    pub name: String,
    /// The cluster.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cluster: Option<Cluster>,
    /// The other keys.
    #[serde(flatten)]
    pub other: Other,
}

/// How a cluster is reached and verified. Paths are relative to the directory of the file.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Cluster {
    /// The URL.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub server: Option<String>,
    /// Whether the serving certificate is not verified.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub insecure_skip_tls_verify: Option<bool>,
    /// The path of a CA bundle.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub certificate_authority: Option<String>,
    /// A CA bundle as base64, which takes precedence.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub certificate_authority_data: Option<String>,
    /// The URL of an HTTP or SOCKS proxy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub proxy_url: Option<String>,
    /// Whether the client asks for no compression.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disable_compression: Option<bool>,
    /// The name that the serving certificate must contain, instead of the host of the URL.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tls_server_name: Option<String>,
    /// Values of other programs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub extensions: Option<Vec<NamedExtension>>,
    /// The other keys.
    #[serde(flatten)]
    pub other: Other,
}

/// A value of another program.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct NamedExtension {
    /// The name of the program.
    pub name: String,
    /// The value.
    pub extension: Value,
}

/// A user with its name.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct NamedAuthInfo {
    /// The name.
    pub name: String,
    /// The user.
    #[serde(rename = "user", skip_serializing_if = "Option::is_none")]
    pub auth_info: Option<AuthInfo>,
    /// The other keys.
    #[serde(flatten)]
    pub other: Other,
}

/// The credentials of a user. Paths are relative to the directory of the file.
#[derive(Clone, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct AuthInfo {
    /// The name for a password.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub username: Option<String>,
    /// The password.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub password: Option<Secret>,
    /// A bearer token.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token: Option<Secret>,
    /// The path of a file with a bearer token, which takes precedence.
    #[serde(rename = "tokenFile", skip_serializing_if = "Option::is_none")]
    pub token_file: Option<String>,
    /// The path of a client certificate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub client_certificate: Option<String>,
    /// A client certificate as base64, which takes precedence.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub client_certificate_data: Option<String>,
    /// The path of its key.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub client_key: Option<String>,
    /// Its key as base64, which takes precedence.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub client_key_data: Option<Secret>,
    /// The user that is impersonated.
    #[serde(rename = "as", skip_serializing_if = "Option::is_none")]
    pub impersonate: Option<String>,
    /// A plugin of earlier versions of kubectl.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub auth_provider: Option<Value>,
    /// A command that prints a credential.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exec: Option<ExecConfig>,
    /// The other keys.
    #[serde(flatten)]
    pub other: Other,
}

impl fmt::Debug for AuthInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("AuthInfo(***)")
    }
}

/// A text that is overwritten in memory before that is freed, and not printed.
#[derive(Clone, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Secret(Zeroizing<String>);

impl Secret {
    /// The text.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(***)")
    }
}

/// A command that prints a credential (`client.authentication.k8s.io`).
#[derive(Clone, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ExecConfig {
    /// The version of its input and output.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub api_version: Option<String>,
    /// The program.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
    /// Its arguments.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub args: Option<Vec<String>>,
    /// Its additional environment: maps of `name` and `value`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub env: Option<Vec<HashMap<String, String>>>,
    /// Whether it may ask its user.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub interactive_mode: Option<ExecInteractiveMode>,
    /// Whether the cluster is described to it.
    #[serde(default)]
    pub provide_cluster_info: bool,
    /// The other keys.
    #[serde(flatten)]
    pub other: Other,
}

/// Whether an exec plugin may ask its user.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ExecInteractiveMode {
    /// It does not.
    Never,
    /// It does if there is a terminal.
    IfAvailable,
    /// It must.
    Always,
}

/// A context with its name.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct NamedContext {
    /// The name.
    pub name: String,
    /// The context.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub context: Option<Context>,
    /// The other keys.
    #[serde(flatten)]
    pub other: Other,
}

/// A user at a cluster.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Context {
    /// The name of the cluster.
    pub cluster: String,
    /// The name of the user.
    pub user: Option<String>,
    /// The namespace of requests without one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    /// The other keys.
    #[serde(flatten)]
    pub other: Other,
}

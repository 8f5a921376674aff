//! The cluster and the user of one context.

use std::collections::BTreeMap;

use http::uri::Authority;
use jackstay_core::discovery::address::tls_name;
use jackstay_core::request::path_prefix::{PathPrefix, PathPrefixError};
use serde_json::Value;

use super::credential::{Credential, CredentialError, PemSource, UserCredentials};
use super::file::{context_names, find_cluster};
use super::original::{copy_rewritten_fields, recorded_original};
use super::sent_authority::sent_authority;
use super::server_url::{ServerUrl, ServerUrlError, without_user};
use crate::model::{AuthInfo, Cluster, Kubeconfig};

/// Why a context cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ContextError {
    /// No context is chosen and there is no current one; these exist.
    #[error("no current-context: choose one with --context ({})", existing(.0))]
    NoCurrent(Vec<String>),
    /// There is no context of that name; these exist.
    #[error("no context {0:?} ({existing})", existing = existing(.1))]
    Unknown(String, Vec<String>),
    /// The context names no cluster.
    #[error("context {0:?} names no cluster")]
    NoCluster(String),
    /// The context names a cluster that does not exist.
    #[error("context {context:?}: no cluster {cluster:?}")]
    UnknownCluster {
        /// The context.
        context: String,
        /// The cluster.
        cluster: String,
    },
    /// The cluster cannot be used.
    #[error("cluster {0:?}: {1}")]
    Cluster(String, #[source] ClusterError),
    /// The context names a user that does not exist.
    #[error("context {context:?}: no user {user:?}")]
    UnknownUser {
        /// The context.
        context: String,
        /// The user.
        user: String,
    },
    /// The credential of the user cannot be used.
    #[error("user {0:?}: {1}")]
    User(String, #[source] CredentialError),
    /// A value in an entry has a wrong type. [`super::KubeconfigFile::mistake`] says which.
    #[error("{list}: the entry {name:?} has a value of a wrong type")]
    Broken {
        /// The list of the entry.
        list: &'static str,
        /// The name of the entry.
        name: String,
    },
}

/// Why a cluster cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ClusterError {
    /// It names no server.
    #[error("has no server")]
    NoServer,
    /// Its server cannot be used.
    #[error("{0}")]
    Server(#[source] ServerUrlError),
    /// The path of its server cannot be used.
    #[error("the path of server {0}")]
    Path(#[source] PathPrefixError),
    /// Its CA is not base64.
    #[error("{0}")]
    Ca(#[source] CredentialError),
    /// It has a CA and is not to be verified.
    #[error(
        "has a certificate-authority and insecure-skip-tls-verify, and kubectl refuses both together: remove one"
    )]
    InsecureWithCa,
}

/// The names of the contexts that exist, for messages.
fn existing(names: &[String]) -> String {
    match names {
        [] => "there are no contexts".to_owned(),
        names => format!("contexts: {}", names.join(", ")),
    }
}

/// A context with its cluster and its user.
#[derive(Debug, Clone)]
pub struct ResolvedContext {
    /// Name of the context.
    pub context: String,
    /// Name of its cluster.
    pub cluster: String,
    /// Name of its user.
    pub user: String,
    /// The apiserver; the original one if the cluster points at jackstay.
    pub server: ServerUrl,
    /// The authority that clients send to it; `None` if its host cannot be one.
    pub authority: Option<Authority>,
    /// The path below which it has the API, as clients send it.
    pub path_prefix: PathPrefix,
    /// The CA bundle that verifies the apiserver; `None` means the bundle of this system.
    pub ca: Option<PemSource>,
    /// `tls-server-name`: the name that clients verify; `None` means the host of the server.
    pub tls_server_name: Option<String>,
    /// `insecure-skip-tls-verify`: whether clients do not verify the apiserver.
    pub insecure: bool,
    /// `proxy-url`: the proxy through which clients connect.
    pub proxy_url: Option<String>,
    /// The credential of the user.
    pub credential: Credential,
}

impl ResolvedContext {
    /// Resolves a context of a kubeconfig with absolute paths; `None` is the current context.
    ///
    /// # Errors
    /// An entry is missing or invalid.
    pub fn resolve(config: &Kubeconfig, context: Option<&str>) -> Result<Self, ContextError> {
        let contexts = || context_names(config).into_iter().map(ToOwned::to_owned).collect();
        let context = context
            .or(non_empty(config.current_context.as_ref()))
            .ok_or_else(|| ContextError::NoCurrent(contexts()))?;
        let named = config.contexts.iter().find(|named| named.name == context);
        refuse_broken(named.map(|named| &named.other), ("contexts", "context"), context)?;
        let entry = named
            .and_then(|named| named.context.as_ref())
            .ok_or_else(|| ContextError::Unknown(context.to_owned(), contexts()))?;
        let name = non_empty(Some(&entry.cluster))
            .ok_or_else(|| ContextError::NoCluster(context.to_owned()))?;
        let in_cluster = |error| ContextError::Cluster(name.to_owned(), error);
        let unknown_cluster = || ContextError::UnknownCluster {
            context: context.to_owned(),
            cluster: name.to_owned(),
        };
        let named = config.clusters.iter().find(|named| named.name == name);
        refuse_broken(named.map(|named| &named.other), ("clusters", "cluster"), name)?;
        let mut cluster = find_cluster(config, name).ok_or_else(unknown_cluster)?.clone();
        if let Some(original) = recorded_original(&cluster) {
            copy_rewritten_fields(&mut cluster, original);
        }
        let server =
            non_empty(cluster.server.as_ref()).ok_or_else(|| in_cluster(ClusterError::NoServer))?;
        let authority = sent_authority(server);
        let server = ServerUrl::parse(server).map_err(ClusterError::Server).map_err(in_cluster)?;
        let path_prefix = PathPrefix::of_url_path(&server.path)
            .map_err(ClusterError::Path)
            .map_err(in_cluster)?;
        let ca = certificate_authority(&cluster).map_err(ClusterError::Ca).map_err(in_cluster)?;
        let insecure = cluster.insecure_skip_tls_verify == Some(true);
        if insecure && ca.is_some() {
            return Err(in_cluster(ClusterError::InsecureWithCa));
        }
        let user = entry.user.as_deref().unwrap_or_default();
        let credential = UserCredentials::new(find_user(config, context, user)?, &cluster)
            .map_err(|error| ContextError::User(user.to_owned(), error))?
            .preferred();
        Ok(Self {
            context: context.to_owned(),
            cluster: name.to_owned(),
            user: user.to_owned(),
            server,
            authority,
            path_prefix,
            ca,
            tls_server_name: non_empty(cluster.tls_server_name.as_ref()).map(ToOwned::to_owned),
            insecure,
            proxy_url: non_empty(cluster.proxy_url.as_ref()).map(ToOwned::to_owned),
            credential,
        })
    }

    /// What follows from the `proxy-url` of the cluster, if it has one.
    pub fn proxy_note(&self) -> Option<String> {
        let url = without_user(self.proxy_url.as_deref()?);
        Some(format!(
            "jackstay connects directly, not through the proxy {url} (proxy-url of cluster {:?}): \
             it needs a path of its own to the apiservers",
            self.cluster
        ))
    }

    /// The name that clients verify in the apiserver's certificate.
    pub fn verified_name(&self) -> &str {
        self.tls_server_name.as_deref().unwrap_or(tls_name(&self.server.host))
    }
}

/// The text, unless it is empty: an empty text counts as missing, as in client-go.
fn non_empty(text: Option<&String>) -> Option<&str> {
    text.map(String::as_str).filter(|text| !text.is_empty())
}

/// Refuses an entry whose content, below `key`, could not be parsed.
fn refuse_broken(
    other: Option<&BTreeMap<String, Value>>,
    (list, key): (&'static str, &str),
    name: &str,
) -> Result<(), ContextError> {
    match other {
        Some(other) if other.contains_key(key) => {
            Err(ContextError::Broken { list, name: name.to_owned() })
        }
        _ => Ok(()),
    }
}

fn certificate_authority(cluster: &Cluster) -> Result<Option<PemSource>, CredentialError> {
    PemSource::new(
        "certificate-authority",
        cluster.certificate_authority_data.as_deref(),
        cluster.certificate_authority.as_deref(),
    )
}

/// The user of that name; an anonymous user if the name is empty.
fn find_user<'a>(
    config: &'a Kubeconfig,
    context: &str,
    name: &str,
) -> Result<&'a AuthInfo, ContextError> {
    static ANONYMOUS: std::sync::LazyLock<AuthInfo> = std::sync::LazyLock::new(AuthInfo::default);
    if name.is_empty() {
        return Ok(&ANONYMOUS);
    }
    let named = config.auth_infos.iter().find(|named| named.name == name);
    refuse_broken(named.map(|named| &named.other), ("users", "user"), name)?;
    let named = named.ok_or_else(|| {
        let (context, user) = (context.to_owned(), name.to_owned());
        ContextError::UnknownUser { context, user }
    })?;
    Ok(named.auth_info.as_ref().unwrap_or(&ANONYMOUS))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resolve_incomplete_kubeconfig_error_names_the_missing_entry() {
        let text = "contexts: [{name: a, context: {cluster: c, user: u}}, \
                    {name: b, context: {cluster: ''}}]\n\
                    clusters: [{name: c, cluster: {server: 'https://h:1', \
                    insecure-skip-tls-verify: true}}]\n";
        let parse = |text: &str| serde_saphyr::from_str::<Kubeconfig>(text).unwrap();
        let resolve = ResolvedContext::resolve;
        let config = parse(text);
        for (context, expected) in [
            (None, "no current-context: choose one with --context (contexts: a, b)"),
            (Some("x"), "no context \"x\" (contexts: a, b)"),
            (Some("b"), "context \"b\" names no cluster"),
            (Some("a"), "context \"a\": no user \"u\""),
        ] {
            assert_eq!(resolve(&config, context).unwrap_err().to_string(), expected);
        }
        let config = parse(&format!("{text}users: [{{name: u, user: {{token: s3cret}}}}]\n"));
        let resolved = resolve(&config, Some("a")).unwrap();
        assert!(resolved.insecure && resolved.ca.is_none());
        assert_eq!(resolved.verified_name(), "h");
        assert!(!format!("{resolved:?}").contains("s3cret"), "a secret in {resolved:?}");
    }
}

//! The cluster and the user of one context.

use kube::config::{AuthInfo, Cluster, Kubeconfig};

use super::credential::{Credential, PemSource, UserCredentials};
use super::file::{context_names, find_cluster};
use super::original::{copy_rewritten_fields, recorded_original};
use super::server_url::{ServerUrl, without_user};

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
    pub fn resolve(config: &Kubeconfig, context: Option<&str>) -> Result<Self, String> {
        let contexts = match context_names(config).as_slice() {
            [] => "there are no contexts".to_owned(),
            names => format!("contexts: {}", names.join(", ")),
        };
        let context = context
            .or(non_empty(config.current_context.as_ref()))
            .ok_or_else(|| format!("no current-context: choose one with --context ({contexts})"))?;
        let named = config.contexts.iter().find(|named| named.name == context);
        let entry = named
            .and_then(|named| named.context.as_ref())
            .ok_or_else(|| format!("no context {context:?} ({contexts})"))?;
        let name = non_empty(Some(&entry.cluster))
            .ok_or_else(|| format!("context {context:?} names no cluster"))?;
        let in_cluster = |error: String| format!("cluster {name:?}: {error}");
        let mut cluster = find_cluster(config, name)
            .ok_or_else(|| format!("context {context:?}: no cluster {name:?}"))?
            .clone();
        if let Some(original) = recorded_original(&cluster) {
            copy_rewritten_fields(&mut cluster, original);
        }
        let server =
            non_empty(cluster.server.as_ref()).ok_or_else(|| in_cluster("has no server".into()))?;
        let user = entry.user.as_deref().unwrap_or_default();
        let credential = UserCredentials::new(find_user(config, context, user)?, &cluster)
            .map_err(|error| format!("user {user:?}: {error}"))?
            .preferred();
        Ok(Self {
            context: context.to_owned(),
            cluster: name.to_owned(),
            user: user.to_owned(),
            server: ServerUrl::parse(server).map_err(in_cluster)?,
            ca: certificate_authority(&cluster).map_err(in_cluster)?,
            tls_server_name: non_empty(cluster.tls_server_name.as_ref()).map(ToOwned::to_owned),
            insecure: cluster.insecure_skip_tls_verify == Some(true),
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
        self.tls_server_name.as_deref().unwrap_or(&self.server.host)
    }
}

/// The text, unless it is empty: an empty text counts as missing, as in client-go.
fn non_empty(text: Option<&String>) -> Option<&str> {
    text.map(String::as_str).filter(|text| !text.is_empty())
}

fn certificate_authority(cluster: &Cluster) -> Result<Option<PemSource>, String> {
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
) -> Result<&'a AuthInfo, String> {
    static ANONYMOUS: std::sync::LazyLock<AuthInfo> = std::sync::LazyLock::new(AuthInfo::default);
    if name.is_empty() {
        return Ok(&ANONYMOUS);
    }
    let named = config.auth_infos.iter().find(|named| named.name == name);
    let named = named.ok_or_else(|| format!("context {context:?}: no user {name:?}"))?;
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
        assert_eq!(
            resolve(&config, None).unwrap_err(),
            "no current-context: choose one with --context (contexts: a, b)"
        );
        assert_eq!(resolve(&config, Some("x")).unwrap_err(), "no context \"x\" (contexts: a, b)");
        assert_eq!(resolve(&config, Some("b")).unwrap_err(), "context \"b\" names no cluster");
        assert_eq!(resolve(&config, Some("a")).unwrap_err(), "context \"a\": no user \"u\"");
        let config = parse(&format!("{text}users: [{{name: u, user: {{token: s3cret}}}}]\n"));
        let resolved = resolve(&config, Some("a")).unwrap();
        assert!(resolved.insecure && resolved.ca.is_none());
        assert_eq!(resolved.verified_name(), "h");
        assert!(!format!("{resolved:?}").contains("s3cret"), "a secret in {resolved:?}");
    }
}

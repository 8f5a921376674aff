//! The record of what a cluster was before jackstay changed it.
//!
//! The record is an extension of the cluster, which kubectl keeps. So a revert needs no second
//! file, a second change starts from the original values, and other changes to the file in between
//! survive.

use kube::config::{Cluster, NamedExtension};
use serde_json::json;

/// Name of the extension.
const NAME: &str = "jackstay";

/// The fields of a cluster that jackstay changes; all others have no value.
pub fn changed_fields(cluster: &Cluster) -> Cluster {
    let mut fields = Cluster::default();
    set_changed_fields(&mut fields, cluster.clone());
    fields
}

/// Sets the fields that jackstay changes to their values in `from`.
pub fn set_changed_fields(cluster: &mut Cluster, from: Cluster) {
    cluster.server = from.server;
    cluster.certificate_authority = from.certificate_authority;
    cluster.certificate_authority_data = from.certificate_authority_data;
    cluster.insecure_skip_tls_verify = from.insecure_skip_tls_verify;
    cluster.tls_server_name = from.tls_server_name;
    cluster.proxy_url = from.proxy_url;
}

/// The recorded fields, if jackstay has changed the cluster.
pub fn original(cluster: &Cluster) -> Option<Cluster> {
    let extension = cluster.extensions.iter().flatten().find(|entry| entry.name == NAME)?;
    serde_json::from_value(extension.extension.get("original")?.clone()).ok()
}

/// Records the fields; replaces an earlier record.
pub fn record(cluster: &mut Cluster, original: &Cluster) {
    forget(cluster);
    let extension = json!({ "original": changed_fields(original) });
    let entry = NamedExtension { name: NAME.to_owned(), extension };
    cluster.extensions.get_or_insert_default().push(entry);
}

/// Removes the record.
pub fn forget(cluster: &mut Cluster) {
    if let Some(extensions) = &mut cluster.extensions {
        extensions.retain(|entry| entry.name != NAME);
        if extensions.is_empty() {
            cluster.extensions = None;
        }
    }
}

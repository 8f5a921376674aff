//! Records the values that a kubeconfig cluster had before jackstay rewrote it.
//!
//! The record is an entry in `extensions` of the cluster, which kubectl preserves. A revert therefore
//! needs no backup file, and changes of other fields since the rewrite are preserved. A second rewrite
//! starts from the recorded values. The record also names the configuration of jackstay, which a revert leaves
//! in place.

use crate::model::{Cluster, NamedExtension};
use serde_json::{Value, json};

const EXTENSION_NAME: &str = "jackstay";

/// A copy of a cluster with only the fields that jackstay rewrites.
pub fn rewritten_fields(cluster: &Cluster) -> Cluster {
    let mut fields = Cluster::default();
    copy_rewritten_fields(&mut fields, cluster.clone());
    fields
}

/// Copies the fields that jackstay rewrites from `from` to `cluster`; a field that is not set there is
/// removed.
pub fn copy_rewritten_fields(cluster: &mut Cluster, from: Cluster) {
    cluster.server = from.server;
    cluster.certificate_authority = from.certificate_authority;
    cluster.certificate_authority_data = from.certificate_authority_data;
    cluster.insecure_skip_tls_verify = from.insecure_skip_tls_verify;
    cluster.tls_server_name = from.tls_server_name;
    cluster.proxy_url = from.proxy_url;
}

/// The record in a cluster.
fn record(cluster: &Cluster) -> Option<&Value> {
    let mut extensions = cluster.extensions.iter().flatten();
    Some(&extensions.find(|entry| entry.name == EXTENSION_NAME)?.extension)
}

/// The fields as they were before jackstay rewrote the cluster. `None` if the cluster has no readable
/// record.
pub fn recorded_original(cluster: &Cluster) -> Option<Cluster> {
    serde_json::from_value(record(cluster)?.get("original")?.clone()).ok()
}

/// The path of the configuration that was written with the cluster; `None` if none is recorded.
pub fn recorded_configuration(cluster: &Cluster) -> Option<String> {
    Some(record(cluster)?.get("configuration")?.as_str()?.to_owned())
}

/// Records the rewritten fields of `original` and the path of the configuration in `cluster`, in place of an
/// earlier record.
pub fn record_original(cluster: &mut Cluster, original: &Cluster, configuration: Option<&str>) {
    remove_record(cluster);
    let mut extension = json!({ "original": rewritten_fields(original) });
    if let Some(path) = configuration {
        extension["configuration"] = path.into();
    }
    let entry = NamedExtension { name: EXTENSION_NAME.to_owned(), extension };
    cluster.extensions.get_or_insert_default().push(entry);
}

/// Removes the record, and `extensions` if it has no other entry.
pub fn remove_record(cluster: &mut Cluster) {
    if let Some(extensions) = &mut cluster.extensions {
        extensions.retain(|entry| entry.name != EXTENSION_NAME);
        if extensions.is_empty() {
            cluster.extensions = None;
        }
    }
}

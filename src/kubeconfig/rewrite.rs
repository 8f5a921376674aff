//! Points one cluster of a kubeconfig at jackstay, and back at the apiserver.

use std::fmt;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use kube::config::Cluster;
use serde::Serialize;
use serde_json::{Value, json};

use super::original::{
    copy_rewritten_fields, record_original, recorded_original, remove_record, rewritten_fields,
};
use super::server_url::ServerUrl;

/// The keys of a cluster that jackstay changes.
const KEYS: [&str; 6] = [
    "server",
    "certificate-authority",
    "certificate-authority-data",
    "insecure-skip-tls-verify",
    "tls-server-name",
    "proxy-url",
];

/// The endpoint of jackstay for local clients.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LocalEndpoint {
    /// Host and port.
    pub address: String,
    /// How clients verify the certificate that they receive there.
    pub trust: ClientTrust,
}

/// How clients verify the certificate that they receive at the local endpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ClientTrust {
    /// Passthrough: it is the apiserver's certificate, and it must hold this name. `None` if it
    /// holds the host of the local endpoint, or if clients do not verify.
    Apiserver(Option<String>),
    /// Termination: it is jackstay's certificate, signed by this local CA (PEM).
    Local(Vec<u8>),
}

/// A changed key.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct KeyChange {
    /// Key of the cluster, such as `server`.
    pub key: &'static str,
    /// The value before, for messages.
    pub from: Option<String>,
    /// The value now, for messages.
    pub to: Option<String>,
}

impl fmt::Display for KeyChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.from, &self.to) {
            (Some(from), Some(to)) => write!(f, "{}: {from} -> {to}", self.key),
            (None, Some(to)) => write!(f, "{}: set to {to}", self.key),
            (Some(from), None) => write!(f, "{}: removed (was {from})", self.key),
            (None, None) => write!(f, "{}: unchanged", self.key),
        }
    }
}

/// Points a cluster at jackstay. `server` is the original apiserver, whose path the URL keeps.
pub fn point_at(cluster: &mut Cluster, server: &ServerUrl, to: &LocalEndpoint) -> Vec<KeyChange> {
    let before = cluster.clone();
    restore(cluster);
    let restored = cluster.clone();
    cluster.server = Some(format!("https://{}{}", to.address, server.path));
    // `proxy-url` is for the remote apiserver; the local endpoint is connected to directly.
    cluster.proxy_url = None;
    match &to.trust {
        ClientTrust::Apiserver(Some(name)) => cluster.tls_server_name = Some(name.clone()),
        ClientTrust::Apiserver(None) => {}
        ClientTrust::Local(ca) => {
            cluster.certificate_authority = None;
            cluster.insecure_skip_tls_verify = None;
            cluster.tls_server_name = None;
            cluster.certificate_authority_data = Some(STANDARD.encode(ca));
        }
    }
    record_original(cluster, &restored);
    changes(&before, cluster)
}

/// Restores the original cluster. Returns no changes if the cluster has no record.
pub fn revert(cluster: &mut Cluster) -> Vec<KeyChange> {
    let before = cluster.clone();
    restore(cluster);
    changes(&before, cluster)
}

fn restore(cluster: &mut Cluster) {
    if let Some(before) = recorded_original(cluster) {
        copy_rewritten_fields(cluster, before);
        remove_record(cluster);
    }
}

fn changes(before: &Cluster, after: &Cluster) -> Vec<KeyChange> {
    let (before, after) = (json!(rewritten_fields(before)), json!(rewritten_fields(after)));
    let shown = |fields: &Value, key: &str| match fields.get(key)? {
        Value::String(data) if key.ends_with("-data") => {
            Some(format!("a CA of {} bytes", data.len() / 4 * 3))
        }
        Value::String(text) => Some(text.clone()),
        other => Some(other.to_string()),
    };
    let differs = |key: &&&'static str| before.get(**key) != after.get(**key);
    let change =
        |key: &&'static str| KeyChange { key, from: shown(&before, key), to: shown(&after, key) };
    KEYS.iter().filter(differs).map(change).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLUSTER: &str = "\
certificate-authority: pki/ca.crt
server: https://lb.example:6443/prefix
tls-server-name: kubernetes
disable-compression: true
proxy-url: socks5://x
unknown-key: 3
extensions:
- extension:
    a: 1
  name: other
";

    fn cluster(text: &str) -> Cluster {
        serde_saphyr::from_str(text).unwrap()
    }

    fn pointed(cluster: &mut Cluster, trust: ClientTrust) -> Vec<String> {
        let before = recorded_original(cluster).unwrap_or(cluster.clone());
        let server = ServerUrl::parse(before.server.as_deref().unwrap()).unwrap();
        let to = LocalEndpoint { address: "127.0.0.1:7443".into(), trust };
        point_at(cluster, &server, &to).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn passthrough_changes_the_address_and_the_name_and_reverts() {
        let mut changed = cluster(CLUSTER);
        let changes = pointed(&mut changed, ClientTrust::Apiserver(Some("lb.example".into())));
        assert_eq!(
            changes,
            [
                "server: https://lb.example:6443/prefix -> https://127.0.0.1:7443/prefix",
                "tls-server-name: kubernetes -> lb.example",
                "proxy-url: removed (was socks5://x)",
            ]
        );
        assert_eq!(changed.certificate_authority.as_deref(), Some("pki/ca.crt"));
        assert_eq!(changed.disable_compression, Some(true));
        assert_eq!(changed.extensions.as_ref().unwrap().len(), 2);
        // The record survives a write.
        let mut read_back = cluster(&serde_saphyr::to_string(&changed).unwrap());
        assert_eq!(revert(&mut read_back).len(), 3);
        assert_eq!(json!(read_back), json!(cluster(CLUSTER)));
        assert_eq!(revert(&mut read_back), []);
    }

    #[test]
    fn local_ca_replaces_the_verification_and_reverts() {
        let text = "server: https://10.0.0.1:6443\ninsecure-skip-tls-verify: true\n";
        let mut changed = cluster(text);
        let changes = pointed(&mut changed, ClientTrust::Local(b"one".to_vec()));
        assert_eq!(
            changes,
            [
                "server: https://10.0.0.1:6443 -> https://127.0.0.1:7443",
                "certificate-authority-data: set to a CA of 3 bytes",
                "insecure-skip-tls-verify: removed (was true)",
            ]
        );
        let again = pointed(&mut changed, ClientTrust::Local(b"two".to_vec()));
        assert_eq!(again, ["certificate-authority-data: a CA of 3 bytes -> a CA of 3 bytes"]);
        pointed(&mut changed, ClientTrust::Apiserver(Some("10.0.0.1".into())));
        assert_eq!(changed.insecure_skip_tls_verify, Some(true));
        let before = recorded_original(&changed).unwrap();
        assert_eq!(before.server.as_deref(), Some("https://10.0.0.1:6443"));
        revert(&mut changed);
        assert_eq!(json!(changed), json!(cluster(text)));
    }
}

//! Points one cluster of a kubeconfig at jackstay, or restores its original values.

use std::fmt;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use jackstay_kubeconfig::model::Cluster;
use jackstay_kubeconfig::original::{
    copy_rewritten_fields, record_original, recorded_configuration, recorded_original,
    remove_record, rewritten_fields,
};
use jackstay_kubeconfig::{ServerUrl, user_in, without_user};
use serde::Serialize;
use serde_json::{Value, json};

/// The keys of a cluster that jackstay rewrites.
const KEYS: [&str; 6] = [
    "server",
    "certificate-authority",
    "certificate-authority-data",
    "insecure-skip-tls-verify",
    "tls-server-name",
    "proxy-url",
];

/// The address of jackstay for local clients.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LocalEndpoint {
    /// Host and port.
    pub address: String,
    /// How clients verify the certificate that they receive there.
    pub trust: ClientTrust,
    /// The path of the configuration that is written with the kubeconfig.
    pub configuration: Option<String>,
}

/// How clients verify the certificate that they receive at the local endpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ClientTrust {
    /// Passthrough: clients receive the apiserver's certificate and verify this name in it. `None` if
    /// they verify the host of the local endpoint, or do not verify the certificate.
    Apiserver(Option<String>),
    /// Termination: clients receive jackstay's certificate, which this local CA (PEM) has signed.
    Local(Vec<u8>),
}

/// A changed key.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct KeyChange {
    /// Key of the cluster, such as `server`.
    pub key: &'static str,
    /// The old value, for messages.
    pub from: Option<String>,
    /// The new value, for messages.
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

/// Points a cluster at jackstay. `server` is the original apiserver; its path becomes part of the new URL.
pub fn point_at(cluster: &mut Cluster, server: &ServerUrl, to: &LocalEndpoint) -> Vec<KeyChange> {
    let before = cluster.clone();
    let configuration = to.configuration.clone().or(recorded_configuration(cluster));
    restore(cluster);
    let restored = cluster.clone();
    // Clients of Go send a user in the URL as basic authentication.
    let user = restored.server.as_deref().map(user_in).unwrap_or_default();
    cluster.server = Some(format!("https://{user}{}{}", to.address, server.path));
    // The proxy leads to the remote apiserver; clients connect to the local endpoint directly.
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
    record_original(cluster, &restored, configuration.as_deref());
    changes(&before, cluster)
}

/// Restores the original cluster. Returns no changes if the cluster has no record.
pub fn revert(cluster: &mut Cluster) -> Vec<KeyChange> {
    let before = cluster.clone();
    restore(cluster);
    changes(&before, cluster)
}

fn restore(cluster: &mut Cluster) {
    if let Some(original) = recorded_original(cluster) {
        copy_rewritten_fields(cluster, original);
        remove_record(cluster);
    }
}

fn changes(before: &Cluster, after: &Cluster) -> Vec<KeyChange> {
    let (before, after) = (json!(rewritten_fields(before)), json!(rewritten_fields(after)));
    let shown = |fields: &Value, key: &str| match fields.get(key)? {
        Value::String(data) if key.ends_with("-data") => {
            Some(format!("a CA of {} bytes", data.len() / 4 * 3))
        }
        Value::String(url) if ["proxy-url", "server"].contains(&key) => Some(without_user(url)),
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
proxy-url: socks5://u:p@x
unknown-key: 3
extensions:
- extension:
    a: 1
  name: other
";

    fn cluster(text: &str) -> Cluster {
        serde_saphyr::from_str(text).unwrap()
    }

    /// Points the cluster at 127.0.0.1:7443 and returns the changes.
    fn point(cluster: &mut Cluster, trust: ClientTrust) -> Vec<String> {
        let original = recorded_original(cluster).unwrap_or(cluster.clone());
        let server = ServerUrl::parse(original.server.as_deref().unwrap()).unwrap();
        let configuration = Some("/etc/jackstay/jackstay.yaml".to_owned());
        let to = LocalEndpoint { address: "127.0.0.1:7443".into(), trust, configuration };
        point_at(cluster, &server, &to).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn point_at_passthrough_changes_address_and_name_and_revert_restores_them() {
        let mut changed = cluster(CLUSTER);
        let changes = point(&mut changed, ClientTrust::Apiserver(Some("lb.example".into())));
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
        let configuration = Some("/etc/jackstay/jackstay.yaml".to_owned());
        assert_eq!(recorded_configuration(&read_back), configuration);
        // A second rewrite without a configuration keeps the path.
        let to = LocalEndpoint {
            address: "127.0.0.1:7443".into(),
            trust: ClientTrust::Apiserver(Some("lb.example".into())),
            configuration: None,
        };
        let server = ServerUrl::parse("https://lb.example:6443/prefix").unwrap();
        assert_eq!(point_at(&mut read_back, &server, &to), []);
        assert_eq!(recorded_configuration(&read_back), configuration);
        assert_eq!(revert(&mut read_back).len(), 3);
        assert_eq!(json!(read_back), json!(cluster(CLUSTER)));
        assert_eq!(revert(&mut read_back), []);
    }

    #[test]
    fn point_at_local_ca_replaces_verification_and_revert_restores_it() {
        let text = "server: https://10.0.0.1:6443\ninsecure-skip-tls-verify: true\n";
        let mut changed = cluster(text);
        let changes = point(&mut changed, ClientTrust::Local(b"one".to_vec()));
        assert_eq!(
            changes,
            [
                "server: https://10.0.0.1:6443 -> https://127.0.0.1:7443",
                "certificate-authority-data: set to a CA of 3 bytes",
                "insecure-skip-tls-verify: removed (was true)",
            ]
        );
        let changes = point(&mut changed, ClientTrust::Local(b"two".to_vec()));
        assert_eq!(changes, ["certificate-authority-data: a CA of 3 bytes -> a CA of 3 bytes"]);
        point(&mut changed, ClientTrust::Apiserver(Some("10.0.0.1".into())));
        assert_eq!(changed.insecure_skip_tls_verify, Some(true));
        let original = recorded_original(&changed).unwrap();
        assert_eq!(original.server.as_deref(), Some("https://10.0.0.1:6443"));
        revert(&mut changed);
        assert_eq!(json!(changed), json!(cluster(text)));
    }
}

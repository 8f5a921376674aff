//! Moves one cluster of a kubeconfig to the local endpoint, and back.
//!
//! What the cluster was is kept in the cluster itself, as an extension, where kubectl preserves it
//! and shows it to nobody. So the way back needs no second file that could be lost or grow old,
//! moving again starts from what it was, and everything else in the file may change in between.

use std::fmt;

use super::access::{ServerUrl, encode};
use super::tree::Node;

/// Name of our extension.
const NAME: &str = "jackstay";

/// The keys of a cluster that a move may change.
const KEYS: [&str; 6] = [
    "server",
    "certificate-authority",
    "certificate-authority-data",
    "insecure-skip-tls-verify",
    "tls-server-name",
    "proxy-url",
];

/// Where a cluster goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LocalEndpoint {
    /// Host and port of the local endpoint.
    pub address: String,
    /// How clients verify what answers there.
    pub trust: ClientTrust,
}

/// How clients verify what answers at the local endpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ClientTrust {
    /// As before: the apiserver itself answers, and its certificate must hold this name. `None`
    /// where the name in the URL is the one in the certificate.
    Apiserver(Option<String>),
    /// The local CA, PEM: jackstay itself answers, with a certificate for the local address.
    Local(Vec<u8>),
}

/// One key that is different now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyChange {
    /// The key.
    pub key: &'static str,
    /// Its value before, for people.
    pub from: Option<String>,
    /// Its value now, for people.
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

/// What a cluster was before it was moved, if it was.
pub fn original(cluster: &Node) -> Option<&Node> {
    let ours = |item: &&Node| item.str("name") == Some(NAME);
    cluster.items("extensions").iter().find(ours)?.get("extension")?.get("original")
}

/// The same, to change it.
pub fn original_mut(cluster: &mut Node) -> Option<&mut Node> {
    let ours = |item: &&mut Node| item.str("name") == Some(NAME);
    let items = cluster.items_mut("extensions").iter_mut();
    items.into_iter().find(ours)?.get_mut("extension")?.get_mut("original")
}

/// Moves a cluster; `server` is where it was, for the path of its URL.
pub fn apply(cluster: &mut Node, server: &ServerUrl, target: &LocalEndpoint) -> Vec<KeyChange> {
    let before = cluster.clone();
    restore(cluster);
    let mut was = Node::map();
    for key in KEYS {
        if let Some(value) = cluster.get(key) {
            was.set(key, value.clone());
        }
    }
    cluster.set("server", Node::text(format!("https://{}{}", target.address, server.path)));
    // It led to the apiserver; nothing is between a client and its own loopback.
    cluster.remove("proxy-url");
    match &target.trust {
        ClientTrust::Apiserver(Some(name)) => cluster.set("tls-server-name", Node::text(name)),
        ClientTrust::Apiserver(None) => {}
        ClientTrust::Local(ca) => {
            cluster.remove("certificate-authority");
            cluster.remove("insecure-skip-tls-verify");
            cluster.remove("tls-server-name");
            cluster.set("certificate-authority-data", Node::text(encode(ca)));
        }
    }
    let extension = Node::Map(vec![
        ("extension".into(), Node::Map(vec![("original".into(), was)])),
        ("name".into(), Node::text(NAME)),
    ]);
    match cluster.get_mut("extensions") {
        Some(Node::List(items)) => items.push(extension),
        _ => cluster.set("extensions", Node::List(vec![extension])),
    }
    changes(&before, cluster)
}

/// Moves a cluster back; no changes if it was not moved.
pub fn revert(cluster: &mut Node) -> Vec<KeyChange> {
    let before = cluster.clone();
    restore(cluster);
    changes(&before, cluster)
}

/// Puts back what was there and forgets the move.
fn restore(cluster: &mut Node) {
    let Some(was) = original(cluster).cloned() else { return };
    for key in KEYS {
        match was.get(key) {
            Some(value) => cluster.set(key, value.clone()),
            None => drop(cluster.remove(key)),
        }
    }
    if let Some(Node::List(items)) = cluster.get_mut("extensions") {
        items.retain(|item| item.str("name") != Some(NAME));
        if items.is_empty() {
            cluster.remove("extensions");
        }
    }
}

fn changes(before: &Node, after: &Node) -> Vec<KeyChange> {
    let shown = |node: &Node, key: &str| {
        let text = node.get(key)?.as_str()?;
        let inline = key.ends_with("-data");
        Some(if inline { format!("a CA of {} bytes", text.len() / 4 * 3) } else { text.to_owned() })
    };
    let differs = |key: &&&str| before.get(key) != after.get(key);
    let change =
        |key: &&'static str| KeyChange { key, from: shown(before, key), to: shown(after, key) };
    KEYS.iter().filter(differs).map(change).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kubeconfig::tree::{emit, parse};

    const CLUSTER: &str = "\
certificate-authority: pki/ca.crt
server: https://lb.example:6443/prefix
tls-server-name: kubernetes
disable-compression: true
proxy-url: socks5://x
extensions:
- extension:
    a: 1
  name: other
";

    fn cluster(text: &str) -> Node {
        parse(text).unwrap().unwrap()
    }

    fn server(cluster: &Node) -> ServerUrl {
        ServerUrl::parse(original(cluster).unwrap_or(cluster).str("server").unwrap()).unwrap()
    }

    fn moved(cluster: &mut Node, trust: ClientTrust) -> Vec<String> {
        let at = server(cluster);
        let target = LocalEndpoint { address: "127.0.0.1:7443".into(), trust };
        apply(cluster, &at, &target).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn to_the_apiserver_and_back() {
        let mut node = cluster(CLUSTER);
        let changes = moved(&mut node, ClientTrust::Apiserver(Some("lb.example".into())));
        assert_eq!(
            changes,
            [
                "server: https://lb.example:6443/prefix -> https://127.0.0.1:7443/prefix",
                "tls-server-name: kubernetes -> lb.example",
                "proxy-url: removed (was socks5://x)",
            ]
        );
        assert_eq!(node.str("certificate-authority"), Some("pki/ca.crt"));
        assert!(node.is_true("disable-compression"));
        assert_eq!(node.items("extensions").len(), 2);
        // It survives being written, and goes back to the same file.
        let mut node = cluster(&emit(&node));
        assert_eq!(revert(&mut node).len(), 3);
        let mut sorted = emit(&node).lines().map(ToOwned::to_owned).collect::<Vec<_>>();
        let mut expected = CLUSTER.lines().map(ToOwned::to_owned).collect::<Vec<_>>();
        sorted.sort();
        expected.sort();
        assert_eq!(sorted, expected);
        assert_eq!(revert(&mut node), []);
    }

    #[test]
    fn to_a_local_ca_twice_and_back() {
        let mut node = cluster("server: https://10.0.0.1:6443\ninsecure-skip-tls-verify: true\n");
        let changes = moved(&mut node, ClientTrust::Local(b"one".to_vec()));
        assert_eq!(
            changes,
            [
                "server: https://10.0.0.1:6443 -> https://127.0.0.1:7443",
                "certificate-authority-data: set to a CA of 3 bytes",
                "insecure-skip-tls-verify: removed (was true)",
            ]
        );
        let again = moved(&mut node, ClientTrust::Local(b"two".to_vec()));
        assert_eq!(again, ["certificate-authority-data: a CA of 3 bytes -> a CA of 3 bytes"]);
        moved(&mut node, ClientTrust::Apiserver(Some("10.0.0.1".into())));
        assert!(node.is_true("insecure-skip-tls-verify"));
        assert_eq!(original(&node).unwrap().str("server"), Some("https://10.0.0.1:6443"));
        revert(&mut node);
        assert_eq!(emit(&node), "server: https://10.0.0.1:6443\ninsecure-skip-tls-verify: true\n");
    }
}

//! The kubeconfigs of this node that lead to jackstay: components that lose their apiserver when jackstay is removed.

use std::collections::BTreeSet;
use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};

use jackstay_kubeconfig::model::Cluster;
use jackstay_kubeconfig::{KubeconfigFile, MAX_KUBECONFIG, ServerUrl, recorded_configuration};
use jackstay_sys::files;

/// The directory of the kubeconfigs of kubeadm: `kubelet.conf`, `controller-manager.conf`, `scheduler.conf`,
/// `admin.conf`.
const KUBEADM: &str = "etc/kubernetes";
/// The extension of these.
const KUBEADM_EXTENSION: &str = "conf";
/// Kubeconfigs of kubelet at other places: Debian and cloud images, and k3s, RKE2.
const OTHERS: [&str; 4] = [
    "var/lib/kubelet/kubeconfig",
    "etc/kubernetes/kubelet/kubeconfig",
    "var/lib/rancher/k3s/agent/kubelet.kubeconfig",
    "var/lib/rancher/rke2/agent/kubelet.kubeconfig",
];
/// The flags with which components name their kubeconfig.
const FLAGS: [&str; 3] =
    ["--kubeconfig", "--authentication-kubeconfig", "--authorization-kubeconfig"];
/// Programs that run beside these components and are given kubeconfigs for single commands.
const NO_COMPONENTS: [&str; 3] = ["kubectl", "jackstay", "kubectl-jackstay"];

/// The jackstay to which kubeconfigs may lead.
#[derive(Debug, Clone, Copy)]
pub enum Jackstay<'a> {
    /// One with listeners at these addresses.
    At(&'a [SocketAddr]),
    /// One whose configuration is not valid any more. A process that runs still serves the listeners that it had.
    Configured(&'a Path),
}

impl Jackstay<'_> {
    /// Whether a cluster leads to it: by its address, or by the record of `jackstay kubeconfig`.
    fn is_used_by(&self, cluster: &Cluster) -> bool {
        match self {
            Self::At(listeners) => {
                let url =
                    cluster.server.as_deref().and_then(|server| ServerUrl::parse(server).ok());
                url.is_some_and(|url| listeners.iter().any(|at| names(&url, *at)))
            }
            Self::Configured(file) => recorded_configuration(cluster)
                .is_some_and(|recorded| Path::new(&recorded) == *file),
        }
    }
}

/// A kubeconfig that leads to jackstay.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Dependent {
    /// The kubeconfig.
    pub file: PathBuf,
    /// The `server` of the cluster that leads there.
    pub server: String,
}

/// The kubeconfigs below `root`, usually `/`, that lead to `jackstay`. Those of kubeadm, of kubelet, and those in
/// the arguments of running processes are read. A file that is no kubeconfig is skipped, since no component can use it.
pub fn find(root: &Path, jackstay: Jackstay<'_>) -> Vec<Dependent> {
    let mut candidates: BTreeSet<PathBuf> = OTHERS.iter().map(|path| root.join(path)).collect();
    let kubeadm = fs::read_dir(root.join(KUBEADM)).into_iter().flatten().flatten();
    candidates.extend(
        kubeadm.map(|entry| entry.path()).filter(|path| {
            path.extension().is_some_and(|extension| extension == KUBEADM_EXTENSION)
        }),
    );
    let processes = fs::read_dir(root.join("proc")).into_iter().flatten().flatten();
    for process in processes {
        let arguments = fs::read(process.path().join("cmdline")).unwrap_or_default();
        candidates.extend(named_files(&arguments).into_iter().map(|path| under(root, &path)));
    }
    let mut found = Vec::new();
    for file in candidates {
        // Any process can name a pipe or a device in its arguments.
        let Ok(content) = files::read(&file, MAX_KUBECONFIG) else { continue };
        let Ok(parsed) = KubeconfigFile::parse(&file, &content) else { continue };
        let clusters = parsed.config().clusters.iter().filter_map(|one| one.cluster.as_ref());
        found.extend(clusters.filter(|cluster| jackstay.is_used_by(cluster)).map(|cluster| {
            let server = cluster.server.clone().unwrap_or_default();
            Dependent { file: file.clone(), server }
        }));
    }
    found
}

/// Whether the URL leads to a listener at this address of this host, by the loopback interface. Another address leads
/// to the load balancer again when the node gives it up.
fn names(url: &ServerUrl, listener: SocketAddr) -> bool {
    let is_here = |ip: IpAddr| match listener.ip() {
        own if own.is_unspecified() => own.is_ipv4() == ip.is_ipv4() && ip.is_loopback(),
        own => own == ip && ip.is_loopback(),
    };
    let host = url.host.parse().map_or_else(
        |_| {
            url.host == "localhost"
                && (listener.ip().is_loopback() || listener.ip().is_unspecified())
        },
        is_here,
    );
    host && url.port == listener.port()
}

/// The kubeconfigs in the arguments of a process (`/proc/PID/cmdline`).
fn named_files(arguments: &[u8]) -> Vec<PathBuf> {
    let text = String::from_utf8_lossy(arguments);
    let words: Vec<&str> = text.split('\0').collect();
    let program = words.first().and_then(|word| word.rsplit('/').next()).unwrap_or_default();
    if NO_COMPONENTS.contains(&program) {
        return Vec::new();
    }
    let mut files = Vec::new();
    for (index, word) in words.iter().enumerate() {
        let (flag, value) =
            word.split_once('=').map_or((*word, None), |(flag, value)| (flag, Some(value)));
        if FLAGS.contains(&flag) {
            files.extend(value.or_else(|| words.get(index + 1).copied()).map(PathBuf::from));
        }
    }
    files
}

/// An absolute path below `root`. A relative one is skipped by reading a file that does not exist.
fn under(root: &Path, path: &Path) -> PathBuf {
    path.strip_prefix("/").map_or_else(|_| path.to_owned(), |path| root.join(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kubeconfig(server: &str) -> String {
        format!(
            "apiVersion: v1\nkind: Config\nclusters: [{{name: c, cluster: {{server: '{server}'}}}}]\n"
        )
    }

    #[test]
    fn find_returns_the_kubeconfigs_of_components_that_name_a_listener() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        let write = |path: &str, text: &str| {
            let path = root.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        let local = "https://127.0.0.1:7443";
        write("etc/kubernetes/kubelet.conf", &kubeconfig(local));
        write("etc/kubernetes/admin.conf", &kubeconfig("https://10.0.0.1:6443"));
        write("etc/kubernetes/broken.conf", "clusters: 3");
        // Written by `jackstay kubeconfig`, and used by no component.
        write("etc/kubernetes/jackstay.kubeconfig", &kubeconfig(local));
        write("opt/proxy", &kubeconfig("https://localhost:7443"));
        write("opt/agent", &kubeconfig(local));
        write("opt/tool", &kubeconfig(local));
        write("proc/7/cmdline", "/usr/bin/kube-proxy\0--kubeconfig\0/opt/proxy\0");
        write("proc/8/cmdline", "/opt/agent\0--kubeconfig=/opt/agent\0--v=2\0");
        write("proc/9/cmdline", "/usr/bin/kubectl\0--kubeconfig=/opt/tool\0get\0");
        // Not waited for.
        let pipe = root.join("opt/pipe");
        let mode = rustix::fs::Mode::RUSR;
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        write("proc/10/cmdline", "/opt/agent\0--kubeconfig=/opt/pipe\0");
        write("proc/11/cmdline", "/opt/agent\0--kubeconfig=/opt\0");
        let at = |listeners: &[&str]| -> Vec<String> {
            let listeners: Vec<_> = listeners.iter().map(|at| at.parse().unwrap()).collect();
            let name = |one: Dependent| one.file.strip_prefix(root).unwrap().display().to_string();
            find(root, Jackstay::At(&listeners)).into_iter().map(name).collect()
        };
        let expected = ["etc/kubernetes/kubelet.conf", "opt/agent", "opt/proxy"];
        assert_eq!(at(&["127.0.0.1:7443"]), expected);
        assert!(at(&["127.0.0.1:8443"]).is_empty());
        assert!(at(&[]).is_empty());
    }

    #[test]
    fn kubeconfig_of_an_invalid_configuration_is_known_by_its_record() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        fs::create_dir_all(root.join("etc/kubernetes")).unwrap();
        let record = |name: &str, configuration: Option<&str>| {
            let extension = serde_json::json!({ "configuration": configuration });
            let cluster = serde_json::json!({
                "server": "https://127.0.0.1:7443",
                "extensions": [{ "name": "jackstay", "extension": extension }],
            });
            let kubeconfig = serde_json::json!({
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [{ "name": "c", "cluster": cluster }],
            });
            fs::write(root.join("etc/kubernetes").join(name), kubeconfig.to_string()).unwrap();
        };
        record("kubelet.conf", Some("/etc/jackstay/jackstay.yaml"));
        record("scheduler.conf", Some("/etc/kubernetes/jackstay/jackstay.yaml"));
        record("admin.conf", None);
        let found = find(root, Jackstay::Configured(Path::new("/etc/jackstay/jackstay.yaml")));
        let expected = Dependent {
            file: root.join("etc/kubernetes/kubelet.conf"),
            server: "https://127.0.0.1:7443".to_owned(),
        };
        assert_eq!(found, [expected]);
    }

    #[test]
    fn names_compares_address_and_port_and_knows_wildcards_and_localhost() {
        for (url, listener, expected) in [
            ("https://127.0.0.1:7443", "127.0.0.1:7443", true),
            ("https://127.0.0.1:7443", "0.0.0.0:7443", true),
            ("https://127.0.0.1:7443", "[::]:7443", false),
            ("https://[::1]:7443", "[::]:7443", true),
            ("https://localhost:7443", "127.0.0.1:7443", true),
            ("https://localhost:7443", "10.0.0.5:7443", false),
            ("https://10.0.0.5:6443", "10.0.0.5:6443", false),
            ("https://10.0.0.5:6443", "0.0.0.0:6443", false),
            ("https://apiserver.example.com:7443", "127.0.0.1:7443", false),
            ("https://127.0.0.1:7444", "127.0.0.1:7443", false),
        ] {
            let parsed = ServerUrl::parse(url).unwrap();
            assert_eq!(names(&parsed, listener.parse().unwrap()), expected, "{url} {listener}");
        }
    }
}

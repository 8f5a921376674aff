//! The kubeconfigs of this node that name a listener of jackstay: components that lose their apiserver when jackstay is
//! removed.

use std::collections::BTreeSet;
use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};

use jackstay_sys::files;

use crate::kubeconfig::{KubeconfigFile, MAX_KUBECONFIG, ServerUrl};

/// The directory of the kubeconfigs of kubeadm: `kubelet.conf`, `controller-manager.conf`, `scheduler.conf`, `admin.conf`.
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

/// A kubeconfig that names a listener.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Dependent {
    /// The kubeconfig.
    pub file: PathBuf,
    /// The `server` of the cluster that names the listener.
    pub server: String,
}

/// The kubeconfigs below `root`, usually `/`, that name one of the addresses. Those of kubeadm, of kubelet, and those in
/// the arguments of running processes are read. A file that is no kubeconfig is skipped, since no component can use it.
pub fn find(root: &Path, listeners: &[SocketAddr]) -> Vec<Dependent> {
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
        let servers = parsed.config().clusters.iter().filter_map(|one| one.cluster.as_ref());
        let servers = servers.filter_map(|cluster| cluster.server.as_deref());
        let local = servers.filter(|server| {
            ServerUrl::parse(server).is_ok_and(|url| listeners.iter().any(|at| names(&url, *at)))
        });
        found.extend(
            local.map(|server| Dependent { file: file.clone(), server: server.to_owned() }),
        );
    }
    found
}

/// Whether the URL leads to a listener at this address of this host, by the loopback interface. Another address leads to
/// the load balancer again when the node gives it up.
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
        let found = find(root, &["127.0.0.1:7443".parse().unwrap()]);
        let files: Vec<_> = found
            .iter()
            .map(|one| one.file.strip_prefix(root).unwrap().to_str().unwrap())
            .collect();
        assert_eq!(files, ["etc/kubernetes/kubelet.conf", "opt/agent", "opt/proxy"]);
        assert_eq!(find(root, &["127.0.0.1:8443".parse().unwrap()]), []);
        assert_eq!(find(root, &[]), []);
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

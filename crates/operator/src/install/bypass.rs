//! Finds out whether kubelet goes past jackstay, because something has written its kubeconfig again.

use std::path::Path;

use jackstay_kubeconfig::{KubeconfigFile, MAX_KUBECONFIG, ServerUrl, recorded_original};
use jackstay_sys::files;

use super::host::check_kubeconfig_stays;
use super::journal::{DIRECTORY, Journal, Phase, Store};
use super::kubelet::Kubelet;

/// Why the kubeconfig of kubelet should point at jackstay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reason {
    /// `jackstay install` has pointed it there.
    Installed,
    /// nodeadm writes it at each boot.
    Nodeadm,
}

/// What is to be said of a kubelet. `None` if it uses jackstay, if nothing says that it should, or if its kubeconfig
/// cannot be read.
pub fn note(kubelet: &Kubelet) -> Option<String> {
    let path = &kubelet.kubeconfig;
    let journal = Store::new(DIRECTORY).read().ok().flatten();
    let reason = reason(journal.as_ref(), check_kubeconfig_stays(path).is_err())?;
    let bytes = files::read(path, MAX_KUBECONFIG).ok()?;
    explain(path, &bytes, reason)
}

fn reason(journal: Option<&Journal>, is_of_nodeadm: bool) -> Option<Reason> {
    match journal {
        _ if is_of_nodeadm => Some(Reason::Nodeadm),
        Some(journal) if journal.phase == Phase::Installed => Some(Reason::Installed),
        _ => None,
    }
}

fn explain(path: &Path, bytes: &[u8], reason: Reason) -> Option<String> {
    let file = KubeconfigFile::parse(path, bytes).ok()?;
    let mut servers = Vec::new();
    for cluster in file.config().clusters.iter().filter_map(|named| named.cluster.as_ref()) {
        let server = cluster.server.as_deref().unwrap_or_default();
        // Another way than `jackstay kubeconfig` leaves no record.
        let is_local = ServerUrl::parse(server).is_ok_and(|url| {
            url.host == "localhost"
                || url.host.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback())
        });
        if is_local || recorded_original(cluster).is_some() {
            return None;
        }
        servers.push(server);
    }
    let why = match reason {
        Reason::Installed => {
            "`jackstay install` had pointed it at jackstay, and something has written it since: `jackstay uninstall`, then \
             `jackstay install` again"
        }
        Reason::Nodeadm => {
            "nodeadm (EKS) writes it at each boot: deploy/distributions/eks.md has the drop-in that points it at jackstay again"
        }
    };
    let (path, servers) = (path.display(), servers.join(", "));
    Some(format!("kubelet goes past jackstay: {path} names {servers}; {why}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kubeconfig(cluster: &str) -> String {
        format!("apiVersion: v1\nkind: Config\nclusters:\n- name: c\n  cluster: {{{cluster}}}\n")
    }

    #[test]
    fn explain_names_the_server_of_a_kubeconfig_that_was_written_again() {
        let path = Path::new("/etc/kubernetes/kubelet.conf");
        let of = |cluster: &str, reason| explain(path, kubeconfig(cluster).as_bytes(), reason);
        let elsewhere = r#"server: "https://10.0.0.5:6443""#;
        let note = of(elsewhere, Reason::Installed).unwrap();
        assert!(
            note.contains("kubelet.conf names https://10.0.0.5:6443; `jackstay install`"),
            "{note}"
        );
        let note = of(elsewhere, Reason::Nodeadm).unwrap();
        assert!(note.contains("eks.md"), "{note}");
        for local in ["https://127.0.0.1:7443", "https://localhost:6443", "https://[::1]:7443"] {
            assert_eq!(of(&format!("server: \"{local}\""), Reason::Nodeadm), None, "{local}");
        }
        assert_eq!(explain(path, b"[", Reason::Installed), None);
    }

    #[test]
    fn nothing_says_that_kubelet_should_use_jackstay_without_an_installation() {
        assert_eq!(reason(None, false), None);
        assert_eq!(reason(None, true), Some(Reason::Nodeadm));
    }
}

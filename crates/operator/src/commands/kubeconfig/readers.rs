//! The running programs that have read a kubeconfig at their start, such as kubelet, and their restarts.
//!
//! kubelet with `rotateCertificates` builds its own transport from the CAs that it reads at its start, in every release
//! (`pkg/kubelet/certificate/transport.go`, `addCertRotation`).

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use super::report::KubeconfigReport;
use crate::admin_client::{TcpAddress, fetch_status};
use crate::commands::status::serving::unready_reason_for_new_clients;
use crate::kubeconfig::setup::renewal::{Listed, Reader, RenewalState, Restart};
use crate::systemd::ServiceManager;

/// Those of the units that run and have read a listed kubeconfig.
pub(super) fn running(
    units: &[String],
    listed: &[Listed],
    manager: &impl ServiceManager,
) -> Vec<Reader> {
    let reader = |unit: &String| {
        let properties = ["show", "--property=ActiveState,MainPID,InvocationID", unit.as_str()];
        let text = manager.systemctl(&properties).ok()?;
        let value = |name: &str| {
            let mut lines = text.lines().filter_map(|line| line.split_once('='));
            lines.find(|(key, _)| *key == name).map(|(_, value)| value.to_owned())
        };
        let (pid, invocation) = (value("MainPID")?, value("InvocationID")?);
        let runs = matches!(value("ActiveState")?.as_str(), "active" | "activating" | "reloading");
        if !runs || pid == "0" || invocation.is_empty() {
            return None;
        }
        let paths = listed.iter().map(|listed| listed.path.as_path());
        let kubeconfigs = match std::fs::read(format!("/proc/{pid}/cmdline")) {
            Ok(command) => {
                let named = named_in(&command, paths);
                if named.is_empty() {
                    return None;
                }
                named
            }
            // Without the command line, as under hidepid (proc(5)), it is assumed to read all.
            Err(_) => Vec::new(),
        };
        Some(Reader { unit: unit.clone(), invocation, kubeconfigs })
    };
    units.iter().filter_map(reader).collect()
}

/// Those of the paths that are arguments of a command, which ends each of them with a NUL.
fn named_in<'a>(command: &[u8], paths: impl Iterator<Item = &'a Path>) -> Vec<PathBuf> {
    let command = String::from_utf8_lossy(command);
    let real = |path: &Path| std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let arguments = command.split('\0').map(|argument| {
        let value = argument.split_once('=').map_or(argument, |(_, value)| value);
        real(Path::new(value))
    });
    let arguments: Vec<PathBuf> = arguments.collect();
    let absolute = |path: &Path| std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    paths.filter(|path| arguments.contains(&real(path))).map(absolute).collect()
}

/// Records readers that have started since `before`, while files were written. Returns whether there is one.
pub(super) fn record_started(
    before: &[Reader],
    state: &mut RenewalState,
    manager: &impl ServiceManager,
) -> bool {
    let mut is_news = false;
    for reader in before {
        let now = manager.systemctl(&["show", "--property=InvocationID", "--value", &reader.unit]);
        if let Ok(invocation) = now
            && !invocation.is_empty()
        {
            is_news |= state.restarted(&reader.unit, &invocation);
        }
    }
    is_news
}

/// Restarts the readers that must be restarted by now, and announces the other restarts. Without an apiserver that can
/// be reached through jackstay no reader is restarted.
pub(super) fn restart(
    restarts: &[(String, Restart)],
    now: SystemTime,
    (is_allowed, admin): (bool, TcpAddress),
    manager: &impl ServiceManager,
    report: &mut KubeconfigReport,
) {
    for (unit, restart) in restarts {
        let Some(text) = restart.describe(unit) else { continue };
        let how = "a restart before then makes this unnecessary";
        if !is_allowed {
            let text = format!("{unit} must be restarted (`systemctl restart {unit}`): {text}");
            report
                .warnings
                .push(text.replace(" and is restarted after ", ", at the latest after "));
        } else if !restart.is_due(now) {
            report.notes.push(format!("{text}; {how}"));
        } else if let Some(reason) = not_serving(admin) {
            report.warnings.push(format!(
                "{unit} is not restarted, because jackstay does not serve: {reason}"
            ));
        } else {
            match manager.systemctl(&["--no-block", "try-restart", unit]) {
                Ok(_) => report
                    .notes
                    .push(format!("restarted {unit}, which reads its kubeconfig at its start")),
                Err(error) => report.warnings.push(format!("{unit} is not restarted: {error}")),
            }
        }
    }
}

/// Why requests cannot be served.
fn not_serving(admin: TcpAddress) -> Option<String> {
    match fetch_status(admin) {
        Ok(status) => unready_reason_for_new_clients(&status),
        Err(error) => Some(crate::admin_client::explain_no_status(admin, &error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn named_in_finds_kubeconfigs_in_both_forms_of_a_flag() {
        let paths = ["/etc/kubernetes/kubelet.conf", "/root/.kube/config"].map(Path::new);
        let named = |command: &[u8]| named_in(command, paths.into_iter());
        let first = [PathBuf::from("/etc/kubernetes/kubelet.conf")];
        assert_eq!(
            named(b"/usr/bin/kubelet\0--kubeconfig=/etc/kubernetes/kubelet.conf\0--v=2\0"),
            first
        );
        assert_eq!(named(b"kubelet\0--kubeconfig\0/etc/kubernetes/kubelet.conf\0"), first);
        assert!(named(b"k3s\0agent\0").is_empty());
    }
}

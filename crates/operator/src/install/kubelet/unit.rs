//! The systemd unit that starts a process, also if the process has moved to another cgroup.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use super::process::Process;
use crate::systemd::ServiceManager;

/// The main process of each running service, and its unit.
pub(super) type MainProcesses = BTreeMap<u32, String>;

/// Asks systemd for the main processes of all services. Empty without systemd.
pub(super) fn main_processes(manager: &impl ServiceManager) -> MainProcesses {
    let arguments = ["show", "--property", "Id,MainPID", "*.service"];
    parse_main_processes(&manager.systemctl(&arguments).unwrap_or_default())
}

/// Reads `systemctl show` of several units: properties in any order, an empty line between units.
fn parse_main_processes(output: &str) -> MainProcesses {
    let value = |unit: &str, name: &str| {
        unit.lines().find_map(|line| line.strip_prefix(name)).map(|value| value.trim().to_owned())
    };
    let units = output.split("\n\n").filter_map(|unit| {
        let pid = value(unit, "MainPID=")?.parse().ok().filter(|pid| *pid != 0)?;
        Some((pid, value(unit, "Id=")?))
    });
    units.collect()
}

/// The service whose main process is this one or starts it, else the one in its cgroup. kubelet leaves the cgroup of
/// its service with `kubeletCgroups` or `--kubelet-cgroups`, for a slice or for another service.
pub(super) fn unit_of(
    process: &Process,
    processes: &BTreeMap<u32, Process>,
    main: &MainProcesses,
) -> Option<String> {
    let mut from_cgroup = None;
    let (mut next, mut seen) = (Some(process), BTreeSet::new());
    while let Some(process) = next.filter(|process| process.pid > 1 && seen.insert(process.pid)) {
        let place = place(&process.cgroups);
        if place == Place::Session {
            break;
        }
        if let Some(unit) = main.get(&process.pid) {
            return Some(unit.clone());
        }
        if let Place::Service(unit) = place {
            from_cgroup = from_cgroup.or(Some(unit));
        }
        next = processes.get(&process.parent);
    }
    from_cgroup
}

/// Where systemd's part of a cgroup path puts a process.
#[derive(Debug, PartialEq, Eq)]
enum Place {
    /// In a service of the system.
    Service(String),
    /// In a session or in a service of a user, which the system does not restart.
    Session,
    /// Elsewhere: a slice, or a path that is not systemd's.
    Elsewhere,
}

/// Reads `/proc/PID/cgroup` (cgroups(7)): the deepest unit of the unified hierarchy, or of `name=systemd` on version 1.
fn place(cgroups: &str) -> Place {
    let of_systemd = |line: &&str| line.starts_with("0::") || line.contains(":name=systemd:");
    for line in cgroups.lines().filter(of_systemd) {
        let path = line.splitn(3, ':').nth(2).unwrap_or_default();
        if path.split('/').any(|part| part.starts_with("user@")) {
            return Place::Session;
        }
        for part in path.split('/').rev() {
            let extension = Path::new(part).extension().and_then(|extension| extension.to_str());
            match extension {
                Some("service") => return Place::Service(part.to_owned()),
                Some("scope") => return Place::Session,
                _ => {}
            }
        }
    }
    Place::Elsewhere
}

/// The service in the cgroup of a process.
pub(super) fn service_in_cgroup(process: &Process) -> Option<String> {
    match place(&process.cgroups) {
        Place::Service(unit) => Some(unit),
        Place::Session | Place::Elsewhere => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn main_processes_are_read_from_systemctl() {
        let output =
            "MainPID=12\nId=a.service\n\nId=b.service\nMainPID=0\n\nId=c.service\nMainPID=7";
        let expected = [(7, "c.service".to_owned()), (12, "a.service".to_owned())];
        assert_eq!(parse_main_processes(output), MainProcesses::from(expected));
        assert!(parse_main_processes("").is_empty());
    }

    #[test]
    fn place_is_the_deepest_unit() {
        let service = |unit: &str| Place::Service(unit.to_owned());
        for (cgroups, expected) in [
            ("0::/system.slice/kubelet.service\n", service("kubelet.service")),
            ("0::/system.slice/kubelet.service/init\n", service("kubelet.service")),
            ("9:cpu:/x.service\n1:name=systemd:/s/my.service/x\n0::/\n", service("my.service")),
            ("1:name=systemd:/\n0::/system.slice/kubelet.service\n", service("kubelet.service")),
            ("0::/system.slice/kube.slice\n", Place::Elsewhere),
            ("0::/podruntime/kubelet\n", Place::Elsewhere),
            ("0::/user.slice/user-0.slice/session-1.scope\n", Place::Session),
            ("0::/user.slice/user-0.slice/user@0.service/app.slice/k.service\n", Place::Session),
        ] {
            assert_eq!(place(cgroups), expected, "{cgroups}");
        }
    }

    /// The unit of process 10, for processes as id, parent, cgroup, and main processes.
    fn unit(processes: &[(u32, u32, &str)], main: &[(u32, &str)]) -> Option<String> {
        let process = |(pid, parent, cgroups): &(u32, u32, &str)| {
            let cgroups = format!("0::{cgroups}\n");
            (*pid, Process { pid: *pid, parent: *parent, cgroups, ..Process::default() })
        };
        let processes: BTreeMap<u32, Process> = processes.iter().map(process).collect();
        let main = main.iter().map(|(pid, unit)| (*pid, (*unit).to_owned())).collect();
        unit_of(&processes[&10], &processes, &main)
    }

    #[test]
    fn unit_is_found_by_the_main_process_before_the_cgroup() {
        let kubelet = Some("kubelet.service".to_owned());
        let main = [(10, "kubelet.service"), (20, "containerd.service")];
        assert_eq!(unit(&[(10, 1, "/system.slice/kube.slice")], &main), kubelet);
        assert_eq!(unit(&[(10, 1, "/system.slice/containerd.service")], &main), kubelet);
        assert_eq!(unit(&[(10, 1, "/")], &main), kubelet);
        // A wrapper is the main process.
        let wrapper = (9, 1, "/system.slice/kubelet.service");
        let main = [(9, "kubelet.service"), (20, "containerd.service")];
        assert_eq!(unit(&[wrapper, (10, 9, "/kube.slice")], &main), kubelet);
        assert_eq!(unit(&[wrapper, (10, 9, "/system.slice/containerd.service")], &main), kubelet);
        // Without an answer of systemd the cgroup decides.
        assert_eq!(unit(&[wrapper, (10, 9, "/kube.slice")], &[]), kubelet);
        assert_eq!(unit(&[(10, 1, "/system.slice/kubelet.service")], &[]), kubelet);
        assert_eq!(unit(&[(10, 1, "/kube.slice")], &[]), None);
    }

    #[test]
    fn process_of_a_session_has_no_unit() {
        let main = [(5, "ssh.service"), (6, "user@0.service")];
        let ssh = (5, 1, "/system.slice/ssh.service");
        let session = "/user.slice/user-0.slice/session-1.scope";
        assert_eq!(unit(&[ssh, (10, 5, session)], &main), None);
        let manager = "/user.slice/user-0.slice/user@0.service";
        let service = format!("{manager}/app.slice/kubelet.service");
        assert_eq!(
            unit(&[(6, 1, &format!("{manager}/init.scope")), (10, 6, &service)], &main),
            None
        );
        // A loop of parents, as a process id that was used again can make.
        assert_eq!(unit(&[(10, 11, "/"), (11, 10, "/")], &main), None);
    }
}

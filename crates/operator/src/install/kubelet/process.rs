//! Processes in `/proc` that can be the kubelet of this node, and those that only have its name.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// What `/proc` says of one process.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Process {
    /// Its id.
    pub(super) pid: u32,
    /// Its parent's id; 0 if it is not known.
    pub(super) parent: u32,
    /// `cmdline`, without empty words.
    pub(super) arguments: Vec<String>,
    /// The name of its executable; empty if it is not known.
    pub(super) executable: String,
    /// `cgroup`.
    pub(super) cgroups: String,
    /// Whether it is in a PID or user namespace of its own, or in a cgroup of a container.
    pub(super) contained: bool,
}

/// Every process, by its id. Processes that end meanwhile are left out.
pub(super) fn all(proc: &Path) -> BTreeMap<u32, Process> {
    let text = |path: &Path| fs::read_to_string(path).unwrap_or_default();
    let users = |process: &Path| fs::read_link(process.join("ns/user")).ok();
    let own_users = users(&proc.join("self"));
    // The cgroups of a node that is a container itself, as those of kind.
    let own_cgroups = text(&proc.join("1/cgroup"));
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(proc).into_iter().flatten().flatten() {
        let path = entry.path();
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else {
            continue;
        };
        let Ok(bytes) = fs::read(path.join("cmdline")) else { continue };
        let status = text(&path.join("status"));
        let cgroups = text(&path.join("cgroup"));
        let other_users = users(&path)
            .is_some_and(|namespace| own_users.as_ref().is_some_and(|own| *own != namespace));
        let contained =
            in_nested_namespace(&status) || other_users || in_container(&cgroups, &own_cgroups);
        let executable = fs::read_link(path.join("exe"))
            .ok()
            .and_then(|file| file.file_name().map(|name| name.to_string_lossy().into_owned()));
        let process = Process {
            pid,
            parent: field(&status, "PPid:").and_then(|value| value.parse().ok()).unwrap_or(0),
            arguments: arguments(&bytes),
            executable: executable.unwrap_or_default(),
            cgroups,
            contained,
        };
        found.insert(pid, process);
    }
    found
}

/// The arguments of a process, from `/proc/PID/cmdline`. A program that replaces its title, as k3s does to hide
/// secrets, leaves one argument with spaces.
fn arguments(cmdline: &[u8]) -> Vec<String> {
    let words = cmdline.split(|byte| *byte == 0).filter(|word| !word.is_empty());
    let words: Vec<String> = words.map(|word| String::from_utf8_lossy(word).into_owned()).collect();
    match words.as_slice() {
        [title] => title.split_whitespace().map(ToOwned::to_owned).collect(),
        _ => words,
    }
}

/// The value of a field of `/proc/PID/status`.
fn field<'a>(status: &'a str, name: &str) -> Option<&'a str> {
    status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim)
}

/// Whether a process has an id in more namespaces than that of this `/proc` (proc(5), `NSpid`, Linux 4.1). Users
/// without privileges can read it, too.
fn in_nested_namespace(status: &str) -> bool {
    field(status, "NSpid:").is_some_and(|ids| ids.split_whitespace().count() > 1)
}

/// Whether a process is in a cgroup of a container, in which process 1 of this machine is not. A container with the PID
/// namespace of the host (`hostPID`, `--pid=host`) has nothing else that distinguishes it.
fn in_container(cgroups: &str, own: &str) -> bool {
    let own: Vec<&str> = own.split(['/', '\n']).collect();
    // The hierarchies of version 1 can differ, and a process is in a container if one of them is its.
    cgroups.split(['/', '\n']).any(|part| is_container(part) && !own.contains(&part))
}

/// Whether a component of a cgroup's path is that of a container or pod: kubelet's cgroups with both drivers
/// (`kubepods.slice`, `kubepods`, `kubelet-kubepods.slice` in kind), and those of Docker, Podman, containerd, CRI-O,
/// LXC.
fn is_container(part: &str) -> bool {
    const PREFIXES: [&str; 6] =
        ["docker-", "libpod-", "crio-", "cri-containerd-", "nerdctl-", "lxc."];
    let name = part.strip_suffix(".slice").or_else(|| part.strip_suffix(".scope")).unwrap_or(part);
    let is_unit = name.len() < part.len();
    let is_id = |text: &str| text.len() == 64 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    name == "kubepods"
        || name.ends_with("-kubepods")
        || name.starts_with("kubepods-")
        || is_id(name)
        || (is_unit || name.starts_with("lxc.") || name.starts_with("libpod-"))
            && PREFIXES.iter().any(|prefix| name.starts_with(prefix))
}

/// A program that is a kubelet, contains one, or neither.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Program {
    /// kubelet.
    Kubelet,
    /// A program that contains kubelet or starts it, and writes its kubeconfig.
    Embedding(&'static str),
}

/// The commands with which a program runs a kubelet; others, such as `k3s kubectl`, do not.
const EMBEDDING: [(&str, &[&str]); 4] = [
    ("k3s", &["server", "agent"]),
    ("rke2", &["server", "agent"]),
    ("k0s", &["controller", "worker"]),
    ("kubelite", &[]),
];

impl Process {
    /// What it runs, by its first argument, or by its executable if it has another name there.
    pub(super) fn program(&self) -> Option<Program> {
        let first = self.arguments.first().map(|path| path.rsplit('/').next().unwrap_or(path));
        let executable = self.executable.strip_suffix(" (deleted)").unwrap_or(&self.executable);
        [first?, executable].into_iter().find_map(|name| self.program_named(name))
    }

    fn program_named(&self, name: &str) -> Option<Program> {
        let mut commands = self.arguments.iter().skip(1);
        if name == "kubelet" {
            return Some(Program::Kubelet);
        }
        if name == "hyperkube" {
            let command = commands.find(|word| !word.starts_with('-'))?;
            return (command == "kubelet").then_some(Program::Kubelet);
        }
        // k3s executes itself as `k3s-server` or `k3s-agent`.
        let (name, own) = match name.split_once('-') {
            Some(("k3s", command)) => ("k3s", Some(command)),
            _ => (name, None),
        };
        let (program, known) = EMBEDDING.iter().find(|(program, _)| *program == name)?;
        let runs = known.is_empty()
            || own.is_some_and(|own| known.contains(&own))
            || commands.any(|word| known.contains(&word.as_str()));
        let has_kubelet = !self.arguments.iter().any(|word| word == "--disable-agent");
        (runs && has_kubelet).then_some(Program::Embedding(program))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "5f3c2a0b9d8e7f6a5b4c3d2e1f0a9b8c7d6e5f4a3b2c1d0e9f8a7b6c5d4e3f2a";

    #[test]
    fn container_is_known_by_the_cgroups_of_each_runtime() {
        let pods = [
            "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1.slice/cri-containerd-1.scope",
            "0::/kubepods/besteffort/pod1/x",
            "4:memory:/kubepods/pod1\n1:name=systemd:/x",
            "0::/kubelet.slice/kubelet-kubepods.slice/y",
            "0::/system.slice/docker-1.scope",
            "0::/machine.slice/libpod-1.scope/container",
            "0::/system.slice/kubelet.service/libpod-payload-1",
            "0::/lxc.payload.node/init.scope",
            "0::/system.slice/crio-1.scope",
        ];
        for cgroups in pods {
            assert!(in_container(cgroups, "0::/init.scope\n"), "{cgroups}");
        }
        let docker = format!("0::/docker/{ID}/system.slice/kubelet.service\n");
        assert!(in_container(&docker, "0::/init.scope\n"));
        assert!(in_container(&docker, ""));
        assert!(!in_container(&docker, &format!("0::/docker/{ID}/init.scope\n")), "a node of kind");
        let pod = format!("0::/docker/{ID}/kubelet.slice/kubelet-kubepods.slice/x\n");
        assert!(
            in_container(&pod, &format!("0::/docker/{ID}/init.scope\n")),
            "a pod of such a node"
        );
        for cgroups in [
            "",
            "0::/",
            "0::/system.slice/kubelet.service",
            "0::/system.slice/docker.service",
            "0::/system.slice/docker-cleanup.service",
            "0::/podruntime/kubelet",
            "12:cpu:/a\n1:name=systemd:/system.slice/kube.slice",
        ] {
            assert!(!in_container(cgroups, "0::/init.scope\n"), "{cgroups}");
        }
    }

    #[test]
    fn nested_pid_namespace_is_known_by_its_second_id() {
        assert!(in_nested_namespace("Name:\tk3s\nNSpid:\t4711\t1\n"));
        assert!(!in_nested_namespace("Name:\tk3s\nNSpid:\t4711\n"));
        assert!(!in_nested_namespace(""), "before Linux 4.1");
    }

    #[test]
    fn program_is_known_by_argument_and_executable() {
        let of = |executable: &str, arguments: &[u8]| {
            let arguments = super::arguments(arguments);
            Process { arguments, executable: executable.into(), ..Process::default() }.program()
        };
        let k3s = Some(Program::Embedding("k3s"));
        assert_eq!(of("kubelet", b"/usr/bin/kubelet\0--a\0"), Some(Program::Kubelet));
        assert_eq!(of("bash", b"kubelet\0"), Some(Program::Kubelet));
        assert_eq!(of("kubelet (deleted)", b"/opt/node/agent\0--a\0"), Some(Program::Kubelet));
        assert_eq!(of("hyperkube", b"/hyperkube\0--v=2\0kubelet\0--a\0"), Some(Program::Kubelet));
        assert_eq!(of("hyperkube", b"/hyperkube\0kube-proxy\0"), None);
        assert_eq!(of("k3s-server", b"/usr/local/bin/k3s server\0\0\0\0"), k3s);
        assert_eq!(of("k3s", b"/var/lib/rancher/k3s/data/x/bin/k3s-agent\0"), k3s);
        assert_eq!(of("k3s", b"/usr/local/bin/k3s\0kubectl\0get\0nodes\0"), None);
        assert_eq!(of("k3s", b"/usr/local/bin/k3s\0server\0--disable-agent\0"), None);
        assert_eq!(of("rke2", b"/usr/local/bin/rke2 agent\0"), Some(Program::Embedding("rke2")));
        assert_eq!(
            of("k0s", b"/usr/local/bin/k0s\0worker\0--x=y\0"),
            Some(Program::Embedding("k0s"))
        );
        assert_eq!(of("k0s", b"k0s\0status\0"), None);
        let kubelite = b"/snap/microk8s/1/kubelite\0--kubelet-args-file=/x\0";
        assert_eq!(of("kubelite", kubelite), Some(Program::Embedding("kubelite")));
        assert_eq!(of("", b""), None);
        assert_eq!(of("vim", b"vim\0kubelet\0"), None);
    }
}

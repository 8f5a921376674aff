//! Finds the kubelet of this node from its process: the unit that restarts it, its kubeconfig, its static pods.

mod process;
mod unit;

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use serde_json::Value;

use self::process::{Process, Program};
use crate::kubeconfig::setup::rotated::CERTIFICATE_DIRECTORY;
use crate::systemd::ServiceManager;

/// Programs that contain kubelet and manage its kubeconfig themselves, with the page that says how to use jackstay
/// there.
const PAGES: [(&str, &str); 4] = [
    ("k3s", "deploy/distributions/k3s-rke2.md"),
    ("rke2", "deploy/distributions/k3s-rke2.md"),
    ("k0s", "deploy/distributions/k0s.md"),
    ("kubelite", "deploy/distributions/microk8s.md"),
];
/// Maximum size of the configuration of kubelet in bytes.
const MAX_CONFIG: u64 = 1 << 20;

/// The kubelet of this node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kubelet {
    /// The systemd unit that runs it.
    pub unit: String,
    /// `--kubeconfig`.
    pub kubeconfig: PathBuf,
    /// `staticPodPath` of its configuration.
    pub static_pods: Option<PathBuf>,
    /// `--hostname-override`.
    pub name: Option<String>,
}

/// Why the kubelet of this node is not known.
#[derive(Debug, thiserror::Error)]
pub enum KubeletError {
    /// No kubelet runs.
    #[error(
        "no kubelet runs on this machine: start it first, because the installation is proven by a Ready node"
    )]
    NotRunning,
    /// Another program contains it; the text names the page for it.
    #[error("kubelet is part of {0}, which writes kubelet's kubeconfig itself: see {1}")]
    Embedded(String, &'static str),
    /// It runs in a container; these are the processes.
    #[error(
        "kubelet runs in a container only (pids {}): if that is a node with a systemd of its own, as in \
         kind, run `jackstay install` inside it; if it is the kubelet of this machine, use `jackstay \
         kubeconfig --kubeconfig FILE --in-place --mode terminate` and restart the container",
        list(.0)
    )]
    Contained(Vec<u32>),
    /// More than one runs; these are their processes.
    #[error(
        "several kubelets run on this machine (pids {}): stop those that are not the node's",
        list(.0)
    )]
    Several(Vec<u32>),
    /// It is not a service of systemd.
    #[error(
        "kubelet (pid {0}) is not a service of systemd, neither the main process of one nor in its cgroup \
         (`systemctl status {0}`), so it cannot be restarted from here: use `jackstay kubeconfig \
         --kubeconfig FILE --in-place --mode terminate` and restart it by hand"
    )]
    NotService(u32),
    /// It has no kubeconfig.
    #[error(
        "kubelet (pid {0}) runs without --kubeconfig: it uses no apiserver, so there is nothing to point at jackstay"
    )]
    Standalone(u32),
    /// Its configuration cannot be read.
    #[error(
        "cannot read kubelet's configuration {0}, which names the directory of static pods: {1}"
    )]
    Config(PathBuf, String),
}

fn list(pids: &[u32]) -> String {
    pids.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

/// Finds the kubelet in `/proc` (or in a copy of it, for tests).
///
/// Programs in other PID or user namespaces and in cgroups of containers are not this node's: nodes of kind, and
/// virtual clusters (k3k, vcluster) or a Rancher server whose k3s runs in a pod.
///
/// # Errors
/// There is none, or it cannot be managed.
pub fn find(proc: &Path, manager: &impl ServiceManager) -> Result<Kubelet, KubeletError> {
    let processes = process::all(proc);
    let programs = || processes.values().filter_map(|process| Some((process, process.program()?)));
    let of_node = || programs().filter(|(process, _)| !process.contained);
    // A child that kubelet has forked has its name until it executes its program.
    let is_child = |process: &Process| {
        processes.get(&process.parent).and_then(Process::program) == Some(Program::Kubelet)
    };
    let is_kubelet = |process: &Process, program| program == Program::Kubelet && !is_child(process);
    let embedding: Vec<(&Process, &str)> = of_node()
        .filter_map(|(process, program)| match program {
            Program::Embedding(name) => Some((process, name)),
            Program::Kubelet => None,
        })
        .collect();
    let own: Vec<&Process> = of_node()
        .filter(|(process, program)| is_kubelet(process, *program))
        .map(|(process, _)| process)
        .filter(|kubelet| {
            !embedding.iter().any(|(program, _)| is_part_of(kubelet, program, &processes))
        })
        .collect();
    let unit = |kubelet| unit::unit_of(kubelet, &processes, &unit::main_processes(manager));
    match (own.as_slice(), embedding.first()) {
        ([kubelet], None) => of_process(proc, kubelet, unit(kubelet)),
        // A kubelet without a service of its own does not count against a program that contains one.
        ([kubelet], Some((_, name))) => match unit(kubelet) {
            Some(unit) => of_process(proc, kubelet, Some(unit)),
            None => Err(embedded(name)),
        },
        ([], Some((_, name))) => Err(embedded(name)),
        ([], None) => {
            let contained = programs()
                .filter(|(process, program)| process.contained && is_kubelet(process, *program));
            let pids: Vec<u32> = contained.map(|(process, _)| process.pid).collect();
            Err(if pids.is_empty() {
                KubeletError::NotRunning
            } else {
                KubeletError::Contained(pids)
            })
        }
        (several, _) => Err(KubeletError::Several(several.iter().map(|one| one.pid).collect())),
    }
}

fn embedded(name: &str) -> KubeletError {
    let (_, page) = PAGES.iter().find(|(program, _)| *program == name).unwrap_or(&PAGES[0]);
    KubeletError::Embedded(name.to_owned(), page)
}

/// Whether a kubelet was started by a program, as by k0s and RKE2: it is a descendant, or in the same service.
fn is_part_of(kubelet: &Process, program: &Process, processes: &BTreeMap<u32, Process>) -> bool {
    let mut ancestor = processes.get(&kubelet.parent);
    for _ in 0..processes.len() {
        match ancestor {
            Some(process) if process.pid == program.pid => return true,
            Some(process) => ancestor = processes.get(&process.parent),
            None => break,
        }
    }
    let service = unit::service_in_cgroup(kubelet);
    service.is_some() && service == unit::service_in_cgroup(program)
}

/// `--cert-dir` of a kubelet of this machine that uses `kubeconfig`. `None` if none runs. A process of another user
/// than root or the owner of the kubeconfig is none: anyone can start a program with this name.
pub fn certificate_directory(proc: &Path, kubeconfig: &Path) -> Option<PathBuf> {
    let file = |path: &Path| fs::canonicalize(path).ok();
    let owner = |path: &Path| fs::metadata(path).ok().map(|metadata| metadata.uid());
    let wanted = file(kubeconfig)?;
    let trusted = [Some(0), owner(&wanted)];
    process::all(proc).into_values().find_map(|process| {
        let path = proc.join(process.pid.to_string());
        let is_kubelet = process.program() == Some(Program::Kubelet);
        if process.contained || !is_kubelet || !trusted.contains(&owner(&path)) {
            return None;
        }
        let directory = working_directory(&path);
        let used = file(&directory.join(flag(&process.arguments, "kubeconfig")?))?;
        let certificates = flag(&process.arguments, "cert-dir").unwrap_or(CERTIFICATE_DIRECTORY);
        (used == wanted).then(|| directory.join(certificates))
    })
}

fn working_directory(process: &Path) -> PathBuf {
    fs::read_link(process.join("cwd")).unwrap_or_else(|_| PathBuf::from("/"))
}

fn of_process(
    proc: &Path,
    kubelet: &Process,
    unit: Option<String>,
) -> Result<Kubelet, KubeletError> {
    let (pid, arguments) = (kubelet.pid, &kubelet.arguments);
    let process = proc.join(pid.to_string());
    let unit = unit.ok_or(KubeletError::NotService(pid))?;
    let kubeconfig = flag(arguments, "kubeconfig").ok_or(KubeletError::Standalone(pid))?;
    let directory = working_directory(&process);
    let static_pods = match flag(arguments, "config") {
        Some(file) => static_pods(&directory.join(file))?,
        None => None,
    };
    let static_pods = flag(arguments, "pod-manifest-path").map(PathBuf::from).or(static_pods);
    let name = flag(arguments, "hostname-override").map(ToOwned::to_owned);
    Ok(Kubelet { unit, kubeconfig: directory.join(kubeconfig), static_pods, name })
}

/// The last value of a flag in the forms of Go's pflag: `--name=value`, `--name value`.
fn flag<'a>(arguments: &'a [String], name: &str) -> Option<&'a str> {
    let mut value = None;
    for (index, argument) in arguments.iter().enumerate() {
        let Some(rest) = argument.strip_prefix("--").and_then(|rest| rest.strip_prefix(name))
        else {
            continue;
        };
        if let Some(given) = rest.strip_prefix('=') {
            value = Some(given);
        } else if rest.is_empty() {
            value = arguments.get(index + 1).map(String::as_str);
        }
    }
    value.filter(|value| !value.is_empty())
}

/// `staticPodPath` in the configuration of kubelet.
fn static_pods(file: &Path) -> Result<Option<PathBuf>, KubeletError> {
    let fail = |why: String| KubeletError::Config(file.to_owned(), why);
    let text = jackstay_sys::files::read_text(file, MAX_CONFIG)
        .map_err(|error| fail(error.to_string()))?;
    let tree: Value = serde_saphyr::from_str(&text).map_err(|error| fail(error.to_string()))?;
    let path = tree["staticPodPath"].as_str().filter(|path| !path.is_empty());
    Ok(path.map(PathBuf::from))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::systemd::CommandError;

    /// A systemd that answers `systemctl show` with this text.
    struct Units(&'static str);

    impl ServiceManager for Units {
        fn systemctl(&self, _: &[&str]) -> Result<String, CommandError> {
            Ok(self.0.to_owned())
        }
    }

    const NO_UNITS: Units = Units("");

    /// A directory like `/proc` with these processes: pid, arguments, content of `cgroup`.
    fn proc(processes: &[(u32, &[&str], &str)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (pid, arguments, cgroup) in processes {
            let process = dir.path().join(pid.to_string());
            fs::create_dir(&process).unwrap();
            fs::write(process.join("cmdline"), arguments.join("\0") + "\0").unwrap();
            fs::write(process.join("cgroup"), cgroup).unwrap();
        }
        fs::create_dir(dir.path().join("sys")).unwrap();
        dir
    }

    const SERVICE: &str = "0::/system.slice/kubelet.service\n";

    #[test]
    fn find_reads_unit_kubeconfig_and_static_pods() {
        let config = tempfile::NamedTempFile::new().unwrap();
        fs::write(config.path(), "kind: KubeletConfiguration\nstaticPodPath: /m\n").unwrap();
        let with_config = format!("--config={}", config.path().display());
        let dir = proc(&[
            (1, &["/lib/systemd/systemd"], "0::/init.scope\n"),
            (
                7,
                &[
                    "/usr/bin/kubelet",
                    "--kubeconfig",
                    "/k",
                    &with_config,
                    "--hostname-override=n-1",
                ],
                SERVICE,
            ),
        ]);
        let kubelet = find(dir.path(), &NO_UNITS).unwrap();
        let expected = Kubelet {
            unit: "kubelet.service".to_owned(),
            kubeconfig: "/k".into(),
            static_pods: Some("/m".into()),
            name: Some("n-1".to_owned()),
        };
        assert_eq!(kubelet, expected);

        let cgroups = "12:cpu:/a\n1:name=systemd:/s/my-kubelet.service/x\n";
        let dir = proc(&[(7, &["kubelet", "--kubeconfig=relative"], cgroups)]);
        let kubelet = find(dir.path(), &NO_UNITS).unwrap();
        assert_eq!(kubelet.unit, "my-kubelet.service");
        assert_eq!(kubelet.kubeconfig, Path::new("/relative"));
        assert_eq!(kubelet.static_pods, None);
    }

    #[test]
    fn certificate_directory_is_that_of_the_kubelet_with_the_kubeconfig() {
        let kubeconfig = tempfile::NamedTempFile::new().unwrap();
        let flag = format!("--kubeconfig={}", kubeconfig.path().display());
        let directory = |arguments: &[&str]| {
            let proc = proc(&[(7, &[&["/usr/bin/kubelet"], arguments].concat(), SERVICE)]);
            certificate_directory(proc.path(), kubeconfig.path())
        };
        assert_eq!(directory(&[&flag]), Some("/var/lib/kubelet/pki".into()));
        assert_eq!(directory(&[&flag, "--cert-dir", "/data/pki"]), Some("/data/pki".into()));
        assert_eq!(directory(&["--kubeconfig=/other"]), None);
        assert_eq!(directory(&[]), None);
        // Another user's program; only root can give away a file.
        let proc = proc(&[(7, &["kubelet", &flag, "--cert-dir", "/tmp/pki"], SERVICE)]);
        if std::os::unix::fs::chown(proc.path().join("7"), Some(1000), None).is_ok() {
            assert_eq!(certificate_directory(proc.path(), kubeconfig.path()), None);
        }
    }

    #[test]
    fn find_without_a_manageable_kubelet_says_why() {
        let error = |processes: &[(u32, &[&str], &str)]| {
            find(proc(processes).path(), &NO_UNITS).unwrap_err().to_string()
        };
        assert!(error(&[(1, &["init"], "")]).starts_with("no kubelet runs"));
        assert!(error(&[(9, &["/usr/local/bin/k3s", "agent"], "")]).contains("k3s-rke2.md"));
        let rke2 = "0::/system.slice/rke2-agent.service\n";
        let child = (10, &["kubelet", "--kubeconfig=/k"][..], rke2);
        assert!(
            error(&[(9, &["/usr/local/bin/rke2", "agent"], rke2), child]).contains("part of rke2")
        );
        assert!(error(&[(6, &["kubelet"], SERVICE)]).contains("without --kubeconfig"));
        assert!(
            error(&[(2, &["kubelet"], SERVICE), (3, &["kubelet"], SERVICE)]).contains("several")
        );
        assert!(
            error(&[(4, &["kubelet", "--kubeconfig=/k"], "0::/user.slice/session-1.scope\n")])
                .contains("pid 4")
        );
        let broken = error(&[(5, &["kubelet", "--kubeconfig=/k", "--config=/none"], SERVICE)]);
        assert!(broken.starts_with("cannot read kubelet's configuration /none"), "{broken}");
    }

    /// Adds a line to `/proc/PID/status`.
    fn status(dir: &tempfile::TempDir, pid: u32, line: &str) {
        let file = dir.path().join(pid.to_string()).join("status");
        let before = fs::read_to_string(&file).unwrap_or_default();
        fs::write(file, format!("{before}{line}\n")).unwrap();
    }

    const KUBELET: (u32, &[&str], &str) = (7, &["/usr/bin/kubelet", "--kubeconfig=/k"], SERVICE);
    /// A pod or container, by its cgroup.
    const POD: &str = "0::/kubepods.slice/kubepods-pod1.slice/cri-containerd-1.scope\n";

    #[test]
    fn find_leaves_out_programs_in_pods_and_containers() {
        let other = "0::/system.slice/other.service\n";
        for arguments in [
            &["/bin/k3s", "server"][..],
            &["/bin/k3s server"],
            &["rke2", "agent"],
            &["/usr/local/bin/k0s", "controller"],
            &["/snap/microk8s/1/kubelite"],
            &["/usr/bin/kubelet", "--kubeconfig=/other"],
            &["/hyperkube", "kubelet", "--kubeconfig=/other"],
        ] {
            // In a PID namespace of its own, and in one of a pod with `hostPID`.
            let nested = proc(&[KUBELET, (9, arguments, other)]);
            status(&nested, 9, "NSpid:\t9\t1");
            let users = proc(&[KUBELET, (9, arguments, other)]);
            fs::create_dir(users.path().join("self")).unwrap();
            for (process, namespace) in [("self", "user:[1]"), ("7", "user:[1]"), ("9", "user:[2]")]
            {
                let directory = users.path().join(process).join("ns");
                fs::create_dir(&directory).unwrap();
                std::os::unix::fs::symlink(namespace, directory.join("user")).unwrap();
            }
            for dir in [nested, users, proc(&[KUBELET, (9, arguments, POD)])] {
                let kubelet = find(dir.path(), &NO_UNITS).unwrap();
                assert_eq!(kubelet.kubeconfig, Path::new("/k"), "{arguments:?}");
            }
        }
        let alone = proc(&[(9, &["/bin/k3s", "server"], POD)]);
        assert!(matches!(find(alone.path(), &NO_UNITS), Err(KubeletError::NotRunning)));
        let docker = format!("0::/docker/{}\n", "ab".repeat(32));
        let contained = proc(&[(9, &["kubelet", "--kubeconfig=/k"], &docker)]);
        let error = find(contained.path(), &NO_UNITS).unwrap_err().to_string();
        assert!(error.contains("in a container only (pids 9)"), "{error}");
    }

    #[test]
    fn find_prefers_a_kubelet_with_a_service_of_its_own() {
        let server = "0::/system.slice/k3s.service\n";
        let dir = proc(&[KUBELET, (9, &["/usr/local/bin/k3s server"], server)]);
        assert_eq!(find(dir.path(), &NO_UNITS).unwrap().unit, "kubelet.service");

        let session = (7, &["kubelet", "--kubeconfig=/k"][..], "0::/session-1.scope\n");
        let dir = proc(&[session, (9, &["/usr/local/bin/k3s server"], server)]);
        let error = find(dir.path(), &NO_UNITS).unwrap_err().to_string();
        assert!(error.contains("part of k3s"), "{error}");

        // k0s moves its kubelet to no service of its own: it is a child.
        let moved = (10, &["/var/lib/k0s/bin/kubelet", "--kubeconfig=/k"][..], "0::/kube.slice\n");
        let dir = proc(&[(9, &["/usr/local/bin/k0s", "worker"], "0::/k0s.slice\n"), moved]);
        status(&dir, 10, "PPid:\t9");
        let error = find(dir.path(), &NO_UNITS).unwrap_err().to_string();
        assert!(error.contains("part of k0s") && error.contains("k0s.md"), "{error}");
    }

    #[test]
    fn find_asks_systemd_for_a_kubelet_that_has_left_its_cgroup() {
        let units = Units("Id=node-agent.service\nMainPID=7\n\nId=ssh.service\nMainPID=5");
        let dir = proc(&[(7, &["kubelet", "--kubeconfig=/k"], "0::/system.slice/kube.slice\n")]);
        assert_eq!(find(dir.path(), &units).unwrap().unit, "node-agent.service");
        assert!(matches!(find(dir.path(), &NO_UNITS), Err(KubeletError::NotService(7))));

        // A process that kubelet has forked, before it executes its program.
        let fork = (8, &["kubelet", "--kubeconfig=/k"][..], SERVICE);
        let dir = proc(&[KUBELET, fork]);
        status(&dir, 8, "PPid:\t7");
        assert_eq!(find(dir.path(), &NO_UNITS).unwrap().unit, "kubelet.service");
    }

    #[test]
    fn flag_takes_the_last_value_in_both_forms() {
        let of = |words: &[&str]| {
            let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
            flag(&words, "config").map(ToOwned::to_owned)
        };
        assert_eq!(of(&["--config=/a", "--config", "/b"]).as_deref(), Some("/b"));
        assert_eq!(of(&["--config-dir=/a", "--kubeconfig=/b"]), None);
        assert_eq!(of(&["--config"]), None);
    }
}

//! Finds the kubelet of this node from its process: the unit that restarts it, its kubeconfig, its static pods.

use std::error::Error;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

/// Programs that contain kubelet and manage its kubeconfig themselves, with the page that says how to use jackstay
/// there.
const EMBEDDED: [(&str, &str); 4] = [
    ("k3s", "deploy/distributions/k3s-rke2.md"),
    ("rke2", "deploy/distributions/k3s-rke2.md"),
    ("k0s", "deploy/README.md"),
    ("kubelite", "deploy/README.md"),
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
#[derive(Debug)]
pub enum KubeletError {
    /// No kubelet runs.
    NotRunning,
    /// Another program contains it; the text names the page for it.
    Embedded(&'static str, &'static str),
    /// More than one runs; these are their processes.
    Several(Vec<u32>),
    /// It is not a service of systemd.
    NotService(u32),
    /// It has no kubeconfig.
    Standalone(u32),
    /// Its configuration cannot be read.
    Config(PathBuf, String),
}

impl fmt::Display for KubeletError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotRunning => f.write_str(
                "no kubelet runs on this machine: start it first, because the installation is proven by a Ready node",
            ),
            Self::Embedded(program, page) => write!(
                f,
                "kubelet is part of {program}, which writes kubelet's kubeconfig itself: see {page}"
            ),
            Self::Several(pids) => {
                let pids: Vec<String> = pids.iter().map(ToString::to_string).collect();
                write!(
                    f,
                    "several kubelets run on this machine (pids {}): stop those that are not the node's",
                    pids.join(", ")
                )
            }
            Self::NotService(pid) => write!(
                f,
                "kubelet (pid {pid}) is not a service of systemd, so it cannot be restarted from here: use \
                 `jackstay kubeconfig --in FILE --in-place --mode terminate` and restart it by hand"
            ),
            Self::Standalone(pid) => write!(
                f,
                "kubelet (pid {pid}) runs without --kubeconfig: it uses no apiserver, so there is nothing to point at jackstay"
            ),
            Self::Config(file, why) => {
                write!(f, "cannot read kubelet's configuration {}, which names the directory of static pods: {why}", file.display())
            }
        }
    }
}

impl Error for KubeletError {}

/// Finds the kubelet in `/proc` (or in a copy of it, for tests).
///
/// # Errors
/// There is none, or it cannot be managed.
pub fn find(proc: &Path) -> Result<Kubelet, KubeletError> {
    let mut found = Vec::new();
    let mut embedded = None;
    for entry in fs::read_dir(proc).into_iter().flatten().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else {
            continue;
        };
        let Ok(bytes) = fs::read(entry.path().join("cmdline")) else { continue };
        let arguments = arguments(&bytes);
        let Some(program) = arguments.first().map(|first| program_name(first)) else { continue };
        if program == "kubelet" && is_of_this_machine(&entry.path()) {
            found.push((pid, arguments));
        } else if let Some(known) = EMBEDDED.iter().find(|(name, _)| *name == program) {
            embedded = Some(*known);
        }
    }
    match (found.as_slice(), embedded) {
        // RKE2 and others start a kubelet of their own.
        (_, Some((program, page))) => Err(KubeletError::Embedded(program, page)),
        ([(pid, arguments)], None) => of_process(proc, *pid, arguments),
        ([], None) => Err(KubeletError::NotRunning),
        (several, _) => Err(KubeletError::Several(several.iter().map(|(pid, _)| *pid).collect())),
    }
}

/// Whether a process is in the process namespace of this one. The kubelet of a node in a container is not.
fn is_of_this_machine(process: &Path) -> bool {
    let of = |process: &Path| fs::read_link(process.join("ns/pid")).ok();
    let own = of(Path::new("/proc/self"));
    of(process).is_none_or(|namespace| own.is_none_or(|own| own == namespace))
}

fn of_process(proc: &Path, pid: u32, arguments: &[String]) -> Result<Kubelet, KubeletError> {
    let process = proc.join(pid.to_string());
    let cgroups = fs::read_to_string(process.join("cgroup")).unwrap_or_default();
    let unit = unit_of(&cgroups).ok_or(KubeletError::NotService(pid))?;
    let kubeconfig = flag(arguments, "kubeconfig").ok_or(KubeletError::Standalone(pid))?;
    let directory = fs::read_link(process.join("cwd")).unwrap_or_else(|_| PathBuf::from("/"));
    let static_pods = match flag(arguments, "config") {
        Some(file) => static_pods(&directory.join(file))?,
        None => None,
    };
    let static_pods = flag(arguments, "pod-manifest-path").map(PathBuf::from).or(static_pods);
    let name = flag(arguments, "hostname-override").map(ToOwned::to_owned);
    Ok(Kubelet { unit, kubeconfig: directory.join(kubeconfig), static_pods, name })
}

/// The arguments of a process, from `/proc/PID/cmdline`.
fn arguments(cmdline: &[u8]) -> Vec<String> {
    let words = cmdline.split(|byte| *byte == 0).filter(|word| !word.is_empty());
    words.map(|word| String::from_utf8_lossy(word).into_owned()).collect()
}

fn program_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
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

/// The systemd service in `/proc/PID/cgroup` (cgroups(7)): the last component of the unified hierarchy, or of
/// `name=systemd` on version 1.
fn unit_of(cgroups: &str) -> Option<String> {
    let of_systemd = |line: &&str| line.starts_with("0::") || line.contains(":name=systemd:");
    cgroups.lines().filter(of_systemd).find_map(|line| {
        let path = line.splitn(3, ':').nth(2)?;
        let service = path.split('/').rev().find(|part| {
            Path::new(part).extension().is_some_and(|extension| extension == "service")
        });
        service.map(ToOwned::to_owned)
    })
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
        let kubelet = find(dir.path()).unwrap();
        let expected = Kubelet {
            unit: "kubelet.service".to_owned(),
            kubeconfig: "/k".into(),
            static_pods: Some("/m".into()),
            name: Some("n-1".to_owned()),
        };
        assert_eq!(kubelet, expected);

        let cgroups = "12:cpu:/a\n1:name=systemd:/s/my-kubelet.service/x\n";
        let dir = proc(&[(7, &["kubelet", "--kubeconfig=relative"], cgroups)]);
        let kubelet = find(dir.path()).unwrap();
        assert_eq!(kubelet.unit, "my-kubelet.service");
        assert_eq!(kubelet.kubeconfig, Path::new("/relative"));
        assert_eq!(kubelet.static_pods, None);
    }

    #[test]
    fn find_without_a_manageable_kubelet_says_why() {
        let error = |processes: &[(u32, &[&str], &str)]| {
            find(proc(processes).path()).unwrap_err().to_string()
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

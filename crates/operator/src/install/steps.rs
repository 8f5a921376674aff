//! The steps of an installation as data: `--dry-run` prints the list that an installation carries out.

use std::fmt;
use std::path::{Path, PathBuf};

use super::journal::{Phase, UnitRecord};
use super::service::{GUARD_UNIT, GUARD_UNIT_FILE, RECOVERY_UNIT, RECOVERY_UNIT_FILE};
use crate::kubeconfig::setup::OutputFile;

/// One step. Each can be undone by what the journal contains.
#[derive(Debug)]
pub enum Step<'a> {
    /// Writes a file.
    Write(&'a OutputFile),
    /// Removes a file that an earlier step has written.
    Remove(&'static Path),
    /// Has the container runtime keep the image of the static pod. A runtime that cannot is no error.
    Pin(&'a str),
    /// Runs `systemctl` with these arguments.
    Systemctl(Vec<&'a str>),
    /// Stores in the journal how far the installation is.
    Enter(Phase),
    /// Waits until jackstay listens and an apiserver is usable.
    AwaitJackstay,
    /// Writes the kubeconfig of kubelet.
    Switch(&'a OutputFile),
    /// Waits until kubelet has renewed the lease of the node and the node is Ready.
    AwaitNode,
}

impl fmt::Display for Step<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Write(file) | Self::Switch(file) => {
                write!(f, "write {} ({:04o}): {}", file.path.display(), file.mode, file.description)
            }
            Self::Remove(path) => write!(f, "remove {}", path.display()),
            Self::Pin(image) => {
                write!(f, "pin the image {image}, so that kubelet does not delete it")
            }
            Self::Systemctl(arguments) => write!(f, "systemctl {}", arguments.join(" ")),
            Self::Enter(phase) => write!(f, "journal: {phase}"),
            Self::AwaitJackstay => f.write_str("wait until jackstay serves"),
            Self::AwaitNode => f.write_str("wait until the node is Ready through jackstay"),
        }
    }
}

/// What the steps need.
#[derive(Debug)]
pub struct StepInput<'a> {
    /// The binary, if it must be copied to a path that stays.
    pub program: Option<&'a OutputFile>,
    /// The recovery unit.
    pub recovery: &'a OutputFile,
    /// The guard.
    pub guard: &'a OutputFile,
    /// Configuration, certificates, units or manifest.
    pub files: Vec<&'a OutputFile>,
    /// The image of the static pod.
    pub image: Option<&'a str>,
    /// The units to start.
    pub units: &'a [UnitRecord],
    /// The kubeconfig of kubelet.
    pub kubeconfig: &'a OutputFile,
    /// The unit of kubelet.
    pub kubelet_unit: &'a str,
}

/// The steps in their order. Before the first, the journal is written.
pub fn steps<'a>(input: &StepInput<'a>) -> Vec<Step<'a>> {
    let mut steps: Vec<Step<'a>> = Vec::new();
    // Recovery unit and guard come first. Until the guard runs, only these files are new, and the next run removes
    // them.
    steps.extend(input.program.map(Step::Write));
    steps.push(Step::Write(input.recovery));
    steps.push(Step::Write(input.guard));
    // `enable` reloads the units.
    steps.push(Step::Systemctl(vec!["enable", RECOVERY_UNIT]));
    steps.push(Step::Systemctl(vec!["start", GUARD_UNIT]));
    steps.extend(input.image.map(Step::Pin));
    steps.extend(input.files.iter().map(|file| Step::Write(file)));
    steps.push(Step::Systemctl(vec!["daemon-reload"]));
    steps.extend(
        input.units.iter().map(|unit| Step::Systemctl(vec!["enable", "--now", &unit.name])),
    );
    steps.push(Step::AwaitJackstay);
    steps.push(Step::Enter(Phase::Switched));
    steps.push(Step::Switch(input.kubeconfig));
    steps.push(Step::Systemctl(vec!["restart", input.kubelet_unit]));
    steps.push(Step::AwaitNode);
    steps.push(Step::Enter(Phase::Installed));
    steps.push(Step::Systemctl(vec!["disable", RECOVERY_UNIT]));
    steps.push(Step::Remove(Path::new(RECOVERY_UNIT_FILE)));
    steps.push(Step::Remove(Path::new(GUARD_UNIT_FILE)));
    steps.push(Step::Systemctl(vec!["daemon-reload"]));
    steps
}

/// Every path that the steps write, for a check of the permissions.
pub fn written(steps: &[Step<'_>]) -> Vec<PathBuf> {
    let files = steps.iter().filter_map(|step| match step {
        Step::Write(file) | Step::Switch(file) => Some(file.path.clone()),
        _ => None,
    });
    files.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_protect_first_and_switch_kubelet_after_jackstay_serves() {
        let file = |path: &str| OutputFile {
            path: path.into(),
            bytes: Vec::new(),
            mode: 0o644,
            description: "",
        };
        let (program, recovery, guard) =
            (file("/p"), file(RECOVERY_UNIT_FILE), file(GUARD_UNIT_FILE));
        let (config, kubeconfig) = (file("/c"), file("/k"));
        let input = StepInput {
            program: Some(&program),
            recovery: &recovery,
            guard: &guard,
            files: vec![&config],
            image: Some("i"),
            units: &[UnitRecord { name: "jackstay.service".to_owned(), was_enabled: false }],
            kubeconfig: &kubeconfig,
            kubelet_unit: "kubelet.service",
        };
        let steps = steps(&input);
        let described: Vec<String> = steps.iter().map(ToString::to_string).collect();
        let at = |text: &str| described.iter().position(|step| step.starts_with(text)).unwrap();
        let order = [
            "write /p",
            "write /etc/systemd/system/jackstay-recovery.service",
            "systemctl enable jackstay-recovery.service",
            "systemctl start jackstay-install-guard.service",
            "pin the image i",
            "write /c",
            "systemctl enable --now jackstay.service",
            "wait until jackstay serves",
            "journal: switched",
            "write /k",
            "systemctl restart kubelet.service",
            "wait until the node is Ready",
            "journal: installed",
            "systemctl disable jackstay-recovery.service",
            "remove /etc/systemd/system/jackstay-recovery.service",
        ];
        for pair in order.windows(2) {
            assert!(at(pair[0]) < at(pair[1]), "{pair:?}: {described:#?}");
        }
        assert_eq!(written(&steps).len(), 5);
    }
}

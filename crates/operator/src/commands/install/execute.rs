//! Carries out the steps of an installation, prints them, and undoes them after an error.

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use super::args::InstallArgs;
use super::prepare::Preparation;
use super::progress::{Outcome, Progress};
use super::uninstall::remove_guard;
use crate::admin_client::{DEFAULT_ADMIN, explain_no_status, fetch_status};
use crate::commands::kubeconfig::Failure;
use crate::commands::status::serving::unready_reason_for_new_clients;
use crate::doctor::image::{InstalledTools, pin};
use crate::install::journal::{Journal, JournalDraft, NewContent, Phase, Store};
use crate::install::service::{GUARD_UNIT_FILE, STATE, ServiceForm, UNITS};
use crate::install::steps::{Step, StepInput, steps, written};
use crate::install::transaction::{write, write_like};
use crate::install::undo::undo;
use crate::kubeconfig::setup::OutputFile;
use crate::systemd::{ServiceManager, Systemd};

/// Interval at which the state of jackstay and of the node is read.
pub(super) const POLL: Duration = Duration::from_millis(500);
/// How long a unit may take until it serves.
const UNIT_LIMIT: Duration = Duration::from_secs(30);
/// How long kubelet may take to start the static pod.
const POD_LIMIT: Duration = Duration::from_secs(60);

/// An installation that was prepared.
pub(super) struct Installation<'a> {
    args: &'a InstallArgs,
    prepared: &'a Preparation,
    steps: Vec<Step<'a>>,
}

impl<'a> Installation<'a> {
    pub(super) fn new(args: &'a InstallArgs, prepared: &'a Preparation) -> Self {
        let files = prepared.draft.files.iter().chain(&prepared.service.files).collect();
        let steps = steps(&StepInput {
            program: prepared.program.as_ref(),
            recovery: &prepared.recovery,
            guard: &prepared.guard,
            files,
            image: (args.form == ServiceForm::StaticPod).then_some(args.image.as_str()),
            units: &prepared.service.units,
            kubeconfig: &prepared.draft.kubeconfig,
            kubelet_unit: &prepared.kubelet.unit,
        });
        Self { args, prepared, steps }
    }

    /// Prints the notes, and every file and command.
    pub(super) fn describe(&self, progress: &mut Progress) {
        self.announce(progress);
        for step in &self.steps {
            let changes = match step {
                Step::Switch(_) => self.prepared.draft.changes.as_slice(),
                _ => &[],
            };
            let changes: Vec<String> = changes.iter().map(ToString::to_string).collect();
            progress.planned(step, &changes);
        }
    }

    fn announce(&self, progress: &mut Progress) {
        let draft = &self.prepared.draft;
        for warning in &draft.warnings {
            progress.warning(warning);
        }
        for note in &draft.notes {
            progress.note(note);
        }
    }

    /// Carries out the steps; after an error all are undone.
    ///
    /// # Errors
    /// What failed, and whether the node is as before.
    pub(super) fn carry_out(&self, store: &Store, progress: &mut Progress) -> Result<(), Failure> {
        for path in written(&self.steps) {
            refuse_unwritable(&path)?;
        }
        refuse_unwritable(Path::new(crate::install::journal::DIRECTORY))?;
        self.announce(progress);
        let mut journal = self.begin(store)?;
        for step in &self.steps {
            progress.step(step);
            match self.execute(step, (store, &mut journal), progress) {
                Ok(()) => {}
                // The node is Ready through jackstay; what this step should have removed does no harm.
                Err(why) if journal.phase == Phase::Installed => progress.note(&why),
                Err(why) => return Err(self.undo(&why, store, &journal, progress)),
            }
        }
        progress.outcome(Outcome::Installed);
        progress.line(&format!(
            "node {} is Ready through jackstay; `jackstay uninstall` removes it",
            journal.node
        ));
        Ok(())
    }

    /// Writes the journal.
    fn begin(&self, store: &Store) -> Result<Journal, Failure> {
        let prepared = self.prepared;
        let (certificates, config) = match prepared.draft.files.split_last() {
            Some((config, certificates)) => (certificates, Some(config)),
            None => (&[][..], None),
        };
        let is_kept = |file: &OutputFile| {
            let is_unit = file.path.starts_with(UNITS);
            let is_config = config.is_some_and(|config| config.path == file.path);
            let is_program = file.path == prepared.program_path;
            let is_certificate = certificates.iter().any(|one| one.path == file.path);
            !is_certificate && (is_unit || is_config || is_program)
        };
        let content = |file: &'a OutputFile| NewContent {
            path: &file.path,
            bytes: &file.bytes,
            keep_if_changed: is_kept(file),
        };
        let files: Vec<NewContent<'_>> = self
            .steps
            .iter()
            .filter_map(|step| match step {
                Step::Write(file) if file.path != Path::new(GUARD_UNIT_FILE) => Some(content(file)),
                _ => None,
            })
            .collect();
        let draft = JournalDraft {
            request: &prepared.request,
            node: &prepared.node.name,
            kubelet_unit: &prepared.kubelet.unit,
            state_directories: &[STATE.into()],
            units: &prepared.service.units,
            admin: DEFAULT_ADMIN,
            listen: self.args.listen,
            program: &prepared.program_path,
        };
        let kubeconfig = content(&prepared.draft.kubeconfig);
        store.begin(&draft, kubeconfig, &files).map_err(|error| {
            // What was saved so far is not needed.
            let _ = store.remove();
            Failure::Input(format!("nothing changed: {error}"))
        })
    }

    fn execute(
        &self,
        step: &Step<'_>,
        (store, journal): (&Store, &mut Journal),
        progress: &mut Progress,
    ) -> Result<(), String> {
        match step {
            Step::Write(file) => {
                write(&file.path, &file.bytes, file.mode).map_err(|error| error.to_string())
            }
            Step::Switch(file) => match &journal.kubeconfig.original {
                Some(original) => write_like(&file.path, &file.bytes, original),
                None => write(&file.path, &file.bytes, file.mode),
            }
            .map_err(|error| error.to_string()),
            // The guard or the recovery unit may have gone already.
            Step::Remove(path) => {
                let _ = std::fs::remove_file(path);
                Ok(())
            }
            Step::Pin(image) => {
                if let Err(why) = pin(image, &InstalledTools) {
                    progress.warning(&why);
                }
                Ok(())
            }
            Step::Systemctl(arguments) => {
                Systemd.systemctl(arguments).map(drop).map_err(|error| error.to_string())
            }
            Step::Enter(phase) => {
                let mut entered = journal.clone();
                entered.phase = *phase;
                store.write(&entered).map_err(|error| error.to_string())?;
                *journal = entered;
                Ok(())
            }
            Step::AwaitJackstay => self.await_jackstay(),
            // kubelet was restarted, so a lease that is renewed from now on is of the new process.
            Step::AwaitNode => self.await_node(SystemTime::now()),
        }
    }

    fn await_jackstay(&self) -> Result<(), String> {
        let (limit, hint) = match self.args.form {
            ServiceForm::Unit => (UNIT_LIMIT, "`journalctl -u jackstay` has its log".to_owned()),
            ServiceForm::StaticPod => (
                POD_LIMIT,
                format!("kubelet's log names the reason; its image is {}", self.args.image),
            ),
        };
        let reason = || match fetch_status(DEFAULT_ADMIN) {
            Ok(status) => unready_reason_for_new_clients(&status),
            Err(error) => Some(explain_no_status(DEFAULT_ADMIN, &error)),
        };
        poll(limit, reason).map_err(|why| format!("jackstay does not serve: {why}; {hint}"))
    }

    fn await_node(&self, since: SystemTime) -> Result<(), String> {
        let node = &self.prepared.node;
        let reason = || match node.state() {
            Err(why) => Some(why),
            Ok(state) if state.lease_renewed.is_none_or(|renewed| renewed < since) => {
                Some("kubelet has not renewed the lease of the node".to_owned())
            }
            Ok(state) if !state.ready && self.prepared.was_ready => Some(state.to_string()),
            Ok(_) => None,
        };
        let waited = poll(self.args.timeout, reason);
        waited.map_err(|why| format!("node {} is not Ready through jackstay: {why}", node.name))
    }

    /// Undoes the steps after an error, and waits until the node is Ready again.
    fn undo(
        &self,
        why: &str,
        store: &Store,
        journal: &Journal,
        progress: &mut Progress,
    ) -> Failure {
        eprintln!("{why}");
        eprintln!("undoing the installation");
        let since = SystemTime::now();
        let undone = match undo(store, journal, &Systemd) {
            Ok(undone) => undone,
            Err(error) => {
                return Failure::Write(format!(
                    "the installation failed and could not be undone: {error}; run `jackstay uninstall`"
                ));
            }
        };
        remove_guard();
        progress.outcome(Outcome::Undone);
        progress.undone(&undone);
        let state = if undone.kubelet_restarted {
            match self.await_node(since) {
                Ok(()) => "the node is Ready as before".to_owned(),
                Err(why) => why.replace("through jackstay", "yet"),
            }
        } else {
            "kubelet was not touched".to_owned()
        };
        Failure::Write(format!("the installation failed and was undone: {state}"))
    }
}

/// Asks for a reason to wait until there is none.
///
/// # Errors
/// The last reason, after `limit`.
fn poll(limit: Duration, mut reason: impl FnMut() -> Option<String>) -> Result<(), String> {
    let end = Instant::now() + limit;
    loop {
        let Some(why) = reason() else { return Ok(()) };
        if Instant::now() >= end {
            return Err(format!("{why} (after {} s)", limit.as_secs()));
        }
        thread::sleep(POLL);
    }
}

/// Fails if a file cannot be written: a read-only file system, or a file where a directory must be.
fn refuse_unwritable(path: &Path) -> Result<(), Failure> {
    let nearest = path.ancestors().skip(1).find(|parent| parent.exists());
    let Some(directory) = nearest else { return Ok(()) };
    let why = if directory.is_dir() {
        let access = rustix::fs::access(directory, rustix::fs::Access::WRITE_OK);
        access.err().map(|error| std::io::Error::from(error).to_string())
    } else {
        Some("it is not a directory".to_owned())
    };
    match why {
        None => Ok(()),
        Some(why) => Err(Failure::Input(format!(
            "nothing changed: {} cannot be written: {}: {why}",
            path.display(),
            directory.display()
        ))),
    }
}

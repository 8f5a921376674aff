//! Changes a complete installation to another version: the program, and those of its units or its manifest that differ.
//!
//! ```text
//! journal: upgrade ──> recovery unit ──> program ──> guard ──> units ──> take-over ──> journal: installed
//!        │                     any error, or the end of the process
//!        └───────────────────────────────> the files of before, and the program of before runs
//! ```
//!
//! A unit is upgraded without a gap: the running process starts the new program, which takes over its sockets. A static
//! pod is stopped and started by kubelet. The program that runs is compared by its content (`/proc/PID/exe`), because a
//! version or the path of a unit do not prove what a process executes.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::journal::{Journal, JournalError, NewContent, Store, content, digest_of};
use super::service::{GUARD_UNIT, Service, UNIT};
use super::transaction::{restore_previous, write};
use super::undo::UndoError;
use crate::kubeconfig::setup::OutputFile;
use crate::systemd::{CommandError, ServiceManager, property};

/// How long the new program may take until it has taken over. `tests/packages` needs less than a second.
pub const TAKEOVER_LIMIT: Duration = Duration::from_secs(20);
/// How long jackstay may take until it serves: kubelet looks for changed manifests every 20 s (`fileCheckFrequency`).
pub const SERVE_LIMIT: Duration = Duration::from_secs(60);

/// What an upgrade needs of the node besides its files; tests have one of their own.
pub trait UpgradeHost: ServiceManager {
    /// The SHA-256 of the program that a process executes; `None` if the process has ended.
    fn program_of(&self, pid: u32) -> Option<String>;
    /// Has a running jackstay start the program at its path, which takes over (SIGUSR2).
    ///
    /// # Errors
    /// The process cannot be signalled.
    fn request_takeover(&self, pid: u32) -> io::Result<()>;
    /// When the jackstay at the admin endpoint has started, as a text that is compared; or why it does not serve.
    ///
    /// # Errors
    /// The reason.
    fn serving_since(&self) -> Result<String, String>;
    /// Writes the recovery unit and the guard, and enables the first.
    ///
    /// # Errors
    /// They cannot be written or enabled.
    fn protect(&self, journal: &Journal) -> Result<(), UndoError>;
    /// Removes recovery unit and guard.
    ///
    /// # Errors
    /// The recovery unit cannot be disabled.
    fn release(&self, journal: &Journal) -> Result<(), UndoError>;
    /// A monotonic time.
    fn now(&self) -> Duration;
    /// Waits before the next look at the node.
    fn pause(&self);
}

/// What a version consists of on this node.
#[derive(Debug)]
pub struct OfferedVersion<'a> {
    /// The program at the path of the installation.
    pub program: &'a OutputFile,
    /// Units and manifest.
    pub service: &'a Service,
    /// The arguments of the installation with this version.
    pub request: &'a str,
}

/// What differs.
#[derive(Debug, Default)]
pub struct UpgradePlan<'a> {
    /// The files to write.
    pub files: Vec<&'a OutputFile>,
    /// Files that have changed since the installation, and would be others in this version. They are kept.
    pub kept: Vec<PathBuf>,
    /// Whether another program runs.
    pub other_runs: bool,
}

impl UpgradePlan<'_> {
    /// Whether this version is installed and runs.
    pub fn is_empty(&self) -> bool {
        self.files.is_empty() && !self.other_runs
    }
}

/// Why an upgrade failed.
#[derive(Debug, thiserror::Error)]
pub enum UpgradeError {
    /// Nothing has changed.
    #[error("nothing changed: {0}")]
    Unchanged(String),
    /// The files of before are restored.
    #[error("the upgrade failed and was undone, the version of before runs: {0}")]
    Undone(String),
    /// It could not be undone, either.
    #[error("the upgrade failed ({0}) and could not be undone: {1}; run `jackstay install` again")]
    Incomplete(String, UndoError),
}

/// Compares a version with what is installed and runs.
///
/// # Errors
/// A file cannot be read.
pub fn plan<'a>(
    journal: &Journal,
    offered: &OfferedVersion<'a>,
    host: &impl UpgradeHost,
) -> Result<UpgradePlan<'a>, JournalError> {
    let mut plan = UpgradePlan::default();
    for file in [offered.program].into_iter().chain(&offered.service.files) {
        let now = content(&file.path)?;
        if now.as_ref().is_some_and(|now| *now == file.bytes) {
            continue;
        }
        // The operator asks for this program, whatever is there.
        let is_program = file.path == offered.program.path;
        let installed = journal.file(&file.path).map(|record| record.digest.as_str());
        if is_program || now.is_none() || now.map(|now| digest_of(&now)).as_deref() == installed {
            plan.files.push(file);
        } else {
            plan.kept.push(file.path.clone());
        }
    }
    if journal.manifest().is_none() {
        let new = digest_of(&offered.program.bytes);
        plan.other_runs = main_pid(host).and_then(|pid| host.program_of(pid)) != Some(new);
    }
    Ok(plan)
}

/// Carries out a plan. After an error, the version of before is installed and runs.
///
/// # Errors
/// What failed, and what has become of the node.
pub fn upgrade(
    store: &Store,
    journal: &mut Journal,
    (plan, offered): (&UpgradePlan<'_>, &OfferedVersion<'_>),
    host: &impl UpgradeHost,
) -> Result<(), UpgradeError> {
    let files: Vec<NewContent<'_>> = plan.files.iter().map(|file| new_content(file)).collect();
    let program = digest_of(&offered.program.bytes);
    let before = host.serving_since();
    let begun = store
        .begin_upgrade(journal, (offered.request, &program), &files)
        .map_err(UndoError::from)
        .and_then(|()| host.protect(journal));
    if let Err(error) = begun {
        let _ = store.forget_upgrade(journal);
        let _ = host.release(journal);
        return Err(UpgradeError::Unchanged(error.to_string()));
    }
    let changed = change(journal, &plan.files, before.as_ref().ok(), host);
    match changed.and_then(|()| store.commit_upgrade(journal).map_err(|error| error.to_string())) {
        Ok(()) => {
            // The new version runs; a unit that stays finds nothing to do.
            let _ = host.release(journal);
            Ok(())
        }
        Err(why) => match roll_back(store, journal, host) {
            Ok(()) => Err(UpgradeError::Undone(why)),
            Err(error) => Err(UpgradeError::Incomplete(why, error)),
        },
    }
}

fn new_content(file: &OutputFile) -> NewContent<'_> {
    NewContent { path: &file.path, bytes: &file.bytes, keep_if_changed: true }
}

/// Writes the files and has the new program run.
fn change(
    journal: &Journal,
    files: &[&OutputFile],
    before: Option<&String>,
    host: &impl UpgradeHost,
) -> Result<(), String> {
    let Some(upgrade) = &journal.upgrade else { return Ok(()) };
    let is_program = |file: &&&OutputFile| file.path == journal.program;
    for file in files.iter().filter(is_program) {
        write(&file.path, &file.bytes, file.mode).map_err(|error| error.to_string())?;
    }
    // The guard is the new program: the one of before may not know of upgrades.
    host.systemctl(&["start", GUARD_UNIT]).map_err(|error| error.to_string())?;
    for file in files.iter().filter(|file| !is_program(file)) {
        write(&file.path, &file.bytes, file.mode).map_err(|error| error.to_string())?;
    }
    host.systemctl(&["daemon-reload"]).map_err(|error| error.to_string())?;
    if journal.manifest().is_some() {
        let restarts = upgrade.files.iter().any(|file| file.is_manifest_at(journal));
        return if restarts { await_another_pod(before, host) } else { Ok(()) };
    }
    run_program(&upgrade.program, host)?;
    match before {
        // What did not serve before is not the fault of the new version.
        None => Ok(()),
        Some(_) => await_serving(host),
    }
}

/// Has the program at the path of the unit run, without a gap if another one runs.
fn run_program(program: &str, host: &impl UpgradeHost) -> Result<(), String> {
    let runs = |pid: u32| host.program_of(pid).as_deref() == Some(program);
    match main_pid(host) {
        Some(pid) if runs(pid) => return Ok(()),
        Some(pid) => {
            host.request_takeover(pid)
                .map_err(|error| format!("cannot signal process {pid}: {error}"))?;
        }
        None => {
            host.systemctl(&["restart", UNIT]).map_err(|error| error.to_string())?;
        }
    }
    await_program(program, TAKEOVER_LIMIT, host)
}

fn await_program(program: &str, limit: Duration, host: &impl UpgradeHost) -> Result<(), String> {
    let reason = || match main_pid(host) {
        None => Some(format!("{UNIT} does not run")),
        Some(pid) if host.program_of(pid).as_deref() == Some(program) => None,
        Some(pid) => Some(format!("process {pid} of {UNIT} is of another program")),
    };
    poll(limit, reason, host).map_err(|why| {
        format!("the new program does not serve: {why}; `journalctl -u jackstay` has its log")
    })
}

fn await_serving(host: &impl UpgradeHost) -> Result<(), String> {
    poll(SERVE_LIMIT, || host.serving_since().err(), host)
        .map_err(|why| format!("the new program runs and does not serve: {why}"))
}

fn await_another_pod(before: Option<&String>, host: &impl UpgradeHost) -> Result<(), String> {
    let reason = || match host.serving_since() {
        Ok(since) if Some(&since) == before => {
            Some("kubelet has not started the new pod".to_owned())
        }
        Ok(_) => None,
        Err(why) => Some(why),
    };
    poll(SERVE_LIMIT, reason, host).map_err(|why| format!("the new pod does not serve: {why}"))
}

/// Asks for a reason to wait until there is none.
fn poll(
    limit: Duration,
    mut reason: impl FnMut() -> Option<String>,
    host: &impl UpgradeHost,
) -> Result<(), String> {
    let end = host.now() + limit;
    while let Some(why) = reason() {
        if host.now() >= end {
            return Err(format!("{why} (after {} s)", limit.as_secs()));
        }
        host.pause();
    }
    Ok(())
}

/// Completes an upgrade whose process has ended: if the new program runs, it is complete; otherwise it is undone. At
/// boot, before jackstay, it is undone.
///
/// # Errors
/// A file cannot be restored. The next run repeats it.
pub fn recover(
    store: &Store,
    journal: &mut Journal,
    host: &impl UpgradeHost,
) -> Result<UpgradeRecovery, UndoError> {
    let Some(upgrade) = &journal.upgrade else { return Ok(UpgradeRecovery::None) };
    let limit = if main_pid(host).is_some() { TAKEOVER_LIMIT } else { Duration::ZERO };
    let is_unit = journal.manifest().is_none();
    if is_unit && await_program(&upgrade.program, limit, host).is_ok() {
        store.commit_upgrade(journal)?;
        host.release(journal)?;
        return Ok(UpgradeRecovery::Completed);
    }
    roll_back(store, journal, host)?;
    Ok(UpgradeRecovery::Undone)
}

/// What became of an upgrade whose process has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UpgradeRecovery {
    /// There was none.
    None,
    /// The new version runs.
    Completed,
    /// The version of before is installed again.
    Undone,
}

/// Restores the files of before, and has their program run if the new one does.
fn roll_back(
    store: &Store,
    journal: &mut Journal,
    host: &impl UpgradeHost,
) -> Result<(), UndoError> {
    let new = journal.upgrade.as_ref().map(|upgrade| upgrade.program.clone()).unwrap_or_default();
    restore_previous(store, journal)?;
    host.systemctl(&["daemon-reload"])?;
    if journal.manifest().is_none() && state(host) != "inactive" {
        let previous = content(&journal.program)?.map(|bytes| digest_of(&bytes));
        let running = main_pid(host).and_then(|pid| host.program_of(pid));
        if let Some(previous) = previous.filter(|_| running.is_none() || running == Some(new)) {
            run_program(&previous, host)
                .map_err(|why| CommandError::Failed(format!("start of {UNIT}"), why))?;
        }
    }
    store.forget_upgrade(journal)?;
    host.release(journal)
}

/// The main process of the unit, unless it does not run.
pub fn main_pid(manager: &impl ServiceManager) -> Option<u32> {
    property(manager, UNIT, "MainPID").parse().ok().filter(|pid| *pid > 0)
}

fn state(manager: &impl ServiceManager) -> String {
    property(manager, UNIT, "ActiveState")
}

/// The program that the unit starts, which a drop-in or another unit file may have changed; `None` if it is not known.
pub fn started_program(manager: &impl ServiceManager) -> Option<PathBuf> {
    // { path=/usr/bin/jackstay ; argv[]=... ; ... }
    let command = property(manager, UNIT, "ExecStart");
    let (_, path) = command.split_once("path=")?;
    Some(Path::new(path.split_once(" ;")?.0).to_owned())
}

#[cfg(test)]
mod tests;

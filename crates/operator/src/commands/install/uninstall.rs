//! Undoes an installation, complete or interrupted, and reports it.

use std::path::Path;

use super::progress::Progress;
use crate::commands::kubeconfig::Failure;
use crate::install::journal::{Journal, JournalError, Store};
use crate::install::service::{
    GUARD_UNIT, GUARD_UNIT_FILE, RECOVERY_UNIT, guard_unit, recovery_unit,
};
use crate::install::transaction::write;
use crate::install::undo::{UndoError, Undone, finish, undo};
use crate::systemd::{ServiceManager, Systemd};

/// Undoes the change in the journal.
///
/// # Errors
/// The step that failed; the next run continues.
pub(super) fn undo_now(store: &Store, journal: &Journal) -> Result<Undone, Failure> {
    undo(store, journal, &Systemd).map_err(|error| {
        Failure::Write(format!(
            "cannot undo the installation: {error}; run `jackstay uninstall` to try again"
        ))
    })
}

/// Prints what `jackstay uninstall` would do.
pub(super) fn describe_undo(journal: &Journal, progress: &mut Progress) {
    let mut on_file = |action, path: &Path| {
        progress.other(action, Some(&path.display().to_string()), "");
    };
    on_file("restore", &journal.kubeconfig.path);
    let mut commands = vec![format!("restart {}", journal.kubelet_unit)];
    for unit in journal.units.iter().rev() {
        let command = if unit.was_enabled { "stop" } else { "disable --now" };
        commands.push(format!("{command} {}", unit.name));
    }
    for command in commands {
        progress.other("systemctl", None, &command);
    }
    let mut on_file = |action, path: &Path| {
        progress.other(action, Some(&path.display().to_string()), "");
    };
    for file in journal.files.iter().rev() {
        on_file(if file.original.is_some() { "restore" } else { "remove" }, &file.path);
    }
    for directory in journal.state_directories.iter().chain(journal.directories.iter().rev()) {
        on_file("remove", directory);
    }
}

/// Has guard and recovery unit continue an `uninstall` that is interrupted.
///
/// # Errors
/// The units cannot be written or started. They are removed then; nothing else has changed.
pub(super) fn protect_undo(store: &Store, journal: &mut Journal) -> Result<(), Failure> {
    let protected = start_guards(journal).and_then(|()| Ok(store.reopen(journal)?));
    protected.map_err(|error| {
        let _ = finish(journal, store, &Systemd);
        remove_guard();
        Failure::Write(format!("nothing changed: {error}"))
    })
}

/// Writes recovery unit and guard, which run the program of the installation.
///
/// # Errors
/// A file cannot be written.
pub(super) fn write_guards(journal: &Journal) -> Result<(), JournalError> {
    for file in
        [recovery_unit(&journal.program, &journal.kubelet_unit), guard_unit(&journal.program)]
    {
        write(&file.path, &file.bytes, file.mode)?;
    }
    Ok(())
}

fn start_guards(journal: &Journal) -> Result<(), UndoError> {
    write_guards(journal)?;
    for arguments in [["enable", RECOVERY_UNIT], ["start", GUARD_UNIT]] {
        Systemd.systemctl(&arguments)?;
    }
    Ok(())
}

/// Removes the file of the guard, which ends by itself.
pub(super) fn remove_guard() {
    let _ = std::fs::remove_file(GUARD_UNIT_FILE);
    let _ = Systemd.systemctl(&["daemon-reload"]);
}

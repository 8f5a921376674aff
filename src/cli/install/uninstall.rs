//! Undoes an installation, complete or interrupted, and reports it.

use std::fmt::Write as _;

use crate::cli::kubeconfig::Failure;
use crate::install::journal::{Journal, Store};
use crate::install::service::{
    GUARD_UNIT, GUARD_UNIT_FILE, RECOVERY_UNIT, guard_unit, recovery_unit,
};
use crate::install::systemd::{ServiceManager, Systemd};
use crate::install::transaction::write;
use crate::install::undo::{UndoError, Undone, finish, undo};

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

/// Prints what was done.
pub(super) fn report(undone: &Undone) {
    if undone.kubelet_restarted {
        println!("kubelet uses its old kubeconfig again");
    }
    for path in &undone.kept {
        println!("kept {}, which has changed since the installation", path.display());
    }
    for note in &undone.notes {
        println!("note: {note}");
    }
}

/// What `jackstay uninstall` would do.
pub(super) fn describe_undo(journal: &Journal) -> String {
    let mut text = String::new();
    let _ = writeln!(text, "restore {}", journal.kubeconfig.path.display());
    let _ = writeln!(text, "systemctl restart {}", journal.kubelet_unit);
    for unit in journal.units.iter().rev() {
        let command = if unit.was_enabled { "stop" } else { "disable --now" };
        let _ = writeln!(text, "systemctl {command} {}", unit.name);
    }
    for file in journal.files.iter().rev() {
        let action = if file.original.is_some() { "restore" } else { "remove" };
        let _ = writeln!(text, "{action} {}", file.path.display());
    }
    for directory in journal.state_directories.iter().chain(journal.directories.iter().rev()) {
        let _ = writeln!(text, "remove {}", directory.display());
    }
    text
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

fn start_guards(journal: &Journal) -> Result<(), UndoError> {
    for file in
        [recovery_unit(&journal.program, &journal.kubelet_unit), guard_unit(&journal.program)]
    {
        write(&file.path, &file.bytes, file.mode)?;
    }
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

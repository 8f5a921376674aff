//! Undoes an installation, complete or interrupted, and reports it.

use std::fmt::Write as _;

use crate::cli::kubeconfig::Failure;
use crate::install::journal::{Journal, Store};
use crate::install::service::{
    GUARD_UNIT, GUARD_UNIT_FILE, RECOVERY_UNIT, guard_unit, recovery_unit,
};
use crate::install::systemd::{ServiceManager, Systemd};
use crate::install::transaction::write;
use crate::install::undo::{Undone, undo};

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
        let _ = writeln!(text, "systemctl disable --now {unit}");
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
/// The units cannot be written or started; nothing has changed then.
pub(super) fn protect_undo(store: &Store, journal: &mut Journal) -> Result<(), Failure> {
    let program = std::env::current_exe().map_err(|error| {
        Failure::Input(format!("the path of this program is not known: {error}"))
    })?;
    for file in [recovery_unit(&program, &journal.kubelet_unit), guard_unit(&program)] {
        write(&file.path, &file.bytes, file.mode)?;
    }
    for arguments in [["enable", RECOVERY_UNIT], ["start", GUARD_UNIT]] {
        Systemd.systemctl(&arguments)?;
    }
    store.reopen(journal)?;
    Ok(())
}

/// Removes the file of the guard, which ends by itself.
pub(super) fn remove_guard() {
    let _ = std::fs::remove_file(GUARD_UNIT_FILE);
    let _ = Systemd.systemctl(&["daemon-reload"]);
}

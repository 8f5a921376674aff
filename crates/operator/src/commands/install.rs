//! `jackstay install` and `jackstay uninstall`: put jackstay beside the kubelet of this node, and remove it.
//!
//! Everything is checked before the first change. The changes are steps (`install::steps`) that `--dry-run` prints; a
//! journal undoes them after an error, a kill or a reboot (`install::undo`).

mod args;
mod execute;
mod node;
mod prepare;
mod progress;
mod uninstall;
mod upgrade;

use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

pub use self::args::{InstallArgs, UninstallArgs};
use self::execute::Installation;
use self::prepare::Preparation;
use self::progress::{Outcome, Progress};
use self::uninstall::undo_now;
use self::upgrade::{install_again, recover_upgrade};
use super::kubeconfig::Failure;
use crate::install::journal::{DIRECTORY, JournalError, LOCK, Lock, Phase, Store, lock};
use crate::options::EXIT_USAGE;

/// How long a process waits for another one that changes the node, such as the guard of an interrupted installation.
const LOCK_LIMIT: Duration = Duration::from_secs(120);
/// Interval of the attempts.
const LOCK_POLL: Duration = Duration::from_millis(200);

/// Runs `jackstay install`.
pub fn run(args: &InstallArgs) -> ExitCode {
    let mut progress = Progress::new(args.output.format);
    let result = if args.recover { recover(&mut progress) } else { install(args, &mut progress) };
    exit(result, progress)
}

/// Runs `jackstay uninstall`.
pub fn run_uninstall(args: &UninstallArgs) -> ExitCode {
    let mut progress = Progress::new(args.output.format);
    let result = uninstall(args, &mut progress);
    exit(result, progress)
}

fn exit(result: Result<(), Failure>, progress: Progress) -> ExitCode {
    let (error, code) = match result {
        Ok(()) => (None, ExitCode::SUCCESS),
        Err(Failure::Input(error)) => (Some(error), ExitCode::from(EXIT_USAGE)),
        Err(Failure::Write(error)) => (Some(error), ExitCode::FAILURE),
    };
    progress.finish(error.as_deref());
    code
}

fn install(args: &InstallArgs, progress: &mut Progress) -> Result<(), Failure> {
    require_root("install")?;
    let store = Store::new(DIRECTORY);
    let _lock = lock_node()?;
    match store.read()? {
        Some(journal) if journal.phase != Phase::Installed => {
            if args.dry_run {
                let why = "an interrupted installation is undone first: run `jackstay uninstall`";
                return Err(Failure::input(why));
            }
            progress.line("an earlier installation was interrupted: undoing it");
            progress.undone(&undo_now(&store, &journal)?);
        }
        Some(mut journal) => {
            if journal.upgrade.is_some() {
                if args.dry_run {
                    let why = "an interrupted upgrade is completed or undone first: run `jackstay install` without --dry-run";
                    return Err(Failure::input(why));
                }
                recover_upgrade(&store, &mut journal, progress)?;
            }
            return install_again(args, &store, &mut journal, progress);
        }
        None => {}
    }
    let preparation = Preparation::new(args, progress)?;
    let installation = Installation::new(args, &preparation);
    if args.dry_run {
        installation.describe(progress);
        progress.outcome(Outcome::Planned);
        return Ok(());
    }
    installation.carry_out(&store, progress)
}

fn uninstall(args: &UninstallArgs, progress: &mut Progress) -> Result<(), Failure> {
    require_root("uninstall")?;
    let store = Store::new(DIRECTORY);
    let _lock = lock_node()?;
    let Some(mut journal) = store.read()? else {
        // What an installation saved that ended before it had a journal.
        store.remove()?;
        progress.outcome(Outcome::NotInstalled);
        progress
            .line("jackstay is not installed by `jackstay install` on this node: nothing to do");
        return Ok(());
    };
    progress.node(&journal.node);
    if args.dry_run {
        uninstall::describe_undo(&journal, progress);
        progress.outcome(Outcome::Planned);
        return Ok(());
    }
    if journal.phase == Phase::Installed {
        uninstall::protect_undo(&store, &mut journal)?;
    }
    let undone = undo_now(&store, &journal)?;
    uninstall::remove_guard();
    progress.undone(&undone);
    progress.outcome(Outcome::Removed);
    progress.line(&format!("jackstay is removed from node {}", journal.node));
    Ok(())
}

/// Undoes an interrupted installation or upgrade; the guard and the recovery unit run this.
fn recover(progress: &mut Progress) -> Result<(), Failure> {
    let _lock = lock(Path::new(LOCK), true)?;
    let store = Store::new(DIRECTORY);
    match store.read()? {
        Some(journal) if journal.phase != Phase::Installed => {
            eprintln!("jackstay install was interrupted: undoing it");
            progress.undone(&undo_now(&store, &journal)?);
            uninstall::remove_guard();
            Ok(())
        }
        Some(mut journal) => recover_upgrade(&store, &mut journal, progress),
        None => Ok(()),
    }
}

fn require_root(command: &str) -> Result<(), Failure> {
    if rustix::process::geteuid().is_root() {
        return Ok(());
    }
    Err(Failure::Input(format!(
        "`jackstay {command}` needs root: it reads kubelet's credential, writes units and restarts kubelet"
    )))
}

/// Takes the lock of the node, after a process that has it: usually the guard of an interrupted installation.
fn lock_node() -> Result<Lock, Failure> {
    let end = Instant::now() + LOCK_LIMIT;
    let mut announced = false;
    loop {
        match lock(Path::new(LOCK), false) {
            Err(JournalError::Locked) if Instant::now() < end => {
                if !announced {
                    eprintln!(
                        "another `jackstay install` or `jackstay uninstall` runs: waiting for it"
                    );
                    announced = true;
                }
                std::thread::sleep(LOCK_POLL);
            }
            result => return Ok(result?),
        }
    }
}

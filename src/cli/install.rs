//! `jackstay install` and `jackstay uninstall`: put jackstay beside the kubelet of this node, and remove it.
//!
//! Everything is checked before the first change. The changes are steps (`install::steps`) that `--dry-run` prints; a
//! journal undoes them after an error, a kill or a reboot (`install::undo`).

mod args;
mod execute;
mod node;
mod prepare;
mod uninstall;

use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

pub(super) use self::args::{InstallArgs, UninstallArgs};
use self::execute::Installation;
use self::prepare::Preparation;
use self::uninstall::{report, undo_now};
use super::kubeconfig::Failure;
use super::options::EXIT_USAGE;
use crate::install::journal::{DIRECTORY, Journal, JournalError, LOCK, Lock, Phase, Store, lock};

/// How long a process waits for another one that changes the node, such as the guard of an interrupted installation.
const LOCK_LIMIT: Duration = Duration::from_secs(120);
/// Interval of the attempts.
const LOCK_POLL: Duration = Duration::from_millis(200);

/// Runs `jackstay install`.
pub(super) fn run(args: &InstallArgs) -> ExitCode {
    if args.recover {
        return exit(recover());
    }
    exit(install(args))
}

/// Runs `jackstay uninstall`.
pub(super) fn run_uninstall(args: &UninstallArgs) -> ExitCode {
    exit(uninstall(args))
}

fn exit(result: Result<(), Failure>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(Failure::Input(error)) => {
            eprintln!("{error}");
            ExitCode::from(EXIT_USAGE)
        }
        Err(Failure::Write(error)) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn install(args: &InstallArgs) -> Result<(), Failure> {
    require_root("install")?;
    let store = Store::new(DIRECTORY);
    let _lock = lock_node()?;
    match store.read()? {
        Some(journal) if journal.phase != Phase::Installed => {
            if args.dry_run {
                let why = "an interrupted installation is undone first: run `jackstay uninstall`";
                return Err(Failure::input(why));
            }
            println!("an earlier installation was interrupted: undoing it");
            report(&undo_now(&store, &journal)?);
        }
        Some(journal) => return already_installed(args, &journal),
        None => {}
    }
    let preparation = Preparation::new(args)?;
    let installation = Installation::new(args, &preparation);
    if args.dry_run {
        print!("{}", installation.describe());
        return Ok(());
    }
    installation.carry_out(&store)
}

/// A repeated installation with the same arguments changes nothing.
fn already_installed(args: &InstallArgs, journal: &Journal) -> Result<(), Failure> {
    let kubeconfig = journal.kubeconfig.path.display();
    let points_at_jackstay = std::fs::read_to_string(&journal.kubeconfig.path)
        .is_ok_and(|text| text.contains(&format!("https://{}", journal.listen)));
    if !points_at_jackstay {
        return Err(Failure::Input(format!(
            "jackstay is installed on node {}, but {kubeconfig} no longer points at it: run `jackstay uninstall`, then \
             install again",
            journal.node
        )));
    }
    if journal.request == args.request_text() {
        println!("jackstay is installed on node {} already", journal.node);
        return Ok(());
    }
    Err(Failure::Input(format!(
        "jackstay is installed on node {} with other arguments ({}): run `jackstay uninstall` first",
        journal.node, journal.request
    )))
}

fn uninstall(args: &UninstallArgs) -> Result<(), Failure> {
    require_root("uninstall")?;
    let store = Store::new(DIRECTORY);
    let _lock = lock_node()?;
    let Some(mut journal) = store.read()? else {
        // What an installation saved that ended before it had a journal.
        store.remove()?;
        println!("jackstay is not installed by `jackstay install` on this node: nothing to do");
        return Ok(());
    };
    if args.dry_run {
        print!("{}", uninstall::describe_undo(&journal));
        return Ok(());
    }
    if journal.phase == Phase::Installed {
        uninstall::protect_undo(&store, &mut journal)?;
    }
    let undone = undo_now(&store, &journal)?;
    uninstall::remove_guard();
    report(&undone);
    println!("jackstay is removed from node {}", journal.node);
    Ok(())
}

/// Undoes an interrupted installation; the guard and the recovery unit run this.
fn recover() -> Result<(), Failure> {
    let _lock = lock(Path::new(LOCK), true)?;
    let store = Store::new(DIRECTORY);
    if let Some(journal) = store.read()?.filter(|journal| journal.phase != Phase::Installed) {
        eprintln!("jackstay install was interrupted: undoing it");
        report(&undo_now(&store, &journal)?);
        uninstall::remove_guard();
    }
    Ok(())
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

//! `jackstay install` and `jackstay uninstall`: put jackstay beside the kubelet of this node, and remove it.
//!
//! Everything is checked before the first change. The changes are steps (`install::steps`) that `--dry-run` prints; a
//! journal undoes them after an error, a kill or a reboot (`install::undo`).

mod execute;
mod node;
mod prepare;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Args;

use self::execute::Installation;
use self::prepare::Preparation;
use super::kubeconfig::Failure;
use super::options::{DurationFlagError, EXIT_USAGE, parse_flag_duration};
use crate::install::journal::{DIRECTORY, Journal, JournalError, LOCK, Lock, Phase, Store, lock};
use crate::install::service::ServiceForm;
use crate::install::systemd::Systemd;
use crate::install::undo::{Undone, undo};
use crate::kubeconfig::setup::SetupMode;

const INSTALL_HELP: &str = "\
Exit codes: 0 the node is Ready through jackstay, 1 the installation failed
and was undone, 2 bad usage or an input that cannot be used; nothing changed.

Examples:
  jackstay install --dry-run
  jackstay install --endpoint 10.0.0.12:6443 --endpoint 10.0.0.13:6443
  jackstay install --as static-pod --image localhost/jackstay:0.1.0";

const UNINSTALL_HELP: &str = "\
Exit codes: 0 removed, or not installed, 1 a step failed, 2 bad usage.";

/// How long a process waits for another one that changes the node, such as the guard of an interrupted installation.
const LOCK_LIMIT: Duration = Duration::from_secs(120);
/// Interval of the attempts.
const LOCK_POLL: Duration = Duration::from_millis(200);

/// Arguments of `jackstay install`.
#[derive(Debug, Args)]
#[command(after_help = INSTALL_HELP)]
#[allow(clippy::struct_excessive_bools)] // each is a separate flag
pub(super) struct InstallArgs {
    /// L7 (terminate, with a local CA) or L4 (passthrough).
    #[arg(long, value_name = "MODE", default_value = "terminate")]
    mode: SetupMode,
    /// Run jackstay as a systemd unit or as a static pod.
    #[arg(long = "as", value_name = "FORM", default_value = "unit")]
    form: ServiceForm,
    /// Another apiserver of the cluster, besides the one in kubelet's kubeconfig. Repeatable.
    #[arg(long = "endpoint", value_name = "ADDR")]
    endpoints: Vec<String>,
    /// The kubeconfig of kubelet; default that of the running kubelet.
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// The address of jackstay for local clients.
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:7443")]
    listen: SocketAddr,
    /// The image of the static pod, which must be on the node.
    #[arg(long, value_name = "IMAGE", default_value = concat!("localhost/jackstay:", env!("CARGO_PKG_VERSION")))]
    image: String,
    /// Install on a control-plane node, too. Its kubelet normally uses the apiserver of its own node.
    #[arg(long)]
    control_plane: bool,
    /// Install although `jackstay doctor` finds a problem, such as the one that jackstay is to solve.
    #[arg(long)]
    ignore_findings: bool,
    /// Replace an existing /etc/jackstay/jackstay.yaml; `jackstay uninstall` restores it.
    #[arg(long)]
    force: bool,
    /// How long the node may take to become Ready; a number without a unit is seconds.
    #[arg(long, value_name = "DURATION", default_value = "60s", value_parser = parse_limit)]
    timeout: Duration,
    /// Print every file and command, and change nothing.
    #[arg(long)]
    dry_run: bool,
    /// Undo an installation that was interrupted, after the process that carries it out has ended.
    #[arg(long, hide = true)]
    recover: bool,
}

/// Arguments of `jackstay uninstall`.
#[derive(Debug, Args)]
#[command(after_help = UNINSTALL_HELP)]
pub(super) struct UninstallArgs {
    /// Print what would be restored, and change nothing.
    #[arg(long)]
    dry_run: bool,
}

fn parse_limit(text: &str) -> Result<Duration, DurationFlagError> {
    let duration = parse_flag_duration(text).map_err(DurationFlagError::Unit)?;
    if (Duration::from_secs(5)..=Duration::from_secs(3600)).contains(&duration) {
        Ok(duration)
    } else {
        Err(DurationFlagError::OutsideLimits("from 5s to 1h"))
    }
}

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
    if journal.request == request_text(args) {
        println!("jackstay is installed on node {} already", journal.node);
        return Ok(());
    }
    Err(Failure::Input(format!(
        "jackstay is installed on node {} with other arguments ({}): run `jackstay uninstall` first",
        journal.node, journal.request
    )))
}

/// The arguments that decide the result.
fn request_text(args: &InstallArgs) -> String {
    let mut endpoints = args.endpoints.clone();
    endpoints.sort();
    let form = match args.form {
        ServiceForm::Unit => "unit",
        ServiceForm::StaticPod => "static-pod",
    };
    let mode = match args.mode {
        SetupMode::Terminate => "terminate",
        SetupMode::Passthrough => "passthrough",
    };
    let mut text = format!("--mode {mode} --as {form} --listen {}", args.listen);
    for endpoint in endpoints {
        text.push_str(" --endpoint ");
        text.push_str(&endpoint);
    }
    text
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
        print!("{}", execute::describe_undo(&journal));
        return Ok(());
    }
    if journal.phase == Phase::Installed {
        execute::protect_undo(&store, &mut journal)?;
    }
    let undone = undo_now(&store, &journal)?;
    execute::remove_guard();
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
        execute::remove_guard();
    }
    Ok(())
}

fn undo_now(store: &Store, journal: &Journal) -> Result<Undone, Failure> {
    undo(store, journal, &Systemd).map_err(|error| {
        Failure::Write(format!(
            "cannot undo the installation: {error}; run `jackstay uninstall` to try again"
        ))
    })
}

fn report(undone: &Undone) {
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

//! `jackstay install` on a node that has jackstay: compares the version that runs with this one, and upgrades to this
//! one.

use std::io;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use super::args::InstallArgs;
use super::execute::POLL;
use super::prepare::{current_program, refuse_missing_image, this_program};
use super::progress::{Outcome, Progress};
use super::uninstall::{remove_guard, write_guards};
use crate::VERSION;
use crate::admin_client::{DEFAULT_ADMIN, explain_no_status, fetch_status};
use crate::commands::kubeconfig::Failure;
use crate::commands::status::serving::unready_reason_for_new_clients;
use crate::doctor::image::{InstalledTools, pin};
use crate::install::journal::{Journal, Store, content, digest_of};
use crate::install::service::{
    RECOVERY_UNIT, RENEWAL_UNIT, Service, ServiceForm, ServiceRequest, UNIT, UNITS, service,
};
use crate::install::undo::{UndoError, finish};
use crate::install::upgrade::{
    OfferedVersion, UpgradeError, UpgradeHost, UpgradePlan, UpgradeRecovery, plan, recover,
    started_program, upgrade,
};
use crate::kubeconfig::setup::{OutputFile, SetupMode};
use crate::systemd::{CommandError, ServiceManager, Systemd};

/// This machine.
pub(super) struct Machine {
    store: Store,
    started: Instant,
}

impl Machine {
    pub(super) fn new(store: &Store) -> Self {
        Self { store: store.clone(), started: Instant::now() }
    }
}

impl ServiceManager for Machine {
    fn systemctl(&self, arguments: &[&str]) -> Result<String, CommandError> {
        Systemd.systemctl(arguments)
    }
}

impl UpgradeHost for Machine {
    fn program_of(&self, pid: u32) -> Option<String> {
        // The file may have been replaced or deleted; the link leads to the one that the process executes.
        let bytes = content(&PathBuf::from(format!("/proc/{pid}/exe"))).ok()??;
        Some(digest_of(&bytes))
    }

    fn request_takeover(&self, pid: u32) -> io::Result<()> {
        let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
        let pid = pid.ok_or_else(|| io::Error::other("not a process"))?;
        Ok(kill_process(pid, Signal::USR2)?)
    }

    fn serving_since(&self) -> Result<String, String> {
        let status = fetch_status(DEFAULT_ADMIN)
            .map_err(|error| explain_no_status(DEFAULT_ADMIN, &error))?;
        match unready_reason_for_new_clients(&status) {
            Some(why) => Err(why),
            None => Ok(status["started_at"].to_string()),
        }
    }

    fn protect(&self, journal: &Journal) -> Result<(), UndoError> {
        write_guards(journal)?;
        self.systemctl(&["enable", RECOVERY_UNIT])?;
        Ok(())
    }

    fn release(&self, journal: &Journal) -> Result<(), UndoError> {
        let released = finish(journal, &self.store, self);
        remove_guard();
        released
    }

    fn now(&self) -> Duration {
        self.started.elapsed()
    }

    fn pause(&self) {
        thread::sleep(POLL);
    }
}

/// Completes or undoes an upgrade whose process has ended.
///
/// # Errors
/// A file cannot be restored.
pub(super) fn recover_upgrade(
    store: &Store,
    journal: &mut Journal,
    progress: &mut Progress,
) -> Result<(), Failure> {
    let recovered = recover(store, journal, &Machine::new(store)).map_err(|error| {
        Failure::Write(format!(
            "cannot undo an interrupted upgrade: {error}; run `jackstay install` again"
        ))
    })?;
    match recovered {
        UpgradeRecovery::None => {}
        UpgradeRecovery::Completed => progress.line("an interrupted upgrade is complete"),
        UpgradeRecovery::Undone => {
            progress.line("an interrupted upgrade was undone: the version of before is installed");
        }
    }
    Ok(())
}

/// `jackstay install` with the same arguments: nothing if this version runs, or an upgrade to it.
///
/// # Errors
/// jackstay was installed in another way, or the upgrade fails.
pub(super) fn install_again(
    args: &InstallArgs,
    store: &Store,
    journal: &mut Journal,
    progress: &mut Progress,
) -> Result<(), Failure> {
    progress.node(&journal.node);
    refuse_changed_kubeconfig(journal)?;
    if without_image(&journal.request) != without_image(&args.request_text()) {
        return Err(Failure::Input(format!(
            "jackstay is installed on node {} with other arguments ({}): use the same ones, or run `jackstay uninstall` first",
            journal.node, journal.request
        )));
    }
    let program = offered_program(journal)?;
    refuse_other_program(journal)?;
    let service = offered_service(args, journal);
    let request = args.request_text();
    let offered = OfferedVersion { program: &program, service: &service, request: &request };
    let host = Machine::new(store);
    let plan = plan(journal, &offered, &host)?;
    for path in &plan.kept {
        progress.note(&format!(
            "{} has changed since the installation and is kept: compare it with that of this version",
            path.display()
        ));
    }
    if plan.is_empty() {
        return unchanged(journal, &host, progress);
    }
    if journal.manifest().is_some() {
        refuse_missing_image(args, progress)?;
    }
    announce(&plan, journal, args.dry_run, progress);
    if args.dry_run {
        progress.outcome(Outcome::Planned);
        return Ok(());
    }
    if journal.manifest().is_some()
        && let Err(why) = pin(&args.image, &InstalledTools)
    {
        progress.warning(&why);
    }
    upgrade(store, journal, (&plan, &offered), &host).map_err(|error| match error {
        UpgradeError::Unchanged(_) => Failure::Input(error.to_string()),
        UpgradeError::Undone(_) | UpgradeError::Incomplete(..) => Failure::Write(error.to_string()),
    })?;
    if plan.files.iter().any(|file| file.path.ends_with(UNIT)) {
        progress.note(&format!(
            "the settings of the new {UNIT} take effect at the next `systemctl restart {UNIT}`"
        ));
    }
    progress.outcome(Outcome::Upgraded);
    progress
        .line(&format!("jackstay on node {} is upgraded to {}, which runs", journal.node, VERSION));
    Ok(())
}

/// This version is installed; fails if it does not serve, because that is not what the command is for.
fn unchanged(journal: &Journal, host: &Machine, progress: &mut Progress) -> Result<(), Failure> {
    let node = &journal.node;
    let status = fetch_status(DEFAULT_ADMIN).ok();
    let version = status.as_ref().and_then(|status| status["version"].as_str());
    if journal.manifest().is_some()
        && let Some(version) = version.filter(|version| *version != VERSION)
    {
        return Err(Failure::Write(format!(
            "nothing changed: the manifest on node {node} is that of this version, and its pod runs version {version}: import \
             the image of this version under a name of its own, and name it with --image"
        )));
    }
    if let Err(why) = host.serving_since() {
        progress.warning(&format!("jackstay does not serve: {why}"));
    }
    progress.outcome(Outcome::Unchanged);
    progress.line(&format!(
        "jackstay is installed on node {node} already, in this version ({VERSION})"
    ));
    Ok(())
}

fn announce(plan: &UpgradePlan<'_>, journal: &Journal, dry_run: bool, progress: &mut Progress) {
    if !dry_run {
        progress.line(&format!("another version is installed on node {}: upgrading", journal.node));
    }
    for file in &plan.files {
        progress.other("write", Some(&file.path.display().to_string()), file.description);
    }
    if plan.other_runs {
        progress.other("wait", None, "until the new program has taken over");
    }
}

fn refuse_changed_kubeconfig(journal: &Journal) -> Result<(), Failure> {
    let kubeconfig = &journal.kubeconfig.path;
    let server = format!("https://{}", journal.listen);
    if std::fs::read_to_string(kubeconfig).is_ok_and(|text| text.contains(&server)) {
        return Ok(());
    }
    Err(Failure::Input(format!(
        "jackstay is installed on node {}, but {} no longer points at it: run `jackstay uninstall`, then install again",
        journal.node,
        kubeconfig.display()
    )))
}

/// Another program than that of the journal is not replaced: it belongs to a package or to the operator.
fn refuse_other_program(journal: &Journal) -> Result<(), Failure> {
    let is_unit = journal.manifest().is_none();
    let Some(started) =
        started_program(&Systemd).filter(|path| is_unit && *path != journal.program)
    else {
        return Ok(());
    };
    Err(Failure::Input(format!(
        "nothing changed: {UNIT} runs {}, and `jackstay install` has installed {}: `systemctl cat {UNIT}` shows the file that \
         names it; correct it, then run this command again",
        started.display(),
        journal.program.display()
    )))
}

/// This program at the path of the installation.
fn offered_program(journal: &Journal) -> Result<OutputFile, Failure> {
    let program = OutputFile { path: journal.program.clone(), ..this_program()? };
    let is_written = journal.file(&journal.program).is_some();
    let is_there = content(&journal.program)?.is_some_and(|bytes| bytes == program.bytes);
    if is_written || is_there {
        return Ok(program);
    }
    Err(Failure::Input(format!(
        "nothing changed: jackstay on node {} is {}, which `jackstay install` has not written, as with a package, and this is \
         {}: install the new version there, then run `{} install` with the same arguments",
        journal.node,
        journal.program.display(),
        current_program()?.display(),
        journal.program.display()
    )))
}

/// The units or the manifest of this version.
fn offered_service(args: &InstallArgs, journal: &Journal) -> Service {
    let is_package = |unit: &str| journal.file(&Path::new(UNITS).join(unit)).is_none();
    let manifest = journal.manifest().map(|file| file.path.clone());
    let static_pods = manifest.as_deref().and_then(Path::parent).unwrap_or(Path::new("/"));
    service(&ServiceRequest {
        form: if manifest.is_some() { ServiceForm::StaticPod } else { ServiceForm::Unit },
        mode: args.mode,
        program: &journal.program,
        kubeconfig: &journal.kubeconfig.path,
        kubelet_unit: &journal.kubelet_unit,
        static_pods,
        image: &args.image,
        existing_units: (
            is_package(UNIT),
            args.mode == SetupMode::Terminate && is_package(RENEWAL_UNIT),
        ),
        enabled_units: &[],
    })
}

/// The arguments of an installation without the image, which names a version.
fn without_image(request: &str) -> String {
    let mut words = request.split(' ');
    let mut kept = Vec::new();
    while let Some(word) = words.next() {
        match word {
            "--image" => drop(words.next()),
            _ => kept.push(word),
        }
    }
    kept.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_image_compares_installations_of_different_versions() {
        let of = |image: &str| {
            format!("--mode terminate --as static-pod --listen l{image} --endpoint e")
        };
        assert_eq!(without_image(&of(" --image a:1")), of(""));
        assert_eq!(without_image(&of("")), of(""));
        assert_ne!(without_image(&of(" --image a:1")), "--mode terminate");
    }
}

//! `jackstay kubeconfig --renew`: replaces the serving certificate of a local listener and its CA in two phases, and
//! keeps the CAs in the kubeconfigs. The running jackstay reloads the certificate and needs no key of a CA.
//!
//! A timer runs it each day. What stops one kubeconfig is a warning, so that it does not stop the rest.

use std::fs::File;
use std::path::{Path, PathBuf};

use jackstay_config::{self as config, Overrides};
use jackstay_kubeconfig::{KubeconfigFile, KubeconfigPaths};
use jackstay_sys::files::PUBLIC;
use jackstay_sys::utc::wall_clock;
use rustix::fs::{FlockOperation, flock};

use super::args::KubeconfigArgs;
use super::lock;
use super::output::{Failure, directory_beside, stage};
use super::readers;
use super::report::{KubeconfigReport, ReportedCluster};
use crate::admin_client::TcpAddress;
use crate::kubeconfig::rewrite::KeyChange;
use crate::kubeconfig::setup::OutputFile;
use crate::kubeconfig::setup::renewal::{self, Listed, RenewalPlan, RenewalRequest, RenewalState};
use crate::systemd::{ServiceManager, Systemd};

/// The listener whose certificate is renewed.
struct LocalListener {
    serving: PathBuf,
    admin: TcpAddress,
}

/// Takes the step of the renewal that is due, if one is.
pub(super) fn renew(args: &KubeconfigArgs, report: &mut KubeconfigReport) -> Result<(), Failure> {
    renew_with(args, report, &Systemd)
}

fn renew_with(
    args: &KubeconfigArgs,
    report: &mut KubeconfigReport,
    manager: &impl ServiceManager,
) -> Result<(), Failure> {
    let listed = KubeconfigPaths::from_env(args.input.clone()).each()?;
    let listed: Vec<Listed> = listed
        .into_iter()
        .map(|(path, content)| Listed { path, content: content.map_err(|error| error.to_string()) })
        .collect();
    let config_file = match (&args.config_out, listed.first()) {
        (Some(file), _) => file.clone(),
        (None, Some(first)) => directory_beside(&first.path).join("jackstay.yaml"),
        (None, None) => {
            return Err(Failure::input("KUBECONFIG names no file: name one with --kubeconfig"));
        }
    };
    let listener = local_listener(&config_file)?;
    let _lock = lock_directory(&listener.serving)?;
    let readers = readers::running(&args.readers, &listed, manager);
    let now = wall_clock();
    let mut plan = renewal::plan(&RenewalRequest {
        serving: &listener.serving,
        kubeconfigs: &listed,
        readers: &readers,
        now,
        force: args.force,
    })?;
    let has_all = write(args, &listed, &plan, report)?;
    if readers::record_started(&readers, &mut plan.state, manager) {
        write_state(args, &plan, report)?;
    }
    report.warnings.append(&mut plan.warnings);
    report.notes.push(plan.stage);
    // A client that reads a kubeconfig without the CA would not be helped by a restart.
    if has_all {
        let allowed = (args.restart_readers, listener.admin);
        readers::restart(&plan.restarts, now, allowed, manager, report);
    }
    plan.alarm.map_or(Ok(()), |alarm| Err(Failure::Write(format!("alarm: {alarm}"))))
}

/// Writes the files of the plan in their order. Returns whether every kubeconfig was written.
fn write(
    args: &KubeconfigArgs,
    listed: &[Listed],
    plan: &RenewalPlan,
    report: &mut KubeconfigReport,
) -> Result<bool, Failure> {
    write_state(args, plan, report)?;
    stage(&plan.publish, args)?.commit(report)?;
    let read = listed.iter().filter_map(|listed| listed.content.as_ref().ok()?.as_ref());
    let read: Vec<&KubeconfigFile> = read.collect();
    let mut has_all = true;
    for kubeconfig in &plan.kubeconfigs {
        let written = lock::acquire([kubeconfig], &read)
            .and_then(|_lock| stage([kubeconfig], args)?.commit(report));
        match written {
            Ok(()) => report_clusters(plan, &kubeconfig.path, report),
            Err(Failure::Input(why) | Failure::Write(why)) => {
                has_all = false;
                report.warnings.push(why);
            }
        }
    }
    stage(&plan.switch, args)?.commit(report)?;
    for path in &plan.remove {
        // The next run removes what is left.
        let _ = std::fs::remove_file(path);
    }
    Ok(has_all)
}

/// Writes what the next run is to remember, if there is anything new.
fn write_state(
    args: &KubeconfigArgs,
    plan: &RenewalPlan,
    report: &mut KubeconfigReport,
) -> Result<(), Failure> {
    if RenewalState::read(&plan.state_file) == plan.state {
        return Ok(());
    }
    let file = OutputFile {
        path: plan.state_file.clone(),
        bytes: plan.state.to_json(),
        mode: PUBLIC,
        description: "which clients have the next local CA, and since when",
    };
    stage([&file], args)?.commit(report)
}

fn report_clusters(plan: &RenewalPlan, path: &Path, report: &mut KubeconfigReport) {
    let clusters = plan.clusters.iter().filter(|cluster| cluster.path == path);
    report.clusters.extend(clusters.map(|cluster| {
        let change = KeyChange {
            key: "certificate-authority-data",
            from: Some("other certificates of the local CA".to_owned()),
            to: Some("those that are valid now".to_owned()),
        };
        ReportedCluster { name: cluster.name.clone(), changes: vec![change] }
    }));
}

/// Excludes another renewal of the same listener, until the file is dropped.
fn lock_directory(serving: &Path) -> Result<Option<File>, Failure> {
    let directory = serving.parent().unwrap_or(Path::new("/"));
    let Ok(file) = File::open(directory) else { return Ok(None) };
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Err(rustix::io::Errno::WOULDBLOCK) => Err(Failure::Write(format!(
            "nothing written: another renewal works in {}: run this again when it has ended",
            directory.display()
        ))),
        // A file system without locks.
        Ok(()) | Err(_) => Ok(Some(file)),
    }
}

/// The listener with a serving certificate in a configuration that `jackstay kubeconfig` has written.
fn local_listener(config_file: &Path) -> Result<LocalListener, Failure> {
    let loaded = config::load(config_file, [], &Overrides::default())
        .map_err(|errors| Failure::Input(format!("nothing written:\n{errors}")))?;
    let mut terminating =
        loaded.config.listeners.iter().filter_map(|listener| listener.terminate());
    let file = config_file.display();
    let tls = terminating
        .next()
        .map(|terminate| &terminate.tls)
        .ok_or_else(|| Failure::Input(format!("{file}: no listener has a serving certificate")))?;
    if tls.issuer.is_some() {
        return Err(Failure::Input(format!(
            "{file}: the running jackstay renews the certificate with tls.issuer; remove that key, or \
             write the configuration again with `jackstay kubeconfig --mode terminate --force`, which \
             keeps the key of the CA away from it"
        )));
    }
    let serving = tls.paths.cert_file.clone();
    Ok(LocalListener { serving, admin: loaded.config.admin.bind.into() })
}

//! `jackstay kubeconfig --renew`: replaces the serving certificate of a local listener and its CA, and the CA in
//! the kubeconfigs. The running jackstay reloads the certificate and needs no key of a CA.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use jackstay_sys::utc::Utc;

use super::args::KubeconfigArgs;
use super::lock;
use super::output::{Failure, directory_beside, kubeconfig_file, stage};
use super::report::{KubeconfigReport, ReportedCluster};
use crate::config::{self, Overrides};
use crate::kubeconfig::rewrite::KeyChange;
use crate::kubeconfig::setup::renewal::{self, Renewal};
use crate::kubeconfig::{KubeconfigFiles, kubeconfig_yaml};

/// Renews the certificate if it is due. The kubeconfigs get the new CA before the new certificate is served.
pub(super) fn renew(
    args: &KubeconfigArgs,
    files: &KubeconfigFiles,
    report: &mut KubeconfigReport,
) -> Result<(), Failure> {
    let config_file = match &args.config_out {
        Some(file) => file.clone(),
        None => directory_beside(files.first().path()).join("jackstay.yaml"),
    };
    let serving = serving_file(&config_file)?;
    let plan = match renewal::plan(&serving, SystemTime::now(), args.force)? {
        Renewal::NotDue(time) => {
            report.notes.push(format!(
                "{} is renewed after {}; --force renews it now",
                serving.display(),
                Utc(time).seconds()
            ));
            return Ok(());
        }
        Renewal::Planned(plan) => plan,
    };
    let mut kubeconfigs = Vec::new();
    for file in files.iter() {
        let mut config = file.config().clone();
        let before = report.clusters.len();
        for named in &mut config.clusters {
            let Some(cluster) = named.cluster.as_mut() else { continue };
            if plan.update(cluster) {
                let change = KeyChange {
                    key: "certificate-authority-data",
                    from: Some("the old local CA".to_owned()),
                    to: Some("the new local CA".to_owned()),
                };
                report
                    .clusters
                    .push(ReportedCluster { name: named.name.clone(), changes: vec![change] });
            }
        }
        if report.clusters.len() > before {
            kubeconfigs.push(kubeconfig_file(file.path().to_owned(), kubeconfig_yaml(&config)?));
        }
    }
    let outputs = [&plan.ca].into_iter().chain(&kubeconfigs).chain([&plan.serving]);
    let _locks = lock::acquire(&kubeconfigs, files)?;
    stage(outputs, args)?.commit(report)?;
    let ca_file = plan.ca.path.display();
    if report.clusters.is_empty() {
        let paths: Vec<_> = files.iter().map(|file| file.path().display().to_string()).collect();
        report.notes.push(format!("no cluster in {} trusts the old local CA", paths.join(", ")));
    }
    report.notes.push(format!(
        "other kubeconfigs that contain the old local CA must name {ca_file} or contain it; clients that \
         keep running must be restarted"
    ));
    Ok(())
}

/// The file with the serving certificate of a configuration that `jackstay kubeconfig` has written.
fn serving_file(config_file: &Path) -> Result<PathBuf, Failure> {
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
    Ok(tls.paths.cert_file.clone())
}

//! `jackstay kubeconfig --revert`: restores the original clusters in the input files.

use std::fmt::Write as _;

use super::args::{Failure, KubeconfigArgs};
use super::output::write_file;
use crate::kubeconfig::rewrite::revert;
use crate::kubeconfig::setup::OutputFile;
use crate::kubeconfig::{KubeconfigFiles, ResolvedContext, kubeconfig_yaml, original};
use crate::net::files::PRIVATE;

/// Reverts every cluster that points at jackstay, or only that of `--context`.
pub(super) fn run(
    args: &KubeconfigArgs,
    files: &KubeconfigFiles,
    out: &mut String,
) -> Result<(), Failure> {
    let only = match &args.context {
        None => None,
        Some(name) => Some(ResolvedContext::resolve(&files.merged(None)?, Some(name))?.cluster),
    };
    let mut nothing_changed = true;
    for file in files.iter() {
        let mut config = file.config.clone();
        let mut changes = String::new();
        for named in &mut config.clusters {
            let selected = only.as_ref().is_none_or(|only| *only == named.name);
            let Some(cluster) = named.cluster.as_mut().filter(|_| selected) else { continue };
            if original(cluster).is_none() {
                continue;
            }
            let _ = writeln!(changes, "cluster {:?}:", named.name);
            for change in revert(cluster) {
                let _ = writeln!(changes, "  {change}");
            }
        }
        if changes.is_empty() {
            continue;
        }
        nothing_changed = false;
        let output = OutputFile {
            path: file.path.clone(),
            bytes: kubeconfig_yaml(&config)?.into_bytes(),
            mode: PRIVATE,
            what: "the kubeconfig",
        };
        write_file(&output, out)?;
        out.push_str(&changes);
    }
    if nothing_changed {
        let paths: Vec<_> = files.iter().map(|file| file.path.display().to_string()).collect();
        let _ = writeln!(out, "nothing to revert in {}", paths.join(", "));
    }
    Ok(())
}

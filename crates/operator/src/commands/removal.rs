//! `jackstay removable`, which the scripts of the packages run before a removal.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use jackstay_config as config;

use crate::install::dependents::{self, Jackstay};
use crate::options::ConfigArgs;

/// This file permits a removal in any case.
const PERMISSION: &str = "/etc/jackstay/allow-removal";

/// Arguments of `jackstay removable`.
#[derive(Debug, Args)]
pub struct RemovalArgs {
    #[command(flatten)]
    config: ConfigArgs,
    /// The root of the file system to look at.
    #[arg(long, value_name = "DIR", default_value = "/")]
    root: PathBuf,
}

/// Fails if a component of this node would lose its apiserver without jackstay.
pub fn run(args: &RemovalArgs) -> ExitCode {
    if Path::new(PERMISSION).exists() {
        return ExitCode::SUCCESS;
    }
    let draft =
        config::draft(&args.config.config, config::environment(), &config::Overrides::default());
    let addresses = draft.config.map(|config| -> Vec<_> {
        config.listeners.iter().flat_map(|listener| &listener.bind).copied().collect()
    });
    let jackstay =
        addresses.as_deref().map_or(Jackstay::Configured(&args.config.config), Jackstay::At);
    let dependents = dependents::find(&args.root, jackstay);
    if dependents.is_empty() {
        return ExitCode::SUCCESS;
    }
    for dependent in &dependents {
        eprintln!("jackstay: {} has server: {}", dependent.file.display(), dependent.server);
    }
    eprintln!(
        "jackstay: not removed, because these kubeconfigs lead to jackstay on this node, and their components would lose \
         the apiserver. Write the address of an apiserver or load balancer into them and restart the components, or \
         create {PERMISSION} to remove jackstay all the same."
    );
    ExitCode::FAILURE
}

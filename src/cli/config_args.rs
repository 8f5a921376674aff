//! The `--config` option, which `run`, `check` and `doctor` share.

use std::path::{Path, PathBuf};

use clap::Args;

/// The configuration file where none is named.
pub(super) const DEFAULT_CONFIG: &str = "/etc/jackstay/jackstay.yaml";

/// The `--config` option.
#[derive(Debug, Args)]
pub(super) struct ConfigArgs {
    /// Configuration file (YAML).
    #[arg(long, value_name = "FILE", default_value = DEFAULT_CONFIG)]
    pub(super) config: PathBuf,
}

/// What to add to an error if the default file is used and does not exist.
pub(super) fn missing_default_hint(file: &Path) -> Option<&'static str> {
    let missing = file == Path::new(DEFAULT_CONFIG) && matches!(file.try_exists(), Ok(false));
    missing.then_some("name the configuration file with --config FILE")
}

//! Arguments that say where the configuration comes from; `run`, `check` and `doctor` share them.

use std::path::{Path, PathBuf};

use clap::Args;

use crate::config::Overrides;

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

/// Scalar values that replace those of the file and of the environment.
#[derive(Debug, Args)]
pub(super) struct OverrideArgs {
    /// Replaces admin.bind.
    #[arg(long, value_name = "ADDR")]
    admin: Option<String>,
    /// Replaces workers: a number, or `auto`.
    #[arg(long, value_name = "N")]
    workers: Option<String>,
    /// Replaces log.level.
    #[arg(long, value_name = "LEVEL")]
    log_level: Option<String>,
    /// Replaces log.format.
    #[arg(long, value_name = "FORMAT")]
    log_format: Option<String>,
    /// Replaces log.access.
    #[arg(long, value_name = "WHICH")]
    access_log: Option<String>,
}

impl OverrideArgs {
    pub(super) fn overrides(&self) -> Overrides {
        Overrides {
            admin_bind: self.admin.clone(),
            workers: self.workers.clone(),
            log_level: self.log_level.clone(),
            log_format: self.log_format.clone(),
            log_access: self.access_log.clone(),
            ..Overrides::default()
        }
    }
}

//! Version and commit of this build, for `--version`, `/status`, the log and `jackstay_build_info`.

/// The package version.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The commit in hex, or `debug build` or `unknown commit` (`build.rs`).
pub const COMMIT: &str = env!("JACKSTAY_COMMIT");

/// Version and commit, as `--version` prints them.
pub const LONG: &str = concat!(env!("CARGO_PKG_VERSION"), " (", env!("JACKSTAY_COMMIT"), ")");

//! Which build this is: for `--version`, `/status`, the log and `jackstay_build_info`.

/// The version of the package.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The commit, as hex; `debug build` or `unknown commit` where there is none. See `build.rs`.
pub const COMMIT: &str = env!("JACKSTAY_COMMIT");

/// Both, as `--version` prints them.
pub const LONG: &str = concat!(env!("CARGO_PKG_VERSION"), " (", env!("JACKSTAY_COMMIT"), ")");

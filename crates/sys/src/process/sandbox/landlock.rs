//! The allow-list of files (landlock(7), Linux 5.13 and later).
//!
//! A rule allows access to a file, or to everything below a directory. It belongs to the inode that the path had at
//! the start, so a file that is replaced by a rename is accessible only if its directory is.

use std::error::Error;
use std::fmt;

use ::landlock::{
    ABI, Access, AccessFs, BitFlags, LandlockStatus, PathBeneath, PathFd, Ruleset,
    RulesetAttr as _, RulesetCreatedAttr as _, RulesetStatus, Scope,
};

use super::file_rules::{FileAccess, FileRule};

/// The version of the kernel interface whose file operations are restricted. Those that the kernel does not know
/// stay unrestricted.
const HANDLED: ABI = ABI::V5;

/// Why file access is not restricted.
#[derive(Debug)]
pub enum LandlockError {
    /// The kernel refuses the rules.
    Ruleset(::landlock::RulesetError),
    /// The kernel has no Landlock.
    NotImplemented,
    /// Landlock is not enabled in the kernel.
    NotEnabled,
}

impl fmt::Display for LandlockError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ruleset(error) => error.fmt(f),
            Self::NotImplemented => {
                f.write_str("the kernel has no Landlock (Linux 5.13 and later have)")
            }
            Self::NotEnabled => {
                f.write_str("Landlock is not enabled in the kernel (lsm= on its command line)")
            }
        }
    }
}

impl Error for LandlockError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::Ruleset(error) => Some(error),
            Self::NotImplemented | Self::NotEnabled => None,
        }
    }
}

/// The allow-list in use.
#[derive(Debug)]
pub struct Domain {
    /// The kernel restricts all operations of [`HANDLED`], not only some of them.
    pub is_complete: bool,
    /// Keeps the inodes of `/proc`, for which the kernel creates new ones when nothing uses them.
    _pinned: Vec<PathFd>,
}

/// Allows access to files by these rules only. Rules whose path does not exist are skipped. It also sets
/// `no_new_privs`, and forbids signals to other processes (Linux 6.12 and later).
///
/// # Errors
/// The kernel does not support it. Nothing is restricted then.
pub fn restrict(rules: &[FileRule]) -> Result<Domain, LandlockError> {
    let mut ruleset = Ruleset::default()
        .handle_access(AccessFs::from_all(HANDLED))
        .and_then(|ruleset| ruleset.scope(Scope::Signal))
        .and_then(Ruleset::create)
        .map_err(LandlockError::Ruleset)?;
    let mut pinned = Vec::new();
    for rule in rules {
        let Ok(file) = PathFd::new(&rule.path) else { continue };
        let mut access = operations(rule.access);
        if !rule.path.is_dir() {
            access &= AccessFs::from_file(HANDLED);
        }
        ruleset =
            ruleset.add_rule(PathBeneath::new(&file, access)).map_err(LandlockError::Ruleset)?;
        if rule.path.starts_with("/proc") {
            pinned.push(file);
        }
    }
    let status = ruleset.restrict_self().map_err(LandlockError::Ruleset)?;
    match (status.ruleset, status.landlock) {
        (RulesetStatus::FullyEnforced, _) => Ok(Domain { is_complete: true, _pinned: pinned }),
        (RulesetStatus::PartiallyEnforced, _) => Ok(Domain { is_complete: false, _pinned: pinned }),
        (RulesetStatus::NotEnforced, LandlockStatus::NotImplemented) => {
            Err(LandlockError::NotImplemented)
        }
        (RulesetStatus::NotEnforced, _) => Err(LandlockError::NotEnabled),
    }
}

fn operations(access: FileAccess) -> BitFlags<AccessFs> {
    match access {
        FileAccess::Read => AccessFs::ReadFile | AccessFs::ReadDir,
        FileAccess::Write => {
            AccessFs::ReadFile
                | AccessFs::ReadDir
                | AccessFs::WriteFile
                | AccessFs::Truncate
                | AccessFs::MakeReg
                | AccessFs::MakeSock
                | AccessFs::RemoveFile
        }
    }
}

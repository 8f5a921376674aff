//! The allow-list of files (landlock(7), Linux 5.13 and later).
//!
//! A rule allows access to a file, or to everything below a directory. It belongs to the inode that the path had at
//! the start, so a file that is replaced by a rename is accessible only if its directory is.
//!
//! Sockets of other processes, such as those of container runtimes and of the service manager, start programs for who
//! connects to them:
//!
//! | Unix sockets | connect(2), sendmsg(2) | from |
//! |---|---|---|
//! | abstract names | refused, unless the socket was connected before or is the process's own | Linux 6.12 |
//! | paths | refused, unless a rule allows to write there | Linux 7.1 |
//!
//! On older kernels the mounts have to hide the paths (`InaccessiblePaths=` of the unit): a seccomp filter does not see
//! the address of a connect(2).

use ::landlock::{
    ABI, Access, AccessFs, BitFlags, LandlockStatus, PathBeneath, PathFd, Ruleset,
    RulesetAttr as _, RulesetCreatedAttr as _, RulesetStatus, Scope,
};

use super::file_rules::{FileAccess, FileRule};

/// The version of the kernel interface whose file operations are restricted, with which connecting to sockets by their
/// path is one (Linux 7.1). Those that the kernel does not know stay unrestricted.
const HANDLED: ABI = ABI::V9;
/// The version that restricts files, signals and abstract names of sockets (Linux 6.12).
const COMPLETE: ABI = ABI::V6;

/// Why file access is not restricted.
#[derive(Debug, thiserror::Error)]
pub enum LandlockError {
    /// The kernel refuses the rules.
    #[error("{0}")]
    Ruleset(#[source] ::landlock::RulesetError),
    /// The kernel has no Landlock.
    #[error("the kernel has no Landlock (Linux 5.13 and later have)")]
    NotImplemented,
    /// Landlock is not enabled in the kernel.
    #[error("Landlock is not enabled in the kernel (lsm= on its command line)")]
    NotEnabled,
}

/// The allow-list in use.
#[derive(Debug)]
pub struct Domain {
    /// The kernel restricts all operations of [`COMPLETE`], not only some of them.
    pub is_complete: bool,
    /// Whether connecting to the sockets of other processes by their path is restricted.
    pub restricts_socket_paths: bool,
    /// Keeps the inodes of `/proc`, for which the kernel creates new ones when nothing uses them.
    _pinned: Vec<PathFd>,
}

/// Allows access to files by these rules only. Rules whose path does not exist are skipped. It also sets
/// `no_new_privs`, and forbids signals to other processes and connecting to their abstract sockets (Linux 6.12 and
/// later).
///
/// # Errors
/// The kernel does not support it. Nothing is restricted then.
pub fn restrict(rules: &[FileRule]) -> Result<Domain, LandlockError> {
    let mut ruleset = Ruleset::default()
        .handle_access(AccessFs::from_all(HANDLED))
        .and_then(|ruleset| ruleset.scope(Scope::Signal | Scope::AbstractUnixSocket))
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
        (
            RulesetStatus::FullyEnforced | RulesetStatus::PartiallyEnforced,
            LandlockStatus::Available { effective_abi, .. },
        ) => Ok(Domain {
            is_complete: effective_abi >= COMPLETE,
            restricts_socket_paths: effective_abi >= HANDLED,
            _pinned: pinned,
        }),
        (_, LandlockStatus::NotImplemented) => Err(LandlockError::NotImplemented),
        (_, LandlockStatus::NotEnabled | LandlockStatus::Available { .. }) => {
            Err(LandlockError::NotEnabled)
        }
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
                | AccessFs::ResolveUnix
        }
    }
}

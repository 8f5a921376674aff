//! The allow-list of files (landlock(7), Linux 5.13 and later).
//!
//! A rule allows access to a file, or to everything below a directory. It belongs to the inode that the path had at
//! the start, so a file that is replaced by a rename is accessible only if its directory is.

use ::landlock::{
    ABI, Access, AccessFs, BitFlags, LandlockStatus, PathBeneath, PathFd, Ruleset,
    RulesetAttr as _, RulesetCreatedAttr as _, RulesetStatus, Scope,
};

use super::file_rules::{FileAccess, FileRule};

/// The version of the kernel interface whose file operations are restricted. Those that the kernel does not know
/// stay unrestricted.
const HANDLED: ABI = ABI::V5;

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
pub fn restrict(rules: &[FileRule]) -> Result<Domain, String> {
    let describe = |error: ::landlock::RulesetError| error.to_string();
    let mut ruleset = Ruleset::default()
        .handle_access(AccessFs::from_all(HANDLED))
        .and_then(|ruleset| ruleset.scope(Scope::Signal))
        .and_then(Ruleset::create)
        .map_err(describe)?;
    let mut pinned = Vec::new();
    for rule in rules {
        let Ok(file) = PathFd::new(&rule.path) else { continue };
        let mut access = operations(rule.access);
        if !rule.path.is_dir() {
            access &= AccessFs::from_file(HANDLED);
        }
        ruleset = ruleset.add_rule(PathBeneath::new(&file, access)).map_err(describe)?;
        if rule.path.starts_with("/proc") {
            pinned.push(file);
        }
    }
    let status = ruleset.restrict_self().map_err(describe)?;
    match (status.ruleset, status.landlock) {
        (RulesetStatus::FullyEnforced, _) => Ok(Domain { is_complete: true, _pinned: pinned }),
        (RulesetStatus::PartiallyEnforced, _) => Ok(Domain { is_complete: false, _pinned: pinned }),
        (RulesetStatus::NotEnforced, LandlockStatus::NotImplemented) => {
            Err("the kernel has no Landlock (Linux 5.13 and later have)".into())
        }
        (RulesetStatus::NotEnforced, _) => {
            Err("Landlock is not enabled in the kernel (lsm= on its command line)".into())
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
        }
    }
}

//! What a host permits an installation: where a program can stay, what `SELinux` says of it, and whether kubelet's
//! kubeconfig stays as it is written.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::fs::StatVfsMountFlags;

use super::service::PROGRAM;

/// The directories in which the program is installed, the preferred one first. `/usr` is read-only on Flatcar and other
/// image-based systems, whose place for programs is `/opt/bin`.
const DIRECTORIES: [&str; 2] = ["/usr/local/bin", "/opt/bin"];
/// 1 if `SELinux` refuses what its policy does not permit, 0 if it only logs; absent without `SELinux`.
const ENFORCE: &str = "/sys/fs/selinux/enforce";
/// The types of files that people write (homes, `/tmp`, media), and of files without a rule: systemd may not execute
/// them (`refpolicy`: no domain transition of `init_t`; the unit fails with 203/EXEC). A file that is moved keeps its
/// type.
const NOT_EXECUTABLE: [&str; 8] = [
    "user_home_t",
    "admin_home_t",
    "user_home_dir_t",
    "tmp_t",
    "user_tmp_t",
    "default_t",
    "unlabeled_t",
    "nfs_t",
];

/// Why a host needs another way.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum HostError {
    /// No directory for the program; each with the reason.
    #[error(
        "no directory for the program: {}; put it into a directory below /opt or /usr from which programs \
         can be executed, and run it there (deploy/distributions/read-only-usr.md)",
        reasons(.0)
    )]
    NoDirectory(Vec<(&'static str, FileSystem)>),
    /// `SELinux` does not let systemd execute the program; its type.
    #[error(
        "SELinux is enforcing, and systemd may not execute {0}, which has the type {1}: `restorecon -v {0}` \
         (deploy/distributions/selinux.md)"
    )]
    SelinuxType(PathBuf, String),
    /// nodeadm writes kubelet's kubeconfig at each boot.
    #[error(
        "nodeadm (EKS) writes {0} at each boot, so that kubelet would go past jackstay from the next boot \
         on: see deploy/distributions/eks.md for the drop-in that points it at jackstay again"
    )]
    Nodeadm(PathBuf),
}

fn reasons(tried: &[(&str, FileSystem)]) -> String {
    tried.iter().map(|(path, why)| format!("{path} is {why}")).collect::<Vec<_>>().join(", ")
}

/// Whether a program can stay on a file system.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileSystem {
    /// It can be written and executed.
    Usable,
    /// It is mounted read-only.
    ReadOnly,
    /// Programs on it are not executed.
    NoExec,
}

impl fmt::Display for FileSystem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Usable => "usable",
            Self::ReadOnly => "on a read-only file system",
            Self::NoExec => "on a file system that is mounted noexec",
        })
    }
}

/// The path at which this host can have the program.
///
/// # Errors
/// None of the directories can have it.
pub fn program_path() -> Result<PathBuf, HostError> {
    choose_directory(file_system)
}

fn choose_directory(of: impl Fn(&Path) -> FileSystem) -> Result<PathBuf, HostError> {
    let mut tried = Vec::new();
    let name = Path::new(PROGRAM).file_name().unwrap_or_default();
    for directory in DIRECTORIES {
        match of(Path::new(directory)) {
            FileSystem::Usable => return Ok(Path::new(directory).join(name)),
            why => tried.push((directory, why)),
        }
    }
    Err(HostError::NoDirectory(tried))
}

/// The file system of a directory, or of the nearest one above it that exists.
fn file_system(directory: &Path) -> FileSystem {
    let flags = directory
        .ancestors()
        .find_map(|path| rustix::fs::statvfs(path).ok())
        .map_or(StatVfsMountFlags::empty(), |found| found.f_flag);
    if flags.contains(StatVfsMountFlags::RDONLY) {
        FileSystem::ReadOnly
    } else if flags.contains(StatVfsMountFlags::NOEXEC) {
        FileSystem::NoExec
    } else {
        FileSystem::Usable
    }
}

/// Checks that systemd may execute a program that stays where it is.
///
/// # Errors
/// `SELinux` enforces and refuses it.
pub fn check_selinux_type(program: &Path) -> Result<(), HostError> {
    let is_enforcing = fs::read_to_string(ENFORCE).is_ok_and(|text| text.trim() == "1");
    let mut context = Vec::with_capacity(4096);
    let read = rustix::fs::getxattr(
        program,
        "security.selinux",
        rustix::buffer::spare_capacity(&mut context),
    );
    match read {
        Ok(_) => check_context(is_enforcing, program, &String::from_utf8_lossy(&context)),
        Err(_) => Ok(()),
    }
}

/// `context` is `user:role:type:level`, with a zero byte at its end.
fn check_context(is_enforcing: bool, program: &Path, context: &str) -> Result<(), HostError> {
    let kind = context.trim_end_matches('\0').split(':').nth(2).unwrap_or_default();
    if is_enforcing && NOT_EXECUTABLE.contains(&kind) {
        return Err(HostError::SelinuxType(program.to_owned(), kind.to_owned()));
    }
    Ok(())
}

/// Gives a written file and its directory the `SELinux` context that the policy of the host has for them: a new
/// directory has that of the directory above it. Does nothing without `SELinux`; a failure shows when the file is used.
pub fn restore_context(path: &Path) {
    if !Path::new(ENFORCE).exists() {
        return;
    }
    let mut command = Command::new("restorecon");
    command.args(path.parent()).arg(path);
    let _ = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status();
}

/// Checks that nothing writes kubelet's kubeconfig again at boot.
///
/// # Errors
/// nodeadm does (amazon-eks-ami, `nodeadm-config.service`: `nodeadm init` at each boot).
pub fn check_kubeconfig_stays(kubeconfig: &Path) -> Result<(), HostError> {
    check_manager(kubeconfig, Path::exists)
}

fn check_manager(kubeconfig: &Path, exists: impl Fn(&Path) -> bool) -> Result<(), HostError> {
    let files = ["/usr/bin/nodeadm", "/etc/systemd/system/nodeadm-config.service"];
    let is_of_nodeadm = ["/var/lib/kubelet/kubeconfig", "/var/lib/kubelet/bootstrap-kubeconfig"]
        .iter()
        .any(|path| kubeconfig == Path::new(path));
    if is_of_nodeadm && files.iter().any(|file| exists(Path::new(file))) {
        return Err(HostError::Nodeadm(kubeconfig.to_owned()));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn program_goes_to_the_first_directory_that_can_have_it() {
        let choose = |local: FileSystem, opt: FileSystem| {
            choose_directory(|path| if path.starts_with("/opt") { opt } else { local })
        };
        let (usable, read_only, no_exec) =
            (FileSystem::Usable, FileSystem::ReadOnly, FileSystem::NoExec);
        assert_eq!(choose(usable, usable), Ok(PathBuf::from(PROGRAM)));
        assert_eq!(choose(read_only, usable), Ok(PathBuf::from("/opt/bin/jackstay")));
        assert_eq!(choose(no_exec, usable), Ok(PathBuf::from("/opt/bin/jackstay")));
        let error = choose(read_only, no_exec).unwrap_err().to_string();
        assert!(error.contains("/usr/local/bin is on a read-only file system"), "{error}");
        assert!(error.contains("/opt/bin is on a file system that is mounted noexec"), "{error}");
    }

    #[test]
    fn file_system_of_a_missing_directory_is_that_above_it() {
        let directory = tempfile::tempdir().unwrap();
        let expected = file_system(directory.path());
        assert_eq!(file_system(&directory.path().join("a/b")), expected);
        assert_eq!(file_system(Path::new("/proc/sys/a")), file_system(Path::new("/proc/sys")));
    }

    #[test]
    fn selinux_refuses_types_of_homes_while_it_enforces() {
        let path = Path::new("/usr/local/bin/jackstay");
        let home = "unconfined_u:object_r:admin_home_t:s0\0";
        let error = check_context(true, path, home).unwrap_err().to_string();
        assert!(error.contains("type admin_home_t"), "{error}");
        assert!(error.contains("`restorecon -v /usr/local/bin/jackstay`"), "{error}");
        assert_eq!(check_context(false, path, home), Ok(()));
        for permitted in ["system_u:object_r:bin_t:s0\0", "system_u:object_r:usr_t:s0", "", "x"] {
            assert_eq!(check_context(true, path, permitted), Ok(()), "{permitted}");
        }
    }

    #[test]
    fn kubeconfig_of_nodeadm_does_not_stay() {
        let nodeadm = |path: &Path| path == Path::new("/usr/bin/nodeadm");
        let kubeconfig = Path::new("/var/lib/kubelet/kubeconfig");
        let error = check_manager(kubeconfig, nodeadm).unwrap_err().to_string();
        assert!(error.contains("eks.md"), "{error}");
        assert_eq!(check_manager(kubeconfig, |_| false), Ok(()));
        assert_eq!(check_manager(Path::new("/etc/kubernetes/kubelet.conf"), nodeadm), Ok(()));
    }
}

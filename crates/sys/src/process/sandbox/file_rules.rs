//! From the paths of the configuration to the files and directories that the process may access.
//!
//! A configured file is replaced by a rename when it rotates, so its directory must be accessible, and the directory
//! of each symbolic link on the way to it: kubelet's `kubelet-client-current.pem` is a link, and so is every file
//! of a projected volume. A file that is a mount point cannot be replaced; for it the file suffices.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use rustix::fs::{AtFlags, CWD, StatxAttributes, StatxFlags, statx};

/// Maximum of symbolic links on the way to a file, as in the kernel (`path_resolution(7)`).
const MAX_LINKS: usize = 40;

/// The rules that this process is restricted to.
static GRANTED: OnceLock<FileRules> = OnceLock::new();

/// Why this process may not read the file at `path`, if the sandbox is the reason: the file, or a symbolic link on
/// the way to it, leads outside. `None` without a sandbox.
pub fn describe_denial(path: &Path) -> Option<String> {
    let mut needed = FileRules::default();
    needed.add_replaceable(path);
    GRANTED.get()?.describe_outside(path, &needed)
}

/// What a rule allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum FileAccess {
    /// Read files, list directories.
    Read,
    /// Also create, write, rename and remove files and sockets.
    Write,
}

/// Access to a file, or to everything below a directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileRule {
    /// The file or directory, without symbolic links.
    pub path: PathBuf,
    /// What is allowed.
    pub access: FileAccess,
}

impl FileRule {
    /// Whether this rule allows everything that `other` does.
    fn covers(&self, other: &Self) -> bool {
        self.access >= other.access && other.path.starts_with(&self.path)
    }
}

/// A set of rules without redundant ones.
#[derive(Debug, Clone, Default)]
pub struct FileRules(Vec<FileRule>);

impl FileRules {
    /// The rules, in the order of their paths.
    pub fn list(&self) -> &[FileRule] {
        &self.0
    }

    /// Whether the rules allow everything that `others` do.
    pub fn cover(&self, others: &Self) -> bool {
        others.0.iter().all(|other| self.0.iter().any(|rule| rule.covers(other)))
    }

    /// Makes these rules known to [`describe_denial`]. The first call counts, since a process can enter the sandbox
    /// only once.
    pub fn set_granted(&self) {
        let _ = GRANTED.set(self.clone());
    }

    /// Says that the file at `path`, which needs the rules `needed`, is outside of these rules, and what to do.
    /// `None` if it is inside.
    pub fn describe_outside(&self, path: &Path, needed: &Self) -> Option<String> {
        if self.cover(needed) {
            return None;
        }
        let name = match fs::canonicalize(path) {
            Ok(target) if target != path => {
                format!("{} leads to {}, which is", path.display(), target.display())
            }
            _ => format!("{} is", path.display()),
        };
        Some(format!(
            "{name} outside of the directories that the running process can access (sandbox.landlock): send \
             SIGUSR2, after which a new process takes over without a gap, or restart jackstay"
        ))
    }

    /// Adds the rules of another set.
    pub fn extend(&mut self, others: Self) {
        for rule in others.0 {
            self.add(rule);
        }
    }

    /// Allows access to exactly this file or directory, if it exists.
    pub fn add_path(&mut self, path: &Path, access: FileAccess) {
        if let Ok(path) = fs::canonicalize(path) {
            self.add(FileRule { path, access });
        }
    }

    /// Allows reading a file that may be replaced, and that may not exist yet. Of a directory that does not exist
    /// either, the nearest one above it that does is accessible, unless that is the root.
    pub fn add_replaceable(&mut self, path: &Path) {
        let Ok(mut path) = std::path::absolute(path) else { return };
        for _ in 0..=MAX_LINKS {
            let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else { return };
            let (directory, exists) = nearest_directory(parent);
            let file = directory.join(name);
            if directory == Path::new("/") || (exists && is_mount_point(&file)) {
                if exists && file.symlink_metadata().is_ok_and(|metadata| !metadata.is_symlink()) {
                    self.add(FileRule { path: file.clone(), access: FileAccess::Read });
                }
            } else {
                self.add(FileRule { path: directory.clone(), access: FileAccess::Read });
            }
            match fs::read_link(&file) {
                Ok(target) if exists => path = directory.join(target),
                _ => return,
            }
        }
    }

    /// Allows replacing a file, or creating a socket: the directory of the file that a symbolic link leads to
    /// is writable.
    pub fn add_replaced(&mut self, path: &Path) {
        let Ok(path) = std::path::absolute(path) else { return };
        let path = fs::canonicalize(&path).unwrap_or(path);
        if let Some(parent) = path.parent() {
            self.add_directory(parent);
        }
    }

    /// Allows creating, replacing and removing files in a directory. One that does not exist is accepted by
    /// [`Self::cover`], but the kernel knows no rule for it.
    pub fn add_directory(&mut self, path: &Path) {
        let Ok(path) = std::path::absolute(path) else { return };
        let path = fs::canonicalize(&path).unwrap_or(path);
        self.add(FileRule { path, access: FileAccess::Write });
    }

    fn add(&mut self, new: FileRule) {
        if self.0.iter().any(|rule| rule.covers(&new)) {
            return;
        }
        self.0.retain(|rule| !new.covers(rule));
        let at = self.0.partition_point(|rule| rule.path < new.path);
        self.0.insert(at, new);
    }
}

/// The directory without symbolic links, or the nearest one above it that exists. The second value says which.
fn nearest_directory(path: &Path) -> (PathBuf, bool) {
    for (above, ancestor) in path.ancestors().enumerate() {
        if let Ok(found) = fs::canonicalize(ancestor) {
            return (found, above == 0);
        }
    }
    (PathBuf::from("/"), false)
}

/// Whether a file system or a single file is mounted at this path (`STATX_ATTR_MOUNT_ROOT`, Linux 5.8 and later).
fn is_mount_point(path: &Path) -> bool {
    let Ok(stat) = statx(CWD, path, AtFlags::SYMLINK_NOFOLLOW, StatxFlags::empty()) else {
        return false;
    };
    stat.stx_attributes.contains(StatxAttributes::MOUNT_ROOT)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    fn paths(rules: &FileRules) -> Vec<&Path> {
        rules.list().iter().map(|rule| rule.path.as_path()).collect()
    }

    #[test]
    fn replaceable_file_allows_the_directory_of_every_link_on_the_way() {
        let root = tempfile::tempdir().unwrap();
        let root = fs::canonicalize(root.path()).unwrap();
        for directory in ["etc", "pki", "volume/..2026"] {
            fs::create_dir_all(root.join(directory)).unwrap();
        }
        fs::write(root.join("pki/client-1.pem"), "").unwrap();
        symlink(root.join("pki/client-1.pem"), root.join("pki/client-current.pem")).unwrap();
        symlink("../pki/client-current.pem", root.join("etc/client.pem")).unwrap();
        fs::write(root.join("volume/..2026/token"), "").unwrap();
        symlink("..2026", root.join("volume/..data")).unwrap();
        symlink("..data/token", root.join("volume/token")).unwrap();
        let mut rules = FileRules::default();
        rules.add_replaceable(&root.join("etc/client.pem"));
        rules.add_replaceable(&root.join("volume/token"));
        assert_eq!(paths(&rules), [root.join("etc"), root.join("pki"), root.join("volume")]);
    }

    #[test]
    fn replaceable_file_without_a_directory_allows_the_nearest_one_above_but_never_the_root() {
        let root = tempfile::tempdir().unwrap();
        let root = fs::canonicalize(root.path()).unwrap();
        let mut rules = FileRules::default();
        rules.add_replaceable(&root.join("kubelet/pki/client.pem"));
        assert_eq!(paths(&rules), [root]);
        let mut rules = FileRules::default();
        rules.add_replaceable(Path::new("/missing-directory/pki/client.pem"));
        rules.add_replaceable(Path::new("/missing-file"));
        assert!(rules.list().is_empty(), "{rules:?}");
    }

    #[test]
    fn describe_outside_names_the_target_of_a_link_and_the_remedy() {
        let root = tempfile::tempdir().unwrap();
        let root = fs::canonicalize(root.path()).unwrap();
        for directory in ["inside", "outside"] {
            fs::create_dir(root.join(directory)).unwrap();
            fs::write(root.join(directory).join("key.pem"), "").unwrap();
        }
        let link = root.join("inside/current.pem");
        let needed = |path: &Path| {
            let mut needed = FileRules::default();
            needed.add_replaceable(path);
            needed
        };
        symlink("key.pem", &link).unwrap();
        let granted = needed(&link);
        assert_eq!(granted.describe_outside(&link, &needed(&link)), None);
        fs::remove_file(&link).unwrap();
        symlink("../outside/key.pem", &link).unwrap();
        let target = root.join("outside/key.pem");
        let text = granted.describe_outside(&link, &needed(&link)).unwrap();
        let start = format!("{} leads to {}, which is outside", link.display(), target.display());
        assert!(text.starts_with(&start), "{text}");
        assert!(text.contains("(sandbox.landlock): send SIGUSR2"), "{text}");
        let text = granted.describe_outside(&target, &needed(&target)).unwrap();
        assert!(text.starts_with(&format!("{} is outside", target.display())), "{text}");
    }

    #[test]
    fn mounted_file_allows_the_file_alone() {
        // The kernel mounts /proc in every container and on every host, so it serves as an example.
        assert!(is_mount_point(Path::new("/proc")) && !is_mount_point(Path::new("/proc/self")));
    }

    #[test]
    fn cover_compares_paths_by_component_and_access() {
        let rule = |path: &str, access| FileRule { path: path.into(), access };
        let mut granted = FileRules::default();
        granted.add(rule("/var/lib/a", FileAccess::Write));
        granted.add(rule("/etc/a", FileAccess::Read));
        granted.add(rule("/etc/a/b", FileAccess::Read));
        assert_eq!(granted.list().len(), 2);
        for (path, access, expected) in [
            ("/etc/a", FileAccess::Read, true),
            ("/etc/a/x/y", FileAccess::Read, true),
            ("/etc/a", FileAccess::Write, false),
            ("/etc/ab", FileAccess::Read, false),
            ("/etc", FileAccess::Read, false),
            ("/var/lib/a/x", FileAccess::Read, true),
            ("/var/lib/a", FileAccess::Write, true),
        ] {
            let wanted = FileRules(vec![rule(path, access)]);
            assert_eq!(granted.cover(&wanted), expected, "{path} {access:?}");
        }
        granted.add(rule("/etc", FileAccess::Write));
        assert_eq!(granted.list().len(), 2);
    }
}

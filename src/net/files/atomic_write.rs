//! Replaces a file in one step: readers see the old content or the new one, never a part.

use std::fs::{self, File, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

/// Mode of files that only the owner may read: keys, kubeconfigs.
pub const PRIVATE: u32 = 0o600;
/// Mode of files that every user may read: certificates, configuration.
pub const PUBLIC: u32 = 0o644;

/// Replaces `path` with `bytes`, with this mode less the umask. A symbolic link is followed: its target
/// is replaced.
///
/// # Errors
/// What the file system returns. The old file is then unchanged.
pub fn replace(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    let path = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let directory = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let mut temporary = tempfile::Builder::new()
        .prefix(&format!(".{name}."))
        .permissions(Permissions::from_mode(mode))
        .tempfile_in(directory)?;
    temporary.write_all(bytes)?;
    // The content before the name: after a power failure the old file or the new one exists.
    temporary.as_file().sync_all()?;
    temporary.persist(&path).map_err(|failed| failed.error)?;
    File::open(directory)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(dir: &Path) -> Vec<String> {
        let entries = fs::read_dir(dir).unwrap();
        entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect()
    }

    #[test]
    fn replace_writes_content_and_mode() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        fs::write(&path, "old and longer").unwrap();
        replace(&path, b"new", PRIVATE).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"new");
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(names(dir.path()), ["f"]);
    }

    #[test]
    fn replace_of_a_symlink_replaces_its_target() {
        let dir = tempfile::tempdir().unwrap();
        let (target, link) = (dir.path().join("t"), dir.path().join("l"));
        fs::write(&target, "old").unwrap();
        std::os::unix::fs::symlink(&target, &link).unwrap();
        replace(&link, b"new", PRIVATE).unwrap();
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(fs::read(&target).unwrap(), b"new");
    }

    #[test]
    fn replace_that_fails_leaves_no_temporary_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("d");
        fs::create_dir(&path).unwrap();
        assert!(replace(&path, b"new", PUBLIC).is_err());
        assert_eq!(names(dir.path()), ["d"]);
        assert!(replace(&dir.path().join("none/f"), b"x", PUBLIC).is_err());
    }
}

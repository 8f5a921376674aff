//! Writes a file so that nobody ever sees half of it, and nobody else can read it.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// Readable and writable by the owner alone.
pub const PRIVATE: u32 = 0o600;
/// Readable by everybody: certificates and configuration.
pub const PUBLIC: u32 = 0o644;

/// Replaces `path` with `bytes` in one step, with that mode. A link is followed: what it points to
/// is replaced, as an editor would.
///
/// # Errors
/// What the system says. The old file is then untouched.
pub fn replace(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    let path = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let directory = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let mut temporary = Temporary::create(directory, &path, mode)?;
    temporary.file.write_all(bytes)?;
    // The data before the name: after a power failure there is the old file or the new one.
    temporary.file.sync_all()?;
    fs::rename(&temporary.path, &path)?;
    temporary.kept = true;
    File::open(directory)?.sync_all()
}

/// A file beside the one it will replace; removed unless it does.
struct Temporary {
    path: PathBuf,
    file: File,
    kept: bool,
}

impl Temporary {
    fn create(directory: &Path, target: &Path, mode: u32) -> io::Result<Self> {
        let name = target.file_name().unwrap_or_default().to_string_lossy();
        for _ in 0..100 {
            let path = directory.join(format!(".{name}.{:08x}", fastrand::u32(..)));
            let mut options = OpenOptions::new();
            match options.write(true).create_new(true).mode(mode).open(&path) {
                Ok(file) => return Ok(Self { path, file, kept: false }),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error),
            }
        }
        Err(io::Error::new(io::ErrorKind::AlreadyExists, "no free name for a temporary file"))
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if !self.kept {
            // Nothing more can be done about it.
            let _ = fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn names(dir: &Path) -> Vec<String> {
        let entries = fs::read_dir(dir).unwrap();
        entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect()
    }

    #[test]
    fn a_file_is_replaced_with_its_mode() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        fs::write(&path, "old and longer").unwrap();
        replace(&path, b"new", PRIVATE).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"new");
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(names(dir.path()), ["f"]);
    }

    #[test]
    fn a_link_stays_a_link() {
        let dir = tempfile::tempdir().unwrap();
        let (target, link) = (dir.path().join("t"), dir.path().join("l"));
        fs::write(&target, "old").unwrap();
        std::os::unix::fs::symlink(&target, &link).unwrap();
        replace(&link, b"new", PRIVATE).unwrap();
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(fs::read(&target).unwrap(), b"new");
    }

    #[test]
    fn a_failure_leaves_nothing_behind() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("d");
        fs::create_dir(&path).unwrap();
        assert!(replace(&path, b"new", PUBLIC).is_err());
        assert_eq!(names(dir.path()), ["d"]);
        assert!(replace(&dir.path().join("none/f"), b"x", PUBLIC).is_err());
    }
}

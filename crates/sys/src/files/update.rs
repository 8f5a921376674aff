//! Changes a file of a user as an editor does: what is not content stays.
//!
//! kubectl writes into the file (client-go, `clientcmd.WriteToFile`), which keeps its owner, mode, ACL, `SELinux` context
//! and hard links, but a crash or a full disk leaves a part. A file is replaced atomically by one with the same
//! attributes where that is possible, and written into otherwise:
//!
//! | file | change |
//! |---|---|
//! | new | created; as root with the owner of its directory |
//! | regular | replaced, with the owner, mode and extended attributes of the old file |
//! | a mount point; one with several hard links; in a directory that cannot be written; its owner cannot be given | written into |
//! | immutable, append-only or not regular | an error |
//!
//! Everything that can be checked is checked when the file is staged: the permission, the attributes and the space.

use std::fs::{self, File, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt, fchown, lchown};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, FallocateFlags, StatxAttributes, StatxFlags, XattrFlags};
use rustix::io::Errno;
use tempfile::NamedTempFile;

use super::staged::{Replacement, StagedFile, directory_of, stage_at, temporary_for};

/// Maximum number of symbolic links that are followed to a file that does not exist (`path_resolution(7)`).
const MAX_LINKS: usize = 40;
/// The bit of a directory in which only owners remove files (inode(7)).
const STICKY: u32 = 0o1000;

/// Writes the new content of `path` to the disk under a temporary name. The file keeps its attributes; a new file has
/// `mode` less the umask.
///
/// # Errors
/// The file cannot be changed.
pub fn stage_update(path: &Path, bytes: &[u8], mode: u32) -> io::Result<StagedFile> {
    let path = resolve(path);
    match fs::metadata(&path) {
        Ok(old) if old.is_file() => stage_existing(path, &old, bytes),
        Ok(_) => Err(io::Error::other("it is not a regular file")),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let staged = stage_at(path, bytes, mode)?;
            if let Some((uid, gid)) = owner_for_new(directory_of(&staged.path)) {
                // In a user namespace without this owner the file stays with root.
                let _ = fchown(staged.temporary.as_file(), Some(uid), Some(gid));
            }
            Ok(staged)
        }
        Err(error) => Err(error),
    }
}

/// Creates a directory; as root with the owner of the directory above it.
///
/// # Errors
/// What the file system returns.
pub fn create_directory(path: &Path) -> io::Result<()> {
    fs::create_dir(path)?;
    if let Some((uid, gid)) = owner_for_new(directory_of(path)) {
        let _ = lchown(path, Some(uid), Some(gid));
    }
    Ok(())
}

/// The owner of a new file, if it is not that of this process: with sudo, files in the home directory of a user belong
/// to that user.
fn owner_for_new(directory: &Path) -> Option<(u32, u32)> {
    let owner = fs::metadata(directory).ok().filter(|directory| directory.uid() != 0)?;
    rustix::process::geteuid().is_root().then(|| (owner.uid(), owner.gid()))
}

/// The path without symbolic links. Unlike [`fs::canonicalize`], the file need not exist.
fn resolve(path: &Path) -> PathBuf {
    let mut path = path.to_owned();
    for _ in 0..MAX_LINKS {
        if let Ok(resolved) = fs::canonicalize(&path) {
            return resolved;
        }
        match fs::read_link(&path) {
            Ok(target) => path = directory_of(&path).join(target),
            Err(_) => break,
        }
    }
    path
}

fn stage_existing(path: PathBuf, old: &fs::Metadata, bytes: &[u8]) -> io::Result<StagedFile> {
    let attributes = attributes(&path);
    if attributes.contains(StatxAttributes::IMMUTABLE) {
        return Err(io::Error::other("it is immutable (chattr +i)"));
    }
    if attributes.contains(StatxAttributes::APPEND) {
        return Err(io::Error::other("it is append-only (chattr +a)"));
    }
    let is_mount_point = attributes.contains(StatxAttributes::MOUNT_ROOT);
    if !is_mount_point && old.nlink() == 1 && can_rename(&path, old) {
        match stage_replacement(&path, old, bytes) {
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {}
            staged => return staged,
        }
    }
    // Without O_TRUNC, so that nothing changes before the commit.
    let file = OpenOptions::new().write(true).open(&path)?;
    let content = fs::read(&path)?;
    if bytes.len() as u64 > old.len() {
        match rustix::fs::fallocate(&file, FallocateFlags::KEEP_SIZE, 0, bytes.len() as u64) {
            Ok(()) | Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => {}
            Err(error) => return Err(error.into()),
        }
    }
    // The new content must be readable under a temporary path as well.
    let temporary = temporary_for(&path, bytes, 0o600, directory_of(&path));
    let temporary =
        temporary.or_else(|_| temporary_for(&path, bytes, 0o600, &std::env::temp_dir()))?;
    Ok(StagedFile { temporary, path, replacement: Replacement::WriteInto { file, old: content } })
}

/// A new file with the attributes of the old one.
fn stage_replacement(path: &Path, old: &fs::Metadata, bytes: &[u8]) -> io::Result<StagedFile> {
    let temporary = temporary_for(path, bytes, 0o600, directory_of(path))?;
    copy_attributes(path, old, &temporary)?;
    Ok(StagedFile { temporary, path: path.to_owned(), replacement: Replacement::Rename })
}

/// Gives a new file the owner, mode and extended attributes (ACL, `SELinux` context) of an old one.
fn copy_attributes(path: &Path, old: &fs::Metadata, new: &NamedTempFile) -> io::Result<()> {
    let file: &File = new.as_file();
    let now = file.metadata()?;
    if (now.uid(), now.gid()) != (old.uid(), old.gid()) {
        fchown(file, Some(old.uid()), Some(old.gid()))?;
    }
    file.set_permissions(Permissions::from_mode(old.mode() & 0o7777))?;
    for name in extended_attributes(path) {
        let mut value = Vec::with_capacity(64 << 10);
        let denied = |_| io::Error::from(io::ErrorKind::PermissionDenied);
        rustix::fs::getxattr(path, &name, rustix::buffer::spare_capacity(&mut value))
            .map_err(denied)?;
        rustix::fs::fsetxattr(file, &name, &value, XattrFlags::empty()).map_err(denied)?;
    }
    file.sync_all()
}

/// The names of the extended attributes; none if the file system has no such attributes.
fn extended_attributes(path: &Path) -> Vec<String> {
    let mut names = Vec::with_capacity(64 << 10);
    if rustix::fs::listxattr(path, rustix::buffer::spare_capacity(&mut names)).is_err() {
        return Vec::new();
    }
    let names = names.split(|byte| *byte == 0).filter(|name| !name.is_empty());
    names.map(|name| String::from_utf8_lossy(name).into_owned()).collect()
}

fn attributes(path: &Path) -> StatxAttributes {
    let found = rustix::fs::statx(CWD, path, AtFlags::empty(), StatxFlags::BASIC_STATS);
    found.map_or(StatxAttributes::empty(), |found| found.stx_attributes)
}

/// Whether the directory lets this process replace the file: in a sticky one only an owner may.
fn can_rename(path: &Path, old: &fs::Metadata) -> bool {
    let user = rustix::process::geteuid();
    fs::metadata(directory_of(path)).is_ok_and(|directory| {
        let is_owner = [old.uid(), directory.uid()].contains(&user.as_raw());
        user.is_root() || is_owner || directory.mode() & STICKY == 0
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const PRIVATE: u32 = 0o600;

    fn update(path: &Path, text: &str) {
        stage_update(path, text.as_bytes(), PRIVATE).unwrap().commit().unwrap();
        assert_eq!(fs::read_to_string(path).unwrap(), text);
    }

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().mode() & 0o7777
    }

    #[test]
    fn stage_update_keeps_mode_and_extended_attributes_and_replaces_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        fs::write(&path, "old").unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o640)).unwrap();
        // tmpfs of older kernels has no attributes of users.
        let has_attributes =
            rustix::fs::setxattr(&path, "user.note", b"kept", XattrFlags::empty()).is_ok();
        let before = fs::metadata(&path).unwrap().ino();
        update(&path, "new and longer");
        assert_eq!(mode(&path), 0o640);
        assert_ne!(fs::metadata(&path).unwrap().ino(), before, "it is replaced atomically");
        let names = extended_attributes(&path);
        assert_eq!(names.contains(&"user.note".to_owned()), has_attributes, "{names:?}");
        let new = dir.path().join("new");
        update(&new, "x");
        assert_eq!(mode(&new), PRIVATE);
    }

    #[test]
    fn stage_update_writes_into_a_file_with_hard_links_and_through_symbolic_links() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::write(at("f"), "a longer old text").unwrap();
        fs::hard_link(at("f"), at("hard")).unwrap();
        std::os::unix::fs::symlink("f", at("link")).unwrap();
        std::os::unix::fs::symlink("missing", at("dangling")).unwrap();
        let staged = stage_update(&at("link"), b"new", PRIVATE).unwrap();
        assert_eq!(fs::read(staged.temporary_path()).unwrap(), b"new");
        assert_eq!(
            fs::read(at("f")).unwrap(),
            b"a longer old text",
            "nothing changes before the commit"
        );
        staged.commit().unwrap();
        assert_eq!(fs::read_to_string(at("hard")).unwrap(), "new");
        assert!(fs::symlink_metadata(at("link")).unwrap().is_symlink());
        update(&at("dangling"), "created");
        assert!(fs::symlink_metadata(at("dangling")).unwrap().is_symlink());
        assert_eq!(fs::read_to_string(at("missing")).unwrap(), "created");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 5, "no temporary file is left");
    }

    #[test]
    fn stage_update_refuses_what_is_not_a_regular_file() {
        let dir = tempfile::tempdir().unwrap();
        for path in [dir.path(), Path::new("/dev/null")] {
            let error = stage_update(path, b"x", PRIVATE).unwrap_err().to_string();
            assert_eq!(error, "it is not a regular file");
        }
    }
}

//! Writes the files of an installation, and restores what they replaced.

use std::fs;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use jackstay_sys::files::{self, StagedFile};

use super::host::restore_context;
use super::journal::{FileRecord, Journal, JournalError, Original, Store, content, digest_of};

/// What became of a file when it was restored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Restored {
    /// It is as before the installation.
    AsBefore,
    /// Its content has changed since the installation, so it is kept.
    Kept,
}

/// Writes a file atomically, and the directories above it.
///
/// # Errors
/// What the file system returns.
pub fn write(path: &Path, bytes: &[u8], mode: u32) -> Result<(), JournalError> {
    create_parent(path)?;
    files::replace(path, bytes, mode).map_err(|error| JournalError::Io(path.to_owned(), error))?;
    restore_context(path);
    Ok(())
}

fn create_parent(path: &Path) -> Result<(), JournalError> {
    let Some(parent) = path.parent() else { return Ok(()) };
    let created = fs::DirBuilder::new().recursive(true).mode(0o755).create(parent);
    created.map_err(|error| JournalError::Io(path.to_owned(), error))
}

/// Restores one file. Repeating it has no effect.
///
/// # Errors
/// What the file system returns.
pub fn restore(store: &Store, file: &FileRecord) -> Result<Restored, JournalError> {
    files::remove_incomplete(&file.path);
    let Some(now) = content(&file.path)? else {
        // The new file was not written yet, or is removed already; an old file may have been removed by others.
        return match &file.original {
            Some(_) => put_back(store, file),
            None => Ok(Restored::AsBefore),
        };
    };
    if file.keep_if_changed && digest_of(&now) != file.digest {
        let is_original = match &file.original {
            Some(original) => store.original(original)? == now,
            None => false,
        };
        return Ok(if is_original { Restored::AsBefore } else { Restored::Kept });
    }
    match &file.original {
        Some(_) => put_back(store, file),
        None => remove(&file.path),
    }
}

/// Restores the files that a change to another version has written, the last first. Repeating it has no effect.
///
/// # Errors
/// What the file system returns.
pub fn restore_previous(store: &Store, journal: &Journal) -> Result<(), JournalError> {
    let files = journal.upgrade.iter().flat_map(|upgrade| upgrade.files.iter().rev());
    for file in files {
        restore(store, file)?;
    }
    Ok(())
}

/// Writes the old content of a file with its permissions and owner.
///
/// # Errors
/// What the file system returns.
pub fn put_back(store: &Store, file: &FileRecord) -> Result<Restored, JournalError> {
    let Some(original) = &file.original else { return remove(&file.path) };
    write_like(&file.path, &store.original(original)?, original)?;
    Ok(Restored::AsBefore)
}

/// Writes a file with the permissions and the owner that it had. A file with this content is not written, so that an
/// undo on a full disk needs space only for what has changed.
///
/// # Errors
/// What the file system returns.
pub fn write_like(path: &Path, bytes: &[u8], original: &Original) -> Result<(), JournalError> {
    let fail = |error| JournalError::Io(path.to_owned(), error);
    if content(path)?.is_none_or(|now| now != bytes) {
        create_parent(path)?;
        files::stage_update(path, bytes, original.mode)
            .and_then(StagedFile::commit)
            .map_err(fail)?;
    }
    std::os::unix::fs::chown(path, Some(original.uid), Some(original.gid)).map_err(fail)?;
    // The mode of a new file is reduced by the umask.
    let mode = std::os::unix::fs::PermissionsExt::from_mode(original.mode);
    fs::set_permissions(path, mode).map_err(fail)
}

fn remove(path: &Path) -> Result<Restored, JournalError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(JournalError::Io(path.to_owned(), error))
        }
        _ => Ok(Restored::AsBefore),
    }
}

/// Removes the directories that the installation has created, and those of jackstay's state with their content.
///
/// # Errors
/// What the file system returns; a directory that is not empty stays without an error.
pub fn remove_directories(journal: &Journal) -> Result<(), JournalError> {
    let ignored = [io::ErrorKind::NotFound, io::ErrorKind::DirectoryNotEmpty];
    let state = journal.state_directories.iter().map(|path| (path, fs::remove_dir_all(path)));
    let created = journal.directories.iter().rev().map(|path| (path, fs::remove_dir(path)));
    let all: Vec<(&PathBuf, io::Result<()>)> = state.chain(created).collect();
    for (path, result) in all {
        match result {
            Err(error) if !ignored.contains(&error.kind()) => {
                return Err(JournalError::Io(path.clone(), error));
            }
            _ => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn write_like_replaces_only_another_content() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        fs::write(&path, "same").unwrap();
        let metadata = fs::metadata(&path).unwrap();
        let original = Original {
            backup: String::new(),
            mode: 0o640,
            uid: metadata.uid(),
            gid: metadata.gid(),
        };
        let inode = |path: &Path| fs::metadata(path).unwrap().ino();
        let (before, mode) =
            (inode(&path), |path: &Path| fs::metadata(path).unwrap().mode() & 0o777);
        write_like(&path, b"same", &original).unwrap();
        assert_eq!((inode(&path), mode(&path)), (before, 0o640));
        write_like(&path, b"another", &original).unwrap();
        assert_eq!(
            (fs::read(&path).unwrap().as_slice(), mode(&path)),
            (b"another".as_slice(), 0o640)
        );
        assert_ne!(inode(&path), before);
    }
}

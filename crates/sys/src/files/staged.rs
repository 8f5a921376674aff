//! A new content of a file under a temporary name, until it takes its place.

use std::fs::{self, File, Permissions};
use std::io::{self, Seek, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use tempfile::NamedTempFile;

/// What follows the name of a file in that of its temporary file ([`stage`]), before six random characters.
pub(super) const TEMPORARY: &str = ".jackstay-";

/// A new content of a file under a temporary name. The temporary file is removed when this is dropped.
#[derive(Debug)]
pub struct StagedFile {
    pub(super) temporary: NamedTempFile,
    pub(super) path: PathBuf,
    pub(super) replacement: Replacement,
}

/// How a new content gets to its place.
#[derive(Debug)]
pub(super) enum Replacement {
    /// The temporary file takes the name of the old one.
    Rename,
    /// The content is written into the file, which had the content `old`.
    WriteInto { file: File, old: Vec<u8> },
}

/// Writes the new content of `path` to the disk under a temporary name. The parameters are those of
/// [`super::replace`].
///
/// # Errors
/// What the file system returns.
pub fn stage(path: &Path, bytes: &[u8], mode: u32) -> io::Result<StagedFile> {
    stage_at(fs::canonicalize(path).unwrap_or_else(|_| path.to_owned()), bytes, mode)
}

/// Stages a file whose path has no symbolic link.
pub(super) fn stage_at(path: PathBuf, bytes: &[u8], mode: u32) -> io::Result<StagedFile> {
    let temporary = temporary_for(&path, bytes, mode, directory_of(&path))?;
    Ok(StagedFile { temporary, path, replacement: Replacement::Rename })
}

/// A file with the new content of `path`, in a directory.
pub(super) fn temporary_for(
    path: &Path,
    bytes: &[u8],
    mode: u32,
    directory: &Path,
) -> io::Result<NamedTempFile> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let mut temporary = tempfile::Builder::new()
        .prefix(&format!(".{name}{TEMPORARY}"))
        .permissions(Permissions::from_mode(mode))
        .tempfile_in(directory)?;
    temporary.write_all(bytes)?;
    // The content reaches the disk before the name does: a power failure leaves the old file or the new one.
    temporary.as_file().sync_all()?;
    Ok(temporary)
}

impl StagedFile {
    /// The path of the temporary file.
    pub fn temporary_path(&self) -> &Path {
        self.temporary.path()
    }

    /// Replaces the content of the file, atomically unless it must be written into ([`super::stage_update`]).
    ///
    /// # Errors
    /// What the file system returns. The old file is then unchanged, unless only the final sync of the
    /// directory failed.
    pub fn commit(self) -> io::Result<()> {
        let Self { temporary, path, replacement } = self;
        match replacement {
            Replacement::Rename => {
                temporary.persist(&path).map_err(|failed| failed.error)?;
                File::open(directory_of(&path))?.sync_all()
            }
            Replacement::WriteInto { file, old } => {
                write_into(file, &old, &fs::read(temporary.path())?)
            }
        }
    }
}

/// Writes into a file, and restores it if that fails.
fn write_into(mut file: File, old: &[u8], new: &[u8]) -> io::Result<()> {
    let mut write = |bytes: &[u8]| {
        file.rewind()?;
        file.write_all(bytes)?;
        file.set_len(bytes.len() as u64)?;
        file.sync_all()
    };
    write(new).inspect_err(|_| {
        let _ = write(old);
    })
}

/// The directory of a file.
pub(super) fn directory_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

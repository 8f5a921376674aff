//! Reads a configured file: a regular file of limited size.
//!
//! Control tasks re-read files. A pipe would block them until a process writes to it, and a device may
//! never end.

use std::fs::OpenOptions;
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Reads a file of at most `max` bytes. Symbolic links are followed.
///
/// # Errors
/// What the file system returns, "not a regular file", or [`io::ErrorKind::FileTooLarge`].
pub fn read(path: &Path, max: u64) -> io::Result<Vec<u8>> {
    // Without O_NONBLOCK, open(2) of a pipe waits for a writer. It has no effect on files.
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("not a regular file"));
    }
    let mut bytes = Vec::new();
    file.take(max + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > max {
        let message = format!("larger than {max} bytes");
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, message));
    }
    Ok(bytes)
}

/// Reads a text file of at most `max` bytes.
///
/// # Errors
/// Those of [`read`], or [`io::ErrorKind::InvalidData`] if it is not UTF-8.
pub fn read_text(path: &Path, max: u64) -> io::Result<String> {
    let bytes = read(path, max)?;
    let not_text = |_| io::Error::new(io::ErrorKind::InvalidData, "not a text file in UTF-8");
    String::from_utf8(bytes).map_err(not_text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn read_accepts_only_regular_files_within_the_limit() {
        let dir = tempfile::tempdir().unwrap();
        let (file, pipe) = (dir.path().join("file"), dir.path().join("pipe"));
        std::fs::write(&file, "12345").unwrap();
        assert_eq!(read_text(&file, 5).unwrap(), "12345");
        assert_eq!(read(&file, 4).unwrap_err().kind(), io::ErrorKind::FileTooLarge);
        std::fs::write(&file, b"\xff").unwrap();
        assert_eq!(read_text(&file, 5).unwrap_err().kind(), io::ErrorKind::InvalidData);
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        for path in [&pipe, dir.path(), Path::new("/dev/zero")] {
            assert_eq!(read(path, 5).unwrap_err().to_string(), "not a regular file", "{path:?}");
        }
        let missing = read(&dir.path().join("missing"), 5).unwrap_err();
        assert_eq!(missing.kind(), io::ErrorKind::NotFound);
    }
}

//! Configured files: bounded reads, atomic replacement, and bearer tokens.
//!
//! Control tasks re-read files periodically, so only regular files of limited size are read. A pipe would
//! block the task until a process writes to it, and a device such as `/dev/zero` never ends.

use std::error::Error;
use std::fmt;
use std::fs::{self, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use http::HeaderValue;

use super::process::sandbox::file_rules;

mod staged;
mod update;

pub use staged::{StagedFile, stage};
use staged::{TEMPORARY, directory_of};
pub use update::{create_directory, stage_update};

/// Mode of files that only the owner may read: keys, kubeconfigs.
pub const PRIVATE: u32 = 0o600;
/// Mode of files that every user may read: certificates, configuration.
pub const PUBLIC: u32 = 0o644;

/// Maximum length of a bearer token in bytes. The apiserver accepts up to 1 MiB of headers.
const MAX_TOKEN: u64 = 64 << 10;

/// Reads a file of at most `max` bytes. Symbolic links are followed.
///
/// # Errors
/// What the file system returns, "not a regular file", or [`io::ErrorKind::FileTooLarge`]. If the sandbox denies the
/// access, the error says so.
pub fn read(path: &Path, max: u64) -> io::Result<Vec<u8>> {
    // Without O_NONBLOCK, open(2) of a pipe waits for a writer. It has no effect on files.
    let opened = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path);
    let file = opened.map_err(|error| match error.kind() {
        io::ErrorKind::PermissionDenied => match file_rules::describe_denial(path) {
            Some(reason) => io::Error::new(error.kind(), reason),
            None => error,
        },
        _ => error,
    })?;
    let metadata = file.metadata()?;
    if !metadata.is_file() {
        return Err(io::Error::other("not a regular file"));
    }
    // A buffer that grows would leave copies of a private key in freed memory.
    let mut bytes = Vec::with_capacity(metadata.len().min(max) as usize);
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

/// Replaces the content of `path` atomically, with this mode less the umask. Of a symbolic link, the target
/// is replaced.
///
/// # Errors
/// What the file system returns. The old file is then unchanged, unless only the final sync of the
/// directory failed.
pub fn replace(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    stage(path, bytes, mode)?.commit()
}

/// Removes the temporary files of writes to `path` that a process has begun and not completed, because it was killed.
pub fn remove_incomplete(path: &Path) {
    let path = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let prefix = format!(".{name}{TEMPORARY}");
    for entry in fs::read_dir(directory_of(&path)).into_iter().flatten().flatten() {
        if entry.file_name().to_str().is_some_and(|found| found.starts_with(&prefix)) {
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// Why a text is not a bearer token. Nothing of the text is in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum TokenError {
    /// It is empty, or only white space.
    #[error("it is empty")]
    Empty,
    /// It is longer than the limit.
    #[error("a token of more than {MAX_TOKEN} bytes")]
    TooLong,
    /// It has a character that a header value cannot contain (RFC 9110 section 5.5).
    #[error("it holds a line break or another character that no header may hold")]
    Character,
}

/// Why there is no bearer token in a file.
#[derive(Debug)]
pub struct TokenFileError {
    /// The path of the file.
    pub path: PathBuf,
    /// What is wrong with it.
    pub problem: TokenFileProblem,
}

/// What is wrong with a token file.
#[derive(Debug)]
pub enum TokenFileProblem {
    /// It cannot be read.
    Io(io::Error),
    /// Its content is not a token.
    Token(TokenError),
}

impl fmt::Display for TokenFileError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = self.path.display();
        match &self.problem {
            TokenFileProblem::Io(error) => write!(f, "{path}: {error}"),
            TokenFileProblem::Token(error) => write!(f, "{path}: {error}"),
        }
    }
}

impl Error for TokenFileError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match &self.problem {
            TokenFileProblem::Io(error) => Some(error),
            TokenFileProblem::Token(error) => Some(error),
        }
    }
}

/// The value of the `authorization` header for the bearer token in a file. Tokens rotate, so callers read the
/// file periodically.
///
/// # Errors
/// The file cannot be read, or its content is not a token.
pub fn authorization_from_file(path: &Path) -> Result<HeaderValue, TokenFileError> {
    let text = read_text(path, MAX_TOKEN).map_err(TokenFileProblem::Io);
    text.and_then(|text| authorization(&text).map_err(TokenFileProblem::Token))
        .map_err(|problem| TokenFileError { path: path.to_owned(), problem })
}

/// The value of the `authorization` header for a bearer token. White space around the token is removed, as
/// by client-go. A header value cannot contain control characters (RFC 9110 section 5.5).
///
/// # Errors
/// The text is not a token.
pub fn authorization(text: &str) -> Result<HeaderValue, TokenError> {
    let token = text.trim();
    if token.is_empty() {
        return Err(TokenError::Empty);
    }
    if token.len() as u64 > MAX_TOKEN {
        return Err(TokenError::TooLong);
    }
    let mut value =
        HeaderValue::from_str(&format!("Bearer {token}")).map_err(|_| TokenError::Character)?;
    value.set_sensitive(true);
    Ok(value)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

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

    fn file_names(dir: &Path) -> Vec<String> {
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
        assert_eq!(file_names(dir.path()), ["f"]);
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
        assert_eq!(file_names(dir.path()), ["d"]);
        assert!(replace(&dir.path().join("none/f"), b"x", PUBLIC).is_err());
    }

    #[test]
    fn authorization_trims_tokens_and_refuses_text_that_no_header_may_contain() {
        let too_long = "x".repeat(MAX_TOKEN as usize + 1);
        let longest = &too_long[1..];
        for (text, expected) in [
            ("abc", Ok("Bearer abc")),
            (" abc\r\n\n", Ok("Bearer abc")),
            ("a b\tc", Ok("Bearer a b\tc")),
            ("a.b-c_~+/==", Ok("Bearer a.b-c_~+/==")),
            ("a\u{e9}b", Ok("Bearer a\u{e9}b")),
            (longest, Ok(longest)),
            ("", Err("it is empty")),
            (" \n", Err("it is empty")),
            ("abc\ndef", Err("a line break")),
            ("a\u{0}b", Err("no header may hold")),
            ("a\u{7f}b", Err("no header may hold")),
            (&too_long, Err("more than 65536 bytes")),
        ] {
            let value = authorization(text);
            let shown = value.as_ref().map(HeaderValue::as_bytes);
            match (shown, expected) {
                (Ok(shown), Ok(expected)) => {
                    assert!(shown.ends_with(expected.as_bytes()), "{text:?}");
                }
                (Err(error), Err(expected)) => {
                    let error = error.to_string();
                    assert!(error.contains(expected), "{text:?}: {error}");
                    assert!(!error.contains("abc"), "{error}");
                }
                _ => panic!("{text:?}: {value:?}"),
            }
            assert!(value.is_ok_and(|value| value.is_sensitive()) == expected.is_ok());
        }
    }
}

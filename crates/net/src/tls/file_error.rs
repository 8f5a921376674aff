//! The error of a certificate, key or CA file.

use std::fmt;
use std::path::{Path, PathBuf};

use jackstay_config::describe_io_error;

/// Why a certificate, key or CA file cannot be used. Its text names the file.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct TlsFileError {
    /// Path of the file.
    pub path: PathBuf,
    /// The kind of problem, where callers distinguish it.
    pub problem: TlsFileProblem,
    message: String,
}

/// Kinds of [`TlsFileError`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TlsFileProblem {
    /// The file does not exist.
    Missing,
    /// The key belongs to another certificate.
    Mismatch,
    /// The certificate has expired.
    Expired,
    /// Every other problem.
    Other,
}

impl TlsFileError {
    /// Whether the file does not exist. For an identity that is issued later, this is not an error.
    pub fn is_missing(&self) -> bool {
        self.problem == TlsFileProblem::Missing
    }

    pub(super) fn new(path: &Path, problem: TlsFileProblem, message: impl fmt::Display) -> Self {
        let message = format!("{}: {message}", path.display());
        Self { path: path.to_owned(), problem, message }
    }

    /// The content is not a valid certificate, key or CA.
    pub fn invalid(path: &Path, message: impl fmt::Display) -> Self {
        Self::new(path, TlsFileProblem::Other, message)
    }

    /// The file cannot be read.
    pub fn io(path: &Path, error: &std::io::Error) -> Self {
        let problem = match error.kind() {
            std::io::ErrorKind::NotFound => TlsFileProblem::Missing,
            _ => TlsFileProblem::Other,
        };
        let reason = describe_io_error(error);
        let message = format!("cannot read {}: {reason}", path.display());
        Self { path: path.to_owned(), problem, message }
    }
}

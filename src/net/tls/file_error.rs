//! Errors of certificate, key and CA files: each names the file.

use std::fmt;
use std::path::{Path, PathBuf};

use crate::config::describe_io_error;

/// What is wrong with a certificate, key or CA file; prints as a sentence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsFileError {
    /// Path of the file.
    pub path: PathBuf,
    /// The kind of problem.
    pub problem: TlsFileProblem,
    message: String,
}

/// Kinds of [`TlsFileError`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TlsFileProblem {
    /// The file does not exist.
    Missing,
    /// The file cannot be read.
    Unreadable,
    /// The content is not a certificate, key or CA.
    Broken,
    /// The key belongs to another certificate.
    Mismatch,
    /// The certificate has expired.
    Expired,
    /// The certificate is not valid yet.
    NotYetValid,
}

impl TlsFileError {
    /// Whether the file does not exist, which is not an error for an identity that is issued later.
    pub fn is_missing(&self) -> bool {
        self.problem == TlsFileProblem::Missing
    }

    pub(super) fn at(path: &Path, problem: TlsFileProblem, message: impl fmt::Display) -> Self {
        let message = format!("{}: {message}", path.display());
        Self { path: path.to_owned(), problem, message }
    }

    pub(super) fn broken(path: &Path, message: impl fmt::Display) -> Self {
        Self::at(path, TlsFileProblem::Broken, message)
    }

    pub(super) fn no_certificate(path: &Path) -> Self {
        Self::broken(path, "contains no certificate (PEM, -----BEGIN CERTIFICATE-----)")
    }

    pub(super) fn io(path: &Path, error: &std::io::Error) -> Self {
        let problem = match error.kind() {
            std::io::ErrorKind::NotFound => TlsFileProblem::Missing,
            _ => TlsFileProblem::Unreadable,
        };
        let reason = describe_io_error(error);
        let message = format!("cannot read {}: {reason}", path.display());
        Self { path: path.to_owned(), problem, message }
    }
}

impl fmt::Display for TlsFileError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for TlsFileError {}

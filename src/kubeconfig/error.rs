//! The error type for kubeconfig files.

use std::fmt;
use std::path::Path;

/// What is wrong with a kubeconfig. The message names the file and holds no secret.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KubeconfigError(String);

impl KubeconfigError {
    /// An error about the file at `path`.
    pub fn at(path: &Path, message: impl fmt::Display) -> Self {
        Self(format!("{}: {message}", path.display()))
    }

    /// A file that cannot be read.
    pub(super) fn unreadable(path: &Path, error: &std::io::Error) -> Self {
        let reason = error.to_string();
        let reason = reason.split(" (os error").next().unwrap_or_default();
        Self(format!("cannot read {}: {reason}", path.display()))
    }
}

impl From<String> for KubeconfigError {
    fn from(message: String) -> Self {
        Self(message)
    }
}

impl fmt::Display for KubeconfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for KubeconfigError {}

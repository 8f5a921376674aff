//! The files of a certificate.

use std::path::{Path, PathBuf};

use serde::{Serialize, Serializer};

/// A certificate chain and its key, as PEM files; both may be the same file.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize)]
pub struct CertPaths {
    /// Certificate chain, leaf first.
    #[serde(serialize_with = "as_text")]
    pub cert_file: PathBuf,
    /// Private key.
    #[serde(serialize_with = "as_text")]
    pub key_file: PathBuf,
}

fn as_text<S: Serializer>(path: &Path, s: S) -> Result<S::Ok, S::Error> {
    s.serialize_str(&path.to_string_lossy())
}

//! Why the kubeconfig files of a user cannot be used.

use std::error::Error;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use jackstay_config::describe_io_error;

/// Why the kubeconfig files of a user, or a file that they name, cannot be read, or a kubeconfig cannot be written.
#[derive(Debug)]
pub enum KubeconfigError {
    /// No file is named, and there is no home directory.
    NoneNamed,
    /// The file does not exist.
    Missing(PathBuf),
    /// The file in the home directory does not exist, and sudo has set that directory.
    MissingOfSudo(PathBuf),
    /// None of the files that `$KUBECONFIG` lists exists.
    NoneExists(Vec<PathBuf>),
    /// The file cannot be read.
    Unreadable(PathBuf, io::Error),
    /// The content of the file is not a kubeconfig.
    Invalid(PathBuf, ContentError),
    /// The kubeconfig cannot be written as YAML.
    Unwritable(Unwritable),
}

/// Why the content of a file is not a kubeconfig that can be used. It holds no value of the file except its kind and
/// the names of its entries.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ContentError {
    /// The path is that of a directory.
    Directory,
    /// The file is larger than [`super::MAX_KUBECONFIG`].
    TooLarge,
    /// The content is not text.
    NotText,
    /// The content is not a map.
    NotMap,
    /// The content is not YAML, or a value has a wrong type.
    Value {
        /// The line, from 1.
        line: u64,
        /// The path of the key; may be empty.
        key: String,
        /// The mistake.
        mistake: String,
    },
    /// `kind` names another kind of object.
    OtherKind(String),
    /// Two entries have the same name.
    DuplicateName {
        /// The list of the entries.
        list: &'static str,
        /// The position of the second one, from 0.
        index: usize,
        /// The name.
        name: String,
    },
    /// `apiVersion` is not `v1`.
    OtherVersion(String),
}

/// A value cannot be written as YAML.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unwritable {
    /// The kubeconfig as a whole has no JSON form.
    Kubeconfig,
    /// A value in it has no YAML form.
    Value,
}

impl KubeconfigError {
    pub(super) fn invalid(path: &Path, error: ContentError) -> Self {
        Self::Invalid(path.to_owned(), error)
    }

    pub(super) fn unreadable(path: &Path, error: io::Error) -> Self {
        Self::Unreadable(path.to_owned(), error)
    }
}

impl fmt::Display for KubeconfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoneNamed => f.write_str(
                "no kubeconfig: name one with --kubeconfig, or set $KUBECONFIG or $HOME",
            ),
            Self::Missing(path) if path.as_os_str() == "-" => {
                f.write_str("cannot read -: no such file; /dev/stdin names the standard input")
            }
            Self::Missing(path) => write!(f, "cannot read {}: no such file", path.display()),
            Self::MissingOfSudo(path) => write!(
                f,
                "cannot read {}: no such file; sudo changes the home directory: name the kubeconfig with --kubeconfig",
                path.display()
            ),
            Self::NoneExists(paths) => {
                let paths: Vec<_> = paths.iter().map(|path| path.display().to_string()).collect();
                write!(f, "$KUBECONFIG: none of {} exists", paths.join(", "))
            }
            Self::Unreadable(path, error) => {
                write!(f, "cannot read {}: {}", path.display(), describe_io_error(error))
            }
            Self::Invalid(path, error) => write!(f, "{}: {error}", path.display()),
            Self::Unwritable(error) => error.fmt(f),
        }
    }
}

impl Error for KubeconfigError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::Unreadable(_, error) => Some(error),
            Self::Invalid(_, error) => Some(error),
            Self::Unwritable(error) => Some(error),
            Self::NoneNamed | Self::Missing(_) | Self::MissingOfSudo(_) | Self::NoneExists(_) => {
                None
            }
        }
    }
}

impl From<Unwritable> for KubeconfigError {
    fn from(error: Unwritable) -> Self {
        Self::Unwritable(error)
    }
}

impl fmt::Display for ContentError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Directory => f.write_str("is a directory, not a kubeconfig"),
            Self::TooLarge => f.write_str("larger than 16 MiB: not a kubeconfig"),
            Self::NotText => {
                f.write_str("not a text file in UTF-8, or in UTF-16 with a byte order mark")
            }
            Self::NotMap => {
                f.write_str("not a kubeconfig: it must be a map of keys (clusters: …, users: …)")
            }
            Self::Value { line, key, mistake } => {
                let separator = if key.is_empty() { "" } else { ": " };
                write!(f, "line {line}: {key}{separator}{mistake}")
            }
            Self::OtherKind(kind) => write!(f, "not a kubeconfig: its kind is {kind:?}"),
            Self::DuplicateName { list, index, name } => {
                write!(f, "{list}[{index}]: the name {name:?} appears twice")
            }
            Self::OtherVersion(version) => {
                write!(
                    f,
                    "its apiVersion is {version:?}: kubectl reads v1 only, write `apiVersion: v1`"
                )
            }
        }
    }
}

impl Error for ContentError {}

impl fmt::Display for Unwritable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Kubeconfig => "the kubeconfig cannot be written",
            Self::Value => "a value cannot be written as YAML",
        })
    }
}

impl Error for Unwritable {}

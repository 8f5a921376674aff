//! Why the kubeconfig files of a user cannot be used.

use std::io;
use std::path::{Path, PathBuf};

use jackstay_config::describe_io_error;

/// Why the kubeconfig files of a user, or a file that they name, cannot be read, or a kubeconfig cannot be written.
#[derive(Debug, thiserror::Error)]
pub enum KubeconfigError {
    /// No file is named, and there is no home directory.
    #[error("no kubeconfig: name one with --kubeconfig, or set $KUBECONFIG or $HOME")]
    NoneNamed,
    /// The file does not exist.
    #[error("cannot read {0}: no such file{hint}", hint = stdin_hint(.0))]
    Missing(PathBuf),
    /// The file in the home directory does not exist, and sudo has set that directory.
    #[error(
        "cannot read {0}: no such file; sudo changes the home directory: name the kubeconfig with --kubeconfig"
    )]
    MissingOfSudo(PathBuf),
    /// None of the files that `$KUBECONFIG` lists exists.
    #[error("$KUBECONFIG: none of {} exists", listed(.0))]
    NoneExists(Vec<PathBuf>),
    /// The file cannot be read.
    #[error("cannot read {0}: {reason}", reason = describe_io_error(.1))]
    Unreadable(PathBuf, #[source] io::Error),
    /// The content of the file is not a kubeconfig.
    #[error("{0}: {1}")]
    Invalid(PathBuf, #[source] ContentError),
    /// The kubeconfig cannot be written as YAML.
    #[error("{0}")]
    Unwritable(#[from] Unwritable),
}

/// Why the content of a file is not a kubeconfig that can be used. It holds no value of the file except its kind and
/// the names of its entries.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ContentError {
    /// The path is that of a directory.
    #[error("is a directory, not a kubeconfig")]
    Directory,
    /// The file is larger than [`super::MAX_KUBECONFIG`].
    #[error("larger than 16 MiB: not a kubeconfig")]
    TooLarge,
    /// The content is not text.
    #[error("not a text file in UTF-8, or in UTF-16 with a byte order mark")]
    NotText,
    /// The content is not a map.
    #[error("not a kubeconfig: it must be a map of keys (clusters: …, users: …)")]
    NotMap,
    /// The content is not YAML, or a value has a wrong type.
    #[error("line {line}: {key}{}{mistake}", if .key.is_empty() { "" } else { ": " })]
    Value {
        /// The line, from 1.
        line: u64,
        /// The path of the key; may be empty.
        key: String,
        /// The mistake.
        mistake: String,
    },
    /// `kind` names another kind of object.
    #[error("not a kubeconfig: its kind is {0:?}")]
    OtherKind(String),
    /// Two entries have the same name.
    #[error("{list}[{index}]: the name {name:?} appears twice")]
    DuplicateName {
        /// The list of the entries.
        list: &'static str,
        /// The position of the second one, from 0.
        index: usize,
        /// The name.
        name: String,
    },
    /// `apiVersion` is not `v1`.
    #[error("its apiVersion is {0:?}: kubectl reads v1 only, write `apiVersion: v1`")]
    OtherVersion(String),
}

/// A value cannot be written as YAML.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Unwritable {
    /// The kubeconfig as a whole has no JSON form.
    #[error("the kubeconfig cannot be written")]
    Kubeconfig,
    /// A value in it has no YAML form.
    #[error("a value cannot be written as YAML")]
    Value,
}

/// What to write instead of `-`, which other commands take for the standard input.
fn stdin_hint(path: &Path) -> &'static str {
    if path.as_os_str() == "-" { "; /dev/stdin names the standard input" } else { "" }
}

fn listed(paths: &[PathBuf]) -> String {
    paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ")
}

impl KubeconfigError {
    pub(super) fn invalid(path: &Path, error: ContentError) -> Self {
        Self::Invalid(path.to_owned(), error)
    }

    pub(super) fn unreadable(path: &Path, error: io::Error) -> Self {
        Self::Unreadable(path.to_owned(), error)
    }
}

//! One kubeconfig file: read up to a maximum size, formatted like kubectl's.
//!
//! [`Kubeconfig`] preserves unknown keys and extensions. Writing it drops comments, layout, YAML anchors and documents
//! after the first one, as `kubectl config` does.

use std::fmt;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};

use serde::Serialize;
use zeroize::Zeroizing;

use super::error::{ContentError, KubeconfigError, Unwritable};
use super::original::{record_original, recorded_configuration, recorded_original};
use super::parse::{EntryMistake, ParsedKubeconfig, decode, parse};
use crate::model::{Cluster, Kubeconfig};

/// Maximum size of a kubeconfig in bytes: room for the certificates of a few thousand clusters.
pub const MAX_KUBECONFIG: u64 = 16 << 20;

/// A kubeconfig file.
#[derive(Clone)]
pub struct KubeconfigFile {
    path: PathBuf,
    content: Zeroizing<Vec<u8>>,
    config: Kubeconfig,
    mistakes: Vec<EntryMistake>,
    has_comments: bool,
    has_more_documents: bool,
}

impl fmt::Debug for KubeconfigFile {
    /// Prints only the path; the content holds secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KubeconfigFile").field("path", &self.path).finish_non_exhaustive()
    }
}

impl KubeconfigFile {
    /// Reads a file, which may be a pipe. `None` if it does not exist.
    pub(super) fn read(path: &Path) -> Result<Option<Self>, KubeconfigError> {
        let fail = |error| Err(KubeconfigError::invalid(path, error));
        match std::fs::metadata(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(KubeconfigError::unreadable(path, error)),
            Ok(metadata) if metadata.is_dir() => return fail(ContentError::Directory),
            Ok(_) => {}
        }
        let mut bytes = Vec::new();
        std::fs::File::open(path)
            .and_then(|file| file.take(MAX_KUBECONFIG + 1).read_to_end(&mut bytes))
            .map_err(|error| KubeconfigError::unreadable(path, error))?;
        if bytes.len() as u64 > MAX_KUBECONFIG {
            return fail(ContentError::TooLarge);
        }
        Self::parse(path, &bytes).map(Some)
    }

    /// Parses the content of the file at `path`. An entry with a value of a wrong type is kept without its content:
    /// see [`KubeconfigFile::mistake`].
    ///
    /// # Errors
    /// The first other mistake, with its line and key path and without a value of the file.
    pub fn parse(path: &Path, content: &[u8]) -> Result<Self, KubeconfigError> {
        let parsed = decode(content).and_then(|text| {
            let parsed = parse(&text)?;
            check(&parsed.config)?;
            Ok((parsed, text.lines().any(|line| line.trim_start().starts_with('#'))))
        });
        let (parsed, has_comments) =
            parsed.map_err(|error| KubeconfigError::invalid(path, error))?;
        let path =
            std::path::absolute(path).map_err(|error| KubeconfigError::unreadable(path, error))?;
        let ParsedKubeconfig { config, mistakes, has_more_documents } = parsed;
        let content = Zeroizing::new(content.to_vec());
        Ok(Self { path, content, config, mistakes, has_comments, has_more_documents })
    }

    /// The absolute path. A symlink is not resolved: relative paths in the file are relative to the
    /// directory of the symlink. A write changes its target.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether the file still has the content that was read.
    pub fn is_unchanged(&self) -> bool {
        std::fs::read(&self.path).is_ok_and(|now| now == *self.content)
    }

    /// The content as it was read, with relative paths.
    pub fn config(&self) -> &Kubeconfig {
        &self.config
    }

    /// Whether the file has comments, which a write drops.
    pub fn has_comments(&self) -> bool {
        self.has_comments
    }

    /// Whether the file has YAML documents after the first one, which kubectl does not read and a write drops.
    pub fn has_more_documents(&self) -> bool {
        self.has_more_documents
    }

    /// Why the entry of that name in `clusters`, `users` or `contexts` has no content, although the file has one.
    pub fn mistake(&self, list: &str, name: &str) -> Option<&ContentError> {
        let mut mistakes = self.mistakes.iter();
        Some(&mistakes.find(|mistake| mistake.list == list && mistake.name == name)?.error)
    }

    /// The content with absolute paths.
    pub fn with_absolute_paths(&self) -> Kubeconfig {
        let mut config = self.config.clone();
        let directory = self.path.parent().unwrap_or(Path::new("/"));
        for cluster in config.clusters.iter_mut().filter_map(|named| named.cluster.as_mut()) {
            make_absolute(&mut cluster.certificate_authority, directory);
            if let Some(mut original) = recorded_original(cluster) {
                make_absolute(&mut original.certificate_authority, directory);
                let configuration = recorded_configuration(cluster);
                record_original(cluster, &original, configuration.as_deref());
            }
        }
        for user in config.auth_infos.iter_mut().filter_map(|named| named.auth_info.as_mut()) {
            make_absolute(&mut user.client_certificate, directory);
            make_absolute(&mut user.client_key, directory);
            make_absolute(&mut user.token_file, directory);
            // A command without a slash is looked up in $PATH.
            if let Some(exec) = &mut user.exec
                && exec.command.as_ref().is_some_and(|command| command.contains('/'))
            {
                make_absolute(&mut exec.command, directory);
            }
        }
        config
    }
}

fn make_absolute(path: &mut Option<String>, directory: &Path) {
    if let Some(path) = path.as_mut().filter(|path| !path.is_empty()) {
        *path = directory.join(&*path).to_string_lossy().into_owned();
    }
}

/// Checks what the parser does not: the kind, the version, and that names are unique.
fn check(config: &Kubeconfig) -> Result<(), ContentError> {
    match (config.kind.as_deref(), config.api_version.as_deref()) {
        (None | Some("" | "Config"), None | Some("" | "v1")) => {}
        (None | Some("" | "Config"), Some(other)) => {
            return Err(ContentError::OtherVersion(other.to_owned()));
        }
        (Some(other), _) => return Err(ContentError::OtherKind(other.to_owned())),
    }
    let clusters = config.clusters.iter().map(|named| named.name.as_str());
    unique_names("clusters", &clusters.collect::<Vec<_>>())?;
    let users = config.auth_infos.iter().map(|named| named.name.as_str());
    unique_names("users", &users.collect::<Vec<_>>())?;
    unique_names("contexts", &context_names(config))
}

fn unique_names(list: &'static str, names: &[&str]) -> Result<(), ContentError> {
    let repeated = (0..names.len()).find(|index| names[..*index].contains(&names[*index]));
    repeated.map_or(Ok(()), |index| {
        Err(ContentError::DuplicateName { list, index, name: names[index].to_owned() })
    })
}

/// The names of the contexts.
pub(super) fn context_names(config: &Kubeconfig) -> Vec<&str> {
    config.contexts.iter().map(|named| named.name.as_str()).collect()
}

/// The cluster of that name.
pub fn find_cluster<'a>(config: &'a Kubeconfig, name: &str) -> Option<&'a Cluster> {
    config.clusters.iter().find(|named| named.name == name)?.cluster.as_ref()
}

/// The cluster of that name, to change it.
pub fn find_cluster_mut<'a>(config: &'a mut Kubeconfig, name: &str) -> Option<&'a mut Cluster> {
    config.clusters.iter_mut().find(|named| named.name == name)?.cluster.as_mut()
}

/// Formats a kubeconfig with sorted keys, as kubectl does.
///
/// # Errors
/// A value cannot be written as YAML.
pub fn kubeconfig_yaml(config: &Kubeconfig) -> Result<String, Unwritable> {
    // `serde_json::Value` sorts keys; the maps in `Kubeconfig` do not.
    let tree = serde_json::to_value(config).map_err(|_| Unwritable::Kubeconfig)?;
    to_yaml(&tree)
}

/// Formats a value as YAML that has the same meaning in YAML 1.1 and 1.2.
pub fn to_yaml(value: &impl Serialize) -> Result<String, Unwritable> {
    let options = serde_saphyr::ser_options! { prefer_block_scalars: false };
    serde_saphyr::to_string_with_options(value, options).map_err(|_| Unwritable::Value)
}

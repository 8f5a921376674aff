//! One kubeconfig file: read up to a maximum size, formatted like kubectl's.
//!
//! [`Kubeconfig`] preserves unknown keys and extensions. Writing it drops comments and layout, as
//! `kubectl config` does. A file with a value of a wrong type is refused as a whole.

use std::fmt;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};

use kube::config::{Cluster, Kubeconfig};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use serde_path_to_error::{Deserializer, Track};
use serde_saphyr::{Error as YamlError, Options};

use super::error::{ContentError, KubeconfigError, Unwritable};
use super::original::{record_original, recorded_configuration, recorded_original};
use crate::config::describe_yaml_error;

/// Maximum size of a kubeconfig in bytes: room for the certificates of a few thousand clusters.
pub const MAX_KUBECONFIG: u64 = 16 << 20;

/// Maximum number of YAML events to which all aliases of a file expand, so that aliases of aliases do not
/// exhaust the memory.
const MAX_ALIAS_EVENTS: usize = 200_000;

/// A kubeconfig file.
#[derive(Clone)]
pub struct KubeconfigFile {
    path: PathBuf,
    config: Kubeconfig,
    has_comments: bool,
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
        match String::from_utf8(bytes) {
            Ok(text) if !text.contains('\0') => Self::parse(path, &text).map(Some),
            _ => fail(ContentError::NotText),
        }
    }

    /// Parses `text`, the content of the file at `path`.
    ///
    /// # Errors
    /// The first mistake, with its line and key path and without a value of the file.
    pub fn parse(path: &Path, text: &str) -> Result<Self, KubeconfigError> {
        let parsed = parse_yaml(text)
            .or_else(|error| with_unnamed_clusters(text).ok_or(error))
            .and_then(|config| check(&config).map(|()| config));
        let config = parsed.map_err(|error| KubeconfigError::invalid(path, error))?;
        let has_comments = text.lines().any(|line| line.trim_start().starts_with('#'));
        let path =
            std::path::absolute(path).map_err(|error| KubeconfigError::unreadable(path, error))?;
        Ok(Self { path, config, has_comments })
    }

    /// The absolute path. A symlink is not resolved: relative paths in the file are relative to the
    /// directory of the symlink, and a write replaces the symlink.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The content as it was read, with relative paths.
    pub fn config(&self) -> &Kubeconfig {
        &self.config
    }

    /// Whether the file has comments, which a write drops.
    pub fn has_comments(&self) -> bool {
        self.has_comments
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

fn parse_yaml(text: &str) -> Result<Kubeconfig, ContentError> {
    let mut track = Track::new();
    let parsed = serde_saphyr::with_deserializer_from_str_with_options(text, options(), |yaml| {
        Kubeconfig::deserialize(Deserializer::new(yaml, &mut track))
    });
    parsed.map_err(|error| {
        let path = track.path().to_string();
        // The path of an unknown key ends with a question mark.
        let path = path.trim_end_matches('?').trim_end_matches('.');
        if path.is_empty() && matches!(error, YamlError::Unexpected { .. }) {
            return ContentError::NotMap;
        }
        let (line, mistake) = describe_yaml_error(text, &error);
        ContentError::Value { line, key: path.to_owned(), mistake }
    })
}

/// Parses a kubeconfig in which a context names no cluster; the name of its cluster becomes empty. kubectl
/// accepts such a file as long as the context is not used, but [`Kubeconfig`] requires the key. `None` if
/// the file is invalid otherwise; the error of [`parse_yaml`], which has a line number, is then reported.
fn with_unnamed_clusters(text: &str) -> Option<Kubeconfig> {
    let mut tree: Value = serde_saphyr::from_str_with_options(text, options()).ok()?;
    for named in tree.get_mut("contexts")?.as_array_mut()? {
        if let Some(context) = named.get_mut("context").and_then(Value::as_object_mut) {
            let cluster = context.entry("cluster").or_insert(Value::Null);
            if cluster.is_null() {
                *cluster = Value::String(String::new());
            }
        }
    }
    serde_json::from_value(tree).ok()
}

/// kubectl reads YAML 1.1, in which the octal number `017` is 15.
fn options() -> Options {
    serde_saphyr::options! {
        alias_limits: serde_saphyr::alias_limits! { max_total_replayed_events: MAX_ALIAS_EVENTS },
        legacy_octal_numbers: true,
        with_snippet: false,
    }
}

/// Checks what [`Kubeconfig`] does not: the kind, and that names are unique.
fn check(config: &Kubeconfig) -> Result<(), ContentError> {
    match config.kind.as_deref() {
        None | Some("" | "Config") => {}
        Some(other) => return Err(ContentError::OtherKind(other.to_owned())),
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
pub(super) fn to_yaml(value: &impl Serialize) -> Result<String, Unwritable> {
    let options = serde_saphyr::ser_options! { prefer_block_scalars: false };
    serde_saphyr::to_string_with_options(value, options).map_err(|_| Unwritable::Value)
}

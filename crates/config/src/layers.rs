//! The layers of a configuration: built-in defaults < file < environment < flags.
//!
//! Each layer is checked before the `config` crate merges it: unknown keys and sections that are
//! not maps are reported and left out, so no layer can hide a mistake of another one.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use clap::Args;
use config::{Map, Source, Value, ValueKind};
use jackstay_core::discovery::address::quote;

use super::errors::{ConfigError, join, nearest};
use super::node::describe;
use super::report::{COMMAND_LINE, DEFAULT, ENV_PREFIX, ENVIRONMENT, Report};
use super::yaml::{self, YamlMistake};

/// Every key outside lists, with its default as text.
const SCALARS: [(&str, &str); 21] = [
    ("admin.bind", "127.0.0.1:9643"),
    ("admin.socket", ""),
    ("admin.metrics_bind", ""),
    ("admin.metrics_cert_file", ""),
    ("admin.metrics_key_file", ""),
    ("admin.metrics_client_ca_file", ""),
    ("admin.metrics_client_name", ""),
    ("admin.metrics_review_upstream", ""),
    ("state_dir", "/var/lib/jackstay"),
    ("workers", "1"),
    ("identity_lane", "true"),
    // Has no bit that kube-proxy (0x4000, 0x8000), Cilium (0x0f00), the AWS CNI (0x80) or Calico
    // (0xffff0000) uses. deploy/nftables has the same value.
    ("mark", "0x306a"),
    ("memory_limit", "auto"),
    ("log.level", "info"),
    ("log.format", "text"),
    ("log.access", "errors"),
    ("shutdown.drain_timeout", "20s"),
    ("sandbox.not_dumpable", "on"),
    ("sandbox.no_new_privs", "on"),
    ("sandbox.seccomp", "on"),
    ("sandbox.landlock", "on"),
];

/// The lists, which only the file can set.
const LISTS: [&str; 2] = ["upstreams", "listeners"];

/// Scalar values of flags, as text. They override every other layer.
#[derive(Debug, Clone, Default, Args)]
pub struct Overrides {
    /// Override admin.bind.
    #[arg(long = "admin", value_name = "ADDR")]
    pub admin_bind: Option<String>,
    /// Override workers: a number, or `auto`.
    #[arg(long, value_name = "N")]
    pub workers: Option<String>,
    /// Override log.level.
    #[arg(long, value_name = "LEVEL")]
    pub log_level: Option<String>,
    /// Override log.format.
    #[arg(long, value_name = "FORMAT")]
    pub log_format: Option<String>,
    /// Override log.access.
    #[arg(long = "access-log", value_name = "REQUESTS")]
    pub log_access: Option<String>,
}

/// One layer. It contains only keys of the schema, because the `config` crate reads top-level keys
/// as path expressions: `a[99999999]` allocates a list of that length.
#[derive(Debug, Clone, Default)]
pub(super) struct Layer(Map<String, Value>);

impl Source for Layer {
    fn clone_into_box(&self) -> Box<dyn Source + Send + Sync> {
        Box::new(self.clone())
    }

    fn collect(&self) -> Result<Map<String, Value>, config::ConfigError> {
        Ok(self.0.clone())
    }
}

impl Layer {
    fn set(&mut self, key: &str, text: &str, origin: &str) {
        let value = Value::new(Some(&origin.to_owned()), ValueKind::String(text.to_owned()));
        self.0.insert(key.to_owned(), value);
    }
}

/// Merges the layers over the defaults; the last one wins.
pub(super) fn merge(layers: [Layer; 3], report: &Report) -> Option<Value> {
    let mut defaults = Layer::default();
    for (key, text) in SCALARS {
        defaults.set(key, text, DEFAULT);
    }
    let mut builder = config::Config::builder().add_source(defaults);
    for layer in layers {
        builder = builder.add_source(layer);
    }
    match builder.build() {
        Ok(merged) => Some(merged.cache),
        Err(error) => {
            report.error("", format!("cannot be merged: {error}"));
            None
        }
    }
}

/// The layer of the file; `None` if the file cannot be parsed to its end.
pub(super) fn file_layer(text: &str, report: &Report) -> Option<Layer> {
    let origin = report.file.clone();
    let parsed = yaml::parse(text, &origin);
    // The text of the flags has one line.
    if report.file != COMMAND_LINE {
        report.lines.replace(parsed.lines);
    }
    for YamlMistake { path, line, message } in parsed.errors {
        report.add(ConfigError { line, ..ConfigError::new(&*report.file, &path, message) });
    }
    let known = top_level_keys();
    let mut layer = Layer::default();
    for (key, value) in parsed.tree?.into_iter().collect::<BTreeMap<_, _>>() {
        let keys = keys_of(&key);
        if !known.contains(&key.as_str()) {
            report.unknown("", &key, &known);
        } else if value.kind == ValueKind::Nil {
            // A key without a value has its default, for example if all keys below it are comments.
        } else if keys.is_empty() {
            layer.0.insert(key, value);
        } else if let ValueKind::Table(mut table) = value.kind {
            let mut unknown: Vec<String> = table.keys().cloned().collect();
            unknown.retain(|k| !keys.contains(&k.as_str()));
            unknown.sort();
            for k in unknown {
                report.unknown(&key, &k, &keys);
            }
            table.retain(|k, value| keys.contains(&k.as_str()) && value.kind != ValueKind::Nil);
            layer.0.insert(key, Value::new(Some(&origin), ValueKind::Table(table)));
        } else {
            let found = describe(&value.kind);
            report.error(&key, format!("expected a map of keys, found {found}"));
        }
    }
    Some(layer)
}

fn top_level_keys() -> Vec<&'static str> {
    let scalars = SCALARS.iter().map(|(key, _)| key.split('.').next().unwrap_or(key));
    let mut keys: Vec<_> = scalars.chain(LISTS).collect();
    keys.dedup();
    keys
}

/// The keys of a section; empty if there is no such section.
fn keys_of(section: &str) -> Vec<&'static str> {
    let split = SCALARS.iter().filter_map(|(key, _)| key.split_once('.'));
    split.filter(|(name, _)| *name == section).map(|(_, key)| key).collect()
}

/// The layer of environment variables.
pub(super) fn env_layer(env: impl IntoIterator<Item = (String, String)>, report: &Report) -> Layer {
    let mut layer = Layer::default();
    let variables: BTreeMap<String, String> =
        env.into_iter().filter(|(name, _)| name.starts_with(ENV_PREFIX)).collect();
    for (name, value) in variables {
        let key = name[ENV_PREFIX.len()..].to_lowercase().replace("__", ".");
        match env_error(&key) {
            None => layer.set(&key, &value, ENVIRONMENT),
            Some(message) => {
                let path =
                    if name.chars().all(|c| c.is_ascii_graphic()) { name } else { quote(&name) };
                report.add(ConfigError::new(ENVIRONMENT, &path, message));
            }
        }
    }
    layer
}

/// Why a variable cannot set `key`.
fn env_error(key: &str) -> Option<String> {
    let scalars: Vec<&str> = SCALARS.iter().map(|(key, _)| *key).collect();
    if scalars.contains(&key) {
        return None;
    }
    let first = key.split(['.', '[']).next().unwrap_or_default();
    if LISTS.contains(&first) {
        return Some(format!("{first} is a list: a variable can only set a value outside lists"));
    }
    let keys = keys_of(key);
    if !keys.is_empty() {
        return Some(format!("{key} is a section; set one of its keys: {}", keys.join(", ")));
    }
    let mut message = format!("there is no configuration key {}", join("", key));
    if let Some(near) = nearest(key, &scalars) {
        let name = near.replace('.', "__").to_uppercase();
        let _ = write!(message, "; did you mean {ENV_PREFIX}{name}?");
    }
    Some(message)
}

/// The layer of flags.
pub(super) fn flag_layer(overrides: &Overrides) -> Layer {
    let mut layer = Layer::default();
    for (key, value) in [
        ("admin.bind", &overrides.admin_bind),
        ("workers", &overrides.workers),
        ("log.level", &overrides.log_level),
        ("log.format", &overrides.log_format),
        ("log.access", &overrides.log_access),
    ] {
        if let Some(value) = value {
            layer.set(key, value, COMMAND_LINE);
        }
    }
    layer
}

//! The layers a configuration is read from: built-in defaults < file < environment < flags.
//!
//! A layer is brought into shape before the `config` crate merges it: unknown keys and sections
//! that are no sections are reported and left out, so that nothing in one layer can hide a mistake
//! in another. The merged tree then goes to `validate`.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::io::Read;
use std::path::Path;

use config::{Map, Source, Value, ValueKind};

use super::errors::{ConfigError, ConfigErrors, join, nearest, quote};
use super::model::Config;
use super::node::{COMMAND_LINE, DEFAULT, ENVIRONMENT, Node, PREFIX, Report};
use super::yaml::{self, describe};
use super::{rules, validate};

/// Largest configuration file read.
const MAX_FILE: u64 = 1 << 20;

/// Every value outside of lists, with its default as a variable would give it.
const SCALARS: [(&str, &str); 9] = [
    ("admin.bind", "127.0.0.1:9643"),
    ("admin.socket", ""),
    ("state_dir", "/var/lib/jackstay"),
    ("workers", "1"),
    // Clear of the bits that kube-proxy (0x4000, 0x8000), Cilium (0x0f00), the AWS CNI
    // (0x80) and Calico (0xffff0000) give a meaning to; deploy/nftables has the same.
    ("mark", "0x306a"),
    ("log.level", "info"),
    ("log.format", "text"),
    ("log.access", "errors"),
    ("shutdown.drain_timeout", "20s"),
];

/// The lists, which only the file can fill.
const LISTS: [&str; 2] = ["upstreams", "listeners"];

/// A configuration that met every rule.
#[derive(Debug, Clone)]
pub struct Loaded {
    /// The configuration.
    pub config: Config,
    /// What is allowed and probably not meant, one line each.
    pub warnings: Vec<String>,
}

/// A configuration as far as it could be read, with every mistake that was found on the way.
#[derive(Debug)]
pub struct Draft {
    /// What was read, with stand-ins (empty paths, defaults) in the place of values that are wrong.
    /// `None`: the file cannot be read to its end.
    pub config: Option<Config>,
    /// Every mistake; none: the configuration can be used.
    pub errors: Vec<ConfigError>,
    /// What is allowed and probably not meant, one line each.
    pub warnings: Vec<String>,
}

impl Draft {
    fn new(config: Option<Config>, report: Report) -> Self {
        Self { config, errors: report.errors, warnings: report.warnings }
    }

    /// The configuration, if nothing is wrong with it.
    ///
    /// # Errors
    /// Every mistake.
    pub fn finish(self) -> Result<Loaded, ConfigErrors> {
        match self.config {
            Some(config) if self.errors.is_empty() => {
                Ok(Loaded { config, warnings: self.warnings })
            }
            _ => Err(ConfigErrors(self.errors)),
        }
    }
}

/// Values given as flags, as text; they win over every other layer.
#[derive(Debug, Clone, Default)]
pub struct Overrides {
    /// `admin.bind`
    pub admin_bind: Option<String>,
    /// `state_dir`
    pub state_dir: Option<String>,
    /// `workers`
    pub workers: Option<String>,
    /// `log.level`
    pub log_level: Option<String>,
    /// `log.format`
    pub log_format: Option<String>,
    /// `log.access`
    pub log_access: Option<String>,
    /// `shutdown.drain_timeout`
    pub drain_timeout: Option<String>,
}

/// The variables of this process that are ours. Unlike `std::env::vars` it does not panic when
/// another program's variable is not UTF-8.
pub fn environment() -> Vec<(String, String)> {
    let text = |value: std::ffi::OsString| value.to_string_lossy().into_owned();
    let all = std::env::vars_os().map(|(name, value)| (text(name), text(value)));
    all.filter(|(name, _)| name.starts_with(PREFIX)).collect()
}

/// Reads and validates a configuration; on failure every mistake is reported.
pub fn load(
    path: &Path,
    env: impl IntoIterator<Item = (String, String)>,
    overrides: &Overrides,
) -> Result<Loaded, ConfigErrors> {
    draft(path, env, overrides).finish()
}

/// Reads a configuration as far as it goes, for callers that look at the files it names whatever
/// else is wrong with it.
pub fn draft(
    path: &Path,
    env: impl IntoIterator<Item = (String, String)>,
    overrides: &Overrides,
) -> Draft {
    let mut report = Report { file: path.display().to_string(), ..Report::default() };
    let config = read_all(path, env, overrides, &mut report);
    Draft::new(config, report)
}

/// Validates the text of a file that is still to be written at `path`.
pub fn validate_text(path: &Path, text: &str) -> Result<Loaded, ConfigErrors> {
    let mut report = Report { file: path.display().to_string(), ..Report::default() };
    let config = assemble(Some(text), [], &Overrides::default(), &mut report);
    Draft::new(config, report).finish()
}

/// A configuration without a file: connections to any of `listen` are passed through to the
/// `upstream` apiservers. Everything else has its default, but nothing is kept on disk; the
/// environment and `overrides` count as ever.
///
/// # Errors
/// Every mistake, each with the flag that it is about.
pub fn from_flags(
    listen: &[String],
    upstream: &[String],
    env: impl IntoIterator<Item = (String, String)>,
    overrides: &Overrides,
) -> Result<Loaded, ConfigErrors> {
    draft_from_flags(listen, upstream, env, overrides).finish()
}

/// What [`from_flags`] makes, as far as it goes.
pub fn draft_from_flags(
    listen: &[String],
    upstream: &[String],
    env: impl IntoIterator<Item = (String, String)>,
    overrides: &Overrides,
) -> Draft {
    let mut report = Report { file: COMMAND_LINE.to_owned(), ..Report::default() };
    let layer = flags_as_file(listen, upstream);
    let config = read_layers(Some(&layer), env, overrides, &mut report);
    // Nobody has written the paths of a file.
    let flags = |text: &str| {
        text.replace("listeners[0].bind[", "--listen[")
            .replace("upstreams[0].endpoints[", "--upstream[")
    };
    for error in &mut report.errors {
        error.path = flags(&error.path);
        error.message = flags(&error.message);
    }
    Draft::new(config, report)
}

fn flags_as_file(listen: &[String], upstream: &[String]) -> Layer {
    let origin = COMMAND_LINE.to_owned();
    let value = |kind: ValueKind| Value::new(Some(&origin), kind);
    let text = |text: &str| value(ValueKind::String(text.to_owned()));
    let list =
        |items: &[String]| value(ValueKind::Array(items.iter().map(|item| text(item)).collect()));
    let one = |entries: Vec<(&str, Value)>| {
        let map = entries.into_iter().map(|(key, value)| (key.to_owned(), value)).collect();
        value(ValueKind::Array(vec![value(ValueKind::Table(map))]))
    };
    let mut layer = Layer::default();
    layer.set("state_dir", "", COMMAND_LINE);
    let upstreams = one(vec![("name", text("apiservers")), ("endpoints", list(upstream))]);
    let listeners = one(vec![
        ("name", text("passthrough")),
        ("mode", text("passthrough")),
        ("bind", list(listen)),
        ("upstream", text("apiservers")),
    ]);
    layer.0.insert("upstreams".to_owned(), upstreams);
    layer.0.insert("listeners".to_owned(), listeners);
    layer
}

fn read_all(
    path: &Path,
    env: impl IntoIterator<Item = (String, String)>,
    overrides: &Overrides,
    report: &mut Report,
) -> Option<Config> {
    let text = match read(path) {
        Ok(text) => text,
        Err(message) => {
            report.error("", message);
            String::new()
        }
    };
    let text = report.errors.is_empty().then_some(text);
    assemble(text.as_deref(), env, overrides, report)
}

/// Puts the layers together; `text` is the file, if it could be read.
fn assemble(
    text: Option<&str>,
    env: impl IntoIterator<Item = (String, String)>,
    overrides: &Overrides,
    report: &mut Report,
) -> Option<Config> {
    let file = text.and_then(|text| file_layer(text, report));
    read_layers(file.as_ref(), env, overrides, report)
}

fn read_layers(
    file: Option<&Layer>,
    env: impl IntoIterator<Item = (String, String)>,
    overrides: &Overrides,
    report: &mut Report,
) -> Option<Config> {
    let env = env_layer(env, report);
    let flags = flag_layer(overrides);
    let root = merge([file.cloned().unwrap_or_default(), env, flags], report)?;
    // Without the file's lists there is no sense in saying what they lack.
    file?;
    let (config, seen) = validate::walk(&Node::root(&root), report);
    rules::check(&seen, report);
    Some(config)
}

fn read(path: &Path) -> Result<String, String> {
    let mut bytes = Vec::new();
    let file = std::fs::File::open(path);
    if let Err(error) = file.and_then(|file| file.take(MAX_FILE + 1).read_to_end(&mut bytes)) {
        let reason = error.to_string();
        let reason = reason.split(" (os error").next().unwrap_or_default();
        return Err(format!("cannot read the configuration: {reason}"));
    }
    if bytes.len() as u64 > MAX_FILE {
        return Err("larger than 1 MiB: this is not a configuration file".to_owned());
    }
    match String::from_utf8(bytes) {
        Ok(text) if !text.contains('\0') => Ok(text),
        _ => Err("not a text file in UTF-8".to_owned()),
    }
}

/// One layer for the `config` crate. All its keys are in the schema, which matters: that crate
/// reads top-level keys as path expressions (`a[99999999]` allocates).
#[derive(Debug, Clone, Default)]
struct Layer(Map<String, Value>);

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

fn merge(layers: [Layer; 3], report: &mut Report) -> Option<Value> {
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

/// The known keys of the file; `None` if it is not readable to its end.
fn file_layer(text: &str, report: &mut Report) -> Option<Layer> {
    let origin = report.file.clone();
    let parsed = yaml::parse(text, &origin);
    for (path, message) in parsed.errors {
        report.error(&path, message);
    }
    if !parsed.complete {
        return None;
    }
    let known: Vec<&str> = sections().chain(LISTS).collect();
    let mut layer = Layer::default();
    let mut entries: Vec<(String, Value)> = parsed.tree.into_iter().collect();
    entries.sort_by(|a, b| a.0.cmp(&b.0));
    for (key, value) in entries {
        let keys = keys_of(&key);
        if !known.contains(&key.as_str()) {
            report.unknown("", &key, &known);
        } else if value.kind == ValueKind::Nil {
            // A key with nothing behind it, as when all below it is commented out.
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

/// The top-level keys that are no lists.
fn sections() -> impl Iterator<Item = &'static str> {
    let mut last = "";
    SCALARS.iter().filter_map(move |(key, _)| {
        let section = key.split('.').next().unwrap_or(key);
        (section != std::mem::replace(&mut last, section)).then_some(section)
    })
}

/// The keys of a section; none for what is no section.
fn keys_of(section: &str) -> Vec<&'static str> {
    let split = SCALARS.iter().filter_map(|(key, _)| key.split_once('.'));
    split.filter(|(name, _)| *name == section).map(|(_, key)| key).collect()
}

fn env_layer(env: impl IntoIterator<Item = (String, String)>, report: &mut Report) -> Layer {
    let mut layer = Layer::default();
    let ours = env.into_iter().filter(|(name, _)| name.starts_with(PREFIX));
    let variables: HashMap<String, String> = ours.collect();
    let mut variables: Vec<(String, String)> = variables.into_iter().collect();
    variables.sort();
    for (name, value) in variables {
        let key = name[PREFIX.len()..].to_lowercase().replace("__", ".");
        match env_fault(&key) {
            None => layer.set(&key, &value, ENVIRONMENT),
            Some(message) => {
                let path =
                    if name.chars().all(|c| c.is_ascii_graphic()) { name } else { quote(&name) };
                report.errors.push(ConfigError { file: ENVIRONMENT.to_owned(), path, message });
            }
        }
    }
    layer
}

/// Why a variable cannot set `key`.
fn env_fault(key: &str) -> Option<String> {
    let scalars: Vec<&str> = SCALARS.iter().map(|(key, _)| *key).collect();
    if scalars.contains(&key) {
        return None;
    }
    let first = key.split(['.', '[']).next().unwrap_or_default();
    if LISTS.contains(&first) {
        return Some(format!(
            "{first} is a list: a variable can only set a value outside of lists"
        ));
    }
    let keys = keys_of(key);
    if !keys.is_empty() {
        return Some(format!("{key} is a section; set one of its keys: {}", keys.join(", ")));
    }
    let mut message = format!("there is no configuration key {}", join("", key));
    if let Some(near) = nearest(key, &scalars) {
        let name = near.replace('.', "__").to_uppercase();
        let _ = write!(message, "; did you mean {PREFIX}{name}?");
    }
    Some(message)
}

fn flag_layer(overrides: &Overrides) -> Layer {
    let mut layer = Layer::default();
    for (key, value) in [
        ("admin.bind", &overrides.admin_bind),
        ("state_dir", &overrides.state_dir),
        ("workers", &overrides.workers),
        ("log.level", &overrides.log_level),
        ("log.format", &overrides.log_format),
        ("log.access", &overrides.log_access),
        ("shutdown.drain_timeout", &overrides.drain_timeout),
    ] {
        if let Some(value) = value {
            layer.set(key, value, COMMAND_LINE);
        }
    }
    layer
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Mode;
    use std::path::PathBuf;

    fn shipped() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("config/jackstay.yaml")
    }

    /// The shipped file with nothing but what has no default.
    const BARE: &str = "
upstreams:
  - name: control-plane
    endpoints: ['10.0.0.11:6443', '10.0.0.12:6443', '[fd00::13]:6443']
    tls: {ca_file: /etc/kubernetes/pki/ca.crt}
listeners:
  - name: apiserver
    bind: ['127.0.0.1:7443', '[::1]:7443']
    upstream: control-plane
    tls: {cert_file: /etc/jackstay/tls.crt, key_file: /etc/jackstay/tls.key}
    client_ca_file: /etc/kubernetes/pki/ca.crt
    identities:
      - cert_file: /var/lib/kubelet/pki/kubelet-client-current.pem
        key_file: /var/lib/kubelet/pki/kubelet-client-current.pem
  - name: passthrough
    bind: ['127.0.0.1:7444', '[::1]:7444']
    mode: passthrough
    upstream: control-plane
    routes: [{server_names: [kubernetes.default.svc], upstream: control-plane}]
";

    fn load_text(text: &str) -> Result<Loaded, ConfigErrors> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        load(file.path(), [], &Overrides::default())
    }

    #[test]
    fn the_shipped_file_says_the_defaults() {
        let shipped = load(&shipped(), [], &Overrides::default()).unwrap();
        assert_eq!(shipped.warnings, [""; 0]);
        assert_eq!(shipped.config, load_text(BARE).unwrap().config);
    }

    #[test]
    fn the_shipped_file_has_every_key() {
        let mut report = Report { file: "f".into(), ..Report::default() };
        read_all(&shipped(), [], &Overrides::default(), &mut report).unwrap();
        assert_eq!(report.defaulted, [""; 0]);
        let text = std::fs::read_to_string(shipped()).unwrap();
        for line in text.lines().filter(|line| !line.trim_start().starts_with('#')) {
            let section = line.trim_end().ends_with(':');
            let item = line.trim_start().starts_with("- \"");
            let said = line.contains(" # ") || section || item || line.trim().is_empty();
            assert!(said, "no word about {line}");
        }
    }

    #[test]
    fn what_is_effective_can_be_loaded() {
        let config = load_text(BARE).unwrap().config;
        let text = super::super::effective(&config).to_string();
        assert_eq!(load_text(&text).unwrap().config, config);
        let mut other = config;
        other.state_dir = None;
        other.workers = 3;
        other.upstreams[0].health.suspect_after = Some(std::time::Duration::from_millis(300));
        other.upstreams[0].tls.server_name = Some("kubernetes.default.svc".into());
        if let Mode::Terminate(terminate) = &mut other.listeners[0].mode {
            terminate.resume_groups = vec!["example.com".into()];
        }
        if let Mode::Passthrough(passthrough) = &mut other.listeners[1].mode {
            passthrough.idle_timeout = Some(std::time::Duration::from_secs(90));
            passthrough.routes.clear();
            passthrough.rebalance = true;
        }
        let text = super::super::effective(&other).to_string();
        assert_eq!(load_text(&text).unwrap().config, other);
    }
}

//! Reads and validates a configuration.
//!
//! A load merges the layers (`layers`), walks the merged tree (`schema`) and checks the rules that
//! concern more than one value (`rules`).

use std::fmt;
use std::io::{self, Read};
use std::path::Path;

use serde_json::json;

use super::errors::{ConfigError, ConfigErrors, KeyLines, describe_io_error};
use super::layers::{Layer, Overrides, env_layer, file_layer, flag_layer, merge};
use super::model::Config;
use super::node::Node;
use super::report::{COMMAND_LINE, ENV_PREFIX, Report};
use super::{rules, schema};

/// Largest configuration file in bytes. The shipped file has 8 KiB.
const MAX_FILE: u64 = 1 << 20;

/// A valid configuration.
#[derive(Debug, Clone)]
pub struct LoadedConfig {
    /// The configuration.
    pub config: Config,
    /// Settings that are valid but probably a mistake, one line each.
    pub warnings: Vec<String>,
}

/// A configuration that may have mistakes.
#[derive(Debug)]
pub struct ConfigDraft {
    /// The values, with a placeholder (an empty path, a default) for each invalid one. `None` if the
    /// file cannot be parsed to its end.
    pub config: Option<Config>,
    /// Every mistake. The configuration is valid if the list is empty.
    pub errors: Vec<ConfigError>,
    /// Settings that are valid but probably a mistake, one line each.
    pub warnings: Vec<String>,
    /// The lines of the keys in the file.
    pub lines: KeyLines,
}

impl ConfigDraft {
    fn new(config: Option<Config>, report: Report) -> Self {
        let (errors, warnings, lines) = report.finish();
        Self { config, errors, warnings, lines }
    }

    /// The configuration, if it is valid.
    ///
    /// # Errors
    /// Every mistake.
    pub fn finish(self) -> Result<LoadedConfig, ConfigErrors> {
        match self.config {
            Some(config) if self.errors.is_empty() => {
                Ok(LoadedConfig { config, warnings: self.warnings })
            }
            _ => Err(ConfigErrors(self.errors)),
        }
    }
}

/// The variables of this process that set configuration keys (`JACKSTAY__…`).
///
/// Other variables need not be UTF-8; `std::env::vars` would panic on them.
pub fn environment() -> Vec<(String, String)> {
    let text = |value: std::ffi::OsString| value.to_string_lossy().into_owned();
    let all = std::env::vars_os().map(|(name, value)| (text(name), text(value)));
    all.filter(|(name, _)| name.starts_with(ENV_PREFIX)).collect()
}

/// Reads and validates a configuration.
///
/// # Errors
/// Every mistake.
pub fn load(
    path: &Path,
    env: impl IntoIterator<Item = (String, String)>,
    overrides: &Overrides,
) -> Result<LoadedConfig, ConfigErrors> {
    draft(path, env, overrides).finish()
}

/// Reads a configuration with its mistakes, for callers that use it even if it is not valid.
pub fn draft(
    path: &Path,
    env: impl IntoIterator<Item = (String, String)>,
    overrides: &Overrides,
) -> ConfigDraft {
    let report = Report::about(path.display().to_string());
    let config = read_file(path, env, overrides, &report);
    ConfigDraft::new(config, report)
}

/// Validates a text before it is written to `path`.
///
/// # Errors
/// Every mistake.
pub fn validate_text(path: &Path, text: &str) -> Result<LoadedConfig, ConfigErrors> {
    let report = Report::about(path.display().to_string());
    let file = file_layer(text, &report);
    let config = validate_layers(file, [], &Overrides::default(), &report);
    ConfigDraft::new(config, report).finish()
}

/// A configuration without a file: connections to any of `listen` are passed through to the
/// `upstream` apiservers. The environment and `overrides` apply; every other key has its default,
/// except that `state_dir` is empty. Each mistake is reported with its flag.
pub fn draft_from_flags(
    listen: &[String],
    upstream: &[String],
    env: impl IntoIterator<Item = (String, String)>,
    overrides: &Overrides,
) -> ConfigDraft {
    // The equivalent configuration file. Every JSON document is YAML.
    let file = json!({
        "state_dir": "",
        "upstreams": [{ "name": "apiservers", "endpoints": upstream }],
        "listeners": [{
            "name": "passthrough",
            "mode": "passthrough",
            "bind": listen,
            "upstream": "apiservers",
        }],
    });
    let report = Report::about(COMMAND_LINE);
    let layer = file_layer(&file.to_string(), &report);
    let config = validate_layers(layer, env, overrides, &report);
    let mut draft = ConfigDraft::new(config, report);
    let name_flags = |text: &str| {
        text.replace("listeners[0].bind[", "--listen[")
            .replace("upstreams[0].endpoints[", "--endpoint[")
    };
    for error in &mut draft.errors {
        error.path = name_flags(&error.path);
        error.message = name_flags(&error.message);
    }
    draft
}

fn read_file(
    path: &Path,
    env: impl IntoIterator<Item = (String, String)>,
    overrides: &Overrides,
    report: &Report,
) -> Option<Config> {
    let file = match read_text(path) {
        Ok(text) => file_layer(&text, report),
        Err(error) => {
            report.error("", error.to_string());
            None
        }
    };
    validate_layers(file, env, overrides, report)
}

/// Merges the layers and validates the result. Without a `file` it reports only the mistakes of the
/// environment.
fn validate_layers(
    file: Option<Layer>,
    env: impl IntoIterator<Item = (String, String)>,
    overrides: &Overrides,
    report: &Report,
) -> Option<Config> {
    let env = env_layer(env, report);
    let root = merge([file?, env, flag_layer(overrides)], report)?;
    let (config, references) = schema::read(&Node::root(&root, report));
    rules::check(&references, report);
    Some(config)
}

/// Why the file has no text that can be a configuration.
enum FileError {
    Io(io::Error),
    TooLarge,
    NotText,
}

impl fmt::Display for FileError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Io(error) => {
                write!(f, "cannot read the configuration: {}", describe_io_error(error))
            }
            Self::TooLarge => f.write_str("larger than 1 MiB: this is not a configuration file"),
            Self::NotText => f.write_str("not a text file in UTF-8"),
        }
    }
}

fn read_text(path: &Path) -> Result<String, FileError> {
    let mut bytes = Vec::new();
    let file = std::fs::File::open(path).map_err(FileError::Io)?;
    file.take(MAX_FILE + 1).read_to_end(&mut bytes).map_err(FileError::Io)?;
    if bytes.len() as u64 > MAX_FILE {
        return Err(FileError::TooLarge);
    }
    match String::from_utf8(bytes) {
        Ok(text) if !text.contains('\0') => Ok(text),
        _ => Err(FileError::NotText),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Mode;
    use std::path::PathBuf;

    fn shipped() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../config/jackstay.yaml")
    }

    /// The shipped file without the keys that have a default.
    const WITHOUT_DEFAULTS: &str = "
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
      - {kubeconfig: /etc/kubernetes/admin.conf, user: kubernetes-admin}
  - name: passthrough
    bind: ['127.0.0.1:7444', '[::1]:7444']
    mode: passthrough
    upstream: control-plane
    routes: [{server_names: [kubernetes.default.svc], upstream: control-plane}]
";

    fn load_text(text: &str) -> Result<LoadedConfig, ConfigErrors> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        load(file.path(), [], &Overrides::default())
    }

    #[test]
    fn shipped_file_equals_the_defaults() {
        let shipped = load(&shipped(), [], &Overrides::default()).unwrap();
        assert_eq!(shipped.warnings, [""; 0]);
        assert_eq!(shipped.config, load_text(WITHOUT_DEFAULTS).unwrap().config);
    }

    #[test]
    fn shipped_file_has_a_comment_for_every_key() {
        let report = Report::about("f");
        read_file(&shipped(), [], &Overrides::default(), &report).unwrap();
        assert_eq!(report.defaulted.into_inner(), [""; 0]);
        let text = std::fs::read_to_string(shipped()).unwrap();
        for line in text.lines().filter(|line| !line.trim_start().starts_with('#')) {
            let section = line.trim_end().ends_with(':');
            let item = line.trim_start().starts_with("- \"");
            let has_comment = line.contains(" # ") || section || item || line.trim().is_empty();
            assert!(has_comment, "no comment beside {line}");
        }
    }

    #[test]
    fn printed_configuration_loads_to_the_same_values() {
        let config = load_text(WITHOUT_DEFAULTS).unwrap().config;
        let text = config.to_json().to_string();
        assert_eq!(load_text(&text).unwrap().config, config);
        let mut other = config;
        other.state_dir = None;
        other.workers = 3;
        other.upstreams[0].health.suspect_after = Some(std::time::Duration::from_millis(300));
        other.upstreams[0].tls.server_name = Some("kubernetes.default.svc".into());
        if let Mode::Terminate(terminate) = &mut other.listeners[0].mode {
            terminate.never_resume_groups = vec!["example.com".into()];
            terminate.heartbeats =
                vec![crate::HeartbeatResource::parse("machines.example.com/status").unwrap()];
            terminate.passed_through = Some(Box::new(crate::PassedThrough {
                server_names: vec!["kubernetes.default.svc".into(), "*.example.com".into()],
                flows: crate::FlowSettings { rebalance: true, ..Default::default() },
            }));
            other.upstreams[0].used_by.passthrough = true;
        }
        if let Mode::Passthrough(passthrough) = &mut other.listeners[1].mode {
            passthrough.flows.idle_timeout = Some(std::time::Duration::from_secs(90));
            passthrough.routes.clear();
            passthrough.flows.rebalance = true;
        }
        let text = other.to_json().to_string();
        assert_eq!(load_text(&text).unwrap().config, other);
    }
}

//! Exec plugins: commands that print a credential (`client.authentication.k8s.io`, the credential
//! plugins of client-go). jackstay's commands run a plugin when they need the user's credential; the
//! proxy runs none.

use std::error::Error;
use std::fmt;
use std::io::{self, IsTerminal};
use std::process::{Command, ExitStatus, Stdio};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

use crate::model::{Cluster, ExecConfig, ExecInteractiveMode};

/// Maximum size of an answer in bytes: room for a certificate chain, its key and a token.
const MAX_ANSWER: usize = 1 << 20;

/// An exec plugin of a user.
#[derive(Clone)]
pub struct ExecPlugin {
    /// The command.
    pub command: String,
    args: Vec<String>,
    env: Vec<(String, String)>,
    api_version: String,
    interactive_mode: ExecInteractiveMode,
    /// The cluster that is described to the plugin, if it asks for that (`provideClusterInfo`).
    cluster: Option<Box<Cluster>>,
}

impl fmt::Debug for ExecPlugin {
    /// Prints only the command; arguments and variables may hold secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ExecPlugin({:?})", self.command)
    }
}

/// Why an exec plugin yields no credential.
#[derive(Debug)]
pub struct ExecError {
    /// The command of the plugin.
    pub command: String,
    /// What went wrong.
    pub problem: ExecProblem,
}

/// What went wrong with an exec plugin.
#[derive(Debug)]
pub enum ExecProblem {
    /// It needs a terminal on standard input.
    NoTerminal,
    /// It needs the cluster's CA, which cannot be read.
    UnreadableCa,
    /// It cannot be started.
    Start(io::Error),
    /// It ended with a failure.
    Failed(ExitStatus),
    /// Its answer exceeds 1 MiB.
    TooLong,
    /// Its answer is not an `ExecCredential`.
    NotExecCredential,
    /// Its answer has neither a token nor a certificate.
    Empty,
}

impl fmt::Display for ExecError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the exec plugin {:?} ", self.command)?;
        match &self.problem {
            ExecProblem::NoTerminal => {
                f.write_str("needs a terminal on standard input (interactiveMode: Always)")
            }
            ExecProblem::UnreadableCa => {
                f.write_str("needs the cluster's CA, which cannot be read")
            }
            ExecProblem::Start(error) => write!(f, "cannot be run: {error}"),
            ExecProblem::Failed(status) => write!(f, "failed: {status}"),
            ExecProblem::TooLong => f.write_str("answered more than 1 MiB"),
            ExecProblem::NotExecCredential => f.write_str("did not answer with an ExecCredential"),
            ExecProblem::Empty => f.write_str("returned neither a token nor a certificate"),
        }
    }
}

impl Error for ExecError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match &self.problem {
            ExecProblem::Start(error) => Some(error),
            _ => None,
        }
    }
}

/// The answer of a plugin: a token, a certificate, or both.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct ExecCredential {
    /// A bearer token.
    pub token: Option<String>,
    /// A client certificate and its key, PEM.
    pub certificate: Option<(String, String)>,
}

impl ExecPlugin {
    /// Reads the `exec` of a user; `cluster` is the cluster of the context. `None` if it names no command.
    pub(super) fn new(exec: &ExecConfig, cluster: &Cluster) -> Option<Self> {
        let command = exec.command.clone().filter(|command| !command.is_empty());
        let variable = |entry: &std::collections::HashMap<String, String>| {
            Some((entry.get("name")?.clone(), entry.get("value").cloned().unwrap_or_default()))
        };
        let api_version = exec.api_version.as_deref().unwrap_or("client.authentication.k8s.io/v1");
        Some(Self {
            command: command?,
            args: exec.args.clone().unwrap_or_default(),
            env: exec.env.iter().flatten().filter_map(variable).collect(),
            api_version: api_version.to_owned(),
            interactive_mode: exec.interactive_mode.unwrap_or(ExecInteractiveMode::IfAvailable),
            cluster: exec.provide_cluster_info.then(|| Box::new(cluster.clone())),
        })
    }

    /// Runs the plugin. It writes its messages to the user to the stderr of this process.
    ///
    /// # Errors
    /// The plugin cannot run, fails, or returns no credential.
    pub fn run(&self) -> Result<ExecCredential, ExecError> {
        self.credential().map_err(|problem| ExecError { command: self.command.clone(), problem })
    }

    fn credential(&self) -> Result<ExecCredential, ExecProblem> {
        let interactive = is_interactive(self.interactive_mode, std::io::stdin().is_terminal())
            .ok_or(ExecProblem::NoTerminal)?;
        let mut info = json!({
            "apiVersion": self.api_version, "kind": "ExecCredential",
            "spec": { "interactive": interactive },
        });
        if let Some(cluster) = &self.cluster {
            info["spec"]["cluster"] = describe(cluster).ok_or(ExecProblem::UnreadableCa)?;
        }
        let output = Command::new(&self.command)
            .args(&self.args)
            .envs(self.env.iter().cloned())
            .env("KUBERNETES_EXEC_INFO", info.to_string())
            .stdin(if interactive { Stdio::inherit() } else { Stdio::null() })
            .stderr(Stdio::inherit())
            .output()
            .map_err(ExecProblem::Start)?;
        if !output.status.success() {
            return Err(ExecProblem::Failed(output.status));
        }
        if output.stdout.len() > MAX_ANSWER {
            return Err(ExecProblem::TooLong);
        }
        // The answer is a secret, so no error quotes it.
        let answer: Value =
            serde_json::from_slice(&output.stdout).map_err(|_| ExecProblem::NotExecCredential)?;
        let text = |key: &str| answer["status"][key].as_str().map(ToOwned::to_owned);
        let certificate = text("clientCertificateData").zip(text("clientKeyData"));
        let credential =
            ExecCredential { token: text("token").filter(|token| !token.is_empty()), certificate };
        if credential == ExecCredential::default() {
            return Err(ExecProblem::Empty);
        }
        Ok(credential)
    }
}

/// The name of the extension of a cluster that is meant for plugins.
const EXTENSION: &str = "client.authentication.k8s.io/exec";

/// The description of a cluster for a plugin (`Cluster` of `client.authentication.k8s.io/v1`); `None` if its CA cannot
/// be read.
fn describe(cluster: &Cluster) -> Option<Value> {
    let Cluster { certificate_authority_data: data, certificate_authority: file, .. } = cluster;
    let pem = match (data, file) {
        (Some(data), _) => Some(STANDARD.decode(data).ok()?),
        (None, Some(file)) => Some(std::fs::read(file).ok()?),
        (None, None) => None,
    };
    let with_line_break = |mut pem: Vec<u8>| {
        if pem.last().is_some_and(|last| *last != b'\n') {
            pem.push(b'\n');
        }
        STANDARD.encode(pem)
    };
    let mut extensions = cluster.extensions.iter().flatten();
    let config = extensions.find(|entry| entry.name == EXTENSION).map(|entry| &entry.extension);
    let keys = [
        ("server", json!(cluster.server)),
        ("insecure-skip-tls-verify", json!(cluster.insecure_skip_tls_verify)),
        ("certificate-authority-data", json!(pem.map(with_line_break))),
        ("proxy-url", json!(cluster.proxy_url)),
        ("tls-server-name", json!(cluster.tls_server_name)),
        ("config", json!(config)),
    ];
    Some(keys.into_iter().filter(|(_, value)| !value.is_null()).collect())
}

/// Whether the plugin gets the stdin of this process, which may be a `terminal` (client-go,
/// `plugin/pkg/client/auth/exec`). `None` if the plugin needs a terminal and there is none.
fn is_interactive(mode: ExecInteractiveMode, terminal: bool) -> Option<bool> {
    match mode {
        ExecInteractiveMode::Never => Some(false),
        ExecInteractiveMode::IfAvailable => Some(terminal),
        ExecInteractiveMode::Always => terminal.then_some(true),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plugin(script: &str) -> ExecPlugin {
        let exec = json!({
            "apiVersion": "client.authentication.k8s.io/v1beta1", "command": "/bin/sh",
            "args": ["-c", script], "env": [{ "name": "SUFFIX", "value": "one" }],
            "interactiveMode": "Never",
        });
        ExecPlugin::new(&serde_json::from_value(exec).unwrap(), &Cluster::default()).unwrap()
    }

    #[test]
    fn run_returns_the_token_or_the_certificate_of_the_answer() {
        let token = plugin(r#"echo "{\"status\": {\"token\": \"token-$SUFFIX\"}}""#).run().unwrap();
        assert_eq!((token.token.as_deref(), token.certificate), (Some("token-one"), None));
        let both = r#"echo '{"status": {"clientCertificateData": "c", "clientKeyData": "k"}}'"#;
        assert_eq!(plugin(both).run().unwrap().certificate, Some(("c".into(), "k".into())));
        let versioned = plugin(
            r#"case $KUBERNETES_EXEC_INFO in *v1beta1*) echo '{"status": {"token": "t"}}';; esac"#,
        );
        assert!(versioned.run().is_ok());
    }

    #[test]
    fn run_passes_the_cluster_to_a_plugin_that_asks_for_it() {
        let cluster: Cluster = serde_json::from_value(json!({
            "server": "https://10.0.0.1:6443", "certificate-authority-data": "Y2E=",
            "extensions": [{ "name": "client.authentication.k8s.io/exec",
                             "extension": { "audience": "a" } }],
        }))
        .unwrap();
        // The plugin returns the content of KUBERNETES_EXEC_INFO as its token.
        let script = r#"printf '{"status": {"token": "%s"}}' \
                        "$(printf %s "$KUBERNETES_EXEC_INFO" | sed 's/"/\\"/g')""#;
        let exec_info = |asks: bool| -> Value {
            let exec = json!({ "command": "/bin/sh", "args": ["-c", script],
                               "provideClusterInfo": asks, "interactiveMode": "Never" });
            let exec: ExecConfig = serde_json::from_value(exec).unwrap();
            let answer = ExecPlugin::new(&exec, &cluster).unwrap().run().unwrap();
            serde_json::from_str(&answer.token.unwrap()).unwrap()
        };
        let spec = &exec_info(true)["spec"];
        assert_eq!(spec["cluster"]["server"], "https://10.0.0.1:6443");
        assert_eq!(
            spec["cluster"]["certificate-authority-data"], "Y2EK",
            "the PEM data ends with a line break"
        );
        assert_eq!(spec["cluster"]["config"]["audience"], "a");
        assert_eq!(spec["interactive"], false);
        assert!(exec_info(false)["spec"].get("cluster").is_none());
    }

    #[test]
    fn is_interactive_follows_mode_and_terminal() {
        assert_eq!(is_interactive(ExecInteractiveMode::Never, true), Some(false));
        assert_eq!(is_interactive(ExecInteractiveMode::IfAvailable, true), Some(true));
        assert_eq!(is_interactive(ExecInteractiveMode::IfAvailable, false), Some(false));
        assert_eq!(is_interactive(ExecInteractiveMode::Always, true), Some(true));
        assert_eq!(is_interactive(ExecInteractiveMode::Always, false), None);
    }

    #[test]
    fn run_failed_plugin_error_has_a_reason_and_no_secret() {
        for (script, expected) in [
            ("exit 3", "failed: exit status: 3"),
            ("echo hush", "did not answer with an ExecCredential"),
            ("echo '{\"status\": {\"token\": \"\"}}'", "neither a token nor a certificate"),
        ] {
            let error = plugin(script).run().err().unwrap().to_string();
            assert!(error.contains(expected) && !error.contains("hush"), "{error}");
        }
        let missing = ExecPlugin { command: "/none/such".into(), ..plugin("") };
        let error = missing.run().err().unwrap();
        assert!(matches!(error.problem, ExecProblem::Start(_)), "{error}");
        assert!(!format!("{:?}", plugin("--token hush")).contains("hush"));
    }
}

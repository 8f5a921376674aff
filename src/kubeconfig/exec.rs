//! Exec plugins: commands that print a credential (`client.authentication.k8s.io`, the credential
//! plugins of client-go). jackstay's commands run a plugin when they need the user's credential; the
//! proxy runs none.

use std::fmt;
use std::io::IsTerminal;
use std::process::{Command, Stdio};

use kube::config::{Cluster, ExecAuthCluster, ExecConfig, ExecInteractiveMode};
use serde_json::{Value, json};

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

/// The answer of a plugin: a token, a certificate, or both.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct ExecCredential {
    /// A bearer token.
    pub token: Option<String>,
    /// A client certificate and its key, PEM.
    pub certificate: Option<(String, String)>,
}

impl ExecPlugin {
    /// Reads the `exec` of a user; `cluster` is the cluster of the context.
    ///
    /// # Errors
    /// `exec` names no command.
    pub(super) fn new(exec: &ExecConfig, cluster: &Cluster) -> Result<Self, String> {
        let command = exec.command.clone().filter(|command| !command.is_empty());
        let variable = |entry: &std::collections::HashMap<String, String>| {
            Some((entry.get("name")?.clone(), entry.get("value").cloned().unwrap_or_default()))
        };
        let api_version = exec.api_version.as_deref().unwrap_or("client.authentication.k8s.io/v1");
        Ok(Self {
            command: command.ok_or("exec names no command")?,
            args: exec.args.clone().unwrap_or_default(),
            env: exec.env.iter().flatten().filter_map(variable).collect(),
            api_version: api_version.to_owned(),
            interactive_mode: exec
                .interactive_mode
                .clone()
                .unwrap_or(ExecInteractiveMode::IfAvailable),
            cluster: exec.provide_cluster_info.then(|| Box::new(cluster.clone())),
        })
    }

    /// Runs the plugin. It writes its messages to the user to the stderr of this process.
    ///
    /// # Errors
    /// The plugin cannot run, fails, or returns no credential.
    pub fn run(&self) -> Result<ExecCredential, String> {
        let fail = |why: String| format!("the exec plugin {:?} {why}", self.command);
        let interactive = is_interactive(&self.interactive_mode, std::io::stdin().is_terminal())
            .map_err(|why| fail(why.to_owned()))?;
        let mut info = json!({
            "apiVersion": self.api_version, "kind": "ExecCredential",
            "spec": { "interactive": interactive },
        });
        if let Some(cluster) = &self.cluster {
            let cluster = ExecAuthCluster::try_from(&**cluster)
                .map_err(|_| fail("needs the cluster's CA, which cannot be read".to_owned()))?;
            info["spec"]["cluster"] = json!(cluster);
        }
        let output = Command::new(&self.command)
            .args(&self.args)
            .envs(self.env.iter().cloned())
            .env("KUBERNETES_EXEC_INFO", info.to_string())
            .stdin(if interactive { Stdio::inherit() } else { Stdio::null() })
            .stderr(Stdio::inherit())
            .output()
            .map_err(|error| fail(format!("cannot be run: {error}")))?;
        if !output.status.success() {
            return Err(fail(format!("failed: {}", output.status)));
        }
        if output.stdout.len() > MAX_ANSWER {
            return Err(fail("answered more than 1 MiB".to_owned()));
        }
        // The answer is a secret, so no error quotes it.
        let answer: Value = serde_json::from_slice(&output.stdout)
            .map_err(|_| fail("did not answer with an ExecCredential".to_owned()))?;
        let text = |key: &str| answer["status"][key].as_str().map(ToOwned::to_owned);
        let certificate = text("clientCertificateData").zip(text("clientKeyData"));
        let credential =
            ExecCredential { token: text("token").filter(|token| !token.is_empty()), certificate };
        if credential == ExecCredential::default() {
            return Err(fail("returned neither a token nor a certificate".to_owned()));
        }
        Ok(credential)
    }
}

/// Whether the plugin gets the stdin of this process, which may be a `terminal` (client-go,
/// `plugin/pkg/client/auth/exec`).
fn is_interactive(mode: &ExecInteractiveMode, terminal: bool) -> Result<bool, &'static str> {
    match mode {
        ExecInteractiveMode::Never => Ok(false),
        ExecInteractiveMode::IfAvailable => Ok(terminal),
        ExecInteractiveMode::Always if terminal => Ok(true),
        ExecInteractiveMode::Always => {
            Err("needs a terminal on standard input (interactiveMode: Always)")
        }
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
            "kube ends the PEM data with a line break"
        );
        assert_eq!(spec["cluster"]["config"]["audience"], "a");
        assert_eq!(spec["interactive"], false);
        assert!(exec_info(false)["spec"].get("cluster").is_none());
    }

    #[test]
    fn is_interactive_follows_mode_and_terminal() {
        assert_eq!(is_interactive(&ExecInteractiveMode::Never, true), Ok(false));
        assert_eq!(is_interactive(&ExecInteractiveMode::IfAvailable, true), Ok(true));
        assert_eq!(is_interactive(&ExecInteractiveMode::IfAvailable, false), Ok(false));
        assert_eq!(is_interactive(&ExecInteractiveMode::Always, true), Ok(true));
        assert!(is_interactive(&ExecInteractiveMode::Always, false).is_err());
    }

    #[test]
    fn run_failed_plugin_error_has_a_reason_and_no_secret() {
        for (script, expected) in [
            ("exit 3", "failed: exit status: 3"),
            ("echo hush", "did not answer with an ExecCredential"),
            ("echo '{\"status\": {\"token\": \"\"}}'", "neither a token nor a certificate"),
        ] {
            let error = plugin(script).run().err().unwrap();
            assert!(error.contains(expected) && !error.contains("hush"), "{error}");
        }
        let missing = ExecPlugin { command: "/none/such".into(), ..plugin("") };
        assert!(missing.run().err().unwrap().contains("cannot be run"));
        assert!(!format!("{:?}", plugin("--token hush")).contains("hush"));
    }
}

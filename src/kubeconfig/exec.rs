//! Exec plugins: a command that prints a credential (client-go credential plugins,
//! `client.authentication.k8s.io`). kubectl runs them for itself; `jackstay doctor` has to run them
//! to ask what needs a credential.

use std::fmt;
use std::process::{Command, Stdio};

use serde_json::{Value, json};

use super::tree::Node;

/// Most of an answer that is read: a certificate, its key and a token.
const MAX_ANSWER: usize = 1 << 20;

/// The `exec` of a user.
#[derive(Clone, PartialEq, Eq)]
pub struct ExecPlugin {
    /// What is run.
    pub command: String,
    args: Vec<String>,
    env: Vec<(String, String)>,
    api_version: String,
}

impl fmt::Debug for ExecPlugin {
    /// Without arguments and variables: people put secrets there.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ExecPlugin({:?})", self.command)
    }
}

/// What a plugin yielded; either part, or both.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct ExecCredential {
    /// A bearer token.
    pub token: Option<String>,
    /// A client certificate and its key, PEM.
    pub certificate: Option<(String, String)>,
}

impl ExecPlugin {
    /// Reads the `exec` of a user.
    ///
    /// # Errors
    /// It names no command.
    pub fn of(exec: &Node) -> Result<Self, String> {
        let text = |node: &Node| node.as_str().unwrap_or_default().to_owned();
        let pair = |node: &Node| {
            let value = node.str("value").unwrap_or_default().to_owned();
            node.str("name").map(|name| (name.to_owned(), value))
        };
        Ok(Self {
            command: exec.str("command").ok_or("exec names no command")?.to_owned(),
            args: exec.items("args").iter().map(text).collect(),
            env: exec.items("env").iter().filter_map(pair).collect(),
            api_version: exec
                .str("apiVersion")
                .unwrap_or("client.authentication.k8s.io/v1")
                .to_owned(),
        })
    }

    /// Runs it. What it says on stderr is for the user.
    ///
    /// # Errors
    /// It cannot be run, it fails, or it yields no credential.
    pub fn run(&self) -> Result<ExecCredential, String> {
        let fail = |why: String| format!("the exec plugin {:?} {why}", self.command);
        let info = json!({
            "apiVersion": self.api_version, "kind": "ExecCredential",
            "spec": { "interactive": false },
        });
        let output = Command::new(&self.command)
            .args(&self.args)
            .envs(self.env.iter().cloned())
            .env("KUBERNETES_EXEC_INFO", info.to_string())
            .stdin(Stdio::null())
            .stderr(Stdio::inherit())
            .output()
            .map_err(|error| fail(format!("cannot be run: {error}")))?;
        if !output.status.success() {
            return Err(fail(format!("failed: {}", output.status)));
        }
        if output.stdout.len() > MAX_ANSWER {
            return Err(fail("answered more than 1 MiB".to_owned()));
        }
        // Nothing of the answer goes into an error: it is a secret.
        let answer: Value = serde_json::from_slice(&output.stdout)
            .map_err(|_| fail("did not answer with an ExecCredential".to_owned()))?;
        let text = |key: &str| answer["status"][key].as_str().map(ToOwned::to_owned);
        let pair = text("clientCertificateData").zip(text("clientKeyData"));
        let yielded =
            ExecCredential { token: text("token").filter(|t| !t.is_empty()), certificate: pair };
        if yielded == ExecCredential::default() {
            return Err(fail("yielded neither a token nor a certificate".to_owned()));
        }
        Ok(yielded)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kubeconfig::tree::parse;

    fn plugin(script: &str) -> ExecPlugin {
        let exec = Node::Map(vec![
            ("apiVersion".into(), Node::text("client.authentication.k8s.io/v1beta1")),
            ("command".into(), Node::text("/bin/sh")),
            ("args".into(), Node::List(vec![Node::text("-c"), Node::text(script)])),
            ("env".into(), parse("[{name: WHO, value: me}]").unwrap().unwrap()),
        ]);
        ExecPlugin::of(&exec).unwrap()
    }

    #[test]
    fn tokens_and_certificates() {
        let token = plugin(r#"echo "{\"status\": {\"token\": \"of-$WHO\"}}""#).run().unwrap();
        assert_eq!((token.token.as_deref(), token.certificate), (Some("of-me"), None));
        let both = r#"echo '{"status": {"clientCertificateData": "c", "clientKeyData": "k"}}'"#;
        assert_eq!(plugin(both).run().unwrap().certificate, Some(("c".into(), "k".into())));
        let asked = plugin(
            r#"case $KUBERNETES_EXEC_INFO in *v1beta1*) echo '{"status": {"token": "t"}}';; esac"#,
        );
        assert!(asked.run().is_ok());
    }

    #[test]
    fn failures_say_why_and_nothing_secret() {
        for (script, expected) in [
            ("exit 3", "failed: exit status: 3"),
            ("echo hush", "did not answer with an ExecCredential"),
            ("echo '{\"status\": {\"token\": \"\"}}'", "neither a token nor a certificate"),
        ] {
            let error = plugin(script).run().err().unwrap();
            assert!(error.contains(expected) && !error.contains("hush"), "{error}");
        }
        let gone = ExecPlugin { command: "/none/such".into(), ..plugin("") };
        assert!(gone.run().err().unwrap().contains("cannot be run"));
        assert!(!format!("{:?}", plugin("--token hush")).contains("hush"));
        assert!(ExecPlugin::of(&Node::map()).is_err());
    }
}

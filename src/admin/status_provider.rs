//! The content of the admin endpoint: the interface to the process that it describes.

use std::path::Path;

/// Environment variable that the manifests set to `spec.nodeName`.
const NODE_NAME: &str = "NODE_NAME";
/// File with the host name, which is the node's name unless kubelet runs with `--hostname-override`.
const HOSTNAME_FILE: &str = "/proc/sys/kernel/hostname";

/// The content of the admin endpoint. Called for each request, on the admin runtime.
pub trait StatusProvider: Send + Sync + 'static {
    /// Whether the event loop of every worker runs.
    ///
    /// # Errors
    /// The workers whose event loops are stalled.
    fn liveness(&self) -> Result<(), String>;
    /// Whether requests can be served, with the checks of `/readyz`.
    fn readiness(&self) -> Readiness;
    /// The body of `/status`, which the page at `/` renders.
    fn status(&self) -> serde_json::Value;
    /// The latest state changes, for `/events`.
    fn events(&self) -> serde_json::Value;
    /// Round trip times and responses of the endpoints in the last minutes, for `/history`.
    fn history(&self) -> serde_json::Value;
    /// The effective configuration, without secrets.
    fn config(&self) -> serde_json::Value;
    /// The metrics in the Prometheus text format.
    fn metrics(&self) -> String;
}

/// The content of `/readyz`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Readiness {
    /// Whether requests can be served. Not every check is required for that.
    pub ready: bool,
    /// The checks, in the order of the response.
    pub checks: Vec<ReadinessCheck>,
}

/// One check of [`Readiness`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReadinessCheck {
    /// For example `listener apiserver` or `upstream control-plane`.
    pub name: String,
    /// Whether the check passed.
    pub ok: bool,
    /// Whether the process is ready only if the check passes.
    pub required: bool,
    /// Details for the operator; may be empty.
    pub detail: String,
}

/// The name of the node, which distinguishes the status pages of a cluster: the environment variable
/// `NODE_NAME`, or the host name without it.
pub fn node_name() -> Option<String> {
    variable_or_hostname(std::env::var(NODE_NAME).ok(), Path::new(HOSTNAME_FILE))
}

fn variable_or_hostname(variable: Option<String>, hostname_file: &Path) -> Option<String> {
    let trim = |name: String| Some(name.trim().to_owned()).filter(|name| !name.is_empty());
    variable.and_then(trim).or_else(|| std::fs::read_to_string(hostname_file).ok().and_then(trim))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variable_or_hostname_prefers_a_variable_that_is_not_blank() {
        let dir = tempfile::tempdir().expect("a directory");
        let file = dir.path().join("hostname");
        assert_eq!(variable_or_hostname(None, &file), None);
        std::fs::write(&file, "worker-1\n").expect("written");
        for (variable, expected) in
            [(None, "worker-1"), (Some(" "), "worker-1"), (Some("n7"), "n7")]
        {
            let name = variable_or_hostname(variable.map(str::to_owned), &file);
            assert_eq!(name.as_deref(), Some(expected));
        }
    }
}

//! What the admin endpoint shows: the interface between it and the process that it describes.

use std::path::Path;

/// Environment variable that manifests set from `spec.nodeName`.
const VARIABLE: &str = "NODE_NAME";
/// The host name, which is the node's name unless kubelet runs with `--hostname-override`.
const HOSTNAME: &str = "/proc/sys/kernel/hostname";

/// The content of the admin endpoint. Called for each request, on the admin runtime.
pub trait StatusProvider: Send + Sync + 'static {
    /// Whether the event loop of every worker runs.
    ///
    /// # Errors
    /// Which worker's event loop is stalled.
    fn liveness(&self) -> Result<(), String>;
    /// Whether requests can be served, with its checks.
    fn readiness(&self) -> Readiness;
    /// The body of `/status`, which the page at `/` renders.
    fn status(&self) -> serde_json::Value;
    /// The latest state changes, for `/events`.
    fn events(&self) -> serde_json::Value;
    /// Round trips and responses of the endpoints in the last minutes, for `/history`.
    fn history(&self) -> serde_json::Value;
    /// The effective configuration, without secrets.
    fn config(&self) -> serde_json::Value;
    /// The metrics in the Prometheus text format.
    fn metrics(&self) -> String;
}

/// The content of `/readyz`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Readiness {
    /// Whether requests can be served. Some checks may fail: one usable endpoint is enough.
    pub ready: bool,
    /// The checks, in the order of the response.
    pub checks: Vec<ReadinessCheck>,
}

/// One check of [`Readiness`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReadinessCheck {
    /// `listener apiserver`, `upstream control-plane`, ….
    pub name: String,
    /// Whether the check passed.
    pub ok: bool,
    /// Details for the operator; may be empty.
    pub detail: String,
}

/// The name of the node, which tells the status pages of a cluster apart: the environment variable
/// `NODE_NAME`, or else the host name.
pub fn node_name() -> Option<String> {
    choose(std::env::var(VARIABLE).ok(), Path::new(HOSTNAME))
}

fn choose(variable: Option<String>, hostname: &Path) -> Option<String> {
    let named = |name: String| Some(name.trim().to_owned()).filter(|name| !name.is_empty());
    variable.and_then(named).or_else(|| std::fs::read_to_string(hostname).ok().and_then(named))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn node_name_variable_set_wins_over_host_name() {
        let dir = tempfile::tempdir().expect("a directory");
        let file = dir.path().join("hostname");
        assert_eq!(choose(None, &file), None);
        std::fs::write(&file, "worker-1\n").expect("written");
        for (variable, expected) in
            [(None, "worker-1"), (Some(" "), "worker-1"), (Some("n7"), "n7")]
        {
            assert_eq!(choose(variable.map(str::to_owned), &file).as_deref(), Some(expected));
        }
    }
}

//! The name of the node, which tells the status pages of a cluster apart.

use std::path::Path;

/// Environment variable that manifests set from `spec.nodeName`.
const VARIABLE: &str = "NODE_NAME";
/// The host name, which is the node's name unless kubelet runs with `--hostname-override`.
const HOSTNAME: &str = "/proc/sys/kernel/hostname";

/// The node's name: the environment variable `NODE_NAME`, or else the host name.
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

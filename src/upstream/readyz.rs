//! The outcome of a `/readyz` check, and the body of kube-apiserver's response.

use serde::Serialize;

/// The outcome of one `/readyz` check, as `/status` shows it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ReadyzCheck {
    /// When the request was sent, RFC 3339.
    pub at: String,
    /// Time to the end of the response, or to the failure, in milliseconds.
    pub duration_ms: f64,
    /// Status code; `null` if no response arrived.
    pub code: Option<u16>,
    /// Why the check failed; `null` if it succeeded.
    pub error: Option<String>,
}

/// Most checks that a text names.
const NAMED: usize = 5;

/// The failed checks as a suffix for a status code: `: etcd, informer-sync`, or empty where the body
/// names none.
///
/// kube-apiserver lists its checks a line each, the failed ones as
/// `[-]etcd failed: reason withheld`.
pub fn failed_checks(body: &str) -> String {
    let failed: Vec<_> = body
        .lines()
        .filter_map(|line| line.strip_prefix("[-]"))
        .map(|line| line.split(" failed").next().unwrap_or(line))
        .take(NAMED)
        .collect();
    if failed.is_empty() { String::new() } else { format!(": {}", failed.join(", ")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failed_checks_names_at_most_five() {
        let body = "[+]ping ok\n[-]etcd failed: reason withheld\n[-]informer-sync failed: \
                    reason withheld\nreadyz check failed";
        assert_eq!(failed_checks(body), ": etcd, informer-sync");
        assert_eq!(failed_checks("no"), "");
        assert_eq!(failed_checks(&"[-]x failed\n".repeat(9)), ": x, x, x, x, x");
    }
}

//! Reads the body of kube-apiserver's `/readyz` response.

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

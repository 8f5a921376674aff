//! What kube-apiserver's answer to `/readyz` names: who asks for it judges for themselves.

/// Most checks that are named.
const NAMED: usize = 5;

/// The checks that failed, as they follow a status code: `: etcd, informer-sync`, or nothing where
/// the answer names none.
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
    fn named_checks() {
        let body = "[+]ping ok\n[-]etcd failed: reason withheld\n[-]informer-sync failed: \
                    reason withheld\nreadyz check failed";
        assert_eq!(failed_checks(body), ": etcd, informer-sync");
        assert_eq!(failed_checks("no"), "");
        assert_eq!(failed_checks(&"[-]x failed\n".repeat(9)), ": x, x, x, x, x");
    }
}

//! The body of kube-apiserver's response to `/readyz`, and the statuses of servers before it.

use jackstay_config::api_root::ApiRoot;

/// Limit of failed checks that [`failed_checks`] names.
const MAX_NAMED: usize = 5;

/// Returns the failed checks as a suffix for a status code, such as `: etcd, informer-sync`, or an empty
/// string if the body names none.
///
/// kube-apiserver writes each check on a line of its own; a failed one is `[-]etcd failed: reason withheld`.
pub fn failed_checks(body: &str) -> String {
    let failed: Vec<_> = body
        .lines()
        .filter_map(|line| line.strip_prefix("[-]"))
        .map(|line| line.split(" failed").next().unwrap_or(line))
        .take(MAX_NAMED)
        .collect();
    if failed.is_empty() { String::new() } else { format!(": {}", failed.join(", ")) }
}

/// Why a server that is no apiserver itself, but selects one by the host or the path of a request, answers with `code`:
/// a suffix for the status code, or an empty string for a status that has other reasons. kube-apiserver answers neither
/// 404 to a health check nor 421 (RFC 9110, section 15.5.20).
pub fn not_served(code: u16, root: &ApiRoot) -> String {
    let host = &root.authority;
    match code {
        404 => format!(
            ": no apiserver for the host {host} at this path: check authority and path_prefix of the upstream"
        ),
        421 => format!(
            ": the server does not serve the host {host} on a connection with this TLS server name: check authority \
             and tls.server_name of the upstream"
        ),
        _ => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failed_checks_names_at_most_five() {
        let body = "[+]ping ok\n[-]etcd failed: reason withheld\n\
                    [-]informer-sync failed: reason withheld\nreadyz check failed";
        assert_eq!(failed_checks(body), ": etcd, informer-sync");
        assert_eq!(failed_checks("no"), "");
        assert_eq!(failed_checks(&"[-]x failed\n".repeat(9)), ": x, x, x, x, x");
    }
}

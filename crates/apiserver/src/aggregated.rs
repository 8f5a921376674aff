//! The API group of an aggregated server, to which each apiserver forwards requests on a path of its own.
//!
//! The objects of the group are in the store as all others, so all apiservers show the same ones. What follows a fault is
//! that of `handler_proxy.go` in `k8s.io/kube-aggregator`:
//!
//! | fault | requests | streams |
//! |---|---|---|
//! | [`Faults::aggregated_unavailable`] | 503 "service unavailable" | go on |
//! | [`AggregatedPath::Refused`] | 503 "… connect: connection refused" | go on |
//! | [`AggregatedPath::Dark`] | hang, and go on when the path is open again; 503 "… client connection lost" after [`LOST_AFTER`] | deliver nothing; are reset after [`LOST_AFTER`] |
//!
//! [`Faults::aggregated_unavailable`]: crate::Faults::aggregated_unavailable

use std::time::Duration;

/// The group.
pub const GROUP: &str = "aggregated.jackstay.test";
/// A connection is lost so long after its last packet: a PING is sent after 30 s and waits for 15 s
/// (`k8s.io/apimachinery`, `util/net/http.go`, `readIdleTimeout` and `pingTimeout`).
pub const LOST_AFTER: Duration = Duration::from_secs(45);

/// The body of the response if the server is known to be unavailable (`proxyError`).
pub const UNAVAILABLE: &str = "service unavailable\n";
/// The body of the response if a connect is refused (`responder.Error`).
pub const REFUSED: &str =
    "error trying to reach service: dial tcp 10.0.0.9:443: connect: connection refused\n";
/// The body of the response if the connection is lost (`responder.Error`).
pub const LOST: &str = "error trying to reach service: http2: client connection lost\n";

/// The path from an apiserver to the aggregated server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum AggregatedPath {
    /// It works.
    #[default]
    Open,
    /// Connects are refused.
    Refused,
    /// All packets are dropped.
    Dark,
}

/// Whether an apiserver forwards requests for this path. It serves `/apis/GROUP` itself.
pub(super) fn is_forwarded(path: &str) -> bool {
    let rest = path.strip_prefix("/apis/").and_then(|path| path.strip_prefix(GROUP));
    rest.is_some_and(|rest| rest.starts_with('/'))
}

/// Whether the aggregated server serves this API group.
pub(super) fn serves(group: &str) -> bool {
    group == GROUP
}

#[cfg(test)]
mod tests {
    use super::is_forwarded;

    #[test]
    fn is_forwarded_paths_below_the_version_of_the_group() {
        for (path, expected) in [
            ("/apis/aggregated.jackstay.test/v1/widgets", true),
            ("/apis/aggregated.jackstay.test/v1", true),
            ("/apis/aggregated.jackstay.test", false),
            ("/apis/aggregated.jackstay.test.other/v1", false),
            ("/apis/apps/v1/deployments", false),
            ("/api/v1/pods", false),
        ] {
            assert_eq!(is_forwarded(path), expected, "{path}");
        }
    }
}

//! Heartbeats: updates by which a client shows that it lives, such as the renewal of a lease.
//!
//! A write on an apiserver without etcd gets no response until the apiserver's etcd client gives up after 10 s. The
//! clients of heartbeats give up after 10 s, too: leader election by its renew deadline (`RenewDeadline` in
//! `k8s.io/component-base/config/v1alpha1/defaults.go`), and kubelet by the timeout of its client
//! (`nodeLeaseRenewIntervalFraction` and `NodeStatusUpdateFrequency`). So the write is ended while there is time for
//! a second one to another apiserver. jackstay does not send it again, because it may have been carried out.

use jackstay_config::HeartbeatResource;
use jackstay_core::request::info::{RequestInfo, RequestKind, Verb};

use crate::upstream::connection::{Connection, ConnectionState};
use crate::upstream::endpoint::EndpointState;

/// Whether the request is a heartbeat: an update or a patch of a lease, of the status of a node, or of one of the
/// `configured` resources.
pub fn is_heartbeat(info: &RequestInfo, configured: &[HeartbeatResource]) -> bool {
    info.kind == RequestKind::Write
        && matches!(info.verb, Verb::Update | Verb::Patch)
        && (info.is_about("coordination.k8s.io", "leases", "")
            || info.is_about("", "nodes", "status")
            || configured
                .iter()
                .any(|one| info.is_about(&one.group, &one.resource, &one.subresource)))
}

/// Why no response can be expected soon; `None` if connection and endpoint look healthy.
pub fn ill_health(connection: &Connection) -> Option<String> {
    let endpoint = &connection.endpoint;
    let responds = matches!(connection.state(), ConnectionState::Live | ConnectionState::Draining);
    if !responds || connection.is_silent() {
        return Some("a PING is unanswered".to_owned());
    }
    if connection.probe().is_failing() {
        return Some("/readyz fails or is overdue".to_owned());
    }
    match endpoint.state() {
        EndpointState::Degraded
        | EndpointState::Suspect
        | EndpointState::Unverified
        | EndpointState::Ejected => {
            Some(format!("it is {} ({})", endpoint.state().as_str(), endpoint.reason()))
        }
        EndpointState::Ready
        | EndpointState::Connecting
        | EndpointState::NoH2
        | EndpointState::Leaving => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::{Method, Request};
    use jackstay_core::request::path_prefix::PathPrefix;

    #[test]
    fn is_heartbeat_update_or_patch_of_a_known_resource() {
        let configured = [HeartbeatResource::parse("machines.example.com/status").unwrap()];
        for (method, path, expected) in [
            (Method::PUT, "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/a", true),
            (Method::PATCH, "/apis/coordination.k8s.io/v1/namespaces/a/leases/a?timeout=10s", true),
            (Method::POST, "/apis/coordination.k8s.io/v1/namespaces/a/leases", false),
            (Method::DELETE, "/apis/coordination.k8s.io/v1/namespaces/a/leases/a", false),
            (Method::GET, "/apis/coordination.k8s.io/v1/namespaces/a/leases/a", false),
            // A dry run changes nothing, so it is hedged instead.
            (Method::PUT, "/apis/coordination.k8s.io/v1/namespaces/a/leases/a?dryRun=All", false),
            (Method::PUT, "/apis/example.com/v1/namespaces/a/leases/a", false),
            (Method::PATCH, "/api/v1/nodes/a/status?timeout=10s", true),
            (Method::PUT, "/api/v1/nodes/a/status", true),
            (Method::PUT, "/api/v1/nodes/a", false),
            (Method::PATCH, "/api/v1/namespaces/a/pods/b/status", false),
            (Method::PUT, "/api/v1/namespaces/a/configmaps/b", false),
            (Method::PUT, "/apis/example.com/v1/namespaces/a/machines/b/status", true),
            (Method::PUT, "/apis/example.com/v1/namespaces/a/machines/b", false),
            (Method::PUT, "/", false),
        ] {
            let request = Request::builder().method(&method).uri(path).body(()).unwrap();
            let info = RequestInfo::new(&request.into_parts().0, &PathPrefix::default());
            assert_eq!(is_heartbeat(&info, &configured), expected, "{method} {path}");
        }
    }
}

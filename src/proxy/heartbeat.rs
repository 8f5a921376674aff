//! Heartbeats: updates by which a client shows that it lives, such as the renewal of a lease.
//!
//! A write on an apiserver without etcd gets no response until the apiserver's etcd client gives up after 10 s. The
//! clients of heartbeats give up after 10 s, too: leader election by its renew deadline (`RenewDeadline` in
//! `k8s.io/component-base/config/v1alpha1/defaults.go`), and kubelet by the timeout of its client
//! (`nodeLeaseRenewIntervalFraction` and `NodeStatusUpdateFrequency`). So the write is ended while there is time for
//! a second one to another apiserver. One that names the resourceVersion of its object is settled
//! ([`jackstay_core::request::settlement`]). Any other is not sent again, because it may have been carried out.

use std::cell::Cell;
use std::rc::Rc;

use jackstay_config::HeartbeatResource;
use jackstay_core::pool::PreviousFailure;
use jackstay_core::request::info::{RequestInfo, RequestKind, Verb};
use jackstay_core::request::settlement::ObjectKind;
use tokio::sync::Notify;

use crate::upstream::connection::{Connection, ConnectionState};
use crate::upstream::endpoint::EndpointState;

/// A request that is a heartbeat.
#[derive(Debug, Default)]
pub struct Heartbeat {
    /// The kind of the object that is updated, if the request can be settled.
    pub object: Option<ObjectKind>,
    /// Its last attempt, or that of its repetition.
    pub last: Rc<LastAttempt>,
    /// The client gets the response to a request that settled it.
    pub is_settled: Cell<bool>,
}

/// The last attempt to send a heartbeat.
#[derive(Debug, Default)]
pub struct LastAttempt {
    /// Its connection, as one that has failed to respond.
    pub connection: Cell<Option<PreviousFailure>>,
    /// Its connection is in trouble.
    pub trouble: Notify,
}

impl Heartbeat {
    /// `None` if the request is no heartbeat: an update or a patch of a lease, of the status of a node, or of one of the
    /// `configured` resources.
    pub fn of(info: &RequestInfo, configured: &[HeartbeatResource]) -> Option<Box<Self>> {
        if info.kind != RequestKind::Write || !matches!(info.verb, Verb::Update | Verb::Patch) {
            return None;
        }
        let is_configured =
            configured.iter().any(|one| info.is_about(&one.group, &one.resource, &one.subresource));
        let object = if info.is_about("coordination.k8s.io", "leases", "") {
            Some(ObjectKind::Lease)
        } else if is_configured {
            Some(ObjectKind::Configured)
        } else if info.is_about("", "nodes", "status") {
            None
        } else {
            return None;
        };
        // A patch contains a part of the object.
        let object = object.filter(|_| info.verb == Verb::Update);
        Some(Box::new(Self { object, ..Self::default() }))
    }

    /// Whether a request that is no heartbeat is needed for one: the read or the creation of a lease or a node.
    pub fn depends_on(info: &RequestInfo) -> bool {
        matches!(info.verb, Verb::Get | Verb::Create)
            && (info.is_about("coordination.k8s.io", "leases", "")
                || info.is_about("", "nodes", ""))
    }

    /// Its repetition, whose outcome is settled with it.
    pub fn again(&self) -> Self {
        Self { last: Rc::clone(&self.last), ..Self::default() }
    }
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
    fn heartbeat_is_an_update_or_patch_of_a_known_resource() {
        let (lease, object) = (Some(ObjectKind::Lease), Some(ObjectKind::Configured));
        let configured = [HeartbeatResource::parse("machines.example.com/status").unwrap()];
        for (method, path, expected) in [
            (
                Method::PUT,
                "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/a",
                Some(lease),
            ),
            (
                Method::PATCH,
                "/apis/coordination.k8s.io/v1/namespaces/a/leases/a?timeout=10s",
                Some(None),
            ),
            (Method::POST, "/apis/coordination.k8s.io/v1/namespaces/a/leases", None),
            (Method::DELETE, "/apis/coordination.k8s.io/v1/namespaces/a/leases/a", None),
            (Method::GET, "/apis/coordination.k8s.io/v1/namespaces/a/leases/a", None),
            // A dry run changes nothing, so it is hedged instead.
            (Method::PUT, "/apis/coordination.k8s.io/v1/namespaces/a/leases/a?dryRun=All", None),
            (Method::PUT, "/apis/example.com/v1/namespaces/a/leases/a", None),
            (Method::PATCH, "/api/v1/nodes/a/status?timeout=10s", Some(None)),
            (Method::PUT, "/api/v1/nodes/a/status", Some(None)),
            (Method::PUT, "/api/v1/nodes/a", None),
            (Method::PATCH, "/api/v1/namespaces/a/pods/b/status", None),
            (Method::PUT, "/api/v1/namespaces/a/configmaps/b", None),
            (Method::PUT, "/apis/example.com/v1/namespaces/a/machines/b/status", Some(object)),
            (Method::PUT, "/apis/example.com/v1/namespaces/a/machines/b", None),
            (Method::PUT, "/", None),
        ] {
            let request = Request::builder().method(&method).uri(path).body(()).unwrap();
            let info = RequestInfo::new(&request.into_parts().0, &PathPrefix::default());
            let heartbeat = Heartbeat::of(&info, &configured);
            let settled = heartbeat.map(|heartbeat| heartbeat.object);
            assert_eq!(settled, expected, "{method} {path}");
        }
    }
}

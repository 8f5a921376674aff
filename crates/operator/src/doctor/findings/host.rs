//! Servers that select the back end by the host or the path of a request.

use super::finding::{Cause, Finding, problem};
use crate::doctor::observations::{EndpointObservation, HostRouting};

/// The server answers as an apiserver to one host only.
pub(super) fn routes_by_host(endpoint: &EndpointObservation) -> Option<Finding> {
    let HostRouting { served, refused, status } = endpoint.host_routing.as_ref()?;
    let seen = format!(
        "it answers /version with {status} to the host {refused}, and as an apiserver to {served}"
    );
    let advice = if *refused == endpoint.authority {
        format!(
            "Set upstreams[].authority to {served}, which jackstay then sends in mode terminate. In mode passthrough \
             the clients write the host (Host, :authority): they must connect to the server by that name."
        )
    } else {
        format!(
            "Clients in mode passthrough send the address of jackstay as host. Use mode terminate, in which jackstay \
             sends {served} (upstreams[].authority)."
        )
    };
    let what = format!("{} routes by host.", endpoint.address);
    Some(problem(Cause::RoutesByHost, what, seen, advice).about(&endpoint.address))
}

//! Decides from `/status` whether a running jackstay can serve requests, by the rules of `/readyz`.
//!
//! The functions read JSON rather than typed structures, because the version of the running jackstay
//! may differ from that of this command.

use jackstay_core::discovery::source::NO_ENDPOINT;
use serde_json::Value;

use super::table::clean;
use super::view::{list_at, text_at};

/// Maximum number of endpoints that a reason lists.
const MAX_LISTED: usize = 3;

/// Why requests of connected clients cannot be served: a listener is not bound, or an upstream has no
/// usable endpoint. `None` if they can be served. Unlike `/readyz`, a draining process is accepted.
pub(super) fn unready_reason(status: &Value) -> Option<String> {
    let upstreams = list_at(status, "upstreams");
    if upstreams.is_empty() {
        return Some("the status lists no upstream".to_owned());
    }
    let unbound =
        list_at(status, "listeners").iter().find(|listener| list_at(listener, "bind").is_empty());
    if let Some(listener) = unbound {
        return Some(format!("listener {} is not bound", text_at(listener, "name")));
    }
    upstreams.iter().find_map(unusable_reason)
}

/// Why an upstream has no usable endpoint; `None` if it has one.
fn unusable_reason(upstream: &Value) -> Option<String> {
    let (endpoints, name) = (list_at(upstream, "endpoints"), text_at(upstream, "name"));
    if endpoints.iter().any(is_usable) {
        return None;
    }
    if endpoints.is_empty() {
        return Some(clean(&format!("upstream {name}: {}", no_endpoint_reason(upstream))));
    }
    let mut text = format!("0 of {} endpoints of {name} are usable", endpoints.len());
    for endpoint in endpoints.iter().take(MAX_LISTED) {
        let (address, state) = (text_at(endpoint, "address"), text_at(endpoint, "state"));
        text = format!("{text}; {address} is {state} ({})", text_at(endpoint, "reason"));
    }
    Some(clean(&text))
}

/// How many endpoints of an upstream, or without a name of each upstream, are usable.
///
/// # Errors
/// Why new clients are not served: an upstream has no usable endpoint, the status does not list it, or the process is
/// draining. Listeners are not considered: one on a virtual IP address may be bound only while the node has the address.
pub(in crate::commands) fn upstream_state(
    status: &Value,
    name: Option<&str>,
) -> Result<String, String> {
    let all = list_at(status, "upstreams");
    let is_wanted = |upstream: &&Value| name.is_none_or(|name| text_at(upstream, "name") == name);
    let wanted: Vec<&Value> = all.iter().filter(is_wanted).collect();
    if wanted.is_empty() {
        let names: Vec<_> = all.iter().map(|upstream| text_at(upstream, "name")).collect();
        return Err(match name {
            Some(name) if !names.is_empty() => {
                clean(&format!("there is no upstream {name}; there are: {}", names.join(", ")))
            }
            _ => "the status lists no upstream".to_owned(),
        });
    }
    if let Some(reason) = wanted.iter().find_map(|upstream| unusable_reason(upstream)) {
        return Err(reason);
    }
    if status["draining"] == true {
        return Err("it is draining".to_owned());
    }
    let state = |upstream: &&Value| {
        let endpoints = list_at(upstream, "endpoints");
        let usable = endpoints.iter().filter(|endpoint| is_usable(endpoint)).count();
        format!("{usable} of {} endpoints of {} usable", endpoints.len(), text_at(upstream, "name"))
    };
    Ok(clean(&wanted.iter().map(state).collect::<Vec<_>>().join("; ")))
}

/// Why an upstream has no endpoint, as `/readyz` and the 503 say it
/// (`Sources::no_endpoint_reason` of the program).
fn no_endpoint_reason(upstream: &Value) -> String {
    let errors = list_at(upstream, "sources").iter().filter_map(|source| {
        let unanswered = source["last_success"].is_null().then_some("no answer yet");
        let error = source["error"].as_str().or(unanswered)?;
        Some(format!("{}: {error}", text_at(source, "source")))
    });
    std::iter::once(NO_ENDPOINT.to_owned()).chain(errors).collect::<Vec<_>>().join("; ")
}

/// Why requests of new clients cannot be served: a reason of [`unready_reason`], or the process is
/// draining and accepts no connections.
pub(in crate::commands) fn unready_reason_for_new_clients(status: &Value) -> Option<String> {
    let draining = status["draining"] == true;
    unready_reason(status).or_else(|| draining.then(|| "it is draining".to_owned()))
}

/// Whether the endpoint can serve requests. Versions without the field `usable` report only the state.
fn is_usable(endpoint: &Value) -> bool {
    endpoint["usable"].as_bool().unwrap_or_else(|| {
        let has_live_connection =
            || list_at(endpoint, "connections").iter().any(|c| c["state"] == "live");
        match text_at(endpoint, "state") {
            "ready" | "degraded" => true,
            "connecting" => has_live_connection(),
            _ => false,
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn status(states: &[&str]) -> Value {
        let endpoint = |state: &&str| json!({"address": "a:1", "state": state, "reason": "why\n"});
        let endpoints: Vec<Value> = states.iter().map(endpoint).collect();
        json!({
            "listeners": [{"name": "l", "bind": ["127.0.0.1:1"]}],
            "upstreams": [{"name": "u", "endpoints": endpoints}],
        })
    }

    #[test]
    fn unready_reason_names_unusable_upstream_and_unbound_listener() {
        for states in [&["ready"][..], &["ejected", "degraded"]] {
            assert_eq!(unready_reason(&status(states)), None, "{states:?}");
        }
        let reason = unready_reason(&status(&["ejected", "no_h2"])).unwrap();
        assert_eq!(
            reason,
            "0 of 2 endpoints of u are usable; a:1 is ejected (why ); a:1 is no_h2 (why )"
        );
        let mut two = status(&["ready"]);
        two["upstreams"].as_array_mut().unwrap().push(json!({"name": "v", "endpoints": [], "sources": [
            {"source": "static", "last_success": "2026-01-01T00:00:00Z", "error": null},
            {"source": "dns", "last_success": null, "error": "lb.example.com: there is no such name"},
            {"source": "file", "last_success": null, "error": null},
        ]}));
        assert_eq!(
            unready_reason(&two).unwrap(),
            "upstream v: no endpoint is known yet; dns: lb.example.com: there is no such name; file: no answer yet"
        );
        let mut unbound = status(&["ready"]);
        unbound["listeners"][0]["bind"] = json!([]);
        assert_eq!(unready_reason(&unbound).unwrap(), "listener l is not bound");
        assert!(unready_reason(&json!(null)).is_some());
    }

    #[test]
    fn unready_reason_usable_field_has_precedence_over_state() {
        let mut new = status(&["connecting"]);
        assert!(unready_reason(&new).is_some());
        new["upstreams"][0]["endpoints"][0]["usable"] = json!(true);
        assert_eq!(unready_reason(&new), None);
        // Without the field, an endpoint with a live connection is usable, as in the `/readyz` of that version.
        let mut old = status(&["connecting"]);
        old["upstreams"][0]["endpoints"][0]["connections"] = json!([{"state": "live"}]);
        assert_eq!(unready_reason(&old), None);
    }

    #[test]
    fn unready_reason_for_new_clients_includes_draining() {
        let mut draining = status(&["ready"]);
        draining["draining"] = json!(true);
        assert_eq!(unready_reason(&draining), None);
        assert_eq!(unready_reason_for_new_clients(&draining).unwrap(), "it is draining");
    }

    #[test]
    fn upstream_state_is_of_one_upstream_or_of_each() {
        let mut two = status(&["ready", "ejected"]);
        let other = json!({"name": "v", "endpoints": [{"address": "b:1", "state": "ejected", "reason": "gone\u{1b}"}]});
        two["upstreams"].as_array_mut().unwrap().push(other);
        two["listeners"][0]["bind"] = json!([]);
        assert_eq!(upstream_state(&two, Some("u")).unwrap(), "1 of 2 endpoints of u usable");
        let reason = "0 of 1 endpoints of v are usable; b:1 is ejected (gone )";
        assert_eq!(upstream_state(&two, Some("v")).unwrap_err(), reason);
        assert_eq!(upstream_state(&two, None).unwrap_err(), reason);
        two["upstreams"][1]["endpoints"][0]["usable"] = json!(true);
        assert_eq!(
            upstream_state(&two, None).unwrap(),
            "1 of 2 endpoints of u usable; 1 of 1 endpoints of v usable"
        );
        let missing = upstream_state(&two, Some("w")).unwrap_err();
        assert_eq!(missing, "there is no upstream w; there are: u, v");
        assert!(upstream_state(&json!(null), None).is_err());
        two["draining"] = json!(true);
        assert_eq!(upstream_state(&two, Some("u")).unwrap_err(), "it is draining");
    }
}

//! Whether a running jackstay can serve requests, judged from its `/status` by the rule of its
//! `/readyz`.
//!
//! Pure functions of JSON: the running jackstay may be of another version.

use serde_json::Value;

use super::table::clean;
use super::view::{list_at, text_at};

/// Largest number of endpoints that a reason lists.
const MAX_LISTED: usize = 3;

/// Why requests cannot be served: a listener is not bound, or an upstream has no usable endpoint.
/// `None` if they can.
pub(super) fn failure(status: &Value) -> Option<String> {
    let upstreams = list_at(status, "upstreams");
    if upstreams.is_empty() {
        return Some("no upstream is shown".to_owned());
    }
    let unbound =
        list_at(status, "listeners").iter().find(|listener| list_at(listener, "bind").is_empty());
    if let Some(listener) = unbound {
        return Some(format!("listener {} is not bound", text_at(listener, "name")));
    }
    let dead = upstreams.iter().find(|u| !list_at(u, "endpoints").iter().any(is_usable))?;
    let endpoints = list_at(dead, "endpoints");
    let mut text =
        format!("0 of {} endpoints of {} are usable", endpoints.len(), text_at(dead, "name"));
    for endpoint in endpoints.iter().take(MAX_LISTED) {
        let (address, state) = (text_at(endpoint, "address"), text_at(endpoint, "state"));
        text = format!("{text}; {address} is {state} ({})", text_at(endpoint, "reason"));
    }
    Some(clean(&text))
}

/// [`failure`] for clients that are not connected yet: a draining process accepts none.
pub(super) fn failure_for_new_clients(status: &Value) -> Option<String> {
    let draining = status["draining"] == true;
    failure(status).or_else(|| draining.then(|| "it is draining".to_owned()))
}

fn is_usable(endpoint: &Value) -> bool {
    endpoint["usable"].as_bool().unwrap_or_else(|| {
        let connected = || list_at(endpoint, "connections").iter().any(|c| c["state"] == "live");
        match text_at(endpoint, "state") {
            "ready" | "degraded" => true,
            "connecting" => connected(),
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
    fn failure_upstream_without_usable_endpoint_is_named() {
        for states in [&["ready"][..], &["ejected", "degraded"]] {
            assert_eq!(failure(&status(states)), None, "{states:?}");
        }
        let reason = failure(&status(&["ejected", "no_h2"])).unwrap();
        assert_eq!(
            reason,
            "0 of 2 endpoints of u are usable; a:1 is ejected (why ); a:1 is no_h2 (why )"
        );
        let mut two = status(&["ready"]);
        two["upstreams"].as_array_mut().unwrap().push(json!({"name": "v", "endpoints": []}));
        assert_eq!(failure(&two).unwrap(), "0 of 0 endpoints of v are usable");
        let mut unbound = status(&["ready"]);
        unbound["listeners"][0]["bind"] = json!([]);
        assert_eq!(failure(&unbound).unwrap(), "listener l is not bound");
        assert!(failure(&json!(null)).is_some());
    }

    #[test]
    fn failure_usable_field_wins_over_the_state() {
        let mut new = status(&["connecting"]);
        assert!(failure(&new).is_some());
        new["upstreams"][0]["endpoints"][0]["usable"] = json!(true);
        assert_eq!(failure(&new), None);
        // Versions without that field: a connected endpoint is usable, as in their /readyz.
        let mut old = status(&["connecting"]);
        old["upstreams"][0]["endpoints"][0]["connections"] = json!([{"state": "live"}]);
        assert_eq!(failure(&old), None);
    }

    #[test]
    fn failure_for_new_clients_includes_draining() {
        let mut draining = status(&["ready"]);
        draining["draining"] = json!(true);
        assert_eq!(failure(&draining), None);
        assert_eq!(failure_for_new_clients(&draining).unwrap(), "it is draining");
    }
}

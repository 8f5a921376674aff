//! Whether clients of a running jackstay are served, from its `/status`: the rule of its `/readyz`.
//!
//! Pure: JSON in, a reason out. The two programs may be of different versions.

use serde_json::Value;

use super::view::{list, word};

/// Most endpoints that a reason names.
const NAMED: usize = 3;

/// Why requests cannot be served: a listener without an address, an upstream without a usable
/// endpoint. `None`: they can.
pub(super) fn complaint(status: &Value) -> Option<String> {
    let upstreams = list(status, "upstreams");
    if upstreams.is_empty() {
        return Some("no upstream is shown".to_owned());
    }
    let unbound =
        list(status, "listeners").iter().find(|listener| list(listener, "bind").is_empty());
    if let Some(listener) = unbound {
        return Some(format!("listener {} is not bound", word(listener, "name")));
    }
    let dead = upstreams.iter().find(|u| !list(u, "endpoints").iter().any(is_usable))?;
    let endpoints = list(dead, "endpoints");
    let mut text =
        format!("0 of {} endpoints of {} are usable", endpoints.len(), word(dead, "name"));
    for endpoint in endpoints.iter().take(NAMED) {
        let (address, state) = (word(endpoint, "address"), word(endpoint, "state"));
        text = format!("{text}; {address} is {state} ({})", word(endpoint, "reason"));
    }
    // A reason may quote what a peer has sent.
    Some(text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect())
}

/// The same for a client that is to come: a process that drains serves only those it has.
pub(super) fn complaint_of_newcomer(status: &Value) -> Option<String> {
    let draining = status["draining"] == true;
    complaint(status).or_else(|| draining.then(|| "it is draining".to_owned()))
}

fn is_usable(endpoint: &Value) -> bool {
    endpoint["usable"].as_bool().unwrap_or_else(|| {
        let connected = || list(endpoint, "connections").iter().any(|c| c["state"] == "live");
        match word(endpoint, "state") {
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
    fn complaint_when_an_upstream_has_no_usable_endpoint() {
        for states in [&["ready"][..], &["ejected", "degraded"]] {
            assert_eq!(complaint(&status(states)), None, "{states:?}");
        }
        let dead = complaint(&status(&["ejected", "no-h2"])).unwrap();
        assert_eq!(
            dead,
            "0 of 2 endpoints of u are usable; a:1 is ejected (why ); a:1 is no-h2 (why )"
        );
        let mut two = status(&["ready"]);
        two["upstreams"].as_array_mut().unwrap().push(json!({"name": "v", "endpoints": []}));
        assert_eq!(complaint(&two).unwrap(), "0 of 0 endpoints of v are usable");
        let mut unbound = status(&["ready"]);
        unbound["listeners"][0]["bind"] = json!([]);
        assert_eq!(complaint(&unbound).unwrap(), "listener l is not bound");
        assert!(complaint(&json!(null)).is_some());
    }

    #[test]
    fn complaint_trusts_the_server_over_the_name_of_a_state() {
        let mut new = status(&["connecting"]);
        assert!(complaint(&new).is_some());
        new["upstreams"][0]["endpoints"][0]["usable"] = json!(true);
        assert_eq!(complaint(&new), None);
        // A server that does not say it: connected is usable, as in its /readyz.
        let mut old = status(&["connecting"]);
        old["upstreams"][0]["endpoints"][0]["connections"] = json!([{"state": "live"}]);
        assert_eq!(complaint(&old), None);
    }

    #[test]
    fn complaint_of_newcomer_includes_draining() {
        let mut draining = status(&["ready"]);
        draining["draining"] = json!(true);
        assert_eq!(complaint(&draining), None);
        assert_eq!(complaint_of_newcomer(&draining).unwrap(), "it is draining");
    }
}

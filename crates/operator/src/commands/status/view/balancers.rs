//! The apiservers behind the addresses of an upstream.

use jackstay_core::quantity::quantity;
use serde_json::Value;

use super::super::table::{Tone, clean};
use super::{View, list_at, text_at};

impl View {
    /// A line for each address that leads to several apiservers, or to none.
    pub(super) fn balancers(&self, upstream: &Value, out: &mut String) {
        for address in list_at(upstream, "balancers") {
            let endpoints = list_at(upstream, "endpoints");
            let (text, tone) = match text_at(address, "kind") {
                _ if address["reached"] == false => (dark(address), Tone::Warn),
                "balancer" => (balancer(address, endpoints), Tone::Dim),
                "indistinct" => (indistinct(address, endpoints), Tone::Dim),
                "unreliable" => (unreliable(address), Tone::Warn),
                _ => continue,
            };
            out.push_str(&self.style.paint(&clean(&text), tone));
            out.push('\n');
        }
    }
}

fn balancer(balancer: &Value, endpoints: &[Value]) -> String {
    let names: Vec<_> = list_at(balancer, "backends").iter().filter_map(Value::as_str).collect();
    let (in_use, connections) = in_use(balancer, endpoints);
    format!(
        "balancer {}: {} seen ({}), {in_use} in use, {connections}",
        text_at(balancer, "address"),
        quantity(names.len() as u64, "apiserver"),
        names.join(", "),
    )
}

fn indistinct(balancer: &Value, endpoints: &[Value]) -> String {
    let (_, connections) = in_use(balancer, endpoints);
    format!(
        "balancer {}: all connections show the same certificate and address (its apiservers share them, or client IP \
         affinity leads to one of them), so each is judged by its own /readyz; {connections}",
        text_at(balancer, "address")
    )
}

fn dark(balancer: &Value) -> String {
    format!(
        "{}: no connection has reached an apiserver when it was last examined; jackstay tries again",
        text_at(balancer, "address")
    )
}

/// Number of endpoints behind the address, and their connections.
fn in_use(balancer: &Value, endpoints: &[Value]) -> (usize, String) {
    let address = text_at(balancer, "address");
    // The address of such an endpoint is that of the balancer and the name of the apiserver: `LB:PORT/BACKEND`.
    let of_address = |endpoint: &&Value| {
        let name = text_at(endpoint, "address").strip_prefix(address);
        name.is_some_and(|name| name.starts_with('/'))
    };
    let in_use: Vec<_> = endpoints.iter().filter(of_address).collect();
    let connections: u64 = in_use.iter().map(|one| list_at(one, "connections").len() as u64).sum();
    (in_use.len(), quantity(connections, "connection"))
}

fn unreliable(balancer: &Value) -> String {
    format!(
        "balancer {}: its apiservers cannot be recognised, because its connections show ever new certificates or \
         addresses",
        text_at(balancer, "address")
    )
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::super::table::Style;
    use super::super::text;

    #[test]
    fn text_has_the_apiservers_behind_an_address() {
        let connections = |count: usize| vec![json!({"state": "live"}); count];
        let status = json!({"upstreams": [{"name": "cp",
            "endpoints": [
                {"address": "10.0.0.5:443/10.0.0.11:6443", "connections": connections(4)},
                {"address": "10.0.0.5:443/10.0.0.12:6443", "connections": connections(3)},
                {"address": "10.0.0.9:443/any-1", "connections": connections(2)},
                {"address": "10.0.0.5:4431", "connections": connections(9)}],
            "balancers": [
                {"address": "10.0.0.5:443", "kind": "balancer",
                 "backends": ["10.0.0.11:6443", "10.0.0.12:6443", "certificate\u{1b}[2J"]},
                {"address": "10.0.0.6:443", "kind": "unreliable", "backends": []},
                {"address": "10.0.0.9:443", "kind": "indistinct", "reached": true, "backends": []},
                {"address": "10.0.0.10:443", "kind": "balancer", "reached": false, "backends": ["10.0.0.11:6443"]},
                {"address": "10.0.0.7:443", "kind": "apiserver", "backends": ["10.0.0.7:443"]},
                {"address": "10.0.0.8:443", "kind": "unknown", "backends": []}]}]});
        let text = text(&status, Style::default());
        for part in [
            "\nbalancer 10.0.0.5:443: 3 apiservers seen (10.0.0.11:6443, 10.0.0.12:6443, certificate [2J), 2 in use, 7 \
             connections\n",
            "\nbalancer 10.0.0.9:443: all connections show the same certificate and address (its apiservers share them, or \
             client IP affinity leads to one of them), so each is judged by its own /readyz; 2 connections\n",
            "\n10.0.0.10:443: no connection has reached an apiserver when it was last examined; jackstay tries again\n",
            "\nbalancer 10.0.0.6:443: its apiservers cannot be recognised, because its connections show ever new \
             certificates or addresses\n",
        ] {
            assert!(text.contains(part), "no `{part}` in\n{text}");
        }
        assert!(
            !text.contains("balancer 10.0.0.7") && !text.contains("balancer 10.0.0.8"),
            "{text}"
        );
    }

    #[test]
    fn text_malformed_balancers_do_not_panic() {
        for malformed in [json!(3), json!([1, {}, {"kind": "balancer"}, {"kind": "unreliable"}])] {
            text(&json!({"upstreams": [{"balancers": malformed}]}), Style::default());
        }
    }
}

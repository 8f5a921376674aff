//! The objects that scripts read and write.

use serde_json::{Value, json};

/// The config maps of the namespace `default`.
pub const CONFIG_MAPS: &str = "/api/v1/namespaces/default/configmaps";

/// A config map with `value` in its data.
pub fn config_map(name: &str, value: &str) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": { "name": name, "namespace": "default" },
        "data": { "v": value },
    })
}

/// The objects of the aggregated group in the namespace `default`.
pub const WIDGETS: &str = "/apis/aggregated.jackstay.test/v1/namespaces/default/widgets";

/// An object of the aggregated group.
pub fn widget(name: &str) -> Value {
    json!({
        "apiVersion": "aggregated.jackstay.test/v1",
        "kind": "Widget",
        "metadata": { "name": name, "namespace": "default" },
    })
}

//! The API groups and admission webhooks that an apiserver cannot reach, although it is healthy.

use serde_json::Value;

use super::super::table::{Tone, clean};
use super::{View, list_at, text_at};

impl View {
    /// A line for each API group that fails at an endpoint.
    pub(super) fn failing_groups(&self, upstream: &Value, out: &mut String) {
        for group in list_at(upstream, "failing_groups") {
            let name = text_at(group, "group");
            self.failing(&format!("group {name} fails"), group, out);
        }
    }

    /// A line for each admission webhook that an endpoint cannot reach.
    pub(super) fn failing_webhooks(&self, upstream: &Value, out: &mut String) {
        for webhook in list_at(upstream, "failing_webhooks") {
            let name = text_at(webhook, "webhook");
            self.failing(&format!("webhook {name} not reached"), webhook, out);
        }
    }

    fn failing(&self, what: &str, entry: &Value, out: &mut String) {
        let (endpoint, reason) = (text_at(entry, "endpoint"), text_at(entry, "reason"));
        let ago = self.ago(&entry["since"]);
        let text = format!("{what} at {endpoint}: {reason}, since {ago}");
        out.push_str(&self.style.paint(&clean(&text), Tone::Warn));
        out.push('\n');
    }
}

//! What is restricted for the watches of an upstream: API groups and parameters that are not resumed, and compression.

use serde_json::Value;

use super::super::table::{Tone, clean};
use super::{View, list_at, text_at};

impl View {
    /// A line for each group in which a watch has shown versions that are not ordered.
    pub(super) fn unordered_groups(&self, upstream: &Value, out: &mut String) {
        for group in list_at(upstream, "unordered_groups") {
            let (name, reason) = (text_at(group, "group"), text_at(group, "reason"));
            let ago = self.ago(&group["since"]);
            let text = format!("watches of group {name} not resumed: {reason}, {ago} ago");
            out.push_str(&self.style.paint(&clean(&text), Tone::Warn));
            out.push('\n');
        }
    }

    /// A line if its etcd was restored from a backup.
    pub(super) fn restore(&self, upstream: &Value, out: &mut String) {
        let restore = &upstream["restore"];
        if restore.is_null() {
            return;
        }
        let (ago, resource) = (self.ago(&restore["recognised_at"]), text_at(restore, "resource"));
        let (before, revision) = (&restore["before"], &restore["revision"]);
        let text = format!(
            "etcd restored from a backup: revision {revision}, {resource} had {before} before, {ago} ago"
        );
        out.push_str(&clean(&text));
        out.push('\n');
    }

    /// A line for each endpoint of which it cannot be read which parameters it honours.
    pub(super) fn unknown_parameters(&self, upstream: &Value, out: &mut String) {
        for endpoint in list_at(upstream, "endpoints") {
            let Some(error) = endpoint["capabilities"]["error"].as_str() else { continue };
            let address = text_at(endpoint, "address");
            let text = format!(
                "watches of shards or with unknown parameters not resumed at {address}: {error}"
            );
            out.push_str(&self.style.paint(&clean(&text), Tone::Warn));
            out.push('\n');
        }
    }

    /// A line while watches do not ask for gzip.
    pub(super) fn gzip_failure(&self, upstream: &Value, out: &mut String) {
        let failure = &upstream["gzip_failure"];
        if failure.is_null() {
            return;
        }
        let (endpoint, reason) = (text_at(failure, "endpoint"), text_at(failure, "reason"));
        let ago = self.ago(&failure["since"]);
        let text = format!("watches without gzip: {reason}, from {endpoint} {ago} ago");
        out.push_str(&self.style.paint(&clean(&text), Tone::Warn));
        out.push('\n');
    }
}

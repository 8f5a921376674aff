//! The line about the share of requests for the newest version.

use serde_json::Value;

use super::{View, text_at};
use crate::commands::status::table::Tone;

impl View {
    /// The share of requests for the newest version, if one is configured.
    pub(super) fn canary(&self, canary: &Value, out: &mut String) {
        if canary.is_null() {
            return;
        }
        let (share, state) = (text_at(canary, "share"), text_at(canary, "state"));
        let version = canary["version"].as_str().unwrap_or("a newer version");
        let mut text = format!("canary: {share} of new requests to {version}, {state}");
        if let Some(reason) = canary["reason"].as_str() {
            text.push_str(": ");
            text.push_str(reason);
        }
        let tone = if state == "withdrawn" { Tone::Warn } else { Tone::Dim };
        out.push_str(&self.style.paint(&crate::commands::status::table::clean(&text), tone));
        out.push('\n');
    }
}

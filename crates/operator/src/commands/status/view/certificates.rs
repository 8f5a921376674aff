//! Certificates and CA bundles in the text of a status.

use serde_json::Value;

use super::super::table::{Cell, Tone};
use super::{View, format_age, parse_time, text_at};

impl View {
    /// A CA bundle with expired certificates or an unusable file.
    pub(super) fn expired_ca(kind: &str, ca: &Value) -> Option<(String, Tone)> {
        let error = ca["error"].as_str()?;
        let tone = if ca["expired"] == ca["certificates"] { Tone::Bad } else { Tone::Warn };
        Some((format!("{kind} {}: {error}", text_at(ca, "file")), tone))
    }

    /// The state and the expiry of a serving certificate or an identity.
    pub(super) fn certificate(&self, kind: &str, certificate: &Value) -> Cell {
        let mut names = ["subject", "cert_file", "kubeconfig"].into_iter();
        let name = names.find_map(|key| certificate[key].as_str()).unwrap_or_default();
        let text = format!("{kind} {} {name}", text_at(certificate, "state"));
        let error = certificate["error"].as_str();
        // That of any other state says when the certificate expired, or that there is none.
        if let Some(error) = error.filter(|_| certificate["state"] != "loaded") {
            return Cell::text(format!("{text}: {error}")).tone(Tone::Warn);
        }
        let left = parse_time(&certificate["not_after"]).map(|at| at.duration_since(self.now));
        let expiry = left.map_or(String::new(), |left| {
            format!(", expires in {}", format_age(left.unwrap_or_default()))
        });
        let note = certificate["note"].as_str();
        match error.or(note) {
            Some(error) => Cell::text(format!("{text}{expiry}: {error}")).tone(Tone::Warn),
            None => Cell::text(format!("{text}{expiry}")).tone(Tone::Dim),
        }
    }
}

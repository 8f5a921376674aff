//! The keys of the admin endpoint.

use super::super::address::parse_bind;
use super::super::model::Admin;
use super::super::node::{Fields, Node};
use super::super::rules::References;
use super::super::value_error::ValueError;

/// Reads `admin`.
pub(super) fn read(mut fields: Fields<'_>, references: &mut References) -> Admin {
    let node = fields.get("bind");
    let bind = node.parse("text: an address such as 127.0.0.1:9643", parse_bind);
    if let Some(bind) = bind {
        if !bind.ip().is_loopback() {
            let message = "not a loopback address: every host that can connect to it can read \
                           status and metrics; admin.metrics_bind serves the metrics alone, to authorised clients";
            node.warn(message);
        }
        references.binds.push((node.path, bind));
    }
    let bind = bind.unwrap_or(([127, 0, 0, 1], 0).into());
    let mut admin = Admin::new(bind, fields.get("socket").file());
    read_metrics(&mut fields, &mut admin, references);
    fields.finish();
    admin
}

/// The keys of `metrics_bind`, which make sense together only.
fn read_metrics(fields: &mut Fields<'_>, admin: &mut Admin, references: &mut References) {
    let bind = fields.get("metrics_bind");
    let (cert, key) = (fields.get("metrics_cert_file"), fields.get("metrics_key_file"));
    let (ca, name) = (fields.get("metrics_client_ca_file"), fields.get("metrics_client_name"));
    let upstream = fields.get("metrics_review_upstream");
    let is_bound = bind.text() != Some("");
    admin.metrics_bind = if is_bound {
        bind.parse("text: an address such as 0.0.0.0:9646", parse_bind)
    } else {
        None
    };
    (admin.metrics_cert_file, admin.metrics_key_file) = (cert.file(), key.file());
    admin.metrics_client_ca_file = ca.file();
    (admin.metrics_client_name, admin.metrics_review_upstream) = (text(&name), text(&upstream));
    if !is_bound {
        for node in [&cert, &key, &ca, &name, &upstream] {
            if node.text().is_some_and(|text| !text.is_empty()) {
                node.error("has no effect without admin.metrics_bind");
            }
        }
        return;
    }
    if let Some(address) = admin.metrics_bind {
        references.binds.push((bind.path.clone(), address));
    }
    for (node, file) in [(&cert, &admin.metrics_cert_file), (&key, &admin.metrics_key_file)] {
        if file.is_none() {
            node.error("is required with admin.metrics_bind: the metrics are served over TLS only");
        }
    }
    if admin.metrics_client_name.is_some() && admin.metrics_client_ca_file.is_none() {
        ca.error("is required with admin.metrics_client_name: the CA of these client certificates");
    }
    if admin.metrics_client_name.is_none() && admin.metrics_review_upstream.is_none() {
        bind.error(
            "needs admin.metrics_review_upstream (reviews of tokens) or admin.metrics_client_ca_file with \
             admin.metrics_client_name (a client certificate): nobody could read the metrics",
        );
    }
    if let Some(name) = &admin.metrics_review_upstream {
        references.upstreams.push((upstream.path.clone(), name.clone()));
        // The tokens of clients go only to servers that are verified.
        references.terminated.push(name.clone());
    }
}

fn text(node: &Node<'_>) -> Option<String> {
    let text = node.parse("text", |text| Ok::<_, ValueError>(text.to_owned()))?;
    Some(text).filter(|text| !text.is_empty())
}

//! The admission webhooks that an endpoint of one upstream cannot reach, as its responses say.
//!
//! jackstay only names them: other webhooks have been called for such a request already, and half of the objects of a
//! deletecollection may be gone, so the request is not sent again.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use jackstay_core::group_health::{reason, unreachable_webhook};
use jackstay_sys::clock;
use jackstay_sys::utc::{Utc, wall_clock};
use serde::Serialize;

use super::endpoint::Endpoint;
use crate::observe::Reporter;
use crate::observe::events::{Change, EventKind};

/// Maximum number of pairs of webhook and endpoint that are remembered.
const MAX: usize = 64;
/// How long a webhook is named after the last response that names it.
const MEMORY: Duration = Duration::from_secs(60);

/// The webhooks of one upstream. Workers write rarely: only after a response with status 500.
#[derive(Debug, Default)]
pub struct UnreachableWebhooks(Mutex<Vec<Entry>>);

#[derive(Debug)]
struct Entry {
    webhook: Box<str>,
    endpoint: Arc<str>,
    reason: Box<str>,
    since: String,
    last: Instant,
    failures: u64,
}

/// A webhook that an endpoint cannot reach, for `/status`.
#[derive(Debug, Clone, Serialize)]
pub struct UnreachableWebhook {
    webhook: Box<str>,
    /// The address of the endpoint.
    endpoint: Box<str>,
    /// The message of the apiserver.
    reason: Box<str>,
    /// When a response first said so, RFC 3339.
    since: String,
    /// Number of responses since then.
    failures: u64,
}

impl UnreachableWebhooks {
    /// Takes in the body of a response with status 500.
    pub fn look_at(&self, body: &[u8], endpoint: &Endpoint, to: Reporter<'_>) {
        let Some((webhook, message)) = unreachable_webhook(body) else { return };
        let (now, message) = (clock::now(), reason(message));
        let mut entries = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        entries.retain(|entry| now < entry.last + MEMORY);
        let is_same =
            |entry: &&mut Entry| *entry.webhook == *webhook && entry.endpoint == endpoint.label;
        if let Some(known) = entries.iter_mut().find(is_same) {
            (known.last, known.reason) = (now, message.into());
            known.failures += 1;
            return;
        }
        if entries.len() >= MAX {
            return;
        }
        entries.push(Entry {
            webhook: webhook.into(),
            endpoint: Arc::clone(&endpoint.label),
            reason: message.as_str().into(),
            since: Utc(wall_clock()).seconds(),
            last: now,
            failures: 1,
        });
        drop(entries);
        to.metrics.events().changed(&Change {
            kind: EventKind::Webhook,
            upstream: Some(to.upstream),
            name: &format!("{webhook} at {}", endpoint.label),
            detail: "",
            from: "reached",
            to: "unreachable",
            reason: &message,
            effect: "requests that the apiserver rejects for this are forwarded, not repeated",
            bad: true,
        });
    }

    /// The webhooks that responses of the last minute name.
    pub fn list(&self) -> Vec<UnreachableWebhook> {
        let now = clock::now();
        let entries = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let named = entries.iter().filter(|entry| now < entry.last + MEMORY);
        let shown = named.map(|entry| UnreachableWebhook {
            webhook: entry.webhook.clone(),
            endpoint: (&*entry.endpoint).into(),
            reason: entry.reason.clone(),
            since: entry.since.clone(),
            failures: entry.failures,
        });
        shown.collect()
    }
}
